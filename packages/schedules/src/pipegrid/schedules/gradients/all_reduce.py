"""All-reduces of gradients: started in place, and waited for up to a deadline or a monitor's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import frozen

from pipegrid.schedules.monitor import JobFailedError, device_collectives
from pipegrid.transport.streams import has_streams
from pipegrid.transport.waits.aborts import GroupAbortedError, device_aborts

if TYPE_CHECKING:
    from pipegrid.schedules.monitor import Monitor

_SLICE = timedelta(seconds=0.1)
_POLL_SECONDS = 0.0001
_LONGEST = 600  # characters of a backend's text, which may pass on the first failure
_PROBE = 2**29  # a tag of no message
_REDUCTION = "a reduction of gradients"


class ReductionTimeoutError(RuntimeError):
    """A collective over gradients did not end within the deadline."""


class ReductionPeerError(RuntimeError):
    """A collective over gradients failed in its backend: a rank of its group has ended or closed its connection."""


@frozen
class _Polled:
    """A device's work for a host that waits in slices: past a wait's own timeout NCCL would end the communicator."""

    work: dist.Work

    def is_completed(self) -> bool:
        """See `torch.distributed.Work`."""
        return device_aborts.poll(self.work.is_completed)

    def wait(self, timeout: timedelta = timedelta.max) -> None:
        """Wait for the end, then order the current stream after it; raise ``RuntimeError`` past the timeout."""
        began = time.monotonic()
        while not self.is_completed():
            if time.monotonic() - began > timeout.total_seconds():
                raise RuntimeError(f"not done after {timeout.total_seconds():.3g} s")
            time.sleep(_POLL_SECONDS)
        self.work.wait()


@frozen
class Waiting:
    """How the host waits for collectives over gradients. On CUDA only the current stream waits, not the host.

    Attributes:
        deadline: seconds for each collective; None leaves it to the group's own timeout.
        monitor: of the job, whose deadline and failures then end a wait.
    """

    deadline: float | None = None
    monitor: Monitor | None = None

    def wait(self, work: dist.Work, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """Wait for ``work`` of ``group`` (None: the default one) on ``tensor``.

        Raises:
            ReductionTimeoutError: past the deadline.
            ReductionPeerError: the backend lost a rank of the group; on a device, also that of a collective before.
            JobFailedError: with a monitor: another rank failed, or its deadline passed.
        """
        try:
            device_collectives.check()
            self._wait(work, tensor, group)
            device_aborts.require_not_aborted(group)
        except (ReductionTimeoutError, JobFailedError):
            raise
        except RuntimeError as error:
            aborted = isinstance(error, GroupAbortedError)
            what = "" if aborted else f"{_lost(group, tensor)} has ended, or closed its connection "
            raise ReductionPeerError(
                f"a reduction of gradients failed: {what}({' '.join(str(error).split())[:_LONGEST]})"
            ) from error

    def _wait(self, work: dist.Work, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        on_device = has_streams(tensor.device)
        if self.monitor is not None:  # which holds the host where it does not watch the device
            held = on_device and self.monitor.progress is None
            self.monitor.wait(_Polled(work) if held else work, _REDUCTION)
            return
        if on_device:
            work.wait()
            return
        start = time.monotonic()
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError:
                device_aborts.require_not_aborted(group)
                if device_aborts.poll(work.is_completed):
                    work.wait()  # raises if the work failed; it may have ended just after the slice
                    return
            else:
                return
            if self.deadline is not None and time.monotonic() - start > self.deadline:
                raise ReductionTimeoutError(
                    f"a reduction of gradients did not end within the deadline of {self.deadline:.3g} s: one of the "
                    f"other ranks of {_ranks(group)} has not joined it; rebuild the process groups before the next step"
                )


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Callable[[Waiting], None]:
    """Start an all-reduce in place; the result, called, waits for it.

    ``group`` None is the default process group, or nothing to do in one process without one.
    """
    group = group or dist.group.WORLD
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True) if dist.is_initialized() else None
    if work is not None and has_streams(tensor.device):
        device_collectives.add(_REDUCTION, work, group)

    def wait(waiting: Waiting) -> None:
        if work is not None:
            waiting.wait(work, tensor, group)

    return wait


def gathered(
    row: Sequence[int] | torch.Tensor, device: torch.device, group: dist.ProcessGroup, waiting: Waiting
) -> list[list[int]]:
    """The rows of 64-bit integers of all ranks of ``group``, by its order; the host waits once, at the end."""
    own = torch.as_tensor(row, dtype=torch.int64, device=device)
    rows = torch.zeros((group.size(), own.numel()), dtype=torch.int64, device=device)
    rows[group.rank()] = own
    all_reduce(rows, group)(waiting)
    found: list[list[int]] = rows.tolist()
    return found


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return list(dist.get_process_group_ranks(group)) if dist.is_initialized() else []


def _lost(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> str:
    """Which ranks of ``group`` are lost, in words: over gloo those whose connection is closed here.

    A send over a closed connection raises at once; one whose work is dropped is never delivered.
    """
    ranks = _ranks(group)
    lost = []
    if group is not None and dist.get_backend_config(group).find(f"{tensor.device.type}:gloo") >= 0:
        for index, rank in enumerate(ranks):
            try:
                if index != group.rank():
                    group.send([torch.empty(1, dtype=torch.uint8)], index, _PROBE)
            except RuntimeError:
                lost.append(rank)
    if len(lost) == 1:
        return f"rank {lost[0]}"
    return f"one of the ranks {lost or ranks}"
