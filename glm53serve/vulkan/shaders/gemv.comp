#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// Few rows: a workgroup reads ROWS weight rows once for RB rows of x. Each invocation takes eight
// columns at a time; the sums meet in shared memory in a fixed order, so a row's bits do not depend on RB.
#define WG 64u
// Blocks of eight columns that an invocation has under way for each row: enough bytes to cover the way to memory.
#if FMT >= 2
#define DEPTH 2u
#else
#define DEPTH 1u
#endif
layout(local_size_x = 64) in;
#include "common.glsl"
#define EIGHT
#include "weights.glsl"
#include "linear.glsl"
layout(constant_id = 2) const uint ROWS = 4u;
layout(constant_id = 3) const uint RB = 1u;
#ifdef EXPERT
layout(set = 1, binding = 4) readonly buffer Ids { uint ids[]; };   // [rows * k] expert of each pair
layout(constant_id = 5) const uint TOPK = 1u;
#endif
shared float red[ROWS * RB * WG];

void main() {
    if (halted()) return;
    uint t = gl_LocalInvocationIndex, n0 = gl_WorkGroupID.x * ROWS;
    uint z = gl_WorkGroupID.z, m0 = gl_WorkGroupID.y * RB;
#ifdef EXPERT
    uint total = row_count() * TOPK;
    if (m0 >= total) return;
    uint e = ids[m0];
    if (e < p.e0 || e >= p.e1) return;
    uint base = (e - p.e0) * p.N, xbase = (m0 / p.xdiv) * p.xs + p.xo;
#else
    uint total = row_count();
    if (m0 >= total) return;
    uint base = p.wr + z * p.N;
#endif
    float acc[ROWS * RB];
    [[unroll]] for (uint i = 0u; i < ROWS * RB; ++i) acc[i] = 0.0;
    uint k8 = p.K >> 3;
    for (uint u0 = t; u0 < k8; u0 += DEPTH * WG) {
        vec4 wa[DEPTH * ROWS], wb[DEPTH * ROWS];
        float ws[DEPTH * ROWS];
        [[unroll]] for (uint d = 0u; d < DEPTH; ++d) {
            uint u = min(u0 + d * WG, k8 - 1u);
            [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
                uint row = base + min(n0 + r, p.N - 1u);
                load8(row * k8 + u, wa[d * ROWS + r], wb[d * ROWS + r]);
                ws[d * ROWS + r] = weight_scale(row, u << 3, p.K);
            }
        }
        [[unroll]] for (uint d = 0u; d < DEPTH; ++d) {
            uint u = u0 + d * WG;
            if (u >= k8) break;
            [[unroll]] for (uint j = 0u; j < RB; ++j) {
#ifdef EXPERT
                uint xi = (xbase >> 2) + 2u * u;
#else
                uint xi = ((min(m0 + j, total - 1u) * p.xs + p.xo + z * p.xz) >> 2) + 2u * u;
#endif
                vec4 xa = x4[xi], xb = x4[xi + 1u];
                [[unroll]] for (uint r = 0u; r < ROWS; ++r) acc[r * RB + j] += ws[d * ROWS + r] * (dot(wa[d * ROWS + r], xa) + dot(wb[d * ROWS + r], xb));
            }
        }
    }
    [[unroll]] for (uint i = 0u; i < ROWS * RB; ++i) red[i * WG + t] = acc[i];
    barrier();
    for (uint h = WG / 2u; h > 0u; h >>= 1) {
        if (t < h) { [[unroll]] for (uint i = 0u; i < ROWS * RB; ++i) red[i * WG + t] += red[i * WG + t + h]; }
        barrier();
    }
    if (SWIGLU != 0u) {
        uint half_rows = ROWS / 2u;
        if (t < half_rows * RB) {
            uint r = 2u * (t / RB), j = t % RB;
            if (m0 + j < total && n0 + r + 1u < p.N)
                y[(m0 + j) * p.ys + p.yo + ((n0 + r) >> 1)] = clamped_swiglu(red[(r * RB + j) * WG], red[((r + 1u) * RB + j) * WG], p.limit);
        }
    } else if (t < ROWS * RB) {
        uint r = t / RB, j = t % RB;
        if (m0 + j < total && n0 + r < p.N) y[(m0 + j) * p.ys + p.yo + z * p.yz + n0 + r] = red[t * WG];
    }
}
