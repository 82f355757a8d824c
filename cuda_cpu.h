/* cuda_cpu.h: runs moe_kernels.cu on the CPU, so that kernels can be tested, and found wrong, without
   a GPU. Not a fast device: a strict one.

   The Makefile passes a .cu file through data/cuda_cpu.sed, which rewrites what C++ cannot say
   (launches, __shared__), and compiles the result as C++17 with this file included first. What
   is here takes the place of the CUDA headers: qualifiers, vector and 16-bit and 8-bit types,
   indices, barriers, warp operations, integer atomics (there are none on floats), the few runtime calls
   that moe_kernels.cu uses, and a twin for each of its PTX wrappers, by the same name.

   How it runs: the blocks of a launch are dealt to OpenMP threads; the threads of a block are fibers,
   each on a stack of its own, of which one runs until it waits. Which runs next is drawn by a seed
   (emulated_seed), so an order that happens to work is not met every time. A barrier, a shuffle or a
   matrix instruction is a meeting: each fiber leaves a pointer to its operands and waits; the last to
   arrive does the work for all.

   What it finds that a GPU may hide. Each is one line on stderr, with the kernel, the block and the
   thread, and exit status 1:
   - a barrier that some threads do not reach, or reach at another place; a thread that left before
   - a warp operation whose lanes are at different places, or gone
   - a misaligned 16-byte access or copy; more shared memory than was asked for in advance
   and these show in the results, since all device and shared memory starts as NaN:
   - memory that is read before it is written
   - a missing barrier (the order of fibers is random)
   - cp.async without a wait: the destination is NaN from the issue until the issuing thread's wait;
     the source is read at either end, as the seed says
   Device memory is plain heap, one piece an allocation, and so is shared memory, so the
   address sanitizer finds what lies outside.

   Read from the top: types, fibers, meetings, launch, memory, PTX twins, runtime. */
#ifndef CUDA_CPU_H
#define CUDA_CPU_H

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#define CUDA_CPU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_CPU_ASAN 1
#endif
#endif
#ifdef CUDA_CPU_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

// -------------------------------------------------------------------------------------------------
// types

#define __global__ __attribute__((unused))
#define __device__ __attribute__((unused))
#define __host__
#define __forceinline__ inline
#define __noinline__    __attribute__((noinline))
#define __constant__    static
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 {
    unsigned x, y, z;
};
#define CUDA_CPU_VECTOR(T, name)                                      \
    struct alignas(2 * sizeof(T)) name##2 {                           \
        T x, y;                                                       \
    };                                                                \
    struct alignas(4 * sizeof(T)) name##4 {                           \
        T x, y, z, w;                                                 \
    };                                                                \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_CPU_VECTOR(float, float)
CUDA_CPU_VECTOR(int, int)
CUDA_CPU_VECTOR(unsigned, uint)
#undef CUDA_CPU_VECTOR

namespace cuda_cpu {

static inline uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
static inline float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Rounds x to a binary format of 8 or 16 bits, to nearest, ties to even: `mantissa` stored bits, bias,
   and `top`, the largest finite value. Subnormals are kept. What rounds beyond top becomes `over`
   (the code of infinity, or of top where the format saturates). */
static inline unsigned round_to(
    float x, int mantissa, int bias, float top, unsigned nan, unsigned over, int sign_at) {
    const unsigned sign = bits_of(x) >> 31 << sign_at;
    const float a = std::fabs(x);
    if (x != x) return nan | sign;
    if (a == 0) return sign;
    int exponent;
    std::frexp(a, &exponent);                              // a = f * 2^exponent, f in [0.5, 1)
    const int e = std::max(exponent - 1, 1 - bias);        // that of the result
    const double unit = std::ldexp(1.0, e - mantissa);     // one in the last place
    const double steps = std::nearbyint((double)a / unit); // exact, then rounded to even
    if (steps * unit > (double)top || std::isinf(a)) return over | sign;
    // steps counts from zero within the binade; subnormals have exponent field 0 by the same sum
    return (unsigned)((long)(e + bias - 1) * (1L << mantissa) + (long)steps) | sign;
}
static inline float round_from(unsigned code, int mantissa, int bias, int exponent_bits) {
    const unsigned field = code >> mantissa & ((1u << exponent_bits) - 1);
    const unsigned fraction = code & ((1u << mantissa) - 1);
    const double v = field
        ? std::ldexp(1.0 + std::ldexp((double)fraction, -mantissa), (int)field - bias)
        : std::ldexp((double)fraction, 1 - bias - mantissa);
    return code >> (mantissa + exponent_bits) & 1 ? (float)-v : (float)v;
}

} // namespace cuda_cpu

