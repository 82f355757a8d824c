/* model_ranks.h: what a model on several ranks needs besides: the part of model.h that a reader who
   has one rank may leave out. model.h includes it, once Model and take() are there. In order: rows
   and slots; the memory of the exchange between ranks (expert_parallel.h); what of the gradient a
   rank counts; routing over the rows of all ranks. */
#ifndef MODEL_RANKS_H
#define MODEL_RANKS_H

// Most rows and slots of a chunk that come to the experts of a rank: all rows of all ranks.
static inline size_t rows_of_chunk(const Model *m) {
    const ModelShape *s = &m->shape;
    const size_t R = (size_t)share_of_batch(&s->par->world, s->B_all, 0, NULL) * s->T,
                 chunk = s->par->chunk;
    return R < chunk ? R : chunk;
}
static inline size_t slots_that_come(const Model *m) {
    const size_t P = m->shape.par->ep.size, here = m->c.n_experts / P;
    const size_t each = m->shape.tile ? (size_t)m->c.n_experts : (size_t)m->c.top_k;
    return P * rows_of_chunk(m) * (each < here ? each : here);
}
static inline size_t rows_that_come(const Model *m) {
    return m->shape.par->way == WAY_ALLTOALL ? slots_that_come(m)
                                             : m->shape.par->ep.size * rows_of_chunk(m);
}

/* What the experts of other ranks need: for each chunk of rows its plans, the rows that came and
   their H; and the buffers of what is on the way. The sizes are those of the worst case: all rows
   of all ranks choose experts here. */
MODEL_FN void layout_exchange(Model *m, int h_saved, act_t *H) {
    Exchange *x = m->exchange;
    const Parallel *par = x->par;
    const Backend *b = m->b;
    const Config *c = &m->c;
    const ModelShape s = m->shape;
    const size_t C = c->d_model, E = c->n_experts, P = par->ep.size, act = b->act_size;
    const size_t I = c->d_expert, wire = par->bf16 ? 2 : act, stat = b->stat_size;
    const size_t n = rows_of_chunk(m), each = s.tile ? E : (size_t)c->top_k, here = E / P;
    const size_t mine = each < here ? each : here, ranks = each < P ? each : P;
    const int dedup = par->way == WAY_DEDUP, slotwise = par->way == WAY_ALLTOALL;
    const ArenaId keep = s.train ? A_SAVED : A_WORK;
    static const char routing[] = "exchange: routing of chunks",
                      rows[] = "exchange: rows on the way";
    x->C = (int)C, x->E = (int)E, x->here = (int)here;
    x->most = (int)(n * each);
    x->come = (int)rows_that_come(m);
    x->come_slots = (int)slots_that_come(m);
    x->go = (int)(dedup ? n * ranks : slotwise ? n * each : P * n);
    for (int l = 0; l < x->layers; l++) {
        if (s.train && !is_moe_layer(c, l)) continue;
        for (int i = 0; i < x->chunk_room; i++) {
            EpChunk *k = &x->chunk[(size_t)l * x->chunk_room + i];
            Plan own = {(int)n, (int)E, x->most, (int)each, NULL, NULL, NULL, NULL, NULL, NULL};
            Plan came = {x->come, (int)here, x->come_slots, slotwise ? 1 : (int)mine, NULL, NULL,
                NULL, NULL, NULL, NULL};
            take_plan(m, keep, routing, &own);
            take_plan(m, keep, routing, &came);
            k->plan = own, k->here = came;
            k->of = take(m, keep, routing, x->most, sizeof(int));
            if (par->way != WAY_ALLGATHER) {
                k->item = take(m, keep, routing, x->most, sizeof(int));
                k->item_row = take(m, keep, routing, n * ranks, sizeof(int));
                k->item_begin = take(m, keep, routing, n + 1, sizeof(int));
                k->item_at = take(m, keep, routing, n * ranks, sizeof(int));
            }
            k->offsets = take(m, keep, routing, P * (E + 1), sizeof(int));
            k->start = take(m, keep, routing, P, sizeof(int));
            k->base = take(m, keep, routing, P, sizeof(int));
            if (slotwise && s.train) k->which_X = take(m, keep, routing, x->come, sizeof(int));
            if (s.train) k->X = take(m, keep, "rows of all ranks that came (R,C)", P * n * C, act);
            k->H = !h_saved ? H
                            : take(m, keep, "expert pre-activation H (S,2I)",
                                  (size_t)2 * x->come_slots * I, act);
        }
    }
    for (int i = 0; i < EP_SETS; i++) {
        EpSet *k = &x->set[i];
        if (par->way != WAY_ALLGATHER || par->bf16)
            k->send = take(m, A_WORK, rows, x->go * C, wire);
        k->arrived = take(m, A_WORK, rows, x->come * C, wire);
        k->out = take(m, A_WORK, rows, x->come * C, act);
        if (par->bf16) k->back = take(m, A_WORK, rows, x->come * C, wire);
        k->returned = take(m, A_WORK, rows, x->go * C, wire);
        k->item = take(m, A_WORK, routing, P * x->most, sizeof(int));
        k->weight = take(m, A_WORK, routing, P * x->most, stat);
        if (!s.train) continue;
        k->dS_back = take(m, A_WORK, routing, P * x->most, stat);
        k->dS = take(m, A_WORK, routing, x->most, stat);
    }
    if (par->bf16) x->landed = take(m, A_WORK, rows, x->come * C, act);
    if (slotwise && s.train) x->expanded = take(m, A_WORK, rows, x->come * C, act);
    if (s.train) x->dS_here = take(m, A_WORK, routing, x->come_slots, stat);
    x->order = take(m, A_WORK, routing, c->n_layers * E, sizeof(int));
    x->count = take(m, A_WORK, routing, P, sizeof(int));
}

