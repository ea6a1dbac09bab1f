// Latent attention of a prompt's rows over their selected tokens, absorbed form (model spec 5.1), by warpgroup products on bf16: per head,
// score = query . latent / sqrt(width), c = softmax-weighted latents.

#define GROUPS (LATENT / 64)         // of 64 latent channels
#define GROUP_BYTES (64 * 128)       // 64 rows (heads or tokens) of a group: swizzled 128-byte rows
#define MINE ((GROUPS + 1) / 2)      // groups of c that a warpgroup sums, every second one
#define P_STRIDE (64 + 8)
#define C_STRIDE (LATENT + 8)

// query [rows][HEADS][ldq] bf16; latents of each slot [capacity][R] bf16, R a multiple of 8; selected, count as dsa_select wrote them, for rows
// first_row + blockIdx.x. c [rows][HEADS][ldc] bf16 in product order. grid (rows, HEADS / 64), 256 threads: a block has 64 heads of a row. Of 64
// tokens at a time, a warpgroup scores 32 and then sums half of the channels over all. Dynamic shared memory: see Pipeline.
#if !EXACT
KERNEL __launch_bounds__(256, 1) attend_prompt(const u16* query, int ldq, float scale, const int* slot, const u64* rows_at, int R, const int* selected, int ld, const int* counts,
                                               int first_row, u16* c_out, int ldc) {
    DYNAMIC_SHARED(char, bytes);
    __shared__ float part[2][64];
    char* q = (char*)(((u64)bytes + 1023) & ~(u64)1023);  // [group][head][64]
    char* l = q + GROUPS * GROUP_BYTES;                   // two of [group][token][64]
    u16* p = (u16*)(l + 2 * GROUPS * GROUP_BYTES);        // [head][P_STRIDE]
    WAIT_BEFORE();
    const int local = blockIdx.x, row = first_row + local, head0 = blockIdx.y * 64, half = threadIdx.x >> 7, warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    const int g = lane >> 2, t = lane & 3, count = counts[row];
    const u16* latents = (const u16*)rows_at[slot[row]];
    const int* chosen = selected + (long)row * ld;
    auto place = [](int line, int piece) { return (piece >> 3) * GROUP_BYTES + line * 128 + ((piece & 7) ^ (line & 7)) * 16; };
    auto fetch = [&](int base, char* to) {
#pragma unroll 8
        for (int at = threadIdx.x; at < 64 * GROUPS * 8; at += 256) {
            const int token = at / (GROUPS * 8), piece = at % (GROUPS * 8);
            const bool there = base + token < count && piece * 8 < R;
            copy16_async(to + place(token, piece), latents + (there ? (long)chosen[base + token] * R + piece * 8 : 0), there);
        }
        copies_commit();
    };
    for (int at = threadIdx.x; at < 64 * GROUPS * 8; at += 256) {
        const int head = at / (GROUPS * 8), piece = at % (GROUPS * 8);
        const bool there = head0 + head < HEADS;
        copy16_async(q + place(head, piece), query + (there ? ((long)local * HEADS + head0 + head) * ldq + piece * 8 : 0), there);
    }
    fetch(0, l);
    scale *= 1.4426950408889634f;  // scores in powers of two
    float c[MINE][8][4], top[2] = {NEG_INF, NEG_INF}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < MINE * 32; ++i) c[i / 32][i / 4 % 8][i % 4] = 0.0f;
    for (int base = 0, turn = 0; base < count; base += 64, turn ^= 1) {
        char* now = l + turn * GROUPS * GROUP_BYTES;
        copies_wait<0>();
        shared_to_tensor_cores();
        __syncthreads();  // this buffer is full, the other one and p are free
        float s[4][4], other[4][4];  // of every second product: products of one sum wait for each other
#pragma unroll
        for (int i = 0; i < 16; ++i) s[i / 4][i % 4] = other[i / 4][i % 4] = 0.0f;
        warpgroup_begin();
#pragma unroll
        for (int i = 0; i < GROUPS * 4; ++i)
            warpgroup_scores(i & 1 ? other : s, (const u16*)(q + (i >> 2) * GROUP_BYTES), (const u16*)(now + (i >> 2) * GROUP_BYTES + half * 32 * 128), i & 3);
        warpgroup_commit();
        if (base + 64 < count) fetch(base + 64, l + (turn ^ 1) * GROUPS * GROUP_BYTES);
        warpgroup_wait();
        float best[2] = {NEG_INF, NEG_INF};
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[n][i] = base + half * 32 + n * 8 + 2 * t + (i & 1) < count ? (s[n][i] + other[n][i]) * scale : NEG_INF;
                best[i >> 1] = fmaxf(best[i >> 1], s[n][i]);
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            best[r] = fmaxf(best[r], __shfl_xor_sync(0xffffffffu, best[r], 1));
            best[r] = fmaxf(best[r], __shfl_xor_sync(0xffffffffu, best[r], 2));
            if (t == 0) part[half][warp * 16 + g + 8 * r] = best[r];
        }
        __syncthreads();
        float by[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float most = fmaxf(top[r], fmaxf(part[0][warp * 16 + g + 8 * r], part[1][warp * 16 + g + 8 * r]));
            by[r] = exp2f(top[r] - most);
            top[r] = most;
            sum[r] *= by[r];
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[n][i] = s[n][i] > NEG_INF ? exp2f(s[n][i] - top[i >> 1]) : 0.0f;
                sum[i >> 1] += s[n][i];
            }
            u16* to = p + (warp * 16 + g) * P_STRIDE + half * 32 + n * 8 + 2 * t;
            *(u32*)to = pack_bf16(s[n][0], s[n][1]);
            *(u32*)(to + 8 * P_STRIDE) = pack_bf16(s[n][2], s[n][3]);
        }
        __syncthreads();
        u32 a[4][4];
