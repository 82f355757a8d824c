/* test_parallel.c: a model on several ranks is the model on one. Run it alone (dry layouts, shares)
   or under mpirun: test_parallel [FILTER]; --device emulated runs the CUDA kernels on the CPU.

   Every rank also trains the whole model by itself. What the ranks then do together, for every
   layout, is measured against that: losses, norms of the gradient, gradients of every tensor,
   weights. Rank 0 reports; a check fails on all ranks or on none. */
#include "model.h"
#include "test_report.h"

static Comm world;
static int W = 1, me;
static const Backend *dev;

static void ranks_agree(void) { // at_finish: a check that fails on one rank has failed
    const int bad = check_failed[0] != 0;
    const int worst = comm_agree(&world, bad ? W - me : 0); // of the first rank that says so
    char why[sizeof check_failed];
    if (!worst) return;
    memcpy(why, check_failed, sizeof why);
    comm_broadcast(&world, why, sizeof why, W - worst);
    snprintf(check_failed, sizeof check_failed, "rank %d: %.1300s", W - worst, why);
}

// -------------------------------------------------------------------------------------------------
// one run

typedef struct Case {
    const char *name;
    Config c;
    double aux, z, capacity, bias_rate;
    int tile, recompute, sgd, few; // few: all tokens choose the first experts
} Case;

static Config shape(int E, int K) {
    const Config c = {.vocab_size = 31,
        .seq_len = 12,
        .n_layers = 2,
        .d_model = 16,
        .n_heads = 2,
        .n_kv_heads = 1,
        .head_dim = 8,
        .n_experts = E,
        .top_k = K,
        .d_expert = 8,
        .d_dense = 8 * K,
        .qk_norm = QK_NORM_HEAD,
        .norm_topk = 1,
        .rope_theta = 1e4,
        .norm_eps = 1e-6};
    return c;
}

enum { CASES = 8 };
static Case case_of(int i) {
    Case x = {"softmax", shape(8, 2), 0.02, 0.003, 1e9, 0, 0, 0, 0, 0};
    switch (i) {
    case 1: // everything at once
        x.name = "sigmoid", x.c = shape(8, 3), x.bias_rate = 0.01, x.recompute = 2;
        x.c.router = ROUTER_SIGMOID, x.c.d_shared = 12, x.c.dense_layers = 1, x.c.n_layers = 3;
        break;
    case 2: x.name = "dense", x.c = shape(1, 1), x.recompute = 1, x.c.tied = 1; break;
    case 3: x.name = "capacity", x.capacity = 0.8; break;
    case 4: x.name = "rounding", x.tile = 8; break;
    case 5: x.name = "all-experts", x.c = shape(4, 4), x.recompute = 1; break;
    case 7: // ranks whose experts get no token
        x.name = "empty", x.c.router = ROUTER_SIGMOID, x.few = 2;
        break;
    case 6: x.name = "sgd", x.c.norm_topk = 0, x.sgd = 1; break;
    }
    return x;
}

typedef struct Layout {
    int ep, zero, bf16, chunk, moved; // moved: experts in another order
    Way way;
} Layout;

enum { STEPS = 20, B_ALL = 6, MICRO = 2 };
typedef struct Trace { // what a run leaves
    double loss[STEPS], norm[STEPS], aux[STEPS];
    Model m;
    float *grads; // of the first step
} Trace;

static int steps_of(void) { return dev->apart ? 4 : STEPS; } // a device that is slow

static int token_of(int step, int micro, int row, int t) {
    const uint64_t at = ((uint64_t)step * MICRO + micro) * 64 + row;
    // some tokens are frequent: loads differ
    const double u = counter_uniform(5, at, t);
    return (int)(31 * u * u);
}

static int *even(const Config *c) {
    int *p = malloc((size_t)c->n_layers * c->n_experts * sizeof *p);
    must(p != NULL, "memory");
    for (int l = 0; l < c->n_layers; l++)
        for (int e = 0; e < c->n_experts; e++) p[l * c->n_experts + e] = e;
    return p;
}
static int *moved(const Config *c) { // another order in every layer
    int *p = even(c);
    for (int l = 0; l < c->n_layers; l++)
        for (int e = c->n_experts - 1; e > 0; e--) {
            const int k = (int)(counter_hash(9, l, e) % (uint64_t)(e + 1));
            int *q = p + l * c->n_experts, was = q[e];
            q[e] = q[k], q[k] = was;
        }
    return p;
}

