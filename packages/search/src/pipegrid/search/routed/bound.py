"""A lower bound of the makespan of a step in which any living actor of a position may compute any unit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial

from attrs import frozen

from pipegrid.plans.plan import Actor
from pipegrid.plans.simulate import with_slack
from pipegrid.search.bounds import preemptive
from pipegrid.search.calls import RoutedProblem


def routed_bound(problem: RoutedProblem) -> float:
    """No routes to living actors, and no orders, have a makespan below this.

    *One actor.* Take any step, a stage, one of its actors, and let F_j, I_j and W_j be the j-th of their kind that the
    actor starts. When I_j starts, j units have had their ``F`` there and have come back since; so F_j has ended at
    least the way down and back (the *turn*) before. In the same way W_j follows I_j. Where the actor holds at most
    ``c`` units, F_j follows W_(j-c) (where ``I`` releases a part, the I and the W that make the room). Before F_j
    comes the way from the sources, after I_j the way back to them and a ``W`` there. So the actor is a machine whose
    operations have earliest starts and tails, and it ends no earlier than Jackson's preemptive schedule of them. With
    ``k`` units on stage s of a chain of equal costs that is ``s + k (F + I + W)``, and more where memory is short, as
    those ``W`` cannot wait until after the last ``I``.

    *All of a position.* Its ``n`` actors share the units. The j-th ``F`` of a stage on all of them starts no earlier
    than the ``(j-n)``-th ends, and than the j-th of the stage before has arrived; so does the j-th ``I`` and, from the
    end back, the j-th last ``I`` and ``F``. Of the actors, the a-th to start a first ``F`` starts no earlier than the
    a-th ``F`` of all; so too for the first ``I``, the last ``I`` and the last ``F``. By each of these four, actors have
    different earliest starts or tails (of different speeds, all have the least). The bound is the least time in which
    the actors, each alone, have room for all units.

    On a position of several stages, each of them bounds alone, and the sum of their work. Where units skip modules or
    share calls, the edges between modules are left out. A message takes its time, but never waits for a lane.
    """
    ways, bound = _ways(problem), 0.0
    for position in range(len(problem.limits)):
        own = problem.stages_at(position)
        speeds = [problem.speed(Actor(position, replica)) for replica in problem.routes.living(position)]
        work = math.fsum(ways.units[stage] * sum(problem.durations[stage]) for stage in own)
        bound = max(bound, min((ways.head[stage] for stage in own), default=0.0) + work / math.fsum(speeds))
        for stage in own:
            for ends in _ends_of_actors(ways, stage, speeds):
                bound = _with_room_for_all(problem, ways, stage, ends, bound)
    return bound


@frozen
class _Ways:
    """Per stage, its units and the least times around it.

    ``times``: of F, I and W on its fastest actor; ``head``: before its first F; ``turn``: from the end of an F to its
    I; ``up`` and ``down``: from the end of an I, and of an F, to the end of all. ``first`` and ``last``: for F and for
    I, the start of the j-th of all its actors, and the time from the start of the j-th last to the end.
    """

    units: list[int]
    times: list[tuple[float, ...]]
    head: list[float]
    turn: list[float]
    up: list[float]
    down: list[float]
    first: tuple[list[list[float]], list[list[float]]]
    last: tuple[list[list[float]], list[list[float]]]


def _ways(problem: RoutedProblem) -> _Ways:
    routes, graph = problem.routes, problem.graph
    stages = range(graph.num_stages)
    living = [routes.living(place) for place in problem.position]
    fastest = [
        max(problem.speed(Actor(place, replica)) for replica in living[stage])
        for stage, place in enumerate(problem.position)
    ]
    times = [tuple([time / fastest[stage] for time in problem.durations[stage]]) for stage in stages]
    modules, position = problem.modules, problem.position
    edges = [
        (source, destination, lag if position[source] != position[destination] else 0.0)
        for source, destination, lag in problem.messages
        if not (routes.skips or routes.every) or modules[source] == modules[destination]
    ]
    trained = [stage not in problem.forward_only for stage in stages]
    sources = [[(a, lag) for a, b, lag in edges if b == s] for s in stages]
    followers = [[(b, lag) for a, b, lag in edges if a == s] for s in stages]
    width = routes.num_replicas
    head, turn, up, down = ([0.0 for _ in stages] for _ in range(4))
    first: tuple[list[list[float]], list[list[float]]] = ([[] for _ in stages], [[] for _ in stages])
    last: tuple[list[list[float]], list[list[float]]] = ([[] for _ in stages], [[] for _ in stages])
    for s in stages:
        f, i, w = times[s]
        head[s] = max([head[a] + times[a][0] + lag for a, lag in sources[s]], default=0.0)
        back = [(a, lag) for a, lag in sources[s] if trained[a]]
        up[s] = max([lag + times[a][1] + max(up[a], times[a][2]) for a, lag in back], default=0.0)
        before = [[first[0][a][j] + times[a][0] + lag for a, lag in sources[s]] for j in range(width)]
        first[0][s] = _staircase(before, f, len(living[s]))
        after = [
            [*(last[1][a][j] + i + lag for a, lag in back), (j // len(living[s]) + 1) * (i + w)] for j in range(width)
        ]
        last[1][s] = _staircase(after, i, len(living[s]))
    for s in reversed(stages):
        f, i, w = times[s]
        on = [(b, lag) for b, lag in followers[s] if trained[b]] if trained[s] else followers[s]
        turn[s] = max([2 * lag + times[b][0] + turn[b] + times[b][1] for b, lag in on], default=0.0)
        rest = turn[s] + i + max(up[s], w) if trained[s] else 0.0
        down[s] = max([rest, *(lag + times[b][0] + down[b] for b, lag in on)])
        before = [[first[0][s][j] + f, *(first[1][b][j] + times[b][1] + lag for b, lag in on)] for j in range(width)]
        first[1][s] = _staircase(before, i, len(living[s]))
        ends = last[1][s] if trained[s] else [0.0] * width
        after = [[f + ends[j], *(f + lag + last[0][b][j] for b, lag in on)] for j in range(width)]
        last[0][s] = _staircase(after, f, len(living[s]))
    return _Ways([len(routes.calls(module)) for module in modules], times, head, turn, up, down, first, last)


def _staircase(ready: list[list[float]], duration: float, machines: int) -> list[float]:
    """The start of the j-th operation of several machines, no earlier than all of ``ready[j]``."""
    starts: list[float] = []
    for j, times in enumerate(ready):
        free = starts[j - machines] + duration if j >= machines else 0.0
        starts.append(max([free, *times]))
    return starts


@frozen
class _Ends:
    """An actor: its speed, the starts of its first F and first I, the times from the start of its last I and F on."""

    speed: float
    first_forward: float
    first_backward: float
    last_backward: float
    last_forward: float


def _ends_of_actors(ways: _Ways, stage: int, speeds: list[float]) -> Iterator[list[_Ends]]:
    """The ends of the actors of a stage, ranked by each of the four."""
    kinds = (ways.first[0], ways.first[1], ways.last[1], ways.last[0])
    for ranked in kinds if len(set(speeds)) == 1 else kinds[:1]:
        yield [
            _Ends(speed, *(kind[stage][rank if kind is ranked and len(set(speeds)) == 1 else 0] for kind in kinds))
            for rank, speed in enumerate(speeds)
        ]


def _with_room_for_all(problem: RoutedProblem, ways: _Ways, stage: int, actors: list[_Ends], bound: float) -> float:
    """The least time from ``bound`` on in which the actors have room for all units of the stage."""
    units, number = ways.units[stage], Counter(actors)

    @cache
    def alone(ends: _Ends, count: int) -> float:
        return preemptive(_operations(problem, ways, stage, ends, count)) if count else 0.0

    even = -(-units // len(actors))
    while any(alone(ends, even) > bound for ends in number):
        room = {ends: bisect_right(range(units + 1), bound, key=partial(alone, ends)) - 1 for ends in number}
        if sum(number[ends] * count for ends, count in room.items()) >= units:
            break
        bound = min(alone(ends, count + 1) for ends, count in room.items())
    return bound


def _operations(
    problem: RoutedProblem, ways: _Ways, stage: int, ends: _Ends, count: int
) -> Iterator[tuple[float, float, float]]:
    """The operations of an actor with ``count`` units of ``stage``: earliest start, duration, tail."""
    f, i, w = (time / ends.speed for time in problem.durations[stage])
    turn, up = ways.turn[stage], ways.up[stage]
    if stage in problem.forward_only:
        for j in range(count):
            yield ends.first_forward, f, max(ways.down[stage], ends.last_forward - f if j == count - 1 else 0.0)
        return
    starts: list[tuple[float, float, float]] = []
    room = [_before_forward(problem, stage, j + 1) for j in range(count)]
    for j in range(count):
        inputs, weights = room[j]
        forward = max(
            starts[j - 1][0] + f if j else ends.first_forward,
            starts[inputs - 1][1] + i if inputs > 0 else 0.0,
            starts[weights - 1][2] + w if weights > 0 else 0.0,
        )
        backward = max(forward + f + turn, starts[j - 1][1] + i if j else ends.first_backward)
        starts.append((forward, backward, max(backward + i, starts[j - 1][2] + w if j else 0.0)))
    tails = [[0.0, 0.0, 0.0] for _ in range(count)]
    for j in reversed(range(count)):
        own, final = tails[j], j == count - 1
        own[2] = max(own[2], 0.0 if final else w + tails[j + 1][2])
        own[1] = max(own[1], up, w + own[2], ends.last_backward - i if final else i + tails[j + 1][1])
        own[0] = max(ways.down[stage], turn + i + own[1], ends.last_forward - f if final else f + tails[j + 1][0])
        for kind, done in zip((1, 2), room[j], strict=True):
            if done > 0:
                tails[done - 1][kind] = max(tails[done - 1][kind], f + own[0])
        yield from zip(starts[j], (f, i, w), own, strict=True)


def _before_forward(problem: RoutedProblem, stage: int, number: int) -> tuple[int, int]:
    """The numbers of ``I`` and ``W`` that must be done before an actor has room for F number ``number``."""
    size, released = problem.activation[stage], problem.released[stage]
    lacking = size * number - with_slack(problem.limits[problem.position[stage]])
    if lacking <= 0:
        return 0, 0
    kept = lacking - released * (number - 1)
    return math.ceil(lacking / size), math.ceil(kept / (size - released)) if kept > 0 else 0
