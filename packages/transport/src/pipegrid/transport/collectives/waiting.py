"""Waits for a collective: up to a deadline, or until its user gives it up. No torch.

A wait does not raise: it says why there is no result (`NotDone`), and its user makes an error of that.

On a device with streams a wait orders the current stream and returns, at once and for a collective that failed, too.
So each is kept until it has ended and was asked for its error (`PendingCollectives`), and its group with it: a work has
a bare pointer to the backend of its group.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from attrs import define, field, frozen

from pipegrid.transport.errors import text_of
from pipegrid.transport.waits.aborts import GroupAbortedError, abort_device_groups, device_aborts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pipegrid.transport.backends import NcclTicket

Label = TypeVar("Label")

_SLICE_SECONDS = 0.05  # of a wait of the host, between two looks whether its user has given up
BACKSTOP_SECONDS = 1.0
"""From a deadline, past which another thread ends a wait and tells the others why, to the backend's own timeout, which
closes connections without that."""
_PROBE = 2**29  # a tag of no message
_LONGEST = 600  # characters of a backend's text, which may pass on the first failure


@frozen
class NotDone:
    """Why a wait for a collective ended without its result."""

    # The deadline passed (``late``); its user gave it up (``given up``); this rank aborted the group (``aborted``); the
    # backend failed, as it does where a rank has ended (``lost``).
    why: Literal["late", "given up", "aborted", "lost"]
    text: str = ""  # of the reason, in one line; empty for ``late``
    error: Exception | None = None  # of the backend, or of the abort

    @classmethod
    def of(cls, error: RuntimeError) -> NotDone:
        """The reason that ``error``, of a work, gives."""
        aborted, text = isinstance(error, GroupAbortedError), " ".join(text_of(error).split())[:_LONGEST]
        return cls("aborted" if aborted else "lost", text, error)


def finish(
    work: Any,
    group: ProcessGroup | None,
    *,
    on_device: bool,
    host: bool = False,
    end: float | None = None,
    given_up: Callable[[], str | None] = lambda: None,
) -> NotDone | None:
    """Wait for the collective ``work`` of ``group``; None when it is done, else why it is not.

    Args:
        work: started with ``async_op=True``.
        group: None is the default one.
        on_device: its tensors are on a device with streams: only the current stream waits, whatever ``end``.
        host: hold the host on such a device as well: the caller reads the result, and a read has no deadline.
        end: when the wait of the host is late, in `time.monotonic` seconds; None leaves it to the group's own timeout.
        given_up: why the user does not wait any longer, None as long as it does; asked between slices of 0.05 s.
    """
    late = False
    try:
        in_streams = on_device or _is_in_streams(group)
        while (reason := given_up()) is None and (host or not on_device):
            if late:
                return NotDone("late")
            left = math.inf if end is None else end - time.monotonic()
            if not getattr(work, "single", False):  # a `SmallAllGather`
                left = min(_SLICE_SECONDS, left)
            if _ticket(work, group).done_within(left) if in_streams else _done_on_host(work, left):
                break
            late = end is not None and time.monotonic() >= end
        if reason is None and in_streams:
            work.wait()
            device_aborts.require_not_aborted(group)
        reason = given_up()  # NCCL calls an aborted collective done: its stream goes on, without the data
    except RuntimeError as error:
        if (reason := given_up()) is None:  # else its user aborted the group, or cut it, after it had given up
            return NotDone.of(error)
    if reason is not None:
        return NotDone("given up", reason)
    host_collectives.forget(work)
    return None


def _done_on_host(work: Any, seconds: float) -> bool:
    """Wait for ``seconds``; a collective's wait that times out leaves it as it is, unlike that of a transfer."""
    try:
        work.wait(*(() if seconds == math.inf else (timedelta(seconds=max(seconds, 1e-3)),)))
    except RuntimeError:
        if not device_aborts.poll(work.is_completed):
            return False
        work.wait()  # raises if it failed; one that ended just after the slice returns
    return True


def _is_in_streams(group: ProcessGroup | None) -> bool:
    """Whether collectives of host tensors complete in stream order, as the group itself says (it may be destroyed)."""
    import torch
    import torch.distributed as dist

    found = dist.group.WORLD if group is None else group
    name = "gloo" if found is None else found._get_backend(torch.device("cpu")).name()  # noqa: SLF001
    if name == "gloo":
        return False
    from pipegrid.transport.backends import kind_of

    return kind_of(name).in_streams


def _ticket(work: Any, group: ProcessGroup | None) -> NcclTicket:
    from pipegrid.transport.backends import NcclTicket  # torch, which a process without collectives need not have

    return NcclTicket((work,), group)


