/* test_imports.h: folders that other programs wrote: the config.json of every architecture, models
   in shards, with fused experts, with a head that is there twice. Included by test_files.c, whose
   bench it uses.

     config/of/       config.json as published, with what it must be read as; keys that are absent
     config/arch/     which architecture a shape is saved as, and what keeps it from being another
     model/arch/      every architecture there and back, and the names that it stores
     model/shards/    model.safetensors.index.json: what it may say, and what is refused
     model/fused/     all experts of a layer in one tensor
     model/tied/      lm_head beside the embedding */
#ifndef TEST_IMPORTS_H
#define TEST_IMPORTS_H

// -------------------------------------------------------------------------------------------------
// config.json

#define COMMON                                                                     \
    "\"hidden_act\": \"silu\", \"initializer_range\": 0.02, \"use_cache\": true, " \
    "\"attention_dropout\": 0.0, \"torch_dtype\": \"bfloat16\", "

static const struct {
    const char *name, *text;
    Config c;
} published[] = {
    {"olmoe",
        "{" COMMON "\"architectures\": [\"OlmoeForCausalLM\"], \"attention_bias\": false, "
        "\"clip_qkv\": null, \"eos_token_id\": 50279, \"hidden_size\": 2048, "
        "\"intermediate_size\": 1024, \"max_position_embeddings\": 4096, \"model_type\": "
        "\"olmoe\", \"norm_topk_prob\": false, \"num_attention_heads\": 16, \"num_experts\": 64, "
        "\"num_experts_per_tok\": 8, \"num_hidden_layers\": 16, \"num_key_value_heads\": 16, "
        "\"output_router_logits\": false, \"pad_token_id\": 1, \"rms_norm_eps\": 1e-05, "
        "\"rope_scaling\": null, \"rope_theta\": 10000.0, \"router_aux_loss_coef\": 0.01, "
        "\"tie_word_embeddings\": false, \"vocab_size\": 50304}",
        {50304, 4096, 16, 2048, 16, 16, 128, 64, 8, 1024, 0, 0, 8192, QK_NORM_FULL, 0, 0, 0, 1e4,
            1e-5}},
    {"mixtral",
        "{" COMMON "\"architectures\": [\"MixtralForCausalLM\"], \"bos_token_id\": 1, "
        "\"eos_token_id\": 2, \"hidden_size\": 4096, \"intermediate_size\": 14336, "
        "\"max_position_embeddings\": 32768, \"model_type\": \"mixtral\", "
        "\"num_attention_heads\": 32, \"num_experts_per_tok\": 2, \"num_hidden_layers\": 32, "
        "\"num_key_value_heads\": 8, \"num_local_experts\": 8, \"rms_norm_eps\": 1e-05, "
        "\"rope_theta\": 1000000.0, \"router_aux_loss_coef\": 0.02, \"sliding_window\": null, "
        "\"tie_word_embeddings\": false, \"vocab_size\": 32000}",
        {32000, 32768, 32, 4096, 32, 8, 128, 8, 2, 14336, 0, 0, 28672, QK_NORM_NONE, 0, 1, 0, 1e6,
            1e-5}},
    {"qwen3_moe",
        "{" COMMON "\"architectures\": [\"Qwen3MoeForCausalLM\"], \"attention_bias\": false, "
        "\"decoder_sparse_step\": 1, \"head_dim\": 128, \"hidden_size\": 2048, "
        "\"intermediate_size\": 6144, \"max_position_embeddings\": 40960, \"max_window_layers\": "
        "48, \"mlp_only_layers\": [], \"model_type\": \"qwen3_moe\", \"moe_intermediate_size\": "
        "768, \"norm_topk_prob\": true, \"num_attention_heads\": 32, \"num_experts\": 128, "
        "\"num_experts_per_tok\": 8, \"num_hidden_layers\": 48, \"num_key_value_heads\": 4, "
        "\"rms_norm_eps\": 1e-06, \"rope_scaling\": null, \"rope_theta\": 1000000.0, "
        "\"sliding_window\": null, \"tie_word_embeddings\": false, \"use_sliding_window\": false, "
        "\"vocab_size\": 151936}",
        {151936, 40960, 48, 2048, 32, 4, 128, 128, 8, 768, 0, 0, 6144, QK_NORM_HEAD, 0, 1, 0, 1e6,
            1e-6}},
    {"llama",
        "{" COMMON "\"architectures\": [\"LlamaForCausalLM\"], \"attention_bias\": false, "
        "\"hidden_size\": 4096, \"intermediate_size\": 11008, \"max_position_embeddings\": 4096, "
        "\"mlp_bias\": false, \"model_type\": \"llama\", \"num_attention_heads\": 32, "
        "\"num_hidden_layers\": 32, \"num_key_value_heads\": 32, \"pretraining_tp\": 1, "
        "\"rms_norm_eps\": 1e-05, \"rope_scaling\": null, \"rope_theta\": 10000.0, "
        "\"tie_word_embeddings\": false, \"vocab_size\": 32000}",
        {32000, 4096, 32, 4096, 32, 32, 128, 1, 1, 11008, 0, 0, 11008, QK_NORM_NONE, 0, 1, 0, 1e4,
            1e-5}},
    {"qwen3",
        "{" COMMON "\"architectures\": [\"Qwen3ForCausalLM\"], \"attention_bias\": false, "
        "\"head_dim\": 128, \"hidden_size\": 1024, \"intermediate_size\": 3072, "
        "\"max_position_embeddings\": 40960, \"max_window_layers\": 28, \"model_type\": "
        "\"qwen3\", \"num_attention_heads\": 16, \"num_hidden_layers\": 28, "
        "\"num_key_value_heads\": 8, \"rms_norm_eps\": 1e-06, \"rope_scaling\": null, "
        "\"rope_theta\": 1000000, \"sliding_window\": null, \"tie_word_embeddings\": true, "
        "\"use_sliding_window\": false, \"vocab_size\": 151936}",
        {151936, 40960, 28, 1024, 16, 8, 128, 1, 1, 3072, 0, 0, 3072, QK_NORM_HEAD, 0, 1, 1, 1e6,
            1e-6}},
    // the sizes alone: all else as transformers has it where a key is absent
    {"olmoe-absent",
        "{\"model_type\": \"olmoe\", \"vocab_size\": 64, \"hidden_size\": 32, "
        "\"intermediate_size\": 8, \"num_hidden_layers\": 2, \"num_attention_heads\": 4}",
        {64, 4096, 2, 32, 4, 4, 8, 64, 8, 8, 0, 0, 64, QK_NORM_FULL, 0, 0, 0, 1e4, 1e-5}},
    {"mixtral-absent",
        "{\"model_type\": \"mixtral\", \"vocab_size\": 64, \"hidden_size\": 64, "
        "\"intermediate_size\": 8, \"num_hidden_layers\": 2, \"num_attention_heads\": 16, "
        "\"head_dim\": null}",
        {64, 131072, 2, 64, 16, 8, 4, 8, 2, 8, 0, 0, 16, QK_NORM_NONE, 0, 1, 0, 1e6, 1e-5}},
    {"mixtral-null-heads",
        "{\"model_type\": \"mixtral\", \"vocab_size\": 64, \"hidden_size\": 64, "
        "\"intermediate_size\": 8, \"num_hidden_layers\": 2, \"num_attention_heads\": 16, "
        "\"num_key_value_heads\": null, \"rope_parameters\": null, \"rope_theta\": 5e5}",
        {64, 131072, 2, 64, 16, 16, 4, 8, 2, 8, 0, 0, 16, QK_NORM_NONE, 0, 1, 0, 5e5, 1e-5}},
    {"qwen3_moe-absent",
        "{\"model_type\": \"qwen3_moe\", \"vocab_size\": 64, \"hidden_size\": 64, "
        "\"intermediate_size\": 8, \"num_hidden_layers\": 2, \"num_attention_heads\": 16, "
        "\"rope_parameters\": {\"rope_type\": \"default\"}}",
        {64, 32768, 2, 64, 16, 4, 4, 128, 8, 768, 0, 0, 8, QK_NORM_HEAD, 0, 0, 0, 1e4, 1e-6}},
    {"qwen3-absent",
        "{\"model_type\": \"qwen3\", \"vocab_size\": 64, \"hidden_size\": 64, "
        "\"intermediate_size\": 8, \"num_hidden_layers\": 2, \"num_attention_heads\": 32}",
        {64, 32768, 2, 64, 32, 32, 128, 1, 1, 8, 0, 0, 8, QK_NORM_HEAD, 0, 1, 0, 1e4, 1e-6}},
    {"llama-absent",
        "{\"model_type\": \"llama\", \"vocab_size\": 64, \"hidden_size\": 64, "
        "\"intermediate_size\": 8, \"num_hidden_layers\": 2, \"num_attention_heads\": 16}",
        {64, 2048, 2, 64, 16, 16, 4, 1, 1, 8, 0, 0, 8, QK_NORM_NONE, 0, 1, 0, 1e4, 1e-6}},
};
#undef COMMON

