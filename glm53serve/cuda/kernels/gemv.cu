// Products for up to 16 rows; ONLY (4, 8 or 16 rows) picks one kernel, so that they compile side by side.
//
// A block walks through rounds of 16 / slices tiles: `slices` warps share the columns of a team's tiles, teams work side by side. Eight warps a block with two
// tiles a team, or sixteen with one, where more rows make more to multiply of every weight. All rounds of a launch are dealt to the blocks, whatever matrices
// they belong to. Weights flow through a ring of RING_STEPS steps a warp in shared memory (a step: half a granule of every tile), across rounds and matrices:
// a step is in registers before its place is asked for again, so that RING_STEPS of them are under way.
// Activations lie in shared memory as the products read them, in chunks of columns that the copy engine brings: a warp waits for a chunk when it gets there.
// All chunks stay where there are places for them, else they follow each other through the places.
// No warp waits for the others at the end of a round: the sums of its slices are put together, by all warps, when the next round is done.
// Columns of an n-tile: column 2r is the high part of row r, column 2r + 1 its low part; NT tiles of 4 rows.
#define NEAR_GROUPS (32 * NT) // groups of rows a block's rounds can belong to

template <int NT, int TILES> struct RoundSums { float c[TILES][NT][4]; };

// This lane's columns of a chunk of activations in shared memory, [column of the n-tiles][units of 32 columns, an odd number][64 bytes], so that neighbouring
// columns lie in other banks; lanes without a row read zeros.
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
template <int TILES> struct Step { U4 top[TILES], bottom[TILES]; U2 above[TILES], below[TILES]; };
template <int FORMAT, int TILES> __device__ __forceinline__ Step<TILES> load_step(SharedAt at, int lane) {
    Step<TILES> w;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        w.top[i] = load16_at(at + 1024 * i + 16 * lane);
        w.bottom[i] = load16_at(at + 1024 * i + 512 + 16 * lane);
        const SharedAt scales = at + TILES * 1024;
        if (FORMAT == INT4) {
            w.above[i] = load8_at(scales + 128 * i + 8 * (lane >> 2));
            w.below[i] = load8_at(scales + 128 * i + 64 + 8 * (lane >> 2));
        } else if (FORMAT == FP8) w.above[i] = load8_at(scales + 8 * i);  // .x of the row above, .y of the one below
    }
    return w;
}

