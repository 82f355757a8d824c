/* test_memory.h: part of test_moe.c. What a training model saves, from the allocator's own account:
   what the expert block keeps, that no slot-by-width tensor exists, that the peak is what was
   declared, and that it is what the machine then shows. */
#ifndef TEST_MEMORY_H
#define TEST_MEMORY_H

#if defined(__GLIBC__)
#include <malloc.h>
#endif
#include <unistd.h>

static size_t up(size_t bytes) { return (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN; }

static size_t accounted(const Model *m, ArenaId arena, const char *label) {
    for (int i = 0; i < m->n_account; i++)
        if (m->account[i].arena == arena && !strcmp(m->account[i].label, label))
            return m->account[i].bytes;
    return 0;
}

/* Of every layer: X is 4NC bytes, H 4*2SI, the routing that of its ten arrays, and the whole layer
   these, the residual stream twice, the attention's input, q, k, v, output and scalars: nothing
   else. */
static void test_expert_memory(int E, int K, int I, int C, int N, int tile) {
    if (!begin("memory/expert-block/E%d-K%d-I%d-C%d-N%d%s", E, K, I, C, N, tile ? "-rounded" : ""))
        return;
    Config c = config(256, 3, C, 2, 1, 8, E, K, I);
    c.qk_norm = QK_NORM_HEAD;
    ModelShape s = {.B = 2, .T = N / 2, .train = 1, .tile = tile};
    Model m, less;
    size_t n = (size_t)N, S = n * K, L = c.n_layers;
    if (tile) S += (size_t)E * (tile - 1);
    if (S > n * E) S = n * E;
    model_plan(&m, &c, backend_cpu(), s);
    const size_t X = up(4 * n * C), H = up(4 * 2 * S * I);
    const size_t routing = up(4 * n * E) + up(4 * n) + 2 * up(4 * n * K) + up(4 * (size_t)E) +
        up(4 * ((size_t)E + 1)) + 4 * up(4 * S) + up(4 * (n + 1));
    check(accounted(&m, A_SAVED, "expert input X (N,C)") == L * X, "X: %zu bytes, not %zu",
        accounted(&m, A_SAVED, "expert input X (N,C)"), L * X);
    check(accounted(&m, A_SAVED, "expert pre-activation H (S,2I)") == L * H,
        "H: %zu bytes, not %zu", accounted(&m, A_SAVED, "expert pre-activation H (S,2I)"), L * H);
    check(accounted(&m, A_SAVED, "routing") == L * routing, "routing: %zu bytes, not %zu",
        accounted(&m, A_SAVED, "routing"), L * routing);
    c.n_layers--;
    model_plan(&less, &c, backend_cpu(), s);
    const size_t attention = 3 * up(4 * n * C) + up(4 * n * qkv_rows(&c)) +
        up(4 * n * dim_of(&c, DIM_Q)) + 2 * up(4 * n) + up(4 * n * (c.n_heads + c.n_kv_heads)) +
        up(4 * n * c.n_heads);
    check(m.used[A_SAVED] - less.used[A_SAVED] == X + H + routing + attention,
        "a layer saves %zu bytes, not %zu", m.used[A_SAVED] - less.used[A_SAVED],
        X + H + routing + attention);
    // C is so wide that a slot-by-C tensor would be the largest of all
    for (int i = 0; i < m.n_account; i++) {
        const Account *a = &m.account[i];
        if (a->arena != A_SAVED && a->arena != A_WORK) continue;
        check(!strstr(a->label, "(S,C)"), "there is a %s", a->label);
        if (C >= 64 * I)
            check(a->bytes < 4 * S * C, "%s takes %zu bytes, a tensor of slots by C is %zu",
                a->label, a->bytes, 4 * S * C);
    }
    model_free(&m);
    model_free(&less);
    finish();
}

// The backend's memory, counted.
static struct {
    size_t live, peak;
    int calls;
    struct {
        void *p;
        size_t bytes;
    } block[64];
} counted;
static void *counted_alloc(size_t bytes) {
    void *p = backend_cpu()->alloc(bytes);
    for (int i = 0; i < 64; i++) {
        if (counted.block[i].p) continue;
        counted.block[i].p = p, counted.block[i].bytes = bytes;
        break;
    }
    counted.calls++;
    counted.live += bytes;
    if (counted.live > counted.peak) counted.peak = counted.live;
    return p;
}
static void counted_release(void *p) {
    for (int i = 0; i < 64 && p; i++) {
        if (counted.block[i].p != p) continue;
        counted.live -= counted.block[i].bytes;
        counted.block[i].p = NULL;
        break;
    }
    backend_cpu()->release(p);
}

static size_t heap_in_use(void) {
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
    const struct mallinfo2 i = mallinfo2();
    return i.uordblks + i.hblkhd;
#else
    return 0;
#endif
}

// The peak is the sum of the classes that info prints, and a step takes nothing besides.
static void test_peak(int recompute) {
    enum { B = 4, T = 32 };
    if (!begin("memory/peak/recompute-%d", recompute)) return;
    Backend b = *backend_cpu();
    const Config c = model_config(0);
    const ModelShape s = {.B = B, .T = T, .train = 1, .recompute = recompute};
    Model m;
    StepState log[2];
    size_t declared = 0;
    b.alloc = counted_alloc, b.release = counted_release;
    memset(&counted, 0, sizeof counted);
    model_build(&m, &c, &b, s, NULL);
    for (int i = 0; i < m.n_account; i++) declared += m.account[i].bytes;
    lively(&m);
    train(&m, 1, B, T, log);
    const int calls = counted.calls;
    const size_t heap = heap_in_use();
    train(&m, 1, B, T, log);
    // less than any tensor: OpenMP may take a list for its tasks late
    check(heap_in_use() < heap + 4096, "a step left %zu bytes on the heap, %zu before",
        heap_in_use(), heap);
    check(counted.calls == calls, "a step allocates");
    check(counted.peak == declared, "%zu bytes at the peak, %zu declared", counted.peak, declared);
    check(model_bytes(&m) == declared, "info says %zu", model_bytes(&m));
    model_free(&m);
    check(counted.live == 0, "%zu bytes are left", counted.live);
    finish();
}

#if defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif

// Pages of this process that are in memory, in bytes; 0: not known here.
static size_t resident(void) {
    size_t pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f) return 0;
    if (fscanf(f, "%*s %zu", &pages) != 1) pages = 0;
    fclose(f);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

// What training takes from the machine is within 10% of what info says.
static void test_resident(void) {
    enum { B = 16, T = 128 };
    if (!begin("memory/resident")) return;
    Config c = config(256, 4, 192, 4, 2, 48, 8, 2, 192); // 130 MB
    c.qk_norm = QK_NORM_HEAD;
    const ModelShape s = {.B = B, .T = T, .train = 1};
    Model m;
    StepState log[2];
    const size_t before = resident();
    model_build(&m, &c, backend_cpu(), s, NULL);
    model_init(&m, 1);
    train(&m, 2, B, T, log);
    const double taken = (double)resident() - (double)before, said = (double)model_bytes(&m);
    model_free(&m);
#ifdef SANITIZED
    const int known = 0; // memory is mirrored there
#else
    const int known = before > 0;
#endif
    snprintf(check_measured, sizeof check_measured, " %.3f", taken / said);
    if (known)
        check(taken > 0.9 * said && taken < 1.1 * said, "%.1f MB are resident, %.1f MB were said",
            taken / 1e6, said / 1e6);
    finish();
}

static void test_memory_of_training(void) {
    test_expert_memory(8, 2, 512, 384, 1024, 0);
    test_expert_memory(64, 8, 128, 384, 512, 0);
    test_expert_memory(16, 8, 4, 512, 1024, 0);
    test_expert_memory(16, 2, 32, 48, 128, 8);
    for (int i = 0; i < 3; i++) test_peak(i);
    test_resident();
}

#endif
