/* test_moe.c: what the numbers must be. ./test_moe runs every check, one line each on stdout:
     ok NAME | FAIL NAME: reason | skip NAME: reason
   and exits with status 1 if one failed. ./test_moe WORD runs the checks whose name contains WORD;
   -v adds the measured errors. ./test_moe hash prints the sha256 of a short training run.
   ./test_moe diff holds every operation of a device against the reference (test_diff.h), ./test_moe
   parity whole models against those on the CPU (test_parity.h).

   It links moe_cpu.c twice: backend_cpu in float, and backend_f64, the same source in double.
     gradient    an operation's backward against central differences of its forward, in double
     float       the same operation in float against double
     cpu, emulated   OPERATION/SHAPE/TYPE: every operation of Backend alone, on these devices
     model       the whole model: both of the above, and the forward against a second, naive
                 implementation that is written straight from the formulas
     parity      whole models on a second device beside the CPU (test_parity.h)
     reference   values known from elsewhere: worked examples, the textbook optimisers
     options     every option together with every other one; select, bias, upcycle: capacity and
                 token rounding, the selection bias, a dense model made into experts
     ranks       plans, rows and sums that travel between ranks; two halves are the whole
     same        bits that must not change: threads, batch, cache, recomputation, poisoned memory
     routing     NaN and Inf, ties, experts without a token, the plan
     gemm        matrix products and the elementary functions
     table       layout, start values, parameter counts of published models
     hash20      one sha256 that every compiler, vector width and machine reproduces

   Errors are relative Frobenius norms, ||x - ref|| / ||ref||; NaN fails. Every output and all
   scratch is filled with NaN beforehand, and every array has exactly the size that the contract
   gives it, so that the address sanitizer sees a step beyond. Random numbers come from counters.

   The operations are checked in test_ops.h, where reporting and the error measures are too, and
   one at a time in test_diff.h; the options of a model in test_options.h, what happens between ranks
   in test_exchange.h. To add a check, write a function and enter it in main. */
#include "test_ops.h"

// -------------------------------------------------------------------------------------------------
// models

enum { QWEN3, OLMOE, MIXTRAL, DENSE, DEEPSEEK, SIGMOID, MODELS };
static const char *const model_name[MODELS] = {
    "qwen3", "olmoe", "mixtral", "dense-tied", "deepseek", "sigmoid-tied"};

// Small models in the form of each family, with awkward sizes.
static Config model_config(int which) {
    Config c;
    switch (which) { //           V  L  C  heads  hd E  K  I
    case QWEN3: c = config(37, 2, 20, 4, 2, 6, 4, 2, 11); break;
    case OLMOE: c = config(33, 2, 17, 3, 3, 8, 5, 3, 9); break;
    case MIXTRAL: c = config(29, 2, 16, 4, 1, 4, 8, 2, 10); break;
    case DENSE: c = config(37, 2, 20, 2, 1, 10, 1, 1, 24); break;
    case DEEPSEEK: c = config(40, 3, 18, 2, 2, 8, 6, 2, 7); break;
    default: c = config(31, 2, 12, 2, 1, 6, 4, 1, 33); break;
    }
    if (which == OLMOE) c.qk_norm = QK_NORM_FULL, c.norm_eps = 1e-5;
    if (which == MIXTRAL || which == SIGMOID) c.qk_norm = QK_NORM_NONE, c.rope_theta = 1e6;
    if (which == DEEPSEEK || which == SIGMOID) c.router = ROUTER_SIGMOID, c.d_shared = 13;
    if (which == DEEPSEEK) c.dense_layers = 1, c.d_dense = 19;
    if (which == DENSE || which == SIGMOID) c.tied = 1;
    c.norm_topk = which != OLMOE && which != SIGMOID;
    return c;
}

static Model new_model(
    const Config *c, const Backend *b, int B, int T, int train, int cache_len, const Model *from) {
    const ModelShape s = {.B = B, .T = T, .cache_len = cache_len, .train = train};
    Model m;
    model_build(&m, c, b, s, from);
    return m;
}
static void *param_of(const Model *m, const Tensor *t) {
    return m->base[t->row->trained ? A_PARAMS : A_BUFFERS] + t->offset * m->b->param_size;
}
static void *grad_of(const Model *m, const Tensor *t) {
    return m->base[A_GRADS] + t->offset * m->b->grad_size;
}
static const char *name_of(const Tensor *t) {
    static char name[128];
    tensor_name(name, sizeof name, t, 0);
    return name;
}

/* Weights large enough that every part of the model matters: with start values of 0.02 attention is
   flat and the routers are undecided. The same values, which floats can hold, on every backend. */
static void lively(Model *m) {
    for (int i = 0; i < m->table.count; i++) {
        const int mark = pooled;
        const Tensor *t = &m->table.tensor[i];
        const int norm = t->cols == 1 && t->row->trained;
        const double fan = t->row->kind == T_EMBED ? 2 : (double)t->cols;
        const double scale = t->cols == 1 ? 0.2 : 1 / sqrt(fan);
        double *x = fresh(t->count, sizeof *x);
        for (size_t k = 0; k < t->count; k++)
            x[k] = (float)(norm + scale * counter_normal(9, (uint64_t)i, k));
        host_to(m->b, t->row->trained ? m->b->param_type : m->b->stat_type, param_of(m, t), x,
            t->count);
        release_to(mark);
    }
    model_params_changed(m);
}

/* B sequences of tokens that follow a pattern with some noise, and the next token of each as its
   target; every `ignore`th target is ignored. */
typedef struct Batch {
    int B, T, N, valid, *tokens, *targets;
} Batch;
static Batch new_batch(int B, int T, int V, uint64_t seed, int ignore) {
    Batch x = {
        B, T, B * T, 0, fresh((size_t)B * T, sizeof(int)), fresh((size_t)B * T, sizeof(int))};
    int last = (int)(seed % (uint64_t)V);
    for (int n = 0; n < x.N; n++) {
        const uint64_t h = counter_hash(10, seed, (uint64_t)n);
        x.tokens[n] = last;
        last = h % 4 ? (last * 5 + 3) % V : (int)((h >> 8) % (uint64_t)V);
        x.targets[n] = ignore && n % ignore == 1 ? -1 : last;
        x.valid += x.targets[n] >= 0;
    }
    return x;
}

static const OptimConfig adamw = {
    .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .max_norm = 1};

// Gradients of one step over a batch in `micro` micro-batches.
static StepState gradients(Model *m, int64_t step, double lr, const Batch *x, int micro) {
    const int B = x->B / micro, N = B * x->T;
    model_begin_step(m, step, lr, &adamw);
    for (int i = 0; i < micro; i++) {
        model_set_tokens(m, x->tokens + i * N, x->targets + i * N, N);
        model_forward(m, B, x->T, 0, 1);
        model_backward(m, B, x->T, x->valid ? 1.0 / x->valid : 1, micro);
    }
    return model_state(m);
}
static void *all_logits(Model *m, int N) { // (N,V), of the last forward pass
    void *out = fresh((size_t)N * m->c.vocab_size, m->b->act_size);
    m->b->linear_forward(out, m->lnf, m->head, N, m->scratch);
    return out;
}

typedef struct Losses {
    double ce, aux, z;
} Losses; // sum; means over MoE layers
static Losses losses_of(const Model *m, const Batch *x) {
    Losses s = {model_state(m).loss * x->valid, 0, 0};
    for (int l = 0; l < m->c.n_layers; l++)
        if (is_moe_layer(&m->c, l)) {
            s.aux += get(m->b, m->layer[l].loss_sum, 0) / moe_layers(&m->c);
            s.z += get(m->b, m->layer[l].loss_sum, 1) / moe_layers(&m->c);
        }
    return s;
}

// ---- a second forward pass, in double, straight from the formulas, one token at a time

