/* watch.h: watching the experts. It knows moe.h, model.h, dataloader.h, checkpoint.h
   (what a file looks like) and jansson.

   While a run trains:
     watch_log    what a step's experts did, as fields of its line in metrics.jsonl
     watch_step   says on stderr when an expert stays without a token, or takes most of them
     watch_routing  which experts some rows went to, as a line of routing.jsonl
   Afterwards, for `train_moe info OUT --tsv`: three tables in one text, each with its name and its
   columns in a line of its own, two empty lines between them (gnuplot: index "loss", ...):
     loss         the losses and the load's balance by step
     load         every expert's load by step and layer, in even shares (1 = as many tokens as the
                  mean)
     text         every expert's load by the input file that a token came from, likewise

   Loads are top-K choices, before capacity or token rounding act. Start reading at watch_log. */
#ifndef WATCH_H
#define WATCH_H

#include "checkpoint.h" // before gemm.h, whose `real` is a name in jansson.h
#include "dataloader.h"
#include "model.h"

#include <jansson.h>

#define WATCH_FN __attribute__((unused)) static

enum {
    WATCH_STEPS = 50,   // so long a state lasts before it is said; then at every doubling
    LOAD_NUMBERS = 512, // a line of the log has the loads of so many experts on average
    TABLE_STEPS = 200,  // rows of the load table for a layer, at most
    MAX_TEXTS = 64,     // columns of the text table
    ROUTING_ROWS = 256  // rows of a line of routing.jsonl, at most
};

// A step's totals on the host, and what they say together.
typedef struct StepLoad {
    int *count;             // (L, E): top-K choices; of MoE layers
    double *balance;        // (L): largest load / mean; 1 in dense layers
    int *dead;              // (L): experts without a token
    double aux, z;          // means over MoE layers and micro-batches
    double worst;           // balance of the worst layer
    int all_dead;           // over all layers
    int64_t dropped, added; // slots that capacity or token rounding moved
} StepLoad;

typedef struct Watch {
    const Config *c;
    StepLoad now;
    int *idle, *heavy; // (L, E): steps in a row without a token; with most of them
} Watch;

WATCH_FN void watch_open(Watch *w, const Config *c) {
    const size_t n = (size_t)c->n_layers * c->n_experts;
    memset(w, 0, sizeof *w);
    w->c = c;
    w->now.count = calloc(n, sizeof(int));
    w->now.balance = calloc(c->n_layers, sizeof(double));
    w->now.dead = calloc(c->n_layers, sizeof(int));
    w->idle = calloc(n, sizeof(int));
    w->heavy = calloc(n, sizeof(int));
    if (!w->now.count || !w->now.balance || !w->now.dead || !w->idle || !w->heavy)
        die(RUN_ERROR, "no memory for the loads of %zu experts", n);
}

WATCH_FN void watch_close(Watch *w) {
    free(w->now.count);
    free(w->now.balance);
    free(w->now.dead);
    free(w->idle);
    free(w->heavy);
    memset(w, 0, sizeof *w);
}

// Fetches the totals of the step that m has just done.
WATCH_FN void watch_fetch(Watch *w, const Model *m, int micro_batches) {
    const Config *c = w->c;
    StepLoad *s = &w->now;
    const int E = c->n_experts;
    s->aux = s->z = 0;
    s->worst = 1;
    s->all_dead = 0;
    s->dropped = s->added = 0;
    for (int l = 0; l < c->n_layers; l++) s->balance[l] = 1, s->dead[l] = 0;
    if (!m->step_stats) return;
    char *host = malloc(m->step_stats_bytes);
    if (!host) die(RUN_ERROR, "no memory");
    m->b->to_host(host, m->step_stats, m->step_stats_bytes);
    const double share = 1.0 / ((double)moe_layers(c) * micro_batches);
    for (int l = 0; l < c->n_layers; l++) {
        if (!is_moe_layer(c, l)) continue;
        const Layer *y = &m->layer[l];
        const float *loss = (const float *)(host + ((char *)y->loss_sum - m->step_stats));
        const int *count = (const int *)(host + ((char *)y->count_sum - m->step_stats));
        const int *moved = (const int *)(host + ((char *)y->moved - m->step_stats));
        double most = 0, sum = 0;
        for (int e = 0; e < E; e++) {
            if (count[e] > most) most = count[e];
            sum += count[e];
            s->dead[l] += !count[e];
        }
        memcpy(s->count + (size_t)l * E, count, E * sizeof(int));
        s->balance[l] = sum > 0 ? most * E / sum : 1;
        if (s->balance[l] > s->worst) s->worst = s->balance[l];
        s->all_dead += s->dead[l];
        s->aux += loss[0] * share;
        s->z += loss[1] * share;
        s->dropped += moved[0];
        s->added += moved[1];
    }
    free(host);
}

