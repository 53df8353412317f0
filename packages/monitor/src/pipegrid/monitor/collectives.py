"""Waits of the host for collectives beside the plan: up to a deadline or a monitor's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from attrs import frozen

from pipegrid.monitor.long_waits import long_waits
from pipegrid.transport.collectives.differences import listed
from pipegrid.transport.collectives.gathering import gather_text
from pipegrid.transport.collectives.rows import Rows
from pipegrid.transport.collectives.waiting import NotDone, device_collectives, finish, host_collectives, lost_ranks
from pipegrid.transport.errors import CollectiveFailedError
from pipegrid.transport.streams import has_streams

if TYPE_CHECKING:
    from pipegrid.monitor.monitor import Monitor

_MOMENT_SECONDS = 1.0
REDUCTION = "a reduction of gradients"
Work = dist.Work | Rows


@frozen
class Waiting:
    """Settings of waits for collectives beside the plan. On CUDA only the current stream waits, not the host.

    Attributes:
        deadline: seconds for each collective; None leaves it to the group's own timeout.
        monitor: of the job, whose deadline and failures then end a wait.
        what: the collectives are, for errors.
        of_step: whether a step waits, whose end records the first failure before it cuts the groups.
    """

    deadline: float | None = None
    monitor: Monitor | None = None
    what: str = REDUCTION
    of_step: bool = False

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
        if not isinstance(work, Rows):
            return long_waits().absent(self.what, ranks)
        absent = [ranks[index] for index in work.missing()]
        has = f"{listed(absent)} {'has' if len(absent) == 1 else 'have'}"
        return long_waits().absent(self.what, absent) or f"{has} not joined it"

    def _finish(self, work: Work, group: dist.ProcessGroup | None, *, on_device: bool, host: bool) -> NotDone | None:
        earlier = device_collectives.failed()
        if earlier is not None:
            _, error = earlier
            return NotDone.of(error)
        deadline = self.deadline if self.monitor is None else self.monitor.deadline or self.deadline
        if deadline is None or (on_device and not host) or not dist.is_initialized():
            if self.monitor is not None:
                return self.monitor.finish(work, group, self.what, on_device=on_device, host=host)
            return finish(work, group, on_device=on_device, host=host)
        began = time.monotonic()
        said = False

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


def texts_of_ranks(text: str, group: dist.ProcessGroup, device: torch.device, waiting: Waiting) -> dict[int, str]:
    """The ``text`` of each rank of ``group``, by rank of the world; the host waits for it."""
    return gather_text(text, group, device, lambda work, every: waiting.wait(work, every, group, host=True))


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return list(dist.get_process_group_ranks(group)) if dist.is_initialized() else []


def _lost(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> str:
    lost = [] if group is None else lost_ranks(group, tensor.device.type)
    return f"rank {lost[0]}" if len(lost) == 1 else f"one of the ranks {lost or _ranks(group)}"