// A shape that this architecture has.
static Config shape_of(Arch arch) {
    Config c = moe_shape;
    c.qk_norm = (int)arch_rows[arch].qk_norm;
    if (arch == ARCH_OLMOE) c.head_dim = 12; // norm_topk: not the default
    if (arch == ARCH_OLMOE || arch == ARCH_MIXTRAL) c.dense_layers = 0, c.d_dense = 40;
    if (!arch_rows[arch].moe) c.n_experts = c.top_k = 1, c.dense_layers = 0, c.d_dense = c.d_expert;
    if (arch == ARCH_OWN) c.d_shared = 12;
    return c;
}

static void test_architectures(void) {
    static const struct {
        const char *name, *edit, *word;
    } edits[] = {
        // of olmoe, mixtral or llama, by the first letter of the name
        {"olmoe-clip", "{\"clip_qkv\": 8.0}", "clip_qkv: this trainer's models have none"},
        {"olmoe-clip-zero", "{\"clip_qkv\": 0}", "clip_qkv: this trainer's models have none"},
        {"olmoe-window", "{\"sliding_window\": 4096}", "sliding_window"},
        {"olmoe-bias", "{\"attention_bias\": true}", "attention_bias"},
        {"olmoe-head", "{\"head_dim\": 64}",
            "expected a shape that olmoe has, found a head width other than"},
        {"olmoe-two-counts", "{\"num_local_experts\": 8}", "another num_local_experts"},
        {"olmoe-one-expert", "{\"num_experts\": 1, \"num_experts_per_tok\": 1}",
            "num_experts: expected 2 or more in a olmoe model, found 1"},
        {"olmoe-width-of-others", "{\"moe_intermediate_size\": 512}", "moe_intermediate_size"},
        {"olmoe-missing", "{\"intermediate_size\": \"-\"}", "intermediate_size: expected a posit"},
        {"mixtral-window", "{\"sliding_window\": 4096}", "sliding_window"},
        {"mixtral-jitter", "{\"router_jitter_noise\": 0.1}", "router_jitter_noise"},
        {"mixtral-dense", "{\"mlp_only_layers\": [0]}", "mlp_only_layers"},
        {"mixtral-experts", "{\"num_local_experts\": \"8\"}",
            "num_local_experts: expected a positive integer, found another value"},
        {"llama-bias", "{\"mlp_bias\": true}", "mlp_bias: this key is not known"},
        {"llama-experts", "{\"num_local_experts\": 8}", "num_local_experts"},
        {"llama-width", "{\"hidden_size\": 4100, \"head_dim\": 128}",
            "expected a shape that llama has, found a model width that is no multiple"},
        {"llama-rope", "{\"rope_scaling\": {\"rope_type\": \"llama3\"}}", "rope_scaling"},
    };
    Config c, read;
    folder("cfg"), folder("cfg2");
    for (size_t i = 0; i < COUNT(published); i++) {
        if (!begin("config/of/%s", published[i].name)) continue;
        put_text("cfg/config.json", published[i].text);
        memset(&read, 0xFF, sizeof read);
        accepted(config_read(&read, "cfg", &err));
        const Config *want = &published[i].c;
        check(!memcmp(&read, want, offsetof(Config, rope_theta)), "other whole numbers");
        check(read.rope_theta == want->rope_theta, "rope_theta %g", read.rope_theta);
        check(read.norm_eps == want->norm_eps, "norm_eps %g", read.norm_eps);
        finish();
    }
    for (size_t i = 0; i < COUNT(edits); i++) {
        if (!begin("config/refused/%s", edits[i].name)) continue;
        for (size_t k = 0; k < COUNT(published); k++) {
            if (published[k].name[0] != edits[i].name[0] || strchr(published[k].name, '-'))
                continue;
            put_text("cfg/config.json", published[k].text);
        }
        merge("cfg", "cfg2", "config.json", edits[i].edit);
        refused(config_read(&read, "cfg2", &err), "cfg2/config.json: ", edits[i].word);
        finish();
    }
    if (begin("config/arch/of-a-shape")) {
        for (int a = ARCH_OLMOE; a < ARCHS; a++) {
            c = shape_of((Arch)a);
            accepted(config_check(&c, &err));
            check(config_arch(&c) == (Arch)a, "%s is taken for %s", arch_rows[a].type,
                arch_rows[config_arch(&c)].type);
            check(!config_own(&c) == (a != ARCH_OWN), "%s: own: %s", arch_rows[a].type,
                config_own(&c) ? config_own(&c) : "no");
            for (int b = ARCH_OLMOE; b < ARCH_OWN; b++)
                check(!config_misfit(&c, (Arch)b) == (a == b), "%s is %sa %s", arch_rows[a].type,
                    a == b ? "not " : "", arch_rows[b].type);
        }
        finish();
    }
    if (begin("config/arch/own")) { // what keeps a shape from every architecture
        static const char *const why[] = {"a shared expert", "a sigmoid router",
            "dense first layers with --qk-norm none", "dense first layers with --qk-norm full",
            "--norm-topk 0 with --qk-norm none",
            "a head width other than model width / heads with --qk-norm full", "--qk-norm full",
            "a model width that is no multiple of the heads with --qk-norm none"};
        for (size_t i = 0; i < COUNT(why); i++) {
            c = shape_of(i < 2         ? ARCH_QWEN3_MOE
                    : i == 3 || i == 5 ? ARCH_OLMOE
                    : i > 5            ? ARCH_LLAMA
                                       : ARCH_MIXTRAL);
            if (i == 0) c.d_shared = 8;
            if (i == 1) c.router = ROUTER_SIGMOID;
            if (i == 2 || i == 3) c.dense_layers = 1;
            if (i == 4) c.norm_topk = 0;
            if (i == 5) c.head_dim = 10;
            if (i == 6) c.qk_norm = QK_NORM_FULL;
            if (i == 7) c.d_model = 50;
            const char *own = config_own(&c);
            check(own && !strcmp(own, why[i]), "%s: %s", why[i], own ? own : "nothing");
        }
        finish();
    }
}

