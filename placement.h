/* placement.h: which rank has which experts, when the experts of a layer are spread over ranks. It
   knows moe.h, safetensors.h (files) and jansson.

   A placement is an array position (n_layers, E): expert e of layer l is at position[l*E + e] =
   rank * (E / ranks) + its index among those of the rank. Dense layers: the identity. As a file:

     {"experts": E, "ranks": P, "layers": [
       {"layer": l, "ranks": [[experts of rank 0], [of rank 1], ...]}, ...]}

   with one entry for each MoE layer, in order; a rank has E/P experts, each expert is there once.

   In order:
     placement_even, _read, _write   index order; the file
     place_loads, place_routing      what a run recorded: metrics.jsonl, routing.jsonl
     placement_make                  a placement made from them
     placement_print                 what is predicted for it, beside index order

   Start reading at placement_make. */
#ifndef PLACEMENT_H
#define PLACEMENT_H

#include "safetensors.h"

#define PLACE_FN __attribute__((unused)) static

enum {
    PLACE_EXPERTS = 4096, // most experts of a layer: tables of a split are (E, ranks)
    PLACE_LINES = 64,     // lines of routing.jsonl that are used, at most
    PLACE_SWEEPS = 64     // over all pairs of experts; each swap improves, so few are needed
};

/* Loads that differ by less than this part of the mean load of a rank are about equal: the loads
   are those of steps that are over, and from one step to the next they differ by more. So little is
   given for experts that are chosen together to be on one rank. */
#define PLACE_ABOUT 0.01

// -------------------------------------------------------------------------------------------------
// the file

PLACE_FN void placement_even(const Config *c, int *position) {
    for (int l = 0; l < c->n_layers; l++)
        for (int e = 0; e < c->n_experts; e++) position[(size_t)l * c->n_experts + e] = e;
}

// A JSON value in an error message.
PLACE_FN const char *found_json(const json_t *j) {
    char text[64] = "another value";
    if (!j) strcpy(text, "none");
    if (json_is_integer(j)) snprintf(text, sizeof text, "%lld", (long long)json_integer_value(j));
    if (json_is_real(j)) snprintf(text, sizeof text, "%.17g", json_real_value(j));
    if (json_is_string(j)) strcpy(text, "a text");
    if (json_is_object(j)) strcpy(text, "an object");
    if (json_is_array(j)) snprintf(text, sizeof text, "a list of %zu", json_array_size(j));
    return shown(text);
}

PLACE_FN int json_is_number_of(const json_t *j, int64_t n) {
    return json_is_integer(j) && json_integer_value(j) == n;
}
PLACE_FN int json_is_list_of(const json_t *j, size_t n) {
    return json_is_array(j) && json_array_size(j) == n;
}

// One layer's entry. seen (E): zeros.
PLACE_FN int placement_entry(const char *path, const json_t *j, int layer, int E, int ranks,
    int *position, char *seen, Err *err) {
    const json_t *number = json_object_get(j, "layer"), *lists = json_object_get(j, "ranks");
    const int each = E / ranks;
    if (!json_is_number_of(number, layer))
        return fail(err, "%s: expected \"layer\": %d next, found %s", shown(path), layer,
            json_is_object(j) ? found_json(number) : found_json(j));
    if (!json_is_list_of(lists, (size_t)ranks))
        return fail(err, "%s: layer %d: expected \"ranks\", a list of %d, found %s", shown(path),
            layer, ranks, found_json(lists));
    for (int r = 0; r < ranks; r++) {
        const json_t *list = json_array_get(lists, (size_t)r);
        if (!json_is_list_of(list, (size_t)each))
            return fail(err, "%s: layer %d, rank %d: expected a list of %d experts, found %s",
                shown(path), layer, r, each, found_json(list));
        for (int i = 0; i < each; i++) {
            const json_t *x = json_array_get(list, (size_t)i);
            const json_int_t e = json_integer_value(x);
            if (!json_is_integer(x) || e < 0 || e >= E)
                return fail(err,
                    "%s: layer %d, rank %d: expected experts, whole numbers from 0 to %d, found %s",
                    shown(path), layer, r, E - 1, found_json(x));
            if (seen[e])
                return fail(err, "%s: layer %d: expected each expert once, found %d twice",
                    shown(path), layer, (int)e);
            seen[e] = 1;
            position[e] = r * each + i;
        }
    }
    return 0;
}

