// Products of activations with stored weights, y = x W^T (model spec 9), for up to 16 rows (gemv) and for many (gemm).
//
// Weights lie in tensor-core fragment order, cut into tiles of 16 rows and granules of 2 KiB a tile: four 16-byte pieces for each of
// 32 lanes. Lane 4g + t holds rows g and g + 8. Columns come in units of 32, of which lane t holds 8t .. 8t + 7:
//   int4  granule 256 columns, piece 2b + h = row half h, columns 128b .. +127, word u = unit u, nibble i = column 2i, nibble i + 4 = column 2i + 1
//   int8, fp8  granule 128 columns, piece 2j + h = units 2j, 2j + 1
//   bf16  granule 64 columns, piece 2u + h = unit u
//   f32   granule 32 columns, piece 2s + h = half s of the lane's columns
// Scales: int4 float [tile][granule][h][g][4 groups of 64]; fp8 float [tile][granule][h]; int8 float [row].
// Activations are bf16 pairs (high + low), rows padded with zeros to 256 columns. Every weight format is exact in bf16 (f32: as a pair), sums
// are float32 in an order that depends on the matrix alone, so a row's bits do not depend on its company.

enum { F32 = 0, BF16 = 1, FP8 = 2, INT8 = 3, INT4 = 4 };
#define HAS(format) ((FORMATS >> (format)) & 1)  // the model has matrices of this format
enum { OUT_F32 = 0, OUT_SPLIT = 1, OUT_SWIGLU = 2 };
enum { MAP_SAME = 0, MAP_TOKEN = 1, MAP_SORTED = 2, MAP_PAIR = 3 };

struct Job {
    const U4* data;
    const float* scale;
    const u64* table;   // experts: [E][4] addresses of gate|up data, scale, down data, scale; null for one matrix
    const u16* x_high;
    const u16* x_low;
    float* y;
    u16* y_high;
    u16* y_low;
    long data_stride, scale_stride, x_stride, y_stride;  // from one head to the next: U4s, floats, values, values
    int ldx, ldy;
    int format, tiles, granules, rows;
    int slices;         // parts of the columns a block sums separately
    int out, x_map, y_map;
    int groups;         // heads, or the most expert groups there can be; 1 for one matrix
    int which;          // experts: 0 gate|up, 1 down
    int first_block;
    int token_tiles;    // gemm: the most tiles of tokens there can be
    float limit;
    int pad;
};
struct Jobs { int count, rows; const int* list; const int* groups; int top_k, pad; Job job[6]; };

struct Piece4 { U4 p[4]; };

__device__ __forceinline__ void load_granule(Piece4& w, const U4* tile, int granule, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w.p[i] = stream16(tile + (long)granule * 128 + i * 32 + lane);
}
__device__ __forceinline__ void int4_unit(u32 top, u32 bottom, u32 (*a)[4]) {
    a[0][0] = int4_pair<0>(top); a[0][1] = int4_pair<0>(bottom); a[0][2] = int4_pair<1>(top); a[0][3] = int4_pair<1>(bottom);
    a[1][0] = int4_pair<2>(top); a[1][1] = int4_pair<2>(bottom); a[1][2] = int4_pair<3>(top); a[1][3] = int4_pair<3>(bottom);
}
template <int FORMAT> __device__ __forceinline__ void byte_unit(u32 top0, u32 top1, u32 bottom0, u32 bottom1, u32 (*a)[4]) {
    if (FORMAT == INT8) {
        int8_pairs(top0, a[0][0], a[0][2]); int8_pairs(bottom0, a[0][1], a[0][3]);
        int8_pairs(top1, a[1][0], a[1][2]); int8_pairs(bottom1, a[1][1], a[1][3]);
    } else {
        fp8_pairs(top0, a[0][0], a[0][2]); fp8_pairs(bottom0, a[0][1], a[0][3]);
        fp8_pairs(top1, a[1][0], a[1][2]); fp8_pairs(bottom1, a[1][1], a[1][3]);
    }
}
__device__ __forceinline__ void bf16_unit(const U4& top, const U4& bottom, u32 (*a)[4]) {
    a[0][0] = top.x; a[0][1] = bottom.x; a[0][2] = top.y; a[0][3] = bottom.y;
    a[1][0] = top.z; a[1][1] = bottom.z; a[1][2] = top.w; a[1][3] = bottom.w;
}
__device__ __forceinline__ void f32_step(const U4& top, const U4& bottom, u32* high, u32* low) {
    u32 v[8] = {top.x, top.y, bottom.x, bottom.y, top.z, top.w, bottom.z, bottom.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float a = __uint_as_float(v[2 * i]), b = __uint_as_float(v[2 * i + 1]);
        high[i] = pack_bf16(a, b);
        low[i] = pack_bf16(a - low_bf16(high[i]), b - high_bf16(high[i]));
    }
}

