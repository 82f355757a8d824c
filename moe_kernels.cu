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
   router, plan, between ranks, experts, classifier, optimiser, memory. */
#ifndef CUDA_CPU_H
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#ifdef USE_CUBLAS
#include <cublas_v2.h>
#include <dlfcn.h>
#endif
#endif
#include "moe.h"

#include <math.h>
#include <type_traits>

typedef __nv_bfloat16 bf16;

// -------------------------------------------------------------------------------------------------
// instructions: one wrapper for each, so that cuda_cpu.h can have a twin of the same name

#ifndef CUDA_CPU_H
__device__ inline unsigned shared_address(const void *p) {
    return (unsigned)__cvta_generic_to_shared(p);
}
// 16 bytes, aligned. The store is in PTX: nvcc at times makes eight pieces of an ordinary one.
__device__ inline uint4 load16(const void *p) { return *(const uint4 *)p; }
__device__ inline void store16(void *p, uint4 v) {
    asm volatile("st.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
// Copies 16 bytes to shared memory in the background; of the source only `have`, zeros beyond.
__device__ inline void cp_async16(void *shared, const void *global, int have) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)),
                 "l"(global), "r"(have)
                 : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// until at most `left` of this thread's newest groups are under way
template <int left> __device__ inline void cp_async_wait() {
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
/* What a kernel says of the dynamic shared memory that it is launched with. On the GPU a remark in
   its PTX, for `make kernel-report`; the twin ends the program where a launch does otherwise. */
template <int bytes> __device__ inline void takes_shared() {
    asm volatile("// dynamic shared memory: %0\n" ::"n"(bytes));
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
template <class T> __device__ inline T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline bf16 from_float<bf16>(float x) { return __float2bfloat16(x); }

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
template <class X> static X *carve(void **scratch, size_t count) {
    X *p = (X *)*scratch;
    *scratch = (char *)*scratch + round_up(count * sizeof(X), ARENA_ALIGN);
    return p;
}

// -------------------------------------------------------------------------------------------------
// the product

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
#pragma unroll 4
    for (int k = 0; k < depth; k += 16) {
        unsigned bf[NF][2];
#pragma unroll
        for (int j = 0; j < NF; j += 2) { // two fragments of B at a time
            unsigned r[4];
            if constexpr (B_T)
                ldmatrix_x4_trans(r, b + (k + low + mid) * ldb + 8 * j + high);
            else
                ldmatrix_x4(r, b + (8 * j + low + high) * ldb + k + mid);
            bf[j][0] = r[0], bf[j][1] = r[1], bf[j + 1][0] = r[2], bf[j + 1][1] = r[3];
        }
#pragma unroll
        for (int i = 0; i < MF; i++) {
            unsigned af[4];
            if constexpr (A_T)
                ldmatrix_x4_trans(af, a + (k + low + high) * lda + 16 * i + mid);
            else
                ldmatrix_x4(af, a + (16 * i + low + mid) * lda + k + high);
#pragma unroll
            for (int j = 0; j < NF; j++) mma_bf16(acc[i][j], af, bf[j]);
        }
    }
}
template <int MF, int NF, bool A_T, bool B_T>
__device__ inline void warp_product(
    float (&acc)[MF][NF][4], const float *a, int lda, const float *b, int ldb, int depth) {
    const int lane = threadIdx.x % WARP_SIZE, row = lane / 4, col = lane % 4 * 2;
#pragma unroll 2 // more costs minutes of compiling
    for (int k = 0; k < depth; k++) {
        float x[MF][2], y[NF][2];
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
                y[j][h] = B_T ? b[k * ldb + n] : b[n * ldb + k];
            }
#pragma unroll
        for (int i = 0; i < MF; i++)
#pragma unroll
            for (int j = 0; j < NF; j++)
#pragma unroll
                for (int r = 0; r < 4; r++)
                    acc[i][j][r] = fmaf(x[i][r / 2], y[j][r % 2], acc[i][j][r]);
    }
}

// W adjacent values as floats: the 16 bytes of an access, or one where rows do not consist of those
template <class T, int W> __device__ inline void read_values(float *x, const T *p) {
    if constexpr (W == 1) {
        x[0] = to_float(*p);
    } else {
        const uint4 all = load16(p);
        T v[W];
        static_assert(sizeof all == sizeof v, "W values are 16 bytes");
        memcpy(v, &all, sizeof all);
#pragma unroll
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
#pragma unroll
        for (int i = 0; i < W; i++) v[i] = from_float<T>(x[i]);
        memcpy(&all, v, sizeof all);
        store16(p, all);
    }
}
// 16 bytes of T are PER of them. VEC: pointers and row lengths are multiples of 16 bytes. `have`:
// how many of the PER lie within the matrix.
template <class T> struct Vec {
    enum { PER = 16 / sizeof(T) };
};
template <class T, bool VEC> __device__ inline void read_vec(float *v, const T *p, int have) {
    enum { PER = Vec<T>::PER };
    if (VEC && have >= PER) return read_values<T, PER>(v, p);
#pragma unroll
    for (int i = 0; i < PER; i++) v[i] = i < have ? to_float(p[i]) : 0;
}
template <class T, bool VEC> __device__ inline void write_vec(T *p, const float *v, int have) {
    enum { PER = Vec<T>::PER };
    if (VEC && have >= PER) return write_values<T, PER>(p, v);
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (i < have) p[i] = from_float<T>(v[i]);
}
// PER values into shared memory, zeros where the matrix ends. p is a valid address in any case.
template <class T, bool VEC> __device__ inline void fetch_vec(T *shared, const T *p, int have) {
    enum { PER = Vec<T>::PER };
    have = have < 0 ? 0 : have < PER ? have : PER;
    if constexpr (VEC) {
        cp_async16(shared, p, have * (int)sizeof(T));
    } else {
#pragma unroll
        for (int i = 0; i < PER; i++) shared[i] = i < have ? p[i] : from_float<T>(0);
    }
}

/* A grouped product. Group e (an expert; a dense product is a group of one) has the slots
   [begin[e], end[e]), or, with begin NULL, [0, rows). Three forms:
     NT  out[s] = A[s] B[e]^T     A (slots, k), B (n, k)
     NN  out[s] = A[s] B[e]       A (slots, k), B (k, n)
     TN  out[e] (+)= A^T B        A (slots, m), B (slots, n), the sum over the group's slots
   A row of A, of B in form TN, and of the output, is the slot's own or another one: Rows. */
enum Form { NT, NN, TN };
struct Rows { // row of slot s: map[s] - *base; map NULL: s
    const int *map, *base;
};
__device__ inline size_t row_of(Rows r, int s) {
    return (size_t)(r.map ? r.map[s] - (r.base ? *r.base : 0) : s);
}

// What becomes of a tile of sums v.
enum Epilogue {
    STORE,  // out[s] (+)= v
    LOGITS, // the same, out is float
    GLU,    // H[s] = v (gate and up rows of B side by side), A[s] = silu(gate) * up
    DGLU,   // v is da': dH[s], sA[s] and, PART columns at a time, the sum of da' * a
    GRAD    // form TN: out[e] (+)= v, float
};
template <class T> struct Product {
    const T *a, *b;
    size_t lda, ldb, b_stride; // b_stride: from group to group
    Rows a_row, b_row, out_row;
    const int *begin, *end;
    int groups, rows; // rows: most slots of all groups together
    int m, n, k;      // NT, NN: n and k; TN: m and n
    void *out;
    size_t ldo, out_stride;
    int accumulate;
    // GLU, DGLU, with I = n (half of B's rows in GLU)
    T *A;                // (S,I), GLU: A, DGLU: sA
    const T *H;          // (S,2I)
    const float *weight; // (S), NULL: 1
    float *partial;      // (S, parts_of(n)), NULL: not asked for
};

/* A tile of the output: BM rows, BN columns, cut among warps of WM x WN. The depth of a step is 64
   bytes, so a row of a tile along k is 4 vectors; padding by one vector keeps ldmatrix free of bank
   conflicts. */
template <int BM_, int BN_, int WM_, int WN_> struct TileShape {
    enum { BM = BM_, BN = BN_, WM = WM_, WN = WN_, THREADS = BM / WM * (BN / WN) * WARP_SIZE };
};
typedef TileShape<128, 128, 64, 32> BigTile;
typedef TileShape<32, 64, 16, 32> SmallTile; // few rows, or sizes that 16 bytes do not divide
enum { PART = SmallTile::BN };               // columns of a part of dS: both tiles hold whole ones
__host__ __device__ inline int parts_of(int I) { return pieces_of(I, PART); }
enum { STAGES = 3 }; // tiles of A and B under way at a time

template <class T, class S, Form FORM> struct Layout {
    enum {
        PER = Vec<T>::PER,
        BK = 64 / sizeof(T),
        LDA = FORM == TN ? S::BM + PER : BK + PER,
        LDB = FORM == NT ? BK + PER : S::BN + PER,
        A_COUNT = FORM == TN ? BK * LDA : S::BM * LDA,
        B_COUNT = FORM == NT ? S::BN * LDB : BK * LDB,
        LDV = S::BN + 4, // the tile of sums, float
        PIPELINE = STAGES * (A_COUNT + B_COUNT) * (int)sizeof(T),
        SUMS = S::BM * LDV * (int)sizeof(float),
        ROW_SUMS = S::BM * (S::BN / PER) * (int)sizeof(float) // DGLU
    };
};
template <class T, class S, Form FORM, Epilogue EPI>
__host__ __device__ constexpr int product_shared() {
    typedef Layout<T, S, FORM> Y;
    const int epilogue = Y::SUMS + (EPI == DGLU ? (int)Y::ROW_SUMS : 0);
    return epilogue > Y::PIPELINE ? epilogue : (int)Y::PIPELINE;
}

// Where a tile lies: group, its slots [s0, s1), first row and column of the output's tile.
struct Place {
    int e, s0, s1, m0, n0;
};
// Walks the tiles of all groups in order; next(t) for ascending t.
template <class T, class S, Form FORM> struct Walk {
    int e, before; // group, tiles of the groups before it
    __device__ inline bool next(const Product<T> &p, int columns, int t, Place *at) {
        for (; e < p.groups; e++) {
            const int s0 = p.begin ? p.begin[e] : 0, s1 = p.begin ? p.end[e] : p.rows;
            const int none = s1 == s0 && p.accumulate; // nothing to add
            const int down =
                FORM == TN ? (none ? 0 : pieces_of(p.m, S::BM)) : pieces_of(s1 - s0, S::BM);
            const int local = t - before;
            if (local < down * columns) {
                at->e = e, at->s0 = s0, at->s1 = s1;
                at->m0 = local % down * S::BM + (FORM == TN ? 0 : s0);
                at->n0 = local / down;
                return true;
            }
            before += down * columns;
        }
        return false;
    }
};

