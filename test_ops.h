/* test_ops.h: the bench under test_moe.c: reporting, memory filled with NaN, error measures, and
   the operations of Backend between named arrays.

   An Op is a list of arrays and of steps: what an operation reads and writes, in words. Every array
   says what it holds (activations, a matrix, gradients ...), so that one Op runs on any backend, in
   its element types and its memory, in arrays that have exactly the size the contract gives them
   and were full of NaN. check_op() runs the steps one after the other: the backward ones are held
   against central differences of the forward ones, in double; then float against double.
   test_diff.h runs the same steps one at a time, each from the reference's values.
   Cases are shapes: sizes off every tile, empty experts, one token, T across the key block.

   It knows model.h (for the start values' counters) and nothing of the tests of whole models. To
   add an operation, write a CALL of it and the Op that it is a step of, and enter cases at the
   end. */
#ifndef TEST_OPS_H
#define TEST_OPS_H

#include "model.h"
#include "test_report.h"

extern const Backend *backend_f64(void);

// -------------------------------------------------------------------------------------------------
// reporting

static void within(double err, double limit, const char *what) {
    const size_t at = strlen(check_measured);
    snprintf(check_measured + at, sizeof check_measured - at, " %s %.1e", what, err);
    check(err <= limit, "%s: error %.3e, limit %.0e", what, err, limit);
}

// -------------------------------------------------------------------------------------------------
// memory, numbers, errors

static void *pool[1 << 14];
static int pooled;

// n elements of `elem` bytes, exactly, full of NaN (of -1 as integers); freed by release_to.
static void *fresh(size_t n, size_t elem) {
    const size_t bytes = n * elem;
    void *p = NULL;
    if (pooled == 1 << 14 || posix_memalign(&p, ARENA_ALIGN, bytes + !bytes))
        die(RUN_ERROR, "no memory");
    memset(p, 0xFF, bytes);
    return pool[pooled++] = p;
}
static void *copy_of(const void *src, size_t bytes) { return memcpy(fresh(bytes, 1), src, bytes); }
static void release_to(int mark) {
    while (pooled > mark) free(pool[--pooled]);
}

static void set_threads(int n) {
    (void)n;
#ifdef _OPENMP
    omp_set_num_threads(n);
#endif
}

// element i of an array that belongs to a backend
static double get(const Backend *b, const void *p, size_t i) {
    return b->act_size == 8 ? ((const double *)p)[i] : (double)((const float *)p)[i];
}
static void put(const Backend *b, void *p, size_t i, double x) {
    if (b->act_size == 8)
        ((double *)p)[i] = x;
    else
        ((float *)p)[i] = (float)x;
}
static void *on(const Backend *b, const double *x, size_t n) { // x as an array of b
    void *p = fresh(n, b->act_size);
    for (size_t i = 0; i < n; i++) put(b, p, i, x[i]);
    return p;
}

static uint64_t stream_id; // a new one for every array of random numbers
static double *normals(size_t n, double scale, double shift) { // that floats can hold
    double *x = fresh(n, sizeof *x);
    stream_id++;
    for (size_t i = 0; i < n; i++) x[i] = (float)(scale * counter_normal(7, stream_id, i) + shift);
    return x;
}
static int below(int n) { return (int)(counter_hash(8, ++stream_id, 0) % (uint64_t)n); }

static double length_of(const Backend *b, const void *x, size_t n) {
    double s = 0;
    for (size_t i = 0; i < n; i++) s += get(b, x, i) * get(b, x, i);
    return sqrt(s);
}
// relative Frobenius error; 0 when both are exactly zero
static double error_of(const Backend *b, const void *x, const double *ref, size_t n) {
    double diff = 0;
    for (size_t i = 0; i < n; i++) diff += (get(b, x, i) - ref[i]) * (get(b, x, i) - ref[i]);
    return diff == 0 ? 0 : sqrt(diff) / length_of(backend_f64(), ref, n);
}
static double relative(double x, double ref) { return x == ref ? 0 : fabs(x - ref) / fabs(ref); }
static int all_zero(const void *p, size_t bytes) { // every bit: -0 is not literally zero
    for (size_t i = 0; i < bytes; i++)
        if (((const char *)p)[i]) return 0;
    return 1;
}

static Mat mat(const Backend *b, const void *data, int count, int rows, int cols) {
    Mat w = {(void *)(uintptr_t)data, b->param_type, NULL, count, rows, cols, (size_t)cols,
        (size_t)rows * cols};
    return w;
}
static Config config(int V, int L, int C, int heads, int kv, int hd, int E, int K, int I) {
    Config c = {.vocab_size = V,
        .seq_len = 64,
        .n_layers = L,
        .d_model = C,
        .n_heads = heads,
        .n_kv_heads = kv,
        .head_dim = hd,
        .n_experts = E,
        .top_k = K,
        .d_expert = I,
        .d_dense = K * I,
        .qk_norm = QK_NORM_HEAD,
        .norm_topk = 1,
        .rope_theta = 1e4,
        .norm_eps = 1e-6};
    return c;
}

/* Central difference of fourth order of f along dir, or along element `one` when dir is NULL. */
typedef double (*Function)(void *context);
static double slope(
    Function f, void *context, double *x, size_t n, const double *dir, size_t one, double h) {
    const int mark = pooled;
    const size_t first = dir ? 0 : one, count = dir ? n : 1;
    const double *old = copy_of(x + first, count * sizeof *x);
    double at[4];
    for (int s = 0; s < 4; s++) { // at -2h, -h, h, 2h
        const double step = (s < 2 ? s - 2 : s - 1) * h;
        for (size_t i = 0; i < count; i++) x[first + i] = old[i] + step * (dir ? dir[i] : 1);
        at[s] = f(context);
    }
    memcpy(x + first, old, count * sizeof *x);
    release_to(mark);
    return (8 * (at[2] - at[1]) - (at[3] - at[0])) / (12 * h);
}

/* The error of the gradient g of f at x against its norm: in `samples` elements spread over the
   array (all, if there are no more), and along two random directions, which see every element. */
static double gradient_error(
    Function f, void *context, double *x, const double *g, size_t n, int samples) {
    const int mark = pooled;
    const size_t step = n > (size_t)samples ? n / samples : 1;
    double norm = length_of(backend_f64(), g, n), diff = 0, seen = 0, worst = 0;
    for (size_t i = step / 2; i < n; i += step) {
        const double s = slope(f, context, x, n, NULL, i, 1e-3);
        diff += (s - g[i]) * (s - g[i]);
        seen += s * s;
    }
    if (step == 1) norm = sqrt(seen); // the true gradient, not the one under test
    if (diff != 0) worst = sqrt(diff) / norm;
    for (int k = 0; k < 2 && n > 1; k++) {
        double *dir = normals(n, 1, 0), want = 0;
        for (size_t i = 0; i < n; i++) want += g[i] * dir[i];
        const double s = slope(f, context, x, n, dir, 0, 1e-3 / sqrt((double)n));
        if (s != want && !(fabs(s - want) / norm <= worst)) worst = fabs(s - want) / norm;
    }
    release_to(mark);
    return worst;
}

// -------------------------------------------------------------------------------------------------
// arrays and steps

/* What an array holds. A backend stores each kind in a type of its own; here every value is a
   double, whole numbers too. A StepState counts as STATE_VALUES numbers, a Segment as
   SEGMENT_VALUES. HALF: BF16 on every backend. */
