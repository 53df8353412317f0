"""What travels along the edges that touch a position, by microbatch: posted, arrived, and waiting to be sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import define, field

from pipegrid.schedules.megatron.backward import deallocate_output_tensor
from pipegrid.schedules.runtime.collectives import exchange
from pipegrid.schedules.runtime.payloads import map_tensors
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.protocol import ReusableReceive

if TYPE_CHECKING:
    from pipegrid.schedules.plan.actions import Action
    from pipegrid.schedules.runtime.hooks import MessageHook
    from pipegrid.transport.protocol import Handle, Payload, PipelineCommunicator, ReceiveHandle


_ON_THE_WAY = 2  # messages of one edge that a position may have posted and not seen through


@define(eq=False)
class PostOffice:
    """How one position sends and receives."""

    communicator: PipelineCommunicator
    deadline: float | None
    hooks: Sequence[MessageHook]

    def exchange(self, microbatch: int, action: Action, outbox: Outbox | None, inbox: Inbox | None) -> None:
        """``COLLECTIVE``: give what ``outbox`` keeps, and have in ``inbox`` what arrives, before the next action."""
        assert action.edge is not None  # a collective that moves nothing along an edge was refused
        assert action.direction is not None
        payload, parcel = (None, None) if outbox is None else outbox.give(microbatch)
        sending, receiving = exchange(
            self.communicator,
            map_tensors(payload, _detached),
            action.edge,
            action.direction,
            deadline=self.deadline,
        )
        if sending is not None and outbox is not None:
            outbox.sent(action, sending, parcel)
        if receiving is not None and inbox is not None:
            inbox.expect(microbatch, action, receiving)

    def arrival(self, action: Action, handle: ReceiveHandle) -> Payload:
        """What ``action`` posted a receive for, once it is here."""
        if self.deadline is not None:
            handle.wait(self.deadline)
        payload = handle.result()  # which waits as well, as long as the communicator allows
        for hook in self.hooks:
            hook.completed(action)
        return payload

    def departure(self, action: Action, handle: Handle) -> None:
        """Wait until what ``action`` posted has left."""
        handle.wait(self.deadline)
        for hook in self.hooks:
            hook.completed(action)


@define(eq=False)
class Parcel:
    """The outputs of one forward, whose storage is freed once ``unsent`` messages are through."""

    unsent: int
    tensors: Sequence[torch.Tensor]

    def sent(self) -> None:
        """One of the messages is through."""
        self.unsent -= 1
        if self.unsent == 0:
            for tensor in self.tensors:
                deallocate_output_tensor(tensor, deallocate_pipeline_outputs=True)


@define(eq=False)
class Inbox:
    """What arrives along an edge: by a receive that was posted, or handed over by a stage on the same position."""

    edge: Edge
    direction: Direction
    office: PostOffice
    local: bool
    lends: bool = False  # what arrived is given back at the end
    _lent: dict[int, ReusableReceive] = field(factory=dict, init=False)
    _posted: dict[int, tuple[Action, ReceiveHandle]] = field(factory=dict, init=False)
    _here: dict[int, Payload] = field(factory=dict, init=False)

    def begin(self) -> None:
        """Forget what an earlier step left."""
        self._lent.clear()
        self._posted.clear()
        self._here.clear()

    def receive(self, microbatch: int, action: Action) -> None:
        """``RECV_F`` or ``RECV_B``: post the receive."""
        self.expect(microbatch, action, self.office.communicator.irecv(edge=self.edge, direction=self.direction))

    def expect(self, microbatch: int, action: Action, handle: ReceiveHandle) -> None:
        """What ``action`` has posted will arrive."""
        self._posted[microbatch] = action, handle

    def wait(self, microbatch: int) -> None:
        """Wait until the message is here."""
        action, handle = self._posted.pop(microbatch)
        self._here[microbatch] = self.office.arrival(action, handle)
        if self.lends and isinstance(handle, ReusableReceive):
            self._lent[microbatch] = handle

    def hand_over(self, microbatch: int, payload: Payload) -> None:
        """Take what a stage on the same position made."""
        self._here[microbatch] = payload

    def take(self, microbatch: int) -> Payload:
        """What is here, once."""
        return self._here.pop(microbatch)

    def give_back(self, microbatch: int) -> None:
        """Let the buffers that held ``microbatch`` take another message, where the communicator can."""
        handle = self._lent.pop(microbatch, None)
        if handle is not None:
            handle.release()


@define(eq=False)
class Outbox:
    """What leaves along an edge: kept for its send, or handed to the inbox of a stage on the same position.

    A message is seen through before the next but one along the edge is posted. That never blocks for good (a verified
    plan does not deadlock even if every send is waited for at once) and seldom for long, so that nobody has to ask
    whether a message has left, and no more than two per edge are held.
    """

    edge: Edge
    direction: Direction
    office: PostOffice
    inbox: Inbox | None
    _kept: dict[int, tuple[Payload, Parcel | None]] = field(factory=dict, init=False)
    _sent: deque[tuple[Action, Handle, Parcel | None]] = field(factory=deque, init=False)

    @property
    def sends(self) -> bool:
        """Whether what is put here leaves by a message."""
        return self.inbox is None

    def begin(self) -> None:
        """Forget what an earlier step left."""
        self._kept.clear()
        self._sent.clear()

    def put(self, microbatch: int, payload: Payload, parcel: Parcel | None = None) -> None:
        """Keep ``payload`` until `send`; or hand it over now."""
        if self.inbox is None:
            self._kept[microbatch] = payload, parcel
        else:
            self.inbox.hand_over(microbatch, map_tensors(payload, _as_leaf))

    def send(self, microbatch: int, action: Action) -> None:
        """``SEND_F`` or ``SEND_B``."""
        payload, parcel = self.give(microbatch)
        detached = map_tensors(payload, _detached)
        self.sent(action, self.office.communicator.isend(detached, edge=self.edge, direction=self.direction), parcel)

    def give(self, microbatch: int) -> tuple[Payload, Parcel | None]:
        """What was kept, once."""
        return self._kept.pop(microbatch)

    def sent(self, action: Action, handle: Handle, parcel: Parcel | None) -> None:
        """What ``action`` has posted is leaving."""
        self._sent.append((action, handle, parcel))

    def make_room(self) -> None:
        """Wait until another message may be posted."""
        self._settle(_ON_THE_WAY - 1)

    def settle(self) -> None:
        """Wait until everything that was sent has left."""
        self._settle(0)

    def _settle(self, still: int) -> None:
        while len(self._sent) > still:
            action, handle, parcel = self._sent.popleft()
            self.office.departure(action, handle)
            if parcel is not None:
                parcel.sent()


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """What is sent: no part of a graph. A gradient is none anyway, and needs no new tensor."""
    return tensor.detach() if tensor.requires_grad else tensor


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """What a stage on the same rank receives: the values, with a gradient of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
