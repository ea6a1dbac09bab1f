// Products for many rows. A block: 256 rows of W and 128 tokens (EXACT: 64), or 128 rows and 256 tokens. Weights are the A operand in registers,
// activations lie in shared memory. EXACT: bf16 pairs of both, plain mma; else high parts only, warpgroup products.

#define STAGE 64   // columns a stage
#if EXACT
#define TN 64
#define STAGES 4
#else
#define TN 128
#if HAS(F32)
#error "wide models with float32 matrices are compiled EXACT"
#endif
#endif

// Where a block stands: which matrix, rows of W, tokens.
struct Place { const U4* data; const float* scale; int tile0, group, start, token0, count, stages; long head_x; };

// Four neighbouring columns of an output row.
__device__ __forceinline__ void write_quad(const Job& job, long at, int column, const F4& v) {
    const float value[4] = {v.x, v.y, v.z, v.w};
    if (column + 4 <= job.rows && (at & 3) == 0) {
        if (job.out == OUT_F32) {
            if (((u64)job.y & 15) == 0) { *(F4*)(job.y + at) = v; return; }
        } else if (!job.y_low) {
            u16* to = job.y_high + in_product_order(at);
            *(u32*)to = pack_bf16(v.x, v.y);
            *(u32*)(to + 8) = pack_bf16(v.z, v.w);
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (column + i < job.rows) {
            if (job.out == OUT_F32) job.y[at + i] = value[i];
            else store_split(job.y_high, job.y_low, at + i, value[i]);
        }
}

// Sums go through shared memory, so that what leaves is contiguous and the code stays small. A block has 8 warps x TILES tiles of W, TOKENS tokens.
template <int TOKENS, int TILES>
__device__ __forceinline__ void write_sums(const Jobs& jobs, const Job& job, const Place& at, float (*c)[TOKENS / 8][4], float* sums) {
    constexpr int ROWS = 128 * TILES, ROW_SUMS = ROWS + 4;  // floats of a token's sums, with room between banks
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, first = (threadIdx.x >> 5) * 16 * TILES;
    BARRIER(1, 256);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[(n * 8 + 2 * t + (j & 1)) * ROW_SUMS + first + i * 16 + g + (j >> 1) * 8] = c[i][n][j];
    BARRIER(1, 256);
    const int tile_first = at.tile0 - (first >> 4), tall = min(ROWS / 16, job.tiles - tile_first) * 16;
    if (job.out == OUT_SWIGLU) {
        constexpr int QUADS = ROWS / 8;
        const int quad = threadIdx.x % QUADS, row = (quad >> 1) * 16 + (quad & 1) * 4, column = tile_first * 8 + quad * 4;
        if (row < tall && column < job.rows)
#pragma unroll 2
            for (int token = threadIdx.x / QUADS; token < at.count; token += 256 / QUADS) {
                const F4 gate = *(const F4*)(sums + token * ROW_SUMS + row), up = *(const F4*)(sums + token * ROW_SUMS + row + 8);
                const F4 v = {clamped_swiglu(gate.x, up.x, job.limit), clamped_swiglu(gate.y, up.y, job.limit), clamped_swiglu(gate.z, up.z, job.limit),
                              clamped_swiglu(gate.w, up.w, job.limit)};
                write_quad(job, (long)mapped_row(job.y_map, at.token0 + token, at.start, jobs) * job.ldy + column, column, v);
            }
        return;
    }
    constexpr int QUADS = ROWS / 4;
    const int row = threadIdx.x % QUADS * 4, column = tile_first * 16 + row;
    if (row < tall && column < job.rows)
#pragma unroll 2
        for (int token = threadIdx.x / QUADS; token < at.count; token += 256 / QUADS)
            write_quad(job, (long)mapped_row(job.y_map, at.token0 + token, at.start, jobs) * job.ldy + at.group * job.y_stride + column, column,
                       *(const F4*)(sums + token * ROW_SUMS + row));
}

#if EXACT
// This lane's raw fragments of one stage of a 16-row tile.
struct Stage { U4 p[HAS(F32) ? 8 : 4]; float top, bottom; };

__device__ __forceinline__ void load_stage(Stage& w, const U4* data, const float* scale, int format, long tile, int granules, int stage, int lane) {
    const int g = lane >> 2;
    if (HAS(INT4) && format == INT4) {
        long at = tile * granules + (stage >> 2);
        const U2* half = (const U2*)(data + at * 128 + ((stage >> 1) & 1) * 64 + lane) + (stage & 1);
        U2 top = half[0], bottom = half[64];
        w.p[0].x = top.x; w.p[0].y = top.y; w.p[1].x = bottom.x; w.p[1].y = bottom.y;
        w.top = scale[(at * 16 + g) * 4 + (stage & 3)];
        w.bottom = scale[(at * 16 + 8 + g) * 4 + (stage & 3)];
    } else if ((HAS(INT8) && format == INT8) || (HAS(FP8) && format == FP8)) {
        long at = tile * granules + (stage >> 1);
        const U4* piece = data + at * 128 + (stage & 1) * 64 + lane;
        w.p[0] = piece[0]; w.p[1] = piece[32];
        w.top = format == FP8 ? scale[2 * at] : scale[tile * 16 + g];
        w.bottom = format == FP8 ? scale[2 * at + 1] : scale[tile * 16 + 8 + g];
    } else if (!HAS(F32) || format == BF16) {
        const U4* piece = data + (tile * granules + stage) * 128 + lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) w.p[i] = piece[32 * i];
    }
#if HAS(F32)
    else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            U4 z = {0, 0, 0, 0};
            w.p[i] = 2 * stage + (i >> 2) < granules ? (data + (tile * granules + 2 * stage + (i >> 2)) * 128 + lane)[32 * (i & 3)] : z;
        }
    }
