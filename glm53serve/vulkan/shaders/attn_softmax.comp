#version 450
#extension GL_GOOGLE_include_directive : require
// Softmax over the tokens a row attends to, in place; zeros up to the next multiple of 16. One workgroup a (head, row).
#define WG 64u
layout(local_size_x = 64) in;
#include "common.glsl"
#include "reduce.glsl"
#include "select.glsl"
layout(set = 1, binding = 0) buffer S { float scores[]; };   // [rows, heads, ts]
layout(push_constant) uniform Push { uint heads, ts, kpool, budget; } p;

void main() {
    if (halted()) return;
    uint head = gl_WorkGroupID.x, row = gl_WorkGroupID.y, t = gl_LocalInvocationIndex;
    if (row >= row_count()) return;
    uint n = seen(row_pos(row), p.budget, p.kpool), at = (row * p.heads + head) * p.ts;
    float top = -3.0e38, sum = 0.0;
    for (uint i = t; i < n; i += WG) top = max(top, scores[at + i]);
    top = group_max(top);
    for (uint i = t; i < n; i += WG) { float e = exp(scores[at + i] - top); scores[at + i] = e; sum += e; }
    sum = group_sum(sum);
    for (uint i = t; i < ((n + 15u) & ~15u); i += WG) scores[at + i] = i < n ? scores[at + i] / sum : 0.0;
}
