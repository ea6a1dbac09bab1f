#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// Absorbed MLA values (model spec 5.1): c[h] = sum_i a[h, i] latent(token i), a tile of heads x 64 latent channels of a row.
// For few rows the tokens are cut in `splits` runs, each with a partial sum of its own that attn_sum adds up.
layout(local_size_x = 16, local_size_y = 16) in;
#include "common.glsl"
#include "select.glsl"
#include "attn.glsl"
layout(set = 1, binding = 0) readonly buffer X { vec4 a4[]; };       // [rows, heads, ts]
layout(set = 1, binding = 1) writeonly buffer Y { vec4 c4[]; };      // [splits, rows, heads, rp]
uint g_n0, g_k0, g_part;
vec4 load_a(uint m, uint k) {
    return g_head0 + m < p.heads ? a4[((g_row * p.heads + g_head0 + m) * p.ts + g_k0 + k) >> 2] : vec4(0.0);
}
vec4 load_b(uint n4, uint k) { return latents4[((g_place + token(min(g_k0 + k, g_count - 1u))) * p.rp + g_n0) / 4u + n4]; }
void store(uint m, uint n, vec4 v) {
    if (g_head0 + m < p.heads) c4[(((g_part * p.rows + g_row) * p.heads + g_head0 + m) * p.rp + g_n0 + n) >> 2] = v;
}
#define B_BY_K
#include "tile.glsl"

void main() {
    if (halted()) return;
    if (gl_WorkGroupID.z >= row_count()) return;
    open_row();
    g_n0 = gl_WorkGroupID.x / p.splits * 64u;
    g_part = gl_WorkGroupID.x % p.splits;
    g_head0 = gl_WorkGroupID.y * TM;
    uint inner = (g_count + 15u) & ~15u, run = ((inner + p.splits - 1u) / p.splits + 15u) & ~15u;
    g_k0 = g_part * run;
    multiply(g_k0 < inner ? min(run, inner - g_k0) : 0u);
}
