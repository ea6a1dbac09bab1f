// The part of `gemv` that knows which weights come next: the rounds of a block, and the ring in shared memory through which a warp's weights flow.
#define RING_STEPS 4               // even
#define STEP_BYTES(TILES) (1152 * TILES)  // 1,024 bytes of weights and 128 of scales a tile
#define WARPS(TILES) (16 / TILES)  // of a block
#define RING_BYTES (16 * RING_STEPS * STEP_BYTES(1))
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
template <int TILES> __device__ __forceinline__ WarpPart part_of(const Job& job, int within, int warp) {
    const int slice = warp & (job.slices - 1), tile = (within << 4 >> job.slice_bits) + (warp >> job.slice_bits) * TILES;
    const bool busy = tile < job.tiles && slice < job.granules;
    return {tile, slice, busy ? (job.granules - slice + job.slices - 1) >> job.slice_bits : 0};
}

// Keeps a warp's ring full: the steps of all its rounds in the order in which they are used, first and second halves of granules in turn.
template <int TILES> struct Feeder {
    Walk walk;
    const char *data, *scale;
    int second, left, jump, format, scale_jump;  // bytes to the second tile; granules left; bytes from a granule's second half to the next granule
    SharedAt ring;
    u32 place;  // next step of the ring
    __device__ __forceinline__ void begin(const Jobs& jobs, SharedAt at) { walk.begin(jobs); left = place = 0; ring = at; }
    __device__ __forceinline__ void copy(int lane) {
        const SharedAt to = ring + place * STEP_BYTES(TILES), mine = to + lane * 16;
        copy16_at(mine, data); copy16_at(mine + 512, data + 512);
        if (TILES == 2) { copy16_at(mine + 1024, data + second); copy16_at(mine + 1536, data + second + 512); }
        if (HAS(INT4) && format == INT4) {
            if (TILES == 2 || lane < 16) copy8_at(to + TILES * 1024 + lane * 8, scale);
        } else if (HAS(FP8) && format == FP8 && lane < TILES) copy8_at(to + TILES * 1024 + lane * 8, scale);
        place = (place + 1) % RING_STEPS;
    }
    // The first half of the next granule; false: there is none, or not known yet.
    __device__ __forceinline__ bool first_half(const Jobs& jobs, int groups, const RowGroup* near, int near_first, int warp, int lane) {
        while (left == 0) {
            if (!walk.next(jobs, groups)) { copies_commit(); return false; }
            const Job& job = jobs.job[walk.job];
            const WarpPart part = part_of<TILES>(job, walk.within, warp);
            const RowGroup& of = near[walk.group - near_first];
            const U4* d = walk.experts ? of.data : job.data + walk.group * job.data_stride;
            const float* s = walk.experts ? of.scale : job.scale + walk.group * job.scale_stride;
            const bool two = TILES == 2 && part.tile + 1 < job.tiles;
            const long first = (long)part.tile * job.granules + part.slice;
            format = job.format;
            left = part.granules;
            jump = 2048 * job.slices - 1024;
            data = (const char*)(d + first * 128 + lane);
            second = two ? job.granules * 2048 : 0;
            if (HAS(INT4) && format == INT4) {
                scale = (const char*)(s + (first + (two && lane >> 4 ? job.granules : 0)) * 64 + (lane & 15) * 2);
                scale_jump = 256 * job.slices - 128;
            } else if (HAS(FP8) && format == FP8) {
                scale = (const char*)(s + (first + (two && lane ? job.granules : 0)) * 2);
                scale_jump = 8 * job.slices;
            }
        }
        copy(lane);
        copies_commit();
        data += 1024;
        if (HAS(INT4) && format == INT4) scale += 128;
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