// One step: half a granule of every tile; unit = its first unit of columns, counted from the first of the chunk.
template <int FORMAT, int NT, int TILES> __device__ __forceinline__ void step_products(RoundSums<NT, TILES>& s, const Step<TILES>& w, const Activations<NT>& x, int unit, int half) {
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

#define PLACES 4          // most chunks of activations in shared memory
#define SUMS_STRIDE(TILES) (20 * TILES)  // floats of a row's sums of a warp, so that neighbouring rows lie in other banks
struct GemvGates { u64 x_full[PLACES], x_empty[PLACES], sums_full[2], sums_empty[2]; };
struct Finished { int job, within, group, start, count; const float* scale; };  // a round whose sums lie in shared memory
struct GemvRoom { SharedAt ring; float* sums; U4* zeros; char* x; GemvGates* gates; Finished* finished; };
// Where a warp stands, from round to round: next place of its ring, parity of the next load and of the next release of every place of activations (a bit
// each), rounds whose sums were put together; all activations of `from`, `map`, `start` and `count` are there, in chunks of `units`.
struct Progress { u32 place, loads, releases, turn; const u16* from; int map, start, count, units; };

// Warp 0: this lane's column of a chunk of activations into its place, high and low parts in turn, by the copy engine: copies of weights under way are not
// waited for. Up to whole granules of every format, so that a matrix of another one may use what is there.
__device__ __forceinline__ void load_chunk(const GemvRoom& room, const Jobs& jobs, const Job& job, int units, const u16* column, int count, int chunk, int place) {
    const int lane = threadIdx.x, unit0 = chunk * job.chunk * units, here = min(job.chunk * units, (job.granules * units + 7 & ~7) - unit0);
    if (lane == 0) barrier_expect(&room.gates->x_full[place], 2 * count * here * 64);
    __syncwarp();
    if (lane < 2 * count) bulk_copy(room.x + place * jobs.place_bytes + lane * (job.chunk * units | 1) * 64, column + unit0 * 32, here * 64, &room.gates->x_full[place]);
}

__device__ __forceinline__ void write_value(const Jobs& jobs, const Job& job, const float* scale, int group, int start, int r, int tile, int r16, float value, float partner) {
    if (tile >= job.tiles) return;
    if (job.format == INT8) {
        value *= scale[tile * 16 + r16];
        if (job.out == OUT_SWIGLU) partner *= scale[tile * 16 + r16 + 8];
    }
    write_output(job, group, mapped_row(job.y_map, r, start, jobs), tile, r16, value, partner);
}

// The sums of a round put together, those of the slices in their order: rows of pairs of tiles are dealt to the warps.
template <int TILES> __device__ __forceinline__ void finish_round(const Jobs& jobs, u32 turn, const GemvRoom& room) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, buffer = turn & 1, r16 = lane & 15;
    barrier_wait(&room.gates->sums_full[buffer], turn >> 1 & 1);
    const Finished done = room.finished[buffer];
    const Job& job = jobs.job[done.job];
    const int all = SUMS_STRIDE(TILES) * jobs.rows, pair_bits = 3 - job.slice_bits;
    for (int i = warp + turn & WARPS(TILES) - 1; i < done.count << pair_bits; i += WARPS(TILES)) {
        const int pair = i & (1 << pair_bits) - 1, r = i >> pair_bits, tile = 2 * pair + (lane >> 4);
        const float* from = room.sums + (buffer * WARPS(TILES) + (tile / TILES << job.slice_bits)) * all + r * SUMS_STRIDE(TILES) + tile % TILES * 16 + r16;
        float value = 0.0f, partner = 0.0f;
#pragma unroll
        for (int w = 0; w < 8; ++w)
            if (w < job.slices) value += from[w * all];
        if (job.out == OUT_SWIGLU) {
            if (r16 >= 8) continue;
#pragma unroll
            for (int w = 0; w < 8; ++w)
                if (w < job.slices) partner += from[w * all + 8];
        }
        write_value(jobs, job, done.scale, done.group, done.start, r, (done.within << 4 >> job.slice_bits) + tile, r16, value, partner);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&room.gates->sums_empty[buffer]);
}

// This warp's sums of a round: to their place where slices are to be put together, and then the round before is finished; else to where they belong.
template <int NT, int TILES>
__device__ __forceinline__ void leave_sums(const Jobs& jobs, const Walk& walk, const RoundSums<NT, TILES>& s, const WarpPart& part, const float* scale, int start, int count, Progress& at,
                                           const GemvRoom& room) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const Job& job = jobs.job[walk.job];
    if (job.slices == 1) {
        if (part.granules)
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const int r = 4 * n + t;
                    const float above = s.c[i][n][0] + s.c[i][n][1], below = s.c[i][n][2] + s.c[i][n][3];
                    if (r >= count) continue;
                    write_value(jobs, job, scale, walk.group, start, r, part.tile + i, g, above, below);
                    if (job.out != OUT_SWIGLU) write_value(jobs, job, scale, walk.group, start, r, part.tile + i, g + 8, below, 0.0f);
                }
        return;
    }
    const int buffer = at.turn & 1;
    if (at.turn > 1) barrier_wait(&room.gates->sums_empty[buffer], (at.turn >> 1) - 1 & 1);
    float* mine = room.sums + (buffer * WARPS(TILES) + warp) * SUMS_STRIDE(TILES) * jobs.rows;
#pragma unroll
    for (int n = 0; n < NT; ++n)
        if (4 * n + t < count)
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                mine[(4 * n + t) * SUMS_STRIDE(TILES) + i * 16 + g] = s.c[i][n][0] + s.c[i][n][1];
                mine[(4 * n + t) * SUMS_STRIDE(TILES) + i * 16 + g + 8] = s.c[i][n][2] + s.c[i][n][3];
            }
    if (threadIdx.x == 0) room.finished[buffer] = {walk.job, walk.within, walk.group, start, count, scale};
    __syncwarp();
    if (lane == 0) barrier_arrive(&room.gates->sums_full[buffer]);
    if (at.turn) finish_round<TILES>(jobs, at.turn - 1, room);
    ++at.turn;
}

