// The indexer of sparse attention: scores of pools and the exact selection (model spec 5.3). Arrays as in dsa.cu.

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

// Sums over the lanes of 2 N values each, number l in d[0] of lane l (with N = 16): half of what a lane has goes to the other half of them, again and again.
template <int N> __device__ __forceinline__ void sum_to_lanes(float* d, int lane) {
    const bool upper = lane & N;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float other = __shfl_xor_sync(0xffffffffu, upper ? d[i] : d[i + N], N);
        d[i] = (upper ? d[i + N] : d[i]) + other;
    }
    if constexpr (N > 1) sum_to_lanes<N / 2>(d, lane);
}

#define FEW_POOLS 8
#define SCORE_STAGES 4  // runs of keys under way
// The same for passes of few rows, where few blocks have anything to do: FEW_POOLS pools at a time, a warp four of 32 heads, a lane four of 128 channels.
// Keys and head weights are older than the product ahead of it, and read before the wait. `key` may be null: the tail is kept.
// grid (parts, rows), 256 threads; dynamic shared memory: SCORE_STAGES * FEW_POOLS * DI floats, DI a multiple of 4.
KERNEL __launch_bounds__(256) dsa_scores_few(const float* query, const float* head_weight, int ldw, int heads, int DI, int kp, int keep, const float* key, const float* gate,
                                             const int* slot, const int* position, const int* span_end, const int* live, float* state, long slot_stride, long tail_at,
                                             const u64* pools_at, float* scores, long lds) {
    DYNAMIC_SHARED(float, keys);
    __shared__ float part[2][8][FEW_POOLS];
    LET_NEXT_START();
    const int row = blockIdx.y, p = position[row], pools = live[row] ? (p + 1) / kp : 0, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, step = gridDim.x * FEW_POOLS;
    const int begin = blockIdx.x * FEW_POOLS;
    const bool busy = pools > keep && begin < pools, held = heads <= 32 && DI <= 128;  // held: a lane's share of the queries stays in registers
    const float* from = (const float*)pools_at[slot[row]];
    auto fetch = [&](int tile, int stage) {
        const long first = (long)tile * DI, left = (long)pools * DI - first;
#pragma unroll 1
        for (int at = 4 * threadIdx.x; at < FEW_POOLS * DI; at += 1024) copy16_async(keys + stage * FEW_POOLS * DI + at, from + (at < left ? first + at : 0), at < left);
        copies_commit();
    };
    auto weight_of_head = [&](int head) { return head < heads ? head_weight[(long)row * ldw + head] / sqrtf((float)heads) : 0.0f; };
    float w = 0.0f;
    if (busy) {
#pragma unroll 1
        for (int i = 0; i < SCORE_STAGES - 1; ++i) fetch(begin + i * step, i);
        w = weight_of_head(warp * 4 + (lane >> 3));
    }
    WAIT_BEFORE();
    if (key && blockIdx.x == 0 && live[row]) keep_tail(key, gate, DI, kp, row, p, span_end[row], state + slot[row] * slot_stride + tail_at);
    if (!busy) return;
    const float by_width = 1.0f / sqrtf((float)DI);
    F4 a[4];
    auto queries = [&](int head0, int channel) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {
            const int head = head0 + warp * 4 + h;
            a[h] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (head < heads && channel < DI) a[h] = *(const F4*)&query[((long)row * heads + head) * DI + channel];
        }
    };
    if (held) queries(0, 4 * lane);
    for (int tile = begin, turn = 0; tile < pools; tile += step, ++turn) {
        copies_wait<SCORE_STAGES - 2>();
        __syncthreads();  // these keys are there, and those before are used
        fetch(tile + (SCORE_STAGES - 1) * step, (turn + SCORE_STAGES - 1) % SCORE_STAGES);
        const float* mine = keys + turn % SCORE_STAGES * FEW_POOLS * DI;
        float sum = 0.0f;  // of pool lane % 8, of the warp's heads
        for (int head0 = 0; head0 < heads; head0 += 32) {
            float d[4 * FEW_POOLS];
#pragma unroll
            for (int i = 0; i < 4 * FEW_POOLS; ++i) d[i] = 0.0f;
            for (int channel = 4 * lane; channel < DI; channel += 128) {
                if (!held) queries(head0, channel);
#pragma unroll
                for (int m = 0; m < FEW_POOLS; ++m) {
                    const F4 b = *(const F4*)&mine[m * DI + channel];
#pragma unroll
                    for (int h = 0; h < 4; ++h) d[h * FEW_POOLS + m] += a[h].x * b.x + a[h].y * b.y + a[h].z * b.z + a[h].w * b.w;
                }
            }
            sum_to_lanes<16>(d, lane);
            if (head0) w = weight_of_head(head0 + warp * 4 + (lane >> 3));
            sum += w * fmaxf(d[0] * by_width, 0.0f);
        }
        if (heads > 32) w = weight_of_head(warp * 4 + (lane >> 3));
        sum += __shfl_xor_sync(0xffffffffu, sum, 8);
        sum += __shfl_xor_sync(0xffffffffu, sum, 16);
        if (lane < FEW_POOLS) part[turn & 1][warp][lane] = sum;
        __syncthreads();
        if (threadIdx.x < FEW_POOLS && tile + (int)threadIdx.x < pools) {
            float s = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) s += part[turn & 1][i][threadIdx.x];
            scores[(long)row * lds + tile + threadIdx.x] = s == 0.0f ? 0.0f : s;
        }
    }
    copies_wait<0>();
}