// -------------------------------------------------------------------------------------------------
// tensors

// What is put together for a file.
static SafeEntry piece[256];
static const void *piece_data[256];
static int pieces;

static void add_piece(
    const char *name, DType type, int rank, const int64_t *shape, const void *data) {
    must(pieces < 256, "pieces");
    piece[pieces] = (SafeEntry){.name = name, .dtype = type, .rank = rank};
    memcpy(piece[pieces].shape, shape, (size_t)rank * sizeof *shape);
    piece_data[pieces++] = data;
}
// Those tensors of f whose name has the word, or without it those that have it not.
static void add_pieces(const SafeFile *f, const char *word, int with) {
    for (int i = 0; i < f->n; i++) {
        const SafeTensor *t = &f->tensor[i];
        if (!strstr(t->name, word) == !with)
            add_piece(t->name, t->dtype, t->rank, t->shape, t->data);
    }
}
static void write_pieces(const char *path) {
    must(!safe_write(path, piece, pieces, nth, piece_data, &err), path);
    pieces = 0;
}

/* shards/: the model of `from` in three files, by layer: those of layer 1 in b, of layer 2 in c,
   all others in a. */
static void split(const char *from) {
    static const char *const word[] = {"layers.1.", "layers.2."}, *const name[] = {"b", "c", "a"};
    char path[64];
    SafeFile f;
    json_t *map = json_object(), *root = json_pack("{s:{s:i}}", "metadata", "total_size", 1);
    snprintf(path, sizeof path, "%s/model.safetensors", from);
    must(!safe_open(&f, path, &err), path);
    must(!remove_path("shards", &err), "shards"), folder("shards"), folder("index");
    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < f.n; i++) {
            const SafeTensor *t = &f.tensor[i];
            int place = strstr(t->name, word[0]) ? 0 : strstr(t->name, word[1]) ? 1 : 2;
            if (place != k) continue;
            add_piece(t->name, t->dtype, t->rank, t->shape, t->data);
            json_object_set_new(map, t->name, json_string(name[k]));
        }
        snprintf(path, sizeof path, "shards/%s", name[k]);
        write_pieces(path);
    }
    json_object_set_new(root, "weight_map", map);
    must(!json_write("shards", "model.safetensors.index.json", root, &err) &&
            !json_write("index", "model.safetensors.index.json", root, &err),
        "index");
    json_decref(root);
    safe_close(&f);
}