PLACE_FN int placement_layers(const char *path, const json_t *root, const Config *c, int ranks,
    int *position, char *seen, Err *err) {
    static const char *const key[] = {"experts", "ranks"};
    const json_t *layers = json_object_get(root, "layers");
    const int want[] = {c->n_experts, ranks}, E = c->n_experts;
    if (!json_is_object(root) || !layers)
        return fail(err,
            "%s: expected a placement, an object with \"experts\", \"ranks\" and \"layers\", found "
            "%s without; train_moe place makes one",
            shown(path), looks_like(path));
    for (int i = 0; i < 2; i++)
        if (!json_is_number_of(json_object_get(root, key[i]), want[i]))
            return fail(err, "%s: expected \"%s\": %d, found %s; train_moe place makes one",
                shown(path), key[i], want[i], found_json(json_object_get(root, key[i])));
    if (!json_is_list_of(layers, (size_t)moe_layers(c)))
        return fail(err, "%s: expected \"layers\", a list of %d, one for each MoE layer, found %s",
            shown(path), moe_layers(c), found_json(layers));
    placement_even(c, position);
    for (int l = c->dense_layers; l < c->n_layers; l++) {
        memset(seen, 0, (size_t)E);
        if (placement_entry(path, json_array_get(layers, (size_t)(l - c->dense_layers)), l, E,
                ranks, position + (size_t)l * E, seen, err))
            return -1;
    }
    return 0;
}

// Reads a placement of this model over so many ranks. position (n_layers, E).
PLACE_FN int placement_read(const char *path, const Config *c, int ranks, int *position, Err *err) {
    if (!moe_layers(c))
        return fail(
            err, "%s: expected a model with experts to place, found a dense one", shown(path));
    if (ranks < 1 || c->n_experts % ranks)
        return fail(err, "%s: expected a number of ranks that divides %d experts, found %d",
            shown(path), c->n_experts, ranks);
    json_t *root = json_read(path, err);
    if (!root) return -1;
    char *seen = (char *)malloc((size_t)c->n_experts);
    const int rc = seen ? placement_layers(path, root, c, ranks, position, seen, err)
                        : fail(err, "%s: out of memory", shown(path));
    free(seen);
    json_decref(root);
    return rc;
}

// A layer a line; under a temporary name first.
PLACE_FN int placement_write(
    const char *path, const Config *c, int ranks, const int *position, Err *err) {
    const int E = c->n_experts, each = E / ranks;
    char *text = NULL;
    size_t n = 0;
    int *expert = (int *)malloc((size_t)E * sizeof *expert); // which one is at a position
    FILE *f = open_memstream(&text, &n);
    if (f && expert) {
        fprintf(f, "{\"experts\": %d, \"ranks\": %d, \"layers\": [", E, ranks);
        for (int l = 0, first = 1; l < c->n_layers; l++) {
            if (!is_moe_layer(c, l)) continue;
            for (int e = 0; e < E; e++) expert[position[(size_t)l * E + e]] = e;
            fprintf(f, "%s\n  {\"layer\": %d, \"ranks\": [", first ? "" : ",", l);
            for (int i = 0; i < E; i++)
                fprintf(f, "%s%d%s",
                    i % each ? ", "
                        : i  ? ", ["
                             : "[",
                    expert[i], i % each == each - 1 ? "]" : "");
            fprintf(f, "]}");
            first = 0;
        }
        fprintf(f, "\n]}\n");
    }
    const int whole = f && expert && !ferror(f);
    const int rc = (f && fclose(f)) || !whole || !text ? fail(err, "%s: out of memory", shown(path))
                                                       : write_text_file_synced(path, text, n, err);
    free(expert);
    free(text);
    return rc;
}

// Whether a file may be replaced by a placement: there is none, or it is one.
PLACE_FN int placement_may_replace(const char *path) {
    Err ignored;
    if (access(path, F_OK)) return 1;
    json_t *j = json_read(path, &ignored);
    const int is = json_object_get(j, "experts") && json_object_get(j, "ranks") &&
        json_object_get(j, "layers");
    json_decref(j);
    return is;
}

// -------------------------------------------------------------------------------------------------
// what a run recorded

/* Lines of a log that are used: the recent half of those that hold what is looked for. */
typedef struct PlaceSteps {
    int64_t recorded, used; // lines
    int64_t first, last;    // steps of those used
} PlaceSteps;

// The routing that was recorded: rows (tokens) with their experts in every MoE layer.
typedef struct PlaceRouting {
    PlaceSteps steps;
    int rows;
    int *topk; // (rows, MoE layers, K)
} PlaceRouting;

typedef struct PlaceLog {
    const char *path;
    const Config *c;
    double *load;      // of metrics.jsonl: (n_layers, E), added to
    PlaceRouting *out; // of routing.jsonl
} PlaceLog;

