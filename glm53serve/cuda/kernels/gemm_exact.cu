// Products for many rows of models that compute on bf16 pairs: a block has 256 rows of W and 64 tokens, weights and activations are pairs, mma is plain.

#if EXACT
#define EXACT_TOKENS 64
#define STAGES 4

// This lane's raw fragments of one stage of a 16-row tile.
struct Stage { U4 p[HAS(F32) ? 8 : 4]; float top, bottom; };

__device__ __forceinline__ void load_stage(Stage& w, const U4* data, const float* scale, int format, long tile, int granules, int stage, int lane) {
    const int g = lane >> 2;
    if (HAS(INT4) && format == INT4) {
        long at = tile * granules + (stage >> 2);
        const U2* half = (const U2*)(data + at * 128 + ((stage >> 1) & 1) * 64 + lane) + (stage & 1);
        U2 top = half[0], bottom = half[64];
        w.p[0].x = top.x; w.p[0].y = top.y; w.p[1].x = bottom.x; w.p[1].y = bottom.y;
        const float* pair = scale + ((at * 2 + (stage >> 1 & 1)) * 16 + g) * 2 + (stage & 1);
        w.top = pair[0];
        w.bottom = pair[16];
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
__device__ __forceinline__ void multiply_exact(const Jobs& jobs, const Job& job, const Place& at, u16* tiles) {
    constexpr int NT = EXACT_TOKENS / 8, STAGE_SIZE = 4 * EXACT_TOKENS * 32;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, format = job.format;
    auto fetch = [&](int stage) {
        u16* to = tiles + (stage % STAGES) * STAGE_SIZE;
        for (int i = threadIdx.x; i < EXACT_TOKENS * 8; i += 256) {
            const int token = i >> 3, piece = i & 7;
            const bool there = stage < at.stages && token < at.count;
            const long from = there ? (long)mapped_row(job.x_map, at.token0 + token, at.start, jobs) * job.ldx + at.head_x + stage * STAGE + piece * 8 : 0;
            u16* into = to + ((piece >> 2) * EXACT_TOKENS + token) * 32 + (piece & 3) * 8;
            copy16_async(into, job.x_high + from, there);
            copy16_async(into + 2 * EXACT_TOKENS * 32, job.x_low + from, there);
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
                const U4 xh = *(const U4*)(x + (u * EXACT_TOKENS + n * 8 + g) * 32 + t * 8), xl = *(const U4*)(x + ((2 + u) * EXACT_TOKENS + n * 8 + g) * 32 + t * 8);
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
    write_sums<EXACT_TOKENS, 2>(jobs, job, at, c, (float*)tiles);
}

KERNEL __launch_bounds__(256, 1) gemm_exact(const __grid_constant__ Jobs jobs) {
    DYNAMIC_SHARED(u16, tiles);
    WAIT_BEFORE();
    const Job& job = jobs.job[job_of_block(jobs)];
    Place at;
    if (!find_place<EXACT_TOKENS, 2>(jobs, job, at)) return;
    at.tile0 += 2 * (threadIdx.x >> 5);
    multiply_exact(jobs, job, at, tiles);
}
#endif
