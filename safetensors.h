/* safetensors.h: files that others wrote: what they look like, JSON, safetensors. It knows moe.h (for
   die() and the number types) and jansson, and nothing of models: those are checkpoint.h's.

   safetensors: u64 length of the header, the header as JSON {name: {dtype, shape, data_offsets:
   [begin, end]}, "__metadata__": {string: string}}, then the data, which the tensors tile without
   gap or overlap. All little-endian, so reading and writing is copying.

   Nothing read from a file is believed before it is checked: lengths against the file's size,
   before any memory is taken; numbers against their range; shapes with overflow-checked products.
   Functions return 0, or fail() = -1 with one line: the file, what was expected, what was found,
   what to do. What is written is synced, and removed again where that fails.

   In order: what a file looks like; writing, and JSON; safetensors. Start reading at safe_open. */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include "moe.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the files are little-endian and copied to and from memory: a big-endian host needs swaps"
#endif

#define FILE_FN __attribute__((unused)) static

enum {
    CKPT_PATH = 4096, // longest path, with its final 0
    SAFE_RANK = 8,    // most dimensions of a tensor
    JSON_LIMIT =
        64 << 20,         // largest JSON file, bytes; the largest real ones are tokenizers of 20 MB
    JSON_VALUES = 4 << 20 // most values in one: ten for each of 400,000 tensors
};
#define SAFE_HEADER_LIMIT ((uint64_t)100000000) // as in the reference implementation

// -------------------------------------------------------------------------------------------------
// what a file looks like

/* Text from outside, fit for one line of an error message: control characters and bytes beyond
   ASCII become '?', long texts lose their end. Valid until the eighth call after this one. */
FILE_FN const char *shown(const char *text) {
    static __thread char room[8][260];
    static __thread unsigned turn;
    char *out = room[turn++ % 8];
    size_t n = 0;
    for (; text[n] && n < 250; n++) {
        unsigned char c = (unsigned char)text[n];
        out[n] = c < 32 || c > 126 ? '?' : (char)c;
    }
    strcpy(out + n, text[n] ? "..." : "");
    return out;
}

/* What a reader of error messages would call this file: "a text file", "a git-LFS pointer file",
   ... Looks at its kind and its first bytes only. */
FILE_FN const char *looks_like(const char *path) {
    static const struct {
        const char *magic;
        int n;
        const char *name;
    } known[] = {
        {"version https://git-lfs.github.com/spec/", 40,
            "a git-LFS pointer file (the content itself was not downloaded: git lfs pull)"},
        {"\x1f\x8b", 2, "a gzip archive"},
        {"PK\3\4", 4, "a PyTorch .bin/.pt (zip) file"},
        {"\x93NUMPY", 6, "a NumPy file"},
        {"GGUF", 4, "a GGUF model"},
        {"\x89HDF\r\n", 6, "an HDF5 file"},
        {"\xfd\x37zXZ", 5, "an xz archive"},
        {"\x28\xb5\x2f\xfd", 4, "a zstd archive"},
        {"BZh", 3, "a bzip2 archive"},
        {"\x7f\x45LF", 4, "a program"},
        {"%PDF", 4, "a PDF document"},
        {"\x80\2", 2, "a Python pickle"},
        {"\x80\4", 2, "a Python pickle"},
        {"\x88\xd8\x34\x01", 4, "an llm.c token shard"},    // 20240520
        {"\xa1\xd9\x34\x01", 4, "an llm.c token shard"},    // 20240801
        {"\xc8\xd7\x34\x01", 4, "an llm.c tokenizer file"}, // 20240328
        {"\xc6\xd7\x34\x01", 4, "an llm.c model file"},     // 20240326
        {"<!DOCTYPE", 9, "a web page"},
        {"<!doctype", 9, "a web page"},
        {"<html", 5, "a web page"},
    };
    unsigned char b[4096];
    struct stat st;
    if (stat(path, &st))
        return errno == ENOENT      ? "a file that does not exist"
            : errno == ENAMETOOLONG ? "a name that is too long"
                                    : "a file that cannot be read";
    if (S_ISDIR(st.st_mode)) return "a folder";
    if (!S_ISREG(st.st_mode)) return "a pipe or device";
    if (st.st_size == 0) return "an empty file";
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, b, sizeof b);
    if (fd >= 0) close(fd);
    if (n <= 0) return "a file that cannot be read";
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (n >= known[i].n && !memcmp(b, known[i].magic, (size_t)known[i].n)) return known[i].name;
    }
    uint64_t header = 0;
    if (n > 8) memcpy(&header, b, 8);
    if (n > 8 && b[8] == '{' && header >= 2 && header <= SAFE_HEADER_LIMIT) {
        return header <= (uint64_t)st.st_size - 8 ? "a safetensors file"
                                                  : "the beginning of a safetensors file";
    }
    int zeros = 1, text = 1, first = -1;
    for (ssize_t i = 0; i < n; i++) {
        zeros &= b[i] == 0;
        if (b[i] < 32 && !strchr("\t\n\v\f\r\x1b", b[i])) text = 0;
        if (b[i] == 0 || b[i] == 127 || b[i] == 255) text = 0; // 255: not in UTF-8
        if (first < 0 && !strchr(" \t\r\n", b[i])) first = b[i];
    }
    if (zeros) return "a file of zeros";
    if (text && (first == '{' || first == '[')) return "a JSON file";
    return text ? "a text file" : "binary data";
}

