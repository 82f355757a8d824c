/* expert_parallel.h: experts on several ranks. It knows moe.h and parallel.h. Read ep_forward first.

   The E experts of a layer are dealt out over the P ranks of a group, E/P each. Which expert is
   where says the placement: the experts' positions 0 .. E-1, of which rank p has p*E/P and those
   after it.

   Between the plan and the expert products, rows go to where their experts are; after them, what
   the experts made of a row comes back. The way of rows:
     alltoall   a copy for each (row, expert)
     dedup      a copy for each (row, rank) with one of its experts: what a rank makes of a row is
                summed there, and comes back as one row
     allgather  every row to every rank: nobody needs to know counts
   On the side that computes, what came is a Plan like any other: source rows that came, slots of
   the experts here. Backward, the gradients of the output take the ways of the rows, and the
   gradients of the rows those of the output. Rows that came are kept for the backward pass, each
   once whatever the way.

   It is done by chunks of rows, the same number on all ranks, so that the exchange of one goes on
   while another is computed, and so that what is on the way has a fixed size. Rows may travel as
   bf16. A rank that gets no row takes part like any other. Sums are in the order of ranks: two runs
   give the same bits, other numbers of ranks round otherwise. */
#ifndef EXPERT_PARALLEL_H
#define EXPERT_PARALLEL_H

#include "gemm.h" // the exact exp and log
#include "parallel.h"

#define EP_FN __attribute__((unused)) static

// -------------------------------------------------------------------------------------------------
// how much is sent

static double choose_log(double n, double k) { // ln of the binomial (n over k)
    double s = 0;
    for (double i = 1; i <= k; i++) s += log_d((n - k + i) / i);
    return s;
}

/* Bytes that a rank sends to others for one dispatch of N rows of `bytes` each, in expectation over
   uniform routing to K of E experts on P ranks [SonicMoE]. */
EP_FN double way_bytes(Way way, double N, double bytes, int E, int K, int P) {
    const double on_one = (double)E / P, others = P - 1;
    if (way == WAY_ALLGATHER) return others * N * bytes;
    if (way == WAY_ALLTOALL) return others / P * N * K * bytes;
    const double missed = E - on_one < K ? 0 : exp_d(choose_log(E - on_one, K) - choose_log(E, K));
    return others * N * (1 - missed) * bytes;
}

/* Bytes that go with it: of each slot an item and a weight, of each expert a count; in an allgather
   the whole plan of every rank. */
EP_FN double way_overhead(Way way, double N, int E, int K, int P) {
    const double others = P - 1;
    if (way == WAY_ALLGATHER) return others * (N * K * 8 + (E + 1) * 4.0);
    return others / P * N * K * 8 + others * (E / (double)P + 1) * 4;
}

// The way that sends least.
EP_FN Way way_choose(double bytes, int E, int K, int P) {
    Way best = WAY_DEDUP;
    for (Way w = WAY_ALLTOALL; w <= WAY_ALLGATHER; w++)
        if (way_bytes(w, 1e4, bytes, E, K, P) + way_overhead(w, 1e4, E, K, P) <
            way_bytes(best, 1e4, bytes, E, K, P) + way_overhead(best, 1e4, E, K, P))
            best = w;
    return best;
}

// -------------------------------------------------------------------------------------------------
// the exchange

enum { EP_SETS = 2 }; // of buffers: while one chunk is computed another is on the way

// Rows that go to each rank of the group and come from it, and slots. On the host.
typedef struct EpCounts {
    size_t *to, *from, *slots_to, *slots_from; // (P)
    int *base;                                 // (P) rows of X that came from the ranks before
} EpCounts;

typedef struct EpChunk {                         // a chunk of the rows of a layer
    int first;                                   // its first row
    Plan plan;                                   // the chunk's slots, experts by position
    int *of;                                     // (S) which slot of the layer's plan
    int *item, *item_row, *item_begin, *item_at; // plan_items; not for allgather
    Plan here;                                   // what came: the slots of the experts here
    int *offsets, *start, *base;                 // what it was merged from
    int *which_X;                                // alltoall: the row of X of what arrived
    act_t *X, *H;                                // rows that came; the experts' pre-activation
    EpCounts n;
} EpChunk;

