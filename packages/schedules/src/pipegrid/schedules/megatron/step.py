"""One step of the step functions: from models and iterators by stage to the infos of the losses."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from pipegrid.schedules.errors import StepArgumentError
from pipegrid.schedules.gradients import deferred_weight_gradients, fresh_gradients, required_ties, tied_stages
from pipegrid.schedules.gradients.lanes import Waiting, collection_of
from pipegrid.schedules.gradients.overlap import EarlyReduction
from pipegrid.schedules.gradients.policy import GradientPolicy, gradient_policy, require_equal_replicas
from pipegrid.schedules.gradients.reduce import GradientReduction
from pipegrid.schedules.megatron.config import checked_option, config_of, option
from pipegrid.schedules.megatron.forward import require_autocast
from pipegrid.schedules.megatron.place import Sharding, Ties, sharding_key
from pipegrid.schedules.megatron.prepared import PreparedStep, forget, prepared_step
from pipegrid.schedules.megatron.shapes import AnnouncedShapes, ExpectedShape, announced_shapes, expected_shape
from pipegrid.schedules.megatron.stage import StageCall
from pipegrid.schedules.plan import Action, ActionKind, Plan
from pipegrid.schedules.runtime import Hook
from pipegrid.schedules.verify import Proof
from pipegrid.topology.fields import Count, checked


def single(value: Any, name: str) -> Any:
    """``value``, or the one item of a list or tuple; other sequences (``range(100)``, a data set) are values."""
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) != 1:
        raise StepArgumentError(
            f"{name} is a list of {len(value)}: without interleaving a rank has one chunk; pass one, not several"
        )
    return value[0]


def run_step(
    *,
    proof: Callable[[Ties, int, Sharding], Proof],
    communicator: Any,
    forward_step_func: Callable[..., Any],
    data_iterators: Mapping[int, Any],
    models: Mapping[int, Any],
    num_microbatches: int,
    forward_only: bool,
    collect_non_loss_data: bool,
    first_val_step: bool | None,
    pg_collection: Any,
    frozen: Collection[str] = (),
    shapes: AnnouncedShapes | ExpectedShape | None = None,
    interleaved: bool = False,
) -> list[Any]:
    """Run one step of the stages in ``models`` (in the order of chunks).

    The config is the first model's. ``proof`` makes the plan and proves it, from the name and the stages of each tied
    parameter, the number of microbatches and the config's sharding, after the checks of the other arguments. The
    runtime is cached for the next call (`prepared_step`).
    """
    config = config_of(next(iter(models.values())))
    num_microbatches = checked(num_microbatches, Count, "num_microbatches", StepArgumentError)
    _require_forward_step(forward_step_func, config)
    if option(config, "overlap_moe_expert_parallel_comm") and not interleaved:
        raise StepArgumentError(
            "config.overlap_moe_expert_parallel_comm needs one more microbatch in flight, which only interleaving "
            "has: use forward_backward_pipelining_with_interleaving with two chunks or more, or unset it"
        )
    for model in models.values():
        require_autocast(config, model)
    if collect_non_loss_data and not forward_only:
        raise StepArgumentError("collect_non_loss_data has no loss to differentiate; set forward_only=True as well")
    ties = () if forward_only else required_ties(models=list(models.values()), config=config, stages=list(models))
    sharding = sharding_key(option(config, "shard"), checked_option(config, "prefetch"))
    proved = proof(tied_stages(ties), num_microbatches, sharding)
    agreed = proved.plan
    policy = deferred = None
    if not forward_only:
        policy = gradient_policy(
            models=models,
            config=config,
            communicator=communicator,
            graph=agreed.graph,
            pg_collection=pg_collection,
            frozen=frozen,
        )
        deferred = _deferrals(agreed, config, models, pg_collection)
        for sync, model in zip(_per_chunk(config, "param_sync_func", models), models.values(), strict=True):
            if sync is not None:
                sync(model.parameters())
    calls = {
        stage: StageCall(
            forward_step_func,
            data_iterators[stage],
            model,
            config,
            num_microbatches,
            cp_group=_cp_group(pg_collection, agreed.graph.module_of(stage)[0]),
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            shapes=shapes,
            per_token=bool(option(config, "calculate_per_token_loss")),
            loss_factor=1.0 if policy is None else policy.loss_factors.get(stage, 1.0),
        )
        for stage, model in models.items()
    }
    reduction = None if policy is None else policy.reduction()
    syncs = not forward_only and option(config, "no_sync_func") is not None
    early = (
        reduction is not None
        and reduction.communicates
        and bool(option(config, "overlap_grad_reduce"))
        and not option(config, "defer_embedding_wgrad_compute")  # deferred gradients come after the last backward
    )
    prepared = prepared_step(proved, communicator, models, config, ties, hooked=syncs or early)
    try:
        with contextlib.ExitStack() as outside:
            hooks: list[Hook] = [*option(config, "hooks")]
            if syncs:
                hooks += _syncing(agreed, config, models, outside)
            if reduction is not None and early:
                starting = EarlyReduction(reduction, prepared.last_backwards, models)
                outside.callback(starting.close)
                hooks.append(starting)
            prepared.begin(calls, config, hooks, ties, deferred or ())
            if policy is None:
                prepared.runtime.eval()
            else:
                _train(prepared, policy, reduction, config, models, leave=outside.close)
            return [info for stage in prepared.stages.values() for info in stage.infos]
    except BaseException:
        forget(prepared)
        raise
    finally:
        prepared.end()


def _train(
    prepared: PreparedStep,
    policy: GradientPolicy,
    reduction: GradientReduction | None,
    config: Any,
    models: Mapping[int, Any],
    *,
    leave: Callable[[], None],
) -> None:
    """Forwards, backwards and the reduction of their gradients, added to the gradients of earlier calls.

    ``leave`` closes the no-sync contexts, before ``grad_sync_func`` and ``finalize_model_grads_func`` run.
    """

    def finish() -> None:
        leave()
        prepared.finish_output_layers()
        for (stage, model), sync in zip(models.items(), _per_chunk(config, "grad_sync_func", models), strict=True):
            if sync is not None and not _is_first_stage(prepared.plan, stage):
                sync(model.parameters())
        policy.finish(
            {number: stage.num_tokens for number, stage in prepared.stages.items()}, reduction, prepared.waiting
        )
        if option(config, "check_replicas"):
            require_equal_replicas(policy.reduced, policy.collections, waiting=prepared.waiting)

    if not prepared.compared:
        policy.compare(Waiting(prepared.waiting.deadline))
        prepared.compared = True
    with fresh_gradients(policy.reduced):
        prepared.runtime.step(finish=finish, agree=policy.agreement)


_FITTING: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Functions whose signature was found right, by how many arguments they are called with."""


