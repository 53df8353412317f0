"""All positions of a plan in the threads of one process, and a stage with one weight to run there."""

from __future__ import annotations

import torch
from attrs import define, field

from pipegrid.schedules.plan.plan import Plan
from pipegrid.schedules.runtime import Forwarded, PipelineRuntime


@define
class InThreads:
    """Runs plans: each position in a thread of its own, over ``communicator(network, num_stages, position)``."""

    network: object
    communicator: object
    in_threads: object

    def runtimes(self, plan, stages, *, hooks=None, **options):
        """One for each position, with ``hooks`` by position."""
        return [
            PipelineRuntime(
                plan,
                {stage: stages[stage] for stage in held},
                self.communicator(self.network, plan.num_stages, position),
                hooks=hooks[position] if hooks else (),
                **options,
            )
            for position, held in enumerate(plan.stages_at)
        ]

    def run(self, plan, stages, verb="step", **options):
        """The runtimes, after ``verb`` of each."""
        made = self.runtimes(plan, stages, **options)
        self.in_threads([getattr(runtime, verb) for runtime in made])
        return made


@define
class Scale:
    """A stage with one weight: the sum of what arrives (or the microbatch's number), times the weight."""

    plan: Plan
    stage: int
    weight: torch.Tensor = field()
    losses: list[float] = field(factory=list)

    @weight.default
    def _weight(self):
        return torch.tensor(0.5 + self.stage, dtype=torch.float64, requires_grad=True)

    def forward(self, microbatch, inputs):
        x = sum(inputs.values()) if inputs else torch.full((2,), 1.0 + microbatch, dtype=torch.float64)
        y = x * self.weight
        outgoing = [edge for edge in self.plan.graph.stage_edges if edge.source == self.stage]
        if outgoing:
            return Forwarded(dict.fromkeys(outgoing, y))
        self.losses.append(y.sum().item())
        return Forwarded({}, y.sum())


def scales(plan):
    return [Scale(plan, stage) for stage in range(plan.num_stages)]


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
