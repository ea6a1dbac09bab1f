// KDA, linear attention with a per-channel decay (model spec 4). P = heads * KDA_D. Rows come in spans: consecutive positions of one slot.
// A slot's state is one block of floats: state + slot * slot_stride; a layer's S [heads][KDA_D][KDA_D] and window [CONV-1][3P] lie at offsets in it.

#define PADDED_D ((KDA_D + 31) / 32 * 32)
#define QUADS ((KDA_D + 31) / 32)      // float4s of a key vector held by each of 8 lanes
#define KEYS (QUADS * 32)
#define SCAN_TOKENS 8
#define SCAN_COLUMNS 32
#define SCAN_BUFFERS 3

// Convolution, gates and unit lengths of one row and head. raw [T][ld] = q | k | v rows before the convolution; taps [3P][CONV];
// z, [T][P]; beta [T][ldb] before the sigmoid. Out: q, k, v, decay [T][P]; beta_out and q.k, [T][heads]. grid (heads, T), PADDED_D threads.
KERNEL kda_prepare(const float* raw, int ld, const float* beta, int ldb, const float* z, const int* slot, const int* first, const float* state, long slot_stride,
                   long window_at, const float* taps, const float* dt_bias, const float* a_log, int bounded, float bound, float* q_out, float* k_out, float* v_out,
                   float* decay, float* beta_out, float* qk_out) {
    __shared__ float room[3][8];
    const int head = blockIdx.x, row = blockIdx.y, heads = gridDim.x, P = heads * KDA_D, i = threadIdx.x, channel = head * KDA_D + i, lane = i & 31;
    const bool there = i < KDA_D;
    const long at = (long)row * P + channel;
    float c[3] = {0.0f, 0.0f, 0.0f}, zz = 0.0f, b = 0.0f;
    WAIT_BEFORE();
    if (there) {
        const float* window = state + slot[row] * slot_stride + window_at;
        const int begin = first[row];
        float v[3][CONV];
        zz = z[at];
        b = beta[(long)row * ldb + head];
#pragma unroll
        for (int s = 0; s < 3; ++s)
#pragma unroll
            for (int j = 0; j < CONV; ++j) {
                const int from = row - (CONV - 1 - j);
                v[s][j] = from >= begin ? raw[(long)from * ld + s * P + channel] : window[(long)(CONV - 1 + from - begin) * 3 * P + s * P + channel];
            }
#pragma unroll
        for (int s = 0; s < 3; ++s) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < CONV; ++j) sum += v[s][j] * taps[((long)s * P + channel) * CONV + j];
            c[s] = silu(sum);
        }
    }
    const float qq = warp_sum(c[0] * c[0]), kk = warp_sum(c[1] * c[1]), both = warp_sum(c[0] * c[1]);
    if (lane == 0) { room[0][i >> 5] = qq; room[1][i >> 5] = kk; room[2][i >> 5] = both; }
    __syncthreads();
    float total[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < PADDED_D / 32; ++w)
#pragma unroll
        for (int s = 0; s < 3; ++s) total[s] += room[s][w];
    const float q_by = 1.0f / (sqrtf(total[0] + 1e-6f) * sqrtf((float)KDA_D)), k_by = 1.0f / sqrtf(total[1] + 1e-6f);
    if (!there) return;
    if (i == 0) {
        beta_out[row * heads + head] = sigmoid(b);
        qk_out[row * heads + head] = total[2] * q_by * k_by;
    }
    const float speed = expf(a_log[head]);
    zz += dt_bias[channel];
    const float g = bounded ? bound * sigmoid(speed * zz) : -speed * (zz > 20.0f ? zz : log1pf(expf(zz)));
    q_out[at] = c[0] * q_by; k_out[at] = c[1] * k_by; v_out[at] = c[2];
    decay[at] = expf(g);
}

