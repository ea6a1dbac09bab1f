// Latent attention of few rows over their selected latents, absorbed form (model spec 5.1), on bf16 pairs: three products of high and low parts.
// A block takes FEW_HEADS heads and a part of the selection; `attend_join` puts the parts together. The selection and the latents are older than the product ahead
// of them, and read before the wait.

#define FEW_HEADS 16
#define FEW_TOKENS 32
#define FEW_SPLIT 64                          // tokens of a block, DECODE_SPLIT of scratch.py
#define FEW_STRIDE (LATENT + 8)
#define FEW_PARTS 4                           // warps that share a token's columns in the scores; two halves of the tokens beside each other
#define FEW_DIMS (LATENT / 8)                 // columns of a warp in the sums
#define FEW_LOADS (FEW_TOKENS * (LATENT / 4) / 256)
#define FEW_BLOCKS (LATENT <= 512 ? 2 : 1)    // of a processor, where there are enough of them
#define PART (LATENT + 4)                     // a head's part: unnormalised c, maximum, sum, nothing

// query [rows][HEADS][ldq] split; latents of each slot [capacity][R] float32; selected, counts as dsa_select wrote them. Tokens blockIdx.x * FEW_SPLIT ..
// + FEW_SPLIT of the selection, with blockIdx.z in its place: blocks begin in order, those that have nothing to do behind all others.
// partial [row][split][HEADS][PART]; nothing for a part beyond the selection. TURNS: how many times the code of a run of tokens is there.
template <int TURNS> __device__ __forceinline__ void attend_part(const u16* q_high, const u16* q_low, int ldq, float scale, const int* slot, const u64* rows_at, int R,
                                                                 const int* selected, int ld, const int* counts, float* partial) {
    DYNAMIC_SHARED(u16, memory);
    u16* q = memory;                                     // [high, low][head][FEW_STRIDE]
    u16* l = q + 2 * FEW_HEADS * FEW_STRIDE;             // [high, low][token][FEW_STRIDE]
    u16* p = l + 2 * FEW_TOKENS * FEW_STRIDE;            // [high, low][head][FEW_TOKENS + 8]
    float* s = (float*)(p + 2 * FEW_HEADS * (FEW_TOKENS + 8));  // [part][head][FEW_TOKENS + 1]
    float* top = s + FEW_PARTS * FEW_HEADS * (FEW_TOKENS + 1);
    float *sum = top + FEW_HEADS, *shrink = sum + FEW_HEADS;
    __shared__ int chosen[FEW_SPLIT];
    LET_NEXT_START();
    const int row = blockIdx.y, head0 = blockIdx.x * FEW_HEADS, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int begin = blockIdx.z * FEW_SPLIT, end = min(counts[row], begin + FEW_SPLIT);
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
        for (int i = 0; i < FEW_LOADS; ++i) v[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (R % 4) {
#pragma unroll
            for (int i = 0; i < FEW_LOADS; ++i) {
                const int at = threadIdx.x + 256 * i, token = at / (LATENT / 4), piece = at % (LATENT / 4) * 4;
                if (base + token >= end || piece >= R) continue;
                const float* from = rows + (long)chosen[base - begin + token] * R + piece;
                v[i].x = from[0];
                if (piece + 1 < R) v[i].y = from[1];
                if (piece + 2 < R) v[i].z = from[2];
                if (piece + 3 < R) v[i].w = from[3];
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < FEW_LOADS; ++i) {
            const int at = threadIdx.x + 256 * i, token = at / (LATENT / 4), piece = at % (LATENT / 4) * 4;
            if (base + token < end && piece < R) v[i] = *(const F4*)(rows + (long)chosen[base - begin + token] * R + piece);
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
#pragma unroll TURNS
    for (int turn = 0; turn < FEW_SPLIT / FEW_TOKENS; ++turn) {
        const int base = begin + turn * FEW_TOKENS;
        if (base >= end) break;
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
        if (turn + 1 < FEW_SPLIT / FEW_TOKENS && base + FEW_TOKENS < end) fetch(base + FEW_TOKENS);
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
#pragma unroll
        for (int i = 0; i < FEW_DIMS / 2; ++i) c[i / 4][i % 4] = turn ? c[i / 4][i % 4] * (i & 2 ? by1 : by0) : 0.0f;
#pragma unroll
        for (int i = 0; i < FEW_TOKENS; i += 16) {  // c += weights x latents: matrices of tokens 0..7 and 8..15 of columns 0..7, then of 8..15, transposed on the way
            u32 a[4], e[4];
            const u16* p_row = p + (lane & 15) * (FEW_TOKENS + 8) + (lane >> 4) * 8 + i;
            load_matrices(a, p_row);
            load_matrices(e, p_row + FEW_HEADS * (FEW_TOKENS + 8));
            const u16* l_row = l + (i + (lane & 15)) * FEW_STRIDE + warp * FEW_DIMS + (lane >> 4) * 8;
#pragma unroll
            for (int n = 0; n < FEW_DIMS / 8; n += 2) {
                const int here = min(2, FEW_DIMS / 8 - n);
                u32 b[4], f[4];
                load_matrices_transposed(b, l_row + n * 8);
                load_matrices_transposed(f, l_row + FEW_TOKENS * FEW_STRIDE + n * 8);
#pragma unroll
                for (int m = 0; m < here; ++m) mma(c[n + m], a, b[2 * m], b[2 * m + 1]);
#pragma unroll
                for (int m = 0; m < here; ++m) mma(c[n + m], e, b[2 * m], b[2 * m + 1]);
#pragma unroll
                for (int m = 0; m < here; ++m) mma(c[n + m], a, f[2 * m], f[2 * m + 1]);
            }
        }
    }
    float* to = partial + (((long)row * gridDim.z + blockIdx.z) * HEADS + head0) * PART;
#pragma unroll
    for (int n = 0; n < FEW_DIMS / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (head0 + g + 8 * half < HEADS)
                *(U2*)(to + (g + 8 * half) * PART + warp * FEW_DIMS + n * 8 + 2 * t) = {__float_as_uint(c[n][2 * half]), __float_as_uint(c[n][2 * half + 1])};
    if (threadIdx.x < FEW_HEADS && head0 + (int)threadIdx.x < HEADS) {
        to[threadIdx.x * PART + LATENT] = top[threadIdx.x];
        to[threadIdx.x * PART + LATENT + 1] = sum[threadIdx.x];
    }
}

// grid (HEADS / 16, rows, splits), 256 threads. Dynamic shared memory: see Pipeline. One or two rows: a block has a processor for itself.
KERNEL __launch_bounds__(256, 1) attend_few(const u16* q_high, const u16* q_low, int ldq, float scale, const int* slot, const u64* rows_at, int R, const int* selected,
                                            int ld, const int* counts, float* partial) {
    attend_part<1>(q_high, q_low, ldq, scale, slot, rows_at, R, selected, ld, counts, partial);
}
// More rows: two blocks share one. A run's latents are on their way while the one before is used, for which there are registers only with the sums of the first apart.
KERNEL __launch_bounds__(256, FEW_BLOCKS) attend_few_shared(const u16* q_high, const u16* q_low, int ldq, float scale, const int* slot, const u64* rows_at, int R,
                                                            const int* selected, int ld, const int* counts, float* partial) {
    attend_part<FEW_SPLIT / FEW_TOKENS>(q_high, q_low, ldq, scale, slot, rows_at, R, selected, ld, counts, partial);
}

#define JOIN_GROUPS 4   // of 64 threads, each with every fourth part
#define JOIN_HELD 9     // parts a thread has under way
#define MOST_SPLITS 1024
// Parts of a row's selection put together, in the same order whatever rows are beside: c split, [row][HEADS][ldc].
// grid (HEADS, rows, LATENT / 256), 256 threads, each with four columns.
KERNEL __launch_bounds__(256) attend_join(const float* partial, int splits, const int* counts, int R, u16* c_high, u16* c_low, int ldc) {
    __shared__ float weight[MOST_SPLITS];
    __shared__ F4 room[JOIN_GROUPS][64];
    LET_NEXT_START();
    const int head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x & 31, group = threadIdx.x / 64, used = (counts[row] + FEW_SPLIT - 1) / FEW_SPLIT;
    const int dim = blockIdx.z * 256 + threadIdx.x % 64 * 4;
    const float* from = partial + ((long)row * splits * HEADS + head) * PART;
    const long next = (long)HEADS * PART;
    F4 v[JOIN_HELD];
    U2 two[2];
    auto hold = [&](int first) {
#pragma unroll
        for (int k = 0; k < JOIN_HELD; ++k) {
            const int part = first + k * JOIN_GROUPS + group;
            v[k] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (part < used && dim < LATENT) v[k] = *(const F4*)(from + part * next + dim);
        }
    };
    auto hold_weights = [&](int first) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int part = first + 32 * k + lane;
            two[k] = {__float_as_uint(NEG_INF), 0};
            if (part < used) two[k] = *(const U2*)(from + part * next + LATENT);
        }
    };
    WAIT_BEFORE();
    hold_weights(0);
    hold(0);
    float top = NEG_INF, total = 0.0f;  // every warp finds them
    for (int first = 0; first < used; first += 64) {
        if (first) hold_weights(first);
        top = fmaxf(top, fmaxf(__uint_as_float(two[0].x), __uint_as_float(two[1].x)));
    }
    top = warp_max(top);
    for (int first = 0; first < used; first += 64) {
        if (used > 64) hold_weights(first);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int part = first + 32 * k + lane;
            const float w = expf(__uint_as_float(two[k].x) - top);
            total += w * __uint_as_float(two[k].y);
            if (threadIdx.x < 32 && part < used) weight[part] = w;
        }
    }
    total = warp_sum(total);
    __syncthreads();
    F4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int first = 0; first < used; first += JOIN_GROUPS * JOIN_HELD) {
        if (first) hold(first);
#pragma unroll
        for (int k = 0; k < JOIN_HELD; ++k) {
            const int part = first + k * JOIN_GROUPS + group;
            if (part >= used) break;
            const float w = weight[part];
            sum.x += w * v[k].x; sum.y += w * v[k].y; sum.z += w * v[k].z; sum.w += w * v[k].w;
        }
    }
    room[group][threadIdx.x % 64] = sum;
    __syncthreads();
    const float* sums = (const float*)room;  // [group][column]
    const int column = blockIdx.z * 256 + threadIdx.x;
    if (column >= R) return;
    float s = 0.0f;
#pragma unroll
    for (int g = 0; g < JOIN_GROUPS; ++g) s += sums[g * 256 + threadIdx.x];
    store_split(c_high, c_low, ((long)row * HEADS + head) * ldc + column, used ? s / total : 0.0f);
}
