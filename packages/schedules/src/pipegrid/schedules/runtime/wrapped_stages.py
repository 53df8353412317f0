"""Wrappers that reduce gradients by themselves, refused where a plan's order makes them reduce the wrong ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from pipegrid.schedules.gradients.policy import ReductionError
from pipegrid.schedules.plan.actions import ActionKind
from pipegrid.schedules.plan.plan import Plan


def require_right_wrappers(plan: Plan, position: int, stages: Mapping[int, Any]) -> None:
    """Refuse a `DistributedDataParallel` in a stage whose backwards do not follow their own forwards at once.

    It prepares in each forward for the one backward that it takes to come next, and knows none in halves.

    Raises:
        ReductionError: there is one; the message names it, and what to do in its place.
    """
    for number, stage in stages.items():
        if number in plan.forward_only or _one_at_a_time(plan, position, number):
            continue
        for name, module in _modules(stage):
            if isinstance(module, DistributedDataParallel):
                raise ReductionError(
                    f"stage {number} has a DistributedDataParallel ({name}), which decides in a forward whether the "
                    "next backward reduces; in this plan other forwards come between, or the backward is split, so it "
                    "would reduce the wrong gradients. Give the stage the bare module, and call reduce_gradients(...) "
                    "over its data lanes once after the step; or choose a plan with one stage, whose backwards follow "
                    "their forwards at once"
                )


def _one_at_a_time(plan: Plan, position: int, stage: int) -> bool:
    """Whether each forward of ``stage`` is followed by its own backward, a whole one, before its next forward."""
    order = [(a.kind, a.microbatch) for a in plan.actions(position) if a.stage == stage and a.kind.is_compute]
    return order == [(kind, microbatch) for _, microbatch in order[::2] for kind in (ActionKind.F, ActionKind.B)]


def _modules(stage: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a stage: those that it is, or holds as attributes, ``model`` among them."""
    held = {"model": getattr(stage, "model", None), **getattr(stage, "__dict__", {})}
    for name, value in [("the stage itself", stage), *held.items()]:
        if isinstance(value, torch.nn.Module):
            for inner, module in value.named_modules():
                yield f"{name}.{inner}" if inner else name, module
