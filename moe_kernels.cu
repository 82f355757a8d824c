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
#ifdef USE_CUBLAS
#include <cublas_v2.h>
#endif
#endif
#include "moe.h"

#include <math.h>
#include <time.h>
#include <type_traits>

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

/* acc += A B^T over `depth`, a multiple of 16. A lies in shared memory as (16 MF, depth) in rows of lda,
   or as (depth, 16 MF) where A_T; B as (8 NF, depth) in rows of ldb, or (depth, 8 NF) where B_T; NF is
   even, rows start on 16 bytes. Lane l of the warp holds in acc[i][j][r] row 16 i + l / 4 + 8 (r / 2)
   and column 8 j + 2 (l % 4) + r % 2. Each element is added along k, 16 at a time from 0. */
template <int MF, int NF, bool A_T, bool B_T>
__device__ inline void warp_product(
    float (&acc)[MF][NF][4], const bf16 *a, int lda, const bf16 *b, int ldb, int depth) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int low = lane & 7, mid = (lane >> 3 & 1) * 8, high = (lane >> 4) * 8;
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

// 16 bytes of T are PER of them. VEC: pointers and row lengths are multiples of 16 bytes. `have`:
// how many of the PER lie within the matrix.
template <class T> struct Vec {
    enum { PER = 16 / sizeof(T) };
};
template <class T, bool VEC> __device__ inline void read_vec(float *v, const T *p, int have) {
    enum { PER = Vec<T>::PER };
    if (VEC && have >= PER) {
        union {
            uint4 whole;
            T part[PER];
        } u;
        u.whole = load16(p);
#pragma unroll
        for (int i = 0; i < PER; i++) v[i] = to_float(u.part[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < PER; i++) v[i] = i < have ? to_float(p[i]) : 0;
}
template <class T, bool VEC> __device__ inline void write_vec(T *p, const float *v, int have) {
    enum { PER = Vec<T>::PER };
    if (VEC && have >= PER) {
        union {
            uint4 whole;
            T part[PER];
        } u;
#pragma unroll
        for (int i = 0; i < PER; i++) u.part[i] = from_float<T>(v[i]);
        store16(p, u.whole);
        return;
    }
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
     TN  out[e] += A^T B          A (slots, m), B (slots, n), the sum over the group's slots
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
    DGLU,   // v is da': dH[s], sA[s] and the sum over this tile's columns of da' * a
    GRAD    // form TN: out[e] += v, float
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
    float *partial;      // (S, column tiles), NULL: not asked for
};

/* A tile of the output: BM rows, BN columns, cut among warps of WM x WN. The depth of a step is 64
   bytes, so a row of a tile along k is 4 vectors; padding by one vector keeps ldmatrix free of bank
   conflicts. */
template <int BM_, int BN_, int WM_, int WN_> struct TileShape {
    enum { BM = BM_, BN = BN_, WM = WM_, WN = WN_, THREADS = BM / WM * (BN / WN) * WARP_SIZE };
};
typedef TileShape<128, 128, 64, 32> BigTile;
typedef TileShape<32, 64, 16, 32> SmallTile; // few rows, or sizes that 16 bytes do not divide
enum { STAGES = 3 };                         // tiles of A and B under way at a time

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
template <class T, class S, Form FORM, Epilogue EPI> constexpr int product_shared() {
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
            const int down =
                FORM == TN ? (s1 > s0 ? pieces_of(p.m, S::BM) : 0) : pieces_of(s1 - s0, S::BM);
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
__device__ inline void product_epilogue(const Product<T> &p, Place at, char *shared, int columns) {
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
        for (int r = threadIdx.x; r < S::BM && at.m0 + r < last; r += S::THREADS) {
            float sum = 0;
            for (int i = 0; i < ACROSS; i++) sum += row_sums[r * ACROSS + i];
            p.partial[(size_t)(at.m0 + r) * columns + at.n0 / WIDTH] = sum;
        }
        __syncthreads(); // the next tile goes where these sums lie
    }
}

/* Blocks stay and take one tile after another: how many tiles there are is known on the device
   alone. */
template <class T, class S, Form FORM, Epilogue EPI, bool VEC>
__global__ void __launch_bounds__(S::THREADS) product_kernel(const Product<T> p) {
    extern __shared__ __align__(16) char shared[];
    enum { WIDTH = EPI == GLU ? S::BN / 2 : S::BN };
    const int columns = pieces_of(p.n, WIDTH);
    Walk<T, S, FORM> walk = {0, 0};
    Place at;
    for (int t = blockIdx.x; walk.next(p, columns, t, &at); t += gridDim.x) {
        at.n0 *= WIDTH;
        product_tile<T, S, FORM, EPI, VEC>(p, at, shared);
        product_epilogue<T, S, FORM, EPI, VEC>(p, at, shared, columns);
    }
}

// Column tiles of a GLU or DGLU product of I columns: `partial` is sized by it.
static inline int most_column_tiles(int I) { return pieces_of(I, SmallTile::BN); }

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
template <class T, Form FORM, Epilogue EPI>
static int product(const Product<T> &p) { // returns the column tiles
    const size_t size = sizeof(T), out = EPI == LOGITS || EPI == GRAD ? sizeof(float) : size;
    const int vec = p.lda * size % 16 == 0 && p.ldb * size % 16 == 0 &&
        p.b_stride * size % 16 == 0 && p.ldo * out % 16 == 0 && p.out_stride * out % 16 == 0 &&
        on16(p.a) && on16(p.b) && on16(p.out) &&
        ((EPI != GLU && EPI != DGLU) || (p.n * size % 16 == 0 && on16(p.A) && on16(p.H)));
    const int big = (FORM == TN ? p.m : p.rows / p.groups) > 96 && p.n > (EPI == GLU ? 48 : 96);
    if (vec && big) {
        launch_product<T, BigTile, FORM, EPI, true>(p);
        return pieces_of(p.n, EPI == GLU ? BigTile::BN / 2 : BigTile::BN);
    }
    if (vec)
        launch_product<T, SmallTile, FORM, EPI, true>(p);
    else
        launch_product<T, SmallTile, FORM, EPI, false>(p);
    return pieces_of(p.n, EPI == GLU ? SmallTile::BN / 2 : SmallTile::BN);
}

//SECTION embedding, norms, add

// -------------------------------------------------------------------------------------------------
// linear

#ifdef USE_CUBLAS
/* cuBLAS for the dense products (--dense cublas): a yardstick. Which of its kernels runs depends on the
   shape, so a row's bits depend on the rows beside it. It works by columns: a row-major matrix is
   its transpose there. */
static cublasHandle_t cublas; // NULL: our own product
static cudaDataType_t cublas_type(size_t size) {
    return size == sizeof(float) ? CUDA_R_32F : CUDA_R_16BF;
}
// out (n,m) (+)= b (n,k) a (m,k)^T, as cuBLAS sees it
static void cublas_product(cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
    const void *a, size_t lda, const void *b, size_t ldb, size_t size, void *out, size_t ldo,
    size_t out_size, int accumulate) {
    const float one = 1, beta = accumulate ? 1 : 0;
    if (cublasGemmEx(cublas, op_a, op_b, m, n, k, &one, a, cublas_type(size), (int)lda, b,
            cublas_type(size), (int)ldb, &beta, out, cublas_type(out_size), (int)ldo,
            CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS)
        die(RUN_ERROR, "cuBLAS refuses a product of %d x %d x %d", m, n, k);
}
#endif
// Dense products through cuBLAS from here on. 0, with the reason in *why, where there is none.
extern "C" int cuda_dense_cublas(const char **why) {
#ifdef USE_CUBLAS
    if (!cublas &&
        (cublasCreate(&cublas) != CUBLAS_STATUS_SUCCESS ||
            cublasSetStream(cublas, device.stream) != CUBLAS_STATUS_SUCCESS)) {
        cublas = NULL;
        *why = "cuBLAS does not start";
        return 0;
    }
    return 1;
#else
    *why = "this build has no cuBLAS";
    return 0;
#endif
}

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
__global__ void slot_position_kernel(int *where, const int *slot, const int *offsets, int E) {
    const int S = offsets[E];
    for (int j = blockIdx.x * blockDim.x + threadIdx.x; j < S; j += gridDim.x * blockDim.x)
        where[slot[j]] = j;
}
// The slots of expert e whose source row lies in [r0, r1): contiguous, since they are sorted by row.
__global__ void chunk_bounds_kernel(
    int *begin, int *end, const int *offsets, const int *row, int E, int r0, int r1) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= 2 * E) return;
    const int e = i / 2, limit = i % 2 ? r1 : r0;
    int lo = offsets[e], hi = offsets[e + 1];
    while (lo < hi) {
        const int mid = lo + (hi - lo) / 2;
        if (row[mid] < limit)
            lo = mid + 1;
        else
            hi = mid;
    }
    (i % 2 ? end : begin)[e] = lo;
}
// out[r] (+)= sum over r's slots, in expert order, of weight * Y;  Y (chunk slots, C)
template <class T, bool VEC>
__global__ void combine_kernel(T *out, const T *Y, const float *weight, const int *row_begin,
    const int *slot, int r0, int rows, int C, int accumulate) {
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
__global__ void swiglu_kernel(
    T *A, const T *H, const int *row_begin, const int *slot, int r0, int r1, int I) {
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
__global__ void sum_parts_kernel(
    float *dS, const float *partial, int parts, const int *offsets, int E) {
    const int S = offsets[E];
    for (int s = blockIdx.x * blockDim.x + threadIdx.x; s < S; s += gridDim.x * blockDim.x) {
        float sum = 0;
        for (int i = 0; i < parts; i++) sum += partial[(size_t)s * parts + i];
        dS[s] = sum;
    }
}

template <class T>
static void expert_down_backward(act_t *dH, act_t *sA, stat_t *dS, grad_t *dW2, const act_t *dout,
    const act_t *H, Mat W2, const Plan *plan, void *scratch) {
    const int C = W2.rows, I = W2.cols;
    Product<T> p = by_expert<T>(plan);
    p.a = (const T *)dout, p.lda = C, p.a_row.map = plan->row;
    p.b = (const T *)W2.data, p.ldb = W2.ld, p.b_stride = W2.stride;
    p.n = I, p.k = C;
    p.out = dH, p.ldo = 2 * (size_t)I;
    p.A = (T *)sA, p.H = (const T *)H, p.weight = (const float *)plan->weight;
    p.partial = dS ? (float *)scratch : NULL;
    const int parts = product<T, NN, DGLU>(p);
    if (dS) {
        sum_parts_kernel<<<blocks_for(plan->S_max, THREADS), THREADS, 0, device.stream>>>(
            (float *)dS, p.partial, parts, plan->offsets, plan->E);
        launched("sum_parts");
    }
    Product<T> g = by_expert<T>(plan);
    g.a = (const T *)dout, g.lda = C, g.a_row.map = plan->row, g.m = C;
    g.b = (const T *)sA, g.ldb = I, g.n = I;
    g.out = dW2, g.ldo = W2.ld, g.out_stride = W2.stride, g.accumulate = 1;
    product<T, TN, GRAD>(g);
}

template <class T>
static void expert_up_backward(act_t *dX, grad_t *dW1, const act_t *dH, const act_t *X, Mat W1,
    const Plan *plan, int accumulate, void *scratch) {
    const int C = W1.cols, I2 = W1.rows;
    Product<T> p = {};
    p.a = (const T *)dH, p.lda = I2;
    p.b = (const T *)W1.data, p.ldb = W1.ld, p.b_stride = W1.stride;
    p.groups = 1, p.n = C, p.k = I2;
    product_and_combine<T, NN>(p, plan, (T *)dX, NULL, accumulate, NULL, scratch);
    Product<T> g = by_expert<T>(plan);
    g.a = (const T *)dH, g.lda = I2, g.m = I2;
    g.b = (const T *)X, g.ldb = C, g.b_row.map = plan->row, g.n = C;
    g.out = dW1, g.ldo = W1.ld, g.out_stride = W1.stride, g.accumulate = 1;
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
    const size_t partial = round_up(slots * most_column_tiles((int)I) * sizeof(float), ARENA_ALIGN);
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

//SECTION loss, norm, optimiser

//SECTION memory, table
