/* checkpoint.h: models on disk, as Hugging Face folders. It knows safetensors.h and moe.h.

   A checkpoint is a folder: config.json, model.safetensors and the tokenizer's files, which
   transformers loads as they are; optimizer.safetensors and trainer.json, what a resumed run needs
   besides. Folders of others are read too: five architectures, shards, fused experts, half types.
   Where a run's folders lie, and how they get there whole, is in run_folder.h.

   Memory layout = file layout; a row of the tensor table is stored as its parts (q, k and v; gate
   and up), each a contiguous range of its rows. As in safetensors.h, nothing that is read is believed
   before it is checked, and functions return 0, or fail() = -1 with one line.

   In order: config.json; model and optimiser tensors. Start reading at model_write. */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include "safetensors.h"

#include <math.h>

#define CKPT_FN              __attribute__((unused)) static
#define CONFIG_EXPERTS_LIMIT (1 << 17) // experts of all layers: more cannot be named in a header

// -------------------------------------------------------------------------------------------------
// config.json

/* Whether a model of this shape can exist: ranges, divisibility, and a size that an address can
   hold. */
CKPT_FN int config_check(const Config *c, Err *err) {
    const struct {
        const char *name;
        int value, least, most;
    } range[] = {
        {"vocabulary", c->vocab_size, 1, (1 << 30) - 1},
        {"sequence length", c->seq_len, 1, (1 << 30) - 1},
        {"number of layers", c->n_layers, 1, MAX_LAYERS},
        {"model width", c->d_model, 1, (1 << 30) - 1},
        {"number of heads", c->n_heads, 1, (1 << 20) - 1},
        {"number of key/value heads", c->n_kv_heads, 1, c->n_heads},
        {"head width", c->head_dim, 2, (1 << 20) - 1},
        {"number of experts", c->n_experts, 1, CONFIG_EXPERTS_LIMIT},
        {"experts per token", c->top_k, 1, c->n_experts},
        {"expert width", c->d_expert, 1, (1 << 30) - 1},
        {"shared expert width", c->d_shared, 0, (1 << 30) - 1},
        {"number of dense layers", c->dense_layers, 0, c->n_layers},
        {"dense width", c->d_dense, 0, (1 << 30) - 1},
    };
    for (size_t i = 0; i < sizeof range / sizeof *range; i++) {
        if (range[i].value < range[i].least || range[i].value > range[i].most)
            return fail(err, "%s: expected %d to %d, found %d", range[i].name, range[i].least,
                range[i].most, range[i].value);
    }
    if (c->n_heads % c->n_kv_heads)
        return fail(err, "number of key/value heads: expected a divisor of the %d heads, found %d",
            c->n_heads, c->n_kv_heads);
    if (c->head_dim % 2)
        return fail(
            err, "head width: expected an even number (rotary pairs), found %d", c->head_dim);
    if (!(c->rope_theta > 0 && c->rope_theta < 1e30))
        return fail(err, "rope_theta: expected a positive number, found %g", c->rope_theta);
    if (!(c->norm_eps > 0 && c->norm_eps < 1))
        return fail(err, "norm epsilon: expected a number between 0 and 1, found %g", c->norm_eps);
    if ((double)c->n_layers * c->n_experts > CONFIG_EXPERTS_LIMIT)
        return fail(err, "%d layers of %d experts: expected at most %d experts in all", c->n_layers,
            c->n_experts, CONFIG_EXPERTS_LIMIT);
    if (c->n_experts > 1 && c->dense_layers && c->d_dense < 1)
        return fail(err,
            "dense width: expected a positive number for the %d dense layers, found %d",
            c->dense_layers, c->d_dense);
    double heads = (double)(c->n_heads + c->n_kv_heads) * 2 * c->head_dim, total = 0;
    for (int l = 0; l < c->n_layers; l++)
        total +=
            heads + 3.0 * mlp_width(c, l) * mlp_experts(c, l) + 3.0 * c->d_shared + c->n_experts;
    total = (total + 2.0 * c->vocab_size) * c->d_model;
    if (total > 0x1p46)
        return fail(err, "a model of %.3g parameters: expected at most %.3g", total, 0x1p46);
    return 0;
}

static const char *const qk_norm_names[] = {"none", "full", "head"};
static const char *const router_names[] = {"softmax", "sigmoid"};

/* The architectures of transformers that models are read and written as, and what their
   configurations hold where a key is absent (kv_heads 0: as many as heads; head_dim 0: hidden_size
   over heads). Which one a model is follows from its shape: no two have the same norms and experts.
   ARCH_OWN is this trainer's own, for what none of them can express. */
typedef enum {
    ARCH_AUTO,
    ARCH_OLMOE,
    ARCH_MIXTRAL,
    ARCH_QWEN3_MOE,
    ARCH_QWEN3,
    ARCH_LLAMA,
    ARCH_OWN,
    ARCHS
} Arch;
static const struct ArchRow {
    const char *type, *class; // model_type, architectures
    int moe;
    QkNorm qk_norm;
    const char *experts, *width; // the keys of E and of I
    int kv_heads, head_dim, seq_len, n_experts, top_k;
    double norm_eps, rope_theta;
} arch_rows[ARCHS] = {
    [ARCH_OLMOE] = {"olmoe", "OlmoeForCausalLM", 1, QK_NORM_FULL, "num_experts",
        "intermediate_size", 0, 0, 4096, 64, 8, 1e-5, 1e4},
    [ARCH_MIXTRAL] = {"mixtral", "MixtralForCausalLM", 1, QK_NORM_NONE, "num_local_experts",
        "intermediate_size", 8, 0, 131072, 8, 2, 1e-5, 1e6},
    [ARCH_QWEN3_MOE] = {"qwen3_moe", "Qwen3MoeForCausalLM", 1, QK_NORM_HEAD, "num_experts",
        "moe_intermediate_size", 4, 0, 32768, 128, 8, 1e-6, 1e4},
    [ARCH_QWEN3] = {"qwen3", "Qwen3ForCausalLM", 0, QK_NORM_HEAD, NULL, "intermediate_size", 32,
        128, 32768, 1, 1, 1e-6, 1e4},
    [ARCH_LLAMA] = {"llama", "LlamaForCausalLM", 0, QK_NORM_NONE, NULL, "intermediate_size", 0, 0,
        2048, 1, 1, 1e-6, 1e4},
    [ARCH_OWN] = {"moe_c", "MoeCForCausalLM", 1, QK_NORM_HEAD, "num_experts",
        "moe_intermediate_size", 0, 0, -1, -1, -1, 0, 0},
};