typedef enum { ACT, MATRIX, HALF, PARAM, GRAD, STAT, INTS, STATE, SEGMENTS } Kind;
enum { STATE_VALUES = 10, SEGMENT_VALUES = 4 };

static DType type_of(const Backend *b, Kind k) {
    const DType types[] = {
        b->act_type, b->mat_type, BF16, b->param_type, b->grad_type, b->stat_type};
    return k <= STAT ? types[k] : F64;
}
static size_t bytes_of(const Backend *b, Kind k, size_t n) {
    return k == INTS    ? n * sizeof(int)
        : k == STATE    ? n / STATE_VALUES * sizeof(StepState)
        : k == SEGMENTS ? n / SEGMENT_VALUES * sizeof(Segment)
                        : n * dtype_size(type_of(b, k));
}
// x as b holds it
static double rounded(const Backend *b, Kind k, double x) {
    const DType t = type_of(b, k);
    return t == F64 ? x : t == BF16 ? float_of_bf16(bf16_of((float)x)) : (float)x;
}

static StepState state_from(const double *x) {
    StepState s = {.bad = (int)x[0],
        .bad_layer = (int)x[1],
        .bad_index = (int64_t)x[2],
        .loss = x[3],
        .square = x[4],
        .grad_norm = x[5],
        .clip = x[6],
        .lr = x[7],
        .beta1_correction = x[8],
        .beta2_correction = x[9]};
    return s;
}
static void upload(const Backend *b, Kind k, void *p, const double *x, size_t n) {
    if (k <= STAT) {
        host_to(b, type_of(b, k), p, x, n);
        return;
    }
    const int mark = pooled;
    void *host = fresh(bytes_of(b, k, n), 1);
    for (size_t i = 0; i < n; i++) {
        if (k == INTS) ((int *)host)[i] = (int)x[i];
        if (k == STATE && i % STATE_VALUES == 0)
            ((StepState *)host)[i / STATE_VALUES] = state_from(x + i);
        if (k == SEGMENTS && i % SEGMENT_VALUES == 0) {
            Segment s = {(size_t)x[i], (size_t)x[i + 1], (int)x[i + 2], (size_t)x[i + 3]};
            ((Segment *)host)[i / SEGMENT_VALUES] = s;
        }
    }
    b->to_device(p, host, bytes_of(b, k, n));
    release_to(mark);
}
// What was never written: NaN, or -1 of a whole number.
static void download(const Backend *b, Kind k, double *x, const void *p, size_t n) {
    if (k <= STAT) {
        host_from(b, type_of(b, k), x, p, n);
        return;
    }
    const int mark = pooled;
    void *host = fresh(bytes_of(b, k, n), 1);
    b->to_host(host, p, bytes_of(b, k, n));
    if (k == STATE) {
        const StepState *s = host;
        const double values[STATE_VALUES] = {s->bad, s->bad_layer, (double)s->bad_index, s->loss,
            s->square, s->grad_norm, s->clip, s->lr, s->beta1_correction, s->beta2_correction};
        memcpy(x, values, sizeof values);
    }
    for (size_t i = 0; i < n && k == INTS; i++) x[i] = ((const int *)host)[i];
    release_to(mark);
}
static int unwritten(Kind k, double x) { return k == INTS ? x == -1 : isnan(x); }

/* An operation, or a few that belong together, as steps between named arrays. The first `forward`
   steps make outputs y from inputs x; the others make dx from dy. A step is one operation of
   Backend, or glue: a function that moves values on the host.

   A step names its arrays in words: "dout inp > dx +dw", what it reads, then what it writes.
     +name     added to, or written in part: it holds values before
     ~name     where the reference leaves an element unwritten, it may have any value
     ?name     written, but its values are not compared
     name=x    lies in the memory of x, which the step reads
   A word that the operation has no array for is left out: its pointer is NULL. */
enum { MAX_ARRAYS = 32, MAX_STEPS = 9, MAX_IO = 4 };
typedef struct Op Op;
typedef void Call(const Op *o, const Backend *b, void *const *a); // a[i]: array i; then scratch
typedef void Glue(const Op *o, double **v);                       // v[i]: values of array i

typedef struct Array {
    const char *name;
    Kind kind;
    size_t count;
    double *x; // what it holds at the start
} Array;
typedef struct Use {
    int array, in, reads, writes, loose, ignored; // in: the array whose memory it lies in, or -1
} Use;
typedef struct Step {
    const char *name;
    Call *call;
    Glue *glue;
    int uses;
    Use use[MAX_ARRAYS];
} Step;
struct Op {
    const char *name;
    const Backend *dev; // values of inputs are those that it can hold
    Config c;           // sizes: an operation reads those that it needs
    int B, T, N, variant, cache_len, S_max, row_max, gaps, segments, given;
    // a plan: its rows beyond B*T, experts (0: c.n_experts); of a part: first row, rows, groups; of a
    // merged one: sources, and from the offsets of one to those of the next
    int rows, E, first, part_rows, parts, sources, ld;
    double scale;
    Router router;
    OptimConfig optim;
    Array array[MAX_ARRAYS];
    Step step[MAX_STEPS];
    int arrays, steps, forward;
    int nx, ny, samples; // samples: elements of an input that are probed alone
    int x[MAX_IO], dx[MAX_IO], y[MAX_IO], dy[MAX_IO];
    int adds[MAX_IO]; // dx[i] is added to, not overwritten
};

static uint64_t first_stream; // random numbers of an operation come from the streams after it

static Op op_on(const Backend *dev, const char *name, int B, int T, Config c) {
    Op o = {.name = name,
        .dev = dev,
        .c = c,
        .B = B,
        .T = T,
        .N = B * T,
        .cache_len = T,
        .S_max = B * T * c.top_k,
        .row_max = c.top_k,
        .samples = 25};
    stream_id = first_stream;
    return o;
}
static int find(const Op *o, const char *name, size_t length) {
    for (int i = 0; i < o->arrays; i++)
        if (!strncmp(o->array[i].name, name, length) && !o->array[i].name[length]) return i;
    return -1;
}
static int named(const Op *o, const char *name) {
    const int i = find(o, name, strlen(name));
    if (i < 0) die(RUN_ERROR, "internal: %s has no array %s", o->name, name);
    return i;
}

// A new array of o, unwritten; returns its values.
static double *array(Op *o, const char *name, Kind kind, size_t count) {
    if (o->arrays == MAX_ARRAYS) die(RUN_ERROR, "internal: too many arrays in %s", o->name);
    Array *a = &o->array[o->arrays++];
    a->name = name, a->kind = kind, a->count = count, a->x = fresh(count, sizeof(double));
    for (size_t i = 0; i < count && kind == INTS; i++) a->x[i] = -1;
    return a->x;
}
static double *filled(Op *o, const char *name, Kind kind, size_t count, double x) {
    double *p = array(o, name, kind, count);
    for (size_t i = 0; i < count; i++) p[i] = x;
    return p;
}
// Random numbers of this scale around shift.
static double *random_array(
    Op *o, const char *name, Kind kind, size_t count, double scale, double shift) {
    double *p = array(o, name, kind, count);
    const int mark = pooled;
    const double *x = normals(count, scale, shift);
    for (size_t i = 0; i < count; i++) p[i] = rounded(o->dev, kind, x[i]);
    release_to(mark);
    return p;
}
static double *ints(Op *o, const char *name, const int *x, size_t count) {
    double *p = array(o, name, INTS, count);
    for (size_t i = 0; i < count; i++) p[i] = x[i];
    return p;
}