// Whether the line of a step has every expert's load: always in small models, else every few steps.
WATCH_FN int watch_has_load(const Config *c, int64_t step) {
    const int64_t every = 1 + (int64_t)moe_layers(c) * c->n_experts / LOAD_NUMBERS;
    return step % every == 0;
}

/* Adds to a step's line: layer_balance and layer_dead, one number a MoE layer; load, the choices of
   every expert, one list a MoE layer; with capacity or token rounding also slots_dropped, slots_added
   and experts_per_token. slots: K * tokens * MoE layers. Returns 0, or -1 without memory. */
WATCH_FN int watch_log(const Watch *w, json_t *line, int64_t step, int64_t tokens, int selecting) {
    const Config *c = w->c;
    const StepLoad *s = &w->now;
    if (!moe_layers(c)) return 0;
    json_t *balance = json_array(), *dead = json_array(), *load = json_array();
    int rc = 0;
    for (int l = c->dense_layers; l < c->n_layers; l++) {
        json_t *experts = json_array();
        for (int e = 0; e < c->n_experts; e++)
            rc |= json_array_append_new(
                experts, json_integer(s->count[(size_t)l * c->n_experts + e]));
        rc |= json_array_append_new(balance, json_real(s->balance[l]));
        rc |= json_array_append_new(dead, json_integer(s->dead[l]));
        rc |= json_array_append_new(load, experts);
    }
    rc |= json_object_set_new(line, "layer_balance", balance);
    rc |= json_object_set_new(line, "layer_dead", dead);
    if (watch_has_load(c, step))
        rc |= json_object_set_new(line, "load", load);
    else
        json_decref(load);
    if (selecting) {
        const double slots = (double)tokens * moe_layers(c);
        rc |= json_object_set_new(line, "slots_dropped", json_integer(s->dropped));
        rc |= json_object_set_new(line, "slots_added", json_integer(s->added));
        rc |= json_object_set_new(line, "experts_per_token",
            json_real(c->top_k + (double)(s->added - s->dropped) / slots));
    }
    return rc ? -1 : 0;
}

/* One warning about all experts of whose state it is time to speak. Called every WATCH_STEPS steps:
   an expert is named when it has been in that state for WATCH_STEPS steps, then for twice as many, and
   so on. */
WATCH_FN void watch_say(
    const Watch *w, const int *since, int64_t step, const char *what, const char *advice) {
    const Config *c = w->c;
    char list[400] = "";
    size_t at = 0;
    int least = 0;
    for (int l = 0; l < c->n_layers; l++) {
        int first = 1;
        for (int e = 0; e < c->n_experts; e++) {
            const int n = since[(size_t)l * c->n_experts + e];
            const int turns = n / WATCH_STEPS;
            if (!turns || (turns & (turns - 1))) continue; // a power of two
            if (!least || turns < least) least = turns;
            if (at < sizeof list - 64)
                at += (size_t)(first ? snprintf(list + at, sizeof list - at, "%slayer %d: %d",
                                           at ? "; " : "", l, e)
                                     : snprintf(list + at, sizeof list - at, ", %d", e));
            else if (list[at - 1] != '.')
                at += (size_t)snprintf(list + at, sizeof list - at, " ...");
            first = 0;
        }
    }
    if (least)
        warn("step %lld: for at least %d steps %s: %s; %s", (long long)step, least * WATCH_STEPS,
            what, list, advice);
}

/* After watch_fetch: counts how long experts are dead (no token in a step) or heavy (chosen by more
   than three quarters of the tokens, and nearer to all of them than to the mean), and warns. A resumed run
   counts anew. tokens: of the step. */
WATCH_FN void watch_step(Watch *w, int64_t step, int64_t tokens) {
    const Config *c = w->c;
    const double mean = (double)tokens * c->top_k / c->n_experts;
    if (!moe_layers(c)) return;
    for (int l = c->dense_layers; l < c->n_layers; l++)
        for (int e = 0; e < c->n_experts; e++) {
            const size_t i = (size_t)l * c->n_experts + e;
            const double n = w->now.count[i];
            w->idle[i] = n == 0 ? w->idle[i] + 1 : 0;
            w->heavy[i] =
                n > 0.75 * (double)tokens && 2 * n > (double)tokens + mean ? w->heavy[i] + 1 : 0;
        }
    const char *advice = c->router == ROUTER_SIGMOID
        ? "a higher --bias-rate or --aux-loss spreads the tokens"
        : "a higher --aux-loss, or --router sigmoid with its selection bias, spreads the tokens";
    if (step % WATCH_STEPS) return;
    watch_say(w, w->idle, step, "no token came to these experts", advice);
    watch_say(w, w->heavy, step, "most tokens went to these experts", advice);
}

