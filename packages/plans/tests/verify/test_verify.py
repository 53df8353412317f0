"""The proof: what it grants, and that each kind of mistake is refused by name, with its place."""

import pytest
from attrs import evolve

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import (
    Group,
    PlanError,
    forward_only,
    from_text,
    gpipe,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    one_f_one_b,
    verify,
    zero_bubble_h1,
    zero_bubble_v,
)
from pipegrid.plans.plan.actions import parse_action

# 1F1B on two positions by hand, right; tests change it.
RIGHT = """
modules model:2
placement 0 1
microbatches 2
0: 0F0 0SEND_F0>1 0F1 [0SEND_F1>1 0RECV_B0<1] 0B0 0RECV_B1<1 0B1
1: 1RECV_F0<0 1F0 1B0 [1RECV_F1<0 1SEND_B0>0] 1F1 1B1 1SEND_B1>0
"""


def faults(text, **options):
    with pytest.raises(PlanError) as error:
        verify(from_text(text), **options)
    assert all(str(fault) in str(error.value) for fault in error.value.faults)
    return error.value.faults


def rules(text, **options):
    return [fault.rule for fault in faults(text, **options)]


def changed(*replacements, text=RIGHT):
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def test_a_right_plan_is_proved():
    proof = verify(from_text(RIGHT))
    assert (proof.num_positions, proof.num_microbatches, proof.num_actions, proof.num_messages) == (2, 2, 16, 4)
    assert proof.communicates
    assert proof.peak_live == (2.0, 1.0)
    assert str(proof) == (
        "2 positions, 2 microbatches, 16 actions, 4 messages: each once and in time; no deadlock even if sends "
        "block, separate lanes, under every order model and with waits for the whole device; at most 2 microbatches "
        "live on a position, 2 communicators per rank"
    )
    assert "if sends are buffered" in str(verify(from_text(RIGHT), rendezvous=False))
    assert "computes alone" in str(verify(one_f_one_b(2, 2)))


def test_activations_are_counted_until_w_and_until_i():
    proof = verify(zero_bubble_h1(4, 8))
    assert proof.peak_live == (4, 4, 4, 4)
    assert proof.peak_live_inputs == (4, 3, 2, 1)
    assert verify(zero_bubble_v(4, 8)).peak_live == (4, 4, 4, 4)
    evaluation = from_text("0: 0F0 0F1 0F2\n")
    assert verify(evaluation).peak_live == (1,)


# The worst that NCCL may do


CROSSED = changed(
    ("[0SEND_F1>1 0RECV_B0<1]", "0SEND_F1>1 0RECV_B0<1"), ("[1RECV_F1<0 1SEND_B0>0]", "1SEND_B0>0 1RECV_F1<0")
)


def test_an_order_that_only_buffered_sends_survive_is_refused_and_the_circle_printed():
    (fault,) = faults(CROSSED)
    assert (fault.rule, fault.position, fault.step) == ("cycle", 0, 3)
    assert fault.message.splitlines() == [
        "2 positions wait for each other in a cycle; move one of these actions, or issue those that wait as one batch",
        "      position 0, step 3: 0SEND_F1>1 waits for position 1, step 4: 1RECV_F1<0",
        "      position 1, step 3: 1SEND_B0>0 waits for position 0, step 4: 0RECV_B0<1",
    ]
    assert verify(from_text(CROSSED), rendezvous=False).num_messages == 4


def test_one_batch_against_two_steps_is_a_matter_of_order_unless_batches_are_simultaneous():
    same, other = (from_text(changed(("[0SEND_F1>1 0RECV_B0<1]", split))) for split in SPLIT)
    verify(same)
    with pytest.raises(PlanError) as error:
        verify(other)
    (fault,) = error.value.faults
    assert (fault.rule, fault.position, fault.step) == ("cycle", 0, 3)
    assert fault.message.splitlines() == [
        "2 positions wait for each other in a cycle; write their batches in one order, or move one of these actions",
        "      position 0, step 3: 0RECV_B0<1 waits for position 1, step 3: 1SEND_B0>0 of [1RECV_F1<0 1SEND_B0>0]",
        "      position 1, step 3: 1RECV_F1<0 of [1RECV_F1<0 1SEND_B0>0] waits for position 0, step 4: 0SEND_F1>1",
    ]
    for plan in (same, other):
        verify(plan, batches="simultaneous")
        verify(plan, rendezvous=False)


