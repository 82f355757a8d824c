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

// -------------------------------------------------------------------------------------------------
// router

enum {
    ROUTER_TILE = 64,  // a block's tile of a product is 64 x 64, of which a thread owns 4 x 4
    ROUTER_STEP = 16,  // values along k that are in shared memory at a time
    ROUTER_PARTS = 16, // the sum over the rows of a weight gradient has at most so many parts ...
    ROUTER_PART = 256, // ... and each but the last at least so many rows
    ROUTER_ROWS = 32,  // most rows that a block of the row-wise kernels owns, one a thread
    ROUTER_THREADS = 128,
    MOST_EXPERTS = 2048,     // for which one row's scores fit the shared memory of a block
    ROUTER_SHARED = 36 << 10 // bytes of it that those rows may take: less than any block may have
};
#define TINY 1e-20f // as in moe_cpu.c: added to a sum of scores before it divides

/* The router's products are float however wide the activations are, and of one accumulator an
   output, k ascending, so that a row's logits do not depend on the rows beside it. An operand's
   tile is 64 x 16 values (i, k); in memory (i, k) is x[i ld + k] where k is adjacent, else x[k ld +
   i]. A thread brings 4 of them, zeros beyond the edges. */
template <class X, bool k_adjacent>
__device__ inline void fetch_tile(
    float *v, const X *x, size_t ld, int i0, int rows, int k0, int k_end) {
    const int i = i0 + (k_adjacent ? threadIdx.x / 4 : threadIdx.x % 16 * 4);
    const int k = k0 + (k_adjacent ? threadIdx.x % 4 * 4 : threadIdx.x / 16);
    for (int j = 0; j < 4; j++) {
        const int ij = k_adjacent ? i : i + j, kj = k_adjacent ? k + j : k;
        v[j] = 0;
        if (ij < rows && kj < k_end) v[j] = to_float(x[k_adjacent ? ij * ld + kj : kj * ld + ij]);
    }
}
// the same values to shared memory, (k, i); rows of 68, so that 16-byte reads stay aligned
typedef float RouterTile[ROUTER_STEP][ROUTER_TILE + 4];
template <bool k_adjacent> __device__ inline void put_tile(RouterTile tile, const float *v) {
    for (int j = 0; j < 4; j++) {
        if (k_adjacent)
            tile[threadIdx.x % 4 * 4 + j][threadIdx.x / 4] = v[j];
        else
            tile[threadIdx.x / 16][threadIdx.x % 16 * 4 + j] = v[j];
    }
}

/* acc[i][j] = sum over k of a (i0 + 4 (thread / 16) + i, k) * b (j0 + 4 (thread % 16) + j, k), for
   k in [k_begin, k_end). While one buffer is multiplied the next is on its way; a thread that
   writes a buffer has passed the barrier after which nobody reads it. */
template <class A, class B, bool a_adjacent, bool b_adjacent>
__device__ inline void router_product(float (*acc)[4], const A *a, size_t lda, int i0, int m,
    const B *b, size_t ldb, int j0, int n, int k_begin, int k_end) {
    __shared__ __align__(16) float a_tile[2][ROUTER_STEP][ROUTER_TILE + 4];
    __shared__ __align__(16) float b_tile[2][ROUTER_STEP][ROUTER_TILE + 4];
    const int i4 = threadIdx.x / 16 * 4, j4 = threadIdx.x % 16 * 4;
    float av[4], bv[4];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) acc[i][j] = 0;
    fetch_tile<A, a_adjacent>(av, a, lda, i0, m, k_begin, k_end);
    fetch_tile<B, b_adjacent>(bv, b, ldb, j0, n, k_begin, k_end);
    for (int k0 = k_begin, turn = 0; k0 < k_end; k0 += ROUTER_STEP, turn ^= 1) {
        put_tile<a_adjacent>(a_tile[turn], av);
        put_tile<b_adjacent>(b_tile[turn], bv);
        __syncthreads();
        if (k0 + ROUTER_STEP < k_end) {
            fetch_tile<A, a_adjacent>(av, a, lda, i0, m, k0 + ROUTER_STEP, k_end);
            fetch_tile<B, b_adjacent>(bv, b, ldb, j0, n, k0 + ROUTER_STEP, k_end);
        }
        for (int k = 0; k < ROUTER_STEP; k++) {
            float x[4], y[4];
            read_values<float, 4>(x, &a_tile[turn][k][i4]);
            read_values<float, 4>(y, &b_tile[turn][k][j4]);
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) acc[i][j] = fmaf(x[i], y[j], acc[i][j]);
        }
    }
}

// logits (N,E) = X (N,C) Wr^T
template <class T>
__global__ void __launch_bounds__(THREADS) router_logits_kernel(
    float *logits, const T *X, const float *Wr, size_t ld, int N, int C, int E) {
    const int n0 = blockIdx.x * ROUTER_TILE, e0 = blockIdx.y * ROUTER_TILE;
    float acc[4][4];
    router_product<T, float, true, true>(acc, X, C, n0, N, Wr, ld, e0, E, 0, C);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const int n = n0 + threadIdx.x / 16 * 4 + i, e = e0 + threadIdx.x % 16 * 4 + j;
            if (n < N && e < E) logits[(size_t)n * E + e] = acc[i][j];
        }
}

// dX (N,C) += dlogits (N,E) Wr, rounded once
template <class T>
__global__ void __launch_bounds__(THREADS)
    router_dx_kernel(T *dX, const float *dlogits, const float *Wr, size_t ld, int N, int C, int E) {
    const int n0 = blockIdx.x * ROUTER_TILE, c0 = blockIdx.y * ROUTER_TILE;
    float acc[4][4];
    router_product<float, float, true, false>(acc, dlogits, E, n0, N, Wr, ld, c0, C, 0, E);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const int n = n0 + threadIdx.x / 16 * 4 + i, c = c0 + threadIdx.x % 16 * 4 + j;
            if (n >= N || c >= C) continue;
            T *d = dX + (size_t)n * C + c;
            *d = from_float<T>(to_float(*d) + acc[i][j]);
        }
}

