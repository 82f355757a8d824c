/* test_diff.h: one operation at a time, on any device, held against the double reference. Part of
   test_moe.c.

     ./test_moe diff [--op NAME] [--dtype fp32|bf16] [--device cpu|cuda|emulated] [--seed N]
                     [--shape KEY=VAL,...] [--with FILE] [--stop] [--list]

   prints a line for every operation, shape and tensor: the relative Frobenius error, the largest
   absolute error and where it is, the limit, the time of the operation. It exits with 0, 1 if one
   is beyond its limit, 2 for a flag that is wrong. --with compiles a file that exports one
   operation under its name in Backend, and puts its lines beside those of the built-in one. --stop
   ends it at the first line that fails.

   The operations and their steps are those of test_ops.h, in variants (norms, routers, plans that
   drop slots, decoding with a cache, the optimisers): a family is a function that makes all
   variants of a few operations for one shape. A step starts from what the reference left, rounded
   to the types of the device; so an error is that of one operation. Nothing may be written beside
   an array, into an input, or where the contract leaves an element alone; and a second run, with
   other threads or in another order of them, must give the same bits.

   In order: shapes; the comparison; families; devices; a file beside the built-in; the command;
   the same as tests. To add a variant, add it to its family; an operation, to OPERATIONS too. */
#ifndef TEST_DIFF_H
#define TEST_DIFF_H

#include <dlfcn.h>
#include <fcntl.h>
#include <getopt.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef HAVE_EMULATED
extern void emulated_seed(uint64_t seed); // the order in which the emulated device's threads run
#endif

// -------------------------------------------------------------------------------------------------
// shapes

typedef struct Shape {
    const char *name;
    int B, T, V, C, heads, kv, hd, E, K, I;
    int few; // experts that are given tokens, where the choice is given
} Shape;
// The first are small; of these the sanitizers, slow with fibers, see a few.
enum { SANITIZED_SHAPES = 4, SMALL_SHAPES = 8, RANDOM_SHAPES = 20 };
static const Shape shapes[] = {
    {"plain", 2, 9, 37, 24, 4, 2, 6, 5, 2, 11, 5},
    {"empty-expert", 2, 7, 31, 20, 2, 2, 8, 6, 2, 9, 4},
    {"all-to-one", 1, 12, 17, 16, 2, 1, 4, 4, 1, 7, 1},
    {"one-token", 1, 1, 19, 12, 2, 1, 6, 4, 2, 5, 4},
    {"E64-K8-I32", 2, 20, 33, 48, 2, 1, 8, 64, 8, 32, 64},
    {"off-every-tile", 3, 23, 101, 67, 3, 3, 22, 7, 3, 37, 7},
    {"T1", 5, 1, 23, 18, 4, 2, 6, 3, 2, 13, 3},
    {"one-kv-head", 2, 11, 29, 40, 6, 1, 10, 4, 4, 6, 4},
    {"tiles", 1, 160, 192, 128, 4, 2, 32, 4, 2, 104, 4},         // more than one of 64 and of 128
    {"tiles-and-more", 2, 150, 130, 128, 2, 1, 64, 5, 2, 64, 5}, // and every group is large
    {"many-rows", 61, 42, 300, 4, 1, 1, 2, 5, 4, 3, 5}, // sorts of many blocks, two digits of ids
    {"many-weights", 1, 2, 4, 64, 1, 1, 4, 64, 1, 64, 64}, // more pieces than blocks
    {"wide-heads", 1, 66, 11, 10, 2, 1, 136, 3, 2, 4, 3},  // dK and dV in strips
    {"heads-of-128", 1, 66, 11, 10, 2, 1, 128, 3, 2, 4, 3},
};

static uint64_t shape_draws;
static int between(uint64_t seed, int least, int most) {
    return least + (int)(counter_hash(20, seed, shape_draws++) % (uint64_t)(most - least + 1));
}
static Shape random_shape(uint64_t seed, int which, char name[24]) {
    Shape s = {.name = name};
    snprintf(name, 24, "random-%d", which + 1);
    shape_draws = (uint64_t)which << 8;
    s.T = between(seed, 1, which % 2 ? 100 : 20);
    s.B = between(seed, 1, 200 / s.T < 8 ? 200 / s.T : 8);
    s.V = between(seed, 2, 90);
    s.C = between(seed, 3, 96);
    s.kv = between(seed, 1, 3);
    s.heads = s.kv * between(seed, 1, 3);
    s.hd = 2 * between(seed, 1, 20);
    s.E = between(seed, 2, 12);
    s.K = between(seed, 1, s.E < 4 ? s.E : 4);
    s.I = between(seed, 1, 48);
    s.few = between(seed, s.K, s.E);
    return s;
}

// The built-in shapes, then the random ones. name: where a random one's is kept.
static Shape shape_at(uint64_t seed, size_t i, char name[24]) {
    return i < COUNT(shapes) ? shapes[i] : random_shape(seed, (int)(i - COUNT(shapes)), name);
}

// -------------------------------------------------------------------------------------------------
// the comparison

#define OPERATIONS(X)           \
    X(params_changed)           \
    X(embedding_forward)        \
    X(embedding_backward)       \
    X(rmsnorm_forward)          \
    X(residual_rmsnorm_forward) \
    X(rmsnorm_backward)         \
    X(add)                      \
    X(linear_forward)           \
    X(linear_backward)          \
    X(qk_rope_forward)          \
    X(qk_rope_backward)         \
    X(attention_forward)        \
    X(attention_backward)       \
    X(router_forward)           \
    X(router_balance)           \
    X(router_backward)          \
    X(plan_topk)                \
    X(plan_select)              \
    X(plan_part)                \
    X(plan_items)               \
    X(plan_merge)               \
    X(plan_unmerge)             \
    X(scatter)                  \
    X(copy_rows)                \
    X(sum_rows)                 \
    X(expert_up_forward)        \
    X(expert_down_forward)      \
    X(expert_down_backward)     \
    X(expert_up_backward)       \
    X(classifier)               \
    X(reduce_loss)              \
    X(grad_norm)                \
    X(clip_norm)                \
    X(update)                   \
    X(update_bias)
typedef void (*AnyFunction)(void);
static const struct {
    const char *name;
    size_t at; // of its pointer in Backend
} operations[] = {
#define ENTRY(op) {#op, offsetof(Backend, op)},
    OPERATIONS(ENTRY)
#undef ENTRY
};
enum { N_OPERATIONS = COUNT(operations) };
// a new operation of Backend must be entered above
_Static_assert(
    sizeof(Backend) - offsetof(Backend, params_changed) == N_OPERATIONS * sizeof(AnyFunction),
    "an operation of Backend is missing in OPERATIONS");

static AnyFunction operation_of(const Backend *b, int op) {
    AnyFunction f;
    memcpy(&f, (const char *)b + operations[op].at, sizeof f);
    return f;
}

static struct Diff {
    const Backend *dev, *with; // with: a contributor's operation, or NULL
    const char *with_name;
    void (*with_seed)(uint64_t); // emulated_seed of its own copy of cuda_cpu.h
    const char *op, *shape;      // of the lines that are wanted now
    uint64_t seed;
    int print, stop, lines, failed; // stop: at the first failure
} diff;

static const char *dtype_name(const Backend *b) { return b->act_type == BF16 ? "bf16" : "fp32"; }

/* What a step may be off by. A bf16 device rounds what it stores, and what its products read; the
   router, the losses and the optimiser are float everywhere. A whole number is right or wrong, and
   so is a value that is moved. */
static double limit_of(const Op *o, const Step *s, Kind kind) {
    static const char *const moves[] = {
        "params_changed", "plan_part", "plan_merge", "plan_unmerge", "scatter", "copy_rows"};
    int rounds = 0;
    for (int i = 0; i < s->uses; i++) rounds |= o->array[s->use[i].array].kind <= MATRIX;
    for (size_t i = 0; i < COUNT(moves); i++)
        if (!strcmp(s->name, moves[i])) return 0;
    if (kind == INTS) return 0;
    return rounds && o->dev->act_type == BF16 && strcmp(s->name, "router_forward") != 0 ? 8e-3
                                                                                        : 1e-5;
}

typedef struct Line {
    double error, worst; // relative Frobenius; largest absolute, at element `at`
    size_t at;
    const char *why; // beyond its limit, or what else is wrong; NULL: it passes
} Line;

// Numbers that are not alike: of a StepState each counts alone. Nothing is worse than NaN.
static void compare_state(Line *l, const double *x, const double *ref) {
    for (size_t i = 0; i < STATE_VALUES && !isnan(l->error); i++) {
        if (x[i] == ref[i] || (isnan(x[i]) && isnan(ref[i]))) continue;
        const double d = fabs(x[i] - ref[i]), e = i < 3 ? INFINITY : d / fabs(ref[i]);
        if (!(e <= l->error)) l->error = e, l->worst = d, l->at = i;
    }
}

