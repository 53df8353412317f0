"""The steady state: messages of one tensor whose shape stands, with as little in between as there can be.

The latency of a lane is Python's share of it, and most of that is cold code: what is known before is in a closure,
the backend is called first, and nothing is counted that the numbers of the messages tell. The general way, with its
headers, batches and structures, is `RemoteLane`'s and does the same.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pipegrid.transport.handle import ReceiveTransfer, State, Transfer
from pipegrid.transport.payload import dtype_of
from pipegrid.transport.recipe import Recipe, Wish
from pipegrid.transport.signature import Signature

if TYPE_CHECKING:
    from pipegrid.transport.waited_lane import WaitedLane


class SteadySend(NamedTuple):
    """How to send one tensor of a signature that stands.

    Attributes:
        send: a handle for a payload; None, and nothing done, where the payload is something else.
        start: issue a transfer that `send` made inside a batch.
        nbytes: bytes of a message.
    """

    send: Callable[[Any], Transfer | None]
    start: Callable[[Any], None]
    nbytes: int


class SteadyReceive(NamedTuple):
    """How to receive one tensor of a signature that stands.

    Attributes:
        receive: a handle, where shapes are those of the signature; None, and nothing done, where they are not.
        start: issue a transfer that `receive` made inside a batch.
        nbytes: bytes of a message.
    """

    receive: Callable[[Any], ReceiveTransfer | None]
    start: Callable[[Any], None]
    nbytes: int


def steady_send(lane: WaitedLane, standing: Signature) -> SteadySend:
    """See `SteadySend`."""
    (spec,) = standing.tensors
    shape, dtype, device = torch.Size(spec.shape), dtype_of(spec), lane.device
    communicator = lane.wire.communicator
    post: Callable[..., Any] = communicator.data.send
    peer, tag = communicator.peer, lane.wire.data_tag(sending=True)
    issuer, this_thread, state = lane.issuer, threading.get_ident, State.HELD
    lock, held, append = issuer.lock, issuer.held, lane.queue.append

    def start(transfer: Transfer) -> None:
        with lock:
            try:
                transfer.works = (post(transfer.tensors, peer, tag),)
            except RuntimeError as error:
                lane.explain(error, transfer)
                raise lane.error or error from error
            transfer.sequence = lane.sent
            lane.sent += 1
            append(transfer)
        if issuer.asleep:
            issuer.wake.set()

    def send(payload: Any) -> Transfer | None:
        if (
            lane.error is not None
            or not isinstance(payload, Tensor)
            or payload.shape != shape
            or payload.dtype is not dtype
            or payload.device != device
            or not payload.is_contiguous()
        ):
            return None
        transfer = Transfer(lane)
        transfer.tensors = [payload.detach() if payload.requires_grad else payload]
        if held:
            batch = held.get(this_thread())
            if batch is not None:
                transfer.state, transfer.start, transfer.signature = state, start, standing
                batch.append(transfer)
                return transfer
        start(transfer)
        return transfer

    return SteadySend(send, start, math.prod(shape) * dtype.itemsize)


def steady_receive(lane: WaitedLane, recipe: Recipe) -> SteadyReceive:
    """See `SteadyReceive`."""
    (spec,) = recipe.signature.tensors
    shape, dtype = torch.Size(spec.shape), dtype_of(spec)
    communicator = lane.wire.communicator
    post: Callable[..., Any] = communicator.data.recv
    peer, tag = communicator.peer, lane.wire.data_tag(sending=False)
    issuer, this_thread, state = lane.issuer, threading.get_ident, State.HELD
    lock, held, append, tally = issuer.lock, issuer.held, lane.queue.append, lane.tally
    must_wish = lane.config.shape_mode == "given"

    ahead, posted = lane.config.receives_ahead, lane.posted

    def put() -> None:
        buffers = recipe.buffers(tally)
        posted.append((buffers, (post(buffers, peer, tag),)))

    def start(transfer: ReceiveTransfer) -> None:
        transfer.recipe = recipe
        with lock:
            try:
                # The one that is asked for, and those ahead of it: the sender learns of them before it needs to.
                while len(posted) <= ahead:
                    put()
            except RuntimeError as error:
                lane.explain(error, transfer)
                raise lane.error or error from error
            transfer.tensors, transfer.works = posted.popleft()
            transfer.sequence = lane.received
            lane.received += 1
            append(transfer)
        if issuer.asleep:
            issuer.wake.set()

    def receive(shapes: Any) -> ReceiveTransfer | None:
        if lane.error is not None or (must_wish if shapes is None else shape != shapes):
            return None
        transfer = ReceiveTransfer(lane)
        if held:
            batch = held.get(this_thread())
            if batch is not None:
                transfer.state, transfer.start = state, start
                transfer.wish = None if shapes is None else Wish.of(shapes)
                batch.append(transfer)
                return transfer
        start(transfer)
        return transfer

    return SteadyReceive(receive, start, math.prod(shape) * dtype.itemsize)
