/* comm.h: ranks and what they say to one another. Read comm_open() and "the operations" first.

   A Comm is a group of ranks. Every collective is one or two *phases*, and a phase is the same
   thing each time: a part goes to every rank, a part comes from every rank, and what came is
   either where it belongs or is summed in rank order. Each operation says who gets what; one small
   state machine (advance) walks phases and rounds; a *back* moves the bytes:
     alone   one rank: nothing moves, and MPI is never called
     MPI     Isend and Irecv on host memory (comm_mpi.h); also for a device, staged through it
     NCCL    ncclSend and ncclRecv on device memory, queued on its own stream (comm_nccl.h)
     dry     pretends to be one of W ranks in one process: moves nothing, only counts

   So a sum is ((x0 + x1) + x2) + ... for every element, whatever the size of the message, the way
   it was cut, or who was late: all ranks hold the same bits, and two runs agree. A large
   all-reduce is a reduce-scatter, then an all-gather; a small one gathers everything everywhere
   and adds.

   All ranks of a group call the same operations in the same order, with sizes that fit. An
   operation named *_start returns a request at once; its buffers are the request's until
   comm_finish(). MPI moves little while nobody looks: comm_poll() between two pieces of work lets
   started operations go on, and so does waiting for any other one. Parts of zero bytes are
   ordinary.

   Failures end the program with one line. A rank that ends before comm_close(), through die() or
   otherwise, takes the others with it; one that vanishes is missed after the time limit. Sizes are
   size_t, in elements where there is an element, and no message is too long. One thread of a rank
   calls what is here. It knows die() and DType of moe.h, and nothing of models. */
#ifndef COMM_H
#define COMM_H

#include "moe.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#ifdef USE_MPI
#define OMPI_SKIP_MPICXX  1 // the C interface, in C++ too
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif

#define COMM_FN __attribute__((unused)) static // a program need not use all of it

// All-to-all compares both sides' counts first: in the sanitizer builds, or with -DCOMM_CHECK=1.
#ifndef COMM_CHECK
#ifdef __SANITIZE_ADDRESS__
#define COMM_CHECK 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define COMM_CHECK 1
#endif
#endif
#endif
#ifndef COMM_CHECK
#define COMM_CHECK 0
#endif

typedef enum { COMM_F32, COMM_F64, COMM_I32, COMM_I64 } CommType;
typedef enum {
    COMM_SUM,
    COMM_MAX
} CommOp; // sums of integers wrap; a NaN is larger than any number

typedef enum {
    COMM_ALL_REDUCE,
    COMM_REDUCE_SCATTER,
    COMM_ALL_GATHER,
    COMM_ALL_TO_ALL,
    COMM_COUNTS, // comm_exchange_counts
    COMM_BROADCAST,
    COMM_BARRIER,
    COMM_SETUP, // groups, checks: what a program did not ask for itself
    COMM_KINDS
} CommKind;
static const char *const comm_kind_names[COMM_KINDS] = {"all-reduce", "reduce-scatter",
    "all-gather", "all-to-all", "counts", "broadcast", "barrier", "setup"};

/* What a group did since the last comm_counts_take(): calls, bytes that this rank sent to other
   ranks, and seconds that it spent in them (in NCCL: that the stream did). */
typedef struct CommCount {
    uint64_t calls, bytes;
    double seconds;
} CommCount;

/* The memory of a device, by functions as Backend has them, which end when the copy is done.
   cuda: it is a CUDA device, and `stream` the queue (cudaStream_t) that works on the buffers. */
typedef struct CommDevice {
    void *(*alloc)(size_t bytes);
    void (*release)(void *p);
    void (*to_device)(void *dst, const void *src, size_t bytes);
    void (*to_host)(void *dst, const void *src, size_t bytes);
    void *stream;
    int cuda;
} CommDevice;

typedef struct Comm {
    int rank, size; // in this group; size 0: this rank is in none
    int *member;    // (size) rank in the world of each rank of the group
    CommCount count[COMM_KINDS];
    const struct CommBack *back;
    struct CommWorld *world;
    int id; // with `calls` the tag of a message
    unsigned calls;
    int staged;        // buffers are in `device`, and pass through host memory
    struct Comm *host; // device: the same ranks for host buffers
    CommDevice device;
    void *nccl, *stream; // ncclComm_t, cudaStream_t
} Comm;

// What one rank sends to another and gets from it in one phase.
typedef struct CommPart {
    const char *send;
    char *recv;
    size_t send_bytes, recv_bytes;
} CommPart;

typedef struct CommRequest { // an operation that was started
    Comm *c;
    CommKind kind;
    int active, complete, tag;
    CommPart *part; // (2, size): of both phases
    int phase, phases;
    size_t round, rounds;
    int empty_too; // messages of zero bytes are sent as well
    // phase 0 reduces: in rounds of `chunk` bytes a rank, from scratch and `own` into `result`
    int reduces;
    CommType type;
    CommOp op;
    size_t chunk;
    const char *own;
    char *result;
    // staging: host copies of what is sent and of what comes; `home` is where that belongs
    void *home;
    size_t home_bytes;
    double began, seconds;
    // memory that stays with the slot, and grows: parts, host scratch, device scratch, host copies
    size_t part_count, room[4];
    char *memory[4];
    // MPI: messages that are under way
    int n_pending, n_left, pending_room;
    struct CommMessage *message;
    void *mpi;          // (pending_room) MPI_Request
    void *event[3];     // NCCL: inputs ready, began, done
    int event_counted;  // its time is still to be added
    CommCount *counter; // the count that it belongs to
} CommRequest;
enum { COMM_SCRATCH, COMM_DEVICE_SCRATCH, COMM_STAGE_IN, COMM_STAGE_OUT };

