/* test_emulated.cu: tests cuda_cpu.h itself: that correct kernels compute what they should, for many
   orders of the threads, and that each fault it promises to find is found.

   A fault ends the process, so each runs in a child, whose stderr and exit status are the result.
   Children are made before this process has threads of its own. Small formats (bf16, fp16, fp8) are
   held against a search for the nearest value. */
#include "test_report.h"

#include <sys/wait.h>

#include <cmath>

typedef __nv_bfloat16 bf16;
enum { ALL = 0xFFFFFFFF };

// -------------------------------------------------------------------------------------------------
// faults: FAULT(name, threads, shared bytes, words expected in the message) { kernel body }

static int *ints;     // device memory of the running case
static float *floats; // likewise, NaN

struct Fault {
    const char *name, *expect;
    void (*run)();
};
static Fault faults[32];
static int n_faults;

static void start(void (*kernel)(int *, float *), int threads, int shared) {
    kernel<<<2, threads, shared, nullptr>>>(ints, floats);
}
#define FAULT(name, threads, shared, expect)                                                      \
    __global__ void name##_kernel(int *i, float *x);                                              \
    static void name##_run() { start(name##_kernel, threads, shared); }                           \
    static const int name##_added = (faults[n_faults] = {#name, expect, name##_run}, n_faults++); \
    __global__ void name##_kernel([[maybe_unused]] int *i, [[maybe_unused]] float *x)

FAULT(barrier_at_two_places, 64, 0, "waits at that of line") {
    if (threadIdx.x < 7)
        __syncthreads();
    else
        __syncthreads();
}
FAULT(barrier_not_reached, 64, 0, "has left the kernel") {
    if (threadIdx.x == 5) return;
    __syncthreads();
}
FAULT(barrier_or_warp, 32, 0, "while thread") {
    if (threadIdx.x < 7)
        __syncthreads();
    else
        __syncwarp();
}
FAULT(shuffle_at_two_places, 32, 0, "is at the warp operation of line") {
    int v = threadIdx.x;
    if (threadIdx.x < 7)
        v = __shfl_xor_sync(ALL, v, 1);
    else
        v = __shfl_xor_sync(ALL, v, 1);
    i[threadIdx.x] = v;
}
FAULT(shuffle_lane_gone, 32, 0, "has left the kernel") {
    if (threadIdx.x == 31) return;
    i[threadIdx.x] = __shfl_xor_sync(ALL, (int)threadIdx.x, 1);
}
FAULT(shuffle_outside_its_mask, 32, 0, "leaves its own lane out") {
    i[threadIdx.x] = __shfl_sync(0xFFFF, (int)threadIdx.x, 0);
}
FAULT(shuffle_masks_differ, 32, 0, "with mask") {
    i[threadIdx.x] = __shfl_sync(threadIdx.x < 16 ? ALL : 0xFFFF0000u, (int)threadIdx.x, 0);
}
FAULT(other_shared_memory_than_said, 32, 512, "launched with 512 bytes of dynamic shared memory") {
    takes_shared<1024>();
}
FAULT(matrix_in_a_part_of_a_warp, 48, 0, "not whole") {
    float d[4] = {};
    const unsigned a[4] = {}, b[2] = {};
    mma_bf16(d, a, b);
    x[threadIdx.x] = d[0];
}
FAULT(load_misaligned, 32, 0, "not a multiple of 16") {
    i[threadIdx.x] = (int)load16(i + threadIdx.x).x;
}
FAULT(store_misaligned, 32, 0, "not a multiple of 16") {
    store16(x + 1 + 4 * threadIdx.x, make_uint4(0, 0, 0, 0));
}
FAULT(copy_misaligned, 32, 1024, "not a multiple of 16") {
    extern __shared__ float tile[];
    cp_async16(tile + threadIdx.x, x, 16);
    cp_async_wait<0>();
}
FAULT(copy_too_long, 32, 1024, "out of 16") {
    extern __shared__ float tile[];
    cp_async16(tile, x, 20);
    cp_async_wait<0>();
}
FAULT(shared_not_asked_for, 32, 50000, "where 49152 are allowed") { i[threadIdx.x] = 0; }
FAULT(too_many_threads, 1056, 0, "cannot launch") { i[threadIdx.x] = 0; }
#ifdef CUDA_CPU_ASAN
FAULT(beyond_dynamic_shared, 32, 64, "heap-buffer-overflow") {
    extern __shared__ float few[];
    few[threadIdx.x] = 0;
}
FAULT(beyond_static_shared, 32, 0, "out of bounds") {
    __shared__ float few[16];
    few[threadIdx.x] = 0;
}
FAULT(beyond_device_memory, 32, 0, "heap-buffer-overflow") { i[4096 + threadIdx.x] = 0; }
#endif

