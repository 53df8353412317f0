"""The gradient policy of a step: who reduces the gradients of which module, and what they are divided by.

A wrong answer is silent (replicas drift apart, or an encoder learns at half its rate), so all that can be known is
checked before the step begins; `require_equal_replicas` looks at the result, in debug runs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from pipegrid.autograd.fsdp import divide_factor, has_fsdp
from pipegrid.autograd.tree import compiled_among, fsdp_among, modules_in
from pipegrid.core.graph import ModuleGraph
from pipegrid.gradients.dtensors import fsdp_divisors
from pipegrid.gradients.errors import GradientError
from pipegrid.gradients.groups import collection_of, device_of, group_of, replica_group, require_groups, size_of
from pipegrid.gradients.layout import Marks, marks_of
from pipegrid.gradients.main_grad import accumulation_dtype
from pipegrid.gradients.reduction.reduce import BUCKET_BYTES, GradientReduction
from pipegrid.gradients.reduction.replicas import meet_replicas, require_equal_norms, require_equal_parameters
from pipegrid.monitor import DisagreementError
from pipegrid.monitor.collectives import Waiting, texts_of_ranks
from pipegrid.topology.torch_compat import is_dry
from pipegrid.transport.base import as_communicator
from pipegrid.transport.collectives.differences import difference

Models = Mapping[int, torch.nn.Module]
"""This rank's models by stage, in the order of chunks."""

Counted = Mapping[int, torch.Tensor | None]
"""The tokens that the loss of each stage counted; None of a stage without a loss."""


@frozen
class GradientPolicy:
    """The way from the gradients of this rank's stages to those of one process. Made by `gradient_policy`.

    Without the models, so that it can be kept between steps; `of_step` takes those that it was made for.
    """

    per_token: bool  # losses are sums, and gradients are divided by the tokens of the job
    weighted: bool  # these tokens add up to the microbatches of the job (``weighted_microbatches``)
    reduced: Mapping[str, tuple[int, ...]]  # the stages that `reduce_gradients` reduces, by module name
    loss_lanes: int | None  # replicas of the loss; None where no grids are known (then each module's own)
    # By stage, what its loss is multiplied by, so that each loss is a mean over its own replicas.
    loss_factors: Mapping[int, float]
    by_hand: bool  # the config has a ``finalize_model_grads_func``, which is called in place of all this
    names: Mapping[int, str]  # the module of each stage

    @property
    def losses(self) -> str:
        """The kind of losses."""
        return "weighted per-token" if self.weighted else "per-token" if self.per_token else "mean"

    @property
    def agreement(self) -> str:
        """A text that neighbours compare before a step: ranks that divide by tokens count them in one collective."""
        return f"with {self.losses} losses"

    def of_step(self, models: Models, config: Any, pg_collection: Any, waiting: Waiting) -> StepGradients:
        """The gradients of one step of ``models``, for which the policy was made."""
        reduction = None
        if self.reduced:
            reduction = GradientReduction.of(
                {name: [models[stage] for stage in stages] for name, stages in self.reduced.items()},
                {name: collection_of(pg_collection, name) for name in self.reduced},
                loss_lanes=self.loss_lanes,
                job_group=getattr(config, "job_group", None),
                bucket_bytes=getattr(config, "grad_bucket_bytes", BUCKET_BYTES),
            )
        return StepGradients(self, models, config, pg_collection, waiting, reduction)


