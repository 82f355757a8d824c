/* flags.h: the command line. It knows commands.h, whose Options it fills.

   One table of flags: name, type, range, help. It drives getopt_long, --help, and what trainer.json
   keeps of a run. In order: the table; one value, read and shown; --help; parse(), which reads a
   command line; settle(), what depends on several flags; flags in trainer.json and against a
   checkpoint's shape. */
#ifndef FLAGS_H
#define FLAGS_H

#include "bench.h" // and commands.h

#include <getopt.h>

// -------------------------------------------------------------------------------------------------
// the table

enum {
    TRAIN = 1,
    GENERATE = 2,
    EVAL = 4,
    INFO = 8,
    BENCH = 16,
    SHAPED = TRAIN | INFO | BENCH,
    ANEW = 32,     // may be given anew with --resume
    RUN_ONLY = 64, // not part of the training: never kept in trainer.json
    TOKENIZE = 128,
    PLACE = 256,
    LATER = 512 // an older trainer.json may lack it
};
typedef enum { SWITCH, INT, LONG, REAL, TEXT, PATHS, CHOICE } FlagType;

typedef struct Flag {
    const char *name;
    FlagType type;
    size_t at;          // offset in Options
    double least, most; // TEXT: least -1: may be empty
    int commands;
    const char *help; // CHOICE: the choices come first, a|b|c, then a blank
} Flag;