// The sum of a line's loads and those before it.
PLACE_FN int place_add_load(PlaceLog *g, const json_t *line, int64_t at, Err *err) {
    const Config *c = g->c;
    const json_t *load = json_object_get(line, "load");
    const int L = moe_layers(c), E = c->n_experts;
    if (!json_is_list_of(load, (size_t)L))
        return fail(err,
            "%s: line %lld: expected \"load\", a list of %d, one for each MoE layer, found %s",
            shown(g->path), (long long)at, L, found_json(load));
    for (int l = 0; l < L; l++) {
        const json_t *layer = json_array_get(load, (size_t)l);
        if (!json_is_list_of(layer, (size_t)E))
            return fail(err, "%s: line %lld: \"load\": expected lists of %d experts, found %s",
                shown(g->path), (long long)at, E, found_json(layer));
        for (int e = 0; e < E; e++) {
            const json_t *x = json_array_get(layer, (size_t)e);
            if (!json_is_integer(x) || json_integer_value(x) < 0)
                return fail(err,
                    "%s: line %lld: \"load\": expected whole numbers of 0 or more, found %s",
                    shown(g->path), (long long)at, found_json(x));
            g->load[(size_t)(c->dense_layers + l) * E + e] += (double)json_integer_value(x);
        }
    }
    return 0;
}

// One row's experts in one layer: K different ones.
PLACE_FN int place_row(int *topk, const json_t *row, int K, int E) {
    if (!json_is_list_of(row, (size_t)K)) return -1;
    for (int k = 0; k < K; k++) {
        const json_t *x = json_array_get(row, (size_t)k);
        const json_int_t e = json_integer_value(x);
        if (!json_is_integer(x) || e < 0 || e >= E) return -1;
        topk[k] = (int)e;
        for (int i = 0; i < k; i++)
            if (topk[i] == e) return -1;
    }
    return 0;
}

// Appends the rows of a line.
PLACE_FN int place_add_rows(PlaceLog *g, const json_t *line, int64_t at, Err *err) {
    const Config *c = g->c;
    PlaceRouting *r = g->out;
    const json_t *layers = json_object_get(line, "layers");
    const int L = moe_layers(c), E = c->n_experts, K = c->top_k;
    if (!json_is_list_of(layers, (size_t)L))
        return fail(err,
            "%s: line %lld: expected \"layers\", a list of %d, one for each MoE layer, found %s",
            shown(g->path), (long long)at, L, found_json(layers));
    const size_t n = json_array_size(json_object_get(json_array_get(layers, 0), "topk"));
    const size_t width = (size_t)L * K;
    if (!n || n > (size_t)(INT_MAX - r->rows))
        return fail(err, "%s: line %lld: expected the routing of some rows, found %s",
            shown(g->path), (long long)at,
            found_json(json_object_get(json_array_get(layers, 0), "topk")));
    int *more = (int *)realloc(r->topk, ((size_t)r->rows + n) * width * sizeof *more);
    if (!more) return fail(err, "%s: out of memory for its rows", shown(g->path));
    r->topk = more;
    more += (size_t)r->rows * width;
    for (int l = 0; l < L; l++) {
        const json_t *layer = json_array_get(layers, (size_t)l);
        const json_t *rows = json_object_get(layer, "topk");
        if (!json_is_number_of(json_object_get(layer, "layer"), c->dense_layers + l))
            return fail(err, "%s: line %lld: expected \"layer\": %d next, found %s", shown(g->path),
                (long long)at, c->dense_layers + l,
                found_json(json_is_object(layer) ? json_object_get(layer, "layer") : layer));
        if (!json_is_list_of(rows, n))
            return fail(err, "%s: line %lld: layer %d: expected \"topk\", a list of %zu, found %s",
                shown(g->path), (long long)at, c->dense_layers + l, n, found_json(rows));
        for (size_t i = 0; i < n; i++)
            if (place_row(more + i * width + (size_t)l * K, json_array_get(rows, i), K, E))
                return fail(err,
                    "%s: line %lld: layer %d: expected rows of %d different experts from 0 to %d, "
                    "found another in row %zu",
                    shown(g->path), (long long)at, c->dense_layers + l, K, E - 1, i);
    }
    r->rows += (int)n;
    return 0;
}

/* Walks over the lines that have the key: counts them, and gives those of the recent half, at most
   `most` of them and evenly spaced, to `add`. A line without an end is still being written, or was
   never finished: it does not count. */
