#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// Router (model spec 6): sigmoid scores, biased choice with group limits, unbiased weights. An expert's rank is the number
// of experts ahead of it (higher score, equal scores by lower index), so the choice is exact. One workgroup a row.
#define WG 256u
layout(local_size_x = 256) in;
#include "common.glsl"
#include "reduce.glsl"
layout(constant_id = 2) const uint E = 288u;
layout(constant_id = 3) const uint GROUPS = 1u;
layout(set = 1, binding = 0) readonly buffer L { float logits[]; };   // [rows, ls]
layout(set = 1, binding = 1) readonly buffer B { float bias[]; };     // [E]
layout(set = 1, binding = 2) writeonly buffer I { uint ids[]; };      // [rows, k]
layout(set = 1, binding = 3) writeonly buffer W { float weights[]; }; // [rows, k]
layout(set = 1, binding = 4) buffer U { uint uses[]; };               // [slots, sparse layers, E]
layout(push_constant) uniform Push { uint ls, topk, keep_groups, norm, uses_stride, uses_at; float scaling; } p;
const uint E4 = (E + 3u) / 4u, MINE = (E + WG - 1u) / WG;
const float NEVER = -3.4e38;
shared float score[E], group_score[GROUPS];
shared vec4 rivals[E4];                                               // biased scores, padding below all of them
#define biased(e) rivals[(e) >> 2][(e) & 3u]

void main() {
    if (halted()) return;
    uint row = gl_WorkGroupID.x, t = gl_LocalInvocationIndex;
    if (row >= row_count()) return;
    if (t < E4) rivals[t] = vec4(NEVER);
    barrier();
    for (uint e = t; e < E; e += WG) {
        score[e] = sigmoid(logits[row * p.ls + e]);
        biased(e) = score[e] + bias[e];
    }
    barrier();
    if (GROUPS > 1u) {
        uint size = E / GROUPS;
        for (uint g = t; g < GROUPS; g += WG) {
            float first = -3.0e38, second = -3.0e38;
            for (uint e = g * size; e < (g + 1u) * size; ++e) {
                float b = biased(e);
                if (b > first) { second = first; first = b; } else if (b > second) second = b;
            }
            group_score[g] = first + second;
        }
        barrier();
        for (uint e = t; e < E; e += WG) {
            uint g = e / size, ahead = 0u;
            for (uint o = 0u; o < GROUPS; ++o)
                if (group_score[o] > group_score[g] || (group_score[o] == group_score[g] && o < g)) ++ahead;
            if (ahead >= p.keep_groups) biased(e) = -3.0e38;
        }
        barrier();
    }
    float total = 0.0;
    uint rank[MINE];
    [[unroll]] for (uint i = 0u; i < MINE; ++i) {
        uint e = t + i * WG;
        rank[i] = NONE;
        if (e >= E) continue;
        float mine = biased(e);
        uvec4 ahead = uvec4(0u);
        uvec4 o = uvec4(0u, 1u, 2u, 3u);
        for (uint j = 0u; j < E4; ++j, o += 4u) {
            vec4 r = rivals[j];
            ahead += uvec4(greaterThan(r, vec4(mine))) + uvec4(equal(r, vec4(mine))) * uvec4(lessThan(o, uvec4(e)));
        }
        rank[i] = ahead.x + ahead.y + ahead.z + ahead.w;
        if (rank[i] < p.topk) {
            ids[row * p.topk + rank[i]] = e;
            total += score[e];
            atomicAdd(uses[row_slot(row) * p.uses_stride + p.uses_at + e], 1u);
        }
    }
    total = group_sum(total);
    float scale = (p.norm != 0u ? 1.0 / (total + 1e-20) : 1.0) * p.scaling;
    [[unroll]] for (uint i = 0u; i < MINE; ++i)
        if (rank[i] < p.topk) weights[row * p.topk + rank[i]] = score[t + i * WG] * scale;
}
