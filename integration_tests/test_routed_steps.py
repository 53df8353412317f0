"""Step functions with routes: uneven replicas, microbatches that skip a module, calls for several microbatches."""

from __future__ import annotations

import threading

import pytest
from attrs import evolve

from pipegrid.schedules import (
    SCHEDULES,
    Actor,
    DisagreementError,
    PipelineError,
    Routes,
    StepArgumentError,
    reroute,
    step_plan,
)
from pipegrid.schedules.megatron import place, prepared

from .kit.routed import Across, Job, OneGrid, OnRanks

CHAIN = Job(4, {"model": (0, {"dp": 2, "pp": 2})}, {})
BESIDE = Job(4, {"images": (0, {"dp": 2}), "text": (2, {"dp": 2})}, {"images": ["text"]}, own_loss="images")
COLOCATED = Job(4, {"images": (0, {"dp": 2}), "text": (0, {"dp": 2, "pp": 2})}, {"images": ["text"]}, own_loss="images")
FROZEN = evolve(BESIDE, frozen=("images",), own_loss=None)
TOKENS = Job(4, BESIDE.places, BESIDE.flow, per_token=True)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("by_unit", [False, True], ids=["iterator", "by unit"])
def test_replicas_with_unequal_numbers_of_microbatches(ranks, by_unit):
    job = OnRanks(CHAIN, ranks)
    for units in ([4, 3], [1, 5], [3, 3], [0, 2]):
        job.check(Routes(units), by_unit=by_unit)
    job.communicator.close()


@pytest.mark.few(4)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("job", [BESIDE, COLOCATED, TOKENS, FROZEN], ids=["beside", "colocated", "per token", "frozen"])
@pytest.mark.parametrize("by_unit", [False, True], ids=["iterator", "by unit"])
def test_microbatches_without_images_skip_the_encoder(ranks, job, by_unit):
    """Other ones in each step, all of a replica's, and all of the job's, over one communicator."""
    job = OnRanks(job, ranks)
    for units, skips in (([3, 2], [0, 1, 2]), ([3, 3], [1, 3]), ([2, 2], []), ([2, 2], [0, 1, 2, 3]), ([4, 1], [2])):
        job.check(Routes(units, skips={"images": skips}), by_unit=by_unit)
    job.communicator.close()


@pytest.mark.few(4)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("job", [BESIDE, COLOCATED, TOKENS], ids=["beside", "colocated", "per token"])
@pytest.mark.parametrize("by_unit", [False, True], ids=["iterator", "by unit"])
def test_a_call_of_the_encoder_serves_several_microbatches(ranks, job, by_unit):
    """The last call of a replica may serve fewer, and some of them may skip it."""
    job = OnRanks(job, ranks)
    for units, skips, every in (([4, 3], [], 2), ([4, 3], [0, 3, 4, 5], 2), ([3, 3], [1], 3), ([2, 5], [], 4)):
        job.check(Routes(units, skips={"images": skips}, every={"images": every}), by_unit=by_unit)
    job.communicator.close()


@pytest.mark.ranks(4)
def test_uneven_replicas_of_a_tied_parameter(ranks):
    job = OnRanks(evolve(CHAIN, tied=True), ranks)
    job.check(Routes([4, 2]))
    job.communicator.close()


@pytest.mark.ranks(4)
def test_an_evaluation_runs_the_forwards_of_its_units(ranks):
    job = OnRanks(BESIDE, ranks)
    routes = Routes([3, 2], skips={"images": [1, 3]}, every={"images": 2})
    infos = job.step(routes, forward_only=True)
    assert infos == (list(routes.units_of(job.replica)) if "text" in job.groups else [])
    assert all(model.weight.grad is None for model in job.models.values())
    job.communicator.close()


