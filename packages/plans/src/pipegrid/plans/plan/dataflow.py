"""Dataflow of a plan: what each compute needs, what it gives, and every transfer between positions.

Derived once, from graph, placement, forward-only stages, groups and routes; the steps of the plan play no part.
`verify` numbers the events of it, `simulate` puts times on them, `lower` writes its transfers into a plan, timelines
draw their arrows along it, the runtime opens its queues from it.

Where all replicas act alike, an edge has one flow each way, of all microbatches. With routes, the units of an edge that
go between the same actors are a flow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import TypeAlias

from attrs import field, frozen

from pipegrid.core.edge import Direction, Edge
from pipegrid.core.lanes import PositionLane as Lane
from pipegrid.plans.plan.actions import Action, ActionKind
from pipegrid.plans.plan.plan import Plan
from pipegrid.plans.plan.routes import Routes

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD

Links: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of a position that makes data and one that needs it, ascending; twice the same where it keeps its own."""


@frozen(slots=False)
class EdgeFlow:
    """The data of one edge in one direction: per piece, a result of ``producer`` that ``consumer`` needs.

    ``links`` are pairs of positions of the two stages. A group that carries the edge moves the data by a ``COLLECTIVE``
    of all its ``members``; otherwise the first position of each pair sends a message to the second, if that is another.

    ``pieces``: the numbers of what travels, all of the plan's where replicas act alike. ``served``: where a call of the
    edge's source serves several of its destination, by piece: per position of the destination the calls there.
    """

    edge: Edge
    direction: Direction
    links: Links
    pieces: Sequence[int]
    group: str | None = None
    members: tuple[int, ...] = ()
    served: Mapping[int, Mapping[int, tuple[int, ...]]] = field(factory=dict, hash=False)

    @cached_property
    def producer(self) -> int:
        """The stage whose compute makes the data."""
        return self.edge.source if self.direction is FORWARD else self.edge.destination

    @cached_property
    def consumer(self) -> int:
        """The stage whose compute needs the data."""
        return self.edge.destination if self.direction is FORWARD else self.edge.source

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The positions that make the data, ascending."""
        return tuple(sorted({source for source, _ in self.links}))

    @cached_property
    def destinations(self) -> tuple[int, ...]:
        """The positions that need the data, ascending."""
        return tuple(sorted({destination for _, destination in self.links}))

    @cached_property
    def is_local(self) -> bool:
        """Whether each position keeps its own result: both stages lie on the same positions, and no group shares it."""
        return self.group is None and all(source == destination for source, destination in self.links)

    @cached_property
    def routes(self) -> Links:
        """(sender, receiver) of each message of one piece, ascending; none where a group carries the edge."""
        if self.group is not None:
            return ()
        return tuple([link for link in self.links if link[0] != link[1]])

    @cached_property
    def senders(self) -> tuple[int, ...]:
        """The positions that send messages, ascending."""
        return tuple(dict.fromkeys(sender for sender, _ in self.routes))

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        """The positions that receive messages, ascending."""
        return tuple(sorted({receiver for _, receiver in self.routes}))

    @cached_property
    def parties(self) -> tuple[int, ...]:
        """The positions that communicate, ascending: members of the group, or senders and receivers."""
        return self.members or tuple(sorted({*self.senders, *self.receivers}))

    def origins(self, position: int) -> tuple[int, ...]:
        """The positions whose results the consumer at ``position`` needs."""
        return tuple([source for source, destination in self.links if destination == position])

    def makers(self, piece: int, position: int) -> tuple[int, ...]:
        """The pieces of the producer at ``position`` whose results are, summed if several, one message."""
        return (piece,) if self.direction is FORWARD or not self.served else self.served[piece][position]

    def users(self, piece: int, position: int) -> tuple[int, ...]:
        """The pieces of the consumer at ``position`` that need a message."""
        return (piece,) if self.direction is BACKWARD or not self.served else self.served[piece][position]


@frozen(slots=False)
class Dataflow:
    """All flows of a plan, edges ascending, forward before backward.

    ``F`` of a stage needs what is `arriving` in direction forward. ``B`` and ``I`` need its own ``F`` and what is
    arriving backward; ``W`` needs its ``I``. ``F`` gives what is `leaving` forward, ``B`` and ``I`` that backward.

    ``shared``: each stage that lies on several positions, with these positions (with routes, of each replica). Their
    ranks may communicate inside its computes (tensor or context parallelism across positions), so each compute of it
    starts once all of them have come to it, and all of them do its computes in one order.

    ``groups``: the positions that do each kind of collective together, by the name of the group, or `replicas_of` a
    position.
    """

    flows: tuple[EdgeFlow, ...]
    shared: tuple[tuple[int, tuple[int, ...]], ...] = ()
    groups: Mapping[str, tuple[int, ...]] = field(factory=dict, hash=False)
    positions_each: int | None = None

    @cached_property
    def between_positions(self) -> tuple[EdgeFlow, ...]:
        """The flows that leave a position: by messages or by a collective."""
        return tuple([flow for flow in self.flows if not flow.is_local])

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that the messages need, ascending."""
        return tuple(sorted({Lane(*route, flow.direction) for flow in self.flows for route in flow.routes}))

    @cached_property
    def routed(self) -> bool:
        """Whether replicas differ, so that what a compute needs depends on the unit."""
        return self.positions_each is not None

    def arriving(self, stage: int, direction: Direction, piece: int) -> Iterable[tuple[EdgeFlow, int]]:
        """The flows of which the stage's compute of ``piece`` needs data, each with the number of that."""
        return self._at(1, stage, direction, piece)

    def leaving(self, stage: int, direction: Direction, piece: int) -> Iterable[tuple[EdgeFlow, int]]:
        """The flows to which the stage's compute of ``piece`` gives data, each with the number of that."""
        return self._at(0, stage, direction, piece)

    def _at(self, end: int, stage: int, direction: Direction, piece: int) -> Iterable[tuple[EdgeFlow, int]]:
        if self.routed:
            return self._by_end[end].get((stage, direction, piece), ())
        return [(flow, piece) for flow, _ in self._by_end[end].get((stage, direction, 0), ())]

    def together(self, stage: int, position: int) -> tuple[int, ...]:
        """The positions that compute ``stage`` together with ``position``; empty where it does so alone."""
        return next((places for shared, places in self.shared if shared == stage and position in places), ())

    def group_of(self, action: Action, position: int) -> str | None:
        """The name in ``groups`` of those with whom ``position`` does a collective; None where it does so alone."""
        if action.group is None and action.kind is ActionKind.REDUCE and self.positions_each is not None:
            name = replicas_of(position % self.positions_each)
            return name if name in self.groups else None
        return action.group

    @cached_property
    def _by_end(self) -> tuple[dict[tuple[int, Direction, int], list[tuple[EdgeFlow, int]]], ...]:
        """By producer, then by consumer: stage, direction and piece, which without routes is 0 for all."""
        ends: tuple[dict[tuple[int, Direction, int], list[tuple[EdgeFlow, int]]], ...] = ({}, {})
        for flow in self.flows:
            for piece in flow.pieces if self.routed else (0,):
                made = {one for source in flow.sources for one in flow.makers(piece, source)}
                used = {one for destination in flow.destinations for one in flow.users(piece, destination)}
                for table, stage, numbers in zip(ends, (flow.producer, flow.consumer), (made, used), strict=True):
                    for number in numbers:
                        table.setdefault((stage, flow.direction, number), []).append((flow, piece))
        return ends


