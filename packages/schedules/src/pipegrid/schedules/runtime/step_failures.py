"""The end of a step that failed: lanes are ended, other ranks told, the first failure of the job is found and recorded.

A rank that fails passes its failure on through the lanes, as the reason for which they end.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from pipegrid.monitor import DisagreementError, Monitor, Report, first_failure
from pipegrid.plans.plan import Plan
from pipegrid.schedules.runtime.agreement import StepAgreement
from pipegrid.schedules.runtime.position import BoundPosition
from pipegrid.schedules.runtime.program import Cursor
from pipegrid.transport.base import Communicator
from pipegrid.transport.collectives.waiting import device_collectives
from pipegrid.transport.waits.aborts import device_aborts

_ABORT_SECONDS = 0.3
_MOST_FILES = 1000  # of one rank in one folder
_MARK = "first failure: "
_LONGEST = 500


class PipelineError(RuntimeError):
    r"""A step failed. The first line is the first failure: "rank 3, stage 2, microbatch 3: ValueError: ...".

    This rank's place in the plan and how the failure reached it follow; this rank's own error is chained.

    Examples:
        >>> from types import SimpleNamespace
        >>> stage = SimpleNamespace(forward=lambda microbatch, inputs: 1 / 0)
        >>> PipelineRuntime(from_text("microbatches 1\n0: 0F0 0B0"), {0: stage}, None).step()
        Traceback (most recent call last):
            ...
        pipegrid.schedules.runtime.step_failures.PipelineError: stage 0, microbatch 0: ZeroDivisionError: division
            by zero
          at position 0, step 1 of 2: 0F0
        No message is under way: rebuild the runtime before the next one
    """


def line_of(error: BaseException) -> str:
    """An error in one line, with its type: also one whose ``str()`` raises."""
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # noqa: BLE001 -- a broken error must not hide the step's failure
        text = f"(its text is not known: str() of it raised {type(broken).__name__})"
    kind = type(error).__name__
    return f"{kind}: {text}" if text else kind


def marked(reason: str) -> str:
    """A failure in a form in which `relayed` finds it again, whatever error wraps it on another rank."""
    return f"{_MARK}{reason.splitlines()[0][:_LONGEST]}"


def relayed(text: str) -> str | None:
    """The first failure that ``text`` passes on, None if it passes none on."""
    _, mark, cause = text.rpartition(_MARK)
    return cause if mark else None


def without(text: str) -> str:
    """``text`` without the failure that it passes on."""
    return text.partition(_MARK)[0].rstrip(": (")


def nccl_dump() -> Callable[[], bytes] | None:
    """Torch's dump of the NCCL flight recorder, as its watchdog writes it; None where this torch has none."""
    c10d = getattr(torch._C, "_distributed_c10d", None)  # noqa: SLF001 -- there is no public function
    return getattr(c10d, "_dump_nccl_trace", None)


@define(eq=False)
class FlightRecorder:
    """The record of one rank's failure, a JSON file of its own, with torch's NCCL flight recorder beside it.

    Without a ``folder``, which is made where it is missing, there is none. Torch writes the flight recorder where its
    own watchdog ends a process, which typed errors come before. What fails while it is taken or written never hides the
    failure.
    """

    folder: Path | None
    rank: int | None
    communicator: Communicator
    _lanes: Mapping[str, Any] = field(factory=dict, init=False)
    _trace: bytes | None = field(default=None, init=False)
    _taken: bool = field(default=False, init=False)

    def take(self) -> None:
        """Take what an abort ends: the queues of lanes, and the flight recorder, which polls the device."""
        if self.folder is None or self._taken:
            return
        self._taken = True
        try:
            self._lanes = self.communicator.describe()
            dump = nccl_dump()
            if dump is not None:
                device_aborts.poll(lambda: self._keep(dump()))
        except Exception as error:  # noqa: BLE001 -- see the class
            self._lanes = {**self._lanes, "not taken": line_of(error)}

    def _keep(self, trace: bytes) -> bool:
        self._trace = trace
        return True

    def record(self, plan: Plan, failure: str, stopped: str, place: str, report: Report | None = None) -> str:
        """Write that a step of ``plan`` ``stopped`` at ``place`` because of ``failure``.

        Returns a line for the error, with the file; an empty one without a folder.
        """
        if self.folder is None:
            return ""
        self.take()
        name = f"rank{0 if self.rank is None else self.rank}"
        record = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "first_failure": failure.splitlines()[0],
            "error": stopped,
            "place": place,
            "plan": plan.digest,
            "microbatches": plan.num_microbatches,
            "ranks": None if report is None else report.places.splitlines(),
            "lanes": self._lanes,
            "versions": _versions(),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self._write_new(name, json.dumps(record, indent=1, default=str))
            if self._trace is not None:
                path.with_name(f"nccl_trace_rank_{path.stem.removeprefix('rank')}").write_bytes(self._trace)
        except Exception as error:  # noqa: BLE001 -- see the class
            return f"\nThe failure was not recorded in {self.folder}: {line_of(error)}"
        explain = f"pipegrid explain {self.folder}"
        return f"\nRecorded in {path}; what all ranks recorded, and who holds the job up: {explain}"

    def _write_new(self, name: str, text: str) -> Path:
        """Write a file that an earlier attempt of the job does not have."""
        assert self.folder is not None
        for number in range(_MOST_FILES):
            path = self.folder / f"{name}{f'-{number}' if number else ''}.json"
            with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
                file.write(text)
                return path
        raise FileExistsError(f"it has {_MOST_FILES} files of this rank")


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    found["pipegrid-schedules"] = "not installed"
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["pipegrid-schedules"] = metadata.version("pipegrid-schedules")
    return found


