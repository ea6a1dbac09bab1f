// What the two linear kernels share: y[m, n] = sum_k x[m, k] W[n, k], optionally for several groups z
// (heads), or for routed experts (EXPERT), with a plain or a clamped-SwiGLU epilogue. For SwiGLU the
// weight rows alternate gate and up, so columns 2i and 2i+1 give value i.
layout(push_constant) uniform Push {
    uint N;        // weight rows of a group or expert
    uint K;        // columns, a multiple of 64
    uint xs, xo;   // row stride and offset of x, in floats; multiples of 4
    uint ys, yo;   // row stride and offset of y
    uint xz, yz;   // offsets a group adds
    uint wr;       // first weight row
    uint e0, e1;   // experts [e0, e1) lie in this binding
    uint xdiv;     // pairs that share a row of x
    float limit;   // SwiGLU clamp
    uint first_tile;   // of a dispatch that does part of the tiles (matrix kernels)
} p;
layout(constant_id = 4) const uint SWIGLU = 0u;
layout(set = 1, binding = 0) readonly buffer X { vec4 x4[]; };
layout(set = 1, binding = 3) writeonly buffer Y { float y[]; };
