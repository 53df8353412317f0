"""A lane over a backend whose completion has to be waited for: gloo."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from pipegrid.transport.errors import P2PError
from pipegrid.transport.handle import ReceiveTransfer, State, Transfer
from pipegrid.transport.message import Signature
from pipegrid.transport.payload import ReceiveBuffers, travels_as_it_is
from pipegrid.transport.remote_lane import RemoteLane
from pipegrid.transport.spec import LaneStats
from pipegrid.transport.steady import SteadyReceive, SteadySend, steady_receive, steady_send

# Sends that nobody has waited for by then are looked after by the lane's own thread.
_UNATTENDED_SECONDS = 0.05
# Members of an Enum are looked up slowly, and a wait looks three times.
_PENDING, _DONE = State.PENDING, State.DONE


class WaitedLane(RemoteLane):
    """See `RemoteLane`. One thread at a time waits for the head of the queue (see `WaitLock`)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._steady_send: SteadySend | None = None
        self._steady_receive: SteadyReceive | None = None
        # Receives that the backend has, and that nobody has asked for yet: buffers and works.
        self.posted: deque[tuple[list[Tensor], tuple[Any, ...]]] = deque()
        # Those of shapes that were given up since. Nothing is sent to them; gloo cannot take them back.
        self._given_up: list[Any] = []
        self._sends = self.rank == self.spec.source

    # Starting: messages of one tensor whose shape stands have a way of their own

    def isend(self, payload: Any, *, note: str | None = None) -> Transfer:
        """See `Lane.isend`."""
        steady = self._steady_send
        if steady is not None and note is None:
            transfer = steady.send(payload)
            if transfer is not None:
                return transfer
        return super().isend(payload, note=note)

    def irecv(self, shapes: Any = None, *, attended: bool = False) -> ReceiveTransfer:
        """See `Lane.irecv`."""
        steady = self._steady_receive
        if steady is not None:
            transfer = steady.receive(shapes)
            if transfer is not None:
                return transfer
        return super().irecv(shapes, attended=attended)

    def _sends_stand(self) -> None:
        standing = self._outgoing.standing
        if standing is not None and self._steady_send is None and self._can_be_steady(standing):
            self._steady_send = steady_send(self, standing)

    def _receives_stand(self, buffers: ReceiveBuffers) -> None:
        standing = self._incoming.standing
        if standing is not None and self._steady_receive is None and self._can_be_steady(standing):
            self._steady_receive = steady_receive(self, buffers)

    def _prepare(self, transfer: ReceiveTransfer, signature: Signature) -> None:
        if not self.posted:
            super()._prepare(transfer, signature)
            return
        # What was posted ahead comes first, whatever form this receive is to have.
        transfer.buffers = self._buffers_of(transfer, signature)
        tensors, transfer.works = self.posted.popleft()
        transfer.tensors = tensors
        self.tally.messages += 1
        self.tally.transfers += len(tensors)
        self.tally.bytes += sum(tensor.nbytes for tensor in tensors)

    def _can_be_steady(self, standing: Signature) -> bool:
        """Whether messages of that signature are of one plain tensor, and posted one by one as they are started."""
        in_batches = self.config.strict or self.config.communicators == "shared"
        return not in_batches and standing.tree == 0 and travels_as_it_is(standing.tensors[0])

    def starts_alone(self, transfer: Transfer) -> bool:
        """See `Lane.starts_alone`: made the steady way, which still holds."""
        steady = self._steady_send if transfer.sending else self._steady_receive
        return steady is not None and transfer.start is steady.start and self.error is None

    def renew(self) -> None:
        """See `Lane.renew`."""
        super().renew()
        stats = self.stats
        tally = self.tally
        tally.messages, tally.transfers, tally.bytes = stats.messages, stats.transfers, stats.bytes
        self._steady_send = self._steady_receive = None
        self._given_up += self.posted
        self.posted.clear()

    @property
    def stats(self) -> LaneStats:
        """See `Lane.stats`."""
        tally = self.tally
        # Everything that has a number and was not counted, took the steady way.
        steady = self.sent + self.received - len(self._deferred) - tally.messages
        way = self._steady_send or self._steady_receive
        return LaneStats(
            messages=tally.messages + steady,
            transfers=tally.transfers + steady,
            bytes=tally.bytes + (steady * way.nbytes if way is not None else 0),
            headers=tally.headers,
            host_syncs=tally.host_syncs,
            allocations=tally.allocations,
            live=self.received - tally.released,
        )

    def _cut(self, error: P2PError, kind: str) -> None:
        super()._cut(error, kind)
        self.posted.clear()
        self._given_up.clear()

    # Waiting

    def wait_for(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Lane.wait_for`."""
        queue, turns = self.queue, self._wait_lock
        # The common case in one go; `WaitLock.until` is the general one, and does the same.
        if timeout is None and (works := transfer.works) and turns.turn.acquire(False):
            failure = None
            transfer.waited = True
            try:
                if queue and queue[0] is transfer:
                    for work in works:
                        work.wait(self._patience)
                    # The lane may have failed in the meantime. No thread comes in between these three lines.
                    if transfer.state is _PENDING:
                        transfer.state = _DONE
                        queue.popleft()
                        transfer.works = ()
                        if self._sends:
                            transfer.tensors = ()
            except RuntimeError as error:
                failure = error
            finally:
                turns.turn.release()
            if turns.contended:
                turns.pass_on()
            if failure is not None:
                self.explain(failure, transfer)
            elif transfer.callbacks and transfer.state is _DONE:
                self._tell_all(transfer)
        state = transfer.state
        if state is _DONE:
            return
        if state is _PENDING:
            self._until(transfer, timeout, posted=False)
        if transfer.state is not _DONE:
            self._refuse(transfer)

    def _step(self, waited: Transfer | None) -> None:
        head = next(iter(self.queue), None)
        if head is None:  # it ended meanwhile, and everybody knows
            return
        try:
            if head.works is None:
                self._take_header(self._timeout_of(waited))
            else:
                for work in head.works:
                    work.wait(self._timeout_of(waited))
                self._ended(head, State.DONE)
        except P2PError:
            raise
        except RuntimeError as error:
            self.explain(error, waited or head)

    def _has_wanted(self, wanted: int) -> bool:
        return bool(self.queue) and self.queue[0].sequence <= wanted

    def synchronize(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Lane.synchronize`: a wait is no less."""
        self.wait_for(transfer, timeout)

    # Without waiting

    def poll(self, transfer: Transfer) -> bool:
        """See `Lane.poll`."""
        if transfer.state is State.PENDING and self.error is not None:
            self._ended(transfer, State.FAILED, self.error)
        if transfer.state is State.PENDING:
            self._wait_lock.ask(transfer)
        return transfer.state in (State.DONE, State.FAILED)

    def sweep(self, now: float) -> None:
        """See `Lane.sweep`; and have sends seen that nobody waits for."""
        super().sweep(now)
        queue = self.queue.copy()
        if queue and queue[0].sending and now - queue[0].posted_at > _UNATTENDED_SECONDS:
            # Only what the backend has: another thread may be about to post the last ones.
            posted = [transfer for transfer in queue if transfer.works]
            if posted:
                self.look_after(posted[-1])
