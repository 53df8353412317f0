"""The rules of `ProcessGroupNCCL2` (torch 2.15's ``nccl``), where they differ from `FakeGroup`'s."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from pipegrid.fake_nccl.device import FakeDevice
from pipegrid.fake_nccl.entries import QueueEntry
from pipegrid.fake_nccl.groups.group import FakeGroup
from pipegrid.fake_nccl.groups.transfers import Freeable
from pipegrid.fake_nccl.groups.work import FakeWork, comes
from pipegrid.fake_nccl.torch_compat import BOUND_KIND, WorkBase
from pipegrid.fake_nccl.watchdog import Nccl2Rules


class Nccl2Work(FakeWork):
    """The work of one entry."""

    def __init__(self, entry: QueueEntry, device: FakeDevice, group: Nccl2Group, *, holds: bool) -> None:
        super().__init__(entry, device, holds=holds, abort=group.abort)
        self._group = group
        self.held: Sequence[Tensor] = ()

    def is_completed(self) -> bool:
        """The entry has ended, or an entry of its group has failed."""
        return super().is_completed() or self._group.failure is not None

    def is_success(self) -> bool:
        """The entry has not failed."""
        return not self.entry.ended.is_set() or self.entry.error is None

    def exception(self) -> Exception | None:
        """The error of the entry or, where it has not ended, of its group."""
        over = self.entry.ended.is_set() or self.entry.cancelled.is_set()
        return self.entry.error if over else self._group.failure

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order later work of the current stream after the entry, then raise what is known of it."""
        if self.entry.captured:
            return super().wait()
        if timeout is not None and timeout > timedelta(0):
            left = self.entry.launched_at + timeout.total_seconds() - time.monotonic()
            if not comes(self.entry.ended, left):
                self._group.kill(f"Work.wait({timeout.total_seconds():g} s) of {self.entry} passed")
        relies = not self.entry.ended.is_set()  # else the memory is free because the work is done
        self._device.order(self.entry, relies=relies)
        if self._holds:
            with self._device.streams.host_waiting():
                self.entry.released.wait()
        self._group.let_go(self.entry)
        if (error := self.exception()) is not None:
            raise error
        return True

    synchronize = wait


def is_lazy(chosen: Any) -> bool:
    """Whether the options of a new group say ``lazy_init``."""
    return bool(getattr(chosen, "lazy_init", False))


