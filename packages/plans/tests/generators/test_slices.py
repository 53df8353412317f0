"""Plans of sequence slices: written and read, proved, simulated against a second player, and the formulas of seq1f1b.

F = I = W = 1 and B = 2 for a whole microbatch, of which each of k slices takes 1/k where nothing else is said.
"""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import (
    Action,
    ActionKind,
    Costs,
    CostsError,
    Plan,
    PlanError,
    find_schedule,
    from_csv,
    from_json,
    from_text,
    lower,
    one_f_one_b,
    seq1f1b,
    seq1f1b_interleaved,
    seq1f1b_zero_bubble,
    simulate,
    to_csv,
    to_json,
    to_text,
    verify,
    zero_bubble_h1,
)
from pipegrid.plans.plan import parse_action
from plan_kit.player import makespan, play_plan

F, B, I, W = (ActionKind[name] for name in "FBIW")
SCHEDULES = (seq1f1b, seq1f1b_interleaved, seq1f1b_zero_bubble)


# Written and read


@pytest.mark.parametrize(
    ("token", "action"),
    [
        ("3F7.2", Action(F, 3, 7, slice=2)),
        ("3W0.0", Action(W, 3, 0, slice=0)),
        ("3SEND_F7.12>4", Action(ActionKind.SEND_F, 3, 7, Edge(3, 4), slice=12)),
        ("3RECV_B7.2<4", Action(ActionKind.RECV_B, 3, 7, Edge(3, 4), slice=2)),
    ],
)
def test_a_slice_is_part_of_an_action(token, action):
    assert str(action) == token
    assert parse_action(token) == action
    assert action != evolve(action, slice=None)


@pytest.mark.parametrize("token", ["3F.2", "3F7.", "3F7.2.1", "3F7.-1", "3REDUCE.1"])
def test_a_slice_belongs_to_a_microbatch(token):
    with pytest.raises(PlanError):
        parse_action(token)
    with pytest.raises(PlanError, match="a COLLECTIVE takes no slice"):
        Action(ActionKind.COLLECTIVE, 3, group="g", slice=1)


@pytest.mark.parametrize("make", SCHEDULES)
def test_a_plan_of_slices_reads_back_equal(make):
    for plan in (make(3, 2, num_slices=3), lower(make(2, 3, num_slices=2))):
        assert from_text(to_text(plan)) == from_json(to_json(plan)) == from_csv(to_csv(plan)) == plan
        assert "\nslices " in to_text(plan)


def test_slices_are_those_of_the_table_without_a_header_line():
    table = "0: 0F0.0 0F0.1 0B0.1 0B0.0\n"
    assert from_text(table).num_slices == from_csv("0F0.0,0F0.1,0B0.1,0B0.0\n").num_slices == 2
    assert from_text(table) == from_text("slices 2\n" + table)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("slices 3\n0: 0F0.0 0F0.1 0B0.1 0B0.0", "line 1: the table has actions of 2 of 3 slices"),
        (
            "slices 2\n0: 0F0.0 0F0.1 0B0.1 0B0",
            "line 2, column 22: found '0B0'; expected a slice in 0..1 after the microbatch",
        ),
        (
            "slices 1\n0: 0F0.0 0F0.1 0B0.1 0B0.0",
            "line 2, column 4: found '0F0.0'; expected a microbatch without a slice",
        ),
        ("slices 2\n0: 0F0.0 0F0.2 0B0.1 0B0.0", "line 2, column 10: found '0F0.2'; expected a slice in 0..1"),
        (
            "modules a:1 b:1\nedges a>b\n0: 0F0.0 0F0.1\n1: 1F0.0 1F0.1",
            "microbatches of modules a, b are cut into 2 slices; slices are for one",
        ),
    ],
)
def test_a_wrong_slice_is_pointed_at(text, error):
    with pytest.raises(PlanError) as caught:
        from_text(text)
    assert error in str(caught.value)


def test_a_plan_made_by_hand_names_slices_throughout_or_not_at_all():
    graph = ModuleGraph({"model": 1})
    whole = [[Action(F, 0, 0), Action(B, 0, 0)]]
    sliced = [[Action(F, 0, 0, slice=0), Action(B, 0, 0, slice=0)]]
    with pytest.raises(PlanError, match=r"0F0 names no slice; microbatches are cut into 2"):
        Plan(positions=whole, graph=graph, placement=[0], num_microbatches=1, num_slices=2)
    with pytest.raises(PlanError, match=r"0F0\.0 names slice 0; microbatches are cut into 1"):
        Plan(positions=sliced, graph=graph, placement=[0], num_microbatches=1)


# Proved (and by the explorer's rules, in verify/test_explorer.py and verify/test_mutations.py)


