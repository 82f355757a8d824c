/* test_ops.h: the bench under test_moe.c: reporting, memory filled with NaN, error measures, and
   every operation of Backend as a function whose backward can be held against differences of its
   forward.

   One OP function an operation runs it on either backend, in arrays that have exactly the size the
   contract gives them; check_op() takes central differences in double, then compares float with
   double. Cases are shapes: sizes off every tile, empty experts, one token, T across the key block.

   It knows model.h (for the start values' counters) and nothing of the tests of whole models. To
   add a check of an operation, write its OP function and enter its cases at the end. */
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
// operations

/* An operation as a function of nx inputs x to ny outputs y, with its backward: dx from dy. run()
   does the forward, and the backward when dx is there, on arrays of either backend's type. */
enum { MAX_IO = 4 };
typedef struct Op Op;
typedef void Run(const Op *o, const Backend *b, void **x, void **y, void **dy, void **dx);
struct Op {
    const char *name;
    Run *run;
    Config c; // sizes: an operation reads those that it needs
    int B, T, N, variant;
    int *ids; // tokens, targets or chosen experts: held fixed
    int nx, ny;
    size_t x_count[MAX_IO], y_count[MAX_IO];
    double *x[MAX_IO], *dy[MAX_IO];
    int adds[MAX_IO]; // dx[i] is added to, not overwritten
    int samples;      // elements of an input that are probed alone
    void *y[MAX_IO];
};
#define OP(name) \
    static void name(const Op *o, const Backend *b, void **x, void **y, void **dy, void **dx)

static Op op(const char *name, Run *run, int B, int T, Config c) {
    Op o = {.name = name, .run = run, .c = c, .B = B, .T = T, .N = B * T, .samples = 25};
    stream_id = 0;
    return o;
}
static void input(Op *o, size_t count, double scale, double shift, int adds) {
    o->x_count[o->nx] = count;
    o->adds[o->nx] = adds;
    o->x[o->nx++] = normals(count, scale, shift);
}
static void output(Op *o, size_t count, double dy) { // its gradient: dy everywhere, 0 = random
    o->y_count[o->ny] = count;
    o->dy[o->ny++] = normals(count, dy == 0, dy);
}

static void *scratch_for(const Op *o, const Backend *b) {
    const ScratchShape s = {o->B, o->T, o->T, o->N * o->c.top_k, 1};
    return fresh(b->scratch_bytes(&o->c, &s), 1);
}

static double probe(void *o_) { // sum of y * dy
    const Backend *b = backend_f64();
    const int mark = pooled;
    Op *o = o_;
    double f = 0;
    for (int j = 0; j < o->ny; j++) memset(o->y[j], 0xFF, o->y_count[j] * sizeof(double));
    o->run(o, b, (void **)o->x, o->y, (void **)o->dy, NULL);
    for (int j = 0; j < o->ny; j++)
        for (size_t i = 0; i < o->y_count[j]; i++) f += get(b, o->y[j], i) * o->dy[j][i];
    release_to(mark);
    return f;
}

/* Forward and backward of o on b: into y and dx, whose arrays are made here. Gradients that are
   added to start from `start`, which is all 0 or random. */
static void run_op(const Op *o, const Backend *b, double **start, void **y, void **dx) {
    void *x[MAX_IO] = {0}, *dy[MAX_IO];
    memset(dx, 0, MAX_IO * sizeof *dx);
    for (int i = 0; i < o->nx; i++) {
        x[i] = on(b, o->x[i], o->x_count[i]);
        dx[i] = o->adds[i] ? on(b, start[i], o->x_count[i]) : fresh(o->x_count[i], b->act_size);
    }
    for (int j = 0; j < o->ny; j++) {
        dy[j] = on(b, o->dy[j], o->y_count[j]);
        y[j] = fresh(o->y_count[j], b->act_size);
    }
    o->run(o, b, x, y, dy, dx);
}

