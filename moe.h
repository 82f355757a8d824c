/* moe.h: the contract of the trainer. Start reading here.

   It holds what every room agrees on, and no arithmetic:
     Config      the shape of a model: one parametrised decoder that covers OLMoE, Mixtral and
                 Qwen3-MoE
     TensorRow   the tensor table: a parameter is a row; allocation, initialisation, the optimiser,
                 checkpoints and tests walk it, nobody addresses a tensor by a magic index
     Mat         a matrix (or a stack of them, one an expert) as an operation sees it
     Plan        which rows go to which expert: all that the expert operations know of routing
     StepState   the few scalars of a training step that live in device memory
     Backend     the layer operations, one function each, the same names and shapes on every device

   moe_cpu.c implements Backend in plain C (the reference); model.h is the model, written once
   against it. The same moe_cpu.c, compiled with real = double, is what the tests measure against.

   Shapes: B sequences of T tokens, N = B*T rows, C = d_model, V = vocabulary, E experts, K of them
   chosen a token, I = expert width, S = slots (token, expert pairs; N*K for dropless top-K).
   Matrices are row-major and weights are (out, in), as Hugging Face stores them: memory layout =
   file layout. Signatures read outputs, inputs, sizes. Gradients of weights and `accumulate`
   outputs are added to, all else is overwritten. act_t, param_t, grad_t and stat_t are opaque
   here: a backend knows what they are. This file compiles as C11 and as C++17. */
#ifndef MOE_H
#define MOE_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void act_t;   // activations: real on the CPU, float or bf16 on a GPU
typedef void param_t; // weights: likewise
typedef void grad_t;  // weight gradients and optimiser moments: float whatever the data type
typedef void stat_t;  // rstd, log-sum-exp, router values, losses: float (double in the reference)

typedef enum { F32, F64, BF16, F16 } DType;
static inline size_t dtype_size(DType t) { return t == F64 ? 8 : t == F32 ? 4 : 2; }

// bfloat16 is the upper half of a float: rounded to nearest, ties to even; NaN stays NaN.
static inline uint16_t bf16_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    if (x != x) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
static inline float float_of_bf16(uint16_t h) {
    const uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

enum { MAX_LAYERS = 1024, ARENA_ALIGN = 256 }; // every tensor starts on ARENA_ALIGN bytes

// -------------------------------------------------------------------------------------------------
// errors

enum { USER_ERROR = 2, RUN_ERROR = 1 }; // exit status: bad input or flag | a run that failed

static int line_open __attribute__((unused)); // a line on stdout that has no end yet
static int this_rank __attribute__((unused)); // of several that run together; 0: this one speaks

// One line on stderr, whatever the words in it hold: control characters become '?'.
static inline void say_line(const char *what, const char *fmt, va_list ap) {
    char text[8192];
    const int n = snprintf(text, sizeof text, "train_moe: %s: ", what);
    vsnprintf(text + n, sizeof text - n, fmt, ap);
    for (char *s = text; *s; s++)
        if ((unsigned char)*s < 32 || *s == 127) *s = '?';
    if (line_open) putchar('\n');
    line_open = 0;
    fflush(stdout);
    fprintf(stderr, "%s\n", text);
}

// Says why in one line and ends the program.
#if defined(__GNUC__)
__attribute__((noreturn, format(printf, 2, 3), unused, cold))
#endif
static void
die(int code, const char *fmt, ...) {
    va_list ap;
    // what all ranks find, the first one says, and takes the others with it
    const struct timespec second = {1, 0};
    if (this_rank) nanosleep(&second, NULL);
    va_start(ap, fmt);
    say_line("error", fmt, ap);
    va_end(ap);
    exit(code);
}

// Says in one line what may not be meant, and goes on.
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2), unused, cold))
#endif
static void
warn(const char *fmt, ...) {
    va_list ap;
    if (this_rank) return;
    va_start(ap, fmt);
    say_line("warning", fmt, ap);
    va_end(ap);
}

static inline uint64_t text_hash(const char *s) { // FNV-1a
    uint64_t h = 0xCBF29CE484222325u;
    for (; *s; s++) h = (h ^ (unsigned char)*s) * 0x100000001B3u;
    return h;
}

// seconds on a clock that only goes forward
static inline double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* What went wrong, for functions whose caller may have another way: they return fail(...) = -1. A
   macro, so that a compiler and its analyser see the -1. */
#define fail(...) (fail_text(__VA_ARGS__), failed())
static inline int failed(void) { return -1; }
typedef struct Err {
    char text[1024];
} Err;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3), unused, cold))
#endif
static void
fail_text(Err *err, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err->text, sizeof err->text, fmt, ap);
    va_end(ap);
}

// -------------------------------------------------------------------------------------------------
// the shape of a model

typedef enum {
    QK_NORM_NONE,
    QK_NORM_FULL,
    QK_NORM_HEAD
} QkNorm; // none | all heads (OLMoE) | per head (Qwen3)
typedef enum { ROUTER_SOFTMAX, ROUTER_SIGMOID } RouterKind;