/* An input and its gradient, called by the gradient's name: "dinp" is that of "inp". */
static void input(
    Op *o, const char *dname, Kind kind, size_t count, double scale, double shift, int adds) {
    o->x[o->nx] = o->arrays;
    random_array(o, dname + 1, kind, count, scale, shift);
    o->dx[o->nx] = o->arrays;
    array(o, dname, kind == ACT || kind == STAT ? kind : GRAD, count);
    o->adds[o->nx++] = adds;
}
// An output and its gradient: dy everywhere, 0 = random.
static void output(Op *o, const char *dname, Kind kind, size_t count, double dy) {
    o->y[o->ny] = o->arrays;
    array(o, dname + 1, kind, count);
    o->dy[o->ny++] = o->arrays;
    random_array(o, dname, kind, count, dy == 0, dy);
}

static void add_step(Op *o, const char *name, Call *call, Glue *glue, const char *words) {
    if (o->steps == MAX_STEPS) die(RUN_ERROR, "internal: too many steps in %s", o->name);
    Step *s = &o->step[o->steps++];
    Step made = {.name = name, .call = call, .glue = glue};
    int writing = 0;
    *s = made;
    for (const char *w = words; *(w += strspn(w, " ")); w += strcspn(w, " ")) {
        if (*w == '>') {
            writing = 1, w++;
            continue;
        }
        Use u = {.in = -1, .writes = writing, .reads = !writing};
        for (; strchr("+~?", *w); w++) {
            if (*w == '+') u.reads = 1;
            if (*w == '~') u.loose = 1;
            if (*w == '?') u.ignored = 1;
        }
        const size_t length = strcspn(w, " ="), whole = strcspn(w, " ");
        if ((u.array = find(o, w, length)) < 0) continue;
        if (w[length] == '=') u.in = find(o, w + length + 1, whole - length - 1);
        s->use[s->uses++] = u;
    }
}
#define STEP(o, op, words)   add_step(o, #op, call_##op, NULL, words)
#define GLUE(o, what, words) add_step(o, #what, NULL, glue_##what, words)
#define CALL(op)             static void call_##op(const Op *o, const Backend *b, void *const *a)
#define GLUE_FN(what)        static void glue_##what(const Op *o, double **v)
#define A(name)              held_in(o, a, #name)
#define SCRATCH              a[MAX_ARRAYS]
static void *held_in(const Op *o, void *const *a, const char *name) {
    const int i = find(o, name, strlen(name));
    return i < 0 ? NULL : a[i];
}
static double *values_of(const Op *o, double **v, const char *name) { return v[named(o, name)]; }
// new memory for the values of an array that glue makes
static double *remake(const Op *o, double **v, const char *name) {
    const int i = named(o, name);
    return v[i] = fresh(o->array[i].count, sizeof(double));
}

/* A matrix as the model lays it out: with gaps, every expert starts on ARENA_ALIGN bytes of a float
   arena. Nobody may read or write what lies between. */
static size_t stride_of(const Op *o, int rows, int cols) {
    const size_t n = (size_t)rows * cols, step = ARENA_ALIGN / sizeof(float);
    return o->gaps ? (n + step - 1) / step * step : n;
}
static Mat matrix(
    const Op *o, const Backend *b, void *data, Kind kind, int count, int rows, int cols) {
    Mat w = {
        data, type_of(b, kind), NULL, count, rows, cols, (size_t)cols, stride_of(o, rows, cols)};
    return w;
}
// NaN between the matrices of a stack
static void clear_gaps(const Op *o, double *x, int count, int rows, int cols) {
    const size_t stride = stride_of(o, rows, cols), n = (size_t)rows * cols;
    for (size_t i = 0; i < count * stride; i++)
        if (i % stride >= n) x[i] = NAN;
}

// ---- a step on a backend

/* Memory of a backend, of exactly this size, full of NaN. Where the address sanitizer sees a step
   beyond it, there is nothing around it; elsewhere there are GUARD bytes on both sides, which
   drop() looks at. */
#if defined(__SANITIZE_ADDRESS__)
#define SEES_BEYOND 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SEES_BEYOND 1
#endif
#endif
#ifndef SEES_BEYOND
#define SEES_BEYOND 0
#endif
enum { GUARD = ARENA_ALIGN };
typedef struct Held {
    char *p;
    size_t bytes, guard;
    uint16_t mark; // what the guards hold: a NaN of its own, or else what is read beyond one array
                   // and written beyond another would not be seen
} Held;
static int on_cpu(const Backend *b) {
    return b->alloc == backend_cpu()->alloc || b->alloc == backend_f64()->alloc;
}
static Held hold(const Backend *b, size_t bytes) {
    static unsigned holds;
    Held h = {NULL, bytes, SEES_BEYOND || on_cpu(b) ? 0 : GUARD, (uint16_t)(0xFFC1 + holds++ % 61)};
    if (on_cpu(b)) {
        h.p = fresh(bytes, 1);
        return h;
    }
    const int mark = pooled;
    const size_t all = bytes + 2 * h.guard;
    char *host = fresh(all, 1), *p = b->alloc(all);
    if (!p) die(RUN_ERROR, "no memory on %s: %zu bytes", b->name, all);
    for (size_t i = 0; i < h.guard; i += sizeof h.mark) {
        memcpy(host + i, &h.mark, sizeof h.mark);
        memcpy(host + h.guard + bytes + i, &h.mark, sizeof h.mark);
    }
    b->to_device(p, host, all);
    release_to(mark);
    h.p = p + h.guard;
    return h;
}
// Gives it back; returns 1 if something was written beside it.
static int drop(const Backend *b, Held h) {
    uint16_t beside[2 * GUARD / sizeof h.mark];
    int touched = 0;
    if (on_cpu(b)) return 0; // of the pool
    if (h.guard) {
        b->to_host(beside, h.p - h.guard, GUARD);
        b->to_host((char *)beside + GUARD, h.p + h.bytes, GUARD);
        for (size_t i = 0; i < COUNT(beside); i++) touched |= beside[i] != h.mark;
    }
    b->release(h.p - h.guard);
    return touched;
}

typedef struct Ran {
    double *out[MAX_ARRAYS]; // of the arrays that it writes
    double ms;
    char wrong[128]; // "", or what else it did
} Ran;

// Whether b still holds these values.
static int holds(const Backend *b, Kind k, const void *p, const double *x, size_t n) {
    double *now = fresh(n, sizeof *now);
    download(b, k, now, p, n);
    for (size_t i = 0; i < n; i++)
        if (now[i] != x[i] && !(isnan(now[i]) && isnan(x[i]))) return 0;
    return 1;
}

/* Runs a step on b with values v. What it writes is in out afterwards. inspect: what it only reads
   must be as it was. */