PLACE_FN int place_lines(PlaceLog *g, PlaceSteps *s, const char *key, int64_t most,
    int (*add)(PlaceLog *, const json_t *, int64_t, Err *), Err *err) {
    char *text = NULL;
    size_t room = 0;
    int rc = 0;
    FILE *in = fopen(g->path, "r");
    memset(s, 0, sizeof *s);
    if (!in) return fail_os(err, g->path, "expected what a run recorded");
    for (ssize_t n; (n = getline(&text, &room, in)) > 0;)
        s->recorded += text[n - 1] == '\n' && strstr(text, key);
    if (!s->recorded)
        rc = fail(err, "%s: expected what a run recorded, lines with %s, found %s", shown(g->path),
            key, looks_like(g->path));
    const int64_t half = (s->recorded + 1) / 2, step = (half + most - 1) / most;
    int64_t left = s->recorded, at = 0;
    rewind(in);
    for (ssize_t n; !rc && left && (n = getline(&text, &room, in)) > 0;) {
        at++;
        if (!strstr(text, key)) continue;
        if (left-- > half || left % step) continue;
        json_error_t e;
        json_t *line = json_parse(text, (size_t)n, &e);
        const json_t *number = json_object_get(line, "step");
        if (!line)
            rc = fail(err, "%s: line %lld: expected JSON, found %s", shown(g->path), (long long)at,
                shown(e.text));
        else if (!json_is_integer(number))
            rc = fail(err, "%s: line %lld: expected \"step\", a whole number, found %s",
                shown(g->path), (long long)at, found_json(number));
        else
            rc = add(g, line, at, err);
        s->last = (int64_t)json_integer_value(number);
        if (!s->used++) s->first = s->last;
        json_decref(line);
    }
    free(text);
    fclose(in);
    return rc;
}

// load (n_layers, E): choices of every expert, over the steps used; dense layers: 0.
PLACE_FN int place_loads(
    const char *path, const Config *c, double *load, PlaceSteps *steps, Err *err) {
    PlaceLog g = {path, c, load, NULL};
    for (size_t i = 0; i < (size_t)c->n_layers * c->n_experts; i++) load[i] = 0;
    return place_lines(&g, steps, "\"load\"", INT_MAX, place_add_load, err);
}

// The caller frees r->topk, also after a failure.
PLACE_FN int place_routing(const char *path, const Config *c, PlaceRouting *r, Err *err) {
    PlaceLog g = {path, c, NULL, r};
    memset(r, 0, sizeof *r);
    return place_lines(&g, &r->steps, "\"layers\"", PLACE_LINES, place_add_rows, err);
}

// -------------------------------------------------------------------------------------------------
// splitting experts into groups

// One layer: the load of each expert, and which of the recorded rows chose it.
typedef struct PlaceLayer {
    int E, K, rows;
    const double *load; // (E)
    int *topk;          // (rows, K)
    int *begin, *row;   // expert e is in the rows row[begin[e]] ... row[begin[e+1]-1]
} PlaceLayer;

/* Some of the experts in groups of equal size: ranks, or nodes. What a swap changes is kept in
   tables, so that it is known without counting rows. */
typedef struct PlaceSplit {
    const PlaceLayer *y;
    int groups;
    int *group;  // (E): of an expert; -1: it is not among them
    double *sum; // (groups): load
    int *has;    // (E, groups): rows of the expert that have some expert in the group
    int *pairs;  // (E, groups): experts of its rows in the group, itself left out
    int *alone;  // (E): rows of the expert that have none but it in its group
    int *order;  // (E): the experts, heaviest first
    char *mark;  // (rows)
    int *count;  // (groups)
} PlaceSplit;

PLACE_FN void place_layer_close(PlaceLayer *y) {
    free(y->topk);
    free(y->begin);
    free(y->row);
}

// Layer number l of the MoE layers.
PLACE_FN int place_layer_open(
    PlaceLayer *y, const Config *c, int l, const double *load, const PlaceRouting *r, Err *err) {
    const int E = c->n_experts, K = c->top_k, rows = r ? r->rows : 0;
    const size_t n = (size_t)rows * K;
    memset(y, 0, sizeof *y);
    y->E = E, y->K = K, y->rows = rows, y->load = load;
    y->topk = (int *)malloc((n + 1) * sizeof(int));
    y->row = (int *)malloc((n + 1) * sizeof(int));
    y->begin = (int *)calloc((size_t)E + 2, sizeof(int));
    if (!y->topk || !y->row || !y->begin) {
        place_layer_close(y);
        return fail(err, "out of memory for the rows of a layer");
    }
    for (int i = 0; i < rows; i++)
        memcpy(y->topk + (size_t)i * K, r->topk + ((size_t)i * moe_layers(c) + l) * K,
            (size_t)K * sizeof(int));
    int *end = y->begin + 1; // end[e]: where the next row of expert e goes
    for (size_t i = 0; i < n; i++) end[y->topk[i] + 1]++;
    for (int e = 0; e < E; e++) end[e + 1] += end[e];
    for (size_t i = 0; i < n; i++) y->row[end[y->topk[i]]++] = (int)(i / (size_t)K);
    return 0;
}