@frozen(eq=False, slots=False)
class StepGradients:
    """The gradients of a step: compared among replicas before it, and finished after it as the policy says.

    It serves a later step of the same models as well, after `begin`, as long as `observed` finds no change in them.
    """

    policy: GradientPolicy
    models: Models  # this rank's, by stage
    config: Any  # of the step
    pg_collection: Any  # the process groups of this rank
    waiting: Waiting
    reduction: GradientReduction | None  # None where a wrapper or the user reduces, or nothing is trained

    @cached_property
    def forms(self) -> dict[str, object]:
        """The work of this rank to finish gradients, by module with several replicas: who, and in which buckets."""
        found: dict[str, object] = {}
        if self.pg_collection is None or not dist.is_initialized() or is_dry():
            return found
        for name in dict.fromkeys(self.policy.names.values()):
            if self._replicas(name) is not None:
                buckets = () if self.reduction is None else self.reduction.form_of(name)
                found[name] = self._finisher(name), buckets
        return found

    def compare(self, known: Mapping[str, object] | None) -> Mapping[str, object]:
        """Raise on all replicas of a module where one of them finishes its gradients otherwise than another.

        They would wait for each other in different collectives, or sum gradients of different parameters. One small
        all-gather per module, before the first step; then the parameters of replicas, unless the config has
        ``check_replicas=None``. Later once more for a module whose form has changed here: a replica without that change
        goes on to the reduction, where gloo ends a process at a buffer of another size, so those with it meet at a
        store first.

        ``known``: the forms that were compared before; None before the first step. Returns those of this step.

        Raises:
            DisagreementError: the replicas differ in what they would do, or this one alone has changed.
            ReplicaError: parameters of replicas differ.
        """
        forms = self.forms
        if forms == known:
            return forms
        compared = getattr(self.config, "check_replicas", False) is not None
        held: dict[str, list[torch.nn.Module]] = {}
        for stage, name in self.policy.names.items():
            held.setdefault(name, []).append(self.models[stage])
        for name, form in forms.items():
            group = self._replicas(name)
            if group is None or (known is not None and known.get(name) == form):
                continue
            if known is not None:
                meet_replicas(name, group, self.waiting)
            elements, checksum = (0, 0) if self.reduction is None else self.reduction.summed_over(group)
            summed = f" of {elements} elements (checksum {checksum:08x})" if elements else ""
            own = f"{self._finisher(name)}{summed}{'' if compared else ', and check_replicas=None'}"
            found = difference(texts_of_ranks(own, group, device_of(held[name], group), self.waiting))
            if found is not None:
                raise DisagreementError(
                    f"the replicas of module {name!r} do not finish their gradients alike: {found}. Give them one "
                    "config, and the same parameters to train"
                )
            if compared and known is not None:  # over the replicas alone, which have come; tp ranks may have no change
                require_equal_parameters({name: held[name]}, self.pg_collection, waiting=self.waiting, over=group)
        if compared and known is None and self.pg_collection is not None and dist.is_initialized() and not is_dry():
            require_equal_parameters(held, self.pg_collection, waiting=self.waiting)
        return forms

    def _replicas(self, name: str) -> dist.ProcessGroup | None:
        """The group of a module's replicas; None where there is one."""
        group = None if self.pg_collection is None else replica_group(self.pg_collection, name)
        return None if group is None or group.size() == 1 else group

    def _finisher(self, name: str) -> str:
        """The losses of a module, and who finishes its gradients."""
        finisher = "reduce_gradients" if name in self.policy.reduced else "what wraps the model"
        finisher = "a finalize_model_grads_func" if self.policy.by_hand else finisher
        added = " by unit" if getattr(self.config, "grad_add", "") == "by_unit" else ""
        return f"{self.policy.losses} losses and {finisher}{added}"

    @property
    def lasts(self) -> bool:
        """Whether it may serve later steps; not with ``fully_shard``, which replaces parameters in each of them."""
        return self.reduction is None or not any(each.by_fsdp for each in self.reduction.layout.gradients)

    @cached_property
    def trained(self) -> Mapping[int, Sequence[torch.nn.Parameter]]:
        """The parameters to train of each stage."""
        return {stage: [one for one in model.parameters() if one.requires_grad] for stage, model in self.models.items()}

    def begin(self) -> None:
        """Forget the step before."""
        if self.reduction is not None:
            self.reduction.begin()

    def require_whole(self) -> None:
        """Raise a GradientError unless every replica can end the step with whole gradients (``force_all_reduce``).

        Not where one may keep shards, or the user's finalizer takes no ``force_all_reduce``.
        """
        for stage, model in self.models.items():
            wrapped = hasattr(model, "no_sync") and not isinstance(model, DistributedDataParallel)
            if has_fsdp(model) or (wrapped and not self.policy.by_hand):
                raise GradientError(
                    f"force_all_reduce=True, and module {self.policy.names[stage]!r} is in a {type(model).__name__}, "
                    "of which each replica may keep a shard of the gradients; pass the bare module and pg_collection, "
                    "or a finalize_model_grads_func that takes force_all_reduce"
                )
        if self.policy.by_hand:
            finalizer = self.config.finalize_model_grads_func
            try:
                inspect.signature(finalizer).bind([], None, pg_collection=None, force_all_reduce=True)
            except TypeError as error:
                raise GradientError(f"force_all_reduce=True, and finalize_model_grads_func: {error}") from None
            except ValueError:  # a callable in C without a signature
                pass

    def finish(
        self, counted: Counted, tokens: Callable[[], torch.Tensor] | None = None, *, force_all_reduce: bool = False
    ) -> None:
        """After the last backward: the user's finalizer, or the rest; ``tokens`` waits for those of the job."""
        if self.policy.by_hand:
            models, own = list(self.models.values()), self._tokens(counted)
            forced = {"force_all_reduce": True} if force_all_reduce else {}
            self.config.finalize_model_grads_func(models, own, pg_collection=self.pg_collection, **forced)
        elif self.reduction is not None:
            self.reduction.finish(self._tokens(counted) if tokens is None else None, self.waiting, tokens)
            if getattr(self.config, "check_replicas", False):
                require_equal_norms(self.reduction.layout, self.waiting)
                for tie in getattr(self.config, "tied_parameters", ()):
                    tie.require_equal(self.waiting)

    def _tokens(self, counted: Counted) -> torch.Tensor | None:
        """This rank's part of the job's tokens: all tp ranks of a loss stage see the same ones, the first counts."""
        if not self.policy.per_token:
            return None
        parts = []
        for stage, model in self.models.items():
            if (own := counted[stage]) is None:
                own = torch.zeros((), dtype=torch.int64, device=device_of(model, None))
            tp = group_of(self.pg_collection, self.policy.names[stage], "tp")
            parts.append(own if tp is None or tp.rank() == 0 else torch.zeros_like(own))
        return sum(parts[1:], start=parts[0])


