"""Plays a plan through against a clock: the engine under `simulate`.

Positions run as far as they can, one after the other; a message that becomes complete wakes the position
that waits for it. Because lanes are first in, first out and each position's order is fixed, the times do not
depend on which position runs first, and every action is looked at about once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from attrs import define, field

from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.plan.actions import Action, ActionKind
from pipegrid.schedules.plan.plan import Plan, message_routes
from pipegrid.schedules.simulate.costs import Costs
from pipegrid.transport.edge import Direction, Edge

Times: TypeAlias = tuple[tuple[float, ...], ...]
"""Per position, a time for each of its actions, in the order of `Plan.actions`."""

Slots: TypeAlias = list[float | None]
"""Per microbatch, when something is there; None: not yet."""

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
NEVER = float("inf")


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
    """What all microbatches of one kind of compute of one stage on one position have in common."""

    duration: float
    needs: tuple[Slots, ...]
    gives: tuple[Slots, ...]
    sends: _Ends = ()  # in plans of computes alone, where no action does it


class Simulator:
    """A plan, its costs, and how far each position has come."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan = plan
        self.sends_implicitly = not plan.communicates
        self.actions = [list(plan.actions(position)) for position in range(plan.num_positions)]
        self.start = [[NEVER] * len(actions) for actions in self.actions]
        self.end = [[0.0] * len(actions) for actions in self.actions]
        self.at = [0] * plan.num_positions
        self.clock = [0.0] * plan.num_positions
        self.waits_for: list[tuple[Slots, int] | None] = [None] * plan.num_positions
        self.runnable = list(range(plan.num_positions))

        self.overhead = costs.overhead
        names = ("F", "B", "I", "W", "REDUCE", "COLLECTIVE")
        self.duration = {ActionKind[name]: costs.per_stage(name, plan.num_stages) for name in names}
        edges = plan.graph.stage_edges
        latency, message, bandwidth = (costs.per_edge(name, edges) for name in ("latency", "message", "bandwidth"))
        self.travel = {edge: (message[edge] / bandwidth[edge], latency[edge]) for edge in edges}

        # Whose result is where: by direction, stage and position that made it; by edge, direction, position
        # at which it arrived and position it came from (None: a collective).
        self.made: dict[tuple[Direction, int, int], Slots] = {}
        self.arrived: dict[tuple[Edge, Direction, int, int | None], Slots] = {}
        self.lanes: dict[tuple[int, int, Direction], _Lane] = {}
        self.gathered: dict[str, dict[int, Action]] = {group.name: {} for group in plan.groups}
        self.members = {group.name: group.positions for group in plan.groups}
        self.by_collective = {
            (action.edge, action.direction)
            for actions in (self.actions if plan.groups else ())
            for action in actions
            if action.kind is ActionKind.COLLECTIVE and action.edge is not None
        }
        # Looked up once for each kind, stage or edge, and position; per position.
        self.computes: list[dict[ActionKind, dict[int, _Compute]]] = [
            {kind: {} for kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)} for _ in self.actions
        ]
        self.ends: list[dict[ActionKind, dict[Edge | None, _Ends]]] = [
            {kind: {} for kind in ActionKind if kind.is_message} for _ in self.actions
        ]

    def run(self) -> tuple[Times, Times]:
        """Play to the end.

        Raises:
            PlanError: positions that never finish, or messages that have one end only.
        """
        while self.runnable:
            position = self.runnable.pop()
            try:
                self._advance(position)
            except IndexError:
                action = self.actions[position][self.at[position]]
                raise PlanError(
                    f"{action} at position {position} names a stage or microbatch that does not exist; the "
                    f"plan has {self.plan.num_stages} stages and {self.plan.num_microbatches} microbatches"
                ) from None
        stuck = [p for p, actions in enumerate(self.actions) if self.at[p] < len(actions)]
        if stuck:
            where = ", ".join(f"position {p} at {self.actions[p][self.at[p]]}" for p in stuck[:8])
            raise PlanError(
                f"the plan gets stuck: {len(stuck)} of {len(self.actions)} positions never finish ({where}); "
                "verify(plan) says why"
            )
        for lane in self.lanes.values():
            for left, lacks in ((lane.sends, "receive"), (lane.receives, "send")):
                if left:
                    raise PlanError(
                        f"{len(left)} of the messages from position {lane.source} to position "
                        f"{lane.destination} have no {lacks}; verify(plan) says which"
                    )
        return tuple(map(tuple, self.start)), tuple(map(tuple, self.end))

    def _advance(self, position: int) -> None:
        """Run ``position`` until it has to wait or is done."""
        actions, start, end = self.actions[position], self.start[position], self.end[position]
        F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: N806 -- the kinds
        tables = self.computes[position]
        forwards, backwards, inputs, weights = tables[F], tables[B], tables[I], tables[W]
        messages = self.ends[position]
        overhead, now, index = self.overhead, self.clock[position], self.at[position]
        try:
            while index < len(actions):
                action = actions[index]
                kind = action.kind
                if kind is F:
                    table = forwards
                elif kind is B:
                    table = backwards
                elif kind is I:
                    table = inputs
                elif kind is W:
                    table = weights
                else:
                    now += overhead
                    ends = messages.get(kind)
                    if ends is not None:
                        self._post(position, index, action, now, ends)
                    else:
                        done = self._gather(position, index, action, now)
                        if done is None:
                            return  # the last to come carries this position on
                        now = done
                    index += 1
                    continue
                entry = table.get(action.stage)
                if entry is None:
                    entry = table[action.stage] = self._compute(kind, action.stage, position)
                microbatch = action.microbatch
                assert microbatch is not None
                begin = now
                for slots in entry.needs:
                    time = slots[microbatch]
                    if time is None:
                        self.waits_for[position] = (slots, microbatch)
                        return
                    begin = max(begin, time)
                start[index] = begin + overhead
                now = begin + overhead + entry.duration
                end[index] = now
                for slots in entry.gives:
                    slots[microbatch] = now
                for lane, occupied, latency, slots in entry.sends:
                    lane.free = max(lane.free, now) + occupied
                    self._arrive(lane.destination, slots, microbatch, lane.free + latency)
                index += 1
        finally:
            self.at[position], self.clock[position] = index, now

    # Computes

    def _compute(self, kind: ActionKind, stage: int, position: int) -> _Compute:
        if stage >= self.plan.num_stages or position not in self.plan.placement[stage]:
            raise PlanError(f"position {position} has a {kind} of stage {stage}, which is not placed there")
        edges = self.plan.graph.stage_edges
        needs: list[Slots] = []
        gives: tuple[Slots, ...] = ()
        sends: _Ends = ()
        if kind is ActionKind.F:
            for edge in edges:
                if edge.destination == stage:
                    needs += self._needed_along(edge, FORWARD, position)
            gives = (self._slots_made(FORWARD, stage, position),)
            sends = self._implicit_sends([e for e in edges if e.source == stage], FORWARD, position)
        elif kind is ActionKind.W:
            needs = [self._slots_made(BACKWARD, stage, position)]
        else:
            gradients = [edge for edge in edges if edge in self.plan.gradient_edges]
            needs = [self._slots_made(FORWARD, stage, position)]
            for edge in gradients:
                if edge.source == stage:
                    needs += self._needed_along(edge, BACKWARD, position)
            gives = (self._slots_made(BACKWARD, stage, position),)
            sends = self._implicit_sends([e for e in gradients if e.destination == stage], BACKWARD, position)
        return _Compute(self.duration[kind][stage], tuple(needs), gives, sends)

    def _needed_along(self, edge: Edge, direction: Direction, position: int) -> list[Slots]:
        """What must be there before ``position`` can use what comes along ``edge`` in ``direction``."""
        if (edge, direction) in self.by_collective:
            return [self._slots_arrived(edge, direction, position, None)]
        maker = edge.source if direction is FORWARD else edge.destination
        if self.plan.placement[edge.source] == self.plan.placement[edge.destination]:
            return [self._slots_made(direction, maker, position)]
        return [
            self._slots_made(direction, maker, source)
            if source == position
            else self._slots_arrived(edge, direction, position, source)
            for source in self.plan.placement[maker]
        ]

    def _slots_made(self, direction: Direction, stage: int, position: int) -> Slots:
        return self.made.setdefault((direction, stage, position), [None] * self.plan.num_microbatches)

    def _slots_arrived(self, edge: Edge, direction: Direction, at: int, source: int | None) -> Slots:
        key = (edge, direction, at, source)
        return self.arrived.setdefault(key, [None] * self.plan.num_microbatches)

    def _arrive(self, position: int, slots: Slots, microbatch: int, time: float) -> None:
        slots[microbatch] = time
        waiting = self.waits_for[position]
        if waiting is not None and waiting[0] is slots and waiting[1] == microbatch:
            self.waits_for[position] = None
            self.runnable.append(position)

    # Messages

    def _ends_of(self, edge: Edge, direction: Direction, position: int, *, sending: bool) -> _Ends:
        """The lanes on which ``position`` sends, or receives, what goes along ``edge`` in ``direction``."""
        found = []
        for upstream, downstream in message_routes(self.plan, edge):
            source, destination = (upstream, downstream) if direction is FORWARD else (downstream, upstream)
            if position == (source if sending else destination):
                key = (source, destination, direction)
                lane = self.lanes.setdefault(key, _Lane(source, destination))
                arrival = self._slots_arrived(edge, direction, destination, source)
                found.append((lane, *self.travel[edge], arrival))
        return tuple(found)

    def _implicit_sends(self, edges: Sequence[Edge], direction: Direction, position: int) -> _Ends:
        if not self.sends_implicitly:
            return ()
        return tuple(end for edge in edges for end in self._ends_of(edge, direction, position, sending=True))

    def _post(self, position: int, index: int, action: Action, now: float, table: dict[Edge | None, _Ends]) -> None:
        ends = table.get(action.edge)
        kind = action.kind
        sending = kind is ActionKind.SEND_F or kind is ActionKind.SEND_B
        if ends is None:
            assert action.edge is not None
            assert action.direction is not None
            if action.edge not in self.travel:
                raise PlanError(
                    f"{action} at position {position} uses an edge that the graph does not have; its edges "
                    f"are {', '.join(map(str, self.travel))}"
                )
            ends = self._ends_of(action.edge, action.direction, position, sending=sending)
            table[action.edge] = ends
        assert action.microbatch is not None
        for lane, occupied, latency, slots in ends:
            if sending:
                lane.sends.append((now, index, occupied, latency))
            else:
                lane.receives.append((now, index, slots, action.microbatch))
            if lane.sends and lane.receives:
                self._transfer(lane)

    def _transfer(self, lane: _Lane) -> None:
        """The next message of ``lane``, both ends of which are posted."""
        sent, sender, occupied, latency = lane.sends.popleft()
        ready, receiver, slots, microbatch = lane.receives.popleft()
        leaves = max(sent, ready, lane.free)
        lane.free = leaves + occupied
        arrives = lane.free + latency
        # A message on several lanes counts from the first to leave to the last to arrive.
        for position, index in ((lane.source, sender), (lane.destination, receiver)):
            self.start[position][index] = min(self.start[position][index], leaves)
            self.end[position][index] = max(self.end[position][index], arrives)
        self._arrive(lane.destination, slots, microbatch, arrives)

    # Collectives

    def _gather(self, position: int, index: int, action: Action, now: float) -> float | None:
        """Take part in a collective; when it is done, or None where others are still to come."""
        duration = self.duration[action.kind][action.stage]
        if action.group is None:
            self.start[position][index], self.end[position][index] = now, now + duration
            return now + duration
        members = self.members.get(action.group, ())
        if position not in members:
            raise PlanError(
                f"{action} at position {position} names group {action.group!r}, whose positions are "
                f"{list(members)}; a position takes part in its own groups only"
            )
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
                slots = self._slots_arrived(other.edge, other.direction, member, None)
                slots[other.microbatch] = done
            if member != position:
                self.clock[member], self.at[member] = done, at + 1
                self.runnable.append(member)
        here.clear()
        return done


def play(plan: Plan, costs: Costs) -> tuple[Times, Times]:
    """Start and end of every action of ``plan`` (see `simulate`)."""
    return Simulator(plan, costs).run()
