// Shared by every kernel file: number formats, warp helpers, tensor-core fragments. Compile-time sizes come from the command line:
// HIDDEN (hidden size), SITE_BLOCKS (blocks that share a row of a site in passes of few rows), HC (residual streams),
// KDA_D (KDA head dim), CONV (taps), HEADS, LATENT (latent width, padded to 64), MAX_ROWS (largest decode bucket),
// FORMATS (bit f: the model has matrices of format f), EXACT (products of many rows on bf16 pairs too).
// GLM_EMULATE replaces the few machine-specific parts by plain C++ of the same meaning.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL extern "C" __global__ void
#define NEG_INF (-3.402823466e38f)

#ifndef GLM_EMULATE
struct alignas(16) U4 { u32 x, y, z, w; };
struct alignas(8) U2 { u32 x, y; };
struct alignas(16) F4 { float x, y, z, w; };
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) char dynamic_shared_bytes[]; type* name = (type*)dynamic_shared_bytes
#define BARRIER(id, threads) asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory")

// Dependent launch: a kernel may start while the one before it still runs; what that one wrote is there after WAIT_BEFORE, which every kernel
// passes before it reads or writes anything but weights.
#define WAIT_BEFORE() do { asm volatile("griddepcontrol.wait;" ::: "memory"); asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); } while (0)
// Where the next kernel reads before its wait nothing but weights, and what is older than the last kernel ahead of it that does not say this, it may start
// before this one has waited. tests/test_cuda_order.py finds those that read more.
#define LET_NEXT_START() asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
__device__ __forceinline__ u64 clock_ns() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {  // c[16x8] += a[16x16] b[16x8], bf16 in, float32 out
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_first(float* c, const u32* a, u32 b0, u32 b1) {  // c = a b
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
                 : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
__device__ __forceinline__ void load_matrices(u32* r, const u16* row) {  // four 8x8 matrices; lane l gives row l % 8 of matrix l / 8
    u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void load_matrices_transposed(u32* r, const u16* row) {
    u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void copy16_async(void* shared, const void* global, bool there) {  // zeros when not there
    u32 at = (u32)__cvta_generic_to_shared(shared);
    int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(global), "r"(bytes) : "memory");
}
// A place in shared memory in the form in which the machine takes it.
typedef u32 SharedAt;
__device__ __forceinline__ SharedAt shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16_at(SharedAt to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
__device__ __forceinline__ void copy8_at(SharedAt to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory"); }
__device__ __forceinline__ U4 load16_at(SharedAt at) {
    U4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ U2 load8_at(SharedAt at) {
    U2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// Registers a thread of a warpgroup may hold from here on: those that copy leave theirs to those that multiply.
template <int COUNT> __device__ __forceinline__ void fewer_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT> __device__ __forceinline__ void more_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
// Copies that the copy engine makes and that count their bytes at a barrier in shared memory: tensor cores read what it wrote without a fence.
struct alignas(64) TensorMap { u64 opaque[16]; };
__device__ __forceinline__ void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"((u32)__cvta_generic_to_shared(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {  // arrives, and adds bytes to wait for
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {  // until the phase of this parity is over
    asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra OVER;\nbra AGAIN;\nOVER:\n}"
                 ::"r"((u32)__cvta_generic_to_shared(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(global), "r"(bytes), "r"((u32)__cvta_generic_to_shared(barrier)) : "memory");
}
// Blocks of a cluster send values into each other's shared memory, counted in bytes at a barrier there: none before all have begun, which is so behind
// `cluster_wait`, and none to a block that has ended, which none does before it has all that is sent to it.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ u32 in_block(const void* mine, int block) {  // the place in that block's shared memory
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((u32)__cvta_generic_to_shared(mine)), "r"(block));
    return there;
}
__device__ __forceinline__ void send16(void* to, const F4& v, u64* barrier, int block) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(in_block(to, block)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(in_block(barrier, block)) : "memory");
}
__device__ __forceinline__ void send4(void* to, float v, u64* barrier, int block) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(in_block(to, block)), "f"(v), "r"(in_block(barrier, block)) : "memory");
}
__device__ __forceinline__ void barrier_wait_sent(u64* barrier, u32 parity) {  // as barrier_wait, for what blocks of the cluster send
    asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@done bra OVER;\nbra AGAIN;\nOVER:\n}"
                 ::"r"((u32)__cvta_generic_to_shared(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
// The map's box of rows x 64 bf16 columns from (row, column) on, swizzled as the tensor cores want it; zeros beyond the array.
__device__ __forceinline__ void tile_copy(void* shared, const TensorMap* map, int column, int row, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(map), "r"(column), "r"(row), "r"((u32)__cvta_generic_to_shared(barrier)) : "memory");
}

// c[64x128] += a[64x16] b[16x128] by four warps, each its own 16 rows: a in registers as for `mma`, b = 128 tokens of a [token][64] bf16 tile in shared
// memory with 128-byte rows whose 16-byte pieces are swizzled by the token (piece ^ token % 8); step = which 16 of the 64 columns.
__device__ __forceinline__ void warpgroup_mma(float (*c)[4], const u32* a, const u16* tile, int step) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const u64 at = (u64)__cvta_generic_to_shared(tile) + 32 * step, b = (at >> 4 & 0x3fff) | (1ull << 16) | (64ull << 32) | (1ull << 62);
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]),
          "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
          "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
          "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
          "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),
          "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]),
          "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]),
          "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]),
          "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]),
          "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]),
          "+f"(c[11][0]), "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3]),
          "+f"(c[12][0]), "+f"(c[12][1]), "+f"(c[12][2]), "+f"(c[12][3]),
          "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]), "+f"(c[13][3]),
          "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]),
          "+f"(c[15][0]), "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
// The same for 256 tokens: c[64x256].
__device__ __forceinline__ void warpgroup_mma_256(float (*c)[4], const u32* a, const u16* tile, int step) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const u64 at = (u64)__cvta_generic_to_shared(tile) + 32 * step, b = (at >> 4 & 0x3fff) | (1ull << 16) | (64ull << 32) | (1ull << 62);
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]),
          "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
          "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
          "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
          "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),
          "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]),
          "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]),
          "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]),
          "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]),
          "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]),
          "+f"(c[11][0]), "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3]),
          "+f"(c[12][0]), "+f"(c[12][1]), "+f"(c[12][2]), "+f"(c[12][3]),
          "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]), "+f"(c[13][3]),
          "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]),
          "+f"(c[15][0]), "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3]),
          "+f"(c[16][0]), "+f"(c[16][1]), "+f"(c[16][2]), "+f"(c[16][3]),
          "+f"(c[17][0]), "+f"(c[17][1]), "+f"(c[17][2]), "+f"(c[17][3]),
          "+f"(c[18][0]), "+f"(c[18][1]), "+f"(c[18][2]), "+f"(c[18][3]),
          "+f"(c[19][0]), "+f"(c[19][1]), "+f"(c[19][2]), "+f"(c[19][3]),
          "+f"(c[20][0]), "+f"(c[20][1]), "+f"(c[20][2]), "+f"(c[20][3]),
          "+f"(c[21][0]), "+f"(c[21][1]), "+f"(c[21][2]), "+f"(c[21][3]),
          "+f"(c[22][0]), "+f"(c[22][1]), "+f"(c[22][2]), "+f"(c[22][3]),
          "+f"(c[23][0]), "+f"(c[23][1]), "+f"(c[23][2]), "+f"(c[23][3]),
          "+f"(c[24][0]), "+f"(c[24][1]), "+f"(c[24][2]), "+f"(c[24][3]),
          "+f"(c[25][0]), "+f"(c[25][1]), "+f"(c[25][2]), "+f"(c[25][3]),
          "+f"(c[26][0]), "+f"(c[26][1]), "+f"(c[26][2]), "+f"(c[26][3]),
          "+f"(c[27][0]), "+f"(c[27][1]), "+f"(c[27][2]), "+f"(c[27][3]),
          "+f"(c[28][0]), "+f"(c[28][1]), "+f"(c[28][2]), "+f"(c[28][3]),
          "+f"(c[29][0]), "+f"(c[29][1]), "+f"(c[29][2]), "+f"(c[29][3]),
          "+f"(c[30][0]), "+f"(c[30][1]), "+f"(c[30][2]), "+f"(c[30][3]),
          "+f"(c[31][0]), "+f"(c[31][1]), "+f"(c[31][2]), "+f"(c[31][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
// d[64x32] += a[64x16] b[16x32]: both [row][64] bf16 tiles in shared memory, swizzled like those of warpgroup_mma.
__device__ __forceinline__ void warpgroup_scores(float (*d)[4], const u16* a_tile, const u16* b_tile, int step) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const u64 a_at = (u64)__cvta_generic_to_shared(a_tile) + 32 * step, a = (a_at >> 4 & 0x3fff) | (1ull << 16) | (64ull << 32) | (1ull << 62);
    const u64 b_at = (u64)__cvta_generic_to_shared(b_tile) + 32 * step, b = (b_at >> 4 & 0x3fff) | (1ull << 16) | (64ull << 32) | (1ull << 62);
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
        : "l"(a), "l"(b));
#endif
}
// c[64x64] += a[64x16] b[16x64]: a in registers, b = rows 16 step .. of a [row][64] bf16 tile in shared memory, swizzled as above: the tile transposed.
__device__ __forceinline__ void warpgroup_mix(float (*c)[4], const u32* a, const u16* tile, int step) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const u64 at = (u64)__cvta_generic_to_shared(tile) + 2048 * step, b = (at >> 4 & 0x3fff) | (512ull << 16) | (64ull << 32) | (1ull << 62);
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
// Sums are computed up to here: the compiler moves none of it between the products that follow.
__device__ __forceinline__ void settle(float* sums, int count) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
__device__ __forceinline__ void warpgroup_begin() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void warpgroup_commit() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void warpgroup_wait() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}
__device__ __forceinline__ void shared_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Pair i (0..3) of a word of eight 4-bit levels as two bf16: nibble i is the even column 2i, nibble i + 4 the odd column 2i + 1.
template <int I> __device__ __forceinline__ u32 int4_pair(u32 word) {
    u32 p, r;
    asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(p) : "r"(word >> (4 * I)));  // bf16 128 + level, masked and set at once
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(p), "r"(0x43084308u));
    return r;
}
__device__ __forceinline__ u32 int8_pair(u32 bytes) {  // two signed bytes in bits 0..7 and 16..23: 128 + the low seven bits, less 128, or 256 where the sign is set
    u32 low, less, r;
    asm("lop3.b32 %0, %1, 0x007f007f, 0x43004300, 0xea;" : "=r"(low) : "r"(bytes));
    asm("lop3.b32 %0, %1, 0x00800080, 0x43004300, 0xea;" : "=r"(less) : "r"(bytes));
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(low), "r"(less));
    return r;
}
__device__ __forceinline__ void int8_pairs(u32 word, u32& first, u32& second) {  // four signed bytes as 2 x two bf16
    first = int8_pair(__byte_perm(word, 0, 0x4140));
    second = int8_pair(__byte_perm(word, 0, 0x4342));
}
__device__ __forceinline__ u32 scaled_pair(u32 pair, u32 scale) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(scale));
    return r;
}
__device__ __forceinline__ u32 fp8_pair(u32 bytes) {  // two e4m3 bytes in bits 0..7 and 16..23 as two bf16: shift the fields, then times 2^120
    u32 fields = ((bytes & 0x00800080u) << 8) | ((bytes & 0x007f007fu) << 4), r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(fields), "r"(0x7b807b80u), "r"(0x80008000u));
    return r;
}
__device__ __forceinline__ void fp8_pairs(u32 word, u32& first, u32& second) {
    first = fp8_pair(__byte_perm(word, 0, 0x4140));
    second = fp8_pair(__byte_perm(word, 0, 0x4342));
}
#endif

