// The residual streams: embedding rows, hyper-connection sites (model spec 3), the final norm (model spec 7.1).

#define OUTS ((2 + HC) * HC)
#define SITE_COLUMNS 32
#define SITE_TOKENS 8
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

__device__ __forceinline__ float returned(const Returned& from, int row, int column, int H) {
    float v = 0.0f;
    if (from.pairs)
#pragma unroll 8
        for (int i = 0; i < from.top_k; ++i) {
            const int at = row * from.top_k + i;
            const float y = from.pairs[(long)at * H + column];  // of a dead row: stale, and not used
            v += from.ids[at] >= 0 ? from.weights[at] * y : 0.0f;
        }
    if (from.y) v += from.y[(long)row * H + column];
    return v;
}

// First half of a site: the streams take the last half's result (mixed != 0), then partial sums of the projection over 32 columns of every stream.
// X [T][HC][H] in place; coefficients [T][COEFFICIENTS] of the last site; fn [OUTS][HC*H] or null (mix only);
// partial [T][OUTS + 1][gridDim.x], the last is the sum of squares. grid (H / 32, T / 8), 256 threads: one a token and column.
KERNEL __launch_bounds__(256) site_open(float* X, int T, int H, int mixed, const float* coefficients, const Returned from, const float* fn, float* partial) {
    __shared__ __align__(16) float x[SITE_TOKENS][HC * SITE_COLUMNS + 4];
    __shared__ __align__(16) float f[OUTS][HC * SITE_COLUMNS + 4];
    LET_NEXT_START();
    const int c = threadIdx.x & 31, token = threadIdx.x >> 5, column = blockIdx.x * SITE_COLUMNS + c, row = blockIdx.y * SITE_TOKENS + token;
    if (fn)
#pragma unroll
        for (int i = 0; i < (OUTS * HC * SITE_COLUMNS + 255) / 256; ++i) {
            const int at = 256 * i + threadIdx.x, o = at / (HC * SITE_COLUMNS), rest = at % (HC * SITE_COLUMNS), j = rest / SITE_COLUMNS;
            if (o < OUTS) f[o][rest] = column < H ? fn[((long)o * HC + j) * H + column] : 0.0f;
        }
    if (!mixed) WAIT_BEFORE();  // else the streams are older than the kernel before; only what it returned is not
    const bool there = row < T && column < H;
    float v[HC];
#pragma unroll
    for (int j = 0; j < HC; ++j) v[j] = there ? X[((long)row * HC + j) * H + column] : 0.0f;
    if (mixed && there) {
        const float* q = coefficients + (long)row * COEFFICIENTS;
        float by[COEFFICIENTS];
#pragma unroll
        for (int i = 0; i < COEFFICIENTS; ++i) by[i] = q[i];
        WAIT_BEFORE();
        const float y = returned(from, row, column, H);
        float mixed_value[HC];
#pragma unroll
        for (int k = 0; k < HC; ++k) {
            float sum = by[k] * y;
#pragma unroll
            for (int j = 0; j < HC; ++j) sum += by[HC + j * HC + k] * v[j];
            mixed_value[k] = sum;
        }
#pragma unroll
        for (int k = 0; k < HC; ++k) {
            v[k] = mixed_value[k];
            X[((long)row * HC + k) * H + column] = v[k];
        }
    }
#pragma unroll
    for (int j = 0; j < HC; ++j) x[token][j * SITE_COLUMNS + c] = v[j];
    WAIT_BEFORE();
    if (!fn) return;
    __syncthreads();
    const int o = c;
    if (row >= T || o > OUTS) return;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int i = 0; i < HC * SITE_COLUMNS; i += 4) {
        const F4 a = *(const F4*)&x[token][i], b = o == OUTS ? a : *(const F4*)&f[o][i];
        sum[0] += a.x * b.x; sum[1] += a.y * b.y; sum[2] += a.z * b.z; sum[3] += a.w * b.w;
    }
    partial[((long)row * (OUTS + 1) + o) * gridDim.x + blockIdx.x] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// The same for the many rows of a prompt: the projection on tensor cores, of bf16 pairs (16 bits of mantissa), chunks of PROMPT_COLUMNS columns;