typedef struct EpSet {                      // buffers of a chunk that is on the way
    void *send, *arrived, *back, *returned; // rows, as they travel
    act_t *out;                             // what the experts made
    int *item;                              // of the slots that came
    stat_t *weight, *dS_back, *dS;          // likewise; gradients of weights, to be returned, own
    CommRequest *rows, *meta[3], *rows_back, *dS_way;
} EpSet;

typedef struct Exchange {
    const Parallel *par;
    const Backend *b;
    int C, E, here;           // width, experts of a layer, of those here
    int chunks, most;         // of this call; slots of a chunk, on any rank
    int go, come, come_slots; // most rows and slots of a chunk that a rank sends, that it gets
    int *rows;                // (P): rows of each rank of the group in this call
    int *order;               // (L, E) par->order, on the device
    EpChunk *chunk;           // (layers that have their own, most chunks of a call)
    int chunk_room, layers;
    EpSet set[EP_SETS];
    act_t *landed, *expanded; // rows as the experts read them
    stat_t *dS_here;          // gradients of the weights of the slots here
    int *count;               // (P) on the device: plan_items
    int *host;                // room for counts, on the host
    size_t *counts;           // those of all chunks
    int *bases;
    uint64_t rows_sent; // to other ranks, since it was set to 0
} Exchange;

// rows: most rows of a rank in a call. What is on the device is laid out by model.h.
EP_FN Exchange *exchange_open(
    const Parallel *par, const Backend *b, const Config *c, int train, int rows) {
    const size_t P = (size_t)par->ep.size, E = (size_t)c->n_experts;
    Exchange *x = (Exchange *)calloc(1, sizeof *x);
    if (!x) die(RUN_ERROR, "no memory");
    x->par = par;
    x->b = b;
    x->layers = train ? c->n_layers : 1;
    x->chunk_room = (rows + par->chunk - 1) / par->chunk;
    const size_t n = (size_t)x->layers * (size_t)x->chunk_room;
    x->chunk = (EpChunk *)calloc(n, sizeof *x->chunk);
    x->counts = (size_t *)calloc(n * 4 * P, sizeof *x->counts);
    x->bases = (int *)calloc(n * P, sizeof *x->bases);
    x->rows = (int *)malloc(P * sizeof(int));
    x->host = (int *)malloc((5 * P + 3 * E + 1) * sizeof(int));
    if (!x->chunk || !x->counts || !x->bases || !x->rows || !x->host)
        die(RUN_ERROR, "no memory for %zu chunks of rows", n);
    for (size_t i = 0; i < n; i++) {
        size_t *at = x->counts + 4 * P * i;
        const EpCounts k = {at, at + P, at + 2 * P, at + 3 * P, x->bases + P * i};
        x->chunk[i].n = k;
    }
    return x;
}
EP_FN void exchange_close(Exchange *x) {
    free(x->counts);
    free(x->bases);
    free(x->chunk);
    free(x->rows);
    free(x->host);
    free(x);
}

static inline DType ep_wire(const Exchange *x) { return x->par->bf16 ? BF16 : x->b->act_type; }
static inline char *ep_row(const Exchange *x, const void *rows, DType type, size_t i) {
    return (char *)(uintptr_t)rows + i * (size_t)x->C * dtype_size(type);
}
static size_t ep_sum(const size_t *n, int P) {
    size_t s = 0;
    for (int r = 0; r < P; r++) s += n[r];
    return s;
}