static void open_model(Model *m, const Case *x, const Parallel *par, const Backend *b) {
    const ModelShape s = {
        .B = par ? share_of_batch(&par->world, B_ALL, par->world.rank, NULL) : B_ALL,
        .T = x->c.seq_len,
        .train = 1,
        .recompute = x->recompute,
        .sgd = x->sgd,
        .tile = x->tile,
        .par = par,
        .B_all = B_ALL,
        .select = x->tile || x->capacity < 1e9};
    model_build(m, &x->c, b, s, NULL);
    m->aux_coef = x->aux, m->z_coef = x->z, m->capacity = x->capacity, m->bias_rate = x->bias_rate;
    model_init(m, 3);
    void *nan = malloc(m->used[A_GRADS]); // what a step does not clear or write is seen
    must(nan != NULL, "memory");
    memset(nan, 0xFF, m->used[A_GRADS]);
    b->to_device(m->base[A_GRADS], nan, m->used[A_GRADS]);
    free(nan);
    for (int l = 0; l < x->c.n_layers && x->few; l++) {
        double bias[8];
        for (int e = 0; e < 8; e++) bias[e] = e < x->few ? 9 : 0;
        host_to(b, b->stat_type, m->layer[l].bias, bias, 8);
    }
}

static double mean_aux(const Model *m) {
    double sum = 0;
    for (int l = m->c.dense_layers; l < m->c.n_layers && moe_layers(&m->c); l++) {
        double loss[2];
        host_from(m->b, m->b->stat_type, loss, m->layer[l].loss_sum, 2);
        sum += loss[0] + 10 * loss[1];
    }
    return sum;
}

// The gradients of the step, before the sums over ranks of the next one overwrite them.
static void step_once(Model *m, const Case *x, int step, const OptimConfig *o, float *grads) {
    const int T = x->c.seq_len;
    int tokens[B_ALL * 12], targets[B_ALL * 12], first = 0, B = B_ALL;
    if (m->shape.par) B = share_of_batch(&m->shape.par->world, B_ALL, me, &first);
    model_begin_step(m, step + 1, 1e-3, o);
    for (int k = 0; k < MICRO; k++) {
        for (int b = 0; b < B; b++)
            for (int t = 0; t < T; t++) {
                tokens[b * T + t] = token_of(step, k, first + b, t);
                targets[b * T + t] = token_of(step, k, first + b, t + 1);
            }
        model_set_tokens(m, tokens, targets, B * T);
        m->more_follow = k + 1 < MICRO;
        model_forward(m, B, T, 0, 1);
        model_backward(m, B, T, 1.0 / (B_ALL * T * MICRO), MICRO);
    }
    if (grads) {
        buckets_finish(&m->buckets);
        m->b->to_host(grads, m->base[A_GRADS], m->used[A_GRADS]);
    }
    model_update(m, o);
}

static void run(Trace *t, const Case *x, const Parallel *par, const Backend *b, int steps) {
    const OptimConfig o = {0.9, 0.95, 1e-8, 0.1, 1, x->sgd};
    open_model(&t->m, x, par, b);
    t->grads = malloc(t->m.used[A_GRADS]);
    must(t->grads != NULL, "memory");
    for (int s = 0; s < steps; s++) {
        step_once(&t->m, x, s, &o, s ? NULL : t->grads);
        const StepState st = model_state(&t->m);
        if (s >= STEPS) continue;
        t->loss[s] = st.loss, t->norm[s] = st.grad_norm, t->aux[s] = mean_aux(&t->m);
        check(!st.bad, "step %d was bad: %d", s, st.bad);
        for (int l = 0; l < x->c.n_layers && x->few; l++) {
            int load[8];
            t->m.b->to_host(load, t->m.layer[l].count_sum, sizeof load);
            check(load[0] == MICRO * B_ALL * x->c.seq_len && !load[7],
                "experts beyond %d get tokens", x->few);
        }
    }
}
static void close_run(Trace *t) {
    free(t->grads);
    model_free(&t->m);
}

// -------------------------------------------------------------------------------------------------
// what must be the same

static double relative(const double *a, const double *b, size_t n) {
    double d = 0, r = 0;
    for (size_t i = 0; i < n; i++) d += (a[i] - b[i]) * (a[i] - b[i]), r += b[i] * b[i];
    return d == 0 ? 0 : __builtin_sqrt(d / r);
}
static int within(double error, double limit) { return error <= limit; } // NaN is not

