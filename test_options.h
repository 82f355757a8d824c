/* test_options.h: the options of a model together. Part of test_moe.c, which includes it after what
   it needs from there: models, batches, gradients, the comparison of arenas.

     options     every pair of values of ten options meets in at least one of thirteen models (a
                 pairwise covering table; the first check counts the pairs). In each of them: the
                 gradient against central differences, float against double, any number of threads,
                 the three levels of recomputation, and rows that do not see their neighbours
     select      capacity and token rounding against a search written from their definition
     bias        the update of the selection bias
     upcycle     a dense model's logits from its upcycled one */

// -------------------------------------------------------------------------------------------------
// the table

enum { FACTORS = 10, CASES = 13, LEVELS = 3 };
enum {
    F_QK,
    F_ROUTER,
    F_RENORM,
    F_SHARED,
    F_DENSE,
    F_TIED,
    F_ROUTING,
    F_RECOMPUTE,
    F_BALANCE,
    F_K
};
enum { SELECT_TOPK, SELECT_CAPACITY, SELECT_ROUND }; // levels of F_ROUTING
static const int levels[FACTORS] = {3, 2, 2, 2, 2, 2, 3, 3, 2, 3};
static const int option_table[CASES][FACTORS] = {
    {2, 0, 1, 0, 0, 1, 2, 1, 1, 0}, {1, 1, 0, 1, 1, 0, 2, 0, 0, 2}, {0, 1, 1, 0, 1, 0, 1, 2, 1, 1},
    {0, 0, 0, 0, 0, 1, 0, 0, 0, 1}, {2, 1, 0, 1, 1, 0, 0, 1, 1, 0}, {2, 0, 1, 1, 0, 1, 1, 2, 0, 2},
    {1, 0, 1, 0, 1, 1, 1, 0, 1, 0}, {1, 1, 0, 1, 0, 0, 1, 1, 0, 1}, {1, 0, 1, 0, 0, 0, 0, 2, 1, 2},
    {0, 1, 0, 1, 1, 1, 2, 2, 0, 0}, {0, 0, 0, 1, 1, 0, 2, 1, 1, 2}, {2, 1, 0, 1, 0, 0, 2, 0, 0, 1},
    {2, 1, 1, 0, 0, 0, 2, 0, 0,
        1}, // a triple that matters: added slots beside renormalised sigmoids
};

static void test_option_pairs(void) {
    if (!begin("options/every-pair")) return;
    for (int a = 0; a < FACTORS; a++)
        for (int b = a + 1; b < FACTORS; b++) {
            int seen[LEVELS][LEVELS] = {{0}};
            for (int i = 0; i < CASES; i++) seen[option_table[i][a]][option_table[i][b]] = 1;
            for (int x = 0; x < levels[a]; x++)
                for (int y = 0; y < levels[b]; y++)
                    check(seen[x][y], "options %d = %d and %d = %d never meet", a, x, b, y);
        }
    finish();
}

static Config option_config(const int *o) {
    const int E = 4, K = o[F_K] == 0 ? 1 : o[F_K] == 1 ? 2 : E;
    Config c = config(31, 3, 18, 4, 2, 6, E, K, 9);
    const int norms[] = {QK_NORM_NONE, QK_NORM_FULL, QK_NORM_HEAD};
    c.qk_norm = norms[o[F_QK]];
    c.router = o[F_ROUTER] ? ROUTER_SIGMOID : ROUTER_SOFTMAX;
    c.norm_topk = o[F_RENORM];
    c.d_shared = o[F_SHARED] ? 13 : 0;
    c.dense_layers = o[F_DENSE];
    c.d_dense = o[F_DENSE] ? 19 : 0;
    c.tied = o[F_TIED];
    return c;
}