static void run_step(
    const Op *o, const Step *s, const Backend *b, double *const *v, int inspect, Ran *r) {
    const ScratchShape shape = {o->B, o->T, o->cache_len, o->S_max, 1, o->rows, o->E};
    void *a[MAX_ARRAYS + 1] = {0};
    int written[MAX_ARRAYS] = {0};
    Held held[MAX_ARRAYS + 1] = {{0}};
    memset(r, 0, sizeof *r);
    for (int i = 0; i < s->uses; i++)
        if (s->use[i].writes)
            r->out[s->use[i].array] = fresh(o->array[s->use[i].array].count, sizeof(double));
    const int mark = pooled;
    for (int i = 0; i < s->uses; i++) {
        const Use *u = &s->use[i];
        const Array *x = &o->array[u->array];
        if (u->writes) written[u->in < 0 ? u->array : u->in] = 1;
        if (u->in < 0) {
            held[i] = hold(b, bytes_of(b, x->kind, x->count));
            if (u->reads) upload(b, x->kind, held[i].p, v[u->array], x->count);
        }
        a[u->array] = u->in < 0 ? held[i].p : a[u->in];
    }
    held[s->uses] = hold(b, b->scratch_bytes(&o->c, &shape));
    a[MAX_ARRAYS] = held[s->uses].p;
    b->sync();
    const double from = now_s();
    s->call(o, b, a);
    b->sync();
    r->ms = 1e3 * (now_s() - from);
    for (int i = 0; i < s->uses; i++) {
        const Use *u = &s->use[i];
        const Array *x = &o->array[u->array];
        if (u->writes) download(b, x->kind, r->out[u->array], a[u->array], x->count);
        if (inspect && !u->writes && !written[u->array] && x->kind != SEGMENTS && !r->wrong[0] &&
            !holds(b, x->kind, a[u->array], v[u->array], x->count))
            snprintf(r->wrong, sizeof r->wrong, "changed %s, which it reads", x->name);
    }
    for (int i = 0; i <= s->uses; i++)
        if (held[i].p && drop(b, held[i]) && !r->wrong[0])
            snprintf(r->wrong, sizeof r->wrong, "written beyond %s",
                i == s->uses ? "the scratch" : o->array[s->use[i].array].name);
    release_to(mark);
}

// The first steps of o on b, one after the other.
static void run_steps(const Op *o, const Backend *b, int steps, double **v) {
    for (int i = 0; i < o->arrays; i++) v[i] = o->array[i].x;
    for (int i = 0; i < steps; i++) {
        const Step *s = &o->step[i];
        Ran r;
        if (s->glue) {
            s->glue(o, v);
            continue;
        }
        run_step(o, s, b, v, 0, &r);
        for (int k = 0; k < o->arrays; k++)
            if (r.out[k]) v[k] = r.out[k];
    }
}

static double probe(void *o_) { // sum of y * dy
    const int mark = pooled;
    const Op *o = o_;
    double f = 0, *v[MAX_ARRAYS];
    run_steps(o, backend_f64(), o->forward, v);
    for (int j = 0; j < o->ny; j++)
        for (size_t i = 0; i < o->array[o->y[j]].count; i++) f += v[o->y[j]][i] * v[o->dy[j]][i];
    release_to(mark);
    return f;
}

/* Both checks of an operation. Gradients that are added to start from random numbers in the first,
   from 0 in the second. */
static void check_op(Op *o) {
    const Backend *b = backend_f64(), *f = backend_cpu();
    const char *const dx_name[MAX_IO] = {"dx0", "dx1", "dx2", "dx3"};
    const char *const y_name[MAX_IO] = {"y0", "y1", "y2", "y3"};
    double *v[MAX_ARRAYS], *fv[MAX_ARRAYS];
    set_threads(1);
    if (begin("gradient/%s", o->name)) {
        for (int i = 0; i < o->nx; i++)
            o->array[o->dx[i]].x = normals(o->array[o->dx[i]].count, 1, 0);
        run_steps(o, b, o->steps, v);
        for (int i = 0; i < o->nx; i++) {
            const Array *x = &o->array[o->x[i]], *dx = &o->array[o->dx[i]];
            double *g = copy_of(v[o->dx[i]], x->count * sizeof *g);
            for (size_t k = 0; k < x->count && o->adds[i]; k++) g[k] -= dx->x[k];
            within(gradient_error(probe, o, x->x, g, x->count, o->samples), 1e-6, dx_name[i]);
        }
        finish();
    }
    set_threads(3);
    if (begin("float/%s", o->name)) {
        for (int i = 0; i < o->nx; i++)
            o->array[o->dx[i]].x = normals(o->array[o->dx[i]].count, 0, 0);
        run_steps(o, b, o->steps, v);
        run_steps(o, f, o->steps, fv);
        for (int j = 0; j < o->ny; j++)
            within(error_of(b, fv[o->y[j]], v[o->y[j]], o->array[o->y[j]].count), 1e-5, y_name[j]);
        for (int i = 0; i < o->nx; i++) {
            const size_t n = o->array[o->dx[i]].count;
            const double *dx = v[o->dx[i]], *fdx = fv[o->dx[i]];
            if (!all_zero(dx, n * sizeof(double)))
                within(error_of(b, fdx, dx, n), 1e-5, dx_name[i]);
            else // terms that cancel exactly in double
                within(length_of(b, fdx, n) / length_of(b, v[o->dy[0]], o->array[o->dy[0]].count),
                    1e-6, dx_name[i]);
        }
        finish();
    }
    release_to(0);
}

// -------------------------------------------------------------------------------------------------
// operations, in the order of moe.h

CALL(embedding_forward) {
    b->embedding_forward(
        A(out), A(tokens), matrix(o, b, A(wte), MATRIX, 1, o->c.vocab_size, o->c.d_model), o->N);
}
CALL(embedding_backward) {
    b->embedding_backward(
        A(dwte), A(dout), A(tokens), o->N, o->c.vocab_size, o->c.d_model, SCRATCH);
}
static Op embedding_op(const Backend *dev, const char *name, int N, int V, int C) {
    Op o = op_on(dev, name, 1, N, config(V, 1, C, 1, 1, 2, 1, 1, 1));
    double *tokens = array(&o, "tokens", INTS, N);
    // some repeat, the last never occurs
    for (int n = 0; n < N; n++) tokens[n] = below(V > 1 ? V - 1 : 1);
    input(&o, "dwte", MATRIX, (size_t)V * C, 1, 0, 1);
    output(&o, "dout", ACT, (size_t)N * C, 0);
    STEP(&o, embedding_forward, "tokens wte > out");
    o.forward = o.steps;
    STEP(&o, embedding_backward, "dout tokens > +dwte");
    return o;
}

CALL(rmsnorm_forward) {
    b->rmsnorm_forward(A(out), A(rstd), A(inp), A(weight), o->N, o->c.d_model, o->c.norm_eps);
}
CALL(rmsnorm_backward) { // of the sum, where there is one
    const void *inp = A(sum) ? A(sum) : A(inp);
    b->rmsnorm_backward(
        A(dinp), A(dweight), A(dout), inp, A(rstd), A(weight), o->N, o->c.d_model, SCRATCH);
}
static Op rmsnorm_op(const Backend *dev, const char *name, int N, int C) {
    Op o = op_on(dev, name, 1, N, config(2, 1, C, 1, 1, 2, 1, 1, 1));
    o.c.norm_eps = 1e-2;
    input(&o, "dinp", ACT, (size_t)N * C, 1, 0, 1);
    input(&o, "dweight", PARAM, C, 0.3, 1, 1);
    output(&o, "dout", ACT, (size_t)N * C, 0);
    array(&o, "rstd", STAT, N);
    STEP(&o, rmsnorm_forward, "inp weight > out rstd");
    o.forward = o.steps;
    STEP(&o, rmsnorm_backward, "dout inp rstd weight > +dinp +dweight");
    return o;
}

