"""The U: its counts, and that no order of any position is faster, tried one by one."""

from __future__ import annotations

import itertools
import random

import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.plans import (
    Costs,
    CostsError,
    PlanError,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    simulate,
    u_shape,
    u_shape_counts,
    verify,
)
from pipegrid.plans.generators.registry import find_schedule
from pipegrid.plans.generators.shapes import OrderBuilder
from plan_kit.orders import every_order, least_makespan, makespan_of, split_passes, u_passes


@frozen
class Model:
    """A U of P positions: per stage its forward and backward, and per edge the latency of a message."""

    forwards: tuple
    backwards: tuple
    links: tuple

    @property
    def positions(self):
        return len(self.links)

    @property
    def costs(self):
        latency = {Edge(stage, stage + 1): link for stage, link in enumerate(self.links)}
        return Costs(F=self.forwards, B=self.backwards, latency=latency)

    def makespan(self, m, **options):
        return simulate(u_shape(self.positions, m, costs=self.costs, **options), self.costs).makespan

    def shortest(self, m):
        limits = u_shape_counts(self.positions, costs=self.costs).in_flight
        return least_makespan(u_passes(self.forwards, self.backwards, self.links), m, limits)


def unit(p):
    return Model((0.5, *[1] * (p - 1), 0.5), (1, *[2] * (p - 1), 1), (0,) * p)


def split_model(rng, *, links):
    """Backwards of twice the forwards, equal stages, a head and a tail with no more work than one of these."""
    p, stage = rng.choice((2, 2, 3, 3, 4)), rng.randint(2, 10)
    head = rng.randint(1, stage - 1)
    tail = rng.choice((stage - head, rng.randint(1, stage - head)))
    forwards = (head, *[stage] * (p - 1), tail)
    link = rng.choice(links)
    return Model(forwards, tuple(2 * f for f in forwards), (link, *[0] * (p - 2), link))


def any_model(rng):
    """Stages of any costs, so that any position may be the slowest."""
    p, (f, b) = rng.choice((2, 2, 3)), (rng.randint(2, 6), rng.randint(2, 12))
    head, tail = rng.randint(1, 8), rng.randint(1, 8)
    link = rng.choice((0, 0, 1, 3, 8, 20))
    backwards = (head * rng.choice((1, 2)), *[b] * (p - 1), tail * rng.choice((1, 2)))
    return Model((head, *[f] * (p - 1), tail), backwards, (link, *[0] * (p - 2), link))


@pytest.mark.parametrize(
    ("passes", "numbers"),
    [
        (u_passes((1, 2, 1), (2, 4, 1), (1, 1)), (1, 14, 462)),
        (split_passes((0, 1), {"F": 1, "I": 1.5, "W": 0.5}, hop=0.25), (1, 5, 42)),
    ],
    ids=["a U", "split backwards"],
)
def test_the_brute_force_is_every_order_played_one_by_one(passes, numbers):
    for m, number in enumerate(numbers, start=1):
        first, second = (list(every_order(passes, m, position)) for position in (0, 1))
        assert len(first) == number
        played = [makespan_of(passes, orders) for orders in itertools.product(first, second)]
        assert min(each for each in played if each is not None) == least_makespan(passes, m, (None, None))


def test_a_limit_is_on_the_microbatches_that_a_position_holds():
    passes = u_passes((1, 1, 1), (1, 1, 1), (5, 5))
    alone = least_makespan(passes, 1, (None, None))
    assert alone == 26
    assert least_makespan(passes, 3, (1, 1)) == 3 * alone
    assert least_makespan(passes, 3, (2, 2)) < 3 * alone


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_no_order_of_any_position_is_faster_at_unit_costs(p):
    for m in range(1, 7 if p < 4 else 6):
        assert simulate(u_shape(p, m)).makespan == unit(p).shortest(m)


@pytest.mark.nightly
@pytest.mark.parametrize(("p", "most"), [(2, 12), (3, 9), (4, 7), (5, 5)])
def test_no_order_of_more_microbatches_is_faster_at_unit_costs(p, most):
    for m in range(1, most + 1):
        assert simulate(u_shape(p, m)).makespan == unit(p).shortest(m)


def excess(model, m):
    """How much longer the plan takes than the best of all orders."""
    return model.makespan(m) / model.shortest(m) - 1