def gradient_policy(
    *,
    models: Mapping[int, torch.nn.Module],
    config: Any,
    communicator: Any,
    graph: ModuleGraph,
    pg_collection: Any,
    frozen: Collection[str] = (),
    replicas: tuple[int, int] | None = None,
) -> GradientPolicy:
    """Decide how the gradients of this rank's ``models``, by their stage of ``graph``, are finished.

    ``config.finalize_model_grads_func`` comes first; then a wrapper that reduces by itself (it has ``no_sync``), where
    that is right; then `reduce_gradients` over ``pg_collection``. Ranks of ``frozen`` modules only count tokens. A
    GradientError where gradients would not be the sum over the replicas of their module, divided by the replicas of the
    loss or by the tokens of the job; and for a group that the sizes of a grid demand, and its collection lacks: of the
    replicas, and with the loss cp (losses are shares of a mean) and tp (the first rank counts tokens).

    ``replicas``, where they differ: those that the data is for (the divisor), and those of this position that live.
    """
    per_token = bool(getattr(config, "calculate_per_token_loss", False))
    weighted = per_token and bool(getattr(config, "weighted_microbatches", False))
    by_hand = getattr(config, "finalize_model_grads_func", None) is not None
    names = {stage: graph.module_of(stage)[0] for stage in models}
    grids = as_communicator(communicator).job.dims
    count, living = replicas or (1, 1)
    counted = count * size_of(group_of(pg_collection, next(iter(names.values())), "cp")) if count > 1 else None
    by_module = {} if counted is None else dict.fromkeys(graph.order, counted)
    if grids is not None:
        by_module = {name: _size(grids[name], ("dp", "cp")) for name in graph.order}
    of_loss = max((by_module[name] for name in graph.sinks), default=None) if by_module else None
    divisor = "the tokens of the job" if per_token else of_loss
    reduced: dict[str, tuple[int, ...]] = {}
    for stage, model in models.items():
        name = names[stage]
        _require_bare(model, name, differ=count > 1, reduces=not (by_hand or name in frozen))
        if name in frozen and not per_token:
            continue
        own = by_module.get(name)
        collection = None if pg_collection is None else collection_of(pg_collection, name)
        if not (by_hand or collection is None or hasattr(model, "no_sync")):
            reduced[name] = (*reduced.get(name, ()), stage)
            counts = () if name not in graph.sinks else ("cp", "tp") if per_token else ("cp",)
            require_groups(pg_collection, name, counts)
            found, expected = size_of(replica_group(collection, name)), None if own is None else own * living // count
            if expected not in (None, found):
                raise GradientError(
                    f"module {name!r} has {expected} replicas (dp x cp), but their group in pg_collection has {found}"
                )
            continue
        whole, alone = grids is not None and _size(grids[name], ("tp",)) == 1, graph.num_stages == 1
        fault = _fault(model, by_hand=by_hand, own=own, divisor=divisor, whole=whole, alone=alone)
        if fault is not None:
            raise GradientError(
                f"gradients of module {name!r} must be summed over its replicas (dp x cp: {own or 'unknown'}) and "
                f"divided by {divisor or 'those of the loss'}, but {fault}; pass the bare module and pg_collection, or "
                "set finalize_model_grads_func"
            )
    ways = {(names[stage], hasattr(model, "no_sync")) for stage, model in models.items()}
    if not by_hand and len(ways) > len(set(names.values())):  # chunks may share a parameter, which is finished once
        raise GradientError("some chunks of a module reduce by themselves (no_sync), and others do not; wrap all")
    loss_factors: dict[int, float] = {}
    if by_module and weighted:  # each replica of each loss counts its microbatches
        lanes = sum(by_module[name] for name in graph.sinks)
        loss_factors = {stage: lanes / by_module[name] for stage, name in names.items()}
    elif of_loss is not None and not by_hand and not per_token:
        loss_factors = {stage: of_loss / by_module[name] for stage, name in names.items()}
    return GradientPolicy(per_token, weighted, reduced, of_loss, loss_factors, by_hand, names)


