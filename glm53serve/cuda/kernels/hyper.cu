// The residual streams: embedding rows, hyper-connection sites (model spec 3), the final norm (model spec 7.1).

// X[t][j] = embedding row of the token. kind 0: float32 table, 1: bf16 table. grid (T, H / 512), 512 threads.
KERNEL embed(float* X, const int* ids, const void* table, int kind, int H) {
    WAIT_BEFORE();
    const int c = blockIdx.y * 512 + threadIdx.x;
    if (c >= H) return;
    const long from = (long)ids[blockIdx.x] * H, to = (long)blockIdx.x * HC * H;
    const float v = kind ? bf16_value(((const u16*)table)[from + c]) : ((const float*)table)[from + c];
#pragma unroll
    for (int j = 0; j < HC; ++j) X[to + (long)j * H + c] = v;
}

// A site in passes of few rows: mix, project, collapse and norm in one launch. A cluster of SITE_BLOCKS blocks has a row, a block a run of its columns. What a
// block sums over its columns it sends to all blocks, and each adds up what all have sent, in their order.
// Logits of the coefficients are left to the next site, which balances the mixing matrix while it waits for what that matrix mixes.
#define SITE_WARPS 8
#define SITE_THREADS (32 * SITE_WARPS)
#define SHARE (((HIDDEN + SITE_BLOCKS - 1) / SITE_BLOCKS + 3) / 4 * 4)    // columns of a block, but for the last ones
#define WIDTH ((SHARE + SITE_THREADS - 1) / SITE_THREADS * SITE_THREADS)  // room for them
#define EACH_COLUMN(at) for (int turn = 0, at = threadIdx.x; turn < WIDTH / SITE_THREADS; ++turn, at += SITE_THREADS)
#define COLUMN_THERE(c) (HIDDEN == SITE_BLOCKS * WIDTH || (c) < end)
#define WARP_OUTS ((OUTS + SITE_WARPS - 1) / SITE_WARPS)                  // outputs of the projection a warp sums over its block's columns: at most 3
#define FN_COLUMNS 128                                                    // of every stream, that a warp has of fn at a time: four neighbouring ones a lane

// X [T][HC][HIDDEN] in place; coefficients [T][COEFFICIENTS]: logits of the last site (mixed != 0), then of this one; fn [OUTS][HC*HIDDEN] or null (mix only);
// base [OUTS]; scale [3]; norm [HIDDEN]; the sub-layer's normalised input, split, [T][ldx].
struct SiteGiven {
    float* X; int mixed; float* coefficients; Returned from;
    const float *fn, *base, *scale, *norm; float norm_eps, hc_eps; int iterations; u16 *x_high, *x_low; int ldx;
};

