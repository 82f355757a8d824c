/* test_fuzz.c: hostile files. A target is a function (data, size) that gives any bytes to a reader
   as a file of one kind, and then asks for what must hold whatever they are:

     safetensors   a header and its tensors, alone and as a model's; bytes that begin with '{' are
                   an index of two shards instead. Accepted: every tensor is found by its name, they
                   tile the file, every element can be read
     config        config.json. Accepted: config_check holds, and the same comes back when it is
                   written and read again
     tokenizer     tokenizer.json, vocab.bpe, llm.c's tokenizer.bin. Accepted: every text comes back
                   from its tokens, and what is saved gives the same tokens
     shard         llm.c's .bin shards, and any other text. Accepted: rows hold the file's tokens,
                   all below the vocabulary, or targets of -1

   Refused: one line that names the file. A crash, a report of a sanitizer, a hang and memory taken
   on the word of a file are findings too.

   It is compiled in two ways. With -DFUZZ_TARGET=fuzz_config and clang's -fsanitize=fuzzer it is a
   libFuzzer program: `make fuzz FUZZ_S=60`. Otherwise it is a test like the others: ./test_fuzz
   gives each target the files of data/fuzz/TARGET, then a few thousand changes of them, the same
   ones every time; each target in a process of its own, so that a crash is a failure with the name
   of its input. ./test_fuzz TARGET FILE runs one file, for a debugger. FUZZ=FOLDER is where
   data/fuzz lies.

   A seed is named after what it must be: good-NAME is accepted, bad-NAME refused. A finding becomes
   a seed when its reader is mended. The first ones were written with the trainer's own functions
   (config_write, model_write, tokenizer_save, data/golden's configurations), and by hand where they
   are text; the shards have a header and few tokens.

   Start reading at "targets". */
#include "moe.h"

#include <sys/mman.h>
#include <unistd.h>

// What a reader warns of would drown what is found.
#define warn(...) ((void)snprintf(fuzz_warning, sizeof fuzz_warning, __VA_ARGS__))
static char fuzz_warning[1024];
// Files that are gone a moment later need not reach a disk.
#define fsync(fd)                                ((void)(fd), 0)
// A file is mapped as a copy of its size to the byte: a sanitizer sees who reads beyond its end,
// which in a mapping are zeros up to the end of the page.
#define mmap(at, n, protection, flags, fd, from) map_copy(n, fd)
#define munmap(p, n)                             free(p)
static void *map_copy(size_t n, int fd);

#include "dataloader.h"
#include "run_folder.h"
#include "test_report.h"
#include "tokenizer.h"

#include <signal.h>
#include <sys/wait.h>

enum { INPUT_MOST = 1 << 16 }; // bytes; what is longer is cut

static void *map_copy(size_t n, int fd) {
    void *p = malloc(n);
    if (p && read_up_to(fd, p, n) == (ssize_t)n) return p;
    free(p);
    return MAP_FAILED;
}

// -------------------------------------------------------------------------------------------------
// what must hold

// What the parent of a test process knows of it when it is dead.
static struct Progress {
    long runs, accepted;
    char input[300], broken[900];
} * progress;

/* What does not hold ends the process: libFuzzer keeps the input of one that aborts. */
__attribute__((format(printf, 2, 3))) static void hold(int ok, const char *fmt, ...) {
    char text[sizeof progress->broken];
    va_list ap;
    if (ok) return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (progress) {
        memcpy(progress->broken, text, sizeof text);
        _exit(1);
    }
    fprintf(stderr, "test_fuzz: %s\n", text);
    abort();
}

// A refusal is one line that names the file.
static void hold_refused(int rc, const char *file) {
    int plain = 1;
    for (const char *c = err.text; *c; c++) plain &= (unsigned char)*c >= 32 && *c != 127;
    hold(rc == -1, "refused with %d, expected -1", rc);
    hold(err.text[0] && plain, "refused, expected one line of text, found '%s'", err.text);
    hold(strstr(err.text, file) != NULL, "refused without the file's name %s: %s", file, err.text);
}

