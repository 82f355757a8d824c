/* test_files.c: what is read from disk and written to it: texts, tokenizers, models, checkpoints.
   ./test_files runs every check, one line each on stdout:
     ok NAME | FAIL NAME: reason | skip NAME: reason
   and exits with status 1 if one failed. ./test_files WORD runs those whose name contains WORD.

     data/        dataloader.h: the order of rows, windows, validation rows, which files are taken
     tokenizer/   every byte there and back; files that are refused
     safe/        safetensors: damaged files, and random damage to files of every kind
     config/      config.json there and back; what this model cannot express is refused
     model/       tensors there and back, conversions, files of another model
                  (config/of, config/arch, model/arch, model/shards, model/fused, model/tied: what
                  other programs write, in test_imports.h)
     run/         checkpoint folders: links, deleting, locks, what a killed run left
     place/       placement.h, in test_placement.h: the file, what a run recorded, the algorithm
     fault/       the same while memory and system calls fail and runs are killed, at every place

   The headers are compiled into this file, with the allocator and the system calls that they use
   replaced by those in test_faults.h: so the largest piece of memory taken is known, nothing leaks
   unseen, and every call in turn can be made to fail, or to be the last of a killed process. The
   backend is memory.

   A refusal is -1 with one line that names the file and says what was found, see refused(). All
   files are in a temporary folder, the current one. To add a damaged file, add a line to a table.
   Start reading at "safe". */
#include "test_faults.h"
#include "test_report.h"

// -------------------------------------------------------------------------------------------------
// reporting

static long live_before;

static void note_memory(void) {
    live_before = mem.live;
    mem.largest = 0;
}
static void check_memory(void) {
    check(mem.live == live_before, "%ld pieces of memory not freed", mem.live - live_before);
}

// One line that has both words (NULL: any), and no memory taken on the word of the file.
static void refused(int rc, const char *word, const char *other) {
    enum { MOST = 4 << 20 }; // a buffer for conversions
    refused_with(rc, word, other);
    check(mem.largest <= MOST, "%zu bytes of memory asked for before: %s", mem.largest, err.text);
    err.text[0] = 0;
}

// -------------------------------------------------------------------------------------------------
// files, and random numbers from counters

static void put_text(const char *path, const char *text) { put_file(path, text, strlen(text)); }
static void folder(const char *path) { must(!make_folders(path, &err), path); }
static unsigned char *get(const char *path, size_t *n) { // for the caller to free
    FILE *f = fopen(path, "rb");
    unsigned char *p = malloc(1 << 20);
    must(f && p, path);
    *n = fread(p, 1, 1 << 20, f);
    fclose(f);
    return p;
}
static int exists(const char *path) { return !access(path, F_OK); }

static const char *names(const char *path) { // in a folder, in byte order, with a space after each
    static char text[4096];
    struct dirent **e;
    int n = scandir(path, &e, NULL, alphasort);
    must(n >= 0, path);
    text[0] = 0;
    for (int i = 0; i < n; i++) {
        if (strcmp(e[i]->d_name, ".") && strcmp(e[i]->d_name, ".."))
            strcat(strcat(text, e[i]->d_name), " ");
        (free)(e[i]);
    }
    (free)(e);
    return text;
}

// For safe_write: the content of tensor i, from an array of pointers.
static const void *nth(void *ctx, int i) { return ((const void **)ctx)[i]; }

static uint64_t drawn;
static uint64_t below(uint64_t n) { return data_hash(5, ++drawn, 0) % n; }

/* TO/NAME = FROM/NAME, a JSON file, with an edit: objects are merged, "-" deletes a key, any other
   value takes the place of the old one. */
static void merge_into(json_t *j, json_t *edit) {
    const char *key;
    json_t *value;
    json_object_foreach(edit, key, value) {
        json_t *old = json_object_get(j, key);
        int gone = json_is_string(value) && !strcmp(json_string_value(value), "-");
        if (gone)
            json_object_del(j, key);
        else if (json_is_object(value) && json_is_object(old))
            merge_into(old, value);
        else
            json_object_set(j, key, value);
    }
}
static void merge(const char *from, const char *to, const char *name, const char *text) {
    char path[64];
    snprintf(path, sizeof path, "%s/%s", from, name);
    json_t *j = json_read(path, &err), *edit = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    must(j && edit, text);
    merge_into(j, edit);
    must(!json_write(to, name, j, &err), to);
    json_decref(j);
    json_decref(edit);
}

static const Config moe_shape = {.vocab_size = 256,
    .seq_len = 64,
    .n_layers = 3,
    .d_model = 48,
    .n_heads = 4,
    .n_kv_heads = 2,
    .head_dim = 8,
    .n_experts = 5,
    .top_k = 2,
    .d_expert = 20,
    .dense_layers = 1,
    .d_dense = 36,
    .qk_norm = QK_NORM_HEAD,
    .norm_topk = 1,
    .rope_theta = 10000.5,
    .norm_eps = 1e-6};

// -------------------------------------------------------------------------------------------------
// data

// An encoder whose tokens are numbers that never come twice: a token says where it is from.
typedef struct Numbers {
    size_t count; // of tokens, whatever the text; 0: of its bytes
    uint32_t next;
} Numbers;
static int number(void *ctx, const unsigned char *text, size_t n, int edges, uint32_t **id,
    size_t *count, Err *e) {
    (void)edges;
    Numbers *numbers = (Numbers *)ctx;
    if (!numbers) return fail(e, "%c%zu: the encoder says no", *text, n);
    *count = numbers->count ? numbers->count : n;
    if (!(*id = malloc(*count * sizeof **id))) return fail(e, "out of memory");
    for (size_t i = 0; i < *count; i++) (*id)[i] = numbers->next++;
    return 0;
}

static int vocabulary = 256; // what ids of shards must lie below

static int open_data(
    Data *d, const char *in, const char *val, double fraction, int T, Encode enc, void *ctx) {
    return data_open(
        d, &in, in != NULL, &val, val != NULL, fraction, T, vocabulary, 42, enc, ctx, &err);
}

/* Three files of `len` tokens, each with as many held out. Training: a window is a run of T+1
   tokens of one training part; (len - T) / T windows, at least one; no token is an input twice in
   an epoch. Validation: every token but a part's first is a target once, and the rest is -1. */
static void check_windows(int T, int len) {
    Data d;
    Numbers numbers = {(size_t)len, 0};
    char used[1000], at[40];
    int *x = calloc((size_t)T, sizeof *x), *y = calloc((size_t)T, sizeof *y), file = 0;
    uint64_t windows = (uint64_t)(len < 3 * T ? 1 : (len - T) / T);
    snprintf(at, sizeof at, "T %d, %d tokens", T, len);
    accepted(open_data(&d, "three", NULL, 0.5, T, number, &numbers));
    check(d.train_rows == 3 * windows, "%s: %d rows", at, (int)d.train_rows);
    for (uint64_t row = 0; row < 3 * d.train_rows; row++) {
        if (row % d.train_rows == 0) memset(used, 0, sizeof used);
        data_train_rows(&d, row, 1, x, y, &file);
        int begin = 2 * len * file; // each file has a training part, then a held-out one
        check(x[0] >= begin && y[T - 1] < begin + len, "%s: beyond its part", at);
        for (int t = 0; t < T; t++) {
            check(x[t] == x[0] + t && y[t] == x[t] + 1, "%s: position %d", at, t);
            check(!used[x[t]]++, "%s: token %d twice in an epoch", at, x[t]);
        }
    }
    memset(used, 0, sizeof used);
    for (uint64_t row = 0; row < data_val_rows(&d) + 2; row++) {
        int n = data_val_row(&d, row, x, y);
        check((n > 0) == (row < data_val_rows(&d)) && n <= T, "%s: %d in a row", at, n);
        for (int t = 0; t < T; t++) {
            int fine = t < n ? y[t] == x[t] + 1 && !used[y[t]]++ : y[t] == -1 && x[t] == 0;
            check(fine, "%s: validation, position %d of %d: target %d", at, t, n, y[t]);
        }
    }
    for (int i = 0; i < 6 * len; i++)
        check(used[i] == (i / len % 2 == 1 && i % len), "%s: token %d as a target", at, i);
    check(d.val_targets == 3 * (uint64_t)(len - 1), "%s: %d targets", at, (int)d.val_targets);
    data_close(&d);
    free(x);
    free(y);
}

static void test_rows(void) {
    Data d, e;
    Numbers numbers = {1000, 0};
    int x[64] = {0}, y[64] = {0}, x1[8] = {0}, y1[8] = {0}, file = 0;
    folder("three");
    put_file("three/a", "0123456789", 10), put_file("three/b", "0123456789", 10);
    put_file("three/c", "0123456789", 10);
    if (begin("data/permutation")) {
        char seen[4100];
        for (uint64_t n = 1; n <= 4097; n += n < 70 || n > 4090 ? 1 : n == 70 ? 30 : 61) {
            for (uint64_t key = 0, fixed = 0; key < 3; key++, fixed = 0) {
                memset(seen, 0, sizeof seen);
                for (uint64_t i = 0; i < n; i++) {
                    uint64_t p = data_permute(i, n, key);
                    check(p < n && !seen[p]++, "%d goes to %d of %d", (int)i, (int)p, (int)n);
                    fixed += p == i;
                }
                check(n < 500 || fixed < 12, "%d of %d stay in place", (int)fixed, (int)n);
            }
        }
        for (int s = 0; s < 60; s++)
            check(data_permute(1, UINT64_MAX >> s, 9) < UINT64_MAX >> s, "of 2^%d", 64 - s);
        int first[10] = {0};
        for (uint64_t key = 0; key < 10000; key++) first[data_permute(0, 10, key)]++;
        for (int i = 0; i < 10; i++)
            check(abs(first[i] - 1000) < 150, "0 goes to %d %d times", i, first[i]);
        finish();
    }
    if (begin("data/windows")) {
        for (int T = 1; T <= 8; T += T < 3 ? 1 : 5) {
            for (int len = T + 1; len <= 6 * T + 2; len++) check_windows(T, len);
        }
        finish();
    }
    accepted(open_data(&d, "three", NULL, 0, 8, number, &numbers));
    if (begin("data/counters-only")) { // a row by its number, however many are asked for at once
        for (uint64_t row = 0; row < 600; row += 61) {
            data_train_rows(&d, row, 8, x, y, NULL);
            for (uint64_t r = 8; r-- > 0;) {
                data_train_rows(&d, row + r, 1, x1, y1, NULL);
                check(!memcmp(x1, x + 8 * r, sizeof x1), "x of row %d", (int)(row + r));
                check(!memcmp(y1, y + 8 * r, sizeof y1), "y of row %d", (int)(row + r));
            }
        }
        data_train_rows(&d, UINT64_MAX, 1, x1, y1, NULL);
        finish();
    }
    if (begin("data/order")) { // shuffled, anew for each epoch and seed, and the same for ever
        int next = 0, epoch = 0, seed = 0, start = 0;
        uint64_t sum = 0;
        e = d, e.seed = 43;
        for (uint64_t row = 0; row < d.train_rows; row++) {
            data_train_rows(&d, row, 2, x, y, NULL);
            data_train_rows(&d, row + d.train_rows, 1, x1, y1, NULL);
            next += x[8] == x[0] + 8, epoch += x1[0] / 8 == x[0] / 8, start |= 1 << x1[0] % 8;
            sum = data_hash(sum, (uint64_t)x[0], (uint64_t)x1[0]);
            data_train_rows(&e, row, 1, x1, y1, NULL);
            seed += x1[0] / 8 == x[0] / 8, start |= 1 << x1[0] % 8;
        }
        check(next < 12, "%d rows follow one another", next);
        check(epoch < 12 && seed < 12, "%d as next epoch, %d with another seed", epoch, seed);
        check(start & (start - 1), "windows start at the same places in each epoch");
        check(sum == 0x89df7d956e180ffbu, "a resumed run would see another order: %llx",
            (unsigned long long)sum);
        finish();
    }
    data_close(&d);
    if (begin("data/bytes")) { // CR, 00 and FF are kept; to encode them as bytes changes nothing
        unsigned char text[3000];
        Tokenizer t;
        tokenizer_bytes(&t);
        for (size_t i = 0; i < sizeof text; i++) text[i] = (unsigned char)below(256);
        memcpy(text, "\r\n\0\xff\r\n\n\r", 8);
        put_file("bytes", text, sizeof text);
        accepted(open_data(&d, "bytes", NULL, 0.1, 8, NULL, NULL));
        accepted(open_data(&e, "bytes", NULL, 0.1, 8, tokenizer_encode, &t));
        check(d.train_tokens == 2700 && d.val_tokens == 300 && d.val_bytes == 299, "cut elsewhere");
        check(e.train_tokens == 2700 && e.val_tokens == 300 && e.val_bytes == 300, "encoded");
        for (uint64_t row = 0; row < d.train_rows; row++) {
            data_train_rows(&d, row, 1, x, y, &file);
            data_train_rows(&e, row, 1, x1, y1, NULL);
            check(!memcmp(x, x1, sizeof x1) && !memcmp(y, y1, sizeof y1), "row %d", (int)row);
        }
        for (uint64_t row = 0; row < data_val_rows(&d); row++) {
            int n = data_val_row(&d, row, x, y), same = data_val_row(&e, row, x1, y1) == n;
            same &= !memcmp(x, x1, sizeof x1) && !memcmp(y, y1, sizeof y1);
            for (uint64_t i = 0; i < (uint64_t)n; i++) same &= x[i] == text[2700 + 8 * row + i];
            check(same, "validation row %d", (int)row);
        }
        data_close(&d), data_close(&e);
        accepted(open_data(&d, "bytes", NULL, 0, 2999, NULL, NULL)); // one row, all of the text
        int *all = malloc(2 * 2999 * sizeof *all);
        data_train_rows(&d, 0, 1, all, all + 2999, NULL);
        for (int i = 0; i < 2999; i++)
            check(all[i] == text[i] && all[2999 + i] == text[i + 1], "byte %d", i);
        check(!d.val_tokens && !data_val_rows(&d), "validation without held-out text");
        data_close(&d);
        free(all);
        finish();
    }
}