// What of a model this architecture cannot express; NULL: nothing, it is that model exactly.
CKPT_FN const char *config_misfit(const Config *c, Arch arch) {
    const struct ArchRow *a = &arch_rows[arch];
    static const char *const norms[] = {"--qk-norm none", "--qk-norm full", "--qk-norm head"};
    const int moe = c->n_experts > 1;
    if (moe && !a->moe) return "experts";
    if (!moe && a->moe) return "a dense model";
    if (moe && c->d_shared) return "a shared expert";
    if (moe && c->router != ROUTER_SOFTMAX) return "a sigmoid router";
    if (c->qk_norm != (int)a->qk_norm) return norms[c->qk_norm];
    if (moe && c->dense_layers && arch != ARCH_QWEN3_MOE) return "dense first layers";
    if (arch == ARCH_MIXTRAL && !c->norm_topk) return "--norm-topk 0";
    if (arch == ARCH_OLMOE && (int64_t)c->n_heads * c->head_dim != c->d_model)
        return "a head width other than model width / heads";
    if (arch == ARCH_LLAMA && c->d_model % c->n_heads)
        return "a model width that is no multiple of the heads";
    return NULL;
}

// The architecture that a model is saved as: the one that has all of it, else ARCH_OWN.
CKPT_FN Arch config_arch(const Config *c) {
    for (int a = ARCH_OLMOE; a < ARCH_OWN; a++)
        if (!config_misfit(c, (Arch)a)) return (Arch)a;
    return ARCH_OWN;
}

/* What of a model no architecture has, together with the qk-norm that left only one to ask; NULL:
   nothing. Such a model is saved as moe_c, which transformers does not know. */
CKPT_FN const char *config_own(const Config *c) {
    static __thread char what[120];
    static const Arch nearest[2][3] = {
        {ARCH_LLAMA, ARCH_QWEN3, ARCH_QWEN3}, {ARCH_MIXTRAL, ARCH_OLMOE, ARCH_QWEN3_MOE}};
    const char *no = config_misfit(c, nearest[c->n_experts > 1][c->qk_norm]);
    if (!no || !strncmp(no, "--qk-norm", 9)) return no;
    if (c->n_experts > 1 && (c->d_shared || c->router != ROUTER_SOFTMAX)) return no;
    snprintf(what, sizeof what, "%s with --qk-norm %s", no, qk_norm_names[c->qk_norm]);
    return what;
}

// Adds the members of `more`, which it takes over, to j. 0, or -1 when memory ran out.
CKPT_FN int json_add(json_t *j, json_t *more) {
    int rc = !more || json_object_update(j, more) ? -1 : 0;
    json_decref(more);
    return rc;
}

/* Writes FOLDER/config.json, of the architecture that fits (config_arch), with the keys which that
   one has in transformers; moe_c has those of a Qwen3-MoE and qk_norm, scoring_func (of the router)
   and shared_expert_intermediate_size besides. Both the old names (rope_theta, torch_dtype) and the
   new ones (rope_parameters, dtype) are written, so that transformers 4.51 and later load it.
   router_aux_loss_coef is this trainer's coefficient divided by K: Hugging Face's loss counts each
   of a token's K experts once (K where ours is 1). type: of the weights. eot: the tokenizer's
   end-of-text token, -1 = none. */
CKPT_FN int config_write(const char *folder, const Config *c, double router_aux_loss_coef,
    DType type, int eot, Err *err) {
    Err why;
    if (config_check(c, &why)) return fail(err, "%s/config.json: %s", shown(folder), why.text);
    const Arch arch = config_arch(c);
    const struct ArchRow *a = &arch_rows[arch];
    const int moe = c->n_experts > 1, own = arch == ARCH_OWN;
    const int qwen = own || arch == ARCH_QWEN3_MOE || arch == ARCH_QWEN3;
    const char *dtype = type == BF16 ? "bfloat16"
        : type == F16                ? "float16"
        : type == F64                ? "float64"
                                     : "float32";
    int mlp = !moe || arch == ARCH_OLMOE || arch == ARCH_MIXTRAL ? c->d_expert
        : c->d_dense > 0                                         ? c->d_dense
                                                                 : c->top_k * c->d_expert;
    json_t *j = json_pack("{s:[s], s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i}",
        "architectures", a->class, "model_type", a->type, "torch_dtype", dtype, "dtype", dtype,
        "vocab_size", c->vocab_size, "max_position_embeddings", c->seq_len, "num_hidden_layers",
        c->n_layers, "hidden_size", c->d_model, "num_attention_heads", c->n_heads,
        "num_key_value_heads", c->n_kv_heads, "intermediate_size", mlp);
    int rc = !j;
    if (!rc && arch != ARCH_OLMOE) rc = json_add(j, json_pack("{s:i}", "head_dim", c->head_dim));
    if (!rc)
        rc = json_add(j,
            json_pack("{s:s, s:f, s:b, s:f, s:f, s:n, s:{s:s, s:f}, s:b, s:f, s:n}", "hidden_act",
                "silu", "attention_dropout", 0.0, "tie_word_embeddings", c->tied, "rms_norm_eps",
                c->norm_eps, "rope_theta", c->rope_theta, "rope_scaling", "rope_parameters",
                "rope_type", "default", "rope_theta", c->rope_theta, "use_cache", 1,
                "initializer_range", 0.02, "pad_token_id"));
    // one token stands between two texts: it ends one and begins the next
    if (!rc && eot >= 0)
        rc = json_add(j, json_pack("{s:i, s:i}", "bos_token_id", eot, "eos_token_id", eot));
    if (!rc && eot < 0) rc = json_add(j, json_pack("{s:n, s:n}", "bos_token_id", "eos_token_id"));
    if (!rc && arch != ARCH_MIXTRAL) rc = json_add(j, json_pack("{s:b}", "attention_bias", 0));
    if (!rc && arch == ARCH_MIXTRAL) rc = json_add(j, json_pack("{s:n}", "sliding_window"));
    if (!rc && arch == ARCH_OLMOE) rc = json_add(j, json_pack("{s:n}", "clip_qkv"));
    if (!rc && arch == ARCH_LLAMA) rc = json_add(j, json_pack("{s:b}", "mlp_bias", 0));
    if (!rc && qwen)
        rc = json_add(j, json_pack("{s:b, s:n}", "use_sliding_window", 0, "sliding_window"));
    if (!rc && own)
        rc = json_add(j,
            json_pack("{s:s, s:s, s:i}", "qk_norm", qk_norm_names[c->qk_norm], "scoring_func",
                router_names[c->router], "shared_expert_intermediate_size", c->d_shared));
    if (!rc && moe)
        rc = json_add(j,
            json_pack("{s:i, s:i, s:f, s:b}", a->experts, c->n_experts, "num_experts_per_tok",
                c->top_k, "router_aux_loss_coef", router_aux_loss_coef, "output_router_logits", 0));
    if (!rc && moe && arch != ARCH_MIXTRAL)
        rc = json_add(j, json_pack("{s:b}", "norm_topk_prob", c->norm_topk));
    if (!rc && moe && qwen) {
        rc = json_add(j,
            json_pack("{s:i, s:i, s:[]}", "moe_intermediate_size", c->d_expert,
                "decoder_sparse_step", 1, "mlp_only_layers"));
        for (int l = 0; l < c->dense_layers && !rc; l++)
            rc = json_array_append_new(json_object_get(j, "mlp_only_layers"), json_integer(l));
    }
    if (rc)
        fail(err, "%s/config.json: out of memory, or a coefficient that is not finite",
            shown(folder));
    else
        rc = json_write(folder, "config.json", j, err);
    json_decref(j);
    return rc ? -1 : 0;
}

