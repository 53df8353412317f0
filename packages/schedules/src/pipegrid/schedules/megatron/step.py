"""One step of a step function: prepare, begin, run, finish."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from pipegrid.gradients import deferred_weight_gradients, fresh_gradients
from pipegrid.gradients.errors import GradientError
from pipegrid.gradients.groups import group_of
from pipegrid.gradients.main_grad import set_aside
from pipegrid.gradients.reduction import EarlyReduction, StepGradients
from pipegrid.plans.plan import Plan, Routes
from pipegrid.schedules.megatron.aux_losses import AuxLossScales, one_like
from pipegrid.schedules.megatron.call import StepCall, by_stage, require_forward_step
from pipegrid.schedules.megatron.config import aux_loss_scalers, option
from pipegrid.schedules.megatron.forward import autocast_of
from pipegrid.schedules.megatron.no_sync import no_sync_hooks, sync_gradients, sync_parameters
from pipegrid.schedules.megatron.place import StepKind
from pipegrid.schedules.megatron.prepared import PreparedStep, prepared_step
from pipegrid.schedules.megatron.stage import RoutedStage
from pipegrid.schedules.megatron.units.by_unit import UnitGradients, require_addable_by_unit
from pipegrid.schedules.megatron.units.routes import require_equal_routes
from pipegrid.schedules.runtime import Hook

_AS_IT_IS: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def run_step(kind: StepKind, call: StepCall) -> list[Any]:
    """Run one step; the infos of the losses of this rank's stages. The config is that of the first model."""
    prepared, config = prepared_step(kind, call)
    models = by_stage(prepared.place.held, call.model, "model")
    data_iterators = by_stage(prepared.place.held, call.data_iterator, "data_iterator")
    shapes = prepared.expected if call.adjust_tensor_shapes_fn is None else prepared.announced(call, config)
    scalers = () if not prepared.attaches else aux_loss_scalers(config)
    watched = scalers if prepared.watches else None
    require_forward_step(call.forward_step_func, checkpoints=prepared.checkpoints)
    with prepared.running(config), contextlib.ExitStack() as outside:
        for stage, model in models.items():
            context = autocast_of(config, model) if prepared.autocasts else None
            prepared.stages[stage].begin(call, data_iterators[stage], model, config, shapes, context, watched)
        early = call.sums if call.sums is not None and call.sums.early else None
        beside = None if early is None else lambda: early.begin(infos_of(prepared))
        if prepared.policy is None:
            if prepared.hooked:
                prepared.bind(option(config, "hooks"))
            prepared.runtime.eval(batch=call.batch, beside=beside)
        else:
            _train(prepared, prepared.gradients(call, models, config), call, outside, beside)
        infos = infos_of(prepared)
        if call.sums is not None and not call.sums.begun:
            call.sums.begin(infos)
        return infos


def infos_of(prepared: PreparedStep) -> list[Any]:
    """The infos of the losses of this rank's stages so far, in order of microbatches."""
    infos: list[Any] = []
    for stage in prepared.stages.values():
        infos += map(itemgetter(1), sorted(stage.infos, key=itemgetter(0)))
    return infos


