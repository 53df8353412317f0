"""A list scheduler: a free actor starts the call that a policy ranks first among those that are ready.

An actor is a position of a replica; where all replicas act alike there is one of each position. Each has an order of
its own, and is done after its own last ``W``: the optimizer's step of its stage waits for no other stage.

Memory cannot deadlock it. An actor of one stage always has an ``I`` or ``W`` to come for what it holds: by induction
from the sinks, whose ``I`` wait for their own ``F`` alone. On an actor of several stages, let ``u`` be the oldest unit
with an ``F`` to do there, and ``A`` what a unit holds in all of them. An ``F`` of a younger unit is admitted only if
the younger ones then hold at most ``limit - A``. So once everything older than the oldest unfinished unit of all has
drained (backwards need no memory), that unit finds room on every actor. Age is one order for all actors: by
microbatch, then by home.

A compute of a stage that lies on several positions starts on all of them at once, when all are free and ready for it.

Stages of frozen modules run no backward and hold their memory during their forward alone. A queue bounds how far they
run ahead; it always has room for the next microbatch of the slowest consumer, so it deadlocks nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from attrs import frozen

from pipegrid.plans.network.problem import Entries, Problem
from pipegrid.plans.plan import ActionKind, Actor
from pipegrid.search.calls import BACKWARD, FORWARD, WEIGHTS, Calls, Lane, Links, RoutedProblem

WAKE = 3
"""An event after which an actor looks again; the others are inputs that arrive, `FORWARD` and `BACKWARD`."""

First: TypeAlias = Literal["backward", "alternate", "forward"]
"""The kind that a free actor starts first: backwards, each after the other, or forwards."""

Rank: TypeAlias = tuple[float, float, int, int]
"""The least is first among ready calls of a kind; the call comes last."""


@frozen
class Policy:
    """The ranking by which a free actor chooses among ready calls, the oldest unit first.

    A ``W`` starts when nothing else is ready, if it ends no later than ``patience`` of its duration after the next
    input arrives (infinite: right after its ``I``). ``deep``: among forwards, later stages first. ``warmup``: forwards
    a stage may be ahead of its backwards, per step of distance to the sink (None: as memory allows). ``block``:
    computes of a stage on several positions come that many in a row, and its positions stop for them: forwards when its
    consumer has used up the last block, backwards when a block of gradients is there, each with its ``W`` (None:
    whenever all its positions are free at once). ``younger``: per unit, how many microbatches younger it counts than it
    is (empty: none). ``later``: of the backwards of a unit that are ready at once, that of the later stage is first.
    """

    first: First
    patience: float = 1.0
    deep: bool = False
    warmup: float | None = None
    block: int | None = None
    younger: Sequence[float] = ()
    later: bool = True


def policies(problem: Problem) -> Iterator[Policy]:
    """The policies that `greedy` tries, a few dozen; the warmups end with as many forwards as a round trip takes."""
    firsts: tuple[First, ...] = ("backward", "forward", "alternate")
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


@frozen
class Listed:
    """The orders of a step, per living actor, as kind, stage and unit; when each ends, and the most it holds."""

    orders: Mapping[Actor, Entries]
    ends: Mapping[Actor, float]
    peaks: Mapping[Actor, float]

    @property
    def makespan(self) -> float:
        """The end of the last actor."""
        return max(self.ends.values())


def list_schedule(problem: RoutedProblem, policy: Policy) -> Listed:
    """The orders that ``policy`` leads to."""
    return _ListScheduler(problem.calls, policy).play()


class _Memory:
    """The memory of an actor; by age of the units only where several stages could deadlock it (``guard``)."""

    __slots__ = ("guard", "held", "left", "limit", "live", "newest", "oldest", "peak")

    def __init__(self, limit: float, guard: float, left: list[int]) -> None:
        self.limit, self.guard = limit, guard
        self.live = self.peak = 0.0
        self.left, self.held = left, [0.0] * len(left)  # forwards to do, memory
        self.oldest, self.newest = 0, 0
        self.count(0, done=0)

    def admits(self, size: float, age: int, *, trained: bool) -> bool:
        """Whether a forward fits, and leaves room for the oldest unit."""
        if self.live + size > self.limit:
            return False
        if not (trained and self.guard) or age == self.oldest:
            return True
        return sum(self.held[self.oldest + 1 : self.newest + 1]) + size + self.guard <= self.limit

    def hold(self, amount: float, age: int) -> None:
        """Take ``amount`` for a unit, or release it."""
        self.live += amount
        if self.guard:
            self.held[age] += amount

    def count(self, age: int, done: int = 1) -> None:
        """Note that a unit has ``done`` forwards less to do."""
        if self.guard:
            self.left[age] -= done
            self.newest = max(self.newest, age)
            while self.oldest < len(self.left) and not self.left[self.oldest]:
                self.oldest += 1


class _ListScheduler:
    """One pass of the scheduler under one policy."""

    def __init__(self, calls: Calls, policy: Policy) -> None:
        problem, seats, actors = calls.problem, calls.seats, range(len(calls.actors))
        self.calls, self.policy, self.ahead = calls, policy, problem.ahead
        self.seats, self.seat_of = seats, calls.seat
        self.kinds = (ActionKind.F, ActionKind.B if problem.whole else ActionKind.I, ActionKind.W)
        self.at: list[list[int]] = [[] for _ in actors]
        for number, seat in enumerate(seats):
            for actor in seat.actors:
                self.at[actor].append(number)
        self.memory = [
            _Memory(limit, guard, self._forwards_left(actor) if guard else [])
            for actor, (limit, guard) in enumerate(zip(calls.limits, calls.guards, strict=True))
        ]
        self.rank = self._ranks()
        self.missing = [list(needs) for needs in calls.needs]
        self.arrives = [[0.0] * len(calls.seat) for _ in self.missing]
        self.ready: list[list[list[Rank]]] = [[[] for _ in seats] for _ in range(3)]
        self.done = [[0] * len(seats) for _ in range(3)]
        self.lane_free = defaultdict[Lane, float](float)
        self.busy_until = [0.0 for _ in actors]
        self.did_forward = [False for _ in actors]
        self.orders: list[Entries] = [[] for _ in actors]
        # Of the blocks of stages on several positions that are under way; and actors that may wait for this one.
        self.block_left = [[0] * len(seats) for _ in range(2)]
        self.short_blocks = False
        # Where a stage lies on several positions, when the inputs of each arrive.
        self.comes = defaultdict[tuple[int, int, int], float](float)
        self.shared = any(len(seat.actors) > 1 for seat in seats)
        self.in_blocks = [policy.block is not None and len(seat.actors) > 1 for seat in seats]
        stops = [
            {actor}.union(*[seats[one].actors for one in self.at[actor] if self.in_blocks[one]]) for actor in actors
        ]
        self.wakes = [set[int]().union(*[stops[actor] for actor in seat.actors]) for seat in seats]
        self.events: list[tuple[float, int, int]] = []  # time, what, and a call or (`WAKE`) an actor

    def _forwards_left(self, actor: int) -> list[int]:
        left = [0] * self.calls.problem.routes.num_units
        for number in self.at[actor]:
            for call in self.seats[number].calls if self.seats[number].trained else ():
                left[self.calls.age[call]] += 1
        return left

    def _ranks(self) -> list[list[Rank]]:
        """Per kind and call, its rank."""
        calls, younger, deep = self.calls, self.policy.younger, self.policy.deep
        forwards: list[Rank] = []
        backwards: list[Rank] = []
        for call, (number, unit, microbatch, age) in enumerate(
            zip(calls.seat, calls.unit, calls.microbatch, calls.age, strict=True)
        ):
            stage, counts = self.seats[number].stage, microbatch + younger[unit] if younger else microbatch
            forwards.append((-stage, counts, age, call) if deep else (counts, age, stage, call))
            backwards.append((counts, age, -stage if self.policy.later else stage, call))
        return [forwards, backwards, backwards]

    def play(self) -> Listed:
        self.events = [(0.0, FORWARD, call) for call, needs in enumerate(self.calls.needs[FORWARD]) if not needs]
        done = -1
        while done < sum(map(len, self.orders)):
            done = sum(map(len, self.orders))
            self._run_events()
            # Where the memory is full and no block of gradients is: begin one with those there are.
            self.short_blocks = True
            now = max(self.busy_until)
            self.events = [(now, WAKE, actor) for actor in range(len(self.at))]
        actors = self.calls.actors
        return Listed(
            dict(zip(actors, self.orders, strict=True)),
            dict(zip(actors, self.busy_until, strict=True)),
            {actor: memory.peak for actor, memory in zip(actors, self.memory, strict=True)},
        )

    def _run_events(self) -> None:
        events = self.events
        heapq.heapify(events)
        while events:
            now, due = events[0][0], set[int]()
            while events and events[0][0] <= now:
                _, what, number = heapq.heappop(events)
                if what == WAKE:
                    due.add(number)
                else:
                    seat = self.seat_of[number]
                    heapq.heappush(self.ready[what][seat], self.rank[what][number])
                    due.update(self.seats[seat].actors)
            for actor in sorted(due):
                if self.busy_until[actor] <= now:
                    self._decide(actor, now)

    def _decide(self, actor: int, now: float) -> None:
        if self.policy.block is not None and self._stops_for_block(actor, now, self.policy.block):
            return
        free = self.at[actor]
        if self.shared:
            free = [one for one in free if not self.in_blocks[one] and self._all_free(one, now)]
        first = self.policy.first
        forward_first = first == "forward" or (first == "alternate" and not self.did_forward[actor])
        backward = self._first(BACKWARD, free)
        forward = self._forward(actor, free) if backward is None or forward_first else None
        if forward is not None:
            self._start(FORWARD, forward, now)
        elif backward is not None:
            self._start(BACKWARD, backward, now)
        elif self.policy.patience < math.inf:
            self._fill(actor, free, now)

    def _first(self, what: int, free: Sequence[int]) -> Rank | None:
        """The first ready compute; a forward is one that is admitted."""
        best = None
        for ready in map(self.ready[what].__getitem__, free):
            if ready and (best is None or ready[0] < best) and (what != FORWARD or self._admits(ready[0][-1])):
                best = ready[0]
        return best

    def _forward(self, actor: int, free: Sequence[int]) -> Rank | None:
        """The first ready forward that is admitted; or that of the oldest unit, if others count as older."""
        best, memory = self._first(FORWARD, free), self.memory[actor]
        if best is None and self.policy.younger and memory.guard:
            ready = itertools.chain.from_iterable(map(self.ready[FORWARD].__getitem__, free))
            oldest = (one for one in ready if self.calls.age[one[-1]] == memory.oldest)
            best = min((one for one in oldest if self._admits(one[-1])), default=None)
        return best

    def _fill(self, actor: int, free: Sequence[int], now: float) -> None:
        """Start a ``W`` where nothing else is ready, unless a forward or backward becomes ready too soon."""
        rank = self._first(WEIGHTS, free)
        if rank is None:
            return
        patience, takes = self.policy.patience, self.seats[self.seat_of[rank[-1]]].times[WEIGHTS]
        if patience >= 1.0 or now + takes <= self._next_arrival(actor, now) + patience * takes:
            self._start(WEIGHTS, rank, now)

    def _next_arrival(self, actor: int, now: float) -> float:
        """The arrival of the next input that is on its way and may be used; units come in order."""
        soonest = math.inf
        for number in self.at[actor]:
            calls = self.seats[number].calls
            for what in (FORWARD, BACKWARD):
                done = self.done[what][number]
                if done == len(calls) or self.missing[what][calls[done]]:
                    continue
                at = self.comes[what, calls[done], actor] if self.shared else self.arrives[what][calls[done]]
                if now < at < soonest and (what == BACKWARD or self._admits(calls[done], (actor,))):
                    soonest = at
        return soonest

    def _stops_for_block(self, actor: int, now: float, block: int) -> bool:
        """Start a compute of a block, or wait until all positions are free for it; False: none is due."""
        for number in self.at[actor]:
            if not self.in_blocks[number]:
                continue
            due = self._blocks_due(number, block)
            if not any(due):
                continue
            if self._all_free(number, now):
                what = BACKWARD if due[BACKWARD] else FORWARD
                self.block_left[what][number] = due[what] - 1
                if what == BACKWARD:
                    self.short_blocks = False
                self._start(what, self.ready[what][number][0], now)
            return True
        return False

    def _blocks_due(self, number: int, block: int) -> tuple[int, int]:
        """Forwards and backwards of a stage that are left of a block, or begin one."""
        calls, started = self.seats[number].calls, self.done[FORWARD]
        there = len(self.ready[BACKWARD][number])
        gradients = min(there, self.block_left[BACKWARD][number])
        least = 1 if self.short_blocks else min(block, len(calls) - self.done[BACKWARD][number])
        if not gradients and there >= least:
            gradients = there
        consumers = {self.seat_of[after] for after, _ in self.calls.outputs[calls[0]]}
        ahead = started[number] - min((started[one] for one in consumers), default=started[number])
        results = self.block_left[FORWARD][number] or (block if ahead <= 0 else 0)
        ready = self.ready[FORWARD][number]
        if not ready or not self._admits(ready[0][-1]):
            results = self.block_left[FORWARD][number] = 0
        return results, gradients

    def _all_free(self, number: int, now: float) -> bool:
        return all(self.busy_until[actor] <= now for actor in self.seats[number].actors)

    def _admits(self, call: int, actors: Sequence[int] = ()) -> bool:
        """Whether a forward may start; ``actors``: those whose memory is asked (empty: all)."""
        number = self.seat_of[call]
        seat, warmup, started = self.seats[number], self.policy.warmup, self.done[FORWARD]
        ahead = started[number] - self.done[BACKWARD][number]
        if warmup is not None and seat.trained and ahead > warmup * seat.distance:
            return False
        if self.ahead is not None and any(started[number] - started[other] >= self.ahead for other in seat.queues):
            return False
        size, age, trained = seat.size, self.calls.age[call], seat.trained
        return all(self.memory[actor].admits(size, age, trained=trained) for actor in actors or seat.actors)

    def _start(self, what: int, rank: Rank, now: float) -> None:
        ready, call = self.ready[what][self.seat_of[rank[-1]]], rank[-1]
        if ready[0] is rank:
            heapq.heappop(ready)
        else:
            ready.remove(rank)
            heapq.heapify(ready)
        self._run(what, call, now)

    def _run(self, what: int, call: int, now: float) -> None:
        calls, number = self.calls, self.seat_of[call]
        seat, age = self.seats[number], calls.age[call]
        done = now + seat.times[what] + seat.overhead
        self.done[what][number] += 1
        for actor in seat.actors:
            memory = self.memory[actor]
            self.orders[actor].append((self.kinds[what], seat.stage, calls.unit[call]))
            self.busy_until[actor] = done
            if what == FORWARD:
                self.did_forward[actor] = True
                memory.peak = max(memory.peak, memory.live + seat.size)
                if seat.trained:
                    memory.count(age)
                    memory.hold(seat.size, age)
            elif what == BACKWARD:
                self.did_forward[actor] = False
                memory.hold(-seat.released, age)
            else:
                memory.hold(seat.released - seat.size, age)
        if what == FORWARD:
            if seat.trained:
                self._give(BACKWARD, call, (), done)
            for after, links in calls.outputs[call]:
                self._give(FORWARD, after, links, done)
            for feeder in seat.feeders:  # its queue has room again
                for actor in self.seats[feeder].actors:
                    heapq.heappush(self.events, (now, WAKE, actor))
        elif what == BACKWARD:
            for before, links in calls.inputs[call]:
                self._give(BACKWARD, before, links, done)
            if self.policy.patience == math.inf or self.in_blocks[number]:
                self._run(WEIGHTS, call, done)
                return
            if self.kinds[BACKWARD] is ActionKind.I:
                heapq.heappush(self.ready[WEIGHTS][number], self.rank[WEIGHTS][call])
        for actor in self.wakes[number]:
            heapq.heappush(self.events, (done, WAKE, actor))

    def _give(self, what: int, call: int, links: Links, done: float) -> None:
        """A result that a call waits for."""
        arrives: dict[int, float] = {}  # by actor
        for lane, occupied, latency in links:
            leaves = self.lane_free[lane] = max(self.lane_free[lane], done) + occupied
            arrives[lane[1]] = max(arrives.get(lane[1], 0.0), leaves + latency)
        for actor in self.seats[self.seat_of[call]].actors if self.shared else ():
            self.comes[what, call, actor] = max(self.comes[what, call, actor], arrives.get(actor, done))
        self.missing[what][call] -= 1
        at = self.arrives[what][call] = max(self.arrives[what][call], done, *arrives.values())
        if not self.missing[what][call]:
            heapq.heappush(self.events, (at, what, call))
