"""Any graph of stages as passes: what `Chain` is to a chain, for stages on several positions and frozen ones too.

A *pass* is a kind of compute of a stage: ``F``, ``I`` or ``W``. An *operation* is a pass of a microbatch, as the
integer ``pass * M + microbatch``. It waits for operations of the same microbatch and, where a frozen module feeds a
bounded queue, for the consumer's forward of an earlier one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from attrs import field, frozen

from pipegrid.schedules.plan import ActionKind, Plan
from pipegrid.schedules.search.chain import Objective, Orders, Timing, least_halves, timing_of
from pipegrid.schedules.search.problem import Problem

_F, _I, _W = ActionKind.F, ActionKind.I, ActionKind.W


class Wait(NamedTuple):
    """An operation waits for the one ``delta`` before it, and ``lag`` longer; microbatches before ``first`` do not."""

    delta: int
    lag: float
    first: int


@frozen
class Network:
    """A graph on positions, as numbers per pass.

    ``least``: durations where whole backwards are cheaper than their halves. ``after``: pairs of passes of which the
    second waits for the first, directly or not. ``takes`` and ``gives``: live memory on each position of a pass from
    its start on, and what its end releases.
    """

    problem: Problem = field(repr=False)
    num_microbatches: int
    passes: tuple[tuple[ActionKind, int], ...]
    positions: tuple[tuple[int, ...], ...]
    duration: tuple[float, ...]
    least: tuple[float, ...]
    waits: tuple[tuple[Wait, ...], ...]
    after: frozenset[tuple[int, int]]
    takes: tuple[float, ...]
    gives: tuple[float, ...]
    limit: float

    @property
    def num_positions(self) -> int:
        """Positions of the placement."""
        return self.problem.num_positions

    @property
    def num_operations(self) -> int:
        """Operations of a step, each counted once."""
        return len(self.passes) * self.num_microbatches

    def action(self, operation: int) -> tuple[ActionKind, int, int]:
        """Kind, stage and microbatch of an operation."""
        number, microbatch = divmod(operation, self.num_microbatches)
        return (*self.passes[number], microbatch)

    def places(self, operation: int) -> tuple[int, ...]:
        """The positions of an operation."""
        return self.positions[operation // self.num_microbatches]

    def length(self, operation: int) -> float:
        """The duration of an operation."""
        return self.duration[operation // self.num_microbatches]

    def before(self, operation: int) -> Iterator[tuple[int, float]]:
        """The operations that ``operation`` waits for, each with its lag."""
        number, microbatch = divmod(operation, self.num_microbatches)
        for delta, lag, first in self.waits[number]:
            if microbatch >= first:
                yield operation - delta, lag

    def tied(self, one: int, other: int) -> bool:
        """Whether two operations of a position keep their order: microbatches of a pass, passes of a microbatch."""
        first, m = divmod(one, self.num_microbatches)
        second, n = divmod(other, self.num_microbatches)
        return first == second or (m == n and ((first, second) in self.after or (second, first) in self.after))

    def keeps_to_limit(self, order: Sequence[int]) -> bool:
        """Whether a position that follows ``order`` keeps to the memory limit."""
        count, takes, gives, limit = self.num_microbatches, self.takes, self.gives, self.limit
        live = 0.0
        for operation in order:
            number = operation // count
            live += takes[number]
            if live > limit:
                return False
            live -= gives[number]
        return True

    def timed(self, orders: Orders, objective: Objective = "makespan") -> Timing | None:
        """``orders`` played as soon as possible; None where positions wait for each other in a cycle."""
        count, duration, waits, positions = self.num_microbatches, self.duration, self.waits, self.positions
        end = [-1.0] * self.num_operations
        done, clock = [0] * self.num_positions, [0.0] * self.num_positions
        waiting: dict[int, list[int]] = {}
        met: dict[int, list[tuple[int, float]]] = {}
        runnable = list(range(self.num_positions))
        while runnable:
            position = runnable.pop()
            order, index, now = orders[position], done[position], clock[position]
            while index < len(order):
                operation = order[index]
                number = operation // count
                begin, missing = now, -1
                for delta, lag, first in waits[number]:
                    if first and operation % count < first:
                        continue
                    before = operation - delta
                    ready = end[before]
                    if ready < 0.0:
                        missing = before
                        break
                    ready += lag
                    if ready > begin:  # noqa: PLR1730 -- the hot loop
                        begin = ready
                if missing >= 0:
                    waiting.setdefault(missing, []).append(position)
                    break
                if len(positions[number]) > 1:
                    together = met.setdefault(operation, [])
                    together.append((position, begin))
                    if len(together) < len(positions[number]):
                        break  # the last to come carries this position on
                    begin = max(time for _, time in together)
                    for other, _ in together:
                        if other != position:
                            done[other], clock[other] = done[other] + 1, begin + duration[number]
                            runnable.append(other)
                now = end[operation] = begin + duration[number]
                index += 1
                woken = waiting.pop(operation, None)
                if woken is not None:
                    runnable += woken
            done[position], clock[position] = index, now
        if any(index < len(order) for index, order in zip(done, orders, strict=True)):
            return None
        starts = [end[order[0]] - duration[order[0] // count] if order else 0.0 for order in orders]
        return timing_of(objective, starts, clock, end)

    def orders_of(self, plan: Plan) -> Orders:
        """The operations of ``plan``, a ``B`` as its two halves."""
        number_of = {one: number for number, one in enumerate(self.passes)}
        orders: Orders = []
        for position in range(self.num_positions):
            order = []
            for action in plan.actions(position):
                assert action.microbatch is not None
                kinds = (_I, _W) if action.kind is ActionKind.B else (action.kind,)
                order += [number_of[kind, action.stage] * self.num_microbatches + action.microbatch for kind in kinds]
            orders.append(order)
        return orders

    def lower_bound(self, objective: Objective) -> float:
        """The objective of no orders is less.

        For the span, the work of the busiest position. For the makespan, each position alone with its operations, which
        may start when the way to them is done and are followed by the way to the end: where they may be interrupted,
        the best is to run the one with the longest way to the end first.

        Source: Jackson's preemptive schedule (Carlier 1982, "The one-machine sequencing problem", section 2).
        """
        work = [0.0] * self.num_positions
        for number, places in enumerate(self.positions):
            for position in places:
                work[position] += self.num_microbatches * self.least[number]
        if objective == "span":
            return max(work)
        starts, tails = self._starts(), self._tails()
        return max(
            self._alone([number for number, places in enumerate(self.positions) if position in places], starts, tails)
            for position in range(self.num_positions)
        )

    def _starts(self) -> list[list[float]]:
        """Per pass and microbatch, when it can start at the earliest."""
        count, starts = self.num_microbatches, [[0.0] * self.num_microbatches for _ in self.passes]
        for number in self._topological():
            own, before = starts[number], 0.0
            waits = [(number - wait.delta // count, wait.lag) for wait in self.waits[number] if not wait.first]
            for m in range(count):
                ready = [starts[other][m] + self.least[other] + lag for other, lag in waits]
                own[m] = max(before, *ready, 0.0)
                before = own[m] + self.least[number]
        return starts

    def _tails(self) -> list[list[float]]:
        """Per pass and microbatch, the time from its end to the end of all that waits for it, at least."""
        count, tails = self.num_microbatches, [[0.0] * self.num_microbatches for _ in self.passes]
        followers: list[list[tuple[int, float]]] = [[] for _ in self.passes]
        for number, waits in enumerate(self.waits):
            for wait in waits:
                if not wait.first:
                    followers[number - wait.delta // count].append((number, wait.lag))
        for number in reversed(self._topological()):
            own, later = tails[number], 0.0
            for m in reversed(range(count)):
                behind = [lag + self.least[other] + tails[other][m] for other, lag in followers[number]]
                own[m] = max(later, *behind, 0.0)
                later = own[m] + self.least[number]
        return tails

    def _topological(self) -> list[int]:
        """The passes, each after those that it waits for."""
        rank = [0] * len(self.passes)
        for _, later in self.after:
            rank[later] += 1
        return sorted(range(len(self.passes)), key=rank.__getitem__)

    def _alone(self, passes: Sequence[int], starts: list[list[float]], tails: list[list[float]]) -> float:
        """The end of Jackson's preemptive schedule of one position."""
        coming = sorted(
            (starts[number][m], -tails[number][m], self.least[number])
            for number in passes
            for m in range(self.num_microbatches)
        )
        ready: list[tuple[float, float]] = []  # (less its tail, time left)
        now, end, at = 0.0, 0.0, 0
        while ready or at < len(coming):
            if not ready:
                now = max(now, coming[at][0])
            while at < len(coming) and coming[at][0] <= now:
                heapq.heappush(ready, coming[at][1:])
                at += 1
            tail, left = heapq.heappop(ready)
            until = coming[at][0] if at < len(coming) else math.inf
            if now + left > until:
                heapq.heappush(ready, (tail, now + left - until))
                now = until
            else:
                now += left
                end = max(end, now - tail)
        return end


