"""Plans with routes: `verify` against the explorer, on right ones, on mistakes in them, and on other routes."""

import random

import pytest
from attrs import evolve

from pipegrid.core.order import ORDER_MODELS
from pipegrid.plans import Actor, PlanError, Routes, from_text, lower, one_f_one_b, routed, verify
from plan_kit.explorer import STUCK, explore
from plan_kit.mutations import MODES, random_mutant, rules_broken, single_mutations
from plan_kit.routed_plans import fits, lowered_routed, random_routed, random_routes, random_schedule

from .test_explorer import assert_agree


def check_right(seeds, *, every_order=0):
    """Plans that `routed` and `lower` make are right under all rules; small ones in every order of events."""
    for seed in seeds:
        plan, options = random_routed(seed)
        verify(plan)
        plan = lower(plan, **options)
        for mode in MODES:
            assert rules_broken(plan, mode) == set(), seed
            small = sum(map(len, plan.positions)) <= every_order
            assert explore(plan, *mode, every_order=small) == set(), (seed, str(plan))
        verify(plan, rendezvous=False)
        # Modules that share some of their positions exchange by a collective, which routes do not have.
        ends = [
            (set(plan.placement[edge.source]), set(plan.placement[edge.destination])) for edge in plan.graph.stage_edges
        ]
        if all(one == other or one.isdisjoint(other) for one, other in ends):
            for order in ORDER_MODELS:
                verify(plan, order=order)


def test_right_plans_are_accepted():
    check_right(range(30), every_order=25)


@pytest.mark.nightly
def test_many_right_plans_are_accepted():
    check_right(range(30, 5000), every_order=40)


def check_mistakes(count, seed):
    rng = random.Random(seed)
    broken = 0
    for _ in range(count):
        plan = lowered_routed(rng.randrange(2**32), replicas=2, most_microbatches=2)
        for number in (1, 1, 2, 3):
            what, mutant = random_mutant(plan, rng, number)
            if not mutant.has_communication:
                continue  # of computes alone, no messages are asked for
            broken += bool(assert_agree(mutant, rng.choice(MODES), f"{what}", every_order=False))
    return broken


def test_random_mistakes_are_judged_alike():
    assert check_mistakes(30, seed=0) > 50


@pytest.mark.nightly
def test_many_random_mistakes_are_judged_alike():
    assert check_mistakes(10_000, seed=1) > 10_000


def check_singles(seed, every):
    """All single mistakes of a plan."""
    plan = lowered_routed(seed, replicas=2, most_microbatches=2)
    broken = total = 0
    for number, (what, mutant) in enumerate(single_mutations(plan)):
        if number % every == 0 and mutant.has_communication:
            total += 1
            broken += bool(assert_agree(mutant, MODES[number % len(MODES)], what))
    return broken, total


def test_every_single_mistake_of_a_few_plans_is_judged_alike():
    found = [check_singles(seed, every=23) for seed in range(6)]
    assert sum(broken for broken, _ in found) > 0.5 * sum(total for _, total in found)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(40))
def test_every_single_mistake_is_judged_alike(seed):
    check_singles(seed, every=1)


def check_other_routes(count, seed):
    """Steps that are right for one set of routes, under others: right where the same calls go the same ways."""
    rng = random.Random(seed)
    verdicts = {True: 0, False: 0}
    for _ in range(count):
        home = random_schedule(rng, most_microbatches=2)
        routes = random_routes(home, rng, replicas=2)
        other = changed_routes(routes, home, rng)
        if routes.is_identity or other.is_identity:
            continue
        plan = lower(routed(home, routes))
        broken = bool(assert_agree(evolve(plan, routes=other), rng.choice(MODES), f"{routes} against {other}"))
        (who, served), (others, others_served) = ways(routes, home), ways(other, home)
        assert broken or who == others, (str(routes), str(other))
        assert not broken or (who, served) != (others, others_served), (str(routes), str(other))
        verdicts[broken] += 1
    return verdicts


def changed_routes(routes, home, rng):
    """Routes that differ by one thing, or are the same."""
    for _ in range(20):
        unit, replica = rng.randrange(routes.num_units), rng.randrange(routes.num_replicas)
        moves = {(move.unit, move.stage): move.replica for move in routes.moves}
        skips, name = {key: {*units} for key, units in routes.skips}, rng.choice(home.graph.order)
        match rng.choice(("move", "move", "skip", "every", "dead")):
            case "move":
                other = evolve(routes, moves=moves | {(unit, rng.randrange(home.num_stages)): replica})
            case "skip":
                other = evolve(routes, skips=skips | {name: skips.get(name, set()) ^ {unit}})
            case "every":
                other = evolve(routes, every={**dict(routes.every), name: rng.choice((1, 2))})
            case "dead":
                other = evolve(routes, dead=[*routes.dead, Actor(rng.randrange(home.num_positions), replica)])
        if other != routes and fits(other, home):
            return other
    return routes