typedef struct Config {
    int vocab_size;   // V
    int seq_len;      // T: longest sequence, max_position_embeddings in Hugging Face's words
    int n_layers;     // L
    int d_model;      // C
    int n_heads;      // query heads
    int n_kv_heads;   // key and value heads: n_heads is a multiple of it
    int head_dim;     // hd, even; need not be d_model / n_heads
    int n_experts;    // E; 1 = the plain dense model, no router
    int top_k;        // K
    int d_expert;     // I, the width of one expert (of the only MLP when E = 1)
    int d_shared;     // width of the shared expert, 0 = none
    int dense_layers; // the first so many layers have a dense MLP of width d_dense
    int d_dense;      // K * I unless told otherwise
    int qk_norm;      // QkNorm
    int router;       // RouterKind
    int norm_topk;    // renormalise the K weights to sum 1
    int tied;         // output head = embedding
    double rope_theta, norm_eps;
} Config;

// true where layer l routes its tokens: everything else is a dense MLP
static inline int is_moe_layer(const Config *c, int l) {
    return c->n_experts > 1 && l >= c->dense_layers;
}
static inline int mlp_width(const Config *c, int l) {
    return c->n_experts == 1 || is_moe_layer(c, l) ? c->d_expert : c->d_dense;
}
static inline int mlp_experts(const Config *c, int l) {
    return is_moe_layer(c, l) ? c->n_experts : 1;
}
static inline int mlp_topk(const Config *c, int l) { return is_moe_layer(c, l) ? c->top_k : 1; }
static inline int moe_layers(const Config *c) {
    return c->n_experts > 1 && c->dense_layers < c->n_layers ? c->n_layers - c->dense_layers : 0;
}
static inline int qkv_rows(const Config *c) {
    return (c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
}

// -------------------------------------------------------------------------------------------------
// the tensor table

typedef enum {
    T_EMBED,
    T_ATTN_NORM,
    T_QKV,
    T_Q_NORM,
    T_K_NORM,
    T_ATTN_OUT,
    T_MLP_NORM,
    T_ROUTER,
    T_ROUTER_BIAS,
    T_GATE_UP,
    T_DOWN,
    T_SHARED_GATE_UP,
    T_SHARED_DOWN,
    T_FINAL_NORM,
    T_HEAD,
    T_KINDS
} TensorKind;

typedef enum { // a dimension named, resolved against a Config by dim_of()
    DIM_NONE,
    DIM_ONE,
    DIM_V,
    DIM_C,
    DIM_Q,
    DIM_KV,
    DIM_QNORM,
    DIM_KNORM,
    DIM_E,
    DIM_I,
    DIM_DENSE,
    DIM_SHARED
} Dim;
typedef enum {
    IN_MODEL,
    IN_LAYERS,
    IN_DENSE_LAYERS,
    IN_MOE_LAYERS,
    IN_EXPERTS
} Where; // how often a row occurs
typedef enum {
    INIT_ONES,
    INIT_ZEROS,
    INIT_NORMAL,
    INIT_RESIDUAL
} Init; // RESIDUAL: std / sqrt(2 L)
typedef enum {
    SHARD_NONE,
    SHARD_EXPERT
} Shard; // replicated on every rank | split over expert-parallel ranks

/* One parameter. It may be stored as several tensors in a file (q, k and v; gate and up): its
   parts, stacked by rows, each contiguous. %d stands for the layer, a second %d for the expert. */
typedef struct TensorRow {
    TensorKind kind;
    Where where;
    int parts;
    const char *name[3];
    Dim rows[3], cols; // cols DIM_NONE: the tensor is a vector of `rows` values
    int decay;         // weight decay acts on it
    int trained;       // 0: a buffer, kept in its own arena as stat_t: saved, not differentiated
    Init init;
    double std;
    Shard shard;
} TensorRow;

#define LAYER "model.layers.%d."
static const TensorRow tensor_rows[] = {
    {T_EMBED, IN_MODEL, 1, {"model.embed_tokens.weight", 0, 0}, {DIM_V, DIM_NONE, DIM_NONE}, DIM_C,
        1, 1, INIT_NORMAL, 0.02, SHARD_NONE},
    {T_ATTN_NORM, IN_LAYERS, 1, {LAYER "input_layernorm.weight", 0, 0}, {DIM_C, DIM_NONE, DIM_NONE},
        DIM_NONE, 0, 1, INIT_ONES, 0, SHARD_NONE},
    {T_QKV, IN_LAYERS, 3,
        {LAYER "self_attn.q_proj.weight", LAYER "self_attn.k_proj.weight",
            LAYER "self_attn.v_proj.weight"},
        {DIM_Q, DIM_KV, DIM_KV}, DIM_C, 1, 1, INIT_NORMAL, 0.02, SHARD_NONE},
    {T_Q_NORM, IN_LAYERS, 1, {LAYER "self_attn.q_norm.weight", 0, 0},
        {DIM_QNORM, DIM_NONE, DIM_NONE}, DIM_NONE, 0, 1, INIT_ONES, 0, SHARD_NONE},
    {T_K_NORM, IN_LAYERS, 1, {LAYER "self_attn.k_norm.weight", 0, 0},
        {DIM_KNORM, DIM_NONE, DIM_NONE}, DIM_NONE, 0, 1, INIT_ONES, 0, SHARD_NONE},
    {T_ATTN_OUT, IN_LAYERS, 1, {LAYER "self_attn.o_proj.weight", 0, 0}, {DIM_C, DIM_NONE, DIM_NONE},
        DIM_Q, 1, 1, INIT_RESIDUAL, 0.02, SHARD_NONE},
    {T_MLP_NORM, IN_LAYERS, 1, {LAYER "post_attention_layernorm.weight", 0, 0},
        {DIM_C, DIM_NONE, DIM_NONE}, DIM_NONE, 0, 1, INIT_ONES, 0, SHARD_NONE},
    {T_ROUTER, IN_MOE_LAYERS, 1, {LAYER "mlp.gate.weight", 0, 0}, {DIM_E, DIM_NONE, DIM_NONE},
        DIM_C, 1, 1, INIT_NORMAL, 0.02, SHARD_NONE},
    {T_ROUTER_BIAS, IN_MOE_LAYERS, 1, {LAYER "mlp.gate.e_score_correction_bias", 0, 0},
        {DIM_E, DIM_NONE, DIM_NONE}, DIM_NONE, 0, 0, INIT_ZEROS, 0, SHARD_NONE},
    {T_GATE_UP, IN_EXPERTS, 2,
        {LAYER "mlp.experts.%d.gate_proj.weight", LAYER "mlp.experts.%d.up_proj.weight", 0},
        {DIM_I, DIM_I, DIM_NONE}, DIM_C, 1, 1, INIT_NORMAL, 0.02, SHARD_EXPERT},
    {T_DOWN, IN_EXPERTS, 1, {LAYER "mlp.experts.%d.down_proj.weight", 0, 0},
        {DIM_C, DIM_NONE, DIM_NONE}, DIM_I, 1, 1, INIT_RESIDUAL, 0.02, SHARD_EXPERT},
    {T_GATE_UP, IN_DENSE_LAYERS, 2, {LAYER "mlp.gate_proj.weight", LAYER "mlp.up_proj.weight", 0},
        {DIM_DENSE, DIM_DENSE, DIM_NONE}, DIM_C, 1, 1, INIT_NORMAL, 0.02, SHARD_NONE},
    {T_DOWN, IN_DENSE_LAYERS, 1, {LAYER "mlp.down_proj.weight", 0, 0}, {DIM_C, DIM_NONE, DIM_NONE},
        DIM_DENSE, 1, 1, INIT_RESIDUAL, 0.02, SHARD_NONE},
    {T_SHARED_GATE_UP, IN_MOE_LAYERS, 2,
        {LAYER "mlp.shared_expert.gate_proj.weight", LAYER "mlp.shared_expert.up_proj.weight", 0},
        {DIM_SHARED, DIM_SHARED, DIM_NONE}, DIM_C, 1, 1, INIT_NORMAL, 0.02, SHARD_NONE},
    {T_SHARED_DOWN, IN_MOE_LAYERS, 1, {LAYER "mlp.shared_expert.down_proj.weight", 0, 0},
        {DIM_C, DIM_NONE, DIM_NONE}, DIM_SHARED, 1, 1, INIT_RESIDUAL, 0.02, SHARD_NONE},
    {T_FINAL_NORM, IN_MODEL, 1, {"model.norm.weight", 0, 0}, {DIM_C, DIM_NONE, DIM_NONE}, DIM_NONE,
        0, 1, INIT_ONES, 0, SHARD_NONE},
    {T_HEAD, IN_MODEL, 1, {"lm_head.weight", 0, 0}, {DIM_V, DIM_NONE, DIM_NONE}, DIM_C, 1, 1,
        INIT_NORMAL, 0.02, SHARD_NONE},
};
#undef LAYER
enum { TENSOR_ROWS = sizeof(tensor_rows) / sizeof(tensor_rows[0]) };

static inline size_t dim_of(const Config *c, Dim d) {
    switch (d) {
    case DIM_NONE: return 0;
    case DIM_ONE: return 1;
    case DIM_V: return (size_t)c->vocab_size;
    case DIM_C: return (size_t)c->d_model;
    case DIM_Q: return (size_t)c->n_heads * c->head_dim;
    case DIM_KV: return (size_t)c->n_kv_heads * c->head_dim;
    case DIM_QNORM: return (size_t)(c->qk_norm == QK_NORM_FULL ? c->n_heads : 1) * c->head_dim;
    case DIM_KNORM: return (size_t)(c->qk_norm == QK_NORM_FULL ? c->n_kv_heads : 1) * c->head_dim;
    case DIM_E: return (size_t)c->n_experts;
    case DIM_I: return (size_t)c->d_expert;
    case DIM_DENSE: return (size_t)(c->n_experts == 1 ? c->d_expert : c->d_dense);
    case DIM_SHARED: return (size_t)c->d_shared;
    }
    return 0;
}

// whether a model of this shape has the row at all
static inline int row_exists(const Config *c, const TensorRow *r) {
    if (r->kind == T_HEAD) return !c->tied;
    if (r->kind == T_Q_NORM || r->kind == T_K_NORM) return c->qk_norm != QK_NORM_NONE;
    if (r->kind == T_ROUTER_BIAS) return c->router == ROUTER_SIGMOID;
    if (r->kind == T_SHARED_GATE_UP || r->kind == T_SHARED_DOWN) return c->d_shared > 0;
    return 1;
}

/* One instance of a row: layer and expert are -1 where the row has none. `offset` counts elements
   from the start of the arena of parameters; gradients and moments have the same offsets (buffers:
   of the arena of buffers). */
typedef struct Tensor {
    const TensorRow *row;
    int layer, expert;
    size_t rows, cols; // all parts together; cols = 1 for a vector
    size_t offset, count;
} Tensor;

typedef struct TensorTable {
    Tensor *tensor;
    int count;
    size_t elements, buffer_elements; // sizes of the two arenas, gaps for alignment included
    int experts;                      // of a MoE layer that are here
    int (*first)[T_KINDS];            // first[l + 1][kind]: index into tensor (of its first
                                      // expert here), -1 = none
} TensorTable;

/* Lays out every tensor of a model: walks the table layer by layer, all gate_up of a layer before
   all down, so that the experts of a layer lie at one constant stride. elem_size: bytes of a
   parameter on the device. some (L,E): of each layer the first n experts in it, and no others, are
   laid out, in this order; NULL: all. Returns 0, or -1 when memory for the table itself runs out. */
static inline int tensor_table_build_some(
    TensorTable *t, const Config *c, size_t elem_size, const int *some, int n) {
    const size_t step = ARENA_ALIGN / elem_size;
    size_t room = 0, at[2] = {0, 0};
    memset(t, 0, sizeof *t);
    t->experts = some ? n : c->n_experts;
    room = (size_t)(c->n_layers + 1) * (TENSOR_ROWS + 2 * (size_t)t->experts);
    t->tensor = (Tensor *)calloc(room, sizeof(Tensor));
    t->first = (int(*)[T_KINDS])malloc((size_t)(c->n_layers + 1) * sizeof *t->first);
    if (!t->tensor || !t->first) return -1;
    for (int l = -1; l < c->n_layers; l++) {
        for (int k = 0; k < T_KINDS; k++) t->first[l + 1][k] = -1;
        for (int i = 0; i < TENSOR_ROWS; i++) {
            const TensorRow *r = &tensor_rows[i];
            int moe = l >= 0 && is_moe_layer(c, l);
            int here = r->where == IN_MODEL
                ? l < 0
                : l >= 0 && (r->where == IN_LAYERS || (r->where == IN_DENSE_LAYERS ? !moe : moe));
            if (!here || !row_exists(c, r)) continue;
            int experts = r->where == IN_EXPERTS ? t->experts : 1;
            t->first[l + 1][r->kind] = t->count;
            for (int e = 0; e < experts; e++) {
                Tensor *x = &t->tensor[t->count++];
                size_t *end = &at[!r->trained];
                x->row = r;
                x->layer = l;
                x->expert = r->where != IN_EXPERTS ? -1 : some ? some[l * c->n_experts + e] : e;
                for (int p = 0; p < r->parts; p++) x->rows += dim_of(c, r->rows[p]);
                x->cols = r->cols == DIM_NONE ? 1 : dim_of(c, r->cols);
                x->count = x->rows * x->cols;
                x->offset = *end;
                *end += (x->count + step - 1) / step * step;
            }
        }
    }
    t->elements = at[0];
    t->buffer_elements = at[1];
    return 0;
}

static inline int tensor_table_build(TensorTable *t, const Config *c, size_t elem_size) {
    return tensor_table_build_some(t, c, elem_size, NULL, 0);
}

static inline void tensor_table_free(TensorTable *t) {
    free(t->tensor);
    free(t->first);
    memset(t, 0, sizeof *t);
}

static inline const Tensor *tensor_of(
    const TensorTable *t, TensorKind kind, int layer) { // layer -1: the model's
    int i = t->first[layer + 1][kind];
    return i < 0 ? NULL : &t->tensor[i];
}

/* How tensors are spread over ranks. The file is the same whatever the ranks: rank 0 writes it, and
   the others send what they have; each rank reads its own elements. arena: 0 parameters and
   buffers, 1 moments. */
typedef struct Spread {
    void *ctx;
    const TensorTable *whole; // the tensors of all ranks
    int writes;               // this rank writes
    // elements *first .. *first + *count - 1 of x are here (none: *count = 0), from the element
    // of the arena that is returned
    size_t (*here)(void *ctx, const Tensor *x, int arena, size_t *first, size_t *count);
    // all ranks together: rank 0 gets elements from .. from + n - 1 of x, of `size` bytes. base: of
    // the arena
    void (*gather)(void *ctx, const Tensor *x, int arena, size_t from, size_t n, const void *base,
        size_t size, void *out);
} Spread;

// writes the file name of part p of tensor x
static inline void tensor_name(char *out, size_t size, const Tensor *x, int p) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    if (x->expert >= 0)
        snprintf(out, size, x->row->name[p], x->layer, x->expert);
    else if (x->layer >= 0)
        snprintf(out, size, x->row->name[p], x->layer);
    else
        snprintf(out, size, "%s", x->row->name[p]);
#pragma GCC diagnostic pop
}