// rows of a part: how a sum is cut depends on N alone
static int router_part(int N) {
    const int rows = (int)round_up(pieces_of(N, ROUTER_PARTS), ROUTER_STEP);
    return rows < ROUTER_PART ? (int)ROUTER_PART : rows;
}

// partial (parts,E,C): dlogits^T X over `part` rows
template <class T>
__global__ void __launch_bounds__(THREADS) router_dw_kernel(
    float *partial, const float *dlogits, const T *X, int N, int C, int E, int part) {
    const int c0 = blockIdx.x * ROUTER_TILE, e0 = blockIdx.y * ROUTER_TILE;
    const int n0 = blockIdx.z * part, n1 = N - n0 < part ? N : n0 + part;
    float acc[4][4];
    router_product<float, T, false, false>(acc, dlogits, E, e0, E, X, C, c0, C, n0, n1);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const int e = e0 + threadIdx.x / 16 * 4 + i, c = c0 + threadIdx.x % 16 * 4 + j;
            if (e < E && c < C) partial[((size_t)blockIdx.z * E + e) * C + c] = acc[i][j];
        }
}

/* The row-wise kernels keep a block's rows in shared memory, which all threads fill and empty, and
   one thread does the arithmetic of a row, in the order of moe_cpu.c. A row's length is made odd:
   threads on adjacent rows then meet different banks. How many rows fit depends on E and K alone.
   */
__host__ __device__ inline int odd(int n) { return n | 1; }
static int router_rows(int floats_each) {
    int rows = ROUTER_ROWS;
    while (rows > 1 && rows * floats_each * (int)sizeof(float) > ROUTER_SHARED) rows /= 2;
    return rows;
}
// scores, and a bit for every expert that was taken
__host__ __device__ inline int taken_words(int E) { return odd(pieces_of(E, 32)); }
static int choose_rows(int E) { return router_rows(odd(E) + taken_words(E)); }
// scores, their gradients, and the K gradients of the weights
static int dlogits_rows(int E, int K) { return router_rows(2 * odd(E) + odd(K)); }

// p = softmax(z) in place; returns log-sum-exp
__device__ inline float router_softmax(float *z, int E) {
    float top = z[0], sum = 0;
    for (int e = 1; e < E; e++) top = z[e] > top || z[e] != z[e] ? z[e] : top; // NaN if any is
    for (int e = 0; e < E; e++) sum += z[e] = expf(z[e] - top);
    const float inv = 1 / sum;
    for (int e = 0; e < E; e++) z[e] *= inv;
    return top + logf(sum);
}
__device__ inline float logistic(float x) { return 1 / (1 + expf(-x)); }
// s = logistic(z) in place
__device__ inline void router_sigmoid(float *z, int E) {
    for (int e = 0; e < E; e++) z[e] = logistic(z[e]);
}
// without touching z
__device__ inline float log_sum_exp(const float *z, int E) {
    float top = z[0], sum = 0;
    for (int e = 1; e < E; e++) top = z[e] > top || z[e] != z[e] ? z[e] : top;
    for (int e = 0; e < E; e++) sum += expf(z[e] - top);
    return top + logf(sum);
}

/* The K largest of score + bias, ids in descending order of value. The scan keeps the first of
   equals, so ties go to the lowest id, and ids are valid and distinct whatever the values are. */
__device__ inline void choose_topk(
    int *idx, unsigned *taken, const float *score, const float *bias, int E, int K) {
    for (int i = 0; i < taken_words(E); i++) taken[i] = 0;
    for (int k = 0; k < K; k++) {
        int best = -1;
        float best_score = 0;
        for (int e0 = 0; e0 < E; e0 += 32) {
            const unsigned gone = taken[e0 / 32];
            for (int e = e0; e < E && e < e0 + 32; e++) {
                const float s = score[e] + (bias ? bias[e] : 0);
                if (!(gone >> (e - e0) & 1) && (best < 0 || s > best_score)) {
                    best = e;
                    best_score = s;
                }
            }
        }
        idx[k] = best;
        taken[best / 32] |= 1u << best % 32;
    }
}

/* Scores, choice and weights of a block's rows, and its parts of the means: part_p (blocks,E) sums
   of probabilities, part_z (blocks) sums of lse^2; part_bad (blocks): its first row with a logit
   that is not finite, N = none. count is zero beforehand. */
__global__ void __launch_bounds__(ROUTER_THREADS) router_choose_kernel(const float *logits,
    float *lse, int *idx, float *weight, int *count, float *part_p, float *part_z, int *part_bad,
    const float *bias, Router r, int rows_each, int reuse) {
    extern __shared__ float router_scores[]; // (rows, odd(E)), then (rows, taken_words(E))
    __shared__ float inverse[ROUTER_ROWS];   // of the sum of a row's probabilities
    __shared__ float lse_row[ROUTER_ROWS];
    __shared__ int bad_row[ROUTER_ROWS];
    const int E = r.E, K = r.K, ld = odd(E), n0 = blockIdx.x * rows_each, row = threadIdx.x;
    const int rows = r.N - n0 < rows_each ? r.N - n0 : rows_each;
    unsigned *taken = (unsigned *)(router_scores + (size_t)rows_each * ld);
    for (int i = threadIdx.x; i < rows * E; i += ROUTER_THREADS)
        router_scores[i / E * ld + i % E] = logits[(size_t)n0 * E + i];
    __syncthreads();
    if (row < rows) {
        const int is_sigmoid = r.kind == ROUTER_SIGMOID;
        const size_t n = n0 + row;
        float *p = router_scores + (size_t)row * ld, *w = weight + n * K, total = 0;
        int *id = idx + n * K, bad = 0;
        for (int e = 0; e < E; e++) bad |= !isfinite(p[e]);
        if (is_sigmoid) {
            lse_row[row] = log_sum_exp(p, E);
            router_sigmoid(p, E);
        }
        if (!reuse)
            choose_topk(id, taken + row * taken_words(E), p, is_sigmoid ? bias : NULL, E, K);
        if (!is_sigmoid) lse_row[row] = router_softmax(p, E);
        for (int k = 0; k < K; k++) total += w[k] = p[id[k]];
        for (int k = 0; k < K && r.norm_topk; k++) w[k] /= total + TINY;
        for (int k = 0; k < K; k++) atomicAdd(&count[id[k]], 1);
        inverse[row] = 1;
        if (is_sigmoid) {
            float sum = 0;
            for (int e = 0; e < E; e++) sum += p[e];
            inverse[row] = 1 / (sum + TINY);
        }
        bad_row[row] = bad;
        lse[n] = lse_row[row];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += ROUTER_THREADS) {
        float sum = 0;
        for (int i = 0; i < rows; i++) sum += router_scores[i * ld + e] * inverse[i];
        part_p[(size_t)blockIdx.x * E + e] = sum;
    }
    if (row == 0) {
        float z2 = 0;
        int bad = r.N;
        for (int i = rows - 1; i >= 0; i--) bad = bad_row[i] ? n0 + i : bad;
        for (int i = 0; i < rows; i++) z2 += lse_row[i] * lse_row[i];
        part_z[blockIdx.x] = z2;
        part_bad[blockIdx.x] = bad;
    }
}

