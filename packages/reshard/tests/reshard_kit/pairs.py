"""All sides of a boundary on grids of up to 8 ranks, and what each of their ranks holds, from the grid's arithmetic.

Nothing here asks the code under test what a rank holds. A plan depends on a side only through its *kind*: in how
many parts it holds each axis, and how many copies there are of each part; `alike` names ranks by that, and a test
shows for every side that its plans are those of its kind with the ranks renamed.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from types import SimpleNamespace

import torch

from pipegrid.reshard import Partial, Replicate, Shard, Sizes, axis_names, boundary_side

from .played import chosen, contribution, play

MOST = 8
DIMS = ("tp", "cp", "dp", "pp", "ep")
SHAPES = [shape for shape in itertools.product(range(1, MOST + 1), repeat=len(DIMS)) if math.prod(shape) <= MOST]
PLACEMENTS = [
    {"ep": ep, "cp": cp, "tp": tp}
    for ep in (Shard("b"), Replicate(), Partial(), Shard("h"))
    for cp in (Shard("s"), Shard("s", order="zigzag"), Partial())
    for tp in (Replicate(), Shard("s"))
]


def make_side(shape, placements, end, offset=0):
    """The side of a grid whose dims are `DIMS`."""
    return boundary_side(SimpleNamespace(shape=shape, dim_names=DIMS, rank_offset=offset), end, placements=placements)


def kind_of(side):
    """What a plan can depend on, beside the names of the ranks."""
    parts = {}
    for axis in sorted(side.axes):
        cuts = []
        for size, order in side.sharding(axis):
            if order == "contiguous" and cuts and cuts[-1][1] == "contiguous":
                cuts[-1] = (cuts[-1][0] * size, order)
            else:
                cuts.append((size, order))
        parts[axis] = tuple(cuts)
    copies = len(next(iter(side.classes.values())))
    summed = len(side.partial_groups[0]) if side.partial_groups else 1
    return tuple(parts.items()), copies, summed


def every_side(end="source", offset=0):
    """Every grid with every placement, with repetitions: `kind_of` sorts them."""
    for shape, placements in itertools.product(SHAPES, PLACEMENTS):
        yield make_side(shape, placements, end, offset)


@cache
def kinds(end, offset=0):
    """One side of each kind."""
    found = {}
    for side in every_side(end, offset):
        found.setdefault(kind_of(side), side)
    return tuple(found.values())


def renamed(side):
    """Per rank a name that is the same on all sides of one kind: the part of each axis, and which copy of it."""
    names = {}
    for ranks in side.classes.values():
        for copy, rank in enumerate(ranks):
            names[rank] = (*(side.shard_of(rank, axis) for axis in sorted(side.axes)), copy)
    return names


# -- sizes ------------------------------------------------------------------------------------------

SIZES = ("even", "uneven", "given", "packed", "zero")


def sizes_for(src, dst, kind):
    """Sizes of one of `SIZES` for a pair of sides: numbers that nothing divides, unless they are even."""
    a, b = src.num_lanes, dst.num_lanes
    lanes = [(5 * lane + 3) % 4 for lane in range(a)]  # 3, 0, 1, 2, ...
    if kind == "even":
        return Sizes((math.lcm(a, b), 16, 4), axes=axis_names(3))
    if kind == "uneven":
        return Sizes((sum(lanes), 7, 3), axes=axis_names(3), src_lanes=lanes)
    if kind == "given":
        lanes = [lane + 1 for lane in lanes]
        total = sum(lanes)
        ends = [(total * (lane + 1) ** 2) // b**2 for lane in range(b)]
        taken = [stop - start for start, stop in itertools.pairwise([0, *ends])]
        return Sizes((total, 7, 3), axes=axis_names(3), src_lanes=lanes, dst_lanes=taken)
    if kind == "packed":
        samples = [(3 * sample + 5) % 7 for sample in range(sum(lanes))]  # 5, 1, 4, 0, ...
        return Sizes((sum(samples), 3), axes=axis_names(2), src_lanes=lanes, samples=samples)
    return Sizes((0, 16, 4), axes=axis_names(3))


def blocks(samples, lanes):
    """Ends of consecutive blocks, dealt out one sample after another: the first lanes have one more."""
    return list(itertools.accumulate(len(range(lane, samples, lanes)) for lane in range(lanes)))


def lane_ends(src, dst, sizes):
    """Per lane of the destination, the sample after its last.

    The blocks of the whole batch, where the source replicas are its blocks, too. Else each source replica is cut as the
    blocks of a batch would be in which all source replicas are like it, and nothing crosses from one into the next.
    """
    if sizes.dst_lanes is not None:
        return list(itertools.accumulate(sizes.dst_lanes))
    lanes, a, b = source_lanes(src, sizes), src.num_lanes, dst.num_lanes
    ends = list(itertools.accumulate(lanes))
    if ends == blocks(sum(lanes), a):
        return blocks(sum(lanes), b)
    found = []
    for lane in range(1, b + 1):
        whole, part = divmod(lane * a, b)
        start = ends[whole - 1] if whole else 0
        found.append(start)
        if part:
            samples = range(whole * lanes[whole], (whole + 1) * lanes[whole])
            found[-1] += sum(sample < blocks(a * lanes[whole], b)[lane - 1] for sample in samples)
    return found


def source_lanes(src, sizes):
    """Samples of each source replica; blocks of the batch, unless given."""
    if sizes.src_lanes is not None:
        return sizes.src_lanes
    samples = sizes.shape[0] if sizes.samples is None else len(sizes.samples)
    return [stop - start for start, stop in itertools.pairwise([0, *blocks(samples, src.num_lanes)])]


def parts_of(side, axis):
    """Per shard of an axis, the fractions ``(numerator, denominator)`` between which it lies, in storage order."""
    held = [[(0, 1, 1)]]  # (start, stop, denominator)
    for size, order in side.sharding(axis):
        held = [piece for whole in held for piece in _cut(whole, size, order)]
    return held


def _cut(whole, size, order):
    if order == "zigzag":
        chunks = _cut(whole, 2 * size, "contiguous")
        return [chunks[i] + chunks[2 * size - 1 - i] for i in range(size)]
    # In units so small that every piece is whole: the storage of ``whole``, unit by unit.
    units = []
    for start, stop, denominator in whole:
        units += [(size * start + k, size * denominator) for k in range(size * (stop - start))]
    length = len(units) // size
    return [[(u, u + 1, d) for u, d in units[i * length : (i + 1) * length]] for i in range(size)]


def rows_of(side, axis, extent):
    """Per shard of a plain axis, the indices it holds."""
    return [
        tuple(i for start, stop, d in part for i in range(extent * start // d, extent * stop // d))
        for part in parts_of(side, axis)
    ]


def held_by(side, sizes, ends):
    """Per rank and axis of the tensor, the indices that it holds; ``ends`` of the side's replicas, in samples."""
    lanes = [range(start, stop) for start, stop in itertools.pairwise([0, *ends])]
    names = "sh" if sizes.samples is None else "h"
    plain = {name: rows_of(side, name, extent) for name, extent in zip(names, sizes.shape[1:], strict=True)}
    held = {}
    for rank in side.ranks:
        lane = lanes[side.lane_of(rank)]
        if sizes.samples is None:
            rows = tuple(lane)
        else:
            rows = tokens_of(lane, parts_of(side, "s")[side.shard_of(rank, "s")], sizes.samples)
        held[rank] = (rows, *(plain[name][side.shard_of(rank, name)] for name in names))
    return held