#pragma unroll
        for (int k = 0; k < 4; ++k) load_matrices(a[k], p + (warp * 16 + (lane & 15)) * P_STRIDE + 16 * k + (lane >> 4) * 8);
#pragma unroll
        for (int m = 0; m < MINE; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n) { c[m][n][0] *= by[0]; c[m][n][1] *= by[0]; c[m][n][2] *= by[1]; c[m][n][3] *= by[1]; }
        settle(c[0][0], MINE * 32);
        warpgroup_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int m = 0; m < MINE; ++m)
                if (GROUPS % 2 == 0 || 2 * m + half < GROUPS) warpgroup_mix(c[m], a[k], (const u16*)(now + (2 * m + half) * GROUP_BYTES), k);
        warpgroup_commit();
        warpgroup_wait();
    }
    copies_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
        if (t == 0) part[half][warp * 16 + g + 8 * r] = sum[r];
    }
    __syncthreads();
    float share[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float all = part[0][warp * 16 + g + 8 * r] + part[1][warp * 16 + g + 8 * r];
        share[r] = all > 0.0f ? 1.0f / all : 0.0f;
    }
    u16* out = (u16*)l;  // [head][C_STRIDE], in product order
#pragma unroll
    for (int m = 0; m < MINE; ++m)
        if (GROUPS % 2 == 0 || 2 * m + half < GROUPS)
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                u16* to = out + (warp * 16 + g) * C_STRIDE + in_product_order((2 * m + half) * 64 + n * 8 + 2 * t);
                *(u32*)to = pack_bf16(c[m][n][0] * share[0], c[m][n][1] * share[0]);
                *(u32*)(to + 8 * C_STRIDE) = pack_bf16(c[m][n][2] * share[1], c[m][n][3] * share[1]);
            }
    __syncthreads();
    for (int at = threadIdx.x; at < 64 * GROUPS * 8; at += 256) {
        const int head = at / (GROUPS * 8), piece = at % (GROUPS * 8);
        if (head0 + head < HEADS) *(U4*)(c_out + ((long)local * HEADS + head0 + head) * ldc + piece * 8) = *(const U4*)(out + head * C_STRIDE + piece * 8);
    }
}
#endif
