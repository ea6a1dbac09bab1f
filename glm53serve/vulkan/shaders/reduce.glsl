// Sum over the WG invocations of a workgroup in a fixed order; every invocation gets the result.
shared float s_red[WG];
float group_sum(float v) {
    uint t = gl_LocalInvocationIndex;
    barrier();
    s_red[t] = v;
    barrier();
    for (uint h = WG / 2u; h > 0u; h >>= 1) {
        if (t < h) s_red[t] += s_red[t + h];
        barrier();
    }
    return s_red[0];
}
float group_max(float v) {
    uint t = gl_LocalInvocationIndex;
    barrier();
    s_red[t] = v;
    barrier();
    for (uint h = WG / 2u; h > 0u; h >>= 1) {
        if (t < h) s_red[t] = max(s_red[t], s_red[t + h]);
        barrier();
    }
    return s_red[0];
}
