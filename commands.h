/* commands.h: what train_moe does besides training: generate, eval, info, tokenize, place (bench has a
   room of its own, bench.h); and what they share with it.

   Options is everything that the command line can say; train_moe.c fills it (its table of flags
   says how) and calls one of the command_* functions here, or trains. In order:
     options and presets
     a model from a checkpoint folder
     evaluation: mean cross entropy over the held-out part
     sampling: temperature, top-k, top-p; a Generator feeds a model its own tokens through the cache
     info: parameters, memory by class and FLOPs, before anything is allocated
     tokenize: text to token shards, or to a vocabulary
     place: experts to ranks, from the logs of a run */
#ifndef COMMANDS_H
#define COMMANDS_H

#include "run_folder.h" // before gemm.h, whose `real` is a name in jansson.h
#include "placement.h"
#include "dataloader.h"
#include "model.h"
#include "bpe_train.h" // and tokenizer.h
#include "watch.h"

#include <signal.h>

typedef enum { DEVICE_CPU, DEVICE_CUDA, DEVICE_EMULATED } Device;
typedef enum { DTYPE_FP32, DTYPE_BF16 } Dtype;
typedef enum { DENSE_OWN, DENSE_CUBLAS } Dense;
typedef enum { ROWS_OWN, ROWS_BF16 } RowsDtype;
typedef enum { ROUTING_TOPK, ROUTING_ROUND } Routing;
typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } Schedule;

enum { MAX_PATHS = 256 };
typedef struct Paths {
    const char *at[MAX_PATHS];
    int n;
} Paths;

typedef struct Options {
    // data and folders
    Paths input, val;
    double val_fraction;
    const char *out, *init, *resume, *preset, *model, *prompt, *vocab;
    int overwrite, has_resume, tsv, train_vocab, json, tax, growth;
    int64_t shard_tokens;
    double upcycle_noise;
    // the model
    Config c;
    double aux_loss, z_loss, bias_rate, capacity;
    int routing, tile;
    int arch; // Arch: what the user named, ARCH_AUTO = nothing
    // training
    int batch, schedule, optimizer;
    int64_t total_batch, steps, warmup;
    double lr, min_lr, weight_decay, beta1, beta2, grad_clip;
    int64_t eval_every, eval_batches, sample_every, save_every, keep, log_every, routing_every;
    int device, dtype, dense, recompute, threads, profile;
    // several ranks
    int ep, zero, dispatch, rows_dtype, dispatch_chunk;
    const char *placement;
    int64_t seed;
    // generation
    int64_t n_tokens;
    int top_k_sampling;
    double temperature, top_p;
    // place
    const char *log;
    int ranks, nodes;
} Options;

// -------------------------------------------------------------------------------------------------
// presets

/* Shapes and training settings that work together. The last three are the public models that the
   architecture covers, for info and for checkpoints of theirs. qk-norm, norm-topk, theta and eps as
   in their config.json. */
typedef struct Preset {
    const char *name;
    int layers, d_model, heads, kv_heads, head_dim, experts, topk, d_expert, seq, vocab, qk_norm,
        norm_topk;
    double theta, eps, aux_loss, z_loss;
    int batch, warmup;
    int64_t steps;
    double lr, min_lr, weight_decay, beta2;
    int64_t eval_every, sample_every, save_every;
} Preset;

static const Preset presets[] = {
    // tiny: reaches its loss on a megabyte of text in three minutes on two cores
    {"tiny", 4, 96, 3, 1, 32, 8, 2, 96, 128, 256, QK_NORM_HEAD, 1, 1e4, 1e-6, 0.01, 1e-4, 16, 90,
        1800, 5e-3, 2.5e-4, 0.1, 0.99, 600, 900, 600},
    // small: the shape that is measured
    {"small", 6, 384, 6, 6, 64, 8, 2, 512, 256, 256, QK_NORM_HEAD, 1, 1e4, 1e-6, 0.01, 1e-4, 16,
        100, 2000, 1e-3, 1e-4, 0.1, 0.99, 250, 500, 500},
    {"olmoe-1b-7b", 16, 2048, 16, 16, 128, 64, 8, 1024, 4096, 50304, QK_NORM_FULL, 0, 1e4, 1e-5,
        0.01, 1e-3, 1, 2000, 100000, 4e-4, 4e-5, 0.1, 0.95, 1000, 0, 1000},
    {"mixtral-8x7b", 32, 4096, 32, 8, 128, 8, 2, 14336, 4096, 32000, QK_NORM_NONE, 1, 1e6, 1e-5,
        0.02, 0, 1, 2000, 100000, 3e-4, 3e-5, 0.1, 0.95, 1000, 0, 1000},
    {"qwen3-30b-a3b", 48, 2048, 32, 4, 128, 128, 8, 768, 4096, 151936, QK_NORM_HEAD, 1, 1e6, 1e-6,
        0.001, 0, 1, 2000, 100000, 3e-4, 3e-5, 0.1, 0.95, 1000, 0, 1000},
};
enum { N_PRESETS = sizeof presets / sizeof *presets };

static void apply_preset(Options *o, const char *name) {
    const Preset *p = NULL;
    for (int i = 0; i < N_PRESETS; i++)
        if (!strcmp(presets[i].name, name)) p = &presets[i];
    if (!p) {
        char all[256] = "";
        for (int i = 0; i < N_PRESETS; i++)
            snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i ? ", " : "",
                presets[i].name);
        die(USER_ERROR, "--preset: expected one of %s, found '%s'", all, name);
    }
    Config c = {p->vocab, p->seq, p->layers, p->d_model, p->heads, p->kv_heads, p->head_dim,
        p->experts, p->topk, p->d_expert, 0, 0, p->topk * p->d_expert, p->qk_norm, ROUTER_SOFTMAX,
        p->norm_topk, 0, p->theta, p->eps};
    o->preset = p->name;
    o->c = c;
    o->aux_loss = p->aux_loss, o->z_loss = p->z_loss;
    o->batch = p->batch, o->warmup = p->warmup, o->steps = p->steps;
    o->lr = p->lr, o->min_lr = p->min_lr, o->weight_decay = p->weight_decay, o->beta1 = 0.9,
    o->beta2 = p->beta2;
    o->eval_every = p->eval_every, o->sample_every = p->sample_every, o->save_every = p->save_every;
}

// -------------------------------------------------------------------------------------------------
// small things

/* The device of --device in the type of --dtype; ends the program where this build or this machine
   has none. Masters, gradients and moments are float in every type, so a checkpoint knows neither. */
