// Products for the many rows of a prompt, on high parts alone, by warpgroup products: a block has 256 rows of W and 128 tokens, or 128 rows and 256
// tokens. Weights are the A operand in registers; activations lie in shared memory, where the copy engine puts them.

#if !EXACT
#if HAS(F32)
#error "wide models with float32 matrices are compiled EXACT"
#endif
#define CONSUMERS 256
template <int TOKENS, int TILES> struct Rings {  // shared memory of a block: activations [X_STAGES][token][64] bf16, swizzled; weights [units][tile][unit]
    static constexpr int X_BYTES = TOKENS * STAGE * 2, X_STAGES = TOKENS == 256 ? 4 : 6, W_TILES = 8 * TILES, W_BYTES = 2 * W_TILES * 4096, W_UNITS = 8;
};
// A unit is 128 columns of a tile as they are stored: that many bytes. The ring holds two units of bf16, four of bytes, eight of int4.
__device__ __forceinline__ int unit_bytes(int format) { return HAS(INT4) && format == INT4 ? 1024 : format == BF16 ? 4096 : 2048; }

struct Scales { float top, bottom; };
__device__ __forceinline__ Scales stage_scales(const float* scale, int format, long tile, int granules, int stage, int lane) {
    Scales s = {1.0f, 1.0f};
    if (HAS(INT4) && format == INT4) {
        const long at = (((tile * granules + (stage >> 2)) * 2 + (stage >> 1 & 1)) * 16 + (lane >> 2)) * 2 + (stage & 1);
        s.top = scale[at]; s.bottom = scale[at + 16];
    } else if (HAS(FP8) && format == FP8) {
        const long at = 2 * (tile * granules + (stage >> 1));
        s.top = scale[at]; s.bottom = scale[at + 1];
    }
    return s;
}
// The A operands of the four k-steps of a stage of unit `w`; scales within a row are folded in (those of whole rows wait for the end).
__device__ __forceinline__ void stage_fragments(const U4* w, int format, int stage, const Scales& scale, int lane, u32 (*a)[4]) {
    const int odd = stage & 1;
    if (HAS(INT4) && format == INT4) {
        const U2 top = ((const U2*)(w + lane))[odd], bottom = ((const U2*)(w + 32 + lane))[odd];
        int4_unit(top.x, bottom.x, a);
        int4_unit(top.y, bottom.y, a + 2);
    } else if ((HAS(INT8) && format == INT8) || (HAS(FP8) && format == FP8)) {
        const U4 top = w[64 * odd + lane], bottom = w[64 * odd + 32 + lane];
        if (HAS(INT8) && format == INT8) {
            byte_unit<INT8>(top.x, top.y, bottom.x, bottom.y, a);
            byte_unit<INT8>(top.z, top.w, bottom.z, bottom.w, a + 2);
        } else if (HAS(FP8)) {
            byte_unit<FP8>(top.x, top.y, bottom.x, bottom.y, a);
            byte_unit<FP8>(top.z, top.w, bottom.z, bottom.w, a + 2);
        }
    } else {
        const U4* half = w + 128 * odd + lane;
        bf16_unit(half[0], half[32], a);
        bf16_unit(half[64], half[96], a + 2);
    }
    if ((HAS(INT4) && format == INT4) || (HAS(FP8) && format == FP8)) {
        const u32 top = pack_bf16(scale.top, scale.top), bottom = pack_bf16(scale.bottom, scale.bottom);
#pragma unroll
        for (int i = 0; i < 16; ++i) a[i >> 2][i & 3] = scaled_pair(a[i >> 2][i & 3], (i & 1) ? bottom : top);
    }
}

// Barriers of the rings: filled by the copy engine, emptied by the eight warps that multiply.
template <int TOKENS, int TILES> struct Gates {
    typedef Rings<TOKENS, TILES> R;
    u64 x_full[R::X_STAGES], x_empty[R::X_STAGES], w_full[R::W_UNITS], w_empty[R::W_UNITS];
};

// The warp that keeps the rings full.
template <int TOKENS, int TILES> __device__ __forceinline__ void copy_operands(const Job& job, const TensorMap* map, const Place& at, char* memory, Gates<TOKENS, TILES>& gates) {
    typedef Rings<TOKENS, TILES> R;
    const int lane = threadIdx.x & 31, format = job.format, unit = unit_bytes(format), units = R::W_BYTES / R::W_TILES / unit;
    const int row = job.x_map == MAP_SORTED ? at.start : at.token0;
    const long tile = min(at.tile0 + lane, job.tiles - 1);
    char* weights = memory + R::X_STAGES * R::X_BYTES;
    for (int stage = 0; stage < at.stages; ++stage) {
        if ((stage & 1) == 0) {
            const int number = stage >> 1, place = number % units;
            const long from = format == INT4 ? (tile * job.granules + (number >> 1)) * 2048 + (number & 1) * 1024
                              : format == BF16 ? (tile * job.granules + 2 * number) * 2048 : (tile * job.granules + number) * 2048;
            const int bytes = format == BF16 && 2 * number + 1 == job.granules ? 2048 : unit;
            if (number >= units) barrier_wait(&gates.w_empty[place], (number / units - 1) & 1);
            if (lane == 0) barrier_expect(&gates.w_full[place], R::W_TILES * bytes);
            __syncwarp();
            if (lane < R::W_TILES) bulk_copy(weights + (place * R::W_TILES + lane) * unit, (const char*)at.data + from, bytes, &gates.w_full[place]);
        }
        const int place = stage % R::X_STAGES;
        if (stage >= R::X_STAGES) barrier_wait(&gates.x_empty[place], (stage / R::X_STAGES - 1) & 1);
        if (lane == 0) {
            barrier_expect(&gates.x_full[place], R::X_BYTES);
            tile_copy(memory + place * R::X_BYTES, map, (int)at.head_x + stage * STAGE, row, &gates.x_full[place]);
        }
    }
}