// -- up to 16 rows ------------------------------------------------------------------------------------------------------------------

// Columns of an n-tile: column 2r is the high part of row r, column 2r + 1 its low part; NT tiles of 4 rows.
template <int NT> struct Activations {
    const u16* at[NT];  // this lane's column, or null
    __device__ __forceinline__ U4 unit(int nt, int column, int t) const {
        if (!at[nt]) { U4 z = {0, 0, 0, 0}; return z; }
        return *(const U4*)(at[nt] + column + 8 * t);
    }
};
template <int NT, int TILES> struct Sums { float c[TILES][NT][4]; };

template <int NT, int TILES> __device__ __forceinline__ void unit_products(Sums<NT, TILES>& s, int tile, u32 (*a)[4], const U4* x) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        mma(s.c[tile][n], a[0], x[n].x, x[n].y);
        mma(s.c[tile][n], a[1], x[n].z, x[n].w);
    }
}
template <int NT, int TILES> __device__ __forceinline__ void clear(Sums<NT, TILES>& s) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) s.c[i][n][j] = 0.0f;
}
template <int NT, int TILES> __device__ __forceinline__ void add_scaled(Sums<NT, TILES>& s, Sums<NT, TILES>& part, int tile, float top, float bottom) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        s.c[tile][n][0] += top * part.c[tile][n][0]; s.c[tile][n][1] += top * part.c[tile][n][1];
        s.c[tile][n][2] += bottom * part.c[tile][n][2]; s.c[tile][n][3] += bottom * part.c[tile][n][3];
    }
}

template <int FORMAT, int NT, int TILES>
__device__ __forceinline__ void granule_products(Sums<NT, TILES>& s, const Piece4* w, const F4 (*scale)[2], const U2* block_scale, const Activations<NT>& x,
                                                 int granule, int t) {
    u32 a[2][4];
    U4 xv[NT];
    if (FORMAT == INT4) {
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            Sums<NT, TILES> part;
            clear(part);
#pragma unroll
            for (int u = 0; u < 2; ++u) {
#pragma unroll
                for (int n = 0; n < NT; ++n) xv[n] = x.unit(n, granule * 256 + group * 64 + u * 32, t);
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    const U4 &top = w[i].p[(group >> 1) * 2], &bottom = w[i].p[(group >> 1) * 2 + 1];
                    int word = (group & 1) * 2 + u;
                    int4_unit(word == 0 ? top.x : word == 1 ? top.y : word == 2 ? top.z : top.w,
                              word == 0 ? bottom.x : word == 1 ? bottom.y : word == 2 ? bottom.z : bottom.w, a);
                    unit_products(part, i, a, xv);
                }
            }
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                const F4 &p = scale[i][0], &q = scale[i][1];
                add_scaled(s, part, i, group == 0 ? p.x : group == 1 ? p.y : group == 2 ? p.z : p.w, group == 0 ? q.x : group == 1 ? q.y : group == 2 ? q.z : q.w);
            }
        }
    } else if (FORMAT == INT8 || FORMAT == FP8) {
        Sums<NT, TILES> part;
        if (FORMAT == FP8) clear(part);
        Sums<NT, TILES>& to = FORMAT == FP8 ? part : s;
#pragma unroll
        for (int u = 0; u < 4; ++u) {
#pragma unroll
            for (int n = 0; n < NT; ++n) xv[n] = x.unit(n, granule * 128 + u * 32, t);
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                const U4 &top = w[i].p[(u >> 1) * 2], &bottom = w[i].p[(u >> 1) * 2 + 1];
                if (u & 1) byte_unit<FORMAT>(top.z, top.w, bottom.z, bottom.w, a);
                else byte_unit<FORMAT>(top.x, top.y, bottom.x, bottom.y, a);
                unit_products(to, i, a, xv);
            }
        }
        if (FORMAT == FP8) {
#pragma unroll
            for (int i = 0; i < TILES; ++i) add_scaled(s, part, i, __uint_as_float(block_scale[i].x), __uint_as_float(block_scale[i].y));
        }
    } else if (FORMAT == BF16) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