enum { FINISH_THREADS = 1024 };

/* One block adds the parts: for an expert `lanes` threads each add every lanes-th part, then the
   lanes are added in order. Then the losses, the step's counts, and the first bad row. */
__global__ void __launch_bounds__(FINISH_THREADS) router_finish_kernel(float *loss_sum,
    int *count_sum, StepState *st, const int *count, const float *part_p, const float *part_z,
    const int *part_bad, int blocks, int lanes, int layer, Router r) {
    extern __shared__ float lane_sums[]; // (lanes,E): of probabilities; then (lanes): of lse^2
    __shared__ int first_bad;
    float *z_sums = lane_sums + (size_t)lanes * r.E;
    const int E = r.E, N = r.N;
    if (threadIdx.x == 0) first_bad = N;
    __syncthreads();
    for (int i = threadIdx.x; i < lanes * E; i += blockDim.x) {
        float sum = 0;
        for (int b = i / E; b < blocks; b += lanes) sum += part_p[(size_t)b * E + i % E];
        lane_sums[i] = sum;
    }
    for (int l = threadIdx.x; l < lanes; l += blockDim.x) {
        float sum = 0;
        for (int b = l; b < blocks; b += lanes) sum += part_z[b];
        z_sums[l] = sum;
    }
    for (int b = threadIdx.x; b < blocks; b += blockDim.x)
        if (part_bad[b] < N) atomicMin(&first_bad, part_bad[b]);
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += blockDim.x) { // what expert e adds to the balance loss
        float p = 0;
        for (int l = 0; l < lanes; l++) p += lane_sums[l * E + e];
        lane_sums[e] = (float)count[e] / ((float)N * r.K) * (p / N);
        if (count_sum) count_sum[e] += count[e];
    }
    __syncthreads();
    if (threadIdx.x) return;
    if (first_bad < N && !st->bad) {
        st->bad = BAD_ROUTER;
        st->bad_layer = layer;
        st->bad_index = first_bad;
    }
    if (!loss_sum) return;
    float aux = 0, z2 = 0;
    for (int e = 0; e < E; e++) aux += lane_sums[e];
    for (int l = 0; l < lanes; l++) z2 += z_sums[l];
    loss_sum[0] += E * aux;
    loss_sum[1] += z2 / N;
}

template <class T>
static void router_forward(stat_t *logits_, stat_t *lse, int *idx, stat_t *weight, int *count,
    stat_t *loss_sum, int *count_sum, const act_t *X, Mat Wr, const stat_t *bias, Router r,
    int reuse, StepState *st, int layer, void *scratch) {
    float *logits = (float *)logits_; // (N,E)
    const int N = r.N, E = r.E, rows = choose_rows(E), blocks = pieces_of(N, rows);
    if (E > MOST_EXPERTS)
        die(RUN_ERROR, "%d experts: on this device there can be %d", E, (int)MOST_EXPERTS);
    float *part_p = carve<float>(&scratch, (size_t)blocks * E);
    float *part_z = carve<float>(&scratch, blocks);
    int *part_bad = carve<int>(&scratch, blocks);
    const dim3 tiles(pieces_of(N, ROUTER_TILE), pieces_of(E, ROUTER_TILE));
    router_logits_kernel<T><<<tiles, THREADS, 0, device.stream>>>(
        logits, (const T *)X, (const float *)Wr.data, Wr.ld, N, r.C, E);
    launched("router_logits");

    check(cudaMemsetAsync(count, 0, E * sizeof(int), device.stream), "router_forward");
    const size_t shared = (size_t)rows * (odd(E) + taken_words(E)) * sizeof(float);
    router_choose_kernel<<<blocks, ROUTER_THREADS, shared, device.stream>>>(logits, (float *)lse,
        idx, (float *)weight, count, part_p, part_z, part_bad, (const float *)bias, r, rows, reuse);
    launched("router_choose");

    int lanes = FINISH_THREADS / E;
    lanes = lanes < 1 ? 1 : lanes > blocks ? blocks : lanes;
    const size_t sums = (size_t)lanes * (E + 1) * sizeof(float);
    const int most = (int)round_up((size_t)lanes * E, WARP_SIZE);
    const int threads = most > FINISH_THREADS ? (int)FINISH_THREADS : most;
    router_finish_kernel<<<1, threads, sums, device.stream>>>(
        (float *)loss_sum, count_sum, st, count, part_p, part_z, part_bad, blocks, lanes, layer, r);
    launched("router_finish");
}

/* dlogits of a block's rows. On the chosen set S, dS_k reaches the logits through the renormalised
   weights, or through p_k alone; a slot that the plan added beyond the top-K (token rounding)
   through its raw score; one that it dropped not at all. The balance loss adds aux * count_e to
   dp_e, aux = aux_coef E / (N N K), the z-loss zl * lse * p_e to dz_e, zl = z_coef 2 / N. */
