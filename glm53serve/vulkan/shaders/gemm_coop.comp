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
// Int4 levels are exact: a block of 64 columns is summed alone and then scaled.
layout(local_size_x = 128) in;
#include "common.glsl"
#define EIGHT
#include "weights.glsl"
#include "linear.glsl"
#ifdef EXPERT
layout(set = 1, binding = 4) readonly buffer Tiles { uint tiles[]; };
layout(set = 1, binding = 5) readonly buffer Order { uint order[]; };
#endif
#if FMT == 0 || FMT == 2
#define SPLIT_WEIGHTS
const uint KS = 16u;
#else
const uint KS = 32u;
#endif
#if FMT >= 3
const float WEIGHT_FACTOR = 1.0;      // whole numbers; the scale follows
#else
const float WEIGHT_FACTOR = 64.0;     // lifts small weights out of float16's subnormal range
#endif
layout(constant_id = 2) const uint MB = 4u;
const uint TM = 16u * MB, ST = KS / 4u + 2u, TN = 128u;    // ST: row stride in shared memory, in fours, free of bank conflicts
shared f16vec4 a_high[TM * ST], a_low[TM * ST], b_high[TN * ST];
#ifdef SPLIT_WEIGHTS
shared f16vec4 b_low[TN * ST];
#endif
#if FMT == 4
shared float b_scale[TN];
#endif
shared float block[4][256];
#define SUMS coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>

// Eight neighbouring values as two fours. Both operands use the same order; int4's is the one its nibbles unpack in.
#if FMT == 4
#define FIRST(u, v) vec4(u.x, v.x, u.y, v.y)
#define SECOND(u, v) vec4(u.z, v.z, u.w, v.w)
f16vec2 levels(uint u) { return unpackFloat2x16(u & 0x000f000fu | 0x64006400u) - f16vec2(1032.0hf); }
#else
#define FIRST(u, v) u
#define SECOND(u, v) v
#endif

// The leading eleven bits, exact in float16. Done on the bits: a driver may take a rounding there and back for nothing.
vec4 leading(vec4 v) { return uintBitsToFloat(floatBitsToUint(v) & 0xffffe000u); }

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
    SUMS acc[MB * 2u];
    [[unroll]] for (uint i = 0u; i < MB * 2u; ++i) acc[i] = SUMS(0.0);
#if FMT == 4
    SUMS total[MB * 2u];
    [[unroll]] for (uint i = 0u; i < MB * 2u; ++i) total[i] = SUMS(0.0);
#endif
    for (uint k0 = 0u; k0 < p.K; k0 += KS) {
        barrier();
        for (uint i = t; i < TM * (KS / 8u); i += 128u) {
            uint m = i / (KS / 8u), k = (i % (KS / 8u)) * 8u;
            vec4 u = vec4(0.0), v = vec4(0.0);
            if (m < rows) {
#ifdef EXPERT
                uint row = order[m0 + m] / p.xdiv;
#else
                uint row = m0 + m;
#endif
                uint at = (row * p.xs + p.xo + z * p.xz + k0 + k) >> 2;
                u = x4[at]; v = x4[at + 1u];
            }
            vec4 first = FIRST(u, v), second = SECOND(u, v);
            vec4 high = leading(first), high2 = leading(second);
            uint to = m * ST + k / 4u;
            a_high[to] = f16vec4(high); a_high[to + 1u] = f16vec4(high2);
            a_low[to] = f16vec4(first - high); a_low[to + 1u] = f16vec4(second - high2);
        }
        for (uint i = t; i < TN * (KS / 8u); i += 128u) {
            uint n = i / (KS / 8u), k = (i % (KS / 8u)) * 8u, row = base + min(n0 + n, p.N - 1u);
            uint from = row * (p.K >> 3) + ((k0 + k) >> 3), to = n * ST + k / 4u;
#if FMT == 4
            uint u = weights[from];
            b_high[to] = f16vec4(levels(u), levels(u >> 4));
            b_high[to + 1u] = f16vec4(levels(u >> 8), levels(u >> 12));
            if (k == 0u && (k0 & 63u) == 0u) b_scale[n] = weight_scale(row, k0, p.K);
#else
            vec4 u, v;
            load8(from, u, v);
#if FMT < 3
            float scale = WEIGHT_FACTOR * weight_scale(row, k0 + k, p.K);
            u *= scale; v *= scale;
#endif
#ifdef SPLIT_WEIGHTS
            vec4 high = leading(u), high2 = leading(v);
            b_high[to] = f16vec4(high); b_high[to + 1u] = f16vec4(high2);
            b_low[to] = f16vec4(u - high); b_low[to + 1u] = f16vec4(v - high2);
#else
            b_high[to] = f16vec4(u); b_high[to + 1u] = f16vec4(v);
#endif
#endif
        }
        barrier();
        [[unroll]] for (uint k = 0u; k < KS / 4u; k += 4u) {
            coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> b0;
            coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> b1;
            coopMatLoad(b0, b_high, (sub * 32u) * ST + k, ST, gl_CooperativeMatrixLayoutColumnMajor);
            coopMatLoad(b1, b_high, (sub * 32u + 16u) * ST + k, ST, gl_CooperativeMatrixLayoutColumnMajor);
#ifdef SPLIT_WEIGHTS
            coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> c0;
            coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> c1;
            coopMatLoad(c0, b_low, (sub * 32u) * ST + k, ST, gl_CooperativeMatrixLayoutColumnMajor);
            coopMatLoad(c1, b_low, (sub * 32u + 16u) * ST + k, ST, gl_CooperativeMatrixLayoutColumnMajor);
#endif
            [[unroll]] for (uint i = 0u; i < MB; ++i) {
                coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> high;
                coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> low;
                coopMatLoad(high, a_high, i * 16u * ST + k, ST, gl_CooperativeMatrixLayoutRowMajor);
                coopMatLoad(low, a_low, i * 16u * ST + k, ST, gl_CooperativeMatrixLayoutRowMajor);
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
#if FMT == 4
        if ((k0 & 32u) != 0u) {
            [[unroll]] for (uint half_strip = 0u; half_strip < 2u; ++half_strip) {
                SUMS scale;                                // stride 0: every row is the columns' scales
                coopMatLoad(scale, b_scale, sub * 32u + half_strip * 16u, 0, gl_CooperativeMatrixLayoutRowMajor);
                [[unroll]] for (uint i = 0u; i < MB; ++i) {
                    uint at = 2u * i + half_strip;
                    for (int j = 0; j < scale.length(); ++j) total[at][j] += acc[at][j] * scale[j];
                    acc[at] = SUMS(0.0);
                }
            }
        }
#endif
    }
#if FMT == 4
#define RESULT total
#else
#define RESULT acc
#endif
    [[unroll]] for (uint i = 0u; i < MB * 2u; ++i) {
        barrier();
        coopMatStore(RESULT[i], block[sub], 0, 16, gl_CooperativeMatrixLayoutRowMajor);
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