// -------------------------------------------------------------------------------------------------
// targets: each returns whether the file was accepted

// For safe_write: the content of tensor i, from an array of pointers.
static const void *nth(void *ctx, int i) { return ((const void **)ctx)[i]; }

// The model that safetensors/good-model is.
static const Config tiny = {.vocab_size = 3,
    .seq_len = 8,
    .n_layers = 1,
    .d_model = 4,
    .n_heads = 2,
    .n_kv_heads = 1,
    .head_dim = 2,
    .n_experts = 2,
    .top_k = 1,
    .d_expert = 2,
    .d_dense = 2,
    .qk_norm = QK_NORM_HEAD,
    .norm_topk = 1,
    .tied = 1,
    .rope_theta = 1e4,
    .norm_eps = 1e-5};

static void copy(void *to, const void *from, size_t n) { memcpy(to, from, n); }
static void wait_for_nothing(void) {}
static const Backend in_memory = {.name = "memory",
    .param_type = F32,
    .grad_type = F32,
    .stat_type = F32,
    .to_device = copy,
    .to_host = copy,
    .sync = wait_for_nothing};

static void hold_safe_file(const SafeFile *f) {
    uint64_t header, all = 0;
    static volatile double element; // so that it is read indeed
    memcpy(&header, f->map, 8);
    hold(header <= f->size - 8, "a header of %llu bytes in a file of %zu",
        (unsigned long long)header, f->size);
    SafeTensor *t = (SafeTensor *)malloc(((size_t)f->n + 1) * sizeof *t);
    must(t != NULL, "memory");
    if (f->n) memcpy(t, f->tensor, (size_t)f->n * sizeof *t);
    qsort(t, (size_t)f->n, sizeof *t, safe_by_place);
    for (int i = 0; i < f->n; all += t[i++].bytes) {
        uint64_t count = 1;
        const SafeTensor *found = safe_find(f, t[i].name);
        hold(found && found->data == t[i].data && found->bytes == t[i].bytes,
            "tensor %s is not found by its name", shown(t[i].name));
        hold(t[i].data == f->map + 8 + header + all, "tensor %s overlaps another, or leaves a gap",
            shown(t[i].name));
        hold(t[i].bytes <= f->size - 8 - header - all, "tensor %s ends outside the file",
            shown(t[i].name));
        for (int d = 0; d < t[i].rank; d++) count *= (uint64_t)t[i].shape[d];
        hold(t[i].count == count && t[i].bytes == count * dtype_size(t[i].dtype),
            "tensor %s: %zu elements in %zu bytes, its shape has %llu", shown(t[i].name),
            t[i].count, t[i].bytes, (unsigned long long)count);
        for (size_t k = 0; k < t[i].count; k++) element = element_value(t[i].data, t[i].dtype, k);
    }
    hold(8 + header + all == f->size, "the tensors hold %llu bytes of a file of %zu with %llu",
        (unsigned long long)all, f->size, (unsigned long long)header);
    (void)element;
    free(t);
}