static const Backend *backend_of(const Options *o) {
    const char *why = "no reason was given";
    const Backend *b = NULL;
    if (o->dense == DENSE_CUBLAS && o->device != DEVICE_CUDA)
        die(USER_ERROR,
            "--dense cublas: expected --device cuda, found %s; --dense own always works",
            o->device == DEVICE_CPU ? "cpu" : "emulated");
    if (o->device == DEVICE_CPU) {
        if (o->dtype == DTYPE_FP32) return backend_cpu();
        die(USER_ERROR,
            "--dtype bf16: expected --device cuda or emulated, found cpu, which computes in fp32; "
            "leave --dtype out, or name such a device (of a run: --init starts a new one from its "
            "weights)");
    }
    if (o->device == DEVICE_EMULATED) {
#ifdef HAVE_EMULATED
        b = backend_emulated(o->dtype == DTYPE_BF16 ? BF16 : F32, &why);
#else
        die(USER_ERROR,
            "--device emulated: expected a build that has this device, found one without it; make "
            "emulated builds train_moe_emulated, or use --device cpu");
#endif
    } else {
#ifdef HAVE_CUDA
        b = backend_cuda(o->dtype == DTYPE_BF16 ? BF16 : F32, &why);
#else
        die(USER_ERROR,
            "--device cuda: expected a build with CUDA, found one without it; make CUDA=1 builds "
            "it "
            "where nvcc is, or use --device cpu");
#endif
    }
    if (!b)
        die(USER_ERROR, "--device %s: expected one that works, found: %s; --device cpu always does",
            o->device == DEVICE_CUDA ? "cuda" : "emulated", why);
#ifdef HAVE_CUDA
    if (o->device == DEVICE_CUDA && !cuda_dense_cublas(o->dense == DENSE_CUBLAS, &why))
        die(USER_ERROR, "--dense cublas: expected cuBLAS, found %s; --dense own always works", why);
#endif
    return b;
}

static const char *dtype_word(const Backend *b) { return b->act_type == BF16 ? "bf16" : "fp32"; }
// "cuda, bf16": what the first line of every table says, so that no number lacks it.
static const char *device_words(const Options *o, char buf[64]) {
    const Backend *b = backend_of(o);
    snprintf(
        buf, 64, "%s, %s%s", b->name, dtype_word(b), o->dense == DENSE_CUBLAS ? ", cuBLAS" : "");
    return buf;
}

// Whether training drops slots or adds some to those of top-K.
static int selecting(const Options *o) {
    return o->c.n_experts > 1 &&
        (o->routing == ROUTING_ROUND || o->capacity < o->c.n_experts / (double)o->c.top_k);
}
// What a model that trains is built for, and what its steps need to know besides.
static ModelShape train_shape(const Options *o) {
    ModelShape s = {.B = o->batch,
        .T = o->c.seq_len,
        .train = 1,
        .recompute = o->recompute,
        .sgd = o->optimizer,
        .tile = o->routing == ROUTING_ROUND ? o->tile : 0,
        .select = selecting(o)};
    return s;
}
static void set_coefficients(Model *m, const Options *o) {
    m->aux_coef = o->aux_loss;
    m->z_coef = o->z_loss;
    m->bias_rate = o->bias_rate;
    m->capacity = o->capacity;
}

// "12.4k", "3.10M"
static const char *human(double x, char buf[32]) {
    if (x >= 1e9)
        snprintf(buf, 32, "%.2fG", x / 1e9);
    else if (x >= 1e6)
        snprintf(buf, 32, "%.2fM", x / 1e6);
    else if (x >= 1e4)
        snprintf(buf, 32, "%.1fk", x / 1e3);
    else
        snprintf(buf, 32, "%.0f", x);
    return buf;
}

// One number of a file of the kernel's (/proc, /sys), after `key` where there is one; -1 when it
// cannot be had.
static double kernel_number(const char *path, const char *key) {
    char line[256];
    double x = -1;
    FILE *f = fopen(path, "r");
    if (!f) return -1;
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, key, strlen(key))) continue;
        if (sscanf(line + strlen(key), "%lf", &x) != 1) x = -1;
        break;
    }
    fclose(f);
    return x;
}

// How many threads there are from here on; 0: as many as this process may use.
static void set_threads(int threads) {
#ifdef _OPENMP
    if (!threads) { // affinity is the runtime's own default; a control group's quota is ours to see
        const double quota = kernel_number("/sys/fs/cgroup/cpu.max", "");
        char word[64] = "";
        double period = 100000;
        FILE *f = fopen("/sys/fs/cgroup/cpu.max", "r");
        if (f) {
            if (fscanf(f, "%63s %lf", word, &period) < 2) period = 100000;
            fclose(f);
        }
        if (quota > 0 && quota / period < omp_get_max_threads())
            threads = quota < period ? 1 : (int)(quota / period);
    }
    if (threads > omp_get_num_procs() && !getenv("OMP_WAIT_POLICY"))
        warn("--threads %d on %d processors: waiting threads get in the way of "
             "working ones; OMP_WAIT_POLICY=passive makes them sleep",
            threads, omp_get_num_procs());
    if (threads) omp_set_num_threads(threads);
#else
    if (threads > 1) warn("--threads %d: built without OpenMP, one thread is used", threads);
#endif
}

// Bytes that this process may still take: what the machine has free, or what its control group
// leaves.
static double memory_available(void) {
    double kib = kernel_number("/proc/meminfo", "MemAvailable:"),
           free_bytes = kib < 0 ? 1e30 : kib * 1024;
    const double most = kernel_number("/sys/fs/cgroup/memory.max", "");
    const double used = kernel_number("/sys/fs/cgroup/memory.current", "");
    if (most > 0 && used >= 0 && most - used < free_bytes) free_bytes = most - used;
    return free_bytes;
}

static double memory_of(const Backend *b) {
    return b->memory_free ? b->memory_free() : memory_available();
}

// Refuses what cannot fit before any of it is taken.
static void check_memory(const Backend *b, double need, const char *advice) {
    const double have = memory_of(b);
    if (need > have)
        die(USER_ERROR, "this needs %.1f MB of memory and %.1f MB are available; %s", need / 1e6,
            have / 1e6, advice);
}

// -------------------------------------------------------------------------------------------------
// a model from a checkpoint

static int is_folder(const char *path) {
    struct stat st;
    return !stat(path, &st) && S_ISDIR(st.st_mode);
}
static int has_file(const char *folder, const char *name) {
    char path[CKPT_PATH];
    struct stat st;
    return snprintf(path, sizeof path, "%s/%s", folder, name) < CKPT_PATH && !stat(path, &st);
}

// The best (or newest) checkpoint of the run in out/ that was written to last; "" when there is
// none.
static void newest_run(char path[CKPT_PATH], const char *link) {
    time_t newest = 0;
    glob_t g;
    char pattern[64];
    path[0] = 0;
    snprintf(pattern, sizeof pattern, "out/*/%s", link);
    if (!glob(pattern, 0, NULL, &g)) {
        for (size_t i = 0; i < g.gl_pathc; i++) {
            struct stat st;
            if (!stat(g.gl_pathv[i], &st) && st.st_mtime >= newest) {
                newest = st.st_mtime;
                snprintf(path, CKPT_PATH, "%s", g.gl_pathv[i]);
            }
        }
        globfree(&g);
    }
}

