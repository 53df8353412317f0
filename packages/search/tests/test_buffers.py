"""Slots of messages: the fewest, and none is written while it is read, as a slow player of all reads agrees."""

import random
from contextlib import suppress

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import (
    SCHEDULES,
    Action,
    ActionKind,
    PlanError,
    compute_plan,
    forward_only,
    gpipe,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    offload,
    one_f_one_b,
    verify,
    with_skips,
    zero_bubble_v,
)
from pipegrid.search.buffers import Buffered, PositionBuffers, SlotArrival, plan_buffers, position_buffers
from plan_kit.plans import GENERATORS, random_module_plan
from plan_kit.routed_plans import lowered_routed

from .buffer_player import Player

KINDS = ("receives", "copies", "sends", "offload")


def random_plan(seed):
    """A lowered plan of a random kind: any named schedule, its values skipping stages, modules, or routes."""
    rng = random.Random(seed)
    kind = rng.choice(["named", "named", "named", "skips", "offload", "modules", "routes"])
    if kind == "modules":
        plan, options = random_module_plan(seed)
        return lower(plan, **options)
    if kind == "routes":
        return lowered_routed(seed)
    plan = GENERATORS[rng.choice(list(GENERATORS))](rng.randint(1, 4), rng.randint(1, 6))
    if kind == "skips" and plan.num_slices == 1:
        pairs = [Edge(a, b) for a in range(plan.num_stages) for b in range(a + 2, plan.num_stages)]
        plan = with_skips(plan, rng.sample(pairs, min(len(pairs), rng.randint(0, 4))))
    plan = lower(plan, receives=rng.choice(["late", "early"]))
    if kind == "offload" and plan.num_slices == 1:
        for limit in (1, 1.5, 2, 3, 4):
            with suppress(PlanError):  # too low for what a position computes with
                return offload(plan, memory_limit=limit, prefetch=rng.randint(0, 2))
    return plan


def buffers_of(seed, *, kinds=None):
    """Its slots, with sizes and receives ahead at random."""
    plan, rng = random_plan(seed), random.Random(seed + 1)
    sizes = {edge: rng.choice([8, 8, 16]) for edge in (*plan.graph.stage_edges, *range(plan.num_stages))}
    kinds = kinds or rng.sample(KINDS, rng.randint(1, len(KINDS)))
    return plan_buffers(plan, nbytes=rng.choice([0, sizes]), ahead=rng.choice([0, 1, 2]), kinds=kinds), kinds


def player_of(own):
    player = Player(own.plan, own.position)
    player.play_sends()
    return player


@pytest.mark.parametrize("count", [8, 16, 32])
@pytest.mark.parametrize(("receives", "alone", "pooled"), [("late", (102, 102), 65), ("early", (112, 113), 68)])
def test_interleaved_with_four_chunks_needs_65_slots_and_102_in_pools_of_each_edge(count, receives, alone, pooled):
    buffers = plan_buffers(lower(interleaved_1f1b(4, count, num_chunks=4), receives=receives))
    assert buffers.num_slots == pooled
    assert alone[0] <= sum(buffers.by_edge) <= alone[1]


@given(st.integers(0, 10**6))
def test_no_slot_is_written_while_it_is_read_and_no_fewer_would_do(seed):
    buffers, kinds = buffers_of(seed)
    for position, own in enumerate(buffers.positions):
        player = player_of(own)
        assert player.is_harmless(own.arrivals)
        assert player.most_at_once(own.arrivals) == own.num_slots + len(own.host_slots)
        # What has no slot is read until the end of the step.
        end = len(own.plan.positions[position])
        asked = [one for one in player.received if ("copies" if one.peer == position else "receives") in kinds]
        assert all(max(player.reads[one]) == end for one in asked if one not in own.slot_of)
        sends = [action for action in own.plan.actions(position) if action.kind.is_send]
        assert {one.action for one in own.slot_of if one.action.kind.is_send} == set(sends if "sends" in kinds else ())
        away = [action for action in own.plan.actions(position) if action.kind is ActionKind.OFFLOAD]
        assert own.count("offloaded") == (len(away) if "offload" in kinds else 0)


@given(st.integers(0, 10**6))
def test_a_mistake_is_refused_exactly_where_a_read_could_find_another_message(seed):
    rng = random.Random(seed)
    for own in buffers_of(seed)[0].positions:
        if len(own.arrivals) < 2:
            continue
        player = player_of(own)
        for _ in range(5):
            changed = list(own.arrivals)
            for at in rng.sample(range(len(changed)), rng.randint(1, 2)):
                host = changed[at].message.on_host
                alike = [one.slot for one in changed if (one.nbytes, one.message.on_host) == (changed[at].nbytes, host)]
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
        "[overwritten] position 1, step 0: 1RECV_F1<0 comes to slot 0, whose 1RECV_F0<0 is read later"
    ]
    assert faults(first, first) == ["[duplicate] position 1: 1RECV_F0<0 from 0 has two slots, 0 and 0"]
    assert faults(first, evolve(second, nbytes=4)) == ["[size] position 1: 1RECV_F1<0 has 4 bytes, and slot 0 takes 8"]
    assert faults(evolve(first, posted=5)) == [
        "[late-post] position 1: 1RECV_F0<0 comes to its slot after its step, at step 5"
    ]
    other = evolve(first, message=Buffered(first.message.action, 2))
    assert faults(other) == ["[unknown-message] position 1: 1RECV_F0<0 from 2 is nothing that this position has"]
    away = offload(lower(one_f_one_b(2, 3)), memory_limit=1)
    here = plan_buffers(away, kinds=("sends", "offload")).positions[0].arrivals
    on_host = next(one for one in here if one.message.on_host)
    with pytest.raises(PlanError, match=r"\[memory\] position 0: 0OFFLOAD0 is on the host, and slot \d is not"):
        PositionBuffers(away, 0, [here[0], evolve(on_host, slot=here[0].slot)])


