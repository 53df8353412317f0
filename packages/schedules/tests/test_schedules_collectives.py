"""Collectives of a plan: who may run them, and that every position comes to them in turn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from attrs import evolve

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import PlanMismatchError
from pipegrid.schedules.generators import multi_module_1f1b
from pipegrid.schedules.lowering import lower
from pipegrid.schedules.plan.actions import Action, ActionKind
from pipegrid.schedules.runtime.preflight import check_collectives, require_runnable
from pipegrid.schedules.verify.verify import verify
from pipegrid.transport.edge import Edge

GRAPH = ModuleGraph({"enc": 1, "llm": 2}, {"enc": ["llm"]})
COLOCATED = multi_module_1f1b(GRAPH, 4, placement=[(0, 1), 0, 1])
BRIDGE = Edge(0, 1)


def able(*edges):
    return SimpleNamespace(collective=lambda payload, *, edge, direction: (None, None), collective_edges=edges)


@pytest.mark.parametrize("lanes", ["separate", "shared"])
def test_a_colocated_encoder_is_proved_with_its_collectives(lanes):
    plan = lower(COLOCATED, collectives={BRIDGE: "bridge"})
    verify(plan, lanes=lanes)
    for position in range(2):
        check_collectives(plan, position, able(BRIDGE))
        assert sum(action.kind is ActionKind.COLLECTIVE for action in plan.actions(position)) == 2 * 4
    assert plan.creation[0][0] == plan.creation[1][0] == "bridge"


def test_messages_where_ranks_are_shared_are_refused():
    plan = lower(COLOCATED)
    with pytest.raises(PlanMismatchError, match=r"edge 0>1 joins 'enc' on positions \[0, 1\] and 'llm' .* Lower the"):
        check_collectives(plan, 0, able(BRIDGE))
    same_position = lower(multi_module_1f1b(ModuleGraph({"enc": 1, "llm": 1}, {"enc": ["llm"]}), 2, placement=[0, 0]))
    check_collectives(same_position, 0, able())
    with pytest.raises(PlanMismatchError, match=r"Edge\(0, 1\): 'a name'"):
        check_collectives(same_position, 0, able(BRIDGE))


def test_a_communicator_without_collectives_is_refused():
    plan = lower(COLOCATED, collectives={BRIDGE: "bridge"})
    with pytest.raises(PlanMismatchError, match=r"has 0COLLECTIVE0>1@bridge, but a SimpleNamespace has no collective"):
        check_collectives(plan, 0, SimpleNamespace())


def test_a_collective_stands_alone_and_moves_something():
    plan = lower(COLOCATED, collectives={BRIDGE: "bridge"})
    bare = Action(ActionKind.COLLECTIVE, 0, group="bridge")
    with pytest.raises(PlanMismatchError, match="moves nothing along an edge"):
        check_collectives(evolve(plan, positions=((*plan.positions[0], bare), plan.positions[1])), 0, able(BRIDGE))
    with pytest.raises(PlanMismatchError, match="in a batch"):
        check_collectives(evolve(plan, positions=(((bare, bare),), plan.positions[1])), 0, able(BRIDGE))


def test_plan_and_communicator_agree_on_the_edges_that_carry_gradients():
    graph = ModuleGraph({"enc": 1, "llm": 1, "gen": 1}, {"enc": ["llm", "gen"], "llm": ["gen"]})
    trained = lower(multi_module_1f1b(graph, 2))
    frozen = lower(multi_module_1f1b(graph, 2, forward_only=["enc"]))
    every = SimpleNamespace(forward_edges=())
    one = SimpleNamespace(forward_edges=(Edge(0, 2),))
    both = SimpleNamespace(forward_edges=(Edge(0, 1), Edge(0, 2)))
    require_runnable(trained, 0, every, ())
    require_runnable(frozen, 0, both, ())
    require_runnable(lower(multi_module_1f1b(graph, 2, forward_only=graph.order)), 0, every, ())
    with pytest.raises(
        PlanMismatchError, match=r"edge 0>2 \('enc' -> 'gen'\) was declared without backward, but the plan"
    ):
        require_runnable(trained, 0, one, ())
    with pytest.raises(
        PlanMismatchError, match=r"edge 0>1 \('enc' -> 'llm'\) was declared with backward, but the plan"
    ):
        require_runnable(frozen, 0, one, ())