// Both checks of an operation.
static void check_op(Op *o) {
    const Backend *b = backend_f64(), *f = backend_cpu();
    const char *const dx_name[MAX_IO] = {"dx0", "dx1", "dx2", "dx3"};
    const char *const y_name[MAX_IO] = {"y0", "y1", "y2", "y3"};
    void *dx[MAX_IO], *fdx[MAX_IO], *fy[MAX_IO];
    double *start[MAX_IO] = {0};
    set_threads(1);
    if (begin("gradient/%s", o->name)) {
        for (int i = 0; i < o->nx; i++) start[i] = normals(o->x_count[i], 1, 0);
        run_op(o, b, start, o->y, dx);
        for (int i = 0; i < o->nx; i++) {
            double *g = dx[i];
            for (size_t k = 0; k < o->x_count[i] && o->adds[i]; k++) g[k] -= start[i][k];
            within(
                gradient_error(probe, o, o->x[i], g, o->x_count[i], o->samples), 1e-6, dx_name[i]);
        }
        finish();
    }
    set_threads(3);
    if (begin("float/%s", o->name)) {
        for (int i = 0; i < o->nx; i++) start[i] = normals(o->x_count[i], 0, 0);
        run_op(o, b, start, o->y, dx);
        run_op(o, f, start, fy, fdx);
        for (int j = 0; j < o->ny; j++)
            within(error_of(f, fy[j], o->y[j], o->y_count[j]), 1e-5, y_name[j]);
        for (int i = 0; i < o->nx; i++) {
            const size_t n = o->x_count[i];
            if (!all_zero(dx[i], n * sizeof(double)))
                within(error_of(f, fdx[i], dx[i], n), 1e-5, dx_name[i]);
            else // terms that cancel exactly in double
                within(length_of(f, fdx[i], n) / length_of(b, o->dy[0], o->y_count[0]), 1e-6,
                    dx_name[i]);
        }
        finish();
    }
    release_to(0);
}

OP(op_embedding) {
    const int V = o->c.vocab_size, C = o->c.d_model;
    b->embedding_forward(y[0], o->ids, mat(b, x[0], 1, V, C), o->N);
    if (dx) b->embedding_backward(dx[0], dy[0], o->ids, o->N, V, C, scratch_for(o, b));
}
static void embedding_case(const char *name, int N, int V, int C) {
    Op o = op(name, op_embedding, 1, N, config(V, 1, C, 1, 1, 2, 1, 1, 1));
    o.ids = fresh(N, sizeof(int));
    for (int n = 0; n < N; n++) o.ids[n] = below(V - 1); // some repeat, the last never occurs
    input(&o, (size_t)V * C, 1, 0, 1);
    output(&o, (size_t)N * C, 0);
    check_op(&o);
}

OP(op_rmsnorm) {
    void *rstd = fresh(o->N, b->stat_size);
    b->rmsnorm_forward(y[0], rstd, x[0], x[1], o->N, o->c.d_model, o->c.norm_eps);
    if (!dx) return;
    b->rmsnorm_backward(
        dx[0], dx[1], dy[0], x[0], rstd, x[1], o->N, o->c.d_model, scratch_for(o, b));
}
static void rmsnorm_case(const char *name, int N, int C) {
    Op o = op(name, op_rmsnorm, 1, N, config(2, 1, C, 1, 1, 2, 1, 1, 1));
    o.c.norm_eps = 1e-2;
    input(&o, (size_t)N * C, 1, 0, 1);
    input(&o, C, 0.3, 1, 1);
    output(&o, (size_t)N * C, 0);
    check_op(&o);
}
// y = (inp + branch, its norm); the sum's gradient, the norm's added to it, belongs to both terms
OP(op_residual) {
    const size_t bytes = o->x_count[0] * b->act_size;
    void *rstd = fresh(o->N, b->stat_size), *sum = o->variant ? copy_of(x[0], bytes) : y[0];
    b->residual_rmsnorm_forward(
        sum, y[1], rstd, o->variant ? sum : x[0], x[1], x[2], o->N, o->c.d_model, o->c.norm_eps);
    if (o->variant) memcpy(y[0], sum, bytes);
    if (!dx) return;
    memcpy(dx[0], dy[0], bytes);
    b->rmsnorm_backward(
        dx[0], dx[2], dy[1], y[0], rstd, x[2], o->N, o->c.d_model, scratch_for(o, b));
    memcpy(dx[1], dx[0], bytes);
}
static void residual_case(const char *name, int N, int C, int in_place) {
    Op o = op(name, op_residual, 1, N, config(2, 1, C, 1, 1, 2, 1, 1, 1));
    o.variant = in_place;
    input(&o, (size_t)N * C, 1, 0, 0);
    input(&o, (size_t)N * C, 1, 0, 0);
    input(&o, C, 0.3, 1, 1);
    output(&o, (size_t)N * C, 0);
    output(&o, (size_t)N * C, 0);
    check_op(&o);
}