PLACE_FN void place_split_close(PlaceSplit *s) {
    free(s->group);
    free(s->sum);
    free(s->has);
    free(s->pairs);
    free(s->alone);
    free(s->order);
    free(s->mark);
    free(s->count);
}

// No expert is in a group yet.
PLACE_FN int place_split_open(PlaceSplit *s, const PlaceLayer *y, int groups, Err *err) {
    const size_t E = (size_t)y->E, cells = y->rows ? E * (size_t)groups : 1;
    memset(s, 0, sizeof *s);
    s->y = y, s->groups = groups;
    s->group = (int *)malloc(E * sizeof(int));
    s->sum = (double *)calloc((size_t)groups, sizeof(double));
    s->has = (int *)malloc(cells * sizeof(int));
    s->pairs = (int *)malloc(cells * sizeof(int));
    s->alone = (int *)malloc(E * sizeof(int));
    s->order = (int *)malloc(E * sizeof(int));
    s->mark = (char *)calloc((size_t)y->rows + 1, 1);
    s->count = (int *)calloc((size_t)groups, sizeof(int));
    if (!s->group || !s->sum || !s->has || !s->pairs || !s->alone || !s->order || !s->mark ||
        !s->count) {
        place_split_close(s);
        return fail(err, "out of memory to place %d experts", y->E);
    }
    for (int e = 0; e < y->E; e++) s->group[e] = -1;
    return 0;
}

// The experts, heaviest first, ties to the lowest id.
PLACE_FN void place_by_load(int *order, const double *load, int E) {
    for (int e = 0; e < E; e++) {
        int at = e;
        for (; at > 0 && load[order[at - 1]] < load[e]; at--) order[at] = order[at - 1];
        order[at] = e;
    }
}

/* Greedy: heaviest first, each to the lightest group that has room. Among those about as light, to
   the one where its co-selection with the experts already there is largest, then to the lightest,
   then to the first. order: n experts, heaviest first. */
PLACE_FN void place_greedy(PlaceSplit *s, int n) {
    const PlaceLayer *y = s->y;
    const int G = s->groups;
    int *together = s->count, *room = s->alone; // (groups) fits into (E)
    double total = 0;
    for (int i = 0; i < n; i++) total += y->load[s->order[i]];
    const double about = PLACE_ABOUT * total / G;
    for (int g = 0; g < G; g++) room[g] = n / G;
    for (int i = 0; i < n; i++) {
        const int e = s->order[i];
        int best = -1;
        double least = 0;
        for (int g = 0; g < G; g++) together[g] = 0;
        for (int at = y->begin[e]; at < y->begin[e + 1]; at++)
            for (int k = 0; k < y->K; k++) {
                const int g = s->group[y->topk[(size_t)y->row[at] * y->K + k]];
                if (g >= 0) together[g]++;
            }
        for (int g = 0; g < G; g++)
            if (room[g] && (best < 0 || s->sum[g] < least)) best = g, least = s->sum[g];
        for (int g = 0; g < G; g++) {
            if (!room[g] || s->sum[g] > least + about) continue;
            if (together[g] > together[best] ||
                (together[g] == together[best] && s->sum[g] < s->sum[best]))
                best = g;
        }
        s->group[e] = best;
        s->sum[best] += y->load[e];
        room[best]--;
    }
    for (int g = 0; g < G; g++) together[g] = 0;
}

// Fills the tables from the groups.
PLACE_FN void place_count(PlaceSplit *s) {
    const PlaceLayer *y = s->y;
    const int G = s->groups, K = y->K;
    memset(s->alone, 0, (size_t)y->E * sizeof(int));
    if (!y->rows) return;
    memset(s->has, 0, (size_t)y->E * G * sizeof(int));
    memset(s->pairs, 0, (size_t)y->E * G * sizeof(int));
    for (int r = 0; r < y->rows; r++) {
        const int *row = y->topk + (size_t)r * K;
        for (int k = 0; k < K; k++)
            if (s->group[row[k]] >= 0) s->count[s->group[row[k]]]++;
        for (int k = 0; k < K; k++)
            if (s->group[row[k]] >= 0) s->alone[row[k]] += s->count[s->group[row[k]]] == 1;
        for (int k = 0; k < K; k++) {
            const int g = s->group[row[k]];
            if (g < 0 || !s->count[g]) continue; // counted with an expert before it
            for (int i = 0; i < K; i++) {
                s->has[(size_t)row[i] * G + g]++;
                s->pairs[(size_t)row[i] * G + g] += s->count[g] - (s->group[row[i]] == g);
            }
            s->count[g] = 0;
        }
    }
}

