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

/* acc += A B^T over `depth`, a multiple of 16. A lies in shared memory as (16 MF, depth) in rows of
   lda, or as (depth, 16 MF) where A_T; B as (8 NF, depth) in rows of ldb, or (depth, 8 NF) where
   B_T; NF is even, rows start on 16 bytes. Lane l of the warp holds in acc[i][j][r] row 16 i + l /
   4 + 8 (r / 2) and column 8 j + 2 (l % 4) + r % 2. Each element is added along k, 16 at a time
   from 0. */
template <int MF, int NF, bool A_T, bool B_T>
__device__ inline void warp_product(
    float (&acc)[MF][NF][4], const bf16 *a, int lda, const bf16 *b, int ldb, int depth) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int low = lane & 7, mid = (lane >> 3 & 1) * 8, high = (lane >> 4) * 8;
    for (int k = 0; k < depth; k += 16) {
        unsigned af[MF][4];
#pragma unroll
        for (int i = 0; i < MF; i++)
            if constexpr (A_T)
                ldmatrix_x4_trans(af[i], a + (k + low + high) * lda + 16 * i + mid);
            else
                ldmatrix_x4(af[i], a + (16 * i + low + mid) * lda + k + high);
#pragma unroll
        for (int j = 0; j < NF; j += 2) { // two fragments of B at a time: few registers
            unsigned bf[4];
            if constexpr (B_T)
                ldmatrix_x4_trans(bf, b + (k + low + mid) * ldb + 8 * j + high);
            else
                ldmatrix_x4(bf, b + (8 * j + low + high) * ldb + k + mid);
#pragma unroll
            for (int i = 0; i < MF; i++) {
                mma_bf16(acc[i][j], af[i], bf);
                mma_bf16(acc[i][j + 1], af[i], bf + 2);
            }
        }
    }
}
template <int MF, int NF, bool A_T, bool B_T>
__device__ inline void warp_product(
    float (&acc)[MF][NF][4], const float *a, int lda, const float *b, int ldb, int depth) {
    const int lane = threadIdx.x % WARP_SIZE, row = lane / 4, col = lane % 4 * 2;
    for (int k = 0; k < depth; k++) {
        float x[MF][2];
#pragma unroll
        for (int i = 0; i < MF; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int m = 16 * i + 8 * h + row;
                x[i][h] = A_T ? a[k * lda + m] : a[m * lda + k];
            }
#pragma unroll
        for (int j = 0; j < NF; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int n = 8 * j + col + h;
                const float y = B_T ? b[k * ldb + n] : b[n * ldb + k];
#pragma unroll
                for (int i = 0; i < MF; i++) {
                    acc[i][j][h] = fmaf(x[i][0], y, acc[i][j][h]);
                    acc[i][j][2 + h] = fmaf(x[i][1], y, acc[i][j][2 + h]);
                }
            }
    }
}

//SECTION embedding, norms, add

//SECTION linear

//SECTION rotary, attention

// -------------------------------------------------------------------------------------------------
// rotary embedding with query and key norms

enum { ROPE_ROWS = 64 }; // rows whose part of a weight gradient one thread adds

/* A row of qkv, (n_heads + 2 n_kv_heads) heads, as groups of heads that are handled together: q and
   k have one group a head, or one in all under the full norm; v has one a head. A warp takes a
   group. */
struct QkGroups {
    int q, k, all;        // groups of q, of k, of the whole row
    int q_heads, k_heads; // heads of a group
    int q_width, k_width; // values of a norm's weight
    int width, stride;    // values of q and k, of the whole row
};
__host__ __device__ inline QkGroups qk_groups(const Attn &a) {
    const bool full = a.qk_norm == QK_NORM_FULL;
    QkGroups g;
    g.q = full ? 1 : a.n_heads, g.k = full ? 1 : a.n_kv_heads, g.all = g.q + g.k + a.n_kv_heads;
    g.q_heads = a.n_heads / g.q, g.k_heads = a.n_kv_heads / g.k;
    g.q_width = g.q_heads * a.head_dim, g.k_width = g.k_heads * a.head_dim;
    g.width = (a.n_heads + a.n_kv_heads) * a.head_dim;
    g.stride = g.width + a.n_kv_heads * a.head_dim;
    return g;
}

// A group: part of the row, number of heads, where its first head lies in the row and in its part.
struct QkGroup {
    enum { Q, K, V } part;
    int heads, in_row, in_part;
};
__device__ inline QkGroup qk_group(const Attn &a, const QkGroups &g, int i) {
    if (i < g.q) return {QkGroup::Q, g.q_heads, i * g.q_heads, i * g.q_heads};
    i -= g.q;
    if (i < g.k) return {QkGroup::K, g.k_heads, a.n_heads + i * g.k_heads, i * g.k_heads};
    i -= g.k;
    return {QkGroup::V, 1, a.n_heads + a.n_kv_heads + i, i};
}

/* x r w, then pairs (i, i + hd/2) turned by their angles; w NULL: x. q (B,n_heads,T,hd), k, v
   (B,n_kv_heads,cache_len,hd), rstd (N,groups), qkv (N,stride), rope (positions,hd) */