#define AT(field) offsetof(Options, field)
static const Flag flags[] = {
    {"input", PATHS, AT(input), 0, 0, TRAIN | EVAL | TOKENIZE,
        "text file, folder or pattern; repeatable"},
    {"val", PATHS, AT(val), 0, 0, TRAIN, "validation text; default: the last part of each input"},
    {"val-fraction", REAL, AT(val_fraction), 0, 0.9, TRAIN,
        "part of each input held out for validation"},
    {"vocab", TEXT, AT(vocab), 0, 0, SHAPED | TOKENIZE | RUN_ONLY,
        "tokenizer.json, vocab.bpe or llm.c's tokenizer.bin; default: beside the shards, or bytes"},
    {"train-vocab", INT, AT(train_vocab), 257, TOK_LIMIT, TOKENIZE,
        "learn a vocabulary of so many tokens from --input and write it to --out"},
    {"shard-tokens", LONG, AT(shard_tokens), 1, INT32_MAX, TOKENIZE, "most tokens in a file"},
    {"out", TEXT, AT(out), 0, 0, TRAIN | TOKENIZE | PLACE | RUN_ONLY,
        "folder of the run; default: the next free out/run-N; tokenize needs one; of place: the "
        "file; default: placement.json in --log"},
    {"overwrite", SWITCH, AT(overwrite), 0, 0, TRAIN | TOKENIZE | RUN_ONLY,
        "replace what is in --out"},
    {"init", TEXT, AT(init), 0, 0, TRAIN,
        "start from the weights of this checkpoint; with --experts: upcycle a dense one"},
    {"upcycle-noise", REAL, AT(upcycle_noise), 0, 10, TRAIN,
        "noise on every upcycled expert, in parts of the weights' root mean square"},
    {"resume", TEXT, AT(resume), 0, 0, TRAIN | RUN_ONLY,
        "go on with the run in this folder; default: the newest in out/"},
    {"model", TEXT, AT(model), 0, 0, GENERATE | EVAL | INFO | RUN_ONLY,
        "checkpoint or run; default: the newest run's best"},
    {"preset", TEXT, AT(preset), 0, 0, SHAPED,
        "tiny, small, olmoe-1b-7b, mixtral-8x7b or qwen3-30b-a3b"},
    {"layers", INT, AT(c.n_layers), 1, MAX_LAYERS, SHAPED, "number of layers"},
    {"d-model", INT, AT(c.d_model), 1, 1 << 20, SHAPED, "width of the residual stream"},
    {"heads", INT, AT(c.n_heads), 1, 1 << 16, SHAPED, "query heads"},
    {"kv-heads", INT, AT(c.n_kv_heads), 1, 1 << 16, SHAPED,
        "key and value heads, a divisor of --heads"},
    {"head-dim", INT, AT(c.head_dim), 2, 1 << 14, SHAPED, "width of a head, even"},
    {"experts", INT, AT(c.n_experts), 1, 1 << 16, SHAPED, "experts in a layer; 1 = a dense model"},
    {"topk", INT, AT(c.top_k), 1, 1 << 16, SHAPED, "experts a token"},
    {"d-expert", INT, AT(c.d_expert), 1, 1 << 24, SHAPED,
        "width of an expert (of the MLP when dense)"},
    {"d-shared", INT, AT(c.d_shared), 0, 1 << 24, SHAPED,
        "width of a shared expert, which every token takes; 0 = none"},
    {"dense-layers", INT, AT(c.dense_layers), 0, MAX_LAYERS, SHAPED,
        "first layers with a dense MLP of the width of a token's experts"},
    {"qk-norm", CHOICE, AT(c.qk_norm), 0, 0, SHAPED,
        "none|full|head norm of queries and keys: full = over all heads together"},
    {"router", CHOICE, AT(c.router), 0, 0, SHAPED,
        "softmax|sigmoid scores; sigmoid chooses with a selection bias that balances the load"},
    {"arch", CHOICE, AT(arch), 0, 0, SHAPED,
        "auto|olmoe|mixtral|qwen3_moe what checkpoints are saved as; auto: whichever fits"},
    {"norm-topk", INT, AT(c.norm_topk), 0, 1, SHAPED,
        "renormalise the weights of a token's experts"},
    {"tied", INT, AT(c.tied), 0, 1, SHAPED, "output head = embedding"},
    {"rope-theta", REAL, AT(c.rope_theta), 1, 1e9, SHAPED, "base of the rotary embedding"},
    {"norm-eps", REAL, AT(c.norm_eps), 1e-12, 0.1, SHAPED, "epsilon of the norms"},
    {"aux-loss", REAL, AT(aux_loss), 0, 100, SHAPED, "coefficient of the balance loss"},
    {"z-loss", REAL, AT(z_loss), 0, 100, SHAPED, "coefficient of the router z-loss"},
    {"bias-rate", REAL, AT(bias_rate), 0, 1, SHAPED,
        "step of the sigmoid router's selection bias; 0 = it stays"},
    {"routing", CHOICE, AT(routing), 0, 0, SHAPED,
        "topk|round in training; round: every expert's tokens to a multiple of --tile"},
    {"tile", INT, AT(tile), 1, 1 << 16, SHAPED, "tokens that --routing round rounds to"},
    {"capacity", REAL, AT(capacity), 0, 1e9, SHAPED,
        "an expert drops its weakest tokens in training beyond this much of an even share; 1e9 = "
        "none"},
    {"batch", INT, AT(batch), 1, 1 << 24, SHAPED | EVAL, "sequences in a micro-batch"},
    {"seq", INT, AT(c.seq_len), 1, 1 << 24, SHAPED, "tokens in a sequence"},
    {"total-batch", LONG, AT(total_batch), 0, 1e12, TRAIN,
        "tokens in a step, a multiple of batch x seq; 0 = one micro-batch"},
    {"steps", LONG, AT(steps), 1, 1e12, TRAIN | ANEW, "training steps"},
    {"lr", REAL, AT(lr), 0, 100, TRAIN, "learning rate after warm-up"},
    {"min-lr", REAL, AT(min_lr), 0, 100, TRAIN, "learning rate at the end (cosine, linear, wsd)"},
    {"warmup", LONG, AT(warmup), 0, 1e12, TRAIN, "steps of linear warm-up"},
    {"schedule", CHOICE, AT(schedule), 0, 0, TRAIN,
        "cosine|linear|constant|wsd after warm-up; wsd: constant, then linear over the last fifth"},
    {"optimizer", CHOICE, AT(optimizer), 0, 0, TRAIN | INFO | BENCH, "adamw|sgd "},
    {"weight-decay", REAL, AT(weight_decay), 0, 10, TRAIN | BENCH,
        "decoupled weight decay, of matrices"},
    {"beta1", REAL, AT(beta1), 0, 0.999999, TRAIN | BENCH, "AdamW's decay of the first moment"},
    {"beta2", REAL, AT(beta2), 0, 0.9999999, TRAIN | BENCH, "AdamW's decay of the second moment"},
    {"grad-clip", REAL, AT(grad_clip), 0, 1e9, TRAIN | BENCH,
        "largest norm of the gradient; 0 = no clipping"},
    {"eval-every", LONG, AT(eval_every), 0, 1e12, TRAIN | ANEW,
        "steps between validations; 0 = never"},
    {"eval-batches", LONG, AT(eval_batches), 0, 1e12, TRAIN | EVAL | ANEW,
        "batches in a validation; 0 = all of the held-out part"},
    {"sample-every", LONG, AT(sample_every), 0, 1e12, TRAIN | ANEW,
        "steps between samples of text; 0 = never"},
    {"save-every", LONG, AT(save_every), 0, 1e12, TRAIN | ANEW,
        "steps between checkpoints; 0 = only the last and the best"},
    {"keep", LONG, AT(keep), 0, 1e9, TRAIN | ANEW,
        "newest checkpoints to keep (best is always kept); 0 = all"},
    {"log-every", LONG, AT(log_every), 0, 1e12, TRAIN | ANEW,
        "steps between lines on the screen; 0 = none"},
    {"routing-every", LONG, AT(routing_every), 0, 1e12, TRAIN | ANEW | LATER,
        "steps between records of which experts tokens chose, in routing.jsonl; 0 = none"},
    {"device", CHOICE, AT(device), 0, 0, TRAIN | GENERATE | EVAL | INFO | BENCH | ANEW,
        "cpu|cuda|emulated what computes; emulated: the CUDA kernels, slowly, on the CPU"},
    {"dtype", CHOICE, AT(dtype), 0, 0, TRAIN | GENERATE | EVAL | INFO | BENCH,
        "fp32|bf16 of activations and products; weights, gradients and moments are kept in fp32"},
    {"dense", CHOICE, AT(dense), 0, 0, TRAIN | GENERATE | EVAL | BENCH | ANEW | LATER,
        "own|cublas what computes dense products on cuda; cublas: a row's bits then depend on the "
        "rows beside it"},
    {"recompute", INT, AT(recompute), 0, 2, SHAPED | ANEW,
        "save memory: 1 makes norm outputs again, 2 also the experts' H"},
    {"ep", INT, AT(ep), 1, 1 << 20, TRAIN | INFO | ANEW | LATER,
        "ranks that the experts of a layer are dealt out over, a divisor of the ranks"},
    {"zero", INT, AT(zero), 0, 1, TRAIN | INFO | ANEW | LATER,
        "1: ranks share the optimiser's moments (ZeRO-1)"},
    {"dispatch", CHOICE, AT(dispatch), 0, 0, TRAIN | INFO | ANEW | LATER,
        "auto|alltoall|dedup|allgather way of tokens to experts on other ranks; auto: fewest "
        "bytes"},
    {"dispatch-dtype", CHOICE, AT(rows_dtype), 0, 0, TRAIN | INFO | ANEW | LATER,
        "own|bf16 of tokens on their way; own: as they are computed"},
    {"dispatch-chunk", INT, AT(dispatch_chunk), 2, 1 << 24, TRAIN | INFO | ANEW | LATER,
        "tokens on their way at a time: while some are computed the next are sent"},
    {"placement", TEXT, AT(placement), 0, 0, TRAIN | ANEW | LATER,
        "which rank has which experts, as train_moe place writes it; none, the default: in order"},
    {"threads", INT, AT(threads), 0, 4096, TRAIN | GENERATE | EVAL | INFO | BENCH | TOKENIZE | ANEW,
        "threads; 0 = as many as this process may use"},
    {"seed", LONG, AT(seed), 0, 9e15, TRAIN | GENERATE, "seed of everything random"},
    {"tsv", SWITCH, AT(tsv), 0, 0, INFO | RUN_ONLY,
        "a run's losses, expert loads and experts by text as tables, for data/plot.gp"},
    {"log", TEXT, AT(log), 0, 0, PLACE | RUN_ONLY, "folder of the run whose records are used"},
    {"ranks", INT, AT(ranks), 1, 1 << 16, INFO | PLACE | RUN_ONLY,
        "ranks to plan for (place: a divisor of the experts)"},
    {"nodes", INT, AT(nodes), 1, 1 << 16, PLACE | RUN_ONLY,
        "nodes that the ranks are on, a divisor of --ranks"},
    {"tax", SWITCH, AT(tax), 0, 0, BENCH,
        "and models with more, smaller experts beside the dense one of the same active size"},
    {"growth", SWITCH, AT(growth), 0, 0, BENCH,
        "and time per token while tokens a step, layers, width or experts grow"},
    {"json", SWITCH, AT(json), 0, 0, BENCH, "print the tables as JSON"},
    {"profile", SWITCH, AT(profile), 0, 0, TRAIN | RUN_ONLY,
        "print where the time went at the end"},
    {"prompt", TEXT, AT(prompt), -1, 0, GENERATE,
        "text to go on from; '' with merges: the end-of-text token that texts begin with"},
    {"tokens", LONG, AT(n_tokens), 1, 1e12, GENERATE, "tokens to generate"},
    {"temperature", REAL, AT(temperature), 0, 100, GENERATE, "0 = always the most likely token"},
    {"top-k", INT, AT(top_k_sampling), 0, 1 << 30, GENERATE,
        "sample among the k most likely; 0 = all"},
    {"top-p", REAL, AT(top_p), 0, 1, GENERATE,
        "sample among the fewest that reach this probability"},
};
enum { N_FLAGS = sizeof flags / sizeof *flags };

