"""`search`: as short as the papers' authors are, within the cap, the optimum where it is known, the same everywhere."""

from __future__ import annotations

import itertools
import random

import pytest

from pipegrid.plans import Costs, PlanError, lower, simulate, verify
from pipegrid.plans.generators import SCHEDULES, v_placement
from pipegrid.plans.network.network import as_network
from pipegrid.search import greedy, search
from pipegrid.search.candidates import candidates, problems
from pipegrid.search.exact import has_equal_costs, shortest
from pipegrid.search.patterns import patterns
from plan_kit.orders import least_makespan, split_passes

UNIT = Costs(F=1, I=1, W=1)
PROFILED = Costs(F=4959, I=5217, W=3519, latency=213)
nightly = pytest.mark.nightly


def on_a_v(costs, cap, p, m, **options):
    return search(
        costs, cap, num_positions=p, num_microbatches=m, num_stages=2 * p, placement=v_placement(p), **options
    )


# Makespans in passes of a chunk that the authors' programs reach at the same peak.
@pytest.mark.parametrize(
    ("p", "m", "cap", "length", "effort"),
    [
        (4, 8, 3, 53, 0.1),
        (4, 6, 2.5, 44, 0.1),
        pytest.param(4, 12, 2.5, 80, 1, marks=nightly),
        (6, 18, 3, 125, 0.1),
        (6, 18, 3.5, 122, 0.2),
        pytest.param(6, 18, 4.5, 116, 1, marks=nightly),
        pytest.param(8, 24, 4, 167, 1, marks=nightly),
        pytest.param(8, 24, 4.5, 164, 1, marks=nightly),
        pytest.param(8, 24, 5.5, 158, 1, marks=nightly),
        pytest.param(8, 24, 5, 161, 1, marks=nightly),
        pytest.param(8, 24, 6, 155, 1, marks=nightly),
    ],
)
def test_as_short_as_the_authors_at_equal_costs(p, m, cap, length, effort):
    found = on_a_v(UNIT, cap, p, m, effort=effort)
    assert found.makespan <= length
    assert found.peak <= cap


def test_as_short_as_the_authors_at_profiled_costs():
    found = on_a_v(PROFILED, 5, 8, 24, effort=0.1)
    assert found.makespan <= 769_413
    assert found.peak <= 5