// To be called before the layers of a forward pass: how many rows each rank of the world has.
EP_FN void ep_begin(Exchange *x, int B_all, int T) {
    const Parallel *par = x->par;
    const int most = share_of_batch(&par->world, B_all, 0, NULL) * T;
    for (int p = 0; p < par->ep.size; p++)
        x->rows[p] = share_of_batch(&par->world, B_all, par->ep.member[p], NULL) * T;
    x->chunks = (most + par->chunk - 1) / par->chunk;
    if (x->chunks > x->chunk_room)
        die(RUN_ERROR, "internal: %d chunks of rows, room for %d", x->chunks, x->chunk_room);
}

static EpChunk *ep_chunk(const Exchange *x, int l, int i) {
    return &x->chunk[(size_t)(x->layers > 1 ? l : 0) * x->chunk_room + i];
}
static int ep_rows(const Exchange *x, int p, int i, int *first) { // of rank p in chunk i
    const size_t begin = comm_share((size_t)x->rows[p], x->chunks, i);
    if (first) *first = (int)begin;
    return (int)(comm_share((size_t)x->rows[p], x->chunks, i + 1) - begin);
}

/* Starts the way of a chunk's rows (N,C): X, or the gradient of the output. They arrive in `into`,
   or in the set's own buffer. */
static void ep_start_rows(Exchange *x, const EpChunk *k, EpSet *s, const void *rows, void *into) {
    const Backend *b = x->b;
    const DType wire = ep_wire(x);
    const int P = x->par->ep.size, gather = x->par->way == WAY_ALLGATHER;
    const size_t bytes = x->C * dtype_size(wire), go = ep_sum(k->n.to, P);
    const char *from = ep_row(x, rows, b->act_type, (size_t)k->first);
    void *to = into ? into : s->arrived;
    if (gather && wire == b->act_type) {
        s->rows = comm_all_gather_counts_start(x->par->on_ep, to, from, k->n.from, bytes);
    } else if (gather) {
        b->copy_rows(s->send, wire, NULL, from, b->act_type, NULL, k->plan.rows, x->C);
        s->rows = comm_all_gather_counts_start(x->par->on_ep, to, s->send, k->n.from, bytes);
    } else {
        b->copy_rows(s->send, wire, NULL, from, b->act_type,
            x->par->way == WAY_DEDUP ? k->item_row : k->plan.row, (int)go, x->C);
        s->rows = comm_all_to_all_start(x->par->on_ep, to, k->n.from, s->send, k->n.to, bytes);
    }
    x->rows_sent += go - k->n.to[x->par->ep.rank];
}

// X is kept for the backward pass: where it can, it arrives there.
static void *ep_direct(const Exchange *x, const EpChunk *k) {
    return k->X && ep_wire(x) == x->b->act_type && x->par->way != WAY_ALLTOALL ? k->X : NULL;
}

/* Forward, first part of chunk i of layer l: the chunk's plan, who gets what, and off it goes.
   plan: of all rows of this rank, experts by number. */
