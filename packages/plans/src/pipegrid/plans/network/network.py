"""Any graph of stages as passes, and the player of fixed orders of them.

A *pass* is a kind of compute of a stage: ``F``, ``I`` or ``W``. An *operation* is a pass of a microbatch, as the
integer ``pass * M + microbatch``. It waits for operations of the same microbatch and, where a frozen module feeds a
bounded queue, for the consumer's forward of an earlier one: each a subtraction away. A pass comes after those that it
waits for.

In a chain of ``S`` trained stages, a microbatch makes ``2S`` passes one after the other: pass ``s`` is ``F`` of stage
``s``, pass ``2S-1-s`` its ``I``; its ``W`` has the number of the ``I`` plus ``S``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from attrs import field, frozen

from pipegrid.plans.network.problem import Problem
from pipegrid.plans.plan import ActionKind, Plan
from pipegrid.plans.simulate import Costs

_F, _I, _W = ActionKind.F, ActionKind.I, ActionKind.W

Objective: TypeAlias = Literal["makespan", "span"]
"""``"makespan"``: the end of the last action. ``"span"``: the longest time from a position's first start to its own
last end, which is the time of a step where positions step apart (the optimizer has no barrier)."""

Orders: TypeAlias = list[list[int]]
"""Per position, its operations in order."""


class Timing(NamedTuple):
    """The objective of played orders (``value``), the end of each operation, the position that decides the value."""

    value: float
    end: list[float]
    worst: int


class Dependency(NamedTuple):
    """An operation waits for the one ``delta`` before it, and ``lag`` longer; microbatches before ``first`` do not."""

    delta: int
    lag: float
    first: int


@frozen(slots=False)
class PassNetwork:
    """A graph on positions, as numbers per pass.

    ``least``: durations where whole backwards are cheaper than their halves. ``takes``: live memory on each position of
    a pass from its start on; ``held``: what of it is there after its end, negative where a pass releases memory.
    """

    problem: Problem = field(repr=False)
    num_microbatches: int
    passes: tuple[tuple[ActionKind, int], ...]
    positions: tuple[tuple[int, ...], ...]
    duration: tuple[float, ...]
    least: tuple[float, ...]
    waits: tuple[tuple[Dependency, ...], ...]
    takes: tuple[float, ...]
    held: tuple[float, ...]
    limit: float

    @cached_property
    def num_positions(self) -> int:
        """Positions of the placement."""
        return self.problem.num_positions

    @cached_property
    def num_stages(self) -> int:
        """Stages of the graph."""
        return self.problem.graph.num_stages

    @property
    def num_operations(self) -> int:
        """Operations of a step, each counted once."""
        return len(self.passes) * self.num_microbatches

    @cached_property
    def is_chain(self) -> bool:
        """Whether it is a chain of trained stages on one position each."""
        return self.problem.is_chain

    @cached_property
    def position(self) -> tuple[int, ...]:
        """The position of each pass of a chain."""
        return tuple([places[0] for places in self.positions])

    @cached_property
    def lag(self) -> tuple[float, ...]:
        """The time from the end of the pass before to the start of each pass of a chain."""
        return tuple([waits[0].lag if waits else 0.0 for waits in self.waits])

    @cached_property
    def passes_at(self) -> tuple[tuple[int, ...], ...]:
        """The F and I passes of each position of a chain, ascending."""
        passes = range(2 * self.num_stages)
        return tuple([tuple([one for one in passes if self.position[one] == p]) for p in range(self.num_positions)])

    @cached_property
    def ordered(self) -> frozenset[tuple[int, int]]:
        """Pairs of passes of which the second waits for the first; in a chain, of a ``W`` only its own ``I``."""
        count, stages = self.num_microbatches, self.num_stages
        earlier: list[set[int]] = []  # per pass, all that it waits for
        for number, waits in enumerate(self.waits):
            direct = {number - wait.delta // count for wait in waits if not wait.first}
            earlier.append(direct.union(*[earlier[other] for other in direct]))
        pairs = ((before, number) for number, own in enumerate(earlier) for before in own)
        chain = self.is_chain
        return frozenset(pair for pair in pairs if not chain or pair[1] < 2 * stages or pair[1] - pair[0] == stages)

    @cached_property
    def _wakes(self) -> tuple[tuple[int, ...], ...]:
        """Per pass, the positions elsewhere that wait for it."""
        wakes: list[set[int]] = [set() for _ in self.passes]
        for number, waits in enumerate(self.waits):
            for delta, _, first in waits:
                other = number - (delta - first) // self.num_microbatches
                wakes[other].update(set(self.positions[number]).difference(self.positions[other]))
        return tuple(map(tuple, wakes))

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
        return first == second or (m == n and ((first, second) in self.ordered or (second, first) in self.ordered))

    def keeps_to_limit(self, order: Sequence[int]) -> bool:
        """Whether a position that follows ``order`` keeps to the memory limit."""
        count, takes, held, limit = self.num_microbatches, self.takes, self.held, self.limit
        live = 0.0
        for number in (operation // count for operation in order):
            if live + takes[number] > limit:
                return False
            live += held[number]
        return True

    def timed(self, orders: Orders, objective: Objective = "makespan") -> Timing | None:
        """``orders`` played as soon as possible; None where positions wait for each other in a cycle.

        It knows computes and lags alone, since a search plays 10^4 to 10^6 orders; `simulate` plays everything.
        """
        count, duration, waits, positions = self.num_microbatches, self.duration, self.waits, self.positions
        wakes = self._wakes
        end = [-1.0] * self.num_operations
        done, clock = [0] * self.num_positions, [0.0] * self.num_positions
        waits_for = [-1] * self.num_positions
        met: dict[int, list[int]] = {}  # the positions that have come to a compute of a stage on several
        runnable = list(range(self.num_positions))
        while runnable:
            position = runnable.pop()
            order, index, now = orders[position], done[position], clock[position]
            while index < len(order):
                operation = order[index]
                number = operation // count
                for delta, lag, first in waits[number]:
                    if first and operation % count < first:
                        continue
                    ready = end[operation - delta]
                    if ready < 0.0:
                        waits_for[position] = operation - delta
                        break
                    ready += lag
                    if ready > now:  # noqa: PLR1730 -- the hot loop
                        now = ready
                else:
                    if len(positions[number]) > 1:
                        together = met.setdefault(operation, [])
                        together.append(position)
                        if len(together) < len(positions[number]):
                            break  # the last to come carries this position on
                        now = max(now, *[clock[other] for other in together])
                        for other in together[:-1]:
                            done[other], clock[other] = done[other] + 1, now + duration[number]
                            runnable.append(other)
                    now += duration[number]
                    end[operation] = now
                    index += 1
                    for other in wakes[number]:
                        if waits_for[other] == operation:
                            waits_for[other] = -1
                            runnable.append(other)
                    continue
                break
            done[position], clock[position] = index, now
        if any(index < len(order) for index, order in zip(done, orders, strict=True)):
            return None
        times = clock
        if objective == "span":
            starts = [end[order[0]] - duration[order[0] // count] if order else 0.0 for order in orders]
            times = [last - first for first, last in zip(starts, clock, strict=True)]
        worst = max(range(len(times)), key=times.__getitem__)
        return Timing(times[worst], end, worst)

    def orders_of(self, plan: Plan) -> Orders:
        """The operations of ``plan``, a ``B`` as its two halves."""
        first = {one: number * self.num_microbatches for number, one in enumerate(self.passes)}
        orders: Orders = [[] for _ in range(self.num_positions)]
        for position, order in enumerate(orders):
            for action in plan.actions(position):
                kinds = (_I, _W) if action.kind is ActionKind.B else (action.kind,)
                order += [first[kind, action.stage] + (action.microbatch or 0) for kind in kinds]
        return orders


def as_network(problem: Problem, num_microbatches: int | None = None) -> PassNetwork:
    """``problem`` as a `PassNetwork`, of ``num_microbatches`` where given."""
    graph, costs, count = problem.graph, problem.costs, num_microbatches or problem.num_microbatches
    stages, edges = graph.num_stages, graph.stage_edges
    trained = [stage for stage in reversed(range(stages)) if stage not in problem.forward_only]
    passes = [(kind, stage) for kind in (_F, _I, _W) for stage in (range(stages) if kind is _F else trained)]
    number_of = {one: number for number, one in enumerate(passes)}
    times = {kind: costs.per_stage(kind.value, stages) for kind in (_F, _I, _W)}
    least = {_F: times[_F], **dict(zip((_I, _W), _least_halves(costs, stages), strict=True))}
    travel = costs.travel(edges)
    waits: list[list[Dependency]] = [[] for _ in passes]

    def wait(later: tuple[ActionKind, int], earlier: tuple[ActionKind, int], lag: float, back: int = 0) -> None:
        number, other = number_of[later], number_of[earlier]
        waits[number].append(Dependency((number - other) * count + back, lag, back))

    followed = {edge.source for edge in edges if edge.destination not in problem.forward_only}
    for stage in trained:
        if stage not in followed:  # others wait for the I of what follows, and so for all forwards up to it
            wait((_I, stage), (_F, stage), 0.0)
        wait((_W, stage), (_I, stage), 0.0)
    for edge in edges:
        crosses = problem.placement[edge.source] != problem.placement[edge.destination]
        lag = sum(travel[edge]) if crosses else 0.0
        wait((_F, edge.destination), (_F, edge.source), lag)
        if (_I, edge.source) in number_of and (_I, edge.destination) in number_of:
            wait((_I, edge.source), (_I, edge.destination), lag)
    for edge in problem.queues:  # there is room when the consumer starts
        assert problem.ahead is not None
        length = times[_F][edge.destination] + costs.overhead
        wait((_F, edge.source), (_F, edge.destination), -length, problem.ahead)
    sizes = problem.activation
    released = [size * share for size, share in zip(sizes, problem.input_release, strict=True)]
    held = {
        **{(_F, stage): 0.0 if stage in problem.forward_only else sizes[stage] for stage in range(stages)},
        **{(_I, stage): -released[stage] for stage in trained},
        **{(_W, stage): released[stage] - sizes[stage] for stage in trained},
    }
    return PassNetwork(
        problem,
        count,
        tuple(passes),
        tuple(problem.placement[stage] for _, stage in passes),
        tuple(times[kind][stage] + costs.overhead for kind, stage in passes),
        tuple(least[kind][stage] + costs.overhead for kind, stage in passes),
        tuple(map(tuple, waits)),
        tuple(sizes[stage] if kind is _F else 0.0 for kind, stage in passes),
        tuple(held[one] for one in passes),
        problem.room,
    )


def _least_halves(costs: Costs, num_stages: int) -> tuple[list[float], list[float]]:
    """Per stage ``I`` and ``W``; the second is less where a whole backward, with one overhead for both, takes less."""
    inputs, weights = costs.per_stage("I", num_stages), costs.per_stage("W", num_stages)
    for stage, time in enumerate(costs.per_stage("B", num_stages)):
        inputs[stage] = min(inputs[stage], time)
        weights[stage] = min(weights[stage], time - inputs[stage] - costs.overhead)
    return inputs, weights