// A shard of n tokens, first, first + 1, ...; size: of a token; its header's count may lie.
static void put_shard(const char *path, int size, int version, int64_t count, int n, int first) {
    const size_t bytes = 1024 + (size_t)n * (size_t)size;
    unsigned char *all = calloc(1, bytes);
    const int32_t head[3] = {size == 2 ? 20240520 : 20240801, version, (int32_t)count};
    memcpy(all, head, sizeof head);
    for (int i = 0; i < n; i++) {
        const uint32_t id = (uint32_t)(first + i);
        memcpy(all + 1024 + (size_t)i * (size_t)size, &id, (size_t)size); // little-endian
    }
    put_file(path, all, bytes);
    free(all);
}

static void test_shards(void) {
    enum { N = 1000, T = 8 };
    static const struct {
        const char *name;
        int size, version;
        int64_t count;
        int n, first, vocab;
        const char *word, *other;
    } no[] = {
        {"version", 2, 2, 10, 10, 0, 300, "version 1, found version 2", NULL},
        {"version-32", 4, 1, 10, 10, 0, 300, "version 7, found version 1", NULL},
        {"count-one-more", 2, 1, 11, 10, 0, 300, "of 11 tokens", "which are 10 of 2 bytes"},
        {"count-one-less", 4, 7, 9, 10, 0, 300, "of 9 tokens", "which are 10 of 4 bytes"},
        {"count-negative", 2, 1, -10, 10, 0, 300, "of -10 tokens", "found 20 bytes"},
        {"count-huge", 2, 1, INT32_MAX, 10, 0, 300, "of 2147483647 tokens", NULL},
        {"count-zero", 2, 1, 0, 0, 0, 300, "an empty token shard", NULL},
        {"id", 2, 1, 10, 10, 295, 300, "token 5 has the id 300", "the vocabulary has 300"},
        {"id-32", 4, 7, 10, 10, 99999, 100001, "token 2 has the id 100001", "has 100001"},
        {"id-of-bytes", 2, 1, 10, 10, 250, 256, "token 6 has the id 256", "has 256"},
    };
    Data d, e;
    int x[T], y[T], source;
    folder("sh");
    for (size_t i = 0; i < COUNT(no); i++) {
        if (!begin("shards/refused/%s", no[i].name)) continue;
        put_shard("sh/bad", no[i].size, no[i].version, no[i].count, no[i].n, no[i].first);
        vocabulary = no[i].vocab;
        refused(open_data(&d, "sh/bad", NULL, 0, T, NULL, NULL), "sh/bad: ", no[i].word);
        if (no[i].other) check(strstr(err.text, no[i].other) != NULL, "%s", err.text);
        finish();
    }
    if (begin("shards/refused/id-in-a-later-block")) {
        put_shard("sh/bad", 2, 1, 65536, 65536, 0);
        vocabulary = 65535;
        refused(
            open_data(&d, "sh/bad", NULL, 0, T, NULL, NULL), "token 65535 has the id 65535", NULL);
        vocabulary = 65536;
        accepted(open_data(&d, "sh/bad", NULL, 0, T, NULL, NULL));
        data_close(&d);
        finish();
    }
    if (begin("shards/refused/cut-off")) {
        const unsigned char head[1023] = {0x88, 0xd8, 0x34, 1, 1};
        const size_t sizes[] = {4, 7, 12, 1023};
        for (size_t i = 0; i < COUNT(sizes); i++) {
            put_file("sh/bad", head, sizes[i]);
            refused(open_data(&d, "sh/bad", NULL, 0, T, NULL, NULL), "sh/bad: expected an llm.c",
                "the file is cut off");
        }
        put_shard("sh/bad", 2, 1, 10, 10, 0);
        must(!truncate("sh/bad", 1043), "sh/bad");
        refused(open_data(&d, "sh/bad", NULL, 0, T, NULL, NULL),
            "which are 9 of 2 bytes each and a", NULL);
        finish();
    }
    unlink("sh/bad");
    vocabulary = 4 * N;
    if (begin("shards/rows")) { // both kinds, by a pattern, shuffled together, each in its own part
        put_shard("sh/a.bin", 2, 1, N, N, 0);
        put_shard("sh/b.bin", 4, 7, N, N, N);
        put_shard("sh/c.bin", 2, 1, N, N, 2 * N);
        accepted(open_data(&d, "sh/*.bin", NULL, 0.1, T, NULL, NULL));
        check(d.n_shards == 3 && d.train_tokens == 3 * 900 && d.val_tokens == 3 * 100,
            "%d shards, %d tokens", d.n_shards, (int)d.train_tokens);
        int seen[4 * N] = {0}, turns = 0, last = -1;
        for (uint64_t row = 0; row < 2 * d.train_rows; row++) {
            if (row == d.train_rows) memset(seen, 0, sizeof seen);
            data_train_rows(&d, row, 1, x, y, &source);
            turns += source != last, last = source;
            check(x[0] / N == source && y[T - 1] % N < 900, "row %d: token %d of file %d", (int)row,
                x[0], source);
            for (int t = 0; t < T; t++)
                check(x[t] == x[0] + t && y[t] == x[t] + 1 && !seen[x[t]]++, "token %d", x[t]);
        }
        check(turns > 100, "the shards are not shuffled together: %d turns", turns);
        uint64_t rows = data_val_rows(&d);
        int targets = 0;
        for (uint64_t row = 0; row < rows; row++) targets += data_val_row(&d, row, x, y);
        check(targets == 3 * 99, "%d targets", targets);
        data_close(&d);
        finish();
    }
    if (begin("shards/as-encoded")) { // the rows of a shard are those of a text with these tokens
        Numbers numbers = {0, 0};
        char text[N] = {0};
        put_file("sh/text", text, sizeof text);
        put_shard("sh/same", 4, 7, N, N, 0);
        accepted(open_data(&d, "sh/text", NULL, 0, T, number, &numbers));
        accepted(
            open_data(&e, "sh/same", NULL, 0, T, number, &numbers)); // the encoder is not asked
        check(d.train_rows == e.train_rows, "%d rows", (int)e.train_rows);
        for (uint64_t row = 0; row < 300; row++) {
            int x1[T], y1[T];
            data_train_rows(&d, row, 1, x, y, NULL);
            data_train_rows(&e, row, 1, x1, y1, NULL);
            check(!memcmp(x, x1, sizeof x) && !memcmp(y, y1, sizeof y), "row %d", (int)row);
        }
        data_close(&d);
        data_close(&e);
        finish();
    }
    if (begin("shards/beside-a-text")) {
        char text[N];
        memset(text, 'x', sizeof text);
        put_file("sh/mixed.txt", text, sizeof text);
        put_shard("sh/mixed.bin", 2, 1, N, N, N);
        accepted(open_data(&d, "sh/mixed.*", NULL, 0, T, NULL, NULL));
        int bytes = 0, ids = 0;
        for (uint64_t row = 0; row < d.train_rows; row++) {
            data_train_rows(&d, row, 1, x, y, NULL);
            x[0] == 'x' ? bytes++ : ids++;
        }
        check(bytes == 124 && ids == 124, "%d rows of text, %d of the shard", bytes, ids);
        data_close(&d);
        finish();
    }
    vocabulary = 256;
}

