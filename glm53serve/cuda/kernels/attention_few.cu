// Latent attention of few rows over their selected latents, absorbed form (model spec 5.1), on bf16 pairs: three products of high and low parts.
// A block takes FEW_HEADS heads and a part of the selection; `attend_join` puts the parts together.

#define FEW_HEADS 16
#define FEW_TOKENS 32
#define FEW_SPLIT 64                          // tokens of a block, DECODE_SPLIT of scratch.py
#define FEW_STRIDE (LATENT + 8)
#define FEW_PARTS 4                           // warps that share a token's columns in the scores; two halves of the tokens beside each other
#define FEW_DIMS (LATENT / 8)                 // columns of a warp in the sums
#define FEW_LOADS (FEW_TOKENS * (LATENT / 4) / 256)

// query [rows][HEADS][ldq] split; latents of each slot [capacity][R] float32; selected, counts as dsa_select wrote them. Tokens blockIdx.x * FEW_SPLIT ..
// + FEW_SPLIT of the selection. partial [row][split][HEADS][LATENT + 2] = unnormalised c, maximum, sum; nothing for a part beyond the selection.
// grid (splits, rows, HEADS / 16), 256 threads. Dynamic shared memory: see Pipeline.
KERNEL __launch_bounds__(256, 1) attend_few(const u16* q_high, const u16* q_low, int ldq, float scale, const int* slot, const u64* rows_at, int R, const int* selected,
                                            int ld, const int* counts, float* partial) {
    DYNAMIC_SHARED(u16, memory);
    u16* q = memory;                                     // [high, low][head][FEW_STRIDE]
    u16* l = q + 2 * FEW_HEADS * FEW_STRIDE;             // [high, low][token][FEW_STRIDE]
    u16* p = l + 2 * FEW_TOKENS * FEW_STRIDE;            // [high, low][head][FEW_TOKENS + 8]
    float* s = (float*)(p + 2 * FEW_HEADS * (FEW_TOKENS + 8));  // [part][head][FEW_TOKENS + 1]
    float* top = s + FEW_PARTS * FEW_HEADS * (FEW_TOKENS + 1);
    float *sum = top + FEW_HEADS, *shrink = sum + FEW_HEADS;
    __shared__ int chosen[FEW_SPLIT];
    LET_NEXT_START();
    const int row = blockIdx.y, head0 = blockIdx.z * FEW_HEADS, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int begin = blockIdx.x * FEW_SPLIT, end = min(counts[row], begin + FEW_SPLIT);  // the selection and the latents are older than the kernel before
    if (begin >= end) {
        WAIT_BEFORE();
        return;
    }
    const float* rows = (const float*)rows_at[slot[row]];
    if (begin + (int)threadIdx.x < end) chosen[threadIdx.x] = selected[(long)row * ld + begin + threadIdx.x];
    __syncthreads();
    F4 v[FEW_LOADS];
    auto fetch = [&](int base) {
#pragma unroll
        for (int i = 0; i < FEW_LOADS; ++i) {
            const int at = threadIdx.x + 256 * i, token = at / (LATENT / 4), piece = at % (LATENT / 4) * 4;
            v[i] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (base + token < end && piece < R) {
                const float* from = rows + (long)chosen[base - begin + token] * R + piece;
                if (R % 4 == 0) v[i] = *(const F4*)from;
                else {
                    v[i].x = from[0];
                    if (piece + 1 < R) v[i].y = from[1];
                    if (piece + 2 < R) v[i].z = from[2];
                    if (piece + 3 < R) v[i].w = from[3];
                }
            }
        }
    };
    fetch(begin);
    WAIT_BEFORE();
    for (int at = threadIdx.x; at < FEW_HEADS * (LATENT / 8); at += 256) {
        const int head = at / (LATENT / 8), piece = at % (LATENT / 8) * 8;
        const bool there = head0 + head < HEADS;
        const long from = there ? ((long)row * HEADS + head0 + head) * ldq + piece : 0;
        copy16_async(q + head * FEW_STRIDE + piece, q_high + from, there);
        copy16_async(q + (FEW_HEADS + head) * FEW_STRIDE + piece, q_low + from, there);
    }
    copies_commit();
    if (threadIdx.x < FEW_HEADS) { top[threadIdx.x] = NEG_INF; sum[threadIdx.x] = 0.0f; }
    float c[FEW_DIMS / 8][4];
#pragma unroll
    for (int i = 0; i < FEW_DIMS / 2; ++i) c[i / 4][i % 4] = 0.0f;
    for (int base = begin; base < end; base += FEW_TOKENS) {
        __syncthreads();  // the tokens before are used
#pragma unroll
        for (int i = 0; i < FEW_LOADS; ++i) {
            const int at = threadIdx.x + 256 * i, token = at / (LATENT / 4), piece = at % (LATENT / 4) * 4;
            const U2 high = {pack_bf16(v[i].x, v[i].y), pack_bf16(v[i].z, v[i].w)};
            const U2 low = {pack_bf16(v[i].x - low_bf16(high.x), v[i].y - high_bf16(high.x)), pack_bf16(v[i].z - low_bf16(high.y), v[i].w - high_bf16(high.y))};
            *(U2*)(l + token * FEW_STRIDE + piece) = high;
            *(U2*)(l + (FEW_TOKENS + token) * FEW_STRIDE + piece) = low;
        }
        copies_wait<0>();
        __syncthreads();
        if (base + FEW_TOKENS < end) fetch(base + FEW_TOKENS);
        {  // scores of 16 tokens over a quarter of the columns
            const int part = warp % FEW_PARTS, first = warp / FEW_PARTS * 16, from = part * (LATENT / FEW_PARTS);
            float d[2][3][4];
#pragma unroll
            for (int i = 0; i < 24; ++i) d[i / 12][i / 4 % 3][i % 4] = 0.0f;
            const u16* q_row = q + (lane & 15) * FEW_STRIDE + (lane >> 4) * 8 + from;
            const u16* l_row = l + (first + (lane & 15)) * FEW_STRIDE + (lane >> 4) * 8 + from;  // matrices: tokens 0..7 and 8..15 of columns 0..7, then of 8..15
#pragma unroll 4
            for (int i = 0; i < LATENT / FEW_PARTS; i += 16) {
                u32 a[4], e[4], b[4], f[4];
                load_matrices(a, q_row + i);
                load_matrices(e, q_row + FEW_HEADS * FEW_STRIDE + i);
                load_matrices(b, l_row + i);
                load_matrices(f, l_row + FEW_TOKENS * FEW_STRIDE + i);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    mma(d[m][0], a, b[m], b[m + 2]);
                    mma(d[m][1], e, b[m], b[m + 2]);
                    mma(d[m][2], a, f[m], f[m + 2]);
                }
            }
            float* to = s + part * FEW_HEADS * (FEW_TOKENS + 1);
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    to[(g + 8 * (j >> 1)) * (FEW_TOKENS + 1) + first + 8 * m + 2 * t + (j & 1)] = d[m][0][j] + (d[m][1][j] + d[m][2][j]);
        }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < FEW_HEADS / 8; ++m) {  // running softmax, lane = token
            const int head = warp + 8 * m;
            const bool there = base + lane < end;
            float score = 0.0f;
#pragma unroll
            for (int part = 0; part < FEW_PARTS; ++part) score += s[(part * FEW_HEADS + head) * (FEW_TOKENS + 1) + lane];
            score *= scale;
            const float now = fmaxf(warp_max(there ? score : NEG_INF), top[head]), w = there ? expf(score - now) : 0.0f, total = warp_sum(w);
            const u16 high = to_bf16(w);
            p[head * (FEW_TOKENS + 8) + lane] = high;
            p[(FEW_HEADS + head) * (FEW_TOKENS + 8) + lane] = to_bf16(w - bf16_value(high));
            __syncwarp();
            if (lane == 0) {
                const float by = expf(top[head] - now);
                top[head] = now;
                sum[head] = sum[head] * by + total;
                shrink[head] = by;
            }
        }
        __syncthreads();
        const float by0 = shrink[g], by1 = shrink[g + 8];
        u32 a[FEW_TOKENS / 16][4], e[FEW_TOKENS / 16][4];
        const u16* p_row = p + (lane & 15) * (FEW_TOKENS + 8) + (lane >> 4) * 8;
