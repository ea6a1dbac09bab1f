// Products for up to 16 rows, one block a few tiles; ONLY (4, 8 or 16 rows) picks one kernel, so that they compile side by side.
// Columns of an n-tile: column 2r is the high part of row r, column 2r + 1 its low part; NT tiles of 4 rows.
template <int NT> struct Activations {
    const u16* at[NT];  // this lane's column, or null
    __device__ __forceinline__ U4 unit(int nt, int column, int t) const {
        if (!at[nt]) { U4 z = {0, 0, 0, 0}; return z; }
        return *(const U4*)(at[nt] + column + 8 * t);
    }
};
template <int NT, int TILES> struct Sums { float c[TILES][NT][4]; };

template <int NT, int TILES> __device__ __forceinline__ void unit_products(Sums<NT, TILES>& s, int tile, u32 (*a)[4], const U4* x) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        mma(s.c[tile][n], a[0], x[n].x, x[n].y);
        mma(s.c[tile][n], a[1], x[n].z, x[n].w);
    }
}
template <int NT, int TILES> __device__ __forceinline__ void clear(Sums<NT, TILES>& s) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) s.c[i][n][j] = 0.0f;
}
template <int NT, int TILES> __device__ __forceinline__ void add_scaled(Sums<NT, TILES>& s, Sums<NT, TILES>& part, int tile, float top, float bottom) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        s.c[tile][n][0] += top * part.c[tile][n][0]; s.c[tile][n][1] += top * part.c[tile][n][1];
        s.c[tile][n][2] += bottom * part.c[tile][n][2]; s.c[tile][n][3] += bottom * part.c[tile][n][3];
    }
}

template <int FORMAT, int NT, int TILES>
__device__ __forceinline__ void granule_products(Sums<NT, TILES>& s, const Piece4* w, const F4 (*scale)[2], const U2* block_scale, const Activations<NT>& x,
                                                 int granule, int t) {
    u32 a[2][4];
    U4 xv[NT];
    if (FORMAT == INT4) {
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            Sums<NT, TILES> part;
            clear(part);
#pragma unroll
            for (int u = 0; u < 2; ++u) {
#pragma unroll
                for (int n = 0; n < NT; ++n) xv[n] = x.unit(n, granule * 256 + group * 64 + u * 32, t);
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    const U4 &top = w[i].p[(group >> 1) * 2], &bottom = w[i].p[(group >> 1) * 2 + 1];
                    int word = (group & 1) * 2 + u;
                    int4_unit(word == 0 ? top.x : word == 1 ? top.y : word == 2 ? top.z : top.w,
                              word == 0 ? bottom.x : word == 1 ? bottom.y : word == 2 ? bottom.z : bottom.w, a);
                    unit_products(part, i, a, xv);
                }
            }
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                const F4 &p = scale[i][0], &q = scale[i][1];
                add_scaled(s, part, i, group == 0 ? p.x : group == 1 ? p.y : group == 2 ? p.z : p.w, group == 0 ? q.x : group == 1 ? q.y : group == 2 ? q.z : q.w);
            }
        }
    } else if (FORMAT == INT8 || FORMAT == FP8) {
        Sums<NT, TILES> part;
        if (FORMAT == FP8) clear(part);
        Sums<NT, TILES>& to = FORMAT == FP8 ? part : s;
#pragma unroll
        for (int u = 0; u < 4; ++u) {
#pragma unroll
            for (int n = 0; n < NT; ++n) xv[n] = x.unit(n, granule * 128 + u * 32, t);
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                const U4 &top = w[i].p[(u >> 1) * 2], &bottom = w[i].p[(u >> 1) * 2 + 1];
                if (u & 1) byte_unit<FORMAT>(top.z, top.w, bottom.z, bottom.w, a);
                else byte_unit<FORMAT>(top.x, top.y, bottom.x, bottom.y, a);
                unit_products(to, i, a, xv);
            }
        }
        if (FORMAT == FP8) {
#pragma unroll
            for (int i = 0; i < TILES; ++i) add_scaled(s, part, i, __uint_as_float(block_scale[i].x), __uint_as_float(block_scale[i].y));
        }
    } else if (FORMAT == BF16) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