#define SELECT_HELD 4
// The `keep` best pools (higher score first, then lower index) as ascending positions, then the incomplete pool. selected [T][lds_selected], count [T].
// A thread has SELECT_HELD scores in registers; more pools than that takes are read again for every pass over them.
// grid (rows), 256 or 512 threads.
KERNEL __launch_bounds__(512) dsa_select(const float* scores, long lds, int kp, int keep, int first_row, const int* position, const int* live, int* selected, int ld, int* count) {
    __shared__ int histogram[256];
    __shared__ int found[3];
    __shared__ u32 taken[SELECT_HELD][16];  // of a warp: above, and equal << 16
    LET_NEXT_START();
    const int row = first_row + blockIdx.x, p = position[row], pools = (p + 1) / kp, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, threads = blockDim.x;
    const bool there = live[row];
    int* to = selected + (long)row * ld;
    WAIT_BEFORE();
    if (!there || pools <= keep) {
        if (there) for (int i = threadIdx.x; i <= p; i += threads) to[i] = i;
        if (threadIdx.x == 0) count[row] = there ? p + 1 : 0;
        return;
    }
    const float* s = scores + (long)blockIdx.x * lds;
    const int span = SELECT_HELD * threads;
    u32 v[SELECT_HELD];
    auto hold_scores = [&](int first) {
#pragma unroll
        for (int k = 0; k < SELECT_HELD; ++k) {
            const int i = first + k * threads + threadIdx.x;
            v[k] = i < pools ? ordered(s[i]) : 0;
        }
    };
    hold_scores(0);
    u32 prefix = 0;
    int need = keep, shift = 24;  // how many are still wanted among those that share the prefix down to bit `shift`
    for (;; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += threads) histogram[i] = 0;
        __syncthreads();
        for (int first = 0; first < pools; first += span) {
            if (pools > span) hold_scores(first);
#pragma unroll
            for (int k = 0; k < SELECT_HELD; ++k) {
                if (first + k * threads >= pools) break;
                if (first + k * threads + (int)threadIdx.x < pools && (shift == 24 || (v[k] >> (shift + 8)) == prefix)) atomicAdd(&histogram[(v[k] >> shift) & 255], 1);
            }
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
                    if (before + own[b] >= need) { found[0] = 255 - 8 * lane - b; found[1] = need - before; found[2] = own[b]; break; }
                    before += own[b];
                }
        }
        __syncthreads();
        prefix = prefix << 8 | (u32)found[0];
        need = found[1];
        if (shift == 0 || found[2] == need) break;  // all that share the prefix are taken, or they are equal
    }
    const u32 below = (1u << lane) - 1;
    int above_before = 0, equal_before = 0;
    for (int first = 0; first < pools; first += span) {
        if (pools > span) hold_scores(first);
        auto is_above = [&](int k) { return __ballot_sync(0xffffffffu, first + k * threads + (int)threadIdx.x < pools && (v[k] >> shift) > prefix); };
        auto is_equal = [&](int k) { return __ballot_sync(0xffffffffu, first + k * threads + (int)threadIdx.x < pools && (v[k] >> shift) == prefix); };
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SELECT_HELD; ++k) {
            if (first + k * threads >= pools) break;
            const u32 counts = __popc(is_above(k)) | __popc(is_equal(k)) << 16;
            if (lane == 0) taken[k][warp] = counts;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SELECT_HELD; ++k) {
            if (first + k * threads >= pools) break;
            const int i = first + k * threads + threadIdx.x;
            const u32 above = is_above(k), equal = is_equal(k), counts = lane < threads >> 5 ? taken[k][lane] : 0;
            const u32 before = __reduce_add_sync(0xffffffffu, lane < warp ? counts : 0), all = __reduce_add_sync(0xffffffffu, counts);
            const int rank = equal_before + (before >> 16) + __popc(equal & below), at = above_before + (before & 0xffff) + __popc(above & below) + min(rank, need);
            if (above >> lane & 1 || (equal >> lane & 1 && rank < need))
#pragma unroll 1
                for (int j = 0; j < kp; ++j) to[at * kp + j] = i * kp + j;
            above_before += all & 0xffff;
            equal_before += all >> 16;
        }
    }
    for (int i = threadIdx.x; i < p + 1 - pools * kp; i += threads) to[keep * kp + i] = pools * kp + i;
    if (threadIdx.x == 0) count[row] = keep * kp + (p + 1 - pools * kp);
}
