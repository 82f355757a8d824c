/* test_comm.c: ranks. ./test_comm, from the root, runs every check, one line each on stdout:
     ok NAME | FAIL NAME: reason
   and exits with status 1 if one failed. ./test_comm WORD runs those whose name contains WORD.
   Alone it tests what one rank and a dry one do; under `mpirun -n W` all W ranks run the same
   checks, rank 0 prints, and a check fails if it does on any rank. data/test_ranks.sh starts it in
   both ways.

   Every collective is compared, bit by bit, with a plain computation: each rank makes the data of
   all ranks from counters and adds them up in order. The MPI calls are wrapped (MPI lets a program
   define MPI_x and call PMPI_x): so bytes are counted where they leave, messages are seen to be
   cut, and at random a test says "nothing has arrived yet".

   ./test_comm how HOW RANK is for data/test_ranks.sh: rank RANK does something bad (see
   misbehave), and the others must end. ./test_comm big moves messages of more than INT_MAX bytes:
   it takes about 14 GB of memory and is run by hand. ./test_comm build says whether it was built
   with MPI. */
#include "moe.h"

static int allocations; // of comm.h, since the start
static void *counted_realloc(void *p, size_t n) {
    allocations++;
    return realloc(p, n);
}
#define realloc counted_realloc
#include "comm.h"
#undef realloc
#include "test_report.h"

static Comm world;
static int W = 1, me;

// -------------------------------------------------------------------------------------------------
// MPI, watched

static uint64_t mpi_sent;       // bytes in messages to other ranks
static size_t mpi_longest;      // bytes
static int mpi_calls, mpi_late; // calls since the start; 1: completions come late, at random
static uint64_t late_state = 1;

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

#ifdef USE_MPI
int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    mpi_calls++;
    return PMPI_Init_thread(argc, argv, required, provided);
}
int MPI_Isend(
    const void *p, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request) {
    mpi_calls++;
    mpi_sent += (uint64_t)n;
    if ((size_t)n > mpi_longest) mpi_longest = (size_t)n;
    return PMPI_Isend(p, n, type, to, tag, comm, request);
}
int MPI_Irecv(
    void *p, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request *request) {
    mpi_calls++;
    return PMPI_Irecv(p, n, type, from, tag, comm, request);
}
int MPI_Testsome(int n, MPI_Request request[], int *done, int which[], MPI_Status status[]) {
    mpi_calls++;
    if (mpi_late && mix(late_state++) % 4) return *done = 0, MPI_SUCCESS;
    return PMPI_Testsome(n, request, done, which, status);
}
int MPI_Abort(MPI_Comm comm, int status) {
    fprintf(stderr, "MPI_Abort: status %d\n", status);
    return PMPI_Abort(comm, status);
}
int MPI_Finalize(void) {
    mpi_calls++;
    return PMPI_Finalize();
}
#endif

// -------------------------------------------------------------------------------------------------
// data, and what must become of them

static const char *const type_names[] = {"f32", "f64", "i32", "i64"};
static const char *const op_names[] = {"sum", "max"};

// Element i of what rank r has in operation `salt`: of either sign and of many sizes.
static void put_value(void *p, CommType type, int r, uint64_t salt, size_t i) {
    const uint64_t h = mix(mix(salt * 64 + (uint64_t)r + 1) + i);
    const double d = ((double)(h >> 40) - 8388608.0) / (double)(1 << (h & 15));
    const int32_t narrow = (int32_t)(uint32_t)h;
    const int64_t wide = (int64_t)h;
    const float f = (float)d;
    const double f64 = d * (1 + (double)(h >> 20 & 0xFFFFF) * 0x1p-50);
    switch (type) {
    case COMM_F32: memcpy(p, &f, 4); break;
    case COMM_F64: memcpy(p, &f64, 8); break;
    case COMM_I32: memcpy(p, &narrow, 4); break;
    case COMM_I64: memcpy(p, &wide, 8); break;
    }
}
static void fill(void *p, CommType type, int r, uint64_t salt, size_t begin, size_t n) {
    for (size_t i = 0; i < n; i++)
        put_value((char *)p + i * comm_type_size(type), type, r, salt, begin + i);
}
static void fill_bytes(unsigned char *p, size_t n, int r, uint64_t salt) {
    for (size_t i = 0; i < n; i++) p[i] = (unsigned char)mix(salt * 64 + (uint64_t)r + 1 + i * 977);
}

static void combine(void *acc, const void *x, CommType type, CommOp op) {
    float a, b;
    double c, d;
    uint32_t i, j;
    uint64_t k, l;
    switch (type) {
    case COMM_F32:
        memcpy(&a, acc, 4), memcpy(&b, x, 4);
        a = op == COMM_SUM ? a + b : b > a ? b : a;
        memcpy(acc, &a, 4);
        break;
    case COMM_F64:
        memcpy(&c, acc, 8), memcpy(&d, x, 8);
        c = op == COMM_SUM ? c + d : d > c ? d : c;
        memcpy(acc, &c, 8);
        break;
    case COMM_I32:
        memcpy(&i, acc, 4), memcpy(&j, x, 4);
        i = op == COMM_SUM ? i + j : (int32_t)j > (int32_t)i ? j : i;
        memcpy(acc, &i, 4);
        break;
    case COMM_I64:
        memcpy(&k, acc, 8), memcpy(&l, x, 8);
        k = op == COMM_SUM ? k + l : (int64_t)l > (int64_t)k ? l : k;
        memcpy(acc, &k, 8);
        break;
    }
}