/* x against ref. again: what a second run left. size: of the numbers that go into ref; where they
   cancel in it, the error is measured by them. */
static Line compare(const Use *u, Kind kind, const double *x, const double *again,
    const double *ref, size_t n, double size, double limit) {
    Line l = {0, 0, 0, NULL};
    double diff2 = 0, norm2 = 0, seen = 0;
    for (size_t i = 0; i < n; i++) {
        if (unwritten(kind, ref[i])) {
            if (!u->loose && kind != STATE && !unwritten(kind, x[i]) && !l.why)
                l.at = i, l.why = "written where nothing may be";
            continue;
        }
        if (x[i] != again[i] && !(isnan(x[i]) && isnan(again[i])) && !l.why)
            l.at = i, l.why = "a second run gives other bits";
        const double d = fabs(x[i] - ref[i]);
        if (!(d <= l.worst) && !l.why) l.worst = d, l.at = i;
        diff2 += d * d, norm2 += ref[i] * ref[i], seen++;
    }
    const double norm = sqrt(norm2), scale = sqrt(seen) * size;
    if (kind == STATE)
        l.worst = 0, l.at = 0, compare_state(&l, x, ref);
    else if (diff2 != 0)
        l.error = sqrt(diff2) / (norm > 1e-12 * scale ? norm : scale);
    if (!l.why && !(l.error <= limit))
        l.why = isnan(l.error) ? "not a number"
            : kind == INTS     ? "not the same"
                               : "beyond its limit";
    return l;
}

static void report(const char *op, const char *variant, const char *tensor, const char *by, Line l,
    double limit, double ms) {
    diff.lines++;
    diff.failed += l.why != NULL;
    if (!diff.print) {
        check(!l.why, "%s %s: error %.2e at %zu (%.2e), limit %.0e: %s", variant, tensor, l.error,
            l.at, l.worst, limit, l.why);
        return;
    }
    printf("%-24s %-15s %-24s %-12s", op, diff.shape, variant, tensor);
    if (diff.with) printf(" %-14s", by);
    printf(" %8.1e %8.1e @%-7zu %5.0e %9.3f  %s%s\n", l.error, l.worst, l.at, limit, ms,
        l.why ? "FAIL: " : "ok", l.why ? l.why : "");
    if (l.why && diff.stop) {
        printf("%d lines, %d failed\n", diff.lines, diff.failed);
        exit(1);
    }
}

// root mean square of what was written
static double rms_of(Kind kind, const double *x, size_t n) {
    double s = 0, seen = 0;
    for (size_t i = 0; i < n; i++)
        if (!unwritten(kind, x[i]) && isfinite(x[i])) s += x[i] * x[i], seen++;
    return seen > 0 ? sqrt(s / seen) : 0;
}

// Another order of threads: what comes out must not depend on it.
static void vary(int run) {
    set_threads(run ? 1 : 3);
#ifdef HAVE_EMULATED
    emulated_seed(2 * diff.seed + (uint64_t)run);
#endif
    if (diff.with_seed) diff.with_seed(2 * diff.seed + (uint64_t)run);
}

// A choice whose values nobody can know is one all the same: K experts that there are, each once.
static const char *unsound(const Op *o, const double *idx) {
    const int K = o->c.top_k;
    for (size_t s = 0; s < (size_t)o->N * K; s++) {
        if (!(idx[s] >= 0 && idx[s] < o->c.n_experts)) return "an expert that there is not";
        for (size_t j = s / K * K; j < s; j++)
            if (idx[j] == idx[s]) return "an expert twice";
    }
    return NULL;
}

// One step on b, against what the reference made of the same values.
static void diff_step(const Op *o, const Step *s, const Backend *b, const char *by,
    double *const *v, const Ran *ref, const char *variant) {
    const int mark = pooled;
    double size = 0;
    Ran r[2];
    for (int run = 0; run < 2; run++) {
        vary(run);
        run_step(o, s, b, v, !run, &r[run]);
    }
    const double ms = r[0].ms < r[1].ms ? r[0].ms : r[1].ms;
    for (int i = 0; i < s->uses && size == 0; i++) {
        const Array *x = &o->array[s->use[i].array];
        if (s->use[i].reads && x->kind <= STAT)
            size = rms_of(x->kind, v[s->use[i].array], x->count);
    }
    for (int i = 0; i < s->uses; i++) {
        const Use *u = &s->use[i];
        const Array *x = &o->array[u->array];
        const double limit = limit_of(o, s, x->kind);
        if (!u->writes) continue;
        if (u->ignored) {
            Line l = {0, 0, 0, strcmp(x->name, "idx") ? NULL : unsound(o, r[0].out[u->array])};
            if (l.why) report(diff.op, variant, x->name, by, l, 0, ms);
            continue;
        }
        report(diff.op, variant, x->name, by,
            compare(u, x->kind, r[0].out[u->array], r[1].out[u->array], ref->out[u->array],
                x->count, size, limit),
            limit, ms);
    }
    for (int run = 0; run < 2; run++)
        if (r[run].wrong[0]) {
            const Line l = {INFINITY, INFINITY, 0, r[run].wrong};
            report(diff.op, variant, "memory", by, l, 0, ms);
            break;
        }
    release_to(mark);
}

/* Gradients that a step adds to start from random numbers of the size of what it adds, so that
   neither hides the other. */
static void start_gradients(const Op *o, const Step *s, double **v) {
    Ran r;
    int adds[MAX_ARRAYS] = {0}, any = 0;
    for (int i = 0; i < s->uses; i++)
        for (int k = 0; k < o->nx; k++)
            if (s->use[i].writes && o->adds[k] && o->dx[k] == s->use[i].array)
                adds[o->dx[k]] = any = 1;
    for (int k = 0; k < o->nx && any; k++) {
        const Array *x = &o->array[o->x[k]];
        if (!adds[o->dx[k]]) continue;
        v[o->dx[k]] = fresh(x->count, sizeof(double));
        for (size_t i = 0; i < x->count; i++) v[o->dx[k]][i] = isnan(x->x[i]) ? NAN : 0;
    }
    if (any) run_step(o, s, backend_f64(), v, 0, &r);
    for (int k = 0; k < o->nx && any; k++) {
        const Array *x = &o->array[o->x[k]], *dx = &o->array[o->dx[k]];
        if (!adds[o->dx[k]]) continue;
        const double size = rms_of(GRAD, r.out[o->dx[k]], x->count);
        const double *start = normals(x->count, size > 0 ? size : 1, 0);
        for (size_t i = 0; i < x->count; i++)
            if (!isnan(x->x[i])) v[o->dx[k]][i] = rounded(o->dev, dx->kind, start[i]);
    }
}

// "plan_select:given": the operation, and what is special about this step of it
static size_t operation_length(const Step *s) { return strcspn(s->name, ":"); }
static int wanted(const Step *s) {
    const size_t length = operation_length(s);
    return !strncmp(s->name, diff.op, length) && !diff.op[length];
}

// The steps of o in the reference, each from the rounded values of those before; the wanted ones on
// the device too.
static void diff_op(Op *o, const char *variant) {
    double *v[MAX_ARRAYS];
    for (int i = 0; i < o->arrays; i++) v[i] = o->array[i].x;
    set_threads(1);
    for (int i = 0; i < o->steps; i++) {
        const Step *s = &o->step[i];
        Ran ref;
        if (s->glue) {
            s->glue(o, v);
            continue;
        }
        start_gradients(o, s, v);
        run_step(o, s, backend_f64(), v, 0, &ref);
        if (wanted(s)) {
            char what[64];
            const char *special = s->name + operation_length(s);
            snprintf(what, sizeof what, "%s%s%s", variant, *special ? "-" : "",
                *special ? special + 1 : "");
            diff_step(o, s, diff.dev, "built-in", v, &ref, what);
            if (diff.with) diff_step(o, s, diff.with, diff.with_name, v, &ref, what);
            set_threads(1);
        }
        for (int k = 0; k < o->arrays; k++) {
            const Array *x = &o->array[k];
            if (!ref.out[k]) continue;
            v[k] = ref.out[k];
            for (size_t at = 0; at < x->count && x->kind <= STAT; at++)
                v[k][at] = rounded(o->dev, x->kind, v[k][at]);
        }
    }
    release_to(0);
}

// -------------------------------------------------------------------------------------------------
// families: all variants of a few operations, for one shape

