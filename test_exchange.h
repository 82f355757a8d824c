/* test_exchange.h: the operations between ranks, on the CPU. Part of test_moe.c.

     ranks/parts, items, merge   against a search in a table of weights, (experts, rows), 0 = no slot:
                 plans are made from such a table, and must be what the table says
     ranks/exchange   rows, slots and weights from n ranks to the owners of their experts and back,
                 all in one process: each arrives once, at its place
     ranks/rows   copies and sums of rows, in bf16 too
     ranks/router, norm, moments   two halves together are the whole */
#ifndef TEST_EXCHANGE_H
#define TEST_EXCHANGE_H

// -------------------------------------------------------------------------------------------------
// plans and tables

// Weights of a plan: (E,R), 0 where the expert does not have the row. No two alike.
static double *random_table(int E, int R, int percent) {
    double *w = fresh((size_t)E * R, sizeof *w);
    for (int i = 0; i < E * R; i++) w[i] = below(100) < percent ? 1 + i : 0;
    for (int e = 0; e < E; e++) // an expert and a row without slots
        for (int r = 0; r < R; r++)
            if (e == E / 2 || r == R / 3) w[e * R + r] = 0;
    return w;
}
static Plan room_for_plan(const Backend *b, int E, int R, int S_max) {
    Plan p = {R, E, S_max, E, fresh(E + 1, 4), fresh(S_max, 4), fresh(S_max, 4),
        fresh(S_max, b->stat_size), fresh(R + 1, 4), fresh(S_max, 4)};
    return p;
}
static int slots_in(const double *w, int E, int R) {
    int S = 0;
    for (int i = 0; i < E * R; i++) S += w[i] != 0;
    return S;
}
// slot of (e, r): those of the experts before it, then those of the rows before it
static int slot_of(const double *w, int e, int r, int R) { return slots_in(w, 1, e * R + r); }

// p must be the plan of table w.
static void check_plan(const Backend *b, const Plan *p, const double *w, const char *what) {
    const int R = p->rows;
    int listed = 0;
    for (int e = 0; e <= p->E; e++)
        check(p->offsets[e] == slots_in(w, e, R), "%s: expert %d starts at %d, not %d", what, e,
            p->offsets[e], slots_in(w, e, R));
    for (int r = 0; r < R; r++) {
        check(p->row_begin[r] == listed, "%s: row %d starts at %d, not %d", what, r,
            p->row_begin[r], listed);
        for (int e = 0; e < p->E; e++) {
            if (w[e * R + r] == 0) continue;
            const int s = slot_of(w, e, r, R);
            check(p->row[s] == r && p->expert[s] == e && get(b, p->weight, s) == w[e * R + r],
                "%s: slot %d: row %d, expert %d, weight %g, not %d, %d, %g", what, s, p->row[s],
                p->expert[s], get(b, p->weight, s), r, e, w[e * R + r]);
            check(p->slot[listed] == s, "%s: row %d has slot %d, not %d", what, r, p->slot[listed],
                s);
            listed++;
        }
    }
    check(p->row_begin[R] == listed, "%s: %d slots by row, not %d", what, p->row_begin[R], listed);
}
static Plan plan_of_table(const Backend *b, const double *w, int E, int R) {
    const int S = slots_in(w, E, R);
    Plan p = room_for_plan(b, E, R, S);
    for (int e = 0; e <= E; e++) p.offsets[e] = slots_in(w, e, R);
    for (int e = 0; e < E; e++)
        for (int r = 0; r < R; r++) {
            const int s = slot_of(w, e, r, R);
            if (w[e * R + r] == 0) continue;
            p.row[s] = r, p.expert[s] = e;
            put(b, p.weight, s, w[e * R + r]);
        }
    for (int r = 0, at = 0; r <= R; r++) {
        p.row_begin[r] = at;
        for (int e = 0; e < E && r < R; e++)
            if (w[e * R + r] != 0) p.slot[at++] = slot_of(w, e, r, R);
    }
    return p;
}
static int *shuffled(int n) {
    int *x = fresh(n, sizeof(int));
    for (int i = 0; i < n; i++) {
        const int j = below(i + 1);
        x[i] = i;
        x[i] = x[j], x[j] = i;
    }
    return x;
}
static void *exchange_scratch(const Backend *b, int E, int R) {
    const Config c = config(2, 1, 4, 1, 1, 2, E, E, 1);
    const ScratchShape shape = {1, 1, 1, E * R, 1, R, 0};
    return fresh(b->scratch_bytes(&c, &shape), 1);
}

