/* ranks.h: a run on several ranks: what the flags say of their layout, what `info` says of one that
   is not there, and what the log says of the traffic. It knows flags.h, commands.h,
   parallel.h, expert_parallel.h, placement.h. Start reading at ranks_open. */
#ifndef RANKS_H
#define RANKS_H

#include "flags.h"
#include "placement.h"

/* Whether the layout fits: --ep, --batch, --placement and the model against W ranks. */
static void ranks_check(const Options *o, int W) {
    const Config *c = &o->c;
    const double rows = ceil((double)o->batch / W) * c->seq_len,
                 chunk = rows < o->dispatch_chunk ? rows : o->dispatch_chunk,
                 each = o->routing == ROUTING_ROUND ? c->n_experts : c->top_k;
    if (o->ep > 1 && (o->ep * chunk * each > INT_MAX / 4 || rows * each > INT_MAX / 4))
        die(USER_ERROR,
            "--dispatch-chunk: expected fewer tokens, for %d ranks x %.0f x %.0f experts a token "
            "are too many to count; lower it, or --batch",
            o->ep, chunk, each);
    if (W % o->ep)
        die(USER_ERROR, "--ep: expected a divisor of the %d rank%s, found %d%s", W,
            W == 1 ? "" : "s", o->ep,
            W == 1 ? "; mpirun -n N train_moe starts N ranks, info --ranks N plans them" : "");
    if (o->ep > 1 && !moe_layers(c))
        die(USER_ERROR, "--ep: expected a model with --experts 2 or more, found a dense one");
    if (o->ep > 1 && c->n_experts % o->ep)
        die(USER_ERROR, "--ep: expected a divisor of the %d experts, found %d", c->n_experts,
            o->ep);
    if (o->batch < W)
        die(USER_ERROR, "--batch: expected at least a sequence for each of the %d ranks, found %d",
            W, o->batch);
    if (o->placement && strcmp(o->placement, "none") != 0 && o->ep == 1)
        die(USER_ERROR,
            "--placement: expected --ep 2 or more, found 1, where every rank has all experts");
    if (W > 1 && o->dense == DENSE_CUBLAS)
        warn("--dense cublas: ranks may round otherwise than one rank does");
}

/* A run that is resumed on other ranks: of the layout that it had, what does not fit any more, and was
   not given anew, is left behind. given: flags of the command line. */
static void ranks_forget(Options *o, const int given[N_FLAGS], int W) {
    const int was = o->ep;
    if (!was_given(given, "ep") && W % was) {
        o->ep = 1;
        warn("--ep %d: the run had it, but there %s %d rank%s now: it goes on with all experts on "
             "each",
            was, W == 1 ? "is" : "are", W, W == 1 ? "" : "s");
    }
    if (!o->placement || was_given(given, "placement") || !strcmp(o->placement, "none")) return;
    int *position = malloc((size_t)o->c.n_layers * o->c.n_experts * sizeof *position);
    Err err;
    if (!position) die(RUN_ERROR, "no memory");
    if (o->ep == 1)
        fail(&err, "every rank has all experts now");
    else if (!placement_read(o->placement, &o->c, o->ep, position, &err))
        err.text[0] = 0;
    if (err.text[0])
        warn("--placement %s: the run had it, but %s: it goes on in index order", o->placement,
            err.text);
    if (err.text[0]) o->placement = NULL;
    free(position);
}

/* How many ranks there are on this machine. *threads: for each of them where nobody said how many:
   those that it may use, unless ranks of the same machine would share them. */
static int ranks_here(Comm *world, int *threads) {
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    const uint64_t host = text_hash(name);
    const uint64_t mine[2] = {host, (uint64_t)thread_max()};
    uint64_t *all = malloc((size_t)world->size * sizeof mine), used = 0;
    int here = 0;
    if (!all) die(RUN_ERROR, "no memory");
    comm_all_gather(world, all, mine, 1, sizeof mine);
    for (int r = 0; r < world->size; r++)
        if (all[2 * r] == host) here++, used += all[2 * r + 1];
    free(all);
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    const int share = thread_max() / here;
    *threads = getenv("OMP_NUM_THREADS")       ? thread_max()
        : cores > 0 && used <= (uint64_t)cores ? thread_max()
        : share > 1                            ? share
                                               : 1;
    return here;
}

// The way of rows: what was named, or what sends least.
static Way ranks_way(const Options *o, const Backend *b) {
    const size_t size = o->rows_dtype == ROWS_BF16 ? 2 : b->act_size;
    if (o->dispatch != WAY_AUTO) return (Way)o->dispatch;
    return way_choose((double)o->c.d_model * (double)size, o->c.n_experts, o->c.top_k, o->ep);
}

