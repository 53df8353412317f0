"""Dataflow of a plan: what each compute needs, what it gives, and every transfer between positions.

Derived once, from graph, placement, forward-only stages and groups; the steps of the plan play no part. `verify`
numbers the events of it, `simulate` puts times on them, `lower` writes its transfers into a plan, timelines draw their
arrows along it, the runtime opens its queues from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from attrs import field, frozen

from pipegrid.schedules.plan.plan import Plan
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.sharing import PositionLane as Lane

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


@frozen(slots=False)
class EdgeFlow:
    """The data of one edge in one direction: per microbatch, a result of ``producer`` that ``consumer`` needs.

    ``sources`` and ``destinations`` are the positions of the two stages. A group that carries the edge moves the data
    by a ``COLLECTIVE`` of all its ``members``; otherwise each source position sends a message to each destination
    position but itself.
    """

    edge: Edge
    direction: Direction
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    group: str | None = None
    members: tuple[int, ...] = ()

    @cached_property
    def producer(self) -> int:
        """The stage whose compute makes the data."""
        return self.edge.source if self.direction is FORWARD else self.edge.destination

    @cached_property
    def consumer(self) -> int:
        """The stage whose compute needs the data."""
        return self.edge.destination if self.direction is FORWARD else self.edge.source

    @cached_property
    def is_local(self) -> bool:
        """Whether each position keeps its own result: both stages lie on the same positions, and no group shares it."""
        return self.group is None and self.sources == self.destinations

    @cached_property
    def routes(self) -> tuple[tuple[int, int], ...]:
        """(sender, receiver) of each message of one microbatch, ascending; none where a group carries the edge."""
        if self.is_local or self.group is not None:
            return ()
        return tuple([(s, d) for s in self.sources for d in self.destinations if s != d])

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
        """The positions whose results the consumer at ``position`` needs: its own of a local flow, else all sources."""
        return (position,) if self.is_local else self.sources


@frozen(slots=False)
class Dataflow:
    """All flows of a plan, edges ascending, forward before backward.

    ``F`` of a stage needs its `inputs` in direction forward. ``B`` and ``I`` need its own ``F`` and its `inputs` in
    direction backward; ``W`` needs its ``I``. ``F`` gives the stage's `outputs` forward, ``B`` and ``I`` those
    backward. All are of one microbatch.

    ``shared``: per stage that lies on several positions, these positions. Their ranks may communicate inside its
    computes (tensor or context parallelism across positions), so each compute of it starts once all of them have come
    to it, and all of them do its computes in one order.
    """

    flows: tuple[EdgeFlow, ...]
    shared: Mapping[int, tuple[int, ...]] = field(factory=dict, hash=False)

    @cached_property
    def crossing(self) -> tuple[EdgeFlow, ...]:
        """The flows that leave a position: by messages or by a collective."""
        return tuple([flow for flow in self.flows if not flow.is_local])

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that the messages need, ascending."""
        return tuple(sorted({Lane(*route, flow.direction) for flow in self.flows for route in flow.routes}))

    def inputs(self, stage: int, direction: Direction) -> tuple[EdgeFlow, ...]:
        """What the stage's compute in ``direction`` needs of other stages."""
        return self._by_end[1].get((stage, direction), ())

    def outputs(self, stage: int, direction: Direction) -> tuple[EdgeFlow, ...]:
        """What the stage's compute in ``direction`` gives to other stages."""
        return self._by_end[0].get((stage, direction), ())

    @cached_property
    def _by_end(self) -> tuple[dict[tuple[int, Direction], tuple[EdgeFlow, ...]], ...]:
        ends: tuple[dict[tuple[int, Direction], tuple[EdgeFlow, ...]], ...] = ({}, {})
        for flow in self.flows:
            for table, stage in zip(ends, (flow.producer, flow.consumer), strict=True):
                key = (stage, flow.direction)
                table[key] = (*table.get(key, ()), flow)
        return ends


def dataflow_of(plan: Plan) -> Dataflow:
    """The dataflow of ``plan``, whatever its steps."""
    carriers = {edge: group for group in plan.groups for edge in group.edges}
    flows = []
    for edge in plan.graph.stage_edges:
        sources, destinations = plan.placement[edge.source], plan.placement[edge.destination]
        group = carriers.get(edge)
        carried = (None, ()) if group is None else (group.name, group.positions)
        flows.append(EdgeFlow(edge, FORWARD, sources, destinations, *carried))
        if edge in plan.gradient_edges:
            flows.append(EdgeFlow(edge, BACKWARD, destinations, sources, *carried))
    shared = {stage: places for stage, places in enumerate(plan.placement) if len(places) > 1}
    return Dataflow(tuple(flows), shared)