CALL(params_changed) {
    TensorTable t;
    if (tensor_table_build(&t, &o->c, sizeof(float))) die(RUN_ERROR, "no memory");
    if (b->params_changed)
        b->params_changed(A(copies), A(params), &t);
    else // the reference: to the last bit what the device's type makes of them
        for (size_t i = 0; i < t.elements; i++)
            ((double *)A(copies))[i] = rounded(o->dev, MATRIX, ((const double *)A(params))[i]);
    tensor_table_free(&t);
}
static void diff_params(const Shape *s) {
    const double awkward[] = {0, -0.0, 1 + 0x1p-8, 1 + 0x3p-8, 1 + 0x1p-8 + 0x1p-20, -1 - 0x1p-8,
        0x1p-130, 0x1p-133 + 0x1p-134, 3e38, -1e-30}; // halves between neighbours, tiny, huge
    TensorTable t;
    Config c = config(s->V, 2, s->C, s->heads, s->kv, s->hd, s->E, s->K, s->I);
    c.d_shared = 5;
    if (tensor_table_build(&t, &c, sizeof(float))) die(RUN_ERROR, "no memory");
    Op o = op_on(diff.dev, "params", s->B, s->T, c);
    double *x = random_array(&o, "params", PARAM, t.elements, 1, 0);
    array(&o, "copies", MATRIX, t.elements);
    for (int i = 0; i < t.count; i++) {
        const Tensor *a = &t.tensor[i];
        if (!a->row->trained) continue;
        for (size_t k = 0; k < a->count && k < COUNT(awkward); k++)
            x[a->offset + k] = rounded(diff.dev, PARAM, awkward[k]);
        if (i + 1 == t.count || !t.tensor[i + 1].row->trained) continue;
        for (size_t k = a->offset + a->count; k < t.tensor[i + 1].offset; k++) x[k] = NAN; // gaps
    }
    STEP(&o, params_changed, "params > ~copies");
    tensor_table_free(&t);
    diff_op(&o, "-");
}

static void diff_embedding(const Shape *s) {
    Op o = embedding_op(diff.dev, "embedding", s->B * s->T, s->V, s->C);
    diff_op(&o, "-");
}
static void diff_norms(const Shape *s) {
    Op o = rmsnorm_op(diff.dev, "rmsnorm", s->B * s->T, s->C);
    diff_op(&o, "-");
    for (int in_place = 0; in_place < 2; in_place++) {
        o = residual_op(diff.dev, "residual", s->B * s->T, s->C, in_place);
        diff_op(&o, in_place ? "in-place" : "residual");
    }
}

CALL(add) { b->add(A(out), A(a), A(b), o->array[named(o, "a")].count); }
static void diff_add(const Shape *s) {
    const char *const words[3] = {"a b > out", "a b > out=a", "a b > out=b"};
    const char *const variant[3] = {"-", "into-a", "into-b"};
    for (int i = 0; i < 3; i++) {
        const size_t n = (size_t)s->B * s->T * s->C;
        Op o = op_on(diff.dev, "add", s->B, s->T, config(2, 1, s->C, 1, 1, 2, 1, 1, 1));
        random_array(&o, "a", ACT, n, 1, 0);
        random_array(&o, "b", ACT, n, 1, 0);
        array(&o, "out", ACT, n);
        STEP(&o, add, words[i]);
        diff_op(&o, variant[i]);
    }
}

static void diff_linear(const Shape *s) {
    const char *const variant[3] = {"overwrite", "accumulate", "weight-only"};
    for (int i = 0; i < 3; i++) {
        Op o = linear_op(diff.dev, "linear", s->B * s->T, s->V, s->C, i);
        if (i == WEIGHT_ONLY) o.steps--; // the last one is for the gradient check
        diff_op(&o, variant[i]);
    }
}

static const char *const norm_name[] = {"no-norm", "full-norm", "head-norm"};

/* Decoding: sequences with positions of their own, new tokens of each, padding behind them. The
   caches hold what came before; later positions are NaN, and stay so. */
static Op decode_op(const Shape *s, int norm) {
    const int B = s->B > 1 ? s->B : 3, T = s->T < 5 ? s->T : 5, before = 70; // across a key block
    Op o = op_on(diff.dev, "decode", B, T, config(2, 1, 1, s->heads, s->kv, s->hd, 1, 1, 1));
    const size_t hd = s->hd, full = norm == QK_NORM_FULL;
    o.c.qk_norm = norm;
    o.cache_len = before + T;
    double *start = array(&o, "start", INTS, B), *len = array(&o, "len", INTS, B);
    for (int i = 0; i < B; i++) { // from 0 and full; up to the last position; anywhere
        len[i] = i == 0 ? T : i == 1 ? (T + 1) / 2 : 1 + below(T);
        start[i] = i == 0 ? 0 : i == 1 ? o.cache_len - len[i] : below(before);
    }
    random_array(&o, "qkv", ACT, o.N * (s->heads + 2 * s->kv) * hd, 1, 0);
    if (norm != QK_NORM_NONE) {
        random_array(&o, "q_weight", PARAM, (full ? s->heads : 1) * hd, 0.3, 1);
        random_array(&o, "k_weight", PARAM, (full ? s->kv : 1) * hd, 0.3, 1);
        array(&o, "rstd", STAT, rstd_count(&o)); // without a norm there is none
    }
    rope_array(&o, o.cache_len);
    array(&o, "q", ACT, (size_t)o.N * s->heads * hd);
    for (int i = 0; i < 2; i++) {
        const size_t each = o.cache_len * hd;
        double *x = random_array(&o, i ? "v" : "k", ACT, B * s->kv * each, 1, 0);
        for (size_t k = 0; k < B * s->kv * each; k++) {
            const int position = (int)(k % each / hd);
            if (position >= start[k / each / s->kv]) x[k] = NAN;
        }
    }
    array(&o, "out", ACT, (size_t)o.N * s->heads * hd);
    array(&o, "lse", STAT, (size_t)o.N * s->heads);
    STEP(&o, qk_rope_forward, "qkv q_weight k_weight rope start len > q +k +v ~rstd");
    STEP(&o, attention_forward, "q k v start len > out ~lse");
    return o;
}
static void diff_attention(const Shape *s) {
    for (int norm = QK_NORM_NONE; norm <= QK_NORM_HEAD; norm++) {
        char variant[32];
        Op o = qk_rope_op(diff.dev, "qk_rope", s->B, s->T, s->heads, s->kv, s->hd, norm);
        diff_op(&o, norm_name[norm]);
        o = decode_op(s, norm);
        snprintf(variant, sizeof variant, "decode-%s", norm_name[norm]);
        diff_op(&o, variant);
    }
    Op o = attention_op(diff.dev, "attention", s->B, s->T, s->heads, s->kv, s->hd);
    diff_op(&o, "train");
    // what is not finite at the last position is seen there alone
    o = attention_op(diff.dev, "attention", s->B, s->T, s->heads, s->kv, s->hd);
    Array *v = &o.array[named(&o, "v")];
    for (size_t i = 0; i < v->count; i++)
        if ((int)(i / s->hd) % s->T == s->T - 1) v->x[i] = NAN;
    o.steps = o.forward;
    diff_op(&o, "late-NaN");
}

/* Rows whose first K + 1 scores are far enough apart that no rounding can change their order: the
   others are drawn again. */