// The recurrence (model spec 4.2) over the rows of a span, S in registers, and the window after it. o = S^T q is taken from the decayed S before
// the update, plus u (q.k). spans [n][3] = slot, first row, rows. Rows of a dead span are neither computed nor written.
// grid (KDA_D / 32, heads, spans), 256 threads: lane 8c + s holds column c of four, key channels 32m + 4s .. +3.
KERNEL __launch_bounds__(256) kda_scan(const float* q, const float* k, const float* v, const float* decay, const float* beta, const float* qk, const float* raw, int ld,
                                       const int* spans, const int* live, float* state, long slot_stride, long s_at, long window_at, float* o) {
    __shared__ __align__(16) float sk[SCAN_BUFFERS][SCAN_TOKENS][KEYS], sq[SCAN_BUFFERS][SCAN_TOKENS][KEYS], se[SCAN_BUFFERS][SCAN_TOKENS][KEYS];
    __shared__ __align__(16) float sv[SCAN_BUFFERS][SCAN_TOKENS][SCAN_COLUMNS], sb[SCAN_BUFFERS][SCAN_TOKENS][2];
    const int head = blockIdx.y, heads = gridDim.y, P = heads * KDA_D, slot = spans[3 * blockIdx.z], first = spans[3 * blockIdx.z + 1], count = spans[3 * blockIdx.z + 2];
    if (!live[first]) {
        WAIT_BEFORE();
        return;
    }
    const int lane = threadIdx.x & 31, part = lane & 7, c32 = (threadIdx.x >> 5) * 4 + (lane >> 3), column = blockIdx.x * SCAN_COLUMNS + c32;
    float* S = state + slot * slot_stride + s_at + (long)head * KDA_D * KDA_D;
    float s[QUADS][4];
#pragma unroll
    for (int m = 0; m < QUADS; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            int i = 32 * m + 4 * part + e;
            s[m][e] = i < KDA_D && column < KDA_D ? S[(long)i * KDA_D + column] : 0.0f;
        }
    WAIT_BEFORE();  // S, spans and live are older than the kernel before
    auto stage = [&](int from) {  // asynchronous copies of the next tokens; those after the span come as zeros
        const int buffer = from / SCAN_TOKENS % SCAN_BUFFERS;
        if (from >= count) {
            copies_commit();
            return;
        }
        for (int at = threadIdx.x; at < SCAN_TOKENS * KEYS / 4; at += 256) {
            const int token = at / (KEYS / 4), i = at % (KEYS / 4) * 4;
            const bool there = from + token < count && i < KDA_D;
            const long g = there ? (long)(first + from + token) * P + head * KDA_D + i : 0;
            copy16_async(&sk[buffer][token][i], k + g, there);
            copy16_async(&sq[buffer][token][i], q + g, there);
            copy16_async(&se[buffer][token][i], decay + g, there);
        }
        for (int at = threadIdx.x; at < SCAN_TOKENS * SCAN_COLUMNS / 4; at += 256) {
            const int token = at / (SCAN_COLUMNS / 4), i = at % (SCAN_COLUMNS / 4) * 4, c = blockIdx.x * SCAN_COLUMNS + i;
            const bool there = from + token < count && c < KDA_D;
            copy16_async(&sv[buffer][token][i], v + (there ? (long)(first + from + token) * P + head * KDA_D + c : 0), there);
        }
        copies_commit();
        if (threadIdx.x < SCAN_TOKENS && from + (int)threadIdx.x < count) {
            sb[buffer][threadIdx.x][0] = beta[(first + from + threadIdx.x) * heads + head];
            sb[buffer][threadIdx.x][1] = qk[(first + from + threadIdx.x) * heads + head];
        }
    };
#pragma unroll
    for (int s = 0; s < SCAN_BUFFERS - 1; ++s) stage(s * SCAN_TOKENS);
    for (int from = 0; from < count; from += SCAN_TOKENS) {
        copies_wait<SCAN_BUFFERS - 2>();
        __syncthreads();
        stage(from + (SCAN_BUFFERS - 1) * SCAN_TOKENS);
        const int buffer = from / SCAN_TOKENS % SCAN_BUFFERS, here = min(SCAN_TOKENS, count - from);
        auto step = [&](int token) {
            float dot_k[4] = {0.0f, 0.0f, 0.0f, 0.0f}, dot_q[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            F4 kk[QUADS];
#pragma unroll
            for (int m = 0; m < QUADS; ++m) {
                const F4 ee = *(const F4*)&se[buffer][token][32 * m + 4 * part], qq = *(const F4*)&sq[buffer][token][32 * m + 4 * part];
                kk[m] = *(const F4*)&sk[buffer][token][32 * m + 4 * part];
                s[m][0] *= ee.x; s[m][1] *= ee.y; s[m][2] *= ee.z; s[m][3] *= ee.w;
                dot_k[0] += s[m][0] * kk[m].x; dot_k[1] += s[m][1] * kk[m].y; dot_k[2] += s[m][2] * kk[m].z; dot_k[3] += s[m][3] * kk[m].w;
                dot_q[0] += s[m][0] * qq.x; dot_q[1] += s[m][1] * qq.y; dot_q[2] += s[m][2] * qq.z; dot_q[3] += s[m][3] * qq.w;
            }
            float sum_k = (dot_k[0] + dot_k[1]) + (dot_k[2] + dot_k[3]), sum_q = (dot_q[0] + dot_q[1]) + (dot_q[2] + dot_q[3]);
            sum_k += __shfl_xor_sync(0xffffffffu, sum_k, 1); sum_q += __shfl_xor_sync(0xffffffffu, sum_q, 1);
            sum_k += __shfl_xor_sync(0xffffffffu, sum_k, 2); sum_q += __shfl_xor_sync(0xffffffffu, sum_q, 2);
            sum_k += __shfl_xor_sync(0xffffffffu, sum_k, 4); sum_q += __shfl_xor_sync(0xffffffffu, sum_q, 4);
            const float u = sb[buffer][token][0] * (sv[buffer][token][c32] - sum_k);
#pragma unroll
            for (int m = 0; m < QUADS; ++m) {
                s[m][0] += kk[m].x * u; s[m][1] += kk[m].y * u; s[m][2] += kk[m].z * u; s[m][3] += kk[m].w * u;
            }
            if (part == 0 && column < KDA_D) o[(long)(first + from + token) * P + head * KDA_D + column] = sum_q + u * sb[buffer][token][1];
        };
        if (here == SCAN_TOKENS) {
#pragma unroll
            for (int token = 0; token < SCAN_TOKENS; ++token) step(token);
        } else
            for (int token = 0; token < here; ++token) step(token);
    }
#pragma unroll
    for (int m = 0; m < QUADS; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            int i = 32 * m + 4 * part + e;
            if (i < KDA_D && column < KDA_D) S[(long)i * KDA_D + column] = s[m][e];
        }
    if (blockIdx.x == 0) keep_window(state + slot * slot_stride + window_at, raw, ld, first, count, head, P);
}

// a = rms(o per head) * sigmoid(gate), split, [T][ldx] (model spec 4.3). grid (heads, T), PADDED_D threads.
KERNEL kda_finish(const float* o, const float* gate, const float* norm, float eps, u16* x_high, u16* x_low, int ldx) {
    __shared__ float room[32];
    const int head = blockIdx.x, row = blockIdx.y, P = gridDim.x * KDA_D, i = threadIdx.x;
    const long at = (long)row * P + head * KDA_D + i;
    WAIT_BEFORE();
    const float v = i < KDA_D ? o[at] : 0.0f, g = i < KDA_D ? gate[at] : 0.0f;
    const float by = 1.0f / sqrtf(block_sum(v * v, room) / KDA_D + eps);
    if (i < KDA_D) store_split(x_high, x_low, (long)row * ldx + head * KDA_D + i, norm[i] * (v * by) * sigmoid(g));
}

// One position of a slot, all of the above in one block a head: convolution, gates, recurrence, window, norm and gate of what comes out. Arguments as above.
// The state is requested before the wait: it is older than the kernel before. Thread: four columns, every KEY_PARTS-th key. grid (heads, T), STEP_THREADS threads.
#define STEP_THREADS (KDA_D <= 128 ? 256 : 512)
#define QUAD_COLUMNS (KDA_D / 4)
#define KEY_PARTS (STEP_THREADS / QUAD_COLUMNS)
#define PART_KEYS ((KDA_D + KEY_PARTS - 1) / KEY_PARTS)
KERNEL __launch_bounds__(STEP_THREADS) kda_step(const float* raw, int ld, const float* beta, int ldb, const float* z, const float* gate, const int* slot, const int* live,
                                                float* state, long slot_stride, long s_at, long window_at, const float* taps, const float* dt_bias, const float* a_log,
                                                int bounded, float bound, const float* norm, float eps, u16* x_high, u16* x_low, int ldx) {
    __shared__ __align__(16) float q[KDA_D], k[KDA_D], v[KDA_D], decay[KDA_D], o[KDA_D];
    __shared__ __align__(16) float sums[2][KEY_PARTS][KDA_D];
    __shared__ float room[32], parts[3][8];
    LET_NEXT_START();
    const int head = blockIdx.x, row = blockIdx.y, heads = gridDim.x, P = heads * KDA_D, i = threadIdx.x, channel = head * KDA_D + i, lane = i & 31;
    const bool there = i < KDA_D;
    if (!live[row]) {
        WAIT_BEFORE();
        return;
    }
    float* S = state + slot[row] * slot_stride + s_at + (long)head * KDA_D * KDA_D;
    float* window = state + slot[row] * slot_stride + window_at;
    const int quad = i % QUAD_COLUMNS * 4, part = i / QUAD_COLUMNS;
    const F4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
    F4 s[PART_KEYS];
#pragma unroll
    for (int m = 0; m < PART_KEYS; ++m) {
        const int key = part + m * KEY_PARTS;
        s[m] = part < KEY_PARTS && key < KDA_D ? *(const F4*)(S + (long)key * KDA_D + quad) : zero;
    }
    float c[3] = {0.0f, 0.0f, 0.0f}, old[3][CONV], tap[3][CONV], bias = 0.0f, weight = 0.0f;
    if (there) {
        bias = dt_bias[channel];
        weight = norm[i];
#pragma unroll
        for (int t = 0; t < 3; ++t)
#pragma unroll
            for (int j = 0; j < CONV; ++j) {
                tap[t][j] = taps[((long)t * P + channel) * CONV + j];
                old[t][j] = j < CONV - 1 ? window[(long)j * 3 * P + t * P + channel] : 0.0f;
            }
    }
    const float speed = expf(a_log[head]);
    WAIT_BEFORE();
    float zz = 0.0f, out_gate = 0.0f;
    const float b = beta[(long)row * ldb + head];
    if (there) {
        zz = z[(long)row * P + channel];
        out_gate = gate[(long)row * P + channel];
#pragma unroll
        for (int t = 0; t < 3; ++t) old[t][CONV - 1] = raw[(long)row * ld + t * P + channel];
#pragma unroll
        for (int t = 0; t < 3; ++t) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < CONV; ++j) sum += old[t][j] * tap[t][j];
            c[t] = silu(sum);
#pragma unroll
            for (int j = 0; j < CONV - 1; ++j) window[(long)j * 3 * P + t * P + channel] = old[t][j + 1];
        }
    }
    const float qq = warp_sum(c[0] * c[0]), kk = warp_sum(c[1] * c[1]), both = warp_sum(c[0] * c[1]);
    if (lane == 0 && i < PADDED_D) { parts[0][i >> 5] = qq; parts[1][i >> 5] = kk; parts[2][i >> 5] = both; }
    __syncthreads();
    float total[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < PADDED_D / 32; ++w)