__device__ __forceinline__ float quick_sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }
// Sums over the lanes of a warp of four values, for all lanes.
__device__ __forceinline__ F4 warp_sums(const F4& v) {
    const bool high = threadIdx.x & 16, odd = threadIdx.x & 8;
    const float a = (high ? v.z : v.x) + __shfl_xor_sync(0xffffffffu, high ? v.x : v.z, 16), b = (high ? v.w : v.y) + __shfl_xor_sync(0xffffffffu, high ? v.y : v.w, 16);
    float sum = (odd ? b : a) + __shfl_xor_sync(0xffffffffu, odd ? a : b, 8);
    for (int o = 4; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    return {__shfl_sync(0xffffffffu, sum, 0), __shfl_sync(0xffffffffu, sum, 8), __shfl_sync(0xffffffffu, sum, 16), __shfl_sync(0xffffffffu, sum, 24)};
}

// grid (SITE_BLOCKS, T), 256 threads: few enough registers to begin beside a product's block, whose end it waits for.
KERNEL __launch_bounds__(256, 3) site(const __grid_constant__ SiteGiven s) {
    __shared__ __align__(16) float streams[HC][WIDTH];
    __shared__ __align__(16) float sums[SITE_BLOCKS][4 * SITE_WARPS];  // of every block and warp: WARP_OUTS outputs, squares of the streams
    __shared__ __align__(16) float squares[SITE_BLOCKS * SITE_WARPS];  // of what the streams collapse to
    __shared__ __align__(16) float q[COEFFICIENTS];
    __shared__ float norm[WIDTH], add[32], by_part[32];
    __shared__ __align__(8) u64 heard[2];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = blockIdx.x, row = blockIdx.y, begin = rank * SHARE, end = min(HIDDEN, begin + SHARE);
    const float* own_fn = s.fn + WARP_OUTS * HC * HIDDEN * warp + begin;
    const int own_outs = min(WARP_OUTS, OUTS - WARP_OUTS * warp);
    LET_NEXT_START();
    if (s.fn) {
        if (threadIdx.x == 0) {
            barrier_init(&heard[0], 1);
            barrier_init(&heard[1], 1);
            barriers_ready();
            barrier_expect(&heard[0], 16 * SITE_BLOCKS * SITE_WARPS);
            barrier_expect(&heard[1], 4 * SITE_BLOCKS * SITE_WARPS);
        }
        __syncwarp();
        cluster_arrive();
        for (int n = lane; n < own_outs * HC * (WIDTH / 32); n += 32) {  // what is not in registers before the wait is in L2 by then
            const int c = n % (WIDTH / 32) * 32;
            if (COLUMN_THERE(begin + c)) prefetch_l2(own_fn + n / (WIDTH / 32) * HIDDEN + c);
        }
    }
    if (!s.mixed) WAIT_BEFORE();  // else the streams are older than the kernel before, and so is how what that returns is weighted
    EACH_COLUMN(at)
#pragma unroll
        for (int j = 0; j < HC; ++j) streams[j][at] = COLUMN_THERE(begin + at) ? s.X[(long)(row * HC + j) * HIDDEN + begin + at] : 0.0f;
    const bool counts = s.mixed && s.from.pairs && lane < s.from.top_k && s.from.ids[row * s.from.top_k + lane] >= 0;
    const float weight = counts ? s.from.weights[row * s.from.top_k + lane] : 0.0f;
    const u32 alive = __ballot_sync(0xffffffffu, counts);  // bit i: expert i counts; what a dead row has in its place is stale
    const int o = WARP_OUTS * (lane >> 2) + (lane & 3);    // the output whose sum this lane will have
    const bool has_output = (lane & 3) < WARP_OUTS && o < OUTS;
    if (s.fn) {
        EACH_COLUMN(at) norm[at] = COLUMN_THERE(begin + at) ? s.norm[begin + at] : 0.0f;
        if (warp == 0) {
            add[lane] = has_output ? s.base[o] : 0.0f;
            by_part[lane] = has_output ? s.scale[o < HC ? 0 : o < 2 * HC ? 1 : 2] : 0.0f;
        }
    }
    if (s.mixed && threadIdx.x == SITE_THREADS - 32) {
        const float* logits = s.coefficients + row * COEFFICIENTS;
        float post[HC], m[HC * HC];
#pragma unroll
        for (int j = 0; j < HC; ++j) post[j] = logits[j];
#pragma unroll
        for (int i = 0; i < HC * HC; ++i) m[i] = logits[HC + i];
        sinkhorn(m, s.iterations, s.hc_eps);
#pragma unroll
        for (int j = 0; j < HC; ++j) q[j] = 2.0f * quick_sigmoid(post[j]);
#pragma unroll
        for (int i = 0; i < HC * HC; ++i) q[HC + i] = m[i];
    }
    __syncwarp();
    F4 f[WARP_OUTS][HC];
    auto fill = [&](int at) {
#pragma unroll
        for (int i = 0; i < WARP_OUTS; ++i)
#pragma unroll
            for (int j = 0; j < HC; ++j) {
                const int c = begin + at + 4 * lane;
                const float* quad = own_fn + (i * HC + j) * HIDDEN + at + 4 * lane;
                const bool there = i < own_outs;
                if (HIDDEN % 4 == 0) f[i][j] = there && COLUMN_THERE(c) ? *(const F4*)quad : F4{0.0f, 0.0f, 0.0f, 0.0f};
                else f[i][j] = {there && c < end ? quad[0] : 0.0f, there && c + 1 < end ? quad[1] : 0.0f, there && c + 2 < end ? quad[2] : 0.0f, there && c + 3 < end ? quad[3] : 0.0f};
            }
    };
    if (s.fn) {
        fill(0);
        cluster_wait();
    }
    if (s.mixed) WAIT_BEFORE();
    float own = 0.0f;  // squares of this thread's streams
    EACH_COLUMN(at) {
        const int c = begin + at;
        const bool there = s.mixed && COLUMN_THERE(c);
        float y = 0.0f;
        if (s.mixed && s.from.pairs)
#pragma unroll 1
            for (int i = 0; i < s.from.top_k; i += 8) {
                const float* pairs = s.from.pairs + (long)(row * s.from.top_k + i) * HIDDEN + c;
                const u32 here = there ? alive >> i : 0;
                float part[8];
#pragma unroll
                for (int k = 0; k < 8; ++k) part[k] = here >> k & 1 ? pairs[k * HIDDEN] : 0.0f;
#pragma unroll
                for (int k = 0; k < 8; ++k) y += __shfl_sync(0xffffffffu, weight, i + k) * part[k];
            }
        if (there && s.from.y) y += s.from.y[(long)row * HIDDEN + c];
        if (s.mixed && !turn) __syncthreads();  // the coefficients are there
        float v[HC];
#pragma unroll
        for (int j = 0; j < HC; ++j) v[j] = streams[j][at];
#pragma unroll
        for (int k = 0; k < HC; ++k) {
            float to = v[k];
            if (s.mixed) {
                to = q[k] * y;
#pragma unroll
                for (int j = 0; j < HC; ++j) to += q[HC + j * HC + k] * v[j];
                if (there) s.X[(long)(row * HC + k) * HIDDEN + c] = to;
            }
            streams[k][at] = to;
            own += to * to;
        }
    }
    if (!s.fn) return;
    __syncthreads();
    float sum[3] = {0.0f, 0.0f, 0.0f};
    auto project = [&](int at) {
#pragma unroll
        for (int j = 0; j < HC; ++j) {
            const F4 a = *(const F4*)&streams[j][at + 4 * lane];
#pragma unroll
            for (int i = 0; i < WARP_OUTS; ++i) {
                sum[i] += a.x * f[i][j].x;
                sum[i] += a.y * f[i][j].y;
                sum[i] += a.z * f[i][j].z;
                sum[i] += a.w * f[i][j].w;
            }
        }
    };
    project(0);
#pragma unroll 1
    for (int at = FN_COLUMNS; at < WIDTH; at += FN_COLUMNS) {
        fill(at);
        project(at);
    }
    const F4 of_warp = warp_sums({sum[0], sum[1], sum[2], own});
    if (lane < SITE_BLOCKS) send16(&sums[rank][4 * warp], of_warp, &heard[0], lane);
    barrier_wait_sent(&heard[0], 0);
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int b = 0; b < SITE_BLOCKS; ++b) part[b & 3] += sums[b][lane];
    const float total = (part[0] + part[1]) + (part[2] + part[3]);
    float all = total;
    for (int m = 4; m < 32; m <<= 1) all += __shfl_xor_sync(0xffffffffu, all, m);
    const float inverse = rsqrtf(__shfl_sync(0xffffffffu, all, 3) * (1.0f / (HC * HIDDEN)) + s.norm_eps);
    const float logit = total * inverse * by_part[lane] + add[lane], gate = quick_sigmoid(logit) + s.hc_eps;
    if (rank == 0 && warp == 0 && has_output && o >= HC) s.coefficients[row * COEFFICIENTS + o - HC] = logit;
    float pre[HC], square = 0.0f;
#pragma unroll
    for (int j = 0; j < HC; ++j) pre[j] = __shfl_sync(0xffffffffu, gate, 4 * (j / WARP_OUTS) + j % WARP_OUTS);
    EACH_COLUMN(at) {
        float to = 0.0f;
#pragma unroll
        for (int j = 0; j < HC; ++j) to += pre[j] * streams[j][at];
        streams[0][at] = to;
        square += to * to;
    }
    square = warp_sum(square);
    if (lane < SITE_BLOCKS) send4(&squares[rank * SITE_WARPS + warp], square, &heard[1], lane);
    barrier_wait_sent(&heard[1], 0);
    const F4 four = lane < SITE_WARPS / 4 * SITE_BLOCKS ? *(const F4*)&squares[4 * lane] : F4{0.0f, 0.0f, 0.0f, 0.0f};
    const float to_unit = rsqrtf(warp_sum((four.x + four.y) + (four.z + four.w)) * (1.0f / HIDDEN) + s.norm_eps);
    EACH_COLUMN(at)
        if (COLUMN_THERE(begin + at)) store_split(s.x_high, s.x_low, (long)row * s.ldx + begin + at, norm[at] * (streams[0][at] * to_unit));
}