def as_network(problem: Problem) -> Network:
    """``problem`` as a `Network`."""
    graph, costs, count = problem.graph, problem.costs, problem.num_microbatches
    stages, edges = graph.num_stages, graph.stage_edges
    trained = [stage for stage in range(stages) if stage not in problem.forward_only]
    passes = [
        *((_F, stage) for stage in range(stages)),
        *((_I, stage) for stage in trained),
        *((_W, stage) for stage in trained),
    ]
    number_of = {one: number for number, one in enumerate(passes)}
    times = {kind: costs.per_stage(kind.value, stages) for kind in (_F, _I, _W)}
    least = {_F: times[_F], **dict(zip((_I, _W), least_halves(costs, stages), strict=True))}
    latency, message, bandwidth = (costs.per_edge(name, edges) for name in ("latency", "message", "bandwidth"))
    waits: list[list[Wait]] = [[] for _ in passes]

    def wait(later: tuple[ActionKind, int], earlier: tuple[ActionKind, int], lag: float, back: int = 0) -> None:
        number, other = number_of[later], number_of[earlier]
        waits[number].append(Wait((number - other) * count + back, lag, back))

    for stage in trained:
        wait((_I, stage), (_F, stage), 0.0)
        wait((_W, stage), (_I, stage), 0.0)
    for edge in edges:
        ends = problem.placement[edge.source], problem.placement[edge.destination]
        crosses = ends[0] != ends[1]
        lag = latency[edge] + message[edge] / bandwidth[edge] if crosses else 0.0
        wait((_F, edge.destination), (_F, edge.source), lag)
        if (_I, edge.source) in number_of and (_I, edge.destination) in number_of:
            wait((_I, edge.source), (_I, edge.destination), lag)
    for edge in problem.queues:  # there is room when the consumer starts
        assert problem.ahead is not None
        length = times[_F][edge.destination] + costs.overhead
        wait((_F, edge.source), (_F, edge.destination), -length, problem.ahead)
    shares = problem.input_release
    released = {
        **{(_F, stage): 1.0 if stage in problem.forward_only else 0.0 for stage in range(stages)},
        **{(_I, stage): shares[stage] for stage in trained},
        **{(_W, stage): 1.0 - shares[stage] for stage in trained},
    }
    return Network(
        problem,
        count,
        tuple(passes),
        tuple(problem.placement[stage] for _, stage in passes),
        tuple(times[kind][stage] + costs.overhead for kind, stage in passes),
        tuple(least[kind][stage] + costs.overhead for kind, stage in passes),
        tuple(map(tuple, waits)),
        _closure([[number - one.delta // count for one in own if not one.first] for number, own in enumerate(waits)]),
        tuple(problem.activation[stage] if kind is _F else 0.0 for kind, stage in passes),
        tuple(problem.activation[stage] * released[kind, stage] for kind, stage in passes),
        problem.room,
    )


def _closure(waits: Sequence[Sequence[int]]) -> frozenset[tuple[int, int]]:
    """Pairs (earlier, later) of all that wait for each other, over any number of others between them."""
    earlier: dict[int, frozenset[int]] = {}

    def find(number: int) -> frozenset[int]:
        if number not in earlier:
            earlier[number] = frozenset(waits[number]).union(*map(find, waits[number]))
        return earlier[number]

    numbers = range(len(waits))
    return frozenset(itertools.chain.from_iterable(((before, number) for before in find(number)) for number in numbers))