SPLIT = ("0SEND_F1>1 0RECV_B0<1", "0RECV_B0<1 0SEND_F1>1")


def test_two_batches_written_in_different_orders_are_a_cycle_unless_simultaneous():
    crossed = from_text(changed(("[1RECV_F1<0 1SEND_B0>0]", "[1SEND_B0>0 1RECV_F1<0]")))
    with pytest.raises(PlanError, match="write their batches in one order") as error:
        verify(crossed)
    assert [fault.rule for fault in error.value.faults] == ["cycle"]
    assert "position 1, step 3: 1SEND_B0>0 of [1SEND_B0>0 1RECV_F1<0] waits for" in str(error.value)
    verify(crossed, batches="simultaneous")
    verify(crossed, lanes="shared")  # a batch between two positions is one call there


def test_a_circle_of_three_positions_is_followed_round():
    text = """
    modules a:1 b:1 c:1
    edges a>b a>c b>c
    forward_only 0 1 2
    0: 0F0 0SEND_F0>2 0SEND_F0>1
    1: 1RECV_F0<0 1F0 1SEND_F0>2
    2: [2RECV_F0<0] 2RECV_F0<1 2F0
    """
    verify(from_text(text))
    (fault,) = faults(text.replace("[2RECV_F0<0] 2RECV_F0<1", "2RECV_F0<1 2RECV_F0<0"))
    assert fault.message.splitlines()[1:] == [
        "      position 0, step 1: 0SEND_F0>2 waits for position 2, step 1: 2RECV_F0<0",
        "      position 2, step 0: 2RECV_F0<1 waits for position 1, step 2: 1SEND_F0>2",
        "      position 1, step 0: 1RECV_F0<0 waits for position 0, step 2: 0SEND_F0>1",
    ]


def test_two_circles_are_both_reported():
    text = CROSSED.replace("model:2", "model:2 other:2").replace("placement 0 1", "placement 0 1 2 3")
    for stage, other in ((0, 2), (1, 3)):
        row = next(line for line in CROSSED.splitlines() if line.startswith(f"{stage}:"))
        for old, new in (("1", "b"), ("0", "a"), ("a", "2"), ("b", "3")):
            row = row.replace(f"{old}F", f"{new}F").replace(f"{old}B", f"{new}B")
            row = row.replace(f"{old}SEND", f"{new}SEND").replace(f"{old}RECV", f"{new}RECV")
            row = row.replace(f">{old}", f">{new}").replace(f"<{old}", f"<{new}")
        text += f"{other}:{row[2:]}\n"
    assert rules(text) == ["cycle", "cycle"]


def test_the_proof_holds_its_plan_and_counts_the_communicators_of_a_rank():
    plan = lower(one_f_one_b(4, 4))
    proof = verify(plan)
    assert proof.plan is plan
    assert proof.communicators == (2, 4, 4, 2)  # activations and gradients, each in and out
    assert verify(plan, lanes="shared").communicators == (1, 2, 2, 1)
    assert verify(lower(interleaved_1f1b(3, 3))).communicators == (4, 4, 4)  # the last feeds the first
    assert verify(lower(interleaved_1f1b(3, 3)), lanes="shared").communicators == (2, 2, 2)
    assert verify(lower(one_f_one_b(2, 2), tied={"tied": [0, 1]})).communicators == (3, 3)
    assert verify(BRIDGED).communicators == (4, 4)  # two lanes, the bridge's group, the tied parameter's
    assert verify(lower(forward_only(3, 2, num_chunks=1))).communicators == (1, 2, 1)


def test_shared_lanes_need_batches_that_match_one_to_one():
    # Right on two communicators, one for each direction; on one, position 0's batch has no counterpart.
    text = changed(("[1RECV_F1<0 1SEND_B0>0]", "1RECV_F1<0 1SEND_B0>0"))
    verify(from_text(text))
    for rendezvous in (True, False):
        (fault,) = faults(text, lanes="shared", rendezvous=rendezvous)
        assert fault.rule == "order"
        assert fault.message == (
            "positions 0 and 1 share a lane, and their exchange 1 does not match: position 0, step 3: "
            "[0SEND_F1>1 0RECV_B0<1] against position 1, step 3: 1RECV_F1<0"
        )
        verify(from_text(RIGHT), lanes="shared", rendezvous=rendezvous)


