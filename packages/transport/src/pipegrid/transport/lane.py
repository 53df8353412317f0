"""A lane: payloads in at one end, in order, and out at the other. One class for every backend.

What differs between backends is in the mover (`pipegrid.transport.backends`); what two ranks tell each other beside the
payloads is in the wire. A message of one tensor whose shape is agreed needs nothing but its mover: it comes first in
`Lane.isend` and `Lane.irecv`. All others go through the submit function, which knows batches.

The latency of a small message is Python's share of it, most of it cold code. So the backend is called first, and the
bookkeeping is done while the message travels.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import get_ident
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pipegrid.transport.backends import Operation, Ticket
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.connection import Connection, End, abort_together, end_together
from pipegrid.transport.errors import (
    P2PError,
    P2PLaneDeadError,
    P2PMismatchError,
    P2PPayloadError,
    P2PPeerError,
    P2PTimeoutError,
    P2PUsageError,
    relayed,
    text_of,
)
from pipegrid.transport.handle import ReceiveTransfer, State, Transfer
from pipegrid.transport.message import ShapeContract, Signature, decode, encode
from pipegrid.transport.payload import (
    ExpectedShape,
    ReceiveBuffers,
    carried,
    check_sendable,
    dtype_of,
    flatten,
    receive_buffers,
    signature_of,
)
from pipegrid.transport.spec import LaneSpec, LaneStats, Tally
from pipegrid.transport.streams import current_stream, has_streams, mark, used_here, working_on
from pipegrid.transport.wait_lock import BackgroundThread, WaitLock
from pipegrid.transport.wire import timedelta_of

# Past its deadline the progress thread ends a transfer, with an end notice to the other side; should it be late, the
# backend's own timeout does so this much later, without one.
BACKSTOP_SECONDS = 1.0
_BUFFERS_KEPT = 64  # signatures, where shapes vary
_UNATTENDED_SECONDS = 0.05  # until the lane's own thread completes sends without a waiting thread
_POLL_SECONDS = 0.0001
_CLOSED_SECONDS = 1.0  # after the other side closed: transfers that it saw done may still be under way here

# Module names: members of an Enum are looked up slowly.
_ACTIVE, _DONE, _FAILED, _PENDING = State.ACTIVE, State.DONE, State.FAILED, State.PENDING


class Submit(Protocol):
    """What a lane needs of the batches that it is part of (see `pipegrid.transport.batch.Submitter`).

    Attributes:
        lock: held while transfers get their numbers and are started, so that both happen in the same order.
        pending: of each thread that is inside a batch, the transfers that it has submitted.
        asleep: whether the progress thread needs ``wake``.
    """

    lock: Any
    pending: dict[int, list[Transfer]]
    asleep: bool
    wake: threading.Event

    def __call__(self, transfer: Transfer) -> None:
        """Start a transfer now, or at the end of the batch that this thread is in."""
        ...

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Hand numbered transfers to their movers. Under the lock."""
        ...


