// Products for up to 16 rows; ONLY (4, 8 or 16 rows) picks one kernel, so that they compile side by side.
//
// A block of WARPS warps walks through rounds: `slices` warps share the columns of one or two tiles, WARPS / slices such teams work side by side. All rounds
// of a launch are dealt to the blocks, whatever matrices they belong to. Weights flow through a ring of RING steps a warp in shared memory (a step: half a
// granule of every tile), across rounds and matrices; activations lie in shared memory as the products read them, a run of columns at a time.
// Columns of an n-tile: column 2r is the high part of row r, column 2r + 1 its low part; NT tiles of 4 rows.
#define TEAM_TILES 2
#define STEP_BYTES 2304      // 2 x 1,024 bytes of weights, 256 of scales
#define NEAR_GROUPS 32       // groups of rows a block's rounds can belong to
#define AHEAD_GRANULES 2     // of each tile, asked into L2 before the kernel ahead is over

template <int NT, int TILES> struct RoundSums { float c[TILES][NT][4]; };
struct RowGroup { const U4* data; const float* scale; int start, count; };

// Rounds of this block, in order: a share of those of all whole matrices, then of the experts', whose number is known after the wait only.
struct Walk {
    int job, group, within, left;  // within: round of the group
    bool fresh, experts;
    __device__ __forceinline__ void begin(const Jobs& jobs) {
        const int b = blockIdx.x, first = b * jobs.share + min(b, jobs.rest);
        left = jobs.share + (b < jobs.rest);
        fresh = true;
        experts = false;
        job = group = within = 0;
        if (left == 0) return;
        while (job + 1 < jobs.count && !jobs.job[job + 1].table && first >= jobs.job[job + 1].first_block) ++job;
        place(jobs, first - jobs.job[job].first_block);
    }
    __device__ __forceinline__ void place(const Jobs& jobs, int round) {
        const Job& j = jobs.job[job];
        group = j.by_each ? (int)__umulhi((u32)round, j.by_each) : round;
        within = round - group * j.each;
    }
    __device__ __forceinline__ bool next(const Jobs& jobs, int groups) {  // groups < 0: not known yet; false: no round is left, or known
        if (left == 0) {
            const Job& j = jobs.job[jobs.count - 1];
            if (experts || groups < 0 || !j.table) return false;
            experts = true;
            job = jobs.count - 1;
            const u32 rounds = (u32)groups * j.each, share = rounds / gridDim.x, rest = rounds - share * gridDim.x;
            left = share + (blockIdx.x < rest);
            if (left == 0) return false;
            place(jobs, blockIdx.x * share + min(blockIdx.x, rest));
        } else if (!fresh && ++within == jobs.job[job].each) {
            within = 0;
            if (++group == jobs.job[job].groups && !experts) { group = 0; ++job; }
        }
        fresh = false;
        --left;
        return true;
    }
};

// What this warp reads in a round.
struct WarpPart { int tile, slice, granules; };
template <int WARPS> __device__ __forceinline__ WarpPart part_of(const Job& job, int within, int warp) {
    const int slice = warp & (job.slices - 1), tile = (within * (WARPS >> job.slice_bits) + (warp >> job.slice_bits)) << job.tile_bits;
    const bool busy = tile < job.tiles && slice < job.granules;
    return {tile, slice, busy ? (job.granules - slice + job.slices - 1) >> job.slice_bits : 0};
}

