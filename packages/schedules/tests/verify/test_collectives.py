"""Collectives of a plan: who may run them, and that every position comes to them in turn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from attrs import evolve

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError
from pipegrid.schedules.errors import StepArgumentError
from pipegrid.plans.generators import multi_module_1f1b
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan import Action, ActionKind, from_text
from pipegrid.schedules.runtime.preflight import require_runnable
from pipegrid.plans.simulate import simulate
from pipegrid.plans.verify import default_creation, verify
from pipegrid.transport.adapted import as_communicator
from pipegrid.core.edge import Edge

GRAPH = ModuleGraph({"enc": 1, "llm": 2}, {"enc": ["llm"]})
COLOCATED = multi_module_1f1b(GRAPH, 4, placement=[(0, 1), 0, 1])
BRIDGE = Edge(0, 1)


# Each position's computes in an order as if they needed no other rank: the gather of 0B0's gradient before 0F2 on
# position 0, after it on position 1, though both positions do 0F2 together.
APART = """
microbatches 4
modules enc:1 llm:2
edges enc>llm
placement 0,1 0 1
group bridge 0,1 edges 0>1
0: 0F0 0COLLECTIVE0>1@bridge 1F0 1SEND_F0>2 0F1 0COLLECTIVE1>1@bridge 1F1 [1SEND_F1>2 1RECV_B0<2] 1B0 \
1COLLECTIVE0>0@bridge 0F2 0COLLECTIVE2>1@bridge 0B0 1F2 [1RECV_B1<2 1SEND_F2>2] 1B1 1COLLECTIVE1>0@bridge 0F3 \
0COLLECTIVE3>1@bridge 0B1 1F3 [1RECV_B2<2 1SEND_F3>2] 1B2 1COLLECTIVE2>0@bridge 0B2 1RECV_B3<2 1B3 \
1COLLECTIVE3>0@bridge 0B3
1: 0F0 0COLLECTIVE0>1@bridge 0F1 2RECV_F0<1 0COLLECTIVE1>1@bridge 2F0 2B0 [2RECV_F1<1 2SEND_B0>1] 0F2 2F1 \
1COLLECTIVE0>0@bridge 0COLLECTIVE2>1@bridge 0B0 2B1 [2SEND_B1>1 2RECV_F2<1] 0F3 2F2 1COLLECTIVE1>0@bridge \
0COLLECTIVE3>1@bridge 0B1 2B2 [2SEND_B2>1 2RECV_F3<1] 2F3 1COLLECTIVE2>0@bridge 0B2 2B3 2SEND_B3>1 \
1COLLECTIVE3>0@bridge 0B3
""".replace("\\\n", "")


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


MESSAGES = {"isend": print, "irecv": print, "batch": print}


def able(*edges):
    return as_communicator(SimpleNamespace(collective=print, collective_edges=edges, **MESSAGES))


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
    with pytest.raises(StepArgumentError, match=r"has 0COLLECTIVE0>1@bridge.*namespace\(.*without collective"):
        require_runnable(plan, 0, as_communicator(SimpleNamespace(**MESSAGES)), ())


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
    every = as_communicator(SimpleNamespace(forward_edges=(), **MESSAGES))
    one = as_communicator(SimpleNamespace(forward_edges=(Edge(0, 2),), **MESSAGES))
    both = as_communicator(SimpleNamespace(forward_edges=(Edge(0, 1), Edge(0, 2)), **MESSAGES))
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