/* The ranks of world as the flags lay them out. All of them call it. */
static void ranks_open(Parallel *par, const Comm *world, const Options *o, const Backend *b) {
    int *position = malloc((size_t)o->c.n_layers * o->c.n_experts * sizeof *position);
    Err err;
    if (!position) die(RUN_ERROR, "no memory for the places of %d experts", o->c.n_experts);
    memset(par, 0, sizeof *par);
    par->world = *world;
    par->zero = o->zero;
    par->way = ranks_way(o, b);
    par->bf16 = o->rows_dtype == ROWS_BF16;
    par->chunk = o->dispatch_chunk;
    placement_even(&o->c, position);
    if (o->placement && strcmp(o->placement, "none") != 0 &&
        placement_read(o->placement, &o->c, o->ep, position, &err))
        die(USER_ERROR, "--placement: %s", err.text);
    parallel_open(par, &o->c, b, o->ep, position);
}

// A rank's part of what one would do alone.
static ModelShape ranks_shape(ModelShape s, const Parallel *par) {
    s.par = par;
    s.B_all = s.B;
    s.B = share_of_batch(&par->world, s.B_all, par->world.rank, NULL);
    return s;
}

// -------------------------------------------------------------------------------------------------
// tensors of several ranks

/* Elements *first .. *first + *count - 1 of tensor x (of m->whole) that rank r has, or with `once`
   those of them that it alone speaks for; returns the element of its arena where they begin. All
   ranks lay out theirs alike. */
static size_t model_here(
    const Model *m, const Tensor *x, int moments, int r, int once, size_t *first, size_t *count) {
    const Parallel *par = m->shape.par;
    const Tensor *t = tensor_of(&m->table, x->row->kind, x->layer);
    const int P = par->ep.size, experts = x->row->shard == SHARD_EXPERT;
    *first = *count = 0;
    if (x->expert >= 0) {
        const int at = par->position[x->layer * m->c.n_experts + x->expert],
                  here = m->table.experts;
        if (m->exchange && at / here != r % P) return 0;
        t += at % here;
    }
    if (!moments || !par->zero) {
        if (!once || r == (experts ? r % P : 0)) *count = x->count; // of the first replica
        return t->offset;
    }
    const Bucket *b = bucket_at(&m->buckets, t->offset);
    const int size = experts ? par->replicas.size : par->world.size, own = experts ? r / P : r;
    size_t from;
    const size_t to = shard_of(b, size, own, t->offset, t->count, &from);
    if (from >= to) return 0;
    *first = from - t->offset;
    *count = to - from;
    return b->moment + from - (b->offset + b->shard); // this rank's
}

// For Spread: what this rank has; and all of it to rank 0.
static size_t spread_here(void *m, const Tensor *x, int moments, size_t *first, size_t *count) {
    const Model *k = m;
    return model_here(k, x, moments, k->shape.par->world.rank, 0, first, count);
}
static void spread_gather(void *ctx, const Tensor *x, int moments, size_t from, size_t n,
    const void *base, size_t size, void *out) {
    const Model *m = ctx;
    Comm *w = (Comm *)(uintptr_t)&m->shape.par->world;
    size_t *get = calloc(2 * (size_t)w->size, sizeof *get);
    char *mine = NULL;
    if (!get) die(RUN_ERROR, "no memory");
    size_t *put = get + w->size;
    for (int r = 0; r < w->size; r++) {
        size_t first, count;
        const size_t at = model_here(m, x, moments, r, 1, &first, &count);
        const size_t begin = first > from ? first : from,
                     end = first + count < from + n ? first + count : from + n;
        if (begin >= end) continue;
        if (w->rank == 0) get[r] = end - begin;
        if (w->rank != r) continue;
        put[0] = end - begin;
        mine = malloc(put[0] * size);
        if (!mine) die(RUN_ERROR, "no memory for %zu bytes of a checkpoint", put[0] * size);
        m->b->to_host(mine, (const char *)base + (at + begin - first) * size, put[0] * size);
    }
    comm_all_to_all(w, out, get, mine, put, size); // shares ascend with the ranks
    free(mine);
    free(get);
}
static Spread model_spread(Model *m) {
    const Spread s = {m, &m->whole, m->shape.par->world.rank == 0, spread_here, spread_gather};
    return s;
}

// -------------------------------------------------------------------------------------------------
// the log

// Everything that this rank's groups did since the last call.
static void ranks_counts(Parallel *par, CommCount sum[COMM_KINDS]) {
    Comm *const group[3] = {par->on_world, par->on_ep, par->on_replicas};
    Comm *const host[3] = {&par->world, &par->ep, &par->replicas};
    memset(sum, 0, COMM_KINDS * sizeof *sum);
    for (int i = 0; i < 6; i++) {
        CommCount n[COMM_KINDS];
        if (i >= 3 && host[i - 3] == group[i - 3]) continue;
        comm_counts_take(i < 3 ? group[i] : host[i - 3], n);
        for (int k = 0; k < COMM_KINDS; k++) {
            sum[k].calls += n[k].calls;
            sum[k].bytes += n[k].bytes;
            sum[k].seconds += n[k].seconds;
        }
    }
}

/* Adds to a step's line: comm, for each kind of collective its calls on a rank, the bytes that all
   ranks sent to others, and the seconds of the rank that spent most; with experts on several ranks
   rank_slots, how many choices fell on the experts of each rank of a replica, all replicas
   together, before any are dropped, and rank_imbalance, the largest over the mean, of the worst layer. load:
   the step's choices (L,E). All ranks call it. Returns 0, or -1 without memory. */
