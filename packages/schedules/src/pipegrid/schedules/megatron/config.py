"""What the step functions read from a model's ``config``. Pure.

Any object with these attributes will do (a training framework's own config works as it is); an attribute it
lacks has the default given here. `PipelineConfig` is the documented form.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

from attrs import evolve, field, fields, frozen
from attrs.converters import optional

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Count, Index, Rule, checked, checked_fields, instance, shown
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.errors import P2PUsageError


def _rule(accepts: Callable[[Any], bool], text: str) -> Rule:
    def convert(value: Any) -> Any:
        if not accepts(value):
            raise ValueError
        return value

    return Rule(convert, text)


def _are_functions(value: Any) -> bool:
    return all(one is None or callable(one) for one in (value if isinstance(value, (list, tuple)) else [value]))


def _sets_scale(value: Any) -> bool:
    return hasattr(value, "set_loss_scale") or (callable(value) and not isinstance(value, type))


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda value: all(hasattr(value, name) for name in names)


_ARE_FUNCTIONS = _rule(_are_functions, "a function, a list with one for each chunk, or None")
_SETS_SCALE = _rule(_sets_scale, "a class with set_loss_scale(scale), or a function of the scale")
_Scaler: TypeAlias = Annotated[Any, _SETS_SCALE]
_Hook: TypeAlias = Annotated[Any, _rule(_has("before", "after"), "a hook with before(action) and after(action)")]
_Tie: TypeAlias = Annotated[Any, _rule(_has("name", "stages", "copies"), "a TiedParameters")]

_Function: TypeAlias = Annotated[Callable[..., Any], instance(Callable, "a function or None")]
_NoSync: TypeAlias = Callable[[], AbstractContextManager[Any]]
_Sync: TypeAlias = Callable[[Any], None]
_NoSyncs: TypeAlias = Annotated[_NoSync | Sequence[_NoSync], _ARE_FUNCTIONS] | None
_Syncs: TypeAlias = Annotated[_Sync | Sequence[_Sync | None], _ARE_FUNCTIONS] | None
"""One function for all chunks, or with interleaving a list with one for each."""


def _as_tuple(value: Iterable[Any]) -> tuple[Any, ...]:
    return value  # type: ignore[return-value]  # for type checkers: the check of the field makes the tuple, or raises


@frozen(kw_only=True, field_transformer=checked_fields(P2PUsageError))
class PipelineConfig(P2PConfig):
    """Settings of a pipelined step, and (inherited) of the communicator that it runs on.

    Attributes:
        hidden_size: last axis of the activations. Without ``variable_seq_lengths``, what the stages of a single module
            send is checked against it, ``seq_length`` and ``micro_batch_size``.
        sequence_parallel: activations between stages are sharded along the sequence over tp.
        calculate_per_token_loss: the loss function returns a sum over tokens; ``finalize_model_grads_func`` divides
            gradients by the global number of tokens.
        weighted_microbatches: with ``calculate_per_token_loss``: what the losses count adds up to the microbatches of
            all replicas (a loss that is a mean counts 1). The step is then a mean over microbatches that is divided
            last, so a loss of a stage's own (`WithLoss`) and one that a layer attaches by an autograd function without
            a scale are in it.
        aux_loss_scalers: for losses that layers attach by an autograd function with a scale on its class: the classes
            (with ``set_loss_scale``), or functions that set the scale. Each is called before each backward with what
            the step multiplies the mean loss of that microbatch by, a tensor with one element; with
            ``calculate_per_token_loss`` with the loss scale alone. Classes of Megatron that are imported (``MoEAux``,
            ``MTP`` and ``DSAIndexerLossAutoScaler``) are known. A function with another scale is a `StageOutputError`
            in the first step; None sets no scale and looks for none.
        deallocate_pipeline_outputs: free a sent activation's storage; only its ``grad_fn`` is still needed.
        clone_outputs: as of `PipelineRuntime`, for stages that are captured graphs.
        num_microbatches_with_partial_activation_checkpoints: of each window of in-flight microbatches, how many
            follow the model's own setting (``checkpoint_activations_microbatch`` False), the others checkpoint whole
            (True). None passes no such argument.
        enable_autocast: run forwards under autocast.
        autocast_dtype: with this dtype (None: the pipeline's).
        grad_scale_func: scales the loss before the backward (mixed precision), such as a `LossScaler`.
        no_sync_func: context manager under which data-parallel wrappers do not reduce gradients; left before
            the last backward.
        grad_sync_func: called with the model's parameters after the last backward; not on a first stage, where
            ``no_sync_func`` is left before the last backward, which then reduces by itself.
        param_sync_func: called with the model's parameters before the first forward.
        finalize_model_grads_func: ``f(models, num_tokens, pg_collection=...)``, called once after the last
            backward; ``num_tokens`` is the number of tokens this rank's losses counted (None unless
            ``calculate_per_token_loss``). None: `reduce_gradients` over the groups of ``pg_collection``, unless
            the model is a wrapper that reduces by itself (has ``no_sync``).
        tied_parameters: the `TiedParameters` of the pipeline, in one order on every rank, also on ranks without a
            copy. Each is summed by a ``REDUCE`` of the plan, after the last backward of the stages that hold it and
            before the reduction over replicas.
        defer_embedding_wgrad_compute: the output layer's weight gradient waits until the last backward has sent its
            gradient on (`output_linear`).
        wgrad_deferral_limit: at most so many microbatches wait; 0 sets no limit.
        microbatch_group_size_per_vp_stage: with interleaving, how many microbatches a chunk runs before the next chunk
            has its turn; None is the number of ranks.
        overlap_moe_expert_parallel_comm: a forward and a backward are a pair, which ``pair_func`` runs, where the
            schedule has pairs: interleaving (with one forward more before the first backward), ZB-V, DualPipe-V.
        pair_func: runs a pair as the function for ``ActionKind.F_B`` of `PipelineRuntime.register`: a `TakeTurns`, for
            models that hand over while their tokens travel. None: one after the other.
        shard: the modules are sharded by ``fully_shard`` over their replicas, and the plan gathers and frees their
            parameters and reduces their gradients: once per ``"step"`` and stage, or after each ``"microbatch"``. A
            dict names the sharded ones of several modules, ``{"language": "step"}``. None leaves that to FSDP2.
        prefetch: with ``shard``, how many stages of a rank are gathered ahead of the one that computes.
        job_group: all ranks of the job, where that is not the default process group; tokens are counted over it.
        hooks: `pipegrid.schedules.Hook` objects, called around every action of a step.
        monitor: a `pipegrid.schedules.Monitor`.
        failure_dir: a directory for what each failing rank leaves behind (see `PipelineRuntime`); None: nothing.
        overlap_grad_reduce: start the reduction of a bucket in the last backward that touches it, where the step
            function reduces; False starts all after the last backward.
        grad_add: in which order the step function adds gradients. ``"by_unit"`` keeps those of each microbatch apart,
            and adds them in the order of home replicas and microbatches: a step then has the same bits whichever ranks
            compute its microbatches. It needs ``routes=``, a copy of the gradients per microbatch and as many
            reductions: for tests. ``"as_computed"``: as backwards and all-reduces come.
        grad_bucket_bytes: about the bytes of gradients that are reduced together, where the step function reduces.
        check_replicas: False compares the parameters of replicas by checksum before the first step. True compares the
            norms of parameters and gradients after each reduction as well (`require_equal_replicas`), and the copies
            of tied parameters by checksum, for debug runs. None compares no replicas: they differ on purpose.
        check: True: before its first forward, stage 0 compares all stages with the whole model, in its own process and
            on its first microbatch (`check_stages` of pipegrid-training): for stages of its ``pipeline_stage``,
            made with a function that makes the model, and for models of which a rank can hold two. None: does so only
            where the cut is not proved, for models of at most 100 million parameters, in training. False: never.
            `Pipeline` compares its whole first step as well: True of a model of any size, None of at most 20 million.

    Raises:
        P2PUsageError: a count outside its range, a value for a function; or as `P2PConfig`.

    Examples:
        >>> import torch
        >>> PipelineConfig(pipeline_dtype=torch.bfloat16, deadline=60.0).deadline
        60.0
    """

    hidden_size: Count | None = None
    sequence_parallel: bool = False
    calculate_per_token_loss: bool = False
    weighted_microbatches: bool = False
    aux_loss_scalers: tuple[_Scaler, ...] | None = field(default=(), converter=optional(_as_tuple))
    deallocate_pipeline_outputs: bool = False
    clone_outputs: bool = False
    num_microbatches_with_partial_activation_checkpoints: Index | None = None
    enable_autocast: bool = False
    autocast_dtype: Any = None
    grad_scale_func: _Function | None = None
    no_sync_func: _NoSyncs = None
    grad_sync_func: _Syncs = None
    param_sync_func: _Syncs = None
    finalize_model_grads_func: _Function | None = None
    tied_parameters: tuple[_Tie, ...] = field(default=(), converter=_as_tuple)
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: Index = 0
    microbatch_group_size_per_vp_stage: Count | None = None
    overlap_moe_expert_parallel_comm: bool = False
    pair_func: _Function | None = None
    shard: Any = None
    prefetch: Index = 1
    job_group: Any = None
    hooks: tuple[_Hook, ...] = field(default=(), converter=_as_tuple)
    monitor: Any = None
    failure_dir: Any = None
    overlap_grad_reduce: bool = True
    grad_add: Literal["as_computed", "by_unit"] = "as_computed"
    grad_bucket_bytes: Count = 32 * 2**20
    check_replicas: bool | None = False
    check: bool | None = None


_DEFAULTS = {attribute.name: attribute.default for attribute in fields(PipelineConfig)}
_ANNOTATIONS = get_type_hints(PipelineConfig, include_extras=True)


def option(config: Any, name: str) -> Any:
    """``config.<name>``, or its documented default where the object does not have it."""
    return getattr(config, name, _DEFAULTS[name])


def checked_option(config: Any, name: str) -> Any:
    """`option`, with the check that a `PipelineConfig` makes when it is made, for a config of another class."""
    return checked(option(config, name), _ANNOTATIONS[name], f"config.{name}", P2PUsageError)


FUNCTIONS = ("aux_loss_scalers", *[name for name in _DEFAULTS if name.endswith("_func")])
_READ_LATE = (*FUNCTIONS, "grad_bucket_bytes", "hooks", "tied_parameters", "wgrad_deferral_limit")

_GRAPHS = "its step functions capture the graphs, in the order of its own schedules; compile layers, or capture a stage"
_SHARDS = "weights are sharded over ranks for which a ProcessGroupCollection has no group; shard with fully_shard"

OF_MEGATRON: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "cuda_graph_impl": ((None, "none"), _GRAPHS),
        "delay_wgrad_compute": (
            (None, False),
            (
                "the schedule that computes the delayed weight gradients is its own, and here they would be missing; "
                "schedule='zero_bubble_h1' and others delay them for any model"
            ),
        ),
        "enable_cuda_graph": ((None, False), _GRAPHS),
        "ep_overlap_early_attn_memory_release": (
            (None, False),
            "it is an order inside of its schedule that overlaps experts with another microbatch; leave it out",
        ),
        "expert_gtp_weight_remat_size": ((None, 1), _SHARDS),
        "external_cuda_graph": ((None, False), _GRAPHS),
        "fine_grained_activation_offloading": (
            (None, False),
            "its step functions end what a step has offloaded; plans here have OFFLOAD and RELOAD actions",
        ),
        "gtp_weight_remat_size": ((None, 1), _SHARDS),
        "hybrid_context_parallel": (
            (None, False),
            "its schedule cuts each sample over another number of ranks; give each microbatch one cp size",
        ),
        "layerwise_disaggregated_training": (
            (None, False),
            "the first rank then has the last stage as well; give the communicator a placement, (0, 1, ..., 0)",
        ),
        "moe_paged_stash": (
            (None, False),
            "its step functions reset the pages before each step; leave it out, or offload by a plan",
        ),
    }
)
"""Options on which Megatron's step functions act and those here do not, though numbers or memory depend on them.