// Moves expert a to group B, in the tables too.
PLACE_FN void place_move(PlaceSplit *s, int a, int B) {
    const PlaceLayer *y = s->y;
    const int G = s->groups, K = y->K, A = s->group[a];
    s->sum[A] -= y->load[a];
    s->sum[B] += y->load[a];
    s->alone[a] = 0;
    for (int at = y->begin[a]; at < y->begin[a + 1]; at++) {
        const int *row = y->topk + (size_t)y->row[at] * K;
        int in_A = 0, in_B = 0, last_A = a, last_B = a; // of the others in this row
        for (int k = 0; k < K; k++) {
            if (row[k] == a) continue;
            if (s->group[row[k]] == A) in_A++, last_A = row[k];
            if (s->group[row[k]] == B) in_B++, last_B = row[k];
            s->pairs[(size_t)row[k] * G + A]--;
            s->pairs[(size_t)row[k] * G + B]++;
        }
        for (int k = 0; k < K; k++) {
            s->has[(size_t)row[k] * G + A] -= in_A == 0;
            s->has[(size_t)row[k] * G + B] += in_B == 0;
        }
        if (in_A == 1) s->alone[last_A]++;
        if (in_B == 1) s->alone[last_B]--;
        s->alone[a] += in_B == 0;
    }
    s->group[a] = B;
}

/* Whether a swap of a and b, of different groups, is better: first by the largest load (and how many
   groups have it) as far as it is above `enough`; then by the pairs (row, group) that hold an expert,
   which is what is sent; then by the pairs of experts of a row in one group, without which the
   step before would not be found. The rows of a are marked. */
PLACE_FN int place_swap_helps(const PlaceSplit *s, int a, int b, double most, double enough) {
    const PlaceLayer *y = s->y;
    const int G = s->groups, K = y->K, A = s->group[a], B = s->group[b];
    const double d = y->load[b] - y->load[a], in_A = s->sum[A] + d, in_B = s->sum[B] - d;
    const double top = in_A > in_B ? in_A : in_B;
    if (most > enough) {
        const int at_most = s->sum[A] == most || s->sum[B] == most;
        if (at_most && top < most) return 1;
        if (top > most || (top == most && !at_most)) return 0;
    } else if (top > enough) {
        return 0;
    }
    if (!y->rows) return 0;
    // as if no row had both; such rows do not change, so this is the least that is sent more
    const int rows_a = y->begin[a + 1] - y->begin[a], rows_b = y->begin[b + 1] - y->begin[b];
    int sent = rows_a - s->has[(size_t)a * G + B] - s->alone[a] + rows_b -
        s->has[(size_t)b * G + A] - s->alone[b];
    int pairs = s->pairs[(size_t)a * G + B] - s->pairs[(size_t)a * G + A] +
        s->pairs[(size_t)b * G + A] - s->pairs[(size_t)b * G + B];
    if (sent > 0 || (sent == 0 && pairs <= 0)) return 0;
    for (int at = y->begin[b]; at < y->begin[b + 1]; at++) {
        if (!s->mark[y->row[at]]) continue;
        const int *row = y->topk + (size_t)y->row[at] * K;
        int n_A = 0, n_B = 0;
        for (int k = 0; k < K; k++) n_A += s->group[row[k]] == A, n_B += s->group[row[k]] == B;
        sent += (n_A == 1) + (n_B == 1);
        pairs -= 2;
    }
    return sent < 0 || (sent == 0 && pairs > 0);
}

PLACE_FN double place_most(const PlaceSplit *s) {
    double most = 0;
    for (int g = 0; g < s->groups; g++)
        if (s->sum[g] > most) most = s->sum[g];
    return most;
}

// Swaps experts of different groups while that helps.
PLACE_FN void place_improve(PlaceSplit *s, double enough) {
    const PlaceLayer *y = s->y;
    double most = place_most(s);
    int changed = 1;
    place_count(s);
    for (int sweep = 0; changed && sweep < PLACE_SWEEPS; sweep++) {
        changed = 0;
        for (int a = 0; a < y->E; a++) {
            if (s->group[a] < 0) continue;
            for (int at = y->begin[a]; at < y->begin[a + 1]; at++) s->mark[y->row[at]] = 1;
            for (int b = a + 1; b < y->E; b++) {
                const int A = s->group[a], B = s->group[b];
                if (B < 0 || A == B || !place_swap_helps(s, a, b, most, enough)) continue;
                place_move(s, a, B);
                place_move(s, b, A);
                most = place_most(s);
                changed = 1;
            }
            for (int at = y->begin[a]; at < y->begin[a + 1]; at++) s->mark[y->row[at]] = 0;
        }
    }
}