template <class T>
__global__ void qk_rope_forward_kernel(T *q, T *k, T *v, float *rstd, const T *qkv,
    const float *q_weight, const float *k_weight, const float *rope, Attn a) {
    const QkGroups groups = qk_groups(a);
    const int hd = a.head_dim, half = hd / 2, lane = threadIdx.x % WARP_SIZE;
    const size_t task = (size_t)blockIdx.x * (blockDim.x / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    const size_t n = task / groups.all;
    if (n >= (size_t)a.B * a.T) return;
    const int b = (int)(n / a.T), t = (int)(n % a.T), pos = (a.start ? a.start[b] : 0) + t;
    const bool padding = a.len && t >= a.len[b];
    const int group = (int)(task % groups.all), norms = groups.q + groups.k;
    const QkGroup g = qk_group(a, groups, group);
    const T *x = qkv + n * groups.stride + (size_t)g.in_row * hd;
    const float *w = g.part == QkGroup::Q ? q_weight : k_weight;
    const bool normed = g.part != QkGroup::V && a.qk_norm != QK_NORM_NONE;

    float r = 1;
    if (normed) {
        float squares = 0;
        for (int i = lane; i < g.heads * hd; i += WARP_SIZE) {
            const float u = to_float(x[i]);
            squares = fmaf(u, u, squares);
        }
        r = 1 / sqrtf(warp_sum(squares) / (float)(g.heads * hd) + (float)a.eps);
        if (rstd && lane == 0) rstd[n * norms + group] = r;
    }
    if (padding && g.part != QkGroup::Q) return; // the cache is left alone
    for (int h = 0; h < g.heads; h++, x += hd) {
        const int head = g.in_part + h;
        T *out = g.part == QkGroup::Q ? q + (((size_t)b * a.n_heads + head) * a.T + t) * hd
                                      : (g.part == QkGroup::K ? k : v) +
                (((size_t)b * a.n_kv_heads + head) * a.cache_len + pos) * hd;
        if (padding || g.part == QkGroup::V) {
            for (int i = lane; i < hd; i += WARP_SIZE) out[i] = padding ? from_float<T>(0) : x[i];
            continue;
        }
        const float *angle = rope + (size_t)pos * hd; // half cosines, half sines
        for (int i = lane; i < half; i += WARP_SIZE) {
            float low = to_float(x[i]), high = to_float(x[half + i]);
            if (normed) low = low * r * w[h * hd + i], high = high * r * w[h * hd + half + i];
            const float c = angle[i], s = angle[half + i];
            out[i] = from_float<T>(low * c - high * s);
            out[half + i] = from_float<T>(high * c + low * s);
        }
    }
}

template <class T>
static void qk_rope_forward(act_t *q, act_t *k, act_t *v, stat_t *rstd, const act_t *qkv,
    const param_t *q_weight, const param_t *k_weight, const stat_t *rope, Attn a) {
    const size_t tasks = (size_t)a.B * a.T * qk_groups(a).all;
    const unsigned blocks = blocks_for(tasks, THREADS / WARP_SIZE);
    qk_rope_forward_kernel<T><<<blocks, THREADS, 0, device.stream>>>((T *)q, (T *)k, (T *)v,
        (float *)rstd, (const T *)qkv, (const float *)q_weight, (const float *)k_weight,
        (const float *)rope, a);
    launched("qk_rope_forward");
}

// A gradient turned back: value i of the head whose rotated gradient is d (hd).
template <class T>
__device__ inline float unrotated(const T *d, const float *angle, int i, int half) {
    const int at = i < half ? i : i - half;
    const float low = to_float(d[at]), high = to_float(d[half + at]);
    const float c = angle[at], s = angle[half + at];
    return i < half ? low * c + high * s : high * c - low * s;
}

/* With g the gradient turned back and xhat = x r: dx = r (g w - xhat m), m = the mean of g w xhat
   over the group; without a norm, dx = g. Training shapes: dq (B,n_heads,T,hd), dk, dv
   (B,n_kv_heads,T,hd) */
template <class T>
__global__ void qk_rope_backward_kernel(T *dqkv, const T *dq, const T *dk, const T *dv,
    const T *qkv, const float *rstd, const float *q_weight, const float *k_weight,
    const float *rope, Attn a) {
    const QkGroups groups = qk_groups(a);
    const int hd = a.head_dim, half = hd / 2, lane = threadIdx.x % WARP_SIZE;
    const size_t task = (size_t)blockIdx.x * (blockDim.x / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    const size_t n = task / groups.all;
    if (n >= (size_t)a.B * a.T) return;
    const int b = (int)(n / a.T), t = (int)(n % a.T), group = (int)(task % groups.all);
    const QkGroup g = qk_group(a, groups, group);
    const size_t in_row = n * groups.stride + (size_t)g.in_row * hd;
    const int heads = g.part == QkGroup::Q ? a.n_heads : a.n_kv_heads;
    const T *d = g.part == QkGroup::Q ? dq : g.part == QkGroup::K ? dk : dv;
    d += (((size_t)b * heads + g.in_part) * a.T + t) * hd;
    const size_t next = (size_t)a.T * hd; // from head to head
    T *dx = dqkv + in_row;
    if (g.part == QkGroup::V) {
        for (int i = lane; i < hd; i += WARP_SIZE) dx[i] = d[i];
        return;
    }
    const T *x = qkv + in_row;
    const float *w = g.part == QkGroup::Q ? q_weight : k_weight;
    const float *angle = rope + (size_t)t * hd;
    const bool normed = a.qk_norm != QK_NORM_NONE;

    float r = 1, mean = 0;
    if (normed) {
        r = rstd[n * (groups.q + groups.k) + group];
        for (int h = 0; h < g.heads; h++)
            for (int i = lane; i < hd; i += WARP_SIZE)
                mean += unrotated(d + h * next, angle, i, half) * w[h * hd + i] *
                    to_float(x[h * hd + i]);
        mean = warp_sum(mean) * r / (float)(g.heads * hd);
    }
    for (int h = 0; h < g.heads; h++)
        for (int i = lane; i < hd; i += WARP_SIZE) {
            float u = unrotated(d + h * next, angle, i, half);
            if (normed) u = r * (u * w[h * hd + i] - to_float(x[h * hd + i]) * r * mean);
            dx[h * hd + i] = from_float<T>(u);
        }
}

/* Parts of the weight gradients, sum of g xhat: a thread adds one column of q and k over ROPE_ROWS
   rows.   partial (pieces, width) */
template <class T>
__global__ void qk_rope_partial_kernel(float *partial, const T *dq, const T *dk, const T *qkv,
    const float *rstd, const float *rope, Attn a, int pieces) {
    const QkGroups groups = qk_groups(a);
    const int hd = a.head_dim, N = a.B * a.T;
    const size_t task = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int piece = (int)(task / groups.width), column = (int)(task % groups.width);
    if (piece >= pieces) return;
    const bool is_k = column >= a.n_heads * hd;
    const int head = column / hd - (is_k ? a.n_heads : 0), heads = is_k ? a.n_kv_heads : a.n_heads;
    const int norm = is_k ? groups.q + head / groups.k_heads : head / groups.q_heads;
    const T *d = is_k ? dk : dq;
    float sum = 0;
    for (int n = piece * ROPE_ROWS; n < N && n < (piece + 1) * ROPE_ROWS; n++) {
        const int b = n / a.T, t = n % a.T;
        const float g = unrotated(d + (((size_t)b * heads + head) * a.T + t) * hd,
            rope + (size_t)t * hd, column % hd, hd / 2);
        const float xhat = to_float(qkv[(size_t)n * groups.stride + column]) *
            rstd[(size_t)n * (groups.q + groups.k) + norm];
        sum = fmaf(g, xhat, sum);
    }
    partial[task] = sum;
}

/* dq_weight += and dk_weight += the sum of the parts, of all heads under the norm per head. A warp
   has one value of a weight; its lanes take the parts in turn. */
static __global__ void qk_rope_weights_kernel(
    float *dq_weight, float *dk_weight, const float *partial, Attn a, int pieces) {
    const QkGroups g = qk_groups(a);
    const int lane = threadIdx.x % WARP_SIZE;
    int i = (int)(blockIdx.x * (blockDim.x / WARP_SIZE) + threadIdx.x / WARP_SIZE);
    if (i >= g.q_width + g.k_width) return;
    const bool is_k = i >= g.q_width;
    if (is_k) i -= g.q_width;
    const float *from = partial + (is_k ? a.n_heads * a.head_dim : 0) + i;
    const int parts = is_k ? g.k : g.q, apart = is_k ? g.k_width : g.q_width; // of a piece
    float sum = 0;
    for (size_t p = lane; p < (size_t)pieces * parts; p += WARP_SIZE)
        sum += from[p / parts * g.width + p % parts * apart];
    sum = warp_sum(sum);
    if (lane == 0) (is_k ? dk_weight : dq_weight)[i] += sum;
}

static size_t qk_rope_scratch(const Config *c, const ScratchShape *s) {
    const size_t pieces = ((size_t)s->B * s->T + ROPE_ROWS - 1) / ROPE_ROWS;
    const size_t width = (size_t)(c->n_heads + c->n_kv_heads) * c->head_dim;
    const int needed = s->backward && c->qk_norm != QK_NORM_NONE;
    return needed ? round_up(pieces * width * sizeof(float), ARENA_ALIGN) : 0;
}

template <class T>
static void qk_rope_backward(act_t *dqkv, grad_t *dq_weight, grad_t *dk_weight, const act_t *dq,
    const act_t *dk, const act_t *dv, const act_t *qkv, const stat_t *rstd, const param_t *q_weight,
    const param_t *k_weight, const stat_t *rope, Attn a, void *scratch) {
    const QkGroups g = qk_groups(a);
    const size_t N = (size_t)a.B * a.T;
    const int pieces = pieces_of((int)N, ROPE_ROWS), warps = THREADS / WARP_SIZE;
    qk_rope_backward_kernel<T><<<blocks_for(N * g.all, warps), THREADS, 0, device.stream>>>(
        (T *)dqkv, (const T *)dq, (const T *)dk, (const T *)dv, (const T *)qkv, (const float *)rstd,
        (const float *)q_weight, (const float *)k_weight, (const float *)rope, a);
    launched("qk_rope_backward");
    if (a.qk_norm == QK_NORM_NONE) return;
    float *partial = carve<float>(&scratch, (size_t)pieces * g.width);
    const unsigned blocks = blocks_for((size_t)pieces * g.width, THREADS);
    qk_rope_partial_kernel<T><<<blocks, THREADS, 0, device.stream>>>(partial, (const T *)dq,
        (const T *)dk, (const T *)qkv, (const float *)rstd, (const float *)rope, a, pieces);
    launched("qk_rope_backward, parts of the weight gradients");
    const unsigned columns = blocks_for(g.q_width + g.k_width, warps);
    qk_rope_weights_kernel<<<columns, THREADS, 0, device.stream>>>(
        (float *)dq_weight, (float *)dk_weight, partial, a, pieces);
    launched("qk_rope_backward, weight gradients");
}

// -------------------------------------------------------------------------------------------------
// attention [Dao 2022, FlashAttention: online softmax over key blocks]

/* The queries of all heads that share a key-value head are rows of one matrix: row r is token r /
   group of head r % group, so that key j is seen from row (j - start) group on. A block has 64 rows
   or 64 keys, a warp 16 of them, and products of 16 rows by the other side's tile.

   A row's result depends on nothing beside it: key blocks are fixed from key 0 and never split,
   each element of a product is added in one order wherever its row lies in the tile, and a key that
   a row does not see adds exactly nothing. So one token at a time with a cache gives the bits of
   training.

   HD is the head dimension rounded up to a size that kernels are made for; tiles hold zeros beyond
   head_dim, and their rows are 16 bytes longer than their values, so that eight rows at one column
   lie in different banks. */
constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;
enum {
    KEY_BLOCK = 64, // as in moe_cpu.c
    QUERY_TILE = 64,
    ATTENTION_THREADS = QUERY_TILE / 16 * WARP_SIZE
};

template <class T> struct Chunk {
    enum { SIZE = 16 / sizeof(T) }; // values in 16 bytes
};

// Two neighbours, x at an even index.
__device__ inline void store_pair(float *p, float x, float y) { *(float2 *)p = make_float2(x, y); }
__device__ inline void store_pair(bf16 *p, float x, float y) {
    *(__nv_bfloat162 *)p = __floats2bfloat162_rn(x, y);
}

/* Rows of hd values to a tile (ROWS, HD) in shared memory: row i from at(i), zeros where that is
   NULL. In the background where rows are whole chunks of 16 bytes: wait for the copies, then for
   the block. */
template <int ROWS, int HD, class T, class At>
__device__ inline void load_tile(T *tile, int hd, At at) {
    enum { SIZE = Chunk<T>::SIZE, LD = HD + SIZE };
    if (hd % SIZE == 0) {
        for (int i = threadIdx.x; i < ROWS * (HD / SIZE); i += ATTENTION_THREADS) {
            const int row = i / (HD / SIZE), column = i % (HD / SIZE) * SIZE;
            const T *from = column < hd ? at(row) : nullptr;
            if (from)
                cp_async16(tile + row * LD + column, from + column, 16);
            else
                store16(tile + row * LD + column, make_uint4(0, 0, 0, 0));
        }
    } else {
        for (int i = threadIdx.x; i < ROWS * HD; i += ATTENTION_THREADS) {
            const int row = i / HD, column = i % HD;
            const T *from = column < hd ? at(row) : nullptr;
            tile[row * LD + column] = from ? from[column] : from_float<T>(0);
        }
    }
    cp_async_commit();
}

/* A warp's 16 rows of a result, of which `have` columns exist, to global memory: row i to at(i), if
   not NULL. They pass through `tile`: 16 rows of ld in shared memory, used by this warp alone. */
template <int NF, class T, class At>
__device__ inline void store_rows(
    T *tile, int ld, const float (&acc)[1][NF][4], int have, bool chunks, At at) {
    enum { SIZE = Chunk<T>::SIZE, COLUMNS = 8 * NF };
    const int lane = threadIdx.x % WARP_SIZE;
    __syncwarp(); // until every lane has read what it wanted of the tile
#pragma unroll
    for (int j = 0; j < NF; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            store_pair(tile + (lane / 4 + 8 * h) * ld + 8 * j + 2 * (lane % 4), acc[0][j][2 * h],
                acc[0][j][2 * h + 1]);
    __syncwarp();
    if (chunks) {
        for (int i = lane; i < 16 * (COLUMNS / SIZE); i += WARP_SIZE) {
            const int row = i / (COLUMNS / SIZE), column = i % (COLUMNS / SIZE) * SIZE;
            T *to = column < have ? at(row) : nullptr;
            if (to) store16(to + column, load16(tile + row * ld + column));
        }
    } else {
        for (int i = lane; i < 16 * COLUMNS; i += WARP_SIZE) {
            T *to = i % COLUMNS < have ? at(i / COLUMNS) : nullptr;
            if (to) to[i % COLUMNS] = tile[i / COLUMNS * ld + i % COLUMNS];
        }
    }
}

// Where row r of the queries of key-value head `kv` lies: in (B,n_heads,T), in (B,T,n_heads).
__device__ inline size_t query_row(const Attn &a, int b, int kv, int r) {
    const int group = a.n_heads / a.n_kv_heads;
    return ((size_t)b * a.n_heads + kv * group + r % group) * a.T + r / group;
}
__device__ inline size_t output_row(const Attn &a, int b, int kv, int r) {
    const int group = a.n_heads / a.n_kv_heads;
    return ((size_t)b * a.T + r / group) * a.n_heads + kv * group + r % group;
}

/* Blocks that a processor should hold at once: its 65,536 registers, for so many columns that a
   warp works on. */
constexpr int blocks_beside(int columns) { return columns <= 64 ? 4 : columns <= 128 ? 3 : 2; }

// Whether all values in 16 bytes of T are finite: an exponent of ones is Inf or NaN.
template <class T> __device__ inline bool finite_chunk(uint4 v) {
    const unsigned word[4] = {v.x, v.y, v.z, v.w};
    bool ok = true;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        ok = ok && (word[i] & 0x7F800000) != 0x7F800000;
        if (sizeof(T) == 2) ok = ok && (word[i] & 0x7F80) != 0x7F80; // two values in a word
    }
    return ok;
}

/* Shared memory of a block: `rows` rows of HD values, and 64 of `wide` (P or dS), each 16 bytes
   longer. */
template <class T, int HD> constexpr int attention_shared(int rows, int wide) {
    return (rows * (HD + Chunk<T>::SIZE) + 64 * (wide + Chunk<T>::SIZE)) * (int)sizeof(T);
}

/* For key blocks in order: S = Q K^T / sqrt(hd), m the largest S so far, fade = exp(m_before - m):
     P = exp(S - m),   l = l fade + sum P,   O = O fade + P V;
   at the end out = O / l, lse = m + log l. Powers are of 2: scale2 = log2(e) / sqrt(hd), and m is
   kept before scaling.
   Single buffers: V arrives under S and P, the next K under P V. */
template <class T, int HD>
__global__ void __launch_bounds__(ATTENTION_THREADS, blocks_beside(HD)) attention_forward_kernel(
    T *out, float *lse, const T *q, const T *k, const T *v, Attn a, float scale2) {
    enum { LD = HD + Chunk<T>::SIZE, LDP = KEY_BLOCK + Chunk<T>::SIZE };
    extern __shared__ uint4 memory[];
    __shared__ int broken; // a value that is not finite was met
    T *Q = (T *)memory, *K = Q + QUERY_TILE * LD, *V = K + KEY_BLOCK * LD, *P = V + KEY_BLOCK * LD;
    const int hd = a.head_dim, group = a.n_heads / a.n_kv_heads, heads = a.B * a.n_kv_heads;
    const int tiles = pieces_of(group * a.T, QUERY_TILE);
    // late tiles first: they walk the most keys
    const int r0 = (tiles - 1 - (int)(blockIdx.x / heads)) * QUERY_TILE;
    const int b = (int)(blockIdx.x % heads) / a.n_kv_heads, kv = (int)(blockIdx.x % a.n_kv_heads);
    const int start = a.start ? a.start[b] : 0, len = a.len ? a.len[b] : a.T, end = start + len;
    const int rows = min(group * len - r0, (int)QUERY_TILE);          // of real tokens: may be none
    const int last = rows > 0 ? start + (r0 + rows - 1) / group : -1; // key that the tile sees
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const size_t cache = ((size_t)b * a.n_kv_heads + kv) * a.cache_len;
    const auto key = [&](int j) { return j < end ? k + (cache + j) * hd : nullptr; };
    const auto value = [&](int j) { return j < end ? v + (cache + j) * hd : nullptr; };

    // this warp's rows, and in this lane rows lane / 4 and lane / 4 + 8 of them
    const int w0 = r0 + 16 * warp, w_rows = min(r0 + rows - w0, 16);
    const int w_last = w_rows > 0 ? start + (w0 + w_rows - 1) / group : -1;
    T *Qw = Q + 16 * warp * LD, *Pw = P + 16 * warp * LDP;
    int seen[2];                                        // the last key
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}; // l: of this lane's columns
    float o[1][HD / 8][4] = {};
    for (int h = 0; h < 2; h++) seen[h] = start + (w0 + lane / 4 + 8 * h) / group;

    if (threadIdx.x == 0) broken = 0;
    if (rows > 0) {
        load_tile<QUERY_TILE, HD>(Q, hd,
            [&](int i) { return i < rows ? q + query_row(a, b, kv, r0 + i) * hd : nullptr; });
        load_tile<KEY_BLOCK, HD>(K, hd, key);
    }
    for (int j0 = 0; j0 <= last; j0 += KEY_BLOCK) {
        cp_async_wait<0>();
        __syncthreads(); // K is here; all are done with V
        load_tile<KEY_BLOCK, HD>(V, hd, [&](int j) { return value(j0 + j); });
        if (j0 <= w_last) {
            float s[1][KEY_BLOCK / 8][4] = {};
            warp_product<1, KEY_BLOCK / 8, false, false>(s, Qw, LD, K, LD, HD);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int to = seen[h] - j0 - 2 * (lane % 4); // of this lane's columns
                float top = m[h], sum = 0;
#pragma unroll
                for (int j = 0; j < KEY_BLOCK / 8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &x = s[0][j][2 * h + e];
                        if (8 * j + e > to) x = -INFINITY;
                        top = fmaxf(top, x); // past NaN, which P then is
                    }
                top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
                top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
                const float fade = exp2f((m[h] - top) * scale2), top2 = top * scale2;
#pragma unroll
                for (int j = 0; j < KEY_BLOCK / 8; j++) {
                    const float p0 = exp2f(fmaf(s[0][j][2 * h], scale2, -top2));
                    const float p1 = exp2f(fmaf(s[0][j][2 * h + 1], scale2, -top2));
                    sum += p0 + p1;
                    store_pair(Pw + (lane / 4 + 8 * h) * LDP + 8 * j + 2 * (lane % 4), p0, p1);
                }
#pragma unroll
                for (int j = 0; j < HD / 8; j++) o[0][j][2 * h] *= fade, o[0][j][2 * h + 1] *= fade;
                m[h] = top, l[h] = l[h] * fade + sum;
            }
        }
        cp_async_wait<0>();
        __syncthreads(); // V and P are here; all are done with K
        if (j0 + KEY_BLOCK <= last)
            load_tile<KEY_BLOCK, HD>(K, hd, [&](int j) { return key(j0 + KEY_BLOCK + j); });
        /* 0 times Inf or NaN is NaN: where some row does not see all of the block, such values are
           looked for. A row that sees one becomes NaN there; the others must not meet it. */
        if (j0 + KEY_BLOCK - 1 > start + r0 / group) {
            enum { SIZE = Chunk<T>::SIZE, CHUNKS = KEY_BLOCK * (HD / SIZE) };
            for (int i = threadIdx.x; i < CHUNKS; i += ATTENTION_THREADS)
                if (!finite_chunk<T>(load16(V + i / (HD / SIZE) * LD + i % (HD / SIZE) * SIZE)))
                    broken = 1;
            __syncthreads();
            if (broken) {
                for (int j = 0; j < KEY_BLOCK; j++)
#pragma unroll
                    for (int c = 0; c < HD / 8; c++)
#pragma unroll
                        for (int r = 0; r < 4; r++)
                            if (j0 + j <= seen[r / 2] &&
                                !isfinite(to_float(V[j * LD + 8 * c + 2 * (lane % 4) + r % 2])))
                                o[0][c][r] = NAN;
                __syncthreads();
                for (int i = threadIdx.x; i < KEY_BLOCK * HD; i += ATTENTION_THREADS) {
                    T *x = V + i / HD * LD + i % HD;
                    if (!isfinite(to_float(*x))) *x = from_float<T>(0);
                }
                __syncthreads();
            }
        }
        if (j0 <= w_last) warp_product<1, HD / 8, false, true>(o, Pw, LDP, V, LD, KEY_BLOCK);
    }

#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int i = lane / 4 + 8 * h, r = w0 + i;
        float total = l[h];
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
        const float inv = 1 / total;
#pragma unroll
        for (int j = 0; j < HD / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = o[0][j][2 * h + e];
                x = i < w_rows ? x * inv : 0; // padding: zeros
            }
        if (lse && lane % 4 == 0 && i < w_rows)
            lse[query_row(a, b, kv, r)] = m[h] * scale2 * LN2 + logf(total);
    }
    store_rows(Qw, LD, o, hd, hd % Chunk<T>::SIZE == 0, [&](int i) {
        return w0 + i < group * a.T ? out + output_row(a, b, kv, w0 + i) * hd : nullptr;
    });
}