// recompute -1: as the table has it
static Model option_model(const int *o, const Backend *b, int B, int T, int recompute) {
    const Config c = option_config(o);
    const ModelShape s = {.B = B,
        .T = T,
        .train = 1,
        .recompute = recompute < 0 ? o[F_RECOMPUTE] : recompute,
        .tile = o[F_ROUTING] == SELECT_ROUND ? 4 : 0};
    Model m;
    model_build(&m, &c, b, s, NULL);
    lively(&m);
    m.capacity = o[F_ROUTING] == SELECT_CAPACITY ? 0.7 : -1;
    m.aux_coef = o[F_BALANCE] * 0.3;
    m.z_coef = o[F_BALANCE] * 0.1;
    m.bias_rate = 0.01;
    return m;
}

// Gives `to` the experts and slots that `from` chose.
static void same_routing(Model *to, const Model *from) {
    const int N = from->shape.B * from->shape.T;
    to->reuse_routing = 1;
    for (int l = 0; l < to->c.n_layers; l++) {
        if (!is_moe_layer(&to->c, l)) continue;
        const Plan *f = &from->layer[l].plan, *t = &to->layer[l].plan;
        const int S = f->offsets[f->E];
        memcpy(to->layer[l].topk, from->layer[l].topk, (size_t)N * to->c.top_k * sizeof(int));
        memcpy(t->offsets, f->offsets, (f->E + 1) * sizeof(int));
        memcpy(t->row, f->row, S * sizeof(int));
        memcpy(t->expert, f->expert, S * sizeof(int));
        memcpy(t->slot, f->slot, S * sizeof(int));
        memcpy(t->row_begin, f->row_begin, (N + 1) * sizeof(int));
    }
}

static void test_options(int row) {
    enum { B = 3, T = 9, STEPS = 3 };
    const int *o = option_table[row], mark = pooled;
    const Config c = option_config(o);
    const Batch x = new_batch(B, T, c.vocab_size, 3, 5);
    const size_t V = c.vocab_size;
    Model m = option_model(o, backend_f64(), B, T, -1),
          s = option_model(o, backend_cpu(), B, T, -1);
    set_threads(3);
    if (begin("options/gradient/%d", row)) {
        gradients(&m, 1, 0, &x, 1); // chooses the experts that the differences keep
        m.reuse_routing = 1;
        const double *g = copy_of(m.base[A_GRADS], m.used[A_GRADS]);
        int moved[2] = {0, 0};
        for (int l = c.dense_layers; l < c.n_layers; l++)
            for (int i = 0; i < 2; i++) moved[i] += m.layer[l].moved[i];
        check((o[F_ROUTING] != SELECT_TOPK) == (moved[0] > 0), "%d slots dropped", moved[0]);
        check((o[F_ROUTING] == SELECT_ROUND && c.top_k < c.n_experts) == (moved[1] > 0),
            "%d slots added", moved[1]);
        set_threads(1);
        within(worst_gradient(&m, &x, g), 1e-6, "worst tensor");
        finish();
    }
    set_threads(3);
    if (begin("options/float/%d", row)) {
        gradients(&s, 1, 0, &x, 1);
        same_routing(&m, &s);
        gradients(&m, 1, 0, &x, 1);
        compare_losses(losses_of(&s, &x), losses_of(&m, &x), 1e-5);
        within(error_of(s.b, all_logits(&s, x.N), all_logits(&m, x.N), x.N * V), 1e-5, "logits");
        within(worst_float(&s, &m), 1e-5, "worst gradient");
        finish();
    }
    model_free(&m);
    if (begin("options/rows/%d", row)) { // evaluation is dropless: no row sees its neighbours
        const size_t bytes = T * V * sizeof(float);
        gradients(&s, 1, 0, &x, 1);
        const char *training = all_logits(&s, x.N);
        model_loss(&s, x.tokens, x.targets, B, T);
        const char *all = all_logits(&s, x.N);
        check(o[F_ROUTING] != SELECT_TOPK || !memcmp(all, training, B * bytes),
            "training's forward pass differs");
        for (int i = 0; i < B; i++) {
            model_loss(&s, x.tokens + i * T, x.targets + i * T, 1, T);
            check(!memcmp(all + i * bytes, all_logits(&s, T), bytes), "row %d alone differs", i);
        }
        finish();
    }
    model_free(&s);

    enum { WIDE_B = 4, WIDE_T = 200 }; // sizes above those where a backend stays on one thread
    const int threads[] = {1, 2, 3, 8};
    StepState log[2][STEPS];
    Model base = {0};
    memset(log, 0, sizeof log);
    if (begin("options/threads/%d", row)) {
        for (int i = 0; i < 4; i++) {
            set_threads(threads[i]);
            Model n = option_model(o, backend_cpu(), WIDE_B, WIDE_T, -1);
            train(&n, STEPS, WIDE_B, WIDE_T, log[i > 0]);
            if (i == 0) {
                base = n;
                continue;
            }
            check(!memcmp(log[0], log[1], sizeof log[0]), "%d threads: other losses", threads[i]);
            same_arenas(&base, &n, "threads", threads[i]);
            check(!n.used[A_BUFFERS] || !all_zero(n.base[A_BUFFERS], n.used[A_BUFFERS]),
                "the selection bias stays zero");
            model_free(&n);
        }
        model_free(&base);
        finish();
    }
    set_threads(2);
    if (begin("options/recompute/%d", row)) { // what was saved, and what was full of NaN
        for (int level = 0; level < 3; level++) {
            Model n = option_model(o, backend_cpu(), B, T, level);
            if (level) poison(&n);
            train(&n, STEPS, B, T, log[level > 0]);
            if (level == 0) {
                base = n;
                continue;
            }
            check(!memcmp(log[0], log[1], sizeof log[0]), "--recompute %d: other losses", level);
            same_arenas(&base, &n, "recompute", level);
            check(n.used[A_SAVED] < base.used[A_SAVED], "--recompute %d saves no memory", level);
            base.used[A_SAVED] = n.used[A_SAVED];
            model_free(&n);
        }
        model_free(&base);
        finish();
    }
    release_to(mark);
}

