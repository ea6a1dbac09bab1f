#version 450
#extension GL_GOOGLE_include_directive : require
// Groups the pairs (row, choice) by expert and cuts each expert's run into tiles of at most TILE pairs. The order inside a
// run is free: every pair's product is summed in the same order wherever it lies. One workgroup.
#define WG 256u
layout(local_size_x = 256) in;
#include "common.glsl"
layout(constant_id = 2) const uint E = 288u;
layout(constant_id = 3) const uint TILE = 16u;
layout(set = 1, binding = 0) readonly buffer I { uint ids[]; };       // [rows * k]
layout(set = 1, binding = 1) writeonly buffer T { uint tiles[]; };    // [0] tiles, from 4 on: expert, first, pairs, 0
layout(set = 1, binding = 2) writeonly buffer O { uint order[]; };    // [rows * k]
layout(push_constant) uniform Push { uint topk; } p;
shared uint count[E], next[E], first_tile[E];

void main() {
    if (halted()) return;
    uint t = gl_LocalInvocationIndex, pairs = row_count() * p.topk;
    for (uint e = t; e < E; e += WG) count[e] = 0u;
    barrier();
    for (uint i = t; i < pairs; i += WG) atomicAdd(count[ids[i]], 1u);
    barrier();
    if (t == 0u) {
        uint at = 0u, tile = 0u;
        for (uint e = 0u; e < E; ++e) {
            next[e] = at; first_tile[e] = tile;
            at += count[e]; tile += (count[e] + TILE - 1u) / TILE;
        }
        tiles[0] = tile;
    }
    barrier();
    for (uint e = t; e < E; e += WG) {
        uint n = count[e], at = next[e], tile = first_tile[e];
        for (uint done = 0u; done < n; done += TILE) {
            uint w = 4u + 4u * tile++;
            tiles[w] = e; tiles[w + 1u] = at + done; tiles[w + 2u] = min(TILE, n - done); tiles[w + 3u] = 0u;
        }
    }
    barrier();
    for (uint i = t; i < pairs; i += WG) order[atomicAdd(next[ids[i]], 1u)] = i;
}
