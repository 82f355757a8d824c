/* train_moe.c: the training loop. The command line is in flags.h, the other commands in commands.h.

     train_moe [train] [flags] | generate | eval | info | bench | tokenize | place
     --help lists the flags of each
     mpirun -n N train_moe: on N ranks, which call everything here together; one of them, the lead,
     writes and speaks (ranks.h has the flags of their layout)

   In order:
     schedules    the learning rate of a step
     log          metrics.jsonl, routing.jsonl and the line on the screen
     checkpoints  what a run needs to go on as if it had never stopped: see save and start_resumed
     train        the loop

   A run is a function of its flags and its data: step s reads rows (s-1)*R .. s*R-1 of the
   loader's endless stream, and everything random comes from counters. So a checkpoint is weights,
   moments, a step number and the flags. */
#include "flags.h"
#include "ranks.h"

#include <signal.h>
#include <sys/resource.h>

// -------------------------------------------------------------------------------------------------
// the run

enum { SAMPLE_TOKENS = 300, SAMPLE_T = 64 };

typedef struct Run {
    Options o;
    char out[CKPT_PATH];
    Model m, sampler;
    Generator gen;
    Tokenizer tok;
    Data data;
    Watch watch;
    int *x, *y;
    int micro_batches, rows_a_step, lock;
    int64_t step, saved_step; // last finished step; last step saved in this process, -1 = none
    double elapsed, started;  // seconds of earlier processes; when this one started
    double best_val;
    int64_t best_step;   // 0 = none
    json_t *last;        // the log line of `step`
    FILE *log, *routing; // routing: NULL where nothing is recorded
    double t_data, t_step, t_eval, t_save, t_sample;
    Comm world;      // all ranks; until build(), then it is par's
    Parallel par;    // how the model is laid out over them
    int lead, first; // this rank writes and speaks; its first sequence of a micro-batch
    int stop;        // one of the ranks got a signal
} Run;

static int ranks_on_machine = 1;
static int several(const Run *r) { return r->world.size > 1; }
// All ranks: before and after build(), which gives them to par.
static Comm *all_ranks(Run *r) { return r->m.shape.par ? &r->par.world : &r->world; }
// Whether any rank says so.
static int anyone(Run *r, int so) { return several(r) ? comm_agree(all_ranks(r), so != 0) : so; }
// All ranks must see the same `what`, which `text` says: a folder that is not shared is found here, not
// when they wait for one another in vain.
static void seen_alike(Run *r, const char *what, const char *text) {
    const uint64_t mine = text_hash(text);
    if (!several(r)) return;
    uint64_t *all = calloc((size_t)r->world.size, sizeof *all);
    if (!all) die(RUN_ERROR, "no memory");
    comm_all_gather(all_ranks(r), all, &mine, 1, sizeof mine);
    for (int k = 1; k < r->world.size; k++) {
        if (all[k] == all[0]) continue;
        if (k != r->world.rank) comm_barrier(all_ranks(r)); // that one ends it
        this_rank = 0;
        char host[256] = "";
        gethostname(host, sizeof host - 1);
        die(USER_ERROR,
            "rank %d on %s: expected the same %s as rank 0, found others; all ranks read from a "
            "file system that they share",
            k, host, what);
    }
    free(all);
}

static volatile sig_atomic_t stop_signal;
static void on_signal(int sig) {
    stop_signal = sig;
    signal(sig, SIG_DFL); // a second one ends the program at once
}

static double elapsed_s(const Run *r) { return r->elapsed + now_s() - r->started; }

// The learning rate of step 1..steps.
static double learning_rate(const Options *o, int64_t step) {
    if (step <= o->warmup) return o->lr * (double)step / (double)o->warmup;
    const double left = (double)(o->steps - o->warmup),
                 p = left > 0 ? (double)(step - o->warmup) / left : 1;
    switch (o->schedule) {
    case SCHEDULE_COSINE:
        return o->min_lr + (o->lr - o->min_lr) * 0.5 * (1 + cos_d(3.14159265358979324 * p));
    case SCHEDULE_LINEAR: return o->lr + (o->min_lr - o->lr) * p;
    case SCHEDULE_WSD: return p <= 0.8 ? o->lr : o->lr + (o->min_lr - o->lr) * (p - 0.8) / 0.2;
    }
    return o->lr;
}

// -------------------------------------------------------------------------------------------------
// log

/* One line of metrics.jsonl as an object. Balance, the losses of the router and dead experts are
   those of the whole step, all its micro-batches together. */
static json_t *metrics(Run *r, const StepState *s, double lr, double step_s) {
    const StepLoad *load = &r->watch.now;
    const int64_t tokens = (int64_t)r->rows_a_step * r->o.c.seq_len;
    json_t *line = json_pack("{s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:i, s:f, s:f, s:f}", "step",
        (json_int_t)r->step, "tokens", (json_int_t)(r->step * tokens), "loss", s->loss, "lr", lr,
        "grad_norm", s->grad_norm, "aux_loss", load->aux, "z_loss", load->z, "balance", load->worst,
        "dead_experts", load->all_dead, "step_ms", step_s * 1e3, "tok_per_s",
        (double)tokens / step_s, "elapsed_s", elapsed_s(r));
    if (!line || watch_log(&r->watch, line, r->step, tokens, selecting(&r->o))) return NULL;
    if (several(r) && ranks_log(&r->par, line, &r->o.c, load->count)) return NULL;
    return line;
}

// Adds text, which is freed, to a log.
static void log_text(Run *r, FILE *f, const char *name, char *text, const char *end) {
    if (!text) die(RUN_ERROR, "no memory for %s/%s", r->out, name);
    if (fprintf(f, "%s%s", text, end) < 0 || fflush(f))
        die(RUN_ERROR, "%s/%s: cannot write: %s; the last checkpoint is %s/latest", r->out, name,
            strerror(errno), r->out);
    free(text);
}

static void log_line(Run *r) {
    if (!r->lead) return;
    log_text(r, r->log, "metrics.jsonl", json_dumps(r->last, JSON_COMPACT | JSON_REAL_PRECISION(9)),
        "\n");
}

