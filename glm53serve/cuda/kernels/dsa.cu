// The indexer of sparse attention: latents, index keys, pool keys, scores and the exact selection (model spec 5.1 to 5.4, 5.6).
// rows_at[slot] = address of a slot's latents [capacity][R] of this layer, pools_at[slot] = of its pool keys [capacity / kp][DI].
// tail (in the slot's state block): raw k, then raw e, [2][kp][DI], entry position % kp.

__device__ __forceinline__ float* latents_of(const u64* rows_at, int slot) { return (float*)rows_at[slot]; }

// Norms of one row, a block each: q latent (split, [T][ldq]), cache row (float32, and bf16 where narrow_rows_at is given), index key. q_latent [T][Q], kv [T][R], key [T][DI] in place.
// grid (T, 3 with a key, else 2), 256 threads.
KERNEL dsa_prepare(const float* q_latent, int Q, const float* q_norm, u16* q_high, u16* q_low, int ldq, const float* kv, int R, const float* kv_norm, float eps, float* key,
                   int DI, const float* key_norm, const float* key_bias, const int* slot, const int* position, const int* live, const u64* rows_at, const u64* narrow_rows_at) {
    __shared__ float room[32];
    LET_NEXT_START();
    WAIT_BEFORE();
    const int row = blockIdx.x;
    float sum = 0.0f;
    if (blockIdx.y == 0) {
#pragma unroll 8
        for (int i = threadIdx.x; i < Q; i += 256) { float v = q_latent[(long)row * Q + i]; sum += v * v; }
        const float by = 1.0f / sqrtf(block_sum(sum, room) / Q + eps);
#pragma unroll 8
        for (int i = threadIdx.x; i < Q; i += 256) store_split(q_high, q_low, (long)row * ldq + i, q_norm[i] * (q_latent[(long)row * Q + i] * by));
    } else if (blockIdx.y == 1) {
        for (int i = threadIdx.x; i < R; i += 256) { float v = kv[(long)row * R + i]; sum += v * v; }
        const float by = 1.0f / sqrtf(block_sum(sum, room) / R + eps);
        if (!live[row]) return;
        float* to = latents_of(rows_at, slot[row]) + (long)position[row] * R;
        u16* narrow = narrow_rows_at ? (u16*)narrow_rows_at[slot[row]] + (long)position[row] * R : nullptr;
        for (int i = threadIdx.x; i < R; i += 256) {
            const float v = kv_norm[i] * (kv[(long)row * R + i] * by);
            to[i] = v;
            if (narrow) narrow[i] = to_bf16(v);
        }
    } else {
        for (int i = threadIdx.x; i < DI; i += 256) sum += key[(long)row * DI + i];
        const float mean = block_sum(sum, room) / DI;
        sum = 0.0f;
        for (int i = threadIdx.x; i < DI; i += 256) { float v = key[(long)row * DI + i] - mean; sum += v * v; }
        const float deviation = sqrtf(block_sum(sum, room) / DI + 1e-6f);
        for (int i = threadIdx.x; i < DI; i += 256) key[(long)row * DI + i] = key_norm[i] * (key[(long)row * DI + i] - mean) / deviation + key_bias[i];
    }
}

// Keys of the pools that rows complete: a softmax over the pool for each channel; older members come from the tail. grid (T), DI threads (or fewer).
KERNEL dsa_pool(const float* key, const float* gate, int DI, int kp, const float* ape, const int* slot, const int* position, const int* first, const int* live,
                const float* state, long slot_stride, long tail_at, const u64* pools_at) {
    LET_NEXT_START();
    WAIT_BEFORE();
    const int row = blockIdx.x, p = position[row];
    if (!live[row] || (p + 1) % kp) return;
    const float* tail = state + slot[row] * slot_stride + tail_at;
    float* to = (float*)pools_at[slot[row]] + (long)(p / kp) * DI;
    for (int c = threadIdx.x; c < DI; c += blockDim.x) {
        float best = NEG_INF, total = 0.0f, sum = 0.0f;
        for (int pass = 0; pass < 2; ++pass)
            for (int j = 0; j < kp; ++j) {
                const int from = row - (kp - 1 - j);
                const bool here = from >= first[row];
                const float e = (here ? gate[(long)from * DI + c] : tail[(long)(kp + j) * DI + c]) + ape[j * DI + c];
                if (pass == 0) best = fmaxf(best, e);
                else {
                    const float w = expf(e - best);
                    total += w;
                    sum += w * (here ? key[(long)from * DI + c] : tail[(long)j * DI + c]);
                }
            }
        to[c] = sum / total;
    }
}

