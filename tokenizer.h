/* tokenizer.h: text to tokens and back. It knows jansson, stb_ds, PCRE2 where it is there,
   safetensors.h for reading and writing files, and what dataloader.h asks of an encoder.

   Two kinds. Bytes: 256 tokens, id = value of the byte, no end-of-text token. And byte-level BPE, as
   GPT-2 has it: a pattern splits the text into words; a word begins as its bytes, and of all merges
   that fit somewhere in it, the one of the lowest rank is made, leftmost first, until none fits.
   Every text, valid UTF-8 or not, comes back as it was: a run of bytes that are no UTF-8 is a word.

   Special tokens ("<|endoftext|>") are never made from text: it may say "<|endoftext|>", in ordinary
   tokens. It is put where a text begins and where it ends, and between two that follow one another.

   Files that are read (tokenizer_open):
     tokenizer.json   Hugging Face: a BPE model with the ByteLevel pre-tokenizer and GPT-2's pattern;
                      ids and added tokens as the file has them
     vocab.bpe        GPT-2's merges, with or without a first line "#version: 0.2", LF or CRLF
     tokenizer.bin    llm.c: the bytes of each token. The merges are found again, see bpe_derive
   What is written is tokenizer.json, so that AutoTokenizer reads it.

   In tokenizer.json and vocab.bpe tokens are spelled in an alphabet of 256 printable characters that
   stand for bytes (GPT-2's):
     bytes 33..126, 161..172 and 174..255    the character of the same number
     the other 68, in order                  characters 256, 257, ... (space, byte 32, is 288, "Ġ")

   In order: the alphabet; a vocabulary in memory; words to tokens; the split; text to tokens; files.
   Start reading at word_encode. Learning a vocabulary has a room of its own, bpe_train.h. */
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include "safetensors.h"
#include "dataloader.h" // TEXT_BEGINS, TEXT_ENDS

// Who writes a file or learns a vocabulary has nothing to save when memory ends.
__attribute__((unused)) static void *tok_realloc(void *p, size_t n) {
    void *q = realloc(p, n);
    if (!q) die(RUN_ERROR, "out of memory for a vocabulary (%llu bytes)", (unsigned long long)n);
    return q;
}
#define STBDS_REALLOC(context, p, n) tok_realloc(p, n)
#define STBDS_FREE(context, p)       free(p)
#define STB_DS_IMPLEMENTATION
#define STBDS_NO_SHORT_NAMES
#include <stb/stb_ds.h>

#ifdef USE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif

#define TOK_FN __attribute__((unused)) static

enum {
    TOK_LIMIT = 1 << 24,  // most tokens of a vocabulary
    TOK_NONE = UINT32_MAX // no rank, no position
};
#define TOK_EOT "<|endoftext|>"

typedef struct Merge {
    uint32_t left, right, id;
} Merge;

typedef struct PairRank {
    uint64_t key; // left << 32 | right
    uint32_t value;
} PairRank;

typedef struct Bpe {
    unsigned char *text; // bytes of the tokens; an array of stb_ds
    uint32_t *at, *len;  // token i is text[at[i]], len[i] bytes; 0: not set yet
    char *special;       // (vocab_size) 1: never made from text
    uint32_t of_byte[256];
    Merge *merge;   // by rank; an array of stb_ds
    PairRank *rank; // a map of stb_ds
    void *split;    // pcre2_code
    int jit;
} Bpe;

typedef struct Tokenizer {
    int vocab_size;
    int eot;                 // id of the end-of-text token, -1 = none
    unsigned char byte[256]; // the bytes of token i, one each: byte[i] = i
    Bpe *bpe;                // NULL: bytes
} Tokenizer;

// -------------------------------------------------------------------------------------------------
// the alphabet

// The character that stands for a byte in tokenizer.json.
TOK_FN int byte_char(int byte) {
    int printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    if (printable) return byte;
    return byte <= 32 ? 256 + byte : byte <= 160 ? 256 + 33 + byte - 127 : 256 + 67;
}

// The same as UTF-8: all are below 0x800, so one or two bytes.
TOK_FN void byte_utf8(char out[3], int byte) {
    int c = byte_char(byte);
    memset(out, 0, 3);
    if (c < 0x80) {
        out[0] = (char)c;
    } else {
        out[0] = (char)(0xc0 | c >> 6);
        out[1] = (char)(0x80 | (c & 63));
    }
}

/* The bytes that a text in this alphabet stands for, into out (strlen(name)); how many, or -1: it
   has another character. */
TOK_FN int spelled_bytes(unsigned char *out, const char *name) {
    int n = 0;
    for (const unsigned char *s = (const unsigned char *)name; *s; n++) {
        int c = *s++;
        if (c >= 0x80) {
            if (c < 0xc2 || c > 0xc5 || (*s & 0xc0) != 0x80) return -1;
            c = (c & 31) << 6 | (*s++ & 63);
        }
        if (c >= 256) {
            c -= 256;
            c = c <= 32 ? c : c < 67 ? c - 33 + 127 : c == 67 ? 173 : -1;
            if (c < 0) return -1;
        } else if (byte_char(c) != c) {
            return -1;
        }
        out[n] = (unsigned char)c;
    }
    return n;
}

// Room for n bytes in an array of stb_ds, which never fails (tok_realloc).
TOK_FN char *room_for(char **room, size_t n) {
    stbds_arrsetlen(*room, n);
    if (!*room) die(RUN_ERROR, "out of memory for a vocabulary");
    return *room;
}

// n bytes spelled in the alphabet; out has room for 2*n + 1.
TOK_FN void bytes_spelled(char *out, const unsigned char *bytes, size_t n) {
    char one[3];
    *out = 0;
    for (size_t i = 0; i < n; i++) {
        byte_utf8(one, bytes[i]);
        for (int k = 0; one[k]; k++) *out++ = one[k];
    }
    *out = 0;
}

// -------------------------------------------------------------------------------------------------
// a vocabulary in memory

TOK_FN void tokenizer_bytes(Tokenizer *t) {
    t->vocab_size = 256;
    t->eot = -1;
    t->bpe = NULL;
    for (int i = 0; i < 256; i++) t->byte[i] = (unsigned char)i;
}

TOK_FN void tokenizer_free(Tokenizer *t) {
    Bpe *b = t->bpe;
    if (b) {
        stbds_arrfree(b->text);
        stbds_arrfree(b->merge);
        stbds_hmfree(b->rank);
        free(b->at);
        free(b->len);
        free(b->special);
#ifdef USE_PCRE2
        pcre2_code_free((pcre2_code *)b->split);
#endif
        free(b);
    }
    memset(t, 0, sizeof *t);
}

