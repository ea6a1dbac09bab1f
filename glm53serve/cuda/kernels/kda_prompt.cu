// KDA over the many rows of a prompt (model spec 4): the recurrence in chunks of 16 tokens on tensor cores. KDA_D a multiple of 16, at most 128, and
// gates of at least -5 a token. Arrays as in kda.cu.
//
// In a chunk, with L_t the product of the decays up to token t (L_t[d] >= e^-80, so its inverse is a float32 too), S0 the state before it:
//   A[t][i] = sum_d k_t L_t k_i / L_i  (i < t),   B[t][i] = sum_d q_t L_t k_i / L_i  (i <= t)
//   u_t = beta_t (v_t - S0^T (k_t L_t) - sum_i A[t][i] u_i),  so  u = Z (v - S0^T (k L))  with  Z[t] = beta_t (1_t - sum_i A[t][i] Z[i])
//   o_t = S0^T (q_t L_t) + sum_i B[t][i] u_i,   S = L_end S0 + sum_i (k_i L_end / L_i) u_i^T
// Every product is of bf16 pairs: 16 bits of mantissa. S transposed stays in registers, as sums and as operand: a warp has 16 of its value rows.

#if !EXACT && KDA_D % 16 == 0 && KDA_D <= 128
#define CHUNK 16
#define KEY_STEPS (KDA_D / 16)
#define KEY_STRIDE (KDA_D + 8)
#define ROW_STRIP 32

// Convolution, gates and unit lengths, as kda_prepare: a warp has ROW_STRIP rows of a head, a lane four channels; what the next row needs is requested
// before this one is computed. grid (heads, T / (4 * ROW_STRIP)), 128 threads.
KERNEL __launch_bounds__(128) kda_prepare_prompt(const float* raw, int ld, const float* beta, int ldb, const float* z, int T, int heads, const int* slot, const int* first,
                                                 const float* state, long slot_stride, long window_at, const float* taps, const float* dt_bias, const float* a_log,
                                                 float bound, float* q_out, float* k_out, float* v_out, float* decay, float* beta_out, float* qk_out) {
    __shared__ __align__(16) float tap[3][CONV][KDA_D];
    WAIT_BEFORE();
    const int head = blockIdx.x, lane = threadIdx.x & 31, P = heads * KDA_D, row0 = (blockIdx.y * 4 + (threadIdx.x >> 5)) * ROW_STRIP, end = min(row0 + ROW_STRIP, T);
    for (int at = threadIdx.x; at < 3 * KDA_D * CONV; at += 128) {
        const int s = at / (KDA_D * CONV), rest = at % (KDA_D * CONV);
        tap[s][rest % CONV][rest / CONV] = taps[((long)s * P + head * KDA_D) * CONV + rest];
    }
    __syncthreads();
    if (row0 >= T) return;
    const bool there = 4 * lane < KDA_D;
    const int channel = head * KDA_D + (there ? 4 * lane : 0);
    F4 v[3][CONV];
    const F4 bias = *(const F4*)(dt_bias + channel);
    const float speed = expf(a_log[head]);
    auto read = [&](int row, int from, int s) {  // the raw row `from` as row `row` sees it
        const int begin = first[row];
        return from >= begin ? *(const F4*)(raw + (long)from * ld + s * P + channel)
                             : *(const F4*)(state + slot[row] * slot_stride + window_at + (long)(CONV - 1 + from - begin) * 3 * P + s * P + channel);
    };
    auto read_last = [&](int row, F4* to) {
#pragma unroll
        for (int s = 0; s < 3; ++s) to[s] = *(const F4*)(raw + (long)row * ld + s * P + channel);
        to[3] = *(const F4*)(z + (long)row * P + channel);
    };
    F4 next[4];
    read_last(row0, next);
    for (int row = row0; row < end; ++row) {
        const bool fresh = row == row0 || first[row] == row;
        const F4 zz = next[3];
#pragma unroll
        for (int s = 0; s < 3; ++s) {
#pragma unroll
            for (int j = 0; j < CONV - 1; ++j) v[s][j] = fresh ? read(row, row - (CONV - 1 - j), s) : v[s][j + 1];
            v[s][CONV - 1] = next[s];
        }
        if (row + 1 < end) read_last(row + 1, next);
        float c[3][4];
#pragma unroll
        for (int s = 0; s < 3; ++s) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < CONV; ++j) {
                const F4 by = *(const F4*)&tap[s][j][there ? 4 * lane : 0];
                sum[0] += v[s][j].x * by.x; sum[1] += v[s][j].y * by.y; sum[2] += v[s][j].z * by.z; sum[3] += v[s][j].w * by.w;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) c[s][i] = there ? silu(sum[i]) : 0.0f;
        }
        float total[3];
        total[0] = c[0][0] * c[0][0] + c[0][1] * c[0][1] + c[0][2] * c[0][2] + c[0][3] * c[0][3];
        total[1] = c[1][0] * c[1][0] + c[1][1] * c[1][1] + c[1][2] * c[1][2] + c[1][3] * c[1][3];
        total[2] = c[0][0] * c[1][0] + c[0][1] * c[1][1] + c[0][2] * c[1][2] + c[0][3] * c[1][3];