__global__ void __launch_bounds__(ROUTER_THREADS) router_dlogits_kernel(float *dlogits, // (N,E)
    const float *dS, Plan plan, const float *logits, const float *lse, const int *idx,
    const float *weight, const int *count, Router r, int rows_each, float aux, float zl) {
    extern __shared__ float router_grads[]; // (rows, odd(E)) scores; the same: their gradients;
                                            // (rows, odd(K)) what the renormalised weights pass on
    const int E = r.E, K = r.K, ld = odd(E), n0 = blockIdx.x * rows_each, row = threadIdx.x;
    const int rows = r.N - n0 < rows_each ? r.N - n0 : rows_each;
    float *scores = router_grads, *grads = scores + (size_t)rows_each * ld;
    float *passed = grads + (size_t)rows_each * ld;
    for (int i = threadIdx.x; i < rows * E; i += ROUTER_THREADS) {
        scores[i / E * ld + i % E] = logits[(size_t)n0 * E + i];
        grads[i / E * ld + i % E] = 0;
    }
    __syncthreads();
    if (row < rows) {
        const size_t n = n0 + row;
        const int is_sigmoid = r.kind == ROUTER_SIGMOID, *id = idx + n * K;
        const float *w = weight + n * K, *z = logits + n * E;
        float *s = scores + row * ld, *ds = grads + row * ld; // ds: d loss / d score
        float *pass = passed + row * odd(K), mean = 0;
        float top_lse = 0; // of the logits: what makes expf(z - it) a softmax
        if (is_sigmoid) {
            top_lse = log_sum_exp(s, E);
            router_sigmoid(s, E);
        } else {
            router_softmax(s, E);
        }
        for (int i = plan.row_begin[n]; i < plan.row_begin[n + 1]; i++)
            ds[plan.expert[plan.slot[i]]] = dS[plan.slot[i]];
        if (r.norm_topk) {
            for (int k = 0; k < K; k++) mean += w[k] * ds[id[k]];
            for (int k = 0; k < K; k++) {
                const float d = w[k] * (ds[id[k]] - mean);
                pass[k] = is_sigmoid ? d * (1 - s[id[k]]) : d;
            }
            for (int k = 0; k < K; k++) ds[id[k]] = 0;
        }
        // the balance loss: P_e is the mean of p (softmax), or of s / sum s (sigmoid)
        mean = 0;
        const float zl_row = zl * lse[n];
        if (is_sigmoid) {
            float total = 0;
            for (int e = 0; e < E; e++) total += s[e];
            total += TINY;
            for (int e = 0; e < E; e++) mean += s[e] / total * (aux * count[e]);
            for (int e = 0; e < E; e++) {
                const float d = ds[e] + (aux * count[e] - mean) / total;
                ds[e] = d * s[e] * (1 - s[e]) + zl_row * expf(z[e] - top_lse);
            }
        } else {
            for (int e = 0; e < E; e++) mean += s[e] * (ds[e] += aux * count[e]);
            for (int e = 0; e < E; e++) ds[e] = s[e] * (ds[e] - mean) + zl_row * s[e];
        }
        for (int k = 0; k < K && r.norm_topk; k++) ds[id[k]] += pass[k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * E; i += ROUTER_THREADS)
        dlogits[(size_t)n0 * E + i] = grads[i / E * ld + i % E];
}

template <class T>
static void router_backward(act_t *dX, grad_t *dWr, const stat_t *dS, const Plan *p,
    const stat_t *logits, const stat_t *lse, const int *idx, const stat_t *weight, const int *count,
    const act_t *X, Mat Wr, Router r, void *scratch) {
    const int N = r.N, C = r.C, E = r.E, rows = dlogits_rows(E, r.K);
    const int part = router_part(N), parts = pieces_of(N, part);
    float *dlogits = carve<float>(&scratch, (size_t)N * E);
    float *partial = carve<float>(&scratch, (size_t)parts * E * C);
    const size_t shared = (size_t)rows * (2 * odd(E) + odd(r.K)) * sizeof(float);
    const double aux = r.aux_coef * E / ((double)N * N * r.K), zl = r.z_coef * 2 / N;
    router_dlogits_kernel<<<pieces_of(N, rows), ROUTER_THREADS, shared, device.stream>>>(dlogits,
        (const float *)dS, *p, (const float *)logits, (const float *)lse, idx,
        (const float *)weight, count, r, rows, (float)aux, (float)zl);
    launched("router_dlogits");

    const T *x = (const T *)X;
    const dim3 tiles(pieces_of(N, ROUTER_TILE), pieces_of(C, ROUTER_TILE));
    router_dx_kernel<T><<<tiles, THREADS, 0, device.stream>>>(
        (T *)dX, dlogits, (const float *)Wr.data, Wr.ld, N, C, E);
    launched("router_dx");
    const dim3 grid(pieces_of(C, ROUTER_TILE), pieces_of(E, ROUTER_TILE), parts);
    router_dw_kernel<T><<<grid, THREADS, 0, device.stream>>>(partial, dlogits, x, N, C, E, part);
    launched("router_dw");
    add_partials((float *)dWr, Wr.ld, partial, parts, E, C);
}

static size_t router_scratch(const Config *c, const ScratchShape *s) {
    const size_t N = (size_t)s->B * s->T, E = c->n_experts;
    const size_t blocks = pieces_of((int)N, choose_rows((int)E));
    const size_t forward = round_up(blocks * E * sizeof(float), ARENA_ALIGN) +
        2 * round_up(blocks * sizeof(float), ARENA_ALIGN);
    const int most = pieces_of((int)N, ROUTER_PART);
    const size_t parts = most < ROUTER_PARTS ? most : (int)ROUTER_PARTS;
    const size_t backward = round_up(N * E * sizeof(float), ARENA_ALIGN) +
        round_up(parts * E * c->d_model * sizeof(float), ARENA_ALIGN);
    return s->backward && backward > forward ? backward : forward;
}

// -------------------------------------------------------------------------------------------------
// plan

/* Dropless top-K: the stable sort of (row, k) by expert; a slot is the place of its item. A row's
   slots in expert order are at the ranks of its experts among themselves. */
__global__ void __launch_bounds__(THREADS)
    plan_topk_kernel(Plan p, const int *first, SortKeys k, const float *weight, int N, int K) {
    __shared__ int keys[SORT_KEYS];
    __shared__ int place[SORT_KEYS];
    const int n = load_keys(keys, k);
    __syncthreads();
    hand_out_places(place, keys, first, n, k.buckets);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int item = blockIdx.x * SORT_KEYS + i, row = item / K, s = place[i], e = keys[i];
        int rank = 0;
        for (int j = 0; j < K; j++) rank += k.key[row * K + j] < e;
        p.row[s] = row;
        p.expert[s] = e;
        ((float *)p.weight)[s] = weight[item];
        p.slot[row * K + rank] = s;
        if (item % K == 0) p.row_begin[row] = item;
        if (item == N * K - 1) p.row_begin[N] = N * K;
    }
}

