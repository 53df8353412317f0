"""Encoders in the bubbles: plans of graphs are valid, no longer than 1F1B, and near the optimum where it is known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.graph import ModuleGraph, ModuleGraphError
from pipegrid.plans import SCHEDULES, Costs, PlanError, lower, multi_module_1f1b, simulate, verify
from pipegrid.plans.network.network import as_network
from pipegrid.search import greedy, search
from pipegrid.search.bounds import lower_bound
from pipegrid.search.calls import RoutedProblem
from pipegrid.search.candidates import named, planned, problems
from pipegrid.search.justify import justified
from pipegrid.search.list_scheduler import list_schedule, policies
from plan_kit.orders import least_makespan, split_passes
from plan_kit.plans import examples

nightly = pytest.mark.nightly
SIZES, AHEAD = st.sampled_from([0.25, 0.5, 1.0, 2.0]), st.sampled_from([None, 1, 2])


@st.composite
def shapes(draw):
    """An encoder or two before a language model: apart, stage by stage on its positions, or whole on all of them.

    Returns 1F1B over them, the costs, a memory limit, and the other arguments of a search.
    """
    depth, count = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    names = ["images", "audio"][: draw(st.integers(1, 2))]
    modules, placement, positions = {}, [], depth
    for name in names:
        where = draw(st.sampled_from(["apart", "same", "all"]))
        modules[name] = depth if where == "same" else 1
        if where == "apart":
            placement.append((positions,))
            positions += 1
        else:
            placement += [(p,) for p in range(depth)] if where == "same" else [tuple(range(depth))]
    placement += [(p,) for p in range(depth)]
    graph = ModuleGraph({**modules, "language": depth}, {name: ["language"] for name in names})
    frozen = tuple(name for name in names if draw(st.booleans()))
    stages = graph.num_stages
    times = {kind: [draw(SIZES) for _ in range(stages)] for kind in "FIW"}
    costs = Costs(**times, latency=draw(st.sampled_from([0, 0.3])), activation=[draw(SIZES) for _ in range(stages)])
    options = {"graph": graph, "placement": placement, "forward_only": frozen, "ahead": draw(AHEAD)}
    options |= {"num_positions": positions, "num_microbatches": count}
    (free,) = problems(costs, **options)
    base = multi_module_1f1b(graph, count, placement=placement, forward_only=frozen)
    slack = draw(st.sampled_from([1.0, 1.5, None]))
    limit = None if slack is None else max(free.least_memory(), slack * simulate(base, costs).peak())
    return base, costs, limit, options


@given(shapes())
@examples(day=25, night=60)
def test_the_list_scheduler_gets_every_microbatch_through_in_its_memory_and_its_queue(shape):
    _, costs, limit, options = shape
    (problem,) = problems(costs, limit, **options)
    network = as_network(problem)
    one_replica = RoutedProblem.of_one_replica(problem)
    for policy in itertools.islice(policies(problem), 0, None, 13):
        plan = planned(problem, list_schedule(one_replica, policy).orders.values())
        verify(lower(plan, ahead=options["ahead"]))
        orders = network.orders_of(plan)
        assert all(map(network.keeps_to_limit, orders))
        timing = network.timed(orders)
        assert timing is not None
        if options["ahead"] is None or not options["forward_only"]:
            assert timing.value == pytest.approx(simulate(plan, costs).makespan)
        assert timing.value >= lower_bound(network, "makespan") - 1e-9
        if all(len(places) == 1 for places in network.positions):
            better = justified(network, orders)
            assert [sorted(order) for order in better] == [sorted(order) for order in orders]
            assert all(map(network.keeps_to_limit, better))
            assert network.timed(better) is not None


def test_orders_of_short_frozen_encoders_before_a_long_forward_are_justified_whole():
    """Backwards in time, a forward is ready before the shorter one that waited in the queue for it has begun."""
    graph = ModuleGraph({"images": 1, "audio": 1, "language": 3}, {"images": ["language"], "audio": ["language"]})
    costs = Costs(F=[0.25, 0.25, 1, 0.25, 0.25], I=[0.25, 0.25, 0.25, 0.5, 0.25], W=0.25, activation=1)
    options = {"graph": graph, "placement": [3, 4, 0, 1, 2], "forward_only": ("images", "audio"), "ahead": 1}
    (problem,) = problems(costs, None, **options, num_positions=5, num_microbatches=2)
    network = as_network(problem)
    for entry in named(problem):
        orders = network.orders_of(entry.plan)
        better = justified(network, orders)
        assert [sorted(order) for order in better] == [sorted(order) for order in orders], entry.origin


@given(shapes())
@examples(day=20, night=40)
def test_a_plan_found_verifies_keeps_to_the_peak_of_1f1b_and_is_no_longer(shape):
    base, costs, limit, options = shape
    found = search(costs, limit, **options, effort=0.002)
    verify(found.plan)
    verify(lower(found.plan, ahead=options["ahead"]))
    simulation = simulate(found.plan, costs)
    assert (found.makespan, found.peak) == (simulation.makespan, simulation.peak())
    assert limit is None or found.peak <= limit + 1e-6
    assert found.bound - 1e-9 <= found.makespan
    if limit is None or simulate(base, costs).peak() <= limit:
        assert found.makespan <= simulate(base, costs).makespan + 1e-9


@pytest.mark.parametrize(
    ("placement", "m", "cap", "frozen"),
    [
        ((0, 0), 3, 2, 0),
        ((0, 0), 3, 2, 1),
        ((0, 1), 3, 2, 1),
        ((0, 1, 0, 1), 2, 2, 0),
        ((0, 1, 0, 1), 2, 2, 2),
        pytest.param((2, 0, 1), 2, 2, 0, marks=nightly),
        pytest.param((2, 0, 1), 3, 2, 1, marks=nightly),
        pytest.param((0, 1, 0, 1), 2, 3, 0, marks=nightly),
    ],
)
def test_small_graphs_reach_the_optimum_of_all_orders(placement, m, cap, frozen):
    """An encoder of one stage, or of two where there are four, before a language model."""
    depth = len(placement) // 2
    graph = ModuleGraph({"images": depth, "language": len(placement) - depth}, {"images": ["language"]})
    times = {"F": 1, "I": 1.5, "W": 0.75}
    costs = Costs(**times, latency=0.25, activation=1)
    found = search(
        costs,
        cap,
        num_positions=max(placement) + 1,
        num_microbatches=m,
        graph=graph,
        placement=placement,
        forward_only=("images",) if frozen else (),
        effort=0.05,
    )
    passes = split_passes(placement, times, hop=0.25, frozen=frozen)
    best = least_makespan(passes, m, [cap] * len(placement))
    assert found.bound <= best + 1e-9
    assert found.makespan == pytest.approx(best)


def test_a_whole_encoder_on_all_positions_stops_them_for_blocks_not_for_every_idle_moment():
    """The language model's bubbles do not coincide, so a stage of all positions needs them to stop."""
    graph = ModuleGraph({"images": 1, "language": 4}, {"images": ["language"]})
    placement = [(0, 1, 2, 3), 0, 1, 2, 3]
    costs = Costs(F=[0.5, 1, 1, 1, 1], I=[0.5, 1, 1, 1, 1], W=[0.5, 1, 1, 1, 1], activation=1)
    base = multi_module_1f1b(graph, 12, placement=placement)
    peak = simulate(base, costs).peak()
    found = search(costs, peak, num_positions=4, num_microbatches=12, graph=graph, placement=placement, effort=0.05)
    assert found.peak <= peak
    assert found.makespan <= 0.85 * simulate(base, costs).makespan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward_only": ("sound",)}, r"there is no module 'sound'; the graph has .*'images', 'language'"),
        ({"ahead": 0}, r"ahead is 0; it must be an integer of at least 1"),
    ],
)
def test_a_wrong_module_or_queue_is_named(options, message):
    graph = ModuleGraph({"images": 1, "language": 1}, {"images": ["language"]})
    with pytest.raises((PlanError, ModuleGraphError), match=message):
        search(Costs(), num_positions=2, num_microbatches=2, graph=graph, **options)


def test_named_schedules_around_the_main_module_are_those_of_whole_microbatches():
    graph = ModuleGraph({"vision": 1, "language": 2}, {"vision": ["language"]})
    (problem,) = problems(Costs(), None, num_positions=3, num_microbatches=4, graph=graph, placement=[0, 1, 2])
    origins = [entry.origin for entry in named(problem)]
    assert {"multi_module_1f1b", "1f1b", "zero_bubble_h1"} <= set(origins)
    assert len(origins) == len(set(origins))
    assert not any(SCHEDULES[origin].sliced for origin in origins if origin in SCHEDULES)


@pytest.mark.parametrize("graph", [ModuleGraph({"a": 2}), ModuleGraph({"a": 1, "b": 1}, {"a": ["b"]})])
def test_modules_that_are_all_frozen_are_evaluated(graph):
    problem = {"num_positions": 2, "num_microbatches": 3, "graph": graph, "forward_only": graph.order}
    for plan in (greedy(Costs(), **problem), search(Costs(), effort=0.01, **problem).plan):
        assert verify(plan).num_actions == 2 * 3
        assert simulate(plan, Costs()).makespan == 3 + 1
