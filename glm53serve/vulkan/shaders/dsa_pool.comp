#version 450
#extension GL_GOOGLE_include_directive : require
// Pool keys (model spec 5.2): the row that completes a pool makes its key from the raw keys and gates of its tokens.
#define WG 64u
layout(local_size_x = 64) in;
#include "common.glsl"
layout(set = 1, binding = 0) readonly buffer K { float keys[]; };     // [slots, capacity, 2 dip]
layout(set = 1, binding = 1) readonly buffer A { float ape[]; };      // [kpool, di]
layout(set = 1, binding = 2) writeonly buffer P { float pools[]; };   // [slots, max pools, dip]
layout(push_constant) uniform Push { uint di, dip, capacity, kpool, max_pools; } p;

void main() {
    if (halted()) return;
    uint row = gl_WorkGroupID.x;
    if (row >= row_count()) return;
    uint pos = row_pos(row), slot = row_slot(row);
    if ((pos + 1u) % p.kpool != 0u) return;
    uint pool = pos / p.kpool, first = slot * p.capacity + pool * p.kpool;
    for (uint c = gl_LocalInvocationIndex; c < p.dip; c += WG) {
        float top = -3.0e38, sum = 0.0, v = 0.0;
        if (c < p.di) {
            for (uint j = 0u; j < p.kpool; ++j) top = max(top, keys[(first + j) * 2u * p.dip + p.dip + c] + ape[j * p.di + c]);
            for (uint j = 0u; j < p.kpool; ++j) {
                float w = exp(keys[(first + j) * 2u * p.dip + p.dip + c] + ape[j * p.di + c] - top);
                sum += w; v += w * keys[(first + j) * 2u * p.dip + c];
            }
            v /= sum;
        }
        pools[(slot * p.max_pools + pool) * p.dip + c] = v;
    }
}