def tokens_of(lane, part, samples):
    """The tokens of the samples of a lane that lie in a part of the sequence, whose samples are packed."""
    starts = [0, *itertools.accumulate(samples)]
    return tuple(
        starts[sample] + row
        for sample in lane
        for start, stop, d in part
        for row in range(samples[sample] * start // d, samples[sample] * stop // d)
    )


# -- the proof --------------------------------------------------------------------------------------


def holdings(src, dst, sizes):
    """What every rank of either side holds of a tensor whose elements are numbered."""
    numbered = torch.arange(math.prod(sizes.shape)).view(sizes.shape)
    ends = (src, list(itertools.accumulate(source_lanes(src, sizes)))), (dst, lane_ends(src, dst, sizes))
    return [
        {rank: chosen(numbered, axes) for rank, axes in held_by(side, sizes, lanes).items()} for side, lanes in ends
    ]


def prove(plan, given, taken):
    """Every destination element is written once, by a message or a completion, from a rank that holds it.

    ``given`` and ``taken``: what every rank of either side holds. How many elements cross.
    """
    # One of the parts of a sum is all of it.
    held = {rank: tensor * (contribution(plan.src, rank) == 0) for rank, tensor in given.items()}
    for rank, tensor in play(plan, held).items():
        assert torch.equal(tensor, taken[rank])
    return sum(message.source_box.numel for message in plan.messages if message.source != message.destination)
