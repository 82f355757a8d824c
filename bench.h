/* bench.h: what this machine reaches, and what training makes of it. It knows commands.h and all
   that it knows.

   These tables, each measured on random tokens, with warm-up, as medians:
     machine      the peak of independent fp32 multiply-adds, the memory's bandwidth, a large product
     operations   every operation of a training step: seconds, GFLOP/s, GB/s, share of the peak
     step         forward, backward, update; tokens/s and the share of the peak of whole steps
     cuBLAS       on a GPU where there is cuBLAS: our products beside its own of the same sizes
     --tax        tokens/s of models with more and smaller experts over those of the dense model with
                  the same active parameters, steps of both by turns
     --growth     time per token while one size grows: tokens a step, layers, width, experts
   A table is made as JSON first; --json prints that, otherwise it is printed as text.

   Operations are timed by a Backend that stands before the real one: each of its functions notes the
   time, calls the real one, waits for it, and adds what that did: multiply-adds of its products, and
   the bytes that it must at least move (each input read once, each output written once).

   Start reading at command_bench. */
#ifndef BENCH_H
#define BENCH_H

#include "commands.h"

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static int at_least_one(int n) { return n > 1 ? n : 1; }
static double median(double *x, int n) { // reorders x
    qsort(x, n, sizeof *x, by_value);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

// -------------------------------------------------------------------------------------------------
// a backend that is timed

// clang-format off
#define BENCH_OPS(X)                                                                           \
    X(zero) X(embedding_forward) X(embedding_backward) X(rmsnorm_forward)                      \
    X(residual_rmsnorm_forward) X(rmsnorm_backward) X(linear_forward) X(linear_backward)       \
    X(qk_rope_forward) X(qk_rope_backward) X(attention_forward) X(attention_backward)          \
    X(router_forward) X(router_backward) X(plan_topk) X(plan_select) X(expert_up_forward)      \
    X(expert_down_forward) X(expert_down_backward) X(expert_up_backward) X(classifier)         \
    X(reduce_loss) X(grad_norm) X(update) X(update_bias)
// clang-format on
#define NAME_OP(op) OP_##op,
enum { BENCH_OPS(NAME_OP) N_OPS };
#undef NAME_OP

typedef struct OpTime {
    double s, flop, bytes;
    int calls;
} OpTime;

static struct {
    const Backend *b;
    OpTime op[N_OPS];
} timed;

static void op_done(int op, double seconds, double flop, double bytes) {
    OpTime *t = &timed.op[op];
    t->s += seconds;
    t->flop += flop;
    t->bytes += bytes;
    t->calls++;
}

static double slots_now(const Plan *p) {
    int n;
    timed.b->to_host(&n, p->offsets + p->E, sizeof n);
    return n;
}
// Bytes of weights, of their gradients (read and written), of so many values of the router.
static double mat_elements(Mat w) { return (double)w.count * w.rows * w.cols; }
static double mat_bytes(Mat w) { return mat_elements(w) * (double)dtype_size(w.dtype); }
static double grad_bytes(Mat w) { return 2 * mat_elements(w) * (double)timed.b->grad_size; }
static double stat_bytes(double n) { return n * (double)timed.b->stat_size; }
static double attention_products(Attn a) { // multiply-adds of one of its products, causal
    return (double)a.B * a.n_heads * a.head_dim * a.T * (a.T + 1) / 2;
}

/* TIMED(op, its parameters, its arguments, FLOPs, elements of activations moved, other bytes). The
   device's queue is empty when the clock is read, before and after; what the counts take from the
   device comes later. */
#define TIMED(op, parameters, arguments, flop, elements, bytes)                                    \
    static void timed_##op parameters {                                                            \
        timed.b->sync();                                                                           \
        const double since = now_s();                                                              \
        timed.b->op arguments;                                                                     \
        timed.b->sync();                                                                           \
        const double seconds = now_s() - since;                                                    \
        op_done(OP_##op, seconds, flop, (double)(elements) * (double)timed.b->act_size + (bytes)); \
    }

TIMED(zero, (void *p, size_t n), (p, n), 0, 0, (double)n)
TIMED(embedding_forward, (act_t * out, const int *tokens, Mat wte, int N), (out, tokens, wte, N), 0,
    2.0 * N * wte.cols, 0)
TIMED(embedding_backward,
    (grad_t * dwte, const act_t *dout, const int *tokens, int N, int V, int C, void *scratch),
    (dwte, dout, tokens, N, V, C, scratch), 0, (double)N *C,
    2.0 * N * C * (double)timed.b->grad_size)
TIMED(rmsnorm_forward,
    (act_t * out, stat_t *rstd, const act_t *inp, const param_t *weight, int N, int C, double eps),
    (out, rstd, inp, weight, N, C, eps), 0, 2.0 * N * C, 0)
TIMED(residual_rmsnorm_forward,
    (act_t * sum, act_t *out, stat_t *rstd, const act_t *inp, const act_t *branch,
        const param_t *weight, int N, int C, double eps),
    (sum, out, rstd, inp, branch, weight, N, C, eps), 0, 4.0 * N * C, 0)
TIMED(rmsnorm_backward,
    (act_t * dinp, grad_t *dweight, const act_t *dout, const act_t *inp, const stat_t *rstd,
        const param_t *weight, int N, int C, void *scratch),
    (dinp, dweight, dout, inp, rstd, weight, N, C, scratch), 0, 4.0 * N * C, 0)
TIMED(linear_forward, (act_t * out, const act_t *inp, Mat w, int N, void *scratch),
    (out, inp, w, N, scratch), 2.0 * N * w.rows * w.cols, (double)N *(w.rows + w.cols),
    mat_bytes(w))
TIMED(linear_backward,
    (act_t * dinp, grad_t *dweight, const act_t *dout, const act_t *inp, Mat w, int N,
        int accumulate, void *scratch),
    (dinp, dweight, dout, inp, w, N, accumulate, scratch), (dinp ? 4.0 : 2.0) * N * w.rows * w.cols,
    (double)N *(w.rows + (dinp ? 2 : 1) * w.cols), (dinp ? mat_bytes(w) : 0) + grad_bytes(w))
TIMED(qk_rope_forward,
    (act_t * q, act_t *k, act_t *v, stat_t *rstd, const act_t *qkv, const param_t *q_weight,
        const param_t *k_weight, const stat_t *rope, Attn a),
    (q, k, v, rstd, qkv, q_weight, k_weight, rope, a), 0,
    2.0 * a.B * a.T * a.head_dim * (a.n_heads + 2 * a.n_kv_heads), 0)
TIMED(qk_rope_backward,
    (act_t * dqkv, grad_t *dq_weight, grad_t *dk_weight, const act_t *dq, const act_t *dk,
        const act_t *dv, const act_t *qkv, const stat_t *rstd, const param_t *q_weight,
        const param_t *k_weight, const stat_t *rope, Attn a, void *scratch),
    (dqkv, dq_weight, dk_weight, dq, dk, dv, qkv, rstd, q_weight, k_weight, rope, a, scratch), 0,
    3.0 * a.B * a.T * a.head_dim * (a.n_heads + 2 * a.n_kv_heads), 0)
TIMED(attention_forward,
    (act_t * out, stat_t *lse, const act_t *q, const act_t *k, const act_t *v, Attn a,
        void *scratch),
    (out, lse, q, k, v, a, scratch), 4 * attention_products(a),
    2.0 * a.B * a.T * a.head_dim * (a.n_heads + a.n_kv_heads), 0)
TIMED(attention_backward,
    (act_t * dq, act_t *dk, act_t *dv, const act_t *dout, const act_t *out, const stat_t *lse,
        const act_t *q, const act_t *k, const act_t *v, Attn a, void *scratch),
    (dq, dk, dv, dout, out, lse, q, k, v, a, scratch), 10 * attention_products(a),
    4.0 * a.B * a.T * a.head_dim * (a.n_heads + a.n_kv_heads), 0)
TIMED(router_forward,
    (stat_t * logits, stat_t *lse, int *idx, stat_t *weight, int *count, stat_t *loss_sum,
        int *count_sum, stat_t *sums, const act_t *X, Mat Wr, const stat_t *bias, Router r,
        int reuse, StepState *st, int layer, void *scratch),
    (logits, lse, idx, weight, count, loss_sum, count_sum, sums, X, Wr, bias, r, reuse, st, layer,
        scratch),
    2.0 * r.N * r.E * r.C, (double)r.N *r.C, stat_bytes((double)r.N *r.E) + mat_bytes(Wr))
TIMED(router_backward,
    (act_t * dX, grad_t *dWr, const stat_t *dS, const Plan *p, const stat_t *logits,
        const stat_t *lse, const int *idx, const stat_t *weight, const int *count, const act_t *X,
        Mat Wr, Router r, void *scratch),
    (dX, dWr, dS, p, logits, lse, idx, weight, count, X, Wr, r, scratch), 4.0 * r.N * r.E * r.C,
    3.0 * r.N * r.C, stat_bytes((double)r.N *r.E) + mat_bytes(Wr) + grad_bytes(Wr))
TIMED(plan_topk,
    (Plan * p, const int *idx, const stat_t *weight, const int *count, int N, int K, int E,
        void *scratch),
    (p, idx, weight, count, N, K, E, scratch), 0, 0, 24.0 * N * K)
TIMED(plan_select,
    (Plan * p, int *moved, const int *idx, const stat_t *weight, const int *count,
        const stat_t *logits, const stat_t *lse, Router r, int reuse, void *scratch),
    (p, moved, idx, weight, count, logits, lse, r, reuse, scratch), 0, 0,
    stat_bytes((double)r.N *r.E) + 24.0 * r.N * r.K)
TIMED(expert_up_forward,
    (act_t * H, act_t *A, const act_t *X, Mat W1, const Plan *p, void *scratch),
    (H, A, X, W1, p, scratch), 2 * slots_now(p) * W1.rows * W1.cols,
    (double)p->rows *W1.cols + slots_now(p) * (W1.rows + (A ? W1.rows / 2 : 0)), mat_bytes(W1))
TIMED(expert_down_forward,
    (act_t * out, const act_t *H, const act_t *A, Mat W2, const Plan *p, int accumulate,
        void *scratch),
    (out, H, A, W2, p, accumulate, scratch), 2 * slots_now(p) * W2.rows * W2.cols,
    (double)p->rows *W2.rows + slots_now(p) * (A ? 1 : 2) * W2.cols, mat_bytes(W2))
TIMED(expert_down_backward,
    (act_t * dH, act_t *sA, stat_t *dS, grad_t *dW2, const act_t *dout, const act_t *H, Mat W2,
        const Plan *p, int fresh, void *scratch),
    (dH, sA, dS, dW2, dout, H, W2, p, fresh, scratch), 4 * slots_now(p) * W2.rows * W2.cols,
    (double)p->rows *W2.rows + 6 * slots_now(p) * W2.cols,
    mat_bytes(W2) + grad_bytes(W2) / (1 + !!fresh))
TIMED(expert_up_backward,
    (act_t * dX, grad_t *dW1, const act_t *dH, const act_t *X, Mat W1, const Plan *p,
        int accumulate, int fresh, void *scratch),
    (dX, dW1, dH, X, W1, p, accumulate, fresh, scratch), 4 * slots_now(p) * W1.rows * W1.cols,
    2.0 * p->rows * W1.cols + slots_now(p) * W1.rows,
    mat_bytes(W1) + grad_bytes(W1) / (1 + !!fresh))
TIMED(classifier,
    (stat_t * losses, act_t *dinp, grad_t *dw, const act_t *inp, Mat w, const int *targets, int N,
        double scale, void *scratch),
    (losses, dinp, dw, inp, w, targets, N, scale, scratch),
    (dinp ? 6.0 : 2.0) * N * w.rows * w.cols, (dinp ? 2.0 : 1.0) * N * w.cols,
    mat_bytes(w) + (dinp ? grad_bytes(w) : 0))
TIMED(reduce_loss, (StepState * st, const stat_t *losses, int N, double scale),
    (st, losses, N, scale), 0, 0, stat_bytes(N))
static double elements_of(const Segment *seg, int n) {
    Segment *host = malloc((size_t)n * sizeof *host);
    double total = 0;
    if (!host) die(RUN_ERROR, "no memory for bench");
    timed.b->to_host(host, seg, (size_t)n * sizeof *host);
    for (int i = 0; i < n; i++) total += (double)host[i].count;
    free(host);
    return total;
}
TIMED(grad_norm,
    (StepState * st, const grad_t *grads, const Segment *seg, int nseg, double max_norm,
        void *scratch),
    (st, grads, seg, nseg, max_norm, scratch), 0, 0,
    elements_of(seg, nseg) * (double)timed.b->grad_size)
// AdamW reads parameter, gradient and two moments and writes three of them; SGD has no moments
TIMED(update,
    (param_t * params, const grad_t *grads, grad_t *m, grad_t *v, const Segment *seg, int nseg,
        const StepState *st, OptimConfig o),
    (params, grads, m, v, seg, nseg, st, o), 0, 0,
    elements_of(seg, nseg) *
        (2.0 * (double)timed.b->param_size + (o.sgd ? 1.0 : 5.0) * (double)timed.b->grad_size))
TIMED(update_bias, (stat_t * bias, const int *count_sum, int E, double rate, const StepState *st),
    (bias, count_sum, E, rate, st), 0, 0, 12.0 * E)
#undef TIMED

static const Backend *timed_backend(const Backend *b) {
    static Backend t;
    memset(&timed, 0, sizeof timed);
    timed.b = b;
    t = *b;
#define STAND_BEFORE(op) t.op = timed_##op;
    BENCH_OPS(STAND_BEFORE)
#undef STAND_BEFORE
    return &t;
}

// -------------------------------------------------------------------------------------------------
// a model that is stepped

typedef struct Stepper {
    Model m;
    OptimConfig optim;
    int *x, B, T;
    int64_t step;
    double forward, backward, update; // seconds of the last step
} Stepper;

// What a model of these options needs; says what to lower where there is less.
static void stepper_open(Stepper *s, const Options *o, const Backend *b) {
    const size_t N = (size_t)o->batch * o->c.seq_len;
    Err err;
    memset(s, 0, sizeof *s);
    if (config_check(&o->c, &err)) die(USER_ERROR, "%s", err.text);
    model_plan(&s->m, &o->c, b, train_shape(o));
    check_memory(b, (double)model_bytes(&s->m), "lower --batch, --seq or the size of the model");
    model_free(&s->m);
    model_build(&s->m, &o->c, b, train_shape(o), NULL);
    model_init(&s->m, 1);
    set_coefficients(&s->m, o);
    s->B = o->batch, s->T = o->c.seq_len;
    s->x = malloc(2 * N * sizeof *s->x);
    if (!s->x) die(RUN_ERROR, "no memory");
    for (size_t i = 0; i < 2 * N; i++)
        s->x[i] = (int)(counter_hash(7, 0, i) % (uint64_t)o->c.vocab_size);
    const OptimConfig optim = {
        o->beta1, o->beta2, 1e-8, o->weight_decay, o->grad_clip, o->optimizer};
    s->optim = optim;
}
static void stepper_close(Stepper *s) {
    free(s->x);
    model_free(&s->m);
}

/* One training step. lr 0 where it is given so: the weights, and with them the load of the experts,
   stay as they were. */
static void stepper_run(Stepper *s, double lr) {
    const int N = s->B * s->T;
    s->m.b->sync();
    const double t0 = now_s();
    model_begin_step(&s->m, ++s->step, lr, &s->optim);
    model_set_tokens(&s->m, s->x, s->x + N, N);
    model_forward(&s->m, s->B, s->T, 0, 1);
    s->m.b->sync();
    const double t1 = now_s();
    model_backward(&s->m, s->B, s->T, 1.0 / N, 1);
    s->m.b->sync();
    const double t2 = now_s();
    model_update(&s->m, &s->optim);
    s->m.b->sync();
    s->forward = t1 - t0, s->backward = t2 - t1, s->update = now_s() - t2;
    if (model_state(&s->m).bad) die(RUN_ERROR, "bench: a step that is not finite");
}
static double stepper_seconds(const Stepper *s) { return s->forward + s->backward + s->update; }

// Multiply-adds of a step: 6 x active parameters a token; and attention's beside it.
static double step_flops(const Stepper *s, double *attention) {
    double total, active;
    const double N = (double)s->B * s->T;
    count_parameters(&s->m.table, &s->m.c, &total, &active);
    *attention = 3 * attention_flops(&s->m.c) * N;
    return 6 * active * N;
}

// -------------------------------------------------------------------------------------------------
// the machine

/* Seconds of one of many equal calls, `run` doing n of them: as many in the queue at a time as last
   some milliseconds, so that the start of one, microseconds on a GPU, hides behind another. */
typedef struct Repeated {
    const Backend *b;
    char *a;
    size_t count; // elements, or rows of a product
    Mat w;
    void *scratch;
    char *out;
    const Plan *plan; // of a grouped product
} Repeated;
static double seconds_of(void (*run)(const Repeated *r, int n), const Repeated *r, int n) {
    r->b->sync();
    const double t = now_s();
    run(r, n);
    r->b->sync();
    return (now_s() - t) / n;
}
static double seconds_each(void (*run)(const Repeated *r, int n), const Repeated *r, int runs) {
    enum { MOST = 32 };
    double s[MOST];
    run(r, 1); // warm
    const double once = seconds_of(run, r, 1);
    const int n = once > 5e-3 ? 1 : once > 5e-6 ? (int)(5e-3 / once) : 1000;
    for (int i = 0; i < runs; i++) s[i] = seconds_of(run, r, n);
    return median(s, runs);
}

static void products(const Repeated *r, int n) {
    for (int i = 0; i < n; i++) r->b->linear_forward(r->out, r->a, r->w, (int)r->count, r->scratch);
}
// GFLOP/s of one product of n^3
static double product_rate(const Backend *b, int n, int runs) {
    const size_t square = (size_t)n * n;
    const Config c = {
        1, n, 1, n, 1, 1, 2, 1, 1, n, 0, 0, n, QK_NORM_NONE, ROUTER_SOFTMAX, 0, 0, 1e4, 1e-6};
    const ScratchShape shape = {1, n, n, n, 0, 0, 0};
    char *a = b->alloc(2 * square * b->act_size), *w = b->alloc(square * b->mat_size);
    void *scratch = b->alloc(b->scratch_bytes(&c, &shape));
    double *row = calloc(square, sizeof *row);
    if (!a || !w || !scratch || !row) die(RUN_ERROR, "no memory for bench");
    for (size_t i = 0; i < square; i++) row[i] = counter_uniform(1, 2, i) - 0.5;
    host_to(b, b->act_type, a, row, square);
    for (size_t i = 0; i < square; i++) row[i] = counter_uniform(1, 3, i) - 0.5;
    host_to(b, b->mat_type, w, row, square);
    const Repeated r = {b, a, (size_t)n, {w, b->mat_type, NULL, 1, n, n, n, 0}, scratch,
        a + square * b->act_size, NULL};
    const double s = seconds_each(products, &r, runs);
    free(row);
    b->release(a);
    b->release(w);
    b->release(scratch);
    return 2.0 * n * n * n / s / 1e9;
}

static void sums(const Repeated *r, int n) {
    const size_t size = r->count * r->b->act_size;
    for (int i = 0; i < n; i++) r->b->add(r->out, r->a, r->a + size, r->count);
}
// GB/s of out = a + b over `count` elements, far more than a cache holds: two read, one written
static double bandwidth(const Backend *b, size_t count, int runs) {
    const size_t size = count * b->act_size;
    char *a = b->alloc(3 * size);
    if (!a) die(RUN_ERROR, "no memory for bench");
    b->zero(a, 3 * size);
    const Repeated r = {
        b, a, count, {NULL, b->act_type, NULL, 0, 0, 0, 0, 0}, NULL, a + 2 * size, NULL};
    const double s = seconds_each(sums, &r, runs);
    b->release(a);
    return 3.0 * (double)size / s / 1e9;
}

/* emulated: a device that shows what is computed and not how fast, a thousand times slower; its
   tables are only to have every line. */
static json_t *bench_machine(const Backend *b, int emulated) {
    const double peak = b->peak(emulated ? 0.01 : 0.3);
    const int n = emulated ? 64 : 1024;
    return json_pack("{s:s, s:s, s:i, s:f, s:f, s:i, s:f}", "device", b->name, "dtype",
        dtype_word(b), "threads", thread_max(), "peak_gflops", peak, "bandwidth_gbs",
        bandwidth(b, emulated ? 1 << 14 : (size_t)32 << 20, emulated ? 1 : 7), "product_size", n,
        "product_gflops", product_rate(b, n, emulated ? 1 : 15));
}
static double number(const json_t *j, const char *key) {
    return json_number_value(json_object_get(j, key));
}
static void print_machine(const json_t *j) {
    const double peak = number(j, "peak_gflops"), product = number(j, "product_gflops");
    printf("peak         %.1f GFLOP/s (independent %s multiply-adds)\n", peak,
        json_string_value(json_object_get(j, "dtype")));
    printf("bandwidth    %.1f GB/s (a sum of two arrays: read, read, write)\n",
        number(j, "bandwidth_gbs"));
    printf("product      %.1f GFLOP/s, %.1f%% of the peak (%.0f^3)\n", product,
        100 * product / peak, number(j, "product_size"));
}

// -------------------------------------------------------------------------------------------------
// operations and steps

/* Each operation's medians over steps. An operation that is called for each layer counts as their
   sum. */
static json_t *bench_operations(Stepper *s, double peak) {
    enum { STEPS = 5 };
    static const char *const names[] = {
#define NAME_OP(op) #op,
        BENCH_OPS(NAME_OP)
#undef NAME_OP
    };
    const Backend *b = s->m.b;
    double seconds[N_OPS][STEPS];
    json_t *list = json_array();
    s->m.b = timed_backend(b);
    for (int i = -1; i < STEPS; i++) {
        memset(timed.op, 0, sizeof timed.op);
        stepper_run(s, 1e-4);
        for (int k = 0; k < N_OPS && i >= 0; k++) seconds[k][i] = timed.op[k].s;
    }
    for (int k = 0; k < N_OPS; k++) {
        const OpTime *t = &timed.op[k];
        if (!t->calls) continue;
        const double sec = median(seconds[k], STEPS);
        json_array_append_new(list,
            json_pack("{s:s, s:i, s:f, s:f, s:f, s:f}", "name", names[k], "calls", t->calls, "ms",
                1e3 * sec, "gflops", t->flop / sec / 1e9, "gbs", t->bytes / sec / 1e9, "share",
                t->flop / sec / 1e9 / peak));
    }
    s->m.b = b;
    return list;
}
static void print_operations(const json_t *list, const char *device) {
    double all = 0, busy = 0, gflop = 0, share = 0; // of the experts' products, or a dense MLP's
    size_t i;
    const json_t *x;
    char title[96];
    snprintf(title, sizeof title, "operation on %s", device);
    json_array_foreach((json_t *)(uintptr_t)list, i, x) all += number(x, "ms");
    printf("\n%-26s %5s %9s %6s %9s %7s %6s\n", title, "calls", "ms", "time", "GFLOP/s", "GB/s",
        "peak");
    json_array_foreach((json_t *)(uintptr_t)list, i, x) {
        const double ms = number(x, "ms"), gflops = number(x, "gflops");
        const char *name = json_string_value(json_object_get(x, "name"));
        if (!strncmp(name, "expert_", 7))
            busy += ms, gflop += ms * gflops, share += ms * number(x, "share");
        printf("%-26s %5.0f %9.2f %5.1f%% ", name, number(x, "calls"), ms, 100 * ms / all);
        if (gflops > 0)
            printf("%9.1f %7.1f %5.1f%%\n", gflops, number(x, "gbs"), 100 * number(x, "share"));
        else
            printf("%9s %7.1f\n", "", number(x, "gbs"));
    }
    printf("%-26s %5s %9.2f %5.1f%% %9.1f %7s %5.1f%%\n", "expert products", "", busy,
        100 * busy / all, gflop / busy, "", 100 * share / busy);
}

/* Whole steps. The peak is measured again beside every step, so that a noisy machine moves both. */
static json_t *bench_steps(Stepper *s, double peak_seconds) {
    enum { STEPS = 9 };
    double part[3][STEPS], rate[STEPS], share[STEPS], peaks[STEPS], attention, total, active;
    const double flops = step_flops(s, &attention), N = (double)s->B * s->T;
    count_parameters(&s->m.table, &s->m.c, &total, &active);
    for (int i = -2; i < STEPS; i++) {
        stepper_run(s, 1e-4);
        if (i < 0) continue;
        part[0][i] = s->forward, part[1][i] = s->backward, part[2][i] = s->update;
        rate[i] = N / stepper_seconds(s);
        peaks[i] = s->m.b->peak(peak_seconds);
        share[i] = flops / stepper_seconds(s) / 1e9 / peaks[i];
    }
    const double r = median(rate, STEPS), of_peak = median(share, STEPS);
    return json_pack("{s:f, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "tokens", N,
        "steps", STEPS, "tok_per_s", r, "forward_ms", 1e3 * median(part[0], STEPS), "backward_ms",
        1e3 * median(part[1], STEPS), "update_ms", 1e3 * median(part[2], STEPS), "active", active,
        "gflops", flops / N * r / 1e9, "peak_beside_gflops", median(peaks, STEPS), "share", of_peak,
        "share_with_attention", of_peak * (flops + attention) / flops);
}
static void print_steps(const json_t *j, const char *device) {
    char buf[32];
    printf(
        "\nstep         forward %.1f ms, backward %.1f ms, update %.1f ms (medians of %.0f steps "
        "of %.0f tokens on %s)\n",
        number(j, "forward_ms"), number(j, "backward_ms"), number(j, "update_ms"),
        number(j, "steps"), number(j, "tokens"), device);
    printf("training     %s tok/s: %.1f GFLOP/s = 6 x %.2fM active x tok/s\n",
        human(number(j, "tok_per_s"), buf), number(j, "gflops"), number(j, "active") / 1e6);
    printf("             %.1f%% of the peak measured beside each step (%.1f GFLOP/s); %.1f%% with "
           "attention counted\n",
        100 * number(j, "share"), number(j, "peak_beside_gflops"),
        100 * number(j, "share_with_attention"));
}

// -------------------------------------------------------------------------------------------------
// cuBLAS

#ifdef HAVE_CUDA
static void grouped_products(const Repeated *r, int n) {
    for (int i = 0; i < n; i++)
        r->b->expert_up_forward(r->out, NULL, r->a, r->w, r->plan, r->scratch);
}
static json_t *beside_cublas(
    const char *name, double rows, double cols, double depth, double own, double theirs) {
    return json_pack("{s:s, s:f, s:f, s:f, s:f, s:f, s:f}", "name", name, "rows", rows, "cols",
        cols, "depth", depth, "own_gflops", own, "cublas_gflops", theirs, "ratio", own / theirs);
}
#endif

/* Our products beside those of cuBLAS, after a step of the model: the one that makes q, k and v; a
   large square one; and the first of the experts, as the step routed it. For that one cuBLAS
   multiplies as many rows by the matrix of one expert: no group ends within a tile, no row is
   gathered. NULL where there is no cuBLAS. */
static json_t *bench_cublas(const Stepper *s, const Options *o) {
#ifdef HAVE_CUDA
    enum { RUNS = 15, SIDE = 4096 };
    const Model *m = &s->m;
    const Backend *b = m->b;
    const int last = m->c.n_layers - 1, N = s->B * s->T, C = m->c.d_model;
    const Layer *y = &m->layer[last];
    const char *why;
    double rate[2][3];
    int S = 0;
    char *rows = NULL;
    if (o->device != DEVICE_CUDA || !cuda_dense_cublas(1, &why)) return NULL;
    if (is_moe_layer(&m->c, last)) {
        b->to_host(&S, y->plan.offsets + y->plan.E, sizeof S);
        double *x = malloc((size_t)N * C * sizeof *x);
        rows = b->alloc((size_t)S * C * b->act_size);
        if (!x || !rows) die(RUN_ERROR, "no memory for bench");
        for (size_t i = 0; i < (size_t)N * C; i++) x[i] = counter_uniform(1, 4, i) - 0.5;
        for (int at = 0; at < S; at += N)
            host_to(b, b->act_type, rows + (size_t)at * C * b->act_size, x,
                (size_t)(S - at < N ? S - at : N) * C);
        free(x);
    }
    Mat expert = y->mlp.W1;
    expert.count = 1;
    const Repeated qkv = {b, y->ln1, (size_t)N, y->Wqkv, m->scratch, y->qkv, NULL},
                   own = {b, y->ln2, (size_t)N, y->mlp.W1, m->scratch, y->mlp.H, &y->plan},
                   whole = {b, rows, (size_t)S, expert, m->scratch, y->mlp.H, NULL};
    const double flop_qkv = 2.0 * N * C * y->Wqkv.rows, flop_up = 2.0 * S * C * expert.rows;
    for (int theirs = 0; theirs < 2; theirs++) {
        double *r = rate[theirs];
        cuda_dense_cublas(theirs, &why);
        r[0] = flop_qkv / seconds_each(products, &qkv, RUNS) / 1e9;
        r[1] = product_rate(b, SIDE, RUNS);
        r[2] = !S ? 0
                  : flop_up /
                seconds_each(theirs ? products : grouped_products, theirs ? &whole : &own, RUNS) /
                1e9;
    }
    cuda_dense_cublas(o->dense == DENSE_CUBLAS, &why);
    if (rows) b->release(rows);
    json_t *list = json_array();
    json_array_append_new(
        list, beside_cublas("linear, q k v", N, y->Wqkv.rows, C, rate[0][0], rate[1][0]));
    json_array_append_new(
        list, beside_cublas("linear, square", SIDE, SIDE, SIDE, rate[0][1], rate[1][1]));
    if (S)
        json_array_append_new(
            list, beside_cublas("experts, gate and up", S, expert.rows, C, rate[0][2], rate[1][2]));
    return list;
#else
    (void)s, (void)o;
    return NULL;
#endif
}
static void print_cublas(const json_t *list, const char *device) {
    char title[96];
    size_t i;
    const json_t *x;
    snprintf(title, sizeof title, "product on %s", device);
    printf("\n%-26s %7s %7s %7s %9s %9s %7s\n", title, "rows", "columns", "depth", "GFLOP/s",
        "cuBLAS", "ratio");
    json_array_foreach((json_t *)(uintptr_t)list, i, x)
        printf("%-26s %7.0f %7.0f %7.0f %9.1f %9.1f %7.3f\n",
            json_string_value(json_object_get(x, "name")), number(x, "rows"), number(x, "cols"),
            number(x, "depth"), number(x, "own_gflops"), number(x, "cublas_gflops"),
            number(x, "ratio"));
}

// -------------------------------------------------------------------------------------------------
// the MoE tax

typedef struct TaxShape {
    int experts, topk, width;
} TaxShape;

// A model with the same attention and other experts; E = 1: dense.
static Options with_experts(const Options *o, int experts, int topk, int width) {
    Options x = *o;
    x.c.n_experts = experts, x.c.top_k = topk, x.c.d_expert = width;
    x.c.d_shared = x.c.dense_layers = 0;
    return x;
}

/* Steps of the MoE and of the dense model of width K*I by turns, `runs` of each after one of warming
   up; the ratio of tokens/s, of whole steps and of forward and backward alone, is the median of the
   ratios of neighbours. */
static json_t *bench_tax(const Options *o, TaxShape t, int tokens, int runs) {
    enum { MOST = 32 };
    static Stepper moe, dense;
    double ratio[MOST], without[MOST], rate[MOST], rate_dense[MOST], up[MOST], up_dense[MOST];
    Options a = with_experts(o, t.experts, t.topk, t.width),
            b = with_experts(o, 1, 1, t.topk * t.width);
    a.batch = b.batch = at_least_one(tokens / o->c.seq_len);
    const double N = (double)a.batch * a.c.seq_len;
    stepper_open(&moe, &a, backend_of(o));
    stepper_open(&dense, &b, backend_of(o));
    for (int i = -1; i < runs; i++) {
        // the one that is first changes, so that a slower second half of a pair is nobody's
        stepper_run(i & 1 ? &dense : &moe, 1e-4);
        stepper_run(i & 1 ? &moe : &dense, 1e-4);
        if (i < 0) continue;
        rate[i] = N / stepper_seconds(&moe), rate_dense[i] = N / stepper_seconds(&dense);
        up[i] = moe.update, up_dense[i] = dense.update;
        ratio[i] = rate[i] / rate_dense[i];
        without[i] = (dense.forward + dense.backward) / (moe.forward + moe.backward);
    }
    stepper_close(&moe);
    stepper_close(&dense);
    return json_pack("{s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:i}", "experts",
        t.experts, "topk", t.topk, "width", t.width, "tokens", N, "tok_per_s", median(rate, runs),
        "dense_tok_per_s", median(rate_dense, runs), "ratio", median(ratio, runs),
        "ratio_forward_backward", median(without, runs), "update_ms", 1e3 * median(up, runs),
        "dense_update_ms", 1e3 * median(up_dense, runs), "runs", runs);
}
static void print_tax_head(const char *device) {
    printf("\nMoE tax on %s: tokens/s over those of the dense model of width K*I, steps by turns\n"
           "%-14s %7s %9s %9s %7s %12s %9s %9s\n",
        device, "E, K, I", "tokens", "tok/s", "dense", "ratio", "fwd+bwd only", "update", "dense");
}
static void print_tax(const json_t *j) {
    char name[64];
    snprintf(name, sizeof name, "%.0f, %.0f, %.0f", number(j, "experts"), number(j, "topk"),
        number(j, "width"));
    printf("%-14s %7.0f %9.0f %9.0f %7.3f %12.3f %6.1f ms %6.1f ms\n", name, number(j, "tokens"),
        number(j, "tok_per_s"), number(j, "dense_tok_per_s"), number(j, "ratio"),
        number(j, "ratio_forward_backward"), number(j, "update_ms"), number(j, "dense_update_ms"));
    fflush(stdout);
}

// -------------------------------------------------------------------------------------------------
// growth

/* Microseconds of forward and backward a token at each of n values of one size, by turns; and the
   fit log t = constant + power * log size. extra: what the model of each value must cost more than
   the first, in microseconds a token, by its router's products and its experts' weights; NULL:
   nothing. */
static json_t *bench_growth(const char *name, const Options *list, const double *size, int n,
    const double *extra, int runs) {
    enum { MOST = 8, RUNS = 32 };
    static Stepper s[MOST];
    double us[MOST][RUNS], x = 0, y = 0, xx = 0, xy = 0, first = 0;
    json_t *points = json_array();
    for (int i = -1; i < runs; i++)
        for (int k = 0; k < n; k++) {
            if (i < 0) stepper_open(&s[k], &list[k], backend_of(&list[k]));
            stepper_run(&s[k], 0);
            if (i >= 0) us[k][i] = 1e6 * (s[k].forward + s[k].backward) / ((double)s[k].B * s[k].T);
        }
    for (int k = 0; k < n; k++) {
        const double t = median(us[k], runs), lx = log(size[k]), ly = log(t);
        if (k == 0) first = t;
        x += lx, y += ly, xx += lx * lx, xy += lx * ly;
        json_array_append_new(points,
            json_pack("{s:f, s:f, s:f, s:f}", "size", size[k], "us_per_token", t, "over_first",
                t / first, "predicted", (first + (extra ? extra[k] : 0)) / first));
        stepper_close(&s[k]);
    }
    return json_pack("{s:s, s:o, s:f, s:b}", "of", name, "points", points, "power",
        (n * xy - x * y) / (n * xx - x * x), "predicts", extra != NULL);
}
static void print_growth(const json_t *j) {
    size_t i;
    const json_t *p;
    const int predicts = json_is_true(json_object_get(j, "predicts"));
    printf("%-14s", json_string_value(json_object_get(j, "of")));
    json_array_foreach(json_object_get(j, "points"), i, p) {
        printf("  %.0f: %.1f us (%.3f", number(p, "size"), number(p, "us_per_token"),
            number(p, "over_first"));
        if (predicts) printf(", predicted %.3f", number(p, "predicted"));
        putchar(')');
    }
    printf("  ~ size^%.3f\n", number(j, "power"));
    fflush(stdout);
}

// How many of n models fit into memory together.
static int fitting(const Options *list, int n) {
    double need = 0;
    for (int k = 0; k < n; k++) {
        Model m;
        model_plan(&m, &list[k].c, backend_of(&list[k]), train_shape(&list[k]));
        need += (double)model_bytes(&m);
        model_free(&m);
        if (need < 0.9 * memory_of(backend_of(&list[k]))) continue;
        warn("bench: only %d of %d sizes fit into memory", k, n);
        return k;
    }
    return n;
}

static void growth(
    const Options *o, const json_t *machine, json_t *all, int say, const char *device) {
    enum { MOST = 8, GROWN_TOPK = 8, GROWN_WIDTH = 128 };
    const int tokens[] = {4096, 16384, 65536}, layers[] = {2, 4, 6, 8}, width[] = {192, 384, 768},
              experts[] = {8, 16, 32, 64, 128, 256};
    Options list[MOST];
    double size[MOST], extra[MOST];
    json_t *j;
    if (say)
        printf("\ngrowth on %s: forward and backward a token, over the first value; fitted power\n",
            device);
#define GROWTH(what, values, runs, set, predicted)                                         \
    for (size_t k = 0; k < sizeof values / sizeof *values; k++) {                          \
        list[k] = *o;                                                                      \
        size[k] = values[k];                                                               \
        Options *x = &list[k];                                                             \
        set;                                                                               \
    }                                                                                      \
    j = bench_growth(                                                                      \
        what, list, size, fitting(list, sizeof values / sizeof *values), predicted, runs); \
    if (say) print_growth(j);                                                              \
    json_array_append_new(all, j);
    GROWTH("tokens a step", tokens, 3, x->batch = at_least_one(tokens[k] / o->c.seq_len), NULL)
    GROWTH("layers", layers, 5, x->c.n_layers = layers[k], NULL)
    GROWTH("width", width, 5,
        (x->c.d_model = width[k], x->c.d_expert = o->c.d_expert * width[k] / o->c.d_model,
            x->c.n_heads = x->c.n_kv_heads = at_least_one(width[k] / o->c.head_dim)),
        NULL)
    const double N = (double)o->batch * o->c.seq_len, L = o->c.n_layers, C = o->c.d_model;
    for (size_t k = 0; k < sizeof experts / sizeof *experts; k++) {
        const double more = experts[k] - experts[0];
        extra[k] = 1e6 *
            (6 * more * C * L / (number(machine, "peak_gflops") * 1e9) +
                16 * more * 3 * C * GROWN_WIDTH * L / (number(machine, "bandwidth_gbs") * 1e9) / N);
    }
    GROWTH("experts", experts, 5, *x = with_experts(o, experts[k], GROWN_TOPK, GROWN_WIDTH), extra)
#undef GROWTH
}

// -------------------------------------------------------------------------------------------------

static void command_bench(Options *o) {
    static const TaxShape shapes[] = {
        {8, 2, 512}, {16, 4, 256}, {32, 8, 128}, {64, 8, 128}, {128, 8, 128}};
    static const int tokens[] = {4096, 16384};
    enum { RUNS = 5 };
    const int say = !o->json;
    static Stepper s;
    json_t *root = json_object(), *j;
    if (!root) die(RUN_ERROR, "no memory");
    const Backend *b = backend_of(o);
    const int emulated = o->device == DEVICE_EMULATED;
    char device[64];
    device_words(o, device);
    if (say) printf("device       %s, %d threads\n", device, thread_max());
    if (emulated) warn("bench: the emulated device shows what is computed, not how fast");
    open_vocab_size(o);
    stepper_open(&s, o, b);
    if (say) print_model(&s.m, stdout);
    json_t *machine = bench_machine(b, emulated);
    if (say) print_machine(machine);
    fflush(stdout);
    json_object_set_new(root, "machine", machine);
    json_object_set_new(
        root, "operations", j = bench_operations(&s, number(machine, "peak_gflops")));
    if (say) print_operations(j, device);
    fflush(stdout);
    json_object_set_new(root, "step", j = bench_steps(&s, emulated ? 0.01 : 0.2));
    if (say) print_steps(j, device);
    fflush(stdout);
    if ((j = bench_cublas(&s, o))) {
        json_object_set_new(root, "cublas", j);
        if (say) print_cublas(j, device);
        fflush(stdout);
    }
    stepper_close(&s);
    if (o->tax) {
        json_t *all = json_array();
        if (say) print_tax_head(device);
        for (size_t n = 0; n < sizeof tokens / sizeof *tokens; n++)
            for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
                json_array_append_new(all, j = bench_tax(o, shapes[i], tokens[n], RUNS));
                if (say) print_tax(j);
            }
        json_object_set_new(root, "tax", all);
    }
    if (o->growth) {
        json_t *all = json_array();
        growth(o, machine, all, say, device);
        json_object_set_new(root, "growth", all);
    }
    if (o->json) {
        json_dumpf(root, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
        putchar('\n');
    }
    json_decref(root);
}

#endif
