/* bpe_train.h: learns a vocabulary of byte-level BPE from texts. It knows tokenizer.h.

   Words are counted first, each kind once. Then, as often as there are merges to learn: the pair of
   neighbours that occurs most often, of equals the one with the lowest ids, becomes a new symbol
   everywhere, from left to right. The words lie one after the other in one array, a pair knows the
   places where it came to be, and a merge changes the counts of the pairs beside it only: all
   merges together take the time of all places, times a logarithm.

   learner_open, learner_text (or learner_word) as often as there are texts, learner_learn,
   learner_close. Memory: the words that differ, 16 bytes for each byte of theirs, and the pairs. */
#ifndef BPE_TRAIN_H
#define BPE_TRAIN_H

#include "tokenizer.h"

typedef struct WordCount {
    uint64_t hash, count;
    size_t at; // of its bytes
    uint32_t len;
} WordCount;

typedef struct PairCount {
    uint64_t key, count;
    uint32_t *place; // of the left one, rising; an array of stb_ds
} PairCount;

typedef struct Learner {
    Tokenizer split; // the bytes, and the pattern
    void *match;
    unsigned char *text; // of all words
    WordCount *word;
    uint32_t *slot; // word + 1 by hash, open addressing; 0 = free
    size_t slots;
    // while merging
    uint32_t *symbol, *next, *prev, *of; // of a place: its symbol, its neighbours, its word
    PairCount *pair;
    PairRank *index; // of a pair, in `pair`
    struct Candidate {
        uint64_t count, key;
        uint32_t pair;
    } * heap;
} Learner;

TOK_FN void learner_close(Learner *l) {
    for (size_t i = 0; i < stbds_arrlenu(l->pair); i++) stbds_arrfree(l->pair[i].place);
    stbds_arrfree(l->pair);
    stbds_hmfree(l->index);
    stbds_arrfree(l->heap);
    stbds_arrfree(l->symbol);
    stbds_arrfree(l->next);
    stbds_arrfree(l->prev);
    stbds_arrfree(l->of);
    stbds_arrfree(l->text);
    stbds_arrfree(l->word);
    free(l->slot);
#ifdef USE_PCRE2
    pcre2_match_data_free((pcre2_match_data *)l->match);
#endif
    tokenizer_free(&l->split);
    memset(l, 0, sizeof *l);
}

// A vocabulary with room for vocab_size tokens, the first of which are the bytes, id = value.
TOK_FN int begin_with_bytes(Tokenizer *t, int vocab_size, const char *where, Err *err) {
    int rc = bpe_begin(t, (size_t)vocab_size, where, err);
    for (int i = 0; i < 256 && !rc; i++) {
        const unsigned char byte = (unsigned char)i;
        rc = bpe_set(t, i, &byte, 1, 0, where, err);
    }
    return rc;
}

TOK_FN int learner_open(Learner *l, Err *err) {
    int rc;
    memset(l, 0, sizeof *l);
    rc = begin_with_bytes(&l->split, 256, "bytes", err);
    if (!rc) rc = bpe_end(&l->split, "--train-vocab", err);
    l->slots = 1 << 12;
    l->slot = (uint32_t *)calloc(l->slots, sizeof *l->slot);
#ifdef USE_PCRE2
    if (!rc)
        l->match = pcre2_match_data_create_from_pattern((pcre2_code *)l->split.bpe->split, NULL);
    if (!rc && (!l->match || !l->slot)) rc = fail(err, "out of memory for words");
#endif
    if (rc) learner_close(l);
    return rc ? -1 : 0;
}