// D = <dout, out>.   D (B,n_heads,T), dout, out (B,T,n_heads,hd). A warp has a row.
template <class T>
__global__ void attention_D_kernel(float *D, const T *dout, const T *out, Attn a) {
    const int lane = threadIdx.x % WARP_SIZE;
    const size_t row = (size_t)blockIdx.x * (blockDim.x / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    if (row >= (size_t)a.B * a.T * a.n_heads) return;
    const size_t bt = row / a.n_heads, h = row % a.n_heads, b = bt / a.T, t = bt % a.T;
    float sum = 0;
    for (int i = lane; i < a.head_dim; i += WARP_SIZE)
        sum = fmaf(to_float(dout[row * a.head_dim + i]), to_float(out[row * a.head_dim + i]), sum);
    sum = warp_sum(sum);
    if (lane == 0) D[(b * a.n_heads + h) * a.T + t] = sum;
}

/* A block owns 64 keys of a key-value head and walks the rows of its queries, WIDE at a time. Its
   warps hold transposes, of 16 keys:
     P^T = exp(K Q^T / sqrt(hd) - lse),   dS^T = P^T (V dO^T - D),
     dV = P^T dO,   dK = dS^T Q / sqrt(hd).
   STRIP: how many columns of dK and dV, where registers do not hold all HD.
   Single buffers: dO arrives under K Q^T, the next Q under P^T dO. */
template <class T, int HD, int STRIP, int WIDE>
__global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_dkdv_kernel(T *dk, T *dv, const T *dout, const float *lse, const float *D, const T *q,
        const T *k, const T *v, Attn a, float scale) {
    enum { LD = HD + Chunk<T>::SIZE, LDX = WIDE + Chunk<T>::SIZE };
    extern __shared__ uint4 memory[];
    __shared__ float row_lse[WIDE];
    __shared__ float row_D[WIDE];
    T *K = (T *)memory, *V = K + KEY_BLOCK * LD, *Q = V + KEY_BLOCK * LD, *dO = Q + WIDE * LD,
      *X = dO + WIDE * LD;
    const int hd = a.head_dim, group = a.n_heads / a.n_kv_heads, all = group * a.T;
    const int strips = HD / STRIP, c0 = (int)(blockIdx.x % strips) * STRIP; // first column
    const int head = (int)(blockIdx.x / strips % (a.B * a.n_kv_heads));
    const int b = head / a.n_kv_heads, kv = head % a.n_kv_heads;
    // early keys first: the most rows see them
    const int j0 = (int)(blockIdx.x / strips / (a.B * a.n_kv_heads)) * KEY_BLOCK;
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const size_t cache = (size_t)head * a.T;
    const auto query = [&](int r) { return r < all ? q + query_row(a, b, kv, r) * hd : nullptr; };

    // this warp's keys, and in this lane keys lane / 4 and lane / 4 + 8 of them
    const int w0 = j0 + 16 * warp, w_keys = min(a.T - w0, 16);
    T *Kw = K + 16 * warp * LD, *Vw = V + 16 * warp * LD, *Xw = X + 16 * warp * LDX;
    T *Xlane = Xw + lane / 4 * LDX + 2 * (lane % 4);
    float dK[1][STRIP / 8][4] = {}, dV[1][STRIP / 8][4] = {};

    load_tile<KEY_BLOCK, HD>(
        K, hd, [&](int j) { return j0 + j < a.T ? k + (cache + j0 + j) * hd : nullptr; });
    load_tile<KEY_BLOCK, HD>(
        V, hd, [&](int j) { return j0 + j < a.T ? v + (cache + j0 + j) * hd : nullptr; });
    load_tile<WIDE, HD>(Q, hd, [&](int i) { return query(j0 * group + i); });
    for (int r0 = j0 * group; r0 < all; r0 += WIDE) {
        const bool sees = w_keys > 0 && w0 * group < r0 + WIDE; // some row sees a key of the warp
        float p[1][WIDE / 8][4] = {}, ds[1][WIDE / 8][4] = {};
        cp_async_wait<0>();
        __syncthreads(); // Q is here; all are done with dO
        load_tile<WIDE, HD>(dO, hd, [&](int i) {
            return r0 + i < all ? dout + output_row(a, b, kv, r0 + i) * hd : nullptr;
        });
        if (threadIdx.x < WIDE && r0 + (int)threadIdx.x < all) {
            const size_t row = query_row(a, b, kv, r0 + (int)threadIdx.x);
            row_lse[threadIdx.x] = lse[row], row_D[threadIdx.x] = D[row];
        }
        if (sees) warp_product<1, WIDE / 8, false, false>(p, Kw, LD, Q, LD, HD);
        cp_async_wait<0>();
        __syncthreads(); // dO, lse and D are here
        if (sees) {
            warp_product<1, WIDE / 8, false, false>(ds, Vw, LD, dO, LD, HD);
#pragma unroll
            for (int j = 0; j < WIDE / 8; j++)
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    const int i = 8 * j + 2 * (lane % 4) + x % 2, r = r0 + i;
                    const int from = (w0 + lane / 4 + 8 * (x / 2)) * group; // row that sees the key
                    const float s = p[0][j][x];
                    const bool on = r >= from && r < all;
                    p[0][j][x] = on ? exp2f((s * scale - row_lse[i]) * LOG2E) : 0;
                    ds[0][j][x] = on ? p[0][j][x] * (ds[0][j][x] - row_D[i]) : 0;
                }
#pragma unroll
            for (int j = 0; j < WIDE / 8; j++) {
                store_pair(Xlane + 8 * j, ds[0][j][0], ds[0][j][1]);
                store_pair(Xlane + 8 * LDX + 8 * j, ds[0][j][2], ds[0][j][3]);
            }
            __syncwarp();
            warp_product<1, STRIP / 8, false, true>(dK, Xw, LDX, Q + c0, LD, WIDE);
            __syncwarp(); // until all lanes have read dS
#pragma unroll
            for (int j = 0; j < WIDE / 8; j++) {
                store_pair(Xlane + 8 * j, p[0][j][0], p[0][j][1]);
                store_pair(Xlane + 8 * LDX + 8 * j, p[0][j][2], p[0][j][3]);
            }
        }
        __syncthreads(); // P is here; all are done with Q
        if (r0 + WIDE < all)
            load_tile<WIDE, HD>(Q, hd, [&](int i) { return query(r0 + WIDE + i); });
        if (sees) warp_product<1, STRIP / 8, false, true>(dV, Xw, LDX, dO + c0, LD, WIDE);
    }
#pragma unroll
    for (int j = 0; j < STRIP / 8; j++)
#pragma unroll
        for (int x = 0; x < 4; x++) dK[0][j][x] *= scale;
    const bool chunks = hd % Chunk<T>::SIZE == 0;
    store_rows(Kw, LD, dK, hd - c0, chunks,
        [&](int i) { return i < w_keys ? dk + (cache + w0 + i) * hd + c0 : nullptr; });
    store_rows(Vw, LD, dV, hd - c0, chunks,
        [&](int i) { return i < w_keys ? dv + (cache + w0 + i) * hd + c0 : nullptr; });
}