// Elements begin .. begin+n-1 of the reduction over the members of a group, in its order.
static void expect(void *out, const Comm *c, CommType type, CommOp op, uint64_t salt, size_t begin,
    size_t n, int backwards) {
    char x[8];
    for (size_t i = 0; i < n; i++) {
        char *acc = (char *)out + i * comm_type_size(type);
        for (int r = 0; r < c->size; r++) {
            const int member = c->member[backwards ? c->size - 1 - r : r];
            put_value(r ? x : acc, type, member, salt, begin + i);
            if (r) combine(acc, x, type, op);
        }
    }
}

enum { GUARD = 64 };
/* Memory of exactly n bytes, poisoned, with a guard behind it that must stay. */
static void *buffer(size_t n) {
    unsigned char *p = malloc(n + GUARD);
    must(p != NULL, "memory");
    memset(p, 0xFF, n);
    memset(p + n, 0xA5, GUARD);
    return p;
}
static void guarded(const void *p, size_t n) {
    for (size_t i = 0; i < GUARD; i++)
        check(((const unsigned char *)p)[n + i] == 0xA5, "byte %zu behind the end of %zu", i, n);
}
static void release(void *p, size_t n) {
    guarded(p, n);
    free(p);
}

// Settings that cut everything small, so that the usual sizes take many messages and rounds.
static void cut(size_t message, size_t scratch) {
    world.world->message = message ? message : COMM_MESSAGE_BYTES;
    world.world->scratch = scratch ? scratch : COMM_SCRATCH_BYTES;
}
static const size_t cuts[][2] = {{0, 0}, {1000, 4096}, {64, 1}, {0, 65536}};

// -------------------------------------------------------------------------------------------------
// each collective

static int different; // bits that a sum in another order would have had

static void reduce_one(Comm *c, size_t n, CommType type, CommOp op, uint64_t salt) {
    const size_t bytes = n * comm_type_size(type);
    void *buf = buffer(bytes), *want = buffer(bytes);
    fill(buf, type, world.rank, salt, 0, n);
    expect(want, c, type, op, salt, 0, n, 1);
    comm_all_reduce(c, buf, n, type, op);
    different += memcmp(buf, want, bytes) != 0;
    expect(want, c, type, op, salt, 0, n, 0);
    check(!memcmp(buf, want, bytes), "%zu elements differ from a plain sum", n);
    release(buf, bytes);
    release(want, bytes);
}

static void test_all_reduce(void) {
    static const size_t sizes[] = {0, 1, 2, 3, 5, 255, 511, 512, 513, 1000, 4099, 20011};
    for (int type = 0; type < 4; type++)
        for (int op = 0; op < 2; op++) {
            if (!begin("ranks_%d/all_reduce/%s_%s", W, type_names[type], op_names[op])) continue;
            different = 0;
            for (size_t k = 0; k < COUNT(cuts); k++) {
                cut(cuts[k][0], cuts[k][1]);
                for (size_t s = 0; s < COUNT(sizes); s++)
                    reduce_one(&world, sizes[s], (CommType)type, (CommOp)op, 100 + s);
            }
            cut(0, 0);
            if (W > 2 && type < 2 && op == COMM_SUM)
                check(different, "the data do not tell one order of adding from another");
            finish();
        }

    if (begin("ranks_%d/all_reduce/nan_is_the_largest", W)) {
        for (int r = 0; r < W; r++) {
            float x[3] = {1, (float)me, -1};
            double y[3] = {1, me, -1};
            if (me == r) x[1] = (float)(y[1] = strtod("nan", NULL));
            comm_all_reduce(&world, x, 3, COMM_F32, COMM_MAX);
            comm_all_reduce(&world, y, 3, COMM_F64, COMM_MAX);
            check(x[1] != x[1] && y[1] != y[1], "rank %d's NaN is lost", r);
            check(x[0] == 1 && x[2] == -1 && y[0] == 1 && y[2] == -1, "the others: %g %g", x[0],
                x[2]);
        }
        finish();
    }
}

// Random sizes; many are 0, and with `kind` those of one rank (1), of all others (2), of all (3).
static size_t random_count(uint64_t salt, int from, int to, int kind) {
    const uint64_t h = mix(mix(salt) + (uint64_t)(from * 64 + to));
    const int chosen = (int)(salt % (uint64_t)W);
    if (kind == 3 || (kind == 1 && to == chosen) || (kind == 2 && to != chosen)) return 0;
    return h % 3 == 0 ? 0 : h % 7 == 0 ? h >> 32 & 4095 : h >> 32 & 31;
}

static void scatter_one(Comm *c, CommType type, CommOp op, uint64_t salt, int kind, int in_place) {
    const size_t elem = comm_type_size(type);
    size_t counts[64] = {0}, all = 0, own = 0;
    for (int r = 0; r < c->size; r++) {
        counts[r] = random_count(salt, 0, r, kind);
        if (r == c->rank) own = all;
        all += counts[r];
    }
    const size_t mine = counts[c->rank];
    char *in = buffer(all * elem), *want = buffer(mine * elem), *copy = buffer(all * elem),
         *out = in_place ? in + own * elem : buffer(mine * elem);
    fill(in, type, world.rank, salt, 0, all);
    memcpy(copy, in, all * elem);
    expect(want, c, type, op, salt, own, mine, 0);
    comm_reduce_scatter(c, out, in, counts, type, op);
    check(!memcmp(out, want, mine * elem), "the block of %zu elements is wrong", mine);
    if (in_place) memcpy(copy + own * elem, want, mine * elem);
    check(!memcmp(in, copy, all * elem), "the input was changed");
    release(in, all * elem);
    release(copy, all * elem);
    release(want, mine * elem);
    if (!in_place) release(out, mine * elem);
}
static void test_reduce_scatter(void) {
    for (int type = 0; type < 4; type++) {
        if (!begin("ranks_%d/reduce_scatter/%s", W, type_names[type])) continue;
        for (size_t k = 0; k < COUNT(cuts); k++) {
            cut(cuts[k][0], cuts[k][1]);
            for (uint64_t salt = 0; salt < 24; salt++)
                scatter_one(&world, (CommType)type, (CommOp)(salt % 2), 1000 + salt,
                    (int)(salt % 6), salt / 2 % 2 == 0);
        }
        cut(0, 0);
        finish();
    }
}

