"""A chain of stages as passes: the numbers that `search` works on, and the times of fixed orders.

A microbatch makes ``2S`` passes through ``S`` stages, one after the other: pass ``s`` is ``F`` of stage ``s``, pass
``2S-1-s`` its ``I``. The ``W`` of an ``I`` has the pass of the ``I`` plus ``S``. An *operation* is a pass of a
microbatch, as the integer ``pass * M + microbatch``: what it waits for is a subtraction away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from attrs import field, frozen

from pipegrid.schedules.plan import ActionKind, Plan
from pipegrid.schedules.search.problem import Problem
from pipegrid.schedules.simulate import Costs

Objective: TypeAlias = Literal["makespan", "span"]
"""``"makespan"``: the end of the last action. ``"span"``: the longest time from a position's first start to its own
last end, which is the time of a step where positions step apart (the optimizer has no barrier)."""

Orders: TypeAlias = list[list[int]]
"""Per position, its operations in order."""


class Timing(NamedTuple):
    """``value``: the objective; ``end``: of each operation; ``worst``: the position that decides the value."""

    value: float
    end: list[float]
    worst: int


def timing_of(objective: Objective, starts: Sequence[float], ends: Sequence[float], end: list[float]) -> Timing:
    """The `Timing` of positions that start and end at these times, with the end of each operation."""
    times = [last - first for first, last in zip(starts, ends, strict=True)] if objective == "span" else ends
    worst = max(range(len(times)), key=times.__getitem__)
    return Timing(times[worst], end, worst)


@frozen
class Chain:
    """A chain whose stages lie on one position each, as numbers per pass.

    ``held``: the change of live memory by a pass: at the start of an ``F``, at the end of an ``I`` or a ``W``.
    ``lag``: the time from the end of the pass before on another position to the start of a pass.
    """

    problem: Problem = field(repr=False)
    num_stages: int
    num_microbatches: int
    position: tuple[int, ...]
    duration: tuple[float, ...]
    lag: tuple[float, ...]
    held: tuple[float, ...]
    limit: float
    passes_at: tuple[tuple[int, ...], ...]  # per position, its F and I passes

    @property
    def num_positions(self) -> int:
        """Positions of the placement."""
        return len(self.passes_at)

    @property
    def num_operations(self) -> int:
        """Operations of a step, on all positions."""
        return 3 * self.num_stages * self.num_microbatches

    def lower_bound(self, objective: Objective) -> float:
        """The objective of no orders is less.

        A position does all its work after the way to its first pass. And from the first to the last of its passes, F
        and I, it has done them all; before come the passes up to it, after it those back, and a W.
        """
        stages, count = self.num_stages, self.num_microbatches
        passes, lag = 2 * stages, self.lag
        durations = self._least_durations()
        starts = [0.0]
        for number in range(1, passes):
            starts.append(starts[-1] + durations[number - 1] + lag[number])
        ends = [start + duration for start, duration in zip(starts, durations, strict=False)]
        bounds = []
        passes_at = [own for own in self.passes_at if own]  # a position may be empty
        for inner in passes_at:
            own = count * math.fsum(durations[number] for number in inner)
            weights = count * math.fsum(durations[number + stages] for number in inner if number >= stages)
            bounds.append(own + weights if objective == "span" else starts[inner[0]] + own + weights)
            for outer in passes_at if objective == "span" else ((0, passes - 1),):
                if outer[0] <= inner[0] and inner[-1] <= outer[-1]:
                    there, back = starts[inner[0]] - starts[outer[0]], ends[outer[-1]] - ends[inner[-1]]
                    bounds.append(there + own + back + durations[outer[-1] + stages])
        return max(bounds)

    def _least_durations(self) -> list[float]:
        """Per pass, its duration, or what is left of it where a whole backward takes less than its halves."""
        costs, stages = self.problem.costs, self.num_stages
        inputs, weights = least_halves(costs, stages)
        return [*self.duration[:stages], *(half + costs.overhead for half in (*inputs[::-1], *weights[::-1]))]

    def action(self, operation: int) -> tuple[ActionKind, int, int]:
        """Kind, stage and microbatch of an operation."""
        number, microbatch = divmod(operation, self.num_microbatches)
        third, place = divmod(number, self.num_stages)
        stage = place if third == 0 else self.num_stages - 1 - place
        return (ActionKind.F, ActionKind.I, ActionKind.W)[third], stage, microbatch

    def places(self, operation: int) -> tuple[int, ...]:
        """The one position of an operation."""
        return (self.position[operation // self.num_microbatches],)

    def length(self, operation: int) -> float:
        """The duration of an operation."""
        return self.duration[operation // self.num_microbatches]

    def before(self, operation: int) -> Iterator[tuple[int, float]]:
        """The operation that ``operation`` waits for, with its lag."""
        number = operation // self.num_microbatches
        if 0 < number < 2 * self.num_stages:
            yield operation - self.num_microbatches, self.lag[number]
        elif number:
            yield operation - self.num_stages * self.num_microbatches, 0.0

    def tied(self, one: int, other: int) -> bool:
        """Whether two operations of a position keep their order: microbatches of a pass, or passes of a microbatch."""
        first, m = divmod(one, self.num_microbatches)
        second, n = divmod(other, self.num_microbatches)
        if first == second:
            return True
        passes, stages = 2 * self.num_stages, self.num_stages
        return m == n and (max(first, second) < passes or abs(first - second) == stages)

    def keeps_to_limit(self, order: Sequence[int]) -> bool:
        """Whether a position that follows ``order`` keeps to the memory limit."""
        count, held, limit = self.num_microbatches, self.held, self.limit
        live = 0.0
        for operation in order:
            live += held[operation // count]
            if live > limit:
                return False
        return True

    def timed(self, orders: Orders, objective: Objective = "makespan") -> Timing | None:
        """``orders`` played as soon as possible; None where positions wait for each other in a cycle."""
        count, passes, back = self.num_microbatches, 2 * self.num_stages, self.num_stages * self.num_microbatches
        at, duration, lag = self.position, self.duration, self.lag
        end = [-1.0] * self.num_operations
        done, clock = [0] * self.num_positions, [0.0] * self.num_positions
        waits_for = [-1] * self.num_positions
        runnable = list(range(self.num_positions))
        while runnable:
            position = runnable.pop()
            order, index, now = orders[position], done[position], clock[position]
            while index < len(order):
                operation = order[index]
                number = operation // count
                if number:
                    before = operation - (count if number < passes else back)
                    ready = end[before]
                    if ready < 0.0:
                        waits_for[position] = before
                        break
                    if number < passes:
                        ready += lag[number]
                    now = max(now, ready)
                now += duration[number]
                end[operation] = now
                index += 1
                if number + 1 < passes:
                    other = at[number + 1]
                    if waits_for[other] == operation:
                        waits_for[other] = -1
                        runnable.append(other)
            done[position], clock[position] = index, now
        if any(index < len(order) for index, order in zip(done, orders, strict=True)):
            return None
        starts = [end[order[0]] - duration[order[0] // count] if order else 0.0 for order in orders]
        return timing_of(objective, starts, clock, end)

    def orders_of(self, plan: Plan) -> Orders:
        """The operations of ``plan``, a ``B`` as its two halves."""
        count, stages = self.num_microbatches, self.num_stages
        orders: Orders = []
        for position in range(self.num_positions):
            order: list[int] = []
            for action in plan.actions(position):
                assert action.microbatch is not None
                if action.kind is ActionKind.F:
                    order.append(action.stage * count + action.microbatch)
                    continue
                input_half = (2 * stages - 1 - action.stage) * count + action.microbatch
                if action.kind is not ActionKind.W:
                    order.append(input_half)
                if action.kind is not ActionKind.I:
                    order.append(input_half + stages * count)
            orders.append(order)
        return orders


def least_halves(costs: Costs, num_stages: int) -> tuple[list[float], list[float]]:
    """Per stage, ``I`` and ``W``, or what is left of them where a whole backward takes less.

    A whole backward has one overhead for both; what that spares is taken off its second half.
    """
    inputs, weights = costs.per_stage("I", num_stages), costs.per_stage("W", num_stages)
    for stage, time in enumerate(costs.per_stage("B", num_stages)):
        inputs[stage] = min(inputs[stage], time)
        weights[stage] = min(weights[stage], time - inputs[stage] - costs.overhead)
    return inputs, weights


def as_chain(problem: Problem, num_microbatches: int | None = None) -> Chain | None:
    """``problem`` as a `Chain`, of ``num_microbatches`` where given; None where it is none, or has frozen stages."""
    stages = problem.graph.num_stages
    edges = problem.graph.stage_edges
    one_after_the_other = [(edge.source, edge.destination) for edge in edges] == [(s, s + 1) for s in range(stages - 1)]
    if not one_after_the_other or problem.forward_only or any(len(places) != 1 for places in problem.placement):
        return None
    costs = problem.costs
    latency, message, bandwidth = (costs.per_edge(name, edges) for name in ("latency", "message", "bandwidth"))
    hop = [latency[edge] + message[edge] / bandwidth[edge] for edge in edges]
    down = [places[0] for places in problem.placement]
    up = down[::-1]
    position = (*down, *up, *up)
    forwards, inputs, weights = (costs.per_stage(name, stages) for name in ("F", "I", "W"))
    durations = (*forwards, *inputs[::-1], *weights[::-1])
    shares = costs.per_stage("input_release", stages)
    release = [size * share for size, share in zip(problem.activation, shares, strict=True)]
    kept = [size - share for size, share in zip(problem.activation, release, strict=True)]
    lags = [0.0, *hop, 0.0, *hop[::-1]]
    return Chain(
        problem,
        stages,
        problem.num_microbatches if num_microbatches is None else num_microbatches,
        position,
        tuple(duration + costs.overhead for duration in durations),
        tuple(lag if number and position[number] != position[number - 1] else 0.0 for number, lag in enumerate(lags)),
        (*problem.activation, *(-size for size in release[::-1]), *(-size for size in kept[::-1])),
        problem.room,
        tuple(
            tuple(number for number in range(2 * stages) if position[number] == p) for p in range(problem.num_positions)
        ),
    )