def _require_forward_step(forward_step_func: Any, config: Any) -> None:
    """Raise unless the function accepts two arguments, or three with partial activation checkpoints."""
    if not callable(forward_step_func):
        raise StepArgumentError(
            f"forward_step_func is {forward_step_func!r}; give a function f(data_iterator, model) that returns "
            "(output, loss_func)"
        )
    partial = "num_microbatches_with_partial_activation_checkpoints"
    arguments = (None, None) if checked_option(config, partial) is None else (None, None, True)
    function = getattr(forward_step_func, "__func__", forward_step_func)  # a bound method is a new object each time
    with contextlib.suppress(TypeError):  # a callable without weak references
        if _FITTING.get(function) == len(arguments):
            return
    try:
        signature = inspect.signature(forward_step_func)
    except (TypeError, ValueError):  # a callable in C without a signature
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        if len(arguments) == 2:
            raise StepArgumentError(
                f"forward_step_func takes {signature}; it is called as f(data_iterator, model) and returns "
                "(output, loss_func)"
            ) from None
        raise StepArgumentError(
            f"config.{partial} is set, so forward_step_func needs a "
            f"third argument (whether to checkpoint a microbatch), but it takes {signature}; add "
            "checkpoint_activations_microbatch, or unset the option"
        ) from None
    with contextlib.suppress(TypeError):
        _FITTING[function] = len(arguments)


def require_one_config(models: Mapping[int, Any]) -> None:
    """Raise StepArgumentError unless all models on this rank have the same config."""
    first, *others = [config_of(model) for model in models.values()]
    if any(other is not first and other != first for other in others):
        raise StepArgumentError(
            "the models on this rank have different configs; a step has one: use the same PipelineConfig for all"
        )


def message_shapes(
    adjust: Callable[..., Any] | None,
    models: Mapping[int, Any],
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    collection: Any,
) -> AnnouncedShapes | ExpectedShape | None:
    """Expected shapes of messages: `announced_shapes` with an ``adjust`` function, else `expected_shape`.

    All ``models`` are chunks of one module.
    """
    sizes = {
        "seq_length": seq_length,
        "micro_batch_size": micro_batch_size,
        "decoder_seq_length": decoder_seq_length,
        "config": config_of(next(iter(models.values()))),
        "tp_group": getattr(collection, "tp", None),
        "cp_group": getattr(collection, "cp", None),
    }
    return expected_shape(**sizes) if adjust is None else announced_shapes(adjust, **sizes)


def _deferrals(plan: Plan, config: Any, models: Mapping[int, Any], pg_collection: Any) -> list[Callable[[], None]]:
    """One function per stage that computes the deferred weight gradients of its output layer."""
    finish = []
    for stage, model in models.items():
        groups = None if pg_collection is None else collection_of(pg_collection, plan.graph.module_of(stage)[0])
        is_last = all(edge.source != stage for edge in plan.graph.stage_edges)
        finish.append(
            deferred_weight_gradients(config, model, is_last_stage=is_last, tp_group=getattr(groups, "tp", None))
        )
    return finish


def _per_chunk(config: Any, name: str, models: Mapping[int, Any]) -> list[Any]:
    """An option per chunk: one function for all chunks, or a list with one for each."""
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
    """Hooks that hold the no-sync contexts, except in the last backward of each chunk, which reduces gradients."""
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


def _cp_group(pg_collection: Any, module: str) -> Any:
    return None if pg_collection is None else getattr(collection_of(pg_collection, module), "cp", None)
