"""Calls of a module that serve several units: one activation, shared by all; and one gradient, the sum of theirs.

The queues of an edge have one payload for each call of its source. Here they are read and written by the pieces of its
destination.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from attrs import define, field

from pipegrid.core.edge import Edge
from pipegrid.schedules.runtime.stages.edge_queues import RecvQueue, SendQueue
from pipegrid.schedules.runtime.stages.payloads import flatten, map_tensors
from pipegrid.transport.protocol import Payload


@define(eq=False)
class SharedCalls:
    """Which call of an edge's source each piece of its destination needs."""

    call_of: Mapping[int, int]
    pieces: dict[int, list[int]] = field(init=False)  # by call, ascending

    def __attrs_post_init__(self) -> None:
        self.pieces = {}
        for piece, call in sorted(self.call_of.items()):
            self.pieces.setdefault(call, []).append(piece)


@define(eq=False)
class SharedQueue:
    """A `RecvQueue` of activations, each received once and shared by the pieces of ``calls``."""

    queue: RecvQueue
    calls: SharedCalls
    edge: Edge = field(init=False)
    local: bool = field(init=False)
    _held: dict[int, Payload] = field(factory=dict, init=False)
    _taken: Counter[int] = field(factory=Counter, init=False)

    def __attrs_post_init__(self) -> None:
        self.edge, self.local = self.queue.edge, self.queue.local

    def drop(self) -> None:
        """Drop what a failed step has left."""
        self._held.clear()
        self._taken.clear()

    def wait(self, piece: int) -> None:
        """Wait until the payload has arrived, up to the deadline."""
        call = self.calls.call_of[piece]
        if call not in self._held:
            self.queue.wait(call)

    def take(self, piece: int) -> Payload:
        """The payload for ``piece``: tensors of its own, in the same memory."""
        call = self.calls.call_of[piece]
        if call not in self._held:
            payload = self.queue.take(call)
            # A stage on the same position may write its output again before the last piece has it.
            several = self.local and len(self.calls.pieces[call]) > 1
            self._held[call] = map_tensors(payload, _copied) if several else payload
        payload = map_tensors(self._held[call], _detached)
        self._taken[call] += 1
        if self._taken[call] == len(self.calls.pieces[call]):
            del self._held[call], self._taken[call]
        return payload


@define(eq=False)
class SummedQueue:
    """A `SendQueue` of gradients, each the sum of those that the pieces of ``calls`` put, in the order of pieces."""

    queue: SendQueue
    calls: SharedCalls
    edge: Edge = field(init=False)
    _sums: dict[int, Payload] = field(factory=dict, init=False)
    _early: dict[int, Payload] = field(factory=dict, init=False)  # by piece
    _next: dict[int, int] = field(factory=dict, init=False)  # by call, how many are in its sum

    def __attrs_post_init__(self) -> None:
        self.edge = self.queue.edge

    def drop(self) -> None:
        """Drop what a step that failed has left."""
        self._sums.clear()
        self._early.clear()
        self._next.clear()

    def put(self, piece: int, payload: Payload) -> None:
        """Add ``payload`` as soon as those of earlier pieces are there; the whole sum goes to the queue."""
        self._early[piece] = map_tensors(payload, torch.Tensor.clone)  # the stage may write it again
        call = self.calls.call_of[piece]
        pieces = self.calls.pieces[call]
        while (done := self._next.get(call, 0)) < len(pieces) and pieces[done] in self._early:
            part = self._early.pop(pieces[done])
            self._next[call] = done + 1
            if not done:
                self._sums[call] = part
                continue
            for total, more in zip(flatten(self._sums[call]), flatten(part), strict=True):
                if total is not None:
                    assert more is not None  # all are gradients of one payload
                    total.add_(more)
        if done == len(pieces):
            del self._next[call]
            self.queue.put(call, self._sums.pop(call))


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