/* Which folder --model or --init means: a checkpoint itself, or a run, whose best (else newest) it
   is. */
static void find_checkpoint(char path[CKPT_PATH], const char *flag, const char *given) {
    if (!given) {
        newest_run(path, "best");
        if (!*path) newest_run(path, "latest");
        if (!*path)
            die(USER_ERROR,
                "%s: no run found in out/; expected %s FOLDER, a checkpoint or the --out of a run",
                flag, flag);
        return;
    }
    snprintf(path, CKPT_PATH, "%s", given);
    if (has_file(given, "config.json")) return;
    if (snprintf(path, CKPT_PATH, "%s/best", given) < CKPT_PATH && has_file(path, "config.json"))
        return;
    if (snprintf(path, CKPT_PATH, "%s/latest", given) < CKPT_PATH && has_file(path, "config.json"))
        return;
    if (is_folder(given))
        die(USER_ERROR,
            "%s %s: expected a checkpoint (a folder with config.json and model.safetensors) or the "
            "folder "
            "of a run, found a folder without either",
            flag, given);
    die(USER_ERROR, "%s %s: expected a checkpoint folder, found %s", flag, given,
        looks_like(given));
}

static void read_config(Config *c, const char *folder) {
    Err err;
    if (config_read(c, folder, &err)) die(USER_ERROR, "%s", err.text);
}

static void read_weights(Model *m, const char *folder) {
    Err err;
    if (model_read(folder, &m->c, &m->table, m->b, m->base[A_PARAMS], m->base[A_BUFFERS], &err))
        die(USER_ERROR, "%s", err.text);
    model_params_changed(m);
}

static void read_tokenizer(Tokenizer *t, const Config *c, const char *folder) {
    Err err;
    if (tokenizer_load(t, folder, &err)) die(USER_ERROR, "%s", err.text);
    if (t->vocab_size > c->vocab_size)
        die(USER_ERROR,
            "%s: the tokenizer has %d tokens and the model's vocabulary %d; they belong to "
            "different models",
            folder, t->vocab_size, c->vocab_size);
}

/* The tokenizer.json beside the shards that --input names first, as `tokenize` leaves it; 0: none.
   What is no shard needs none: a text is bytes. */
static int vocab_beside(char path[CKPT_PATH], const Options *o) {
    glob_t g;
    uint32_t magic = 0;
    const char *input = o->input.n ? o->input.at[0] : "";
    const int folder = is_folder(input);
    if (snprintf(path, CKPT_PATH, "%s%s", input, folder ? "/*.bin" : "") >= CKPT_PATH - 16)
        return 0;
    if (glob(path, 0, NULL, &g)) return 0;
    FILE *f = fopen(g.gl_pathv[0], "rb");
    if (f) {
        if (fread(&magic, sizeof magic, 1, f) != 1) magic = 0;
        fclose(f);
    }
    snprintf(path, CKPT_PATH, "%s", g.gl_pathv[0]);
    globfree(&g);
    char *slash = strrchr(path, '/');
    strcpy(slash ? slash + 1 : path, "tokenizer.json");
    return (magic == SHARD_16 || magic == SHARD_32) && !access(path, F_OK);
}

/* The tokenizer of a new model: --vocab, else the one beside its shards, else bytes. A vocabulary
   with merges sets the model's. */
static void open_vocab(Tokenizer *t, Options *o) {
    char path[CKPT_PATH];
    Err err;
    const int beside = !o->vocab && vocab_beside(path, o);
    if (!o->vocab && !beside) {
        tokenizer_bytes(t);
        return;
    }
    if (tokenizer_open(t, o->vocab ? o->vocab : path, &err))
        die(USER_ERROR, "%s%s", o->vocab ? "--vocab " : "", err.text);
    if (beside) printf("vocabulary: %d tokens, %s\n", t->vocab_size, shown(path));
    o->c.vocab_size = t->vocab_size;
}

// all_val: every byte of --input is for evaluation, none for training.
static int try_data(Data *d, const Options *o, const Tokenizer *t, int all_val, Err *err) {
    const Paths none = {{NULL}, 0}, *train = all_val ? &none : &o->input;
    const Paths *val = all_val ? &o->input : &o->val;
    return data_open(d, train->at, train->n, val->at, val->n, o->val_fraction, o->c.seq_len,
        o->c.vocab_size, (uint64_t)o->seed, tokenizer_is_bytes(t) ? NULL : tokenizer_encode,
        (void *)(uintptr_t)t, err);
}

static void open_data(Data *d, const Options *o, const Tokenizer *t, int all_val) {
    Err err;
    if (!o->input.n)
        die(USER_ERROR, "--input: expected a text file, a folder or a pattern; none was given");
    if (try_data(d, o, t, all_val, &err)) die(USER_ERROR, "%s", err.text);
}

static void check_batch(const Options *o) {
    if ((int64_t)o->batch * o->c.seq_len > 1 << 28)
        die(USER_ERROR,
            "--batch %d x --seq %d: expected at most %d tokens in a micro-batch; lower --batch",
            o->batch, o->c.seq_len, 1 << 28);
    const double slots = (double)o->batch * o->c.seq_len * o->c.top_k +
        (o->routing == ROUTING_ROUND ? (double)o->c.n_experts * o->tile : 0);
    if (slots > INT_MAX)
        die(USER_ERROR,
            "--batch %d x --seq %d x --topk %d: expected at most %d pairs of token and expert in a "
            "micro-batch; lower --batch",
            o->batch, o->c.seq_len, o->c.top_k, INT_MAX);
}

// What of a forward pass over N rows was not finite, in words.
static const char *say_bad(const Model *m, const StepState *s, int N, char what[640]) {
    char from[256] = "";
    int n = s->bad == BAD_ROUTER
        ? snprintf(what, 640,
              "the router logits of layer %d are not finite (token %lld of the micro-batch)",
              s->bad_layer, (long long)s->bad_index)
        : snprintf(what, 640, "the loss of token %lld of the micro-batch is not finite",
              (long long)s->bad_index);
    if (model_first_bad(m, N, from, sizeof from)) snprintf(what + n, 640 - n, ": %s", from);
    return what;
}

// -------------------------------------------------------------------------------------------------
// evaluation

typedef struct EvalResult {
    double loss;
    uint64_t targets, bytes; // bytes of text that the targets stand for
    StepState state;
} EvalResult;

/* Mean cross entropy over the validation rows of d, B at a time (batches > 0: only so many
   batches). x, y: B*T. */