// Keeps a warp's ring full: the steps of all its rounds in the order in which they are used, first and second halves of granules in turn (RING is even).
template <int WARPS, int RING> struct Feeder {
    Walk walk;
    const char *data, *scale;
    int second, left, jump, format, scale_jump;  // bytes to the second tile; granules left; bytes from a granule's second half to the next granule
    SharedAt ring;
    u32 place;  // next step of the ring
    __device__ __forceinline__ void begin(const Jobs& jobs, SharedAt at) { walk.begin(jobs); left = place = 0; ring = at; }
    __device__ __forceinline__ void copy(int lane) {
        const SharedAt to = ring + place * STEP_BYTES, mine = to + lane * 16;
        copy16_at(mine, data); copy16_at(mine + 512, data + 512);
        if (WARPS <= 8 || second) { copy16_at(mine + 1024, data + second); copy16_at(mine + 1536, data + second + 512); }
        if (HAS(INT4) && format == INT4) copy8_at(to + 2048 + lane * 8, scale);
        else if (HAS(FP8) && format == FP8 && lane < 2) copy8_at(to + 2048 + lane * 8, scale);
        place = (place + 1) % RING;
    }
    // The first half of the next granule; false: there is none, or not known yet.
    __device__ __forceinline__ bool first_half(const Jobs& jobs, int groups, const RowGroup* near, int near_first, int warp, int lane) {
        while (left == 0) {
            if (!walk.next(jobs, groups)) { copies_commit(); return false; }
            const Job& job = jobs.job[walk.job];
            const WarpPart part = part_of<WARPS>(job, walk.within, warp);
            const RowGroup& of = near[walk.group - near_first];
            const U4* d = walk.experts ? of.data : job.data + walk.group * job.data_stride;
            const float* s = walk.experts ? of.scale : job.scale + walk.group * job.scale_stride;
            const bool two = job.tile_bits && part.tile + 1 < job.tiles;
            const long first = (long)part.tile * job.granules + part.slice;
            format = job.format;
            left = part.granules;
            jump = 2048 * job.slices - 1024;
            data = (const char*)(d + first * 128 + lane);
            second = two ? job.granules * 2048 : 0;
            if (HAS(INT4) && format == INT4) {
                scale = (const char*)(s + (first + (two && lane >> 4 ? job.granules : 0)) * 64 + (lane & 15) * 4);
                scale_jump = 256 * job.slices - 8;
            } else if (HAS(FP8) && format == FP8) {
                scale = (const char*)(s + (first + (two && lane ? job.granules : 0)) * 2);
                scale_jump = 8 * job.slices;
            }
        }
        copy(lane);
        copies_commit();
        data += 1024;
        if (HAS(INT4) && format == INT4) scale += 8;
        return true;
    }
    __device__ __forceinline__ void second_half(int lane) {
        if (left) {
            copy(lane);
            data += jump;
            if (HAS(INT4) || HAS(FP8)) scale += scale_jump;
            --left;
        }
        copies_commit();
    }
};

// This lane's columns of the activations in shared memory: [unit of 32 columns][column of the n-tiles][64 bytes]; lanes without a row read zeros.
template <int NT> struct Activations {
    SharedAt at[NT];
    u32 stride[NT];
    __device__ __forceinline__ U4 unit(int n, int u) const { return load16_at(at[n] + u * stride[n]); }
};

template <int NT> __device__ __forceinline__ void unit_products(float (*c)[4], const u32 (*a)[4], const U4* x) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        mma(c[n], a[0], x[n].x, x[n].y);
        mma(c[n], a[1], x[n].z, x[n].w);
    }
}
template <int NT> __device__ __forceinline__ void add_scaled(float (*c)[4], const float (*part)[4], float top, float bottom) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        c[n][0] += top * part[n][0]; c[n][1] += top * part[n][1];
        c[n][2] += bottom * part[n][2]; c[n][3] += bottom * part[n][3];
    }
}

template <int TILES> struct Step { U4 top[TILES], bottom[TILES]; };
template <int TILES> __device__ __forceinline__ Step<TILES> load_step(SharedAt at, int lane) {
    Step<TILES> w;
#pragma unroll
    for (int i = 0; i < TILES; ++i) { w.top[i] = load16_at(at + 1024 * i + 16 * lane); w.bottom[i] = load16_at(at + 1024 * i + 512 + 16 * lane); }
    return w;
}

