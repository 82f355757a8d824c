/* test_golden.c: the same numbers as transformers. ./test_golden, from the root, runs every check,
   one line each on stdout:
     ok NAME | FAIL NAME: reason
   and exits with status 1 if one failed. ./test_golden WORD runs those whose name contains WORD; -v
   adds the measured errors.

   data/golden/NAME holds a tiny model as transformers saved it and, in expected/, token ids and
   what it made of them: logits, loss, the gradient of every parameter (see make_golden.py there).
   Here the folder is read, run forward and backward on the CPU, and compared: relative Frobenius
   norms ||x - ref|| / ||ref||, logits and loss to 1e-5, every gradient to 1e-4. NaN fails.

   The folders are of five architectures and stored in five ways: one file, shards, fused experts,
   float16, bfloat16. For the other direction, ./test_golden logits CHECKPOINT FILE writes ids and
   logits of a checkpoint as safetensors, for data/golden/check_hf.py. */
#include "checkpoint.h" // before gemm.h, whose `real` is a name in jansson.h
#include "model.h"

static const char *filter = "";
static int verbose, failures, tried;

static int wanted(const char *name) {
    const int yes = strstr(name, filter) != NULL;
    tried += yes;
    return yes;
}
static void report(const char *name, double error, double limit, const char *where) {
    const int fine = error <= limit;
    failures += !fine;
    if (!fine)
        printf("FAIL %s: error %.3e%s%s, limit %.0e\n", name, error, *where ? " in " : "", where,
            limit);
    else if (verbose)
        printf("ok %s %.1e%s%s\n", name, error, *where ? " at most, in " : "", where);
    else
        printf("ok %s\n", name);
    fflush(stdout);
}

// ||x - ref|| / ||ref||; where ref is all zeros, as of an expert without tokens, ||x||.
static double error_of(const float *x, const float *ref, size_t n) {
    double diff = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        diff += ((double)x[i] - ref[i]) * ((double)x[i] - ref[i]);
        norm += (double)ref[i] * ref[i];
    }
    return sqrt(diff) / (norm > 0 ? sqrt(norm) : 1);
}

static float *floats(size_t n) { // for the caller to free
    float *p = malloc(n * sizeof *p + 1);
    if (!p) die(RUN_ERROR, "no memory");
    memset(p, 0xFF, n * sizeof *p);
    return p;
}

/* The values of a float32 tensor of this many elements, from a file that is open. */
static float *values(const SafeFile *f, const char *name, size_t n) {
    const SafeTensor *t = safe_find(f, name);
    if (!t || t->dtype != F32 || t->count != n)
        die(RUN_ERROR, "%s: %s: expected %zu float32 values: make_golden.py writes them", f->path,
            name, n);
    float *x = floats(n);
    memcpy(x, t->data, t->bytes);
    return x;
}

// A model for N = B*T tokens, with the weights of the folder.
static void open_model(Model *m, const char *folder, int B, int T, int train) {
    Err err;
    Config c;
    const ModelShape s = {.B = B, .T = T, .train = train};
    if (config_read(&c, folder, &err)) die(RUN_ERROR, "%s", err.text);
    if (c.seq_len < T) die(RUN_ERROR, "%s: expected %d positions, found %d", folder, T, c.seq_len);
    model_build(m, &c, backend_cpu(), s, NULL);
    if (model_read(folder, &c, &m->table, m->b, m->base[A_PARAMS], m->base[A_BUFFERS], &err))
        die(RUN_ERROR, "%s", err.text);
    model_params_changed(m);
}

static float *logits_of(const Model *m, int N) { // (N,V), of the last forward pass
    float *out = floats((size_t)N * m->c.vocab_size);
    m->b->linear_forward(out, m->lnf, m->head, N, m->scratch);
    return out;
}

// The parts of every tensor, each a tensor of the file: the largest error, and whose it is.
static double worst_gradient(const Model *m, const float *ref, char *name, size_t size) {
    const float *grads = (const float *)m->base[A_GRADS];
    double worst = -1;
    for (int i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensor[i];
        size_t at = x->offset;
        for (int p = 0; p < x->row->parts; p++) {
            const size_t n = dim_of(&m->c, x->row->rows[p]) * x->cols;
            const double e = error_of(grads + at, ref + at, n);
            if (!(e <= worst)) worst = e, stored_name(name, size, &m->c, x, p);
            if (isnan(e)) return e;
            at += n;
        }
    }
    return worst;
}

