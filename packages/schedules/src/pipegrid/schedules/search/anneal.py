"""Local improvement of orders: operations on the critical path move a few places along their position.

Simulated annealing (Kirkpatrick et al. 1983) on the neighbourhood of job-shop scheduling: only a move that breaks up
the critical path can shorten it (van Laarhoven et al. 1992, "Job Shop Scheduling by Simulated Annealing").
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from pipegrid.schedules.search.chain import Chain, Objective, Orders

FARTHEST = 12
"""The most places that an operation moves at once."""


def anneal(
    chain: Chain,
    orders: Orders,
    *,
    objective: Objective,
    tries: int,
    temperature: float,
    seed: int = 0,
    stop: Callable[[float], bool] = lambda _: False,
) -> tuple[float, Orders]:
    """The best orders met in ``tries`` moves and their value, starting from ``orders``.

    ``temperature``: the lengthening that the first moves accept, falling to 0. ``stop`` is called with the best value
    after each timed move; True ends the search.
    """
    rng = random.Random(seed)  # noqa: S311 -- no secret
    return _Annealing(chain, orders, objective, rng).run(tries, temperature, stop)


class _Annealing:
    def __init__(self, chain: Chain, orders: Orders, objective: Objective, rng: random.Random) -> None:
        self.chain, self.objective, self.rng = chain, objective, rng
        self.orders = [list(order) for order in orders]
        self.place = [0] * chain.num_operations
        for order in orders:
            for index, operation in enumerate(order):
                self.place[operation] = index
        timing = chain.timed(self.orders, objective)
        assert timing is not None  # they come from a scheduler
        self.timing = timing

    def run(self, tries: int, temperature: float, stop: Callable[[float], bool]) -> tuple[float, Orders]:
        best, kept = self.timing.value, [list(order) for order in self.orders]
        critical = self._critical()
        for index in range(tries):
            if not critical:
                break
            heat = temperature * (1 - index / tries)
            moved = self._moved(self._random_of(critical))
            if moved is None:
                continue
            position, order, first, last = moved
            before, self.orders[position] = self.orders[position], order
            timing = self.chain.timed(self.orders, self.objective)
            if timing is None or not self._accepts(timing.value - self.timing.value, heat):
                self.orders[position] = before
            else:
                self.timing = timing
                for at in range(first, last + 1):
                    self.place[order[at]] = at
                if timing.value < best:
                    best, kept = timing.value, [list(order) for order in self.orders]
                critical = self._critical()
            if stop(best):
                break
        return best, kept

    def _accepts(self, longer: float, heat: float) -> bool:
        return longer <= 0 or (heat > 0 and self.rng.random() < math.exp(-longer / heat))

    def _random_of(self, operations: list[int]) -> int:
        return operations[int(self.rng.random() * len(operations))]

    def _critical(self) -> list[int]:
        """The operations of one longest path that start when the one before on their position ends."""
        chain, end, count = self.chain, self.timing.end, self.chain.num_microbatches
        passes, back = 2 * chain.num_stages, chain.num_stages * count
        found = []
        operation = self.orders[self.timing.worst][-1]
        while True:
            number = operation // count
            start = end[operation] - chain.duration[number] - 1e-9
            order, index = self.orders[chain.position[number]], self.place[operation]
            neighbour = order[index - 1] if index else -1
            before = operation - (count if number < passes else back) if number else -1
            waits = before >= 0 and end[before] + (chain.lag[number] if number < passes else 0.0) >= start
            if neighbour >= 0 and end[neighbour] >= start:
                found.append(operation)
                if not (waits and before != neighbour and self.rng.random() < 0.5):
                    operation = neighbour
                    continue
            if before < 0 or not waits:
                return found
            operation = before

    def _moved(self, operation: int) -> tuple[int, list[int], int, int] | None:
        """The operation, or the one before it, some places earlier or later: position, order, first and last place."""
        chain, rng = self.chain, self.rng
        position = chain.position[operation // chain.num_microbatches]
        order, source = self.orders[position], self.place[operation]
        kind = rng.random()
        far = 1 if kind < 0.5 else rng.randint(2, FARTHEST)
        if kind < 0.8:
            target = max(0, source - far)
            step = -1
        else:
            source -= 1
            target, step = min(len(order) - 1, source + far), 1
        moving, at = order[source], source
        while at != target and not self._tied(order[at + step], moving):
            at += step
        if at == source:
            return None
        changed = list(order)
        changed.insert(at, changed.pop(source))
        first, last = min(at, source), max(at, source)
        return (position, changed, first, last) if chain.keeps_to_limit(changed) else None

    def _tied(self, one: int, other: int) -> bool:
        """Whether two operations of a position keep their order: microbatches of a pass, or passes of a microbatch."""
        first, m = divmod(one, self.chain.num_microbatches)
        second, n = divmod(other, self.chain.num_microbatches)
        if first == second:
            return True
        passes, stages = 2 * self.chain.num_stages, self.chain.num_stages
        return m == n and (max(first, second) < passes or abs(first - second) == stages)
