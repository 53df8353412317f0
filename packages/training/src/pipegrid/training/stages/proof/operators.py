"""Operators that a trace treats apart: what they overwrite, draw, read from values, or index by masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_map_with_path

from pipegrid.training.stages.proof.traced import traced_in

_aten = torch.ops.aten

OVERWRITING = frozenset({_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor})
"""Operators of which the result does not depend on what the written tensor held."""


def is_random(func: Any) -> bool:
    """Whether ``func`` draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def named_leaves(value: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its place, such as ``['hidden_states'][0]``."""
    return [("".join(map(str, path)), leaf) for path, leaf in tree_flatten_with_path(value)[0]]


def mapped_by_place(function: Callable[[str, Any], Any], value: Any) -> Any:
    """A tree with ``function`` of each leaf and its place, as in `named_leaves`."""
    return tree_map_with_path(lambda path, leaf: function("".join(map(str, path)), leaf), value)


def read(func: Any, args: tuple[Any, ...]) -> Any:
    """A stand-in for what ``func`` tells the host of values that are not there; NotImplemented for other operators.

    A number is 1 or True; of a mask, every place is set.
    """
    if func is _aten._local_scalar_dense.default:  # noqa: SLF001
        return torch.ones((), dtype=args[0].dtype).item()
    if func in (_aten.equal.default, _aten.is_nonzero.default):
        return False
    if func is _aten.nonzero.default:
        return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.long, device="meta")
    if func is _aten.masked_select.default:
        return args[0].expand_as(args[0] * args[1]).reshape(-1)
    if func is _aten._grouped_mm.default:  # noqa: SLF001 -- torch knows its shapes in bfloat16 alone
        return args[0].new_empty(_grouped_shape(args[0].shape, args[1].shape, args[2].shape))
    if func is _aten.index.Tensor and any(_is_mask(index) for index in args[1]):
        return func(args[0], _every_place(args[1]))
    if func in (_aten.index_put_.default, _aten.index_put.default) and any(_is_mask(index) for index in args[1]):
        return args[0] if func is _aten.index_put_.default else torch.empty_like(args[0])
    return NotImplemented


def _grouped_shape(a: torch.Size, b: torch.Size, offsets: torch.Size) -> tuple[int, ...]:
    """Of a grouped matrix product: groups are rows of ``a``, columns of ``b``, or a part of the inner axis."""
    if len(a) == len(b) == 2:
        return (*offsets, a[0], b[1])
    return (a[-2], b[-1]) if len(a) != len(b) else (a[0], a[1], b[2])


def by_places(func: Any, args: tuple[Any, ...], values: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The arguments of an index by masks, with the places of masks that have values in their place.

    ``values`` gives the tensor with the values of a mask, or None.
    """
    if func not in _INDEXING:
        return args
    indices: list[Any] = []
    for index in args[1]:
        there = values(index) if _is_mask(index) else None
        indices.extend([index] if there is None else there.nonzero(as_tuple=True))
    return (args[0], indices, *args[2:])


_INDEXING = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _every_place(indices: list[Any]) -> list[Any]:
    found: list[Any] = []
    for index in indices:
        if _is_mask(index):
            found.extend(torch.empty(index.numel(), dtype=torch.long, device="meta") for _ in range(index.dim()))
        else:
            found.append(index)
    return found


class Lists(TorchFunctionMode):
    """``torch.tensor`` of a list that holds traced tensors, which reads memory, becomes a stack of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        options = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and traced_in(args):
            return _stacked(args[0]).to(dtype=options.get("dtype"), device=options.get("device"))
        return func(*args, **options)


def _stacked(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple)) and traced_in(value):
        return torch.stack([_stacked(one) for one in value])
    return torch.tensor(value)
