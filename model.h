/* model.h: the model, once for every device. Read after moe.h and moe_cpu.c.

   A Model is a Config, a Backend and a few arenas: parameters, gradients, moments, buffers, saved
   activations, working memory, key-value cache. model_build() lays them all out with one function,
   layout(), that runs twice: dry, to learn the sizes (this is what `info` prints), then for real.
   Nothing is allocated after that.

   model_forward()   embedding, L times (norm, attention, norm, experts), final norm
   model_backward()  the classifier and the same in reverse; gradients add up over micro-batches
   model_update()    gradient norm, clipping, AdamW or SGD
   model_loss()      forward and summed cross entropy only (evaluation)
   model_next()      the logits of each sequence's next token, with the key-value cache

   What is saved for the backward pass, per layer: the residual stream before each norm, the norms'
   outputs, raw q, k, v, their rstd, the attention's output and log-sum-exp; of the experts, their
   input X (the second norm's output), the pre-activation H and the routing. recompute 1 drops the
   norms' outputs, 2 also H: both are made again in the backward pass, with the same bits. Routing
   is never made again.

   With several ranks (shape.par) a model has the experts of its rank alone, its rows are the rank's
   share of a micro-batch, and all ranks call the same functions together.

   It knows moe.h, expert_parallel.h, and gemm.h for the exact exp, log, sine and cosine that start
   values need. */
#ifndef MODEL_H
#define MODEL_H

#include "expert_parallel.h"
#include "gemm.h"
#include "moe.h"

#define MODEL_FN __attribute__((unused)) static // a program need not use all of it

typedef enum {
    A_PARAMS,
    A_BUFFERS,
    A_COPIES, // the parameters as products read them, where that is another type
    A_GRADS,
    A_MOMENTS,
    A_SAVED,
    A_WORK,
    A_CACHE,
    ARENAS
} ArenaId;
enum { LAST_BORROWED = A_COPIES }; // a model may take these from another
static const char *const arena_names[ARENAS] = {"parameters", "buffers", "weight copies",
    "gradients", "optimiser moments", "saved activations", "working memory", "key-value cache"};

// What a model is built for. A model that only infers keeps nothing of a layer but its cache.
typedef struct ModelShape {
    int B, T;      // rows of a call are at most B * T
    int cache_len; // positions in the key-value cache; 0: no cache (training, evaluation)
    int train;     // gradients, moments and saved activations
    int recompute; // 0 | 1 norm outputs | 2 also H
    int sgd;       // no moments
    int count;     // loads of a step, as training counts them, also without train
    int tile;      // token rounding in training: multiple of slots that an expert gets; 0 = off
    // several ranks; NULL: this one alone
    const Parallel *par;
    int B_all;  // sequences of a call over all ranks; B is the rank's share
    int select; // training drops or rounds slots, over the rows of all ranks
} ModelShape;

typedef struct Mlp { // a SwiGLU MLP: the experts of a layer, a dense MLP, or the shared expert
    act_t *H;
    Mat W1, W2;
    grad_t *dW1, *dW2;
} Mlp;

typedef struct Layer {
    // saved
    act_t *x, *ln1, *qkv, *att, *x2, *ln2;
    stat_t *rstd1, *rstd_qk, *lse, *rstd2;
    stat_t *logits, *router_lse, *topk_weight;
    int *topk, *count;
    Plan plan;
    Mlp mlp, shared;
    act_t *k_cache, *v_cache;
    // weights and their gradients
    param_t *norm1, *norm2, *q_norm, *k_norm;
    grad_t *dnorm1, *dnorm2, *dq_norm, *dk_norm;
    Mat Wqkv, Wo, Wr;
    grad_t *dWqkv, *dWo, *dWr;
    stat_t *bias;
    // totals of a step, for the log
    int *count_sum, *moved; // choices an expert; slots dropped, added
    stat_t *loss_sum;       // 2: balance loss, z-loss
    stat_t *sums;           // (E+1) several ranks: of a micro-batch, as router_forward makes them
} Layer;

enum { MAX_ACCOUNT = 64 };
typedef struct Account {
    ArenaId arena;
    const char *label;
    size_t bytes;
} Account;

typedef struct Model {
    Config c;
    ModelShape shape;
    const Backend *b;
    TensorTable table;
    char *base[ARENAS];
    size_t used[ARENAS];
    int borrowed; // parameters, buffers and copies belong to another model
    Account account[MAX_ACCOUNT];
    int n_account;

    Layer *layer;
    Mat wte, head;
    grad_t *dwte, *dhead;
    param_t *final_norm;
    grad_t *dfinal_norm;
    act_t *xf, *lnf;
    stat_t *rstdf;

    // working memory
    act_t *branch, *dx, *dln, *q, *k, *v, *dq, *dk, *dv, *datt, *dqkv, *sA, *logits;
    stat_t *rope, *dS, *losses;
    int *tokens, *targets, *start, *len, *dense_offsets;
    Segment *segments;
    StepState *state;
    void *scratch;
    size_t step_stats_bytes; // count_sum and loss_sum of all layers lie together from here
    char *step_stats;
    int n_segments;
    int fresh; // the step's first micro-batch, which writes the gradients of MLPs and adds to others
    // several ranks
    int more_follow;        // gradients are not complete yet: another micro-batch follows
    TensorTable whole;      // of all ranks' tensors
    Exchange *exchange;     // experts on several ranks, else NULL
    Buckets buckets;        // of gradients that are summed over ranks
    Segment *own;           // what this rank counts in the norm, and updates with ZeRO-1
    int n_own, *own_tensor; // (n_own) index in table, on the host
    int *counts;            // (MoE layers, E): of all layers together
    stat_t *sums;           // (MoE layers, E+1)
    stat_t *all_logits, *all_lse, *all_weight; // routing of the rows of all ranks: selection
    int *all_topk, *all_of;
    Plan all_plan;
    double aux_coef, z_coef; // of the loss; divided by layers and micro-batches where they are used
    double capacity;         // training drops beyond capacity * N K / E slots an expert; < 0 = none
    double bias_rate;        // of the selection bias, a step
    int reuse_routing;       // tests: take the choice of experts in topk as given
} Model;

#ifdef MOE_DISPATCH
// A portable x86-64 program holds the CPU backend once for each instruction set; they give the same
// bits.
extern const Backend *backend_base(void), *backend_avx2(void), *backend_avx512(void);
const Backend *backend_cpu(void) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw"))
        return backend_avx512();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? backend_avx2()
                                                                           : backend_base();
}
#endif

// -------------------------------------------------------------------------------------------------
// memory

static inline size_t mul_sizes(size_t a, size_t b) {
    size_t r;
    if (__builtin_mul_overflow(a, b, &r) || r > SIZE_MAX / 16)
        die(USER_ERROR,
            "the model is too large to address (%zu x %zu bytes); lower --batch, --seq or "
            "--d-model",
            a, b);
    return r;
}