/* Parameters of a model. total: all; active: matrix parameters that one token uses, without the
   embedding look-up (the head counts, tied or not): 6 * active FLOPs a token, forward and backward,
   attention left out. */
static inline void count_parameters(
    const TensorTable *t, const Config *c, double *total, double *active) {
    *total = *active = 0;
    for (int i = 0; i < t->count; i++) {
        const Tensor *x = &t->tensor[i];
        if (!x->row->trained) continue;
        *total += (double)x->count;
        if (x->row->cols == DIM_NONE || (x->row->kind == T_EMBED && !c->tied)) continue;
        *active += x->expert >= 0 ? (double)x->count * c->top_k / c->n_experts : (double)x->count;
    }
}

// -------------------------------------------------------------------------------------------------
// what the operations take

/* A matrix, or `count` of them `stride` elements apart (the experts of a layer). scale: for
   quantised types. */
typedef struct Mat {
    void *data;
    DType dtype;
    void *scale;
    int count, rows, cols;
    size_t ld, stride;
} Mat;

/* Where the rows go. Experts see this, never N or K: top-K, capacity, token rounding and the
   exchange between ranks differ only in how they build it. Slots are sorted by expert, within an
   expert by source row. A dense MLP is the identity plan: one expert, row == NULL, slot s is row s
   with weight 1. Everything but rows, E and S_max lives on the device. */
