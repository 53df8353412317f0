"""Goodput: a naive rival second by second, Daly's formula, published cells, and what must never be."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import pipegrid.goodput
from pipegrid.goodput import (
    POLICIES,
    Failures,
    Outage,
    Scenario,
    Throughput,
    best_interval,
    daly,
    daly_goodput,
    random_failures,
    simulate,
    young,
)

from .naive_goodput import Naive

BATCH = 5040  # samples of a step, so that steps of whole seconds have exact rates


@st.composite
def scenarios(draw, *, most_seconds=300, returns=True, distinct=False):
    nodes = draw(st.integers(1, 5))
    steps = draw(st.lists(st.integers(1, 9), min_size=nodes, max_size=nodes))
    kept = draw(st.sets(st.integers(1, nodes))) | {nodes}
    throughput = Throughput({up: BATCH / steps[up - 1] for up in kept}, BATCH)
    slower = {up: BATCH / (steps[-1] + draw(st.integers(0, 5))) for up in draw(st.sets(st.integers(1, nodes)))}
    replanned = Throughput(slower | {nodes: throughput.table[-1][1]}, BATCH) if draw(st.booleans()) else None
    duration = draw(st.integers(1, most_seconds))
    moments = st.integers(0, duration)
    names = st.permutations([f"node{node}" for node in range(nodes)])
    count = draw(st.integers(0, nodes if distinct else 30))
    order = draw(names)
    outages = []
    for at in range(count):
        start = draw(moments)
        node = order[at] if distinct else draw(st.sampled_from(order))
        back = start + draw(st.integers(0, 60)) if returns and draw(st.integers(0, 3)) else math.inf
        outages.append(Outage(node, start, back))
    small = st.integers(0, 3) | st.integers(0, 12)
    return Scenario(
        throughput,
        Failures(outages, duration),
        restart=draw(st.integers(0, 3) | st.integers(0, 40)),
        checkpoint=draw(small),
        write=draw(small),
        replan=draw(small),
        promote=draw(small),
        spares=draw(st.integers(0, 2)),
        without_spares=draw(st.sampled_from(("restart", "wait"))),
        replanned=replanned,
    )


policies = st.sampled_from(POLICIES)
intervals = st.one_of(st.none(), st.integers(1, 20))


def possible(scenario, policy):
    return scenario.throughput.rate(scenario.places(policy)) > 0


@given(scenarios(), policies, intervals)
@settings(max_examples=400, deadline=None)
def test_the_simulation_is_that_of_a_rival_that_counts_seconds(scenario, policy, every):
    if not possible(scenario, policy):
        return
    outcome = simulate(scenario, policy, every)
    share, seconds = Naive(scenario, policy, every).run()
    assert outcome.goodput == pytest.approx(share, abs=1e-6)
    assert outcome.lost == pytest.approx(seconds, abs=1e-3)


@given(scenarios(most_seconds=10_000), policies, intervals)
@settings(max_examples=200, deadline=None)
def test_all_seconds_have_a_cause(scenario, policy, every):
    if not possible(scenario, policy):
        return
    outcome = simulate(scenario, policy, every)
    assert min(outcome.lost.values()) >= -1e-6
    assert 0 <= outcome.goodput <= 1 + 1e-9
    assert sum(outcome.lost.values()) + outcome.goodput * outcome.duration == pytest.approx(outcome.duration)


@given(scenarios(returns=False, distinct=True), policies, st.integers(1, 20), st.data())
@settings(max_examples=300, deadline=None)
def test_more_failures_never_give_more_goodput(scenario, policy, every, data):
    """For nodes that do not come back, of which none is idle, as the failure of an idle one is less than another's.

    Checkpoints, as re-plans and spares shift them, are for restarts only.
    """
    least = data.draw(st.integers(1, scenario.throughput.nodes))
    rates = {up: BATCH / (10 - up) for up in range(least, scenario.throughput.nodes + 1)}
    scenario, every = evolve(scenario, write=0.0), every if policy == "restart" else None
    scenario = evolve(scenario, throughput=Throughput(rates, BATCH), replanned=None)
    if not possible(scenario, policy):
        return
    more, end = scenario.failures.outages, scenario.failures.duration
    fewer = [evolve(outage, start=end) if data.draw(st.booleans()) else outage for outage in more]  # the end is late
    few = evolve(scenario, failures=Failures(fewer, end))
    assert simulate(scenario, policy, every).goodput <= simulate(few, policy, every).goodput + 1e-9


@given(scenarios(returns=False, distinct=True), policies, st.integers(1, 20), st.integers(1, 30))
@settings(max_examples=300, deadline=None)
def test_what_takes_longer_never_gives_more_goodput(scenario, policy, every, longer):
    if not possible(scenario, policy):
        return
    scenario, every = evolve(scenario, write=0.0), every if policy == "restart" else None
    for name in ("restart", "checkpoint", "replan", "promote"):
        slow = evolve(scenario, **{name: getattr(scenario, name) + longer})
        assert simulate(slow, policy, every).goodput <= simulate(scenario, policy, every).goodput + 1e-9


def test_without_failures_and_checkpoints_all_work_is_done():
    quiet = Scenario(Throughput({4: 10.0, 3: 8.0}, 100), Failures([], 86400.0), restart=600.0, checkpoint=30.0)
    for policy in ("restart", "re-plan"):
        assert simulate(quiet, policy, None).goodput == pytest.approx(1.0)
        assert best_interval(quiet, policy).every is None
    assert simulate(quiet, "spare", None).goodput == pytest.approx(0.8)
    assert simulate(quiet, "restart", 10).lost["checkpoints"] == pytest.approx(86400 * 30 / 130, rel=1e-3)


def of_daly(*, failures, seed=0, mtbf=43200.0, checkpoint=120.0, restart=600.0):
    """Restarts in the regime of Daly's formula: one size, nodes that are replaced at once, short steps."""
    stream = random_failures(64, mtbf=mtbf, repair=0, duration=failures * mtbf, seed=seed)
    return Scenario(Throughput({64: 1.0}, 1.0), stream, restart=restart, checkpoint=checkpoint)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("checkpoint", [5.0, 120.0, 1800.0])
