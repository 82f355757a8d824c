/* comm_mpi.h: the MPI back of comm.h, which includes it where USE_MPI is set: leaf calls, and how a
   rank that ends takes the others with it. Isend and Irecv of bytes on host memory; what goes to whom
   is comm.h's. */
#ifndef COMM_MPI_H
#define COMM_MPI_H

static void comm_mpi_check(int rc, const char *what) {
    char text[MPI_MAX_ERROR_STRING];
    int n;
    if (rc == MPI_SUCCESS) return;
    MPI_Error_string(rc, text, &n);
    die(RUN_ERROR, "MPI: %s: %s", what, text);
}

static MPI_Request *comm_mpi_next(CommRequest *q, int peer, int receives, size_t bytes) {
    if (q->n_pending == q->pending_room) {
        q->pending_room = q->pending_room ? 2 * q->pending_room : 16;
        const size_t n = (size_t)q->pending_room;
        q->mpi = comm_grow(q->mpi, n * sizeof(MPI_Request));
        q->message = (CommMessage *)comm_grow(q->message, n * sizeof *q->message);
    }
    const CommMessage m = {peer, receives, bytes};
    q->message[q->n_pending] = m;
    q->n_left++;
    return (MPI_Request *)q->mpi + q->n_pending++;
}

// A message of more than world->message bytes goes in pieces; both sides know where it is cut.
static void comm_mpi_move(CommRequest *q, int rank, char *p, size_t bytes, int receives) {
    const int peer = q->c->member[rank];
    const size_t most = q->c->world->message;
    size_t at = 0;
    do {
        const size_t n = bytes - at < most ? bytes - at : most;
        MPI_Request *slot = comm_mpi_next(q, peer, receives, n);
        char *part = comm_at(p, at);
        if (receives)
            comm_mpi_check(
                MPI_Irecv(part, (int)n, MPI_BYTE, peer, q->tag, MPI_COMM_WORLD, slot), "MPI_Irecv");
        else
            comm_mpi_check(
                MPI_Isend(part, (int)n, MPI_BYTE, peer, q->tag, MPI_COMM_WORLD, slot), "MPI_Isend");
        at += n;
    } while (at < bytes);
}
static void comm_mpi_send(CommRequest *q, int to, const char *p, size_t bytes) {
    comm_mpi_move(q, to, (char *)(uintptr_t)p, bytes, 0);
}
static void comm_mpi_recv(CommRequest *q, int from, char *p, size_t bytes) {
    comm_mpi_move(q, from, p, bytes, 1);
}

static void comm_mpi_begin(CommRequest *q) { q->n_pending = q->n_left = 0; }

static int comm_mpi_done(CommRequest *q) {
    enum { SOME = 32 };
    int n, which[SOME];
    MPI_Status status[SOME];
    MPI_Request *all = (MPI_Request *)q->mpi;
    for (int at = 0; at < q->n_pending && q->n_left; at += SOME) {
        const int m = q->n_pending - at < SOME ? q->n_pending - at : (int)SOME;
        const int rc = MPI_Testsome(m, all + at, &n, which, status);
        if (rc == MPI_ERR_IN_STATUS)
            for (int i = 0; i < n; i++) {
                const CommMessage *k = &q->message[at + which[i]];
                if (status[i].MPI_ERROR == MPI_ERR_TRUNCATE)
                    die(RUN_ERROR, "rank %d: %s: rank %d sent more than the %zu bytes expected",
                        q->c->member[q->c->rank], comm_kind_names[q->kind], k->peer, k->bytes);
                comm_mpi_check(status[i].MPI_ERROR, comm_kind_names[q->kind]);
            }
        else
            comm_mpi_check(rc, "MPI_Testsome");
        if (n == MPI_UNDEFINED || n == 0) continue;
        q->c->world->heard = now_s();
        q->n_left -= n;
        for (int i = 0; i < n; i++) {
            const CommMessage *k = &q->message[at + which[i]];
            int got;
            if (!k->receives) continue;
            comm_mpi_check(MPI_Get_count(&status[i], MPI_BYTE, &got), "MPI_Get_count");
            if ((size_t)got != k->bytes)
                die(RUN_ERROR, "rank %d: %s: rank %d sent %d bytes where %zu were expected",
                    q->c->member[q->c->rank], comm_kind_names[q->kind], k->peer, got, k->bytes);
        }
    }
    return q->n_left == 0;
}

// The world's rank of one whose message is missing, -1 = of nobody; at least one is under way.
static int comm_mpi_missing(const CommRequest *q) {
    const MPI_Request *all = (const MPI_Request *)q->mpi;
    for (int receives = 1; receives >= 0; receives--)
        for (int i = 0; i < q->n_pending; i++)
            if (all[i] != MPI_REQUEST_NULL && q->message[i].receives == receives)
                return q->message[i].peer;
    return -1;
}

static const CommBack comm_mpi = {"MPI", 1, NULL, comm_mpi_begin, comm_mpi_send, comm_mpi_recv,
    NULL, comm_mpi_done, comm_host_copy, comm_host_reduce, NULL, NULL};

/* The end of a program. Before comm_close() the others of the group still count on this rank: they
   are ended too, with this status. MPI_Abort itself may wait for a launcher that is gone, so a
   clock runs. */
static CommWorld *comm_opened;
static pid_t comm_pid; // a child of fork() is no rank
static void comm_at_exit(int status) {
    if (!comm_opened || !comm_opened->open || comm_pid != getpid()) return;
    comm_opened->open = 0;
    if (!status) {
        status = RUN_ERROR;
        fprintf(stderr, "train_moe: error: a rank left its group: exit before comm_close\n");
    }
    fflush(NULL);
    signal(SIGALRM, SIG_DFL);
    alarm(20);
    MPI_Abort(MPI_COMM_WORLD, status);
    _exit(status);
}
#ifdef __GLIBC__
static void comm_on_exit(int status, void *unused) { (void)unused, comm_at_exit(status); }
#else
static void comm_on_exit(void) { comm_at_exit(RUN_ERROR); } // atexit does not tell the status
#endif

#endif