// Adds `times` occurrences of one word.
TOK_FN int learner_word(Learner *l, const unsigned char *text, size_t n, uint64_t times, Err *err) {
    uint64_t h = n;
    for (size_t i = 0; i < n; i += 8) {
        uint64_t x = 0;
        memcpy(&x, text + i, n - i < 8 ? n - i : 8);
        h = (h ^ x) * 0x9e3779b97f4a7c15u;
        h ^= h >> 32;
    }
    size_t i = h & (l->slots - 1);
    for (; l->slot[i]; i = (i + 1) & (l->slots - 1)) {
        WordCount *w = &l->word[l->slot[i] - 1];
        if (w->hash == h && w->len == n && !memcmp(l->text + w->at, text, n)) {
            w->count += times;
            return 0;
        }
    }
    const size_t at = stbds_arrlenu(l->text), words = stbds_arrlenu(l->word);
    if (n >= UINT32_MAX - 1 - at)
        return fail(err, "words that differ: expected at most 4 GB of them, found more");
    const WordCount w = {h, times, at, (uint32_t)n};
    memcpy(stbds_arraddnptr(l->text, n), text, n);
    stbds_arrput(l->word, w);
    l->slot[i] = (uint32_t)words + 1;
    if (2 * (words + 1) > l->slots) {
        uint32_t *more = (uint32_t *)calloc(2 * l->slots, sizeof *more);
        if (!more) return fail(err, "out of memory for %llu words", (unsigned long long)words);
        free(l->slot);
        l->slot = more;
        l->slots *= 2;
        for (size_t k = 0; k <= words; k++) {
            for (i = l->word[k].hash & (l->slots - 1); l->slot[i];) i = (i + 1) & (l->slots - 1);
            l->slot[i] = (uint32_t)k + 1;
        }
    }
    return 0;
}

// Counts the words of a text. A long one is best given in pieces that end at a tokenizer_cut.
TOK_FN int learner_text(Learner *l, const unsigned char *text, size_t n, Err *err) {
    const Bpe *b = l->split.bpe;
    const size_t size = b->jit ? (size_t)1 << 20 : (size_t)1 << 10;
    for (size_t from = 0, end; from < n; from = end) {
        size_t at = 0, pending = 0, begin;
        int64_t len;
        end = tokenizer_cut(text, n, n - from > size ? from + size : n);
        while (
            (len = next_word(b, l->match, text + from, end - from, &at, &pending, &begin, err)) > 0)
            if (check_word(len, err) || learner_word(l, text + from + begin, (size_t)len, 1, err))
                return -1;
        if (len < 0) return -1;
    }
    return 0;
}

TOK_FN int candidate_before(const struct Candidate *a, const struct Candidate *b) {
    return a->count != b->count ? a->count > b->count : a->key < b->key;
}
TOK_FN void candidate_push(Learner *l, uint32_t pair) {
    const struct Candidate x = {l->pair[pair].count, l->pair[pair].key, pair};
    if (x.count < 2) return; // a merge that would save nothing
    stbds_arrput(l->heap, x);
    size_t i = stbds_arrlenu(l->heap) - 1;
    for (; i && candidate_before(&x, &l->heap[(i - 1) / 2]); i = (i - 1) / 2)
        l->heap[i] = l->heap[(i - 1) / 2];
    l->heap[i] = x;
}
TOK_FN struct Candidate candidate_pop(Learner *l) {
    const struct Candidate top = l->heap[0], x = stbds_arrpop(l->heap);
    const size_t n = stbds_arrlenu(l->heap);
    size_t i = 0;
    for (size_t k; (k = 2 * i + 1) < n; i = k) {
        if (k + 1 < n && candidate_before(&l->heap[k + 1], &l->heap[k])) k++;
        if (!candidate_before(&l->heap[k], &x)) break;
        l->heap[i] = l->heap[k];
    }
    if (n) l->heap[i] = x;
    return top;
}

// The number of a pair, which may be new.
TOK_FN uint32_t pair_of(Learner *l, uint32_t left, uint32_t right) {
    const uint64_t key = (uint64_t)left << 32 | right;
    const ptrdiff_t i = stbds_hmgeti(l->index, key);
    if (i >= 0) return l->index[i].value;
    const PairCount fresh = {key, 0, NULL};
    const uint32_t n = (uint32_t)stbds_arrlenu(l->pair);
    stbds_arrput(l->pair, fresh);
    stbds_hmput(l->index, key, n);
    return n;
}
TOK_FN void pair_add(Learner *l, uint32_t left, uint32_t right, uint64_t count, uint32_t place) {
    const uint32_t n = pair_of(l, left, right); // which may move l->pair
    PairCount *p = &l->pair[n];
    p->count += count;
    stbds_arrput(p->place, place);
}
TOK_FN void pair_less(Learner *l, uint32_t left, uint32_t right, uint64_t count) {
    const uint32_t n = pair_of(l, left, right);
    l->pair[n].count -= count;
}

