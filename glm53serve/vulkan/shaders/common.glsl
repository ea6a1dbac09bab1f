// Shared by every kernel. Set 0: the halt word (written by the host while the device runs) and the
// parameters of this row group. Set 1: the kernel's own buffers.
//
// The word is read by ONE invocation of a workgroup and spread through shared memory: two
// invocations could see different values, and a workgroup of which only a part reaches a barrier
// is undefined behaviour. It is volatile so that no copy of it is kept in a register.
#ifndef COMMON_GLSL
#define COMMON_GLSL
layout(constant_id = 0) const uint HALT_MODE = 1u;   // 0 never looks at the word, 1 looks first
layout(set = 0, binding = 0) readonly volatile buffer HaltWord { uint halt_word; };
layout(set = 0, binding = 1) readonly buffer Params { uint prm[]; };

const uint NONE = 0xffffffffu;
shared uint s_halt;

bool halted() {
    if (HALT_MODE == 0u) return false;
    if (gl_LocalInvocationIndex == 0u) s_halt = halt_word;
    barrier();
    return s_halt != 0u;
}

// Parameters: [0] rows, [1] spans, [2] where the span table starts; then four words a row, eight words a span.
uint row_count() { return prm[0]; }
uint span_count() { return prm[1]; }
uint row_slot(uint row) { return prm[16u + 4u * row]; }
uint row_pos(uint row) { return prm[17u + 4u * row]; }
uint row_span(uint row) { return prm[18u + 4u * row]; }
uint row_index(uint row) { return prm[19u + 4u * row]; }        // place inside its span's piece
uint span_first(uint s) { return prm[prm[2] + 8u * s]; }        // first row in this group
uint span_rows(uint s) { return prm[prm[2] + 8u * s + 1u]; }
uint span_source(uint s) { return prm[prm[2] + 8u * s + 2u]; }  // state page read, NONE = zeros
uint span_target(uint s) { return prm[prm[2] + 8u * s + 3u]; }  // state page written

float sigmoid(float x) { return 1.0 / (1.0 + exp(-x)); }
float silu(float x) { return x / (1.0 + exp(-x)); }
float clamped_swiglu(float g, float u, float limit) { return silu(min(g, limit)) * clamp(u, -limit, limit); }
#endif