// Whether token ids are the bytes themselves, so that a text needs no encoding.
TOK_FN int tokenizer_is_bytes(const Tokenizer *t) { return !t->bpe; }

// An empty vocabulary with room for so many tokens.
TOK_FN int bpe_begin(Tokenizer *t, size_t vocab_size, const char *where, Err *err) {
    tokenizer_bytes(t);
    if (vocab_size < 256 || vocab_size > TOK_LIMIT)
        return fail(err, "%s: expected a vocabulary of 256 to %d tokens, found %llu", where,
            TOK_LIMIT, (unsigned long long)vocab_size);
    Bpe *b = t->bpe = (Bpe *)calloc(1, sizeof *b);
    if (b) {
        b->at = (uint32_t *)calloc(vocab_size, sizeof *b->at);
        b->len = (uint32_t *)calloc(vocab_size, sizeof *b->len);
        b->special = (char *)calloc(vocab_size, 1);
    }
    if (!b || !b->at || !b->len || !b->special)
        return fail(
            err, "%s: out of memory for %llu tokens", where, (unsigned long long)vocab_size);
    for (int i = 0; i < 256; i++) b->of_byte[i] = TOK_NONE;
    t->vocab_size = (int)vocab_size;
    return 0;
}

// Gives token `id` its n bytes.
TOK_FN int bpe_set(Tokenizer *t, int64_t id, const void *bytes, size_t n, int special,
    const char *where, Err *err) {
    Bpe *b = t->bpe;
    if (id < 0 || id >= t->vocab_size)
        return fail(err, "%s: expected ids below %d, one for each token, found %lld", where,
            t->vocab_size, (long long)id);
    if (b->len[id]) return fail(err, "%s: the id %lld is there twice", where, (long long)id);
    const size_t at = stbds_arrlenu(b->text);
    if (n < 1 || n > UINT32_MAX - at)
        return fail(err, "%s: the token %lld is empty or too long", where, (long long)id);
    memcpy(stbds_arraddnptr(b->text, n), bytes, n);
    b->at[id] = (uint32_t)at;
    b->len[id] = (uint32_t)n;
    b->special[id] = (char)special;
    if (n == 1 && !special) {
        const int byte = *(const unsigned char *)bytes;
        if (b->of_byte[byte] != TOK_NONE)
            return fail(err, "%s: two tokens for the byte %d", where, byte);
        b->of_byte[byte] = (uint32_t)id;
    }
    return 0;
}

TOK_FN uint32_t bpe_rank(const Bpe *b, uint32_t left, uint32_t right) {
    PairRank *map = b->rank; // its own: a look-up writes to the pointer
    ptrdiff_t i = 0;
    if (!map) return TOK_NONE;
    i = stbds_hmgeti_ts(map, (uint64_t)left << 32 | right, i);
    return i < 0 ? TOK_NONE : map[i].value;
}

// Adds the merge of the next rank.
TOK_FN int bpe_merge(
    Tokenizer *t, uint32_t left, uint32_t right, uint32_t id, const char *where, Err *err) {
    Bpe *b = t->bpe;
    const uint32_t rank = (uint32_t)stbds_arrlenu(b->merge);
    const Merge m = {left, right, id};
    if (bpe_rank(b, left, right) != TOK_NONE)
        return fail(err, "%s: merge %u: this pair is there twice", where, rank + 1);
    if (b->special[left] || b->special[right] || b->special[id] ||
        b->len[id] != b->len[left] + b->len[right])
        return fail(
            err, "%s: merge %u: expected two ordinary tokens that make a third", where, rank + 1);
    stbds_arrput(b->merge, m);
    stbds_hmput(b->rank, (uint64_t)left << 32 | right, rank);
    return 0;
}

/* The bytes of one token, *n of them; a special token's are its name. NULL and 0 for an id that is
   not in the vocabulary. */
TOK_FN const unsigned char *tokenizer_decode(const Tokenizer *t, int token, size_t *n) {
    *n = 0;
    if (token < 0 || token >= t->vocab_size) return NULL;
    *n = t->bpe ? t->bpe->len[token] : 1;
    return t->bpe ? t->bpe->text + t->bpe->at[token] : &t->byte[token];
}

// The name of a token in tokenizer.json: spelled, or as it is if special. Valid until the next call.
TOK_FN const char *token_name(const Tokenizer *t, int id, char **room) {
    size_t n;
    const unsigned char *bytes = tokenizer_decode(t, id, &n);
    char *name = room_for(room, 2 * n + 1);
    if (t->bpe && t->bpe->special[id]) {
        memcpy(name, bytes, n);
        name[n] = 0;
    } else {
        bytes_spelled(name, bytes, n);
    }
    return name;
}

/* GPT-2's pattern, the white space of Unicode spelled out (PCRE2's \s has one character more, U+180E):
   contractions; letters, digits, other characters, each with one space before if there is one; white
   space, of which the last before a word is left to it. Letters and digits are those of the Unicode
   version that PCRE2 has. */
#define TOK_SPACE "\\t-\\r\\x{85}\\p{Z}"
#define TOK_SPLIT                                                                           \
    "'(?:s|t|re|ve|m|ll|d)| ?\\p{L}+| ?\\p{N}+| ?[^" TOK_SPACE "\\p{L}\\p{N}]+|[" TOK_SPACE \
    "]+(?![^" TOK_SPACE "])|[" TOK_SPACE "]+"

/* tokenizer.json has ids by name, and text in UTF-8: so that a vocabulary of any file can be saved,
   the name of a special token must be such text, and of no other token. */
TOK_FN int bpe_names(const Tokenizer *t, const char *where, Err *err) {
    json_t *special = json_object();
    char *room = NULL;
    int rc = special ? 0 : fail(err, "%s: out of memory for names", where);
    for (int i = 0; i < t->vocab_size && !rc; i++) {
        if (!t->bpe->special[i]) continue;
        const char *name = token_name(t, i, &room);
        if (json_object_get(special, name))
            rc = fail(err, "%s: expected a name for each special token, found %s twice", where,
                shown(name));
        else if (strlen(name) != t->bpe->len[i] ||
            json_object_set_new(special, name, json_integer(i)))
            rc = fail(err, "%s: expected text as the special token %d, found other bytes: %s",
                where, i, shown(name));
    }
    for (int i = 0; i < t->vocab_size && json_object_size(special) && !rc; i++) {
        if (t->bpe->special[i]) continue;
        const char *name = token_name(t, i, &room);
        if (json_object_get(special, name))
            rc = fail(err, "%s: expected a name for each token, found %s for %d and a special one",
                where, shown(name), i);
    }
    json_decref(special);
    stbds_arrfree(room);
    return rc;
}

