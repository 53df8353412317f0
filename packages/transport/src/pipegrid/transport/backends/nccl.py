"""NCCL and whatever else completes in stream order: a wait orders the current stream, completion can only be polled.

Tags are ignored; messages of one communicator make progress together only as one coalesced batch, which this module
brackets itself: `torch.distributed.batch_isend_irecv` does so for `ProcessGroup` proper only. Two communicators that
are active at the same time deadlock if their kernels are launched in different orders on different ranks, so only one
thread may start messages: the one that runs the plan.

Torch's own watchdog ends the process some time after a work is older than its group's timeout. `lift_timeout` puts that
far beyond any deadline of ours, which ends a lane with a typed error first; ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` turns
the watchdog's end off, ``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`` bounds its own hangs.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from attrs import define

from pipegrid.topology import abort_group
from pipegrid.topology.bounded_calls import reason_to_give_up
from pipegrid.topology.torch_compat import set_timeout
from pipegrid.transport.backends.base import Mover, Operation
from pipegrid.transport.backends.kinds import BackendKind, kind_of
from pipegrid.transport.backends.wire import FOREVER
from pipegrid.transport.errors import text_of
from pipegrid.transport.streams import working_on
from pipegrid.transport.waits.aborts import device_aborts

_POLL_SECONDS = 0.0001
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def watchdog_acts(backend: str) -> bool:
    """Whether torch's watchdog ends the process, or aborts a group by itself, after an error that it sees."""
    kind = kind_of(backend)
    return kind.options and kind.ends_process is not None and os.environ.get(_ERROR_HANDLING) != "0"


def warn_of_watchdog(backend: str) -> None:
    """Warn where torch's watchdog will end the process after an error that it sees before an abort."""
    kind = kind_of(backend)
    if watchdog_acts(backend) and _ERROR_HANDLING not in os.environ:
        warnings.warn(
            f"{_ERROR_HANDLING} is not set: by default (3) torch's watchdog ends this process {kind.ends_process:g} s "
            "after an NCCL error that it sees before the lanes do, without their error; set it to 0",
            stacklevel=3,
        )


def lift_timeout(group: Any) -> None:
    """Put the timeout of a group's works, which was its creation's, far beyond the deadlines of lanes."""
    set_timeout(group, FOREVER)


def connect_members(group: Any, device: torch.device, kind: BackendKind, seconds: float) -> None:
    """Connect a group of more than two ranks whose backend does so at the first operation, within ``seconds``.

    Lanes are proved pair by pair: without this a pair would wait for a member that waits for one of the pair.
    """
    if kind.connects == "lazy" and group.size() > 2:
        work = group.allreduce([torch.zeros(1, device=device)])
        NcclTicket([work], group, kind).hold(timedelta(seconds=seconds))


class NcclTicket:
    """The messages of a batch, which share its ``works``; it keeps their ``group`` (None: the default one).

    Works of a group that was aborted raise its cause, whatever the backend says of them. ``kind`` None: works say after
    a wait whether they failed, and keep no tensors. ``aside``: the stream under which works are waited for only to have
    them drop their tensors; None is the current.
    """

    __slots__ = ("_aside", "_group", "_keeps", "_raises", "_works")

    def __init__(
        self, works: Sequence[Any], group: Any, kind: BackendKind | None = None, aside: torch.Stream | None = None
    ) -> None:
        self._works, self._group, self._aside = works, group, aside
        self._raises = kind is not None and kind.waits == "orders_and_raises"
        self._keeps = kind is not None and kind.keeps_sends

    def order(self) -> None:
        """Order the current stream after the batch. Where its wait raises, asking would cost two driver calls more."""
        for work in self._works:
            work.wait()
        self._keeps = False
        device_aborts.require_not_aborted(self._group)
        if not self._raises:
            self.done()

    def done(self) -> bool:
        """Whether the batch is done; not while aborts drain. A failed work is completed, so its error is asked for."""
        device_aborts.require_not_aborted(self._group)
        for work in self._works:
            if not device_aborts.poll(work.is_completed):
                return False
            _raise_failure(work)
        if self._keeps:  # an idle group keeps what it sent until a wait; of a completed work that orders nothing
            self._keeps = False
            with working_on(self._aside):
                for work in self._works:
                    work.wait()
        return True

    def hold(self, timeout: timedelta) -> None:
        """Poll until the batch is done, or raise past ``timeout``, or once the waiting thread is to give up."""
        seconds, why = timeout.total_seconds(), reason_to_give_up()
        if not self.done_within(seconds, why):
            reason = why()
            raise RuntimeError(f"given up: {reason}" if reason else f"not done after {seconds:.3g} s")

    def done_within(self, seconds: float, given_up: Callable[[], str] = str) -> bool:
        """Whether all is done within ``seconds``, unless ``given_up`` has a text before.

        By polling: past the timeout of a wait NCCL would end the communicator.
        """
        end = time.monotonic() + seconds
        while not self.done():
            if time.monotonic() >= end or given_up():
                return False
            time.sleep(_POLL_SECONDS)
        return True


def _raise_failure(work: Any) -> None:
    """Raise the error of a completed work, if it has one: NCCL has a future of its status, others an exception."""
    try:
        result = work.get_future_result()
    except (RuntimeError, AttributeError):
        try:
            error = work.exception()
        except TypeError:  # torch 2.11 has no Python form of it; a wait for a completed work raises it
            work.wait()
            return
        if error is not None:
            raise RuntimeError(text_of(error)) from error
        return
    status = result.wait() if result.done() else 0
    if isinstance(status, int) and status != 0:
        raise RuntimeError(f"a work of the backend ended with status {status} (1: timeout, 2: lost, 3: other)")


@define(eq=False)
class NcclMover(Mover):
    """Messages of a device group, each batch in one bracket."""

    _group: Any
    _peers: Mapping[int, int]  # per lane of this rank, by index, the rank at its other end, as rank in the group
    _device: torch.device  # where tensors live
    _kind: BackendKind
    _aside: torch.Stream | None  # see `NcclTicket`

    streams = True

    def start(self, operations: Sequence[Operation]) -> Sequence[NcclTicket]:
        """Start messages in one bracket. Never called by a `BackgroundThread`: a lane admits no transfer there."""
        group, peers = self._group, self._peers
        group._start_coalescing(self._device)  # noqa: SLF001
        try:
            works = []
            for sending, tensors, lane, _ in operations:
                verb, peer = group.send if sending else group.recv, peers[lane]
                for tensor in tensors:
                    works.append(verb([tensor], peer, 0))  # noqa: PERF401 -- a comprehension is a frame more
        finally:
            whole = group._end_coalescing(self._device)  # noqa: SLF001
        ticket = NcclTicket(works if whole is None else (whole,), group, self._kind, self._aside)
        return [ticket] * len(operations)

    def abort(self) -> None:
        """Abort the group."""
        abort_group(self._group)
