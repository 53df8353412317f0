"""A lane between two ranks: headers, batches and structures; how completion is learned is the subclasses' matter."""

from __future__ import annotations

import abc
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from pipegrid.transport.errors import P2PError, P2PMismatchError, P2PPayloadError, P2PPeerError
from pipegrid.transport.handle import ReceiveTransfer, State, Transfer
from pipegrid.transport.lane import Lane
from pipegrid.transport.message import Signature, decode, encode
from pipegrid.transport.payload import ReceiveBuffers, carried, flatten, signature_of
from pipegrid.transport.wait_lock import WaitLock
from pipegrid.transport.wire import Operation, Wire, post, timedelta_of

# Past its deadline the progress thread ends a transfer, with a note to the other side; should it be late, the
# backend's own timeout does so this much later, without one.
BACKSTOP_SECONDS = 1.0


class RemoteLane(Lane):
    """See `Lane`. A receive whose shapes are not known is deferred until their header has come."""

    def __init__(self, wire: Wire, **options: Any) -> None:
        super().__init__(device=wire.device, **options)
        self.wire = wire
        self._deferred: deque[ReceiveTransfer] = deque()
        self._header: Callable[[timedelta], bytes] | None = None
        self._control: list[Any] = []  # works of manifests; the next send takes them along
        self._wait_lock = WaitLock(self._lock, f"pipegrid-lane-{self.spec}", self._step, self._has_wanted)
        self._patience = timedelta(seconds=self.config.deadline + BACKSTOP_SECONDS)

    @property
    def group(self) -> ProcessGroup:
        """The group that moves its payloads."""
        return self.wire.communicator.data

    # Starting

    def _outbound(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        try:
            return carried(tensors, self.device)
        except RuntimeError as error:
            raise P2PPayloadError(f"lane {self.spec} cannot see these tensors as bytes: {error}") from error

    def admit(self, transfer: Transfer) -> None:
        """Number it; announce a send, or find out what a receive will be."""
        self.require_alive()
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
            self.explain(error, transfer)
            raise self.error or error from error
        transfer.state = State.PENDING
        self.queue.append(transfer)

    def _admit_send(self, transfer: Transfer) -> None:
        signature = transfer.signature
        # First: a message that is refused has no number, and takes no headers along that a later one needs.
        announcing = signature is not None and self._outgoing.send(signature, transfer.sequence)
        transfer.header_works, self._control = self._control, []
        if signature is not None and announcing:
            stands = self._outgoing.standing is not None
            header = encode(sequence=transfer.sequence, standing=stands, signatures=(signature,))
            transfer.header_works = [*transfer.header_works, *self.wire.send_header(header)]
            self.tally.headers += 1
        self.tally.messages += 1
        self._sends_stand()

    def _admit_receive(self, transfer: ReceiveTransfer) -> None:
        signature = None if self._deferred else self._incoming.receive()
        if signature is not None:
            self._prepare(transfer, signature)
            return
        self._deferred.append(transfer)
        if self._header is None:
            self._header = self.wire.receive_header()

    def _prepare(self, transfer: ReceiveTransfer, signature: Signature) -> None:
        """Give a receive its buffers."""
        transfer.buffers = buffers = self._buffers_of(transfer, signature)
        transfer.tensors = buffers.take(self.tally)
        self.tally.messages += 1
        self._receives_stand(buffers)

    @abc.abstractmethod
    def _sends_stand(self) -> None:
        """A send was admitted: prepare for more of its kind, if one stands."""

    @abc.abstractmethod
    def _receives_stand(self, buffers: ReceiveBuffers) -> None:
        """A receive was admitted: prepare for more of its kind, if one stands."""

    def launch(self, transfer: Transfer) -> None:
        """See `Lane.launch`."""
        if transfer.is_ready and not transfer.works:
            (outcome,) = post([self.operation(transfer)])
            self.launched(transfer, outcome)

    def operation(self, transfer: Transfer) -> Operation:
        """What the backend is to move, counted."""
        tensors = transfer.tensors if transfer.sending else carried(transfer.tensors, self.device)
        self.tally.transfers += len(tensors)
        self.tally.bytes += sum(tensor.nbytes for tensor in tensors)
        return self.wire, tensors, transfer.sending

    def launched(self, transfer: Transfer, outcome: Sequence[Any] | RuntimeError) -> None:
        """Note what the backend said to `operation`."""
        if isinstance(outcome, RuntimeError):
            self.explain(outcome, transfer)
        else:
            transfer.works = outcome

    def announce(self, payloads: Sequence[Any]) -> None:
        """See `Lane.announce`."""
        self._require_announceable()
        signatures = [signature_of(*flatten(payload)) for payload in payloads]
        if not signatures:
            return
        with self.submitter.lock:
            self.require_alive()
            first = self.sent + self._outgoing.outstanding
            self._control += self.wire.send_header(encode(sequence=first, standing=False, signatures=signatures))
            self._outgoing.announce(signatures, standing=False)
            self.tally.headers += 1

    def renew(self) -> None:
        """See `Lane.renew`."""
        super().renew()
        self.wire.epoch += 1

    # Headers

    def _take_header(self, timeout: timedelta) -> None:
        """Wait for the next header and post the receives that it allows. Only for the thread whose turn it is."""
        take = self._header
        if take is None:
            return
        self.tally.host_syncs += 1
        sequence, standing, signatures = decode(take(timeout))
        self.tally.headers += 1
        with self.submitter.lock:
            try:
                self._header = None
                self._require_next(sequence, self._deferred[0])
                self._incoming.announce(signatures, standing=standing)
                ready: list[Transfer] = []
                while self._deferred and (signature := self._incoming.receive()) is not None:
                    self._prepare(self._deferred[0], signature)
                    ready.append(self._deferred.popleft())
                if self._deferred:
                    self._header = self.wire.receive_header()
            except P2PMismatchError as error:
                self.fail(error, kind="mismatch")
                return
            # On a shared communicator they are posted in the order of their batch, which is waiting for this.
            if self.config.communicators == "separate":
                self._post_late(ready)

    def _post_late(self, ready: Sequence[Transfer]) -> None:
        self.submitter.post(ready)

    def _require_next(self, announced: int, first: Transfer) -> None:
        if announced != first.sequence:
            raise P2PMismatchError(
                f"rank {self.rank} waits for message {first.sequence} of lane {self.spec}, but rank {self.peer} "
                f"announced message {announced}; call renew() on both sides at the same message"
            )

    def settle(self) -> None:
        """Wait for the headers of all receives that lack one: where lanes share a communicator, in order."""
        while self._deferred and self.error is None:
            last = self._deferred[-1]
            self._set_due(last, None)
            with self._wait_lock.held():
                try:
                    self._take_header(self._patience)
                except RuntimeError as error:
                    self.explain(error, last)

    # Waiting

    def provide(self, transfer: ReceiveTransfer) -> Any:
        """See `Lane.provide`."""
        self._until(transfer, None, posted=True)
        self._refuse(transfer)
        return transfer.payload

    def _until(self, transfer: Transfer, timeout: float | None, *, posted: bool) -> None:
        if transfer.state is State.PENDING:
            self._set_due(transfer, timeout)
            self._wait_lock.until(transfer, posted=posted, left=self._left)

    def _left(self, transfer: Transfer) -> float:
        """Seconds that somebody may wait for another thread's turn; where there are none left, the lane fails."""
        if self.error is not None:
            self._ended(transfer, State.FAILED, self.error)
        left = transfer.due + BACKSTOP_SECONDS - time.monotonic()
        if left <= 0:
            self.fail(self._timed_out(transfer), kind="timeout")
        return max(0.0, left)

    def _timeout_of(self, waited: Transfer | None) -> timedelta:
        """How long the backend may wait for the sake of a transfer (None: of nobody in particular)."""
        if waited is None or waited.due == math.inf:
            return timedelta_of(None)
        return timedelta_of(waited.due - time.monotonic() + BACKSTOP_SECONDS)

    @abc.abstractmethod
    def _step(self, waited: Transfer | None) -> None:
        """Wait for one thing. Only for the thread whose turn it is; None is the lane's own thread."""

    @abc.abstractmethod
    def _has_wanted(self, wanted: int) -> bool:
        """Whether the lane's own thread has something to wait for, up to that number."""

    def look_after(self, transfer: Transfer) -> None:
        """See `Lane.look_after`."""
        self._wait_lock.want(transfer)

    def _notify(self) -> None:
        self._wait_lock.notify()

    # Ends

    def explain(self, error: RuntimeError, transfer: Transfer) -> None:
        """The backend gave up; find out why, and end the lane with that."""
        if self.error is None:
            found = self._find_out(error, transfer)
            found.__cause__ = error
            self.fail(found, kind="lost")
        self._ended(transfer, State.FAILED, self.error)

    def _find_out(self, error: RuntimeError, transfer: Transfer) -> P2PError:
        note = self.wire.note()
        if note is not None:
            kind, text = note
            told = P2PMismatchError if kind == "mismatch" else P2PPeerError
            return told(f"rank {self.peer} ended lane {self.spec}: {text}")
        if time.monotonic() >= transfer.due:
            return self._timed_out(transfer)
        verb = "sending" if transfer.sending else "receiving"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return P2PPeerError(
            f"rank {self.rank} lost rank {self.peer} while {verb} message {transfer.sequence} of lane "
            f"{self.spec}: rank {self.peer} died, or closed its connection; look at its output first ({reason})"
        )

    def _cut(self, error: P2PError, kind: str) -> None:
        if kind != "lost":
            self.wire.tell(kind, str(error))
        self.wire.communicator.close()
        self._wait_lock.end()

    def join(self) -> None:
        """See `Lane.join`."""
        self._wait_lock.join()
