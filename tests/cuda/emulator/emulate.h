// Runs CUDA kernels of this project on a CPU: a fiber for each thread of a block, blocks one after the other, those of a cluster in turns.
// Included before common.cuh with GLM_EMULATE defined. Only what the kernels use is here.
// Asynchronous copies land as late as they may, when a wait asks for them, or (`copies_late` = 0) as early as they may, when they are made: a kernel is right
// when both give the same.
// Warps of a block go on side by side, or (`warps_run_ahead`) each as far as it can get by itself before the next one does; the first warp first, or
// (`last_warp_first`) the last one, so that what the first has to say to the others may come late, too.
// Shared memory is full of NaNs when a block begins, but for what templates declare of it.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define __global__
#define __device__
#define __forceinline__ inline
// g++ leaves what a template declares out of the section: kernels that run in clusters declare their shared memory themselves.
#define __shared__ static __attribute__((section("emulated_shared")))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__

struct Index3 { unsigned x, y, z; };
struct Warp { int alive, arrived; unsigned turn; uint64_t word[2][32]; float a[2][16][16], b[2][8][16]; const void* address[2][32]; };
struct Copy { void* to; const void* from; unsigned bytes, group; };  // from null: zeros
struct Copies { Copy* made; int count, room, landed; unsigned group; };  // of a thread: those made since all had landed, the group that is not committed yet
struct Fiber {
    void* stack_pointer; char* stack; Index3 thread; int lane; Warp* warp;
    bool done, waited, at_cluster;  // waited: it has passed its wait for the kernel before; at_cluster: it has arrived at the cluster's barrier
    unsigned cluster_turn;
    Copies copies;
};
struct Gate { int arrived; unsigned turn; };
struct TensorMap;
// A copy of the copy engine on its way to a barrier, or what another block of the cluster has sent; `map`: a tile, else `bytes` from `from`, or (null) from `sent`.
struct BulkCopy { char* to; const char* from; unsigned bytes; const TensorMap* map; int column, row; unsigned long long* at; char sent[16]; };
struct Block {
    Fiber fibers[1024];
    Warp warps[32];
    Gate gates[16];
    int alive;
    Index3 index;
    bool begun, ended, early;  // early: it lets the next kernel start before it has waited
    char *shared, *dynamic;    // its shared memory, while another block of the cluster runs
    BulkCopy copies[1024];
    int copy_count;
};

static Block blocks[16];  // of the cluster
static Block* block = blocks;
static int cluster_size, blocks_alive, fiber_count;
static Gate cluster_gate;
static unsigned long long progress, progress_of_warp, progress_of_lap, progress_of_round;
// Steps that any thread has made; the same when a lap of the warp's or the block's or a round of the cluster's began.
static Fiber* self;
static void* scheduler_stack;
static Index3 blockIdx, blockDim, gridDim;
static char dynamic_shared_memory[1 << 18] __attribute__((aligned(1024)));
static unsigned dynamic_shared_bytes;
extern "C" char __start_emulated_shared[] __attribute__((visibility("hidden"))), __stop_emulated_shared[] __attribute__((visibility("hidden")));
static void (*current_kernel)(void**);
static void** current_parameters;
static unsigned conditionals[16];
static int copies_late, warps_run_ahead, last_warp_first;
#include "watch.h"
#define threadIdx (self->thread)
#define DYNAMIC_SHARED(type, name) type* name = (type*)dynamic_shared_memory

