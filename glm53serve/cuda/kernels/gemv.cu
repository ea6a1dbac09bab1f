// Products for up to 16 rows; ONLY (4, 8 or 16 rows) picks one kernel, so that they compile side by side.
//
// A block of eight warps walks through rounds: `slices` warps share the columns of TEAM_TILES tiles, 8 / slices such teams work side by side. All rounds of a
// launch are dealt to the blocks, whatever matrices they belong to. Weights flow through a ring of RING_STEPS steps a warp in shared memory (a step: half a
// granule of every tile), across rounds and matrices: a step is in registers before its place is asked for again, so that RING_STEPS of them are under way.
// Activations lie in shared memory as the products read them, a run of columns at a time.
// Columns of an n-tile: column 2r is the high part of row r, column 2r + 1 its low part; NT tiles of 4 rows.
#define TEAM_TILES 2
#define RING_STEPS 4         // even
#define GEMV_WARPS 8
#define RING_BYTES (GEMV_WARPS * RING_STEPS * STEP_BYTES)
#define STEP_BYTES 2304      // 2 x 1,024 bytes of weights, 256 of scales
#define NEAR_GROUPS (32 * NT) // groups of rows a block's rounds can belong to

template <int NT> struct RoundSums { float c[TEAM_TILES][NT][4]; };
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
__device__ __forceinline__ WarpPart part_of(const Job& job, int within, int warp) {
    const int slice = warp & (job.slices - 1), tile = ((within << 3 >> job.slice_bits) + (warp >> job.slice_bits)) * TEAM_TILES;
    const bool busy = tile < job.tiles && slice < job.granules;
    return {tile, slice, busy ? (job.granules - slice + job.slices - 1) >> job.slice_bits : 0};
}

