// What the sites of few rows and those of a prompt share (model spec 3).

#define OUTS ((2 + HC) * HC)
#define COEFFICIENTS (HC + HC * HC)  // post [HC], then mix [HC][HC]

// What a feed-forward or attention half returned for one value: one array, or weighted experts plus the shared expert.
struct Returned { const float* y; const float* pairs; const int* ids; const float* weights; int top_k; };

__device__ __forceinline__ void add_scaled(F4& sum, float by, const F4& v) { sum.x += by * v.x; sum.y += by * v.y; sum.z += by * v.z; sum.w += by * v.w; }

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