struct __nv_bfloat16 { // upper half of a float
    uint16_t x;
};
struct __half { // 1 sign, 5 exponent (bias 15), 10 mantissa
    uint16_t x;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
struct alignas(4) __half2 {
    __half x, y;
};
typedef __nv_bfloat16 nv_bfloat16;
typedef __half half;

static inline __nv_bfloat16 __float2bfloat16(float x) {
    const uint32_t u = cuda_cpu::bits_of(x);
    if (x != x) return {0x7FFF};
    return {(uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16)};
}
static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __float2bfloat16(x); }
static inline float __bfloat162float(__nv_bfloat16 h) {
    return cuda_cpu::float_of((uint32_t)h.x << 16);
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16(x), __float2bfloat16(y)};
}
static inline float2 __bfloat1622float2(__nv_bfloat162 v) {
    return {__bfloat162float(v.x), __bfloat162float(v.y)};
}
static inline __half __float2half(float x) {
    return {(uint16_t)cuda_cpu::round_to(x, 10, 15, 65504, 0x7FFF, 0x7C00, 15)};
}
static inline __half __float2half_rn(float x) { return __float2half(x); }
static inline float __half2float(__half h) {
    if ((h.x & 0x7C00) == 0x7C00) return h.x & 0x3FF ? NAN : h.x >> 15 ? -INFINITY : INFINITY;
    return cuda_cpu::round_from(h.x, 10, 15, 5);
}