// Keeps a warp's ring full: the steps of all its rounds in the order in which they are used, first and second halves of granules in turn.
struct Feeder {
    Walk walk;
    const char *data, *scale;
    int second, left, jump, format, scale_jump;  // bytes to the second tile; granules left; bytes from a granule's second half to the next granule
    SharedAt ring;
    u32 place;  // next step of the ring
    __device__ __forceinline__ void begin(const Jobs& jobs, SharedAt at) { walk.begin(jobs); left = place = 0; ring = at; }
    __device__ __forceinline__ void copy(int lane) {
        const SharedAt to = ring + place * STEP_BYTES, mine = to + lane * 16;
        copy16_at(mine, data); copy16_at(mine + 512, data + 512);
        copy16_at(mine + 1024, data + second); copy16_at(mine + 1536, data + second + 512);
        if (HAS(INT4) && format == INT4) copy8_at(to + 2048 + lane * 8, scale);
        else if (HAS(FP8) && format == FP8 && lane < 2) copy8_at(to + 2048 + lane * 8, scale);
        place = (place + 1) % RING_STEPS;
    }
    // The first half of the next granule; false: there is none, or not known yet.
    __device__ __forceinline__ bool first_half(const Jobs& jobs, int groups, const RowGroup* near, int near_first, int warp, int lane) {
        while (left == 0) {
            if (!walk.next(jobs, groups)) { copies_commit(); return false; }
            const Job& job = jobs.job[walk.job];
            const WarpPart part = part_of(job, walk.within, warp);
            const RowGroup& of = near[walk.group - near_first];
            const U4* d = walk.experts ? of.data : job.data + walk.group * job.data_stride;
            const float* s = walk.experts ? of.scale : job.scale + walk.group * job.scale_stride;
            const bool two = part.tile + 1 < job.tiles;
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

// This lane's columns of the activations in shared memory, [column of the n-tiles][units of 32 columns, an odd number][64 bytes], so that neighbouring columns
// lie in other banks; lanes without a row read zeros.
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

// A step in registers: a kilobyte of weights of each tile, and the scales of its rows g and g + 8.
struct Step { U4 top[TEAM_TILES], bottom[TEAM_TILES]; U2 above[TEAM_TILES], below[TEAM_TILES]; };
template <int FORMAT> __device__ __forceinline__ Step load_step(SharedAt at, int lane) {
    Step w;
#pragma unroll
    for (int i = 0; i < TEAM_TILES; ++i) {
        w.top[i] = load16_at(at + 1024 * i + 16 * lane);
        w.bottom[i] = load16_at(at + 1024 * i + 512 + 16 * lane);
        if (FORMAT == INT4) {
            w.above[i] = load8_at(at + 2048 + 128 * i + 8 * (lane >> 2));
            w.below[i] = load8_at(at + 2048 + 128 * i + 64 + 8 * (lane >> 2));
        } else if (FORMAT == FP8) w.above[i] = load8_at(at + 2048 + 8 * i);  // .x of the row above, .y of the one below
    }
    return w;
}

// One step: half a granule of TEAM_TILES tiles; unit = its first unit of columns, counted from the first in shared memory.
template <int FORMAT, int NT> __device__ __forceinline__ void step_products(RoundSums<NT>& s, const Step& w, const Activations<NT>& x, int unit, int half) {
    constexpr int UNITS = FORMAT == INT4 ? 4 : FORMAT == INT8 || FORMAT == FP8 ? 2 : 1;
    U4 xv[NT];
    u32 a[2][4];
    float part[TEAM_TILES][NT][4];
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
        for (int n = 0; n < NT; ++n) xv[n] = x.unit(n, unit + u);
#pragma unroll
        for (int i = 0; i < TEAM_TILES; ++i) {
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
                    const U2 &above = w.above[i], &below = w.below[i];
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
                if (u & 1) add_scaled<NT>(s.c[i], part[i], __uint_as_float(w.above[i].x), __uint_as_float(w.above[i].y));
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

struct GemvRoom { SharedAt ring; float* sums; U4* zeros; char* x; int bytes; u64* arrived; };      // bytes: of x, but for the odd units
struct Loaded { const u16* from; int map, start, count, units; u32 times; };                       // whose activations lie in shared memory, all columns of them

// Columns of the activations of a group, high and low parts, into shared memory, by the copy engine: the copies of weights under way are not waited for.
// By all threads; `times`: loads before this one.
__device__ __forceinline__ void load_activations(const GemvRoom& room, const Jobs& jobs, const Job& job, const u16* high, const u16* low, int start, int count, int unit0, int units, u32 times) {
    __syncthreads();  // nobody reads what lay there
    if (threadIdx.x < 32) {
        const int c = threadIdx.x;
        if (c == 0) barrier_expect(room.arrived, 2 * count * units * 64);
        __syncwarp();
        if (c < 2 * count) {
            const u16* from = (c & 1 ? low : high) + (long)mapped_row(job.x_map, c >> 1, start, jobs) * job.ldx + unit0 * 32;
            bulk_copy(room.x + c * (units | 1) * 64, from, units * 64, room.arrived);
        }
    }
    barrier_wait(room.arrived, times & 1);
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
template <int FORMAT, int NT>
__device__ __forceinline__ void one_round(const Jobs& jobs, int groups, const RowGroup* near, int near_first, const Walk& walk, Feeder& feeder, u32& place, Loaded& loaded, const GemvRoom& room) {
    constexpr int UNITS = FORMAT == INT4 ? 8 : FORMAT == INT8 || FORMAT == FP8 ? 4 : FORMAT == BF16 ? 2 : 1;  // of a granule
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, group = walk.group;
    const Job& job = jobs.job[walk.job];
    const WarpPart part = part_of(job, walk.within, warp);
    const RowGroup& of = near[group - near_first];
    const bool expert = walk.experts;
    const int start = expert ? of.start : 0, count = expert ? of.count : jobs.rows;
    const u16 *high = job.x_high + (expert ? 0 : group * job.x_stride), *low = job.x_low + (expert ? 0 : group * job.x_stride);
    const int fit = room.bytes / (128 * UNITS), together = fit >= count * job.granules ? job.granules : max(1, fit / count);  // granules whose columns fit in
    Activations<NT> x;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const bool there = n * 8 + g < 2 * count;
        x.at[n] = shared_at(room.zeros);
        x.stride[n] = there ? 64 : 0;
    }
    RoundSums<NT> s;
#pragma unroll
    for (int i = 0; i < TEAM_TILES * NT * 4; ++i) s.c[i / (NT * 4)][i / 4 % NT][i % 4] = 0.0f;
    const int granules = job.granules, slices = job.slices, end = part.granules ? granules : 0;
    int granule = part.slice;
    for (int first = 0; first < granules; first += together) {
        const int units = min(together, granules - first) * UNITS;
        const bool whole = together == granules;
        if (!whole || loaded.from != high || loaded.map != job.x_map || loaded.start != start || loaded.count != count || loaded.units != units) {
            load_activations(room, jobs, job, high, low, start, count, first * UNITS, units, loaded.times);
            loaded = {whole ? high : nullptr, job.x_map, start, count, units, loaded.times + 1};
        }
#pragma unroll
        for (int n = 0; n < NT; ++n)
            if (x.stride[n]) x.at[n] = shared_at(room.x + (n * 8 + g) * (units | 1) * 64 + t * 16);
        const int stop = min(end, first + together);
#pragma unroll 1
        for (; granule < stop; granule += slices)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                copies_wait<RING_STEPS - 1>();
                __syncwarp();  // this step is there for all lanes
                const Step w = load_step<FORMAT>(room.ring + place * STEP_BYTES, lane);
                __syncwarp();  // all have read it: its place takes the step RING_STEPS later
                place = (place + 1) % RING_STEPS;
                if (half) feeder.second_half(lane);
                else feeder.first_half(jobs, groups, near, near_first, warp, lane);
                step_products<FORMAT, NT>(s, w, x, (granule - first) * UNITS + half * UNITS / 2, half);
            }
    }
    const float* scale = expert ? of.scale : job.scale + group * job.scale_stride;
    if (job.slices == 1) {
        if (part.granules)
#pragma unroll
            for (int i = 0; i < TEAM_TILES; ++i)
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
    float* mine = room.sums + warp * TEAM_TILES * 16 * 4 * NT;
#pragma unroll
    for (int i = 0; i < TEAM_TILES; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            mine[(i * 16 + g) * 4 * NT + 4 * n + t] = s.c[i][n][0] + s.c[i][n][1];
            mine[(i * 16 + g + 8) * 4 * NT + 4 * n + t] = s.c[i][n][2] + s.c[i][n][3];
        }
    __syncthreads();
    const int tall_bits = 3 - job.slice_bits + 5, tile0 = (walk.within << 3 >> job.slice_bits) * TEAM_TILES;  // rows of all teams: 1 << tall_bits
    for (int i = threadIdx.x; i < count << tall_bits; i += 32 * GEMV_WARPS) {
        const int r = i >> tall_bits, row = i & ((1 << tall_bits) - 1), r16 = row & 15;
        if (job.out == OUT_SWIGLU && r16 >= 8) continue;
        const float* from = room.sums + ((row >> 5 << job.slice_bits + 5) + (row & 31)) * 4 * NT + r;
        float value = 0.0f, partner = 0.0f;
        for (int w = 0; w < job.slices; ++w) {
            value += from[w * TEAM_TILES * 16 * 4 * NT];
            if (job.out == OUT_SWIGLU) partner += from[w * TEAM_TILES * 16 * 4 * NT + 8 * 4 * NT];
        }
        write_value(jobs, job, scale, group, start, r, tile0 + (row >> 4), r16, value, partner);
    }
}

template <int NT>
__device__ __forceinline__ void round_of_format(const Jobs& jobs, int groups, const RowGroup* near, int near_first, const Walk& walk, Feeder& feeder, u32& place, Loaded& loaded,
                                                const GemvRoom& room) {
    const int format = jobs.job[walk.job].format;
    if (HAS(INT4) && format == INT4) one_round<INT4, NT>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
    else if (HAS(BF16) && format == BF16) one_round<BF16, NT>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
    else if (HAS(INT8) && format == INT8) one_round<INT8, NT>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
    else if (HAS(FP8) && format == FP8) one_round<FP8, NT>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
    else if (HAS(F32)) one_round<F32, NT>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
}

template <int NT> __device__ __forceinline__ void gemv_block(const Jobs& jobs) {
    DYNAMIC_SHARED(char, memory);
    __shared__ RowGroup near[NEAR_GROUPS];
    __shared__ __align__(8) u64 arrived;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    char *sums = memory + RING_BYTES, *after = sums + 4 * GEMV_WARPS * TEAM_TILES * 16 * 4 * NT;
    const GemvRoom room = {shared_at(memory + warp * RING_STEPS * STEP_BYTES), (float*)sums, (U4*)after, after + 128, jobs.x_bytes, &arrived};
    if (threadIdx.x == 0) {
        *room.zeros = U4{0, 0, 0, 0};
        barrier_init(&arrived, 1);
        barriers_ready();
    }
    // Weights do not depend on the kernel before: the ring is filled before waiting for it. (More of them in L2 would come at the cost of what it still reads.)
    Feeder feeder;
    feeder.begin(jobs, room.ring);
    int primed = 0;
    auto prime = [&](int groups, int near_first) {  // RING_STEPS steps, as far as they are known
#pragma unroll 1
        for (; primed < RING_STEPS; ++primed) {
            if (primed & 1) feeder.second_half(lane);
            else if (!feeder.first_half(jobs, groups, near, near_first, warp, lane)) return;
        }
    };
    if (!jobs.job[0].table) prime(-1, 0);
    WAIT_BEFORE();
    int groups = -1, near_first = 0;
    const Job& final_job = jobs.job[jobs.count - 1];
    if (final_job.table) {
        // Where all groups there can be fit, their places are read at once with their number; what lies beyond it is of older steps, and not used.
        groups = jobs.groups[0];
        int most = jobs.rows * jobs.top_k;
        if (most > NEAR_GROUPS) {
            Walk walk;
            walk.left = 0;
            walk.fresh = walk.experts = false;
            if (walk.next(jobs, groups)) near_first = walk.group;
            most = groups;
        }
        const int group = near_first + threadIdx.x;
        if ((int)threadIdx.x < NEAR_GROUPS && group < most) {
            const int* of = jobs.groups + 4 + 4 * group;
            near[threadIdx.x] = {(const U4*)final_job.table[of[0] * 4 + final_job.which * 2], (const float*)final_job.table[of[0] * 4 + final_job.which * 2 + 1], of[1], of[2]};
        }
    }
    __syncthreads();
    prime(groups, near_first);
    for (; primed < RING_STEPS; ++primed) copies_commit();  // what is waited for is all but the last groups: a full ring of them also behind fewer steps
    Walk walk;
    walk.begin(jobs);
    u32 place = 0;
    Loaded loaded = {nullptr, 0, 0, 0, 0, 0};
#pragma unroll 1
    while (walk.next(jobs, groups)) {
        const int count = walk.experts ? near[walk.group - near_first].count : jobs.rows;
        if (NT > 1 && count <= 4) round_of_format<1>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
        else if (NT > 2 && count <= 8) round_of_format<2>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
        else round_of_format<NT>(jobs, groups, near, near_first, walk, feeder, place, loaded, room);
    }
    copies_wait<0>();
}
#if !defined(ONLY) || ONLY == 4
KERNEL __launch_bounds__(256, 2) gemv_4(const __grid_constant__ Jobs jobs) { gemv_block<1>(jobs); }
#endif
#if !defined(ONLY) || ONLY == 8
KERNEL __launch_bounds__(256, 1) gemv_8(const __grid_constant__ Jobs jobs) { gemv_block<2>(jobs); }
#endif
#if !defined(ONLY) || ONLY == 16
KERNEL __launch_bounds__(256, 1) gemv_16(const __grid_constant__ Jobs jobs) { gemv_block<4>(jobs); }
#endif
