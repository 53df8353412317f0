"""Event ids: one integer per send, receive, result, joined compute, collective call and shared exchange of a plan.

What happens to each microbatch, or to each slice, has ids in a row, by the number of the piece (`Plan.piece_of`).
"""

from __future__ import annotations

from typing import NamedTuple

from pipegrid.core.edge import Direction, Edge
from pipegrid.plans.plan import Action, ActionKind, Lane, Plan, for_piece
from pipegrid.plans.plan.dataflow import EdgeFlow, dataflow_of

MESSAGE_KINDS = {
    Direction.FORWARD: (ActionKind.SEND_F, ActionKind.RECV_F),
    Direction.BACKWARD: (ActionKind.SEND_B, ActionKind.RECV_B),
}
"""Per direction, the kind of a message's two ends: send, receive."""


class Route(NamedTuple):
    """The messages of one flow from one position to another; ``sent`` and ``received`` are the ids of piece 0."""

    flow: EdgeFlow
    lane: Lane
    sent: int
    received: int

    def end(self, *, sends: bool) -> Action:
        """The action at one of the two ends, for microbatch 0."""
        send, receive = MESSAGE_KINDS[self.flow.direction]
        if sends:
            return Action(send, self.flow.producer, 0, self.flow.edge)
        return Action(receive, self.flow.consumer, 0, self.flow.edge)


class EventIds:
    """The event ids of a plan, which follow from its shape alone; each table entry is the id of piece 0.

    ``routes`` come first: all sends, then all receives. ``made``: in a plan of computes, the result of (position,
    stage, direction). ``joined``: that (position, stage, kind) has come to a compute of a shared stage. ``exchanges``:
    with shared lanes, the batches that a position exchanges with a partner, by (position, partner).
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.dataflow = plan, dataflow_of(plan)
        self.size = 0
        count, crossing = plan.num_pieces, self.dataflow.crossing if plan.has_communication else ()
        pairs = [(flow, *pair) for flow in crossing for pair in flow.routes]
        bases = self._take(count, len(pairs)), self._take(count, len(pairs))
        self.routes = [
            Route(flow, Lane(sender, receiver, flow.direction), sent, received)
            for (flow, sender, receiver), sent, received in zip(pairs, *bases, strict=True)
        ]
        self.routes_of: dict[tuple[Edge, Direction], list[Route]] = {}
        traffic: dict[tuple[int, int], int] = {}
        for route in self.routes:
            self.routes_of.setdefault((route.flow.edge, route.flow.direction), []).append(route)
            ends = route.lane.source, route.lane.destination
            for pair in (ends, ends[::-1]):
                traffic[pair] = traffic.get(pair, 0) + len(route.flow.pieces)
        self.exchanges = {pair: self._take(most)[0] for pair, most in sorted(traffic.items())}
        self.made: dict[tuple[int, int, Direction], int] = {}
        if not plan.has_communication:
            made = [(p, s, way) for p, stages in enumerate(plan.stages_at) for s in stages for way in Direction]
            self.made = dict(zip(made, self._take(count, len(made)), strict=True))
        joined = [
            (position, stage, kind)
            for stage, places in self.dataflow.shared
            for position in places
            for kind in ((ActionKind.F,) if stage in plan.forward_only else tuple(ActionKind)[:4])
        ]
        self.joined = dict(zip(joined, self._take(count, len(joined)), strict=True))
        self._calls: dict[tuple[str, int, int], int] = {}

    def _take(self, each: int, times: int = 1) -> list[int]:
        first, self.size = self.size, self.size + each * times
        return list(range(first, self.size, each))

    def called(self, group: str, number: int, member: int) -> int:
        """The id of a member's part in the group's collective ``number``."""
        key = (group, number, member)
        if key not in self._calls:
            self._calls[key] = self._take(1)[0]
        return self._calls[key]

    def message(self, sent: int, *, sends: bool) -> Action:
        """The action at one of the two ends of the message whose send has the id ``sent``."""
        route, piece = divmod(sent, self.plan.num_pieces)
        return for_piece(self.routes[route].end(sends=sends), piece, self.plan.num_slices)