// Rows first .. first + R - 1 of a table, experts in order.
static double *part_of_table(const double *w, int E, int all, const int *order, int first, int R) {
    double *part = fresh((size_t)E * R, sizeof *part);
    for (int q = 0; q < E; q++)
        for (int r = 0; r < R; r++) part[q * R + r] = w[(order ? order[q] : q) * all + first + r];
    return part;
}

static void test_parts(void) {
    const Backend *b = backend_f64();
    if (!begin("ranks/parts")) return;
    for (int trial = 0; trial < 40; trial++) {
        const int mark = pooled, E = 1 + below(9), all = 1 + below(50);
        const int first = trial % 4 ? below(all) : 0;
        const int R = trial % 4 == 1 ? all - first : 1 + below(all - first);
        const int *order = trial % 2 ? shuffled(E) : NULL;
        const double *w = random_table(E, all, 10 + below(90));
        const Plan whole = plan_of_table(b, w, E, all);
        const double *want = part_of_table(w, E, all, order, first, R);
        const int S = slots_in(want, E, R);
        Plan p = room_for_plan(b, E, R, S);
        int *from = fresh(S, sizeof(int));
        b->plan_part(&p, from, &whole, order, first, exchange_scratch(b, E, all));
        check_plan(b, &p, want, "part");
        for (int q = 0; q < E; q++)
            for (int r = 0; r < R; r++) {
                const int s = slot_of(want, q, r, R);
                if (want[q * R + r] == 0) continue;
                const int source = slot_of(w, order ? order[q] : q, first + r, all);
                check(from[s] == source, "slot %d is from %d, not %d", s, from[s], source);
            }
        release_to(mark);
    }
    finish();
}

typedef struct Items {
    int *item, *row, *begin, *at, *count;
} Items;
static Items items_of(const Backend *b, const Plan *p, int parts) {
    const int S = p->offsets[p->E], most = parts * p->rows;
    Items x = {fresh(S, 4), fresh(most, 4), fresh(p->rows + 1, 4), fresh(most, 4), fresh(parts, 4)};
    b->plan_items(
        x.item, x.row, x.begin, x.at, x.count, p, parts, exchange_scratch(b, p->E, p->rows));
    return x;
}
static int has_slot(const double *w, int group, int each, int r, int R) {
    int any = 0;
    for (int e = group * each; e < (group + 1) * each; e++) any |= w[e * R + r] != 0;
    return any;
}

static void test_items(void) {
    const Backend *b = backend_f64();
    if (!begin("ranks/items")) return;
    for (int trial = 0; trial < 40; trial++) {
        const int mark = pooled, parts = 1 + below(5), each = 1 + below(4), E = parts * each;
        const int R = 1 + below(40);
        const double *w = random_table(E, R, 10 + below(90));
        const Plan p = plan_of_table(b, w, E, R);
        const Items x = items_of(b, &p, parts);
        int *seen = fresh(R, sizeof(int)), total = 0; // items of a row, in the groups so far
        memset(seen, 0, R * sizeof(int));
        for (int g = 0; g < parts; g++) {
            int number = 0;
            for (int r = 0; r < R; r++) {
                int first = 1;
                if (!has_slot(w, g, each, r, R)) continue;
                check(x.row[total + number] == r, "group %d, item %d: row %d, not %d", g, number,
                    x.row[total + number], r);
                check(x.at[x.begin[r] + seen[r]] == total + number, "row %d lists %d, not %d", r,
                    x.at[x.begin[r] + seen[r]], total + number);
                for (int e = g * each; e < (g + 1) * each; e++) {
                    if (w[e * R + r] == 0) continue;
                    const int got = x.item[slot_of(w, e, r, R)];
                    check(got == (first ? number : ~number), "expert %d, row %d: item %d, not %d",
                        e, r, got, first ? number : ~number);
                    first = 0;
                }
                seen[r]++;
                number++;
            }
            check(x.count[g] == number, "group %d has %d items, not %d", g, x.count[g], number);
            total += number;
        }
        for (int r = 0; r < R; r++)
            check(x.begin[r + 1] - x.begin[r] == seen[r], "row %d has %d items, not %d", r,
                x.begin[r + 1] - x.begin[r], seen[r]);
        check(x.begin[0] == 0 && x.begin[R] == total, "%d items, not %d", x.begin[R], total);
        release_to(mark);
    }
    finish();
}

