#version 450
#extension GL_GOOGLE_include_directive : require
// KDA (model spec 4.1): short convolution, SiLU, l2 of q and k, decay exp(g) and beta. One workgroup a (head, row).
// Rows before this group come from the window of the span's source page.
#define WG gl_WorkGroupSize.x
layout(local_size_x = 128, local_size_x_id = 1) in;
#include "common.glsl"
#include "reduce.glsl"
layout(set = 1, binding = 0) readonly buffer A { float raw[]; };       // [rows, as]: q, k, v, ..., beta logits
layout(set = 1, binding = 1) readonly buffer Z { float fb[]; };        // [rows, Ps]
layout(set = 1, binding = 2) readonly buffer T { float taps[]; };      // [3 P, K]
layout(set = 1, binding = 3) readonly buffer C { float gate[]; };      // dt_bias [P], a_log [heads]
layout(set = 1, binding = 4) readonly buffer O { float window[]; };    // [pages, K - 1, 3 P]
layout(set = 1, binding = 5) buffer Q { float qkv[]; };                // [rows, 3 P]
layout(set = 1, binding = 6) writeonly buffer G { float decay[]; };    // [rows, P]
layout(set = 1, binding = 7) writeonly buffer B { float beta[]; };     // [rows, heads]
layout(push_constant) uniform Push { uint P, heads, d, K, as, ko, vo, bo, ps, bounded; float bound; } p;

float raw_row(int index, uint first, uint source, uint at, uint stream, uint ch) {
    if (index >= 0) return raw[(first + uint(index)) * p.as + at + ch];
    if (source == NONE) return 0.0;
    return window[(source * (p.K - 1u) + uint(int(p.K) - 1 + index)) * 3u * p.P + stream * p.P + ch];
}
float convolve(int index, uint first, uint source, uint at, uint stream, uint ch) {
    float sum = 0.0;
    for (uint j = 0u; j < p.K; ++j)
        sum += taps[(stream * p.P + ch) * p.K + j] * raw_row(index - int(p.K) + 1 + int(j), first, source, at, stream, ch);
    return silu(sum);
}

void main() {
    if (halted()) return;
    uint head = gl_WorkGroupID.x, row = gl_WorkGroupID.y, t = gl_LocalInvocationIndex;
    if (row >= row_count()) return;
    uint span = row_span(row), first = span_first(span), source = span_source(span);
    int index = int(row_index(row));
    float qq = 0.0, kk = 0.0;
    for (uint c = t; c < p.d; c += WG) {
        uint ch = head * p.d + c, at = row * 3u * p.P + ch;
        float q = convolve(index, first, source, 0u, 0u, ch), k = convolve(index, first, source, p.ko, 1u, ch);
        qkv[at] = q; qkv[at + p.P] = k;
        qkv[at + 2u * p.P] = convolve(index, first, source, p.vo, 2u, ch);
        qq += q * q; kk += k * k;
        float z = fb[row * p.ps + ch] + gate[ch], a = exp(gate[p.P + head]);
        float g = p.bounded != 0u ? p.bound * sigmoid(a * z) : -a * (z > 20.0 ? z : log(1.0 + exp(z)));
        decay[row * p.P + ch] = exp(g);
    }
    if (t == 0u) beta[row * p.heads + head] = sigmoid(raw[row * p.as + p.bo + head]);
    float rq = 1.0 / (sqrt(group_sum(qq) + 1e-6) * sqrt(float(p.d))), rk = 1.0 / sqrt(group_sum(kk) + 1e-6);
    for (uint c = t; c < p.d; c += WG) {
        uint at = row * 3u * p.P + head * p.d + c;
        qkv[at] *= rq; qkv[at + p.P] *= rk;
    }
}
