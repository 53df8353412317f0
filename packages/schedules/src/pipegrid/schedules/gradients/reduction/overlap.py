"""Reduction during the last backwards: each bucket starts in the last backward that adds to its gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils.hooks import RemovableHandle

from pipegrid.plans.plan import Action, ActionKind, Plan
from pipegrid.schedules.gradients.main_grad import has_foreign_buffer
from pipegrid.schedules.gradients.reduction.reduce import GradientReduction

_BACKWARDS = (ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.REDUCE_GRAD)


def last_backwards(plan: Plan, position: int) -> dict[int, int]:
    """The stage whose gradients are whole, by the place of the last action that can add to them; in the plan's order.

    By its place in `Plan.actions`: all ``REDUCE_GRAD`` of a stage are equal. Where replicas differ, the ``REDUCE`` over
    them comes after their last backwards.
    """
    kinds = _BACKWARDS if plan.num_replicas == 1 else {ActionKind.REDUCE}
    last = {
        action.stage: place
        for place, action in enumerate(plan.actions(position))
        if action.kind in kinds and action.group is None
    }
    return {place: stage for stage, place in sorted(last.items(), key=lambda item: item[1])}


class EarlyReduction:
    """A hook of the runtime that tells a `GradientReduction` which gradients are whole, as the last backwards go on.

    Parameters are whole one by one inside the last backward of their stage (`last_backwards`), and all after it: also
    those that this microbatch did not use. One of several stages is whole in the last of their last backwards.

    It counts the actions of the position, and so serves one step.
    """

    def __init__(
        self, reduction: GradientReduction, last: Mapping[int, int], models: Mapping[int, torch.nn.Module]
    ) -> None:
        self._reduction = reduction
        held: dict[int, tuple[int, torch.nn.Parameter]] = {}
        for place, stage in last.items():  # in the order of the plan, so that the last of several stages stays
            for parameter in models[stage].parameters() if stage in models else ():
                held[id(parameter)] = place, parameter
        self._parameters: dict[int, list[torch.nn.Parameter]] = {}
        for place, parameter in held.values():
            if parameter.requires_grad:
                self._parameters.setdefault(place, []).append(parameter)
        self._place = 0
        self._handles: list[RemovableHandle] = []

    def before(self, action: Action) -> None:
        """Watch the parameters of a last backward; registered last, these hooks run after those that move gradients."""
        del action
        for parameter in self._parameters.get(self._place, ()):
            if not has_foreign_buffer(parameter):
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(self._whole)  # type: ignore[no-untyped-call]
                )

    def after(self, action: Action) -> None:
        """All gradients of the stage are whole."""
        del action
        if self._place in self._parameters:
            self.close()
            self._reduction.ready(self._parameters[self._place])
        self._place += 1

    def close(self) -> None:
        """Watch nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _whole(self, parameter: torch.nn.Parameter) -> None:
        self._reduction.ready([parameter])
