#!/usr/bin/env python3
"""Checkpoints of train_moe in transformers: what it saves is what they load, and they say the same.

    python data/golden/check_hf.py        (from the root, after make; torch, transformers)

Trains a small model of every architecture on README.md, one of them with merges, and loads it with AutoModelForCausalLM and
AutoTokenizer. What must hold: no missing or unexpected key, no warning; the same logits to 1e-5
(relative Frobenius) for 48 ids; the same ids of README.md; the same greedy continuation for 32 tokens. Last, folders that
transformers saves again in four ways are read back by train_moe with the same logits.
"""

import logging
import pathlib
import subprocess
import sys
import tempfile
import warnings

import torch
import transformers
from safetensors.torch import load_file

SHAPE = ("--layers 3 --d-model 32 --heads 4 --kv-heads 2 --experts 6 --topk 2 --d-expert 24 --seq 64 "
         "--batch 16 --steps 1000 --warmup 20 --lr 1e-2 --eval-every 0 --sample-every 0 --threads 1").split()
MODELS = {
    "olmoe": "--arch olmoe",
    "mixtral": "--arch mixtral --head-dim 12",
    "qwen3_moe": "--arch qwen3_moe --head-dim 12 --dense-layers 1",
    "qwen3_moe tied": "--arch qwen3_moe --tied 1 --norm-topk 0",
    "qwen3": "--experts 1 --topk 1 --head-dim 12",
    "llama": "--experts 1 --topk 1 --qk-norm none --tied 1",
    "qwen3_moe merges": "--vocab {vocab}",  # byte-level BPE, learned on the same text
}
heard = []  # every warning, of Python or of a logger


class Ear(logging.Handler):
    def emit(self, record):
        heard.append(record.getMessage())


def program(*words):
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode or b"warning:" in done.stderr:
        raise SystemExit(f"{' '.join(map(str, words))}: status {done.returncode}: {done.stderr.decode()}")
    return done.stdout


def load(folder):
    # the lists are kept here by every version, the table of one that differs only by some
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    for what, keys in info.items():
        if keys:
            raise SystemExit(f"{folder}: {what}: {keys}")
    return model.eval()


def distance(folder, file, model):
    program("./test_golden", "logits", folder, file)
    ours = load_file(file)
    with torch.no_grad():
        theirs = model(ours["input_ids"].long()).logits.double()
    return float((ours["logits"].double() - theirs).norm() / theirs.norm())


def check(name, flags, work):
    type_of = name.split()[0]
    out = work / name.replace(" ", "_")
    vocab = out.with_suffix(".json")
    if "{vocab}" in flags:
        program("./train_moe", "tokenize", "--train-vocab", "500", "--input", "README.md", "--out", vocab)
    program("./train_moe", "--input", "README.md", *SHAPE, *flags.format(vocab=vocab).split(), "--out", out)
    folder = out / "latest"
    heard.clear()
    model = load(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if model.config.model_type != type_of:
        raise SystemExit(f"{name}: transformers took it for {model.config.model_type}")
    error = distance(folder, out / "logits.safetensors", model)
    prompt = "The same seed"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    text = pathlib.Path("README.md").read_text(encoding="utf-8")
    program("./train_moe", "tokenize", "--vocab", folder / "tokenizer.json", "--input", "README.md",
            "--out", out / "shard")
    shard = (out / "shard" / "tokens_000000.bin").read_bytes()[1024:]
    start = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if start + tokenizer(text).input_ids != list(memoryview(shard).cast("H")):
        raise SystemExit(f"{name}: other token ids")
    if model.config.eos_token_id != tokenizer.eos_token_id:
        raise SystemExit(f"{name}: the model ends with {model.config.eos_token_id}")
    with torch.no_grad():
        theirs = model.generate(ids, do_sample=False, max_new_tokens=32, min_new_tokens=32)
    theirs = tokenizer.decode(theirs[0]).encode()
    ours = program("./train_moe", "generate", "--model", folder, "--prompt", prompt, "--tokens",
                   "32", "--temperature", "0")
    same = theirs in ours and len(set(theirs[len(prompt):])) > 6  # not 32 times the same
    if heard:
        raise SystemExit(f"{name}: warnings: {heard}")
    print(f"{name}: no key missing or unexpected, no warning; logits {error:.1e}; "
          f"greedy continuation {'the same' if same else 'DIFFERS'}: {theirs[len(prompt):]!r}")
    if not same or not error <= 1e-5:
        raise SystemExit(f"{name}: {ours!r}")
    # and back: as transformers saves it
    again = []
    for way, kind in (({}, torch.float32), ({"max_shard_size": "40KB"}, torch.float32),
                      ({"save_original_format": False}, torch.float32), ({}, torch.bfloat16),
                      ({}, torch.float16)):
        other = out / f"again{len(again)}"
        model.to(kind).save_pretrained(other, **way)
        rounded = load(other)
        again.append(f"{distance(other, out / 'again.safetensors', rounded):.1e}")
        model = load(folder)
        if not float(again[-1]) <= 1e-5:
            raise SystemExit(f"{name}: saved again with {way} as {kind}: {again[-1]}")
    print(f"{name}: saved again and read back: {', '.join(again)}")


def main():
    logging.getLogger().addHandler(Ear(logging.WARNING))
    transformers.logging.set_verbosity_warning()
    transformers.logging.disable_progress_bar()
    transformers.logging.add_handler(Ear(logging.WARNING))
    warnings.showwarning = lambda message, *_, **__: heard.append(str(message))
    warnings.simplefilter("always")
    with tempfile.TemporaryDirectory() as work:
        for name, flags in MODELS.items():
            check(name, flags, pathlib.Path(work))
    print(f"checked with torch {torch.__version__}, transformers {transformers.__version__}, "
          f"Python {sys.version.split()[0]}")


main()
