// Routing (model spec 6) and the lists the grouped products read. Nothing about routing ever reaches the host.

// What an expert is chosen by. A NaN counts as the least there is, above NEG_INF (out of the choice): also a row without numbers gets experts that exist.
__device__ __forceinline__ float choosable(float score) { return fmaxf(score, -3.0e38f); }

// Experts of a row, ascending, and their weights, by one warp. score [E] the router's sigmoids, biased [E] with the bias added (overwritten), group_score
// [groups]: shared memory. Lane i < top_k returns expert number i and its weight.
struct Choice { int expert; float weight; };
__device__ __forceinline__ Choice choose_experts(const float* score, float* biased, float* group_score, int E, int top_k, int groups, int kept_groups, int normalise, float scaling) {
    const int lane = threadIdx.x & 31, size = E / groups;
    if (groups > 1) {
        for (int g = lane; g < groups; g += 32) {
            float first = NEG_INF, second = NEG_INF;
            for (int e = g * size; e < (g + 1) * size; ++e) {
                const float b = biased[e];
                if (b > first) { second = first; first = b; } else if (b > second) second = b;
            }
            group_score[g] = first + second;
        }
        __syncwarp();
        for (int g = lane; g < groups; g += 32) {
            int better = 0;
            for (int o = 0; o < groups; ++o) better += group_score[o] > group_score[g] || (group_score[o] == group_score[g] && o < g);
            if (better >= kept_groups)
                for (int e = g * size; e < (g + 1) * size; ++e) biased[e] = NEG_INF;
        }
        __syncwarp();
    }
    int mine = 0x7fffffff;
    for (int i = 0; i < top_k; ++i) {
        float best = NEG_INF;
        u32 at = 0x7fffffff;
#pragma unroll 8
        for (int e = lane; e < E; e += 32)
            if (biased[e] > best) { best = biased[e]; at = e; }
        const u32 key = ordered(best), top = __reduce_max_sync(0xffffffffu, key);
        at = __reduce_min_sync(0xffffffffu, key == top ? at : 0x7fffffffu);
        if (lane == i) mine = (int)at;
        if (lane == 0) biased[at] = NEG_INF;
        __syncwarp();
    }
    int rank = 0;
    for (int i = 0; i < top_k; ++i) rank += __shfl_sync(0xffffffffu, mine, i) < mine;
    const float w = lane < top_k ? score[mine] : 0.0f;
    float* sorted = biased;
    __syncwarp();
    if (lane < top_k) { sorted[rank] = w; group_score[rank] = __uint_as_float((u32)mine); }
    __syncwarp();
    float total = 0.0f;
    for (int r = 0; r < top_k; ++r) total += sorted[r];  // in ascending order of the expert
    Choice chosen = {0, 0.0f};
    if (lane < top_k) {
        chosen.expert = (int)__float_as_uint(group_score[lane]);
        chosen.weight = (normalise ? sorted[lane] / (total + 1e-20f) : sorted[lane]) * scaling;
    }
    return chosen;
}

// Experts of each row, ascending, and their weights. logits [T][ld]; ids, weights [T][top_k] (ids -1 for a dead row); counts [E] rows of each expert,
// zeroed before; uses: counter of every slot's experts, uses[slot * use_stride + e], or null. grid (T), 256 threads; the first warp chooses.
// Dynamic shared memory: 2E + groups + 32 floats.
KERNEL route(const float* logits, int ld, const float* bias, int E, int top_k, int groups, int kept_groups, int normalise, float scaling, const int* slot, const int* live,
             int* ids, float* weights, int* counts, u32* uses, long use_stride) {
    DYNAMIC_SHARED(float, score);
    float *biased = score + E, *group_score = biased + E;
    WAIT_BEFORE();
    const int row = blockIdx.x, lane = threadIdx.x;
    if (!live[row]) {
        for (int i = lane; i < top_k; i += 256) ids[row * top_k + i] = -1;
        return;
    }
    for (int e = lane; e < E; e += 256) {
        const float s = sigmoid(logits[(long)row * ld + e]);
        score[e] = s;
        biased[e] = choosable(s + bias[e]);
    }
    __syncthreads();
    if (lane >= 32) return;
    const Choice chosen = choose_experts(score, biased, group_score, E, top_k, groups, kept_groups, normalise, scaling);
    if (lane < top_k) {
        ids[row * top_k + lane] = chosen.expert;
        weights[row * top_k + lane] = chosen.weight;
        atomicAdd(&counts[chosen.expert], 1);
        if (uses) atomicAdd(&uses[slot[row] * use_stride + chosen.expert], 1u);
    }
}