// One step: half a granule of TILES tiles; unit = its first unit of columns, counted from the first in shared memory.
template <int FORMAT, int NT, int TILES> __device__ __forceinline__ void step_products(RoundSums<NT, TILES>& s, const Step<TILES>& w, SharedAt step, const Activations<NT>& x, int unit, int half, int lane) {
    constexpr int UNITS = FORMAT == INT4 ? 4 : FORMAT == INT8 || FORMAT == FP8 ? 2 : 1;
    U4 xv[NT];
    u32 a[2][4];
    float part[TILES][NT][4];
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
        for (int n = 0; n < NT; ++n) xv[n] = x.unit(n, unit + u);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const U4 &p = w.top[i], &q = w.bottom[i];
            if (FORMAT == INT4) {
                int4_unit(u == 0 ? p.x : u == 1 ? p.y : u == 2 ? p.z : p.w, u == 0 ? q.x : u == 1 ? q.y : u == 2 ? q.z : q.w, a);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    if (u & 1) mma(part[i][n], a[0], xv[n].x, xv[n].y);
                    else mma_first(part[i][n], a[0], xv[n].x, xv[n].y);
                    mma(part[i][n], a[1], xv[n].z, xv[n].w);
                }
                if (u & 1) {
                    const U2 above = load8_at(step + 2048 + 128 * i + 8 * (lane >> 2)), below = load8_at(step + 2048 + 128 * i + 64 + 8 * (lane >> 2));
                    add_scaled<NT>(s.c[i], part[i], __uint_as_float(u == 1 ? above.x : above.y), __uint_as_float(u == 1 ? below.x : below.y));
                }
            } else if (FORMAT == INT8) {
                if (u & 1) byte_unit<INT8>(p.z, p.w, q.z, q.w, a);
                else byte_unit<INT8>(p.x, p.y, q.x, q.y, a);
                unit_products<NT>(s.c[i], a, xv);
            } else if (FORMAT == FP8) {
                if (u & 1) byte_unit<FP8>(p.z, p.w, q.z, q.w, a);
                else byte_unit<FP8>(p.x, p.y, q.x, q.y, a);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    if (u & 1) mma(part[i][n], a[0], xv[n].x, xv[n].y);
                    else mma_first(part[i][n], a[0], xv[n].x, xv[n].y);
                    mma(part[i][n], a[1], xv[n].z, xv[n].w);
                }
                if (u & 1) {
                    const U2 by = load8_at(step + 2048 + 8 * i);
                    add_scaled<NT>(s.c[i], part[i], __uint_as_float(by.x), __uint_as_float(by.y));
                }
            } else if (FORMAT == BF16) {
                bf16_unit(p, q, a);
                unit_products<NT>(s.c[i], a, xv);
            } else {  // a step has half of the lane's columns of a unit
                u32 low[4];
                f32_step(p, q, a[0], low);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    mma(s.c[i][n], a[0], half ? xv[n].z : xv[n].x, half ? xv[n].w : xv[n].y);
                    mma(s.c[i][n], low, half ? xv[n].z : xv[n].x, half ? xv[n].w : xv[n].y);
                }
            }
        }
    }
}

struct GemvRoom { SharedAt ring; float* sums; U4* zeros; U4* x; int bytes; int* rows; };  // bytes: of x
struct Loaded { const u16* from; int map, start, count, units; };                  // whose activations lie in shared memory, all columns of them

// Columns of the activations of a group, high and low parts, into shared memory. By all threads.
template <int WARPS> __device__ __forceinline__ void load_activations(const GemvRoom& room, const Jobs& jobs, const Job& job, const u16* high, const u16* low, int start, int count, int unit0, int units) {
    const int columns = 2 * count, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    __syncthreads();  // nobody reads what lay there
    if ((int)threadIdx.x < count) room.rows[threadIdx.x] = mapped_row(job.x_map, threadIdx.x, start, jobs);
    __syncthreads();
    for (int part = warp; part < columns * ((units + 7) / 8); part += WARPS) {
        const int c = part % columns, u = part / columns * 8 + (lane >> 2);
        const u16* from = (c & 1 ? low : high) + (long)room.rows[c >> 1] * job.ldx + (unit0 + u) * 32;
        if (u < units) copy16_async(room.x + (u * columns + c) * 4 + (lane & 3), (const U4*)from + (lane & 3), true);
    }
    copies_commit();
    copies_wait<0>();
    __syncthreads();
}

__device__ __forceinline__ void write_value(const Jobs& jobs, const Job& job, const float* scale, int group, int start, int r, int tile, int r16, float value, float partner) {
    if (tile >= job.tiles) return;
    if (job.format == INT8) {
        value *= scale[tile * 16 + r16];
        if (job.out == OUT_SWIGLU) partner *= scale[tile * 16 + r16 + 8];
    }
    write_output(job, group, mapped_row(job.y_map, r, start, jobs), tile, r16, value, partner);
}

// A round of `count` rows: the steps of this warp, then the sums of the slices put together in order.
template <int FORMAT, int NT, int TILES, int WARPS, int RING>
__device__ __forceinline__ void one_round(const Jobs& jobs, int groups, const RowGroup* near, int near_first, const Walk& walk, Feeder<WARPS, RING>& feeder, u32& place, Loaded& loaded, const GemvRoom& room) {
    constexpr int UNITS = FORMAT == INT4 ? 8 : FORMAT == INT8 || FORMAT == FP8 ? 4 : FORMAT == BF16 ? 2 : 1;  // of a granule
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, group = walk.group;
    const Job& job = jobs.job[walk.job];
    const WarpPart part = part_of<WARPS>(job, walk.within, warp);
    const RowGroup& of = near[group - near_first];
    const bool expert = walk.experts;
    const int start = expert ? of.start : 0, count = expert ? of.count : jobs.rows;
    const u16 *high = job.x_high + (expert ? 0 : group * job.x_stride), *low = job.x_low + (expert ? 0 : group * job.x_stride);
    const int fit = room.bytes / (128 * UNITS), together = fit >= count * job.granules ? job.granules : max(1, fit / count);  // granules whose columns fit in
    Activations<NT> x;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const bool there = n * 8 + g < 2 * count;
        x.at[n] = there ? shared_at(room.x + (n * 8 + g) * 4 + t) : shared_at(room.zeros);
        x.stride[n] = there ? 128 * count : 0;
    }
    RoundSums<NT, TILES> s;
