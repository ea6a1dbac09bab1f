// Weight formats, row-major with K a multiple of 64. FMT 0 float32, 1 bfloat16, 2 e4m3 with a scale a
// row and 64 columns, 3 int8 with a scale a row, 4 int4 (low nibble first, value nibble - 8) with a
// scale a row and 64 columns. Rows are addressed in units of 8 (vector kernel) or 4 (matrix kernel)
// columns, which keeps the index inside 32 bits for buffers of 4 GiB. Four or eight columns never straddle a group.
#if FMT >= 2
layout(set = 1, binding = 2) readonly buffer Scales { float scales[]; };
#endif
float from_bf16_low(uint u) { return uintBitsToFloat(u << 16); }
float from_bf16_high(uint u) { return uintBitsToFloat(u & 0xffff0000u); }
// Whole numbers become floats by putting them into the mantissa of 2^23: conversion instructions are slow on GPUs.
const uint TWO_23 = 0x4b000000u;
float from_e4m3(uint b) {
    uint magnitude = b & 0x7fu;
    float small = (uintBitsToFloat(magnitude | TWO_23) - 8388608.0) * 0.001953125;
    float v = magnitude < 8u ? small : uintBitsToFloat((magnitude << 20) + 0x3c000000u);
    return uintBitsToFloat(floatBitsToUint(v) | (b & 0x80u) << 24);
}
vec4 four_e4m3(uint u) {
    return vec4(from_e4m3(u & 255u), from_e4m3((u >> 8) & 255u), from_e4m3((u >> 16) & 255u), from_e4m3(u >> 24));
}
vec4 four_int8(uint u) {
    uvec4 q = (uvec4(u, u >> 8, u >> 16, u >> 24) ^ 0x80u) & 255u | TWO_23;
    return uintBitsToFloat(q) - 8388736.0;
}
vec4 four_int4(uint u) {
    return uintBitsToFloat(uvec4(u, u >> 4, u >> 8, u >> 12) & 15u | TWO_23) - 8388616.0;
}

float weight_scale(uint row, uint k, uint K) {
#if FMT == 2 || FMT == 4
    return scales[row * (K >> 6) + (k >> 6)];
#elif FMT == 3
    return scales[row];
#else
    return 1.0;
#endif
}

#ifdef EIGHT
// Eight columns of a row, without the scale.
#if FMT == 0
layout(set = 1, binding = 1) readonly buffer Weights { vec4 weights[]; };
void load8(uint at, out vec4 a, out vec4 b) { a = weights[2u * at]; b = weights[2u * at + 1u]; }
#elif FMT == 1
layout(set = 1, binding = 1) readonly buffer Weights { uvec4 weights[]; };
void load8(uint at, out vec4 a, out vec4 b) {
    uvec4 u = weights[at];
    a = vec4(from_bf16_low(u.x), from_bf16_high(u.x), from_bf16_low(u.y), from_bf16_high(u.y));
    b = vec4(from_bf16_low(u.z), from_bf16_high(u.z), from_bf16_low(u.w), from_bf16_high(u.w));
}
#elif FMT == 2 || FMT == 3
layout(set = 1, binding = 1) readonly buffer Weights { uvec2 weights[]; };
void load8(uint at, out vec4 a, out vec4 b) {
    uvec2 u = weights[at];
#if FMT == 2
    a = four_e4m3(u.x); b = four_e4m3(u.y);
#else
    a = four_int8(u.x); b = four_int8(u.y);
#endif
}
#else
layout(set = 1, binding = 1) readonly buffer Weights { uint weights[]; };
void load8(uint at, out vec4 a, out vec4 b) {
    uint u = weights[at];
    a = four_int4(u); b = four_int4(u >> 16);
}
#endif
#else
// Four columns of a row, scaled.
#if FMT == 0
layout(set = 1, binding = 1) readonly buffer Weights { vec4 weights[]; };
vec4 load4(uint at) { return weights[at]; }
#elif FMT == 1
layout(set = 1, binding = 1) readonly buffer Weights { uvec2 weights[]; };
vec4 load4(uint at) {
    uvec2 u = weights[at];
    return vec4(from_bf16_low(u.x), from_bf16_high(u.x), from_bf16_low(u.y), from_bf16_high(u.y));
}
#elif FMT == 2 || FMT == 3
layout(set = 1, binding = 1) readonly buffer Weights { uint weights[]; };
vec4 load4(uint at) {
#if FMT == 2
    return four_e4m3(weights[at]);
#else
    return four_int8(weights[at]);
#endif
}
#else
layout(set = 1, binding = 1) readonly buffer Weights { uint weights[]; };
vec4 load4(uint at) { return four_int4(weights[at >> 1] >> ((at & 1u) << 4)); }
#endif
#endif
