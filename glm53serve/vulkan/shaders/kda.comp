#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// KDA recurrence (model spec 4.2) over a span's rows. The value columns are independent: a workgroup is
// (32 columns, head, span), 128 invocations = 32 columns x 4 slices of the key channels, and an invocation's
// part of S stays in registers. Reads the span's source page and writes its target page; they may be the same.
// Also slides the convolution window (model spec 4.5), which kda_prep has read before.
layout(local_size_x = 32, local_size_y = 4) in;
#include "common.glsl"
layout(constant_id = 2) const uint D = 128u;
const uint DS = (D + 3u) / 4u;
layout(set = 1, binding = 0) readonly buffer Q { float qkv[]; };       // [rows, 3 P]
layout(set = 1, binding = 1) readonly buffer G { float decay[]; };     // [rows, P]
layout(set = 1, binding = 2) readonly buffer B { float beta[]; };      // [rows, heads]
layout(set = 1, binding = 3) buffer S { float state[]; };              // [pages, heads, D, D]
layout(set = 1, binding = 4) writeonly buffer O { float o[]; };        // [rows, P]
layout(set = 1, binding = 5) readonly buffer A { float raw[]; };       // [rows, as]
layout(set = 1, binding = 6) buffer W { float window[]; };             // [pages, K - 1, 3 P]
layout(push_constant) uniform Push { uint P, heads, K, as, ko, vo; } p;
shared float sk[4u * DS], sq[4u * DS], sg[4u * DS];
shared float red[4][32], red2[4][32];

void slide(uint ch, uint stream, uint at, uint first, uint count, uint source, uint target) {
    uint keep = p.K - 1u, width = 3u * p.P;
    for (uint e = 0u; e < keep; ++e) {
        int index = int(count) - int(keep) + int(e);
        float v = 0.0;
        if (index >= 0) v = raw[(first + uint(index)) * p.as + at + ch];
        else if (source != NONE) v = window[(source * keep + uint(int(keep) + index)) * width + stream * p.P + ch];
        window[(target * keep + e) * width + stream * p.P + ch] = v;
    }
}

void main() {
    if (halted()) return;
    uint c = gl_LocalInvocationID.x, slice = gl_LocalInvocationID.y, t = gl_LocalInvocationIndex;
    uint col = gl_WorkGroupID.x * 32u + c, head = gl_WorkGroupID.y, span = gl_WorkGroupID.z;
    if (span >= span_count()) return;
    uint first = span_first(span), count = span_rows(span), source = span_source(span), target = span_target(span);
    bool live = col < D;
    if (live && slice < 3u) slide(head * D + col, slice, slice == 0u ? 0u : slice == 1u ? p.ko : p.vo, first, count, source, target);
    float st[DS];
    [[unroll]] for (uint i = 0u; i < DS; ++i) {
        uint r = slice * DS + i;
        st[i] = live && r < D && source != NONE ? state[((source * p.heads + head) * D + r) * D + col] : 0.0;
    }
    for (uint i = t; i < 4u * DS; i += 128u) if (i >= D) { sk[i] = 0.0; sq[i] = 0.0; sg[i] = 0.0; }
    for (uint tok = 0u; tok < count; ++tok) {
        uint row = first + tok, b = row * 3u * p.P + head * D;
        for (uint i = t; i < D; i += 128u) {
            sq[i] = qkv[b + i]; sk[i] = qkv[b + p.P + i]; sg[i] = decay[row * p.P + head * D + i];
        }
        if (HALT_MODE != 0u && t == 0u && (tok & 7u) == 7u) s_halt = halt_word;   // rides on the next barrier
        barrier();
        if (HALT_MODE != 0u && s_halt != 0u) return;    // the target page is garbage now; nobody may read it
        float dot_k = 0.0;
        [[unroll]] for (uint i = 0u; i < DS; ++i) { st[i] *= sg[slice * DS + i]; dot_k += st[i] * sk[slice * DS + i]; }
        red[slice][c] = dot_k;
        barrier();
        float v = live ? qkv[b + 2u * p.P + col] : 0.0;
        float u = beta[row * p.heads + head] * (v - ((red[0][c] + red[1][c]) + (red[2][c] + red[3][c])));
        float dot_q = 0.0;
        [[unroll]] for (uint i = 0u; i < DS; ++i) { st[i] += sk[slice * DS + i] * u; dot_q += st[i] * sq[slice * DS + i]; }
        red2[slice][c] = dot_q;
        barrier();                                       // also: everyone is done with sk, sq, sg
        if (slice == 0u && live) o[row * p.P + head * D + col] = (red2[0][c] + red2[1][c]) + (red2[2][c] + red2[3][c]);
    }
    if (live) {
        [[unroll]] for (uint i = 0u; i < DS; ++i) {
            uint r = slice * DS + i;
            if (r < D) state[((target * p.heads + head) * D + r) * D + col] = st[i];
        }
    }
}
