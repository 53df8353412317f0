"""How much of the link's time a schedule hides: the same step with the link and without."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from attrs import frozen

from digit_reader.encoder import IMAGE_TOKENS
from digit_reader.vocabulary import TEXT_LENGTH
from edge_cloud.job import Job, plans
from edge_cloud.link import Link
from edge_cloud.reader import SIZES
from pipegrid.schedules import Costs, Plan, Recorder, Recording, recorded_costs


@frozen
class Measured:
    """Median seconds of a step under one schedule, with the link and without, and of all messages on the link."""

    name: str
    with_link: float
    without: float
    on_link: float

    @property
    def hidden(self) -> float:
        """Which part of the messages' time the step did not wait for."""
        return 1.0 - (self.with_link - self.without) / self.on_link


def message_bytes(samples: int, dtype: torch.dtype) -> int:
    """Bytes of an activation of so many samples, and of its gradient."""
    return samples * (IMAGE_TOKENS + TEXT_LENGTH) * SIZES.hidden * dtype.itemsize


def seconds_on_link(link: Link, microbatches: int, nbytes: int) -> float:
    """What all messages of a step take one by one: out and back, activation and gradient."""
    return 4 * microbatches * link.seconds(nbytes)


def measured_costs(job: Job, plan: Plan, microbatches: Sequence[range], link: Link, nbytes: int) -> Costs:
    """Each stage's forward and backward as a step without the link takes them; the link as it is declared.

    Only times leave a rank, and every rank gets the same costs.
    """
    recorder = Recorder()
    job.step(plan, microbatches, recorder=recorder)  # the first step warms up
    job.step(plan, microbatches, recorder=recorder)
    track = recorder.track(plan, rank=dist.get_rank(), position=job.communicator.stage)
    tracks = [track] * dist.get_world_size()
    dist.all_gather_object(tracks, track)
    costs = recorded_costs(Recording(plan, tracks))
    return Costs(F=costs.F, B=costs.B, latency=link.delay, message=float(nbytes), bandwidth=link.bandwidth)


def measure(job: Job, link: Link, *, microbatches: int, samples: int, rounds: int) -> list[Measured]:
    """Time both schedules in turns, with the link and without; the same on every rank but for the clock."""
    dtype = next(next(iter(job.modules.values())).parameters()).dtype
    nbytes = message_bytes(samples, dtype)
    batch = [range(index * samples, (index + 1) * samples) for index in range(microbatches)]
    job.over_link.link = None
    free = Costs(latency=0.0)
    costs = measured_costs(job, plans(microbatches, free)["1f1b"], batch, link, nbytes)
    compared = plans(microbatches, costs)
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in range(rounds):
        for name, plan in compared.items():
            for there in (False, True):
                job.over_link.link = link if there else None
                times.setdefault((name, there), []).append(job.step(plan, batch)[1])
    return [
        Measured(
            name,
            statistics.median(times[name, True]),
            statistics.median(times[name, False]),
            seconds_on_link(link, microbatches, nbytes),
        )
        for name in compared
    ]