// sum = inp + branch, and its norm; the sum's gradient, the norm's added to it, belongs to both
CALL(residual_rmsnorm_forward) {
    b->residual_rmsnorm_forward(
        A(sum), A(out), A(rstd), A(inp), A(branch), A(weight), o->N, o->c.d_model, o->c.norm_eps);
}
GLUE_FN(gradient_of_sum) { v[named(o, "dinp")] = values_of(o, v, "dsum"); }
GLUE_FN(gradient_of_branch) { v[named(o, "dbranch")] = values_of(o, v, "dinp"); }
static Op residual_op(const Backend *dev, const char *name, int N, int C, int in_place) {
    Op o = op_on(dev, name, 1, N, config(2, 1, C, 1, 1, 2, 1, 1, 1));
    input(&o, "dinp", ACT, (size_t)N * C, 1, 0, 0);
    input(&o, "dbranch", ACT, (size_t)N * C, 1, 0, 0);
    input(&o, "dweight", PARAM, C, 0.3, 1, 1);
    output(&o, "dsum", ACT, (size_t)N * C, 0);
    output(&o, "dout", ACT, (size_t)N * C, 0);
    array(&o, "rstd", STAT, N);
    STEP(&o, residual_rmsnorm_forward,
        in_place ? "inp branch weight > sum=inp out rstd" : "inp branch weight > sum out rstd");
    o.forward = o.steps;
    GLUE(&o, gradient_of_sum, "");
    STEP(&o, rmsnorm_backward, "dout sum rstd weight > +dinp +dweight");
    GLUE(&o, gradient_of_branch, "");
    return o;
}

CALL(linear_forward) {
    b->linear_forward(A(out), A(inp), matrix(o, b, A(w), MATRIX, 1, o->c.vocab_size, o->c.d_model),
        o->N, SCRATCH);
}
enum { OVERWRITE, ACCUMULATE, WEIGHT_ONLY };
CALL(linear_backward) {
    b->linear_backward(A(dinp), A(dw) ? A(dw) : A(unused), A(dout), A(inp),
        matrix(o, b, A(w), MATRIX, 1, o->c.vocab_size, o->c.d_model), o->N,
        o->variant == ACCUMULATE, SCRATCH);
}
static Op linear_op(const Backend *dev, const char *name, int N, int rows, int cols, int variant) {
    Op o = op_on(dev, name, 1, N, config(rows, 1, cols, 1, 1, 2, 1, 1, 1));
    o.variant = variant;
    input(&o, "dinp", ACT, (size_t)N * cols, 1, 0, variant == ACCUMULATE);
    input(&o, "dw", MATRIX, (size_t)rows * cols, 1, 0, 1);
    output(&o, "dout", ACT, (size_t)N * rows, 0);
    filled(&o, "unused", GRAD, (size_t)rows * cols, 0);
    STEP(&o, linear_forward, "inp w > out");
    o.forward = o.steps;
    STEP(&o, linear_backward,
        variant == ACCUMULATE        ? "dout inp w > +dinp +dw"
            : variant == WEIGHT_ONLY ? "dout inp w > +dw"
                                     : "dout inp w > dinp +dw");
    // the other gradient, so that there is one to check
    if (variant == WEIGHT_ONLY) STEP(&o, linear_backward, "dout inp w > dinp +unused");
    return o;
}

static Attn attn_shape(const Op *o, void *start, void *len) {
    const Config *c = &o->c;
    Attn a = {o->B, o->T, c->n_heads, c->n_kv_heads, c->head_dim, o->cache_len, start, len,
        c->qk_norm, c->norm_eps};
    return a;
}
CALL(qk_rope_forward) {
    b->qk_rope_forward(A(q), A(k), A(v), A(rstd), A(qkv), A(q_weight), A(k_weight), A(rope),
        attn_shape(o, A(start), A(len)));
}
CALL(qk_rope_backward) {
    b->qk_rope_backward(A(dqkv), A(dq_weight), A(dk_weight), A(dq), A(dk), A(dv), A(qkv), A(rstd),
        A(q_weight), A(k_weight), A(rope), attn_shape(o, NULL, NULL), SCRATCH);
}
GLUE_FN(rstd_untouched) { // without a norm a model has no place for rstd
    const int i = named(o, "rstd");
    for (size_t k = 0; k < o->array[i].count; k++)
        check(isnan(v[i][k]), "rstd %zu written without a norm", k);
}
// (positions, hd): a row holds hd/2 cosines, then hd/2 sines
static void rope_array(Op *o, int positions) {
    const int hd = o->c.head_dim;
    double *rope = array(o, "rope", STAT, (size_t)positions * hd);
    for (int t = 0; t < positions; t++)
        for (int i = 0; i < hd / 2; i++) {
            const size_t at = (size_t)t * hd + i;
            rope[at] = rounded(o->dev, STAT, cos_d(t * (1.0 / (i + 1))));
            rope[at + hd / 2] = rounded(o->dev, STAT, sin_d(t * (1.0 / (i + 1))));
        }
}
static size_t rstd_count(const Op *o) {
    return (size_t)o->N * (o->c.qk_norm == QK_NORM_FULL ? 2 : o->c.n_heads + o->c.n_kv_heads);
}
static Op qk_rope_op(
    const Backend *dev, const char *name, int B, int T, int heads, int kv, int hd, int norm) {
    Op o = op_on(dev, name, B, T, config(2, 1, 1, heads, kv, hd, 1, 1, 1));
    const size_t N = (size_t)B * T, full = norm == QK_NORM_FULL;
    o.c.qk_norm = norm;
    input(&o, "dqkv", ACT, N * (heads + 2 * kv) * hd, 1, 0, 0);
    if (norm != QK_NORM_NONE) {
        input(&o, "dq_weight", PARAM, (full ? heads : 1) * hd, 0.3, 1, 1);
        input(&o, "dk_weight", PARAM, (full ? kv : 1) * hd, 0.3, 1, 1);
    }
    output(&o, "dq", ACT, N * heads * hd, 0);
    output(&o, "dk", ACT, N * kv * hd, 0);
    output(&o, "dv", ACT, N * kv * hd, 0);
    rope_array(&o, T);
    array(&o, "rstd", STAT, rstd_count(&o));
    STEP(&o, qk_rope_forward, "qkv q_weight k_weight rope > q k v rstd");
    o.forward = o.steps;
    if (norm == QK_NORM_NONE) GLUE(&o, rstd_untouched, "");
    STEP(&o, qk_rope_backward,
        "dq dk dv qkv rstd q_weight k_weight rope > dqkv +dq_weight +dk_weight");
    return o;
}

CALL(attention_forward) {
    b->attention_forward(
        A(out), A(lse), A(q), A(k), A(v), attn_shape(o, A(start), A(len)), SCRATCH);
}
CALL(attention_backward) {
    b->attention_backward(A(dq), A(dk), A(dv), A(dout), A(out), A(lse), A(q), A(k), A(v),
        attn_shape(o, NULL, NULL), SCRATCH);
}
static Op attention_op(
    const Backend *dev, const char *name, int B, int T, int heads, int kv, int hd) {
    Op o = op_on(dev, name, B, T, config(2, 1, 1, heads, kv, hd, 1, 1, 1));
    input(&o, "dq", ACT, (size_t)B * T * heads * hd, 1, 0, 0);
    input(&o, "dk", ACT, (size_t)B * T * kv * hd, 1, 0, 0);
    input(&o, "dv", ACT, (size_t)B * T * kv * hd, 1, 0, 0);
    output(&o, "dout", ACT, (size_t)B * T * heads * hd, 0);
    array(&o, "lse", STAT, (size_t)B * T * heads);
    STEP(&o, attention_forward, "q k v > out lse");
    o.forward = o.steps;
    STEP(&o, attention_backward, "dout out lse q k v > dq dk dv");
    return o;
}

