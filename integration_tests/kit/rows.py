"""Stages for plans of every kind: each row of a stage is over the sum of the rows up to it where slices are rows."""

from __future__ import annotations

import torch

from pipegrid.schedules import Forwarded

from . import stages
from .models import Part

WIDTH, ROWS = 4, 3


class Layer:
    """A stage; the mean square of the last one is the loss. ``losses``: of each row, times the elements of all rows."""

    def __init__(self, plan, number, device):
        self.number, self.device, self.sliced = number, device, plan.num_slices > 1
        self.model = Part(number, WIDTH).to(device)
        self.out = [edge for edge in plan.graph.stage_edges if edge.source == number]
        self.losses = []

    def forward(self, microbatch, inputs, part=None):
        whole = data(microbatch, self.device)
        x = next(iter(inputs.values()), whole if part is None else whole[part.index : part.index + 1])
        if part is not None:
            x = part.extend("rows", x, dim=0).sum(0, keepdim=True)
        elif self.sliced:
            x = x.cumsum(0)
        y = self.model(x)
        if self.out:
            return Forwarded(dict.fromkeys(self.out, y))
        self.losses += y.square().sum(1).tolist()
        return Forwarded({}, y.square().sum() / whole.numel())


def data(microbatch, device):
    rows = torch.linspace(1.0 + microbatch, 2.0 + microbatch, ROWS, dtype=torch.float64)
    return rows[:, None].expand(ROWS, WIDTH).to(device)


def in_one_process(plan, device):
    """The stages after the same step in one process."""
    layers = [Layer(plan, number, device) for number in range(plan.num_stages)]
    stages.in_one_process(layers, plan.num_microbatches)
    return layers
