// Latent attention over selected rows, absorbed form (model spec 5.1): per head, score = query . latent / sqrt(width), c = softmax-weighted latents.
// Many rows of models that compute on bf16 pairs: three products of high and low parts (float32 to 16 bits of mantissa).

#define HEAD_TILES (HEADS >= 64 ? 4 : HEADS > 32 ? 4 : HEADS > 16 ? 2 : 1)  // tiles of 16 heads a block
#define DIM_WARPS (8 / HEAD_TILES)                                            // warps that share a head tile, each a part of the latent
#define DIM_TILES (LATENT / 8 / DIM_WARPS)
#define TOKENS 32
#define STRIDE (LATENT + 8)

// query [rows][HEADS][ldq] split; latents of each slot [capacity][R] float32; selected, count as dsa_select wrote them, for rows first_row + blockIdx.x.
// c split, [row][HEADS][ldc]. grid (rows, HEADS / 64), 256 threads. Dynamic shared memory: see Pipeline.
KERNEL __launch_bounds__(256, 1) attend_exact(const u16* q_high, const u16* q_low, int ldq, float scale, const int* slot, const u64* rows_at, int R, const int* selected, int ld,
                                              const int* counts, int first_row, u16* c_high, u16* c_low, int ldc) {
    constexpr int HEADS_HERE = HEAD_TILES * 16;
    DYNAMIC_SHARED(u16, memory);
    u16* q = memory;                                // [high, low][head][STRIDE]
    u16* l = q + 2 * HEADS_HERE * STRIDE;           // [high, low][token][STRIDE]
    u16* p = l + 2 * TOKENS * STRIDE;               // [high, low][head][TOKENS + 8]
    float* s = (float*)(p + 2 * HEADS_HERE * (TOKENS + 8));  // [head][TOKENS + 1]
    float* top = s + HEADS_HERE * (TOKENS + 1);
    float* sum = top + HEADS_HERE;
    float* shrink = sum + HEADS_HERE;
    WAIT_BEFORE();
    const int local = blockIdx.x, row = first_row + local, head0 = blockIdx.y * HEADS_HERE, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int head_tile = warp % HEAD_TILES, dim_part = warp / HEAD_TILES, g = lane >> 2, t = lane & 3;
    const int count = counts[row];
    const u64 rows = rows_at[slot[row]];
    const int* chosen = selected + (long)row * ld;
    float c[DIM_TILES][4];
#pragma unroll
    for (int i = 0; i < DIM_TILES; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) c[i][j] = 0.0f;
    for (int at = threadIdx.x; at < HEADS_HERE; at += 256) { top[at] = NEG_INF; sum[at] = 0.0f; }
    for (int at = threadIdx.x; at < HEADS_HERE * (LATENT / 8); at += 256) {
        const int head = at / (LATENT / 8), piece = at % (LATENT / 8);
        const long from = ((long)local * HEADS + head0 + head) * ldq + piece * 8;
        const bool there = head0 + head < HEADS;
        copy16_async(q + head * STRIDE + piece * 8, q_high + (there ? from : 0), there);
        copy16_async(q + (HEADS_HERE + head) * STRIDE + piece * 8, q_low + (there ? from : 0), there);
    }
    copies_commit();
    for (int base = 0; base < count; base += TOKENS) {
        __syncthreads();
#pragma unroll 4
        for (int at = threadIdx.x; at < TOKENS * (LATENT / 4); at += 256) {
            const int token = at / (LATENT / 4), piece = at % (LATENT / 4) * 4;
            float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (base + token < count) {
                const float* from = (const float*)rows + (long)chosen[base + token] * R + piece;
                if (R % 4 == 0) {
                    if (piece < R) { const F4 f = *(const F4*)from; v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w; }
                } else {
                    for (int j = 0; j < 4; ++j) if (piece + j < R) v[j] = from[j];
                }
            }
            const U2 high = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])};
            const U2 low = {pack_bf16(v[0] - low_bf16(high.x), v[1] - high_bf16(high.x)), pack_bf16(v[2] - low_bf16(high.y), v[3] - high_bf16(high.y))};
            *(U2*)(l + token * STRIDE + piece) = high;
            *(U2*)(l + (TOKENS + token) * STRIDE + piece) = low;
        }
        copies_wait<0>();
        __syncthreads();
        // Scores: each warp a head tile and, of the four groups of 8 tokens, those of its part.
        if (dim_part < TOKENS / 8) {
            constexpr int MINE = DIM_WARPS >= TOKENS / 8 ? 1 : TOKENS / 8 / DIM_WARPS;
            float d[MINE][4];
#pragma unroll
            for (int m = 0; m < MINE * 4; ++m) d[m / 4][m % 4] = 0.0f;
            const u16* q_row = q + (head_tile * 16 + (lane & 15)) * STRIDE + (lane >> 4) * 8;
            const u16* l_row = l + (dim_part * 8 + (lane & 7)) * STRIDE + (lane >> 3) * 8;
#pragma unroll 4
            for (int i = 0; i < LATENT; i += 32) {
                u32 a0[4], a1[4], e0[4], e1[4];
                load_matrices(a0, q_row + i);
                load_matrices(a1, q_row + i + 16);
                load_matrices(e0, q_row + HEADS_HERE * STRIDE + i);
                load_matrices(e1, q_row + HEADS_HERE * STRIDE + i + 16);
#pragma unroll
                for (int m = 0; m < MINE; ++m) {
                    u32 b[4], f[4];
                    load_matrices(b, l_row + m * DIM_WARPS * 8 * STRIDE + i);
                    mma(d[m], a0, b[0], b[1]);
                    mma(d[m], a1, b[2], b[3]);
                    load_matrices(f, l_row + (m * DIM_WARPS * 8 + TOKENS) * STRIDE + i);
                    mma(d[m], e0, b[0], b[1]); mma(d[m], e1, b[2], b[3]);
                    mma(d[m], a0, f[0], f[1]); mma(d[m], a1, f[2], f[3]);
                }
            }
#pragma unroll
            for (int m = 0; m < MINE; ++m) {
                const int head = head_tile * 16 + g, token = (dim_part + m * DIM_WARPS) * 8 + 2 * t;
                s[head * (TOKENS + 1) + token] = d[m][0] * scale; s[head * (TOKENS + 1) + token + 1] = d[m][1] * scale;
                s[(head + 8) * (TOKENS + 1) + token] = d[m][2] * scale; s[(head + 8) * (TOKENS + 1) + token + 1] = d[m][3] * scale;
            }
        }
        __syncthreads();
        {  // running softmax, lane = token; a warp's heads side by side
            constexpr int MINE = HEADS_HERE / 8;
            const bool there = base + lane < count;
            float v[MINE], now[MINE], total[MINE];
#pragma unroll
            for (int m = 0; m < MINE; ++m) now[m] = v[m] = there ? s[(warp + 8 * m) * (TOKENS + 1) + lane] : NEG_INF;
#pragma unroll
            for (int o = 16; o; o >>= 1)
#pragma unroll
                for (int m = 0; m < MINE; ++m) now[m] = fmaxf(now[m], __shfl_xor_sync(0xffffffffu, now[m], o));
#pragma unroll
            for (int m = 0; m < MINE; ++m) {
                const int head = warp + 8 * m;
                now[m] = fmaxf(now[m], top[head]);
                total[m] = v[m] = there ? expf(v[m] - now[m]) : 0.0f;
                const u16 high = to_bf16(v[m]);
                p[head * (TOKENS + 8) + lane] = high;
                p[(HEADS_HERE + head) * (TOKENS + 8) + lane] = to_bf16(v[m] - bf16_value(high));
            }
#pragma unroll
            for (int o = 16; o; o >>= 1)
#pragma unroll
                for (int m = 0; m < MINE; ++m) total[m] += __shfl_xor_sync(0xffffffffu, total[m], o);
            if (lane == 0)
#pragma unroll
                for (int m = 0; m < MINE; ++m) {
                    const int head = warp + 8 * m;
                    const float by = expf(top[head] - now[m]);
                    top[head] = now[m];
                    sum[head] = sum[head] * by + total[m];
                    shrink[head] = by;
                }
        }
        __syncthreads();
        const float by0 = shrink[head_tile * 16 + g], by1 = shrink[head_tile * 16 + g + 8];
        u32 a[TOKENS / 16][4], e[TOKENS / 16][4];
        const u16* p_row = p + (head_tile * 16 + (lane & 15)) * (TOKENS + 8) + (lane >> 4) * 8;