// A slot, a row: without items, each slot of a source is a row of its own.
static void test_merge_slots(void) {
    enum { E = 3, n = 3, ROWS = 2 + 0 + 4, S = 6 };
    const Backend *b = backend_f64();
    const int mark = pooled;
    // sources have experts 0 .. 3; ours are 3, 0 and 1 of them. Slots of expert 2 are not ours
    const int offsets[n][5] = {{0, 1, 1, 1, 2}, {4, 4, 4, 4, 4}, {1, 2, 4, 4, 5}};
    const int start[n] = {0, -1, 1}, base[n] = {0, -2, 1}, which[E] = {3, 0, 1};
    const double weight[S + 1] = {1, 2, 3, 4, 5, 6, NAN};
    // rows: 0 and 1 of source 0; 2 .. 5 of source 2, whose own numbers are 1 .. 4
    const double want[E][ROWS] = {{0, 2, 0, 0, 0, 6}, {1, 0, 3, 0, 0, 0}, {0, 0, 0, 4, 5, 0}};
    double back[S + 1], values[S];
    if (!begin("ranks/merge")) return;
    Plan p = room_for_plan(b, E, ROWS, S);
    b->plan_merge(
        &p, NULL, weight, offsets[0], start, base, which, n, 5, exchange_scratch(b, E, ROWS));
    check_plan(b, &p, want[0], "merged");
    for (int s = 0; s < S; s++) values[s] = 10 * get(b, p.weight, s);
    for (int s = 0; s <= S; s++) back[s] = -1;
    b->plan_unmerge(back, values, &p, offsets[0], start, which, n, 5);
    for (int s = 0; s < S; s++) check(back[s] == 10 * weight[s], "slot %d: %g", s, back[s]);
    check(back[S] == -1, "wrote where no slot came from");
    release_to(mark);
    finish();
}

/* n ranks, each with some rows of a plan of all rows, own the experts of a group each, in an order
   that is not theirs. Rows travel as items; what an expert makes of (row, expert) comes back to the
   slot, what the owner adds up for a row comes back to the row. */