// counts of the sort, (blocks, E)
static size_t topk_scratch(int items, int E) {
    return round_up((size_t)sort_blocks(items) * E * sizeof(int), ARENA_ALIGN);
}

static void plan_topk(Plan *p, const int *idx, const stat_t *weight, const int *count, int N, int K,
    int E, void *scratch) {
    const SortKeys k = {idx, NULL, N * K, 0, ~0, E};
    int *first = carve<int>(&scratch, (size_t)sort_blocks(N * K) * E);
    (void)count; // the sort counts anyway, block by block
    sort_count(first, p->offsets, k);
    plan_topk_kernel<<<sort_blocks(N * K), THREADS, 0, device.stream>>>(
        *p, first, k, (const float *)weight, N, K);
    launched("plan_topk");
}

// How many slots an expert gets of which `count` rows chose it.
__device__ inline int selected_count(int count, Router r) {
    if (!r.tile) return count < r.limit ? count : r.limit;
    int tiles = count / r.tile;
    const int rest = count % r.tile, most = r.N / r.tile;
    tiles += 2 * rest > r.tile || (2 * rest == r.tile && tiles % 2);
    return (tiles < most ? tiles : most) * r.tile;
}

/* A row that an expert may take, as one number: better is larger. The upper half is the combine
   weight (0 where the row chose others), the lower one its rank, the probability or rather a
   logarithm of it up to what all rows share. Floats become unsigned numbers in the same order; NaN
   counts as -infinity, -0 as 0. Among equals the earlier row is better, so there never is a draw.
   */
__device__ inline unsigned ordered(float x) {
    const unsigned u = __float_as_uint(x != x ? -INFINITY : x == 0 ? 0.0f : x);
    return u >> 31 ? ~u : u | 0x80000000u;
}

// The candidates of an expert: its own rows where it shrinks, all others where it grows.
typedef struct Candidates {
    const float *weight, *logits, *lse; // of own rows (count); (N,E); (N)
    const int *own;                     // own rows, ascending
    const unsigned *mask;               // (words,E): a bit for every row that is selected
    int count, e, grows;
    Router r;
} Candidates;
__device__ inline int row_of(const Candidates *c, int i) { return c->grows ? i : c->own[i]; }
__device__ inline int is_candidate(const Candidates *c, int i) {
    return !c->grows || !(c->mask[(size_t)(i / 32) * c->r.E + c->e] >> i % 32 & 1);
}
__device__ inline uint64_t key_of(const Candidates *c, int i) {
    const int row = row_of(c, i);
    const float z = c->logits[(size_t)row * c->r.E + c->e];
    const float rank = c->r.kind == ROUTER_SIGMOID ? z : z - c->lse[row];
    return (uint64_t)ordered(c->grows ? 0 : c->weight[i]) << 32 | ordered(rank);
}

/* The sum of x over the threads before this one; the caller meets a barrier before `shared`
   (THREADS) is used again. */
__device__ inline int sum_before(int *shared, int x) {
    int sum = 0;
    shared[threadIdx.x] = x;
    __syncthreads();
    for (int i = 0; i < (int)threadIdx.x; i++) sum += shared[i];
    return sum;
}

/* A block finds the rows of one expert. mask (words,E): a bit for every row of 32; ranks (words,E):
   how many rows are selected before those 32. An expert that shrinks chooses among its own, one
   that grows keeps them and chooses among the others: the key of the last one taken is found digit
   by digit, from the top, by counting [radix select]; of the rows with that very key the earliest
   are taken. */