// The tensor of the alone model that is this one.
static const Tensor *twin(const Model *alone, const Tensor *t) {
    return tensor_of(&alone->table, t->row->kind, t->layer) + (t->expert > 0 ? t->expert : 0);
}
static void same_tensors(const Trace *a, const Trace *b, double limit, int gradients) {
    for (int i = 0; i < a->m.table.count; i++) {
        const Tensor *t = &a->m.table.tensor[i], *u = twin(&b->m, t);
        char name[128];
        tensor_name(name, sizeof name, t, 0);
        if (gradients && !t->row->trained) continue;
        double *x = malloc(2 * t->count * sizeof *x), *y = x + t->count, nx = 0, ny = 0;
        must(x != NULL, "memory");
        for (size_t k = 0; k < t->count && gradients; k++) {
            x[k] = a->grads[t->offset + k], y[k] = b->grads[u->offset + k];
            nx += x[k] * x[k], ny += y[k] * y[k];
        }
        const ArenaId arena = t->row->trained ? A_PARAMS : A_BUFFERS;
        if (!gradients) {
            host_from(a->m.b, F32, x, a->m.base[arena] + t->offset * 4, t->count);
            host_from(b->m.b, F32, y, b->m.base[arena] + u->offset * 4, t->count);
        }
        const double e = relative(x, y, t->count);
        check(within(e, limit), "%s of %s is off by %.3g", gradients ? "the gradient" : "the value",
            name, e);
        if (gradients && t->expert >= 0 && ny > 0)
            check(within(__builtin_fabs(__builtin_sqrt(nx / ny) - 1), 5e-4 + limit),
                "%s: its gradient is %.4f times that of one rank", name, __builtin_sqrt(nx / ny));
        free(x);
    }
}
static void same_run(const Trace *a, const Trace *b, double limit) {
    for (int s = 0; s < steps_of(); s++) {
        const double loss = relative(&a->loss[s], &b->loss[s], 1),
                     norm = relative(&a->norm[s], &b->norm[s], 1),
                     aux = relative(&a->aux[s], &b->aux[s], 1);
        check(within(loss, limit), "step %d: the loss is off by %.3g", s, loss);
        check(within(norm, limit), "step %d: the norm is off by %.3g", s, norm);
        check(within(aux, limit), "step %d: the balance losses are off by %.3g", s, aux);
    }
}

static uint64_t hash_of(uint64_t h, const void *p, size_t n) { // FNV-1a
    const unsigned char *x = p;
    for (size_t i = 0; i < n; i++) h = (h ^ x[i]) * 0x100000001B3u;
    return h;
}
// Dense parameters are the same bits on all ranks, those of an expert on all that have it.
static uint64_t same_bits(const Model *m, const Parallel *par) {
    uint64_t all = 0xCBF29CE484222325u, some = all;
    for (int i = 0; i < m->table.count; i++) {
        const Tensor *t = &m->table.tensor[i];
        const size_t bytes = t->count * 4;
        void *host = malloc(bytes);
        must(host != NULL, "memory");
        m->b->to_host(host, m->base[t->row->trained ? A_PARAMS : A_BUFFERS] + t->offset * 4, bytes);
        uint64_t *h = t->expert < 0 ? &all : &some;
        *h = hash_of(*h, host, bytes);
        free(host);
    }
    Comm *const group[2] = {(Comm *)(uintptr_t)&par->world, (Comm *)(uintptr_t)&par->replicas};
    for (int i = 0; i < 2; i++) {
        int64_t v[2] = {(int64_t)(i ? some : all), (int64_t) ~(i ? some : all)};
        comm_all_reduce(group[i], v, 2, COMM_I64, COMM_MAX);
        check(v[0] == ~v[1], "ranks have other %s parameters", i ? "expert" : "dense");
    }
    return all ^ some;
}

// -------------------------------------------------------------------------------------------------
// layouts

