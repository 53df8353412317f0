"""Stages of a runtime made of functions and models, and the same stages one after the other in one process."""

from __future__ import annotations

from attrs import define, field
from torch import nn

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.runtime import Forwarded

from .threads import scales


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


def differentiate(plan, stages):
    """Forwards and backwards of all microbatches through ``stages``, one after the other."""
    for microbatch in range(plan.num_microbatches):
        values = {}
        for stage in range(plan.num_stages):
            inputs = {edge: values[edge.source] for edge in plan.graph.stage_edges if edge.destination == stage}
            forwarded = stages[stage].forward(microbatch, inputs)
            values[stage] = next(iter(forwarded.outputs.values()), None)
        forwarded.loss.backward()
    return stages


def expected_gradients(plan):
    return [stage.weight.grad for stage in differentiate(plan, scales(plan))]