// The last step of every way to a vocabulary: is it whole? Makes it ready to encode.
TOK_FN int bpe_end(Tokenizer *t, const char *where, Err *err) {
    Bpe *b = t->bpe;
    for (int i = 0; i < t->vocab_size; i++)
        if (!b->len[i])
            return fail(err, "%s: expected the ids 0 to %d, found none for %d", where,
                t->vocab_size - 1, i);
    for (int i = 0; i < 256; i++)
        if (b->of_byte[i] == TOK_NONE)
            return fail(err, "%s: expected a token for every byte, found none for %d", where, i);
    if (bpe_names(t, where, err)) return -1;
#ifdef USE_PCRE2
    int code;
    PCRE2_SIZE at;
    b->split = pcre2_compile((PCRE2_SPTR)TOK_SPLIT, PCRE2_ZERO_TERMINATED,
        PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF, &code, &at, NULL);
    if (!b->split)
        return fail(
            err, "PCRE2 cannot compile GPT-2's pattern (error %d): is it older than 10.34?", code);
    b->jit = !pcre2_jit_compile((pcre2_code *)b->split, PCRE2_JIT_COMPLETE);
    return 0;
#else
    return fail(err,
        "%s: a vocabulary with merges needs PCRE2, and this program was built without: install it "
        "(Debian, Ubuntu: apt-get install libpcre2-dev), then make clean && make",
        where);
#endif
}

// How many bytes of text a token stands for: a special one for none.
TOK_FN size_t tokenizer_text_bytes(const Tokenizer *t, int token) {
    size_t n;
    tokenizer_decode(t, token, &n);
    return n && t->bpe && t->bpe->special[token] ? 0 : n;
}

// -------------------------------------------------------------------------------------------------
// words to tokens

/* Words seen before. A slot holds a word of up to 16 bytes and its tokens; another word that falls
   on it takes its place, so the memory is bounded whatever the text. */
enum { CACHE_SLOTS = 1 << 15, CACHE_IDS = 11 };
typedef struct CacheSlot {
    uint64_t key[2];
    unsigned char len, n; // len 0: empty
    uint32_t id[CACHE_IDS];
} CacheSlot;

// What one thread needs to encode.
typedef struct Encoder {
    const Bpe *b;
    CacheSlot *cache; // NULL: none
    uint32_t *out;    // the tokens so far
    // of one word: a list of symbols, linked by position
    uint32_t *symbol, *rank, *next, *prev;
    uint64_t *heap; // rank << 32 | position of the left one, lowest first
    void *match;    // pcre2_match_data
} Encoder;

TOK_FN void encoder_close(Encoder *e) {
    free(e->cache);
    stbds_arrfree(e->out);
    stbds_arrfree(e->symbol);
    stbds_arrfree(e->rank);
    stbds_arrfree(e->next);
    stbds_arrfree(e->prev);
    stbds_arrfree(e->heap);
#ifdef USE_PCRE2
    pcre2_match_data_free((pcre2_match_data *)e->match);
#endif
    memset(e, 0, sizeof *e);
}

TOK_FN int encoder_open(Encoder *e, const Bpe *b) {
    memset(e, 0, sizeof *e);
    e->b = b;
    e->cache = (CacheSlot *)calloc(CACHE_SLOTS, sizeof *e->cache);
#ifdef USE_PCRE2
    if (b->split) e->match = pcre2_match_data_create_from_pattern((pcre2_code *)b->split, NULL);
    if (b->split && !e->match) return -1;
#endif
    return e->cache ? 0 : -1;
}

// A short word: what fits where is kept beside, and the best is looked for from end to end.
TOK_FN int merge_short(const Bpe *b, uint32_t *symbol, int n) {
    enum { MOST = 64 };
    uint32_t rank[MOST];
    for (int i = 0; i + 1 < n; i++) rank[i] = bpe_rank(b, symbol[i], symbol[i + 1]);
    while (n > 1) {
        int best = 0;
        for (int i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == TOK_NONE) break;
        symbol[best] = b->merge[rank[best]].id;
        n--;
        for (int i = best + 1; i < n; i++) symbol[i] = symbol[i + 1];
        for (int i = best + 1; i + 1 < n; i++) rank[i] = rank[i + 1];
        if (best + 1 < n) rank[best] = bpe_rank(b, symbol[best], symbol[best + 1]);
        if (best > 0) rank[best - 1] = bpe_rank(b, symbol[best - 1], symbol[best]);
    }
    return n;
}

TOK_FN void heap_push(uint64_t **heap, uint64_t x) {
    stbds_arrput(*heap, x);
    uint64_t *h = *heap;
    size_t i = stbds_arrlenu(h) - 1;
    for (; i && h[(i - 1) / 2] > x; i = (i - 1) / 2) h[i] = h[(i - 1) / 2];
    h[i] = x;
}
TOK_FN uint64_t heap_pop(uint64_t *h) { // of one that is not empty
    const uint64_t top = h[0], x = stbds_arrpop(h);
    const size_t n = stbds_arrlenu(h);
    size_t i = 0;
    for (size_t k; (k = 2 * i + 1) < n; i = k) {
        if (k + 1 < n && h[k + 1] < h[k]) k++;
        if (h[k] >= x) break;
        h[i] = h[k];
    }
    if (n) h[i] = x;
    return top;
}

TOK_FN void try_pair(Encoder *e, uint32_t at) {
    const uint32_t next = e->next[at];
    e->rank[at] = next == TOK_NONE ? TOK_NONE : bpe_rank(e->b, e->symbol[at], e->symbol[next]);
    if (e->rank[at] != TOK_NONE) heap_push(&e->heap, (uint64_t)e->rank[at] << 32 | at);
}

