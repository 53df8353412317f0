"""Who may run the collectives of a plan."""

from __future__ import annotations

import pytest
from attrs import evolve

from pipegrid.core.edge import Edge
from pipegrid.core.errors import StepArgumentError
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.generators import multi_module_1f1b
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan import Action, ActionKind
from pipegrid.plans.verify import default_creation, verify
from pipegrid.schedules.runtime.preflight import require_runnable
from plan_kit.collectives import BRIDGE, COLOCATED

from ..kit.of_job import Sending


class Exchanging(Sending):
    """It says that it exchanges, too."""

    exchanges = True


def able(*edges):
    return Exchanging(collective_edges=edges)


@pytest.mark.parametrize("lanes", ["separate", "shared"])
def test_a_colocated_encoder_is_proved_with_its_collectives(lanes):
    plan = lower(COLOCATED, collectives={BRIDGE: "bridge"})
    verify(plan, lanes=lanes)
    for position in range(2):
        require_runnable(plan, position, able(BRIDGE), ())
        assert sum(action.kind is ActionKind.COLLECTIVE for action in plan.actions(position)) == 2 * 4
    assert [names[0] for names in default_creation(plan)] == ["bridge", "bridge"]


def test_messages_where_ranks_are_shared_are_refused():
    plan = lower(COLOCATED)
    for position in range(2):
        for communicator in (able(BRIDGE), able()):  # also one that does not know which modules share ranks
            with pytest.raises(StepArgumentError, match=r"edge 0>1 share ranks.* lower the plan with collectives"):
                require_runnable(plan, position, communicator, ())
    same_position = lower(multi_module_1f1b(ModuleGraph({"enc": 1, "llm": 1}, {"enc": ["llm"]}), 2, placement=[0, 0]))
    require_runnable(same_position, 0, able(), ())
    with pytest.raises(StepArgumentError, match=r"Edge\(source=0, destination=1\): 'a name'"):
        require_runnable(same_position, 0, able(BRIDGE), ())


def test_a_communicator_without_collectives_is_refused():
    plan = lower(COLOCATED, collectives={BRIDGE: "bridge"})
    with pytest.raises(StepArgumentError, match=r"has 0COLLECTIVE0>1@bridge.*Sending.*without collective"):
        require_runnable(plan, 0, Sending(), ())


def test_a_collective_stands_alone_and_moves_something():
    plan = lower(COLOCATED, collectives={BRIDGE: "bridge"})
    bare = Action(ActionKind.COLLECTIVE, 0, group="bridge")
    with pytest.raises(StepArgumentError, match="without an edge"):
        require_runnable(evolve(plan, positions=((*plan.positions[0], bare), plan.positions[1])), 0, able(BRIDGE), ())
    with pytest.raises(StepArgumentError, match="in a batch"):
        require_runnable(evolve(plan, positions=(((bare, bare),), plan.positions[1])), 0, able(BRIDGE), ())


def test_plan_and_communicator_agree_on_the_edges_that_carry_gradients():
    graph = ModuleGraph({"enc": 1, "llm": 1, "gen": 1}, {"enc": ["llm", "gen"], "llm": ["gen"]})
    trained = lower(multi_module_1f1b(graph, 2))
    frozen = lower(multi_module_1f1b(graph, 2, forward_only=["enc"]))
    every = Sending(forward_edges=())
    one = Sending(forward_edges=(Edge(0, 2),))
    both = Sending(forward_edges=(Edge(0, 1), Edge(0, 2)))
    require_runnable(trained, 0, every, ())
    require_runnable(frozen, 0, both, ())
    require_runnable(lower(multi_module_1f1b(graph, 2, forward_only=graph.order)), 0, every, ())
    with pytest.raises(
        StepArgumentError, match=r"edge 0>2 \('enc' -> 'gen'\) was declared without backward, but the plan"
    ):
        require_runnable(trained, 0, one, ())
    with pytest.raises(
        StepArgumentError, match=r"edge 0>1 \('enc' -> 'llm'\) was declared with backward, but the plan"
    ):
        require_runnable(frozen, 0, one, ())