#pragma unroll
        for (int i = 0; i < TOKENS / 16; ++i) {
            load_matrices(a[i], p_row + 16 * i);
            load_matrices(e[i], p_row + HEADS_HERE * (TOKENS + 8) + 16 * i);
        }
        // c += weights x latents: matrices of 8 tokens x 8 dims, transposed on the way.
#pragma unroll
        for (int n = 0; n < DIM_TILES; ++n) {
            c[n][0] *= by0; c[n][1] *= by0; c[n][2] *= by1; c[n][3] *= by1;
            const u16* l_row = l + lane * STRIDE + (dim_part * DIM_TILES + n) * 8;
            u32 b[4];
            load_matrices_transposed(b, l_row);
            mma(c[n], a[0], b[0], b[1]);
            mma(c[n], a[1], b[2], b[3]);
            u32 f[4];
            load_matrices_transposed(f, l_row + TOKENS * STRIDE);
            mma(c[n], e[0], b[0], b[1]); mma(c[n], e[1], b[2], b[3]);
            mma(c[n], a[0], f[0], f[1]); mma(c[n], a[1], f[2], f[3]);
        }
    }
    copies_wait<0>();
    __syncthreads();
#pragma unroll
    for (int n = 0; n < DIM_TILES; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int in = head_tile * 16 + g + (j >> 1) * 8, head = head0 + in, dim = (dim_part * DIM_TILES + n) * 8 + 2 * t + (j & 1);
            if (head >= HEADS) continue;
            if (dim < R) store_split(c_high, c_low, ((long)local * HEADS + head) * ldc + dim, sum[in] > 0.0f ? c[n][j] / sum[in] : 0.0f);
        }
}