typedef struct Plan {
    int rows;       // R source rows
    int E;          // experts here
    int S_max;      // most slots there can be: what buffers are sized for
    int row_max;    // most slots that one row can have
    int *offsets;   // (E+1) slots of expert e are [offsets[e], offsets[e+1]); S = offsets[E]
    int *row;       // (S) source row of a slot
    int *expert;    // (S) its expert
    stat_t *weight; // (S) its combine weight
    int *row_begin; // (R+1) row r owns slot[row_begin[r]] ... slot[row_begin[r+1]-1]
    int *slot;      // (S) those slots, in expert order
} Plan;

/* The scalars of one training step, in device memory: nothing inside a step waits for them to reach
   the host. A bad value is recorded once, the first in program order; the optimiser then leaves
   every weight alone. */
typedef enum {
    BAD_NONE,
    BAD_LOSS,
    BAD_ROUTER,
    BAD_GRADIENT,
    BAD_ELSEWHERE // on another rank, which knows what it was
} BadKind;
typedef struct StepState {
    int bad;           // BadKind
    int bad_layer;     // BAD_ROUTER: the layer
    int64_t bad_index; // BAD_LOSS, BAD_ROUTER: the row of the micro-batch; BAD_GRADIENT: index into
                       // the segments
    double loss;       // sum over micro-batches of cross entropy * loss scale
    double square;     // of the gradient: sum over its elements; NaN when something was bad
    double grad_norm;  // before clipping
    double clip;       // factor that the optimiser applies to gradients
    double lr, beta1_correction, beta2_correction; // of this step: lr and 1 - beta^step
} StepState;