typedef struct CommMessage { // of an MPI_Request
    int peer, receives;
    size_t bytes;
} CommMessage;

/* The leaf calls. A round is begin, any number of send and recv, end; then done() until it says 1.
   enter and leave frame an operation, join comes with comm_finish. NULL: nothing to do, and so all
   of them where nothing moves. */
typedef struct CommBack {
    const char *name;
    int moves; // 0: only counts
    void (*enter)(CommRequest *q);
    void (*begin)(CommRequest *q);
    void (*send)(CommRequest *q, int to, const char *p, size_t bytes);
    void (*recv)(CommRequest *q, int from, char *p, size_t bytes);
    void (*end)(CommRequest *q);
    int (*done)(CommRequest *q);
    void (*copy)(CommRequest *q, char *dst, const char *src, size_t bytes); // not across ranks
    // out[i] = sum over ranks, in order, of own[i] for this one and scratch[r * chunk + i] for r
    void (*reduce)(CommRequest *q, char *out, const char *own, const char *scratch, size_t bytes);
    void (*leave)(CommRequest *q);
    void (*join)(CommRequest *q);
} CommBack;

enum { COMM_MAX_STARTED = 64, COMM_TAGS = 256 };
typedef struct CommWorld { // what all groups of a program share
    CommRequest request[COMM_MAX_STARTED];
    int last_id, tag_limit;
    int mpi, open;           // MPI runs; comm_close has not come
    double timeout, heard;   // seconds; when a message last arrived
    double crowded;          // until then others compute on this core
    size_t message, scratch; // bytes: the longest MPI message; memory of a sum that is under way
    int check;               // all-to-all compares counts first
} CommWorld;

/* A sum of n bytes in all from W ranks takes min(n, COMM_SCRATCH_BYTES) of memory, and more rounds
   where that is less: large enough for a bucket of gradients. Below COMM_SMALL_BYTES two phases
   cost more than the bytes that they save. */
#define COMM_MESSAGE_BYTES ((size_t)1 << 30)
#define COMM_SCRATCH_BYTES ((size_t)32 << 20)
#define COMM_SMALL_BYTES   ((size_t)2048)
#define COMM_TIMEOUT_S     1800.0 // longer than the slowest checkpoint that others wait for

// -------------------------------------------------------------------------------------------------
// small things

static inline size_t comm_type_size(CommType t) { return t == COMM_F32 || t == COMM_I32 ? 4 : 8; }

// The type of values that a backend calls F32 or F64.
COMM_FN CommType comm_type_of(DType t) {
    if (t != F32 && t != F64) die(RUN_ERROR, "internal: sums between ranks are in fp32 or fp64");
    return t == F32 ? COMM_F32 : COMM_F64;
}

/* The first of n elements that rank r of `size` has when they are dealt out in order, as evenly as
   can be: r has comm_share(n, size, r) .. comm_share(n, size, r + 1) - 1. */
static inline size_t comm_share(size_t n, int size, int r) {
    if (size < 1) die(RUN_ERROR, "internal: a share of %zu among %d ranks", n, size);
    const size_t rest = n % (size_t)size, i = (size_t)r;
    return n / (size_t)size * i + (i < rest ? i : rest);
}

static inline size_t comm_bytes(size_t n, size_t elem) {
    size_t bytes;
    if (__builtin_mul_overflow(n, elem, &bytes))
        die(RUN_ERROR, "internal: a message of %zu elements of %zu bytes", n, elem);
    return bytes;
}
static inline char *comm_at(const void *p, size_t offset) { // dry buffers may be NULL
    return p ? (char *)(uintptr_t)p + offset : NULL;
}
static void *comm_grow(void *p, size_t bytes) {
    p = realloc(p, bytes ? bytes : 1);
    if (!p) die(RUN_ERROR, "no memory: %zu bytes for messages between ranks", bytes);
    return p;
}

// Memory that a slot keeps: nothing is allocated any more once the sizes have been seen.
static char *comm_room(CommRequest *q, int which, size_t bytes) {
    if (q->room[which] >= bytes) return q->memory[which];
    if (which == COMM_DEVICE_SCRATCH) {
        const CommDevice *d = &q->c->device;
        if (q->memory[which]) d->release(q->memory[which]);
        q->memory[which] = (char *)d->alloc(bytes);
        if (!q->memory[which]) die(RUN_ERROR, "no device memory: %zu bytes for sums", bytes);
    } else {
        free(q->memory[which]); // nothing in it is wanted
        q->memory[which] = (char *)comm_grow(NULL, bytes);
    }
    q->room[which] = bytes;
    return q->memory[which];
}

// -------------------------------------------------------------------------------------------------
// sums in rank order

/* out[i] = the sum, in the order of ranks, of own[i] and of scratch[r * chunk + i] for every other
   rank r; chunk is in bytes. out may be own. */
#define COMM_REDUCE(NAME, T, EXPR)                                                             \
    COMM_FN void NAME(char *out, const char *own, const char *scratch, size_t chunk, int rank, \
        int size, size_t n) {                                                                  \
        T acc[512];                                                                            \
        for (size_t at = 0, m; at < n; at += m) {                                              \
            m = n - at < 512 ? n - at : 512;                                                   \
            for (int r = 0; r < size; r++) {                                                   \
                const T *x = (const T *)(r == rank ? own : scratch + (size_t)r * chunk) + at;  \
                if (!r) memcpy(acc, x, m * sizeof(T));                                         \
                if (r)                                                                         \
                    for (size_t i = 0; i < m; i++) acc[i] = EXPR;                              \
            }                                                                                  \
            memcpy((T *)out + at, acc, m * sizeof(T));                                         \
        }                                                                                      \
    }