By name the values with which nothing is to be done, and why others are an error.
"""


def require_options(config: Any) -> None:
    """`checked_option` of what a step reads late; StepArgumentError where an option of `OF_MEGATRON` is set."""
    for name, (off, why) in OF_MEGATRON.items():
        value = getattr(config, name, None)
        if value not in off:
            raise StepArgumentError(
                f"config.{name} is {shown(value)}, which the step functions here do not have: {why}"
            )
    for name in _READ_LATE:
        checked_option(config, name)


@frozen
class AuxLossScaler:
    """A function that sets the scale of attached losses, a tensor with one element.

    ``of_cp_share``: with context parallelism a rank attaches its share of a mean, as of the main loss; False: a mean
    over its own tokens. ``grad_scale``: an option of the config that gives its loss scale, before ``grad_scale_func``.
    """

    set_scale: Callable[[Any], Any]
    owner: type | None  # the class that has the scale, where it is known
    of_cp_share: bool = True
    grad_scale: str | None = None


_MEGATRON: dict[tuple[str, str], dict[str, Any]] = {
    ("megatron.core.transformer.moe.moe_utils", "MoEAuxLossAutoScaler"): {},
    ("megatron.core.transformer.multi_token_prediction", "MTPLossAutoScaler"): {
        "of_cp_share": False,
        "grad_scale": "mtp_grad_scale_func",
    },
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossAutoScaler"): {
        "of_cp_share": False
    },
}
"""By module and name, with what Megatron's own step functions do with each."""