static EvalResult evaluate(
    Model *m, const Data *d, const Tokenizer *t, int64_t batches, int *x, int *y) {
    const Parallel *par = m->shape.par;
    const int B = par ? m->shape.B_all : m->shape.B, T = m->shape.T;
    int first = 0, own = B; // of the rows of a batch, this rank's
    if (par) own = share_of_batch(&par->world, B, par->world.rank, &first);
    const uint64_t rows = data_val_rows(d);
    EvalResult r;
    memset(&r, 0, sizeof r);
    double total = 0;
    for (uint64_t row = 0;
         row < rows && (batches <= 0 || row < (uint64_t)batches * B) && !r.state.bad; row += B) {
        for (int b = 0; b < own; b++)
            r.targets += data_val_row(d, row + first + b, x + (size_t)b * T, y + (size_t)b * T);
        for (size_t i = 0; i < (size_t)own * T; i++) r.bytes += tokenizer_text_bytes(t, y[i]);
        r.state = model_loss(m, x, y, own, T);
        total += r.state.loss;
    }
    if (par) {
        uint64_t sums[2] = {r.targets, r.bytes};
        comm_all_reduce((Comm *)(uintptr_t)&par->world, sums, 2, COMM_I64, COMM_SUM);
        r.targets = sums[0], r.bytes = sums[1];
    }
    r.loss = r.targets ? total / (double)r.targets : 0;
    return r;
}

// -------------------------------------------------------------------------------------------------
// sampling

typedef struct SampleConfig {
    double temperature, top_p;
    int top_k;
    uint64_t seed;
} SampleConfig;
typedef struct Choice {
    double p;
    int id;
} Choice;

static int by_probability(const void *a, const void *b) { // falling, ties to the lower id
    const Choice *x = a, *y = b;
    return x->p > y->p ? -1 : x->p < y->p ? 1 : x->id - y->id;
}

/* One token from logits (V): the most likely one at temperature 0; else from softmax(logits /
   temperature) cut to the top_k most likely (0 = all) and then to the fewest whose probability
   reaches top_p. work: V entries. The random number is a counter, (seed, position): the same seed
   gives the same text. */
static int sample_token(
    const float *logits, int V, const SampleConfig *s, uint64_t position, Choice *work) {
    int best = 0, n = V;
    for (int v = 1; v < V; v++)
        if (logits[v] > logits[best]) best = v;
    if (s->temperature <= 0) return best;
    for (int v = 0; v < V; v++) {
        work[v].p = exp_d(((double)logits[v] - logits[best]) / s->temperature);
        work[v].id = v;
    }
    if (s->top_k > 0 || s->top_p < 1) {
        qsort(work, V, sizeof *work, by_probability);
        if (s->top_k > 0 && s->top_k < n) n = s->top_k;
    }
    double total = 0, kept = 0;
    for (int i = 0; i < n; i++) total += work[i].p;
    if (s->top_p < 1) {
        int k = 0;
        while (k < n && (k == 0 || kept < s->top_p * total)) kept += work[k++].p;
        n = k, total = kept;
    }
    double at = counter_uniform(s->seed, 0x73616d706c65, position) * total;
    for (int i = 0; i < n; i++)
        if ((at -= work[i].p) < 0) return work[i].id;
    return work[n - 1].id;
}

/* A text being written: the tokens so far, and how many of them the cache holds. When the cache is
   full, its newer half is fed anew from position 0, so that a text can be longer than the model's
   context. */
typedef struct Generator {
    Model *m;
    int *tokens; // the window that the cache shows, at most cache_len
    int n, cached;
    uint64_t position; // tokens seen in all
    float *logits;
    Choice *work;
} Generator;

static void generator_open(Generator *g, Model *m) {
    memset(g, 0, sizeof *g);
    g->m = m;
    g->tokens = malloc((size_t)m->shape.cache_len * sizeof *g->tokens);
    g->logits = malloc((size_t)m->c.vocab_size * sizeof *g->logits);
    g->work = malloc((size_t)m->c.vocab_size * sizeof *g->work);
    if (!g->tokens || !g->logits || !g->work) die(RUN_ERROR, "no memory for generation");
}

static void generator_close(Generator *g) {
    free(g->tokens);
    free(g->logits);
    free(g->work);
}

static void generator_feed(Generator *g, int token) {
    const int room = g->m->shape.cache_len;
    if (g->n == room) {
        const int keep = room / 2 > 0 ? room / 2 : 0;
        memmove(g->tokens, g->tokens + room - keep, keep * sizeof *g->tokens);
        g->n = keep;
        g->cached = 0;
    }
    g->tokens[g->n++] = token;
    g->position++;
}

// The next token, or -1 with a message when the model's output is not finite. The caller feeds it
// back.
static int generator_next(Generator *g, const SampleConfig *s) {
    Model *m = g->m;
    while (g->cached < g->n) {
        const int len = g->n - g->cached < m->shape.T ? g->n - g->cached : m->shape.T;
        model_next(m, g->tokens + g->cached, &g->cached, &len, 1, len);
        g->cached += len;
    }
    model_logits(m, 0, g->logits);
    for (int v = 0; v < m->c.vocab_size; v++)
        if (!isfinite(g->logits[v])) return -1;
    return sample_token(g->logits, m->c.vocab_size, s, g->position, g->work);
}

static void command_generate(const Options *o) {
    char folder[CKPT_PATH];
    Config c;
    Model m;
    Tokenizer t;
    Generator g;
    Err err;
    uint32_t *prompt;
    size_t n_prompt, bytes;
    find_checkpoint(folder, "--model", o->model);
    read_config(&c, folder);
    read_tokenizer(&t, &c, folder);
    // without a prompt: as a text begins
    if (tokenizer_encode(&t, (const unsigned char *)o->prompt, strlen(o->prompt),
            *o->prompt ? 0 : TEXT_BEGINS, &prompt, &n_prompt, &err))
        die(USER_ERROR, "--prompt: %s", err.text);
    if (!n_prompt)
        die(USER_ERROR, "--prompt: expected at least one character to start from, found none");
    ModelShape shape = {.B = 1, .T = c.seq_len < 256 ? c.seq_len : 256, .cache_len = c.seq_len};
    model_plan(&m, &c, backend_of(o), shape);
    check_memory(m.b, (double)model_bytes(&m), "use a smaller model");
    model_free(&m);
    model_build(&m, &c, backend_of(o), shape, NULL);
    read_weights(&m, folder);
    generator_open(&g, &m);
    const SampleConfig s = {o->temperature, o->top_p, o->top_k_sampling, (uint64_t)o->seed};
    double t0 = now_s(), t1 = t0;
    fwrite(o->prompt, 1, strlen(o->prompt), stdout);
    for (size_t i = 0; i < n_prompt; i++) {
        generator_feed(&g, (int)prompt[i]);
        if (g.n == c.seq_len && i + 1 < n_prompt)
            g.cached = g.n = 0; // only the last part of a long prompt is seen
    }
    int64_t made = 0;
    for (; made < o->n_tokens; made++) {
        const int next = generator_next(&g, &s);
        if (next < 0) {
            char from[256] = "they overflowed";
            model_first_bad(&m, 1, from, sizeof from);
            die(RUN_ERROR, "%s: the logits after token %lld are not finite: %s", folder,
                (long long)g.position, from);
        }
        if (made == 0) t1 = now_s();
        if (next == t.eot) break;
        const unsigned char *text = tokenizer_decode(&t, next, &bytes);
        fwrite(text, 1, bytes, stdout);
        fflush(stdout);
        if (ferror(stdout) && errno == EPIPE) break; // who reads has had enough, as head does
        if (ferror(stdout)) die(RUN_ERROR, "cannot write the text: %s", strerror(errno));
        generator_feed(&g, next);
    }
    putchar('\n');
    const double t2 = now_s();
    fprintf(stderr,
        "%s: prompt of %zu tokens in %.3f s, %lld tokens in %.3f s (%.0f tok/s), seed %lld\n",
        folder, n_prompt, t1 - t0, (long long)made, t2 - t1,
        made > 1 ? (double)(made - 1) / (t2 - t1) : 0, (long long)o->seed);
    free(prompt);
    generator_close(&g);
    tokenizer_free(&t);
    model_free(&m);
}

