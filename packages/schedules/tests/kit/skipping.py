"""Stages that use what earlier ones have made, past those between; and the same model in one process."""

from __future__ import annotations

import random

import torch
from attrs import define
from torch import nn

from pipegrid.core.edge import Edge
from pipegrid.core.skips import Uses, skips_among, values_by_edge
from pipegrid.plans import with_skips
from pipegrid.schedules.runtime import Forwarded

WIDTH = 3


def random_uses(num_stages, seed, count=3):
    """By value, the stage that makes it and the stages that use it."""
    rng, uses = random.Random(seed), {}
    for value in range(count if num_stages > 2 else 0):
        source = rng.randrange(num_stages - 2)
        behind = range(source + 1, num_stages)
        uses[value] = Uses(source, tuple(sorted(rng.sample(behind, rng.randint(1, len(behind))))))
    return uses


def skipping(plan, uses):
    """``plan`` with the edges of ``uses``, and the values of each edge."""
    values = values_by_edge(uses, plan.placement)
    return with_skips(plan, skips_among(values)), values


def model_of(number):
    """The module of a stage: one layer for hidden states, one for what it makes."""
    torch.manual_seed(number)
    return nn.ModuleDict({"layer": nn.Linear(WIDTH, WIDTH), "made": nn.Linear(WIDTH, WIDTH)}).double()


def batch(microbatch):
    return torch.linspace(-1.0, 1.0 + microbatch, 2 * WIDTH, dtype=torch.float64).reshape(2, WIDTH)


def run_stage(number, model, hidden, used, uses):
    """Hidden states and the values that a stage makes; ``used``: those that it uses."""
    for value in sorted(used):
        hidden = hidden * torch.sigmoid(used[value] * (1 + value))
    hidden = torch.tanh(model["layer"](hidden))
    return hidden, {value: model["made"](hidden) * (1 + value) for value, one in uses.items() if one.source == number}


def expected(num_stages, uses, num_pieces):
    """The models of all stages with the gradients of one process; slices have data of their own."""
    models = [model_of(number) for number in range(num_stages)]
    for microbatch in range(num_pieces):
        hidden, values = batch(microbatch), {}
        for number, model in enumerate(models):
            used = {value: values[value] for value, one in uses.items() if number in one.users}
            hidden, made = run_stage(number, model, hidden, used, uses)
            values |= made
        hidden.pow(2).sum().backward()
    return models


@define(eq=False, slots=False)
class SkippingStage:
    """Stage ``number``; on an edge of the chain hidden states come first, then values."""

    number: int
    num_stages: int
    uses: dict
    values: dict
    model: nn.Module

    def forward(self, microbatch, inputs, part=None):
        hidden, arrived = batch(microbatch if part is None else microbatch * part.count + part.index), {}
        for edge, payload in inputs.items():
            values = list(payload)
            if edge.source == self.number - 1:
                hidden, *values = values
            arrived |= dict(zip(self.values.get(edge, ()), values, strict=True))
        used = {value: arrived[value] for value, one in self.uses.items() if self.number in one.users}
        hidden, made = run_stage(self.number, self.model, hidden, used, self.uses)
        if self.number == self.num_stages - 1:
            return Forwarded({}, hidden.pow(2).sum())
        there, after = arrived | made, Edge(self.number, self.number + 1)
        outgoing = {after, *(edge for edge in self.values if edge.source == self.number)}
        return Forwarded(
            {
                edge: [*([hidden] if edge == after else []), *(there[value] for value in self.values.get(edge, ()))]
                for edge in outgoing
            }
        )


def skipping_stages(plan, uses, values):
    """All stages of a plan, for a runtime."""
    count = plan.num_stages
    return [SkippingStage(number, count, uses, values, model_of(number)) for number in range(count)]
