"""The gradient policy of a step: who reduces the gradients of which module, and what they are divided by.

A wrong answer here is silent (replicas drift apart, or an encoder learns at half its rate), so everything that can be
known is checked before the step begins; `require_equal_replicas` looks at the result, in debug runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import ReductionError
from pipegrid.schedules.fsdp import fsdp_modules, has_fsdp
from pipegrid.schedules.gradients import foreach
from pipegrid.schedules.gradients.buckets import partial_over_tp
from pipegrid.schedules.gradients.dtensors import fsdp_divisors, local_of
from pipegrid.schedules.gradients.lanes import (
    Waiting,
    all_reduce,
    collection_of,
    device_of,
    groups_of,
    lanes_group,
    size_of,
)
from pipegrid.schedules.gradients.main_grad import Modules, accumulated, named_modules, parameters_of
from pipegrid.schedules.gradients.reduce import GradientReduction
from pipegrid.schedules.gradients.tied import TiedParameters, mark_of
from pipegrid.schedules.monitor import DisagreementError
from pipegrid.transport.opening import resolve_device

_FINISHERS = ("a finalize_model_grads_func", "reduce_gradients", "what wraps the model")
_WAYS = tuple(itertools.product((False, True), _FINISHERS))

Models = Mapping[int, torch.nn.Module]
"""This rank's models by stage."""

Counted = Mapping[int, torch.Tensor | None]
"""The tokens that the loss of each stage counted; None of a stage without a loss."""


@frozen
class GradientPolicy:
    """How the gradients of this rank's stages become those of one process. Made by `gradient_policy`.

    Without the models, so that it can be kept between steps; its functions take those that it was made for.

    Attributes:
        per_token: losses are sums, and gradients are divided by the tokens of the job.
        reduced: the stages that `reduce_gradients` reduces, by module name.
        loss_lanes: data lanes of the loss; None where no grids are known (then each module's own).
        loss_factors: by stage, what its loss is multiplied by, so that each loss is a mean over its own lanes.
        by_hand: the config has a ``finalize_model_grads_func``, which is called in place of all this.
        names: the module of each stage.
    """

    per_token: bool
    reduced: Mapping[str, tuple[int, ...]]
    loss_lanes: int | None
    loss_factors: Mapping[int, float]
    by_hand: bool
    names: Mapping[int, str]

    @property
    def agreement(self) -> str:
        """What neighbours compare before a step: the ranks that divide by tokens count them in one collective."""
        return f"with {'per-token' if self.per_token else 'mean'} losses"

    def compare(self, models: Models, pg_collection: Any, waiting: Waiting) -> None:
        """Raise on all data lanes of a module where one of them finishes its gradients otherwise than another.

        They would wait for each other in different collectives. One small all-reduce per module, once per runtime.

        Raises:
            DisagreementError: with the ranks of either kind.
        """
        for name, stage in {name: stage for stage, name in self.names.items()}.items():
            group = None if pg_collection is None else lanes_group(pg_collection, name)
            if group is None or group.size() == 1:
                continue
            who = 0 if self.by_hand else 1 if name in self.reduced else 2
            ways = torch.zeros(group.size(), dtype=torch.int64, device=device_of(models[stage], group))
            ways[group.rank()] = _WAYS.index((self.per_token, _FINISHERS[who]))
            all_reduce(ways, group)(waiting)
            ranks: dict[int, list[int]] = {}
            for rank, way in zip(dist.get_process_group_ranks(group), ways.tolist(), strict=True):
                ranks.setdefault(way, []).append(rank)
            if len(ranks) > 1:
                kinds = [(held, *_WAYS[way]) for way, held in ranks.items()]
                raise DisagreementError(
                    f"the data lanes of module {name!r} do not finish their gradients alike: "
                    + ", ".join(
                        f"ranks {held} have {'per-token' if per_token else 'mean'} losses and {finisher}"
                        for held, per_token, finisher in kinds
                    )
                    + "; give all of them the same config"
                )

    def modules(self, models: Models) -> dict[str, torch.nn.Module]:
        """The modules that `reduce_gradients` reduces, by name."""
        return {
            name: models[stages[0]] if len(stages) == 1 else torch.nn.ModuleList(models[stage] for stage in stages)
            for name, stages in self.reduced.items()
        }

    def reduction(self, models: Models, config: Any, pg_collection: Any) -> GradientReduction | None:
        """The reduction of one step; None where a wrapper or the user reduces, or nothing is trained."""
        if not self.reduced:
            return None
        return GradientReduction.of(
            self.modules(models),
            {name: collection_of(pg_collection, name) for name in self.reduced},
            loss_lanes=self.loss_lanes,
            job_group=getattr(config, "job_group", None),
            bucket_bytes=getattr(config, "grad_bucket_bytes", None),
        )

    def finish(
        self,
        counted: Counted,
        reduction: GradientReduction | None,
        waiting: Waiting,
        *,
        models: Models,
        config: Any,
        pg_collection: Any,
    ) -> None:
        """After the last backward: the user's finalizer, or what is left of ``reduction``."""
        if self.by_hand:
            tokens = self._tokens(counted, models, pg_collection)
            config.finalize_model_grads_func(list(models.values()), tokens, pg_collection=pg_collection)
        elif reduction is not None:
            reduction.finish(self._tokens(counted, models, pg_collection), waiting)

    def _tokens(self, counted: Counted, models: Models, pg_collection: Any) -> torch.Tensor | None:
        if not self.per_token:
            return None
        parts = [
            _own_tokens(
                counted[stage],
                model,
                None if pg_collection is None else collection_of(pg_collection, self.names[stage]),
            )
            for stage, model in models.items()
        ]
        return sum(parts[1:], start=parts[0])