def _require_bare(model: torch.nn.Module, name: str, *, differ: bool, reduces: bool) -> None:
    """Raise, where replicas ``differ``, for a wrapper of all of them; with ``reduces`` also of backwards alone."""
    if differ and (has_fsdp(model) or (reduces and hasattr(model, "no_sync"))):
        raise GradientError(
            f"module {name!r} is in a wrapper that reduces by itself, on all of its replicas alike, and these differ "
            "by the routes; pass the bare module and pg_collection"
        )


def _fault(
    model: torch.nn.Module, *, by_hand: bool, own: int | None, divisor: int | str | None, whole: bool, alone: bool
) -> str | None:
    """Why gradients that `reduce_gradients` does not finish are not their sum by ``divisor``; None: they are.

    ``own``: replicas; ``by_hand``: a finalizer follows; ``whole``: there is one tp rank; ``alone``: one stage.
    """
    averaged = own == divisor
    if not averaged and None in fsdp_divisors(model).values():
        return "fully_shard averages over them (set_gradient_divide_factor(1.0) leaves sums)"
    if by_hand:
        return None
    part = next((parameter for parameter in model.parameters() if not whole and marks_of(parameter).partial), None)
    if part is not None:
        return f"a parameter of shape {tuple(part.shape)} is marked as partial over tp, and nothing sums it over tp"
    if not hasattr(model, "no_sync"):
        one_lane = own in (None, 1) and divisor in (None, 1)
        return None if one_lane else "nothing sums and divides them"
    wrapper = type(model).__name__
    if isinstance(model, torch.nn.parallel.DistributedDataParallel) and not alone:
        return f"{wrapper} decides in a forward whether the next backward reduces, which a pipeline's order defeats"
    return None if averaged else f"{wrapper} averages over them"


def _size(sizes: Mapping[str, int], dims: tuple[str, ...]) -> int:
    return math.prod(size for name, size in sizes.items() if name in dims)


def observed(models: Sequence[torch.nn.Module]) -> tuple[object, ...]:
    """All that a step derives from ``models`` and that may change: modules, and what each parameter is like.

    Modules of ``fully_shard`` stand for their parameters, which it replaces in every step.
    """
    found: list[object] = []
    for model in models:
        modules = modules_in(model)
        sharded = fsdp_among(modules)
        for inner in sharded:
            found += (id(inner), divide_factor(inner))
        found.append([*map(id, compiled_among(modules))])
        for module in modules:
            found.append(id(module))
            for parameter in module._parameters.values():  # noqa: SLF001
                if parameter is None:
                    continue
                plain = type(parameter) is torch.nn.Parameter
                found.append(parameter.requires_grad)
                if not sharded:
                    shape = parameter.shape if plain or not is_lazy(parameter) else None
                    found += (id(parameter), shape, parameter.dtype, parameter.device)
                if not plain or vars(parameter):  # most carry nothing; torch.compile leaves a word of its own on some
                    marks = marks_of(parameter), accumulation_dtype(parameter)
                    found += () if marks == (Marks(), parameter.dtype) else marks
    return tuple(found)