static void decide(Op *o) {
    const int E = o->c.n_experts, K = o->c.top_k, C = o->c.d_model, mark = pooled;
    const int sigmoid = o->router.kind == ROUTER_SIGMOID;
    double *X = o->array[named(o, "X")].x, *score = fresh(E, sizeof *score);
    const double *W = o->array[named(o, "Wr")].x, *bias = o->array[named(o, "bias")].x;
    stream_id++;
    for (int n = 0; n < o->N; n++)
        for (uint64_t draw = 1, near = 1; near; draw++) {
            double last = INFINITY;
            if (draw > 10000) die(RUN_ERROR, "internal: no row of %d experts without ties", E);
            for (int e = 0; e < E; e++) {
                double z = 0;
                for (int c = 0; c < C; c++) z += X[(size_t)n * C + c] * W[(size_t)e * C + c];
                score[e] = sigmoid ? 1 / (1 + exp(-z)) + bias[e] : z;
            }
            near = 0;
            for (int k = 0; k <= K && k < E; k++) { // k-th of those that are left
                int best = 0;
                for (int e = 1; e < E; e++)
                    if (score[e] > score[best]) best = e;
                near |= last - score[best] < (sigmoid ? 1e-5 : 1e-4);
                last = score[best];
                score[best] = -INFINITY;
            }
            for (int c = 0; c < C && near; c++)
                X[(size_t)n * C + c] =
                    rounded(o->dev, ACT, counter_normal(21 + draw, stream_id, (uint64_t)n * C + c));
        }
    release_to(mark);
}
// Whole numbers: many experts have the same logit, in any order of summation.
static void draw_ties(Op *o) {
    const int C = o->c.d_model, E = o->c.n_experts;
    double *X = o->array[named(o, "X")].x, *W = o->array[named(o, "Wr")].x;
    for (size_t i = 0; i < (size_t)o->N * C; i++) X[i] = below(3) - 1;
    for (size_t i = 0; i < (size_t)E * C; i++) W[i] = i % C < 3 ? below(3) - 1 : 0;
    for (int e = 0; e < E; e++) o->array[named(o, "bias")].x[e] = 0.25;
}
// The first value that is not finite, of two: the later one must not be named.
static void spoil(Op *o) {
    double *X = o->array[named(o, "X")].x;
    const int C = o->c.d_model, N = o->N;
    X[(size_t)(2 * N / 3) * C + C / 2] = INFINITY;
    X[(size_t)(N - 1) * C] = NAN;
    o->steps = 0;
    STEP(o, router_forward,
        "X Wr bias > ?logits ?lse ?idx ?weight ?count +?loss_sum +?count_sum +state");
}
enum { CHOSEN, GIVEN, EVALUATION, TIES, SPOILED, CAPACITY, ROUNDED, ROUTER_FORMS };
static void diff_router(const Shape *s) {
    static const char *const form_name[ROUTER_FORMS] = {
        "", "-given", "-eval", "-ties", "-bad", "-capacity", "-rounded"};
    for (int i = 0; i < 4 * ROUTER_FORMS; i++) {
        const int sigmoid = i & 1, renorm = i >> 1 & 1, form = i >> 2, N = s->B * s->T;
        const RouterCase x = {.N = N,
            .C = s->C,
            .E = s->E,
            .K = s->K,
            .few = s->few,
            .kind = sigmoid ? ROUTER_SIGMOID : ROUTER_SOFTMAX,
            .renorm = renorm,
            .given = form == GIVEN,
            .select = form >= CAPACITY,
            .limit = (N * s->K + 2 * s->E - 1) / (2 * s->E),
            .tile = form == ROUNDED ? 4 : 0,
            .aux = form == GIVEN ? 0 : 0.7 * N,
            .z = form == GIVEN ? 0 : 0.3 * N,
            .scale = 1 / sqrt(s->C),
            .all = form == CAPACITY ? 3 * N
                : form == ROUNDED   ? 2 * N + 1
                                    : 0,
            .sums = form != CHOSEN,
            .totals = form == EVALUATION ? NO_TOTALS : ALL_TOTALS};
        char variant[32];
        Op o = router_op(diff.dev, "router", x);
        if (form == TIES)
            draw_ties(&o);
        else if (form == SPOILED)
            spoil(&o);
        else if (form != GIVEN)
            decide(&o);
        if (form == EVALUATION) o.steps = o.forward;
        snprintf(variant, sizeof variant, "%s%s%s", sigmoid ? "sigmoid" : "softmax",
            renorm ? "-renorm" : "", form_name[form]);
        diff_op(&o, variant);
    }
}

// With the slots given, their weights alone are made.
CALL(plan_weights) {
    Plan p = plan_on(o, a);
    b->plan_select(
        &p, A(moved), A(idx), A(weight), A(count), A(logits), A(lse), o->router, 1, SCRATCH);
}
// Selection on a coarse grid, so that many rows tie in weight and in probability.
static void diff_select(const Shape *s) {
    static const char *const form_name[] = {
        "capacity", "drop-all", "keep-all", "tile-1", "tile-4", "tile-64"};
    const int tiles[] = {0, 0, 0, 1, 4, 64}, N = s->B * s->T, E = s->E, K = s->K;
    for (int i = 0; i < 12; i++) {
        const int sigmoid = i & 1, form = i / 2;
        char variant[32];
        Op o = op_on(diff.dev, "select", 1, N, config(2, 1, 4, 1, 1, 2, E, K, 1));
        const Router r = {sigmoid ? ROUTER_SIGMOID : ROUTER_SOFTMAX, N, 4, E, K, 1, 0, 0,
            form == 0       ? (N * K + E - 1) / E
                : form == 2 ? N
                            : 0,
            tiles[form], 0};
        o.router = r;
        o.S_max = most_slots(N, E, K, tiles[form]), o.row_max = E;
        choice_arrays(&o, random_choice(N, K, s->few));
        double *weight = array(&o, "weight", STAT, (size_t)N * K);
        double *logits = random_array(&o, "logits", STAT, (size_t)N * E, 1, 0);
        double *lse = array(&o, "lse", STAT, N);
        for (int k = 0; k < N * K; k++) weight[k] = (1 + below(4)) / 4.0;
        for (int k = 0; k < N * E; k++) {
            logits[k] = floor(2 * logits[k]) / 2;
            if (logits[k] == 0 && below(2)) logits[k] = -0.0; // the same rank as 0
        }
        for (int n = 0; n < N; n++) lse[n] = below(8) / 4.0;
        double *moved = array(&o, "moved", INTS, 2);
        moved[0] = 3, moved[1] = 5;
        plan_arrays(&o);
        STEP(&o, plan_select, "idx weight count logits lse > +moved " LOOSE_PLAN);
        add_step(&o, "plan_select:given", call_plan_weights, NULL,
            "idx weight count logits lse moved offsets row expert row_begin slot > ~slot_weight");
        snprintf(variant, sizeof variant, "%s%s", form_name[form], sigmoid ? "-sigmoid" : "");
        diff_op(&o, variant);
    }
}

// The part of a plan: arrays that are named after those of the whole.
static Plan part_on(const Op *o, void *const *a) {
    Plan p = {o->part_rows, o->c.n_experts, o->S_max, o->row_max, A(p_offsets), A(p_row),
        A(p_expert), A(p_weight), A(p_row_begin), A(p_slot)};
    return p;
}
CALL(plan_part) {
    const Plan all = plan_on(o, a);
    Plan p = part_on(o, a);
    b->plan_part(&p, A(from), &all, A(order), o->first, SCRATCH);
}
CALL(plan_items) {
    const Plan p = part_on(o, a);
    b->plan_items(
        A(item), A(item_row), A(item_begin), A(item_at), A(item_count), &p, o->parts, SCRATCH);
}
#define PART "p_offsets p_row p_expert p_weight p_row_begin p_slot "
static int *permutation(int n) {
    int *x = fresh(n, sizeof(int));
    for (int i = 0; i < n; i++) x[i] = i;
    for (int i = n - 1; i > 0; i--) {
        const int j = below(i + 1), t = x[i];
        x[i] = x[j], x[j] = t;
    }
    return x;
}
/* Rows of a plan as it is exchanged. Its experts are a multiple of 4, of which some have no tokens;
   more rows than the shape's B*T, which the scratch must have room for. */
static void diff_parts(const Shape *s) {
    enum { TOPK, DROPS, DROPS_ALL, ROUNDS, PLANS };
    static const char *const plan_name[] = {"top-k", "capacity", "drop-all", "rounded"};
    const int N = s->B * s->T, E = (s->E + 3) / 4 * 4, K = s->K;
    const int parts[] = {1, 2, 4, E};
    const struct { // a part of the rows
        int first, rows;
    } cuts[] = {{0, N}, {N / 3, N - 2 * (N / 3)}, {N - 1, 1}, {N / 2, N - N / 2}};
    for (int i = 0; i < 4 * PLANS; i++) {
        // a Latin square, so that few variants meet most pairs
        const int plan = i % PLANS, cut = i / PLANS, group = (plan + cut) % 4,
                  ordered = (i / 2 + cut) % 2;
        char variant[40];
        Op o = op_on(diff.dev, "parts", 1, 1, config(2, 1, 4, 1, 1, 2, E, K, 1));
        const Router r = {.kind = ROUTER_SOFTMAX,
            .N = N,
            .C = 4,
            .E = E,
            .K = K,
            .limit = plan == DROPS ? (N * K + 2 * E - 1) / (2 * E) : 0,
            .tile = plan == ROUNDS ? 3 : 0};
        o.N = o.rows = N, o.router = r;
        o.S_max = most_slots(N, E, K, r.tile), o.row_max = E;
        o.first = cuts[cut].first, o.part_rows = cuts[cut].rows, o.parts = parts[group];
        choice_arrays(&o, random_choice(N, K, s->few));
        random_array(&o, "weight", STAT, (size_t)N * K, 0.2, 0.5);
        random_array(&o, "logits", STAT, (size_t)N * E, 1, 0);
        random_array(&o, "lse", STAT, N, 0.1, 2);
        filled(&o, "moved", INTS, 2, 0);
        plan_arrays(&o);
        if (ordered) ints(&o, "order", permutation(E), E);
        array(&o, "from", INTS, o.S_max);
        array(&o, "p_offsets", INTS, E + 1);
        array(&o, "p_row", INTS, o.S_max);
        array(&o, "p_expert", INTS, o.S_max);
        array(&o, "p_weight", STAT, o.S_max);
        array(&o, "p_row_begin", INTS, o.part_rows + 1);
        array(&o, "p_slot", INTS, o.S_max);
        array(&o, "item", INTS, o.S_max);
        array(&o, "item_row", INTS, (size_t)o.parts * o.part_rows);
        array(&o, "item_begin", INTS, o.part_rows + 1);
        array(&o, "item_at", INTS, (size_t)o.parts * o.part_rows);
        array(&o, "item_count", INTS, o.parts);
        if (plan == TOPK)
            STEP(&o, plan_topk, "idx weight count > " LOOSE_PLAN);
        else
            STEP(&o, plan_select, "idx weight count logits lse > +moved " LOOSE_PLAN);
        STEP(&o, plan_part, PLAN "order > from " PART);
        STEP(&o, plan_items, PART "> item item_row item_begin item_at item_count");
        snprintf(variant, sizeof variant, "%s-%d-of-%d-%d%s", plan_name[plan], o.part_rows, N,
            o.parts, ordered ? "-ordered" : "");
        diff_op(&o, variant);
    }
}