static const double *weight_of(const Model *m, TensorKind kind, int layer, int expert) {
    const Tensor *t = tensor_of(&m->table, kind, layer);
    return t ? param_of(m, t + expert) : NULL;
}
static void naive_matvec(double *out, const double *w, const double *x, int rows, int cols) {
    for (int r = 0; r < rows; r++) {
        out[r] = 0;
        for (int c = 0; c < cols; c++) out[r] += w[r * cols + c] * x[c];
    }
}
static void naive_norm(double *out, const double *x, const double *w, int n, double eps) {
    double mean = 0;
    for (int i = 0; i < n; i++) mean += x[i] * x[i] / n;
    for (int i = 0; i < n; i++) out[i] = x[i] / sqrt(mean + eps) * w[i];
}
// kind: T_GATE_UP or T_SHARED_GATE_UP; the down projection is the next kind
static void naive_swiglu(double *out, double scale, const Model *m, TensorKind kind, int l, int e,
    const double *x, int I) {
    const int C = m->c.d_model;
    double *h = fresh(2 * I + C, sizeof *h), *y = h + 2 * I;
    naive_matvec(h, weight_of(m, kind, l, e), x, 2 * I, C);
    for (int i = 0; i < I; i++) h[i] = h[i] / (1 + exp(-h[i])) * h[I + i];
    naive_matvec(y, weight_of(m, kind + 1, l, e), h, C, I);
    for (int c = 0; c < C; c++) out[c] += scale * y[c];
}
// qk-norm, then each pair (i, i + hd/2) turned by pos * theta^(-2i/hd)
static void naive_rope(double *x, const double *w, int heads, int pos, const Config *c) {
    const int hd = c->head_dim, half = hd / 2;
    if (c->qk_norm == QK_NORM_FULL) naive_norm(x, x, w, heads * hd, c->norm_eps);
    for (int h = 0; h < heads; h++, x += hd) {
        if (c->qk_norm == QK_NORM_HEAD) naive_norm(x, x, w, hd, c->norm_eps);
        for (int i = 0; i < half; i++) {
            const double angle = pos * pow(c->rope_theta, -2.0 * i / hd);
            const double lo = x[i], hi = x[i + half];
            x[i] = lo * cos(angle) - hi * sin(angle);
            x[i + half] = hi * cos(angle) + lo * sin(angle);
        }
    }
}
// q, out (T, nq*hd), k, v (T, nkv*hd)
static void naive_attention(
    double *out, const double *q, const double *k, const double *v, int T, const Config *c) {
    const int hd = c->head_dim, nq = c->n_heads, nkv = c->n_kv_heads;
    double *p = fresh(T, sizeof *p);
    memset(out, 0, (size_t)T * nq * hd * sizeof *out);
    for (int h = 0; h < nq; h++)
        for (int t = 0; t < T; t++) {
            const int g = h / (nq / nkv);
            double total = 0;
            for (int s = 0; s <= t; s++) {
                double qk = 0;
                for (int d = 0; d < hd; d++)
                    qk += q[(t * nq + h) * hd + d] * k[(s * nkv + g) * hd + d];
                total += p[s] = exp(qk / sqrt(hd));
            }
            for (int s = 0; s <= t; s++)
                for (int d = 0; d < hd; d++)
                    out[(t * nq + h) * hd + d] += p[s] / total * v[(s * nkv + g) * hd + d];
        }
}
// out += one token's experts; f, P (E) += its choices, its probabilities; returns lse^2
static double naive_moe(double *out, double *f, double *P, const double *x, const Model *m, int l) {
    const Config *c = &m->c;
    const int E = c->n_experts, sigmoid = c->router == ROUTER_SIGMOID;
    const double *bias = weight_of(m, T_ROUTER_BIAS, l, 0);
    double z[16], p[16], score[16], weight[16] = {0}, sum_exp = 0, sum_p = 0, total = 0;
    naive_matvec(z, weight_of(m, T_ROUTER, l, 0), x, E, c->d_model);
    for (int e = 0; e < E; e++) sum_exp += exp(z[e]);
    for (int e = 0; e < E; e++) {
        p[e] = sigmoid ? 1 / (1 + exp(-z[e])) : exp(z[e]) / sum_exp;
        score[e] = p[e] + (bias ? bias[e] : 0);
        sum_p += p[e];
    }
    for (int e = 0; e < E; e++) { // chosen: fewer than K are better, or equal with a lower id
        int better = 0;
        for (int j = 0; j < E; j++)
            better += score[j] > score[e] || (score[j] == score[e] && j < e);
        if (better < c->top_k) weight[e] = p[e], total += p[e], f[e]++;
        P[e] += p[e] / sum_p;
    }
    for (int e = 0; e < E; e++)
        if (weight[e] != 0)
            naive_swiglu(
                out, weight[e] / (c->norm_topk ? total : 1), m, T_GATE_UP, l, e, x, c->d_expert);
    return log(sum_exp) * log(sum_exp);
}
static Losses naive_model(double *logits, const Model *m, const Batch *in) {
    const Config *c = &m->c;
    const int C = c->d_model, N = in->N, T = in->T;
    const int Q = c->n_heads * c->head_dim, KV = c->n_kv_heads * c->head_dim;
    double *x = fresh((size_t)N * C, 8), *ln = fresh(C, 8), *branch = fresh(C, 8);
    double *q = fresh((size_t)N * Q, 8), *att = fresh((size_t)N * Q, 8);
    double *k = fresh((size_t)N * KV, 8), *v = fresh((size_t)N * KV, 8);
    Losses sum = {0, 0, 0};
    for (int n = 0; n < N; n++)
        memcpy(x + n * C, weight_of(m, T_EMBED, -1, 0) + in->tokens[n] * C, C * sizeof *x);
    for (int l = 0; l < c->n_layers; l++) {
        const double *w = weight_of(m, T_QKV, l, 0);
        double f[16] = {0}, P[16] = {0}, z2 = 0;
        for (int n = 0; n < N; n++) {
            naive_norm(ln, x + n * C, weight_of(m, T_ATTN_NORM, l, 0), C, c->norm_eps);
            naive_matvec(q + n * Q, w, ln, Q, C);
            naive_matvec(k + n * KV, w + Q * C, ln, KV, C);
            naive_matvec(v + n * KV, w + (Q + KV) * C, ln, KV, C);
            naive_rope(q + n * Q, weight_of(m, T_Q_NORM, l, 0), c->n_heads, n % T, c);
            naive_rope(k + n * KV, weight_of(m, T_K_NORM, l, 0), c->n_kv_heads, n % T, c);
        }
        for (int n = 0; n < N; n += T)
            naive_attention(att + n * Q, q + n * Q, k + n * KV, v + n * KV, T, c);
        for (int n = 0; n < N; n++) {
            naive_matvec(branch, weight_of(m, T_ATTN_OUT, l, 0), att + n * Q, C, Q);
            for (int i = 0; i < C; i++) x[n * C + i] += branch[i];
            naive_norm(ln, x + n * C, weight_of(m, T_MLP_NORM, l, 0), C, c->norm_eps);
            if (is_moe_layer(c, l))
                z2 += naive_moe(x + n * C, f, P, ln, m, l);
            else
                naive_swiglu(x + n * C, 1, m, T_GATE_UP, l, 0, ln, mlp_width(c, l));
            if (is_moe_layer(c, l) && c->d_shared)
                naive_swiglu(x + n * C, 1, m, T_SHARED_GATE_UP, l, 0, ln, c->d_shared);
        }
        if (!is_moe_layer(c, l)) continue;
        for (int e = 0; e < c->n_experts; e++)
            sum.aux += c->n_experts * (f[e] / (N * c->top_k)) * (P[e] / N) / moe_layers(c);
        sum.z += z2 / N / moe_layers(c);
    }
    for (int n = 0; n < N; n++) {
        double *out = logits + n * c->vocab_size, total = 0;
        naive_norm(ln, x + n * C, weight_of(m, T_FINAL_NORM, -1, 0), C, c->norm_eps);
        naive_matvec(out, weight_of(m, c->tied ? T_EMBED : T_HEAD, -1, 0), ln, c->vocab_size, C);
        for (int i = 0; i < c->vocab_size; i++) total += exp(out[i]);
        if (in->targets[n] >= 0) sum.ce += log(total) - out[in->targets[n]];
    }
    return sum;
}

// ---- the checks of whole models

typedef struct ModelProbe {
    Model *m;
    const Batch *x;
} ModelProbe;
static double model_probe(void *p_) { // what model_backward differentiates
    const ModelProbe *p = p_;
    Model *m = p->m;
    const double scale = 1.0 / p->x->valid;
    model_begin_step(m, 1, 0, &adamw);
    model_forward(m, p->x->B, p->x->T, 0, 1);
    m->b->classifier(
        m->losses, NULL, NULL, m->lnf, m->head, m->targets, p->x->N, scale, m->scratch);
    m->b->reduce_loss(m->state, m->losses, p->x->N, scale);
    const Losses s = losses_of(m, p->x);
    return s.ce * scale + m->aux_coef * s.aux + m->z_coef * s.z;
}
// The largest error of a tensor's gradient g in the double model m, against central differences.
static double worst_gradient(
    Model *m, const Batch *x, const double *g) { // against central differences
    ModelProbe p = {m, x};
    double worst = 0;
    for (int k = 0; k < m->table.count; k++) {
        const Tensor *t = &m->table.tensor[k];
        const double e = t->row->trained
            ? gradient_error(model_probe, &p, param_of(m, t), g + t->offset, t->count, 2)
            : 0;
        check(e <= 1e-6, "%s: error %.3e, limit 1e-06", name_of(t), e);
        if (!(e <= worst)) worst = e;
    }
    return worst;
}

// The largest error of a tensor's gradient in the float model s, against the double one m.
static double worst_float(const Model *s, const Model *m) {
    double worst = 0;
    for (int k = 0; k < m->table.count; k++) {
        const Tensor *t = &m->table.tensor[k];
        const double e = t->row->trained
            ? error_of(s->b, grad_of(s, &s->table.tensor[k]), grad_of(m, t), t->count)
            : 0;
        check(e <= 1e-5, "gradient of %s: error %.3e, limit 1e-05", name_of(t), e);
        if (!(e <= worst)) worst = e;
    }
    return worst;
}

static void compare_losses(Losses s, Losses r, double limit) {
    within(relative(s.ce, r.ce), limit, "loss");
    within(relative(s.aux, r.aux), limit, "balance");
    within(relative(s.z, r.z), limit, "z");
}

