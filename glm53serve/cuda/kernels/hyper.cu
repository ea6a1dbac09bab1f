// The residual streams: embedding rows, hyper-connection sites (model spec 3), the final norm (model spec 7.1).

#define OUTS ((2 + HC) * HC)
#define COEFFICIENTS (HC + HC * HC)  // post [HC], then mix [HC][HC]

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

// What a feed-forward or attention half returned for one value: one array, or weighted experts plus the shared expert.
struct Returned { const float* y; const float* pairs; const int* ids; const float* weights; int top_k; };

// First half of a site for the many rows of a prompt: the streams take the last half's result (mixed != 0), then partial sums of the projection over
// PROMPT_COLUMNS columns of every stream, on tensor cores, of bf16 pairs (16 bits of mantissa). X [T][HC][H] in place; coefficients [T][COEFFICIENTS] of the
// last site; fn [OUTS][HC*H] or null (mix only); partial [T][gridDim.x][OUTS + 1], the last is the sum of squares.
// A lane has four neighbouring columns of two rows in the places of a product's A operand; the order of columns within a product does not matter.
#define PROMPT_COLUMNS 128
#define PROMPT_ROWS 64
#define OUT_TILES ((OUTS + 7) / 8)
__device__ __forceinline__ void split_pair(float a, float b, u32& high, u32& low) {
    high = pack_bf16(a, b);
    low = pack_bf16(a - low_bf16(high), b - high_bf16(high));
}
__device__ __forceinline__ void add_scaled(F4& sum, float by, const F4& v) { sum.x += by * v.x; sum.y += by * v.y; sum.z += by * v.z; sum.w += by * v.w; }
__device__ __forceinline__ F4 returned_quad(const Returned& from, int row, int column, int H) {
    F4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (from.pairs)
#pragma unroll 8
        for (int i = 0; i < from.top_k; ++i) {
            const int at = row * from.top_k + i;
            const F4 y = *(const F4*)(from.pairs + (long)at * H + column);
            if (from.ids[at] >= 0) add_scaled(v, from.weights[at], y);
        }
    if (from.y) add_scaled(v, 1.0f, *(const F4*)(from.y + (long)row * H + column));
    return v;
}
// H a multiple of 4. grid (H / PROMPT_COLUMNS, T / PROMPT_ROWS), 256 threads: a warp has 16 columns of every stream.
KERNEL __launch_bounds__(256) site_open_prompt(float* X, int T, int H, int mixed, const float* coefficients, const Returned from, const float* fn, float* partial) {
    __shared__ float q[PROMPT_ROWS][COEFFICIENTS + 1];
    __shared__ float sums[8][16][OUTS + 2];
    WAIT_BEFORE();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, first = blockIdx.y * PROMPT_ROWS;
    const int column = blockIdx.x * PROMPT_COLUMNS + warp * 16 + 4 * t;
    const F4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
    if (mixed)
        for (int at = threadIdx.x; at < PROMPT_ROWS * COEFFICIENTS; at += 256)
            if (first + at / COEFFICIENTS < T) q[at / COEFFICIENTS][at % COEFFICIENTS] = coefficients[(long)first * COEFFICIENTS + at];
    u32 high[HC][OUT_TILES][2], low[HC][OUT_TILES][2];
    if (fn)
#pragma unroll
        for (int j = 0; j < HC; ++j)
#pragma unroll
            for (int n = 0; n < OUT_TILES; ++n) {
                const int o = n * 8 + g;
                const F4 f = o < OUTS && column < H ? *(const F4*)(fn + ((long)o * HC + j) * H + column) : zero;
                split_pair(f.x, f.y, high[j][n][0], low[j][n][0]);
                split_pair(f.z, f.w, high[j][n][1], low[j][n][1]);
            }
    __syncthreads();
    for (int base = 0; base < PROMPT_ROWS && first + base < T; base += 16) {
        float c[OUT_TILES][4], squares[2];
#pragma unroll
        for (int i = 0; i < OUT_TILES * 4; ++i) c[i / 4][i % 4] = 0.0f;
        F4 v[2][HC];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first + base + g + 8 * r;
            const bool there = row < T && column < H;
#pragma unroll
            for (int j = 0; j < HC; ++j) v[r][j] = there ? *(const F4*)(X + ((long)row * HC + j) * H + column) : zero;
            if (mixed && there) {
                const float* by = q[base + g + 8 * r];
                const F4 y = returned_quad(from, row, column, H);
                F4 to[HC];
#pragma unroll
                for (int k = 0; k < HC; ++k) {
                    to[k] = zero;
                    add_scaled(to[k], by[k], y);
#pragma unroll
                    for (int j = 0; j < HC; ++j) add_scaled(to[k], by[HC + j * HC + k], v[r][j]);
                }
#pragma unroll
                for (int k = 0; k < HC; ++k) *(F4*)(X + ((long)row * HC + k) * H + column) = v[r][k] = to[k];
            }
            squares[r] = 0.0f;
#pragma unroll
            for (int j = 0; j < HC; ++j) squares[r] += v[r][j].x * v[r][j].x + v[r][j].y * v[r][j].y + v[r][j].z * v[r][j].z + v[r][j].w * v[r][j].w;
            squares[r] += __shfl_xor_sync(0xffffffffu, squares[r], 1);
            squares[r] += __shfl_xor_sync(0xffffffffu, squares[r], 2);
        }
        if (!fn) continue;
#pragma unroll
        for (int j = 0; j < HC; ++j) {
            u32 a[4], e[4];
            split_pair(v[0][j].x, v[0][j].y, a[0], e[0]);
            split_pair(v[1][j].x, v[1][j].y, a[1], e[1]);
            split_pair(v[0][j].z, v[0][j].w, a[2], e[2]);
            split_pair(v[1][j].z, v[1][j].w, a[3], e[3]);
#pragma unroll
            for (int n = 0; n < OUT_TILES; ++n) {
                mma(c[n], a, high[j][n][0], high[j][n][1]);
                mma(c[n], a, low[j][n][0], low[j][n][1]);
                mma(c[n], e, high[j][n][0], high[j][n][1]);
            }
        }
        __syncthreads();  // the sums of the rows before are read
#pragma unroll
        for (int n = 0; n < OUT_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int o = n * 8 + 2 * t + (i & 1);
                if (o < OUTS) sums[warp][g + 8 * (i >> 1)][o] = c[n][i];
            }
        if (t < 2) sums[warp][g + 8 * t][OUTS] = t ? squares[1] : squares[0];
        __syncthreads();
        for (int at = threadIdx.x; at < 16 * (OUTS + 1); at += 256) {
            const int token = at / (OUTS + 1), o = at % (OUTS + 1);
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; ++w) sum += sums[w][token][o];
            if (first + base + token < T) partial[((long)(first + base + token) * gridDim.x + blockIdx.x) * (OUTS + 1) + o] = sum;
        }
    }
}