// -------------------------------------------------------------------------------------------------
// eval

static void command_eval(Options *o) {
    char folder[CKPT_PATH];
    Model m;
    Tokenizer t;
    Data d;
    const int batch = o->batch;
    find_checkpoint(folder, "--model", o->model);
    read_config(&o->c, folder);
    check_batch(o);
    read_tokenizer(&t, &o->c, folder);
    open_data(&d, o, &t, 1);
    if (!d.val_targets)
        die(USER_ERROR, "--input: expected at least 2 tokens to evaluate, found fewer");
    ModelShape shape = {.B = batch, .T = o->c.seq_len};
    model_plan(&m, &o->c, backend_of(o), shape);
    check_memory(m.b, (double)model_bytes(&m), "lower --batch");
    model_free(&m);
    model_build(&m, &o->c, backend_of(o), shape, NULL);
    read_weights(&m, folder);
    const size_t N = (size_t)batch * o->c.seq_len;
    int *x = malloc(2 * N * sizeof *x);
    if (!x) die(RUN_ERROR, "no memory");
    EvalResult r = evaluate(&m, &d, &t, o->eval_batches, x, x + N);
    char what[640];
    if (r.state.bad) die(RUN_ERROR, "%s: %s", folder, say_bad(&m, &r.state, (int)N, what));
    const double bytes_a_target = (double)r.bytes / (double)r.targets;
    printf("loss %.6f | perplexity %.4f | bits per byte %.4f | %llu tokens\n", r.loss,
        exp_d(r.loss), r.loss / log_d(2) / bytes_a_target, (unsigned long long)r.targets);
    free(x);
    data_close(&d);
    tokenizer_free(&t);
    model_free(&m);
}

// -------------------------------------------------------------------------------------------------
// info

// FLOPs of the attention scores and their use, forward, a token, at full context (causal: half of T
// on average)
static double attention_flops(const Config *c) {
    return 4.0 * c->n_layers * c->n_heads * c->head_dim * (c->seq_len + 1) / 2;
}

static void print_model(const Model *m, FILE *f) {
    const Config *c = &m->c;
    double total, active;
    char a[32], b[32];
    count_parameters(&m->table, c, &total, &active);
    fprintf(f,
        "model        %d layers, width %d, %d heads (%d for keys and values) of %d, context %d, "
        "vocabulary %d\n",
        c->n_layers, c->d_model, c->n_heads, c->n_kv_heads, c->head_dim, c->seq_len, c->vocab_size);
    if (moe_layers(c)) {
        fprintf(f, "experts      %d of width %d, %d a token, %s router%s", c->n_experts,
            c->d_expert, c->top_k, router_names[c->router],
            c->norm_topk ? ", weights renormalised" : "");
        if (c->dense_layers)
            fprintf(f, "; first %d layers dense, width %d", c->dense_layers, c->d_dense);
        if (c->d_shared) fprintf(f, "; shared expert of width %d", c->d_shared);
        fputc('\n', f);
    } else {
        fprintf(f, "experts      none: a dense MLP of width %d\n", c->d_expert);
    }
    fprintf(f, "other        qk-norm %s, rope theta %g, norm eps %g, %s head\n",
        qk_norm_names[c->qk_norm], c->rope_theta, c->norm_eps, c->tied ? "tied" : "untied");
    fprintf(f,
        "parameters   %s total, %s active a token (matrices, without the embedding look-up)\n",
        human(total, a), human(active, b));
    fprintf(f, "FLOPs/token  forward %s + attention %s; a training step 3 times that: %.3g\n",
        human(2 * active, a), human(attention_flops(c), b), 3 * (2 * active + attention_flops(c)));
}

// How training balances its experts.
static void print_routing(const Options *o, FILE *f) {
    fprintf(f, "routing      ");
    if (o->routing == ROUTING_ROUND)
        fprintf(f, "token rounding to multiples of %d", o->tile);
    else if (o->capacity < o->c.n_experts / (double)o->c.top_k)
        fprintf(f, "top-K, at most %g of an even share an expert", o->capacity);
    else
        fprintf(f, "dropless top-K");
    fprintf(f, "; balance loss %g, z-loss %g", o->aux_loss, o->z_loss);
    if (o->c.router == ROUTER_SIGMOID) fprintf(f, ", selection bias %g a step", o->bias_rate);
    fputc('\n', f);
}

static void print_memory(const Model *m, FILE *f) {
    double total = 0;
    for (int a = 0; a < ARENAS; a++) {
        if (!m->used[a] || (m->borrowed && a <= LAST_BORROWED)) continue;
        fprintf(f, "  %-20s %12.3f MB\n", arena_names[a], m->used[a] / 1e6);
        total += (double)m->used[a];
        for (int i = 0; i < m->n_account && a >= A_SAVED; i++)
            if ((int)m->account[i].arena == a)
                fprintf(f, "    %-40s %12.3f MB\n", m->account[i].label, m->account[i].bytes / 1e6);
    }
    fprintf(f, "  %-20s %12.3f MB\n", "total", total / 1e6);
}

/* info OUT --tsv: the log of the run and, where its texts are still there, which experts they go to
   in the checkpoint `folder`. o has the run's flags. */
