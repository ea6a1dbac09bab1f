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

// A block's place: `teams` teams of `slices` warps; a team does TILES tiles at a time, `repeat` times, the block's tiles side by side each time.
struct Team { const U4* data; const float* scale; int tile_first, slice, team, teams, group, start, count; };

// Sums of the slices put together in order and written; tiles tile0 .. of this round.
template <int NT, int TILES>
__device__ __forceinline__ void finish_round(const Jobs& jobs, const Job& job, const Team& at, int tile0, float (*sums)[TILES * 16][8 * NT + 1]) {
    const int tall = at.teams * TILES * 16;
    for (int i = threadIdx.x; i < tall * at.count; i += 256) {
        const int r = i / tall, row = i % tall, tile = tile0 + (row >> 4), r16 = row & 15;
        if (tile >= job.tiles || (job.out == OUT_SWIGLU && r16 >= 8)) continue;
        const int first_warp = row / (16 * TILES) * job.slices, inner = row % (16 * TILES);
        float value[2] = {0.0f, 0.0f};
        for (int half = 0; half < (job.out == OUT_SWIGLU ? 2 : 1); ++half) {
            float high = 0.0f, low = 0.0f;
            for (int w = 0; w < job.slices; ++w) {
                high += sums[first_warp + w][inner + 8 * half][2 * r];
                low += sums[first_warp + w][inner + 8 * half][2 * r + 1];
            }
            value[half] = high + low;
            if (job.format == INT8) value[half] *= at.scale[tile * 16 + r16 + 8 * half];
        }
        write_output(job, at.group, mapped_row(job.y_map, r, at.start, jobs), tile, r16, value[0], value[1]);
    }
}

// Weights do not depend on the kernel before: the first granule is requested before waiting for it, and the next round's while a round ends.
template <int FORMAT, int NT, int TILES>
__device__ __forceinline__ void all_rounds(const Jobs& jobs, const Job& job, const Team& at, const Activations<NT>& x, int lane, float (*sums)[8][TILES * 16][8 * NT + 1]) {
    const int side = at.teams * TILES, warp = threadIdx.x >> 5;
    const int mine = at.tile_first + at.team * TILES, last = min(at.tile_first + side * job.repeat, job.tiles);
    Granule<FORMAT, TILES> now, next;
    const bool busy = at.slice < job.granules;
    if (busy && mine < last) load<FORMAT, TILES>(next, at.data, at.scale, mine, job.tiles, job.granules, at.slice, lane);
    WAIT_BEFORE();
    int round = 0;
    for (int tile0 = at.tile_first; tile0 < last; tile0 += side, ++round) {
        const int tile = tile0 + at.team * TILES;
        Sums<NT, TILES> s;
        clear(s);
        if (busy && tile < last)
            for (int granule = at.slice; granule < job.granules; granule += job.slices) {
                now = next;
                const bool more = granule + job.slices < job.granules;
                if (more || tile + side < last)
                    load<FORMAT, TILES>(next, at.data, at.scale, more ? tile : tile + side, job.tiles, job.granules, more ? granule + job.slices : at.slice, lane);
                granule_products<FORMAT, NT, TILES>(s, now.w, now.scale, now.block_scale, x, granule, lane & 3);
            }
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const int row = i * 16 + (lane >> 2), column = n * 8 + 2 * (lane & 3);
                float(*to)[8 * NT + 1] = sums[round & 1][warp];
                to[row][column] = s.c[i][n][0]; to[row][column + 1] = s.c[i][n][1];
                to[row + 8][column] = s.c[i][n][2]; to[row + 8][column + 1] = s.c[i][n][3];
            }
        __syncthreads();
        finish_round<NT, TILES>(jobs, job, at, tile0, sums[round & 1]);
    }
}

template <int NT, int TILES> __device__ __forceinline__ void gemv_block(const Jobs& jobs) {
    __shared__ float sums[2][8][TILES * 16][8 * NT + 1];
    int index = 0;
    while (index + 1 < jobs.count && (int)blockIdx.x >= jobs.job[index + 1].first_block) ++index;
    const Job& job = jobs.job[index];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Team at;
    at.teams = 8 / job.slices;
    const int per_block = at.teams * TILES * job.repeat, blocks = (job.tiles + per_block - 1) / per_block, local = blockIdx.x - job.first_block;
    at.group = local / blocks;
    at.tile_first = (local % blocks) * per_block;
    at.slice = warp % job.slices;
    at.team = warp / job.slices;
    const u16 *x_high = job.x_high, *x_low = job.x_low;
    if (job.table) {
        WAIT_BEFORE();
        if (at.group >= jobs.groups[0]) return;
        const int* group = jobs.groups + 4 + 4 * at.group;
        at.start = group[1];
        at.count = group[2];
        at.data = (const U4*)job.table[group[0] * 4 + job.which * 2];
        at.scale = (const float*)job.table[group[0] * 4 + job.which * 2 + 1];
    } else {
        at.start = 0;
        at.count = jobs.rows;
        at.data = job.data + at.group * job.data_stride;
        at.scale = job.scale + at.group * job.scale_stride;
        x_high += at.group * job.x_stride;
        x_low += at.group * job.x_stride;
    }
    Activations<NT> x;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int column = n * 8 + (lane >> 2), r = column >> 1;
        x.at[n] = r < at.count ? ((column & 1) ? x_low : x_high) + (long)mapped_row(job.x_map, r, at.start, jobs) * job.ldx : nullptr;
    }
    if (HAS(INT4) && job.format == INT4) all_rounds<INT4, NT, TILES>(jobs, job, at, x, lane, sums);
    else if (HAS(BF16) && job.format == BF16) all_rounds<BF16, NT, TILES>(jobs, job, at, x, lane, sums);
    else if (HAS(INT8) && job.format == INT8) all_rounds<INT8, NT, TILES>(jobs, job, at, x, lane, sums);
    else if (HAS(FP8) && job.format == FP8) all_rounds<FP8, NT, TILES>(jobs, job, at, x, lane, sums);
    else if (HAS(F32)) all_rounds<F32, NT, TILES>(jobs, job, at, x, lane, sums);
}
#if !defined(ONLY) || ONLY == 4
KERNEL __launch_bounds__(256, 3) gemv_4(const __grid_constant__ Jobs jobs) { gemv_block<1, 1>(jobs); }
#endif
#if !defined(ONLY) || ONLY == 8
KERNEL __launch_bounds__(256, 2) gemv_8(const __grid_constant__ Jobs jobs) { gemv_block<2, 1>(jobs); }
#endif
#if !defined(ONLY) || ONLY == 16
KERNEL __launch_bounds__(256, 2) gemv_16(const __grid_constant__ Jobs jobs) { gemv_block<4, 1>(jobs); }
#endif
