"""What a step function derives from its arguments, once: the plan with its proof, the policy of gradients, the runtime.

Deriving them costs as much as several steps of a small model; the next call with an equal `step_key` derives nothing.
They are kept in one weak dictionary by first model: between steps it holds no reference to a model, an iterator, a
config or a hook, so a deleted model is freed at once, with all this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from attrs import define, field

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Count, Index, checked
from pipegrid.gradients.groups import group_of
from pipegrid.gradients.reduction import GradientPolicy, StepGradients, gradient_policy, required_ties, tied_stages
from pipegrid.gradients.reduction.policy import Models
from pipegrid.monitor.collectives import Waiting
from pipegrid.plans.plan import ActionKind, Plan
from pipegrid.schedules.megatron.call import (
    CHECKPOINTS,
    CallHooks,
    CallMessageHooks,
    StepCall,
    by_stage,
    flat,
    models_by_stage,
    options_of,
    require_compatible,
    require_fit,
    require_forward_step,
    step_key,
)
from pipegrid.schedules.megatron.config import (
    PipelineConfig,
    aux_loss_scalers,
    checked_option,
    config_of,
    option,
    require_options,
)
from pipegrid.schedules.megatron.counts import get_tensor_shapes
from pipegrid.schedules.megatron.place import Place, PlanNeeds, StepKind, checkpointed_on, forwards_on, sharding_key
from pipegrid.schedules.megatron.shapes import AnnouncedShapes, announced_shapes, sent_shape
from pipegrid.schedules.megatron.stage import MegatronStage, RoutedSkippingStage, RoutedStage, SkippingStage, takes_part
from pipegrid.schedules.megatron.units.batches import UnitBatches
from pipegrid.schedules.megatron.units.routes import (
    StageUnits,
    planned_routes,
    replica_of,
    require_equal_routes,
    units_per_replica,
)
from pipegrid.schedules.runtime import Hook, MessageHook, PipelineError, PipelineRuntime, position_of

_KEPT = 8  # per model: training and evaluation, each with a few numbers of microbatches, or routes

_BACKWARDS = (ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.REDUCE_GRAD)


def last_backwards(plan: Plan, position: int) -> dict[int, int]:
    """The stage whose gradients are whole, by the place of the last action that can add to them; in the plan's order.

    By its place in `Plan.actions`: all ``REDUCE_GRAD`` of a stage are equal. Where replicas differ, the ``REDUCE`` over
    them comes after their last backwards.
    """
    kinds = _BACKWARDS if plan.num_replicas == 1 else {ActionKind.REDUCE}
    last = {
        action.stage: place
        for place, action in enumerate(plan.actions(position))
        if action.kind in kinds and action.group is None
    }
    return {place: stage for stage, place in sorted(last.items(), key=lambda item: item[1])}


@define(eq=False)
class ModelState:
    """What the prepared steps of one model share.

    ``compared``: how this rank finishes gradients, by module, as the replicas have compared it; None before. For all
    steps: where one of the replicas alone has prepared another, its comparison would meet a reduction of the others.
    """

    compared: Mapping[str, object] | None = None
    running: PreparedStep | None = None
    _config: weakref.ref[PipelineConfig] | None = field(default=None, init=False)
    _options: tuple[object, ...] = field(default=(), init=False)

    def options_of(self, config: Any) -> tuple[object, ...]:
        """`options_of` a config, once where it is the last one and cannot change."""
        if type(config) is not PipelineConfig or isinstance(config.shard, dict):
            return options_of(config)
        if self._config is None or self._config() is not config:
            self._config, self._options = weakref.ref(config), options_of(config)
        return self._options


_STEPS: weakref.WeakKeyDictionary[torch.nn.Module, list[PreparedStep]] = weakref.WeakKeyDictionary()
"""By the first model of a call, the latest used first."""


def prepared_step(kind: StepKind, call: StepCall) -> tuple[PreparedStep, Any]:
    """The prepared step of an earlier call with an equal key, or a new one; and the config of the first model.

    Of each model the last used are kept, on one communicator: a model trains through one at a time.
    """
    nesting, models = flat(call.model)
    first = models[0] if models else None
    kept = _STEPS.get(first, []) if isinstance(first, torch.nn.Module) else []
    if kept:
        config, data = config_of(first), call.data_iterator
        by_unit = isinstance(data, (UnitBatches, Mapping, list, tuple)) and _has_unit_batches(data)
        try:
            key = step_key(kind, call, nesting, models, config, by_unit, *kept[0].state.options_of(config))
        except TypeError:
            require_options(config)
            raise
        for prepared in kept:
            if prepared.key == key:
                kept.remove(prepared)
                kept.insert(0, prepared)
                return prepared, config
    kept = [prepared for prepared in kept if prepared.communicator is call.p2p_communicator][: _KEPT - 1]
    prepared = PreparedStep(kind, call, kept[0].state if kept else ModelState())
    _STEPS[models[0]] = [prepared, *kept]
    return prepared, config_of(models[0])


def _has_unit_batches(data_iterator: Any) -> bool:
    """Whether an argument ``data_iterator`` is `UnitBatches`, of one stage at least."""
    if isinstance(data_iterator, (Mapping, list, tuple)):
        each = data_iterator.values() if isinstance(data_iterator, Mapping) else data_iterator
        return any(map(_has_unit_batches, each))
    return isinstance(data_iterator, UnitBatches)


def describe_steps(model: Any) -> str:
    """`PipelineRuntime.describe` of each plan that step functions have run with ``model``, an argument of theirs."""
    kept = [reversed(_STEPS.get(each, ())) for each in flat(model)[1]]
    return "\n\n".join(prepared.runtime.describe() for each in kept for prepared in each)


def attached_losses(model: Any) -> list[str]:
    """What adds to the gradients of ``model`` beside the main loss: autograd functions by name, and ``WithLoss``."""
    kept = [prepared for each in flat(model)[1] for prepared in _STEPS.get(each, ())]
    stages = [stage for prepared in kept for stage in prepared.stages.values()]
    return list(dict.fromkeys(name for stage in stages for name in stage.attached.names))


class PreparedStep:
    """A proved plan, its runtime and stages, and the policy of gradients: for all calls with an equal key.

    Attributes:
        state: shared with the other steps of the model.
        routes: where replicas differ; None where they act alike.
        actor: the row of the plan that this rank runs.
        policy: of gradients; None in an evaluation. Neighbours compare its ``agreement``.
        hooked: calls have hooks, of the config or of the step function.
        watches: attached losses are looked for; ``attaches``: there are scalers of them.
        expected: the shape of sent messages, where the arguments fix it.
        checkpoints: ``forward_step_func`` has a third argument.
        early: reductions begin in the last backwards.
        by_unit: gradients are added in the order of units.
    """

    def __init__(self, kind: StepKind, call: StepCall, state: ModelState) -> None:
        self.state, self.communicator = state, call.p2p_communicator
        self.place = kind.place(kind, call.p2p_communicator, call.model)
        models = models_by_stage(kind, self.place, call.model)
        by_stage(self.place.held, call.data_iterator, "data_iterator")  # checked here already: before the first message
        config = config_of(next(iter(models.values())))
        require_options(config)
        routes = self.routes = None if call.routes is None or call.routes.is_identity else call.routes
        rule = Count if routes is None else Index
        num_microbatches = checked(call.num_microbatches, rule, "num_microbatches", StepArgumentError)
        self.checkpoints = checked_option(config, CHECKPOINTS) is not None
        require_forward_step(call.forward_step_func, checkpoints=self.checkpoints)
        require_compatible(kind, self.place, call, models, config)
        self.waiting = Waiting(option(config, "deadline"), option(config, "monitor"), of_step=True)
        ties = () if call.forward_only else required_ties(models=[*models.values()], config=config, stages=list(models))
        sharding = sharding_key(option(config, "shard"), checked_option(config, "prefetch"))
        by_unit = _has_unit_batches(call.data_iterator)
        replica = replica_of(call, self.place) if by_unit or call.routes is not None else None
        planned = None if routes is None else planned_routes(routes, replica or 0, num_ties=len(ties))
        most = num_microbatches if planned is None else max(planned.units)
        proof = kind.proof(kind, self.place, PlanNeeds(most, tied_stages(ties), sharding, planned), config)
        self.plan = plan = proof.plan
        if planned is not None and planned.moves:  # lanes to other replicas are opened by these routes
            require_equal_routes(call.pg_collection, self.place, models, planned, self.waiting)
        require_fit(models, config, plan.graph, plan.num_slices)
        number = None if planned is None else 0 if planned.num_replicas == 1 else replica
        self.actor = position_of(plan, models, number)
        self.policy = None if call.forward_only else self._policy(call, models, config)
        self.agreement = "" if self.policy is None else self.policy.agreement
        self.syncs_parameters = option(config, "param_sync_func") is not None
        self.syncs_gradients = option(config, "grad_sync_func") is not None
        self.defers = bool(option(config, "defer_embedding_wgrad_compute"))
        self.attaches = bool(aux_loss_scalers(config))
        self.watches = self.policy is not None and option(config, "aux_loss_scalers") is not None
        self.autocasts = bool(option(config, "enable_autocast"))
        self.by_unit = self.policy is not None and checked_option(config, "grad_add") == "by_unit"
        self.early = not self.by_unit and self._starts_early(call, models, config)
        self.last_backwards: Mapping[int, int] = last_backwards(plan, self.actor)
        sized = call.seq_length is not None and option(config, "hidden_size") is not None
        of_one_module = plan.num_slices == 1 and len(plan.graph.modules) == 1
        self.expected = sent_shape(**_sizes(call, self.place, config)) if sized and of_one_module else None
        self.stages = self._stages(call, models, config, by_unit, replica)
        self.ties = tuple(tie.name for tie in ties)
        self._config: Any = None
        self._reduce_tie: Callable[[str], None] = _nothing
        hooks = option(config, "hooks")
        self._hooks = CallMessageHooks() if any(isinstance(one, MessageHook) for one in hooks) else CallHooks()
        own = self.attaches or self.early or self.by_unit or option(config, "no_sync_func") is not None
        self.hooked = bool(hooks) or (self.policy is not None and own)
        self.runtime = PipelineRuntime(
            proof,
            self.stages,
            call.p2p_communicator,
            replica=number,
            hooks=[self._hooks] if self.hooked else [],
            reducers=self._reducers(),
            deallocate_outputs=bool(option(config, "deallocate_pipeline_outputs")),
            clone_outputs=bool(option(config, "clone_outputs")),
            deadline=option(config, "deadline"),
            loss_scale=None if option(config, "grad_scale_func") is None else partial(self._call, "grad_scale_func"),
            monitor=option(config, "monitor"),
            failure_dir=option(config, "failure_dir"),
        )
        if option(config, "pair_func") is not None:
            self.runtime.register(ActionKind.F_B, partial(self._call, "pair_func"))
        config = config_of(flat(call.model)[1][0])
        self.key = step_key(kind, call, *flat(call.model), config, by_unit, *state.options_of(config))

    def _policy(self, call: StepCall, models: Models, config: Any) -> GradientPolicy:
        routes, position = self.routes, self.actor % self.plan.positions_each
        return gradient_policy(
            models=models,
            config=config,
            communicator=call.p2p_communicator,
            graph=self.plan.graph,
            pg_collection=call.pg_collection,
            frozen=self.place.frozen,
            replicas=None if routes is None else (routes.num_replicas, len(routes.living(position))),
        )

    def _starts_early(self, call: StepCall, models: Models, config: Any) -> bool:
        if self.policy is None:
            return False
        reduction = self.policy.of_step(models, config, call.pg_collection, self.waiting).reduction
        return (
            reduction is not None
            and reduction.communicates
            and (self.routes is None or self.plan.num_replicas > 1)  # else nothing says when all replicas come to it
            and bool(option(config, "overlap_grad_reduce"))
            and not option(config, "defer_embedding_wgrad_compute")  # deferred gradients come after the last backward
        )

    def _stages(
        self, call: StepCall, models: Models, config: Any, by_unit: bool, replica: int | None
    ) -> dict[int, MegatronStage]:
        plan, factors = self.plan, {} if self.policy is None else self.policy.loss_factors
        checkpoints: int | None = option(config, CHECKPOINTS)
        stages: dict[int, MegatronStage] = {}
        for stage, model in models.items():
            skips, order = takes_part(plan.graph, stage, model), tuple(forwards_on(plan, self.actor, stage))
            kind: Callable[..., MegatronStage] = SkippingStage if skips else MegatronStage
            if by_unit or call.routes is not None:
                units = StageUnits(self.place.module_of(stage), replica, plan.routes, order)
                kind = partial(RoutedSkippingStage if skips else RoutedStage, units=units)
            stages[stage] = kind(
                graph=plan.graph,
                stage=stage,
                first=order[0] if order else None,
                divisor=plan.num_microbatches if self.routes is None else units_per_replica(self.routes),
                num_slices=plan.num_slices,
                cp_group=group_of(call.pg_collection, self.place.module_of(stage), "cp"),
                forward_only=call.forward_only,
                collect_non_loss_data=call.collect_non_loss_data,
                per_token=bool(option(config, "calculate_per_token_loss")),
                weighted=self.policy is not None and self.policy.weighted,
                loss_factor=factors.get(stage, 1.0),
                checkpointed=None if checkpoints is None else checkpointed_on(plan, self.actor, stage, checkpoints),
            )
        return stages

    def announced(self, call: StepCall, config: Any) -> AnnouncedShapes:
        """Shapes of messages by the ``adjust_tensor_shapes_fn`` of ``call``, which has one."""
        assert call.adjust_tensor_shapes_fn is not None
        return announced_shapes(call.adjust_tensor_shapes_fn, get_tensor_shapes(**_sizes(call, self.place, config)))

    @contextmanager
    def running(self, config: Any) -> Iterator[None]:
        """Inside: a step with ``config``. After it all references of the call are dropped, and after a failure this.

        PipelineError inside a step, such as that of another thread, which goes on.
        """
        state = self.state
        if state.running is not None:
            where = state.running.runtime.where
            raise PipelineError(f"a step function inside a step, at {where}: a model runs one at a time")
        state.running, self._config = self, config
        try:
            yield
        except BaseException:  # the next call prepares another
            for kept in _STEPS.values():
                kept[:] = [each for each in kept if each is not self]
            raise
        finally:
            for stage in self.stages.values():
                stage.end()
            state.running, self._config, self._hooks.current, self._reduce_tie = None, None, (), _nothing

    def gradients(self, call: StepCall, models: Models, config: Any) -> StepGradients:
        """Those of a step of ``call``: of the caller's last one, where that was run by this and reduces alike."""
        assert self.policy is not None  # of a step that trains
        last = call.last
        known = None if last is None or last.prepared is not self else last.gradients
        if known is not None and known.config is config and known.pg_collection is call.pg_collection:
            known.begin()
            return known
        gradients = self.policy.of_step(models, config, call.pg_collection, self.waiting)
        if last is not None:
            lasts = gradients.lasts and isinstance(config, PipelineConfig)
            last.prepared, last.gradients = self, gradients if lasts else None
        return gradients

    def bind(self, hooks: Sequence[Hook], reduce_tie: Callable[[str], None] | None = None) -> None:
        """Store the hooks of a call, and its effect of a ``REDUCE`` of a tied parameter, by name."""
        self._hooks.current, self._reduce_tie = hooks, reduce_tie or _nothing

    def _reduce(self, tie: str) -> None:
        self._reduce_tie(tie)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the function ``name`` of the running call's config."""
        return option(self._config, name)(*arguments)

    def _reducers(self) -> dict[int | str, Callable[[], None]]:
        """The effects of the plan's reductions; those over replicas begin behind `last_backwards`."""
        found: dict[int | str, Callable[[], None]] = {name: partial(self._reduce, name) for name in self.ties}
        for action in self.plan.actions(self.actor):
            if action.kind is ActionKind.REDUCE and action.group is None:
                found[action.stage] = partial(_nothing, action.stage)
        return found


def _nothing(_: int | str) -> None:
    """A reduction that its hook begins, or that an evaluation does not have."""


def _sizes(call: StepCall, place: Place, config: Any) -> dict[str, Any]:
    """Arguments of `get_tensor_shapes`."""
    module = place.modules[0]
    return {
        "seq_length": call.seq_length,
        "micro_batch_size": call.micro_batch_size,
        "decoder_seq_length": call.decoder_seq_length,
        "config": config,
        "tp_group": group_of(call.pg_collection, module, "tp"),
        "cp_group": group_of(call.pg_collection, module, "cp"),
    }