def lost_ranks(group: ProcessGroup, device: str) -> list[int]:
    """The ranks of ``group`` whose connections are closed here, as far as the backend says: gloo does.

    ``device`` is the type of the device of the collective that failed. A send over a closed connection raises at once;
    one whose work is dropped is never delivered.
    """
    import torch
    import torch.distributed as dist

    if f"{device}:gloo" not in dist.get_backend_config(group):
        return []
    lost = []
    for index, rank in enumerate(dist.get_process_group_ranks(group)):
        try:
            if index != group.rank():
                group.send([torch.empty(1, dtype=torch.uint8)], index, _PROBE)
        except RuntimeError:
            lost.append(rank)
    return lost


@define(eq=False)
class HostCollectives:
    """The collectives over gloo that have started and whose wait has not ended, each with its group. For any thread.

    gloo has no abort. A collective that waits for a rank out of reach (its wire cut, its process stopped) holds a
    thread of its group, for which the group's end, by `destroy_process_group` or at the interpreter's exit, waits:
    until the group's timeout, half an hour by default. Until then a process that has raised does not end, and its
    launcher sees no failure. What does end the collective is the end of the connections.
    """

    # Groups whose collectives go on where a step has failed, as those of a checkpoint in the background.
    apart: weakref.WeakSet[ProcessGroup] = field(factory=weakref.WeakSet, init=False)
    _groups: dict[Any, ProcessGroup] = field(factory=dict, init=False)  # by work

    def add(self, work: Any, group: ProcessGroup) -> None:
        """``work`` of ``group`` has started."""
        self._groups[work] = group

    def forget(self, work: Any) -> None:
        """The wait for ``work`` has ended with its result."""
        self._groups.pop(work, None)

    def cut(self, groups: Iterable[ProcessGroup | None]) -> None:
        """Cut the connections of those of ``groups`` (None: the default) with a collective under way, or failed.

        Call it once the cause is on record: ranks that wait there have an error at once. The groups are of no use after
        that.
        """
        if not self._groups:
            return
        import torch.distributed as dist

        from pipegrid.topology.torch_compat import is_alive
        from pipegrid.transport.backends.wire import cut_all_connections

        chosen = {dist.group.WORLD if group is None else group for group in groups}
        found = [(work, group) for work, group in list(self._groups.items()) if group in chosen]
        for group in dict.fromkeys(group for work, group in found if not _has_result(work)):
            if is_alive(group):
                cut_all_connections(group)
        for work, _ in found:
            self.forget(work)

    def cut_all(self) -> None:
        """`cut` for every group that is not kept apart."""
        self.cut(group for group in set(self._groups.values()) if group not in self.apart)


def _has_result(work: Any) -> bool:
    try:
        return bool(work.is_completed()) and work.wait() is not False
    except RuntimeError:
        return False


host_collectives = HostCollectives()
"""Those of this process."""


@define(eq=False)
class PendingCollectives(Generic[Label]):
    """Collectives that a stream was ordered after, each with a label of its user's, in order; for any thread."""

    _works: deque[tuple[Label, Any, ProcessGroup | None]] = field(factory=deque, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def add(self, label: Label, work: Any, group: ProcessGroup | None) -> None:
        """Keep ``work`` of ``group`` until it has ended and was asked for its error."""
        with self._lock:
            self._works.append((label, work, group))

    def failed(self) -> tuple[Label, RuntimeError] | None:
        """Forget those that have ended, up to the first that has not; the first that failed, once. Never blocks."""
        if not self._works:
            return None
        with self._lock:
            while self._works:
                label, work, group = self._works[0]
                try:
                    if not _ticket(work, group).done():
                        return None
                except RuntimeError as error:
                    self._works.popleft()
                    return label, error
                self._works.popleft()
        return None

    def check(self) -> None:
        """Raise a RuntimeError for a collective that has failed, once; the text begins with its label. Never blocks."""
        if (failed := self.failed()) is not None:
            raise RuntimeError(f"{failed[0]} failed: {NotDone.of(failed[1]).text}") from failed[1]

    def abort(self, cause: str) -> None:
        """Begin to abort every device group of this process, and cut the host's groups with a collective under way.

        Where a step fails, all are aborted together: a free waits for every kernel of the device, so an abort of the
        lanes alone would wait for a reduction that no rank will end. None of them is of use after that.
        """
        if "torch.distributed" in sys.modules:
            abort_device_groups(cause)
            host_collectives.cut_all()
        with self._lock:
            works, self._works = self._works, deque()
        for _, work, group in works:
            if (abort := device_aborts.of(group)) is not None:
                abort.keep(work, group)


device_collectives: PendingCollectives[str] = PendingCollectives()
"""Those of this process beside its plan, on devices with streams: reductions of gradients, norms, loss scales."""