def random_search(rng):
    p, v, m = rng.randint(1, 4), rng.choice((1, 1, 2)), rng.randint(1, 8)
    stages = p * v
    times = {kind: [rng.choice((0.25, 0.5, 1, 2)) / v for _ in range(stages)] for kind in "FIW"}
    cap = rng.choice((None, 1, p, 2 * p, (p + 2) // 2 + 0.5, (p + 4) // 3))
    release = rng.choice((0, 0, 0.4, 1))
    costs = Costs(
        **times, latency=rng.choice((0, 0.1)), message=rng.choice((0, 0.2)), bandwidth=1, input_release=release
    )
    options = {"num_positions": p, "num_microbatches": m, "num_stages": stages}
    return costs, cap, options, rng.choice(("makespan", "span"))


@pytest.mark.parametrize(("count", "seed"), [(4, 0), pytest.param(100, 1, marks=nightly)])
def test_every_plan_found_verifies_keeps_to_the_cap_and_is_never_worse_than_a_named_one(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        costs, cap, options, objective = random_search(rng)
        found = search(costs, cap, **options, objective=objective, effort=0.01)
        verify(found.plan)
        verify(lower(found.plan))
        simulation = simulate(found.plan, costs)
        assert (found.makespan, found.span, found.peak) == (simulation.makespan, simulation.span, simulation.peak())
        assert cap is None or found.peak <= cap + 1e-6
        value = getattr(found, objective)
        assert value >= found.bound - 1e-9
        named = [entry for entry in candidates(problems(costs, cap, **options)) if entry.origin != "list"]
        assert all(value <= getattr(entry, objective) + 1e-9 for entry in named)


@pytest.mark.parametrize(("count", "seed"), [(8, 2), pytest.param(100, 3, marks=nightly)])
def test_without_effort_the_search_is_the_best_candidate_and_greedy_its_plan(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        costs, cap, options, objective = random_search(rng)
        found = search(costs, cap, **options, objective=objective, effort=0)
        entries = list(candidates(problems(costs, cap, **options)))
        best = min(entries, key=lambda entry: (getattr(entry, objective), entry.peak))
        assert (getattr(found, objective), found.peak) == (getattr(best, objective), best.peak)
        if objective == "makespan":
            assert greedy(costs, cap, **options) == found.plan == best.plan


@pytest.mark.parametrize(
    ("placement", "m", "cap"),
    [
        ((0, 1), 2, 2),
        ((0, 1), 3, 2),
        ((0, 1, 1, 0), 2, 2),
        ((0, 1, 1, 0), 2, 1.5),
        ((0, 1, 0, 1), 2, 1.5),
        ((0, 1, 2), 2, 2),
        pytest.param((0, 1, 2), 3, 2, marks=nightly),
        pytest.param((0, 1, 1, 0), 3, 1.5, marks=nightly),
    ],
)
def test_all_orders_give_what_brute_force_gives(placement, m, cap):
    p, size = max(placement) + 1, 2 / len(placement) * (max(placement) + 1) / 2
    (problem,) = problems(
        UNIT, cap, num_positions=p, num_microbatches=m, num_stages=len(placement), placement=placement
    )
    chain = as_network(problem)
    assert has_equal_costs(chain)
    best = shortest(chain, float(10 * m * len(placement)), max_states=10**6)
    assert best.proved
    assert all(map(chain.keeps_to_limit, best.orders))
    passes = split_passes(placement, {"F": 1, "I": 1, "W": 1}, size=size)
    assert chain.timed(best.orders).value == least_makespan(passes, m, [cap] * p)


@pytest.mark.parametrize(
    ("hop", "cap", "release"), [pytest.param(0, 1.5, 0, marks=nightly), (0.5, 1.5, 0), (0, 1.2, 0.6)]
)
def test_the_search_reaches_the_optimum_of_a_small_chain_with_unequal_costs(hop, cap, release):
    costs = Costs(F=1, I=1.5, W=0.75, latency=hop, input_release=release)
    found = search(costs, cap, num_positions=2, num_microbatches=2, num_stages=4, placement=(0, 1, 1, 0), effort=0.01)
    times = {"F": 1, "I": 1.5, "W": 0.75}
    passes = split_passes((0, 1, 1, 0), times, hop=hop, size=0.5, input_release=release)
    assert found.makespan == pytest.approx(least_makespan(passes, 2, [cap, cap]))


# The model of 1.5B parameters of Qi et al. 2023 on 8 GPUs: costs of table 9, memory of section 4, rates of table 5.
# W needs 32 of the 34 + 5as/h bytes of an activation, I releases the rest (a = 24, s = 1024, h = 2304).
PRINTED = Costs(F=18.522, I=18.086, W=9.337, latency=0.601, input_release=1 - 32 / (34 + 5 * 24 * 1024 / 2304))


def bubble_rate(span):
    return round(1 - 24 * (18.522 + 18.086 + 9.337) / span, 4)


@pytest.mark.parametrize("placement", [(0,), (0, 0), (0, 1), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2), (0, 1, 2, 2, 1, 0)])
def test_no_pattern_is_listed_twice(placement):
    p = max(placement) + 1
    (problem,) = problems(UNIT, 8, num_positions=p, num_microbatches=8, num_stages=len(placement), placement=placement)
    found = [pattern.dates for pattern in patterns(as_network(problem))]
    assert found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("name", "rate"), [("1f1b", 0.2431), ("zero_bubble_h1", 0.1585), ("zero_bubble_h2", 0.1083)])
def test_the_span_gives_the_printed_bubble_rates(name, rate):
    assert bubble_rate(simulate(SCHEDULES[name].plan(8, 24), PRINTED).span) == rate


def test_steps_apart_the_search_finds_the_printed_zb_2p_and_proves_that_none_is_better():
    found = search(PRINTED, 16, num_positions=8, num_microbatches=24, objective="span", effort=0.25)
    assert bubble_rate(found.span) == 0.0433
    assert found.optimal
    assert found.peak <= 16


@pytest.mark.parametrize(
    ("p", "m", "times", "heads", "hidden", "rate", "effort"),
    [
        (16, 128, (11.325, 11.308, 8.109, 0.378), 40, 5120, 0.0028, 0.02),
        pytest.param(32, 96, (10.419, 10.207, 7.715, 0.408), 48, 6144, 0.0038, 1, marks=nightly),
        pytest.param(32, 128, (10.408, 10.204, 7.703, 0.408), 48, 6144, 0.0029, 1, marks=nightly),
        pytest.param(32, 256, (10.402, 10.248, 7.698, 0.460), 48, 6144, 0.0018, 1, marks=nightly),
    ],
)
def test_the_search_finds_the_printed_zb_2p_of_larger_models(p, m, times, heads, hidden, rate, effort):
    forward, inputs, weights, latency = times
    costs = Costs(
        F=forward, I=inputs, W=weights, latency=latency, input_release=1 - 32 / (34 + 5 * heads * 1024 / hidden)
    )
    found = search(costs, 2 * p, num_positions=p, num_microbatches=m, objective="span", effort=effort)
    assert round(1 - m * (forward + inputs + weights) / found.span, 4) <= rate
    assert found.peak <= 2 * p


def test_the_bound_holds_where_whole_backwards_are_cheap():
    costs = Costs(F=1, I=1, W=1, B=1.2, overhead=0.1)
    for objective in ("makespan", "span"):
        found = search(costs, num_positions=2, num_microbatches=4, objective=objective, effort=0.01)
        assert found.bound <= (found.makespan if objective == "makespan" else found.span)


def test_what_brute_force_proves_is_said_to_be_optimal():
    found = on_a_v(UNIT, 3, 4, 8, effort=0.1)
    assert found.optimal  # no orders of 52 slots exist, and the bound is less
    assert found.bound < found.makespan == 53


def test_the_same_on_every_rank():
    plans = {on_a_v(PROFILED, 3, 3, 7, effort=0.01).plan for _ in range(2)}
    assert len(plans) == 1


def test_progress_is_told_and_ends_the_search():
    seen = []
    found = on_a_v(PROFILED, 3, 3, 7, effort=0.05, progress=seen.append)
    assert found.complete
    assert [entry.share for entry in seen] == sorted(entry.share for entry in seen)
    assert [entry.best for entry in seen] == sorted((entry.best for entry in seen), reverse=True)
    assert seen[-1].best == found.makespan
    # No long silence, while orders are improved too.
    assert max(after.share - before.share for before, after in itertools.pairwise(seen[len(seen) // 2 :])) < 0.1
    stopped = on_a_v(PROFILED, 3, 3, 7, progress=lambda _: True)
    assert not stopped.complete
    verify(lower(stopped.plan))


def test_a_time_limit_gives_the_best_so_far():
    found = on_a_v(PROFILED, 5, 8, 24, time_limit=0)
    assert not found.complete
    assert found.peak <= 5
    verify(lower(found.plan), memory_limit=5)


def test_a_position_may_be_empty_and_the_effort_none():
    seen = []
    sizes = {"num_positions": 3, "num_microbatches": 2, "num_stages": 2, "placement": [0, 2]}
    for objective in ("makespan", "span"):
        found = search(UNIT, **sizes, objective=objective, effort=0, progress=seen.append)
        assert verify(lower(found.plan)).peak_live[1] == 0
        assert found.bound <= (found.makespan if objective == "makespan" else found.span)
    assert seen[-1].share == 1


def test_a_cap_that_holds_no_microbatch_names_the_least_that_does():
    with pytest.raises(PlanError, match=r"the least that works is 1"):
        on_a_v(UNIT, 0.5, 2, 2)