COMM_REDUCE(comm_sum_f32, float, acc[i] + x[i])
COMM_REDUCE(comm_sum_f64, double, acc[i] + x[i])
COMM_REDUCE(comm_sum_i32, uint32_t, acc[i] + x[i]) // as unsigned: it wraps
COMM_REDUCE(comm_sum_i64, uint64_t, acc[i] + x[i])
COMM_REDUCE(comm_max_f32, float, acc[i] > x[i] || acc[i] != acc[i] ? acc[i] : x[i])
COMM_REDUCE(comm_max_f64, double, acc[i] > x[i] || acc[i] != acc[i] ? acc[i] : x[i])
COMM_REDUCE(comm_max_i32, int32_t, acc[i] > x[i] ? acc[i] : x[i])
COMM_REDUCE(comm_max_i64, int64_t, acc[i] > x[i] ? acc[i] : x[i])
#undef COMM_REDUCE

static void comm_host_reduce(
    CommRequest *q, char *out, const char *own, const char *scratch, size_t bytes) {
    typedef void (*Reduce)(char *, const char *, const char *, size_t, int, int, size_t);
    static const Reduce reduce[2][4] = {{comm_sum_f32, comm_sum_f64, comm_sum_i32, comm_sum_i64},
        {comm_max_f32, comm_max_f64, comm_max_i32, comm_max_i64}};
    reduce[q->op][q->type](
        out, own, scratch, q->chunk, q->c->rank, q->c->size, bytes / comm_type_size(q->type));
}
static void comm_host_copy(CommRequest *q, char *dst, const char *src, size_t bytes) {
    (void)q;
    memmove(dst, src, bytes);
}

// -------------------------------------------------------------------------------------------------
// alone, dry

static const CommBack comm_alone = {
    "alone", 1, NULL, NULL, NULL, NULL, NULL, NULL, comm_host_copy, comm_host_reduce, NULL, NULL};
static const CommBack comm_dry = {
    "dry", 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};

// -------------------------------------------------------------------------------------------------
// MPI, NCCL

#ifdef USE_MPI
#include "comm_mpi.h"
#endif
#ifdef USE_NCCL
#include "comm_nccl.h"
#endif

// -------------------------------------------------------------------------------------------------
// phases and rounds

static CommRequest *comm_request(Comm *c, CommKind kind) {
    CommWorld *w = c->world;
    int i = 0;
    if (c->size < 1)
        die(RUN_ERROR, "internal: %s in a group without this rank", comm_kind_names[kind]);
    while (i < COMM_MAX_STARTED && w->request[i].active) i++;
    if (i == COMM_MAX_STARTED)
        die(RUN_ERROR, "internal: more than %d operations between ranks are under way",
            COMM_MAX_STARTED);
    CommRequest *q = &w->request[i];
    const size_t need = 2 * (size_t)c->size;
    if (q->part_count < need) {
        q->part = (CommPart *)comm_grow(q->part, need * sizeof *q->part);
        q->part_count = need;
    }
    memset(q->part, 0, need * sizeof *q->part);
    q->c = c;
    q->kind = kind;
    q->active = 1;
    q->complete = q->phase = q->empty_too = q->reduces = 0;
    q->round = 0;
    q->rounds = q->phases = 1;
    q->home = NULL;
    q->began = now_s();
    q->seconds = 0;
    // messages do not overtake one another: a tag may come again once the operation before is done
    q->tag = c->id * COMM_TAGS + (int)(c->calls++ % COMM_TAGS);
    for (i = 0; i < COMM_MAX_STARTED; i++)
        if (w->request[i].active && w->request[i].tag == q->tag && &w->request[i] != q)
            die(RUN_ERROR, "internal: an operation between ranks was not finished for %d others",
                COMM_TAGS);
    c->count[kind].calls++;
    return q;
}
static CommPart *comm_part(const CommRequest *q, int phase, int rank) {
    return &q->part[(size_t)phase * (size_t)q->c->size + (size_t)rank];
}
static void comm_sends(CommRequest *q, int phase, int to, const char *p, size_t bytes) {
    comm_part(q, phase, to)->send = p;
    comm_part(q, phase, to)->send_bytes = bytes;
}
static void comm_receives(CommRequest *q, int phase, int from, char *p, size_t bytes) {
    comm_part(q, phase, from)->recv = p;
    comm_part(q, phase, from)->recv_bytes = bytes;
}

// What of n bytes belongs to this round: a chunk of a sum; otherwise there is one round for all.
static size_t comm_slice(const CommRequest *q, size_t bytes, size_t *offset) {
    *offset = 0;
    if (q->phase || !q->reduces) return bytes;
    *offset = q->round * q->chunk;
    const size_t left = bytes > *offset ? bytes - *offset : 0;
    return left < q->chunk ? left : q->chunk;
}