def gradient_policy(
    *,
    models: Mapping[int, torch.nn.Module],
    config: Any,
    communicator: Any,
    graph: ModuleGraph,
    pg_collection: Any,
    frozen: Collection[str] = (),
) -> GradientPolicy:
    """Decide how the gradients of this rank's ``models``, by their stage of ``graph``, are finished.

    ``config.finalize_model_grads_func`` comes first; then a wrapper that reduces by itself (it has ``no_sync``), where
    that is right; then `reduce_gradients` over the groups of ``pg_collection``. The ``frozen`` modules get no gradient;
    their ranks only take part in counting tokens.

    Raises:
        ReductionError: a wrapper that averages by the wrong number, or at the wrong time; per-token losses whose
            gradients nothing divides by the tokens; data lanes, or partial gradients over tp, without their group.
    """
    per_token = bool(getattr(config, "calculate_per_token_loss", False))
    finalize = getattr(config, "finalize_model_grads_func", None)
    names = {stage: graph.module_of(stage)[0] for stage in models}
    collections = {
        name: None if pg_collection is None else collection_of(pg_collection, name) for name in names.values()
    }
    lanes = _lanes_by_grid(communicator, graph)
    of_loss = max((lanes[name] for name in graph.sinks), default=None) if lanes else None
    reduced: dict[str, tuple[int, ...]] = {}
    by_hand = {stage: model for stage, model in models.items() if finalize or collections[names[stage]] is None}
    _require_no_fsdp_mean(by_hand, names, per_token=per_token, lanes=lanes, of_loss=of_loss)
    if finalize is None:
        _require_all_or_none(models, names)
        for stage, model in models.items():
            name = names[stage]
            if name in frozen and not per_token:
                continue
            own = lanes.get(name)
            if hasattr(model, "no_sync"):
                _require_trustworthy(model, graph, per_token=per_token, own=own, of_loss=of_loss)
                _require_no_partial(model, name, communicator)
            elif collections[name] is None:
                _require_nothing_to_do(name, per_token=per_token, own=own, of_loss=of_loss)
                _require_no_partial(model, name, communicator)
            else:
                _require_group(name, collections[name], own)
                reduced[name] = (*reduced.get(name, ()), stage)
    scaled = finalize is None and not per_token
    return GradientPolicy(
        per_token=per_token,
        reduced=reduced,
        loss_lanes=of_loss,
        loss_factors={stage: of_loss / lanes[name] for stage, name in names.items()} if scaled and of_loss else {},
        by_hand=finalize is not None,
        names=names,
    )