@define(eq=False)
class StepFailures:
    """What a runtime does when a step fails.

    Attributes:
        alone: all stages are on this rank, so that there are no lanes to rebuild.
        first: the failure of this runtime, after which it runs no step; None while it works.
    """

    position: BoundPosition
    cursor: Cursor
    monitor: Monitor | None
    agreement: StepAgreement
    recorder: FlightRecorder
    alone: bool
    first: str | None = field(default=None, init=False)

    def require_none(self) -> None:
        """Raise PipelineError if an earlier step has failed."""
        if self.first is not None:
            raise PipelineError(f"this runtime failed before: {self.first.splitlines()[0]}. {self._remedy}")

    def look(self) -> None:
        """Note what has failed since the last step returned: a transfer, or a collective of a device."""
        if self.first is None:
            try:
                device_collectives.check()
                self.position.communicator.check()
            except RuntimeError as error:
                self.first = f"{self.cursor.who}: {line_of(error)}"

    def abort(self, reason: str) -> None:
        """End the lanes and all device groups, and pass the reason on to neighbours, for no longer than 0.3 s."""
        self.recorder.take()
        reason = marked(relayed(reason) or reason)
        tell = self.position.communicator.abort
        thread = threading.Thread(target=tell, args=(reason,), name="pipegrid-abort", daemon=True)
        thread.start()  # tells the neighbours while the groups are aborted
        device_collectives.abort(reason)
        thread.join(_ABORT_SECONDS)

    def end(self, error: BaseException) -> BaseException:
        """End what a failed step has begun; the error to raise."""
        self.recorder.take()
        here, place, stopped = self.cursor.who, self.cursor.where, line_of(error)
        cause = relayed(stopped)
        # Before the lanes end, which carry what neighbours say of their step.
        different = None if isinstance(error, DisagreementError) else self.agreement.look_again(cause)
        failure = f"{here}: {stopped}\n  at {place}"
        if isinstance(error, DisagreementError):
            failure = str(error)
        elif cause is not None:
            failure = f"{cause}\n  {here} stopped at {place}: {without(stopped)}"
        self.position.drop()  # so that what the step held is not held until the runtime goes
        report = None if self.monitor is None else self.monitor.failed(failure)
        if report is not None:
            first = report.first.text
        else:  # before the abort, so that ranks which it reaches find it
            first = first_failure(failure, self.position.communicator.attempt)
            self.abort(first.splitlines()[0])
        if first != failure and not isinstance(error, DisagreementError):
            failure = f"{first.splitlines()[0]}\n  {here} stopped at {place}: {without(stopped)}"
        self.first = failure
        recorded = self.recorder.record(self.cursor.plan, failure, stopped, place, report)
        places = "" if report is None else f"\nThe ranks were at:\n{report.places}"
        if isinstance(error, DisagreementError) or not isinstance(error, Exception):
            return error
        if different is not None:
            self.first = f"{different}. This rank had begun, and stopped at {place}"
            return DisagreementError(f"{self.first}{places}")
        return PipelineError(f"{failure}\n{self._remedy}{recorded}{places}")

    @property
    def _remedy(self) -> str:
        if self.alone:
            return "No message is under way: rebuild the runtime before the next one"
        return (
            "Lanes may hold messages of the broken step: rebuild the communicator and the runtime before the next one"
        )
