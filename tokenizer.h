/* tokenizer.h: text to tokens and back. It knows jansson, and checkpoint.h for reading and writing
   JSON files.

   One kind so far: bytes. 256 tokens, id = value of the byte, no end-of-text token; every text,
   valid UTF-8 or not, is encoded and decoded without loss. A caller that sees tokenizer_is_bytes()
   need not encode at all.

   On disk a tokenizer is Hugging Face's tokenizer.json, so that AutoTokenizer reads what is saved
   here. Its byte-level models spell tokens in an alphabet of 256 printable characters that stand
   for bytes (GPT-2's):
     bytes 33..126, 161..172 and 174..255    the character of the same number
     the other 68, in order                  characters 256, 257, ... (space, byte 32, is 288, "Ġ")
   The byte vocabulary is a BPE model whose vocabulary is this alphabet and whose list of merges is
   empty:
     {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false, ...},
      "decoder": {"type": "ByteLevel", ...},
      "model": {"type": "BPE", "vocab": {"Ā": 0, ...}, "merges": []}}

   The functions do not assume bytes: ids are looked up in a table of byte strings, and encoding has
   the signature that dataloader.h takes, so that merges can be added here without a change
   elsewhere. */
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include "checkpoint.h"

#define TOK_FN __attribute__((unused)) static

typedef struct Tokenizer {
    int vocab_size;
    int eot;                 // id of the end-of-text token, -1 = none
    unsigned char byte[256]; // the bytes of token i, one each: byte[i] = i
} Tokenizer;

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

TOK_FN void tokenizer_bytes(Tokenizer *t) {
    t->vocab_size = 256;
    t->eot = -1;
    for (int i = 0; i < 256; i++) t->byte[i] = (unsigned char)i;
}

// Nothing is held yet; callers need not know.
TOK_FN void tokenizer_free(Tokenizer *t) { memset(t, 0, sizeof *t); }

// Whether token ids are the bytes themselves, so that a text needs no encoding.
TOK_FN int tokenizer_is_bytes(const Tokenizer *t) { return t->vocab_size == 256; }

/* Encodes n bytes of text (dataloader.h's Encode; ctx is the Tokenizer). *tokens is fresh memory
   that the caller frees; NULL when there are none. */
TOK_FN int tokenizer_encode(
    void *ctx, const unsigned char *text, size_t n, uint32_t **tokens, size_t *count, Err *err) {
    (void)ctx;
    *tokens = NULL;
    *count = 0;
    if (n == 0) return 0;
    if (n > SIZE_MAX / sizeof **tokens || !(*tokens = (uint32_t *)malloc(n * sizeof **tokens)))
        return fail(
            err, "out of memory for the tokens of a text of %llu bytes", (unsigned long long)n);
    for (size_t i = 0; i < n; i++) (*tokens)[i] = text[i];
    *count = n;
    return 0;
}

// The bytes of one token, *n of them. NULL and 0 for an id that is not in the vocabulary.
TOK_FN const unsigned char *tokenizer_decode(const Tokenizer *t, int token, size_t *n) {
    int known = token >= 0 && token < t->vocab_size;
    *n = (size_t)known;
    return known ? &t->byte[token] : NULL;
}

