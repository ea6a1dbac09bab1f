// What the tiled products share: where a block stands, and how its sums leave it.

#define STAGE 64  // columns a stage

// Where a block stands: which matrix, rows of W, tokens.
struct Place { const U4* data; const float* scale; int tile0, group, start, token0, count, stages; long head_x; };

// Four neighbouring columns of an output row.
__device__ __forceinline__ void write_quad(const Job& job, long at, int column, const F4& v) {
    const float value[4] = {v.x, v.y, v.z, v.w};
    if (column + 4 <= job.rows && (at & 3) == 0) {
        if (job.out == OUT_F32) {
            if (((u64)job.y & 15) == 0) { *(F4*)(job.y + at) = v; return; }
        } else if (!job.y_low) {
            u16* to = job.y_high + in_product_order(at);
            *(u32*)to = pack_bf16(v.x, v.y);
            *(u32*)(to + 8) = pack_bf16(v.z, v.w);
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (column + i < job.rows) {
            if (job.out == OUT_F32) job.y[at + i] = value[i];
            else store_split(job.y_high, job.y_low, at + i, value[i]);
        }
}

// Sums go through shared memory, so that what leaves is contiguous and the code stays small. A block has 8 warps x TILES tiles of W, TOKENS tokens.
template <int TOKENS, int TILES>
__device__ __forceinline__ void write_sums(const Jobs& jobs, const Job& job, const Place& at, float (*c)[TOKENS / 8][4], float* sums) {
    constexpr int ROWS = 128 * TILES, ROW_SUMS = ROWS + 4;  // floats of a token's sums, with room between banks
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, first = (threadIdx.x >> 5) * 16 * TILES;
    BARRIER(1, 256);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[(n * 8 + 2 * t + (j & 1)) * ROW_SUMS + first + i * 16 + g + (j >> 1) * 8] = c[i][n][j];
    BARRIER(1, 256);
    const int tile_first = at.tile0 - (first >> 4), tall = min(ROWS / 16, job.tiles - tile_first) * 16;
    if (job.out == OUT_SWIGLU) {
        constexpr int QUADS = ROWS / 8;
        const int quad = threadIdx.x % QUADS, row = (quad >> 1) * 16 + (quad & 1) * 4, column = tile_first * 8 + quad * 4;
        if (row < tall && column < job.rows)
#pragma unroll 2
            for (int token = threadIdx.x / QUADS; token < at.count; token += 256 / QUADS) {
                const F4 gate = *(const F4*)(sums + token * ROW_SUMS + row), up = *(const F4*)(sums + token * ROW_SUMS + row + 8);
                const F4 v = {clamped_swiglu(gate.x, up.x, job.limit), clamped_swiglu(gate.y, up.y, job.limit), clamped_swiglu(gate.z, up.z, job.limit),
                              clamped_swiglu(gate.w, up.w, job.limit)};
                write_quad(job, (long)mapped_row(job.y_map, at.token0 + token, at.start, jobs) * job.ldy + column, column, v);
            }
        return;
    }
    constexpr int QUADS = ROWS / 4;
    const int row = threadIdx.x % QUADS * 4, column = tile_first * 16 + row;
    if (row < tall && column < job.rows)
#pragma unroll 2
        for (int token = threadIdx.x / QUADS; token < at.count; token += 256 / QUADS)
            write_quad(job, (long)mapped_row(job.y_map, at.token0 + token, at.start, jobs) * job.ldy + at.group * job.y_stride + column, column,
                       *(const F4*)(sums + token * ROW_SUMS + row));
}

// Where this block stands; false: nowhere (there are fewer groups of experts than there could be). Blocks of one expert follow each other, so that its
// activations stay in the cache; of a whole matrix, those of the same rows.
template <int TOKENS, int TILES> __device__ __forceinline__ bool find_place(const Jobs& jobs, const Job& job, Place& at) {
    const int row_blocks = (job.tiles + 8 * TILES - 1) / (8 * TILES), local = blockIdx.x - job.first_block;
    const int token_tile = job.table ? local / row_blocks : local % job.token_tiles, rest = job.table ? local % row_blocks : local / job.token_tiles;
    at.group = rest / row_blocks;
    at.tile0 = (rest % row_blocks) * 8 * TILES;
    const int columns = job.format == INT4 ? 256 : job.format == BF16 ? 64 : job.format == F32 ? 32 : 128;
    at.stages = (job.granules * columns + STAGE - 1) / STAGE;
    if (job.table) {
        if (token_tile >= jobs.groups[0]) return false;
        const int* group = jobs.groups + 4 + 4 * token_tile;
        at.start = group[1]; at.count = group[2]; at.token0 = 0; at.head_x = 0;
        at.data = (const U4*)job.table[group[0] * 4 + job.which * 2];
        at.scale = (const float*)job.table[group[0] * 4 + job.which * 2 + 1];
    } else {
        at.start = 0; at.token0 = token_tile * TOKENS; at.count = min(TOKENS, jobs.rows - at.token0); at.head_x = at.group * job.x_stride;
        at.data = job.data + at.group * job.data_stride;
        at.scale = job.scale + at.group * job.scale_stride;
    }
    return true;
}
__device__ __forceinline__ int job_of_block(const Jobs& jobs) {
    int index = 0;
    while (index + 1 < jobs.count && (int)blockIdx.x >= jobs.job[index + 1].first_block) ++index;
    return index;
}
