"""Our runtime beside its peers on one job: made, tried, held against each other, then timed by turns."""

from __future__ import annotations

import torch
import torch.distributed as dist
from attrs import define, field

from pipegrid.core.errors import StepArgumentError
from runtime_parts.job import SAME, Job, difference
from runtime_parts.runners import Floor, Ours, Runner, Torch
from runtime_parts.timing import Outcome, RunnerError, by_turns, timed

WARMUP = 2


@define
class Compared:
    """The runners of a job that work, and why the others do not."""

    job: Job
    ours: Ours
    runners: dict[str, Runner] = field(factory=dict)
    notes: dict[str, str] = field(factory=dict)

    def time(self, rounds: int) -> Outcome:
        """Steps by turns."""
        return Outcome(by_turns(self.runners, rounds, before=self.job.forget_gradients), self.notes)


def compare(job: Job, *, floor: bool) -> Compared | Outcome:
    """Make and try the runners; an outcome with a note alone where ours cannot run the plan.

    A peer whose gradients differ from ours and from the hand-written loop's stays in, with a note that says so.

    Raises:
        AssertionError: ours and the hand-written loop have different gradients.
    """
    try:
        ours = Ours(job)
    except StepArgumentError as error:
        return Outcome({}, {"ours": f"cannot run it: {error}"})
    compared = Compared(job, ours, {"ours": ours})
    expected = _tried(job, ours)
    if floor:
        compared.runners["floor"] = loop = Floor(job, ours.communicator)
        found = difference(expected, _tried(job, loop))
        assert found < SAME, f"the hand-written loop's gradients differ from ours by {found:.2g}"
    if "fake_nccl" in dist.get_backend_config(dist.group.WORLD):
        compared.notes["torch"] = "not measured over the fake NCCL, whose groups batch no calls of torch's"
        return compared
    try:
        peer = Torch(job)
        found = difference(expected, _tried(job, peer))
    except RunnerError as error:
        compared.notes["torch"] = f"does not run: {_first_line(error)}"
    else:
        compared.runners["torch"] = peer
        worst = torch.tensor(found)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if worst > SAME:
            compared.notes["torch"] = f"wrong gradients: relative difference {float(worst):.2g}"
    return compared


def _tried(job: Job, runner: Runner) -> list[torch.Tensor | None]:
    for _ in range(WARMUP):
        job.forget_gradients()
        timed(runner)
    return job.gradients()


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:100] if text else type(error).__name__
