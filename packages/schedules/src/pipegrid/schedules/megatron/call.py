"""The arguments of one call of a step function, which of them exclude each other, and the key of what it needs.

Calls with equal keys share one `pipegrid.schedules.megatron.prepared.PreparedStep`, so the key has everything that
decides how a step runs: arguments, options of the config, process groups, and what is read off the parameters.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import shown
from pipegrid.core.graph import ModuleGraph
from pipegrid.gradients.groups import collections_by_name
from pipegrid.gradients.reduction import StepGradients, observed
from pipegrid.plans.generators import SCHEDULES, find_schedule
from pipegrid.plans.plan import Action, Routes
from pipegrid.schedules.megatron.config import (
    FUNCTIONS,
    OF_MEGATRON,
    aux_loss_scalers,
    config_of,
    option,
    unwrapped_attribute,
)
from pipegrid.schedules.megatron.forward import modules_with
from pipegrid.schedules.megatron.place import INTERLEAVED, NO_PIPELINE, Place, StepKind, sharding_key
from pipegrid.schedules.runtime import Hook, MessageHook

CHECKPOINTS = "num_microbatches_with_partial_activation_checkpoints"


@define(eq=False)
class LossSums:
    """Sums over the job of what the losses of a step tell, started beside its backwards.

    Attributes:
        start: starts to add up what all ranks have found, from the ``info`` of each loss of this one; what it returns
            waits for the sums: float64, of which the second is that of the tokens.
        early: start behind the last forward of this rank and the send of its output; else behind its last backward.
        begun: `begin` was called.
    """

    start: Callable[[list[Any]], Callable[[], torch.Tensor]]
    early: bool
    begun: bool = field(default=False, init=False)
    _wait: Callable[[], torch.Tensor] | None = field(default=None, init=False)
    _found: torch.Tensor | None = field(default=None, init=False)

    def begin(self, infos: list[Any]) -> None:
        """Start; once."""
        self.begun, self._wait = True, self.start(infos)

    def wait(self) -> torch.Tensor:
        """The sums, which have been started."""
        if self._found is None:
            assert self._wait is not None  # `begin` comes before
            self._found = self._wait()
        return self._found

    def tokens(self) -> torch.Tensor:
        """The tokens of the job."""
        return self.wait()[1]


@define(eq=False)
class LastStep:
    """What a caller that holds its models and a `PipelineConfig` keeps of the last step that has trained them.

    Attributes:
        prepared: what the step was run by.
        gradients: of the models, for a step that is run by the same and finds nothing changed in them.
    """

    prepared: object = field(default=None, init=False)
    gradients: StepGradients | None = field(default=None, init=False)


@frozen(eq=False, kw_only=True)
class StepCall:
    """The arguments of one call, under the names that the step functions have for them.

    ``batch``: see `PipelineRuntime.step`; ``sums`` and ``last``: see `forward_backward_with_schedule`.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int | None = None
    micro_batch_size: int | None = None
    decoder_seq_length: int | None = None
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None
    p2p_communicator: Any
    pg_collection: Any
    routes: Routes | None = None
    force_all_reduce: bool | None = False
    batch: str | None = None
    sums: LossSums | None = None
    last: LastStep | None = None


def step_key(
    kind: object, call: StepCall, nesting: object, models: tuple[Any, ...], config: Any, *options: object
) -> tuple[object, ...]:
    """What decides how ``call`` runs: plain values, in which models are weak references.

    ``nesting``: of its ``models`` (`flat`); ``config``: of the first, with its ``options`` (`options_of`).
    """
    return (
        kind,
        call.p2p_communicator,  # compared by identity
        (type(call.num_microbatches), call.num_microbatches),  # because True == 1
        call.routes,
        call.forward_only,
        call.collect_non_loss_data,
        (call.seq_length, call.micro_batch_size, call.decoder_seq_length),
        call.adjust_tensor_shapes_fn is not None,  # which each call asks anew
        nesting,
        tuple(map(weakref.ref, models)),
        (len(models) == 1 or have_one_config(models), bool(aux_loss_scalers(config)), *options),
        () if call.pg_collection is None else _groups(call.pg_collection),
        tuple([vars(model).get("stage_of_layout") for model in models]),  # a module is slow to say what it lacks
        observed(models),  # what the gradient policy reads off the parameters
    )


