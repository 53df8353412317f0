"""A run that is saved as it goes, resumed where it was, and guarded against signals and restarts without progress."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import define

from digit_reader.job import Job
from digit_reader.samples import Position
from pipegrid.training import Attempt, CheckpointError, Checkpoints, TrainingState


@define(kw_only=True)
class SavedRun:
    """The guard of one rank's training loop.

    Attributes:
        position: what the next step reads.
        first: steps that are done already.
        attempt: None where the run is neither saved nor resumed.
    """

    every: int
    steps: int
    position: Position
    first: int = 0
    state: TrainingState | None = None
    checkpoints: Checkpoints | None = None
    attempt: Attempt | None = None

    def completed(self, step: int) -> bool:
        """Note that ``step`` steps are done, and save where it is time; True on all ranks if a signal stops the run."""
        if self.attempt is None or self.checkpoints is None or self.state is None:
            return False
        stopping = self.attempt.completed(step)
        if stopping or (self.every and (step % self.every == 0 or step == self.steps)):
            self.checkpoints.save(self.state, step=step, blocking=False)
        return stopping


@contextlib.contextmanager
def saved_run(job: Job, optimizer: torch.optim.Optimizer) -> Iterator[SavedRun]:
    """Resume as the options say, and guard the block; all ranks together.

    Raises:
        RestartError: the launcher has started a run again that makes no progress, or that a signal has stopped.
    """
    options, position = job.options, Position(job.options.seed)
    if not options.guarded:
        yield SavedRun(every=0, steps=options.steps, position=position)
        return
    state = training_state(job, optimizer, position)
    with Attempt(options.checkpoints, monitor=job.monitor) as attempt:
        checkpoints = Checkpoints(options.checkpoints, timeout=timedelta(seconds=max(options.deadline, 60.0)))
        yield SavedRun(
            every=options.checkpoint_every,
            steps=options.steps,
            position=position,
            first=attempt.begin(resume(job, state, checkpoints)),
            state=state,
            checkpoints=checkpoints,
            attempt=attempt,
        )
        checkpoints.close()  # waits for the last save; a failed block does not, for a dead rank may be part of it


def training_state(job: Job, optimizer: torch.optim.Optimizer, position: Position) -> TrainingState:
    """What a checkpoint holds. Parameters are called by their layers' global ids already (`digit_reader.parts`)."""
    stages: dict[str, dict[int, torch.nn.Module]] = {}
    for number, stage in job.stages.items():
        module, index = job.communicator.graph.module_of(number)
        stages.setdefault(module, {})[index] = stage.part
    return TrainingState(
        stages=stages,
        optimizers=[optimizer],
        data=position,
        plan=job.plan,
        grids=job.grids,
        layout=job.options.layout,
    )


def resume(job: Job, state: TrainingState, own: Checkpoints | None) -> int:
    """Fill ``state`` from the newest checkpoint that the options name, of this run or another; the steps that are done.

    Raises:
        CheckpointError: the options name the directory of another run, and no checkpoint is in it.
    """
    where = job.options.resume
    if where == "never":
        return 0
    if where == "auto":
        found = None if own is None else own.load(state)
    else:
        with contextlib.closing(Checkpoints(Path(where))) as others:
            found = others.load(state)
        if found is None:
            raise CheckpointError(f"--resume: {where} has no checkpoint, a folder such as save-0007-step-00000100")
    if found is None:
        return 0
    if dist.get_rank() == job.teller:
        print(f"resumed after step {found.step} from {found.path}", flush=True)
    return found.step
