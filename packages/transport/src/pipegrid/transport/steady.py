"""The steady state: messages of one tensor whose shape stands, with as little in between as there can be.

The latency of a lane is Python's share of it, and most of that is cold code: what is known before is in a closure,
the backend is called first, and nothing is counted that the numbers of the messages tell. The general way, with its
headers, batches and structures, is `RemoteLane`'s and does the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from pipegrid.transport.handle import ReceiveTransfer, Transfer
from pipegrid.transport.payload import dtype_of
from pipegrid.transport.recipe import Recipe
from pipegrid.transport.signature import Signature

if TYPE_CHECKING:
    from pipegrid.transport.waited_lane import WaitedLane

SteadySend: TypeAlias = Callable[[Any], Transfer | None]
SteadyReceive: TypeAlias = Callable[[Any], ReceiveTransfer | None]


def steady_send(lane: WaitedLane, standing: Signature) -> tuple[SteadySend, int]:
    """How to send one tensor of a signature that stands, and how many bytes that is.

    What is returned gives None, and does nothing, where a payload is something else or must wait for its batch.
    """
    (spec,) = standing.tensors
    shape, dtype, device = torch.Size(spec.shape), dtype_of(spec), lane.device
    communicator = lane.wire.communicator
    post, peer, tag = communicator.data.send, communicator.peer, lane.wire.data_tag(sending=True)
    issuer = lane.issuer
    lock, held, append = issuer.lock, issuer.held, lane.queue.append

    def send(payload: Any) -> Transfer | None:
        if (
            held
            or lane.error is not None
            or not isinstance(payload, Tensor)
            or payload.shape != shape
            or payload.dtype is not dtype
            or payload.device != device
            or not payload.is_contiguous()
        ):
            return None
        transfer = Transfer(lane)
        transfer.tensors = tensors = [payload.detach() if payload.requires_grad else payload]
        with lock:
            try:
                transfer.works = (post(tensors, peer, tag),)
            except RuntimeError as error:
                lane.explain(error, transfer)
                raise lane.error or error from error
            transfer.sequence = lane.sent
            lane.sent += 1
            append(transfer)
        if issuer.asleep:
            issuer.wake.set()
        return transfer

    return send, math.prod(shape) * dtype.itemsize


def steady_receive(lane: WaitedLane, recipe: Recipe) -> tuple[SteadyReceive, int]:
    """How to receive one tensor of a signature that stands, and how many bytes that is.

    What is returned gives None, and does nothing, where something else is expected or it must wait for its batch.
    """
    (spec,) = recipe.signature.tensors
    shape, dtype = torch.Size(spec.shape), dtype_of(spec)
    communicator = lane.wire.communicator
    post, peer, tag = communicator.data.recv, communicator.peer, lane.wire.data_tag(sending=False)
    issuer = lane.issuer
    lock, held, append, tally = issuer.lock, issuer.held, lane.queue.append, lane.tally
    must_wish = lane.config.shape_mode == "given"

    def receive(shapes: Any) -> ReceiveTransfer | None:
        if held or lane.error is not None or (must_wish if shapes is None else shape != shapes):
            return None
        transfer = ReceiveTransfer(lane)
        transfer.recipe = recipe
        with lock:
            transfer.tensors = buffers = recipe.buffers(tally)
            try:
                transfer.works = (post(buffers, peer, tag),)
            except RuntimeError as error:
                lane.explain(error, transfer)
                raise lane.error or error from error
            transfer.sequence = lane.received
            lane.received += 1
            append(transfer)
        if issuer.asleep:
            issuer.wake.set()
        return transfer

    return receive, math.prod(shape) * dtype.itemsize