__global__ void __launch_bounds__(THREADS) plan_select_kernel(unsigned *mask, int *ranks, Plan p,
    const int *count, const float *logits, const float *lse, Router r) {
    __shared__ int tally[DIGITS]; // candidates by digit; then what sum_before needs
    __shared__ int need;          // how many are to be taken of those not yet decided
    __shared__ uint64_t last;     // the digits found so far
    static_assert((int)DIGITS == (int)THREADS, "a thread owns a digit");
    const int E = r.E, e = blockIdx.x, words = pieces_of(r.N, 32), have = count[e];
    const int want = selected_count(have, r), t = threadIdx.x;
    const Candidates c = {(const float *)p.weight + p.offsets[e], logits, lse, p.row + p.offsets[e],
        mask, have, e, want > have, r};
    const int candidates = c.grows ? r.N : have;
    for (int w = t; w < words; w += THREADS) mask[(size_t)w * E + e] = 0;
    __syncthreads();
    for (int i = t; i < have && want >= have; i += THREADS)
        atomicOr(&mask[(size_t)(c.own[i] / 32) * E + e], 1u << c.own[i] % 32);
    if (t == 0) need = c.grows ? want - have : want == have ? 0 : want;
    if (t == 0) last = c.grows ? ordered(0) : 0; // the weights are all 0
    __syncthreads();
    if (need) { // the same for all threads
        const int top = c.grows ? 32 : 64;
        for (int shift = top - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
            const uint64_t found = last;
            const int needed = need;
            tally[t] = 0;
            __syncthreads();
            for (int i = t; i < candidates; i += THREADS) {
                if (!is_candidate(&c, i)) continue;
                const uint64_t key = key_of(&c, i) >> shift;
                if (key >> DIGIT_BITS == found) atomicAdd(&tally[key & (DIGITS - 1)], 1);
            }
            __syncthreads();
            int above = 0; // candidates whose digit is larger than t
            for (int d = t + 1; d < DIGITS; d++) above += tally[d];
            if (above < needed && needed <= above + tally[t]) { // exactly one thread
                last = found << DIGIT_BITS | t;
                need = needed - above;
            }
            __syncthreads();
        }
        // a thread owns adjacent candidates: how many of them, and before them, have the last key
        const int each = pieces_of(candidates, THREADS);
        const int begin = t * each < candidates ? t * each : candidates;
        const int end = begin + each < candidates ? begin + each : candidates;
        const uint64_t key = last;
        const int ties = need;
        int equal = 0;
        for (int i = begin; i < end; i++) equal += is_candidate(&c, i) && key_of(&c, i) == key;
        int before = sum_before(tally, equal);
        // bits that others set meanwhile are not looked at: a row has one thread
        for (int i = begin; i < end; i++) {
            if (!is_candidate(&c, i)) continue;
            const uint64_t k = key_of(&c, i);
            const int row = row_of(&c, i), take = k > key || (k == key && before < ties);
            before += k == key;
            if (take) atomicOr(&mask[(size_t)(row / 32) * E + e], 1u << row % 32);
        }
        __syncthreads();
    }
    const int each = pieces_of(words, THREADS);
    const int begin = t * each < words ? t * each : words;
    const int end = begin + each < words ? begin + each : words;
    int taken = 0;
    for (int w = begin; w < end; w++) taken += __popc(mask[(size_t)w * E + e]);
    int before = sum_before(tally, taken);
    for (int w = begin; w < end; w++) {
        ranks[(size_t)w * E + e] = before;
        before += __popc(mask[(size_t)w * E + e]);
    }
}

// offsets and what was moved, once all experts have selected
__global__ void __launch_bounds__(THREADS)
    plan_offsets_kernel(int *offsets, int *moved, const int *count, Router r) {
    for (int e = threadIdx.x; e <= r.E; e += THREADS) {
        int at = 0;
        for (int i = 0; i < e; i++) at += selected_count(count[i], r);
        offsets[e] = at;
        if (e == r.E || !moved) continue;
        const int more = selected_count(count[e], r) - count[e];
        if (more) atomicAdd(&moved[more > 0], more > 0 ? more : -more);
    }
}

// A thread owns a row: its place in row_begin is the number of slots of the rows before it.
__global__ void __launch_bounds__(THREADS)
    plan_rows_kernel(Plan p, const unsigned *mask, const int *ranks, int N, int E) {
    const int n = blockIdx.x * THREADS + threadIdx.x;
    if (n >= N) return;
    const unsigned *bits = mask + (size_t)(n / 32) * E, below = (1u << n % 32) - 1;
    const int *rank = ranks + (size_t)(n / 32) * E;
    int at = 0;
    for (int e = 0; e < E; e++) at += rank[e] + __popc(bits[e] & below);
    p.row_begin[n] = at;
    for (int e = 0; e < E; e++) {
        if (!(bits[e] >> n % 32 & 1)) continue;
        const int s = p.offsets[e] + rank[e] + __popc(bits[e] & below);
        p.row[s] = n;
        p.expert[s] = e;
        p.slot[at++] = s;
    }
    if (n == N - 1) p.row_begin[N] = at;
}

// A slot's combine weight: the row's own where it chose the expert, else the raw score.
__global__ void __launch_bounds__(THREADS) plan_weights_kernel(
    Plan p, const int *idx, const float *weight, const float *logits, const float *lse, Router r) {
    const int s = blockIdx.x * THREADS + threadIdx.x;
    if (s >= p.offsets[r.E]) return;
    const size_t n = p.row[s];
    const int e = p.expert[s];
    int k = 0;
    while (k < r.K && idx[n * r.K + k] != e) k++;
    const float z = logits[n * r.E + e];
    ((float *)p.weight)[s] = k < r.K ? weight[n * r.K + k]
        : r.kind == ROUTER_SIGMOID   ? logistic(z)
                                     : expf(z - lse[n]);
}

static void plan_select(Plan *p, int *moved, const int *idx, const stat_t *weight_,
    const int *count, const stat_t *logits_, const stat_t *lse_, Router r, int reuse,
    void *scratch) {
    const float *weight = (const float *)weight_, *logits = (const float *)logits_;
    const float *lse = (const float *)lse_;
    const int N = r.N, E = r.E, words = pieces_of(N, 32);
    if (!reuse) {
        unsigned *mask = carve<unsigned>(&scratch, (size_t)words * E);
        int *ranks = carve<int>(&scratch, (size_t)words * E);
        plan_topk(p, idx, weight, count, N, r.K, E, scratch);
        plan_select_kernel<<<E, THREADS, 0, device.stream>>>(
            mask, ranks, *p, count, logits, lse, r);
        launched("plan_select");
        plan_offsets_kernel<<<1, THREADS, 0, device.stream>>>(p->offsets, moved, count, r);
        launched("plan_offsets");
        plan_rows_kernel<<<blocks_for(N, THREADS), THREADS, 0, device.stream>>>(
            *p, mask, ranks, N, E);
        launched("plan_rows");
    }
    const unsigned blocks = blocks_for(p->S_max, THREADS); // how many slots there are is not known
    plan_weights_kernel<<<blocks, THREADS, 0, device.stream>>>(*p, idx, weight, logits, lse, r);
    launched("plan_weights");
}

static size_t plan_scratch(const Config *c, const ScratchShape *s) {
    const size_t N = (size_t)s->B * s->T, words = pieces_of((int)N, 32);
    return 2 * round_up(words * c->n_experts * sizeof(int), ARENA_ALIGN) +
        topk_scratch((int)N * c->top_k, c->n_experts);
}