def _require_all_or_none(models: Mapping[int, torch.nn.Module], names: Mapping[int, str]) -> None:
    """Chunks of one module may share a parameter, which must be finished once, and in one way."""
    wrapped: dict[str, list[bool]] = {}
    for stage, model in models.items():
        wrapped.setdefault(names[stage], []).append(hasattr(model, "no_sync"))
    for name, found in wrapped.items():
        if len(set(found)) > 1:
            raise ReductionError(
                f"{sum(found)} of this rank's {len(found)} chunks of module {name!r} reduce by themselves (have "
                "no_sync), the others do not: wrap all of them or none"
            )


def _require_no_fsdp_mean(
    models: Mapping[int, torch.nn.Module],
    names: Mapping[int, str],
    *,
    per_token: bool,
    lanes: Mapping[str, int],
    of_loss: int | None,
) -> None:
    """FSDP2 leaves means over its lanes: divided by tokens, or beside a loss on other lanes, they are off.

    `reduce_gradients` makes up for it; a finalizer of the user's, or none, does not.
    """
    for stage, model in models.items():
        if None not in fsdp_divisors(model).values():  # sums, or divided by a number of the user's
            continue
        own = lanes.get(names[stage])
        sharded = next(name for name, _ in fsdp_modules(model))
        which = f"module {names[stage]!r} is sharded by fully_shard ({sharded or 'the model itself'})"
        remedy = (
            "pass pg_collection and no finalize_model_grads_func: its reduction makes up for that. Or keep your own, "
            "and set_gradient_divide_factor(1.0), which leaves sums"
        )
        if per_token:
            raise ReductionError(
                f"{which}, which averages gradients over its lanes, and calculate_per_token_loss needs their sum: "
                f"divided by the tokens they would be too small by the number of lanes; {remedy}"
            )
        if own != of_loss:
            raise ReductionError(
                f"{which}, which averages gradients over its own {own} lanes, but the loss has {of_loss}; {remedy}"
            )


def _require_nothing_to_do(name: str, *, per_token: bool, own: int | None, of_loss: int | None) -> None:
    if per_token:
        raise ReductionError(
            "calculate_per_token_loss leaves sums over tokens as gradients, and nothing divides them: pass "
            "pg_collection, or set finalize_model_grads_func"
        )
    if own is not None and own > 1:
        raise ReductionError(
            f"module {name!r} has {own} data lanes whose gradients nothing sums: pass pg_collection, or set "
            "finalize_model_grads_func"
        )
    if of_loss is not None and of_loss > 1:
        raise ReductionError(
            f"the one data lane of module {name!r} gets the gradients of {of_loss} lanes' mean losses, and nothing "
            f"divides them by {of_loss}: pass pg_collection, or set finalize_model_grads_func"
        )


def _require_no_partial(model: torch.nn.Module, name: str, communicator: Any) -> None:
    """Parameters marked as partial over tp, where `reduce_gradients` does not sum them."""
    grids = getattr(communicator, "module_to_grid_map", None)
    if grids is not None and _size(grids[name], ("tp",)) == 1:
        return
    marked = next((parameter for parameter in model.parameters() if partial_over_tp(parameter)), None)
    if marked is not None:
        raise ReductionError(
            f"a parameter of shape {tuple(marked.shape)} in module {name!r} is marked as partial over tp "
            "(sequence_parallel, partial_over_tp), and nothing sums its gradient over tp: pass the bare module and "
            "pg_collection with its tp group, or set finalize_model_grads_func"
        )


