"""The wiring of a position, which the engine looks up per compute and per message: what it waits for, what it gives.

Beside its computes a position has streams, on which what is started runs in order, and the computes that need a result
wait for it: for the collectives of sharded stages over its replicas, and for copies to the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from attrs import define, field

from pipegrid.core.edge import Direction, Edge
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Action, ActionKind, Plan
from pipegrid.plans.plan.dataflow import BACKWARD, FORWARD, EdgeFlow, dataflow_of
from pipegrid.plans.simulate.costs import Costs, activation_sizes

Slots: TypeAlias = list[float | None]
"""Per piece (a microbatch, or a slice of one), the time at which a result or a message is there; None: not yet."""

OFFLOAD, RELEASE, RELOAD = ActionKind.OFFLOAD, ActionKind.RELEASE, ActionKind.RELOAD


@define(eq=False)
class ShardStream:
    """Gathers of parameters and reductions of their gradients, one after the other."""

    durations: Mapping[ActionKind, Sequence[float]]  # by kind and stage
    num_pieces: int
    unsharded: dict[int, Slots] = field(factory=dict)  # by stage, for all pieces the end of the last UNSHARD so far
    _free: float = 0.0

    def run(self, action: Action, now: float) -> tuple[float, float]:
        """Start and end of an action; a ``RESHARD`` frees memory at once."""
        if action.kind is ActionKind.RESHARD:
            return now, now
        start = max(now, self._free)
        self._free = start + self.durations[action.kind][action.stage]
        if action.kind is ActionKind.UNSHARD:
            self.unsharded.setdefault(action.stage, [])[:] = [self._free] * self.num_pieces
        return start, self._free


@define(eq=False)
class CopyStreams:
    """Copies of activations to the host and back: a stream each way."""

    seconds: Sequence[float]  # of a whole microbatch, by stage
    reloaded: dict[int, Slots]  # by stage, when the activations of each piece are back
    _free: dict[ActionKind, float] = field(factory=dict)
    _copied: dict[tuple[int, int], float] = field(factory=dict)

    def run(self, action: Action, piece: int, length: float, now: float) -> tuple[float, float]:
        """Start and end of an action on ``piece``, a ``length`` part of a microbatch; a ``RELEASE`` awaits its copy."""
        kind, stage = action.kind, action.stage
        copied = self._copied.get((stage, piece), now)
        if kind is RELEASE:
            return now, max(now, copied)
        start = max(now, self._free.get(kind, 0.0), copied if kind is RELOAD else now)
        done = self._free[kind] = start + self.seconds[stage] * length
        if kind is OFFLOAD:
            self._copied[stage, piece] = done
        else:
            self.reloaded[stage][piece] = done
        return start, done


@define(eq=False)
class TimedLane:
    """Messages from one position to another in one direction; the k-th send meets the k-th receive.

    ``sends`` without receive yet: (time posted, index of the action, time it occupies the lane, latency). ``receives``
    without send yet: (time posted, index, where to note the arrival, microbatch).
    """

    source: int
    destination: int
    sends: deque[tuple[float, int, float, float]] = field(factory=deque)
    receives: deque[tuple[float, int, Slots, int]] = field(factory=deque)
    free: float = 0.0


Ends: TypeAlias = tuple[tuple[TimedLane, float, float, Slots], ...]
"""The lanes a message uses: with the time it occupies each, its latency, and where its arrival is noted."""


@define(eq=False)
class Compute:
    """One kind of compute of one stage on one position, for all microbatches; with routes, for one unit."""

    duration: float
    needs: tuple[Slots, ...]
    gives: tuple[Slots, ...]
    sends: Ends  # in plans of computes alone, which have no sends of their own
    places: tuple[int, ...]  # all positions of a shared stage, which compute it together
    shares: Sequence[float]  # of the duration, per slice; in a plan with slices


class Wiring:
    """The computes and messages of a plan at given costs, and the slots in which their times are noted.

    ``duration``: by kind and stage. ``routed``: whether computes and messages are looked up per unit, and slots are of
    one alone, at index 0. ``shard_streams`` and ``copy_streams``: per position, what runs beside its computes.
    """

    def __init__(self, plan: Plan, costs: Costs, actions: Sequence[Sequence[Action]]) -> None:
        self.plan, self.dataflow = plan, dataflow_of(plan)
        self.routed, self.slots = self.dataflow.routed, 1 if self.dataflow.routed else plan.num_pieces
        names = ("F", "B", "I", "W", "REDUCE", "COLLECTIVE", "UNSHARD", "REDUCE_GRAD")
        self.duration = {ActionKind[name]: costs.per_stage(name, plan.num_stages) for name in names}
        self.hidden = costs.per_stage("hidden", plan.num_stages)
        self.travel = costs.travel(plan.graph.stage_edges)
        self.slice_times = costs.per_slice("slice_times", plan.num_slices)
        self.slice_lengths = costs.per_slice("slice_lengths", plan.num_slices)
        # Results by direction, stage and position that made them; arrivals by edge, direction, position and the
        # position they came from (None: a collective); both then by unit, with routes, else 0.
        self.made: dict[tuple[Direction, int, int, int], Slots] = {}
        self.arrived: dict[tuple[Edge, Direction, int, int | None, int], Slots] = {}
        self.lanes: dict[tuple[int, int, Direction], TimedLane] = {}
        self.shard_streams = [ShardStream(self.duration, plan.num_pieces) for _ in actions]
        copy_times = [size / costs.offload_bandwidth for size in activation_sizes(plan, costs)]
        reloads = [{action.stage for action in own if action.kind is ActionKind.RELOAD} for own in actions]
        self.copy_streams = [
            CopyStreams(copy_times, {stage: [0.0] * plan.num_pieces for stage in own}) for own in reloads
        ]
        self.flows = {
            (flow.edge, flow.direction, piece): flow
            for flow in self.dataflow.flows
            for piece in (flow.pieces if self.routed else (0,))
        }
        # Looked up once for each kind, stage or edge, and position (and unit, with routes); per position.
        self.computes: list[dict[ActionKind, dict[int | tuple[int, int], Compute]]] = [
            {kind: {} for kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)} for _ in actions
        ]
        self.ends: list[dict[ActionKind, dict[Edge | tuple[Edge | None, int] | None, Ends]]] = [
            {kind: {} for kind in ActionKind if kind.is_message} for _ in actions
        ]

    def compute(self, kind: ActionKind, stage: int, position: int, piece: int = 0) -> Compute:
        """A kind of compute of ``stage`` at ``position``; ``piece``: the unit, with routes."""
        if stage not in self.plan.stages_at[position]:
            raise PlanError(f"position {position} has a {kind} of stage {stage}, which is not placed there")
        direction = FORWARD if kind is ActionKind.F else BACKWARD
        own = self._made_by(direction, stage, position, piece)
        unsharded, reloaded = self.shard_streams[position].unsharded, self.copy_streams[position].reloaded
        needs: list[Slots] = [unsharded[stage]] if stage in unsharded else []
        sends: Ends = ()
        if kind is ActionKind.W:
            needs.append(own)
        else:
            if direction is BACKWARD:
                needs.append(self._made_by(FORWARD, stage, position, piece))
                needs += [reloaded[stage]] if stage in reloaded else []
            for flow, message in self.dataflow.arriving(stage, direction, piece):
                needs += self._needed(flow, position, message)
            if not self.plan.has_communication:
                sends = tuple(
                    self._end(flow, position, destination, piece)
                    for flow, _ in self.dataflow.leaving(stage, direction, piece)
                    for source, destination in flow.links
                    if source == position != destination
                )
        # Attention has no weights: their gradients take as long as a slice is.
        gives, shares = ((), self.slice_lengths) if kind is ActionKind.W else ((own,), self.slice_times)
        together = self.dataflow.together(stage, position)
        made = Compute(self.duration[kind][stage], tuple(needs), gives, sends, together, shares)
        self.computes[position][kind][(stage, piece) if self.routed else stage] = made
        return made

    def _needed(self, flow: EdgeFlow, position: int, message: int) -> list[Slots]:
        """The slots that a compute at ``position`` waits for, of one of its inputs."""
        if flow.group is not None and self.plan.has_communication:
            return [self.arrived_at(flow, position, None)]
        needed: list[Slots] = []
        for source in flow.origins(position):
            makers = flow.makers(message, source)
            if source == position:
                needed += [self._made_by(flow.direction, flow.producer, source, made) for made in makers]
            elif self.plan.has_communication:
                needed.append(self.arrived_at(flow, position, source, message))
            else:  # each of several that are summed comes by itself
                needed += [self.arrived_at(flow, position, source, made) for made in makers]
        return needed

    def _made_by(self, direction: Direction, stage: int, position: int, piece: int) -> Slots:
        return self.made.setdefault((direction, stage, position, piece), [None] * self.slots)

    def arrived_at(self, flow: EdgeFlow, at: int, source: int | None, piece: int = 0) -> Slots:
        """The slots of what ``at`` receives from ``source`` (None: from a collective)."""
        key = (flow.edge, flow.direction, at, source, piece)
        return self.arrived.setdefault(key, [None] * self.slots)

    def messages(self, action: Action, position: int) -> Ends:
        """The lanes of which ``position`` holds an end for ``action``, a message."""
        assert action.edge is not None
        assert action.direction is not None
        assert action.microbatch is not None
        piece = action.microbatch if self.routed else 0
        flow = self.flows[action.edge, action.direction, piece]
        routes = [pair for pair in flow.routes if position == pair[0 if action.kind.is_send else 1]]
        ends = tuple([self._end(flow, *pair, piece) for pair in routes])
        self.ends[position][action.kind][(action.edge, piece) if self.routed else action.edge] = ends
        return ends

    def _end(self, flow: EdgeFlow, source: int, destination: int, piece: int) -> tuple[TimedLane, float, float, Slots]:
        lane = self.lanes.setdefault((source, destination, flow.direction), TimedLane(source, destination))
        return (lane, *self.travel[flow.edge], self.arrived_at(flow, destination, source, piece))