// `route` and `moe_list` of up to MAX_ROWS rows in one block: the same ids, weights, list and groups. 512 threads: a warp a row, then a thread a pair.
// Dynamic shared memory: rows (2E + groups + 32) floats.
KERNEL __launch_bounds__(512) route_few(const float* logits, int ld, const float* bias, int E, int top_k, int groups, int kept_groups, int normalise, float scaling,
                                        const int* slot, const int* live, int rows, int tile, int* ids, float* weights, int* list, int* row_groups, u32* uses, long use_stride) {
    DYNAMIC_SHARED(float, memory);
    __shared__ int pair_expert[512], leads[512];
    LET_NEXT_START();
    const int row = threadIdx.x >> 5, lane = threadIdx.x & 31, pairs = rows * top_k;
    float *score = memory + row * (2 * E + groups + 32), *biased = score + E, *group_score = biased + E;
    const bool alive = row < rows && live[row];  // older than the kernel before
    const long own_uses = alive ? slot[row] * use_stride : 0;
    if (alive)
#pragma unroll 8
        for (int e = lane; e < E; e += 32) biased[e] = bias[e];
    WAIT_BEFORE();
    if (row < rows) {
        Choice chosen = {-1, 0.0f};
        if (alive) {
#pragma unroll 12
            for (int e = lane; e < E; e += 32) {
                const float s = sigmoid(logits[(long)row * ld + e]);
                score[e] = s;
                biased[e] = choosable(biased[e] + s);
            }
            __syncwarp();
            chosen = choose_experts(score, biased, group_score, E, top_k, groups, kept_groups, normalise, scaling);
        }
        if (lane < top_k) {
            pair_expert[row * top_k + lane] = ids[row * top_k + lane] = chosen.expert;
            weights[row * top_k + lane] = chosen.weight;
            if (alive && uses) atomicAdd(&uses[own_uses + chosen.expert], 1u);
        }
    }
    __syncthreads();
    const int pair = threadIdx.x, expert = pair < pairs ? pair_expert[pair] : -1;
    int place = 0, among = 0, together = 0;  // pairs before this one, of them the expert's, all of the expert's
    if (expert >= 0)
#pragma unroll 8
        for (int p = 0; p < pairs; ++p) {
            const int e = pair_expert[p];
            const bool same = e == expert, before = same && p < pair;
            place += (e >= 0 && e < expert) || before;
            among += before;
            together += same;
        }
    const bool lead = expert >= 0 && among % tile == 0;  // the first pair of a group of at most `tile`
    leads[pair] = lead;
    __syncthreads();
    int group = among / tile, all = 0;
    if (lead || pair == 0)
#pragma unroll 8
        for (int p = 0; p < pairs; ++p) {
            all += leads[p];
            group += leads[p] && pair_expert[p] < expert;
        }
    if (expert >= 0) list[place] = pair;
    if (lead) {
        int* to = row_groups + 4 + 4 * group;
        to[0] = expert; to[1] = place; to[2] = min(tile, together - among); to[3] = 0;
    }
    if (pair == 0) row_groups[0] = all;
}

// list: pairs (row * top_k + i) sorted by expert, then by pair; groups: [0] how many, then from [4] on {expert, first place in the list, pairs (<= tile), 0}.
// grid (E), 256 threads.
KERNEL __launch_bounds__(256) moe_list(const int* ids, int pairs, const int* counts, int E, int tile, int* list, int* groups) {
    __shared__ int before[2];
    __shared__ int warp_count[8];
    WAIT_BEFORE();
    const int expert = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = counts[expert];
    if (warp == 0) {
        int places = 0, tiles = 0;
        for (int e = lane; e < expert; e += 32) { places += counts[e]; tiles += (counts[e] + tile - 1) / tile; }
        for (int o = 16; o; o >>= 1) { places += __shfl_xor_sync(0xffffffffu, places, o); tiles += __shfl_xor_sync(0xffffffffu, tiles, o); }
        if (lane == 0) { before[0] = places; before[1] = tiles; }
    }
    __syncthreads();
    const int first = before[0], first_tile = before[1], tiles = (count + tile - 1) / tile;
    if (expert == E - 1 && threadIdx.x == 0) groups[0] = first_tile + tiles;
    for (int i = threadIdx.x; i < tiles; i += 256) {
        int* to = groups + 4 + 4 * (first_tile + i);
        to[0] = expert; to[1] = first + i * tile; to[2] = min(tile, count - i * tile); to[3] = 0;
    }
    if (count == 0) return;
    int written = 0;
    for (int base = 0; base < pairs && written < count; base += 256) {
        const bool mine = base + (int)threadIdx.x < pairs && ids[base + threadIdx.x] == expert;
        const u32 mask = __ballot_sync(0xffffffffu, mine);
        if (lane == 0) warp_count[warp] = __popc(mask);
        __syncthreads();
        int at = written + __popc(mask & ((1u << lane) - 1)), total = 0;
        for (int w = 0; w < 8; ++w) { if (w < warp) at += warp_count[w]; total += warp_count[w]; }
        if (mine) list[first + at] = base + threadIdx.x;
        written += total;
        __syncthreads();
    }
}

// Rows of activations in the order of the list, one for each pair: to [pairs][ld]. ld a multiple of 8. grid (pairs), 256 threads.
KERNEL __launch_bounds__(256) moe_gather(const u16* from, int ld, const int* list, int top_k, u16* to) {
    WAIT_BEFORE();
    const U4 *row = (const U4*)(from + (long)(list[blockIdx.x] / top_k) * ld);
    for (int i = threadIdx.x; i < ld / 8; i += 256) ((U4*)to)[(long)blockIdx.x * (ld / 8) + i] = row[i];
}