// Right after a step: an evaluation has routing of its own, and a checkpoint has all before it.
static void log_routing(Run *r) {
    if (r->routing && r->step % r->o.routing_every == 0)
        log_text(r, r->routing, "routing.jsonl",
            watch_routing(&r->m, r->step, r->m.shape.B * r->o.c.seq_len), "");
}

static void show_time(char buf[32], double s) {
    const long t = (long)(s + 0.5);
    if (t >= 3600)
        snprintf(buf, 32, "%ld:%02ld:%02ld", t / 3600, t / 60 % 60, t % 60);
    else
        snprintf(buf, 32, "%02ld:%02ld", t / 60, t % 60);
}

// step  120/2000 | loss 1.832 | val 1.904 | norm 0.71 | lr 9.8e-04 | 12.4k tok/s | balance 1.06 |
// 01:12 < 18:40
static void progress_line(
    Run *r, double lr, const StepState *s, double tok_per_s, int64_t first, int terminal) {
    char val[32] = "", bal[32] = "", rate[32], done[32], left[32];
    const json_t *v = json_object_get(r->last, "val_loss");
    const int64_t steps = r->o.steps;
    int width = snprintf(NULL, 0, "%lld", (long long)steps);
    const double each = (now_s() - r->started) / (double)(r->step - first);
    if (!r->o.log_every || (r->step % r->o.log_every && r->step != steps && !v)) return;
    if (v) snprintf(val, sizeof val, " | val %.3f", json_number_value(v));
    if (r->m.step_stats) snprintf(bal, sizeof bal, " | balance %.2f", r->watch.now.worst);
    if (r->watch.now.all_dead)
        snprintf(bal + strlen(bal), sizeof bal - strlen(bal), " (%d dead)", r->watch.now.all_dead);
    show_time(done, elapsed_s(r));
    show_time(left, each * (double)(steps - r->step));
    printf("%sstep %*lld/%lld | loss %.3f%s | norm %.2f | lr %.1e | %s tok/s%s | %s < %s%s",
        terminal ? "\r" : "", width, (long long)r->step, (long long)steps, s->loss, val,
        s->grad_norm, lr, human(tok_per_s, rate), bal, done, left,
        !terminal || v || r->step == steps ? "\n" : "  ");
    line_open = terminal && !v && r->step != steps;
    fflush(stdout);
}

// Whether the line of a step has a validation loss.
static int eval_due(const Run *r, int64_t step) {
    const Options *o = &r->o;
    return o->eval_every && r->data.val_tokens > 0 &&
        (step == o->steps || step % o->eval_every == 0);
}

/* Keeps the lines of steps 1..step of an earlier process and learns the best validation loss from
   them. Drops later and torn ones, and the last one if it still lacks its validation loss, where the
   log has those: a signal came first, and the caller makes it again. Returns the last step that has
   a line. */
static int64_t trim_log(Run *r, const char *name, int validated) {
    char path[CKPT_PATH], tmp[CKPT_PATH + 8], *line = NULL;
    size_t size = 0;
    int64_t last = 0;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", r->out, name) >= sizeof path - 8)
        die(USER_ERROR, "--out: the name is too long");
    snprintf(tmp, sizeof tmp, "%s.tmp", path);
    FILE *in = fopen(path, "r"), *out = fopen(tmp, "w");
    if (!out) die(RUN_ERROR, "%s: cannot write: %s", tmp, strerror(errno));
    while (in && getline(&line, &size, in) > 0) {
        json_t *j = json_loads(line, 0, NULL);
        const json_t *step = json_object_get(j, "step"), *val = json_object_get(j, "val_loss");
        const int64_t s = json_is_integer(step) ? (int64_t)json_integer_value(step) : -1;
        const int owed = validated && s == r->step && eval_due(r, s) && !json_is_number(val);
        if (s > last && s <= r->step && !owed) {
            fputs(line, out);
            last = s;
            if (json_is_number(val) && (!r->best_step || json_number_value(val) < r->best_val)) {
                r->best_val = json_number_value(val);
                r->best_step = s;
            }
        }
        json_decref(j);
    }
    if (in) fclose(in);
    free(line);
    if (fflush(out) || fsync(fileno(out)) || fclose(out) || rename(tmp, path))
        die(RUN_ERROR, "%s: cannot write: %s", path, strerror(errno));
    return last;
}

static FILE *open_log(const Run *r, const char *name) {
    char path[CKPT_PATH + 32];
    snprintf(path, sizeof path, "%s/%s", r->out, name);
    FILE *f = fopen(path, "a");
    if (!f) die(RUN_ERROR, "%s: cannot write: %s", path, strerror(errno));
    return f;
}

// routing.jsonl, if something is recorded, or was by an earlier process.
static void open_routing(Run *r) {
    const int records = r->o.routing_every && moe_layers(&r->o.c);
    if (r->o.routing_every && !records)
        warn("--routing-every %lld: a dense model routes nothing: there is nothing to record",
            (long long)r->o.routing_every);
    if (!records && !has_file(r->out, "routing.jsonl")) return;
    const int64_t last = trim_log(r, "routing.jsonl", 0);
    char path[CKPT_PATH + 32];
    snprintf(path, sizeof path, "%s/routing.jsonl", r->out);
    if (records)
        r->routing = open_log(r, "routing.jsonl");
    else if (!last && unlink(path)) // of another run
        die(RUN_ERROR, "%s: cannot remove: %s", path, strerror(errno));
}

static void close_log(const Run *r, FILE *f, const char *name) {
    if (f && fclose(f)) die(RUN_ERROR, "%s/%s: cannot write: %s", r->out, name, strerror(errno));
}

// -------------------------------------------------------------------------------------------------
// checkpoints