// -------------------------------------------------------------------------------------------------
// writing, and JSON

// Joins a folder and a name.
FILE_FN int path_join(char out[CKPT_PATH], const char *folder, const char *name, Err *err) {
    int n = snprintf(out, CKPT_PATH, "%s/%s", folder, name);
    if (n >= 0 && n < CKPT_PATH) return 0;
    return fail(err, "%s: this path is longer than %d bytes", shown(folder), CKPT_PATH - 1);
}

FILE_FN const char *write_advice(int code) {
    if (code == ENOSPC || code == EDQUOT) return ": free some space, or choose another --out";
    if (code == EFBIG) return ": raise the file-size limit (ulimit -f)";
    return "";
}

// The system refused: "PATH: WHAT: reason", from errno.
FILE_FN int fail_os(Err *err, const char *path, const char *what) {
    int code = errno;
    return fail(err, "%s: %s: %s%s", shown(path), what, strerror(code), write_advice(code));
}

// All n bytes, whatever a single write takes.
FILE_FN int write_all(int fd, const void *data, size_t n, const char *path, Err *err) {
    const char *p = (const char *)data;
    while (n > 0) {
        ssize_t k = write(fd, p, n < (size_t)1 << 30 ? n : (size_t)1 << 30);
        if (k < 0 && errno == EINTR) continue;
        if (k == 0) errno = ENOSPC;
        if (k <= 0) return fail_os(err, path, "cannot write");
        p += k;
        n -= (size_t)k;
    }
    return 0;
}

// Some file systems cannot sync and say so (EINVAL): that is all they can do.
FILE_FN int sync_fd(int fd, const char *path, Err *err) {
    int rc;
    while ((rc = fsync(fd)) && errno == EINTR) {}
    if (!rc || errno == EINVAL || errno == ENOTSUP) return 0;
    return fail_os(err, path, "cannot bring to disk");
}

/* Syncs and closes a written file; rc != 0: it is only closed and removed. The result is rc or the
   failure. */
FILE_FN int write_end(int fd, int rc, const char *path, Err *err) {
    if (!rc) rc = sync_fd(fd, path, err);
    if (close(fd) && !rc) rc = fail_os(err, path, "cannot write");
    if (rc) unlink(path);
    return rc;
}

FILE_FN int write_begin(const char *path, Err *err) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd >= 0) return fd;
    return fail_os(err, path, "cannot create");
}

FILE_FN int sync_folder(const char *path, Err *err) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return fail_os(err, path, "cannot open this folder");
    int rc = sync_fd(fd, path, err);
    close(fd);
    return rc;
}

/* Writes a text file so that its name stands for the old content or the new, never for a half:
   under a temporary name beside it, synced, then renamed. */
FILE_FN int write_text_file_synced(const char *path, const char *text, size_t n, Err *err) {
    char tmp[CKPT_PATH];
    int k = snprintf(tmp, sizeof tmp, "%s.tmp", path);
    if (k < 0 || k >= CKPT_PATH) return fail(err, "%s: this path is too long", shown(path));
    int fd = write_begin(tmp, err);
    if (fd < 0) return -1;
    if (write_end(fd, write_all(fd, text, n, tmp, err), tmp, err)) return -1;
    if (!rename(tmp, path)) return 0;
    fail_os(err, path, "cannot rename to this");
    unlink(tmp);
    return -1;
}