// A long word, in n log n: a heap of what fits. An entry that is no longer true is passed over.
TOK_FN void merge_long(Encoder *e, const unsigned char *text, uint32_t n) {
    stbds_arrsetlen(e->symbol, n);
    stbds_arrsetlen(e->rank, n);
    stbds_arrsetlen(e->next, n);
    stbds_arrsetlen(e->prev, n);
    stbds_arrsetlen(e->heap, 0);
    for (uint32_t i = 0; i < n; i++) {
        e->symbol[i] = e->b->of_byte[text[i]];
        e->next[i] = i + 1 < n ? i + 1 : TOK_NONE;
        e->prev[i] = i ? i - 1 : TOK_NONE;
    }
    for (uint32_t i = 0; i < n; i++) try_pair(e, i);
    while (stbds_arrlenu(e->heap)) {
        const uint64_t top = heap_pop(e->heap);
        const uint32_t at = (uint32_t)top, rank = (uint32_t)(top >> 32), gone = e->next[at];
        if (e->rank[at] != rank) continue;
        e->symbol[at] = e->b->merge[rank].id;
        e->rank[gone] = TOK_NONE;
        e->next[at] = e->next[gone];
        if (e->next[at] != TOK_NONE) e->prev[e->next[at]] = at;
        try_pair(e, at);
        if (e->prev[at] != TOK_NONE) try_pair(e, e->prev[at]);
    }
    for (uint32_t i = 0; i != TOK_NONE; i = e->next[i]) stbds_arrput(e->out, e->symbol[i]);
}

// Adds the tokens of one word, 1 <= n <= WORD_LIMIT bytes, to e->out.
TOK_FN void word_encode(Encoder *e, const unsigned char *text, size_t n) {
    enum { SHORT = 64, CACHED = 16 };
    uint32_t symbol[SHORT];
    uint64_t key[2] = {0, 0};
    CacheSlot *slot = NULL;
    if (n > SHORT) {
        merge_long(e, text, (uint32_t)n);
        return;
    }
    if (n <= CACHED && e->cache) {
        memcpy(key, text, n);
        uint64_t h = (key[0] ^ n) * 0x9e3779b97f4a7c15u;
        h = ((h ^ h >> 32) + key[1]) * 0xbf58476d1ce4e5b9u;
        slot = &e->cache[h >> 49];
        if (slot->len == n && slot->key[0] == key[0] && slot->key[1] == key[1]) {
            memcpy(stbds_arraddnptr(e->out, slot->n), slot->id, slot->n * sizeof *slot->id);
            return;
        }
    }
    for (size_t i = 0; i < n; i++) symbol[i] = e->b->of_byte[text[i]];
    const int k = merge_short(e->b, symbol, (int)n);
    const size_t bytes = (size_t)k * sizeof *symbol;
    memcpy(stbds_arraddnptr(e->out, k), symbol, bytes);
    if (!slot || k > CACHE_IDS) return;
    memcpy(slot->key, key, sizeof key);
    memcpy(slot->id, symbol, bytes);
    slot->len = (unsigned char)n;
    slot->n = (unsigned char)k;
}

// -------------------------------------------------------------------------------------------------
// the split

/* The next word of text[*at .. n): *begin; *at moves behind it. A run of bytes that are no UTF-8
   lies between two matches and is a word. Returns its length, 0 at the end, -1 with a message. */
TOK_FN int64_t next_word(const Bpe *b, void *match, const unsigned char *text, size_t n, size_t *at,
    size_t *pending, size_t *begin, Err *err) {
    *begin = *at;
    if (*pending > *at) { // what was matched behind a run of other bytes
        *at = *pending;
        return (int64_t)(*at - *begin);
    }
    if (*at >= n) return 0;
#ifdef USE_PCRE2
    pcre2_match_data *m = (pcre2_match_data *)match;
    const int rc = pcre2_match((const pcre2_code *)b->split, text, n, *at, 0, m, NULL);
    if (rc == PCRE2_ERROR_NOMATCH) {
        *at = n;
    } else if (rc < 0) {
        return fail(err, "PCRE2 cannot split this text (error %d at byte %llu)", rc,
            (unsigned long long)*at);
    } else {
        const PCRE2_SIZE *found = pcre2_get_ovector_pointer(m);
        *pending = found[1];
        *at = found[0] > *at ? found[0] : found[1];
    }
    return (int64_t)(*at - *begin);
#else
    (void)b, (void)match, (void)text, (void)pending;
    return fail(err, "this program was built without PCRE2");
#endif
}

/* Merging takes some 30 bytes of memory for each of a word's. No language has such words: this is a
   file of something else, of zeros say. */
enum { WORD_LIMIT = 1 << 26 };
TOK_FN int check_word(int64_t len, Err *err) {
    if (len <= WORD_LIMIT) return 0;
    return fail(err,
        "a word of %lld bytes: expected at most %d, with white space, digits or punctuation "
        "between "
        "words: is this a text?",
        (long long)len, WORD_LIMIT);
}

