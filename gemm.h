/* gemm.h - matrix products and vector helpers for the CPU, with the same bits everywhere.
 *
 * This room knows nothing of the model: it multiplies matrices whose rows may be gathered through
 * an index, and it holds the few vector functions (exp, log, sine, sums) that layers need.
 *
 * The promise: a result depends on its inputs alone. Threads, compiler, optimisation level, vector
 * width and the rows beside an element change no bit of it. Four rules keep that promise:
 *   1. An element of C has one accumulator per block of GEMM_KC values of k. It starts at 0, takes
 *      its products in ascending k by fused multiply-add, and is then added to C, block by block.
 *   2. A sum over a vector has LANES lanes, element i in lane i % LANES, then a fixed tree.
 *   3. Fused multiply-adds are written vfma(). Compile with -ffp-contract=off and no fast-math,
 *      so that the compiler fuses and reorders nothing of its own.
 *   4. exp, log, sin and cos are our own; libm's differ from machine to machine.
 *
 * The parts, in order: vectors; elementary functions; sums; threads; then the product in the way of
 * Goto and van de Geijn ("Anatomy of High-Performance Matrix Multiplication", ACM TOMS 2008): pack
 * a block of B into panels that stay in cache, walk rows of A over them with a register kernel.
 *
 * Start reading at Gemm and gemm_tile; gemm_block is where the time goes. `real` is float, or
 * double in the reference build (-Dreal=double). Everything is static; C11 and C++17, GNU dialect.
 */
#ifndef GEMM_H
#define GEMM_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef real
#define real float
#endif
#define REAL_IS_float  0
#define REAL_IS_double 1
#define REAL_PASTE2(x) REAL_IS_##x
#define REAL_PASTE(x)  REAL_PASTE2(x)
#define REAL_IS_DOUBLE REAL_PASTE(real)

#define GEMM_FN     static __attribute__((unused))
#define UNROLL      _Pragma("GCC unroll 32")
#define GEMM_INLINE static inline __attribute__((always_inline, unused))

// ---------------------------------------------------------------------------------- vectors

// Bytes of a vector. Any value gives the same bits; one wider than the machine's own is for tests.
#ifndef GEMM_VBYTES
#if defined(__AVX512F__)
#define GEMM_VBYTES 64
#elif defined(__AVX2__) && defined(__FMA__)
#define GEMM_VBYTES 32
#else
#define GEMM_VBYTES 16
#endif
#endif
#if GEMM_VBYTES > 16 && defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi" // wide vectors pass between inlined functions only
#endif

#define LANES 16 // lanes of every sum: the widest vector of floats
#define VL    ((int)(GEMM_VBYTES / sizeof(real)))

#if REAL_IS_DOUBLE
typedef int64_t lane_int;
#define X86(name)      name##pd // intrinsics of `real`, and their types
#define X86_TYPE(name) name##d
#define GEMM_FMA       "vfmadd231pd"
#else
typedef int32_t lane_int;
#define X86(name)      name##ps
#define X86_TYPE(name) name
#define GEMM_FMA       "vfmadd231ps"
#endif
typedef real vreal __attribute__((vector_size(GEMM_VBYTES), aligned(sizeof(real)), may_alias));
typedef lane_int vint __attribute__((vector_size(GEMM_VBYTES), aligned(sizeof(real)), may_alias));

// The first min(left, VL) elements at p, zeros after them; nothing beyond them is read.
GEMM_INLINE vreal vload(const real *p, int left) {
    if (left >= VL) return *(const vreal *)p;
    vreal v = {0};
    if (left > 0) memcpy(&v, p, (size_t)left * sizeof(real));
    return v;
}

// Stores the first min(left, VL) lanes of v at p.
GEMM_INLINE void vstore(real *p, vreal v, int left) {
    if (left >= VL) *(vreal *)p = v;
    if (left > 0 && left < VL) memcpy(p, &v, (size_t)left * sizeof(real));
}

// x in every lane. Subtracting +0 keeps every x, -0 too, and compiles to one broadcast.
GEMM_INLINE vreal vset(real x) {
    vreal zero = {0};
    return x - zero;
}