@pytest.mark.parametrize(("count", "seed", "most"), [(12, 1, 5), pytest.param(300, 2, 6, marks=pytest.mark.nightly)])
def test_hardly_any_order_is_faster_at_other_costs_and_over_slow_links(count, seed, most):
    """Exact wherever the closed form is stated; near the best elsewhere."""
    rng = random.Random(seed)
    for _ in range(count):
        m = rng.randint(1, most)
        free, linked, other = split_model(rng, links=(0,)), split_model(rng, links=(1, 2, 5, 13, 30)), any_model(rng)
        assert excess(free, m) == pytest.approx(0, abs=1e-12), (free, m)
        assert excess(linked, m) < 0.1, (linked, m)
        assert excess(other, m) < 0.25, (other, m)


def test_the_counts_at_unit_costs():
    for p in range(2, 65):
        counts = u_shape_counts(p)
        assert counts.in_flight == (p + 1, *range(p, 1, -1))
        assert counts.head_warmup == p + 1
        assert counts.tail_extra == 2 * (p - 1) // 3 + 1
    assert u_shape_counts(1).in_flight == (1,)
    free = u_shape_counts(3, costs=Costs(F=(0.0, 1.0, 1.0, 1.0), B=(1.0,) * 4))  # heads that take no time
    assert free.head_warmup == free.in_flight[0] == 4


@pytest.mark.parametrize("p", range(2, 10))
def test_as_many_extra_tail_passes_as_stated_and_no_fewer(p):
    m, extra = 4 * p, u_shape_counts(p).tail_extra
    plan = u_shape(p, m)
    tokens = [str(action) for action in plan.positions[0]]
    assert tokens[: tokens.index("0B0")].count(f"{p}B{extra}") == 1
    assert not any(token.startswith(f"{p}B{extra + 1}") for token in tokens[: tokens.index("0B0")])
    best = simulate(plan).makespan
    for other in range(min(extra + 3, p + 1)):  # no more than there are heads
        makespan = simulate(evolve(plan, positions=(edge_order(p, m, other), *plan.positions[1:]))).makespan
        assert (makespan == best) if other == extra else (makespan > best), other


def edge_order(p, m, extra):
    """Position 0 with another number of extra tail passes, everything else alike."""
    counter = OrderBuilder(m)
    for _ in range(p + 1):
        counter.f(0)
    for _ in range(1 + extra):
        counter.f(p)
        counter.b(p)
    for _ in range(m):
        counter.b(0)
        counter.f(0)
        counter.f(p)
        counter.b(p)
    return counter.order


def test_one_unit_less_bubble_than_1f1b_and_far_less_than_the_same_cut_looped():
    for p, m in ((2, 8), (4, 16), (8, 32)):
        assert simulate(u_shape(p, m)).makespan == simulate(one_f_one_b(p, m)).makespan - 1
        looped = interleaved_1f1b(p, m, num_stages=p + 1)
        assert looped.placement == u_shape(p, m).placement
        assert simulate(looped).makespan > simulate(u_shape(p, m)).makespan + p


times = st.integers(1, 12)


@given(p=st.integers(2, 8), m=st.integers(2, 24), stage=times, head=times, tail=times)
def test_the_closed_form_with_free_links_and_a_head_and_a_tail_of_at_most_a_stage(p, m, stage, head, tail):
    forwards = (head, *[stage + max(0, head + tail - stage)] * (p - 1), tail)
    model = Model(forwards, tuple(2 * f for f in forwards), (0,) * p)
    f, b, turn = forwards[1], 2 * forwards[1], 3 * tail
    waits = max(0, turn - f) + max(0, turn - b)
    assert model.makespan(m) == (m + p - 2) * (f + b) + 3 * head + waits


def test_a_slow_link_costs_its_latency_once_and_nothing_per_microbatch():
    for link in (0.5, 2, 10, 40):
        for p in (2, 4):
            model = evolve(unit(p), links=(link, *[0] * (p - 2), link))
            assert model.makespan(60) - model.makespan(40) == pytest.approx(20 * 3)
            assert model.makespan(60) < 60 * 3 + 3 * p + 4 * link
            if link > 1:
                plain = simulate(u_shape(p, 60), model.costs).makespan
                assert plain > model.makespan(60) + 20 * min(link, 4)