static void *field(Options *o, const Flag *f) { return (char *)o + f->at; }

// how many bytes the choice number n of a CHOICE flag has, and where it starts; NULL when there is
// no such choice
static const char *choice(const Flag *f, int n, int *len) {
    const char *s = f->help;
    for (;; n--) {
        *len = (int)strcspn(s, "| ");
        if (n == 0) return s;
        if (s[*len] != '|') return NULL;
        s += *len + 1;
    }
}

// Sets one flag from text; ends the program where it does not fit.
static void set_flag(Options *o, const Flag *f, const char *text, const char *where) {
    char *end = NULL;
    errno = 0;
    switch (f->type) {
    case SWITCH: *(int *)field(o, f) = 1; return;
    case INT:
    case LONG: {
        const long long v = strtoll(text, &end, 10);
        if (end == text || *end || errno || (double)v < f->least || (double)v > f->most)
            die(USER_ERROR, "%s--%s: expected a whole number from %.0f to %.0f, found '%s'", where,
                f->name, f->least, f->most, text);
        if (f->type == INT)
            *(int *)field(o, f) = (int)v;
        else
            *(int64_t *)field(o, f) = v;
        return;
    }
    case REAL: {
        const double v = strtod(text, &end);
        if (end == text || *end || !(v >= f->least && v <= f->most))
            die(USER_ERROR, "%s--%s: expected a number from %g to %g, found '%s'", where, f->name,
                f->least, f->most, text);
        *(double *)field(o, f) = v;
        return;
    }
    case TEXT:
        if (!*text && f->least >= 0)
            die(USER_ERROR, "%s--%s: expected a text, found nothing", where, f->name);
        *(const char **)field(o, f) = text;
        return;
    case PATHS: {
        Paths *p = field(o, f);
        if (!*text) die(USER_ERROR, "%s--%s: expected a path, found nothing", where, f->name);
        if (p->n == MAX_PATHS)
            die(USER_ERROR, "--%s: expected at most %d; a folder or a pattern names more", f->name,
                MAX_PATHS);
        p->at[p->n++] = text;
        return;
    }
    case CHOICE: {
        int len;
        const char *s;
        for (int i = 0; (s = choice(f, i, &len)); i++)
            if ((int)strlen(text) == len && !strncmp(s, text, len)) {
                *(int *)field(o, f) = i;
                return;
            }
        die(USER_ERROR, "%s--%s: expected one of %.*s, found '%s'", where, f->name,
            (int)strcspn(f->help, " "), f->help, text);
    }
    }
}