TOK_FN int is_space(int c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Of an ASCII character that is no white space: letter, digit, other.
TOK_FN int ascii_class(int c) {
    const int lower = c | 32;
    return lower >= 'a' && lower <= 'z' ? 0 : c >= '0' && c <= '9' ? 1 : 2;
}

/* The first place at or after `from` where the split certainly ends a word, whatever lies around it:
   before ASCII white space that comes after another character, and between two ASCII characters of
   different classes, but for a contraction's. n where there is none. */
TOK_FN size_t tokenizer_cut(const unsigned char *text, size_t n, size_t from) {
    // the white space beyond ASCII, by its last bytes
    static const char *const wide[] = {"\xc2\x85", "\xc2\xa0", "\xe1\x9a\x80", "\xe2\x80\xa8",
        "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\x9f", "\xe3\x80\x80"};
    for (size_t i = from ? from : 1; i < n; i++) {
        if (is_space(text[i - 1])) continue;
        const int ascii = text[i - 1] < 0x80;
        if (!is_space(text[i])) {
            if (ascii && text[i] < 0x80 && text[i - 1] != '\'' &&
                ascii_class(text[i - 1]) != ascii_class(text[i]))
                return i;
            continue;
        }
        if (ascii) return i;
        int space = i >= 3 && text[i - 3] == 0xe2 && text[i - 2] == 0x80 && text[i - 1] <= 0x8a;
        for (size_t k = 0; k < sizeof wide / sizeof *wide && !space; k++) {
            const size_t len = strlen(wide[k]);
            space = i >= len && !memcmp(text + i - len, wide[k], len);
        }
        if (!space) return i;
    }
    return n;
}

// -------------------------------------------------------------------------------------------------
// text to tokens

// A piece of text that the split certainly ends at.
TOK_FN int encode_piece(Encoder *e, const unsigned char *text, size_t n, Err *err) {
    size_t at = 0, pending = 0, begin;
    int64_t len;
    while ((len = next_word(e->b, e->match, text, n, &at, &pending, &begin, err)) > 0) {
        if (check_word(len, err)) return -1;
        word_encode(e, text + begin, (size_t)len);
    }
    return (int)len;
}

/* Encodes n bytes of text (dataloader.h's Encode; ctx is the Tokenizer). edges: where a text begins
   and where it ends the end-of-text token is put, if the vocabulary has one, so that a model learns
   how texts begin and when to stop. *tokens is fresh memory that the caller frees; NULL when there
   are none. Threads take pieces, cut where the split ends a word anyway: the tokens
   are the same for any number of them. */
TOK_FN int tokenizer_encode(void *ctx, const unsigned char *text, size_t n, int edges,
    uint32_t **tokens, size_t *count, Err *err) {
    const Tokenizer *t = (const Tokenizer *)ctx;
    const size_t first = edges & TEXT_BEGINS && t->eot >= 0,
                 last = edges & TEXT_ENDS && t->eot >= 0;
    *tokens = NULL;
    *count = 0;
    if (n + first + last == 0) return 0;
    if (!t->bpe) {
        if (n > SIZE_MAX / sizeof **tokens || !(*tokens = (uint32_t *)malloc(n * sizeof **tokens)))
            return fail(
                err, "out of memory for the tokens of a text of %llu bytes", (unsigned long long)n);
        for (size_t i = 0; i < n; i++) (*tokens)[i] = text[i];
        *count = n;
        return 0;
    }
    // without its compiler PCRE2 looks at all of a text for every match
    const size_t size = t->bpe->jit ? (size_t)1 << 18 : (size_t)1 << 10;
    size_t *cut = NULL, total = 0;
    for (size_t at = 0; at < n; at = tokenizer_cut(text, n, n - at > size ? at + size : n))
        stbds_arrput(cut, at);
    const int64_t pieces = (int64_t)stbds_arrlen(cut);
    stbds_arrput(cut, n);
    uint32_t **part = (uint32_t **)calloc((size_t)pieces + 1, sizeof *part);
    int bad = !part;
    if (bad) fail(err, "out of memory for the tokens of a text");
#pragma omp parallel if (pieces > 1)
    {
        Encoder e;
        Err mine;
        int failed_here = encoder_open(&e, t->bpe);
        if (failed_here) fail(&mine, "out of memory to encode a text");
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pieces; i++) {
            if (failed_here || bad) continue;
            failed_here = encode_piece(&e, text + cut[i], cut[i + 1] - cut[i], &mine);
            const size_t k = stbds_arrlenu(e.out);
            if (k) memcpy(stbds_arraddnptr(part[i], k), e.out, k * sizeof *e.out);
            stbds_arrsetlen(e.out, 0);
        }
#pragma omp critical
        if (failed_here) {
            if (!bad) *err = mine;
            bad = 1;
        }
        encoder_close(&e);
    }
    for (int64_t i = 0; i < pieces && !bad; i++) total += stbds_arrlenu(part[i]);
    total += first + last;
    if (!bad && total && !(*tokens = (uint32_t *)malloc(total * sizeof **tokens))) {
        bad = 1;
        fail(err, "out of memory for %llu tokens", (unsigned long long)total);
    }
    if (!bad && first) (*tokens)[(*count)++] = (uint32_t)t->eot;
    for (int64_t i = 0; i < pieces && part; i++) {
        const size_t k = stbds_arrlenu(part[i]);
        if (!bad && k) {
            memcpy(*tokens + *count, part[i], k * sizeof **tokens);
            *count += k;
        }
        stbds_arrfree(part[i]);
    }
    if (!bad && last) (*tokens)[(*count)++] = (uint32_t)t->eot;
    free(part);
    stbds_arrfree(cut);
    return bad ? failed() : 0;
}

// -------------------------------------------------------------------------------------------------
// files

TOK_FN json_t *added_tokens(const Tokenizer *t) {
    json_t *added = json_array();
    char *name = NULL;
    for (int i = 0; t->bpe && i < t->vocab_size; i++)
        if (t->bpe->special[i])
            json_array_append_new(added,
                json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", i, "content",
                    token_name(t, i, &name), "single_word", 0, "lstrip", 0, "rstrip", 0,
                    "normalized", 0, "special", 1));
    stbds_arrfree(name);
    return added;
}

// What tokenizer.json holds; NULL: no memory.
TOK_FN json_t *tokenizer_json(const Tokenizer *t) {
    json_t *vocab = json_object(), *merges = json_array();
    char byte[3], *name = NULL, *other = NULL;
    int rc = !vocab || !merges;
    for (int i = 0; i < t->vocab_size && !rc; i++) {
        if (!t->bpe) byte_utf8(byte, i);
        rc = json_object_set_new(vocab, t->bpe ? token_name(t, i, &name) : byte, json_integer(i));
    }
    for (size_t i = 0; t->bpe && i < stbds_arrlenu(t->bpe->merge) && !rc; i++) {
        const Merge *m = &t->bpe->merge[i];
        rc = json_array_append_new(merges,
            json_sprintf(
                "%s %s", token_name(t, (int)m->left, &name), token_name(t, (int)m->right, &other)));
    }
    stbds_arrfree(name);
    stbds_arrfree(other);
    json_t *root = rc
        ? NULL
        : json_pack("{s:s, s:n, s:n, s:o, s:n, s:{s:s, s:b, s:b, s:b}, s:n, s:{s:s, s:b, s:b, s:b},"
                    " s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:O, s:O}}",
              "version", "1.0", "truncation", "padding", "added_tokens", added_tokens(t),
              "normalizer", "pre_tokenizer", "type", "ByteLevel", "add_prefix_space", 0,
              "trim_offsets", 1, "use_regex", t->bpe != NULL, "post_processor", "decoder", "type",
              "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", t->bpe != NULL,
              "model", "type", "BPE", "dropout", "unk_token", "continuing_subword_prefix",
              "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0, "ignore_merges", 0, "vocab",
              vocab, "merges", merges);
    json_decref(vocab);
    json_decref(merges);
    return root;
}