#pragma unroll
            for (int n = 0; n < NT; ++n) xv[n] = x.unit(n, granule * 64 + u * 32, t);
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                bf16_unit(w[i].p[2 * u], w[i].p[2 * u + 1], a);
                unit_products(s, i, a, xv);
            }
        }
    } else {
#pragma unroll
        for (int n = 0; n < NT; ++n) xv[n] = x.unit(n, granule * 32, t);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            u32 low[2][4];
            f32_step(w[i].p[0], w[i].p[1], a[0], low[0]);
            f32_step(w[i].p[2], w[i].p[3], a[1], low[1]);
            unit_products(s, i, a, xv);
            unit_products(s, i, low, xv);
        }
    }
}

template <int FORMAT, int TILES> struct Granule { Piece4 w[TILES]; F4 scale[FORMAT == INT4 ? TILES : 1][2]; U2 block_scale[FORMAT == FP8 ? TILES : 1]; };

template <int FORMAT, int TILES>
__device__ __forceinline__ void load(Granule<FORMAT, TILES>& to, const U4* data, const float* scale, int tile0, int tiles, int granules, int granule, int lane) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const long at = (long)min(tile0 + i, tiles - 1) * granules + granule;
#pragma unroll
        for (int j = 0; j < 4; ++j) to.w[i].p[j] = stream16(data + at * 128 + j * 32 + lane);
        if (FORMAT == INT4) { to.scale[i][0] = ((const F4*)scale)[at * 16 + (lane >> 2)]; to.scale[i][1] = ((const F4*)scale)[at * 16 + 8 + (lane >> 2)]; }
        if (FORMAT == FP8) to.block_scale[i] = ((const U2*)scale)[at];
    }
}

// Weights do not depend on the kernel before: the first granule is requested before waiting for it.
template <int FORMAT, int NT, int TILES>
__device__ __forceinline__ void sum_columns(Sums<NT, TILES>& s, const Job& job, const U4* data, const float* scale, int tile0, int slice, const Activations<NT>& x, int lane) {
    Granule<FORMAT, TILES> now, next;
    if (slice < job.granules) load<FORMAT, TILES>(next, data, scale, tile0, job.tiles, job.granules, slice, lane);
    WAIT_BEFORE();
    for (int granule = slice; granule < job.granules; granule += job.slices) {
        now = next;
        if (granule + job.slices < job.granules) load<FORMAT, TILES>(next, data, scale, tile0, job.tiles, job.granules, granule + job.slices, lane);
        granule_products<FORMAT, NT, TILES>(s, now.w, now.scale, now.block_scale, x, granule, lane & 3);
    }
}

