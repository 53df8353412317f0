"""Double justification of a schedule: all operations as late as possible, in the order of their ends, then as early.

Each way is a list scheduler: a free position starts the first by priority of the operations that are ready. Backwards
in time an operation waits for those that follow it, ``W`` and ``I`` take memory and ``F`` releases it.

Memory cannot deadlock it: on each position, operations that take memory keep the order of the schedule before. Of what
is left, take the operation that started first there: all before it are done, and of those that take memory no others,
so it is ready and has as much room as it had. That order is the one of the orders given: dates do not tell it where
operations take no time.

Source: Valls et al. 2005, "Justification and RCPSP: a technique that pays".
"""

from __future__ import annotations

import heapq

from pipegrid.plans.network.network import Orders, PassNetwork


def justified(network: PassNetwork, orders: Orders) -> Orders:
    """The orders after both ways; ``orders``: of each position, in a schedule that keeps to the memory limit.

    Every pass lies on one position.
    """
    late = _listed(network, [order[::-1] for order in orders], backwards=True)
    return _listed(network, [order[::-1] for order in late], backwards=False)


def _listed(network: PassNetwork, before: Orders, *, backwards: bool) -> Orders:
    """The orders in the direction of the schedule; of each position the first in ``before`` has priority."""
    count, duration, operations = network.num_microbatches, network.duration, range(network.num_operations)
    place = [places[0] for places in network.positions]
    held = [-amount if backwards else amount for amount in network.held]
    takes = [take - amount if backwards else take for take, amount in zip(network.takes, network.held, strict=True)]
    after: list[list[tuple[int, float]]] = [[] for _ in operations]
    missing, ready_at = [0] * len(operations), [0.0] * len(operations)
    for operation in operations:
        for other, lag in network.before(operation):
            first, second = (operation, other) if backwards else (other, operation)
            after[first].append((second, lag))
            missing[second] += 1
    rank = {operation: index for order in before for index, operation in enumerate(order)}  # among a position's own
    takers = [[operation for operation in reversed(order) if takes[operation // count] > 0] for order in before]
    ready: list[list[int]] = [[] for _ in takers]  # by rank, of those that take nothing
    came = [False] * len(operations)
    orders: Orders = [[] for _ in takers]
    live, free = [0.0] * len(takers), [0.0] * len(takers)
    events = [(0.0, place[one // count], one) for one in operations if not missing[one]]
    heapq.heapify(events)
    while events:
        now, due = events[0][0], set()
        while events and events[0][0] <= now:
            _, position, operation = heapq.heappop(events)
            due.add(position)
            if operation >= 0:
                came[operation] = True
                if takes[operation // count] <= 0:
                    heapq.heappush(ready[position], rank[operation])
        for position in sorted(due):
            if free[position] > now:
                continue
            own, waiting = takers[position], ready[position]
            fits = own and came[own[-1]] and live[position] + takes[own[-1] // count] <= network.limit
            if fits and not (waiting and waiting[0] < rank[own[-1]]):
                operation = own.pop()
            elif waiting:
                operation = before[position][heapq.heappop(waiting)]
            else:
                continue
            number = operation // count
            orders[position].append(operation)
            live[position] += held[number]
            free[position] = now + duration[number]
            heapq.heappush(events, (free[position], position, -1))
            for other, lag in after[operation]:
                missing[other] -= 1
                ready_at[other] = max(ready_at[other], free[position] + lag)
                if not missing[other]:
                    # With a lag below 0, as of a queue backwards in time, it may have been ready before this one.
                    heapq.heappush(events, (max(now, ready_at[other]), place[other // count], other))
    return orders