def _require_group(name: str, collection: Any, own: int | None) -> None:
    found = size_of(lanes_group(collection, name))
    if own is not None and found != own:
        raise ReductionError(
            f"module {name!r} has {own} data lanes (dp x cp), but the group to sum their gradients has {found} "
            'ranks: make it before the collection: grid.create_pg("dp"), or grid.create_pg(["dp", "cp"]) with cp'
        )


def required_ties(
    *, models: Sequence[torch.nn.Module], config: Any, stages: Sequence[int]
) -> tuple[TiedParameters, ...]:
    """The ties whose ``REDUCE`` the plan of a step needs, checked against what this rank runs.

    Args:
        models: this rank's chunks.
        config: ``tied_parameters``.
        stages: the stages that they are.

    Raises:
        ReductionError: a tie of one of ``stages`` without a copy in ``models``, a tied parameter whose tie the config
            does not have, or one whose wrapper would sum over data lanes what its ``REDUCE`` sums as well.
    """
    ties: tuple[TiedParameters, ...] = tuple(getattr(config, "tied_parameters", ()))
    parameters = {id(parameter): parameter for model in models for parameter in model.parameters()}
    for tie in ties:
        held = sorted(set(tie.stages) & set(stages))
        if held and not any(id(copy) in parameters for copy in tie.copies):
            raise ReductionError(
                f"tied parameter {tie.name!r} lies on stage {held[0]}, which this rank runs, but its model has no copy "
                "of it: call tie_parameters with the parameter that the model trains"
            )
    names = {tie.name for tie in ties}
    for parameter in parameters.values():
        mark = mark_of(parameter)
        if mark is None:
            continue
        if mark.name not in names:
            raise ReductionError(
                f"a parameter of shape {tuple(parameter.shape)} is tied as {mark.name!r}, which config.tied_parameters "
                f"does not have ({sorted(names)}): nothing sums its copies. Give it there on every rank"
            )
        if mark.over_lanes and any(hasattr(model, "no_sync") for model in models):
            raise ReductionError(
                f"tied parameter {mark.name!r} is summed over data lanes by its REDUCE, and by the model's wrapper as "
                "well: tie it with group=collection.embd in place of grids=..., or pass the bare module"
            )
    return ties


def observed(models: Sequence[torch.nn.Module]) -> tuple[object, ...] | None:
    """All that `gradient_policy` and `required_ties` read off ``models``, to compare with that of a later step.

    None with modules of ``fully_shard``, whose settings are not compared.
    """
    found: list[object] = []
    for model in models:
        if has_fsdp(model):
            return None
        found.append(hasattr(model, "no_sync"))
        for parameter in model.parameters():
            found += (id(parameter), parameter.requires_grad)
            mark = mark_of(parameter)
            if mark is not None:
                found.append((mark.name, mark.over_lanes))
            if partial_over_tp(parameter):
                found.append("partial over tp")
    return tuple(found)


def _require_trustworthy(
    model: torch.nn.Module, graph: ModuleGraph, *, per_token: bool, own: int | None, of_loss: int | None
) -> None:
    name = type(model).__name__
    if isinstance(model, torch.nn.parallel.DistributedDataParallel) and graph.num_stages > 1:
        raise ReductionError(
            f"{name} decides in a forward whether the next backward reduces, which a pipeline's order defeats: pass "
            "the bare module, and pg_collection with its dp group"
        )
    if per_token:
        raise ReductionError(
            f"calculate_per_token_loss with {name}, which averages over its lanes: set finalize_model_grads_func, "
            "which receives the number of tokens, or pass the bare module and pg_collection"
        )
    if own != of_loss:
        raise ReductionError(
            f"{name} averages over its own {own} data lanes, but the loss has {of_loss}: pass the bare module and "
            "pg_collection, whose reduction divides by the loss side's"
        )