template <int NT, int GEMV_TILES> __device__ __forceinline__ void gemv_block(const Jobs& jobs) {
    __shared__ float sums[8][GEMV_TILES * 16][8 * NT + 1];
    int index = 0;
    while (index + 1 < jobs.count && (int)blockIdx.x >= jobs.job[index + 1].first_block) ++index;
    const Job& job = jobs.job[index];
    const int teams = 8 / job.slices, per_block = teams * GEMV_TILES, blocks = (job.tiles + per_block - 1) / per_block;
    const int local = blockIdx.x - job.first_block, group = local / blocks, tile_first = (local % blocks) * per_block;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, slice = warp % job.slices, team = warp / job.slices;
    const U4* data = job.data;
    const float* scale = job.scale;
    int start = 0, count = jobs.rows;
    const u16 *x_high = job.x_high, *x_low = job.x_low;
    if (job.table) {
        WAIT_BEFORE();
        if (group >= jobs.groups[0]) return;
        int expert = jobs.groups[4 + 4 * group];
        start = jobs.groups[5 + 4 * group];
        count = jobs.groups[6 + 4 * group];
        data = (const U4*)job.table[expert * 4 + job.which * 2];
        scale = (const float*)job.table[expert * 4 + job.which * 2 + 1];
    } else {
        data += group * job.data_stride;
        scale += group * job.scale_stride;
        x_high += group * job.x_stride;
        x_low += group * job.x_stride;
    }
    Activations<NT> x;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int column = n * 8 + (lane >> 2), r = column >> 1;
        x.at[n] = r < count ? ((column & 1) ? x_low : x_high) + (long)mapped_row(job.x_map, r, start, jobs) * job.ldx : nullptr;
    }
    Sums<NT, GEMV_TILES> s;
    clear(s);
    const int tile0 = tile_first + team * GEMV_TILES;
    if (tile0 >= job.tiles) WAIT_BEFORE();
    else {
        if (HAS(INT4) && job.format == INT4) sum_columns<INT4, NT, GEMV_TILES>(s, job, data, scale, tile0, slice, x, lane);
        else if (HAS(BF16) && job.format == BF16) sum_columns<BF16, NT, GEMV_TILES>(s, job, data, scale, tile0, slice, x, lane);
        else if (HAS(INT8) && job.format == INT8) sum_columns<INT8, NT, GEMV_TILES>(s, job, data, scale, tile0, slice, x, lane);
        else if (HAS(FP8) && job.format == FP8) sum_columns<FP8, NT, GEMV_TILES>(s, job, data, scale, tile0, slice, x, lane);
        else if (HAS(F32)) sum_columns<F32, NT, GEMV_TILES>(s, job, data, scale, tile0, slice, x, lane);
    }
#pragma unroll
    for (int i = 0; i < GEMV_TILES; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            int row = i * 16 + (lane >> 2), column = n * 8 + 2 * (lane & 3);
            sums[warp][row][column] = s.c[i][n][0]; sums[warp][row][column + 1] = s.c[i][n][1];
            sums[warp][row + 8][column] = s.c[i][n][2]; sums[warp][row + 8][column + 1] = s.c[i][n][3];
        }
    __syncthreads();
    const int tall = per_block * 16;
    for (int at = threadIdx.x; at < tall * count; at += blockDim.x) {
        int r = at / tall, row = at % tall, tile = tile_first + (row >> 4), r16 = row & 15;
        if (tile >= job.tiles || (job.out == OUT_SWIGLU && r16 >= 8)) continue;
        int first_warp = row / (16 * GEMV_TILES) * job.slices, inner = row % (16 * GEMV_TILES);
        float value[2] = {0.0f, 0.0f};
        for (int half = 0; half < (job.out == OUT_SWIGLU ? 2 : 1); ++half) {
            float high = 0.0f, low = 0.0f;
            for (int w = 0; w < job.slices; ++w) {
                high += sums[first_warp + w][inner + 8 * half][2 * r];
                low += sums[first_warp + w][inner + 8 * half][2 * r + 1];
            }
            value[half] = high + low;
            if (HAS(INT8) && job.format == INT8) value[half] *= scale[tile * 16 + r16 + 8 * half];
        }
        write_output(job, group, mapped_row(job.y_map, r, start, jobs), tile, r16, value[0], value[1]);
    }
}
#if !defined(ONLY) || ONLY == 4
KERNEL __launch_bounds__(256, 3) gemv_4(const __grid_constant__ Jobs jobs) { gemv_block<1, 1>(jobs); }
#endif
#if !defined(ONLY) || ONLY == 8
KERNEL __launch_bounds__(256, 2) gemv_8(const __grid_constant__ Jobs jobs) { gemv_block<2, 2>(jobs); }
#endif
#if !defined(ONLY) || ONLY == 16
KERNEL __launch_bounds__(256, 1) gemv_16(const __grid_constant__ Jobs jobs) { gemv_block<4, 2>(jobs); }
#endif