#pragma unroll
            for (int n = 0; n < NT; ++n) xv[n] = x.unit(n, granule * 64 + u * 32, t);
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                bf16_unit(w[i].p[2 * u], w[i].p[2 * u + 1], a);
                unit_products(s, i, a, xv);
            }
        }
    } else {
#pragma unroll
        for (int n = 0; n < NT; ++n) xv[n] = x.unit(n, granule * 32, t);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            u32 low[2][4];
            f32_step(w[i].p[0], w[i].p[1], a[0], low[0]);
            f32_step(w[i].p[2], w[i].p[3], a[1], low[1]);
            unit_products(s, i, a, xv);
            unit_products(s, i, low, xv);
        }
    }
}

template <int FORMAT, int NT, int TILES>
__device__ __forceinline__ void sum_columns(Sums<NT, TILES>& s, const Job& job, const U4* data, const float* scale, int tile0, int slice, const Activations<NT>& x, int lane) {
    const int t = lane & 3, g = lane >> 2;
    const U4* tile[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) tile[i] = data + (long)min(tile0 + i, job.tiles - 1) * job.granules * 128;
    Piece4 now[TILES], next[TILES];
    F4 q[TILES][2];
    U2 b[TILES];
    if (slice < job.granules)
#pragma unroll
        for (int i = 0; i < TILES; ++i) load_granule(next[i], tile[i], slice, lane);
    for (int granule = slice; granule < job.granules; granule += job.slices) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            now[i] = next[i];
            long at = (long)min(tile0 + i, job.tiles - 1) * job.granules + granule;
            if (FORMAT == INT4) { q[i][0] = ((const F4*)scale)[at * 16 + g]; q[i][1] = ((const F4*)scale)[at * 16 + 8 + g]; }
            if (FORMAT == FP8) b[i] = ((const U2*)scale)[at];
        }
        if (granule + job.slices < job.granules)
#pragma unroll
            for (int i = 0; i < TILES; ++i) load_granule(next[i], tile[i], granule + job.slices, lane);
        granule_products<FORMAT, NT, TILES>(s, now, q, b, x, granule, t);
    }
}

// Where row `r` of a group's columns comes from and goes to.
__device__ __forceinline__ int mapped_row(int map, int r, int start, const Jobs& jobs) {
    return map == MAP_SAME ? r : map == MAP_SORTED ? start + r : map == MAP_TOKEN ? jobs.list[start + r] / jobs.top_k : jobs.list[start + r];
}

__device__ __forceinline__ void write_output(const Job& job, int group, int row_to, int tile, int r16, float value, float partner) {
    if (job.out == OUT_SWIGLU) {
        int column = tile * 8 + r16;
        if (r16 < 8 && column < job.rows) store_split(job.y_high, job.y_low, (long)row_to * job.ldy + column, clamped_swiglu(value, partner, job.limit));
        return;
    }
    int column = tile * 16 + r16;
    if (column >= job.rows) return;
    long at = (long)row_to * job.ldy + group * job.y_stride + column;
    if (job.out == OUT_F32) job.y[at] = value;
    else store_split(job.y_high, job.y_low, at, value);
}

#define GEMV_TILES 2
template <int NT> __device__ __forceinline__ void gemv_block(const Jobs& jobs) {
    __shared__ float sums[8][GEMV_TILES * 16][8 * NT + 1];
    int index = 0;
    while (index + 1 < jobs.count && (int)blockIdx.x >= jobs.job[index + 1].first_block) ++index;
    const Job& job = jobs.job[index];
    const int teams = 8 / job.slices, per_block = teams * GEMV_TILES, blocks = (job.tiles + per_block - 1) / per_block;
    const int local = blockIdx.x - job.first_block, group = local / blocks, tile_first = (local % blocks) * per_block;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, slice = warp % job.slices, team = warp / job.slices;
    const U4* data = job.data;
    const float* scale = job.scale;
    int start = 0, count = jobs.rows;
    const u16 *x_high = job.x_high, *x_low = job.x_low;
    if (job.table) {
        if (group >= jobs.groups[0]) return;
        int expert = jobs.groups[4 + 4 * group];
        start = jobs.groups[5 + 4 * group];
        count = jobs.groups[6 + 4 * group];
        data = (const U4*)job.table[expert * 4 + job.which * 2];
        scale = (const float*)job.table[expert * 4 + job.which * 2 + 1];
    } else {
        data += group * job.data_stride;
        scale += group * job.scale_stride;
        x_high += group * job.x_stride;
        x_low += group * job.x_stride;
    }
    Activations<NT> x;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int column = n * 8 + (lane >> 2), r = column >> 1;
        x.at[n] = r < count ? ((column & 1) ? x_low : x_high) + (long)mapped_row(job.x_map, r, start, jobs) * job.ldx : nullptr;
    }
    Sums<NT, GEMV_TILES> s;
    clear(s);
    const int tile0 = tile_first + team * GEMV_TILES;
    if (tile0 < job.tiles) {
        if (HAS(INT4) && job.format == INT4) sum_columns<INT4, NT, GEMV_TILES>(s, job, data, scale, tile0, slice, x, lane);
        else if (HAS(BF16) && job.format == BF16) sum_columns<BF16, NT, GEMV_TILES>(s, job, data, scale, tile0, slice, x, lane);
        else if (HAS(INT8) && job.format == INT8) sum_columns<INT8, NT, GEMV_TILES>(s, job, data, scale, tile0, slice, x, lane);
        else if (HAS(FP8) && job.format == FP8) sum_columns<FP8, NT, GEMV_TILES>(s, job, data, scale, tile0, slice, x, lane);
        else if (HAS(F32)) sum_columns<F32, NT, GEMV_TILES>(s, job, data, scale, tile0, slice, x, lane);
    }
