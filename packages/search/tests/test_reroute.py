"""`reroute` and the step of given routes: even work, right orders under the limits, and a bound that nothing beats."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import (
    Costs,
    PlanError,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    one_f_one_b,
    simulate,
    verify,
    zero_bubble_v,
)
from pipegrid.plans.plan import ActionKind, Actor, Routes
from pipegrid.search.list_scheduler import Policy, list_schedule
from pipegrid.search.routed import reroute, routed_bound, routed_problem, schedule_routes
from plan_kit.every_route import least_slots
from plan_kit.plans import examples
from plan_kit.player import play

nightly = pytest.mark.nightly
RECYCLE = {0: [0], 1: [0, 1], 2: [2], 3: [3]}


# Routes


def random_dead(rng, positions, replicas, most=3):
    while True:
        dead = {(rng.randrange(positions), rng.randrange(replicas)) for _ in range(rng.randint(0, most))}
        if all(any((p, r) not in dead for r in range(replicas)) for p in range(positions)):
            return [Actor(*one) for one in dead]


def loads(routes, position):
    """Units that each living replica computes of the stage on ``position``."""
    found = dict.fromkeys(routes.living(position), 0)
    for unit in range(routes.num_units):
        found[routes.of(unit, position)] += 1
    return found


@given(st.data())
def test_orphans_go_to_peers_evenly_and_all_others_stay(data):
    units = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    rng = random.Random(data.draw(st.integers(0, 999)))
    positions = data.draw(st.integers(1, 4))
    dead = random_dead(rng, positions, len(units))
    routes = reroute(Routes(units), dead)
    assert routes.dead == tuple(sorted(set(dead)))
    for position in range(positions):
        found = loads(routes, position)
        home = {unit for unit in range(sum(units)) if Actor(position, routes.home(unit)) not in dead}
        assert all(routes.of(unit, position) == routes.home(unit) for unit in home)
        even = -(-sum(units) // len(found))
        assert max(found.values()) == max(even, *(units[replica] for replica in found))
    assert reroute(routes, ()) == routes


@given(st.data())
def test_a_second_death_is_as_even_as_both_at_once(data):
    rng = random.Random(data.draw(st.integers(0, 999)))
    replicas, count = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 6))
    dead = random_dead(rng, 2, replicas)
    first = dead[: rng.randint(0, len(dead))]
    both = reroute(reroute(Routes.identity(replicas, count), first), dead)
    at_once = reroute(Routes.identity(replicas, count), dead)
    for position in range(2):
        assert max(loads(both, position).values()) == max(loads(at_once, position).values())


@given(st.data())
def test_no_sharing_among_peers_is_done_earlier_at_their_speeds(data):
    replicas, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    paces = data.draw(st.lists(st.sampled_from((0.5, 0.75, 1.0, 2.0)), min_size=replicas, max_size=replicas))
    dead = [Actor(0, 0)] if replicas > 1 and data.draw(st.booleans()) else []
    routes = reroute(Routes.identity(replicas, count), dead, {Actor(0, r): pace for r, pace in enumerate(paces)})
    shares = itertools.product(range(replicas * count + 1), repeat=replicas)
    best = min(
        max(share / pace for share, pace in zip(shared, paces, strict=True))
        for shared in shares
        if sum(shared) == replicas * count and not (dead and shared[0])
    )
    assert max(load / paces[replica] for replica, load in loads(routes, 0).items()) == best


def test_without_speeds_units_stay_at_home_however_uneven():
    assert reroute(Routes((9, 1))) == Routes((9, 1))
    assert [move.replica for move in reroute(Routes((9, 1, 2)), [Actor(0, 1)]).moves] == [2]


def test_stages_of_a_dead_position_move_together():
    plan = zero_bubble_v(2, 4)
    routes = reroute(Routes.identity(3, 4), {1: [2]}, plan=plan)
    assert {move.stage for move in routes.moves} == {1, 2}
    for unit in routes.units_of(2):
        assert routes.of(unit, 1) == routes.of(unit, 2) != 2
        assert routes.of(unit, 0) == 2


def test_units_that_skip_the_dead_module_have_nothing_to_move():
    graph = ModuleGraph({"image": 1, "text": 2}, {"image": ["text"]})
    plan = multi_module_1f1b(graph, 4)
    routes = reroute(Routes((4, 4), skips={"image": [0, 2, 5]}), {0: [0]}, plan=plan)
    assert [move.unit for move in routes.moves] == [1, 3]
    with pytest.raises(PlanError, match="give plan="):
        reroute(Routes((4, 4), skips={"image": [0]}), {0: [0]})


def test_a_stage_without_a_living_replica_has_no_routes():
    for dead in (3, [3], {0: 1}, "0@1"):
        with pytest.raises(PlanError, match="dead is .*; it must be actors, or a dict from a position to its dead"):
            reroute(Routes.identity(2, 4), dead)
    assert reroute(Routes.identity(2, 4), {0: []}) == Routes.identity(2, 4)
    for speeds in ("fast", {0: 2.0}):
        with pytest.raises(PlanError, match="speeds are .*; they must be a dict from actors to their speeds"):
            reroute(Routes.identity(2, 4), speeds=speeds)
    with pytest.raises(PlanError, match="no replica of position 1 is alive.*stage 1"):
        reroute(Routes.identity(2, 2), {1: [0, 1]})


# Steps


def random_shape(rng):
    """A plan, routes (any, of two kinds) and costs, limits and speeds."""
    p, m, d = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 3)
    plan = rng.choice([one_f_one_b(p, m), interleaved_1f1b(p, p * m, num_chunks=2), zero_bubble_v(p, m)])
    stages, m = plan.num_stages, plan.num_microbatches
    dead = random_dead(rng, p, d)
    routes = reroute(Routes.identity(d, m), dead, plan=plan)
    if rng.random() < 0.5:  # to any living replica
        units = range(routes.num_units)
        to = {(u, s): rng.choice(routes.living(plan.placement[s][0])) for u in units for s in range(stages)}
        routes = Routes(routes.units, moves=to, dead=dead)
    times = {kind: [rng.choice((0.25, 0.5, 1, 2)) for _ in range(stages)] for kind in "FIW"}
    release = rng.choice((0, 0.4, 1))
    costs = rng.choice(
        [Costs(), Costs(**times, latency=rng.choice((0, 0.25)), message=1, bandwidth=4, input_release=release)]
    )
    limits = rng.choice([None, 1 if costs.activation is None else 2, 2, [rng.choice((1, 1.5, 2, 4)) for _ in range(p)]])
    actors = [Actor(place, replica) for place in range(p) for replica in range(d)]
    share = rng.choice((0, 0, 0.4))
    speeds = {actor: rng.choice((0.5, 1, 2)) for actor in actors if rng.random() < share}
    return plan, routes, costs, limits, speeds, rng.random() < 0.2


def assert_orders_are_right(problem, found):
    """Played by the plain player: each compute once, on its actor, with its inputs, at the dates and peaks told."""
    routes, stages = problem.routes, problem.graph.num_stages
    actors = list(found.orders)
    whole = problem.whole
    back = ActionKind.B if whole else ActionKind.I

    def actor(stage, unit):
        return Actor(problem.position[stage], routes.of(unit, stage))

    def needs(step):
        kind, stage, unit = step
        before = {
            ActionKind.F: [(ActionKind.F, stage - 1, unit)] if stage else [],
            back: [(ActionKind.F, stage, unit), *([(back, stage + 1, unit)] if stage + 1 < stages else [])],
            ActionKind.W: [(back, stage, unit)],
        }[kind]
        hop = next((time for _, _, time in problem.messages), 0)
        return [(key, hop if actor(key[1], unit) != actor(stage, unit) else 0) for key in before]

    def length(step):
        kind, stage, unit = step
        number = {ActionKind.F: 0, back: 1, ActionKind.W: 2}[kind]
        return problem.durations[stage][number] / problem.speed(actor(stage, unit))

    kinds = (ActionKind.F, back) if whole else (ActionKind.F, back, ActionKind.W)
    wanted = {(kind, s, u) for kind in kinds for s in range(stages) for u in range(routes.num_units)}
    steps = [step for order in found.orders.values() for step in order]
    assert len(steps) == len(wanted)
    assert set(steps) == wanted
    assert all(actor(stage, unit) == where for where, order in found.orders.items() for _, stage, unit in order)
    times = play(list(found.orders.values()), needs=needs, length=length)
    for where, own in zip(actors, times, strict=True):
        assert found.ends[where] == pytest.approx(own[-1][1] if own else 0)
    for where, order in found.orders.items():
        live = peak = 0
        for kind, stage, _ in order:
            size, released = problem.activation[stage], problem.released[stage]
            live += {ActionKind.F: size, back: -released, ActionKind.W: released - size}[kind]
            peak = max(peak, live)
        assert found.peaks[where] == pytest.approx(peak)
        assert peak <= problem.limits[where.position] + 1e-6
        assert live == pytest.approx(0)


def assert_right_and_no_shorter_than_the_bound(seed):
    rng = random.Random(seed)
    plan, routes, costs, limits, speeds, whole = random_shape(rng)
    try:
        problem = routed_problem(plan, routes, costs, limits, speeds=speeds, whole=whole)
    except PlanError as error:
        assert "does not hold one unit" in str(error)
        return
    bound = routed_bound(problem)
    for first in ("backward", "alternate", "forward"):
        younger = [rng.choice((0, 0, rng.uniform(-3, 3))) for _ in range(routes.num_units)]
        found = list_schedule(problem, Policy(first, younger=younger, later=False))
        assert_orders_are_right(problem, found)
        assert found.makespan >= bound - 1e-9


@examples(day=50, night=150)
@given(st.integers(0, 10**6))
def test_orders_for_any_routes_are_right_and_no_shorter_than_the_bound(seed):
    assert_right_and_no_shorter_than_the_bound(seed)


@nightly
def test_orders_for_many_routes_are_right_and_no_shorter_than_the_bound():
    for seed in range(5000):
        assert_right_and_no_shorter_than_the_bound(seed)


def assert_plan_is_proved_and_simulated_as_scheduled(seed):
    rng = random.Random(seed)
    plan, routes, costs, limits, *_ = random_shape(rng)
    costs = evolve(costs, bandwidth=float("inf"))  # the scheduler's messages never wait for a lane
    try:
        found = schedule_routes(plan, routes, costs, limits, effort=0)
    except PlanError as error:
        assert "does not hold one unit" in str(error)
        return
    verify(lower(found.plan))
    simulation = simulate(found.plan, costs)
    assert simulation.makespan == pytest.approx(found.makespan)
    for actor, peak in found.peaks.items():
        (number,) = found.plan.actors([actor.position], actor.replica)
        assert simulation.peaks()[number] == pytest.approx(peak)


@examples(day=20, night=40)
@given(st.integers(0, 10**6))
def test_a_plan_is_proved_and_takes_what_its_schedule_says(seed):
    assert_plan_is_proved_and_simulated_as_scheduled(seed)


@nightly
def test_many_plans_are_proved_and_take_what_their_schedules_say():
    for seed in range(1000):
        assert_plan_is_proved_and_simulated_as_scheduled(seed)


SMALL = [  # P, D, M, dead
    (2, 2, 1, {0: [0]}),
    (2, 2, 2, {}),
    (2, 2, 2, {1: [0]}),
    (2, 2, 2, {0: [1]}),
    (2, 2, 2, {0: [0], 1: [1]}),
    (2, 3, 1, {0: [1]}),
    (3, 2, 1, {1: [0]}),
    (3, 2, 2, {0: [0], 1: [1], 2: [0]}),
]


@pytest.mark.parametrize("extra", [0, 1, 4])
@pytest.mark.parametrize(("p", "d", "m", "dead"), SMALL)
def test_the_shortest_step_of_all_routes_and_orders_is_found_and_the_bound_is_below(p, d, m, dead, extra):
    limits = [p - position + extra for position in range(p)]
    routes = reroute(Routes.identity(d, m), dead)
    found = schedule_routes(one_f_one_b(p, m), routes, memory_limit=limits)
    anywhere = least_slots([tuple(routes.living(s) for s in range(p))] * (d * m), limits)
    assert found.bound <= anywhere <= found.makespan
    assert found.makespan == anywhere


@nightly
@pytest.mark.parametrize(
    ("p", "d", "m", "dead"), [(2, 2, 3, {0: [0]}), (2, 2, 3, {0: [0], 1: [1]}), (2, 3, 2, {0: [1], 1: [0]})]
)
def test_the_shortest_step_of_larger_cases_is_found(p, d, m, dead):
    routes = reroute(Routes.identity(d, m), dead)
    for extra in (0, 1):
        limits = [p - position + extra for position in range(p)]
        found = schedule_routes(one_f_one_b(p, m), routes, memory_limit=limits)
        choices = [tuple((routes.of(unit, s),) for s in range(p)) for unit in range(d * m)]
        best = least_slots(choices, limits)
        assert found.bound <= best <= found.makespan <= 1.03 * best


def test_the_numbers_of_one_death():
    """4 x 4 x 12: peers of stage s do a third more, from time s on, where W fills the tail; 57 with whole backwards."""
    plan = one_f_one_b(4, 12)
    for stage in range(4):
        routes = reroute(Routes.identity(4, 12), {stage: [0]})
        found = schedule_routes(plan, routes)
        assert found.makespan == found.bound == 48 + stage
    assert schedule_routes(plan, routes, whole=True).makespan == 57
    many = reroute(Routes.identity(16, 12), {3: [5]})
    assert schedule_routes(plan, many).makespan == 39 + 3  # 12 orphans on 15 peers: 13 units of 3


def test_the_example_of_recycle():
    """Gandhi et al. 2024, "ReCycle": five dead of 4 x 4; the two peers of position 1 work 72 from time 1 on."""
    routes = reroute(Routes.identity(4, 12), RECYCLE)
    found = schedule_routes(one_f_one_b(4, 12), routes, memory_limit=[6, 5, 4, 3])
    assert found.makespan == found.bound == 73
    tight = schedule_routes(one_f_one_b(4, 12), routes, memory_limit=[4, 3, 2, 1])
    assert tight.bound <= tight.makespan <= 1.03 * tight.bound


def test_every_rank_finds_the_same():
    routes = reroute(Routes.identity(4, 6), {1: [2], 2: [0]})
    plan = one_f_one_b(4, 6)
    assert schedule_routes(plan, routes, memory_limit=4) == schedule_routes(plan, routes, memory_limit=4)


def test_calls_for_several_units_and_units_that_skip():
    """An encoder called for two units each, and not for those without an image."""
    graph = ModuleGraph({"image": 1, "text": 2}, {"image": ["text"]})
    plan = multi_module_1f1b(graph, 4)
    routes = reroute(Routes((4, 4), skips={"image": [4, 5]}, every={"image": 2}), {0: [1], 2: [0]}, plan=plan)
    found = schedule_routes(plan, routes)
    verify(lower(found.plan))
    actions = [action for position in range(found.plan.num_positions) for action in found.plan.actions(position)]
    counts = Counter((str(action.kind), action.stage) for action in actions)
    assert counts == {(kind, s): 8 if s else 3 for kind in "FIW" for s in range(3)}
    assert found.makespan == found.bound == 25  # a unit without an image is at stage 2 after 1, and its actor works 24


def test_arguments_that_do_not_fit_the_plan():
    plan = one_f_one_b(2, 2)
    with pytest.raises(PlanError, match="has 3 numbers; the plan has 2 positions"):
        schedule_routes(plan, Routes.identity(2, 2), memory_limit=[1, 1, 1])
    with pytest.raises(PlanError, match="memory_limit 0.5 of position 0 does not hold one unit; the least .* is 1"):
        schedule_routes(plan, Routes.identity(2, 2), memory_limit=0.5)
    with pytest.raises(PlanError, match="dead"):
        schedule_routes(plan, Routes((2, 2), dead=[Actor(0, 0)]))
    with pytest.raises(PlanError, match="speed of 0@0 is 0"):
        reroute(Routes.identity(2, 2), speeds={Actor(0, 0): 0})
    with pytest.raises(PlanError, match="speed of 0@0 is -1"):
        schedule_routes(plan, Routes((2, 1)), speeds={Actor(0, 0): -1})
