"""A list scheduler: a free position starts the action that a policy ranks first among those that are ready.

Memory cannot deadlock it. Let ``m`` be the oldest microbatch with a forward to do on a position, and ``A``
what one microbatch holds there in all its stages. A forward of a younger microbatch is admitted only if the
younger ones then hold at most ``cap - A``. So once everything older than the oldest unfinished microbatch of
the whole pipeline has drained (backwards need no memory), that microbatch finds room on every position.

A compute of a stage that lies on several positions starts on all of them at once, when all are free and ready for it.

Stages of frozen modules run no backward and hold their memory during their forward alone. A queue bounds how far they
run ahead; it always has room for the next microbatch of the slowest consumer, so it deadlocks nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import Literal

from attrs import define, field, frozen

from pipegrid.core.edge import Edge
from pipegrid.plans.network.problem import Entries, Problem, memory_of_one
from pipegrid.plans.plan import ActionKind


@frozen
class Policy:
    """The ranking by which a free position chooses among ready actions.

    ``first``: backwards, forwards, or each after the other. A ``W`` starts when nothing else is ready, if it ends no
    later than ``patience`` of its duration after the next input arrives (infinite: right after its ``I``). ``deep``:
    among forwards, later stages first, otherwise older microbatches. ``warmup``: forwards a stage may be ahead of its
    backwards, per step of distance to the sink (None: as memory allows). ``block``: computes of a stage on several
    positions come that many in a row, and its positions stop for them: forwards when its consumer has used up the last
    block, backwards when a block of gradients is there, each with its ``W`` (None: whenever all its positions are free
    at once).
    """

    first: Literal["backward", "forward", "alternate"]
    patience: float
    deep: bool
    warmup: float | None
    block: int | None = None


def policies(problem: Problem) -> Iterator[Policy]:
    """The policies that `greedy` tries, a few dozen; the warmups end with as many forwards as a round trip takes."""
    firsts: tuple[Literal["backward", "forward", "alternate"], ...] = ("backward", "forward", "alternate")
    chunked = len(problem.graph.modules) == 1 and problem.graph.num_stages > problem.num_positions
    shared = any(len(places) > 1 for places in problem.placement)
    for block, patience, deep, first, warmup in itertools.product(
        (None, 1, 2, 4) if shared else (None,),
        (1.0, 0.5, 0.0, math.inf),
        (False, True) if chunked else (False,),
        firsts,
        dict.fromkeys((_round_trip(problem), None, 1.0, 1.5, 2.0)),
    ):
        yield Policy(first, patience, deep, warmup, block)


def _round_trip(problem: Problem) -> float:
    """Forwards of a stage, on average, in the time to the next one and back: as many keep it busy until then."""
    costs, stages, edges = problem.costs, problem.graph.num_stages, problem.graph.stage_edges
    forward, back = (costs.overhead + math.fsum(costs.per_stage(kind, stages)) / stages for kind in ("F", "I"))
    ways = [
        sum(travel)
        for edge, travel in costs.travel(edges).items()
        if problem.placement[edge.source] != problem.placement[edge.destination]
    ]
    return 1.0 + (back + 2.0 * math.fsum(ways) / max(len(edges), 1)) / forward if forward else 2.0


@define(eq=False)
class _Unit:
    """A stage on one of its positions, with its progress."""

    stage: int
    position: int
    distance: int
    size: float
    released: float  # of the size, by I
    durations: tuple[float, float, float]  # F, I, W
    frozen: bool  # no backward
    needs: int = 0  # inputs of a forward
    gradients: int = 0  # and of a backward, its own forward included
    # Per direction: the units that wait for a result, with time on the lane, latency, and the lane.
    outputs: list[tuple[_Unit, float, float, tuple[int, int]]] = field(factory=list)
    inputs: list[tuple[_Unit, float, float, tuple[int, int]]] = field(factory=list)
    peers: list[_Unit] = field(factory=list)  # the stage on all its positions, itself included
    consumers: list[_Unit] = field(factory=list)  # those for which results wait in a bounded queue
    feeders: list[_Unit] = field(factory=list)  # and those whose results do here
    forwards_done: int = 0
    backwards_done: int = 0
    pending_weights: list[int] = field(factory=list)
    # Of the block of a stage on several positions that is under way.
    forwards_left: int = 0
    backwards_left: int = 0
    # Per microbatch, inputs still missing, and when the last known one arrives.
    missing_forward: list[int] = field(factory=list)
    missing_backward: list[int] = field(factory=list)
    forward_at: list[float] = field(factory=list)
    backward_at: list[float] = field(factory=list)


class _ListScheduler:
    """One pass of the scheduler under one policy."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem = problem
        self.policy = policy
        self.units = _units(problem)
        self.at: list[list[_Unit]] = [[] for _ in range(problem.num_positions)]
        for unit in self.units:
            self.at[unit.position].append(unit)
        self.whole = [
            memory_of_one([unit.stage for unit in units], problem.activation, problem.forward_only) for units in self.at
        ]
        # Memory held per position by each microbatch, to tell the oldest one's share from the rest.
        self.held: list[list[float]] = [[0.0] * problem.num_microbatches for _ in self.at]
        self.live = [0.0] * len(self.at)
        self.busy_until = [0.0] * len(self.at)
        self.did_forward = [False] * len(self.at)
        self.orders: list[Entries] = [[] for _ in self.at]
        self.short_blocks = False
        # Positions that may wait for this one to be free.
        self.stops_with = [
            {peer.position for unit in units if self._in_blocks(unit) for peer in unit.peers} for units in self.at
        ]
        self.lane_free: dict[tuple[int, int, bool], float] = {}
        self.events: list[tuple[float, int]] = [(0.0, position) for position in range(len(self.at))]

    def play(self) -> list[Entries]:
        done = -1
        while done < sum(map(len, self.orders)):
            done = sum(map(len, self.orders))
            self._run_events()
            # Where the memory is full and no block of gradients is: begin one with those there are.
            self.short_blocks = True
            now = max(self.busy_until)
            self.events = [(now, position) for position in range(len(self.at))]
        return self.orders

    def _run_events(self) -> None:
        heapq.heapify(self.events)
        while self.events:
            now, position = heapq.heappop(self.events)
            due = {position}
            while self.events and self.events[0][0] <= now:
                due.add(heapq.heappop(self.events)[1])
            for free in sorted(due):
                if self.busy_until[free] <= now:
                    self._decide(free, now)

    def _decide(self, position: int, now: float) -> None:
        if self.policy.block is not None and self._stops_for_block(position, now, self.policy.block):
            return
        units = [unit for unit in self.at[position] if self._all_free(unit, now) and not self._in_blocks(unit)]
        backwards = [(u.backwards_done, u) for u in units if all(self._backward_ready(peer, now) for peer in u.peers)]
        forwards = [(u.forwards_done, u) for u in units if all(self._forward_ready(peer, now) for peer in u.peers)]
        first = self.policy.first
        forward_first = first == "forward" or (first == "alternate" and not self.did_forward[position])
        if backwards and not (forwards and forward_first):
            microbatch, unit = min(backwards, key=lambda entry: (entry[0], -entry[1].stage))
            self._start(unit, ActionKind.I, microbatch, now)
        elif forwards:
            microbatch, unit = min(
                forwards,
                key=lambda entry: (-entry[1].stage, entry[0]) if self.policy.deep else (entry[0], entry[1].stage),
            )
            self._start(unit, ActionKind.F, microbatch, now)
        else:
            self._fill(position, now)

    def _fill(self, position: int, now: float) -> None:
        """Start a ``W`` where nothing else is ready, unless a forward or backward becomes ready too soon."""
        pending = [
            (unit.pending_weights[0], unit)
            for unit in self.at[position]
            if unit.pending_weights and self._all_free(unit, now)
        ]
        arrival = self._next_arrival(position, now)
        if pending:
            microbatch, unit = min(pending, key=lambda entry: (entry[0], -entry[1].stage))
            if now + unit.durations[2] <= arrival + self.policy.patience * unit.durations[2]:
                self._start(unit, ActionKind.W, microbatch, now)
                return
        if arrival < float("inf"):
            heapq.heappush(self.events, (arrival, position))

    def _in_blocks(self, unit: _Unit) -> bool:
        return self.policy.block is not None and len(unit.peers) > 1

    def _stops_for_block(self, position: int, now: float, block: int) -> bool:
        """Start a compute of a block, or wait until all positions are free for it; False: none is due."""
        for unit in self.at[position]:
            if not self._in_blocks(unit):
                continue
            first = unit.peers[0]  # keeps the count for all
            gradients, results = self._blocks_due(first, now, block)
            if not (gradients or results):
                continue
            if self._all_free(unit, now):
                if gradients:
                    first.backwards_left, self.short_blocks = gradients - 1, False
                    self._start(unit, ActionKind.I, unit.backwards_done, now)
                else:
                    first.forwards_left = results - 1
                    self._start(unit, ActionKind.F, unit.forwards_done, now)
            return True
        return False

    def _blocks_due(self, unit: _Unit, now: float, block: int) -> tuple[int, int]:
        """Backwards and forwards of a stage that are left of a block, or begin one."""
        peers, count = unit.peers, self.problem.num_microbatches
        there = 0
        while unit.backwards_done + there < count and all(
            peer.missing_backward[unit.backwards_done + there] == 0
            and peer.backward_at[unit.backwards_done + there] <= now
            for peer in peers
        ):
            there += 1
        gradients = min(there, unit.backwards_left)
        least = 1 if self.short_blocks else min(block, count - unit.backwards_done)
        if not gradients and there >= least:
            gradients = there
        lead = unit.forwards_done - min((other.forwards_done for other, *_ in unit.outputs), default=unit.forwards_done)
        results = unit.forwards_left or (block if lead <= 0 else 0)
        if not all(self._forward_ready(peer, now) for peer in peers):
            results = unit.forwards_left = 0
        return gradients, results

    def _next_arrival(self, position: int, now: float) -> float:
        """The arrival of the next input that is on its way and may be used."""
        soonest = float("inf")
        for unit in self.at[position]:
            if self._forward_known(unit) and self._admits(unit, unit.forwards_done):
                at = unit.forward_at[unit.forwards_done]
                if at > now:
                    soonest = min(soonest, at)
            m = unit.backwards_done
            if m < self.problem.num_microbatches and unit.missing_backward[m] == 0 and unit.backward_at[m] > now:
                soonest = min(soonest, unit.backward_at[m])
        return soonest

    def _all_free(self, unit: _Unit, now: float) -> bool:
        return all(self.busy_until[peer.position] <= now for peer in unit.peers)

    def _backward_ready(self, unit: _Unit, now: float) -> bool:
        m = unit.backwards_done
        return m < self.problem.num_microbatches and unit.missing_backward[m] == 0 and unit.backward_at[m] <= now

    def _forward_ready(self, unit: _Unit, now: float) -> bool:
        m = unit.forwards_done
        return self._forward_known(unit) and unit.forward_at[m] <= now and self._admits(unit, m)

    def _forward_known(self, unit: _Unit) -> bool:
        m = unit.forwards_done
        return m < self.problem.num_microbatches and unit.missing_forward[m] == 0

    def _admits(self, unit: _Unit, microbatch: int) -> bool:
        warmup = self.policy.warmup
        ahead = unit.forwards_done - unit.backwards_done
        if warmup is not None and not unit.frozen and ahead > warmup * unit.distance:
            return False
        if unit.consumers:
            queue = self.problem.ahead
            assert queue is not None
            if any(unit.forwards_done - consumer.forwards_done >= queue for consumer in unit.consumers):
                return False
        limit, position = self.problem.room, unit.position
        if self.live[position] + unit.size > limit:
            return False
        if unit.frozen:
            return True
        oldest = min(other.forwards_done for other in self.at[position] if not other.frozen)
        if microbatch == oldest or limit == float("inf"):
            return True
        newest = max(other.forwards_done for other in self.at[position] if not other.frozen)
        younger = sum(self.held[position][oldest + 1 : newest + 1]) + unit.size
        return younger + self.whole[position] <= limit

    def _start(self, unit: _Unit, kind: ActionKind, microbatch: int, now: float) -> None:
        for peer in unit.peers:
            self._start_one(peer, kind, microbatch, now)

    def _start_one(self, unit: _Unit, kind: ActionKind, microbatch: int, now: float) -> None:
        position = unit.position
        forward, input_half, weight_half = unit.durations
        duration = forward if kind is ActionKind.F else input_half if kind is ActionKind.I else weight_half
        done = now + duration + self.problem.costs.overhead
        self.orders[position].append((kind, unit.stage, microbatch))
        if kind is ActionKind.F:
            unit.forwards_done += 1
            self.did_forward[position] = True
            if not unit.frozen:
                self.live[position] += unit.size
                self.held[position][microbatch] += unit.size
                unit.missing_backward[microbatch] -= 1
                unit.backward_at[microbatch] = max(unit.backward_at[microbatch], done)
            for feeder in unit.feeders:  # its queue has room again
                heapq.heappush(self.events, (now, feeder.position))
            self._send(unit, microbatch, done, forward=True)
        elif kind is ActionKind.I:
            unit.backwards_done += 1
            unit.pending_weights.append(microbatch)
            self._release(unit, microbatch, unit.released)
            self.did_forward[position] = False
            self._send(unit, microbatch, done, forward=False)
            if self.policy.patience == math.inf or self._in_blocks(unit):
                self.busy_until[position] = done
                self._start_one(unit, ActionKind.W, microbatch, done)
                return
        else:
            unit.pending_weights.remove(microbatch)
            self._release(unit, microbatch, unit.size - unit.released)
        self.busy_until[position] = done
        for other in {position, *self.stops_with[position]}:
            heapq.heappush(self.events, (done, other))

    def _release(self, unit: _Unit, microbatch: int, amount: float) -> None:
        self.live[unit.position] -= amount
        self.held[unit.position][microbatch] -= amount

    def _send(self, unit: _Unit, microbatch: int, done: float, *, forward: bool) -> None:
        for other, occupied, latency, lane in unit.outputs if forward else unit.inputs:
            arrives = done
            if other.position != unit.position:
                key = (*lane, forward)
                self.lane_free[key] = max(self.lane_free.get(key, 0.0), done) + occupied
                arrives = self.lane_free[key] + latency
            missing, at = (
                (other.missing_forward, other.forward_at) if forward else (other.missing_backward, other.backward_at)
            )
            missing[microbatch] -= 1
            at[microbatch] = max(at[microbatch], arrives)
            heapq.heappush(self.events, (at[microbatch], other.position))


