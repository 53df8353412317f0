"""Stages of a runtime made of functions and models, and the same stages one after the other in one process."""

from __future__ import annotations

import torch
from attrs import define, field
from torch import nn

from pipegrid.core.graph import ModuleGraph
from pipegrid.schedules.runtime import Forwarded


@define
class Function:
    """A stage that is a function of the microbatch and of what arrives, by the stage's own edges.

    ``model`` has the parameters, for a runtime that looks at them.
    """

    graph: ModuleGraph
    stage: int
    function: object
    model: nn.Module | None = None
    incoming: list = field(init=False)
    outgoing: list = field(init=False)

    def __attrs_post_init__(self):
        self.incoming = [edge for edge in self.graph.stage_edges if edge.destination == self.stage]
        self.outgoing = [edge for edge in self.graph.stage_edges if edge.source == self.stage]

    def forward(self, microbatch, inputs):
        result = self.function(microbatch, *(inputs[edge] for edge in self.incoming))
        return Forwarded(dict.fromkeys(self.outgoing, result)) if self.outgoing else Forwarded({}, result)


def stage_of(graph, number, model, *, data, loss, before=lambda microbatch: None, run=lambda model, x: model(x)):
    """``model`` on the sum of what arrives, or on ``data(microbatch)``; ``loss(output, microbatch)`` on a last stage.

    ``before(microbatch)`` is called first in each forward; ``run(model, input)`` calls the model.
    """

    def function(microbatch, *arrived):
        before(microbatch)
        first, *others = arrived or (data(microbatch),)
        output = run(model, sum(others, first))
        return output if stage.outgoing else loss(output, microbatch)

    stage = Function(graph, number, function, model if isinstance(model, nn.Module) else None)
    return stage


def stages_of(graph, models, **options):
    """The stage of each of ``models``."""
    return [stage_of(graph, number, model, **options) for number, model in enumerate(models)]


class Scale(Function):
    """A stage with one weight: the sum of what arrives (or the microbatch's number), times the weight.

    ``before`` is called first in each forward.
    """

    def __init__(self, plan, stage, before=lambda microbatch: None):
        super().__init__(plan.graph, stage, self.scaled)
        self.before, self.losses = before, []
        self.weight = torch.tensor(0.5 + stage, dtype=torch.float64, requires_grad=True)

    def scaled(self, microbatch, *arrived):
        self.before(microbatch)
        y = self.weight * (sum(arrived) if arrived else torch.full((2,), 1.0 + microbatch, dtype=torch.float64))
        if self.outgoing:
            return y
        self.losses.append(y.sum().item())
        return y.sum()


def scales(plan):
    return [Scale(plan, stage) for stage in range(plan.num_stages)]


def raising(error, at=1):
    """Something to do before forwards: raise, in that of one microbatch."""

    def before(microbatch):
        if microbatch == at:
            raise error

    return before


def differentiate(plan, stages):
    """Forwards of each microbatch through ``stages``, one after the other, and one backward of all their losses."""
    for microbatch in range(plan.num_microbatches):
        values, losses = {}, []
        for number, stage in enumerate(stages):
            inputs = {edge: values[edge.source] for edge in plan.graph.stage_edges if edge.destination == number}
            forwarded = stage.forward(microbatch, inputs)
            values[number] = next(iter(forwarded.outputs.values()), None)
            losses += [] if forwarded.loss is None else [forwarded.loss]
        sum(losses).backward()
    return stages


def expected_gradients(plan):
    return [stage.weight.grad for stage in differentiate(plan, scales(plan))]