static void print_tables(Options *o, const char *folder) {
    enum { BATCHES = 64 }; // enough for two digits, a few seconds for a small model
    char path[CKPT_PATH + 32];
    Model m;
    Tokenizer t;
    Data d;
    Err err;
    const char *given = o->model ? o->model : folder;
    snprintf(
        path, sizeof path, "%s/metrics.jsonl", has_file(given, "metrics.jsonl") ? given : folder);
    if (!has_file(given, "metrics.jsonl")) // beside the checkpoint
        snprintf(path, sizeof path, "%s/../metrics.jsonl", folder);
    if (print_log_tables(stdout, path, o->c.dense_layers, &err)) die(USER_ERROR, "%s", err.text);
    if (!moe_layers(&o->c)) return;
    if (!o->input.n) {
        warn("%s names no texts: no table of them", folder);
        return;
    }
    ModelShape shape = {.B = o->batch, .T = o->c.seq_len, .count = 1};
    read_tokenizer(&t, &o->c, folder);
    if (try_data(&d, o, &t, 0, &err)) {
        warn("no table of the texts: %s", err.text);
        return;
    }
    model_plan(&m, &o->c, backend_of(o), shape);
    check_memory(m.b, (double)model_bytes(&m), "use a smaller model");
    model_free(&m);
    model_build(&m, &o->c, backend_of(o), shape, NULL);
    read_weights(&m, folder);
    int *x = malloc(2 * (size_t)shape.B * shape.T * sizeof *x);
    if (!x) die(RUN_ERROR, "no memory");
    print_text_table(stdout, &m, &d, BATCHES, x, x + (size_t)shape.B * shape.T);
    free(x);
    data_close(&d);
    tokenizer_free(&t);
    model_free(&m);
}

// With --vocab the model's vocabulary is that one's, as in training.
static void open_vocab_size(Options *o) {
    Tokenizer t;
    if (!o->vocab) return;
    open_vocab(&t, o);
    tokenizer_free(&t);
}

// folder: of the checkpoint, whose shape and flags are in o; NULL: the flags alone say the shape.
static void command_info(Options *o, const char *folder) {
    Model m;
    Err err;
    if (o->tsv) {
        print_tables(o, folder);
        return;
    }
    char device[64];
    if (!folder) open_vocab_size(o);
    if (config_check(&o->c, &err)) die(USER_ERROR, "%s", err.text);
    model_plan(&m, &o->c, backend_of(o), train_shape(o));
    printf("device       %s\n", device_words(o, device));
    if (folder) printf("checkpoint   %s\n", folder);
    print_model(&m, stdout);
    if (moe_layers(&o->c)) print_routing(o, stdout);
    printf("memory to train with micro-batches of %d x %d tokens, --recompute %d, %d threads\n",
        o->batch, o->c.seq_len, o->recompute, thread_max());
    print_memory(&m, stdout);
    model_free(&m);
}

// -------------------------------------------------------------------------------------------------
// tokenize

static volatile sig_atomic_t tokenize_stopped;
static void tokenize_signal(int sig) {
    tokenize_stopped = sig;
    signal(sig, SIG_DFL); // a second one ends the program at once
}

/* A file that is being written, of the kind that llm.c reads: 256 words of 32 bits (magic, version,
   number of tokens), then the tokens, of 16 bits or, where the vocabulary needs more, 32. */
typedef struct Shards {
    char folder[CKPT_PATH], path[CKPT_PATH]; // where they are written; the file of now
    int fd, files, wide;
    int64_t limit, in_file, tokens;
    size_t used;
    unsigned char buf[1 << 16];
} Shards;

static int shard_flush(Shards *s, Err *err) {
    const size_t n = s->used;
    s->used = 0;
    return write_all(s->fd, s->buf, n, s->path, err);
}

// The header is written last: what has one is whole.
static int shard_end(Shards *s, Err *err) {
    const uint32_t head[3] = {s->wide ? SHARD_32 : SHARD_16, s->wide ? 7 : 1, (uint32_t)s->in_file};
    if (s->fd < 0) return 0;
    int rc = shard_flush(s, err);
    if (!rc && (lseek(s->fd, 0, SEEK_SET) || write_all(s->fd, head, sizeof head, s->path, err)))
        rc = failed();
    rc = write_end(s->fd, rc, s->path, err);
    s->fd = -1;
    return rc;
}

static int shard_token(Shards *s, uint32_t token, Err *err) {
    if (s->in_file == s->limit && shard_end(s, err)) return -1;
    if (s->fd < 0) {
        if ((size_t)snprintf(s->path, sizeof s->path, "%s/tokens_%06d.bin", s->folder, s->files) >=
            sizeof s->path)
            return fail(err, "--out: the name is too long");
        s->fd = write_begin(s->path, err);
        if (s->fd < 0) return -1;
        s->files++;
        s->in_file = 0;
        s->used = SHARD_HEADER;
        memset(s->buf, 0, s->used);
    }
    const uint16_t narrow = (uint16_t)token;
    const size_t size = s->wide ? sizeof token : sizeof narrow;
    if (s->used + size > sizeof s->buf && shard_flush(s, err)) return -1;
    memcpy(s->buf + s->used, s->wide ? (const void *)&token : (const void *)&narrow, size);
    s->used += size;
    s->in_file++;
    s->tokens++;
    return 0;
}

static void unmap_text(DataFile *f) {
    if (f->map) munmap(f->map, f->size);
    f->map = NULL;
}

// The texts of --input, each looked at before anything is made of them.
static void list_texts(Data *d, const Options *o) {
    Err err;
    memset(d, 0, sizeof *d);
    for (int i = 0; i < o->input.n; i++)
        if (data_add_input(d, o->input.at[i], 0, "--input", &err)) die(USER_ERROR, "%s", err.text);
    if (data_drop_duplicates(d, &err)) die(USER_ERROR, "%s", err.text);
    for (int i = 0; i < d->n_files; i++) {
        if (data_map(&d->file[i], INT_MAX, &err)) die(USER_ERROR, "--input: %s", err.text);
        if (d->file[i].token_size)
            die(USER_ERROR,
                "--input: %s: expected text, found a token shard: it is tokenized already",
                d->file[i].path);
        unmap_text(&d->file[i]);
    }
}

/* Walks over the texts in blocks that end where the split ends a word, so that memory is bounded.
   Each block is either counted for a vocabulary, or encoded and written; each text begins with an
   end-of-text token, as in the shards that llm.c makes. bytes: of all texts. */
