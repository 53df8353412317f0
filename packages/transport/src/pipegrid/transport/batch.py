"""Issuing transfers: alone, or as one batch in a fixed order; in strict mode, waiting for each batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from pipegrid.transport.config import P2PConfig
from pipegrid.transport.errors import P2PError, P2PUsageError
from pipegrid.transport.handle import State, Transfer
from pipegrid.transport.lane import Lane
from pipegrid.transport.remote_lane import RemoteLane
from pipegrid.transport.wire import post

_by_lane = attrgetter("lane.spec")


class Batch:
    """A batch under way. A context manager: see `Submitter.batch`."""

    __slots__ = ("_entered", "_submitter", "_thread", "_together")

    def __init__(self, submitter: Submitter, *, together: bool) -> None:
        self._submitter = submitter
        self._together = together
        self._entered = False
        self._thread: int | None = None  # None: inside another batch

    def __enter__(self) -> None:
        if self._entered:
            raise P2PUsageError("this batch() is under way already; call batch() again for one inside it")
        self._entered = True
        thread = threading.get_ident()
        if thread not in self._submitter.pending:
            self._thread = thread
            self._submitter.pending[thread] = []

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        thread, self._thread, self._entered = self._thread, None, False
        if thread is not None:
            held = self._submitter.pending.pop(thread)
            if kind is None:
                self._submitter.submit_pending(held, together=self._together)


class Submitter:
    """Starts the transfers of lanes that were opened together.

    Attributes:
        held: per thread that is inside a batch, what it has started there.
        lock: held while transfers get their numbers and are posted, so that both happen in the same order.
    """

    def __init__(self, config: P2PConfig) -> None:
        self.lock = threading.RLock()
        self.wake: threading.Event = threading.Event()  # set when the progress thread may have work again
        self.asleep = True
        self._config = config
        self._in_batches = config.strict or config.communicators == "shared"
        self.pending: dict[int, list[Transfer]] = {}

    def batch(self, *, together: bool = True) -> Batch:
        """Hold what this thread starts inside, and issue it together at the end; nothing of it, if that raises.

        Batches inside a batch belong to it.

        Args:
            together: as one batch; else one after the other, in the order they were started in, except where that
                would wait for itself: in strict mode and on shared communicators.
        """
        return Batch(self, together=together or self._in_batches)

    def submit_pending(self, transfers: Sequence[Transfer], *, together: bool) -> None:
        """Issue what was held: what can be issued alone, then the rest in the order of lanes.

        Raises:
            P2PUsageError: one of them cannot be sent now; nothing was issued.
        """
        errors: list[BaseException] = []
        alone: list[tuple[Callable[[Any], None], Transfer]] = []
        rest: list[Transfer] = []
        behind: dict[tuple[Lane, bool], int] = {}
        for transfer in transfers:
            start, key = transfer.start, (transfer.lane, transfer.sending)
            # Behind one that cannot, none of its lane can be issued alone: messages keep their order.
            if start is not None and (not rest or key not in behind) and transfer.lane.starts_alone(transfer):
                alone.append((start, transfer))
                continue
            behind[key] = ahead = behind.get(key, -1) + 1
            rest.append(transfer)
            try:
                transfer.lane.check(transfer, ahead=ahead)
            except P2PUsageError as error:
                for one in transfers:
                    one.state, one.error = State.FAILED, error
                raise
        for start, transfer in alone:
            transfer.state = State.PENDING
            try:
                start(transfer)
            except P2PError as error:  # the others are issued all the same: see `_issue`
                errors.append(error)
        batches = [[transfer] for transfer in rest]
        if together and rest:
            batches = [sorted(rest, key=_by_lane)]
        for batch in batches:
            try:
                self._submit(batch)
            except P2PError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def submit(self, transfer: Transfer) -> None:
        """Start a transfer now, or at the end of the batch that this thread is in."""
        if self.pending:
            held = self.pending.get(threading.get_ident())
            if held is not None:
                transfer.state = State.HELD
                held.append(transfer)
                return
        if self._in_batches:
            self._submit([transfer])
            return
        with self.lock:
            transfer.lane.admit(transfer)
            transfer.lane.launch(transfer)
        self._started(transfer)
        if transfer.error is not None:
            raise transfer.error

    def _submit(self, transfers: Sequence[Transfer]) -> None:
        errors: list[BaseException] = []
        admitted: list[Transfer] = []
        with self.lock:
            for transfer in transfers:
                try:
                    transfer.lane.admit(transfer)
                except P2PError as error:
                    # The others keep their places: their lanes are sound, and the other sides count on them.
                    transfer.state, transfer.error = State.FAILED, error
                    errors.append(error)
                else:
                    admitted.append(transfer)
            ready = [transfer for transfer in admitted if transfer.is_ready]
            if self._config.communicators == "shared" and len(ready) < len(admitted):
                # The order on a communicator is the order of batches, so a receive cannot be posted later.
                ready = admitted
                for transfer in admitted:
                    if isinstance(transfer.lane, RemoteLane):
                        transfer.lane.settle()
            self.post(ready)
        for transfer in admitted:
            self._started(transfer)
            if transfer.error is not None:
                errors.append(transfer.error)
        if errors:
            raise errors[0]
        if self._config.strict:
            for transfer in sorted(admitted, key=attrgetter("sending")):
                transfer.synchronize()

    def _started(self, transfer: Transfer) -> None:
        """See to it that what has to happen beside the caller does."""
        if transfer.callbacks or not (transfer.is_ready or transfer.attended):
            transfer.lane.look_after(transfer)
        self.rouse()

    def rouse(self) -> None:
        """Let the progress thread know that there is something to sweep."""
        if self.asleep:
            self.wake.set()

    def post(self, transfers: Sequence[Transfer]) -> None:
        """Hand transfers that are ready to the backend, together. Under the lock."""
        remote = [
            (lane, transfer)
            for transfer in transfers
            if isinstance(lane := transfer.lane, RemoteLane) and transfer.state is State.PENDING and not transfer.works
        ]
        outcomes = post([lane.operation(transfer) for lane, transfer in remote])
        for (lane, transfer), outcome in zip(remote, outcomes, strict=True):
            lane.launched(transfer, outcome)