def have_one_config(models: Sequence[Any]) -> bool:
    """Whether all ``models`` have the same config, or equal ones."""
    configs = [config_of(model) for model in models]
    return all(each is configs[0] or each == configs[0] for each in configs[1:])


def flat(model: Any) -> tuple[object, tuple[Any, ...]]:
    """How the argument ``model`` is nested, and its models in order."""
    if isinstance(model, (list, tuple)):
        return len(model), tuple(model)
    if isinstance(model, torch.nn.Module) or not isinstance(model, Mapping):
        return "one", (model,)
    forms: list[tuple[Any, object]] = []
    models: list[Any] = []
    for name, value in model.items():
        form, held = flat(value)
        forms.append((name, form))
        models += held
    return tuple(forms), tuple(models)


def by_stage(held: Mapping[str, Sequence[int]], value: Any, name: str) -> dict[int, Any]:
    """The argument ``name`` by stage: an entry of a mapping by module, or one object for all stages of this rank.

    Of a module with several stages on this rank (``held``) it is a list with one item for each, or None; else
    StepArgumentError. Of a module with one a list or tuple of one is its item; other sequences are values.
    """
    by_module = value if isinstance(value, Mapping) else dict.fromkeys(held, value)
    if set(by_module) != set(held):
        raise StepArgumentError(f"{name} has entries for {sorted(by_module)}; this rank runs modules {sorted(held)}")
    found: dict[int, Any] = {}
    for module, stages in held.items():
        item = by_module[module]
        if isinstance(item, (list, tuple)) and len(item) == len(stages):
            found |= dict(zip(stages, item, strict=True))
        elif item is None or (len(stages) == 1 and not isinstance(item, (list, tuple))):
            found |= dict.fromkeys(stages, item)
        elif len(stages) == 1:
            raise StepArgumentError(f"{name} is a list of {len(item)}: without interleaving a rank has one chunk")
        else:
            given = f"a list of {len(item)}" if isinstance(item, (list, tuple)) else type(item).__name__
            raise StepArgumentError(
                f"this rank runs {len(stages)} stages of module {module!r}, and {name} is {given}; give a list "
                "with one for each, in the order of stages"
            )
    return dict(sorted(found.items()))


def models_by_stage(kind: StepKind, place: Place, model: Any) -> dict[int, Any]:
    """The argument ``model`` of a call by stage; those of a schedule have one config, else that of the first counts."""
    if not kind.several and len(place.stages) > 1 and not isinstance(model, Mapping):
        raise StepArgumentError(f"this rank runs the modules {list(place.modules)}; give model as a dict by module")
    models = by_stage(place.held, model, "model")
    if kind != INTERLEAVED and not have_one_config(list(models.values())):
        raise StepArgumentError("the models on this rank have different configs; a step has one")
    return models