// Doubly stochastic mixing matrix M[j][k] at j * HC + k, by one thread: nothing to wait for but divisions. The rounds scale rows and columns: M stays as it is
// until the end, beside the row's and the column's divisors.
__device__ __forceinline__ void sinkhorn(float* m, int iterations, float eps) {
    float rows[HC], columns[HC], by_row[HC], by_column[HC];
#pragma unroll
    for (int j = 0; j < HC; ++j) {
        float best = m[j * HC], total = 0.0f;
#pragma unroll
        for (int k = 1; k < HC; ++k) best = fmaxf(best, m[j * HC + k]);
#pragma unroll
        for (int k = 0; k < HC; ++k) total += m[j * HC + k] = expf(m[j * HC + k] - best);
        const float by_total = __fdividef(1.0f, total);
#pragma unroll
        for (int k = 0; k < HC; ++k) m[j * HC + k] = m[j * HC + k] * by_total + eps;
        rows[j] = columns[j] = by_row[j] = by_column[j] = 1.0f;
    }
    for (int i = 0; i < iterations; ++i) {
        if (i)
#pragma unroll
            for (int j = 0; j < HC; ++j) {
                rows[j] *= eps;
#pragma unroll
                for (int k = 0; k < HC; ++k) rows[j] += m[j * HC + k] * by_column[k];
                by_row[j] = __fdividef(1.0f, rows[j]);
            }
#pragma unroll
        for (int k = 0; k < HC; ++k) {
            columns[k] *= eps;
#pragma unroll
            for (int j = 0; j < HC; ++j) columns[k] += m[j * HC + k] * by_row[j];
            by_column[k] = __fdividef(1.0f, columns[k]);
        }
    }
#pragma unroll
    for (int i = 0; i < HC * HC; ++i) m[i] *= by_row[i / HC] * by_column[i % HC];
}

