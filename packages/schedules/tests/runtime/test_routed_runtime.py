"""A runtime runs plans in which replicas differ: units skip modules, shares are uneven, units move."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules import Actor, PipelineRuntime, Routes, StepArgumentError, lower, multi_module_1f1b, routed
from pipegrid.schedules.generators.registry import SCHEDULES

from ..kit.routed_plans import random_routed
from ..kit.routed_runs import Matrix, Replicas, assert_gradients_of_one_process

IMAGES = ModuleGraph({"images": 2, "text": 2}, {"images": ["text"]})
NAMED = [name for name, known in SCHEDULES.items() if known.trains and not known.sliced]


@pytest.mark.parametrize("name", NAMED)
def test_every_named_schedule_runs_uneven_replicas(name):
    plan = lower(routed(SCHEDULES[name].plan(2, 5), Routes([5, 2, 4])))
    replicas = Replicas(plan)
    replicas.run()
    assert_gradients_of_one_process(replicas)
    assert not replicas.opened


@pytest.mark.parametrize("options", [{}, {"deallocate_outputs": True, "reuse_buffers": True}], ids=["", "freed"])
@pytest.mark.parametrize("placement", [None, [0, 1, 0, 1], [0, 0, 1, 1]], ids=str)
def test_units_without_images_skip_the_encoder(placement, options):
    home = multi_module_1f1b(IMAGES, 4, placement=placement)
    plan = lower(routed(home, Routes([4, 3], skips={"images": [1, 2, 4, 6]})))
    replicas = Replicas(plan, options)
    replicas.run()
    assert_gradients_of_one_process(replicas)
    assert sorted(unit for held in replicas.stages if 0 in held for unit in held[0].seen) == [0, 3, 5]


def test_a_unit_may_skip_a_part_of_what_a_module_feeds():
    graph = ModuleGraph({"a": 1, "b": 1, "c": 1}, {"a": ["b", "c"], "b": ["c"]})
    plan = lower(routed(multi_module_1f1b(graph, 4), Routes([4], skips={"b": [1, 2]})))
    replicas = Replicas(plan)
    replicas.run()
    assert_gradients_of_one_process(replicas)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([{}, {"reuse_buffers": True, "deallocate_outputs": True}]))
def test_random_routes_have_the_gradients_of_one_process(seed, options):
    computes, lowering = random_routed(seed)
    assume(not computes.routes.every and all(len(places) == 1 for places in computes.placement))
    replicas = Replicas(lower(computes, **lowering), options)
    replicas.run()
    assert_gradients_of_one_process(replicas)


@pytest.mark.parametrize("name", NAMED)
def test_every_named_schedule_runs_around_a_dead_actor(name):
    home = SCHEDULES[name].plan(2, 4)
    stages = [stage for stage, places in enumerate(home.placement) if places == (1,)]
    moves = {(4 + m, stage): (0, 2)[m % 2] for m in range(4) for stage in stages}
    plan = lower(routed(home, Routes([4] * 3, moves=moves, dead=[Actor(1, 1)])))
    replicas = Replicas(plan)
    replicas.run()
    assert_gradients_of_one_process(replicas)
    assert {replica for _, _, _, replica in replicas.opened} == {0, 1, 2}


def test_a_step_may_follow_another_and_an_evaluation_runs_the_forwards():
    home = multi_module_1f1b(IMAGES, 4)
    moves = {(4, 2): 0, (5, 1): 0}
    replicas = Replicas(lower(routed(home, Routes([4, 3], skips={"images": [1, 6]}, moves=moves))))
    replicas.run("eval")
    assert all(one.weight.grad is None for held in replicas.stages for one in held.values())
    replicas.run(times=2)
    for stage in range(4):
        twice = replicas.gradient(stage)
        once = Replicas(replicas.plan)
        once.run()
        assert twice.allclose(2 * once.gradient(stage), rtol=1e-12)


def test_the_replica_of_a_rank_must_be_given_and_live():
    home = multi_module_1f1b(IMAGES, 2)
    moves = {(unit, 1): 0 for unit in (2, 3)}
    plan = lower(routed(home, Routes([2, 2], moves=moves, dead=[Actor(1, 1)])))
    stage = {1: Matrix(plan, 1)}
    for replica in (None, 2):
        with pytest.raises(StepArgumentError, match=rf"replica is {replica}, and the plan has routes; .* in 0\.\.1"):
            PipelineRuntime(plan, stage, None, replica=replica)
    with pytest.raises(StepArgumentError, match=r"has stages \[1\], but the plan has .*in replica 1 position 1: \[\]"):
        PipelineRuntime(plan, stage, None, replica=1)
