#version 450
#extension GL_GOOGLE_include_directive : require
// Adds up the partial sums of attn_mix in order.
#define WG 128u
layout(local_size_x = 128) in;
#include "common.glsl"
layout(set = 1, binding = 0) readonly buffer X { float parts[]; };   // [splits, rows, width]
layout(set = 1, binding = 1) writeonly buffer Y { float y[]; };      // [rows, width]
layout(push_constant) uniform Push { uint width, splits; } p;

void main() {
    if (halted()) return;
    uint row = gl_WorkGroupID.y, c = gl_WorkGroupID.x * WG + gl_LocalInvocationIndex;
    if (row >= row_count() || c >= p.width) return;
    uint rows = gl_NumWorkGroups.y;
    float sum = 0.0;
    for (uint s = 0u; s < p.splits; ++s) sum += parts[(s * rows + row) * p.width + c];
    y[row * p.width + c] = sum;
}
