"""Step functions with routes: uneven replicas, microbatches that skip a module, calls for several microbatches."""

from __future__ import annotations

import pytest

from pipegrid.schedules import SCHEDULES, Routes

from .kit.routed import Job, OnRanks

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
@pytest.mark.parametrize("job", [BESIDE, COLOCATED], ids=["beside", "colocated"])
def test_every_schedule_around_an_encoder_has_the_gradients_of_one_process(ranks, job, schedule):
    job = OnRanks(job.of(schedule), ranks)
    job.check(Routes([4, 2], skips={"images": [1, 4]}))
    job.check(Routes([4, 4], skips={"images": [0, 1, 2, 3, 6]}), by_unit=True)
    job.check(Routes([4, 3], skips={"images": [1]}, every={"images": 2}))
    job.communicator.close()