// The value of a flag, as --help and messages show it.
static const char *show_flag(Options *o, const Flag *f, char buf[512]) {
    int len;
    const char *s;
    buf[0] = 0;
    switch (f->type) {
    case SWITCH: snprintf(buf, 512, "%d", *(int *)field(o, f)); break;
    case INT: snprintf(buf, 512, "%d", *(int *)field(o, f)); break;
    case LONG: snprintf(buf, 512, "%lld", (long long)*(int64_t *)field(o, f)); break;
    case REAL: snprintf(buf, 512, "%.15g", *(double *)field(o, f)); break;
    case TEXT:
        snprintf(buf, 512, "%s", *(const char **)field(o, f) ? *(const char **)field(o, f) : "");
        break;
    case PATHS: break;
    case CHOICE: s = choice(f, *(int *)field(o, f), &len); snprintf(buf, 512, "%.*s", len, s);
    }
    return buf;
}

typedef struct Command {
    const char *name;
    int bit;
    const char *help;
} Command;
static const Command commands[] = {
    {"train", TRAIN, "train a model on text"},
    {"generate", GENERATE, "write text with a trained model"},
    {"eval", EVAL, "loss, perplexity and bits per byte of a text"},
    {"info", INFO, "parameters, memory and FLOPs of a model, before anything is allocated"},
    {"bench", BENCH,
        "the measured peak of this machine, and what a product and training steps reach"},
    {"tokenize", TOKENIZE, "text to token shards of llm.c, or to a vocabulary (--train-vocab)"},
    {"place", PLACE,
        "which rank should have which experts, from what a run recorded of its routing"},
};
enum { N_COMMANDS = sizeof commands / sizeof *commands };

