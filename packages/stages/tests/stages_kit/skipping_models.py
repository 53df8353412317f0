"""Models whose layers use what came long before: residuals of blocks, a U-Net, predictions of several tokens."""

from __future__ import annotations

import torch
from torch import nn

from pipegrid.stages import Names

BLOCKS = Names("layers", embedding=("embed",), head=("head",))
EXPERTS = Names("layers", embedding=("embed",), head=("head",))
SEVERAL = Names({"decoder": "layers", "mtp": "mtp"}, embedding=("embed",), head=("norm", "head"))
UNET = Names("blocks", embedding=("stem",), head=("head",))


class Reading(nn.Module):
    """A layer that reads the ends of all blocks before it."""

    def __init__(self, width):
        super().__init__()
        self.query, self.linear = nn.Parameter(torch.linspace(-1, 1, width)), nn.Linear(width, width)

    def forward(self, hidden, ends):
        states = torch.stack([*ends, hidden])
        return torch.tanh(self.linear((states * (states @ self.query).softmax(0).unsqueeze(-1)).sum(0)))


class BlockResiduals(nn.Module):
    """Layers in blocks, each of which reads the ends of all blocks before, and the embedding."""

    def __init__(self, layers=8, width=6, block=3, embedding=True):
        super().__init__()
        self.block, self.embedding = block, embedding
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Reading(width) for _ in range(layers))
        self.head = nn.Linear(width, 20)

    def forward(self, ids):
        hidden = self.embed(ids)
        ends = [hidden] if self.embedding else []
        for number, layer in enumerate(self.layers, start=1):
            hidden = layer(hidden, ends)
            if number % self.block == 0:
                ends.append(hidden)
        return self.head(hidden)


class Convolution(nn.Module):
    """A layer of a U-Net, which may take what one of the same size made on the way down."""

    def __init__(self, width, inputs=1):
        super().__init__()
        self.conv = nn.Conv1d(width * inputs, width, 3, padding=1)

    def forward(self, *inputs):
        return torch.tanh(self.conv(torch.cat(inputs, 1)))


class UNet(nn.Module):
    """Three layers down, one at the bottom, three up; the first may be left out."""

    kept = True

    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Conv1d(2, width, 1)
        self.blocks = nn.ModuleList(Convolution(width, 2 if number > 3 else 1) for number in range(7))
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, image):
        hidden, down = self.stem(image), []
        for number, block in enumerate(self.blocks[:3]):
            hidden = block(hidden) if number or self.kept else hidden
            down.append(hidden)
            hidden = nn.functional.avg_pool1d(hidden, 2)
        hidden = self.blocks[3](hidden)
        for block in self.blocks[4:]:
            hidden = block(nn.functional.interpolate(hidden, scale_factor=2), down.pop())
        return self.head(hidden)


class Block(nn.Module):
    """A layer, or one that predicts a token further on: it takes the hidden states and the word that they predict."""

    def __init__(self, width, embed=None):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.embed = embed

    def forward(self, hidden, word=None):
        if word is not None:
            hidden = hidden + (word if self.embed is None else self.embed(word))
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class SeveralTokens(nn.Module):
    """Predicts the next token, and by each of two more layers one further on, through one embedding and one head.

    ``tied``: these layers have the embedding under names of their own; else the model calls it again. Returns logits
    [3, rows, tokens, words].
    """

    def __init__(self, layers=4, width=6, *, tied=False):
        super().__init__()
        self.tied, self.embed = tied, nn.Embedding(20, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.mtp = nn.ModuleList(Block(width, self.embed if tied else None) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 20, bias=False)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = [self.head(self.norm(hidden))]
        for further, layer in enumerate(self.mtp, start=1):
            word = nn.functional.pad(ids[:, further:], (0, further))
            hidden = layer(hidden, word if self.tied else self.embed(word))
            logits.append(self.head(self.norm(hidden)))  # also where the head is on a later stage than these layers
        return torch.stack(logits)


class Routed(nn.Module):
    """A layer of two experts, which its router weighs; ``gate`` returns weights and logits."""

    class Gate(nn.Module):
        """The router."""

        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(width, 2)

        def forward(self, hidden):
            logits = self.linear(hidden)
            return logits.softmax(-1), logits

    def __init__(self, width):
        super().__init__()
        self.gate, self.experts = self.Gate(width), nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, hidden):
        weights, _ = self.gate(hidden)
        made = torch.stack([expert(hidden) for expert in self.experts], -1)
        return hidden + torch.tanh((made * weights.unsqueeze(-2)).sum(-1))


class Experts(nn.Module):
    """Layers of experts; hooks, which the first forward installs, take the logits of all routers for a loss."""

    def __init__(self, layers=4, width=6):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, width), nn.Linear(width, 20)
        self.layers = nn.ModuleList(Routed(width) for _ in range(layers))
        self.hooked, self.taken = False, None

    def _take(self, gate, args, result):
        if self.taken is not None:
            self.taken.append(result[1])

    def forward(self, ids, balanced=True):
        """The logits of words; ``balanced``: and the loss of the routers."""
        if not self.hooked:
            self.hooked = True
            for module in self.modules():
                if isinstance(module, Routed.Gate):
                    module.register_forward_hook(self._take)
        self.taken = [] if balanced else None
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        if not balanced:
            return logits
        shares = torch.cat([one.softmax(-1).flatten(0, -2) for one in self.taken]).mean(0)
        self.taken = None
        return logits, shares.square().sum()


def ids():
    return (torch.arange(10).reshape(2, 5),)


def images():
    return (torch.linspace(-1, 1, 64).reshape(2, 2, 16),)


class Beside(nn.Module):
    """Norms and scales in lists beside the layers, which the model's own code takes from there."""

    def __init__(self, num_layers=8, width=6):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_layers))
        self.scales = nn.ParameterList(torch.linspace(0.5, 1.5, width) + number for number in range(num_layers))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.head = nn.Linear(width, 20)

    def forward(self, ids):
        hidden = self.embed(ids)
        assert len(self.scales) == len(self.layers)
        for layer, norm, scale in zip(self.layers, self.norms, self.scales, strict=True):
            hidden = torch.tanh(norm(layer(hidden)) * scale)
        return self.head(hidden * self.scales[-1])


BESIDE = Names("layers", embedding=("embed", "norms", "scales"))


class Connected(nn.Module):
    """A layer of hyper-connections: it reads a mix of the streams, and adds what it makes to a mix of them."""

    def __init__(self, number, streams, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.reads = nn.Parameter(torch.eye(streams)[number % streams] + 0.1)
        self.mixes = nn.Parameter(torch.eye(streams) + 0.05)
        self.writes = nn.Parameter(torch.ones(streams))

    def forward(self, streams):
        read = sum(weight * stream for weight, stream in zip(self.reads, streams, strict=True))
        made = torch.tanh(self.linear(read))
        mixed = [sum(weight * one for weight, one in zip(row, streams, strict=True)) for row in self.mixes]
        return tuple(stream + weight * made for stream, weight in zip(mixed, self.writes, strict=True))


class HyperConnections(nn.Module):
    """Several residual streams between all layers: one hop of several tensors.

    Source: Zhu et al. 2024, "Hyper-Connections", arXiv 2409.19606, section 2.
    """

    def __init__(self, num_layers=8, streams=4, width=6):
        super().__init__()
        self.streams = streams
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Connected(number, streams, width) for number in range(num_layers))
        self.head = nn.Linear(width, 20)

    def forward(self, ids):
        streams = (self.embed(ids),) * self.streams
        for layer in self.layers:
            streams = layer(streams)
        return self.head(sum(streams))


HYPER = Names("layers")