/* A block owns 64 rows of queries and walks the keys that they see, WIDE at a time:
   dQ = dS K / sqrt(hd), dS = P (dO V^T - D).
   Single buffers: K arrives under dO V^T, the next V under dS K. */
template <class T, int HD, int WIDE>
__global__ void __launch_bounds__(ATTENTION_THREADS, blocks_beside(2 * HD))
    attention_dq_kernel(T *dq, const T *dout, const float *lse, const float *D, const T *q,
        const T *k, const T *v, Attn a, float scale) {
    enum { LD = HD + Chunk<T>::SIZE, LDX = WIDE + Chunk<T>::SIZE };
    extern __shared__ uint4 memory[];
    T *Q = (T *)memory, *dO = Q + QUERY_TILE * LD, *K = dO + QUERY_TILE * LD, *V = K + WIDE * LD,
      *X = V + WIDE * LD;
    const int hd = a.head_dim, group = a.n_heads / a.n_kv_heads, all = group * a.T;
    const int heads = a.B * a.n_kv_heads, head = (int)(blockIdx.x % heads);
    const int b = head / a.n_kv_heads, kv = head % a.n_kv_heads;
    const int r0 = (pieces_of(all, QUERY_TILE) - 1 - (int)(blockIdx.x / heads)) * QUERY_TILE;
    const int last = (min(r0 + (int)QUERY_TILE, all) - 1) / group; // key that the tile sees
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const size_t cache = (size_t)head * a.T;
    const auto key = [&](int j) { return j < a.T ? k + (cache + j) * hd : nullptr; };
    const auto value = [&](int j) { return j < a.T ? v + (cache + j) * hd : nullptr; };

    const int w0 = r0 + 16 * warp, w_rows = min(all - w0, 16);
    const int w_last = w_rows > 0 ? (w0 + w_rows - 1) / group : -1;
    T *Qw = Q + 16 * warp * LD, *dOw = dO + 16 * warp * LD, *Xw = X + 16 * warp * LDX;
    int seen[2]; // the last key, of this lane's rows lane / 4 and lane / 4 + 8
    float lse2[2], row_D[2];
    float dQ[1][HD / 8][4] = {};
    for (int h = 0; h < 2; h++) {
        const int r = w0 + lane / 4 + 8 * h;
        const size_t at = r < all ? query_row(a, b, kv, r) : 0;
        seen[h] = r < all ? r / group : -1;
        lse2[h] = lse[at], row_D[h] = D[at];
    }

    load_tile<QUERY_TILE, HD>(Q, hd,
        [&](int i) { return r0 + i < all ? q + query_row(a, b, kv, r0 + i) * hd : nullptr; });
    load_tile<QUERY_TILE, HD>(dO, hd,
        [&](int i) { return r0 + i < all ? dout + output_row(a, b, kv, r0 + i) * hd : nullptr; });
    load_tile<WIDE, HD>(V, hd, value);
    for (int j0 = 0; j0 <= last; j0 += WIDE) {
        float ds[1][WIDE / 8][4] = {};
        cp_async_wait<0>();
        __syncthreads(); // V is here; all are done with K
        load_tile<WIDE, HD>(K, hd, [&](int j) { return key(j0 + j); });
        if (j0 <= w_last) warp_product<1, WIDE / 8, false, false>(ds, dOw, LD, V, LD, HD);
        cp_async_wait<0>();
        __syncthreads(); // K is here; all are done with V
        if (j0 + WIDE <= last)
            load_tile<WIDE, HD>(V, hd, [&](int j) { return value(j0 + WIDE + j); });
        if (j0 <= w_last) {
            float s[1][WIDE / 8][4] = {};
            warp_product<1, WIDE / 8, false, false>(s, Qw, LD, K, LD, HD);
#pragma unroll
            for (int j = 0; j < WIDE / 8; j++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int column = 8 * j + 2 * (lane % 4);
                    float x[2];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const float p = exp2f((s[0][j][2 * h + e] * scale - lse2[h]) * LOG2E);
                        const bool on = j0 + column + e <= seen[h];
                        x[e] = on ? p * (ds[0][j][2 * h + e] - row_D[h]) : 0;
                    }
                    store_pair(Xw + (lane / 4 + 8 * h) * LDX + column, x[0], x[1]);
                }
            __syncwarp();
            warp_product<1, HD / 8, false, true>(dQ, Xw, LDX, K, LD, WIDE);
        }
    }