__device__ __forceinline__ float bf16_value(u16 b) { return __uint_as_float((u32)b << 16); }
__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u16 to_bf16(float x) { return (u16)(pack_bf16(x, 0.0f) & 0xffffu); }

// Columns of a unit of 32 in the order in which the warpgroup product reads them: column 8t + 4s + 2h + j lies at 16s + 8h + 2t + j.
__device__ __forceinline__ long in_product_order(long at) {
    return (at & ~31l) | ((at & 4) << 2) | ((at & 2) << 2) | ((at >> 2) & 6) | (at & 1);
}
// A float32 as the sum of two bf16: 16 bits of mantissa survive. Without `low` (wide prompts) only the high part is stored, in product order.
__device__ __forceinline__ void store_split(u16* high, u16* low, long at, float x) {
    const u16 h = to_bf16(x);
    if (low) {
        high[at] = h;
        low[at] = to_bf16(x - bf16_value(h));
    } else high[in_product_order(at)] = h;
}
__device__ __forceinline__ float warp_sum(float v) {
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}
// Sum over a block of up to 1,024 threads (a multiple of 32), the same for all; `room` is 32 floats nobody else uses at the time.
__device__ __forceinline__ float block_sum(float v, float* room) {
    int warps = blockDim.x >> 5;
    v = warp_sum(v);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = v;
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < warps; ++w) total += room[w];
    return total;
}
// Unsigned numbers in the order of the floats.
__device__ __forceinline__ u32 ordered(float v) { u32 b = __float_as_uint(v); return b & 0x80000000u ? ~b : b | 0x80000000u; }
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float limit) { return silu(fminf(gate, limit)) * fminf(fmaxf(up, -limit), limit); }
