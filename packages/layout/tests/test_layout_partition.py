"""The partition is exact: it equals trying every cut, for bottleneck, spread and place, with bounds and caps."""

from __future__ import annotations

import itertools
import math
import random
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.layout.balancing.branch_and_bound import RankLimit, search
from pipegrid.layout.balancing.partition import Chain, best_partition, leftmost, rightmost


def chain(costs, stages, *, fixed=None, moving=None, low=None, high=None) -> Chain:
    n = len(costs)
    nothing = [0] * n
    return Chain(
        [0, *accumulate(costs)],
        [0, *accumulate(fixed or nothing)],
        [0, *accumulate(moving or nothing)],
        low or [0] * stages + [n],
        high or [0] + [n] * stages,
    )


def all_cuts(chain: Chain):
    n = len(chain.cost) - 1
    for inner in itertools.combinations_with_replacement(range(n + 1), chain.stages - 1):
        cuts = (0, *inner, n)
        if all(low <= cut <= high for low, cut, high in zip(chain.low, cuts, chain.high, strict=True)):
            yield cuts


def brute_force(chain: Chain, allowed):
    """Largest cost, minus the smallest, cuts: the least over all cuts that are allowed."""
    options = []
    for cuts in all_cuts(chain):
        if allowed(cuts):
            costs = [chain.cost[b] - chain.cost[a] for a, b in pairwise(cuts)]
            options.append((max(costs), -min(costs), cuts))
    return min(options, default=None)


def keeps(chain: Chain, caps, cuts) -> bool:
    return all(
        chain.memory(cuts[stage], cuts[stage + 1], flying) <= limit
        for stage, limits in enumerate(caps)
        for flying, limit in limits.items()
    )


def check(chain: Chain, caps) -> None:
    expected = brute_force(chain, lambda cuts: keeps(chain, caps, cuts))
    found = best_partition(chain, caps)
    if expected is None:
        assert found is None
        return
    # Of all best partitions it is the one with the earliest cuts; those come first in lexicographic order too.
    assert (found.bottleneck, -found.floor, found.cuts) == expected


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("n", range(1, 6))
def test_every_chain_of_small_costs(n, stages):
    for costs in itertools.product((0, 1, 2, 5), repeat=n):
        check(chain(costs, stages), [{}] * stages)


def numbers(n, largest):
    return st.lists(st.integers(0, largest), min_size=n, max_size=n)


@st.composite
def instances(draw):
    n = draw(st.integers(1, 12))
    stages = draw(st.integers(1, 5))
    largest = draw(st.sampled_from([1, 2, 9, 10**6, 10**30]))

    low, high = [0] * stages + [n], [0] + [n] * stages
    if draw(st.booleans()):
        ends = st.lists(st.integers(0, n), min_size=stages - 1, max_size=stages - 1).map(sorted)
        low[1:stages] = draw(ends)
        high[1:stages] = [max(a, b) for a, b in zip(low[1:stages], draw(ends), strict=True)]
    caps = [
        draw(st.dictionaries(st.integers(0, 4), st.integers(0, 60), max_size=2)) if draw(st.booleans()) else {}
        for _ in range(stages)
    ]
    small = numbers(n, 9)
    return chain(draw(numbers(n, largest)), stages, fixed=draw(small), moving=draw(small), low=low, high=high), caps


@settings(max_examples=80, deadline=None)
@given(instances())
def test_with_bounds_and_caps(instance):
    check(*instance)