// a * b + c with one rounding, in every lane: the only fused operation of the project.
GEMM_INLINE vreal vfma(vreal a, vreal b, vreal c) {
#if defined(__AVX512F__) && GEMM_VBYTES == 64
    return (vreal)X86(_mm512_fmadd_)((X86_TYPE(__m512))a, (X86_TYPE(__m512))b, (X86_TYPE(__m512))c);
#elif defined(__AVX2__) && defined(__FMA__) && GEMM_VBYTES >= 32
    typedef real half __attribute__((vector_size(32), aligned(sizeof(real)), may_alias));
    const half *pa = (const half *)&a, *pb = (const half *)&b;
    half *pc = (half *)&c;
    for (int h = 0; h < GEMM_VBYTES / 32; h++) { // once, or two halves
        X86_TYPE(__m256) x = (X86_TYPE(__m256))pa[h], y = (X86_TYPE(__m256))pb[h];
        pc[h] = (half)X86(_mm256_fmadd_)(x, y, (X86_TYPE(__m256))pc[h]);
    }
    return c;
#elif defined(__aarch64__) && GEMM_VBYTES == 16 && REAL_IS_DOUBLE
    return (vreal)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#elif defined(__aarch64__) && GEMM_VBYTES == 16
    return (vreal)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < VL; i++)
        c[i] = REAL_IS_DOUBLE ? (real)fma(a[i], b[i], c[i])
                              : (real)fmaf((float)a[i], (float)b[i], (float)c[i]);
    return c;
#endif
}

