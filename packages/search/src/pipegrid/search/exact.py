"""The shortest orders, proved: every order of a chain with equal costs, slot by slot, with what cannot win left out.

With F = I = W on all stages and free messages, time passes in slots, and how many microbatches each pass has seen says
all about the future. So the search visits each such state once per slot. A backward or a ``W`` in place of an idle
slot never hurts, and a forward may: it takes memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeAlias

from attrs import frozen

from pipegrid.plans.network.network import Orders, PassNetwork

State: TypeAlias = tuple[int, ...]
"""Microbatches done of each of the ``2S`` passes, then per position the number of its ``W``."""

IDLE = -1


@frozen
class Exact:
    """The shortest ``orders`` found, None if none is shorter than asked; ``proved``: whether no shorter ones exist."""

    orders: Orders | None
    proved: bool
    states: int


def has_equal_costs(chain: PassNetwork) -> bool:
    """Whether `shortest` is for this chain: one duration, free messages, equal activations that ``W`` releases."""
    stages = chain.num_stages
    return (
        len(set(chain.duration)) == 1
        and chain.duration[0] > 0
        and not any(chain.lag)
        and len(set(chain.held[:stages])) == 1
        and not any(chain.held[stages : 2 * stages])
    )


def shortest(chain: PassNetwork, below: float, *, max_states: int) -> Exact:
    """Orders whose makespan is less than ``below``, the shortest unless ``max_states`` runs out.

    ``chain`` has equal costs (see `has_equal_costs`).
    """
    best: Orders | None = None
    slots, states = -(-below // chain.duration[0]) - 1, 0
    while True:
        search = _Slots(chain, int(slots), max_states - states)
        history = search.run()
        states += search.states
        if history is None:
            return Exact(best, search.states < search.max_states, states)
        best = search.orders(history)
        slots = len(history) - 1


class _Slots:
    """Depth-first through the slots of a schedule of at most ``slots`` of them."""

    def __init__(self, chain: PassNetwork, slots: int, max_states: int) -> None:
        self.chain, self.slots, self.max_states = chain, slots, max_states
        self.count, self.passes = chain.num_microbatches, 2 * chain.num_stages
        self.states = 0
        self.refuted: dict[State, int] = {}  # the earliest slot at which a state was found to be too late
        size, every = chain.held[0], self.passes * self.count
        self.room = int(min(chain.limit / size, every)) if size > 0 else every

    def run(self) -> list[tuple[int, ...]] | None:
        """Per slot, what each position does; None if there is no such schedule or the states run out."""
        state: State = (0,) * (self.passes + self.chain.num_positions)
        path: list[tuple[State, Iterator[tuple[int, ...]]]] = [(state, self._choices(state))]
        taken: list[tuple[int, ...]] = []
        goal = (self.count,) * self.passes
        while path:
            state, choices = path[-1]
            choice = next(choices, None)
            if choice is None:
                self.refuted[state] = len(path) - 1
                path.pop()
                if taken:
                    taken.pop()
                continue
            after = list(state)
            for number in choice:
                if number != IDLE:
                    after[number] += 1
            now = tuple(after)
            taken.append(choice)
            if now[: self.passes] == goal and sum(now) == 3 * self.passes // 2 * self.count:
                return taken
            if now == state or not self._may_win(now, len(taken)):
                taken.pop()
                continue
            self.states += 1
            if self.states >= self.max_states:
                return None
            path.append((now, self._choices(now)))
        return None

    def _choices(self, state: State) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(self._options(state, position) for position in range(self.chain.num_positions)))

    def _options(self, state: State, position: int) -> list[int]:
        """Choices of ``position`` for the next slot: the last passes first, idle only where nothing else is sure."""
        chain, stages = self.chain, self.chain.num_stages
        weights = self.passes + position
        live, backwards = -state[weights], 0
        for number in chain.passes_at[position]:
            if number < stages:
                live += state[number]
            else:
                backwards += state[number]
        ready = [
            number
            for number in reversed(chain.passes_at[position])
            if state[number] < self.count
            and (number == 0 or state[number - 1] > state[number])
            and (number >= stages or live < self.room)
        ]
        if state[weights] < backwards:
            return [*ready, weights]
        return ready if ready and ready[0] >= stages else [*ready, IDLE]

    def _may_win(self, state: State, slot: int) -> bool:
        """Whether the slots left may be enough for the work left, and the state is new at this slot."""
        left = self.slots - slot
        for position, passes in enumerate(self.chain.passes_at):
            work = 3 * len(passes) // 2 * self.count - state[self.passes + position]
            for number in passes:
                work -= state[number]
                to_do = self.count - state[number]
                # The last of them goes on through the rest of the chain, and its W comes last.
                if to_do and to_do + self.passes - number > left:
                    return False
            if work > left:
                return False
        return self.refuted.get(state, slot + 1) > slot

    def orders(self, taken: list[tuple[int, ...]]) -> Orders:
        """The operations of each position; its ``W`` in the order of its ``I``."""
        result: Orders = [[] for _ in self.chain.passes_at]
        pending: list[list[int]] = [[] for _ in self.chain.passes_at]
        seen = [0] * self.passes
        for choice in taken:
            for position, number in enumerate(choice):
                if number >= self.passes:
                    result[position].append(pending[position].pop(0))
                elif number != IDLE:
                    operation = number * self.count + seen[number]
                    seen[number] += 1
                    result[position].append(operation)
                    if number >= self.chain.num_stages:
                        pending[position].append(operation + self.chain.num_stages * self.count)
        return result