// The fewest digits, of `least` and more, that bring every real number in the tree back exactly.
FILE_FN int json_digits(const json_t *j, int least) {
    if (json_is_real(j)) {
        char text[64];
        while (least < 17) {
            snprintf(text, sizeof text, "%.*g", least, json_real_value(j));
            if (strtod(text, NULL) == json_real_value(j)) break;
            least++;
        }
    } else if (json_is_object(j)) {
        const char *key;
        json_t *value;
        json_object_foreach((json_t *)(uintptr_t)j, key, value) least = json_digits(value, least);
    } else if (json_is_array(j)) {
        for (size_t i = 0; i < json_array_size(j); i++)
            least = json_digits(json_array_get(j, i), least);
    }
    return least;
}

/* Writes FOLDER/NAME, indented, keys in the order they were set, so that equal trees give equal
   bytes. j NULL (a json_pack that found no memory, or a NaN) is a failure too. */
FILE_FN int json_write(const char *folder, const char *name, const json_t *j, Err *err) {
    char path[CKPT_PATH];
    if (path_join(path, folder, name, err)) return -1;
    size_t digits = (size_t)json_digits(j, 6);
    char *text = j ? json_dumps(j, JSON_INDENT(2) | JSON_REAL_PRECISION(digits)) : NULL;
    size_t n = text ? strlen(text) : 0;
    if (!text)
        return fail(err, "%s: cannot make the JSON text (out of memory, or a NaN)", shown(path));
    text[n] = '\n'; // in place of the final 0
    int rc = write_text_file_synced(path, text, n + 1, err);
    free(text);
    return rc;
}

/* Parses JSON, no key twice. A value costs the parser about 100 bytes of memory, however short its
   text is, so their number is bounded first, by the separators before them. */
FILE_FN json_t *json_parse(const char *text, size_t n, json_error_t *e) {
    size_t values = 0;
    for (size_t i = 0; i < n; i++) values += text[i] == ',' || text[i] == ':';
    if (values <= JSON_VALUES) return json_loadb(text, n, JSON_REJECT_DUPLICATES, e);
    memset(e, 0, sizeof *e);
    snprintf(e->text, sizeof e->text, "more than %d values", JSON_VALUES);
    return NULL;
}

// Reads n bytes, or as many as there are. How many; -1: see errno.
FILE_FN ssize_t read_up_to(int fd, void *to, size_t n) {
    size_t got = 0;
    while (got < n) {
        ssize_t k = read(fd, (char *)to + got, n - got);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) return -1;
        if (k == 0) break;
        got += (size_t)k;
    }
    return (ssize_t)got;
}

/* Reads a JSON file: an object or an array, no key twice. NULL after fail(). The caller
   json_decref()s it. */
FILE_FN json_t *json_read(const char *path, Err *err) {
    json_t *j = NULL;
    char *text = NULL;
    struct stat st;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        fail_os(err, path, "cannot open");
        return NULL;
    }
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        fail(err, "%s: expected a JSON file, found %s", shown(path), looks_like(path));
    } else if (st.st_size > JSON_LIMIT) {
        fail(err, "%s: expected a JSON file of at most %d bytes, found %lld; it looks like %s",
            shown(path), JSON_LIMIT, (long long)st.st_size, looks_like(path));
    } else if (!(text = (char *)malloc((size_t)st.st_size + 1))) {
        fail(err, "%s: out of memory for %lld bytes", shown(path), (long long)st.st_size);
    } else {
        const ssize_t n = read_up_to(fd, text, (size_t)st.st_size);
        json_error_t e;
        if (n < 0) {
            fail_os(err, path, "cannot read");
        } else if (!(j = json_parse(text, (size_t)n, &e))) {
            fail(err, "%s: expected JSON, found at line %d: %s; the file looks like %s",
                shown(path), e.line, shown(e.text), looks_like(path));
        }
    }
    free(text);
    close(fd);
    return j;
}

// -------------------------------------------------------------------------------------------------
// safetensors

FILE_FN const char *dtype_name(DType t) {
    return t == F64 ? "F64" : t == F32 ? "F32" : t == BF16 ? "BF16" : "F16";
}

