"""One step of the step functions: from models and iterators by stage to the infos of the losses."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import StepArgumentError
from pipegrid.schedules.gradients import deferred_weight_gradients, fresh_gradients
from pipegrid.schedules.gradients.lanes import collection_of
from pipegrid.schedules.gradients.reduction import (
    EarlyReduction,
    GradientPolicy,
    GradientReduction,
    gradient_policy,
    require_equal_replicas,
    required_ties,
    tied_stages,
)
from pipegrid.schedules.megatron.call_cache import (
    Derived,
    Inputs,
    StepArguments,
    StepCall,
    forget_call,
    keep,
    kept_call,
)
from pipegrid.schedules.megatron.config import checked_option, config_of, option, unwrapped_attribute
from pipegrid.schedules.megatron.forward import numbered_modules
from pipegrid.schedules.megatron.no_sync import no_sync_hooks, sync_gradients, sync_parameters
from pipegrid.schedules.megatron.place import sharding_key
from pipegrid.schedules.megatron.runtime_cache import PreparedStep, forget, prepared_step
from pipegrid.schedules.megatron.stage import StageCall, StageSettings
from pipegrid.schedules.plan import Plan
from pipegrid.schedules.runtime import Hook
from pipegrid.topology.fields import Count, checked, shown


def single(value: Any, name: str) -> Any:
    """``value``, or the one item of a list or tuple; other sequences (``range(100)``, a data set) are values."""
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) != 1:
        raise StepArgumentError(f"{name} is a list of {len(value)}: without interleaving a rank has one chunk")
    return value[0]


def run_step(derive: Callable[[], Derived], arguments: StepArguments, inputs: Inputs) -> list[Any]:
    """Run one step. What an earlier call with the same arguments has derived is used again, else ``derive`` is called.

    The config is the first model's.
    """
    forward_step_func, data_iterator, model, first_val_step, pg_collection = inputs
    kept = kept_call(arguments, model, pg_collection)
    if kept is None:
        derived = derive()
        models, config = derived.models, config_of(next(iter(derived.models.values())))
        data_iterators = derived.iterators(data_iterator)
        call = _step_call(derived, arguments, config, forward_step_func, pg_collection)
        if derived.keep:
            keep(call, arguments, model, models, pg_collection)
    else:
        call, models, config = kept
        data_iterators = call.iterators(data_iterator)
        _require_forward_step(forward_step_func, checkpoints=option(config, _CHECKPOINTS) is not None)
    prepared, policy = call.prepared, call.policy
    prepared.require_idle()
    deferred: Sequence[Callable[[], None]] = ()
    reduction = None
    if policy is not None:
        if option(config, "defer_embedding_wgrad_compute"):
            deferred = _deferrals(prepared.plan, config, models, pg_collection)
        sync_parameters(config, models)
        reduction = policy.reduction(models, config, pg_collection)
    try:
        with contextlib.ExitStack() as outside:
            prepared.begin(config, _hooks(call, config, models, reduction, outside), deferred)
            if reduction is None and prepared.ties:  # a REDUCE sums what this call adds
                copies = [copy for tie in option(config, "tied_parameters") for copy in tie.copies]
                outside.enter_context(fresh_gradients(torch.nn.ParameterList(copies)))
            has_slices = prepared.plan.num_slices > 1
            for stage, each in models.items():
                settings, data = call.settings[stage], data_iterators[stage]
                prepared.stages[stage].begin(
                    StageCall(settings, forward_step_func, data, each, config, first_val_step, has_slices)
                )
            if policy is None:
                prepared.runtime.eval()
            else:
                _train(prepared, policy, reduction, config, models, pg_collection, leave=outside.close)
            return [info for stage in prepared.stages.values() for info in stage.infos]
    except BaseException:
        forget(prepared)
        forget_call(call)
        raise
    finally:
        prepared.end()


def _hooks(
    call: StepCall,
    config: Any,
    models: Mapping[int, Any],
    reduction: GradientReduction | None,
    outside: contextlib.ExitStack,
) -> Sequence[Hook]:
    """The hooks of one call; ``outside`` closes what they have opened."""
    hooks: Sequence[Hook] = option(config, "hooks")
    if call.syncs:
        hooks = [*hooks, *no_sync_hooks(call.prepared.plan, call.prepared.position, config, models, outside)]
    if reduction is not None and call.early:
        early = EarlyReduction(reduction, call.prepared.last_backwards, models)
        outside.callback(early.close)
        hooks = [*hooks, early]
    return hooks


def _step_call(
    derived: Derived, arguments: StepArguments, config: Any, forward_step_func: Callable[..., Any], pg_collection: Any
) -> StepCall:
    """Check the arguments against each other and the config, prove the plan, and build its runtime."""
    models, forward_only = derived.models, arguments.forward_only
    num_microbatches = checked(arguments.num_microbatches, Count, "num_microbatches", StepArgumentError)
    _require_forward_step(forward_step_func, checkpoints=checked_option(config, _CHECKPOINTS) is not None)
    _require_compatible(derived, arguments, config)
    ties = () if forward_only else required_ties(models=list(models.values()), config=config, stages=list(models))
    sharding = sharding_key(option(config, "shard"), checked_option(config, "prefetch"))
    proof = derived.proof(tied_stages(ties), num_microbatches, sharding)
    graph = proof.plan.graph
    _require_in_place(models, graph)
    if proof.plan.num_slices > 1:
        _require_sliced(models, config, proof.plan.num_slices)
    policy = None
    if not forward_only:
        policy = gradient_policy(
            models=models,
            config=config,
            communicator=arguments.communicator,
            graph=graph,
            pg_collection=pg_collection,
            frozen=derived.frozen,
        )
    syncs = policy is not None and option(config, "no_sync_func") is not None
    reduction = None if policy is None else policy.reduction(models, config, pg_collection)
    early = (
        reduction is not None
        and reduction.communicates
        and bool(option(config, "overlap_grad_reduce"))
        and not option(config, "defer_embedding_wgrad_compute")  # deferred gradients come after the last backward
    )
    settings = {
        stage: StageSettings(
            num_microbatches,
            cp_group=_group(pg_collection, graph.module_of(stage)[0], "cp"),
            forward_only=forward_only,
            collect_non_loss_data=arguments.collect_non_loss_data,
            shapes=derived.shapes,
            per_token=bool(option(config, "calculate_per_token_loss")),
            loss_factor=1.0 if policy is None else policy.loss_factors.get(stage, 1.0),
            partly_checkpointed=option(config, _CHECKPOINTS),
        )
        for stage in models
    }
    prepared = prepared_step(proof, arguments.communicator, models, config, ties, hooked=syncs or early)
    return StepCall(prepared, policy, derived.iterators, settings, syncs, early)


def _require_in_place(models: Mapping[int, Any], graph: ModuleGraph) -> None:
    """Raise StepArgumentError for a stage of a layout (``stage_of_layout``) that the communicator places otherwise."""
    for stage, model in models.items():
        own: tuple[int, int] | None = unwrapped_attribute(model, "stage_of_layout")
        module, number = graph.module_of(stage)
        if own is None or own == (number, graph.depth(module)):
            continue
        raise StepArgumentError(
            f"the model of stage {number} is stage {own[0]} of the {own[1]} of its layout, and the communicator has "
            f"{graph.depth(module)} stages of module {module!r}, pp x chunks. Give a layout with as many stages, and "
            "communicator and models one placement, that of the schedule: stage_places(schedule, pp)"
        )


def _require_compatible(derived: Derived, arguments: StepArguments, config: Any) -> None:
    """Raise StepArgumentError for arguments and options of the config that exclude each other."""
    if option(config, "overlap_moe_expert_parallel_comm") and not derived.interleaved:
        raise StepArgumentError("config.overlap_moe_expert_parallel_comm is set, which only interleaving has")
    if arguments.collect_non_loss_data and not arguments.forward_only:
        raise StepArgumentError("collect_non_loss_data has no loss to differentiate; set forward_only=True as well")
    if option(config, "check"):
        for stage, model in derived.models.items():
            if unwrapped_attribute(model, "proofs") is None:
                raise StepArgumentError(
                    f"config.check is set, and the {type(model).__name__} of stage {stage} is not made by "
                    "`pipeline_stage` of pipegrid.training: there is no whole model to compare with; leave check "
                    "out of its config"
                )


def _require_sliced(models: Mapping[int, Any], config: Any, num_slices: int) -> None:
    """Raise StepArgumentError for a model, or an option, that does not work with slices."""
    for name in (_CHECKPOINTS, "no_sync_func", "defer_embedding_wgrad_compute", "shard"):
        value = option(config, name)
        if value is not None and value is not False:
            raise StepArgumentError(
                f"config.{name} is set, which counts whole microbatches: num_slices is {num_slices}"
            )
    for stage, model in models.items():
        if not numbered_modules(model, "current_slice"):
            raise StepArgumentError(
                f"num_slices is {num_slices}, and no module of stage {stage} has a current_slice, by which attention "
                "sees the earlier slices; set current_slice = None on each attention module (or on any)"
            )


def _train(
    prepared: PreparedStep,
    policy: GradientPolicy,
    reduction: GradientReduction | None,
    config: Any,
    models: Mapping[int, Any],
    pg_collection: Any,
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
        policy.finish(
            {number: stage.num_tokens for number, stage in prepared.stages.items()},
            reduction,
            prepared.waiting,
            models=models,
            config=config,
            pg_collection=pg_collection,
        )
        if option(config, "check_replicas"):
            collections = {name: collection_of(pg_collection, name) for name in policy.reduced}
            require_equal_replicas(policy.modules(models), collections, waiting=prepared.waiting)

    def compare() -> None:
        policy.compare(models, reduction, pg_collection, config, prepared.waiting)
        prepared.compared = True

    start = None if prepared.compared else compare
    if reduction is None:
        prepared.runtime.step(start=start, finish=finish, agree=policy.agreement)
        return
    with fresh_gradients(reduction.modules):
        prepared.runtime.step(start=start, finish=finish, agree=policy.agreement)


_CHECKPOINTS = "num_microbatches_with_partial_activation_checkpoints"
_FITTING: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Functions whose signature was found right, by how many arguments they are called with."""


