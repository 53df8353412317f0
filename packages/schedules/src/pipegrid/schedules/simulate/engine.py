"""The engine of `simulate`: plays a plan against a clock.

Positions run as far as they can, one after the other; a message that arrives wakes the position that waits for it.
Lanes are first in, first out and each position's order is fixed, so the times do not depend on which position runs
first, and every action is looked at about once.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from attrs import define, field

from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.plan import OFFLOADING, SHARDING, Action, ActionKind, Plan
from pipegrid.schedules.simulate.costs import Costs, activation_sizes
from pipegrid.schedules.simulate.side_streams import CopyStreams, ShardStream, Slots
from pipegrid.schedules.verify import EdgeFlow, dataflow_of
from pipegrid.transport.edge import Direction, Edge

Times: TypeAlias = tuple[tuple[float, ...], ...]
"""Per position, a time for each of its actions, in the order of `Plan.actions`."""

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
NEVER = float("inf")


class Run(NamedTuple):
    """The actions ``first`` to ``last`` (exclusive) of a position."""

    position: int
    first: int
    last: int


class Played(NamedTuple):
    """Start and end of every action, and an order of all computes in which each comes after those it waits for.

    An entry of ``order`` is a run of actions of one position, or, for a compute of a shared stage, one action of
    each.
    """

    start: Times
    end: Times
    order: list[tuple[Run, ...]]


@define(eq=False)
class _Lane:
    """Messages from one position to another in one direction; the k-th send meets the k-th receive.

    Kept are those of which only one end is posted. A send is (time posted, index of the action, time it
    occupies the lane, latency); a receive is (time posted, index, where to note the arrival, microbatch).
    """

    source: int
    destination: int
    sends: deque[tuple[float, int, float, float]] = field(factory=deque)
    receives: deque[tuple[float, int, Slots, int]] = field(factory=deque)
    free: float = 0.0


_Ends: TypeAlias = tuple[tuple[_Lane, float, float, Slots], ...]
"""The lanes a message uses: with the time it occupies each, its latency, and where its arrival is noted."""


@define(eq=False)
class _Compute:
    """One kind of compute of one stage on one position, for all microbatches."""

    duration: float
    needs: tuple[Slots, ...]
    gives: tuple[Slots, ...]
    sends: _Ends  # in plans of computes alone, which have no sends of their own
    places: tuple[int, ...]  # all positions of a shared stage, which compute it together
    shares: Sequence[float]  # of the duration, per slice; in a plan with slices


class _Arrival(NamedTuple):
    """A position that has come to a compute of a shared stage, at a time."""

    action: Action
    at: int
    entry: _Compute
    piece: int
    time: float
    duration: float


class Simulator:
    """A plan, its costs, and how far each position has come.

    ``durations``: per position, the duration of each action, in place of the costs of computes.
    """

    def __init__(self, plan: Plan, costs: Costs, durations: Sequence[Sequence[float]] | None = None) -> None:
        self.plan, self.dataflow, self.durations = plan, dataflow_of(plan), durations
        self.actions = [list(plan.actions(position)) for position in range(plan.num_positions)]
        self.start = [[NEVER] * len(actions) for actions in self.actions]
        self.end = [[0.0] * len(actions) for actions in self.actions]
        self.order: list[tuple[Run, ...]] = []
        self.at = [0] * plan.num_positions
        self.clock = [0.0] * plan.num_positions
        self.waits_for: list[tuple[Slots, int] | None] = [None] * plan.num_positions
        self.runnable = list(range(plan.num_positions))

        self.overhead = costs.overhead
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
        self.lanes: dict[tuple[int, int, Direction], _Lane] = {}
        self.gathered: dict[str, dict[int, Action]] = {group.name: {} for group in plan.groups}
        # Streams beside the computes, per position.
        self.shard_streams = [ShardStream(self.duration, plan.num_pieces) for _ in self.actions]
        copy_times = [size / costs.offload_bandwidth for size in activation_sizes(plan, costs)]
        self.copy_streams = [CopyStreams.of(own, copy_times, plan.num_pieces) for own in self.actions]
        self.joined: dict[Action, dict[int, _Arrival]] = {}  # the positions that have come to a compute
        self.members = {group.name: group.positions for group in plan.groups}
        self.flows = {(flow.edge, flow.direction): flow for flow in self.dataflow.flows}
        # Looked up once for each kind, stage or edge, and position; per position.
        self.computes: list[dict[ActionKind, dict[int, _Compute]]] = [
            {kind: {} for kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)} for _ in self.actions
        ]
        self.ends: list[dict[ActionKind, dict[Edge | None, _Ends]]] = [
            {kind: {} for kind in ActionKind if kind.is_message} for _ in self.actions
        ]

    def run(self) -> Played:
        """Play to the end."""
        while self.runnable:
            position = self.runnable.pop()
            try:
                self._advance(position)
            except (IndexError, KeyError):
                raise PlanError(
                    f"an action of position {position} names a stage, microbatch, edge or group that the plan does not "
                    "have; verify(plan) says which"
                ) from None
        stuck = [p for p, actions in enumerate(self.actions) if self.at[p] < len(actions)]
        if stuck:
            where = ", ".join(f"position {p} at {self.actions[p][self.at[p]]}" for p in stuck[:8])
            raise PlanError(
                f"the plan gets stuck: {len(stuck)} of {len(self.actions)} positions never finish ({where}); "
                "verify(plan) says why"
            )
        if ends := [lane for lane in self.lanes.values() if lane.sends or lane.receives]:
            between = f"from position {ends[0].source} to position {ends[0].destination}"
            raise PlanError(f"messages {between} have one end only; verify(plan) says which")
        return Played(tuple(map(tuple, self.start)), tuple(map(tuple, self.end)), self.order)

    def _advance(self, position: int) -> None:
        """Run ``position`` until it has to wait or is done."""
        actions, start, end = self.actions[position], self.start[position], self.end[position]
        tables, durations = self.computes[position], None if self.durations is None else self.durations[position]
        num_slices, lengths, overhead = self.plan.num_slices, self.slice_lengths, self.overhead
        now, index = self.clock[position], self.at[position]
        first = index
        while index < len(actions):
            action = actions[index]
            table = tables.get(action.kind)
            if table is None:
                now += overhead
                done = self._communicate(position, index, action, now)
                if done is None:
                    break  # the last to come carries this position on
                now, index = done, index + 1
                continue
            entry = table.get(action.stage) or self._compute(action.kind, action.stage, position)
            piece, weight, duration = action.microbatch, 1.0, entry.duration
            assert piece is not None
            if num_slices > 1:
                assert action.slice is not None
                piece = piece * num_slices + action.slice
                duration, weight = duration * entry.shares[action.slice], lengths[action.slice]
            begin, lacking = now, None
            for slots in entry.needs:
                time = slots[piece]
                if time is None:
                    lacking = slots
                    break
                if time > begin:  # noqa: PLR1730 -- the hot loop
                    begin = time
            if lacking is not None:
                self.waits_for[position] = (lacking, piece)
                break
            if durations is not None:
                duration = durations[index]
            if entry.places:
                self.order.append((Run(position, first, index),))
                first = index
                done = self._join(position, _Arrival(action, index, entry, piece, begin, duration))
                if done is None:
                    break  # the last to come carries this position on
                now, index, first = done, index + 1, index + 1
                continue
            start[index] = begin + overhead
            end[index] = now = begin + overhead + duration
            for slots in entry.gives:
                slots[piece] = now
            for lane, occupied, latency, slots in entry.sends:
                lane.free = (now if now > lane.free else lane.free) + occupied * weight  # noqa: FURB136 -- hot
                self._arrive(lane.destination, slots, piece, lane.free + latency)
            index += 1
        self.at[position], self.clock[position] = index, now
        self.order.append((Run(position, first, index),))

    # Computes

    def _compute(self, kind: ActionKind, stage: int, position: int) -> _Compute:
        if position not in self.plan.placement[stage]:
            raise PlanError(f"position {position} has a {kind} of stage {stage}, which is not placed there")
        direction = FORWARD if kind is ActionKind.F else BACKWARD
        own = self._slots_made(direction, stage, position)
        unsharded, reloaded = self.shard_streams[position].unsharded, self.copy_streams[position].reloaded
        needs: list[Slots] = [unsharded[stage]] if stage in unsharded else []
        sends: _Ends = ()
        if kind is ActionKind.W:
            needs.append(own)
        else:
            if direction is BACKWARD:
                needs.append(self._slots_made(FORWARD, stage, position))
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
        made = _Compute(
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
            return [self._slots_arrived(flow, position, None)]
        return [
            self._slots_made(flow.direction, flow.producer, source)
            if source == position
            else self._slots_arrived(flow, position, source)
            for source in flow.origins(position)
        ]

    def _slots_made(self, direction: Direction, stage: int, position: int) -> Slots:
        return self.made.setdefault((direction, stage, position), [None] * self.plan.num_pieces)

    def _slots_arrived(self, flow: EdgeFlow, at: int, source: int | None) -> Slots:
        key = (flow.edge, flow.direction, at, source)
        return self.arrived.setdefault(key, [None] * self.plan.num_pieces)

    def _arrive(self, position: int, slots: Slots, microbatch: int, time: float) -> None:
        slots[microbatch] = time
        waiting = self.waits_for[position]
        if waiting is not None and waiting[0] is slots and waiting[1] == microbatch:
            self.waits_for[position] = None
            self.runnable.append(position)

    def _join(self, position: int, arrival: _Arrival) -> float | None:
        """Come to a compute of a shared stage; the time at which it is done, or None while others are to come."""
        microbatch, weight = arrival.piece, self.slice_lengths[arrival.action.slice or 0]
        here = self.joined.setdefault(arrival.action, {})
        here[position] = arrival
        if len(here) < len(arrival.entry.places):
            return None
        begin = max(other.time for other in here.values()) + self.overhead
        done = begin + max(other.duration for other in here.values())
        self.order.append(tuple([Run(member, other.at, other.at + 1) for member, other in here.items()]))
        for member, (_, index, entry, *_) in list(here.items()):
            self.start[member][index], self.end[member][index] = begin, done
            for slots in entry.gives:
                slots[microbatch] = done
            for lane, occupied, latency, slots in entry.sends:
                lane.free = max(lane.free, done) + occupied * weight
                self._arrive(lane.destination, slots, microbatch, lane.free + latency)
            if member != position:
                self.clock[member], self.at[member] = done, index + 1
                self.runnable.append(member)
        del self.joined[arrival.action]
        return done

    # Messages

    def _end(self, flow: EdgeFlow, source: int, destination: int) -> tuple[_Lane, float, float, Slots]:
        lane = self.lanes.setdefault((source, destination, flow.direction), _Lane(source, destination))
        return (lane, *self.travel[flow.edge], self._slots_arrived(flow, destination, source))

    def _communicate(self, position: int, index: int, action: Action, now: float) -> float | None:
        """Post a message, or take part in a collective; the time to go on, or None while others are to come."""
        kind = action.kind
        table = self.ends[position].get(kind)
        if table is None:
            return self._gather(position, index, action, now)
        sending = kind is ActionKind.SEND_F or kind is ActionKind.SEND_B
        ends = table.get(action.edge)
        if ends is None:
            assert action.edge is not None
            assert action.direction is not None
            flow = self.flows[action.edge, action.direction]
            routes = [pair for pair in flow.routes if position == pair[0 if sending else 1]]
            ends = table[action.edge] = tuple([self._end(flow, *pair) for pair in routes])
        assert action.microbatch is not None
        microbatch, weight = action.microbatch, 1.0
        if action.slice is not None:
            microbatch, weight = self.plan.piece_of(action), self.slice_lengths[action.slice]
        for lane, occupied, latency, slots in ends:
            if sending:
                lane.sends.append((now, index, occupied * weight, latency))
            else:
                lane.receives.append((now, index, slots, microbatch))
            if lane.sends and lane.receives:
                self._transfer(lane)
        return now

    def _transfer(self, lane: _Lane) -> None:
        """The next message of ``lane``, both ends of which are posted."""
        sent, sender, occupied, latency = lane.sends.popleft()
        ready, receiver, slots, microbatch = lane.receives.popleft()
        leaves = max(sent, ready, lane.free)
        lane.free = leaves + occupied
        arrives = lane.free + latency
        # A message on several lanes counts from the first to leave to the last to arrive.
        for position, index in ((lane.source, sender), (lane.destination, receiver)):
            start, end = self.start[position], self.end[position]
            if leaves < start[index]:  # noqa: PLR1730 -- the hot loop
                start[index] = leaves
            if arrives > end[index]:  # noqa: PLR1730 -- the hot loop
                end[index] = arrives
        self._arrive(lane.destination, slots, microbatch, arrives)

    # Collectives

    def _gather(self, position: int, index: int, action: Action, now: float) -> float | None:
        """Take part in a collective; the time at which it is done, or None while others are to come."""
        if action.kind in SHARDING or action.kind in OFFLOADING:
            return self._start_beside(position, index, action, now)
        duration = self.duration[action.kind][action.stage]
        if action.group is None:
            self.start[position][index], self.end[position][index] = now, now + duration
            return now + duration
        members = self.members[action.group]
        if position not in members:
            raise PlanError(f"{action} at position {position} names a group of positions {list(members)}")
        here = self.gathered[action.group]
        here[position] = action
        self.clock[position], self.at[position] = now, index
        if len(here) < len(members):
            return None
        begin = max(self.clock[member] for member in members)
        done = begin + max(self.duration[other.kind][other.stage] for other in here.values())
        for member, other in list(here.items()):
            at = self.at[member]
            self.start[member][at], self.end[member][at] = begin, done
            if other.edge is not None and other.microbatch is not None and other.direction is not None:
                flow = self.flows.get((other.edge, other.direction))
                if flow is not None:
                    self._slots_arrived(flow, member, None)[self.plan.piece_of(other)] = done
            if member != position:
                self.clock[member], self.at[member] = done, at + 1
                self.runnable.append(member)
        here.clear()
        return done

    def _start_beside(self, position: int, index: int, action: Action, now: float) -> float:
        """Start what runs on a stream of its own; the time to go on, which is the end of what the host waits for."""
        if action.kind in SHARDING:
            start, done = self.shard_streams[position].run(action, now)
        else:
            piece, length = self.plan.piece_of(action), self.slice_lengths[action.slice or 0]
            start, done = self.copy_streams[position].run(action, piece, length, now)
        self.start[position][index], self.end[position][index] = start, done
        return done if action.kind is ActionKind.RELEASE else now


@contextmanager
def collector_paused() -> Iterator[None]:
    """No search for cyclic garbage inside: a plan is hundreds of thousands of objects, which all stay.

    Each search would walk through those made so far, which takes a third of the time. Where several threads
    do this at once the first to leave switches the collector on again, which is slower and does no harm.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def play(plan: Plan, costs: Costs, durations: Sequence[Sequence[float]] | None = None) -> Played:
    """Start, end and order of every action of ``plan`` (see `simulate`), by ``costs`` or by each action's duration."""
    with collector_paused():
        return Simulator(plan, costs, durations).run()
