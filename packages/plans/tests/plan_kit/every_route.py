"""The least makespan of a step over several replicas by brute force: every route and every order, slot by slot.

Slow, obvious, and written without a look at the package's search. F = I = W = 1 slot, one stage on each position. All
that all actors can do in a slot is tried, from all states that the slot before can leave; units in the same state are
alike. An actor idles only where it has no I and no W to do: done in an idle slot in place of later, they delay nothing.
"""

from __future__ import annotations


def least_slots(choices, limits=None):
    """The slots of the shortest step; ``choices``: per unit and stage, the replicas that may compute it.

    ``limits``: per stage, the most units that an actor holds from the start of F to the end of W.
    """
    stages = len(choices[0])
    actors = sorted({(s, r) for unit in choices for s, replicas in enumerate(unit) for r in replicas})
    limits = limits or [len(choices)] * stages
    # Of a unit: passes done, the replicas whose I is to come, and its choices. Of an actor: W to do.
    start = (tuple(sorted((0, (), unit) for unit in choices)), (0,) * len(actors))
    states, slots = {start}, 0
    while True:
        states = {after for state in states for after in _slot(state, actors, stages, limits)}
        slots += 1
        if any(not sum(weights) and all(done == 2 * stages for done, *_ in units) for units, weights in states):
            return slots


def _slot(state, actors, stages, limits):
    """The states after one slot."""
    units, weights = state

    def options(actor, taken):
        stage, replica = actors[actor]
        seen, found, must = set(), [], weights[actor] > 0
        held = weights[actor] + sum(len(way) > stage and way[stage] == replica for _, way, _ in units)
        for number, unit in enumerate(units):
            done, way, choice = unit
            if number in taken or unit in seen:
                continue
            if done == 2 * stages - 1 - stage and way[-1] == replica:
                found.append((number, (done + 1, way[:-1], choice), 1))
                must = True
            elif done == stage and replica in choice[stage] and held < limits[stage]:
                found.append((number, (done + 1, (*way, replica), choice), 0))
            else:
                continue
            seen.add(unit)
        if weights[actor]:
            found.append((None, None, -1))
        return found if must else [*found, (None, None, 0)]

    def go(actor, taken, left):
        if actor == len(actors):
            after = [taken.get(number, unit) for number, unit in enumerate(units)]
            yield tuple(sorted(after)), left
            return
        for number, unit, weight in options(actor, taken):
            now = (*left[:actor], left[actor] + weight, *left[actor + 1 :])
            yield from go(actor + 1, taken if number is None else {**taken, number: unit}, now)

    return go(0, {}, weights)
