"""Batches: transfers start alone, or together at the end of a block; in strict mode each batch is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from threading import get_ident
from typing import Any

from attrs import define, field

from pipegrid.transport.errors import P2PError, P2PUsageError
from pipegrid.transport.messages.handle import State, Transfer
from pipegrid.transport.streams import current_stream, working_on

_ACTIVE = State.ACTIVE  # members of an Enum are looked up slowly


@define(eq=False)
class Batch:
    """A block whose transfers start at its end. A context manager: see `Lanes.batch`."""

    _submitter: Submitter
    _together: bool
    _by_lane: bool
    _before: int = field(default=0, init=False)  # transfers of the batch around this one
    _entered: bool = field(default=False, init=False)
    _thread: int | None = field(default=None, init=False)  # None: inside another batch

    def __enter__(self) -> None:
        if self._entered:
            raise P2PUsageError("this batch() is under way already; call batch() again for one inside it")
        self._entered = True
        thread = get_ident()
        if thread not in self._submitter.pending:
            self._thread = thread
            self._submitter.pending[thread] = []
        self._before = len(self._submitter.pending[thread])

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        thread, self._thread, self._entered = self._thread, None, False
        if self._by_lane and kind is None:
            around = self._submitter.pending[get_ident()]
            around[self._before :] = sorted(around[self._before :], key=attrgetter("lane.spec"))
        if thread is not None:
            pending, calls = self._submitter.pending.pop(thread), self._submitter.calls.pop(thread, ())
            if kind is None:
                self._submitter.submit_pending(pending, together=self._together)
                for call in calls:
                    call()


@define(eq=False)
class Submitter:
    """Starts the transfers of lanes that were opened together: the submit function of each of them."""

    strict: bool  # each batch is waited for
    shares: bool = False  # some of the lanes share a communicator
    # Start transfers in the order of calls, even where that means to wait for a receive's header.
    in_order: bool = False
    patience: float = 0.0  # seconds of a transfer for which no caller says how many, where that is above the deadline
    pending: dict[int, list[Transfer]] = field(factory=dict, init=False)  # of each thread that is inside a batch
    calls: dict[int, list[Callable[[], None]]] = field(factory=dict, init=False)  # likewise: of `when_started`
    # Held while transfers get their numbers and are started, so that both happen in the same order.
    lock: threading.RLock = field(factory=threading.RLock, init=False)
    wake: threading.Event = field(factory=threading.Event, init=False)
    asleep: bool = field(default=True, init=False)  # whether the progress thread needs ``wake`` to look at the lanes

    @property
    def batches(self) -> bool:
        """Whether the transfers of a batch always start together: in strict mode and on shared communicators."""
        return self.strict or self.shares

    def when_started(self, call: Callable[[], None]) -> None:
        """Call ``call`` now, or after the batch that this thread is in; not at all where that raises."""
        thread = get_ident()
        if thread in self.pending:
            self.calls.setdefault(thread, []).append(call)
        else:
            call()

    def __call__(self, transfer: Transfer) -> None:
        """Start a transfer now, or at the end of the batch that this thread is in."""
        if (pending := self.pending.get(get_ident())) is None:
            self._start([transfer])
        else:
            lane: Any = transfer.lane
            transfer.state, transfer.stream = State.PENDING, current_stream(lane.device)
            pending.append(transfer)

    def submit_pending(self, transfers: Sequence[Transfer], *, together: bool) -> None:
        """Start the transfers of a batch."""
        ahead: dict[Any, int] = {}  # sends of each lane
        for transfer in (one for one in transfers if one.sending):
            lane: Any = transfer.lane
            before = ahead.get(lane, 0)
            ahead[lane] = before + 1
            try:
                lane.check(transfer, ahead=before)
            except P2PUsageError as error:
                for one in transfers:
                    one.state, one.error = State.FAILED, error
                raise
        errors: list[P2PError] = []
        for batch in [transfers] if together else [[transfer] for transfer in transfers]:
            try:
                self._start(batch)
            except P2PError as error:  # the others start all the same: their lanes are sound
                errors.append(error)
        if errors:
            raise errors[0]

    def _start(self, transfers: Sequence[Transfer]) -> None:
        errors: list[BaseException] = []
        admitted: list[Transfer] = []
        with self.lock:
            for transfer in transfers:
                lane: Any = transfer.lane
                try:
                    lane.admit(transfer)
                except P2PError as error:
                    # The others keep their places: their lanes are sound, and the other sides count on them.
                    transfer.state, transfer.error = State.FAILED, error
                    errors.append(error)
                else:
                    admitted.append(transfer)
            for transfer in admitted if self.shares else ():
                lane = transfer.lane
                if lane.connection.is_shared:  # its order is that of batches, so a receive cannot be posted later
                    _settle(transfer)
            if not self.in_order:
                self.start([transfer for transfer in admitted if transfer.is_ready])
        if self.in_order:
            self._start_in_order(admitted)
        for transfer in admitted:
            lane = transfer.lane
            try:
                lane.transfers.started(transfer)
            except P2PError as error:
                errors.append(error)
            if transfer.error is not None:
                errors.append(transfer.error)
        if self.asleep:
            self.wake.set()
        if errors:
            raise errors[0]
        if self.strict:
            for transfer in sorted(admitted, key=attrgetter("sending")):
                transfer.synchronize()

    def _start_in_order(self, transfers: Sequence[Transfer]) -> None:
        """Start numbered transfers, each receive that lacks its header once that has come.

        What a batch has before such a receive is started first: its header may depend on that. The lock is free in the
        meantime, as a lane's own thread takes it when a header has come.
        """
        if self.shares:
            transfers = _by_call(transfers)
        for number, transfer in enumerate(transfers):
            if not transfer.is_ready:
                with self.lock:
                    self.start(transfers[:number])
                _settle(transfer)
        with self.lock:
            self.start([transfer for transfer in transfers if transfer.is_ready])

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Hand numbered transfers to their movers, those of one communicator as one batch. Under the lock.

        Communicators start in the order of the transfers, the plan's: `verify(batches="in_order")` proves that order.
        On a lane's own communicator only neighbours in it are combined, so that none starts before its turn; on a
        shared one all are one call, in the order of lanes, which all sides know. A batch has one stream: that of one
        lane's sends or receives, or on a shared communicator the caller's.
        """
        batches: list[list[tuple[Any, Transfer]]] = []
        by_connection: dict[int, list[tuple[Any, Transfer]]] = {}
        previous = None
        for transfer in transfers:
            lane: Any = transfer.lane
            if transfer.state is not _ACTIVE or transfer.ticket is not None:
                continue
            connection = lane.connection
            if connection.is_shared and id(connection) in by_connection:
                by_connection[id(connection)].append((lane, transfer))
            elif connection is previous:
                batches[-1].append((lane, transfer))
            else:
                batches.append([(lane, transfer)])
                by_connection[id(connection)] = batches[-1]
                previous = connection
        for batch in batches:
            if len(batch) > 1:
                batch.sort(key=lambda one: one[0].spec)
            try:
                with working_on(batch[0][1].stream):
                    tickets = batch[0][0].mover.start([lane.operation(transfer) for lane, transfer in batch])
            except P2PError:
                raise
            except RuntimeError as error:
                for lane, transfer in batch:
                    lane.ending.explain(error, transfer)
            else:
                for (_, transfer), ticket in zip(batch, tickets, strict=True):
                    transfer.ticket = ticket


def _by_call(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Transfers in order, those of a shared communicator at the place of its first: they are one call."""
    first: dict[int, int] = {}
    places = []
    for number, transfer in enumerate(transfers):
        lane: Any = transfer.lane
        connection = lane.connection
        places.append(first.setdefault(id(connection), number) if connection.is_shared else number)
    return [transfers[number] for number in sorted(range(len(places)), key=places.__getitem__)]


def _settle(transfer: Transfer) -> None:
    """Wait for the header of a receive that lacks one."""
    lane: Any = transfer.lane
    if not transfer.is_ready:
        lane.transfers.settle()
