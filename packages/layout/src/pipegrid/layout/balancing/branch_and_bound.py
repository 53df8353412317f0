"""Partitions where the stages of a rank share its memory: a bounded branch and bound over exact relaxations.

With several chunks per rank, a limit on a rank couples distant stages, and cutting the chain is no longer a chain of
independent choices. The relaxation gives every stage the whole limit of its rank to itself; `partition` solves that
exactly. Where its solution overdraws a rank by ``e`` at some peak (numbers of microbatches in flight per chunk), every
partition that keeps the limit must have less memory in at least one of the ``m`` chunks that hold any, by at least
``e / m`` (if each were above that, their sum would be above the limit). So the node branches into ``m`` children, each
with such a cap on one chunk. A child is a relaxation again, so its exact optimum bounds everything below it.

The search runs twice with the same branching: for the least bottleneck, then, under that ceiling, for the largest
smallest stage. Each time it dives from the best open node along its best children to a solution, or to a node that
cannot lead to a better one, and goes on from the best node then open (dives look at the bound first and at the
overdraft first in turn). At its bound of nodes it stops, and the best open node is still a proven bound:
the search says how far the solution can be from the optimum. With one chunk per rank the relaxation is the problem
itself: the root ends the search.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter

import attrs

from pipegrid.layout.balancing.partition import (
    Caps,
    Chain,
    Partition,
    least_bottleneck,
    least_spread,
    leftmost,
    measured,
    rightmost,
)


@attrs.frozen
class RankLimit:
    """The memory limit of a rank, and the combinations of microbatches in flight per chunk that occur (``peaks``)."""

    limit: int
    peaks: tuple[tuple[int, ...], ...]


@attrs.frozen
class SearchResult:
    """The result of a search.

    Attributes:
        partition: the best one found; None for none.
        bottleneck_bound: no partition that keeps the limits has a smaller bottleneck; None if none keeps them.
        optimal: proven to be best by both criteria, or proven that no partition keeps the limits.
        closest: without a partition, the cuts seen that overdraw the ranks least; None if some stage exceeds its
            rank's limit by itself.
    """

    partition: Partition | None
    bottleneck_bound: int | None
    optimal: bool
    closest: Sequence[int] | None = None


@attrs.frozen
class _Node:
    """Caps per stage, the bound that their relaxation gives, and the solution of the relaxation to branch on."""

    caps: tuple[Caps, ...]
    bound: int
    cuts: Sequence[int]
    overdraft: int


def own_caps(ranks: Sequence[RankLimit]) -> tuple[Caps, ...]:
    """The root relaxation: each stage has the whole limit of its rank to itself."""
    chunks = len(ranks[0].peaks[0])
    return tuple({max(peak[chunk] for peak in rank.peaks): rank.limit} for chunk in range(chunks) for rank in ranks)


def search(chain: Chain, ranks: Sequence[RankLimit], *, nodes: int) -> SearchResult:
    """The best partition that keeps every rank's limit, with at most ``nodes`` relaxations per criterion.

    The number of stages of ``chain`` is a multiple of the number of ``ranks``.
    """
    root = own_caps(ranks)

    def bottleneck(caps: tuple[Caps, ...], at_least: int) -> _Node | None:
        bound = least_bottleneck(chain, caps, at_least=at_least)
        if bound is None:
            return None
        options = [leftmost(chain, caps, bound), rightmost(chain, caps, bound)]
        return _node(chain, ranks, caps, bound, [cuts for cuts in options if cuts is not None])

    first = _best_first(chain, ranks, bottleneck, root, nodes=nodes)
    if first.best is None:
        return SearchResult(None, first.bound, first.complete, first.closest)
    ceiling = first.best.bound

    def spread(caps: tuple[Caps, ...], at_least: int) -> _Node | None:
        del at_least
        partition = least_spread(chain, caps, ceiling)
        return None if partition is None else _node(chain, ranks, caps, -partition.floor, [partition.cuts])

    second = _best_first(chain, ranks, spread, root, nodes=nodes)
    # The second search may end without a solution; the first one's remains.
    solutions = [measured(chain, node.cuts) for node in (first.best, second.best) if node is not None]
    best = max(solutions, key=attrgetter("floor"))
    return SearchResult(best, first.bound, first.complete and second.complete)


@attrs.frozen
class _BestFirst:
    best: _Node | None
    bound: int | None
    complete: bool
    closest: Sequence[int] | None = None


def _best_first(
    chain: Chain,
    ranks: Sequence[RankLimit],
    solve: Callable[[tuple[Caps, ...], int], _Node | None],
    root_caps: tuple[Caps, ...],
    *,
    nodes: int,
) -> _BestFirst:
    """The node with the least bound whose solution overdraws no rank."""
    root = solve(root_caps, 0)
    if root is None:
        return _BestFirst(None, None, complete=True)
    order, dives = count(), 1
    heap: list[tuple[int, int, int, _Node]] = []
    known = set()
    best: _Node | None = None
    node: _Node | None = root
    closest = root
    while node is not None:
        closest = min(closest, node, key=attrgetter("overdraft"))
        children: list[_Node] = []
        if node.overdraft == 0:
            if best is None or node.bound < best.bound:
                best = node
        else:
            for caps in _branches(chain, ranks, node):
                key = tuple(tuple(sorted(limits.items())) for limits in caps)
                if key in known:
                    continue
                known.add(key)
                if len(known) > nodes:
                    bound = min(node.bound, *(entry[0] for entry in heap)) if heap else node.bound
                    return _BestFirst(best, bound, complete=False, closest=closest.cuts)
                child = solve(caps, node.bound)
                if child is not None and (best is None or child.bound < best.bound):
                    children.append(child)
        by_bound, by_overdraft = attrgetter("bound", "overdraft"), attrgetter("overdraft", "bound")
        children.sort(key=by_bound if dives % 2 else by_overdraft, reverse=True)
        node = children.pop() if children else None
        for child in children:
            heapq.heappush(heap, (child.bound, child.overdraft, next(order), child))
        if node is None and heap:
            dives += 1
            node = heapq.heappop(heap)[-1]
            if best is not None and node.bound >= best.bound:
                node = None  # nor is any other open node better
    return _BestFirst(best, None if best is None else best.bound, complete=True, closest=closest.cuts)


def _node(
    chain: Chain, ranks: Sequence[RankLimit], caps: tuple[Caps, ...], bound: int, options: Sequence[Sequence[int]]
) -> _Node:
    """The node that branches on the solution of the relaxation that overdraws least."""
    totals = [sum(over for over, _ in overdrafts(chain, ranks, cuts)) for cuts in options]
    overdraft = min(totals)
    return _Node(caps, bound, options[totals.index(overdraft)], overdraft)


def _branches(chain: Chain, ranks: Sequence[RankLimit], node: _Node) -> list[tuple[Caps, ...]]:
    """The caps of the children: less memory for one of the chunks of the most overdrawn rank."""
    overdrawn = overdrafts(chain, ranks, node.cuts)
    rank = max(range(len(ranks)), key=lambda rank: overdrawn[rank][0])
    over, peak = overdrawn[rank]
    held = {
        stage: chain.memory(node.cuts[stage], node.cuts[stage + 1], flying)
        for stage, flying in zip(range(rank, chain.stages, len(ranks)), peak, strict=True)
    }
    holding = [stage for stage, memory in held.items() if memory > 0]
    branches = []
    for stage in holding:
        cap = held[stage] - -(-over // len(holding))
        if cap >= 0:
            flying = peak[stage // len(ranks)]
            limits = {**node.caps[stage], flying: min(cap, node.caps[stage].get(flying, cap))}
            branches.append((*node.caps[:stage], limits, *node.caps[stage + 1 :]))
    return branches


def overdrafts(chain: Chain, ranks: Sequence[RankLimit], cuts: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """The memory of each rank above its limit (0 for none), and the peak at which it occurs."""
    result = []
    for rank, limit in enumerate(ranks):
        spans = [(cuts[stage], cuts[stage + 1]) for stage in range(rank, chain.stages, len(ranks))]
        held, peak = max(
            (sum(chain.memory(*span, flying) for span, flying in zip(spans, peak, strict=True)), peak)
            for peak in limit.peaks
        )
        result.append((max(0, held - limit.limit), peak))
    return result