#pragma unroll
    for (int i = 0; i < GEMV_TILES; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            int row = i * 16 + (lane >> 2), column = n * 8 + 2 * (lane & 3);
            sums[warp][row][column] = s.c[i][n][0]; sums[warp][row][column + 1] = s.c[i][n][1];
            sums[warp][row + 8][column] = s.c[i][n][2]; sums[warp][row + 8][column + 1] = s.c[i][n][3];
        }
    __syncthreads();
    const int tall = per_block * 16;
    for (int at = threadIdx.x; at < tall * count; at += blockDim.x) {
        int r = at / tall, row = at % tall, tile = tile_first + (row >> 4), r16 = row & 15;
        if (tile >= job.tiles || (job.out == OUT_SWIGLU && r16 >= 8)) continue;
        int first_warp = (row >> 5) * job.slices, inner = row & 31;
        float value[2] = {0.0f, 0.0f};
        for (int half = 0; half < (job.out == OUT_SWIGLU ? 2 : 1); ++half) {
            float high = 0.0f, low = 0.0f;
            for (int w = 0; w < job.slices; ++w) {
                high += sums[first_warp + w][inner + 8 * half][2 * r];
                low += sums[first_warp + w][inner + 8 * half][2 * r + 1];
            }
            value[half] = high + low;
            if (HAS(INT8) && job.format == INT8) value[half] *= scale[tile * 16 + r16 + 8 * half];
        }
        write_output(job, group, mapped_row(job.y_map, r, start, jobs), tile, r16, value[0], value[1]);
    }
}
KERNEL __launch_bounds__(256, 2) gemv_4(const __grid_constant__ Jobs jobs) { gemv_block<1>(jobs); }
KERNEL __launch_bounds__(256, 2) gemv_8(const __grid_constant__ Jobs jobs) { gemv_block<2>(jobs); }
KERNEL __launch_bounds__(256, 1) gemv_16(const __grid_constant__ Jobs jobs) { gemv_block<4>(jobs); }

// -- many rows ----------------------------------------------------------------------------------------------------------------------

#define STAGE 64   // columns a stage
#define STAGES 4

// This lane's fragments of one stage of a 16-row tile, scales folded in, as bf16 (and, with SPLIT, the rest of the value as a second bf16).
struct Stage { U4 p[8]; float top, bottom; };

