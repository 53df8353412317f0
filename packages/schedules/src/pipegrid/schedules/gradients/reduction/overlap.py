"""Reduction that overlaps the last backwards: each bucket starts in the last backward that touches it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils.hooks import RemovableHandle

from pipegrid.schedules.gradients.main_grad import keeps_main_grad
from pipegrid.schedules.gradients.reduction.reduce import GradientReduction
from pipegrid.schedules.plan import Action, ActionKind, Plan

_BACKWARDS = (ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.REDUCE_GRAD)


def last_backwards(plan: Plan, position: int) -> dict[Action, int]:
    """Of each stage on ``position`` the last action that can add to its gradients."""
    last: dict[int, Action] = {}
    for action in plan.actions(position):
        if action.kind in _BACKWARDS:
            last[action.stage] = action
    return {action: stage for stage, action in last.items()}


class EarlyReduction:
    """A hook of the runtime that tells a `GradientReduction` which gradients are whole, as the last backwards go on.

    Parameters are whole one by one inside the last backward of their stage (`last_backwards`), and all after it: also
    those that this microbatch did not use. One of several stages is whole in the last of their last backwards.
    """

    def __init__(
        self, reduction: GradientReduction, last: Mapping[Action, int], models: Mapping[int, torch.nn.Module]
    ) -> None:
        self._reduction = reduction
        held: dict[int, tuple[Action, torch.nn.Parameter]] = {}
        for action, stage in last.items():  # in the order of the plan, so that the last of several stages stays
            for parameter in models[stage].parameters() if stage in models else ():
                held[id(parameter)] = action, parameter
        self._parameters: dict[Action, list[torch.nn.Parameter]] = {}
        for action, parameter in held.values():
            if parameter.requires_grad:
                self._parameters.setdefault(action, []).append(parameter)
        self._handles: list[RemovableHandle] = []

    def before(self, action: Action) -> None:
        """Watch the parameters of a last backward; registered last, these hooks run after those that move gradients."""
        for parameter in self._parameters.get(action, ()):
            if not keeps_main_grad(parameter) or hasattr(parameter, "main_grad_dtype"):
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(self._whole)  # type: ignore[no-untyped-call]
                )

    def after(self, action: Action) -> None:
        """All gradients of the stage are whole."""
        if action in self._parameters:
            self.close()
            self._reduction.ready(self._parameters[action])

    def close(self) -> None:
        """Watch nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _whole(self, parameter: torch.nn.Parameter) -> None:
        self._reduction.ready([parameter])