// A round of `count` rows: the steps of this warp, chunk by chunk of the activations, then its sums.
template <int FORMAT, int NT, int TILES>
__device__ __forceinline__ void one_round(const Jobs& jobs, int groups, const RowGroup* near, int near_first, const Walk& walk, Feeder<TILES>& feeder, Progress& at, const GemvRoom& room) {
    constexpr int UNITS = FORMAT == INT4 ? 8 : FORMAT == INT8 || FORMAT == FP8 ? 4 : FORMAT == BF16 ? 2 : 1;  // of a granule
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, group = walk.group;
    const Job& job = jobs.job[walk.job];
    const WarpPart part = part_of<TILES>(job, walk.within, warp);
    const RowGroup& of = near[group - near_first];
    const bool expert = walk.experts;
    const int start = expert ? of.start : 0, count = expert ? of.count : jobs.rows, places = jobs.places, chunks = job.chunks;
    const u16* high = job.x_high + (expert ? 0 : group * job.x_stride);
    const bool through = chunks > places, loading = through || at.from != high || at.map != job.x_map || at.start != start || at.count != count || at.units != job.chunk * UNITS;
    const u16* column = nullptr;
    if (loading) {
        __syncthreads();  // nobody reads what lies there
        if (warp == 0) {
            if (lane < 2 * count)
                column = (lane & 1 ? job.x_low + (high - job.x_high) : high) + (long)mapped_row(job.x_map, lane >> 1, start, jobs) * job.ldx;
            for (int c = 0; c < min(chunks, places); ++c) load_chunk(room, jobs, job, UNITS, column, count, c, c);
        }
        at.from = through ? nullptr : high;
        at.map = job.x_map; at.start = start; at.count = count; at.units = job.chunk * UNITS;
    }
    Activations<NT> x;
    RoundSums<NT, TILES> s;
#pragma unroll
    for (int i = 0; i < TILES * NT * 4; ++i) s.c[i / (NT * 4)][i / 4 % NT][i % 4] = 0.0f;
    const int slices = job.slices, end = part.granules ? job.granules : 0, stride = (job.chunk * UNITS | 1) * 64;
    int granule = part.slice, place = 0;
#pragma unroll 1
    for (int c = 0, first = 0; c < chunks; ++c, first += job.chunk) {
        if (through && warp == 0 && c && c + places - 1 < chunks) {  // the chunk before is done with: its place takes the next one
            const int before = place ? place - 1 : places - 1;
            barrier_wait(&room.gates->x_empty[before], (at.releases >> before & 1) ^ 1);
            load_chunk(room, jobs, job, UNITS, column, count, c + places - 1, before);
        }
        if (loading) {  // also by warps without work in this chunk: they may have some in a later round
            barrier_wait(&room.gates->x_full[place], at.loads >> place & 1);
            at.loads ^= 1u << place;
        }
        const int stop = min(end, first + job.chunk);
        if (granule < stop) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const bool there = n * 8 + g < 2 * count;
                x.at[n] = there ? shared_at(room.x) + place * jobs.place_bytes + (n * 8 + g) * stride + t * 16 : shared_at(room.zeros);
                x.stride[n] = there ? 64 : 0;
            }
#pragma unroll 1
            for (; granule < stop; granule += slices)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    copies_wait<RING_STEPS - 1>();
                    __syncwarp();  // this step is there for all lanes
                    const Step<TILES> w = load_step<FORMAT, TILES>(room.ring + at.place * STEP_BYTES(TILES), lane);
                    __syncwarp();  // all have read it: its place takes the step RING_STEPS later
                    at.place = (at.place + 1) % RING_STEPS;
                    if (half) feeder.second_half(lane);
                    else feeder.first_half(jobs, groups, near, near_first, warp, lane);
                    step_products<FORMAT, NT, TILES>(s, w, x, (granule - first) * UNITS + half * UNITS / 2, half);
                }
        }
        if (through) {
            __syncwarp();
            if (lane == 0) barrier_arrive(&room.gates->x_empty[place]);
            at.releases ^= 1u << place;
        }
        place = place + 1 == places ? 0 : place + 1;
    }
    leave_sums<NT, TILES>(jobs, walk, s, part, expert ? of.scale : job.scale + group * job.scale_stride, start, count, at, room);
}