#endif
}
// Scales folded into the weights, rounded to bf16 (`low`: the rest as a second bf16).
__device__ __forceinline__ void scaled(u32 (*a)[4], u32 (*low)[4], float top, float bottom) {
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float k = (i & 1) ? bottom : top, p = low_bf16(a[s][i]) * k, q = high_bf16(a[s][i]) * k;
            a[s][i] = pack_bf16(p, q);
            low[s][i] = pack_bf16(p - low_bf16(a[s][i]), q - high_bf16(a[s][i]));
        }
}
// The two k-steps of unit u (0 or 1) of a stage.
__device__ __forceinline__ void unit_fragments(const Stage& w, int format, int u, u32 (*a)[4], u32 (*low)[4]) {
    if (HAS(INT4) && format == INT4) {
        int4_unit(u ? w.p[0].y : w.p[0].x, u ? w.p[1].y : w.p[1].x, a);
        scaled(a, low, w.top, w.bottom);
    } else if ((HAS(INT8) && format == INT8) || (HAS(FP8) && format == FP8)) {
        u32 t0 = u ? w.p[0].z : w.p[0].x, t1 = u ? w.p[0].w : w.p[0].y, b0 = u ? w.p[1].z : w.p[1].x, b1 = u ? w.p[1].w : w.p[1].y;
        if (HAS(INT8) && format == INT8) byte_unit<INT8>(t0, t1, b0, b1, a);
        else if (HAS(FP8)) byte_unit<FP8>(t0, t1, b0, b1, a);
        scaled(a, low, w.top, w.bottom);
    } else if (!HAS(F32) || format == BF16) {
        bf16_unit(u ? w.p[2] : w.p[0], u ? w.p[3] : w.p[1], a);
#pragma unroll
        for (int i = 0; i < 8; ++i) low[i >> 2][i & 3] = 0;
    }
#if HAS(F32)
    else {
        f32_step(u ? w.p[4] : w.p[0], u ? w.p[5] : w.p[1], a[0], low[0]);
        f32_step(u ? w.p[6] : w.p[2], u ? w.p[7] : w.p[3], a[1], low[1]);
    }
#endif
}

