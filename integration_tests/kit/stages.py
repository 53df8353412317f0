"""Stages of a runtime made of any models, and the same stages one after the other in one process."""

from __future__ import annotations

import torch
from torch import nn

from pipegrid.schedules import Forwarded


class Stage:
    """A stage of ``graph``: ``model`` on the sum of what arrives, or on ``data(microbatch)`` where nothing does.

    ``loss(output)`` is that of a stage that feeds no other; ``before(microbatch)`` is called first in each forward.
    """

    def __init__(self, graph, number, model, *, data=None, loss=None, before=lambda microbatch: None):
        self.number, self.model, self.data, self.loss, self.before = number, model, data, loss, before
        self.out = [edge for edge in graph.stage_edges if edge.source == number]

    def forward(self, microbatch, inputs):
        self.before(microbatch)
        first, *others = inputs.values() if inputs else (self.data(microbatch),)
        y = self.model(sum(others, first))
        return Forwarded(dict.fromkeys(self.out, y)) if self.out else Forwarded({}, self.loss(y))


class Scale(nn.Module):
    """Times one parameter, all of whose elements begin as ``value``."""

    def __init__(self, value=1.0, shape=(), **options):
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, value, **options))

    def forward(self, x):
        return x * self.weight


def in_one_process(stages, microbatches):
    """Every forward and backward of a step, without a pipeline: gradients stay in ``stages``; losses by microbatch."""
    totals = []
    for microbatch in range(microbatches):
        arrived, losses = {}, []
        for stage in stages:
            made = stage.forward(microbatch, {e: arrived[e] for e in arrived if e.destination == stage.number})
            arrived.update(made.outputs)
            losses += [] if made.loss is None else [made.loss]
        sum(losses).backward()
        totals.append(sum(loss.item() for loss in losses))
    return totals