#pragma unroll
        for (int i = 0; i < FEW_TOKENS / 16; ++i) {
            load_matrices(a[i], p_row + 16 * i);
            load_matrices(e[i], p_row + FEW_HEADS * (FEW_TOKENS + 8) + 16 * i);
        }
#pragma unroll
        for (int n = 0; n < FEW_DIMS / 8; ++n) {  // c += weights x latents: matrices of 8 tokens x 8 columns, transposed on the way
            c[n][0] *= by0; c[n][1] *= by0; c[n][2] *= by1; c[n][3] *= by1;
            const u16* l_row = l + lane * FEW_STRIDE + warp * FEW_DIMS + n * 8;
            u32 b[4], f[4];
            load_matrices_transposed(b, l_row);
            load_matrices_transposed(f, l_row + FEW_TOKENS * FEW_STRIDE);
            mma(c[n], a[0], b[0], b[1]); mma(c[n], a[1], b[2], b[3]);
            mma(c[n], e[0], b[0], b[1]); mma(c[n], e[1], b[2], b[3]);
            mma(c[n], a[0], f[0], f[1]); mma(c[n], a[1], f[2], f[3]);
        }
    }
    float* to = partial + (((long)row * gridDim.x + blockIdx.x) * HEADS + head0) * (LATENT + 2);
#pragma unroll
    for (int n = 0; n < FEW_DIMS / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (head0 + g + 8 * half < HEADS)
                *(U2*)(to + (g + 8 * half) * (LATENT + 2) + warp * FEW_DIMS + n * 8 + 2 * t) = {__float_as_uint(c[n][2 * half]), __float_as_uint(c[n][2 * half + 1])};
    if (threadIdx.x < FEW_HEADS && head0 + (int)threadIdx.x < HEADS) {
        to[threadIdx.x * (LATENT + 2) + LATENT] = top[threadIdx.x];
        to[threadIdx.x * (LATENT + 2) + LATENT + 1] = sum[threadIdx.x];
    }
}