// Reads a model of this shape from a folder: the values of `want`?
static void reads_as(const char *from, const Config *c, const TensorTable *t, const void *want) {
    unsigned char *p = arena(t, 1, F32, 0);
    accepted(model_check(from, c, t, memory_of(F32), &err));
    accepted(model_read(from, c, t, memory_of(F32), p, NULL, &err));
    check(!memcmp(p, want, t->elements * 4), "other values");
    free(p);
}
static int tries(const char *from, const Config *c) { // nothing may be written before a refusal
    TensorTable t = table_of(c, F32);
    unsigned char *p = arena(&t, 1, F32, 0);
    int rc = model_read(from, c, &t, memory_of(F32), p, NULL, &err);
    for (size_t k = 0; k < t.elements * 4 && rc; k++)
        check(p[k] == 0xFF, "byte %zu was changed", k);
    free(p);
    tensor_table_free(&t);
    return rc;
}

static void test_arch_files(void) {
    folder("model");
    for (int a = ARCH_OLMOE; a < ARCHS; a++) {
        if (!begin("model/arch/%s", arch_rows[a].type)) continue;
        const Config c = shape_of((Arch)a);
        Config read;
        TensorTable t = table_of(&c, F32);
        unsigned char *p = arena(&t, 1, F32, 1), *q = arena(&t, 1, F32, 0);
        accepted(config_write("model", &c, 0.01, F32, -1, &err));
        accepted(model_write("model", &c, &t, memory_of(F32), p, NULL, &err));
        accepted(optimizer_write("model", &c, &t, memory_of(F32), p, NULL, &err));
        accepted(config_read(&read, "model", &err));
        check(!memcmp(&read, &c, sizeof c), "another shape came back");
        reads_as("model", &read, &t, p);
        accepted(optimizer_read("model", &read, &t, memory_of(F32), q, NULL, &err));
        check(!memcmp(p, q, t.elements * 4), "other moments");
        json_t *j = json_read("model/config.json", &err);
        const char *type = json_string_value(json_object_get(j, "model_type"));
        const char *class =
            json_string_value(json_array_get(json_object_get(j, "architectures"), 0));
        check(type && !strcmp(type, arch_rows[a].type), "model_type %s", type);
        check(class && !strcmp(class, arch_rows[a].class), "architectures %s", class);
        json_decref(j);
        free(p), free(q);
        tensor_table_free(&t);
        finish();
    }
    if (begin("model/arch/names-of-mixtral")) {
        static const struct {
            const char *name;
            TensorKind kind;
            size_t expert, row;
        } part[] = {{"gate.weight", T_ROUTER, 0, 0}, {"experts.4.w1.weight", T_GATE_UP, 4, 0},
            {"experts.4.w3.weight", T_GATE_UP, 4, 20}, {"experts.3.w2.weight", T_DOWN, 3, 0}};
        const Config c = shape_of(ARCH_MIXTRAL);
        TensorTable t = table_of(&c, F32);
        unsigned char *p = arena(&t, 1, F32, 1);
        SafeFile f;
        accepted(model_write("model", &c, &t, memory_of(F32), p, NULL, &err));
        must(!safe_open(&f, "model/model.safetensors", &err), "model");
        for (size_t i = 0; i < COUNT(part); i++) {
            char name[128];
            snprintf(name, sizeof name, "model.layers.2.block_sparse_moe.%s", part[i].name);
            const SafeTensor *s = safe_find(&f, name);
            const Tensor *x = tensor_of(&t, part[i].kind, 2) + part[i].expert;
            const unsigned char *at = p + 4 * (x->offset + part[i].row * x->cols);
            check(s != NULL, "no %s", name);
            check(!s || !memcmp(s->data, at, s->bytes), "%s: other content", name);
        }
        for (int i = 0; i < f.n; i++)
            check(!strstr(f.tensor[i].name, ".mlp."), "there is %s", f.tensor[i].name);
        safe_close(&f);
        free(p);
        tensor_table_free(&t);
        finish();
    }
}