// Two sets of texts that differ have different numbers here, but for an accident of 2^-64.
static json_t *data_identity(const Data *d) {
    uint64_t h = data_hash(0, d->train_tokens, d->val_tokens);
    for (int i = 0; i < d->n_files; i++) {
        h = data_hash(1, h, d->file[i].size);
        for (size_t at = 0; d->file[i].map && at < d->file[i].size;
             at += 1 + d->file[i].size / 4096)
            h = data_hash(2, h, d->file[i].map[at]);
    }
    for (int i = 0; i < d->n_train + d->n_val; i++) { // tokens that are no bytes of a file
        const DataPart *p = i < d->n_train ? &d->train[i] : &d->val[i - d->n_train];
        for (uint64_t at = 0; !p->byte && at < p->len; at += 1 + p->len / 4096)
            h = data_hash(3, h, (uint64_t)data_token(p, at));
    }
    char hex[17];
    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)h);
    return json_pack("{s:I, s:I, s:s}", "train_tokens", (json_int_t)d->train_tokens, "val_tokens",
        (json_int_t)d->val_tokens, "fingerprint", hex);
}

// The tensors of a checkpoint, whatever ranks they are on. Without a folder: sends them to the rank
// that writes.
static int save_tensors(Run *r, const char *folder, Err *err) {
    Model *m = &r->m;
    if (several(r)) {
        const Spread s = model_spread(m);
        return spread_write(
                   folder, &m->c, m->b, &s, 0, m->base[A_PARAMS], m->base[A_BUFFERS], err) ||
            spread_write(folder, &m->c, m->b, &s, 1, moment(m, 0), moment(m, 1), err);
    }
    return model_write(
               folder, &m->c, &m->table, m->b, m->base[A_PARAMS], m->base[A_BUFFERS], err) ||
        optimizer_write(folder, &m->c, &m->table, m->b, moment(m, 0), moment(m, 1), err);
}

static void data_alike(Run *r) {
    json_t *j = data_identity(&r->data);
    char *text = json_dumps(j, JSON_COMPACT);
    if (!text) die(RUN_ERROR, "no memory");
    seen_alike(r, "texts (--input, --val)", text);
    free(text);
    json_decref(j);
}

static void save(Run *r) {
    CkptWrite w;
    Err err;
    const double t = now_s();
    const Model *m = &r->m;
    if (!r->lead) {
        if (save_tensors(r, "", &err)) die(RUN_ERROR, "%s", err.text);
        comm_barrier(&r->par.world); // until it is there
        r->saved_step = r->step;
        r->t_save += now_s() - t;
        return;
    }
    json_t *j = json_pack("{s:i, s:I, s:I, s:I, s:f, s:o, s:o, s:O?}", "version", 1, "step",
        (json_int_t)r->step, "next_row", (json_int_t)(r->step * r->rows_a_step), "seed",
        (json_int_t)r->o.seed, "elapsed_s", elapsed_s(r), "data", data_identity(&r->data), "flags",
        flags_to_json(&r->o), "last", r->last);
    if (!j) die(RUN_ERROR, "no memory for trainer.json");
    int rc = ckpt_begin(&w, r->out, r->step, &err);
    if (!rc)
        rc = config_write(
                 w.path, &m->c, r->o.aux_loss / m->c.top_k, m->b->param_type, r->tok.eot, &err) ||
            tokenizer_save(&r->tok, w.path, &err) || save_tensors(r, w.path, &err) ||
            json_write(w.path, "trainer.json", j, &err) || ckpt_commit(&w, &err);
    if (rc) {
        ckpt_abort(&w);
        die(RUN_ERROR, "step %lld could not be saved: %s; earlier checkpoints in %s are whole",
            (long long)r->step, err.text, r->out);
    }
    json_decref(j);
    if (several(r)) comm_barrier(&r->par.world);
    r->saved_step = r->step;
    r->t_save += now_s() - t;
}

static void prune(Run *r) {
    Err err;
    if (r->lead && ckpt_prune(r->out, (int)r->o.keep, &err)) warn("%s", err.text);
}

// Loads weights and moments of a checkpoint into the built model.
static int load(Run *r, const char *folder, Err *err) {
    Model *m = &r->m;
    if (several(r)) { // each rank its own; all of them or none
        const Spread s = model_spread(m);
        const int rc =
            spread_read(folder, &m->c, m->b, &s, 0, m->base[A_PARAMS], m->base[A_BUFFERS], err) ||
            spread_read(folder, &m->c, m->b, &s, 1, moment(m, 0), moment(m, 1), err);
        if (!comm_agree(&r->par.world, rc)) return 0;
        const int me = this_rank;
        this_rank = 0;
        if (rc && me) warn("rank %d: %s", me, err->text);
        this_rank = me;
        return rc ? -1 : fail(err, "%s: another rank cannot read it", folder);
    }
    return model_read(folder, &m->c, &m->table, m->b, m->base[A_PARAMS], m->base[A_BUFFERS], err) ||
            optimizer_read(folder, &m->c, &m->table, m->b, moment(m, 0), moment(m, 1), err)
        ? -1
        : 0;
}

/* Which checkpoint to resume: its trainer.json, or NULL when `folder` cannot be one. */
static json_t *read_trainer(const char *folder, Config *c, Err *err) {
    char path[CKPT_PATH + 32];
    snprintf(path, sizeof path, "%s/trainer.json", folder);
    if (config_read(c, folder, err)) return NULL;
    if (!has_file(folder, "trainer.json")) {
        fail(err,
            "%s: expected trainer.json beside the model, found none; --init %s starts a new run "
            "from its weights",
            folder, folder);
        return NULL;
    }
    if (!has_file(folder, "optimizer.safetensors")) {
        fail(err,
            "%s: expected optimizer.safetensors beside the model, found none; --init %s starts a "
            "new run from its weights",
            folder, folder);
        return NULL;
    }
    json_t *j = json_read(path, err);
    if (!j) return NULL;
    const json_t *step = json_object_get(j, "step"), *all = json_object_get(j, "flags"),
                 *version = json_object_get(j, "version");
    if (json_is_integer(version) && json_integer_value(version) == 1 && json_is_integer(step) &&
        json_integer_value(step) >= 0 && json_is_object(all))
        return j;
    fail(err, "%s: expected version 1 with \"step\" and \"flags\", found something else", path);
    json_decref(j);
    return NULL;
}

