// A TM x 64 tile of C = A B, sixteen columns of the inner dimension at a time through shared memory,
// 256 invocations with RM x 4 sums each (TM = 16 RM). The file that includes it gives
//   vec4 load_a(uint m, uint k)  four inner values of row m of the tile, 0 past the end
//   vec4 load_b(...)             four inner values of column n (or, B_BY_K, four columns at inner k)
//   void store(uint m, uint n, vec4 v)
// Sums run in the order of the inner dimension, so a row's bits do not depend on its tile.
layout(constant_id = 2) const uint RM = 4u;
const uint TM = 16u * RM;
const uint AS = TM + 4u;
shared float a_tile[16u * AS];
shared vec4 b_tile[16u * 17u];
const uint A_LOADS = (RM + 3u) / 4u;

void multiply(uint inner) {
    uint tx = gl_LocalInvocationID.x, ty = gl_LocalInvocationID.y, t = gl_LocalInvocationIndex;
    vec4 acc[RM];
    [[unroll]] for (uint i = 0u; i < RM; ++i) acc[i] = vec4(0.0);
    vec4 av[A_LOADS], bv;
    [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) {
        uint at = t + 256u * i;
        av[i] = at < TM * 4u ? load_a(at >> 2, (at & 3u) * 4u) : vec4(0.0);
    }
#ifdef B_BY_K
    bv = load_b(t & 15u, t >> 4);
#else
    bv = load_b(t >> 2, (t & 3u) * 4u);
#endif
    for (uint k0 = 0u; k0 < inner; k0 += 16u) {
        barrier();
        [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) {
            uint at = t + 256u * i;
            if (at < TM * 4u) {
                uint m = at >> 2, k = (at & 3u) * 4u;
                [[unroll]] for (uint j = 0u; j < 4u; ++j) a_tile[(k + j) * AS + m] = av[i][j];
            }
        }
#ifdef B_BY_K
        b_tile[(t >> 4) * 17u + (t & 15u)] = bv;
#else
        [[unroll]] for (uint j = 0u; j < 4u; ++j) b_tile[((t & 3u) * 4u + j) * 17u + (t >> 4)][(t >> 2) & 3u] = bv[j];
#endif
        barrier();
        if (k0 + 16u < inner) {
            [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) {
                uint at = t + 256u * i;
                if (at < TM * 4u) av[i] = load_a(at >> 2, k0 + 16u + (at & 3u) * 4u);
            }
#ifdef B_BY_K
            bv = load_b(t & 15u, k0 + 16u + (t >> 4));
#else
            bv = load_b(t >> 2, k0 + 16u + (t & 3u) * 4u);
#endif
        }
        [[unroll]] for (uint k = 0u; k < 16u; ++k) {
            vec4 b = b_tile[k * 17u + tx];
            [[unroll]] for (uint i = 0u; i < RM; ++i) acc[i] += a_tile[k * AS + ty * RM + i] * b;
        }
    }
    [[unroll]] for (uint i = 0u; i < RM; ++i) store(ty * RM + i, tx * 4u, acc[i]);
}