// The second half, in two: what a row's projection says, then the collapse of its streams.
// pre [T][HC]: weights of the streams. grid (T / BALANCE_ROWS), 256 threads: a warp sums rows, a thread balances one.
#define BALANCE_ROWS 32
KERNEL __launch_bounds__(256) site_balance_prompt(int T, int H, int chunks, const float* partial, const float* base, const float* scale, float norm_eps, float hc_eps,
                                                  int iterations, float* coefficients, float* pre) {
    __shared__ float y[BALANCE_ROWS][OUTS + 2];
    WAIT_BEFORE();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = blockIdx.x * BALANCE_ROWS;
    for (int local = warp; local < BALANCE_ROWS && first + local < T; local += 8)
        for (int o = lane; o <= OUTS; o += 32) {
            float sum = 0.0f;
#pragma unroll 8
            for (int i = 0; i < chunks; ++i) sum += partial[((long)(first + local) * chunks + i) * (OUTS + 1) + o];
            y[local][o] = sum;
        }
    __syncthreads();
    const int row = first + threadIdx.x;
    if (threadIdx.x >= BALANCE_ROWS || row >= T) return;
    const float* mine = y[threadIdx.x];
    const float inverse = 1.0f / sqrtf(mine[OUTS] / (HC * H) + norm_eps);
    float m[HC * HC];
#pragma unroll
    for (int j = 0; j < HC; ++j) {
        pre[(long)row * HC + j] = sigmoid(mine[j] * inverse * scale[0] + base[j]) + hc_eps;
        coefficients[(long)row * COEFFICIENTS + j] = 2.0f * sigmoid(mine[HC + j] * inverse * scale[1] + base[HC + j]);
    }
#pragma unroll
    for (int i = 0; i < HC * HC; ++i) m[i] = mine[2 * HC + i] * inverse * scale[2] + base[2 * HC + i];
    sinkhorn(m, iterations, hc_eps);
#pragma unroll
    for (int i = 0; i < HC * HC; ++i) coefficients[(long)row * COEFFICIENTS + HC + i] = m[i];
}
// High parts in product order, [T][ldx]. H a multiple of 4. grid (T), 256 threads. Dynamic shared memory: H floats.
KERNEL __launch_bounds__(256, 4) site_close_prompt(const float* X, int H, const float* pre, const float* norm, float eps, u16* x_high, int ldx) {
    DYNAMIC_SHARED(F4, x);
    __shared__ float room[32];
    WAIT_BEFORE();
    const int row = blockIdx.x;
    float by[HC], squares = 0.0f;
#pragma unroll
    for (int j = 0; j < HC; ++j) by[j] = pre[(long)row * HC + j];
#pragma unroll 2
    for (int c = 4 * threadIdx.x; c < H; c += 1024) {
        F4 v[HC], sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < HC; ++j) v[j] = *(const F4*)(X + ((long)row * HC + j) * H + c);
#pragma unroll
        for (int j = 0; j < HC; ++j) add_scaled(sum, by[j], v[j]);
        x[c / 4] = sum;
        squares += sum.x * sum.x + sum.y * sum.y + sum.z * sum.z + sum.w * sum.w;
    }
    const float to_unit = 1.0f / sqrtf(block_sum(squares, room) / H + eps);
    for (int c = 4 * threadIdx.x; c < H; c += 1024) {
        const F4 v = x[c / 4], n = *(const F4*)(norm + c);
        u16* to = x_high + in_product_order((long)row * ldx + c);
        *(u32*)to = pack_bf16(n.x * (v.x * to_unit), n.y * (v.y * to_unit));
        *(u32*)(to + 8) = pack_bf16(n.z * (v.z * to_unit), n.w * (v.w * to_unit));
    }
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
        for (int j = 0; j < HC; ++j) streams[j][at] = COLUMN_THERE(begin + at) ? s.X[(row * HC + j) * HIDDEN + begin + at] : 0.0f;
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
                const float* pairs = s.from.pairs + (row * s.from.top_k + i) * HIDDEN + c;
                const u32 here = there ? alive >> i : 0;
                float part[8];
#pragma unroll
                for (int k = 0; k < 8; ++k) part[k] = here >> k & 1 ? pairs[k * HIDDEN] : 0.0f;
#pragma unroll
                for (int k = 0; k < 8; ++k) y += __shfl_sync(0xffffffffu, weight, i + k) * part[k];
            }
        if (there && s.from.y) y += s.from.y[row * HIDDEN + c];
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
                if (there) s.X[(row * HC + k) * HIDDEN + c] = to;
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
