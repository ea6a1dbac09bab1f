#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// mHC (model spec 3): X'[k] = post[k] y + sum_j M[j, k] X[j] in place, where y is the sub-layer's output plus,
// behind a router, the weighted outputs of the chosen experts in the order of their rank (model spec 6).
#define WG 128u
layout(local_size_x = 128) in;
#include "common.glsl"
layout(constant_id = 2) const uint NS = 4u;
layout(set = 1, binding = 0) buffer X { float x[]; };                // [rows, n, Hp]
layout(set = 1, binding = 1) readonly buffer M { float mix[]; };     // [rows, 128]
layout(set = 1, binding = 2) readonly buffer Y { float y[]; };       // [rows, Hp]
layout(set = 1, binding = 3) readonly buffer E { float ey[]; };      // [rows, k, Hp]
layout(set = 1, binding = 4) readonly buffer W { float ew[]; };      // [rows, k]
layout(push_constant) uniform Push { uint Hp, has_y, topk; } p;

void main() {
    if (halted()) return;
    uint row = gl_WorkGroupID.y, c = gl_WorkGroupID.x * WG + gl_LocalInvocationIndex;
    if (row >= row_count() || c >= p.Hp) return;
    float v = 0.0;
    for (uint k = 0u; k < p.topk; ++k) v += ew[row * p.topk + k] * ey[(row * p.topk + k) * p.Hp + c];
    if (p.has_y != 0u) v += y[row * p.Hp + c];
    float old[NS];
    [[unroll]] for (uint j = 0u; j < NS; ++j) old[j] = x[(row * NS + j) * p.Hp + c];
    uint at = row * 128u;
    [[unroll]] for (uint k = 0u; k < NS; ++k) {
        float sum = mix[at + k] * v;
        [[unroll]] for (uint j = 0u; j < NS; ++j) sum += mix[at + NS + j * NS + k] * old[j];
        x[(row * NS + k) * p.Hp + c] = sum;
    }
}
