"""The exact contiguous partition of a chain into stages: least bottleneck, then least spread.

**The problem.** A chain of ``n`` layers with costs, cumulated as ``cost[0] = 0 ... cost[n]``, is cut at ``0 = c[0] <=
c[1] <= ... <= c[S] = n``; stage ``k`` is the layers from ``c[k]`` up to ``c[k+1]`` and may be empty. Each cut has
bounds of its own, ``low[k] <= c[k] <= high[k]``, and each stage may have caps on its memory. Wanted: the cuts with
the least bottleneck ``B`` (largest stage cost), and among those the ones with the least spread (largest minus
smallest stage cost). All numbers are integers, so every comparison is exact; no step assumes anything of the costs.

**Bottleneck.** A ceiling ``U`` on stage costs, caps and bounds from above only ever ask a stage to begin later or to
end earlier, so cutting each stage as late as allowed from the left (`rightmost`) reaches, cut by cut, the latest
place that any partition under ``U`` has: it is one itself, or there is none. ``B`` is the least feasible ``U``, by
bisection; each success moves the upper end down to the bottleneck that it found, each failure the lower end up to the
least ceiling under which some cut would have been later.

**Spread.** All partitions under the ceiling ``B`` have bottleneck ``B``, so the least spread is the largest floor
``L`` for which every stage cost can lie in ``[L, B]``. For fixed ``L`` every constraint is of one of two forms: stage
``k`` at its present end must begin no earlier than some place (ceiling, caps), or at its present begin must end no
earlier than some place (floor); both places grow with the cut they are computed from. So raising cuts only as far as
a violated constraint demands, from cuts that lie below every solution, stays below every solution; it stops at the
least solution, or passes `rightmost`, and then there is none (`_raise_cuts`). A larger ``L`` demands more, so its
least solution lies above that of a smaller one, and each search goes on where the last success stopped. ``L`` is
found by bisection; each success moves the lower end up to the smallest stage cost that it found, each failure the
upper end down to the least floor that fails by the same raises. The result has the earliest cuts of all optimal
partitions: light early stages, which is where 1F1B keeps most microbatches in flight.

**Time.** Each raise moves a cut by at least one place and costs ``O(log n)``. A probe that succeeds starts where the
last success stopped, so all successes together make at most ``sum(top - bottom)`` raises, the number of places
between `leftmost` and `rightmost`, never more than ``n S`` and mostly far fewer. A probe that fails can make as many
for itself, hence the order of the probes: one that exceeds a number of steps is given up and its floor set aside
as doubtful; when only doubtful floors are left, the least of them is tried to the end, and either it fails, which
settles all the others, or it succeeds, and patience doubles. So a long failure is paid for once.

The floor-and-ceiling form and the idea of shifting cuts one way come from Lucertini, Perl and Simeone, "Most uniform
path partitioning and its use in image processing" (Discrete Applied Mathematics 42, 1993); the bottleneck probe is
the folklore one (see Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", JPDC 64, 2004).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import attrs

Caps = Mapping[int, int]
"""Caps on one stage: number of microbatches in flight -> the most that fixed + number * moving memory may be."""


@attrs.frozen
class Chain:
    """Layers in a row, cumulated: entry ``i`` is the sum over the first ``i`` layers.

    Attributes:
        cost: cumulated cost; ``n + 1`` integers that start at 0 and do not fall.
        fixed: cumulated memory that is held once.
        moving: cumulated memory per microbatch in flight.
        low: for each of the ``S + 1`` cuts, the first place it may have; does not fall.
        high: the last one; does not fall.
    """

    cost: Sequence[int]
    fixed: Sequence[int]
    moving: Sequence[int]
    low: Sequence[int]
    high: Sequence[int]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.low) - 1

    def memory(self, start: int, end: int, flying: int) -> int:
        """Memory of the layers from ``start`` up to ``end`` with ``flying`` microbatches in flight."""
        return self.fixed[end] - self.fixed[start] + flying * (self.moving[end] - self.moving[start])


@attrs.frozen
class Partition:
    """Cuts, with the largest and the smallest cost of a stage between them."""

    cuts: tuple[int, ...]
    bottleneck: int
    floor: int


def best_partition(chain: Chain, caps: Sequence[Caps]) -> Partition | None:
    """The partition with the least bottleneck, among those the one with the least spread and the earliest cuts.

    ``caps``: for each stage, possibly none. None where no partition respects caps and bounds.
    """
    ceiling = least_bottleneck(chain, caps)
    return None if ceiling is None else least_spread(chain, caps, ceiling)


def least_bottleneck(chain: Chain, caps: Sequence[Caps], *, at_least: int = 0) -> int | None:
    """The least ceiling, known to be ``at_least`` so high, that leaves a partition; None where there is none."""
    cost = chain.cost
    largest_layer = max((b - a for a, b in pairwise(cost)), default=0)
    bound = max(at_least, largest_layer, -(-cost[-1] // chain.stages))
    cuts, change = _latest(chain, caps, bound)  # mostly close to the answer
    if cuts is not None:
        return bound
    cuts, _ = _latest(chain, caps, cost[-1])
    if cuts is None:
        return None
    infeasible, feasible = change - 1, _extremes(cost, cuts)[1]
    while feasible - infeasible > 1:
        cuts, change = _latest(chain, caps, (infeasible + feasible) // 2)
        if cuts is None:
            infeasible = change - 1
        else:
            feasible = _extremes(cost, cuts)[1]
    return feasible


def least_spread(chain: Chain, caps: Sequence[Caps], ceiling: int) -> Partition | None:
    """The earliest of the partitions under ``ceiling`` whose smallest stage cost is largest."""
    cost, stages = chain.cost, chain.stages
    top = rightmost(chain, caps, ceiling)
    best = leftmost(chain, caps, ceiling)
    if top is None or best is None:
        return None
    floor, unreachable = _extremes(cost, best)[0], cost[-1] // stages + 1
    doubtful, patience = unreachable, len(cost)  # floors from doubtful on have failed, or took too many steps
    while unreachable - floor > 1:
        if doubtful - floor > 1:
            tried, steps = (floor + doubtful) // 2, float(patience)
        else:
            tried, steps = floor + 1, math.inf
            doubtful, patience = unreachable, 2 * patience
        cuts = list(best)
        done, same_above = _raise_cuts(chain, caps, cuts, top, floor=tried, ceiling=ceiling, steps=steps)
        if done:
            best = cuts
            floor = _extremes(cost, best)[0]
        else:
            doubtful = max(floor, same_above) + 1
            if done is False:
                unreachable = doubtful
    return measured(chain, best)


def measured(chain: Chain, cuts: Sequence[int]) -> Partition:
    """The partition at ``cuts``."""
    smallest, largest = _extremes(chain.cost, cuts)
    return Partition(tuple(cuts), largest, smallest)


def rightmost(chain: Chain, caps: Sequence[Caps], ceiling: int) -> list[int] | None:
    """The latest place of each cut over all partitions under ``ceiling``, itself one of them; None if there is none."""
    return _latest(chain, caps, ceiling)[0]


def _latest(chain: Chain, caps: Sequence[Caps], ceiling: int) -> tuple[list[int] | None, int]:
    """The cuts of `rightmost`, and the least higher ceiling under which one of the cuts on the way would be later."""
    cost, fixed, moving, n = chain.cost, chain.fixed, chain.moving, len(chain.cost) - 1
    cuts = [0]
    start = 0
    change = cost[n] + 1
    for stage, limits in enumerate(caps):
        reach = bisect_right(cost, cost[start] + ceiling, start) - 1
        end = min(reach, chain.high[stage + 1])
        for flying, limit in limits.items():
            bound = fixed[start] + flying * moving[start] + limit
            if fixed[end] + flying * moving[end] > bound:
                end = bisect_right(range(end), bound, start, key=_held(chain, flying)) - 1
        if end == reach < n:
            change = min(change, cost[end + 1] - cost[start])
        if end < chain.low[stage + 1]:
            return None, change
        cuts.append(end)
        start = end
    return cuts, change


def leftmost(chain: Chain, caps: Sequence[Caps], ceiling: int) -> list[int] | None:
    """The earliest place of each cut in all partitions under ``ceiling``, itself one of them; None if there is none."""
    cuts = list(chain.low)
    for stage in range(chain.stages - 1, -1, -1):
        cuts[stage] = _earliest(chain, caps[stage], cuts[stage], cuts[stage + 1], ceiling)
        if cuts[stage] > chain.high[stage]:
            return None
    return cuts


def _earliest(chain: Chain, limits: Caps, start: int, end: int, ceiling: int) -> int:
    """The first begin, from ``start`` on, of a stage that ends at ``end``."""
    fixed, moving = chain.fixed, chain.moving
    start = bisect_left(chain.cost, chain.cost[end] - ceiling, start, end)
    for flying, limit in limits.items():
        bound = fixed[end] + flying * moving[end] - limit
        if fixed[start] + flying * moving[start] < bound:
            # Mostly the next place will do, so double the reach before halving it.
            reach = 1
            while start + reach < end and fixed[start + reach] + flying * moving[start + reach] < bound:
                reach *= 2
            first, last = start + reach // 2 + 1, min(start + reach, end)
            start = bisect_left(range(end), bound, first, last, key=_held(chain, flying)) if first < last else last
    return start


def _raise_cuts(
    chain: Chain, caps: Sequence[Caps], cuts: list[int], top: Sequence[int], *, floor: int, ceiling: int, steps: float
) -> tuple[bool | None, int]:
    """Raise ``cuts`` to the least solution above them.

    True when they are there, False when one has to pass ``top``, None after ``steps`` raises; and a floor: every higher
    one, up to the present one, would have led here by the same raises.
    """
    cost, stages, same_above = chain.cost, chain.stages, 0
    checked = [-1] * (stages + 1)  # for each cut, where it was when the begin of the stage before it was checked
    changed = True
    while changed:
        changed = False
        for stage in range(stages):
            start, end = cuts[stage], cuts[stage + 1]
            if cost[end] - cost[start] < floor:
                end = bisect_left(cost, cost[start] + floor, end + 1)
                same_above = max(same_above, cost[end - 1] - cost[start])
                if end > top[stage + 1]:
                    return False, same_above
                cuts[stage + 1] = end
                steps -= 1
        for stage in range(stages - 1, 0, -1):
            start, end = cuts[stage], cuts[stage + 1]
            if end == checked[stage + 1]:
                continue
            checked[stage + 1] = end
            if caps[stage] or cost[end] - cost[start] > ceiling:
                cuts[stage] = _earliest(chain, caps[stage], start, end, ceiling)
                if cuts[stage] > top[stage]:
                    return False, same_above
                if cuts[stage] > start:
                    steps -= 1
                    changed = True
        steps -= stages
        if changed and steps < 0:
            return None, same_above
    return True, same_above


def _extremes(cost: Sequence[int], cuts: Sequence[int]) -> tuple[int, int]:
    """The smallest and the largest stage cost."""
    costs = [cost[end] - cost[start] for start, end in pairwise(cuts)]
    return min(costs), max(costs)


def _held(chain: Chain, flying: int) -> Callable[[int], int]:
    fixed, moving = chain.fixed, chain.moving
    return lambda place: fixed[place] + flying * moving[place]