#pragma unroll
        for (int i = 0; i < 3; ++i) total[i] = warp_sum(total[i]);
        const float q_by = 1.0f / (sqrtf(total[0] + 1e-6f) * sqrtf((float)KDA_D)), k_by = 1.0f / sqrtf(total[1] + 1e-6f);
        if (lane == 0) {
            beta_out[row * heads + head] = sigmoid(beta[(long)row * ldb + head]);
            qk_out[row * heads + head] = total[2] * q_by * k_by;
        }
        if (!there) continue;
        const long at = (long)row * P + channel;
        *(F4*)(q_out + at) = {c[0][0] * q_by, c[0][1] * q_by, c[0][2] * q_by, c[0][3] * q_by};
        *(F4*)(k_out + at) = {c[1][0] * k_by, c[1][1] * k_by, c[1][2] * k_by, c[1][3] * k_by};
        *(F4*)(v_out + at) = {c[2][0], c[2][1], c[2][2], c[2][3]};
        *(F4*)(decay + at) = {expf(bound * sigmoid(speed * (zz.x + bias.x))), expf(bound * sigmoid(speed * (zz.y + bias.y))), expf(bound * sigmoid(speed * (zz.z + bias.z))),
                              expf(bound * sigmoid(speed * (zz.w + bias.w)))};
    }
}

// a = rms(o per head) * sigmoid(gate), high parts in product order, as kda_finish: a warp has a row of a head. grid (heads / 8, T), 256 threads.
KERNEL __launch_bounds__(256) kda_finish_prompt(const float* o, const float* gate, const float* norm, float eps, int heads, u16* x_high, int ldx) {
    WAIT_BEFORE();
    const int head = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, i = 4 * lane;
    if (head >= heads) return;
    const long at = ((long)blockIdx.y * heads + head) * KDA_D + i;
    const F4 zero = {0.0f, 0.0f, 0.0f, 0.0f}, v = i < KDA_D ? *(const F4*)(o + at) : zero, g = i < KDA_D ? *(const F4*)(gate + at) : zero;
    const float by = 1.0f / sqrtf(warp_sum(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w) / KDA_D + eps);
    if (i >= KDA_D) return;
    const F4 n = *(const F4*)(norm + i);
    u16* to = x_high + in_product_order((long)blockIdx.y * ldx + head * KDA_D + i);
    *(u32*)to = pack_bf16(n.x * (v.x * by) * sigmoid(g.x), n.y * (v.y * by) * sigmoid(g.y));
    *(u32*)(to + 8) = pack_bf16(n.z * (v.z * by) * sigmoid(g.z), n.w * (v.w * by) * sigmoid(g.w));
}

struct Chunk {  // what does not depend on the state; [0] high, [1] low parts
    u16 kl[2][CHUNK][KEY_STRIDE], ql[2][CHUNK][KEY_STRIDE], k_over[2][CHUNK][KEY_STRIDE], k_end[2][CHUNK][KEY_STRIDE];
    u16 z[2][CHUNK][CHUNK + 8], b[2][CHUNK][CHUNK + 8];
    float end[KDA_D], a[CHUNK][CHUNK + 1], beta[CHUNK];
};

