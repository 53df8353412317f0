"""The connection that the lanes of one communicator share, and the end of several lanes together."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from attrs import define, field
from torch.distributed import ProcessGroup

from pipegrid.topology.torch_compat import is_destroying
from pipegrid.transport.backends import Mover
from pipegrid.transport.backends.wire import Wire, timedelta_of
from pipegrid.transport.errors import P2PError, P2PLaneDeadError, relayed, text_of
from pipegrid.transport.spec import LaneSpec
from pipegrid.transport.waits.aborts import Abort, device_aborts

if TYPE_CHECKING:
    import torch

# Until an end notice must have been taken, by kind. A loaded machine may hold up a peer that is alive, and the type of
# its error depends on a mismatch's notice; the others go to peers that did not answer for a whole deadline, or that end
# too.
_TELL_SECONDS = {"mismatch": 5.0, "aborted": 2.0}
_TELL_OTHERS_SECONDS = 1.0
_ABORT_SECONDS = 5.0  # until groups must have been aborted, which on a device waits for kernels


class LaneEnd(Protocol):
    """The part of a lane that ends it."""

    spec: LaneSpec
    rank: int
    connection: Connection

    def take_error(self, error: P2PError) -> bool:
        """Note why the lane ends; False where it has ended before."""
        ...

    def finish(self, error: P2PError) -> None:
        """Fail the transfers under way."""
        ...


@define(eq=False)
class Connection:
    """The mover, the wire and the group that the lanes of one communicator share.

    Attributes:
        mover: moves their payloads.
        wire: moves headers and end notices; None where both ends are one rank, and in a dry run.
        group: the process group of the payloads; None where both ends are one rank.
        receive_stream: receives are posted under it, so that a transfer waits for its buffer and for no computing; None
            is the caller's stream.
        lanes: this rank's ends.
        aborting: the abort of a device group, once it has begun.
        told: the other side knows of the end.
    """

    mover: Mover
    wire: Wire | None = None
    group: ProcessGroup | None = None
    receive_stream: torch.Stream | None = None
    lanes: list[Any] = field(factory=list)
    aborting: Abort | None = None
    told: bool = False
    _held: deque[torch.Tensor] = field(factory=deque, init=False)

    def tell_closed(self) -> None:
        """Tell the other side, which has not ended the lanes, that this one closes them."""
        if self.wire is not None:
            self.told = True
            text = ", ".join(f"lane {lane.spec} was closed on rank {lane.rank}" for lane in self.lanes)
            self.wire.post_end_notice("closed", text)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Hold tensors of transfers that failed: the device may write to them until the abort has returned."""
        if self.mover.streams:
            self._held.extend(tensors)
            self._hand_over()

    def abort(self, cause: str) -> None:
        """Begin to abort the messages under way."""
        if not self.mover.streams:
            self.mover.abort()
            return
        if is_destroying() and not any(lane.queue for lane in self.lanes):
            return  # the other side has ended its groups and left, and torch ends those of this side
        key = self.mover if self.group is None else self.group
        (self.aborting,) = device_aborts.start({key: self.mover.abort}, cause)
        self._hand_over()

    def _hand_over(self) -> None:
        while self.aborting is not None and self._held:
            with contextlib.suppress(IndexError):  # another thread took it
                self.aborting.keep(self._held.popleft())


class End(NamedTuple):
    """A lane that ends, the error of its transfers, and the text for its other side."""

    lane: LaneEnd
    error: P2PError
    text: str


def abort_lanes(lanes: Sequence[LaneEnd], reason: str) -> None:
    """End lanes at once, and tell all other sides why before any connection is cut."""
    reason = text_of(reason)
    texts = [relayed(reason, f"lane {lane.spec} was aborted on rank {lane.rank}") for lane in lanes]
    ends = [End(lane, P2PLaneDeadError(text), reason) for lane, text in zip(lanes, texts, strict=True)]
    end_together(ends, kind="aborted")


def end_together(ends: Sequence[End], *, kind: str) -> None:
    """End lanes; ``kind`` goes to their other sides.

    All other sides are told, and all device groups aborted at the same time, before anything is waited for: torch's
    watchdog may end the process seconds after an error that no abort came before. Then all connections are cut. On a
    device an abort waits for kernels of groups that are not aborted yet, of other lanes or of the caller: nothing here
    waits for aborts, so that every waiter has its error at once; see `await_aborts`. Each part is bounded. The other
    lanes of a communicator end with the first cause on it.
    """
    over: list[tuple[LaneEnd, P2PError]] = []
    connections: dict[int, tuple[Connection, str]] = {}
    siblings = [End(lane, end.error, end.text) for end in ends for lane in end.lane.connection.lanes]
    for lane, error, text in (*ends, *siblings):
        if lane.take_error(error):
            over.append((lane, error))
            connections.setdefault(id(lane.connection), (lane.connection, text))
    # A group of a device with nothing under way is shut down, which waits for the device; any other is aborted.
    busy = [
        one
        for one, _ in connections.values()
        if kind != "closed" or not one.mover.streams or any(lane.queue for lane in one.lanes)
    ]
    limit = time.monotonic() + _TELL_SECONDS.get(kind, _TELL_OTHERS_SECONDS)
    telling = [
        connection.wire.post_end_notice(kind, text)
        for connection, text in connections.values()
        # A device group may be lost while its wire, another connection, is not.
        if connection.wire is not None and not connection.told and (kind != "lost" or connection.mover.streams)
    ]
    for connection in busy:
        if connection.mover.streams:
            connection.abort(connections[id(connection)][1])
    for work in telling:
        _finish(work, limit)
    for connection, _ in connections.values():
        if connection.wire is not None:
            connection.wire.cut()
    for connection in busy:
        if not connection.mover.streams:
            connection.abort(connections[id(connection)][1])
    for lane, error in over:
        lane.finish(error)


def _finish(work: Any, limit: float) -> None:
    if work is not None:
        try:
            work.wait(timedelta_of(limit - time.monotonic()))
        except RuntimeError:  # a connection that is gone tells the other side as well
            return


def await_aborts(connections: Iterable[Connection]) -> None:
    """Return when the aborts under way have ended, which on a device wait for its kernels, or after 5 s."""
    limit = time.monotonic() + _ABORT_SECONDS
    for connection in connections:
        if connection.aborting is not None:
            connection.aborting.ended.wait(max(0.0, limit - time.monotonic()))