static void test_inputs(void) {
    static const struct {
        const char *name, *input;
        double fraction;
        int T;
        const char *word, *other;
    } no[] = {
        {"missing", "t/none", .1, 8, "--input t/none", "No such file"},
        {"no-match", "t/*.none", .1, 8, "t/*.none", "no file matches"},
        {"below-a-file", "t/long/x", .1, 8, "t/long/x", "Not a directory"},
        {"pipe", "t/pipe", .1, 8, "t/pipe", "found a pipe"},
        {"empty-file", "t/empty", .1, 8, "t/empty", "an empty file"},
        {"empty-folder", "t/nothing", .1, 8, "t/nothing", "found none"},
        {"empty-name", "", .1, 8, "--input", "empty name"},
        {"token-shard", "t/shard", .1, 8, "t/shard", "an empty token shard"},
        {"too-short", "t/short", .1, 16, "t/short: too short: 9 training tokens",
            "--seq 16 needs 17: lower --seq to at most 8"},
        {"held-out", "t/short", .5, 16, "5 training tokens (5 bytes are held out", "at most 4"},
        {"short-by-one", "t/long", .1, 900, "900 training tokens", "needs 901"},
        {"all-short", "t/f", 0, 600, "500 training tokens in the longest", "and the other inputs"},
        {"no-train", "t/short", .9, 8, "too short: 0 training tokens", "give more text"},
        {"line-break", "t/one\nline\x1b", .1, 8, "t/one?line?", "too short"},
        {"fraction-1", "t/long", 1, 8, "--val-fraction 1", NULL},
        {"fraction-negative", "t/long", -.1, 8, "--val-fraction -0.1", NULL},
        {"fraction-nan", "t/long", NAN, 8, "--val-fraction", "nan"},
        {"seq-0", "t/long", .1, 0, "--seq 0", NULL},
        {"seq-huge", "t/long", .1, 1 << 30, "--seq 1073741824", NULL},
    };
    char bytes[1024] = "\x88\xd8\x34\x01\1"; // 20240520, little-endian
    Data d;
    folder("t/f/sub"), folder("t/f/.hidden"), folder("t/nothing");
    put_file("t/shard", bytes, sizeof bytes);
    memset(bytes, 'x', sizeof bytes);
    put_file("t/long", bytes, 1000), put_file("t/short", bytes, 10), put_file("t/empty", "", 0);
    put_file("t/one\nline\x1b", bytes, 3), put_file("t/f/[x]", bytes, 300),
        put_file("t/f/x", bytes, 200);
    put_file("t/f/b", bytes, 500), put_file("t/f/sub/a", bytes, 400);
    put_file("t/f/.hidden/x", bytes, 500), put_file("t/f/.x", bytes, 500);
    must(!mkfifo("t/pipe", 0666) && !symlink("..", "t/f/loop") && !link("t/long", "t/again"), "t");
    for (size_t i = 0; i < COUNT(no); i++) {
        if (!begin("data/refused/%s", no[i].name)) continue;
        int rc = open_data(&d, no[i].input, NULL, no[i].fraction, no[i].T, NULL, NULL);
        refused(rc, no[i].word, no[i].other);
        finish();
    }
    if (begin("data/refused/validation")) {
        refused(open_data(&d, "t/long", "t/none", 0, 8, NULL, NULL), "--val t/none", "No such");
        refused(open_data(&d, NULL, "t/none", 0, 8, NULL, NULL), "--input t/none", "No such");
        refused(open_data(&d, NULL, NULL, 0, 8, NULL, NULL), "--input PATH", NULL);
        finish();
    }
    if (begin("data/refused/encoded")) {
        Numbers numbers = {0, 0};
        refused(open_data(&d, "t/f", "t/long", 0, 8, number, NULL), "the encoder says no", NULL);
        refused(open_data(&d, "t/short", NULL, .1, 16, number, &numbers), "t/short: too", NULL);
        finish();
    }
    if (begin("data/refused/unreadable")) {
        const int root = geteuid() == 0;
        chmod("t/short", 0);
        if (root && (chmod(".", 0755) || seteuid(65534)))
            skipped = "root reads everything";
        else
            refused(open_data(&d, "t/short", NULL, 0, 8, NULL, NULL), "t/short", "denied");
        must(!root || !seteuid(0), "root");
        chmod("t/short", 0644);
        finish();
    }
    if (begin("data/folder")) { // in byte order, hidden ones and links to folders left out
        static const char *const want[] = {"t/f/[x]", "t/f/b", "t/f/sub/a", "t/f/x"};
        accepted(open_data(&d, "t/f", NULL, 0, 8, NULL, NULL));
        check(d.n_files == 4 && d.train_tokens == 1400, "%d files", d.n_files);
        for (int i = 0; i < 4 && i < d.n_files; i++)
            check(!strcmp(d.file[i].path, want[i]), "%s", d.file[i].path);
        data_close(&d);
        finish();
    }
    if (begin("data/pattern")) { // a name that exists is none; a folder that matches is taken whole
        accepted(open_data(&d, "t/f/[x]", NULL, 0, 8, NULL, NULL));
        check(d.n_files == 1 && d.train_tokens == 300, "%d tokens", (int)d.train_tokens);
        data_close(&d);
        accepted(open_data(&d, "t/f/[sx]*", NULL, 0, 8, NULL, NULL));
        check(d.n_files == 2 && d.train_tokens == 600, "%d tokens", (int)d.train_tokens);
        data_close(&d);
        finish();
    }
    if (begin("data/warnings")) { // each file once, whatever its names; said on stderr
        const char *in[] = {"t/long", "t/again", "t/./long", "t/f", "t/short"}, *val = "t/again";
        static const char *const words[] = {"named more than once (2 such names)",
            "t/again is both training and validation text (1 such file)",
            "1 of 6 input files have fewer than --seq + 1 = 17 training tokens"};
        char said[4096] = "";
        fflush(stderr);
        int terminal = dup(2), log = open("stderr", O_RDWR | O_CREAT | O_APPEND, 0666);
        must(terminal >= 0 && log >= 0 && dup2(log, 2) == 2, "stderr");
        int rc = data_open(&d, in, 5, &val, 1, 0.5, 16, 256, 1, NULL, NULL, &err);
        must(dup2(terminal, 2) == 2 && pread(log, said, sizeof said - 1, 0) > 0, "stderr");
        close(terminal), close(log);
        accepted(rc);
        check(d.n_files == 7 && d.n_val == 1 && d.val_tokens == 1000, "%d files", d.n_files);
        check(d.train_tokens == 2400, "%d tokens", (int)d.train_tokens);
        for (size_t i = 0; i < COUNT(words); i++)
            check(strstr(said, words[i]) != NULL, "expected '%s' in: %s", words[i], said);
        data_close(&d);
        finish();
    }
    if (begin("data/validation-only")) {
        int x[8], y[8];
        accepted(open_data(&d, NULL, "t/long", 0, 8, NULL, NULL));
        check(d.val_tokens == 1000 && data_val_rows(&d) == 125 && !d.train_rows, "other sizes");
        check(data_val_row(&d, 124, x, y) == 7 && y[6] == 'x' && y[7] == -1, "the last row");
        data_close(&d);
        finish();
    }
    if (begin("data/too-little-to-validate")) { // no failure: one held-out byte has no target
        Numbers numbers = {0, 0};
        accepted(open_data(&d, "t/short", NULL, 0.1, 8, number, &numbers));
        check(!d.val_tokens && !data_val_rows(&d) && d.train_rows == 1, "%d", (int)d.val_tokens);
        data_close(&d);
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// tokenizer

static void test_tokenizer(void) {
    static const struct {
        const char *name, *edit, *word;
    } no[] = {
        // the edit: see merge_into
        {"other-json", "{\"model\": null}", "a model and a vocab"},
        {"no-type", "{\"model\": {\"type\": null}}", "a model and a vocab"},
        {"unigram", "{\"model\": {\"type\": \"Unigram\"}}", "found Unigram with 256 tokens"},
        {"257-tokens", "{\"model\": {\"vocab\": {\"ab\": 256}}}", "use_regex off"},
        {"merges", "{\"model\": {\"merges\": [[\"a\", \"b\"]]}}", "use_regex off"},
        {"other-id", "{\"model\": {\"vocab\": {\"a\": 98}}}", "use_regex off"},
        {"real-id", "{\"model\": {\"vocab\": {\"a\": 97.0}}}", "use_regex off"},
        {"other-token", "{\"model\": {\"vocab\": {\"a\": \"-\", \"aa\": 97}}}", "use_regex off"},
        {"normalizer", "{\"normalizer\": {\"type\": \"NFC\"}}", "no normalizer"},
        {"added-tokens", "{\"added_tokens\": [{\"id\": 256}]}", "an id and a content"},
        {"pre-tokenizer", "{\"pre_tokenizer\": {\"type\": \"Metaspace\"}}", "found Metaspace"},
        {"truncation", "{\"truncation\": {\"max_length\": 4}}", "no truncation"},
        {"padding", "{\"padding\": {\"pad_id\": 0}}", "no padding"},
        {"template", "{\"post_processor\": {\"type\": \"Template\"}}", "found Template"},
        {"prefix", "{\"model\": {\"continuing_subword_prefix\": \"##\"}}", "no continuing_sub"},
        {"dropout", "{\"model\": {\"dropout\": 0.5}}", "no dropout"},
        {"merges-object", "{\"model\": {\"merges\": {\"a b\": 1}}}", "expected merges as an array"},
        {"no-pre-tokenizer", "{\"pre_tokenizer\": null}", "found none"},
        {"prefix-space", "{\"pre_tokenizer\": {\"add_prefix_space\": true}}", "add_prefix_space"},
    };
    static const struct {
        int byte;
        const char *character;
    } alphabet[] = {
        // GPT-2's
        {0, "\xc4\x80"},
        {10, "\xc4\x8a"},
        {32, "\xc4\xa0"},
        {33, "!"},
        {126, "~"},
        {127, "\xc4\xa1"},
        {160, "\xc5\x82"},
        {161, "\xc2\xa1"},
        {173, "\xc5\x83"},
        {174, "\xc2\xae"},
        {255, "\xc3\xbf"},
    };
    Tokenizer t, u;
    tokenizer_bytes(&t);
    folder("tok"), folder("tok2");
    if (begin("tokenizer/any-bytes")) { // every byte, every pair, cut UTF-8
        enum { PAIRS = 2 * 65536 };
        static unsigned char text[PAIRS + 9];
        uint32_t *id;
        size_t n, k, at = 0;
        for (int i = 0; i < PAIRS; i++) text[i] = (unsigned char)(i % 2 ? i / 2 : i / 512);
        memcpy(text + PAIRS, "\xe2\x82\xf0\x9f\x98\xc3(\0\xff", 9);
        accepted(tokenizer_encode(&t, text, sizeof text, TEXT_BEGINS | TEXT_ENDS, &id, &n, &err));
        for (size_t i = 0; i < n; at += k, i++) {
            const unsigned char *bytes = tokenizer_decode(&t, (int)id[i], &k);
            check(k && at + k <= sizeof text && !memcmp(bytes, text + at, k), "token %zu", i);
        }
        check(at == sizeof text && tokenizer_is_bytes(&t), "%zu bytes came back", at);
        free(id);
        accepted(tokenizer_encode(&t, text, 0, TEXT_BEGINS | TEXT_ENDS, &id, &n, &err));
        check(!id && !n, "tokens of no text");
        check(!tokenizer_decode(&t, 256, &k) && !k, "token 256");
        check(!tokenizer_decode(&t, -1, &k) && !k, "token -1");
        finish();
    }
    if (begin("tokenizer/alphabet")) {
        char name[256][3];
        for (int i = 0; i < 256; i++) {
            byte_utf8(name[i], i);
            for (int k = 0; k < i; k++) check(strcmp(name[i], name[k]), "%d is %d", i, k);
        }
        for (size_t i = 0; i < COUNT(alphabet); i++)
            check(!strcmp(name[alphabet[i].byte], alphabet[i].character), "%d", alphabet[i].byte);
        finish();
    }
    accepted(tokenizer_save(&t, "tok", &err));
    if (begin("tokenizer/saved")) {
        memset(&u, 0xFF, sizeof u);
        accepted(tokenizer_load(&u, "tok", &err));
        check(!memcmp(&t, &u, sizeof t), "another tokenizer came back");
        check(exists("tok/tokenizer_config.json"), "no tokenizer_config.json");
        refused(tokenizer_load(&u, "none", &err), "none/tokenizer.json", "No such file");
        put_text("tok2/tokenizer.json", "#version: 0.2\na b\n");
        refused(tokenizer_load(&u, "tok2", &err), "tok2/tokenizer.json", "a text file");
        finish();
    }
    for (size_t i = 0; i < COUNT(no); i++) {
        if (!begin("tokenizer/refused/%s", no[i].name)) continue;
        merge("tok", "tok2", "tokenizer.json", no[i].edit);
        refused(tokenizer_load(&u, "tok2", &err), "tok2/tokenizer.json", no[i].word);
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// safe

#define ENTRY(name, dtype, shape, offsets) \
    "\"" name "\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define ONE(dtype, shape, offsets) "{" ENTRY("a", dtype, shape, offsets) "}"
#define FINE_A                     ENTRY("a", "\"F32\"", "[2]", "[0,8]")
#define WITH_B(offsets)            "{" FINE_A "," ENTRY("b", "\"F32\"", "[2]", offsets) "}"
#define F                          "\"F32\""

// length: what the file says of its header, 0 = the truth; data: bytes after it
static void put_safe(const char *header, uint64_t length, size_t data) {
    FILE *f = fopen("t.safetensors", "wb");
    must(f != NULL, "t.safetensors");
    if (!length) length = strlen(header);
    fwrite(&length, 8, 1, f);
    fputs(header, f);
    for (size_t i = 0; i < data; i++) fputc((int)i, f);
    fclose(f);
}

static int try_safe(void) { // opens it; if it is accepted, all that it says must be so
    SafeFile f;
    mem.largest = 0;
    int rc = safe_open(&f, "t.safetensors", &err);
    if (rc) return rc;
    const unsigned char *end = f.map + f.size;
    uint64_t header, sum = 0;
    memcpy(&header, f.map, 8);
    for (int i = 0; i < f.n; i++) {
        const SafeTensor *t = &f.tensor[i];
        uint64_t bytes = dtype_size(t->dtype);
        for (int k = 0; k < t->rank; k++) bytes *= (uint64_t)t->shape[k];
        int inside = t->data >= f.map + 8 + header && t->data <= end;
        check(inside && t->bytes <= (size_t)(end - t->data), "%s lies outside", shown(t->name));
        check(t->bytes == bytes && t->count == bytes / dtype_size(t->dtype), "its size");
        check(safe_find(&f, t->name) == t, "%s is not found", shown(t->name));
        sum += t->bytes;
    }
    check(sum == f.size - 8 - header, "the tensors have %d bytes", (int)sum);
    check(!safe_find(&f, "no such tensor"), "a tensor that is not there is found");
    safe_close(&f);
    return 0;
}

static void test_safe(void) {
    static const struct {
        const char *name, *header;
        size_t data;
        const char *word, *other;
    } no[] = {
        {"one-byte-short", "{" FINE_A "}", 7, "tensor a", "1 bytes short"},
        {"one-byte-long", "{" FINE_A "}", 9, "1 bytes follow", NULL},
        {"no-data", "{" FINE_A "}", 0, "tensor a", "8 bytes short"},
        {"gap-before-the-first", ONE(F, "[1]", "[4,8]"), 8, "tensor a", "gap"},
        {"gap-between", WITH_B("[12,20]"), 20, "tensor b", "gap"},
        {"overlap", WITH_B("[4,12]"), 12, "tensor b", "overlaps"},
        {"same-place", WITH_B("[0,8]"), 8, "tensor ", "overlaps"},
        {"begin-after-end", ONE(F, "[2]", "[8,0]"), 8, "tensor a", "[8, 0]"},
        {"begin-negative", ONE(F, "[2]", "[-8,0]"), 8, "tensor a", "[-8, 0]"},
        {"one-offset", ONE(F, "[2]", "[0]"), 8, "tensor a", "found 1"},
        {"three-offsets", ONE(F, "[2]", "[0,8,8]"), 8, "tensor a", "found 3"},
        {"fractional-offset", ONE(F, "[2]", "[0,8.0]"), 8, "tensor a", "not integers"},
        {"offsets-no-array", ONE(F, "[2]", "8"), 8, "tensor a", "found something else"},
        {"negative-shape", ONE(F, "[-2]", "[0,8]"), 8, "tensor a", "integers from 0"},
        {"negative-twice", ONE(F, "[-1,-2]", "[0,8]"), 8, "tensor a", "integers from 0"},
        {"fractional-shape", ONE(F, "[2.5]", "[0,8]"), 8, "tensor a", "integers from 0"},
        {"real-shape", ONE(F, "[2.0]", "[0,8]"), 8, "tensor a", "integers from 0"},
        {"overflow-to-8", ONE(F, "[4611686018427387906]", "[0,8]"), 8, "tensor a", "overflows"},
        {"overflow-to-0", ONE(F, "[4294967296,4294967296]", "[0,0]"), 0, "tensor a", "overflows"},
        {"overflow-by-0", ONE(F, "[9223372036854775807,0]", "[0,0]"), 0, "tensor a", "overflows"},
        {"beyond-64-bits", ONE(F, "[18446744073709551618]", "[0,8]"), 8, "JSON", "too big"},
        {"huge", ONE(F, "[1099511627776]", "[0,4398046511104]"), 8, "tensor a", "bytes short"},
        {"shape-too-large", ONE(F, "[3]", "[0,8]"), 8, "tensor a", "needs 12 bytes"},
        {"nine-dimensions", ONE(F, "[1,1,1,1,1,1,1,1,2]", "[0,8]"), 8, "tensor a", "found 9"},
        {"dtype-unknown", ONE("\"I64\"", "[1]", "[0,8]"), 8, "tensor a", "found I64"},
        {"dtype-with-line-break", ONE("\"F\\n8\"", "[8]", "[0,8]"), 8, "tensor a", "found F?8"},
        {"dtype-number", ONE("32", "[2]", "[0,8]"), 8, "tensor a", "found something else"},
        {"same-name-twice", "{" FINE_A "," FINE_A "}", 8, "duplicate", "\"a\""},
        {"same-key-twice", ONE(F ",\"dtype\":\"F32\"", "[2]", "[0,8]"), 8, "duplicate", "dtype"},
        {"another-key", ONE(F, "[2]", "[0,8],\"scale\":1"), 8, "tensor a", "something else"},
        {"tensor-is-a-number", "{\"a\":3}", 0, "tensor a", "something else"},
        {"metadata-number", "{\"__metadata__\":{\"q\":3}}", 0, "__metadata__", "string for q"},
        {"metadata-array", "{\"__metadata__\":[]}", 0, "__metadata__", "object of strings"},
        {"header-array", "[1,2]", 0, "header length of 5", NULL},
        {"header-and-more", "{} {}", 0, "expected JSON", NULL},
        {"name-with-nul", "{\"a\\u0000b\":1}", 0, "expected JSON", NULL},
        {"name-not-utf8", "{\"\xff\":1}", 0, "expected JSON", NULL},
    };
    static const struct {
        const char *name;
        uint64_t length;
        const char *word;
    } lengths[] = {
        {"beyond-the-file", 10000, "the beginning of a safetensors file"},
        {"beyond-by-one", sizeof "{" FINE_A "}" + 8, "the beginning of a safetensors file"},
        {"half", 20, "expected JSON"},
        {"of-1", 1, "header length of 1 "},
        {"wraps", UINT64_MAX - 7, "header length of 18446744073709551608 "},
    };
    static const struct {
        const char *name, *bytes;
        size_t n;
        const char *word;
    } whole[] = {
        {"0-bytes", "", 0, "an empty file of 0 bytes"},
        {"7-bytes", "1234567", 7, "a text file of 7 bytes"},
        {"8-bytes", "\0\0\0\0\0\0\0", 8, "a file of zeros of 8 bytes"},
        {"lfs-pointer", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n", 66,
            "a git-LFS pointer"},
        {"zip", "PK\3\4aaaaaaaaaaaaaaaa", 20, "a PyTorch .bin/.pt"},
        {"gguf", "GGUFaaaaaaaaaaaaaaaa", 20, "a GGUF model"},
        {"json", "{\"model_type\": \"qwen3\"}", 23, "a JSON file"},
        {"text", "Call me Ishmael. Some years ago", 31, "a text file"},
    };
    static const struct {
        const char *name, *header;
        size_t data;
    } yes[] = {
        {"empty", "{}", 0},
        {"padded", "{" FINE_A ",\"__metadata__\":{\"x\":\"y\"}}   ", 8},
        {"unsorted", "{" ENTRY("b", F, "[2]", "[8,16]") "," FINE_A "}", 16},
        {"half", ONE("\"F16\"", "[2,2]", "[0,8]"), 8},
        {"scalar", ONE("\"F64\"", "[]", "[0,8]"), 8},
        {"no-elements", "{" ENTRY("z", "\"BF16\"", "[4,0,7]", "[8,8]") "," FINE_A "}", 8},
    };
    for (size_t i = 0; i < COUNT(no); i++) {
        if (!begin("safe/refused/%s", no[i].name)) continue;
        put_safe(no[i].header, 0, no[i].data);
        int rc = try_safe();
        check(strstr(err.text, "t.safetensors: ") == err.text, "no file named: %s", err.text);
        refused(rc, no[i].word, no[i].other);
        finish();
    }
    for (size_t i = 0; i < COUNT(lengths); i++) {
        if (!begin("safe/refused/header-length-%s", lengths[i].name)) continue;
        put_safe("{" FINE_A "}", lengths[i].length, 8);
        refused(try_safe(), "t.safetensors: ", lengths[i].word);
        finish();
    }
    for (size_t i = 0; i < COUNT(whole); i++) {
        if (!begin("safe/refused/%s", whole[i].name)) continue;
        put_file("t.safetensors", whole[i].bytes, whole[i].n);
        refused(try_safe(), "t.safetensors: ", whole[i].word);
        finish();
    }
    for (size_t i = 0; i < COUNT(yes); i++) {
        if (!begin("safe/accepted/%s", yes[i].name)) continue;
        put_safe(yes[i].header, 0, yes[i].data);
        accepted(try_safe());
        finish();
    }
    if (begin("safe/refused/no-file")) {
        SafeFile f;
        char bytes[4096];
        folder("a-folder");
        refused(safe_open(&f, "a-folder", &err), "a-folder", "found a folder");
        refused(safe_open(&f, "none", &err), "none", "No such file");
        memset(bytes, 0xFF, sizeof bytes);
        put_file("t.safetensors", bytes, sizeof bytes);
        refused(try_safe(), "header length of 18446744073709551615", "binary data");
        finish();
    }
    if (begin("safe/refused/costly-json")) { // deep, many values, long: what a parser pays for
        enum { DEEP = 200000, MANY = 8400000 };
        char *text = malloc(MANY + 1);
        memset(text, '[', DEEP);
        memcpy(text, "{\"a\":", 5), text[DEEP] = 0;
        put_safe(text, 0, 0);
        refused(try_safe(), "t.safetensors", "maximum parsing depth");
        for (size_t i = 0; i < MANY; i++) text[i] = ",0"[i % 2];
        memcpy(text, "{\"a\":[0", 7), text[MANY] = 0;
        put_safe(text, 0, 0);
        refused(try_safe(), "t.safetensors", "more than 4194304 values");
        put_text("big.json", "{}");
        must(!truncate("big.json", (off_t)JSON_LIMIT + 1), "big.json");
        mem.largest = 0;
        check(!json_read("big.json", &err), "accepted");
        refused(-1, "big.json: expected a JSON file of at most", "found 67108865");
        free(text);
        finish();
    }
    if (begin("safe/written")) { // byte for byte, with writes that take less than they are given
        static const float v[3] = {1, -2, 3};
        static const SafeEntry e[2] = {{"x", F32, 1, {2}}, {"y", F32, 2, {1, 1}}};
        static const char text[] = "{\"__metadata__\":{\"format\":\"pt\"}," ENTRY(
            "x", F, "[2]", "[0,8]") "," ENTRY("y", F, "[1,1]", "[8,12]") "}";
        const void *at[2] = {v, v + 2};
        size_t n, length = (strlen(text) + 7) / 8 * 8;
        disk.most = 5;
        accepted(safe_write("w.safetensors", e, 2, nth, at, &err));
        disk.most = SIZE_MAX;
        unsigned char *got = get("w.safetensors", &n);
        check(n == 8 + length + 12 && got[0] == length && !got[1] && !got[7], "%zu bytes", n);
        check(!memcmp(got + 8, text, strlen(text)), "another header: %.*s", (int)length, got + 8);
        check(got[8 + length - 1] == ' ' && !memcmp(got + 8 + length, v, 12), "other data");
        free(got);
        finish();
    }
}

/* Up to three changed bytes, and a cut now and then: refused with one line, or accepted and true.
   Half of the new bytes are random, half are of the kind that JSON is made of. */
static void damage(const char *path, int times, int (*try_it)(void)) {
    size_t n;
    unsigned char *whole = get(path, &n), *bad = malloc(n);
    for (int i = 0; i < times; i++) {
        memcpy(bad, whole, n);
        for (uint64_t k = 1 + below(3); k > 0; k--) {
            uint64_t at = below(n), other = i % 2 ? below(256) : (unsigned char)below(20);
            bad[at] = (unsigned char)(i % 2 ? (char)other : "0123456789[]{},:\"-.e"[other]);
        }
        put_file(path, bad, i % 7 ? n : below(n));
        if (try_it()) refused(-1, path, NULL);
    }
    free(whole);
    free(bad);
}
static int try_config(void) {
    Config c;
    int rc = config_read(&c, "hurt", &err);
    if (!rc) accepted(config_check(&c, &err));
    return rc;
}
static int try_tokenizer(void) {
    Tokenizer t;
    return tokenizer_load(&t, "hurt", &err);
}
static void test_damage(void) {
    Tokenizer t;
    tokenizer_bytes(&t);
    folder("hurt");
    if (begin("safe/random-damage")) {
        put_safe("{" FINE_A "," ENTRY("b", "\"BF16\"", "[2,2]", "[8,16]") "}", 0, 16);
        damage("t.safetensors", 5000, try_safe);
        finish();
    }
    if (begin("config/random-damage")) {
        accepted(config_write("hurt", &moe_shape, 0.001, F32, -1, &err));
        damage("hurt/config.json", 2000, try_config);
        finish();
    }
    if (begin("tokenizer/random-damage")) {
        accepted(tokenizer_save(&t, "hurt", &err));
        damage("hurt/tokenizer.json", 500, try_tokenizer);
        finish();
    }
}
#undef F

// -------------------------------------------------------------------------------------------------
// config

static void test_config(void) {
    static const struct {
        const char *name, *edit, *word;
    } edits[] = {
        // word NULL: accepted; the edit: see merge_into
        {"act-gelu", "{\"hidden_act\": \"gelu\"}", "hidden_act: expected silu, found gelu"},
        {"sliding-window", "{\"use_sliding_window\": true}", "use_sliding_window"},
        {"sliding-layers", "{\"layer_types\": [\"sliding_attention\"]}", "layer_types"},
        {"layers-of-text", "{\"layer_types\": \"sliding_attention\"}", "layer_types"},
        {"rope-scaling", "{\"rope_scaling\": {\"type\": \"yarn\"}}", "rope_scaling"},
        {"rope-type", "{\"rope_parameters\": {\"rope_type\": \"yarn\"}}", "rope_type"},
        {"rope-partial", "{\"rope_parameters\": {\"partial_rotary_factor\": 0.5}}", "partial_rot"},
        {"rope-disagrees", "{\"rope_parameters\": {\"rope_theta\": 2e4}}", "expected them equal"},
        {"rope-negative", "{\"rope_parameters\": \"-\", \"rope_theta\": -5}", "found -5"},
        {"unknown-model", "{\"model_type\": \"gemma\"}", "llama or moe_c, found gemma"},
        {"no-model", "{\"model_type\": \"-\"}", "model_type"},
        {"quantised", "{\"quantization_config\": {\"bits\": 4}}", "quantization_config"},
        {"attention-bias", "{\"attention_bias\": true}", "attention_bias"},
        {"dropout", "{\"attention_dropout\": 0.1}", "attention_dropout"},
        {"unknown-key", "{\"bad\\nkey\": true}", "bad?key: this key is not known"},
        {"missing", "{\"vocab_size\": \"-\"}", "vocab_size: expected a positive integer, found no"},
        {"zero", "{\"vocab_size\": 0}", "vocab_size: expected 1 to 1073741823, found 0"},
        {"negative", "{\"hidden_size\": -48}", "hidden_size: expected 1 to 1073741823, found -48"},
        {"fractional", "{\"num_hidden_layers\": 2.5}", "num_hidden_layers: expected a positive"},
        {"real", "{\"vocab_size\": 256.0}", "vocab_size: expected a positive integer"},
        {"beyond-30-bits", "{\"vocab_size\": 1073741824}", "vocab_size: expected 1 to 1073741823"},
        {"beyond-32-bits", "{\"num_attention_heads\": 4294967300}", "num_attention_heads"},
        {"heads-not-divisible", "{\"num_key_value_heads\": 3}", "divisor of the 4 heads, found 3"},
        {"more-kv-heads", "{\"num_key_value_heads\": 8}", "heads: expected 1 to 4, found 8"},
        {"no-head-dim", "{\"head_dim\": \"-\", \"hidden_size\": 50}", "50 is no multiple of 4"},
        {"head-odd", "{\"head_dim\": 7}", "even number"},
        {"too-many-layers", "{\"num_hidden_layers\": 1025}", "layers: expected 1 to 1024"},
        {"k-above-e", "{\"num_experts_per_tok\": 6}", "per token: expected 1 to 5, found 6"},
        {"one-expert", "{\"num_experts\": 1, \"num_experts_per_tok\": 1}",
            "num_experts: expected 2 or more"},
        {"experts-huge", "{\"num_experts\": 500000000}", "experts: expected 1 to"},
        {"experts-in-all", "{\"num_experts\": 100000}", "3 layers of 100000 experts"},
        {"size-huge", "{\"hidden_size\": 999999999, \"vocab_size\": 999999999}", "parameters"},
        {"dense-not-first", "{\"mlp_only_layers\": [1]}", "mlp_only_layers"},
        {"dense-too-many", "{\"mlp_only_layers\": [0, 1, 2, 3]}", "dense layers: expected 0 to 3"},
        {"dense-number", "{\"mlp_only_layers\": 3}", "mlp_only_layers"},
        {"sparse-step", "{\"decoder_sparse_step\": 2}", "decoder_sparse_step"},
        {"epsilon-zero", "{\"rms_norm_eps\": 0}", "rms_norm_eps: expected a positive number"},
        {"epsilon-large", "{\"rms_norm_eps\": 1.5}", "norm epsilon"},
        {"tied-text", "{\"tie_word_embeddings\": \"yes\"}", "expected true or false"},
        {"dense-with-experts", "{\"model_type\": \"qwen3\"}", "num_experts"},
        {"old-names-only", "{\"dtype\": \"-\", \"rope_parameters\": \"-\"}", NULL},
        {"new-names-only", "{\"torch_dtype\": \"-\", \"rope_theta\": \"-\"}", NULL},
        {"unknown-but-off", "{\"a\": null, \"b\": false, \"c\": 0, \"d\": [], \"e\": {}}", NULL},
        {"of-others", "{\"transformers_version\": \"4.51.0\", \"eos_token_id\": 7}", NULL},
        {"default-act", "{\"hidden_act\": \"-\"}", NULL},
        {"full-attention", "{\"layer_types\": [\"full_attention\", \"full_attention\"]}", NULL},
        {"window-unused", "{\"sliding_window\": 4096}", NULL},
        {"other-name", "{\"num_experts\": \"-\", \"num_local_experts\": 5}", NULL},
    };
    static const char *const files[][3] = {{"text", "hello", "a text file"},
        {"empty", "", "an empty file"}, {"array", "[1]", "model_type"},
        {"same-key-twice", "{\"vocab_size\":1,\"vocab_size\":2}", "duplicate"},
        {"nan", "{\"rope_theta\":NaN}", "expected JSON"},
        {"infinite", "{\"rope_theta\":1e999}", "expected JSON"}};
    Config c, read;
    folder("cfg"), folder("cfg2");
    if (begin("config/round-trip")) {
        // dense or not, tied or not, routed layers, digits; then what is saved as moe_c
        for (int i = 0; i < 16 * 3 * 4; i++) {
            const int norm = i / 16 % 3, routing = i / 48;
            if ((i & 1) && routing) continue;
            c = moe_shape;
            if (i & 1)
                c.n_experts = c.top_k = 1, c.dense_layers = 0, c.d_dense = c.d_expert;
            else if (i & 4)
                c.dense_layers = 3, c.norm_topk = 0;
            c.tied = i >> 1 & 1;
            if (i & 8) c.rope_theta = 1e6 / 3, c.norm_eps = 1e-6 / 3;
            c.qk_norm = norm == 0 ? QK_NORM_HEAD : norm == 1 ? QK_NORM_FULL : QK_NORM_NONE;
            c.router = routing & 1 ? ROUTER_SIGMOID : ROUTER_SOFTMAX;
            c.d_shared = routing & 2 ? 24 : 0;
            memset(&read, 0xFF, sizeof read);
            accepted(config_write("cfg", &c, 0.001 / 3, i & 2 ? BF16 : F32, -1, &err));
            accepted(config_read(&read, "cfg", &err));
            check(!memcmp(&read, &c, sizeof c), "shape %d came back as another", i);
            json_t *j = json_read("cfg/config.json", &err);
            const char *type = json_string_value(json_object_get(j, "torch_dtype"));
            const char *model = json_string_value(json_object_get(j, "model_type"));
            // with first layers that are dense, or heads of 4 x 8 in a width of 48
            const char *expected = i & 1 && norm == 2 ? "llama"
                : norm || routing                     ? "moe_c"
                : i & 1                               ? "qwen3"
                                                      : "qwen3_moe";
            check(model && !strcmp(model, expected), "model_type %s, not %s", model, expected);
            double coef = json_real_value(json_object_get(j, "router_aux_loss_coef"));
            check(type && !strcmp(type, i & 2 ? "bfloat16" : "float32"), "torch_dtype %s", type);
            check(coef == (i & 1 ? 0 : 0.001 / 3), "router_aux_loss_coef %.17g", coef);
            json_decref(j);
        }
        finish();
    }
    accepted(config_write("cfg", &moe_shape, 0.001, F32, -1, &err));
    for (size_t i = 0; i < COUNT(edits); i++) {
        const char *word = edits[i].word;
        if (!begin("config/%s/%s", word ? "refused" : "accepted", edits[i].name)) continue;
        merge("cfg", "cfg2", "config.json", edits[i].edit);
        int rc = config_read(&read, "cfg2", &err);
        if (word)
            refused(rc, "cfg2/config.json: ", word);
        else
            accepted(rc), check(!memcmp(&read, &moe_shape, sizeof read), "as another shape");
        finish();
    }
    for (size_t i = 0; i < COUNT(files); i++) {
        if (!begin("config/refused/file-%s", files[i][0])) continue;
        put_text("cfg2/config.json", files[i][1]);
        refused(config_read(&read, "cfg2", &err), "cfg2/config.json: ", files[i][2]);
        finish();
    }
    static const struct {
        const char *name, *edit, *word;
    } own[] = {
        {"qk-norm-other", "{\"qk_norm\": \"layer\"}",
            "qk_norm: expected none, full or head, found"},
        {"qk-norm-number", "{\"qk_norm\": 1}",
            "qk_norm: expected none, full or head, found another"},
        {"qk-norm-missing", "{\"qk_norm\": \"-\"}",
            "qk_norm: expected none, full or head, found no"},
        {"router-other", "{\"scoring_func\": \"tanh\"}", "expected softmax or sigmoid, found tanh"},
        {"shared-negative", "{\"shared_expert_intermediate_size\": -8}", "expected 1 to"},
        {"own-unknown-key", "{\"n_group\": 4}", "n_group: this key is not known"},
    };
    c = moe_shape;
    c.qk_norm = QK_NORM_NONE, c.router = ROUTER_SIGMOID, c.d_shared = 8;
    accepted(config_write("cfg", &c, 0.001, F32, -1, &err));
    for (size_t i = 0; i < COUNT(own); i++) {
        if (!begin("config/refused/%s", own[i].name)) continue;
        merge("cfg", "cfg2", "config.json", own[i].edit);
        refused(config_read(&read, "cfg2", &err), "cfg2/config.json: ", own[i].word);
        finish();
    }
    if (begin("config/refused/own-key-in-qwen3")) {
        accepted(config_write("cfg", &moe_shape, 0.001, F32, -1, &err));
        merge("cfg", "cfg2", "config.json", "{\"scoring_func\": \"sigmoid\"}");
        refused(config_read(&read, "cfg2", &err), "cfg2/config.json: ", "scoring_func");
        finish();
    }
    if (begin("config/refused/to-write")) { // what is no model
        static const char *const words[] = {"key/value heads", "dense width", "not finite"};
        for (size_t i = 0; i < COUNT(words); i++) {
            c = moe_shape;
            if (i == 0) c.n_kv_heads = 0;
            if (i == 1) c.d_dense = 0;
            int rc = config_write("cfg2", &c, i == 2 ? NAN : 0.001, F32, -1, &err);
            refused(rc, "cfg2/config.json: ", words[i]);
        }
        refused(config_read(&read, "none", &err), "none/config.json", "No such file");
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// model

static void copy(void *dst, const void *src, size_t n) { memcpy(dst, src, n); }
static void wait_for_nothing(void) {}
static const Backend *memory_of(DType type) {
    static Backend b[4];
    b[type] = (Backend){.name = "memory",
        .param_type = type,
        .grad_type = F32,
        .stat_type = F32,
        .to_device = copy,
        .to_host = copy,
        .sync = wait_for_nothing};
    return &b[type];
}

static TensorTable table_of(const Config *c, DType type) {
    TensorTable t;
    must(!tensor_table_build(&t, c, dtype_size(type)), "tensor table");
    return t;
}

// An arena full of 0xFF bytes, and for `random` with random bits in every tensor.
static unsigned char *arena(const TensorTable *t, int trained, DType type, int random) {
    size_t size = dtype_size(type), n = (trained ? t->elements : t->buffer_elements) * size;
    unsigned char *p = malloc(n + 1);
    must(p != NULL, "arena");
    memset(p, 0xFF, n + 1);
    for (int i = 0; i < t->count && random; i++) {
        const Tensor *x = &t->tensor[i];
        for (size_t k = 0; k < x->count * size && x->row->trained == trained; k++)
            p[x->offset * size + k] = (unsigned char)below(256);
    }
    return p;
}

static void test_round_trips(void) {
    static const char *const name[] = {"moe", "dense", "tied", "dense-layers", "sigmoid-shared"};
    const Backend *b = memory_of(F32);
    folder("model");
    for (int i = 0; i < 5; i++) {
        if (!begin("model/round-trip/%s", name[i])) continue;
        Config c = moe_shape;
        if (i == 1) c.n_experts = c.top_k = 1, c.dense_layers = 0;
        if (i == 2) c.tied = 1, c.dense_layers = 0, c.qk_norm = QK_NORM_FULL;
        if (i == 3) c.dense_layers = 3, c.qk_norm = QK_NORM_NONE;
        if (i == 4) c.router = ROUTER_SIGMOID, c.d_shared = 12;
        TensorTable t = table_of(&c, F32);
        unsigned char *in[4], *out[4]; // weights, first and second moments, buffers
        size_t n = t.elements * 4, size, again;
        for (int k = 0; k < 4; k++) {
            in[k] = arena(&t, k < 3, F32, 1);
            out[k] = arena(&t, k < 3, F32, 0);
        }
        void *buffers = i == 4 ? in[3] : NULL, *buffers_out = i == 4 ? out[3] : NULL;
        accepted(model_write("model", &c, &t, b, in[0], buffers, &err));
        unsigned char *one = get("model/model.safetensors", &size);
        accepted(model_write("model", &c, &t, b, in[0], buffers, &err));
        unsigned char *two = get("model/model.safetensors", &again);
        check(size == again && !memcmp(one, two, size), "equal models make different files");
        accepted(model_check("model", &c, &t, b, &err));
        accepted(model_read("model", &c, &t, b, out[0], buffers_out, &err));
        accepted(optimizer_write("model", &c, &t, b, in[1], in[2], &err));
        accepted(optimizer_read("model", &c, &t, b, out[1], out[2], &err));
        for (int k = 0; k < 3; k++) check(!memcmp(in[k], out[k], n), "arena %d came back wrong", k);
        check(!buffers || !memcmp(in[3], out[3], t.buffer_elements * 4), "other buffers came back");
        int rc = optimizer_read("model", &c, &t, b, out[1], NULL, &err);
        refused(rc, "model/optimizer.safetensors: tensor v.", "no place");
        accepted(optimizer_write("model", &c, &t, b, in[1], NULL, &err));
        rc = optimizer_read("model", &c, &t, b, out[1], out[2], &err);
        refused(rc, "model/optimizer.safetensors: tensor v.", "missing");
        for (int k = 0; k < 4; k++) free(in[k]), free(out[k]);
        free(one), free(two);
        tensor_table_free(&t);
        finish();
    }
}

static void test_other_models(void) {
    static const struct {
        const char *name, *word, *other;
    } no[] = {
        {"wider-experts",
            "tensor model.layers.1.mlp.experts.0.gate_proj.weight: expected shape "
            "[24, 48], found [20, 48]",
            NULL},
        {"more-experts", "tensor model.layers.1.mlp.gate.weight", "[6, 48], found [5, 48]"},
        {"more-layers", "tensor model.layers.3.", "is missing"},
        {"fewer-layers", "tensor model.layers.2.", "no place"},
        {"tied", "tensor lm_head.weight of shape [256, 48]", "no place"},
        {"no-qk-norm", "tensor model.layers.0.self_attn.", "no place"},
        {"selection-bias", "tensor model.layers.1.mlp.gate.e_score_correction_bias", "missing"},
        {"no-dense-layer", "tensor model.layers.0.mlp.gate.weight of shape [5, 48]", "missing"},
        {"same-size", "tensor model.embed_tokens.weight", "expected shape [48, 256], found"},
    };
    static const struct {
        const char *name;
        int64_t rows, cols; // cols 0: a vector
        TensorKind kind;
        int layer;
        size_t expert, row; // where it begins
    } layout[] = {
        {"model.embed_tokens.weight", 256, 48, T_EMBED, -1, 0, 0},
        {"model.layers.2.self_attn.q_proj.weight", 32, 48, T_QKV, 2, 0, 0},
        {"model.layers.2.self_attn.k_proj.weight", 16, 48, T_QKV, 2, 0, 32},
        {"model.layers.2.self_attn.v_proj.weight", 16, 48, T_QKV, 2, 0, 48},
        {"model.layers.0.mlp.up_proj.weight", 36, 48, T_GATE_UP, 0, 0, 36},
        {"model.layers.1.mlp.experts.4.gate_proj.weight", 20, 48, T_GATE_UP, 1, 4, 0},
        {"model.layers.1.mlp.experts.4.up_proj.weight", 20, 48, T_GATE_UP, 1, 4, 20},
        {"model.layers.1.mlp.experts.3.down_proj.weight", 48, 20, T_DOWN, 1, 3, 0},
        {"model.norm.weight", 48, 0, T_FINAL_NORM, -1, 0, 0},
    };
    const Backend *b = memory_of(F32);
    TensorTable t = table_of(&moe_shape, F32);
    unsigned char *p = arena(&t, 1, F32, 1);
    folder("model");
    accepted(model_write("model", &moe_shape, &t, b, p, NULL, &err));
    if (begin("model/layout")) { // names, shapes and contents as other programs know them
        SafeFile f = {.n = 0};
        accepted(safe_open(&f, "model/model.safetensors", &err));
        for (size_t i = 0; i < COUNT(layout); i++) {
            const SafeTensor *s = safe_find(&f, layout[i].name);
            const Tensor *x = tensor_of(&t, layout[i].kind, layout[i].layer) + layout[i].expert;
            const unsigned char *at = p + 4 * (x->offset + layout[i].row * x->cols);
            int fits = s && s->rank == 1 + (layout[i].cols > 0) && s->shape[0] == layout[i].rows;
            fits = fits && (s->rank == 1 || s->shape[1] == layout[i].cols);
            check(fits, "%s: missing, or another shape", layout[i].name);
            check(!fits || !memcmp(s->data, at, s->bytes), "%s: other content", layout[i].name);
        }
        safe_close(&f);
        finish();
    }
    if (begin("model/refused/another-rank")) { // a vector as a matrix of one column
        static const char norm[] = "\"model.norm.weight\":{\"dtype\":\"F32\",\"shape\":[48";
        size_t n, length;
        unsigned char *file = get("model/model.safetensors", &n);
        char *at = strstr((char *)file + 8, norm);
        memcpy(&length, file, 8);
        must(at && n + 2 < 1 << 20, norm);
        at += strlen(norm), length += 2;
        memmove(at + 2, at, n - (size_t)(at - (char *)file));
        memcpy(at, ",1", 2), memcpy(file, &length, 8);
        folder("model2"), put_file("model2/model.safetensors", file, n + 2);
        int rc = model_check("model2", &moe_shape, &t, b, &err);
        refused(rc, "tensor model.norm.weight: expected shape [48], found [48, 1]", NULL);
        free(file);
        finish();
    }
    for (size_t i = 0; i < COUNT(no); i++) {
        if (!begin("model/refused/%s", no[i].name)) continue;
        Config c = moe_shape;
        if (i == 0) c.d_expert = 24;
        if (i == 1) c.n_experts = 6;
        if (i == 2) c.n_layers = 4;
        if (i == 3) c.n_layers = 2;
        if (i == 4) c.tied = 1;
        if (i == 5) c.qk_norm = QK_NORM_NONE;
        if (i == 6) c.router = ROUTER_SIGMOID;
        if (i == 7) c.dense_layers = 0;
        if (i == 8) c.vocab_size = 48, c.d_model = 256;
        TensorTable u = table_of(&c, F32);
        unsigned char *q = arena(&u, 1, F32, 0), *bias = arena(&u, 0, F32, 0);
        int rc = model_read("model", &c, &u, b, q, u.buffer_elements ? bias : NULL, &err);
        check(strstr(err.text, "model/model.safetensors: ") == err.text, "no file: %s", err.text);
        refused(rc, no[i].word, no[i].other);
        for (size_t k = 0; k < u.elements * 4; k++) check(q[k] == 0xFF, "byte %zu was changed", k);
        check(model_check("model", &c, &u, b, &err) == -1, "model_check sees no difference");
        free(q), free(bias);
        tensor_table_free(&u);
        finish();
    }
    free(p);
    tensor_table_free(&t);
}

/* Writes a small model of type `from` whose embedding is in (rows, 256); reads it as a model of
   type `to`, whose embedding is out. */
static int through_file(int rows, const void *in, DType from, void *out, DType to) {
    Config c = {.vocab_size = rows,
        .seq_len = 8,
        .n_layers = 1,
        .d_model = 256,
        .n_heads = 1,
        .n_kv_heads = 1,
        .head_dim = 2,
        .n_experts = 1,
        .top_k = 1,
        .d_expert = 1,
        .tied = 1};
    TensorTable t = table_of(&c, from), u = table_of(&c, to);
    unsigned char *p = arena(&t, 1, from, 0), *q = arena(&u, 1, to, 0);
    size_t at = tensor_of(&t, T_EMBED, -1)->offset, there = tensor_of(&u, T_EMBED, -1)->offset;
    memset(p, 0, t.elements * dtype_size(from));
    memcpy(p + at * dtype_size(from), in, (size_t)rows * 256 * dtype_size(from));
    accepted(model_write("model", &c, &t, memory_of(from), p, NULL, &err));
    int rc = model_read("model", &c, &u, memory_of(to), q, NULL, &err);
    memcpy(out, q + there * dtype_size(to), (size_t)rows * 256 * dtype_size(to));
    free(p), free(q);
    tensor_table_free(&t), tensor_table_free(&u);
    return rc;
}

static void test_types(void) {
    enum { N = 65536, ROWS = 4200 }; // 4200 rows take more than the buffer for conversions
    static uint16_t half[ROWS * 256];
    static uint32_t bits[ROWS * 256];
    folder("model");
    for (int i = 0; i < ROWS * 256; i++) half[i] = (uint16_t)i;
    if (begin("model/bf16-to-f32")) {
        accepted(through_file(ROWS, half, BF16, bits, F32));
        for (uint32_t i = 0; i < ROWS * 256; i++) {
            int nan = (i & 0x7fff) > 0x7f80; // stays one, its payload may change
            uint32_t want = i % N << 16, rest = bits[i] ^ want;
            check(nan ? (bits[i] & 0x7fffffff) > 0x7f800000 : !rest, "%04x is %08x", i, bits[i]);
        }
        finish();
    }
    if (begin("model/f16-to-f32")) {
        accepted(through_file(256, half, F16, bits, F32));
        for (uint32_t i = 0; i < N; i++) {
            uint32_t sign = i >> 15 << 31, exponent = i >> 10 & 31, fraction = i & 1023, want;
            float tiny = (float)fraction * 0x1p-24f, got;
            memcpy(&want, &tiny, 4), memcpy(&got, &bits[i], 4);
            if (exponent) want = (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
            int nan = exponent == 31 && fraction;
            check(nan ? isnan(got) : bits[i] == (sign | want), "%04x is %08x", i, bits[i]);
        }
        finish();
    }
    if (begin("model/f64-to-f32")) { // nearest, ties to even; what is too large is refused
        static double in[256] = {1, -0.0, 1 + 0x1p-24, 1 + 0x3p-24, 0.1, 0x1p-149, 0x1p-151, 3.4e38,
            -(double)INFINITY, 1.0 / 3};
        static const float to[] = {
            1, -0.0f, 1, 1 + 0x1p-22f, 0.1f, 0x1p-149f, 0, 3.4e38f, -INFINITY, 1.0f / 3};
        float out[256];
        accepted(through_file(1, in, F64, out, F32));
        for (size_t i = 0; i < COUNT(to); i++)
            check(!memcmp(&out[i], &to[i], 4), "%.17g is %.9g", in[i], (double)out[i]);
        in[77] = 1e300;
        refused(through_file(1, in, F64, out, F32),
            "model/model.safetensors: tensor model.embed_"
            "tokens.weight: 1e+300 (F64, element 77)",
            "does not fit into F32");
        finish();
    }
    if (begin("model/f32-to-bf16")) {
        static const float from[256] = {
            1, 1 + 0x1p-8f, 1 + 0x3p-8f, 1 + 0x1.01p-8f, -0.0f, INFINITY, 0x1p-133f, 3.3e38f};
        static const uint16_t to[] = {0x3f80, 0x3f80, 0x3f82, 0x3f81, 0x8000, 0x7f80, 1, 0x7f78};
        float in[256] = {[5] = 3.4e38f, [9] = NAN};
        uint16_t out[256];
        accepted(through_file(1, from, F32, out, BF16));
        for (size_t i = 0; i < COUNT(to); i++)
            check(out[i] == to[i], "%.9g is %04x", (double)from[i], out[i]);
        int rc = through_file(1, in, F32, out, BF16);
        refused(rc, "3.4e+38 (F32, element 5)", "does not fit into BF16");
        in[5] = 0;
        accepted(through_file(1, in, F32, out, BF16));
        check((out[9] & 0x7fff) > 0x7f80, "NaN is %04x", out[9]);
        finish();
    }
}

#include "test_imports.h"
#include "test_placement.h"

// -------------------------------------------------------------------------------------------------
// run

// Saves a small checkpoint whose content is one number.
static int save(const char *out, int64_t step, int tag) {
    static CkptWrite w;
    static const SafeEntry e[2] = {{"a", F32, 1, {200}}, {"b", F32, 2, {10, 10}}};
    char path[CKPT_PATH];
    float x[300];
    const void *at[2] = {x, x + 200};
    for (int i = 0; i < 300; i++) x[i] = (float)tag;
    json_t *j = json_pack("{s:i}", "tag", tag);
    int rc = ckpt_begin(&w, out, step, &err);
    if (!rc) rc = json_write(w.path, "config.json", j, &err);
    if (!rc) rc = path_join(path, w.path, "model.safetensors", &err);
    if (!rc) rc = safe_write(path, e, 2, nth, at, &err);
    if (!rc) rc = ckpt_commit(&w, &err);
    if (rc) ckpt_abort(&w);
    json_decref(j);
    return rc;
}

// The number, -1 if there is none or the files do not agree.
static int tag_of(const char *checkpoint) {
    char path[CKPT_PATH];
    SafeFile f;
    Err ignored;
    snprintf(path, sizeof path, "%s/config.json", checkpoint);
    json_t *j = json_read(path, &ignored);
    int tag = j ? (int)json_integer_value(json_object_get(j, "tag")) : -1;
    json_decref(j);
    snprintf(path, sizeof path, "%s/model.safetensors", checkpoint);
    if (tag < 0 || safe_open(&f, path, &ignored)) return -1;
    int same = f.n == 2 && f.tensor[0].count == 200 && f.tensor[1].count == 100;
    for (size_t i = 0; i < 300 && same; i++) same = element_value(f.tensor[0].data, F32, i) == tag;
    safe_close(&f);
    return same ? tag : -1;
}

static void list_is(const char *out, const char *want) {
    int64_t *steps;
    int n, rc = ckpt_list(out, &steps, &n);
    char text[256] = "";
    for (int i = 0; i < n; i++)
        sprintf(text + strlen(text), "%s%lld", i ? " " : "", (long long)steps[i]);
    check(!rc && !strcmp(text, want), "%s has '%s', expected '%s'", out, text, want);
    free(steps);
}
static void names_are(const char *path, const char *want) {
    const char *found = names(path);
    check(!strcmp(found, want), "%s has '%s', expected '%s'", path, found, want);
}
static void no_run(void) { must(!remove_path("o", &err), "o"); }

static void test_names(void) {
    static const struct {
        const char *name;
        int64_t step;
    } of[] = {
        {"step_00000000", 0},
        {"step_00000100", 100},
        {"step_99999999", 99999999},
        {"step_123456789012", 123456789012},
        {"step_1", -1},
        {"step_0000001", -1},
        {"step_000000001", -1},
        {"step_0000000a", -1},
        {"step_-0000001", -1},
        {"step_+0000001", -1},
        {"step_ 0000001", -1},
        {"step_00000001x", -1},
        {"step_00000001.tmp", -1},
        {"step_", -1},
        {".step_00000001", -1},
        {"Step_00000001", -1},
        {"step_99999999999999999999999", -1},
        {"", -1},
        {"latest", -1},
    };
    static const char *const almost[] = {
        "step_1", "step_000000001", "step_0000000a", "step_00000007", ".step_00000009.tmp"};
    if (begin("run/names")) {
        for (size_t i = 0; i < COUNT(of); i++) {
            int64_t step = step_of(of[i].name);
            check(step == of[i].step, "'%s' is step %lld", of[i].name, (long long)step);
        }
        finish();
    }
    if (begin("run/almost-checkpoints")) { // other names, and steps that are no complete folder
        char path[64];
        int64_t *steps;
        int n;
        no_run();
        accepted(save("o", 5, 50));
        for (size_t i = 0; i < COUNT(almost); i++) {
            snprintf(path, sizeof path, "o/%s", almost[i]), folder(path);
            strcat(path, "/config.json"), put_text(path, "{}");
        }
        put_text("o/step_00000010", "");
        must(!symlink("step_00000005", "o/step_00000011"), "o");
        folder("o/step_00000012/config.json"), put_text("o/step_00000012/model.safetensors", "");
        list_is("o", "5");
        list_is("none", "");
        check(ckpt_list("o/step_00000010", &steps, &n) == -1 && !steps && !n, "a file was listed");
        refused(ckpt_mark_best("o", 7, &err), "o/step_00000007: expected a complete", NULL);
        refused(save("o", 10, 100), "o/step_00000010: cannot give", NULL);
        refused(save("o", -1, 0), "step -1", NULL);
        check(!exists("o/.step_00000010.tmp"), "left behind");
        finish();
    }
}

static void test_run(void) {
    static CkptWrite w;
    int lock, second, status;
    if (begin("run/commit")) { // nothing under its name until then; every file is synced
        no_run();
        accepted(save("o/a/b", 1, 10));
        accepted(ckpt_begin(&w, "o/a/b", 2, &err));
        list_is("o/a/b", "1");
        names_are("o/a/b", ".step_00000002.tmp latest step_00000001 ");
        ckpt_abort(&w);
        names_are("o/a/b", "latest step_00000001 ");
        disk.files = disk.folders = disk.forgotten = 0;
        accepted(save("o/a/b", 2, 20));
        check(disk.files == 2 && !disk.forgotten, "%d files synced, %d not", disk.files,
            disk.forgotten);
        check(disk.folders == 3, "%d folders synced: its own, that above for the name and the link",
            disk.folders);
        check(ckpt_linked("o/a/b", "latest") == 2 && tag_of("o/a/b/latest") == 20, "latest");
        check(ckpt_linked("o/a/b", "best") == -1 && tag_of("o/a/b/step_00000001") == 10, "others");
        finish();
    }
    for (int way = 0; way < 2; way++) {
        if (!begin("run/replace%s", way ? "/without-exchange" : "")) continue;
        no_run();
        disk.no_exchange = way;
        accepted(save("o", 7, 70)), accepted(save("o", 8, 80)), accepted(save("o", 7, 71));
        disk.no_exchange = 0;
        names_are("o", "latest step_00000007 step_00000008 ");
        check(tag_of("o/step_00000007") == 71 && tag_of("o/latest") == 71, "the old one is there");
        finish();
    }
    if (begin("run/replace/fails")) { // the old one is there, under one of its names
        for (int k = 0, hit = 1; hit; k++) {
            no_run();
            accepted(save("o", 7, 70));
            disk.calls = 0, disk.fail_at = k, disk.code = EIO;
            int rc = save("o", 7, 71);
            disk.fail_at = -1, hit = disk.calls > k;
            int there = tag_of("o/step_00000007") == 70 || tag_of("o/.step_00000007.old") == 70;
            int late = strstr(names("o"), ".old") != NULL; // being removed
            check(!rc || there || late, "the old one is gone after system call %d", k);
        }
        finish();
    }
    if (begin("run/path-too-long")) { // what was cut off from it is no path to remove
        static char path[CKPT_PATH];
        memset(path, 'z', sizeof path - 1);
        for (size_t i = 254; i < 16 * 255; i += 255) path[i] = '/';
        for (size_t n = CKPT_PATH - 1; n > CKPT_PATH - 3; n--) {
            path[n] = 0;
            int rc = ckpt_begin(&w, path, 1, &err);
            refused(rc, "longer than 4095 bytes", NULL);
            ckpt_abort(&w);
            check(exists(path), "the folder of %zu bytes is gone", n);
        }
        path[8 * 255 - 1] = 0; // remove_path goes down 16 folders at most
        accepted(remove_path(path, &err));
        finish();
    }
    if (begin("run/prune")) {
        no_run();
        for (int i = 1; i <= 5; i++) accepted(save("o", i * 100, i));
        accepted(save("o", 123456789012, 6)); // sorted as a number
        accepted(ckpt_mark_best("o", 200, &err));
        check(tag_of("o/best") == 2, "best");
        refused(ckpt_mark_best("o", 250, &err), "o/step_00000250", "does not exist");
        accepted(ckpt_prune("o", 0, &err)), list_is("o", "100 200 300 400 500 123456789012");
        accepted(ckpt_prune("o", 9, &err)), list_is("o", "100 200 300 400 500 123456789012");
        accepted(ckpt_prune("o", 3, &err)), list_is("o", "200 400 500 123456789012");
        accepted(save("o", 400, 7)); // now latest, but not newest
        accepted(ckpt_prune("o", 1, &err)), list_is("o", "200 400 123456789012");
        check(tag_of("o/best") == 2 && tag_of("o/latest") == 7, "best or latest is gone");
        put_text("o/metrics.jsonl", "{}\n");
        accepted(ckpt_clear("o", &err));
        names_are("o", "metrics.jsonl ");
        finish();
    }
    if (begin("run/lock")) { // one run a folder; free when its process is gone, however it went
        char pid[40];
        no_run();
        snprintf(pid, sizeof pid, "process %ld is", (long)getpid());
        accepted(ckpt_lock("o/x/y", &lock, &err));
        refused(ckpt_lock("o/x/y", &second, &err), "o/x/y: another run", pid);
        close(lock);
        pid_t child = fork();
        if (child == 0) _exit(ckpt_lock("o/x/y", &lock, &err) ? 1 : 77);
        check(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 77, "still locked");
        accepted(ckpt_lock("o/x/y", &lock, &err));
        close(lock);
        put_text("o/file", "x");
        refused(ckpt_lock("o/file", &lock, &err), "o/file: expected a folder", NULL);
        refused(ckpt_lock("o/file/x", &lock, &err), "o/file/x: cannot make this folder", NULL);
        refused(ckpt_lock("", &lock, &err), "expected a folder name", NULL);
        finish();
    }
    if (begin("run/tidy")) { // half in, half out: gone; replaced but without successor: back
        no_run();
        for (int i = 1; i <= 3; i++) accepted(save("o", i, 10 * i));
        accepted(save("o/p", 2, 21));
        folder("o/.step_00000005.tmp/sub"), put_text("o/.step_00000005.tmp/sub/file", "x");
        folder("o/.step_00000006.del"), folder("o/.other.tmp"), folder("o/.step_x.tmp");
        folder("o/.step_00000007.bak");
        must(!symlink("../p", "o/.step_00000005.tmp/link") &&
                !rename("o/step_00000001", "o/.step_00000001.old") &&
                !symlink("p", "o/.step_00000008.old") && !mkdir("o/step_00000008", 0777) &&
                !mkdir("o/.step_00000002.old", 0777),
            "o");
        list_is("o", "2 3");
        accepted(ckpt_lock("o", &lock, &err));
        close(lock);
        list_is("o", "1 2 3");
        names_are("o",
            ".lock .other.tmp .step_00000007.bak .step_x.tmp latest p step_00000001 "
            "step_00000002 step_00000003 step_00000008 ");
        check(tag_of("o/step_00000001") == 10 && tag_of("o/step_00000002") == 20, "wrong ones");
        check(tag_of("o/p/step_00000002") == 21, "a link was followed");
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// fault

// A run in which each kind of change happens: a new checkpoint, one replaced, links, one deleted.
static void before_run(void) {
    no_run();
    must(!save("o", 1, 10) && !save("o", 2, 20) && !ckpt_mark_best("o", 1, &err), "o");
}
static int whole_run(void) {
    int lock, rc = ckpt_lock("o", &lock, &err);
    if (rc) return rc;
    rc = save("o", 2, 21) || save("o", 3, 30) || ckpt_mark_best("o", 3, &err) ||
        ckpt_prune("o", 2, &err);
    close(lock);
    return rc ? -1 : 0;
}

/* Whatever has the name of a step is a whole checkpoint of that step; with `links`, so are latest
   and best. */
static void check_whole(int links) {
    char all[4096], path[64];
    snprintf(all, sizeof all, "%s", names("o"));
    for (char *name = strtok(all, " "); name; name = strtok(NULL, " ")) {
        snprintf(path, sizeof path, "o/%.50s", name);
        if (!strncmp(name, "step_", 5))
            check(tag_of(path) > 0 && tag_of(path) / 10 == step_of(name), "%s is not whole", path);
    }
    int latest = tag_of("o/latest"), best = tag_of("o/best");
    check(!links || (latest > 0 && best > 0), "latest is %d, best is %d", latest, best);
}

/* The run's k-th system call fails, or is where it is killed; then comes the next run. Returns
   whether there was a k-th. */
static int fail_at(int k, int code, int no_exchange) {
    int64_t *steps;
    int rc = -1, hit, n, lock, status;
    before_run();
    disk.calls = 0, disk.fail_at = k, disk.code = code, disk.no_exchange = no_exchange;
    if (code == DIES) {
        pid_t child = fork();
        if (child == 0) _exit(whole_run() ? 1 : 0);
        disk.fail_at = -1;
        check(waitpid(child, &status, 0) == child && WIFEXITED(status), "it crashed");
        hit = WEXITSTATUS(status) == 77;
        check(hit || WEXITSTATUS(status) == 0, "it failed");
        rc = hit ? -1 : 0;
    } else {
        rc = whole_run();
        disk.fail_at = -1;
        hit = disk.calls > k;
        check(!rc || (err.text[0] && !strchr(err.text, '\n')), "not one line: %s", err.text);
    }
    // killed without exchange, a replaced checkpoint may only be there under its other name
    check_whole(code != DIES || !no_exchange);
    check(!ckpt_list("o", &steps, &n) && n > 0, "no checkpoint is left");
    free(steps);
    int done = tag_of("o/latest") == 30 && tag_of("o/best") == 30;
    check(rc || (done && tag_of("o/step_00000002") == 21), "it failed, and that was not said");
    accepted(ckpt_lock("o", &lock, &err));
    close(lock);
    check_whole(1);
    check(!strstr(names("o"), ".step_"), "still there: %s", names("o"));
    accepted(whole_run());
    check_whole(1);
    names_are("o", ".lock best latest step_00000002 step_00000003 ");
    disk.no_exchange = 0;
    return hit;
}

// What is tried with too little memory.
static const char *const tasks[] = {"data", "tokenizer-save", "tokenizer-load", "config-write",
    "config-read", "model-write", "model-read", "shards-read", "list"};
static int do_task(size_t task, const TensorTable *t, void *p) {
    static const char *const in[] = {"t/f", "three/*"};
    Numbers numbers = {0, 0};
    Tokenizer tok;
    Config c;
    Data d;
    int64_t *steps;
    int n, rc;
    tokenizer_bytes(&tok);
    switch (task) {
    case 0:
        rc = data_open(&d, in, 1, in + 1, 1, 0, 8, 256, 1, number, &numbers, &err);
        if (!rc) data_close(&d);
        return rc;
    case 1: return tokenizer_save(&tok, "tok", &err);
    case 2: return tokenizer_load(&tok, "tok", &err);
    case 3: return config_write("cfg", &moe_shape, 0.001, F32, -1, &err);
    case 4: return config_read(&c, "cfg", &err);
    case 5: return model_write("model", &moe_shape, t, memory_of(F32), p, NULL, &err);
    case 6: return model_read("model", &moe_shape, t, memory_of(F32), p, NULL, &err);
    case 7: return model_read("shards", &moe_shape, t, memory_of(F32), p, NULL, &err);
    }
    rc = ckpt_list("o", &steps, &n);
    free(steps);
    return rc ? fail(&err, "o: %s", strerror(errno)) : 0;
}

static void test_faults(void) {
    static const struct {
        const char *name;
        int code, no_exchange;
    } way[] = {
        {"killed", DIES, 0},
        {"killed/without-exchange", DIES, 1},
        {"disk-full", ENOSPC, 0},
        {"io-error", EIO, 0},
        {"io-error/without-exchange", EIO, 1},
        {"interrupted", EINTR, 0},
    };
    for (size_t i = 0; i < COUNT(way); i++) {
        if (!begin("fault/%s", way[i].name)) continue;
        int k = 0;
        while (!check_failed[0] && fail_at(k, way[i].code, way[i].no_exchange)) k++;
        size_t n = strlen(check_failed);
        if (n) snprintf(check_failed + n, sizeof check_failed - n, " (system call %d)", k);
        check(k > 60, "only %d system calls", k);
        finish();
    }
    if (begin("fault/file-size-limit")) {
        struct rlimit old, low;
        before_run();
        must(!getrlimit(RLIMIT_FSIZE, &old) && signal(SIGXFSZ, SIG_IGN) != SIG_ERR, "limit");
        low = old, low.rlim_cur = 1000;
        must(!setrlimit(RLIMIT_FSIZE, &low), "limit");
        int again = save("o", 2, 21), rc = save("o", 3, 30);
        must(!setrlimit(RLIMIT_FSIZE, &old), "limit");
        check(again == -1, "a replacement was written");
        refused(rc, "model.safetensors: cannot write", "ulimit -f");
        names_are("o", "best latest step_00000001 step_00000002 ");
        check(tag_of("o/latest") == 20 && tag_of("o/best") == 10, "the old ones are damaged");
        finish();
    }
    if (begin("fault/device-full")) {
        static CkptWrite w;
        static const SafeEntry e = {"a", F32, 1, {1}};
        const void *at[1] = {&e};
        char path[CKPT_PATH];
        json_t *j = json_pack("{s:i}", "tag", 30);
        before_run();
        accepted(ckpt_begin(&w, "o", 3, &err));
        accepted(path_join(path, w.path, "model.safetensors", &err));
        if (!exists("/dev/full")) {
            skipped = "no /dev/full";
        } else {
            must(!symlink("/dev/full", path), path);
            refused(safe_write(path, &e, 1, nth, at, &err), "No space left", "free some space");
            accepted(path_join(path, w.path, "config.json.tmp", &err));
            must(!symlink("/dev/full", path), path);
            refused(json_write(w.path, "config.json", j, &err), "config.json", "No space left");
            names_are(w.path, "");
        }
        ckpt_abort(&w);
        check_whole(1), list_is("o", "1 2");
        json_decref(j);
        finish();
    }
    TensorTable t = table_of(&moe_shape, F32);
    unsigned char *p = arena(&t, 1, F32, 0);
    before_run();
    for (size_t i = 0; i < COUNT(tasks); i++) { // files to read
        if (i == 7) split("model");
        must(!do_task(i, &t, p), tasks[i]);
    }
    for (size_t i = 0; i < COUNT(tasks) * 2; i++) {
        const int calls = i >= COUNT(tasks); // system calls fail, with EIO; else allocations
        const char *task = tasks[i % COUNT(tasks)];
        if (!begin("fault/no-%s/%s", calls ? "disk" : "memory", task)) continue;
        int hit = 1, k = 0;
        for (; hit && !check_failed[0]; k += hit) {
            err.text[0] = 0, mem.calls = 0, disk.calls = 0, disk.code = EIO;
            *(calls ? &disk.fail_at : &mem.fail_at) = k;
            int rc = do_task(i % COUNT(tasks), &t, p);
            disk.fail_at = mem.fail_at = -1, hit = (calls ? disk.calls : mem.calls) > k;
            // that a file which was only read cannot be closed does no harm
            check(rc == -hit || (calls && !rc), "failure %d was not said", k);
            check(!rc || (err.text[0] && !strchr(err.text, '\n')), "not one line: %s", err.text);
            check(mem.live == live_before, "failure %d: other memory is not freed", k);
        }
        finish();
    }
    free(p);
    tensor_table_free(&t);
}

int main(int argc, char **argv) {
    static char dir[512];
    const char *tmp = getenv("TMPDIR");
    if (argc > 1) filter = argv[1];
    // in memory if there is no word of where: thousands of small files are written and renamed
    if (!tmp || !*tmp) tmp = access("/dev/shm", W_OK | X_OK) ? "/tmp" : "/dev/shm";
    snprintf(dir, sizeof dir, "%.480s/test_files.XXXXXX", tmp);
    must(mkdtemp(dir) && !chdir(dir), dir);
    at_begin = note_memory, at_finish = check_memory;
    json_set_alloc_funcs(mem_parser, mem_free);
    test_rows();
    test_shards();
    test_inputs();
    test_tokenizer();
    test_safe();
    test_damage();
    test_config();
    test_round_trips();
    test_other_models();
    test_types();
    test_architectures();
    test_arch_files();
    test_sharded_models();
    test_fused();
    test_tied_head();
    test_names();
    test_run();
    test_placement();
    test_faults();
    must(!chdir("/") && !remove_path(dir, &err), dir);
    return failures != 0;
}
