"""Schedules along routes: what each actor computes, sends and receives, and in which order."""

import random

import pytest
from attrs import evolve

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import (
    Actor,
    PlanError,
    Routes,
    from_csv,
    from_json,
    from_text,
    lower,
    multi_module_1f1b,
    offload,
    one_f_one_b,
    routed,
    seq1f1b,
    simulate,
    to_csv,
    to_json,
    verify,
    zero_bubble_h1,
)
from plan_kit.routed_plans import lowered_routed, random_routed, random_routes, random_schedule

ENCODER = ModuleGraph({"images": 1, "model": 2}, {"images": ["model"]})


def dead_stage(stage, *, replicas=4, microbatches=12, positions=4):
    """Routes around a dead actor of replica 1, whose units go to the others in turn."""
    others = [replica for replica in range(replicas) if replica != 1]
    moves = {(microbatches + m, stage): others[m % len(others)] for m in range(microbatches)}
    return Routes([microbatches] * replicas, moves=moves, dead=[Actor(stage, 1)])


def kinds(plan, kind, stage):
    """The units of all actions of a kind and stage, with the actor."""
    return [
        (action.microbatch, position)
        for position in range(plan.num_positions)
        for action in plan.actions(position)
        if (str(action.kind), action.stage) == (kind, stage)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_units_at_home_keep_the_order_of_the_schedule(seed):
    rng = random.Random(seed)
    home = random_schedule(rng)
    routes = random_routes(home, rng)
    if routes.is_identity:
        assert routed(home, routes) is home
        return
    routes = evolve(routes, every={}, moves={m: r for m, r in away(routes) if routes_fit(routes, home, m)})
    if routes.is_identity or any(routes.dead):
        return
    plan = routed(home, routes)
    for position in range(plan.num_positions):
        replica, place = divmod(position, plan.positions_each)
        own = [action for action in plan.actions(position) if routes.home(action.microbatch) == replica]
        kept = [
            evolve(action, microbatch=routes.unit(replica, action.microbatch))
            for action in home.actions(place)
            if action.microbatch < routes.units[replica]
        ]
        computed = {(stage, piece) for stage in plan.stages_at[position] for piece in plan.pieces_at(stage, position)}
        assert own == [action for action in kept if (action.stage, action.microbatch) in computed]


def away(routes):
    return [((move.unit, move.stage), move.replica) for move in routes.moves]


def routes_fit(routes, home, key):
    return key[0] in evolve(routes, every={}).calls(home.graph.module_of(key[1])[0])


@pytest.mark.parametrize("seed", range(60))
def test_every_form_reads_back_equal(seed):
    plan = lowered_routed(seed)
    for again in (from_text(str(plan)), from_json(to_json(plan)), from_csv(to_csv(plan))):
        assert again == plan
        assert again.digest == plan.digest
    other = evolve(plan, routes=evolve(plan.routes, skips={}, every={}, dead=[], moves={}))
    assert (other.digest == plan.digest) == (other == plan)


def test_routes_by_which_all_act_alike_leave_a_plan_as_it_is():
    plan = one_f_one_b(4, 8)
    same = evolve(plan, routes=Routes.identity(4, 8))
    assert same == plan
    assert same.routes is None
    assert same.digest == plan.digest
    assert routed(plan, Routes.identity(4, 8)) is plan


@pytest.mark.parametrize("stage", range(4))
def test_one_dead_actor_of_four_replicas(stage):
    """With F = I = W = 1 the peers work 3 * 12 * 4 / 3 = 48; 1F1B undisturbed takes 45."""
    for schedule in (one_f_one_b, zero_bubble_h1):
        plan = lower(routed(schedule(4, 12), dead_stage(stage)))
        verify(plan)
        assert 48 + stage <= simulate(plan).makespan <= 60
        assert kinds(plan, "F", stage) == sorted(kinds(plan, "F", stage), key=lambda pair: pair[1])
        assert not list(plan.actions(4 + stage))
        assert {p % 4 for _, p in kinds(plan, "REDUCE", stage)} == {stage}
        assert len(kinds(plan, "REDUCE", stage)) == 3


def test_only_moved_units_cross_replicas():
    plan = lower(routed(one_f_one_b(4, 12), dead_stage(2)))
    crossing = {
        action.microbatch
        for position in range(plan.num_positions)
        for action in plan.actions(position)
        if action.edge in (Edge(1, 2), Edge(2, 3)) and action.kind.is_message
    }
    assert crossing == set(range(48))
    home = lower(one_f_one_b(4, 12))
    for position, replica in ((0, 0), (1, 2), (3, 3)):
        row = [a for a in plan.actions(position + 4 * replica) if a.microbatch in plan.routes.units_of(replica)]
        kept = [a for a in home.actions(position) if a.kind.is_compute]
        assert [(a.kind, a.stage) for a in row if a.kind.is_compute] == [(a.kind, a.stage) for a in kept]


def test_a_unit_that_skips_a_module_leaves_no_trace_there():
    plan = lower(routed(multi_module_1f1b(ENCODER, 4), Routes([4], skips={"images": [1, 2]})))
    verify(plan)
    assert [unit for unit, _ in kinds(plan, "F", 0)] == [0, 3]
    assert [unit for unit, _ in kinds(plan, "RECV_F", 1)] == [0, 3]
    assert [unit for unit, _ in kinds(plan, "SEND_B", 1)] == [0, 3]
    assert [unit for unit, _ in kinds(plan, "F", 1)] == [0, 1, 2, 3]


def test_a_call_for_two_units_is_made_and_sent_once_and_its_gradients_are_summed():
    plan = lower(routed(multi_module_1f1b(ENCODER, 5), Routes([5], every={"images": 2})))
    verify(plan)
    for kind, stage in (("F", 0), ("B", 0), ("SEND_F", 0), ("RECV_F", 1), ("SEND_B", 1), ("RECV_B", 0)):
        assert sorted(unit for unit, _ in kinds(plan, kind, stage)) == [0, 2, 4]
    steps = [str(action) for action in plan.actions(1)]
    assert steps.index("1RECV_F2<0") < steps.index("1F2") < steps.index("1F3")
    assert max(steps.index("1B2"), steps.index("1B3")) < steps.index("1SEND_B2>0")


def test_a_sum_of_gradients_is_not_sent_before_the_last_of_them():
    text = """
microbatches 2
modules images:1 model:1
edges images>model
placement 0 1
units 2
every images 2
0: 0F0 0SEND_F0>1 0RECV_B0<1 0B0
1: 1RECV_F0<0 1F0 1B0 1F1 1B1 1SEND_B0>0
"""
    verify(from_text(text))
    early = from_text(text.replace("1F1 1B1 1SEND_B0>0", "1SEND_B0>0 1F1 1B1"))
    with pytest.raises(PlanError, match=r"1SEND_B0>0 needs 1B1 or 1I1 before it, which comes at step 5"):
        verify(early)
    alone = from_text(text.replace(" 0SEND_F0>1 0RECV_B0<1", "").replace("1RECV_F0<0 ", "").replace(" 1SEND_B0>0", ""))
    assert simulate(alone).start[0][1] == simulate(alone).end[1][3]


def test_a_call_whose_units_are_elsewhere_sends_once_to_each():
    """The two units of a call are computed by two replicas: each gets the activation, and sends its own sum."""
    routes = Routes([2, 2], every={"images": 2}, moves={(1, 1): 1})
    plan = lower(routed(multi_module_1f1b(ENCODER, 2), routes))
    verify(plan)
    assert sorted(kinds(plan, "RECV_F", 1)) == [(0, 1), (0, 4), (2, 4)]
    assert sorted(kinds(plan, "SEND_F", 0)) == [(0, 0), (2, 3)]


def test_uneven_replicas():
    plan = lower(routed(one_f_one_b(3, 5), Routes([5, 2, 0])))
    verify(plan)
    assert [len(kinds(plan, "F", stage)) for stage in range(3)] == [7, 7, 7]
    assert [str(action) for action in plan.actions(8)] == ["2REDUCE"]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: routed(lower(one_f_one_b(2, 2)), Routes([2, 1])), "give a plan of computes"),
        (lambda: routed(one_f_one_b(2, 3), Routes([2, 1])), "give a schedule of 2"),
        (lambda: routed(seq1f1b(2, 2, num_slices=2), Routes([2, 1])), "of whole microbatches"),
        (lambda: routed(routed(one_f_one_b(2, 2), Routes([2, 1])), Routes([2, 1])), "has routes"),
        (lambda: lower(routed(one_f_one_b(2, 2), Routes([2, 1])), collectives={Edge(0, 1): "g"}), "data is sent"),
        (lambda: lower(routed(one_f_one_b(2, 2), Routes([2, 1])), shard="step"), "neither gathers"),
        (lambda: lower(routed(one_f_one_b(2, 2), Routes([2, 1])), ahead=1), "beside routes"),
        (lambda: offload(routed(one_f_one_b(2, 4), Routes([4, 1])), 1.0), "nor offloads"),
    ],
)
def test_what_routes_do_not_go_with(make, match):
    with pytest.raises(PlanError, match=match):
        make()


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"routes": Routes([2, 2, 1])}, "positions"),
        ({"routes": Routes([1, 1, 2, 2])}, "microbatches"),
        ({"routes": Routes([3, 1], moves={(0, 5): 1})}, "routes.moves"),
    ],
)
def test_a_plan_that_its_routes_do_not_fit(changes, path):
    plan = routed(one_f_one_b(2, 3), Routes([3, 1]))
    with pytest.raises(PlanError) as caught:
        evolve(plan, **changes)
    assert caught.value.path == path


def test_a_routed_plan_on_paper():
    plan = lower(routed(one_f_one_b(2, 2), Routes([2, 2], moves={(2, 1): 0, (3, 1): 0}, dead=[Actor(1, 1)])))
    text = str(plan)
    assert "units 2 2\ndead 1@1\nmove 1 0@1>0 1@1>0\n" in text
    assert text.endswith("3:\n")
    with pytest.raises(PlanError, match="line 6: a move names stage 5; the graph has 0..1"):
        from_text(text.replace("move 1", "move 5"))


def test_random_plans_of_computes_verify_and_play():
    for seed in range(30):
        plan, options = random_routed(seed)
        verify(plan)
        lowered = lower(plan, **options)
        assert simulate(lowered).makespan >= simulate(plan).makespan - 1e-9
