"""The payloads of the edges at one position, by piece: received, kept for their send, and under way.

A piece is a microbatch, or one slice of it where a plan cuts microbatches along the sequence (`Plan.piece_of`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import define, field

from pipegrid.autograd import free_storage
from pipegrid.core.edge import Direction, Edge
from pipegrid.schedules.runtime.stages.payloads import flatten
from pipegrid.schedules.runtime.stages.unread import Aliased, Unread, is_shared, num_holders
from pipegrid.transport.protocol import ReusableReceive

if TYPE_CHECKING:
    from pipegrid.plans.plan.actions import Action
    from pipegrid.schedules.runtime.stages.hooks import MessageHook
    from pipegrid.transport.base import Communicator, Port
    from pipegrid.transport.messages.slot import Slot
    from pipegrid.transport.protocol import Handle, Payload, ReceiveHandle

_UNDER_WAY = 2
_SMALL_UNDER_WAY = 16
_SMALL_BYTES = 64 * 1024


@define(eq=False)
class PendingFree:
    """The outputs of one forward, whose storage is freed after ``unsent`` more messages have left."""

    unsent: int
    tensors: Sequence[torch.Tensor]

    def sent(self) -> None:
        """One of the messages has left."""
        self.unsent -= 1
        if self.unsent == 0:
            for tensor in self.tensors:
                free_storage(tensor)


@define(eq=False)
class ReceivesAhead:
    """The receives of one port, in the order of the plan, whichever edges it serves.

    Where the port allows it (`P2PConfig.receives_ahead`), the next ones are posted before their turn, from the start of
    a step on: a message then finds its buffer. They are receives of this step, so none is left over.

    Attributes:
        port: of one or several edges.
        early: those that are posted, and whose turn has not come.
        unposted: how many of the step are not.
    """

    port: Port
    early: deque[ReceiveHandle] = field(factory=deque, init=False)
    irecv: Callable[[], ReceiveHandle] = field(init=False)
    unposted: int = field(default=0, init=False)
    _slots: Iterator[Slot | None] = field(init=False, factory=lambda: iter(()))

    def __attrs_post_init__(self) -> None:
        self.irecv = self.port.irecv

    @property
    def takes_slots(self) -> bool:
        """Whether its receives can be posted to slots."""
        return getattr(self.port, "takes_slots", False)

    @property
    def most(self) -> int:
        """How many are posted before their turn."""
        return getattr(self.port, "ahead", 0)

    def start(self, expected: int, slots: Sequence[Slot | None] = ()) -> None:
        """Post the first ones of a step that ``expected`` so many; ``slots``: where they are to arrive, in order."""
        if slots:
            self._slots = iter(slots)
        self.irecv = self._to_slot if slots else self.port.irecv
        first = min(getattr(self.port, "ahead", 0), expected)
        self.unposted = expected - first
        self.early.clear()
        for _ in range(first):
            self.early.append(self.irecv())

    def _to_slot(self) -> ReceiveHandle:
        slot = next(self._slots)
        receive: Callable[..., ReceiveHandle] = self.port.irecv
        return receive() if slot is None else receive(slot=slot)


@define(eq=False)
class RecvQueue:
    """Payloads that arrive along an edge, by a posted receive or (``local``) from a stage on the same position.

    Attributes:
        replica: that of the other end; None is this rank's own.
        expected: the receives of the plan.
        ahead: posts the receives of the port, before their turn where it allows that.
        agree: called before the first message of a step is used: raises unless the ranks that sent it run this step.
    """

    edge: Edge
    direction: Direction
    communicator: Communicator
    deadline: float | None = None
    hooks: Sequence[MessageHook] = ()
    local: bool = False
    lends: set[int] = field(factory=set, init=False)
    """The pieces whose buffers the plan gives back, where nothing reads them any more."""
    slots: dict[int, Slot] = field(factory=dict, init=False)
    """Where pieces arrive, if not in memory of a lane."""
    ahead: ReceivesAhead | None = field(default=None, init=False)
    _lent: dict[int, tuple[ReusableReceive, list[tuple[torch.Tensor, int]]]] = field(factory=dict, init=False)
    unread: Unread | None = None
    """The payloads of a stage on the same position."""
    replica: int | None = None
    expected: int = 0
    agree: Callable[[], None] | None = None
    _posted: dict[int, tuple[Action, ReceiveHandle]] = field(factory=dict, init=False)
    _arrived: dict[int, Payload] = field(factory=dict, init=False)

    def begin(self) -> None:
        """Drop the state of an earlier step."""
        self.agree = None
        self._lent.clear()
        self._posted.clear()
        self._arrived.clear()

    def bind(self) -> ReceivesAhead:
        """Ask the communicator for this end of the edge."""
        self.ahead = ReceivesAhead(_port(self))
        return self.ahead

    def receive(self, piece: int, action: Action) -> None:
        """``RECV_F`` or ``RECV_B``: post the receive, or, if that is posted, the next one."""
        ahead = self.ahead or self.bind()
        if not ahead.early:
            self._posted[piece] = action, ahead.irecv()
            return
        self._posted[piece] = action, ahead.early.popleft()
        if ahead.unposted:
            ahead.unposted -= 1
            ahead.early.append(ahead.irecv())

    def expect(self, piece: int, action: Action, handle: ReceiveHandle) -> None:
        """Note a receive that was posted elsewhere (a collective)."""
        self._posted[piece] = action, handle

    def wait(self, piece: int) -> None:
        """Wait until the payload has arrived, up to the deadline."""
        self._arrived[piece] = self.take(piece)

    def take(self, piece: int) -> Payload:
        """The payload of ``piece``, once: waits for it where `wait` has not."""
        posted = self._posted.pop(piece, None)
        if posted is None:
            return self._arrived.pop(piece) if self.unread is None else self.unread.take(piece)
        action, handle = posted
        if self.deadline is not None:
            handle.wait(self.deadline)
        payload = handle.result()  # without a deadline, the communicator's own holds
        if self.agree is not None:
            self.agree()
            self.agree = None
        if self.hooks:
            for hook in self.hooks:
                hook.completed(action)
        if self.lends and piece in self.lends and isinstance(handle, ReusableReceive):
            tensors = [tensor for tensor in flatten(payload) if tensor is not None]
            self._lent[piece] = handle, [(tensor, num_holders(tensor)) for tensor in tensors]
        return payload

    def give_back(self, piece: int) -> None:
        """Nothing reads what ``piece`` has received any more: another message may arrive there."""
        lent = self._lent.pop(piece, None)
        if lent is None:
            return
        handle, came = lent
        if not any(is_shared(tensor, alone=holders) for tensor, holders in came):
            handle.release()
        elif piece in self.slots:  # something in the stage has kept it, and may keep it
            self.slots[piece].leave()


@define(eq=False)
class SendQueue:
    """Payloads that leave along an edge: kept until their send, or until ``local``, the queue at the other end, asks.

    At most two sends per edge are outstanding: waiting for the older one never deadlocks (`verify` proves the plan even
    for sends that block until received) and bounds the memory that messages hold. Of sends of at most 64 KB it is 16,
    where no hook asks for their ends, since several waits in a row cost little more than one.
    On a device with streams (``in_streams``) no send is waited for before the end of the step: the host's lead bounds
    those under way. ``replica``: that of the other end; None is this rank's own.
    """

    edge: Edge
    direction: Direction
    communicator: Communicator
    deadline: float | None = None
    hooks: Sequence[MessageHook] = ()
    local: RecvQueue | None = None
    in_streams: bool = False
    num_slices: int = 1
    replica: int | None = None
    unread: Unread = field(init=False)
    _isend: Callable[[Payload], Handle] | None = field(default=None, init=False)
    _frees: dict[int, PendingFree] = field(factory=dict, init=False)
    _sent: deque[tuple[int, Action, Handle]] = field(factory=deque, init=False)
    _room: int = field(init=False)  # sends that may be under way before the next one
    _varies: bool = field(init=False)  # with their size

    def __attrs_post_init__(self) -> None:
        self._room = 0 if self.in_streams else _UNDER_WAY
        self._varies = not self.hooks and not self.in_streams
        self.unread = Unread(self.edge, self.direction, self.local is not None, self.num_slices)
        if self.local is not None:
            self.local.unread = self.unread

    def begin(self) -> None:
        """Drop the state of an earlier step."""
        self.unread.begin()
        self._frees.clear()
        self._sent.clear()

    def bind(self) -> Callable[[Payload], Handle]:
        """Ask the communicator for this end of the edge."""
        self._isend = _port(self).isend
        return self._isend

    def put(
        self, piece: int, payload: Payload, pending: PendingFree | None = None, aliased: Aliased | None = None
    ) -> None:
        """Keep ``payload`` until it is sent or taken; see `Unread.put`."""
        if aliased is None:
            self.unread.fresh[piece] = payload
        else:
            self.unread.put(piece, payload, aliased)
        if pending is not None and self.local is None:
            self._frees[piece] = pending

    def send(self, piece: int, action: Action) -> None:
        """``SEND_F`` or ``SEND_B``: post the send, as soon as there is room for it."""
        outstanding = self._sent
        if len(outstanding) >= self._room:
            self.make_room()
        payload = self.unread.take(piece)
        isend = self._isend or self.bind()
        outstanding.append((piece, action, isend(payload)))
        if self._varies and isinstance(payload, torch.Tensor):
            self._room = _SMALL_UNDER_WAY if payload.nbytes <= _SMALL_BYTES else _UNDER_WAY

    def make_room(self) -> None:
        """Wait until one more send may be posted."""
        outstanding = self._sent
        if self.in_streams:
            while outstanding and outstanding[0][2].is_completed():
                self._complete(1)
        elif len(outstanding) >= self._room:
            self._complete(len(outstanding) - _UNDER_WAY + 1)

    def settle(self) -> None:
        """Wait until every message has left."""
        self._complete(len(self._sent))

    def complete(self, piece: int) -> None:
        """Let go of the message of ``piece``, which was answered, so it has left, and of those before it."""
        self._complete(max((place for place, (one, _, _) in enumerate(self._sent, 1) if one == piece), default=0))

    def _complete(self, count: int) -> None:
        """Wait for the oldest ``count`` sends."""
        for _ in range(count):
            piece, action, handle = self._sent.popleft()
            handle.wait(self.deadline)
            for hook in self.hooks:
                hook.completed(action)
            if piece in self.unread.left:
                self.unread.end(piece)
            if self._frees and (pending := self._frees.pop(piece, None)) is not None:
                pending.sent()

    def take(self, piece: int) -> Payload:
        """The payload of ``piece`` for a collective; once."""
        return self.unread.take(piece)

    def sent(self, piece: int, action: Action, handle: Handle) -> None:
        """Note a send that was posted elsewhere (a collective)."""
        self._sent.append((piece, action, handle))


def _port(queue: RecvQueue | SendQueue) -> Port:
    if queue.replica is None:
        return queue.communicator.port(queue.edge, queue.direction)
    return queue.communicator.port_across(queue.edge, queue.direction, queue.replica)


def exchange(
    piece: int, action: Action, communicator: Communicator, sends: SendQueue | None, receives: RecvQueue | None
) -> None:
    """``COLLECTIVE``: send the payload of ``sends`` and wait for the payload of ``receives``.

    Every position of both stages leaves the action with its data, as the proof of the plan assumes: a later wait could
    hold up another member at an action behind this one.
    """
    payload = None
    if sends is not None:
        sends.make_room()
        payload = sends.take(piece)
    assert action.edge is not None
    assert action.direction is not None
    sending, receiving = communicator.collective(payload, edge=action.edge, direction=action.direction)
    if receiving is not None:
        receiving.wait(None if receives is None else receives.deadline)
    if sending is not None and sends is not None:
        sends.sent(piece, action, sending)
    if receiving is not None and receives is not None:
        receives.expect(piece, action, receiving)
