"""Samples of unequal cost over replicas and microbatches: balanced, and the same on every rank. Pure; no torch.

A step is as slow as its slowest replica, and a pipeline as its slowest microbatch. The greatest sample goes to the
lightest part first (LPT; Graham 1969: at most 4/3 of the best); then samples of the heaviest part move, or change
places with those of another, as long as that makes the heaviest lighter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from attrs import frozen

from pipegrid.core.fields import Amount, Count, checked

_ROUNDS = 200  # of improvement; each one is a move of one sample, or an exchange of two


@frozen
class Spread:
    """Samples by replica and microbatch.

    Attributes:
        replicas: per replica, per microbatch, the numbers of its samples, ascending.
        costs: per replica, per microbatch, the sum of the samples' costs.
    """

    replicas: tuple[tuple[tuple[int, ...], ...], ...]
    costs: tuple[tuple[float, ...], ...]

    @property
    def heaviest(self) -> float:
        """The cost of the heaviest microbatch."""
        return max(cost for parts in self.costs for cost in parts)

    @property
    def imbalance(self) -> float:
        """The heaviest microbatch over the mean of all, less 1: 0 is even."""
        every = [cost for parts in self.costs for cost in parts]
        mean = math.fsum(every) / len(every)
        return self.heaviest / mean - 1 if mean else 0.0


def balance_samples(costs: Sequence[float], lanes: int, microbatches: int = 1, *, equal: bool = False) -> Spread:
    """Spread samples of known ``costs`` over ``lanes * microbatches`` parts, so that the heaviest is light.

    A pure function of its arguments: every rank that has the costs computes the same parts. Replicas and microbatches
    are balanced alike; the heaviest parts of all are in one microbatch, so that replicas wait little for each other.

    Args:
        costs: of each sample: tokens, or seconds, or any measure that adds up.
        lanes: number of replicas.
        microbatches: of each replica.
        equal: every part has the same number of samples (their number must be a multiple of the parts).

    Raises:
        ValueError: fewer samples than parts, a negative cost, or a number of samples that ``equal`` cannot have.

    Examples:
        >>> balance_samples([900, 100, 500, 400, 600, 500], lanes=2).replicas
        (((0, 1, 5),), ((2, 3, 4),))
    """
    checked(lanes, Count, "lanes", ValueError)
    checked(microbatches, Count, "microbatches", ValueError)
    weights: tuple[float, ...] = checked(tuple(costs), tuple[Amount, ...], "costs", ValueError)
    parts = lanes * microbatches
    if len(weights) < parts:
        raise ValueError(f"{len(weights)} samples for {parts} parts; every part has at least one")
    if equal and len(weights) % parts:
        raise ValueError(f"{len(weights)} samples are no multiple of {parts} parts, as equal=True needs")
    most = len(weights) // parts if equal else len(weights) - parts + 1
    held = _improved(_longest_first(weights, parts, most), weights, most)
    ordered = sorted(held, key=lambda part: (-_weight(part, weights), part))
    by_replica = [
        tuple(ordered[number * lanes + replica] for number in range(microbatches)) for replica in range(lanes)
    ]
    return Spread(tuple(by_replica), tuple(tuple(_weight(part, weights) for part in parts) for parts in by_replica))


def _weight(part: Sequence[int], weights: Sequence[float]) -> float:
    return math.fsum(weights[sample] for sample in part)


def _longest_first(weights: Sequence[float], parts: int, most: int) -> list[list[int]]:
    """Each sample, the greatest first, to the lightest part with room; no part stays empty."""
    held: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, number) for number in range(parts)]
    order = sorted(range(len(weights)), key=lambda sample: (-weights[sample], sample))
    empty = parts
    for place, sample in enumerate(order):
        if empty and len(order) - place <= empty:  # the rest is just enough for the empty ones
            number = next(number for number, part in enumerate(held) if not part)
            held[number].append(sample)
            empty -= 1
            continue
        weight, number = heapq.heappop(heap)
        empty -= not held[number]
        held[number].append(sample)
        if len(held[number]) < most:
            heapq.heappush(heap, (weight + weights[sample], number))
    return held


def _improved(held: list[list[int]], weights: Sequence[float], most: int) -> list[tuple[int, ...]]:
    """Lighten the heaviest part by a move or an exchange with a lighter one, while some does."""
    total = [_weight(part, weights) for part in held]
    for _ in range(_ROUNDS):
        top = max(range(len(held)), key=lambda number: (total[number], -number))
        change = _best_change(top, held, total, weights, most)
        if change is None:
            break
        given, other, taken = change
        held[top].remove(given)
        held[other].append(given)
        if taken is not None:
            held[other].remove(taken)
            held[top].append(taken)
        total[top], total[other] = _weight(held[top], weights), _weight(held[other], weights)
    return [tuple(sorted(part)) for part in held]


def _best_change(
    top: int, held: Sequence[Sequence[int]], total: Sequence[float], weights: Sequence[float], most: int
) -> tuple[int, int, int | None] | None:
    """The sample to give, the part to give it to, and its sample in return, that make the heavier of both lightest."""
    best: tuple[float, int, int, int | None] | None = None
    for other in range(len(held)):
        if other == top or total[other] >= total[top]:
            continue
        for given in held[top]:
            returned: list[int | None] = list(held[other])
            if len(held[top]) > 1 and len(held[other]) < most:
                returned.append(None)
            for taken in returned:
                shift = weights[given] - (0.0 if taken is None else weights[taken])
                after = max(total[top] - shift, total[other] + shift)
                if shift > 0 and after < total[top] and (best is None or after < best[0]):
                    best = after, given, other, taken
    return None if best is None else best[1:]
