#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// Many rows: a workgroup makes a TM x 64 tile of y. With EXPERT a tile's rows are pairs (row, choice) of
// one expert, named by the tile table that moe_sort wrote.
layout(local_size_x = 16, local_size_y = 16) in;
#include "common.glsl"
#include "weights.glsl"
#include "linear.glsl"
#ifdef EXPERT
layout(set = 1, binding = 4) readonly buffer Tiles { uint tiles[]; };   // [0] tiles, from 4 on: expert, first, pairs, 0
layout(set = 1, binding = 5) readonly buffer Order { uint order[]; };   // pairs sorted by expert
#endif
uint g_m0, g_rows, g_n0, g_base;

uint x_row(uint m) {
#ifdef EXPERT
    return order[g_m0 + m] / p.xdiv;
#else
    return g_m0 + m;
#endif
}
vec4 load_a(uint m, uint k) {
    if (m >= g_rows) return vec4(0.0);
    return x4[(x_row(m) * p.xs + p.xo + gl_WorkGroupID.z * p.xz + k) >> 2];
}
vec4 load_b(uint n, uint k) {
    uint row = g_base + min(g_n0 + n, p.N - 1u);
    return load4(row * (p.K >> 2) + (k >> 2)) * weight_scale(row, k, p.K);
}
void store(uint m, uint n, vec4 v) {
    if (m >= g_rows) return;
#ifdef EXPERT
    uint at = order[g_m0 + m] * p.ys + p.yo;
#else
    uint at = (g_m0 + m) * p.ys + p.yo + gl_WorkGroupID.z * p.yz;
#endif
    n += g_n0;
    if (SWIGLU != 0u) {
        if (n + 1u < p.N) y[at + (n >> 1)] = clamped_swiglu(v.x, v.y, p.limit);
        if (n + 3u < p.N) y[at + (n >> 1) + 1u] = clamped_swiglu(v.z, v.w, p.limit);
    } else {
        [[unroll]] for (uint j = 0u; j < 4u; ++j) if (n + j < p.N) y[at + n + j] = v[j];
    }
}
#include "tile.glsl"

void main() {
    if (halted()) return;
    g_n0 = gl_WorkGroupID.x * 64u;
    uint y0 = gl_WorkGroupID.y + p.first_tile;
#ifdef EXPERT
    if (y0 >= tiles[0]) return;
    uint e = tiles[4u + 4u * y0];
    if (e < p.e0 || e >= p.e1) return;
    g_m0 = tiles[5u + 4u * y0];
    g_rows = tiles[6u + 4u * y0];
    g_base = (e - p.e0) * p.N;
#else
    g_m0 = y0 * TM;
    if (g_m0 >= row_count()) return;
    g_rows = min(TM, row_count() - g_m0);
    g_base = p.wr + gl_WorkGroupID.z * p.N;
#endif
    multiply(p.K);
}
