#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// Absorbed MLA scores (model spec 5.1): score[h, i] = q~_h . latent(token i) / sqrt(dn), a tile of heads x 64 tokens of a row.
layout(local_size_x = 16, local_size_y = 16) in;
#include "common.glsl"
#include "select.glsl"
#include "attn.glsl"
layout(set = 1, binding = 0) readonly buffer X { vec4 q4[]; };        // [rows, heads, rp]
layout(set = 1, binding = 1) writeonly buffer Y { float scores[]; };  // [rows, heads, ts]
uint g_n0;
vec4 load_a(uint m, uint k) {
    return g_head0 + m < p.heads ? q4[((g_row * p.heads + g_head0 + m) * p.rp + k) >> 2] : vec4(0.0);
}
vec4 load_b(uint n, uint k) { return latents4[((g_place + token(min(g_n0 + n, g_count - 1u))) * p.rp + k) >> 2]; }
void store(uint m, uint n, vec4 v) {
    if (g_head0 + m >= p.heads) return;
    [[unroll]] for (uint j = 0u; j < 4u; ++j)
        if (g_n0 + n + j < g_count) scores[(g_row * p.heads + g_head0 + m) * p.ts + g_n0 + n + j] = v[j] / p.root_d;
}
#include "tile.glsl"

void main() {
    if (halted()) return;
    if (gl_WorkGroupID.z >= row_count()) return;
    open_row();
    g_n0 = gl_WorkGroupID.x * 64u;
    if (g_n0 >= g_count) return;
    g_head0 = gl_WorkGroupID.y * TM;
    multiply(p.rp);
}