static void help(Options *o, const Command *c) {
    char value[512];
    printf("usage: train_moe %s [flags]\n%s\n\n", c->name, c->help);
    for (int i = 0; i < N_FLAGS; i++) {
        const Flag *f = &flags[i];
        static const char *const kinds[] = {"", "N", "N", "X", "TEXT", "PATH", "NAME"};
        if (!(f->commands & c->bit)) continue;
        printf("  --%-13s %-5s %s", f->name, kinds[f->type], f->type == CHOICE ? "" : f->help);
        if (f->type == CHOICE) printf("%s", f->help);
        show_flag(o, f, value);
        if (*value && f->type != SWITCH)
            printf(" [%s]", strcmp(value, "\n") ? value : "a line end");
        putchar('\n');
    }
    if (c->bit == TRAIN) {
        puts("\nother commands (train_moe COMMAND --help):");
        for (int i = 1; i < N_COMMANDS; i++)
            printf("  %-9s %s\n", commands[i].name, commands[i].help);
    }
    if (fflush(stdout) || ferror(stdout))
        die(RUN_ERROR, "cannot write to standard output: %s", strerror(errno));
    exit(0);
}

static Options defaults(void) {
    Options o;
    memset(&o, 0, sizeof o);
    apply_preset(&o, "tiny");
    o.val_fraction = 0.1;
    o.grad_clip = 1;
    o.bias_rate = 0.001;
    o.capacity = 1e9;
    o.tile = 128;
    o.log_every = 1;
    o.ep = 1;
    o.dispatch_chunk = 1024;
    o.keep = 3;
    o.shard_tokens = 100000000;
    o.seed = 1;
    o.prompt = "\n";
    o.n_tokens = 500;
    o.temperature = 0.8;
    o.top_p = 1;
    o.nodes = 1;
    return o;
}

/* Reads the command line into *o, presets first, then the flags; given[i]: flag i was there.
   Abbreviations that getopt_long would take are refused: a typo is not a flag. */