static void comm_post(CommRequest *q) {
    Comm *c = q->c;
    const int summing = !q->phase && q->reduces;
    const CommPart *own = comm_part(q, q->phase, c->rank);
    size_t at;
    if (c->back->begin) c->back->begin(q);
    for (int i = 1; i < c->size; i++) { // everybody begins with another neighbour
        const int from = (c->rank + c->size - i) % c->size, to = (c->rank + i) % c->size;
        const CommPart *in = comm_part(q, q->phase, from), *out = comm_part(q, q->phase, to);
        size_t n = comm_slice(q, in->recv_bytes, &at);
        char *dst = summing ? comm_at(in->recv, (size_t)from * q->chunk) : in->recv;
        if ((n || q->empty_too) && c->back->moves) c->back->recv(q, from, dst, n);
        n = comm_slice(q, out->send_bytes, &at);
        if ((n || q->empty_too) && c->back->moves) c->back->send(q, to, comm_at(out->send, at), n);
        c->count[q->kind].bytes += n;
    }
    if (c->back->end) c->back->end(q);
    if (!summing && own->recv_bytes && own->recv != own->send && c->back->moves)
        c->back->copy(q, own->recv, own->send, own->recv_bytes);
}

// Goes on as far as it can. Returns 1 once the operation is complete.
static int comm_advance(CommRequest *q) {
    const CommBack *b = q->c->back;
    while (!q->complete) {
        if (b->done && !b->done(q)) return 0;
        if (!q->phase && q->reduces) {
            const CommPart *own = comm_part(q, 0, q->c->rank);
            size_t at, n = comm_slice(q, own->recv_bytes, &at);
            if (n && b->moves)
                b->reduce(q, comm_at(q->result, at), comm_at(q->own, at), own->recv, n);
        }
        if (++q->round == q->rounds) {
            q->round = 0;
            q->rounds = 1;
            if (++q->phase == q->phases) {
                q->complete = 1;
                if (b->leave) b->leave(q);
                break;
            }
        }
        comm_post(q);
    }
    return 1;
}

static CommRequest *comm_launch(CommRequest *q) {
    if (q->c->back->enter) q->c->back->enter(q);
    comm_post(q);
    comm_advance(q);
    q->seconds = now_s() - q->began;
    return q;
}

// Phase 0 sums what arrives, in blocks of at most `largest` bytes, into result. own: this rank's.
static void comm_sums(CommRequest *q, CommType type, CommOp op, char *result, const char *own,
    size_t largest, size_t mine) {
    const Comm *c = q->c;
    const size_t most = c->world->scratch / (size_t)c->size / 64 * 64,
                 whole = (largest + 63) / 64 * 64;
    q->reduces = 1;
    q->type = type;
    q->op = op;
    q->result = result;
    q->own = own;
    q->chunk = whole < most ? whole : most;
    if (q->chunk < 64) q->chunk = 64;
    q->rounds = largest ? (largest - 1) / q->chunk + 1 : 1;
    char *scratch = NULL;
    if (c->back->moves && largest)
        scratch = comm_room(
            q, c->nccl ? COMM_DEVICE_SCRATCH : COMM_SCRATCH, comm_bytes(q->chunk, (size_t)c->size));
    for (int r = 0; r < c->size; r++) comm_receives(q, 0, r, scratch, mine);
}

// Where host memory stands for a device's: its copy of `in`; what becomes `out` when all is done.
static const char *comm_staged_in(CommRequest *q, const void *in, size_t bytes) {
    if (!q->c->staged) return (const char *)in;
    char *p = comm_room(q, COMM_STAGE_IN, bytes);
    if (bytes) q->c->device.to_host(p, in, bytes);
    return p;
}
static char *comm_staged_out(CommRequest *q, void *out, size_t bytes) {
    if (!q->c->staged) return (char *)out;
    q->home = out;
    q->home_bytes = bytes;
    return comm_room(q, COMM_STAGE_OUT, bytes);
}

// -------------------------------------------------------------------------------------------------
// waiting

static void comm_progress(CommWorld *w) {
    for (int i = 0; i < COMM_MAX_STARTED; i++)
        if (w->request[i].active && !w->request[i].complete) comm_advance(&w->request[i]);
}

// Lets everything that was started go on; never waits.
COMM_FN void comm_poll(Comm *c) { comm_progress(c->world); }

/* Waits until the operation is complete; then its buffers are the caller's again. In whatever order
   ranks wait for several, all of them go on. NULL: nothing to wait for. Ends the program when
   nothing arrives for the time limit. NCCL: the device's stream waits, not the host. */
COMM_FN void comm_finish(CommRequest *q) {
    if (!q) return;
    CommWorld *w = q->c->world;
    const double since = now_s();
    if (!q->active) die(RUN_ERROR, "internal: an operation between ranks was finished twice");
    w->heard = since;
    while (!q->complete) {
        comm_progress(w);
        if (q->complete) break;
#ifdef USE_MPI
        const double now = now_s();
        if (now - w->heard > w->timeout)
            die(RUN_ERROR,
                "rank %d waited %.0f s in %s for rank %d, which is gone, hangs, or does something "
                "else",
                q->c->member[q->c->rank], w->timeout, comm_kind_names[q->kind],
                comm_mpi_missing(q));
        /* At first be quick, then leave the core to those who compute on it. A core that is shared
           with other work comes back from a yield after milliseconds, from a short sleep at once. */
        const int early = now - since < 1e-3, yields = early && now > w->crowded;
        const struct timespec nap = {0, early ? 1000 : 50000};
        if (yields)
            sched_yield();
        else
            nanosleep(&nap, NULL);
        if (yields && now_s() - now > 1e-3) w->crowded = now + 0.1;
#endif
    }
    if (q->home && q->home_bytes)
        q->c->device.to_device(q->home, q->memory[COMM_STAGE_OUT], q->home_bytes);
    if (q->c->back->join) q->c->back->join(q);
    if (!q->c->stream) q->c->count[q->kind].seconds += q->seconds + now_s() - since;
    q->active = 0;
}