// partial [T][gridDim.x][OUTS + 1].
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

// Doubly stochastic mixing matrix M[j][k] at j * HC + k, by one thread: nothing to wait for but divisions.
__device__ __forceinline__ void sinkhorn(float* m, int iterations, float eps) {
#pragma unroll
    for (int j = 0; j < HC; ++j) {
        float best = m[j * HC], total = 0.0f;
#pragma unroll
        for (int k = 1; k < HC; ++k) best = fmaxf(best, m[j * HC + k]);
#pragma unroll
        for (int k = 0; k < HC; ++k) total += m[j * HC + k] = expf(m[j * HC + k] - best);
#pragma unroll
        for (int k = 0; k < HC; ++k) m[j * HC + k] = m[j * HC + k] / total + eps;
    }
    for (int i = 0; i < iterations; ++i) {
        if (i)
#pragma unroll
            for (int j = 0; j < HC; ++j) {
                float row = eps;
#pragma unroll
                for (int k = 0; k < HC; ++k) row += m[j * HC + k];
                const float by = __fdividef(1.0f, row);
#pragma unroll
                for (int k = 0; k < HC; ++k) m[j * HC + k] *= by;
            }
#pragma unroll
        for (int k = 0; k < HC; ++k) {
            float column = eps;
#pragma unroll
            for (int j = 0; j < HC; ++j) column += m[j * HC + k];
            const float by = __fdividef(1.0f, column);
#pragma unroll
            for (int j = 0; j < HC; ++j) m[j * HC + k] *= by;
        }
    }
}

// Four neighbouring values from column c on; zeros beyond H.
__device__ __forceinline__ F4 quad_at(const float* from, int c, int H) {
    if (H % 4 == 0 && c < H) return *(const F4*)(from + c);
    return {c < H ? from[c] : 0.0f, c + 1 < H ? from[c + 1] : 0.0f, c + 2 < H ? from[c + 2] : 0.0f, c + 3 < H ? from[c + 3] : 0.0f};
}

#define CLOSE_WARPS 16
#define CLOSE_COLUMNS (CLOSE_WARPS * 128)  // of all warps at a time
// Second half of a site: coefficients [T][COEFFICIENTS] and the sub-layer's normalised input, split, [T][ldx].
// grid (T), 544 threads: the last warp balances the mixing matrix while the others collapse the streams. Dynamic shared memory: H + 4 floats.
KERNEL __launch_bounds__(544) site_close(const float* X, int H, int chunks, const float* partial, const float* base, const float* scale, const float* norm, float norm_eps,
                                         float hc_eps, int iterations, float* coefficients, u16* x_high, u16* x_low, int ldx) {
    DYNAMIC_SHARED(float, x);
    __shared__ float y[32], add[OUTS], by_part[3];  // base and scale
    __shared__ float room[CLOSE_WARPS];
    const int row = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    LET_NEXT_START();
    F4 weight[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) weight[m] = quad_at(norm, warp < CLOSE_WARPS ? 4 * threadIdx.x + CLOSE_COLUMNS * m : H, H);
    if (threadIdx.x < OUTS) add[threadIdx.x] = base[threadIdx.x];
    if (threadIdx.x < 3) by_part[threadIdx.x] = scale[threadIdx.x];
    WAIT_BEFORE();
    float sum[2] = {0.0f, 0.0f};
#pragma unroll 4
    for (int i = lane; i < chunks; i += 32)
#pragma unroll
        for (int m = 0; m < 2; ++m)
            if (warp + 17 * m <= OUTS) sum[m] += partial[((long)row * (OUTS + 1) + warp + 17 * m) * chunks + i];
    // The first columns of a thread are requested before the coefficients are known.
    const float* from = X + (long)row * HC * H;
    F4 v[2][HC];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int j = 0; j < HC; ++j) v[m][j] = quad_at(from + (long)j * H, warp < CLOSE_WARPS ? 4 * threadIdx.x + CLOSE_COLUMNS * m : H, H);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        sum[m] = warp_sum(sum[m]);
        if (lane == 0 && warp + 17 * m <= OUTS) y[warp + 17 * m] = sum[m];
    }
    __syncthreads();
    const float inverse = 1.0f / sqrtf(y[OUTS] / (HC * H) + norm_eps);
    float* to = coefficients + (long)row * COEFFICIENTS;
    if (warp == CLOSE_WARPS) {
        if (lane < HC) to[lane] = 2.0f * sigmoid(y[HC + lane] * inverse * by_part[1] + add[HC + lane]);
        float m[HC * HC];
#pragma unroll
        for (int i = 0; i < HC * HC; ++i) m[i] = y[2 * HC + i] * inverse * by_part[2] + add[2 * HC + i];
        if (lane == 0) {
            sinkhorn(m, iterations, hc_eps);
#pragma unroll
            for (int i = 0; i < HC * HC; ++i) to[HC + i] = m[i];
        }
        return;
    }
    const float own = sigmoid(y[lane < HC ? lane : 0] * inverse * by_part[0] + add[lane < HC ? lane : 0]) + hc_eps;
    float pre[HC], squares = 0.0f;