def aux_loss_scalers(config: Any) -> tuple[AuxLossScaler, ...]:
    """The scalers of ``config``, and those of Megatron's classes whose modules are loaded."""
    given = option(config, "aux_loss_scalers")
    if given is None:
        return ()
    scalers = list(map(_scaler, given))
    for (module, name), how in _MEGATRON.items():
        found = getattr(sys.modules.get(module), name, None)
        if found is not None and not any(each.owner is found for each in scalers):
            scalers.append(AuxLossScaler(found.set_loss_scale, found, **how))
    return tuple(scalers)


def _scaler(given: Any) -> AuxLossScaler:
    if hasattr(given, "set_loss_scale"):
        return AuxLossScaler(given.set_loss_scale, given if isinstance(given, type) else type(given))
    owner = getattr(given, "__self__", None)  # of a class method
    return AuxLossScaler(given, owner if isinstance(owner, type) else None)


def config_of(model: Any) -> Any:
    """The ``config`` of a model, looked up through wrappers (``.module``); StepArgumentError without one."""
    config = unwrapped_attribute(model, "config")
    if config is None or isinstance(config, dict):
        raise StepArgumentError(
            f"the `config` of model {type(model).__name__} is {shown(config)}; it must be an object with the settings "
            "as attributes, such as PipelineConfig(pipeline_dtype=torch.bfloat16)"
        )
    return config


def config_owner(model: Any) -> Any:
    """The model, or the first module that it wraps, with settings of a step as ``config``; None where none has."""
    while model is not None and getattr(model, "config", None) is None:
        model = getattr(model, "module", None)
    return None if model is None or isinstance(model.config, dict) else model


def with_options(config: Any, **options: Any) -> Any:
    """A copy of ``config`` with other ``options``; of a class that cannot have them, the config itself."""
    if isinstance(config, PipelineConfig):
        return evolve(config, **options)
    if not hasattr(config, "__dict__"):
        return config
    changed = copy.copy(config)
    for name, value in options.items():
        setattr(changed, name, value)
    return changed


def unwrapped_attribute(model: Any, name: str) -> Any:
    """Attribute ``name`` of a model or of the first module it wraps that has one; None where none does."""
    while model is not None:
        found = getattr(model, name, None)
        if found is not None:
            return found
        model = getattr(model, "module", None)
    return None