// -------------------------------------------------------------------------------------------------
// train

static void build(Run *r) {
    const Options *o = &r->o;
    const Backend *b = backend_of(o);
    const int T = SAMPLE_T < o->c.seq_len ? SAMPLE_T : o->c.seq_len, W = r->world.size;
    ModelShape shape = train_shape(o), sampler = {.B = 1, .T = T, .cache_len = o->c.seq_len};
    ranks_check(o, W);
    if (W > 1) {
        ranks_open(&r->par, &r->world, o, b);
        shape = ranks_shape(shape, &r->par);
        share_of_batch(&r->par.world, o->batch, r->par.world.rank, &r->first);
        sampler.par = &r->par; // all ranks generate the same text
        sampler.B_all = W;
    }
    model_plan(&r->m, &o->c, b, shape);
    model_plan(&r->sampler, &o->c, b, sampler);
    r->sampler.borrowed = 1;
    const double need = (double)model_bytes(&r->m) + (double)model_bytes(&r->sampler);
    double total, active;
    char p[32], a[32];
    count_parameters(&r->m.whole, &o->c, &total, &active);
    printf("model: %d layers, width %d, ", o->c.n_layers, o->c.d_model);
    if (moe_layers(&o->c))
        printf("%d experts of width %d, %d a token", o->c.n_experts, o->c.d_expert, o->c.top_k);
    else
        printf("dense MLP of width %d", o->c.d_expert);
    printf(": %s parameters, %s active; %.1f MB of memory; %d threads\n", human(total, p),
        human(active, a), need / 1e6, thread_max());
    if (W > 1)
        printf("ranks: %d, each with %d of %d experts%s%s%s; memory and threads are those of one\n",
            W, o->c.n_experts / o->ep, o->c.n_experts, o->zero ? ", ZeRO-1" : "",
            o->ep > 1 ? ", dispatch by " : "", o->ep > 1 ? way_names[r->par.way] : "");
    fflush(stdout);
    model_free(&r->m);
    model_free(&r->sampler);
    check_memory(b, b->apart == 2 ? need : need * ranks_on_machine,
        "lower --batch (with --total-batch), --seq or the size of the model, or raise --recompute");
    model_build(&r->m, &o->c, b, shape, NULL);
    model_build(&r->sampler, &o->c, b, sampler, &r->m);
    set_coefficients(&r->m, o);
    watch_open(&r->watch, &r->m.c);
    generator_open(&r->gen, &r->sampler);
    r->x = malloc(2 * (size_t)shape.B * o->c.seq_len * sizeof *r->x);
    if (!r->x) die(RUN_ERROR, "no memory");
    r->y = r->x + (size_t)shape.B * o->c.seq_len;
}

static void show_device(const Options *o) {
    char device[64];
    printf("device: %s\n", device_words(o, device));
}

static void count_rows(Run *r) {
    const int64_t micro = (int64_t)r->o.batch * r->o.c.seq_len,
                  total = r->o.total_batch ? r->o.total_batch : micro;
    if (total % micro || total / micro > 1 << 20)
        die(USER_ERROR, "--total-batch: expected a multiple of batch x seq = %lld, found %lld",
            (long long)micro, (long long)total);
    r->micro_batches = (int)(total / micro);
    r->rows_a_step = r->micro_batches * r->o.batch;
}

static void show_data(const Run *r) {
    char a[32], b[32];
    printf("data: %d file%s, %s training tokens, %s for validation\n", r->data.n_files,
        r->data.n_files == 1 ? "" : "s", human((double)r->data.train_tokens, a),
        human((double)r->data.val_tokens, b));
    if (!r->data.val_tokens && r->o.eval_every)
        warn("no validation batches: the held-out part has fewer than 2 tokens; "
             "raise --val-fraction or give --val");
}

static int line_end(const Tokenizer *t) {
    Err err;
    uint32_t *id;
    size_t n;
    if (tokenizer_encode((void *)(uintptr_t)t, (const unsigned char *)"\n", 1, 0, &id, &n, &err))
        die(RUN_ERROR, "%s", err.text);
    const int token = (int)id[0];
    free(id);
    return token;
}

static void sample(Run *r) {
    const double t = now_s();
    const SampleConfig s = {0.8, 1, 0, (uint64_t)r->o.seed + (uint64_t)r->step};
    Generator *g = &r->gen;
    size_t n;
    g->n = g->cached = 0;
    g->position = 0;
    printf("--- sample at step %lld\n", (long long)r->step);
    // as a text begins, or a line of one where no token says so
    generator_feed(g, r->tok.eot >= 0 ? r->tok.eot : line_end(&r->tok));
    for (int i = 0; i < SAMPLE_TOKENS; i++) {
        int next = generator_next(g, &s);
        if (several(r)) comm_broadcast(&r->par.world, &next, sizeof next, 0);
        if (next < 0 || next == r->tok.eot) break;
        const unsigned char *text = tokenizer_decode(&r->tok, next, &n);
        fwrite(text, 1, n, stdout);
        generator_feed(g, next);
    }
    puts("\n---");
    fflush(stdout);
    r->t_sample += now_s() - t;
}

// Several ranks: only the first of those that know what was bad goes on from here; it ends them all.
static void one_speaks(Run *r, const StepState *s) {
    const int W = r->world.size, me = r->world.rank;
    if (!several(r)) return;
    const int who = W - comm_agree(all_ranks(r), s->bad == BAD_ELSEWHERE ? 0 : W - me);
    if (who != me && who < W) comm_barrier(all_ranks(r)); // which that one never reaches
    this_rank = 0;
}

