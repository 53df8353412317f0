"""The payloads of the edges at one position, by piece (a microbatch, or a slice of it): received, sent, under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from attrs import define, field

from pipegrid.core.edge import Direction, Edge
from pipegrid.plans.plan.actions import Action
from pipegrid.reshard import SPLIT_SIZES
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.runtime.stages.deallocation import PendingFree
from pipegrid.schedules.runtime.stages.hooks import MessageHook
from pipegrid.schedules.runtime.stages.payloads import flatten, map_tensors, piece_name, unpacked
from pipegrid.schedules.runtime.stages.reused import PLAIN, is_shared, num_holders
from pipegrid.transport.base import Communicator, Port
from pipegrid.transport.messages.slot import Slot
from pipegrid.transport.protocol import Handle, Payload, ReceiveHandle, ReusableReceive

_UNDER_WAY = 2
_SMALL_UNDER_WAY = 16
_SMALL_BYTES = 64 * 1024


@define(eq=False)
class ReceivesAhead:
    """The receives of one port, in the order of the plan, whichever edges it serves.

    Where the port allows it (`P2PConfig.receives_ahead`), the next ones of a step are posted before their turn: a
    message then finds its buffer. ``early``: those that are posted, and whose turn has not come; ``unposted``: how many
    of the step are not.
    """

    port: Port
    early: deque[ReceiveHandle] = field(factory=deque, init=False)
    irecv: Callable[[], ReceiveHandle] = field(init=False)
    unposted: int = field(default=0, init=False)
    _slots: Iterator[Slot | None] = field(init=False, factory=lambda: iter(()))

    def __attrs_post_init__(self) -> None:
        self.irecv = self.port.irecv

    def start(self, expected: int, slots: Sequence[Slot | None] = ()) -> None:
        """Post the first ones of a step that has ``expected``; ``slots``: where they are to arrive, in order."""
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
        agree: called before the first message of a step is used: raises unless the ranks that sent it run this step.
        reusable: the pieces whose buffers the plan gives back, where nothing reads them any more.
        slots: where pieces arrive, if not in memory of a lane.
        source: the queue at the other end, of a stage on the same position.
    """

    edge: Edge
    direction: Direction
    communicator: Communicator
    deadline: float | None = None
    hooks: Sequence[MessageHook] = ()
    local: bool = False
    reusable: set[int] = field(factory=set, init=False)
    slots: dict[int, Slot] = field(factory=dict, init=False)
    ahead: ReceivesAhead | None = field(default=None, init=False)
    _in_use: dict[int, tuple[ReusableReceive, list[tuple[torch.Tensor, int]]]] = field(factory=dict, init=False)
    source: SendQueue | None = field(default=None, init=False)
    replica: int | None = None
    expected: int = 0
    agree: Callable[[], None] | None = None
    _posted: dict[int, tuple[Action, ReceiveHandle]] = field(factory=dict, init=False)
    _arrived: dict[int, Payload] = field(factory=dict, init=False)

    def drop(self) -> None:
        """Drop what a step that failed has left."""
        self.agree = None
        self._in_use.clear()
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
            return self._arrived.pop(piece) if self.source is None else unpacked(self.source.end(piece))
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
        if self.reusable and piece in self.reusable and torch.is_grad_enabled() and isinstance(handle, ReusableReceive):
            tensors = [tensor for tensor in flatten(payload) if tensor is not None]
            self._in_use[piece] = handle, [(tensor, num_holders(tensor)) for tensor in tensors]
        return payload

    def give_back(self, piece: int) -> None:
        """Nothing reads what ``piece`` has received any more: another message may arrive there."""
        in_use = self._in_use.pop(piece, None)
        if in_use is None:
            return
        handle, came = in_use
        if not any(is_shared(tensor, alone=holders) for tensor, holders in came):
            handle.release()
        elif piece in self.slots:  # something in the stage has kept it, and may keep it
            self.slots[piece].leave()


