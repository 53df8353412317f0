"""Gradients of a step added in the order of its units: the same bits whichever ranks compute them.

Floating-point addition is not associative. A rank adds the gradients of microbatches in the order of its backwards, and
an all-reduce adds those of ranks in an order of its own; both change where a unit moves to another replica. Here each
unit's gradient is kept apart, and summed over ranks alone: of the terms of that sum all are zero but the one of the
rank that has computed it, so its order does not matter. What is left is a sum over units, in their order.

One copy of the gradients per unit, and as many all-reduces as units: for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from attrs import define, field

from pipegrid.gradients.errors import GradientError
from pipegrid.gradients.main_grad import accumulated, add_gradient, take_gradient
from pipegrid.gradients.reduction.buckets import Bucket
from pipegrid.gradients.reduction.reduce import GradientReduction
from pipegrid.gradients.reduction.tied import TiedParameters
from pipegrid.monitor.collectives import Waiting
from pipegrid.plans.plan import Action, ActionKind
from pipegrid.schedules.megatron.units.batches import Unit

_BACKWARDS = (ActionKind.B, ActionKind.I, ActionKind.W)


@define(eq=False)
class UnitGradients:
    """A hook of one step that takes the gradients of each backward away, and adds them when all are there.

    ``units``: all of the step, ascending; ``unit_of``: that of a stage's microbatch, as the plan numbers it.
    """

    models: Mapping[int, torch.nn.Module]
    units: Sequence[Unit]
    unit_of: Callable[[int, int], Unit]
    _held: dict[tuple[Unit, int], dict[int, torch.Tensor]] = field(factory=dict, init=False)

    def before(self, action: Action) -> None:
        """Nothing."""

    def after(self, action: Action) -> None:
        """Take what a backward has added; of two halves both are one sum."""
        if action.kind not in _BACKWARDS:
            return
        assert action.microbatch is not None  # of every compute
        held = self._held.setdefault((self.unit_of(action.stage, action.microbatch), action.stage), {})
        for parameter in self.models[action.stage].parameters():
            _move_gradient(parameter, held)

    def reduce_tie(self, tie: TiedParameters, waiting: Waiting) -> None:
        """The ``REDUCE`` of a tied parameter."""
        with torch.no_grad():
            self._sum(tie.copies, tie.stages, lambda: tie.reduce(waiting))

    def reduce(self, reduction: GradientReduction, waiting: Waiting) -> None:
        """Sum all other gradients over ranks; what is left for ``reduction`` is to divide."""
        done = [bucket.tie is not None and bucket.tie.over_replicas for bucket in reduction.buckets]
        left = [bucket.layouts for bucket, summed in zip(reduction.buckets, done, strict=True) if not summed]

        def sum_over_ranks() -> None:
            GradientReduction(reduction.layout, tuple(map(Bucket, left)), 1, None).finish(None, waiting)

        parameters = [each.parameter for layouts in left for each in layouts]
        self._sum(parameters, sorted(self.models), sum_over_ranks)
        for bucket in reduction.buckets:
            bucket.tensor = bucket.replicas = None

    def _sum(
        self, parameters: Collection[torch.nn.Parameter], stages: Iterable[int], sum_over_ranks: Callable[[], None]
    ) -> None:
        totals: dict[int, torch.Tensor] = {}
        # A stage of a unit at a time: of a parameter on several stages, the order of their ranks does not matter.
        for key in product(self.units, stages):
            held = self._held.get(key, {})
            for parameter in parameters:
                if id(parameter) in held:
                    add_gradient(parameter, held[id(parameter)])
            sum_over_ranks()
            for parameter in parameters:
                _move_gradient(parameter, totals)
        for parameter in parameters:
            if id(parameter) in totals:
                add_gradient(parameter, totals[id(parameter)])


def require_addable_by_unit(reduction: GradientReduction | None, config: Any) -> None:
    """Raise GradientError unless the gradients of a step are those of single units, and ``reduction`` sums them."""
    if reduction is None or any(each.by_fsdp for each in reduction.layout.gradients):
        raise GradientError(
            "config.grad_add is 'by_unit', which adds where the step function reduces; here a wrapper does, or a "
            "finalize_model_grads_func"
        )
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise GradientError("config.grad_add is 'by_unit'; defer_embedding_wgrad_compute joins units")
    if any(each.marks.tie is not None and not each.marks.tie.over_replicas for each in reduction.layout.trained):
        raise GradientError("config.grad_add is 'by_unit', and a parameter is tied in a replica (group=): use grids=")


@torch.no_grad()
def _move_gradient(parameter: torch.nn.Parameter, sums: dict[int, torch.Tensor]) -> None:
    """Take the gradient away from the parameter, and add it to that in ``sums``, by id."""
    gradient = accumulated(parameter)
    if gradient is None:
        return
    taken, before = take_gradient(parameter, gradient), sums.get(id(parameter))
    sums[id(parameter)] = taken if before is None else before + taken