// Shared memory: [stage][high, low][unit][token][32].
template <int TOKENS, int TILES> __device__ __forceinline__ void multiply(const Jobs& jobs, const Job& job, const Place& at, u16* tiles) {
    constexpr int NT = TN / 8, STAGE_SIZE = 4 * TN * 32;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, format = job.format;
    auto fetch = [&](int stage) {
        u16* to = tiles + (stage % STAGES) * STAGE_SIZE;
        for (int i = threadIdx.x; i < TN * 8; i += 256) {
            const int token = i >> 3, piece = i & 7;
            const bool there = stage < at.stages && token < at.count;
            const long from = there ? (long)mapped_row(job.x_map, at.token0 + token, at.start, jobs) * job.ldx + at.head_x + stage * STAGE + piece * 8 : 0;
            u16* into = to + ((piece >> 2) * TN + token) * 32 + (piece & 3) * 8;
            copy16_async(into, job.x_high + from, there);
            copy16_async(into + 2 * TN * 32, job.x_low + from, there);
        }
        copies_commit();
    };
    float c[2][NT][4];
#pragma unroll
    for (int i = 0; i < 2 * NT * 4; ++i) c[i / (NT * 4)][i / 4 % NT][i % 4] = 0.0f;
    const bool busy = at.tile0 < job.tiles;
    Stage now[2], next[2];
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch(s);
    if (busy)
#pragma unroll
        for (int i = 0; i < 2; ++i) load_stage(next[i], at.data, at.scale, format, min(at.tile0 + i, job.tiles - 1), job.granules, 0, lane);
    for (int stage = 0; stage < at.stages; ++stage) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch(stage + STAGES - 1);
        if (!busy) continue;
        now[0] = next[0]; now[1] = next[1];
        if (stage + 1 < at.stages)
#pragma unroll
            for (int i = 0; i < 2; ++i) load_stage(next[i], at.data, at.scale, format, min(at.tile0 + i, job.tiles - 1), job.granules, stage + 1, lane);
        const u16* x = tiles + (stage % STAGES) * STAGE_SIZE;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            u32 a[2][2][4], low[2][2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) unit_fragments(now[i], format, u, a[i], low[i]);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const U4 xh = *(const U4*)(x + (u * TN + n * 8 + g) * 32 + t * 8), xl = *(const U4*)(x + ((2 + u) * TN + n * 8 + g) * 32 + t * 8);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    mma(c[i][n], a[i][0], xh.x, xh.y); mma(c[i][n], a[i][1], xh.z, xh.w);
                    mma(c[i][n], a[i][0], xl.x, xl.y); mma(c[i][n], a[i][1], xl.z, xl.w);
                    mma(c[i][n], low[i][0], xh.x, xh.y); mma(c[i][n], low[i][1], xh.z, xh.w);
                }
            }
        }
    }
    copies_wait<0>();
    write_sums<TN, 2>(jobs, job, at, c, (float*)tiles);
}
#else
#define CONSUMERS 256
template <int TOKENS, int TILES> struct Rings {  // shared memory of a block: activations [X_STAGES][token][64] bf16, swizzled; weights [units][tile][unit]
    static constexpr int X_BYTES = TOKENS * STAGE * 2, X_STAGES = TOKENS == 256 ? 4 : 6, W_TILES = 8 * TILES, W_BYTES = 2 * W_TILES * 4096, W_UNITS = 8;
};
// A unit is 128 columns of a tile as they are stored: that many bytes. The ring holds two units of bf16, four of bytes, eight of int4.
__device__ __forceinline__ int unit_bytes(int format) { return HAS(INT4) && format == INT4 ? 1024 : format == BF16 ? 4096 : 2048; }