static void ep_dispatch(
    Exchange *x, int l, int i, const act_t *X, const Plan *plan, void *scratch) {
    const Backend *b = x->b;
    const Parallel *par = x->par;
    const int P = par->ep.size, me = par->ep.rank, E = x->E, here = x->here;
    EpChunk *k = ep_chunk(x, l, i);
    EpSet *s = &x->set[i % EP_SETS];
    int *start = x->host, *base = start + P, *out = base + P, *in = out + P * (here + 1) + E + 1;
    k->plan.rows = ep_rows(x, me, i, &k->first);
    k->plan.E = E;
    b->plan_part(&k->plan, k->of, plan, x->order + (size_t)l * E, k->first, scratch);
    if (par->way == WAY_ALLGATHER) {
        const size_t most = (size_t)x->most;
        k->here.rows = 0;
        for (int p = 0; p < P; p++) {
            start[p] = (int)(p * most);
            base[p] = k->here.rows;
            k->n.from[p] = (size_t)ep_rows(x, p, i, NULL);
            k->n.to[p] = (size_t)k->plan.rows;
            k->here.rows += (int)k->n.from[p];
            k->n.slots_to[p] = k->n.slots_from[p] = most;
        }
        s->meta[0] = comm_all_gather_start(
            par->on_ep, k->offsets, k->plan.offsets, (size_t)E + 1, sizeof(int));
        s->meta[1] = comm_all_gather_start(par->on_ep, s->item, k->plan.row, most, sizeof(int));
        s->meta[2] =
            comm_all_gather_start(par->on_ep, s->weight, k->plan.weight, most, b->stat_size);
    } else {
        int *offsets = out + P * (here + 1), *count = in + P * (here + 1);
        b->plan_items(
            k->item, k->item_row, k->item_begin, k->item_at, x->count, &k->plan, P, scratch);
        b->to_host(offsets, k->plan.offsets, ((size_t)E + 1) * sizeof(int));
        b->to_host(count, x->count, (size_t)P * sizeof(int));
        for (int p = 0; p < P; p++) { // to each rank: slots of its experts, and items
            for (int e = 0; e < here; e++)
                out[p * (here + 1) + e] = offsets[p * here + e + 1] - offsets[p * here + e];
            out[p * (here + 1) + here] = count[p];
            k->n.slots_to[p] = (size_t)(offsets[(p + 1) * here] - offsets[p * here]);
        }
        Comm *host = (Comm *)(uintptr_t)&par->ep;
        for (int p = 0; p < P; p++) k->n.from[p] = k->n.to[p] = (size_t)here + 1;
        comm_all_to_all(host, in, k->n.from, out, k->n.to, sizeof(int));
        int slots = 0, items = 0;
        for (int p = 0; p < P; p++) { // counts become offsets
            int at = 0, *n = in + p * (here + 1);
            const int came = n[here];
            start[p] = slots;
            base[p] = items;
            for (int e = 0; e <= here; e++) {
                const int each = n[e];
                n[e] = at;
                at += e < here ? each : 0;
            }
            k->n.slots_from[p] = (size_t)at;
            k->n.from[p] = par->way == WAY_DEDUP ? (size_t)came : (size_t)at;
            k->n.to[p] = par->way == WAY_DEDUP ? (size_t)count[p] : k->n.slots_to[p];
            slots += at;
            items += came;
        }
        k->here.rows = par->way == WAY_DEDUP ? items : slots;
        b->to_device(k->offsets, in, (size_t)P * (here + 1) * sizeof(int));
        s->meta[0] = NULL;
        s->meta[1] = comm_all_to_all_start(par->on_ep,
            par->way == WAY_ALLTOALL && k->which_X ? k->which_X : s->item, k->n.slots_from, k->item,
            k->n.slots_to, sizeof(int));
        s->meta[2] = comm_all_to_all_start(
            par->on_ep, s->weight, k->n.slots_from, k->plan.weight, k->n.slots_to, b->stat_size);
    }
    memcpy(k->n.base, base, (size_t)P * sizeof(int));
    b->to_device(k->start, start, (size_t)P * sizeof(int));
    b->to_device(k->base, base, (size_t)P * sizeof(int));
    ep_start_rows(x, k, s, X, ep_direct(x, k));
}

// What arrived as rows for the products, one after the other as it came.
static const act_t *ep_land(Exchange *x, const EpChunk *k, EpSet *s, void *into) {
    const DType wire = ep_wire(x), act = x->b->act_type;
    if (wire == act) return into ? into : s->arrived;
    act_t *out = into ? into : x->landed;
    x->b->copy_rows(out, act, NULL, s->arrived, wire, NULL, k->here.rows, x->C);
    return out;
}

/* alltoall: the rows that came more than once are kept once in k->X (store), and taken from there
   as often as they came. */
static void ep_rows_once(Exchange *x, const EpChunk *k, EpSet *s, int store) {
    const Backend *b = x->b;
    size_t at = 0;
    for (int p = 0; p < x->par->ep.size; at += k->n.from[p++]) {
        const int n = (int)k->n.from[p], *which = k->which_X + at;
        act_t *rows = ep_row(x, k->X, b->act_type, (size_t)k->n.base[p]);
        if (n && store)
            b->copy_rows(rows, b->act_type, which, ep_row(x, s->arrived, ep_wire(x), at),
                ep_wire(x), NULL, n, x->C);
        else if (n)
            b->copy_rows(ep_row(x, x->expanded, b->act_type, at), b->act_type, NULL, rows,
                b->act_type, which, n, x->C);
    }
}

