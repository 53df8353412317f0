"""One step as the seeds' functions take it: models and iterators by stage in, the infos of the losses out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from pipegrid.schedules.actions import Action, ActionKind
from pipegrid.schedules.config import config_of, option
from pipegrid.schedules.gradients import collection_of
from pipegrid.schedules.plan import Plan
from pipegrid.schedules.reduction import Finish, settle_reduction
from pipegrid.schedules.runtime import PipelineRuntime, position_of
from pipegrid.schedules.seed_stage import SeedStage


class StepArgumentError(ValueError):
    """The arguments of a step function contradict each other."""


def single(value: Any, name: str) -> Any:
    """``value``, or the one item of a list.

    Raises:
        StepArgumentError: a list of several.
    """
    if not isinstance(value, Sequence) or isinstance(value, torch.nn.Module):
        return value
    if len(value) != 1:
        raise StepArgumentError(
            f"{name} is a list of {len(value)}: without interleaving a rank has one chunk; pass one, not several"
        )
    return value[0]


def run_step(
    *,
    plan: Callable[[], Plan],
    communicator: Any,
    forward_step_func: Callable[..., Any],
    data_iterators: Mapping[int, Any],
    models: Mapping[int, Any],
    num_microbatches: int,
    forward_only: bool,
    collect_non_loss_data: bool,
    first_val_step: bool | None,
    pg_collection: Any,
) -> list[Any]:
    """Run the stages that are the keys of ``models``, whose order is that of the chunks, by ``plan``.

    The config is the first model's. ``plan`` is called once the other arguments are known to be right.
    """
    config = config_of(next(iter(models.values())))
    if num_microbatches < 1:
        raise StepArgumentError(f"num_microbatches={num_microbatches}: a step needs at least 1")
    if collect_non_loss_data and not forward_only:
        raise StepArgumentError("collect_non_loss_data has no loss to differentiate; set forward_only=True as well")
    agreed = plan()
    position = position_of(agreed, models)
    finish: list[Finish] = []
    if not forward_only:
        finish = _settle(agreed, config, models, communicator, pg_collection)
        for sync, model in zip(_per_chunk(config, "param_sync_func", models), models.values(), strict=True):
            if sync is not None:
                sync(model.parameters())
    stages = {
        stage: SeedStage(
            forward_step_func,
            data_iterators[stage],
            model,
            config,
            agreed.graph,
            stage,
            num_microbatches,
            cp_group_size=_cp_size(pg_collection, agreed.graph.module_of(stage)[0]),
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            window=_window(agreed, position),
            forwards=_forwards(agreed, position, stage),
            vp_stage=chunk if len(models) > 1 else None,
        )
        for chunk, (stage, model) in enumerate(models.items())
    }
    with contextlib.ExitStack() as no_sync:
        hooks = [*option(config, "hooks")]
        if not forward_only:
            hooks += _syncing(agreed, config, models, no_sync)
        runtime = PipelineRuntime(
            agreed,
            stages,
            communicator,
            hooks=hooks,
            deallocate_outputs=bool(option(config, "deallocate_pipeline_outputs")),
            deadline=option(config, "deadline"),
            loss_scale=option(config, "grad_scale_func"),
        )
        if forward_only:
            runtime.eval()
        else:
            runtime.step()
    counted = [stage.num_tokens for stage in stages.values() if stage.num_tokens is not None]
    if finish:
        for stage, sync in zip(stages, _per_chunk(config, "grad_sync_func", models), strict=True):
            if sync is not None and not _is_first_stage(agreed, stage):
                sync(models[stage].parameters())
        for settle in finish:
            settle(counted[0] if counted else None)
    return [info for stage in stages.values() for info in stage.infos]


def _settle(plan: Plan, config: Any, models: Mapping[int, Any], communicator: Any, pg_collection: Any) -> list[Finish]:
    """Who finishes the gradients of each chunk; the user's own function is called once, with all chunks."""
    finalize = option(config, "finalize_model_grads_func")
    told = config if finalize is None else _ToldAllChunks(config, list(models.values()))
    asked = list(models) if finalize is None else list(models)[:1]
    return [
        settle_reduction(
            model=models[stage],
            config=told,
            communicator=communicator,
            graph=plan.graph,
            stage=stage,
            pg_collection=pg_collection,
        )
        for stage in asked
    ]


@frozen
class _ToldAllChunks:
    """The config, with a ``finalize_model_grads_func`` that is told all chunks in place of one."""

    config: Any
    models: list[Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    def finalize_model_grads_func(self, models: list[Any], num_tokens: Any, **groups: Any) -> None:
        """Call the user's function, for all chunks."""
        del models
        option(self.config, "finalize_model_grads_func")(self.models, num_tokens, **groups)


def _per_chunk(config: Any, name: str, models: Mapping[int, Any]) -> list[Any]:
    """An option that is one function for all chunks, or a list with one for each."""
    value = option(config, name)
    if not isinstance(value, (list, tuple)):
        return [value] * len(models)
    if len(value) != len(models):
        raise StepArgumentError(
            f"config.{name} is a list of {len(value)} and this rank has {len(models)} chunks; give one function for "
            "all, or one for each"
        )
    return list(value)


def _syncing(plan: Plan, config: Any, models: Mapping[int, Any], outside: contextlib.ExitStack) -> list[Any]:
    """Hooks that keep the no-sync contexts, but for the last backward of each chunk, which reduces gradients."""
    by_itself = [
        stage
        for stage, sync in zip(models, _per_chunk(config, "grad_sync_func", models), strict=True)
        if sync is None or _is_first_stage(plan, stage)
    ]
    contexts = option(config, "no_sync_func")
    if contexts is None:
        return []
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
    """A context that is left just before each of some actions, and entered again after it while others follow."""

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


def _forwards(plan: Plan, position: int, stage: int) -> tuple[int, ...]:
    """Per microbatch of ``stage``, how many forwards (of any stage) ``position`` has run before it."""
    forwards = [action for action in plan.actions(position) if action.kind is ActionKind.F]
    places = {action.microbatch: place for place, action in enumerate(forwards) if action.stage == stage}
    return tuple(places[microbatch] for microbatch in range(plan.num_microbatches))


def _window(plan: Plan, position: int) -> int:
    """How many forwards ``position`` runs before its first backward: so many microbatches are in flight."""
    count = 0
    for action in plan.actions(position):
        if action.kind is ActionKind.F:
            count += 1
        elif action.kind.is_compute:
            break
    return count


def _cp_size(pg_collection: Any, module: str) -> int:
    group = None if pg_collection is None else getattr(collection_of(pg_collection, module), "cp", None)
    return 1 if group is None else int(group.size())
