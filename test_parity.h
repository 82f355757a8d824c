/* test_parity.h: whole models on a second device, beside the CPU. Included by test_moe.c, which has
   the models and batches.

     parity/train    20 steps of SGD from the same start on both: the change of every tensor,
                     ||dw - dw_cpu|| / ||dw_cpu||, within 1e-3 (fp32) or 5e-2 (bf16); and the same
                     measure must fail when one expert's gradient is zeroed
     parity/repeat   two runs, under other schedules of the threads: the same bits
     parity/rows     logits of a sequence alone, in a batch, in training's forward pass, in cached
                     generation token by token, in a padded batch: the same bits
     parity/options  every router, assignment and recomputation: losses and gradients near the CPU's,
                     and those that recompute the same bits

   Memory of the device is reached through to_host and to_device alone. `test_moe parity --device
   cuda` runs these on a GPU. */
#ifndef TEST_PARITY_H
#define TEST_PARITY_H

#include "test_ops.h"

// A device under test: one of its backends, and how to change the order it runs threads in.
typedef struct Parity {
    const Backend *b;
    void (*seed)(uint64_t); // NULL: not ours to choose
    double limit;           // of a tensor's change
} Parity;

static double *read_back(const Backend *b, DType type, const void *p, size_t n) {
    double *x = fresh(n, sizeof *x);
    host_from(b, type, x, p, n);
    return x;
}
static void *host_bytes(const Backend *b, const void *p, size_t bytes) {
    void *x = fresh(bytes, 1);
    b->to_host(x, p, bytes);
    return x;
}
static double *param_values(const Model *m, const Tensor *t) {
    return read_back(m->b, m->b->param_type, param_of(m, t), t->count);
}

// The choice of experts of another model's last forward pass, for the next of m.
static void choose_as(Model *m, const Model *other, int N) {
    for (int l = 0; l < m->c.n_layers; l++)
        if (is_moe_layer(&m->c, l))
            m->b->to_device(
                m->layer[l].topk, other->layer[l].topk, (size_t)N * m->c.top_k * sizeof(int));
    m->reuse_routing = 1;
}

/* Trains for `steps`. idle: a tensor whose gradient is zeroed in every step, or -1. guide: a model on
   the CPU that takes the same steps and chooses the experts for both, or NULL. Returns the last
   state. */
static StepState train_on(
    Model *m, Model *guide, int steps, int B, int T, const OptimConfig *o, double lr, int idle) {
    StepState s = {0};
    for (int step = 1; step <= steps; step++) {
        const int mark = pooled;
        const Batch x = new_batch(B, T, m->c.vocab_size, (uint64_t)step, 7);
        Model *const turn[2] = {guide ? guide : m, m};
        for (int i = !guide; i < 2; i++) {
            Model *k = turn[i];
            model_begin_step(k, step, lr, o);
            model_set_tokens(k, x.tokens, x.targets, x.N);
            if (i && guide) choose_as(m, guide, x.N);
            model_forward(k, B, T, 0, 1);
            model_backward(k, B, T, 1.0 / x.valid, 1);
            if (i && idle >= 0) {
                const Tensor *t = &m->table.tensor[idle];
                m->b->zero(grad_of(m, t), t->count * m->b->grad_size);
            }
            model_update(k, o);
        }
        s = model_state(m);
        release_to(mark);
    }
    return s;
}

enum { PARITY_B = 2, PARITY_T = 40, PARITY_STEPS = 20 };
static const OptimConfig plain_sgd = {.max_norm = 1, .sgd = 1};

// Sizes that vectors of 16 bytes divide, so that the fast paths run; model_config has the others.
static Config even_config(int which) {
    Config c = model_config(which);
    c.vocab_size = 48, c.d_model = 32, c.n_heads = 4, c.n_kv_heads = 2, c.head_dim = 16;
    c.d_expert = c.n_experts == 1 ? 48 : 16, c.d_dense = 32, c.d_shared = c.d_shared ? 16 : 0;
    return c;
}

static Model parity_model(
    const Config *c, const Backend *b, int recompute, int tile, const Model *from) {
    const ModelShape s = {
        .B = PARITY_B, .T = PARITY_T, .train = 1, .recompute = recompute, .tile = tile};
    Model m;
    model_build(&m, c, b, s, from);
    m.aux_coef = 0.01, m.z_coef = 0.001, m.bias_rate = 1e-3;
    if (!from) lively(&m);
    return m;
}