template <int NT, int TILES>
__device__ __forceinline__ void round_of_format(const Jobs& jobs, int groups, const RowGroup* near, int near_first, const Walk& walk, Feeder<TILES>& feeder, Progress& at, const GemvRoom& room) {
    const int format = jobs.job[walk.job].format;
    if (HAS(INT4) && format == INT4) one_round<INT4, NT, TILES>(jobs, groups, near, near_first, walk, feeder, at, room);
    else if (HAS(BF16) && format == BF16) one_round<BF16, NT, TILES>(jobs, groups, near, near_first, walk, feeder, at, room);
    else if (HAS(INT8) && format == INT8) one_round<INT8, NT, TILES>(jobs, groups, near, near_first, walk, feeder, at, room);
    else if (HAS(FP8) && format == FP8) one_round<FP8, NT, TILES>(jobs, groups, near, near_first, walk, feeder, at, room);
    else if (HAS(F32)) one_round<F32, NT, TILES>(jobs, groups, near, near_first, walk, feeder, at, room);
}

template <int NT, int TILES> __device__ __forceinline__ void gemv_block(const Jobs& jobs) {
    DYNAMIC_SHARED(char, memory);
    __shared__ RowGroup near[NEAR_GROUPS];
    __shared__ __align__(8) GemvGates gates;
    __shared__ Finished finished[2];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    char *sums = memory + RING_BYTES, *after = sums + 2 * 4 * WARPS(TILES) * SUMS_STRIDE(TILES) * jobs.rows;
    const GemvRoom room = {shared_at(memory + warp * RING_STEPS * STEP_BYTES(TILES)), (float*)sums, (U4*)after, after + 16, &gates, finished};
    if (threadIdx.x == 0) {
        *room.zeros = U4{0, 0, 0, 0};
        for (int p = 0; p < PLACES; ++p) { barrier_init(&gates.x_full[p], 1); barrier_init(&gates.x_empty[p], WARPS(TILES)); }
        for (int b = 0; b < 2; ++b) { barrier_init(&gates.sums_full[b], WARPS(TILES)); barrier_init(&gates.sums_empty[b], WARPS(TILES)); }
        barriers_ready();
    }
    // Weights do not depend on the kernel before: the ring is filled before waiting for it. (More of them in L2 would come at the cost of what it still reads.)
    Feeder<TILES> feeder;
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
    __syncthreads();  // zeros, gates and groups are there
    prime(groups, near_first);
    for (; primed < RING_STEPS; ++primed) copies_commit();  // what is waited for is all but the last groups: a full ring of them also behind fewer steps
    Walk walk;
    walk.begin(jobs);
    Progress at = {0, 0, 0, 0, nullptr, 0, 0, 0, 0};
#pragma unroll 1
    while (walk.next(jobs, groups)) {
        const int count = walk.experts ? near[walk.group - near_first].count : jobs.rows;
        if (NT > 1 && count <= 4) round_of_format<1, TILES>(jobs, groups, near, near_first, walk, feeder, at, room);
        else if (NT > 2 && count <= 8) round_of_format<2, TILES>(jobs, groups, near, near_first, walk, feeder, at, room);
        else round_of_format<NT, TILES>(jobs, groups, near, near_first, walk, feeder, at, room);
    }
    if (at.turn) finish_round<TILES>(jobs, at.turn - 1, room);
    copies_wait<0>();
}
#if !defined(ONLY) || ONLY == 4
KERNEL __launch_bounds__(256, 2) gemv_4(const __grid_constant__ Jobs jobs) { gemv_block<1, 2>(jobs); }
#endif
#if !defined(ONLY) || ONLY == 8
KERNEL __launch_bounds__(512, 1) gemv_8(const __grid_constant__ Jobs jobs) { gemv_block<2, 1>(jobs); }
#endif
#if !defined(ONLY) || ONLY == 16
KERNEL __launch_bounds__(512, 1) gemv_16(const __grid_constant__ Jobs jobs) { gemv_block<4, 1>(jobs); }
#endif
