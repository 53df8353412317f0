"""The best of all orders, by brute force: how soon could the positions of a chain be done?

Written without a look at the package's search. Every order of every position is tried in which a stage runs the
microbatches by number. No better order is missed: microbatches have equal times, so in any order the k-th start of a
pass may be given microbatch k, and its inputs are then made by the k-th ends of the passes before it. Orders that have
come equally far, with as many microbatches done of each pass, are compared: one that is later in everything that can
still matter is dropped.
"""

from __future__ import annotations

import itertools

from attrs import field, frozen

from plan_kit.player import makespan, play


@frozen
class Pass:
    """What each microbatch goes through: where, how long it takes, and how long the way is from each pass before it.

    Memory of the position is taken at its start, and given back at its end.
    """

    position: int
    duration: float
    after: dict[int, float] = field(factory=dict)
    takes: float = 0
    gives: float = 0


def u_passes(forwards, backwards, links):
    """The passes of a U: per stage its forward and backward (empty: forwards alone), per edge its link.

    A microbatch is on a position from the start of its first pass there to the end of its last.
    """
    places = [*range(len(links)), 0]
    each = [*zip(places, forwards, [0, *links], strict=True)]
    if backwards:
        each += zip(places[::-1], backwards[::-1], [0, *links[::-1]], strict=True)
    where = [position for position, *_ in each]
    return [
        Pass(
            position,
            duration,
            after={index - 1: way} if index else {},
            takes=position not in where[:index],
            gives=position not in where[index + 1 :],
        )
        for index, (position, duration, way) in enumerate(each)
    ]


def split_passes(placement, times, *, hop=0, size=1, input_release=0, frozen=0):
    """Those of a chain with split backwards: ``times`` of F, I and W of any stage, F alone of the first ``frozen``.

    A forward takes ``size``, of which I gives back the share ``input_release`` and W the rest.
    """
    stages = range(len(placement))
    names = [*(("F", stage) for stage in stages), *((kind, stage) for stage in stages[frozen:] for kind in "IW")]
    passes = []
    for kind, stage in names:
        needed = {"F": [("F", stage - 1)], "I": [("F", stage), ("I", stage + 1)], "W": [("I", stage)]}[kind]
        after = {names.index(one): hop * (placement[one[1]] != placement[stage]) for one in needed if one in names}
        share = {"F": float(stage < frozen), "I": input_release, "W": 1 - input_release}[kind]
        passes.append(Pass(placement[stage], times[kind], after, takes=size * (kind == "F"), gives=size * share))
    return passes


def least_makespan(passes, num_microbatches, limits):
    """The least makespan of all orders in which position p holds at most ``limits[p]``; no limit: None."""
    edges = {  # without a way, and on one position, a result is there as soon as the position is free
        (other, index): way
        for index, each in enumerate(passes)
        for other, way in each.after.items()
        if way or passes[other].position != each.position
    }
    # Per count of started passes: (when each position is free, when results arrive that wait along each edge).
    ways = {(0,) * len(passes): [((0.0,) * len(limits), ((),) * len(edges))]}
    for _ in range(num_microbatches * len(passes)):
        longer = {}
        for started, found in ways.items():
            for index in _next(passes, num_microbatches, limits, started):
                then = (*started[:index], started[index] + 1, *started[index + 1 :])
                longer.setdefault(then, set()).update(_after(way, index, passes[index], edges) for way in found)
        ways = {started: _best(found) for started, found in longer.items()}
    ((finished),) = ways.values()
    return min(max(free) for free, _ in finished)


def _next(passes, num_microbatches, limits, started):
    """The passes whose inputs are made, and for whose microbatch there is memory."""
    held = dict.fromkeys(range(len(limits)), 0)
    for each, count in zip(passes, started, strict=True):
        held[each.position] += count * (each.takes - each.gives)
    for index, each in enumerate(passes):
        limit = limits[each.position]
        fits = limit is None or held[each.position] + each.takes <= limit + 1e-9
        if fits and started[index] < min([num_microbatches, *(started[other] for other in each.after)]):
            yield index


def _after(way, index, each, edges):
    free, arrived = way
    needed = [times[0] for (_, user), times in zip(edges, arrived, strict=True) if user == index]
    end = max([free[each.position], *needed]) + each.duration
    left = []
    for ((maker, user), travel), times in zip(edges.items(), arrived, strict=True):
        sent = [end + travel] if maker == index else []
        left.append((*times[user == index :], *sent))
    return (*free[: each.position], end, *free[each.position + 1 :]), tuple(left)


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
        return [((other, number), way) for other, way in passes[index].after.items()]

    numbered = [[(index, order[:at].count(index)) for at, index in enumerate(order)] for order in orders]
    times = play(numbered, needs=needs, length=lambda step: passes[step[0]].duration)
    return None if times is None else makespan(times)