def ways(routes, home):
    """What of the routes bears on a plan: who computes which call and takes part; and whom a call serves."""
    who, served = [], []
    for stage in range(home.num_stages):
        module, _ = home.graph.module_of(stage)
        who.append([(call, routes.of(call, stage)) for call in routes.calls(module)])
        served.append([routes.served(call, module) for call in routes.calls(module)])
    trained = {p for stage, places in enumerate(home.placement) for p in places if stage not in home.forward_only}
    # A dead actor without any unit is missed where replicas reduce.
    dead = [actor for actor in routes.dead if actor.position in trained and routes.num_replicas > 1]
    return (who, dead), served


def test_steps_of_other_routes_are_rejected():
    verdicts = check_other_routes(60, seed=2)
    assert verdicts[True] > 20


@pytest.mark.nightly
def test_steps_of_other_routes_are_rejected_of_many():
    verdicts = check_other_routes(5000, seed=3)
    assert min(verdicts.values()) > 10


CROSSED = """
microbatches 2
modules model:2
placement 0 1
units 1 1
move 1 0@0>1 0@1>0
0: 0F0 [0SEND_F0>1] 1RECV_F1<0 1F1 1B1 1SEND_B1>0 0RECV_B0<1 0B0 0REDUCE
1: 1REDUCE
2: 0F1 [0SEND_F1>1] 0RECV_B1<1 0B1 0REDUCE
3: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE
"""


def test_what_is_computed_elsewhere_is_misplaced_here():
    text = CROSSED.replace("1: 1REDUCE", "1: 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1REDUCE").replace(
        " 1RECV_F1<0 1F1 1B1 1SEND_B1>0 0RECV", " 0RECV"
    )
    plan = from_text(text)
    verify(plan)
    assert explore(plan) == set()
    wrong = from_text(CROSSED)
    assert "misplaced" in rules_broken(wrong, MODES[0])
    assert explore(wrong) != set()


def test_reductions_in_other_orders_wait_for_each_other():
    """Both stages of one position, reduced over its replicas in another order on one of them."""
    plan = lower(routed(one_f_one_b(1, 2), Routes([2, 1])))
    assert str(plan.positions[1][-1]) == "0REDUCE"
    text = """
microbatches 3
modules model:2
placement 0 0
units 2 1
0: 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 0REDUCE 1REDUCE
1: 0F2 1F2 1B2 0B2 1REDUCE 0REDUCE
"""
    assert rules_broken(from_text(text), MODES[0]) == {"group"}
    assert explore(from_text(text)) != set()
    right = from_text(text.replace("1REDUCE 0REDUCE", "0REDUCE 1REDUCE"))
    assert rules_broken(right, MODES[0]) == set() == explore(right)
    missing = from_text(text.replace("1REDUCE 0REDUCE", "0REDUCE"))
    with pytest.raises(PlanError, match="1REDUCE: to be done here"):
        verify(missing)


def test_a_reduction_before_the_last_backward_of_an_orphan():
    plan = lower(routed(one_f_one_b(2, 2), Routes([2, 2], moves={(2, 0): 0})))
    steps = list(plan.positions[0])
    at = next(i for i, step in enumerate(steps) if str(step) == "0REDUCE")
    last = max(i for i, step in enumerate(steps) if str(step).startswith("0B"))
    steps[at], steps[last] = steps[last], steps[at]
    wrong = evolve(plan, positions=(tuple(steps), *plan.positions[1:]))
    assert "dependency" in rules_broken(wrong, MODES[0])


def test_two_orphans_that_cross_wait_for_each_other():
    """Each replica sends its unit to the other before it receives: a cycle over replicas."""
    text = """
microbatches 2
modules model:2
placement 0 1
units 1 1
move 1 0@0>1 0@1>0
0: 0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE
1: 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1REDUCE
2: 0F1 0RECV_B1<1 0SEND_F1>1 0B1 0REDUCE
3: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE
"""
    plan = from_text(text)
    assert rules_broken(plan, MODES[0]) == {"cycle"}
    assert explore(plan) == {STUCK}
    with pytest.raises(PlanError, match="position 2, step 1: 0RECV_B1<1 waits for position 1, step 3"):
        verify(plan)


def test_memory_counts_orphans():
    base = one_f_one_b(2, 4)
    moves = {(unit, 1): 0 for unit in range(4, 8)}
    routes = Routes([4, 4], moves=moves)
    plan = lower(routed(base, routes))
    peaks = verify(plan).peak_live
    assert peaks[1] > verify(lower(base)).peak_live[1]
    assert peaks[3] == 0
    tight = lower(routed(base, routes, memory_limit=2))
    assert max(verify(tight, memory_limit=2).peak_live) <= 2
    with pytest.raises(PlanError, match="memory limit of 0.5"):
        routed(base, routes, memory_limit=0.5)
    assert fits(routes, base)