@settings(max_examples=80, deadline=None)
@given(instances())
def test_leftmost_and_rightmost_are_the_extremes(instance):
    one, caps = instance
    ceiling = max(one.cost[-1] // 2, 1)
    allowed = [
        cuts
        for cuts in all_cuts(one)
        if keeps(one, caps, cuts) and max(one.cost[b] - one.cost[a] for a, b in pairwise(cuts)) <= ceiling
    ]
    if allowed:
        assert tuple(leftmost(one, caps, ceiling)) == tuple(map(min, zip(*allowed, strict=True)))
        assert tuple(rightmost(one, caps, ceiling)) == tuple(map(max, zip(*allowed, strict=True)))
    else:
        assert leftmost(one, caps, ceiling) is None
        assert rightmost(one, caps, ceiling) is None


def least_largest(costs, stages: int, value):
    """The least largest ``value`` of the cost of a stage, by a dynamic program over prefixes of the chain."""
    total = [0, *accumulate(costs)]
    best = {0: -math.inf}
    for _ in range(stages):
        best = {
            end: min(max(best[start], value(total[end] - total[start])) for start in best if start <= end)
            for end in range(len(total))
        }
    return best[len(costs)]


@pytest.mark.parametrize(
    "cost",
    [
        lambda rng, layer: rng.randint(1, 10**6),
        lambda rng, layer: int(1000 * rng.paretovariate(1.1)),
        lambda rng, layer: rng.choice((1000, 3701)),  # almost commensurable: where raising cuts takes longest
        lambda rng, layer: [7, 1, 1, 12, 3][layer % 5] * (1 + layer // 17),
    ],
    ids=["uniform", "heavy tail", "two values", "periodic"],
)
@pytest.mark.parametrize("stages", [2, 7, 16, 30])
def test_longer_chains_equal_a_dynamic_program(cost, stages):
    """Chains that are too long to try every cut."""
    rng = random.Random(stages)
    costs = [cost(rng, layer) for layer in range(60)]
    found = best_partition(chain(costs, stages), [{}] * stages)
    assert found.bottleneck == least_largest(costs, stages, lambda cost: cost)
    kept = least_largest(costs, stages, lambda cost: -cost if cost <= found.bottleneck else math.inf)
    assert found.floor == -kept


def shared(one: Chain, ranks, cuts) -> bool:
    """Does every rank keep its limit at every peak, its chunks together?"""
    return all(
        sum(
            one.memory(cuts[stage], cuts[stage + 1], flying)
            for stage, flying in zip(range(rank, one.stages, len(ranks)), peak, strict=True)
        )
        <= limit.limit
        for rank, limit in enumerate(ranks)
        for peak in limit.peaks
    )


@st.composite
def shared_instances(draw):
    pp, vpp = draw(st.sampled_from([(1, 1), (1, 2), (2, 2), (1, 3), (1, 4), (1, 5), (3, 1), (5, 1)]))
    n = draw(st.integers(1, 9))

    costs, small = numbers(n, draw(st.sampled_from([1, 9, 1000]))), numbers(n, 9)
    one = chain(draw(costs), pp * vpp, fixed=draw(small), moving=draw(small))
    peaks = st.lists(st.tuples(*[st.integers(0, 4)] * vpp), min_size=1, max_size=3).map(tuple)
    ranks = [RankLimit(draw(st.integers(0, 40 * vpp)), draw(peaks)) for _ in range(pp)]
    return one, ranks


@settings(max_examples=80, deadline=None)
@given(shared_instances())
def test_chunks_that_share_a_limit(instance):
    one, ranks = instance
    expected = brute_force(one, lambda cuts: shared(one, ranks, cuts))
    found = search(one, ranks, nodes=100_000)
    assert found.optimal
    if expected is None:
        assert (found.partition, found.bottleneck_bound) == (None, None)
    else:
        assert shared(one, ranks, found.partition.cuts)
        assert (found.partition.bottleneck, -found.partition.floor) == expected[:2]
        assert found.bottleneck_bound == expected[0]


@settings(max_examples=80, deadline=None)
@given(shared_instances(), st.integers(0, 12))
def test_a_search_that_is_cut_short_keeps_its_word(instance, nodes):
    one, ranks = instance
    expected = brute_force(one, lambda cuts: shared(one, ranks, cuts))
    found = search(one, ranks, nodes=nodes)
    if found.partition is not None:
        assert shared(one, ranks, found.partition.cuts)
        assert found.bottleneck_bound <= expected[0] <= found.partition.bottleneck
        if found.optimal:
            assert (found.partition.bottleneck, -found.partition.floor) == expected[:2]
    elif found.optimal:
        assert expected is None


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_many_random_instances(seed):
    rng = random.Random(seed)
    for _ in range(500):
        n, stages = rng.randint(1, 12), rng.randint(1, 5)
        largest = rng.choice((1, 3, 10, 1000))
        one = chain(
            [rng.randint(0, largest) for _ in range(n)],
            stages,
            fixed=[rng.randint(0, 5) for _ in range(n)],
            moving=[rng.randint(0, 9) for _ in range(n)],
        )
        check(one, [{rng.randint(0, 4): rng.randint(0, 90)} if rng.random() < 0.7 else {} for _ in range(stages)])
