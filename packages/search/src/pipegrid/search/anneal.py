"""Local improvement of orders: operations on the critical path move a few places along their position.

Simulated annealing (Kirkpatrick et al. 1983) on the neighbourhood of job-shop scheduling: only a move that breaks up
the critical path can shorten it (van Laarhoven et al. 1992, "Job Shop Scheduling by Simulated Annealing").
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from pipegrid.plans.network.network import Objective, Orders, PassNetwork

FARTHEST = 12
"""The most places that an operation moves at once."""


class Annealing:
    """Orders that are improved; a compute of a stage on several positions keeps its place, others move past it."""

    def __init__(self, network: PassNetwork, orders: Orders, objective: Objective, *, seed: int = 0) -> None:
        self.network, self.objective = network, objective
        self.rng = random.Random(seed)  # noqa: S311 -- no secret
        self.orders = [list(order) for order in orders]
        self.place = [{operation: index for index, operation in enumerate(order)} for order in orders]
        timing = network.timed(self.orders, objective)
        assert timing is not None  # they come from a scheduler
        self.timing = timing

    def run(self, tries: int, temperature: float, stop: Callable[[float], bool]) -> tuple[float, Orders]:
        """The value and the orders of the best met in ``tries`` moves.

        ``temperature``: the lengthening that the first moves accept, falling to 0. ``stop`` is called with the best
        value after each timed move; True ends the search.
        """
        best, kept = self.timing.value, [list(order) for order in self.orders]
        critical = self._critical()
        for index in range(tries):
            if not critical:
                break
            heat = temperature * (1 - index / tries)
            moved = self._moved(*critical[int(self.rng.random() * len(critical))])
            if moved is None:
                continue
            position, order, first, last = moved
            before, self.orders[position] = self.orders[position], order
            timing = self.network.timed(self.orders, self.objective)
            if timing is None or not self._accepts(timing.value - self.timing.value, heat):
                self.orders[position] = before
            else:
                self.timing = timing
                for at in range(first, last + 1):
                    self.place[position][order[at]] = at
                if timing.value < best:
                    best, kept = timing.value, [list(order) for order in self.orders]
                critical = self._critical()
            if stop(best):
                break
        return best, kept

    def _accepts(self, longer: float, heat: float) -> bool:
        return longer <= 0 or (heat > 0 and self.rng.random() < math.exp(-longer / heat))

    def _critical(self) -> list[tuple[int, int]]:
        """The operations of one longest path that start when the one before on a position ends, with that position."""
        network, end = self.network, self.timing.end
        found = []
        operation = self.orders[self.timing.worst][-1]
        while True:
            start = end[operation] - network.length(operation) - 1e-9
            neighbour, position = self._neighbour(operation)
            before = next((one for one, lag in network.before(operation) if end[one] + lag >= start), -1)
            if neighbour >= 0 and end[neighbour] >= start:
                found.append((operation, position))
                if not (before not in {-1, neighbour} and self.rng.random() < 0.5):
                    operation = neighbour
                    continue
            if before < 0:
                return found
            operation = before

    def _neighbour(self, operation: int) -> tuple[int, int]:
        """The latest operation right before ``operation`` on one of its positions, and that position."""
        latest, where = -1, -1
        for position in self.network.places(operation):
            index = self.place[position][operation]
            before = self.orders[position][index - 1] if index else -1
            if where < 0 or (before >= 0 and (latest < 0 or self.timing.end[before] > self.timing.end[latest])):
                latest, where = before, position
        return latest, where

    def _moved(self, operation: int, position: int) -> tuple[int, list[int], int, int] | None:
        """The operation, or the one before it, some places earlier or later: position, order, first and last place."""
        network, rng = self.network, self.rng
        order, source = self.orders[position], self.place[position][operation]
        kind = rng.random()
        far = 1 if kind < 0.5 else rng.randint(2, FARTHEST)
        if kind < 0.8:
            target, step = max(0, source - far), -1
        else:
            source -= 1
            target, step = min(len(order) - 1, source + far), 1
        moving, at = order[source], source
        if len(network.places(moving)) > 1:
            return None
        while at != target and not network.tied(order[at + step], moving):
            at += step
        if at == source:
            return None
        changed = list(order)
        changed.insert(at, changed.pop(source))
        return (position, changed, min(at, source), max(at, source)) if network.keeps_to_limit(changed) else None