// A step whose numbers are not finite: says where, and ends the run; no weight was touched.
static void stop_bad(Run *r, const StepState *s, int64_t step) {
    char what[640], name[256];
    one_speaks(r, s);
    if (s->bad != BAD_GRADIENT) {
        say_bad(&r->m, s, r->m.shape.B * r->o.c.seq_len, what);
    } else {
        int i = -1; // segments are the trained tensors, in order
        int64_t left = s->bad_index;
        while (left >= 0 && !several(r)) left -= r->m.table.tensor[++i].row->trained;
        if (several(r)) i = r->m.own_tensor[left];
        stored_name(name, sizeof name, &r->m.c, &r->m.table.tensor[i], 0);
        snprintf(what, sizeof what, "the gradient of %s is not finite", name);
    }
    die(RUN_ERROR,
        "step %lld: %s; no weight was changed by this step; %s%s; a lower --lr, a longer --warmup "
        "or a lower --grad-clip often help",
        (long long)step, what,
        r->saved_step >= 0 || has_file(r->out, "latest") ? "the last checkpoint is in "
                                                         : "nothing was saved in ",
        r->out);
}

// One training step; the state after it. Step number r->step + 1.
static StepState train_step(Run *r, double lr, const OptimConfig *optim) {
    const int B = r->m.shape.B, T = r->o.c.seq_len;
    const uint64_t first = (uint64_t)r->step * r->rows_a_step + r->first;
    const double scale = 1.0 / ((double)r->rows_a_step * T); // every training target is valid
    model_begin_step(&r->m, r->step + 1, lr, optim);
    for (int i = 0; i < r->micro_batches; i++) {
        const double t = now_s();
        data_train_rows(&r->data, first + (uint64_t)i * r->o.batch, B, r->x, r->y, NULL);
        r->t_data += now_s() - t;
        model_set_tokens(&r->m, r->x, r->y, B * T);
        r->m.more_follow = i + 1 < r->micro_batches;
        model_forward(&r->m, B, T, 0, 1);
        model_backward(&r->m, B, T, scale, r->micro_batches);
    }
    model_update(&r->m, optim);
    const StepState s = model_state(&r->m);
    if (s.bad) stop_bad(r, &s, r->step + 1);
    return s;
}

// Measures the validation loss and enters it in the line of this step. Returns 1 when it is the
// best so far.
static int validate(Run *r) {
    const double t = now_s();
    char what[640];
    const EvalResult e = evaluate(&r->m, &r->data, &r->tok, r->o.eval_batches, r->x, r->y);
    if (e.state.bad) one_speaks(r, &e.state);
    if (e.state.bad)
        die(RUN_ERROR, "step %lld: in the validation %s; the last checkpoint is in %s",
            (long long)r->step, say_bad(&r->m, &e.state, r->m.shape.B * r->o.c.seq_len, what),
            r->out);
    r->t_eval += now_s() - t;
    json_object_set_new(r->last, "val_loss", json_real(e.loss));
    json_object_set_new(r->last, "elapsed_s", json_real(elapsed_s(r)));
    const int best = !r->best_step || e.loss < r->best_val;
    if (best) r->best_val = e.loss, r->best_step = r->step;
    return best;
}

static void mark_best(Run *r) {
    Err err;
    if (r->saved_step != r->step) save(r);
    if (r->lead && ckpt_mark_best(r->out, r->step, &err)) die(RUN_ERROR, "%s", err.text);
}

static void train_loop(Run *r) {
    const Options *o = &r->o;
    const OptimConfig optim = {
        o->beta1, o->beta2, 1e-8, o->weight_decay, o->grad_clip, o->optimizer};
    const int terminal = isatty(STDOUT_FILENO) && !several(r); // which mpirun says of any output
    const int64_t first = r->step, tokens = (int64_t)r->rows_a_step * o->c.seq_len;
    r->started = now_s();
    while (r->step < o->steps && !r->stop) {
        const double t = now_s(), lr = learning_rate(o, r->step + 1);
        CommCount before[COMM_KINDS]; // of validation, checkpoints
        if (several(r)) ranks_counts(&r->par, before);
        const StepState s = train_step(r, lr, &optim);
        const double step_s = now_s() - t;
        r->t_step += step_s;
        r->step++;
        json_decref(r->last);
        watch_fetch(&r->watch, &r->m, r->micro_batches);
        log_routing(r);
        r->last = metrics(r, &s, lr, step_s);
        if (!r->last) die(RUN_ERROR, "no memory for the log");
        const int last = r->step == o->steps;
        r->stop = anyone(r, stop_signal != 0);
        if (last) save(r); // before the last evaluation: it may take long
        const int best = eval_due(r, r->step) && !r->stop && validate(r);
        log_line(r);
        progress_line(r, lr, &s, (double)tokens / step_s, first, terminal);
        watch_step(&r->watch, r->step, tokens);
        if (!last && (r->stop || (o->save_every && r->step % o->save_every == 0))) save(r);
        if (best) mark_best(r);
        if (r->saved_step == r->step) prune(r);
        if (o->sample_every && (last || r->step % o->sample_every == 0)) {
            if (terminal && !last) putchar('\n');
            sample(r);
        }
        r->stop = anyone(r, stop_signal != 0);
        if (r->step == first + 10 && !last && o->log_every) {
            char left[32];
            show_time(left, (now_s() - r->started) / 10 * (double)(o->steps - first));
            printf("%sthis run takes about %s; %s saves a checkpoint and stops\n",
                terminal ? "\n" : "", left, several(r) ? "SIGUSR1 to a rank" : "Ctrl-C");
        }
    }
    if (terminal && r->step < o->steps) putchar('\n');
}

static void print_profile(const Run *r) {
    const double all = now_s() - r->started;
    const struct {
        const char *name;
        double s;
    } part[] = {{"data", r->t_data}, {"training steps", r->t_step - r->t_data},
        {"validation", r->t_eval}, {"checkpoints", r->t_save}, {"samples", r->t_sample}};
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        printf("profile: %-15s %9.3f s %5.1f%%\n", part[i].name, part[i].s, 100 * part[i].s / all);
}

