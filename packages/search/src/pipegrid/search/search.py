"""The shortest plan that can be found for measured costs under a memory limit, in a given effort."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from attrs import define, evolve, field, frozen

from pipegrid.core.fields import Amount, Count, checked_arguments
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError
from pipegrid.plans.network.network import Objective, Orders, PassNetwork, as_network
from pipegrid.plans.network.problem import Entries, Problem
from pipegrid.plans.network.squeeze import Squeeze, squeezed
from pipegrid.plans.plan import Plan
from pipegrid.plans.simulate import GivenCosts
from pipegrid.search.anneal import Annealing
from pipegrid.search.bounds import lower_bound
from pipegrid.search.candidates import listed, named, planned, problems, with_whole_backwards
from pipegrid.search.exact import has_equal_costs, shortest
from pipegrid.search.found import Found, candidate, rank_of, value_of
from pipegrid.search.justify import justified
from pipegrid.search.pairs import hides, paired, without_hidden
from pipegrid.search.patterns import patterns


@frozen
class Progress:
    """A search under way.

    Attributes:
        share: of its effort, from 0 to 1.
        best: the objective so far.
        origin: the method that ``best`` comes from.

    Examples:
        >>> Progress(share=0.5, best=25.5, origin="zero_bubble_v").share
        0.5
    """

    share: float
    best: float
    origin: str


@checked_arguments(PlanError)
def search(
    costs: GivenCosts,
    memory_limit: float | None = None,
    *,
    num_positions: Count,
    num_microbatches: Count,
    num_stages: Count | None = None,
    placement: Iterable[int | Iterable[int]] | None = None,
    graph: ModuleGraph | None = None,
    forward_only: Iterable[str] = (),
    ahead: Count | None = None,
    objective: Objective = "makespan",
    effort: Amount = 1.0,
    time_limit: Amount | None = None,
    progress: Callable[[Progress], bool | None] | None = None,
) -> Found:
    """The best plan for ``costs`` whose positions never hold more than ``memory_limit``, by makespan or by span.

    The named schedules that keep to the cap compete with the plans of a list scheduler that knows the measured times of
    F, I, W and messages, under several dozen policies (fewer where the effort does not allow all). Without effort,
    these are all: `greedy`. Otherwise patterns of one microbatch are repeated, squeezed by the costs and reordered in
    warmup and cooldown; with equal costs on a few positions, all orders are searched; and the best few are improved by
    local moves. Of equal values, the lower peak wins.

    Where ``costs.hidden`` says that pairs save time, the schedules that have pairs compete as well, a forward and a
    backward that follow each other in the best plans are joined where that makes the step shorter, and the bound is one
    of all pairs.

    Args:
        costs: times, memory and messages.
        memory_limit: in the unit of ``costs.activation`` (by default microbatches, a chunk counting its share of a
            position), counted from the F of a microbatch to the end of its W; None: unlimited.
        num_positions: p.
        num_microbatches: of a step.
        num_stages: None: as many as ``costs`` are given for, or one per position.
        placement: None: each that suits the stages: one stage per position, round and round, or (with two per position)
            down and back up.
        graph: modules in place of a chain.
        forward_only: frozen modules of the graph, which run no backward.
        ahead: the most microbatches that a frozen module is ahead of each that it feeds (None: any number). A plan of
            computes keeps to it in the costs' own time only; pass ``ahead`` to `lower` as well, which holds the
            messages back.
        objective: what is least.
        effort: scales the work: about 10 s at 1 for most sizes, under a minute for the largest. The work is counted in
            operations, so the result is the same on every machine.
        time_limit: seconds after which the search ends with the best so far.
        progress: called now and then; where it returns True, the search ends with the best so far.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", sections 3 and 4 (patterns); Qi et al.
    2023, "Zero Bubble Pipeline Parallelism", sections 3 (policies) and 4 (``"span"``: the optimizer's step bypasses the
    barrier). The guarantee against memory deadlock is ours (see `list_scheduler`).

    Raises:
        PlanError: sizes below 1 or that contradict each other, or a cap below the memory of one microbatch (the
            least that works is named).
        CostsError: costs for another number of stages.

    Examples:
        >>> from pipegrid.plans import Costs
        >>> found = search(Costs(F=1.0, I=1.1, W=0.7), 2, num_positions=2, num_microbatches=4, effort=0.1)
        >>> round(found.makespan, 2), found.bound <= found.makespan
        (12.6, True)
    """
    shapes = problems(
        costs,
        memory_limit,
        num_positions=num_positions,
        num_microbatches=num_microbatches,
        num_stages=num_stages,
        placement=placement,
        graph=graph,
        forward_only=forward_only,
        ahead=ahead,
    )
    searches = [_Search(problem, objective, effort / len(shapes)) for problem in shapes]
    clock = _Clock(searches, time_limit, progress)
    for one in searches:
        one.run(clock)
    best = min((one for one in searches if one.offered), key=lambda one: one.rank(one.offered[0]))
    return evolve(best.offered[0], bound=best.bound, optimal=best.is_done(), complete=not clock.stopped)


def greedy(
    costs: GivenCosts,
    memory_limit: float | None = None,
    *,
    num_positions: int,
    num_microbatches: int,
    num_stages: int | None = None,
    placement: Iterable[int | Iterable[int]] | None = None,
    graph: ModuleGraph | None = None,
    forward_only: Iterable[str] = (),
    ahead: Count | None = None,
) -> Plan:
    """The plan of a `search` without effort: never longer than the best of the named schedules under the cap.

    Examples:
        >>> from pipegrid.plans import Costs, simulate
        >>> plan = greedy(Costs(F=1.0, I=1.1, W=0.7), 4, num_positions=4, num_microbatches=8, num_stages=8)
        >>> max(simulate(plan).peaks()) <= 4
        True
    """
    return search(
        costs,
        memory_limit,
        num_positions=num_positions,
        num_microbatches=num_microbatches,
        num_stages=num_stages,
        placement=placement,
        graph=graph,
        forward_only=forward_only,
        ahead=ahead,
        effort=0.0,
    ).plan


ANNEALED = 4
"""The number of different orders that are improved."""

PAIRED = 8
"""The number of best plans that are tried with pairs, without effort."""

UNIT = 20_000_000
"""Operations timed at an effort of 1; small problems take fewer, as their orders are soon exhausted."""

MOST = 60_000_000

TOLD = 100
"""The least number of progress reports while orders are improved."""

SQUEEZED, JUSTIFIED, LISTED, LISTED_GRAPH, STATE = 8, 12, 4000, 60, 20
"""The cost per operation of squeezing a pattern, justifying orders, all list schedules of a chain and one of modules,
and of a state of `shortest`, in the time it takes to time one operation of fixed orders."""


@define
class _Clock:
    """The end of a search that comes early, and reports of its progress."""

    searches: list[_Search]
    time_limit: float | None
    progress: Callable[[Progress], bool | None] | None
    began: float = field(factory=time.monotonic)
    stopped: bool = False

    def stop(self) -> bool:
        """Whether the search is to end."""
        if self.time_limit is not None and time.monotonic() - self.began >= self.time_limit:
            self.stopped = True
        return self.stopped

    def tell(self) -> None:
        """Report how far the search is."""
        found = [one.offered[0] for one in self.searches if one.offered]
        if self.progress is None or not found:
            return
        objective = self.searches[0].objective
        best = min(found, key=lambda entry: value_of(entry, objective))
        shares = [min(1.0, one.spent / one.total) if one.total else 1.0 for one in self.searches]
        if self.progress(Progress(sum(shares) / len(shares), value_of(best, objective), best.origin)):
            self.stopped = True


class _Search:
    """The search on one placement."""

    def __init__(self, problem: Problem, objective: Objective, effort: float) -> None:
        self.problem, self.objective = problem, objective
        self.network = as_network(problem)
        self.hides = hides(problem.costs)
        bounded = self.network
        if self.hides:
            bounded = as_network(evolve(problem, costs=without_hidden(problem.costs, problem.graph.num_stages)))
        self.bound = lower_bound(bounded, objective)
        self.operations = 3 * problem.graph.num_stages * problem.num_microbatches
        self.budget = effort * min(max(UNIT, 20_000 * self.operations), MOST)
        self.total = 1.5 * self.budget  # with justification, the last step
        self.spent = 0.0
        self.offered: list[Found] = []  # the best, in order
        self.proved = False
        # Distinct orders, each with its value and origin.
        self.starts: dict[tuple[tuple[int, ...], ...], tuple[float, str]] = {}

    def rank(self, entry: Found) -> tuple[float, float]:
        return rank_of(entry, self.objective)

    def run(self, clock: _Clock) -> None:
        steps = [self._from_schedules()]
        if self.budget:
            steps += [self._from_patterns(), self._from_all_orders(), self._improve(clock), self._justify(clock)]
        for step in steps:
            for _ in step:
                clock.tell()
                if clock.stop():
                    self._pair()
                    return
            if self.is_done():
                break
        self._pair()
        self.spent = self.total
        clock.tell()

    def _pair(self) -> None:
        """Join what follows each other in the best plans, where pairs save time."""
        if not self.hides:
            return
        for found in self.offered[: 1 if self.budget else PAIRED]:
            self._offer(paired(found, self.problem, self.objective))
        for _, orders, origin in self._best_starts(ANNEALED):
            for entry in self._plans(orders, origin):
                self._offer(entry and paired(entry, self.problem, self.objective))

    def is_done(self) -> bool:
        """Whether the best so far is known to be the shortest."""
        least = self.bound * (1 + 1e-9)
        return self.proved or (bool(self.offered) and value_of(self.offered[0], self.objective) <= least)

    def _offer(self, entry: Found | None) -> None:
        if entry is not None:
            self.offered = sorted([*self.offered, entry], key=self.rank)[:PAIRED]

    def _start(self, value: float, orders: Orders, origin: str) -> None:
        self.starts.setdefault(tuple(map(tuple, orders)), (value, origin))

    def _plans(self, orders: Orders, origin: str) -> Iterator[Found | None]:
        """The plans of ``orders``, with backwards split and with whole ones."""
        entries: list[Entries] = [[self.network.action(operation) for operation in order] for order in orders]
        for written in (entries, with_whole_backwards(entries)):
            yield candidate(origin, planned(self.problem, written), self.problem)

    def _offer_orders(self, orders: Orders, origin: str) -> None:
        for entry in self._plans(orders, origin):
            self._offer(entry)

    # The steps; each yields after a piece of work.

    def _from_schedules(self) -> Iterator[None]:
        """The named schedules, and the list schedules: a few where all would take more than a quarter of an effort."""
        one_module = len(self.problem.graph.modules) == 1
        every = not self.budget or LISTED * self.operations <= self.budget / 4
        cost, listing = (LISTED / 200 if one_module else LISTED_GRAPH) * self.operations, 0.0
        for source in (named, listed):
            for entry in source(self.problem):
                self._offer(entry)
                # The other steps of a large chain are as without the others.
                if self.budget and (every or not one_module or not listing):
                    orders = self.network.orders_of(entry.plan)
                    if all(map(self.network.keeps_to_limit, orders)):
                        timing = self.network.timed(orders, self.objective)
                        if timing is not None:  # a frozen module may be farther ahead than its queue is long
                            self._start(timing.value, orders, entry.origin)
                    if source is listed:
                        self.spent += cost
                if source is listed:
                    listing += cost
                yield
                if source is listed and not every and listing >= self.budget / (12 if one_module else 3):
                    break

    def _from_patterns(self) -> Iterator[None]:
        """Each pattern squeezed in two ways, the best in all ways; first for few microbatches where there are many."""
        found = patterns(self.network) if self.network.is_chain else []
        if not found:
            return
        few = min(self.problem.num_microbatches, max(2 * self.network.num_positions, 24))
        chain = as_network(self.problem, few)
        cost = SQUEEZED * chain.num_operations
        ways = list(_squeezes(chain))
        share = max(self.budget / 3, self.spent + 40 * cost)
        kept: list[tuple[float, int, int]] = []  # value, pattern, way
        width = max(ANNEALED, int((share - self.spent) / cost / len(ways) / 2))
        fitting = max(ANNEALED, int((share - self.spent) / 2 / cost / 2))  # patterns of the first round, evenly spread

        def squeeze(network: PassNetwork, pattern: int, way: int) -> float | None:
            """The value of a pattern squeezed in one way; whole steps are kept as starts."""
            result = squeezed(network, found[pattern].dates, ways[way], objective=self.objective)
            self.spent += SQUEEZED * network.num_operations
            if result is not None and network.num_microbatches == self.network.num_microbatches:
                self._start(*result, "pattern")
            return None if result is None else result[0]

        for index, tried in enumerate((range(2), range(2, len(ways)))):
            best = list(dict.fromkeys(pattern for _, pattern, _ in sorted(kept)))[:width]
            ends = share if index else (self.spent + share) / 2
            for pattern in best if index else range(0, len(found), -(-len(found) // fitting)):
                values = [(squeeze(chain, pattern, way), way) for way in tried]
                kept += [(value, pattern, way) for value, way in values if value is not None]
                yield
                if self.spent >= ends and len(kept) >= ANNEALED:
                    break
        if few != self.problem.num_microbatches:
            for _, pattern, way in sorted(kept)[: 2 * ANNEALED]:
                squeeze(self.network, pattern, way)
                yield
        for _, orders, origin in self._best_starts(1):
            self._offer_orders(orders, origin)
            yield

    def _from_all_orders(self) -> Iterator[None]:
        """All orders, where costs are equal and positions few."""
        chain = self.network
        if not chain.is_chain or self.objective != "makespan" or chain.num_stages > 10 or not has_equal_costs(chain):
            return
        states = int((self.budget - self.spent) / 2 / STATE)
        result = shortest(chain, self.offered[0].makespan, max_states=states)
        self.spent += result.states * STATE
        self.proved = result.proved and not self.hides  # of orders without pairs
        if result.orders is not None:
            timing = chain.timed(result.orders)
            assert timing is not None
            self._start(timing.value, result.orders, "all orders")
            self._offer_orders(result.orders, "all orders")
        yield

    def _improve(self, clock: _Clock) -> Iterator[None]:
        """The best few orders, improved; then the best of them once more, with the rest of the effort."""
        chosen = self._best_starts(ANNEALED)
        for index, start in enumerate([*chosen, None]):
            left = int((self.budget - self.spent) / self.operations)
            tries = left // 2 if start is None else left // (2 * (ANNEALED - index))
            if tries < 1:
                return
            self._anneal(clock, start or self._best_starts(1)[0], tries, index)
            yield

    def _anneal(self, clock: _Clock, start: tuple[float, Orders, str], tries: int, seed: int) -> None:
        _, orders, origin = start
        before, duration = self.spent, sum(self.network.duration) / len(self.network.duration)
        annealing = Annealing(self.network, orders, self.objective, seed=seed)
        value, orders = annealing.run(tries, 0.1 * duration, partial(self._ends, clock))
        self.spent = before + tries * self.operations
        origin = origin if origin.endswith("improved") else f"{origin}, improved"
        self._start(value, orders, origin)
        self._offer_orders(orders, origin)

    def _justify(self, clock: _Clock) -> Iterator[None]:
        """All orders, justified while that makes them shorter; then the best of all improved.

        The longest are tried as well: a slow start or end says little of what is between.
        """
        if any(len(places) > 1 for places in self.network.positions):
            return
        ends = (self.spent + self.total) / 2
        for value, orders, origin in self._best_starts(len(self.starts)):
            best, better, before = value, orders, self.network.timed(orders, self.objective)
            while before is not None and self.spent < ends:
                better = justified(self.network, better)
                self.spent += JUSTIFIED * self.operations
                before = self.network.timed(better, self.objective)
                if before is None or before.value >= best:
                    break
                best = before.value
                self._start(best, better, f"{origin}, justified")
                yield
        best_start = self._best_starts(1)[0]
        self._offer_orders(*best_start[1:])
        tries = int((self.total - self.spent) / self.operations)
        if tries > 0 and not self.is_done():
            self._anneal(clock, best_start, tries, ANNEALED + 1)
            yield

    def _ends(self, clock: _Clock, best: float) -> bool:
        """Count one more timed move, and report progress each ``1 / TOLD`` of the effort; whether annealing ends."""
        before, self.spent = self.spent, self.spent + self.operations
        if int(self.spent * TOLD / self.total) > int(before * TOLD / self.total):
            clock.tell()
        return clock.stop() or best <= self.bound * (1 + 1e-9)

    def _best_starts(self, count: int) -> list[tuple[float, Orders, str]]:
        ranked = sorted(self.starts.items(), key=lambda entry: entry[1][0])[:count]
        return [(value, [list(order) for order in orders], origin) for orders, (value, origin) in ranked]


def _squeezes(chain: PassNetwork) -> Iterator[Squeeze]:
    """The ways to squeeze that `search` tries, the most promising first."""
    even = len(set(chain.duration)) == 1 and not any(chain.lag)
    half, whole = max(1, chain.num_positions // 2), chain.num_positions
    for patience in (0.0,) if even else (0.5, 0.0, 1.0):
        yield Squeeze(0, "backward", patience)
        for ahead in dict.fromkeys((half, whole, 2, 1)):
            yield Squeeze(ahead, "backward", patience)
            yield Squeeze(ahead, "last stage", patience)
            yield Squeeze(ahead, "last forward", patience)