#pragma unroll
        for (int t = 0; t < 3; ++t) total[t] += parts[t][w];
    const float q_by = 1.0f / (sqrtf(total[0] + 1e-6f) * sqrtf((float)KDA_D)), k_by = 1.0f / sqrtf(total[1] + 1e-6f), qk = total[2] * q_by * k_by;
    if (there) {
        zz += bias;
        q[i] = c[0] * q_by;
        k[i] = c[1] * k_by;
        v[i] = c[2];
        decay[i] = expf(bounded ? bound * sigmoid(speed * zz) : -speed * (zz > 20.0f ? zz : log1pf(expf(zz))));
    }
    __syncthreads();
    if (part < KEY_PARTS) {
        F4 dot_k = zero, dot_q = zero;
#pragma unroll
        for (int m = 0; m < PART_KEYS; ++m) {
            const int key = part + m * KEY_PARTS;
            if (key >= KDA_D) continue;
            const float e = decay[key], kv = k[key], qv = q[key];
            s[m].x *= e; s[m].y *= e; s[m].z *= e; s[m].w *= e;
            dot_k.x += s[m].x * kv; dot_k.y += s[m].y * kv; dot_k.z += s[m].z * kv; dot_k.w += s[m].w * kv;
            dot_q.x += s[m].x * qv; dot_q.y += s[m].y * qv; dot_q.z += s[m].z * qv; dot_q.w += s[m].w * qv;
        }
        *(F4*)&sums[0][part][quad] = dot_k;
        *(F4*)&sums[1][part][quad] = dot_q;
    }
    __syncthreads();
    if (part < KEY_PARTS) {
        const float by = sigmoid(b);
        F4 u = zero;
#pragma unroll 8
        for (int m = 0; m < KEY_PARTS; ++m) {
            const F4 a = *(const F4*)&sums[0][m][quad];
            u.x += a.x; u.y += a.y; u.z += a.z; u.w += a.w;
        }
        const F4 value = *(const F4*)&v[quad];
        u = {by * (value.x - u.x), by * (value.y - u.y), by * (value.z - u.z), by * (value.w - u.w)};
#pragma unroll
        for (int m = 0; m < PART_KEYS; ++m) {
            const int key = part + m * KEY_PARTS;
            if (key >= KDA_D) continue;
            const float kv = k[key];
            s[m].x += kv * u.x; s[m].y += kv * u.y; s[m].z += kv * u.z; s[m].w += kv * u.w;
            *(F4*)(S + (long)key * KDA_D + quad) = s[m];
        }
        if (part == 0) {
            F4 out = zero;
#pragma unroll 8
            for (int m = 0; m < KEY_PARTS; ++m) {
                const F4 a = *(const F4*)&sums[1][m][quad];
                out.x += a.x; out.y += a.y; out.z += a.z; out.w += a.w;
            }
            *(F4*)&o[quad] = {out.x + u.x * qk, out.y + u.y * qk, out.z + u.z * qk, out.w + u.w * qk};
        }
    }
    __syncthreads();
    const float value = there ? o[i] : 0.0f;
    const float by = 1.0f / sqrtf(block_sum(value * value, room) / KDA_D + eps);
    if (there) store_split(x_high, x_low, (long)row * ldx + channel, weight * (value * by) * sigmoid(out_gate));
}