static void test_exchange_of(int n, int each, int rows, int percent) {
    const Backend *b = backend_f64();
    const int E = n * each, all = n * rows, C = 3;
    const double *w = random_table(E, all, percent);
    const Plan whole = plan_of_table(b, w, E, all);
    const int *order = shuffled(E);
    double *X = fresh((size_t)all * C, 8), *value = fresh(whole.S_max, 8);
    Plan *part = fresh(n, sizeof(Plan));
    Items *x = fresh(n, sizeof(Items));
    int **from = fresh(n, sizeof(int *));
    double **returned = fresh(n, sizeof(double *)), **slot_value = fresh(n, sizeof(double *));
    for (int i = 0; i < all * C; i++) X[i] = i;
    for (int i = 0; i < n; i++) {
        part[i] = room_for_plan(b, E, rows, whole.S_max);
        from[i] = fresh(whole.S_max, sizeof(int));
        b->plan_part(&part[i], from[i], &whole, order, i * rows, exchange_scratch(b, E, all));
        x[i] = items_of(b, &part[i], n);
        returned[i] = fresh((size_t)n * rows * C, 8);
        slot_value[i] = fresh(whole.S_max, 8);
    }
    for (int g = 0; g < n; g++) { // what the owner of group g gets, does and sends back
        int *offsets = fresh((size_t)n * (E + 1), 4), *item = fresh(whole.S_max, 4);
        int *start = fresh(n, 4), *base = fresh(n, 4), *which = fresh(each, 4), at = 0, items = 0;
        double *weight = fresh(whole.S_max, 8), *got = fresh((size_t)all * C, 8);
        double *want = fresh((size_t)each * all, 8), *made = fresh((size_t)all * C, 8);
        for (int e = 0; e < each; e++) which[e] = g * each + e;
        memset(want, 0, (size_t)each * all * 8);
        for (int i = 0; i < n; i++) {
            const Plan *p = &part[i];
            const int s0 = p->offsets[g * each], S = p->offsets[(g + 1) * each] - s0;
            int before = 0, number = 0;
            for (int h = 0; h < g; h++) before += x[i].count[h];
            memcpy(offsets + i * (E + 1), p->offsets, (E + 1) * sizeof(int));
            memcpy(item + at, x[i].item + s0, S * sizeof(int));
            memcpy(weight + at, (double *)p->weight + s0, S * sizeof(double));
            start[i] = at - s0, base[i] = items;
            b->copy_rows(got + (size_t)items * C, F64, NULL, X + (size_t)i * rows * C, F64,
                x[i].row + before, x[i].count[g], C);
            for (int r = 0; r < rows; r++) {
                int any = 0;
                for (int e = 0; e < each; e++) {
                    const double v = w[order[g * each + e] * all + i * rows + r];
                    want[e * all + items + number] = v;
                    any |= v != 0;
                }
                if (any)
                    for (int c = 0; c < C; c++)
                        check(got[(size_t)(items + number) * C + c] == X[(i * rows + r) * C + c],
                            "group %d: row %d of rank %d did not come", g, r, i);
                number += any;
            }
            check(number == x[i].count[g], "group %d: %d items of rank %d", g, number, i);
            at += S, items += x[i].count[g];
        }
        for (int e = 0; e < each; e++) // the table, as narrow as there are items
            memmove(want + e * items, want + e * all, items * sizeof(double));
        Plan p = room_for_plan(b, each, items, at);
        b->plan_merge(
            &p, item, weight, offsets, start, base, which, n, E + 1, exchange_scratch(b, E, all));
        check_plan(b, &p, want, "merged");
        double *values = fresh(at, 8), *back = fresh(at, 8);
        memset(made, 0, (size_t)all * C * 8);
        for (int s = 0; s < at; s++) {
            const double *row = got + (size_t)p.row[s] * C;
            const int e = order[g * each + p.expert[s]];
            values[s] = row[0] * E + e;
            for (int c = 0; c < C; c++)
                made[p.row[s] * C + c] += get(b, p.weight, s) * (e + 1) * (row[c] + 1);
        }
        b->plan_unmerge(back, values, &p, offsets, start, which, n, E + 1);
        for (int i = 0; i < n; i++) {
            const int s0 = part[i].offsets[g * each], S = part[i].offsets[(g + 1) * each] - s0;
            int before = 0;
            for (int h = 0; h < g; h++) before += x[i].count[h];
            memcpy(slot_value[i] + s0, back + start[i] + s0, S * sizeof(double));
            memcpy(
                returned[i] + before * C, made + base[i] * C, x[i].count[g] * C * sizeof(double));
        }
    }
    for (int i = 0; i < n; i++) {
        double *sum = fresh((size_t)rows * C, 8);
        b->scatter(value, slot_value[i], from[i], &part[i]);
        b->sum_rows(sum, returned[i], F64, x[i].begin, x[i].at, 0, rows, C);
        for (int r = i * rows; r < (i + 1) * rows; r++)
            for (int c = 0; c < C; c++) {
                double want = 0;
                for (int e = 0; e < E; e++) want += w[e * all + r] * (e + 1) * (X[r * C + c] + 1);
                within(relative(sum[(r - i * rows) * C + c], want), 1e-12, "sum");
                check_measured[0] = 0;
            }
    }
    for (int s = 0; s < whole.S_max; s++)
        check(value[s] == X[whole.row[s] * C] * E + whole.expert[s],
            "slot %d of row %d, expert %d: %g came back", s, whole.row[s], whole.expert[s],
            value[s]);
}
static void test_exchange(void) {
    static const int ranks[] = {1, 2, 4};
    for (int i = 0; i < 3; i++) {
        const int mark = pooled;
        if (!begin("ranks/exchange/%d", ranks[i])) continue;
        for (int trial = 0; trial < 8; trial++)
            test_exchange_of(ranks[i], 1 + trial % 3, 1 + below(20), trial ? 20 + below(80) : 0);
        release_to(mark);
        finish();
    }
}