@pytest.mark.parametrize("make", SCHEDULES)
def test_every_plan_of_slices_is_proved_under_all_rules_of_waiting(make):
    for p in (1, 2, 3, 5):
        for m, k in ((1, 2), (2, 3), (4, 2), (3, 5)):
            plan = make(p, m, num_slices=k)
            verify(plan)
            for receives in ("late", "early"):
                lowered = lower(plan, receives=receives)
                assert verify(lowered).peak_live == verify(plan).peak_live
                verify(lowered, lanes="shared")


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (
            "0F0.1 0F0.0 0B0.1 0B0.0",
            "position 0, step 0: 0F0.1 needs 0F0.0 before it, which comes at step 1: it reads the keys and values",
        ),
        (
            "0F0.0 0F0.1 0B0.0 0B0.1",
            "0B0.0 needs 0B0.1 or 0I0.1 before it, which comes at step 3: the gradients of its keys and values come",
        ),
        (
            "0F0.0 0F0.1 0I0.0 0I0.1 0W0.1 0W0.0",
            "0I0.0 needs 0B0.1 or 0I0.1 before it, which comes at step 3",
        ),
        ("0F0.0 0F0.1 0B0.1", "0B0.0 or 0I0.0: to be done here, and never done"),
        ("0F0.0 0F0.1 0B0.1 0B0.1", "0B0.1 has been done before"),
    ],
)
def test_an_order_of_slices_that_breaks_the_sequence_has_its_fault(order, error):
    with pytest.raises(PlanError) as caught:
        verify(from_text(f"0: {order}"))
    assert error in str(caught.value)


def test_weight_halves_of_slices_run_in_any_order():
    verify(from_text("0: 0F0.0 0F0.1 0I0.1 0I0.0 0W0.0 0W0.1"))
    verify(from_text("0: 0F0.0 0F0.1 0F1.0 0B0.1 0F1.1 0B1.1 0B0.0 0B1.0"))  # microbatches are independent


# Simulated


SHARES = st.floats(0.1, 3.0)


@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 4), st.integers(2, 4), st.data())
@settings(deadline=None, max_examples=60)
def test_the_simulated_makespan_is_that_of_a_second_player(make, p, m, k, data):
    plan = make(p, m, num_slices=k)
    lengths, times = (data.draw(st.lists(SHARES, min_size=k, max_size=k)) for _ in range(2))
    costs = Costs(
        F=data.draw(SHARES), I=data.draw(SHARES), W=data.draw(SHARES), slice_lengths=lengths, slice_times=times
    )
    share = dict.fromkeys((F, B, I), times) | {W: lengths}
    whole = {F: costs.F, I: costs.I, W: costs.W, B: costs.I + costs.W}

    def duration(action):
        return whole[action.kind] * share[action.kind][action.slice] / sum(share[action.kind])

    assert simulate(plan, costs).makespan == pytest.approx(makespan(play_plan(plan, duration)))


def test_messages_and_memory_of_a_slice_go_by_its_length():
    plan = lower(seq1f1b(2, 1, num_slices=2))
    costs = Costs(F=0, I=0, W=0, message=12, bandwidth=1, slice_lengths=(2, 1))
    assert simulate(plan, costs).makespan == 12 + 12  # both lanes one after the other
    assert simulate(plan, evolve(costs, slice_lengths=())).makespan == 12 + 12
    simulation = simulate(plan, Costs(slice_lengths=(2, 1)))
    assert [value for _, value in simulation.live(0)] == pytest.approx([2 / 3, 1.0, 2 / 3, 0.0])
    with pytest.raises(CostsError, match="slice_times is given for 3 slices; the plan has 2"):
        simulate(plan, Costs(slice_times=(1, 1, 1)))


# Formulas


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_seq1f1b_has_a_kth_of_the_bubble_and_of_the_memory(k):
    for p in range(1, 6):
        for m in range(1, 7):
            plan = seq1f1b(p, m, num_slices=k)
            assert simulate(plan).makespan == pytest.approx(3 * m + 3 * (p - 1) / k)
            peaks = [min(m, (p - position - 1) / k + 1) for position in range(p)]
            assert verify(plan).peak_live == pytest.approx(peaks)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_seq1f1b_with_split_backwards_has_a_third_of_that_bubble(k):
    for p in range(1, 6):
        for m in range(1, 7):
            plan = seq1f1b_zero_bubble(p, m, num_slices=k)
            if m * k >= p + k - 1:
                assert simulate(plan).makespan == pytest.approx(3 * m + (p - 1) / k)
            assert verify(plan).peak_live == pytest.approx([min(m, (p - 1) / k + 1)] * p)


@pytest.mark.parametrize(("k", "v"), [(1, 2), (2, 1), (2, 2), (3, 2), (4, 3)])
def test_interleaved_seq1f1b_divides_the_bubble_by_chunks_again(k, v):
    for p in range(1, 5):
        for m in range(1, 7):
            group = -(-p // k) * k
            if m * k % group:
                continue
            plan = seq1f1b_interleaved(p, m, num_slices=k, num_chunks=v)
            assert simulate(plan).makespan == pytest.approx(3 * m + 3 * (p - 1) / (k * v))
            chunks = [min(m * k * v, 2 * (p - position - 1) + (v - 1) * group + k) for position in range(p)]
            assert verify(plan).peak_live == pytest.approx([count / (k * v) for count in chunks])


def test_one_slice_is_the_schedule_without_slices():
    for p, m in ((1, 1), (3, 2), (4, 8)):
        assert seq1f1b(p, m, num_slices=1) == one_f_one_b(p, m)
        assert seq1f1b_zero_bubble(p, m, num_slices=1) == zero_bubble_h1(p, m)


def test_the_table_of_schedules_knows_slices():
    assert find_schedule("seq1f1b").plan(4, 8, num_slices=2) == seq1f1b(4, 8, num_slices=2)
    assert find_schedule("seq1f1b").plan(4, 8) == one_f_one_b(4, 8)
    assert find_schedule("1f1b").plan(4, 8, num_slices=1) == one_f_one_b(4, 8)
    with pytest.raises(PlanError, match="gpipe does not cut microbatches into 2 slices; these do: seq1f1b,"):
        find_schedule("gpipe").plan(4, 8, num_slices=2)