// -------------------------------------------------------------------------------------------------
// capacity, token rounding

// Whether row n is among the `want` that expert e takes: a count of those that come before it.
static int naive_takes(
    int n, int e, int want, const double *rank, const double *own, int N, int E) {
    int before = 0;
    for (int i = 0; i < N; i++) {
        const double a = own[(size_t)i * E + e], b = own[(size_t)n * E + e];
        const double x = rank[(size_t)i * E + e], y = rank[(size_t)n * E + e];
        if (a != b ? a > b : x != y ? x > y : i < n) before++;
    }
    return before < want;
}

/* Selection from random logits on a coarse grid, so that many rows tie. `own` is the weight of an
   expert that the row chose, else 0: the chosen ones come first, by weight, then by logit. */
static void test_select(int kind) {
    const Backend *b = backend_f64();
    static const char *const kind_name[] = {"softmax", "sigmoid"};
    if (!begin("select/%s", kind_name[kind])) return;
    for (int trial = 0; trial < 80; trial++) {
        const int mark = pooled, E = 1 + below(9), K = 1 + below(E), N = 1 + below(70);
        const int tile = trial % 2 ? 1 + below(N) : 0, limit = below(N + 2), S = N * K;
        const int S_max = tile ? (S + E * (tile - 1) < N * E ? S + E * (tile - 1) : N * E) : S;
        const Config c = config(2, 1, 4, 1, 1, 2, E, K, 1);
        const ScratchShape shape = {1, N, N, S_max, 1, 0, 0};
        const Router r = {kind, N, 4, E, K, 1, 0, 0, limit, tile, 0};
        double *logits = normals((size_t)N * E, 1, 0), *lse = fresh(N, 8), *weight = fresh(S, 8);
        double *own = fresh((size_t)N * E, 8), *rank = fresh((size_t)N * E, 8);
        int *idx = random_choice(N, K, E), *count = fresh(E, 4), moved[2] = {0, 0};
        memset(count, 0, E * sizeof(int));
        memset(own, 0, (size_t)N * E * 8);
        for (int n = 0; n < N; n++) {
            double total = 0;
            for (int e = 0; e < E; e++) {
                double *z = logits + (size_t)n * E + e;
                *z = floor(2 * *z) / 2;
                total += exp(*z);
            }
            lse[n] = floor(log(total) * 4) / 4; // rows tie in their probabilities too
            for (int k = 0; k < K; k++) {
                weight[n * K + k] = (1 + below(4)) / 4.0;
                own[(size_t)n * E + idx[n * K + k]] = weight[n * K + k];
                count[idx[n * K + k]]++;
            }
            for (int e = 0; e < E; e++)
                rank[(size_t)n * E + e] =
                    logits[(size_t)n * E + e] - (kind == ROUTER_SIGMOID ? 0 : lse[n]);
        }
        Plan p = {N, E, S_max, E, fresh(E + 1, 4), fresh(S_max, 4), fresh(S_max, 4),
            fresh(S_max, 8), fresh(N + 1, 4), fresh(S_max, 4)};
        void *scratch = fresh(b->scratch_bytes(&c, &shape), 1);
        set_threads(1 + trial % 3);
        b->plan_select(&p, moved, idx, weight, count, logits, lse, r, 0, scratch);
        int at = 0, dropped = 0, added = 0;
        for (int e = 0; e < E; e++) {
            // by definition: half to even, at most N
            double f = tile ? rint((double)count[e] / tile) : 0;
            while (f * tile > N) f--;
            const int want = tile ? (int)f * tile : count[e] < limit ? count[e] : limit;
            check(p.offsets[e] == at, "expert %d starts at %d, not %d", e, p.offsets[e], at);
            for (int n = 0; n < N; n++) {
                const double z = logits[(size_t)n * E + e], mine = own[(size_t)n * E + e];
                const int takes = naive_takes(n, e, want, rank, own, N, E);
                dropped += !takes && mine > 0;
                added += takes && mine == 0;
                if (!takes) continue;
                const double raw = kind == ROUTER_SIGMOID ? 1 / (1 + exp(-z)) : exp(z - lse[n]);
                check(p.row[at] == n && p.expert[at] == e, "slot %d: row %d, expert %d, not %d, %d",
                    at, p.row[at], p.expert[at], n, e);
                within(relative(get(b, p.weight, at), mine > 0 ? mine : raw), 1e-14, "weight");
                check_measured[0] = 0;
                at++;
            }
        }
        check(p.offsets[E] == at && p.row_begin[N] == at, "%d slots, not %d", p.offsets[E], at);
        check(moved[0] == dropped && moved[1] == added, "%d dropped, %d added, not %d, %d",
            moved[0], moved[1], dropped, added);
        check(p.row_begin[0] == 0, "row 0 starts at slot %d", p.row_begin[0]);
        for (int n = 0; n < N; n++)
            for (int i = p.row_begin[n]; i < p.row_begin[n + 1]; i++) {
                check(p.row[p.slot[i]] == n, "slot list of row %d", n);
                check(i == p.row_begin[n] || p.expert[p.slot[i - 1]] < p.expert[p.slot[i]],
                    "row %d not in expert order", n);
            }
        release_to(mark);
    }
    finish();
}