/* One tensor to the optimiser, or the part of it that this rank updates: elements of the parameter
   and gradient arenas from `offset`, of the moments' from `moment`. Lists of them ascend by both and
   none overlaps the next; between them are gaps, which nobody reads. */
typedef struct Segment {
    size_t offset, count;
    int decay;
    size_t moment;
} Segment;

typedef struct OptimConfig {
    double beta1, beta2, eps, weight_decay, max_norm;
    int sgd;
} OptimConfig;

/* Shape of an attention call. New tokens of sequence b sit at positions start[b] ..
   start[b]+len[b]-1 (NULL: 0 and T, training); rows beyond len are padding: their outputs are
   zeros. The key cache holds `cache_len` positions. */
typedef struct Attn {
    int B, T, n_heads, n_kv_heads, head_dim, cache_len;
    const int *start, *len;
    int qk_norm;
    double eps;
} Attn;

typedef struct Router {
    int kind, N, C, E, K, norm_topk;
    double aux_coef, z_coef; // already divided by the number of MoE layers and of micro-batches
    // what plan_select makes of the choice: limit = most slots an expert (capacity); tile > 0: round
    // every expert's slots to a multiple of it, and limit does not count
    int limit, tile;
    int all; // rows of the micro-batch over all ranks; 0: N
} Router;

