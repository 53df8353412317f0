"""One step of a step function: prepare, begin, run, finish."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from pipegrid.schedules.errors import GradientError
from pipegrid.schedules.gradients import deferred_weight_gradients, fresh_gradients
from pipegrid.schedules.gradients.lanes import group_of
from pipegrid.schedules.gradients.reduction import (
    EarlyReduction,
    GradientPolicy,
    GradientReduction,
    UnitGradients,
    require_equal_norms,
)
from pipegrid.schedules.megatron.call import StepCall
from pipegrid.schedules.megatron.checks import CHECKPOINTS, require_forward_step
from pipegrid.schedules.megatron.config import config_of, option
from pipegrid.schedules.megatron.kinds import StepKind
from pipegrid.schedules.megatron.no_sync import no_sync_hooks, sync_gradients, sync_parameters
from pipegrid.schedules.megatron.prepared import PreparedStep, prepared_step
from pipegrid.schedules.megatron.units.replica import require_equal_routes
from pipegrid.schedules.plan import Plan
from pipegrid.schedules.runtime import Hook


def run_step(kind: StepKind, call: StepCall) -> list[Any]:
    """Run one step; the infos of the losses of this rank's stages. The config is that of the first model."""
    prepared = prepared_step(kind, call)
    models, policy = prepared.models(), prepared.policy
    config = config_of(next(iter(models.values())))
    data_iterators, announced = prepared.iterators(call.data_iterator), prepared.announced(call, config)
    require_forward_step(call.forward_step_func, checkpoints=option(config, CHECKPOINTS) is not None)
    with prepared.running(config), contextlib.ExitStack() as outside:
        deferred: Sequence[Callable[[], None]] = ()
        reduction = units = None
        if policy is not None:
            if option(config, "defer_embedding_wgrad_compute"):
                deferred = _deferrals(prepared.plan, config, models, call.pg_collection)
            sync_parameters(config, models)
            reduction = policy.reduction(models, config, call.pg_collection)
            units = _unit_gradients(prepared, models, call, reduction) if prepared.by_unit else None
        prepared.begin(_hooks(prepared, config, models, reduction, units, outside), deferred, units)
        if reduction is None and prepared.ties:  # a REDUCE sums what this call adds
            copies = [copy for tie in option(config, "tied_parameters") for copy in tie.copies]
            outside.enter_context(fresh_gradients(torch.nn.ParameterList(copies)))
        for stage, model in models.items():
            prepared.stages[stage].begin(
                call.forward_step_func, data_iterators[stage], model, config, call.first_val_step, announced
            )
        if policy is None:
            prepared.runtime.eval()
        else:
            _train(prepared, policy, reduction, units, config, models, call, leave=outside.close)
        return [info for stage in prepared.stages.values() for _, info in sorted(stage.infos, key=itemgetter(0))]


def _hooks(
    prepared: PreparedStep,
    config: Any,
    models: Mapping[int, Any],
    reduction: GradientReduction | None,
    units: UnitGradients | None,
    outside: contextlib.ExitStack,
) -> Sequence[Hook]:
    """The hooks of one call; ``outside`` closes what they have opened."""
    hooks: Sequence[Hook] = option(config, "hooks")
    if prepared.syncs:
        hooks = [*hooks, *no_sync_hooks(prepared.plan, prepared.actor, config, models, outside)]
    if reduction is not None and prepared.early:
        early = EarlyReduction(reduction, prepared.last_backwards, models)
        outside.callback(early.close)
        hooks = [*hooks, early]
    return hooks if units is None else [*hooks, units]


def _unit_gradients(
    prepared: PreparedStep, models: Mapping[int, Any], call: StepCall, reduction: GradientReduction | None
) -> UnitGradients:
    """What adds the gradients of one call in the order of units.

    Raises:
        GradientError: the step function does not know the units, or does not reduce their gradients.
    """
    if call.routes is None:
        raise GradientError("config.grad_add is 'by_unit', and without routes= units have no numbers: pass routes")
    if reduction is None or any(each.by_fsdp for each in reduction.layout.gradients):
        raise GradientError(
            "config.grad_add is 'by_unit', which adds where the step function reduces; here a wrapper does, or a "
            "finalize_model_grads_func"
        )
    if option(config_of(next(iter(models.values()))), "defer_embedding_wgrad_compute"):
        raise GradientError(
            "config.grad_add is 'by_unit', and defer_embedding_wgrad_compute makes one of several units"
        )
    if any(each.marks.tie is not None and not each.marks.tie.over_lanes for each in reduction.layout.trained):
        raise GradientError(
            "config.grad_add is 'by_unit', and a parameter is tied within each replica (group=): tie it with grids="
        )

    def unit_of(stage: int, number: int) -> tuple[int, int]:
        units = prepared.stages[stage].units
        return units.home(number) or 0, units.microbatch(number)

    units = [(replica, number) for replica, count in enumerate(call.routes.units) for number in range(count)]
    return UnitGradients(models, units, unit_of)


def _train(
    prepared: PreparedStep,
    policy: GradientPolicy,
    reduction: GradientReduction | None,
    units: UnitGradients | None,
    config: Any,
    models: Mapping[int, Any],
    call: StepCall,
    *,
    leave: Callable[[], None],
) -> None:
    """Forwards, backwards and the reduction of their gradients, added to the gradients of earlier calls.

    ``leave`` closes the no-sync contexts and adds a tie's earlier gradients, before ``grad_sync_func`` and
    ``finalize_model_grads_func`` run.
    """

    def finish() -> None:
        leave()
        prepared.finish_output_layers()
        sync_gradients(prepared.plan, config, models)
        if units is not None and reduction is not None:
            units.reduce(reduction, prepared.waiting)
        policy.finish(
            {number: stage.num_tokens for number, stage in prepared.stages.items()},
            reduction,
            prepared.waiting,
            models=models,
            config=config,
            pg_collection=call.pg_collection,
        )
        if reduction is not None and option(config, "check_replicas"):
            require_equal_norms(reduction.layout, prepared.waiting)

    def compare() -> None:
        if not prepared.state.compared:
            policy.compare(models, reduction, call.pg_collection, config, prepared.waiting)
            prepared.state.compared = True
        if call.routes is not None:
            held = {policy.names[stage]: model for stage, model in models.items()}
            require_equal_routes(call.pg_collection, held, call.routes, prepared.waiting)

    start = None if prepared.state.compared and call.routes is None else compare
    if reduction is None:
        prepared.runtime.step(start=start, finish=finish, agree=policy.agreement)
        return
    with fresh_gradients(reduction.layout.modules):
        prepared.runtime.step(start=start, finish=finish, agree=policy.agreement)


def _deferrals(plan: Plan, config: Any, models: Mapping[int, Any], pg_collection: Any) -> list[Callable[[], None]]:
    """One function per stage that computes the deferred weight gradients of its output layer."""
    finish = []
    for stage, model in models.items():
        tp_group = group_of(pg_collection, plan.graph.module_of(stage)[0], "tp")
        is_last = all(edge.source != stage for edge in plan.graph.stage_edges)
        finish.append(deferred_weight_gradients(config, model, is_last_stage=is_last, tp_group=tp_group))
    return finish