__device__ __forceinline__ void put_pair(u16* high, u16* low, float x) {
    const u16 h = to_bf16(x);
    *high = h;
    *low = to_bf16(x - bf16_value(h));
}
__device__ __forceinline__ void pair_parts(float x, float y, u32& high, u32& low) {
    high = pack_bf16(x, y);
    low = pack_bf16(x - low_bf16(high), y - high_bf16(high));
}
// The B operand of a k-step of 16 columns and 16 tokens (two product columns of 8), of rows [token][stride].
__device__ __forceinline__ void token_operand(u32* b, const u16* rows, int stride, int lane) {
    load_matrices(b, rows + ((lane & 7) + (lane >> 4) * 8) * stride + (lane >> 3 & 1) * 8);
}

struct RawChunk { float k[CHUNK], q[CHUNK], decay[CHUNK], beta; };  // of one key channel; beta of one token

// Tokens beyond the span leave the state as it is.
__device__ __forceinline__ void read_chunk(RawChunk& raw, const float* k, const float* q, const float* decay, const float* beta, long row0, int there, int P, int heads, int head) {
    const int d = threadIdx.x & 127;
    raw.beta = d < min(there, CHUNK) ? beta[(row0 + d) * heads + head] : 0.0f;
    if (d < KDA_D)
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            const long at = (row0 + i) * P + head * KDA_D + d;
            raw.k[i] = i < there ? k[at] : 0.0f; raw.q[i] = i < there ? q[at] : 0.0f; raw.decay[i] = i < there ? decay[at] : 1.0f;
        }
}

// Warps 4 .. 7: keys and queries with their decays. Thread d has key channel d. `after`: called once the raw values are used.
template <class After> __device__ __forceinline__ void prepare_chunk(Chunk& to, const RawChunk& raw, After after) {
    const int d = threadIdx.x & 127;
    if (d < CHUNK) to.beta[d] = raw.beta;
    if (d < KDA_D) {
        float over[CHUNK], so_far = 1.0f;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            so_far *= raw.decay[i];
            over[i] = raw.k[i] * __fdividef(1.0f, so_far);
            put_pair(&to.kl[0][i][d], &to.kl[1][i][d], raw.k[i] * so_far);
            put_pair(&to.ql[0][i][d], &to.ql[1][i][d], raw.q[i] * so_far);
            put_pair(&to.k_over[0][i][d], &to.k_over[1][i][d], over[i]);
        }
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) put_pair(&to.k_end[0][i][d], &to.k_end[1][i][d], over[i] * so_far);
        to.end[d] = so_far;
    }
    after();
}