typedef struct SafeTensor {
    const char *name;
    DType dtype;
    int rank;
    int64_t shape[SAFE_RANK];
    size_t count, bytes;       // elements; bytes of them
    const unsigned char *data; // aligned to nothing
} SafeTensor;

typedef struct SafeFile {
    char *path, *names;
    unsigned char *map; // of the whole file
    size_t size;
    SafeTensor *tensor; // sorted by name
    int n;
} SafeFile;

FILE_FN int safe_by_name(const void *a, const void *b) {
    return strcmp(((const SafeTensor *)a)->name, ((const SafeTensor *)b)->name);
}

FILE_FN int safe_by_place(const void *a, const void *b) {
    const SafeTensor *s = (const SafeTensor *)a, *t = (const SafeTensor *)b;
    if (s->data != t->data) return s->data < t->data ? -1 : 1;
    return s->bytes < t->bytes ? -1 : s->bytes > t->bytes;
}

FILE_FN void safe_close(SafeFile *f) {
    if (f->map) munmap(f->map, f->size);
    free(f->path);
    free(f->names);
    free(f->tensor);
    memset(f, 0, sizeof *f);
}

// "[4, 8]", for messages.
FILE_FN const char *shape_text(int rank, const int64_t *shape) {
    char text[SAFE_RANK * 24];
    size_t n = 0;
    text[n++] = '[';
    for (int i = 0; i < rank; i++)
        n += (size_t)snprintf(
            text + n, sizeof text - n, "%s%lld", i ? ", " : "", (long long)shape[i]);
    snprintf(text + n, sizeof text - n, "]");
    return shown(text);
}

// The header says something that cannot be: "PATH: tensor NAME: WHAT: the file is damaged".
__attribute__((format(printf, 4, 5), cold)) FILE_FN int damaged(
    Err *err, const char *path, const char *name, const char *fmt, ...) {
    char what[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    return fail(err, "%s: tensor %s: %s: the file is damaged", shown(path), shown(name), what);
}

/* One entry of the header. Where its data lies is checked against the size of all data, later
   against the others. */
FILE_FN int safe_entry(SafeTensor *t, const char *name, const json_t *j, const unsigned char *data,
    uint64_t data_size, const char *path, Err *err) {
    const json_t *dtype = json_object_get(j, "dtype"), *shape = json_object_get(j, "shape");
    const json_t *offsets = json_object_get(j, "data_offsets");
    if (!json_is_string(dtype) || !json_is_array(shape) || !json_is_array(offsets) ||
        json_object_size(j) != 3)
        return damaged(
            err, path, name, "expected {dtype, shape, data_offsets}, found something else");
    const char *type = json_string_value(dtype);
    int known = 0;
    for (int d = F32; d <= F16; d++) {
        if (!strcmp(type, dtype_name((DType)d))) t->dtype = (DType)d, known = 1;
    }
    if (!known)
        return fail(err, "%s: tensor %s: expected dtype F32, F64, BF16 or F16, found %s",
            shown(path), shown(name), shown(type));
    if (json_array_size(shape) > SAFE_RANK)
        return fail(err, "%s: tensor %s: expected at most %d dimensions, found %llu", shown(path),
            shown(name), SAFE_RANK, (unsigned long long)json_array_size(shape));
    t->rank = (int)json_array_size(shape);
    uint64_t bytes = dtype_size(t->dtype);
    int empty = 0;
    for (int i = 0; i < t->rank; i++) {
        const json_t *n = json_array_get(shape, (size_t)i);
        if (!json_is_integer(n) || json_integer_value(n) < 0)
            return damaged(
                err, path, name, "expected a shape of integers from 0, found another value");
        t->shape[i] = (int64_t)json_integer_value(n);
        if (t->shape[i] == 0)
            empty = 1;
        else if (__builtin_mul_overflow(bytes, (uint64_t)t->shape[i], &bytes) || bytes > SIZE_MAX)
            return damaged(err, path, name, "the product of its shape overflows");
    }
    if (empty) bytes = 0;
    const json_t *from = json_array_get(offsets, 0), *to = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(from) || !json_is_integer(to))
        return damaged(err, path, name,
            "expected two integers as data_offsets, found %llu values%s",
            (unsigned long long)json_array_size(offsets),
            json_array_size(offsets) == 2 ? ", not integers" : "");
    int64_t begin = (int64_t)json_integer_value(from), end = (int64_t)json_integer_value(to);
    if (begin < 0 || begin > end)
        return damaged(err, path, name,
            "expected data_offsets 0 <= begin <= end, found [%lld, %lld]", (long long)begin,
            (long long)end);
    if ((uint64_t)(end - begin) != bytes)
        return damaged(err, path, name, "%s%s needs %llu bytes, its data_offsets span %lld", type,
            shape_text(t->rank, t->shape), (unsigned long long)bytes, (long long)(end - begin));
    if ((uint64_t)end > data_size)
        return fail(err,
            "%s: tensor %s ends at byte %lld of the data, but there are only %llu: the file "
            "is %llu bytes short, an interrupted copy perhaps: fetch it again",
            shown(path), shown(name), (long long)end, (unsigned long long)data_size,
            (unsigned long long)((uint64_t)end - data_size));
    t->bytes = (size_t)bytes;
    t->count = t->bytes / dtype_size(t->dtype);
    t->data = data + begin;
    return 0;
}