static void test_faults() {
    for (int f = 0; f < n_faults; f++) {
        int fd[2], status = 0;
        char said[8192] = "";
        if (!begin("fault/%s", faults[f].name)) continue;
        fflush(stdout);
        must(pipe(fd) == 0, "a pipe");
        const pid_t child = fork();
        must(child >= 0, "a child");
        if (child == 0) {
            dup2(fd[1], 2);
            faults[f].run();
            _exit(0);
        }
        close(fd[1]);
        for (size_t n = 0; n < sizeof said - 1;) {
            const ssize_t got = read(fd[0], said + n, sizeof said - 1 - n);
            if (got <= 0) break;
            n += (size_t)got;
        }
        close(fd[0]);
        waitpid(child, &status, 0);
        check(WIFEXITED(status) && WEXITSTATUS(status) == 1, "exit status %d, expected 1", status);
        check(
            strstr(said, faults[f].expect) != NULL, "expected '%s' in: %s", faults[f].expect, said);
        check(strstr(said, "block (") || strstr(said, "launch") || strstr(said, "allowed") ||
                strstr(said, "Sanitizer") || strstr(said, "runtime error"),
            "no block named in: %s", said);
        const char *line = strstr(said, "emulated device:");
        check(!line || !strstr(line + 1, "emulated device:"), "expected one message: %s", said);
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// what shows in the results

template <class F> static int seeds_where(F wrong) { // of 20, how many give a wrong result
    int n = 0;
    for (int seed = 1; seed <= 20; seed++) {
        emulated_seed(seed);
        n += wrong();
    }
    emulated_seed(1);
    return n;
}
enum { N = 128 };
static void *pool[64]; // what fresh() gave
static int pooled;
template <class T> static T *fresh(size_t n) {
    void *p = nullptr;
    must(cudaMalloc(&p, n * sizeof(T)) == cudaSuccess, "memory");
    return (T *)(pool[pooled++] = p);
}

// out[i] = in[N - 1 - i], through shared memory
template <bool BARRIER> __global__ void reverse_kernel(float *out, const float *in) {
    __shared__ float tile[N];
    tile[threadIdx.x] = in[threadIdx.x];
    if (BARRIER) __syncthreads();
    out[threadIdx.x] = tile[N - 1 - threadIdx.x];
}
// The same by cp.async; each thread copies what another reads.
template <bool WAIT> __global__ void reverse_async_kernel(float *out, const float *in) {
    extern __shared__ __align__(16) float tiles[];
    if (threadIdx.x < N / 4) cp_async16(tiles + 4 * threadIdx.x, in + 4 * threadIdx.x, 16);
    cp_async_commit();
    if (WAIT) cp_async_wait<0>();
    __syncthreads();
    out[threadIdx.x] = tiles[N - 1 - threadIdx.x];
}
// The source changes between issue and wait: read at either end.
__global__ void early_or_late_kernel(float *out, float *in) {
    __shared__ __align__(16) float tile[4];
    if (threadIdx.x) return;
    for (int i = 0; i < 4; i++) in[i] = 1;
    cp_async16(tile, in, 16);
    cp_async_commit();
    for (int i = 0; i < 4; i++) in[i] = 2;
    cp_async_wait<0>();
    out[0] = tile[0];
}
// Two groups under way: the older has landed after wait<1>, the newer has not.
__global__ void groups_kernel(float *out, const float *in) {
    __shared__ __align__(16) float tile[2][4];
    if (threadIdx.x) return;
    cp_async16(tile[0], in, 16);
    cp_async_commit();
    cp_async16(tile[1], in + 4, 8); // half of it: zeros follow
    cp_async_commit();
    cp_async_wait<1>();
    for (int i = 0; i < 4; i++) out[i] = tile[0][i], out[4 + i] = tile[1][i];
    cp_async_wait<0>();
    for (int i = 0; i < 4; i++) out[8 + i] = tile[1][i];
}
__global__ void unwritten_kernel(float *out) { // leaves a value for the next block to find
    __shared__ float one;
    extern __shared__ float many[];
    if (threadIdx.x) return;
    out[2 * blockIdx.x] = one, out[2 * blockIdx.x + 1] = many[3];
    one = many[3] = 5;
}

static void test_shows() {
    float *in = fresh<float>(N), *out = fresh<float>(N);
    for (int i = 0; i < N; i++) in[i] = (float)i;
    auto reversed = [&] {
        for (int i = 0; i < N; i++)
            if (!(out[i] == (float)(N - 1 - i))) return 1;
        return 0;
    };
    if (begin("shows/missing-barrier")) {
        check(seeds_where([&] {
            reverse_kernel<true><<<1, N, 0, nullptr>>>(out, in);
            return reversed();
        }) == 0,
            "wrong with its barrier");
        const int n = seeds_where([&] {
            reverse_kernel<false><<<1, N, 0, nullptr>>>(out, in);
            return reversed();
        });
        check(n == 20, "only %d of 20 orders show it", n);
        finish();
    }
    if (begin("shows/missing-wait")) {
        check(seeds_where([&] {
            reverse_async_kernel<true><<<1, N, N * sizeof(float), nullptr>>>(out, in);
            return reversed();
        }) == 0,
            "wrong with its wait");
        const int n = seeds_where([&] {
            reverse_async_kernel<false><<<1, N, N * sizeof(float), nullptr>>>(out, in);
            return reversed();
        });
        check(n == 20, "only %d of 20 orders show it", n);
        finish();
    }
    if (begin("shows/source-changed-under-way")) {
        const int late = seeds_where([&] {
            early_or_late_kernel<<<1, 32, 0, nullptr>>>(out, in);
            return out[0] == 2;
        });
        check(late > 2 && late < 18, "%d of 20 read the source late", late);
        finish();
    }
    for (int i = 0; i < N; i++) in[i] = (float)i;
    if (begin("shows/groups")) {
        groups_kernel<<<1, 32, 0, nullptr>>>(out, in);
        for (int i = 0; i < 4; i++) {
            check(out[i] == (float)i, "the first group had not landed");
            check(out[4 + i] != out[4 + i], "the second group had landed before its wait");
            check(out[8 + i] == (i < 2 ? (float)(4 + i) : 0), "short source: element %d is %g", i,
                out[8 + i]);
        }
        finish();
    }
    if (begin("shows/memory-starts-as-NaN")) {
        check(fresh<float>(3)[2] != fresh<float>(3)[2], "device memory");
        unwritten_kernel<<<40, 32, 64, nullptr>>>(out);
        for (int i = 0; i < 80; i++) check(out[i] != out[i], "shared memory: %g", out[i]);
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// what must come out right

__global__ void shuffles_kernel(int *out) {
    const int lane = threadIdx.x % 32, v = 100 * (threadIdx.x / 32) + lane;
    int *mine = out + 8 * threadIdx.x;
    mine[0] = __shfl_sync(ALL, v, 3);
    mine[1] = __shfl_xor_sync(ALL, v, 5);
    mine[2] = __shfl_down_sync(ALL, v, 4);
    mine[3] = __shfl_up_sync(ALL, v, 4);
    mine[4] = (int)__ballot_sync(ALL, lane % 3 == 0);
    mine[5] = __any_sync(ALL, lane == 9) + 2 * __all_sync(ALL, lane < 32) + 4 * __any_sync(ALL, 0) +
        8 * __all_sync(ALL, lane < 31);
    // half warps apart from one another
    const unsigned half = lane < 16 ? 0xFFFFu : 0xFFFF0000u;
    mine[6] = __shfl_sync(half, v, lane < 16 ? 2 : 18);
}
__global__ void atomics_kernel(int *sum, unsigned *bits, int *lowest, int *highest) {
    const int t = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    atomicAdd(sum, t);
    atomicOr(bits, 1u << t % 32);
    atomicMin(lowest, 1000 - t);
    atomicMax(highest, t);
}
__global__ void indices_kernel(int *out) {
    const int t = (int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
    const int b = (int)(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    out[b * 24 + t] = 1000 * b + t;
}
// D (16,8) = A (16,16) B (16,8), through ldmatrix from rows of 24 values; and from the transposes.
__global__ void mma_kernel(float *D, const bf16 *A, const bf16 *B, const bf16 *At, const bf16 *Bt) {
    __shared__ __align__(16) bf16 a[16 * 24];
    __shared__ __align__(16) bf16 b[16 * 24];
    __shared__ __align__(16) bf16 at[16 * 24];
    __shared__ __align__(16) bf16 bt[16 * 24];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4 * 2;
    for (int i = lane; i < 16 * 16; i += 32) {
        a[i / 16 * 24 + i % 16] = A[i];
        at[i / 16 * 24 + i % 16] = At[i];
        bt[i / 16 * 24 + i % 16] = i < 8 * 16 ? Bt[i] : bf16{0}; // (8,16): B by column
        b[i / 16 * 24 + i % 16] = i % 16 < 8 ? B[i / 16 * 8 + i % 16] : bf16{0};
    }
    __syncthreads();
    for (int form = 0; form < 2; form++) {
        float d[4] = {};
        unsigned x[4], y[4];
        const int low = lane & 7, mid = (lane >> 3 & 1) * 8, high = (lane >> 4) * 8;
        if (form == 0) {
            ldmatrix_x4(x, a + (low + mid) * 24 + high);
            ldmatrix_x4(y, bt + (low + high) * 24 + mid);
        } else {
            ldmatrix_x4_trans(x, at + (low + high) * 24 + mid);
            ldmatrix_x4_trans(y, b + (low + mid) * 24 + high);
        }
        mma_bf16(d, x, y);
        for (int r = 0; r < 4; r++) D[form * 128 + (g + r / 2 * 8) * 8 + t + r % 2] = d[r];
    }
}

static void test_right() {
    if (begin("right/shuffles")) {
        int *out = fresh<int>(64 * 8);
        for (int seed = 1; seed < 5; seed++) {
            emulated_seed(seed);
            shuffles_kernel<<<1, 64, 0, nullptr>>>(out);
            for (int t = 0; t < 64; t++) {
                const int lane = t % 32, w = 100 * (t / 32), *mine = out + 8 * t;
                check(mine[0] == w + 3, "shfl");
                check(mine[1] == w + (lane ^ 5), "xor");
                check(mine[2] == w + (lane + 4 < 32 ? lane + 4 : lane), "down");
                check(mine[3] == w + (lane >= 4 ? lane - 4 : lane), "up");
                check(mine[4] == 0x49249249, "ballot %#x", mine[4]);
                check(mine[5] == 3, "any and all: %d", mine[5]);
                check(mine[6] == w + (lane < 16 ? 2 : 18), "half a warp");
            }
        }
        finish();
    }
    if (begin("right/atomics")) {
        int *x = fresh<int>(4);
        x[0] = x[1] = 0, x[2] = 1 << 30, x[3] = -1;
        atomics_kernel<<<40, 64, 0, nullptr>>>(x, (unsigned *)x + 1, x + 2, x + 3);
        check(x[0] == 2560 * 2559 / 2, "sum %d", x[0]);
        check(x[1] == -1, "bits %#x", x[1]);
        check(x[2] == 1000 - 2559 && x[3] == 2559, "lowest %d, highest %d", x[2], x[3]);
        finish();
    }
    if (begin("right/indices")) {
        int *out = fresh<int>(24 * 30);
        indices_kernel<<<dim3(2, 3, 5), dim3(2, 3, 4), 0, nullptr>>>(out);
        for (int i = 0; i < 24 * 30; i++) check(out[i] == 1000 * (i / 24) + i % 24, "at %d", i);
        finish();
    }
    if (begin("right/matrix-instructions")) {
        bf16 *A = fresh<bf16>(256), *B = fresh<bf16>(128), *At = fresh<bf16>(256),
             *Bt = fresh<bf16>(128);
        float *D = fresh<float>(256);
        for (int i = 0; i < 256; i++) A[i] = __float2bfloat16((float)(i * 37 % 101 - 50));
        for (int i = 0; i < 128; i++) B[i] = __float2bfloat16((float)(i * 53 % 97 - 48));
        for (int m = 0; m < 16; m++)
            for (int k = 0; k < 16; k++) At[k * 16 + m] = A[m * 16 + k];
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 8; n++) Bt[n * 16 + k] = B[k * 8 + n];
        mma_kernel<<<1, 32, 0, nullptr>>>(D, A, B, At, Bt);
        for (int m = 0; m < 16; m++)
            for (int n = 0; n < 8; n++) {
                float want = 0; // small integers: exact in any order
                for (int k = 0; k < 16; k++)
                    want += __bfloat162float(A[m * 16 + k]) * __bfloat162float(B[k * 8 + n]);
                for (int form = 0; form < 2; form++)
                    check(D[form * 128 + m * 8 + n] == want, "form %d, (%d,%d): %g, expected %g",
                        form, m, n, D[form * 128 + m * 8 + n], want);
            }
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// small formats

/* The finite values of a format, by code; rounding must find the nearest, the even code of two, and
   beyond the largest what the format has there. */
template <class Round, class Value>
static void check_format(const char *name, int codes, Round round, Value value, unsigned over) {
    if (!begin("format/%s", name)) return;
    unsigned top = 0;
    for (unsigned c = 0; c < (unsigned)codes / 2; c++) { // the positive half ascends
        const float v = value(c);
        if (!std::isfinite(v)) continue;
        check(c == 0 || v > value(c - 1), "code %#x does not ascend", c);
        check(round(v) == c, "%g becomes %#x, not %#x", v, round(v), c);
        check(round(-v) == (c | (unsigned)codes / 2), "-%g becomes %#x", v, round(-v));
        top = c;
    }
    for (unsigned c = 0; c < top; c++) {
        const double lo = value(c), hi = value(c + 1);
        const float mid = (float)((lo + hi) / 2); // exact in float
        check(round(mid) == (c % 2 ? c + 1 : c), "a tie at %g becomes %#x", mid, round(mid));
        check(round(nextafterf(mid, INFINITY)) == c + 1, "above a tie at %g", mid);
        check(round(nextafterf(mid, 0)) == c, "below a tie at %g", mid);
    }
    const float last = value(top), step = last - value(top - 1);
    check(round(last + step / 4) == top, "a little above the largest");
    check(round(last + step) == over, "beyond the largest: %#x", round(last + step));
    check(round(INFINITY) == over, "infinity: %#x", round(INFINITY));
    check(std::isnan(value(round(NAN))), "NaN becomes %g", value(round(NAN)));
    finish();
}

static void test_formats() {
    check_format(
        "bf16", 1 << 16, [](float x) { return (unsigned)__float2bfloat16(x).x; },
        [](unsigned c) { return __bfloat162float(bf16{(uint16_t)c}); }, 0x7F80);
    check_format(
        "fp16", 1 << 16, [](float x) { return (unsigned)__float2half(x).x; },
        [](unsigned c) { return __half2float(__half{(uint16_t)c}); }, 0x7C00);
    check_format(
        "e4m3", 1 << 8, [](float x) { return (unsigned)__nv_fp8_e4m3(x).__x; },
        [](unsigned c) {
            __nv_fp8_e4m3 v;
            v.__x = (uint8_t)c;
            return (float)v;
        },
        0x7E);
    check_format(
        "e5m2", 1 << 8, [](float x) { return (unsigned)__nv_fp8_e5m2(x).__x; },
        [](unsigned c) {
            __nv_fp8_e5m2 v;
            v.__x = (uint8_t)c;
            return (float)v;
        },
        0x7B);
}

int main(int argc, char **argv) {
    if (argc > 1) filter = argv[1];
    ints = fresh<int>(4096), floats = fresh<float>(4096);
    test_faults();
    test_shows();
    test_right();
    test_formats();
    if (!tried) die(USER_ERROR, "test_emulated: no check has '%s' in its name", filter);
    while (pooled) cudaFree(pool[--pooled]);
    return failures != 0;
}
