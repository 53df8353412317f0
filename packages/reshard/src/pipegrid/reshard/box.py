"""Boxes: a half-open range in every axis of a tensor, and the overlaps of two cuts of one axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TypeVar

from attrs import frozen

from pipegrid.core.fields import Index, checked_fields, shown
from pipegrid.reshard.errors import BridgeError

Span = tuple[int, int]
"""A half-open range ``(start, stop)`` of one axis."""

Point = TypeVar("Point", int, Fraction)  # of an axis: a row, or a part of [0, 1)


@frozen(order=True, slots=False, field_transformer=checked_fields(BridgeError))
class Box:
    """The elements ``start[k] <= index < start[k] + shape[k]`` of a tensor, in every axis ``k``.

    Attributes:
        start: the first index along each axis.
        shape: the extent along each axis.

    Raises:
        BridgeError: lengths differ, or a start or extent is negative.

    Examples:
        >>> str(Box(start=(2, 0), shape=(1, 16)))
        '[2:3, 0:16]'
    """

    start: tuple[Index, ...]
    shape: tuple[Index, ...]

    def __attrs_post_init__(self) -> None:
        if len(self.start) != len(self.shape):
            raise BridgeError(f"a box has one start and one extent per axis, got {self.start} and {self.shape}")

    @cached_property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.shape)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in its tensor: a slice for each axis."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def narrow(self, axis: int, start: int, stop: int) -> Box:
        """The part with indices ``[start, stop)`` of ``axis``, counted from the start of this box."""
        if axis not in range(len(self.shape)):  # -1 would double the axes
            raise BridgeError(f"axis is {shown(axis)}; box {self} has the axes {list(range(len(self.shape)))}")
        return Box(
            start=(*self.start[:axis], self.start[axis] + start, *self.start[axis + 1 :]),
            shape=(*self.shape[:axis], stop - start, *self.shape[axis + 1 :]),
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.shape, strict=True)) + "]"


def merge(spans: Sequence[tuple[Point, Point]]) -> tuple[tuple[Point, Point], ...]:
    """The same ranges in the same order, empty ones dropped and adjacent ones joined."""
    merged: list[tuple[Point, Point]] = []
    for start, stop in spans:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def overlaps(
    source: Sequence[Sequence[tuple[Point, Point]]], destination: Sequence[Sequence[tuple[Point, Point]]]
) -> dict[tuple[int, int], list[tuple[Point, Point, Point]]]:
    """The overlaps of the shards of two cuts of one axis.

    Each side lists its shards; a shard lists the ranges of the axis it holds, ascending, and stores them one
    after another. The result maps (source shard, destination shard) to triples (offset in the source's
    storage, offset in the destination's storage, length). Linear in the number of ranges, after sorting. `BridgeError`:
    the shards of one side overlap or leave a gap, or the sides cover different ranges.
    """
    left, right = _laid_out(source, "source"), _laid_out(destination, "destination")
    covered, needed = ((side[0][0], side[-1][1]) if side else None for side in (left, right))
    if covered != needed:
        raise BridgeError(f"the source covers {covered} of an axis and the destination {needed}; both cover the same")
    found: dict[tuple[int, int], list[tuple[Point, Point, Point]]] = {}
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            triple = (left[i][3] + start - left[i][0], right[j][3] + start - right[j][0], stop - start)
            found.setdefault((left[i][2], right[j][2]), []).append(triple)
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return found


def _laid_out(shards: Sequence[Sequence[tuple[Point, Point]]], side: str) -> list[tuple[Point, Point, int, Point]]:
    """All ranges of a side, ascending, as (start, stop, shard, offset in the shard's storage)."""
    ranges: list[tuple[Point, Point, int, Point]] = []
    for index, spans in enumerate(shards):
        offset = None
        for start, stop in spans:
            if offset is None:
                offset = start - start  # 0, as an int or a Fraction
            if start < stop:
                ranges.append((start, stop, index, offset))
                offset += stop - start
    ranges.sort(key=lambda item: item[0])
    for before, after in itertools.pairwise(ranges):
        if before[1] != after[0]:
            raise BridgeError(f"shards of the {side} do not tile an axis: one ends at {before[1]}, the next is {after}")
    return ranges


@lru_cache(maxsize=256)
def shares(a: int, b: int) -> tuple[tuple[int, int, Fraction, Fraction], ...]:
    """(sender, receiver, start, stop) of the parts of [0, 1) that ``a`` equal senders give to ``b`` equal receivers.

    The overlaps of [i/a, (i+1)/a) with [j/b, (j+1)/b), which are ``a + b - gcd(a, b)``.
    """
    found = []
    i = j = 0
    while i < a and j < b:
        start = max(Fraction(i, a), Fraction(j, b))
        stop = min(Fraction(i + 1, a), Fraction(j + 1, b))
        found.append((i, j, start, stop))
        i, j = i + (stop == Fraction(i + 1, a)), j + (stop == Fraction(j + 1, b))
    return tuple(found)
