"""`greedy`: within the cap, never worse than the best named schedule, and at the papers' points."""

from __future__ import annotations

import itertools
import random

import pytest
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators import multi_module_1f1b, v_half, v_min, zero_bubble_v
from pipegrid.plans.generators.registry import SCHEDULES
from pipegrid.plans.network.network import as_network
from pipegrid.plans.network.problem import Problem
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan import Action, chain
from pipegrid.plans.simulate.costs import Costs, CostsError
from pipegrid.plans.simulate.simulation import simulate
from pipegrid.plans.verify.verify import verify
from pipegrid.search import greedy
from pipegrid.search.calls import RoutedProblem
from pipegrid.search.candidates import candidates, planned, with_whole_backwards
from pipegrid.search.candidates import problems as problems_of
from pipegrid.search.justify import justified
from pipegrid.search.list_scheduler import list_schedule, policies
from plan_kit.plans import examples, module_graphs, random_module_plan


def listed(problem, policy):
    """Per position, the order of the list scheduler."""
    return list(list_schedule(RoutedProblem.of_one_replica(problem), policy).orders.values())


def random_problem(rng):
    """Costs, cap and sizes: uneven stages, splits that cost extra, slow edges, tight and loose caps."""
    p, v, m = rng.randint(2, 4), rng.choice((1, 1, 2)), rng.randint(2, 10)
    stages = p * v
    times = {kind: [rng.uniform(0.5, 2) / v for _ in range(stages)] for kind in "FIW"}
    if rng.random() < 0.3:
        times["B"] = [0.9 * (i + w) for i, w in zip(times["I"], times["W"], strict=True)]
    latency = rng.choice((0, 0, 0.05, 0.4))
    costs = Costs(**times, latency=latency, message=rng.choice((0, 0.2)), bandwidth=1)
    cap = rng.choice((None, p, p + 1, 2 * p, (p + 2) // 2 + 0.5, (p + 4) // 3))
    return costs, cap, p, v, m


def best_named(costs, cap, p, v, m):
    """The least makespan of the catalogue's schedules with ``v`` chunks, found here and not by `greedy`."""
    makespans = []
    for schedule in SCHEDULES.values():
        if schedule.trains and not schedule.sliced and schedule.chunks in (None, v):
            plan = schedule.plan(p, m, v)
            if plan.num_stages != p * v:  # a U has one stage more than positions
                continue
            simulation = simulate(plan, costs)
            if cap is None or simulation.peak() <= cap + 1e-9:
                makespans.append(simulation.makespan)
    return min(makespans, default=None)


@pytest.mark.parametrize(("count", "often"), [(10, 4), pytest.param(500, 150, marks=pytest.mark.nightly)])
def test_never_worse_than_the_best_named_schedule_under_the_same_cap(count, often):
    rng, better = random.Random(0), 0
    for _ in range(count):
        costs, cap, p, v, m = random_problem(rng)
        plan = greedy(costs, cap, num_positions=p, num_microbatches=m, num_stages=p * v)
        makespan = simulate(plan, costs).makespan
        verify(plan, memory_limit=cap)
        verify(lower(plan), memory_limit=cap)
        named = best_named(costs, cap, p, v, m)
        assert named is None or makespan <= named + 1e-9
        better += named is None or makespan < named - 1e-9
    assert better >= often  # and often better: the list scheduler earns its keep


@pytest.mark.parametrize("p", [2, 4, pytest.param(6, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("paper", "cap"),
    [(zero_bubble_v, lambda p: p), (v_half, lambda p: (p + 2) // 2), (v_min, lambda p: (p + 4) // 3)],
)
def test_reaches_the_papers_points_at_their_costs(paper, cap, p):
    m = 3 * p
    costs = Costs(F=0.5, I=0.5, W=0.5)
    plan = greedy(costs, cap(p), num_positions=p, num_microbatches=m, num_stages=2 * p)
    simulation = simulate(plan, costs)
    assert simulation.makespan <= simulate(paper(p, m)).makespan + 1e-9
    assert simulation.peak() <= cap(p)


def test_the_list_scheduler_alone_finds_the_zero_bubble_schedule():
    costs = Costs(F=0.5, I=0.5, W=0.5)
    makespans = [
        candidate.makespan
        for candidate in candidates(problems_of(costs, 4, num_positions=4, num_microbatches=8, num_stages=8))
        if candidate.origin == "list"
    ]
    assert min(makespans) == 25.5


def test_more_memory_never_makes_it_slower():
    costs = Costs(F=[1, 1.3, 0.8], I=[1, 1.1, 1.2], W=0.7)
    makespans = [
        simulate(greedy(costs, cap, num_positions=3, num_microbatches=9), costs).makespan
        for cap in (1, 2, 3, 4, 9, None)
    ]
    # A heuristic owes no such thing by nature; these costs are pinned as an example of what it gives.
    assert makespans == sorted(makespans, reverse=True)


def test_same_on_every_rank():
    costs = Costs(F=[1, 2], I=1, W=1, latency=0.1)
    plans = {greedy(costs, 2, num_positions=2, num_microbatches=5) for _ in range(2)}
    assert len(plans) == 1


def test_backwards_stay_whole_where_splitting_costs_time():
    plan = greedy(Costs(F=1, I=1, W=1, B=1.5), num_positions=1, num_microbatches=3)
    assert {str(action.kind) for action in plan.actions(0)} == {"F", "B"}


def test_uneven_stages_on_positions():
    costs = Costs(F=1, I=1, W=1)
    plan = greedy(costs, num_positions=2, num_microbatches=4, num_stages=5)
    assert plan.stages_at == ((0, 2, 4), (1, 3))
    verify(lower(plan))


def test_costs_say_how_many_stages_there_are():
    plan = greedy(Costs(F=[1, 1, 1, 1]), num_positions=2, num_microbatches=4)
    assert plan.num_stages == 4


def test_a_placement_is_kept():
    plan = greedy(Costs(), num_positions=2, num_microbatches=3, num_stages=4, placement=(1, 0, 0, 1))
    assert plan.placement == ((1,), (0,), (0,), (1,))
    verify(lower(plan))


def test_a_graph_of_modules_with_a_colocated_encoder():
    edges = {"images": ["language"], "audio": ["language"]}
    graph = ModuleGraph({"images": 2, "audio": 1, "language": 2}, edges)
    placement = ((0,), (1,), (2, 3), (2,), (3,))
    costs = Costs(F=[1, 1, 2, 1, 3], I=1, W=1, latency=0.1)
    options = {"graph": graph, "placement": placement}
    for cap in (None, 2, 1):
        plan = greedy(costs, cap, num_positions=4, num_microbatches=6, **options)
        verify(lower(plan), memory_limit=cap)
        named = multi_module_1f1b(graph, 6, placement=placement)
        if cap is None:
            assert simulate(plan, costs).makespan <= simulate(named, costs).makespan


def test_a_limit_in_bytes_is_compared_up_to_rounding():
    # Sums of these, added and released, are off by more than a billionth of a byte.
    sizes = [5954840.275931776, 48820580.13311533, 239611824.25392994, 53409197.543234885, 234868542.61733416]
    sizes += [226058598.42564917]
    plan = greedy(Costs(activation=sizes), sum(sizes), num_positions=1, num_microbatches=4, num_stages=6)
    assert verify(plan).peak_live == (1,)


@pytest.mark.parametrize(
    "seed", [0, 2, 4, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 3, 5, 6, 7))]
)
def test_stages_on_several_positions_start_on_all_of_them_at_once(seed):
    plan, _ = random_module_plan(seed)
    size = (1.0,) * plan.num_stages
    least = max(map(len, plan.stages_at))
    for cap in (float("inf"), least, 1.5 * least):
        problem = Problem(plan.graph, plan.placement, plan.num_microbatches, Costs(), size, cap)
        for policy in itertools.islice(policies(problem), seed % 7, None, 7):
            split = listed(problem, policy)
            for orders in (split, with_whole_backwards(split)):
                positions = [[Action(*entry) for entry in order] for order in orders]
                verify(lower(evolve(plan, positions=positions)))


@st.composite
def problems(draw):
    graph = draw(module_graphs(most=4))
    stages, p = graph.num_stages, draw(st.integers(1, graph.num_stages))
    placement = [(stage,) if stage < p else (draw(st.integers(0, p - 1)),) for stage in range(stages)]
    sizes = st.sampled_from([0.5, 1.0, 3.0]) | st.floats(1e6, 1e9)  # microbatches, or measured bytes
    activation = tuple(draw(sizes) for _ in range(stages))
    held = [sum(activation[s] for s in range(stages) if q in placement[s]) for q in range(p)]
    cap = max(held) * draw(st.sampled_from([1, 1, 1.2, 2.5, float("inf")]))
    times = {kind: [draw(st.sampled_from([0, 0.5, 1, 2])) for _ in range(stages)] for kind in "FIW"}
    costs = Costs(**times, latency=draw(st.sampled_from([0, 0.3])))
    return Problem(graph, tuple(placement), draw(st.integers(1, 4)), costs, activation, cap)


@given(problem=problems())
@examples(day=15, night=30)
def test_the_list_scheduler_never_locks_itself_in(problem):
    """Every microbatch gets through under any policy, any graph and the tightest cap that holds one."""
    for policy in policies(problem):
        orders = listed(problem, policy)
        done = sum(map(len, orders))
        places = sum(map(len, problem.placement))
        assert done == 3 * problem.num_microbatches * places, policy
        for position, order in enumerate(orders):
            live = 0.0
            for kind, stage, _ in order:
                live += {"F": 1, "I": 0, "W": -1}[kind] * problem.activation[stage]
                assert live <= problem.memory_limit * (1 + 1e-9) + 1e-6, (policy, position)


@given(problem=problems())
@example(
    Problem(
        ModuleGraph({"a": 2}, {}),
        ((0,), (0,)),
        2,
        Costs(F=(0, 0), I=(0, 0), W=(0, 0)),
        activation=(0.5, 0.5),
        memory_limit=1.0,
    )
)  # all dates are equal
@examples(day=15, night=60)
def test_justified_orders_are_whole_and_keep_to_the_limit(problem):
    network = as_network(problem)
    for policy in itertools.islice(policies(problem), 0, None, 7):
        orders = network.orders_of(planned(problem, listed(problem, policy)))
        better = justified(network, orders)
        assert [sorted(order) for order in better] == [sorted(order) for order in orders]
        assert all(map(network.keeps_to_limit, better))
        assert network.timed(better) is not None


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: greedy(Costs(), 0.5, num_positions=2, num_microbatches=2),
            PlanError,
            r"memory_limit 0.5 does not hold one microbatch at a time; the least that works is 1",
        ),
        (lambda: greedy(Costs(), num_positions=0, num_microbatches=2), PlanError, r"num_positions is 0"),
        (
            lambda: greedy(Costs(), num_positions=4, num_microbatches=2, num_stages=3),
            PlanError,
            r"3 stages lie on 3 positions; num_positions is 4",
        ),
        (
            lambda: greedy(Costs(), num_positions=3, num_microbatches=2, num_stages=2, placement=(0, 1)),
            PlanError,
            r"2 stages lie on 2 positions; num_positions is 3",
        ),
        (
            lambda: greedy(Costs(), num_positions=3, num_microbatches=2, num_stages=3, placement=(0, 1, 1)),
            PlanError,
            r"3 stages lie on 2 positions; num_positions is 3",
        ),
        (
            lambda: greedy(Costs(), num_positions=2, num_microbatches=2, num_stages=2, graph=chain(3)),
            PlanError,
            r"num_stages is 2 and the graph has 3 stages",
        ),
        (
            lambda: greedy(Costs(F=[1, 2, 3]), num_positions=2, num_microbatches=2, num_stages=2),
            CostsError,
            r"F is given for 3 stages; the plan has 2",
        ),
        (
            lambda: greedy(Costs(latency={Edge(0, 1): 1}), num_positions=3, num_microbatches=2),
            CostsError,
            r"latency has no number for edge 1>2",
        ),
    ],
)
def test_what_cannot_be_scheduled_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("stages", "skips"), [(4, ["0>2", "0>3"]), (8, ["0>2", "0>5", "2>7"])])
def test_plans_of_stages_that_hand_on_values_keep_their_edges(stages, skips):
    """Named schedules as well, which know nothing of them."""
    graph = chain(stages, [Edge(*map(int, skip.split(">"))) for skip in skips])
    found = list(candidates(problems_of(Costs(), 4, num_positions=4, num_microbatches=4, graph=graph)))
    assert len({one.origin for one in found} - {"list"}) > 1
    assert {one.plan.graph.skips for one in found} == {graph.skips}
    assert max(verify(lower(greedy(Costs(), num_positions=4, num_microbatches=4, graph=graph))).peak_kept) > 0


def test_a_limit_holds_what_is_kept_of_values_that_skip_stages():
    graph = chain(8, [Edge(0, 2), Edge(0, 5), Edge(2, 7), Edge(0, 4)])  # the last stays on its position
    costs = Costs(activation=1.0, input_release=0.25, kept={e: 0.5 * e.destination for e in graph.skips})
    options = {"num_positions": 4, "num_microbatches": 4, "graph": graph}
    for limit in (6.5, 8, 10):
        shapes = problems_of(costs, limit, **options)
        for one in candidates(shapes):
            assert one.peak == pytest.approx(simulate(one.plan, costs).peak())
            assert one.peak <= limit
            assert one.peak > simulate(one.plan, evolve(costs, kept=0.0)).peak()
    with pytest.raises(PlanError, match=r"the least that works is 5\.5"):
        greedy(costs, 5, **options)
    frozen = chain(4, [Edge(0, 2)])
    with pytest.raises(CostsError, match="kept is 1 for edge 0>2: stage 0 has no backward"):
        module = frozen.modules[0][0]
        greedy(Costs(kept=1.0), num_positions=2, num_microbatches=2, graph=frozen, forward_only=[module])
