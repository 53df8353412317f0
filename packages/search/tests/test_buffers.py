"""Slots of messages: the fewest, and none is written while it is read, as a slow player of all reads agrees."""

import random

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import (
    SCHEDULES,
    Action,
    PlanError,
    compute_plan,
    forward_only,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    offload,
    one_f_one_b,
    verify,
    with_skips,
    zero_bubble_v,
)
from pipegrid.search.buffers import PositionBuffers, ReceivedMessage, SlotArrival, plan_buffers, position_buffers
from plan_kit.plans import GENERATORS, random_module_plan
from plan_kit.routed_plans import lowered_routed

from .buffer_player import Player

FAULTS = {"overwritten", "duplicate", "size", "unknown-message", "late-post"}


def random_plan(seed):
    """A lowered plan of a random kind: any named schedule, its values skipping stages, modules, or routes."""
    rng = random.Random(seed)
    kind = rng.choice(["named", "named", "named", "skips", "modules", "routes"])
    if kind == "modules":
        plan, options = random_module_plan(seed)
        return lower(plan, **options)
    if kind == "routes":
        return lowered_routed(seed)
    plan = GENERATORS[rng.choice(list(GENERATORS))](rng.randint(1, 4), rng.randint(1, 6))
    if kind == "skips" and plan.num_slices == 1:
        pairs = [Edge(a, b) for a in range(plan.num_stages) for b in range(a + 2, plan.num_stages)]
        plan = with_skips(plan, rng.sample(pairs, min(len(pairs), rng.randint(0, 4))))
    return lower(plan, receives=rng.choice(["late", "early"]))


def buffers_of(seed):
    """Its slots, with sizes and receives ahead at random."""
    plan, rng = random_plan(seed), random.Random(seed + 1)
    sizes = {edge: rng.choice([8, 8, 16]) for edge in plan.graph.stage_edges}
    return plan_buffers(plan, nbytes=rng.choice([0, sizes]), ahead=rng.choice([0, 1, 2]))


@pytest.mark.parametrize("count", [8, 16, 32])
@pytest.mark.parametrize(("receives", "alone", "pooled"), [("late", (102, 102), 65), ("early", (112, 113), 68)])
def test_interleaved_with_four_chunks_needs_65_slots_and_102_in_pools_of_each_edge(count, receives, alone, pooled):
    buffers = plan_buffers(lower(interleaved_1f1b(4, count, num_chunks=4), receives=receives))
    assert buffers.num_slots == pooled
    assert alone[0] <= sum(buffers.by_edge) <= alone[1]


@given(st.integers(0, 10**6))
def test_no_slot_is_written_while_it_is_read_and_no_fewer_would_do(seed):
    for position, own in enumerate(buffers_of(seed).positions):
        player = Player(own.plan, position)
        assert player.is_harmless(own.arrivals)
        assert player.most_at_once(own.arrivals) == own.num_slots
        # What has no slot is read until the end of the step.
        end = len(own.plan.positions[position])
        assert all(max(player.reads[one]) == end for one in player.received if one not in own.slot_of)


@given(st.integers(0, 10**6))
def test_a_mistake_is_refused_exactly_where_a_read_could_find_another_message(seed):
    rng = random.Random(seed)
    for own in buffers_of(seed).positions:
        if len(own.arrivals) < 2:
            continue
        player = Player(own.plan, own.position)
        for _ in range(5):
            changed = list(own.arrivals)
            for at in rng.sample(range(len(changed)), rng.randint(1, 2)):
                alike = [one.slot for one in changed if one.nbytes == changed[at].nbytes]
                new = rng.choice([{"slot": rng.choice(alike)}, {"posted": rng.randint(-1, changed[at].posted)}])
                changed[at] = evolve(changed[at], **new)
            harmless = player.is_harmless(changed)
            try:
                PositionBuffers(own.plan, own.position, changed)
            except PlanError as error:
                assert {fault.rule for fault in error.faults} == {"overwritten"}
                assert not harmless
            else:
                assert harmless