// The header, as JSON, to sorted tensors that tile the data.
FILE_FN int safe_parse(SafeFile *f, const json_t *root, uint64_t header, Err *err) {
    const unsigned char *data = f->map + 8 + header;
    const uint64_t data_size = f->size - 8 - header;
    const char *key;
    json_t *value;
    size_t n = json_object_size(root), chars = 0;
    if (!json_is_object(root) || n > INT_MAX / 2)
        return fail(err,
            "%s: expected a safetensors header {name: tensor}, found another JSON value",
            shown(f->path));
    json_object_foreach((json_t *)(uintptr_t)root, key, value) chars += strlen(key) + 1;
    f->tensor = (SafeTensor *)calloc(n + 1, sizeof *f->tensor);
    f->names = (char *)malloc(chars + 1);
    if (!f->tensor || !f->names) return fail(err, "%s: out of memory", shown(f->path));
    chars = 0;
    json_object_foreach((json_t *)(uintptr_t)root, key, value) {
        if (!strcmp(key, "__metadata__")) {
            const char *name;
            json_t *text;
            if (!json_is_object(value))
                return fail(
                    err, "%s: expected __metadata__ to be an object of strings", shown(f->path));
            json_object_foreach(value, name, text) {
                if (!json_is_string(text))
                    return fail(err, "%s: __metadata__: expected a string for %s", shown(f->path),
                        shown(name));
            }
            continue;
        }
        SafeTensor *t = &f->tensor[f->n++];
        t->name = strcpy(f->names + chars, key);
        chars += strlen(key) + 1;
        if (safe_entry(t, key, value, data, data_size, f->path, err)) return -1;
    }
    qsort(f->tensor, (size_t)f->n, sizeof *f->tensor, safe_by_place);
    const unsigned char *at = data;
    for (int i = 0; i < f->n; at += f->tensor[i++].bytes) {
        const SafeTensor *t = &f->tensor[i];
        if (t->data != at)
            return damaged(err, f->path, t->name,
                "begins at byte %lld of the data, expected %lld: %s", (long long)(t->data - data),
                (long long)(at - data), t->data > at ? "there is a gap" : "it overlaps another");
    }
    uint64_t rest = data_size - (uint64_t)(at - data);
    if (rest)
        return fail(err,
            "%s: %llu bytes follow the last tensor, expected none: the file is damaged",
            shown(f->path), (unsigned long long)rest);
    qsort(f->tensor, (size_t)f->n, sizeof *f->tensor, safe_by_name);
    return 0;
}

FILE_FN int safe_map(SafeFile *f, Err *err) {
    const char *path = f->path;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return fail_os(err, path, "cannot open");
    struct stat st;
    int rc = 0;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        rc = fail(err, "%s: expected a safetensors file, found %s", shown(path), looks_like(path));
    } else if (st.st_size < 10 || (uint64_t)st.st_size > SIZE_MAX / 2) {
        rc = fail(err, "%s: expected a safetensors file, found %s of %lld bytes", shown(path),
            looks_like(path), (long long)st.st_size);
    } else {
        void *map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            rc = fail_os(err, path, "cannot map this file into memory");
        } else {
            f->map = (unsigned char *)map;
            f->size = (size_t)st.st_size;
        }
    }
    close(fd);
    return rc;
}