# One mistake each


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        # an action twice, or never
        ("0F1 [", "0F1 0F1 [", [("duplicate", 0, 3, "0F1 has been done before")]),
        ("0F1 [", "0F0 [", [("duplicate", 0, 2, "0F0 has been done before")]),
        ("0SEND_F0>1", "0SEND_F1>1", [("dependency", 0, 1, "0SEND_F1>1 needs 0F1 before it, which comes at step 2")]),
        ("0B1\n", "0B1 0SEND_F1>1\n", [("duplicate", 0, 7, "0SEND_F1>1 has been done before")]),
        ("0B1\n", "\n", [("missing", 0, None, "0B1 or 0I1: to be done here, and never done")]),
        (
            "1SEND_B1>0\n",
            "\n",
            [("missing", 1, None, "1SEND_B1>0: to be done here, and never done")],
        ),
        ("0RECV_B1<1 0B1", "0B1 0RECV_B1<1", [("late-receive", 0, 5, "0B1 needs 0RECV_B1<1 before it, which comes")]),
        ("1F1 1B1", "1B1 1F1", [("dependency", 1, 4, "1B1 needs 1F1 before it, which comes at step 5")]),
        ("0F0 0SEND_F0>1", "0SEND_F0>1 0F0", [("dependency", 0, 0, "0SEND_F0>1 needs 0F0 before it")]),
        # halves
        ("0B1\n", "0I1 0W1\n", []),
        ("0B1\n", "0W1 0I1\n", [("dependency", 0, 6, "0W1 needs 0I1 before it, which comes at step 7")]),
        ("0B1\n", "0I1\n", [("missing", 0, None, "0W1: to be done here, and never done")]),
        ("0B1\n", "0B1 0W1\n", [("duplicate", 0, 7, "0W1 has been done before")]),
        ("0B1\n", "0B1 0I1\n", [("duplicate", 0, 7, "0I1 has been done before")]),
        # where it does not belong
        ("0F1 [", "1F1 [", [("misplaced", 0, 2, "1F1: stage 1 lies on position 1")]),
        ("0B1\n", "0B1 1RECV_F1<0\n", [("misplaced", 0, 7, "stage 1 lies on position 1")]),
        # groups
        ("0B1\n", "0B1 0REDUCE\n", []),
        ("0B1\n", "0REDUCE 0B1\n", [("dependency", 0, 6, "0REDUCE comes before the last backward of stage 0; 1 of 2")]),
        ("0B1\n", "0B1 0REDUCE 0REDUCE\n", [("duplicate", 0, 8, "0REDUCE is here a second time")]),
        ("0B1\n", "0B1 1REDUCE\n", [("misplaced", 0, 7, "1REDUCE: stage 1 lies on position 1")]),
    ],
)  # fmt: skip
def test_one_mistake_is_refused_by_name(old, new, found):
    text = changed((old, new))
    if not found:
        verify(from_text(text))
        return
    first, *others = faults(text)
    (rule, position, step, message), *_ = found
    assert (first.rule, first.position, first.step) == (rule, position, step), first
    assert message in first.message
    assert {fault.rule for fault in others} <= {"missing", "dependency", "duplicate"}


@pytest.mark.parametrize(
    ("token", "rule", "message"),
    [
        ("0F2", "unknown-microbatch", "0F2: there is no microbatch 2; the plan has 2, 0..1"),
        ("2F0", "unknown-stage", "2F0: the plan has 2 stages, 0..1"),
        ("0SEND_F0>2", "unknown-edge", "0SEND_F0>2: there is no edge 0>2; the graph has 0>1"),
        ("0REDUCE@t", "group", "0REDUCE@t: this position is not in the group; the plan has no such group"),
    ],
)
def test_what_no_plan_has_is_refused_by_name(token, rule, message):
    plan = from_text(RIGHT)
    first, *others = plan.positions
    with pytest.raises(PlanError) as error:
        verify(evolve(plan, positions=[(parse_action(token), *first[1:]), *others]))
    assert (error.value.faults[0].rule, error.value.faults[0].message) == (rule, message)


def test_a_count_beyond_all_bounds_is_refused_before_memory_is_taken():
    with pytest.raises(PlanError, match="14 steps cannot be the work of 999999999 microbatches"):
        verify(evolve(from_text(RIGHT), num_microbatches=999_999_999))