def _train(
    prepared: PreparedStep,
    gradients: StepGradients,
    call: StepCall,
    outside: contextlib.ExitStack,
    beside: Callable[[], None] | None,
) -> None:
    """Forwards, backwards and the reduction of their gradients, added to the gradients of earlier calls.

    ``outside`` has the no-sync contexts, and a tie's earlier gradients, until ``grad_sync_func`` runs.
    """
    models, config, reduction = gradients.models, gradients.config, gradients.reduction
    if call.force_all_reduce:
        gradients.require_whole()
    deferred = _deferrals(prepared.plan, gradients) if prepared.defers else ()
    if prepared.syncs_parameters:
        sync_parameters(config, models)
    units = _unit_gradients(prepared, gradients, call.routes) if prepared.by_unit else None

    def reduce_tie(name: str) -> None:
        for compute in deferred:  # the sum includes the deferred gradient of a tied weight
            compute()
        tie = next(tie for tie in option(config, "tied_parameters") if tie.name == name)
        if units is None:
            tie.reduce(prepared.waiting)
        else:
            units.reduce_tie(tie, prepared.waiting)

    if prepared.hooked or prepared.ties:
        prepared.bind(_hooks(prepared, gradients, units, outside) if prepared.hooked else (), reduce_tie)
    if reduction is None and prepared.ties:  # a REDUCE sums what this call adds
        copies = [copy for tie in option(config, "tied_parameters") for copy in tie.copies]
        outside.enter_context(fresh_gradients(torch.nn.ParameterList(copies)))

    def compare() -> None:
        prepared.state.compared = gradients.compare(prepared.state.compared)
        if call.routes is not None:
            require_equal_routes(call.pg_collection, prepared.place, models, call.routes, prepared.waiting)

    def finish() -> None:
        outside.close()
        for compute in deferred:  # which no REDUCE has computed yet
            compute()
        if prepared.syncs_gradients:
            sync_gradients(prepared.plan, config, models)
        if units is not None and reduction is not None:
            units.reduce(reduction, prepared.waiting)
        if call.sums is not None and not call.sums.begun:
            call.sums.begin(infos_of(prepared))
        if reduction is None and not gradients.policy.by_hand:
            return
        gradients.finish(
            {number: stage.num_tokens for number, stage in prepared.stages.items()},
            None if call.sums is None else call.sums.tokens,
            force_all_reduce=bool(call.force_all_reduce),
        )

    start = None if call.pg_collection is None else compare  # groups say which ranks are replicas
    with _AS_IT_IS if reduction is None else set_aside(reduction.parameters):
        prepared.runtime.step(start=start, finish=finish, beside=beside, agree=prepared.agreement, batch=call.batch)


def _hooks(
    prepared: PreparedStep, gradients: StepGradients, units: UnitGradients | None, outside: contextlib.ExitStack
) -> Sequence[Hook]:
    """The hooks of one call; ``outside`` closes what they have opened."""
    models, config = gradients.models, gradients.config
    hooks: Sequence[Hook] = option(config, "hooks")
    if prepared.attaches:
        one = one_like(list(models.values()))
        scales = {stage: each.scale_of_mean for stage, each in prepared.stages.items()}
        hooks = [*hooks, AuxLossScales(aux_loss_scalers(config), scales, config, one)]
    if option(config, "no_sync_func") is not None:
        hooks = [*hooks, *no_sync_hooks(prepared.plan, prepared.actor, config, models, outside)]
    if gradients.reduction is not None and prepared.early:
        early = EarlyReduction(gradients.reduction, prepared.last_backwards, gradients.trained)
        outside.callback(early.close)
        hooks = [*hooks, early]
    return hooks if units is None else [*hooks, units]


def _unit_gradients(prepared: PreparedStep, gradients: StepGradients, routes: Routes | None) -> UnitGradients:
    """What adds the gradients of one call in the order of units; GradientError where the step function cannot."""
    if routes is None:
        raise GradientError("config.grad_add is 'by_unit', and without routes= units have no numbers: pass routes")
    require_addable_by_unit(gradients.reduction, gradients.config)

    def unit_of(stage: int, number: int) -> tuple[int, int]:
        routed = prepared.stages[stage]
        assert isinstance(routed, RoutedStage)  # of a call with routes
        return routed.units.home(number) or 0, routed.units.microbatch(number)

    units = [(replica, number) for replica, count in enumerate(routes.units) for number in range(count)]
    return UnitGradients(gradients.models, units, unit_of)


def _deferrals(plan: Plan, gradients: StepGradients) -> list[Callable[[], None]]:
    """One function per stage that computes the deferred weight gradients of its output layer."""
    finish = []
    for stage, model in gradients.models.items():
        tp_group = group_of(gradients.pg_collection, plan.graph.module_of(stage)[0], "tp")
        is_last = all(edge.source != stage for edge in plan.graph.stage_edges)
        finish.append(deferred_weight_gradients(gradients.config, model, is_last_stage=is_last, tp_group=tp_group))
    return finish
