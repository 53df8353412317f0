"""Waits of the host for collectives beside the plan: up to a deadline or a monitor's.

No backend tells who has joined a collective; of a `SmallAllGather`, memory does. Without a monitor, a rank that waits
for one longer than a moment writes the collective's name to a control store, so that an error can name the ranks that
are missing: the ranks of the group that have written no name, or another one, have not joined it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from pipegrid.topology import control_store
from pipegrid.topology.bounded_calls import bounded
from pipegrid.transport.collectives.differences import listed
from pipegrid.transport.collectives.gathering import gather_text
from pipegrid.transport.collectives.small_all_gather import SmallAllGather
from pipegrid.transport.collectives.waiting import NotDone, device_collectives, finish, host_collectives, lost_ranks
from pipegrid.transport.errors import CollectiveFailedError
from pipegrid.transport.streams import has_streams

if TYPE_CHECKING:
    from pipegrid.monitor.control import ControlStore
    from pipegrid.monitor.monitor import Monitor

REDUCTION = "a reduction of gradients"
Work = dist.Work | SmallAllGather
_T = TypeVar("_T")
_MOMENT_SECONDS = 1.0
_STORE_SECONDS = 0.5  # for a call of the store
_STORE_AGAIN_SECONDS = 10.0  # until one that was silent is asked again


@frozen
class Waiting:
    """Settings of waits for collectives beside the plan. On CUDA only the current stream waits, not the host."""

    deadline: float | None = None  # seconds for each collective; None leaves it to the group's own timeout
    monitor: Monitor | None = None  # of the job, whose deadline and failures then end a wait
    what: str = REDUCTION  # the collectives are, for errors
    of_step: bool = False  # whether a step waits, whose end records the first failure before it cuts the groups

    def wait(
        self, work: Work | None, tensor: torch.Tensor, group: dist.ProcessGroup | None, *, host: bool = False
    ) -> None:
        """Wait for ``work`` of ``group`` (None: the default one) on ``tensor``; ``host`` holds the host in any case.

        Raises:
            CollectiveFailedError: past the deadline; the backend lost a rank of the group; on a device, also that of a
                collective before.
            JobFailedError: with a monitor: another rank failed, or its deadline passed.
        """
        if work is None:
            return
        try:
            failed = self._finish(work, group, on_device=has_streams(tensor.device), host=host)
            if failed is not None:
                self._raise(failed, work, tensor, group)
        except BaseException:
            if not self.of_step:
                host_collectives.cut([group])
            raise

    def _raise(self, failed: NotDone, work: Work, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> NoReturn:
        if failed.why == "late":
            absent = self._absent(work, group) or f"one of the other ranks of {_ranks(group)} has not joined it"
            raise CollectiveFailedError(
                f"{self.what} did not end within the deadline of {self.deadline:.3g} s: {absent}; rebuild the process "
                "groups before the next step"
            )
        who = "" if failed.why == "aborted" else f"{_lost(group, tensor)} has ended, or closed its connection "
        raise CollectiveFailedError(f"{self.what} failed: {who}({failed.text})") from failed.error

    def _absent(self, work: Work, group: dist.ProcessGroup | None) -> str:
        """The ranks of ``group`` that have not joined, in words; empty where nothing tells."""
        ranks = _ranks(group)
        if not isinstance(work, SmallAllGather):
            return long_waits().absent(self.what, ranks)
        absent = [ranks[index] for index in work.missing()]
        return long_waits().absent(self.what, absent) or _lacking(absent)

    def _finish(self, work: Work, group: dist.ProcessGroup | None, *, on_device: bool, host: bool) -> NotDone | None:
        if (earlier := device_collectives.failed()) is not None:
            return NotDone.of(earlier[1])
        deadline = self.deadline if self.monitor is None else self.monitor.deadline or self.deadline
        if deadline is None or (on_device and not host) or not dist.is_initialized():
            if self.monitor is not None:
                return self.monitor.finish(work, group, self.what, on_device=on_device, host=host)
            return finish(work, group, on_device=on_device, host=host)
        began, said = time.monotonic(), False

        def look() -> None:
            nonlocal said
            if not said and time.monotonic() - began > min(_MOMENT_SECONDS, deadline / 2):
                said = True
                long_waits().begin(self.what)

        if self.monitor is None:
            failed = finish(work, group, on_device=on_device, host=host, end=began + deadline, given_up=look)
        else:
            failed = self.monitor.finish(
                work, group, self.what, on_device=on_device, host=host, deadline=deadline, look=look,
                absent=lambda: self._absent(work, group),
            )  # fmt: skip
        if failed is None and said:
            long_waits().end()
        return failed


@define(eq=False, slots=False)
class LongWaits:
    """One rank's access to the records of long waits; the store is connected at the first one."""

    rank: int
    _said: bool = field(default=False, init=False)
    _silent_until: float = field(default=0.0, init=False)

    def begin(self, what: str) -> None:
        """Record that this rank waits for ``what``."""
        self._said = True
        self._ask(self._write, json.dumps(what))

    def end(self) -> None:
        """Record that the wait has ended."""
        if self._said:
            self._said = False
            self._ask(self._write, "")

    def absent(self, what: str, ranks: Sequence[int]) -> str:
        """The ``ranks`` that have not joined ``what``, in words; empty where the store does not know."""
        said = self._ask(self._read, ranks) or {}
        apart: dict[str, list[int]] = {}
        for rank in ranks:
            other = said.get(rank, "")
            if rank != self.rank and said and other != what:
                apart.setdefault(other, []).append(rank)
        texts = [
            _lacking(those) + (f", and {'waits' if len(those) == 1 else 'wait'} for {other}" if other else "")
            for other, those in apart.items()
        ]
        return "; ".join(texts)

    def _ask(self, function: Callable[..., _T], *arguments: Any) -> _T | None:
        if time.monotonic() < self._silent_until:
            return None
        try:
            return bounded(function, *arguments, seconds=_STORE_SECONDS, name="pipegrid-waits", patience=0.0)
        except RuntimeError:  # the store is silent, or gone with its process: the error of the wait says less
            self._silent_until = time.monotonic() + _STORE_AGAIN_SECONDS
            return None

    @cached_property
    def _store(self) -> ControlStore:
        return control_store("long waits")

    def _write(self, text: str) -> None:
        self._store.set(f"wait/{self.rank}", text)

    def _read(self, ranks: Sequence[int]) -> dict[int, str]:
        store = self._store
        found = {rank: store.get(key).decode() for rank in ranks if store.check([key := f"wait/{rank}"])}
        return {rank: str(json.loads(text)) for rank, text in found.items() if text}


_of_job: WeakKeyDictionary[Any, LongWaits] = WeakKeyDictionary()


def long_waits() -> LongWaits:
    """The `LongWaits` of this process, which has a default process group."""
    world = dist.group.WORLD
    if world not in _of_job:
        _of_job[world] = LongWaits(dist.get_rank())
    return _of_job[world]


def texts_of_ranks(text: str, group: dist.ProcessGroup, device: torch.device, waiting: Waiting) -> dict[int, str]:
    """The ``text`` of each rank of ``group``, by rank of the world; the host waits for it."""
    return gather_text(text, group, device, lambda work, every: waiting.wait(work, every, group, host=True))


def _lacking(ranks: Sequence[int]) -> str:
    return f"{listed(ranks)} {'has' if len(ranks) == 1 else 'have'} not joined it"


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return list(dist.get_process_group_ranks(group)) if dist.is_initialized() else []


def _lost(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> str:
    lost = [] if group is None else lost_ranks(group, tensor.device.type)
    return f"rank {lost[0]}" if len(lost) == 1 else f"one of the ranks {lost or _ranks(group)}"