@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_restarts_have_the_goodput_of_dalys_formula(factor, checkpoint, seed):
    scenario = of_daly(failures=4000, seed=seed, checkpoint=checkpoint)
    every = max(1, round(factor * daly(checkpoint, 43200.0)))
    formula = daly_goodput(every, checkpoint=checkpoint, restart=600.0, mtbf=scenario.failures.mtbf)
    assert simulate(scenario, "restart", every).goodput == pytest.approx(formula, abs=0.06 * (1 - formula))


def test_the_best_interval_is_that_of_dalys_formula():
    scenario = of_daly(failures=4000)
    best, formula = best_interval(scenario, "restart"), daly(120.0, scenario.failures.mtbf)
    assert formula / 1.5 < best.every < formula * 1.5
    assert best.goodput >= simulate(scenario, "restart", round(formula)).goodput
    shares = [
        daly_goodput(formula * factor, checkpoint=120.0, restart=600.0, mtbf=43200.0) for factor in (0.98, 1.0, 1.02)
    ]
    assert shares[1] == max(shares)


def test_daly_is_young_where_checkpoints_are_short():
    assert daly(1.0, 1e8) == pytest.approx(young(1.0, 1e8), rel=1e-3)
    assert young(50.0, 10_000.0) == 1000.0
    assert daly(100.0, 40.0) == 40.0


@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_an_interval_as_good_as_the_best_of_all(seed):
    failures = random_failures(4, mtbf=900, repair=60, duration=300_000, seed=seed)
    scenario = Scenario(Throughput({4: 1.0, 2: 0.7}, 20), failures, restart=120.0, checkpoint=15.0)
    best = max(simulate(scenario, "restart", every).goodput for every in (None, *range(1, 200)))
    assert best_interval(scenario, "restart").goodput >= best - 0.003


PUBLISHED = json.loads((Path(__file__).parent / "data" / "oobleck_sosp23.json").read_text(encoding="utf-8"))
CELLS = [(system, rate) for system in ("oobleck", "varuna") for rate in ("6h", "3h", "1h", "30m", "10m")]