#pragma unroll
    for (int j = 0; j < HD / 8; j++)
#pragma unroll
        for (int x = 0; x < 4; x++) dQ[0][j][x] *= scale;
    store_rows(Qw, LD, dQ, hd, hd % Chunk<T>::SIZE == 0,
        [&](int i) { return i < w_rows ? dq + query_row(a, b, kv, w0 + i) * hd : nullptr; });
}

// A kernel that takes more shared memory than the 48 KB that need no asking: asks, the first time.
template <class Kernel> static void allow_shared(bool *allowed, Kernel *kernel, int bytes) {
    if (!*allowed)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
            "shared memory for attention");
    *allowed = true;
}

template <class T, int HD>
static void attention_forward_hd(
    act_t *out, stat_t *lse, const act_t *q, const act_t *k, const act_t *v, Attn a) {
    const int shared = attention_shared<T, HD>(QUERY_TILE + 2 * KEY_BLOCK, KEY_BLOCK);
    const int tiles = pieces_of(a.n_heads / a.n_kv_heads * a.T, QUERY_TILE);
    const unsigned blocks = blocks_for((size_t)tiles * a.B * a.n_kv_heads, 1);
    static bool allowed;
    allow_shared(&allowed, attention_forward_kernel<T, HD>, shared);
    attention_forward_kernel<T, HD><<<blocks, ATTENTION_THREADS, shared, device.stream>>>((T *)out,
        (float *)lse, (const T *)q, (const T *)k, (const T *)v, a,
        LOG2E / sqrtf((float)a.head_dim));
    launched("attention_forward");
}

