/* parallel.h: the ranks that train one model. It knows moe.h and comm.h.

   Parallel     who has what: groups of ranks, and where experts are
   Bucket       a stretch of the gradients that is summed over ranks in one piece, as soon as the
                backward pass has made it
   Shards       ZeRO-1: whose share of a bucket is what

   W ranks are W/P replicas of P ranks each (--ep P): world rank r is rank r % P of replica r / P.
   Every rank has all dense parameters and its share of the sequences of a micro-batch; the E
   experts of a layer are dealt out over the P ranks of a replica, E/P each (expert_parallel.h).
   Gradients of dense parameters are summed over all ranks, those of experts over the ranks that
   have the same ones: they hold the parts of all others already, whose rows came to them. Losses
   are divided by the targets of the whole step beforehand, so sums are what is wanted, never means
   of means. Sums are in the order of ranks, the same bits everywhere, and so are parameters. */
#ifndef PARALLEL_H
#define PARALLEL_H

#include "comm.h"

#define PAR_FN __attribute__((unused)) static

typedef enum { WAY_AUTO, WAY_ALLTOALL, WAY_DEDUP, WAY_ALLGATHER } Way;
static const char *const way_names[] = {"auto", "alltoall", "dedup", "allgather"};

typedef struct Parallel {
    Comm world, ep, replicas; // all; those with the other experts; those with the same ones
    // the same, for buffers on the device: those above where its memory is the host's
    Comm *on_world, *on_ep, *on_replicas;
    int zero;      // 1: a rank keeps the moments of its share of the parameters alone (ZeRO-1)
    Way way;       // not WAY_AUTO
    int bf16;      // rows travel as bf16
    int chunk;     // most rows of a chunk
    int *position; // (L, E) of an expert, whatever the layer
    int *order;    // (L, E) the expert at a position
    Comm device[3];
} Parallel;

// Sequences of B_all, at least one a rank, that rank r gets, and the first of them: as evenly as can
// be; rank 0 has the most.
static inline int share_of_batch(const Comm *world, int B_all, int r, int *first) {
    const size_t begin = comm_share((size_t)B_all, world->size, r),
                 end = comm_share((size_t)B_all, world->size, r + 1);
    if (first) *first = (int)begin;
    return (int)(end - begin);
}

// -------------------------------------------------------------------------------------------------
// groups

/* Groups of the ranks of world, which is par->world by now. position (L,E): par's from here on. b:
   whose memory the buffers are in. */
PAR_FN void parallel_open(Parallel *par, const Config *c, const Backend *b, int P, int *position) {
    Comm *w = &par->world;
    int *color = (int *)calloc((size_t)w->size, sizeof *color);
    int *other = (int *)calloc((size_t)w->size, sizeof *other);
    par->position = position;
    par->order = (int *)malloc((size_t)c->n_layers * c->n_experts * sizeof *par->order);
    if (!color || !other || !par->order) die(RUN_ERROR, "no memory for %d ranks", w->size);
    for (int l = 0; l < c->n_layers; l++)
        for (int e = 0; e < c->n_experts; e++)
            par->order[l * c->n_experts + position[l * c->n_experts + e]] = e;
    for (int r = 0; r < w->size; r++) color[r] = r / P, other[r] = r % P;
    comm_split_known(&par->ep, w, color, NULL);
    comm_split_known(&par->replicas, w, other, NULL);
    free(color);
    free(other);
    Comm *const group[3] = {w, &par->ep, &par->replicas};
    Comm **const on[3] = {&par->on_world, &par->on_ep, &par->on_replicas};
    for (int i = 0; i < 3; i++) {
        *on[i] = group[i];
        if (!b->apart) continue;
        const CommDevice device = {
            b->alloc, b->release, b->to_device, b->to_host, b->stream, b->apart == 2};
        comm_on_device(&par->device[i], group[i], &device);
        *on[i] = &par->device[i];
    }
}

// Frees all but par->world.
PAR_FN void parallel_close(Parallel *par) {
    for (int i = 2; i >= 0; i--) comm_close(&par->device[i]);
    comm_close(&par->replicas);
    comm_close(&par->ep);
    free(par->position);
    free(par->order);
}

// -------------------------------------------------------------------------------------------------
// buckets and shards

/* Neighbours in the arena that are summed over the same ranks: of a layer the dense tensors before
   its experts, the experts, the dense tensors after them; and what belongs to no layer. */
typedef struct Bucket {
    int layer, experts; // -1: of no layer
    size_t offset, count;
    size_t shard;  // the first element of this rank's share, from offset on
    size_t shared; // its elements: ZeRO-1 keeps moments for these alone
    size_t moment; // where they are in the moments, with ZeRO-1
    CommRequest *sum;
} Bucket;

typedef struct Buckets {
    Bucket *bucket;
    int n, oldest, next; // those under way: oldest .. next - 1 of `order`
    int *order;
    size_t *counts; // (W) room for the shares of a bucket
    size_t moments; // elements of a rank's moments with ZeRO-1
} Buckets;
enum { SHARD_ELEMENTS = 64, BUCKETS_UNDER_WAY = 16 }; // shares are multiples of ARENA_ALIGN bytes

