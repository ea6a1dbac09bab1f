#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// mHC (model spec 3): the raw products fn . X of a row's concatenated streams and their sum of squares,
// which is output number (2+n)n. The division by the root follows in hc_pre. PER outputs a workgroup: one
// where there are few rows, so that enough of the device works.
#define WG gl_WorkGroupSize.x
layout(local_size_x = 256, local_size_x_id = 1) in;
#include "common.glsl"
layout(constant_id = 2) const uint PER = 4u;
layout(set = 1, binding = 0) readonly buffer X { vec4 x4[]; };     // [rows, n Hp]
layout(set = 1, binding = 1) readonly buffer F { vec4 fn4[]; };    // [outputs, n Hp]
layout(set = 1, binding = 2) writeonly buffer D { float dots[]; }; // [rows, 128]
layout(push_constant) uniform Push { uint outputs, width; } p;     // width = n Hp

shared vec4 s_sum[WG];

void main() {
    if (halted()) return;
    uint row = gl_WorkGroupID.y, o0 = gl_WorkGroupID.x * PER, t = gl_LocalInvocationIndex, l4 = p.width >> 2;
    if (row >= row_count()) return;
    vec4 acc = vec4(0.0);
    for (uint i = t; i < l4; i += WG) {
        vec4 x = x4[row * l4 + i];
        [[unroll]] for (uint j = 0u; j < PER; ++j) {
            uint o = o0 + j;
            if (o < p.outputs) acc[j] += dot(fn4[o * l4 + i], x);
            else if (o == p.outputs) acc[j] += dot(x, x);
        }
    }
    s_sum[t] = acc;
    barrier();
    for (uint h = WG / 2u; h > 0u; h >>= 1) {
        if (t < h) s_sum[t] += s_sum[t + h];
        barrier();
    }
    if (t < PER && o0 + t <= p.outputs) dots[row * 128u + o0 + t] = s_sum[0][t];
}