// Raw rows of the pool a span leaves incomplete. Runs after dsa_pool, which reads what this replaces. grid (T), 128 threads.
__device__ __forceinline__ void keep_tail(const float* key, const float* gate, int DI, int kp, int row, int p, int last, float* tail) {
    if (p < last / kp * kp) return;  // its pool is complete by the end of the span
    for (int c = threadIdx.x; c < DI; c += blockDim.x) {
        tail[(long)(p % kp) * DI + c] = key[(long)row * DI + c];
        tail[(long)(kp + p % kp) * DI + c] = gate[(long)row * DI + c];
    }
}

#define SCORE_POOLS 32
// Scores of all candidate pools of rows first_row + blockIdx.y: scores [gridDim.y][lds]. Nothing to do when every pool is taken.
// query [T][heads * DI], head_weight [T][ldw]; span_end[row] = first position after the row's span. Also keeps the tail (block 0 of a row).
// grid (parts, rows), 256 threads; dynamic shared memory: 32 * (DI + 4) + 32 * DI floats, DI a multiple of 4.
KERNEL __launch_bounds__(256) dsa_scores(const float* query, const float* head_weight, int ldw, int heads, int DI, int kp, int keep, int first_row, const float* key,
                                         const float* gate, const int* slot, const int* position, const int* span_end, const int* live, float* state, long slot_stride,
                                         long tail_at, const u64* pools_at, float* scores, long lds) {
    DYNAMIC_SHARED(float, shared);
    LET_NEXT_START();
    WAIT_BEFORE();
    const int row = first_row + blockIdx.y, p = position[row], pools = (p + 1) / kp, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, stride = DI + 4;
    if (!live[row]) return;
    if (blockIdx.x == 0) keep_tail(key, gate, DI, kp, row, p, span_end[row], state + slot[row] * slot_stride + tail_at);
    if (pools <= keep) return;
    float *q = shared, *keys = shared + 32 * stride;
    const float* from = (const float*)pools_at[slot[row]];
    const float by_width = 1.0f / sqrtf((float)DI), by_heads = 1.0f / sqrtf((float)heads);
    for (int tile = blockIdx.x * SCORE_POOLS; tile < pools; tile += gridDim.x * SCORE_POOLS) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int head0 = 0; head0 < heads; head0 += 32) {
            __syncthreads();
            if (head0 == 0)
#pragma unroll 8
                for (int at = 4 * threadIdx.x; at < SCORE_POOLS * DI; at += 1024) {
                    const F4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
                    *(F4*)&keys[at] = tile + at / DI < pools ? *(const F4*)&from[(long)tile * DI + at] : zero;
                }
            if (tile == (int)blockIdx.x * SCORE_POOLS || heads > 32)
#pragma unroll 4
                for (int at = 4 * threadIdx.x; at < 32 * DI; at += 1024) {
                    const F4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
                    *(F4*)&q[at / DI * stride + at % DI] = head0 + at / DI < heads ? *(const F4*)&query[((long)row * heads + head0) * DI + at] : zero;
                }
            __syncthreads();
            float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
            for (int i = 0; i < DI; i += 4) {
                const F4 a = *(const F4*)&q[lane * stride + i];
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const F4 b = *(const F4*)&keys[(warp * 4 + m) * DI + i];
                    dot[m] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
                }
            }
            const float w = head0 + lane < heads ? head_weight[(long)row * ldw + head0 + lane] * by_heads : 0.0f;