// The list of what this rank counts in the gradient's norm, from seg, that of all it has: its share
// of every bucket, so that each parameter is counted once.
MODEL_FN void list_own(Model *m, const Segment *seg) {
    const Parallel *par = m->shape.par;
    if (!m->own) return;
    Segment *own = malloc((m->table.count + 1) * sizeof *own);
    m->own_tensor = malloc((m->table.count + 1) * sizeof(int));
    if (!own || !m->own_tensor) die(RUN_ERROR, "no memory");
    for (int i = 0, s = 0; i < m->table.count; i++) {
        if (!m->table.tensor[i].row->trained) continue;
        const Segment all = seg[s++];
        const Bucket *b = bucket_at(&m->buckets, all.offset);
        const Comm *g = bucket_group(par, b);
        size_t from;
        const size_t to = shard_of(b, g->size, g->rank, all.offset, all.count, &from);
        if (from >= to) continue;
        Segment part = {from, to - from, all.decay,
            par->zero ? b->moment + from - (b->offset + b->shard) : from};
        m->own_tensor[m->n_own] = i;
        own[m->n_own++] = part;
    }
    m->b->to_device(m->own, own, m->n_own * sizeof *own);
    free(own);
}

static inline int selects(Router r) { return r.tile || r.limit < r.all; }

// The plan of this rank's rows after a selection over the rows of all ranks: each rank makes it.
MODEL_FN void select_over_ranks(Model *m, int l, int N, Router r) {
    const Backend *b = m->b;
    const Parallel *par = m->shape.par;
    Layer *y = &m->layer[l];
    const size_t E = r.E, K = r.K, stat = b->stat_size;
    size_t *rows = malloc(par->world.size * sizeof *rows);
    if (!rows) die(RUN_ERROR, "no memory");
    int first = 0;
    for (int k = 0; k < par->world.size; k++) {
        rows[k] = (size_t)share_of_batch(&par->world, m->shape.B_all, k, NULL) * m->shape.T;
        if (k < par->world.rank) first += (int)rows[k];
    }
    comm_all_reduce(par->on_world, y->count, E, COMM_I32, COMM_SUM);
    comm_all_gather_counts(par->on_world, m->all_logits, y->logits, rows, E * stat);
    comm_all_gather_counts(par->on_world, m->all_lse, y->router_lse, rows, stat);
    comm_all_gather_counts(par->on_world, m->all_weight, y->topk_weight, rows, K * stat);
    comm_all_gather_counts(par->on_world, m->all_topk, y->topk, rows, K * sizeof(int));
    free(rows);
    r.N = m->all_plan.rows = r.all;
    b->plan_select(&m->all_plan, y->moved, m->all_topk, m->all_weight, y->count, m->all_logits,
        m->all_lse, r, 0, m->scratch);
    y->plan.rows = N;
    b->plan_part(&y->plan, m->all_of, &m->all_plan, NULL, first, m->scratch);
}

// Loads and losses of a micro-batch, of the rows of all ranks.
MODEL_FN void balance_of_ranks(Model *m, Router r) {
    const Config *c = &m->c;
    const size_t n = moe_layers(c), E = c->n_experts;
    Comm *w = m->shape.par->on_world;
    if (!selects(r)) comm_all_reduce(w, m->counts, n * E, COMM_I32, COMM_SUM);
    comm_all_reduce(w, m->sums, n * (E + 1), comm_type_of(m->b->stat_type), COMM_SUM);
    for (int l = c->dense_layers; l < c->n_layers; l++) {
        Layer *y = &m->layer[l];
        m->b->router_balance(y->loss_sum, y->count_sum, y->count, y->sums, r);
    }
}

#endif
