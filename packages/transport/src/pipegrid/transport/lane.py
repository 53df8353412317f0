"""What every lane is: payloads in at one end, in order, and out at the other."""

from __future__ import annotations

import abc
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pipegrid.transport.config import P2PConfig
from pipegrid.transport.errors import (
    P2PError,
    P2PLaneDeadError,
    P2PMismatchError,
    P2PTimeoutError,
    P2PUsageError,
)
from pipegrid.transport.handle import ReceiveTransfer, State, Transfer
from pipegrid.transport.message import ShapeContract, Signature
from pipegrid.transport.payload import (
    ExpectedShape,
    ReceiveBuffers,
    check_sendable,
    flatten,
    receive_buffers,
    signature_of,
)
from pipegrid.transport.spec import LaneSpec, LaneStats, Tally

if TYPE_CHECKING:
    from pipegrid.transport.batch import Submitter

# Where shapes vary, recipes are kept for so many of them.
_BUFFERS_KEPT = 64


class Lane(abc.ABC):
    """One end (or, on one rank, both) of a lane. Made by `open_lanes`.

    Attributes:
        spec: which lane.
        rank: this global rank.
        peer: the global rank at the other end.
        device: where payloads live.
        config: how the lane was opened.
        submitter: what starts its transfers, together with those of the lanes opened with it.
        queue: transfers that were posted, in order, and have not been seen to end.
        error: why the lane is dead; None while it lives.
    """

    def __init__(
        self,
        spec: LaneSpec,
        *,
        rank: int,
        device: torch.device,
        config: P2PConfig,
        submitter: Submitter,
        standing: Signature | None,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.peer = spec.destination if rank == spec.source else spec.source
        self.device = device
        self.config = config
        self.submitter = submitter
        self.queue: deque[Transfer] = deque()
        self.error: P2PError | None = None
        self.tally = Tally()
        self.sent = 0
        self.received = 0
        self._outgoing = ShapeContract(spec, config.shape_mode, standing)
        self._incoming = ShapeContract(spec, config.shape_mode, standing)
        self._buffers: dict[tuple[Signature, tuple[bool, ...], ExpectedShape | None], ReceiveBuffers] = {}
        self._lock = threading.Lock()
        # Where dtypes are agreed with the shapes, any will do.
        self._dtype = config.pipeline_dtype if config.shape_mode in ("agreed", "given") else None

    # What users call

    def isend(self, payload: Any, *, note: str | None = None) -> Transfer:
        """Start sending ``payload`` (a tensor, None, or lists, tuples and dicts of those) to the destination.

        The tensors must stay as they are until the handle is done. ``note`` is text for the receiver
        (`ReceiveTransfer.note`), part of what is announced; None repeats the note of the shapes that were agreed.

        Raises:
            P2PUsageError: this rank is not the source; it is in no manifest; or it requires grad where the destination
                was told that nothing does. Nothing was sent.
            P2PPayloadError: something in it cannot be sent as it is; nothing was sent.
            P2PMismatchError: it is not what was announced; nothing was sent, and the lane is dead on both sides.
            P2PLaneDeadError: the lane has failed before.
        """
        if self.rank != self.spec.source:
            raise P2PUsageError(
                f"rank {self.rank} cannot send on lane {self.spec}: it is the destination; use irecv there"
            )
        self.require_alive()
        transfer = Transfer(self)
        tensors, tree = flatten(payload)
        for tensor in tensors:
            check_sendable(tensor, device=self.device, dtype=self._dtype, lane=self.spec)
        if note is None:
            standing = self._outgoing.standing
            note = "" if standing is None else standing.note
        transfer.signature = signature_of(tensors, tree, note)
        transfer.tensors = self._outbound(tensors)
        self.submitter.submit(transfer)
        return transfer

    def irecv(self, shapes: Any = None, *, attended: bool = False) -> ReceiveTransfer:
        """Start receiving the next message.

        Args:
            shapes: one shape for one tensor, a list of shapes (None where no tensor comes) for a list; None
                takes whatever is announced, in the structure that was sent. Where shapes vary, only the form
                counts: one tensor, or a list of so many.
            attended: the caller waits for it before it does anything else, so no thread needs to see to its header.

        Raises:
            P2PUsageError: this rank is not the destination, or shapes are missing (with ``shapes="given"``).
            P2PMismatchError: something else was announced; the lane is dead on both sides.
            P2PLaneDeadError: the lane has failed before.
        """
        if self.rank != self.spec.destination:
            raise P2PUsageError(
                f"rank {self.rank} cannot receive on lane {self.spec}: it is the source; use isend there"
            )
        self.require_alive()
        if shapes is None and self.config.shape_mode == "given":
            raise P2PUsageError(
                f"lane {self.spec} was opened with shapes='given': tensor_shape must be specified on a receive. "
                f"Common tensor_shape is (seq_length, micro_batch_size, hidden_size)"
            )
        transfer = ReceiveTransfer(self)
        transfer.attended = attended
        transfer.expected = None if shapes is None else ExpectedShape.of(shapes)
        self.submitter.submit(transfer)
        return transfer

    @abc.abstractmethod
    def announce(self, payloads: Sequence[Any]) -> None:
        """Tell the destination, in one header, what the next messages will be (a manifest).

        Args:
            payloads: one per message; only structure, shapes and dtypes of their tensors count (meta tensors do).

        Raises:
            P2PUsageError: shapes are fixed on this lane, or this rank is not the source.
        """

    def renew(self) -> None:
        """Forget the agreed shapes; the next message agrees on them anew.

        Both ends must call it between the same two messages, as for example between training and evaluation.

        Raises:
            P2PUsageError: nothing is agreed on for good on this lane, or receives are under way.
        """
        self.require_renewable()
        self._outgoing.renew()
        self._incoming.renew()
        self._buffers.clear()

    def require_renewable(self) -> None:
        """Refuse what `renew` refuses, and change nothing.

        Raises:
            P2PUsageError: see there.
        """
        if not self._outgoing.stands:
            raise P2PUsageError(
                f"lane {self.spec} has shapes={self.config.shape_mode!r}: every message is announced, "
                f"there is nothing to renew"
            )
        if self.rank == self.spec.destination and self.queue:
            raise P2PUsageError(
                f"lane {self.spec} has {len(self.queue)} receives under way; wait for them before renew()"
            )

    def abort(self, reason: str) -> None:
        """End the lane at once and tell the other side why. Transfers under way fail on both sides."""
        self.fail(P2PLaneDeadError(f"lane {self.spec} was aborted on rank {self.rank}: {reason}"), kind="aborted")

    @property
    def group(self) -> ProcessGroup | None:
        """The group that moves its payloads; None on a lane from a rank to itself."""
        return None

    @property
    def stats(self) -> LaneStats:
        """What this end has done so far."""
        tally = self.tally
        return LaneStats(
            messages=tally.messages,
            transfers=tally.transfers,
            bytes=tally.bytes,
            headers=tally.headers,
            host_syncs=tally.host_syncs,
            allocations=tally.allocations,
            live=self.received - tally.released,
        )

    # What the submitter calls, under its lock

    @abc.abstractmethod
    def admit(self, transfer: Transfer) -> None:
        """Give the transfer its number and, as far as it can be known now, its shapes."""

    @abc.abstractmethod
    def launch(self, transfer: Transfer) -> None:
        """Hand an admitted transfer to the backend, if it is ready for it."""

    def starts_alone(self, transfer: Transfer) -> bool:
        """Whether a transfer that was held in a batch can be issued by its own ``start``, in no order with others."""
        del transfer
        return False

    def check(self, transfer: Transfer, *, ahead: int) -> None:
        """Refuse a send that `admit` would refuse, where ``ahead`` others go before it.

        Raises:
            P2PUsageError: see `ShapeContract.check`; nothing was sent.
        """
        if transfer.sending and transfer.signature is not None and self.error is None:
            self._outgoing.check(transfer.signature, self.sent + ahead, ahead=ahead)

    def _outbound(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What a send gives to the backend, found before it has a number: whatever fails in that, costs no message."""
        return tensors

    def _buffers_of(self, transfer: ReceiveTransfer, signature: Signature) -> ReceiveBuffers:
        """Hold the receiver's expected against what was announced."""
        key = (signature, signature.gradients, transfer.expected)
        buffers = self._buffers.get(key)
        if buffers is None:
            buffers = receive_buffers(
                signature, transfer.expected, device=self.device, dtype=self._dtype, exact=self._incoming.stands
            )
            if buffers is None:
                kind = "" if self._dtype is None else f" in {self._dtype}"
                expected = "any shape" if transfer.expected is None else f"shape {transfer.expected}"
                raise P2PMismatchError(
                    f"rank {self.rank} expects message {transfer.sequence} of lane {self.spec} to be of "
                    f"{expected}{kind}, but rank {self.peer} announced {signature}; "
                    f"give the same shapes and pipeline_dtype on both sides"
                )
            if len(self._buffers) >= _BUFFERS_KEPT:
                self._buffers.clear()
            self._buffers[key] = buffers
            if self._incoming.standing is not None:
                buffers.keep()
        return buffers

    # What handles call

    @abc.abstractmethod
    def wait_for(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Transfer.wait`."""

    @abc.abstractmethod
    def provide(self, transfer: ReceiveTransfer) -> Any:
        """The payload of a receive whose buffers are known, before it is done: wait for them to be."""

    @abc.abstractmethod
    def poll(self, transfer: Transfer) -> bool:
        """See `Transfer.is_completed`; the transfer is not known to have ended."""

    @abc.abstractmethod
    def synchronize(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Transfer.synchronize`."""

    def call_back(self, transfer: Transfer, callback: Callable[[Any], None]) -> None:
        """See `Transfer.on_done`."""
        with self._lock:
            transfer.callbacks = (*transfer.callbacks, callback)
        if transfer.state in (State.DONE, State.FAILED):
            self._tell_all(transfer)
        elif transfer.state is State.PENDING:
            self.look_after(transfer)

    def look_after(self, transfer: Transfer) -> None:
        """Have the end of a transfer seen even if nobody waits for it."""
        del transfer  # seen by `sweep`, unless a lane has better means

    # What the progress thread calls

    def sweep(self, now: float) -> None:
        """Look for ends and deadlines."""
        for transfer in self.queue.copy():
            if transfer.posted_at == math.inf:
                transfer.posted_at = now
            if transfer.due == math.inf and (transfer.sending or transfer.waited):
                transfer.due = now + self.config.deadline
                transfer.seconds = self.config.deadline
            if now >= transfer.due:
                self.fail(self._timed_out(transfer), kind="timeout")
                return

    # Ends

    def require_alive(self) -> None:
        """Refuse to go on with a lane that has ended.

        Raises:
            P2PLaneDeadError: it has.
        """
        if self.error is not None:
            raise P2PLaneDeadError(
                f"lane {self.spec} is dead on rank {self.rank} and cannot be used again; "
                f"open new lanes after mending the first failure: {self.error}"
            ) from self.error

    def _set_due(self, transfer: Transfer, timeout: float | None) -> None:
        transfer.waited = True
        if timeout is not None:
            transfer.seconds = timeout
            transfer.due = time.monotonic() + timeout
        elif transfer.due == math.inf:
            transfer.seconds = self.config.deadline
            transfer.due = time.monotonic() + transfer.seconds

    def _timed_out(self, transfer: Transfer) -> P2PTimeoutError:
        return P2PTimeoutError(
            rank=self.rank,
            peer=self.peer,
            lane=str(self.spec),
            sequence=transfer.sequence,
            seconds=transfer.seconds,
            what="sending" if transfer.sending else "receiving",
        )

    def _ended(self, transfer: Transfer, state: State, error: BaseException | None = None) -> None:
        """The transfer has ended; wake who waits, tell who asked."""
        with self._lock:
            if transfer.state is not State.PENDING:
                return
            if self.queue and self.queue[0] is transfer:
                self.queue.popleft()
            transfer.error = error
            transfer.state = state
            if transfer.sending:
                transfer.tensors = transfer.works = ()
            self._notify()
        if transfer.callbacks:
            self._tell_all(transfer)

    @abc.abstractmethod
    def _notify(self) -> None:
        """Wake who waits for a transfer of this lane; under the lock."""

    def _tell_all(self, transfer: Transfer) -> None:
        with self._lock:
            callbacks, transfer.callbacks = transfer.callbacks, ()
        for callback in callbacks:
            try:
                callback(transfer)
            except Exception as error:  # noqa: BLE001 -- it may run on a thread that nobody listens to
                found = P2PUsageError(
                    f"the on_done callback {callback!r} of message {transfer.sequence} of lane {self.spec} raised "
                    f"{type(error).__name__}: {error}; what it was to start will not happen, so the lane has ended"
                )
                found.__cause__ = error
                self.fail(found, kind="aborted")

    def _refuse(self, transfer: Transfer) -> None:
        """Raise what a wait for a transfer raises that has failed, or was not issued."""
        if transfer.state is State.FAILED and transfer.error is not None:
            raise transfer.error
        if transfer.state is State.HELD:
            raise P2PUsageError(f"{transfer!r} is waited for inside the batch() that is to issue it; wait after it")

    def _require_announceable(self) -> None:
        if self.rank != self.spec.source:
            raise P2PUsageError(f"rank {self.rank} cannot announce on lane {self.spec}: it is the destination")
        if self._outgoing.stands:
            raise P2PUsageError(
                f"lane {self.spec} has shapes={self.config.shape_mode!r}, fixed by its first message; "
                f"use shapes='manifest' (or 'header') to announce"
            )

    def fail(self, error: P2PError, *, kind: str) -> None:
        """End the lane because of ``error``, once; ``kind`` is what the other side is told."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
        self._cut(error, kind)
        for transfer in self.queue.copy():
            self._ended(transfer, State.FAILED, error)

    @abc.abstractmethod
    def _cut(self, error: P2PError, kind: str) -> None:
        """Tell the other side, where there is one, and wake whoever waits in the backend."""

    @abc.abstractmethod
    def join(self) -> None:
        """Return when no thread of the lane runs any more; the lane has ended."""