def replicas_of(position: int) -> str:
    """The name, no plan's own, of the group in which the replicas of a position reduce gradients."""
    return f"replicas of position {position}"


def dataflow_of(plan: Plan) -> Dataflow:
    """The dataflow of ``plan``, whatever its steps."""
    if plan.routes is not None:
        return _routed(plan, plan.routes)
    carriers = {edge: group for group in plan.groups for edge in group.edges}
    pieces = range(plan.num_pieces)
    flows = []
    for edge in plan.graph.stage_edges:
        sources, destinations = plan.placement[edge.source], plan.placement[edge.destination]
        group = carriers.get(edge)
        carried = (None, ()) if group is None else (group.name, group.positions)
        # A group shares the results of all, also among positions that hold both stages.
        pairs = _pairs(sources, destinations, all_to_all=group is not None)
        flows.append(EdgeFlow(edge, FORWARD, tuple(pairs), pieces, *carried))
        if edge in plan.gradient_edges:
            flows.append(EdgeFlow(edge, BACKWARD, _back(pairs), pieces, *carried))
    shared = tuple([(stage, places) for stage, places in enumerate(plan.placement) if len(places) > 1])
    return Dataflow(tuple(flows), shared, {group.name: group.positions for group in plan.groups})


def _pairs(sources: Sequence[int], destinations: Sequence[int], *, all_to_all: bool = False) -> list[tuple[int, int]]:
    """The links of an edge; where both stages lie on the same positions, each keeps its own result."""
    if sources == destinations and not all_to_all:
        return [(place, place) for place in sources]
    return [(source, destination) for source in sources for destination in destinations]


