"""`verify` against an explorer that was written without a look at it and tries every order of events.

They must agree on every plan: accepted by the one, nothing can go wrong for the other; and whatever `verify`
calls a circle of waiting, the explorer really gets stuck in.
"""

from __future__ import annotations

import itertools
import random

import pytest
from attrs import evolve

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.generators import multi_module_1f1b
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan import from_text, parse_action
from pipegrid.plans.verify import verify
from plan_kit.explorer import STUCK, explore
from plan_kit.mutations import MODES, random_mutant, rules_broken, single_mutations
from plan_kit.plans import GENERATORS, lowered, random_module_plan

nightly = pytest.mark.nightly


def assert_agree(plan, mode, what, *, every_order=False):
    broken = rules_broken(plan, mode)
    problems = explore(plan, *mode, every_order=every_order)
    assert "unnamed" not in broken, (what, str(plan))
    assert bool(broken) == bool(problems), (what, mode, broken, problems, str(plan))
    if broken == {"cycle"}:
        assert STUCK in problems, (what, mode, str(plan))
    return broken


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 1), (2, 3), (3, 2), (3, 4)])
def test_no_order_of_events_goes_wrong_in_a_generators_plan(name, p, m):
    for mode in MODES:
        assert explore(lowered(name, p, m), *mode, every_order=p * m <= 6) == set()
        assert rules_broken(lowered(name, p, m), mode) == set()


CROSSED = """
0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0
"""


def test_an_order_that_only_buffered_sends_survive_gets_stuck():
    plan = from_text(CROSSED)
    assert explore(plan) == {STUCK}
    assert rules_broken(plan, MODES[0]) == {"cycle"}
    verify(plan, rendezvous=False)


@pytest.mark.parametrize(
    ("count", "seed", "sizes"),
    [(150, 0, [(2, 1), (2, 2), (3, 1)]), pytest.param(3000, 8, [(2, 2), (2, 3), (3, 1), (3, 2)], marks=nightly)],
    ids=["some", "many"],
)
def test_trying_one_order_of_events_is_as_good_as_all(count, seed, sizes):
    """What lets other tests look at one order of events only: no event disables another."""
    rng = random.Random(seed)
    for _ in range(count):
        plan = lowered(rng.choice(list(GENERATORS)), *rng.choice(sizes))
        what, mutant = random_mutant(plan, rng, rng.randint(0, 3))
        for mode in MODES:
            one = explore(mutant, *mode, every_order=False)
            assert one == explore(mutant, *mode, every_order=True), (what, str(mutant))


# What the two positions of a chain do for a microbatch, and what each action needs.
FIRST = {"0F{}": (), "0SEND_F{}>1": ("0F{}",), "0RECV_B{}<1": (), "0B{}": ("0F{}", "0RECV_B{}<1")}
SECOND = {"1RECV_F{}<0": (), "1F{}": ("1RECV_F{}<0",), "1B{}": ("1F{}",), "1SEND_B{}>0": ("1B{}",)}


def orders_of_two_microbatches(actions):
    """All orders of a position's actions for two microbatches in which data is there in time."""
    after = {name.format(m): {n.format(m) for n in needs} for name, needs in actions.items() for m in (0, 1)}

    def extend(order, left):
        if not left:
            yield tuple(map(parse_action, order))
        for name in sorted(left):
            if not after[name] & left:
                yield from extend([*order, name], left - {name})

    return list(extend([], frozenset(after)))


def check_pairs(pairs):
    counts = {True: 0, False: 0}
    base = from_text(CROSSED)
    for first, second in pairs:
        plan = evolve(base, positions=(first, second))
        for mode in MODES:
            counts[bool(assert_agree(plan, mode, "order"))] += 1
    return counts


@pytest.fixture(scope="module")
def orders():
    """Of both positions."""
    firsts, seconds = map(orders_of_two_microbatches, (FIRST, SECOND))
    assert len(firsts) == 1750
    assert len(seconds) == 70
    return firsts, seconds


def test_orders_of_two_positions_and_two_microbatches_sampled(orders):
    firsts, seconds = orders
    rng = random.Random(1)
    counts = check_pairs([(rng.choice(firsts), rng.choice(seconds)) for _ in range(600)])
    assert counts[True] > 100
    assert counts[False] > 0


@nightly
def test_all_orders_of_two_positions_and_two_microbatches(orders):
    counts = check_pairs(itertools.product(*orders))
    assert sum(counts.values()) == len(MODES) * 1750 * 70
    assert counts[False] > 1000


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(
    ("p", "m", "every"),
    [(2, 2, 20), (3, 2, 40), *(pytest.param(p, m, 1, marks=nightly) for p in (1, 2, 3) for m in (1, 2, 3, 4))],
)
def test_every_single_mistake_is_judged_alike(name, p, m, every):
    refused = 0
    for what, mutant in itertools.islice(single_mutations(lowered(name, p, m)), 0, None, every):
        for mode in MODES:
            refused += bool(assert_agree(mutant, mode, what))
    assert refused


@pytest.mark.parametrize(
    ("count", "seed", "right"), [(300, 2, 5), pytest.param(100_000, 3, 1000, marks=nightly)], ids=["some", "many"]
)
def test_random_mistakes_are_judged_alike(count, seed, right):
    """More than ``right`` of the plans can still run."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(count):
        name, p, m = rng.choice(list(GENERATORS)), rng.randint(1, 3), rng.randint(1, 4)
        what, mutant = random_mutant(lowered(name, p, m), rng, rng.choice((1, 1, 2, 2, 3, 4)))
        mode = rng.choice(MODES)
        accepted += not assert_agree(mutant, mode, f"{name} {p} {m}: {what}")
    assert accepted > right


@pytest.mark.parametrize(
    ("count", "seed", "most_actions"), [(25, 4, 120), pytest.param(3000, 5, 400, marks=nightly)], ids=["some", "many"]
)
def test_plans_over_random_graphs_are_judged_alike(count, seed, most_actions):
    """Over graphs of modules, with colocated ones, collectives and tied stages, and mistakes."""
    rng = random.Random(seed)
    checked = 0
    while checked < count:
        plan, options = random_module_plan(rng.randrange(2**32))
        plan = lower(plan, **options)
        if sum(len(steps) for steps in plan.positions) > most_actions:
            continue
        checked += 1
        mode = rng.choice(MODES)
        assert assert_agree(plan, mode, "graph") == set()
        for _ in range(4):
            what, mutant = random_mutant(plan, rng, rng.randint(1, 3))
            assert_agree(mutant, mode, f"graph: {what}")


def test_an_edge_by_collective_is_explored_too():
    graph = ModuleGraph({"a": 1, "b": 1}, {"a": ["b"]})
    plan = lower(multi_module_1f1b(graph, 2), collectives={Edge(0, 1): "bridge"})
    assert explore(plan) == set()
    steps = plan.positions[0]
    assert explore(evolve(plan, positions=(steps[:1] + steps[2:], plan.positions[1]))) != set()
