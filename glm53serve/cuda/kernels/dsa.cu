// What sparse attention keeps of each row: latents, index keys, pool keys (model spec 5.1, 5.2, 5.6); dsa_select.cu chooses by them.
// rows_at[slot] = address of a slot's latents [capacity][R] of this layer, pools_at[slot] = of its pool keys [capacity / kp][DI].
// tail (in the slot's state block): raw k, then raw e, [2][kp][DI], entry position % kp.

__device__ __forceinline__ float* latents_of(const u64* rows_at, int slot) { return (float*)rows_at[slot]; }

#define HELD 8  // values of a row a thread has in registers at once
// A row of n values and their weights, before a block of 256: one that fits in its registers is read once.
struct HeldRow {
    const float *from, *weights;
    int n;
    float v[HELD], weight[HELD];
    __device__ __forceinline__ bool whole() const { return n <= 256 * HELD; }
    __device__ __forceinline__ void hold(float* to, const float* values, int first) const {
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            const int i = first + 256 * k + threadIdx.x;
            to[k] = i < n ? values[i] : 0.0f;
        }
    }
    template <class Term> __device__ __forceinline__ float sum(Term term, float* room) {
        float sum = 0.0f;
        for (int first = 0; first < n; first += 256 * HELD) {
            if (!whole()) hold(v, from, first);
#pragma unroll
            for (int k = 0; k < HELD; ++k)
                if (first + 256 * k + (int)threadIdx.x < n) sum += term(v[k]);
        }
        return block_sum(sum, room);
    }
    template <class To> __device__ __forceinline__ void each(To to) {  // column, value, weight
        for (int first = 0; first < n; first += 256 * HELD) {
            if (!whole()) { hold(v, from, first); hold(weight, weights, first); }
#pragma unroll
            for (int k = 0; k < HELD; ++k) {
                const int i = first + 256 * k + threadIdx.x;
                if (i < n) to(i, v[k], weight[k]);
            }
        }
    }
};

// Key of a pool of kp members in one channel: the mean of their keys, weighted by a softmax over their gates.
template <class Gate, class Key> __device__ __forceinline__ float pool_key(int kp, Gate gate, Key key) {
    float best = NEG_INF, total = 0.0f, sum = 0.0f;
#pragma unroll 4
    for (int j = 0; j < kp; ++j) best = fmaxf(best, gate(j));
#pragma unroll 4
    for (int j = 0; j < kp; ++j) {
        const float w = expf(gate(j) - best);
        total += w;
        sum += w * key(j);
    }
    return sum / total;
}

// Norms of one row, a block each: q latent (split, [T][ldq]), cache row (float32, and bf16 where narrow_rows_at is given), index key. q_latent [T][Q], kv [T][R], key [T][DI].
// With `state` every row is a span of its own: its key and its gate go to the tail, and when that completes a pool, the pool's key is made. Else keys stay in `key`.
// grid (T, 3 with a key, else 2), 256 threads.
KERNEL __launch_bounds__(256) dsa_prepare(const float* q_latent, int Q, const float* q_norm, u16* q_high, u16* q_low, int ldq, const float* kv, int R, const float* kv_norm,
                                          float eps, float* key, int DI, const float* key_norm, const float* key_bias, const int* slot, const int* position, const int* live,
                                          const u64* rows_at, const u64* narrow_rows_at, const float* gate, int kp, const float* ape, float* state, long slot_stride,
                                          long tail_at, const u64* pools_at) {
    __shared__ float room[32];
    LET_NEXT_START();
    const int row = blockIdx.x, what = blockIdx.y, n = what == 0 ? Q : what == 1 ? R : DI, p = position[row];
    const bool there = live[row];
    HeldRow x = {(what == 0 ? q_latent : what == 1 ? kv : key) + (long)row * n, what == 0 ? q_norm : what == 1 ? kv_norm : key_norm, n};
    const bool first_key = what == 2 && (int)threadIdx.x < DI;
    float* to = what == 1 ? latents_of(rows_at, slot[row]) + (long)p * R : nullptr;
    u16* narrow = what == 1 && narrow_rows_at ? (u16*)narrow_rows_at[slot[row]] + (long)p * R : nullptr;
    x.hold(x.weight, x.weights, 0);
    const float first_bias = first_key ? key_bias[threadIdx.x] : 0.0f;
    WAIT_BEFORE();
    x.hold(x.v, x.from, 0);
    const float first_gate = first_key && state ? gate[(long)row * DI + threadIdx.x] : 0.0f;
    auto normed_key = [&](int i, float v, float w, float mean, float deviation) { return w * (v - mean) / deviation + (i == (int)threadIdx.x ? first_bias : key_bias[i]); };
    if (what < 2) {
        const float by = 1.0f / sqrtf(x.sum([](float v) { return v * v; }, room) / n + eps);
        if (what == 0) {
            x.each([&](int i, float v, float w) { store_split(q_high, q_low, (long)row * ldq + i, w * (v * by)); });
            return;
        }
        if (!there) return;
        x.each([&](int i, float v, float w) {
            const float y = w * (v * by);
            to[i] = y;
            if (narrow) narrow[i] = to_bf16(y);
        });
        return;
    }
    const float mean = x.sum([](float v) { return v; }, room) / n, deviation = sqrtf(x.sum([=](float v) { return (v - mean) * (v - mean); }, room) / n + 1e-6f);
    if (!state) {
        x.each([&](int i, float v, float w) { key[(long)row * DI + i] = normed_key(i, v, w, mean, deviation); });
        return;
    }
    if (!there) return;
    const int member = p % kp;
    float *tail = state + slot[row] * slot_stride + tail_at, *pool = (float*)pools_at[slot[row]] + (long)(p / kp) * DI;
    x.each([&](int i, float v, float w) {
        tail[(long)member * DI + i] = normed_key(i, v, w, mean, deviation);
        tail[(long)(kp + member) * DI + i] = i == (int)threadIdx.x ? first_gate : gate[(long)row * DI + i];
    });
    if (member + 1 < kp) return;
    for (int i = threadIdx.x; i < DI; i += 256)  // the columns that this thread has just written
        pool[i] = pool_key(kp, [&](int j) { return tail[(long)(kp + j) * DI + i] + ape[j * DI + i]; }, [&](int j) { return tail[(long)j * DI + i]; });
}

// Keys of the pools that rows complete; older members come from the tail. grid (T), DI threads (or fewer).
KERNEL dsa_pool(const float* key, const float* gate, int DI, int kp, const float* ape, const int* slot, const int* position, const int* first, const int* live,
                const float* state, long slot_stride, long tail_at, const u64* pools_at) {
    LET_NEXT_START();
    WAIT_BEFORE();
    const int row = blockIdx.x, p = position[row], begin = row - (kp - 1), own = first[row];
    if (!live[row] || (p + 1) % kp) return;
    const float* tail = state + slot[row] * slot_stride + tail_at;
    float* to = (float*)pools_at[slot[row]] + (long)(p / kp) * DI;
    for (int c = threadIdx.x; c < DI; c += blockDim.x)
        to[c] = pool_key(
            kp, [&](int j) { return (begin + j >= own ? gate[(long)(begin + j) * DI + c] : tail[(long)(kp + j) * DI + c]) + ape[j * DI + c]; },
            [&](int j) { return begin + j >= own ? key[(long)(begin + j) * DI + c] : tail[(long)j * DI + c]; });
}