static void layout_name(char name[128], const Case *x, Layout y) {
    snprintf(name, 128, "parallel/%s%s-ep%d%s%s%s%s%s%s",
        !dev->apart                 ? ""
            : dev->act_type == BF16 ? "emulated-bf16/"
                                    : "emulated/",
        x->name, y.ep, y.zero ? "-zero" : "", y.ep > 1 ? "-" : "", y.ep > 1 ? way_names[y.way] : "",
        y.bf16 ? "-bf16" : "", y.chunk < 1000 ? "-chunks" : "", y.moved ? "-placed" : "");
}
static void open_layout(Parallel *par, const Config *c, Layout y) {
    memset(par, 0, sizeof *par);
    par->world = world;
    par->zero = y.zero, par->way = y.way, par->bf16 = y.bf16, par->chunk = y.chunk;
    parallel_open(par, c, dev, y.ep, y.moved ? moved(c) : even(c));
}

static void test_layout(const Case *x, Layout y, Trace *alone, int again) {
    char name[128];
    Parallel par;
    Trace t = {0};
    layout_name(name, x, y);
    if (!begin("%s", name)) return;
    if (!alone->grads) run(alone, x, NULL, dev, steps_of());
    const double limit = y.bf16 || dev->act_type == BF16 ? 3e-2 : 1e-5;
    open_layout(&par, &x->c, y);
    run(&t, x, &par, dev, steps_of());
    same_run(&t, alone, limit);
    if (!y.zero) same_tensors(&t, alone, limit, 1);
    same_tensors(&t, alone, limit > 1e-5 ? 0.15 : limit, 0); // AdamW makes much of little
    const uint64_t bits = same_bits(&t.m, &par);
    close_run(&t);
    if (again) { // to step 50, twice: every bit
        uint64_t late[2];
        for (int i = 0; i < 2; i++) {
            run(&t, x, &par, dev, 50);
            late[i] = same_bits(&t.m, &par);
            close_run(&t);
        }
        check(late[0] == late[1], "two runs differ");
        check(late[0] != bits, "nothing changed after step 20");
    }
    world = par.world;
    parallel_close(&par);
    finish();
}

// -------------------------------------------------------------------------------------------------
// traffic

static int owner(const Parallel *par, const Config *c, int l, int e) {
    return par->position[l * c->n_experts + e] / (c->n_experts / par->ep.size);
}

typedef struct Traffic {               // of this rank, in one step
    double bytes, rows, unique, slots; // rows, as they are to go; copies for ranks, for slots
} Traffic;

/* What this rank must send in a forward and a backward pass, from the choices of all ranks (topk: of
   rank p of the group from at[p] on). */
static Traffic expected(const Parallel *par, const Config *c, int l, const int *topk,
    const size_t *at, const int *rows, int most_rows) {
    const int P = par->ep.size, mine = par->ep.rank, K = c->top_k, E = c->n_experts;
    const int chunks = (most_rows + par->chunk - 1) / par->chunk;
    const double row = c->d_model * (par->bf16 || dev->act_type == BF16 ? 2.0 : 4.0);
    const double most = (most_rows < par->chunk ? most_rows : par->chunk) * (double)K;
    Traffic t = {0, 0, 0, 0};
    for (int i = 0; i < chunks; i++)
        for (int q = 0; q < P; q++) {
            double slots[2] = {0, 0}, items[2] = {0, 0}, all[2] = {0, 0}; // to q, from q
            for (int way = 0; way < 2; way++) {
                const int from = way ? q : mine, to = way ? mine : q;
                const size_t n0 = comm_share((size_t)rows[from], chunks, i),
                             n1 = comm_share((size_t)rows[from], chunks, i + 1);
                for (size_t n = n0; n < n1; n++) {
                    int here = 0;
                    for (int k = 0; k < K; k++)
                        here += owner(par, c, l, topk[(at[from] + n) * K + k]) == to;
                    slots[way] += here;
                    items[way] += here > 0;
                }
                all[way] = (double)(n1 - n0);
            }
            if (q == mine) continue;
            const double *go = par->way == WAY_ALLGATHER ? all
                : par->way == WAY_DEDUP                  ? items
                                                         : slots;
            t.rows += 2 * (go[0] + go[1]); // X and what became of it; two gradients
            t.unique += 2 * (items[0] + items[1]);
            t.slots += 2 * (slots[0] + slots[1]);
            t.bytes += 2 * (go[0] + go[1]) * row;
            if (par->way == WAY_ALLGATHER) // plans; gradients of the weights
                t.bytes += (E + 1) * 4.0 + 2 * most * 4 + most * 4;
            else // item and weight of a slot, gradients of those that came; counts
                t.bytes +=
                    slots[0] * 8 + slots[1] * 4 + (double)(sizeof(int) * (size_t)(E / P + 1));
        }
    return t;
}