static int try_shards(void) { // for damage(): the index is refused, or a file that it names
    const Config *c = &moe_shape;
    TensorTable t = table_of(c, F32);
    int rc = model_check("shards", c, &t, memory_of(F32), &err);
    check(!rc || !strncmp(err.text, "shards/", 7), "no file is named: %s", err.text);
    if (rc) fail(&err, "shards/model.safetensors.index.json");
    tensor_table_free(&t);
    return rc;
}

static void test_sharded_models(void) {
    static const struct {
        const char *name, *edit, *word, *other;
    } no[] = {
        {"no-map", "{\"weight_map\": \"-\"}", "weight_map: expected an object", "no such key"},
        {"map-of-another-kind", "{\"weight_map\": [1]}", "weight_map: expected an object",
            "another value"},
        {"outside", "{\"weight_map\": {\"model.norm.weight\": \"../model/model.safetensors\"}}",
            "tensor model.norm.weight: expected the name of a file in the same folder",
            "found ../model/"},
        {"absolute", "{\"weight_map\": {\"model.norm.weight\": \"/dev/zero\"}}",
            "expected the name of a file in the same folder", "found /dev/zero"},
        {"folder-itself", "{\"weight_map\": {\"model.norm.weight\": \".\"}}",
            "expected the name of a file in the same folder", NULL},
        {"empty-name", "{\"weight_map\": {\"model.norm.weight\": \"\"}}",
            "expected the name of a file in the same folder", NULL},
        {"number", "{\"weight_map\": {\"model.norm.weight\": 1}}",
            "expected the name of a file in the same folder", "another value"},
        {"no-such-file", "{\"weight_map\": {\"model.norm.weight\": \"d\"}}",
            "shards/d: cannot open", "No such file"},
        {"in-another-file", "{\"weight_map\": {\"model.norm.weight\": \"b\"}}",
            "shards/b: tensor model.norm.weight is missing", "says is in this file"},
        {"not-listed", "{\"weight_map\": {\"model.norm.weight\": \"-\"}}",
            "shards/a: tensor model.norm.weight: expected none", "does not list it"},
        {"listed-only", "{\"weight_map\": {\"x\": \"a\"}}", "shards/a: tensor x is missing", NULL},
        {"twice", NULL, "shards/b: tensor model.norm.weight: expected none", "says it is in a"},
        {"extra", "{\"weight_map\": {\"x\": \"b\"}}", "shards/b: tensor x of shape [48]",
            "no place"},
        {"missing", "{\"weight_map\": {\"model.norm.weight\": \"-\"}}",
            "index.json: tensor model.norm.weight of shape [48] is missing", NULL},
        {"cut", NULL, "shards/c: ", "short"},
        {"text", NULL, "shards/c: expected a safetensors file", "a text file"},
    };
    const Config c = moe_shape;
    TensorTable t = table_of(&c, F32);
    unsigned char *p = arena(&t, 1, F32, 1);
    SafeFile f;
    folder("model");
    accepted(model_write("model", &c, &t, memory_of(F32), p, NULL, &err));
    split("model");
    if (begin("model/shards/read")) {
        reads_as("shards", &c, &t, p);
        put_text("shards/model.safetensors", "hello"); // a single file goes before an index
        refused(tries("shards", &c), "shards/model.safetensors: expected a safe", "a text file");
        must(!unlink("shards/model.safetensors"), "shards");
        finish();
    }
    for (size_t i = 0; i < COUNT(no); i++) {
        if (!begin("model/refused/shards-%s", no[i].name)) continue;
        const char *what = no[i].name;
        split("model");
        if (no[i].edit) merge("index", "shards", "model.safetensors.index.json", no[i].edit);
        if (!strcmp(what, "twice") || !strcmp(what, "extra") || !strcmp(what, "missing")) {
            const int64_t shape[] = {48};
            must(!safe_open(&f, "model/model.safetensors", &err), "model");
            if (!strcmp(what, "missing")) {
                for (int k = 0; k < f.n; k++) {
                    const SafeTensor *s = &f.tensor[k];
                    if (!strcmp(s->name, "model.norm.weight") || strstr(s->name, "layers.1.") ||
                        strstr(s->name, "layers.2."))
                        continue;
                    add_piece(s->name, s->dtype, s->rank, s->shape, s->data);
                }
                write_pieces("shards/a");
            } else {
                add_pieces(&f, "layers.1.", 1);
                add_piece(strcmp(what, "extra") ? "model.norm.weight" : "x", F32, 1, shape, p);
                write_pieces("shards/b");
            }
            safe_close(&f);
        }
        if (!strcmp(what, "cut")) must(!truncate("shards/c", 30000), "shards/c");
        if (!strcmp(what, "text")) put_text("shards/c", "once upon a time");
        refused(tries("shards", &c), no[i].word, no[i].other);
        finish();
    }
    if (begin("model/shards/random-damage")) {
        split("model");
        damage("shards/model.safetensors.index.json", 300, try_shards);
        finish();
    }
    if (begin("model/refused/shards-none")) {
        put_text("shards/model.safetensors.index.json", "{\"weight_map\": {}}");
        refused(tries("shards", &c), "weight_map: expected tensors, found none", NULL);
        put_text(
            "shards/model.safetensors.index.json", "{\"weight_map\": {\"a\":\"a\",\"a\":\"b\"}}");
        refused(tries("shards", &c), "index.json: expected JSON", "duplicate");
        finish();
    }
    free(p);
    tensor_table_free(&t);
}