// A plan on the host, in arrays of exactly its size, from a choice of experts and its weights.
static Plan plan_of(const Backend *b, const int *idx, const void *weight, int N, int K, int E) {
    const size_t S = (size_t)N * K;
    int *count = fresh(E, sizeof(int));
    Plan p = {N, E, (int)S, K, fresh(E + 1, 4), fresh(S, 4), fresh(S, 4), fresh(S, b->stat_size),
        fresh(N + 1, 4), fresh(S, 4)};
    memset(count, 0, E * sizeof(int));
    for (size_t s = 0; s < S; s++) count[idx[s]]++;
    b->plan_topk(&p, idx, weight, count, N, K, E, NULL);
    return p;
}
// K distinct experts for each of N tokens, of the first `few` only: the others get no token
static int *random_choice(int N, int K, int few) {
    int *idx = fresh((size_t)N * K, sizeof(int));
    for (int n = 0; n < N; n++)
        for (int k = 0; k < K; k++) {
            int e, again;
            do {
                e = below(few), again = 0;
                for (int j = 0; j < k; j++) again |= idx[n * K + j] == e;
            } while (again);
            idx[n * K + k] = e;
        }
    return idx;
}

#define PLAN       "offsets row expert slot_weight row_begin slot "
#define LOOSE_PLAN "offsets ~row ~expert ~slot_weight row_begin ~slot "
static void plan_arrays(Op *o) {
    array(o, "offsets", INTS, o->c.n_experts + 1);
    array(o, "row", INTS, o->S_max);
    array(o, "expert", INTS, o->S_max);
    array(o, "slot_weight", STAT, o->S_max);
    array(o, "row_begin", INTS, o->N + 1);
    array(o, "slot", INTS, o->S_max);
}
static void identity_arrays(Op *o) { // one expert, slot s is row s
    double *offsets = array(o, "offsets", INTS, 2);
    offsets[0] = 0, offsets[1] = o->N;
}
static Plan plan_on(const Op *o, void *const *a) {
    Plan p = {o->N, o->E ? o->E : o->c.n_experts, o->S_max, o->row_max, A(offsets), A(row),
        A(expert), A(slot_weight), A(row_begin), A(slot)};
    return p;
}
CALL(plan_topk) {
    Plan p = plan_on(o, a);
    b->plan_topk(&p, A(idx), A(weight), A(count), o->N, o->c.top_k, o->c.n_experts, SCRATCH);
}
// The choice (N,K) and the loads that it makes.
static void choice_arrays(Op *o, const int *idx) {
    const int E = o->c.n_experts;
    const size_t S = (size_t)o->N * o->c.top_k;
    ints(o, "idx", idx, S);
    double *count = filled(o, "count", INTS, E, 0);
    for (size_t s = 0; s < S; s++) count[idx[s]]++;
}
/* Gradients of combine weights, from one order to the other: by slot of the plan, or as the experts
   were chosen, (N,K). */
static void reorder(
    const Op *o, double **v, const char *by_slot, const char *by_choice, int to_slots) {
    const int K = o->c.top_k, S = (int)values_of(o, v, "offsets")[o->c.n_experts];
    const double *row = values_of(o, v, "row"), *expert = values_of(o, v, "expert");
    const double *idx = values_of(o, v, "idx");
    double *slots = to_slots ? remake(o, v, by_slot) : values_of(o, v, by_slot);
    double *choice = to_slots ? values_of(o, v, by_choice) : remake(o, v, by_choice);
    for (int s = 0; s < S; s++) {
        size_t at = (size_t)row[s] * K;
        while (idx[at] != expert[s]) at++;
        if (to_slots)
            slots[s] = choice[at];
        else
            choice[at] = slots[s];
    }
}

CALL(router_forward) {
    b->router_forward(A(logits), A(lse), A(idx), A(weight), A(count), A(loss_sum), A(count_sum),
        A(sums), A(X), matrix(o, b, A(Wr), PARAM, 1, o->c.n_experts, o->c.d_model), A(bias),
        o->router, o->given, A(state), 5, SCRATCH);
}
CALL(router_balance) {
    b->router_balance(A(all_loss_sum), A(all_count_sum), A(count), A(sums), o->router);
}
CALL(router_backward) {
    const Plan p = plan_on(o, a);
    b->router_backward(A(dX), A(dWr), A(dS), &p, A(logits), A(lse), A(idx), A(weight), A(count),
        A(X), matrix(o, b, A(Wr), PARAM, 1, o->c.n_experts, o->c.d_model), o->router, SCRATCH);
}
GLUE_FN(losses_apart) {
    const double *sums = values_of(o, v, "loss_sum");
    remake(o, v, "aux")[0] = sums[0];
    remake(o, v, "z")[0] = sums[1];
}
GLUE_FN(dS) { reorder(o, v, "dS", "dweight", 1); }
/* A router. The choice may be given: it need not be the best for the formulas to hold. `few`: the
   experts that are given tokens. totals: of a step, or of an evaluation, which counts nothing.
   select: the plan drops or adds slots. all: rows over all ranks; sums: what these add up. */
typedef struct RouterCase {
    int N, C, E, K, few, kind, renorm, given, select, limit, tile, all, sums;
    double aux, z, scale; // scale: of its matrix
    enum { LOSSES, ALL_TOTALS, NO_TOTALS } totals;
} RouterCase;
CALL(plan_select) {
    Plan p = plan_on(o, a);
    b->plan_select(
        &p, A(moved), A(idx), A(weight), A(count), A(logits), A(lse), o->router, 0, SCRATCH);
}
// Most slots that a plan can have.
static int most_slots(int N, int E, int K, int tile) {
    const int S = N * K + (tile ? E * (tile - 1) : 0);
    return S < N * E ? S : N * E;
}
// y = combine weights, balance loss, z-loss
static Op router_op(const Backend *dev, const char *name, RouterCase x) {
    const int N = x.N, C = x.C, E = x.E, K = x.K;
    Op o = op_on(dev, name, 1, N, config(2, 1, C, 1, 1, 2, E, K, 1));
    const Router r = {x.kind, N, C, E, K, x.renorm, (float)x.aux, (float)x.z,
        x.select ? x.limit : N, x.tile, x.all};
    o.router = r;
    o.given = x.given;
    if (x.select) o.S_max = most_slots(N, E, K, x.tile), o.row_max = E;
    const int *idx = random_choice(N, K, x.few);
    input(&o, "dX", ACT, (size_t)N * C, 1, 0, 1);
    input(&o, "dWr", PARAM, (size_t)E * C, x.scale, 0, 1);
    output(&o, "dweight", STAT, (size_t)N * K, 0);
    output(&o, "daux", STAT, 1, x.aux);
    output(&o, "dz", STAT, 1, x.z);
    choice_arrays(&o, idx);
    double *bias = array(&o, "bias", STAT, E);
    for (int e = 0; e < E; e++) bias[e] = rounded(dev, STAT, 0.1 * e);
    array(&o, "logits", STAT, (size_t)N * E);
    array(&o, "lse", STAT, N);
    if (x.totals != NO_TOTALS) filled(&o, "loss_sum", STAT, 2, x.totals == ALL_TOTALS ? 0.5 : 0);
    if (x.totals == ALL_TOTALS) filled(&o, "count_sum", INTS, E, 3);
    if (x.sums) {
        array(&o, "sums", STAT, E + 1);
        filled(&o, "all_loss_sum", STAT, 2, 0.25);
        filled(&o, "all_count_sum", INTS, E, 2);
    }
    filled(&o, "state", STATE, STATE_VALUES, 0);
    plan_arrays(&o);
    if (x.select) filled(&o, "moved", INTS, 2, 1);
    if (x.select)
        random_array(&o, "dS", STAT, o.S_max, 1, 0);
    else
        array(&o, "dS", STAT, o.S_max);
    STEP(&o, router_forward,
        x.given ? "X Wr bias > logits lse +idx weight count +loss_sum +count_sum sums +state"
                : "X Wr bias > logits lse idx weight count +loss_sum +count_sum sums +state");
    if (x.totals != NO_TOTALS) GLUE(&o, losses_apart, "");
    o.forward = o.steps;
    if (x.sums) STEP(&o, router_balance, "count sums > +all_loss_sum +all_count_sum");
    if (x.select) {
        STEP(&o, plan_select, "idx weight count logits lse > +moved " LOOSE_PLAN);
    } else {
        STEP(&o, plan_topk, "idx weight count > " PLAN);
        GLUE(&o, dS, "");
    }
    STEP(&o, router_backward, "dS " PLAN "logits lse idx weight count X Wr > +dX +dWr");
    return o;
}

