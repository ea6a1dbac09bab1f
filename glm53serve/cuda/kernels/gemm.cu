// Products for many rows.
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