static void test_model(int which) {
    const Backend *b = backend_f64(), *f = backend_cpu();
    const Config c = model_config(which);
    const int V = c.vocab_size, mark = pooled;
    const Batch x = new_batch(2, which == MIXTRAL ? 72 : 7, V, 3, 5); // 72: across a key block
    const size_t NV = (size_t)x.N * V;
    set_threads(3);
    Model m = new_model(&c, b, x.B, x.T, 1, 0, NULL), s = new_model(&c, f, x.B, x.T, 1, 0, NULL);
    lively(&m);
    lively(&s);
    m.aux_coef = s.aux_coef = 0.3, m.z_coef = s.z_coef = 0.1;
    if (begin("model/naive/%s", model_name[which])) {
        double *ref = fresh(NV, sizeof *ref);
        gradients(&m, 1, 0, &x, 1);
        const Losses r = naive_model(ref, &m, &x);
        within(error_of(b, all_logits(&m, x.N), ref, NV), 1e-12, "logits");
        compare_losses(losses_of(&m, &x), r, 1e-12);
        finish();
    }
    if (begin("model/gradient/%s", model_name[which])) {
        gradients(&m, 1, 0, &x, 1); // chooses the experts that the differences keep
        m.reuse_routing = 1;
        const double *g = copy_of(m.base[A_GRADS], m.used[A_GRADS]);
        set_threads(1);
        within(worst_gradient(&m, &x, g), 1e-6, "worst tensor");
        finish();
    }
    set_threads(3);
    if (begin("model/float/%s", model_name[which])) {
        gradients(&s, 1, 0, &x, 1);
        m.reuse_routing = 1;
        for (int l = 0; l < c.n_layers; l++)
            if (is_moe_layer(&c, l))
                memcpy(m.layer[l].topk, s.layer[l].topk, (size_t)x.N * c.top_k * sizeof(int));
        gradients(&m, 1, 0, &x, 1);
        compare_losses(losses_of(&s, &x), losses_of(&m, &x), 1e-5);
        within(error_of(f, all_logits(&s, x.N), all_logits(&m, x.N), NV), 1e-5, "logits");
        within(worst_float(&s, &m), 1e-5, "worst gradient");
        finish();
    }
    model_free(&m);
    model_free(&s);
    release_to(mark);
}

// -------------------------------------------------------------------------------------------------
// reference values

typedef struct Routed { // what came out of router_forward
    double *weight, sums[2];
    int *idx;
    StepState st;
} Routed;
static Routed route(
    const double *X, const double *Wr, const double *bias, Router r, const int *given, int layer) {
    const Backend *b = backend_f64();
    const Config c = config(2, 1, r.C, 1, 1, 2, r.E, r.K, 1);
    const ScratchShape shape = {1, r.N, r.N, r.N * r.K, 1, 0, 0};
    const size_t N = r.N, E = r.E, S = N * r.K;
    Routed o = {
        fresh(S, 8), {0, 0}, given ? copy_of(given, S * sizeof(int)) : fresh(S, sizeof(int)), {0}};
    b->router_forward(fresh(N * E, 8), fresh(N, 8), o.idx, o.weight, fresh(E, 4), o.sums, NULL,
        NULL, X, mat(b, Wr, 1, r.E, r.C), bias, r, given != NULL, &o.st, layer,
        fresh(b->scratch_bytes(&c, &shape), 1));
    return o;
}

// AdamW or SGD against the textbook, on tensors of awkward sizes with gaps between them.
static void test_optimiser(const Backend *b, int sgd, double limit) {
    enum { N = 1400 };
    const Segment seg[3] = {{0, 1, 1, 0}, {64, 1000, 1, 64}, {1088, 259, 0, 1088}};
    const OptimConfig o = {
        .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.3, .max_norm = 2, .sgd = sgd};
    const int mark = pooled;
    if (!begin("reference/%s-%s", sgd ? "sgd" : "adamw", b == backend_cpu() ? "float" : "double"))
        return;
    double *p = normals(N, 1, 0), *m = normals(N, 0, 0), *v = normals(N, 0, 0);
    void *bp = on(b, p, N), *bm = on(b, m, N), *bv = on(b, v, N), *scratch = fresh(3 * 16, 8);
    for (int step = 1; step <= 3; step++) {
        const double *g = normals(N, step == 2 ? 0.01 : 1, 0); // the second is not clipped
        const double lr = 0.1 / step;
        const double c1 = 1 - pow(o.beta1, step), c2 = 1 - pow(o.beta2, step);
        const void *bg = on(b, g, N);
        double norm = 0;
        StepState st = {.lr = lr, .beta1_correction = c1, .beta2_correction = c2};
        for (int s = 0; s < 3; s++)
            norm += pow(length_of(backend_f64(), g + seg[s].offset, seg[s].count), 2);
        norm = sqrt(norm);
        const double clip = norm > 2 ? 2 / norm : 1;
        b->grad_norm(&st, bg, seg, 3, o.max_norm, scratch);
        within(relative(st.grad_norm, norm), 1e-14, "norm");
        within(relative(st.clip, clip), 1e-14, "clip");
        b->update(bp, bg, sgd ? NULL : bm, sgd ? NULL : bv, seg, 3, &st, o);
        for (int s = 0; s < 3; s++)
            for (size_t i = seg[s].offset; i < seg[s].offset + seg[s].count; i++) {
                const double gi = g[i] * clip, decay = seg[s].decay * o.weight_decay * p[i];
                m[i] = sgd ? 0 : o.beta1 * m[i] + (1 - o.beta1) * gi;
                v[i] = sgd ? 0 : o.beta2 * v[i] + (1 - o.beta2) * gi * gi;
                p[i] -= lr * (sgd ? gi + decay : m[i] / c1 / (sqrt(v[i] / c2) + o.eps) + decay);
            }
    }
    within(error_of(b, bp, p, N), limit, "weights"); // the gaps too: they stay as they were
    within(error_of(b, bm, m, N), limit, "m");
    within(error_of(b, bv, v, N), limit, "v");
    release_to(mark);
    finish();
}