// All choices of the ranks of a group, in layer l.
static int *choices(const Model *m, const Parallel *par, int l, const size_t *count, size_t all) {
    const size_t K = m->c.top_k, N = count[par->ep.rank];
    int *own = calloc(N * K + 1, sizeof *own), *list = calloc(all * K + 1, sizeof *list);
    must(own && list, "memory");
    m->b->to_host(own, m->layer[l].topk, N * K * sizeof *own);
    comm_all_gather_counts((Comm *)(uintptr_t)&par->ep, list, own, count, K * sizeof *own);
    free(own);
    return list;
}

static double sent(Parallel *par) { // bytes to other ranks of the group, since the last call
    CommCount n[COMM_KINDS];
    double bytes = 0;
    for (int i = 0; i < 2; i++) {
        if (i && par->on_ep == &par->ep) break;
        comm_counts_take(i ? &par->ep : par->on_ep, n);
        for (int k = 0; k < COMM_KINDS; k++) // setup: a debug build compares counts
            bytes += k == COMM_SETUP ? 0 : (double)n[k].bytes;
    }
    return bytes;
}

// Distinct experts for every row, all sets alike.
static void uniform(Model *m, int N, int trial) {
    const int K = m->c.top_k, E = m->c.n_experts;
    int *topk = malloc((size_t)N * K * sizeof *topk);
    must(topk != NULL, "memory");
    for (int l = m->c.dense_layers; l < m->c.n_layers; l++) {
        for (int n = 0; n < N; n++) {
            const uint64_t id = ((uint64_t)trial * 64 + l) * 64 + me;
            for (int k = 0, taken; k < K; k++) {
                uint64_t draw = (uint64_t)k << 32;
                do {
                    topk[n * K + k] = (int)(counter_hash(id, n, draw++) % (uint64_t)E);
                    taken = 0;
                    for (int j = 0; j < k; j++) taken |= topk[n * K + j] == topk[n * K + k];
                } while (taken);
            }
        }
        m->b->to_device(m->layer[l].topk, topk, (size_t)N * K * sizeof *topk);
    }
    free(topk);
    m->reuse_routing = 1;
}

/* Bytes counted where they are sent = bytes derived from the routing; over 100 uniform routings the
   rows are those that the formula expects. */
static void test_traffic(int ep, Way way, int bf16, int chunk, double *rows_of_way) {
    enum { TRIALS = 100 };
    Case x = {"traffic", shape(16, 4), 0.02, 0.003, 1e9, 0, 0, 0, 0, 0};
    const Layout y = {ep, 0, bf16, chunk, 1, way};
    const OptimConfig o = {0.9, 0.95, 1e-8, 0.1, 1, 0};
    Parallel par;
    Model m;
    char name[128];
    layout_name(name, &x, y);
    if (!begin("%s", name)) return;
    x.c.dense_layers = 1, x.c.n_layers = 3;
    open_layout(&par, &x.c, y);
    open_model(&m, &x, &par, dev);
    const int T = x.c.seq_len, B = m.shape.B, P = par.ep.size;
    int rows[64] = {0}, most = 0, tokens[B_ALL * 12] = {0};
    size_t at[64] = {0}, count[64] = {0}, all = 0;
    for (int p = 0; p < P; p++) {
        rows[p] = share_of_batch(&par.world, B_ALL, par.ep.member[p], NULL) * T;
        at[p] = all;
        all += count[p] = (size_t)rows[p];
    }
    for (int r = 0; r < W; r++) {
        const int n = share_of_batch(&par.world, B_ALL, r, NULL) * T;
        if (n > most) most = n;
    }
    double formula = 0, total = 0, unique = 0, slots = 0;
    for (int trial = 0; trial < TRIALS; trial++) {
        const int whole = trial < 3; // a few backward as well: they are slow
        Traffic want = {0, 0, 0, 0};
        model_begin_step(&m, 1, 0, &o);
        model_set_tokens(&m, tokens, tokens, B * T);
        uniform(&m, B * T, trial);
        sent(&par);
        m.exchange->rows_sent = 0;
        m.more_follow = 1;
        model_forward(&m, B, T, 0, 1);
        if (whole) model_backward(&m, B, T, 1, 1);
        const double bytes = sent(&par);
        for (int l = x.c.dense_layers; l < x.c.n_layers; l++) {
            int *topk = choices(&m, &par, l, count, all);
            const Traffic t = expected(&par, &x.c, l, topk, at, rows, most);
            want.bytes += t.bytes, want.rows += t.rows;
            want.unique += t.unique, want.slots += t.slots;
            formula += 2 * way_bytes(way, rows[par.ep.rank], 1, x.c.n_experts, x.c.top_k, P);
            free(topk);
        }
        if (whole) check(bytes == want.bytes, "sent %.0f bytes, not %.0f", bytes, want.bytes);
        const double moved_rows = (double)m.exchange->rows_sent;
        check(moved_rows == want.rows / (whole ? 1 : 2), "trial %d: sent %.0f rows, not %.0f",
            trial, moved_rows, want.rows / (whole ? 1 : 2));
        total += want.rows / 2, unique += want.unique / 2, slots += want.slots / 2;
        rows_of_way[trial] = want.rows;
    }
    double sums[4] = {total, formula, unique, slots};
    comm_all_reduce(&par.world, sums, 4, COMM_F64, COMM_SUM);
    check(within(__builtin_fabs(sums[0] / sums[1] - 1), 0.03),
        "%.0f rows, the formula expects %.0f", sums[0], sums[1]);
    check(sums[2] < sums[3], "no token has two experts on another rank");
    model_free(&m);
    world = par.world;
    parallel_close(&par);
    finish();
}

