"""The invariants of a reshard plan, for all pairs of grids with up to 8 ranks a side.

Dims are tp, cp, dp, pp and one declared extra dim; every strategy; even, uneven and given lanes, packed tokens, no
rows. 96 grids with 24 placements make 2 304 sides, of 137 kinds; so 18 769 pairs, 281 535 times with every strategy
and kind of sizes, each both ways; and 9 216 pairs of grids that overlap, with every strategy. That runs nightly, in
about eight minutes of one core; a part of it always runs.
"""

from __future__ import annotations

import itertools
import math

import pytest

from pipegrid.reshard import Message, plan_reshard
from reshard_kit.pairs import (
    MOST,
    PLACEMENTS,
    SHAPES,
    SIZES,
    every_side,
    holdings,
    kind_of,
    kinds,
    make_side,
    prove,
    renamed,
    sizes_for,
)

STRATEGIES = ("direct", "leader", "auto")
MIDDLE = 200  # bytes: "auto" leads for some sets of copies of a boundary, and shares for others


def disjoint_pairs():
    """One pair of sides for each pair of kinds."""
    return list(itertools.product(kinds("source"), kinds("destination", MOST)))


def both_ways(src, dst, kind, strategy, *, rank=None):
    """Plans of both directions, each proved; the sides, too, may overlap."""
    sizes = sizes_for(src, dst, kind)
    given, taken = holdings(src, dst, sizes)
    options = {"strategy": strategy, "leader_below": MIDDLE}
    forward = plan_reshard(src, dst, sizes, **options)
    backward = forward.adjoint()
    apart = set(src.ranks).isdisjoint(dst.ranks)
    for plan, crossing in ((forward, prove(forward, given, taken)), (backward, prove(backward, taken, given))):
        assert crossing <= math.prod(sizes.shape)
        if apart:
            assert crossing == math.prod(sizes.shape)  # each byte crosses once
        assert plan.reductions == plan.src.partial_groups
    if apart:
        # Backward is forward with the arrows turned round: with the proof above, the adjoint.
        mirrored = {Message(m.destination, m.source, m.destination_box, m.source_box) for m in forward.messages}
        assert mirrored == set(backward.messages)
    if rank is not None:
        own = plan_reshard(src, dst, sizes, rank=rank, **options)
        assert own.sends(rank) == forward.sends(rank)
        assert own.receives(rank) == forward.receives(rank)
        assert own.completions == tuple(step for step in forward.completions if rank in step.ranks)


def prove_all(pairs, kind, strategy):
    for number, (src, dst) in enumerate(pairs):
        # A plan for one rank, another one for each number, depends on the strategy in nothing that the plan for all
        # does not.
        ranks = sorted({*src.ranks, *dst.ranks})
        both_ways(src, dst, kind, strategy, rank=ranks[number % len(ranks)] if strategy == "auto" else None)


def test_there_are_as_many_grids_and_kinds_of_sides_as_said():
    assert len(SHAPES) == 96
    assert len(SHAPES) * len(PLACEMENTS) == len(list(every_side())) == 2304
    assert len(kinds("source")) == len(kinds("destination", MOST)) == 137
    assert len(disjoint_pairs()) == 18_769


def prove_renamed(sides, partner, *, as_source):
    """The plans of sides of one kind are the same but for the names of the ranks."""
    found = {}
    for side in sides:
        src, dst = (side, partner) if as_source else (partner, side)
        plan = plan_reshard(src, dst, sizes_for(src, dst, "uneven"))
        names = {**renamed(partner), **renamed(side)}
        assert set(side.ranks).isdisjoint(partner.ranks)
        text = sorted((names[m.source], names[m.destination], m.source_box, m.destination_box) for m in plan.messages)
        steps = sorted(([names[rank] for rank in step.ranks], step.boxes) for step in plan.completions)
        assert found.setdefault(kind_of(side), (text, steps)) == (text, steps)


PARTNER = (2, 1, 3, 1, 1)  # tp 2, dp 3


@pytest.mark.parametrize("part", [pytest.param(None, marks=pytest.mark.nightly), 11], ids=["all", "some"])
def test_a_plan_depends_on_a_side_through_its_kind_only(part):
    prove_renamed(list(every_side())[::part], make_side(PARTNER, {}, "destination", MOST), as_source=True)
    prove_renamed(list(every_side("destination", MOST))[::part], make_side(PARTNER, {}, "source"), as_source=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", SIZES)
def test_some_pairs_of_sides(kind, strategy):
    first = SIZES.index(kind) + len(SIZES) * STRATEGIES.index(strategy)
    prove_all(disjoint_pairs()[first::397], kind, strategy)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", SIZES)
def test_all_pairs_of_sides(kind, strategy):
    prove_all(disjoint_pairs(), kind, strategy)


def overlapping_pairs():
    """Every pair of grids, the second on some or all of the ranks of the first; placements in turn."""
    for number, (one, two) in enumerate(itertools.product(SHAPES, repeat=2)):
        placements = PLACEMENTS[number % len(PLACEMENTS)]
        yield make_side(one, placements, "source"), make_side(two, placements, "destination", number % math.prod(one))


def test_some_pairs_of_grids_that_overlap():
    prove_all(itertools.islice(overlapping_pairs(), 5, None, 211), "uneven", "direct")


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_pairs_of_grids_that_overlap(strategy):
    prove_all(overlapping_pairs(), "uneven", strategy)
