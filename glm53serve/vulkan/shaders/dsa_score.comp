#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// Index scores (model spec 5.3): s_p = sum_h wt[h] relu(qi[h] . pool key p / sqrt(d)). An invocation takes one pool
// and a quarter of the query heads, which come four at a time through shared memory. Rows that see everything need no scores.
#define POOLS 64u
layout(local_size_x = 64, local_size_y = 4) in;
#include "common.glsl"
#include "select.glsl"
layout(constant_id = 2) const uint DIP = 128u;                         // index head dim, padded to 4
layout(set = 1, binding = 0) readonly buffer Q { float qi[]; };        // [rows, qs] at qo: [heads, dip]
layout(set = 1, binding = 1) readonly buffer A { float a[]; };         // [rows, as] at wo: head weights
layout(set = 1, binding = 2) readonly buffer P { vec4 pools4[]; };     // [slots, max pools, dip]
layout(set = 1, binding = 3) writeonly buffer S { float scores[]; };   // [rows, max pools]
layout(push_constant) uniform Push { uint heads, qs, qo, as, wo, max_pools, kpool, budget; float root_d, root_heads; } p;
shared vec4 sq[4][DIP];
shared float sw[4][4], part[4][POOLS];

void main() {
    if (halted()) return;
    uint row = gl_WorkGroupID.y, t = gl_LocalInvocationID.x, quarter = gl_LocalInvocationID.y, pool = gl_WorkGroupID.x * POOLS + t;
    if (row >= row_count()) return;
    uint pos = row_pos(row), n = complete_pools(pos, p.kpool);
    if (sees_all(pos, p.budget, p.kpool) || gl_WorkGroupID.x * POOLS >= n) return;
    uint at = (row_slot(row) * p.max_pools + min(pool, n - 1u)) * (DIP / 4u), share = (p.heads + 15u) / 16u * 4u;
    float total = 0.0;
    for (uint block = 0u; block < share; block += 4u) {
        uint h0 = quarter * share + block;
        barrier();
        for (uint i = t; i < DIP; i += POOLS) {
            uint h = h0 + i / (DIP / 4u), c = (i % (DIP / 4u)) * 4u, q = row * p.qs + p.qo + h * DIP + c;
            sq[quarter][i] = h < p.heads ? vec4(qi[q], qi[q + 1u], qi[q + 2u], qi[q + 3u]) : vec4(0.0);
        }
        if (t < 4u) sw[quarter][t] = h0 + t < p.heads ? a[row * p.as + p.wo + h0 + t] / p.root_heads : 0.0;
        barrier();
        float acc[4];
        [[unroll]] for (uint h = 0u; h < 4u; ++h) acc[h] = 0.0;
        for (uint c = 0u; c < DIP / 4u; ++c) {
            vec4 k = pools4[at + c];
            [[unroll]] for (uint h = 0u; h < 4u; ++h) acc[h] += dot(sq[quarter][h * (DIP / 4u) + c], k);
        }
        [[unroll]] for (uint h = 0u; h < 4u; ++h) total += sw[quarter][h] * max(acc[h] / p.root_d, 0.0);
    }
    part[quarter][t] = total;
    barrier();
    if (quarter == 0u && pool < n) scores[row * p.max_pools + pool] = (part[0][t] + part[1][t]) + (part[2][t] + part[3][t]);
}