static void gather_one(Comm *c, uint64_t salt, int kind, size_t elem, int in_place) {
    size_t counts[64] = {0}, all = 0, own = 0;
    for (int r = 0; r < c->size; r++) {
        counts[r] = kind < 0 ? salt % 97 : random_count(salt, 0, r, kind);
        if (r == c->rank) own = all * elem;
        all += counts[r];
    }
    const size_t mine = counts[c->rank] * elem, bytes = all * elem;
    unsigned char *out = buffer(bytes), *want = buffer(bytes),
                  *in = in_place ? out + own : buffer(mine), *p = want;
    for (int r = 0; r < c->size; p += counts[r++] * elem)
        fill_bytes(p, counts[r] * elem, c->member[r], salt);
    memcpy(in, want + own, mine);
    if (kind < 0)
        comm_all_gather(c, out, in, salt % 97, elem);
    else
        comm_all_gather_counts(c, out, in, counts, elem);
    check(!memcmp(out, want, bytes), "%zu elements of %zu bytes are wrong", all, elem);
    check(!memcmp(in, want + own, mine), "the input was changed");
    if (!in_place) release(in, mine);
    release(out, bytes);
    release(want, bytes);
}
static void test_all_gather(void) {
    static const size_t elem[] = {1, 4, 7, 24};
    for (int with_counts = 0; with_counts < 2; with_counts++) {
        if (!begin("ranks_%d/all_gather%s", W, with_counts ? "_counts" : "")) continue;
        for (size_t k = 0; k < COUNT(cuts); k++) {
            cut(cuts[k][0], cuts[k][1]);
            for (uint64_t salt = 0; salt < 32; salt++)
                gather_one(&world, 2000 + salt, with_counts ? (int)(salt % 5) : -1, elem[salt % 4],
                    salt / 4 % 2 == 0);
        }
        cut(0, 0);
        finish();
    }
}

typedef struct Exchange { // an all-to-all with its data and what must come of it
    size_t send[64], recv[64], in_bytes, out_bytes;
    unsigned char *in, *out, *want;
} Exchange;

static void exchange_make(Exchange *x, const Comm *c, uint64_t salt, int kind, size_t elem) {
    memset(x, 0, sizeof *x);
    for (int r = 0; r < c->size; r++) {
        x->in_bytes += elem * (x->send[r] = random_count(salt, c->rank, r, kind));
        x->out_bytes += elem * (x->recv[r] = random_count(salt, r, c->rank, kind));
    }
    unsigned char *p = x->in = buffer(x->in_bytes), *q = x->want = buffer(x->out_bytes);
    x->out = buffer(x->out_bytes);
    for (int r = 0; r < c->size; r++) {
        fill_bytes(p, x->send[r] * elem, c->member[c->rank], salt * 64 + (uint64_t)r);
        fill_bytes(q, x->recv[r] * elem, c->member[r], salt * 64 + (uint64_t)c->rank);
        p += x->send[r] * elem;
        q += x->recv[r] * elem;
    }
}
static void exchange_done(Exchange *x) {
    check(!memcmp(x->out, x->want, x->out_bytes), "%zu bytes: not what was sent", x->out_bytes);
    release(x->in, x->in_bytes);
    release(x->out, x->out_bytes);
    release(x->want, x->out_bytes);
}
static void exchange_one(Comm *c, uint64_t salt, int kind, size_t elem) {
    Exchange x;
    size_t recv[64] = {0};
    exchange_make(&x, c, salt, kind, elem);
    comm_exchange_counts(c, recv, x.send);
    check(!memcmp(recv, x.recv, (size_t)c->size * sizeof *recv), "wrong counts");
    comm_all_to_all(c, x.out, x.recv, x.in, x.send, elem);
    exchange_done(&x);
}
static void test_all_to_all(void) {
    static const size_t elem[] = {1, 4, 7, 96};
    for (int checked = 0; checked < 2; checked++) {
        if (!begin("ranks_%d/all_to_all%s", W, checked ? "_checked" : "")) continue;
        world.world->check = checked;
        for (size_t k = 0; k < COUNT(cuts); k++) {
            cut(cuts[k][0], cuts[k][1]);
            for (uint64_t salt = 0; salt < 40; salt++)
                exchange_one(&world, 3000 + salt, (int)(salt % 5), elem[salt % 4]);
        }
        cut(0, 0);
        world.world->check = COMM_CHECK;
        finish();
    }
}

static void test_broadcast(void) {
    static const size_t sizes[] = {0, 1, 2, 3, 100, 2048, 2049, 100003};
    if (!begin("ranks_%d/broadcast", W)) return;
    for (size_t k = 0; k < COUNT(cuts); k++) {
        cut(cuts[k][0], cuts[k][1]);
        for (int root = 0; root < W; root++)
            for (size_t s = 0; s < COUNT(sizes); s++) {
                unsigned char *p = buffer(sizes[s]), *want = buffer(sizes[s]);
                fill_bytes(want, sizes[s], root, s);
                if (me == root) memcpy(p, want, sizes[s]);
                comm_broadcast(&world, p, sizes[s], root);
                check(!memcmp(p, want, sizes[s]), "%zu bytes from rank %d", sizes[s], root);
                release(p, sizes[s]);
                release(want, sizes[s]);
            }
    }
    cut(0, 0);
    finish();
}

static void nap(double s) {
    const struct timespec t = {(time_t)s, (long)(1e9 * (s - (double)(time_t)s))};
    nanosleep(&t, NULL);
}