CALL(expert_up_forward) {
    const Plan p = plan_on(o, a);
    b->expert_up_forward(A(H), A(A), A(X),
        matrix(o, b, A(W1), MATRIX, p.E, 2 * o->c.d_expert, o->c.d_model), &p, SCRATCH);
}
// CAPPED, TILED: the plan drops slots, or rounds
// FRESH: the gradients of weights are written, not added to
enum { IN_PLACE = 1, ADD = 2, IDENTITY = 4, KEEP_A = 8, CAPPED = 16, TILED = 32, FRESH = 64 };
CALL(expert_down_forward) {
    const Plan p = plan_on(o, a);
    b->expert_down_forward(A(out), A(H), A(A),
        matrix(o, b, A(W2), MATRIX, p.E, o->c.d_model, o->c.d_expert), &p, !!(o->variant & ADD),
        SCRATCH);
}
CALL(expert_down_backward) {
    const Plan p = plan_on(o, a);
    b->expert_down_backward(A(dH), A(sA), A(dS), A(dW2), A(dout), A(H),
        matrix(o, b, A(W2), MATRIX, p.E, o->c.d_model, o->c.d_expert), &p, !!(o->variant & FRESH),
        SCRATCH);
}
CALL(expert_up_backward) {
    const Plan p = plan_on(o, a);
    b->expert_up_backward(A(dX), A(dW1), A(dH), A(X),
        matrix(o, b, A(W1), MATRIX, p.E, 2 * o->c.d_expert, o->c.d_model), &p, !!(o->variant & ADD),
        !!(o->variant & FRESH), SCRATCH);
}
GLUE_FN(X_into_out) { v[named(o, "out")] = values_of(o, v, "X"); }
GLUE_FN(dout_into_dX) { v[named(o, "dX")] = values_of(o, v, "dout"); }
GLUE_FN(dweight) { reorder(o, v, "dS", "dweight", 0); }
// The steps backward, of the op's variant.
static void expert_gradients(Op *o) {
    const int v = o->variant;
    STEP(o, expert_down_backward,
        v & FRESH          ? "dout H W2 " PLAN "> ~dH ~sA ~dS dW2"
            : v & IN_PLACE ? "dout H W2 " PLAN "> ~dH=H ~sA ~dS +dW2"
                           : "dout H W2 " PLAN "> ~dH ~sA ~dS +dW2");
    if (v & ADD) GLUE(o, dout_into_dX, "");
    STEP(o, expert_up_backward,
        v & FRESH     ? "dH X W1 " PLAN "> dX dW1"
            : v & ADD ? "dH X W1 " PLAN "> +dX +dW1"
                      : "dH X W1 " PLAN "> dX +dW1");
}
static Op experts_op(const Backend *dev, const char *name, int N, int C, int I, int E, int K,
    int few, int variant, int gaps) {
    Op o = op_on(dev, name, 1, N, config(2, 1, C, 1, 1, 2, E, K, I));
    const int add = variant & ADD, identity = variant & IDENTITY;
    const int selects = variant & (CAPPED | TILED);
    o.variant = variant, o.gaps = gaps;
    if (selects) {
        const Router r = {.kind = ROUTER_SOFTMAX,
            .N = N,
            .E = E,
            .K = K,
            .limit = (N * K + 2 * E - 1) / (2 * E),
            .tile = variant & TILED ? 3 : 0};
        o.router = r;
        o.S_max = most_slots(N, E, K, r.tile), o.row_max = E;
    }
    const int *idx = random_choice(N, K, few);
    const size_t n1 = E * stride_of(&o, 2 * I, C), n2 = E * stride_of(&o, C, I);
    input(&o, "dX", ACT, (size_t)N * C, 1, 0, 0);
    input(&o, "dW1", MATRIX, n1, 1 / sqrt(C), 0, !(variant & FRESH));
    input(&o, "dW2", MATRIX, n2, 1, 0, !(variant & FRESH));
    clear_gaps(&o, o.array[named(&o, "W1")].x, E, 2 * I, C);
    clear_gaps(&o, o.array[named(&o, "W2")].x, E, C, I);
    if (!identity) input(&o, "dweight", STAT, (size_t)N * K, 0.2, 0.5, 0);
    output(&o, "dout", ACT, (size_t)N * C, 0);
    if (identity) {
        identity_arrays(&o);
    } else {
        choice_arrays(&o, idx);
        plan_arrays(&o);
        array(&o, "dS", STAT, o.S_max);
    }
    if (selects) {
        random_array(&o, "logits", STAT, (size_t)N * E, 1, 0);
        random_array(&o, "lse", STAT, N, 0.1, 2);
        filled(&o, "moved", INTS, 2, 0);
    }
    array(&o, "H", ACT, (size_t)o.S_max * 2 * I);
    array(&o, "dH", ACT, (size_t)o.S_max * 2 * I);
    array(&o, "sA", ACT, (size_t)o.S_max * I);
    if (variant & KEEP_A) array(&o, "A", ACT, (size_t)o.S_max * I);
    if (selects)
        STEP(&o, plan_select, "idx weight count logits lse > +moved " LOOSE_PLAN);
    else if (!identity)
        STEP(&o, plan_topk, "idx weight count > " PLAN);
    STEP(&o, expert_up_forward, "X W1 " PLAN "> ~H ~A");
    if (add) GLUE(&o, X_into_out, "");
    STEP(&o, expert_down_forward, add ? "H A W2 " PLAN "> +out" : "H A W2 " PLAN "> out");
    o.forward = o.steps;
    expert_gradients(&o);
    if (!identity && !selects) GLUE(&o, dweight, "");
    return o;
}

CALL(classifier) {
    b->classifier(A(losses), A(dinp), A(dw), A(inp),
        matrix(o, b, A(w), MATRIX, 1, o->c.vocab_size, o->c.d_model), A(targets), o->N, o->scale,
        SCRATCH);
}
static Op classifier_op(const Backend *dev, const char *name, int N, int V, int C, double size) {
    Op o = op_on(dev, name, 1, N, config(V, 1, C, 1, 1, 2, 1, 1, 1));
    double *targets = array(&o, "targets", INTS, N);
    o.scale = 0.25;
    for (int n = 0; n < N; n++) targets[n] = N > 1 && n % 3 == 1 ? -1 : below(V);
    input(&o, "dinp", ACT, (size_t)N * C, 1, 0, 0);
    input(&o, "dw", MATRIX, (size_t)V * C, size, 0, 1);
    output(&o, "dlosses", STAT, N, o.scale);
    add_step(&o, "classifier:loss", call_classifier, NULL, "inp w targets > losses");
    o.forward = o.steps;
    STEP(&o, classifier, "inp w targets > losses dinp +dw");
    return o;
}

