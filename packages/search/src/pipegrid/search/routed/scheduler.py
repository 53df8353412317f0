"""A list scheduler for routes: every actor has its own order, and a unit passes through actors of several replicas.

A free actor starts an ``I`` or an ``F``, and a ``W`` where neither is ready or the memory is full. So ``I`` comes
early, and what is left of ``W`` fills the time after the last ``I``. An actor is done after its own last ``W``: the
optimizer's step of its stage waits for no other stage.

Memory cannot deadlock it. An actor of one stage always has an ``I`` or ``W`` to come for what it holds: by induction
from the sinks, whose ``I`` wait for their own ``F`` alone. On an actor of several stages, let ``u`` be the oldest unit
that has an ``F`` to do there, and ``A`` what a unit holds in all of them. An ``F`` of a younger unit is admitted only
if the younger ones then hold at most ``limit - A``. So once everything older than the oldest unfinished unit of all
has drained, that unit finds room on every actor. Age is one order for all actors: by microbatch, then by home.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from attrs import frozen

from pipegrid.plans.network.problem import Entries
from pipegrid.plans.plan import ActionKind, Actor
from pipegrid.plans.simulate import with_slack
from pipegrid.search.routed.problem import RoutedProblem

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W

First: TypeAlias = Literal["backward", "alternate", "forward"]
"""What a free actor starts first: backwards, each after the other, or forwards."""


@frozen
class Routed:
    """The orders of a step, per living actor, as kind, stage and first unit; when each ends, and the most it holds."""

    orders: Mapping[Actor, Entries]
    ends: Mapping[Actor, float]
    peaks: Mapping[Actor, float]

    @property
    def makespan(self) -> float:
        """When the last actor ends."""
        return max(self.ends.values())


def list_routes(problem: RoutedProblem, first: First, younger: Sequence[float]) -> Routed:
    """The orders in which each actor starts the oldest unit that is ready.

    ``younger``: per unit, how many microbatches younger it counts than it is.
    """
    return _RoutedScheduler(problem, first, younger).play()


_FORWARD, _BACKWARD, _FREE = range(3)


class _RoutedScheduler:
    """One pass of the scheduler."""

    def __init__(self, problem: RoutedProblem, first: First, younger: Sequence[float]) -> None:
        tasks, routes = problem.tasks, problem.routes
        self.problem, self.tasks, self.first = problem, tasks, first
        actors, count = range(len(tasks.actors)), range(len(tasks.stage))
        self.rank = [routes.microbatch(u) + younger[u] for u in tasks.unit]
        paces = [problem.speed(actor) for actor in tasks.actors]
        self.times = [
            tuple([time / paces[tasks.actor[task]] for time in problem.durations[tasks.stage[task]]]) for task in count
        ]
        self.limits = [with_slack(problem.limits[actor.position]) for actor in tasks.actors]
        self.missing = [list(needs) for needs in tasks.needs]
        self.at = [[0.0 for _ in count] for _ in self.missing]
        # Tasks by rank, age and number: whose F and I are ready, and whose W is left.
        self.ready: list[list[list[tuple[float, int, int]]]] = [[[] for _ in actors] for _ in range(3)]
        self.busy, self.did_forward = [False for _ in actors], [False for _ in actors]
        self.live, self.peaks, self.ends = ([0.0 for _ in actors] for _ in range(3))
        self.orders: list[Entries] = [[] for _ in actors]
        self.events: list[tuple[float, int, int, int]] = []  # time, actor, what, task
        # Where memory could deadlock an actor: by age of the unit, its forwards to do, oldest first, and what it holds.
        self.guard = [problem.guard(actor.position) for actor in tasks.actors]
        self.left: list[dict[int, int]] = [{} for _ in actors]
        self.held: list[dict[int, float]] = [{} for _ in actors]
        for age, actor in sorted(zip(tasks.age, tasks.actor, strict=True)) if any(self.guard) else ():
            self.left[actor][age] = self.left[actor].get(age, 0) + 1

    def play(self) -> Routed:
        tasks = self.tasks
        self.events = [
            (0.0, tasks.actor[task], _FORWARD, task) for task, needs in enumerate(tasks.needs[0]) if not needs
        ]
        heapq.heapify(self.events)
        while self.events:
            now, due = self.events[0][0], set()
            while self.events and self.events[0][0] <= now:
                _, actor, what, task = heapq.heappop(self.events)
                due.add(actor)
                if what == _FREE:
                    self.busy[actor] = False
                else:
                    heapq.heappush(self.ready[what][actor], (self.rank[task], tasks.age[task], task))
            for actor in sorted(due):
                if not self.busy[actor]:
                    self._decide(actor, now)
        actors = tasks.actors
        return Routed(
            dict(zip(actors, self.orders, strict=True)),
            dict(zip(actors, self.ends, strict=True)),
            dict(zip(actors, self.peaks, strict=True)),
        )

    def _decide(self, actor: int, now: float) -> None:
        forwards, backwards, weights = (ready[actor] for ready in self.ready)
        forward = self._admitted(actor, forwards) if forwards else None
        forward_first = self.first == "forward" or (self.first == "alternate" and not self.did_forward[actor])
        if backwards and not (forward_first and forward is not None):
            self._start(actor, I, heapq.heappop(backwards)[-1], now)
        elif forward is not None:
            if forward is forwards[0]:
                heapq.heappop(forwards)
            else:
                forwards.remove(forward)
                heapq.heapify(forwards)
            self._start(actor, F, forward[-1], now)
        elif weights:
            self._start(actor, W, heapq.heappop(weights)[-1], now)

    def _admitted(self, actor: int, forwards: list[tuple[float, int, int]]) -> tuple[float, int, int] | None:
        """The ready forward that the memory admits: the first, or that of the oldest unit."""
        sizes, guard, limit = self.problem.activation, self.guard[actor], self.limits[actor]
        room = limit - self.live[actor]
        if not guard:
            return forwards[0] if sizes[self.tasks.stage[forwards[0][-1]]] <= room else None
        oldest = next(iter(self.left[actor]))
        younger = math.fsum(held for age, held in self.held[actor].items() if age > oldest)
        for entry in (forwards[0], min(forwards, key=lambda entry: entry[1:])):
            size = sizes[self.tasks.stage[entry[-1]]]
            if size <= room and (entry[1] == oldest or younger + size + guard <= limit):
                return entry
        return None

    def _start(self, actor: int, kind: ActionKind, task: int, now: float) -> None:
        tasks, problem, stage, times = self.tasks, self.problem, self.tasks.stage[task], self.times[task]
        size, released = problem.activation[stage], problem.released[stage]
        if kind is F:
            done, self.did_forward[actor] = now + times[0], True
            self.peaks[actor] = max(self.peaks[actor], self.live[actor] + size)
            if self.guard[actor]:
                self._count(actor, tasks.age[task])
            if stage not in problem.forward_only:
                self._hold(actor, task, size)
                self._give(_BACKWARD, task, done)
            for after, message in tasks.outputs[task]:
                self._give(_FORWARD, after, done + message)
        elif kind is I:
            done, self.did_forward[actor] = now + times[1], False
            self._hold(actor, task, -released)
            if problem.whole:
                kind = B
            else:
                heapq.heappush(self.ready[2][actor], (self.rank[task], tasks.age[task], task))
            for before, message in tasks.inputs[task]:
                self._give(_BACKWARD, before, done + message)
        else:
            done = now + times[2]
            self._hold(actor, task, released - size)
        self.orders[actor].append((kind, stage, tasks.unit[task]))
        self.busy[actor], self.ends[actor] = True, done
        heapq.heappush(self.events, (done, actor, _FREE, task))

    def _count(self, actor: int, age: int) -> None:
        """One forward less to do of a unit."""
        left = self.left[actor]
        left[age] -= 1
        if not left[age]:
            del left[age]

    def _hold(self, actor: int, task: int, amount: float) -> None:
        self.live[actor] += amount
        if self.guard[actor]:
            held, age = self.held[actor], self.tasks.age[task]
            held[age] = held.get(age, 0.0) + amount

    def _give(self, what: int, task: int, at: float) -> None:
        """A result that a task waits for, there at ``at``."""
        missing, dates = self.missing[what], self.at[what]
        missing[task] -= 1
        dates[task] = max(dates[task], at)
        if not missing[task]:
            heapq.heappush(self.events, (dates[task], self.tasks.actor[task], what, task))
