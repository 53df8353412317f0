"""One rank's messages across one boundary of the variable-TP pipeline, in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from pipegrid.bridges.bridge import BridgeReceive, LandingQueue, first_failure, group_spec, holds_host, whole_message
from pipegrid.bridges.bridge.receive import Landed
from pipegrid.bridges.errors import ShapeError
from pipegrid.bridges.steps import Completing, pack, unpack
from pipegrid.bridges.vtp.boundary import Crossing, Shape, VTPBoundary
from pipegrid.topology import GroupSpec
from pipegrid.transport.edge import Direction
from pipegrid.transport.handle import Transfer
from pipegrid.transport.lane import Lane
from pipegrid.transport.opening import Lanes
from pipegrid.transport.protocol import ReceiveHandle
from pipegrid.transport.spec import LaneSpec

_MOST_KNOWN = 256  # crossings kept for shapes that come back


class BoundaryTraffic:
    """Sends and receives of ``rank`` across ``boundary``.

    The shape of the whole tensor is the note of its messages: the first one (or, where shapes vary, each one) tells the
    receiver all that it needs, and every message is one plain tensor.
    """

    def __init__(self, boundary: VTPBoundary, rank: int, label: str, *, variable: bool) -> None:
        self.boundary, self.rank, self.variable = boundary, rank, variable
        self.label = f"{label}/{boundary.edge}"
        self._known: dict[tuple[Shape, Direction], Crossing] = {}
        self._announced: dict[Direction, Shape] = {}
        self._specs = {
            direction: {peer: self._spec(peer, direction) for peer in boundary.peers(rank, direction)}
            for direction in Direction
        }
        self._to: dict[Direction, dict[int, Lane]] = {}
        self.queues: dict[Direction, LandingQueue] = {}

    def __str__(self) -> str:
        return f"boundary {self.label}"

    def _spec(self, peer: int, direction: Direction) -> LaneSpec:
        ends = (self.rank, peer) if self.boundary.sends(self.rank, direction) else (peer, self.rank)
        return LaneSpec(*ends, f"{self.label}/{direction.value}")

    @property
    def lane_specs(self) -> tuple[LaneSpec, ...]:
        """The lanes of this rank."""
        return tuple(spec for specs in self._specs.values() for spec in specs.values())

    def _completion_group(self, direction: Direction) -> GroupSpec | None:
        """The group in which this rank completes what it receives; None where it receives a part of its own."""
        copies = self.boundary.copies(direction)
        return group_spec(copies, self.label, f"complete/{direction.value}") if self.rank in copies else None

    @property
    def group_specs(self) -> tuple[GroupSpec, ...]:
        """The groups of this rank."""
        return tuple(spec for direction in Direction if (spec := self._completion_group(direction)) is not None)

    def attach(
        self,
        lanes: Lanes,
        groups: Mapping[GroupSpec, dist.ProcessGroup],
        *,
        backend: str,
        device: torch.device,
        deadline: float,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Use these lanes and groups, which hold this rank's; land on ``stream``."""
        self._batch, self._groups = lanes.batch, groups
        for direction, specs in self._specs.items():
            self._to[direction] = own = {peer: lanes[spec] for peer, spec in specs.items()}
            if self.boundary.sends(self.rank, direction):
                continue
            copies = self.boundary.copies(direction)
            self.queues[direction] = LandingQueue(
                str(self),
                self.rank,
                device,
                deadline,
                copies=copies,
                by_itself=bool(copies) and holds_host(backend, device),
                failure=lambda own=own: first_failure(own),  # type: ignore[misc]
                stream=stream,
            )

    def _crossing(self, whole: Shape, direction: Direction) -> Crossing:
        key = whole, direction
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self.boundary.check(whole)
            self._known[key] = self.boundary.crossing(whole, direction, self.rank)
        return self._known[key]

    def forget_shapes(self) -> None:
        """Announce the next message anew."""
        self._announced.clear()

    def isend(self, tensor: torch.Tensor, direction: Direction) -> list[Transfer]:
        """Start sending this rank's share of a tensor; one handle per peer.

        Raises:
            ShapeError: not a tensor, or a sequence that a side cannot cut.
            P2PError: as `pipegrid.transport.Lane.isend`.
        """
        if not isinstance(tensor, torch.Tensor):
            raise ShapeError(
                f"{self} carries one tensor, got {type(tensor).__name__}; send the tensor, and zeros in place of a "
                f"gradient that there is none of"
            )
        whole = self.boundary.whole(tensor.shape, self.rank)
        crossing = self._crossing(whole, direction)
        view = tensor.detach().reshape(crossing.view)
        note = None if not self.variable and self._announced.get(direction) == whole else encode_shape(whole)
        pieces = [
            (lane, pack(view, crossing.peers.get(peer, ()), view.dtype)) for peer, lane in self._to[direction].items()
        ]
        with self._batch():
            sending = [lane.isend(flat, note=note) for lane, flat in pieces]
        self._announced[direction] = whole
        return sending

    def irecv(
        self, direction: Direction, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> BridgeReceive:
        """Start receiving the next tensor.

        Args:
            direction: of the tensor.
            shape: of this rank's tensor, if the caller knows it: anything else that comes is a ShapeError.
            dtype: likewise; with both there is a tensor to hand out at once.
        """
        queue, lanes = self.queues[direction], self._to[direction]
        expected = None if shape is None else self.boundary.whole(shape, self.rank)
        out = None
        if shape is not None and dtype is not None:
            wants_grad = dtype.is_floating_point or dtype.is_complex
            out = torch.empty(tuple(shape), dtype=dtype, device=queue.device, requires_grad=wants_grad)

        def post() -> dict[int, ReceiveHandle]:
            with self._batch():
                return {peer: lane.irecv() for peer, lane in lanes.items()}

        return BridgeReceive(queue, post, lambda handles: self._filled(handles, direction, expected, out), tensor=out)

    def _filled(
        self,
        handles: Mapping[int, ReceiveHandle],
        direction: Direction,
        expected: Shape | None,
        out: torch.Tensor | None,
    ) -> Landed:
        """This rank's tensor with the messages in their places, and its completion under way."""
        arrived = {peer: handle.result().detach() for peer, handle in handles.items()}
        wholes = {decode_shape(handle.note) for handle in handles.values()}  # type: ignore[attr-defined]
        dtypes = {flat.dtype for flat in arrived.values()}
        if len(wholes) > 1 or len(dtypes) > 1:
            raise ShapeError(
                f"{self}: the peers of rank {self.rank} send parts of different tensors: shapes {sorted(wholes)}, "
                f"dtypes {sorted(map(str, dtypes))}; the ranks of a stage send one"
            )
        (whole,), (dtype,) = wholes, dtypes
        crossing = self._crossing(whole, direction)
        if expected not in {None, whole}:
            raise ShapeError(
                f"{self}: rank {self.rank} expects shape {self._crossing(expected or (), direction).shape}, but "
                f"{crossing.shape} comes; give the shape that the other stage sends"
            )
        if out is None:
            if len(arrived) == 1 and crossing.completion is None:
                ((peer, flat),) = arrived.items()
                received = whole_message(flat, crossing.shape, crossing.peers.get(peer, ()))
                if received is not None:
                    return received, ()
            out = torch.empty(crossing.shape, dtype=dtype, device=self.queues[direction].device)
        elif out.dtype is not dtype:
            raise ShapeError(f"{self}: rank {self.rank} expects {out.dtype}, but {dtype} comes")
        view = out.detach().view(crossing.view)
        for peer, boxes in crossing.peers.items():
            unpack(arrived[peer], boxes, view)
        group = self._completion_group(direction)
        if crossing.completion is None or group is None:
            return out, ()
        return out, [Completing(crossing.completion, view, self._groups[group], rank=self.rank, dtype=dtype)]


def encode_shape(whole: Shape) -> str:
    """A shape as the note of a message."""
    return ",".join(map(str, whole))


def decode_shape(text: str) -> Shape:
    """From text."""
    return tuple(int(extent) for extent in text.split(",") if extent)