static void test_barrier(void) {
    CommCount n[COMM_KINDS];
    if (begin("ranks_%d/barrier", W)) {
        for (int late = 0; late < W; late++) { // nobody leaves before everybody has come
            if (me == late) nap(0.1);
            comm_counts_take(&world, n);
            const double mine = now_s();
            double came = mine;
            comm_barrier(&world);
            double left = -now_s();
            comm_counts_take(&world, n);
            const double waited = n[COMM_BARRIER].seconds;
            check(n[COMM_BARRIER].calls == 1 && n[COMM_BARRIER].bytes == 0, "miscounted");
            check(waited > 0 && waited <= -left - came + 1e-3, "counted %g s of %g", waited,
                -left - came);
            comm_all_reduce(&world, &came, 1, COMM_F64, COMM_MAX);
            check(came - mine < 0.05 || waited > (came - mine) / 2, "counted %g s of %g", waited,
                came - mine);
            comm_all_reduce(&world, &left, 1, COMM_F64, COMM_MAX);
            check(W == 1 || -left >= came, "a rank left %.6f s early", came + left);
        }
        finish();
    }
    if (begin("ranks_%d/agree", W)) {
        check(comm_agree(&world, 0) == 0, "nobody said anything");
        for (int r = 0; r < W; r++)
            check(comm_agree(&world, me == r ? 15 : 0) == 15, "rank %d is not heard", r);
        check(comm_agree(&world, -2 - me) == -2, "the largest of negative ones");
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// groups, and operations that overlap

static void all_kinds(Comm *c, uint64_t salt) {
    reduce_one(c, 7 + salt % 5, COMM_F32, COMM_SUM, salt);
    reduce_one(c, 3001, COMM_F64, COMM_SUM, salt);
    scatter_one(c, COMM_F32, COMM_SUM, salt, 0, 0);
    gather_one(c, salt, 0, 5, 0);
    gather_one(c, salt, -1, 4, 1);
    exchange_one(c, salt, 0, 12);
}

static void test_groups(void) {
    if (begin("ranks_%d/groups", W)) {
        Comm odd, back, half, none, inner;
        comm_split(&odd, &world, me % 2, 0);
        check(odd.size == (W + !(me % 2)) / 2 && odd.rank == me / 2, "rank %d of %d", odd.rank,
            odd.size);
        for (int r = 0; r < odd.size; r++) check(odd.member[r] == 2 * r + me % 2, "a wrong member");
        comm_split(&back, &world, 7, -me);
        check(back.size == W && back.rank == W - 1 - me, "rank %d by key", back.rank);
        int color[64] = {0}, key[64] = {0};
        for (int r = 0; r < W; r++) color[r] = r / 2, key[r] = 1 - r % 2;
        comm_split_known(&half, &world, color, key);
        check(half.size == (me == W - 1 && W % 2 ? 1 : 2), "size %d", half.size);
        check(half.rank >= 0 && half.member && half.member[half.rank] == me, "not a member");
        if (half.size == 2) check(half.member[0] == (me | 1), "not in the order of the keys");
        comm_split(&none, &world, me ? 1 : -1, 0);
        check(
            me ? none.size == W - 1 && none.rank == me - 1 : none.size == 0, "size %d", none.size);
        // each splits its own group on, as often as it likes; then all meet again
        for (int i = 0; i < (me % 2 ? 3 : 1); i++) {
            comm_split(&inner, &odd, odd.rank % 2, 0);
            all_kinds(&inner, 4000 + (uint64_t)i);
            comm_close(&inner);
        }
        comm_split(&inner, &back, 0, back.rank);
        all_kinds(&inner, 4010);
        all_kinds(&odd, 4020);
        all_kinds(&back, 4030);
        all_kinds(&half, 4040);
        if (me) all_kinds(&none, 4050);
        all_kinds(&world, 4060);
        comm_close(&inner);
        comm_close(&none);
        comm_close(&half);
        comm_close(&back);
        comm_close(&odd);
        finish();
    }
}

enum { FLYING = 24 };
static void test_overlap(void) {
    if (begin("ranks_%d/overlap/two", W)) {
        // a large sum and an exchange at once; odd ranks finish them the other way round
        const size_t n = 50021;
        for (uint64_t salt = 5000; salt < 5006; salt++) {
            Exchange x;
            float *buf = buffer(n * sizeof *buf), *want = buffer(n * sizeof *buf);
            fill(buf, COMM_F32, me, salt, 0, n);
            expect(want, &world, COMM_F32, COMM_SUM, salt, 0, n, 0);
            exchange_make(&x, &world, salt, 0, 40);
            cut(salt % 2 ? 1000 : 0, salt % 3 ? 0 : 5000);
            CommRequest *a = comm_all_reduce_start(&world, buf, n, COMM_F32, COMM_SUM);
            CommRequest *b = comm_all_to_all_start(&world, x.out, x.recv, x.in, x.send, 40);
            for (int i = 0; i < 3; i++) comm_poll(&world);
            comm_finish(me % 2 ? b : a);
            comm_finish(me % 2 ? a : b);
            comm_finish(NULL);
            check(!memcmp(buf, want, n * sizeof *buf), "the sum is wrong");
            exchange_done(&x);
            release(buf, n * sizeof *buf);
            release(want, n * sizeof *buf);
        }
        cut(0, 0);
        finish();
    }
    if (begin("ranks_%d/overlap/many", W)) {
        // sums in two groups at once, started in one order and finished in another on every rank
        Comm same, back, *group[2] = {&same, &back};
        comm_split(&same, &world, 0, 0);
        comm_split(&back, &world, 0, -me);
        for (int turn = 0; turn < 12; turn++) {
            CommRequest *q[FLYING];
            float *buf[FLYING], *want[FLYING];
            size_t bytes[FLYING];
            mpi_late = turn % 2;
            cut(0, turn % 3 ? 0 : 777);
            for (uint64_t i = 0; i < FLYING; i++) {
                const uint64_t salt = 6000 + (uint64_t)turn * FLYING + i;
                const size_t n = mix(salt) % 3 ? mix(salt) >> 50 & 2047 : 0;
                bytes[i] = n * sizeof(float);
                buf[i] = buffer(bytes[i]);
                want[i] = buffer(bytes[i]);
                fill(buf[i], COMM_F32, me, salt, 0, n);
                expect(want[i], group[i % 2], COMM_F32, COMM_SUM, salt, 0, n, 0);
                q[i] = comm_all_reduce_start(group[i % 2], buf[i], n, COMM_F32, COMM_SUM);
                if (mix(salt + (uint64_t)me) % 3 == 0) comm_poll(&world);
            }
            for (int i = FLYING - 1; i >= 0; i--) {
                const int j = (int)(mix((uint64_t)(turn * 64 + me * 8 + i)) % (uint64_t)(i + 1));
                CommRequest *swap = q[i];
                q[i] = q[j];
                q[j] = swap;
                comm_finish(q[i]);
            }
            for (int i = 0; i < FLYING; i++) {
                check(!memcmp(buf[i], want[i], bytes[i]), "sum %d of turn %d is wrong", i, turn);
                release(buf[i], bytes[i]);
                release(want[i], bytes[i]);
            }
        }
        cut(0, 0);
        mpi_late = 0;
        comm_close(&back);
        comm_close(&same);
        finish();
    }
    if (begin("ranks_%d/late_messages", W)) {
        mpi_late = 1;
        cut(100, 700);
        for (uint64_t salt = 0; salt < 6; salt++) {
            late_state = (uint64_t)me * 1000 + salt * 7777;
            all_kinds(&world, 7000 + salt);
        }
        cut(0, 0);
        mpi_late = 0;
        finish();
    }
    if (begin("ranks_%d/nothing_is_allocated_twice", W)) {
        int before = 0;
        for (int turn = 0; turn < 2; turn++) {
            before = allocations;
            for (uint64_t salt = 0; salt < 4; salt++) all_kinds(&world, 7100 + salt);
        }
        check(allocations == before, "%d allocations of sizes seen before", allocations - before);
        for (int i = 0; i < COMM_MAX_STARTED; i++)
            check(!world.world->request[i].active, "slot %d is still in use", i);
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// accounting

// A step as a trainer has it, on two groups; buffers may be NULL.
static void traffic(Comm *w, Comm *pair, void *buf, const size_t *send, const size_t *recv) {
    char *p = buf, *far = p ? p + 200000 : NULL;
    size_t counts[64] = {0}, got[64] = {0};
    for (int r = 0; r < w->size; r++) counts[r] = 100 * (size_t)r;
    comm_all_reduce(w, p, 5, COMM_F32, COMM_SUM);
    comm_all_reduce(w, p, 10007, COMM_F32, COMM_SUM);
    comm_all_reduce(pair, p, 3001, COMM_F64, COMM_MAX);
    comm_reduce_scatter(w, far, p, counts, COMM_F32, COMM_SUM);
    comm_all_gather(w, far, p, 33, 7);
    comm_all_gather_counts(w, far, p, counts, 4);
    comm_exchange_counts(w, got, send);
    comm_all_to_all(w, far, recv, p, send, 24);
    comm_broadcast(w, p, 1000, 0);
    comm_broadcast(w, p, 50001, w->size - 1);
    comm_finish(comm_all_gather_start(pair, far, p, 1000, 4));
    comm_barrier(w);
    comm_agree(w, 1);
}

static void test_accounting(void) {
    Comm pair, dry, dry_pair;
    CommCount real[2][COMM_KINDS], pretended[2][COMM_KINDS];
    size_t send[64] = {0}, recv[64] = {0}, sent = 0;
    int color[64] = {0}, key[64] = {0};
    for (int r = 0; r < W; r++) {
        color[r] = r % 2, key[r] = -r;
        send[r] = random_count(8000, me, r, 0);
        recv[r] = random_count(8000, r, me, 0);
        if (r != me) sent += 24 * send[r];
    }
    char *buf = calloc(2, 200000);
    must(buf != NULL, "memory");
    comm_open_dry(&dry, me, W);
    comm_split_known(&pair, &world, color, key);
    comm_split_known(&dry_pair, &dry, color, key);
    comm_counts_take(&world, real[0]);
    const uint64_t before = mpi_sent;
    world.world->check = 0;
    traffic(&world, &pair, buf, send, recv);
    world.world->check = COMM_CHECK;
    const uint64_t total = mpi_sent - before;
    comm_counts_take(&world, real[0]);
    comm_counts_take(&pair, real[1]);
    const int calls = mpi_calls;

    if (begin("ranks_%d/bytes/as_they_leave", W)) {
        uint64_t sum = 0;
        for (int g = 0; g < 2; g++)
            for (int k = 0; k < COMM_KINDS; k++) sum += real[g][k].bytes;
        check(sum == total, "%llu bytes counted, %llu sent", (unsigned long long)sum,
            (unsigned long long)total);
        check(W == 1 || total > 0, "nothing was sent");
        finish();
    }
    if (begin("ranks_%d/bytes/by_kind", W)) {
        // what each operation costs by its description
        const uint64_t w = (uint64_t)W - 1, m = (uint64_t)me, own = 100 * m,
                       share = comm_share(10007, W, me + 1) - comm_share(10007, W, me),
                       block = comm_share(50001, W, me + 1) - comm_share(50001, W, me);
        const CommCount *n = real[0];
        check(n[COMM_ALL_REDUCE].calls == 3, "calls: %d", (int)n[COMM_ALL_REDUCE].calls);
        check(n[COMM_ALL_REDUCE].bytes ==
                w * 24 + 4 * (10007 - share) + w * 4 * share * (W > 1) -
                    (W == 1 ? 4 * (10007 - share) : 0),
            "all-reduce: %llu", (unsigned long long)n[COMM_ALL_REDUCE].bytes);
        check(n[COMM_REDUCE_SCATTER].bytes == 4 * (50 * (uint64_t)W * w - own), "reduce-scatter");
        check(n[COMM_ALL_GATHER].bytes == w * (33 * 7 + 4 * own), "all-gather");
        check(n[COMM_COUNTS].bytes == w * 8, "counts");
        check(n[COMM_ALL_TO_ALL].bytes == sent, "all-to-all");
        const uint64_t large = W == 1 ? 0
            : W == 2                  ? (me == 1 ? 50001u : 0)
            : me == W - 1             ? 50001 - block + w * block
                                      : (w - 1) * block;
        check(n[COMM_BROADCAST].bytes == (me ? 0 : 1000 * w) + large, "broadcast: %llu",
            (unsigned long long)n[COMM_BROADCAST].bytes);
        check(n[COMM_BARRIER].bytes == 0 && n[COMM_BARRIER].calls == 1, "barrier");
        check(n[COMM_SETUP].bytes == 0 && n[COMM_SETUP].calls == 0, "setup");
        comm_counts_take(&world, real[0]);
        comm_counts_take(&world, real[0]);
        for (int k = 0; k < COMM_KINDS; k++)
            check(!real[0][k].calls && !real[0][k].bytes && real[0][k].seconds == 0, "not taken");
        finish();
    }

    comm_counts_take(&world, real[0]);
    comm_counts_take(&dry, pretended[0]);
    traffic(&world, &pair, buf, send, recv);
    const int quiet = mpi_calls - calls;
    comm_counts_take(&world, real[0]);
    comm_counts_take(&pair, real[1]);
    const int calls_before = mpi_calls;
    traffic(&dry, &dry_pair, NULL, send, recv);
    if (begin("ranks_%d/dry/as_real", W)) {
        comm_counts_take(&dry, pretended[0]);
        comm_counts_take(&dry_pair, pretended[1]);
        check(mpi_calls == calls_before, "a dry rank called MPI");
        check(W == 1 || quiet > 0, "the real one did not");
        for (int g = 0; g < 2; g++)
            for (int k = 0; k < COMM_KINDS; k++)
                check((COMM_CHECK && k == COMM_SETUP) ||
                        (real[g][k].calls == pretended[g][k].calls &&
                            real[g][k].bytes == pretended[g][k].bytes),
                    "%s: %llu bytes, dry %llu", comm_kind_names[k],
                    (unsigned long long)real[g][k].bytes,
                    (unsigned long long)pretended[g][k].bytes);
        finish();
    }
    if (begin("ranks_%d/messages_are_cut", W)) {
        mpi_longest = 0;
        cut(0, 0);
        traffic(&world, &pair, buf, send, recv);
        check(W == 1 || mpi_longest > 10000, "the longest has %zu bytes", mpi_longest);
        mpi_longest = 0;
        cut(1024, 0);
        traffic(&world, &pair, buf, send, recv);
        check(mpi_longest == (W > 1 ? 1024 : 0), "the longest has %zu bytes", mpi_longest);
        cut(0, 0);
        finish();
    }
    comm_close(&pair);
    comm_close(&dry_pair);
    comm_close(&dry);
    free(buf);
}

// What needs no other rank.
static void test_dry(void) {
    if (begin("ranks_%d/dry/64_ranks", W)) {
        Comm dry, expert, replica;
        CommCount n[COMM_KINDS];
        int block[64] = {0}, stride[64] = {0};
        size_t rows[64] = {0}, got[64] = {0};
        const int calls = mpi_calls;
        for (int r = 0; r < 64; r++) block[r] = r / 16, stride[r] = r % 16, rows[r] = 1u << 20;
        comm_open_dry(&dry, 37, 64);
        comm_split_known(&expert, &dry, block, NULL);
        comm_split_known(&replica, &dry, stride, NULL);
        check(expert.size == 16 && expert.rank == 5 && expert.member[0] == 32, "expert group");
        check(replica.size == 4 && replica.rank == 2 && replica.member[3] == 53, "replicas");
        // 16 TB of rows, sent by nobody
        comm_exchange_counts(&expert, got, rows);
        check(!memcmp(got, rows, 16 * sizeof *got), "as if all sent the same");
        comm_all_to_all(&expert, NULL, got, NULL, rows, 1u << 20);
        comm_all_reduce(&replica, NULL, (size_t)1 << 32, COMM_F32, COMM_SUM);
        comm_counts_take(&expert, n);
        check(n[COMM_ALL_TO_ALL].bytes == (uint64_t)15 << 40, "all-to-all");
        comm_counts_take(&replica, n);
        check(n[COMM_ALL_REDUCE].bytes == (uint64_t)6 << 32, "all-reduce");
        check(comm_agree(&dry, 3) == 3, "agree");
        check(mpi_calls == calls, "MPI was called");
        comm_close(&replica);
        comm_close(&expert);
        comm_close(&dry);
        finish();
    }
    if (begin("ranks_%d/shares", W)) {
        static const size_t sizes[] = {0, 1, 5, 63, 64, 65, SIZE_MAX / 2, SIZE_MAX};
        for (size_t s = 0; s < COUNT(sizes); s++)
            for (int size = 1; size < 65; size += 7) {
                check(comm_share(sizes[s], size, 0) == 0, "does not begin at 0");
                check(comm_share(sizes[s], size, size) == sizes[s], "does not end at the end");
                for (int r = 0; r < size; r++) {
                    const size_t n =
                        comm_share(sizes[s], size, r + 1) - comm_share(sizes[s], size, r);
                    check(n - sizes[s] / (size_t)size <= 1, "%zu of %zu", n, sizes[s]);
                }
            }
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// a device: memory that the host cannot read as it is, since every byte is stored inverted

static int device_live;
static void invert(void *dst, const void *src, size_t n) {
    for (size_t i = 0; i < n; i++) ((char *)dst)[i] = (char)~((const char *)src)[i];
}
static void *device_alloc(size_t n) { return device_live++, malloc(n + 1); }
static void device_release(void *p) { device_live--, free(p); }

static void test_device(void) {
    const CommDevice device = {device_alloc, device_release, invert, invert, NULL, 0};
    if (!begin("ranks_%d/device/staged", W)) return;
    Comm group, c;
    comm_split(&group, &world, 0, -me); // another order than the world's
    comm_on_device(&c, &group, &device);
    check(c.size == W && c.rank == W - 1 - me, "rank %d of %d", c.rank, c.size);
    for (uint64_t salt = 9000; salt < 9006; salt++) {
        const size_t n = salt % 2 ? 3001 : 17, bytes = 8 * n;
        Exchange x;
        char *host = buffer(bytes), *want = buffer(bytes);
        char *on = device_alloc(bytes);
        fill(host, COMM_F64, me, salt, 0, n);
        expect(want, &c, COMM_F64, COMM_SUM, salt, 0, n, 0);
        invert(on, host, bytes);
        CommRequest *a = comm_all_reduce_start(&c, on, n, COMM_F64, COMM_SUM);
        exchange_make(&x, &c, salt, (int)(salt % 4), 24);
        char *in = device_alloc(x.in_bytes), *out = device_alloc(x.out_bytes);
        invert(in, x.in, x.in_bytes);
        comm_all_to_all(&c, out, x.recv, in, x.send, 24);
        invert(x.out, out, x.out_bytes);
        exchange_done(&x);
        comm_finish(a);
        invert(host, on, bytes);
        check(!memcmp(host, want, bytes), "the sum is wrong");
        // blocks of it back to everybody; then from the last rank
        size_t counts[64] = {0};
        for (int r = 0; r < W; r++) counts[r] = comm_share(n, W, r + 1) - comm_share(n, W, r);
        const size_t at = comm_share(n, W, c.rank), mine = counts[c.rank];
        char *part = device_alloc(8 * mine);
        comm_reduce_scatter(&c, part, on, counts, COMM_F64, COMM_MAX);
        invert(on, on, 0);
        memset(on, 0, bytes);
        comm_all_gather_counts(&c, on, part, counts, 8);
        invert(host, on, bytes);
        check(!memcmp(host, want, bytes), "scattered and gathered: element %zu", at);
        if (c.rank != c.size - 1) memset(on, 0, bytes);
        comm_broadcast(&c, on, bytes, c.size - 1);
        invert(host, on, bytes);
        check(!memcmp(host, want, bytes), "broadcast");
        check(comm_agree(&c, me) == W - 1, "agree");
        comm_sync(&c);
        device_release(on);
        device_release(in);
        device_release(out);
        device_release(part);
        release(host, bytes);
        release(want, bytes);
    }
    CommCount n[COMM_KINDS];
    comm_counts_take(&c, n);
    check(n[COMM_ALL_REDUCE].calls == 12 && n[COMM_ALL_TO_ALL].calls == 6, "miscounted");
    comm_close(&c);
    comm_close(&group);
    check(device_live == 0, "%d pieces of device memory are left", device_live);
    finish();
}

// -------------------------------------------------------------------------------------------------
// how a program starts

static void test_start(int launched) {
    if (launched) return;
    if (begin("alone/no_mpi")) {
        // last of all: after every operation above, MPI has not been called once
        check(world.size == 1 && world.rank == 0 && !world.world->mpi, "not alone");
        check(mpi_calls == 0, "%d calls of MPI", mpi_calls);
#ifdef USE_MPI
        int yes = 1;
        MPI_Initialized(&yes);
        check(!yes, "MPI runs");
#endif
        finish();
    }
    if (begin("alone/launchers")) {
        static const char *const set[][3] = {{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "O"},
            {"PMI_RANK", "PMI_SIZE", "P"}, {"PMIX_RANK", "SLURM_STEP_NUM_TASKS", "X"}};
        int rank, size;
        check(comm_launched(&rank, &size) < 0, "started by hand");
        setenv("SLURM_PROCID", "0", 1); // a script under sbatch
        setenv("SLURM_NTASKS", "4", 1);
        check(comm_launched(&rank, &size) < 0, "started by a batch script");
        check(comm_local_rank() == 0, "local rank");
        for (size_t i = 0; i < COUNT(set); i++) {
            setenv(set[i][0], "3", 1);
            check(comm_launched(&rank, &size) >= 0 && rank == 3 && size == 0, "%s", set[i][0]);
            setenv(set[i][1], "8", 1);
            check(comm_launched(&rank, &size) >= 0 && rank == 3 && size == 8, "%s", set[i][1]);
            setenv("SLURM_LOCALID", "2", 1);
            check(comm_local_rank() == 2, "local rank %d", comm_local_rank());
            setenv(set[i][0], "x", 1);
            check(comm_launched(&rank, &size) < 0, "%s is no number", set[i][0]);
            unsetenv(set[i][0]), unsetenv(set[i][1]), unsetenv("SLURM_LOCALID");
        }
        finish();
    }
}

/* For data/test_ranks.sh: rank `who` does something bad while the others wait for it. Returns when
   all is well, which no kind but `close` expects. */
static void misbehave(const char *how, int who) {
    float x[1000] = {0};
    size_t one[64] = {0}, other[64] = {0};
    for (int r = 0; r < W; r++) one[r] = 5, other[r] = 5;
    comm_barrier(&world);
    if (!strcmp(how, "counts")) world.world->check = 1; // found before anything is sent
    if (!strcmp(how, "short") || !strcmp(how, "long")) world.world->check = 0;
    if (!strcmp(how, "counts") || !strcmp(how, "short")) other[(who + 1) % W] = 4;
    if (!strcmp(how, "long")) other[(who + 1) % W] = 6;
    if (!strcmp(how, "hang")) comm_set_timeout(&world, 2);
    for (int i = 0; !strcmp(how, "many") && i < COMM_MAX_STARTED + (me == who); i++)
        comm_all_reduce_start(&world, x + i, 1, COMM_F32, COMM_SUM);
    if (!strcmp(how, "twice")) {
        CommRequest *q = comm_barrier_start(&world);
        comm_finish(q);
        if (me == who) comm_finish(q);
    }
    if (me == who) {
        if (!strcmp(how, "die")) die(RUN_ERROR, "rank %d cannot open its file", me);
        if (!strcmp(how, "user")) die(USER_ERROR, "rank %d does not like its flags", me);
        if (!strcmp(how, "exit")) exit(0);
        if (!strcmp(how, "_exit")) _exit(3);
        if (!strcmp(how, "kill")) raise(SIGKILL);
        if (!strcmp(how, "abort")) abort();
        if (!strcmp(how, "hang")) nap(300);
    }
    comm_all_to_all(&world, x, one, x + 500, me == who ? other : one, sizeof *x);
    for (int i = 0; i < 1000; i++) comm_all_reduce(&world, x, 1000, COMM_F32, COMM_SUM);
}

// The bits of some sums, for data/test_ranks.sh, which compares them between runs.
static void print_sums(size_t message, size_t scratch) {
    uint64_t h = 0;
    const size_t n = 40009;
    float *buf = buffer(n * sizeof *buf);
    cut(message, scratch);
    for (uint64_t salt = 1; salt < 4; salt++) {
        fill(buf, COMM_F32, me, salt, 0, n);
        comm_all_reduce(&world, buf, n, COMM_F32, COMM_SUM);
        for (size_t i = 0; i < n; i++) {
            uint32_t u;
            memcpy(&u, buf + i, 4);
            h = mix(h + u);
        }
    }
    printf("%016llx\n", (unsigned long long)h);
    release(buf, n * sizeof *buf);
}

static void test_big(void) {
    const size_t n = ((size_t)INT_MAX + 12345) / 4 * 4;
    if (begin("ranks_%d/big/all_to_all", W)) { // every rank to its neighbour
        size_t send[64] = {0}, recv[64] = {0};
        send[(me + 1) % W] = n;
        recv[(me + W - 1) % W] = n;
        char *in = malloc(n), *out = malloc(n);
        must(in && out, "memory");
        memset(in, 1 + me, n);
        comm_all_to_all(&world, out, recv, in, send, 1);
        for (size_t i = 0; i < n; i++)
            if (out[i] != 1 + (me + W - 1) % W) check(0, "byte %zu", i);
        free(in);
        free(out);
        finish();
    }
    if (begin("ranks_%d/big/all_reduce", W)) {
        int32_t *p = malloc(n);
        must(p != NULL, "memory");
        for (size_t i = 0; i < n / 4; i++) p[i] = me + (int32_t)(i % 1000);
        comm_all_reduce(&world, p, n / 4, COMM_I32, COMM_SUM);
        for (size_t i = 0; i < n / 4; i++)
            if (p[i] != W * (W - 1) / 2 + W * (int32_t)(i % 1000)) check(0, "element %zu", i);
        free(p);
        finish();
    }
}

// A check fails if it fails on any rank: rank 0 says so in the words of the lowest that did.
static void ranks_agree(void) {
    char said[64][256];
    char mine[256];
    snprintf(mine, sizeof mine, "%.250s", check_failed);
    comm_all_gather(&world, said, mine, 1, sizeof mine);
    for (int r = 0; r < W && !check_failed[0]; r++)
        if (said[r][0]) snprintf(check_failed, sizeof check_failed, "rank %d: %.250s", r, said[r]);
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "build")) {
#ifdef USE_MPI
        puts("MPI");
#else
        puts("no MPI");
#endif
        return 0;
    }
    // before MPI starts, which sets these itself
    const int launched =
        getenv("OMPI_COMM_WORLD_RANK") || getenv("PMI_RANK") || getenv("PMIX_RANK");
    comm_open(&world);
    W = world.size, me = world.rank;
    must(W <= 64, "at most 64 ranks");
    if (argc == 4 && !strcmp(argv[1], "how")) {
        misbehave(argv[2], atoi(argv[3]));
        comm_close(&world);
        return 0;
    }
    if (argc == 4 && !strcmp(argv[1], "sums")) {
        print_sums((size_t)atol(argv[2]), (size_t)atol(argv[3]));
        comm_close(&world);
        return 0;
    }
    at_finish = ranks_agree;
    comm_set_timeout(&world, 100); // what hangs is told in words
    if (me) must(freopen("/dev/null", "w", stdout) != NULL, "/dev/null");
    if (argc == 2) filter = argv[1];
    if (argc == 2 && !strcmp(filter, "big")) {
        test_big();
    } else {
        test_all_reduce();
        test_reduce_scatter();
        test_all_gather();
        test_all_to_all();
        test_broadcast();
        test_barrier();
        test_groups();
        test_overlap();
        test_accounting();
        test_dry();
        test_device();
        test_start(launched);
    }
    comm_close(&world);
    if (!tried) die(USER_ERROR, "no check has '%s' in its name", filter);
    return failures != 0;
}