def _own_tokens(counted: torch.Tensor | None, model: torch.nn.Module, collection: Any) -> torch.Tensor:
    """This rank's part of the job's tokens: all tp ranks of a loss stage see the same ones, the first counts."""
    tp = getattr(collection, "tp", None)
    if counted is not None and (tp is None or tp.rank() == 0):
        return counted
    if counted is not None:
        return torch.zeros_like(counted)
    parameter = next(model.parameters(), None)
    device = resolve_device(None, None, None)[1] if parameter is None else parameter.device
    return torch.zeros((), dtype=torch.int64, device=device)


def _lanes_by_grid(communicator: Any, graph: ModuleGraph) -> dict[str, int]:
    """Data lanes (dp x cp) of each module; empty where no grids are known."""
    grids = getattr(communicator, "module_to_grid_map", None)
    return {} if grids is None else {name: _size(grids[name], ("dp", "cp")) for name in graph.order}


def _size(grid: Any, dims: tuple[str, ...]) -> int:
    return math.prod(size for name, size in zip(grid.dim_names, grid.shape, strict=True) if name in dims)


# After the step, in debug runs


class ReplicaError(RuntimeError):
    """Replicas of a parameter, or of its gradient, differ: a gradient is reduced on some ranks and not on others."""


@torch.no_grad()
def require_equal_replicas(
    modules: Modules, collections: Any, *, tolerance: float = 1e-6, waiting: Waiting | None = None
) -> None:
    """Raise where parameters or gradients differ between data lanes, or between tp ranks that hold them whole.

    Compares the norm of each, so it costs one read of parameters and gradients, two small all-reduces per group and
    one read by the host. Every rank of the groups calls it: after the reduction, or after the optimizer's step. A
    gradient that is partial over tp, and neither summed nor marked, is found here in the first step.

    Args:
        modules: as in `reduce_gradients`.
        collections: as in `reduce_gradients`.
        tolerance: of norms, relative to the larger one.
        waiting: for the all-reduces.

    Raises:
        ReplicaError: on every rank of the group, with the parameters and by how much they differ.
    """
    waiting = waiting or Waiting()
    named = {
        id(parameter): f"{name}.{inner}" if name else inner
        for name, module in named_modules(modules)
        for inner, parameter in module.named_parameters()
    }
    lanes: dict[dist.ProcessGroup, list[torch.nn.Parameter]] = {}
    for name, parameter in parameters_of(modules):
        whole = not getattr(parameter, "tensor_model_parallel", False)
        own, over_tensor = groups_of(parameter, collections, name)
        for group in (own, over_tensor if whole else None):
            if group is not None and size_of(group) > 1 and not hasattr(parameter, "device_mesh"):
                lanes.setdefault(group, []).append(parameter)
    for group, parameters in lanes.items():
        kinds = ("parameter", "gradient")
        tensors = [tensor for parameter in parameters for tensor in (parameter.detach(), accumulated(parameter))]
        norms = torch.stack([torch.zeros((), dtype=torch.float64, device=parameters[0].device)] * len(tensors))
        filled = [place for place, tensor in enumerate(tensors) if tensor is not None and tensor.numel()]
        held = [local_of(tensors[place]) for place in filled]
        if held:
            norms[filled] = foreach.norms(held, 2.0).nan_to_num(nan=-1.0)
        extremes = torch.cat([norms, -norms])
        all_reduce(extremes, group, dist.ReduceOp.MAX)(waiting)
        most, least = extremes.chunk(2)
        apart = most + least  # the largest less the smallest
        different = (apart > tolerance * most.abs()).tolist()
        if any(different):
            found = [
                f"the {kinds[place % 2]} of {named[id(parameters[place // 2])]} by {float(apart[place]):.3g}"
                for place, differs in enumerate(different)
                if differs
            ]
            raise ReplicaError(
                f"the ranks {sorted(dist.get_process_group_ranks(group))} hold replicas whose norms differ: "
                f"{', '.join(found[:5])}{f' and {len(found) - 5} more' if len(found) > 5 else ''}. Mark a gradient "
                "that is a part on each tp rank (parameter.partial_over_tp = True), a sharded parameter "
                "(parameter.tensor_model_parallel = True), or reduce what was left out"
            )