extern "C" void switch_stack(void** save, void* load);
asm(R"(
.text
.globl switch_stack
switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

UNWATCHED static void give_up(const char* why) { fprintf(stderr, "emulator: %s\n", why); abort(); }
UNWATCHED static size_t static_shared_bytes() { return __stop_emulated_shared - __start_emulated_shared; }
UNWATCHED static void enter_block(Block* next) {  // another block of the cluster; the one that runs is left as it is
    if (!block->ended) {
        memcpy(block->shared, __start_emulated_shared, static_shared_bytes());
        memcpy(block->dynamic, dynamic_shared_memory, dynamic_shared_bytes);
    }
    block = next;
    block->begun = true;
    blockIdx = block->index;
    memcpy(__start_emulated_shared, block->shared, static_shared_bytes());
    memcpy(dynamic_shared_memory, block->dynamic, dynamic_shared_bytes);
}
UNWATCHED static Block* block_after(Block* from) {  // that has not ended
    do {
        if (++from == blocks + cluster_size) {
            if (progress == progress_of_round) give_up("a barrier that not every thread reaches");
            progress_of_round = progress;
            from = blocks;
        }
    } while (from->ended);
    return from;
}
// To the next fiber that is not done, in order, and when none of the block gets on, to the next block of the cluster; the caller goes on when its turn comes again.
UNWATCHED static void next_fiber() {
    Fiber* from = self;
    int i = (int)(from - block->fibers);
    do {
        if (++i == fiber_count) {
            i = 0;
            if (progress == progress_of_lap) {
                Block* next = block_after(block);
                if (next != block) enter_block(next);
            }
            progress_of_lap = progress;
        }
    } while (block->fibers[i].done);
    self = &block->fibers[i];
    if (self != from) switch_stack(&from->stack_pointer, self->stack_pointer);
}
UNWATCHED static void gate_wait(Gate& gate, int expected) {
    const unsigned turn = gate.turn;
    ++progress;
    if (++gate.arrived == expected) { gate.arrived = 0; ++gate.turn; return; }
    while (gate.turn == turn) next_fiber();
    ++progress;
}
// To the next fiber of the same warp, and when none of them gets on, to whichever comes next.
UNWATCHED static void next_of_warp() {
    Fiber* from = self;
    const int first = (int)(from - block->fibers) & ~31;
    int i = (int)(from - block->fibers);
    do {
        if (++i == first + 32 || i == fiber_count) {
            i = first;
            if (progress == progress_of_warp) { next_fiber(); return; }
            progress_of_warp = progress;
        }
    } while (block->fibers[i].done);
    self = &block->fibers[i];
    if (self != from) switch_stack(&from->stack_pointer, self->stack_pointer);
}
UNWATCHED static void warp_wait() {
    Warp& w = *self->warp;
    const unsigned turn = w.turn;
    ++progress;
    if (++w.arrived == w.alive) { w.arrived = 0; ++w.turn; return; }
    while (w.turn == turn) warps_run_ahead ? next_of_warp() : next_fiber();
    ++progress;
}
UNWATCHED static void fiber_main() {
    current_kernel(current_parameters);
    Fiber* me = self;
    if (me->copies.landed < me->copies.count) give_up("a thread ends with copies under way");
    if (me->at_cluster) give_up("a thread ends that has arrived at the cluster's barrier and did not wait");
    watch_thread_end();
    me->done = true;
    ++progress;
    --block->alive;
    if (--me->warp->alive > 0 && me->warp->arrived == me->warp->alive) { me->warp->arrived = 0; ++me->warp->turn; }
    if (block->alive == 0) {
        if (block->copy_count) give_up("a block ends with bulk copies under way");
        block->ended = true;
        watch_block_end();
        if (--blocks_alive == 0) switch_stack(&me->stack_pointer, scheduler_stack);
        enter_block(block_after(block));
        int i = 0;
        while (block->fibers[i].done) ++i;
        self = &block->fibers[i];
        switch_stack(&me->stack_pointer, self->stack_pointer);
    }
    if (block->gates[0].arrived == block->alive) { block->gates[0].arrived = 0; ++block->gates[0].turn; }
    next_fiber();
}
UNWATCHED static void prepare_block(Block& b, Index3 index) {
    const size_t size = 128 << 10;
    b.index = index;
    b.begun = b.ended = b.early = false;
    b.copy_count = 0;
    memset(b.gates, 0, sizeof b.gates);
    b.alive = fiber_count;
    for (int i = 0; i < fiber_count; ++i) {
        Fiber& f = b.fibers[i];
        if (!f.stack) f.stack = (char*)malloc(size);
        f.thread = {(unsigned)(last_warp_first ? fiber_count - 32 - (i & ~31) + (i & 31) : i), 0, 0};
        f.lane = i & 31;
        f.warp = &b.warps[i >> 5];
        f.done = f.at_cluster = false;
        f.cluster_turn = 0;
        f.waited = !watch.overlapped;
        f.copies.count = f.copies.landed = 0;
        f.copies.group = 0;
        if (f.lane == 0) { f.warp->alive = 0; f.warp->arrived = 0; f.warp->turn = 0; }
        ++f.warp->alive;
        uintptr_t top = ((uintptr_t)f.stack + size) & ~(uintptr_t)15;
        void** sp = (void**)(top - 8);
        *--sp = (void*)fiber_main;
        for (int r = 0; r < 6; ++r) *--sp = nullptr;
        f.stack_pointer = sp;
    }
    if (cluster_size > 1) {
        if (!b.shared) b.shared = (char*)malloc(static_shared_bytes());
        if (!b.dynamic) b.dynamic = (char*)malloc(sizeof dynamic_shared_memory);
        memset(b.shared, 0xff, static_shared_bytes());
        memset(b.dynamic, 0xff, dynamic_shared_bytes);
    }
}
// `cluster`: blocks side by side that run together.
extern "C" UNWATCHED void emulate_launch(void (*kernel)(void**), unsigned gx, unsigned gy, unsigned gz, unsigned threads, unsigned shared, unsigned cluster, int order, void** parameters) {
    gridDim = {gx, gy, gz};
    blockDim = {threads, 1, 1};
    copies_late = order & 1;
    warps_run_ahead = order >> 1 & 1;
    last_warp_first = order >> 2 & 1;
    current_kernel = kernel;
    current_parameters = parameters;
    fiber_count = (int)threads;
    cluster_size = (int)cluster;
    dynamic_shared_bytes = shared;
    for (unsigned z = 0; z < gz; ++z)
        for (unsigned y = 0; y < gy; ++y)
            for (unsigned x = 0; x < gx; x += cluster) {
                for (unsigned i = 0; i < cluster; ++i) prepare_block(blocks[i], {x + i, y, z});
                blocks_alive = cluster_size;
                cluster_gate = {0, 0};
                progress_of_lap = progress_of_round = ++progress;
                block = blocks;
                block->begun = true;
                blockIdx = block->index;
                memset(__start_emulated_shared, 0xff, static_shared_bytes());
                memset(dynamic_shared_memory, 0xff, shared);
                watch_block();
                self = &block->fibers[0];
                switch_stack(&scheduler_stack, self->stack_pointer);
            }
}
extern "C" unsigned emulate_condition(unsigned handle) { return conditionals[handle]; }

static inline void __syncthreads() { gate_wait(block->gates[0], block->alive); }
#define BARRIER(id, threads) gate_wait(block->gates[id], threads)
static inline void __syncwarp(unsigned = 0) { warp_wait(); }
static inline void __threadfence_system() {}
template <class T> UNWATCHED static T exchange(T value, int from) {
    Warp& w = *self->warp;
    const int side = w.turn & 1;
    memcpy(&w.word[side][self->lane], &value, sizeof value);
    warp_wait();
    memcpy(&value, &w.word[side][from & 31], sizeof value);
    return value;
}
template <class T> static T __shfl_xor_sync(unsigned, T value, int mask) { return exchange(value, self->lane ^ mask); }
template <class T> static T __shfl_sync(unsigned, T value, int from) { return exchange(value, from); }
template <class T> static T __shfl_up_sync(unsigned, T value, int by) { return exchange(value, self->lane >= by ? self->lane - by : self->lane); }
UNWATCHED static inline unsigned __ballot_sync(unsigned, bool value) {
    Warp& w = *self->warp;
    const int side = w.turn & 1;
    w.word[side][self->lane] = value;
    warp_wait();
    unsigned mask = 0;
    for (int i = 0; i < 32; ++i) mask |= (unsigned)(w.word[side][i] & 1) << i;
    return mask;
}
template <class T> UNWATCHED static T reduced(T value, bool least) {
    Warp& w = *self->warp;
    const int side = w.turn & 1;
    memcpy(&w.word[side][self->lane], &value, sizeof value);
    warp_wait();
    for (int i = 0; i < 32; ++i) {
        T other;
        memcpy(&other, &w.word[side][i], sizeof other);
        if (least ? other < value : other > value) value = other;
    }
    return value;
}
UNWATCHED static inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    Warp& w = *self->warp;
    const int side = w.turn & 1;
    w.word[side][self->lane] = value;
    warp_wait();
    unsigned sum = 0;
    for (int i = 0; i < 32; ++i) sum += (unsigned)w.word[side][i];
    return sum;
}
static inline unsigned __reduce_max_sync(unsigned, unsigned value) { return reduced(value, false); }
static inline unsigned __reduce_min_sync(unsigned, unsigned value) { return reduced(value, true); }
template <class T> UNWATCHED static T atomicAdd(T* at, T value) {
    saw_write(at, sizeof *at, true);
    const T old = *at;
    *at = old + value;
    return old;
}
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline unsigned __float_as_uint(float v) { unsigned u; memcpy(&u, &v, 4); return u; }
static inline float __uint_as_float(unsigned u) { float v; memcpy(&v, &u, 4); return v; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)(((unsigned __int128)a * b) >> 64); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline void cudaGraphSetConditional(unsigned long long handle, unsigned value) { conditionals[handle] = value; }