// Sets up a new run in r->out; or finds the place where an old one goes on.
static void start_new(Run *r, const int given[N_FLAGS]) {
    Options *o = &r->o;
    int64_t *steps;
    int n, upcycled = 0;
    char init[CKPT_PATH];
    Config dense;
    show_device(o);
    if (!o->init && o->upcycle_noise > 0)
        die(USER_ERROR, "--upcycle-noise: expected --init with a dense model and --experts");
    if (o->init) {
        Config c;
        find_checkpoint(init, "--init", o->init);
        read_config(&c, init);
        if (!was_given(given, "seq")) o->c.seq_len = c.seq_len;
        c.seq_len = o->c.seq_len;
        upcycled = c.n_experts == 1 && was_given(given, "experts") && o->c.n_experts > 1;
        dense = c;
        if (upcycled) { // what is new in the shape is taken from the flags
            c.n_experts = o->c.n_experts, c.top_k = o->c.top_k;
            c.router = o->c.router, c.norm_topk = o->c.norm_topk;
            c.d_shared = o->c.d_shared, c.dense_layers = o->c.dense_layers;
            if (!c.norm_topk)
                warn("--norm-topk 0: the weights of a token's experts do not "
                     "add up to 1, so the upcycled model does not start where the dense one "
                     "ended");
        } else if (o->upcycle_noise > 0) {
            die(USER_ERROR,
                "--upcycle-noise: expected --init with a dense model and --experts 2 or more, "
                "found %s",
                c.n_experts > 1 ? "a model that has experts already" : "no --experts");
        }
        check_shape(o, given, &c, init);
        o->c = c;
    }
    Err err;
    if (o->vocab && o->init)
        die(USER_ERROR,
            "--vocab: expected no --init, whose model has a tokenizer of its own, found %s",
            o->init);
    if (!o->init) open_vocab(&r->tok, o);
    settle(o, given, o->init != NULL);
    count_rows(r);
    if (o->out) {
        if (strlen(o->out) > CKPT_PATH - 128) die(USER_ERROR, "--out: the name is too long");
        strcpy(r->out, o->out);
        if (ckpt_list(r->out, &steps, &n))
            die(USER_ERROR, "--out %s: expected a folder, found %s", o->out, looks_like(o->out));
        free(steps);
        if (n && !o->overwrite)
            die(USER_ERROR,
                "--out %s holds %d checkpoint%s: --resume %s goes on with that run, --overwrite "
                "replaces it",
                o->out, n, n == 1 ? "" : "s", o->out);
    } else {
        struct stat st;
        for (int i = 1;; i++) {
            snprintf(r->out, sizeof r->out, "out/run-%d", i);
            if (lstat(r->out, &st)) break;
        }
        if (several(r)) comm_broadcast(&r->world, r->out, sizeof r->out, 0);
    }
    if (o->init) read_tokenizer(&r->tok, &o->c, init);
    if (o->c.vocab_size != r->tok.vocab_size && !o->init)
        die(USER_ERROR,
            "--preset %s has a vocabulary of %d and text is read as bytes (256): use this preset "
            "with info, --init or --vocab",
            o->preset, o->c.vocab_size);
    open_data(&r->data, o, &r->tok, 0);
    data_alike(r);
    show_data(r);
    build(r);
    if (r->lead && ckpt_lock(r->out, &r->lock, &err)) die(USER_ERROR, "%s", err.text);
    if (!o->init || upcycled) model_init(&r->m, (uint64_t)o->seed);
    if (upcycled) {
        Model from;
        ModelShape one = {.B = 1, .T = 1};
        model_build(&from, &dense, r->m.b, one, NULL);
        read_weights(&from, init);
        model_upcycle(&r->m, &from, o->upcycle_noise, (uint64_t)o->seed);
        model_free(&from);
        printf("upcycled %s: its MLP of width %d is each of %d experts\n", init, dense.d_expert,
            o->c.n_experts);
    } else if (o->init && several(r)) {
        const Spread spread = model_spread(&r->m);
        if (spread_read(
                init, &r->m.c, r->m.b, &spread, 0, r->m.base[A_PARAMS], r->m.base[A_BUFFERS], &err))
            die(USER_ERROR, "%s", err.text);
        model_params_changed(&r->m);
    } else if (o->init) {
        read_weights(&r->m, init);
    }
    if (config_own(&o->c))
        warn("no architecture of transformers has %s: checkpoints say "
             "model_type moe_c, and only train_moe loads them",
            config_own(&o->c));
    if (several(r)) comm_barrier(all_ranks(r)); // --init may be in there, and all have read it
    if (r->lead && o->overwrite && ckpt_clear(r->out, &err)) die(RUN_ERROR, "%s", err.text);
}

