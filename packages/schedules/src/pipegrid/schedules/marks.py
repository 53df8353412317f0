"""Numbers for all that one position can tell another, so that waiting is a matter of flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attrs import Factory, define

from pipegrid.schedules.actions import Action, ActionKind
from pipegrid.schedules.dependencies import Transfer, transfers
from pipegrid.schedules.plan import Plan, actions_of
from pipegrid.schedules.plan_text import step_text
from pipegrid.transport.edge import Direction, Edge


class Route(NamedTuple):
    """Where messages of one edge in one direction go, from position to position."""

    transfer: Transfer
    sender: int
    receiver: int

    def end(self, microbatch: int, *, sends: bool) -> Action:
        """The action at one of the ends."""
        forward = self.transfer.direction is Direction.FORWARD
        if sends:
            kind = ActionKind.SEND_F if forward else ActionKind.SEND_B
            return Action(kind, self.transfer.producer, microbatch, self.transfer.edge)
        kind = ActionKind.RECV_F if forward else ActionKind.RECV_B
        return Action(kind, self.transfer.consumer, microbatch, self.transfer.edge)


@define(eq=False)
class Exchanges:
    """What one position exchanges with another: per batch, the marks of its messages, and its step.

    A batch of one message has that one in place of a list. ``base``: the mark of the first exchange; ``most``: how
    many there may be.
    """

    base: int
    most: int
    position: int
    contents: list[int | list[int]] = Factory(list)
    steps: list[int] = Factory(list)


class Marks:
    """The marks of a plan, one for each microbatch of each thing; a *base* is that of microbatch 0.

    First come the sends of all routes, then their receives, then (in a plan of computes) what each stage on
    each position makes, then those of `numbered`.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.transfers = {(t.edge, t.direction): t for t in transfers(plan)}
        self.routes: list[Route] = []
        self._route_bases: dict[tuple[Edge, Direction, int, int], int] = {}
        if plan.communicates:
            for transfer in self.transfers.values():
                if transfer.edge not in plan.collective_edges:
                    self._add_routes(transfer)
        count = plan.num_microbatches
        self.received = len(self.routes) * count
        """What to add to the mark of a send for the mark of its receive."""
        self._makers = (
            []
            if plan.communicates
            else [
                (position, stage, forward)
                for stage, places in enumerate(plan.placement)
                for position in places
                for forward in (True, False)
            ]
        )
        self._made_bases = {maker: 2 * self.received + i * count for i, maker in enumerate(self._makers)}
        self.num_fixed = 2 * self.received + len(self._makers) * count
        self._numbers: dict[tuple[object, ...], int] = {}
        self._places: dict[int, tuple[int, int]] = {}  # (position, step) of each mark of `numbered`
        self.partners = [route.receiver for route in self.routes] + [route.sender for route in self.routes]
        """Per route, who is at the other end of a send, and then of a receive."""
        self._exchanges: dict[tuple[int, int], Exchanges] = {}
        self._steps: dict[int, dict[str, int]] = {}

    def _add_routes(self, transfer: Transfer) -> None:
        for sender in transfer.sources:
            for receiver in transfer.destinations:
                if sender != receiver:
                    key = (transfer.edge, transfer.direction, sender, receiver)
                    self._route_bases[key] = len(self.routes) * self.plan.num_microbatches
                    self.routes.append(Route(transfer, sender, receiver))

    def __len__(self) -> int:
        return self.num_fixed + len(self._numbers) + sum(own.most for own in self._exchanges.values())

    def sent(self, transfer: Transfer, sender: int, receiver: int) -> int:
        """The base for messages sent."""
        return self._route_bases[transfer.edge, transfer.direction, sender, receiver]

    def made(self, position: int, stage: int, *, forward: bool) -> int:
        """The base for results made, in a plan of computes."""
        return self._made_bases[position, stage, forward]

    def numbered(self, *key: object) -> int:
        """A mark for anything else that has a name, say the third call of a group by one of its members."""
        return self._numbers.setdefault(key, len(self))

    def place(self, mark: int, position: int, step: int) -> None:
        """Note which step sets a mark of `numbered`."""
        self._places[mark] = (position, step)

    def number_exchanges(self, most: int) -> dict[tuple[int, int], Exchanges]:
        """Marks for what each position exchanges with each other one, batch by batch, ``most`` at most."""
        pairs = {(route.sender, route.receiver) for route in self.routes}
        pairs |= {(receiver, sender) for sender, receiver in pairs}
        first = len(self)
        self._exchanges = {
            pair: Exchanges(first + number * most, most, pair[0]) for number, pair in enumerate(sorted(pairs))
        }
        return self._exchanges

    def text(self, mark: int) -> str:
        """Who sets the mark, in which step, by which action."""
        if mark >= self.num_fixed:
            position, step = self._place(mark)
            return f"position {position}, step {step}: {step_text(self.plan.positions[position][step])}"
        if mark >= 2 * self.received:
            maker, microbatch = divmod(mark - 2 * self.received, self.plan.num_microbatches)
            position, stage, forward = self._makers[maker]
            tokens = [f"{stage}F{microbatch}"] if forward else [f"{stage}B{microbatch}", f"{stage}I{microbatch}"]
            return self._token_text(position, tokens)
        sends = mark < self.received
        number, microbatch = divmod(mark if sends else mark - self.received, self.plan.num_microbatches)
        route = self.routes[number]
        position = route.sender if sends else route.receiver
        return self._token_text(position, [str(route.end(microbatch, sends=sends))])

    def _place(self, mark: int) -> tuple[int, int]:
        if mark in self._places:
            return self._places[mark]
        own = next(own for own in self._exchanges.values() if own.base <= mark < own.base + own.most)
        return own.position, own.steps[mark - own.base]

    def _token_text(self, position: int, tokens: Sequence[str]) -> str:
        for token in tokens:
            step = self.step_of(position, token)
            if step is not None:
                return f"position {position}, step {step}: {token}"
        return f"position {position}: {tokens[0]}"

    def step_of(self, position: int, token: str) -> int | None:
        """The last step of ``position`` with an action of this token; None if there is none."""
        if position not in self._steps:
            self._steps[position] = {
                str(action): index
                for index, step in enumerate(self.plan.positions[position])
                for action in actions_of(step)
            }
        return self._steps[position].get(token)
