"""The engine of `simulate`: plays a plan against a clock.

Positions run as far as they can, one after the other; a message that arrives wakes the position that waits for it.
Lanes are first in, first out and each position's order is fixed, so the times do not depend on which position runs
first, and every action is looked at about once.

This is the player of whole plans: messages, lanes, collectives, copies. Where a search plays 10^4 to 10^6 orders of
computes, `network.network` has a player of those alone.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import OFFLOADING, SHARDING, Action, ActionKind, Plan
from pipegrid.plans.simulate.costs import Costs
from pipegrid.plans.simulate.wiring import Compute, Slots, TimedLane, Wiring

Times: TypeAlias = tuple[tuple[float, ...], ...]
"""Per position, a time for each of its actions, in the order of `Plan.actions`."""

NEVER = float("inf")


class Run(NamedTuple):
    """The actions ``first`` to ``last`` (exclusive) of a position."""

    position: int
    first: int
    last: int


class PlayedPlan(NamedTuple):
    """Start and end of every action, and an order of all computes in which each comes after those it waits for.

    An entry of ``order`` is a run of actions of one position, or, for a compute of a shared stage, one action of each.
    """

    start: Times
    end: Times
    order: list[tuple[Run, ...]]


class _Arrival(NamedTuple):
    """A position that has come, at a time, to its action number ``at``, which several positions do together."""

    position: int
    at: int
    action: Action
    time: float
    duration: float


class Simulator:
    """A plan, its costs, how far each position has come; ``durations``: per position and action, in place of costs."""

    def __init__(self, plan: Plan, costs: Costs, durations: Sequence[Sequence[float]] | None = None) -> None:
        self.plan, self.durations = plan, durations
        self.actions = [list(plan.actions(position)) for position in range(plan.num_positions)]
        self.start = [[NEVER] * len(actions) for actions in self.actions]
        self.end = [[0.0] * len(actions) for actions in self.actions]
        self.order: list[tuple[Run, ...]] = []
        self.at = [0] * plan.num_positions
        self.clock = [0.0] * plan.num_positions
        self.waits_for: list[tuple[Slots, int] | None] = [None] * plan.num_positions
        self.runnable = list(range(plan.num_positions))

        self.overhead = costs.overhead
        self.wiring = Wiring(plan, costs, self.actions)
        self.duration, self.slice_lengths = self.wiring.duration, self.wiring.slice_lengths
        # The positions that have come to a compute of a shared stage, or to a collective of a group.
        self.arrivals: dict[Action | str, list[_Arrival]] = {}
        self.routed = self.wiring.routed

    def run(self) -> PlayedPlan:
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
        if ends := [lane for lane in self.wiring.lanes.values() if lane.sends or lane.receives]:
            between = f"from position {ends[0].source} to position {ends[0].destination}"
            raise PlanError(f"messages {between} have one end only; verify(plan) says which")
        return PlayedPlan(tuple(map(tuple, self.start)), tuple(map(tuple, self.end)), self.order)

    def _advance(self, position: int) -> None:
        """Run ``position`` until it has to wait or is done."""
        actions, start, end = self.actions[position], self.start[position], self.end[position]
        tables, durations = self.wiring.computes[position], None if self.durations is None else self.durations[position]
        num_slices, lengths, overhead = self.plan.num_slices, self.slice_lengths, self.overhead
        routed, pairs = self.routed, self.plan.pairs[position]
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
            if pairs and index in pairs:
                together = self._pair(position, index, now)
                if together is None:
                    break
                now, index = together, index + 2
                continue
            piece, weight = action.microbatch, 1.0
            assert piece is not None
            if routed:
                unit, piece = piece, 0
                entry = table.get((action.stage, unit)) or self.wiring.compute(
                    action.kind, action.stage, position, unit
                )
            else:
                entry = table.get(action.stage) or self.wiring.compute(action.kind, action.stage, position)
            duration = entry.duration
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
                done = self._join(entry.places, _Arrival(position, index, action, begin + overhead, duration), piece)
                if done is None:
                    break  # the last to come carries this position on
                now, index, first = done, index + 1, index + 1
                continue
            start[index] = begin + overhead
            end[index] = now = begin + overhead + duration
            self._give(entry, piece, weight, now)
            index += 1
        self.at[position], self.clock[position] = index, now
        self.order.append((Run(position, first, index),))

    # Computes

    def _pair(self, position: int, index: int, now: float) -> float | None:
        """Run a forward and a backward together; the end of both, or None where an input of one lacks."""
        entries: list[tuple[Compute, int, float]] = []
        took: list[float] = []
        begin, saved = now, 0.0
        for at, action in enumerate(self.actions[position][index : index + 2], index):
            piece, part = self.plan.piece_of(action), action.slice or 0
            key = (action.stage, piece) if self.routed else action.stage
            entry = self.wiring.computes[position][action.kind].get(key) or self.wiring.compute(
                action.kind, action.stage, position, piece if self.routed else 0
            )
            piece = 0 if self.routed else piece
            for slots in entry.needs:
                time = slots[piece]
                if time is None:
                    self.waits_for[position] = (slots, piece)
                    return None
                begin = max(begin, time)
            entries.append((entry, piece, self.slice_lengths[part]))
            took.append(entry.duration * entry.shares[part] if self.durations is None else self.durations[position][at])
            saved += self.wiring.hidden[action.stage] * entry.shares[part] / 2
        start = begin + self.overhead
        end = start + self.overhead + sum(took) - min(saved, *took)
        self.start[position][index : index + 2], self.end[position][index : index + 2] = [start] * 2, [end] * 2
        for entry, piece, weight in entries:
            self._give(entry, piece, weight, end)
        return end

    def _give(self, entry: Compute, piece: int, weight: float, now: float) -> None:
        """The results of a compute that ends ``now``, of which a message takes ``weight`` of a microbatch's time."""
        for slots in entry.gives:
            slots[piece] = now
        for lane, occupied, latency, slots in entry.sends:
            lane.free = (now if now > lane.free else lane.free) + occupied * weight  # noqa: FURB136 -- hot
            self._arrive(lane.destination, slots, piece, lane.free + latency)

    def _arrive(self, position: int, slots: Slots, microbatch: int, time: float) -> None:
        slots[microbatch] = time
        waiting = self.waits_for[position]
        if waiting is not None and waiting[0] is slots and waiting[1] == microbatch:
            self.waits_for[position] = None
            self.runnable.append(position)

    def _join(self, places: Sequence[int], arrival: _Arrival, piece: int) -> float | None:
        """Come to a compute of a shared stage; the time at which it is done, or None while others are to come."""
        action = arrival.action
        together = self._meet(action, places, arrival)
        if together is None:
            return None
        arrivals, done = together
        self.order.append(tuple([Run(other.position, other.at, other.at + 1) for other in arrivals]))
        for other in arrivals:
            key = (action.stage, action.microbatch or 0) if self.routed else action.stage
            entry = self.wiring.computes[other.position][action.kind][key]
            self._give(entry, piece, self.slice_lengths[action.slice or 0], done)
        return done

    def _meet(self, key: Action | str, places: Sequence[int], arrival: _Arrival) -> tuple[list[_Arrival], float] | None:
        """All arrivals at what ``places`` do together, and its end, after the last; None while others are to come."""
        arrivals = self.arrivals.setdefault(key, [])
        arrivals.append(arrival)
        if len(arrivals) < len(places):
            return None
        del self.arrivals[key]
        begin = max(other.time for other in arrivals)
        done = begin + max(other.duration for other in arrivals)
        for member, at, *_ in arrivals:
            self.start[member][at], self.end[member][at] = begin, done
            if member != arrival.position:
                self.clock[member], self.at[member] = done, at + 1
                self.runnable.append(member)
        return arrivals, done

    # Messages

    def _communicate(self, position: int, index: int, action: Action, now: float) -> float | None:
        """Post a message, or take part in a collective; the time to go on, or None while others are to come."""
        kind = action.kind
        table = self.wiring.ends[position].get(kind)
        if table is None:
            return self._gather(position, index, action, now)
        sending = kind is ActionKind.SEND_F or kind is ActionKind.SEND_B
        assert action.microbatch is not None
        key = (action.edge, action.microbatch) if self.routed else action.edge
        ends = table.get(key) or self.wiring.messages(action, position)
        microbatch, weight = 0 if self.routed else action.microbatch, 1.0
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

    def _transfer(self, lane: TimedLane) -> None:
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
        dataflow = self.wiring.dataflow
        name = dataflow.group_of(action, position)
        if name is None:
            self.start[position][index], self.end[position][index] = now, now + duration
            return now + duration
        members = dataflow.groups[name]
        if position not in members:
            raise PlanError(f"{action} at position {position} names a group of positions {list(members)}")
        together = self._meet(name, members, _Arrival(position, index, action, now, duration))
        if together is None:
            return None
        arrivals, done = together
        for member, _, other, *_ in arrivals:
            if other.edge is not None and other.microbatch is not None and other.direction is not None:
                flow = self.wiring.flows.get((other.edge, other.direction, 0))
                if flow is not None:
                    self.wiring.arrived_at(flow, member, None)[self.plan.piece_of(other)] = done
        return done

    def _start_beside(self, position: int, index: int, action: Action, now: float) -> float:
        """Start what runs on a stream of its own; the time to go on, which is the end of what the host waits for."""
        if action.kind in SHARDING:
            start, done = self.wiring.shard_streams[position].run(action, now)
        else:
            piece, length = self.plan.piece_of(action), self.slice_lengths[action.slice or 0]
            start, done = self.wiring.copy_streams[position].run(action, piece, length, now)
        self.start[position][index], self.end[position][index] = start, done
        return done if action.kind is ActionKind.RELEASE else now


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disables the cyclic garbage collector inside the block; visiting a plan's many objects takes a third of the time.

    Of several threads inside, the first to leave enables it again, which is slower and does no harm.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def play(plan: Plan, costs: Costs, durations: Sequence[Sequence[float]] | None = None) -> PlayedPlan:
    """Start, end and order of every action of ``plan`` (see `simulate`), by ``costs`` or by each action's duration."""
    with collector_paused():
        return Simulator(plan, costs, durations).run()
