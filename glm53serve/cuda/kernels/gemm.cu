// Products for many rows. A block: 256 rows of W and 128 tokens (EXACT: 64), or 128 rows and 256 tokens. Weights are the A operand in registers,
// activations pass through shared memory. EXACT: bf16 pairs of both, plain mma; else high parts only, warpgroup products.

#define STAGE 64   // columns a stage
#if EXACT
#define TN 64
#define STAGES 4
#else
#define TN 128
#define STAGES 4
#if HAS(F32)
#error "wide models with float32 matrices are compiled EXACT"
#endif
#endif

// Where a block stands: which matrix, rows of W, tokens.
struct Place { const U4* data; const float* scale; int tile0, group, start, token0, count, stages; long head_x; };

// Sums go through shared memory, so that what leaves is contiguous and the code stays small. A block has 8 warps x TILES tiles of W, TOKENS tokens.
template <int TOKENS, int TILES>
__device__ __forceinline__ void write_sums(const Jobs& jobs, const Job& job, const Place& at, float (*c)[TOKENS / 8][4], float* sums) {
    constexpr int ROWS = 128 * TILES, ROW_SUMS = ROWS + 4, AT_ONCE = 256 / ROWS;  // floats of a token's sums, with room between banks
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, first = (threadIdx.x >> 5) * 16 * TILES;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[(n * 8 + 2 * t + (j & 1)) * ROW_SUMS + first + i * 16 + g + (j >> 1) * 8] = c[i][n][j];
    __syncthreads();
    const int tile_first = at.tile0 - (first >> 4), tall = min(ROWS / 16, job.tiles - tile_first) * 16;
    if (job.out == OUT_SWIGLU) {
        for (int token = threadIdx.x / (ROWS / 2); token < at.count; token += 2 * AT_ONCE) {
            const int column = threadIdx.x % (ROWS / 2), row = (column >> 3) * 16 + (column & 7);
            if (row >= tall) continue;
            const float* from = sums + token * ROW_SUMS + row;
            write_output(job, at.group, mapped_row(job.y_map, at.token0 + token, at.start, jobs), tile_first + (row >> 4), row & 15, from[0], from[8]);
        }
        return;
    }
    const int row = threadIdx.x % ROWS;
    if (row < tall)
#pragma unroll 4
        for (int token = threadIdx.x / ROWS; token < at.count; token += AT_ONCE)
            write_output(job, at.group, mapped_row(job.y_map, at.token0 + token, at.start, jobs), tile_first + (row >> 4), row & 15, sums[token * ROW_SUMS + row], 0.0f);
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
#define PIECES 4  // 16-byte pieces of raw weights a lane has of a tile in a stage, at most

// This lane's weights of a stage of a tile, on their way to shared memory (each lane reads back what it copied).
__device__ __forceinline__ void fetch_weights(U4* to, const U4* data, int format, long tile, int granules, int stage, int lane) {
    if (HAS(INT4) && format == INT4) {
        const U2* half = (const U2*)(data + (tile * granules + (stage >> 2)) * 128 + ((stage >> 1) & 1) * 64 + lane) + (stage & 1);
        copy8_async(&to[lane].x, half);
        copy8_async(&to[lane].z, half + 64);
    } else if ((HAS(INT8) && format == INT8) || (HAS(FP8) && format == FP8)) {
        const U4* piece = data + (tile * granules + (stage >> 1)) * 128 + (stage & 1) * 64 + lane;
        copy16_async(to + lane, piece, true);
        copy16_async(to + 32 + lane, piece + 32, true);
    } else {
        const U4* piece = data + (tile * granules + stage) * 128 + lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) copy16_async(to + 32 * i + lane, piece + 32 * i, true);
    }
}
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
// The A operands of a stage's four k-steps; scales within a row are folded in (those of whole rows wait for the end).
__device__ __forceinline__ void stage_fragments(const U4* w, int format, const Scales& scale, int lane, u32 (*a)[4]) {
    if (HAS(INT4) && format == INT4) {
        const U4 v = w[lane];
        int4_unit(v.x, v.z, a);
        int4_unit(v.y, v.w, a + 2);
    } else if ((HAS(INT8) && format == INT8) || (HAS(FP8) && format == FP8)) {
        const U4 top = w[lane], bottom = w[32 + lane];
        if (HAS(INT8) && format == INT8) {
            byte_unit<INT8>(top.x, top.y, bottom.x, bottom.y, a);
            byte_unit<INT8>(top.z, top.w, bottom.z, bottom.w, a + 2);
        } else if (HAS(FP8)) {
            byte_unit<FP8>(top.x, top.y, bottom.x, bottom.y, a);
            byte_unit<FP8>(top.z, top.w, bottom.z, bottom.w, a + 2);
        }
    } else {
        bf16_unit(w[lane], w[32 + lane], a);
        bf16_unit(w[64 + lane], w[96 + lane], a + 2);
    }
    if ((HAS(INT4) && format == INT4) || (HAS(FP8) && format == FP8)) {
        const u32 top = pack_bf16(scale.top, scale.top), bottom = pack_bf16(scale.bottom, scale.bottom);
#pragma unroll
        for (int i = 0; i < 16; ++i) a[i >> 2][i & 3] = scaled_pair(a[i >> 2][i & 3], (i & 1) ? bottom : top);
    }
}

