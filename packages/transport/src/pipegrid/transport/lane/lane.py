"""A lane: payloads in at one end, in order, and out at the other. One class for every backend.

What differs between backends is in the mover (`pipegrid.transport.backends`); what two ranks tell each other beside the
payloads is in the wire; what messages are, in `Outgoing` and `Incoming`; waits, in `LaneTransfers`; failures, in
`LaneEnding`. A message of one tensor whose shape is agreed needs nothing but its mover: it comes first in `Lane.isend`
and `Lane.irecv`. All others go through the submit function, which knows batches.

The latency of a small message is Python's share of it, most of it cold code. So the backend is called first, and the
bookkeeping is done while the message travels.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any

import torch
from attrs import asdict
from torch import Tensor
from torch.distributed import ProcessGroup

from pipegrid.core.lanes import LaneStats
from pipegrid.transport.backends import Operation, Ticket
from pipegrid.transport.config import STEPS_KEPT
from pipegrid.transport.errors import P2PError, P2PMismatchError, P2PUsageError, text_of
from pipegrid.transport.lane.batch import Submitter
from pipegrid.transport.lane.ending import abort_lanes
from pipegrid.transport.lane.endpoint import Endpoint, Incoming, Outgoing
from pipegrid.transport.lane.landing import BESIDE
from pipegrid.transport.lane.stream_waits import StreamWaits
from pipegrid.transport.lane.transfers import HostWaits, LaneTransfers, LocalWaits
from pipegrid.transport.messages.handle import ReceiveTransfer, State, Transfer
from pipegrid.transport.messages.message import StepShapes
from pipegrid.transport.messages.payload import SMALL_BYTES, ReceiveBuffers, carried
from pipegrid.transport.messages.slot import Slot, SlotBuffers
from pipegrid.transport.streams import current_stream, has_streams, used_here, working_on
from pipegrid.transport.waits.wait_lock import BackgroundThread

_ACTIVE = State.ACTIVE  # members of an Enum are looked up slowly
_NUMBERS = BESIDE - 1  # never used twice: to the sender, a receive that was posted for one stays posted
_Start = Callable[[Sequence[Tensor]], Ticket]


class Lane:
    """One end (or, on one rank, both) of a lane. Made by `open_lanes`.

    Attributes:
        spec: which lane.
        rank: this global rank.
        peer: the global rank at the other end.
        device: where payloads live.
        config: the settings it was opened with.
        queue: transfers that were started, in order, and have not been seen to end.
        transfers: those under way; waits for them.
        ending: ends the lane, and sets the end of each transfer.
        outgoing: what messages are, at the source.
        incoming: what messages are, at the destination.
        index: its number among the lanes of its communicator.
    """

    def __init__(self, end: Endpoint, submit: Submitter) -> None:
        connection = end.connection
        self.spec, self.rank, self.peer, self.index = end.spec, end.rank, end.peer, end.index
        self.device, self.config, self.connection, self.tally = end.device, end.config, connection, end.tally
        self.mover, self.wire = connection.mover, end.wire
        self.sent = self.received = 0
        self._counted = 0  # messages of which the tally knows: those that were started alone are all alike
        self.incoming = Incoming(end)
        self.outgoing = Outgoing(end, there=self.incoming.contract)
        waits = (StreamWaits if self.mover.streams else HostWaits) if connection.wires else LocalWaits
        self.transfers: LaneTransfers = waits(end, submit=submit, outgoing=self.outgoing, incoming=self.incoming)
        self.ending = self.transfers.ending
        connection.lanes.append(self.ending)
        self.queue = self.transfers.queue
        self._submit = submit
        one_by_one = not (self.mover.streams or submit.strict or submit.shares)
        self._most_ahead = self.config.receives_ahead if one_by_one else 0
        self._needs_shapes = end.config.shape_mode == "given"
        self._epoch = 0  # of renewals, or the number of a batch signature
        self._bound: dict[int, tuple[_Start, _Start]] = {}  # by epoch what starts a send, and a receive
        self._next: dict[int, tuple[Sequence[Tensor], Ticket]] = {}  # by epoch, the first receive of the next step
        self._steps: dict[str, StepShapes] = {}
        self._learned = 0
        self._early: deque[ReceiveTransfer] | None = None  # posted as a step began whose messages are known
        self._later = 0  # the other messages of such a step
        self._bind()
        self._streamed = has_streams(end.device)
        self._receive_stream = connection.receive_stream
        # Written by messages without bytes. The lane's own: their transfers have no tensors to keep for the backend.
        with working_on(self._receive_stream):
            self._nothing = torch.empty(1, dtype=torch.uint8, device=end.device)

    def _bind(self) -> None:
        """Start transfers of this epoch from now on."""
        send, receive = [self.mover.starter(sending, self.index, self._epoch) for sending in (True, False)]
        self._start_send, self._start_receive = self._bound[self._epoch] = send, receive

    @property
    def error(self) -> P2PError | None:
        """Why the lane is dead; None while it lives."""
        return self.ending.error

    @property
    def group(self) -> ProcessGroup | None:
        """The process group that moves its payloads; None on a lane from a rank to itself."""
        return self.connection.group

    @property
    def ahead(self) -> int:
        """Receives that a step may post before their turn: none where the order of all transfers counts.

        In a step whose messages it has learned, the lane posts them itself.
        """
        return 0 if self._early is not None else self._most_ahead

    @property
    def takes_slots(self) -> bool:
        """Whether a receive can be posted to a slot: where all messages have one shape, as agreed or given."""
        return self.incoming.contract.stays

    @property
    def stats(self) -> LaneStats:
        """The counts of this end so far."""
        with self._submit.lock:
            self._count_alone()
        counted = asdict(self.tally)
        live = self.received - counted.pop("released")
        return LaneStats(messages=self.sent + self.received - len(self.incoming.deferred), live=live, **counted)

    def _count_alone(self) -> None:
        """Count the messages of one tensor that went to the mover by themselves, all alike since the last time."""
        count = self.sent + self.received - self._counted
        plain = self.outgoing.plain or (self.incoming.plain and self.incoming.plain[0])
        if count and plain is not None:
            self._counted += count
            self.tally.transfers += count
            self.tally.bytes += count * plain.nbytes

    def describe(self) -> dict[str, object]:
        """The lane as plain data, for a record of a failure; under way is what was so when it ended, if it has."""
        return {
            "sent": self.sent,
            "received": self.received,
            "under way": self.ending.under_way(),
            "error": None if self.error is None else text_of(self.error),
        }

    # ---- Sending and receiving

    def isend(self, payload: Any, *, note: str | None = None) -> Transfer:
        """Start sending ``payload`` (a tensor, None, or lists, tuples and dicts of those) to the destination.

        The tensors must not change until the handle is done.

        Args:
            payload: the message.
            note: text for the receiver (`ReceiveTransfer.note`), part of the announcement; None repeats the note of the
                agreed shapes.

        Raises:
            P2PUsageError: this rank is not the source; the message requires grad where that was announced without; or
                it cannot be sent as it is. Nothing was sent.
            P2PMismatchError: it differs from its announcement; nothing was sent, and the lane is dead on both sides.
            P2PLaneDeadError: the lane has failed before.
        """
        plain, submit = self.outgoing.plain, self._submit
        if plain is not None and note is None and self.ending.error is None and plain.fits(payload):
            tensors = [payload.detach() if payload.requires_grad else payload]
            if not submit.pending or get_ident() not in submit.pending:
                with submit.lock:
                    try:
                        ticket = self._start_send(tensors)
                    except RuntimeError as error:
                        self.ending.not_started(Transfer(self, self.sent), error)
                    # The message is on its way; what follows is no part of its latency.
                    transfer = Transfer(self, self.sent, ticket, tensors)
                    self.sent += 1
                    self.queue.append(transfer)
                if submit.asleep:
                    submit.wake.set()
                return transfer
            transfer = Transfer(self)
            transfer.tensors, transfer.signature = tensors, plain.signature
        else:
            self._require_usable(sending=True)
            transfer = Transfer(self)
            self.outgoing.fill(transfer, payload, note)
        submit(transfer)
        return transfer

    def irecv(self, shapes: Any = None, *, blocking: bool = False, slot: Slot | None = None) -> ReceiveTransfer:
        """Start receiving the next message.

        Args:
            shapes: one shape for one tensor, a list of shapes (None where no tensor comes) for a list; None takes the
                message as it was sent. Where shapes vary, only the form counts: one tensor, or a list of so many.
            blocking: the caller waits for it before anything else, so no thread needs to look after its header.
            slot: where it arrives; None is memory of the lane. For lanes with `takes_slots`.

        Raises:
            P2PUsageError: this rank is not the destination, or shapes are missing (with ``shapes="given"``); the slot
                has a message that is not released, or shapes vary on the lane.
            P2PMismatchError: the announced message differs; the lane is dead on both sides.
            P2PLaneDeadError: the lane has failed before.
        """
        plain, submit, early = self.incoming.plain, self._submit, self._early
        if slot is not None:
            if not self.takes_slots:
                mode = self.config.shape_mode
                raise P2PUsageError(f"lane {self.spec} has shapes={mode!r}, a receive to a slot needs shapes that stay")
            slot.reserve()
        if early:
            if shapes is not None and plain is not None and plain[0].shape != shapes:
                raise P2PUsageError(
                    f"shapes is {shapes} in a receive on lane {self.spec}, and messages of this step are "
                    f"{plain[0].shape}"
                )
            if not self._later:
                posted = early.popleft()
                if not early and plain is not None:
                    self._post_next(plain[1])
                return posted
        if (
            plain is not None
            and self.ending.error is None
            and (not self._needs_shapes if shapes is None else plain[0].shape == shapes)
            and (not submit.pending or get_ident() not in submit.pending)
        ):
            posted = self._receive_plain(plain[1] if slot is None else SlotBuffers(plain[1], slot), submit)
        else:
            self._require_usable(sending=False)
            posted = ReceiveTransfer(self)
            posted.blocking, posted.slot = blocking, slot
            self.incoming.expect(posted, shapes)
            submit(posted)
        if not early:
            return posted
        self._later -= 1
        early.append(posted)
        return early.popleft()

    def _receive_plain(self, buffers: ReceiveBuffers | SlotBuffers, submit: Submitter) -> ReceiveTransfer:
        """Post the receive of a plain message; its payload is made while it travels."""
        with submit.lock:
            try:
                if self._epoch in self._next:
                    tensors, ticket = self._next.pop(self._epoch)
                elif self._receive_stream is None:
                    tensors = buffers.take()
                    ticket = self._start_receive(tensors)
                else:
                    with working_on(self._receive_stream):
                        tensors = buffers.take()
                        ticket = self._start_receive(tensors)
            except RuntimeError as error:
                self.ending.not_started(ReceiveTransfer(self, self.received), error)
            payload = buffers.payload(tensors, prepare=not self._streamed)
            transfer = ReceiveTransfer(self, self.received, ticket, tensors, buffers=buffers, payload=payload)
            if self._streamed:
                transfer.stream = self._receive_stream or current_stream(self.device)
            self.received += 1
            self.queue.append(transfer)
        if submit.asleep:
            submit.wake.set()
        return transfer

    def _require_usable(self, *, sending: bool) -> None:
        if self.rank != (self.spec.source if sending else self.spec.destination):
            verb, role, other = ("send", "destination", "irecv") if sending else ("receive", "source", "isend")
            raise P2PUsageError(
                f"rank {self.rank} cannot {verb} on lane {self.spec}: it is the {role}; use {other} there"
            )
        self.ending.require_alive()

    def renew(self) -> None:
        """Forget the agreed shapes; the next message agrees on new ones.

        Both ends must call it between the same two messages, for example between training and evaluation.

        Raises:
            P2PUsageError: see `require_renewable`.
        """
        self.require_renewable()
        self._count_alone()
        self.outgoing.renew()
        self.incoming.renew()
        self._bound.clear()
        self._epoch += 1
        self._bind()

    def begin_step(self, batch: str | None = None, *, learn: bool = False) -> None:
        """Begin a step of a ``batch`` signature that `learn` has noted at both ends; None announces each message.

        The first receives of such a step are posted now (`P2PConfig.receives_ahead`): how many there are is known.

        Raises:
            P2PMismatchError: the step before has received fewer messages than were sent for its signature before.
        """
        if self._early:
            raise P2PMismatchError(
                f"a step has received {len(self._early) + self._later} messages fewer on lane {self.spec} than the "
                "first one with a batch of the same shapes. Where messages depend on more than those, set "
                'variable_seq_lengths=True and shapes="header"'
            )
        step = None if batch is None else self._steps.get(batch)
        with self._submit.lock:
            if self.sent + self.received != self._counted:
                self._count_alone()
            end: Outgoing | Incoming = self.outgoing if self.rank == self.spec.source else self.incoming
            end.contract.begin_step(step, learn=learn)
            end.plain = None if step is None else step.plain
            if step is not None and step.plain is None:
                end.find_plain(step, self)
            self._epoch = 0 if step is None else step.number
            if (bound := self._bound.get(self._epoch)) is None:
                self._bind()
            else:
                self._start_send, self._start_receive = bound
        self._early, self._later = None, 0
        if step is not None and step.plain is not None and self._most_ahead and self.rank != self.spec.source:
            posted = deque([self.irecv() for _ in range(min(self._most_ahead, len(step.messages)))])
            self._early, self._later = posted, len(step.messages) - len(posted)

    def _post_next(self, buffers: ReceiveBuffers) -> None:
        """Post the first receive of the next step with this batch, where its message is small, on a CPU.

        A message of gloo leaves once its sender knows of the receive: with one that is posted late it takes two trips.
        """
        posts = self._most_ahead and not self._streamed and self.ending.error is None
        if posts and buffers.nbytes <= SMALL_BYTES:
            with self._submit.lock, suppress(RuntimeError):  # of a closed connection, which the next receive raises
                tensors = buffers.take()
                self._next[self._epoch] = tensors, self._start_receive(tensors)

    def learn(self, batch: str) -> None:
        """Note the messages of this step, the first of a ``batch`` signature. Both ends call it after the same step."""
        if passed := self.outgoing.contract.passed or self.incoming.contract.passed:
            self._learned += 1
            gone = [self._steps.pop(batch)] if batch in self._steps else []
            self._steps[batch] = StepShapes(tuple(passed), self._learned % _NUMBERS + 1)
            if len(self._steps) > STEPS_KEPT:
                gone.append(self._steps.pop(next(iter(self._steps))))
            for step in gone:  # no message comes: the other end has forgotten it as well
                self._bound.pop(step.number, None)
                self._next.pop(step.number, None)

    def require_renewable(self) -> None:
        """Raise unless `renew` is possible now.

        Raises:
            P2PUsageError: every message is announced on this lane, or receives are under way.
        """
        if not self.outgoing.contract.stays:
            raise P2PUsageError(
                f"lane {self.spec} has shapes={self.config.shape_mode!r}: every message is announced, "
                "there is nothing to renew"
            )
        if under_way := self.transfers.receives_under_way():
            raise P2PUsageError(f"lane {self.spec} has {under_way} receives under way; wait for them before renew()")

    def abort(self, reason: str) -> None:
        """End the lane at once and tell the other side why. Transfers under way fail on both sides."""
        abort_lanes([self.ending], reason)

    # ---- Under the lock of the submitter: numbers, shapes, the backend

    def check(self, transfer: Transfer, *, ahead: int) -> None:
        """Raise for a send that `admit` would not start, where ``ahead`` others go before it.

        Raises:
            P2PUsageError: see `ShapeContract.check`; nothing was sent.
        """
        if transfer.signature is not None and self.ending.error is None:
            self.outgoing.contract.check(transfer.signature, self.sent + ahead, ahead=ahead)

    def admit(self, transfer: Transfer) -> None:
        """Number a transfer; announce a send, or find the shapes of a receive as far as they are known."""
        self.ending.require_alive()
        if self.mover.streams and isinstance(threading.current_thread(), BackgroundThread):
            raise P2PUsageError(
                f"a transfer of lane {self.spec} was started from an on_done callback; on a device group only the "
                f"thread that runs the plan may start transfers, so that all ranks launch kernels in one order"
            )
        before, here = transfer.stream, current_stream(self.device)
        transfer.stream = here
        if transfer.sending and before is not None and here is not None and before != here:
            here.wait_stream(before)  # a batch: what it sends was made under the stream of the call
            used_here(transfer.tensors, before)
        try:
            if isinstance(transfer, ReceiveTransfer):
                transfer.stream = self._receive_stream or transfer.stream
                transfer.sequence = self.received
                self.incoming.admit(transfer)
                self.received += 1
            else:
                transfer.sequence = self.sent
                self.outgoing.admit(transfer)
                self.sent += 1
            self._counted += 1  # by `operation`
        except P2PMismatchError as error:
            self.ending.fail(error, kind="mismatch")
            raise
        except P2PError:
            raise
        except RuntimeError as error:
            self.ending.not_started(transfer, error)
        transfer.state = _ACTIVE
        self.queue.append(transfer)

    def operation(self, transfer: Transfer) -> Operation:
        """What the mover is to move for a transfer that is ready, counted."""
        tensors = transfer.tensors if transfer.sending else carried(transfer.tensors, self._nothing)
        self.tally.count(tensors)
        return transfer.sending, tensors, self.index, BESIDE if transfer.beside_header else self._epoch
