"""Step functions with routes: uneven replicas, microbatches that skip a module, calls for several microbatches."""

from __future__ import annotations

import pytest
from attrs import evolve

from pipegrid.schedules import SCHEDULES, Actor, Routes, reroute, step_plan

from .kit.routed import Across, Job, OnRanks

CHAIN = Job(4, {"model": (0, {"dp": 2, "pp": 2})}, {})
BESIDE = Job(4, {"images": (0, {"dp": 2}), "text": (2, {"dp": 2})}, {"images": ["text"]}, own_loss="images")
COLOCATED = Job(4, {"images": (0, {"dp": 2}), "text": (0, {"dp": 2, "pp": 2})}, {"images": ["text"]}, own_loss="images")
TOKENS = Job(4, BESIDE.places, BESIDE.flow, per_token=True)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("by_unit", [False, True], ids=["iterator", "by unit"])
def test_replicas_with_unequal_numbers_of_microbatches(ranks, by_unit):
    job = OnRanks(CHAIN, ranks)
    for units in ([4, 3], [1, 5], [3, 3], [0, 2]):
        job.check(Routes(units), by_unit=by_unit)
    job.communicator.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("job", [BESIDE, COLOCATED, TOKENS], ids=["beside", "colocated", "per token"])
@pytest.mark.parametrize("by_unit", [False, True], ids=["iterator", "by unit"])
def test_microbatches_without_images_skip_the_encoder(ranks, job, by_unit):
    """Other ones in each step, all of a replica's, and all of the job's, over one communicator."""
    job = OnRanks(job, ranks)
    for units, skips in (([3, 2], [0, 1, 2]), ([3, 3], [1, 3]), ([2, 2], []), ([2, 2], [0, 1, 2, 3]), ([4, 1], [2])):
        job.check(Routes(units, skips={"images": skips}), by_unit=by_unit)
    job.communicator.close()


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
def test_units_move_between_replicas(ranks):
    """Over one communicator: other moves in each step, there and back, and steps without any in between."""
    job = Across(CHAIN, ranks)
    for moves in ({(0, 1): 1}, {(4, 0): 0, (5, 1): 0}, {}, {(0, 0): 1, (0, 1): 1, (6, 1): 0}):
        job.check(Routes([4, 3], moves=moves), by_unit=True)
    job.communicator.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dead", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("job", [CHAIN, evolve(CHAIN, per_token=True)], ids=["mean", "per token"])
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


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", in_a_few(NAMED))
@pytest.mark.parametrize("job", [BESIDE, COLOCATED], ids=["beside", "colocated"])
def test_every_schedule_around_an_encoder_has_the_gradients_of_one_process(ranks, job, schedule):
    job = OnRanks(job.of(schedule), ranks)
    job.check(Routes([4, 2], skips={"images": [1, 4]}))
    job.check(Routes([4, 4], skips={"images": [0, 1, 2, 3, 6]}), by_unit=True)
    job.check(Routes([4, 3], skips={"images": [1]}, every={"images": 2}))
    job.communicator.close()