def test_receives_in_another_order_than_the_sends_are_refused():
    plan = lower(gpipe(2, 2))
    assert " ".join(map(str, plan.positions[1][:4])) == "1RECV_F0<0 1F0 1RECV_F1<0 1F1"
    steps = list(plan.positions[1])
    steps[0:4] = [steps[0], steps[2], steps[1], steps[3]]
    verify(evolve(plan, positions=[plan.positions[0], steps]), rendezvous=False)
    steps[0], steps[1] = steps[1], steps[0]
    with pytest.raises(PlanError) as error:
        verify(evolve(plan, positions=[plan.positions[0], steps]), rendezvous=False)
    (fault,) = error.value.faults
    assert fault.rule == "order"
    assert fault.message == (
        "lane F0>1: message 0 is sent by position 0, step 1: 0SEND_F0>1, and received as another by "
        "position 1, step 0: 1RECV_F1<0; lanes are first in, first out"
    )


def test_two_sends_the_wrong_way_round_are_refused():
    plan = lower(gpipe(2, 2))
    forwards = [parse_action(token) for token in ("0F0", "0F1", "0SEND_F1>1", "0SEND_F0>1")]
    with pytest.raises(PlanError) as error:
        verify(evolve(plan, positions=[[*forwards, *plan.positions[0][4:]], plan.positions[1]]))
    (fault,) = error.value.faults
    assert fault.rule == "order"
    assert fault.message.startswith("lane F0>1: message 0 is sent by position 0, step 2: 0SEND_F1>1")


def test_edges_between_the_same_positions_share_a_lane():
    # Two chunks on two positions: edges 0>1 and 2>3 both lead from 0 to 1, and may not overtake each other.
    text = """
    placement 0 1 0 1
    forward_only 0 1 2 3
    0: 0F0 0SEND_F0>1 2RECV_F0<1 2F0 0F1 2SEND_F0>3 0SEND_F1>1 2RECV_F1<1 2F1 2SEND_F1>3
    1: 1RECV_F0<0 1F0 1SEND_F0>2 [3RECV_F0<2 1RECV_F1<0] 3F0 1F1 1SEND_F1>2 3RECV_F1<2 3F1
    """
    verify(from_text(text))
    assert rules(text.replace("[3RECV_F0<2 1RECV_F1<0]", "[1RECV_F1<0 3RECV_F0<2]")) == ["order"]


def test_every_fault_is_listed():
    text = changed(("0F0 0SEND_F0>1", "0SEND_F0>1 0F0 0F0"), ("1B1 1SEND_B1>0", "1SEND_B1>0"))
    found = faults(text)
    assert [(fault.rule, fault.position) for fault in found] == [
        ("dependency", 0),
        ("duplicate", 0),
        ("dependency", 1),
        ("missing", 1),
    ]
    with pytest.raises(PlanError, match="the plan has 4 faults:\n  \\[dependency\\] position 0, step 0: 0SEND"):
        verify(from_text(text))


def test_many_missing_microbatches_are_one_fault():
    plan = one_f_one_b(1, 20)
    with pytest.raises(PlanError) as error:
        verify(evolve(plan, positions=[plan.positions[0][:10]], num_microbatches=10, forward_only=[]))
    (fault, *_) = error.value.faults
    assert fault.message.startswith("0F5, 0F6, 0F7, 0F8, 0F9: to be done here")
    with pytest.raises(PlanError, match="0F8, 0F9, 0F10, 0F11, 0F12, 0F13, 0F14, 0F15 and 4 more"):
        verify(evolve(plan, positions=[[*plan.positions[0][:16], *([parse_action("0REDUCE")] * 4)]]))


# Modules


def test_a_frozen_stage_has_no_backward_and_gets_no_gradient():
    frozen = """
    modules enc:1 llm:1
    edges enc>llm
    placement 0 1
    forward_only 0
    0: 0F0 0SEND_F0>1
    1: 1RECV_F0<0 1F0 1B0
    """
    verify(from_text(frozen))
    (fault,) = faults(frozen.replace("0SEND_F0>1", "0SEND_F0>1 0B0"))
    assert fault.message == "0B0: stage 0 is forward_only and has no backward"
    found = faults(frozen.replace("1B0", "1B0 1SEND_B0>0"))
    assert found[0].message == ("1SEND_B0>0: no gradient travels along edge 0>1; one of its stages is forward_only")
    (fault,) = faults(frozen.replace("0SEND_F0>1", "0SEND_F0>1 0REDUCE"))
    assert fault.message == "0REDUCE: stage 0 has no backward to reduce"