@define(eq=False)
class Output:
    """A tensor that a stage has returned, before its message is seen to have left."""

    tensor: torch.Tensor  # without its graph
    version: int | None  # the count of changes in place, which tensors of one memory share; None where torch has none
    address: int  # of its memory; 0 where the same may come again unchanged
    piece: int
    queue: SendQueue

    def written(self) -> StageOutputError:
        """The error of a stage that has written into it."""
        queue = self.queue
        stage, direction = queue.returned_by
        what = "its output" if direction is Direction.FORWARD else "the gradient of its input"
        name = piece_name(self.piece, queue.num_slices)
        return StageOutputError(
            f"stage {stage} wrote again into {what} of microbatch {name} before edge {queue.edge} had carried it; "
            "return a tensor of its own for each microbatch, such as output.clone(), or set clone_outputs=True"
        )


@define(eq=False)
class SendQueue:
    """Payloads that leave along an edge: kept until their send, or until ``local``, the queue at the other end, asks.

    A stage that returns the same memory for every microbatch, such as the static output of a captured graph, writes it
    before its message has left. So a second output at the address of a pending one is an error, and a pending one
    whose version has changed; with ``clones`` each output is a copy. An output is pending until its message is seen to
    have left, or what depends on it has come back: that it has left meanwhile is no excuse, since the stage may have
    written before that. A gradient whose memory autograd has given to something else as well is copied.

    At most two sends per edge are outstanding: waiting for the older one never deadlocks (`verify` proves the plan even
    for sends that block until received) and bounds the memory that messages hold. Of sends of at most 64 KB it is 16,
    where no hook asks for their ends, since several waits in a row cost little more than one.
    On a device with streams (``in_streams``) no send is waited for before the end of the step: the host's lead bounds
    those under way. ``places``: what is pending of all queues of a position, by address.
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
    clones: bool = False
    places: dict[int, list[Output]] = field(factory=dict)
    pending: dict[int, tuple[Payload, Sequence[Output]]] = field(factory=dict, init=False)
    _isend: Callable[[Payload], Handle] | None = field(default=None, init=False)
    _frees: dict[int, PendingFree] = field(factory=dict, init=False)
    _sent: deque[tuple[int, Action, Handle]] = field(factory=deque, init=False)
    _room: int = field(init=False)  # sends that may be under way before the next one
    _varies: bool = field(init=False)  # with their size

    def __attrs_post_init__(self) -> None:
        self._room = 0 if self.in_streams else _UNDER_WAY
        self._varies = not self.hooks and not self.in_streams
        if self.local is not None:
            self.local.source = self

    def drop(self) -> None:
        """Drop what a step that failed has left."""
        self.pending.clear()
        self.places.clear()
        self._frees.clear()
        self._sent.clear()

    def bind(self) -> Callable[[Payload], Handle]:
        """Ask the communicator for this end of the edge."""
        self._isend = _port(self).isend
        return self._isend

    def put(self, piece: int, payload: Payload, pending: PendingFree | None = None) -> None:
        """Keep ``payload`` until it is sent or taken; StageOutputError where another one is pending in its memory."""
        if isinstance(payload, torch.Tensor):
            output = self._output(piece, payload)
            self.pending[piece] = output.tensor, (output,)
        else:
            found: list[Output] = []

            def note(tensor: torch.Tensor) -> torch.Tensor:
                found.append(self._output(piece, tensor))
                return found[-1].tensor

            self.pending[piece] = map_tensors(payload, note), found
        if pending is not None and self.local is None:
            self._frees[piece] = pending

    def _output(self, piece: int, tensor: torch.Tensor) -> Output:
        own, version, address = tensor, None, 0
        plain = type(tensor) in PLAIN and tensor.layout is torch.strided
        # Autograd may have given a gradient's memory to a parameter too, whose next one is added in place.
        if self.clones or (plain and self.direction is Direction.BACKWARD and is_shared(tensor)):
            own = tensor.detach().clone()
        elif plain or tensor.requires_grad:
            # Without a graph the tensor itself is held: autograd gives memory that is held to no parameter.
            own = tensor.detach() if tensor.requires_grad else tensor
            version = None if tensor.is_inference() else tensor._version  # noqa: SLF001 (the documented way to ask)
            base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 (likewise)
            is_leaf = base.requires_grad and base.grad_fn is None  # a parameter, or an input passed on
            if not is_leaf and not isinstance(base, torch.nn.Parameter):  # a frozen one
                address = tensor.data_ptr()
        if own is not tensor and (samples := getattr(tensor, SPLIT_SIZES, None)) is not None:
            setattr(own, SPLIT_SIZES, samples)  # by which Megatron's models tell a bridge the rows of samples
        if self.local is not None and tensor.requires_grad:
            own.requires_grad_()
        output = Output(own, version, address, piece, self)
        if address:
            there = self.places.setdefault(address, [])
            for other in there:
                if other.piece != piece or other.queue.returned_by != self.returned_by:
                    raise other.written()
            there.append(output)
        return output

    @property
    def returned_by(self) -> tuple[int, Direction]:
        """The stage whose payloads these are, and whether they are outputs or gradients."""
        forward = self.direction is Direction.FORWARD
        return self.edge.source if forward else self.edge.destination, self.direction

    def send(self, piece: int, action: Action) -> None:
        """``SEND_F`` or ``SEND_B``: post the send, as soon as there is room for it."""
        outstanding = self._sent
        if len(outstanding) >= self._room:
            self.make_room()
        payload = self.payload(piece)
        isend = self._isend or self.bind()
        outstanding.append((piece, action, isend(payload)))
        if self._varies and isinstance(payload, torch.Tensor):
            self._room = _SMALL_UNDER_WAY if payload.nbytes <= _SMALL_BYTES else _UNDER_WAY

    def make_room(self) -> None:
        """Wait until one more send may be posted."""
        outstanding = self._sent
        if self.in_streams:
            while outstanding and outstanding[0][2].is_completed():
                self.settle(1)
        elif len(outstanding) >= self._room:
            self.settle(len(outstanding) - _UNDER_WAY + 1)

    def complete(self, piece: int) -> None:
        """Let go of the message of ``piece``, which was answered, so it has left, and of those before it."""
        self.settle(max((place for place, (one, _, _) in enumerate(self._sent, 1) if one == piece), default=0))

    def settle(self, count: int | None = None) -> None:
        """Wait until every message has left, or the oldest ``count``."""
        for _ in range(len(self._sent) if count is None else count):
            piece, action, handle = self._sent.popleft()
            handle.wait(self.deadline)
            for hook in self.hooks:
                hook.completed(action)
            if piece in self.pending:
                self.end(piece)
            if self._frees and (pending := self._frees.pop(piece, None)) is not None:
                pending.sent()

    def payload(self, piece: int) -> Payload:
        """The pending payload of ``piece``; StageOutputError where the stage has written into it."""
        payload, outputs = self.pending[piece]
        for output in outputs:
            if output.version is not None and output.version != output.tensor._version:  # noqa: SLF001
                raise output.written()
        return payload

    def end(self, piece: int) -> Payload:
        """`payload` of ``piece``, which is no longer pending: it was carried."""
        payload, outputs = self.pending.pop(piece)
        for output in outputs:
            if output.version is not None and output.version != output.tensor._version:  # noqa: SLF001
                raise output.written()
            if output.address:
                there = self.places[output.address]
                there.remove(output)
                if not there:
                    del self.places[output.address]
        return payload

    def sent(self, piece: int, action: Action, handle: Handle) -> None:
        """Note a send that was posted elsewhere (a collective)."""
        self._sent.append((piece, action, handle))


def _port(queue: RecvQueue | SendQueue) -> Port:
    if queue.replica is None:
        return queue.communicator.port(queue.edge, queue.direction)
    return queue.communicator.port_across(queue.edge, queue.direction, queue.replica)