static const Command *parse(Options *o, int argc, char **argv, int given[N_FLAGS]) {
    const Command *c = &commands[0];
    struct option list[N_FLAGS + 2];
    int first = 1, i;
    if (argc > 1 && argv[1][0] != '-') {
        c = NULL;
        for (i = 0; i < N_COMMANDS; i++)
            if (!strcmp(argv[1], commands[i].name)) c = &commands[i];
        if (!c)
            die(USER_ERROR,
                "expected a command (train, generate, eval, info, bench, tokenize, place) or a "
                "flag, "
                "found '%s'",
                argv[1]);
        first = 2;
        if (c->bit == INFO && argc > 2 && argv[2][0] != '-') o->model = argv[first++]; // info OUT
    }
    for (i = 0; i < N_FLAGS; i++) {
        const int optional = flags[i].type == SWITCH || !strcmp(flags[i].name, "resume");
        struct option x = {
            flags[i].name, optional ? optional_argument : required_argument, NULL, 256 + i};
        list[i] = x;
    }
    struct option h = {"help", no_argument, NULL, 'h'}, end = {NULL, 0, NULL, 0};
    list[N_FLAGS] = h;
    list[N_FLAGS + 1] = end;
    for (int pass = 0; pass < 2; pass++) { // the preset first: whatever the order, flags change it
        optind = first;
        opterr = 0;
        for (int code; (code = getopt_long(argc, argv, "+:h", list, NULL)) != -1;) {
            const char *text = argv[optind - 1];
            if (code == 'h') {
                if (pass) help(o, c);
                continue;
            }
            if (code == ':') die(USER_ERROR, "%s: expected a value after it", text);
            if (code == '?' && optopt > 0 && optopt < 256)
                die(USER_ERROR, "unknown flag '-%c'; train_moe %s --help lists the flags", optopt,
                    c->name);
            if (code == '?')
                die(USER_ERROR, "unknown flag '%s'; train_moe %s --help lists the flags", text,
                    c->name);
            const Flag *f = &flags[code - 256];
            if (optarg && optarg == text) text = argv[optind - 2];
            const size_t len = strcspn(text, "=");
            if (len != strlen(f->name) + 2 || strncmp(text + 2, f->name, len - 2))
                die(USER_ERROR, "unknown flag '%.*s' (did you mean --%s?)", (int)len, text,
                    f->name);
            if (!(f->commands & c->bit))
                die(USER_ERROR, "--%s is not a flag of %s; train_moe %s --help lists the flags",
                    f->name, c->name, c->name);
            if (f->type == SWITCH && optarg)
                die(USER_ERROR, "--%s takes no value, found '%s'", f->name, optarg);
            if (first == 3 && !strcmp(f->name, "model"))
                die(USER_ERROR, "--model %s: expected one checkpoint, found %s before it", optarg,
                    argv[2]);
            const int is_resume = !strcmp(f->name, "resume");
            if (optarg && optarg == argv[optind - 1] && !strncmp(optarg, "--", 2))
                die(USER_ERROR,
                    "--%s: expected a value after it, found the flag '%s' (--%s=%s takes it as it "
                    "is)",
                    f->name, optarg, f->name, optarg);
            if (is_resume && !optarg && optind < argc && argv[optind][0] != '-')
                optarg = argv[optind++];
            if (!pass) {
                if (!strcmp(f->name, "preset")) apply_preset(o, optarg);
                continue;
            }
            given[f - flags] = 1;
            if (is_resume) o->has_resume = 1;
            if (is_resume && !optarg) continue;
            if (strcmp(f->name, "preset")) set_flag(o, f, optarg, "");
        }
        if (optind < argc) die(USER_ERROR, "expected a flag, found '%s'", argv[optind]);
    }
    return c;
}

static int was_given(const int given[N_FLAGS], const char *name) {
    for (int i = 0; i < N_FLAGS; i++)
        if (!strcmp(flags[i].name, name)) return given[i];
    return 0;
}

// Refuses flags about routing that this model or that routing would pass over.
static void settle_routing(const Options *o, const int given[N_FLAGS]) {
    const Config *c = &o->c;
    if (c->n_experts == 1) {
        if (c->router != ROUTER_SOFTMAX || o->routing != ROUTING_TOPK)
            die(USER_ERROR, "--%s: expected a model with --experts 2 or more, found a dense one",
                c->router != ROUTER_SOFTMAX ? "router sigmoid" : "routing round");
        static const char *const routed[] = {
            "d-shared", "dense-layers", "bias-rate", "capacity", "tile"};
        for (size_t i = 0; i < sizeof routed / sizeof *routed; i++)
            if (was_given(given, routed[i]))
                die(USER_ERROR,
                    "--%s: expected a model with --experts 2 or more, found a dense one",
                    routed[i]);
        return;
    }
    if (c->dense_layers >= c->n_layers)
        die(USER_ERROR, "--dense-layers: expected fewer than the %d layers, found %d", c->n_layers,
            c->dense_layers);
    if (was_given(given, "bias-rate") && c->router != ROUTER_SIGMOID)
        die(USER_ERROR, "--bias-rate: expected --router sigmoid, found softmax, which has no bias");
    if (o->routing != ROUTING_ROUND) {
        if (was_given(given, "tile"))
            die(USER_ERROR, "--tile: expected --routing round, found topk, which rounds nothing");
        return;
    }
    if (was_given(given, "capacity"))
        die(USER_ERROR,
            "--capacity: expected --routing topk, found round, which sets every expert's tokens");
    const double share = (double)o->batch * c->seq_len * c->top_k / c->n_experts;
    if (o->tile > 1 && o->tile > share && o->tile <= (int64_t)o->batch * c->seq_len)
        warn("--tile %d is more than an expert's even share of %g tokens: many experts get none; "
             "lower it, or raise --batch",
            o->tile, share);
    if (o->tile > (int64_t)o->batch * c->seq_len)
        die(USER_ERROR,
            "--tile: expected at most the --batch %d x --seq %d = %lld tokens of a micro-batch, "
            "found %d%s",
            o->batch, c->seq_len, (long long)o->batch * c->seq_len, o->tile,
            was_given(given, "tile") ? "" : ", its default");
}

