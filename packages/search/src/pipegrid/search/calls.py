"""Routes over a graph of stages as a scheduling problem, and its calls as numbers.

A *call* is one call of a stage: of one unit, or of several where its module is called once for them. A *seat* is a
stage with the actors of a replica that compute it: one, or several at once where it lies on several positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import cached_property
from typing import TypeAlias

from attrs import define, field, frozen

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.network.problem import Problem, memory_of_one
from pipegrid.plans.plan import Actor, Routes
from pipegrid.plans.simulate import Costs, with_slack

FORWARD, BACKWARD, WEIGHTS = range(3)
"""The computes of a call, as indices: ``F``, ``I`` (or ``B``) and ``W``."""

Lane: TypeAlias = tuple[int, int, int]
"""Source, destination, and `FORWARD` or `BACKWARD`."""

Links: TypeAlias = tuple[tuple[Lane, float, float], ...]
"""Messages from one seat to another: lane, time on it, latency; none where an actor keeps its own."""


@frozen(slots=False)
class RoutedProblem:
    """Routes over a graph on positions, with costs, memory limits and speeds.

    ``activation``: per stage, the memory of one call. ``limits``: per position, the most that each of its actors holds,
    in the same unit (infinite: no limit). ``speeds``: of the actors that are not as fast as the costs say (1); twice
    the speed is half the time. ``whole``: backwards are ``B`` in place of ``I`` and ``W``. ``ahead``: as of `Problem`.
    ``lanes``: messages between two actors wait for the one before.
    """

    routes: Routes
    graph: ModuleGraph
    placement: tuple[tuple[int, ...], ...]
    costs: Costs
    activation: tuple[float, ...]
    limits: tuple[float, ...]
    speeds: Mapping[Actor, float] = field(factory=dict)
    forward_only: frozenset[int] = frozenset()
    whole: bool = False
    ahead: int | None = None
    lanes: bool = False

    @classmethod
    def of_one_replica(cls, problem: Problem) -> RoutedProblem:
        """``problem``, whose replicas act alike."""
        return cls(
            Routes.identity(1, problem.num_microbatches),
            problem.graph,
            problem.placement,
            problem.costs,
            problem.activation,
            (problem.memory_limit,) * problem.num_positions,
            forward_only=problem.forward_only,
            ahead=problem.ahead,
            lanes=True,
        )

    @cached_property
    def modules(self) -> list[str]:
        """The module of each stage."""
        return [self.graph.module_of(stage)[0] for stage in range(self.graph.num_stages)]

    @cached_property
    def position(self) -> list[int]:
        """The first position of each stage."""
        return [places[0] for places in self.placement]

    @cached_property
    def times(self) -> list[tuple[float, ...]]:
        """Per stage, ``F``, ``I`` and ``W`` (or ``F`` and ``B``) at speed 1, without the overhead of a compute."""
        names = ("F", "B") if self.whole else ("F", "I", "W")
        return list(zip(*(self.costs.per_stage(name, self.graph.num_stages) for name in names), strict=True))

    @cached_property
    def durations(self) -> list[tuple[float, float, float]]:
        """``times`` with the overhead; a whole backward is the second, and the third takes no time."""
        more = self.costs.overhead
        return [(f + more, i + more, w[0] + more if w else 0.0) for f, i, *w in self.times]

    @cached_property
    def released(self) -> list[float]:
        """Per stage, the memory that the second of `durations` releases; the third releases the rest."""
        shares = self.costs.per_stage("input_release", self.graph.num_stages)
        return [size * (1.0 if self.whole else share) for size, share in zip(self.activation, shares, strict=True)]

    @cached_property
    def messages(self) -> list[tuple[int, int, float]]:
        """The edges as source, destination, and the time of a message between two actors."""
        travel = self.costs.travel(self.graph.stage_edges)
        return [(edge.source, edge.destination, sum(times)) for edge, times in travel.items()]

    @cached_property
    def calls(self) -> Calls:
        """The calls of all stages."""
        return _calls(self)

    def speed(self, actor: Actor) -> float:
        """The speed of ``actor``."""
        return self.speeds.get(actor, 1.0)

    def stages_at(self, position: int) -> list[int]:
        """The stages on ``position``."""
        return [stage for stage, places in enumerate(self.placement) if position in places]

    def held(self, position: int) -> float:
        """The memory of one unit in all stages of a position: the least limit that works."""
        return memory_of_one(self.stages_at(position), self.activation, self.forward_only)

    def guard(self, position: int) -> float:
        """`held` where memory could deadlock an actor: with a limit and several trained stages; else 0."""
        trained = set(self.stages_at(position)) - self.forward_only
        return self.held(position) if self.limits[position] < math.inf and len(trained) > 1 else 0.0


@define(eq=False)
class Seat:
    """A stage on actors, by number; ``times``: of ``F``, ``I`` (or ``B``) and ``W``, each with ``overhead`` more.

    ``released``: of its ``size``, by ``I``. ``distance``: stages to the sink. ``calls``: its calls, ascending.
    ``queues``: the seats for which its results wait in a bounded queue; ``feeders``: those whose results do here.
    """

    stage: int
    actors: tuple[int, ...]
    times: tuple[float, ...]
    overhead: float
    size: float
    released: float
    trained: bool
    distance: int
    calls: list[int] = field(factory=list)
    queues: list[int] = field(factory=list)
    feeders: list[int] = field(factory=list)


@define
class Calls:
    """The calls of all stages, stage by stage, and their seats; ``age`` counts the units, oldest first.

    ``outputs`` and ``inputs``: the calls that wait for a call's ``F`` and ``I``, with the messages to them. ``needs``:
    how many results its ``F``, and its ``I`` or ``B``, wait for. Per living actor, ``limits`` of memory and ``guards``.
    """

    problem: RoutedProblem
    actors: list[Actor]
    limits: list[float]
    guards: list[float]
    seats: list[Seat] = field(factory=list)
    seat: list[int] = field(factory=list)
    unit: list[int] = field(factory=list)
    microbatch: list[int] = field(factory=list)
    age: list[int] = field(factory=list)
    outputs: list[list[tuple[int, Links]]] = field(factory=list)
    inputs: list[list[tuple[int, Links]]] = field(factory=list)
    needs: tuple[list[int], list[int]] = field(factory=lambda: ([], []))


def _calls(problem: RoutedProblem) -> Calls:
    routes, modules = problem.routes, problem.modules
    actors = [Actor(p, replica) for p in range(len(problem.limits)) for replica in routes.living(p)]
    number = {(actor.position, actor.replica): index for index, actor in enumerate(actors)}
    limits = [with_slack(problem.limits[actor.position]) for actor in actors]
    guards = [problem.guard(position) for position in range(len(problem.limits))]
    calls = Calls(problem, actors, limits, [guards[actor.position] for actor in actors])
    microbatch = [routes.microbatch(unit) for unit in range(routes.num_units)]
    ages = sorted(range(routes.num_units), key=lambda unit: (microbatch[unit], unit))
    age = {unit: index for index, unit in enumerate(ages)}
    of_module = {module: routes.calls(module) for module in set(modules)}
    numbers: list[dict[int, int]] = []
    for stage, module in enumerate(modules):
        seats: dict[int, int] = {}  # by replica
        numbers.append({})
        for unit in of_module[module]:
            replica = routes.of(unit, stage)
            if replica not in seats:
                seats[replica] = len(calls.seats)
                own = tuple([number[place, replica] for place in problem.placement[stage]])
                speed = min(problem.speed(actors[one]) for one in own)
                times = tuple([time / speed for time in problem.times[stage]])
                size, released = problem.activation[stage], problem.released[stage]
                trained, distance = stage not in problem.forward_only, problem.graph.distance_to_sink[stage]
                overhead = problem.costs.overhead / speed
                calls.seats.append(Seat(stage, own, times, overhead, size, released, trained, distance))
            numbers[stage][unit] = len(calls.seat)
            calls.seats[seats[replica]].calls.append(len(calls.seat))
            calls.seat.append(seats[replica])
            calls.unit.append(unit)
            calls.microbatch.append(microbatch[unit])
            calls.age.append(age[unit])
    _connect(problem, calls, numbers)
    return calls


def _connect(problem: RoutedProblem, calls: Calls, numbers: list[dict[int, int]]) -> None:
    """Note what each call waits for, and the messages and queues between seats."""
    count, seats, modules = len(calls.seat), calls.seats, problem.modules
    calls.outputs, calls.inputs = [[] for _ in range(count)], [[] for _ in range(count)]
    calls.needs = [0] * count, [1] * count  # an I waits for its own F
    pairs: dict[tuple[str, str], list[tuple[int, int]]] = {}

    def links(source: Seat, destination: Seat, what: int, occupied: float, latency: float) -> Links:
        """The messages between two stages: from each actor of the one to each of the other, unless these are alike."""
        if source.actors == destination.actors:
            return ()
        ends = itertools.product(source.actors, destination.actors)
        return tuple([((one, other, what), occupied, latency) for one, other in ends if one != other])

    for edge, (occupied, latency) in problem.costs.travel(problem.graph.stage_edges).items():
        times = (occupied, latency) if problem.lanes else (0.0, occupied + latency)
        ends = modules[edge.source], modules[edge.destination]
        if ends not in pairs:
            pairs[ends] = _calls_between(problem.routes, *ends)
        trained = problem.forward_only.isdisjoint((edge.source, edge.destination))
        met: dict[tuple[int, int], tuple[Links, Links]] = {}
        for one, other in pairs[ends]:
            before, after = numbers[edge.source][one], numbers[edge.destination][other]
            key = calls.seat[before], calls.seat[after]
            source, destination = seats[key[0]], seats[key[1]]
            if key not in met:
                met[key] = links(source, destination, FORWARD, *times), links(destination, source, BACKWARD, *times)
                if problem.ahead is not None and not source.trained:
                    source.queues.append(key[1])
                    destination.feeders.append(key[0])
            there, back = met[key]
            calls.outputs[before].append((after, there))
            calls.needs[FORWARD][after] += 1
            if trained:
                calls.inputs[after].append((before, back))
                calls.needs[BACKWARD][before] += 1


def _calls_between(routes: Routes, source: str, destination: str) -> list[tuple[int, int]]:
    """The calls of two modules of which the second needs the first; within a module, those of the same units."""
    if source == destination:
        return [(call, call) for call in routes.calls(source)]
    return sorted(
        {
            (routes.call(unit, source), call)
            for call in routes.calls(destination)
            for unit in routes.served(call, destination)
            if not routes.skips_module(unit, source)
        }
    )