def test_a_stage_that_hands_on_to_its_own_position_holds_what_it_has_received_as_long_as_that():
    plan = lower(zero_bubble_v(2, 4))
    lives = {str(one.message.action): one for one in plan_buffers(plan).positions[1].arrivals}
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
    assert {str(one.message.action.kind) for one in plan_buffers(plan).positions[1].arrivals} == {"RECV_B"}


def test_an_evaluation_takes_slots_until_each_forward_is_sent():
    buffers = plan_buffers(lower(forward_only(4, 8, num_chunks=2)))
    assert buffers.num_slots == 8


def test_offloading_keeps_what_was_received():
    plan = one_f_one_b(2, 4)
    away = offload(lower(plan), memory_limit=1)
    assert any("OFFLOAD" in str(step) for step in away.positions[0])
    assert plan_buffers(away).num_slots == plan_buffers(lower(plan)).num_slots


def test_a_send_holds_its_slot_until_a_result_comes_that_could_not_be_without_it():
    plan = lower(one_f_one_b(3, 6))

    def slots(position):
        return [one.slot for one in plan_buffers(plan, kinds=("sends",)).positions[position].arrivals]

    computes = [str(action) for action in plan.actions(0) if action.kind.is_compute]
    assert computes == ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0F4", "0B2", "0F5", "0B3", "0B4", "0B5"]
    # 0B0 shows that 0F0 and 0F1 have arrived, as 1B0 comes after them: 3 and 4 have their slots.
    assert slots(0) == [0, 1, 2, 0, 1, 0]
    # 2F2 shows that 1B0 has the first gradient: 1F2 comes after that.
    assert slots(2) == [0, 1, 0, 1, 0, 1]
    # What nothing shows is there has its slot to the end of the step.
    plan = lower(gpipe(2, 3))
    assert slots(1) == [0, 1, 2]


def test_a_value_that_skips_stages_is_kept_in_the_slot_of_its_receive():
    plan = lower(with_skips(one_f_one_b(3, 4), [Edge(0, 2)]))
    buffers = plan_buffers(plan, kinds=KINDS)
    assert [one.count("kept") for one in buffers.positions] == [0, 0, 4]
    assert "kept" in str(buffers)
    forwards = [[step for step in steps if str(step.kind) == "F"] for steps in zero_bubble_v(2, 3).positions]
    frozen = lower(evolve(with_skips(zero_bubble_v(2, 3), [Edge(0, 3)]), positions=forwards, forward_only=range(4)))
    # Position 0 has stages 0 and 3, position 1 has 1 and 2, without backwards: each keeps a copy of what stays.
    assert [one.count("kept") for one in plan_buffers(frozen, kinds=("copies",)).positions] == [3, 3]


def test_bad_input_is_an_error_that_names_it():
    computes = one_f_one_b(2, 2)
    with pytest.raises(PlanError, match=r"lower\(plan\) adds the messages"):
        plan_buffers(computes)
    with pytest.raises(PlanError, match="no size of edge 0>1"):
        plan_buffers(lower(computes), nbytes={})
    with pytest.raises(PlanError, match="kinds"):
        plan_buffers(lower(computes), kinds=("stores",))
    with pytest.raises(PlanError, match="no size of stage 0, whose activations go to the host"):
        plan_buffers(offload(lower(one_f_one_b(2, 3)), memory_limit=1), nbytes={Edge(0, 1): 8}, kinds=("offload",))
    with pytest.raises(PlanError, match="ahead is -1"):
        plan_buffers(lower(computes), ahead=-1)
    with pytest.raises(PlanError, match="slot is -1"):
        SlotArrival(Buffered(Action("RECV_F", 1, 0, Edge(0, 1)), 0), 0, -1)


def test_a_proof_is_taken_and_one_process_needs_no_slot():
    proof = verify(lower(one_f_one_b(2, 2)))
    assert plan_buffers(proof) == plan_buffers(proof.plan)
    alone = compute_plan([[Action("F", 0, 0), Action("B", 0, 0)]], graph=1, placement=[0], num_microbatches=1)
    assert plan_buffers(alone).num_slots == 0


def test_what_has_no_lane_gets_no_slot():
    plan = lower(one_f_one_b(3, 4))
    own = position_buffers(plan, 1, lane_of=lambda message: None if message.peer == 2 else (0, 0))
    assert {one.message.peer for one in own.arrivals} == {0}


def test_every_named_schedule_needs_no_more_than_pools_of_each_edge():
    for name, schedule in SCHEDULES.items():
        buffers = plan_buffers(lower(schedule.plan(4, 8)))
        assert buffers.num_slots <= sum(buffers.by_edge), name