static void test_references(void) {
    const int mark = pooled;
    const double one[4] = {1, 1, 1, 1}, logits[4] = {2, 1, 0, -1}, zero[8] = {0}, sure[8] = {60};
    Router r = {ROUTER_SOFTMAX, 1, 1, 4, 2, 0, 0, 0, 1, 0, 0};
    if (begin("reference/router")) {
        const Routed raw = route(one, logits, NULL, r, NULL, 0);
        r.norm_topk = 1;
        const Routed renorm = route(one, logits, NULL, r, NULL, 0);
        const double *w = raw.weight, *n = renorm.weight;
        check(raw.idx[0] == 0 && raw.idx[1] == 1, "experts %d %d, not 0 1", raw.idx[0], raw.idx[1]);
        check(fabs(w[0] - .6439) < 5e-5 && fabs(w[1] - .2369) < 5e-5, "weights %f %f", w[0], w[1]);
        check(fabs(n[0] - .7311) < 5e-5 && fabs(n[1] - .2689) < 5e-5, "renormalised %f %f", n[0],
            n[1]);
        finish();
    }
    if (begin("reference/balance-losses")) {
        const int even[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        r.N = 4, r.E = 8;
        const Routed uniform = route(one, zero, NULL, r, even, 0);
        within(relative(uniform.sums[0], 1), 1e-14, "uniform");
        within(relative(uniform.sums[1], log(8) * log(8)), 1e-14, "z");
        r.K = 1;
        within(relative(route(one, sure, NULL, r, NULL, 0).sums[0], 8), 1e-14, "collapsed"); // = E
        finish();
    }
    if (begin("reference/loss-reduction")) {
        const float losses[5] = {1, 2, 4, 0, 8}, bad[5] = {1, INFINITY, 2, NAN, 1};
        StepState st = {.loss = 3}, worse = {0}, earlier = {.bad = BAD_ROUTER, .bad_index = 77};
        backend_cpu()->reduce_loss(&st, losses, 5, 0.5);
        backend_cpu()->reduce_loss(&worse, bad, 5, 1);
        backend_cpu()->reduce_loss(&earlier, bad, 5, 1);
        check(st.loss == 10.5 && !st.bad, "loss %f, not 10.5", st.loss);
        check(worse.bad == BAD_LOSS && worse.bad_index == 1, "bad %d at %d", worse.bad,
            (int)worse.bad_index);
        check(earlier.bad == BAD_ROUTER && earlier.bad_index == 77,
            "an earlier bad value is forgotten");
        finish();
    }
    for (int sgd = 0; sgd < 2; sgd++) {
        test_optimiser(backend_f64(), sgd, 1e-14);
        test_optimiser(backend_cpu(), sgd, 1e-6);
    }
    release_to(mark);
}

// -------------------------------------------------------------------------------------------------
// bits that must not change

// AdamW steps on tokens that depend on the step alone; what each step said in log.
static void train(Model *m, int steps, int B, int T, StepState *log) {
    const int mark = pooled;
    for (int step = 1; step <= steps; step++) {
        const Batch x = new_batch(B, T, m->c.vocab_size, 100 + (uint64_t)step, 0);
        gradients(m, step, 3e-3, &x, 1);
        model_update(m, &adamw);
        log[step - 1] = model_state(m);
    }
    release_to(mark);
}
static void same_arenas(const Model *a, const Model *b, const char *what, int n) {
    for (ArenaId i = A_PARAMS; i <= A_MOMENTS; i++)
        check(!a->used[i] || !memcmp(a->base[i], b->base[i], a->used[i]), "%s differ: %s %d",
            arena_names[i], what, n);
}

// Sizes above those where the backend stays on one thread.
static void test_threads(const char *name, Config c, int B, int T) {
    enum { STEPS = 4 };
    const int counts[4] = {1, 2, 3, 8};
    StepState log[2][STEPS] = {{{0}}};
    Model m[2];
    if (!begin("same/threads/%s", name)) return;
    for (int i = 0; i < 4; i++) {
        const int at = i > 0;
        set_threads(counts[i]);
        m[at] = new_model(&c, backend_cpu(), B, T, 1, 0, NULL);
        model_init(&m[at], 42);
        m[at].aux_coef = 0.01, m[at].z_coef = 0.001;
        train(&m[at], STEPS, B, T, log[at]);
        if (!i) continue;
        for (int s = 0; s < STEPS; s++)
            check(!memcmp(&log[0][s], &log[1][s], sizeof log[0][s]),
                "step %d: loss %.17g, with %d threads %.17g", s + 1, log[0][s].loss, counts[i],
                log[1][s].loss);
        same_arenas(&m[0], &m[1], "threads", counts[i]);
        model_free(&m[1]);
    }
    const double first = log[0][0].loss, last = log[0][STEPS - 1].loss;
    check(last < first, "the loss does not fall: %f to %f", first, last);
    model_free(&m[0]);
    finish();
}

// A token's logits: in a batch of 16, alone, in training's forward pass, and with the cache.
static void test_rows(int which) {
    // S: the sequence to look at; D, W: sequences decoded together, up to W tokens at a time
    enum { B = 16, T = 150, S = 5, D = 3, W = 40 };
    const Config c = model_config(which);
    const Backend *b = backend_cpu();
    const int mark = pooled;
    const size_t row = c.vocab_size * sizeof(float);
    if (!begin("same/rows/%s", model_name[which])) return;
    set_threads(2);
    const Batch x = new_batch(B, T, c.vocab_size, 11, 9);
    const int *tokens = x.tokens + S * T, *targets = x.targets + S * T;
    Model batch = new_model(&c, b, B, T, 0, 0, NULL);
    lively(&batch);
    const StepState eval = model_loss(&batch, x.tokens, x.targets, B, T);
    const char *all = all_logits(&batch, x.N), *logits = all + S * T * row;
    const float *losses = (float *)batch.losses + S * T;
    check(isfinite(eval.loss), "loss %f", eval.loss);

    Model other = new_model(&c, b, B, T, 1, 0, &batch);
    gradients(&other, 1, 0, &x, 1);
    check(!memcmp(all, all_logits(&other, x.N), x.N * row), "training's forward pass differs");
    check(!memcmp(batch.losses, other.losses, x.N * sizeof(float)), "training's losses differ");
    if (other.step_stats) { // evaluation leaves the loads and balance losses of the step alone
        const void *stats = copy_of(other.step_stats, other.step_stats_bytes);
        model_loss(&other, x.tokens, x.targets, B, T);
        check(!memcmp(stats, other.step_stats, other.step_stats_bytes), "evaluation was counted");
    }
    model_free(&other);

    other = new_model(&c, b, 1, T, 0, 0, &batch);
    for (int len = T; len > 0; len = len > 80 ? len - 80 : len - 69) { // 150, 70, 1 tokens alone
        model_loss(&other, tokens, targets, 1, len);
        check(!memcmp(logits, all_logits(&other, len), len * row), "%d tokens alone differ", len);
        check(!memcmp(losses, other.losses, len * sizeof(float)),
            "losses of %d tokens alone differ", len);
    }
    model_free(&other);

    other = new_model(&c, b, 1, 100, 0, T, &batch);
    for (int prompt = 1; prompt <= 100; prompt += 33) { // 1, 34, 67, 100 at once, then one by one
        memset(other.base[A_CACHE], 0xFF, other.used[A_CACHE]);
        for (int at = 0, len = prompt; at < T; at += len, len = 1) {
            model_next(&other, tokens + at, &at, &len, 1, len);
            check(!memcmp(logits + (at + len - 1) * row, other.logits, row),
                "prompt of %d: token %d differs", prompt, at + len - 1);
        }
    }
    model_free(&other);

    const int lens[5][D] = {{40, 17, 1}, {1, 23, 40}, {9, 1, 2}, {40, 40, 40}, {1, 1, 1}};
    int start[D] = {0, 0, 0}, padded[D * W];
    other = new_model(&c, b, D, W, 0, T, &batch);
    memset(other.base[A_CACHE], 0xFF, other.used[A_CACHE]);
    for (int call = 0; call < 5; call++) {
        const int width = call == 4 ? 1 : W;
        for (int i = 0; i < D * width; i++) // padding: any token
            padded[i] = i % width < lens[call][i / width]
                ? tokens[i / width * T + start[i / width] + i % width]
                : 1;
        model_next(&other, padded, start, lens[call], D, width);
        for (int d = 0; d < D; d++) {
            start[d] += lens[call][d];
            check(
                !memcmp(logits + (d * T + start[d] - 1) * row, (char *)other.logits + d * row, row),
                "call %d: sequence %d of a padded batch differs", call, d);
            // padding: nothing in the cache, zeros out of the attention
            const size_t next = ((size_t)d * c.n_kv_heads * T + start[d]) * c.head_dim;
            const size_t heads = (size_t)c.n_heads * c.head_dim * sizeof(float);
            const Layer *y = &other.layer[c.n_layers - 1];
            check(isnan(((float *)y->k_cache)[next]) && isnan(((float *)y->v_cache)[next]),
                "call %d: padding of sequence %d is in the cache", call, d);
            check(lens[call][d] == width ||
                    all_zero((char *)y->att + (d * width + lens[call][d]) * heads, heads),
                "call %d: attention of padding of sequence %d is not zero", call, d);
        }
    }
    model_free(&other);
    model_free(&batch);
    release_to(mark);
    finish();
}

// 1, 2 or 4 micro-batches: the same gradient; the balance losses are a mean over micro-batches.
static void test_micro_batches(const Backend *b, double limit) {
    enum { B = 4, T = 9, OFF = 0, ON = 1 };
    const Config c = model_config(QWEN3);
    const int mark = pooled;
    if (!begin("same/micro-batches/%s", b == backend_cpu() ? "float" : "double")) return;
    const Batch x = new_batch(B, T, c.vocab_size, 12, 4); // unequal numbers of valid targets
    Model m = new_model(&c, b, B, T, 1, 0, NULL);
    const size_t n = m.table.elements;
    // g: with balance losses off, on; in 1, 2, 4 micro-batches
    double *g[2][3], *mean = normals(n, 0, 0), loss[3];
    lively(&m);
    for (int balance = OFF; balance <= ON; balance++) {
        m.aux_coef = balance * 0.5, m.z_coef = balance * 0.2;
        for (int i = 0; i < 3; i++) {
            loss[i] = gradients(&m, 1, 0, &x, 1 << i).loss;
            g[balance][i] = fresh(n, sizeof(double));
            for (size_t k = 0; k < n; k++) g[balance][i][k] = get(b, m.base[A_GRADS], k);
        }
        for (int half = 0; half < 2; half++) {
            const Batch part = {
                2, T, 2 * T, x.valid, x.tokens + half * 2 * T, x.targets + half * 2 * T};
            gradients(&m, 1, 0, &part, 1);
            for (size_t k = 0; k < n; k++)
                mean[k] += (balance ? 0.5 : -0.5) * get(b, m.base[A_GRADS], k);
        }
    }
    for (int i = 1; i < 3; i++) {
        within(error_of(backend_f64(), g[OFF][i], g[OFF][0], n), limit, i == 1 ? "2" : "4");
        within(relative(loss[i], loss[0]), limit, "loss");
    }
    for (size_t k = 0; k < n; k++) g[ON][1][k] -= g[OFF][1][k];
    within(error_of(backend_f64(), g[ON][1], mean, n), 10 * limit, "balance");
    model_free(&m);
    release_to(mark);
    finish();
}

// Everything that a step writes before it reads it, full of NaN; what model_build put there stays.
static void poison(Model *m) {
    const int mark = pooled;
    void *kept[3] = {m->rope, m->segments, m->dense_offsets}, *copy[3];
    const size_t bytes[3] = {(size_t)m->shape.T * m->c.head_dim * m->b->stat_size,
        m->n_segments * sizeof(Segment), 2 * sizeof(int)};
    for (int i = 0; i < 3; i++) copy[i] = copy_of(kept[i], bytes[i]);
    memset(m->base[A_GRADS], 0xFF, m->used[A_GRADS]);
    memset(m->base[A_SAVED], 0xFF, m->used[A_SAVED]);
    memset(m->base[A_WORK], 0xFF, m->used[A_WORK]);
    for (int i = 0; i < 3; i++) memcpy(kept[i], copy[i], bytes[i]);
    release_to(mark);
}

// A step may be begun with a model that only infers, which has no gradients.
static void test_begin_without_training(void) {
    const Config c = model_config(0);
    const ModelShape s = {.B = 1, .T = 3};
    Model m;
    if (!begin("model/begin-without-training")) return;
    model_build(&m, &c, backend_cpu(), s, NULL);
    model_begin_step(&m, 1, 0.25, &adamw);
    check(model_state(&m).lr == 0.25, "a learning rate of %g", model_state(&m).lr);
    model_free(&m);
    finish();
}

// The same bits with --recompute 1 and 2, which save less, and with memory that was full of NaN.
static void test_variants(int which) {
    enum { B = 3, T = 11, STEPS = 2, POISONED = 3 };
    const Config c = model_config(which);
    StepState log[4][STEPS] = {{{0}}};
    Model m[4];
    set_threads(2);
    for (int v = 0; v < 4; v++) {
        const ModelShape s = {.B = B, .T = T, .train = 1, .recompute = v % POISONED};
        model_build(&m[v], &c, backend_cpu(), s, NULL);
        lively(&m[v]);
        m[v].aux_coef = 0.1, m[v].z_coef = 0.1;
        if (v)
            poison(&m[v]);
        else
            memset(m[v].base[A_SAVED], 0, m[v].used[A_SAVED]);
        train(&m[v], STEPS, B, T, log[v]);
    }
    for (int v = 1; v < 4; v++) {
        const char *const names[4] = {"", "recompute-1", "recompute-2", "poison"};
        if (!begin("same/%s/%s", names[v], model_name[which])) continue;
        check(!memcmp(log[0], log[v], sizeof log[0]), "loss %.9g, not %.9g", log[v][0].loss,
            log[0][0].loss);
        same_arenas(&m[0], &m[v], "recompute", m[v].shape.recompute);
        check(v == POISONED || m[v].used[A_SAVED] < m[v - 1].used[A_SAVED], "no memory is saved");
        finish();
    }
    for (int v = 0; v < 4; v++) model_free(&m[v]);
}

#include "test_exchange.h"
#include "test_options.h"

// A row adds its experts in the order of their ids: all at once = one after the other.
static void test_expert_order(void) {
    enum { N = 70, C = 24, I = 9, E = 5 };
    const Backend *b = backend_cpu();
    const Config c = config(2, 1, C, 1, 1, 2, E, E, I);
    const ScratchShape s = {1, N, N, N * E, 1, 0, 0};
    const int mark = pooled;
    if (!begin("same/expert-order")) return;
    const Plan p = plan_of(b, random_choice(N, E, E), on(b, normals(N * E, 1, 0), N * E), N, E, E);
    const float *H = on(b, normals(N * E * 2 * I, 1, 0), N * E * 2 * I);
    const float *w = on(b, normals(E * C * I, 1, 0), E * C * I);
    void *scratch = fresh(b->scratch_bytes(&c, &s), 1);
    float *all = fresh(N * C, sizeof(float)), *steps = fresh(N * C, sizeof(float));
    int offsets[2] = {0, N};
    b->expert_down_forward(all, H, NULL, mat(b, w, E, C, I), &p, 0, scratch);
    for (int e = 0; e < E; e++) {
        const Plan one = {N, 1, N, 1, offsets, p.row + e * N, p.expert, (float *)p.weight + e * N,
            p.row_begin, p.slot};
        b->expert_down_forward(
            steps, H + e * N * 2 * I, NULL, mat(b, w + e * C * I, 1, C, I), &one, e > 0, scratch);
    }
    check(!memcmp(all, steps, N * C * sizeof(float)), "the sums differ");
    release_to(mark);
    finish();
}

// -------------------------------------------------------------------------------------------------
// routing, bad values

static void test_choices(void) {
    enum { N = 140, C = 3, E = 99, K = 4 }; // rows in several blocks, enough of them for threads
    const char *const kind_name[2] = {"softmax", "sigmoid"};
    const char *const bad_name[3] = {"nan", "inf", "minus-inf"};
    const double bad[3] = {NAN, INFINITY, -INFINITY};
    const int mark = pooled;
    const double *Wr = normals(E * C, 1, 0), *zero = normals(E * C, 0, 0);
    for (int kind = 0; kind < 2; kind++) {
        const Router r = {kind, N, C, E, K, 1, 0, 0, N, 0, 0};
        for (int i = 0; i < 3; i++) {
            if (!begin("routing/%s-%s", kind_name[kind], bad_name[i])) continue;
            double *X = normals(N * C, 1, 0);
            X[97 * C + 1] = X[133 * C] = bad[i];
            for (int threads = 1; threads < 4; threads++) {
                set_threads(threads);
                const Routed o = route(X, Wr, NULL, r, NULL, 7);
                for (int s = 0; s < N * K; s++) {
                    check(o.idx[s] >= 0 && o.idx[s] < E, "row %d: expert %d", s / K, o.idx[s]);
                    for (int j = s / K * K; j < s; j++)
                        check(o.idx[j] != o.idx[s], "row %d: %d twice", s / K, o.idx[s]);
                }
                check(o.st.bad == BAD_ROUTER && o.st.bad_layer == 7 && o.st.bad_index == 97,
                    "bad %d, layer %d, row %d", o.st.bad, o.st.bad_layer, (int)o.st.bad_index);
            }
            finish();
        }
        if (!begin("routing/%s-ties", kind_name[kind])) continue;
        const double some[6] = {0, 1, 0, 1, 1, 0}, one = 1;
        const Router small = {kind, 1, 1, 6, K, 1, 0, 0, 1, 0, 0};
        for (int threads = 1; threads < 4; threads++) {
            set_threads(threads);
            const Routed o = route(normals(N * C, 1, 0), zero, NULL, r, NULL, 0);
            for (int s = 0; s < N * K; s++)
                check(o.idx[s] == s % K, "row %d: expert %d, not %d", s / K, o.idx[s], s % K);
        }
        const int *id = route(&one, some, NULL, small, NULL, 0).idx;
        check(id[0] == 1 && id[1] == 3 && id[2] == 4 && id[3] == 0, "%d %d %d %d, not 1 3 4 0",
            id[0], id[1], id[2], id[3]);
        // fewer scores that can be compared than experts are wanted: the lowest ids of the others
        for (int i = 0; i < 3; i += 2) {
            const double few[6] = {0, 1, bad[i], bad[i], bad[i], bad[i]};
            const int *at = route(&one, few, NULL, small, NULL, 0).idx;
            check(at[0] == 1 && at[1] == 0 && at[2] == 2 && at[3] == 3,
                "%s: %d %d %d %d, not 1 0 2 3", bad_name[i], at[0], at[1], at[2], at[3]);
        }
        finish();
    }
    release_to(mark);
}

static void test_plan(void) {
    const Backend *b = backend_f64();
    if (!begin("routing/plan")) return;
    for (int trial = 0; trial < 40; trial++) {
        const int mark = pooled, E = 1 + below(9), K = 1 + below(E), N = 1 + below(70), S = N * K;
        const int *idx = random_choice(N, K, K + below(E - K + 1));
        double *weight = normals(S, 0, 0);
        for (int s = 0; s < S; s++) weight[s] = s;
        const Plan p = plan_of(b, idx, weight, N, K, E);
        int next = 0;
        for (int e = 0; e < E; e++) { // a stable counting sort, written as a search
            check(
                p.offsets[e] == next, "expert %d starts at slot %d, not %d", e, p.offsets[e], next);
            for (int s = 0; s < S; s++)
                if (idx[s] == e) {
                    check(
                        p.row[next] == s / K && p.expert[next] == e && get(b, p.weight, next) == s,
                        "slot %d: row %d, expert %d, weight %g, not those of %d", next, p.row[next],
                        p.expert[next], get(b, p.weight, next), s);
                    next++;
                }
        }
        check(p.offsets[E] == S && p.row_begin[N] == S && p.rows == N, "%d slots, not %d",
            p.offsets[E], S);
        for (int i = 0; i < S; i++) { // the rows' lists of slots, in expert order
            check(p.row_begin[i / K] == i / K * K && p.row[p.slot[i]] == i / K,
                "slot list of row %d", i / K);
            check(i % K == 0 || p.expert[p.slot[i - 1]] < p.expert[p.slot[i]],
                "row %d not in expert order", i / K);
        }
        release_to(mark);
    }
    finish();
}

// NaN in one tensor must be noticed at the first router behind it, or else in the loss.
static void expect_bad(const Model *m, const Tensor *t, int *bad, int *layer) {
    const TensorKind k = t->row->kind;
    int l = t->layer + (k >= T_GATE_UP && k <= T_SHARED_DOWN); // behind this layer's router
    if (l < 0) l = k == T_EMBED ? 0 : m->c.n_layers;
    while (l < m->c.n_layers && !is_moe_layer(&m->c, l)) l++;
    *bad = l < m->c.n_layers ? BAD_ROUTER : BAD_LOSS;
    *layer = l < m->c.n_layers ? l : 0;
}

static void test_bad_values(int which) {
    const Config c = model_config(which);
    const int mark = pooled;
    const char *name = model_name[which];
    const Batch x = new_batch(2, 9, c.vocab_size, 14, 0);
    Model m = new_model(&c, backend_cpu(), x.B, x.T, 1, 0, NULL);
    set_threads(2);
    lively(&m);
    gradients(&m, 1, 1e-2, &x, 1); // for the loads of the experts
    model_update(&m, &adamw);
    const size_t bytes[2] = {m.used[A_PARAMS], m.used[A_MOMENTS]};
    if (begin("routing/nan-weights/%s", name)) {
        for (int i = 0; i < m.table.count; i++) {
            const Tensor *t = &m.table.tensor[i];
            int bad, layer;
            if (!t->row->trained || (t->expert >= 0 && !m.layer[t->layer].count[t->expert]))
                continue;
            expect_bad(&m, t, &bad, &layer);
            const void *was = copy_of(param_of(&m, t), t->count * sizeof(float));
            memset(param_of(&m, t), 0xFF, t->count * sizeof(float));
            const void *params = copy_of(m.base[A_PARAMS], bytes[0]);
            const void *moments = copy_of(m.base[A_MOMENTS], bytes[1]);
            const StepState s = gradients(&m, 2, 1e-2, &x, 1);
            check(s.bad == bad && s.bad_layer == layer, "%s: bad %d at layer %d, not %d at %d",
                name_of(t), s.bad, s.bad_layer, bad, layer);
            char where[256] = "";
            check(model_first_bad(&m, x.N, where, sizeof where) && strstr(where, name_of(t)),
                "%s: traced to '%s'", name_of(t), where);
            model_update(&m, &adamw);
            check(!memcmp(params, m.base[A_PARAMS], bytes[0]), "%s: weights were touched",
                name_of(t));
            check(!memcmp(moments, m.base[A_MOMENTS], bytes[1]), "%s: moments were touched",
                name_of(t));
            memcpy(param_of(&m, t), was, t->count * sizeof(float));
            gradients(&m, 2, 1e-2, &x, 1); // the loads again
        }
        finish();
    }
    if (begin("routing/overflow/%s", name)) { // finite weights: where the first infinity appears
        const Tensor *t = tensor_of(&m.table, T_ATTN_OUT, 1);
        const void *was = copy_of(param_of(&m, t), t->count * sizeof(float));
        char where[256] = "";
        check(!model_first_bad(&m, x.N, where, sizeof where), "found '%s' before", where);
        for (size_t k = 0; k < t->count; k++) put(m.b, param_of(&m, t), k, 3e38);
        check(gradients(&m, 2, 0, &x, 1).bad, "nothing overflowed");
        model_first_bad(&m, x.N, where, sizeof where);
        check(strstr(where, "in the residual stream of layer 1") != NULL, "traced to '%s'", where);
        memcpy(param_of(&m, t), was, t->count * sizeof(float));
        gradients(&m, 2, 1e-2, &x, 1);
        finish();
    }
    if (begin("routing/bad-gradient/%s", name)) {
        const StepState good = gradients(&m, 2, 1e-2, &x, 1);
        const void *params = copy_of(m.base[A_PARAMS], bytes[0]);
        for (int i = 0; i < m.n_segments; i++) {
            const Segment seg = m.segments[i], last = m.segments[m.n_segments - 1];
            float *g = (float *)m.base[A_GRADS], *at = g + seg.offset + (i % 2 ? seg.count - 1 : 0);
            const float was = *at;
            *at = i % 3 ? INFINITY : NAN;
            g[last.offset] = i == m.n_segments - 1 ? *at : NAN; // a later one must not count
            *m.state = good;
            model_update(&m, &adamw);
            check(m.state->bad == BAD_GRADIENT && m.state->bad_index == i,
                "tensor %d: bad %d, tensor %d", i, m.state->bad, (int)m.state->bad_index);
            *at = was;
        }
        check(!memcmp(params, m.base[A_PARAMS], bytes[0]), "weights were touched");
        finish();
    }
    if (begin("routing/all-ignored/%s", name)) {
        const Batch none = {x.B, x.T, x.N, 0, x.tokens, x.targets};
        for (int n = 0; n < x.N; n++) x.targets[n] = -1;
        const StepState s = gradients(&m, 2, 0, &none, 1);
        const double norm = length_of(m.b, m.base[A_GRADS], m.table.elements);
        check(s.loss == 0 && !s.bad && norm == 0, "loss %g, norm of gradients %g", s.loss, norm);
        finish();
    }
    model_free(&m);
    release_to(mark);
}

static void test_idle_expert(void) {
    enum { IDLE = 2 };
    const Config c = model_config(QWEN3);
    const double lr = 0.05;
    const int mark = pooled;
    if (!begin("routing/idle-expert")) return;
    const Batch x = new_batch(2, 9, c.vocab_size, 15, 0);
    Model m = new_model(&c, backend_cpu(), x.B, x.T, 1, 0, NULL);
    lively(&m);
    m.aux_coef = 0.1, m.reuse_routing = 1;
    for (int l = 0; l < c.n_layers; l++)
        for (int n = 0; n < x.N; n++)
            m.layer[l].topk[2 * n] = n % 2 ? 3 : 0, m.layer[l].topk[2 * n + 1] = 1;
    const float *old = copy_of(m.base[A_PARAMS], m.used[A_PARAMS]);
    gradients(&m, 1, lr, &x, 1);
    model_update(&m, &adamw);
    check(!m.state->bad, "bad %d", m.state->bad);
    for (int i = 0; i < m.table.count; i++) {
        const Tensor *t = &m.table.tensor[i];
        const float *p = param_of(&m, t), *was = old + t->offset;
        if (t->expert < 0) continue;
        const int zero = all_zero(grad_of(&m, t), t->count * sizeof(float));
        check(zero == (t->expert == IDLE), "gradient of expert %d is %szero", t->expert,
            zero ? "" : "not ");
        for (size_t k = 0; k < t->count && t->expert == IDLE; k++)
            check(fabs(p[k] - was[k] * (1 - lr * adamw.weight_decay)) <= 1e-7 * fabs(was[k]) &&
                    p[k] != was[k],
                "weight decay: %g became %g", was[k], p[k]);
    }
    model_free(&m);
    release_to(mark);
    finish();
}

static void test_ignored_target(void) {
    enum { N = 5, V = 19, C = 6 };
    const Backend *b = backend_cpu();
    const Config c = config(V, 1, C, 1, 1, 2, 1, 1, 1);
    const ScratchShape s = {1, N, N, N, 1, 0, 0};
    const int mark = pooled, targets[N] = {3, -1, 0, -1, 18};
    if (!begin("routing/ignored-target")) return;
    float *x = on(b, normals(N * C, 1, 0), N * C), *w = on(b, normals(V * C, 1, 0), V * C);
    float *losses = fresh(N, 4), *dx = fresh(N * C, 4), *dw = fresh(V * C, 4);
    x[1 * C + 2] = INFINITY; // 0 * gradient would be NaN
    b->classifier(
        losses, dx, dw, x, mat(b, w, 1, V, C), targets, N, 0.5, fresh(b->scratch_bytes(&c, &s), 1));
    for (int n = 0; n < N; n++) {
        const int zero =
            all_zero(dx + n * C, C * sizeof *dx) && all_zero(&losses[n], sizeof *losses);
        check(zero == (targets[n] < 0), "target %d: loss %g, gradient %g ...", targets[n],
            losses[n], dx[n * C]);
    }
    release_to(mark);
    finish();
}

// -------------------------------------------------------------------------------------------------
// gemm.h

// What the header promises, bit for bit: ascending k, one fused chain for each 256 values of k.
static float naive_product(const Gemm *g, float c, int i, int j) {
    const Operand *a = &g->a, *b = &g->b;
    for (int k0 = 0; k0 < g->k; k0 += 256) {
        float acc = 0;
        for (int k = k0; k < g->k && k < k0 + 256; k++) {
            const int ai = a->trans ? k : i, bi = b->trans ? j : k;
            acc = fmaf(a->p[(size_t)(a->idx ? a->idx[ai] : ai) * a->ld + (a->trans ? i : k)],
                b->p[(size_t)(b->idx ? b->idx[bi] : bi) * b->ld + (b->trans ? k : j)], acc);
        }
        c = k0 == 0 && !g->accumulate ? acc : c + acc;
    }
    return g->k == 0 && !g->accumulate ? 0 : c;
}
static Operand random_operand(int rows, int cols, int trans, int gather) { // (rows, cols) as used
    const int r = trans ? cols : rows, w = trans ? rows : cols;
    const int ld = w + below(4), stored = r + 5 * gather;
    float *p = fresh((size_t)stored * ld, sizeof *p);
    int *idx = gather ? fresh(r, sizeof *idx) : NULL;
    stream_id++;
    for (int i = 0; i < stored * w; i++)
        p[i / w * ld + i % w] = (float)counter_uniform(16, stream_id, (uint64_t)i) - 0.4f;
    for (int i = 0; i < r && gather; i++) idx[i] = below(stored);
    Operand o = {p, (size_t)ld, idx, trans};
    return o;
}

static void test_products(const char *name, int groups, int large) {
    const int sizes[12] = {0, 1, 3, 5, 6, 7, 16, 31, 33, 64, 70, 101};
    const int depths[10] = {0, 1, 2, 5, 17, 64, 255, 256, 257, 530};
    if (!begin("gemm/%s", name)) return;
    stream_id = 1000;
    // every mix of transposes, gathers and accumulate, on 1 to 3 threads
    for (int form = 0; form < 32; form++) {
        const int mark = pooled;
        Gemm list[9];
        const float *before[9];
        set_threads(1 + form % 3);
        for (int i = 0; i < (groups ? groups : 1); i++) {
            const int f = form + 5 * i, tb = f >> 1 & 1;
            const int m = large ? 40 + below(200) : sizes[below(12)];
            const int n = large ? 40 + below(450) : sizes[below(12)];
            const int k = large ? 20 + below(60) : depths[below(10)];
            Gemm g = {random_operand(m, k, f & 1, f >> 2 & 1),
                random_operand(k, n, tb, !tb && (f >> 3 & 1)), NULL, (size_t)(n + below(3)), m, n,
                k, f >> 4 & 1};
            g.c = fresh(m * g.ldc, sizeof(float)); // NaN where nothing may be read, or written
            for (int j = 0; j < m * n && g.accumulate; j++)
                g.c[j / n * g.ldc + j % n] = (float)j / 64;
            before[i] = copy_of(g.c, m * g.ldc * sizeof(float));
            list[i] = g;
        }
        if (groups)
            gemm_grouped(list, groups, fresh(gemm_scratch_bytes(thread_max()), 1));
        else
            gemm_serial(list, fresh(gemm_serial_bytes(), 1));
        for (int i = 0; i < (groups ? groups : 1); i++) {
            const Gemm *g = &list[i];
            for (size_t at = 0; at < g->m * g->ldc; at += large ? 13 : 1) {
                const int r = (int)(at / g->ldc), j = (int)(at % g->ldc);
                const float want = j < g->n ? naive_product(g, before[i][at], r, j) : before[i][at];
                check(!memcmp(&want, &g->c[at], sizeof want),
                    "m %d n %d k %d, form %d: (%d,%d) is %.9g, not %.9g", g->m, g->n, g->k, form, r,
                    j, g->c[at], want);
            }
        }
        release_to(mark);
    }
    finish();
}

static void test_sums(void) {
    float a[80], b[80];
    if (!begin("gemm/sums")) return;
    for (int n = 0; n < 80; n++) {
        float products[16] = {0}, terms[16] = {0}, top = -INFINITY;
        a[n] = (float)counter_normal(17, 0, n), b[n] = (float)counter_normal(18, 0, n);
        for (int i = 0; i < n; i++) {
            products[i % 16] = fmaf(a[i], b[i], products[i % 16]);
            terms[i % 16] += a[i];
            top = fmaxf(top, a[i]);
        }
        for (int h = 8; h; h /= 2)
            for (int i = 0; i < h; i++) products[i] += products[i + h], terms[i] += terms[i + h];
        check(
            dot(a, b, n) == products[0], "dot of %d: %.9g, not %.9g", n, dot(a, b, n), products[0]);
        check(sum(a, n) == terms[0], "sum of %d: %.9g, not %.9g", n, sum(a, n), terms[0]);
        check(max_of(a, n) == top, "max of %d: %.9g, not %.9g", n, max_of(a, n), top);
        for (int i = 0; i < n; i++) {
            const float was = a[i];
            a[i] = NAN;
            check(isnan(max_of(a, n)), "max of %d misses a NaN at %d", n, i);
            a[i] = was;
        }
    }
    finish();
}

// error in units of the last of `bits` bits
static double ulps(double x, long double ref, int bits) {
    return (double)(fabsl(x - ref) / ldexpl(1, ilogbl(ref) - bits + 1));
}
static double larger(double worst, double err) { return err <= worst ? worst : err; } // NaN wins

static void test_functions(void) {
    const double inf = INFINITY;
    if (begin("gemm/exp-float")) {
        double worst = 0;
        for (float x = -87.3365f; x < 88.7228f; x += 3e-4f)
            worst = larger(worst, ulps(exp_real(x), expl(x), 24));
        for (float x = 1e-30f; x < 80; x *= 1.01f) {
            worst = larger(worst, ulps(exp_real(x), expl(x), 24));
            worst = larger(worst, ulps(exp_real(-x), expl(-x), 24));
        }
        within(worst, 2, "ulp");
        check(exp_real(0) == 1 && exp_real(-INFINITY) == 0 && exp_real(-87.4f) == 0 &&
                exp_real(-3e38f) == 0,
            "low values");
        check(exp_real(INFINITY) == inf && exp_real(88.73f) == inf && exp_real(3e38f) == inf,
            "high values");
        check(isnan(exp_real(NAN)) && isnan(exp_real(-NAN)), "NaN");
        finish();
    }
    if (begin("gemm/functions")) {
        double e = 0, l = 0, s = 0;
        for (uint64_t i = 0; i < 60000; i++) {
            const double x = 1416 * counter_uniform(19, 0, i) - 708;
            const double y = 2 * counter_uniform(19, 1, i) - 1, near1 = 1 + y / 2;
            const double big = ldexp(1 + counter_uniform(19, 2, i), (int)(i % 2040) - 1020);
            const double angle = y * (i % 2 ? 1e6 : 7);
            e = larger(e, larger(ulps(exp_d(x), expl(x), 53), ulps(exp_d(y), expl(y), 53)));
            l = larger(l, ulps(log_d(big), logl(big), 53));
            l = larger(l, ulps(log_d(near1), logl(near1), 53));
            s = larger(s, (double)fabsl(sin_d(angle) - sinl(angle)));
            s = larger(s, (double)fabsl(cos_d(angle) - cosl(angle)));
        }
        within(e, 2, "exp ulp");
        within(l, 2, "log ulp");
        within(s, 1e-15, "sin, cos");
        within(ulps(log_d(4e-320), logl((long double)4e-320), 53), 2, "log of a subnormal");
        within(fabs(exp_d(-740) - (double)expl(-740)) / 0x1p-1074, 1, "subnormal exp");
        check(exp_d(0) == 1 && exp_d(-inf) == 0 && exp_d(inf) == inf && isnan(exp_d(NAN)),
            "exp of 0, Inf or NaN");
        check(log_d(1) == 0 && log_d(0) == -inf && log_d(inf) == inf && isnan(log_d(-1)) &&
                isnan(log_d(NAN)),
            "log of 1, 0, Inf, -1, NaN");
        check(sin_d(0) == 0 && cos_d(0) == 1 && isnan(sin_d(inf)) && isnan(cos_d(NAN)),
            "sin, cos of 0, Inf or NaN");
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// the tensor table, start values, parameter counts, memory

static void test_layout(int which) {
    const Config c = model_config(which);
    TensorTable t;
    if (!begin("table/layout/%s", model_name[which])) return;
    for (size_t elem = 2; elem <= 8; elem *= 2) {
        size_t end[2] = {0, 0};
        if (tensor_table_build(&t, &c, elem)) die(RUN_ERROR, "no memory");
        for (int k = 0; k < t.count; k++) {
            const Tensor *x = &t.tensor[k];
            size_t *e = &end[!x->row->trained];
            char a[128], b[128];
            check(x->offset * elem % ARENA_ALIGN == 0, "%s starts at byte %zu", name_of(x),
                x->offset * elem);
            check(x->offset >= *e && x->count > 0 && x->count == x->rows * x->cols,
                "%s overlaps another", name_of(x));
            check(x->expert < 2 || x[0].offset - x[-1].offset == x[-1].offset - x[-2].offset,
                "%s: stride", name_of(x));
            *e = x->offset + x->count;
            for (int j = 0; j < (k + 1) * 3; j++) // every part's name, against those before
                for (int p = 0; p < x->row->parts; p++) {
                    if (j % 3 >= t.tensor[j / 3].row->parts || j >= k * 3 + p) continue;
                    tensor_name(a, sizeof a, x, p);
                    tensor_name(b, sizeof b, &t.tensor[j / 3], j % 3);
                    check(strcmp(a, b) != 0, "two tensors are called %s", a);
                }
        }
        check(end[0] <= t.elements && end[1] <= t.buffer_elements, "an arena is too small");
        tensor_table_free(&t);
    }
    finish();
}

// Start values depend on seed, kind, layer, expert and element; not on how many experts or layers.
static void test_start_values(void) {
    const Backend *f = backend_cpu();
    Config c[3] = {config(128, 2, 64, 4, 2, 16, 4, 2, 48), {0}, {0}};
    Model m[3];
    if (!begin("table/start-values")) return;
    c[1] = c[2] = c[0];
    c[1].n_experts = 7, c[2].n_layers = 5;
    for (int i = 0; i < 3; i++) {
        set_threads(1 + i);
        m[i] = new_model(&c[i], f, 1, 1, 0, 0, NULL);
        model_init(&m[i], 5);
    }
    for (int k = 0; k < m[0].table.count; k++) {
        const Tensor *t = &m[0].table.tensor[k];
        const float *p = param_of(&m[0], t);
        double mean = 0, square = 0;
        for (int i = 1; i < 3; i++) {
            const Tensor *u =
                tensor_of(&m[i].table, t->row->kind, t->layer) + (t->expert > 0 ? t->expert : 0);
            const double shrink = i == 2 && t->row->init == INIT_RESIDUAL ? sqrt(2.5) : 1;
            const float *q = param_of(&m[i], u);
            for (size_t j = 0; j < t->count; j++)
                check(shrink == 1 ? p[j] == q[j] : fabs(q[j] * shrink - p[j]) <= 1e-6 * fabs(p[j]),
                    "%s depends on the number of %s", name_of(t), i == 1 ? "experts" : "layers");
        }
        for (size_t j = 0; j < t->count; j++)
            mean += p[j] / (double)t->count, square += p[j] * p[j] / (double)t->count;
        const double std = t->row->init == INIT_RESIDUAL ? 0.01 : 0.02;
        const double noise = 5 / sqrt((double)t->count); // 5 standard errors
        if (t->cols == 1)
            check(mean == 1 && square == 1, "%s is not all 1", name_of(t));
        else
            check(fabs(mean) < noise * std && fabs(square / (std * std) - 1) < 1.5 * noise,
                "%s: mean %g, std %g, not %g", name_of(t), mean, sqrt(square), std);
    }
    model_init(&m[1], 6);
    check(memcmp(m[1].base[A_PARAMS], m[0].base[A_PARAMS], 1 << 12) != 0,
        "seeds 5 and 6 give the same values");
    for (int i = 0; i < 3; i++) model_free(&m[i]);
    finish();
}

static void test_parameters(const char *name, Config c, int qk_norm, double total, double active) {
    TensorTable t;
    double all, used;
    if (!begin("table/%s", name)) return;
    c.qk_norm = qk_norm;
    if (tensor_table_build(&t, &c, 4)) die(RUN_ERROR, "no memory");
    count_parameters(&t, &c, &all, &used);
    check(all == total, "%.0f parameters, not %.0f", all, total);
    check(fabs(used / active - 1) < 1e-3, "%.4g active, not %.4g", used, active);
    tensor_table_free(&t);
    finish();
}

// What is counted before anything is allocated is what is then used.
static void test_memory(int which) {
    const Config c = model_config(which);
    if (!begin("table/memory/%s", model_name[which])) return;
    for (int i = 0; i < 4; i++) {
        const ModelShape s = {
            .B = 3, .T = 10, .train = i < 2, .recompute = i % 2 * 2, .cache_len = i == 3 ? 12 : 0};
        Model planned, built;
        model_plan(&planned, &c, backend_cpu(), s);
        model_build(&built, &c, backend_cpu(), s, NULL);
        for (ArenaId a = A_PARAMS; a < ARENAS; a++) {
            size_t listed = 0;
            for (int k = 0; k < planned.n_account; k++)
                listed += planned.account[k].arena == a ? planned.account[k].bytes : 0;
            check(planned.used[a] == listed, "%s: the list adds up to %zu of %zu bytes",
                arena_names[a], listed, planned.used[a]);
            check(planned.used[a] == built.used[a], "%s, %s: %zu bytes planned, %zu used",
                arena_names[a], s.train ? "training" : "inference", planned.used[a], built.used[a]);
        }
        model_free(&planned);
        model_free(&built);
    }
    finish();
}

#include "test_memory.h"

// -------------------------------------------------------------------------------------------------
// sha256 [FIPS 180-4]; its constants, fractional bits of roots of primes, are found by bisection

// 32 bits after the point of p^(1/power), power 2 or 3
static uint32_t root_bits(int p, int power) {
    const unsigned __int128 want = (unsigned __int128)p << 32 * power;
    uint64_t lo = 0, hi = (uint64_t)1 << 37;
    while (hi - lo > 1) {
        const uint64_t mid = lo + (hi - lo) / 2;
        const unsigned __int128 square = (unsigned __int128)mid * mid;
        if ((power == 2 ? square : square * mid) <= want)
            lo = mid;
        else
            hi = mid;
    }
    return (uint32_t)lo;
}
static uint32_t turn(uint32_t x, int n) { return x >> n | x << (32 - n); }

typedef struct Sha {
    uint32_t h[8], k[64];
    unsigned char block[64];
    uint64_t bytes;
} Sha;
static void sha_begin(Sha *s) {
    for (int p = 2, n = 0; n < 64; p++) {
        int d = 2;
        while (d * d <= p && p % d) d++;
        if (d * d <= p) continue;
        if (n < 8) s->h[n] = root_bits(p, 2);
        s->k[n++] = root_bits(p, 3);
    }
    s->bytes = 0;
}
static void sha_block(Sha *s) {
    uint32_t w[64], v[8]; // v: a b c d e f g h
    for (int i = 0; i < 16; i++) {
        const unsigned char *p = s->block + 4 * i;
        w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    }
    for (int i = 16; i < 64; i++) {
        const uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + w[i - 7] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) +
            (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
    }
    memcpy(v, s->h, sizeof v);
    for (int i = 0; i < 64; i++) {
        const uint32_t a = v[0], e = v[4], choose = (e & v[5]) ^ (~e & v[6]);
        const uint32_t t =
            v[7] + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + choose + s->k[i] + w[i];
        const uint32_t u =
            (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t, v[0] = t + u;
    }
    for (int i = 0; i < 8; i++) s->h[i] += v[i];
}
static void sha_add(Sha *s, const void *data, size_t n) {
    for (size_t i = 0; i < n; i++) {
        s->block[s->bytes++ % 64] = ((const unsigned char *)data)[i];
        if (s->bytes % 64 == 0) sha_block(s);
    }
}
static void sha_end(Sha *s, char hex[65]) {
    const uint64_t bits = 8 * s->bytes;
    sha_add(s, "\x80", 1);
    while (s->bytes % 64 != 56) sha_add(s, "", 1);
    for (int i = 56; i >= 0; i -= 8) sha_add(s, &(unsigned char){(unsigned char)(bits >> i)}, 1);
    for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", (unsigned)s->h[i]);
}

// Weights and moments of a small model after 20 steps, on any little-endian machine.
static const char hash20[] = "34cdcb162024e503fdd3225b5ad6292166a127c262fdba57fe261ebfaa36c99f";
static void training_hash(char hex[65]) {
    enum { STEPS = 20, B = 4, T = 32 };
    const Config c = config(256, 2, 64, 4, 2, 16, 6, 3, 48);
    StepState log[STEPS];
    Sha s;
    Model m = new_model(&c, backend_cpu(), B, T, 1, 0, NULL);
    model_init(&m, 1);
    m.aux_coef = 0.01, m.z_coef = 0.001;
    train(&m, STEPS, B, T, log);
    check(log[STEPS - 1].loss < log[0].loss - 0.3, "the loss went from %f to %f", log[0].loss,
        log[STEPS - 1].loss);
    sha_begin(&s);
    sha_add(&s, m.base[A_PARAMS], m.used[A_PARAMS]);
    sha_add(&s, m.base[A_MOMENTS], m.used[A_MOMENTS]);
    sha_end(&s, hex);
    model_free(&m);
}
static void test_hash(void) {
    char hex[65];
    if (begin("reference/sha256")) {
        Sha s;
        sha_begin(&s);
        sha_add(&s, "abc", 3);
        sha_end(&s, hex);
        check(!strcmp(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            "of abc: %s", hex);
        finish();
    }
    if (begin("hash20")) {
        training_hash(hex);
        check(!strcmp(hex, hash20), "%s, not %s", hex, hash20);
        finish();
    }
}

#include "test_diff.h"
#include "test_parity.h"

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "diff")) return diff_command(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "parity")) return parity_command(argc - 1, argv + 1);
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "-v"))
            verbose = 1;
        else
            filter = argv[i];
    if (!strcmp(filter, "hash")) {
        char hex[65];
        training_hash(hex);
        puts(hex);
        return 0;
    }
    test_operations();
    test_devices();
    test_parity_of_devices();
    for (int i = 0; i < MODELS; i++) test_model(i);
    test_references();
    test_threads("qwen3", config(256, 2, 64, 4, 2, 16, 16, 4, 16), 4, 200);
    test_threads("deepseek", model_config(DEEPSEEK), 3, 30);
    for (int i = 0; i < MODELS; i++) test_rows(i);
    test_micro_batches(backend_cpu(), 1e-6);
    test_micro_batches(backend_f64(), 1e-14);
    test_begin_without_training();
    for (int i = 0; i < MODELS; i++) test_variants(i);
    test_all_options();
    test_between_ranks();
    test_expert_order();
    test_choices();
    test_plan();
    test_bad_values(QWEN3);
    test_bad_values(DEEPSEEK);
    test_idle_expert();
    test_ignored_target();
    test_products("serial", 0, 0);
    test_products("grouped", 9, 0);
    test_products("threads", 3, 1);
    test_sums();
    test_functions();
    for (int i = 0; i < MODELS; i++) test_layout(i);
    test_start_values(); // totals: of the published weights
    test_parameters("mixtral-8x7b", config(32000, 32, 4096, 32, 8, 128, 8, 2, 14336), QK_NORM_NONE,
        46702792704, 12.748e9);
    test_parameters("olmoe-1b-7b", config(50304, 16, 2048, 16, 16, 128, 64, 8, 1024), QK_NORM_FULL,
        6919161856, 1.178e9);
    test_parameters("qwen3-30b-a3b", config(151936, 48, 2048, 32, 4, 128, 128, 8, 768),
        QK_NORM_HEAD, 30532122624, 3.042e9);
    for (int i = 0; i < MODELS; i++) test_memory(i);
    test_memory_of_training();
    test_hash();
    if (!tried) printf("FAIL test_moe: no check has '%s' in its name\n", filter), failures++;
    return failures != 0;
}
