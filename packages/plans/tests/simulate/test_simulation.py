"""Times, bubbles and memory: by hand, and against a player that looks again and again at what can go on."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators import gpipe, multi_module_1f1b, one_f_one_b
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan import from_text
from pipegrid.plans.plan.actions import forward
from pipegrid.plans.plan.plan import compute_plan
from pipegrid.plans.simulate.costs import Costs
from pipegrid.plans.simulate.simulation import simulate, unit_costs
from pipegrid.plans.verify.verify import verify
from plan_kit.plans import module_graphs, random_module_plan
from plan_kit.player import makespan, play_plan

TWO_BY_TWO = """
0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0
"""


def test_by_hand():
    simulation = simulate(from_text(TWO_BY_TWO), Costs(latency=0.5))
    assert simulation.makespan == 10.5
    # position 0:                F0 send F1 send recv B0 recv B1
    assert simulation.start[0] == (0, 1, 1, 4.5, 4.5, 5, 8, 8.5)
    assert simulation.end[0] == (1, 1.5, 2, 5, 5, 7, 8.5, 10.5)
    assert simulation.busy == (6, 6)
    assert simulation.spans == ((0, 10.5), (1.5, 8))
    assert simulation.bubbles() == (pytest.approx(4.5 / 10.5), pytest.approx(4.5 / 10.5))
    assert simulation.bubbles(of="span") == (pytest.approx(4.5 / 10.5), pytest.approx(0.5 / 6.5))
    assert simulation.bubble() == pytest.approx(9 / 21)
    assert simulation.bubble(of="span") == pytest.approx(5 / 17)
    assert simulation.peaks() == (2, 1)
    assert simulation.live(0) == ((0, 1), (1, 2), (7, 1), (10.5, 0))


def test_a_receive_that_is_posted_late_delays_the_message():
    early = TWO_BY_TWO.replace(" 1RECV_F1<0", "").replace("1RECV_F0<0", "[1RECV_F0<0 1RECV_F1<0]")
    assert simulate(from_text(TWO_BY_TWO), Costs(latency=0.5)).makespan == 10.5
    assert simulate(from_text(early), Costs(latency=0.5)).makespan == 10


def test_a_lane_carries_one_message_at_a_time_and_latency_overlaps():
    plan = from_text("forward_only 0 1\n0: 0F0 0F1 [0SEND_F0>1 0SEND_F1>1]\n1: [1RECV_F0<0 1RECV_F1<0] 1F0 1F1\n")
    simulation = simulate(plan, Costs(latency=1, message=6, bandwidth=2))
    assert simulation.start[1] == (2, 5, 6, 9)
    assert simulation.end[1] == (6, 9, 7, 10)


def test_every_action_costs_its_overhead():
    plan = from_text("0: 0F0 0B0 0F1 0B1\n")
    assert simulate(plan, Costs(overhead=0.25)).start[0] == (0.25, 1.5, 3.75, 5)
    assert simulate(plan, Costs(overhead=0.25)).makespan == 7


def test_a_group_waits_for_its_last_position():
    plan = from_text(
        "group tied 0,1\n0: 0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE@tied\n1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE@tied\n"
    )
    simulation = simulate(plan, Costs(REDUCE=(0.25, 0.75)))
    assert (simulation.start[0][-1], simulation.end[0][-1]) == (6, 6.75)
    assert (simulation.start[1][-1], simulation.end[1][-1]) == (6, 6.75)
    assert simulation.busy == (3, 3)


def test_a_chunk_counts_its_share_of_a_position():
    plan = from_text("placement 0 1 1 0\n0: 0F0 3F0 3B0 0B0\n1: 1F0 2F0 2B0 1B0\n")
    assert unit_costs(plan) == Costs(F=0.5, I=0.5, W=0.5)
    assert simulate(plan).makespan == 6
    assert simulate(plan).peak() == 1
    assert simulate(plan, Costs(activation=(1, 2, 3, 4))).peaks() == (5, 5)


def test_the_stages_of_a_position_share_it_evenly_however_many_they_are():
    plan = from_text("placement 0 1 0\n0: 0F0 2F0 2B0 0B0\n1: 1F0 1B0\n")
    assert plan.stages_beside == (2, 1, 2)
    assert unit_costs(plan) == Costs(F=(0.5, 1, 0.5), I=(0.5, 1, 0.5), W=(0.5, 1, 0.5))
    assert simulate(plan).busy == (3, 3)
    assert simulate(plan).peaks() == verify(plan).peak_live == (1, 1)
    whole = Costs(F=2, I=(1, 3), W=1)
    assert whole.cut_into(3, slices=2, beside=plan.stages_beside) == Costs(
        F=(1, 2, 1), I=(0.5, 2, 1.5), W=(0.5, 1, 0.5)
    )


def test_activations_are_counted_until_the_weight_or_the_input_gradient():
    simulation = simulate(from_text("0: 0F0 0I0 0F1 0I1 0W0 0W1\n"))
    assert simulation.peak(until="W") == 2
    assert simulation.peak(until="I") == 1
    assert simulation.live(0, until="I") == ((0, 1), (2, 0), (2, 1), (4, 0))
    with pytest.raises(ValueError, match="until is 'B'; it must be 'W' or 'I'"):
        simulation.peak(until="B")
    with pytest.raises(ValueError, match="of is 'step'; it must be 'makespan' or 'span'"):
        simulation.bubble(of="step")


def test_a_plan_without_a_backward_holds_its_activations_while_it_computes():
    simulation = simulate(from_text("forward_only 0 1\n0: 0F0 0F1\n1: 1F0 1F1\n"))
    assert simulation.makespan == 3
    assert simulation.peaks() == (1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0: 0F0 0RECV_B0<1 0B0\n1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0\n",
            r"gets stuck: 2 of 2 .*position 0 at 0B0",
        ),
        ("0: 0B0 0F0\n", r"gets stuck: 1 of 1 positions never finish \(position 0 at 0B0\)"),
        (
            "forward_only 0 1\n0: 0F0 0SEND_F0>1 0SEND_F0>1\n1: 1RECV_F0<0 1F0\n",
            r"messages from position 0 to position 1 have one end only",
        ),
        ("placement 0 1\n0: 0F0 1F0\n1: 1F0\n", r"position 0 has a F of stage 1, which is not placed there"),
    ],
)
def test_a_plan_that_cannot_be_played_is_refused(text, message):
    with pytest.raises(PlanError, match=message):
        simulate(from_text(text))


def test_a_microbatch_outside_the_plan_is_refused():
    with pytest.raises(PlanError, match=r"an action of position 0 names a stage, microbatch, edge"):
        simulate(compute_plan([[forward(0, 0), forward(0, 1)]], graph=1, placement=[0], num_microbatches=1))


def random_costs(rng, num_stages):
    """Whole numbers for the brute force, and the same as `Costs`."""
    duration = {(kind, s): rng.randint(0, 5) for kind in "FIW" for s in range(num_stages)}
    duration |= {("B", s): duration["I", s] + duration["W", s] for s in range(num_stages)}
    travel, occupied, overhead, reduce = (rng.choice((0, 0, 1, 2, 5)) for _ in range(4))
    options = {"travel": travel, "occupied": occupied, "overhead": overhead, "reduce": reduce}
    costs = Costs(
        **{kind: [duration[kind, s] for s in range(num_stages)] for kind in "FIW"},
        latency=travel,
        message=2 * occupied,
        bandwidth=2,
        overhead=overhead,
        REDUCE=reduce,
        COLLECTIVE=reduce,
    )
    return duration, options, costs


def assert_as_played(plan, rng):
    duration, options, costs = random_costs(rng, plan.num_stages)
    times = play_plan(plan, lambda action: duration[action.kind, action.stage], **options)
    simulation = simulate(plan, costs)
    assert simulation.start == tuple(tuple(start for start, _ in own) for own in times)
    assert simulation.end == tuple(tuple(end for _, end in own) for own in times)
    assert simulation.makespan == makespan(times)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@given(p=st.integers(1, 5), m=st.integers(1, 8), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_simulation_equals_brute_force_at_any_costs(make, p, m, seed):
    rng = random.Random(seed)
    plan = make(p, m)
    assert_as_played(plan, rng)
    assert_as_played(lower(plan, receives=rng.choice(("late", "early"))), rng)


@given(graph=module_graphs(), m=st.integers(1, 4), seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_simulation_equals_brute_force_on_any_graph_of_modules(graph, m, seed):
    rng = random.Random(seed)
    plan = multi_module_1f1b(graph, m)
    assert_as_played(plan, rng)
    assert_as_played(lower(plan, receives=rng.choice(("late", "early"))), rng)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("by_collective", [False, True])
@given(m=st.integers(1, 4), seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_simulation_equals_brute_force_with_a_colocated_module(depth, by_collective, m, seed):
    """An encoder, its last stage on every position of the language model, its first on one of its own."""
    rng = random.Random(seed)
    graph = ModuleGraph({"encoder": depth, "language": 3}, {"encoder": ["language"]})
    places = [(depth - 1 + index,) for index in range(3)]
    placement = [*((index,) for index in range(depth - 1)), tuple(p for (p,) in places), *places]
    plan = multi_module_1f1b(graph, m, placement=placement)
    assert_as_played(plan, rng)
    collectives = {Edge(depth - 1, depth): "bridge"} if by_collective else None
    assert_as_played(lower(plan, collectives=collectives, tied={"tied": (depth, depth + 2)}), rng)


def test_the_proof_and_the_simulation_count_the_same_peaks():
    for seed in range(60):
        plan, options = random_module_plan(seed)
        if seed % 3 == 0:
            plan = multi_module_1f1b(plan.graph, plan.num_microbatches, forward_only=plan.graph.sources)
            options = {}
        for each in (plan, lower(plan, **options)):
            proof, simulation = verify(each), simulate(each)
            assert simulation.peaks() == pytest.approx(proof.peak_live)
            assert simulation.peaks(until="I") == pytest.approx(proof.peak_live_inputs)


def test_what_the_input_half_releases_is_live_no_longer():
    plan = from_text("0: 0F0 0F1 0I0 0I1 0W0 0W1\n")
    simulation = simulate(plan, Costs(activation=10, input_release=0.75))
    assert simulation.live(0) == ((0, 10), (1, 20), (3, 12.5), (4, 5), (5, 2.5), (6, 0))
    assert simulation.live(0, until="I") == ((0, 10), (1, 20), (3, 10), (4, 0))
    assert simulate(plan, Costs(activation=10, input_release=1)).live(0) == simulation.live(0, until="I")


def test_the_span_is_the_longest_of_any_position():
    assert simulate(from_text(TWO_BY_TWO), Costs(latency=0.5)).span == 10.5
    plan = from_text("forward_only 0 1\n0: 0F0 0F1 [0SEND_F0>1 0SEND_F1>1]\n1: [1RECV_F0<0 1RECV_F1<0] 1F0 1F1\n")
    simulation = simulate(plan, Costs(F=[1, 3]))
    assert (simulation.makespan, simulation.span) == (8, 6)