static void test_golden(const char *arch) {
    enum { B = 2, T = 70, N = B * T };
    char folder[64], expected[96], path[128], name[3][64], where[160] = "";
    Err err;
    snprintf(folder, sizeof folder, "data/golden/%s", arch);
    snprintf(expected, sizeof expected, "%s/expected", folder);
    snprintf(path, sizeof path, "%s/golden.safetensors", expected);
    int any = 0;
    for (int i = 0; i < 3; i++) {
        static const char *const what[] = {"logits", "loss", "gradients"};
        snprintf(name[i], sizeof name[i], "golden/%s/%s", arch, what[i]);
        any |= strstr(name[i], filter) != NULL;
    }
    if (!any) return;
    Model m;
    open_model(&m, folder, B, T, 1);
    if (strcmp(arch_rows[config_arch(&m.c)].type, arch))
        die(RUN_ERROR, "%s: read as a %s", folder, arch_rows[config_arch(&m.c)].type);
    SafeFile f;
    if (safe_open(&f, path, &err)) die(RUN_ERROR, "%s", err.text);
    const size_t NV = (size_t)N * m.c.vocab_size;
    float *ids = values(&f, "input_ids", N), *logits = values(&f, "logits", NV);
    float *loss = values(&f, "loss", 1), *grads = floats(m.table.elements);
    safe_close(&f);
    if (model_read(expected, &m.c, &m.table, m.b, grads, NULL, &err))
        die(RUN_ERROR, "%s", err.text);

    int tokens[N], targets[N];
    for (int n = 0; n < N; n++) {
        tokens[n] = (int)ids[n];
        targets[n] = n % T == T - 1 ? -1 : (int)ids[n + 1];
    }
    const OptimConfig o = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .max_norm = 1};
    model_begin_step(&m, 1, 0, &o);
    model_set_tokens(&m, tokens, targets, N);
    model_forward(&m, B, T, 0, 1);
    float *mine = logits_of(&m, N);
    model_backward(&m, B, T, 1.0 / (N - B), 1);
    const float l = (float)model_state(&m).loss;
    if (wanted(name[0])) report(name[0], error_of(mine, logits, NV), 1e-5, "");
    if (wanted(name[1])) report(name[1], error_of(&l, loss, 1), 1e-5, "");
    if (wanted(name[2])) {
        const double e = worst_gradient(&m, grads, where, sizeof where);
        report(name[2], e, 1e-4, where);
    }
    free(ids), free(logits), free(loss), free(grads), free(mine);
    model_free(&m);
}

static const void *nth(void *ctx, int i) { return ((const void **)ctx)[i]; }

// One sequence of T ids that look random, and their logits.
static void write_logits(const char *folder, const char *file) {
    enum { T = 48 };
    Model m;
    Err err;
    int tokens[T];
    float ids[T];
    open_model(&m, folder, 1, T, 0);
    const int V = m.c.vocab_size;
    for (int n = 0; n < T; n++) {
        tokens[n] = (int)(counter_hash(1, 2, (uint64_t)n) % (uint64_t)V);
        ids[n] = (float)tokens[n];
    }
    model_begin_step(&m, 1, 0, &(OptimConfig){.beta1 = 0.9, .beta2 = 0.95});
    model_set_tokens(&m, tokens, NULL, T);
    model_forward(&m, 1, T, 0, 0);
    float *logits = logits_of(&m, T);
    const SafeEntry entries[] = {{"input_ids", F32, 2, {1, T}}, {"logits", F32, 3, {1, T, V}}};
    const void *data[] = {ids, logits};
    if (safe_write(file, entries, 2, nth, data, &err)) die(RUN_ERROR, "%s", err.text);
    free(logits);
    model_free(&m);
}

int main(int argc, char **argv) {
    static const char *const archs[] = {"olmoe", "mixtral", "qwen3_moe", "qwen3", "llama"};
    if (argc == 4 && !strcmp(argv[1], "logits")) {
        write_logits(argv[2], argv[3]);
        return 0;
    }
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "-v"))
            verbose = 1;
        else
            filter = argv[i];
    for (size_t i = 0; i < sizeof archs / sizeof *archs; i++) test_golden(archs[i]);
    if (!tried) printf("FAIL test_golden: no check has '%s' in its name\n", filter), failures++;
    return failures != 0;
}
