"""Numbers for all that one position can tell another, so that waiting is a matter of flags."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from pipegrid.schedules.plan.actions import Action, ActionKind
from pipegrid.schedules.plan.plan import Lane, Plan
from pipegrid.schedules.verify.dataflow import Transfer, transfers
from pipegrid.transport.edge import Direction, Edge


class Route(NamedTuple):
    """Where messages of one edge in one direction go, from position to position.

    ``base``: the mark of the send of microbatch 0.
    """

    transfer: Transfer
    lane: Lane
    base: int

    def end(self, microbatch: int, *, sends: bool) -> Action:
        """The action at one of the ends."""
        forward = self.transfer.direction is Direction.FORWARD
        if sends:
            kind = ActionKind.SEND_F if forward else ActionKind.SEND_B
            return Action(kind, self.transfer.producer, microbatch, self.transfer.edge)
        kind = ActionKind.RECV_F if forward else ActionKind.RECV_B
        return Action(kind, self.transfer.consumer, microbatch, self.transfer.edge)


Call: TypeAlias = tuple[str, int, int]
"""The name of a group, the number of a call of it, and the member that calls."""


class EventIds:
    """The marks of a plan, one for each microbatch of each thing; a *base* is that of microbatch 0.

    First come the sends of all routes, then their receives, then (in a plan of computes) what each stage on
    each position makes, then the calls of groups. They depend on the plan's shape and not on its steps.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.transfers = {(t.edge, t.direction): t for t in transfers(plan)}
        self.routes: list[Route] = []
        self.routes_of: dict[tuple[Edge, Direction], list[Route]] = {}
        self.transfers_at: list[list[Transfer]] = [[] for _ in plan.positions]
        """Per position, what it sends, receives, or has a part in as a member of the group that carries it."""
        carriers = {edge: group for group in plan.groups for edge in group.edges}
        count = plan.num_microbatches
        for key, transfer in self.transfers.items() if plan.communicates else ():
            carrier = carriers.get(transfer.edge)
            for position in transfer.parties if carrier is None else carrier.positions:
                self.transfers_at[position].append(transfer)
            if carrier is None:
                self.routes_of[key] = self._routes(transfer)
        self.received = len(self.routes) * count
        """What to add to the mark of a send for the mark of its receive."""
        self.makers = (
            []
            if plan.communicates
            else [
                (position, stage, forward)
                for stage, places in enumerate(plan.placement)
                for position in places
                for forward in (True, False)
            ]
        )
        """In a plan of computes (position, stage, whether forward) of all that is made, in the order of its marks."""
        self._made_bases = {maker: 2 * self.received + i * count for i, maker in enumerate(self.makers)}
        self.num_fixed = 2 * self.received + len(self.makers) * count
        self._calls: dict[Call, int] = {}
        self.partners = [route.lane.destination for route in self.routes] + [route.lane.source for route in self.routes]
        """Per route, who is at the other end of a send, and then of a receive."""

    def _routes(self, transfer: Transfer) -> list[Route]:
        first, count = len(self.routes), self.plan.num_microbatches
        for sender in transfer.sources:
            for receiver in transfer.destinations:
                if sender != receiver:
                    lane = Lane(sender, receiver, transfer.direction)
                    self.routes.append(Route(transfer, lane, len(self.routes) * count))
        return self.routes[first:]

    def __len__(self) -> int:
        return self.num_fixed + len(self._calls)

    def made(self, position: int, stage: int, *, forward: bool) -> int:
        """The base for results made, in a plan of computes."""
        return self._made_bases[position, stage, forward]

    def called(self, group: str, number: int, member: int) -> int:
        """The mark for a member's part in a group's call of this number."""
        return self._calls.setdefault((group, number, member), len(self))

    def call(self, mark: int) -> Call:
        """The call that `called` has given the mark."""
        return next(call for call, own in self._calls.items() if own == mark)