def _back(links: Iterable[tuple[int, int]]) -> Links:
    """The links of the gradients."""
    return tuple(sorted((destination, source) for source, destination in links))


def _routed(plan: Plan, routes: Routes) -> Dataflow:
    """The dataflow of a plan in which replicas differ."""
    flows = []
    for edge in plan.graph.stage_edges:
        # By links and piece, the calls that are served, per position.
        alike: dict[Links, dict[int, dict[int, tuple[int, ...]]]] = defaultdict(dict)
        (module, _), (fed, _) = plan.graph.module_of(edge.source), plan.graph.module_of(edge.destination)
        for call in routes.calls(module):
            passing = [unit for unit in routes.served(call, module) if not routes.skips_module(unit, fed)]
            if not passing:
                continue
            calls = [call] if module == fed else sorted({routes.call(unit, fed) for unit in passing})
            places, replicas = plan.placement[edge.destination], defaultdict[int, list[int]](list)
            for other in calls:
                replicas[routes.of(other, edge.destination)].append(other)
            pairs = {
                (plan.actors([source], routes.of(call, edge.source))[0], plan.actors([destination], replica)[0])
                for source, destination in _pairs(plan.placement[edge.source], places)
                for replica in replicas
            }
            alike[tuple(sorted(pairs))][call] = {
                actor: tuple(there) for replica, there in replicas.items() for actor in plan.actors(places, replica)
            }
        single = all(here == (call,) for own in alike.values() for call, by in own.items() for here in by.values())
        for links, served in alike.items():
            many = {} if single else served
            flows.append(EdgeFlow(edge, FORWARD, links, tuple(served), served=many))
            if edge in plan.gradient_edges:
                flows.append(EdgeFlow(edge, BACKWARD, _back(links), tuple(served), served=many))
    shared = [
        (stage, plan.actors(places, replica))
        for stage, places in enumerate(plan.placement)
        for replica in range(plan.num_replicas)
        if len(places) > 1 and all(replica in routes.living(place) for place in places)
    ]
    groups = {group.name: plan.living(group.positions) for group in plan.groups}
    if plan.num_replicas > 1:
        trained = (places for stage, places in enumerate(plan.placement) if stage not in plan.forward_only)
        groups |= {replicas_of(place): plan.living([place]) for place in sorted(set(chain.from_iterable(trained)))}
    return Dataflow(tuple(flows), tuple(shared), groups, plan.positions_each)


def default_creation(plan: Plan) -> tuple[tuple[Lane | str, ...], ...]:
    """Per position the groups (by name) and lanes that it creates before the first step, in one order of the plan.

    Creating a group waits for all its members: orders that disagree can wait for each other in a cycle, parts of one
    order cannot. A plan of computes alone needs none.
    """
    if not plan.has_communication:
        return ((),) * plan.num_positions
    flows = dataflow_of(plan)
    members = dict(flows.groups) | {lane: (lane.source, lane.destination) for lane in flows.lanes}
    return tuple(tuple(name for name in members if position in members[name]) for position in range(plan.num_positions))
