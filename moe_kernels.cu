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

// -------------------------------------------------------------------------------------------------
// values, partial sums, a stable sort: what the sections below share

// W adjacent values as floats: the 16 bytes of an access, or one where rows do not consist of those
template <class T, int W> __device__ inline void read_values(float *x, const T *p) {
    if constexpr (W == 1) {
        x[0] = to_float(*p);
    } else {
        const uint4 all = load16(p);
        T v[W];
        static_assert(sizeof all == sizeof v, "W values are 16 bytes");
        memcpy(v, &all, sizeof all);
        for (int i = 0; i < W; i++) x[i] = to_float(v[i]);
    }
}
template <class T, int W> __device__ inline void write_values(T *p, const float *x) {
    if constexpr (W == 1) {
        *p = from_float<T>(x[0]);
    } else {
        T v[W];
        uint4 all;
        static_assert(sizeof all == sizeof v, "W values are 16 bytes");
        for (int i = 0; i < W; i++) v[i] = from_float<T>(x[i]);
        memcpy(&all, v, sizeof all);
        store16(p, all);
    }
}
// The same for floats that lie beside W values of another type: W is 1 or a multiple of 4.
template <int W> __device__ inline void read_floats(float *x, const float *p) {
    if constexpr (W == 1)
        x[0] = *p;
    else
        for (int i = 0; i < W; i += 4) read_values<float, 4>(x + i, p + i);
}
template <int W> __device__ inline void write_floats(float *p, const float *x) {
    if constexpr (W == 1)
        *p = x[0];
    else
        for (int i = 0; i < W; i += 4) write_values<float, 4>(p + i, x + i);
}

enum { PARTIAL_LANES = 8 }; // threads that share a column of many partial sums

/* out[r][c] += sum over the parts of partial[part][r][c]. A column's lanes each add every
   `lanes`-th part, then the lanes are added in order. */
__global__ void __launch_bounds__(THREADS) add_partials_kernel(float *out, size_t ld,
    const float *partial, // (parts, rows, cols)
    int parts, int rows, int cols, int lanes) {
    __shared__ float lane_sum[THREADS];
    const int each = THREADS / lanes, lane = threadIdx.x / each, mine = threadIdx.x % each;
    const size_t count = (size_t)rows * cols, i = (size_t)blockIdx.x * each + mine;
    float sum = 0;
    if (i < count)
        for (int part = lane; part < parts; part += lanes) sum += partial[part * count + i];
    lane_sum[threadIdx.x] = sum;
    __syncthreads();
    if (lane > 0 || i >= count) return;
    for (int l = 1; l < lanes; l++) sum += lane_sum[l * each + mine];
    out[i / cols * ld + i % cols] += sum;
}
static void add_partials(
    float *out, size_t ld, const float *partial, int parts, int rows, int cols) {
    const int lanes = parts < PARTIAL_LANES ? 1 : PARTIAL_LANES;
    const unsigned blocks = blocks_for((size_t)rows * cols, THREADS / lanes);
    add_partials_kernel<<<blocks, THREADS, 0, device.stream>>>(
        out, ld, partial, parts, rows, cols, lanes);
    launched("add_partials");
}

/* A stable counting sort of n items by a key below `buckets`, in three launches. Blocks of
   SORT_KEYS items count their keys; one block makes of the counts the first place of every (bucket,
   block), bucket by bucket; then each block hands out places to its own items in their order. A
   thread owns a bucket and walks the block's keys in shared memory: no atomics, and stable by
   construction. */
enum { SORT_KEYS = 1024, SCAN_BATCH = 8 };

typedef struct SortKeys { // key of item i: key[item[i]] >> shift & mask; item NULL: i itself
    const int *key, *item;
    int n, shift, mask, buckets;
} SortKeys;
__device__ inline int item_of(SortKeys k, int i) { return k.item ? k.item[i] : i; }

// This block's keys to shared memory; returns how many there are. The caller meets the barrier.
__device__ inline int load_keys(int *keys, SortKeys k) {
    const int begin = blockIdx.x * SORT_KEYS, n = k.n - begin < SORT_KEYS ? k.n - begin : SORT_KEYS;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        keys[i] = k.key[item_of(k, begin + i)] >> k.shift & k.mask;
    return n;
}