enum { HALF_IN = 1, HALF_OUT = 2 };
static DType row_type(const Backend *b, int half) { return half ? BF16 : b->act_type; }
CALL(copy_rows) {
    b->copy_rows(A(out), row_type(b, o->variant & HALF_OUT), A(to), A(in),
        row_type(b, o->variant & HALF_IN), A(from), o->N, o->c.d_model);
}
CALL(sum_rows) {
    b->sum_rows(A(out), A(in), row_type(b, o->variant & HALF_IN), A(begin), A(at), o->parts, o->N,
        o->c.d_model);
}
static void diff_rows(const Shape *s) {
    static const char *const type_name[] = {"act", "bf16-act", "act-bf16", "bf16"};
    const int N = s->B * s->T, C = s->C, rows = N + 3, large = (double)N * C > 3e4;
    for (int i = 0; i < 16; i++) {
        if (large && i % 5) continue; // of a large shape each type and each list once
        const int given = i / 4;      // 1: from, 2: to
        char variant[40];
        Op o = op_on(diff.dev, "rows", s->B, s->T, config(2, 1, C, 1, 1, 2, 1, 1, 1));
        o.variant = i % 4;
        random_array(&o, "in", o.variant & HALF_IN ? HALF : ACT, (size_t)rows * C, 1, 0);
        double *from = given & 1 ? array(&o, "from", INTS, N) : NULL;
        double *to = given & 2 ? array(&o, "to", INTS, N) : NULL;
        const int *place = permutation(rows);
        for (int n = 0; n < N && from; n++) from[n] = below(2) ? below(rows) : ~below(rows);
        for (int n = 0; n < N && to; n++) to[n] = below(4) ? place[n] : -1 - below(5);
        array(&o, "out", o.variant & HALF_OUT ? HALF : ACT, (size_t)rows * C);
        STEP(&o, copy_rows, "in from to > out");
        snprintf(variant, sizeof variant, "%s%s%s", type_name[o.variant], from ? "-from" : "",
            to ? "-to" : "");
        diff_op(&o, variant);
    }
    for (int i = 0; i < 8; i++) {
        if (large && i % 3) continue;
        const int listed = i / 2 % 2, most = i / 4 ? 1 : 5;
        char variant[40];
        Op o = op_on(diff.dev, "sums", s->B, s->T, config(2, 1, C, 1, 1, 2, 1, 1, 1));
        o.variant = i & HALF_IN, o.parts = most;
        double *begin = listed ? array(&o, "begin", INTS, N + 1) : NULL;
        for (int n = 0; n <= N && listed; n++) begin[n] = n ? begin[n - 1] + below(most + 1) : 0;
        const int items = listed ? (int)begin[N] : 0, in = N * most;
        double *at = listed ? array(&o, "at", INTS, items) : NULL;
        for (int k = 0; k < items; k++) at[k] = below(in);
        random_array(&o, "in", o.variant ? HALF : ACT, (size_t)in * C, 1, 0);
        array(&o, "out", ACT, (size_t)N * C);
        STEP(&o, sum_rows, "in begin at > out");
        snprintf(variant, sizeof variant, "%s-%s-%d", o.variant ? "bf16" : "act",
            listed ? "listed" : "parts", most);
        diff_op(&o, variant);
    }
}

CALL(plan_merge) {
    Plan p = plan_on(o, a);
    b->plan_merge(
        &p, A(item), A(weight), A(source), A(start), A(base), A(which), o->sources, o->ld, SCRATCH);
}
CALL(plan_unmerge) {
    const Plan p = plan_on(o, a);
    b->plan_unmerge(A(back), A(values), &p, A(source), A(start), A(which), o->sources, o->ld);
}
CALL(scatter) {
    const Plan p = plan_on(o, a);
    b->scatter(A(scattered), A(values), A(index), &p);
}
enum { ITEMS = 1, WHICH = 2, NOTHING = 4 };
/* Slots from n sources, each with E experts and rows of its own: of these each expert takes some, by
   items or one row a slot. There are gaps everywhere; one source has nothing, the last experts
   neither. */
static void source_arrays(Op *o, const Shape *s, int n, int form) {
    const int E = s->E, rows = 1 + s->B * s->T / n;
    int at = 0, base = 0;
    o->sources = n, o->ld = E + 1 + 2;
    double *source = filled(o, "source", INTS, (size_t)n * o->ld, 0);
    double *start = array(o, "start", INTS, n), *first = array(o, "base", INTS, n);
    int *item = fresh((size_t)n * E * (rows + 1), sizeof(int));
    for (int i = 0; i < n; i++) {
        double *mine = source + (size_t)i * o->ld;
        int k = 5 * i; // of its slots, the first that is not another's
        start[i] = at - k;
        first[i] = form & ITEMS ? base : base - k;
        for (int e = 0; e < E; e++) {
            mine[e] = k;
            for (int r = 0; r < rows; r++) {
                if (form & NOTHING || i % 3 == 1 || e >= s->few || below(3)) continue;
                item[at++] = below(2) ? r : ~r;
                k++;
            }
        }
        mine[E] = k;
        base += form & ITEMS ? rows : k - (int)mine[0];
        if (i % 2) item[at++] = 0;
    }
    o->N = o->rows = base + 1; // the last row has no slot
    o->S_max = at + 1;
    item[at] = 0;
    if (form & ITEMS) ints(o, "item", item, o->S_max);
    random_array(o, "weight", STAT, o->S_max, 0.2, 0.5);
    o->E = form & WHICH ? (E + 1) / 2 : E;
    if (form & WHICH) ints(o, "which", permutation(E), o->E);
    o->row_max = form & ITEMS ? o->E : 1;
}
static void diff_merge(const Shape *s) {
    const int large = (double)s->B * s->T * s->C * s->I > 1e6 || s->B * s->T > 1000;
    for (int i = 0; i < 10; i++) {
        const int sources[] = {1, 2, 5}, n = sources[i % 3], C = s->C, I = s->I;
        const int form = i < 8 ? i & (ITEMS | WHICH) : NOTHING | (i & 1 ? ITEMS : 0);
        const int anew = i == 4 || i == 8, add = i >= 5 && !anew;
        char variant[40];
        if (large && i % 4 != 3) continue;
        Op o = op_on(diff.dev, "merge", 1, 1, config(2, 1, C, 1, 1, 2, s->E, s->K, I));
        source_arrays(&o, s, n, form);
        o.gaps = 1, o.variant = add ? ADD : anew ? FRESH : 0;
        const size_t N = o.N, S = o.S_max;
        plan_arrays(&o);
        random_array(&o, "values", STAT, S, 1, 0);
        array(&o, "back", STAT, S);
        ints(&o, "index", permutation((int)S), S);
        array(&o, "scattered", STAT, S);
        input(&o, "dX", ACT, N * C, 1, 0, 0);
        input(&o, "dW1", MATRIX, o.E * stride_of(&o, 2 * I, C), 1 / sqrt(C), 0, 1);
        input(&o, "dW2", MATRIX, o.E * stride_of(&o, C, I), 1, 0, 1);
        clear_gaps(&o, o.array[named(&o, "W1")].x, o.E, 2 * I, C);
        clear_gaps(&o, o.array[named(&o, "W2")].x, o.E, C, I);
        output(&o, "dout", ACT, N * C, 0);
        array(&o, "dS", STAT, S);
        array(&o, "H", ACT, S * 2 * I);
        array(&o, "dH", ACT, S * 2 * I);
        array(&o, "sA", ACT, S * I);
        if (i % 2) array(&o, "A", ACT, S * I);
        STEP(&o, plan_merge, "item weight source start base which > " LOOSE_PLAN);
        STEP(&o, plan_unmerge, "values " PLAN "source start which > back");
        STEP(&o, scatter, "values index " PLAN "> scattered");
        STEP(&o, expert_up_forward, "X W1 " PLAN "> ~H ~A");
        if (add) GLUE(&o, X_into_out, "");
        STEP(&o, expert_down_forward, add ? "H A W2 " PLAN "> +out" : "H A W2 " PLAN "> out");
        expert_gradients(&o);
        snprintf(variant, sizeof variant, "%d-%s%s%s%s%s", n, form & ITEMS ? "items" : "slots",
            form & WHICH ? "-which" : "", form & NOTHING ? "-nothing" : "", add ? "-add" : "",
            anew ? "-fresh" : "");
        diff_op(&o, variant);
    }
}