// FP8 saturates, as the hardware's conversion does: beyond the largest value is the largest value.
struct __nv_fp8_e4m3 { // bias 7, largest 448, no infinity
    uint8_t __x;
    __nv_fp8_e4m3() = default;
    explicit __nv_fp8_e4m3(float f)
        : __x((uint8_t)cuda_cpu::round_to(f, 3, 7, 448, 0x7F, 0x7E, 7)) {}
    explicit operator float() const {
        return (__x & 0x7F) == 0x7F ? NAN : cuda_cpu::round_from(__x, 3, 7, 4);
    }
};
struct __nv_fp8_e5m2 { // bias 15, largest 57344
    uint8_t __x;
    __nv_fp8_e5m2() = default;
    explicit __nv_fp8_e5m2(float f)
        : __x((uint8_t)cuda_cpu::round_to(f, 2, 15, 57344, 0x7F, 0x7B, 7)) {}
    explicit operator float() const {
        if ((__x & 0x7C) == 0x7C) return __x & 3 ? NAN : __x >> 7 ? -INFINITY : INFINITY;
        return cuda_cpu::round_from(__x, 2, 15, 5);
    }
};

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline float __fdividef(float a, float b) { return a / b; }
#define __expf(x) expf(x) // glibc has a function of this name
static inline float __int_as_float(int i) { return cuda_cpu::float_of((uint32_t)i); }
static inline int __float_as_int(float x) { return (int)cuda_cpu::bits_of(x); }
static inline float __uint_as_float(unsigned i) { return cuda_cpu::float_of(i); }
static inline unsigned __float_as_uint(float x) { return cuda_cpu::bits_of(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
template <class T> static inline T __ldg(const T *p) { return *p; }

// -------------------------------------------------------------------------------------------------
// fibers

/* A place to go on from, on a stack of its own. swapcontext does it everywhere, but asks the kernel for
   the signal mask each time; on x86-64 it is a dozen instructions: the registers that a function
   must keep are pushed, the stack pointer changes, and those of the other side are popped. */
#ifdef __x86_64__
struct CudaCpuPlace {
    void *sp;
};
asm(".text\n"
    ".weak cuda_cpu_switch\n"
    ".hidden cuda_cpu_switch\n"
    ".type cuda_cpu_switch, @function\n"
    "cuda_cpu_switch:\n"
    "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n"
    "    pushq %r13\n    pushq %r14\n    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq (%rsi), %rsp\n"
    "    popq %r15\n    popq %r14\n    popq %r13\n"
    "    popq %r12\n    popq %rbx\n    popq %rbp\n"
    "    ret\n"
    ".size cuda_cpu_switch, . - cuda_cpu_switch\n");
extern "C" void cuda_cpu_switch(CudaCpuPlace *from, CudaCpuPlace *to);
static inline void cuda_cpu_prepare(
    CudaCpuPlace *at, char *stack, size_t size, void (*start)(void)) {
    void **top = (void **)(stack + size); // a multiple of 16
    *--top = nullptr;                     // start never returns; it is entered as by a call
    *--top = (void *)start;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    at->sp = top;
}
#else
#include <ucontext.h>
struct CudaCpuPlace {
    ucontext_t context;
};
static inline void cuda_cpu_switch(CudaCpuPlace *from, CudaCpuPlace *to) {
    swapcontext(&from->context, &to->context);
}
static inline void cuda_cpu_prepare(
    CudaCpuPlace *at, char *stack, size_t size, void (*start)(void)) {
    getcontext(&at->context);
    at->context.uc_stack.ss_sp = stack;
    at->context.uc_stack.ss_size = size;
    at->context.uc_link = nullptr;
    makecontext(&at->context, start, 0);
}
#endif

namespace cuda_cpu {

enum {
    WARP = 32,
    MAX_THREADS = 1024,        // of a block
    MAX_STATIC = 32,           // __shared__ declarations that one kernel may pass
    DEFAULT_SHARED = 48 << 10, // bytes of dynamic shared memory that need no asking
    MOST_SHARED = 227 << 10,
#ifdef CUDA_CPU_ASAN
    STACK = 512 << 10,
#else
    STACK = 128 << 10,
#endif
    GUARD = 4096 // below each stack: no access
};

// A copy that cp.async began.
struct Copy {
    void *to;
    const void *from;
    int bytes, have; // size; bytes that the source has, zeros beyond
    int group, late; // commit group; late: the source is read at the wait
    unsigned char early[16];
};

typedef void Meeting(void **arg, unsigned mask); // arg[lane] of each lane in mask

struct Fiber {
    uint3 thread;
    int linear, started;
    enum { READY, BARRIER, MEETING, DONE } state;
    int line; // where it waits
    Copy *copy;
    int copies, room, group; // group: that of the next copies
    char *stack;
    CudaCpuPlace at;
};

struct Block {
    const char *kernel;
    void (*call)(void *);
    void *args;
    dim3 grid, block;
    uint3 index;
    int n, arrived, done;
    void *dynamic;
    size_t dynamic_bytes;
    struct {
        int id;
        void *p;
        size_t bytes;
    } fixed[MAX_STATIC];
    int n_fixed;
    uint64_t random;
    int ready[MAX_THREADS], n_ready; // fibers that can run
};

// Lanes of a warp that meet: those that are to come, those that are here, and where.
struct Group {
    unsigned mask, here;
    int line;
    Meeting *meeting;
    void *arg[WARP];
};
struct Warp {
    Group group[WARP];
    int groups;
};

// What an OpenMP thread has: one block at a time, and the fibers that every block reuses.
struct Worker {
    Fiber *fiber;
    Fiber *self; // the one that runs
    Warp *warp;
    Block *block;
    CudaCpuPlace at; // where it was when it entered a fiber
#ifdef CUDA_CPU_ASAN
    void *fake_stack;
    const void *bottom;
    size_t size;
#endif
};
inline thread_local Worker *worker;
inline uint64_t seed = 1;

static inline Fiber *self() { return worker->self; }
static inline uint64_t draw(uint64_t *state) { // xorshift [Marsaglia 2003]
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

#define CUDA_CPU_FAIL(...)                          \
    do {                                            \
        char what_[256];                            \
        snprintf(what_, sizeof what_, __VA_ARGS__); \
        cuda_cpu::failed(what_);                    \
    } while (0)

[[noreturn]] static inline void failed(const char *what) {
    static int said; // blocks run side by side: one message is enough
    if (__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
        for (;;) pause();
    fflush(stdout);
    if (worker && worker->block && worker->self)
        fprintf(stderr, "emulated device: %s, block (%u,%u,%u), thread (%u,%u,%u): %s\n",
            worker->block->kernel, worker->block->index.x, worker->block->index.y,
            worker->block->index.z, worker->self->thread.x, worker->self->thread.y,
            worker->self->thread.z, what);
    else
        fprintf(stderr, "emulated device: %s\n", what);
    fflush(stderr);
    _exit(1);
}

// Leaves the running fiber; comes back when the scheduler picks it again. The address sanitizer is
// told of the stacks.
static inline void leave() {
    Worker *w = worker;
    Fiber *f = w->self;
#ifdef CUDA_CPU_ASAN
    void *fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, w->bottom, w->size);
#endif
    cuda_cpu_switch(&f->at, &w->at);
#ifdef CUDA_CPU_ASAN
    __sanitizer_finish_switch_fiber(fake, &w->bottom, &w->size);
#endif
}

// A fiber runs one thread of every block that its worker is given.
static void fiber_main() {
#ifdef CUDA_CPU_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &worker->bottom, &worker->size);
#endif
    for (;;) {
        worker->block->call(worker->block->args);
        worker->self->state = Fiber::DONE;
        worker->block->done++;
        leave();
    }
}

static inline void enter(Worker *w, Fiber *f) {
    w->self = f;
    if (!f->started) cuda_cpu_prepare(&f->at, f->stack, STACK, fiber_main);
    f->started = 1;
#ifdef CUDA_CPU_ASAN
    __sanitizer_start_switch_fiber(&w->fake_stack, f->stack, STACK);
#endif
    cuda_cpu_switch(&w->at, &f->at);
#ifdef CUDA_CPU_ASAN
    __sanitizer_finish_switch_fiber(w->fake_stack, nullptr, nullptr);
#endif
    w->self = nullptr;
}

static inline void wake(Fiber *f) {
    Block *b = worker->block;
    f->state = Fiber::READY;
    b->ready[b->n_ready++] = f->linear;
}

// -------------------------------------------------------------------------------------------------
// meetings

static inline void sync_block(int line) {
    Worker *w = worker;
    Block *b = w->block;
    Fiber *f = w->self;
    f->line = line;
    if (++b->arrived < b->n) {
        f->state = Fiber::BARRIER;
        return leave();
    }
    for (int i = 0; i < b->n; i++) {
        Fiber *g = &w->fiber[i];
        if (g->line != line)
            CUDA_CPU_FAIL("is at the barrier of line %d, while thread %d waits at that of line %d",
                line, i, g->line);
        if (g != f) wake(g);
    }
    b->arrived = 0;
}

/* All lanes of mask meet here; the last to come runs `meeting` on the operands of all. Parts of a warp
   with masks that share no lane may meet apart from one another. */
static inline void meet(int line, unsigned mask, Meeting *meeting, void *arg) {
    Worker *w = worker;
    Block *b = w->block;
    Fiber *f = w->self;
    const int warp = f->linear / WARP, first = warp * WARP, lane = f->linear - first;
    Group *group = w->warp[warp].group, *mine = nullptr;
    if (!(mask >> lane & 1))
        CUDA_CPU_FAIL("line %d: the mask %#x leaves its own lane out", line, mask);
    if (b->n - first < WARP)
        mask &= (1u << (b->n - first)) - 1; // a block need not fill its last warp
    f->line = line;
    for (int i = 0; i < w->warp[warp].groups; i++) {
        Group *g = &group[i];
        if (!(g->mask & mask)) continue;
        if (g->mask != mask || g->line != line || g->meeting != meeting)
            CUDA_CPU_FAIL("is at the warp operation of line %d with mask %#x, while others of its "
                          "warp are at line %d with mask %#x",
                line, mask, g->line, g->mask);
        mine = g;
    }
    if (!mine) { // the first to come
        mine = &group[w->warp[warp].groups++];
        *mine = {mask, 0, line, meeting, {}};
    }
    mine->here |= 1u << lane;
    mine->arg[lane] = arg;
    if (mine->here != mask) {
        f->state = Fiber::MEETING;
        return leave();
    }
    Group all = *mine;
    *mine = group[--w->warp[warp].groups];
    meeting(all.arg, mask);
    for (int i = 0; i < WARP; i++)
        if ((mask >> i & 1) && i != lane) wake(&w->fiber[first + i]);
}

static inline void meet_only(void **, unsigned) {}

template <class T> struct Shuffle {
    T value;
    int from; // the lane to read; out of the warp: its own
};
template <class T> static void shuffle_all(void **arg, unsigned) {
    T value[WARP];
    for (int i = 0; i < WARP; i++)
        if (arg[i]) value[i] = ((Shuffle<T> *)arg[i])->value;
    for (int i = 0; i < WARP; i++) {
        if (!arg[i]) continue;
        Shuffle<T> *s = (Shuffle<T> *)arg[i];
        // a lane that takes no part has no value: on a GPU, anything
        if (!arg[s->from])
            memset((void *)&s->value, 0xFF, sizeof(T));
        else
            s->value = value[s->from];
    }
}
template <class T> static inline T shuffle(int line, unsigned mask, T value, int from, int lane) {
    Shuffle<T> s = {value, from < 0 || from >= WARP ? lane : from};
    meet(line, mask, shuffle_all<T>, &s);
    return s.value;
}
struct Vote {
    int yes;
    unsigned ballot;
};
static inline void vote_all(void **arg, unsigned) {
    unsigned ballot = 0;
    for (int i = 0; i < WARP; i++)
        if (arg[i] && ((Vote *)arg[i])->yes) ballot |= 1u << i;
    for (int i = 0; i < WARP; i++)
        if (arg[i]) ((Vote *)arg[i])->ballot = ballot;
}
static inline unsigned vote(int line, unsigned mask, int yes) {
    Vote v = {yes, 0};
    meet(line, mask, vote_all, &v);
    return v.ballot;
}
static inline int lane_now() { return self()->linear % WARP; }

// -------------------------------------------------------------------------------------------------
// memory of a block

static inline void *piece(size_t bytes) { // exactly so many, full of NaN
    void *p = nullptr;
    if (posix_memalign(&p, 256, bytes + !bytes)) CUDA_CPU_FAIL("no memory for %zu bytes", bytes);
    memset(p, 0xFF, bytes);
    return p;
}
static inline void *dynamic_shared() { return worker->block->dynamic; }
// id: which declaration in the source
static inline void *static_shared(int id, size_t bytes) {
    Block *b = worker->block;
    for (int i = 0; i < b->n_fixed; i++)
        if (b->fixed[i].id == id) return b->fixed[i].p;
    if (b->n_fixed == MAX_STATIC) CUDA_CPU_FAIL("more than %d __shared__ variables", MAX_STATIC);
    b->fixed[b->n_fixed] = {id, piece(bytes), bytes};
    return b->fixed[b->n_fixed++].p;
}

// -------------------------------------------------------------------------------------------------
// launch

static inline void make_fibers(Worker *w) {
    const size_t each = STACK + GUARD;
    char *stacks = (char *)mmap(nullptr, each * MAX_THREADS, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    w->fiber = (Fiber *)calloc(MAX_THREADS, sizeof(Fiber));
    w->warp = (Warp *)calloc(MAX_THREADS / WARP, sizeof(Warp));
    if (stacks == MAP_FAILED || !w->fiber || !w->warp)
        CUDA_CPU_FAIL("no memory for %d stacks", MAX_THREADS);
    for (int i = 0; i < MAX_THREADS; i++) {
        mprotect(stacks + i * each, GUARD, PROT_NONE);
        w->fiber[i].stack = stacks + i * each + GUARD;
        w->fiber[i].linear = i;
    }
}

// Why nothing can run: some wait where others will never come.
[[noreturn]] static inline void stuck(Worker *w) {
    const Block *b = w->block;
    const Fiber *waits = nullptr, *gone = nullptr, *other = nullptr;
    for (int i = 0; i < b->n; i++) {
        const Fiber *f = &w->fiber[i];
        if (f->state == Fiber::DONE)
            gone = f;
        else if (!waits)
            waits = f;
        else if (f->line != waits->line || f->state != waits->state)
            other = f;
    }
    w->self = (Fiber *)waits;
    if (gone)
        CUDA_CPU_FAIL(
            "waits at line %d, but thread %d has left the kernel", waits->line, gone->linear);
    if (other)
        CUDA_CPU_FAIL("waits at line %d, while thread %d waits at line %d", waits->line,
            other->linear, other->line);
    CUDA_CPU_FAIL("waits at line %d for nobody", waits->line);
}

static inline int pieces(int n, int size) { return (n + size - 1) / size; }
static inline void run_block(Worker *w, Block *b) {
    w->block = b;
    b->n = (int)(b->block.x * b->block.y * b->block.z);
    b->arrived = b->done = b->n_ready = 0;
    for (int i = 0; i < pieces(b->n, WARP); i++) w->warp[i].groups = 0;
    memset(b->dynamic, 0xFF, b->dynamic_bytes);
    for (int i = 0; i < b->n_fixed; i++) memset(b->fixed[i].p, 0xFF, b->fixed[i].bytes);
    for (int i = 0; i < b->n; i++) {
        Fiber *f = &w->fiber[i];
        f->thread = {i % b->block.x, i / b->block.x % b->block.y, i / (b->block.x * b->block.y)};
        f->line = f->copies = f->group = 0;
        wake(f);
    }
    while (b->done < b->n) {
        if (!b->n_ready) stuck(w);
        const int at = (int)(draw(&b->random) >> 20) % b->n_ready;
        const int next = b->ready[at < 0 ? at + b->n_ready : at];
        std::swap(b->ready[at < 0 ? at + b->n_ready : at], b->ready[b->n_ready - 1]);
        b->n_ready--;
        enter(w, &w->fiber[next]);
    }
    w->block = nullptr;
}

// Kernels that asked for more dynamic shared memory than DEFAULT_SHARED.
struct Asked {
    const void *kernel;
    int bytes;
};
inline Asked asked[256];
inline int n_asked;
inline int last_error;

static inline void run_grid(const char *name, const void *kernel, dim3 grid, dim3 block,
    size_t shared, void (*call)(void *), void *args) {
    const uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
    const uint64_t threads = (uint64_t)block.x * block.y * block.z;
    size_t allowed = DEFAULT_SHARED;
    for (int i = 0; i < n_asked; i++)
        if (asked[i].kernel == kernel && asked[i].bytes > (int)allowed) allowed = asked[i].bytes;
    if (!blocks || !threads || threads > MAX_THREADS || grid.y > 65535 || grid.z > 65535)
        CUDA_CPU_FAIL("%s: cannot launch (%u,%u,%u) blocks of (%u,%u,%u) threads", name, grid.x,
            grid.y, grid.z, block.x, block.y, block.z);
    if (shared > allowed)
        CUDA_CPU_FAIL(
            "%s: %zu bytes of dynamic shared memory, where %zu are allowed", name, shared, allowed);
    // each launch draws anew, each block by its index, whoever runs it
    static uint64_t launches;
    const uint64_t start = (seed + ++launches) * 0x9E3779B97F4A7C15u;
#pragma omp parallel if (blocks > 1)
    {
        if (!worker) {
            worker = (Worker *)calloc(1, sizeof(Worker));
            if (!worker) CUDA_CPU_FAIL("no memory");
            make_fibers(worker);
        }
        Block b = {};
        b.kernel = name, b.call = call, b.args = args, b.grid = grid, b.block = block;
        b.dynamic = piece(shared), b.dynamic_bytes = shared;
#pragma omp for schedule(dynamic)
        for (uint64_t i = 0; i < blocks; i++) {
            b.index = {(unsigned)(i % grid.x), (unsigned)(i / grid.x % grid.y),
                (unsigned)(i / grid.x / grid.y)};
            b.random = (start ^ (i + 1) * 0xD1B54A32D192ED03u) | 1;
            run_block(worker, &b);
        }
        free(b.dynamic);
        for (int i = 0; i < b.n_fixed; i++) free(b.fixed[i].p);
    }
}

// What data/cuda_cpu.sed makes of kernel<<<grid, block, shared, stream>>>(arguments).
struct Launch {
    dim3 grid, block;
    size_t shared;
    template <class... P, class... A>
    void run(const char *name, void (*kernel)(P...), A... a) const {
        auto thread = [&] { kernel(static_cast<P>(a)...); };
        typedef decltype(thread) Thread;
        run_grid(
            name, (const void *)kernel, grid, block, shared, [](void *t) { (*(Thread *)t)(); },
            &thread);
    }
};
static inline Launch launch(dim3 grid, dim3 block, size_t shared = 0, const void * = nullptr) {
    return {grid, block, shared};
}

} // namespace cuda_cpu

extern "C" __attribute__((used)) inline void emulated_seed(uint64_t seed) { cuda_cpu::seed = seed; }

#define threadIdx (cuda_cpu::self()->thread)
#define blockIdx  (cuda_cpu::worker->block->index)
#define blockDim  (cuda_cpu::worker->block->block)
#define gridDim   (cuda_cpu::worker->block->grid)
static const int warpSize __attribute__((unused)) = 32;

#define __syncthreads() cuda_cpu::sync_block(__LINE__)
#define __syncwarp(...) \
    cuda_cpu::meet(__LINE__, cuda_cpu::mask_of(__VA_ARGS__), cuda_cpu::meet_only, nullptr)
#define __threadfence() ((void)0)
#define __shfl_sync(mask, v, from) \
    cuda_cpu::shuffle(__LINE__, mask, v, (from) % 32, cuda_cpu::lane_now())
#define __shfl_xor_sync(mask, v, with) \
    cuda_cpu::shuffle(__LINE__, mask, v, cuda_cpu::lane_now() ^ (with), cuda_cpu::lane_now())
#define __shfl_down_sync(mask, v, by) \
    cuda_cpu::shuffle(__LINE__, mask, v, cuda_cpu::lane_now() + (int)(by), cuda_cpu::lane_now())
#define __shfl_up_sync(mask, v, by) \
    cuda_cpu::shuffle(__LINE__, mask, v, cuda_cpu::lane_now() - (int)(by), cuda_cpu::lane_now())
#define __ballot_sync(mask, yes) cuda_cpu::vote(__LINE__, mask, !!(yes))
#define __any_sync(mask, yes)    (cuda_cpu::vote(__LINE__, mask, !!(yes)) != 0)
#define __all_sync(mask, yes)    (cuda_cpu::vote(__LINE__, mask, !(yes)) == 0)
namespace cuda_cpu {
static inline unsigned mask_of(unsigned mask = 0xFFFFFFFFu) { return mask; }
} // namespace cuda_cpu

// Atomics on integers; a float is refused by the compiler. Blocks really run side by side.
#define CUDA_CPU_ATOMIC(name, type, op) \
    static inline type name(type *p, type v) { return __atomic_fetch_##op(p, v, __ATOMIC_RELAXED); }
CUDA_CPU_ATOMIC(atomicAdd, int, add)
CUDA_CPU_ATOMIC(atomicAdd, unsigned, add)
CUDA_CPU_ATOMIC(atomicAdd, unsigned long long, add)
CUDA_CPU_ATOMIC(atomicOr, unsigned, or)
CUDA_CPU_ATOMIC(atomicAnd, unsigned, and)
#undef CUDA_CPU_ATOMIC
template <class T> static inline T atomicCAS(T *p, T expected, T v) {
    static_assert(!std::is_floating_point<T>::value, "no atomics on floats");
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
#define CUDA_CPU_ATOMIC(name, better)                                                              \
    template <class T> static inline T name(T *p, T v) {                                           \
        static_assert(!std::is_floating_point<T>::value, "no atomics on floats");                  \
        T old = __atomic_load_n(p, __ATOMIC_RELAXED);                                              \
        while (v better old &&                                                                     \
            !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
        }                                                                                          \
        return old;                                                                                \
    }
CUDA_CPU_ATOMIC(atomicMin, <)
CUDA_CPU_ATOMIC(atomicMax, >)
#undef CUDA_CPU_ATOMIC

// -------------------------------------------------------------------------------------------------
// twins of the PTX wrappers in moe_kernels.cu

namespace cuda_cpu {
static inline void aligned(const void *p, size_t to, const char *what) {
    if ((uintptr_t)p % to) CUDA_CPU_FAIL("%s at %p, which is not a multiple of %zu", what, p, to);
}
static inline void land(const Copy *c) {
    if (c->late && c->have) memcpy(c->to, c->from, (size_t)c->have);
    if (!c->late) memcpy(c->to, c->early, (size_t)c->have);
    memset((char *)c->to + c->have, 0, (size_t)(c->bytes - c->have));
}
} // namespace cuda_cpu

static inline uint4 load16(const void *p) {
    uint4 v;
    cuda_cpu::aligned(p, 16, "16 bytes are read");
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void store16(void *p, uint4 v) {
    cuda_cpu::aligned(p, 16, "16 bytes are written");
    memcpy(p, &v, sizeof v);
}

// 16 bytes, of which the source has `have`
static inline void cp_async16(void *shared, const void *global, int have) {
    using namespace cuda_cpu;
    Fiber *f = self();
    aligned(shared, 16, "cp.async writes");
    aligned(global, 16, "cp.async reads");
    if (have < 0 || have > 16) CUDA_CPU_FAIL("cp.async of %d bytes out of 16", have);
    if (f->copies == f->room) {
        f->room = f->room ? 2 * f->room : 64;
        f->copy = (Copy *)realloc((void *)f->copy, (size_t)f->room * sizeof(Copy));
        if (!f->copy) CUDA_CPU_FAIL("no memory");
    }
    Copy *c = &f->copy[f->copies++];
    *c = {shared, global, 16, have, f->group, (int)(draw(&worker->block->random) >> 30 & 1), {}};
    if (!c->late && have) memcpy(c->early, global, (size_t)have);
    memset(shared, 0xFF, 16);
}
static inline void cp_async_commit() { cuda_cpu::self()->group++; }
template <int bytes> static inline void takes_shared() {
    const size_t has = cuda_cpu::worker->block->dynamic_bytes;
    if (has != (size_t)bytes)
        CUDA_CPU_FAIL("launched with %zu bytes of dynamic shared memory, not %d", has, bytes);
}
// until at most `left` of the newest groups are under way
template <int left> static inline void cp_async_wait() {
    cuda_cpu::Fiber *f = cuda_cpu::self();
    int kept = 0;
    for (int i = 0; i < f->copies; i++)
        if (f->copy[i].group < f->group - left)
            cuda_cpu::land(&f->copy[i]);
        else
            f->copy[kept++] = f->copy[i];
    f->copies = kept;
}

namespace cuda_cpu {
struct Ldmatrix {
    const uint16_t *row; // lane i has the address of row i % 8 of matrix i / 8
    unsigned *out;       // 4
};
template <bool transposed> static void ldmatrix_all(void **arg, unsigned) {
    const uint16_t *row[WARP];
    for (int i = 0; i < WARP; i++) row[i] = ((Ldmatrix *)arg[i])->row;
    for (int i = 0; i < WARP; i++)
        for (int m = 0; m < 4; m++) {
            const int g = i / 4, t = 2 * (i % 4);
            const uint16_t lo = transposed ? row[8 * m + t][g] : row[8 * m + g][t];
            const uint16_t hi = transposed ? row[8 * m + t + 1][g] : row[8 * m + g][t + 1];
            ((Ldmatrix *)arg[i])->out[m] = (unsigned)lo | (unsigned)hi << 16;
        }
}
struct Mma {
    float *d;
    const unsigned *a, *b;
};
/* D (16,8) += A (16,16) B (16,8), bf16, one float sum an element, k ascending. Lane 4g + t holds of A
   rows g, g+8 and columns 2t, 2t+1, 2t+8, 2t+9; of B those rows of column g; of D rows g, g+8
   and columns 2t, 2t+1 [PTX ISA, mma.m16n8k16]. */
static inline void mma_all(void **arg, unsigned) {
    float a[16][16], b[16][8];
    for (int i = 0; i < WARP; i++) {
        const Mma *x = (const Mma *)arg[i];
        const int g = i / 4, t = i % 4;
        for (int r = 0; r < 4; r++)
            for (int h = 0; h < 2; h++)
                a[g + 8 * (r % 2)][2 * t + 8 * (r / 2) + h] = float_of(x->a[r] >> 16 * h << 16);
        for (int r = 0; r < 2; r++)
            for (int h = 0; h < 2; h++) b[2 * t + 8 * r + h][g] = float_of(x->b[r] >> 16 * h << 16);
    }
    for (int i = 0; i < WARP; i++) {
        float *d = ((const Mma *)arg[i])->d;
        for (int r = 0; r < 4; r++) {
            const int row = i / 4 + 8 * (r / 2), col = 2 * (i % 4) + r % 2;
            float s = d[r];
            for (int k = 0; k < 16; k++) s = fmaf(a[row][k], b[k][col], s);
            d[r] = s;
        }
    }
}
static inline void full_warp(int line) {
    if (worker->block->n % WARP && self()->linear >= worker->block->n / WARP * WARP)
        CUDA_CPU_FAIL("line %d: a matrix instruction in a warp that is not whole", line);
}
} // namespace cuda_cpu

#define ldmatrix_x4(r, row)       cuda_cpu::ldmatrix<false>(__LINE__, r, row)
#define ldmatrix_x4_trans(r, row) cuda_cpu::ldmatrix<true>(__LINE__, r, row)
#define mma_bf16(d, a, b)         cuda_cpu::mma(__LINE__, d, a, b)
namespace cuda_cpu {
template <bool transposed> static inline void ldmatrix(int line, unsigned *r, const void *row) {
    Ldmatrix x = {(const uint16_t *)row, r};
    full_warp(line);
    aligned(row, 16, "ldmatrix reads");
    meet(line, 0xFFFFFFFFu, ldmatrix_all<transposed>, &x);
}
static inline void mma(int line, float *d, const unsigned *a, const unsigned *b) {
    Mma x = {d, a, b};
    full_warp(line);
    meet(line, 0xFFFFFFFFu, mma_all, &x);
}
} // namespace cuda_cpu

// -------------------------------------------------------------------------------------------------
// runtime calls: one device, everything happens at once

typedef int cudaError_t;
typedef void *cudaStream_t;
enum { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice
};
enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
enum { cudaStreamNonBlocking = 1 };

static inline const char *cudaGetErrorString(cudaError_t e) {
    return e == cudaSuccess ? "no error" : "out of memory";
}
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline cudaError_t cudaGetDeviceCount(int *n) { return *n = 1, cudaSuccess; }
static inline cudaError_t cudaGetDevice(int *d) { return *d = 0, cudaSuccess; }
static inline cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int) {
    // few processors, and not always the same number: a result must not depend on it
    *value = attribute == cudaDevAttrMultiProcessorCount ? 1 + (int)(cuda_cpu::seed % 5)
                                                         : (int)cuda_cpu::MOST_SHARED;
    return cudaSuccess;
}
template <class... P>
static inline cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), int, int bytes) {
    using namespace cuda_cpu;
    if (bytes > MOST_SHARED)
        CUDA_CPU_FAIL("%d bytes of shared memory: no block has so many", bytes);
    for (int i = 0; i < n_asked; i++)
        if (asked[i].kernel == (const void *)kernel) return asked[i].bytes = bytes, cudaSuccess;
    if (n_asked == 256) CUDA_CPU_FAIL("more than 256 kernels with large shared memory");
    asked[n_asked++] = {(const void *)kernel, bytes};
    return cudaSuccess;
}
template <class... P>
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, void (*)(P...), int, size_t) {
    return *blocks = 2, cudaSuccess;
}
static inline cudaError_t cudaMalloc(void **p, size_t bytes) {
    *p = nullptr;
    if (bytes > SIZE_MAX / 2 || posix_memalign(p, 256, bytes + !bytes))
        return cudaErrorMemoryAllocation;
    memset(*p, 0xFF, bytes);
    return cudaSuccess;
}
static inline cudaError_t cudaFree(void *p) { return free(p), cudaSuccess; }
static inline cudaError_t cudaMemcpyAsync(
    void *dst, const void *src, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    if (bytes) memcpy(dst, src, bytes);
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t) {
    if (bytes) memset(p, value, bytes);
    return cudaSuccess;
}
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) {
    return *s = nullptr, cudaSuccess;
}
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

#endif