// Warp 8 (of which 0 says so): A and Z of a prepared chunk, warp 9: B.
__device__ __forceinline__ void solve_chunk(Chunk& to, int warp) {
    const int lane = threadIdx.x & 31;
    const u16 (*left)[CHUNK][KEY_STRIDE] = warp ? to.ql : to.kl;
    float c[3][2][4];
#pragma unroll
    for (int i = 0; i < 24; ++i) c[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
    for (int s = 0; s < KEY_STEPS; ++s) {
        u32 a[4], e[4], b[4], f[4];
        load_matrices(a, &left[0][lane & 15][16 * s + (lane >> 4) * 8]);
        load_matrices(e, &left[1][lane & 15][16 * s + (lane >> 4) * 8]);
        token_operand(b, &to.k_over[0][0][16 * s], KEY_STRIDE, lane);
        token_operand(f, &to.k_over[1][0][16 * s], KEY_STRIDE, lane);
#pragma unroll
        for (int n = 0; n < 2; ++n) { mma(c[0][n], a, b[2 * n], b[2 * n + 1]); mma(c[1][n], a, f[2 * n], f[2 * n + 1]); mma(c[2][n], e, b[2 * n], b[2 * n + 1]); }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = (lane >> 2) + (j >> 1) * 8, column = n * 8 + 2 * (lane & 3) + (j & 1);
            const float v = c[0][n][j] + (c[1][n][j] + c[2][n][j]);
            if (warp == 0) to.a[row][column] = v;
            else put_pair(&to.b[0][row][column], &to.b[1][row][column], column <= row ? v : 0.0f);
        }
    __syncwarp();
    if (warp == 0 && lane < CHUNK) {  // a lane has a column of Z
        float z[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            float sum[2] = {i == lane ? 1.0f : 0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < i; ++j) sum[j & 1] -= to.a[i][j] * z[j];
            z[i] = to.beta[i] * (sum[0] + sum[1]);
            put_pair(&to.z[0][i][lane], &to.z[1][i][lane], z[i]);
        }
    }
}

// The barrier at which a chunk is handed on, of all warps.
#define SCAN_THREADS 384
#define NEXT_CHUNK() BARRIER(2, SCAN_THREADS)

// The recurrence over the rows of a span, and the window after it; see kda_scan. grid (KDA_D / 64, heads, spans), 384 threads: the first four warps have
// 16 value rows each, the next four are two chunks ahead of them, two more are one ahead. Dynamic shared memory: three chunks.
KERNEL __launch_bounds__(SCAN_THREADS, 1) kda_chunks(const float* q, const float* k, const float* v, const float* decay, const float* beta, const float* raw, int ld,
                                                     const int* spans, const int* live, float* state, long slot_stride, long s_at, long window_at, float* o) {
    DYNAMIC_SHARED(Chunk, chunks);
    WAIT_BEFORE();
    const int head = blockIdx.y, heads = gridDim.y, P = heads * KDA_D, slot = spans[3 * blockIdx.z], first = spans[3 * blockIdx.z + 1], count = spans[3 * blockIdx.z + 2];
    if (!live[first]) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (blockIdx.x == 0 && threadIdx.x < 256) keep_window(state + slot * slot_stride + window_at, raw, ld, first, count, head, P);
    if (warp >= 8) {
        fewer_registers<104>();
        for (int from = -2 * CHUNK; from < count; from += CHUNK) {
            if (warp < 10 && from >= -CHUNK && from + CHUNK < count) solve_chunk(chunks[(from / CHUNK + 1) % 3], warp - 8);
            NEXT_CHUNK();
        }
    } else if (warp >= 4) {
        fewer_registers<152>();
        RawChunk raw_chunk;
        auto read = [&](int from) { read_chunk(raw_chunk, k, q, decay, beta, first + from, count - from, P, heads, head); };
        read(0);
        for (int from = -2 * CHUNK; from < count; from += CHUNK) {
            if (from + 2 * CHUNK < count) prepare_chunk(chunks[(from / CHUNK + 2) % 3], raw_chunk, [&] { read(from + 3 * CHUNK); });
            NEXT_CHUNK();
        }
    } else {
        more_registers<240>();
        const int g = lane >> 2, t = lane & 3, value0 = blockIdx.x * 64 + warp * 16;
        const bool works = value0 < KDA_D;
        float* S = state + slot * slot_stride + s_at + (long)head * KDA_D * KDA_D;
        float s[2 * KEY_STEPS][4];  // [key / 8]: keys 2t, 2t + 1 of values g, g + 8
        if (works)
#pragma unroll
            for (int n = 0; n < 2 * KEY_STEPS; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) s[n][j] = S[(long)(8 * n + 2 * t + (j & 1)) * KDA_D + value0 + g + (j >> 1) * 8];
        const float* values = v + (long)first * P + head * KDA_D + value0 + g;
        float next[2][4];
        auto read_values = [&](int from) {
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int token = from + 8 * n + 2 * t + (j & 1);
                    next[n][j] = token < count ? values[(long)token * P + (j >> 1) * 8] : 0.0f;
                }
        };
        if (works) read_values(0);
        NEXT_CHUNK();
        NEXT_CHUNK();
        for (int from = 0; from < count; from += CHUNK) {
            const Chunk& now = chunks[from / CHUNK % 3];
            if (works) {
                float r[3][2][4], x[3][2][4];  // S0^T (k L) and S0^T (q L), transposed: [part][token / 8]
#pragma unroll
                for (int i = 0; i < 24; ++i) r[i / 8][i / 4 % 2][i % 4] = x[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
                for (int step = 0; step < KEY_STEPS; ++step) {
                    u32 a[4], e[4], b[4], f[4];
                    pair_parts(s[2 * step][0], s[2 * step][1], a[0], e[0]);
                    pair_parts(s[2 * step][2], s[2 * step][3], a[1], e[1]);
                    pair_parts(s[2 * step + 1][0], s[2 * step + 1][1], a[2], e[2]);
                    pair_parts(s[2 * step + 1][2], s[2 * step + 1][3], a[3], e[3]);
                    token_operand(b, &now.kl[0][0][16 * step], KEY_STRIDE, lane);
                    token_operand(f, &now.kl[1][0][16 * step], KEY_STRIDE, lane);
#pragma unroll
                    for (int n = 0; n < 2; ++n) { mma(r[0][n], a, b[2 * n], b[2 * n + 1]); mma(r[1][n], a, f[2 * n], f[2 * n + 1]); mma(r[2][n], e, b[2 * n], b[2 * n + 1]); }
                    token_operand(b, &now.ql[0][0][16 * step], KEY_STRIDE, lane);
                    token_operand(f, &now.ql[1][0][16 * step], KEY_STRIDE, lane);
#pragma unroll
                    for (int n = 0; n < 2; ++n) { mma(x[0][n], a, b[2 * n], b[2 * n + 1]); mma(x[1][n], a, f[2 * n], f[2 * n + 1]); mma(x[2][n], e, b[2 * n], b[2 * n + 1]); }
                }
                u32 a[4], e[4], b[4], f[4];
                float u[2][4];
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        next[n][j] -= r[0][n][j] + (r[1][n][j] + r[2][n][j]);
                        x[0][n][j] += x[1][n][j] + x[2][n][j];
                        u[n][j] = 0.0f;
                    }
                auto as_operand = [&](const float (*c)[4]) {
                    pair_parts(c[0][0], c[0][1], a[0], e[0]);
                    pair_parts(c[0][2], c[0][3], a[1], e[1]);
                    pair_parts(c[1][0], c[1][1], a[2], e[2]);
                    pair_parts(c[1][2], c[1][3], a[3], e[3]);
                };
                as_operand(next);
                token_operand(b, &now.z[0][0][0], CHUNK + 8, lane);
                token_operand(f, &now.z[1][0][0], CHUNK + 8, lane);
#pragma unroll
                for (int n = 0; n < 2; ++n) { mma(u[n], a, b[2 * n], b[2 * n + 1]); mma(u[n], a, f[2 * n], f[2 * n + 1]); mma(u[n], e, b[2 * n], b[2 * n + 1]); }
                read_values(from + CHUNK);
                as_operand(u);
                token_operand(b, &now.b[0][0][0], CHUNK + 8, lane);
                token_operand(f, &now.b[1][0][0], CHUNK + 8, lane);
#pragma unroll
                for (int n = 0; n < 2; ++n) { mma(x[0][n], a, b[2 * n], b[2 * n + 1]); mma(x[0][n], a, f[2 * n], f[2 * n + 1]); mma(x[0][n], e, b[2 * n], b[2 * n + 1]); }
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const int token = from + 8 * n + 2 * t + (j & 1);
                        if (token < count) o[(long)(first + token) * P + head * KDA_D + value0 + g + (j >> 1) * 8] = x[0][n][j];
                    }
#pragma unroll
                for (int step = 0; step < KEY_STEPS; ++step) {  // S^T = S0^T L_end + u^T (k L_end / L): rows of 8 tokens x 8 keys, transposed on the way
                    load_matrices_transposed(b, &now.k_end[0][lane & 15][16 * step + (lane >> 4) * 8]);
                    load_matrices_transposed(f, &now.k_end[1][lane & 15][16 * step + (lane >> 4) * 8]);
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        float* c = s[2 * step + n];
                        const float by0 = now.end[16 * step + 8 * n + 2 * t], by1 = now.end[16 * step + 8 * n + 2 * t + 1];
                        c[0] *= by0; c[1] *= by1; c[2] *= by0; c[3] *= by1;
                        mma(c, a, b[2 * n], b[2 * n + 1]);
                        mma(c, a, f[2 * n], f[2 * n + 1]);
                        mma(c, e, b[2 * n], b[2 * n + 1]);
                    }
                }
            }
            NEXT_CHUNK();
        }
        if (works)
#pragma unroll
            for (int n = 0; n < 2 * KEY_STEPS; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) S[(long)(8 * n + 2 * t + (j & 1)) * KDA_D + value0 + g + (j >> 1) * 8] = s[n][j];
    }
}
#endif