// -------------------------------------------------------------------------------------------------
// the operations

static CommRequest *comm_all_reduce_kind(
    Comm *c, CommKind kind, void *buf, size_t n, CommType type, CommOp op) {
    const size_t elem = comm_type_size(type), bytes = comm_bytes(n, elem);
    const int small = bytes <= COMM_SMALL_BYTES, W = c->size;
    CommRequest *q = comm_request(c, kind);
    if (W == 1) return comm_launch(q);
    char *p = comm_staged_out(q, buf, bytes);
    if (c->staged && bytes) c->device.to_host(p, buf, bytes);
    const size_t begin = small ? 0 : comm_share(n, W, c->rank) * elem,
                 end = small ? bytes : comm_share(n, W, c->rank + 1) * elem;
    char *mine = comm_at(p, begin);
    comm_sums(q, type, op, mine, mine, small ? bytes : comm_share(n, W, 1) * elem, end - begin);
    for (int r = 0; r < W; r++) {
        const size_t at = comm_share(n, W, r) * elem, len = comm_share(n, W, r + 1) * elem - at;
        comm_sends(q, 0, r, small ? p : comm_at(p, at), small ? bytes : len);
        if (small) continue;
        comm_sends(q, 1, r, mine, end - begin);
        comm_receives(q, 1, r, comm_at(p, at), len);
    }
    q->phases = small ? 1 : 2;
    return comm_launch(q);
}
// buf[i] = sum (or largest) over ranks of buf[i], the same bits on every rank.  buf (n), in place
COMM_FN CommRequest *comm_all_reduce_start(Comm *c, void *buf, size_t n, CommType type, CommOp op) {
    return comm_all_reduce_kind(c, COMM_ALL_REDUCE, buf, n, type, op);
}
COMM_FN void comm_all_reduce(Comm *c, void *buf, size_t n, CommType type, CommOp op) {
    comm_finish(comm_all_reduce_start(c, buf, n, type, op));
}

/* in: the blocks of rank 0, 1, ..., counts[r] elements each, the same counts on every rank. out
   (counts[rank]) = sum over ranks of this rank's block. out may be this rank's block in `in`. */
COMM_FN CommRequest *comm_reduce_scatter_start(
    Comm *c, void *out, const void *in, const size_t *counts, CommType type, CommOp op) {
    const size_t elem = comm_type_size(type), mine = comm_bytes(counts[c->rank], elem);
    CommRequest *q = comm_request(c, COMM_REDUCE_SCATTER);
    size_t all = 0, largest = 0, at = 0, own = 0;
    for (int r = 0; r < c->size; r++) {
        const size_t n = comm_bytes(counts[r], elem);
        if (r == c->rank) own = all;
        if (n > largest) largest = n;
        all += n;
    }
    const char *from = comm_staged_in(q, in, all);
    char *to = comm_staged_out(q, out, mine);
    if (c->size == 1) {
        comm_sends(q, 0, 0, from, mine);
        comm_receives(q, 0, 0, to, mine);
        return comm_launch(q);
    }
    comm_sums(q, type, op, to, comm_at(from, own), largest, mine);
    for (int r = 0; r < c->size; at += counts[r++] * elem)
        comm_sends(q, 0, r, comm_at(from, at), counts[r] * elem);
    return comm_launch(q);
}
COMM_FN void comm_reduce_scatter(
    Comm *c, void *out, const void *in, const size_t *counts, CommType type, CommOp op) {
    comm_finish(comm_reduce_scatter_start(c, out, in, counts, type, op));
}

// counts NULL: n elements from everybody
static CommRequest *comm_gather_kind(Comm *c, CommKind kind, void *out, const void *in,
    const size_t *counts, size_t n, size_t elem) {
    CommRequest *q = comm_request(c, kind);
    const size_t mine = comm_bytes(counts ? counts[c->rank] : n, elem);
    size_t all = 0, at = 0;
    for (int r = 0; r < c->size; r++) all += comm_bytes(counts ? counts[r] : n, elem);
    const char *from = comm_staged_in(q, in, mine);
    char *to = comm_staged_out(q, out, all);
    for (int r = 0; r < c->size; r++) {
        const size_t len = (counts ? counts[r] : n) * elem;
        comm_sends(q, 0, r, from, mine);
        comm_receives(q, 0, r, comm_at(to, at), len);
        at += len;
    }
    return comm_launch(q);
}

/* out (size, n) = in of rank 0, of rank 1, ...;  in (n) elements of `elem` bytes, or its own place
   in out */
COMM_FN CommRequest *comm_all_gather_start(
    Comm *c, void *out, const void *in, size_t n, size_t elem) {
    return comm_gather_kind(c, COMM_ALL_GATHER, out, in, NULL, n, elem);
}
COMM_FN void comm_all_gather(Comm *c, void *out, const void *in, size_t n, size_t elem) {
    comm_finish(comm_all_gather_start(c, out, in, n, elem));
}

// The same with counts[r] elements from rank r, the same counts on every rank; out (sum of counts)
COMM_FN CommRequest *comm_all_gather_counts_start(
    Comm *c, void *out, const void *in, const size_t *counts, size_t elem) {
    return comm_gather_kind(c, COMM_ALL_GATHER, out, in, counts, 0, elem);
}
COMM_FN void comm_all_gather_counts(
    Comm *c, void *out, const void *in, const size_t *counts, size_t elem) {
    comm_finish(comm_all_gather_counts_start(c, out, in, counts, elem));
}