def published_scenario(system, rate):
    removals = PUBLISHED["removals_seconds"][rate]
    return Scenario(
        Throughput(PUBLISHED["samples_per_second"][system], PUBLISHED["batch"]),
        Failures([Outage(f"node{at}", time) for at, time in enumerate(removals)], removals[-1]),
        restart=PUBLISHED["restart_seconds"],
        checkpoint=PUBLISHED["checkpoint_seconds"],
        replan=PUBLISHED["reconfigure_seconds"],
    )


@pytest.mark.parametrize(("system", "rate"), CELLS)
def test_published_samples_per_second_within_five_percent(system, rate):
    scenario = published_scenario(system, rate)
    if system == "oobleck":  # goes on with fewer nodes, without checkpoints
        outcome = simulate(scenario, "re-plan", None)
    else:
        outcome = simulate(scenario, "restart", PUBLISHED["checkpoint_every_steps"])
    samples = outcome.goodput * scenario.throughput.rate(30)
    assert samples == pytest.approx(PUBLISHED["published_samples_per_second"][system][rate], rel=0.05)


def test_a_failure_in_a_restart_is_one_more_restart():
    """Also where enough nodes are up by then to go on, which have nothing to go on with."""
    outages = [Outage("a", 100, 310), Outage("b", 200, 300), Outage("b", 320)]
    scenario = Scenario(Throughput({3: 1.0, 2: 1.0}, 1), Failures(outages, 500), restart=50, checkpoint=0, replan=1)
    outcome = simulate(scenario, "re-plan", 10)
    assert outcome.lost["waiting"] == 100
    assert outcome.lost["recovery"] == 1 + 20 + 50


def test_a_node_that_is_back_joins_where_it_pays():
    throughput = Throughput({2: 2.0, 1: 1.0}, 20)

    def useful(policy, back, *, pause, **checkpoints):
        times = {"restart": pause, "checkpoint": 0, "replan": pause} | checkpoints
        return simulate(Scenario(throughput, Failures([Outage("a", 1000.0, back)], 10_000), **times), policy, None)

    joined = useful("re-plan", 2000.0, pause=10.0)
    assert joined.lost["fewer_nodes"] == pytest.approx(500.0, abs=10)
    assert joined.lost["recovery"] == pytest.approx(20.0)
    assert useful("re-plan", 2000.0, pause=6000.0).lost["recovery"] == pytest.approx(6000.0)  # joins after the stop
    restarted = useful("restart", 2000.0, pause=10.0)
    assert restarted.lost["redone"] == pytest.approx(1000.0)  # nothing is lost to join, only to the failure
    twice = Failures([Outage("a", 1000, 2000), Outage("b", 2500)], 3000)
    at_once = Scenario(throughput, twice, restart=0, checkpoint=0)
    assert simulate(at_once, "restart", None).lost["redone"] == pytest.approx(1500.0)  # 1,000 and 500 s
    # Half of the throughput more for 10,000 s, on average until the next failure, makes up for a stop of 5,000 s.
    joined = useful("restart", 2000.0, pause=900.0, checkpoint=2000.0, write=2000.0)
    assert (joined.lost["recovery"], joined.lost["checkpoints"]) == (1800.0, 4000.0)
    assert useful("restart", 2000.0, pause=900.0, checkpoint=2000.0, write=2200.0).lost["recovery"] == 900.0


def test_the_example_of_a_job_has_the_throughput_that_the_planner_predicts():
    from pipegrid.goodput import planned_throughput
    from pipegrid.planner import plan
    from planner_kit.jobs import small_job

    job = small_job(decoder=3, encoder=2, schedules=("1f1b",))
    throughput = planned_throughput(job, nodes=2)  # of 4 GPUs
    assert [nodes for nodes, _ in throughput.table] == [1, 2]
    for nodes, rate in throughput.table:
        assert rate == pytest.approx(job.global_batch / plan(job, gpus=4 * nodes).winner.step)


def test_the_public_names_are_pinned():
    assert set(pipegrid.goodput.__all__) == {
        "CAUSES", "POLICIES", "Failures", "Goodput", "Outage", "Outcome", "Policy", "Scenario", "Throughput",
        "best_interval", "daly", "daly_goodput", "goodput", "goodput_json", "goodput_table", "parse_throughput",
        "planned_throughput", "possible", "random_failures", "read_failures", "rerouted_throughput", "simulate",
        "young",
    }  # fmt: skip