/* Shapes that bound the scratch a backend needs: rows in a call, most slots and rows of a plan (rows
   0: B*T), whether there is a backward pass, and how many of the experts are here (0: all). */
typedef struct ScratchShape {
    int B, T, cache_len, S_max, backward, rows, experts;
} ScratchShape;

// -------------------------------------------------------------------------------------------------
// the operations

typedef struct Backend {
    const char *name;
    DType act_type, param_type, grad_type, stat_type;
    size_t act_size, param_size, grad_size, stat_size; // bytes of an element
    // the type that products read matrices in: param_type, or that of rounded copies of the weights,
    // which params_changed makes. The router's matrix and the norms' weights are read as they are
    DType mat_type;
    size_t mat_size;
    int keeps_A;  // expert_up_forward leaves A for expert_down_forward: it wants room for it
    int apart;    // its memory is apart from the host's; 2: that of a CUDA device
    void *stream; // the device's queue, opaque

    // memory: alloc returns NULL when there is none, aligned to ARENA_ALIGN; fresh memory is
    // unspecified
    void *(*alloc)(size_t bytes);
    void (*release)(void *p);
    void (*to_device)(void *dst, const void *src, size_t bytes);
    void (*to_host)(void *dst, const void *src, size_t bytes);
    void (*zero)(void *p, size_t bytes);
    void (*sync)(void);
    // bytes that alloc can still give; NULL: what the host has free
    double (*memory_free)(void);
    // measured GFLOP/s of independent multiply-adds in mat_type, on all threads or the whole device:
    // what `share of peak` means
    double (*peak)(double seconds);
    // bytes of scratch that the hungriest operation needs for this model and shape (each declares
    // its own)
    size_t (*scratch_bytes)(const Config *c, const ScratchShape *s);
    // called after the parameters were written: rounds all of them to mat_type, at the same
    // offsets. NULL where mat_type is param_type
    void (*params_changed)(void *copies, const param_t *params, const TensorTable *t);

    // out[n] = wte[tokens[n]];  out (N,C), wte (V,C)
    void (*embedding_forward)(act_t *out, const int *tokens, Mat wte, int N);
    void (*embedding_backward)(
        grad_t *dwte, const act_t *dout, const int *tokens, int N, int V, int C, void *scratch);

    // out = inp * rstd * weight, rstd = 1/sqrt(mean(inp^2) + eps);  out, inp (N,C), rstd
    // (N), weight (C)
    void (*rmsnorm_forward)(act_t *out, stat_t *rstd, const act_t *inp, const param_t *weight,
        int N, int C, double eps);
    // the same after sum = inp + branch; sum (N,C) may be inp
    void (*residual_rmsnorm_forward)(act_t *sum, act_t *out, stat_t *rstd, const act_t *inp,
        const act_t *branch, const param_t *weight, int N, int C, double eps);
    // dinp += d loss / d inp, dweight += d loss / d weight
    void (*rmsnorm_backward)(act_t *dinp, grad_t *dweight, const act_t *dout, const act_t *inp,
        const stat_t *rstd, const param_t *weight, int N, int C, void *scratch);
    // out = a + b;  (count) elements; out
    // may be a or b
    void (*add)(act_t *out, const act_t *a, const act_t *b, size_t count);

    // out = inp w^T;  out (N,rows), inp (N,cols)
    void (*linear_forward)(act_t *out, const act_t *inp, Mat w, int N, void *scratch);
    // dinp (+)= dout w (dinp NULL: skipped), dweight += dout^T inp
    void (*linear_backward)(act_t *dinp, grad_t *dweight, const act_t *dout, const act_t *inp,
        Mat w, int N, int accumulate, void *scratch);

    /* Splits the rows of qkv (N, (n_heads + 2 n_kv_heads) head_dim), normalises q and k (qk_norm),
       rotates them by their positions (rotate-half; rope (positions, hd): a row holds hd/2 cosines,
       then hd/2 sines). q (B, n_heads, T, hd); k, v: the cache (B, n_kv_heads, cache_len, hd),
       written at the tokens' positions. rstd (N, norms of q then of k): n_heads + n_kv_heads
       per-head values, 2 for the full norm. */
    void (*qk_rope_forward)(act_t *q, act_t *k, act_t *v, stat_t *rstd, const act_t *qkv,
        const param_t *q_weight, const param_t *k_weight, const stat_t *rope, Attn a);
    // dqkv (overwritten), weight gradients (accumulated) from dq, dk, dv in the layouts of q, k, v
    void (*qk_rope_backward)(act_t *dqkv, grad_t *dq_weight, grad_t *dk_weight, const act_t *dq,
        const act_t *dk, const act_t *dv, const act_t *qkv, const stat_t *rstd,
        const param_t *q_weight, const param_t *k_weight, const stat_t *rope, Attn a,
        void *scratch);

    /* Causal grouped-query attention, softmax(q k^T / sqrt(hd)) v over keys 0 .. own position, in
       fixed key blocks from key 0 (online softmax); no T*T matrix.    out (N, n_heads*hd), lse (B,
       n_heads, T) */
    void (*attention_forward)(act_t *out, stat_t *lse, const act_t *q, const act_t *k,
        const act_t *v, Attn a, void *scratch);
    // dq, dk, dv overwritten; training shapes only (start = 0, cache_len = T)
    void (*attention_backward)(act_t *dq, act_t *dk, act_t *dv, const act_t *dout, const act_t *out,
        const stat_t *lse, const act_t *q, const act_t *k, const act_t *v, Attn a, void *scratch);

    /* logits = X Wr^T (fp32); scores = softmax or sigmoid; the K largest (plus bias, sigmoid), ties
       to the lowest expert id; combine weights.   logits (N,E), lse (N), idx, weight (N,K), count
       (E) = top-K choices an expert. reuse: idx is given, not chosen. loss_sum[0] += E sum_e f_e
       P_e, loss_sum[1] += mean lse^2, count_sum += count (both NULL: skipped). sums (E+1), NULL =
       skipped: the probabilities of each expert and lse^2, summed over the rows. A logit that is
       not finite sets st->bad with this layer and the row. */
    void (*router_forward)(stat_t *logits, stat_t *lse, int *idx, stat_t *weight, int *count,
        stat_t *loss_sum, int *count_sum, stat_t *sums, const act_t *X, Mat Wr, const stat_t *bias,
        Router r, int reuse, StepState *st, int layer, void *scratch);
    // What router_forward adds to loss_sum and count_sum, from the counts and sums of all r.all rows
    void (*router_balance)(
        stat_t *loss_sum, int *count_sum, const int *count, const stat_t *sums, Router r);
    // dX += , dWr += : from dS (S), the gradient of the combine weights of the plan's slots, and
    // the balance losses; count: of all r.all rows
    void (*router_backward)(act_t *dX, grad_t *dWr, const stat_t *dS, const Plan *p,
        const stat_t *logits, const stat_t *lse, const int *idx, const stat_t *weight,
        const int *count, const act_t *X, Mat Wr, Router r, void *scratch);

    // dropless top-K: a stable counting sort of (row, k) by expert
    void (*plan_topk)(Plan *p, const int *idx, const stat_t *weight, const int *count, int N, int K,
        int E, void *scratch);

    /* As plan_topk, then a selection over all N rows. Capacity: an expert keeps the `limit` slots
       of largest weight. Token rounding: expert e gets count_e rounded to a multiple of `tile`
       (half to even, at most N): its own slots by weight, then the rows of highest probability that
       had not chosen it, whose weight is the raw score. Ties go to the higher probability, then to
       the earlier row. moved[0] += slots dropped, moved[1] += slots added. reuse: the slots are given,
       only their weights are filled. */
    void (*plan_select)(Plan *p, int *moved, const int *idx, const stat_t *weight, const int *count,
        const stat_t *logits, const stat_t *lse, Router r, int reuse, void *scratch);

    /* What an exchange between ranks needs; expert_parallel.h says how. plan_part: p = the slots of
       rows first .. first + p->rows - 1 of `all`, its experts in `order` (E: which expert is at a
       position), rows counted from first; from (S): the slot of `all`. */
    void (*plan_part)(
        Plan *p, int *from, const Plan *all, const int *order, int first, void *scratch);
    /* An item: a row and one of `parts` equal groups of p's experts, where the row has a slot in it.
       item (S): the number of a slot's item among those of its group, by row; ~number where the row
       has an earlier slot in the group. The items of group 0, of group 1, ... in one list: item_row
       (at most parts * R) their rows; row r owns items item_at[item_begin[r]] ...
       item_at[item_begin[r+1]-1], by group. count (parts): items of a group. */
    void (*plan_items)(int *item, int *item_row, int *item_begin, int *item_at, int *count,
        const Plan *p, int parts, void *scratch);
    /* p = the slots that came from n sources. Source i has slots start[i] ... of item and weight,
       sorted by expert: of p's expert e those from offsets[i*ld + which[e]] up to offsets[i*ld +
       which[e] + 1], counted from start[i]. A slot's row is base[i] + its item (~item likewise), or
       base[i] + its own number there where item is NULL. which NULL: e. p->rows, p->E are given.
       Each source has rows of its own, those of source i before those of source i + 1. */
    void (*plan_merge)(Plan *p, const int *item, const stat_t *weight, const int *offsets,
        const int *start, const int *base, const int *which, int n, int ld, void *scratch);
    // the values of p's slots back to where the slots came from: out[start[i] + ...] = values[s]
    void (*plan_unmerge)(stat_t *out, const stat_t *values, const Plan *p, const int *offsets,
        const int *start, const int *which, int n, int ld);
    // out[index[s]] = values[s], for the slots of p
    void (*scatter)(stat_t *out, const stat_t *values, const int *index, const Plan *p);
    /* out[i] = in[from[i]] (NULL: in[i]; ~from[i] likewise), i < n, rows of C values of any two of
       act_type and BF16; to: out[to[i]], and not at all where to[i] < 0 */
    void (*copy_rows)(void *out, DType out_type, const int *to, const void *in, DType in_type,
        const int *from, int n, int C);
    // out[r] = sum of in[at[i]], begin[r] <= i < begin[r+1], in this order;  out (R,C). begin NULL:
    // of in[r], in[r + R], ..., `parts` of them. in: of type act_type or BF16
    void (*sum_rows)(act_t *out, const void *in, DType in_type, const int *begin, const int *at,
        int parts, int R, int C);

    // H[s] = W1[e] X[row s], for every slot s of expert e;  H (S,2I) = [gate; up], W1 (E,2I,C).
    // A (S,I) = silu(gate) * up; NULL: not asked for
    void (*expert_up_forward)(
        act_t *H, act_t *A, const act_t *X, Mat W1, const Plan *p, void *scratch);
    // out[r] (+)= sum over the slots of r, in expert order, of weight_s W2[e] A[s];  out (R,C), W2
    // (E,C,I). A: as expert_up_forward left it, or NULL: made from H
    void (*expert_down_forward)(act_t *out, const act_t *H, const act_t *A, Mat W2, const Plan *p,
        int accumulate, void *scratch);
    /* With a = silu(g) * u and da' = W2^T dout[row s]:  dS = <da', a>, dH = weight_s da' through
       SwiGLU, and dW2 (+)= dout^T (weight_s a).      dH (S,2I) may be H itself; sA (S,I) is
       overwritten; dS (S), NULL = skipped. fresh: dW2 is written without being read, zeros for an
       expert without a slot; else added to */
    void (*expert_down_backward)(act_t *dH, act_t *sA, stat_t *dS, grad_t *dW2, const act_t *dout,
        const act_t *H, Mat W2, const Plan *p, int fresh, void *scratch);
    // dX[r] (+)= sum over the slots of r of W1[e]^T dH[s];  dW1 (+)= dH^T X[row], fresh: written
    void (*expert_up_backward)(act_t *dX, grad_t *dW1, const act_t *dH, const act_t *X, Mat W1,
        const Plan *p, int accumulate, int fresh, void *scratch);

    /* Cross entropy of inp w^T against targets (-1 = ignored), in chunks of rows: losses (N) = lse
       - logit (0 where ignored); with dinp: dinp = and dw += gradients of scale * sum(losses). No
       (N,V) tensor.  w (V,C) */
    void (*classifier)(stat_t *losses, act_t *dinp, grad_t *dw, const act_t *inp, Mat w,
        const int *targets, int N, double scale, void *scratch);
    // st->loss += scale * sum of losses, in a fixed order; the first row whose loss is not finite
    // sets st->bad
    void (*reduce_loss)(StepState *st, const stat_t *losses, int N, double scale);

    // st->square, st->grad_norm, st->clip = min(1, max_norm / norm); a gradient that is not finite
    // sets st->bad (its segment)
    void (*grad_norm)(StepState *st, const grad_t *grads, const Segment *seg, int nseg,
        double max_norm, void *scratch);
    // st->grad_norm and st->clip from st->square, summed over ranks by now; where that is not
    // finite and nothing was bad here, it was elsewhere
    void (*clip_norm)(StepState *st, double max_norm);
    // AdamW (decoupled decay) or SGD over all segments; does nothing when st->bad is set
    void (*update)(param_t *params, const grad_t *grads, grad_t *m, grad_t *v, const Segment *seg,
        int nseg, const StepState *st, OptimConfig o);
    // selection bias (E): += rate * sign(mean load - load_e), from the choices of a whole step;
    // nothing when st->bad is set [DeepSeek-V3, auxiliary-loss-free balancing]
    void (*update_bias)(
        stat_t *bias, const int *count_sum, int E, double rate, const StepState *st);
} Backend;

#ifdef __cplusplus
extern "C" {
#endif
extern const Backend *backend_cpu(void);
/* moe_kernels.cu, once for each type of activations and matrices (F32, BF16; masters, gradients,
   moments, the router and all sums are float): on the GPU, and on the CPU through cuda_cpu.h. Returns
   NULL, with one line about it in *why, where there is no such device. */
extern const Backend *backend_cuda(DType type, const char **why);
extern const Backend *backend_emulated(DType type, const char **why);
/* Dense products of backend_cuda through cuBLAS from here on, or (on 0) through our own. What cuBLAS
   computes of a row depends on the rows beside it. Returns 0, with one line in *why, where there is
   no cuBLAS. */
extern int cuda_dense_cublas(int on, const char **why);
// Which of this machine's GPUs backend_cuda opens, counted round: ranks of one machine share them out.
extern void cuda_prefer(int number);
#ifdef __cplusplus
}
#endif

#endif