// The two warpgroups that multiply, each its own rows of W.
template <int TOKENS, int TILES> __device__ __forceinline__ void multiply(const Jobs& jobs, const Job& job, const Place& at, char* memory, Gates<TOKENS, TILES>& gates) {
    typedef Rings<TOKENS, TILES> R;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, format = job.format, unit = unit_bytes(format), units = R::W_BYTES / R::W_TILES / unit;
    const char* weights = memory + R::X_STAGES * R::X_BYTES + warp * TILES * unit;
    long tile[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) tile[i] = min(at.tile0 + i, job.tiles - 1);
    float c[TILES][TOKENS / 8][4];
#pragma unroll
    for (int i = 0; i < TILES * TOKENS / 2; ++i) c[i / (TOKENS / 2)][i / 4 % (TOKENS / 8)][i % 4] = 0.0f;
    Scales scale[TILES];
    auto read_scales = [&](int stage) {
        if (stage < at.stages)
#pragma unroll
            for (int i = 0; i < TILES; ++i) scale[i] = stage_scales(at.scale, format, tile[i], job.granules, stage, lane);
    };
    auto prepare = [&](int stage, u32 (*a)[4][4]) {
        const int number = stage >> 1, place = number % units;
        if ((stage & 1) == 0) barrier_wait(&gates.w_full[place], (number / units) & 1);
#pragma unroll
        for (int i = 0; i < TILES; ++i) stage_fragments((const U4*)(weights + (place * R::W_TILES + i) * unit), format, stage, scale[i], lane, a[i]);
        read_scales(stage + 1);
        __syncwarp();
        if (lane == 0 && ((stage & 1) || stage + 1 == at.stages)) barrier_arrive(&gates.w_empty[place]);
    };
    auto step = [&](int stage, const u32 (*a)[4][4], u32 (*next)[4][4]) {  // the weights of the next stage are prepared under the products of this one
        const int place = stage % R::X_STAGES;
        barrier_wait(&gates.x_full[place], (stage / R::X_STAGES) & 1);
        const u16* x = (const u16*)(memory + place * R::X_BYTES);
        warpgroup_begin();
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                if (TOKENS == 256) warpgroup_mma_256(c[i], a[i][s], x, s);
                else warpgroup_mma(c[i], a[i][s], x, s);
            }
        warpgroup_commit();
        if (stage + 1 < at.stages) prepare(stage + 1, next);
        warpgroup_wait();
        if (lane == 0) barrier_arrive(&gates.x_empty[place]);
    };
    u32 even[TILES][4][4], odd[TILES][4][4];
    read_scales(0);
    prepare(0, even);
#pragma unroll 1
    for (int stage = 0; stage < at.stages; stage += 2) {
        step(stage, even, odd);
        if (stage + 1 < at.stages) step(stage + 1, odd, even);
    }
    if (HAS(INT8) && format == INT8) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const float top = at.scale[tile[i] * 16 + (lane >> 2)], bottom = at.scale[tile[i] * 16 + 8 + (lane >> 2)];
#pragma unroll
            for (int n = 0; n < TOKENS / 8; ++n) { c[i][n][0] *= top; c[i][n][1] *= top; c[i][n][2] *= bottom; c[i][n][3] *= bottom; }
        }
    }
    write_sums<TOKENS, TILES>(jobs, job, at, c, (float*)memory);
}

struct Maps { TensorMap map[6]; };  // of the activations of every job

template <int TOKENS, int TILES> __device__ __forceinline__ void gemm_block(const Jobs& jobs, const Maps& maps) {
    typedef Rings<TOKENS, TILES> R;
    DYNAMIC_SHARED(char, bytes);
    __shared__ __align__(8) Gates<TOKENS, TILES> gates;
    char* memory = (char*)(((u64)bytes + 1023) & ~(u64)1023);
    if (threadIdx.x == 0) {
        for (int i = 0; i < R::X_STAGES; ++i) { barrier_init(&gates.x_full[i], 1); barrier_init(&gates.x_empty[i], CONSUMERS / 32); }
        for (int i = 0; i < R::W_UNITS; ++i) { barrier_init(&gates.w_full[i], 1); barrier_init(&gates.w_empty[i], CONSUMERS / 32); }
        barriers_ready();
    }
    WAIT_BEFORE();
    const int index = job_of_block(jobs);
    const Job& job = jobs.job[index];
    Place at;
    if (!find_place<TOKENS, TILES>(jobs, job, at)) return;
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        fewer_registers<24>();
        if (threadIdx.x < CONSUMERS + 32) copy_operands<TOKENS, TILES>(job, &maps.map[index], at, memory, gates);
    } else {
        more_registers<240>();
        at.tile0 += TILES * (threadIdx.x >> 5);
        multiply<TOKENS, TILES>(jobs, job, at, memory, gates);
    }
}
KERNEL __launch_bounds__(CONSUMERS + 128, 1) gemm(const __grid_constant__ Jobs jobs, const __grid_constant__ Maps maps) { gemm_block<128, 2>(jobs, maps); }
KERNEL __launch_bounds__(CONSUMERS + 128, 1) gemm_long(const __grid_constant__ Jobs jobs, const __grid_constant__ Maps maps) { gemm_block<256, 1>(jobs, maps); }
#endif