static void test_rows_moved(const Backend *b) {
    enum { N = 5, C = 3 };
    const int mark = pooled, from[N] = {2, ~4, 0, 2, ~0}, to[N] = {1, -1, 4, 0, -7};
    const DType type = b->act_type;
    if (!begin("ranks/rows-%s", type == F64 ? "double" : "float")) return;
    const double *x = normals(N * C, 1, 0);
    const void *in = on(b, x, N * C);
    uint16_t *half = fresh(N * C, 2), *half_out = fresh(N * C, 2);
    for (int given = 0; given < 4; given++)
        for (int types = 0; types < 4; types++) {
            void *out = fresh(N * C, b->act_size);
            for (int i = 0; i < N * C; i++) half[i] = bf16_of((float)x[i]);
            memset(half_out, 0xFF, N * C * 2);
            b->copy_rows(types & 1 ? half_out : out, types & 1 ? BF16 : type, given & 1 ? to : NULL,
                types & 2 ? (const void *)half : in, types & 2 ? BF16 : type,
                given & 2 ? from : NULL, N, C);
            for (int r = 0; r < N; r++) { // who writes row r?
                int source = -1;
                for (int i = 0; i < N; i++)
                    if ((given & 1 ? to[i] : i) == r)
                        source = !(given & 2) ? i : from[i] < 0 ? ~from[i] : from[i];
                for (int c = 0; c < C; c++) {
                    const double got = types & 1 ? (double)float_of_bf16(half_out[r * C + c])
                                                 : get(b, out, r * C + c);
                    double want = source < 0 ? NAN : x[source * C + c];
                    if (types) want = (double)float_of_bf16(bf16_of((float)want));
                    check(got == want || (source < 0 && isnan(got)), "row %d: %g, not %g", r, got,
                        want);
                }
            }
        }
    // in the order given: in another one the large ones do not cancel before the small one is added
    const double y[4] = {1e30, 1, -1e30, 3};
    const int begin_[4] = {0, 3, 3, 4}, at[4] = {0, 2, 1, 3};
    const void *many = on(b, y, 4);
    void *out = fresh(3, b->act_size);
    b->sum_rows(out, many, type, begin_, at, 0, 3, 1);
    check(get(b, out, 0) == 1 && get(b, out, 1) == 0 && get(b, out, 2) == 3, "sums %g, %g, %g",
        get(b, out, 0), get(b, out, 1), get(b, out, 2));
    b->sum_rows(out, many, type, NULL, NULL, 2, 2, 1); // rows 0 and 2, 1 and 3
    check(get(b, out, 0) == 0 && get(b, out, 1) == 4, "%g, %g", get(b, out, 0), get(b, out, 1));
    for (int i = 0; i < 4; i++) half[i] = bf16_of((float)(i + 1));
    b->sum_rows(out, half, BF16, NULL, NULL, 2, 2, 1);
    check(get(b, out, 0) == 4 && get(b, out, 1) == 6, "%g, %g", get(b, out, 0), get(b, out, 1));
    release_to(mark);
    finish();
}

// -------------------------------------------------------------------------------------------------
// halves

