#version 450
#extension GL_GOOGLE_include_directive : require
// KDA output (model spec 4.3): per-head RMS norm times the sigmoid gate. One workgroup a (head, row).
#define WG 64u
layout(local_size_x = 64) in;
#include "common.glsl"
#include "reduce.glsl"
layout(set = 1, binding = 0) readonly buffer O { float o[]; };        // [rows, P]
layout(set = 1, binding = 1) readonly buffer G { float gb[]; };       // [rows, Ps]
layout(set = 1, binding = 2) readonly buffer W { float weight[]; };   // [d]
layout(set = 1, binding = 3) writeonly buffer Y { float y[]; };       // [rows, Ps]
layout(push_constant) uniform Push { uint P, d, ps; float eps; } p;

void main() {
    if (halted()) return;
    uint head = gl_WorkGroupID.x, row = gl_WorkGroupID.y, t = gl_LocalInvocationIndex;
    if (row >= row_count()) return;
    float sum = 0.0;
    for (uint c = t; c < p.d; c += WG) { float v = o[row * p.P + head * p.d + c]; sum += v * v; }
    float r = 1.0 / sqrt(group_sum(sum) / float(p.d) + p.eps);
    for (uint c = t; c < p.d; c += WG) {
        uint ch = head * p.d + c;
        y[row * p.ps + ch] = weight[c] * (o[row * p.P + ch] * r) * sigmoid(gb[row * p.ps + ch]);
    }
}