template <class T, int HD>
static void attention_backward_hd(act_t *dq, act_t *dk, act_t *dv, const act_t *dout,
    const float *lse, const float *D, const act_t *q, const act_t *k, const act_t *v, Attn a) {
    enum {
        ROWS = HD >= 128 ? 32 : 64,             // registers
        KEYS = HD * sizeof(T) >= 512 ? 32 : 64, // shared memory
        STRIP = HD > 128 ? 128 : HD
    };
    const int threads = ATTENTION_THREADS, heads = a.B * a.n_kv_heads;
    const float scale = 1 / sqrtf((float)a.head_dim);
    int shared = attention_shared<T, HD>(2 * KEY_BLOCK + 2 * ROWS, ROWS);
    static bool allowed[2];
    allow_shared(&allowed[0], attention_dkdv_kernel<T, HD, STRIP, ROWS>, shared);
    unsigned blocks = blocks_for((size_t)pieces_of(a.T, KEY_BLOCK) * heads * (HD / STRIP), 1);
    attention_dkdv_kernel<T, HD, STRIP, ROWS><<<blocks, threads, shared, device.stream>>>((T *)dk,
        (T *)dv, (const T *)dout, lse, D, (const T *)q, (const T *)k, (const T *)v, a, scale);
    launched("attention_backward, dK and dV");
    const int rows = a.n_heads / a.n_kv_heads * a.T;
    shared = attention_shared<T, HD>(2 * QUERY_TILE + 2 * KEYS, KEYS);
    allow_shared(&allowed[1], attention_dq_kernel<T, HD, KEYS>, shared);
    blocks = blocks_for((size_t)pieces_of(rows, QUERY_TILE) * heads, 1);
    attention_dq_kernel<T, HD, KEYS><<<blocks, threads, shared, device.stream>>>(
        (T *)dq, (const T *)dout, lse, D, (const T *)q, (const T *)k, (const T *)v, a, scale);
    launched("attention_backward, dQ");
}

