/* test_tokens.c: tokenizer.h where a vocabulary has merges. ./test_tokens runs every check, one line
   each on stdout:
     ok NAME | FAIL NAME: reason | skip NAME: reason
   and exits with status 1 if one failed. ./test_tokens WORD runs those whose name contains WORD.

     golden    token ids of hard texts, as Hugging Face's tokenizers makes them: with the vocabulary
               data/golden/tokens_vocab.json, and with GPT-2's, if GPT2_BPE=vocab.bpe names it
     bytes     any bytes come back; a text in pieces, and with more threads, gives the same tokens
     words     long words and short ones, against a merge by the definition
     learned   a vocabulary, against one learned by the definition; counts beyond 32 bits
     files     each kind of file there and back; damaged ones, which are refused by name

   What is expected was written by data/golden/make_tokens.py. GOLDEN=FOLDER is where it lies. Start
   reading at test_golden. */
#include "run_folder.h"
#include "test_report.h"
#include "bpe_train.h"

#ifdef _OPENMP
#include <omp.h>
#endif

static char golden[CKPT_PATH];

static void refused(int rc, const char *word, const char *other) {
    refused_with(rc, word, other);
    err.text[0] = 0;
}

static uint64_t seed = 1;
static uint64_t below(uint64_t n) { // 0 .. n-1
    seed += 0x9e3779b97f4a7c15u;
    uint64_t x = (seed ^ seed >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (x ^ x >> 31) % n;
}

// n bytes of words, white space, pieces of UTF-8, cut and whole, and bytes of any value
static void random_text(unsigned char *out, size_t n) {
    static const char *const piece[] = {"the", " and", "  ", "\n", "\r\n", "'s", "'ll", "\xc3\xa9",
        "\xe2\x80\x89", "\xe3\x80\x80", "\xf0\x9f\x98\x80", "\xf0\x9f\x98", "\xe3\x80", "\xc3",
        "\xff", "\xff\xfe", " 12", "3", "!?", " -", "\t", "\xc2\xa0", "\xc2\x85", "word", "aaaaaaa",
        "\xed\xa0\x80", "\xc0\x80", "\xf4\x90\x80\x80", "\xe1\xa0\x8e", "<|endoftext|>", "\x80"};
    const int way = (int)below(4);
    for (size_t i = 0; i < n;) {
        const char *p = piece[below(COUNT(piece))];
        if (way == 0 || (way == 1 && below(2))) {
            out[i++] = (unsigned char)below(256);
        } else if (way == 2 && below(40) == 0) {
            out[i++] = 0;
        } else {
            while (*p && i < n) out[i++] = (unsigned char)*p++;
        }
    }
}

static void open_golden(Tokenizer *t) {
    char path[CKPT_PATH];
    must(!path_join(path, golden, "tokens_vocab.json", &err), golden);
    must(!tokenizer_open(t, path, &err), path);
}

static void comes_back(
    const Tokenizer *t, const unsigned char *text, size_t n, const uint32_t *id, size_t count) {
    size_t at = 0, k = 0;
    for (size_t i = 0; i < count; at += k, i++) {
        const unsigned char *bytes = tokenizer_decode(t, (int)id[i], &k);
        check(k && at + k <= n && !memcmp(bytes, text + at, k), "token %zu of %zu", i, count);
        check(tokenizer_text_bytes(t, (int)id[i]) == k, "token %zu is special", i);
        if (check_failed[0]) return;
    }
    check(at == n, "%zu of %zu bytes came back", at, n);
}

// -------------------------------------------------------------------------------------------------
// golden

static json_t *golden_json(const char *name) {
    char path[CKPT_PATH];
    must(!path_join(path, golden, name, &err), name);
    json_t *j = json_read(path, &err);
    must(j != NULL, path);
    return j;
}

static void check_ids(const Tokenizer *t, const char *expected) {
    json_t *texts = golden_json("tokens_text.json"), *all = golden_json(expected);
    check(json_array_size(texts) == json_array_size(all) && json_array_size(all) > 60,
        "%zu texts, %zu lists of ids", json_array_size(texts), json_array_size(all));
    for (size_t i = 0; i < json_array_size(texts); i++) {
        const unsigned char *text =
            (const unsigned char *)json_string_value(json_array_get(texts, i));
        const json_t *ids = json_array_get(all, i);
        const size_t n = json_string_length(json_array_get(texts, i));
        uint32_t *id;
        size_t count;
        accepted(tokenizer_encode((void *)(uintptr_t)t, text, n, 0, &id, &count, &err));
        check(count == json_array_size(ids), "text %zu (%s): %zu tokens, expected %zu", i,
            shown((const char *)text), count, json_array_size(ids));
        for (size_t k = 0; k < count && !check_failed[0]; k++) {
            const json_int_t want = json_integer_value(json_array_get(ids, k));
            check(id[k] == (uint32_t)want, "text %zu (%s): token %zu is %u, expected %d", i,
                shown((const char *)text), k, id[k], (int)want);
        }
        comes_back(t, text, n, id, count);
        free(id);
    }
    json_decref(texts);
    json_decref(all);
}

static void test_golden(void) {
    Tokenizer t;
    if (begin("golden/vocab")) {
        open_golden(&t);
        check(t.vocab_size == 512 && t.eot == 511 && !tokenizer_is_bytes(&t), "%d tokens, end %d",
            t.vocab_size, t.eot);
        for (int i = 0; i < 256; i++) check(t.bpe->of_byte[i] == (uint32_t)i, "byte %d", i);
        check(tokenizer_text_bytes(&t, t.eot) == 0, "the end of a text is text");
        check_ids(&t, "tokens_ids.json");
        tokenizer_free(&t);
        finish();
    }
    if (begin("golden/gpt2")) {
        const char *path = getenv("GPT2_BPE");
        if (!path || !*path) {
            skipped = "GPT2_BPE=FILE would name GPT-2's vocab.bpe";
        } else if (tokenizer_open(&t, path, &err)) {
            check(0, "%s", err.text);
        } else {
            check(
                t.vocab_size == 50257 && t.eot == 50256, "%d tokens, end %d", t.vocab_size, t.eot);
            check_ids(&t, "tokens_gpt2.json");
            tokenizer_free(&t);
        }
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// bytes

static void test_bytes(void) {
    enum { MOST = 400, LONG = 1 << 21 };
    Tokenizer t;
    uint32_t *id, *other;
    size_t n, k;
    open_golden(&t);
    if (begin("bytes/any")) {
        unsigned char text[MOST];
        for (int round = 0; round < 20000 && !check_failed[0]; round++) {
            const size_t size = (size_t)below(MOST);
            random_text(text, size);
            accepted(tokenizer_encode(&t, text, size, 0, &id, &n, &err));
            comes_back(&t, text, size, id, n);
            free(id);
        }
        check(!tokenizer_decode(&t, 512, &k) && !k, "token 512");
        check(!tokenizer_decode(&t, -1, &k) && !k && !tokenizer_text_bytes(&t, -1), "token -1");
        finish();
    }
    if (begin("bytes/in-pieces")) { // a cut changes nothing, whatever is on either side
        unsigned char text[MOST] = {0};
        Encoder e;
        int cuts = 0;
        must(!encoder_open(&e, t.bpe), "memory");
        for (int round = 0; round < 20000 && !check_failed[0]; round++) {
            const size_t size = 1 + (size_t)below(MOST - 1);
            random_text(text, size);
            const size_t cut = tokenizer_cut(text, size, (size_t)below(size));
            uint32_t *whole = NULL;
            accepted(encode_piece(&e, text, size, &err));
            n = stbds_arrlenu(e.out);
            must(n > 0, "a text without tokens");
            memcpy(stbds_arraddnptr(whole, n), e.out, n * sizeof *whole);
            stbds_arrsetlen(e.out, 0);
            accepted(encode_piece(&e, text, cut, &err));
            accepted(encode_piece(&e, text + cut, size - cut, &err));
            cuts += cut < size;
            check(stbds_arrlenu(e.out) == n && !memcmp(whole, e.out, n * sizeof *whole),
                "other tokens when %zu bytes are cut at %zu", size, cut);
            stbds_arrsetlen(e.out, 0);
            stbds_arrfree(whole);
        }
        encoder_close(&e);
        check(cuts > 5000, "%d cuts", cuts);
        finish();
    }
    if (begin("bytes/threads")) {
        unsigned char *text = malloc(LONG);
        must(text != NULL, "memory");
        for (size_t i = 0; i < LONG; i += 1 << 12) random_text(text + i, 1 << 12);
        accepted(tokenizer_encode(&t, text, LONG, 0, &id, &n, &err));
        comes_back(&t, text, LONG, id, n);
#ifdef _OPENMP
        const int threads = omp_get_max_threads();
        for (int i = 1; i <= 5; i += 2) {
            omp_set_num_threads(i);
            accepted(tokenizer_encode(&t, text, LONG, 0, &other, &k, &err));
            check(k == n && !memcmp(id, other, n * sizeof *id), "%d threads: other tokens", i);
            free(other);
        }
        omp_set_num_threads(threads);
#else
        (void)other;
#endif
        free(id);
        // one word, and white space, as long as a text
        for (int i = 0; i < 3; i++) {
            memset(text, "a \xff"[i], LONG - 1);
            text[LONG - 1] = 'x';
            accepted(tokenizer_encode(&t, text, LONG, 0, &id, &n, &err));
            comes_back(&t, text, LONG, id, n);
            free(id);
        }
        free(text);
        finish();
    }
    if (begin("bytes/word-too-long")) { // refused before the memory for it is taken
        const size_t size = (size_t)WORD_LIMIT + 1;
        unsigned char *text = calloc(size, 1);
        Learner l;
        must(text != NULL, "memory");
        refused(tokenizer_encode(&t, text, size, 0, &id, &n, &err), "a word of 67108865 bytes",
            "expected at most 67108864");
        must(!learner_open(&l, &err), err.text);
        refused(learner_text(&l, text, size, &err), "a word of 67108865 bytes",
            "expected at most 67108864");
        learner_close(&l);
        free(text);
        finish();
    }
    tokenizer_free(&t);
}

// -------------------------------------------------------------------------------------------------
// words

// By the definition: of what fits somewhere the lowest rank, of equals the leftmost.
static int merge_slowly(const Bpe *b, uint32_t *symbol, int n) {
    for (;;) {
        int at = -1;
        size_t best = stbds_arrlenu(b->merge);
        for (int i = 0; i + 1 < n; i++)
            for (size_t r = 0; r < best; r++)
                if (b->merge[r].left == symbol[i] && b->merge[r].right == symbol[i + 1])
                    best = r, at = i;
        if (at < 0) return n;
        symbol[at] = b->merge[best].id;
        n--;
        for (int i = at + 1; i < n; i++) symbol[i] = symbol[i + 1];
    }
}

static void test_words(void) {
    enum { MOST = 100 };
    if (!begin("words/by-the-definition")) return;
    Tokenizer t;
    Encoder e;
    open_golden(&t);
    must(!encoder_open(&e, t.bpe), "memory");
    for (int round = 0; round < 3000 && !check_failed[0]; round++) {
        unsigned char text[MOST];
        uint32_t want[MOST];
        const int n = 1 + (int)below(MOST), letters = 1 + (int)below(26);
        for (int i = 0; i < n; i++)
            text[i] = (unsigned char)("etaoinshrdlu thwmfcgypbvkj"[below((uint64_t)letters)]);
        for (int i = 0; i < n; i++) want[i] = t.bpe->of_byte[text[i]];
        const int k = merge_slowly(t.bpe, want, n);
        for (int way = 0; way < 3;
             way++) { // as long as it is; again, from the cache; as a long one
            stbds_arrsetlen(e.out, 0);
            if (way < 2)
                word_encode(&e, text, (size_t)n);
            else
                merge_long(&e, text, (uint32_t)n);
            check((int)stbds_arrlen(e.out) == k && !memcmp(e.out, want, (size_t)k * sizeof *want),
                "way %d: %d tokens, expected %d", way, (int)stbds_arrlen(e.out), k);
        }
    }
    encoder_close(&e);
    tokenizer_free(&t);
    finish();
}

// -------------------------------------------------------------------------------------------------
// learned

typedef struct Word {
    uint32_t symbol[300];
    int n;
} Word;

// By the definition: count every pair anew for every merge. Returns how many merges there are.
static int learn_slowly(
    Learner *l, const unsigned char *text, size_t size, Merge *merge, int most) {
    static Word word[6000];
    static int count[500][500];
    int words = 0, merges = 0;
    size_t at = 0, pending = 0, begin_at;
    int64_t len;
    while (
        (len = next_word(l->split.bpe, l->match, text, size, &at, &pending, &begin_at, &err)) > 0) {
        must(words < 6000 && len <= 300, "room for words");
        for (int i = 0; i < len; i++) word[words].symbol[i] = text[begin_at + (size_t)i];
        word[words++].n = (int)len;
    }
    for (; merges < most; merges++) {
        int best = 1, left = -1, right = -1;
        memset(count, 0, sizeof count);
        for (int w = 0; w < words; w++)
            for (int i = 0; i + 1 < word[w].n; i++)
                count[word[w].symbol[i]][word[w].symbol[i + 1]]++;
        for (int a = 0; a < 256 + merges; a++)
            for (int b = 0; b < 256 + merges; b++)
                if (count[a][b] > best) best = count[a][b], left = a, right = b;
        if (left < 0) break;
        const Merge m = {(uint32_t)left, (uint32_t)right, 256 + (uint32_t)merges};
        merge[merges] = m;
        for (int w = 0; w < words; w++) {
            Word *x = &word[w];
            int k = 0;
            for (int i = 0; i < x->n; i++, k++) {
                const int fits =
                    i + 1 < x->n && x->symbol[i] == m.left && x->symbol[i + 1] == m.right;
                x->symbol[k] = fits ? m.id : x->symbol[i];
                i += fits;
            }
            x->n = k;
        }
    }
    return merges;
}

static void test_learned(void) {
    enum { SIZE = 6000, MERGES = 200 };
    static unsigned char text[SIZE];
    static const char *const kind[] = {"words", "runs", "two-letters", "bytes", "syllables"};
    for (size_t way = 0; way < COUNT(kind); way++) {
        if (!begin("learned/%s", kind[way])) continue;
        static Merge want[MERGES];
        Learner l;
        Tokenizer t;
        for (size_t i = 0; i < SIZE; i++) {
            text[i] = way == 1  ? (unsigned char)(below(30) ? 'a' : ' ')
                : way == 2      ? (unsigned char)("ab ab"[below(5)])
                : way == 3      ? (unsigned char)below(256)
                : below(6) == 0 ? ' '
                : way == 0      ? (unsigned char)("etaoinshr"[below(9)])
                                : (unsigned char)("\xc3\xa9\xc3\xa8to"[i % 6]);
            if (i % 200 == 0) text[i] = '\n';
        }
        accepted(learner_open(&l, &err));
        const int merges = learn_slowly(&l, text, SIZE, want, MERGES);
        accepted(learner_text(&l, text, SIZE, &err));
        accepted(learner_learn(&l, &t, 256 + MERGES + 1, &err));
        check((int)stbds_arrlen(t.bpe->merge) == merges && merges > 8, "%d merges, expected %d",
            (int)stbds_arrlen(t.bpe->merge), merges);
        check(t.vocab_size == 256 + merges + 1 && t.eot == t.vocab_size - 1, "%d tokens",
            t.vocab_size);
        for (int i = 0; i < merges && !check_failed[0]; i++) {
            const Merge *m = &t.bpe->merge[i];
            check(!memcmp(m, &want[i], sizeof *m), "merge %d is %u %u, expected %u %u", i, m->left,
                m->right, want[i].left, want[i].right);
        }
        learner_close(&l);
        tokenizer_free(&t);
        finish();
    }
    if (begin("learned/counts-beyond-32-bits")) { // 2^32 + 1 is more than 2^32, and than 3
        static const struct {
            const char *word;
            uint64_t times;
        } word[] = {{"ab", ((uint64_t)1 << 32) + 1}, {"cd", (uint64_t)1 << 32}, {"ef", 3},
            {"gh", (uint64_t)1 << 40}, {"xab", (uint64_t)1 << 63}};
        Learner l;
        Tokenizer t;
        accepted(learner_open(&l, &err));
        for (size_t i = 0; i < COUNT(word); i++)
            accepted(learner_word(&l, (const unsigned char *)word[i].word, strlen(word[i].word),
                word[i].times, &err));
        accepted(learner_learn(&l, &t, 300, &err));
        static const char *const order[] = {"ab", "xab", "gh", "cd", "ef"};
        check(t.vocab_size == 256 + 5 + 1, "%d tokens", t.vocab_size);
        for (int i = 0; i < 5 && !check_failed[0]; i++) {
            size_t n;
            const unsigned char *bytes = tokenizer_decode(&t, 256 + i, &n);
            check(n == strlen(order[i]) && !memcmp(bytes, order[i], n), "token %d is '%.*s'",
                256 + i, (int)n, (const char *)bytes);
        }
        learner_close(&l);
        tokenizer_free(&t);
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// files

static void same(const Tokenizer *a, const Tokenizer *b) {
    must(a->bpe && b->bpe, "merges");
    check(a->vocab_size == b->vocab_size && a->eot == b->eot, "%d tokens, end %d; %d, end %d",
        a->vocab_size, a->eot, b->vocab_size, b->eot);
    for (int i = 0; i < a->vocab_size && !check_failed[0]; i++) {
        size_t n, k;
        const unsigned char *x = tokenizer_decode(a, i, &n), *y = tokenizer_decode(b, i, &k);
        check(
            n == k && !memcmp(x, y, n) && a->bpe->special[i] == b->bpe->special[i], "token %d", i);
    }
    const size_t n = stbds_arrlenu(a->bpe->merge);
    check(stbds_arrlenu(b->bpe->merge) == n &&
            !memcmp(a->bpe->merge, b->bpe->merge, n * sizeof *a->bpe->merge),
        "other merges");
}

// llm.c's file of a vocabulary; how many bytes.
static size_t llmc_file(const Tokenizer *t, unsigned char *out) {
    const uint32_t head[4] = {20240328, 2, (uint32_t)t->vocab_size, (uint32_t)t->eot};
    size_t at = 1024, n;
    memset(out, 0, at);
    memcpy(out, head, sizeof head);
    for (int i = 0; i < t->vocab_size; i++) {
        const unsigned char *bytes = tokenizer_decode(t, i, &n);
        out[at++] = (unsigned char)n;
        memcpy(out + at, bytes, n);
        at += n;
    }
    return at;
}

static void edit(const char *path, const char *text) { // the golden vocabulary, with other members
    json_error_t e;
    json_t *root = golden_json("tokens_vocab.json"), *with = json_loads(text, 0, &e);
    const char *key;
    json_t *value;
    must(with != NULL, text);
    json_object_foreach(with, key, value) {
        json_t *old = json_object_get(root, key);
        if (json_is_object(old) && json_is_object(value)) {
            json_t *vocab = json_object_get(value, "vocab"), *all = json_object_get(old, "vocab");
            if (vocab) {
                json_object_update(all, vocab);
                json_object_del(value, "vocab");
            }
            json_object_update(old, value);
        } else {
            json_object_set(root, key, value);
        }
    }
    char *out = json_dumps(root, 0);
    must(out != NULL, path);
    put_file(path, out, strlen(out));
    free(out);
    json_decref(root);
    json_decref(with);
}

static void test_kinds(void) {
    static unsigned char file[1 << 16];
    static const char *const merges[] = {"#version: 0.2\na b\nab c\n\xc4\xa0 abc\n",
        "#version: 0.2\r\na b\r\nab c\r\n\xc4\xa0 abc\r\n", "a b\nab c\n\xc4\xa0 abc",
        "#version: 9\na b\r\nab c\n\xc4\xa0 abc\r\n"};
    Tokenizer t, u;
    open_golden(&t);
    if (begin("files/tokenizer-json")) {
        must(!make_folders("saved", &err), "saved");
        accepted(tokenizer_save(&t, "saved", &err));
        accepted(tokenizer_load(&u, "saved", &err));
        same(&t, &u);
        tokenizer_free(&u);
        json_t *j = json_read("saved/tokenizer_config.json", &err);
        const char *end = json_string_value(json_object_get(j, "eos_token"));
        check(end && !strcmp(end, TOK_EOT), "eos_token");
        json_decref(j);
        // another end, as the file beside says; merges as pairs; an added token beyond the vocabulary
        put_file("tokenizer_config.json", "{\"eos_token\": {\"content\": \"<e>\"}}", 33);
        edit("t.json",
            "{\"added_tokens\": ["
            "{\"id\": 511, \"content\": \"<|endoftext|>\", \"special\": true},"
            "{\"id\": 512, \"content\": \"<e>\", \"special\": true}]}");
        accepted(tokenizer_open(&u, "t.json", &err));
        check(u.vocab_size == 513 && u.eot == 512, "%d tokens, end %d", u.vocab_size, u.eot);
        tokenizer_free(&u);
        unlink("tokenizer_config.json");
        j = golden_json("tokens_vocab.json");
        json_t *model = json_object_get(j, "model"), *pairs = json_array();
        for (size_t i = 0; i < json_array_size(json_object_get(model, "merges")); i++) {
            const char *m = json_string_value(json_array_get(json_object_get(model, "merges"), i));
            const int gap = (int)strcspn(m, " ");
            json_array_append_new(pairs, json_pack("[s%, s]", m, (size_t)gap, m + gap + 1));
        }
        json_object_set_new(model, "merges", pairs);
        must(!json_write(".", "pairs.json", j, &err), "pairs.json");
        json_decref(j);
        accepted(tokenizer_open(&u, "pairs.json", &err));
        same(&t, &u);
        tokenizer_free(&u);
        finish();
    }
    if (begin("files/vocab-bpe")) {
        for (size_t i = 0; i < COUNT(merges); i++) {
            size_t n;
            put_file("m.bpe", merges[i], strlen(merges[i]));
            accepted(tokenizer_open(&u, "m.bpe", &err));
            if (check_failed[0] || !u.bpe) break;
            check(u.vocab_size == 260 && u.eot == 259, "way %zu: %d tokens", i, u.vocab_size);
            const unsigned char *bytes = tokenizer_decode(&u, 258, &n);
            check(n == 4 && !memcmp(bytes, " abc", 4), "way %zu: '%.*s'", i, (int)n, bytes);
            check(u.bpe->of_byte['!'] == 0 && u.bpe->of_byte[0] == 188, "other ids of bytes");
            tokenizer_free(&u);
        }
        finish();
    }
    if (begin("files/llmc")) { // the merges are found again
        put_file("t.bin", file, llmc_file(&t, file));
        accepted(tokenizer_open(&u, "t.bin", &err));
        if (!check_failed[0]) same(&t, &u);
        tokenizer_free(&u);
        finish();
    }
    tokenizer_free(&t);
}

static void test_refused(void) {
    static const struct {
        const char *name, *edit, *word;
    } json[] = {
        {"other-json", "{\"model\": null}", "a model and a vocab"},
        {"unigram", "{\"model\": {\"type\": \"Unigram\"}}", "found Unigram"},
        {"merge-of-three", "{\"model\": {\"merges\": [[\"a\", \"b\", \"c\"]]}}", "merge 1"},
        {"merge-number", "{\"model\": {\"merges\": [7]}}", "merge 1"},
        {"merge-word", "{\"model\": {\"merges\": [\"ab\"]}}", "merge 1"},
        {"merge-unknown", "{\"model\": {\"merges\": [\"Q Q\"]}}", "merge 1"},
        {"merge-empty", "{\"model\": {\"merges\": [\"a \"]}}", "merge 1"},
        {"merge-twice", "{\"model\": {\"merges\": [\"t h\", \"t h\"]}}", "merge 2"},
        {"merges-object", "{\"model\": {\"merges\": {\"a b\": 1}}}", "merges as an array"},
        {"id-twice", "{\"model\": {\"vocab\": {\"a\": 98}}}", "id 98 is there twice"},
        {"id-negative", "{\"model\": {\"vocab\": {\"a\": -1}}}", "found -1"},
        {"id-huge", "{\"model\": {\"vocab\": {\"a\": 99999999999}}}", "found 99999999999"},
        {"id-real", "{\"model\": {\"vocab\": {\"a\": 97.0}}}", "whole number"},
        {"id-text", "{\"model\": {\"vocab\": {\"a\": \"97\"}}}", "whole number"},
        {"alphabet", "{\"model\": {\"vocab\": {\"a b\": 512}}}", "alphabet, found a b"},
        {"alphabet-far", "{\"model\": {\"vocab\": {\"\\u4e2d\": 512}}}", "alphabet"},
        {"empty-token", "{\"model\": {\"vocab\": {\"\": 512}}}", "empty"},
        {"added-object", "{\"added_tokens\": {\"id\": 1}}", "added_tokens as an array"},
        {"added-no-id", "{\"added_tokens\": [{\"content\": \"<x>\"}]}", "added_tokens"},
        {"added-other-id", "{\"added_tokens\": [{\"id\": 5, \"content\": \"<x>\"}]}", "id 5"},
        {"added-far", "{\"added_tokens\": [{\"id\": 600, \"content\": \"<x>\"}]}", "found 600"},
        {"normalizer", "{\"normalizer\": {\"type\": \"NFC\"}}", "no normalizer"},
        {"metaspace", "{\"pre_tokenizer\": {\"type\": \"Metaspace\"}}", "found Metaspace"},
        {"no-split", "{\"pre_tokenizer\": {\"use_regex\": false}}", "use_regex"},
        {"prefix-space", "{\"pre_tokenizer\": {\"add_prefix_space\": true}}", "add_prefix_space"},
        {"template", "{\"post_processor\": {\"type\": \"Template\"}}", "found Template"},
        {"fallback", "{\"model\": {\"byte_fallback\": true}}", "no byte_fallback"},
        {"ignore-merges", "{\"model\": {\"ignore_merges\": true}}", "no ignore_merges"},
        {"dropout", "{\"model\": {\"dropout\": 0.1}}", "no dropout"},
        {"truncation", "{\"truncation\": {\"max_length\": 4}}", "no truncation"},
    };
    static const struct {
        const char *name, *text, *word;
    } merges[] = {
        {"no-merges", "#version: 0.2\n", "found none"},
        {"three", "#version: 0.2\na b c\n", "line 2"},
        {"one", "#version: 0.2\na b\nab\n", "line 3"},
        {"empty-line", "#version: 0.2\n\na b\n", "line 2"},
        {"unknown", "#version: 0.2\na b\nac d\n", "line 3"},
        {"later", "#version: 0.2\nab c\na b\n", "line 2"},
        {"twice", "#version: 0.2\na b\na b\n", "line 3"},
        {"two-ways", "#version: 0.2\na b\nb c\nab c\na bc\n", "line 5"},
        {"prose", "It was the best of times,\nit was the worst of times\n", "line 1"},
        {"spaces", "#version: 0.2\na  b\n", "line 2"},
    };
    static const struct {
        const char *name;
        int at, bytes; // where which bytes are put; at < 0: so many bytes are left
        uint32_t value;
        const char *word;
    } bin[] = {
        {"header-cut", -1000, 0, 0, "header of 1024 bytes"},
        {"version", 4, 4, 3, "version 1 or 2"},
        {"huge", 8, 4, 0xffffffffu, "do not fit"},
        {"one-more", 8, 4, 513, "token 512"},
        {"one-less", 8, 4, 511, "expected"},
        {"few", 8, 4, 100, "256 to"},
        {"length-0", 1024, 1, 0, "length of 0"},
        {"same-byte", 1025, 1, 1, "two tokens for the byte 1"},
        {"cut", -1700, 0, 0, "end of the file"},
        {"end-is-a-byte", 12, 4, 97, "byte, found none for 97"},
        {"no-merge", 1024 + 512 + 1, 1, 250, "no merge of two"},
    };
    static unsigned char file[1 << 16], hurt[1 << 16];
    Tokenizer t, u;
    open_golden(&t);
    const size_t size = llmc_file(&t, file);
    for (size_t i = 0; i < COUNT(json); i++) {
        if (!begin("refused/json/%s", json[i].name)) continue;
        edit("hurt.json", json[i].edit);
        refused(tokenizer_open(&u, "hurt.json", &err), "hurt.json", json[i].word);
        check(!u.bpe, "something is left");
        finish();
    }
    for (size_t i = 0; i < COUNT(merges); i++) {
        if (!begin("refused/bpe/%s", merges[i].name)) continue;
        put_file("hurt.bpe", merges[i].text, strlen(merges[i].text));
        refused(tokenizer_open(&u, "hurt.bpe", &err), "hurt.bpe", merges[i].word);
        finish();
    }
    for (size_t i = 0; i < COUNT(bin); i++) {
        if (!begin("refused/bin/%s", bin[i].name)) continue;
        memcpy(hurt, file, size);
        if (bin[i].at >= 0) memcpy(hurt + bin[i].at, &bin[i].value, (size_t)bin[i].bytes);
        put_file("hurt.bin", hurt, bin[i].at < 0 ? (size_t)-bin[i].at : size);
        refused(tokenizer_open(&u, "hurt.bin", &err), "hurt.bin", bin[i].word);
        finish();
    }
    if (begin("refused/other-files")) {
        refused(tokenizer_open(&u, "none", &err), "none", "No such file");
        refused(tokenizer_open(&u, ".", &err), ".", "a folder");
        put_file("e", "", 0);
        refused(tokenizer_open(&u, "e", &err), "e", "an empty file");
        put_file("zeros", hurt + 16, 1000);
        refused(tokenizer_open(&u, "zeros", &err), "zeros", "a file of zeros");
        must(!truncate("zeros", (off_t)JSON_LIMIT + 1), "a large file");
        refused(tokenizer_open(&u, "zeros", &err), "zeros", "of 4 to");
        must(!truncate("hurt.json", 5000), "a cut file");
        refused(tokenizer_open(&u, "hurt.json", &err), "hurt.json", "expected JSON");
        put_file("nul", "#version: 0.2\na b\0c\n", 20);
        refused(tokenizer_open(&u, "nul", &err), "nul", "line 2");
        finish();
    }
    tokenizer_free(&t);
}

// Random damage: refused in one line, or a vocabulary that brings every text back.
static void test_damage(void) {
    static unsigned char whole[1 << 16], hurt[1 << 16];
    static const char *const name[] = {"json", "bpe", "bin"};
    Tokenizer t;
    open_golden(&t);
    for (size_t kind = 0; kind < COUNT(name); kind++) {
        if (!begin("refused/damage/%s", name[kind])) continue;
        size_t n = 0, taken = 0;
        if (kind == 0) {
            FILE *f;
            edit("d.json", "{}");
            f = fopen("d.json", "rb");
            must(f != NULL, "d.json");
            n = fread(whole, 1, sizeof whole, f);
            fclose(f);
        } else if (kind == 1) {
            char *left = NULL, *right = NULL;
            n = (size_t)sprintf((char *)whole, "#version: 0.2\n");
            for (size_t i = 0; i < stbds_arrlenu(t.bpe->merge); i++)
                n += (size_t)sprintf((char *)whole + n, "%s %s\n",
                    token_name(&t, (int)t.bpe->merge[i].left, &left),
                    token_name(&t, (int)t.bpe->merge[i].right, &right));
            stbds_arrfree(left);
            stbds_arrfree(right);
        } else {
            n = llmc_file(&t, whole);
        }
        for (int round = 0; round < 400 && !check_failed[0]; round++) {
            unsigned char text[200];
            uint32_t *id;
            size_t size = n, k;
            Tokenizer u;
            memcpy(hurt, whole, n);
            for (uint64_t c = below(4); c < 4; c++) hurt[below(n)] = (unsigned char)below(256);
            if (below(4) == 0) size = 1 + (size_t)below(n);
            put_file("d", hurt, size);
            if (tokenizer_open(&u, "d", &err)) {
                refused(-1, "d", "d");
                continue;
            }
            taken++;
            if (!u.bpe) continue;
            random_text(text, sizeof text);
            accepted(tokenizer_encode(&u, text, sizeof text, 0, &id, &k, &err));
            comes_back(&u, text, sizeof text, id, k);
            free(id);
            tokenizer_free(&u);
        }
        check(taken < 400, "nothing was refused");
        finish();
    }
    tokenizer_free(&t);
}

int main(int argc, char **argv) {
    static char dir[512];
    const char *tmp = getenv("TMPDIR"), *where = getenv("GOLDEN");
    if (argc > 1) filter = argv[1];
#ifndef USE_PCRE2
    (void)tmp, (void)where, (void)dir;
    puts("skip tokens: built without PCRE2 (Debian, Ubuntu: apt-get install libpcre2-dev)");
    return 0;
#endif
    must(realpath(where ? where : "data/golden", golden) != NULL, "data/golden");
    if (!tmp || !*tmp) tmp = access("/dev/shm", W_OK | X_OK) ? "/tmp" : "/dev/shm";
    const char *named = getenv("GPT2_BPE");
    char *gpt2 = named && *named ? realpath(named, NULL) : NULL;
    if (gpt2) must(!setenv("GPT2_BPE", gpt2, 1), "GPT2_BPE");
    free(gpt2);
    snprintf(dir, sizeof dir, "%.480s/test_tokens.XXXXXX", tmp);
    must(mkdtemp(dir) && !chdir(dir), dir);
    test_golden();
    test_bytes();
    test_words();
    test_learned();
    test_kinds();
    test_refused();
    test_damage();
    must(!chdir("/") && !remove_path(dir, &err), dir);
    return failures != 0;
}