#pragma unroll
    for (int i = 0; i < TILES * NT * 4; ++i) s.c[i / (NT * 4)][i / 4 % NT][i % 4] = 0.0f;
    const int granules = job.granules, slices = job.slices, end = part.granules ? granules : 0;
    int granule = part.slice;
    for (int first = 0; first < granules; first += together) {
        const int units = min(together, granules - first) * UNITS;
        const bool whole = together == granules;
        if (!whole || loaded.from != high || loaded.map != job.x_map || loaded.start != start || loaded.count != count || loaded.units != units) {
            load_activations<WARPS>(room, jobs, job, high, low, start, count, first * UNITS, units);
            loaded = {whole ? high : nullptr, job.x_map, start, count, units};
        }
        const int stop = min(end, first + together);
#pragma unroll 1
        for (; granule < stop; granule += slices)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                copies_wait<RING - 2>();
                __syncwarp();  // this step is there for all lanes, and all are done with the one before, whose place the next one takes
                const SharedAt step = room.ring + place * STEP_BYTES;
                const Step<TILES> w = load_step<TILES>(step, lane);  // in front of the copies in the queue
                if (half) feeder.first_half(jobs, groups, near, near_first, warp, lane);
                else feeder.second_half(lane);
                step_products<FORMAT, NT, TILES>(s, w, step, x, (granule - first) * UNITS + half * UNITS / 2, half, lane);
                place = (place + 1) % RING;
            }
    }
    const float* scale = expert ? of.scale : job.scale + group * job.scale_stride;
    if (job.slices == 1) {
        if (part.granules)
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const int r = 4 * n + t;
                    const float above = s.c[i][n][0] + s.c[i][n][1], below = s.c[i][n][2] + s.c[i][n][3];
                    if (r >= count) continue;
                    write_value(jobs, job, scale, group, start, r, part.tile + i, g, above, below);
                    if (job.out != OUT_SWIGLU) write_value(jobs, job, scale, group, start, r, part.tile + i, g + 8, below, 0.0f);
                }
        return;
    }
    __syncthreads();  // the sums of the round before are read
    float* mine = room.sums + warp * TILES * 16 * 4 * NT;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            mine[(i * 16 + g) * 4 * NT + 4 * n + t] = s.c[i][n][0] + s.c[i][n][1];
            mine[(i * 16 + g + 8) * 4 * NT + 4 * n + t] = s.c[i][n][2] + s.c[i][n][3];
        }
    __syncthreads();
    constexpr int ROW_BITS = TILES == 2 ? 5 : 4;  // rows of a team
    const int teams = WARPS >> job.slice_bits, tile0 = walk.within * teams * TILES, tall_bits = (WARPS == 16 ? 4 : 3) - job.slice_bits + ROW_BITS;  // of all teams
    for (int i = threadIdx.x; i < count << tall_bits; i += 32 * WARPS) {
        const int r = i >> tall_bits, row = i & ((1 << tall_bits) - 1), r16 = row & 15;
        if (job.out == OUT_SWIGLU && r16 >= 8) continue;
        const float* from = room.sums + ((row >> ROW_BITS << job.slice_bits + ROW_BITS) + (row & TILES * 16 - 1)) * 4 * NT + r;
        float value = 0.0f, partner = 0.0f;
        for (int w = 0; w < job.slices; ++w) {
            value += from[w * TILES * 16 * 4 * NT];
            if (job.out == OUT_SWIGLU) partner += from[w * TILES * 16 * 4 * NT + 8 * 4 * NT];
        }
        write_value(jobs, job, scale, group, start, r, tile0 + (row >> 4), r16, value, partner);
    }
}

