"""The ties that a step needs: those of the config, against what its models declare, hold and wrap."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from pipegrid.gradients.errors import GradientError
from pipegrid.gradients.layout import marks_of
from pipegrid.gradients.reduction.tied import TiedParameters


def required_ties(
    *, models: Sequence[torch.nn.Module], config: Any, stages: Sequence[int]
) -> tuple[TiedParameters, ...]:
    """The ties whose ``REDUCE`` the plan of a step needs, checked against this rank's ``models``, which are ``stages``.

    Raises:
        GradientError: a tie of one of ``stages`` without a copy in ``models``, a tied parameter whose tie the config
            does not have, or one whose wrapper would sum over replicas what its ``REDUCE`` sums as well.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> head = torch.nn.Linear(4, 8, bias=False)
        >>> config = SimpleNamespace(tied_parameters=[TiedParameters("embedding", (0, 3), (head.weight,))])
        >>> [tie.name for tie in required_ties(models=[head], config=config, stages=[3])]
        ['embedding']
    """
    ties: tuple[TiedParameters, ...] = tuple(getattr(config, "tied_parameters", ()))
    parameters = {id(parameter): parameter for model in models for parameter in model.parameters()}
    for tie in ties:
        held = sorted(set(tie.stages) & set(stages))
        if held and not any(id(copy) in parameters for copy in tie.copies):
            raise GradientError(
                f"tied parameter {tie.name!r} is on stage {held[0]}, whose model trains none of its copies"
            )
    names = {tie.name for tie in ties}
    if getattr(config, "finalize_model_grads_func", None) is None:
        _require_declared_ties(models, names)
    for mark in filter(None, (marks_of(parameter).tie for parameter in parameters.values())):
        if mark.name not in names:
            raise GradientError(
                f"a parameter is tied as {mark.name!r}, which config.tied_parameters does not have ({sorted(names)}): "
                "nothing sums its copies"
            )
        if mark.over_replicas and any(hasattr(model, "no_sync") for model in models):
            raise GradientError(
                f"tied parameter {mark.name!r} is summed over replicas by its REDUCE, and by the model's wrapper as "
                "well; tie it with group=collection.embd in place of grids=..., or pass the bare module"
            )
    return ties


def _require_declared_ties(models: Sequence[torch.nn.Module], names: Collection[str]) -> None:
    """Raise for a parameter to train with copies on other ranks that is none of ``names``."""
    for model in models:
        ties = _declared_ties(model)
        here = {other.number for other in models if ties and _declared_ties(other) == ties}
        for tie in ties:
            copies = dict(zip(tie.stages, tie.names, strict=True))
            if tie.name in names or model.number not in copies or here.issuperset(copies):
                continue
            if model.get_parameter(copies[model.number]).requires_grad:
                raise GradientError(
                    f"{tie.name!r} is one parameter on the stages {sorted(copies)}, and config.tied_parameters does "
                    f"not have it ({sorted(names)}): nothing sums its copies; set it to "
                    "tie_stage_parameters(stage.ties, stage, grid)"
                )


def _declared_ties(model: Any) -> tuple[Any, ...]:
    """The ``ties`` of a stage of `pipegrid.training.pipeline_stage`; another model's attribute of that name is none."""
    ties = getattr(model, "ties", ())
    ours = isinstance(ties, tuple) and hasattr(model, "number") and all(hasattr(tie, "stages") for tie in ties)
    return ties if ours else ()


def tied_stages(tied: Iterable[TiedParameters]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The name and the stages of each tied parameter, hashable: pairs of the mapping for `lower` and `with_reduce`.

    Examples:
        >>> tied_stages([TiedParameters("embedding", stages=(0, 3))])
        (('embedding', (0, 3)),)
    """
    pairs = tuple((each.name, each.stages) for each in tied)
    if len(dict(pairs)) != len(pairs):
        raise GradientError(f"tied parameters have the names {[name for name, _ in pairs]}; names are unique")
    return pairs