static int tokenize_texts(
    Data *d, const Tokenizer *t, Shards *s, Learner *l, uint64_t *bytes, Err *err) {
    enum { BLOCK = 16 << 20 };
    int rc = 0;
    for (int i = 0; i < d->n_files && !rc; i++) {
        DataFile *f = &d->file[i];
        rc = data_map(f, INT_MAX, err);
        for (size_t at = 0, end; at < f->size && !rc; at = end) {
            end = f->size - at > BLOCK ? at + BLOCK : f->size;
            if (l || !tokenizer_is_bytes(t)) end = tokenizer_cut(f->map, f->size, end);
            if (tokenize_stopped) {
                rc = fail(err, "stopped by a signal: nothing was written");
            } else if (l) {
                rc = learner_text(l, f->map + at, end - at, err);
            } else {
                uint32_t *id;
                size_t n;
                rc = tokenizer_encode((void *)(uintptr_t)t, f->map + at, end - at,
                    at == 0 ? TEXT_BEGINS : 0, &id, &n, err);
                for (size_t k = 0; k < n && !rc; k++) rc = shard_token(s, id[k], err);
                free(id);
            }
            // what was read need not stay in memory
            const size_t page = end & ~(size_t)0xffff;
            if (!rc) madvise(f->map, page, MADV_DONTNEED);
        }
        unmap_text(f);
        *bytes += f->size;
    }
    return rc ? -1 : 0;
}

// --out FILE.json: that file; FOLDER: both files of a tokenizer in it.
static void train_vocabulary(const Options *o) {
    char folder[CKPT_PATH], *name = NULL, a[32];
    const size_t len = strlen(o->out);
    const int is_file = len > 5 && !strcmp(o->out + len - 5, ".json");
    Err err;
    Learner l;
    Tokenizer t;
    Data d;
    uint64_t bytes = 0;
    if (len > CKPT_PATH - 128) die(USER_ERROR, "--out: the name is too long");
    snprintf(folder, sizeof folder, "%s", o->out);
    if (is_file) {
        name = strrchr(folder, '/');
        if (name) *name++ = 0;
        if (name && !*folder) strcpy(folder, "/");
    }
    const char *file = !is_file ? NULL : name ? name : o->out;
    if (is_file && !name) strcpy(folder, ".");
    if (is_file ? is_folder(o->out) : !is_folder(o->out) && !access(o->out, F_OK))
        die(USER_ERROR, "--out %s: expected %s, found %s", o->out,
            is_file ? "the name of a file" : "a folder, or a name that ends in .json",
            looks_like(o->out));
    if (!o->overwrite && (is_file ? !access(o->out, F_OK) : has_file(o->out, "tokenizer.json")))
        die(USER_ERROR, "--out %s: a tokenizer is there already; --overwrite replaces it", o->out);
    list_texts(&d, o);
    const double t0 = now_s();
    if (learner_open(&l, &err)) die(USER_ERROR, "%s", err.text);
    if (tokenize_texts(&d, NULL, NULL, &l, &bytes, &err)) die(RUN_ERROR, "%s", err.text);
    const double t1 = now_s();
    if (learner_learn(&l, &t, o->train_vocab, &err)) die(RUN_ERROR, "%s", err.text);
    const double t2 = now_s();
    if (t.vocab_size < o->train_vocab)
        warn("no pair occurs twice after %d merges: the vocabulary has %d tokens, not %d",
            t.vocab_size - 257, t.vocab_size, o->train_vocab);
    if (make_folders(folder, &err) || tokenizer_save_as(&t, folder, file, &err))
        die(RUN_ERROR, "%s", err.text);
    printf("vocabulary: %d tokens from %s bytes, %llu different words: counted in %.1f s, learned "
           "in %.1f s: %s\n",
        t.vocab_size, human((double)bytes, a), (unsigned long long)stbds_arrlenu(l.word), t1 - t0,
        t2 - t1, o->out);
    learner_close(&l);
    tokenizer_free(&t);
    data_close(&d);
}

// What is in a folder: nothing, what write_shards puts there, or something else too.
enum { EMPTY, SHARDS, OTHER };
static int content_of(const char *path) {
    DIR *dir = opendir(path);
    const struct dirent *e;
    int found = dir ? EMPTY : OTHER;
    while (dir && (e = readdir(dir))) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        const int ours = !strncmp(e->d_name, "tokens_", 7) || !strncmp(e->d_name, "tokenizer", 9);
        if (found != OTHER) found = ours ? SHARDS : OTHER;
    }
    if (dir) closedir(dir);
    return found;
}

/* Everything is written into a folder beside --out, which then takes that name: what has the name is
   whole. */
static void write_shards(const Options *o) {
    static Shards s;
    char out[CKPT_PATH], parent[CKPT_PATH], old[CKPT_PATH], a[32], b[32];
    Err err;
    Tokenizer t;
    Data d;
    uint64_t bytes = 0;
    snprintf(out, sizeof out, "%s", o->out);
    if (strlen(o->out) > CKPT_PATH - 128) die(USER_ERROR, "--out: the name is too long");
    while (strlen(out) > 1 && out[strlen(out) - 1] == '/') out[strlen(out) - 1] = 0;
    char *slash = strrchr(out, '/');
    const char *name = slash ? slash + 1 : out;
    if (!*name || !strcmp(name, ".") || !strcmp(name, ".."))
        die(USER_ERROR, "--out %s: expected the name of a new folder", o->out);
    snprintf(parent, sizeof parent, "%.*s", slash ? (int)(slash - out) : 1, slash ? out : ".");
    if (slash == out) strcpy(parent, "/");
    if ((size_t)snprintf(s.folder, sizeof s.folder, "%s/.%s.tmp", parent, name) >=
            sizeof s.folder ||
        (size_t)snprintf(old, sizeof old, "%s/.%s.old", parent, name) >= sizeof old)
        die(USER_ERROR, "--out: the name is too long");
    if (!access(out, F_OK)) {
        if (!is_folder(out))
            die(USER_ERROR, "--out %s: expected a folder, found %s", o->out, looks_like(out));
        const int found = content_of(out);
        if (found == OTHER)
            die(USER_ERROR, "--out %s: there are other files than shards in it; choose another",
                o->out);
        if (found == SHARDS && !o->overwrite)
            die(USER_ERROR, "--out %s: there are shards in it; --overwrite replaces them", o->out);
    }
    if (!o->vocab)
        tokenizer_bytes(&t);
    else if (tokenizer_open(&t, o->vocab, &err))
        die(USER_ERROR, "--vocab %s", err.text);
    list_texts(&d, o);
    s.fd = -1;
    s.limit = o->shard_tokens;
    s.wide = t.vocab_size > 65536;
    if (make_folders(parent, &err) || remove_path(s.folder, &err)) die(RUN_ERROR, "%s", err.text);
    if (mkdir(s.folder, 0777))
        die(RUN_ERROR, "%s: cannot make this folder: %s", shown(s.folder), strerror(errno));
    const double t0 = now_s();
    int rc = tokenize_texts(&d, &t, &s, NULL, &bytes, &err) || shard_end(&s, &err) ||
        tokenizer_save(&t, s.folder, &err) || sync_folder(s.folder, &err);
    if (!rc) {
        const int there = !access(out, F_OK);
        if (there ? remove_path(old, &err) : 0) rc = 1;
        if (!rc && (there ? ckpt_replace(s.folder, out, old) : rename(s.folder, out)))
            rc = fail_os(&err, out, "cannot give the shards this name");
        if (!rc) rc = sync_folder(parent, &err) || (there && remove_path(old, &err));
    }
    if (rc) {
        Err ignored;
        if (s.fd >= 0) close(s.fd);
        remove_path(s.folder, &ignored);
        die(RUN_ERROR, "%s", err.text);
    }
    const double seconds = now_s() - t0;
    printf("tokens: %s in %d file%s of %d bits, from %d text%s of %s bytes (%.3f bytes a token), "
           "%.1f MB/s: %s\n",
        human((double)s.tokens, a), s.files, s.files == 1 ? "" : "s", s.wide ? 32 : 16, d.n_files,
        d.n_files == 1 ? "" : "s", human((double)bytes, b), (double)bytes / (double)s.tokens,
        (double)bytes / seconds / 1e6, o->out);
    tokenizer_free(&t);
    data_close(&d);
}