TEST_FN int fuzz_safetensors(const unsigned char *data, size_t size) {
    static unsigned char *params;
    static TensorTable table;
    if (!params) { // the model, and the shards beside an index
        static const char half[] = "0123456789abcdef";
        const void *at[] = {half, half};
        const SafeEntry a[] = {{"x", F32, 1, {2}}, {"y", BF16, 2, {2, 2}}},
                        b[] = {{"z", F64, 0, {0}}, {"empty", F16, 2, {0, 3}}};
        must(!make_folders("index", &err) && !make_folders("in", &err), "folders");
        must(!safe_write("index/a.safetensors", a, 2, nth, at, &err), "shard");
        must(!safe_write("index/b.safetensors", b, 2, nth, at, &err), "shard");
        must(!tensor_table_build(&table, &tiny, 4), "tensor table");
        params = (unsigned char *)calloc(table.elements, 4);
        must(params != NULL, "memory");
    }
    const int index = size && data[0] == '{';
    const char *folder = index ? "index/" : "in/";
    put_file(index ? "index/model.safetensors.index.json" : "in/model.safetensors", data, size);
    Weights w;
    int rc = weights_open(&w, folder, "model.safetensors", &err), listed = 0;
    if (rc) {
        hold_refused(rc, folder);
        hold(!w.file && !w.used && !w.n, "refused, and still open");
        return 0;
    }
    for (int i = 0; i < w.n; i++) {
        hold_safe_file(&w.file[i]);
        for (int k = 0; k < w.file[i].n; k++) {
            Found at;
            const SafeTensor *t = &w.file[i].tensor[k];
            hold(weights_take(&w, t->name, &at) && at.tensor == t && at.file == i,
                "tensor %s is not found among the files", shown(t->name));
            listed++;
        }
    }
    hold(!index || listed == 2 || listed == 4, "%d tensors by way of an index", listed);
    weights_close(&w);
    const int is_model = model_check(folder, &tiny, &table, &in_memory, &err);
    if (is_model) hold_refused(is_model, folder);
    rc = model_read(folder, &tiny, &table, &in_memory, params, NULL, &err);
    if (rc) hold_refused(rc, folder);
    hold(rc == 0 || is_model || strstr(err.text, "does not fit into"),
        "model_check accepts what model_read refuses: %s", err.text);
    hold(rc || !is_model, "model_read accepts what model_check refuses");
    return 1;
}

TEST_FN int fuzz_config(const unsigned char *data, size_t size) {
    static int ready;
    Config c, again;
    if (!ready++) must(!make_folders("in", &err) && !make_folders("out", &err), "folders");
    put_file("in/config.json", data, size);
    int rc = config_read(&c, "in", &err);
    if (rc) {
        hold_refused(rc, "in/config.json");
        return 0;
    }
    hold(!config_check(&c, &err), "accepted, but config_check refuses it: %s", err.text);
    hold(!config_write("out", &c, 0.01, F32, c.vocab_size - 1, &err), "cannot be written again: %s",
        err.text);
    hold(!config_read(&again, "out", &err), "cannot be read again: %s", err.text);
    // a width that no layer has is not kept by every architecture
    if (!c.dense_layers) again.d_dense = c.d_dense;
    hold(!memcmp(&c, &again, sizeof c), "another model when it is written and read again");
    return 1;
}

/* The tokens of a text with both its edges, which must give it back; for the caller to free. */
static uint32_t *hold_text(Tokenizer *t, const unsigned char *text, size_t n, size_t *count) {
    const size_t edge = t->eot >= 0;
    uint32_t *token;
    size_t at = 0, len;
    hold(!tokenizer_encode(t, text, n, TEXT_BEGINS | TEXT_ENDS, &token, count, &err),
        "cannot encode: %s", err.text);
    hold(!edge ||
            (*count > 1 && token[0] == (uint32_t)t->eot && token[*count - 1] == (uint32_t)t->eot),
        "the end-of-text token %d is not around a text", t->eot);
    for (size_t i = edge; i + edge < *count; i++) {
        hold(token[i] < (uint32_t)t->vocab_size, "token %zu is %u, of a vocabulary of %d", i,
            token[i], t->vocab_size);
        const unsigned char *bytes = tokenizer_decode(t, (int)token[i], &len);
        hold(tokenizer_text_bytes(t, (int)token[i]) == len, "token %zu of a text is special", i);
        hold(len && len <= n - at && !memcmp(text + at, bytes, len),
            "another text comes back from byte %zu on", at);
        at += len;
    }
    hold(at == n, "%zu of %zu bytes come back", at, n);
    return token;
}

