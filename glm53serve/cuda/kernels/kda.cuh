// The window after a span of one head, by 256 threads: rows move up by `count`, oldest first, so a short span may do it in place.
__device__ __forceinline__ void keep_window(float* window, const float* raw, int ld, int first, int count, int head, int P) {
    for (int at = threadIdx.x; at < 3 * KDA_D; at += 256) {
        const long channel = (long)(at / KDA_D) * P + head * KDA_D + at % KDA_D;
        for (int m = 0; m < CONV - 1; ++m) {
            const int from = count - (CONV - 1) + m;
            window[(long)m * 3 * P + channel] = from >= 0 ? raw[(long)(first + from) * ld + channel] : window[(long)(m + count) * 3 * P + channel];
        }
    }
}
