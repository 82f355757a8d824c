/* dataloader.h: any bytes as text, or shards of tokens, as rows for training and for validation.

   It knows moe.h's Err and nothing else of the house. What it does not know, the tokenizer, comes
   in as a function (Encode); without one the vocabulary is the 256 bytes and the tokens are the
   files themselves, mapped into memory and never copied. A mapped file must not shrink while it is
   read.

   A shard is llm.c's: a header of 256 int32 ([0] 20240520, [1] 1, [2] the number of tokens), then
   uint16 tokens; or [0] 20240801, [1] 7 and uint32 tokens; little-endian. It is known by its first
   four bytes, whatever its name, and may stand beside texts. Its size must be what its header says,
   and every token must be in the vocabulary: both are checked before anything is trained.

   data_open takes files, folders (every regular file below, hidden ones skipped, and the tokenizer
   that `tokenize` writes beside its shards) and glob patterns.
   Each file gives a training part, its beginning, and a validation part, its end (the last 10% or
   so); with separate validation files the inputs are all training. A part is a run of tokens that
   stays within one file: a row never crosses from one text into another.

   Training rows are an endless stream, numbered from 0. Row n is a pure function of (seed, n):
   epoch n / rows, then a keyed permutation of the rows of that epoch, then the window of T+1 tokens
   that this row covers. So a run resumes from one number, and the order depends on neither ranks,
   threads nor micro-batches.
     part of len tokens:   |<-- o -->|<- T ->|<- T ->| ... |<- T ->|1|<- rest ->|
     windows               count = max(1, (len - T) / T), none when len < T + 1
     o                     in [0, len - 1 - count*T], drawn anew for every epoch and part
   Each window is used exactly once an epoch. The shift o makes the windows of two epochs differ, so
   that a token is seen at different positions.

   Validation rows lie side by side from the first token of a part to its last, so that each token
   but the first is a target exactly once. The last row of a part may be short: missing targets are
   -1, never a token that a loss would count.

   Start reading at data_open, then data_train_rows. */
#ifndef DATALOADER_H
#define DATALOADER_H

#include "moe.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define DATA_FN __attribute__((unused)) static

/* Turns n bytes into *count tokens in fresh memory (malloc), which the caller frees. edges: a text
   begins here, or ends here; the token that stands between texts, if there is one, goes there. 0, or
   fail(). */
enum { TEXT_BEGINS = 1, TEXT_ENDS = 2 };
typedef int (*Encode)(void *ctx, const unsigned char *text, size_t n, int edges, uint32_t **tokens,
    size_t *count, Err *err);

typedef struct DataFile {
    char *path;
    uint64_t dev, ino; // the same file under two names has the same pair
    int for_val;       // named by --val
    int order;         // place in the list, as given
    unsigned char *map;
    size_t size;
    int token_size; // 0: text; 2, 4: a shard of tokens of so many bytes
} DataFile;

/* A run of tokens within one file: `byte` of a text with the byte vocabulary, `id` of an encoded
   one, `id16` or `id32` of a shard. */
typedef struct DataPart {
    int source; // its file, an index into Data.file
    const unsigned char *byte;
    uint32_t *id;
    const uint16_t *id16;
    const uint32_t *id32;
    uint64_t len; // tokens
    uint64_t first,
        rows; // its rows are [first, first + rows) of all: of an epoch, or of the validation
} DataPart;

typedef struct Data {
    DataFile *file; // inputs first, then validation files
    int n_files;
    DataPart *train, *val; // parts that have at least one row
    int n_train, n_val;
    int T;
    uint64_t seed;
    uint64_t train_tokens; // in the training parts that have a row
    uint64_t train_rows;   // of T targets in an epoch
    uint64_t val_tokens;   // 0: there is nothing to validate on
    uint64_t val_targets;  // tokens that are a target of a validation row
    uint64_t val_bytes; // bytes of text behind those targets (with an encoder: of the whole parts;
                        // of a shard: unknown, 0)
    int n_shards;       // files that are shards
} Data;

