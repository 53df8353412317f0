"""The steady state: messages of one tensor whose shape stands, with as little in between as there can be.

The latency of a lane is Python's share of it, and most of that is cold code: what is known before is in a closure,
the backend is called first, and nothing is counted that the numbers of the messages tell. The general way, with its
headers, batches and structures, is `RemoteLane`'s and does the same.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pipegrid.transport.handle import ReceiveTransfer, State, Transfer
from pipegrid.transport.message import Signature
from pipegrid.transport.payload import ExpectedShape, ReceiveBuffers, dtype_of, over_old_memory

if TYPE_CHECKING:
    from pipegrid.transport.backends.gloo import WaitedLane


# Of messages up to here the next buffer is made beforehand: to make one then would cost more than to move it does.
_SMALL_BYTES = 64 * 1024


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
    shape, dtype = torch.Size(spec.shape), dtype_of(spec)
    communicator = lane.wire.communicator
    post: Callable[..., Any] = communicator.backend.send
    peer, tag = communicator.peer, lane.wire.data_tag(sending=True)
    submitter, this_thread, state = lane.submitter, threading.get_ident, State.HELD
    take, give = submitter.lock.acquire, submitter.lock.release  # twice as fast as `with`
    held, append = submitter.pending, lane.queue.append

    def issue(tensors: Sequence[Tensor], transfer: Transfer | None) -> Transfer:
        take()
        try:
            work = post(tensors, peer, tag)
            # The message is on its way. What follows is no part of its latency, as the other side has to wake up.
            if transfer is None:
                transfer = Transfer(lane)
            transfer.works = (work,)
            transfer.sequence = lane.sent
            lane.sent += 1
            append(transfer)
        except RuntimeError as error:
            lane.explain(error, transfer or Transfer(lane))
            raise lane.error or error from error
        finally:
            give()
        if submitter.asleep:
            submitter.wake.set()
        return transfer

    def start(transfer: Transfer) -> None:
        tensors, transfer.tensors = transfer.tensors, ()  # from here on the work keeps them
        issue(tensors, transfer)

    def send(payload: Any) -> Transfer | None:
        try:
            if (
                lane.error is not None
                or not isinstance(payload, Tensor)
                or payload.shape != shape
                or payload.dtype is not dtype
                or not payload.is_cpu
                or not payload.is_contiguous()
                or payload.is_neg()  # of what lanes refuse, all that can have come so far
            ):
                return None
        except RuntimeError:  # a nested tensor has no shape to ask for
            return None
        tensors = [payload.detach() if payload.requires_grad else payload]
        if held:
            batch = held.get(this_thread())
            if batch is not None:
                transfer = Transfer(lane)
                transfer.tensors, transfer.signature = tensors, standing
                transfer.state, transfer.start = state, start
                batch.append(transfer)
                return transfer
        return issue(tensors, None)

    return SteadySend(send, start, math.prod(shape) * dtype.itemsize)


def steady_receive(lane: WaitedLane, buffers: ReceiveBuffers) -> SteadyReceive:
    """See `SteadyReceive`."""
    (spec,) = buffers.signature.tensors
    shape, dtype = torch.Size(spec.shape), dtype_of(spec)
    nbytes = math.prod(shape) * dtype.itemsize
    communicator = lane.wire.communicator
    post: Callable[..., Any] = communicator.backend.recv
    peer, tag = communicator.peer, lane.wire.data_tag(sending=False)
    submitter, this_thread, state = lane.submitter, threading.get_ident, State.HELD
    take, give = submitter.lock.acquire, submitter.lock.release  # twice as fast as `with`
    held, append, tally = submitter.pending, lane.queue.append, lane.tally
    must_wish = lane.config.shape_mode == "given"

    ahead, posted, free = lane.config.receives_ahead, lane.posted, buffers.free
    small, spare = nbytes <= _SMALL_BYTES, list[Tensor]()

    def put() -> tuple[list[Tensor], tuple[Any]]:
        # The sooner the sender learns of a receive, the likelier it need not wait for it: what can be, is done after.
        if free:
            # The backend takes a buffer as its last user left it, since only its memory counts there.
            (old,) = free.pop()
            work = post([old], peer, tag)
            return [over_old_memory(old)], (work,)
        fresh = [spare.pop()] if spare else buffers.new()
        work = post(fresh, peer, tag)
        tally.allocations += 1
        if small:
            spare.extend(buffers.new())
        return fresh, (work,)

    def issue(transfer: ReceiveTransfer | None) -> ReceiveTransfer:
        take()
        try:
            mine = posted.popleft() if posted else put()
            # Those ahead of the one that is asked for: the sender learns of them before it needs to.
            while len(posted) < ahead:
                posted.append(put())
            if transfer is None:
                transfer = ReceiveTransfer(lane)
            transfer.buffers = buffers
            transfer.tensors, transfer.works = mine
            transfer.build()  # while the message travels, not when it has come
            transfer.sequence = lane.received
            lane.received += 1
            append(transfer)
        except RuntimeError as error:
            lane.explain(error, transfer or ReceiveTransfer(lane))
            raise lane.error or error from error
        finally:
            give()
        if submitter.asleep:
            submitter.wake.set()
        return transfer

    def start(transfer: ReceiveTransfer) -> None:
        issue(transfer)

    def receive(shapes: Any) -> ReceiveTransfer | None:
        if lane.error is not None or (must_wish if shapes is None else shape != shapes):
            return None
        if held:
            batch = held.get(this_thread())
            if batch is not None:
                transfer = ReceiveTransfer(lane)
                transfer.state, transfer.start = state, start
                transfer.expected = None if shapes is None else ExpectedShape.of(shapes)
                batch.append(transfer)
                return transfer
        return issue(None)

    return SteadyReceive(receive, start, nbytes)