struct Scales { float top, bottom; };
__device__ __forceinline__ Scales stage_scales(const float* scale, int format, long tile, int granules, int stage, int lane) {
    Scales s = {1.0f, 1.0f};
    if (HAS(INT4) && format == INT4) {
        const long at = ((tile * granules + (stage >> 2)) * 16 + (lane >> 2)) * 4 + (stage & 3);
        s.top = scale[at]; s.bottom = scale[at + 32];
    } else if (HAS(FP8) && format == FP8) {
        const long at = 2 * (tile * granules + (stage >> 1));
        s.top = scale[at]; s.bottom = scale[at + 1];
    }
    return s;
}
// The A operands of the four k-steps of a stage of unit `w`; scales within a row are folded in (those of whole rows wait for the end).
__device__ __forceinline__ void stage_fragments(const U4* w, int format, int stage, const Scales& scale, int lane, u32 (*a)[4]) {
    const int odd = stage & 1;
    if (HAS(INT4) && format == INT4) {
        const U2 top = ((const U2*)(w + lane))[odd], bottom = ((const U2*)(w + 32 + lane))[odd];
        int4_unit(top.x, bottom.x, a);
        int4_unit(top.y, bottom.y, a + 2);
    } else if ((HAS(INT8) && format == INT8) || (HAS(FP8) && format == FP8)) {
        const U4 top = w[64 * odd + lane], bottom = w[64 * odd + 32 + lane];
        if (HAS(INT8) && format == INT8) {
            byte_unit<INT8>(top.x, top.y, bottom.x, bottom.y, a);
            byte_unit<INT8>(top.z, top.w, bottom.z, bottom.w, a + 2);
        } else if (HAS(FP8)) {
            byte_unit<FP8>(top.x, top.y, bottom.x, bottom.y, a);
            byte_unit<FP8>(top.z, top.w, bottom.z, bottom.w, a + 2);
        }
    } else {
        const U4* half = w + 128 * odd + lane;
        bf16_unit(half[0], half[32], a);
        bf16_unit(half[64], half[96], a + 2);
    }
    if ((HAS(INT4) && format == INT4) || (HAS(FP8) && format == FP8)) {
        const u32 top = pack_bf16(scale.top, scale.top), bottom = pack_bf16(scale.bottom, scale.bottom);
#pragma unroll
        for (int i = 0; i < 16; ++i) a[i >> 2][i & 3] = scaled_pair(a[i >> 2][i & 3], (i & 1) ? bottom : top);
    }
}

// Barriers of the rings: filled by the copy engine, emptied by the eight warps that multiply.
template <int TOKENS, int TILES> struct Gates {
    typedef Rings<TOKENS, TILES> R;
    u64 x_full[R::X_STAGES], x_empty[R::X_STAGES], w_full[R::W_UNITS], w_empty[R::W_UNITS];
};

// The warp that keeps the rings full.
template <int TOKENS, int TILES> __device__ __forceinline__ void copy_operands(const Job& job, const TensorMap* map, const Place& at, char* memory, Gates<TOKENS, TILES>& gates) {
    typedef Rings<TOKENS, TILES> R;
    const int lane = threadIdx.x & 31, format = job.format, unit = unit_bytes(format), units = R::W_BYTES / R::W_TILES / unit;
    const int row = job.x_map == MAP_SORTED ? at.start : at.token0;
    const long tile = min(at.tile0 + lane, job.tiles - 1);
    char* weights = memory + R::X_STAGES * R::X_BYTES;
    for (int stage = 0; stage < at.stages; ++stage) {
        if ((stage & 1) == 0) {
            const int number = stage >> 1, place = number % units;
            const long from = format == INT4 ? (tile * job.granules + (number >> 1)) * 2048 + (number & 1) * 1024
                              : format == BF16 ? (tile * job.granules + 2 * number) * 2048 : (tile * job.granules + number) * 2048;
            const int bytes = format == BF16 && 2 * number + 1 == job.granules ? 2048 : unit;
            if (number >= units) barrier_wait(&gates.w_empty[place], (number / units - 1) & 1);
            if (lane == 0) barrier_expect(&gates.w_full[place], R::W_TILES * bytes);
            __syncwarp();
            if (lane < R::W_TILES) bulk_copy(weights + (place * R::W_TILES + lane) * unit, (const char*)at.data + from, bytes, &gates.w_full[place]);
        }
        const int place = stage % R::X_STAGES;
        if (stage >= R::X_STAGES) barrier_wait(&gates.x_empty[place], (stage / R::X_STAGES - 1) & 1);
        if (lane == 0) {
            barrier_expect(&gates.x_full[place], R::X_BYTES);
            tile_copy(memory + place * R::X_BYTES, map, (int)at.head_x + stage * STAGE, row, &gates.x_full[place]);
        }
    }
}