/* A config.json while it is read: the first thing wrong stays in err, and later questions are not
   asked. */
typedef struct ConfigFile {
    const json_t *root;
    const char *path;
    int bad;
    Err *err;
} ConfigFile;

// A positive integer below 2^30. fallback < 0: the key must be there.
CKPT_FN int config_int(ConfigFile *f, const char *key, int fallback) {
    const json_t *j = json_object_get(f->root, key);
    if (f->bad || ((!j || json_is_null(j)) && fallback >= 0)) return fallback;
    json_int_t n = json_integer_value(j);
    if (json_is_integer(j) && n >= 1 && n < 1 << 30) return (int)n;
    f->bad = 1;
    if (json_is_integer(j))
        fail(f->err, "%s: %s: expected 1 to %d, found %lld", f->path, key, (1 << 30) - 1,
            (long long)n);
    else
        fail(f->err, "%s: %s: expected a positive integer, found %s", f->path, key,
            j ? "another value" : "no such key");
    return 1;
}

// fallback 0: the key must be there.
CKPT_FN double config_real(ConfigFile *f, const json_t *from, const char *key, double fallback) {
    const json_t *j = json_object_get(from, key);
    if ((!j || json_is_null(j)) && fallback > 0) return fallback;
    if (f->bad || (json_is_number(j) && json_number_value(j) > 0)) return json_number_value(j);
    f->bad = 1;
    if (json_is_number(j))
        fail(f->err, "%s: %s: expected a positive number, found %g", f->path, key,
            json_number_value(j));
    else
        fail(f->err, "%s: %s: expected a positive number, found %s", f->path, key,
            j ? "another value" : "no such key");
    return 1;
}

CKPT_FN int config_bool(ConfigFile *f, const char *key, int fallback) {
    const json_t *j = json_object_get(f->root, key);
    if (!j || json_is_null(j)) return fallback;
    if (json_is_boolean(j)) return json_is_true(j);
    if (!f->bad) fail(f->err, "%s: %s: expected true or false, found another value", f->path, key);
    f->bad = 1;
    return fallback;
}

// One of n names, as its place among them.
CKPT_FN int config_name(ConfigFile *f, const char *key, const char *const *names, int n) {
    const json_t *j = json_object_get(f->root, key);
    const char *text = json_string_value(j);
    for (int i = 0; i < n; i++)
        if (text && !strcmp(text, names[i])) return i;
    if (!f->bad)
        f->bad = fail(f->err, "%s: %s: expected %s%s%s%s%s, found %s", f->path, key, names[0],
            n > 2 ? ", " : " or ", names[1], n > 2 ? " or " : "", n > 2 ? names[2] : "",
            text    ? shown(text)
                : j ? "another value"
                    : "no such key");
    return 0;
}

// Refuses a setting that this model does not have.
CKPT_FN void config_refuse(ConfigFile *f, int is_so, const char *what) {
    if (is_so && !f->bad)
        f->bad = fail(f->err, "%s: %s: this trainer's models have none of it", f->path, what);
}

// null, false, 0, "", [] and {} all say: not used.
CKPT_FN int json_is_off(const json_t *j) {
    return !j || json_is_null(j) || json_is_false(j) ||
        (json_is_number(j) && json_number_value(j) == 0) ||
        (json_is_string(j) && !*json_string_value(j)) ||
        (json_is_array(j) && !json_array_size(j)) || (json_is_object(j) && !json_object_size(j));
}

/* Keys that may be there. Any other key may only say that something is off: a setting that changes
   the model and is not understood must not be passed over. The first group changes nothing that is
   computed here. */
