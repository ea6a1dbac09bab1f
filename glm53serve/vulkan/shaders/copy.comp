#version 450
#extension GL_GOOGLE_include_directive : require
// Moves floats, four an invocation and step: what a device's memory gives, for comparison.
layout(local_size_x = 256) in;
#include "common.glsl"
layout(set = 1, binding = 0) readonly buffer X { vec4 x4[]; };
layout(set = 1, binding = 1) writeonly buffer Y { vec4 y4[]; };
layout(push_constant) uniform Push { uint fours; } p;

void main() {
    if (halted()) return;
    uint step = gl_NumWorkGroups.x * 256u;
    for (uint i = gl_GlobalInvocationID.x; i < p.fours; i += step) y4[i] = x4[i];
}
