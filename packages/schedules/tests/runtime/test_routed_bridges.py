"""Units move between replicas of two modules over bridges: with queues for lanes, against all units in one process."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipegrid.core.graph import ModuleGraph
from pipegrid.schedules import Actor, Routes, lower, reroute, routed, schedule_for
from pipegrid.transport import P2PConfig
from plan_kit.routed_plans import random_routes

from ..kit.routed_bridges import BridgedReplicas
from ..kit.routed_runs import assert_gradients_of_one_process

GRAPHS = {
    "chain": ModuleGraph({"images": 1, "text": 2}, [("images", "text")]),
    "deeper": ModuleGraph({"images": 2, "text": 1}, [("images", "text")]),
    "two encoders": ModuleGraph({"a": 1, "b": 1, "text": 2}, [("a", "text"), ("b", "text")]),
    "a diamond": ModuleGraph({"a": 1, "b": 1, "c": 1}, [("a", "b"), ("a", "c"), ("b", "c")]),
}
CONFIGS = {"agreed": P2PConfig(), "variable": P2PConfig(variable_seq_lengths=True)}


def run(home, routes, config=CONFIGS["agreed"], **options):
    replicas = BridgedReplicas(lower(routed(home, routes)), options, config=config)
    replicas.run()
    assert_gradients_of_one_process(replicas)
    return replicas


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("dead", range(3))
def test_a_step_around_a_dead_rank_has_the_gradients_of_one_process(graph, dead):
    home = schedule_for(graph, "1f1b", 3)
    skips = {graph.order[-2]: [1, 4]}
    routes = reroute(Routes([3, 2, 3], skips=skips), [Actor(dead, 1)], plan=home)
    replicas = run(home, routes, CONFIGS["agreed" if dead else "variable"])
    assert any(replicas.across.values())
    assert (dead, 1) not in replicas.touched()


def test_units_at_home_open_no_way_to_another_replica():
    home = schedule_for(GRAPHS["chain"], "1f1b", 3)
    assert not any(run(home, Routes([3, 1], skips={"images": [0]})).across.values())


@settings(max_examples=12, deadline=None)
@example(2865, "chain", "agreed", False)  # a message is looked at before the first one of its lane
@given(st.integers(0, 10**6), st.sampled_from([*GRAPHS]), st.sampled_from([*CONFIGS]), st.booleans())
def test_random_routes_over_bridges_have_the_gradients_of_one_process(seed, graph, config, frees):
    """Uneven shares, moves, deaths, skipped modules, and calls that serve several units."""
    home = schedule_for(GRAPHS[graph], "1f1b", 1 + seed % 4)
    routes = random_routes(home, random.Random(seed))
    if not routes.is_identity:
        run(home, routes, CONFIGS[config], deallocate_outputs=frees, reuse_buffers=frees)


@pytest.mark.parametrize("name", ["zero_bubble_h1"])
def test_other_schedules_run_around_a_death_in_each_module(name):
    home = schedule_for(GRAPHS["chain"], name, 4)
    run(home, reroute(Routes([4, 4], skips={"images": [3, 4]}), [Actor(0, 0), Actor(2, 1)], plan=home))