typedef struct Half { // of a batch, or all of it
    double *logits, *lse, *weight, *sums, *dX;
    int *idx, *count;
    Plan plan;
} Half;
static Half route_half(const double *X, Mat Wr, const double *bias, Router r, double *loss_sum,
    int *count_sum, void *scratch) {
    const Backend *b = backend_f64();
    const int N = r.N, E = r.E, K = r.K;
    StepState st = {0};
    Half h = {fresh((size_t)N * E, 8), fresh(N, 8), fresh((size_t)N * K, 8), fresh(E + 1, 8),
        fresh((size_t)N * r.C, 8), fresh((size_t)N * K, 4), fresh(E, 4),
        room_for_plan(b, E, N, N * K)};
    memset(h.dX, 0, (size_t)N * r.C * 8);
    b->router_forward(h.logits, h.lse, h.idx, h.weight, h.count, loss_sum, count_sum, h.sums, X, Wr,
        bias, r, 0, &st, 0, scratch);
    b->plan_topk(&h.plan, h.idx, h.weight, h.count, N, K, E, scratch);
    return h;
}
static void test_router_halves(int kind) {
    enum { N = 200, FIRST = 130, C = 6, E = 5, K = 2 };
    static const char *const kind_name[] = {"softmax", "sigmoid"};
    const Backend *b = backend_f64();
    const int mark = pooled;
    if (!begin("ranks/router-%s", kind_name[kind])) return;
    const Config c = config(2, 1, C, 1, 1, 2, E, K, 1);
    const ScratchShape shape = {1, N, N, N * K, 1, 0, 0};
    void *scratch = fresh(b->scratch_bytes(&c, &shape), 1);
    const double *X = normals(N * C, 1, 0), *bias = normals(E, 0.1, 0);
    const Mat Wr = mat(b, normals(E * C, 0.7, 0), 1, E, C);
    const double *by_choice = normals(N * K, 1, 0); // dS of (row, k)
    double loss[2] = {0.5, 0.25}, whole_loss[2] = {0.5, 0.25};
    int load[E] = {3, 1, 4, 1, 5}, whole_load[E] = {3, 1, 4, 1, 5};
    Router r = {kind, N, C, E, K, 1, 20, 7, N, 0, 0};
    const Half whole = route_half(X, Wr, bias, r, whole_loss, whole_load, scratch);
    const int first[2] = {0, FIRST}, rows[2] = {FIRST, N - FIRST};
    Half half[2];
    r.all = N;
    for (int i = 0; i < 2; i++) {
        r.N = rows[i];
        half[i] = route_half(X + first[i] * C, Wr, bias, r, NULL, NULL, scratch);
    }
    double sums[E + 1];
    int count[E];
    for (int e = 0; e <= E; e++) sums[e] = half[0].sums[e] + half[1].sums[e];
    for (int e = 0; e < E; e++) count[e] = half[0].count[e] + half[1].count[e];
    b->router_balance(loss, load, count, sums, r);
    within(error_of(b, sums, whole.sums, E + 1), 1e-12, "sums");
    within(relative(loss[0], whole_loss[0]), 1e-12, "balance");
    within(relative(loss[1], whole_loss[1]), 1e-12, "z");
    const int before[E] = {3, 1, 4, 1, 5};
    double balance = 0.5;
    for (int e = 0; e < E; e++) {
        balance += E * (double)whole.count[e] / (N * K) * whole.sums[e] / N;
        check(load[e] == before[e] + whole.count[e] && whole_load[e] == load[e],
            "expert %d: load %d, of the whole %d", e, load[e], whole_load[e]);
    }
    within(relative(loss[0], balance), 1e-12, "formula");
    within(relative(loss[1], 0.25 + whole.sums[E] / N), 1e-12, "formula of z");
    double *dWr = fresh(E * C, 8), *whole_dWr = fresh(E * C, 8), *dX = fresh(N * C, 8);
    memset(dWr, 0, E * C * 8), memset(whole_dWr, 0, E * C * 8);
    for (int i = 0; i < 3; i++) { // the halves, then the whole
        const Half *h = i < 2 ? &half[i] : &whole;
        const int n0 = i < 2 ? first[i] : 0, R = i < 2 ? rows[i] : N;
        double *dS = fresh(R * K, 8);
        for (int n = 0; n < R; n++)
            for (int k = 0; k < K; k++)
                for (int j = 0; j < K; j++) {
                    const int s = h->plan.slot[n * K + j];
                    if (h->plan.expert[s] == h->idx[n * K + k]) dS[s] = by_choice[(n0 + n) * K + k];
                }
        r.N = R, r.all = i < 2 ? N : 0;
        b->router_backward(h->dX, i < 2 ? dWr : whole_dWr, dS, &h->plan, h->logits, h->lse, h->idx,
            h->weight, i < 2 ? count : whole.count, X + n0 * C, Wr, r, scratch);
        if (i < 2) memcpy(dX + n0 * C, h->dX, R * C * sizeof(double));
    }
    within(error_of(b, dX, whole.dX, N * C), 1e-12, "dX");
    within(error_of(b, dWr, whole_dWr, E * C), 1e-12, "dWr");
    release_to(mark);
    finish();
}