static CommRequest *comm_exchange_kind(Comm *c, CommKind kind, void *out, const size_t *recv_counts,
    const void *in, const size_t *send_counts, size_t elem) {
    static const size_t one = 1; // NULL: one element to and from everybody
    const size_t step = recv_counts ? 1 : 0, *recv = step ? recv_counts : &one,
                 *send = step ? send_counts : &one;
    CommRequest *q = comm_request(c, kind);
    size_t in_bytes = 0, out_bytes = 0, from = 0, to = 0;
    for (size_t r = 0; r < (size_t)c->size; r++) {
        in_bytes += comm_bytes(send[r * step], elem);
        out_bytes += comm_bytes(recv[r * step], elem);
    }
    const char *src = comm_staged_in(q, in, in_bytes);
    char *dst = comm_staged_out(q, out, out_bytes);
    for (int r = 0; r < c->size; r++) {
        const size_t sends = send[(size_t)r * step] * elem,
                     receives = recv[(size_t)r * step] * elem;
        comm_sends(q, 0, r, comm_at(src, from), sends);
        comm_receives(q, 0, r, comm_at(dst, to), receives);
        from += sends;
        to += receives;
    }
    return comm_launch(q);
}

static Comm *comm_host_of(Comm *c) { return c->host ? c->host : c; }

/* recv[r] = send[this rank] of rank r: what everybody is about to send.  (size) each, host memory.
   Dry: as if all ranks sent the same, recv = send. */
COMM_FN void comm_exchange_counts(Comm *c, size_t *recv, const size_t *send) {
    Comm *h = comm_host_of(c);
    if (!h->back->moves) memcpy(recv, send, (size_t)h->size * sizeof *recv);
    comm_finish(comm_exchange_kind(h, COMM_COUNTS, recv, NULL, send, NULL, sizeof *send));
}

// sent[i][j] == recv[j][i], and what a rank sends to itself is what it expects
static void comm_check_counts(Comm *c, const size_t *recv, const size_t *send) {
    Comm *h = comm_host_of(c);
    const size_t n = (size_t)h->size;
    if (!h->back->moves) return;
    size_t *sent = (size_t *)calloc(n, sizeof *sent);
    if (!sent) die(RUN_ERROR, "no memory");
    comm_finish(comm_exchange_kind(h, COMM_SETUP, sent, NULL, send, NULL, sizeof *send));
    for (int r = 0; r < h->size; r++)
        if (sent[r] != recv[r])
            die(RUN_ERROR, "internal: rank %d sends %zu rows to rank %d, which expects %zu",
                h->member[r], sent[r], h->member[h->rank], recv[r]);
    free(sent);
}

/* in: send_counts[r] elements for rank r = 0, 1, ..., one block after the other; out:
   recv_counts[r] elements from rank r, likewise. elem: bytes of an element (of a row). in and out
   do not overlap. */
COMM_FN CommRequest *comm_all_to_all_start(Comm *c, void *out, const size_t *recv_counts,
    const void *in, const size_t *send_counts, size_t elem) {
    if (c->world->check) comm_check_counts(c, recv_counts, send_counts);
    return comm_exchange_kind(c, COMM_ALL_TO_ALL, out, recv_counts, in, send_counts, elem);
}
COMM_FN void comm_all_to_all(Comm *c, void *out, const size_t *recv_counts, const void *in,
    const size_t *send_counts, size_t elem) {
    comm_finish(comm_all_to_all_start(c, out, recv_counts, in, send_counts, elem));
}

/* buf of root to everybody. Large ones are dealt out, then gathered: root sends twice the bytes
   instead of size - 1 times. */
COMM_FN CommRequest *comm_broadcast_start(Comm *c, void *buf, size_t bytes, int root) {
    const int W = c->size, small = bytes <= COMM_SMALL_BYTES || W == 2, me = c->rank;
    CommRequest *q = comm_request(c, COMM_BROADCAST);
    if (root < 0 || root >= W) die(RUN_ERROR, "internal: broadcast from rank %d of %d", root, W);
    if (W == 1) return comm_launch(q);
    char *p = me == root ? (char *)(uintptr_t)comm_staged_in(q, buf, bytes)
                         : comm_staged_out(q, buf, bytes);
    const size_t own = comm_share(bytes, W, me), len = comm_share(bytes, W, me + 1) - own;
    q->phases = small ? 1 : 2;
    for (int r = 0; r < W; r++) {
        const size_t at = comm_share(bytes, W, r), n = comm_share(bytes, W, r + 1) - at;
        if (r == me) continue;
        if (me == root) comm_sends(q, 0, r, small ? p : comm_at(p, at), small ? bytes : n);
        if (r == root) comm_receives(q, 0, r, small ? p : comm_at(p, own), small ? bytes : len);
        if (small) continue;
        if (r != root) comm_sends(q, 1, r, comm_at(p, own), len);
        if (me != root) comm_receives(q, 1, r, comm_at(p, at), n);
    }
    return comm_launch(q);
}
COMM_FN void comm_broadcast(Comm *c, void *buf, size_t bytes, int root) {
    comm_finish(comm_broadcast_start(c, buf, bytes, root));
}

// Returns when every rank has called it. What a device has queued is not waited for.
COMM_FN CommRequest *comm_barrier_start(Comm *c) {
    CommRequest *q = comm_request(comm_host_of(c), COMM_BARRIER);
    q->empty_too = 1;
    return comm_launch(q);
}
COMM_FN void comm_barrier(Comm *c) { comm_finish(comm_barrier_start(c)); }

/* The largest value of any rank: "has one of us failed, or got a signal?", so that all act at the
   same step. */