// Refuses a log or a checkpoint that names another step than its folder, says what changed since,
// loads.
static void start_resumed(Run *r, const Options *cl, const int given[N_FLAGS]) {
    Options *o = &r->o;
    char out[CKPT_PATH], folder[CKPT_PATH];
    int64_t *steps, only = -1;
    int n;
    Err err;
    Config c;
    json_t *j = NULL;
    if (cl->resume)
        snprintf(out, sizeof out, "%s", cl->resume);
    else if (cl->out)
        snprintf(out, sizeof out, "%s", cl->out);
    else {
        newest_run(out, "latest");
        if (several(r)) comm_broadcast(&r->world, out, sizeof out, 0);
        if (!*out) die(USER_ERROR, "--resume: no run found in out/; expected --resume FOLDER");
        *strrchr(out, '/') = 0;
    }
    while (strlen(out) > 1 && out[strlen(out) - 1] == '/') out[strlen(out) - 1] = 0;
    if (strlen(out) > CKPT_PATH - 128) die(USER_ERROR, "--resume: the name is too long");
    if (has_file(out, "trainer.json")) { // one checkpoint of a run
        char *slash = strrchr(out, '/');
        only = step_of(slash ? slash + 1 : out);
        if (only < 0)
            die(USER_ERROR, "--resume %s: expected a run's folder or one of its step_N folders",
                out);
        if (slash)
            *slash = 0;
        else
            strcpy(out, ".");
    }
    if (o->out && cl->out && strcmp(cl->out, out) && cl->resume)
        die(USER_ERROR, "--resume %s goes on in that folder; --out %s names another: leave it out",
            cl->resume, cl->out);
    if (ckpt_list(out, &steps, &n) || !n)
        die(USER_ERROR, "--resume %s: expected the folder of a run with checkpoints, found %s", out,
            looks_like(out));
    if (r->lead && ckpt_lock(out, &r->lock, &err)) die(USER_ERROR, "%s", err.text);
    if (several(r)) { // as it is now that nobody else writes there
        char *text = NULL;
        size_t size;
        comm_barrier(&r->world);
        free(steps);
        if (ckpt_list(out, &steps, &n)) n = 0;
        FILE *f = open_memstream(&text, &size);
        for (int i = 0; i < n && f; i++) fprintf(f, "%lld ", (long long)steps[i]);
        if (!f || fclose(f)) die(RUN_ERROR, "no memory");
        seen_alike(r, "checkpoints", text);
        free(text);
    }
    // the newest one that is whole; a damaged one is said
    for (int i = n - 1; i >= 0; i--) {
        if (only >= 0 && steps[i] != only) continue;
        if (step_path(folder, out, "", steps[i], "", &err)) die(USER_ERROR, "%s", err.text);
        j = read_trainer(folder, &c, &err);
        if (j && json_integer_value(json_object_get(j, "step")) != steps[i]) {
            fail(&err, "%s/trainer.json: expected step %lld, found %lld", folder,
                (long long)steps[i], (long long)json_integer_value(json_object_get(j, "step")));
            json_decref(j);
            j = NULL;
        }
        if (anyone(r, !j) && j) {
            fail(&err, "%s: another rank cannot read it", folder);
            json_decref(j);
            j = NULL;
        }
        if (j) {
            if (!r->m.b) { // every checkpoint of a run has the same flags and shape
                strcpy(r->out, out);
                flags_from_json(o, json_object_get(j, "flags"), folder, cl, given);
                ranks_forget(o, given, r->world.size);
                show_device(o);
                const int64_t was = (int64_t)json_integer_value(
                    json_object_get(json_object_get(j, "flags"), "steps"));
                if (o->steps != was && o->schedule != SCHEDULE_CONSTANT)
                    warn("--steps %lld: the schedule was planned for %lld "
                         "steps; the learning rate continues at %.3g%s",
                        (long long)o->steps, (long long)was,
                        learning_rate(o, steps[i] + 1 < o->steps ? steps[i] + 1 : o->steps),
                        steps[i] >= was ? ", higher than where it had ended" : "");
                o->c = c;
                o->out = r->out;
                if (!given[0] && !o->input.n)
                    die(USER_ERROR, "%s: no input in trainer.json", folder);
                settle(o, given, 1);
                count_rows(r);
                read_tokenizer(&r->tok, &o->c, folder);
                open_data(&r->data, o, &r->tok, 0);
                json_t *now = data_identity(&r->data);
                if (!json_equal(now, json_object_get(j, "data")))
                    warn("the data are not those that this run was trained on: "
                         "it goes on with the new ones");
                json_decref(now);
                data_alike(r);
                show_data(r);
                build(r);
            }
            if (!load(r, folder, &err)) {
                r->step = steps[i];
                break;
            }
            json_decref(j);
            j = NULL;
        }
        if (only >= 0 || i == 0) die(USER_ERROR, "%s", err.text);
        warn("%s; falling back to the checkpoint before it", err.text);
    }
    free(steps);
    if (!j) die(USER_ERROR, "--resume: no checkpoint of step %lld in %s", (long long)only, out);
    model_params_changed(&r->m);
    r->elapsed = json_number_value(json_object_get(j, "elapsed_s"));
    r->saved_step = r->step;
    json_t *last = json_object_get(j, "last");
    if (json_is_object(last)) r->last = json_incref(last);
    json_decref(j);
    printf("resumed at step %lld of %lld: %s\n", (long long)r->step, (long long)o->steps, folder);
}

static void command_train(const Options *cl, const int given[N_FLAGS], const Comm *world) {
    static Run r;
    r.o = *cl;
    r.saved_step = -1;
    r.world = *world;
    r.lead = !world->rank;
    if (cl->has_resume && cl->overwrite)
        die(USER_ERROR,
            "--resume and --overwrite exclude each other: go on with a run, or replace it");
    if (cl->has_resume && cl->vocab)
        die(USER_ERROR,
            "--resume and --vocab exclude each other: a run goes on with its own vocabulary");
    if (cl->has_resume && cl->init)
        die(USER_ERROR,
            "--resume and --init exclude each other: go on with a run, or start a new one");
    if (cl->has_resume)
        start_resumed(&r, cl, given);
    else
        start_new(&r, given);
    struct {
        int64_t logged, best_step;
        double best_val;
    } log = {r.lead ? trim_log(&r, "metrics.jsonl", 1) : 0, r.best_step, r.best_val};
    log.best_step = r.best_step, log.best_val = r.best_val;
    if (several(&r)) comm_broadcast(&r.par.world, &log, sizeof log, 0);
    const int64_t logged = log.logged;
    r.best_step = log.best_step, r.best_val = log.best_val;
    if (r.lead) {
        r.log = open_log(&r, "metrics.jsonl");
        open_routing(&r);
    }
    struct sigaction act;
    memset(&act, 0, sizeof act);
    act.sa_handler = on_signal;
    sigaction(SIGINT, &act, NULL);
    sigaction(SIGTERM, &act, NULL);
    sigaction(SIGUSR1, &act, NULL); // which mpirun and srun hand on
    r.started = now_s();
    if (r.step > 0 && logged < r.step &&
        r.last) { // stopped between the checkpoint and its line, or before its validation
        if (eval_due(&r, r.step) && !json_object_get(r.last, "val_loss")) validate(&r);
        log_line(&r);
    }
    // stopped before the links were moved, or the newest checkpoint is damaged: make them true
    const struct {
        const char *name;
        int64_t step;
    } want[] = {{"latest", r.step}, {"best", r.best_step}};
    for (int i = 0; i < 2 && r.lead; i++) {
        char folder[CKPT_PATH];
        Err err;
        if (want[i].step <= 0 || ckpt_linked(r.out, want[i].name) == want[i].step) continue;
        if (step_path(folder, r.out, "", want[i].step, "", &err) || !ckpt_complete(folder))
            continue;
        if (ckpt_link(r.out, want[i].name, want[i].step, &err)) die(RUN_ERROR, "%s", err.text);
    }
    train_loop(&r);
    if (r.step < r.o.steps) {
        if (r.saved_step != r.step) save(&r);
        printf("stopped at step %lld and saved it; to go on: train_moe --resume %s\n",
            (long long)r.step, r.out);
    } else if (r.best_step) {
        printf("done: %lld steps in %.1f s; best validation loss %.4f at step %lld: %s/best\n",
            (long long)r.step, elapsed_s(&r), r.best_val, (long long)r.best_step, r.out);
    } else {
        printf("done: %lld steps in %.1f s: %s/latest\n", (long long)r.step, elapsed_s(&r), r.out);
    }
    if (r.o.profile) print_profile(&r);
    if (r.lead) {
        close_log(&r, r.log, "metrics.jsonl");
        close_log(&r, r.routing, "routing.jsonl");
    }
    generator_close(&r.gen);
    watch_close(&r.watch);
    free(r.x);
    json_decref(r.last);
    data_close(&r.data);
    tokenizer_free(&r.tok);
    model_free(&r.sampler);
    if (r.lead) close(r.lock);
    if (several(&r)) {
        Comm all = r.par.world;
        model_free(&r.m);
        parallel_close(&r.par);
        comm_close(&all);
    } else {
        model_free(&r.m);
    }
}

