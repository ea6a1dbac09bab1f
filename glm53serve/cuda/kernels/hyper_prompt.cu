// Hyper-connection sites for the many rows of a prompt (model spec 3).

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