/* A line of routing.jsonl, for the caller to free: the top-K choices of up to ROUTING_ROWS of the N
   rows of the micro-batch that m has just done, evenly spaced. NULL without memory. */
WATCH_FN char *watch_routing(const Model *m, int64_t step, int N) {
    const int K = m->c.top_k, rows = N < ROUTING_ROWS ? N : ROUTING_ROWS;
    char *line = NULL;
    size_t n = 0;
    int *topk = malloc((size_t)N * K * sizeof *topk);
    FILE *f = open_memstream(&line, &n);
    if (f) fprintf(f, "{\"step\":%lld,\"layers\":[", (long long)step);
    for (int l = m->c.dense_layers; l < m->c.n_layers && f && topk; l++) {
        m->b->to_host(topk, m->layer[l].topk, (size_t)N * K * sizeof *topk);
        fprintf(f, "%s{\"layer\":%d,\"topk\":[", l > m->c.dense_layers ? "," : "", l);
        for (int i = 0; i < rows; i++) {
            const int *row = topk + (size_t)((int64_t)i * N / rows) * K;
            for (int k = 0; k < K; k++) fprintf(f, "%s%d", k ? "," : i ? ",[" : "[", row[k]);
            fputc(']', f);
        }
        fprintf(f, "]}");
    }
    if (f) fprintf(f, "]}\n");
    const int whole = f && topk && !ferror(f);
    free(topk);
    if (f && !fclose(f) && whole) return line;
    free(line);
    return NULL;
}

// -------------------------------------------------------------------------------------------------
// tables

// A number of a line of the log, or "-".
WATCH_FN void print_cell(FILE *out, const json_t *line, const char *key) {
    const json_t *v = json_object_get(line, key);
    if (json_is_integer(v))
        fprintf(out, "\t%lld", (long long)json_integer_value(v));
    else if (json_is_real(v))
        fprintf(out, "\t%.6g", json_real_value(v));
    else
        fputs("\t-", out);
}

/* The tables "loss" and "load" of the log at `path`. The load of a layer is a mean over as many
   steps as make TABLE_STEPS rows at most. first_layer: the first that routes. Returns 0, or fail(). */
WATCH_FN int print_log_tables(FILE *out, const char *path, int first_layer, Err *err) {
    static const char *const column[] = {"tokens", "loss", "val_loss", "lr", "grad_norm",
        "aux_loss", "z_loss", "balance", "dead_experts"};
    enum { COLUMNS = sizeof column / sizeof *column };
    char *text = NULL;
    size_t room = 0, lines = 0, seen = 0;
    json_t *sum = NULL; // (layers)(experts) of the rows since the last printed one
    int64_t steps = 0;
    FILE *in = fopen(path, "r");
    if (!in) return fail(err, "%s: expected the log of a run: %s", path, strerror(errno));
    while (getline(&text, &room, in) > 0) {
        json_t *line = json_loads(text, 0, NULL);
        if (json_is_integer(json_object_get(line, "step"))) {
            if (!steps) {
                fprintf(out, "# loss\nstep");
                for (int i = 0; i < COLUMNS; i++) fprintf(out, "\t%s", column[i]);
                fputc('\n', out);
            }
            fprintf(out, "%lld", (long long)json_integer_value(json_object_get(line, "step")));
            for (int i = 0; i < COLUMNS; i++) print_cell(out, line, column[i]);
            fputc('\n', out);
            lines += json_is_array(json_object_get(line, "load"));
            steps++;
        }
        json_decref(line);
    }
    if (!steps) {
        free(text);
        fclose(in);
        return fail(err, "%s: expected the log of a run, one JSON object a step, found %s", path,
            looks_like(path));
    }
    const size_t each = (lines + TABLE_STEPS - 1) / TABLE_STEPS;
    rewind(in);
    for (int header = 0; getline(&text, &room, in) > 0;) {
        json_t *line = json_loads(text, 0, NULL), *load = json_object_get(line, "load"), *layer;
        size_t l, e;
        if (json_is_array(load) && json_array_size(load)) {
            if (!header++) {
                fprintf(out, "\n\n# load\nstep\tlayer");
                for (e = 0; e < json_array_size(json_array_get(load, 0)); e++)
                    fprintf(out, "\texpert_%zu", e);
                fputc('\n', out);
            }
            if (!sum)
                sum = json_deep_copy(load), steps = 0;
            else
                json_array_foreach(load, l, layer) for (e = 0; e < json_array_size(layer); e++) {
                    json_t *at = json_array_get(json_array_get(sum, l), e);
                    json_integer_set(
                        at, json_integer_value(at) + json_integer_value(json_array_get(layer, e)));
                }
            steps++;
            seen++;
            if (steps == (int64_t)each || seen == lines) {
                const int64_t step = json_integer_value(json_object_get(line, "step"));
                json_array_foreach(sum, l, layer) {
                    double total = 0;
                    const size_t E = json_array_size(layer);
                    for (e = 0; e < E; e++) total += json_number_value(json_array_get(layer, e));
                    fprintf(out, "%lld\t%zu", (long long)step, l + (size_t)first_layer);
                    for (e = 0; e < E; e++)
                        fprintf(out, "\t%.4f",
                            json_number_value(json_array_get(layer, e)) * (double)E /
                                (total > 0 ? total : 1));
                    fputc('\n', out);
                }
                json_decref(sum);
                sum = NULL;
            }
        }
        json_decref(line);
    }
    json_decref(sum);
    free(text);
    fclose(in);
    return 0;
}