// -- what common.cuh does with machine instructions
struct alignas(16) U4 { unsigned x, y, z, w; };
struct alignas(8) U2 { unsigned x, y; };
struct alignas(16) F4 { float x, y, z, w; };
static inline unsigned long long clock_ns() { static unsigned long long t = 0; return t += 32; }
static inline unsigned round_bf16(float v) {
    unsigned u = __float_as_uint(v);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
static inline unsigned pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
UNWATCHED static inline void mma(float* c, const unsigned* a, unsigned b0, unsigned b1) {
    Warp& w = *self->warp;
    const int side = w.turn & 1, g = self->lane >> 2, t = self->lane & 3;
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) w.a[side][g + (i & 1) * 8][2 * t + (i >> 1) * 8 + j] = __uint_as_float(j ? a[i] & 0xffff0000u : a[i] << 16);
    for (int j = 0; j < 2; ++j) {
        w.b[side][g][2 * t + j] = __uint_as_float(j ? b0 & 0xffff0000u : b0 << 16);
        w.b[side][g][2 * t + 8 + j] = __uint_as_float(j ? b1 & 0xffff0000u : b1 << 16);
    }
    warp_wait();
    for (int i = 0; i < 4; ++i) {
        const float *p = w.a[side][g + (i >> 1) * 8], *q = w.b[side][2 * t + (i & 1)];
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += p[k] * q[k];
        c[i] += sum;
    }
}
static inline void mma_first(float* c, const unsigned* a, unsigned b0, unsigned b1) {
    for (int i = 0; i < 4; ++i) c[i] = 0.0f;
    mma(c, a, b0, b1);
}
template <int TOKENS> static inline void warpgroup_mma_any(float (*c)[4], const unsigned* a, const unsigned short* tile, int step) {
    Warp& w = *self->warp;
    const int side = w.turn & 1, g = self->lane >> 2, t = self->lane & 3;
    if ((uintptr_t)tile & 1023) give_up("a swizzled tile must start at 1,024 bytes");
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) w.a[side][g + (i & 1) * 8][2 * t + (i >> 1) * 8 + j] = __uint_as_float(j ? a[i] & 0xffff0000u : a[i] << 16);
    warp_wait();
    for (int n = 0; n < TOKENS / 8; ++n)
        for (int i = 0; i < 4; ++i) {
            const float* p = w.a[side][g + (i >> 1) * 8];
            const int token = 8 * n + 2 * t + (i & 1);
            float sum = 0.0f;
            for (int k = 0; k < 16; ++k) {
                const int column = 16 * step + k, piece = (column >> 3) ^ (token & 7);
                sum += p[k] * __uint_as_float((unsigned)tile[token * 64 + piece * 8 + (column & 7)] << 16);
            }
            c[n][i] += sum;
        }
}
static inline void warpgroup_mma(float (*c)[4], const unsigned* a, const unsigned short* tile, int step) { warpgroup_mma_any<128>(c, a, tile, step); }
static inline void warpgroup_mma_256(float (*c)[4], const unsigned* a, const unsigned short* tile, int step) { warpgroup_mma_any<256>(c, a, tile, step); }
static inline float swizzled(const unsigned short* tile, int row, int column) { return __uint_as_float((unsigned)tile[row * 64 + ((column >> 3) ^ (row & 7)) * 8 + (column & 7)] << 16); }
static inline void warpgroup_scores(float (*d)[4], const unsigned short* a_tile, const unsigned short* b_tile, int step) {
    const int g = self->lane >> 2, t = self->lane & 3, warp = (self->thread.x >> 5) & 3;
    if (((uintptr_t)a_tile | (uintptr_t)b_tile) & 1023) give_up("a swizzled tile must start at 1,024 bytes");
    for (int n = 0; n < 4; ++n)
        for (int i = 0; i < 4; ++i) {
            float sum = 0.0f;
            for (int k = 16 * step; k < 16 * step + 16; ++k) sum += swizzled(a_tile, 16 * warp + g + (i >> 1) * 8, k) * swizzled(b_tile, 8 * n + 2 * t + (i & 1), k);
            d[n][i] += sum;
        }
}
static inline void warpgroup_mix(float (*c)[4], const unsigned* a, const unsigned short* tile, int step) {
    Warp& w = *self->warp;
    const int side = w.turn & 1, g = self->lane >> 2, t = self->lane & 3;
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) w.a[side][g + (i & 1) * 8][2 * t + (i >> 1) * 8 + j] = __uint_as_float(j ? a[i] & 0xffff0000u : a[i] << 16);
    warp_wait();
    for (int n = 0; n < 8; ++n)
        for (int i = 0; i < 4; ++i) {
            float sum = 0.0f;
            for (int k = 0; k < 16; ++k) sum += w.a[side][g + (i >> 1) * 8][k] * swizzled(tile, 16 * step + k, 8 * n + 2 * t + (i & 1));
            c[n][i] += sum;
        }
}
static inline void settle(float*, int) {}
static inline void warpgroup_begin() {}
static inline void warpgroup_commit() {}
static inline void warpgroup_wait() {}
static inline void shared_to_tensor_cores() {}
UNWATCHED static inline void gather_matrices(unsigned* r, const unsigned short* row, bool transposed) {
    Warp& w = *self->warp;
    const int side = w.turn & 1, g = self->lane >> 2, t = self->lane & 3;
    if ((uintptr_t)row & 15) give_up("unaligned matrix row");
    w.address[side][self->lane] = row;
    warp_wait();
    for (int m = 0; m < 4; ++m) {
        auto at = [&](int i, int j) { return (unsigned)((const unsigned short*)w.address[side][8 * m + i])[j]; };
        r[m] = transposed ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
    }
}
static inline void load_matrices(unsigned* r, const unsigned short* row) { gather_matrices(r, row, false); }
static inline void load_matrices_transposed(unsigned* r, const unsigned short* row) { gather_matrices(r, row, true); }
static void land(const Copy& c) {
    if (c.from) memcpy(c.to, c.from, c.bytes);
    else memset(c.to, 0, c.bytes);
}
static void copy_later(void* to, const void* from, unsigned bytes) {
    if (((uintptr_t)to | (uintptr_t)from) & (bytes - 1)) give_up("a copy from or to an odd place");
    if (from) saw_read(from, bytes);
    Copies& q = self->copies;
    if (!copies_late) { land({to, from, bytes, 0}); return; }
    if (q.count == q.room) q.made = (Copy*)realloc(q.made, sizeof(Copy) * (q.room = 2 * q.room + 64));
    q.made[q.count++] = {to, from, bytes, q.group};
}
UNWATCHED static void copies_wait_for(unsigned left) {  // all groups but the last `left`; what is not committed is not waited for
    Copies& q = self->copies;
    while (q.landed < q.count && q.made[q.landed].group + left < q.group) land(q.made[q.landed++]);
    if (q.landed == q.count) q.landed = q.count = 0;
}
static inline void copy16_async(void* to, const void* from, bool there) { copy_later(to, there ? from : nullptr, 16); }
typedef char* SharedAt;
static inline SharedAt shared_at(const void* p) { return (char*)p; }
static inline void copy16_at(SharedAt to, const void* from) { copy_later(to, from, 16); }
static inline void copy8_at(SharedAt to, const void* from) { copy_later(to, from, 8); }
static inline U4 load16_at(SharedAt at) { return *(const U4*)at; }
static inline U2 load8_at(SharedAt at) { return *(const U2*)at; }
static inline void copies_commit() { ++self->copies.group; }
template <int LEFT> static inline void copies_wait() { copies_wait_for(LEFT); }
template <int COUNT> static inline void fewer_registers() {}
template <int COUNT> static inline void more_registers() {}
// A barrier in shared memory: arrivals and bytes still missing in this phase.
struct alignas(64) TensorMap { unsigned long long address; long long row_bytes, rows, box_rows; unsigned long long rest[12]; };
struct Barrier { unsigned char parity, arrivals; short missing; int bytes; };
static inline Barrier& barrier_at(unsigned long long* at) { return *(Barrier*)at; }
static inline void barrier_step(Barrier& b) {
    if (b.missing || b.bytes) return;
    b.parity ^= 1;
    b.missing = b.arrivals;
}
static inline void barrier_init(unsigned long long* at, int arrivals) { barrier_at(at) = {0, (unsigned char)arrivals, (short)arrivals, 0}; }
static inline void barriers_ready() {}
static inline void barrier_arrive(unsigned long long* at) {
    Barrier& b = barrier_at(at);
    if (b.missing == 0) give_up("one arrival too many at a barrier");
    --b.missing;
    barrier_step(b);
}
static inline void barrier_expect(unsigned long long* at, unsigned bytes) { barrier_at(at).bytes += bytes; barrier_arrive(at); }
static void land(const BulkCopy& c) {
    if (!c.map) memcpy(c.to, c.from ? c.from : c.sent, c.bytes);
    else
        for (int r = 0; r < c.map->box_rows; ++r)
            for (int piece = 0; piece < 8; ++piece) {
                char* into = c.to + 128 * r + 16 * (piece ^ (r & 7));
                const long long from = 2ll * c.column + 16 * piece;
                if (c.row + r < c.map->rows && from < c.map->row_bytes) memcpy(into, (const char*)c.map->address + (c.row + r) * c.map->row_bytes + from, 16);
                else memset(into, 0, 16);
            }
    Barrier& b = barrier_at(c.at);
    b.bytes -= (int)c.bytes;
    barrier_step(b);
}
static void copy_on_its_way(Block& to, const BulkCopy& c) {
    if (to.copy_count == 1024) give_up("too many bulk copies under way");
    to.copies[to.copy_count++] = c;
}
static void bulk_copy_later(const BulkCopy& c) {
    if (!c.map) saw_read(c.from, c.bytes);
    else
        for (int r = 0; r < c.map->box_rows && c.row + r < c.map->rows; ++r)
            for (int at = 2 * c.column; at < 2 * c.column + 128 && at < c.map->row_bytes; at += 16) saw_read((const char*)c.map->address + (c.row + r) * c.map->row_bytes + at, 16);
    if (copies_late) copy_on_its_way(*block, c);
    else land(c);
}
static inline void barrier_wait(unsigned long long* at, unsigned parity) {
    ++progress;
    while (barrier_at(at).parity == parity) {
        int left = 0;
        for (int i = 0, count = block->copy_count; i < count; ++i) {
            if (block->copies[i].at == at) land(block->copies[i]);
            else block->copies[left++] = block->copies[i];
        }
        block->copy_count = left;
        if (barrier_at(at).parity == parity) next_fiber();
    }
    ++progress;
}
static inline void bulk_copy(void* to, const void* from, unsigned bytes, unsigned long long* at) {
    if (((uintptr_t)to | (uintptr_t)from | bytes) & 15) give_up("a bulk copy moves multiples of 16 bytes");
    bulk_copy_later({(char*)to, (const char*)from, bytes, nullptr, 0, 0, at});
}
static inline void tile_copy(void* to, const TensorMap* map, int column, int row, unsigned long long* at) {
    if ((uintptr_t)to & 1023) give_up("a swizzled tile must start at 1,024 bytes");
    bulk_copy_later({(char*)to, nullptr, (unsigned)(128 * map->box_rows), map, column, row, at});
}
// Clusters. A place in the shared memory of another block lies in what was put aside of it.
UNWATCHED static inline void cluster_arrive() {
    if (self->at_cluster) give_up("a thread arrives twice at the cluster's barrier");
    self->at_cluster = true;
    ++progress;
    if (++cluster_gate.arrived == cluster_size * fiber_count) { cluster_gate.arrived = 0; ++cluster_gate.turn; }
}
UNWATCHED static inline void cluster_wait() {
    if (!self->at_cluster) give_up("a thread waits at the cluster's barrier and has not arrived");
    while (cluster_gate.turn == self->cluster_turn) next_fiber();
    ++self->cluster_turn;
    self->at_cluster = false;
    ++progress;
}
UNWATCHED static char* in_block(const void* mine, const Block& other) {
    const size_t at = (const char*)mine - __start_emulated_shared, from_dynamic = (const char*)mine - dynamic_shared_memory;
    if (at < static_shared_bytes()) return &other == block ? (char*)mine : other.shared + at;
    if (from_dynamic >= dynamic_shared_bytes) give_up("a place in another block that is not in shared memory");
    return &other == block ? (char*)mine : other.dynamic + from_dynamic;
}
UNWATCHED static void send(void* to, const void* from, unsigned bytes, unsigned long long* barrier, int number) {
    if (cluster_size < 2) give_up("a message of a block that is launched without a cluster");  // on a GPU an illegal instruction
    if (number < 0 || number >= cluster_size) give_up("a block that is not in the cluster");
    Block& other = blocks[number];
    if (other.ended) give_up("the shared memory of a block that has ended");
    if (!other.begun || self->cluster_turn == 0) give_up("the shared memory of a block that may not have begun");
    if ((uintptr_t)to & (bytes - 1)) give_up("a message to an odd place");
    BulkCopy c = {(char*)to, nullptr, bytes, nullptr, 0, 0, barrier};
    memcpy(c.sent, from, bytes);
    if (copies_late) copy_on_its_way(other, c);
    else {
        c.to = in_block(to, other);
        c.at = (unsigned long long*)in_block(barrier, other);
        land(c);
    }
    ++progress;
}
static inline void send16(void* to, const F4& v, unsigned long long* barrier, int block) { send(to, &v, 16, barrier, block); }
static inline void send4(void* to, float v, unsigned long long* barrier, int block) { send(to, &v, 4, barrier, block); }
static inline void barrier_wait_sent(unsigned long long* at, unsigned parity) { barrier_wait(at, parity); }
static inline void prefetch_l2(const void* at) { saw_read(at, 1); }
template <int I> static inline unsigned int4_pair(unsigned word) {
    return pack_bf16((float)((int)(word >> (4 * I) & 15) - 8), (float)((int)(word >> (4 * I + 16) & 15) - 8));
}
static inline void int8_pairs(unsigned word, unsigned& first, unsigned& second) {
    first = pack_bf16((float)(int8_t)word, (float)(int8_t)(word >> 8));
    second = pack_bf16((float)(int8_t)(word >> 16), (float)(int8_t)(word >> 24));
}
static inline unsigned scaled_pair(unsigned pair, unsigned scale) {
    return pack_bf16(__uint_as_float(pair << 16) * __uint_as_float(scale << 16), __uint_as_float(pair & 0xffff0000u) * __uint_as_float(scale & 0xffff0000u));
}
static inline float e4m3(unsigned byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float v = exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    return byte & 0x80 ? -v : v;
}
static inline void fp8_pairs(unsigned word, unsigned& first, unsigned& second) {
    first = pack_bf16(e4m3(word & 255), e4m3(word >> 8 & 255));
    second = pack_bf16(e4m3(word >> 16 & 255), e4m3(word >> 24));
}

// -- calling a kernel with CUDA's array of parameter addresses
template <size_t... I> struct Numbers {};
template <size_t N, size_t... I> struct Count : Count<N - 1, N - 1, I...> {};
template <size_t... I> struct Count<0, I...> { typedef Numbers<I...> type; };
template <class... A, size_t... I> static void call_numbered(void (*f)(A...), void** p, Numbers<I...>) { f(*(A*)p[I]...); }
template <class... A> static void call_kernel(void (*f)(A...), void** p) { call_numbered(f, p, typename Count<sizeof...(A)>::type()); }
