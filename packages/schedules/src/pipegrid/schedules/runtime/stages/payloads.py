"""Payloads, the data between stages: tensors, None, and lists, tuples and dicts of them.

Between modules that declare their payload also numbers, and tensors with the rows of their samples (`Packed`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve

from pipegrid.bridges import Packed
from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import ErrorType, shown
from pipegrid.transport.messages.trees import mapped, parts_of


def flatten(payload: Any) -> list[torch.Tensor | None]:
    """The tensors of a payload in order, that of dicts being the order of their keys; None for all other leaves."""
    if isinstance(payload, torch.Tensor):
        return [payload]
    return [leaf if isinstance(leaf, torch.Tensor) else None for leaf in _leaves(payload)]


def _leaves(payload: Any) -> list[Any]:
    """Tensors, None and numbers; what else an edge cannot carry, its bridge raises for."""
    return [part.tensor if isinstance(part, Packed) else part for part in parts_of(payload)]


def map_tensors(payload: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The payload with ``function`` applied to each tensor; all else stays."""
    if isinstance(payload, torch.Tensor):
        return function(payload)

    def of(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return function(part)
        if isinstance(part, Packed):
            return evolve(part, tensor=function(part.tensor))
        return part

    return mapped(of, payload)


def unpacked(payload: Any) -> Any:
    """The payload as a stage receives it: tensors in place of `Packed` ones."""
    if isinstance(payload, torch.Tensor):
        return payload
    return mapped(lambda part: part.tensor if isinstance(part, Packed) else part, payload)


def tensors_of(name: str, payload: Any, error: ErrorType = StepArgumentError) -> list[torch.Tensor | None]:
    """`flatten` of the payload ``name``; raises ``error`` for a part that is neither a tensor nor None."""
    tensors = _leaves(payload)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor | None):
            raise error(f"{name} has {shown(tensor)}; a payload is made of tensors, None, lists, tuples and dicts")
    return tensors


def describe(value: Any) -> str:
    """A value for an error, a tensor by its shape."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else shown(value)


def piece_name(piece: int, num_slices: int) -> int | str:
    """How a plan writes a piece: ``7``, or slice 2 of microbatch 7 as ``7.2``."""
    return piece if num_slices == 1 else "{}.{}".format(*divmod(piece, num_slices))


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its graph. A gradient has none, and needs no new tensor."""
    return tensor.detach() if tensor.requires_grad else tensor


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient to send back for a received tensor.

    Zeros if it requires grad but was not used, so that gradients have the same form for every microbatch.
    """
    return torch.zeros_like(tensor) if tensor.grad is None and tensor.requires_grad else tensor.grad
