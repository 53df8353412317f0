"""Reduction during the last backwards: each bucket starts in the last backward that adds to its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from pipegrid.gradients.main_grad import has_foreign_buffer
from pipegrid.gradients.reduction.reduce import GradientReduction


class EarlyReduction:
    """A hook of the runtime that tells a `GradientReduction` which gradients are whole, as the last backwards go on.

    ``last``: the stage whose gradients are whole, by the place of the action that adds to them last, in the order in
    which they run. Parameters are whole one by one inside that backward, and all after it: also those that this
    microbatch did not use. One of several stages is whole in the last of their last backwards.

    It counts the actions of the position, and so serves one step.
    """

    def __init__(
        self, reduction: GradientReduction, last: Mapping[int, int], trained: Mapping[int, Sequence[torch.nn.Parameter]]
    ) -> None:
        self._reduction = reduction
        # In the order of the plan, so that the last of several stages stays.
        held = {id(each): (place, each) for place, stage in last.items() for each in trained.get(stage, ())}
        self._parameters: dict[int, list[torch.nn.Parameter]] = {}
        for place, parameter in held.values():
            self._parameters.setdefault(place, []).append(parameter)
        self._place = 0
        self._handles: list[RemovableHandle] = []

    def before(self, action: object) -> None:
        """Watch the parameters of a last backward; registered last, these hooks run after those that move gradients."""
        del action
        for parameter in self._parameters.get(self._place, ()):
            if not has_foreign_buffer(parameter):
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(self._whole)  # type: ignore[no-untyped-call]
                )

    def after(self, action: object) -> None:
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