static void command_tokenize(const Options *o) {
    if (!o->input.n)
        die(USER_ERROR, "--input: expected a text file, a folder or a pattern; none was given");
    if (!o->out)
        die(USER_ERROR, "--out: expected %s",
            o->train_vocab ? "a name for the vocabulary, NAME.json or a folder"
                           : "a folder for the shards");
    if (o->train_vocab && o->vocab)
        die(USER_ERROR, "--train-vocab and --vocab exclude each other: learn one, or use one");
    signal(SIGINT, tokenize_signal);
    signal(SIGTERM, tokenize_signal);
    if (o->train_vocab)
        train_vocabulary(o);
    else
        write_shards(o);
}

// -------------------------------------------------------------------------------------------------
// place

// Refuses parts that do not divide the whole, and names those that do.
static void check_divisor(const char *flag, int parts, int whole, const char *what) {
    char list[512] = "";
    if (whole % parts == 0) return;
    for (int i = 1; i <= whole; i++)
        if (whole % i == 0 && strlen(list) < sizeof list - 16)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%d", i > 1 ? ", " : "", i);
    die(USER_ERROR, "%s: expected a divisor of %s, one of %s, found %d", flag, what, list, parts);
}

// The shape of the newest checkpoint of the run in --log.
static void read_newest_config(Config *c, const char *out) {
    char folder[CKPT_PATH];
    int64_t *steps;
    int n;
    Err err;
    if (ckpt_list(out, &steps, &n) || !n)
        die(USER_ERROR, "--log %s: expected the folder of a run with checkpoints, found %s", out,
            is_folder(out) ? "a folder without" : looks_like(out));
    if (step_path(folder, out, "", steps[n - 1], "", &err)) die(USER_ERROR, "%s", err.text);
    free(steps);
    read_config(c, folder);
}

static void command_place(const Options *o) {
    char out[CKPT_PATH], path[CKPT_PATH], what[64];
    Config c;
    PlaceSteps steps;
    PlaceRouting routing;
    Err err;
    if (!o->log) die(USER_ERROR, "--log: expected the folder of a run; none was given");
    if (!o->ranks) die(USER_ERROR, "--ranks: expected a number of ranks; none was given");
    read_newest_config(&c, o->log);
    if (!moe_layers(&c))
        die(USER_ERROR, "--log %s: expected a model with experts to place, found a dense one",
            o->log);
    if (c.n_experts > PLACE_EXPERTS)
        die(USER_ERROR, "--log %s: expected a model of at most %d experts a layer, found %d",
            o->log, PLACE_EXPERTS, c.n_experts);
    snprintf(what, sizeof what, "the %d experts of a layer", c.n_experts);
    check_divisor("--ranks", o->ranks, c.n_experts, what);
    snprintf(what, sizeof what, "--ranks %d", o->ranks);
    check_divisor("--nodes", o->nodes, o->ranks, what);
    if (o->out ? snprintf(out, sizeof out, "%s", o->out) >= CKPT_PATH
               : path_join(out, o->log, "placement.json", &err))
        die(USER_ERROR, "--out: the name is too long");
    snprintf(path, sizeof path, "%s", out); // the folder that it is in
    char *slash = strrchr(path, '/');
    if (slash) slash[slash == path] = 0;
    if (slash && !is_folder(path))
        die(USER_ERROR, "--out %s: expected a file in a folder that is there, found %s for %s", out,
            looks_like(path), path);
    if (!placement_may_replace(out))
        die(USER_ERROR, "--out %s: expected a new file or a placement, found %s", out,
            looks_like(out));
    const size_t cells = (size_t)c.n_layers * c.n_experts;
    double *load = malloc(cells * sizeof *load);
    int *before = malloc(2 * cells * sizeof *before), *after = before + cells;
    if (!load || !before) die(RUN_ERROR, "no memory to place %zu experts", cells);
    if (path_join(path, o->log, "metrics.jsonl", &err) || place_loads(path, &c, load, &steps, &err))
        die(USER_ERROR, "%s", err.text);
    printf("loads: the recent half of the %lld steps recorded in %s, %lld to %lld\n",
        (long long)steps.recorded, shown(path), (long long)steps.first, (long long)steps.last);
    const PlaceRouting *r = NULL;
    if (path_join(path, o->log, "routing.jsonl", &err)) die(USER_ERROR, "%s", err.text);
    struct stat st;
    if (!stat(path, &st) && st.st_size) { // a run that has not come to its first record: empty
        if (place_routing(path, &c, &routing, &err)) die(USER_ERROR, "%s", err.text);
        r = &routing;
        printf("co-selections: %lld steps from the recent half of the %lld recorded in %s, %lld to "
               "%lld, %d tokens\n",
            (long long)r->steps.used, (long long)r->steps.recorded, shown(path),
            (long long)r->steps.first, (long long)r->steps.last, r->rows);
    } else {
        printf("co-selections: no %s, so loads alone count; train --routing-every N records them\n",
            shown(path));
    }
    placement_even(&c, before);
    if (placement_make(&c, o->ranks, o->nodes, load, r, after, &err))
        die(RUN_ERROR, "%s", err.text);
    if (placement_write(out, &c, o->ranks, after, &err)) die(RUN_ERROR, "%s", err.text);
    printf("placement: %d experts of %d layers on %d rank%s, %d each, on %d node%s: %s\n\n",
        c.n_experts, moe_layers(&c), o->ranks, o->ranks == 1 ? "" : "s", c.n_experts / o->ranks,
        o->nodes, o->nodes == 1 ? "" : "s", shown(out));
    placement_print(stdout, &c, o->ranks, o->nodes, load, r, before, after);
    if (r) free(routing.topk);
    free(before);
    free(load);
}

#endif