def _units(problem: Problem) -> list[_Unit]:
    """Every stage on every position it lies on, wired along the edges."""
    costs, count, num_stages = problem.costs, problem.num_microbatches, problem.graph.num_stages
    durations = list(zip(*(costs.per_stage(name, num_stages) for name in ("F", "I", "W")), strict=True))
    shares = problem.input_release
    edges = problem.graph.stage_edges
    travel = costs.travel(edges)
    units: dict[tuple[int, int], _Unit] = {}
    for stage, places in enumerate(problem.placement):
        for position in places:
            distance = problem.graph.distance_to_sink[stage]
            units[stage, position] = _Unit(
                stage,
                position,
                distance,
                problem.activation[stage],
                problem.activation[stage] * shares[stage],
                durations[stage],
                stage in problem.forward_only,
                gradients=1,
            )

    queues = set(problem.queues)

    def wire(edge: Edge, source: int, destination: int) -> None:
        before, after = units[edge.source, source], units[edge.destination, destination]
        before.outputs.append((after, *travel[edge], (source, destination)))
        after.needs += 1
        if not (before.frozen or after.frozen):
            after.inputs.append((before, *travel[edge], (destination, source)))
            before.gradients += 1
        if edge in queues:
            before.consumers.append(after)
            after.feeders.append(before)

    for edge in edges:
        sources, destinations = problem.placement[edge.source], problem.placement[edge.destination]
        for source, destination in itertools.product(sources, destinations):
            if source == destination or sources != destinations:
                wire(edge, source, destination)
    for unit in units.values():
        unit.peers = [units[unit.stage, place] for place in problem.placement[unit.stage]]
        unit.missing_forward = [unit.needs] * count
        unit.missing_backward = [unit.gradients] * count
        unit.forward_at = [0.0] * count
        unit.backward_at = [0.0] * count
    return list(units.values())


def list_schedule(problem: Problem, policy: Policy) -> list[Entries]:
    """Per position, the order of ``F``, ``I`` and ``W`` that ``policy`` leads to."""
    return _ListScheduler(problem, policy).play()