/* What info says of: with a checkpoint its shape, and the flags of its trainer.json where there is
   one, but for those given now. folder: of the checkpoint. Returns folder, or NULL: there is none. */
static const char *info_of(Options *o, const int given[N_FLAGS], char folder[CKPT_PATH]) {
    static const int none[N_FLAGS];
    Err err;
    if (!o->model && !o->tsv) {
        settle(o, given, 0);
        return NULL;
    }
    if (o->vocab)
        die(USER_ERROR,
            "--vocab: expected no checkpoint, which has a tokenizer of its own, found %s",
            o->model ? o->model : "--tsv");
    find_checkpoint(folder, "--model", o->model);
    if (has_file(folder, "trainer.json")) {
        char path[CKPT_PATH + 32];
        Options run = *o;
        snprintf(path, sizeof path, "%s/trainer.json", folder);
        json_t *j = json_read(path, &err);
        if (!j) die(USER_ERROR, "%s", err.text);
        flags_from_json(&run, json_object_get(j, "flags"), path, o, none);
        for (int i = 0; i < N_FLAGS; i++)
            if ((flags[i].commands & TRAIN) && !(flags[i].commands & RUN_ONLY) && given[i])
                memcpy(field(&run, &flags[i]), field(o, &flags[i]),
                    flags[i].type == INT || flags[i].type == CHOICE || flags[i].type == SWITCH
                        ? sizeof(int)
                        : sizeof(int64_t));
        run.model = o->model, run.tsv = o->tsv;
        if (!o->ranks && !was_given(given, "ep")) run.ep = 1, run.placement = NULL;
        // of this machine, not of the one it ran on
        run.device = o->device, run.dtype = o->dtype, run.dense = o->dense;
        *o = run;
        json_decref(j);
    }
    Config c;
    read_config(&c, folder);
    if (was_given(given, "seq")) c.seq_len = o->c.seq_len;
    check_shape(o, given, &c, folder);
    o->c = c;
    settle(o, given, 1);
    return folder;
}

int main(int argc, char **argv) {
    static int given[N_FLAGS];
    static Options o;
    static Comm world;
    // A closed standard stream must not become the next file that is opened, a log or a checkpoint.
    for (int fd; (fd = open("/dev/null", O_RDWR)) >= 0;)
        if (fd > STDERR_FILENO) {
            close(fd);
            break;
        }
    signal(SIGPIPE, SIG_IGN); // a closed pipe must not end a run
    signal(SIGXFSZ, SIG_IGN); // a file-size limit is a failed write, with a message
    o = defaults();
    for (int i = 1, rank, size; i < argc; i++) // said once, and nobody waits for anybody
        if (!strcmp(argv[i], "--help") && comm_launched(&rank, &size) >= 0) {
            if (rank == 0) parse(&o, argc, argv, given);
            return 0;
        }
    comm_open(&world);
    this_rank = world.rank;
    if (this_rank && !freopen("/dev/null", "w", stdout))
        die(RUN_ERROR, "/dev/null: %s", strerror(errno));
    const Command *c = parse(&o, argc, argv, given);
    if (world.size > 1 && c->bit != TRAIN)
        die(USER_ERROR, "%s: expected one rank, found %d: only train runs on several", c->name,
            world.size);
#ifdef HAVE_CUDA
    if (world.size > 1) cuda_prefer(comm_local_rank());
#endif
    set_threads(o.threads);
    if (world.size > 1) { // all of them come here
        int threads;
        ranks_on_machine = ranks_here(&world, &threads);
        if (!o.threads) set_threads(threads);
    }
    if (c->bit != TOKENIZE && !o.has_resume) backend_of(&o); // a device that is not there: at once
    switch (c->bit) {
    case TRAIN: command_train(&o, given, &world); break;
    case GENERATE: command_generate(&o); break;
    case EVAL: command_eval(&o); break;
    case INFO: {
        char folder[CKPT_PATH];
        const char *found = info_of(&o, given, folder);
        if (o.ranks > 1 || o.ep > 1) ranks_check(&o, o.ranks ? o.ranks : 1);
        command_info(&o, found);
        if (o.ranks > 1 || o.ep > 1) ranks_info(&o, stdout);
        break;
    }
    case BENCH:
        settle(&o, given, 0);
        command_bench(&o);
        break;
    case TOKENIZE: command_tokenize(&o); break;
    case PLACE: command_place(&o); break;
    }
    if (fflush(stdout) || ferror(stdout)) {
        if (errno != EPIPE) die(RUN_ERROR, "cannot write to standard output: %s", strerror(errno));
    }
    if (world.size == 1) comm_close(&world); // else command_train did
    return 0;
}
