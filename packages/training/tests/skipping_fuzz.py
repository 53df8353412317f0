"""Models put together at random, whose stages need what others have made: every kind of value that skips stages."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from .training_fuzz import WIDTH, WORDS

KINDS = (
    "block residuals",
    "taps",
    "embedding",
    "weight",
    "norms",
    "scales",
    "positions",
    "sums for a loss",
    "memory",
    "inputs of each layer",
    "u-net",
    "keys",
)


BEHIND_EMBEDDING = ("tower", "shared", "norms", "scales", "table", "encoder", "each")
"""The parts of such models that are on the first stage."""


class Layer(nn.Module):
    """A layer that takes more than hidden states, and may return what a loss needs."""

    def __init__(self, routes, number=0, reads=None):
        super().__init__()
        self.number, self.reads = number, reads
        self.linear, self.routes = nn.Linear(WIDTH, WIDTH), routes
        self.query = nn.Linear(WIDTH, WIDTH)
        if routes:
            self.router = nn.Linear(WIDTH, 3)

    def forward(self, hidden, memory=None, positions=None, kept=None):
        if positions is not None:
            hidden = hidden * positions.cos() + hidden.roll(1, -1) * positions.sin()
        made = hidden + torch.tanh(self.linear(hidden))
        if memory is not None:
            weights = torch.softmax(self.query(made) @ memory.transpose(1, 2), -1)
            made = made + weights @ memory
        if kept is not None and self.reads is not None:
            keys, values = kept[self.reads]
            made = made + torch.softmax(self.query(made) @ keys, -1) @ values
        elif kept is not None:
            keys = self.query(hidden).transpose(1, 2)
            kept[self.number] = keys, keys.tanh().transpose(1, 2)
        return (made, self.router(made)) if self.routes else made


class Handing(nn.Module):
    """The model of a seed, of one to three of `KINDS`."""

    def __init__(self, seed):
        super().__init__()
        choose = random.Random(seed)
        self.kinds = choose.sample(KINDS, choose.choice((1, 1, 2, 3)))
        self.block, self.again = choose.choice((1, 2, 3)), choose.random() < 0.4
        self.writes, self.detached = choose.random() < 0.2, choose.random() < 0.2
        count = choose.randint(3, 8)
        self.words = nn.Embedding(WORDS, WIDTH)
        # The first layers fill two entries, the second of them behind the first; the others read either.
        reads = (
            [None, None, *(choose.randrange(2) for _ in range(count - 2))] if "keys" in self.kinds else [None] * count
        )
        self.blocks = nn.ModuleList(Layer("sums for a loss" in self.kinds, *each) for each in enumerate(reads))
        self.head = nn.Linear(WIDTH, WORDS)
        if "taps" in self.kinds:
            self.tower = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(choose.randint(1, count)))
        if "weight" in self.kinds:
            self.shared = nn.Linear(WIDTH, WIDTH, bias=choose.random() < 0.5)
        if "norms" in self.kinds:
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(count))
        if "scales" in self.kinds:
            self.scales = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(count))
        if "positions" in self.kinds:
            self.table = nn.Embedding(9, WIDTH)
            self.table.weight.requires_grad_(choose.random() < 0.3)
        if "memory" in self.kinds:
            self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        if "inputs of each layer" in self.kinds:
            self.each = nn.Embedding(WORDS, WIDTH * count)

    def forward(self, ids, mask=None):
        hidden = first = self.words(ids)
        if self.detached or self.writes:  # by its own code, before the first layer
            hidden = first = first * 1.5 if self.detached else first.mul(1.5).add_(0.1)
        has, count = self.kinds.__contains__, len(self.blocks)
        memory = positions = each = None
        taps, ends, down, routers = [], [], [], []
        kept = {} if has("keys") else None
        if has("memory"):
            memory = self.encoder(self.words(ids.flip(1)))
        if has("positions"):
            positions = self.table(torch.arange(ids.shape[1]))
        if has("inputs of each layer"):
            each = self.each(ids).view(*ids.shape, count, WIDTH)
        if has("taps"):
            seen = first if mask is None else first * mask[..., None].to(first.dtype)
            for part in self.tower:
                seen = torch.tanh(part(seen))
                taps.append(seen)
        for number, block in enumerate(self.blocks):
            if each is not None:
                hidden = hidden + each[:, :, number]
            if has("u-net") and number >= (count + 1) // 2 and down:
                hidden = hidden + down.pop()
            result = block(hidden, memory, positions, kept)
            if isinstance(result, tuple):
                result, routed = result
                routers.append(routed)
            hidden = result
            if has("weight"):
                hidden = hidden + F.linear(hidden, self.shared.weight).sin()
            if has("norms"):
                hidden = self.norms[number](hidden)
            if has("scales"):
                hidden = hidden * self.scales[number]
            if number < len(taps):
                hidden = hidden + taps[number]
            if has("embedding"):
                hidden = hidden + 0.1 * (first.detach() if self.detached else first)
            if has("u-net") and number < count // 2:
                down.append(hidden)
            if has("block residuals"):
                if ends:
                    hidden = hidden + 0.3 * torch.stack(ends).mean(0)
                if number % self.block == self.block - 1:
                    ends.append(hidden)
            if self.writes:
                hidden = hidden * 1.0
                hidden += 0.1
        logits = F.linear(hidden, self.words.weight) if self.again else self.head(hidden)
        if routers:
            logits = logits + torch.stack([one.softmax(-1).square().mean() for one in routers]).sum()
        return logits


def random_handing(seed, stages=None):
    """A function that makes a model, its layout (of ``stages`` with layers, or 2 to 5), and what was chosen."""
    with torch.random.fork_rng():
        model = Handing(seed)
    choose, count = random.Random(-seed), len(model.blocks)
    if stages is None:
        ends = choose.choices(range(count + 1), k=choose.randint(1, min(4, count)))
    else:  # each with a layer
        ends = choose.sample(range(1, count), stages - 1)
    bounds = [0, *sorted(ends), count]
    layout = "E" + "|".join("t" * (after - before) for before, after in pairwise(bounds)) + "L"
    return lambda: Handing(seed), layout, (model.kinds, model.again, model.writes)


def random_handing_on_two_ranks(seed):
    """The same of two or four stages."""
    with torch.random.fork_rng():
        count = len(Handing(seed).blocks)
    return random_handing(seed, 2 if seed % 4 == 0 or count < 4 else 4)