static void diff_experts(const Shape *s) {
    static const struct {
        const char *name;
        int variant, small; // small: for small shapes alone
    } forms[] = {{"top-k", 0, 1}, {"in-place", IN_PLACE, 0}, {"kept-A", IN_PLACE | KEEP_A, 0},
        {"accumulate", IN_PLACE | ADD, 0}, {"kept-A-accumulate", KEEP_A | ADD, 1},
        {"dense", IN_PLACE | IDENTITY, 0}, {"dense-kept-A", IDENTITY | KEEP_A, 1},
        {"dense-accumulate", IDENTITY | ADD, 1}, {"capacity", IN_PLACE | CAPPED, 1},
        {"rounded", IN_PLACE | TILED | KEEP_A, 0}, {"fresh", FRESH, 0},
        {"fresh-capacity", FRESH | CAPPED, 1}, {"fresh-dense", FRESH | IDENTITY, 1}};
    const int N = s->B * s->T, large = (double)N * s->C * s->I > 1e6 || N > 1000;
    for (size_t i = 0; i < COUNT(forms); i++) {
        const int dense = forms[i].variant & IDENTITY;
        if (large && forms[i].small) continue;
        Op o = experts_op(diff.dev, "experts", N, s->C, s->I, dense ? 1 : s->E, dense ? 1 : s->K,
            dense ? 1 : s->few, forms[i].variant, 1);
        diff_op(&o, forms[i].name);
    }
}

static void diff_classifier(const Shape *s) {
    for (int ignored = 0; ignored < 2; ignored++) {
        const double size = 1 / sqrt(s->C);
        Op o = classifier_op(diff.dev, "classifier", s->B * s->T, s->V, s->C, size);
        for (int n = 0; n < o.N && ignored; n++) o.array[named(&o, "targets")].x[n] = -1;
        diff_op(&o, ignored ? "all-ignored" : "trained");
    }
}

// The state of a step under way: no two fields alike.
static double *state_array(Op *o, int bad) {
    const double values[STATE_VALUES] = {
        bad ? BAD_ROUTER : 0, bad ? 3 : 0, bad ? 77 : 0, 1.5, 6.5, 2.5, 0.375, 0.125, 0.5, 0.25};
    double *x = array(o, "state", STATE, STATE_VALUES);
    memcpy(x, values, sizeof values);
    return x;
}
static const Config shapeless = {.vocab_size = 2,
    .n_layers = 1,
    .d_model = 1,
    .n_heads = 1,
    .n_kv_heads = 1,
    .head_dim = 2,
    .n_experts = 1,
    .top_k = 1,
    .d_expert = 1};
CALL(reduce_loss) { b->reduce_loss(A(state), A(losses), o->N, o->scale); }
static void diff_reduce_loss(const Shape *s) {
    static const char *const form_name[] = {"-", "bad", "bad-before"};
    for (int form = 0; form < 3; form++) {
        Op o = op_on(diff.dev, "loss", s->B, s->T, shapeless);
        double *x = random_array(&o, "losses", STAT, o.N, 1, 3);
        o.scale = 0.3;
        if (form) x[o.N - 1] = NAN, x[o.N / 2] = INFINITY;
        state_array(&o, form == 2);
        STEP(&o, reduce_loss, "losses > +state");
        diff_op(&o, form_name[form]);
    }
}

/* The tensors of a model of this shape, with gaps between them, as the optimiser gets them; or parts
   of some of them, off every boundary. Returns how many elements the arena has. */
static size_t segment_array(Op *o, const Shape *s, int parts) {
    TensorTable t;
    o->c = config(s->V, 1, s->C, s->heads, s->kv, s->hd, s->E, s->K, s->I);
    if (tensor_table_build(&t, &o->c, sizeof(float))) die(RUN_ERROR, "no memory");
    double *x = array(o, "segments", SEGMENTS, SEGMENT_VALUES * (size_t)t.count);
    for (int i = 0, at = 0; i < t.count; i++) {
        const Tensor *a = &t.tensor[i];
        const size_t cut = parts && a->count > 9 ? (size_t)(i % 5) : 0;
        const double seg[SEGMENT_VALUES] = {
            (double)(a->offset + cut), (double)(a->count - 2 * cut), a->row->decay, at};
        if (parts && i % 3 == 2) continue;
        memcpy(x + (size_t)SEGMENT_VALUES * o->segments++, seg, sizeof seg);
        at += (int)seg[1] + i % 3; // the moments have other places
    }
    const size_t elements = t.elements;
    o->array[named(o, "segments")].count = SEGMENT_VALUES * (size_t)o->segments;
    tensor_table_free(&t);
    return elements;
}
// with so many weights, not every form of an operation that reads them all
static int large_model(const Shape *s) {
    return (double)s->C * ((double)s->E * s->I * 3 + 2.0 * s->V) > 1e5;
}
static void gradient_array(Op *o, size_t n) { // NaN in the gaps
    const double *seg = o->array[named(o, "segments")].x;
    double *g = array(o, "grads", GRAD, n);
    stream_id++;
    for (int i = 0; i < o->segments; i++)
        for (size_t k = 0; k < (size_t)seg[SEGMENT_VALUES * i + 1]; k++)
            g[(size_t)seg[SEGMENT_VALUES * i] + k] = (float)counter_normal(7, stream_id, k);
}
CALL(grad_norm) {
    b->grad_norm(A(state), A(grads), A(segments), o->segments, o->optim.max_norm, SCRATCH);
}
static void diff_grad_norm(const Shape *s) {
    static const char *const form_name[] = {
        "clipped", "not-clipped", "no-limit", "parts", "bad", "bad-before", "finite-bad-before"};
    const double max_norm[] = {0.5, 1e6, 0, 0.5, 1, 1, 0.5};
    for (int form = 0; form < 7; form++) {
        if (large_model(s) && (form == 1 || form == 2 || form == 6)) continue;
        Op o = op_on(diff.dev, "norm", s->B, s->T, shapeless);
        gradient_array(&o, segment_array(&o, s, form == 3));
        o.optim.max_norm = max_norm[form];
        double *g = o.array[named(&o, "grads")].x;
        const double *seg = o.array[named(&o, "segments")].x;
        if (form == 4 || form == 5) {
            const double *third = seg + 2 * SEGMENT_VALUES;
            g[(size_t)(third[0] + third[1]) - 1] = INFINITY;
            g[(size_t)third[SEGMENT_VALUES]] = NAN;
        }
        state_array(&o, form >= 5);
        STEP(&o, grad_norm, "grads segments > +state");
        diff_op(&o, form_name[form]);
    }
}
CALL(clip_norm) { b->clip_norm(A(state), o->optim.max_norm); }
static void diff_clip_norm(const Shape *s) {
    static const char *const form_name[] = {
        "clipped", "not-clipped", "no-limit", "bad-elsewhere", "infinite", "bad-before"};
    const double max_norm[] = {0.5, 1e6, 0, 1, 1, 1};
    const double square[] = {13, 13, 13, NAN, INFINITY, NAN};
    for (int form = 0; form < 6; form++) {
        Op o = op_on(diff.dev, "clip", s->B, s->T, shapeless);
        o.optim.max_norm = max_norm[form];
        state_array(&o, form == 5)[4] = square[form];
        STEP(&o, clip_norm, "> +state");
        diff_op(&o, form_name[form]);
    }
}
CALL(update) {
    b->update(A(params), A(grads), A(m), A(v), A(segments), o->segments, A(state), o->optim);
}
static void diff_update(const Shape *s) {
    static const char *const form_name[] = {
        "adamw", "sgd", "adamw-bad", "sgd-bad", "adamw-parts", "sgd-parts"};
    for (int form = 0; form < 6; form++) {
        if (large_model(s) && (form == 2 || form == 5)) continue;
        Op o = op_on(diff.dev, "update", s->B, s->T, shapeless);
        const size_t n = segment_array(&o, s, form >= 4);
        const double *last =
            o.array[named(&o, "segments")].x + (size_t)SEGMENT_VALUES * (o.segments - 1);
        const size_t moments = (size_t)(last[1] + last[3]);
        const OptimConfig optim = {0.9, 0.95, 1e-3, 0.3, 1, form & 1};
        o.optim = optim;
        gradient_array(&o, n);
        random_array(&o, "params", PARAM, n, 1, 0);
        if (!optim.sgd) {
            random_array(&o, "m", GRAD, moments, 0.3, 0);
            double *v = random_array(&o, "v", GRAD, moments, 0.3, 0);
            for (size_t i = 0; i < moments; i++) v[i] = fabs(v[i]);
        }
        state_array(&o, form == 2 || form == 3);
        STEP(&o, update, "grads segments state > +params +m +v");
        diff_op(&o, form_name[form]);
    }
}
CALL(update_bias) { b->update_bias(A(bias), A(count_sum), o->c.n_experts, o->scale, A(state)); }
static void diff_update_bias(const Shape *s) {
    for (int bad = 0; bad < 2; bad++) {
        Op o = op_on(diff.dev, "bias", s->B, s->T, config(2, 1, 1, 1, 1, 2, s->E, 1, 1));
        o.scale = 0.125;
        random_array(&o, "bias", STAT, s->E, 0.3, 0);
        double *load = array(&o, "count_sum", INTS, s->E);
        for (int e = 0; e < s->E; e++) load[e] = e == 1 ? load[0] : below(9); // some at the mean
        state_array(&o, bad);
        STEP(&o, update_bias, "count_sum state > +bias");
        diff_op(&o, bad ? "bad" : "-");
    }
}