// h = rms(mean of the streams), split, [T][ldx]; row r of the output is row rows[r] of X (null: r). grid (T), 1,024 threads. Dynamic shared memory: H floats.
KERNEL __launch_bounds__(1024) final_norm(const float* X, const int* rows, int H, const float* norm, float eps, u16* x_high, u16* x_low, int ldx) {
    DYNAMIC_SHARED(float, x);
    __shared__ float room[32];
    LET_NEXT_START();
    float weight[4];  // of the first columns: they come from far
#pragma unroll
    for (int k = 0; k < 4; ++k) weight[k] = (int)threadIdx.x + 1024 * k < H ? norm[threadIdx.x + 1024 * k] : 0.0f;
    WAIT_BEFORE();
    const long from = (long)(rows ? rows[blockIdx.x] : blockIdx.x) * HC * H;
    float squares = 0.0f;
#pragma unroll 4
    for (int c = threadIdx.x; c < H; c += 1024) {
        float v = 0.0f;
#pragma unroll
        for (int j = 0; j < HC; ++j) v += X[from + (long)j * H + c];
        v /= HC;
        x[c] = v;
        squares += v * v;
    }
    const float by = 1.0f / sqrtf(block_sum(squares, room) / H + eps);
    auto store = [&](int c, float w) { if (c < H) store_split(x_high, x_low, (long)blockIdx.x * ldx + c, w * (x[c] * by)); };
#pragma unroll
    for (int k = 0; k < 4; ++k) store(threadIdx.x + 1024 * k, weight[k]);
    for (int c = threadIdx.x + 4096; c < H; c += 1024) store(c, norm[c]);
}
