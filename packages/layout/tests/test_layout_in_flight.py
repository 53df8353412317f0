"""The peaks of 1F1B are those of the schedule, played action by action."""

from __future__ import annotations

import itertools
import re

import pytest

from pipegrid.layout import LayoutError, in_flight_1f1b


def play(rank: int, pp: int, vpp: int, microbatches: int) -> set[tuple[int, ...]]:
    """Every combination of in-flight microbatches per chunk that a rank has, forwards and backwards in order."""
    groups = [range(start, min(start + pp, microbatches)) for start in range(0, microbatches, pp)]
    forwards = [chunk for group in groups for chunk in range(vpp) for _ in group]
    backwards = [vpp - 1 - chunk for chunk in forwards]
    warmup = pp - rank - 1 if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp
    warmup = min(warmup, len(forwards))
    order = [(chunk, 1) for chunk in forwards[:warmup]]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [(forward, 1), (backward, -1)]
    order += [(chunk, -1) for chunk in backwards[len(forwards) - warmup :]]
    counts = [0] * vpp
    states = set()
    for chunk, change in order:
        counts[chunk] += change
        states.add(tuple(counts))
    assert counts == [0] * vpp
    return states


def largest(states: set[tuple[int, ...]], weights: tuple[int, ...]) -> int:
    return max(sum(n * w for n, w in zip(state, weights, strict=True)) for state in states)


SIZES = [
    (pp, vpp, microbatches)
    for pp, vpp in itertools.product(range(1, 6), range(1, 5))
    for microbatches in (1, 2, 3, pp, pp + 1, 2 * pp, 3 * pp + 2, 7 * pp)
]


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), SIZES)
def test_no_moment_of_the_schedule_holds_more(pp, vpp, microbatches):
    for rank, peaks in enumerate(in_flight_1f1b(pp, vpp, microbatches)):
        states = play(rank, pp, vpp, microbatches)
        assert set(peaks) <= states
        for weights in itertools.product((0, 1, 2, 5), repeat=vpp):
            assert largest(set(peaks), weights) == largest(states, weights)


@pytest.mark.parametrize(("pp", "vpp"), list(itertools.product(range(1, 6), range(1, 5))))
def test_without_a_number_of_microbatches_it_is_the_steady_state(pp, vpp):
    assert in_flight_1f1b(pp, vpp) == in_flight_1f1b(pp, vpp, 12 * pp)


def test_known_values():
    assert in_flight_1f1b(4) == (((4,),), ((3,),), ((2,),), ((1,),))
    assert in_flight_1f1b(4, microbatches=2) == (((2,),), ((2,),), ((2,),), ((1,),))
    assert in_flight_1f1b(4, 2)[0] == ((7, 4), (8, 3))


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((0,), "pp is 0; it must be an integer of at least 1"),
        ((2, 0), "vpp is 0; it must be an integer of at least 1"),
        ((2, 1, 0), "microbatches is 0; it must be an integer of at least 1"),
        ((True,), "pp is True; it must be an integer of at least 1"),
        ((10**6, 2), "pp 1000000 and vpp 2 make 2000000 stages; the most are 1,000,000"),
    ],
)
def test_bad_sizes_are_errors(arguments, rule):
    with pytest.raises(LayoutError, match=re.escape(rule)):
        in_flight_1f1b(*arguments)
