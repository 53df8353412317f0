"""The framework's own calls around a step: ``no_sync_func``, ``grad_sync_func`` and ``param_sync_func``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pipegrid.schedules.errors import StepArgumentError
from pipegrid.schedules.megatron.config import option
from pipegrid.schedules.plan import Action, ActionKind, Plan


def sync_parameters(config: Any, models: Mapping[int, Any]) -> None:
    """``param_sync_func`` of each chunk, before the first forward."""
    if option(config, "param_sync_func") is None:
        return
    for sync, model in zip(_per_chunk(config, "param_sync_func", models), models.values(), strict=True):
        if sync is not None:
            sync(model.parameters())


def sync_gradients(plan: Plan, config: Any, models: Mapping[int, Any]) -> None:
    """``grad_sync_func`` of each chunk, after the last backward; not on a first stage, which reduces by itself."""
    if option(config, "grad_sync_func") is None:
        return
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


def no_sync_hooks(plan: Plan, config: Any, models: Mapping[int, Any], outside: contextlib.ExitStack) -> list[Any]:
    """Hooks that hold the no-sync contexts, except in the last backward of each chunk, which reduces gradients."""
    by_itself = [
        stage
        for stage, sync in zip(models, _per_chunk(config, "grad_sync_func", models), strict=True)
        if sync is None or _is_first_stage(plan, stage)
    ]
    contexts = option(config, "no_sync_func")
    if isinstance(contexts, (list, tuple)):
        per_chunk = _per_chunk(config, "no_sync_func", models)
        return [
            _Suspended(enter, _last(plan, [stage] if stage in by_itself else []), outside)
            for stage, enter in zip(models, per_chunk, strict=True)
        ]
    return [_Suspended(contexts, _last(plan, by_itself), outside)]


def _last(plan: Plan, stages: Iterable[int]) -> set[Action]:
    # Without a pipeline the last backward follows the last forward, in which DDP decides whether to reduce.
    kind = ActionKind.F if plan.graph.num_stages == 1 else ActionKind.B
    return {Action(kind, stage, plan.num_microbatches - 1) for stage in stages}


class _Suspended:
    """A context that is closed before each action of a set, and reentered after it unless it was the last."""

    def __init__(self, enter: Callable[[], Any], actions: set[Action], outside: contextlib.ExitStack) -> None:
        self._enter, self._left = enter, set(actions)
        self._context = outside.enter_context(contextlib.ExitStack())
        self._context.enter_context(enter())
        self._suspended = False

    def before(self, action: Action) -> None:
        if action in self._left:
            self._left.remove(action)
            self._suspended = True
            self._context.close()

    def after(self, action: Action) -> None:
        del action
        if self._suspended and self._left:
            self._context.enter_context(self._enter())
        self._suspended = False


def _is_first_stage(plan: Plan, stage: int) -> bool:
    return all(edge.destination != stage for edge in plan.graph.stage_edges)
