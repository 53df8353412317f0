"""From the arguments of a step function to the runtime and settings of an earlier call with equal ones: a cache.

The place of this rank, the plan, the policy of gradients and the expected shapes cost about as much as two empty
microbatches. The next call compares its arguments, the options of its config and the marks of its parameters, and
derives nothing. References to models and configs are weak, as in the cache of runtimes behind it (`runtime_cache`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from attrs import define, frozen

from pipegrid.schedules.gradients.lanes import collection_of
from pipegrid.schedules.gradients.reduction import GradientPolicy, observed
from pipegrid.schedules.megatron.config import PipelineConfig, config_of, option
from pipegrid.schedules.megatron.place import Sharding, Ties, sharding_key
from pipegrid.schedules.megatron.runtime_cache import PreparedStep
from pipegrid.schedules.megatron.shapes import AnnouncedShapes, ExpectedShape
from pipegrid.schedules.megatron.stage import StageSettings
from pipegrid.schedules.runtime import MessageHook
from pipegrid.schedules.verify import Proof

_KEPT = 8  # per model: training and evaluation, each with a few numbers of microbatches

Iterators = Callable[[Any], Mapping[int, Any]]
"""The data iterator of each stage, from the argument of a call."""


class StepArguments(NamedTuple):
    """The arguments of a call that are compared as they are.

    Attributes:
        kind: the step function, or the name of its schedule.
        sizes: ``seq_length``, ``micro_batch_size`` and ``decoder_seq_length``.
    """

    kind: str
    communicator: Any
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    sizes: tuple[int | None, int | None, int | None] = (None, None, None)


class Inputs(NamedTuple):
    """The arguments that may be other objects in each call."""

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    first_val_step: bool | None
    pg_collection: Any


@frozen(eq=False)
class Derived:
    """Plan, models and iterators of a step, as a step function derives them from its arguments.

    Attributes:
        proof: proves the plan for the names and stages of tied parameters, a number of microbatches and the sharding.
        models: this rank's by stage, in the order of chunks. The config is that of the first.
        iterators: must hold no model.
        frozen: modules without gradients.
        shapes: of messages.
        interleaved: there are several chunks on each rank, and the step function knows it.
        keep: whether a later call may use all this: False where a function of the user's is part of it.
    """

    proof: Callable[[Ties, int, Sharding], Proof]
    models: Mapping[int, torch.nn.Module]
    iterators: Iterators
    frozen: tuple[str, ...] = ()
    shapes: AnnouncedShapes | ExpectedShape | None = None
    interleaved: bool = False
    keep: bool = True


@frozen(eq=False)
class StepCall:
    """A runtime and the settings of its calls, reused by calls with equal arguments."""

    prepared: PreparedStep
    policy: GradientPolicy | None  # None in an evaluation
    iterators: Iterators
    settings: Mapping[int, StageSettings]  # by stage
    syncs: bool  # the config has a no_sync_func
    early: bool  # reductions begin in the last backwards


@define(eq=False)
class _Kept:
    """A `StepCall` and the arguments that it is for."""

    call: StepCall
    arguments: StepArguments
    form: object
    given: tuple[weakref.ref[torch.nn.Module], ...]
    models: Mapping[int, weakref.ref[torch.nn.Module]]
    config: weakref.ref[Any] | None
    options: tuple[object, ...]
    modules: tuple[str, ...]
    groups: tuple[object, ...]
    marks: tuple[object, ...]

    def serves(
        self, arguments: StepArguments, form: object, given: Sequence[Any], config: Any, pg_collection: Any
    ) -> bool:
        """Whether a call with these arguments is like the one before. ``config``: that of the first of ``given``."""
        if self.arguments != arguments or self.form != form:
            return False
        for ref, model in zip(self.given, given, strict=True):
            if ref() is not model:
                return False
            if model is not given[0] and (other := config_of(model)) is not config and other != config:
                return False
        known = self.config is not None and self.config() is config
        if not known and options_of(config) != self.options:
            return False
        return _groups(pg_collection, self.modules) == self.groups and observed(given) == self.marks


_CALLS: weakref.WeakKeyDictionary[torch.nn.Module, list[_Kept]] = weakref.WeakKeyDictionary()


def kept_call(
    arguments: StepArguments, model: Any, pg_collection: Any
) -> tuple[StepCall, Mapping[int, torch.nn.Module], Any] | None:
    """The `StepCall` of an earlier call with equal arguments, its models by stage and their config; None if none."""
    form, given = _flat(model)
    if not given or not isinstance(given[0], torch.nn.Module) or type(arguments.num_microbatches) is not int:
        return None
    calls = _CALLS.get(given[0])
    if calls is None:
        return None
    config = config_of(given[0])
    for kept in calls:
        if kept.serves(arguments, form, given, config, pg_collection):
            models = {stage: ref() for stage, ref in kept.models.items()}
            return kept.call, models, config  # type: ignore[return-value]  # all live: they are among `given`
    return None


def keep(
    call: StepCall, arguments: StepArguments, model: Any, models: Mapping[int, torch.nn.Module], pg_collection: Any
) -> None:
    """Keep ``call`` for the next one with the same arguments, in place of those of other communicators."""
    form, given = _flat(model)
    kept = _CALLS.setdefault(given[0], [])
    kept[:] = [each for each in kept if each.arguments.communicator is arguments.communicator][: _KEPT - 1]
    marks = observed(given)
    if marks is None:
        return
    config = config_of(given[0])
    modules = tuple(dict.fromkeys(call.prepared.plan.graph.module_of(stage)[0] for stage in models))
    kept.insert(
        0,
        _Kept(
            call,
            arguments,
            form,
            given=tuple(map(weakref.ref, given)),
            models={stage: weakref.ref(each) for stage, each in models.items()},
            config=weakref.ref(config) if _unchanging(config) else None,
            options=options_of(config),
            modules=modules,
            groups=_groups(pg_collection, modules),
            marks=marks,
        ),
    )


def forget_call(call: StepCall) -> None:
    """Drop the calls of a runtime whose step has failed."""
    for kept in _CALLS.values():
        kept[:] = [each for each in kept if each.call.prepared is not call.prepared]


def _flat(model: Any) -> tuple[object, tuple[Any, ...]]:
    """How the argument ``model`` is nested, and its models in order."""
    if isinstance(model, torch.nn.Module):
        return "one", (model,)
    if isinstance(model, (list, tuple)):
        return len(model), tuple(model)
    if isinstance(model, Mapping):
        parts = [_flat(value) for value in model.values()]
        return tuple(zip(model, (form for form, _ in parts), strict=True)), tuple(m for _, held in parts for m in held)
    return None, ()


_VALUES = (
    "autocast_dtype",
    "calculate_per_token_loss",
    "deadline",
    "deallocate_pipeline_outputs",
    "defer_embedding_wgrad_compute",
    "enable_autocast",
    "failure_dir",
    "hidden_size",
    "microbatch_group_size_per_vp_stage",
    "monitor",
    "num_microbatches_with_partial_activation_checkpoints",
    "overlap_grad_reduce",
    "overlap_moe_expert_parallel_comm",
    "overlap_p2p_comm",
    "pipeline_dtype",
    "prefetch",
    "sequence_parallel",
    "shapes",
    "variable_seq_lengths",
)
_FUNCTIONS = ("finalize_model_grads_func", "grad_scale_func", "no_sync_func")  # only whether there is one


def options_of(config: Any) -> tuple[object, ...]:
    """The options of a config that decide how a step runs; of functions, hooks and ties only what decides it."""
    hooks = option(config, "hooks")
    return (
        tuple(option(config, name) for name in _VALUES),
        tuple(option(config, name) is not None for name in _FUNCTIONS),
        sharding_key(option(config, "shard"), option(config, "prefetch")),
        (bool(hooks), any(isinstance(hook, MessageHook) for hook in hooks)),
        tuple((tie.name, tie.stages, tuple(map(id, tie.copies))) for tie in option(config, "tied_parameters")),
    )


def _unchanging(config: Any) -> bool:
    """Whether the same config object has the same options."""
    return type(config) is PipelineConfig and (config.shard is None or isinstance(config.shard, str))


_GROUPS = ("dp", "dp_cp", "cp", "tp", "expt_dp", "expt_tp")
_groups_of = attrgetter(*_GROUPS)


def _groups(pg_collection: Any, modules: Sequence[str]) -> tuple[object, ...]:
    """The groups of the modules on this rank."""
    if pg_collection is None:
        return ()
    found = []
    for name in modules:
        collection = collection_of(pg_collection, name)
        try:
            found.append(_groups_of(collection))
        except AttributeError:
            found.append(tuple(getattr(collection, each, None) for each in _GROUPS))
    return tuple(found)