static void hold_same_tokenizer(const Tokenizer *t, const Tokenizer *u) {
    size_t n, k;
    hold(t->vocab_size == u->vocab_size && t->eot == u->eot && !t->bpe == !u->bpe,
        "saved with %d tokens, text ends with %d; read again: %d and %d", t->vocab_size, t->eot,
        u->vocab_size, u->eot);
    for (int i = 0; i < t->vocab_size; i++) {
        const unsigned char *a = tokenizer_decode(t, i, &n), *b = tokenizer_decode(u, i, &k);
        hold(n == k && !memcmp(a, b, n), "token %d has other bytes when it is read again", i);
        hold(tokenizer_text_bytes(t, i) == tokenizer_text_bytes(u, i),
            "token %d: special, or not, only when it is read again", i);
    }
}

TEST_FN int fuzz_tokenizer(const unsigned char *data, size_t size) {
    // white space of all widths, contractions, pieces of UTF-8, a word that goes to merge_long
    static const char hard[] = "Don't  we'll\t12 3\r\n\n \xc2\xa0\xe2\x80\x89\xe3\x80\x80 "
                               "\xc3\xa9\xf0\x9f\x98\x80\xf0\x9f\x98 \xff\xfe\xc0\x80\xed\xa0\x80\0"
                               "<|endoftext|></s> abababababababababababababababababababababababab"
                               "ababababababababababababababababababababababababababababa the the";
    static unsigned char text[sizeof hard + INPUT_MOST];
    static int ready;
    const size_t n = sizeof hard + size;
    Tokenizer t, u;
    if (!ready++) must(!make_folders("in", &err) && !make_folders("out", &err), "folders");
    put_file("in/tokenizer", data, size);
    int rc = tokenizer_open(&t, "in/tokenizer", &err);
    if (rc) {
        hold_refused(rc, "in/tokenizer");
        hold(!t.bpe, "refused, and still open");
        return 0;
    }
    memcpy(text, hard, sizeof hard);
    memcpy(text + sizeof hard, data, size);
    size_t count, again;
    uint32_t *token = hold_text(&t, text, n, &count);
    hold(!tokenizer_save(&t, "out", &err), "cannot be saved: %s", err.text);
    hold(!tokenizer_load(&u, "out", &err), "cannot be read again: %s", err.text);
    hold_same_tokenizer(&t, &u);
    uint32_t *other = hold_text(&u, text, n, &again);
    hold(count == again && !memcmp(token, other, count * sizeof *token),
        "other tokens when it is read again");
    free(token);
    free(other);
    tokenizer_free(&t);
    tokenizer_free(&u);
    return 1;
}

// Token i of a file, read without the reader.
static uint32_t file_token(const unsigned char *data, int width, uint64_t i) {
    uint32_t id = 0;
    memcpy(&id, data + (width == 1 ? 0 : SHARD_HEADER) + i * (uint64_t)width, (size_t)width);
    return id;
}

static void hold_rows(const Data *d, const unsigned char *data, int vocab) {
    enum { T_MOST = 64 };
    int x[T_MOST], y[T_MOST], source = -1;
    const int T = d->T, width = d->n_shards ? d->file[0].token_size : 1;
    uint64_t targets = 0, rows = data_val_rows(d);
    must(T <= T_MOST, "room for a row");
    if (width == 1) vocab = 256;
    for (uint64_t r = 0; r < 2 * d->train_rows; r++) { // two epochs
        data_train_rows(d, r, 1, x, y, &source);
        hold(source == 0, "row %llu is of file %d", (unsigned long long)r, source);
        for (int t = 0; t < T; t++) {
            hold(x[t] >= 0 && x[t] < vocab && y[t] >= 0 && y[t] < vocab,
                "row %llu: %d is followed by %d", (unsigned long long)r, x[t], y[t]);
            hold(!t || x[t] == y[t - 1], "row %llu is no run of tokens", (unsigned long long)r);
        }
    }
    for (uint64_t r = 0; r < rows + 2; r++) {
        const int n = data_val_row(d, r, x, y);
        hold(n <= T && (n > 0) == (r < rows), "validation row %llu has %d targets",
            (unsigned long long)r, n);
        targets += (uint64_t)n;
        for (int t = 0; t < T; t++) {
            const uint64_t at = r * (uint64_t)T + (uint64_t)t;
            hold(t < n ? x[t] >= 0 && x[t] < vocab && y[t] >= 0 && y[t] < vocab
                       : x[t] == 0 && y[t] == -1,
                "validation row %llu: %d is followed by %d", (unsigned long long)r, x[t], y[t]);
            if (t < n && !d->n_train)
                hold((uint32_t)x[t] == file_token(data, width, at) &&
                        (uint32_t)y[t] == file_token(data, width, at + 1),
                    "validation row %llu has not the file's tokens", (unsigned long long)r);
        }
    }
    hold(targets == d->val_targets, "%llu targets, expected %llu", (unsigned long long)targets,
        (unsigned long long)d->val_targets);
}