COMM_FN int comm_agree(Comm *c, int value) {
    int32_t v = value;
    comm_all_reduce(comm_host_of(c), &v, 1, COMM_I32, COMM_MAX);
    return v;
}

// -------------------------------------------------------------------------------------------------
// groups

/* How a launcher tells a process that it is one of several. Slurm's own variables do not count: a
   script under sbatch has them too, and nobody else runs it; srun with PMI or PMIx sets theirs. */
static const struct {
    const char *rank, *size, *local;
} comm_launchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},            // MPICH, Intel MPI, srun --mpi=pmi2
    {"PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"}, // srun --mpi=pmix, prterun
};
enum { COMM_LAUNCHERS = sizeof comm_launchers / sizeof *comm_launchers };

static int comm_env(const char *name, int otherwise) {
    const char *s = getenv(name);
    char *end;
    const long v = s ? strtol(s, &end, 10) : 0;
    return s && *s && !*end && v >= 0 && v <= INT_MAX ? (int)v : otherwise;
}

/* The launcher's line above, -1 = none: started by hand. size: ranks that it started, 0 = it did
   not say. */
static int comm_launched(int *rank, int *size) {
    for (int i = 0; i < COMM_LAUNCHERS; i++) {
        if ((*rank = comm_env(comm_launchers[i].rank, -1)) < 0) continue;
        *size = comm_env(comm_launchers[i].size, 0);
        return i;
    }
    return -1;
}

// This rank among those of its machine, as the launcher says; 0 where it does not: picks a GPU.
COMM_FN int comm_local_rank(void) {
    int rank, size;
    const int i = comm_launched(&rank, &size);
    return i < 0 ? 0 : comm_env(comm_launchers[i].local, comm_env("SLURM_LOCALID", 0));
}

static int *comm_ranks(int size) {
    int *p = (int *)comm_grow(NULL, (size_t)size * sizeof *p);
    for (int r = 0; r < size; r++) p[r] = r;
    return p;
}

static void comm_open_as(Comm *c, const CommBack *back, int rank, int size) {
    memset(c, 0, sizeof *c);
    c->world = (CommWorld *)calloc(1, sizeof *c->world);
    if (!c->world) die(RUN_ERROR, "no memory");
    c->world->timeout = COMM_TIMEOUT_S;
    c->world->message = COMM_MESSAGE_BYTES;
    c->world->scratch = COMM_SCRATCH_BYTES;
    c->world->check = COMM_CHECK;
    c->world->tag_limit = INT_MAX;
    c->back = back;
    c->rank = rank;
    c->size = size;
    c->member = comm_ranks(size);
}

/* The group of one rank of `size`, in one process, which moves nothing and counts everything.
   Buffers may be NULL; sums stay as they are. */
COMM_FN void comm_open_dry(Comm *c, int rank, int size) {
    if (size < 1 || rank < 0 || rank >= size)
        die(USER_ERROR, "--ranks: expected rank 0 to %d of at least 1, found %d", size - 1, rank);
    comm_open_as(c, &comm_dry, rank, size);
}

/* All ranks that a launcher (mpirun, srun) started; without one, this process alone, and MPI is not
   touched. Once a program, on the main thread. comm_close() ends it. */
COMM_FN void comm_open(Comm *c) {
    int rank = 0, size = 0;
    const int launched = comm_launched(&rank, &size) >= 0;
#ifdef USE_MPI
    if (launched) {
        int *limit, found, level, world_size, world_rank;
        comm_mpi_check(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
        comm_mpi_check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "errhandler");
        comm_mpi_check(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank), "MPI_Comm_rank");
        comm_mpi_check(MPI_Comm_size(MPI_COMM_WORLD, &world_size), "MPI_Comm_size");
        comm_mpi_check(
            MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, (void *)&limit, &found), "MPI_TAG_UB");
        comm_open_as(c, &comm_mpi, world_rank, world_size);
        c->world->tag_limit = found ? *limit : 32767; // what the standard promises
        c->world->mpi = c->world->open = 1;
        comm_opened = c->world;
        comm_pid = getpid();
#ifdef __GLIBC__
        const int rc = on_exit(comm_on_exit, NULL);
#else
        const int rc = atexit(comm_on_exit);
#endif
        if (rc) die(RUN_ERROR, "no memory");
        if (size > 1 && world_size != size)
            die(USER_ERROR,
                "the launcher started %d ranks, but MPI sees %d: use the mpirun of the MPI that "
                "this was built with",
                size, world_size);
        return;
    }
#else
    if (launched && (size > 1 || rank > 0))
        die(USER_ERROR,
            "started as rank %d of several, but built without MPI: install one with mpicc, make "
            "clean, make",
            rank);
#endif
    comm_open_as(c, &comm_alone, 0, 1);
}

/* The ranks of c that have this rank's color, in the order of key (NULL, or the same: of their
   ranks in c). color, key (c->size): of every rank, the same arrays everywhere; color < 0: in no
   group, out->size = 0. Called by all of c, which is of host memory. comm_close() frees it. */