@pytest.mark.ranks(4)
def test_other_routes_in_each_step_leave_nothing_behind(ranks):
    """Neither prepared steps and proofs beyond a few, nor threads, lanes or groups."""
    job = Across(CHAIN, ranks)
    place._routed_proof.cache_clear()
    held = []
    for number in range(14):
        job.step(Routes([4, 3], moves={(number % 7, number % 2): int(number % 7 < 4)}), by_unit=True)
        model = next(iter(job.models.values()))
        threads = [thread.name for thread in threading.enumerate()]
        of_lanes = {name for name in threads if name.startswith("pipegrid-lane-")}  # made by the first long wait
        assert len(of_lanes) <= len(job.communicator.lanes)
        held.append((len(job.communicator.lanes), sorted(set(threads) - of_lanes), len(threads) - len(of_lanes)))
        assert len(prepared._STEPS[model]) == min(number + 1, 8)
        assert place._routed_proof.cache_info().currsize == min(number + 1, 8)
    assert all(each == held[4] for each in held[4:]), held
    ranks.barrier()  # a rank that closes ends threads of its neighbours, which may not have counted theirs
    job.communicator.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("moves", [{}, {(0, 1): 1}], ids=["at home", "moved"])
def test_replicas_with_other_routes_fail_before_the_first_byte(ranks, moves):
    job = Across(CHAIN, ranks)
    routes = Routes([4, 3], moves=moves)
    other = routes if job.replica == 0 else Routes([3, 3], moves=moves)
    with pytest.raises((PipelineError, DisagreementError), match=f"have other routes: .*{other.digest}"):
        job.step(other, by_unit=True)
    assert all(model.weight.grad is None for model in job.models.values())
    ranks.barrier()
    job.communicator.close()


@pytest.mark.ranks(4)
def test_a_plain_iterator_where_units_move_and_other_numbers_are_errors(ranks):
    job = Across(CHAIN, ranks)
    with pytest.raises(StepArgumentError, match="by the routes replica .* has"):
        job.step(Routes([4, 3]), by_unit=True, num_microbatches=5)
    with pytest.raises(StepArgumentError, match=r"stage \d does not compute all microbatches of replica"):
        job.step(Routes([4, 3], moves={(0, 0): 1, (0, 1): 1}))
    ranks.barrier()
    job.communicator.close()


@pytest.mark.ranks(4)
def test_units_move_between_replicas(ranks):
    """Over one communicator: other moves in each step, there and back, and steps without any in between."""
    job = Across(CHAIN, ranks)
    for moves in ({(0, 1): 1}, {(4, 0): 0, (5, 1): 0}, {}, {(0, 0): 1, (0, 1): 1, (6, 1): 0}):
        job.check(Routes([4, 3], moves=moves), by_unit=True)
    job.communicator.close()