// Starts the way back of what the experts made, (k->here.rows, C) in s->out.
static void ep_start_back(Exchange *x, const EpChunk *k, EpSet *s) {
    const DType wire = ep_wire(x), act = x->b->act_type;
    const void *send = s->out;
    if (wire != act) {
        x->b->copy_rows(s->back, wire, NULL, s->out, act, NULL, k->here.rows, x->C);
        send = s->back;
    }
    s->rows_back = comm_all_to_all_start(
        x->par->on_ep, s->returned, k->n.to, send, k->n.from, x->C * dtype_size(wire));
    x->rows_sent += ep_sum(k->n.from, x->par->ep.size) - k->n.from[x->par->ep.rank];
}

// Sums what came back into the chunk's rows of out (N,C).
static void ep_combine(Exchange *x, const EpChunk *k, EpSet *s, act_t *out) {
    const int dedup = x->par->way == WAY_DEDUP, gather = x->par->way == WAY_ALLGATHER;
    comm_finish(s->rows_back);
    x->b->sum_rows(ep_row(x, out, x->b->act_type, (size_t)k->first), s->returned, ep_wire(x),
        gather      ? NULL
            : dedup ? k->item_begin
                    : k->plan.row_begin,
        gather      ? NULL
            : dedup ? k->item_at
                    : k->plan.slot,
        x->par->ep.size, k->plan.rows, x->C);
}

// Where the slots of the experts here begin in what each rank sent, and how far ranks are apart.
static const int *ep_offsets(const Exchange *x, const EpChunk *k) {
    return k->offsets + (x->par->way == WAY_ALLGATHER ? x->par->ep.rank * x->here : 0);
}
static int ep_ld(const Exchange *x) { return (x->par->way == WAY_ALLGATHER ? x->E : x->here) + 1; }

// Forward, second part: what came becomes a plan, the experts work, and it goes back.
static void ep_compute(Exchange *x, int l, int i, Mat W1, Mat W2, act_t *A, void *scratch) {
    const Backend *b = x->b;
    const Parallel *par = x->par;
    const int P = par->ep.size, slotwise = par->way == WAY_ALLTOALL;
    EpChunk *k = ep_chunk(x, l, i);
    EpSet *s = &x->set[i % EP_SETS];
    for (int j = 0; j < 3; j++) comm_finish(s->meta[j]);
    comm_finish(s->rows);
    k->here.E = x->here;
    if (k->here.rows) {
        b->plan_merge(&k->here, slotwise ? NULL : s->item, s->weight, ep_offsets(x, k), k->start,
            slotwise ? k->start : k->base, NULL, P, ep_ld(x), scratch);
        if (slotwise && k->X) ep_rows_once(x, k, s, 1);
        const act_t *X = ep_land(x, k, s, slotwise ? NULL : k->X);
        b->expert_up_forward(k->H, A, X, W1, &k->here, scratch);
        comm_poll(par->on_ep);
        b->expert_down_forward(s->out, k->H, A, W2, &k->here, 0, scratch);
    }
    ep_start_back(x, k, s);
}

/* out (N,C) = what the experts of layer l, on whatever rank, make of X (N,C), by the plan of this
   rank's rows. W1, W2: the experts here. A: room as expert_up_forward wants it, or NULL. */
EP_FN void ep_forward(Exchange *x, int l, act_t *out, const act_t *X, Mat W1, Mat W2,
    const Plan *plan, act_t *A, void *scratch) {
    ep_dispatch(x, l, 0, X, plan, scratch);
    for (int i = 0; i < x->chunks; i++) {
        if (i + 1 < x->chunks) ep_dispatch(x, l, i + 1, X, plan, scratch);
        ep_compute(x, l, i, W1, W2, A, scratch);
        if (i) ep_combine(x, ep_chunk(x, l, i - 1), &x->set[(i - 1) % EP_SETS], out);
    }
    ep_combine(x, ep_chunk(x, l, x->chunks - 1), &x->set[(x->chunks - 1) % EP_SETS], out);
}

