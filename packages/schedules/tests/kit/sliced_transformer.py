"""A small causal transformer in float64, cut into stages that run slices, and its gradients in one process."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipegrid.core.edge import Edge
from pipegrid.schedules.runtime import Forwarded

from .models import Model

VOCABULARY, WIDTH, HEADS = 11, 8, 2
TOKENS = 9
LENGTHS = {1: (9,), 2: (5, 4), 3: (1, 5, 3), 4: (3, 2, 3, 1)}
"""The lengths of so many slices."""


class Attention(nn.Module):
    """Causal attention; ``update(keys, values, layer)`` returns the keys and values up to here, as a slice's does."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.current_slice = layer, None
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, update):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if update is None and self.current_slice is not None:
            update = self.current_slice.update
        if update is not None:
            k, v = update(k, v, self.layer)
        past = k.shape[-2] - tokens
        mask = torch.ones(tokens, k.shape[-2], dtype=torch.bool).tril(past)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))


class Block(nn.Module):
    """Attention and an MLP, each with its norm and its residual."""

    def __init__(self, layer):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(layer)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, update):
        x = x + self.attention(self.norms[0](x), update)
        return x + self.mlp(self.norms[1](x))


class Part(Model):
    """The layers of one stage, with the embedding on the first and the head on the last."""

    def __init__(self, stage, num_stages, config=None, *, layers_per_stage=1):
        super().__init__(config)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else None
        layers = range(stage * layers_per_stage, (stage + 1) * layers_per_stage)
        self.blocks = nn.ModuleList(Block(layer) for layer in layers)
        self.head = nn.Linear(WIDTH, VOCABULARY) if stage == num_stages - 1 else None

    def forward(self, x, update=None, *, run=lambda block, x, update: block(x, update)):
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = run(block, x, update)
        return x if self.head is None else self.head(x)


def parts(num_stages, seed=0, **options):
    """The stages, the same on every rank that asks for them."""
    torch.manual_seed(seed)
    return [Part(stage, num_stages, **options).double() for stage in range(num_stages)]


def batches(num_microbatches, tokens, seed=1, samples=2):
    """Per microbatch its tokens, the targets behind them, and the weight of each token in the loss."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(VOCABULARY, (samples, tokens), generator=generator),
            torch.randint(VOCABULARY, (samples, tokens), generator=generator),
            torch.randint(2, (samples, tokens), generator=generator).double(),
        )
        for _ in range(num_microbatches)
    ]


def loss_of(logits, targets, weights):
    """The sum over tokens of their weighted cross entropy."""
    each = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * weights.flatten()).sum()


def again(block, x, update):
    """Run a block as a checkpoint."""
    return checkpoint(block, x, update, use_reentrant=False)


def in_one_process(models, data, *, means=False):
    """Gradients of the mean over all weighted tokens, whole sequences one after the other; and that mean.

    ``means``: the mean over microbatches, each with the mean over its own tokens.
    """
    counts = [weights.sum() for *_, weights in data]
    total = 0.0
    for (x, targets, weights), count in zip(data, counts, strict=True):
        for model in models:
            x = model(x)
        loss = loss_of(x, targets, weights) / (len(data) * count if means else sum(counts))
        loss.backward()
        total += loss.item()
    return total


class SlicedStage:
    """A stage of the runtime over a `Part`; ``data``: what `batches` returns."""

    def __init__(self, plan, number, model, data, **options):
        self.model, self.data, self.options = model, data, options
        self.outgoing = [Edge(number, number + 1)] if number + 1 < plan.num_stages else []
        self.lengths = LENGTHS[plan.num_slices]
        self.count = sum(weights.sum() for *_, weights in data)
        self.losses = []

    def forward(self, microbatch, inputs, part):
        tokens, targets, weights = (each.split(self.lengths, 1)[part.index] for each in self.data[microbatch])
        x = next(iter(inputs.values())) if inputs else tokens
        y = self.model(x, part.update, **self.options)
        if self.outgoing:
            return Forwarded(dict.fromkeys(self.outgoing, y))
        loss = loss_of(y, targets, weights) / self.count
        self.losses.append(loss.item())
        return Forwarded({}, loss)


def sliced_stages(plan, models=None, **options):
    """A stage for each of ``models``, by default `parts`; ``options`` are those of a call of `Part`."""
    data = batches(plan.num_microbatches, TOKENS)
    each = enumerate(parts(plan.num_stages) if models is None else models)
    return [SlicedStage(plan, number, model, data, **options) for number, model in each]
