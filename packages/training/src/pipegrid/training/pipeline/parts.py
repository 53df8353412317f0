"""Parts of a microbatch, for a loss function that is asked what it is a mean over, and what it counts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from pipegrid.stages.slicing.slice_batches import IGNORED
from pipegrid.stages.torch_compat import tree_map, tree_map_only
from pipegrid.training.pipeline.microbatches import Microbatch, counts_of

_MORE, _FEWER = 4, 2
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type)


@frozen(eq=False)
class LossPart:
    """The arguments of a loss function, and the counts of its rows and labels (`counts_of`)."""

    output: Any
    inputs: Mapping[str, Any]
    counts: Sequence[int]


def halves(output: Any, inputs: Mapping[str, Any], rows: int) -> tuple[LossPart, LossPart, LossPart] | None:
    """The first half of the rows, the others, and all of them; None of one row, or of an output without rows."""
    if rows == 1 or not _has_rows(output, rows):
        return None

    def part(start: int, stop: int) -> LossPart:
        def cut(tensor: Tensor) -> Tensor:
            return tensor[start:stop] if tensor.dim() and len(tensor) == rows else tensor

        some = mapped(inputs, cut)
        return LossPart(_wide(mapped(output, cut)), some, counts_of(some, stop - start))

    return part(0, rows // 2), part(rows // 2, rows), part(0, rows)


def padded_apart(output: Any, inputs: Mapping[str, Any], rows: int) -> tuple[LossPart, LossPart, LossPart] | None:
    """A microbatch with a few labels, the same with fewer, and both as one; None of an output without rows.

    By rows they are alike; by labels the first has twice as many, and by those that follow three times. An
    ``attention_mask`` of the labels' shape masks what has no label, since some losses count by it. Random numbers,
    larger ones to the second, are added to what the last stage has returned: all means of equal numbers are equal.
    """
    if not _has_rows(output, rows):
        return None
    labels, mask = inputs["labels"], inputs.get("attention_mask")
    masked = isinstance(mask, Tensor) and mask.shape == labels.shape
    whole = labels.masked_fill(labels == IGNORED, 0)
    given = []
    for most in (_MORE, _FEWER):
        some = whole.clone()
        if whole.dim() > 1:
            some[:, min(most, whole.shape[1] - (most == _FEWER)) :] = IGNORED
        elif most == _FEWER:
            some[rows // 2 :] = IGNORED
        given.append({**inputs, "labels": some} | ({"attention_mask": (some != IGNORED).to(mask)} if masked else {}))
    return apart(output, given[0], given[1], rows)


def doubled(output: Any, inputs: Mapping[str, Any], rows: int) -> LossPart | None:
    """A microbatch with all rows twice; None of an output without rows."""
    if not _has_rows(output, rows):
        return None
    joined = _twice(inputs, inputs, rows)
    return LossPart(_twice(output, output, rows), joined, counts_of(joined, 2 * rows))


def apart(
    output: Any, first: Mapping[str, Any], second: Mapping[str, Any], rows: int
) -> tuple[LossPart, LossPart, LossPart]:
    """Two microbatches of one output, other random numbers added to each, and both as one."""
    outputs = [mapped(_wide(output), partial(_shaken, by=by)) for by in (0.5, 2.0)]
    one, other = (LossPart(*each, counts_of(each[1], rows)) for each in zip(outputs, (first, second), strict=True))
    joined = _twice(first, second, rows)
    return one, other, LossPart(_twice(outputs[0], outputs[1], rows), joined, counts_of(joined, 2 * rows))


def joined_outputs(outputs: Sequence[Any], microbatches: Sequence[Microbatch]) -> Any | None:
    """The outputs of microbatches as one, None of several forms; what has no rows and is not alike is NaN there."""
    rows = [each.rows for each in microbatches]
    columns = [_tensors(output) for output in outputs]
    if len({len(each) for each in columns}) != 1:
        return None
    joined: list[Tensor] = []
    for tensors in zip(*columns, strict=True):
        by_row = all(tensor.dim() and len(tensor) == number for tensor, number in zip(tensors, rows, strict=True))
        if by_row and len({tensor.shape[1:] for tensor in tensors}) == 1:
            joined.append(torch.cat(tensors))
        elif all(torch.equal(tensor, tensors[0]) for tensor in tensors):
            joined.append(tensors[0])
        elif tensors[0].is_floating_point():
            joined.append(torch.full_like(tensors[0], torch.nan))
        else:
            return None
    following = iter(joined)
    return mapped(outputs[0], lambda _: next(following))


def largest_difference(one: Any, other: Any, rows: int) -> float | None:
    """The largest difference of two outputs in tensors with rows, relative to its norm; None where forms differ."""
    pairs = list(zip(_tensors(one), _tensors(other), strict=False))
    if len(_tensors(one)) != len(_tensors(other)) or any(first.shape != second.shape for first, second in pairs):
        return None
    by_row = [(a.double(), b.double()) for a, b in pairs if a.dim() and len(a) == rows and a.is_floating_point()]
    return max((float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in by_row), default=None)


def zero_of(output: Any) -> Tensor:
    """A loss of zero, with the gradients of zero of an output; of none of its numbers, which may be NaN."""
    tensors = [each for each in _tensors(output) if each.is_floating_point()]
    graph = [each for each in tensors if each.requires_grad]
    return max(graph or tensors, key=Tensor.dim).flatten()[:0].sum()  # a scalar may be a mean over nothing


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with its tensors changed: in containers, and in attributes of an object such as a namespace."""

    def leaf(each: Any) -> Any:
        if isinstance(each, Tensor):
            return change(each)
        if isinstance(each, _PLAIN) or not hasattr(each, "__dict__"):
            return each
        changed = copy.copy(each)
        vars(changed).update(tree_map_only(Tensor, change, dict(vars(each))))
        return changed

    return tree_map(leaf, value)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, note)
    return found


def _has_rows(value: Any, rows: int) -> bool:
    return any(tensor.dim() and len(tensor) == rows for tensor in _tensors(value))


def _wide(value: Any) -> Any:
    """The value with floating-point numbers of at least 32 bits, in which means can be compared."""
    narrow = (torch.float16, torch.bfloat16)
    return mapped(value, lambda tensor: tensor.detach().float() if tensor.dtype in narrow else tensor.detach())


def _shaken(tensor: Tensor, by: float) -> Tensor:
    return tensor + by * torch.rand_like(tensor) if tensor.is_floating_point() else tensor


def _twice(one: Any, other: Any, rows: int) -> Any:
    """The rows of one value, and behind them those of another of the same form."""
    others = iter(_tensors(other))

    def joined(tensor: Tensor) -> Tensor:
        behind = next(others)
        return torch.cat([tensor, behind]) if tensor.dim() and len(tensor) == rows else tensor

    return mapped(one, joined)
