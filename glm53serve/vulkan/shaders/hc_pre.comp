#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// mHC (model spec 3): pre, post and the Sinkhorn matrix of a row, the collapse x = sum_j pre[j] X[j], and
// the sub-layer's RMS norm of x. One workgroup a row.
#define WG 256u
layout(local_size_x = 256) in;
#include "common.glsl"
#include "reduce.glsl"
layout(constant_id = 2) const uint NS = 4u;                          // streams
layout(set = 1, binding = 0) readonly buffer D { float dots[]; };    // [rows, 128]
layout(set = 1, binding = 1) readonly buffer C { float site[]; };    // base [(2+n)n], scale [3], norm weight [Hp] from 128 on
layout(set = 1, binding = 2) readonly buffer X { vec4 x4[]; };       // [rows, n, Hp]
layout(set = 1, binding = 3) buffer N { vec4 xn4[]; };               // [rows, Hp]
layout(set = 1, binding = 4) writeonly buffer M { float mix[]; };    // [rows, 128]: post [n], M [n, n]
layout(push_constant) uniform Push { uint H, Hp, rounds; float eps, hc_eps; } p;
shared float s_pre[NS];

void main() {
    if (halted()) return;
    uint row = gl_WorkGroupID.x, t = gl_LocalInvocationIndex;
    if (row >= row_count()) return;
    if (t == 0u) {
        uint n = NS, at = row * 128u, out_n = (2u + n) * n;
        float r = 1.0 / sqrt(dots[at + out_n] / float(n * p.H) + p.eps);
        float sc_pre = site[out_n], sc_post = site[out_n + 1u], sc_comb = site[out_n + 2u];
        [[unroll]] for (uint j = 0u; j < NS; ++j) {
            s_pre[j] = sigmoid(dots[at + j] * r * sc_pre + site[j]) + p.hc_eps;
            mix[at + j] = 2.0 * sigmoid(dots[at + n + j] * r * sc_post + site[n + j]);
        }
        float m[NS * NS];
        [[unroll]] for (uint i = 0u; i < NS; ++i) {
            float top = -3.0e38;
            [[unroll]] for (uint j = 0u; j < NS; ++j) {
                uint k = 2u * n + i * NS + j;
                m[i * NS + j] = dots[at + k] * r * sc_comb + site[k];
                top = max(top, m[i * NS + j]);
            }
            float sum = 0.0;
            [[unroll]] for (uint j = 0u; j < NS; ++j) { m[i * NS + j] = exp(m[i * NS + j] - top); sum += m[i * NS + j]; }
            [[unroll]] for (uint j = 0u; j < NS; ++j) m[i * NS + j] = m[i * NS + j] / sum + p.hc_eps;
        }
        for (uint round = 0u; round < p.rounds; ++round) {
            if (round > 0u) {
                [[unroll]] for (uint i = 0u; i < NS; ++i) {
                    float sum = 0.0;
                    [[unroll]] for (uint j = 0u; j < NS; ++j) sum += m[i * NS + j];
                    sum = 1.0 / (sum + p.hc_eps);
                    [[unroll]] for (uint j = 0u; j < NS; ++j) m[i * NS + j] *= sum;
                }
            }
            [[unroll]] for (uint j = 0u; j < NS; ++j) {
                float sum = 0.0;
                [[unroll]] for (uint i = 0u; i < NS; ++i) sum += m[i * NS + j];
                sum = 1.0 / (sum + p.hc_eps);
                [[unroll]] for (uint i = 0u; i < NS; ++i) m[i * NS + j] *= sum;
            }
        }
        [[unroll]] for (uint i = 0u; i < NS * NS; ++i) mix[at + NS + i] = m[i];
    }
    barrier();
    uint h4 = p.Hp >> 2;
    float sum = 0.0;
    for (uint c = t; c < h4; c += WG) {
        vec4 v = vec4(0.0);
        [[unroll]] for (uint j = 0u; j < NS; ++j) v += s_pre[j] * x4[(row * NS + j) * h4 + c];
        xn4[row * h4 + c] = v;
        sum += dot(v, v);
    }
    float r = 1.0 / sqrt(group_sum(sum) / float(p.H) + p.eps);
    for (uint c = t; c < h4; c += WG) {
        uint w = 128u + 4u * c;
        xn4[row * h4 + c] *= r * vec4(site[w], site[w + 1u], site[w + 2u], site[w + 3u]);
    }
}
