"""Samples spread over lanes and microbatches: each once, none empty, near the best, the same on every rank."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.training import balance_samples

COSTS = st.lists(st.one_of(st.integers(0, 60), st.floats(0, 60, allow_subnormal=False)), min_size=1, max_size=60)


def parts_of(found):
    return [part for parts in found.replicas for part in parts]


@given(COSTS, st.integers(1, 4), st.integers(1, 4))
def test_every_sample_is_in_one_part_and_no_part_is_empty(costs, lanes, microbatches):
    if len(costs) < lanes * microbatches:
        with pytest.raises(ValueError, match="every part has at least one"):
            balance_samples(costs, lanes, microbatches)
        return
    found = balance_samples(costs, lanes, microbatches)
    assert (len(found.replicas), {len(parts) for parts in found.replicas}) == (lanes, {microbatches})
    assert sorted(itertools.chain(*parts_of(found))) == list(range(len(costs)))
    assert all(parts_of(found))
    assert found == balance_samples(tuple(costs), lanes, microbatches)
    for lane, sums in zip(found.replicas, found.costs, strict=True):
        assert sums == pytest.approx([sum(costs[sample] for sample in part) for part in lane])


@given(COSTS, st.integers(1, 4), st.integers(1, 3))
def test_the_heaviest_part_is_within_a_third_of_every_lower_bound(costs, lanes, microbatches):
    parts = lanes * microbatches
    if len(costs) < parts:
        return
    found = balance_samples(costs, lanes, microbatches)
    ordered = sorted(costs, reverse=True)
    pair = ordered[parts - 1] + ordered[parts] if len(costs) > parts else 0
    bound = max(sum(costs) / parts, ordered[0], pair)
    assert found.heaviest <= bound * 4 / 3 + 1e-9


def best(costs, parts):
    """The lightest heaviest part of all ways to spread a few samples."""
    ways = itertools.product(range(parts), repeat=len(costs))
    return min(
        max(sum(cost for cost, part in zip(costs, way, strict=True) if part == one) for one in range(parts))
        for way in ways
        if set(way) == set(range(parts))
    )


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=3, max_size=7), st.integers(2, 3))
def test_a_few_samples_are_spread_nearly_as_well_as_any_way_can(costs, parts):
    assert best(costs, parts) <= balance_samples(costs, parts).heaviest <= best(costs, parts) * 7 / 6 + 1e-9


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_equal_parts_have_equal_numbers(rows, lanes, microbatches, random):
    costs = [random.randint(1, 50) for _ in range(rows * lanes * microbatches)]
    found = balance_samples(costs, lanes, microbatches, equal=True)
    assert {len(part) for part in parts_of(found)} == {rows}
    assert sorted(itertools.chain(*parts_of(found))) == list(range(len(costs)))


@given(COSTS, st.integers(1, 3), st.integers(2, 4))
def test_the_microbatches_of_a_number_are_alike_on_all_lanes(costs, lanes, microbatches):
    if len(costs) < lanes * microbatches:
        return
    found = balance_samples(costs, lanes, microbatches)
    for earlier, later in itertools.pairwise(range(microbatches)):
        assert min(lane[earlier] for lane in found.costs) >= max(lane[later] for lane in found.costs)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1, 2], 3), "2 samples for 3 parts"),
        (([1, -2], 2), r"costs\[1\]|costs .*-2"),
        (([1, 2], 0), "lanes is 0"),
        (([1, 2], 1, 0), "microbatches is 0"),
    ],
)
def test_what_cannot_be_spread_is_a_clear_error(arguments, text):
    with pytest.raises(ValueError, match=text):
        balance_samples(*arguments)
    with pytest.raises(ValueError, match="are no multiple of 2 parts"):
        balance_samples([1, 2, 3], 2, equal=True)


def test_text_lengths_of_a_long_tail_are_even_over_eight_lanes():
    lengths = [int(16 + 4000 / (1 + sample % 97)) for sample in range(512)]
    assert balance_samples(lengths, 8, 4).imbalance < 0.02
