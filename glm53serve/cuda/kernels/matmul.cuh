// Products of activations with stored weights, y = x W^T (model spec 9), for up to 16 rows (gemv) and for many (gemm).
//
// Weights lie in tensor-core fragment order, cut into tiles of 16 rows and granules of 2 KiB a tile: four 16-byte pieces for each of
// 32 lanes. Lane 4g + t holds rows g and g + 8. Columns come in units of 32, of which lane t holds 8t .. 8t + 7:
//   int4  granule 256 columns, piece 2b + h = row half h, columns 128b .. +127, word u = unit u, nibble i = column 2i, nibble i + 4 = column 2i + 1
//   int8, fp8  granule 128 columns, piece 2j + h = units 2j, 2j + 1
//   bf16  granule 64 columns, piece 2u + h = unit u
//   f32   granule 32 columns, piece 2s + h = half s of the lane's columns
// Scales: int4 float [tile][granule][b][h][g][2 groups of 64]; fp8 float [tile][granule][h]; int8 float [row].
// Activations are bf16 pairs (high + low), rows padded with zeros to 256 columns. Every weight format is exact in bf16 (f32: as a pair), sums
// are float32 in an order that depends on the matrix alone, so a row's bits do not depend on its company.

enum { F32 = 0, BF16 = 1, FP8 = 2, INT8 = 3, INT4 = 4 };
#define HAS(format) ((FORMATS >> (format)) & 1)  // the model has matrices of this format
enum { OUT_F32 = 0, OUT_SPLIT = 1, OUT_SWIGLU = 2 };
enum { MAP_SAME = 0, MAP_TOKEN = 1, MAP_SORTED = 2, MAP_PAIR = 3 };

struct Job {
    const U4* data;
    const float* scale;
    const u64* table;   // experts: [E][4] addresses of gate|up data, scale, down data, scale; null for one matrix
    const u16* x_high;
    const u16* x_low;
    float* y;
    u16* y_high;
    u16* y_low;
    long data_stride, scale_stride, x_stride, y_stride;  // from one head to the next: U4s, floats, values, values
    int ldx, ldy;
    int format, tiles, granules, rows;
    int slices;         // parts of the columns a block sums separately
    int out, x_map, y_map;
    int groups;         // heads, or the most expert groups there can be; 1 for one matrix
    int which;          // experts: 0 gate|up, 1 down
    int first_block;    // gemv: first round
    int token_tiles;    // gemm: the most tiles of tokens there can be
    float limit;
    int slice_bits;     // gemv: slices = 1 << slice_bits
    int each;           // gemv: rounds of one group
    u32 by_each;        // gemv: 2^32 / each, rounded up; 0 where each is 1
    int chunk, chunks;  // gemv: granules of a chunk of activations; how many chunks
};
// gemv: every block has `share` rounds of whole matrices, the first `rest` blocks one more (experts are the last job); places: chunks of activations there is
// shared memory for, place_bytes each.
struct Jobs { int count, rows; const int* list; const int* groups; int top_k, share, rest, places, place_bytes; Job job[6]; };

struct Piece4 { U4 p[4]; };

__device__ __forceinline__ void int4_unit(u32 top, u32 bottom, u32 (*a)[4]) {
    a[0][0] = int4_pair<0>(top); a[0][1] = int4_pair<0>(bottom); a[0][2] = int4_pair<1>(top); a[0][3] = int4_pair<1>(bottom);
    a[1][0] = int4_pair<2>(top); a[1][1] = int4_pair<2>(bottom); a[1][2] = int4_pair<3>(top); a[1][3] = int4_pair<3>(bottom);
}
template <int FORMAT> __device__ __forceinline__ void byte_unit(u32 top0, u32 top1, u32 bottom0, u32 bottom1, u32 (*a)[4]) {
    if (FORMAT == INT8) {
        int8_pairs(top0, a[0][0], a[0][2]); int8_pairs(bottom0, a[0][1], a[0][3]);
        int8_pairs(top1, a[1][0], a[1][2]); int8_pairs(bottom1, a[1][1], a[1][3]);
    } else {
        fp8_pairs(top0, a[0][0], a[0][2]); fp8_pairs(bottom0, a[0][1], a[0][3]);
        fp8_pairs(top1, a[1][0], a[1][2]); fp8_pairs(bottom1, a[1][1], a[1][3]);
    }
}
__device__ __forceinline__ void bf16_unit(const U4& top, const U4& bottom, u32 (*a)[4]) {
    a[0][0] = top.x; a[0][1] = bottom.x; a[0][2] = top.y; a[0][3] = bottom.y;
    a[1][0] = top.z; a[1][1] = bottom.z; a[1][2] = top.w; a[1][3] = bottom.w;
}
__device__ __forceinline__ void f32_step(const U4& top, const U4& bottom, u32* high, u32* low) {
    u32 v[8] = {top.x, top.y, bottom.x, bottom.y, top.z, top.w, bottom.z, bottom.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float a = __uint_as_float(v[2 * i]), b = __uint_as_float(v[2 * i + 1]);
        high[i] = pack_bf16(a, b);
        low[i] = pack_bf16(a - low_bf16(high[i]), b - high_bf16(high[i]));
    }
}

// Where row `r` of a group's columns comes from and goes to.
__device__ __forceinline__ int mapped_row(int map, int r, int start, const Jobs& jobs) {
    return map == MAP_SAME ? r : map == MAP_SORTED ? start + r : map == MAP_TOKEN ? jobs.list[start + r] / jobs.top_k : jobs.list[start + r];
}

__device__ __forceinline__ void write_output(const Job& job, int group, int row_to, int tile, int r16, float value, float partner) {
    if (job.out == OUT_SWIGLU) {
        int column = tile * 8 + r16;
        if (r16 < 8 && column < job.rows) store_split(job.y_high, job.y_low, (long)row_to * job.ldy + column, clamped_swiglu(value, partner, job.limit));
        return;
    }
    int column = tile * 16 + r16;
    if (column >= job.rows) return;
    long at = (long)row_to * job.ldy + group * job.y_stride + column;
    if (job.out == OUT_F32) job.y[at] = value;
    else store_split(job.y_high, job.y_low, at, value);
}