static double change_of(const Model *m, const Model *start, int i) {
    const int mark = pooled;
    const Tensor *t = &m->table.tensor[i];
    const double *x = param_values(m, t), *s = param_values(start, t);
    double moved = 0;
    for (size_t k = 0; k < t->count; k++) moved += (x[k] - s[k]) * (x[k] - s[k]);
    release_to(mark);
    return moved;
}
// The largest error of a tensor's change from `start`, and its name.
static double worst_change(
    const Model *m, const Model *ref, const Model *start, const char **name) {
    double worst = 0;
    for (int i = 0; i < m->table.count; i++) {
        const int mark = pooled;
        const Tensor *t = &m->table.tensor[i];
        if (!t->row->trained) continue;
        const double *x = param_values(m, t), *r = param_values(ref, t),
                     *s = param_values(start, t);
        double diff = 0, moved = 0;
        for (size_t k = 0; k < t->count; k++) {
            diff += (x[k] - r[k]) * (x[k] - r[k]);
            moved += (r[k] - s[k]) * (r[k] - s[k]);
        }
        const double e = diff == 0 ? 0 : sqrt(diff / moved);
        if (!(e <= worst)) worst = e, *name = name_of(t);
        release_to(mark);
    }
    return worst;
}

/* In bf16 the CPU chooses the experts for both: a near tie that rounding turns is no fault, and moves a
   token's whole gradient. */
static void test_parity_train(Parity p, const char *type, const char *sizes, int which) {
    const Config c = sizes[0] == 'e' ? even_config(which) : model_config(which);
    const int guided = p.b->act_type == BF16;
    const char *name = "";
    int busy = -1; // the expert of the last layer whose weights move most: one that has tokens
    if (!begin("parity/train/%s/%s/%s/%s", p.b->name, type, model_name[which], sizes)) return;
    Model start = parity_model(&c, backend_cpu(), 0, 0, NULL);
    for (int idle = 0; idle < 2; idle++) { // the second time with that expert's gradient zeroed
        Model ref = parity_model(&c, backend_cpu(), 0, 0, NULL);
        Model m = parity_model(&c, p.b, 0, 0, NULL);
        const int steps = idle ? 4 : PARITY_STEPS;
        if (!guided) train_on(&ref, NULL, steps, PARITY_B, PARITY_T, &plain_sgd, 0.1, -1);
        train_on(&m, guided ? &ref : NULL, steps, PARITY_B, PARITY_T, &plain_sgd, 0.1, busy);
        const double e = worst_change(&m, &ref, &start, &name);
        if (idle)
            check(e > p.limit, "a zeroed gradient is not seen: %.2e", e);
        else
            check(e <= p.limit, "%s: its change differs by %.2e, limit %.0e", name, e, p.limit);
        if (!idle) snprintf(check_measured, sizeof check_measured, " %.1e", e);
        const int down = (int)(tensor_of(&m.table, T_DOWN, c.n_layers - 1) - m.table.tensor);
        for (int i = busy = down; i < down + mlp_experts(&c, c.n_layers - 1); i++)
            if (change_of(&ref, &start, i) > change_of(&ref, &start, busy)) busy = i;
        model_free(&m), model_free(&ref);
    }
    model_free(&start);
    finish();
}

static void test_parity_repeat(Parity p, const char *type, int which) {
    const Config c = even_config(which);
    const int mark = pooled;
    const void *first = NULL;
    StepState s[3];
    if (!begin("parity/repeat/%s/%s/%s", p.b->name, type, model_name[which])) return;
    for (int run = 0; run < 3; run++) {
        if (p.seed) p.seed(11 + (uint64_t)run);
        set_threads(1 + run);
        Model m = parity_model(&c, p.b, 0, 0, NULL);
        s[run] = train_on(&m, NULL, 3, PARITY_B, PARITY_T, &adamw, 1e-2, -1);
        const void *bits = host_bytes(p.b, m.base[A_PARAMS], m.used[A_PARAMS]);
        check(!run || !memcmp(bits, first, m.used[A_PARAMS]), "run %d: other weights", run);
        check(!memcmp(&s[run], &s[0], sizeof *s), "run %d: other losses", run);
        if (!run) first = bits;
        model_free(&m);
    }
    if (p.seed) p.seed(1);
    release_to(mark);
    finish();
}