TEST_FN int fuzz_shard(const unsigned char *data, size_t size) {
    static const struct {
        int T, vocab, inputs, vals;
        double val_fraction;
    } as[] = {{1, 256, 1, 0, .1}, {7, 50257, 1, 0, .5}, {64, 65536, 1, 0, 0}, {5, 3, 1, 0, .9},
        {3, INT_MAX, 0, 1, 0}, {2, 1000, 1, 1, 0}};
    const char *const path[] = {"shard.bin"};
    int accepted_as = 0;
    put_file(path[0], data, size);
    for (size_t i = 0; i < COUNT(as); i++) {
        Data d;
        int rc = data_open(&d, path, as[i].inputs, path, as[i].vals, as[i].val_fraction, as[i].T,
            as[i].vocab, 5, NULL, NULL, &err);
        if (rc) {
            hold_refused(rc, path[0]);
            hold(!d.file && !d.train && !d.val, "refused, and still open");
            continue;
        }
        hold(d.train_tokens + d.val_tokens <= size * (uint64_t)d.n_files, "more tokens than bytes");
        hold_rows(&d, data, as[i].vocab);
        data_close(&d);
        accepted_as++;
    }
    return accepted_as > 0;
}

// A folder for the files, in memory if there is no word of where, becomes the current one.
static char dir[512];
static void enter_folder(void) {
    const char *tmp = getenv("TMPDIR");
    if (!tmp || !*tmp) tmp = access("/dev/shm", W_OK | X_OK) ? "/tmp" : "/dev/shm";
    snprintf(dir, sizeof dir, "%.480s/test_fuzz.XXXXXX", tmp);
    must(mkdtemp(dir) && !chdir(dir), dir);
    json_object_seed(1); // the same order of its tables every time
}

#ifdef FUZZ_TARGET

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int home = -1; // libFuzzer writes its corpus by relative names
    static int work = -1;
    if (home < 0) {
        home = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        enter_folder();
        work = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    must(!fchdir(work), dir);
    (void)FUZZ_TARGET(data, size < INPUT_MOST ? size : INPUT_MOST);
    must(!fchdir(home), "the folder before");
    return 0;
}

#else

// -------------------------------------------------------------------------------------------------
// changes to a file, from counters

static uint64_t drawn;
static uint64_t below(uint64_t n) { return data_hash(7, ++drawn, 0) % n; }

typedef struct Input {
    unsigned char data[INPUT_MOST];
    size_t size;
    char name[256];
} Input;

static void splice(Input *in, size_t at, size_t gone, const void *with, size_t n) {
    if (in->size - gone + n > INPUT_MOST) return;
    memmove(in->data + at + n, in->data + at + gone, in->size - at - gone);
    if (n) memcpy(in->data + at, with, n);
    in->size += n - gone;
}