// Makes one pair a symbol, at all its places.
TOK_FN void learner_merge(Learner *l, uint32_t pair, uint32_t id) {
    const uint32_t left = (uint32_t)(l->pair[pair].key >> 32), right = (uint32_t)l->pair[pair].key;
    uint32_t *place = l->pair[pair].place, first = (uint32_t)stbds_arrlenu(l->pair);
    l->pair[pair].place = NULL;
    for (size_t i = 0; i < stbds_arrlenu(place); i++) {
        const uint32_t at = place[i], gone = l->next[at];
        if (l->symbol[at] != left || gone == TOK_NONE || l->symbol[gone] != right) continue;
        const uint32_t before = l->prev[at], after = l->next[gone];
        const uint64_t count = l->word[l->of[at]].count;
        l->pair[pair].count -= count;
        if (before != TOK_NONE) {
            pair_less(l, l->symbol[before], left, count);
            pair_add(l, l->symbol[before], id, count, before);
        }
        if (after != TOK_NONE) {
            pair_less(l, right, l->symbol[after], count);
            pair_add(l, id, l->symbol[after], count, at);
            l->prev[after] = at;
        }
        l->symbol[at] = id;
        l->symbol[gone] = TOK_NONE;
        l->next[at] = after;
    }
    stbds_arrfree(place);
    // a pair has the newest symbol in it when it comes to be: its count only falls from here on
    for (uint32_t p = first; p < stbds_arrlenu(l->pair); p++) candidate_push(l, p);
}

/* Learns a vocabulary of at most vocab_size tokens from the words counted: the bytes, with their
   values as ids, the merges, and "<|endoftext|>" as the last. Fewer where no pair occurs twice. */
TOK_FN int learner_learn(Learner *l, Tokenizer *t, int vocab_size, Err *err) {
    const char *where = "--train-vocab";
    const size_t places = stbds_arrlenu(l->text);
    stbds_arrsetlen(l->symbol, places);
    stbds_arrsetlen(l->next, places);
    stbds_arrsetlen(l->prev, places);
    stbds_arrsetlen(l->of, places);
    for (size_t w = 0; w < stbds_arrlenu(l->word); w++) {
        const uint32_t begin = (uint32_t)l->word[w].at, end = begin + l->word[w].len;
        for (uint32_t i = begin; i < end; i++) {
            l->symbol[i] = l->text[i];
            l->prev[i] = i > begin ? i - 1 : TOK_NONE;
            l->next[i] = i + 1 < end ? i + 1 : TOK_NONE;
            l->of[i] = (uint32_t)w;
            if (i > begin) pair_add(l, l->text[i - 1], l->text[i], l->word[w].count, i - 1);
        }
    }
    for (uint32_t p = 0; p < stbds_arrlenu(l->pair); p++) candidate_push(l, p);
    int rc = begin_with_bytes(t, vocab_size, where, err), id = 256;
    unsigned char *bytes = NULL;
    while (!rc && id < vocab_size - 1 && stbds_arrlenu(l->heap)) {
        const struct Candidate c = candidate_pop(l);
        if (l->pair[c.pair].count != c.count) {
            candidate_push(l, c.pair);
            continue;
        }
        const uint32_t left = (uint32_t)(c.key >> 32), right = (uint32_t)c.key;
        const Bpe *b = t->bpe;
        stbds_arrsetlen(bytes, 0);
        memcpy(stbds_arraddnptr(bytes, b->len[left]), b->text + b->at[left], b->len[left]);
        memcpy(stbds_arraddnptr(bytes, b->len[right]), b->text + b->at[right], b->len[right]);
        rc = bpe_set(t, id, bytes, stbds_arrlenu(bytes), 0, where, err) ||
            bpe_merge(t, left, right, (uint32_t)id, where, err);
        learner_merge(l, c.pair, (uint32_t)id++);
    }
    stbds_arrfree(bytes);
    t->vocab_size = id + 1;
    if (!rc) rc = add_eot(t, where, err) || bpe_end(t, where, err);
    if (rc) tokenizer_free(t);
    return rc ? -1 : 0;
}

#endif