// The smallest head dimension that kernels are made for and that holds hd.
#define FOR_HEAD_DIM(hd, function, ...)                                                         \
    do {                                                                                        \
        if ((hd) <= 16)                                                                         \
            function<T, 16>(__VA_ARGS__);                                                       \
        else if ((hd) <= 32)                                                                    \
            function<T, 32>(__VA_ARGS__);                                                       \
        else if ((hd) <= 64)                                                                    \
            function<T, 64>(__VA_ARGS__);                                                       \
        else if ((hd) <= 128)                                                                   \
            function<T, 128>(__VA_ARGS__);                                                      \
        else if ((hd) <= 256)                                                                   \
            function<T, 256>(__VA_ARGS__);                                                      \
        else                                                                                    \
            die(RUN_ERROR,                                                                      \
                "attention: kernels are made for a head dimension of at most 256, not %d", hd); \
    } while (0)

template <class T>
static void attention_forward(act_t *out, stat_t *lse, const act_t *q, const act_t *k,
    const act_t *v, Attn a, void *scratch) {
    (void)scratch;
    FOR_HEAD_DIM(a.head_dim, attention_forward_hd, out, lse, q, k, v, a);
}

static size_t attention_scratch(const Config *c, const ScratchShape *s) { // D
    const size_t rows = (size_t)s->B * s->T * c->n_heads;
    return s->backward ? round_up(rows * sizeof(float), ARENA_ALIGN) : 0;
}

template <class T>
static void attention_backward(act_t *dq, act_t *dk, act_t *dv, const act_t *dout, const act_t *out,
    const stat_t *lse, const act_t *q, const act_t *k, const act_t *v, Attn a, void *scratch) {
    const size_t rows = (size_t)a.B * a.T * a.n_heads;
    float *D = carve<float>(&scratch, rows);
    attention_D_kernel<T><<<blocks_for(rows, THREADS / WARP_SIZE), THREADS, 0, device.stream>>>(
        D, (const T *)dout, (const T *)out, a);
    launched("attention_backward, D");
    FOR_HEAD_DIM(
        a.head_dim, attention_backward_hd, dq, dk, dv, dout, (const float *)lse, D, q, k, v, a);
}

//SECTION router, plan

//SECTION experts

//SECTION classifier

//SECTION loss, norm, optimiser

//SECTION memory, table