// Shared memory: activations [stage][token][64], swizzled, in product order; weights [stage][tile of the block][PIECES][32 lanes] U4.
// Two stages a barrier: handing shared memory over to the tensor cores waits for every copy under way, so it must be rare. One warpgroup prepares
// its first weights before the barrier, the other after it: from then on the arithmetic of one runs under the products of the other.
template <int TOKENS, int TILES> __device__ __forceinline__ void multiply(const Jobs& jobs, const Job& job, const Place& at, u16* tiles) {
    constexpr int STAGE_SIZE = TOKENS * STAGE;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, format = job.format;
    U4* weights = (U4*)(tiles + STAGES * STAGE_SIZE) + warp * TILES * PIECES * 32;
    const u16* from[TOKENS / 32];  // a thread copies these pieces a stage, each of its own token row: the rows are looked up once
#pragma unroll
    for (int i = 0; i < TOKENS / 32; ++i) {
        const int token = (threadIdx.x >> 3) + 32 * i;
        from[i] = token < at.count ? job.x_high + (long)mapped_row(job.x_map, at.token0 + token, at.start, jobs) * job.ldx + at.head_x + (threadIdx.x & 7) * 8 : nullptr;
    }
    long tile[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) tile[i] = min(at.tile0 + i, job.tiles - 1);
    auto fetch = [&](int stage) {
        u16* to = tiles + (stage % STAGES) * STAGE_SIZE;
#pragma unroll
        for (int i = 0; i < TOKENS / 32; ++i) {
            const int token = (threadIdx.x >> 3) + 32 * i;
            const bool there = stage < at.stages && from[i];
            copy16_async(to + token * STAGE + (((threadIdx.x & 7) ^ (token & 7)) * 8), there ? from[i] + stage * STAGE : job.x_high, there);
        }
        if (stage < at.stages)
#pragma unroll
            for (int i = 0; i < TILES; ++i) fetch_weights(weights + ((stage % STAGES) * 8 * TILES + i) * PIECES * 32, at.data, format, tile[i], job.granules, stage, lane);
        copies_commit();
    };
    float c[TILES][TOKENS / 8][4];
#pragma unroll
    for (int i = 0; i < TILES * TOKENS / 2; ++i) c[i / (TOKENS / 2)][i / 4 % (TOKENS / 8)][i % 4] = 0.0f;
    u32 a[TILES][4][4];
    Scales scale[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) scale[i] = stage_scales(at.scale, format, tile[i], job.granules, 0, lane);
    auto prepare = [&](int stage) {
        Scales next[TILES];
        if (stage + 1 < at.stages)
#pragma unroll
            for (int i = 0; i < TILES; ++i) next[i] = stage_scales(at.scale, format, tile[i], job.granules, stage + 1, lane);
#pragma unroll
        for (int i = 0; i < TILES; ++i) stage_fragments(weights + ((stage % STAGES) * 8 * TILES + i) * PIECES * 32, format, scale[i], lane, a[i]);
        if (stage + 1 < at.stages)
#pragma unroll
            for (int i = 0; i < TILES; ++i) scale[i] = next[i];
    };
    fetch(0);
    fetch(1);
    const bool late = warp >= 4;
    for (int pair = 0; pair < at.stages; pair += 2) {
        copies_wait<0>();
        if (late) prepare(pair);
        shared_to_tensor_cores();
        __syncthreads();
        fetch(pair + 2);
        fetch(pair + 3);
#pragma unroll 1
        for (int stage = pair; stage < min(pair + 2, at.stages); ++stage) {
            if (!late || stage > pair) prepare(stage);
            const u16* x = tiles + (stage % STAGES) * STAGE_SIZE;
            warpgroup_begin();
#pragma unroll
            for (int s = 0; s < 4; ++s)
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    if (TOKENS == 256) warpgroup_mma_256(c[i], a[i][s], x, s);
                    else warpgroup_mma(c[i], a[i][s], x, s);
                }
            warpgroup_commit();
            warpgroup_wait();
        }
    }
    copies_wait<0>();
    if (HAS(INT8) && format == INT8) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const float top = at.scale[tile[i] * 16 + (lane >> 2)], bottom = at.scale[tile[i] * 16 + 8 + (lane >> 2)];
