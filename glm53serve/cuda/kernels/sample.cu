// From logits to tokens on the device: greedy, temperature, top-p; integer sums, so the result does not depend on the order of additions.

#define SCANS 32  // a lane each
#define BINS 2048

#define NOBODY 0x7fffffff
#define PEAK_HELD 10  // logits a thread has under way

// The larger of two logits, of equal ones that with the lower id; NOBODY is no logit.
__device__ __forceinline__ void take_larger(float& best, int& id, float other, int other_id) {
    if (other_id != NOBODY && (id == NOBODY || other > best || (other == best && other_id < id))) { best = other; id = other_id; }
}
__device__ __forceinline__ void take_largest_of_warp(float& best, int& id) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        const float other = __shfl_xor_sync(0xffffffffu, best, o);
        const int other_id = __shfl_xor_sync(0xffffffffu, id, o);
        take_larger(best, id, other, other_id);
    }
}

// Largest logit and its lowest id, of SCANS parts of each row: best [T][SCANS], at [T][SCANS]. grid (SCANS, T), 512 threads.
KERNEL __launch_bounds__(512) logit_peaks(const float* logits, int V, float* best, int* at) {
    __shared__ float top[16];
    __shared__ int where[16];
    LET_NEXT_START();
    WAIT_BEFORE();
    const int per = (V + SCANS - 1) / SCANS, begin = blockIdx.x * per, end = min(V, begin + per), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const float* row = logits + (long)blockIdx.y * V;
    float b = NEG_INF;
    int id = NOBODY;
    for (int first = begin + threadIdx.x; first < end; first += 512 * PEAK_HELD) {
        float v[PEAK_HELD];
#pragma unroll
        for (int k = 0; k < PEAK_HELD; ++k) v[k] = first + 512 * k < end ? row[first + 512 * k] : 0.0f;
#pragma unroll
        for (int k = 0; k < PEAK_HELD; ++k) take_larger(b, id, v[k], first + 512 * k < end ? first + 512 * k : NOBODY);
    }
    take_largest_of_warp(b, id);
    if (lane == 0) { top[warp] = b; where[warp] = id; }
    __syncthreads();
    if (warp) return;
    b = top[lane & 15];
    id = where[lane & 15];
    take_largest_of_warp(b, id);
    if (lane == 0) {
        best[blockIdx.y * SCANS + blockIdx.x] = b;
        at[blockIdx.y * SCANS + blockIdx.x] = id;
    }
}