// A family makes every variant of these operations.
static const struct {
    const char *operations;
    void (*make)(const Shape *s);
} families[] = {
    {" params_changed ", diff_params},
    {" embedding_forward embedding_backward ", diff_embedding},
    {" rmsnorm_forward residual_rmsnorm_forward rmsnorm_backward ", diff_norms},
    {" add ", diff_add},
    {" linear_forward linear_backward ", diff_linear},
    {" qk_rope_forward qk_rope_backward attention_forward attention_backward ", diff_attention},
    {" router_forward router_balance router_backward plan_topk ", diff_router},
    {" plan_select ", diff_select},
    {" plan_part plan_items ", diff_parts},
    {" copy_rows sum_rows ", diff_rows},
    {" plan_merge plan_unmerge scatter "
     "expert_up_forward expert_down_forward expert_down_backward expert_up_backward ",
        diff_merge},
    {" expert_up_forward expert_down_forward expert_down_backward expert_up_backward ",
        diff_experts},
    {" classifier ", diff_classifier},
    {" reduce_loss ", diff_reduce_loss},
    {" grad_norm ", diff_grad_norm},
    {" clip_norm ", diff_clip_norm},
    {" update ", diff_update},
    {" update_bias ", diff_update_bias},
};

// Every variant of an operation for a shape.
static void diff_shape(int op, const Shape *s) {
    char word[40];
    snprintf(word, sizeof word, " %s ", operations[op].name);
    diff.op = operations[op].name, diff.shape = s->name;
    first_stream = diff.seed << 20;
    for (size_t i = 0; i < COUNT(families); i++)
        if (strstr(families[i].operations, word)) families[i].make(s);
    first_stream = 0;
}

// -------------------------------------------------------------------------------------------------
// devices, and a file beside the built-in

static const Backend *device_of(const char *name, DType type) {
    const Backend *b = NULL;
    const char *why = NULL;
    if (!strcmp(name, "cpu")) {
        if (type != F32) die(USER_ERROR, "--dtype: expected fp32, the only one of cpu, found bf16");
        return backend_cpu();
    }
    if (!strcmp(name, "emulated")) {
#ifdef HAVE_EMULATED
        b = backend_emulated(type, &why);
#else
        die(USER_ERROR, "--device emulated: this build has none: a C++ compiler was not found");
#endif
    } else if (!strcmp(name, "cuda")) {
#ifdef HAVE_CUDA
        b = backend_cuda(type, &why);
#else
        die(USER_ERROR, "--device cuda: this build has none: the CUDA toolkit was not found");
#endif
    } else {
        die(USER_ERROR, "--device: expected cpu, cuda or emulated, found '%s'", name);
    }
    if (!b) die(USER_ERROR, "--device %s: %s", name, why ? why : "there is none");
    return b;
}

// How a contributor's file is compiled: the words of a command; the Makefile names its own compiler
// and flags for C.
#ifndef WITH_CC
#define WITH_CC "cc -std=gnu11 -O3"
#endif
#ifndef WITH_CXX
#define WITH_CXX "c++ -std=c++17 -O2 -ffp-contract=off -include cuda_cpu.h"
#endif
#ifndef WITH_NVCC
#define WITH_NVCC "nvcc -std=c++17 -O3"
#endif