def test_each_rule_has_its_fault_with_what_is_wrong():
    plan = lower(one_f_one_b(2, 3))
    own = plan_buffers(plan, nbytes=8).positions[1]
    first, second, _ = own.arrivals

    def faults(*arrivals):
        with pytest.raises(PlanError) as refused:
            PositionBuffers(plan, 1, arrivals)
        return [str(fault) for fault in refused.value.faults]

    assert faults(first, evolve(second, posted=0)) == [
        "[overwritten] position 1, step 0: 1RECV_F1<0 is posted to slot 0, whose 1RECV_F0<0 is read later"
    ]
    assert faults(first, first) == ["[duplicate] position 1: 1RECV_F0<0 from 0 has two slots, 0 and 0"]
    assert faults(first, evolve(second, nbytes=4)) == ["[size] position 1: 1RECV_F1<0 has 4 bytes, and slot 0 takes 8"]
    assert faults(evolve(first, posted=5)) == [
        "[late-post] position 1: 1RECV_F0<0 is posted after its receive, at step 5"
    ]
    other = evolve(first, message=ReceivedMessage(first.message.receive, 2))
    assert faults(other) == ["[unknown-message] position 1: 1RECV_F0<0 from 2 does not come to this position"]


def test_a_stage_that_hands_on_to_its_own_position_holds_what_it_has_received_as_long_as_that():
    plan = lower(zero_bubble_v(2, 4))
    lives = {str(one.message.receive): one for one in plan_buffers(plan).positions[1].arrivals}
    assert "1RECV_F0<0" in lives, "stage 1 gives its output to stage 2, on the same position"
    player = Player(plan, 1)
    steps = [str(step) for step in plan.positions[1]]
    assert max(player.reads[lives["1RECV_F0<0"].message]) == max(steps.index("1W0"), steps.index("2W0"))


def test_what_has_no_end_has_no_slot():
    graph = ModuleGraph([("a", 1), ("b", 1), ("c", 1), ("d", 1)], [("a", "b"), ("b", "c"), ("b", "d")])
    orders = multi_module_1f1b(graph, 2)
    plan = lower(evolve(orders, forward_only=(), positions=orders.positions))
    assert len(plan_buffers(plan).positions[1].arrivals) == 6
    # d has no backward: nothing says when the output of b, a view of what b has received, has left to it.
    rows = [[a for a in row if not (a.stage == 3 and str(a.kind) != "F")] for row in orders.positions]
    plan = lower(evolve(orders, positions=rows, forward_only=(3,)))
    assert {str(one.message.receive.kind) for one in plan_buffers(plan).positions[1].arrivals} == {"RECV_B"}


def test_an_evaluation_takes_slots_until_each_forward_is_sent():
    buffers = plan_buffers(lower(forward_only(4, 8, num_chunks=2)))
    assert buffers.num_slots == 8


def test_offloading_keeps_what_was_received():
    plan = one_f_one_b(2, 4)
    away = offload(lower(plan), memory_limit=1)
    assert any("OFFLOAD" in str(step) for step in away.positions[0])
    assert plan_buffers(away).num_slots == plan_buffers(lower(plan)).num_slots


def test_bad_input_is_an_error_that_names_it():
    computes = one_f_one_b(2, 2)
    with pytest.raises(PlanError, match=r"lower\(plan\) adds the messages"):
        plan_buffers(computes)
    with pytest.raises(PlanError, match="no size of edge 0>1"):
        plan_buffers(lower(computes), nbytes={})
    with pytest.raises(PlanError, match="ahead is -1"):
        plan_buffers(lower(computes), ahead=-1)
    with pytest.raises(PlanError, match="slot is -1"):
        SlotArrival(ReceivedMessage(Action("RECV_F", 1, 0, Edge(0, 1)), 0), 0, -1)


def test_a_proof_is_taken_and_one_process_needs_no_slot():
    proof = verify(lower(one_f_one_b(2, 2)))
    assert plan_buffers(proof) == plan_buffers(proof.plan)
    alone = compute_plan([[Action("F", 0, 0), Action("B", 0, 0)]], graph=1, placement=[0], num_microbatches=1)
    assert plan_buffers(alone).num_slots == 0


def test_what_has_no_lane_gets_no_slot():
    plan = lower(one_f_one_b(3, 4))
    own = position_buffers(plan, 1, lane_of=lambda message: None if message.sender == 2 else (0, 0))
    assert {one.message.sender for one in own.arrivals} == {0}


def test_every_named_schedule_needs_no_more_than_pools_of_each_edge():
    for name, schedule in SCHEDULES.items():
        buffers = plan_buffers(lower(schedule.plan(4, 8)))
        assert buffers.num_slots <= sum(buffers.by_edge), name
