"""Orders of steps, played: each step starts as soon as its position is free and what it needs is there.

Slow, obvious, and written without a look at the package's engine.
"""

from __future__ import annotations


def play(orders, *, needs, length, gives=lambda step: [step]):
    """Start and end of each step, by position; None where positions wait for each other.

    ``needs(step)``: what must be there, with the time that it takes to come; ``gives(step)``: what is there at its end.
    """
    there = {}
    times = [[] for _ in orders]
    free = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for position, order in enumerate(orders):
            while len(times[position]) < len(order):
                step = order[len(times[position])]
                needed = list(needs(step))
                if any(key not in there for key, _ in needed):
                    break
                start = max([free[position], *(there[key] + travel for key, travel in needed)])
                free[position] = start + length(step)
                times[position].append((start, free[position]))
                there.update(dict.fromkeys(gives(step), free[position]))
                moved = True
    return times if list(map(len, times)) == list(map(len, orders)) else None


def makespan(times):
    """The end of the last step."""
    return max(end for each in times for _, end in each)