CKPT_FN int config_key_known(const char *key, int own) {
    static const char *const keys[] = {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "clip_qkv",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "max_window_layers",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "sliding_window",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "attention_bias",
        "attention_dropout",
        "decoder_sparse_step",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "mlp_only_layers",
        "model_type",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_local_experts",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    };
    static const char *const own_keys[] = {
        "qk_norm", "scoring_func", "shared_expert_intermediate_size"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        if (!strcmp(key, keys[i])) return 1;
    }
    for (size_t i = 0; own && i < sizeof own_keys / sizeof *own_keys; i++) {
        if (!strcmp(key, own_keys[i])) return 1;
    }
    return 0;
}

/* The rotary base: rope_theta, or since transformers 5 rope_parameters.rope_theta, or both and
   equal. */
CKPT_FN double config_rope(ConfigFile *f, double fallback) {
    const json_t *p = json_object_get(f->root, "rope_parameters"), *value;
    const char *key;
    config_refuse(f, !json_is_off(json_object_get(f->root, "rope_scaling")), "rope_scaling");
    if (json_is_off(p)) return config_real(f, f->root, "rope_theta", fallback);
    config_refuse(f, !json_is_object(p), "rope_parameters of this form");
    json_object_foreach((json_t *)(uintptr_t)p, key, value) {
        const char *text = json_string_value(value);
        int fine = !strcmp(key, "rope_theta") || json_is_null(value) ||
            ((!strcmp(key, "rope_type") || !strcmp(key, "type")) && text &&
                !strcmp(text, "default"));
        if (!fine && !f->bad)
            f->bad = fail(f->err,
                "%s: rope_parameters: %s: expected plain rotary embedding, "
                "rope_type default",
                f->path, shown(key));
    }
    const json_t *old = json_object_get(f->root, "rope_theta");
    if (json_is_number(old) && json_number_value(old) > 0) fallback = json_number_value(old);
    double theta = config_real(f, p, "rope_theta", fallback);
    if (!f->bad && !json_is_off(old) && json_number_value(old) != theta)
        f->bad = fail(f->err,
            "%s: rope_theta is %g, rope_parameters.rope_theta is %g: expected them equal", f->path,
            json_number_value(old), theta);
    return theta;
}

// What only one architecture or the other computes with, or is stored otherwise, must be off.
CKPT_FN void config_refuse_settings(ConfigFile *f, Arch arch) {
    static const char *const off[] = {
        "attention_bias", "attention_dropout", "use_sliding_window", "clip_qkv"};
    static const char *const routed[] = {"num_experts", "num_local_experts", "num_experts_per_tok",
        "moe_intermediate_size", "mlp_only_layers"};
    const int own = arch == ARCH_OWN, qwen = own || arch == ARCH_QWEN3_MOE || arch == ARCH_QWEN3;
    for (size_t i = 0; i < sizeof off / sizeof *off; i++)
        config_refuse(f, !json_is_off(json_object_get(f->root, off[i])), off[i]);
    const json_t *clip = json_object_get(f->root, "clip_qkv"); // 0 is a limit too
    config_refuse(f, clip && !json_is_null(clip), "clip_qkv");
    for (size_t i = 0; i < sizeof routed / sizeof *routed; i++)
        config_refuse(f,
            (!arch_rows[arch].moe || (i > 2 && !qwen)) &&
                !json_is_off(json_object_get(f->root, routed[i])),
            routed[i]);
    // a window that is used without being switched on
    config_refuse(
        f, !qwen && !json_is_off(json_object_get(f->root, "sliding_window")), "sliding_window");
    const json_t *act = json_object_get(f->root, "hidden_act");
    if (!f->bad && act && (!json_is_string(act) || strcmp(json_string_value(act), "silu")))
        f->bad = fail(f->err, "%s: hidden_act: expected silu, found %s", f->path,
            json_is_string(act) ? shown(json_string_value(act)) : "another value");
    const json_t *kinds = json_object_get(f->root, "layer_types");
    config_refuse(f, !json_is_off(kinds) && !json_is_array(kinds), "layer_types of this form");
    for (size_t i = 0; i < json_array_size(kinds); i++) {
        const char *kind = json_string_value(json_array_get(kinds, i));
        config_refuse(
            f, !kind || strcmp(kind, "full_attention"), "layer_types other than full_attention");
    }
}

// Experts, their width, which layers have them.
CKPT_FN void config_experts(ConfigFile *f, Config *c, Arch arch) {
    const struct ArchRow *a = &arch_rows[arch];
    const json_t *one = json_object_get(f->root, "num_experts"),
                 *two = json_object_get(f->root, "num_local_experts");
    config_refuse(
        f, one && two && !json_equal(one, two), "num_experts and another num_local_experts");
    const char *experts = one ? "num_experts" : two ? "num_local_experts" : a->experts;
    c->n_experts = config_int(f, experts, a->n_experts);
    c->top_k = config_int(f, "num_experts_per_tok", a->top_k);
    c->d_expert = config_int(f, a->width, arch == ARCH_QWEN3_MOE ? 768 : -1);
    c->norm_topk = arch == ARCH_MIXTRAL || config_bool(f, "norm_topk_prob", 0);
    if (!f->bad && c->n_experts < 2)
        f->bad = fail(
            f->err, "%s: %s: expected 2 or more in a %s model, found 1", f->path, experts, a->type);
    config_refuse(
        f, config_int(f, "decoder_sparse_step", 1) != 1, "decoder_sparse_step other than 1");
    const json_t *dense = json_object_get(f->root, "mlp_only_layers");
    config_refuse(
        f, dense && !json_is_null(dense) && !json_is_array(dense), "mlp_only_layers of this form");
    for (size_t i = 0; i < json_array_size(dense); i++) {
        const json_t *l = json_array_get(dense, i);
        config_refuse(f,
            !json_is_integer(l) || json_integer_value(l) != (json_int_t)i || i >= MAX_LAYERS,
            "mlp_only_layers other than the first ones, in order");
        c->dense_layers = (int)i + 1;
        if (f->bad) break;
    }
}

/* Reads FOLDER/config.json of an architecture above. What this model cannot express is refused by
   name; keys that are absent have the values that transformers gives them, but for the sizes, which
   must be there. */
CKPT_FN int config_read(Config *c, const char *folder, Err *err) {
    char path[CKPT_PATH], name[300];
    if (path_join(path, folder, "config.json", err)) return -1;
    json_t *root = json_read(path, err);
    if (!root) return -1;
    snprintf(name, sizeof name, "%s", shown(path));
    ConfigFile f = {root, name, 0, err};
    const char *type = json_string_value(json_object_get(root, "model_type")), *key;
    json_t *value;
    Arch arch = ARCH_AUTO;
    for (int i = ARCH_OLMOE; i < ARCHS; i++)
        if (type && !strcmp(type, arch_rows[i].type)) arch = (Arch)i;
    if (!arch) {
        f.bad = fail(err,
            "%s: model_type: expected olmoe, mixtral, qwen3_moe, qwen3, llama or moe_c, found %s",
            name, type ? shown(type) : "none: is this the config.json of a model?");
        arch = ARCH_OWN;
    }
    const struct ArchRow *a = &arch_rows[arch];
    const int own = arch == ARCH_OWN;
    const int moe = own ? !json_is_off(json_object_get(root, "num_experts")) : a->moe;
    json_object_foreach(root, key, value) {
        if (!f.bad && !config_key_known(key, own) && !json_is_off(value))
            f.bad = fail(err,
                "%s: %s: this key is not known here, and it is not off: expected a plain %s model",
                name, shown(key), a->type);
    }
    memset(c, 0, sizeof *c);
    c->vocab_size = config_int(&f, "vocab_size", -1);
    c->seq_len = config_int(&f, "max_position_embeddings", a->seq_len);
    c->n_layers = config_int(&f, "num_hidden_layers", -1);
    c->d_model = config_int(&f, "hidden_size", -1);
    c->n_heads = config_int(&f, "num_attention_heads", -1);
    // null says as many as heads; a key that is absent, the architecture's number
    int kv_heads = json_object_get(root, "num_key_value_heads") ? 0 : a->kv_heads;
    c->n_kv_heads = config_int(&f, "num_key_value_heads", kv_heads ? kv_heads : c->n_heads);
    c->head_dim = config_int(&f, "head_dim", own && !moe ? 128 : a->head_dim);
    c->d_dense = config_int(&f, "intermediate_size", -1);
    c->n_experts = c->top_k = 1;
    c->qk_norm = (int)a->qk_norm;
    c->router = ROUTER_SOFTMAX;
    c->norm_topk = 1;
    if (own) {
        c->qk_norm = config_name(&f, "qk_norm", qk_norm_names, 3);
        c->router = config_name(&f, "scoring_func", router_names, 2);
        const json_t *shared = json_object_get(root, "shared_expert_intermediate_size");
        if (!json_is_off(shared))
            c->d_shared = config_int(&f, "shared_expert_intermediate_size", -1);
        config_refuse(&f, !moe && c->d_shared, "shared_expert_intermediate_size, no num_experts");
        config_refuse(&f, !moe && c->router, "scoring_func other than softmax, no num_experts");
    }
    c->tied = config_bool(&f, "tie_word_embeddings", 0);
    c->norm_eps = config_real(&f, root, "rms_norm_eps", a->norm_eps);
    c->rope_theta = config_rope(&f, a->rope_theta);
    if (!c->head_dim && !f.bad) {
        if (c->d_model % c->n_heads)
            f.bad = fail(err,
                "%s: head_dim: expected it, since hidden_size %d is no multiple of %d heads", name,
                c->d_model, c->n_heads);
        c->head_dim = c->d_model / c->n_heads;
    }
    if (moe)
        config_experts(&f, c, arch);
    else
        c->d_expert = c->d_dense;
    // as the trainer makes it: the width of dense layers, where an architecture has none
    if (arch == ARCH_OLMOE || arch == ARCH_MIXTRAL) {
        int64_t dense = (int64_t)c->top_k * c->d_expert;
        c->d_dense = dense < 1 << 30 ? (int)dense : 0;
    }
    config_refuse_settings(&f, own && !moe ? ARCH_QWEN3 : arch);
    Err why;
    if (!f.bad && config_check(c, &why)) f.bad = fail(err, "%s: %s", name, why.text);
    const char *misfit = f.bad || own ? NULL : config_misfit(c, arch);
    if (misfit)
        f.bad = fail(err, "%s: expected a shape that %s has, found %s", name, a->type, misfit);
    json_decref(root);
    return f.bad ? -1 : 0;
}

// -------------------------------------------------------------------------------------------------
// model and optimiser tensors

enum { PART_NAME = 160 };

// One tensor of a file and where it lies on the device.
typedef struct StoredPart {
    char name[PART_NAME];
    SafeEntry entry;
    unsigned char *at; // of element `skip`
    size_t count;
    size_t from;       // its first element, counted in the tensor's
    size_t skip, have; // elements skip .. skip + have - 1 are on this rank
    int arena;         // Spread
    const void *base;
    const Tensor *tensor;
    int part; // which one of the tensor's
} StoredPart;

typedef struct StoredList {
    StoredPart *part;
    int n;
    const Config *c;
    int model; // a model's tensors, which other programs may have stored otherwise
    const Backend *backend;
    const Spread *spread; // NULL: everything is here
    void *staging;        // one part, on the host
} StoredList;

/* The name of part p of tensor x in a file of this model: the table's, but where Mixtral has others
   (w1 is the gate, w3 up, w2 down). */
CKPT_FN void stored_name(char *out, size_t size, const Config *c, const Tensor *x, int p) {
    const char *end = x->row->kind == T_ROUTER                     ? "gate"
        : x->row->kind == T_GATE_UP && x->row->where == IN_EXPERTS ? (p ? "w3" : "w1")
        : x->row->kind == T_DOWN && x->row->where == IN_EXPERTS    ? "w2"
                                                                   : NULL;
    if (!end || config_arch(c) != ARCH_MIXTRAL)
        tensor_name(out, size, x, p);
    else if (x->expert < 0)
        snprintf(out, size, "model.layers.%d.block_sparse_moe.%s.weight", x->layer, end);
    else
        snprintf(out, size, "model.layers.%d.block_sparse_moe.experts.%d.%s.weight", x->layer,
            x->expert, end);
}

/* Appends every part of the trained (or untrained) tensors, whose arena of `type` starts at `base`.
   No arena: none. */
CKPT_FN int stored_add(StoredList *list, const Config *c, const TensorTable *t, int trained,
    const char *prefix, const void *base, DType type, Err *err) {
    size_t parts = 0;
    const int moments = *prefix != 0;
    if (!base) return 0;
    if (list->spread) t = list->spread->whole;
    for (int i = 0; i < t->count; i++) parts += (size_t)t->tensor[i].row->parts;
    StoredPart *more =
        (StoredPart *)realloc(list->part, ((size_t)list->n + parts + 1) * sizeof *more);
    if (!more)
        return fail(err, "out of memory for a list of %llu tensors", (unsigned long long)parts);
    list->part = more;
    for (int i = 0; i < t->count; i++) {
        const Tensor *x = &t->tensor[i];
        size_t row = 0;
        for (int p = 0; p < x->row->parts && x->row->trained == trained; p++) {
            StoredPart *s = &list->part[list->n++];
            char name[PART_NAME];
            size_t rows = dim_of(c, x->row->rows[p]);
            stored_name(name, sizeof name, c, x, p);
            s->tensor = x, s->part = p;
            snprintf(s->name, sizeof s->name, "%s%.140s", prefix, name);
            s->entry = (SafeEntry){
                NULL, type, x->row->cols == DIM_NONE ? 1 : 2, {(int64_t)rows, (int64_t)x->cols}};
            s->count = rows * x->cols;
            size_t first = 0, here = x->count, at = x->offset;
            if (list->spread) at = list->spread->here(list->spread->ctx, x, moments, &first, &here);
            s->from = row * x->cols;
            const size_t begin = first > s->from ? first : s->from, end = s->from + s->count,
                         stop = first + here < end ? first + here : end;
            s->have = begin < stop ? stop - begin : 0;
            s->skip = s->have ? begin - s->from : 0;
            s->arena = moments;
            s->base = base;
            s->at = (unsigned char *)(uintptr_t)base;
            if (s->have) s->at += (at + begin - first) * dtype_size(type);
            row += rows;
        }
    }
    return 0;
}

// For safe_write: part i, fetched from the device.
CKPT_FN const void *stored_fetch(void *ctx, int i) {
    StoredList *list = (StoredList *)ctx;
    const StoredPart *s = &list->part[i];
    const size_t size = dtype_size(s->entry.dtype);
    if (list->spread)
        list->spread->gather(list->spread->ctx, s->tensor, s->arena, s->from, s->count, s->base,
            size, list->staging);
    else
        list->backend->to_host(list->staging, s->at, s->count * size);
    return list->staging;
}

// Every part, to the rank that writes.
CKPT_FN int stored_send(StoredList *list) {
    for (int i = 0; i < list->n; i++) stored_fetch(list, i);
    return 0;
}

CKPT_FN int stored_write(StoredList *list, const char *folder, const char *file, Err *err) {
    char path[CKPT_PATH];
    if (path_join(path, folder, file, err)) return -1;
    SafeEntry *entries = (SafeEntry *)malloc(((size_t)list->n + 1) * sizeof *entries);
    size_t largest = 1;
    for (int i = 0; i < list->n && entries; i++) {
        size_t bytes = list->part[i].count * dtype_size(list->part[i].entry.dtype);
        if (bytes > largest) largest = bytes;
        entries[i] = list->part[i].entry;
        entries[i].name = list->part[i].name;
    }
    list->staging = malloc(largest);
    int rc;
    if (!entries || !list->staging)
        rc = fail(err, "%s: out of memory for %llu bytes to copy through", shown(path),
            (unsigned long long)largest);
    else if (list->spread && !list->spread->writes)
        rc = stored_send(list);
    else
        rc = safe_write(path, entries, list->n, stored_fetch, list, err);
    free(entries);
    free(list->staging);
    list->staging = NULL;
    return rc;
}

// The value of element i of a tensor in a file. double holds every value of every type.
CKPT_FN double element_value(const unsigned char *data, DType type, size_t i) {
    if (type == F64) {
        double v;
        memcpy(&v, data + 8 * i, 8);
        return v;
    }
    uint32_t bits = 0;
    if (type == F32) {
        memcpy(&bits, data + 4 * i, 4);
    } else {
        uint16_t half;
        memcpy(&half, data + 2 * i, 2);
        bits = (uint32_t)half << 16; // BF16 is the upper half of a float
        if (type == F16) {
            int sign = half >> 15, exponent = half >> 10 & 31, fraction = half & 1023;
            double v = exponent == 31
                ? (fraction ? (double)NAN : (double)INFINITY)
                : ldexp(exponent ? fraction + 1024 : fraction, (exponent ? exponent : 1) - 25);
            return sign ? -v : v;
        }
    }
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

/* Stores v as element i, rounded to nearest, ties to even (to BF16 by way of float). 0 where a
   finite value becomes infinite, or where the type is not one that a device computes in. */
CKPT_FN int element_store(unsigned char *data, DType type, size_t i, double v) {
    if (type == F64) {
        memcpy(data + 8 * i, &v, 8);
        return 1;
    }
    float f = (float)v;
    if (isfinite(v) && !isfinite(f)) return 0;
    if (type == F32) {
        memcpy(data + 4 * i, &f, 4);
        return 1;
    }
    const uint16_t half = bf16_of(f);
    if (isfinite(v) && (half & 0x7f80) == 0x7f80) return 0;
    memcpy(data + 2 * i, &half, 2);
    return type == BF16;
}

/* Copies one tensor to the device, converted if the types differ: `count` elements of t from
   element `from` on. */
CKPT_FN int stored_load(const StoredPart *s, const SafeTensor *t, size_t from,
    const Backend *backend, unsigned char *staging, size_t room, const char *path, Err *err) {
    size_t size = dtype_size(s->entry.dtype), step = room / size;
    from += s->skip;
    if (t->dtype == s->entry.dtype) {
        if (s->have) backend->to_device(s->at, t->data + from * size, s->have * size);
        return 0;
    }
    for (size_t i = 0; i < s->have; i += step) {
        size_t n = s->have - i < step ? s->have - i : step;
        for (size_t k = 0; k < n; k++) {
            double v = element_value(t->data, t->dtype, from + i + k);
            if (!element_store(staging, s->entry.dtype, k, v))
                return fail(err, "%s: tensor %s: %g (%s, element %llu) does not fit into %s",
                    shown(path), shown(t->name), v, dtype_name(t->dtype),
                    (unsigned long long)(from + i + k), dtype_name(s->entry.dtype));
        }
        backend->to_device(s->at + i * size, staging, n * size);
    }
    return 0;
}

/* The tensors of a model: one file, or those that an index names. */
typedef struct Weights {
    char path[CKPT_PATH]; // of the file, or of the index
    SafeFile *file;
    unsigned char **used; // used[f][i]: tensor i of file f has been taken
    int n;
} Weights;

CKPT_FN void weights_close(Weights *w) {
    for (int i = 0; i < w->n; i++) {
        safe_close(&w->file[i]);
        if (w->used) free(w->used[i]);
    }
    free(w->file);
    free(w->used);
    w->file = NULL, w->used = NULL, w->n = 0;
}

CKPT_FN int weights_room(Weights *w, size_t n, Err *err) {
    w->file = (SafeFile *)calloc(n + 1, sizeof *w->file);
    w->used = (unsigned char **)calloc(n + 1, sizeof *w->used);
    return w->file && w->used ? 0 : fail(err, "%s: out of memory", shown(w->path));
}

CKPT_FN int weights_add(Weights *w, const char *path, Err *err) {
    SafeFile *f = &w->file[w->n];
    if (safe_open(f, path, err)) return -1;
    w->used[w->n++] = (unsigned char *)calloc((size_t)f->n + 1, 1);
    return w->used[w->n - 1] ? 0 : fail(err, "%s: out of memory", shown(path));
}

CKPT_FN int text_order(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The files of an index {"weight_map": {tensor: file}}, beside it, each once. Every tensor must be
   in the file that the map gives it, and no file may hold another. */
CKPT_FN int weights_index(
    Weights *w, const char *folder, const json_t *map, const char **names, Err *err) {
    char path[CKPT_PATH];
    const char *key;
    json_t *value;
    size_t n = 0, files = 0;
    json_object_foreach((json_t *)(uintptr_t)map, key, value) {
        const char *file = json_string_value(value);
        if (!file || !*file || *file == '.' || strchr(file, '/'))
            return fail(err,
                "%s: weight_map: tensor %s: expected the name of a file in the same folder, found "
                "%s",
                shown(w->path), shown(key), file ? shown(file) : "another value");
        names[n++] = file;
    }
    qsort((void *)(uintptr_t)names, n, sizeof *names, text_order);
    for (size_t i = 0; i < n; i++)
        if (!i || strcmp(names[i], names[files - 1])) names[files++] = names[i];
    if (weights_room(w, files, err)) return -1;
    for (size_t i = 0; i < files; i++)
        if (path_join(path, folder, names[i], err) || weights_add(w, path, err)) return -1;
    size_t listed = 0;
    json_object_foreach((json_t *)(uintptr_t)map, key, value) {
        const char *file = json_string_value(value), **at;
        at = (const char **)bsearch(&file, names, files, sizeof *names, text_order);
        const SafeFile *f = &w->file[at - names];
        if (!safe_find(f, key))
            return fail(err, "%s: tensor %s is missing, which %s says is in this file",
                shown(f->path), shown(key), shown(w->path));
        listed++;
    }
    for (int k = 0; k < w->n; k++) {
        const SafeFile *f = &w->file[k];
        for (int i = 0; i < f->n; i++) {
            const char *file = json_string_value(json_object_get(map, f->tensor[i].name));
            if (!file || strcmp(file, names[k]))
                return fail(err, "%s: tensor %s: expected none of that name here, since %s %s%s",
                    shown(f->path), shown(f->tensor[i].name), shown(w->path),
                    file ? "says it is in " : "does not list it", file ? shown(file) : "");
        }
    }
    return listed ? 0 : fail(err, "%s: weight_map: expected tensors, found none", shown(w->path));
}

/* Opens FOLDER/FILE, or where there is none the shards of FOLDER/FILE.index.json. */
CKPT_FN int weights_open(Weights *w, const char *folder, const char *file, Err *err) {
    char index[64];
    struct stat st;
    *w = (Weights){.n = 0};
    if (path_join(w->path, folder, file, err)) return -1;
    snprintf(index, sizeof index, "%s.index.json", file);
    int rc = 0;
    char other[CKPT_PATH];
    if (path_join(other, folder, index, err)) return -1;
    if (!lstat(w->path, &st) || errno != ENOENT || stat(other, &st)) {
        rc = weights_room(w, 1, err);
        if (!rc) rc = weights_add(w, w->path, err);
    } else {
        strcpy(w->path, other);
        json_t *root = json_read(other, err);
        const json_t *map = json_object_get(root, "weight_map");
        if (!root) return -1;
        size_t n = json_object_size(map);
        const char **names = (const char **)malloc((n + 1) * sizeof *names);
        if (!names)
            rc = fail(err, "%s: out of memory", shown(other));
        else if (!json_is_object(map))
            rc = fail(err, "%s: weight_map: expected an object {tensor: file}, found %s",
                shown(other), map ? "another value" : "no such key");
        else
            rc = weights_index(w, folder, map, names, err);
        free((void *)(uintptr_t)names);
        json_decref(root);
    }
    if (rc) weights_close(w);
    return rc;
}

// Where a part was found.
typedef struct Found {
    const SafeTensor *tensor;
    size_t from; // its first element there
    int file;
} Found;

// Marks a tensor as taken, and says where it is; 0 if there is none of that name.
CKPT_FN int weights_take(Weights *w, const char *name, Found *at) {
    for (int k = 0; k < w->n; k++) {
        const SafeTensor *t = safe_find(&w->file[k], name);
        if (!t) continue;
        w->used[k][t - w->file[k].tensor] = 1;
        *at = (Found){t, 0, k};
        return 1;
    }
    return 0;
}

/* Finds a part under its own name, or as transformers holds it in memory and may store it: under
   the table's name, or in one tensor with all experts of the layer, gate_up_proj (E, 2I, C), an
   expert's gate above its up, or down_proj (E, C, I). */
CKPT_FN int stored_find(
    const StoredList *list, const StoredPart *s, Weights *w, Found *at, Err *err) {
    const Tensor *x = s->tensor;
    const int64_t stack[3] = {list->c->n_experts, (int64_t)x->rows, (int64_t)x->cols};
    const int64_t *shape = s->entry.shape;
    char name[PART_NAME];
    int rank = s->entry.rank, alone = weights_take(w, s->name, at), fused = 0;
    Found whole;
    if (!alone && list->model) {
        tensor_name(name, sizeof name, x, s->part);
        alone = weights_take(w, name, at);
    }
    if (list->model && x->expert >= 0) {
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%s", x->layer,
            x->row->kind == T_GATE_UP ? "gate_up_proj" : "down_proj");
        fused = weights_take(w, name, &whole);
    }
    if (alone && fused)
        return fail(err, "%s: tensor %s is there twice: %s has it too", shown(w->path),
            shown(at->tensor->name), name);
    if (!alone && !fused)
        return fail(err,
            "%s: tensor %s of shape %s is missing: the file does not belong to this model",
            shown(w->path), s->name, shape_text(s->entry.rank, s->entry.shape));
    if (fused) {
        *at = whole;
        at->from = ((size_t)x->expert * x->rows + (size_t)s->part * s->count / x->cols) * x->cols;
        rank = 3, shape = stack;
    }
    const SafeTensor *t = at->tensor;
    if (t->rank == rank && !memcmp(t->shape, shape, (size_t)rank * sizeof *shape)) return 0;
    return fail(err, "%s: tensor %s: expected shape %s, found %s", shown(w->file[at->file].path),
        shown(t->name), shape_text(rank, shape), shape_text(t->rank, t->shape));
}

/* A file of a model whose head is its embedding may have it once more as lm_head, if it is the
   same. 1: so it is. */
CKPT_FN int is_tied_head(const StoredList *list, const Weights *w, const SafeTensor *t) {
    const SafeTensor *e = NULL;
    if (!list->model || !list->c->tied || strcmp(t->name, "lm_head.weight")) return 0;
    for (int k = 0; k < w->n && !e; k++) e = safe_find(&w->file[k], "model.embed_tokens.weight");
    return e && e->dtype == t->dtype && e->bytes == t->bytes && !memcmp(e->data, t->data, t->bytes);
}

/* Reads a file, or its shards, that must hold the listed tensors and no others. Nothing is written
   to the device before all names and shapes are known to fit; nothing at all without `load`. */
CKPT_FN int stored_read(
    const StoredList *list, int load, const char *folder, const char *file, Err *err) {
    enum { ROOM = 4 << 20 };
    Weights w;
    if (weights_open(&w, folder, file, err)) return -1;
    Found *found = (Found *)calloc((size_t)list->n + 1, sizeof *found);
    unsigned char *staging = (unsigned char *)malloc(ROOM);
    int rc = found && staging ? 0 : fail(err, "%s: out of memory", shown(w.path));
    for (int i = 0; i < list->n && !rc; i++)
        rc = stored_find(list, &list->part[i], &w, &found[i], err);
    for (int k = 0; k < w.n && !rc; k++) {
        const SafeFile *f = &w.file[k];
        for (int i = 0; i < f->n && !rc; i++) {
            const SafeTensor *t = &f->tensor[i];
            if (!w.used[k][i] && !is_tied_head(list, &w, t))
                rc = fail(err, "%s: tensor %s of shape %s has no place in this model%s",
                    shown(f->path), shown(t->name), shape_text(t->rank, t->shape),
                    list->model && list->c->tied && !strcmp(t->name, "lm_head.weight")
                        ? ", whose head is its embedding: they differ"
                        : "");
        }
    }
    for (int i = 0; i < list->n && load && !rc; i++)
        rc = stored_load(&list->part[i], found[i].tensor, found[i].from, list->backend, staging,
            ROOM, w.file[found[i].file].path, err);
    if (load) list->backend->sync();
    free(found);
    free(staging);
    weights_close(&w);
    return rc;
}

CKPT_FN int model_list(StoredList *list, const Config *c, const TensorTable *t, const Backend *b,
    const void *params, const void *buffers, const Spread *spread, Err *err) {
    *list = (StoredList){.backend = b, .c = c, .model = 1, .spread = spread};
    if (stored_add(list, c, t, 1, "", params, b->param_type, err)) return -1;
    return stored_add(list, c, t, 0, "", buffers, b->stat_type, err);
}

/* Writes FOLDER/model.safetensors: every tensor of the table, parameters and buffers, from the
   arenas on the device. buffers may be NULL when the model has none. */
CKPT_FN int model_write(const char *folder, const Config *c, const TensorTable *t, const Backend *b,
    const void *params, const void *buffers, Err *err) {
    StoredList list;
    int rc = model_list(&list, c, t, b, params, buffers, NULL, err);
    if (!rc) rc = stored_write(&list, folder, "model.safetensors", err);
    free(list.part);
    return rc;
}

/* Reads FOLDER/model.safetensors, or its shards, into the arenas, converting from F32, F64, BF16 or
   F16. A missing, unknown or wrongly shaped tensor is an error, found before anything is
   overwritten. Gaps between tensors are left as they are, and params_changed() is for the caller to
   call. */
CKPT_FN int model_read(const char *folder, const Config *c, const TensorTable *t, const Backend *b,
    void *params, void *buffers, Err *err) {
    StoredList list;
    int rc = model_list(&list, c, t, b, params, buffers, NULL, err);
    if (!rc) rc = stored_read(&list, 1, folder, "model.safetensors", err);
    free(list.part);
    return rc;
}

/* Whether FOLDER/model.safetensors, or its shards, hold exactly this model, before memory is taken
   for it: the sizes in a config.json are only claims. */
CKPT_FN int model_check(
    const char *folder, const Config *c, const TensorTable *t, const Backend *b, Err *err) {
    StoredList list;
    int rc = model_list(
        &list, c, t, b, t, t->buffer_elements ? t : NULL, NULL, err); // addresses that nobody uses
    if (!rc) rc = stored_read(&list, 0, folder, "model.safetensors", err);
    free(list.part);
    return rc;
}

CKPT_FN int optimizer_list(StoredList *list, const Config *c, const TensorTable *t,
    const Backend *b, const void *m, const void *v, const Spread *spread, Err *err) {
    *list = (StoredList){.backend = b, .c = c, .spread = spread};
    if (stored_add(list, c, t, 1, "m.", m, b->grad_type, err)) return -1;
    return stored_add(list, c, t, 1, "v.", v, b->grad_type, err);
}

/* Writes FOLDER/optimizer.safetensors: the moments, as m.NAME and v.NAME. Those an optimiser does
   not have are NULL and are not in the file. */
CKPT_FN int optimizer_write(const char *folder, const Config *c, const TensorTable *t,
    const Backend *b, const void *m, const void *v, Err *err) {
    StoredList list;
    int rc = optimizer_list(&list, c, t, b, m, v, NULL, err);
    if (!rc) rc = stored_write(&list, folder, "optimizer.safetensors", err);
    free(list.part);
    return rc;
}

// Reads them back: the file must have exactly the moments that this optimiser has.
CKPT_FN int optimizer_read(const char *folder, const Config *c, const TensorTable *t,
    const Backend *b, void *m, void *v, Err *err) {
    StoredList list;
    int rc = optimizer_list(&list, c, t, b, m, v, NULL, err);
    if (!rc) rc = stored_read(&list, 1, folder, "optimizer.safetensors", err);
    free(list.part);
    return rc;
}

/* The same for tensors that are spread over ranks, all of which call it. optimiser: a and b are the
   moments m and v, else parameters and buffers. Writing, the ranks that do not write learn nothing
   of its failure: the one that does ends the program. */
CKPT_FN int spread_write(const char *folder, const Config *c, const Backend *b, const Spread *s,
    int optimiser, const void *x, const void *y, Err *err) {
    StoredList list;
    int rc = optimiser ? optimizer_list(&list, c, NULL, b, x, y, s, err)
                       : model_list(&list, c, NULL, b, x, y, s, err);
    if (!rc)
        rc = stored_write(
            &list, folder, optimiser ? "optimizer.safetensors" : "model.safetensors", err);
    free(list.part);
    return rc;
}
CKPT_FN int spread_read(const char *folder, const Config *c, const Backend *b, const Spread *s,
    int optimiser, void *x, void *y, Err *err) {
    StoredList list;
    int rc = optimiser ? optimizer_list(&list, c, NULL, b, x, y, s, err)
                       : model_list(&list, c, NULL, b, x, y, s, err);
    if (!rc)
        rc = stored_read(
            &list, 1, folder, optimiser ? "optimizer.safetensors" : "model.safetensors", err);
    free(list.part);
    return rc;
}

#endif