// first (blocks, buckets): here the counts
__global__ void __launch_bounds__(THREADS) sort_count_kernel(int *first, SortKeys k) {
    __shared__ int keys[SORT_KEYS];
    const int n = load_keys(keys, k);
    __syncthreads();
    for (int b = threadIdx.x; b < k.buckets; b += blockDim.x) {
        int count = 0;
        for (int i = 0; i < n; i++) count += keys[i] == b;
        first[(size_t)blockIdx.x * k.buckets + b] = count;
    }
}

// counts to first places; offsets (buckets+1): where a bucket begins
__global__ void __launch_bounds__(THREADS)
    sort_scan_kernel(int *first, int *offsets, int blocks, int buckets) {
    extern __shared__ int bucket_total[]; // (buckets)
    for (int b = threadIdx.x; b < buckets; b += blockDim.x) {
        int total = 0;
        for (int i = 0; i < blocks; i++) total += first[(size_t)i * buckets + b];
        bucket_total[b] = total;
    }
    __syncthreads();
    for (int b = threadIdx.x; b < buckets; b += blockDim.x) {
        int at = 0;
        for (int i = 0; i < b; i++) at += bucket_total[i];
        offsets[b] = at;
        if (b == buckets - 1) offsets[buckets] = at + bucket_total[b];
        for (int i0 = 0; i0 < blocks;
             i0 += SCAN_BATCH) { // all loads of a batch are under way at once
            int count[SCAN_BATCH];
            for (int i = 0; i < SCAN_BATCH; i++)
                count[i] = i0 + i < blocks ? first[(size_t)(i0 + i) * buckets + b] : 0;
            for (int i = 0; i < SCAN_BATCH && i0 + i < blocks; i++) {
                first[(size_t)(i0 + i) * buckets + b] = at;
                at += count[i];
            }
        }
    }
}

// The places of this block's n items, in shared memory; the caller meets the barrier.
__device__ inline void hand_out_places(
    int *place, const int *keys, const int *first, int n, int buckets) {
    for (int b = threadIdx.x; b < buckets; b += blockDim.x) {
        int at = first[(size_t)blockIdx.x * buckets + b];
        for (int i = 0; i < n; i++)
            if (keys[i] == b) place[i] = at++;
    }
}

// The first two launches; the third is the caller's, with as many blocks.
static int sort_blocks(int n) { return pieces_of(n, SORT_KEYS); }
static void sort_count(int *first, int *offsets, SortKeys k) {
    sort_count_kernel<<<sort_blocks(k.n), THREADS, 0, device.stream>>>(first, k);
    launched("sort_count");
    const size_t shared = k.buckets * sizeof(int);
    sort_scan_kernel<<<1, THREADS, shared, device.stream>>>(
        first, offsets, sort_blocks(k.n), k.buckets);
    launched("sort_scan");
}

// -------------------------------------------------------------------------------------------------
// embedding