//SECTION experts

//SECTION classifier

//SECTION loss, norm, optimiser

// -------------------------------------------------------------------------------------------------
// loss

enum { SUM_GROUP = 16 }; // values that one thread adds of a block's sum

/* The sum of x over a block of THREADS, in thread 0: groups of SUM_GROUP in order, then the groups.
   */
__device__ inline double block_sum(double *shared, double x) {
    const int t = threadIdx.x;
    shared[t] = x;
    __syncthreads();
    if (t % SUM_GROUP == 0) {
        for (int i = 1; i < SUM_GROUP; i++) x += shared[t + i];
        shared[t] = x;
    }
    __syncthreads();
    if (t == 0)
        for (int i = SUM_GROUP; i < THREADS; i += SUM_GROUP) x += shared[i];
    return x;
}

__global__ void __launch_bounds__(THREADS)
    reduce_loss_kernel(StepState *st, const float *losses, int N, double scale) {
    __shared__ double sums[THREADS];
    __shared__ int first_bad;
    double sum = 0;
    int bad = N;
    if (threadIdx.x == 0) first_bad = N;
    __syncthreads();
    for (int n = threadIdx.x; n < N; n += THREADS) {
        sum += losses[n];
        if (!isfinite(losses[n]) && bad == N) bad = n;
    }
    if (bad < N) atomicMin(&first_bad, bad);
    const double total = block_sum(sums, sum);
    if (threadIdx.x) return;
    if (first_bad < N && !st->bad) {
        st->bad = BAD_LOSS;
        st->bad_index = first_bad;
    }
    st->loss += total * scale;
}

static void reduce_loss(StepState *st, const stat_t *losses, int N, double scale) {
    reduce_loss_kernel<<<1, THREADS, 0, device.stream>>>(st, (const float *)losses, N, scale);
    launched("reduce_loss");
}

// -------------------------------------------------------------------------------------------------
// gradient norm and optimisers

/* The arena of parameters is cut into pieces of PIECE elements, whatever lies in them; the grid
   walks the pieces, and in a piece the segments that reach into it. Segments ascend by offset, so
   the first is found by halving. */
enum {
    PIECE = 32768,
    PIECE_BLOCKS = 8 // blocks a processor that walk the pieces
};
__device__ inline int64_t piece_count(const Segment *seg, int nseg) {
    return nseg ? (int64_t)((seg[nseg - 1].offset + seg[nseg - 1].count + PIECE - 1) / PIECE) : 0;
}
// the first segment that ends beyond `at`
__device__ inline int segment_at(const Segment *seg, int nseg, size_t at) {
    int lo = 0;
    for (int hi = nseg; lo < hi;) {
        const int mid = lo + (hi - lo) / 2;
        if (seg[mid].offset + seg[mid].count > at)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}
// Elements [begin, end) of a segment in a piece: 16 bytes at a time up to `wide`, then one by one.
// Tensors start on ARENA_ALIGN bytes, so the latter are the last few of a tensor.
typedef struct Stretch {
    size_t begin, wide, end;
} Stretch;
__device__ inline Stretch stretch_of(const Segment *s, size_t piece) {
    const size_t p0 = piece * PIECE, p1 = p0 + PIECE, s1 = s->offset + s->count;
    Stretch x = {s->offset > p0 ? s->offset : p0, 0, s1 < p1 ? s1 : p1};
    x.wide = x.begin % 4 ? x.begin : x.end - (x.end - x.begin) % 4;
    return x;
}

typedef struct
    NormPart { // of a piece: sum of squares; the first segment that is not finite, or nseg
    double sum;
    int bad;
} NormPart;

__global__ void __launch_bounds__(THREADS)
    grad_norm_kernel(NormPart *part, const float *grads, const Segment *seg, int nseg) {
    __shared__ double sums[THREADS];
    __shared__ int first_bad;
    const int64_t pieces = piece_count(seg, nseg);
    for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        double sum = 0;
        int bad = nseg;
        if (threadIdx.x == 0) first_bad = nseg;
        __syncthreads(); // thread 0 comes here when it has read the sums of the piece before
        for (int i = segment_at(seg, nseg, piece * PIECE);
             i < nseg && seg[i].offset < (size_t)(piece + 1) * PIECE; i++) {
            const Stretch x = stretch_of(&seg[i], piece);
            int finite = 1;
            float g[4];
            for (size_t j = x.begin + threadIdx.x * 4; j < x.wide; j += THREADS * 4) {
                read_values<float, 4>(g, grads + j);
                for (int k = 0; k < 4; k++) sum += (double)g[k] * g[k];
                for (int k = 0; k < 4; k++) finite &= isfinite(g[k]);
            }
            for (size_t j = x.wide + threadIdx.x; j < x.end; j += THREADS) {
                sum += (double)grads[j] * grads[j];
                finite &= isfinite(grads[j]);
            }
            if (!finite && bad == nseg) bad = i;
        }
        if (bad < nseg) atomicMin(&first_bad, bad);
        sum = block_sum(sums, sum);
        if (threadIdx.x == 0) part[piece].sum = sum, part[piece].bad = first_bad;
    }
}

__global__ void __launch_bounds__(THREADS) clip_kernel(
    StepState *st, const NormPart *part, const Segment *seg, int nseg, double max_norm) {
    __shared__ double sums[THREADS];
    __shared__ int first_bad;
    const int64_t pieces = piece_count(seg, nseg);
    double sum = 0;
    int bad = nseg;
    if (threadIdx.x == 0) first_bad = nseg;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < pieces; i += THREADS) {
        sum += part[i].sum;
        bad = part[i].bad < bad ? part[i].bad : bad;
    }
    if (bad < nseg) atomicMin(&first_bad, bad);
    sum = block_sum(sums, sum);
    if (threadIdx.x) return;
    if (first_bad < nseg && !st->bad) {
        st->bad = BAD_GRADIENT;
        st->bad_index = first_bad;
    }
    st->grad_norm = sqrt(sum);
    st->clip = max_norm > 0 && st->grad_norm > max_norm ? max_norm / st->grad_norm : 1;
}

