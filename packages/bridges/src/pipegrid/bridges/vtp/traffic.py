"""One rank's tensors across one boundary of the variable-TP pipeline, in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch

from pipegrid.bridges.bridge import BridgeReceive, EdgeTraffic, Filled, PostedReceives
from pipegrid.bridges.bridge.receive import with_gradient
from pipegrid.bridges.bridge.structure import kind_of
from pipegrid.bridges.errors import ShapeError
from pipegrid.bridges.vtp.boundary import Shape, VTPBoundary
from pipegrid.transport.edge import Direction
from pipegrid.transport.messages.handle import Transfer

_MOST_KNOWN = 256  # crossings kept for shapes that come back


class BoundaryTraffic:
    """Sends and receives across ``boundary``, over ``traffic``.

    The shape of the whole tensor is the note of its messages: the first one (or, where shapes vary, each one) tells the
    receiver all that it needs, and every message is one plain tensor.
    """

    def __init__(self, boundary: VTPBoundary, traffic: EdgeTraffic, *, variable: bool) -> None:
        self.boundary, self.traffic, self.variable = boundary, traffic, variable
        self.rank = traffic.wiring.rank
        self._crossing = lru_cache(maxsize=_MOST_KNOWN)(partial(boundary.crossing, rank=self.rank))
        self._announced: dict[Direction, Shape] = {}

    def __str__(self) -> str:
        return self.traffic.name

    def forget_shapes(self) -> None:
        """Announce the next message anew."""
        self._announced.clear()

    def isend(self, tensor: torch.Tensor, direction: Direction) -> list[Transfer]:
        """Start sending this rank's share of a tensor; one handle per peer."""
        if not isinstance(tensor, torch.Tensor):
            raise ShapeError(f"{self} carries one tensor, got {kind_of(tensor)}; zeros stand for no gradient")
        whole = self.boundary.whole(tensor.shape, self.rank)
        _, part = self._crossing(whole, direction)
        note = None if not self.variable and self._announced.get(direction) == whole else _encode(whole)
        view = tensor.detach().reshape(part.source_shape)
        sending = self.traffic.send(part, view, direction, dtype=tensor.dtype, note=note)
        self._announced[direction] = whole
        return sending

    def irecv(
        self, direction: Direction, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> BridgeReceive:
        """Start receiving the next tensor; of another ``shape`` or ``dtype`` than given it is a ShapeError.

        With both there is a tensor to hand out at once.
        """
        expected = None if shape is None else self.boundary.whole(shape, self.rank)
        out = None
        if shape is not None and dtype is not None:
            wants_grad = dtype.is_floating_point or dtype.is_complex
            out = torch.empty(tuple(shape), dtype=dtype, device=self.traffic.device, requires_grad=wants_grad)
        return self.traffic.receive(
            direction, lambda handles: self._filled(handles, direction, expected, out), into=out
        )

    def _filled(
        self, handles: PostedReceives, direction: Direction, expected: Shape | None, out: torch.Tensor | None
    ) -> Filled:
        """This rank's tensor with the messages in their places, and its completion under way."""
        dtypes = {handle.result().dtype for handle in handles.values()}
        wholes = {_decode(handle.note) for handle in handles.values()}  # type: ignore[attr-defined]
        if len(wholes) > 1 or len(dtypes) > 1:
            raise ShapeError(
                f"{self}: the peers of rank {self.rank} send parts of different tensors: shapes {sorted(wholes)}, "
                f"dtypes {sorted(map(str, dtypes))}"
            )
        (whole,), (dtype,) = wholes, dtypes
        shape, part = self._crossing(whole, direction)
        if expected not in {None, whole} or (out is not None and out.dtype is not dtype):
            wanted = expected if out is None else f"{expected} of {out.dtype}"
            raise ShapeError(f"{self}: rank {self.rank} expects a part of {wanted}, but of {whole} of {dtype} comes")
        view = None if out is None else out.detach().view(part.destination_shape)
        pieces = {peer: handle.result() for peer, handle in handles.items()}
        filled, completions = self.traffic.fill(part, pieces, direction, dtype=dtype, out=view)
        tensor = filled.view(shape) if out is None else out
        return Filled([tensor], completions, partial(with_gradient, tensor))


def _encode(whole: Shape) -> str:
    """A shape as the note of a message."""
    return ",".join(map(str, whole))


def _decode(text: str) -> Shape:
    """From text."""
    return tuple(int(extent) for extent in text.split(",") if extent)
