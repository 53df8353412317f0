"""Microbatches by home replica: their data, their divisors, and the routes that ranks agree on."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipegrid.core.graph import ModuleGraph
from pipegrid.gradients.reduction import gradient_policy
from pipegrid.monitor.collectives import Waiting, texts_of_ranks
from pipegrid.schedules import (
    Actor,
    DisagreementError,
    GradientError,
    PipelineConfig,
    PlanError,
    Routes,
    StepArgumentError,
    UnitBatches,
    agree_on_routes,
    chain,
)
from pipegrid.schedules.megatron.units.routes import (
    StageUnits,
    merged,
    planned_routes,
    replica_of,
    require_equal_routes,
    units_per_replica,
)
from pipegrid.transport.job import JobTopology
from plan_kit.groups import Group, Groups

from ..kit.models import Part, call, forward_step, in_one_process, microbatch
from ..kit.of_job import OfJob


@frozen
class Place(Group):
    """A group seen by the rank at ``place``."""

    place: int = 0

    def rank(self):
        return self.place


# Data


def test_the_iterator_has_the_batches_of_what_the_stage_computes_now():
    asked = []
    batches = UnitBatches(lambda replica, number: asked.append((replica, number)) or f"{number}@{replica}")
    batches.begin([(1, 0)])
    assert (next(batches), list(batches)) == ("0@1", [])
    batches.begin([(0, 2), (0, 3)])
    assert batches.units == ((0, 2), (0, 3))
    assert list(batches) == ["2@0", "3@0"]
    batches.begin([(0, 4), (0, 5)])
    next(batches)
    batches.begin([(0, 6)])
    assert next(batches) == "6@0", "what was not read is not read later"
    assert asked == [(1, 0), (0, 2), (0, 3), (0, 4), (0, 6)]


def test_data_that_is_no_function_is_an_error():
    with pytest.raises(StepArgumentError, match="a function of a replica and a microbatch"):
        UnitBatches([1, 2])


def test_without_routes_the_batches_are_those_of_this_replica():
    model, expected = Part(0, PipelineConfig()), Part(0)
    batches = UnitBatches(lambda replica, number: (replica, number))

    def step(iterator, model):
        replica, number = next(iterator)
        assert next(iterator, None) is None
        return forward_step(iter([number]), model, data=lambda index: microbatch(index, replica))

    infos = call(model=model, count=3, data_iterator=batches, forward_step_func=step)
    assert infos == in_one_process([expected], [microbatch(index) for index in range(3)], 3)
    torch.testing.assert_close(model.layers[0].weight.grad, expected.layers[0].weight.grad, rtol=1e-12, atol=0)


def test_a_later_step_of_the_same_model_may_have_data_by_unit():
    """And one with a plain iterator after it."""
    model, read = Part(0, PipelineConfig()), []
    model.current_replica = model.current_microbatch = None

    def step(iterator, model):
        read.append((getattr(iterator, "units", None), next(iterator), model.current_replica, model.current_microbatch))
        return forward_step(iter([0]), model)

    plain, by_unit = [iter("ab") for _ in range(2)], UnitBatches(lambda replica, number: f"{number}@{replica}")
    for iterator in (plain[0], by_unit, [by_unit], plain[1]):
        call(model=model, count=2, data_iterator=iterator, forward_step_func=step)
    told = [(((0, 0),), "0@0", None, 0), (((0, 1),), "1@0", None, 1)]
    assert read[:2] == read[6:] == [(None, "a", None, 0), (None, "b", None, 1)]
    assert read[2:6] == told * 2


# Numbers


def brute(units, skips, every):
    """The calls of a module with the units of each, counted by hand: {number of the first: [(replica, microbatch)]}."""
    calls, first = {}, 0
    for replica, count in enumerate(units):
        for start in range(0, count, every):
            served = [m for m in range(start, min(start + every, count)) if first + m not in skips]
            if served:
                calls[first + start] = [(replica, m) for m in served]
        first += count
    return calls


def random_routes(data, *, name="vision"):
    units = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any))
    skips = data.draw(st.sets(st.integers(0, sum(units) - 1)))
    every = data.draw(st.integers(1, 3))
    return Routes(units, skips={name: skips}, every={name: every}), brute(units, skips, every)


@given(data=st.data())
def test_each_unit_is_read_once_in_the_plan_of_all(data):
    routes, expected = random_routes(data)
    assert list(expected) == list(routes.calls("vision"))
    for replica in range(routes.num_replicas):
        own = [number for number in expected if routes.home(number) == replica]
        here = StageUnits("vision", replica, routes, own)
        assert here.in_order_at_home
        assert StageUnits("vision", replica, routes, own[1:]).in_order_at_home == (not own)
        for number in own:
            assert here.units(number) == expected[number]
            assert here.served(number) == len(expected[number])
            assert here.microbatch(number) == number - routes.units_of(replica).start


@given(data=st.data())
def test_each_unit_is_read_once_in_the_plans_of_replicas_alone(data):
    routes, expected = random_routes(data)
    for replica, count in enumerate(routes.units):
        planned = planned_routes(routes, replica)
        assert planned is not routes or not count
        if not count:
            continue
        calls = range(count) if planned is None else planned.calls("vision")
        here = StageUnits("vision", replica, planned, calls)
        assert here.in_order_at_home
        first = routes.units_of(replica).start
        found = {first + number: here.units(number) for number in calls}
        assert found == {number: units for number, units in expected.items() if routes.home(number) == replica}


def test_the_plan_is_of_all_where_units_move_or_ties_are_reduced_in_one_order():
    routes = Routes([3, 2], skips={"vision": [1]})
    assert planned_routes(routes, 1, num_ties=1) is None
    assert planned_routes(routes, 1, num_ties=2) is routes
    moved = Routes([3, 2], moves={(0, 0): 1})
    assert planned_routes(moved, 0) is moved


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
def test_all_losses_weigh_the_same(units):
    """Losses are divided by the units per replica, and in the reduction by the number of replicas."""
    assert units_per_replica(Routes(units)) * len(units) == pytest.approx(sum(units))


def test_routes_of_one_replica_are_those_of_each():
    here = StageUnits("vision", 2, Routes([4], skips={"vision": [1]}), [0, 2, 3])
    assert here.units(2) == [(2, 2)]
    assert here.in_order_at_home


# The replica of a rank


def step(groups, routes, number=2, job=None):
    """What `replica_of` reads of the arguments of a call."""
    communicator = job and OfJob(job)
    return SimpleNamespace(pg_collection=groups, routes=routes, num_microbatches=number, p2p_communicator=communicator)


@pytest.mark.parametrize(
    ("groups", "routes", "expected"),
    [
        (Groups(dp=Place(3, 2)), None, 2),
        (Groups(dp_cp=Place(3, 1)), None, 1),
        (Groups(dp=Place(2, 1), cp=Place(2, 0), dp_cp=Place(4, 3)), None, 1),
        (Groups(), None, 0),
        (None, None, 0),
        (Groups(dp=Place(3, 1)), Routes([3, 2, 3]), 1),
        (Groups(dp=Place(4, 3)), Routes([2], skips={"model": [0]}), 3),
        (Groups(dp=Place(2, 1)), Routes([2, 2, 2], dead=[Actor(0, 1)]), 2),
        (Groups(dp=Place(2, 1)), Routes([2, 2, 2], dead=[Actor(0, 2)]), 1),
        (Groups(), Routes([2, 2], dead=[Actor(0, 0)]), 1),
        (None, Routes([2, 2], dead=[Actor(0, 0)]), 1),
    ],
)
def test_the_replica_is_the_place_among_the_living(groups, routes, expected):
    assert replica_of(step(groups, routes), SimpleNamespace(modules=("model",))) == expected


@pytest.mark.parametrize(
    ("groups", "routes", "message"),
    [
        (Groups(dp=Place(2, 1)), Routes([2, 3, 3]), "2 ranks in its dp group, and the routes have 3 living"),
        (Groups(dp=Place(3, 1)), Routes([2, 3, 3], dead=[Actor(0, 0)]), "3 ranks .* have 2 living"),
        (Groups(), Routes([2, 3]), "1 ranks in its dp group"),
        (None, Routes([2, 3]), "pass a pg_collection with their dp group"),
        (
            {"model": Groups(dp=Place(2, 1)), "vision": Groups(dp=Place(2, 0))},
            Routes([2, 3]),
            "replicas {'model': 1, 'vision': 0}",
        ),
    ],
)
def test_groups_that_are_not_those_of_the_routes_are_an_error(groups, routes, message):
    modules = ("model", "vision") if isinstance(groups, dict) else ("model",)
    with pytest.raises(StepArgumentError, match=message):
        replica_of(step(groups, routes), SimpleNamespace(modules=modules))


def test_where_replicas_differ_each_module_has_as_many():
    graph = ModuleGraph({"vision": 1, "language": 2}, {"vision": ["language"]})
    place = SimpleNamespace(modules=("language",), stages=(1,))
    for sizes, found in (({"dp": 4, "pp": 1}, 4), ({"pp": 1}, 1)):
        job = JobTopology(dims={"language": {"dp": 2, "pp": 2}, "vision": sizes}, graph=graph, stages=(1,))
        alike = Routes([2], skips={"vision": [1]})
        assert replica_of(step(Groups(dp=Place(2, 1)), alike, job=job), place) == 1
        with pytest.raises(StepArgumentError, match=f"'vision' has dp {found}, and the routes are of 2 replicas"):
            replica_of(step(Groups(dp=Place(2, 1)), Routes([2, 2]), job=job), place)


@pytest.mark.parametrize("stages", [(0,), (1, 2), (0, 3)])
def test_the_living_are_those_of_the_position_of_this_rank(stages):
    """Position 1 of replica 0 is dead, in each way to say where stages are."""
    graph = ModuleGraph({"a": 1, "b": 3}, {"a": ["b"]})
    placements = {(0,): None, (1, 2): ((0,), (1,), (1,), (2,)), (0, 3): ((0,), (1,), (1,), (0,))}
    job = JobTopology(graph=graph, stages=stages, placement=placements[stages])
    routes = Routes([2, 2], moves={(0, 1): 1, (1, 1): 1}, dead=[Actor(1, 0)])
    dead = stages == (1, 2)
    groups = Groups() if dead else Groups(dp=Place(2, 1))
    place = SimpleNamespace(modules=("b",), stages=stages)
    assert replica_of(step(groups, routes, job=job), place) == 1
    chain_job = JobTopology(total_stages=3, current_stage=int(dead))
    assert replica_of(step(groups, routes, job=chain_job), place) == 1


def test_the_number_of_microbatches_is_that_of_this_replica():
    place = SimpleNamespace(modules=("model",))
    assert replica_of(step(Groups(dp=Place(2, 1)), Routes([2, 3]), 3), place) == 1
    with pytest.raises(StepArgumentError, match="num_microbatches is 2, and by the routes replica 1 has 3"):
        replica_of(step(Groups(dp=Place(2, 1)), Routes([2, 3]), 2), place)


# Divisors


@pytest.mark.parametrize("dims", [None, {"model": {"dp": 4, "cp": 2, "pp": 1}}])
def test_gradients_are_divided_by_the_replicas_of_the_data_and_summed_over_the_living(dims):
    communicator = OfJob(total_stages=1, dims=dims)

    def policy(dp, replicas, model=None):
        return gradient_policy(
            models={0: model or nn.Linear(2, 2)},
            config=PipelineConfig(),
            communicator=communicator,
            graph=chain(1),
            pg_collection=Groups(dp=Group(dp), cp=Group(2), dp_cp=Group(2 * dp)),
            replicas=replicas,
        )

    assert policy(3, (4, 3)).loss_lanes == 8
    assert policy(4, (4, 4)).loss_lanes == 8
    if dims is not None:
        with pytest.raises(GradientError, match="has 6 replicas"):
            policy(4, (4, 3))
    wrapped = nn.Linear(2, 2)
    wrapped.no_sync = lambda: None
    with pytest.raises(GradientError, match="wrapper that reduces by itself"):
        policy(3, (4, 3), wrapped)


# The agreement


def said(replica, number, skips=None, every=()):
    return json.dumps([replica, number, skips, sorted(dict(every).items())])


@given(data=st.data())
def test_what_ranks_know_of_their_replicas_makes_the_routes(data):
    units = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
    skips = [
        {name: sorted(data.draw(st.sets(st.integers(0, count - 1)) if count else st.just(set()))) for name in "ab"}
        for count in units
    ]
    texts = []
    for replica, count in enumerate(units):
        knowing = data.draw(st.integers(1, 2))
        known = {name: numbers for name, numbers in skips[replica].items() if numbers}
        texts += [said(replica, count, known)] * knowing + [said(replica, None)] * data.draw(st.integers(0, 2))
    order = data.draw(st.permutations(range(len(texts))))
    found = merged({rank: texts[place] for rank, place in enumerate(order)})
    first = [sum(units[:replica]) for replica in range(len(units))]
    assert found.units == tuple(units)
    assert dict(found.skips) == {
        name: tuple(first[r] + m for r in range(len(units)) for m in skips[r][name])
        for name in "ab"
        if any(each[name] for each in skips)
    }


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ([said(0, 3), said(0, 4)], DisagreementError, "rank 0: num_microbatches of replica 0 3; rank 1: .* 4"),
        ([said(0, 3, {"a": [1]}), said(0, 3, {})], DisagreementError, "skips of replica 0"),
        ([said(0, 3), said(1, 3, every={"a": 2})], DisagreementError, "every"),
        ([said(0, 3), said(1, None)], StepArgumentError, "no rank knows num_microbatches of replica 1"),
        ([said(0, 3), said(2, 3)], StepArgumentError, "no rank knows num_microbatches of replica 1"),
        ([said(0, 3, {"a": [3]})], StepArgumentError, r"microbatches \[3\] of replica 0 skip 'a'; it has .* 0..2"),
        ([said(0, 2.5)], StepArgumentError, "num_microbatches of replica 0 is 2.5"),
        ([said(0, 0)], PlanError, "give at least one"),
    ],
)
def test_what_does_not_fit_together_is_an_error(texts, error, message):
    with pytest.raises(error, match=message):
        merged(dict(enumerate(texts)))


def test_one_process_agrees_with_itself():
    assert agree_on_routes(3, {"a": iter([2, 0])}, replica=0) == Routes([3], skips={"a": [0, 2]})
    assert agree_on_routes(3, replica=0).is_identity


@pytest.mark.ranks(4)
def test_ranks_agree_on_routes_and_find_others(ranks):
    """Two replicas of two positions, of which the first reads data."""
    replica, reads = divmod(ranks.rank, 2)[0], ranks.rank % 2 == 0
    number, skips = (5 - replica, {"vision": [1, 3 - replica]}) if reads else (None, None)
    routes = agree_on_routes(number, skips, replica=replica, every={"vision": 1}, deadline=30.0)
    assert routes == Routes([5, 4], skips={"vision": [1, 3, 6, 7]})
    assert len(set(texts_of_ranks(routes.digest, dist.group.WORLD, ranks.device, Waiting(30.0)).values())) == 1
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    collection = Groups(dp=groups[ranks.rank % 2])
    place, held = SimpleNamespace(module_of=lambda stage: "model"), {0: nn.Linear(1, 1).to(ranks.device)}
    require_equal_routes(collection, place, held, routes, Waiting(30.0))
    other = Routes([5, 4]) if replica else routes
    with pytest.raises(DisagreementError, match=f"replicas of module 'model' have other routes: .*{other.digest}"):
        require_equal_routes(collection, place, held, other, Waiting(30.0))
    with pytest.raises(DisagreementError, match="num_microbatches of replica 0 0; rank 1"):
        agree_on_routes(ranks.rank, replica=replica, deadline=30.0)