// (N,V) logits of the last forward pass, as bytes on the host
static char *logits_on_host(const Model *m, int N) {
    const size_t bytes = (size_t)N * m->c.vocab_size * m->b->act_size;
    void *device = m->b->alloc(bytes);
    must(device != NULL, "memory");
    m->b->linear_forward(device, m->lnf, m->head, N, m->scratch);
    char *out = host_bytes(m->b, device, bytes);
    m->b->release(device);
    return out;
}

static void test_parity_rows(Parity p, const char *type, const char *sizes, int which) {
    enum { B = 4, T = 70, S = 2, D = 3, W = 20 }; // S: the sequence to look at; D, W: padded batch
    const Config c = sizes[0] == 'e' ? even_config(which) : model_config(which);
    const Backend *b = p.b;
    const int mark = pooled;
    const size_t row = c.vocab_size * b->act_size;
    if (!begin("parity/rows/%s/%s/%s/%s", b->name, type, model_name[which], sizes)) return;
    const Batch x = new_batch(B, T, c.vocab_size, 11, 9);
    const int *tokens = x.tokens + S * T, *targets = x.targets + S * T;
    Model batch = new_model(&c, b, B, T, 0, 0, NULL);
    lively(&batch);
    const StepState eval = model_loss(&batch, x.tokens, x.targets, B, T);
    const char *all = logits_on_host(&batch, x.N), *logits = all + S * T * row;
    check(isfinite(eval.loss), "loss %f", eval.loss);

    Model other = new_model(&c, b, B, T, 1, 0, &batch);
    model_set_tokens(&other, x.tokens, x.targets, x.N);
    model_forward(&other, B, T, 0, 0);
    check(!memcmp(all, logits_on_host(&other, x.N), x.N * row), "training's forward pass differs");
    model_free(&other);

    other = new_model(&c, b, 1, T, 0, 0, &batch);
    for (int len = T; len > 0; len = len > 69 ? 9 : len - 8) { // 70, 9, 1 tokens alone
        model_loss(&other, tokens, targets, 1, len);
        check(
            !memcmp(logits, logits_on_host(&other, len), len * row), "%d tokens alone differ", len);
    }
    model_free(&other);

    other = new_model(&c, b, 1, 66, 0, T, &batch); // 66 at once, then one by one
    for (int at = 0, len = 66; at < T; at += len, len = 1) {
        model_next(&other, tokens + at, &at, &len, 1, len);
        check(!memcmp(logits + (at + len - 1) * row, host_bytes(b, other.logits, row), row),
            "cached: token %d differs", at + len - 1);
    }
    model_free(&other);

    const int lens[4][D] = {{20, 17, 1}, {1, 13, 20}, {20, 20, 20}, {1, 1, 1}};
    int start[D] = {0, 0, 0}, padded[D * W];
    other = new_model(&c, b, D, W, 0, T, &batch);
    for (int call = 0; call < 4; call++) {
        const int width = call == 3 ? 1 : W;
        for (int i = 0; i < D * width; i++) // padding: any token
            padded[i] = i % width < lens[call][i / width]
                ? tokens[(i / width - 1) * T + start[i / width] + i % width]
                : 1;
        model_next(&other, padded, start, lens[call], D, width);
        const char *next = host_bytes(b, other.logits, D * row);
        for (int d = 0; d < D; d++) {
            start[d] += lens[call][d];
            check(!memcmp(logits + ((d - 1) * T + start[d] - 1) * row, next + d * row, row),
                "call %d: sequence %d of a padded batch differs", call, d);
        }
    }
    model_free(&other), model_free(&batch);
    release_to(mark);
    finish();
}

/* One step under every option: the loss and the gradient of all tensors together near the CPU's. The
   choice of experts is the CPU's, so that a near tie cannot part them. */