__device__ __forceinline__ void load_stage(Stage& w, const U4* data, const float* scale, int format, long tile, int granules, int stage, int lane) {
    const int g = lane >> 2;
    if (format == INT4) {
        long at = tile * granules + (stage >> 2);
        const U2* half = (const U2*)(data + at * 128 + ((stage >> 1) & 1) * 64 + lane) + (stage & 1);
        U2 top = half[0], bottom = half[64];
        w.p[0].x = top.x; w.p[0].y = top.y; w.p[1].x = bottom.x; w.p[1].y = bottom.y;
        w.top = scale[(at * 16 + g) * 4 + (stage & 3)];
        w.bottom = scale[(at * 16 + 8 + g) * 4 + (stage & 3)];
    } else if (format == INT8 || format == FP8) {
        long at = tile * granules + (stage >> 1);
        const U4* piece = data + at * 128 + (stage & 1) * 64 + lane;
        w.p[0] = piece[0]; w.p[1] = piece[32];
        w.top = format == FP8 ? scale[2 * at] : scale[tile * 16 + g];
        w.bottom = format == FP8 ? scale[2 * at + 1] : scale[tile * 16 + 8 + g];
    } else if (format == BF16) {
        const U4* piece = data + (tile * granules + stage) * 128 + lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) w.p[i] = piece[32 * i];
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            U4 z = {0, 0, 0, 0};
            w.p[i] = 2 * stage + (i >> 2) < granules ? (data + (tile * granules + 2 * stage + (i >> 2)) * 128 + lane)[32 * (i & 3)] : z;
        }
    }
}
template <bool SPLIT> __device__ __forceinline__ void scaled(u32 (*a)[4], u32 (*low)[4], float top, float bottom) {
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float k = (i & 1) ? bottom : top, p = low_bf16(a[s][i]) * k, q = high_bf16(a[s][i]) * k;
            a[s][i] = pack_bf16(p, q);
            if (SPLIT) low[s][i] = pack_bf16(p - low_bf16(a[s][i]), q - high_bf16(a[s][i]));
        }
}
template <bool SPLIT> __device__ __forceinline__ void unit_fragments(const Stage& w, int format, int u, u32 (*a)[4], u32 (*low)[4]) {
    if (format == INT4) {
        int4_unit(u ? w.p[0].y : w.p[0].x, u ? w.p[1].y : w.p[1].x, a);
        scaled<SPLIT>(a, low, w.top, w.bottom);
    } else if (format == INT8 || format == FP8) {
        u32 t0 = u ? w.p[0].z : w.p[0].x, t1 = u ? w.p[0].w : w.p[0].y, b0 = u ? w.p[1].z : w.p[1].x, b1 = u ? w.p[1].w : w.p[1].y;
        if (format == INT8) byte_unit<INT8>(t0, t1, b0, b1, a);
        else byte_unit<FP8>(t0, t1, b0, b1, a);
        scaled<SPLIT>(a, low, w.top, w.bottom);
    } else if (format == BF16) {
        bf16_unit(u ? w.p[2] : w.p[0], u ? w.p[3] : w.p[1], a);
        if (SPLIT)
#pragma unroll
            for (int i = 0; i < 8; ++i) low[i >> 2][i & 3] = 0;
    } else {
        f32_step(u ? w.p[4] : w.p[0], u ? w.p[5] : w.p[1], a[0], low[0]);
        f32_step(u ? w.p[6] : w.p[2], u ? w.p[7] : w.p[3], a[1], low[1]);
    }
}