/* The table "text": which experts the held-out part of each input file goes to. m is built with
   shape.count; batches: of m's B rows, at most so many for a file. Only whole rows count. */
WATCH_FN void print_text_table(
    FILE *out, Model *m, const Data *d, int64_t batches, int *x, int *y) {
    const Config *c = &m->c;
    const int B = m->shape.B, T = m->shape.T, E = c->n_experts;
    const size_t cells = (size_t)c->n_layers * E;
    int texts = 0;
    if (!moe_layers(c)) return;
    double *load = calloc(MAX_TEXTS * cells, sizeof *load);
    if (!load) die(RUN_ERROR, "no memory for a table of %zu numbers", MAX_TEXTS * cells);
    fprintf(out, "\n\n# text\nlayer\texpert");
    for (int i = 0; i < d->n_val; i++) {
        const DataPart *p = &d->val[i];
        const char *path = d->file[p->source].path, *slash = strrchr(path, '/');
        uint64_t whole = 0;
        if (texts == MAX_TEXTS) {
            warn("the table shows the first %d of %d texts", MAX_TEXTS, d->n_val);
            break;
        }
        StepState s;
        memset(&s, 0, sizeof s);
        m->b->to_device(m->state, &s, sizeof s);
        m->b->zero(m->step_stats, m->step_stats_bytes);
        for (uint64_t row = 0; row < p->rows && (!batches || row < (uint64_t)batches * B);) {
            int n = 0;
            for (; n < B && row < p->rows; row++)
                n += data_val_row(d, p->first + row, x + (size_t)n * T, y + (size_t)n * T) == T;
            if (!n) continue;
            model_set_tokens(m, x, y, n * T);
            model_forward(m, n, T, 0, 1);
            whole += (uint64_t)n;
        }
        if (!whole) {
            warn("%s: its held-out part is shorter than a row", path);
            continue;
        }
        char *host = malloc(m->step_stats_bytes);
        if (!host) die(RUN_ERROR, "no memory");
        m->b->to_host(host, m->step_stats, m->step_stats_bytes);
        for (int l = c->dense_layers; l < c->n_layers; l++) {
            const int *count =
                (const int *)(host + ((char *)m->layer[l].count_sum - m->step_stats));
            for (int e = 0; e < E; e++)
                load[texts * cells + (size_t)l * E + e] =
                    (double)count[e] * E / ((double)whole * T * c->top_k);
        }
        free(host);
        texts++;
        fputc('\t', out);
        for (const char *s8 = slash ? slash + 1 : path; *s8; s8++) // a tab would make two columns
            fputc((unsigned char)*s8 < 32 ? '?' : *s8, out);
    }
    fputc('\n', out);
    for (int l = c->dense_layers; l < c->n_layers; l++)
        for (int e = 0; e < E; e++) {
            fprintf(out, "%d\t%d", l, e);
            for (int t = 0; t < texts; t++)
                fprintf(out, "\t%.4f", load[t * cells + (size_t)l * E + e]);
            fputc('\n', out);
        }
    free(load);
}

#endif