/* fused/: a model with the experts of each layer in one tensor, under the names of transformers'
   memory. wrong: 1 transposed, 2 one expert fewer, 3 an expert besides, 4 no down_proj. */
static void fuse(const Config *c, const TensorTable *t, const unsigned char *p, int wrong) {
    static char name[2 * 8][80];
    static float data[2 * 8][5 * 40 * 48];
    SafeFile f;
    int n = 0;
    folder("fused");
    must(!safe_open(&f, "model/model.safetensors", &err), "model");
    add_pieces(&f, ".experts.", 0);
    for (int i = 0; i < pieces; i++) { // Mixtral's router
        char *at = strstr(piece[i].name, ".block_sparse_moe.");
        if (!at) continue;
        snprintf(name[n], sizeof *name, "%.*s.mlp.%s", (int)(at - piece[i].name), piece[i].name,
            at + strlen(".block_sparse_moe."));
        piece[i].name = name[n++];
    }
    for (int l = c->dense_layers; l < c->n_layers; l++)
        for (int down = 0; down < 2 - (wrong == 4); down++, n++) {
            const Tensor *x = tensor_of(t, down ? T_DOWN : T_GATE_UP, l);
            int64_t shape[3] = {c->n_experts, (int64_t)x->rows, (int64_t)x->cols};
            for (int e = 0; e < c->n_experts; e++)
                memcpy(data[n] + (size_t)e * x->count, p + x[e].offset * 4, x->count * 4);
            if (wrong == 1) shape[1] = (int64_t)x->cols, shape[2] = (int64_t)x->rows;
            if (wrong == 2) shape[0]--;
            snprintf(name[n], sizeof *name, "model.layers.%d.mlp.experts.%s", l,
                down ? "down_proj" : "gate_up_proj");
            add_piece(name[n], F32, 3, shape, data[n]);
        }
    if (wrong == 3) add_pieces(&f, "layers.2.mlp.experts.4.up_proj", 1);
    write_pieces("fused/model.safetensors");
    safe_close(&f);
}

