/* comm_nccl.h: the NCCL back of comm.h, which includes it where USE_NCCL is set: leaf calls only.

   What goes to whom, sizes, offsets and counts are comm.h's; a phase is one ncclGroup of sends and
   receives of bytes. Everything is queued on the group's own stream, which first waits for the
   device's: comm_*_start returns at once, and comm_finish makes the device's stream wait, not the
   host. comm_sync waits on the host, with the time limit. The unique id comes over MPI. Times are
   those of the stream, read from events when the next count is taken.

   NCCL's own sums have an order that depends on the size of the message and on the wires. So the
   sum in rank order is a kernel, in comm_nccl.cu, behind comm_cuda_reduce(). */
#ifndef COMM_NCCL_H
#define COMM_NCCL_H

#ifndef USE_MPI
#error "NCCL needs MPI, which carries its unique id"
#endif
#include <cuda_runtime_api.h>
#include <nccl.h>

#ifdef __cplusplus
extern "C" {
#endif
// comm_host_reduce on a device: n elements of CommType `type`, by CommOp `op`, queued on the stream
extern void comm_cuda_reduce(void *out, const void *own, const void *scratch, size_t chunk,
    int rank, int size, size_t n, int type, int op, void *stream);
#ifdef __cplusplus
}
#endif

static void comm_cuda_check(cudaError_t rc, const char *what) {
    if (rc != cudaSuccess) die(RUN_ERROR, "CUDA: %s: %s", what, cudaGetErrorString(rc));
}
static void comm_nccl_check(ncclResult_t rc, const char *what) {
    if (rc != ncclSuccess) die(RUN_ERROR, "NCCL: %s: %s", what, ncclGetErrorString(rc));
}
static ncclComm_t comm_nccl_of(const CommRequest *q) { return (ncclComm_t)q->c->nccl; }
static cudaStream_t comm_stream_of(const CommRequest *q) { return (cudaStream_t)q->c->stream; }

// Adds the time of a slot's last operation, which the host did not wait for.
static void comm_nccl_time(CommRequest *q) {
    float ms = 0;
    if (!q->event_counted) return;
    comm_cuda_check(cudaEventSynchronize((cudaEvent_t)q->event[2]), "cudaEventSynchronize");
    comm_cuda_check(
        cudaEventElapsedTime(&ms, (cudaEvent_t)q->event[1], (cudaEvent_t)q->event[2]), "time");
    q->counter->seconds += 1e-3 * ms;
    q->event_counted = 0;
}
static void comm_nccl_enter(CommRequest *q) {
    comm_nccl_time(q);
    for (int i = 0; i < 3; i++)
        if (!q->event[i]) {
            cudaEvent_t e;
            comm_cuda_check(cudaEventCreate(&e), "cudaEventCreate");
            q->event[i] = e;
        }
    comm_cuda_check(
        cudaEventRecord((cudaEvent_t)q->event[0], (cudaStream_t)q->c->device.stream), "record");
    comm_cuda_check(
        cudaStreamWaitEvent(comm_stream_of(q), (cudaEvent_t)q->event[0], 0), "cudaStreamWaitEvent");
    comm_cuda_check(cudaEventRecord((cudaEvent_t)q->event[1], comm_stream_of(q)), "record");
}
static void comm_nccl_begin(CommRequest *q) {
    (void)q;
    comm_nccl_check(ncclGroupStart(), "ncclGroupStart");
}
static void comm_nccl_send(CommRequest *q, int to, const char *p, size_t bytes) {
    comm_nccl_check(
        ncclSend(p, bytes, ncclInt8, to, comm_nccl_of(q), comm_stream_of(q)), "ncclSend");
}
static void comm_nccl_recv(CommRequest *q, int from, char *p, size_t bytes) {
    comm_nccl_check(
        ncclRecv(p, bytes, ncclInt8, from, comm_nccl_of(q), comm_stream_of(q)), "ncclRecv");
}
static void comm_nccl_end(CommRequest *q) {
    (void)q;
    comm_nccl_check(ncclGroupEnd(), "ncclGroupEnd");
}
static void comm_nccl_copy(CommRequest *q, char *dst, const char *src, size_t bytes) {
    comm_cuda_check(
        cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, comm_stream_of(q)), "copy");
}
static void comm_nccl_reduce(
    CommRequest *q, char *out, const char *own, const char *scratch, size_t bytes) {
    comm_cuda_reduce(out, own, scratch, q->chunk, q->c->rank, q->c->size,
        bytes / comm_type_size(q->type), q->type, q->op, q->c->stream);
    comm_cuda_check(cudaGetLastError(), "sum in rank order");
}
static void comm_nccl_leave(CommRequest *q) {
    comm_cuda_check(cudaEventRecord((cudaEvent_t)q->event[2], comm_stream_of(q)), "record");
    q->event_counted = 1;
    q->counter = &q->c->count[q->kind];
}
static void comm_nccl_join(CommRequest *q) {
    comm_cuda_check(
        cudaStreamWaitEvent((cudaStream_t)q->c->device.stream, (cudaEvent_t)q->event[2], 0),
        "cudaStreamWaitEvent");
}
static const CommBack comm_nccl = {"NCCL", 1, comm_nccl_enter, comm_nccl_begin, comm_nccl_send,
    comm_nccl_recv, comm_nccl_end, NULL, comm_nccl_copy, comm_nccl_reduce, comm_nccl_leave,
    comm_nccl_join};

// What names a group of ranks to NCCL: made by its rank 0.
static ncclUniqueId comm_nccl_unique(const Comm *c) {
    ncclUniqueId unique;
    memset(&unique, 0, sizeof unique);
    if (c->rank == 0) comm_nccl_check(ncclGetUniqueId(&unique), "ncclGetUniqueId");
    return unique;
}

static void comm_nccl_open(Comm *c, ncclUniqueId unique) {
    cudaStream_t stream;
    ncclComm_t nccl;
    comm_cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    comm_nccl_check(ncclCommInitRank(&nccl, c->size, unique, c->rank), "ncclCommInitRank");
    c->back = &comm_nccl;
    c->staged = 0;
    c->stream = stream;
    c->nccl = nccl;
}

// Waits on the host until all is done that was queued.
static void comm_nccl_sync(Comm *c) {
    const double since = now_s();
    for (cudaError_t rc; (rc = cudaStreamQuery((cudaStream_t)c->stream)) != cudaSuccess;) {
        ncclResult_t state;
        if (rc != cudaErrorNotReady) comm_cuda_check(rc, "cudaStreamQuery");
        comm_nccl_check(ncclCommGetAsyncError((ncclComm_t)c->nccl, &state), "async error");
        comm_nccl_check(state, "an operation between ranks");
        if (now_s() - since > c->world->timeout)
            die(RUN_ERROR, "rank %d waited %.0f s for the others on its device", c->member[c->rank],
                c->world->timeout);
        sched_yield();
    }
}

// Adds the times that are still in events to this group's counts.
static void comm_nccl_times(Comm *c) {
    for (int i = 0; i < COMM_MAX_STARTED; i++) {
        CommRequest *q = &c->world->request[i];
        if (q->counter >= c->count && q->counter < c->count + COMM_KINDS) comm_nccl_time(q);
    }
}

static void comm_nccl_close(Comm *c) {
    comm_nccl_sync(c);
    comm_nccl_times(c); // no slot points to this group any more
    comm_nccl_check(ncclCommDestroy((ncclComm_t)c->nccl), "ncclCommDestroy");
    comm_cuda_check(cudaStreamDestroy((cudaStream_t)c->stream), "cudaStreamDestroy");
}

#endif
