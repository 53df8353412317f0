"""The record of a step that failed: a JSON file of each rank, and torch's NCCL flight recorder beside it.

Torch writes the flight recorder where its own watchdog ends a process, which typed errors come before.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from pipegrid.monitor import Report
from pipegrid.plans.plan import Plan
from pipegrid.schedules.runtime.failures import line_of
from pipegrid.transport.base import Communicator
from pipegrid.transport.waits.aborts import device_aborts

_MOST_FILES = 1000  # of one rank in one folder


def nccl_dump() -> Callable[[], bytes] | None:
    """Torch's dump of the NCCL flight recorder, as its watchdog writes it; None where this torch has none."""
    c10d = getattr(torch._C, "_distributed_c10d", None)  # noqa: SLF001 -- there is no public function
    return getattr(c10d, "_dump_nccl_trace", None)


@define(eq=False)
class FlightRecorder:
    """The record of one rank's failure; without a ``folder``, which is made where it is missing, there is none.

    A rank writes files of its own only, so that several may fail at once. What fails while it is taken or written never
    hides the failure.
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
