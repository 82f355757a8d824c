#!/usr/bin/env python3
"""Tiny random models, as transformers makes, saves and computes them: what test_golden.c is held to.

    python data/golden/make_golden.py        (torch, transformers; rewrites the folders beside it)

A folder a model: config.json and weights as save_pretrained writes them, and what the model makes of
them in float32:
    expected/golden.safetensors   input_ids (B,T), logits (B,T,V), loss (1): mean cross entropy of the
                                  next tokens, without the router's losses
    expected/model*.safetensors   the gradient of that loss by every parameter, under its name
The five are saved in five ways: one file; shards; experts fused; bfloat16; float16. Python is needed
to make these files and never to test with them.
"""

import copy
import pathlib
import shutil

import torch
import transformers
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
B, T, V = 2, 70, 64
common = dict(vocab_size=V, max_position_embeddings=96, pad_token_id=None, bos_token_id=None,
              eos_token_id=None, attn_implementation="eager")
MODELS = {
    # square experts (their width is the model's), raw weights, norms over all heads
    "olmoe": (dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, num_experts=6, num_experts_per_tok=3), {}, torch.float32),
    # heads wider than hidden_size / heads; in shards
    "mixtral": (dict(hidden_size=20, intermediate_size=12, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=5,
                     num_experts_per_tok=2), dict(max_shard_size="20KB"), torch.float32),
    # a dense first layer, one head of keys, tied head; experts fused, as they are in memory
    "qwen3_moe": (dict(hidden_size=20, intermediate_size=28, moe_intermediate_size=12,
                       num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, head_dim=8,
                       num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[0],
                       tie_word_embeddings=True), dict(save_original_format=False), torch.float32),
    "qwen3": (dict(hidden_size=20, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=8, tie_word_embeddings=True), {}, torch.float16),
    "llama": (dict(hidden_size=24, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=8), {}, torch.bfloat16),
}


def lively(model, generator):
    """Weights of which every one matters, unlike start values of 0.02."""
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() == 1:
            p.data = 1 + 0.3 * noise
        else:
            p.data = noise / p.shape[-1] ** 0.5


def closest_choice(model, ids, top_k):
    """The least distance, over all tokens, between the last expert chosen and the next one."""
    with torch.no_grad():
        logits = model(ids, output_router_logits=True).router_logits
    best = [torch.topk(x.softmax(-1), top_k + 1, dim=-1).values for x in logits]
    return min(float((b[:, top_k - 1] - b[:, top_k]).min()) for b in best)


def make(name, shape, how, dtype):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(name, **common, **shape), dtype=torch.float32)
    for seed in range(1000):  # no choice of experts that rounding could change
        generator = torch.Generator().manual_seed(seed)
        lively(model, generator)
        for p in model.parameters():  # values that the file's type holds
            p.data = p.data.to(dtype).to(torch.float32)
        ids = torch.randint(V, (B, T), generator=generator)
        if "num_experts_per_tok" not in shape:
            break
        if closest_choice(model, ids, shape["num_experts_per_tok"]) > 3e-4:
            break
    else:
        raise SystemExit(f"{name}: no seed keeps the experts apart")
    out = model(ids, labels=ids)
    out.loss.backward()
    gradients = copy.deepcopy(model)
    for p, g in zip(gradients.parameters(), model.parameters()):
        p.data = g.grad
    gradients.save_pretrained(folder / "expected")
    for extra in ("config.json", "generation_config.json"):
        (folder / "expected" / extra).unlink(missing_ok=True)
    save_file({"input_ids": ids.float(), "logits": out.logits.detach().contiguous(),
               "loss": out.loss.detach().reshape(1)}, folder / "expected" / "golden.safetensors")
    model.to(dtype).save_pretrained(folder, **how)
    (folder / "generation_config.json").unlink(missing_ok=True)
    print(f"{name}: seed {seed}, loss {out.loss.item():.6f}, "
          f"{sum(p.numel() for p in model.parameters())} parameters")


for name, (shape, how, dtype) in MODELS.items():
    make(name, shape, how, dtype)
print(f"made with torch {torch.__version__}, transformers {transformers.__version__}")