COMM_FN void comm_split_known(Comm *out, Comm *c, const int *color, const int *key) {
    CommWorld *w = c->world;
    int64_t id =
        w->last_id; // larger than any that a rank of c has, so no two groups of it share one
    if (c->host) die(RUN_ERROR, "internal: a group for a device is made from one for the host");
    comm_finish(comm_all_reduce_kind(c, COMM_SETUP, &id, 1, COMM_I64, COMM_MAX));
    w->last_id = (int)++id;
    if ((id + 1) * COMM_TAGS > w->tag_limit)
        die(RUN_ERROR, "more than %d groups of ranks", w->tag_limit / COMM_TAGS);
    memset(out, 0, sizeof *out);
    out->world = w;
    out->back = c->back;
    out->id = (int)id;
    out->rank = -1;
    if (color[c->rank] < 0) return;
    int *order = comm_ranks(c->size), n = 0;
    for (int r = 0; r < c->size; r++) { // insertion sort, stable
        int i = n;
        if (color[r] != color[c->rank]) continue;
        for (; i > 0 && key && key[order[i - 1]] > key[r]; i--) order[i] = order[i - 1];
        order[i] = r;
        n++;
    }
    for (int i = 0; i < n; i++) {
        if (order[i] == c->rank) out->rank = i;
        order[i] = c->member[order[i]];
    }
    out->member = order;
    out->size = n;
}

// The same where a rank knows its own color and key only. (A dry rank cannot ask the others.)
COMM_FN void comm_split(Comm *out, Comm *c, int color, int key) {
    const int own[2] = {color, key};
    const size_t n = (size_t)c->size;
    if (!c->back->moves) die(RUN_ERROR, "internal: comm_split of a dry group: comm_split_known");
    int *all = (int *)comm_grow(NULL, 4 * n * sizeof *all);
    comm_finish(comm_gather_kind(c, COMM_SETUP, all, own, NULL, 1, sizeof own));
    for (size_t r = 0; r < n; r++) {
        all[2 * n + r] = all[2 * r];
        all[3 * n + r] = all[2 * r + 1];
    }
    comm_split_known(out, c, all + 2 * n, all + 3 * n);
    free(all);
}

/* The same ranks as c, for buffers in device memory: over NCCL where it is a CUDA device and this
   was built with it, otherwise staged through the host. Counts of rows, barriers and comm_agree
   stay on the host. Called by all of c; comm_close() frees it, before c. */
COMM_FN void comm_on_device(Comm *out, Comm *c, const CommDevice *device) {
    const size_t n = (size_t)c->size;
    if (!n) die(RUN_ERROR, "internal: a group without this rank has no device");
    int *same = (int *)calloc(n, sizeof *same);
    if (!same) die(RUN_ERROR, "no memory");
    Comm *host = (Comm *)comm_grow(NULL, sizeof *host);
    comm_split_known(host, c, same, NULL);
    comm_split_known(out, c, same, NULL);
    free(same);
    out->host = host;
    out->device = *device;
    out->staged = c->back->moves;
#ifdef USE_NCCL
    if (device->cuda && c->back->moves) {
        ncclUniqueId unique = comm_nccl_unique(out);
        comm_broadcast(host, &unique, sizeof unique, 0);
        comm_nccl_open(out, unique);
    }
#endif
}

/* NCCL: waits on the host until everything that was queued is done, with the time limit and an eye
   on errors of the network. For others there is nothing to wait for: comm_finish has. */
COMM_FN void comm_sync(Comm *c) {
#ifdef USE_NCCL
    if (c->nccl) comm_nccl_sync(c);
#else
    (void)c;
#endif
}

/* What this group did since the last call, by kind, and starts again from zero. A device's group
   has that of its host part too. The seconds of an operation count when it is finished. */
COMM_FN void comm_counts_take(Comm *c, CommCount out[COMM_KINDS]) {
#ifdef USE_NCCL
    if (c->nccl) comm_nccl_times(c);
#endif
    memcpy(out, c->count, sizeof c->count);
    memset(c->count, 0, sizeof c->count);
    for (int i = 0; i < COMM_KINDS && c->host; i++) {
        CommCount *h = &c->host->count[i];
        out[i].calls += h->calls;
        out[i].bytes += h->bytes;
        out[i].seconds += h->seconds;
        memset(h, 0, sizeof *h);
    }
}

// Seconds without any message after which a rank that waits gives up and ends the program.
COMM_FN void comm_set_timeout(Comm *c, double seconds) { c->world->timeout = seconds; }

/* Frees a group. That of comm_open() comes last: every rank calls it, waits there for the others,
   and MPI ends. */
COMM_FN void comm_close(Comm *c) {
    CommWorld *w = c->world;
    if (!w) return;
    if (c->host) {
#ifdef USE_NCCL
        if (c->nccl) comm_nccl_close(c);
#endif
        for (int i = 0; i < COMM_MAX_STARTED; i++)
            if (w->request[i].memory[COMM_DEVICE_SCRATCH]) {
                c->device.release(w->request[i].memory[COMM_DEVICE_SCRATCH]);
                w->request[i].memory[COMM_DEVICE_SCRATCH] = NULL;
                w->request[i].room[COMM_DEVICE_SCRATCH] = 0;
            }
        comm_close(c->host);
        free(c->host);
    } else if (c->id == 0) {
#ifdef USE_MPI
        if (w->mpi) {
            comm_barrier(c);
            signal(SIGALRM, SIG_DFL); // MPI_Finalize waits too
            alarm(w->timeout < 1 ? 1 : w->timeout > 1e6 ? 1000000 : (unsigned)w->timeout);
            comm_mpi_check(MPI_Finalize(), "MPI_Finalize");
            alarm(0);
            w->open = 0;
            comm_opened = NULL;
        }
#endif
        for (int i = 0; i < COMM_MAX_STARTED; i++) {
            CommRequest *q = &w->request[i];
            for (int k = 0; k < 4; k++)
                if (k != COMM_DEVICE_SCRATCH) free(q->memory[k]);
            free(q->part);
            free(q->message);
            free(q->mpi);
        }
        free(w);
    }
    free(c->member);
    memset(c, 0, sizeof *c);
}

#endif