// Writes FOLDER/tokenizer.json and tokenizer_config.json; with `file` that name, and no config.
TOK_FN int tokenizer_save_as(const Tokenizer *t, const char *folder, const char *file, Err *err) {
    char *name = NULL;
    const char *eot = t->eot < 0 ? NULL : token_name(t, t->eot, &name);
    json_t *root = tokenizer_json(t);
    json_t *config = json_pack("{s:s, s:b, s:b, s:s?, s:s?, s:n, s:n}", "tokenizer_class",
        "PreTrainedTokenizerFast", "add_prefix_space", 0, "clean_up_tokenization_spaces", 0,
        "bos_token", eot, "eos_token", eot, "pad_token", "unk_token");
    int rc;
    if (!root || !config)
        rc = fail(err, "out of memory for a tokenizer of %d tokens", t->vocab_size);
    else if (json_write(folder, file ? file : "tokenizer.json", root, err))
        rc = -1;
    else
        rc = file ? 0 : json_write(folder, "tokenizer_config.json", config, err);
    json_decref(root);
    json_decref(config);
    stbds_arrfree(name);
    return rc ? -1 : 0;
}
TOK_FN int tokenizer_save(const Tokenizer *t, const char *folder, Err *err) {
    return tokenizer_save_as(t, folder, NULL, err);
}

// Whether a vocabulary of a tokenizer.json is that of the bytes, with their values as ids.
TOK_FN int json_is_bytes(const json_t *vocab) {
    char name[3];
    int same = json_object_size(vocab) == 256;
    for (int i = 0; i < 256 && same; i++) {
        byte_utf8(name, i);
        const json_t *id = json_object_get(vocab, name);
        same = json_is_integer(id) && json_integer_value(id) == i;
    }
    return same;
}

/* All of a tokenizer.json that must be as it is with GPT-2: nothing is passed over that would change
   the ids. */
TOK_FN int json_check(const json_t *root, const char *where, Err *err) {
    const json_t *model = json_object_get(root, "model"), *vocab = json_object_get(model, "vocab");
    const json_t *merges = json_object_get(model, "merges"), *post, *pre;
    const char *type = json_string_value(json_object_get(model, "type"));
    pre = json_object_get(root, "pre_tokenizer");
    post = json_object_get(root, "post_processor");
    const char *split = json_string_value(json_object_get(pre, "type"));
    const char *after = json_string_value(json_object_get(post, "type"));
    // what must be off: all of it changes the ids
    const struct {
        const json_t *in;
        const char *key;
    } off[] = {{root, "normalizer"}, {root, "truncation"}, {root, "padding"}, {model, "dropout"},
        {model, "continuing_subword_prefix"}, {model, "end_of_word_suffix"},
        {model, "byte_fallback"}, {model, "ignore_merges"}};
    if (!type || !json_is_object(vocab))
        return fail(
            err, "%s: expected a tokenizer with a model and a vocab, found other JSON", where);
    if (strcmp(type, "BPE"))
        return fail(err, "%s: expected a BPE model, found %s with %llu tokens", where, shown(type),
            (unsigned long long)json_object_size(vocab));
    if (!json_is_off(merges) && !json_is_array(merges))
        return fail(err, "%s: expected merges as an array, found something else", where);
    if (!json_is_off(post) && (!after || strcmp(after, "ByteLevel")))
        return fail(err, "%s: expected no post_processor but ByteLevel, found %s", where,
            after ? shown(after) : "another value");
    if (!split || strcmp(split, "ByteLevel") ||
        !json_is_off(json_object_get(pre, "add_prefix_space")))
        return fail(err,
            "%s: expected the pre_tokenizer ByteLevel without add_prefix_space, found %s", where,
            split ? shown(split) : "none");
    const json_t *regex = json_object_get(pre, "use_regex");
    if (regex && !json_is_true(regex) && (json_array_size(merges) || !json_is_bytes(vocab)))
        return fail(err,
            "%s: expected the pre_tokenizer ByteLevel with GPT-2's split, found "
            "use_regex off",
            where);
    for (size_t i = 0; i < sizeof off / sizeof *off; i++)
        if (!json_is_off(json_object_get(off[i].in, off[i].key)))
            return fail(
                err, "%s: expected no %s beside the vocabulary, found some", where, off[i].key);
    return 0;
}

// The id that the file gives to a token; -1: none.
TOK_FN int64_t json_id(const json_t *vocab, const char *name, size_t n) {
    const json_t *id = json_object_getn(vocab, name, n);
    return json_is_integer(id) ? (int64_t)json_integer_value(id) : -1;
}

// One merge, "a b" or ["a", "b"].
TOK_FN int json_merge(
    Tokenizer *t, const json_t *vocab, const json_t *m, size_t rank, const char *where, Err *err) {
    const char *a = json_string_value(m), *b = NULL, *gap = a ? strchr(a, ' ') : NULL;
    size_t n = 0, k = 0;
    if (gap) {
        n = (size_t)(gap - a), b = gap + 1, k = strlen(b);
    } else if (json_array_size(m) == 2) {
        a = json_string_value(json_array_get(m, 0));
        b = json_string_value(json_array_get(m, 1));
        n = a ? strlen(a) : 0, k = b ? strlen(b) : 0;
    }
    if (!n || !k || !a || !b)
        return fail(err, "%s: merge %llu: expected \"a b\" or [\"a\", \"b\"], found something else",
            where, (unsigned long long)rank + 1);
    char *both = NULL;
    memcpy(stbds_arraddnptr(both, n), a, n);
    memcpy(stbds_arraddnptr(both, k), b, k);
    const int64_t left = json_id(vocab, a, n), right = json_id(vocab, b, k),
                  id = json_id(vocab, both, n + k);
    stbds_arrfree(both);
    if (left < 0 || right < 0 || id < 0)
        return fail(err, "%s: merge %llu: expected tokens of the vocabulary, found %s and %s",
            where, (unsigned long long)rank + 1, shown(a), shown(b));
    return bpe_merge(t, (uint32_t)left, (uint32_t)right, (uint32_t)id, where, err);
}

/* The added tokens, which text is never turned into. Returns how many are not marked special, or -1:
   Hugging Face turns text into those. */
TOK_FN int json_added(Tokenizer *t, const json_t *added, const char *where, Err *err) {
    int ordinary = 0;
    for (size_t i = 0; i < json_array_size(added); i++) {
        const json_t *a = json_array_get(added, i), *id = json_object_get(a, "id");
        const char *name = json_string_value(json_object_get(a, "content"));
        if (!name || !json_is_integer(id))
            return fail(err, "%s: added_tokens: expected an id and a content in each", where);
        if (bpe_set(t, (int64_t)json_integer_value(id), name, strlen(name), 1, where, err))
            return -1;
        ordinary += !json_is_true(json_object_get(a, "special"));
    }
    return ordinary;
}