// -------------------------------------------------------------------------------------------------
// a placement

// The largest load of a rank.
PLACE_FN double placement_most(int E, int ranks, const double *load, const int *position) {
    const int each = E / ranks;
    double most = 0;
    for (int r = 0; r < ranks; r++) {
        double sum = 0;
        for (int e = 0; e < E; e++)
            if (position[e] / each == r) sum += load[e];
        if (sum > most) most = sum;
    }
    return most;
}

// The experts e with in[e] == n (NULL: all) into groups; group (E) of those is set.
PLACE_FN int place_split(const PlaceLayer *y, const int *in, int n, int groups, const int *order,
    double enough, int *group, Err *err) {
    PlaceSplit s;
    int many = 0;
    if (place_split_open(&s, y, groups, err)) return -1;
    for (int i = 0; i < y->E; i++)
        if (!in || in[order[i]] == n) s.order[many++] = order[i];
    place_greedy(&s, many);
    place_improve(&s, enough);
    for (int i = 0; i < many; i++) group[s.order[i]] = s.group[s.order[i]];
    place_split_close(&s);
    return 0;
}

// From index order by swaps alone.
PLACE_FN int place_from_even(const PlaceLayer *y, int ranks, double enough, int *rank, Err *err) {
    PlaceSplit s;
    if (place_split_open(&s, y, ranks, err)) return -1;
    for (int e = 0; e < y->E; e++) {
        s.group[e] = e / (y->E / ranks);
        s.sum[s.group[e]] += y->load[e];
    }
    place_improve(&s, enough);
    memcpy(rank, s.group, (size_t)y->E * sizeof *rank);
    place_split_close(&s);
    return 0;
}

// position (E) of one layer; work: 4 E ints.
PLACE_FN int place_layer(
    const PlaceLayer *y, int ranks, int nodes, int *position, int *work, Err *err) {
    const int E = y->E, each = E / ranks, ranks_a_node = ranks / nodes;
    int *order = work, *node = work + E, *rank = work + 2 * (size_t)E, *next = rank + E;
    double total = 0;
    place_by_load(order, y->load, E);
    for (int e = 0; e < E; e++) {
        total += y->load[e];
        position[e] = e;
    }
    const double even = placement_most(E, ranks, y->load, position);
    double enough = (1 + PLACE_ABOUT) * total / ranks;
    if (even < enough) enough = even; // never worse than index order
    for (int e = 0; e < E; e++) node[e] = 0;
    if (nodes > 1 && place_split(y, NULL, 0, nodes, order, enough * ranks_a_node, node, err))
        return -1;
    for (int n = 0; n < nodes; n++)
        if (place_split(y, node, n, ranks_a_node, order, enough, rank, err)) return -1;
    for (int r = 0; r < ranks; r++) next[r] = r * each;
    for (int e = 0; e < E; e++) position[e] = next[rank[e] = node[e] * ranks_a_node + rank[e]]++;
    if (placement_most(E, ranks, y->load, position) <= even) return 0;
    if (place_from_even(y, ranks, enough, rank, err)) return -1;
    for (int r = 0; r < ranks; r++) next[r] = r * each;
    for (int e = 0; e < E; e++) position[e] = next[rank[e]]++;
    return 0;
}

/* A placement for a run's loads (n_layers, E) and recorded routing (NULL: none): in each MoE layer
   greedy list scheduling, longest processing time first [Graham 1969, Bounds on multiprocessing
   timing anomalies], with equal numbers of experts and co-selection between loads that are about
   equal; then swaps. With nodes, first over those, then in each over its ranks, so that experts
   chosen together share a node. No layer's largest rank load is above that of index order. ranks
   divides E and nodes divides ranks. */
PLACE_FN int placement_make(const Config *c, int ranks, int nodes, const double *load,
    const PlaceRouting *r, int *position, Err *err) {
    const int E = c->n_experts;
    int rc = 0;
    if (E > PLACE_EXPERTS)
        return fail(
            err, "expected at most %d experts a layer to place, found %d", PLACE_EXPERTS, E);
    int *work = (int *)malloc(4 * (size_t)E * sizeof *work);
    if (!work) return fail(err, "out of memory to place %d experts", E);
    placement_even(c, position);
    for (int l = c->dense_layers; l < c->n_layers && !rc; l++) {
        PlaceLayer y;
        rc = place_layer_open(&y, c, l - c->dense_layers, load + (size_t)l * E, r, err);
        if (rc) break;
        rc = place_layer(&y, ranks, nodes, position + (size_t)l * E, work, err);
        place_layer_close(&y);
    }
    free(work);
    return rc;
}