#pragma unroll
            for (int m = 0; m < 4; ++m) sum[m] += w * fmaxf(dot[m] * by_width, 0.0f);
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const float s = warp_sum(sum[m]);
            const int pool = tile + warp * 4 + m;
            if (lane == 0 && pool < pools) scores[(long)blockIdx.y * lds + pool] = s == 0.0f ? 0.0f : s;
        }
    }
}

// The `keep` best pools (higher score first, then lower index) as ascending positions, then the incomplete pool. selected [T][lds_selected], count [T].
// grid (rows), 256 threads.
KERNEL __launch_bounds__(256) dsa_select(const float* scores, long lds, int kp, int keep, int first_row, const int* position, const int* live, int* selected, int ld, int* count) {
    __shared__ int histogram[256];
    __shared__ int found[2];
    __shared__ int warp_above[8], warp_equal[8];
    LET_NEXT_START();
    WAIT_BEFORE();
    const int row = first_row + blockIdx.x, p = position[row], pools = (p + 1) / kp, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int* to = selected + (long)row * ld;
    if (!live[row]) {
        if (threadIdx.x == 0) count[row] = 0;
        return;
    }
    if (pools <= keep) {
        for (int i = threadIdx.x; i <= p; i += 256) to[i] = i;
        if (threadIdx.x == 0) count[row] = p + 1;
        return;
    }
    const float* s = scores + (long)blockIdx.x * lds;
    u32 prefix = 0;
    int need = keep;  // how many are still wanted among those that share the prefix
    for (int shift = 24; shift >= 0; shift -= 8) {
        histogram[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < pools; i += 256) {
            const u32 v = ordered(s[i]);
            if (shift == 24 || (v >> (shift + 8)) == (prefix >> (shift + 8))) atomicAdd(&histogram[(v >> shift) & 255], 1);
        }
        __syncthreads();
        if (warp == 0) {  // from the top bin down: lane l has bins 255 - 8l .. 248 - 8l
            int own[8], mine = 0, before = 0;
#pragma unroll
            for (int b = 0; b < 8; ++b) { own[b] = histogram[255 - 8 * lane - b]; mine += own[b]; }
            int upto = mine;
            for (int o = 1; o < 32; o <<= 1) { const int other = __shfl_up_sync(0xffffffffu, upto, o); if (lane >= o) upto += other; }
            before = upto - mine;
            if (before < need && upto >= need)
                for (int b = 0; b < 8; ++b) {
                    if (before + own[b] >= need) { found[0] = 255 - 8 * lane - b; found[1] = need - before; break; }
                    before += own[b];
                }
        }
        __syncthreads();
        prefix |= (u32)found[0] << shift;
        need = found[1];
        __syncthreads();
    }
    int written = 0, equal_before = 0;
    for (int base = 0; base < pools; base += 256) {
        const int i = base + threadIdx.x;
        const u32 v = i < pools ? ordered(s[i]) : 0;
        const bool above = i < pools && v > prefix, equal = i < pools && v == prefix;
        const u32 equal_mask = __ballot_sync(0xffffffffu, equal), below = (1u << lane) - 1;
        if (lane == 0) warp_equal[warp] = __popc(equal_mask);
        __syncthreads();
        int rank = equal_before + __popc(equal_mask & below), equal_total = 0;
        for (int w = 0; w < 8; ++w) { if (w < warp) rank += warp_equal[w]; equal_total += warp_equal[w]; }
        const bool take = above || (equal && rank < need);
        const u32 take_mask = __ballot_sync(0xffffffffu, take);
        if (lane == 0) warp_above[warp] = __popc(take_mask);
        __syncthreads();
        int at = written + __popc(take_mask & below), total = 0;
        for (int w = 0; w < 8; ++w) { if (w < warp) at += warp_above[w]; total += warp_above[w]; }
        if (take)
            for (int j = 0; j < kp; ++j) to[at * kp + j] = i * kp + j;
        written += total;
        equal_before += equal_total;
        __syncthreads();
    }
    for (int i = threadIdx.x; i < p + 1 - pools * kp; i += 256) to[keep * kp + i] = pools * kp + i;
    if (threadIdx.x == 0) count[row] = keep * kp + (p + 1 - pools * kp);
}