_FITTING: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Functions whose signature fits, by how many arguments they are called with."""


def require_forward_step(forward_step_func: Any, *, checkpoints: bool) -> None:
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


def require_fit(models: Mapping[int, Any], config: Any, graph: ModuleGraph, num_slices: int) -> None:
    """Raise StepArgumentError for a stage of a layout (``stage_of_layout``) that the communicator places otherwise.

    With slices also for a model, or an option, that does not work with them.
    """
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
    if num_slices == 1:
        return
    for name in (CHECKPOINTS, "no_sync_func", "defer_embedding_wgrad_compute", "shard"):
        value = option(config, name)
        if value is not None and value is not False:
            raise StepArgumentError(f"config.{name} is set, which counts whole microbatches: {num_slices=}")
    for stage, model in models.items():
        if not modules_with(model.modules(), "current_slice")["current_slice"]:
            raise StepArgumentError(
                f"num_slices is {num_slices}, and no module of stage {stage} has a current_slice, by which attention "
                "sees the earlier slices; set current_slice = None on each attention module (or on any)"
            )


def require_compatible(kind: StepKind, place: Place, call: StepCall, models: Mapping[int, Any], config: Any) -> None:
    """Raise StepArgumentError for arguments and options of the config that exclude each other."""
    if call.adjust_tensor_shapes_fn is not None:
        if kind == NO_PIPELINE:
            raise StepArgumentError("adjust_tensor_shapes_fn adjusts messages; without a pipeline there are none")
        if len(place.graph.modules) > 1:
            raise StepArgumentError(
                "adjust_tensor_shapes_fn has one list of shapes, and the modules of a graph have one each; neighbours "
                "agree on shapes without it"
            )
    if option(config, "overlap_moe_expert_parallel_comm"):
        known = find_schedule(kind.schedule)
        if not known.pairs or kind.num_slices > 1:
            paired = ", ".join(name for name, other in SCHEDULES.items() if other.pairs)
            raise StepArgumentError(
                f"config.overlap_moe_expert_parallel_comm is set, and {known.name} has no pairs; these do: {paired}"
            )
    if option(config, "weighted_microbatches") and not option(config, "calculate_per_token_loss"):
        raise StepArgumentError("config.weighted_microbatches says what calculate_per_token_loss counts; set both")
    if call.collect_non_loss_data and not call.forward_only:
        raise StepArgumentError("collect_non_loss_data has no loss to differentiate; set forward_only=True as well")
    if option(config, "check"):
        for stage, model in models.items():
            if unwrapped_attribute(model, "proofs") is None:
                raise StepArgumentError(
                    f"config.check is set, and the {type(model).__name__} of stage {stage} is not made by "
                    "`pipeline_stage` of pipegrid.training: there is no whole model to compare with; leave check "
                    "out of its config"
                )


_VALUES = (
    "autocast_dtype",
    "calculate_per_token_loss",
    "clone_outputs",
    "deadline",
    "deallocate_pipeline_outputs",
    "defer_embedding_wgrad_compute",
    "enable_autocast",
    "failure_dir",
    "grad_add",
    "hidden_size",
    "microbatch_group_size_per_vp_stage",
    "monitor",
    CHECKPOINTS,
    "overlap_grad_reduce",
    "overlap_moe_expert_parallel_comm",
    "overlap_p2p_comm",
    "pipeline_dtype",
    "sequence_parallel",
    "shapes",
    "variable_seq_lengths",
    "weighted_microbatches",
)


def options_of(config: Any) -> tuple[object, ...]:
    """The options of a config that decide how a step runs.

    Of functions and hooks only whether there are any: a call uses those of its own config.
    """
    hooks = option(config, "hooks")
    return (
        *[option(config, name) for name in _VALUES],
        *[option(config, name) is not None for name in FUNCTIONS],
        *[getattr(config, name, None) for name in OF_MEGATRON],
        sharding_key(option(config, "shard"), option(config, "prefetch")),
        (bool(hooks), any(isinstance(hook, MessageHook) for hook in hooks)),
        tuple((tie.name, tie.stages, tuple(map(id, tie.copies))) for tie in option(config, "tied_parameters")),
    )


_GROUPS = ("dp", "dp_cp", "cp", "tp", "expt_dp", "expt_tp")


def _groups(pg_collection: Any) -> tuple[object, ...]:
    by_name = collections_by_name(pg_collection)
    held = {"": pg_collection} if by_name is None else by_name
    return *held, *[getattr(collection, name, None) for collection in held.values() for name in _GROUPS]


class CallHooks:
    """The hooks of the running call, ``current``, as one hook of a runtime that serves many calls."""

    def __init__(self) -> None:
        self.current: Sequence[Hook] = ()

    def before(self, action: Action) -> None:
        """See `Hook`."""
        for hook in self.current:
            hook.before(action)

    def after(self, action: Action) -> None:
        """See `Hook`."""
        for hook in self.current:
            hook.after(action)


class CallMessageHooks(CallHooks):
    """`CallHooks` where at least one hook is a `MessageHook`."""

    def completed(self, action: Action) -> None:
        """See `MessageHook`."""
        for hook in self.current:
            if isinstance(hook, MessageHook):
                hook.completed(action)
