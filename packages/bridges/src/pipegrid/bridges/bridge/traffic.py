"""The traffic of one edge on one rank: messages over lanes, sums and completions in groups of the edge's own.

Sizes are the caller's: every call is given the rank's part in a reshard plan. `BridgeCommunicator` and the boundaries
of the variable-TP pipeline differ in how they learn it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
import torch.distributed as dist

from pipegrid.bridges.bridge.receive import BridgeReceive, Filled, PostedReceives, ReceiveQueue, WholeReceive
from pipegrid.bridges.bridge.wiring import BridgeWiring
from pipegrid.bridges.collectives import CollectiveWaits, close_groups
from pipegrid.bridges.steps import Completing, pack, require_summed, start_sum, unpack
from pipegrid.core import Direction, LaneSpec
from pipegrid.reshard import BridgeError, RankPart, ShapeError
from pipegrid.topology import GroupSpec
from pipegrid.transport import Lane, Lanes, P2PConfig
from pipegrid.transport.messages.handle import Transfer

_FORWARD = Direction.FORWARD


LeafShare: TypeAlias = tuple[RankPart, torch.Tensor, torch.dtype, Sequence[int]]
"""A rank's share in one leaf of a message: its part in the plan, a tensor of shape ``part.source_shape``, its dtype on
the wire, and the ranks whose message has a piece of it, be it one without elements."""


class EdgeTraffic:
    """Sends and receives along the edge ``name``, both directions.

    ``waits`` is for its completions; ``lanes`` has this rank's of the edge, and is None before `attach`.
    """

    def __init__(
        self,
        name: str,
        wiring: BridgeWiring,
        *,
        backend: str,
        device: torch.device,
        config: P2PConfig,
        stream: torch.Stream | None = None,
    ) -> None:
        self.name, self.wiring, self.device = name, wiring, device
        holds_host = device.type == "cpu" and "gloo" in backend
        task = "the copies on ranks {} did not complete this rank's tensor"
        self.waits = CollectiveWaits(name, wiring.rank, device, config.deadline, task, self._failure)
        self.queues: dict[Direction, ReceiveQueue] = {}
        for direction in wiring.directions:
            copies = wiring.copies(direction)
            alone = len(copies) < 2
            self.queues[direction] = ReceiveQueue(
                device, self.waits, copies=() if alone else copies, unasked=not alone and holds_host, stream=stream
            )
        self.lanes: Lanes | None = None
        self._together: Callable[[], AbstractContextManager[None]] = nullcontext
        self._to: dict[Direction, dict[int, Lane]] = {}
        self._from: dict[Direction, dict[int, Lane]] = {}
        self.groups: Mapping[GroupSpec, dist.ProcessGroup] = {}

    def attach(self, lanes: Lanes) -> None:
        """Use lanes that are open already; `BridgeError` unless all of this rank's of the edge are among them."""
        wiring, rank = self.wiring, self.wiring.rank
        if missing := [str(spec) for spec in wiring.lane_specs if spec not in lanes]:
            raise BridgeError(f"{self.name}: lanes {missing} of rank {rank} are not among those given; open them, too")
        self.lanes = lanes
        # Messages to several ranks are one batch, or one by one where that is as good, and faster.
        self._together = lanes.batch if lanes.batches else nullcontext
        for direction, routes in wiring.routes.items():
            found = {route: lanes[wiring.lane_spec(*route, direction)] for route in routes}
            self._to[direction] = {there: lane for (here, there), lane in found.items() if here == rank}
            self._from[direction] = {here: lane for (here, there), lane in found.items() if there == rank}

    @property
    def failed_groups(self) -> Collection[dist.ProcessGroup]:
        """The groups, where a collective of theirs may be stuck or a lane has failed: to abort, not to destroy."""
        failed = self.waits.stuck or (self.lanes is not None and self.lanes.failed)
        return self.groups.values() if failed else ()

    def end(self, reason: str) -> Collection[dist.ProcessGroup]:
        """Fail collectives with ``reason``, those under way and later ones; returns their groups, to abort."""
        self.waits.end(reason)
        return self.groups.values()

    def close_groups(self, *, beside: Callable[[], None] = lambda: None) -> None:
        """Destroy the groups after ``beside``, as `pipegrid.bridges.collectives.close_groups`; again has no effect."""
        self.waits.end("destroyed")
        close_groups(self.groups, failed=bool(self.failed_groups), seconds=self.waits.deadline, beside=beside)
        self.groups = {}

    def _failure(self) -> object | None:
        """The error of the first lane of the edge that failed; None while all live."""
        lanes: Mapping[LaneSpec, Lane] = self.lanes or {}
        failed = (lanes[spec].error for spec in self.wiring.lane_specs if spec in lanes)
        return next((error for error in failed if error is not None), None)

    def send(
        self,
        part: RankPart,
        tensor: torch.Tensor,
        direction: Direction,
        *,
        dtype: torch.dtype,
        peers: Iterable[int] | None = None,
        note: str | None = None,
    ) -> list[Transfer]:
        """Start sending this rank's share of ``tensor`` in ``dtype``; one handle per message.

        ``tensor`` has the shape ``part.source_shape``. ``peers`` are the ranks that get a message, be it one without
        bytes; None is all that have a lane. For ``note`` see `Lane.isend`.
        """
        tensor = self._summed(part, tensor, direction)
        lanes, boxes = self._to[direction], part.sends
        to = lanes if peers is None else peers
        pieces = [(lanes[peer], pack(tensor, boxes.get(peer, ()), dtype)) for peer in to]
        if len(pieces) == 1:
            return [pieces[0][0].isend(pieces[0][1], note=note)]
        handles = []
        with self._together():
            for lane, piece in pieces:  # a comprehension would be a Python frame more in each message
                handles.append(lane.isend(piece, note=note))
        return handles

    def send_shares(
        self, shares: Sequence[LeafShare], direction: Direction, *, peers: Iterable[int] | None, note: str | None
    ) -> list[Transfer]:
        """Start sending each rank of ``peers`` its pieces of all shares, as one list; one handle per message."""
        lanes = self._to[direction]
        tensors = [self._summed(part, tensor, direction) for part, tensor, _, _ in shares]
        messages = {
            peer: [
                pack(tensor, part.sends.get(peer, ()), dtype)
                for tensor, (part, _, dtype, receivers) in zip(tensors, shares, strict=True)
                if peer in receivers
            ]
            for peer in (lanes if peers is None else peers)
        }
        with self._together():
            return [lanes[peer].isend(pieces, note=note) for peer, pieces in messages.items()]

    def compare_announced(self, announced: str, said: object) -> None:
        """Compare the announcements of the ranks that hold partial sums of an activation; ``said``: this one, in words.

        A sum of tensors of unlike sizes ends the process over gloo, and never ends over NCCL. The host waits for the
        others' announcements.

        `ShapeError` on each of these ranks: they announce something else.
        """
        for ranks in self.wiring.reductions:
            group = self.groups[self.wiring.reduction_group(ranks, _FORWARD)]
            task = "ranks {} did not say what their partial sums are of"
            every = self.waits.gather_text(announced, ranks, group, task=task)
            others = [rank for rank, text in every.items() if text != announced]
            if others:
                raise ShapeError(
                    f"{self.name}: rank {self.wiring.rank} sends {said}, and ranks {others} send another; partial sums "
                    "have one shape and dtype"
                )

    def _summed(self, part: RankPart, tensor: torch.Tensor, direction: Direction) -> torch.Tensor:
        """``tensor``, or its sum over the ranks that hold partial sums of it."""
        for ranks in part.reductions:
            require_summed(tensor.dtype, self.name)
            group = self.groups[self.wiring.reduction_group(ranks, direction)]
            tensor, work = start_sum(tensor, group)
            self.waits.wait(work, ranks, group, task="the partial sums of ranks {} and of this one were not added up")
        return tensor

    def receive_whole(self, part: RankPart, direction: Direction, *, requires_grad: bool) -> WholeReceive | None:
        """Start receiving a tensor that arrives whole in one message; None where it needs more than that."""
        lanes, queue = self._from[direction], self.queues[direction]
        if part.whole_from is None or len(lanes) != 1 or queue.waiting or queue.copies:
            return None
        return WholeReceive(lanes[part.whole_from].irecv(), requires_grad=requires_grad)

    def receive(
        self,
        direction: Direction,
        fill: Callable[[PostedReceives], Filled],
        *,
        peers: Callable[[], Iterable[int] | None] | None = None,
        into: torch.Tensor | None = None,
        blocks: Callable[[], bool] | None = None,
    ) -> BridgeReceive:
        """Start receiving the next microbatch; see `BridgeReceive`.

        ``fill`` puts the messages that have arrived in their places, by peer (see `EdgeTraffic.fill`); ``peers`` are
        the ranks that send one, None while they are not known; without it, all that have a lane do.
        """
        lanes = self._from[direction]

        def post() -> PostedReceives | None:
            wanted = lanes if peers is None else peers()
            if wanted is None:
                return None
            with self._together():
                return {peer: lanes[peer].irecv() for peer in wanted}

        queue = self.queues[direction]
        receive = BridgeReceive(queue, post, fill, into=into, blocks=blocks)
        if queue.stream is not None and self.lanes is not None:
            self.lanes.when_started(receive.fill_posted)
        return receive

    def fill(
        self,
        part: RankPart,
        pieces: Mapping[int, torch.Tensor],
        direction: Direction,
        *,
        dtype: torch.dtype,
        wire_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Sequence[Completing]]:
        """The tensor of this rank with the pieces of its peers in place, and its completions under way.

        ``wire_dtype`` is that of the pieces; None is ``dtype``. ``out`` is filled; None is a new tensor of shape
        ``part.destination_shape``, or the only piece where that is all.
        """
        wire_dtype = wire_dtype or dtype
        if out is None:
            if part.whole_from is not None and len(pieces) == 1 and wire_dtype is dtype:
                return pieces[part.whole_from].detach(), ()
            if part.joined_along is not None and wire_dtype is dtype:
                return torch.cat([pieces[peer] for peer in part.receives_in_order], part.joined_along), ()
            out = torch.empty(part.destination_shape, dtype=dtype, device=self.device)
        for peer, boxes in part.receives.items():
            unpack(pieces[peer].detach(), boxes, out)
        if not part.completions:
            return out, ()
        rank, group_of = self.wiring.rank, self.wiring.completion_group
        return out, [
            Completing(step, out, self.groups[group_of(step.ranks, direction)], rank=rank, dtype=wire_dtype)
            for step in part.completions
        ]
