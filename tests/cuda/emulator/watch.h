// Watches what kernels read and write of device memory (see watched_device.py). In a library built with -fsanitize=thread every access of a kernel calls one of
// the functions at the end; nothing of that library is linked. In others only copies call them, and there is nothing to watch.
// Device memory is one arena, and each of its bytes knows the launch and block that wrote it last, and that read it last.
// Faults between launches: a thread of an overlapped launch that has not passed its wait may read nothing that launch `young` or a later one wrote, write nothing,
// and not end. Faults between blocks of a launch, which run in any order: one reads or writes what another one has written, or writes what another one has read.
// The blocks of a cluster count as one: they wait for each other.
enum { EARLY_READ, EARLY_WRITE, NO_WAIT, READ_OTHERS, WRITE_OTHERS, OVERWRITE };
struct Fault { unsigned kind, launch, writer, block, thread, bytes; unsigned long long at, times; };
struct Access { unsigned launch, block; };
#define MANY 0xffffffffu  // blocks of the launch
struct Watch {
    uintptr_t begin;
    size_t size;
    Access *writer, *reader;
    unsigned launch, young, block;
    bool overlapped, deaf;  // deaf: the kernel's waits do not count, as if it had none
    unsigned late_blocks;
    Fault faults[32];
    unsigned fault_count;
};
static Watch watch;
#define UNWATCHED __attribute__((no_sanitize("thread")))

UNWATCHED static void fault(unsigned kind, unsigned writer, size_t at, size_t bytes) {
    for (unsigned i = 0; i < watch.fault_count; ++i) {
        Fault& f = watch.faults[i];
        if (f.kind == kind && f.launch == watch.launch && f.writer == writer) { ++f.times; return; }
    }
    if (watch.fault_count == 32) return;
    watch.faults[watch.fault_count++] = {kind, watch.launch, writer, watch.block, self->thread.x, (unsigned)bytes, watch.begin + at, 1};
}
UNWATCHED static void saw_read_at(size_t at, size_t bytes) {
    for (size_t i = at; i < at + bytes; ++i) {
        const Access by = watch.writer[i];
        Access& reader = watch.reader[i];
        if (!self->waited && by.launch >= watch.young && by.launch < watch.launch) { fault(EARLY_READ, by.launch, i, bytes); return; }
        if (by.launch == watch.launch && by.block != watch.block) { fault(READ_OTHERS, 0, i, bytes); return; }
        if (reader.launch != watch.launch) reader = {watch.launch, watch.block};
        else if (reader.block != watch.block) reader.block = MANY;
    }
}
UNWATCHED static void saw_write_at(size_t at, size_t bytes, bool atomic) {
    if (!self->waited) fault(EARLY_WRITE, 0, at, bytes);
    for (size_t i = at; i < at + bytes; ++i) {
        Access &by = watch.writer[i], &reader = watch.reader[i];
        if (by.launch == watch.launch && by.block != watch.block && !(atomic && by.block == MANY)) fault(WRITE_OTHERS, 0, i, bytes);
        else if (reader.launch == watch.launch && reader.block != watch.block) fault(OVERWRITE, 0, i, bytes);
        by = {watch.launch, atomic ? MANY : watch.block};
    }
}
// Shared memory, stacks and parameters are not in the arena.
UNWATCHED __attribute__((always_inline)) static inline void saw_read(const void* p, size_t bytes) {
    const size_t at = (uintptr_t)p - watch.begin;
    if (at < watch.size) saw_read_at(at, bytes);
}
UNWATCHED __attribute__((always_inline)) static inline void saw_write(const void* p, size_t bytes, bool atomic = false) {
    const size_t at = (uintptr_t)p - watch.begin;
    if (at < watch.size) saw_write_at(at, bytes, atomic);
}
UNWATCHED static void watch_block() { watch.block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }  // of a cluster the first
UNWATCHED static void watch_block_end() { watch.late_blocks += !block->early; }
UNWATCHED static void watch_thread_end() { if (!self->waited) fault(NO_WAIT, 0, 0, 0); }
UNWATCHED static void wait_before() {
    if (!watch.deaf) self->waited = true;
    asm volatile("" ::: "memory");
}
// A block counts as one that lets the next kernel start early when any of its threads says so before it has waited.
UNWATCHED static void let_next_start() {
    if (!self->waited) block->early = true;
    asm volatile("" ::: "memory");
}
#define WAIT_BEFORE() do { wait_before(); let_next_start(); } while (0)
#define LET_NEXT_START() let_next_start()

// Of the next launch. begin .. size: the arena; writer, reader: one of them for each of its bytes; young: the first launch whose writes it may not rely on before
// its wait, 0: an ordinary launch.
extern "C" UNWATCHED void emulate_watched(void* begin, size_t size, Access* writer, Access* reader, unsigned launch, unsigned young, int deaf) {
    watch.begin = (uintptr_t)begin;
    watch.size = size;
    watch.writer = writer;
    watch.reader = reader;
    watch.launch = launch;
    watch.young = young;
    watch.overlapped = young != 0;
    watch.deaf = deaf;
    watch.late_blocks = 0;
}
// Whether every block of the last launch let the next one start before it had waited.
extern "C" UNWATCHED int emulate_was_early() { return watch.late_blocks == 0; }
extern "C" UNWATCHED unsigned emulate_faults(Fault* to) {
    const unsigned count = watch.fault_count;
    memcpy(to, watch.faults, count * sizeof(Fault));
    watch.fault_count = 0;
    return count;
}

#define HOOKS(bytes)                                                                            \
    extern "C" UNWATCHED void __tsan_read##bytes(void* p) { saw_read(p, bytes); }               \
    extern "C" UNWATCHED void __tsan_write##bytes(void* p) { saw_write(p, bytes); }             \
    extern "C" UNWATCHED void __tsan_unaligned_read##bytes(void* p) { saw_read(p, bytes); }     \
    extern "C" UNWATCHED void __tsan_unaligned_write##bytes(void* p) { saw_write(p, bytes); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
extern "C" UNWATCHED void __tsan_read_range(void* p, size_t bytes) { saw_read(p, bytes); }
extern "C" UNWATCHED void __tsan_write_range(void* p, size_t bytes) { saw_write(p, bytes); }
extern "C" UNWATCHED void __tsan_init() {}
extern "C" UNWATCHED void __tsan_func_entry(void*) {}
extern "C" UNWATCHED void __tsan_func_exit() {}
