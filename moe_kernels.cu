/* moe_kernels.cu: the layers of moe_cpu.c as CUDA kernels, in the same order, under the same names.
   Read it beside moe_cpu.c and moe.h.

   Every operation is a template over T, the type of activations and of the matrices that products read:
   float or bf16. All sums, the router, the norms' weights, gradients, moments and the parameters
   themselves are float. backend_cuda(type) hands out the table for one T. The same file, compiled by a
   C++ compiler through cuda_cpu.h, is backend_emulated(type): tests run it without a GPU.

   An operation is a host function, named as in moe.h, that launches kernels on the one stream and
   returns; a kernel is named after it. Nothing comes back to the host inside a step: what depends on
   routing (offsets, rows, counts) is read by the kernels where it lies.

   Three rules make a result the same in every run, on any grid, and for a row whatever the rows beside
   it:
   - one thread, or one warp in a fixed order, owns an output; no atomics on floats, no split sums;
   - sums that many threads share are cut into pieces of fixed size and added in order;
   - a product adds along k in steps of 16 from 0, whatever its tile.

   Order: instructions, small helpers, the product, embedding, norms, linear, rotary, attention,
   router, plan, experts, classifier, optimiser, memory. */
#ifndef CUDA_CPU_H
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#endif
#include "moe.h"

#include <math.h>

typedef __nv_bfloat16 bf16;

// -------------------------------------------------------------------------------------------------
// instructions: one wrapper for each, so that cuda_cpu.h can have a twin of the same name

#ifndef CUDA_CPU_H
__device__ inline unsigned shared_address(const void *p) {
    return (unsigned)__cvta_generic_to_shared(p);
}
// 16 bytes, aligned
__device__ inline uint4 load16(const void *p) { return *(const uint4 *)p; }
__device__ inline void store16(void *p, uint4 v) { *(uint4 *)p = v; }
// Copies 16 bytes to shared memory in the background; of the source only `have`, zeros beyond.
__device__ inline void cp_async16(void *shared, const void *global, int have) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)),
        "l"(global), "r"(have)
        : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// until at most `left` of this thread's newest groups are under way
template <int left>
__device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(left) : "memory");
}
/* Four 8 x 8 matrices of 16-bit values: lane i gives the address of row i % 8 of matrix i / 8, and gets
   of matrix m, in r[m], the values (i / 4, 2 (i % 4)) and the one after it; _trans: of its transpose. */
__device__ inline void ldmatrix_x4(unsigned *r, const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ inline void ldmatrix_x4_trans(unsigned *r, const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
// D (16,8) += A (16,16) B (16,8): float += bf16 * bf16
__device__ inline void mma_bf16(float *d, const unsigned *a, const unsigned *b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// -------------------------------------------------------------------------------------------------
// small helpers

enum {
    WARP_SIZE = 32,
    THREADS = 256 // of a block, where nothing else decides
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
    return x;
}
template <>
__device__ inline bf16 from_float<bf16>(float x) {
    return __float2bfloat16(x);
}

// The sum over a warp, in every lane: pairs 16 apart first. A fixed order.
__device__ inline float warp_sum(float x) {
    for (int step = WARP_SIZE / 2; step; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}
__device__ inline float warp_max(float x) { // NaN if any is
    for (int step = WARP_SIZE / 2; step; step /= 2) {
        const float y = __shfl_xor_sync(0xFFFFFFFFu, x, step);
        x = x > y || x != x ? x : y;
    }
    return x;
}

__host__ __device__ inline int pieces_of(int n, int size) { return (n + size - 1) / size; }
__host__ __device__ inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// What the host side knows of the device.
static struct Device {
    int ready, processors;
    cudaStream_t stream;
} device;

static void check(cudaError_t e, const char *what) {
    if (e != cudaSuccess) die(RUN_ERROR, "%s: the device says: %s", what, cudaGetErrorString(e));
}
// after a launch
static void launched(const char *what) { check(cudaGetLastError(), what); }

// Blocks for `work` items of which a block does `each`.
static unsigned blocks_for(size_t work, size_t each) {
    const size_t n = (work + each - 1) / each;
    if (n > 0x7FFFFFFF) die(RUN_ERROR, "a launch of %zu blocks is more than a device takes", n);
    return (unsigned)(n ? n : 1);
}

// A part of scratch memory of `count` elements; *scratch moves behind it.
template <class X>
static X *carve(void **scratch, size_t count) {
    X *p = (X *)*scratch;
    *scratch = (char *)*scratch + round_up(count * sizeof(X), ARENA_ALIGN);
    return p;
}

//SECTION product

//SECTION embedding, norms, add

//SECTION linear

//SECTION rotary, attention

//SECTION router, plan

//SECTION experts

//SECTION classifier

//SECTION loss, norm, optimiser

//SECTION memory, table