// Which special token ends a text: eos_token of the tokenizer_config.json beside, or the usual name.
TOK_FN void find_eot(Tokenizer *t, const char *path) {
    static const char *const usual[] = {TOK_EOT, "<|end_of_text|>", "</s>", "<eos>"};
    char config[CKPT_PATH];
    const char *slash = strrchr(path, '/'), *name = NULL;
    Err ignored;
    json_t *j = NULL;
    const int n = slash ? (int)(slash + 1 - path) : 0;
    if (snprintf(config, sizeof config, "%.*stokenizer_config.json", n, path) < CKPT_PATH &&
        !access(config, R_OK))
        j = json_read(config, &ignored);
    const json_t *eos = json_object_get(j, "eos_token");
    name = json_string_value(json_is_object(eos) ? json_object_get(eos, "content") : eos);
    for (int k = -1; k < (int)(sizeof usual / sizeof *usual) && t->eot < 0; k++) {
        const char *wanted = k < 0 ? name : usual[k];
        for (int i = 0; wanted && i < t->vocab_size && t->eot < 0; i++)
            if (t->bpe->special[i] && t->bpe->len[i] == strlen(wanted) &&
                !memcmp(t->bpe->text + t->bpe->at[i], wanted, t->bpe->len[i]))
                t->eot = i;
    }
    json_decref(j);
}

TOK_FN int open_json(Tokenizer *t, const char *path, Err *err) {
    json_t *root = json_read(path, err);
    const char *where = shown(path);
    if (!root) return -1;
    if (json_check(root, where, err)) {
        json_decref(root);
        return -1;
    }
    const json_t *model = json_object_get(root, "model"), *vocab = json_object_get(model, "vocab");
    const json_t *merges = json_object_get(model, "merges"),
                 *added = json_object_get(root, "added_tokens");
    if (json_is_off(merges) && json_is_off(added) && json_is_bytes(vocab)) {
        tokenizer_bytes(t);
        json_decref(root);
        return 0;
    }
    size_t size = json_object_size(vocab);
    const char *key;
    json_t *value;
    char *room = NULL;
    for (size_t i = 0; i < json_array_size(added); i++) { // in the vocabulary too, or beyond it
        key = json_string_value(json_object_get(json_array_get(added, i), "content"));
        size += key && !json_object_get(vocab, key);
    }
    int ordinary = 0,
        rc = json_is_off(added) || json_is_array(added)
        ? bpe_begin(t, size, where, err)
        : fail(err, "%s: expected added_tokens as an array, found something else", where);
    if (!rc) rc = (ordinary = json_added(t, added, where, err)) < 0;
    json_object_foreach((json_t *)(uintptr_t)vocab, key, value) {
        if (rc) break;
        const int64_t id = json_is_integer(value) ? (int64_t)json_integer_value(value) : -1;
        const size_t n = strlen(key);
        if (id >= 0 && id < t->vocab_size && t->bpe->special[id] && t->bpe->len[id] == n &&
            !memcmp(t->bpe->text + t->bpe->at[id], key, n))
            continue;
        unsigned char *bytes = (unsigned char *)room_for(&room, n + 1);
        const int k = spelled_bytes(bytes, key);
        if (!json_is_integer(value))
            rc = fail(err, "%s: expected a whole number as the id of %s", where, shown(key));
        else if (k < 0)
            rc = fail(err, "%s: expected tokens spelled in GPT-2's alphabet, found %s", where,
                shown(key));
        else
            rc = bpe_set(t, id, bytes, (size_t)k, 0, where, err);
    }
    stbds_arrfree(room);
    for (size_t i = 0; i < json_array_size(merges) && !rc; i++)
        rc = json_merge(t, vocab, json_array_get(merges, i), i, where, err);
    if (!rc) find_eot(t, path);
    if (!rc) rc = bpe_end(t, where, err);
    json_decref(root);
    if (!rc && ordinary)
        warn("%s: %d added tokens are not marked special; here text is never turned into them",
            where, ordinary);
    return rc ? -1 : 0;
}

// The token that ends a text, as the last id.
TOK_FN int add_eot(Tokenizer *t, const char *where, Err *err) {
    t->eot = t->vocab_size - 1;
    return bpe_set(t, t->eot, TOK_EOT, strlen(TOK_EOT), 1, where, err);
}

/* GPT-2's merges. Ids: the bytes in the order of their characters, then the merges, then
   "<|endoftext|>". */
TOK_FN int open_merges(Tokenizer *t, const char *path, char *text, size_t size, Err *err) {
    const char *where = shown(path);
    size_t lines = 0, line = 0;
    char name[3], *next;
    int rc = 0;
    json_t *vocab = json_object();
    for (size_t i = 0; i < size; i++) lines += text[i] == '\n';
    if (bpe_begin(t, 256 + (lines + 1 < TOK_LIMIT ? lines + 1 : TOK_LIMIT) + 1, where, err)) {
        json_decref(vocab);
        return -1;
    }
    int64_t id = 0;
    for (int c = 0; c < 256 + 68 && !rc; c++)
        for (int i = 0; i < 256; i++)
            if (byte_char(i) == c) {
                unsigned char byte = (unsigned char)i;
                byte_utf8(name, i);
                rc = json_object_set_new(vocab, name, json_integer(id)) ||
                    bpe_set(t, id++, &byte, 1, 0, where, err);
            }
    for (char *at = text; at < text + size && !rc; at = next) {
        char *end = memchr(at, '\n', (size_t)(text + size - at));
        next = end ? end + 1 : text + size;
        if (!end) end = text + size;
        if (end > at && end[-1] == '\r') end--;
        *end = 0; // text has room for it
        line++;
        if ((line == 1 && !strncmp(at, "#version", 8)) || (end == at && next == text + size))
            continue;
        char *gap = strchr(at, ' '), *both = NULL;
        const size_t n = gap ? (size_t)(gap - at) : 0, k = gap ? (size_t)(end - gap - 1) : 0;
        const int64_t left = gap ? json_id(vocab, at, n) : -1,
                      right = gap ? json_id(vocab, gap + 1, k) : -1;
        if (left < 0 || right < 0 || strlen(at) != (size_t)(end - at)) {
            rc = fail(err,
                "%s: line %llu: expected a merge, two tokens of the lines before with a space "
                "between, found '%.60s'",
                where, (unsigned long long)line, shown(at));
            break;
        }
        memcpy(stbds_arraddnptr(both, n), at, n);
        memcpy(stbds_arraddnptr(both, k + 1), gap + 1, k + 1);
        unsigned char *bytes = NULL;
        stbds_arrsetlen(bytes, n + k);
        if (json_object_get(vocab, both))
            rc = fail(
                err, "%s: line %llu: this token is there twice", where, (unsigned long long)line);
        else
            rc = bpe_set(t, id, bytes, (size_t)spelled_bytes(bytes, both), 0, where, err) ||
                bpe_merge(t, (uint32_t)left, (uint32_t)right, (uint32_t)id, where, err) ||
                json_object_set_new(vocab, both, json_integer(id));
        id++;
        stbds_arrfree(both);
        stbds_arrfree(bytes);
    }
    json_decref(vocab);
    if (!rc && id == 256) rc = fail(err, "%s: expected merges, found none", where);
    t->vocab_size = (int)id + 1;
    if (!rc) rc = add_eot(t, where, err);
    if (!rc) rc = bpe_end(t, where, err);
    return rc ? -1 : 0;
}

