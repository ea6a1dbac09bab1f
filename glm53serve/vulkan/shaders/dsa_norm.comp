#version 450
#extension GL_GOOGLE_include_directive : require
// MLA (model spec 5.1, 5.2): the normalised query latent, the normalised key/value latent into the cache, and,
// with an indexer, the layer-normed index key and the raw pool gate of each position. One workgroup a row.
#define WG 128u
layout(local_size_x = 128) in;
#include "common.glsl"
#include "reduce.glsl"
layout(set = 1, binding = 0) readonly buffer A { float a[]; };        // [rows, as]
layout(set = 1, binding = 1) readonly buffer W { float weight[]; };   // q norm [qr], kv norm [r], key weight [di], key bias [di]
layout(set = 1, binding = 2) writeonly buffer Q { float qr[]; };      // [rows, qs]
layout(set = 1, binding = 3) writeonly buffer L { float latents[]; }; // [slots, capacity, rp]
layout(set = 1, binding = 4) writeonly buffer K { float keys[]; };    // [slots, capacity, 2 dip]: key, gate
layout(push_constant) uniform Push { uint as, kvo, ko, eo, q, qs, r, rp, di, dip, capacity, indexer; float eps; } p;

void main() {
    if (halted()) return;
    uint row = gl_WorkGroupID.x, t = gl_LocalInvocationIndex;
    if (row >= row_count()) return;
    uint at = row * p.as, place = row_slot(row) * p.capacity + row_pos(row);
    float sum = 0.0;
    for (uint c = t; c < p.q; c += WG) { float v = a[at + c]; sum += v * v; }
    float scale = 1.0 / sqrt(group_sum(sum) / float(p.q) + p.eps);
    for (uint c = t; c < p.qs; c += WG) qr[row * p.qs + c] = c < p.q ? weight[c] * (a[at + c] * scale) : 0.0;
    sum = 0.0;
    for (uint c = t; c < p.r; c += WG) { float v = a[at + p.kvo + c]; sum += v * v; }
    scale = 1.0 / sqrt(group_sum(sum) / float(p.r) + p.eps);
    for (uint c = t; c < p.rp; c += WG) latents[place * p.rp + c] = c < p.r ? weight[p.q + c] * (a[at + p.kvo + c] * scale) : 0.0;
    if (p.indexer == 0u) return;
    sum = 0.0;
    for (uint c = t; c < p.di; c += WG) sum += a[at + p.ko + c];
    float mean = group_sum(sum) / float(p.di);
    sum = 0.0;
    for (uint c = t; c < p.di; c += WG) { float v = a[at + p.ko + c] - mean; sum += v * v; }
    scale = 1.0 / sqrt(group_sum(sum) / float(p.di) + 1e-6);
    for (uint c = t; c < p.di; c += WG) {
        keys[place * 2u * p.dip + c] = weight[p.q + p.r + c] * ((a[at + p.ko + c] - mean) * scale) + weight[p.q + p.r + p.di + c];
        keys[place * 2u * p.dip + p.dip + c] = a[at + p.eo + c];
    }
}