enum { OVERWRITE, ACCUMULATE, WEIGHT_ONLY };
OP(op_linear) {
    const Mat w = mat(b, x[1], 1, o->c.vocab_size, o->c.d_model);
    void *scratch = scratch_for(o, b), *unused = fresh(o->x_count[1], b->grad_size);
    b->linear_forward(y[0], x[0], w, o->N, scratch);
    if (!dx) return;
    b->linear_backward(o->variant == WEIGHT_ONLY ? NULL : dx[0], dx[1], dy[0], x[0], w, o->N,
        o->variant == ACCUMULATE, scratch);
    if (o->variant == WEIGHT_ONLY) // the other gradient, so that there is one to check
        b->linear_backward(dx[0], unused, dy[0], x[0], w, o->N, 0, scratch);
}
static void linear_case(const char *name, int N, int rows, int cols, int variant) {
    Op o = op(name, op_linear, 1, N, config(rows, 1, cols, 1, 1, 2, 1, 1, 1));
    o.variant = variant;
    input(&o, (size_t)N * cols, 1, 0, variant == ACCUMULATE);
    input(&o, (size_t)rows * cols, 1, 0, 1);
    output(&o, (size_t)N * rows, 0);
    check_op(&o);
}

static Attn attn_shape(const Op *o) {
    const Config *c = &o->c;
    Attn a = {o->B, o->T, c->n_heads, c->n_kv_heads, c->head_dim, o->T, NULL, NULL, c->qk_norm,
        c->norm_eps};
    return a;
}
OP(op_qk_rope) {
    const int hd = o->c.head_dim, heads = o->c.n_heads + o->c.n_kv_heads;
    const size_t norms = (size_t)o->N * (o->c.qk_norm == QK_NORM_FULL ? 2 : heads);
    void *rstd = fresh(norms, b->stat_size), *scratch = scratch_for(o, b);
    void *rope = fresh((size_t)o->T * hd, b->stat_size);
    for (int t = 0; t < o->T; t++)
        for (int i = 0; i < hd / 2; i++) {
            put(b, rope, (size_t)t * hd + i, cos_d(t * (1.0 / (i + 1))));
            put(b, rope, (size_t)t * hd + hd / 2 + i, sin_d(t * (1.0 / (i + 1))));
        }
    b->qk_rope_forward(y[0], y[1], y[2], rstd, x[0], x[1], x[2], rope, attn_shape(o));
    // without a norm a model has no place for rstd
    for (size_t i = 0; i < norms && o->c.qk_norm == QK_NORM_NONE; i++)
        check(isnan(get(b, rstd, i)), "rstd %zu written without a norm", i);
    if (dx)
        b->qk_rope_backward(dx[0], dx[1], dx[2], dy[0], dy[1], dy[2], x[0], rstd, x[1], x[2], rope,
            attn_shape(o), scratch);
}
static void qk_rope_case(const char *name, int B, int T, int heads, int kv, int hd, int norm) {
    Op o = op(name, op_qk_rope, B, T, config(2, 1, 1, heads, kv, hd, 1, 1, 1));
    const size_t N = (size_t)B * T, full = norm == QK_NORM_FULL;
    o.c.qk_norm = norm;
    input(&o, N * (heads + 2 * kv) * hd, 1, 0, 0);
    if (norm != QK_NORM_NONE) input(&o, (full ? heads : 1) * hd, 0.3, 1, 1);
    if (norm != QK_NORM_NONE) input(&o, (full ? kv : 1) * hd, 0.3, 1, 1);
    output(&o, N * heads * hd, 0);
    output(&o, N * kv * hd, 0);
    output(&o, N * kv * hd, 0);
    check_op(&o);
}