// One of the numbers that readers get wrong, in place of one that is there, as text or as bytes.
static void change_number(Input *in) {
    static const char *const number[] = {"0", "1", "-1", "2", "255", "256", "257", "65536",
        "16777217", "1073741823", "1073741824", "2147483647", "2147483648", "4294967295",
        "4294967296", "9223372036854775807", "-9223372036854775808", "9223372036854775808",
        "18446744073709551615", "1e308", "1e-320", "0.5", "null", "\"\"", "[]", "{}", "true"};
    static const uint64_t value[] = {0, 1, 2, 255, 256, 257, 0x7fff, 0xffff, 0x7fffffff, 0x80000000,
        0xffffffff, INT64_MAX, (uint64_t)INT64_MAX + 1, UINT64_MAX};
    size_t at = (size_t)below(in->size), end;
    for (size_t i = 0; i < 200 && !strchr("-0123456789", in->data[at] | (in->data[at] == 0)); i++)
        at = (at + 1) % in->size;
    for (end = at; end < in->size && in->data[end] >= '0' && in->data[end] <= '9';) end++;
    if (end > at && below(4)) {
        while (at && in->data[at - 1] >= '0' && in->data[at - 1] <= '9') at--;
        const char *with = number[below(COUNT(number))];
        splice(in, at, end - at, with, strlen(with));
    } else { // mostly near the beginning, where binary headers are
        const size_t width = (size_t)1 << below(4);
        uint64_t v = value[below(COUNT(value))];
        if (!below(3)) v = in->size - below(4) * width;
        if (in->size < width) return;
        at = (size_t)below(below(2) && in->size > 16 + width ? 16 : in->size - width + 1);
        memcpy(in->data + at / width * width, &v, width);
    }
}

static void change(Input *in, const Input *other) {
    unsigned char block[256];
    size_t n = 1 + (size_t)below(sizeof block), at, from;
    if (!in->size) {
        *in = *other;
        return;
    }
    at = (size_t)below(in->size), from = (size_t)below(in->size);
    if (!below(3)) n = 1 + n % 8;
    if (n > in->size - from) n = in->size - from;
    memcpy(block, in->data + from, n);
    switch (below(10)) {
    case 0: in->data[at] ^= (unsigned char)(1 << below(8)); break;
    case 1: in->data[at] = (unsigned char)below(256); break;
    case 2: in->size = at; break;
    case 3: splice(in, at, 0, block, n); break;  // a block is there twice
    case 4: splice(in, from, n, NULL, 0); break; // or is missing
    case 5:                                      // or lies over another
        memcpy(in->data + at, block, n < in->size - at ? n : in->size - at);
        break;
    case 6: // this beginning, that end
        from = other->size ? (size_t)below(other->size) : 0;
        splice(in, at, in->size - at, other->data + from, other->size - from);
        break;
    default: change_number(in);
    }
}

// -------------------------------------------------------------------------------------------------
// the test

static const struct Target {
    const char *name;
    int (*run)(const unsigned char *data, size_t size);
    int changes; // so many of each file
} targets[] = {{"safetensors", fuzz_safetensors, 2000}, {"config", fuzz_config, 1000},
    {"tokenizer", fuzz_tokenizer, 400}, {"shard", fuzz_shard, 500}};

static void read_input(Input *in, const char *path) {
    FILE *f = fopen(path, "rb");
    must(f != NULL, path);
    in->size = fread(in->data, 1, INPUT_MOST, f);
    must(!ferror(f) && !fclose(f), path);
    const char *slash = strrchr(path, '/');
    snprintf(in->name, sizeof in->name, "%s", slash ? slash + 1 : path);
}

// The files of a folder, in the order of their names; how many.
static int read_seeds(Input **in, const char *folder) {
    struct dirent **entry;
    char path[CKPT_PATH];
    int n = scandir(folder, &entry, NULL, alphasort), seeds = 0;
    must(n >= 0, folder);
    *in = (Input *)calloc((size_t)n + 1, sizeof **in);
    must(*in != NULL, "memory");
    for (int i = 0; i < n; i++) {
        if (entry[i]->d_name[0] != '.') {
            must(!path_join(path, folder, entry[i]->d_name, &err), folder);
            read_input(&(*in)[seeds++], path);
        }
        free(entry[i]);
    }
    free(entry);
    return seeds;
}