int main(int argc, char **argv) {
    const char *why = "";
    comm_open(&world);
    W = world.size, me = world.rank;
    at_finish = ranks_agree;
    comm_set_timeout(&world, 100);
    dev = backend_cpu();
#ifdef HAVE_EMULATED
    if (argc >= 3 && !strcmp(argv[1], "--device")) {
        dev = backend_emulated(strcmp(argv[2], "bf16") ? F32 : BF16, &why);
        if (!dev) die(USER_ERROR, "%s", why);
        argv += 2, argc -= 2;
    }
#endif
    (void)why;
    if (me) must(freopen("/dev/null", "w", stdout) != NULL, "/dev/null");
    if (argc == 2) filter = argv[1];
    for (int i = 0; i < CASES; i++) {
        const Case x = case_of(i);
        Trace alone = {0};
        int n = 0;
        for (int ep = 1; ep <= W && ep <= x.c.n_experts; ep++)
            for (int zero = 0; zero < 2; zero++)
                for (Way way = WAY_ALLTOALL; way <= WAY_ALLGATHER; way++)
                    for (int form = 0; form < 4; form++) {
                        // alternately: chunks, another placement, rows in bf16
                        const Layout y = {ep, zero, form == 3, form & 1 ? 7 : 1024, form >= 2, way};
                        if (W % ep || x.c.n_experts % ep) continue;
                        if (ep == 1 && (way != WAY_DEDUP || form)) continue;
                        if (i && (n++ + form) % 3) continue; // the first case has them all
                        // a device that is slow: each way and form once
                        if (dev->apart &&
                            (i > 1 || (i && ep > 1) || zero != (form & 1) || form == 1 || ep != W))
                            continue;
                        test_layout(&x, y, &alone, i < 2 && form == 1 && !dev->apart);
                    }
        if (alone.grads) close_run(&alone);
    }
    for (int ep = 2; ep <= W && !dev->apart; ep += 2)
        for (int form = 0; form < 2 && W % ep == 0; form++) {
            double rows[3][100] = {{0}};
            for (Way way = WAY_ALLTOALL; way <= WAY_ALLGATHER; way++)
                test_traffic(ep, way, form, form ? 7 : 1024, rows[way - 1]);
            if (!begin("parallel/traffic-ep%d-ways%s", ep, form ? "-chunks" : "")) continue;
            int fewer = 0;
            for (int i = 0; i < 100; i++) {
                check(rows[1][i] <= rows[0][i], "routing %d: dedup sends %.0f rows, alltoall %.0f",
                    i, rows[1][i], rows[0][i]);
                fewer += rows[1][i] < rows[0][i];
            }
            check(fewer == 100 || *filter, "dedup sends fewer in %d of 100 routings", fewer);
            finish();
        }
    comm_close(&world);
    if (!tried) die(USER_ERROR, "no check has '%s' in its name", filter);
    return failures != 0;
}