/* An architecture that was named has its qk-norm and its weights of a token's experts, unless they
   are given. */
static void settle_arch(Options *o, const int given[N_FLAGS]) {
    if (o->arch == ARCH_AUTO) return;
    if (!was_given(given, "qk-norm")) o->c.qk_norm = (int)arch_rows[o->arch].qk_norm;
    if (!was_given(given, "norm-topk")) o->c.norm_topk = o->arch != ARCH_OLMOE;
}

// What depends on several flags. from_file: the shape of the model was read, not given.
static void settle(Options *o, const int given[N_FLAGS], int from_file) {
    Err err;
    Config *c = &o->c;
    if (!from_file) {
        if (!was_given(given, "head-dim") &&
            (was_given(given, "d-model") || was_given(given, "heads"))) {
            if (c->d_model % c->n_heads)
                die(USER_ERROR, "--d-model %d is not a multiple of --heads %d: give --head-dim",
                    c->d_model, c->n_heads);
            c->head_dim = c->d_model / c->n_heads;
        }
        if (!was_given(given, "kv-heads") && was_given(given, "heads")) c->n_kv_heads = c->n_heads;
        if (c->n_experts == 1) { // a dense model of the same active size, unless the width is given
            if (was_given(given, "topk") && c->top_k != 1)
                die(USER_ERROR, "--topk: expected 1 with --experts 1, found %d", c->top_k);
            if (!was_given(given, "d-expert")) c->d_expert *= c->top_k;
            c->top_k = 1;
        }
        c->d_dense = c->top_k * c->d_expert;
        settle_arch(o, given);
    }
    settle_routing(o, given);
    if (c->top_k > c->n_experts)
        die(USER_ERROR, "--topk: expected at most --experts %d, found %d", c->n_experts, c->top_k);
    if (c->n_heads % c->n_kv_heads)
        die(USER_ERROR, "--kv-heads: expected a divisor of --heads %d, found %d", c->n_heads,
            c->n_kv_heads);
    if (c->head_dim % 2)
        die(USER_ERROR, "--head-dim: expected an even number, found %d", c->head_dim);
    if (config_check(c, &err)) die(USER_ERROR, "%s", err.text);
    const char *misfit = o->arch == ARCH_AUTO ? NULL : config_misfit(c, (Arch)o->arch);
    if (misfit)
        die(USER_ERROR,
            "--arch %s: expected a shape that this architecture has, found %s; change it, or leave "
            "--arch out",
            arch_rows[o->arch].type, misfit);
    check_batch(o);
}

// -------------------------------------------------------------------------------------------------
// flags in trainer.json

static json_t *flags_to_json(Options *o) {
    json_t *all = json_object();
    char text[512];
    for (int i = 0; i < N_FLAGS; i++) {
        const Flag *f = &flags[i];
        json_t *v = NULL;
        if (!(f->commands & TRAIN) || f->commands & RUN_ONLY) continue;
        switch (f->type) {
        case SWITCH:
        case INT: v = json_integer(*(int *)field(o, f)); break;
        case LONG: v = json_integer(*(int64_t *)field(o, f)); break;
        case REAL: v = json_real(*(double *)field(o, f)); break;
        case TEXT:
            v = *(const char **)field(o, f) ? json_string(*(const char **)field(o, f))
                                            : json_null();
            break;
        case CHOICE: v = json_string(show_flag(o, f, text)); break;
        case PATHS:
            v = json_array();
            for (int k = 0; k < ((Paths *)field(o, f))->n; k++)
                json_array_append_new(v, json_string(((Paths *)field(o, f))->at[k]));
        }
        if (json_object_set_new(all, f->name, v))
            die(RUN_ERROR, "--%s: cannot be kept in trainer.json (not valid UTF-8?)", f->name);
    }
    return all;
}