def _require_forward_step(forward_step_func: Any, *, checkpoints: bool) -> None:
    """Raise unless the function accepts two arguments, or three with partial activation checkpoints."""
    arguments = ("data_iterator", "model", "checkpoint_activations_microbatch")[: 3 if checkpoints else 2]
    function = getattr(forward_step_func, "__func__", forward_step_func)  # a bound method is a new object each time
    try:
        known = _FITTING.get(function)
    except TypeError:  # a callable without weak references
        known = None
    if known == len(arguments):
        return
    try:
        inspect.signature(forward_step_func).bind(*arguments)
    except ValueError:  # a callable in C without a signature
        return
    except TypeError as error:
        raise StepArgumentError(
            f"forward_step_func is {shown(forward_step_func)}, and this config calls it as f({', '.join(arguments)}): "
            f"{error}"
        ) from None
    with contextlib.suppress(TypeError):
        _FITTING[function] = len(arguments)


def require_one_config(models: Mapping[int, Any]) -> None:
    """Raise StepArgumentError unless all models on this rank have the same config."""
    first, *others = [config_of(model) for model in models.values()]
    if any(other is not first and other != first for other in others):
        raise StepArgumentError("the models on this rank have different configs; a step has one")


def _deferrals(plan: Plan, config: Any, models: Mapping[int, Any], pg_collection: Any) -> list[Callable[[], None]]:
    """One function per stage that computes the deferred weight gradients of its output layer."""
    finish = []
    for stage, model in models.items():
        tp_group = _group(pg_collection, plan.graph.module_of(stage)[0], "tp")
        is_last = all(edge.source != stage for edge in plan.graph.stage_edges)
        finish.append(deferred_weight_gradients(config, model, is_last_stage=is_last, tp_group=tp_group))
    return finish


def _group(pg_collection: Any, module: str, name: str) -> Any:
    return None if pg_collection is None else getattr(collection_of(pg_collection, module), name, None)
