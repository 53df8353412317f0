"""One rank's lanes across one boundary of the variable-TP pipeline, and the groups in which its copies complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from pipegrid.bridges.bridge.wiring import group_spec
from pipegrid.bridges.errors import ShapeError
from pipegrid.bridges.reshard import Completion
from pipegrid.bridges.steps import Completing, pack
from pipegrid.bridges.vtp.boundary import Crossing, Shape, VTPBoundary
from pipegrid.bridges.vtp.receive import LandingQueue, VTPReceive, encode_shape
from pipegrid.topology import GroupSpec
from pipegrid.transport.edge import Direction
from pipegrid.transport.handle import ReceiveTransfer, Transfer
from pipegrid.transport.opening import Lanes
from pipegrid.transport.spec import LaneSpec

_MOST_KNOWN = 256  # crossings kept for shapes that come back


class BoundaryTraffic:
    """Sends and receives of ``rank`` across ``boundary``, in both directions.

    Every message carries the shape of the whole tensor as the key of its payload, so the first one (or, where shapes
    vary, each one) tells the receiver all that it needs, and later ones are payload only.
    """

    def __init__(self, boundary: VTPBoundary, rank: int, label: str) -> None:
        self.boundary, self.rank = boundary, rank
        self.label = f"{label}/{boundary.edge}"
        self._peers = {direction: boundary.peers(rank, direction) for direction in Direction}
        self._known: dict[tuple[Shape, Direction], Crossing] = {}
        self._lanes: Lanes | None = None
        self.queues: dict[Direction, LandingQueue] = {}

    def __str__(self) -> str:
        return f"boundary {self.label}"

    def _spec(self, peer: int, direction: Direction) -> LaneSpec:
        ends = (self.rank, peer) if self.boundary.sends(self.rank, direction) else (peer, self.rank)
        return LaneSpec(*ends, f"{self.label}/{direction.value}")

    @property
    def lane_specs(self) -> tuple[LaneSpec, ...]:
        """The lanes of this rank."""
        return tuple(self._spec(peer, direction) for direction in Direction for peer in self._peers[direction])

    def _completion_group(self, direction: Direction) -> GroupSpec | None:
        """The ranks with which this one completes what it receives; None where it receives a part of its own."""
        stage = self.boundary.receiver(direction)
        if self.rank not in stage.ranks or stage.parts == len(stage.ranks):
            return None
        return group_spec(stage.ranks, self.label, f"complete/{direction.value}")

    @property
    def group_specs(self) -> tuple[GroupSpec, ...]:
        """The groups of this rank."""
        return tuple(spec for direction in Direction if (spec := self._completion_group(direction)) is not None)

    def attach(
        self,
        lanes: Lanes,
        groups: Mapping[GroupSpec, dist.ProcessGroup],
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Use these lanes and groups, which hold this rank's; land on ``stream``."""
        self._lanes = lanes
        for direction in Direction:
            if self.boundary.sends(self.rank, direction):
                continue
            group = self._completion_group(direction)
            self.queues[direction] = LandingQueue(
                where=str(self),
                rank=self.rank,
                device=device,
                crossing_of=partial(self._crossing, direction=direction),
                complete=partial(self._complete, group=None if group is None else groups[group]),
                completes=group is not None,
                stream=stream,
            )

    def _complete(self, step: Completion, view: torch.Tensor, *, group: dist.ProcessGroup | None) -> Completing:
        assert group is not None
        return Completing(step, view, group, rank=self.rank, dtype=view.dtype)

    def _crossing(self, whole: Shape, *, direction: Direction) -> Crossing:
        key = whole, direction
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self.boundary.check(whole)
            self._known[key] = self.boundary.crossing(whole, direction, self.rank)
        return self._known[key]

    @property
    def lanes(self) -> Lanes:
        """The lanes."""
        assert self._lanes is not None
        return self._lanes

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
        crossing = self._crossing(whole, direction=direction)
        view = tensor.detach().reshape(crossing.view)
        text = encode_shape(whole)
        with self.lanes.batch():
            return [
                self.lanes[self._spec(peer, direction)].isend(
                    {text: pack(view, crossing.peers.get(peer, ()), view.dtype)}
                )
                for peer in self._peers[direction]
            ]

    def irecv(
        self, direction: Direction, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> VTPReceive:
        """Start receiving the next tensor.

        Args:
            direction: of the tensor.
            shape: of this rank's tensor, if the caller knows it: anything else that comes is a ShapeError.
            dtype: likewise; with both there is a tensor to hand out at once.
        """
        queue = self.queues[direction]
        whole = None if shape is None else self.boundary.whole(shape, self.rank)
        out = None
        if shape is not None and dtype is not None:
            wants_grad = dtype.is_floating_point or dtype.is_complex
            out = torch.empty(tuple(shape), dtype=dtype, device=queue.device, requires_grad=wants_grad)

        def post() -> dict[int, ReceiveTransfer]:
            with self.lanes.batch():
                return {peer: self.lanes[self._spec(peer, direction)].irecv() for peer in self._peers[direction]}

        return VTPReceive(queue, post, whole=whole, out=out)