def test_what_stays_on_its_position_may_not_be_sent():
    text = "modules m:2\nplacement 0 0\nforward_only 0 1\n0: 0F0 0SEND_F0>1 1F0\n"
    (fault,) = faults(text)
    assert fault.rule == "unneeded"
    assert "both ends of edge 0>1 lie on the same positions" in fault.message
    spread = "modules m:2\nplacement 0 0,1\nforward_only 0 1\n0: 0F0 0SEND_F0>1 1F0\n1: 1RECV_F0<0 1F0\n"
    verify(from_text(spread))
    (fault,) = faults(spread.replace("0SEND_F0>1 1F0", "0SEND_F0>1 1RECV_F0<0 1F0"))
    assert "the other end is this position alone" in fault.message


BRIDGED = lower(
    multi_module_1f1b(ModuleGraph({"enc": 1, "llm": 2}, {"enc": ["llm"]}), 2, placement=[(0, 1), 0, 1]),
    collectives=dict.fromkeys(ModuleGraph({"enc": 1, "llm": 2}, {"enc": ["llm"]}).stage_edges[:1], "bridge"),
    tied={"tied": [0, 2]},
)


@pytest.mark.parametrize(
    ("old", "new", "rule", "message"),
    [
        ("0COLLECTIVE0>1@bridge ", "", "dependency", "1F0 needs 0COLLECTIVE0>1@bridge before it, which this position"),
        ("0F0 0COLLECTIVE0>1@bridge", "0COLLECTIVE0>1@bridge 0F0", "dependency", "0COLLECTIVE0>1@bridge needs 0F0"),
        (" 0REDUCE@tied\n", "\n", "group", "group 'tied': collective 0 differs between members: position 0 has"),
        ("0REDUCE@tied", "0REDUCE@bridge", "group", "group 'bridge': collective 4 differs between members"),
        ("0COLLECTIVE0>1@bridge", "0COLLECTIVE0>1@tied", "group", "edge 0>1 already uses the group 'bridge'"),
        ("0REDUCE@tied", "0COLLECTIVE7@tied 0REDUCE@tied", "unknown-microbatch", "there is no microbatch 7"),
    ],
)  # fmt: skip
def test_collectives_are_done_by_all_members_in_one_order(old, new, rule, message):
    verify(BRIDGED)
    plan = from_text(changed((old, new), text=str(BRIDGED))) if "7@" not in new else None
    if plan is None:
        steps = [*BRIDGED.positions[0][:-1], parse_action("0COLLECTIVE7@tied"), BRIDGED.positions[0][-1]]
        plan = evolve(BRIDGED, positions=[steps, BRIDGED.positions[1]])
    with pytest.raises(PlanError) as error:
        verify(plan)
    assert any(fault.rule == rule and message in fault.message for fault in error.value.faults), error.value


def test_collectives_that_all_members_leave_out_are_missed():
    def without(kind):
        positions = [[step for step in steps if kind not in str(step)] for steps in BRIDGED.positions]
        with pytest.raises(PlanError) as error:
            verify(evolve(BRIDGED, positions=positions))
        return {(fault.rule, fault.position, fault.message) for fault in error.value.faults}

    assert without("REDUCE") == {
        ("missing", 0, "0REDUCE@tied: to be done here, and never done"),
        ("missing", 1, "0REDUCE@tied: to be done here, and never done"),
    }
    message = "0COLLECTIVE0>1@bridge, 0COLLECTIVE1>1@bridge: to be done here, and never done"
    assert ("missing", 1, message) in without("COLLECTIVE")


def test_tied_stages_are_reduced_after_the_last_backward_of_each():
    text = """
    modules m:2
    placement 0 0
    group tied 0 tied 0,1
    0: 0F0 1F0 1B0 0B0 0REDUCE@tied
    """
    verify(from_text(text))
    found = faults(text.replace("0B0 0REDUCE@tied", "1REDUCE@tied 0B0"))
    assert "1REDUCE@tied comes before the last backward of stage 0; 1 of 1" in found[0].message


