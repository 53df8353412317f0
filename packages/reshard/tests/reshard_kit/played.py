"""A reshard plan run on the tensors of all ranks in one process, and what a rank holds of a whole tensor."""

from __future__ import annotations

import itertools
import math

import torch

from pipegrid.reshard import Partial

EMPTY = torch.iinfo(torch.int64).min


def part(whole, spans):
    """What a rank with these ranges holds of the whole tensor."""
    return chosen(whole, [[i for a, b in held for i in range(a, b)] for held in spans])


def chosen(whole, indices):
    """What a rank with these indices along each axis holds of the whole tensor."""
    for axis, index in enumerate(indices):
        whole = whole.index_select(axis, torch.tensor(index, dtype=torch.long))
    return whole


def contribution(side, rank):
    """Which of the partial sums a rank holds: none along dims that are not Partial."""
    index = 0
    for dim, coord in zip(side.dims, side.coords_of[rank], strict=True):
        if isinstance(dim.placement, Partial):
            index = index * dim.size + coord
    return index


def contributions(side, shape, *, seed, dtype=torch.int64, most=8):
    """A whole tensor for each partial sum of a side: integers so small that sums are exact in any dtype and order."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(dim.size for dim in side.dims if isinstance(dim.placement, Partial))
    return [torch.randint(-most, most + 1, shape, generator=generator).to(dtype) for _ in range(count)]


def inside(box):
    """The index of a box in a tensor."""
    return tuple(slice(start, start + extent) for start, extent in zip(box.start, box.shape, strict=True))


def play(plan, tensors):
    """What each rank of the destination has after all steps of a plan: every element was written exactly once."""
    given = dict(tensors)
    for group in plan.reductions:
        given |= dict.fromkeys(group, sum(tensors[rank] for rank in group))
    out = {rank: torch.full(plan.destination_shape(rank), EMPTY) for rank in plan.dst.ranks}
    left = {rank: tensor.numel() for rank, tensor in out.items()}

    def write(rank, box, values):
        place = out[rank][inside(box)]
        assert place.shape == values.shape == box.shape
        place.copy_(values)
        left[rank] -= box.numel

    for message in plan.messages:
        write(message.destination, message.destination_box, given[message.source][inside(message.source_box)])
    received = {rank: tensor.clone() for rank, tensor in out.items()}
    for step in plan.completions:
        for giver, boxes in zip(step.ranks, step.boxes, strict=True):
            for taker, box in itertools.product(set(step.ranks) - {giver}, boxes):
                write(taker, box, received[giver][inside(box)])
    assert not any(left.values())  # as many as there are, and each of them
    assert not any((tensor == EMPTY).any() for tensor in out.values())
    return out