static void test_norm_halves(void) {
    enum { N = 3000 };
    const Backend *b = backend_f64();
    const Segment seg[4] = {
        {0, 100, 1, 0}, {128, 900, 1, 100}, {1100, 7, 0, 1000}, {1200, 1800, 1, 1007}};
    const int mark = pooled;
    void *scratch = fresh(4 * 16, 8);
    if (begin("ranks/norm")) {
        const double *g = normals(N, 1, 0), limits[] = {2, 1e6, 0};
        for (int i = 0; i < 3; i++) {
            StepState whole = {0}, half[2] = {{0}, {0}};
            b->grad_norm(&whole, g, seg, 4, limits[i], scratch);
            for (int h = 0; h < 2; h++) b->grad_norm(&half[h], g, seg + 2 * h, 2, 0, scratch);
            half[0].square = half[1].square = half[0].square + half[1].square;
            for (int h = 0; h < 2; h++) {
                b->clip_norm(&half[h], limits[i]);
                within(relative(half[h].grad_norm, whole.grad_norm), 1e-14, "norm");
                within(relative(half[h].clip, whole.clip), 1e-14, "clip");
                check(!half[h].bad, "bad %d", half[h].bad);
            }
            check((whole.clip < 1) == (i == 0), "clip %g", whole.clip);
        }
        finish();
    }
    if (begin("ranks/norm-bad")) { // what is bad on one rank is known to the other
        for (int bad = 0; bad < 3; bad++) {
            double *g = normals(N, 1, 0);
            StepState half[2] = {{0}, {0}};
            if (bad == 0) g[1103] = INFINITY;
            if (bad == 1) g[1103] = NAN;
            if (bad == 2) half[1].bad = BAD_LOSS, half[1].bad_index = 9; // gradients are finite
            for (int h = 0; h < 2; h++) b->grad_norm(&half[h], g, seg + 2 * h, 2, 0, scratch);
            check(isfinite(half[0].square) && isnan(half[1].square), "squares %g, %g",
                half[0].square, half[1].square);
            half[0].square = half[1].square = half[0].square + half[1].square;
            for (int h = 0; h < 2; h++) b->clip_norm(&half[h], 1);
            check(half[0].bad == BAD_ELSEWHERE, "bad %d on the other rank", half[0].bad);
            check(half[1].bad == (bad == 2 ? BAD_LOSS : BAD_GRADIENT) &&
                    half[1].bad_index == (bad == 2 ? 9 : 0),
                "bad %d, at %lld", half[1].bad, (long long)half[1].bad_index);
        }
        finish();
    }
    release_to(mark);
}

// Moments side by side, or at the places of the weights: the same weights.
static void test_compact_moments(const Backend *b) {
    enum { N = 3000, PARTS = 3 };
    const Segment near[PARTS] = {{3, 100, 1, 0}, {128, 901, 0, 100}, {1200, 1700, 1, 1001}};
    const OptimConfig o = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.3};
    const int mark = pooled;
    if (!begin("ranks/moments-%s", b->act_type == F64 ? "double" : "float")) return;
    Segment far[PARTS];
    const double *x = normals(N, 1, 0), *zero = normals(N, 0, 0);
    void *p[2] = {on(b, x, N), on(b, x, N)}, *m[2], *v[2];
    const size_t count[2] = {N, 2701}; // elements of the moments: exactly as many as there are
    for (int i = 0; i < PARTS; i++) far[i] = near[i], far[i].moment = far[i].offset;
    for (int i = 0; i < 2; i++) m[i] = on(b, zero, count[i]), v[i] = on(b, zero, count[i]);
    for (int step = 1; step <= 3; step++) {
        const StepState st = {
            .clip = 0.5, .lr = 0.1, .beta1_correction = 0.2, .beta2_correction = 0.3};
        const void *g = on(b, normals(N, 1, 0), N);
        for (int i = 0; i < 2; i++) b->update(p[i], g, m[i], v[i], i ? near : far, PARTS, &st, o);
    }
    check(!memcmp(p[0], p[1], N * b->param_size), "other weights");
    for (int i = 0; i < PARTS; i++)
        for (size_t k = 0; k < near[i].count; k++) {
            const size_t at = near[i].moment + k, wide = near[i].offset + k;
            check(get(b, m[1], at) == get(b, m[0], wide) &&
                    get(b, v[1], at) == get(b, v[0], wide) && get(b, m[1], at) != 0,
                "part %d, element %zu: other moments", i, k);
        }
    release_to(mark);
    finish();
}

static void test_between_ranks(void) {
    test_parts();
    test_items();
    test_merge_slots();
    test_exchange();
    test_rows_moved(backend_cpu());
    test_rows_moved(backend_f64());
    for (int kind = 0; kind < 2; kind++) test_router_halves(kind);
    test_norm_halves();
    test_compact_moments(backend_cpu());
    test_compact_moments(backend_f64());
}

#endif