def test_collectives_in_two_groups_may_wait_for_each_other_in_a_circle():
    text = """
    modules m:2
    placement 0 1
    forward_only 0 1
    group g 0,1
    group h 0,1
    0: 0F0 0SEND_F0>1 0COLLECTIVE@g 0COLLECTIVE@h
    1: 1RECV_F0<0 1F0 1COLLECTIVE@g 1COLLECTIVE@h
    """
    verify(from_text(text))
    for rendezvous in (True, False):
        (fault,) = faults(
            text.replace("0COLLECTIVE@g 0COLLECTIVE@h", "0COLLECTIVE@h 0COLLECTIVE@g"), rendezvous=rendezvous
        )
        assert fault.rule == "cycle"
        assert "position 0, step 2: 0COLLECTIVE@h waits for position 1, step 3: 1COLLECTIVE@h" in fault.message


# Memory


def test_memory_is_bounded_for_all_positions_or_for_each():
    plan = lower(one_f_one_b(3, 6))
    assert verify(plan, memory_limit=3).peak_live == (3, 2, 1)
    verify(plan, memory_limit=[3, 2, 1])
    with pytest.raises(PlanError) as error:
        verify(plan, memory_limit=[3, 1.5, 0])
    assert [(fault.rule, fault.position, fault.message) for fault in error.value.faults] == [
        ("memory", 1, "2 microbatches are live at once; the limit is 1.5"),
        ("memory", 2, "1 microbatches are live at once; the limit is 0"),
    ]
    with pytest.raises(PlanError, match="memory_limit has 2 numbers; the plan has 3 positions"):
        verify(plan, memory_limit=[3, 2])
    assert verify(plan, memory_limit=10**400).peak_live == (3, 2, 1)
    verify(plan, memory_limit=[3, None, 1])


@pytest.mark.parametrize("limit", [float("nan"), -1, "3", "321", True, [3, float("nan"), 1], [3, -2, 1], 1j])
def test_a_limit_that_is_none_is_refused(limit):
    computes = one_f_one_b(3, 6)
    with pytest.raises(PlanError, match=r"memory_limit is .*; give a number from 0, or None for no limit"):
        verify(computes, memory_limit=limit)


def test_lanes_are_separate_or_shared():
    with pytest.raises(PlanError, match="lanes is 'both'; it must be 'separate' or 'shared'"):
        verify(one_f_one_b(2, 2), lanes="both")


# Tied parameters and positions


@pytest.mark.parametrize(
    "plan",
    [
        lower(interleaved_1f1b(1, 2, num_chunks=2), tied={"emb": (0, 1)}),
        lower(one_f_one_b(2, 2), tied={"emb": (0, 1)}),
        lower(zero_bubble_v(2, 2), tied={"emb": (0, 3)}),
    ],
    ids=["one position", "two positions", "one of two positions"],
)
def test_a_reduce_that_nobody_does_is_refused(plan):
    verify(plan)
    positions = [[step for step in steps if "REDUCE" not in str(step)] for steps in plan.positions]
    with pytest.raises(PlanError) as error:
        verify(evolve(plan, positions=positions))
    members = plan.groups[0].positions
    assert [(fault.rule, fault.position) for fault in error.value.faults] == [("missing", p) for p in members]
    assert "0REDUCE@emb: to be done here, and never done" in error.value.faults[0].message


def test_a_plan_of_computes_that_ties_parameters_is_told_of_lower():
    computes = evolve(one_f_one_b(2, 2), groups=[Group("emb", [0, 1], tied=[0, 1])])
    with pytest.raises(PlanError, match="0REDUCE@emb: .* never done; lower adds it to a plan of computes"):
        verify(computes)
    verify(lower(computes))


def test_two_positions_that_hold_the_same_stages_are_refused():
    graph = ModuleGraph({"enc": 1, "llm": 1}, {"enc": ["llm"]})
    with pytest.raises(PlanError) as error:
        verify(multi_module_1f1b(graph, 2, placement=[(0, 1), (0, 1)]))
    (fault,) = error.value.faults
    assert (fault.rule, fault.position) == ("position", 1)
    assert fault.message.startswith("holds stages 0, 1, exactly as position 0 does; a position is all the ranks")


def test_positions_without_any_stage_may_be_several():
    assert verify(lower(interleaved_1f1b(4, 3, num_chunks=1, num_stages=2))).num_positions == 4