static void run_target(const struct Target *target, const char *folder) {
    static Input changed;
    Input *in;
    const int seeds = read_seeds(&in, folder);
    must(seeds > 0, folder);
    for (int i = 0; i < seeds; i++) {
        snprintf(progress->input, sizeof progress->input, "%s", in[i].name);
        progress->runs++;
        const int good = target->run(in[i].data, in[i].size);
        hold(good || strncmp(in[i].name, "good-", 5), "refused: %s", err.text);
        hold(!good || strncmp(in[i].name, "bad-", 4), "accepted");
    }
    for (int k = 0; k < target->changes; k++)
        for (int i = 0; i < seeds; i++) {
            changed = in[i];
            const int n = below(3) ? 1 : 2 + (int)below(4);
            for (int c = 0; c < n; c++) change(&changed, &in[below((uint64_t)seeds)]);
            snprintf(progress->input, sizeof progress->input, "%s, change %d", in[i].name, k);
            progress->runs++;
            progress->accepted += target->run(changed.data, changed.size);
        }
    free(in);
}

static void test_target(const struct Target *target, const char *folder) {
    enum { SECONDS = 300 }; // for all of a target, under sanitizers too
    int status = 0;
    memset(progress, 0, sizeof *progress);
    const pid_t child = fork();
    must(child >= 0, "fork");
    if (!child) {
        alarm(SECONDS);
        run_target(target, folder);
        exit(0); // and not _exit: leaks are looked for at the end
    }
    while (waitpid(child, &status, 0) < 0) must(errno == EINTR, "waitpid");
    const int code = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
    check(!progress->broken[0], "%s: %s", progress->input, progress->broken);
    check(status == 0, "%s: %s %d", progress->input,
        WIFSIGNALED(status) ? "killed by signal" : "exit status", code);
    // changes that all files refuse, or none, would test little
    check(progress->accepted > 0 && progress->accepted < progress->runs,
        "%ld of %ld changed files are accepted", progress->accepted, progress->runs);
    snprintf(check_measured, sizeof check_measured, " (%ld files, %ld of the changed accepted)",
        progress->runs, progress->accepted);
}

static int one_file(const char *name, const char *path) {
    static Input in;
    read_input(&in, path);
    enter_folder();
    for (size_t i = 0; i < COUNT(targets); i++)
        if (!strcmp(targets[i].name, name))
            printf("%s: %s\n", name, targets[i].run(in.data, in.size) ? "accepted" : err.text);
    return chdir("/") || remove_path(dir, &err);
}

int main(int argc, char **argv) {
    char folder[CKPT_PATH], all[CKPT_PATH];
    const char *where = getenv("FUZZ");
    if (argc > 2) return one_file(argv[1], argv[2]);
    if (argc > 1 && !strcmp(argv[1], "-v"))
        verbose = 1;
    else if (argc > 1)
        filter = argv[1];
    must(realpath(where ? where : "data/fuzz", all) != NULL, "data/fuzz");
    enter_folder();
    progress = (struct Progress *)(mmap)(NULL, sizeof *progress, PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(progress != MAP_FAILED, "shared memory");
    for (size_t i = 0; i < COUNT(targets); i++) {
        if (!begin("fuzz/%s", targets[i].name)) continue;
        must(!path_join(folder, all, targets[i].name, &err), all);
#ifndef USE_PCRE2
        if (targets[i].run == fuzz_tokenizer) skipped = "built without PCRE2";
#endif
        if (!skipped) test_target(&targets[i], folder);
        finish();
    }
    // what failed is still there: the file that a target was given last
    if (failures) printf("    the last files are in %s\n", dir);
    if (!failures) must(!chdir("/") && !remove_path(dir, &err), dir);
    return failures != 0;
}

#endif
