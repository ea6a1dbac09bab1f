// The two ends of a decode step that feeds itself: begin (the clock) and commit (ring, ends, parking, next inputs).
#ifndef GLM_EMULATE
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned int value);
#else
typedef u64 cudaGraphConditionalHandle;
#endif

#define STOPS 128
#define CLOCKS 8192
enum { LIVE = 0, STOP = 1, LENGTH = 2, CANCELLED = 3, PADDING = 4 };

// Device block of a decode batch, as the host uploads it; the layout is repeated in decode.py.
struct Control {
    int slot[MAX_ROWS], position[MAX_ROWS], live[MAX_ROWS], first[MAX_ROWS], token[MAX_ROWS], generation[MAX_ROWS], left[MAX_ROWS], counter[MAX_ROWS];
    int span_end[MAX_ROWS], spans[MAX_ROWS * 3], stop_count[MAX_ROWS], stops[MAX_ROWS * STOPS];
    float temperature[MAX_ROWS], top_p[MAX_ROWS];
    u64 seed[MAX_ROWS];
    int active, pad;
};
// Mapped host memory, shared with the host: head = steps committed; the rest is written by the host.
struct Shared { volatile u64 head; u64 pad0[7]; volatile u64 loop_end; u64 pad1[7]; volatile int stop; int pad2[15]; volatile int cancel[MAX_ROWS]; };

KERNEL step_begin(u64* clocks) {
    const u64 now = clock_ns();
    WAIT_BEFORE();
    if (threadIdx.x == 0) clocks[2 * (clocks[2 * CLOCKS] % CLOCKS)] = now;
}

// One block, a thread a row. Rows that end leave their logits in kept [slots][vocabulary]. clocks: [CLOCKS][2] begin and end of steps, then the step count. ring: [ring_steps][MAX_ROWS][4] = generation, position, token, end.
KERNEL commit(Control* control, Shared* shared, volatile int* ring, int ring_steps, u64* clocks, const int* chosen, int bucket, const float* logits, float* kept,
              int vocabulary) {
    __shared__ int parked[MAX_ROWS];
    WAIT_BEFORE();
    const int r = threadIdx.x;
    const u64 step = clocks[2 * CLOCKS];
    if (r < bucket) {
        int end = PADDING, token = 0, position = 0;
        if (r < control->active && control->live[r]) {
            token = chosen[r];
            position = control->position[r];
            end = LIVE;
#pragma unroll 8
            for (int i = 0; i < control->stop_count[r]; ++i)
                if (control->stops[r * STOPS + i] == token) end = STOP;
            if (end == LIVE && control->left[r] <= 1) end = LENGTH;
            if (shared->cancel[r] == control->generation[r]) end = CANCELLED;
            control->left[r] -= 1;
            control->counter[r] += 1;
            if (end == LIVE) {
                control->token[r] = token;
                control->position[r] = position + 1;
                control->span_end[r] = position + 2;
            } else control->live[r] = 0;
        }
        volatile int* to = ring + ((step % ring_steps) * MAX_ROWS + r) * 4;
        parked[r] = end == LIVE || end == PADDING ? -1 : control->slot[r];
        to[0] = r < control->active ? control->generation[r] : 0; to[1] = position; to[2] = token; to[3] = end;
        __threadfence_system();
    }
    __syncthreads();
    for (int row = 0; row < bucket; ++row)
        if (parked[row] >= 0)
            for (int i = threadIdx.x; i < vocabulary; i += blockDim.x) kept[(size_t)parked[row] * vocabulary + i] = logits[(size_t)row * vocabulary + i];
    if (r == 0) {
        clocks[2 * CLOCKS] = step + 1;
        __threadfence_system();
        shared->head = step + 1;
        clocks[2 * (step % CLOCKS) + 1] = clock_ns();
    }
}

// End of a body of the device loop: go on while the host says nothing, a row is live and the bound is not reached.
KERNEL loop_condition(cudaGraphConditionalHandle handle, const Control* control, const Shared* shared, const u64* clocks) {
    WAIT_BEFORE();
    bool any = false;
    for (int r = 0; r < control->active; ++r) any |= control->live[r] != 0;
    cudaGraphSetConditional(handle, any && !shared->stop && clocks[2 * CLOCKS] < shared->loop_end);
}
