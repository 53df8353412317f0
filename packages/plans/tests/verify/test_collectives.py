"""Collectives of a plan: every position comes to them in turn."""

from __future__ import annotations

import pytest
from attrs import evolve

from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators import one_f_one_b
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan import Action, ActionKind, Group, from_text
from pipegrid.plans.simulate import simulate
from pipegrid.plans.verify import verify
from plan_kit.collectives import APART, BRIDGE, COLOCATED


@pytest.mark.parametrize("mode", [{}, {"batches": "simultaneous"}, {"lanes": "shared"}, {"rendezvous": False}])
def test_a_stage_on_several_positions_may_communicate_inside_so_its_order_is_proved(mode):
    plan = from_text(APART)
    with pytest.raises(PlanError) as error:
        verify(plan, **mode)
    assert [fault.rule for fault in error.value.faults] == ["cycle"]
    if mode == {"rendezvous": False}:
        assert "position 0, step 9: 1COLLECTIVE0>0@bridge waits for position 1, step 10: 1COL" in str(error.value)
        assert "position 1, step 8: 0F2 waits for position 0, step 10: 0F2" in str(error.value)
    else:
        assert "position 1, step 2: 0F1 waits for position 0, step 4: 0F1" in str(error.value)
    verify(lower(COLOCATED, collectives={BRIDGE: "bridge"}), **mode)


def test_the_computes_of_a_stage_on_several_positions_come_in_one_order_on_all_of_them():
    plan = lower(COLOCATED, collectives={BRIDGE: "bridge"})
    text = str(plan)
    *head, first, second = text.rstrip().split("\n")
    # I and W on one position, B on the other: their inner collectives would not meet.
    halves = "\n".join([*head, first.replace("0B0", "0I0 0W0"), second])
    with pytest.raises(PlanError) as error:
        verify(from_text(halves))
    (fault,) = error.value.faults
    assert fault.rule == "order"
    assert fault.message == (
        "stage 0 lies on positions [0, 1], whose ranks may communicate inside it, and its compute 3 differs between "
        "them: position 0, step 11: 0I0; position 1, step 11: 0B0; put its computes in one order on all of them"
    )
    with pytest.raises(PlanError, match="never finish .position 0 at 0I0, position 1 at 0B0"):
        simulate(from_text(halves))
    joined = simulate(plan)
    when = [
        [(start, end, str(a)) for start, end, a in zip(*times, plan.actions(p), strict=True) if a.kind.is_compute]
        for p, times in enumerate(zip(joined.start, joined.end, strict=True))
    ]
    assert [entry for entry in when[0] if entry[2][0] == "0"] == [entry for entry in when[1] if entry[2][0] == "0"]


def test_positions_of_a_stage_wait_for_each_other_whatever_their_numbers():
    plan = from_text(APART)
    last = plan.num_positions - 1
    turned = evolve(
        plan,
        positions=plan.positions[::-1],
        placement=[[last - place for place in places] for places in plan.placement],
        groups=[evolve(group, positions=[last - place for place in group.positions]) for group in plan.groups],
    )
    with pytest.raises(PlanError) as error:
        verify(turned)
    assert [fault.rule for fault in error.value.faults] == ["cycle"]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_each_member_of_a_group_of_three_has_its_order(wrong):
    base = lower(one_f_one_b(3, 2))
    calls = [Action(ActionKind.COLLECTIVE, 0, microbatch, None, "all") for microbatch in range(2)]
    rows = [[*steps, *(calls[::-1] if place == wrong else calls)] for place, steps in enumerate(base.positions)]
    groups = [Group("all", [0, 1, 2])]
    verify(evolve(base, groups=groups, positions=[[*steps, *calls] for steps in base.positions]))
    with pytest.raises(PlanError, match=r"group 'all': collective 0 differs between members: position 0, step \d+: "):
        verify(evolve(base, groups=groups, positions=rows))
