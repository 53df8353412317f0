"""Lower bounds of the objective: no orders of a `PassNetwork` are better."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from pipegrid.plans.network.network import Objective, PassNetwork


def lower_bound(network: PassNetwork, objective: Objective) -> float:
    """The objective of no orders is less.

    For the span, the work of the busiest position. For the makespan, each position alone with its operations, which
    may start when the way to them is done and are followed by the way to the end: where they may be interrupted,
    the best is to run the one with the longest way to the end first. A chain has a second bound.

    Source: Jackson's preemptive schedule (Carlier 1982, "The one-machine sequencing problem", section 2).
    """
    own = [
        [number for number, places in enumerate(network.positions) if position in places]
        for position in range(network.num_positions)
    ]
    if objective == "span":
        bound = max(math.fsum(network.num_microbatches * network.least[number] for number in passes) for passes in own)
    else:
        starts, tails = _starts(network), _tails(network)
        bound = max(
            preemptive(
                (starts[number][m], network.least[number], tails[number][m])
                for number in passes
                for m in range(network.num_microbatches)
            )
            for passes in own
        )
    return max(bound, _of_chain(network, objective)) if network.is_chain else bound


def _of_chain(network: PassNetwork, objective: Objective) -> float:
    """The bound of a chain.

    A position does all its work after the way to its first pass. And from the first to the last of its passes, F
    and I, it has done them all; before come the passes up to it, after it those back, and a W.
    """
    stages, count = network.num_stages, network.num_microbatches
    passes, lag, durations = 2 * stages, network.lag, network.least
    starts = [0.0]
    for number in range(1, passes):
        starts.append(starts[-1] + durations[number - 1] + lag[number])
    ends = [start + duration for start, duration in zip(starts, durations, strict=False)]
    bounds = []
    passes_at = list(filter(None, network.passes_at))  # a position may be empty
    for inner in passes_at:
        own = count * math.fsum(durations[number] for number in inner)
        weights = count * math.fsum(durations[number + stages] for number in inner if number >= stages)
        bounds.append(own + weights if objective == "span" else starts[inner[0]] + own + weights)
        for outer in passes_at if objective == "span" else ((0, passes - 1),):
            if outer[0] <= inner[0] and inner[-1] <= outer[-1]:
                there, back = starts[inner[0]] - starts[outer[0]], ends[outer[-1]] - ends[inner[-1]]
                bounds.append(there + own + back + durations[outer[-1] + stages])
    return max(bounds)


def _starts(network: PassNetwork) -> list[list[float]]:
    """Per pass and microbatch, when it can start at the earliest."""
    count, starts = network.num_microbatches, [[0.0] * network.num_microbatches for _ in network.passes]
    for number in range(len(network.passes)):
        own, before = starts[number], 0.0
        waits = [(number - wait.delta // count, wait.lag) for wait in network.waits[number] if not wait.first]
        for m in range(count):
            ready = [starts[other][m] + network.least[other] + lag for other, lag in waits]
            own[m] = max(before, *ready, 0.0)
            before = own[m] + network.least[number]
    return starts


def _tails(network: PassNetwork) -> list[list[float]]:
    """Per pass and microbatch, the time from its end to the end of all that waits for it, at least."""
    count, tails = network.num_microbatches, [[0.0] * network.num_microbatches for _ in network.passes]
    followers: list[list[tuple[int, float]]] = [[] for _ in network.passes]
    for number, waits in enumerate(network.waits):
        for wait in waits:
            if not wait.first:
                followers[number - wait.delta // count].append((number, wait.lag))
    for number in reversed(range(len(network.passes))):
        own, later = tails[number], 0.0
        for m in reversed(range(count)):
            behind = [lag + network.least[other] + tails[other][m] for other, lag in followers[number]]
            own[m] = max(later, *behind, 0.0)
            later = own[m] + network.least[number]
    return tails


def preemptive(operations: Iterable[tuple[float, float, float]]) -> float:
    """The end of Jackson's preemptive schedule of one machine; operations as start at the earliest, duration, tail."""
    coming = sorted((start, -tail, duration) for start, duration, tail in operations)
    ready: list[tuple[float, float]] = []  # (less its tail, time left)
    now, end, at = 0.0, 0.0, 0
    while ready or at < len(coming):
        if not ready:
            now = max(now, coming[at][0])
        while at < len(coming) and coming[at][0] <= now:
            heapq.heappush(ready, coming[at][1:])
            at += 1
        tail, left = heapq.heappop(ready)
        until = coming[at][0] if at < len(coming) else math.inf
        if now + left > until:
            heapq.heappush(ready, (tail, now + left - until))
            now = until
        else:
            now += left
            end = max(end, now - tail)
    return end
