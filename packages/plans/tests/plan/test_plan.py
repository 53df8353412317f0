"""Plans: values, shapes that do not fit, and what a plan says of itself."""

import pytest
from attrs import evolve

from pipegrid.core.edge import Direction, Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import Group, Lane, Plan, PlanError, chain, lower, multi_module_1f1b, one_f_one_b
from pipegrid.plans.plan.actions import Action, ActionKind, backward, forward
from pipegrid.plans.verify import dataflow_of, default_creation

SEND = Action(ActionKind.SEND_F, 0, 0, Edge(0, 1))


def small(**changes):
    fields = {
        "positions": [[forward(0, 0), backward(0, 0)]],
        "graph": chain(1),
        "placement": [0],
        "num_microbatches": 1,
    }
    return Plan(**{**fields, **changes})


def test_plans_are_values():
    plan = lower(one_f_one_b(3, 4))
    again = lower(one_f_one_b(3, 4))
    assert plan == again
    assert hash(plan) == hash(again)
    assert plan != lower(one_f_one_b(3, 5))
    with pytest.raises(AttributeError):
        plan.num_microbatches = 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": []}, "stage 0 is placed on position 0; the plan has none"),
        ({"positions": [[()]]}, "[] is no batch"),
        ({"positions": [["0F0"]]}, "step '0F0' is neither an Action nor a batch of Actions"),
        ({"positions": [[3]]}, "step 3 is neither an Action nor a batch of Actions"),
        ({"positions": [[("0F0",)]]}, "step ('0F0',) (tuple) is neither an Action nor a batch of Actions"),
        (
            {"positions": [[(forward(0, 0), SEND)]]},
            "[0F0 0SEND_F0>1] is no batch; messages and collectives are batched",
        ),
        ({"placement": [0, 0]}, "the placement covers 2 stages and the graph has 1"),
        ({"placement": [1]}, "stage 0 is placed on position 1; the plan has 0..0"),
        ({"placement": [()]}, "placement[0] is () (tuple); it must be one position from 0, or several"),
        ({"placement": [(0, 0)]}, "placement[0] is (0, 0) (tuple); it must be one position from 0, or several, each"),
        ({"num_microbatches": 0}, "Plan.num_microbatches is 0; it must be an integer of at least 1"),
        ({"num_microbatches": 2.0}, "num_microbatches is 2.0"),
        ({"forward_only": [1]}, "forward_only names stage 1; the graph has 0..0"),
        ({"groups": [Group("g", [1])]}, "group 'g' names position 1"),
        ({"groups": [Group("g", [0]), Group("g", [0])]}, "group 'g' has g, which a group has already"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(PlanError) as error:
        small(**changes)
    assert message in str(error.value)


def test_a_plan_is_not_printed_whole_by_accident():
    assert "positions=<3 positions, 44 steps>" in repr(lower(one_f_one_b(3, 4)))


def test_a_trained_stage_needs_a_gradient():
    with pytest.raises(PlanError, match=r"stage 0 is trained, but all stages that it feeds \(1\) are forward_only"):
        Plan(positions=[[]], graph=chain(2), placement=[0, 0], num_microbatches=1, forward_only=[1])


@pytest.mark.parametrize("name", ["", "a b", "a>b", "[a]"])
def test_group_names_are_words(name):
    with pytest.raises(PlanError, match="it must be a group name"):
        Group(name, [0])


def test_a_group_has_members():
    with pytest.raises(PlanError, match="it must be one position from 0, or several"):
        Group("g", [])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([Group("g", [0, 1], edges=[Edge(0, 2)])], "group 'g' names edge 0>2; the graph has 0>1, 1>2"),
        (
            [Group("g", [0, 1], edges=[Edge(0, 1)]), Group("h", [0, 1], edges=[Edge(0, 1)])],
            "group 'h' has 0>1, which a group has already",
        ),
        ([Group("g", [0, 1], tied=[3])], "group 'g' ties stage 3; trained are 0, 1, 2"),
        ([Group("g", [0, 1, 2], tied=[0, 1])], "group 'g' has positions [0, 1, 2]; its tied stages lie on [0, 1]"),
        ([Group("g", [0, 1], tied=[0, 2])], "group 'g' has positions [0, 1]; its tied stages lie on [0, 2]"),
        ([Group("g", [0], tied=[0, 2])], "group 'g' has positions [0]; its tied stages lie on [0, 2]"),
        ([Group("g", [0, 1], edges=[Edge(1, 2)])], "group 'g' has positions [0, 1]; its stages lie on [1, 2]"),
    ],
)
def test_a_group_fits_what_it_carries(groups, message):
    with pytest.raises(PlanError) as error:
        evolve(one_f_one_b(3, 2), groups=groups)
    assert message in str(error.value)


def test_a_batch_of_one_is_that_action():
    plan = evolve(small(), positions=[[(SEND,), (forward(0, 0),)]])
    assert plan.positions == ((SEND, forward(0, 0)),)


def test_a_stage_or_a_group_on_one_position_may_name_it_alone():
    assert small(placement=[0], groups=[Group("g", 0)]) == small(placement=[(0,)], groups=[Group("g", [0])])
    with pytest.raises(PlanError, match=r"Group.positions is \(0, 0\) .*each once"):
        Group("g", [0, 0])


def test_lanes_join_positions_and_are_created_in_one_order():
    graph = ModuleGraph({"enc": 1, "llm": 2}, {"enc": ["llm"]})
    plan = lower(multi_module_1f1b(graph, 2, placement=[(0, 1), 0, 1]), tied={"tied": [0, 2]})
    # The encoder on both positions: position 1 sends to position 0, where the language model starts.
    assert plan.stages_at == ((0, 1), (0, 2))
    lanes = dataflow_of(plan).lanes
    assert [str(lane) for lane in lanes] == ["B0>1", "F0>1", "B1>0", "F1>0"]
    assert Lane(1, 0, Direction.FORWARD) in lanes
    assert default_creation(plan) == (("tied", *lanes), ("tied", *lanes))
    assert default_creation(multi_module_1f1b(graph, 2)) == ((), (), ())


def test_a_frozen_module_gets_no_gradient():
    graph = ModuleGraph({"enc": 2, "llm": 1}, {"enc": ["llm"]})
    plan = multi_module_1f1b(graph, 2, forward_only=["enc"])
    assert plan.forward_only == (0, 1)
    assert plan.gradient_edges == frozenset()
    assert not any(lane.direction is Direction.BACKWARD for lane in dataflow_of(lower(plan)).lanes)
