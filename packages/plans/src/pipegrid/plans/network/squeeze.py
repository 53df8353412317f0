"""Orders from a pattern: its dates rank the passes, the costs and the memory limit decide when they run.

Squeezing: a free position starts its next pass by date as soon as its input is there and its memory has room. While
it waits, a pending ``W`` fills the gap; in the warmup a forward out of turn; in the cooldown (no forward left) any
backward that is ready.

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 4 and appendix (squeezing, reordering
of warmup and cooldown, placing ``W``).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Literal

from attrs import frozen

from pipegrid.plans.network.network import Objective, Orders, PassNetwork

NEVER = float("inf")


@frozen
class Squeeze:
    """The settings of a squeeze.

    ``ahead``: how many microbatches a warmup's forward out of turn may be ahead of the last stage's. ``until``: what
    ends the warmup. ``patience``: the share of its duration by which a ``W`` may delay the next pass. ``careful``: what
    runs out of turn cannot use up the memory. A forward is taken only where the order with that forward moved to the
    front still keeps to the limit, each ``W`` next to its ``I``; and where memory is full, only a ``W`` makes room.
    Otherwise the forward of the latest stage that fits is taken, and a backward where memory is full: faster to find,
    often shorter, and now and then stuck.
    """

    ahead: int
    until: Literal["last stage", "backward", "last forward"]
    patience: float
    careful: bool = False


def squeezed(
    chain: PassNetwork, dates: Sequence[int], squeeze: Squeeze, *, objective: Objective = "makespan"
) -> tuple[float, Orders] | None:
    """The value and the orders; None if passes out of turn use up the memory.

    ``dates``: of the first microbatch, a slot for each pass; the next comes later by the slots of one on a position.
    """
    table = _Table(chain, dates, squeeze)
    positions = [_SqueezedPosition(chain, number) for number in range(chain.num_positions)]
    events = [(0.0, at.number) for at in positions]
    left, value, passes, makespan = chain.num_operations, 0.0, 2 * chain.num_stages, objective == "makespan"
    next_pass, run, position_of, lag = table.next_pass, table.run, chain.position, chain.lag
    while events:
        now, place = heapq.heappop(events)
        at = positions[place]
        if at.free > now:
            continue
        number, next_input, full = next_pass(at, now)
        if number < 0 and at.pending:
            number = table.next_weight(at, now, next_input, full=full)
        if number < 0:
            if next_input < NEVER:
                heapq.heappush(events, (next_input, place))
            continue
        end = run(at, number, now)
        left -= 1
        value = max(value, end if makespan else end - at.first)
        heapq.heappush(events, (end, place))
        if number + 1 < passes and position_of[number + 1] != place:
            heapq.heappush(events, (end + lag[number + 1], position_of[number + 1]))
    return None if left else (value, [at.order for at in positions])


class _SqueezedPosition:
    """The progress of a position."""

    __slots__ = (
        "backwards",
        "first",
        "forwards",
        "forwards_left",
        "free",
        "live",
        "number",
        "order",
        "passes",
        "pending",
        "warmup",
    )

    def __init__(self, chain: PassNetwork, number: int) -> None:
        self.number, self.passes = number, chain.passes_at[number]
        self.forwards = [one for one in reversed(self.passes) if one < chain.num_stages]
        self.backwards = [one for one in self.passes if one >= chain.num_stages]
        self.forwards_left = len(self.forwards) * chain.num_microbatches
        self.pending: deque[int] = deque()  # the W of each backward done
        self.live = self.free = 0.0
        self.first, self.warmup = NEVER, True
        self.order: list[int] = []


class _Table:
    """Per pass: its arrivals, the microbatches done, the date of the next; and the choice of the next pass."""

    def __init__(self, chain: PassNetwork, dates: Sequence[int], squeeze: Squeeze) -> None:
        passes, count = 2 * chain.num_stages, chain.num_microbatches
        self.squeeze, self.count, self.stages, self.passes = squeeze, count, chain.num_stages, passes
        self.duration, self.lag, self.held, self.limit = chain.duration, chain.lag, chain.held, chain.limit
        self.period = 3 * passes // 2 // chain.num_positions
        self.arrival = [[NEVER] * count for _ in range(passes)]
        self.arrival[0] = [0.0] * count
        self.date = [float(slot) for slot in dates]
        self.done = [0] * (3 * chain.num_stages)
        last_forwards = {max((one for one in own if one < chain.num_stages), default=-1) for own in chain.passes_at}
        ends = {"last stage": last_forwards, "backward": range(chain.num_stages, passes), "last forward": ()}
        self.ends_warmup = frozenset[int](ends[squeeze.until])

    def next_pass(self, at: _SqueezedPosition, now: float) -> tuple[int, float, bool]:
        """The pass to run, -1 for none; when the next by date arrives; and whether memory alone holds it back."""
        number = min(at.passes, key=self.date.__getitem__, default=-1)
        if number < 0 or self.date[number] == NEVER:
            return -1, NEVER, False
        arrives = self.arrival[number][self.done[number]]
        if arrives > now:
            return self._out_of_turn(at, now, full=False), arrives, False
        if number >= self.stages or at.live + self.held[number] <= self.limit:
            return number, NEVER, False
        return self._out_of_turn(at, now, full=True), NEVER, True

    def _out_of_turn(self, at: _SqueezedPosition, now: float, *, full: bool) -> int:
        """In the warmup a forward; in the cooldown, or where memory is full, a backward; -1 for none."""
        done, arrival, count = self.done, self.arrival, self.count
        if at.warmup and self.squeeze.careful:
            return -1 if full else self._early_forward(at, now)
        if at.warmup and self.squeeze.ahead:
            newest = done[at.forwards[0]] + self.squeeze.ahead
            for one in at.forwards:
                m = done[one]
                fits = at.live + self.held[one] <= self.limit
                if m < count and m <= newest and arrival[one][m] <= now and fits:
                    return one
        if not at.forwards_left or (full and not self.squeeze.careful):
            ready = (one for one in at.backwards if done[one] < count and arrival[one][done[one]] <= now)
            return next(ready, -1)
        return -1

    def _early_forward(self, at: _SqueezedPosition, now: float) -> int:
        """The first forward by date whose input is there, if it fits beside all that comes before it; -1 for none."""
        date = {one: self.date[one] for one in at.passes if self.done[one] < self.count}
        done = {one: self.done[one] for one in date}
        newest = self.done[at.forwards[0]] + self.squeeze.ahead
        most, live = at.live, at.live + sum(self.held[weight] for weight in at.pending)
        least = min(self.held[one] for one in at.forwards)
        while date and most + least <= self.limit:
            number = min(date, key=date.__getitem__)
            m, held = done[number], self.held[number]
            if number >= self.stages:
                held += self.held[number + self.stages]
            elif self.arrival[number][m] <= now and m <= newest and most + held <= self.limit:
                return number
            live += held
            most = max(most, live)
            done[number], date[number] = m + 1, date[number] + self.period
            if m + 1 == self.count:
                del date[number]
        return -1

    def next_weight(self, at: _SqueezedPosition, now: float, next_input: float, *, full: bool) -> int:
        """The ``W`` that fills the time to the next input, or makes room; -1 for none."""
        takes = self.duration[at.pending[0]]
        fits = full or now + takes <= next_input + self.squeeze.patience * takes
        return at.pending.popleft() if fits else -1

    def run(self, at: _SqueezedPosition, number: int, now: float) -> float:
        """Run the next microbatch of pass or ``W`` ``number``; when it ends."""
        m = self.done[number]
        self.done[number] = m + 1
        at.order.append(number * self.count + m)
        at.live += self.held[number]
        end = at.free = now + self.duration[number]
        if number >= self.passes:
            return end
        self.date[number] = self.date[number] + self.period if m + 1 < self.count else NEVER
        if number in self.ends_warmup:
            at.warmup = False
        if number >= self.stages:
            at.pending.append(number + self.stages)
        else:
            at.forwards_left -= 1
            if at.first == NEVER:
                at.first = now
        if number + 1 < self.passes:
            self.arrival[number + 1][m] = end + self.lag[number + 1]
        return end