class Nccl2Group(FakeGroup):
    """A group of the backend ``fake_nccl`` by the rules of torch 2.15's ``nccl``, where they differ from `FakeGroup`'s.

    - There is no ``_set_default_timeout``. Works of a batch are complete at once; its end alone counts, and an empty
      batch has one as well.
    - A wait raises an error that is known by then. The error of one entry is that of all unfinished works of its group.
      ``is_success()`` is true of a work that runs.
    - An idle group keeps what it sent, until the work was waited for or the group launches again. It keeps no receive:
      the work of a lone one holds its tensor, that of a batch does not. Memory that is freed before its entry has ended
      is a violation.
    - The watchdog sees an error a tick after it occurs (see `Nccl2Rules`; no dump key). In a group that was not
      aborted by then it ends the process after a grace, as does a launch on the group or a ``wait(timeout)`` that
      passes: a violation. An abort in between waits.
    - A collective with ``async_op=False`` runs on the caller's stream: later work there runs after it without a wait.
    - A shutdown waits for the group's entries, without a bound, and is a barrier of its members. One with an entry
      under way is a violation: with a member that is gone it would never return.
    - The default group is bound to a device, so a new group is a split of it by all ranks of the world: one that does
      not join holds the others until the timeout, as after ``new_group(use_local_synchronization=True)`` by some
      ranks. A group with the option ``lazy_init`` is no split, and connects at its first use.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> device = FakeDevice(nccl2=Nccl2Rules())
        >>> dist.init_process_group(register(device), store=dist.HashStore(), rank=0, world_size=1)
        >>> type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
        'Nccl2Group'
        >>> device.close()
    """

    supports_splitting = shuts_down_alone = True

    def __init__(self, device: FakeDevice, options: Any, chosen: Any = None) -> None:
        super().__init__(device, options, chosen)
        self.rules = device.nccl2 or Nccl2Rules()
        if not options.global_ranks_in_group:  # the default group
            self.bound_device_id = torch.device(BOUND_KIND, int(os.environ.get("LOCAL_RANK", self._here)))
        self.failure: Exception | None = None
        self._idle: set[QueueEntry] = set()
        self._lock = threading.Lock()
        self._aborting, self._seen, self._ended = threading.Event(), threading.Event(), threading.Event()

    def _connects_at_use(self) -> bool:
        return is_lazy(self.options)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Wait for all members; torch calls it of each new group where the default group is bound."""
        if not self._connects_at_use():
            super().eager_connect_single_device(device)

    @property
    def _set_default_timeout(self) -> Any:
        raise AttributeError("nccl2 has no _set_default_timeout")

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Any:
        """Launch a send, or add it to the batch: then the work is complete at once."""
        return super().send(tensors, peer, tag) or CompleteWork()

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Any:
        """Launch a receive, whose work holds the tensors, or add it to the batch: then the work is complete at once."""
        work = super().recv(tensors, peer, tag)
        if work is None:
            return CompleteWork()
        work.held = tensors
        return work

    def _received_into(self, tensor: Tensor) -> Freeable:
        return Freeable(tensor)

    def _end_coalescing(self, device: Any = None) -> Any:
        return super()._end_coalescing(device) or CompleteWork()

    def _collective(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> FakeWork:
        work = super()._collective(name, arguments, options)
        if not all(getattr(each, "asyncOp", True) for each in (*arguments, *options.values())):
            FakeWork.wait(work)  # it runs on the caller's stream
        return work

    def _work_of(self, entry: QueueEntry, reads: Sequence[Tensor], *, holds: bool) -> FakeWork:
        if self.failure is not None:
            self.kill(f"{entry} was launched on group {self._name}, which had failed")
        if not entry.captured:  # else its graph keeps it
            entry.kept[:] = reads
            with self._lock:
                ended = {one for one in self._idle if one.ended.is_set()}
                self._idle = {entry, *(self._idle - ended)}
            for one in ended:
                one.kept.clear()
            entry.when_ended(lambda: self._look_at(entry))
        return Nccl2Work(entry, self.device, self, holds=holds)

    def let_go(self, entry: QueueEntry) -> None:
        """Drop what a work keeps that was waited for."""
        with self._lock:
            self._idle.discard(entry)

    def _look_at(self, entry: QueueEntry) -> None:
        """An entry has ended; the first error of the group starts the watchdog's clock."""
        if entry.error is None or self.failure is not None:
            return
        self.failure = entry.error
        if not self._aborting.is_set() and self.rules.handling:
            threading.Thread(target=self._watch, args=(str(entry),), name="fake nccl2 watchdog", daemon=True).start()

    def _watch(self, what: str) -> None:
        if comes(self.device.closing, self.rules.tick) or self._aborting.is_set():
            return
        self._seen.set()
        self.kill(f"{what} failed, and the group was not aborted within the watchdog's tick of {self.rules.tick:g} s")
        comes(self.device.closing, self.rules.grace)
        self._ended.set()

    def kill(self, cause: str) -> None:
        """Report that torch would end the process."""
        if self.rules.handling and not self.aborted:
            self.device.violations.append(f"the process was ended by nccl2's watchdog: {cause}")

    def abort(self) -> None:
        """Abort the group; once a watchdog has seen an error, only after its grace."""
        self._aborting.set()
        if self._seen.is_set():
            self._ended.wait()
        super().abort()


class CompleteWork(WorkBase):  # type: ignore[misc]
    """The work of a message inside a batch, or of an empty batch: complete from the start."""

    def is_completed(self) -> bool:
        """Always true."""
        return True

    is_success = is_completed

    def exception(self) -> None:
        """The error of the work: always None."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once, and order nothing."""
        del timeout
        return True

    synchronize = wait

    def get_future_result(self) -> Any:
        """A future of the status for success."""
        future: Any = torch.futures.Future()
        future.set_result(0)
        return future