// c + a * b, as vfma, for a sum that stays in a register: left the choice, gcc takes a form of the
// instruction that puts the result elsewhere and spends another one to move it back.
GEMM_INLINE vreal vfma_sum(vreal c, vreal a, vreal b) {
#if defined(__AVX512F__) && GEMM_VBYTES == 64
    __asm__(GEMM_FMA " %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
#elif defined(__AVX2__) && defined(__FMA__) && GEMM_VBYTES == 32
    __asm__(GEMM_FMA " %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
    return c;
#else
    return vfma(a, b, c);
#endif
}

// yes where the mask is all ones, no where it is zero.
GEMM_INLINE vreal vselect(vint mask, vreal yes, vreal no) {
    return (vreal)((mask & (vint)yes) | (~mask & (vint)no));
}

// ---------------------------------------------------------------------- elementary functions
// Doubles use + - * / and bit patterns only. Adding and subtracting 1.5 * 2^52 rounds a double to
// the nearest integer, which is then found in the low bits of the sum: no conversion that an Inf or
// NaN would make undefined. The series are Taylor's, cut where the next term is under 1e-17.

#define ROUND_D 6755399441055744.0 // 1.5 * 2^52
#define ROUND_F 12582912.0f        // 1.5 * 2^23
#define LN2_HI  0x1.62e42fefap-1   // 38 bits of ln 2: times an exponent it is exact
#define LN2_LO  0x1.cf79abc9e3b3ap-40

GEMM_INLINE uint64_t bits_of(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

GEMM_INLINE double from_bits(uint64_t u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

// ((c[0] x + c[1]) x + ...) + c[n - 1].
GEMM_INLINE double horner(const double *c, int n, double x) {
    double p = c[0];
    UNROLL for (int i = 1; i < n; i++) p = p * x + c[i];
    return p;
}

// e^x to about 1 ulp. -Inf gives 0, above 709.78 gives Inf, NaN stays NaN; subnormals are kept.
GEMM_FN double exp_d(double x) {
    if (x > 710) x = 710;
    if (x < -746) x = -746;
    double t = x * 1.4426950408889634 + ROUND_D, n = t - ROUND_D;
    static const double c[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800,
        1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5};
    double r = (x - n * LN2_HI) - n * LN2_LO, p = horner(c, 12, r);
    p = 1 + (r + r * r * p);
    uint64_t e = bits_of(t) - bits_of(ROUND_D) + 2048, half = e / 2; // n + 2048; 2^n in two factors
    return p * from_bits((half - 1) << 52) * from_bits((e - half - 1) << 52);
}

// Natural logarithm to about 1 ulp. log 0 = -Inf, of a negative number NaN, of Inf Inf.
// x = 2^k (1 + f) with 1 + f in [sqrt 1/2, sqrt 2); s = f / (2 + f), log(1 + f) = 2 atanh s, and
// 2 s = f - s f leaves the large part exact.
GEMM_FN double log_d(double x) {
    if (!(x > 0)) return x == 0 ? -(double)INFINITY : (double)NAN;
    if (x > 0x1.fffffffffffffp1023) return x;
    int k = 0;
    if (x < 0x1p-1022) x *= 0x1p54, k = -54;
    uint64_t u = bits_of(x) - bits_of(0.70710678118654752); // its exponent field is k
    k += (int)((int64_t)u >> 52);
    double f = from_bits((u & 0xfffffffffffffu) + bits_of(0.70710678118654752)) - 1;
    static const double c[] = {1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11,
        1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3};
    double s = f / (2 + f), z = s * s, p = horner(c, 11, z);
    return k * LN2_HI + (f - (s * (f - 2 * z * p) - k * LN2_LO));
}

// sin(x + quarter * pi/2) to about 1e-15 absolute for |x| <= 1e6. Cody and Waite's reduction: pi/2
// in three parts, the first two of 33 bits, so that their multiples up to 2^20 are exact.
GEMM_FN double sin_quarter(double x, uint64_t quarter) {
    double t = x * 0.6366197723675814 + ROUND_D, n = t - ROUND_D;
    double r = ((x - n * 0x1.921fb544p+0) - n * 0x1.0b4611a6p-34) - n * 0x1.3198a2e037073p-69;
    static const double cosine[] = {1.0 / 20922789888000, -1.0 / 87178291200, 1.0 / 479001600,
        -1.0 / 3628800, 1.0 / 40320, -1.0 / 720, 1.0 / 24, -0.5};
    static const double sine[] = {1.0 / 355687428096000, -1.0 / 1307674368000, 1.0 / 6227020800,
        -1.0 / 39916800, 1.0 / 362880, -1.0 / 5040, 1.0 / 120, -1.0 / 6};
    double z = r * r;
    quarter += bits_of(t);
    double y = quarter & 1 ? 1 + z * horner(cosine, 8, z) : r + r * z * horner(sine, 8, z);
    return quarter & 2 ? -y : y;
}

// Sine and cosine of x radians; see sin_quarter for the range. Inf and NaN give NaN.
GEMM_FN double sin_d(double x) { return sin_quarter(x, 0); }
GEMM_FN double cos_d(double x) { return sin_quarter(x, 1); }

// e^x in every lane, to 2 ulp. NaN stays NaN. In float, 0 below -87.33654 (no subnormals: they are
// slow, and a softmax is full of them) and Inf above 88.72.
GEMM_INLINE vreal vexp(vreal x) {
#if REAL_IS_DOUBLE
    for (int i = 0; i < VL; i++) x[i] = exp_d(x[i]);
    return x;
#else
    vreal lo = vset(-87.33654f), hi = vset(89);
    vreal y = vselect(x < lo, lo, vselect(x > hi, hi, x)); // comparisons let a NaN through
    vreal t = vfma(y, vset(1.44269504f), vset(ROUND_F)), n = t - ROUND_F;
    vreal r = vfma(n, vset(-0.693115234375f), y); // ln 2 in two parts, the first of 14 bits
    r = vfma(n, vset(-3.19461849e-5f), r);
    static const float c[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
    vreal p = vset(1.0f / 5040);
    UNROLL for (int i = 0; i < 7; i++) p = vfma(p, r, vset(c[i]));
    vint e = (((vint)t & 511) ^ 256) - 256; // n, from the low bits of t
    vint half = (e + 254) >> 1;             // 2^n in two factors, as n = 128 has none in one
    p = p * (vreal)(half << 23) * (vreal)((e + 254 - half) << 23);
    return vselect(x < lo, vset(0), p);
#endif
}

// e^x with the bits of a lane of vexp.
GEMM_FN real exp_real(real x) { return vexp(vset(x))[0]; }

// Natural logarithm, rounded from log_d.
GEMM_FN real log_real(real x) { return (real)log_d((double)x); }

// ---------------------------------------------------------------------------- sums in lanes

typedef real quad __attribute__((vector_size(4 * sizeof(real)), aligned(sizeof(real)), may_alias));
typedef lane_int quad_int
    __attribute__((vector_size(4 * sizeof(real)), aligned(sizeof(real)), may_alias));
#define LANE_VECTORS (LANES / VL)

// The lanes' sum: lane i takes lane i + 8, then i + 4, i + 2, i + 1.
GEMM_INLINE real lanes_sum(const vreal *acc) {
    const quad *q = (const quad *)acc;
    const quad s = (q[0] + q[2]) + (q[1] + q[3]);
    return (s[0] + s[2]) + (s[1] + s[3]);
}

// sum over i < n of a[i] * b[i]: each lane one chain of fused multiply-adds.
GEMM_FN real dot(const real *a, const real *b, int n) {
    vreal acc[LANE_VECTORS] = {0};
    for (; n >= LANES; n -= LANES, a += LANES, b += LANES)
        UNROLL for (int v = 0; v < LANE_VECTORS; v++) acc[v] =
            vfma(vload(a + v * VL, VL), vload(b + v * VL, VL), acc[v]);
    for (int v = 0; n > 0 && v < LANE_VECTORS; v++)
        acc[v] = vfma(vload(a + v * VL, n - v * VL), vload(b + v * VL, n - v * VL), acc[v]);
    return lanes_sum(acc);
}

// sum over i < n of x[i].
GEMM_FN real sum(const real *x, int n) {
    vreal acc[LANE_VECTORS] = {0};
    for (; n >= LANES; n -= LANES, x += LANES)
        UNROLL for (int v = 0; v < LANE_VECTORS; v++) acc[v] += vload(x + v * VL, VL);
    for (int v = 0; n > 0 && v < LANE_VECTORS; v++) acc[v] += vload(x + v * VL, n - v * VL);
    return lanes_sum(acc);
}

// The larger of two, NaN if one of them is, in every lane.
GEMM_INLINE vreal vmax(vreal a, vreal b) { return vselect((b > a) | (b != b), b, a); }
GEMM_INLINE quad quad_max(quad a, quad b) {
    const quad_int take = (b > a) | (b != b);
    return (quad)((take & (quad_int)b) | (~take & (quad_int)a));
}

// The largest lane, NaN if one of them is.
GEMM_INLINE real largest_lane(vreal x) {
    if (VL < 4) return x[1] > x[0] || x[1] != x[1] ? x[1] : x[0];
    quad m = *(const quad *)&x;
    for (int i = 4; i < VL; i += 4) m = quad_max(m, *(const quad *)((const real *)&x + i));
    m = quad_max(m, __builtin_shufflevector(m, m, 2, 3, 0, 1));
    return quad_max(m, __builtin_shufflevector(m, m, 1, 0, 3, 2))[0];
}

// The largest of x[0..n), NaN if any of them is NaN, -Inf if n is 0.
GEMM_FN real max_of(const real *x, int n) {
    vreal best = vset(-(real)INFINITY);
    for (; n >= VL; n -= VL, x += VL) best = vmax(best, vload(x, VL));
    for (; n > 0; n--, x++) best = vmax(best, vset(*x));
    return largest_lane(best);
}

// ---------------------------------------------------------------------------------- threads

// Threads that a parallel region will have, and this thread's number in its region, from 0.
#ifdef _OPENMP
#include <omp.h>
#define OMP(directive) _Pragma(#directive)
GEMM_FN int thread_max(void) { return omp_get_max_threads(); }
GEMM_FN int thread_id(void) { return omp_get_thread_num(); }
#else
#define OMP(directive)
GEMM_FN int thread_max(void) { return 1; }
GEMM_FN int thread_id(void) { return 0; }
#endif

// --------------------------------------------------------------------------- matrix products

// One side of a product. Row x of the stored matrix is p + row(x) * ld, row(x) = idx ? idx[x] : x.
typedef struct {
    const real *p;
    size_t ld;      // reals from one stored row to the next
    const int *idx; // row gather, or NULL
    int trans;      // A: stored (k, m) rather than (m, k). B: stored (n, k), not (k, n), no idx; or
                    // GEMM_PACKED: as gemm_pack leaves it, ld = gemm_columns(n), no idx
} Operand;
enum { GEMM_PACKED = 2 };

// C(i, j) = sum over k of A(i, k) B(k, j), or C += that sum: C is (m, n), at c[i * ldc + j].
// A(i, k) = a.p[row(i) * ld + k], transposed a.p[row(k) * ld + i];
// B(k, j) = b.p[row(k) * ld + j], transposed b.p[j * ld + k]. Sizes may be 0.
typedef struct {
    Operand a, b;
    real *c;
    size_t ldc;
    int m, n, k;
    int accumulate; // C += rather than C =
} Gemm;

// The kernel's tile of C: GEMM_MR rows of GEMM_NV vectors, accumulated in registers. 6 x 2 fill 15
// of 16 registers (with two vectors of B and one of A); 6 x 4 fill 29 of 32 (AVX-512, NEON).
#define GEMM_MR 6
#if GEMM_VBYTES == 32
#define GEMM_NV 2
#else
#define GEMM_NV 4
#endif
#define GEMM_NR         (GEMM_NV * VL)
#define GEMM_KC         256            // values of k in a block: part of the promise, never tuned
#define GEMM_NC         384            // columns packed at a time, at most: 384 KiB of floats in L2
#define GEMM_MA         (16 * GEMM_MR) // rows of A at a time: packed, 96 KiB of floats in L2
#define GEMM_DIRECT     128            // columns that do not pay a copy of A
#define GEMM_STORED     96             // rows of A that do not pay a copy of B
#define GEMM_LINE       ((int)(64 / sizeof(real))) // reals in a cache line
#define GEMM_SPLIT_COLS 256            // a product is cut down to tiles of this many columns
#define GEMM_SPLIT_ROWS 288            // and rows, below which packing outweighs the balance;
#define GEMM_LEAST_ROWS 48             // down to so many rows only if threads would have no tile
#define GEMM_TILES      4              // tiles for each thread, so that the last ones end together
#define GEMM_ALONE      (64 * 64 * 64) // multiply-adds under which no second thread is woken

// Scratch of one thread, in bytes: a packed block of B, then of A. Align it to 64 bytes.
GEMM_FN size_t gemm_serial_bytes(void) {
    return (size_t)GEMM_KC * (GEMM_NC + GEMM_MA) * sizeof(real);
}

// Scratch of gemm_grouped on up to `threads` threads, in bytes. Align it to 64 bytes.
GEMM_FN size_t gemm_scratch_bytes(int threads) { return (size_t)threads * gemm_serial_bytes(); }

GEMM_INLINE int gemm_min(int a, int b) { return a < b ? a : b; }
GEMM_INLINE size_t gemm_row(const Operand *o, int x) { return (size_t)(o->idx ? o->idx[x] : x); }

// Packs rows k0.. and columns j0.. of B, (k, cols), as panels (cols / NR, k, NR), zero at the edge.
static void gemm_pack_b(real *out, const Operand *b, int k0, int k, int j0, int cols) {
    for (int j = 0; j < cols; j += GEMM_NR, out += (size_t)k * GEMM_NR) {
        int width = gemm_min(cols - j, GEMM_NR);
        for (int x = 0; x < k && !b->trans; x++) {
            const real *src = b->p + gemm_row(b, k0 + x) * b->ld + (size_t)(j0 + j);
            __builtin_prefetch(src + GEMM_NR); // what the next panel takes of this row
            for (int v = 0; v < GEMM_NV; v++)
                vstore(out + x * GEMM_NR + v * VL, vload(src + v * VL, width - v * VL), VL);
        }
        for (int y = 0; y < GEMM_NR && b->trans; y += 4) { // four stored rows: columns of a panel
            const real *src = b->p + (size_t)(j0 + j + y) * b->ld + (size_t)k0;
            int x = 0;
            for (; y + 4 <= width && x + 4 <= k; x += 4) { // four by four, in registers
                quad r[4];
                for (size_t l = 0; l < 4; l++) r[l] = *(const quad *)(src + l * b->ld + x);
                for (size_t l = 4; l < 8 && x % GEMM_LINE == 0; l++) // the next four rows
                    __builtin_prefetch(src + l * b->ld + x);
                quad lo01 = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
                quad hi01 = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
                quad lo23 = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
                quad hi23 = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
                real *d = out + x * GEMM_NR + y;
                *(quad *)d = __builtin_shufflevector(lo01, lo23, 0, 1, 4, 5);
                *(quad *)(d + GEMM_NR) = __builtin_shufflevector(lo01, lo23, 2, 3, 6, 7);
                *(quad *)(d + 2 * GEMM_NR) = __builtin_shufflevector(hi01, hi23, 0, 1, 4, 5);
                *(quad *)(d + 3 * GEMM_NR) = __builtin_shufflevector(hi01, hi23, 2, 3, 6, 7);
            }
            for (; x < k; x++)
                for (int l = 0; l < 4; l++)
                    out[x * GEMM_NR + y + l] = y + l < width ? src[(size_t)l * b->ld + x] : 0;
        }
    }
}

// Packs k values of rows i0.. of a transposed A as strips (rows / MR, k, MR), zeros at the edge.
static void gemm_pack_a(real *out, const Operand *a, int k0, int k, int i0, int rows) {
    for (int x = 0; x < k; x++) {
        const real *src = a->p + gemm_row(a, k0 + x) * a->ld + (size_t)i0;
        if (x + 8 < k) // rows far apart, which the hardware does not foresee
            for (int i = 0; i < rows; i += GEMM_LINE)
                __builtin_prefetch(a->p + gemm_row(a, k0 + x + 8) * a->ld + (size_t)(i0 + i));
        for (int i = 0; i < rows; i += GEMM_MR) {
            real *dst = out + (size_t)i * (size_t)k + (size_t)x * GEMM_MR;
            if (rows - i >= GEMM_MR) memcpy(dst, src + i, GEMM_MR * sizeof(real));
            for (int l = 0; l < GEMM_MR && rows - i < GEMM_MR; l++)
                dst[l] = i + l < rows ? src[i + l] : 0;
        }
    }
}

// A whole B as panels, for products that share it: columns of them, reals of it.
GEMM_FN size_t gemm_columns(int n) { return (size_t)((n + GEMM_NR - 1) / GEMM_NR * GEMM_NR); }
GEMM_FN size_t gemm_packed(int k, int n) { return (size_t)k * gemm_columns(n); }

// Packs B (k, n) into out, gemm_packed(k, n) reals: block by block of k, each as gemm_pack_b does.
GEMM_FN void gemm_pack(real *out, const Operand *b, int k, int n) {
    for (int k0 = 0; k0 < k; k0 += GEMM_KC)
        gemm_pack_b(out + (size_t)k0 * gemm_columns(n), b, k0, gemm_min(k - k0, GEMM_KC), 0, n);
}

// acc += the outer product of the values a[i][x], i < MR, and a row of b, (NR).
GEMM_INLINE void gemm_step(vreal *acc, const real *const *a, size_t x, const real *b) {
    vreal bv[GEMM_NV];
    UNROLL for (int v = 0; v < GEMM_NV; v++) bv[v] = vload(b + v * VL, VL);
    UNROLL for (int i = 0; i < GEMM_MR; i++) {
        const vreal av = vset(a[i][x]);
        UNROLL for (int v = 0; v < GEMM_NV; v++) acc[i * GEMM_NV + v] =
            vfma_sum(acc[i * GEMM_NV + v], av, bv[v]);
    }
}

// C (MR, NR) = or += A (MR, k) times a panel b (k, NR), one block of k. Row i of A begins at a[i], its
// values are `step` reals apart; rows of b are ldb reals apart. `first`: C is written without being read.
GEMM_INLINE void gemm_block(const real *const *a, size_t step, const real *b, size_t ldb, int k,
    real *c, size_t ldc, int first) {
    const real *const rows[GEMM_MR] = {a[0], a[1], a[2], a[3], a[4], a[5]};
    vreal acc[GEMM_MR * GEMM_NV], zero = {0};
    for (int i = 0; i < GEMM_MR; i++) __builtin_prefetch(c + (size_t)i * ldc + GEMM_NR - 1);
    UNROLL for (int t = 0; t < GEMM_MR * GEMM_NV; t++) acc[t] = zero;
    size_t x = 0;
    for (; k >= 4; k -= 4, x += 4 * step, b += 4 * ldb)
        UNROLL for (size_t s = 0; s < 4; s++) gemm_step(acc, rows, x + s * step, b + s * ldb);
    for (; k > 0; k--, x += step, b += ldb) gemm_step(acc, rows, x, b);
    UNROLL for (int t = 0; t < GEMM_MR * GEMM_NV; t++) {
        real *out = c + (size_t)(t / GEMM_NV) * ldc + t % GEMM_NV * VL;
        if (!first) acc[t] = vload(out, VL) + acc[t];
        vstore(out, acc[t], VL);
    }
}

// The kernel: a block of rows that lie anywhere, by a packed panel or by B as it is stored; of a packed
// strip (k, MR), or of a transposed A as it is stored. Functions of their own, so that `step` is a constant where it can be: then a step of
// k takes 21 instructions, 12 of them products (AVX2). A core of one's own issues twice as many as it
// multiplies and would not notice more; one that two hardware threads share does.
static __attribute__((noinline)) void gemm_rows(
    const real *const *a, const real *b, int k, real *c, size_t ldc, int first) {
    gemm_block(a, 1, b, GEMM_NR, k, c, ldc, first);
}
static __attribute__((noinline)) void gemm_rows_stored(
    const real *const *a, const real *b, size_t ldb, int k, real *c, size_t ldc, int first) {
    gemm_block(a, 1, b, ldb, k, c, ldc, first);
}
static __attribute__((noinline)) void gemm_strip(
    const real *a, const real *b, int k, real *c, size_t ldc, int first) {
    const real *const rows[GEMM_MR] = {a, a + 1, a + 2, a + 3, a + 4, a + 5};
    gemm_block(rows, GEMM_MR, b, GEMM_NR, k, c, ldc, first);
}
static __attribute__((noinline)) void gemm_stored(
    const real *a, size_t step, const real *b, int k, real *c, size_t ldc, int first) {
    const real *const rows[GEMM_MR] = {a, a + 1, a + 2, a + 3, a + 4, a + 5};
    gemm_block(rows, step, b, GEMM_NR, k, c, ldc, first);
}

// A strip of A: its rows; or its first value, where a transposed A's values are `step` reals apart.
typedef struct {
    const real *const *rows;
    const real *p;
    size_t step;
} Strip;

// b: a packed panel, or, of rows alone, one that lies in a matrix of ldb reals a row.
GEMM_INLINE void gemm_kernel(
    Strip a, const real *b, size_t ldb, int k, real *c, size_t ldc, int first) {
    if (ldb != GEMM_NR)
        gemm_rows_stored(a.rows, b, ldb, k, c, ldc, first);
    else if (a.rows)
        gemm_rows(a.rows, b, k, c, ldc, first);
    else if (a.step == GEMM_MR)
        gemm_strip(a.p, b, k, c, ldc, first);
    else
        gemm_stored(a.p, a.step, b, k, c, ldc, first);
}

// The kernel for a tile of C at the edge, (rows, cols) of it inside: by way of a whole tile.
static void gemm_edge(
    Strip a, const real *b, size_t ldb, int k, real *c, size_t ldc, int rows, int cols, int first) {
    real tile[GEMM_MR * GEMM_NR];
    gemm_kernel(a, b, ldb, k, tile, GEMM_NR, 1);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) {
            real *out = c + (size_t)i * ldc + j, value = tile[i * GEMM_NR + j];
            *out = first ? value : *out + value;
        }
}

// Rows i0..i1 and columns j0..j1 (at most GEMM_NC) of one product, by this thread.
static void gemm_tile(const Gemm *g, int i0, int i1, int j0, int j1, real *scratch) {
    real *bp = scratch, *ap = scratch + (size_t)GEMM_KC * GEMM_NC;
    // columns of B that are read where they lie
    int stored = (j1 - j0) / GEMM_NR * GEMM_NR;
    if (g->b.trans || g->b.idx || g->a.trans || i1 - i0 > GEMM_STORED) stored = 0;
    if (g->k <= 0 && !g->accumulate)
        for (int i = i0; i < i1; i++)
            memset(g->c + (size_t)i * g->ldc + (size_t)j0, 0, (size_t)(j1 - j0) * sizeof(real));
    for (int k0 = 0; k0 < g->k; k0 += GEMM_KC) {
        int k = gemm_min(g->k - k0, GEMM_KC), first = k0 == 0 && !g->accumulate;
        const real *panels = bp;
        if (g->b.trans == GEMM_PACKED)
            panels = g->b.p + (size_t)k0 * g->b.ld + (size_t)j0 * (size_t)k;
        else
            gemm_pack_b(bp, &g->b, k0, k, j0 + stored, j1 - j0 - stored);
        for (int m0 = i0; m0 < i1; m0 += GEMM_MA) {
            // rows are read where they lie, past the edge the last one again; a transposed A is packed
            // in strips, or its whole ones are read where they lie if few columns would share them
            const real *rows[GEMM_MA];
            int m = gemm_min(GEMM_MA, i1 - m0), whole = 0;
            int strips = (m + GEMM_MR - 1) / GEMM_MR, across = (j1 - j0 + GEMM_NR - 1) / GEMM_NR;
            for (int i = 0; i < strips * GEMM_MR && !g->a.trans; i++)
                rows[i] = g->a.p + gemm_row(&g->a, m0 + gemm_min(i, m - 1)) * g->a.ld + (size_t)k0;
            if (g->a.trans && !g->a.idx && j1 - j0 <= GEMM_DIRECT) whole = m / GEMM_MR * GEMM_MR;
            if (g->a.trans && m > whole) gemm_pack_a(ap, &g->a, k0, k, m0 + whole, m - whole);
            // a panel of B stays in L1 for all of A's block, or where k is short a strip of A for all
            // of B's panels: then C is walked along its rows
            int by_panel = k > GEMM_KC / 2;
            int outer = by_panel ? across : strips, inner = by_panel ? strips : across;
            for (int o = 0; o < outer; o++)
                for (int x = 0; x < inner; x++) {
                    int i = (by_panel ? x : o) * GEMM_MR, j = (by_panel ? o : x) * GEMM_NR;
                    Strip a = {g->a.trans ? NULL : rows + i, NULL, GEMM_MR};
                    if (i < whole) {
                        a.p = g->a.p + (size_t)k0 * g->a.ld + (size_t)(m0 + i);
                        a.step = g->a.ld;
                    } else if (g->a.trans)
                        a.p = ap + (size_t)(i - whole) * (size_t)k;
                    const real *b = j < stored ? g->b.p + (size_t)k0 * g->b.ld + (size_t)(j0 + j)
                                               : panels + (size_t)(j - stored) * (size_t)k;
                    size_t ldb = j < stored ? g->b.ld : GEMM_NR;
                    real *c = g->c + (size_t)(m0 + i) * g->ldc + (size_t)(j0 + j);
                    int rows_in = gemm_min(m - i, GEMM_MR),
                        cols_in = gemm_min(j1 - j0 - j, GEMM_NR);
                    if (rows_in == GEMM_MR && cols_in == GEMM_NR)
                        gemm_kernel(a, b, ldb, k, c, g->ldc, first);
                    else
                        gemm_edge(a, b, ldb, k, c, g->ldc, rows_in, cols_in, first);
                }
        }
    }
}

// Multiply-adds of a product.
static double gemm_work(const Gemm *g) { return (double)g->m * g->n * g->k; }

// How a product is cut: its tiles are `rows` by `cols`, `down` of them by `across`.
typedef struct {
    int rows, cols, down, across;
} Tiling;

// A part of `size` cut into so many parts, rounded up to a multiple of unit.
static int gemm_cut(int size, int parts, int unit) {
    return (size + parts * unit - 1) / (parts * unit) * unit;
}

// Cuts g into about `share` tiles: along n first, which packs nothing twice, then along m; a share
// that occupies every thread becomes a multiple of them.
static Tiling gemm_tiling(const Gemm *g, int share, int threads) {
    Tiling t = {0, 0, 0, 0};
    if (g->m <= 0 || g->n <= 0) return t;
    int most = g->n / GEMM_SPLIT_COLS, least = (g->n + GEMM_NC - 1) / GEMM_NC;
    int across = gemm_min(share, most);
    t.cols = gemm_cut(g->n, across > least ? across : least, GEMM_NR);
    t.across = (g->n + t.cols - 1) / t.cols;
    most = gemm_min((threads + t.across - 1) / t.across, g->m / GEMM_LEAST_ROWS);
    if (most < g->m / GEMM_SPLIT_ROWS) most = g->m / GEMM_SPLIT_ROWS;
    int down = gemm_min((share + t.across - 1) / t.across, most);
    while (share >= threads && down < most && down * t.across % threads != 0) down++;
    t.rows = gemm_cut(g->m, down > 1 ? down : 1, GEMM_MR);
    t.down = (g->m + t.rows - 1) / t.rows;
    return t;
}

// One product by the calling thread alone; scratch: gemm_serial_bytes(), this thread's own.
GEMM_FN void gemm_serial(const Gemm *g, void *scratch) {
    Tiling t = gemm_tiling(g, 1, 1);
    for (int j = 0; j < t.across; j++)
        gemm_tile(g, 0, g->m, j * t.cols, gemm_min((j + 1) * t.cols, g->n), (real *)scratch);
}

// All products of list[0..count), by all threads: their tiles are dealt to whoever is free. The
// outputs must not overlap. Called from serial code; scratch: gemm_scratch_bytes(thread_max()).
GEMM_FN void gemm_grouped(const Gemm *list, int count, void *scratch) {
    double work = 0;
    for (int i = 0; i < count; i++) work += gemm_work(&list[i]);
    int threads = work < GEMM_ALONE ? 1 : thread_max(), next = 0;
    double wanted = threads > 1 ? GEMM_TILES * threads / work : 0; // tiles for each multiply-add
    OMP(omp parallel num_threads(threads) if (threads > 1)) {
        real *mine = (real *)((char *)scratch + (size_t)thread_id() * gemm_serial_bytes());
        int i = -1, before = 0, here = 0; // tiles before list[i] and of it; next only grows
        Tiling t = {0, 0, 0, 0};
        for (;;) {
            int tile;
            OMP(omp atomic capture)
            tile = next++;
            while (tile >= before + here && ++i < count) {
                before += here;
                t = gemm_tiling(&list[i], (int)(wanted * gemm_work(&list[i]) + 0.99), threads);
                here = t.down * t.across;
            }
            if (i >= count) break;
            const Gemm *g = &list[i];
            int i0 = (tile - before) % t.down * t.rows, j0 = (tile - before) / t.down * t.cols;
            gemm_tile(g, i0, gemm_min(i0 + t.rows, g->m), j0, gemm_min(j0 + t.cols, g->n), mine);
        }
    }
}

// Peak speed of this machine in GFLOP/s of `real`, measured: every thread runs independent chains
// of vfma in registers, as many as the kernel has, for `seconds`.
GEMM_FN double fma_peak(int threads, double seconds) {
    double total = 0;
    (void)threads;
    OMP(omp parallel num_threads(threads) reduction(+ : total)) {
        volatile real source = (real)0.5, sink; // values that the compiler cannot foresee
        vreal scale = vset(source), x[GEMM_MR * GEMM_NV];
        for (int i = 0; i < GEMM_MR * GEMM_NV; i++) x[i] = vset(source + (real)i);
        struct timespec from, now;
        double flop = 0, elapsed = 0;
        timespec_get(&from, TIME_UTC);
        while (elapsed < seconds) {
            for (int k = 0; k < 100000; k++)
                UNROLL for (int i = 0; i < GEMM_MR * GEMM_NV; i++) x[i] = vfma(x[i], scale, scale);
            flop += 2.0 * 100000 * GEMM_MR * GEMM_NR;
            timespec_get(&now, TIME_UTC);
            elapsed =
                (double)(now.tv_sec - from.tv_sec) + 1e-9 * (double)(now.tv_nsec - from.tv_nsec);
        }
        for (int i = 0; i < GEMM_MR * GEMM_NV; i++)
            for (int l = 0; l < VL; l++) sink = x[i][l];
        (void)sink;
        total += 1e-9 * flop / elapsed;
    }
    return total;
}

#endif