static void test_fused(void) {
    static const struct {
        const char *name, *word, *other;
    } no[] = {
        {"transposed", "tensor model.layers.1.mlp.experts.gate_up_proj: expected shape",
            "[5, 40, 48], found [5, 48, 40]"},
        {"one-fewer", "tensor model.layers.1.mlp.experts.gate_up_proj: expected shape",
            "[5, 40, 48], found [4, 40, 48]"},
        {"and-one-alone", "tensor model.layers.2.mlp.experts.4.up_proj.weight is there twice",
            "model.layers.2.mlp.experts.gate_up_proj has it too"},
        {"no-down", "tensor model.layers.1.mlp.experts.0.down_proj.weight", "missing"},
    };
    folder("model");
    for (int a = ARCH_OLMOE; a <= ARCH_QWEN3_MOE; a++) {
        const Config c = shape_of((Arch)a);
        TensorTable t = table_of(&c, F32), u = table_of(&c, F64);
        unsigned char *p = arena(&t, 1, F32, 1), *q = arena(&u, 1, F64, 0);
        for (size_t i = 0; i < t.elements; i++) // finite, so that values can be compared
            ((uint32_t *)(void *)p)[i] &= 0xbfffffff;
        for (int i = 0; i < t.count; i++) { // gaps stay as an empty arena has them
            const Tensor *x = &t.tensor[i];
            size_t end = i + 1 < t.count ? t.tensor[i + 1].offset : t.elements;
            for (size_t k = (x->offset + x->count) * 4; k < end * 4; k++) p[k] = 0xFF;
        }
        accepted(model_write("model", &c, &t, memory_of(F32), p, NULL, &err));
        if (begin("model/fused/%s", arch_rows[a].type)) {
            fuse(&c, &t, p, 0);
            reads_as("fused", &c, &t, p);
            accepted(model_read("fused", &c, &u, memory_of(F64), q, NULL, &err)); // converted
            for (int i = 0; i < t.count; i++)
                for (size_t k = 0; k < t.tensor[i].count; k++) {
                    double is = ((double *)(void *)q)[u.tensor[i].offset + k];
                    double want = (double)((float *)(void *)p)[t.tensor[i].offset + k];
                    check(is == want, "tensor %d, element %zu: %g, not %g", i, k, is, want);
                }
            finish();
        }
        for (size_t i = 0; i < COUNT(no) && a == ARCH_QWEN3_MOE; i++) {
            if (!begin("model/refused/fused-%s", no[i].name)) continue;
            fuse(&c, &t, p, (int)i + 1);
            refused(tries("fused", &c), no[i].word, no[i].other);
            finish();
        }
        free(p), free(q);
        tensor_table_free(&t), tensor_table_free(&u);
    }
}

static void test_tied_head(void) {
    Config c = moe_shape;
    c.tied = 1;
    TensorTable t = table_of(&c, F32);
    unsigned char *p = arena(&t, 1, F32, 1);
    const int64_t shape[] = {256, 48};
    SafeFile f;
    folder("model"), folder("head");
    accepted(model_write("model", &c, &t, memory_of(F32), p, NULL, &err));
    must(!safe_open(&f, "model/model.safetensors", &err), "model");
    const SafeTensor *e = safe_find(&f, "model.embed_tokens.weight");
    if (begin("model/tied/the-same-head")) {
        add_pieces(&f, "", 1);
        add_piece("lm_head.weight", F32, 2, shape, e->data);
        write_pieces("head/model.safetensors");
        reads_as("head", &c, &t, p);
        finish();
    }
    if (begin("model/refused/tied-another-head")) {
        add_pieces(&f, "", 1);
        add_piece("lm_head.weight", F32, 2, shape, e->data + 4); // on into the next tensor
        write_pieces("head/model.safetensors");
        refused(tries("head", &c), "head/model.safetensors: tensor lm_head.weight", "they differ");
        finish();
    }
    safe_close(&f);
    free(p);
    tensor_table_free(&t);
}

#endif