/* Opens a safetensors file and checks all of its header. After a failure there is nothing to close.
   The file must not shrink while it is open. */
FILE_FN int safe_open(SafeFile *f, const char *path, Err *err) {
    memset(f, 0, sizeof *f);
    f->path = strdup(path);
    int rc = f->path ? safe_map(f, err) : fail(err, "%s: out of memory", shown(path));
    if (!rc) {
        uint64_t header;
        memcpy(&header, f->map, 8);
        if (header > f->size - 8 || header > SAFE_HEADER_LIMIT || header < 2 || f->map[8] != '{') {
            const char *kind = looks_like(path);
            int ours = strstr(kind, "safetensors") != NULL;
            rc = fail(err,
                "%s: expected a safetensors file, found a header length of %llu in a file of %llu "
                "bytes; it looks like %s%s",
                shown(path), (unsigned long long)header, (unsigned long long)f->size, kind,
                ours ? ": fetch it again" : "");
        } else {
            json_error_t e;
            json_t *root = json_parse((const char *)f->map + 8, (size_t)header, &e);
            if (!root)
                rc = fail(err, "%s: expected JSON in the safetensors header, found at byte %d: %s",
                    shown(path), e.position, shown(e.text));
            else
                rc = safe_parse(f, root, header, err);
            json_decref(root);
        }
    }
    if (rc) safe_close(f);
    return rc;
}

// NULL if there is none of that name.
FILE_FN const SafeTensor *safe_find(const SafeFile *f, const char *name) {
    SafeTensor key = {.name = name};
    if (!f->n) return NULL;
    return (const SafeTensor *)bsearch(&key, f->tensor, (size_t)f->n, sizeof key, safe_by_name);
}

typedef struct SafeEntry {
    const char *name; // printable ASCII without " and backslash
    DType dtype;
    int rank;
    int64_t shape[SAFE_RANK];
} SafeEntry;

FILE_FN uint64_t safe_entry_bytes(const SafeEntry *e) {
    uint64_t bytes = dtype_size(e->dtype);
    for (int i = 0; i < e->rank; i++) bytes *= (uint64_t)e->shape[i];
    return bytes;
}

/* Writes n tensors in the order given; bytes(ctx, i) gives the content of tensor i, valid until the
   next call. Equal content makes equal files. Synced; removed again if it fails. */
FILE_FN int safe_write(const char *path, const SafeEntry *entries, int n,
    const void *(*bytes)(void *ctx, int entry), void *ctx, Err *err) {
    char *header = NULL;
    size_t length = 0;
    uint64_t at = 0;
    FILE *text = open_memstream(&header, &length);
    if (!text) return fail(err, "%s: out of memory for the header", shown(path));
    fprintf(text, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int i = 0; i < n; i++) {
        const SafeEntry *e = &entries[i];
        fprintf(text, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", e->name, dtype_name(e->dtype));
        for (int d = 0; d < e->rank; d++)
            fprintf(text, "%s%lld", d ? "," : "", (long long)e->shape[d]);
        uint64_t end = at + safe_entry_bytes(e);
        fprintf(text, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
            (unsigned long long)end);
        at = end;
    }
    fputc('}', text);
    for (long k = ftell(text); k >= 0 && k % 8; k++) fputc(' ', text); // the data starts on 8 bytes
    int bad = ferror(text);
    if (fclose(text) || bad) {
        free(header);
        return fail(err, "%s: out of memory for the header", shown(path));
    }
    uint64_t stored = length;
    int fd = -1, rc;
    if (stored > SAFE_HEADER_LIMIT)
        rc = fail(err, "%s: %d tensors make a header of %llu bytes, more than readers accept",
            shown(path), n, (unsigned long long)stored);
    else
        rc = (fd = write_begin(path, err)) < 0 ? -1 : 0;
    if (fd >= 0) {
        rc = write_all(fd, &stored, 8, path, err);
        if (!rc) rc = write_all(fd, header, length, path, err);
        for (int i = 0; i < n && !rc; i++) {
            const void *data = bytes(ctx, i);
            if (data)
                rc = write_all(fd, data, (size_t)safe_entry_bytes(&entries[i]), path, err);
            else
                rc = fail(err, "%s: tensor %s cannot be fetched", shown(path), entries[i].name);
        }
        rc = write_end(fd, rc, path, err);
    }
    free(header);
    return rc;
}

#endif