@pytest.mark.few(4)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("dead", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
@pytest.mark.parametrize(
    "job",
    [CHAIN, evolve(CHAIN, per_token=True), evolve(CHAIN, tied=True)],
    ids=["mean", "per token", "tied"],
)
def test_survivors_have_the_gradients_of_all_units(ranks, job, dead):
    """Of the same units as before the death, on one communicator; the dead rank does not take part."""
    job = Across(job, ranks)
    undisturbed = Routes([3, 4])
    job.check(undisturbed, by_unit=True)
    position, replica = dead
    if job.bury({position * 2 + replica}):
        job.check(reroute(undisturbed, [Actor(position, replica)]), by_unit=True)
    ranks.barrier()
    job.communicator.close()


WIDER = Job(6, {"images": (0, {"dp": 2}), "text": (2, {"tp": 2, "dp": 2})}, {"images": ["text"]})
BRANCHED = Job(6, {"a": (0, {"dp": 2}), "b": (2, {"dp": 2}), "text": (4, {"dp": 2})}, {"a": ["text"], "b": ["text"]})


def moved(ranks, job, kind, dead):
    """Steps in which units move and skip the encoder, and one around ``dead``, over one communicator."""
    job = kind(job, ranks)
    first = job.graph.order[0]
    last = job.graph.num_stages - 1
    for moves, skips in (
        ({(0, 0): 1, (4, last): 0}, {}),
        ({}, {first: [1]}),
        ({(5, 0): 0, (5, last): 0}, {first: [0, 4]}),
    ):
        job.check(Routes([4, 3], moves=moves, skips=skips), by_unit=True)
    plan = step_plan(job.graph, 4, placement=job.communicator.job.placement)
    routes = reroute(Routes([4, 3], skips={first: [2, 5]}), [Actor(*dead)], plan=plan)
    grid = [*job.grids.values()][dead[0]]
    gone = {rank for rank in grid.ranks if grid.coords(rank)["dp"] == dead[1]}
    if job.bury(gone):
        job.check(routes, by_unit=True)
    ranks.barrier()
    job.communicator.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dead", [(0, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("kind", [Across, OneGrid], ids=["a bridge", "one grid"])
def test_units_of_two_modules_move_between_replicas(ranks, kind, dead):
    moved(ranks, BESIDE, kind, dead)


@pytest.mark.ranks(4)
@pytest.mark.nightly
@pytest.mark.parametrize("dead", [(0, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("job", [FROZEN, TOKENS], ids=["frozen", "per token"])
def test_units_of_a_frozen_encoder_and_of_losses_per_token_move_over_a_bridge(ranks, job, dead):
    moved(ranks, job, Across, dead)


@pytest.mark.ranks(6)
@pytest.mark.parametrize("dead", [(0, 1), pytest.param((1, 0), marks=pytest.mark.nightly)], ids=str)
def test_units_move_over_a_bridge_to_more_tensor_parallel_ranks(ranks, dead):
    moved(ranks, WIDER, Across, dead)


@pytest.mark.ranks(6)
@pytest.mark.nightly
@pytest.mark.parametrize("kind", [Across, OneGrid], ids=["bridges", "one grid"])
@pytest.mark.parametrize("dead", [(0, 1), (1, 0), (2, 0)], ids=str)
def test_units_of_a_graph_that_branches_move_between_replicas(ranks, kind, dead):
    moved(ranks, BRANCHED, kind, dead)


NAMED = [name for name, schedule in SCHEDULES.items() if schedule.trains and not schedule.sliced]
IN_EVERY_RUN = ("zero_bubble_h1", "zero_bubble_v")


def in_a_few(names):
    """All of ``names``, most of them of the night."""
    return [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.nightly) for name in names]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", in_a_few(NAMED))
def test_every_schedule_has_the_gradients_of_one_process(ranks, schedule):
    job = OnRanks(CHAIN.of(schedule), ranks)
    for units in ([4, 3], [2, 4]):
        job.check(Routes(units))
    job.communicator.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", in_a_few(NAMED))
def test_every_schedule_around_a_dead_rank_has_the_gradients_of_one_process(ranks, schedule):
    job = Across(CHAIN.of(schedule), ranks)
    plan = step_plan(job.graph, 4, placement=tuple((place,) for place in job.places), schedule=schedule)
    routes = reroute(Routes([4, 3]), [Actor(1, 0)], plan=plan)
    if job.bury({2}):
        job.check(routes, by_unit=True)
    ranks.barrier()
    job.communicator.close()


@pytest.mark.few(4)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", in_a_few(NAMED))
@pytest.mark.parametrize("job", [BESIDE, COLOCATED], ids=["beside", "colocated"])
def test_every_schedule_around_an_encoder_has_the_gradients_of_one_process(ranks, job, schedule):
    job = OnRanks(job.of(schedule), ranks)
    job.check(Routes([4, 2], skips={"images": [1, 4]}))
    job.check(Routes([4, 4], skips={"images": [0, 1, 2, 3, 6]}), by_unit=True)
    job.check(Routes([4, 3], skips={"images": [1]}, every={"images": 2}))
    job.communicator.close()
