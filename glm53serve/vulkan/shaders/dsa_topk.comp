#version 450
#extension GL_GOOGLE_include_directive : require
// Exact selection (model spec 5.3): the best `keep` pools of a row, equal scores by lower index, written in ascending
// order. Radix select over an order-preserving integer form of the scores: four passes of a 256-bin histogram find the
// smallest kept key and how many of its equals are kept, then one ordered pass writes them. One workgroup a row.
#define WG 256u
layout(local_size_x = 256) in;
#include "common.glsl"
#include "select.glsl"
layout(set = 1, binding = 0) readonly buffer S { float scores[]; };   // [rows, max pools]
layout(set = 1, binding = 1) writeonly buffer L { uint chosen[]; };   // [rows, keep]
layout(push_constant) uniform Push { uint max_pools, kpool, budget, keep; } p;
shared uint bins[256];
shared uint s_prefix, s_need;
shared uvec2 scan[WG];

uint order_key(float f) {
    uint u = f == 0.0 ? 0u : floatBitsToUint(f);          // one zero only
    return (u & 0x80000000u) != 0u ? ~u : u | 0x80000000u;
}

void main() {
    if (halted()) return;
    uint row = gl_WorkGroupID.x, t = gl_LocalInvocationIndex;
    if (row >= row_count()) return;
    uint pos = row_pos(row), n = complete_pools(pos, p.kpool), at = row * p.max_pools;
    if (sees_all(pos, p.budget, p.kpool)) return;
    if (t == 0u) { s_prefix = 0u; s_need = p.keep; }
    for (uint pass = 0u; pass < 4u; ++pass) {
        uint shift = 24u - 8u * pass;
        bins[t] = 0u;
        barrier();
        uint prefix = s_prefix;
        for (uint i = t; i < n; i += WG) {
            uint key = order_key(scores[at + i]);
            if (pass == 0u || (key >> (shift + 8u)) == (prefix >> (shift + 8u))) atomicAdd(bins[(key >> shift) & 255u], 1u);
        }
        barrier();
        uint own = bins[t], need = s_need;
        for (uint h = 1u; h < WG; h <<= 1) {                            // how many lie in this bucket and above
            uint v = t + h < WG ? bins[t + h] : 0u;
            barrier();
            bins[t] += v;
            barrier();
        }
        if (bins[t] >= need && bins[t] - own < need) { s_prefix = prefix | (t << shift); s_need = need - (bins[t] - own); }
        barrier();
    }
    uint threshold = s_prefix, equals = s_need, wrote = 0u, met = 0u;   // keep all above, and the first `equals` equal ones
    for (uint i0 = 0u; i0 < n; i0 += WG) {
        uint i = i0 + t, key = i < n ? order_key(scores[at + i]) : 0u;
        uint above = i < n && key > threshold ? 1u : 0u, equal = i < n && key == threshold ? 1u : 0u;
        scan[t] = uvec2(above, equal);
        barrier();
        for (uint h = 1u; h < WG; h <<= 1) {
            uvec2 v = t >= h ? scan[t - h] : uvec2(0u);
            barrier();
            scan[t] += v;
            barrier();
        }
        uvec2 upto = scan[t], all = scan[WG - 1u];
        uint rank = met + upto.y - equal;                               // equal ones before this one
        if (above != 0u || (equal != 0u && rank < equals)) chosen[row * p.keep + wrote + (upto.x - above) + min(rank, equals) - min(met, equals)] = i;
        wrote += all.x + min(met + all.y, equals) - min(met, equals);
        met += all.y;
        barrier();
    }
}
