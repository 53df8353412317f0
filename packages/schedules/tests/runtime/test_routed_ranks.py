"""Plans with routes on ranks: 2 or 3 pipelines of two ranks, one communicator for all routes of a placement."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest
import torch
import torch.distributed as dist

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.generators.registry import SCHEDULES
from pipegrid.schedules import Actor, DisagreementError, PipelineRuntime, Routes, lower, multi_module_1f1b, routed
from pipegrid.transport import Direction, Edge, P2PCommunicator, P2PConfig, P2PUsageError
from plan_kit.routed_plans import random_routes

from ..kit.routed_runs import Matrix, in_one_process

IMAGES = ModuleGraph({"images": 2, "text": 2}, {"images": ["text"]})
PLACES = 2
DEADLINE = 60.0


def communicator(ranks, placement, **settings):
    """That of this rank in its replica's pipeline."""
    rows = [[first, first + 1] for first in range(0, ranks.world_size, PLACES)]
    own = [dist.new_group(row) for row in rows][ranks.rank // PLACES]
    config = P2PConfig(pipeline_dtype=torch.float64, deadline=DEADLINE, open_deadline=DEADLINE, **settings)
    return P2PCommunicator(own, config, placement=placement, replicas=rows)


def reduce(stage, group):
    if stage.weight.grad is None:  # no unit of it was here
        stage.weight.grad = torch.zeros_like(stage.weight)
    dist.all_reduce(stage.weight.grad, group=group)


def step(ranks, plan, made, *, times=1, **options):
    """Runs ``plan`` on this rank, unless it is dead; its lanes are those of ``made``, the gradients one process's."""
    groups = [dist.new_group(list(plan.living([place]))) for place in range(PLACES)]
    stages = {stage: Matrix(plan, stage) for stage in plan.stages_at[ranks.rank]}
    if stages:
        trained = [stage for stage in stages if stage not in plan.forward_only]
        group = groups[ranks.rank % PLACES]
        reducers = {stage: partial(reduce, stages[stage], group) for stage in trained}
        runtime = PipelineRuntime(plan, stages, made, reducers=reducers, **options)
        for _ in range(times):
            for one in stages.values():
                one.weight.grad = None
            runtime.step()
        expected = in_one_process(plan)
        for number in trained:
            whole = expected[number].weight.grad
            whole = torch.zeros_like(stages[number].weight.grad) if whole is None else whole  # all units skip it
            torch.testing.assert_close(stages[number].weight.grad, whole, rtol=1e-12, atol=1e-14)
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def step_alone(ranks, plan, made):
    """Runs a plan without routes, in which no replica knows of the others."""
    stages = {stage: Matrix(plan, stage) for stage in plan.stages_at[ranks.rank % PLACES]}
    PipelineRuntime(plan, stages, made).step()
    assert all(len(one.seen) == plan.num_microbatches for one in stages.values())


def schedules(name):
    """A schedule of one replica over two positions, and the placement of its communicator."""
    home = multi_module_1f1b(IMAGES, 4, placement=[0, 0, 1, 1]) if name == "images" else SCHEDULES[name].plan(PLACES, 4)
    places = [place for (place,) in home.placement]
    return home, None if places == [stage % PLACES for stage in range(len(places))] else places


NAMES = ("1f1b", "zero_bubble_v", "interleaved_1f1b", "images")
SETTINGS = ({}, {"strict": True}, {"communicators": "shared"}, {"shapes": "header"})
IN_EVERY_RUN = tuple(zip(NAMES, SETTINGS, strict=True))


def each_once(count):
    """Every schedule with all settings: one of each in every run."""
    for pair in itertools.product(NAMES, SETTINGS):
        often = (count == 4 and pair in IN_EVERY_RUN) or (count == 6 and pair == IN_EVERY_RUN[-1])
        marks = [pytest.mark.ranks(count), *([] if often else [pytest.mark.nightly])]
        yield pytest.param(*pair, marks=marks, id=f"{pair[0]} {pair[1]} {count}")


@pytest.mark.parametrize(("name", "settings"), [*each_once(4), *each_once(6)])
def test_one_communicator_runs_all_routes(ranks, name, settings):
    home, placement = schedules(name)
    replicas = ranks.world_size // PLACES
    with communicator(ranks, placement, **settings) as made:
        chance, number = random.Random(f"{name}{replicas}"), 0
        while number < 4:
            routes = random_routes(home, chance, replicas=replicas)
            if routes.num_replicas == replicas and not routes.is_identity:
                options = {"reuse_buffers": True, "deallocate_outputs": True} if number % 2 else {}
                step(ranks, lower(routed(home, routes)), made, times=2, **options)
                number += 1


@pytest.mark.ranks(4)
def test_buffers_of_a_call_are_reused_once_its_last_unit_is_done(ranks):
    """Each call of the encoder serves three units, on both replicas; further calls come into the same buffers."""
    home = multi_module_1f1b(ModuleGraph({"images": 1, "text": 1}, {"images": ["text"]}), 9)
    moves = {(unit, 1): 1 - unit // 9 for unit in range(1, 18, 3)}
    plan = lower(routed(home, Routes([9, 9], every={"images": 3}, moves=moves)))
    with communicator(ranks, None) as made:
        step(ranks, plan, made, times=3, reuse_buffers=True, deallocate_outputs=True)
        if ranks.rank % PLACES:
            used = [lane for lane in made.lanes.values() if lane.stats.messages]
            received = [lane for lane in used if lane.spec.destination == ranks.rank]
            assert len(received) == 2  # of both replicas
            for lane in received:
                assert lane.stats.messages == 9
                assert lane.stats.allocations < 9
                assert lane.stats.live == 0


@pytest.mark.thorough
@pytest.mark.ranks(6)
@pytest.mark.parametrize("strict", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_every_named_schedule_runs_around_a_dead_rank(ranks, strict):
    for name, known in SCHEDULES.items():
        if not known.trains or known.sliced:
            continue
        home, placement = schedules(name)
        with communicator(ranks, placement, strict=strict) as made:
            stages = [stage for stage, places in enumerate(home.placement) if places == (1,)]
            moves = {(4 + m, stage): (0, 2)[m % 2] for m in range(4) for stage in stages}
            step(ranks, lower(routed(home, Routes([4] * 3, moves=moves, dead=[Actor(1, 1)]))), made)


@pytest.mark.ranks(4)
def test_lanes_to_other_replicas_are_those_of_the_units_that_move(ranks):
    home, _ = schedules("1f1b")
    with communicator(ranks, None) as made:
        before = set(made.lanes)
        step_alone(ranks, lower(home), made)
        step(ranks, lower(routed(home, Routes([4, 2]))), made)
        assert set(made.lanes) == before
        plan = lower(routed(home, Routes([4, 4], moves={(5, 1): 0})))
        for _ in range(2):
            step(ranks, plan, made)
            opened = {str(lane) for lane in made.lanes.keys() - before}
            assert opened == ({"2>1[forward]", "1>2[backward]"} if ranks.rank in (1, 2) else set())
        step_alone(ranks, lower(home), made)


@pytest.mark.ranks(4)
def test_neighbours_in_other_replicas_must_run_the_same_plan(ranks):
    home, _ = schedules("1f1b")
    plans = [lower(routed(home, Routes([4, 4], moves={(unit, 1): 0}))) for unit in (5, 6)]
    with communicator(ranks, None) as made:
        for plan in plans:
            step(ranks, plan, made)
        ranks.barrier()
        plan = plans[ranks.rank // PLACES]  # every pipeline agrees in itself
        stages = {stage: Matrix(plan, stage) for stage in plan.stages_at[ranks.rank]}
        runtime = PipelineRuntime(plan, stages, made, reducers=dict.fromkeys(stages, lambda: None))
        if ranks.rank in (1, 2):
            with pytest.raises(DisagreementError) as found:
                runtime.step()
            assert {one.digest for one in plans} == {*plan_words(found.value)}
        else:
            # Whose neighbour, with which it agrees, ends: in this step or before the next. It may have told the cause.
            with pytest.raises((RuntimeError, DisagreementError)):
                for _ in range(2):
                    runtime.step()


def plan_words(error):
    """The digests that an error names."""
    return [part.split(")")[0] for part in str(error).split("(plan ")[1:]]


@pytest.mark.ranks(4)
def test_a_communicator_of_one_replica_says_so_before_the_first_message(ranks):
    home, _ = schedules("1f1b")
    plan = lower(routed(home, Routes([4, 4], moves={(5, 1): 0})))
    rows = [[0, 1], [2, 3]]
    own = [dist.new_group(row) for row in rows][ranks.rank // PLACES]
    stages = {ranks.rank % PLACES: Matrix(plan, ranks.rank % PLACES)}
    options = {"reducers": dict.fromkeys(stages, lambda: None), "replica": ranks.rank // PLACES}
    with P2PCommunicator(own, P2PConfig(pipeline_dtype=torch.float64)) as made:
        if ranks.rank in (1, 2):
            with pytest.raises(P2PUsageError, match=r"a unit moves to another replica, .*replicas=\[\[ranks of"):
                PipelineRuntime(plan, stages, made, **options)
        else:
            PipelineRuntime(plan, stages, made, **options)  # no unit of it moves
        assert not any(lane.stats.messages for lane in made.lanes.values())
        assert made.lane(Edge(0, 1), Direction.FORWARD).stats.messages == 0


@pytest.mark.ranks(4)
def test_the_replica_is_the_communicators(ranks):
    home, _ = schedules("1f1b")
    plan = lower(routed(home, Routes([4, 3])))
    stages = {ranks.rank % PLACES: Matrix(plan, ranks.rank % PLACES)}
    with communicator(ranks, None) as made:
        runtime = PipelineRuntime(plan, stages, made, reducers=dict.fromkeys(stages, lambda: None))
        assert runtime.position == ranks.rank
        assert f"actor {ranks.rank % PLACES}@{ranks.rank // PLACES}, before its first action" in runtime.where
        with pytest.raises(ValueError, match=r"replica is \d, and the communicator is one of replica \d; leave it out"):
            PipelineRuntime(plan, stages, made, replica=1 - ranks.rank // PLACES)
