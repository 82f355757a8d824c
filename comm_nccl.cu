/* comm_nccl.cu: sums in the order of ranks on a CUDA device, for comm_nccl.h. It knows comm.h. */
#include "comm.h"

// as COMM_REDUCE of comm.h
template <class T, int MAX>
__global__ void comm_reduce_kernel(
    T *out, const T *own, const char *scratch, size_t chunk, int rank, int size, size_t n) {
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        T acc = 0;
        for (int r = 0; r < size; r++) {
            const T x = r == rank ? own[i] : ((const T *)(scratch + (size_t)r * chunk))[i];
            acc = !r ? x : !MAX ? acc + x : acc > x || acc != acc ? acc : x;
        }
        out[i] = acc;
    }
}
extern "C" void comm_cuda_reduce(void *out, const void *own, const void *scratch, size_t chunk,
    int rank, int size, size_t n, int type, int op, void *stream) {
    const size_t blocks = (n + 255) / 256;
    const unsigned grid = blocks < 4096 ? (unsigned)blocks : 4096;
    const char *s = (const char *)scratch;
    const cudaStream_t q = (cudaStream_t)stream;
#define COMM_LAUNCH(T, MAX)    \
    comm_reduce_kernel<T, MAX> \
        <<<grid, 256, 0, q>>>((T *)out, (const T *)own, s, chunk, rank, size, n)
    if (!n) return;
    switch (2 * type + op) {
    case 2 * COMM_F32 + COMM_SUM: COMM_LAUNCH(float, 0); break;
    case 2 * COMM_F32 + COMM_MAX: COMM_LAUNCH(float, 1); break;
    case 2 * COMM_F64 + COMM_SUM: COMM_LAUNCH(double, 0); break;
    case 2 * COMM_F64 + COMM_MAX: COMM_LAUNCH(double, 1); break;
    case 2 * COMM_I32 + COMM_SUM: COMM_LAUNCH(uint32_t, 0); break; // unsigned: it wraps
    case 2 * COMM_I32 + COMM_MAX: COMM_LAUNCH(int32_t, 1); break;
    case 2 * COMM_I64 + COMM_SUM: COMM_LAUNCH(uint64_t, 0); break;
    case 2 * COMM_I64 + COMM_MAX: COMM_LAUNCH(int64_t, 1); break;
    }
#undef COMM_LAUNCH
}