template <int NT, int TILES, int WARPS, int RING>
__device__ __forceinline__ void round_of_format(const Jobs& jobs, int groups, const RowGroup* near, int near_first, const Walk& walk, Feeder<WARPS, RING>& feeder, u32& place, Loaded& loaded,
                                                const GemvRoom& room) {
    const int format = jobs.job[walk.job].format;
    if (HAS(INT4) && format == INT4) one_round<INT4, NT, TILES>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
    else if (HAS(BF16) && format == BF16) one_round<BF16, NT, TILES>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
    else if (HAS(INT8) && format == INT8) one_round<INT8, NT, TILES>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
    else if (HAS(FP8) && format == FP8) one_round<FP8, NT, TILES>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
    else if (HAS(F32)) one_round<F32, NT, TILES>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
}

template <int NT, int WARPS, int RING> __device__ __forceinline__ void gemv_block(const Jobs& jobs) {
    DYNAMIC_SHARED(char, memory);
    __shared__ RowGroup near[NEAR_GROUPS];
    __shared__ int rows[MAX_ROWS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    char *sums = memory + WARPS * RING * STEP_BYTES, *after = sums + 4 * WARPS * TEAM_TILES * 16 * 4 * NT;
    const GemvRoom room = {shared_at(memory + warp * RING * STEP_BYTES), (float*)sums, (U4*)after, (U4*)(after + 128), jobs.x_bytes, rows};
    if (threadIdx.x == 0) *room.zeros = U4{0, 0, 0, 0};
    // Weights do not depend on the kernel before: the ring is filled, and some more asked for, before waiting for it.
    Feeder<WARPS, RING> feeder;
    feeder.begin(jobs, room.ring);
    int primed = 0;
    auto prime = [&](int groups, int near_first) {  // RING - 1 steps, as far as they are known
#pragma unroll 1
        for (; primed < RING - 1; ++primed) {
            if (primed & 1) feeder.second_half(lane);
            else if (!feeder.first_half(jobs, groups, near, near_first, warp, lane)) return;
        }
    };
    if (!jobs.job[0].table) {
        prime(-1, 0);
        if (lane < TEAM_TILES && primed == RING - 1)
            for (int i = 0; i < AHEAD_GRANULES && i + 1 < feeder.left; ++i)
                ask_into_l2(feeder.data - lane * 16 + (lane ? feeder.second : 0) + feeder.jump + i * (feeder.jump + 1024), 2048);
    }
    WAIT_BEFORE();
    int groups = -1, near_first = 0;
    const Job& final_job = jobs.job[jobs.count - 1];
    if (final_job.table) {
        groups = jobs.groups[0];
        Walk walk;
        walk.left = 0;
        walk.fresh = walk.experts = false;
        if (walk.next(jobs, groups)) {
            near_first = walk.group;
            const int group = near_first + threadIdx.x;
            if ((int)threadIdx.x < NEAR_GROUPS && group < groups) {
                const int* of = jobs.groups + 4 + 4 * group;
                near[threadIdx.x] = {(const U4*)final_job.table[of[0] * 4 + final_job.which * 2], (const float*)final_job.table[of[0] * 4 + final_job.which * 2 + 1], of[1], of[2]};
            }
        }
    }
    __syncthreads();
    prime(groups, near_first);
    Walk walk;
    walk.begin(jobs);
    u32 place = 0;
    Loaded loaded = {nullptr, 0, 0, 0, 0};
#pragma unroll 1
    while (walk.next(jobs, groups)) {
        const int count = walk.experts ? near[walk.group - near_first].count : jobs.rows;
        if (WARPS > 8 && !jobs.job[walk.job].tile_bits) round_of_format<NT, 1>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
        else if (NT > 1 && count <= 4) round_of_format<1, 2>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
        else if (NT > 2 && count <= 8) round_of_format<2, 2>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
        else round_of_format<NT, 2>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
    }
    copies_wait<0>();
}
#if !defined(ONLY) || ONLY == 4
KERNEL __launch_bounds__(256, 2) gemv_4(const __grid_constant__ Jobs jobs) { gemv_block<1, 8, 4>(jobs); }
#endif
#if !defined(ONLY) || ONLY == 8
KERNEL __launch_bounds__(512, 1) gemv_8(const __grid_constant__ Jobs jobs) { gemv_block<2, 16, 2>(jobs); }
#endif
#if !defined(ONLY) || ONLY == 16
KERNEL __launch_bounds__(256, 1) gemv_16(const __grid_constant__ Jobs jobs) { gemv_block<4, 8, 4>(jobs); }
#endif