// The two warpgroups that multiply, each its own rows of W.
template <int TOKENS, int TILES> __device__ __forceinline__ void multiply(const Jobs& jobs, const Job& job, const Place& at, char* memory, Gates<TOKENS, TILES>& gates) {
    typedef Rings<TOKENS, TILES> R;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, format = job.format, unit = unit_bytes(format), units = R::W_BYTES / R::W_TILES / unit;
    const char* weights = memory + R::X_STAGES * R::X_BYTES + warp * TILES * unit;
    long tile[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) tile[i] = min(at.tile0 + i, job.tiles - 1);
    float c[TILES][TOKENS / 8][4];
#pragma unroll
    for (int i = 0; i < TILES * TOKENS / 2; ++i) c[i / (TOKENS / 2)][i / 4 % (TOKENS / 8)][i % 4] = 0.0f;
    Scales scale[TILES];
    auto read_scales = [&](int stage) {
        if (stage < at.stages)
#pragma unroll
            for (int i = 0; i < TILES; ++i) scale[i] = stage_scales(at.scale, format, tile[i], job.granules, stage, lane);
    };
    auto prepare = [&](int stage, u32 (*a)[4][4]) {
        const int number = stage >> 1, place = number % units;
        if ((stage & 1) == 0) barrier_wait(&gates.w_full[place], (number / units) & 1);
#pragma unroll
        for (int i = 0; i < TILES; ++i) stage_fragments((const U4*)(weights + (place * R::W_TILES + i) * unit), format, stage, scale[i], lane, a[i]);
        read_scales(stage + 1);
        __syncwarp();
        if (lane == 0 && ((stage & 1) || stage + 1 == at.stages)) barrier_arrive(&gates.w_empty[place]);
    };
    auto step = [&](int stage, const u32 (*a)[4][4], u32 (*next)[4][4]) {  // the weights of the next stage are prepared under the products of this one
        const int place = stage % R::X_STAGES;
        barrier_wait(&gates.x_full[place], (stage / R::X_STAGES) & 1);
        const u16* x = (const u16*)(memory + place * R::X_BYTES);
        warpgroup_begin();
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                if (TOKENS == 256) warpgroup_mma_256(c[i], a[i][s], x, s);
                else warpgroup_mma(c[i], a[i][s], x, s);
            }
        warpgroup_commit();
        if (stage + 1 < at.stages) prepare(stage + 1, next);
        warpgroup_wait();
        if (lane == 0) barrier_arrive(&gates.x_empty[place]);
    };
    u32 even[TILES][4][4], odd[TILES][4][4];
    read_scales(0);
    prepare(0, even);
#pragma unroll 1
    for (int stage = 0; stage < at.stages; stage += 2) {
        step(stage, even, odd);
        if (stage + 1 < at.stages) step(stage + 1, odd, even);
    }
    if (HAS(INT8) && format == INT8) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const float top = at.scale[tile[i] * 16 + (lane >> 2)], bottom = at.scale[tile[i] * 16 + 8 + (lane >> 2)];
#pragma unroll
            for (int n = 0; n < TOKENS / 8; ++n) { c[i][n][0] *= top; c[i][n][1] *= top; c[i][n][2] *= bottom; c[i][n][3] *= bottom; }
        }
    }
    write_sums<TOKENS, TILES>(jobs, job, at, c, (float*)memory);
}
#endif