// B's row for column c of a GLU tile: eight gate rows, then their eight up rows, and so on.
__device__ inline int glu_row(int n0, int c, int I) {
    const int i = n0 + c / 16 * 8 + c % 8;
    return i >= I ? -1 : c % 16 < 8 ? i : I + i;
}

/* The sums of one tile, into `sums` (BM rows of LDV) in shared memory. */
template <class T, class S, Form FORM, Epilogue EPI, bool VEC>
__device__ inline void product_tile(const Product<T> &p, Place at, char *shared) {
    typedef Layout<T, S, FORM> Y;
    enum { PER = Y::PER, BK = Y::BK, T_ = S::THREADS };
    enum { A_EACH = S::BM * 4 / T_, B_EACH = S::BN * 4 / T_ }; // vectors a thread fetches a step
    static_assert(S::BM * 4 % T_ == 0 && S::BN * 4 % T_ == 0, "all threads fetch alike");
    T *const tiles = (T *)shared;
    const int tid = threadIdx.x, warp = tid / WARP_SIZE;
    const int wm = warp % (S::BM / S::WM) * S::WM, wn = warp / (S::BM / S::WM) * S::WN;
    const T *const b = p.b + at.e * p.b_stride;
    const int depth = FORM == TN ? at.s1 - at.s0 : p.k, steps = pieces_of(depth, BK);

    // Rows along k: a thread fetches one vector of each of these, step after step.
    const T *a_from[A_EACH], *b_from[B_EACH];
    int a_have[A_EACH], b_have[B_EACH]; // 0: the row lies beyond the matrix
    const int quarter = tid % 4 * PER;
#pragma unroll
    for (int i = 0; i < A_EACH; i++) {
        const int s = at.m0 + (tid + i * T_) / 4;
        a_have[i] = FORM != TN && s < at.s1;
        a_from[i] = a_have[i] ? p.a + row_of(p.a_row, s) * p.lda : p.a;
    }
#pragma unroll
    for (int i = 0; i < B_EACH; i++) {
        const int c = (tid + i * T_) / 4;
        const int n = EPI == GLU ? glu_row(at.n0, c, p.n) : at.n0 + c < p.n ? at.n0 + c : -1;
        b_have[i] = FORM == NT && n >= 0;
        b_from[i] = b_have[i] ? b + (size_t)n * p.ldb : b;
    }
    auto fetch = [&](int step) {
        T *const a_tile = tiles + step % STAGES * (Y::A_COUNT + Y::B_COUNT);
        T *const b_tile = a_tile + Y::A_COUNT;
        const int k0 = step * BK;
#pragma unroll
        for (int i = 0; i < A_EACH; i++) {
            const int v = tid + i * T_;
            if constexpr (FORM == TN) { // (k, m): row k is a slot
                const int k = v / (S::BM / PER), c = v % (S::BM / PER) * PER;
                const int in = k0 + k < depth && at.m0 + c < p.m;
                fetch_vec<T, VEC>(a_tile + k * Y::LDA + c,
                    in ? p.a + row_of(p.a_row, at.s0 + k0 + k) * p.lda + at.m0 + c : p.a,
                    in ? p.m - at.m0 - c : 0);
            } else {
                const int have = a_have[i] ? depth - k0 - quarter : 0;
                fetch_vec<T, VEC>(a_tile + v / 4 * Y::LDA + quarter,
                    have > 0 ? a_from[i] + k0 + quarter : p.a, have);
            }
        }
#pragma unroll
        for (int i = 0; i < B_EACH; i++) {
            const int v = tid + i * T_;
            if constexpr (FORM == NT) {
                const int have = b_have[i] ? depth - k0 - quarter : 0;
                fetch_vec<T, VEC>(b_tile + v / 4 * Y::LDB + quarter,
                    have > 0 ? b_from[i] + k0 + quarter : b, have);
            } else { // (k, n): row k is one of B's, or a slot's
                const int k = v / (S::BN / PER), c = v % (S::BN / PER) * PER;
                const int in = k0 + k < depth && at.n0 + c < p.n;
                size_t row = 0;
                if (in) row = FORM == TN ? row_of(p.b_row, at.s0 + k0 + k) : (size_t)(k0 + k);
                fetch_vec<T, VEC>(b_tile + k * Y::LDB + c, in ? b + row * p.ldb + at.n0 + c : b,
                    in ? p.n - at.n0 - c : 0);
            }
        }
    };

    float acc[S::WM / 16][S::WN / 8][4] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) fetch(s);
        cp_async_commit();
    }
    for (int s = 0; s < steps; s++) {
        cp_async_wait<STAGES - 2>(); // step s has landed, for this thread ...
        __syncthreads();             // ... and for all; and all are done with step s - 1
        if (s + STAGES - 1 < steps) fetch(s + STAGES - 1);
        cp_async_commit();
        const T *a_tile = tiles + s % STAGES * (Y::A_COUNT + Y::B_COUNT);
        const T *b_tile = a_tile + Y::A_COUNT;
        warp_product<S::WM / 16, S::WN / 8, FORM == TN, FORM != NT>(acc,
            FORM == TN ? a_tile + wm : a_tile + wm * Y::LDA, Y::LDA,
            FORM == NT ? b_tile + wn * Y::LDB : b_tile + wn, Y::LDB, BK);
    }
    cp_async_wait<0>();
    __syncthreads(); // the sums take the place of the tiles
    float *const sums = (float *)shared;
    const int lane = tid % WARP_SIZE;
#pragma unroll
    for (int i = 0; i < S::WM / 16; i++)
#pragma unroll
        for (int j = 0; j < S::WN / 8; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float *v =
                    sums + (wm + 16 * i + 8 * h + lane / 4) * Y::LDV + wn + 8 * j + lane % 4 * 2;
                v[0] = acc[i][j][2 * h], v[1] = acc[i][j][2 * h + 1];
            }
    __syncthreads();
}

__device__ inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }
// the value that is kept
template <class T> __device__ inline float rounded(float x) { return to_float(from_float<T>(x)); }

/* Takes the sums of a tile to memory, a vector at a time. */
template <class T, class S, Form FORM, Epilogue EPI, bool VEC>
__device__ inline void product_epilogue(const Product<T> &p, Place at, char *shared) {
    typedef Layout<T, S, FORM> Y;
    typedef typename std::conditional<EPI == LOGITS || EPI == GRAD, float, T>::type Out;
    enum {
        PER = Vec<Out>::PER,
        WIDTH = EPI == GLU ? S::BN / 2 : S::BN, // output columns of a tile
        ACROSS = WIDTH / PER
    };
    const float *const sums = (const float *)shared;
    float *const row_sums = (float *)(shared + Y::SUMS);
    const int last = FORM == TN ? p.m : at.s1;
    for (int v = threadIdx.x; v < S::BM * ACROSS; v += S::THREADS) {
        const int r = v / ACROSS, c = v % ACROSS * PER, s = at.m0 + r, have = p.n - at.n0 - c;
        if (EPI == DGLU) row_sums[v] = 0;
        if (s >= last || have <= 0) continue;
        float x[2 * PER];
        if constexpr (EPI == GLU) { // see glu_row
            const float *from = sums + r * Y::LDV + c / 8 * 16 + c % 8;
#pragma unroll
            for (int i = 0; i < PER; i++)
                x[i] = rounded<T>(from[i]), x[PER + i] = rounded<T>(from[8 + i]);
            T *h = (T *)p.out + (size_t)s * p.ldo + at.n0 + c;
            write_vec<T, VEC>(h, x, have);
            write_vec<T, VEC>(h + p.n, x + PER, have);
#pragma unroll
            for (int i = 0; i < PER; i++) x[i] = x[i] * sigmoid(x[i]) * x[PER + i];
            write_vec<T, VEC>(p.A + (size_t)s * p.n + at.n0 + c, x, have);
        } else if constexpr (EPI == DGLU) {
            float u[PER], sa[PER], sum = 0;
            const float w = p.weight ? p.weight[s] : 1;
            const size_t h = (size_t)s * 2 * p.n + at.n0 + c;
            read_vec<T, VEC>(x, p.H + h, have);
            read_vec<T, VEC>(u, p.H + h + p.n, have);
#pragma unroll
            for (int i = 0; i < PER; i++) { // x: gate, then its gradient; u: up, likewise
                const float d0 = sums[r * Y::LDV + c + i], d = d0 * w;
                const float sig = sigmoid(x[i]), silu = x[i] * sig;
                if (i < have) sum = fmaf(d0, silu * u[i], sum);
                sa[i] = w * (silu * u[i]);
                x[i] = d * u[i] * (sig + silu * (1 - sig));
                u[i] = d * silu;
            }
            row_sums[v] = sum;
            write_vec<T, VEC>((T *)p.out + h, x, have);
            write_vec<T, VEC>((T *)p.out + h + p.n, u, have);
            write_vec<T, VEC>(p.A + (size_t)s * p.n + at.n0 + c, sa, have);
        } else {
            const size_t row = FORM == TN ? (size_t)s : row_of(p.out_row, s);
            Out *out =
                (Out *)p.out + (FORM == TN ? at.e * p.out_stride : 0) + row * p.ldo + at.n0 + c;
            if (p.accumulate)
                read_vec<Out, VEC>(x, out, have);
            else
#pragma unroll
                for (int i = 0; i < PER; i++) x[i] = 0;
#pragma unroll
            for (int i = 0; i < PER; i++) x[i] += sums[r * Y::LDV + c + i];
            write_vec<Out, VEC>(out, x, have);
        }
    }
    __syncthreads();
    if (EPI == DGLU && p.partial) {
        // a part is PART columns, whatever the tile: the sum of a row has one order
        enum { PARTS = EPI == DGLU ? WIDTH / PART : 1, EACH = ACROSS / PARTS };
        const int parts = parts_of(p.n);
        for (int v = threadIdx.x; v < S::BM * PARTS; v += S::THREADS) {
            const int r = v / PARTS, part = at.n0 / PART + v % PARTS;
            if (at.m0 + r >= last || part >= parts) continue;
            float sum = 0;
            for (int i = 0; i < EACH; i++) sum += row_sums[v * EACH + i];
            p.partial[(size_t)(at.m0 + r) * parts + part] = sum;
        }
        __syncthreads(); // the next tile goes where these sums lie
    }
}

