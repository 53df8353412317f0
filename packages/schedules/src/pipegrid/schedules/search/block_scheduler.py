"""Orders from a pattern: its dates rank the passes, the costs and the memory limit decide when they run.

Squeezing: a free position starts its next pass by date as soon as its input is there and its memory has room. While
it waits, a pending ``W`` fills the gap; in the warmup a forward out of turn; in the cooldown (no forward left), or
where its memory is full, any backward that is ready.

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 4 and appendix (squeezing, reordering
of warmup and cooldown, placing ``W``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

from attrs import frozen

from pipegrid.schedules.search.chain import Chain, Objective, Orders
from pipegrid.schedules.search.patterns import Pattern

NEVER = float("inf")


@frozen
class Squeeze:
    """A way to squeeze.

    ``ahead``: how many microbatches a warmup's forward out of turn may be ahead of the last stage's. ``until``: what
    ends the warmup. ``patience``: the share of its duration by which a ``W`` may delay the next pass.
    """

    ahead: int
    until: Literal["last stage", "backward", "last forward"]
    patience: float


def squeezes(chain: Chain) -> Iterator[Squeeze]:
    """The ways to squeeze that `search` tries, the most promising first."""
    even = len(set(chain.duration)) == 1 and not any(chain.lag)
    half, whole = max(1, chain.num_positions // 2), chain.num_positions
    for patience in (0.0,) if even else (0.5, 0.0, 1.0):
        yield Squeeze(0, "backward", patience)
        for ahead in dict.fromkeys((half, whole, 2, 1)):
            yield Squeeze(ahead, "backward", patience)
            yield Squeeze(ahead, "last stage", patience)
            yield Squeeze(ahead, "last forward", patience)


def squeezed(
    chain: Chain, pattern: Pattern, squeeze: Squeeze, *, objective: Objective = "makespan", below: float = NEVER
) -> tuple[float, Orders] | None:
    """The value and the orders; None if the value is not ``below``, or passes out of turn use up the memory."""
    count, stages = chain.num_microbatches, chain.num_stages
    passes, duration, lag, held, limit = 2 * stages, chain.duration, chain.lag, chain.held, chain.limit
    position_of, passes_at, positions = chain.position, chain.passes_at, range(chain.num_positions)
    period = 3 * passes // 2 // chain.num_positions
    forwards = [[number for number in reversed(own) if number < stages] for own in passes_at]
    backwards = [[number for number in own if number >= stages] for own in passes_at]
    ends_warmup = {
        number
        for p in positions
        for number in (
            forwards[p][:1] if squeeze.until == "last stage" else backwards[p] if squeeze.until == "backward" else ()
        )
    }

    arrival = [[NEVER] * count for _ in range(passes)]
    arrival[0] = [0.0] * count
    done, date = [0] * passes, [float(slot) for slot in pattern.dates]
    pending: list[list[int]] = [[] for _ in positions]
    weights_done = [0 for _ in positions]
    live, free, first = [0.0 for _ in positions], [0.0 for _ in positions], [NEVER for _ in positions]
    warmup, forwards_left = [True for _ in positions], [len(own) * count for own in forwards]
    orders: Orders = [[] for _ in positions]
    events = [(0.0, p) for p in positions]
    left, value = chain.num_operations, 0.0
    makespan = objective == "makespan"

    while events:
        now, p = heapq.heappop(events)
        if free[p] > now:
            continue
        due, number = NEVER, -1
        for own in passes_at[p]:
            if date[own] < due:
                due, number = date[own], own
        chosen, next_input, full = -1, NEVER, False
        if number >= 0:
            at = arrival[number][done[number]]
            if at > now:
                next_input = at
            elif number >= stages or live[p] + held[number] <= limit:
                chosen = number
            else:
                full = True
            if chosen < 0 and squeeze.ahead and warmup[p]:
                newest = done[forwards[p][0]] + squeeze.ahead
                for own in forwards[p]:
                    m = done[own]
                    if m < count and m <= newest and arrival[own][m] <= now and live[p] + held[own] <= limit:
                        chosen = own
                        break
            if chosen < 0 and (full or not forwards_left[p]):
                for own in backwards[p]:
                    if done[own] < count and arrival[own][done[own]] <= now:
                        chosen = own
                        break
        if chosen < 0:
            if weights_done[p] < len(pending[p]):
                operation = pending[p][weights_done[p]]
                takes = duration[operation // count]
                if full or now + takes <= next_input + squeeze.patience * takes:
                    weights_done[p] += 1
                    live[p] += held[operation // count]
                    orders[p].append(operation)
                    left -= 1
                    free[p] = now + takes
                    value = max(value, free[p] if makespan else free[p] - first[p])
                    if value >= below:
                        return None
                    heapq.heappush(events, (free[p], p))
                    continue
            if next_input < NEVER:
                heapq.heappush(events, (next_input, p))
            continue

        m = done[chosen]
        done[chosen] = m + 1
        date[chosen] = date[chosen] + period if m + 1 < count else NEVER
        orders[p].append(chosen * count + m)
        left -= 1
        live[p] += held[chosen]
        if chosen < stages:
            forwards_left[p] -= 1
            if first[p] == NEVER:
                first[p] = now
        else:
            pending[p].append((chosen + stages) * count + m)
        if chosen in ends_warmup:
            warmup[p] = False
        end = free[p] = now + duration[chosen]
        value = max(value, end if makespan else end - first[p])
        if value >= below:
            return None
        heapq.heappush(events, (end, p))
        if chosen + 1 < passes:
            other = position_of[chosen + 1]
            arrival[chosen + 1][m] = end + lag[chosen + 1]
            if other != p:
                heapq.heappush(events, (end + lag[chosen + 1], other))
    return None if left else (value, orders)
