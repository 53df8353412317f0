"""Jobs of several modules that survive deaths: who is which actor, and grids that do not fit."""

from __future__ import annotations

import pytest

from pipegrid.bridges import ModuleGraph
from pipegrid.plans.plan import module_places
from pipegrid.schedules import Actor, Plan, schedule_for, stage_places
from pipegrid.survive import Living, PipelineJob, SurviveError
from pipegrid.survive.world import living_traffic, module_positions
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import Direction, Edge

GRAPH = ModuleGraph({"images": 1, "text": 2}, [("images", "text")])


def grid(offset, **dims):
    return HyperCommGrid([*dims.values()], [*dims], rank_offset=offset, world_size=32)


def plan_of(graph=GRAPH, name="1f1b", **options) -> Plan:
    return schedule_for(graph, name, 4, **options)


GRIDS = {"images": grid(0, dp=2, pp=1), "text": grid(2, tp=2, dp=2, pp=2)}


def test_actors_are_positions_of_the_graph():
    living = Living(GRIDS, {*range(10)} - {1, 8}, module_positions(plan_of(), GRIDS))
    assert (living.positions, living.replicas) == (3, 2)
    actors = ("0@0", "0@1", "1@0", "1@0", "1@1", "1@1", "2@0", "2@0", "2@1", "2@1")
    assert tuple(str(living.actor(rank)) for rank in range(10)) == actors
    assert living.dead == (Actor(0, 1), Actor(2, 1))
    assert living.ranks == (0, 2, 3, 4, 5, 6, 7)
    assert living.group("dp", 0, "images") == (0,)
    assert living.group("dp", 2, "text") == (2, 4)
    assert living.group(("tp", "dp"), 6, "text") == (6, 7)


def test_lanes_to_the_dead_of_the_own_replica_are_left_out():
    living = Living(GRIDS, {*range(10)} - {1}, module_positions(plan_of(), GRIDS))
    both = [(edge, direction) for edge in (Edge(0, 1), Edge(1, 2)) for direction in Direction]
    assert living_traffic(plan_of(), living, 2) == both
    assert living_traffic(plan_of(), living, 4) == both[2:]


def test_the_tensor_parallel_peer_of_a_dead_rank_of_a_module_retires():
    job = PipelineJob(GRIDS, plan_of())
    assert job.retire(frozenset({3})) == (2,)
    assert job.retire(frozenset({1})) == ()


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zero_bubble_v", "u_shape"])
def test_places_of_stages_come_from_the_plan(name):
    places = stage_places(name, 2)
    graph = ModuleGraph({"images": 1, "text": len(places)}, [("images", "text")])
    plan = plan_of(graph, name, placement=[0, *(1 + place for place in places)])
    assert module_places(graph, plan.placement, "text") == places
    PipelineJob({"images": grid(0, dp=2), "text": grid(2, dp=2, pp=2)}, plan)


def test_modules_may_share_ranks():
    grids = {"images": grid(0, dp=2, pp=2), "text": grid(0, dp=2, pp=2)}
    graph = ModuleGraph({"images": 2, "text": 2}, [("images", "text")])
    positions = module_positions(plan_of(graph, placement=[0, 1, 0, 1]), grids)
    assert positions == {0: 0, 1: 0, 2: 1, 3: 1}


@pytest.mark.parametrize(
    ("grids", "text"),
    [
        (
            {"images": grid(0, dp=1), "text": grid(1, dp=2, pp=2)},
            "the modules have dp {'images': 1, 'text': 2}; units of",
        ),
        ({"images": grid(0, dp=2), "audio": grid(2, dp=2, pp=2)}, r"modules \['audio', 'images'\]; the plan has"),
        (
            {"images": grid(0, dp=2), "text": grid(2, dp=2, pp=1)},
            "the grids do not fit the plan: module 'text' has 2 sta",
        ),
        ({"images": grid(0, dp=2), "text": grid(0, dp=2, pp=2)}, "the plan has the stages on positions"),
        (
            {"images": grid(0, dp=2, tp=2), "text": grid(0, tp=2, dp=2, pp=1)},
            "rank 1 is in replica 1 of 'images' and in replica 0 of",
        ),
    ],
    ids=["other replicas", "other modules", "fewer places", "shared ranks", "in two replicas"],
)
def test_grids_that_do_not_fit_are_an_error_before_the_first_step(grids, text):
    graph = GRAPH
    placement = None
    if "rank 1" in text:
        graph, placement = ModuleGraph({"images": 1, "text": 1}, [("images", "text")]), [0, 0]
    with pytest.raises(SurviveError, match=text):
        PipelineJob(grids, plan_of(graph, placement=placement))


def test_options_of_bridges_need_bridges():
    with pytest.raises(SurviveError, match=r"options \['edges'\] are those of bridges"):
        PipelineJob(grid(0, dp=2, pp=3), plan_of(), options={"edges": {}})