// -------------------------------------------------------------------------------------------------
// the order of rows, from counters

/* A bijection of 64-bit words that changes half of the bits, whichever input bit changes:
   splitmix64's finaliser. */
DATA_FN uint64_t data_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Hash of three counters. Nested, so that (a, b) and (b, a) differ.
DATA_FN uint64_t data_hash(uint64_t a, uint64_t b, uint64_t c) {
    return data_mix(data_mix(data_mix(a) ^ b) ^ c);
}

/* Where i goes in a pseudo-random permutation of 0 .. n-1. A Feistel network permutes the numbers
   of an even count of bits, at most 4n of them; walking the cycle from i until it lands below n
   permutes those below n (Black and Rogaway, 2002). Fewer than four steps on average; it ends
   because it comes back to i at last. */
DATA_FN uint64_t data_permute(uint64_t i, uint64_t n, uint64_t key) {
    enum { ROUNDS = 6 };
    int half = 1;
    while (half < 32 && n > (uint64_t)1 << (2 * half)) half++;
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    do {
        uint64_t left = i >> half, right = i & mask;
        for (int r = 0; r < ROUNDS; r++) {
            uint64_t next = left ^ (data_hash(key, (uint64_t)r, right) & mask);
            left = right;
            right = next;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}

/* The part that holds row `row`, which lies below the sum of all their rows. Parts are sorted by
   `first`. */
DATA_FN const DataPart *data_part_of(const DataPart *part, int n, uint64_t row) {
    int lo = 0, hi = n - 1;
    while (lo < hi) {
        int mid = lo + (hi - lo + 1) / 2;
        if (part[mid].first <= row)
            lo = mid;
        else
            hi = mid - 1;
    }
    return &part[lo];
}

DATA_FN int data_token(const DataPart *p, uint64_t at) {
    return p->byte ? p->byte[at]
        : p->id16  ? p->id16[at]
        : p->id32  ? (int)p->id32[at]
                   : (int)p->id[at];
}

/* Fills x and y (rows, T) with rows first_row, first_row + 1, ... of the endless training stream: y
   is x one token later. source (rows), if not NULL, gets the index of the file that each row comes
   from. */
DATA_FN void data_train_rows(
    const Data *d, uint64_t first_row, int rows, int *x, int *y, int *source) {
    const uint64_t T = (uint64_t)d->T;
    for (int r = 0; r < rows; r++, x += T, y += T) {
        uint64_t row = first_row + (uint64_t)r, epoch = row / d->train_rows;
        uint64_t w = data_permute(row % d->train_rows, d->train_rows, data_hash(d->seed, epoch, 0));
        const DataPart *p = data_part_of(d->train, d->n_train, w);
        uint64_t places = p->len - p->rows * T; // of the first window; at least 1
        uint64_t at = data_hash(d->seed, epoch, 1 + (uint64_t)p->source) % places;
        at += (w - p->first) * T;
        for (uint64_t t = 0; t < T; t++) {
            x[t] = data_token(p, at + t);
            y[t] = data_token(p, at + t + 1);
        }
        if (source) source[r] = p->source;
    }
}

// Number of validation rows: together they hold every target once.
DATA_FN uint64_t data_val_rows(const Data *d) {
    return d->n_val ? d->val[d->n_val - 1].first + d->val[d->n_val - 1].rows : 0;
}

/* Fills x and y (T) with one validation row and returns its number of targets. Where there is none,
   x is 0 and y is -1: the end of a part, and all of a row beyond the last. */
DATA_FN int data_val_row(const Data *d, uint64_t row, int *x, int *y) {
    const uint64_t T = (uint64_t)d->T;
    uint64_t n = 0;
    if (row < data_val_rows(d)) {
        const DataPart *p = data_part_of(d->val, d->n_val, row);
        uint64_t at = (row - p->first) * T;
        n = p->len - 1 - at < T ? p->len - 1 - at : T;
        for (uint64_t t = 0; t < n; t++) {
            x[t] = data_token(p, at + t);
            y[t] = data_token(p, at + t + 1);
        }
    }
    for (uint64_t t = n; t < T; t++) {
        x[t] = 0;
        y[t] = -1;
    }
    return (int)n;
}

// -------------------------------------------------------------------------------------------------
// which files

// Grows by doubling; takes over `path` (malloc), also when it fails.
DATA_FN int data_add_file(Data *d, char *path, int for_val, Err *err) {
    int n = d->n_files;
    if (path && n < INT32_MAX / 2 && (n & (n - 1)) == 0) {
        DataFile *more = (DataFile *)realloc(d->file, (n ? 2 * (size_t)n : 1) * sizeof *more);
        if (more) {
            d->file = more;
        } else {
            free(path);
            path = NULL;
        }
    }
    if (!path) return fail(err, "out of memory for the names of %d input files", n + 1);
    d->file[n] = (DataFile){.path = path, .for_val = for_val, .order = n};
    d->n_files++;
    return 0;
}

// What is in a folder but is no text: hidden files, and the tokenizer beside shards.
DATA_FN int data_skipped(const char *name) {
    return name[0] == '.' || !strcmp(name, "tokenizer.json") ||
        !strcmp(name, "tokenizer_config.json");
}

/* Adds every regular file below a folder; the caller sorts. Links to files are followed, links to
   folders are not (they may lead in circles); all that is neither is skipped. */
DATA_FN int data_add_folder(Data *d, const char *folder, int for_val, Err *err) {
    DIR *dir = opendir(folder);
    if (!dir) return fail(err, "%.400s: cannot read this folder: %s", folder, strerror(errno));
    int rc = 0;
    struct dirent *entry;
    while (!rc && (errno = 0, entry = readdir(dir)) != NULL) {
        if (data_skipped(entry->d_name)) continue;
        size_t n = strlen(folder) + strlen(entry->d_name) + 2;
        char *path = (char *)malloc(n);
        if (!path) {
            rc = fail(err, "out of memory for the names of the files in %.400s", folder);
            break;
        }
        snprintf(
            path, n, "%s%s%s", folder, folder[strlen(folder) - 1] == '/' ? "" : "/", entry->d_name);
        struct stat st, target;
        if (lstat(path, &st)) {
            rc = fail(err, "%.400s: cannot look at this file: %s", path, strerror(errno));
        } else if (S_ISDIR(st.st_mode)) {
            rc = data_add_folder(d, path, for_val, err);
        } else if (S_ISREG(st.st_mode) ||
            (S_ISLNK(st.st_mode) && !stat(path, &target) && S_ISREG(target.st_mode))) {
            rc = data_add_file(d, path, for_val, err);
            path = NULL;
        }
        free(path);
    }
    if (!rc && errno)
        rc = fail(err, "%.400s: cannot read this folder: %s", folder, strerror(errno));
    closedir(dir);
    return rc;
}

// A file or a folder that exists. `named`: by the user, so that anything else is an error.
DATA_FN int data_add_path(Data *d, const char *path, int for_val, int named, Err *err) {
    struct stat st;
    if (stat(path, &st))
        return fail(err, "%.400s: cannot look at this file: %s", path, strerror(errno));
    if (S_ISDIR(st.st_mode)) return data_add_folder(d, path, for_val, err);
    if (S_ISREG(st.st_mode)) return data_add_file(d, strdup(path), for_val, err);
    if (!named) return 0;
    return fail(err,
        "%.400s: expected a file, a folder or a pattern, found a pipe or device: "
        "copy its content into a file first",
        path);
}

DATA_FN int data_by_path(const void *a, const void *b) {
    return strcmp(((const DataFile *)a)->path, ((const DataFile *)b)->path);
}

DATA_FN int data_by_order(const void *a, const void *b) {
    return ((const DataFile *)a)->order < ((const DataFile *)b)->order ? -1 : 1;
}

DATA_FN int data_by_inode(const void *a, const void *b) {
    const DataFile *f = (const DataFile *)a, *g = (const DataFile *)b;
    if (f->dev != g->dev) return f->dev < g->dev ? -1 : 1;
    if (f->ino != g->ino) return f->ino < g->ino ? -1 : 1;
    if (f->for_val != g->for_val) return f->for_val - g->for_val;
    return f->order < g->order ? -1 : f->order > g->order;
}

/* Adds what one --input or --val names, in byte order of the paths. A name that exists is taken as
   it is, even if it has a * in it; only then is it a pattern. */
DATA_FN int data_add_input(Data *d, const char *input, int for_val, const char *flag, Err *err) {
    const int before = d->n_files;
    struct stat st;
    int rc = 0;
    if (!*input)
        return fail(err, "%s: expected a file, a folder or a pattern, found an empty name", flag);
    if (!stat(input, &st)) {
        rc = data_add_path(d, input, for_val, 1, err);
    } else if (errno != ENOENT || !strpbrk(input, "*?[")) {
        return fail(err, "%s %.400s: %s", flag, input, strerror(errno));
    } else {
        glob_t found;
        int how = glob(input, GLOB_ERR, NULL, &found);
        if (how == GLOB_NOMATCH)
            return fail(err, "%s '%.400s': no file matches this pattern", flag, input);
        if (how) {
            return fail(err, "%s '%.400s': cannot follow this pattern: %s", flag, input,
                how == GLOB_NOSPACE ? "out of memory" : "a folder on its way cannot be read");
        }
        for (size_t i = 0; i < found.gl_pathc && !rc; i++)
            rc = data_add_path(d, found.gl_pathv[i], for_val, 0, err);
        globfree(&found);
    }
    if (rc) return rc;
    if (d->n_files == before) {
        return fail(err, "%s %.400s: expected text files, found none (hidden ones are skipped)",
            flag, input);
    }
    qsort(d->file + before, (size_t)(d->n_files - before), sizeof *d->file, data_by_path);
    for (int i = before; i < d->n_files; i++) d->file[i].order = i;
    return 0;
}

/* Keeps each file once among the inputs and once among the validation files; says so when that
   changes anything. */
DATA_FN int data_drop_duplicates(Data *d, Err *err) {
    int kept = 0, dropped = 0, shared = 0;
    char first_dropped[256] = "", first_shared[256] = "";
    if (!d->n_files) return 0;
    for (int i = 0; i < d->n_files; i++) {
        struct stat st;
        if (stat(d->file[i].path, &st))
            return fail(
                err, "%.400s: cannot look at this file: %s", d->file[i].path, strerror(errno));
        d->file[i].dev = (uint64_t)st.st_dev;
        d->file[i].ino = (uint64_t)st.st_ino;
    }
    qsort(d->file, (size_t)d->n_files, sizeof *d->file, data_by_inode);
    for (int i = 0; i < d->n_files; i++) {
        DataFile *f = &d->file[i];
        int same = kept && d->file[kept - 1].dev == f->dev && d->file[kept - 1].ino == f->ino;
        if (same && d->file[kept - 1].for_val == f->for_val) {
            if (!dropped++) snprintf(first_dropped, sizeof first_dropped, "%s", f->path);
            free(f->path);
            continue;
        }
        if (same && !shared++) snprintf(first_shared, sizeof first_shared, "%s", f->path);
        d->file[kept++] = *f;
    }
    d->n_files = kept;
    qsort(d->file, (size_t)kept, sizeof *d->file, data_by_order);
    if (dropped) {
        warn("%s is named more than once (%d such name%s): used once", first_dropped, dropped,
            dropped == 1 ? "" : "s");
    }
    if (shared) {
        warn("%s is both training and validation text (%d such file%s): "
             "the validation loss will be too low",
            first_shared, shared, shared == 1 ? "" : "s");
    }
    return 0;
}

enum { SHARD_HEADER = 1024, SHARD_16 = 20240520, SHARD_32 = 20240801 };

/* Checks a mapped file that begins as a shard does: version, size, and that every token is in a
   vocabulary of `vocab`. */
DATA_FN int data_shard(DataFile *f, int vocab, Err *err) {
    int32_t head[3];
    memcpy(head, f->map, f->size < sizeof head ? f->size : sizeof head);
    const int small = head[0] == SHARD_16;
    if (f->size < SHARD_HEADER)
        return fail(err,
            "%.400s: expected an llm.c token shard, a header of %d bytes and tokens, found %llu "
            "bytes: the file is cut off",
            f->path, SHARD_HEADER, (unsigned long long)f->size);
    if (head[1] != (small ? 1 : 7))
        return fail(err, "%.400s: expected an llm.c token shard of version %d, found version %d",
            f->path, small ? 1 : 7, (int)head[1]);
    f->token_size = small ? 2 : 4;
    // the field is 32 bits wide, and a shard of more than 2^31 tokens uses all of them
    const uint64_t count = (uint32_t)head[2], size = f->size - SHARD_HEADER;
    if (count * (uint64_t)f->token_size != size)
        return fail(err,
            "%.400s: expected a token shard of %lld tokens, as its header says, found %llu bytes "
            "behind the header, which are %llu of %d bytes each%s",
            f->path, head[2] < 0 ? (long long)head[2] : (long long)count, (unsigned long long)size,
            (unsigned long long)(size / (uint64_t)f->token_size), f->token_size,
            size % (uint64_t)f->token_size ? " and a rest" : "");
    if (!count) return fail(err, "%.400s: expected tokens, found an empty token shard", f->path);
    const uint16_t *id16 = (const uint16_t *)(const void *)(f->map + SHARD_HEADER);
    const uint32_t *id32 = (const uint32_t *)(const void *)(f->map + SHARD_HEADER);
    for (uint64_t at = 0; at < count; at += 65536) { // the largest of a block first: it is fast
        const uint64_t end = count - at < 65536 ? count : at + 65536;
        uint32_t most = 0;
        if (small) {
            uint16_t most16 = 0;
            for (uint64_t i = at; i < end; i++) most16 = id16[i] > most16 ? id16[i] : most16;
            most = most16;
        } else {
            for (uint64_t i = at; i < end; i++) most = id32[i] > most ? id32[i] : most;
        }
        if (most < (uint32_t)vocab) continue;
        while ((small ? id16[at] : id32[at]) < (uint32_t)vocab) at++;
        return fail(err,
            "%.400s: token %llu has the id %u, but the vocabulary has %d: the shard was made with "
            "another vocabulary (--vocab FILE names one)",
            f->path, (unsigned long long)at, small ? (unsigned)id16[at] : (unsigned)id32[at],
            vocab);
    }
    return 0;
}

// Maps a file, and sees whether it is a shard.
DATA_FN int data_map(DataFile *f, int vocab, Err *err) {
    int fd = open(f->path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return fail(err, "%.400s: cannot open this file: %s", f->path, strerror(errno));
    struct stat st;
    int rc = fstat(fd, &st);
    if (rc) {
        fail(err, "%.400s: cannot look at this file: %s", f->path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        rc = fail(
            err, "%.400s: expected a text file, found something that is no regular file", f->path);
    } else if (st.st_size == 0) {
        rc = fail(err, "%.400s: expected text, found an empty file", f->path);
    } else if ((uint64_t)st.st_size > SIZE_MAX / 2) {
        rc = fail(err, "%.400s: %lld bytes are more than this machine can address", f->path,
            (long long)st.st_size);
    } else {
        void *map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            rc = fail(err, "%.400s: cannot map this file into memory: %s%s", f->path,
                strerror(errno),
                errno == ENOMEM ? " (are there tens of thousands of files? join them)" : "");
        } else {
            f->map = (unsigned char *)map;
            f->size = (size_t)st.st_size;
        }
    }
    close(fd);
    int32_t magic = 0;
    if (!rc && f->size >= sizeof magic) memcpy(&magic, f->map, sizeof magic);
    if (magic == SHARD_16 || magic == SHARD_32) rc = data_shard(f, vocab, err);
    return rc;
}

// -------------------------------------------------------------------------------------------------
// files to parts

DATA_FN void data_close(Data *d) {
    for (int i = 0; i < d->n_train; i++) free(d->train[i].id);
    for (int i = 0; i < d->n_val; i++) free(d->val[i].id);
    for (int i = 0; i < d->n_files; i++) {
        if (d->file[i].map) munmap(d->file[i].map, d->file[i].size);
        free(d->file[i].path);
    }
    free(d->train);
    free(d->val);
    free(d->file);
    memset(d, 0, sizeof *d);
}

// How much there is of a file to cut: bytes of text, tokens of a shard.
DATA_FN size_t data_units(const DataFile *f) {
    return f->token_size ? (f->size - SHARD_HEADER) / (size_t)f->token_size : f->size;
}

// The tokens of units [begin, end) of file `source`.
DATA_FN int data_cut(DataPart *p, const Data *d, int source, size_t begin, size_t end, Encode enc,
    void *enc_ctx, Err *err) {
    *p = (DataPart){.source = source};
    const DataFile *f = &d->file[source];
    const unsigned char *text = f->map + begin;
    size_t count = end - begin;
    if (f->token_size == 2)
        p->id16 = (const uint16_t *)(const void *)(f->map + SHARD_HEADER) + begin;
    else if (f->token_size == 4)
        p->id32 = (const uint32_t *)(const void *)(f->map + SHARD_HEADER) + begin;
    else if (!enc)
        p->byte = text;
    else if (count &&
        enc(enc_ctx, text, count, (begin == 0 ? TEXT_BEGINS : 0) | (end == f->size ? TEXT_ENDS : 0),
            &p->id, &count, err))
        return -1;
    p->len = count;
    return 0;
}

DATA_FN int data_open_files(Data *d, const char *const *inputs, int n_inputs,
    const char *const *vals, int n_vals, double val_fraction, int vocab, Encode enc, void *enc_ctx,
    Err *err) {
    const uint64_t T = (uint64_t)d->T;
    for (int i = 0; i < n_inputs; i++) {
        if (data_add_input(d, inputs[i], 0, "--input", err)) return -1;
    }
    for (int i = 0; i < n_vals; i++) {
        if (data_add_input(d, vals[i], 1, n_inputs ? "--val" : "--input", err)) return -1;
    }
    if (data_drop_duplicates(d, err)) return -1;
    d->train = (DataPart *)calloc((size_t)d->n_files, sizeof *d->train);
    d->val = (DataPart *)calloc((size_t)d->n_files, sizeof *d->val);
    if (!d->train || !d->val) return fail(err, "out of memory for %d input files", d->n_files);

    uint64_t longest = 0, held_out = 0, val_rows = 0;
    int too_short = 0, n_texts = 0, first_short = 0;
    for (int i = 0; i < d->n_files; i++) {
        DataFile *f = &d->file[i];
        if (data_map(f, vocab, err)) return -1;
        const size_t units = data_units(f);
        d->n_shards += f->token_size > 0;
        // the same cut as int(0.9 * n): figures on a known text stay comparable
        size_t cut = f->for_val ? 0 : n_vals ? units : (size_t)((double)units * (1 - val_fraction));
        if (cut > units) cut = units;
        DataPart p;
        if (!f->for_val) {
            if (data_cut(&p, d, i, 0, cut, enc, enc_ctx, err)) return -1;
            n_texts++;
            held_out += units - cut;
            if (p.len > longest) longest = p.len;
            p.first = d->train_rows;
            p.rows = p.len < T + 1 ? 0 : p.len < 3 * T ? 1 : (p.len - T) / T;
            if (p.rows) {
                d->train_rows += p.rows;
                d->train_tokens += p.len;
                d->train[d->n_train++] = p;
            } else {
                if (!too_short++) first_short = i;
                free(p.id);
            }
        }
        if (cut < units) {
            if (data_cut(&p, d, i, cut, units, enc, enc_ctx, err)) return -1;
            p.first = val_rows;
            p.rows = p.len < 2 ? 0 : (p.len - 1 + T - 1) / T;
            if (p.rows) {
                val_rows += p.rows;
                d->val_tokens += p.len;
                d->val_targets += p.len - 1;
                d->val_bytes += f->token_size ? 0 : units - cut - (enc ? 0 : 1);
                d->val[d->n_val++] = p;
            } else {
                free(p.id);
            }
        }
        if (enc && !f->token_size) { // the tokens are copies
            munmap(f->map, f->size);
            f->map = NULL;
        }
    }
    if (!d->n_train && n_inputs) {
        char held[96] = "", advice[96] = "give more text";
        if (held_out) {
            snprintf(held, sizeof held, " (%llu %s are held out, see --val-fraction)",
                (unsigned long long)held_out, d->n_shards ? "tokens" : "bytes");
        }
        if (longest > 1) {
            snprintf(advice, sizeof advice, "lower --seq to at most %llu or give more text",
                (unsigned long long)longest - 1);
        }
        return fail(err,
            "%.400s%s: too short: %llu training tokens%s%s, but one row of --seq %d needs %llu: %s",
            d->file[0].path, n_texts > 1 ? " and the other inputs" : "",
            (unsigned long long)longest, n_texts > 1 ? " in the longest" : "", held, d->T,
            (unsigned long long)T + 1, advice);
    }
    if (too_short) {
        warn("%d of %d input files have fewer than --seq + 1 = %llu training "
             "tokens and are not trained on, the first is %.400s",
            too_short, n_texts, (unsigned long long)T + 1, d->file[first_short].path);
    }
    return 0;
}

/* Opens the texts. inputs, vals: files, folders, patterns; n_vals = 0: the last val_fraction of
   every input is the validation text; n_inputs = 0: there are validation rows only. T: targets in a
   row. vocab: ids of shards must lie below it. enc NULL: bytes. Warnings go to stderr. After a
   failure there is nothing to close.
   d->val_tokens = 0 is no failure: there is nothing to validate on, and the caller says so. */
DATA_FN int data_open(Data *d, const char *const *inputs, int n_inputs, const char *const *vals,
    int n_vals, double val_fraction, int T, int vocab, uint64_t seed, Encode enc, void *enc_ctx,
    Err *err) {
    memset(d, 0, sizeof *d);
    d->T = T;
    d->seed = seed;
    int rc = 0;
    if (n_inputs < 1 && n_vals < 1)
        rc = fail(err, "no text: --input PATH names a file, a folder or a pattern");
    else if (T < 1 || T >= 1 << 30)
        rc = fail(err, "--seq %d: expected 1 to %d", T, (1 << 30) - 1);
    else if (!(val_fraction >= 0 && val_fraction < 1))
        rc = fail(err, "--val-fraction %g: expected at least 0 and less than 1", val_fraction);
    else
        rc = data_open_files(
            d, inputs, n_inputs, vals, n_vals, val_fraction, vocab, enc, enc_ctx, err);
    if (rc) {
        data_close(d);
        for (char *c = err->text; *c; c++) { // a file's name may hold a line break
            if ((unsigned char)*c < 32 || *c == 127) *c = '?';
        }
    }
    return rc;
}

#endif