static Comm *bucket_group(const Parallel *par, const Bucket *b) {
    return b->experts ? par->on_replicas : par->on_world;
}
// The first element of rank r's share of the n of a bucket; of rank `size`: n.
static inline size_t shard_begin(size_t n, int size, int r) {
    const size_t at =
        comm_share((n + SHARD_ELEMENTS - 1) / SHARD_ELEMENTS, size, r) * SHARD_ELEMENTS;
    return at < n ? at : n;
}

/* Which of `count` elements from offset on, of a tensor in bucket b, are in the share of rank r of the
   `size` that share it: from *from up to the end that is returned; none where that is not larger. */
static inline size_t shard_of(
    const Bucket *b, int size, int r, size_t offset, size_t count, size_t *from) {
    const size_t begin = b->offset + shard_begin(b->count, size, r),
                 end = b->offset + shard_begin(b->count, size, r + 1);
    *from = offset > begin ? offset : begin;
    return offset + count < end ? offset + count : end;
}
// The bucket that has the element at this offset.
static inline const Bucket *bucket_at(const Buckets *x, size_t offset) {
    const Bucket *b = x->bucket;
    while (b->offset + b->count <= offset) b++;
    return b;
}

// From the table of the tensors that this rank has. par NULL: one rank.
PAR_FN void buckets_open(Buckets *x, const TensorTable *t, const Parallel *par) {
    memset(x, 0, sizeof *x);
    x->bucket = (Bucket *)calloc((size_t)t->count + 1, sizeof *x->bucket);
    x->order = (int *)calloc((size_t)t->count + 1, sizeof *x->order);
    x->counts = (size_t *)calloc(par ? (size_t)par->world.size : 1, sizeof *x->counts);
    if (!x->bucket || !x->order || !x->counts) die(RUN_ERROR, "no memory for %d tensors", t->count);
    for (int i = 0; i < t->count; i++) {
        const Tensor *a = &t->tensor[i];
        if (!a->row || !a->row->trained) continue;
        const int experts = a->row->shard == SHARD_EXPERT;
        Bucket *b = x->n ? &x->bucket[x->n - 1] : NULL;
        if (!b || b->layer != a->layer || b->experts != experts) {
            b = &x->bucket[x->n++];
            b->layer = a->layer, b->experts = experts, b->offset = a->offset;
        }
        b->count = a->offset + a->count - b->offset;
    }
    for (int i = 0; i < x->n; i++) {
        Bucket *b = &x->bucket[i];
        const Comm *g = !par ? NULL : b->experts ? &par->replicas : &par->world;
        b->shard = g ? shard_begin(b->count, g->size, g->rank) : 0;
        b->shared = (g ? shard_begin(b->count, g->size, g->rank + 1) : b->count) - b->shard;
        b->moment = x->moments;
        x->moments += (b->shared + SHARD_ELEMENTS - 1) / SHARD_ELEMENTS * SHARD_ELEMENTS;
    }
}
PAR_FN void buckets_close(Buckets *x) {
    free(x->bucket);
    free(x->order);
    free(x->counts);
    memset(x, 0, sizeof *x);
}

static const size_t *bucket_counts(Buckets *x, const Bucket *b, int size) {
    for (int r = 0; r < size; r++)
        x->counts[r] = shard_begin(b->count, size, r + 1) - shard_begin(b->count, size, r);
    return x->counts;
}

// Waits for the oldest where too many are under way, before bucket i joins them.
static void bucket_joins(Buckets *x, int i) {
    if (x->next - x->oldest == BUCKETS_UNDER_WAY) comm_finish(x->bucket[x->order[x->oldest++]].sum);
    x->order[x->next++] = i;
}

/* Starts the sums of the gradients of a layer (-1: of what is in no layer), which are complete on
   this rank. grads: the arena. Without ZeRO-1 every rank gets the sums, with it those of its share
   alone. Few are under way at a time; the oldest is waited for. */
PAR_FN void buckets_start(
    Buckets *x, const Parallel *par, const Backend *b, grad_t *grads, int layer) {
    for (int i = 0; i < x->n; i++) {
        Bucket *k = &x->bucket[i];
        Comm *g = bucket_group(par, k);
        char *at = (char *)grads + k->offset * b->grad_size;
        if (k->layer != layer || g->size == 1) continue;
        bucket_joins(x, i);
        if (par->zero)
            k->sum = comm_reduce_scatter_start(g, at + k->shard * b->grad_size, at,
                bucket_counts(x, k, g->size), comm_type_of(b->grad_type), COMM_SUM);
        else
            k->sum = comm_all_reduce_start(g, at, k->count, comm_type_of(b->grad_type), COMM_SUM);
    }
    comm_poll(par->on_world);
}
// Waits for all of them.
PAR_FN void buckets_finish(Buckets *x) {
    while (x->oldest < x->next) comm_finish(x->bucket[x->order[x->oldest++]].sum);
    x->oldest = x->next = 0;
}

// ZeRO-1, after the update: every rank gets the parameters that others have updated.
PAR_FN void buckets_gather(Buckets *x, const Parallel *par, const Backend *b, param_t *params) {
    for (int i = 0; i < x->n; i++) {
        Bucket *k = &x->bucket[i];
        Comm *g = bucket_group(par, k);
        char *at = (char *)params + k->offset * b->param_size;
        if (g->size == 1) continue;
        bucket_joins(x, i);
        k->sum = comm_all_gather_counts_start(
            g, at, at + k->shard * b->param_size, bucket_counts(x, k, g->size), b->param_size);
    }
    buckets_finish(x);
}

#endif