// `count` elements from an arena; NULL in the dry run. Every use is entered in the account under
// its label.
MODEL_FN void *take(Model *m, ArenaId arena, const char *label, size_t count, size_t elem) {
    const size_t bytes = (mul_sizes(count, elem) + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    const size_t at = m->used[arena];
    int i = 0;
    while (i < m->n_account && (m->account[i].arena != arena || strcmp(m->account[i].label, label)))
        i++;
    if (i == m->n_account) {
        if (i == MAX_ACCOUNT) die(RUN_ERROR, "internal: more than %d kinds of memory", MAX_ACCOUNT);
        Account fresh = {arena, label, 0};
        m->account[m->n_account++] = fresh;
    }
    m->account[i].bytes += bytes;
    m->used[arena] += bytes;
    return m->base[arena] ? m->base[arena] + at : NULL;
}

MODEL_FN Mat mat_of(const Model *m, TensorKind kind, int layer, grad_t **grad) {
    const Tensor *t = tensor_of(&m->table, kind, layer);
    const Backend *b = m->b;
    Mat w = {NULL, b->param_type, NULL, 0, 0, 0, 0, 0};
    if (grad) *grad = NULL;
    if (!t) return w;
    // what a product reads may be a rounded copy; not so the router's matrix, nor a vector
    const int copied = b->params_changed && t->row->cols != DIM_NONE && kind != T_ROUTER;
    const char *base = m->base[copied ? A_COPIES : A_PARAMS];
    w.dtype = copied ? b->mat_type : b->param_type;
    w.data =
        base ? (char *)(uintptr_t)base + t->offset * (copied ? b->mat_size : b->param_size) : NULL;
    if (grad && m->base[A_GRADS]) *grad = m->base[A_GRADS] + t->offset * m->b->grad_size;
    w.count = t->expert < 0 ? 1 : m->table.experts;
    w.rows = (int)t->rows;
    w.cols = (int)t->cols;
    w.ld = t->cols;
    w.stride = w.count > 1 ? t[1].offset - t->offset : 0;
    return w;
}

MODEL_FN param_t *vector_of(const Model *m, TensorKind kind, int layer, grad_t **grad) {
    return mat_of(m, kind, layer, grad).data;
}

// Most slots of layer l for N rows: what its buffers are sized for.
static inline size_t slots_of(const Model *m, int l, size_t N) {
    const size_t K = mlp_topk(&m->c, l), E = mlp_experts(&m->c, l);
    if (!m->shape.tile || !is_moe_layer(&m->c, l)) return N * K;
    const size_t rounded = N * K + E * ((size_t)m->shape.tile - 1);
    return rounded < N * E ? rounded : N * E;
}

MODEL_FN void take_plan(Model *m, ArenaId arena, const char *label, Plan *p) {
    p->offsets = take(m, arena, label, p->E + 1, sizeof(int));
    p->row = take(m, arena, label, p->S_max, sizeof(int));
    p->expert = take(m, arena, label, p->S_max, sizeof(int));
    p->weight = take(m, arena, label, p->S_max, m->b->stat_size);
    p->row_begin = take(m, arena, label, (size_t)p->rows + 1, sizeof(int));
    p->slot = take(m, arena, label, p->S_max, sizeof(int));
}

#include "model_ranks.h"

// Elements of one of the two moments that this rank keeps.
static inline size_t moment_elements(const Model *m) {
    const size_t share = m->buckets.moments; // perhaps none: some room all the same
    if (!m->shape.par || !m->shape.par->zero) return m->table.elements;
    return share ? share : SHARD_ELEMENTS;
}

/* Lays out every arena. A saved buffer of the training model is a working buffer, shared by all
   layers, in a model that only infers, or where it is made again in the backward pass. */
MODEL_FN void layout(Model *m) {
    const Config *c = &m->c;
    const Backend *b = m->b;
    const ModelShape s = m->shape;
    const size_t N = mul_sizes(s.B, s.T), C = c->d_model, act = b->act_size, stat = b->stat_size;
    const size_t Q = dim_of(c, DIM_Q), KV = dim_of(c, DIM_KV), E = c->n_experts, K = c->top_k;
    const size_t norms = c->qk_norm == QK_NORM_NONE ? 0
        : c->qk_norm == QK_NORM_FULL                ? 2
                                                    : c->n_heads + c->n_kv_heads;
    const size_t cache = s.cache_len ? (size_t)s.cache_len : (size_t)s.T;
    const int norm_saved = s.train && s.recompute < 1, h_saved = s.train && s.recompute < 2;
    const size_t positions = s.cache_len > s.T ? s.cache_len : s.T;
    const size_t came = m->exchange ? slots_that_come(m) : 0; // for the experts here
    size_t max_slots = N, max_sI = 0, max_I2 = 0, shared_I2 = 2 * (size_t)c->d_shared;

    memset(m->used, 0, sizeof m->used);
    m->n_account = 0;
    take(m, A_PARAMS, "weights", m->table.elements, b->param_size);
    if (m->table.buffer_elements)
        take(m, A_BUFFERS, "selection bias", m->table.buffer_elements, stat);
    if (b->params_changed) take(m, A_COPIES, "rounded weights", m->table.elements, b->mat_size);
    if (s.train) take(m, A_GRADS, "gradients", m->table.elements, b->grad_size);
    if (s.train && !s.sgd) take(m, A_MOMENTS, "m and v", 2 * moment_elements(m), b->grad_size);

    for (int l = 0; l < c->n_layers; l++) {
        const size_t I = mlp_width(c, l), own = slots_of(m, l, N);
        const size_t slots = m->exchange && is_moe_layer(c, l) ? came : own;
        if (slots > max_slots) max_slots = slots;
        if (own > max_slots) max_slots = own;
        if (slots * I > max_sI) max_sI = slots * I;
        if (2 * slots * I > max_I2) max_I2 = 2 * slots * I;
    }
    // working memory, shared by the layers
    act_t *ln = norm_saved ? NULL : take(m, A_WORK, "norm output (N,C)", N * C, act);
    act_t *H = h_saved ? NULL : take(m, A_WORK, "H (S,2I)", max_I2, act);
    act_t *Hs = h_saved || !shared_I2
        ? NULL
        : take(m, A_WORK, "shared expert H (N,2I)", N * shared_I2, act);
    Layer
        infer; // a model that only infers has one set of layer buffers, and one of routing buffers
    memset(&infer, 0, sizeof infer);
    int have_routing = 0;
    m->branch = take(m, A_WORK, "branch output (N,C)", N * C, act);
    m->q = take(m, A_WORK, "rotated q (N,Q)", N * Q, act);
    if (!s.cache_len) {
        m->k = take(m, A_WORK, "rotated k, v (N,KV)", N * KV, act);
        m->v = take(m, A_WORK, "rotated k, v (N,KV)", N * KV, act);
    }
    if (s.train) {
        m->dx = take(m, A_WORK, "residual gradient (N,C)", N * C, act);
        m->dln = m->branch; // one lives in the forward pass, the other in the backward pass
        m->dq = take(m, A_WORK, "dq, dk, dv", N * Q, act);
        m->dk = take(m, A_WORK, "dq, dk, dv", N * KV, act);
        m->dv = take(m, A_WORK, "dq, dk, dv", N * KV, act);
        m->datt = take(m, A_WORK, "attention gradients (N,2Q+2KV)", N * Q, act);
        m->dqkv = take(m, A_WORK, "attention gradients (N,2Q+2KV)", N * (Q + 2 * KV), act);
        m->dS = take(m, A_WORK, "routing gradient (S)", max_slots, stat);
    }
    // one serves both passes: A in the forward pass, where the backend wants it, sA in the backward
    if (s.train || b->keeps_A)
        m->sA = take(m, A_WORK, s.train ? "weighted SwiGLU (S,I)" : "SwiGLU (S,I)",
            max_sI > N * c->d_shared ? max_sI : N * c->d_shared, act);
    m->rope = take(m, A_WORK, "rotary table", positions * c->head_dim, stat);
    m->losses = take(m, A_WORK, "losses (N)", N, stat);
    m->tokens = take(m, A_WORK, "tokens and targets (N)", N, sizeof(int));
    m->targets = take(m, A_WORK, "tokens and targets (N)", N, sizeof(int));
    m->start = take(m, A_WORK, "sequence starts and lengths (B)", s.B, sizeof(int));
    m->len = take(m, A_WORK, "sequence starts and lengths (B)", s.B, sizeof(int));
    m->dense_offsets = take(m, A_WORK, "small", 2, sizeof(int));
    m->state = take(m, A_WORK, "small", 1, sizeof(StepState));
    m->segments = take(m, A_WORK, "list of tensors", m->table.count, sizeof(Segment));
    m->logits = s.train
        ? NULL
        : take(m, A_WORK, "next-token logits (B,V)", mul_sizes(s.B, c->vocab_size), act);
    ScratchShape sh = {s.B, s.T, (int)cache, (int)max_slots, s.train, 0, m->table.experts};
    if (s.par && s.select) { // over the rows of all ranks
        const size_t all = (size_t)s.B_all * s.T, most = slots_of(m, c->n_layers - 1, all);
        static const char label[] = "routing of all ranks";
        Plan p = {(int)all, (int)E, (int)most, s.tile ? (int)E : (int)K, NULL, NULL, NULL, NULL,
            NULL, NULL};
        take_plan(m, A_WORK, label, &p);
        m->all_plan = p;
        m->all_logits = take(m, A_WORK, label, all * E, stat);
        m->all_lse = take(m, A_WORK, label, all, stat);
        m->all_weight = take(m, A_WORK, label, all * K, stat);
        m->all_topk = take(m, A_WORK, label, all * K, sizeof(int));
        m->all_of = take(m, A_WORK, label, most, sizeof(int));
        sh.rows = (int)all;
        if (most > max_slots) sh.S_max = (int)most;
    }
    if (m->exchange && (int)rows_that_come(m) > sh.rows) sh.rows = (int)rows_that_come(m);
    m->scratch = take(m, A_WORK, "scratch of the operations", b->scratch_bytes(c, &sh), 1);

    if (m->exchange) layout_exchange(m, h_saved, H);
    const int together = s.par && s.train; // counts are summed over ranks, of all layers at once
    if (together) m->own = take(m, A_WORK, "list of tensors", m->table.count, sizeof(Segment));
    if (together && moe_layers(c)) {
        m->counts = take(m, A_SAVED, "routing", moe_layers(c) * E, sizeof(int));
        m->sums = take(m, A_WORK, "routing of all ranks", moe_layers(c) * (E + 1), stat);
    }
    m->step_stats = NULL;
    m->step_stats_bytes = 0;
    if ((s.train || s.count) && moe_layers(c)) {
        const size_t each = ((E + 2) * sizeof(int) + 2 * stat + 7) / 8 * 8;
        m->step_stats_bytes = each * moe_layers(c);
        m->step_stats = take(m, A_WORK, "loads and losses of a step", m->step_stats_bytes, 1);
        for (int l = 0, i = 0; l < c->n_layers; l++) {
            if (!is_moe_layer(c, l) || !m->step_stats) continue;
            m->layer[l].loss_sum = m->step_stats + each * i++;
            m->layer[l].moved = (int *)((char *)m->layer[l].loss_sum + 2 * stat);
            m->layer[l].count_sum = m->layer[l].moved + 2;
        }
    }

    m->wte = mat_of(m, T_EMBED, -1, &m->dwte);
    m->head = mat_of(m, c->tied ? T_EMBED : T_HEAD, -1, &m->dhead);
    m->final_norm = vector_of(m, T_FINAL_NORM, -1, &m->dfinal_norm);
    for (int l = 0; l < c->n_layers; l++) {
        Layer *y = &m->layer[l];
        const ArenaId keep = s.train ? A_SAVED : A_WORK;
        const size_t I = mlp_width(c, l), slots = slots_of(m, l, N);
        const int moe = is_moe_layer(c, l);
        y->norm1 = vector_of(m, T_ATTN_NORM, l, &y->dnorm1);
        y->norm2 = vector_of(m, T_MLP_NORM, l, &y->dnorm2);
        y->q_norm = vector_of(m, T_Q_NORM, l, &y->dq_norm);
        y->k_norm = vector_of(m, T_K_NORM, l, &y->dk_norm);
        y->Wqkv = mat_of(m, T_QKV, l, &y->dWqkv);
        y->Wo = mat_of(m, T_ATTN_OUT, l, &y->dWo);
        y->Wr = mat_of(m, T_ROUTER, l, &y->dWr);
        y->mlp.W1 = mat_of(m, T_GATE_UP, l, &y->mlp.dW1);
        y->mlp.W2 = mat_of(m, T_DOWN, l, &y->mlp.dW2);
        y->shared.W1 = mat_of(m, T_SHARED_GATE_UP, l, &y->shared.dW1);
        y->shared.W2 = mat_of(m, T_SHARED_DOWN, l, &y->shared.dW2);
        const Tensor *bias = tensor_of(&m->table, T_ROUTER_BIAS, l);
        y->bias = bias && m->base[A_BUFFERS] ? m->base[A_BUFFERS] + bias->offset * stat : NULL;
        if (s.cache_len) {
            y->k_cache = take(m, A_CACHE, "k, v", mul_sizes(s.B * KV, cache), act);
            y->v_cache = take(m, A_CACHE, "k, v", mul_sizes(s.B * KV, cache), act);
        } else {
            y->k_cache = m->k;
            y->v_cache = m->v;
        }
        if (!s.train && l > 0) { // the buffers of layer 0 serve them all; slots differ only between
                                 // MoE and dense
            Layer *z = &infer;
            y->x = z->x, y->ln1 = z->ln1, y->qkv = z->qkv, y->att = z->att, y->x2 = z->x2,
            y->ln2 = z->ln2;
            y->rstd1 = z->rstd1, y->rstd_qk = z->rstd_qk, y->lse = z->lse, y->rstd2 = z->rstd2;
        } else {
            y->x = take(m, keep, "residual stream (N,C), twice a layer", N * C, act);
            y->x2 = take(m, keep, "residual stream (N,C), twice a layer", N * C, act);
            y->qkv = take(m, keep, "q, k, v (N,Q+2KV)", N * (Q + 2 * KV), act);
            y->att = take(m, keep, "attention output (N,Q)", N * Q, act);
            y->rstd1 = take(m, keep, "rstd, log-sum-exp", N, stat);
            y->rstd2 = take(m, keep, "rstd, log-sum-exp", N, stat);
            y->rstd_qk = take(m, keep, "rstd, log-sum-exp", N * norms, stat);
            y->lse = take(m, keep, "rstd, log-sum-exp", N * c->n_heads, stat);
            y->ln1 = norm_saved ? take(m, keep, "attention input (N,C)", N * C, act) : ln;
            y->ln2 = norm_saved ? take(m, keep, "expert input X (N,C)", N * C, act) : ln;
        }
        y->mlp.H = m->exchange && moe ? NULL // that of the rows that came
            : h_saved ? take(m, keep, "expert pre-activation H (S,2I)", 2 * slots * I, act)
                      : H;
        y->shared.H = !shared_I2 || !moe ? NULL
            : h_saved ? take(m, keep, "shared expert H (N,2I)", N * shared_I2, act)
                      : Hs;
        Plan *p = &y->plan;
        p->rows = (int)N;
        p->S_max = (int)slots;
        p->row_max = !moe ? 1 : s.tile ? c->n_experts : c->top_k;
        p->E = mlp_experts(c, l);
        if (!moe) { // the identity plan
            p->offsets = m->dense_offsets;
        } else if (!s.train && have_routing) {
            y->logits = infer.logits, y->router_lse = infer.router_lse,
            y->topk_weight = infer.topk_weight;
            y->topk = infer.topk, y->count = infer.count, y->plan = infer.plan;
        } else {
            y->logits = take(m, keep, "routing", N * E, stat);
            y->router_lse = take(m, keep, "routing", N, stat);
            y->topk_weight = take(m, keep, "routing", N * K, stat);
            y->topk = take(m, keep, "routing", N * K, sizeof(int));
            const size_t at = (size_t)(l - c->dense_layers);
            y->count = !together ? take(m, keep, "routing", E, sizeof(int))
                : m->counts      ? m->counts + at * E
                                 : NULL;
            y->sums = m->sums ? (char *)m->sums + at * (E + 1) * stat : NULL;
            take_plan(m, keep, "routing", p);
        }
        if (l == 0) infer = *y;
        if (moe && !have_routing) { // of the first MoE layer, which need not be layer 0
            have_routing = 1;
            infer.logits = y->logits, infer.router_lse = y->router_lse,
            infer.topk_weight = y->topk_weight;
            infer.topk = y->topk, infer.count = y->count, infer.plan = y->plan;
        }
    }
    m->xf = take(m, s.train ? A_SAVED : A_WORK, "final norm", N * C, act);
    m->lnf = take(m, s.train ? A_SAVED : A_WORK, "final norm", N * C, act);
    m->rstdf = take(m, s.train ? A_SAVED : A_WORK, "final norm", N, stat);
}

MODEL_FN size_t model_bytes(const Model *m) {
    size_t total = 0;
    for (int a = 0; a < ARENAS; a++)
        if (!(m->borrowed && a <= LAST_BORROWED)) total += m->used[a];
    return total;
}

// The dry run alone: sizes, account and tensor table, nothing allocated but those. Free with
// model_free.
MODEL_FN void model_plan(Model *m, const Config *c, const Backend *b, ModelShape shape) {
    const Parallel *par = shape.par;
    memset(m, 0, sizeof *m);
    m->c = *c;
    m->b = b;
    m->shape = shape;
    m->capacity = -1;
    m->layer = calloc(c->n_layers, sizeof *m->layer);
    const int P = par && moe_layers(c) ? par->ep.size : 1, here = c->n_experts / P;
    int *mine = P > 1 ? malloc((size_t)c->n_layers * c->n_experts * sizeof *mine) : NULL;
    for (int l = 0; l < c->n_layers && mine; l++)
        memcpy(mine + (size_t)l * c->n_experts,
            par->order + (size_t)l * c->n_experts + (size_t)par->ep.rank * here,
            here * sizeof *mine);
    if (!m->layer || (P > 1 && !mine) || tensor_table_build(&m->whole, c, b->param_size) ||
        tensor_table_build_some(&m->table, c, b->param_size, mine, here))
        die(RUN_ERROR, "no memory for the list of tensors of %d layers", c->n_layers);
    free(mine);
    buckets_open(&m->buckets, &m->table, par);
    if (P > 1)
        m->exchange = exchange_open(
            par, b, c, shape.train, share_of_batch(&par->world, shape.B_all, 0, NULL) * shape.T);
    layout(m);
}

// Numbers on their way between the host and a device: enough at a time that a copy's start, some
// microseconds on a GPU, is not what takes the time.
enum { STAGED = 4096 };
typedef union Staging {
    float f[STAGED];
    double d[STAGED];
    uint16_t h[STAGED];
} Staging;

MODEL_FN void host_to(
    const Backend *b, DType type, void *dst, const double *src, size_t n) { // dst: device
    Staging buf;
    const size_t size = dtype_size(type);
    for (size_t at = 0; at < n; at += STAGED) {
        const size_t k = n - at < STAGED ? n - at : STAGED;
        for (size_t i = 0; i < k; i++) {
            if (type == F64)
                buf.d[i] = src[at + i];
            else if (type == BF16)
                buf.h[i] = bf16_of((float)src[at + i]);
            else
                buf.f[i] = (float)src[at + i];
        }
        b->to_device((char *)dst + at * size, &buf, k * size);
    }
}

MODEL_FN void host_from(const Backend *b, DType type, double *dst, const void *src, size_t n) {
    Staging buf;
    const size_t size = dtype_size(type);
    for (size_t at = 0; at < n; at += STAGED) {
        const size_t k = n - at < STAGED ? n - at : STAGED;
        b->to_host(&buf, (const char *)src + at * size, k * size);
        for (size_t i = 0; i < k; i++)
            dst[at + i] = type == F64 ? buf.d[i]
                : type == BF16        ? (double)float_of_bf16(buf.h[i])
                                      : (double)buf.f[i];
    }
}

/* Allocates what model_plan counted. from: a model whose parameters this one borrows (sampling
   during training), or NULL. Parameters are left unset: model_init or a checkpoint fills them. */
MODEL_FN void model_build(
    Model *m, const Config *c, const Backend *b, ModelShape shape, const Model *from) {
    model_plan(m, c, b, shape);
    m->borrowed = from != NULL;
    for (int a = 0; a < ARENAS; a++) {
        if (from && a <= LAST_BORROWED)
            m->base[a] = from->base[a];
        else if (m->used[a]) {
            m->base[a] = b->alloc(m->used[a]);
            if (!m->base[a])
                die(RUN_ERROR,
                    "no memory for %s: %.1f MB; lower --batch, --seq or the size of the model",
                    arena_names[a], m->used[a] / 1e6);
        }
    }
    layout(m);
    if (!from) { // gaps between tensors are never used, but are copied and compared
        b->zero(m->base[A_PARAMS], m->used[A_PARAMS]);
        if (m->used[A_BUFFERS]) b->zero(m->base[A_BUFFERS], m->used[A_BUFFERS]);
    }
    if (m->base[A_MOMENTS]) b->zero(m->base[A_MOMENTS], m->used[A_MOMENTS]);
    Segment *seg = malloc((m->table.count + 1) * sizeof *seg);
    if (!seg) die(RUN_ERROR, "no memory");
    for (int i = 0; i < m->table.count; i++) {
        const Tensor *t = &m->table.tensor[i];
        Segment s = {t->offset, t->count, t->row->decay, t->offset};
        if (t->row->trained) seg[m->n_segments++] = s;
    }
    b->to_device(m->segments, seg, m->n_segments * sizeof *seg);
    list_own(m, seg);
    free(seg);
    if (m->exchange)
        b->to_device(
            m->exchange->order, shape.par->order, (size_t)c->n_layers * c->n_experts * sizeof(int));
    int identity[2] = {0, (int)((size_t)shape.B * shape.T)};
    b->to_device(m->dense_offsets, identity, sizeof identity);
    // rope[p] = cos(p f_i), then sin(p f_i); f_i = theta^(-2i/hd)
    const int half = c->head_dim / 2,
              positions = shape.cache_len > shape.T ? shape.cache_len : shape.T;
    double *row = malloc(2 * half * sizeof *row);
    if (!row) die(RUN_ERROR, "no memory");
    for (int p = 0; p < positions; p++) {
        for (int i = 0; i < half; i++) {
            const double angle = p * exp_d(-2.0 * i / c->head_dim * log_d(c->rope_theta));
            row[i] = cos_d(angle);
            row[half + i] = sin_d(angle);
        }
        host_to(b, b->stat_type, (char *)m->rope + (size_t)p * c->head_dim * b->stat_size, row,
            2 * half);
    }
    free(row);
}

MODEL_FN void model_free(Model *m) {
    for (int a = 0; a < ARENAS; a++)
        if (m->base[a] && !(m->borrowed && a <= LAST_BORROWED)) m->b->release(m->base[a]);
    tensor_table_free(&m->table);
    tensor_table_free(&m->whole);
    buckets_close(&m->buckets);
    if (m->exchange) exchange_close(m->exchange);
    free(m->own_tensor);
    free(m->layer);
    memset(m, 0, sizeof *m);
}

// To be called after the parameters were written: the copies that products read follow.
MODEL_FN void model_params_changed(Model *m) {
    if (m->b->params_changed) m->b->params_changed(m->base[A_COPIES], m->base[A_PARAMS], &m->table);
}

static inline grad_t *moment(const Model *m, int second) { // m or v; NULL for SGD
    return m->base[A_MOMENTS] ? m->base[A_MOMENTS] + second * moment_elements(m) * m->b->grad_size
                              : NULL;
}

// -------------------------------------------------------------------------------------------------
// start values

static inline uint64_t mix64(
    uint64_t x) { // a bijection whose output bits all depend on all input bits
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93u;
    x ^= x >> 29;
    x *= 0xA3B195354A39B70Du;
    return x ^ x >> 32;
}
static inline uint64_t counter_hash(uint64_t seed, uint64_t a, uint64_t b) {
    return mix64(mix64(mix64(seed + 1) ^ a) ^ b);
}
static inline double counter_uniform(uint64_t seed, uint64_t a, uint64_t b) { // in (0, 1)
    return ((double)(counter_hash(seed, a, b) >> 12) + 0.5) / 4503599627370496.0;
}
// standard normal numbers from counters [Box & Muller 1958]
static inline double counter_normal(uint64_t seed, uint64_t a, uint64_t b) {
    const double u = counter_uniform(seed, a, 2 * b), v = counter_uniform(seed, a, 2 * b + 1);
    return __builtin_sqrt(-2 * log_d(u)) * cos_d(6.283185307179586 * v);
}

// A tensor's values depend on (seed, kind, layer, expert, element) alone, not on ranks or on other
// tensors.
MODEL_FN void model_init(Model *m, uint64_t seed) {
    const Config *c = &m->c;
    for (int i = 0; i < m->table.count; i++) {
        const Tensor *t = &m->table.tensor[i];
        const int buffer = !t->row->trained;
        const DType type = buffer ? m->b->stat_type : m->b->param_type;
        const size_t size = buffer ? m->b->stat_size : m->b->param_size;
        char *dst = m->base[buffer ? A_BUFFERS : A_PARAMS] + t->offset * size;
        const uint64_t id = ((uint64_t)t->row->kind << 48) | ((uint64_t)(t->layer + 1) << 24) |
            (uint64_t)(t->expert + 1);
        double std = t->row->std;
        if (t->row->init == INIT_RESIDUAL) std /= __builtin_sqrt(2.0 * c->n_layers);
        const size_t step = STAGED;
#pragma omp parallel for
        for (size_t at = 0; at < t->count; at += step) {
            double v[STAGED];
            const size_t n = t->count - at < step ? t->count - at : step;
            for (size_t j = 0; j < n; j++)
                v[j] = t->row->init == INIT_ONES ? 1
                    : t->row->init == INIT_ZEROS ? 0
                                                 : std * counter_normal(seed, id, at + j);
            host_to(m->b, type, dst + at * size, v, n);
        }
    }
    model_params_changed(m);
}

/* Sparse upcycling [Komatsuzaki 2022]: m, which model_init has filled, takes the weights of a dense
   model of the same shape. Every expert, and the MLP of a layer that stays dense, is a copy of the
   dense MLP, so that with renormalised weights the logits are the dense model's. Routers keep their
   start values; a shared expert starts with an output of zero. noise: normal, with this part of the
   root mean square of each expert's weights as its deviation; the experts differ from the start. */
MODEL_FN void model_upcycle(Model *m, const Model *dense, double noise, uint64_t seed) {
    const size_t size = m->b->param_size;
    for (int i = 0; i < m->table.count; i++) {
        const Tensor *t = &m->table.tensor[i], *from;
        if (!t->row->trained || t->row->kind == T_ROUTER || t->row->kind == T_SHARED_GATE_UP)
            continue;
        char *dst = m->base[A_PARAMS] + t->offset * size;
        if (t->row->kind == T_SHARED_DOWN) {
            m->b->zero(dst, t->count * size);
            continue;
        }
        from = tensor_of(&dense->table, t->row->kind, t->layer);
        double *v = malloc(t->count * sizeof *v), square = 0;
        if (!v) die(RUN_ERROR, "no memory for a tensor of %zu weights", t->count);
        host_from(m->b, m->b->param_type, v, dense->base[A_PARAMS] + from->offset * size, t->count);
        if (noise > 0 && t->expert >= 0) {
            const uint64_t id = (uint64_t)1 << 56 | (uint64_t)t->row->kind << 48 |
                (uint64_t)(t->layer + 1) << 24 | (uint64_t)(t->expert + 1);
            for (size_t k = 0; k < t->count; k++) square += v[k] * v[k];
            const double std = noise * __builtin_sqrt(square / (double)t->count);
            for (size_t k = 0; k < t->count; k++) v[k] += std * counter_normal(seed, id, k);
        }
        host_to(m->b, m->b->param_type, dst, v, t->count);
        free(v);
    }
    model_params_changed(m);
}

// -------------------------------------------------------------------------------------------------
// forward

MODEL_FN Attn attn_of(const Model *m, int B, int T, int decoding) {
    const Config *c = &m->c;
    Attn a = {B, T, c->n_heads, c->n_kv_heads, c->head_dim,
        m->shape.cache_len ? m->shape.cache_len : T, decoding ? m->start : NULL,
        decoding ? m->len : NULL, c->qk_norm, c->norm_eps};
    return a;
}

MODEL_FN Router router_of(const Model *m, int N, int micro_batches) {
    const Config *c = &m->c;
    const int all = m->shape.par ? m->shape.B_all * m->shape.T : N;
    const double share = 1.0 / ((double)moe_layers(c) * micro_batches);
    // a hair off, so that 1.1 * 10 is 11
    const double limit = ceil(m->capacity * all * c->top_k / c->n_experts * (1 - 1e-12));
    Router r = {c->router, N, c->d_model, c->n_experts, c->top_k, c->norm_topk, m->aux_coef * share,
        m->z_coef * share, m->capacity < 0 || limit > all ? all : (int)limit, m->shape.tile, all};
    return r;
}

MODEL_FN Plan identity_plan(const Model *m, int N) {
    Plan p = {N, 1, N, 1, m->dense_offsets, NULL, NULL, NULL, NULL, NULL};
    return p;
}

// branch = experts(ln2); counting (training): add loads and balance losses to the step's totals, and
// drop or round slots as the run wants; otherwise routing is dropless top-K
MODEL_FN void mlp_forward(Model *m, int l, int N, int counting) {
    const Backend *b = m->b;
    Layer *y = &m->layer[l];
    Plan dense = identity_plan(m, N);
    if (is_moe_layer(&m->c, l)) {
        const Router r = router_of(m, N, 1);
        const int alone = counting && !m->shape.par; // else balance_of_ranks counts
        b->router_forward(y->logits, y->router_lse, y->topk, y->topk_weight, y->count,
            alone ? y->loss_sum : NULL, alone ? y->count_sum : NULL, y->sums, y->ln2, y->Wr,
            y->bias, r, m->reuse_routing, m->state, l, m->scratch);
        y->plan.rows = N;
        if (counting && selects(r) && m->shape.par)
            select_over_ranks(m, l, N, r);
        else if (counting && selects(r))
            b->plan_select(&y->plan, y->moved, y->topk, y->topk_weight, y->count, y->logits,
                y->router_lse, r, m->reuse_routing, m->scratch);
        else
            b->plan_topk(&y->plan, y->topk, y->topk_weight, y->count, N, m->c.top_k, m->c.n_experts,
                m->scratch);
    }
    const Plan *p = is_moe_layer(&m->c, l) ? &y->plan : &dense;
    act_t *A = b->keeps_A ? m->sA : NULL;
    if (m->exchange && p == &y->plan) {
        ep_forward(m->exchange, l, m->branch, y->ln2, y->mlp.W1, y->mlp.W2, p, A, m->scratch);
    } else {
        b->expert_up_forward(y->mlp.H, A, y->ln2, y->mlp.W1, p, m->scratch);
        b->expert_down_forward(m->branch, y->mlp.H, A, y->mlp.W2, p, 0, m->scratch);
    }
    if (y->shared.H) {
        b->expert_up_forward(y->shared.H, A, y->ln2, y->shared.W1, &dense, m->scratch);
        b->expert_down_forward(m->branch, y->shared.H, A, y->shared.W2, &dense, 1, m->scratch);
    }
}

/* Runs the B*T tokens in m->tokens through all layers; the final norm's output is left in m->lnf
   (N,C). decoding: positions and lengths of the sequences are in m->start and m->len. */
MODEL_FN void model_forward(Model *m, int B, int T, int decoding, int counting) {
    const Backend *b = m->b;
    const int N = B * T, C = m->c.d_model;
    const double eps = m->c.norm_eps;
    const Attn a = attn_of(m, B, T, decoding);
    if (m->shape.par &&
        B != share_of_batch(&m->shape.par->world, m->shape.B_all, m->shape.par->world.rank, NULL))
        die(RUN_ERROR, "internal: %d x %d rows are not this rank's share", B, T);
    if (m->exchange) ep_begin(m->exchange, m->shape.B_all, T);
    if (m->dense_offsets && N != m->layer[0].plan.rows) {
        int identity[2] = {0, N};
        b->to_device(m->dense_offsets, identity, sizeof identity);
        m->layer[0].plan.rows = N;
    }
    for (int l = 0; l < m->c.n_layers; l++) {
        Layer *y = &m->layer[l];
        if (l == 0) {
            b->embedding_forward(y->x, m->tokens, m->wte, N);
            b->rmsnorm_forward(y->ln1, y->rstd1, y->x, y->norm1, N, C, eps);
        } else {
            b->residual_rmsnorm_forward(
                y->x, y->ln1, y->rstd1, m->layer[l - 1].x2, m->branch, y->norm1, N, C, eps);
        }
        b->linear_forward(y->qkv, y->ln1, y->Wqkv, N, m->scratch);
        b->qk_rope_forward(
            m->q, y->k_cache, y->v_cache, y->rstd_qk, y->qkv, y->q_norm, y->k_norm, m->rope, a);
        b->attention_forward(y->att, y->lse, m->q, y->k_cache, y->v_cache, a, m->scratch);
        b->linear_forward(m->branch, y->att, y->Wo, N, m->scratch);
        b->residual_rmsnorm_forward(y->x2, y->ln2, y->rstd2, y->x, m->branch, y->norm2, N, C, eps);
        mlp_forward(m, l, N, counting);
    }
    b->residual_rmsnorm_forward(m->xf, m->lnf, m->rstdf, m->layer[m->c.n_layers - 1].x2, m->branch,
        m->final_norm, N, C, eps);
    if (counting && m->shape.par && moe_layers(&m->c)) balance_of_ranks(m, router_of(m, N, 1));
}

// -------------------------------------------------------------------------------------------------
// backward

// dln = gradient of ln2 from the gradient dx of the block's output
MODEL_FN void mlp_backward(Model *m, int l, int N, int micro_batches) {
    const Backend *b = m->b;
    Layer *y = &m->layer[l];
    const int moe = is_moe_layer(&m->c, l);
    Plan dense = identity_plan(m, N);
    const Plan *p = moe ? &y->plan : &dense;
    const int away = m->exchange && moe, again = m->shape.recompute >= 2;
    if (again) {
        if (!away) b->expert_up_forward(y->mlp.H, NULL, y->ln2, y->mlp.W1, p, m->scratch);
        if (y->shared.H)
            b->expert_up_forward(y->shared.H, NULL, y->ln2, y->shared.W1, &dense, m->scratch);
    }
    // dH takes the place of H: from here on H is not needed
    if (away) {
        ep_backward(m->exchange, l, m->dln, m->dS, y->mlp.dW1, y->mlp.dW2, m->dx, y->mlp.W1,
            y->mlp.W2, m->sA, again, m->fresh, m->scratch);
    } else {
        b->expert_down_backward(y->mlp.H, m->sA, moe ? m->dS : NULL, y->mlp.dW2, m->dx, y->mlp.H,
            y->mlp.W2, p, m->fresh, m->scratch);
        b->expert_up_backward(
            m->dln, y->mlp.dW1, y->mlp.H, y->ln2, y->mlp.W1, p, 0, m->fresh, m->scratch);
    }
    if (moe)
        b->router_backward(m->dln, y->dWr, m->dS, &y->plan, y->logits, y->router_lse, y->topk,
            y->topk_weight, y->count, y->ln2, y->Wr, router_of(m, N, micro_batches), m->scratch);
    if (y->shared.H) {
        b->expert_down_backward(y->shared.H, m->sA, NULL, y->shared.dW2, m->dx, y->shared.H,
            y->shared.W2, &dense, m->fresh, m->scratch);
        b->expert_up_backward(m->dln, y->shared.dW1, y->shared.H, y->ln2, y->shared.W1, &dense, 1,
            m->fresh, m->scratch);
    }
}

/* After model_forward on the same tokens: adds the gradients of
     loss_scale * sum of cross entropy over valid targets + (aux_coef * aux + z_coef * z) / (MoE
   layers * micro_batches) to the gradient arena, where the first micro-batch of a step writes those
   of MLPs, and the first term to state->loss. Several ranks: those of this rank's rows; after the last
   micro-batch, sums over ranks are on their way as soon as a layer is done. */
MODEL_FN void model_backward(Model *m, int B, int T, double loss_scale, int micro_batches) {
    const Backend *b = m->b;
    const int N = B * T, C = m->c.d_model, complete = m->shape.par && !m->more_follow;
    const Attn a = attn_of(m, B, T, 0);
    b->classifier(
        m->losses, m->dln, m->dhead, m->lnf, m->head, m->targets, N, loss_scale, m->scratch);
    b->reduce_loss(m->state, m->losses, N, loss_scale);
    b->zero(m->dx, (size_t)N * C * b->act_size);
    b->rmsnorm_backward(
        m->dx, m->dfinal_norm, m->dln, m->xf, m->rstdf, m->final_norm, N, C, m->scratch);
    for (int l = m->c.n_layers - 1; l >= 0; l--) {
        Layer *y = &m->layer[l];
        if (m->shape.recompute >= 1)
            b->rmsnorm_forward(y->ln2, y->rstd2, y->x2, y->norm2, N, C, m->c.norm_eps);
        mlp_backward(m, l, N, micro_batches);
        b->rmsnorm_backward(m->dx, y->dnorm2, m->dln, y->x2, y->rstd2, y->norm2, N, C, m->scratch);
        b->linear_backward(m->datt, y->dWo, m->dx, y->att, y->Wo, N, 0, m->scratch);
        b->qk_rope_forward(m->q, m->k, m->v, y->rstd_qk, y->qkv, y->q_norm, y->k_norm, m->rope, a);
        b->attention_backward(
            m->dq, m->dk, m->dv, m->datt, y->att, y->lse, m->q, m->k, m->v, a, m->scratch);
        b->qk_rope_backward(m->dqkv, y->dq_norm, y->dk_norm, m->dq, m->dk, m->dv, y->qkv,
            y->rstd_qk, y->q_norm, y->k_norm, m->rope, a, m->scratch);
        if (m->shape.recompute >= 1)
            b->rmsnorm_forward(y->ln1, y->rstd1, y->x, y->norm1, N, C, m->c.norm_eps);
        b->linear_backward(m->dln, y->dWqkv, m->dqkv, y->ln1, y->Wqkv, N, 0, m->scratch);
        b->rmsnorm_backward(m->dx, y->dnorm1, m->dln, y->x, y->rstd1, y->norm1, N, C, m->scratch);
        if (complete) buckets_start(&m->buckets, m->shape.par, b, m->base[A_GRADS], l);
    }
    b->embedding_backward(m->dwte, m->dx, m->tokens, N, m->c.vocab_size, C, m->scratch);
    if (complete) buckets_start(&m->buckets, m->shape.par, b, m->base[A_GRADS], -1);
    m->fresh = 0;
}

// -------------------------------------------------------------------------------------------------
// where a value that is not finite came from

MODEL_FN int any_not_finite(const Backend *b, DType type, const void *p, size_t n) {
    double v[STAGED];
    const size_t size = dtype_size(type);
    for (size_t at = 0; at < n; at += STAGED) {
        const size_t k = n - at < STAGED ? n - at : STAGED;
        host_from(b, type, v, (const char *)p + at * size, k);
        for (size_t i = 0; i < k; i++)
            if (!isfinite(v[i])) return 1;
    }
    return 0;
}

/* After a forward pass over N rows whose loss was not finite: names the first tensor, in the order
   of the model, that holds such a value: a weight, else what a layer of a training model saved
   (but for H, whose place the backward pass takes for dH).
   Slow, for a last message. Returns 0 when everything it can see is finite. */
MODEL_FN int model_first_bad(const Model *m, int N, char *what, size_t size) {
    const Backend *b = m->b;
    const Config *c = &m->c;
    for (int i = 0; i < m->table.count; i++) {
        const Tensor *t = &m->table.tensor[i];
        char name[128];
        const void *p = m->base[t->row->trained ? A_PARAMS : A_BUFFERS] +
            t->offset * (t->row->trained ? b->param_size : b->stat_size);
        if (!any_not_finite(b, t->row->trained ? b->param_type : b->stat_type, p, t->count))
            continue;
        tensor_name(name, sizeof name, t, 0);
        snprintf(what, size, "%s holds a value that is not finite", name);
        return 1;
    }
    if (!m->shape.train) return 0;
    for (int l = 0; l < c->n_layers; l++) {
        const Layer *y = &m->layer[l];
        const size_t C = c->d_model, Q = dim_of(c, DIM_Q), n = N;
        const struct {
            const char *name;
            const void *p;
            size_t count;
        } saved[] = {{"input", y->x, n * C}, {"q, k, v", y->qkv, n * qkv_rows(c)},
            {"attention output", y->att, n * Q}, {"residual stream", y->x2, n * C}};
        for (size_t i = 0; i < sizeof saved / sizeof *saved; i++)
            if (saved[i].p && any_not_finite(b, b->act_type, saved[i].p, saved[i].count)) {
                snprintf(
                    what, size, "the first such value is in the %s of layer %d", saved[i].name, l);
                return 1;
            }
    }
    if (!any_not_finite(b, b->act_type, m->xf, (size_t)N * c->d_model)) return 0;
    snprintf(what, size, "the first such value is in the output of the last layer");
    return 1;
}

// -------------------------------------------------------------------------------------------------
// a training step, evaluation, generation

MODEL_FN void model_set_tokens(Model *m, const int *tokens, const int *targets, int N) {
    m->b->to_device(m->tokens, tokens, N * sizeof(int));
    if (targets) m->b->to_device(m->targets, targets, N * sizeof(int));
}

/* Zeros in the gradients that are only added to. Those of MLPs, nearly all of a model of many experts,
   are not passed over: the first micro-batch writes them. */
MODEL_FN void zero_gradients(Model *m) {
    const Backend *b = m->b;
    size_t from = 0, size = b->grad_size;
    for (int i = 0; i <= m->table.count && m->base[A_GRADS]; i++) {
        const Tensor *t = i < m->table.count ? &m->table.tensor[i] : NULL;
        if (t && (!t->row->trained || t->row->kind < T_GATE_UP || t->row->kind > T_SHARED_DOWN))
            continue;
        const size_t to = t ? t->offset : m->table.elements;
        if (to > from) b->zero(m->base[A_GRADS] + from * size, (to - from) * size);
        if (t) from = t->offset + t->count;
    }
    m->fresh = 1;
}

// Starts step number `step` (from 1): gradients, totals and the step's scalars.
MODEL_FN void model_begin_step(Model *m, int64_t step, double lr, const OptimConfig *o) {
    StepState s;
    memset(&s, 0, sizeof s);
    s.lr = lr;
    s.beta1_correction = 1 - exp_d((double)step * log_d(o->beta1));
    s.beta2_correction = 1 - exp_d((double)step * log_d(o->beta2));
    m->b->to_device(m->state, &s, sizeof s);
    zero_gradients(m);
    if (m->step_stats) m->b->zero(m->step_stats, m->step_stats_bytes);
}

// Clips and updates. When something in the step was not finite, no weight is touched: look at
// m->state.
MODEL_FN void model_update(Model *m, const OptimConfig *o) {
    const Backend *b = m->b;
    const Parallel *par = m->shape.par;
    const int zero = par && par->zero, n = zero ? m->n_own : m->n_segments;
    if (par) { // every rank counts its share of the norm: each parameter once
        double *sums = (double *)((char *)m->state + offsetof(StepState, loss));
        buckets_finish(&m->buckets);
        b->grad_norm(m->state, m->base[A_GRADS], m->own, m->n_own, o->max_norm, m->scratch);
        comm_all_reduce(par->on_world, sums, 2, COMM_F64, COMM_SUM); // loss, square
        b->clip_norm(m->state, o->max_norm);
    } else {
        b->grad_norm(
            m->state, m->base[A_GRADS], m->segments, m->n_segments, o->max_norm, m->scratch);
    }
    b->update(m->base[A_PARAMS], m->base[A_GRADS], moment(m, 0), moment(m, 1),
        zero ? m->own : m->segments, n, m->state, *o);
    if (zero) buckets_gather(&m->buckets, par, b, m->base[A_PARAMS]);
    for (int l = 0; l < m->c.n_layers; l++)
        if (m->layer[l].bias)
            m->b->update_bias(
                m->layer[l].bias, m->layer[l].count_sum, m->c.n_experts, m->bias_rate, m->state);
    model_params_changed(m);
}

MODEL_FN StepState model_state(const Model *m) {
    const Parallel *par = m->shape.par;
    StepState s;
    if (par) comm_sync(par->on_ep), comm_sync(par->on_replicas), comm_sync(par->on_world);
    m->b->to_host(&s, m->state, sizeof s);
    return s;
}

// Sum of the cross entropy over the valid targets of B*T tokens (forward only; leaves the step's
// totals alone). Several ranks: of the tokens of all, and bad everywhere where it was bad anywhere.
MODEL_FN StepState model_loss(Model *m, const int *tokens, const int *targets, int B, int T) {
    StepState s;
    memset(&s, 0, sizeof s);
    m->b->to_device(m->state, &s, sizeof s);
    model_set_tokens(m, tokens, targets, B * T);
    model_forward(m, B, T, 0, 0);
    m->b->classifier(m->losses, NULL, NULL, m->lnf, m->head, m->targets, B * T, 1, m->scratch);
    m->b->reduce_loss(m->state, m->losses, B * T, 1);
    s = model_state(m);
    if (m->shape.par) {
        double sums[2] = {s.loss, s.bad != BAD_NONE};
        comm_all_reduce((Comm *)(uintptr_t)&m->shape.par->world, sums, 2, COMM_F64, COMM_SUM);
        s.loss = sums[0];
        if (sums[1] > 0 && !s.bad) s.bad = BAD_ELSEWHERE;
    }
    return s;
}

/* Feeds sequence b its next len[b] <= T tokens (row b of tokens, (B,T)) at positions start[b] ...,
   and leaves the logits of the token after the last one in m->logits (B,V), on the device. len[b]
   >= 1. */
MODEL_FN void model_next(
    Model *m, const int *tokens, const int *start, const int *len, int B, int T) {
    StepState s;
    memset(&s, 0, sizeof s);
    m->b->to_device(m->state, &s, sizeof s);
    model_set_tokens(m, tokens, NULL, B * T);
    m->b->to_device(m->start, start, B * sizeof(int));
    m->b->to_device(m->len, len, B * sizeof(int));
    model_forward(m, B, T, 1, 0);
    for (int b = 0; b < B; b++) {
        const size_t row = (size_t)b * T + len[b] - 1;
        m->b->linear_forward((char *)m->logits + (size_t)b * m->c.vocab_size * m->b->act_size,
            (char *)m->lnf + row * m->c.d_model * m->b->act_size, m->head, 1, m->scratch);
    }
}

// Fetches the logits (V) that model_next left for sequence `sequence`, whatever type they have.
MODEL_FN void model_logits(const Model *m, int sequence, float *out) {
    const size_t V = m->c.vocab_size, size = m->b->act_size;
    double v[STAGED];
    for (size_t at = 0; at < V; at += STAGED) {
        const size_t k = V - at < STAGED ? V - at : STAGED;
        host_from(m->b, m->b->act_type, v, (const char *)m->logits + (sequence * V + at) * size, k);
        for (size_t i = 0; i < k; i++) out[at + i] = (float)v[i];
    }
}

#endif