static void test_parity_options(Parity p, const char *type, int which) {
    static const struct {
        const char *name;
        double capacity;
        int tile, recompute;
    } option[] = {{"topk", -1, 0, 0}, {"capacity", 0.7, 0, 0}, {"rounding", -1, 8, 0},
        {"recompute1", -1, 0, 1}, {"recompute2", -1, 0, 2}};
    const Config c = model_config(which);
    const int bf16 = p.b->act_type == BF16;
    const void *topk_bits = NULL;
    const int mark = pooled;
    for (size_t i = 0; i < COUNT(option); i++) {
        if (!begin(
                "parity/options/%s/%s/%s/%s", p.b->name, type, model_name[which], option[i].name))
            continue;
        const Batch x = new_batch(PARITY_B, PARITY_T, c.vocab_size, 3, 7);
        Model m[2];
        double loss[2], aux[2] = {0, 0};
        for (int k = 0; k < 2; k++) {
            const Backend *b = k ? p.b : backend_cpu();
            m[k] = parity_model(&c, b, option[i].recompute, option[i].tile, NULL);
            m[k].capacity = option[i].capacity;
            if (k) choose_as(&m[1], &m[0], x.N);
            m[1].reuse_routing = k && !option[i].tile && option[i].capacity < 0;
            model_begin_step(&m[k], 1, 0, &adamw);
            model_set_tokens(&m[k], x.tokens, x.targets, x.N);
            model_forward(&m[k], PARITY_B, PARITY_T, 0, 1);
            model_backward(&m[k], PARITY_B, PARITY_T, 1.0 / x.valid, 1);
            loss[k] = model_state(&m[k]).loss;
            for (int l = 0; l < c.n_layers; l++)
                if (m[k].layer[l].loss_sum)
                    aux[k] += *read_back(b, b->stat_type, m[k].layer[l].loss_sum, 1);
        }
        check(relative(loss[1], loss[0]) <= (bf16 ? 5e-3 : 1e-6), "loss %.8f, on the CPU %.8f",
            loss[1], loss[0]);
        check(relative(aux[1], aux[0]) <= (bf16 ? 1e-2 : 1e-5),
            "balance loss %.8f, on the CPU %.8f", aux[1], aux[0]);
        const size_t n = m[0].table.elements;
        const double *g = read_back(p.b, F32, m[1].base[A_GRADS], n);
        const double *r = read_back(backend_cpu(), F32, m[0].base[A_GRADS], n);
        double diff = 0, norm = 0;
        for (size_t k = 0; k < n; k++) diff += (g[k] - r[k]) * (g[k] - r[k]), norm += r[k] * r[k];
        within(sqrt(diff / norm), bf16 ? 5e-2 : 1e-5, "gradient");
        const void *bits = host_bytes(p.b, m[1].base[A_GRADS], n * sizeof(float));
        if (i == 0) topk_bits = bits;
        if (option[i].recompute && topk_bits)
            check(
                !memcmp(bits, topk_bits, n * sizeof(float)), "recomputation changes the gradient");
        model_free(&m[0]), model_free(&m[1]);
        finish();
    }
    release_to(mark);
}

static void (*schedule_of(const char *device))(uint64_t) {
#ifdef HAVE_EMULATED
    if (!strcmp(device, "emulated")) return emulated_seed;
#endif
    (void)device;
    return NULL;
}
static void test_parity(const Backend *b, void (*seed)(uint64_t)) {
    const int bf16 = b->act_type == BF16;
    const Parity p = {b, seed, bf16 ? 5e-2 : 1e-3};
    const char *type = bf16 ? "bf16" : "fp32";
    test_parity_repeat(p, type, QWEN3);
    if (SEES_BEYOND) return; // the sanitizers are slow with fibers
    test_parity_train(p, type, "even", QWEN3);
    test_parity_train(p, type, "odd", DEEPSEEK);
    test_parity_train(p, type, "even", DENSE);
    test_parity_train(p, type, "even", OLMOE);
    test_parity_repeat(p, type, DEEPSEEK);
    for (int which = 0; which < MODELS; which++)
        test_parity_rows(p, type, which % 2 ? "odd" : "even", which);
    test_parity_options(p, type, QWEN3);
    test_parity_options(p, type, DEEPSEEK);
}

// test_moe parity [--device emulated|cuda]: both data types
static int parity_command(int argc, char **argv) {
    const char *device = "emulated";
    if (argc == 3 && !strcmp(argv[1], "--device"))
        device = argv[2];
    else if (argc != 1)
        die(USER_ERROR, "test_moe parity: expected --device emulated or cuda, found '%s'", argv[1]);
    if (!strcmp(device, "cpu")) die(USER_ERROR, "--device: expected emulated or cuda, found 'cpu'");
    printf("device %s\n", device);
    test_parity(device_of(device, F32), schedule_of(device));
    test_parity(device_of(device, BF16), schedule_of(device));
    return failures != 0;
}
static void test_parity_of_devices(void) {
#ifdef HAVE_EMULATED
    test_parity(device_of("emulated", F32), schedule_of("emulated"));
    test_parity(device_of("emulated", BF16), schedule_of("emulated"));
#endif
}

#endif
