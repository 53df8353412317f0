"""Models whose layers tell each other something through Python, put together at random.

The source of a model is run anew for each one, as in a process of its own: its classes and globals are shared with no
other model. So the stages of a cut have, in one process, what they have on ranks.
"""

from __future__ import annotations

import random
from itertools import pairwise

WORDS, WIDTH, ROWS, TOKENS = 11, 6, 2, 4
KINDS = (
    *("none", "own counter", "buffer", "scheduled", "read and used", "count at the start"),
    *("context", "list", "class counter", "global counter", "function counter", "iterator", "generator function"),
    *("generator", "seeded", "random", "own random", "kept number", "kept flag", "threshold", "cached", "next forward"),
    *("size", "modules", "gradient scale", "nested", "default argument"),
)

SOURCE = '''
import itertools, random
from types import SimpleNamespace
import torch
from torch import nn
from torch.nn import functional as F

DONE, TABLE, STATE = 0, [], SimpleNamespace(kept=None, depth=0)

def counted():
    counted.calls += 1
    return counted.calls
counted.calls = 0

def remembered(seen=[]):
    seen.append(1)
    return len(seen)

def numbers():
    number = 1.0
    while True:
        yield number
        number += 0.5

STREAM = numbers()

class Scaled(torch.autograd.Function):
    """Scales the gradient alone."""
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None

class Block(nn.Module):
    made, depth, steps, kept = 0, 0, itertools.count(1), {}
    def __init__(self, kind, writes, reads):
        super().__init__()
        self.kind, self.writes, self.reads = kind, writes, reads
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls, self.number = 0, Block.made
        Block.made += 1
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, h, ctx):
        global DONE
        kind, w, r = self.kind, self.writes, self.reads
        scale = 1.0
        if kind == "own counter":
            self.calls += 1
            scale = 1 / (self.calls + self.number)
        elif kind == "buffer":
            self.seen += 1
            scale = 1 / (1 + self.seen)
        elif kind == "read and used":
            scale = 1 / (1 + h.detach().abs().mean().item())
        elif kind == "count at the start":
            scale = 1 / ctx.count
        elif kind == "context":
            if w: ctx.depth += 1
            if r: scale = 1 / (1 + ctx.depth)
        elif kind == "list":
            if w: TABLE.append(1)
            if r: scale = 1 / (1 + len(TABLE))
        elif kind == "class counter":
            if w: Block.depth += 1
            if r: scale = 1 / (1 + Block.depth)
        elif kind == "global counter":
            if w: DONE += 1
            if r: scale = 1 / (1 + DONE)
        elif kind == "function counter":
            if w: counted()
            if r: scale = 1 / (1 + counted.calls)
        elif kind == "default argument":
            if w or r: scale = 1 / remembered()
        elif kind == "iterator":
            if w or r: scale = 1 / next(self.steps)
        elif kind == "generator function":
            if w or r: scale = 1 / next(STREAM)
        elif kind == "generator":
            if w or r: h = h + torch.randn(h.shape, generator=ctx.generator, dtype=h.dtype)
        elif kind == "seeded":
            if w or r: h = h + torch.randn(h.shape, dtype=h.dtype)
        elif kind == "own random":
            if w or r: scale = ctx.random.random()
        elif kind == "kept number":
            if w: self.kept["norm"] = 1 + h.detach().abs().mean().item()
            if r: scale = 1 / self.kept.get("norm", 1.0)
        elif kind == "kept flag":
            if w: STATE.kept = bool((h.detach() > -100).all())
            if r: scale = 0.5 if STATE.kept else 1.0
        elif kind == "threshold":
            if w: STATE.kept = h.detach().abs().max().item()
            if r: scale = 0.5 if STATE.kept is not None and STATE.kept < 50 else 1.0
        elif kind == "cached":
            if "table" not in ctx.model.cache:
                ctx.model.cache["table"] = torch.arange(1, WIDTH + 1, dtype=h.dtype) / WIDTH
            h = h * ctx.model.cache["table"]
        elif kind == "next forward":
            if r: scale = 1 / (1 + STATE.depth)
            if w: STATE.depth += 1
        elif kind == "gradient scale":
            if w: ctx.depth += 1
            if r: h = Scaled.apply(h, 1 / (1 + ctx.depth))
        elif kind == "nested":
            if w: ctx.inner["depth"].append(ctx.inner["depth"][-1] + 1)
            if r: scale = 1 / ctx.inner["depth"][-1]
        return h + scale * torch.tanh(self.linear(h))

class Model(nn.Module):
    def __init__(self, kinds, writes, reads):
        super().__init__()
        self.kinds, self.cache, self.calls = kinds, {}, 0
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(*each) for each in zip(kinds, writes, reads))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        self.calls += 1
        if "seeded" in self.kinds:
            torch.manual_seed(7)
        ctx = SimpleNamespace(depth=0, model=self, count=ids.shape[1], inner={"depth": [1]}, random=random.Random(3))
        ctx.generator = torch.Generator().manual_seed(5)
        h = self.embed(ids)
        for block in self.blocks:
            if "random" in self.kinds and random.random() < 0.3:
                continue
            h = block(h, ctx)
        if "scheduled" in self.kinds:
            h = h * min(1.0, self.calls / 10)
        if "size" in self.kinds:
            h = h * (100 / sum(p.numel() for p in self.parameters()))
        if "modules" in self.kinds:
            h = h / sum(isinstance(m, nn.Linear) for m in self.modules())
        return self.head(h)
'''


def random_case(seed):
    """A function that makes the model of a seed, as in a new process; its layout; its kinds."""
    choose = random.Random(seed)
    count = choose.randint(2, 4)
    kind = choose.choice(KINDS)
    kinds = [kind if choose.random() < 0.8 else "none" for _ in range(count)]
    writes = [choose.random() < 0.6 for _ in range(count)]
    reads = [choose.random() < 0.6 for _ in range(count)]

    def make():
        namespace = {"__name__": "host_model", "WORDS": WORDS, "WIDTH": WIDTH}
        exec(SOURCE, namespace)
        return namespace["Model"](kinds, writes, reads).double()

    ends = sorted(choose.sample(range(count + 1), choose.randint(1, 2)))
    parts = ["t" * (after - before) for before, after in pairwise([0, *ends, count])]
    return make, "E" + "|".join(parts) + "L", (kinds, writes, reads)