/* The merges behind a list of tokens in the order they were learned: each longer token, made of the
   merges before its own, is two tokens, and these are what its merge joins. */
TOK_FN int bpe_derive(Tokenizer *t, const char *where, Err *err) {
    Encoder e;
    int rc = 0;
    for (int i = 0; i < 256; i++)
        if (t->bpe->of_byte[i] == TOK_NONE)
            return fail(err, "%s: expected a token for every byte, found none for %d", where, i);
    if (encoder_open(&e, t->bpe)) rc = fail(err, "%s: out of memory", where);
    free(e.cache); // a word seen before has other tokens after the next merge
    e.cache = NULL;
    for (int i = 0; i < t->vocab_size && !rc; i++) {
        const unsigned char *bytes = t->bpe->text + t->bpe->at[i];
        if (t->bpe->special[i] || t->bpe->len[i] < 2) continue;
        stbds_arrsetlen(e.out, 0);
        word_encode(&e, bytes, t->bpe->len[i]);
        if (stbds_arrlenu(e.out) != 2)
            rc = fail(err,
                "%s: token %d is no merge of two tokens before it, so texts cannot be encoded: "
                "give the vocabulary's merges (vocab.bpe, tokenizer.json)",
                where, i);
        else
            rc = bpe_merge(t, e.out[0], e.out[1], (uint32_t)i, where, err);
    }
    encoder_close(&e);
    return rc;
}

// llm.c's tokenizer.bin: 256 words (magic, version, tokens, end of text), then length and bytes.
TOK_FN int open_llmc(
    Tokenizer *t, const char *path, const unsigned char *file, size_t size, Err *err) {
    enum { HEADER = 1024, GPT2_EOT = 50256 };
    const char *where = shown(path);
    uint32_t head[4] = {0};
    size_t at = HEADER;
    if (size < HEADER)
        return fail(err, "%s: expected a header of %d bytes, found %llu bytes", where, HEADER,
            (unsigned long long)size);
    memcpy(head, file, sizeof head);
    if (head[1] != 1 && head[1] != 2)
        return fail(err, "%s: expected version 1 or 2, found %u", where, head[1]);
    if (head[2] > size - HEADER)
        return fail(err, "%s: %u tokens do not fit into a file of %llu bytes", where, head[2],
            (unsigned long long)size);
    const uint32_t eot = head[1] == 2 ? head[3] : GPT2_EOT;
    if (bpe_begin(t, head[2], where, err)) return -1;
    for (uint32_t i = 0; i < head[2]; i++) {
        const size_t n = at < size ? file[at++] : 0;
        if (n == 0 || n > size - at)
            return fail(err, "%s: token %u: expected its length and its bytes, found %s", where, i,
                n ? "the end of the file" : "a length of 0");
        if (bpe_set(t, i, file + at, n, i == eot, where, err)) return -1;
        at += n;
    }
    if (at != size)
        return fail(err, "%s: expected %llu bytes, found %llu", where, (unsigned long long)at,
            (unsigned long long)size);
    if (eot < head[2]) t->eot = (int)eot;
    return bpe_derive(t, where, err) || bpe_end(t, where, err) ? -1 : 0;
}

// All of a file, and a 0 behind it.
TOK_FN unsigned char *read_whole(const char *path, size_t *size, Err *err) {
    struct stat st;
    unsigned char *text = NULL;
    size_t n = 0;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        fail_os(err, path, "cannot open");
        return NULL;
    }
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size < 4 || st.st_size > JSON_LIMIT) {
        fail(err, "%s: expected a tokenizer file of 4 to %d bytes, found %s", shown(path),
            JSON_LIMIT, looks_like(path));
    } else if (!(text = (unsigned char *)malloc((size_t)st.st_size + 1))) {
        fail(err, "%s: out of memory for %lld bytes", shown(path), (long long)st.st_size);
    } else {
        const ssize_t got = read_up_to(fd, text, (size_t)st.st_size);
        if (got < 0) {
            fail_os(err, path, "cannot read");
            free(text);
            text = NULL;
        } else {
            n = (size_t)got;
            text[n] = 0;
        }
    }
    close(fd);
    *size = n;
    return text;
}

// Reads a tokenizer of any of the three kinds. After a failure there is nothing to free.
TOK_FN int tokenizer_open(Tokenizer *t, const char *path, Err *err) {
    size_t size;
    uint32_t magic = 0;
    int rc;
    memset(t, 0, sizeof *t);
    unsigned char *text = read_whole(path, &size, err);
    if (!text) return -1;
    memcpy(&magic, text, size < 4 ? 0 : 4);
    const unsigned char *first = text;
    while (*first && is_space(*first)) first++;
    if (magic == 20240328)
        rc = open_llmc(t, path, text, size, err);
    else if (*first == '{')
        rc = open_json(t, path, err);
    else if (!strncmp((char *)text, "#version", 8) || !strcmp(looks_like(path), "a text file"))
        rc = open_merges(t, path, (char *)text, size, err);
    else
        rc = fail(err,
            "%s: expected a tokenizer (tokenizer.json, vocab.bpe or llm.c's tokenizer.bin), found "
            "%s",
            shown(path), looks_like(path));
    free(text);
    if (rc) tokenizer_free(t);
    return rc ? -1 : 0;
}

// Reads FOLDER/tokenizer.json.
TOK_FN int tokenizer_load(Tokenizer *t, const char *folder, Err *err) {
    char path[CKPT_PATH];
    memset(t, 0, sizeof *t);
    if (path_join(path, folder, "tokenizer.json", err)) return -1;
    if (!open_json(t, path, err)) return 0;
    tokenizer_free(t);
    return -1;
}

#endif