/* Blocks stay and take one tile after another: how many tiles there are is known on the device
   alone. 512 threads a processor leave each 128 registers: said, lest nvcc spills to use fewer. */
template <class T, class S, Form FORM, Epilogue EPI, bool VEC>
__global__ void __launch_bounds__(S::THREADS, 512 / S::THREADS) product_kernel(const Product<T> p) {
    extern __shared__ __align__(16) char shared[];
    enum { WIDTH = EPI == GLU ? S::BN / 2 : S::BN };
    takes_shared<product_shared<T, S, FORM, EPI>()>();
    const int columns = pieces_of(p.n, WIDTH);
    Walk<T, S, FORM> walk = {0, 0};
    Place at;
    for (int t = blockIdx.x; walk.next(p, columns, t, &at); t += gridDim.x) {
        at.n0 *= WIDTH;
        product_tile<T, S, FORM, EPI, VEC>(p, at, shared);
        product_epilogue<T, S, FORM, EPI, VEC>(p, at, shared);
    }
}

template <class T, class S, Form FORM, Epilogue EPI, bool VEC>
static void launch_product(const Product<T> &p) {
    static int per_processor; // blocks that a processor holds
    const int bytes = product_shared<T, S, FORM, EPI>();
    if (!per_processor) {
        check(cudaFuncSetAttribute(product_kernel<T, S, FORM, EPI, VEC>,
                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
            "product");
        check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                  &per_processor, product_kernel<T, S, FORM, EPI, VEC>, S::THREADS, bytes),
            "product");
        if (per_processor < 1) die(RUN_ERROR, "this device has too little shared memory");
    }
    const int width = EPI == GLU ? S::BN / 2 : S::BN;
    const size_t down = FORM == TN ? (size_t)pieces_of(p.m, S::BM) * p.groups
                                   : (size_t)pieces_of(p.rows, S::BM) + p.groups - 1;
    const size_t tiles = down * pieces_of(p.n, width),
                 most = (size_t)per_processor * device.processors;
    const int grid = (int)(tiles < most ? tiles : most);
    if (grid == 0) return;
    product_kernel<T, S, FORM, EPI, VEC><<<grid, S::THREADS, bytes, device.stream>>>(p);
    launched("product");
}
static inline int on16(const void *p) { return (uintptr_t)p % 16 == 0; }
template <class T, Form FORM, Epilogue EPI> static void product(const Product<T> &p) {
    const size_t size = sizeof(T), out = EPI == LOGITS || EPI == GRAD ? sizeof(float) : size;
    const int vec = p.lda * size % 16 == 0 && p.ldb * size % 16 == 0 &&
        p.b_stride * size % 16 == 0 && p.ldo * out % 16 == 0 && p.out_stride * out % 16 == 0 &&
        on16(p.a) && on16(p.b) && on16(p.out) &&
        ((EPI != GLU && EPI != DGLU) || (p.n * size % 16 == 0 && on16(p.A) && on16(p.H)));
    const int big = (FORM == TN ? p.m : p.rows / p.groups) > 96 && p.n > (EPI == GLU ? 48 : 96);
    if (vec && big)
        launch_product<T, BigTile, FORM, EPI, true>(p);
    else if (vec)
        launch_product<T, SmallTile, FORM, EPI, true>(p);
    else
        launch_product<T, SmallTile, FORM, EPI, false>(p);
}

// -------------------------------------------------------------------------------------------------
// values, partial sums, a stable sort: what the sections below share

