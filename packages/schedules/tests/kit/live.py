"""Stages whose activations are counted while they are alive."""

from __future__ import annotations

import torch
from attrs import define, field
from torch.multiprocessing.reductions import StorageWeakRef

from .stages import Function

WIDTH = 8


@define
class Watch:
    """A hook: the most bytes live on one position after any of its actions, of each of two sorts of activation."""

    sizes: list = field(factory=list)
    most: list = field(factory=lambda: [0, 0])

    def note(self, sort, tensor):
        self.sizes.append((sort, tensor.nbytes, StorageWeakRef(tensor.untyped_storage())))

    def before(self, action):
        pass

    def after(self, action):
        self.sizes = [entry for entry in self.sizes if not entry[2].expired()]
        for sort in (0, 1):
            live = sum(size for kind, size, _ in self.sizes if kind == sort)
            self.most[sort] = max(self.most[sort], live)


class Weighty(Function):
    """Makes two activations of 512 bytes: one that only the weight half reads, one that only the input half does."""

    def __init__(self, graph, stage, watch):
        super().__init__(graph, stage, self.compute)
        self.watch, self.weight = watch, torch.eye(WIDTH, dtype=torch.float64).requires_grad_()

    def compute(self, microbatch, x=None):
        if x is None:
            x = torch.full((WIDTH, WIDTH), 0.1 * (microbatch + 1), dtype=torch.float64)
        multiplied = torch.neg(x)
        self.watch.note(0, multiplied)
        bent = (multiplied @ self.weight).tanh()
        self.watch.note(1, bent)
        return bent.neg() if self.outgoing else bent.neg().sum()


def weighty_stages(plan):
    """The stages of a plan, and the watch of each position."""
    watches = [Watch() for _ in plan.positions]
    return [Weighty(plan.graph, s, watches[places[0]]) for s, places in enumerate(plan.placement)], watches