static void grad_norm(StepState *st, const grad_t *grads, const Segment *seg, int nseg,
    double max_norm, void *scratch) {
    NormPart *part = (NormPart *)scratch;
    grad_norm_kernel<<<device.processors * PIECE_BLOCKS, THREADS, 0, device.stream>>>(
        part, (const float *)grads, seg, nseg);
    launched("grad_norm");
    clip_kernel<<<1, THREADS, 0, device.stream>>>(st, part, seg, nseg, max_norm);
    launched("clip");
}

static size_t grad_norm_scratch(const Config *c) {
    TensorTable t;
    if (tensor_table_build(&t, c, sizeof(float))) die(RUN_ERROR, "no memory for the tensor table");
    const size_t pieces = (t.elements + PIECE - 1) / PIECE;
    tensor_table_free(&t);
    return round_up(pieces * sizeof(NormPart), ARENA_ALIGN);
}

/* AdamW [Loshchilov & Hutter 2019]: m and v are the moving means of g and g^2, corrected for their
   start at zero; p -= lr (mhat / (sqrt(vhat) + eps) + decay p). SGD: p -= lr (g + decay p), m and v
   unused. */
typedef struct Rates {
    float lr, clip, b1, b2, c1, c2, eps;
} Rates;
__device__ inline void adamw(float *p, float *m, float *v, float grad, Rates r, float decay) {
    const float g = grad * r.clip;
    *m = r.b1 * *m + (1 - r.b1) * g;
    *v = r.b2 * *v + (1 - r.b2) * (g * g);
    *p -= r.lr * (*m * r.c1 / (sqrtf(*v * r.c2) + r.eps) + decay * *p);
}
__device__ inline void sgd(float *p, float grad, Rates r, float decay) {
    *p -= r.lr * (grad * r.clip + decay * *p);
}

__global__ void __launch_bounds__(THREADS) update_kernel(float *params, const float *grads,
    float *m, float *v, const Segment *seg, int nseg, const StepState *st, OptimConfig o) {
    if (st->bad) return;
    const Rates r = {(float)st->lr, (float)st->clip, (float)o.beta1, (float)o.beta2,
        (float)(1 / st->beta1_correction), (float)(1 / st->beta2_correction), (float)o.eps};
    const int64_t pieces = piece_count(seg, nseg);
    for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x)
        for (int i = segment_at(seg, nseg, piece * PIECE);
             i < nseg && seg[i].offset < (size_t)(piece + 1) * PIECE; i++) {
            const Stretch x = stretch_of(&seg[i], piece);
            const float decay = seg[i].decay ? (float)o.weight_decay : 0;
            for (size_t j = x.begin + threadIdx.x * 4; j < x.wide; j += THREADS * 4) {
                float pj[4], gj[4], mj[4], vj[4];
                read_values<float, 4>(pj, params + j);
                read_values<float, 4>(gj, grads + j);
                if (o.sgd) {
                    for (int k = 0; k < 4; k++) sgd(&pj[k], gj[k], r, decay);
                } else {
                    read_values<float, 4>(mj, m + j);
                    read_values<float, 4>(vj, v + j);
                    for (int k = 0; k < 4; k++) adamw(&pj[k], &mj[k], &vj[k], gj[k], r, decay);
                    write_values<float, 4>(m + j, mj);
                    write_values<float, 4>(v + j, vj);
                }
                write_values<float, 4>(params + j, pj);
            }
            for (size_t j = x.wide + threadIdx.x; j < x.end; j += THREADS) {
                if (o.sgd)
                    sgd(&params[j], grads[j], r, decay);
                else
                    adamw(&params[j], &m[j], &v[j], grads[j], r, decay);
            }
        }
}

static void update(param_t *params, const grad_t *grads, grad_t *m, grad_t *v, const Segment *seg,
    int nseg, const StepState *st, OptimConfig o) {
    update_kernel<<<device.processors * PIECE_BLOCKS, THREADS, 0, device.stream>>>(
        (float *)params, (const float *)grads, (float *)m, (float *)v, seg, nseg, st, o);
    launched("update");
}

__global__ void __launch_bounds__(THREADS)
    update_bias_kernel(float *bias, const int *count_sum, int E, double rate, const StepState *st) {
    int64_t total = 0;
    if (st->bad) return;
    for (int e = 0; e < E; e++) total += count_sum[e];
    for (int e = threadIdx.x; e < E; e += THREADS) { // the sign of mean - load, in whole numbers
        const int64_t d = total - (int64_t)count_sum[e] * E;
        bias[e] += (float)(rate * ((d > 0) - (d < 0)));
    }
}

static void update_bias(
    stat_t *bias, const int *count_sum, int E, double rate, const StepState *st) {
    update_bias_kernel<<<1, THREADS, 0, device.stream>>>((float *)bias, count_sum, E, rate, st);
    launched("update_bias");
}

// All parameters rounded to bf16, at the same offsets; 8 of them a thread and turn.
__global__ void __launch_bounds__(THREADS)
    params_changed_kernel(bf16 *copies, const float *params, size_t count) {
    const size_t wide = count / 8 * 8, t = (size_t)blockIdx.x * THREADS + threadIdx.x;
    float x[8];
    for (size_t i = t * 8; i < wide; i += (size_t)gridDim.x * THREADS * 8) {
        read_floats<8>(x, params + i);
        write_values<bf16, 8>(copies + i, x);
    }
    if (wide + t < count) copies[wide + t] = from_float<bf16>(params[wide + t]);
}

static void params_changed(void *copies, const param_t *params, const TensorTable *t) {
    params_changed_kernel<<<device.processors * PIECE_BLOCKS, THREADS, 0, device.stream>>>(
        (bf16 *)copies, (const float *)params, t->elements);
    launched("params_changed");
}

//SECTION memory, table
