"""The best of all orders, by brute force: how soon could the positions of a chain be done?

Every order of every position is tried, microbatches of one stage first in, first out. (That loses nothing: they
are all alike, so whichever order somebody found, let the k-th start of each pass be microbatch k's. Its pass
before then ends no later than k passes of that kind did.) Orders that have come equally far, with as many
microbatches done of each pass, are compared: one that is later in everything that can still matter is dropped.
"""

from __future__ import annotations

import itertools

from attrs import frozen

from .player import makespan, play


@frozen
class Pass:
    """What each microbatch goes through in turn: where, how long it takes, and the way to the next pass."""

    position: int
    duration: float
    travel: float = 0


def u_passes(forwards, backwards, links):
    """The passes of a U: per stage its forward and backward (empty: forwards alone), per edge its link."""
    places = [*range(len(links)), 0]
    out = [*links, 0]
    passes = [Pass(p, f, link) for p, f, link in zip(places, forwards, out, strict=True)]
    if backwards:
        back = [0, *links]
        passes += [Pass(p, b, link) for p, b, link in zip(places[::-1], backwards[::-1], back[::-1], strict=True)]
    return passes


def shortest(passes, num_microbatches, limits):
    """The least makespan of all orders that keep at most ``limits[p]`` microbatches on position p.

    A microbatch is on a position from the start of its first pass there to the end of its last. No limit: None.
    """
    first, last = {}, {}
    for index, each in enumerate(passes):
        first.setdefault(each.position, index)
        last[each.position] = index
    positions = len(first)
    # Per count of started passes: (when each position is free, when results that wait for a pass arrive).
    ways = {(0,) * len(passes): [((0.0,) * positions, ((),) * len(passes))]}
    for _ in range(num_microbatches * len(passes)):
        longer = {}
        for started, found in ways.items():
            for index, each in enumerate(passes):
                place, number = each.position, started[index]
                if number == num_microbatches or (index and started[index - 1] <= number):
                    continue
                limit = limits[place]
                if limit is not None and index == first[place] and number - started[last[place]] >= limit:
                    continue
                then = (*started[:index], number + 1, *started[index + 1 :])
                longer.setdefault(then, set()).update(_after(way, index, each) for way in found)
        ways = {started: _best(found) for started, found in longer.items()}
    ((finished),) = ways.values()
    return min(max(free) for free, _ in finished)


def _after(way, index, each):
    free, arrived = way
    arrived = list(arrived)
    begin = free[each.position]
    if index:
        (there, *later) = arrived[index]
        begin = max(begin, there)
        arrived[index] = tuple(later)
    end = begin + each.duration
    if index + 1 < len(arrived):
        arrived[index + 1] = (*arrived[index + 1], end + each.travel)
    return (*free[: each.position], end, *free[each.position + 1 :]), tuple(arrived)


def _best(found):
    kept = []
    for way in sorted(found):
        flat = [*way[0], *itertools.chain(*way[1])]
        if not any(all(a <= b for a, b in zip(other, flat, strict=True)) for other, _ in kept):
            kept.append((flat, way))
    return [way for _, way in kept]


def every_order(passes, num_microbatches, position):
    """Each order of the passes on ``position``, as tuples of their indices: the brute force behind brute force."""
    own = [index for index, each in enumerate(passes) if each.position == position]

    def extend(order, done):
        if len(order) == num_microbatches * len(own):
            yield tuple(order)
        for at, index in enumerate(own):
            if done[at] < num_microbatches and (at == 0 or done[at - 1] > done[at]):
                yield from extend([*order, index], [*done[:at], done[at] + 1, *done[at + 1 :]])

    yield from extend([], [0] * len(own))


def makespan_of(passes, orders):
    """When the last pass ends if each position follows its order; None if they wait for each other."""

    def needs(step):
        index, number = step
        return [((index - 1, number), passes[index - 1].travel)] if index else []

    numbered = [[(index, order[:at].count(index)) for at, index in enumerate(order)] for order in orders]
    times = play(numbered, needs=needs, length=lambda step: passes[step[0]].duration)
    return None if times is None else makespan(times)