// Writes FOLDER/tokenizer.json and tokenizer_config.json.
TOK_FN int tokenizer_save(const Tokenizer *t, const char *folder, Err *err) {
    json_t *vocab = json_object();
    int rc = !vocab;
    for (int i = 0; i < t->vocab_size && !rc; i++) {
        char name[3];
        byte_utf8(name, t->byte[i]);
        rc = json_object_set_new(vocab, name, json_integer(i));
    }
    json_t *root = rc
        ? NULL
        : json_pack(
              "{s:s, s:n, s:n, s:[], s:n, s:{s:s, s:b, s:b, s:b}, s:n, s:{s:s, s:b, s:b, s:b},"
              " s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:O, s:[]}}",
              "version", "1.0", "truncation", "padding", "added_tokens", "normalizer",
              "pre_tokenizer", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1,
              "use_regex", 0, "post_processor", "decoder", "type", "ByteLevel", "add_prefix_space",
              0, "trim_offsets", 1, "use_regex", 0, "model", "type", "BPE", "dropout", "unk_token",
              "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0,
              "ignore_merges", 0, "vocab", vocab, "merges");
    json_t *config = json_pack("{s:s, s:b, s:b, s:n, s:n, s:n, s:n}", "tokenizer_class",
        "PreTrainedTokenizerFast", "add_prefix_space", 0, "clean_up_tokenization_spaces", 0,
        "bos_token", "eos_token", "pad_token", "unk_token");
    if (!root || !config)
        rc = fail(err, "out of memory for a tokenizer of %d tokens", t->vocab_size);
    else if (json_write(folder, "tokenizer.json", root, err))
        rc = -1;
    else
        rc = json_write(folder, "tokenizer_config.json", config, err);
    json_decref(vocab);
    json_decref(root);
    json_decref(config);
    return rc ? -1 : 0;
}

/* Reads FOLDER/tokenizer.json. Only the byte vocabulary is accepted, wherever it was written; what
   another file holds is said. Nothing in it is passed over: a normaliser or added tokens would
   change the ids. */
TOK_FN int tokenizer_load(Tokenizer *t, const char *folder, Err *err) {
    char path[CKPT_PATH];
    if (path_join(path, folder, "tokenizer.json", err)) return -1;
    json_t *root = json_read(path, err);
    if (!root) return -1;
    const json_t *model = json_object_get(root, "model"), *vocab = json_object_get(model, "vocab");
    const json_t *merges = json_object_get(model, "merges"),
                 *pre = json_object_get(root, "pre_tokenizer");
    const char *type = json_string_value(json_object_get(model, "type"));
    const char *split = json_string_value(json_object_get(pre, "type"));
    const json_t *post = json_object_get(root, "post_processor");
    const char *added = json_string_value(json_object_get(post, "type"));
    // what must be off: all of it changes the ids
    const struct {
        const json_t *in;
        const char *key;
    } off[] = {{root, "normalizer"}, {root, "added_tokens"}, {root, "truncation"},
        {root, "padding"}, {model, "dropout"}, {model, "continuing_subword_prefix"},
        {model, "end_of_word_suffix"}};
    const char *where = shown(path);
    int rc = 0;
    if (!type || !json_is_object(vocab))
        rc =
            fail(err, "%s: expected a tokenizer with a model and a vocab, found other JSON", where);
    else if (strcmp(type, "BPE") || json_object_size(vocab) != 256 || !json_is_off(merges))
        rc = fail(err,
            "%s: expected the byte vocabulary (BPE, 256 tokens, no merges), found %s with %llu "
            "tokens and "
            "%llu merges: this version reads no other",
            where, shown(type), (unsigned long long)json_object_size(vocab),
            (unsigned long long)json_array_size(merges));
    else if (!json_is_off(post) && (!added || strcmp(added, "ByteLevel")))
        rc = fail(err, "%s: expected no post_processor but ByteLevel, found %s", where,
            added ? shown(added) : "another value");
    else if (!split || strcmp(split, "ByteLevel") ||
        !json_is_off(json_object_get(pre, "add_prefix_space")))
        rc =
            fail(err, "%s: expected the pre_tokenizer ByteLevel without add_prefix_space, found %s",
                where, split ? shown(split) : "none");
    for (size_t i = 0; i < sizeof off / sizeof *off && !rc; i++) {
        if (!json_is_off(json_object_get(off[i].in, off[i].key)))
            rc =
                fail(err, "%s: expected no %s beside the 256 bytes, found some", where, off[i].key);
    }
    for (int i = 0; i < 256 && !rc; i++) {
        char name[3];
        byte_utf8(name, i);
        const json_t *id = json_object_get(vocab, name);
        if (!json_is_integer(id) || json_integer_value(id) != i)
            rc = fail(err, "%s: expected byte %d to have the id %d, found %s", where, i, i,
                id ? "another id" : "no such token");
    }
    json_decref(root);
    if (rc) return -1;
    tokenizer_bytes(t);
    return 0;
}

#endif