// -------------------------------------------------------------------------------------------------
// cases of the gradient and float checks

static void embedding_case(const char *name, int N, int V, int C) {
    Op o = embedding_op(backend_cpu(), name, N, V, C);
    check_op(&o);
}
static void rmsnorm_case(const char *name, int N, int C) {
    Op o = rmsnorm_op(backend_cpu(), name, N, C);
    check_op(&o);
}
static void residual_case(const char *name, int N, int C, int in_place) {
    Op o = residual_op(backend_cpu(), name, N, C, in_place);
    check_op(&o);
}
static void linear_case(const char *name, int N, int rows, int cols, int variant) {
    Op o = linear_op(backend_cpu(), name, N, rows, cols, variant);
    check_op(&o);
}
static void qk_rope_case(const char *name, int B, int T, int heads, int kv, int hd, int norm) {
    Op o = qk_rope_op(backend_cpu(), name, B, T, heads, kv, hd, norm);
    check_op(&o);
}
static void attention_case(const char *name, int B, int T, int heads, int kv, int hd, int samples) {
    Op o = attention_op(backend_cpu(), name, B, T, heads, kv, hd);
    o.samples = samples;
    check_op(&o);
}
static void router_case(
    const char *what, int N, int C, int E, int K, int kind, int renorm, double aux, double z) {
    char name[64];
    snprintf(name, sizeof name, "router/%s%s", what, renorm ? "-renorm" : "");
    const RouterCase x = {.N = N,
        .C = C,
        .E = E,
        .K = K,
        .few = E > K + 1 ? E - 1 : E,
        .kind = kind,
        .renorm = renorm,
        .given = 1,
        .aux = aux,
        .z = z,
        .scale = 0.5};
    Op o = router_op(backend_cpu(), name, x);
    check_op(&o);
}
static void experts_case(
    const char *name, int N, int C, int I, int E, int K, int few, int variant, int samples) {
    Op o = experts_op(backend_cpu(), name, N, C, I, E, K, few, variant, 0);
    o.samples = samples;
    check_op(&o);
}
static void classifier_case(const char *name, int N, int V, int C, int samples) {
    Op o = classifier_op(backend_cpu(), name, N, V, C, 0.5);
    o.samples = samples;
    check_op(&o);
}

static void test_operations(void) {
    embedding_case("embedding/33x7", 33, 5, 7);
    embedding_case("embedding/1000x67", 1000, 9, 67);
    rmsnorm_case("rmsnorm/1x3", 1, 3);
    rmsnorm_case("rmsnorm/5x37", 5, 37);
    rmsnorm_case("rmsnorm/270x300", 270, 300); // across the blocks of rows and of columns
    residual_case("residual_rmsnorm/5x37", 5, 37, 0);
    residual_case("residual_rmsnorm/in-place", 7, 16, 1);
    linear_case("linear/1x1x1", 1, 1, 1, OVERWRITE);
    linear_case("linear/7x5x3", 7, 5, 3, OVERWRITE);
    linear_case("linear/13x33x261", 13, 33, 261, OVERWRITE); // across the product's block of k
    linear_case("linear/accumulate", 9, 17, 31, ACCUMULATE);
    linear_case("linear/weight-only", 9, 17, 31, WEIGHT_ONLY);
    qk_rope_case("qk_rope/none", 2, 5, 4, 2, 6, QK_NORM_NONE);
    qk_rope_case("qk_rope/full", 2, 5, 4, 2, 6, QK_NORM_FULL);
    qk_rope_case("qk_rope/head", 2, 5, 4, 2, 6, QK_NORM_HEAD);
    qk_rope_case("qk_rope/head-one-row", 1, 1, 1, 1, 2, QK_NORM_HEAD);
    qk_rope_case("qk_rope/full-270-rows", 2, 135, 3, 1, 40, QK_NORM_FULL);
    attention_case("attention/T1", 2, 1, 2, 1, 4, 25);
    attention_case("attention/T7", 2, 7, 3, 3, 5, 25);
    attention_case("attention/grouped", 2, 9, 4, 2, 6, 25);
    attention_case("attention/T64", 1, 64, 2, 1, 4, 20);
    attention_case("attention/T70", 1, 70, 2, 1, 18, 20);
    attention_case("attention/T300", 1, 300, 2, 1, 4, 8); // across the query block
    for (int renorm = 0; renorm < 2; renorm++) {
        router_case("softmax", 11, 9, 5, 2, ROUTER_SOFTMAX, renorm, 0.7, 0.3);
        router_case("softmax-K-is-E", 6, 7, 4, 4, ROUTER_SOFTMAX, renorm, 0.7, 0.3);
        router_case("softmax-K1", 6, 7, 19, 1, ROUTER_SOFTMAX, renorm, 0.7, 0.3);
        router_case("softmax-140-rows", 140, 5, 99, 4, ROUTER_SOFTMAX, renorm, 20, 7);
        router_case("sigmoid", 11, 9, 5, 2, ROUTER_SIGMOID, renorm, 0.7, 0.3);
        router_case("sigmoid-K1", 11, 9, 17, 1, ROUTER_SIGMOID, renorm, 0.7, 0.3);
    }
    experts_case("experts/top2", 11, 7, 5, 4, 2, 4, 0, 25);
    experts_case("experts/in-place", 11, 7, 5, 4, 2, 4, IN_PLACE, 25);
    experts_case("experts/kept-A", 11, 7, 5, 4, 2, 4, IN_PLACE | KEEP_A, 25);
    experts_case("experts/accumulate", 11, 7, 5, 4, 2, 4, IN_PLACE | ADD, 25);
    experts_case("experts/identity", 9, 6, 11, 1, 1, 1, IN_PLACE | IDENTITY, 25);
    experts_case("experts/idle", 9, 6, 18, 5, 2, 3, IN_PLACE, 25);
    experts_case("experts/all-to-one", 9, 6, 7, 3, 1, 1, IN_PLACE, 25);
    experts_case("experts/all-to-the-same-two", 9, 6, 7, 4, 2, 2, IN_PLACE, 25);
    experts_case("experts/K-is-E", 5, 6, 7, 3, 3, 3, IN_PLACE, 25);
    experts_case("experts/fresh", 11, 7, 5, 4, 2, 4, FRESH, 25);
    experts_case("experts/fresh-idle", 9, 6, 18, 5, 2, 3, FRESH, 25);
    experts_case("experts/fresh-identity", 9, 6, 11, 1, 1, 1, FRESH | IDENTITY, 25);
    experts_case("experts/one-row", 1, 3, 1, 2, 1, 2, IN_PLACE, 25);
    experts_case("experts/620-rows", 620, 25, 5, 2, 1, 2, IN_PLACE, 5); // across blocks of slots
    experts_case("experts/650-slots-each", 650, 25, 5, 2, 2, 2, IN_PLACE, 5); // which pay a copy
    experts_case("experts/width-530", 70, 530, 3, 3, 2, 3, IN_PLACE, 5); // across strips of columns
    classifier_case("classifier/1x3", 1, 3, 4, 25);
    classifier_case("classifier/13x37", 13, 37, 9, 25);
    classifier_case("classifier/two-chunks", 258, 4099, 2, 2);
}

#endif