// Where this block stands; false: nowhere (there are fewer groups of experts than there could be). Blocks of one expert follow each other, so that its
// activations stay in the cache; of a whole matrix, those of the same rows.
template <int TOKENS, int TILES> __device__ __forceinline__ bool find_place(const Jobs& jobs, const Job& job, Place& at) {
    const int row_blocks = (job.tiles + 8 * TILES - 1) / (8 * TILES), local = blockIdx.x - job.first_block;
    const int token_tile = job.table ? local / row_blocks : local % job.token_tiles, rest = job.table ? local % row_blocks : local / job.token_tiles;
    at.group = rest / row_blocks;
    at.tile0 = (rest % row_blocks) * 8 * TILES;
    const int columns = job.format == INT4 ? 256 : job.format == BF16 ? 64 : job.format == F32 ? 32 : 128;
    at.stages = (job.granules * columns + STAGE - 1) / STAGE;
    if (job.table) {
        if (token_tile >= jobs.groups[0]) return false;
        const int* group = jobs.groups + 4 + 4 * token_tile;
        at.start = group[1]; at.count = group[2]; at.token0 = 0; at.head_x = 0;
        at.data = (const U4*)job.table[group[0] * 4 + job.which * 2];
        at.scale = (const float*)job.table[group[0] * 4 + job.which * 2 + 1];
    } else {
        at.start = 0; at.token0 = token_tile * TOKENS; at.count = min(TOKENS, jobs.rows - at.token0); at.head_x = at.group * job.x_stride;
        at.data = job.data + at.group * job.data_stride;
        at.scale = job.scale + at.group * job.scale_stride;
    }
    return true;
}
__device__ __forceinline__ int job_of_block(const Jobs& jobs) {
    int index = 0;
    while (index + 1 < jobs.count && (int)blockIdx.x >= jobs.job[index + 1].first_block) ++index;
    return index;
}
struct Maps { TensorMap map[6]; };  // of the activations of every job; EXACT reads them by address

#if EXACT
KERNEL __launch_bounds__(256, 1) gemm(const __grid_constant__ Jobs jobs, const __grid_constant__ Maps maps) {
    DYNAMIC_SHARED(u16, tiles);
    WAIT_BEFORE();
    const Job& job = jobs.job[job_of_block(jobs)];
    Place at;
    if (!find_place<TN, 2>(jobs, job, at)) return;
    at.tile0 += 2 * (threadIdx.x >> 5);
    multiply<TN, 2>(jobs, job, at, tiles);
}
#else
template <int TOKENS, int TILES> __device__ __forceinline__ void gemm_block(const Jobs& jobs, const Maps& maps) {
    typedef Rings<TOKENS, TILES> R;
    DYNAMIC_SHARED(char, bytes);
    __shared__ __align__(8) Gates<TOKENS, TILES> gates;
    char* memory = (char*)(((u64)bytes + 1023) & ~(u64)1023);
    if (threadIdx.x == 0) {
        for (int i = 0; i < R::X_STAGES; ++i) { barrier_init(&gates.x_full[i], 1); barrier_init(&gates.x_empty[i], CONSUMERS / 32); }
        for (int i = 0; i < R::W_UNITS; ++i) { barrier_init(&gates.w_full[i], 1); barrier_init(&gates.w_empty[i], CONSUMERS / 32); }
        barriers_ready();
    }
    WAIT_BEFORE();
    const int index = job_of_block(jobs);
    const Job& job = jobs.job[index];
    Place at;
    if (!find_place<TOKENS, TILES>(jobs, job, at)) return;
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        fewer_registers<24>();
        if (threadIdx.x < CONSUMERS + 32) copy_operands<TOKENS, TILES>(job, &maps.map[index], at, memory, gates);
    } else {
        more_registers<240>();
        at.tile0 += TILES * (threadIdx.x >> 5);
        multiply<TOKENS, TILES>(jobs, job, at, memory, gates);
    }
}
KERNEL __launch_bounds__(CONSUMERS + 128, 1) gemm(const __grid_constant__ Jobs jobs, const __grid_constant__ Maps maps) { gemm_block<TN, 2>(jobs, maps); }
KERNEL __launch_bounds__(CONSUMERS + 128, 1) gemm_long(const __grid_constant__ Jobs jobs, const __grid_constant__ Maps maps) { gemm_block<256, 1>(jobs, maps); }
#endif
