"""Patterns: one microbatch's way through the pipeline in slots, repeated for every microbatch.

A pattern gives each pass of microbatch 0 a slot; microbatch ``m`` follows ``period * m`` slots later, where the
period is the work of a microbatch on a position (3 slots per stage: F, I, W). No two passes of a position may share
a slot modulo the period; what is left over is for ``W``. How long a pattern keeps activations live, divided by
the period, is how many are live at once.

A pattern is a *hop* for each sweep over the positions (the slots between its first two positions, and between any
others), and the slots waited at each turn from one sweep to the next.

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3 (building blocks).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from attrs import field, frozen

from pipegrid.plans.network.network import PassNetwork

HOPS = tuple((first, other) for first in (1, 2, 3) for other in (1, 2, 3))
TURNS = range(5)
DEEP_HOPS = ((1, 1), (1, 2), (2, 1))
"""Hops of patterns with more than four sweeps, of which there would be too many."""


@frozen
class Pattern:
    """A slot for each pass (``dates``); ``live``: the most slots in which the stages of a position hold activations."""

    live: float
    length: int
    dates: tuple[int, ...] = field(repr=False)


def patterns(chain: PassNetwork) -> list[Pattern]:
    """Every pattern that suits the placement and the memory limit, least memory first; none for other placements.

    Where the limit is too low for any, patterns that hold more: squeezed, they wait for memory.
    """
    sweeps = _sweeps(chain)
    for more in (1.0, 1.5, 2.0) if sweeps else ():
        tried = _Patterns(chain, sweeps, more)
        if found := list(tried.extended(0, dict.fromkeys(tried.checked, 0), ())):
            return sorted(found, key=lambda pattern: (pattern.live, pattern.length))
    return []


def _sweeps(chain: PassNetwork) -> list[tuple[int, bool]]:
    """Consecutive passes that visit every position once: the first, and whether they go upward (0, 1, ...)."""
    count, passes = chain.num_positions, chain.position[: 2 * chain.num_stages]
    every = tuple(range(count))
    visited = {first: passes[first : first + count] for first in range(0, len(passes), count)}
    if not all(one in (every, every[::-1]) for one in visited.values()):
        return []
    return [(first, one == every) for first, one in visited.items()]


class _Patterns:
    """The enumeration: sweep by sweep, dropping what collides or lives too long.

    Dates are linear in the position from position 1 on, so slots modulo the period repeat and lifetimes are the
    longest at an end: a few positions stand for all.
    """

    def __init__(self, chain: PassNetwork, sweeps: list[tuple[int, bool]], more: float) -> None:
        self.chain, self.sweeps = chain, sweeps
        self.last = chain.num_positions - 1
        self.period = 3 * len(sweeps) // 2
        hops = HOPS if len(sweeps) <= 4 else DEEP_HOPS
        # One or two positions do not take both numbers of a hop: those that differ in the others are one.
        self.hops = tuple({hop[: self.last]: hop for hop in hops}.values())
        self.checked = sorted({*range(min(chain.num_positions, self.period + 1)), self.last})
        self.ends = sorted({0, min(1, self.last), self.last})
        sizes = chain.held[: chain.num_stages]
        room = min(chain.limit, sum(sizes) * chain.num_microbatches)
        self.most_live = self.period * (more * room + max(sizes))
        self.sizes = sizes

    def _way(self, hop: tuple[int, int], position: int) -> int:
        """Slots from position 0 to ``position``, or back."""
        return hop[0] + hop[1] * (position - 1) if position else 0

    def extended(self, start: int, taken: dict[int, int], dates: tuple[tuple[int, int, int], ...]) -> Iterator[Pattern]:
        """The patterns that begin with ``dates``: per sweep, the slot at position 0 and the signed hop.

        ``taken``: per checked position, the slots modulo the period as bits.
        """
        index = len(dates)
        if index == len(self.sweeps):
            live = max(self._live(position, dates) for position in self.ends)
            if live <= self.most_live:
                yield Pattern(live, start, self._dates(dates))
            return
        _, upward = self.sweeps[index]
        for turn, hop in itertools.product(TURNS if index else (0,), self.hops):
            length = self._way(hop, self.last)
            zero = start + turn if upward else start + turn + length
            sign = 1 if upward else -1
            now = {}
            for position in self.checked:
                bit = 1 << (zero + sign * self._way(hop, position)) % self.period
                if taken[position] & bit:
                    break
                now[position] = taken[position] | bit
            else:
                extended = (*dates, (zero, sign * hop[0], sign * hop[1]))
                if index < len(self.sweeps) // 2 or self._live(self.last, extended) <= self.most_live:
                    yield from self.extended(start + turn + length + 1, now, extended)

    def _date(self, sweep: tuple[int, int, int], position: int) -> int:
        zero, first, rest = sweep
        return zero + (first + rest * (position - 1) if position else 0)

    def _live(self, position: int, dates: tuple[tuple[int, int, int], ...]) -> float:
        """Slots times memory for which ``position`` holds the stages whose ``I`` has a date."""
        total, count = 0.0, len(self.sweeps)
        for index, (first, upward) in enumerate(self.sweeps[: count // 2]):
            if count - 1 - index < len(dates):
                stage = first + (position if upward else self.last - position)
                lifetime = self._date(dates[count - 1 - index], position) + 1 - self._date(dates[index], position)
                total += self.sizes[stage] * lifetime
        return total

    def _dates(self, dates: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
        return tuple(
            self._date(sweep, self.chain.position[number])
            for index, sweep in enumerate(dates)
            for number in range(index * self.chain.num_positions, (index + 1) * self.chain.num_positions)
        )