#pragma unroll
            for (int n = 0; n < TOKENS / 8; ++n) { c[i][n][0] *= top; c[i][n][1] *= top; c[i][n][2] *= bottom; c[i][n][3] *= bottom; }
        }
    }
    write_sums<TOKENS, TILES>(jobs, job, at, c, (float*)tiles);
}
#endif

template <int TOKENS, int TILES> __device__ __forceinline__ void gemm_block(const Jobs& jobs) {
    DYNAMIC_SHARED(u16, memory);
    u16* tiles = (u16*)(((u64)memory + 1023) & ~(u64)1023);
    WAIT_BEFORE();
    int index = 0;
    while (index + 1 < jobs.count && (int)blockIdx.x >= jobs.job[index + 1].first_block) ++index;
    const Job& job = jobs.job[index];
    const int row_blocks = (job.tiles + 8 * TILES - 1) / (8 * TILES), local = blockIdx.x - job.first_block, warp = threadIdx.x >> 5;
    const int token_tile = local % job.token_tiles, rest = local / job.token_tiles, tile_first = (rest % row_blocks) * 8 * TILES;
    Place at;
    at.group = rest / row_blocks;
    at.tile0 = tile_first + warp * TILES;
    const int columns = job.format == INT4 ? 256 : job.format == BF16 ? 64 : job.format == F32 ? 32 : 128;
    at.stages = (job.granules * columns + STAGE - 1) / STAGE;
    if (job.table) {
        if (token_tile >= jobs.groups[0]) return;
        const int* group = jobs.groups + 4 + 4 * token_tile;
        at.start = group[1]; at.count = group[2]; at.token0 = 0; at.head_x = 0;
        at.data = (const U4*)job.table[group[0] * 4 + job.which * 2];
        at.scale = (const float*)job.table[group[0] * 4 + job.which * 2 + 1];
    } else {
        at.start = 0; at.token0 = token_tile * TOKENS; at.count = min(TOKENS, jobs.rows - at.token0); at.head_x = at.group * job.x_stride;
        at.data = job.data + at.group * job.data_stride;
        at.scale = job.scale + at.group * job.scale_stride;
    }
    multiply<TOKENS, TILES>(jobs, job, at, tiles);
}
KERNEL __launch_bounds__(256, 1) gemm(const __grid_constant__ Jobs jobs) { gemm_block<TN, 2>(jobs); }
#if !EXACT
KERNEL __launch_bounds__(256, 1) gemm_long(const __grid_constant__ Jobs jobs) { gemm_block<256, 1>(jobs); }
#endif
