"""The record of a run's attempts: a line for each in a file beside the checkpoints. No torch.

A line has a fixed width and is written in place, so that a step costs one small write, and a rank that is killed has
already said how far it came.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from attrs import asdict, define, evolve, frozen

from pipegrid.core.fields import Index, checked_fields, instance, integer
from pipegrid.core.strict_json import read_json
from pipegrid.training.errors import RestartError

PREEMPTED: Final = 75
"""Exit code of every rank after a signal: saved, start the run again (``EX_TEMPFAIL`` of sysexits.h)."""
NO_PROGRESS: Final = 70
"""Exit code of every rank of a run that fails at one step again and again (``EX_SOFTWARE`` of sysexits.h)."""
FILE: Final = "attempts.jsonl"
_WIDTH: Final = 160  # bytes of a line

End = Literal["", "preempted", "finished"]  # how an attempt ended; empty: it runs, or it failed


@frozen(kw_only=True, field_transformer=checked_fields(ValueError))
class AttemptRecord:
    """One attempt. ``step``: steps that all ranks have completed, those before it included; -1: no state is loaded."""

    launch: Annotated[str, instance(str, "a string")]  # of which start of the launcher; its restarts have the same
    restart: Index  # how often the launcher had restarted the ranks before
    step: Annotated[int, integer(-1)] = -1
    end: End = ""


def read_attempts(directory: Path) -> list[AttemptRecord]:
    """The attempts so far, oldest first, without a line cut by a power failure; `OSError`: it is no regular file."""
    try:
        with os.fdopen(_opened(directory / FILE, os.O_RDONLY), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return []
    found = []
    for start in range(0, len(data), _WIDTH):
        try:
            found.append(AttemptRecord(**read_json(data[start : start + _WIDTH].decode())))
        except (ValueError, TypeError):
            continue  # cut by a power failure: what it said is lost, the others count
    return found


def reason_to_stop(attempts: Sequence[AttemptRecord], now: AttemptRecord, *, limit: int) -> RestartError | None:
    """Why ``now``, a restart after ``attempts``, must not run; None if it may, as the first of a launch always."""
    begun = next((at for at, one in enumerate(attempts) if one.launch == now.launch), len(attempts))
    # Another launch since then is of a second run in the directory, by mistake: its failures are not this one's.
    attempts = [one for at, one in enumerate(attempts) if at < begun or one.launch == now.launch]
    if now.restart == 0 or not attempts:
        return None
    last = attempts[-1]
    if last.end == "preempted" and last.launch == now.launch:
        return RestartError(
            f"the run was stopped by a signal and saved after step {last.step}; this restart ends at once. "
            "Start the launcher again to resume",
            exit_code=PREEMPTED,
        )
    failures = 0
    for attempt in reversed(attempts):
        if attempt.end or attempt.step > last.step:
            break
        failures += attempt.step == last.step
    if last.end or failures < limit:
        return None
    where = "before its first step" if last.step < 0 else f"at step {last.step + 1}"
    return RestartError(
        f"the run has failed {where} in {failures} attempts without getting further (limit {limit}); it is not tried "
        "again. Look at the first failure of the last attempt; once its cause is gone, start the launcher again",
        exit_code=NO_PROGRESS,
    )


def _opened(path: Path, flags: int) -> int:
    """The descriptor of a regular file: not of what a link or a pipe in its place leads to."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{path} is no regular file")


@define
class AttemptLine:
    """The line of the attempt that runs, on the one rank that writes it."""

    record: AttemptRecord
    descriptor: int
    offset: int

    @classmethod
    def append(cls, directory: Path, record: AttemptRecord) -> AttemptLine:
        """Add a line for an attempt that starts."""
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = _opened(directory / FILE, os.O_WRONLY | os.O_CREAT)
        line = cls(record, descriptor, -(-os.fstat(descriptor).st_size // _WIDTH) * _WIDTH)
        line.update(step=record.step)
        return line

    @classmethod
    def at(cls, directory: Path, offset: int) -> AttemptLine:
        """The line of the attempt that runs, of which the rank that wrote it is dead; not that of a second run."""
        descriptor = _opened(directory / FILE, os.O_RDWR)
        return cls(AttemptRecord(**read_json(os.pread(descriptor, _WIDTH, offset).decode())), descriptor, offset)

    def update(self, *, step: int | None = None, end: End = "") -> None:
        """Write how far the attempt is, or how it ended."""
        self.record = evolve(self.record, step=self.record.step if step is None else step, end=end)
        text = json.dumps(asdict(self.record)).ljust(_WIDTH - 1) + "\n"
        os.pwrite(self.descriptor, text.encode(), self.offset)

    def close(self) -> None:
        """Write no more."""
        os.close(self.descriptor)
