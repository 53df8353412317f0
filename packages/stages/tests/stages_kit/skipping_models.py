"""Models whose layers use what came long before: residuals of blocks, a U-Net."""

from __future__ import annotations

import torch
from torch import nn

from pipegrid.stages import Names

BLOCKS = Names("layers", embedding=("embed",), head=("head",))
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
    """Layers in blocks of three."""

    def __init__(self, layers=8, width=6):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Reading(width) for _ in range(layers))
        self.head = nn.Linear(width, 20)

    def forward(self, ids):
        hidden = self.embed(ids)
        ends = [hidden]
        for number, layer in enumerate(self.layers, start=1):
            hidden = layer(hidden, ends)
            if number % 3 == 0:
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
    """Three layers down, one at the bottom, three up."""

    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Conv1d(2, width, 1)
        self.blocks = nn.ModuleList(Convolution(width, 2 if number > 3 else 1) for number in range(7))
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, image):
        hidden, down = self.stem(image), []
        for block in self.blocks[:3]:
            hidden = block(hidden)
            down.append(hidden)
            hidden = nn.functional.avg_pool1d(hidden, 2)
        hidden = self.blocks[3](hidden)
        for block in self.blocks[4:]:
            hidden = block(nn.functional.interpolate(hidden, scale_factor=2), down.pop())
        return self.head(hidden)


def ids():
    return (torch.arange(10).reshape(2, 5),)


def images():
    return (torch.linspace(-1, 1, 64).reshape(2, 2, 16),)
