#!/usr/bin/env python3
"""The model of `--preset small` in PyTorch: what data/peer.sh measures this program against.

    data/torch_moe.py --experts 8 --topk 2 --d-expert 512 [--variant sorted|loop|grouped] [--compile]

Whole training steps on the CPU in fp32: forward, backward, clipped gradient norm, AdamW (foreach). Attention is
scaled_dot_product_attention. The experts are computed in one of three ways:
  sorted   slots sorted by expert once, a product for each contiguous slice, one index_add: the best plain PyTorch
  loop     an index and an index_add for every expert, as transformers does without a fused kernel
  grouped  slots sorted, torch.nn.functional.grouped_mm
Prints JSON: tokens/s (median of the last two thirds of the steps), the loss of the last step, version, threads.
"""
import argparse
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

flags = argparse.ArgumentParser()
for name, value in dict(layers=6, d_model=384, heads=6, experts=8, topk=2, d_expert=512, vocab=256, batch=16, seq=256,
                        steps=9, threads=2).items():
    flags.add_argument("--" + name.replace("_", "-"), type=int, default=value)
flags.add_argument("--variant", choices=["sorted", "loop", "grouped"], default="sorted")
flags.add_argument("--compile", action="store_true")
c = flags.parse_args()
hd = c.d_model // c.heads
torch.set_num_threads(c.threads)
torch.manual_seed(1)


def rotate(x, cos, sin):
    a, b = x[..., : hd // 2], x[..., hd // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(c.d_model, 3 * c.d_model, bias=False)
        self.out = nn.Linear(c.d_model, c.d_model, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(hd, eps=1e-6), nn.RMSNorm(hd, eps=1e-6)

    def forward(self, x, cos, sin):
        q, k, v = (y.view(c.batch, c.seq, c.heads, hd).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(c.d_model, c.experts, bias=False)
        self.up = nn.Parameter(torch.empty(c.experts, 2 * c.d_expert, c.d_model))
        self.down = nn.Parameter(torch.empty(c.experts, c.d_model, c.d_expert))

    def forward(self, x):
        scores = self.router(x)
        p = scores.softmax(-1)
        weight, expert = p.topk(c.topk, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        flat = expert.flatten()
        # unbound once: an index into a stacked weight would give a gradient of its full size for each expert
        up, down = self.up.unbind(), self.down.unbind()

        def mlp(e, rows):
            gate, value = (rows @ up[e].T).chunk(2, -1)
            return (F.silu(gate) * value) @ down[e].T

        counts = torch.bincount(flat, minlength=c.experts)
        if c.variant == "loop":
            y = torch.zeros_like(x)
            for e in range(c.experts):
                row, k = torch.where(expert == e)
                y = y.index_add(0, row, mlp(e, x[row]) * weight[row, k, None])
        else:
            order = flat.argsort(stable=True)
            row = order // c.topk
            if c.variant == "sorted":
                parts = x[row].split(counts.tolist())
                out = torch.cat([mlp(e, part) for e, part in enumerate(parts)])
            else:
                ends = counts.cumsum(0).int()
                gate, value = F.grouped_mm(x[row], self.up.transpose(1, 2), offs=ends).chunk(2, -1)
                out = F.grouped_mm(F.silu(gate) * value, self.down.transpose(1, 2), offs=ends)
            y = torch.zeros_like(x).index_add(0, row, out * weight.flatten()[order, None])
        # the balance loss and the z-loss, as the other side computes them
        share = counts / flat.numel()
        aux = c.experts * (share * p.mean(0)).sum()
        z = scores.logsumexp(-1).square().mean()
        return y, 0.01 * aux + 1e-4 * z


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab, c.d_model)
        self.norm = nn.ModuleList(nn.RMSNorm(c.d_model, eps=1e-6) for _ in range(2 * c.layers + 1))
        self.attention = nn.ModuleList(Attention() for _ in range(c.layers))
        self.experts = nn.ModuleList(Experts() for _ in range(c.layers))
        self.head = nn.Linear(c.d_model, c.vocab, bias=False)
        angle = torch.outer(torch.arange(c.seq), 10000 ** (-torch.arange(0, hd, 2) / hd))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens, targets):
        x, extra = self.embedding(tokens), 0.0
        for i in range(c.layers):
            x = x + self.attention[i](self.norm[2 * i](x), self.cos, self.sin)
            y, more = self.experts[i](self.norm[2 * i + 1](x).flatten(0, 1))
            x, extra = x + y.view_as(x), extra + more
        logits = self.head(self.norm[-1](x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + extra / c.layers


model = Model()
for p in model.parameters():
    if p.dim() > 1:
        nn.init.normal_(p, std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
step = torch.compile(model) if c.compile else model
rates = []
for _ in range(c.steps):
    tokens = torch.randint(c.vocab, (c.batch, c.seq + 1))
    begin = time.perf_counter()
    loss = step(tokens[:, :-1], tokens[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    rates.append(c.batch * c.seq / (time.perf_counter() - begin))
print(json.dumps(dict(tok_per_s=statistics.median(rates[c.steps // 3 :]), loss=loss.item(), torch=torch.__version__,
                      threads=c.threads, variant=c.variant, compile=c.compile)))
