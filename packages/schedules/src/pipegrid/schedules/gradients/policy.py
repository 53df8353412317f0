"""Who reduces a stage's gradients after the last backward, and by what: settled before the step begins.

A wrong answer here is silent (replicas drift apart, or an encoder learns at half its rate), so everything that can be
known beforehand is checked beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import ReductionError
from pipegrid.schedules.gradients.reduce import collection_of, lanes_group, reduce_gradients
from pipegrid.schedules.gradients.tied import TiedParameters, mark_of
from pipegrid.transport.opening import resolve_device

FinishGradients = Callable[[Mapping[int, torch.Tensor | None]], None]
"""Called once after the last backward, with the tokens that the loss of each stage counted (None without a loss)."""


def gradient_reduction(
    *,
    models: Mapping[int, torch.nn.Module],
    config: Any,
    communicator: Any,
    graph: ModuleGraph,
    pg_collection: Any,
    frozen: Collection[str] = (),
) -> FinishGradients:
    """Decide how the gradients of this rank's ``models``, by their stage of ``graph``, are finished.

    ``config.finalize_model_grads_func`` is asked first; then a wrapper that reduces by itself (it has ``no_sync``) is
    trusted where that is right; then `reduce_gradients` does it over the groups of ``pg_collection``. The ``frozen``
    modules get no gradient; their ranks only take part in counting tokens.

    Raises:
        ReductionError: a wrapper that would average by the wrong number, or at the wrong time; per-token loss that
            nobody would divide by the tokens; data lanes without their group, or that nobody would divide by.
    """
    per_token = bool(getattr(config, "calculate_per_token_loss", False))
    names = {stage: graph.module_of(stage)[0] for stage in models}
    collections = {
        name: None if pg_collection is None else collection_of(pg_collection, name) for name in names.values()
    }

    def tokens(counted: Mapping[int, torch.Tensor | None]) -> torch.Tensor | None:
        if not per_token:
            return None
        parts = [_tokens(counted[stage], model, collections[names[stage]]) for stage, model in models.items()]
        return sum(parts[1:], start=parts[0])

    finalize = getattr(config, "finalize_model_grads_func", None)
    if finalize is not None:
        return lambda counted: finalize(list(models.values()), tokens(counted), pg_collection=pg_collection)
    _require_all_or_none(models, names)
    reduced: dict[str, list[torch.nn.Module]] = {}
    of_loss = None
    for stage, model in models.items():
        name = names[stage]
        if name in frozen and not per_token:
            continue
        own, of_loss = _lanes_by_grid(communicator, graph, name)
        if hasattr(model, "no_sync"):
            _require_trustworthy(model, graph, per_token=per_token, own=own, of_loss=of_loss)
        elif collections[name] is None:
            _require_nothing_to_do(name, per_token=per_token, own=own, of_loss=of_loss)
        else:
            _require_group(name, collections[name], own)
            reduced.setdefault(name, []).append(model)
    if not reduced:
        return _nothing
    return lambda counted: reduce_gradients(
        {name: held[0] if len(held) == 1 else torch.nn.ModuleList(held) for name, held in reduced.items()},
        collections,
        num_tokens=tokens(counted),
        loss_lanes=of_loss,
        job_group=getattr(config, "job_group", None),
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


def _require_nothing_to_do(name: str, *, per_token: bool, own: int | None, of_loss: int | None) -> None:
    if per_token:
        raise ReductionError(
            "calculate_per_token_loss leaves sums over tokens as gradients, and nobody would divide them: pass "
            "pg_collection, or set finalize_model_grads_func"
        )
    if own is not None and own > 1:
        raise ReductionError(
            f"module {name!r} has {own} data lanes whose gradients nobody would sum: pass pg_collection, or set "
            "finalize_model_grads_func"
        )
    if of_loss is not None and of_loss > 1:
        raise ReductionError(
            f"the one data lane of module {name!r} gets the gradients of {of_loss} lanes' mean losses, and nobody "
            f"would divide them by {of_loss}: pass pg_collection, or set finalize_model_grads_func"
        )


def _require_group(name: str, collection: Any, own: int | None) -> None:
    group = lanes_group(collection, name)
    found = 1 if group is None else group.size()
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
                f"does not have ({sorted(names)}): nobody would sum its copies. Give it there on every rank"
            )
        if mark.over_lanes and any(hasattr(model, "no_sync") for model in models):
            raise ReductionError(
                f"tied parameter {mark.name!r} is summed over data lanes by its REDUCE, and by the model's wrapper as "
                "well: tie it with group=collection.embd in place of grids=..., or pass the bare module"
            )
    return ties


def _nothing(counted: Mapping[int, torch.Tensor | None]) -> None:
    """The wrapper has reduced, or there is nothing to reduce."""
    del counted


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
            "which is told the number of tokens, or pass the bare module and pg_collection"
        )
    if own != of_loss:
        raise ReductionError(
            f"{name} averages over its own {own} data lanes, but the loss has {of_loss}: pass the bare module and "
            "pg_collection, whose reduction divides by the loss side's"
        )


def _tokens(counted: torch.Tensor | None, model: torch.nn.Module, collection: Any) -> torch.Tensor:
    """What this rank adds to the job's tokens: all tp ranks of a loss stage see the same ones, the first counts."""
    tp = getattr(collection, "tp", None)
    if counted is not None and (tp is None or tp.rank() == 0):
        return counted
    if counted is not None:
        return torch.zeros_like(counted)
    parameter = next(model.parameters(), None)
    device = resolve_device(None, None, None)[1] if parameter is None else parameter.device
    return torch.zeros((), dtype=torch.int64, device=device)


def _lanes_by_grid(communicator: Any, graph: ModuleGraph, module: str) -> tuple[int | None, int | None]:
    """Data lanes (dp x cp) of ``module`` and of the modules with the loss; None where no grids are known."""
    grids = getattr(communicator, "module_to_grid_map", None)
    if grids is None:
        return None, None
    lanes = {name: _lanes(grids[name]) for name in graph.sinks}
    if len(set(lanes.values())) > 1:
        raise ReductionError(
            f"the modules with a loss have different numbers of data lanes, {lanes}: no one factor averages both; "
            "weigh the losses yourself and set finalize_model_grads_func"
        )
    return _lanes(grids[module]), next(iter(lanes.values()))


def _lanes(grid: Any) -> int:
    sizes = zip(grid.dim_names, grid.shape, strict=True)
    return math.prod(size for name, size in sizes if name in ("dp", "cp"))