// read_values and write_values for floats that lie beside W values of another type: W is 1 or a multiple of 4.
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
    for (; k.shift == 0 || (k.shift < 32 && (V - 1) >> k.shift > 0); k.shift += DIGIT_BITS) {
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

// -------------------------------------------------------------------------------------------------
// linear

#ifdef USE_CUBLAS
/* cuBLAS for the dense products (--dense cublas): a yardstick. Which of its kernels runs depends on the
   shape, so a row's bits depend on the rows beside it. It works by columns: a row-major matrix is
   its transpose there.
   The library is loaded when it is asked for: its hundreds of megabytes would slow every start. */
static cublasHandle_t cublas; // NULL: our own product
typedef cublasStatus_t CublasCreate(cublasHandle_t *);
typedef cublasStatus_t CublasSetStream(cublasHandle_t, cudaStream_t);
typedef cublasStatus_t CublasGemm(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int,
    int, const void *, const void *, cudaDataType, int, const void *, cudaDataType, int,
    const void *, void *, cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t);
static CublasGemm *cublas_gemm;
// the declarations above are those of the header
static_assert(sizeof(static_cast<CublasCreate *>(cublasCreate_v2)) > 0, "");
static_assert(sizeof(static_cast<CublasSetStream *>(cublasSetStream_v2)) > 0, "");
static_assert(sizeof(static_cast<CublasGemm *>(cublasGemmEx)) > 0, "");

static cublasHandle_t open_cublas(const char **why) {
#define LIBRARY_OF(major) "libcublas.so." #major
#define LIBRARY(major)    LIBRARY_OF(major)
    cublasHandle_t handle = NULL;
    void *lib = dlopen(LIBRARY(CUBLAS_VER_MAJOR), RTLD_NOW | RTLD_LOCAL);
    *why = "no " LIBRARY(CUBLAS_VER_MAJOR) " that loads";
    if (!lib) return NULL;
    CublasCreate *create = (CublasCreate *)dlsym(lib, "cublasCreate_v2");
    CublasSetStream *set_stream = (CublasSetStream *)dlsym(lib, "cublasSetStream_v2");
    cublas_gemm = (CublasGemm *)dlsym(lib, "cublasGemmEx");
    if (!create || !set_stream || !cublas_gemm) return NULL;
    *why = "one that does not start on this GPU";
    if (create(&handle) == CUBLAS_STATUS_SUCCESS &&
        set_stream(handle, device.stream) == CUBLAS_STATUS_SUCCESS)
        return handle;
    (void)cudaGetLastError(); // *why says it, not the next launch
    return NULL;
}

static cudaDataType_t cublas_type(size_t size) {
    return size == sizeof(float) ? CUDA_R_32F : CUDA_R_16BF;
}
// out (n,m) (+)= b (n,k) a (m,k)^T, as cuBLAS sees it
static void cublas_product(cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
    const void *a, size_t lda, const void *b, size_t ldb, size_t size, void *out, size_t ldo,
    size_t out_size, int accumulate) {
    const float one = 1, beta = accumulate ? 1 : 0;
    if (cublas_gemm(cublas, op_a, op_b, m, n, k, &one, a, cublas_type(size), (int)lda, b,
            cublas_type(size), (int)ldb, &beta, out, cublas_type(out_size), (int)ldo,
            CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS)
        die(RUN_ERROR, "cuBLAS refuses a product of %d x %d x %d", m, n, k);
}
#endif
#ifndef CUDA_CPU_H
// Every dense product goes through cuBLAS from here on, or (on 0) through our own. Returns 0, with
// the reason in *why, where there is no cuBLAS. The backend has been opened before.
extern "C" int cuda_dense_cublas(int on, const char **why) {
#ifdef USE_CUBLAS
    static cublasHandle_t opened;
    if (on && !opened) opened = open_cublas(why);
    cublas = on ? opened : NULL;
    return !on || cublas;
#else
    if (on) *why = "a build without cuBLAS";
    return !on;
#endif
}
#endif

template <class T>
static void linear_forward(act_t *out, const act_t *inp, Mat w, int N, void *scratch) {
    (void)scratch;
#ifdef USE_CUBLAS
    if (cublas)
        return cublas_product(CUBLAS_OP_T, CUBLAS_OP_N, w.rows, N, w.cols, w.data, w.ld, inp,
            w.cols, sizeof(T), out, w.rows, sizeof(T), 0);
#endif
    Product<T> p = {};
    p.a = (const T *)inp, p.lda = w.cols;
    p.b = (const T *)w.data, p.ldb = w.ld;
    p.groups = 1, p.rows = N, p.n = w.rows, p.k = w.cols;
    p.out = out, p.ldo = w.rows;
    product<T, NT, STORE>(p);
}

// dweight (m,n) += a^T b, over N rows
template <class T>
static void weight_gradient(
    grad_t *dweight, size_t ld, const T *a, int m, const T *b, int n, int N) {
#ifdef USE_CUBLAS
    if (cublas)
        return cublas_product(CUBLAS_OP_N, CUBLAS_OP_T, n, m, N, b, n, a, m, sizeof(T), dweight, ld,
            sizeof(float), 1);
#endif
    Product<T> p = {};
    p.a = a, p.lda = m, p.b = b, p.ldb = n;
    p.groups = 1, p.rows = N, p.m = m, p.n = n;
    p.out = dweight, p.ldo = ld, p.accumulate = 1;
    product<T, TN, GRAD>(p);
}

// dinp (N,cols) (+)= dout w
template <class T>
static void input_gradient(T *dinp, const T *dout, Mat w, int N, int accumulate) {
#ifdef USE_CUBLAS
    if (cublas)
        return cublas_product(CUBLAS_OP_N, CUBLAS_OP_N, w.cols, N, w.rows, w.data, w.ld, dout,
            w.rows, sizeof(T), dinp, w.cols, sizeof(T), accumulate);
#endif
    Product<T> p = {};
    p.a = dout, p.lda = w.rows;
    p.b = (const T *)w.data, p.ldb = w.ld;
    p.groups = 1, p.rows = N, p.n = w.cols, p.k = w.rows;
    p.out = dinp, p.ldo = w.cols, p.accumulate = accumulate;
    product<T, NN, STORE>(p);
}

template <class T>
static void linear_backward(act_t *dinp, grad_t *dweight, const act_t *dout, const act_t *inp,
    Mat w, int N, int accumulate, void *scratch) {
    (void)scratch;
    if (dinp) input_gradient<T>((T *)dinp, (const T *)dout, w, N, accumulate);
    weight_gradient<T>(dweight, w.ld, (const T *)dout, w.rows, (const T *)inp, w.cols, N);
}

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
__global__ void __launch_bounds__(THREADS) qk_rope_forward_kernel(T *q, T *k, T *v, float *rstd,
    const T *qkv, const float *q_weight, const float *k_weight, const float *rope, Attn a) {
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
__global__ void __launch_bounds__(THREADS) qk_rope_backward_kernel(T *dqkv, const T *dq,
    const T *dk, const T *dv, const T *qkv, const float *rstd, const float *q_weight,
    const float *k_weight, const float *rope, Attn a) {
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
__global__ void __launch_bounds__(THREADS) qk_rope_partial_kernel(float *partial, const T *dq,
    const T *dk, const T *qkv, const float *rstd, const float *rope, Attn a, int pieces) {
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
static __global__ void __launch_bounds__(THREADS) qk_rope_weights_kernel(
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
    enum { SIZE = Vec<T>::PER, LD = HD + SIZE };
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
    enum { SIZE = Vec<T>::PER, COLUMNS = 8 * NF };
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
template <class T, int HD> __host__ __device__ constexpr int attention_shared(int rows, int wide) {
    return (rows * (HD + Vec<T>::PER) + 64 * (wide + Vec<T>::PER)) * (int)sizeof(T);
}

/* For key blocks in order: S = Q K^T / sqrt(hd), m the largest S so far, fade = exp(m_before - m):
     P = exp(S - m),   l = l fade + sum P,   O = O fade + P V;
   at the end out = O / l, lse = m + log l. Powers are of 2: scale2 = log2(e) / sqrt(hd), and m is
   kept before scaling.
   Single buffers: V arrives under S and P, the next K under P V. */
template <class T, int HD>
__global__ void __launch_bounds__(ATTENTION_THREADS, blocks_beside(HD)) attention_forward_kernel(
    T *out, float *lse, const T *q, const T *k, const T *v, Attn a, float scale2) {
    enum { LD = HD + Vec<T>::PER, LDP = KEY_BLOCK + Vec<T>::PER };
    extern __shared__ uint4 memory[];
    __shared__ int broken; // a value that is not finite was met
    takes_shared<attention_shared<T, HD>(QUERY_TILE + 2 * KEY_BLOCK, KEY_BLOCK)>();
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
            enum { SIZE = Vec<T>::PER, CHUNKS = KEY_BLOCK * (HD / SIZE) };
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
    store_rows(Qw, LD, o, hd, hd % Vec<T>::PER == 0, [&](int i) {
        return w0 + i < group * a.T ? out + output_row(a, b, kv, w0 + i) * hd : nullptr;
    });
}

// D = <dout, out>.   D (B,n_heads,T), dout, out (B,T,n_heads,hd). A warp has a row.
template <class T>
__global__ void __launch_bounds__(THREADS)
    attention_D_kernel(float *D, const T *dout, const T *out, Attn a) {
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
__global__ void __launch_bounds__(ATTENTION_THREADS, STRIP > 32 ? 2 : 3)
    attention_dkdv_kernel(T *dk, T *dv, const T *dout, const float *lse, const float *D, const T *q,
        const T *k, const T *v, Attn a, float scale) {
    enum { LD = HD + Vec<T>::PER, LDX = WIDE + Vec<T>::PER };
    extern __shared__ uint4 memory[];
    __shared__ float row_lse[WIDE];
    __shared__ float row_D[WIDE];
    takes_shared<attention_shared<T, HD>(2 * KEY_BLOCK + 2 * WIDE, WIDE)>();
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
    const bool chunks = hd % Vec<T>::PER == 0;
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
    enum { LD = HD + Vec<T>::PER, LDX = WIDE + Vec<T>::PER };
    extern __shared__ uint4 memory[];
    takes_shared<attention_shared<T, HD>(2 * QUERY_TILE + 2 * WIDE, WIDE)>();
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
    store_rows(Qw, LD, dQ, hd, hd % Vec<T>::PER == 0,
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
        ROWS = HD > 128 ? 16
            : HD == 128 ? 32
                        : 64,                   // registers
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
// s = sigmoid(z) in place
__device__ inline void router_sigmoid(float *z, int E) {
    for (int e = 0; e < E; e++) z[e] = sigmoid(z[e]);
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

__host__ __device__ inline int rows_of_all(const Router &r) { return r.all ? r.all : r.N; }

/* Switch's balance loss E sum_e f_e P_e, f_e the part of the choices that e got and P_e its mean
   probability, and the mean lse^2 of the z-loss: by one block. p (E, shared), z2 (of thread 0): sums
   over the r.all rows; p is overwritten. */
__device__ inline void add_balance(
    float *loss_sum, int *count_sum, const int *count, float *p, float z2, const Router &r) {
    const int E = r.E, N = rows_of_all(r);
    for (int e = threadIdx.x; e < E; e += blockDim.x) { // what expert e adds
        p[e] = (float)count[e] / ((float)N * r.K) * (p[e] / N);
        if (count_sum) count_sum[e] += count[e];
    }
    __syncthreads();
    if (threadIdx.x || !loss_sum) return;
    float aux = 0;
    for (int e = 0; e < E; e++) aux += p[e];
    loss_sum[0] += E * aux;
    loss_sum[1] += z2 / N;
}

/* One block adds the parts: for an expert `lanes` threads each add every lanes-th part, then the
   lanes are added in order. Then the losses, the step's counts, and the first bad row. */
__global__ void __launch_bounds__(FINISH_THREADS) router_finish_kernel(float *loss_sum,
    int *count_sum, float *sums, StepState *st, const int *count, const float *part_p,
    const float *part_z, const int *part_bad, int blocks, int lanes, int layer, Router r) {
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
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        for (int l = 1; l < lanes; l++) lane_sums[e] += lane_sums[l * E + e];
        if (sums) sums[e] = lane_sums[e];
    }
    float z2 = 0;
    if (threadIdx.x == 0) {
        for (int l = 0; l < lanes; l++) z2 += z_sums[l];
        if (sums) sums[E] = z2;
        if (first_bad < N && !st->bad) {
            st->bad = BAD_ROUTER;
            st->bad_layer = layer;
            st->bad_index = first_bad;
        }
    }
    add_balance(loss_sum, count_sum, count, lane_sums, z2, r); // a thread reads the p that it wrote
}

__global__ void __launch_bounds__(THREADS) router_balance_kernel(
    float *loss_sum, int *count_sum, const int *count, const float *sums, Router r) {
    extern __shared__ float mean_p[]; // (E)
    for (int e = threadIdx.x; e < r.E; e += blockDim.x) mean_p[e] = sums[e];
    add_balance(loss_sum, count_sum, count, mean_p, sums[r.E], r);
}

static void router_balance(
    stat_t *loss_sum, int *count_sum, const int *count, const stat_t *sums, Router r) {
    router_balance_kernel<<<1, THREADS, r.E * sizeof(float), device.stream>>>(
        (float *)loss_sum, count_sum, count, (const float *)sums, r);
    launched("router_balance");
}

template <class T>
static void router_forward(stat_t *logits_, stat_t *lse, int *idx, stat_t *weight, int *count,
    stat_t *loss_sum, int *count_sum, stat_t *sums, const act_t *X, Mat Wr, const stat_t *bias,
    Router r, int reuse, StepState *st, int layer, void *scratch) {
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
    const size_t lane_bytes = (size_t)lanes * (E + 1) * sizeof(float);
    const int most = (int)round_up((size_t)lanes * E, WARP_SIZE);
    const int threads = most > FINISH_THREADS ? (int)FINISH_THREADS : most;
    router_finish_kernel<<<1, threads, lane_bytes, device.stream>>>((float *)loss_sum, count_sum,
        (float *)sums, st, count, part_p, part_z, part_bad, blocks, lanes, layer, r);
    launched("router_finish");
}

/* dlogits of a block's rows. On the chosen set S, dS_k reaches the logits through the renormalised
   weights, or through p_k alone; a slot that the plan added beyond the top-K (token rounding)
   through its raw score; one that it dropped not at all. The balance loss adds aux * count_e to
   dp_e, aux = aux_coef E / (all all K), the z-loss zl * lse * p_e to dz_e, zl = z_coef 2 / all. */
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
    const double all = rows_of_all(r), aux = r.aux_coef * E / (all * all * r.K);
    const double zl = r.z_coef * 2 / all;
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

/* ranks[w] = bits of mask before word w, for words i, i + E, ... of a block's group i; returns all of
   them, in the last thread. */
__device__ inline int rank_words(
    int *ranks, const unsigned *mask, int words, int E, int i, int *shared) {
    const int each = pieces_of(words, THREADS), t = threadIdx.x;
    const int begin = t * each < words ? t * each : words;
    const int end = begin + each < words ? begin + each : words;
    int taken = 0;
    for (int w = begin; w < end; w++) taken += __popc(mask[(size_t)w * E + i]);
    int before = sum_before(shared, taken);
    for (int w = begin; w < end; w++) {
        ranks[(size_t)w * E + i] = before;
        before += __popc(mask[(size_t)w * E + i]);
    }
    return before;
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
    rank_words(ranks, mask, words, E, e, tally);
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
    if (n == N) p.row_begin[N] = p.offsets[E];
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
        : r.kind == ROUTER_SIGMOID   ? sigmoid(z)
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
        plan_rows_kernel<<<blocks_for(N + 1, THREADS), THREADS, 0, device.stream>>>(
            *p, mask, ranks, N, E);
        launched("plan_rows");
    }
    const unsigned blocks = blocks_for(p->S_max, THREADS); // how many slots there are is not known
    plan_weights_kernel<<<blocks, THREADS, 0, device.stream>>>(*p, idx, weight, logits, lse, r);
    launched("plan_weights");
}

// -------------------------------------------------------------------------------------------------
// between ranks

// The first slot of expert e whose source row is not below `limit`: by halving, since an expert's
// slots are sorted by row.
__device__ inline int first_slot(const int *offsets, const int *row, int e, int limit) {
    int lo = offsets[e], hi = offsets[e + 1];
    while (lo < hi) {
        const int mid = lo + (hi - lo) / 2;
        if (row[mid] < limit)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

// offsets (E+1) of an array of counts, by one block
__device__ inline void offsets_of(int *offsets, const int *count, int E) {
    for (int e = threadIdx.x; e <= E; e += THREADS) {
        int at = 0;
        for (int i = 0; i < e; i++) at += count[i];
        offsets[e] = at;
    }
}

/* mask (words, groups): a bit for every row of 32 that has a slot in this group of `each` experts. A
   thread owns a word. */
__global__ void __launch_bounds__(THREADS)
    plan_bits_kernel(unsigned *mask, Plan p, int groups, int each) {
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    const int w = (int)(i / groups), g = (int)(i % groups);
    unsigned bits = 0;
    if (w >= pieces_of(p.rows, 32)) return;
    for (int e = g * each; e < (g + 1) * each; e++)
        for (int s = first_slot(p.offsets, p.row, e, 32 * w);
             s < p.offsets[e + 1] && p.row[s] / 32 == w; s++)
            bits |= 1u << p.row[s] % 32;
    mask[i] = bits;
}

// A block counts the bits of a group: before each word, and all of them.
__global__ void __launch_bounds__(THREADS)
    plan_ranks_kernel(int *ranks, int *count, const unsigned *mask, int words, int groups) {
    __shared__ int sums[THREADS];
    const int all = rank_words(ranks, mask, words, groups, blockIdx.x, sums);
    if (count && threadIdx.x == THREADS - 1) count[blockIdx.x] = all;
}

typedef struct RowBits { // (words, groups): bits, bits before each word
    unsigned *mask;
    int *ranks;
} RowBits;
static RowBits rows_of_groups(const Plan *p, int *count, int groups, void **scratch) {
    const int words = pieces_of(p->rows, 32);
    RowBits x;
    x.mask = carve<unsigned>(scratch, (size_t)words * groups);
    x.ranks = carve<int>(scratch, (size_t)words * groups);
    plan_bits_kernel<<<blocks_for((size_t)words * groups, THREADS), THREADS, 0, device.stream>>>(
        x.mask, *p, groups, p->E / groups);
    launched("plan_bits");
    plan_ranks_kernel<<<groups, THREADS, 0, device.stream>>>(x.ranks, count, x.mask, words, groups);
    launched("plan_ranks");
    return x;
}

// What follows from a plan's offsets and row: expert, row_begin and slot.
static void plan_index(Plan *p, void *scratch) {
    const RowBits x = rows_of_groups(p, NULL, p->E, &scratch);
    plan_rows_kernel<<<blocks_for((size_t)p->rows + 1, THREADS), THREADS, 0, device.stream>>>(
        *p, x.mask, x.ranks, p->rows, p->E);
    launched("plan_rows");
}

// begin (E): where the part of the expert at a position begins in `all`
__global__ void __launch_bounds__(THREADS) plan_part_offsets_kernel(
    int *offsets, int *begin, Plan all, const int *order, int first, int rows, int E) {
    extern __shared__ int part_count[]; // (E)
    for (int q = threadIdx.x; q < E; q += THREADS) {
        const int e = order ? order[q] : q;
        begin[q] = first_slot(all.offsets, all.row, e, first);
        part_count[q] = first_slot(all.offsets, all.row, e, first + rows) - begin[q];
    }
    __syncthreads();
    offsets_of(offsets, part_count, E);
}
// A block copies an expert's slots.
__global__ void __launch_bounds__(THREADS)
    plan_part_kernel(Plan p, int *from, Plan all, const int *begin, int first) {
    const int s0 = p.offsets[blockIdx.x], n = p.offsets[blockIdx.x + 1] - s0;
    for (int k = threadIdx.x; k < n; k += THREADS) {
        const int s = s0 + k, i = begin[blockIdx.x] + k;
        p.row[s] = all.row[i] - first;
        ((float *)p.weight)[s] = ((const float *)all.weight)[i];
        from[s] = i;
    }
}

static void plan_part(
    Plan *p, int *from, const Plan *all, const int *order, int first, void *scratch) {
    int *begin = carve<int>(&scratch, p->E);
    plan_part_offsets_kernel<<<1, THREADS, p->E * sizeof(int), device.stream>>>(
        p->offsets, begin, *all, order, first, p->rows, p->E);
    launched("plan_part_offsets");
    plan_part_kernel<<<p->E, THREADS, 0, device.stream>>>(*p, from, *all, begin, first);
    launched("plan_part");
    plan_index(p, scratch);
}

// A thread owns a row: its items begin where those of the rows before it end.
__global__ void __launch_bounds__(THREADS) plan_items_kernel(int *item, int *item_row,
    int *item_begin, int *item_at, const int *count, Plan p, RowBits x, int parts) {
    const int n = blockIdx.x * THREADS + threadIdx.x, each = p.E / parts;
    if (n > p.rows) return;
    int at = 0;
    if (n == p.rows) {
        for (int g = 0; g < parts; g++) at += count[g];
        item_begin[n] = at;
        return;
    }
    const unsigned *bits = x.mask + (size_t)(n / 32) * parts, below = (1u << n % 32) - 1;
    const int *rank = x.ranks + (size_t)(n / 32) * parts;
    for (int g = 0; g < parts; g++) at += rank[g] + __popc(bits[g] & below);
    item_begin[n] = at;
    int group = 0, first = 0; // the first item of `group`
    for (int i = p.row_begin[n], last = -1; i < p.row_begin[n + 1]; i++) {
        const int s = p.slot[i], g = p.expert[s] / each;
        const int number = rank[g] + __popc(bits[g] & below);
        item[s] = g == last ? ~number : number;
        if (g == last) continue;
        while (group < g) first += count[group++];
        item_row[first + number] = n;
        item_at[at++] = first + number;
        last = g;
    }
}

static void plan_items(int *item, int *item_row, int *item_begin, int *item_at, int *count,
    const Plan *p, int parts, void *scratch) {
    const RowBits x = rows_of_groups(p, count, parts, &scratch);
    plan_items_kernel<<<blocks_for((size_t)p->rows + 1, THREADS), THREADS, 0, device.stream>>>(
        item, item_row, item_begin, item_at, count, *p, x, parts);
    launched("plan_items");
}

typedef struct Sources { // of the slots of a merged plan, as plan_merge has them
    const int *offsets, *start, *which;
    int n, ld;
} Sources;
// source i's offsets of p's expert e, and of the one after it
__device__ inline const int *source_offsets(const Sources &x, int e, int i) {
    return x.offsets + (size_t)i * x.ld + (x.which ? x.which[e] : e);
}
__device__ inline int slots_before(const Sources &x, int e, int n) { // of e, from sources before n
    int sum = 0;
    for (int i = 0; i < n; i++) {
        const int *o = source_offsets(x, e, i);
        sum += o[1] - o[0];
    }
    return sum;
}

__global__ void __launch_bounds__(THREADS)
    plan_merge_offsets_kernel(int *offsets, Sources x, int E) {
    extern __shared__ int merged_count[]; // (E)
    for (int e = threadIdx.x; e < E; e += THREADS) merged_count[e] = slots_before(x, e, x.n);
    __syncthreads();
    offsets_of(offsets, merged_count, E);
}
// A block copies what one source has for one expert.
__global__ void __launch_bounds__(THREADS)
    plan_merge_kernel(Plan p, const int *item, const float *weight, const int *base, Sources x) {
    const int e = blockIdx.x / x.n, i = blockIdx.x % x.n, *o = source_offsets(x, e, i);
    const int s0 = p.offsets[e] + slots_before(x, e, i) - o[0];
    for (int k = o[0] + threadIdx.x; k < o[1]; k += THREADS) {
        const int at = x.start[i] + k, number = item ? item[at] : k;
        p.row[s0 + k] = base[i] + (number < 0 ? ~number : number);
        ((float *)p.weight)[s0 + k] = weight[at];
    }
}

static void plan_merge(Plan *p, const int *item, const stat_t *weight, const int *offsets,
    const int *start, const int *base, const int *which, int n, int ld, void *scratch) {
    const Sources x = {offsets, start, which, n, ld};
    plan_merge_offsets_kernel<<<1, THREADS, p->E * sizeof(int), device.stream>>>(
        p->offsets, x, p->E);
    launched("plan_merge_offsets");
    plan_merge_kernel<<<blocks_for((size_t)p->E * n, 1), THREADS, 0, device.stream>>>(
        *p, item, (const float *)weight, base, x);
    launched("plan_merge");
    plan_index(p, scratch);
}

// as plan_merge_kernel, the other way
__global__ void __launch_bounds__(THREADS)
    plan_unmerge_kernel(float *out, const float *values, const int *offsets, Sources x) {
    const int e = blockIdx.x / x.n, i = blockIdx.x % x.n, *o = source_offsets(x, e, i);
    const int s0 = offsets[e] + slots_before(x, e, i) - o[0];
    for (int k = o[0] + threadIdx.x; k < o[1]; k += THREADS) out[x.start[i] + k] = values[s0 + k];
}

static void plan_unmerge(stat_t *out, const stat_t *values, const Plan *p, const int *offsets,
    const int *start, const int *which, int n, int ld) {
    const Sources x = {offsets, start, which, n, ld};
    plan_unmerge_kernel<<<blocks_for((size_t)p->E * n, 1), THREADS, 0, device.stream>>>(
        (float *)out, (const float *)values, p->offsets, x);
    launched("plan_unmerge");
}

__global__ void __launch_bounds__(THREADS)
    scatter_kernel(float *out, const float *values, const int *index, const int *offsets, int E) {
    const int s = blockIdx.x * THREADS + threadIdx.x;
    if (s < offsets[E]) out[index[s]] = values[s];
}

static void scatter(stat_t *out, const stat_t *values, const int *index, const Plan *p) {
    scatter_kernel<<<blocks_for(p->S_max, THREADS), THREADS, 0, device.stream>>>(
        (float *)out, (const float *)values, index, p->offsets, p->E);
    launched("scatter");
}

// W values of a row of either type: 1, or what 16 bytes hold of the narrower type
template <class X, class Y> struct Both {
    enum { PER = (int)Vec<X>::PER > (int)Vec<Y>::PER ? (int)Vec<X>::PER : (int)Vec<Y>::PER };
};
template <int W> __device__ inline void read_row(float *x, const float *p) { read_floats<W>(x, p); }
template <int W> __device__ inline void read_row(float *x, const bf16 *p) {
    read_values<bf16, W>(x, p);
}
template <int W> __device__ inline void write_row(float *p, const float *x) {
    write_floats<W>(p, x);
}
template <int W> __device__ inline void write_row(bf16 *p, const float *x) {
    write_values<bf16, W>(p, x);
}

// A warp copies a row.
template <class Out, class In, int W>
__global__ void __launch_bounds__(THREADS)
    copy_rows_kernel(Out *out, const int *to, const In *in, const int *from, int n, int C) {
    const int i = blockIdx.x * (THREADS / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    if (i >= n) return;
    const int target = to ? to[i] : i, source = from ? from[i] : i;
    if (target < 0) return;
    const In *x = in + (size_t)(source < 0 ? ~source : source) * C;
    Out *y = out + (size_t)target * C;
    for (int c = threadIdx.x % WARP_SIZE * W; c < C; c += WARP_SIZE * W) {
        if constexpr (!std::is_same<Out, In>::value) {
            float v[W];
            read_row<W>(v, x + c);
            write_row<W>(y + c, v);
        } else if constexpr (W == 1) {
            y[c] = x[c];
        } else {
            store16(y + c, load16(x + c));
        }
    }
}

template <class Out, class In>
static void launch_copy(void *out, const int *to, const void *in, const int *from, int n, int C) {
    enum { W = Both<Out, In>::PER };
    const unsigned blocks = blocks_for(n, THREADS / WARP_SIZE);
    const In *x = (const In *)in;
    Out *y = (Out *)out;
    if (C % W == 0 && on16(x) && on16(y))
        copy_rows_kernel<Out, In, W><<<blocks, THREADS, 0, device.stream>>>(y, to, x, from, n, C);
    else
        copy_rows_kernel<Out, In, 1><<<blocks, THREADS, 0, device.stream>>>(y, to, x, from, n, C);
    launched("copy_rows");
}
template <class T>
static void copy_rows(void *out, DType out_type, const int *to, const void *in, DType in_type,
    const int *from, int n, int C) {
    if (out_type == BF16 && in_type == BF16)
        launch_copy<bf16, bf16>(out, to, in, from, n, C);
    else if (out_type == BF16)
        launch_copy<bf16, T>(out, to, in, from, n, C);
    else if (in_type == BF16)
        launch_copy<T, bf16>(out, to, in, from, n, C);
    else
        launch_copy<T, T>(out, to, in, from, n, C);
}

// A warp owns a row of the output.
template <class T, class In, int W>
__global__ void __launch_bounds__(THREADS) sum_rows_kernel(
    T *out, const In *in, const int *begin, const int *at, int parts, int R, int C) {
    const int r = blockIdx.x * (THREADS / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    if (r >= R) return;
    const int first = begin ? begin[r] : 0, end = begin ? begin[r + 1] : parts;
    for (int c = threadIdx.x % WARP_SIZE * W; c < C; c += WARP_SIZE * W) {
        float sum[W] = {0}, x[W];
        for (int i = first; i < end; i++) {
            read_row<W>(x, in + (begin ? (size_t)at[i] : (size_t)i * R + r) * C + c);
            for (int j = 0; j < W; j++) sum[j] += x[j];
        }
        write_row<W>(out + (size_t)r * C + c, sum);
    }
}

template <class T, class In>
static void launch_sum(
    act_t *out, const void *in, const int *begin, const int *at, int parts, int R, int C) {
    enum { W = Both<T, In>::PER };
    const unsigned blocks = blocks_for(R, THREADS / WARP_SIZE);
    if (C % W == 0 && on16(out) && on16(in))
        sum_rows_kernel<T, In, W><<<blocks, THREADS, 0, device.stream>>>(
            (T *)out, (const In *)in, begin, at, parts, R, C);
    else
        sum_rows_kernel<T, In, 1><<<blocks, THREADS, 0, device.stream>>>(
            (T *)out, (const In *)in, begin, at, parts, R, C);
    launched("sum_rows");
}
template <class T>
static void sum_rows(act_t *out, const void *in, DType in_type, const int *begin, const int *at,
    int parts, int R, int C) {
    if (in_type == BF16)
        launch_sum<T, bf16>(out, in, begin, at, parts, R, C);
    else
        launch_sum<T, T>(out, in, begin, at, parts, R, C);
}

// of plan_select, which sorts, and of what is above, which has E ints where the sort has its counts
static size_t plan_scratch(const Config *c, const ScratchShape *s) {
    const size_t N = (size_t)s->B * s->T, R = (size_t)s->rows > N ? s->rows : N;
    const size_t words = pieces_of((int)R, 32);
    return 2 * round_up(words * c->n_experts * sizeof(int), ARENA_ALIGN) +
        topk_scratch((int)R * c->top_k, c->n_experts);
}

// -------------------------------------------------------------------------------------------------
// experts

/* The output of the second product is a row a slot, and a source row adds its slots in expert order.
   That is done by chunks of source rows: the product leaves the chunk's slot rows in scratch, a
   source row's side by side, and the combine adds them. The scratch does not grow with N. */
enum {
#ifdef CUDA_CPU_H
    COMBINE_SLOTS = 96, // few, so that small tests meet several chunks
#else
    COMBINE_SLOTS = 16384,
#endif
};
static inline int chunk_rows(const Plan *p) { // source rows of a chunk
    const int rows = COMBINE_SLOTS / p->row_max;
    return rows < 1 ? 1 : rows < p->rows ? rows : p->rows;
}
static inline size_t chunk_slots(const Plan *p) { // most slots of a chunk
    const size_t slots = (size_t)chunk_rows(p) * p->row_max;
    return slots < (size_t)p->S_max ? slots : (size_t)p->S_max;
}

// where[s]: the position of slot s among the slots by source row
__global__ void __launch_bounds__(THREADS)
    slot_position_kernel(int *where, const int *slot, const int *offsets, int E) {
    const int S = offsets[E];
    for (int j = blockIdx.x * blockDim.x + threadIdx.x; j < S; j += gridDim.x * blockDim.x)
        where[slot[j]] = j;
}
// The slots of expert e whose source row lies in [r0, r1).
__global__ void __launch_bounds__(THREADS) chunk_bounds_kernel(
    int *begin, int *end, const int *offsets, const int *row, int E, int r0, int r1) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= 2 * E) return;
    const int e = i / 2;
    (i % 2 ? end : begin)[e] = first_slot(offsets, row, e, i % 2 ? r1 : r0);
}
// out[r] (+)= sum over r's slots, in expert order, of weight * Y;  Y (chunk slots, C)
template <class T, bool VEC>
__global__ void __launch_bounds__(THREADS) combine_kernel(T *out, const T *Y, const float *weight,
    const int *row_begin, const int *slot, int r0, int rows, int C, int accumulate) {
    enum { PER = Vec<T>::PER };
    const int across = pieces_of(C, PER), base = row_begin[r0];
    const size_t count = (size_t)rows * across;
    for (size_t v = blockIdx.x * (size_t)blockDim.x + threadIdx.x; v < count;
         v += (size_t)gridDim.x * blockDim.x) {
        const int r = r0 + (int)(v / across), c = (int)(v % across) * PER, have = C - c;
        T *o = out + (size_t)r * C + c;
        float sum[PER] = {}, y[PER];
        if (accumulate) read_vec<T, VEC>(sum, o, have);
        for (int j = row_begin[r]; j < row_begin[r + 1]; j++) {
            const float w = weight ? weight[slot[j]] : 1;
            read_vec<T, VEC>(y, Y + (size_t)(j - base) * C + c, have);
#pragma unroll
            for (int i = 0; i < PER; i++) sum[i] = fmaf(w, y[i], sum[i]);
        }
        write_vec<T, VEC>(o, sum, have);
    }
}
// A[j] = silu(g) * u of slot[base + j], or of row j, for the slots of source rows [r0, r1)
template <class T, bool VEC>
__global__ void __launch_bounds__(THREADS)
    swiglu_kernel(T *A, const T *H, const int *row_begin, const int *slot, int r0, int r1, int I) {
    enum { PER = Vec<T>::PER };
    const int across = pieces_of(I, PER), base = slot ? row_begin[r0] : r0;
    const size_t count = (size_t)((slot ? row_begin[r1] : r1) - base) * across;
    for (size_t v = blockIdx.x * (size_t)blockDim.x + threadIdx.x; v < count;
         v += (size_t)gridDim.x * blockDim.x) {
        const int j = (int)(v / across), c = (int)(v % across) * PER, have = I - c;
        const T *h = H + (size_t)(slot ? slot[base + j] : base + j) * 2 * I + c;
        float g[PER], u[PER];
        read_vec<T, VEC>(g, h, have);
        read_vec<T, VEC>(u, h + I, have);
#pragma unroll
        for (int i = 0; i < PER; i++) g[i] = g[i] * sigmoid(g[i]) * u[i];
        write_vec<T, VEC>(A + (size_t)j * I + c, g, have);
    }
}
template <class T> static int vec_rows(int columns) { return columns * sizeof(T) % 16 == 0; }
// out[r] (+)= the sum over r's slots of weight_s v[s], where `p` makes v[s] from slots: the chunks.
// A NULL: it is made of H, chunk by chunk
template <class T, Form FORM>
static void product_and_combine(Product<T> p, const Plan *plan, T *out, const float *weight,
    int accumulate, const T *H, void *scratch) {
    const int R = plan->rows, C = p.n, I = p.k, rows = chunk_rows(plan);
    int *where = carve<int>(&scratch, plan->S_max), *begin = carve<int>(&scratch, plan->E),
        *end = carve<int>(&scratch, plan->E);
    T *Y = carve<T>(&scratch, chunk_slots(plan) * C), *made = (T *)scratch;
    if (plan->row) {
        slot_position_kernel<<<blocks_for(plan->S_max, THREADS), THREADS, 0, device.stream>>>(
            where, plan->slot, plan->offsets, plan->E);
        launched("slot_position");
    }
    for (int r0 = 0; r0 < R; r0 += rows) {
        const int n = r0 + rows < R ? rows : R - r0, r1 = r0 + n;
        Product<T> q = p;
        if (!p.a) { // the first operand is made here
            const unsigned blocks =
                blocks_for((size_t)n * plan->row_max * pieces_of(I, 4), THREADS);
            if (vec_rows<T>(I))
                swiglu_kernel<T, true><<<blocks, THREADS, 0, device.stream>>>(
                    made, H, plan->row_begin, plan->slot, r0, r1, I);
            else
                swiglu_kernel<T, false><<<blocks, THREADS, 0, device.stream>>>(
                    made, H, plan->row_begin, plan->slot, r0, r1, I);
            launched("swiglu");
            q.a = made, q.lda = I;
        }
        if (!plan->row) { // the identity: a slot is its row, and goes straight to the output
            if (p.a) q.a = p.a + (size_t)r0 * p.lda;
            q.rows = n;
            q.out = out + (size_t)r0 * C, q.ldo = C, q.accumulate = accumulate;
            product<T, FORM, STORE>(q);
            continue;
        }
        chunk_bounds_kernel<<<blocks_for(2 * plan->E, THREADS), THREADS, 0, device.stream>>>(
            begin, end, plan->offsets, plan->row, plan->E, r0, r1);
        launched("chunk_bounds");
        const Rows by_row = {where, plan->row_begin + r0};
        if (!p.a) q.a_row = by_row;
        q.begin = begin, q.end = end, q.groups = plan->E, q.rows = (int)chunk_slots(plan);
        q.out = Y, q.ldo = C, q.out_row = by_row;
        product<T, FORM, STORE>(q);
        const unsigned blocks = blocks_for((size_t)n * pieces_of(C, Vec<T>::PER), THREADS);
        if (vec_rows<T>(C))
            combine_kernel<T, true><<<blocks, THREADS, 0, device.stream>>>(
                out, Y, weight, plan->row_begin, plan->slot, r0, n, C, accumulate);
        else
            combine_kernel<T, false><<<blocks, THREADS, 0, device.stream>>>(
                out, Y, weight, plan->row_begin, plan->slot, r0, n, C, accumulate);
        launched("combine");
    }
}
// The groups of a plan's slots.
template <class T> static Product<T> by_expert(const Plan *p) {
    Product<T> x = {};
    x.begin = p->offsets, x.end = p->offsets + 1, x.groups = p->E, x.rows = p->S_max;
    return x;
}

template <class T>
static void expert_up_forward(
    act_t *H, act_t *A, const act_t *X, Mat W1, const Plan *plan, void *scratch) {
    (void)scratch;
    Product<T> p = by_expert<T>(plan);
    p.a = (const T *)X, p.lda = W1.cols, p.a_row.map = plan->row;
    p.b = (const T *)W1.data, p.ldb = W1.ld, p.b_stride = W1.stride;
    p.n = W1.rows, p.k = W1.cols;
    p.out = H, p.ldo = W1.rows;
    p.A = (T *)A;
    if (A)
        p.n = W1.rows / 2, product<T, NT, GLU>(p);
    else
        product<T, NT, STORE>(p);
}

template <class T>
static void expert_down_forward(act_t *out, const act_t *H, const act_t *A, Mat W2,
    const Plan *plan, int accumulate, void *scratch) {
    Product<T> p = {};
    p.a = (const T *)A, p.lda = W2.cols;
    p.b = (const T *)W2.data, p.ldb = W2.ld, p.b_stride = W2.stride;
    p.groups = 1, p.n = W2.rows, p.k = W2.cols;
    product_and_combine<T, NT>(
        p, plan, (T *)out, (const float *)plan->weight, accumulate, (const T *)H, scratch);
}

// dS[s] = the sum of a slot's parts, in the order of the columns
__global__ void __launch_bounds__(THREADS)
    sum_parts_kernel(float *dS, const float *partial, int parts, const int *offsets, int E) {
    const int S = offsets[E];
    for (int s = blockIdx.x * blockDim.x + threadIdx.x; s < S; s += gridDim.x * blockDim.x) {
        float sum = 0;
        for (int i = 0; i < parts; i++) sum += partial[(size_t)s * parts + i];
        dS[s] = sum;
    }
}

template <class T>
static void expert_down_backward(act_t *dH, act_t *sA, stat_t *dS, grad_t *dW2, const act_t *dout,
    const act_t *H, Mat W2, const Plan *plan, int fresh, void *scratch) {
    const int C = W2.rows, I = W2.cols;
    Product<T> p = by_expert<T>(plan);
    p.a = (const T *)dout, p.lda = C, p.a_row.map = plan->row;
    p.b = (const T *)W2.data, p.ldb = W2.ld, p.b_stride = W2.stride;
    p.n = I, p.k = C;
    p.out = dH, p.ldo = 2 * (size_t)I;
    p.A = (T *)sA, p.H = (const T *)H, p.weight = (const float *)plan->weight;
    p.partial = dS ? (float *)scratch : NULL;
    product<T, NN, DGLU>(p);
    if (dS) {
        sum_parts_kernel<<<blocks_for(plan->S_max, THREADS), THREADS, 0, device.stream>>>(
            (float *)dS, p.partial, parts_of(I), plan->offsets, plan->E);
        launched("sum_parts");
    }
    Product<T> g = by_expert<T>(plan);
    g.a = (const T *)dout, g.lda = C, g.a_row.map = plan->row, g.m = C;
    g.b = (const T *)sA, g.ldb = I, g.n = I;
    g.out = dW2, g.ldo = W2.ld, g.out_stride = W2.stride, g.accumulate = !fresh;
    product<T, TN, GRAD>(g);
}

template <class T>
static void expert_up_backward(act_t *dX, grad_t *dW1, const act_t *dH, const act_t *X, Mat W1,
    const Plan *plan, int accumulate, int fresh, void *scratch) {
    const int C = W1.cols, I2 = W1.rows;
    Product<T> p = {};
    p.a = (const T *)dH, p.lda = I2;
    p.b = (const T *)W1.data, p.ldb = W1.ld, p.b_stride = W1.stride;
    p.groups = 1, p.n = C, p.k = I2;
    product_and_combine<T, NN>(p, plan, (T *)dX, NULL, accumulate, NULL, scratch);
    Product<T> g = by_expert<T>(plan);
    g.a = (const T *)dH, g.lda = I2, g.m = I2;
    g.b = (const T *)X, g.ldb = C, g.b_row.map = plan->row, g.n = C;
    g.out = dW1, g.ldo = W1.ld, g.out_stride = W1.stride, g.accumulate = !fresh;
    product<T, TN, GRAD>(g);
}

// bytes of scratch for a model of this shape
static size_t experts_scratch(const Config *c, const ScratchShape *s) {
    const size_t E = c->n_experts, C = c->d_model;
    size_t I = c->d_expert, slots = s->S_max;
    if (I < (size_t)c->d_shared) I = c->d_shared;
    if (c->n_experts > 1 && c->dense_layers && I < (size_t)c->d_dense) I = c->d_dense;
    size_t chunk = E > COMBINE_SLOTS ? E : (size_t)COMBINE_SLOTS;
    if (chunk > slots) chunk = slots;
    const size_t ints =
        round_up(slots * sizeof(int), ARENA_ALIGN) + 2 * round_up(E * sizeof(int), ARENA_ALIGN);
    const size_t combine = ints + round_up(chunk * C * sizeof(float), ARENA_ALIGN) +
        round_up(chunk * I * sizeof(float), ARENA_ALIGN);
    const size_t partial = round_up(slots * parts_of((int)I) * sizeof(float), ARENA_ALIGN);
    return combine > partial ? combine : partial;
}

// -------------------------------------------------------------------------------------------------
// classifier

enum {
#ifdef CUDA_CPU_H
    CLASSIFIER_LOGITS = 4096, // few, so that small tests meet several chunks
#else
    CLASSIFIER_LOGITS = 1 << 25, // that exist at a time
#endif
};
static inline int classifier_chunk(int V) { // rows: fixed by V alone
    const int rows = CLASSIFIER_LOGITS / V / 64 * 64;
    return rows < 64 ? 64 : rows;
}

/* A block owns a row of logits: losses = lse - logit of the target, and the gradient of scale times
   it, softmax - 1 at the target, into dlogits. */
template <class T>
__global__ void __launch_bounds__(THREADS) cross_entropy_kernel(
    float *losses, T *dlogits, const float *logits, const int *targets, int V, float scale) {
    __shared__ float of_warp[THREADS / WARP_SIZE];
    const size_t row = blockIdx.x;
    const float *z = logits + row * V;
    const int target = targets[row], warp = threadIdx.x / WARP_SIZE;
    if (target < 0) { // ignored: no loss, and a gradient of literal zeros
        if (threadIdx.x == 0) losses[row] = 0;
        for (int v = threadIdx.x; dlogits && v < V; v += THREADS)
            dlogits[row * V + v] = from_float<T>(0);
        return;
    }
    float top = -INFINITY, sum = 0;
    for (int v = threadIdx.x; v < V; v += THREADS) top = z[v] > top || z[v] != z[v] ? z[v] : top;
    top = warp_max(top);
    if (threadIdx.x % WARP_SIZE == 0) of_warp[warp] = top;
    __syncthreads();
    for (int i = 0; i < THREADS / WARP_SIZE; i++)
        top = of_warp[i] > top || of_warp[i] != of_warp[i] ? of_warp[i] : top;
    __syncthreads();
    for (int v = threadIdx.x; v < V; v += THREADS) sum += expf(z[v] - top);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP_SIZE == 0) of_warp[warp] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < THREADS / WARP_SIZE; i++) sum += of_warp[i];
    if (threadIdx.x == 0) losses[row] = top + logf(sum) - z[target];
    const float inv = 1 / sum;
    for (int v = threadIdx.x; dlogits && v < V; v += THREADS)
        dlogits[row * V + v] = from_float<T>((expf(z[v] - top) * inv - (v == target)) * scale);
}

// logits (N,V) = x w^T, float
template <class T> static void logits_of(float *logits, const T *x, Mat w, int N) {
#ifdef USE_CUBLAS
    if (cublas)
        return cublas_product(CUBLAS_OP_T, CUBLAS_OP_N, w.rows, N, w.cols, w.data, w.ld, x, w.cols,
            sizeof(T), logits, w.rows, sizeof(float), 0);
#endif
    Product<T> p = {};
    p.a = x, p.lda = w.cols;
    p.b = (const T *)w.data, p.ldb = w.ld;
    p.groups = 1, p.rows = N, p.n = w.rows, p.k = w.cols;
    p.out = logits, p.ldo = w.rows;
    product<T, NT, LOGITS>(p);
}

template <class T>
static void classifier(stat_t *losses, act_t *dinp, grad_t *dw, const act_t *inp, Mat w,
    const int *targets, int N, double scale, void *scratch) {
    const int V = w.rows, C = w.cols, most = classifier_chunk(V), chunk = most < N ? most : N;
    float *logits = carve<float>(&scratch, (size_t)chunk * V);
    T *dlogits = dinp ? carve<T>(&scratch, (size_t)chunk * V) : NULL;
    for (int n0 = 0; n0 < N; n0 += chunk) {
        const int rows = chunk < N - n0 ? chunk : N - n0;
        const T *x = (const T *)inp + (size_t)n0 * C;
        logits_of<T>(logits, x, w, rows);
        cross_entropy_kernel<T><<<rows, THREADS, 0, device.stream>>>(
            (float *)losses + n0, dlogits, logits, targets + n0, V, (float)scale);
        launched("cross_entropy");
        if (dinp)
            linear_backward<T>((T *)dinp + (size_t)n0 * C, dw, dlogits, x, w, rows, 0, scratch);
    }
}
static size_t classifier_scratch(const Config *c, const ScratchShape *s) {
    const size_t N = (size_t)s->B * s->T, most = classifier_chunk(c->vocab_size);
    const size_t count = (most < N ? most : N) * c->vocab_size;
    return 2 * round_up(count * sizeof(float), ARENA_ALIGN);
}

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

__device__ inline void set_clip(StepState *st, double square, double max_norm) {
    st->grad_norm = sqrt(square);
    st->clip = max_norm > 0 && st->grad_norm > max_norm ? max_norm / st->grad_norm : 1;
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
    st->square = st->bad ? (double)NAN : sum;
    set_clip(st, sum, max_norm);
}

// one thread
__global__ void __launch_bounds__(1) clip_norm_kernel(StepState *st, double max_norm) {
    if (!isfinite(st->square) && !st->bad) st->bad = BAD_ELSEWHERE;
    set_clip(st, st->square, max_norm);
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

static void clip_norm(StepState *st, double max_norm) {
    clip_norm_kernel<<<1, 1, 0, device.stream>>>(st, max_norm);
    launched("clip_norm");
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
            const size_t moment = seg[i].moment - seg[i].offset; // how far the moments lie off
            Stretch x = stretch_of(&seg[i], piece);
            const float decay = seg[i].decay ? (float)o.weight_decay : 0;
            if (moment % 4) x.wide = x.begin;
            for (size_t j = x.begin + threadIdx.x * 4; j < x.wide; j += THREADS * 4) {
                float pj[4], gj[4], mj[4], vj[4];
                read_values<float, 4>(pj, params + j);
                read_values<float, 4>(gj, grads + j);
                if (o.sgd) {
                    for (int k = 0; k < 4; k++) sgd(&pj[k], gj[k], r, decay);
                } else {
                    read_values<float, 4>(mj, m + (j + moment));
                    read_values<float, 4>(vj, v + (j + moment));
                    for (int k = 0; k < 4; k++) adamw(&pj[k], &mj[k], &vj[k], gj[k], r, decay);
                    write_values<float, 4>(m + (j + moment), mj);
                    write_values<float, 4>(v + (j + moment), vj);
                }
                write_values<float, 4>(params + j, pj);
            }
            for (size_t j = x.wide + threadIdx.x; j < x.end; j += THREADS) {
                if (o.sgd)
                    sgd(&params[j], grads[j], r, decay);
                else
                    adamw(&params[j], &m[j + moment], &v[j + moment], grads[j], r, decay);
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

// All parameters rounded to bf16, at the same offsets; 8 of them a thread and turn, which divides
// count: tensors start on ARENA_ALIGN bytes.
__global__ void __launch_bounds__(THREADS)
    params_changed_kernel(bf16 *copies, const float *params, size_t count) {
    float x[8];
    for (size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * 8; i < count;
         i += (size_t)gridDim.x * THREADS * 8) {
        read_floats<8>(x, params + i);
        write_values<bf16, 8>(copies + i, x);
    }
}

static void params_changed(void *copies, const param_t *params, const TensorTable *t) {
    params_changed_kernel<<<device.processors * PIECE_BLOCKS, THREADS, 0, device.stream>>>(
        (bf16 *)copies, (const float *)params, t->elements);
    launched("params_changed");
}

// -------------------------------------------------------------------------------------------------
// memory

static void *device_alloc(size_t bytes) {
    void *p = NULL;
    if (cudaMalloc(&p, bytes + !bytes) == cudaSuccess) return p;
    (void)cudaGetLastError(); // said by the caller, not by the next launch
    return NULL;
}
static void device_release(void *p) { check(cudaFree(p), "release"); }
static void to_device(void *dst, const void *src, size_t bytes) {
    if (!bytes) return;
    check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, device.stream), "copy");
    check(cudaStreamSynchronize(device.stream), "copy"); // the source is the caller's again
}
static void to_host(void *dst, const void *src, size_t bytes) {
    if (!bytes) return;
    check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, device.stream), "copy");
    check(cudaStreamSynchronize(device.stream), "copy");
}
static void zero(void *p, size_t bytes) {
    if (bytes) check(cudaMemsetAsync(p, 0, bytes, device.stream), "zero");
}
#ifdef CUDA_CPU_H
static double (*const memory_free)(void) = NULL; // the host's
#else
static double memory_free(void) {
    size_t left = 0, all = 0;
    return cudaMemGetInfo(&left, &all) == cudaSuccess ? (double)left : -1;
}
#endif
// the whole device: a kernel under test may use a stream of its own
static void sync_device(void) { check(cudaDeviceSynchronize(), "the last kernels"); }

/* The best that independent multiply-adds reach: fmaf, or the matrix instruction. `out` is never
   written: it keeps the compiler from leaving the sums out. */
enum { PEAK_CHAINS = 8 }; // sums under way in a thread
template <class T> __global__ void __launch_bounds__(THREADS) peak_kernel(float *out, int rounds) {
    float d[PEAK_CHAINS][4] = {};
    if constexpr (sizeof(T) == sizeof(float)) {
        const float x = 1 + threadIdx.x * 1e-9f, y = 1e-9f * threadIdx.x;
        for (int i = 0; i < rounds; i++)
#pragma unroll
            for (int c = 0; c < PEAK_CHAINS; c++)
#pragma unroll
                for (int r = 0; r < 4; r++) d[c][r] = fmaf(d[c][r], x, y);
    } else {
        const unsigned a[4] = {threadIdx.x, 1, 2, 3}, b[2] = {4, threadIdx.x};
        for (int i = 0; i < rounds; i++)
#pragma unroll
            for (int c = 0; c < PEAK_CHAINS; c++) mma_bf16(d[c], a, b);
    }
    float sum = 0;
    for (int c = 0; c < PEAK_CHAINS; c++) sum += d[c][0] + d[c][1] + d[c][2] + d[c][3];
    if (sum == -1) out[threadIdx.x] = sum;
}
template <class T> static double peak(double seconds) { // GFLOP/s
    const int grid = 8 * device.processors;
    const double each = 2.0 * grid * PEAK_CHAINS *
        (sizeof(T) == sizeof(float) ? 4.0 * THREADS : 16.0 * 8 * 16 * THREADS / WARP_SIZE);
    double best = 0, end = now_s() + seconds;
    float *out = (float *)device_alloc(THREADS * sizeof(float));
    if (!out) die(RUN_ERROR, "no memory on the device");
    for (int rounds = 1; best == 0 || now_s() < end;
         rounds = rounds < 1 << 14 ? 2 * rounds : rounds) {
        sync_device();
        const double t = now_s();
        peak_kernel<T><<<grid, THREADS, 0, device.stream>>>(out, rounds);
        launched("peak");
        sync_device();
        const double rate = each * rounds / (now_s() - t) / 1e9;
        best = rate > best ? rate : best;
    }
    device_release(out);
    return best;
}

// What each operation takes from the scratch arena; the hungriest decides.
static size_t scratch_bytes(const Config *c, const ScratchShape *s) {
    const size_t need[] = {embedding_scratch(c, s), norm_scratch(c, s), qk_rope_scratch(c, s),
        attention_scratch(c, s), router_scratch(c, s), plan_scratch(c, s), experts_scratch(c, s),
        classifier_scratch(c, s), grad_norm_scratch(c)};
    size_t most = 0;
    for (size_t i = 0; i < sizeof need / sizeof *need; i++) most = need[i] > most ? need[i] : most;
    return round_up(most, ARENA_ALIGN);
}

#ifndef CUDA_CPU_H
static int preferred = -1;
extern "C" void cuda_prefer(int number) { preferred = number; }
#endif

// NULL, with the reason in *why, where there is no device.
static int open_device(const char **why) {
    static char reason[256];
    int id = 0, n = 0;
    if (device.ready) return 1;
    cudaError_t e = cudaGetDeviceCount(&n);
#ifndef CUDA_CPU_H
    if (e == cudaSuccess && n > 0 && preferred >= 0) e = cudaSetDevice(preferred % n);
#endif
    if (e == cudaSuccess && n > 0) e = cudaGetDevice(&id);
    if (e == cudaSuccess && n > 0)
        e = cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, id);
    if (e == cudaSuccess && n > 0)
        e = cudaStreamCreateWithFlags(&device.stream, cudaStreamNonBlocking);
    if (e != cudaSuccess || n < 1) {
        snprintf(reason, sizeof reason, "%s",
            n < 1 && e == cudaSuccess ? "no GPU found" : cudaGetErrorString(e));
        *why = reason;
        return 0;
    }
    return device.ready = 1;
}

template <class T> static Backend table(const char *name) {
    const DType type = sizeof(T) == sizeof(float) ? F32 : BF16;
    Backend b = {};
    b.name = name;
    b.act_type = b.mat_type = type, b.act_size = b.mat_size = sizeof(T);
    b.param_type = b.grad_type = b.stat_type = F32;
    b.param_size = b.grad_size = b.stat_size = sizeof(float);
    b.keeps_A = 1;
#ifdef CUDA_CPU_H
    b.apart = 1;
#else
    b.apart = 2;
#endif
    b.stream = device.stream;
    b.alloc = device_alloc, b.release = device_release;
    b.to_device = to_device, b.to_host = to_host;
    b.zero = zero, b.sync = sync_device;
    b.memory_free = memory_free;
    b.peak = peak<T>;
    b.scratch_bytes = scratch_bytes;
    b.params_changed = type == F32 ? NULL : params_changed;
    b.embedding_forward = embedding_forward<T>, b.embedding_backward = embedding_backward<T>;
    b.rmsnorm_forward = rmsnorm_forward<T>, b.rmsnorm_backward = rmsnorm_backward<T>;
    b.residual_rmsnorm_forward = residual_rmsnorm_forward<T>;
    b.add = add<T>;
    b.linear_forward = linear_forward<T>, b.linear_backward = linear_backward<T>;
    b.qk_rope_forward = qk_rope_forward<T>, b.qk_rope_backward = qk_rope_backward<T>;
    b.attention_forward = attention_forward<T>, b.attention_backward = attention_backward<T>;
    b.router_forward = router_forward<T>, b.router_backward = router_backward<T>;
    b.router_balance = router_balance;
    b.plan_topk = plan_topk, b.plan_select = plan_select;
    b.plan_part = plan_part, b.plan_items = plan_items;
    b.plan_merge = plan_merge, b.plan_unmerge = plan_unmerge;
    b.scatter = scatter;
    b.copy_rows = copy_rows<T>, b.sum_rows = sum_rows<T>;
    b.expert_up_forward = expert_up_forward<T>, b.expert_up_backward = expert_up_backward<T>;
    b.expert_down_forward = expert_down_forward<T>,
    b.expert_down_backward = expert_down_backward<T>;
    b.classifier = classifier<T>;
    b.reduce_loss = reduce_loss;
    b.grad_norm = grad_norm, b.clip_norm = clip_norm;
    b.update = update, b.update_bias = update_bias;
    return b;
}

extern "C" const Backend *backend_cuda(DType type, const char **why) {
    static Backend f32, b16;
    if (!open_device(why)) return NULL;
#ifdef CUDA_CPU_H
#define DEVICE_NAME "emulated"
#else
#define DEVICE_NAME "cuda"
#endif
    if (!f32.name) f32 = table<float>(DEVICE_NAME), b16 = table<bf16>(DEVICE_NAME);
    return type == BF16 ? &b16 : &f32;
}