__device__ __forceinline__ u64 mixed(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
// A number of 53 random bits that depends on (seed, counter) alone; the same as the engine's `uniform`.
__device__ __forceinline__ u64 random53(u64 seed, u32 counter) { return mixed(mixed(seed) + ((u64)counter + 1) * 0x9E3779B97F4A7C15ull) >> 11; }

__device__ __forceinline__ float weight_of(float logit, float peak, float temperature) { return expf((logit - peak) / temperature); }
__device__ __forceinline__ u64 fixed(float weight) { return (u64)(weight * 1099511627776.0f); }  // 40 binary places

// In falling order of weight, the weight (as bits) at which the running mass first exceeds `target` (or reaches it, with `reach`), the mass above it and
// how much a single member of it has. By all 1,024 threads; bins: BINS u64 of shared memory.
__device__ __forceinline__ u32 descend(const float* row, int V, float peak, float temperature, u64 target, bool reach, u64* bins, u64* out) {
    u32 prefix = 0;
    u64 above = 0;
    for (int level = 0; level < 3; ++level) {
        const int shift = level == 0 ? 21 : level == 1 ? 10 : 0, width = level == 2 ? 1024 : BINS;
        for (int i = threadIdx.x; i < width; i += blockDim.x) bins[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < V; i += blockDim.x) {
            const float w = weight_of(row[i], peak, temperature);
            const u32 key = __float_as_uint(w);
            if (level == 0 || (key >> (shift + (level == 1 ? 11 : 10))) == (prefix >> (shift + (level == 1 ? 11 : 10)))) atomicAdd(&bins[(key >> shift) & (width - 1)], fixed(w));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int bin = width - 1, last = -1;
            for (; bin >= 0; --bin) {
                if (bins[bin] == 0) continue;
                last = bin;
                if (reach ? above + bins[bin] >= target : above + bins[bin] > target) break;
                above += bins[bin];
            }
            if (bin < 0) { bin = last; above -= bins[last]; }
            out[0] = ((u64)prefix | ((u64)bin << shift));
            out[1] = above;
        }
        __syncthreads();
        prefix = (u32)out[0];
        above = out[1];
        __syncthreads();
    }
    return prefix;
}

// One token a row. best, at from logit_peaks; temperature <= 1e-4 takes the most likely token, else a draw from softmax(logits / temperature) cut to the
// smallest set of likeliest tokens whose mass reaches top_p (<= 0 or >= 1: all), in falling order, ties by lower id.
// grid (T), 1,024 threads. Dynamic shared memory: BINS u64.
KERNEL __launch_bounds__(1024) sample(const float* logits, int V, const float* best, const int* at, const float* temperature, const float* top_p, const u64* seed,
                                      const int* counter, int* chosen) {
    DYNAMIC_SHARED(u64, bins);
    __shared__ u64 out[2];
    __shared__ int warp_count[32];
    __shared__ int answer;
    LET_NEXT_START();
    const int r = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const float heat = temperature[r];  // older than the step
    WAIT_BEFORE();
    float peak = best[r * SCANS + lane];
    int id = at[r * SCANS + lane];
    take_largest_of_warp(peak, id);
    peak = __shfl_sync(0xffffffffu, peak, 0);
    id = __shfl_sync(0xffffffffu, id, 0);
    if (!(heat > 1e-4f)) {
        if (threadIdx.x == 0) chosen[r] = id;
        return;
    }
    const float* row = logits + (long)r * V;
    if (threadIdx.x == 0) { bins[0] = 0; answer = id; }
    __syncthreads();
    u64 mass = 0;
    for (int i = threadIdx.x; i < V; i += blockDim.x) mass += fixed(weight_of(row[i], peak, heat));
    atomicAdd(&bins[0], mass);
    __syncthreads();
    mass = bins[0];
    __syncthreads();
    const float p = top_p[r];
    if (p > 0.0f && p < 1.0f) {
        const u64 target = (u64)((double)mass * (double)p);
        const u32 edge = descend(row, V, peak, heat, target, true, bins, out);
        const u64 above = out[1], one = fixed(__uint_as_float(edge));
        const u64 members = one ? (target - above + one - 1) / one : 1;
        mass = above + (members ? members : 1) * one;
        __syncthreads();
    }
    const u64 target = __umul64hi(random53(seed[r], (u32)counter[r]) << 11, mass);
    const u32 key = descend(row, V, peak, heat, target, false, bins, out);
    const u64 one = fixed(__uint_as_float(key));
    const int rank = one ? (int)((target - out[1]) / one) : 0;
    int before = 0;
    for (int base = 0; base < V && before <= rank; base += blockDim.x) {
        const int i = base + threadIdx.x;
        const bool equal = i < V && __float_as_uint(weight_of(row[i], peak, heat)) == key;
        const u32 mask = __ballot_sync(0xffffffffu, equal);
        if (lane == 0) warp_count[warp] = __popc(mask);
        __syncthreads();
        int mine = before + __popc(mask & ((1u << lane) - 1)), total = 0;
        for (int w = 0; w < 32; ++w) { if (w < warp) mine += warp_count[w]; total += warp_count[w]; }
        if (equal && mine == rank) answer = i;
        before += total;
        __syncthreads();
    }
    if (threadIdx.x == 0) chosen[r] = answer;
}