/* Large enough for several threads: the same plan from each number of them, also where a third of the
   logits are NaN: the step is lost then, but the plan must stay within its arrays. */
static void test_select_threads(void) {
    enum { N = 4000, E = 16, K = 3, TILE = 128, S = N * K + E * (TILE - 1) };
    const Backend *b = backend_cpu();
    const int mark = pooled, threads[] = {1, 2, 3, 8};
    if (!begin("select/threads")) return;
    const Config c = config(2, 1, 4, 1, 1, 2, E, K, 1);
    const ScratchShape shape = {1, N, N, S, 1, 0, 0};
    float *logits = on(b, normals(N * E, 1, 0), N * E);
    const float *lse = on(b, normals(N, 0.1, 2), N), *weight = on(b, normals(N * K, 1, 4), N * K);
    int *idx = random_choice(N, K, E), *count = fresh(E, 4);
    memset(count, 0, E * sizeof(int));
    for (int s = 0; s < N * K; s++) count[idx[s]]++;
    Plan first = {0};
    for (int turn = 0; turn < 4; turn++)
        for (int i = 0; i < 4; i++) {
            const int tile = turn % 2 * TILE;
            for (int k = 0; k < N * E && turn == 2 && !i; k += 3) logits[k] = NAN;
            int moved[2] = {0, 0};
            const Router r = {ROUTER_SOFTMAX, N, 4, E, K, 1, 0, 0, N * K / E, tile, 0};
            Plan p = {N, E, S, E, fresh(E + 1, 4), fresh(S, 4), fresh(S, 4), fresh(S, 4),
                fresh(N + 1, 4), fresh(S, 4)};
            set_threads(threads[i]);
            b->plan_select(&p, moved, idx, weight, count, logits, lse, r, 0,
                fresh(b->scratch_bytes(&c, &shape), 1));
            if (!i) first = p;
            for (int e = 0; e < E; e++)
                for (int s = p.offsets[e]; s < p.offsets[e + 1]; s++)
                    check(p.row[s] >= 0 && p.row[s] < N &&
                            (s == p.offsets[e] || p.row[s - 1] < p.row[s]),
                        "expert %d: row %d", e, p.row[s]);
            check(!memcmp(p.row, first.row, S * 4) && !memcmp(p.slot, first.slot, S * 4) &&
                    !memcmp(p.weight, first.weight, S * 4) &&
                    !memcmp(p.offsets, first.offsets, (E + 1) * 4),
                "%d threads: another plan", threads[i]);
        }
    release_to(mark);
    finish();
}

