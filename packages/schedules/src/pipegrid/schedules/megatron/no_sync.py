"""The framework's own calls around a step: ``no_sync_func``, ``grad_sync_func`` and ``param_sync_func``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pipegrid.core.errors import StepArgumentError
from pipegrid.plans.plan import Action, ActionKind, Plan
from pipegrid.schedules.megatron.config import option

_B, _W = ActionKind.B, ActionKind.W


def sync_parameters(config: Any, models: Mapping[int, Any]) -> None:
    """``param_sync_func`` of each chunk, before the first forward."""
    for sync, model in zip(_per_chunk(config, "param_sync_func", models), models.values(), strict=True):
        if sync is not None:
            sync(model.parameters())


def sync_gradients(plan: Plan, config: Any, models: Mapping[int, Any]) -> None:
    """``grad_sync_func`` of each chunk, after the last backward; not on a first stage, which reduces by itself."""
    for (stage, model), sync in zip(models.items(), _per_chunk(config, "grad_sync_func", models), strict=True):
        if sync is not None and not _is_first_stage(plan, stage):
            sync(model.parameters())


def _per_chunk(config: Any, name: str, models: Mapping[int, Any]) -> list[Any]:
    """An option per chunk: one function for all chunks, or a list with one for each."""
    value = option(config, name)
    if not isinstance(value, (list, tuple)):
        return [value] * len(models)
    if len(value) != len(models):
        raise StepArgumentError(f"config.{name} is a list of {len(value)} and this rank has {len(models)} chunks")
    return list(value)


def no_sync_hooks(
    plan: Plan, position: int, config: Any, models: Mapping[int, Any], outside: contextlib.ExitStack
) -> list[Any]:
    """Hooks that hold the no-sync contexts, except in the last backward of each chunk, which reduces gradients."""
    by_itself = [
        stage
        for stage, sync in zip(models, _per_chunk(config, "grad_sync_func", models), strict=True)
        if sync is None or _is_first_stage(plan, stage)
    ]
    contexts = option(config, "no_sync_func")
    if not isinstance(contexts, (list, tuple)):
        return [_Suspended(contexts, _last(plan, position, by_itself), outside)]
    return [
        _Suspended(enter, _last(plan, position, [stage] if stage in by_itself else []), outside)
        for stage, enter in zip(models, _per_chunk(config, "no_sync_func", models), strict=True)
    ]


def _last(plan: Plan, position: int, stages: Collection[int]) -> set[Action]:
    """The last actions that add to the gradients of ``stages``; of halves both, as a Function may compute both at I."""
    # Without a pipeline the last backward follows the last forward, in which DDP decides whether to reduce.
    kinds = {ActionKind.F} if plan.graph.num_stages == 1 else {_B, ActionKind.I, _W}
    last = {
        (action.stage, action.kind): (place, action)
        for place, action in enumerate(plan.actions(position))
        if action.kind in kinds and action.stage in stages
    }
    # A whole backward with halves after it is not the last.
    return {
        action
        for (stage, kind), (place, action) in last.items()
        if kind is not _B or (stage, _W) not in last or last[stage, _W][0] < place
    }


class _Suspended:
    """A context of one step, closed before each of ``actions``, and reentered after it unless it was the last."""

    def __init__(self, enter: Callable[[], Any], actions: set[Action], outside: contextlib.ExitStack) -> None:
        self._enter, self._left = enter, actions
        self._context = outside.enter_context(contextlib.ExitStack())
        self._context.enter_context(enter())
        self._suspended: Action | None = None

    def before(self, action: Action) -> None:
        if action in self._left:
            self._left.remove(action)
            self._suspended = action
            self._context.close()

    def after(self, action: Action) -> None:
        if action == self._suspended:
            if self._left:
                self._context.enter_context(self._enter())
            self._suspended = None


def _is_first_stage(plan: Plan, stage: int) -> bool:
    return all(edge.destination != stage for edge in plan.graph.stage_edges)