// A block: 8 warps x 2 tiles = 256 rows of W, TN tokens. Activations pass through shared memory [stage][part][unit][token][32], weights straight to registers.
template <int FORMAT, int TN, bool SPLIT> __device__ __forceinline__ void gemm_block(const Jobs& jobs, const Job& job, const U4* data, const float* scale, int tile_first,
                                                                                     int group, int start, int token0, int count, u16* tiles) {
    constexpr int NT = TN / 8, PARTS = SPLIT ? 2 : 1, STAGE_SIZE = PARTS * 2 * TN * 32;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const long head_x = job.table ? 0 : group * job.x_stride;
    const int columns = FORMAT == INT4 ? 256 : FORMAT == BF16 ? 64 : FORMAT == F32 ? 32 : 128, stages = (job.granules * columns + STAGE - 1) / STAGE;
    // Each thread copies the same token row every stage: TN * 8 pieces of 16 bytes a part.
    auto fetch = [&](int stage) {
        u16* to = tiles + (stage % STAGES) * STAGE_SIZE;
        for (int at = threadIdx.x; at < TN * 8; at += 256) {
            int token = at >> 3, piece = at & 7;
            bool there = stage < stages && token < count;
            long from = there ? (long)mapped_row(job.x_map, token0 + token, start, jobs) * job.ldx + head_x + stage * STAGE + piece * 8 : 0;
            u16* into = to + ((piece >> 2) * TN + token) * 32 + (piece & 3) * 8;
            copy16_async(into, job.x_high + from, there);
            if (SPLIT) copy16_async(into + 2 * TN * 32, job.x_low + from, there);
        }
        copies_commit();
    };
    float c[2][NT][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) c[i][n][j] = 0.0f;
    const int tile0 = tile_first + warp * 2;
    const bool busy = tile0 < job.tiles;
    const long tile[2] = {min(tile0, job.tiles - 1), min(tile0 + 1, job.tiles - 1)};
    Stage now[2], next[2];
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch(s);
    if (busy)
#pragma unroll
        for (int i = 0; i < 2; ++i) load_stage(next[i], data, scale, FORMAT, tile[i], job.granules, 0, lane);
    for (int stage = 0; stage < stages; ++stage) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch(stage + STAGES - 1);
        if (!busy) continue;
        now[0] = next[0]; now[1] = next[1];
        if (stage + 1 < stages)
#pragma unroll
            for (int i = 0; i < 2; ++i) load_stage(next[i], data, scale, FORMAT, tile[i], job.granules, stage + 1, lane);
        const u16* x = tiles + (stage % STAGES) * STAGE_SIZE;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            u32 a[2][2][4], low[2][2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) unit_fragments<SPLIT>(now[i], FORMAT, u, a[i], low[i]);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const U4 xh = *(const U4*)(x + (u * TN + n * 8 + g) * 32 + t * 8);
#pragma unroll
                for (int i = 0; i < 2; ++i) { mma(c[i][n], a[i][0], xh.x, xh.y); mma(c[i][n], a[i][1], xh.z, xh.w); }
                if (SPLIT) {
                    const U4 xl = *(const U4*)(x + ((2 + u) * TN + n * 8 + g) * 32 + t * 8);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        mma(c[i][n], a[i][0], xl.x, xl.y); mma(c[i][n], a[i][1], xl.z, xl.w);
                        mma(c[i][n], low[i][0], xh.x, xh.y); mma(c[i][n], low[i][1], xh.z, xh.w);
                    }
                }
            }
        }
    }
    copies_wait<0>();
    if (!busy) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (tile0 + i >= job.tiles) continue;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                int token = n * 8 + 2 * t + j;
                if (token >= count) continue;
                int to = mapped_row(job.y_map, token0 + token, start, jobs);
                write_output(job, group, to, tile0 + i, g, c[i][n][j], c[i][n][2 + j]);
                if (job.out != OUT_SWIGLU) write_output(job, group, to, tile0 + i, g + 8, c[i][n][2 + j], 0.0f);
            }
    }
}
template <int TN, bool SPLIT> __device__ __forceinline__ void gemm_any(const Jobs& jobs) {
    DYNAMIC_SHARED(u16, tiles);
    int index = 0;
    while (index + 1 < jobs.count && (int)blockIdx.x >= jobs.job[index + 1].first_block) ++index;
    const Job& job = jobs.job[index];
    const int row_blocks = (job.tiles + 15) / 16, local = blockIdx.x - job.first_block;
    const int token_tile = local % job.token_tiles, rest = local / job.token_tiles, group = rest / row_blocks, tile_first = (rest % row_blocks) * 16;
    const U4* data = job.data;
    const float* scale = job.scale;
    int start = 0, token0 = token_tile * TN, count = min(TN, jobs.rows - token0);
    if (job.table) {
        if (token_tile >= jobs.groups[0]) return;
        int expert = jobs.groups[4 + 4 * token_tile];
        start = jobs.groups[5 + 4 * token_tile];
        count = jobs.groups[6 + 4 * token_tile];
        token0 = 0;
        data = (const U4*)job.table[expert * 4 + job.which * 2];
        scale = (const float*)job.table[expert * 4 + job.which * 2 + 1];
    } else {
        data += group * job.data_stride;
        scale += group * job.scale_stride;
    }
    if (HAS(INT4) && job.format == INT4) gemm_block<INT4, TN, SPLIT>(jobs, job, data, scale, tile_first, group, start, token0, count, tiles);
    else if (HAS(BF16) && job.format == BF16) gemm_block<BF16, TN, SPLIT>(jobs, job, data, scale, tile_first, group, start, token0, count, tiles);
    else if (HAS(INT8) && job.format == INT8) gemm_block<INT8, TN, SPLIT>(jobs, job, data, scale, tile_first, group, start, token0, count, tiles);
    else if (HAS(FP8) && job.format == FP8) gemm_block<FP8, TN, SPLIT>(jobs, job, data, scale, tile_first, group, start, token0, count, tiles);
    else if (HAS(F32)) gemm_block<F32, TN, SPLIT>(jobs, job, data, scale, tile_first, group, start, token0, count, tiles);
}
#if EXACT
KERNEL __launch_bounds__(256, 1) gemm(const __grid_constant__ Jobs jobs) { gemm_any<64, true>(jobs); }
#else
KERNEL __launch_bounds__(256, 1) gemm(const __grid_constant__ Jobs jobs) { gemm_any<128, false>(jobs); }
#endif