// The capacity of an expert is ceil(F N K / E), at most N, and not one more for a rounding error.
static void test_limit(void) {
    static const struct {
        double capacity;
        int N, limit;
    } want[] = {{1, 20, 10}, {1.1, 20, 11}, {1.01, 20, 11}, {0.3, 20, 3}, {0.7, 20, 7},
        {0.01, 20, 1}, {0, 20, 0}, {2, 20, 20}, {1e9, 20, 20}, {-1, 20, 20}, {1, 7, 4},
        {1.9, 7, 7}};
    if (!begin("select/limit")) return;
    const Config c = config(31, 1, 8, 1, 1, 2, 4, 2, 3); // K / E = 1 / 2
    Model m = new_model(&c, backend_cpu(), 1, 20, 1, 0, NULL);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        m.capacity = want[i].capacity;
        const int limit = router_of(&m, want[i].N, 1).limit;
        check(limit == want[i].limit, "capacity %g of %d tokens: %d, not %d", want[i].capacity,
            want[i].N, limit, want[i].limit);
    }
    model_free(&m);
    finish();
}

static void test_bias(void) {
    const Backend *b = backend_f64();
    double bias[4] = {0.5, -1, 0, 0.25};
    const int load[4] = {10, 2, 6, 6}, uneven[4] = {3, 3, 2, 2}; // means 6 and 2.5
    const double want[4] = {0.5 - 0.125, -1 + 0.125, 0, 0.25};
    const double next[4] = {0.25, -1, 0.125, 0.375};
    StepState st = {0};
    if (!begin("bias/update")) return;
    b->update_bias(bias, load, 4, 0.125, &st);
    for (int e = 0; e < 4; e++) check(bias[e] == want[e], "expert %d: %g", e, bias[e]);
    b->update_bias(bias, uneven, 4, 0.125, &st);
    for (int e = 0; e < 4; e++) check(bias[e] == next[e], "expert %d: %g, then", e, bias[e]);
    st.bad = BAD_LOSS; // a step that was not finite changes nothing
    b->update_bias(bias, load, 4, 0.125, &st);
    for (int e = 0; e < 4; e++) check(bias[e] == next[e], "a bad step moved expert %d", e);
    finish();
}

// -------------------------------------------------------------------------------------------------
// upcycling

