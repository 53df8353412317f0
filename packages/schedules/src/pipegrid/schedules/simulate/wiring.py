"""What the engine looks up once per compute and per message of a position: what it waits for, and what it gives."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from attrs import define, field

from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.plan import Action, ActionKind, Plan
from pipegrid.schedules.plan.dataflow import EdgeFlow, dataflow_of
from pipegrid.schedules.simulate.costs import Costs, activation_sizes
from pipegrid.schedules.simulate.side_streams import CopyStreams, ShardStream, Slots
from pipegrid.transport.edge import Direction, Edge

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


@define(eq=False)
class Lane:
    """Messages from one position to another in one direction; the k-th send meets the k-th receive.

    Kept are those of which only one end is posted. A send is (time posted, index of the action, time it
    occupies the lane, latency); a receive is (time posted, index, where to note the arrival, microbatch).
    """

    source: int
    destination: int
    sends: deque[tuple[float, int, float, float]] = field(factory=deque)
    receives: deque[tuple[float, int, Slots, int]] = field(factory=deque)
    free: float = 0.0


Ends: TypeAlias = tuple[tuple[Lane, float, float, Slots], ...]
"""The lanes a message uses: with the time it occupies each, its latency, and where its arrival is noted."""


@define(eq=False)
class Compute:
    """One kind of compute of one stage on one position, for all microbatches."""

    duration: float
    needs: tuple[Slots, ...]
    gives: tuple[Slots, ...]
    sends: Ends  # in plans of computes alone, which have no sends of their own
    places: tuple[int, ...]  # all positions of a shared stage, which compute it together
    shares: Sequence[float]  # of the duration, per slice; in a plan with slices


class Wiring:
    """The computes and messages of a plan at given costs, and the slots in which their times are noted.

    ``duration``: by kind and stage. ``shard_streams`` and ``copy_streams``: per position, what runs beside its
    computes.
    """

    def __init__(self, plan: Plan, costs: Costs, actions: Sequence[Sequence[Action]]) -> None:
        self.plan, self.dataflow = plan, dataflow_of(plan)
        names = ("F", "B", "I", "W", "REDUCE", "COLLECTIVE", "UNSHARD", "REDUCE_GRAD")
        self.duration = {ActionKind[name]: costs.per_stage(name, plan.num_stages) for name in names}
        edges = plan.graph.stage_edges
        latency, message, bandwidth = (costs.per_edge(name, edges) for name in ("latency", "message", "bandwidth"))
        self.travel = {edge: (message[edge] / bandwidth[edge], latency[edge]) for edge in edges}
        self.slice_times = costs.per_slice("slice_times", plan.num_slices)
        self.slice_lengths = costs.per_slice("slice_lengths", plan.num_slices)
        # Results by direction, stage and position that made them; arrivals by edge, direction, position and the
        # position they came from (None: a collective).
        self.made: dict[tuple[Direction, int, int], Slots] = {}
        self.arrived: dict[tuple[Edge, Direction, int, int | None], Slots] = {}
        self.lanes: dict[tuple[int, int, Direction], Lane] = {}
        self.shard_streams = [ShardStream(self.duration, plan.num_pieces) for _ in actions]
        copy_times = [size / costs.offload_bandwidth for size in activation_sizes(plan, costs)]
        self.copy_streams = [CopyStreams.of(own, copy_times, plan.num_pieces) for own in actions]
        self.flows = {(flow.edge, flow.direction): flow for flow in self.dataflow.flows}
        # Looked up once for each kind, stage or edge, and position; per position.
        self.computes: list[dict[ActionKind, dict[int, Compute]]] = [
            {kind: {} for kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)} for _ in actions
        ]
        self.ends: list[dict[ActionKind, dict[Edge | None, Ends]]] = [
            {kind: {} for kind in ActionKind if kind.is_message} for _ in actions
        ]

    def compute(self, kind: ActionKind, stage: int, position: int) -> Compute:
        """A kind of compute of ``stage`` at ``position``."""
        if position not in self.plan.placement[stage]:
            raise PlanError(f"position {position} has a {kind} of stage {stage}, which is not placed there")
        direction = FORWARD if kind is ActionKind.F else BACKWARD
        own = self._made_by(direction, stage, position)
        unsharded, reloaded = self.shard_streams[position].unsharded, self.copy_streams[position].reloaded
        needs: list[Slots] = [unsharded[stage]] if stage in unsharded else []
        sends: Ends = ()
        if kind is ActionKind.W:
            needs.append(own)
        else:
            if direction is BACKWARD:
                needs.append(self._made_by(FORWARD, stage, position))
                needs += [reloaded[stage]] if stage in reloaded else []
            for flow in self.dataflow.inputs(stage, direction):
                needs += self._needed(flow, position)
            if not self.plan.has_communication:
                sends = tuple(
                    self._end(flow, position, destination)
                    for flow in self.dataflow.outputs(stage, direction)
                    for destination in flow.destinations
                    if destination != position and not flow.is_local
                )
        made = Compute(
            self.duration[kind][stage],
            tuple(needs),
            () if kind is ActionKind.W else (own,),
            sends,
            self.dataflow.shared.get(stage, ()),
            # Attention has no weights: their gradients take as long as a slice is.
            self.slice_lengths if kind is ActionKind.W else self.slice_times,
        )
        self.computes[position][kind][stage] = made
        return made

    def _needed(self, flow: EdgeFlow, position: int) -> list[Slots]:
        """The slots that a compute at ``position`` waits for, of one of its inputs."""
        if flow.group is not None and self.plan.has_communication:
            return [self.arrived_at(flow, position, None)]
        return [
            self._made_by(flow.direction, flow.producer, source)
            if source == position
            else self.arrived_at(flow, position, source)
            for source in flow.origins(position)
        ]

    def _made_by(self, direction: Direction, stage: int, position: int) -> Slots:
        return self.made.setdefault((direction, stage, position), [None] * self.plan.num_pieces)

    def arrived_at(self, flow: EdgeFlow, at: int, source: int | None) -> Slots:
        """The slots of what ``at`` receives from ``source`` (None: from a collective)."""
        key = (flow.edge, flow.direction, at, source)
        return self.arrived.setdefault(key, [None] * self.plan.num_pieces)

    def messages(self, action: Action, position: int) -> Ends:
        """The lanes of which ``position`` holds an end for ``action``, a message."""
        assert action.edge is not None
        assert action.direction is not None
        flow = self.flows[action.edge, action.direction]
        routes = [pair for pair in flow.routes if position == pair[0 if action.kind.is_send else 1]]
        ends = self.ends[position][action.kind][action.edge] = tuple([self._end(flow, *pair) for pair in routes])
        return ends

    def _end(self, flow: EdgeFlow, source: int, destination: int) -> tuple[Lane, float, float, Slots]:
        lane = self.lanes.setdefault((source, destination, flow.direction), Lane(source, destination))
        return (lane, *self.travel[flow.edge], self.arrived_at(flow, destination, source))