// -------------------------------------------------------------------------------------------------
// what is predicted

/* In how many groups of `each` positions a token has experts, on average, in MoE layer number l:
   each = E / ranks: ranks; E / nodes: nodes. position (E). */
PLACE_FN double placement_spread(
    const Config *c, const PlaceRouting *r, int l, const int *position, int each) {
    const int K = c->top_k, words = (c->n_experts / each + 63) / 64;
    double sum = 0;
    for (int i = 0; i < r->rows; i++) {
        const int *row = r->topk + ((size_t)i * moe_layers(c) + l) * K;
        uint64_t seen[PLACE_EXPERTS / 64];
        memset(seen, 0, (size_t)words * sizeof *seen);
        for (int k = 0; k < K; k++) {
            const int g = position[row[k]] / each;
            sum += !(seen[g / 64] >> g % 64 & 1);
            seen[g / 64] |= (uint64_t)1 << g % 64;
        }
    }
    return sum / r->rows;
}

/* For each MoE layer and over all: the imbalance, largest rank load / mean (over all: of the sums
   over layers, which is what a step waits for), and the ranks of a token. Then what one dispatch
   sends for a token in a MoE layer when tokens are spread evenly over the ranks, so that one in
   `ranks` is where its expert is: alltoall a row for each of its K experts elsewhere, dedup a row for
   each other rank that has one of them, node dedup for each other node. r NULL: no routing was
   recorded. */
PLACE_FN void placement_print(FILE *out, const Config *c, int ranks, int nodes, const double *load,
    const PlaceRouting *r, const int *before, const int *after) {
    const int E = c->n_experts, L = moe_layers(c);
    const int *const place[2] = {before, after};
    double most[2] = {0, 0}, on_ranks[2] = {0, 0}, on_nodes[2] = {0, 0}, mean = 0;
    fprintf(out, "           imbalance, before   after%s\n",
        r ? "   ranks of a token, before   after" : "");
    for (int l = c->dense_layers; l < c->n_layers; l++) {
        const double *at = load + (size_t)l * E;
        double x[2], spread[2] = {0, 0}, total = 0;
        for (int e = 0; e < E; e++) total += at[e];
        for (int i = 0; i < 2; i++) {
            const int *p = place[i] + (size_t)l * E;
            x[i] = placement_most(E, ranks, at, p);
            most[i] += x[i];
            if (!r) continue;
            spread[i] = placement_spread(c, r, l - c->dense_layers, p, E / ranks);
            on_ranks[i] += spread[i] / L;
            on_nodes[i] += placement_spread(c, r, l - c->dense_layers, p, E / nodes) / L;
        }
        mean += total / ranks;
        fprintf(out, "layer %-4d %18.4f %7.4f", l, total > 0 ? x[0] * ranks / total : 1,
            total > 0 ? x[1] * ranks / total : 1);
        if (r) fprintf(out, " %26.4f %7.4f", spread[0], spread[1]);
        fputc('\n', out);
    }
    fprintf(out, "all layers %18.4f %7.4f", mean > 0 ? most[0] / mean : 1,
        mean > 0 ? most[1] / mean : 1);
    if (r) fprintf(out, " %26.4f %7.4f", on_ranks[0], on_ranks[1]);
    fputc('\n', out);
    if (!r) return;
    const double elsewhere = (ranks - 1.0) / ranks, other_node = (nodes - 1.0) / nodes;
    const struct {
        const char *name;
        double rows[2];
    } line[] = {
        {"alltoall   to other ranks", {c->top_k * elsewhere, c->top_k * elsewhere}},
        {"dedup      to other ranks", {on_ranks[0] * elsewhere, on_ranks[1] * elsewhere}},
        {"alltoall   to other nodes", {c->top_k * other_node, c->top_k * other_node}},
        {"dedup      to other nodes", {on_ranks[0] * other_node, on_ranks[1] * other_node}},
        {"node dedup to other nodes", {on_nodes[0] * other_node, on_nodes[1] * other_node}},
    };
    fprintf(out,
        "\na token in a MoE layer, one dispatch, tokens spread evenly; bytes of fp32, width %d\n"
        "                              rows, before   after   bytes, before     after\n",
        c->d_model);
    for (int i = 0; i < (nodes > 1 ? 5 : 2); i++)
        fprintf(out, "%s %16.4f %7.4f %15.1f %9.1f\n", line[i].name, line[i].rows[0],
            line[i].rows[1], 4.0 * c->d_model * line[i].rows[0],
            4.0 * c->d_model * line[i].rows[1]);
}

#endif