// Runs a command, its stdout at the end of a file or (NULL) onto stderr; returns its exit status.
static int run_command(char **argv, const char *out) {
    extern char **environ;
    posix_spawn_file_actions_t actions;
    pid_t child;
    int status;
    posix_spawn_file_actions_init(&actions);
    if (out)
        posix_spawn_file_actions_addopen(&actions, 1, out, O_WRONLY | O_CREAT | O_APPEND, 0600);
    else
        posix_spawn_file_actions_adddup2(&actions, 2, 1);
    fflush(stdout);
    const int rc = posix_spawnp(&child, argv[0], &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (rc) {
        warn("%s: %s", argv[0], strerror(rc));
        return 127;
    }
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return 127;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 127;
}

// The words of `command`, then the others; writes into `command`.
static int compile(char *command, const char *const *others, const char *out) {
    char *argv[64];
    int n = 0;
    for (char *w = strtok(command, " "); w && n < 48; w = strtok(NULL, " ")) argv[n++] = w;
    while (*others) argv[n++] = (char *)(uintptr_t)*others++;
    argv[n] = NULL;
    return run_command(argv, out);
}

// FILE as a shared object, loaded: its one operation in place of that of b. Returns which.
static int load_with(Backend *b, const char *file, const char *device) {
    char dir[512], so[600], cpp[600], folder[600], command[2048];
    const char *tmp = getenv("TMPDIR"), *slash = strrchr(file, '/'), *source = file;
    int failed_to, found = -1;
    if (access(file, R_OK)) die(USER_ERROR, "--with %s: %s", file, strerror(errno));
    snprintf(dir, sizeof dir, "%s/test_diff.XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(dir)) die(RUN_ERROR, "%s: %s", dir, strerror(errno));
    snprintf(so, sizeof so, "%s/with.so", dir);
    snprintf(cpp, sizeof cpp, "%s/with.cpp", dir);
    snprintf(folder, sizeof folder, "-I%.*s", slash ? (int)(slash - file) : 1, slash ? file : ".");
    if (!strcmp(device, "emulated")) { // what `kernel<<<...>>>` becomes in C++
        const char *const sed[] = {"-z", "-E", "-f", "data/cuda_cpu.sed", file, NULL};
        snprintf(command, sizeof command, "sed");
        FILE *f = fopen(cpp, "w"); // the compiler is to name the contributor's file and line
        if (!f || (!strpbrk(file, "\"\\\n") && fprintf(f, "#line 1 \"%s\"\n", file) < 0) ||
            fclose(f))
            die(RUN_ERROR, "%s: %s", cpp, strerror(errno));
        failed_to = compile(command, sed, cpp);
        if (failed_to) die(USER_ERROR, "--with %s: data/cuda_cpu.sed does not take it", file);
        source = cpp;
    }
    const int cuda = !strcmp(device, "cuda");
    const char *const words[] = {"-shared", cuda ? "-Xcompiler" : "-fPIC", cuda ? "-fPIC" : "-I.",
        "-I.", folder, "-o", so, source, NULL};
    snprintf(command, sizeof command, "%s",
        !strcmp(device, "cpu") ? WITH_CC
            : cuda             ? WITH_NVCC
                               : WITH_CXX);
    failed_to = compile(command, words, NULL);
    void *lib = failed_to ? NULL : dlopen(so, RTLD_NOW | RTLD_LOCAL);
    const char *why = failed_to || lib ? NULL : dlerror();
    remove(so), remove(cpp), remove(dir);
    if (failed_to) die(USER_ERROR, "--with %s: it does not compile", file);
    if (!lib) die(USER_ERROR, "--with %s: it cannot be loaded: %s", file, why);
    void *seed = dlsym(lib, "emulated_seed");
    memcpy(&diff.with_seed, &seed, sizeof seed);
    for (int i = 0; i < N_OPERATIONS; i++) {
        void *f = dlsym(lib, operations[i].name);
        if (!f) continue;
        if (found >= 0)
            die(USER_ERROR, "--with %s: expected one operation, found %s and %s", file,
                operations[found].name, operations[i].name);
        memcpy((char *)b + operations[i].at, &f, sizeof f);
        found = i;
    }
    if (found < 0)
        die(USER_ERROR,
            "--with %s: it exports no operation of Backend (moe.h): expected one, as "
            "extern \"C\" void rmsnorm_forward(...)",
            file);
    return found;
}

// -------------------------------------------------------------------------------------------------
// the command

// KEY=VAL,...: a shape that differs in these from the first one.
static Shape given_shape(const char *text) {
    Shape s = shapes[0];
    const struct {
        const char *key;
        int *value;
        int least, most;
    } keys[] = {{"B", &s.B, 1, 1024}, {"T", &s.T, 1, 65536}, {"V", &s.V, 2, 1 << 20},
        {"C", &s.C, 1, 65536}, {"heads", &s.heads, 1, 1024}, {"kv", &s.kv, 1, 1024},
        {"hd", &s.hd, 2, 1024}, {"E", &s.E, 2, 4096}, {"K", &s.K, 1, 256}, {"I", &s.I, 1, 65536}};
    s.name = "given";
    for (const char *at = text; *at;) {
        const size_t length = strcspn(at, ","), key = strcspn(at, "=,");
        size_t i = 0;
        while (i < COUNT(keys) && (strncmp(keys[i].key, at, key) != 0 || keys[i].key[key])) i++;
        if (i == COUNT(keys) || key == length)
            die(USER_ERROR,
                "--shape: expected KEY=VAL of B, T, V, C, heads, kv, hd, E, K, I, found '%.*s'",
                (int)length, at);
        char *end;
        const long value = strtol(at + key + 1, &end, 10);
        if (end != at + length || end == at + key + 1 || value < keys[i].least ||
            value > keys[i].most)
            die(USER_ERROR, "--shape: expected %s from %d to %d, found '%.*s'", keys[i].key,
                keys[i].least, keys[i].most, (int)(length - key - 1), at + key + 1);
        *keys[i].value = (int)value;
        at += length + (at[length] == ',');
    }
    if (s.hd % 2) die(USER_ERROR, "--shape: expected an even hd, found %d", s.hd);
    if (s.heads % s.kv)
        die(USER_ERROR, "--shape: expected heads to be a multiple of kv, found %d and %d", s.heads,
            s.kv);
    if (s.K > s.E) die(USER_ERROR, "--shape: expected K of at most E = %d, found %d", s.E, s.K);
    s.few = s.E;
    return s;
}

static int operation_named(const char *name) {
    for (int i = 0; i < N_OPERATIONS; i++)
        if (!strcmp(operations[i].name, name)) return i;
    die(USER_ERROR, "--op: expected an operation of moe.h (--list names them), found '%s'", name);
}

static void list_cases(void) {
    for (int i = 0; i < N_OPERATIONS; i++) printf("operation %s\n", operations[i].name);
    for (size_t i = 0; i < COUNT(shapes) + RANDOM_SHAPES; i++) {
        char name[24];
        const Shape s =
            i < COUNT(shapes) ? shapes[i] : random_shape(diff.seed, (int)(i - COUNT(shapes)), name);
        printf("shape     %-15s B=%d,T=%d,V=%d,C=%d,heads=%d,kv=%d,hd=%d,E=%d,K=%d,I=%d\n", s.name,
            s.B, s.T, s.V, s.C, s.heads, s.kv, s.hd, s.E, s.K, s.I);
    }
}

static void diff_shapes(int op, const Shape *given) {
    for (size_t i = 0; i < COUNT(shapes) + RANDOM_SHAPES; i++) {
        char name[24];
        const Shape s = given ? *given : shape_at(diff.seed, i, name);
        diff_shape(op, &s);
        if (given) break;
    }
}

static int diff_command(int argc, char **argv) {
    static const struct option flags[] = {{"op", 1, NULL, 'o'}, {"dtype", 1, NULL, 't'},
        {"shape", 1, NULL, 's'}, {"seed", 1, NULL, 'r'}, {"device", 1, NULL, 'd'},
        {"with", 1, NULL, 'w'}, {"list", 0, NULL, 'l'}, {"stop", 0, NULL, 'e'}, {NULL, 0, NULL, 0}};
    const char *device = "cpu", *file = NULL;
    DType type = F32;
    Shape given = {0};
    int op = -1, list = 0, flag;
    char *end;
    diff.seed = 1;
    opterr = 0;
    while ((flag = getopt_long(argc, argv, ":", flags, NULL)) >= 0) switch (flag) {
        case 'o': op = operation_named(optarg); break;
        case 't':
            if (strcmp(optarg, "fp32") != 0 && strcmp(optarg, "bf16") != 0)
                die(USER_ERROR, "--dtype: expected fp32 or bf16, found '%s'", optarg);
            type = *optarg == 'b' ? BF16 : F32;
            break;
        case 's': given = given_shape(optarg); break;
        case 'r':
            errno = 0;
            diff.seed = strtoull(optarg, &end, 10);
            if (*end || end == optarg || errno || *optarg == '-' || diff.seed >> 32)
                die(USER_ERROR, "--seed: expected a whole number from 0 to 4294967295, found '%s'",
                    optarg);
            break;
        case 'd': device = optarg; break;
        case 'w': file = optarg; break;
        case 'l': list = 1; break;
        case 'e': diff.stop = 1; break;
        case ':': die(USER_ERROR, "diff: expected a value after '%s'", argv[optind - 1]);
        default:
            die(USER_ERROR,
                "diff: expected --op, --dtype, --shape, --seed, --device, --with, --stop or "
                "--list, found '%s'",
                argv[optind - 1]);
        }
    if (optind < argc) die(USER_ERROR, "diff: expected a flag, found '%s'", argv[optind]);
    if (list) {
        list_cases();
        return 0;
    }
    diff.dev = device_of(device, type);
    Backend with = *diff.dev;
    if (file) {
        const int only = load_with(&with, file, device);
        if (op >= 0 && op != only)
            die(USER_ERROR, "--op %s: expected %s, which --with has", operations[op].name,
                operations[only].name);
        op = only;
        diff.with = &with;
        diff.with_name = strrchr(file, '/') ? strrchr(file, '/') + 1 : file;
    }
    diff.print = 1;
    printf("device %s, dtype %s, seed %llu\n", device, dtype_name(diff.dev),
        (unsigned long long)diff.seed);
    printf("%-24s %-15s %-24s %-12s", "operation", "shape", "variant", "tensor");
    if (file) printf(" %-14s", "by");
    printf(" %8s %8s %-8s %5s %9s\n", "error", "largest", "at", "limit", "ms");
    for (int i = 0; i < N_OPERATIONS; i++)
        if ((op < 0 || op == i) && operation_of(diff.dev, i))
            diff_shapes(i, given.name ? &given : NULL);
    printf("%d lines, %d failed\n", diff.lines, diff.failed);
    if (!diff.lines)
        die(USER_ERROR, "--op: %s has no %s in %s", device, operations[op].name,
            dtype_name(diff.dev));
    return diff.failed != 0;
}

// -------------------------------------------------------------------------------------------------
// as tests

// Every operation and the first shapes on a device: one check each, of all variants.
static void test_device(const char *device, const Backend *b, size_t n_shapes) {
    diff.dev = b, diff.print = 0, diff.seed = 1;
    for (int op = 0; op < N_OPERATIONS; op++) {
        if (!operation_of(b, op)) continue;
        for (size_t i = 0; i < n_shapes; i++) {
            char name[24];
            const Shape s = shape_at(diff.seed, i, name);
            if (!begin("%s/%s/%s/%s", device, operations[op].name, s.name, dtype_name(b))) continue;
            diff.lines = 0;
            diff_shape(op, &s);
            check(diff.lines > 0, "nothing was compared");
            finish();
        }
    }
}
static void test_devices(void) {
    test_device("cpu", backend_cpu(), SMALL_SHAPES); // float/ has it at more sizes
#ifdef HAVE_EMULATED
    const DType types[] = {F32, BF16};
    for (int i = 0; i < 2; i++) {
        const char *why = NULL;
        const Backend *b = backend_emulated(types[i], &why);
        if (b) {
            // a sanitizer makes it many times slower, and has most to see at awkward sizes
            test_device(
                "emulated", b, SEES_BEYOND ? SANITIZED_SHAPES : COUNT(shapes) + RANDOM_SHAPES);
        } else if (begin("emulated/%s", types[i] == F32 ? "fp32" : "bf16")) {
            check(0, "no such device: %s", why ? why : "it does not say why");
            finish();
        }
    }
#endif
}

#endif
