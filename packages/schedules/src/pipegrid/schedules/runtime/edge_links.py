"""Links: along which edges, and to which replicas, the data of a piece come to a stage and leave it.

Where all replicas act alike, all pieces of a stage have one. With routes, a unit that skips a module has fewer edges
than others, and one that moves comes from another replica, or goes there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pipegrid.core.edge import Direction, Edge
from pipegrid.plans.plan import Action, Plan
from pipegrid.plans.plan.dataflow import BACKWARD, FORWARD, EdgeFlow, dataflow_of


class EdgeLink(NamedTuple):
    """One direction of an edge, as an actor has it."""

    edge: Edge
    direction: Direction
    replica: int | None  # of the other end; None is the actor's own
    local: bool = False  # both ends are the actor itself

    @property
    def back(self) -> EdgeLink:
        """The link of the gradients."""
        return self._replace(direction=BACKWARD)


class StageLinks(NamedTuple):
    """The links by which activations come to a stage and leave it; gradients take the same links back."""

    arriving: tuple[EdgeLink, ...]
    leaving: tuple[EdgeLink, ...]


class ActorFlows:
    """What comes to one actor of a plan, or position, where replicas act alike, and what leaves it.

    ``receives`` and ``sends`` are all links to and from the actor, in the order of the ``flows`` of the plan.
    """

    def __init__(self, plan: Plan, actor: int) -> None:
        self.plan, self.actor = plan, actor
        flows = self.flows = dataflow_of(plan)
        self.receives = tuple(dict.fromkeys(link for flow in flows.flows for link in self._links(flow, sends=False)))
        self.sends = tuple(dict.fromkeys(link for flow in flows.flows for link in self._links(flow, sends=True)))
        self._by_message: Mapping[tuple[Edge, Direction, int], EdgeFlow] = {
            (flow.edge, flow.direction, piece): flow
            for flow in flows.flows
            for piece in (flow.pieces if flows.routed else (0,))
        }

    def _links(self, flow: EdgeFlow, *, sends: bool) -> Iterable[EdgeLink]:
        links = [link if sends else link[::-1] for link in flow.links]
        others = sorted(other for here, other in links if here == self.actor)
        local = flow.group is None
        edge, direction = flow.edge, flow.direction
        return [EdgeLink(edge, direction, self.replica_of(other), local and other == self.actor) for other in others]

    def replica_of(self, actor: int) -> int | None:
        """The replica of another actor; None is this one's own."""
        replica = actor // self.plan.positions_each
        return None if replica == self.actor // self.plan.positions_each else replica

    def links_of_action(self, action: Action, *, sends: bool) -> tuple[EdgeLink, ...]:
        """The links along which an action sends or receives its messages: several, where it has several partners."""
        assert action.edge is not None  # by Action's own validation, as the direction
        assert action.direction is not None
        piece = self.plan.piece_of(action) if self.flows.routed else 0
        flow = self._by_message[action.edge, action.direction, piece]
        return tuple(dict.fromkeys(link for link in self._links(flow, sends=sends) if not link.local))

    def links_of(self, stage: int, piece: int) -> StageLinks:
        """The links of the data of ``piece`` of ``stage``, which the actor computes.

        Those of one edge come in the order of the first units that they serve, in which their gradients are summed.
        """
        arriving, leaving = self.flows.arriving(stage, FORWARD, piece), self.flows.leaving(stage, FORWARD, piece)
        return StageLinks(
            tuple(dict.fromkeys(link for flow, _ in arriving for link in self._links(flow, sends=False))),
            tuple(link for flow, message in leaving for link in self._by_unit(flow, message)),
        )

    def calls(self, stage: int) -> dict[EdgeLink, dict[int, int]]:
        """Of the links to ``stage`` along which one call serves several pieces: by piece, that call."""
        found: dict[EdgeLink, dict[int, int]] = defaultdict(dict)
        for piece in self.plan.pieces_at(stage, self.actor) if self.flows.routed else ():
            for flow, message in self.flows.arriving(stage, FORWARD, piece):
                for link in self._links(flow, sends=False) if flow.served else ():
                    found[link][piece] = message
        return found

    def _by_unit(self, flow: EdgeFlow, message: int) -> Iterable[EdgeLink]:
        first: dict[int | None, int] = {}  # by replica
        for place in flow.destinations:
            first.setdefault(self.replica_of(place), flow.users(message, place)[0])
        return sorted(dict.fromkeys(self._links(flow, sends=True)), key=lambda link: first[link.replica])