// Backward: with the gradient of the output here, those of the slots here; and back they go.
static void ep_gradients(Exchange *x, int l, int i, grad_t *dW1, grad_t *dW2, Mat W1, Mat W2,
    act_t *sA, int again, int fresh, void *scratch) {
    const Backend *b = x->b;
    const Parallel *par = x->par;
    const int P = par->ep.size, gather = par->way == WAY_ALLGATHER;
    EpChunk *k = ep_chunk(x, l, i);
    EpSet *s = &x->set[i % EP_SETS];
    comm_finish(s->rows);
    if (gather) b->zero(s->dS_back, (size_t)P * x->most * b->stat_size);
    if (k->here.rows) {
        const act_t *dout = ep_land(x, k, s, NULL), *X = k->X;
        if (par->way == WAY_ALLTOALL) {
            ep_rows_once(x, k, s, 0);
            X = x->expanded;
        }
        if (again) b->expert_up_forward(k->H, NULL, X, W1, &k->here, scratch);
        b->expert_down_backward(
            k->H, sA, x->dS_here, dW2, dout, k->H, W2, &k->here, fresh, scratch);
        comm_poll(par->on_ep);
        b->expert_up_backward(s->out, dW1, k->H, X, W1, &k->here, 0, fresh, scratch);
        b->plan_unmerge(
            s->dS_back, x->dS_here, &k->here, ep_offsets(x, k), k->start, NULL, P, ep_ld(x));
    } else if (fresh) {
        const size_t before = x->here - 1; // experts before the last one
        b->zero(dW1, (before * W1.stride + (size_t)W1.rows * W1.ld) * b->grad_size);
        b->zero(dW2, (before * W2.stride + (size_t)W2.rows * W2.ld) * b->grad_size);
    }
    ep_start_back(x, k, s);
    if (gather)
        s->dS_way = comm_reduce_scatter_start(
            par->on_ep, s->dS, s->dS_back, k->n.slots_to, comm_type_of(b->stat_type), COMM_SUM);
    else
        s->dS_way = comm_all_to_all_start(
            par->on_ep, s->dS, k->n.slots_to, s->dS_back, k->n.slots_from, b->stat_size);
}

static void ep_combine_gradients(Exchange *x, int l, int i, act_t *dX, stat_t *dS) {
    const EpChunk *k = ep_chunk(x, l, i);
    EpSet *s = &x->set[i % EP_SETS];
    ep_combine(x, k, s, dX);
    comm_finish(s->dS_way);
    x->b->scatter(dS, s->dS, k->of, &k->plan);
}

/* After ep_forward on the same rows: dX (N,C) overwritten, dS (S) of the slots of this rank's plan,
   dW1 and dW2 of the experts here added to (fresh: written), from dout (N,C). sA (slots here, I):
   room. again: H is to be made once more. */
EP_FN void ep_backward(Exchange *x, int l, act_t *dX, stat_t *dS, grad_t *dW1, grad_t *dW2,
    const act_t *dout, Mat W1, Mat W2, act_t *sA, int again, int fresh, void *scratch) {
    const int last = x->chunks - 1;
    ep_start_rows(x, ep_chunk(x, l, 0), &x->set[0], dout, NULL);
    for (int i = 0; i <= last; i++) {
        if (i < last)
            ep_start_rows(x, ep_chunk(x, l, i + 1), &x->set[(i + 1) % EP_SETS], dout, NULL);
        ep_gradients(x, l, i, dW1, dW2, W1, W2, sA, again, fresh && i == 0, scratch);
        if (i) ep_combine_gradients(x, l, i - 1, dX, dS);
    }
    ep_combine_gradients(x, l, last, dX, dS);
}

#endif