#pragma unroll
    for (int j = 0; j < HC; ++j) pre[j] = __shfl_sync(0xffffffffu, own, j);
    for (int m = 0, c = 4 * threadIdx.x; c < H; ++m, c += CLOSE_COLUMNS) {
        F4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < HC; ++j) add_scaled(total, pre[j], m == 0 ? v[0][j] : m == 1 ? v[1][j] : quad_at(from + (long)j * H, c, H));
        *(F4*)&x[c] = total;
        squares += total.x * total.x + total.y * total.y + total.z * total.z + total.w * total.w;
    }
    squares = warp_sum(squares);
    if (lane == 0) room[warp] = squares;
    BARRIER(1, 32 * CLOSE_WARPS);
    squares = warp_sum(lane < CLOSE_WARPS ? room[lane] : 0.0f);
    const float by = 1.0f / sqrtf(squares / H + norm_eps);
    for (int m = 0, c = 4 * threadIdx.x; c < H; ++m, c += CLOSE_COLUMNS) {
        const F4 w = m == 0 ? weight[0] : m == 1 ? weight[1] : quad_at(norm, c, H), value = *(const F4*)&x[c];
        const float out[4] = {w.x * (value.x * by), w.y * (value.y * by), w.z * (value.z * by), w.w * (value.w * by)};
        if (x_low && c + 4 <= H && ldx % 4 == 0) {
            u32 high[2], low[2];
            split_pair(out[0], out[1], high[0], low[0]);
            split_pair(out[2], out[3], high[1], low[1]);
            *(U2*)(x_high + (long)row * ldx + c) = {high[0], high[1]};
            *(U2*)(x_low + (long)row * ldx + c) = {low[0], low[1]};
        } else
            for (int i = 0; i < 4 && c + i < H; ++i) store_split(x_high, x_low, (long)row * ldx + c + i, out[i]);
    }
}

// The second half for the many rows of a prompt, in two: what a row's projection says, then the collapse of its streams.
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

// h = rms(mean of the streams), split, [T][ldx]; row r of the output is row rows[r] of X (null: r). grid (T), 1,024 threads. Dynamic shared memory: H floats.
KERNEL __launch_bounds__(1024) final_norm(const float* X, const int* rows, int H, const float* norm, float eps, u16* x_high, u16* x_low, int ldx) {
    DYNAMIC_SHARED(float, x);
    __shared__ float room[32];
    LET_NEXT_START();
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
    for (int c = threadIdx.x; c < H; c += 1024) store_split(x_high, x_low, (long)blockIdx.x * ldx + c, norm[c] * (x[c] * by));
}