static int ranks_log(Parallel *par, json_t *line, const Config *c, const int *load) {
    CommCount n[COMM_KINDS];
    double sums[COMM_KINDS], most[COMM_KINDS];
    json_t *comm = json_object();
    int rc = 0;
    ranks_counts(par, n);
    for (int k = 0; k < COMM_KINDS; k++) sums[k] = (double)n[k].bytes, most[k] = n[k].seconds;
    comm_all_reduce(&par->world, sums, COMM_KINDS, COMM_F64, COMM_SUM);
    comm_all_reduce(&par->world, most, COMM_KINDS, COMM_F64, COMM_MAX);
    CommCount own[COMM_KINDS];
    ranks_counts(par, own); // what this took: of no step
    for (int k = 0; k < COMM_KINDS; k++)
        if (n[k].calls)
            rc |= json_object_set_new(comm, comm_kind_names[k],
                json_pack("{s:I, s:I, s:f}", "calls", (json_int_t)n[k].calls, "bytes",
                    (json_int_t)sums[k], "seconds", most[k]));
    rc |= json_object_set_new(line, "comm", comm);
    const int P = par->ep.size, here = c->n_experts / P;
    if (P == 1 || !moe_layers(c)) return rc ? -1 : 0;
    double worst = 1, *slots = calloc(2 * (size_t)P, sizeof *slots);
    json_t *list = json_array();
    if (!slots) return -1;
    double *layer = slots + P;
    for (int l = c->dense_layers; l < c->n_layers; l++) {
        double all = 0, largest = 0;
        memset(layer, 0, (size_t)P * sizeof *layer);
        for (int e = 0; e < c->n_experts; e++)
            layer[par->position[l * c->n_experts + e] / here] += load[l * c->n_experts + e];
        for (int p = 0; p < P; p++) {
            slots[p] += layer[p];
            all += layer[p];
            if (layer[p] > largest) largest = layer[p];
        }
        if (all > 0 && largest * P / all > worst) worst = largest * P / all;
    }
    for (int p = 0; p < P; p++)
        rc |= json_array_append_new(list, json_integer((json_int_t)slots[p]));
    free(slots);
    rc |= json_object_set_new(line, "rank_slots", list);
    rc |= json_object_set_new(line, "rank_imbalance", json_real(worst));
    return rc ? -1 : 0;
}

// -------------------------------------------------------------------------------------------------
// info: a layout that need not be there

/* Memory of a rank, and what it sends in a step, for --ranks, --ep, --zero, --dispatch: accounted by
   a group that moves nothing. */
static void ranks_info(const Options *o, FILE *f) {
    Comm dry;
    Parallel par;
    Model m;
    const Backend *b = backend_of(o);
    const Config *c = &o->c;
    const int W = o->ranks ? o->ranks : 1;
    comm_open_dry(&dry, 0, W);
    ranks_open(&par, &dry, o, b);
    model_plan(&m, c, b, ranks_shape(train_shape(o), &par));
    const int P = o->ep, rows = m.shape.B * m.shape.T;
    const double row = (double)c->d_model * (double)(par.bf16 ? 2 : b->act_size);
    fprintf(f, "%d ranks, %d with each expert, %d sequences of a micro-batch on this one%s\n", W,
        W / P, m.shape.B, o->zero ? ", ZeRO-1" : "");
    fprintf(f, "memory of a rank, with room for all rows of all ranks at its experts\n");
    print_memory(&m, f);
    // the sums of gradients, as they would be sent
    CommCount n[COMM_KINDS];
    ranks_counts(&par, n); // of the groups' making
    for (int l = c->n_layers - 1; l >= -1; l--) buckets_start(&m.buckets, &par, b, NULL, l);
    buckets_finish(&m.buckets);
    if (o->zero) buckets_gather(&m.buckets, &par, b, NULL);
    ranks_counts(&par, n);
    fprintf(f, "bytes that a rank sends\n");
    double sums = 0;
    for (int k = 0; k < COMM_KINDS; k++) sums += (double)n[k].bytes;
    fprintf(f, "  %-40s %12.3f MB a step\n", "gradients (and weights, --zero 1)", sums / 1e6);
    for (Way w = WAY_ALLTOALL; w <= WAY_ALLGATHER && P > 1; w++) {
        const double once = way_bytes(w, rows, row, c->n_experts, c->top_k, P),
                     more = way_overhead(w, rows, c->n_experts, c->top_k, P);
        fprintf(f, "  rows, %-9s %s %12.3f MB a layer and micro-batch: 4 x %.3f, routing %.3f\n",
            way_names[w], w == par.way ? "(this one)" : "          ", (4 * once + more) / 1e6,
            once / 1e6, more / 1e6);
    }
    if (P > 1) fprintf(f, "  expected for uniform routing\n");
    model_free(&m);
    dry = par.world;
    parallel_close(&par);
    comm_close(&dry);
}

#endif