// A warp copies a row.
template <class T, int W>
__global__ void __launch_bounds__(THREADS) embedding_forward_kernel(T *out, // (N,C)
    const int *tokens, const T *wte, size_t ld, int N, int C) {
    const int n = blockIdx.x * (THREADS / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    if (n >= N) return;
    const T *from = wte + tokens[n] * ld;
    T *to = out + (size_t)n * C;
    for (int c = threadIdx.x % WARP_SIZE * W; c < C; c += WARP_SIZE * W) {
        if constexpr (W == 1)
            to[c] = from[c];
        else
            store16(to + c, load16(from + c));
    }
}

template <class T> static void embedding_forward(act_t *out, const int *tokens, Mat wte, int N) {
    const int C = wte.cols, W = 16 / sizeof(T);
    const unsigned blocks = blocks_for(N, THREADS / WARP_SIZE);
    if (C % W == 0 && wte.ld % W == 0)
        embedding_forward_kernel<T, W><<<blocks, THREADS, 0, device.stream>>>(
            (T *)out, tokens, (const T *)wte.data, wte.ld, N, C);
    else
        embedding_forward_kernel<T, 1><<<blocks, THREADS, 0, device.stream>>>(
            (T *)out, tokens, (const T *)wte.data, wte.ld, N, C);
    launched("embedding_forward");
}

/* Backward: positions are sorted by token id, by digits of 8 bits from the lowest, so that those of
   one id lie side by side in ascending order; the warps of the first of them add up the whole run.
   No two threads ever add to one element. [LSD radix sort, Knuth TAOCP 3, 5.2.5] */
enum { DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS };

__global__ void __launch_bounds__(THREADS)
    embedding_order_kernel(int *order, const int *first, SortKeys k) {
    __shared__ int keys[SORT_KEYS];
    __shared__ int place[SORT_KEYS];
    const int n = load_keys(keys, k);
    __syncthreads();
    hand_out_places(place, keys, first, n, k.buckets);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        order[place[i]] = item_of(k, blockIdx.x * SORT_KEYS + i);
}

// A warp owns a place of the order and W columns a lane; only the first place of a run has work.
template <class T, int W>
__global__ void __launch_bounds__(THREADS) embedding_backward_kernel(float *dwte, // (V,C)
    const T *dout,                                                                // (N,C)
    const int *tokens, const int *order, int N, int C, int chunks) {
    const int64_t warp = (int64_t)blockIdx.x * (THREADS / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    const int begin = (int)(warp / chunks);
    const int c = ((int)(warp % chunks) * WARP_SIZE + threadIdx.x % WARP_SIZE) * W;
    if (begin >= N || c >= C) return;
    const int id = tokens[order[begin]];
    if (begin > 0 && tokens[order[begin - 1]] == id) return;
    int end = N; // of the run, found by halving: ids ascend
    for (int lo = begin + 1; lo < end;) {
        const int mid = lo + (end - lo) / 2;
        if (tokens[order[mid]] == id)
            lo = mid + 1;
        else
            end = mid;
    }
    float sum[W] = {0}, x[W];
    for (int i = begin; i < end; i++) {
        read_values<T, W>(x, dout + (size_t)order[i] * C + c);
        for (int j = 0; j < W; j++) sum[j] += x[j];
    }
    float *dw = dwte + (size_t)id * C + c;
    float old[W];
    read_floats<W>(old, dw);
    for (int j = 0; j < W; j++) sum[j] += old[j];
    write_floats<W>(dw, sum);
}

// two orders, of which one digit reads what the other wrote; counts; bucket starts
static size_t embedding_scratch(const Config *c, const ScratchShape *s) {
    const size_t N = (size_t)s->B * s->T;
    (void)c;
    return 2 * round_up(N * sizeof(int), ARENA_ALIGN) +
        round_up((size_t)sort_blocks((int)N) * DIGITS * sizeof(int), ARENA_ALIGN) +
        round_up((DIGITS + 1) * sizeof(int), ARENA_ALIGN);
}

template <class T>
static void embedding_backward(
    grad_t *dwte, const act_t *dout, const int *tokens, int N, int V, int C, void *scratch) {
    const int W = 16 / sizeof(T);
    int *order = carve<int>(&scratch, N), *before = carve<int>(&scratch, N);
    int *first = carve<int>(&scratch, (size_t)sort_blocks(N) * DIGITS);
    int *offsets = carve<int>(&scratch, DIGITS + 1);
    SortKeys k = {tokens, NULL, N, 0, DIGITS - 1, DIGITS};
    for (; k.shift == 0 || (V - 1) >> k.shift > 0; k.shift += DIGIT_BITS) {
        sort_count(first, offsets, k);
        embedding_order_kernel<<<sort_blocks(N), THREADS, 0, device.stream>>>(order, first, k);
        launched("embedding_order");
        k.item = order;
        order = before;
        before = (int *)k.item;
    }
    const int wide = C % W == 0, chunks = pieces_of(C, WARP_SIZE * (wide ? W : 1));
    const unsigned blocks = blocks_for((size_t)N * chunks, THREADS / WARP_SIZE);
    if (wide)
        embedding_backward_kernel<T, W><<<blocks, THREADS, 0, device.stream>>>(
            (float *)dwte, (const T *)dout, tokens, k.item, N, C, chunks);
    else
        embedding_backward_kernel<T, 1><<<blocks, THREADS, 0, device.stream>>>(
            (float *)dwte, (const T *)dout, tokens, k.item, N, C, chunks);
    launched("embedding_backward");
}

// -------------------------------------------------------------------------------------------------
// RMSNorm

/* A warp owns a row. With a branch, sum = inp + branch comes first, and the norm is that of the sum
   as it is stored: the backward pass reads no other. */
template <class T, int W, bool with_branch>
__global__ void __launch_bounds__(THREADS) rmsnorm_forward_kernel(T *sum, T *out, // (N,C)
    float *rstd, const T *inp, const T *branch, const float *weight, int N, int C, float eps) {
    const int n = blockIdx.x * (THREADS / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    const int c0 = threadIdx.x % WARP_SIZE * W;
    if (n >= N) return;
    const size_t at = (size_t)n * C;
    const T *x = with_branch ? sum : inp;
    float squares = 0, v[W], w[W];
    for (int c = c0; c < C; c += WARP_SIZE * W) {
        read_values<T, W>(v, inp + at + c);
        if constexpr (with_branch) {
            read_values<T, W>(w, branch + at + c);
            for (int i = 0; i < W; i++) v[i] = to_float(from_float<T>(v[i] + w[i]));
            write_values<T, W>(sum + at + c, v);
        }
        for (int i = 0; i < W; i++) squares += v[i] * v[i];
    }
    const float r = 1 / sqrtf(warp_sum(squares) / C + eps);
    for (int c = c0; c < C; c += WARP_SIZE * W) { // each lane reads what it wrote itself
        read_values<T, W>(v, x + at + c);
        read_floats<W>(w, weight + c);
        for (int i = 0; i < W; i++) v[i] = v[i] * r * w[i];
        write_values<T, W>(out + at + c, v);
    }
    if (c0 == 0) rstd[n] = r;
}

template <class T, bool with_branch>
static void launch_norm(T *sum, T *out, float *rstd, const T *inp, const T *branch,
    const float *weight, int N, int C, double eps) {
    const int W = 16 / sizeof(T);
    const unsigned blocks = blocks_for(N, THREADS / WARP_SIZE);
    if (C % W == 0)
        rmsnorm_forward_kernel<T, W, with_branch><<<blocks, THREADS, 0, device.stream>>>(
            sum, out, rstd, inp, branch, weight, N, C, (float)eps);
    else
        rmsnorm_forward_kernel<T, 1, with_branch><<<blocks, THREADS, 0, device.stream>>>(
            sum, out, rstd, inp, branch, weight, N, C, (float)eps);
    launched("rmsnorm_forward");
}

template <class T>
static void rmsnorm_forward(
    act_t *out, stat_t *rstd, const act_t *inp, const param_t *weight, int N, int C, double eps) {
    launch_norm<T, false>(
        NULL, (T *)out, (float *)rstd, (const T *)inp, NULL, (const float *)weight, N, C, eps);
}

template <class T>
static void residual_rmsnorm_forward(act_t *sum, act_t *out, stat_t *rstd, const act_t *inp,
    const act_t *branch, const param_t *weight, int N, int C, double eps) {
    launch_norm<T, true>((T *)sum, (T *)out, (float *)rstd, (const T *)inp, (const T *)branch,
        (const float *)weight, N, C, eps);
}

/* With xhat = x * rstd and dxhat = dout * weight:  dx = rstd * (dxhat - xhat * mean(dxhat * xhat)).
   A block owns NORM_ROWS rows: its warps find the rows' means, then its threads each walk their
   columns down the rows (still in cache), and the columns' sums of dout * xhat are the block's part
   of dweight. */
enum { NORM_ROWS = 32 };

template <class T, int W>
__global__ void __launch_bounds__(THREADS) rmsnorm_backward_kernel(T *dinp, // (N,C)
    float *partial,                                                         // (blocks,C)
    const T *dout, const T *inp, const float *rstd, const float *weight, int N, int C) {
    __shared__ float mean[NORM_ROWS];
    const int n0 = blockIdx.x * NORM_ROWS, rows = N - n0 < NORM_ROWS ? N - n0 : NORM_ROWS;
    const int lane = threadIdx.x % WARP_SIZE;
    float d[W], x[W], w[W], dx[W];
    for (int row = threadIdx.x / WARP_SIZE; row < rows; row += blockDim.x / WARP_SIZE) {
        const size_t at = (size_t)(n0 + row) * C;
        float sum = 0;
        for (int c = lane * W; c < C; c += WARP_SIZE * W) {
            read_values<T, W>(d, dout + at + c);
            read_values<T, W>(x, inp + at + c);
            read_floats<W>(w, weight + c);
            for (int i = 0; i < W; i++) sum += d[i] * w[i] * x[i];
        }
        sum = warp_sum(sum);
        if (lane == 0) mean[row] = sum * rstd[n0 + row] / C;
    }
    __syncthreads();
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        float dw[W] = {0};
        read_floats<W>(w, weight + c);
        for (int row = 0; row < rows; row++) {
            const size_t at = (size_t)(n0 + row) * C + c;
            const float r = rstd[n0 + row], m = mean[row];
            read_values<T, W>(d, dout + at);
            read_values<T, W>(x, inp + at);
            read_values<T, W>(dx, dinp + at);
            for (int i = 0; i < W; i++) {
                const float xhat = x[i] * r;
                dx[i] += r * (d[i] * w[i] - xhat * m);
                dw[i] += d[i] * xhat;
            }
            write_values<T, W>(dinp + at, dx);
        }
        write_floats<W>(partial + (size_t)blockIdx.x * C + c, dw);
    }
}

static size_t norm_scratch(const Config *c, const ScratchShape *s) {
    const int blocks = pieces_of(s->B * s->T, NORM_ROWS);
    return round_up((size_t)blocks * c->d_model * sizeof(float), ARENA_ALIGN);
}

template <class T>
static void rmsnorm_backward(act_t *dinp, grad_t *dweight, const act_t *dout, const act_t *inp,
    const stat_t *rstd, const param_t *weight, int N, int C, void *scratch) {
    const int W = 16 / sizeof(T), wide = C % W == 0, blocks = pieces_of(N, NORM_ROWS);
    const int warps = pieces_of(C, WARP_SIZE * (wide ? W : 1)); // no more than there are columns
    const int threads = warps * WARP_SIZE < THREADS ? warps * WARP_SIZE : (int)THREADS;
    float *partial = carve<float>(&scratch, (size_t)blocks * C);
    if (wide)
        rmsnorm_backward_kernel<T, W><<<blocks, threads, 0, device.stream>>>((T *)dinp, partial,
            (const T *)dout, (const T *)inp, (const float *)rstd, (const float *)weight, N, C);
    else
        rmsnorm_backward_kernel<T, 1><<<blocks, threads, 0, device.stream>>>((T *)dinp, partial,
            (const T *)dout, (const T *)inp, (const float *)rstd, (const float *)weight, N, C);
    launched("rmsnorm_backward");
    add_partials((float *)dweight, C, partial, blocks, 1, C);
}

template <class T, int W>
__global__ void __launch_bounds__(THREADS)
    add_kernel(T *out, const T *a, const T *b, size_t count) {
    const size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * W;
    float x[W], y[W];
    if (i + W <= count) {
        read_values<T, W>(x, a + i);
        read_values<T, W>(y, b + i);
        for (int j = 0; j < W; j++) x[j] += y[j];
        write_values<T, W>(out + i, x);
    } else {
        for (size_t j = i; j < count; j++) out[j] = from_float<T>(to_float(a[j]) + to_float(b[j]));
    }
}

template <class T> static void add(act_t *out, const act_t *a, const act_t *b, size_t count) {
    const int W = 16 / sizeof(T);
    if (((uintptr_t)out | (uintptr_t)a | (uintptr_t)b) % 16 == 0)
        add_kernel<T, W><<<blocks_for(count, THREADS * W), THREADS, 0, device.stream>>>(
            (T *)out, (const T *)a, (const T *)b, count);
    else
        add_kernel<T, 1><<<blocks_for(count, THREADS), THREADS, 0, device.stream>>>(
            (T *)out, (const T *)a, (const T *)b, count);
    launched("add");
}

//SECTION linear

//SECTION rotary, attention

//SECTION router, plan

//SECTION experts

//SECTION classifier

//SECTION loss, norm, optimiser

//SECTION memory, table