class Lane:
    """One end (or, on one rank, both) of a lane. Made by `open_lanes`.

    Attributes:
        spec: which lane.
        rank: this global rank.
        peer: the global rank at the other end.
        device: where payloads live.
        config: the settings it was opened with.
        queue: transfers that were started, in order, and have not been seen to end.
        error: why the lane is dead; None while it lives.
    """

    def __init__(
        self,
        spec: LaneSpec,
        *,
        rank: int,
        device: torch.device,
        config: P2PConfig,
        connection: Connection,
        submit: Submit,
        standing: Signature | None,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.peer = spec.destination if rank == spec.source else spec.source
        self.device = device
        self.config = config
        self.connection = connection
        self.mover, self.wire = connection.mover, connection.wire
        self._start, self._streams = connection.mover.start, connection.mover.streams
        self.queue: deque[Transfer] = deque()
        self.error: P2PError | None = None
        self.tally = Tally()
        self.sent = 0
        self.received = 0
        self._index = len(connection.lanes)
        connection.lanes.append(self)
        self._submit = submit
        self._outgoing = ShapeContract(spec, config.shape_mode, standing)
        self._incoming = ShapeContract(spec, config.shape_mode, standing)
        self._buffers: dict[tuple[Signature, tuple[bool, ...], ExpectedShape | None], ReceiveBuffers] = {}
        # Where dtypes are agreed with the shapes, any is valid.
        self._dtype = config.pipeline_dtype if config.shape_mode in ("agreed", "given") else None
        self._needs_shapes = config.shape_mode == "given"
        self._epoch = 0  # of renewals
        # Messages of one tensor with an agreed shape, on a communicator of their own: buffers, shape and dtype of them.
        self._one_by_one = config.communicators == "separate" and not config.strict
        self._plain: ReceiveBuffers | None = None
        self._shape, self._plain_dtype, self._nbytes = torch.Size(), torch.float32, 0
        self._sends = rank == spec.source
        self._receives_ahead = 0 if self.mover.polled else config.receives_ahead
        # Receives that the backend has and that no caller has asked for yet; and those of shapes given up since, which
        # nothing is sent to, and which gloo cannot take back.
        self._ahead: deque[tuple[Sequence[Tensor], Ticket]] = deque()
        self._given_up: list[Any] = []
        self._deferred: deque[ReceiveTransfer] = deque()  # receives whose header has not come
        self._header: Callable[[timedelta], bytes] | None = None
        self._manifests: list[Any] = []  # works of manifests; the next send takes them along
        self._lock = threading.Lock()
        self._wait_lock = WaitLock(self._lock, f"pipegrid-lane-{spec}", self._step, self._has_work)
        self._patience = timedelta(seconds=config.deadline + BACKSTOP_SECONDS)
        self._streamed = has_streams(device)
        self._closed_by_peer = math.inf

    @property
    def group(self) -> ProcessGroup | None:
        """The process group that moves its payloads; None on a lane from a rank to itself."""
        return self.connection.group

    @property
    def stats(self) -> LaneStats:
        """The counts of this end so far."""
        tally = self.tally
        return LaneStats(
            messages=self.sent + self.received - len(self._deferred),
            transfers=tally.transfers,
            bytes=tally.bytes,
            headers=tally.headers,
            host_syncs=tally.host_syncs,
            allocations=tally.allocations,
            live=self.received - tally.released,
        )

    # ---- Sending and receiving

    def isend(self, payload: Any, *, note: str | None = None) -> Transfer:
        """Start sending ``payload`` (a tensor, None, or lists, tuples and dicts of those) to the destination.

        The tensors must not change until the handle is done.

        Args:
            payload: the message.
            note: text for the receiver (`ReceiveTransfer.note`), part of the announcement; None repeats the note of the
                agreed shapes.

        Raises:
            P2PUsageError: this rank is not the source; no manifest has the message; or it requires grad where that was
                announced without. Nothing was sent.
            P2PPayloadError: it cannot be sent as it is; nothing was sent.
            P2PMismatchError: it differs from its announcement; nothing was sent, and the lane is dead on both sides.
            P2PLaneDeadError: the lane has failed before.
        """
        plain, submit = self._plain, self._submit
        if plain is not None and note is None and self._fits(payload):
            tensors = [payload.detach() if payload.requires_grad else payload]
            if get_ident() not in submit.pending:
                with submit.lock:
                    try:
                        (ticket,) = self._start((Operation(True, tensors, self._index, self._epoch),))
                    except RuntimeError as error:
                        self._not_started(Transfer(self, self.sent), error)
                    # The message is on its way; what follows is no part of its latency.
                    transfer = Transfer(self, self.sent)
                    transfer.ticket, transfer.tensors = ticket, tensors
                    self.sent += 1
                    self.queue.append(transfer)
                self.tally.transfers += 1
                self.tally.bytes += plain.nbytes
                if submit.asleep:
                    submit.wake.set()
                return transfer
            transfer = Transfer(self)
            transfer.tensors, transfer.signature = tensors, plain.signature
        else:
            transfer = self._checked_send(payload, note)
        submit(transfer)
        return transfer

    def irecv(self, shapes: Any = None, *, attended: bool = False) -> ReceiveTransfer:
        """Start receiving the next message.

        Args:
            shapes: one shape for one tensor, a list of shapes (None where no tensor comes) for a list; None takes the
                message as it was sent. Where shapes vary, only the form counts: one tensor, or a list of so many.
            attended: the caller waits for it before anything else, so no thread needs to look after its header.

        Raises:
            P2PUsageError: this rank is not the destination, or shapes are missing (with ``shapes="given"``).
            P2PMismatchError: the announced message differs; the lane is dead on both sides.
            P2PLaneDeadError: the lane has failed before.
        """
        plain, submit = self._plain, self._submit
        if (
            plain is not None
            and self.error is None
            and (not self._needs_shapes if shapes is None else self._shape == shapes)
            and not self._sends
            and get_ident() not in submit.pending
        ):
            with submit.lock:
                try:
                    tensors, ticket = self._ahead.popleft() if self._ahead else self._post(plain)
                    while len(self._ahead) < self._receives_ahead:
                        self._ahead.append(self._post(plain))
                except RuntimeError as error:
                    self._not_started(ReceiveTransfer(self, self.received), error)
                transfer = ReceiveTransfer(self, self.received)
                transfer.buffers, transfer.tensors, transfer.ticket = plain, tensors, ticket
                if self._streamed:
                    transfer.stream = current_stream(self.device)
                transfer.build()  # while the message travels
                plain.prepare()
                self.received += 1
                self.queue.append(transfer)
            self.tally.transfers += 1
            self.tally.bytes += plain.nbytes
            if submit.asleep:
                submit.wake.set()
            return transfer
        return self._checked_receive(shapes, attended=attended)

    def _fits(self, payload: Any) -> bool:
        """Whether a payload is of the agreed plain shape, and needs no other check."""
        try:
            return (
                type(payload) is Tensor
                and self.error is None
                and payload.shape == self._shape
                and payload.dtype is self._plain_dtype
                and payload.device == self.device
                and payload.is_contiguous()
                and not payload.is_neg()
                and payload.untyped_storage().nbytes() >= self._nbytes
                and self._sends
            )
        except RuntimeError:  # a nested or a sparse tensor has no such properties
            return False

    def _post(self, buffers: ReceiveBuffers) -> tuple[Sequence[Tensor], Ticket]:
        """Post the receive of a plain message."""
        tensors = buffers.take()
        (ticket,) = self._start((Operation(False, tensors, self._index, self._epoch),))
        return tensors, ticket

    def _not_started(self, transfer: Transfer, error: RuntimeError) -> NoReturn:
        if isinstance(error, P2PError):
            raise error
        self.explain(error, transfer)
        raise self.error or error from error

    def _checked_send(self, payload: Any, note: str | None) -> Transfer:
        self._require_usable(sending=True)
        transfer = Transfer(self)
        tensors, tree = flatten(payload)
        for tensor in tensors:
            check_sendable(tensor, device=self.device, dtype=self._dtype, lane=self.spec)
        if note is None:
            note = "" if self._outgoing.standing is None else self._outgoing.standing.note
        transfer.signature = signature_of(tensors, tree, note)
        try:  # before it has a number: a payload that fails here costs no message
            transfer.tensors = carried(tensors, self.device)
        except RuntimeError as error:
            raise P2PPayloadError(f"lane {self.spec} cannot send these tensors as bytes: {error}") from error
        return transfer

    def _checked_receive(self, shapes: Any, *, attended: bool) -> ReceiveTransfer:
        self._require_usable(sending=False)
        if shapes is None and self._needs_shapes:
            raise P2PUsageError(
                f"lane {self.spec} was opened with shapes='given': tensor_shape must be specified on a receive. "
                f"Common tensor_shape is (seq_length, micro_batch_size, hidden_size)"
            )
        transfer = ReceiveTransfer(self)
        transfer.attended = attended
        transfer.expected = None if shapes is None else ExpectedShape.of(shapes)
        self._submit(transfer)
        return transfer

    def _require_usable(self, *, sending: bool) -> None:
        if self.rank != (self.spec.source if sending else self.spec.destination):
            verb, role, other = ("send", "destination", "irecv") if sending else ("receive", "source", "isend")
            raise P2PUsageError(
                f"rank {self.rank} cannot {verb} on lane {self.spec}: it is the {role}; use {other} there"
            )
        self.require_alive()

    def announce(self, payloads: Sequence[Any]) -> None:
        """Announce the next messages to the destination in one header: a manifest.

        Args:
            payloads: one per message; only structure, shapes and dtypes of their tensors count (meta tensors do).

        Raises:
            P2PUsageError: shapes are fixed on this lane, or this rank is not the source.
        """
        if self.rank != self.spec.source:
            raise P2PUsageError(f"rank {self.rank} cannot announce on lane {self.spec}: it is the destination")
        if self._outgoing.stands:
            raise P2PUsageError(
                f"lane {self.spec} has shapes={self.config.shape_mode!r}, fixed by its first message; "
                f"use shapes='manifest' (or 'header') to announce"
            )
        signatures = [signature_of(*flatten(payload)) for payload in payloads]
        if not signatures:
            return
        with self._submit.lock:
            self.require_alive()
            first = self.sent + self._outgoing.outstanding
            self._manifests += self._announce(first, signatures, standing=False)
            self._outgoing.announce(signatures, standing=False)

    def renew(self) -> None:
        """Forget the agreed shapes; the next message agrees on new ones.

        Both ends must call it between the same two messages, for example between training and evaluation.

        Raises:
            P2PUsageError: see `require_renewable`.
        """
        self.require_renewable()
        self._outgoing.renew()
        self._incoming.renew()
        self._buffers.clear()
        self._plain = None
        self._given_up += self._ahead
        self._ahead.clear()
        self._epoch += 1

    def require_renewable(self) -> None:
        """Raise unless `renew` is possible now.

        Raises:
            P2PUsageError: every message is announced on this lane, or receives are under way.
        """
        if not self._outgoing.stands:
            raise P2PUsageError(
                f"lane {self.spec} has shapes={self.config.shape_mode!r}: every message is announced, "
                f"there is nothing to renew"
            )
        # A receive that a stream is ordered after needs no shapes any more.
        under_way = [one for one in self.queue if not one.sending and not (self.mover.streams and one.waited)]
        if under_way:
            raise P2PUsageError(
                f"lane {self.spec} has {len(under_way)} receives under way; wait for them before renew()"
            )

    def abort(self, reason: str) -> None:
        """End the lane at once and tell the other side why. Transfers under way fail on both sides."""
        abort_together([self], reason)

    # ---- Under the lock of the submitter: numbers, shapes, the backend

    def check(self, transfer: Transfer, *, ahead: int) -> None:
        """Raise for a send that `admit` would not start, where ``ahead`` others go before it.

        Raises:
            P2PUsageError: see `ShapeContract.check`; nothing was sent.
        """
        if transfer.sending and transfer.signature is not None and self.error is None:
            self._outgoing.check(transfer.signature, self.sent + ahead, ahead=ahead)

    def admit(self, transfer: Transfer) -> None:
        """Number a transfer; announce a send, or find the shapes of a receive as far as they are known."""
        self.require_alive()
        if self.mover.streams and isinstance(threading.current_thread(), BackgroundThread):
            raise P2PUsageError(
                f"a transfer of lane {self.spec} was started from an on_done callback; on a device group only the "
                f"thread that runs the plan may start transfers, so that all ranks launch kernels in one order"
            )
        transfer.stream = current_stream(self.device)
        try:
            if isinstance(transfer, ReceiveTransfer):
                transfer.sequence = self.received
                self._admit_receive(transfer)
                self.received += 1
            else:
                transfer.sequence = self.sent
                self._admit_send(transfer)
                self.sent += 1
        except P2PMismatchError as error:
            self.fail(error, kind="mismatch")
            raise
        except P2PError:
            raise
        except RuntimeError as error:
            self._not_started(transfer, error)
        transfer.state = State.ACTIVE
        self.queue.append(transfer)

    def _admit_send(self, transfer: Transfer) -> None:
        signature = transfer.signature
        # First: a message that raises here has no number, and takes no header works along that a later one needs.
        announcing = signature is not None and self._outgoing.send(signature, transfer.sequence)
        transfer.header_works, self._manifests = self._manifests, []
        if signature is not None and announcing:
            stands = self._outgoing.standing is not None
            works = self._announce(transfer.sequence, (signature,), standing=stands)
            transfer.header_works = [*transfer.header_works, *works]
        self._become_plain(self._outgoing.standing)

    def _announce(self, first: int, signatures: Sequence[Signature], *, standing: bool) -> list[Any]:
        """Tell the other end about messages; the works that must be kept until it has read it."""
        self.tally.headers += 1
        if self.wire is None:
            self._incoming.announce(signatures, standing=standing)
            return []
        return self.wire.send_header(encode(sequence=first, standing=standing, signatures=signatures), self._index)

    def _admit_receive(self, transfer: ReceiveTransfer) -> None:
        signature = None if self._deferred else self._incoming.receive()
        if signature is not None:
            self._prepare(transfer, signature)
            return
        self._deferred.append(transfer)
        self._expect_header()

    def _expect_header(self) -> None:
        known = self._incoming.outstanding
        if (
            self._header is None
            and self.wire is not None
            and len(self._deferred) > known
            and not self._incoming.standing
        ):
            self._header = self.wire.receive_header(self._index)

    def _prepare(self, transfer: ReceiveTransfer, signature: Signature) -> None:
        """Give a receive its buffers, for the stream that was current when it was started."""
        buffers = self._buffers_of(transfer, signature)
        if self._ahead:  # in whatever form this receive is to be, the backend has its buffer already
            transfer.tensors, transfer.ticket = self._ahead.popleft()
            self._count(transfer.tensors)
        else:
            with working_on(transfer.stream):
                transfer.tensors = buffers.take()
        transfer.buffers = buffers
        self._become_plain(self._incoming.standing)

    def _buffers_of(self, transfer: ReceiveTransfer, signature: Signature) -> ReceiveBuffers:
        expected = transfer.expected
        if signature.tree == 0 and expected == ExpectedShape(True, (signature.tensors[0].shape,)):
            expected = None
        key = (signature, signature.gradients, expected)
        buffers = self._buffers.get(key)
        if buffers is None:
            exact = self._incoming.stands
            buffers = receive_buffers(
                signature, expected, device=self.device, tally=self.tally, dtype=self._dtype, exact=exact
            )
            if buffers is None:
                kind = "" if self._dtype is None else f" in {self._dtype}"
                wanted = "any shape" if transfer.expected is None else f"shape {transfer.expected}"
                raise P2PMismatchError(
                    f"rank {self.rank} expects message {transfer.sequence} of lane {self.spec} to be of "
                    f"{wanted}{kind}, but rank {self.peer} announced {signature}; "
                    f"give the same shapes and pipeline_dtype on both sides"
                )
            if len(self._buffers) >= _BUFFERS_KEPT:
                self._buffers.clear()
            self._buffers[key] = buffers
            if self._incoming.standing is not None:
                buffers.keep()
        return buffers

    def _become_plain(self, standing: Signature | None) -> None:
        """Take the short way from now on, if the agreed messages are of one tensor that travels as it is."""
        if self._plain is not None or standing is None or not self._one_by_one or self.wire is None:
            return
        if standing.tree == 0:
            transfer = ReceiveTransfer(self)
            try:
                buffers = self._buffers_of(transfer, standing)
            except P2PMismatchError:  # the dtype is not the configured one: each message says so
                return
            if buffers.plain:
                (one,) = standing.tensors
                self._shape, self._plain_dtype, self._nbytes = torch.Size(one.shape), dtype_of(one), buffers.nbytes
                self._plain = buffers

    def operation(self, transfer: Transfer) -> Operation:
        """What the mover is to move for a transfer that is ready, counted."""
        tensors = transfer.tensors if transfer.sending else carried(transfer.tensors, self.device)
        self._count(tensors)
        return Operation(transfer.sending, tensors, self._index, self._epoch)

    def _count(self, tensors: Sequence[Tensor]) -> None:
        self.tally.transfers += len(tensors)
        self.tally.bytes += sum(tensor.nbytes for tensor in tensors)

    def started(self, transfer: Transfer) -> None:
        """Have a started transfer looked after, if no caller does. Not under the lock."""
        if self.wire is None:
            self._match_local(transfer)
        elif transfer.callbacks or not (transfer.is_ready or transfer.attended):
            self.look_after(transfer)

    def _match_local(self, transfer: Transfer) -> None:
        """On one rank the receive learns of its send here, and both end."""
        if transfer.sending:
            self._start_deferred()
        for one in self.queue.copy():
            if one.ticket is not None and one.ticket.done():
                self._ended(one, _DONE)

    # ---- Headers

    def _take_header(self, timeout: timedelta) -> None:
        """Wait for the next header and start the receives that it is for. Only for the leader."""
        take = self._header
        if take is None:
            return
        self.tally.host_syncs += 1
        sequence, standing, signatures = decode(take(timeout))
        self.tally.headers += 1
        with self._submit.lock:
            self._header = None
            first = self._deferred[self._incoming.outstanding]
            if sequence != first.sequence:
                self.fail(
                    P2PMismatchError(
                        f"rank {self.rank} waits for message {first.sequence} of lane {self.spec}, but rank "
                        f"{self.peer} announced message {sequence}; call renew() on both sides at the same message"
                    ),
                    kind="mismatch",
                )
                return
            self._incoming.announce(signatures, standing=standing)
        # A receive of a shared communicator is started with its batch, which waits for this; one of a device group by
        # the thread that runs the plan.
        in_background = self.mover.streams and isinstance(threading.current_thread(), BackgroundThread)
        if self.config.communicators == "separate" and not in_background:
            self._start_deferred()

    def _start_deferred(self) -> None:
        """Start the receives whose shapes are known by now."""
        with self._submit.lock:
            ready = self._prepare_deferred()
            if ready and self.error is None:
                with working_on(ready[0].stream):
                    self._submit.start([one for one in ready if one.ticket is None])

    def _prepare_deferred(self) -> list[ReceiveTransfer]:
        ready = []
        try:
            while self._deferred and (signature := self._incoming.receive()) is not None:
                self._prepare(self._deferred[0], signature)
                ready.append(self._deferred.popleft())
            if self._deferred:
                self._expect_header()
        except P2PMismatchError as error:
            self.fail(error, kind="mismatch")
            if self.wire is None:  # the sender is here, and learns of it by its call
                raise
        return ready

    def settle(self) -> None:
        """Wait for the headers of all receives that lack one: on a shared communicator, before their batch starts."""
        while self._deferred and self.error is None:
            last = self._deferred[-1]
            self._set_due(last, None)
            with self._wait_lock.lead():
                try:
                    self._take_header(self._patience)
                except RuntimeError as error:
                    self.explain(error, last)
            with self._submit.lock:
                self._prepare_deferred()

    # ---- Waiting

    def wait_for(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Transfer.wait`."""
        if self._streams:
            self._order(transfer, timeout)
            return
        queue, lock = self.queue, self._wait_lock
        # The common case in one go; `WaitLock.until` is the general one, and does the same.
        if timeout is None and (ticket := transfer.ticket) is not None and lock.leader.acquire(False):
            failure = None
            transfer.waited = True
            try:
                if queue and queue[0] is transfer:
                    ticket.hold(self._patience)
                    # The lane may have failed in the meantime. No thread comes in between these three lines.
                    if transfer.state is _ACTIVE:
                        transfer.state = _DONE
                        queue.popleft()
                        if transfer.sending:
                            transfer.tensors = ()
            except RuntimeError as error:
                failure = error
            finally:
                lock.leader.release()
            if lock.contended:
                lock.wake()
            if failure is not None:
                self.explain(failure, transfer)
            elif transfer.callbacks and transfer.state is _DONE:
                self._tell_all(transfer)
        if transfer.state is _ACTIVE:
            self._until(transfer, timeout, posted=False)
        if transfer.state is not _DONE:
            self._raise_failure(transfer)
        if self._streamed:
            transfer.ticket.order()
            used_here(transfer.tensors, transfer.stream)

    def _order(self, transfer: Transfer, timeout: float | None) -> None:
        """Order the current stream after a transfer of a device group: the host waits for its header only."""
        self._until(transfer, timeout, posted=True)
        self._raise_failure(transfer)
        transfer.waited = True
        try:
            transfer.ticket.order()
            transfer.ticket.done()  # raises, if it has failed by now
        except RuntimeError as error:
            self.explain(error, transfer)
        self._raise_failure(transfer)
        used_here(transfer.tensors, transfer.stream)

    def synchronize(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Transfer.synchronize`."""
        self.wait_for(transfer, timeout)
        if self.mover.streams:
            self.tally.host_syncs += 1
            while not self.poll(transfer):
                time.sleep(_POLL_SECONDS)
            self._raise_failure(transfer)
        elif self._streamed:
            self.tally.host_syncs += 1
            for event in mark(self.device):
                event.synchronize()

    def provide(self, transfer: ReceiveTransfer) -> Any:
        """The payload of a receive before its data is there: wait for its buffers only."""
        if self.wire is None:
            self.wait_for(transfer, None)  # on one rank nothing else fills it
        else:
            self._until(transfer, None, posted=True)
            self._raise_failure(transfer)
        return transfer.payload

    def poll(self, transfer: Transfer) -> bool:
        """See `Transfer.is_completed`; the transfer is not known to have ended."""
        if transfer.state is _ACTIVE and self.error is not None:
            self._ended(transfer, _FAILED, self.error)
        if transfer.state is _ACTIVE:
            if not self.mover.polled:
                self._wait_lock.ask(transfer)
            elif transfer.ticket is None:
                if self.wire is not None:
                    self._wait_lock.watch(transfer)
                    if not isinstance(threading.current_thread(), BackgroundThread):
                        self._start_deferred()
            else:
                return self._is_done(transfer)
        return transfer.state is _DONE or transfer.state is _FAILED

    def _is_done(self, transfer: Transfer) -> bool:
        """Ask the ticket of a transfer, where the mover is polled; True of a failed one, too."""
        try:
            done: bool = transfer.ticket.done()
        except RuntimeError as error:
            self.explain(error, transfer)
            return True
        return done

    def take_back(self, transfer: ReceiveTransfer) -> None:
        """See `ReceiveTransfer.release`."""
        state, buffers = transfer.state, transfer.buffers
        if state is not _DONE and (state is _FAILED or not transfer.waited) and not transfer.is_completed():
            raise P2PUsageError(f"{transfer!r} cannot be released before it is done; wait for it")
        self.tally.released += 1
        if buffers is not None and transfer.state is not _FAILED:
            buffers.release(transfer.tensors, mark(self.device) if self._streamed else ())

    def call_back(self, transfer: Transfer, callback: Callable[[Any], None]) -> None:
        """See `Transfer.on_done`."""
        with self._lock:
            transfer.callbacks = (*transfer.callbacks, callback)
        if transfer.state is _DONE or transfer.state is _FAILED:
            self._tell_all(transfer)
        elif transfer.state is _ACTIVE:
            self.look_after(transfer)

    def look_after(self, transfer: Transfer) -> None:
        """Have the end of a transfer without a waiting thread seen: by this lane's thread, or by `sweep`."""
        if not self.mover.polled or self._header is not None:
            self._wait_lock.watch(transfer)

    def _until(self, transfer: Transfer, timeout: float | None, *, posted: bool) -> None:
        if transfer.state is _ACTIVE:
            self._set_due(transfer, timeout)
            self._wait_lock.until(transfer, posted=posted, left=self._left)

    def _left(self, transfer: Transfer) -> float:
        """Seconds that a follower may wait for the leader; the lane fails where there are none left."""
        if self.error is not None:
            self._ended(transfer, _FAILED, self.error)
        left = transfer.due + BACKSTOP_SECONDS - time.monotonic()
        if left <= 0:
            self.fail(self._timed_out(transfer), kind="timeout")
        return max(0.0, left)

    def _step(self, waited: Transfer | None) -> None:
        """Wait for one thing, on behalf of ``waited``; None is the lane's own thread. Only for the leader."""
        head: Transfer | None = next(iter(self._deferred if self.mover.streams else self.queue), None)
        if head is None:  # it ended meanwhile, and every waiter has been told
            return
        try:
            timeout = timedelta_of(None)
            if waited is not None and waited.due != math.inf:
                timeout = timedelta_of(waited.due - time.monotonic() + BACKSTOP_SECONDS)
            if head.ticket is not None:
                head.ticket.hold(timeout)
                self._ended(head, _DONE)
            elif self._header is not None:
                self._take_header(timeout)
            elif self.wire is not None:
                self._start_deferred()
            else:
                self._await_local(timeout)
        except P2PError:
            raise
        except RuntimeError as error:
            self.explain(error, waited or head)

    def _await_local(self, timeout: timedelta) -> None:
        """Wait for a send of this rank, by another thread."""
        end = time.monotonic() + timeout.total_seconds()
        while self.error is None and self._deferred:
            if time.monotonic() > end:
                raise RuntimeError(f"no send came in {timeout.total_seconds():.3g} s")
            time.sleep(_POLL_SECONDS)

    def _has_work(self, wanted: int) -> bool:
        """Whether the lane's own thread has something to wait for, up to that number."""
        if self.mover.streams:
            return self._header is not None and bool(self._deferred) and self._deferred[0].sequence <= wanted
        return bool(self.queue) and self.queue[0].sequence <= wanted

    def _set_due(self, transfer: Transfer, timeout: float | None) -> None:
        transfer.waited = True
        if timeout is not None:
            transfer.seconds = timeout
            transfer.due = time.monotonic() + timeout
        elif transfer.due == math.inf:
            transfer.seconds = self.config.deadline
            transfer.due = time.monotonic() + transfer.seconds

    # ---- The progress thread

    def sweep(self, now: float) -> None:
        """See ends and deadlines of transfers without a waiting thread."""
        if self.mover.polled:
            for transfer in self.queue.copy():
                if transfer.ticket is None or not self._is_done(transfer):
                    break
                self._ended(transfer, _DONE)
        if self.mover.streams and self.queue and self._has_final_notice(now):
            self.explain(RuntimeError("the other side ended the lane"), self.queue[0])
            return
        for transfer in self.queue.copy():
            if transfer.posted_at == math.inf:
                transfer.posted_at = now
            if transfer.due == math.inf and (transfer.sending or transfer.waited):
                transfer.due = now + self.config.deadline
                transfer.seconds = self.config.deadline
            if now >= transfer.due:
                self.fail(self._timed_out(transfer), kind="timeout")
                return
        if not self.mover.polled:
            queue = self.queue.copy()
            if queue and queue[0].sending and now - queue[0].posted_at > _UNATTENDED_SECONDS:
                # Only those that the backend has: another thread may be about to start the last ones.
                posted = [transfer for transfer in queue if transfer.ticket is not None]
                if posted:
                    self._wait_lock.watch(posted[-1])

    def _has_final_notice(self, now: float) -> bool:
        """Whether the other side has ended the lane; transfers that it closed after get a moment to end."""
        if self.wire is None or not self.wire.has_end_notice():
            return False
        if (self.wire.end_notice() or ("", ""))[0] != "closed":
            return True
        self._closed_by_peer = min(self._closed_by_peer, now)
        return now - self._closed_by_peer > _CLOSED_SECONDS

    def drain(self, end: float) -> None:
        """Hold the host until transfers that were ordered or sent are done, or until ``end`` (monotonic)."""
        for transfer in self.queue.copy() if self.mover.streams else ():
            while self.error is None and transfer.state is _ACTIVE and transfer.ticket is not None:
                if self._is_done(transfer):
                    self._ended(transfer, _DONE)
                elif time.monotonic() >= end or not (transfer.sending or transfer.waited):
                    break
                else:
                    time.sleep(_POLL_SECONDS)

    # ---- Ends

    def require_alive(self) -> None:
        """Raise on a lane that has ended.

        Raises:
            P2PLaneDeadError: it has.
        """
        if self.error is not None:
            relay = f"lane {self.spec} is dead on rank {self.rank} since; open new lanes"
            raise P2PLaneDeadError(relayed(text_of(self.error), relay)) from self.error

    def fail(self, error: P2PError, *, kind: str) -> None:
        """End the lane, and all of its communicator, because of ``error``; ``kind`` goes to the other side."""
        end_together([End(self, error, text_of(error))], kind=kind)

    def explain(self, error: RuntimeError, transfer: Transfer | None) -> None:
        """Find out why the backend failed, and end the lane with that."""
        if self.error is None:
            found = self._cause_of(error, transfer)
            found.__cause__ = error
            self.fail(found, kind="lost")
        if transfer is not None:
            self._ended(transfer, _FAILED, self.error)

    def _cause_of(self, error: RuntimeError, transfer: Transfer | None) -> P2PError:
        notice = None if self.wire is None else self.wire.end_notice()
        if notice is not None:
            kind, text = notice
            told = P2PMismatchError if kind == "mismatch" else P2PPeerError
            return told(relayed(text, f"rank {self.peer} ended lane {self.spec}"))
        if transfer is not None and time.monotonic() >= transfer.due:
            return self._timed_out(transfer)
        what = "" if transfer is None else f" while {_verb(transfer)} message {transfer.sequence} of lane {self.spec}"
        return P2PPeerError(
            f"rank {self.rank} lost rank {self.peer}{what}: rank {self.peer} died, or closed its connection; "
            f"look at its output first ({text_of(error).splitlines()[0]})"
        )

    def _timed_out(self, transfer: Transfer) -> P2PTimeoutError:
        return P2PTimeoutError(
            rank=self.rank,
            peer=self.peer,
            lane=str(self.spec),
            sequence=transfer.sequence,
            seconds=transfer.seconds,
            what=_verb(transfer),
        )

    def _ended(self, transfer: Transfer, state: State, error: BaseException | None = None) -> None:
        """Set the end of a transfer, wake its waiters, call its callbacks."""
        with self._lock:
            if transfer.state is not _ACTIVE:
                return
            if self.queue and self.queue[0] is transfer:
                self.queue.popleft()
            elif self.wire is None and transfer in self.queue:
                self.queue.remove(transfer)  # both ends of the lane are in one queue
            transfer.error = error
            transfer.state = state
            if transfer.sending:
                transfer.tensors = ()
            self._wait_lock.notify()
        if transfer.callbacks:
            self._tell_all(transfer)

    def _tell_all(self, transfer: Transfer) -> None:
        with self._lock:
            callbacks, transfer.callbacks = transfer.callbacks, ()
        for callback in callbacks:
            try:
                callback(transfer)
            except Exception as error:  # noqa: BLE001 -- it may run on a thread without a caller
                found = P2PUsageError(
                    f"{type(error).__name__}: {text_of(error)} (raised by the on_done callback {callback!r} of message "
                    f"{transfer.sequence} of lane {self.spec}, which has ended with it)"
                )
                found.__cause__ = error
                self.fail(found, kind="aborted")

    def _raise_failure(self, transfer: Transfer) -> None:
        """Raise what a wait for a transfer raises that has failed, or was not started."""
        if transfer.state is _FAILED and transfer.error is not None:
            raise transfer.error
        if transfer.state is _PENDING:
            raise P2PUsageError(f"{transfer!r} is waited for inside the batch() that is to start it; wait after it")

    def finish(self, error: P2PError) -> None:
        """Fail the transfers under way: the last part of an end."""
        self._wait_lock.end()
        for transfer in self.queue.copy():
            self._ended(transfer, _FAILED, error)
        self.queue.clear()
        self._ahead.clear()
        self._given_up.clear()

    def take_error(self, error: P2PError) -> bool:
        """Note why the lane ends; False where it has ended before."""
        with self._lock:
            if self.error is not None:
                return False
            self.error = error
            return True

    def join(self) -> None:
        """Return when no thread of the lane runs any more; the lane has ended."""
        self._wait_lock.join()


def _verb(transfer: Transfer) -> str:
    return "sending" if transfer.sending else "receiving"
