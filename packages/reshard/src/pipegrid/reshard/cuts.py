"""The cuts of each axis by the two sides of a boundary, and which of their shards overlap. Pure; no torch.

An axis of 6 rows, which the source holds in 2 shards and the destination in 3:

    source         ((0, 3),)   ((3, 6),)               per shard the ranges of the axis that it stores, in order
    destination    ((0, 2),)   ((2, 4),)   ((4, 6),)
    meetings       (0, 0): [(0, 0, 2)]   (0, 1): [(2, 0, 1)]   (1, 1): [(0, 1, 1)]   (1, 2): [(1, 0, 2)]

``(0, 1): [(2, 0, 1)]``: from row 2 of source shard 0 to row 0 of destination shard 1 goes 1 row. A class of ranks
(`Side.classes`) is one shard of every axis. Two classes exchange where their shards overlap along all axes, and the
boxes are the products of these ranges (`pieces`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Generic, Literal

from attrs import frozen

from pipegrid.reshard.box import Box, Point, Span, overlaps
from pipegrid.reshard.errors import BridgeError
from pipegrid.reshard.side import BATCH, Side
from pipegrid.reshard.sizes import AxisNames, Parts, Sizes, axis_spans, batch_map

Triple = tuple[Point, Point, Point]
"""An overlap of two shards: offset in the source's storage, offset in the destination's, length."""

ClassKey = tuple[int, ...]
"""The shard index of a class of ranks along each of `Side.axes`."""


@frozen(slots=False)
class Cut(Generic[Point]):
    """One axis as both sides hold it: the ranges of every shard, in rows or in parts of [0, 1).

    ``names`` are what the axis runs over: ``("b", "s")`` for ``[b*s, h]``. A shard's index counts through the shards of
    every name, the first name being the major one.
    """

    names: tuple[str, ...]
    source: tuple[tuple[tuple[Point, Point], ...], ...]
    destination: tuple[tuple[tuple[Point, Point], ...], ...]

    def flipped(self) -> Cut[Point]:
        """The same with the sides exchanged."""
        return Cut(self.names, self.destination, self.source)

    @cached_property
    def meetings(self) -> dict[tuple[int, int], list[Triple[Point]]]:
        """The overlaps of each pair of shards (source, destination)."""
        return overlaps(self.source, self.destination)

    @cached_property
    def by_source(self) -> dict[int, list[int]]:
        """Destination shards that each source shard overlaps."""
        return _grouped(self.meetings)

    @cached_property
    def by_destination(self) -> dict[int, list[int]]:
        """Source shards that each destination shard overlaps."""
        return _grouped((j, i) for i, j in self.meetings)


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    grouped: dict[int, list[int]] = {}
    for first, second in pairs:
        grouped.setdefault(first, []).append(second)
    return grouped


def row_cuts(src: Side, dst: Side, sizes: Sizes) -> tuple[Cut[int], ...]:
    """The rows that each shard of either side holds, per axis of the tensor."""
    check_axes(src, dst, sizes.axes)
    src_lanes, dst_lanes, to_sample = batch_map(src, dst, sizes)

    def spans(side: Side, lanes: Parts, axis: int) -> tuple[tuple[Span, ...], ...]:
        held = [lanes if name == BATCH else side.intervals(name) for name in sizes.axes[axis]]
        return tuple(axis_spans(sizes, axis, parts, to_sample) for parts in itertools.product(*held))

    return tuple(
        Cut(names, spans(src, src_lanes, axis), spans(dst, dst_lanes, axis)) for axis, names in enumerate(sizes.axes)
    )


def part_cuts(src: Side, dst: Side, axes: AxisNames) -> tuple[Cut[Fraction], ...]:
    """The parts of [0, 1) that each shard of either side holds, per named axis: all that is known without sizes.

    Rounding parts to rows is monotone, so shards that do not overlap here never do, whatever the sizes.
    """
    check_axes(src, dst, axes)
    return tuple(Cut((name,), src.intervals(name), dst.intervals(name)) for names in axes for name in names)


def check_axes(src: Side, dst: Side, axes: AxisNames) -> None:
    """Raise for sides that shard an axis which the tensor does not have."""
    named = [name for names in axes for name in names]
    for side in (src, dst):
        if unnamed := [axis for axis in side.axes if axis not in named]:
            raise BridgeError(f"side {side.name!r} shards axis {unnamed[0]!r}; the tensor's axes are {named}")


def meeting_classes(
    src: Side, dst: Side, cuts: Sequence[Cut[Point]], rank: int | None = None
) -> Iterator[tuple[ClassKey, ClassKey, tuple[tuple[int, int], ...]]]:
    """Pairs of classes (see `Side.classes`) that overlap along every axis, and the overlapping shards of each cut.

    With ``rank``, only pairs of which it is in one of the two classes.
    """
    starts: list[tuple[list[tuple[int, int]], ...]] = []
    if rank is None:
        starts.append(tuple(list(cut.meetings) for cut in cuts))
    else:
        if rank in src.coords_of:
            here = zip(_shard_indices(src, src.class_of(rank), cuts), cuts, strict=True)
            starts.append(tuple([(i, j) for j in cut.by_source.get(i, ())] for i, cut in here))
        if rank in dst.coords_of:
            there = zip(_shard_indices(dst, dst.class_of(rank), cuts), cuts, strict=True)
            starts.append(tuple([(i, j) for i in cut.by_destination.get(j, ())] for j, cut in there))
    seen: set[tuple[tuple[int, int], ...]] = set()
    for pairs_per_cut in starts:
        for pairs in itertools.product(*pairs_per_cut):
            if pairs not in seen:
                seen.add(pairs)
                yield (
                    _class_key(src, [i for i, _ in pairs], cuts),
                    _class_key(dst, [j for _, j in pairs], cuts),
                    pairs,
                )


def _shard_indices(side: Side, key: ClassKey, cuts: Sequence[Cut[Point]]) -> list[int]:
    shard = dict(zip(side.axes, key, strict=True))
    indices = []
    for cut in cuts:
        index = 0
        for name in cut.names:
            index = index * side.num_shards(name) + shard.get(name, 0)
        indices.append(index)
    return indices


def _class_key(side: Side, indices: Sequence[int], cuts: Sequence[Cut[Point]]) -> ClassKey:
    shard: dict[str, int] = {}
    for index, cut in zip(indices, cuts, strict=True):
        rest = index
        for name in reversed(cut.names):
            rest, shard[name] = divmod(rest, side.num_shards(name))
    return tuple(shard[name] for name in side.axes)


def pieces(pairs: Sequence[tuple[int, int]], cuts: Sequence[Cut[int]]) -> list[tuple[Box, Box]]:
    """The boxes (in the source's tensor, in the destination's) in which two shards of every axis overlap."""
    per_axis = [cut.meetings[pair] for pair, cut in zip(pairs, cuts, strict=True)]
    return [
        (
            Box(tuple(t[0] for t in triples), tuple(t[2] for t in triples)),
            Box(tuple(t[1] for t in triples), tuple(t[2] for t in triples)),
        )
        for triples in itertools.product(*per_axis)
    ]


def local_spans(
    side: Side, rank: int, cuts: Sequence[Cut[int]], end: Literal["source", "destination"]
) -> tuple[tuple[Span, ...], ...]:
    """The ranges of the whole tensor that ``rank`` holds, per axis, in the order it stores them."""
    indices = _shard_indices(side, side.class_of(rank), cuts)
    return tuple(getattr(cut, end)[index] for index, cut in zip(indices, cuts, strict=True))


def local_shape(spans: Sequence[Sequence[Span]]) -> tuple[int, ...]:
    """The shape of a tensor that stores these ranges."""
    return tuple(sum(stop - start for start, stop in axis) for axis in spans)