OP(op_attention) {
    void *lse = fresh((size_t)o->N * o->c.n_heads, b->stat_size), *scratch = scratch_for(o, b);
    b->attention_forward(y[0], lse, x[0], x[1], x[2], attn_shape(o), scratch);
    if (dx)
        b->attention_backward(
            dx[0], dx[1], dx[2], dy[0], y[0], lse, x[0], x[1], x[2], attn_shape(o), scratch);
}
static void attention_case(const char *name, int B, int T, int heads, int kv, int hd, int samples) {
    Op o = op(name, op_attention, B, T, config(2, 1, 1, heads, kv, hd, 1, 1, 1));
    o.samples = samples;
    input(&o, (size_t)B * T * heads * hd, 1, 0, 0);
    input(&o, (size_t)B * T * kv * hd, 1, 0, 0);
    input(&o, (size_t)B * T * kv * hd, 1, 0, 0);
    output(&o, (size_t)B * T * heads * hd, 0);
    check_op(&o);
}

// A plan, in arrays of exactly its size, from a choice of experts and its weights.
static Plan plan_of(const Backend *b, const int *idx, const void *weight, int N, int K, int E) {
    const size_t S = (size_t)N * K;
    const Config c = config(2, 1, 2, 1, 1, 2, E, K, 1);
    const ScratchShape shape = {1, N, N, (int)S, 1};
    int *count = fresh(E, sizeof(int));
    Plan p = {N, E, (int)S, K, fresh(E + 1, 4), fresh(S, 4), fresh(S, 4), fresh(S, b->stat_size),
        fresh(N + 1, 4), fresh(S, 4)};
    memset(count, 0, E * sizeof(int));
    for (size_t s = 0; s < S; s++) count[idx[s]]++;
    b->plan_topk(&p, idx, weight, count, N, K, E, fresh(b->scratch_bytes(&c, &shape), 1));
    return p;
}
// dS, by slot, to or from the order of the choice, (N,K)
static void reorder(const Backend *b, void *dS, void *by_choice, const Plan *p, const int *idx,
    int K, int to_slots) {
    for (int s = 0; s < p->offsets[p->E]; s++) {
        size_t at = (size_t)p->row[s] * K;
        while (idx[at] != p->expert[s]) at++;
        if (to_slots)
            put(b, dS, s, get(b, by_choice, at));
        else
            put(b, by_choice, at, get(b, dS, s));
    }
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

/* y = combine weights, balance loss, z-loss. The choice is given: it need not be the best for the
   formulas to hold. */
OP(op_router) {
    const int N = o->N, E = o->c.n_experts, K = o->c.top_k;
    void *logits = fresh((size_t)N * E, b->stat_size), *lse = fresh(N, b->stat_size);
    void *sums = fresh(2, b->stat_size), *bias = fresh(E, b->stat_size);
    void *scratch = scratch_for(o, b);
    int *count = fresh(E, sizeof(int));
    StepState st = {0};
    const Router r = {o->c.router, N, o->c.d_model, E, K, o->c.norm_topk, get(b, dy[1], 0),
        get(b, dy[2], 0), N, 0};
    const Mat w = mat(b, x[1], 1, E, o->c.d_model);
    memset(sums, 0, 2 * b->stat_size);
    for (int e = 0; e < E; e++) put(b, bias, e, 0.1 * e);
    b->router_forward(
        logits, lse, o->ids, y[0], count, sums, NULL, x[0], w, bias, r, 1, &st, 0, scratch);
    put(b, y[1], 0, get(b, sums, 0));
    put(b, y[2], 0, get(b, sums, 1));
    if (!dx) return;
    const Plan p = plan_of(b, o->ids, y[0], N, K, E);
    void *dS = fresh((size_t)N * K, b->stat_size);
    reorder(b, dS, dy[0], &p, o->ids, K, 1);
    b->router_backward(dx[0], dx[1], dS, &p, logits, lse, o->ids, y[0], count, x[0], w, r, scratch);
}
static void router_case(
    const char *what, int N, int C, int E, int K, int kind, int renorm, double aux, double z) {
    char name[64];
    snprintf(name, sizeof name, "router/%s%s", what, renorm ? "-renorm" : "");
    Op o = op(name, op_router, 1, N, config(2, 1, C, 1, 1, 2, E, K, 1));
    o.c.router = kind, o.c.norm_topk = renorm;
    o.ids = random_choice(N, K, E > K + 1 ? E - 1 : E);
    input(&o, (size_t)N * C, 1, 0, 1);
    input(&o, (size_t)E * C, 0.5, 0, 1);
    output(&o, (size_t)N * K, 0);
    output(&o, 1, aux);
    output(&o, 1, z);
    check_op(&o);
}

enum { IN_PLACE = 1, ADD = 2, IDENTITY = 4, KEEP_A = 8 };
OP(op_experts) {
    const int N = o->N, E = o->c.n_experts, K = o->c.top_k, C = o->c.d_model, I = o->c.d_expert;
    const size_t S = (size_t)N * K;
    const Mat W1 = mat(b, x[1], E, 2 * I, C), W2 = mat(b, x[2], E, C, I);
    int whole[2] = {0, N};
    Plan p = {N, 1, N, 1, whole, NULL, NULL, NULL, NULL, NULL};
    void *H = fresh(S * 2 * I, b->act_size), *scratch = scratch_for(o, b);
    if (!(o->variant & IDENTITY)) p = plan_of(b, o->ids, x[3], N, K, E);
    void *A = o->variant & KEEP_A ? fresh(S * I, b->act_size) : NULL;
    b->expert_up_forward(H, A, x[0], W1, &p, scratch);
    if (o->variant & ADD) memcpy(y[0], x[0], o->x_count[0] * b->act_size);
    b->expert_down_forward(y[0], H, A, W2, &p, !!(o->variant & ADD), scratch);
    if (!dx) return;
    void *dH = o->variant & IN_PLACE ? H : fresh(S * 2 * I, b->act_size);
    void *sA = fresh(S * I, b->act_size), *dS = p.row ? fresh(S, b->stat_size) : NULL;
    b->expert_down_backward(dH, sA, dS, dx[2], dy[0], H, W2, &p, scratch);
    if (o->variant & ADD) memcpy(dx[0], dy[0], o->x_count[0] * b->act_size);
    b->expert_up_backward(dx[0], dx[1], dH, x[0], W1, &p, !!(o->variant & ADD), scratch);
    if (p.row) reorder(b, dS, dx[3], &p, o->ids, K, 0);
}
static void experts_case(
    const char *name, int N, int C, int I, int E, int K, int few, int variant, int samples) {
    Op o = op(name, op_experts, 1, N, config(2, 1, C, 1, 1, 2, E, K, I));
    o.variant = variant, o.samples = samples;
    o.ids = random_choice(N, K, few);
    input(&o, (size_t)N * C, 1, 0, 0);
    input(&o, (size_t)E * 2 * I * C, 1 / sqrt(C), 0, 1);
    input(&o, (size_t)E * C * I, 1, 0, 1);
    if (!(variant & IDENTITY)) input(&o, (size_t)N * K, 0.2, 0.5, 0);
    output(&o, (size_t)N * C, 0);
    check_op(&o);
}

OP(op_classifier) {
    const Mat w = mat(b, x[1], 1, o->c.vocab_size, o->c.d_model);
    b->classifier(y[0], dx ? dx[0] : NULL, dx ? dx[1] : NULL, x[0], w, o->ids, o->N,
        get(b, dy[0], 0), scratch_for(o, b));
}
static void classifier_case(const char *name, int N, int V, int C, int samples) {
    Op o = op(name, op_classifier, 1, N, config(V, 1, C, 1, 1, 2, 1, 1, 1));
    o.samples = samples;
    o.ids = fresh(N, sizeof(int));
    for (int n = 0; n < N; n++) o.ids[n] = N > 1 && n % 3 == 1 ? -1 : below(V);
    input(&o, (size_t)N * C, 1, 0, 0);
    input(&o, (size_t)V * C, 0.5, 0, 1);
    output(&o, N, 0.25);
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
    experts_case("experts/one-row", 1, 3, 1, 2, 1, 2, IN_PLACE, 25);
    experts_case("experts/620-rows", 620, 25, 5, 2, 1, 2, IN_PLACE, 5);  // across blocks of slots
    experts_case("experts/width-530", 70, 530, 3, 3, 2, 3, IN_PLACE, 5); // across strips of columns
    classifier_case("classifier/1x3", 1, 3, 4, 25);
    classifier_case("classifier/13x37", 13, 37, 9, 25);
    classifier_case("classifier/two-chunks", 258, 4099, 2, 2);
}

#endif