// A text of a file, for as long as the program runs, as those of the command line.
static const char *kept(const char *text) {
    static char *all[2 * MAX_PATHS + 16];
    static int n;
    if (n == (int)(sizeof all / sizeof *all) || !(all[n] = strdup(text)))
        die(RUN_ERROR, "no memory for the flags of a checkpoint");
    return all[n++];
}

// Restores the flags of trainer.json; those marked in `given` may be given anew, or must agree.
static void flags_from_json(
    Options *o, const json_t *all, const char *file, const Options *cl, const int given[N_FLAGS]) {
    for (int i = 0; i < N_FLAGS; i++) {
        const Flag *f = &flags[i];
        const json_t *v = json_object_get(all, f->name);
        char where[CKPT_PATH + 16], text[64], mine[512], theirs[512];
        if (!(f->commands & TRAIN) || f->commands & RUN_ONLY) continue;
        snprintf(where, sizeof where, "%s: ", file);
        if (!v && f->commands & LATER) continue; // its default, or what was given
        if (!v)
            die(USER_ERROR,
                "%s: expected the flag \"%s\", found none: this is not a trainer.json of this "
                "version",
                file, f->name);
        if (json_is_integer(v))
            snprintf(text, sizeof text, "%lld", (long long)json_integer_value(v));
        if (json_is_real(v)) snprintf(text, sizeof text, "%.17g", json_real_value(v));
        if (f->type == PATHS && json_is_array(v)) {
            ((Paths *)field(o, f))->n = 0;
            for (size_t k = 0; k < json_array_size(v); k++)
                if (json_is_string(json_array_get(v, k)))
                    set_flag(o, f, kept(json_string_value(json_array_get(v, k))), where);
        } else if (f->type == TEXT && json_is_string(v)) {
            set_flag(o, f, kept(json_string_value(v)), where);
        } else if (f->type == CHOICE && json_is_string(v)) {
            set_flag(o, f, json_string_value(v), where);
        } else if (f->type == TEXT && json_is_null(v)) {
            *(const char **)field(o, f) = NULL;
        } else if (f->type < TEXT && json_is_number(v)) {
            set_flag(o, f, text, where);
        } else {
            die(USER_ERROR, "%s: the flag \"%s\" has a value of the wrong type", file, f->name);
        }
        if (!given[i]) continue;
        if (f->commands & ANEW) {
            memcpy(field(o, f), (const char *)cl + f->at,
                f->type == INT || f->type == CHOICE ? sizeof(int) : sizeof(int64_t));
            continue;
        }
        int same = !strcmp(show_flag((Options *)(uintptr_t)cl, f, mine), show_flag(o, f, theirs));
        if (f->type == PATHS) {
            const Paths *a = (const Paths *)((const char *)cl + f->at), *b = field(o, f);
            same = a->n == b->n;
            for (int k = 0; k < a->n && same; k++) same = !strcmp(a->at[k], b->at[k]);
            snprintf(mine, sizeof mine, "%s", a->n ? a->at[0] : "");
            snprintf(theirs, sizeof theirs, "%s", b->n ? b->at[0] : "");
        }
        if (!same)
            die(USER_ERROR,
                "--%s cannot change when a run is resumed: it was '%s', found '%s'; leave it out, "
                "or start a new run with --init",
                f->name, theirs, mine);
    }
}

// A shape that was given must be that of the model in `folder`.
static void check_shape(
    const Options *o, const int given[N_FLAGS], const Config *c, const char *folder) {
    Options asked = *o, has = *o;
    has.c = *c;
    for (int i = 0; i < N_FLAGS; i++) {
        char a[512], b[512];
        const size_t at = flags[i].at;
        if (!given[i] || at < offsetof(Options, c) || at >= offsetof(Options, c) + sizeof(Config))
            continue;
        if (strcmp(show_flag(&asked, &flags[i], a), show_flag(&has, &flags[i], b)))
            die(USER_ERROR, "--%s: the model in %s has %s, found %s; leave the flag out",
                flags[i].name, folder, b, a);
    }
}

#endif