// which 0: plain; 1: dense first layer and shared expert; 2: sigmoid router. All without noise.
static void test_upcycle(const Backend *b, double limit, int which) {
    enum { B = 2, T = 11 };
    const int mark = pooled;
    if (!begin("upcycle/%s/%d", b == backend_cpu() ? "float" : "double", which)) return;
    const Config dense = config(37, 3, 20, 4, 2, 6, 1, 1, 14);
    Config c = dense;
    c.n_experts = 5, c.top_k = 2 + which, c.norm_topk = 1, c.d_dense = c.d_expert;
    if (which == 1) c.dense_layers = 1, c.d_shared = 9;
    if (which == 2) c.router = ROUTER_SIGMOID;
    const Batch x = new_batch(B, T, c.vocab_size, 5, 0);
    Model d = new_model(&dense, b, B, T, 0, 0, NULL), m = new_model(&c, b, B, T, 1, 0, NULL);
    lively(&d);
    model_init(&m, 3);
    model_upcycle(&m, &d, 0, 3);
    const double before = model_loss(&d, x.tokens, x.targets, B, T).loss;
    const void *logits = all_logits(&d, x.N);
    const double after = model_loss(&m, x.tokens, x.targets, B, T).loss;
    const size_t n = (size_t)x.N * c.vocab_size;
    double *ref = fresh(n, sizeof *ref);
    for (size_t i = 0; i < n; i++) ref[i] = get(b, logits, i);
    within(error_of(b, all_logits(&m, x.N), ref, n), limit, "logits");
    within(relative(after, before), limit, "loss");
    int seen = 0;
    for (int l = c.dense_layers; l < c.n_layers; l++)
        for (int e = 0; e < c.n_experts; e++) seen += m.layer[l].count[e] > 0;
    check(seen > c.n_layers, "only %d experts were used", seen);

    // noise: of the stated size, different in each expert, the same again
    const void *clean = copy_of(m.base[A_PARAMS], m.used[A_PARAMS]);
    model_upcycle(&m, &d, 0.1, 3);
    const void *noisy = copy_of(m.base[A_PARAMS], m.used[A_PARAMS]);
    const Tensor *t = tensor_of(&m.table, T_GATE_UP, c.n_layers - 1), *u = t + 1;
    double diff = 0, between = 0, square = 0;
    for (size_t i = 0; i < t->count; i++) {
        const double v = get(b, clean, t->offset + i), w = get(b, noisy, t->offset + i),
                     other = get(b, noisy, u->offset + i);
        square += v * v, diff += (w - v) * (w - v), between += (w - other) * (w - other);
    }
    check(fabs(sqrt(diff / square) - 0.1) < 0.01, "noise of %g", sqrt(diff / square));
    check(fabs(sqrt(between / square) - 0.1 * sqrt(2)) < 0.015, "experts %g apart",
        sqrt(between / square));
    for (int i = 0; i < m.table.count; i++) {
        const Tensor *k = &m.table.tensor[i];
        check(k->expert >= 0 || !k->row->trained ||
                !memcmp((const char *)clean + k->offset * b->param_size,
                    (const char *)noisy + k->offset * b->param_size, k->count * b->param_size),
            "noise in %s", name_of(k));
    }
    model_upcycle(&m, &d, 0.1, 3);
    check(!memcmp(noisy, m.base[A_PARAMS], m.used[A_PARAMS]), "other noise from the same seed");
    model_upcycle(&m, &d, 0.1, 4);
    check(memcmp(noisy, m.base[A_PARAMS], m.used[A_PARAMS]), "the same noise from another seed");
    model_free(&m);
    model_free(&d);
    release_to(mark);
    finish();
}

static void test_all_options(void) {
    test_option_pairs();
    for (int i = 0; i < CASES; i++) test_options(i);
    test_select(ROUTER_SOFTMAX);
    test_select(ROUTER_SIGMOID);
    test_select_threads();
    test_limit();
    test_bias();
    for (int i = 0; i < 3; i++) {
        test_upcycle(backend_f64(), 1e-13, i);
        test_upcycle(backend_cpu(), 1e-6, i);
    }
}
