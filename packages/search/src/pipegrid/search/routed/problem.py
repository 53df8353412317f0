"""Routes over a graph of stages as a scheduling problem, and its tasks as numbers.

A *task* is one call of a stage: of one unit, or of several where its module is called once for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

from attrs import define, field, frozen

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.network.problem import memory_of_one
from pipegrid.plans.plan import Actor, Routes
from pipegrid.plans.simulate import Costs


@frozen(slots=False)
class RoutedProblem:
    """Routes over a graph, each stage on one position, with costs, memory limits and speeds.

    ``activation``: per stage, the memory of one call. ``limits``: per position, the most that each of its actors holds,
    in the same unit (infinite: no limit). ``speeds``: of the actors that are not as fast as the costs say (1); twice
    the speed is half the time. ``whole``: backwards are ``B`` in place of ``I`` and ``W``.
    """

    routes: Routes
    graph: ModuleGraph
    placement: tuple[int, ...]
    costs: Costs
    activation: tuple[float, ...]
    limits: tuple[float, ...]
    speeds: Mapping[Actor, float] = field(factory=dict)
    forward_only: frozenset[int] = frozenset()
    whole: bool = False

    @cached_property
    def modules(self) -> list[str]:
        """The module of each stage."""
        return [self.graph.module_of(stage)[0] for stage in range(self.graph.num_stages)]

    @cached_property
    def durations(self) -> list[tuple[float, float, float]]:
        """Per stage, ``F``, ``I`` and ``W`` at speed 1; a whole backward is the second, and the third takes no time."""
        stages, more = self.graph.num_stages, self.costs.overhead
        names = ("F", "B") if self.whole else ("F", "I", "W")
        times = zip(*(self.costs.per_stage(name, stages) for name in names), strict=True)
        return [(f + more, i + more, w[0] + more if w else 0.0) for f, i, *w in times]

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
    def tasks(self) -> Tasks:
        """The calls of all stages."""
        return _tasks(self)

    def speed(self, actor: Actor) -> float:
        """The speed of ``actor``."""
        return self.speeds.get(actor, 1.0)

    def held(self, position: int) -> float:
        """What one unit holds in all stages of a position: the least limit that works."""
        own = [stage for stage, place in enumerate(self.placement) if place == position]
        return memory_of_one(own, self.activation, self.forward_only)

    def guard(self, position: int) -> float:
        """`held` where memory could deadlock an actor: with a limit and several stages; else 0."""
        bounded = self.limits[position] < math.inf and self.placement.count(position) > 1
        return self.held(position) if bounded else 0.0


@define
class Tasks:
    """The calls of all stages, stage by stage; ``actor`` counts the living ones, ``age`` the units, oldest first.

    ``outputs`` and ``inputs``: the tasks that wait for a task's ``F`` and ``I``, each with the time of the message.
    ``needs``: how many results its ``F``, and its ``I`` or ``B``, wait for.
    """

    actors: list[Actor]
    stage: list[int] = field(factory=list)
    unit: list[int] = field(factory=list)
    actor: list[int] = field(factory=list)
    age: list[int] = field(factory=list)
    outputs: list[list[tuple[int, float]]] = field(factory=list)
    inputs: list[list[tuple[int, float]]] = field(factory=list)
    needs: tuple[list[int], list[int]] = field(factory=lambda: ([], []))


def _tasks(problem: RoutedProblem) -> Tasks:
    routes, modules = problem.routes, problem.modules
    actors = [Actor(p, replica) for p in range(len(problem.limits)) for replica in routes.living(p)]
    number = {(actor.position, actor.replica): index for index, actor in enumerate(actors)}
    calls = {module: routes.calls(module) for module in set(modules)}
    ages = sorted(range(routes.num_units), key=lambda unit: (routes.microbatch(unit), unit))
    age = {unit: index for index, unit in enumerate(ages)}
    tasks, numbers = Tasks(actors), []
    for stage, module in enumerate(modules):
        place, first, own = problem.placement[stage], len(tasks.stage), calls[module]
        numbers.append({call: first + index for index, call in enumerate(own)})
        tasks.stage += [stage] * len(own)
        tasks.unit += own
        tasks.actor += [number[place, routes.of(call, stage)] for call in own]
        tasks.age += [age[call] for call in own]
    count = len(tasks.stage)
    tasks.outputs, tasks.inputs = [[] for _ in range(count)], [[] for _ in range(count)]
    tasks.needs = [0] * count, [1] * count
    pairs: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for source, destination, message in problem.messages:
        ends = modules[source], modules[destination]
        if ends not in pairs:
            pairs[ends] = _calls_between(routes, *ends)
        trained = problem.forward_only.isdisjoint((source, destination))
        for one, other in pairs[ends]:
            before, after = numbers[source][one], numbers[destination][other]
            time = 0.0 if tasks.actor[before] == tasks.actor[after] else message
            tasks.outputs[before].append((after, time))
            tasks.needs[0][after] += 1
            if trained:
                tasks.inputs[after].append((before, time))
                tasks.needs[1][before] += 1
    return tasks


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