def test_a_slow_link_is_paid_in_microbatches_held():
    model = evolve(unit(4), links=(6, 0, 0, 6))
    assert u_shape_counts(4, costs=model.costs).in_flight == (13, 8, 7, 6)
    proof = verify(u_shape(4, 40, costs=model.costs))
    assert proof.peak_live == (7, 8, 7, 6)  # heads count half, and one tail
    assert u_shape_counts(4, costs=model.costs, in_flight=7).in_flight == (7, 7, 7, 6)


def test_bandwidth_counts_as_time_on_the_way_and_bounds_the_rate():
    shares = {"F": (0.5, 1, 1, 0.5), "B": (1, 2, 2, 1)}
    fast = Costs(**shares, message=2, bandwidth=1)
    assert u_shape_counts(3, costs=fast) == u_shape_counts(3, costs=Costs(**shares, latency=2))
    at = {m: simulate(u_shape(3, m, costs=fast), fast).makespan for m in (40, 60)}
    assert at[60] - at[40] == pytest.approx(20 * 3)
    # A period of 9, for then the lanes are what is slowest: fewer microbatches fill the way.
    saturated = Costs(**shares, message=9, bandwidth=1)
    assert u_shape_counts(3, costs=saturated).in_flight < u_shape_counts(3, costs=Costs(**shares, latency=9)).in_flight


@given(
    p=st.integers(1, 5),
    m=st.integers(1, 9),
    seed=st.integers(0, 2**20),
    cap=st.none() | st.integers(1, 6),
    receives=st.sampled_from(("late", "early")),
)
def test_it_can_be_lowered_and_run_at_any_costs_and_under_any_cap(p, m, seed, cap, receives):
    rng = random.Random(seed)
    costs = Costs(
        F=[rng.choice((0, 0.1, 1, 3, 20)) for _ in range(p + 1)],
        B=[rng.choice((0.1, 1, 3, 20)) for _ in range(p + 1)],
        latency=rng.choice((0, 0.3, 5, 100)),
        overhead=rng.choice((0, 0.05)),
    )
    plan = u_shape(p, m, costs=costs, in_flight=cap)
    held = u_shape_counts(p, costs=costs, in_flight=cap).in_flight
    assert cap is None or max(held) <= cap
    limits = [min(held[0], m) / 2 + 1 / 2, *held[1:]]
    for lanes in ("separate", "shared"):
        verify(lower(plan, receives=receives), lanes=lanes, memory_limit=limits)


def test_the_messages_cost_no_time_that_the_computes_did_not_need():
    for p, m in ((1, 3), (2, 5), (3, 7), (5, 12)):
        for receives in ("late", "early"):
            lowered = lower(u_shape(p, m), receives=receives)
            assert simulate(lowered).makespan == simulate(u_shape(p, m)).makespan


def test_no_forward_order_is_faster():
    for p in (1, 2, 3, 4):
        for m in range(1, 6):
            passes = u_passes(unit(p).forwards, (), unit(p).links)
            plan = u_shape(p, m, forward_only=True)
            assert simulate(plan).makespan == least_makespan(passes, m, (None,) * p) == m + p - 1
            verify(lower(plan))


def test_forwards_over_a_slow_link_keep_the_rate():
    model = evolve(unit(3), links=(7, 0, 7))
    at = {m: model.makespan(m, forward_only=True) for m in (40, 60)}
    assert at[60] - at[40] == pytest.approx(20)
    assert at[40] == pytest.approx(0.5 + 7 + 2 + 7 + 39 + 0.5)


def test_it_is_among_the_named_schedules():
    assert find_schedule("U-shape").plan(3, 4) == u_shape(3, 4)


def test_bad_input_is_explained():
    with pytest.raises(PlanError, match="in_flight is 0; it must be an integer of at least 1"):
        u_shape(2, 4, in_flight=0)
    with pytest.raises(CostsError, match="F is given for 2 stages; the plan has 3"):
        u_shape(2, 4, costs=Costs(F=(1, 1)))
    with pytest.raises(CostsError, match="no stage takes any time by these costs"):
        u_shape(2, 4, costs=Costs(F=0, B=0))
