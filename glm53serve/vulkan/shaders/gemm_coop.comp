#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
// Many rows on matrix units: a TM x 128 tile of y (TM = 16 MB), four subgroups of 32 with 32 columns each. The units take
// float16, so x is split in two float16 values (22 bits together) and, where a weight with its scale has more than eleven
// bits, so is the weight; sums are float32. What is left out, the product of the two small parts, is 2^-22 of a term.
layout(local_size_x = 128) in;
#include "common.glsl"
#define EIGHT
#include "weights.glsl"
#include "linear.glsl"
#ifdef EXPERT
layout(set = 1, binding = 4) readonly buffer Tiles { uint tiles[]; };
layout(set = 1, binding = 5) readonly buffer Order { uint order[]; };
#endif
#if FMT == 0 || FMT == 2 || FMT == 4
#define SPLIT_WEIGHTS
const uint KS = 16u;
#else
const uint KS = 32u;
#endif
#if FMT == 3
const float WEIGHT_FACTOR = 1.0;      // whole numbers up to 127; the row's scale follows at the end
#else
const float WEIGHT_FACTOR = 64.0;     // lifts small weights out of float16's subnormal range
#endif
layout(constant_id = 2) const uint MB = 4u;
const uint TM = 16u * MB, STRIDE = KS + 8u, TN = 128u;
shared float16_t a_high[TM * STRIDE], a_low[TM * STRIDE], b_high[TN * STRIDE];
#ifdef SPLIT_WEIGHTS
shared float16_t b_low[TN * STRIDE];
#endif
shared float block[4][256];

void main() {
    if (halted()) return;
    uint t = gl_LocalInvocationIndex, sub = gl_SubgroupID, lane = gl_SubgroupInvocationID, n0 = gl_WorkGroupID.x * TN, z = gl_WorkGroupID.z;
    uint y0 = gl_WorkGroupID.y + p.first_tile;
#ifdef EXPERT
    if (y0 >= tiles[0]) return;
    uint e = tiles[4u + 4u * y0];
    if (e < p.e0 || e >= p.e1) return;
    uint m0 = tiles[5u + 4u * y0], rows = tiles[6u + 4u * y0], base = (e - p.e0) * p.N;
#else
    uint m0 = y0 * TM;
    if (m0 >= row_count()) return;
    uint rows = min(TM, row_count() - m0), base = p.wr + z * p.N;
#endif
    coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator> acc[MB * 2u];
    [[unroll]] for (uint i = 0u; i < MB * 2u; ++i) acc[i] = coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>(0.0);
    for (uint k0 = 0u; k0 < p.K; k0 += KS) {
        barrier();
        for (uint i = t; i < TM * (KS / 4u); i += 128u) {
            uint m = i / (KS / 4u), k = (i % (KS / 4u)) * 4u;
            vec4 x = vec4(0.0);
            if (m < rows) {
#ifdef EXPERT
                uint row = order[m0 + m] / p.xdiv;
#else
                uint row = m0 + m;
#endif
                x = x4[(row * p.xs + p.xo + z * p.xz + k0 + k) >> 2];
            }
            [[unroll]] for (uint j = 0u; j < 4u; ++j) {
                float16_t high = float16_t(x[j]);
                a_high[m * STRIDE + k + j] = high;
                a_low[m * STRIDE + k + j] = float16_t(x[j] - float(high));
            }
        }
        for (uint i = t; i < TN * (KS / 8u); i += 128u) {
            uint n = i / (KS / 8u), k = (i % (KS / 8u)) * 8u, row = base + min(n0 + n, p.N - 1u);
            vec4 u, v;
            load8(row * (p.K >> 3) + ((k0 + k) >> 3), u, v);
#if FMT == 3
            float scale = 1.0;
#else
            float scale = WEIGHT_FACTOR * weight_scale(row, k0 + k, p.K);
#endif
            [[unroll]] for (uint j = 0u; j < 4u; ++j) {
                float w = u[j] * scale, w2 = v[j] * scale;
                float16_t high = float16_t(w), high2 = float16_t(w2);
                b_high[n * STRIDE + k + j] = high;
                b_high[n * STRIDE + k + 4u + j] = high2;
#ifdef SPLIT_WEIGHTS
                b_low[n * STRIDE + k + j] = float16_t(w - float(high));
                b_low[n * STRIDE + k + 4u + j] = float16_t(w2 - float(high2));
#endif
            }
        }
        barrier();
        [[unroll]] for (uint k = 0u; k < KS; k += 16u) {
            coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> b0;
            coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> b1;
            coopMatLoad(b0, b_high, (sub * 32u) * STRIDE + k, STRIDE, gl_CooperativeMatrixLayoutColumnMajor);
            coopMatLoad(b1, b_high, (sub * 32u + 16u) * STRIDE + k, STRIDE, gl_CooperativeMatrixLayoutColumnMajor);
#ifdef SPLIT_WEIGHTS
            coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> c0;
            coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> c1;
            coopMatLoad(c0, b_low, (sub * 32u) * STRIDE + k, STRIDE, gl_CooperativeMatrixLayoutColumnMajor);
            coopMatLoad(c1, b_low, (sub * 32u + 16u) * STRIDE + k, STRIDE, gl_CooperativeMatrixLayoutColumnMajor);
#endif
            [[unroll]] for (uint i = 0u; i < MB; ++i) {
                coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> high;
                coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> low;
                coopMatLoad(high, a_high, i * 16u * STRIDE + k, STRIDE, gl_CooperativeMatrixLayoutRowMajor);
                coopMatLoad(low, a_low, i * 16u * STRIDE + k, STRIDE, gl_CooperativeMatrixLayoutRowMajor);
                acc[2u * i] = coopMatMulAdd(low, b0, acc[2u * i]);
                acc[2u * i + 1u] = coopMatMulAdd(low, b1, acc[2u * i + 1u]);
#ifdef SPLIT_WEIGHTS
                acc[2u * i] = coopMatMulAdd(high, c0, acc[2u * i]);
                acc[2u * i + 1u] = coopMatMulAdd(high, c1, acc[2u * i + 1u]);
#endif
                acc[2u * i] = coopMatMulAdd(high, b0, acc[2u * i]);
                acc[2u * i + 1u] = coopMatMulAdd(high, b1, acc[2u * i + 1u]);
            }
        }
    }
    [[unroll]] for (uint i = 0u; i < MB * 2u; ++i) {
        barrier();
        coopMatStore(acc[i], block[sub], 0, 16, gl_CooperativeMatrixLayoutRowMajor);
        barrier();
        for (uint at = 2u * lane; at < 256u; at += 64u) {
            uint m = (i / 2u) * 16u + at / 16u, n = n0 + sub * 32u + (i % 2u) * 16u + at % 16u;
            if (m >= rows || n >= p.N) continue;
            float v = block[sub][at] / WEIGHT_FACTOR, w = block[sub][at + 1u] / WEIGHT_FACTOR;
#if FMT == 3
            v *= weight_scale(base + n, 0u, p.K); w *= weight_scale(base + min(n + 1u, p.N - 1u), 0u, p.K);
#endif
#ifdef EXPERT
            uint out_at = order[m0 + m] * p.ys + p.yo;
#else
            uint out_at = (m0 + m) * p.ys + p.yo + z * p.yz;
#endif
            if (SWIGLU != 0u) {
                if (n + 1u < p.N) y[out_at + (n >> 1)] = clamped_swiglu(v, w, p.limit);
            } else {
                y[out_at + n] = v;
                if (n + 1u < p.N) y[out_at + n + 1u] = w;
            }
        }
    }
}
