"""Parts that the schedules share: where the stages of a chain lie, and a writer of orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipegrid.plans.plan import Action, Plan, Step, actions_of, compute_plan
from pipegrid.plans.plan.actions import backward, forward, input_backward, weight_backward

Order = list[Action]
Steps = list[Step]  # an order with pairs


def looped_placement(num_positions: int, num_stages: int) -> tuple[int, ...]:
    """Round and round: stage ``s`` on position ``s % num_positions``."""
    return tuple(stage % num_positions for stage in range(num_stages))


def v_placement(num_positions: int) -> tuple[int, ...]:
    """Two chunks each, down and back up: stages 0..P-1 on positions 0..P-1, stages P..2P-1 on P-1..0."""
    return (*range(num_positions), *reversed(range(num_positions)))


class OrderBuilder:
    """Writes an order without arithmetic on indices: each verb takes the next microbatch of a stage.

    Microbatches past ``num_microbatches`` are left out; what is left keeps its order, so it still runs.
    """

    def __init__(self, num_microbatches: int) -> None:
        self.order: Steps = []
        self._count = num_microbatches
        self._done: dict[tuple[str, int], int] = {}
        self._owed: list[tuple[int, int]] = []

    def _add(self, make: Callable[[int, int], Action], stage: int, microbatch: int) -> None:
        if microbatch < self._count:
            self.order.append(make(stage, microbatch))

    def _next(self, verb: str, stage: int) -> int:
        microbatch = self._done.get((verb, stage), 0)
        self._done[verb, stage] = microbatch + 1
        return microbatch

    def f(self, stage: int, times: int = 1) -> None:
        """The next forwards of ``stage``."""
        for _ in range(times):
            self._add(forward, stage, self._next("F", stage))

    def b(self, stage: int) -> None:
        """The next backward of ``stage``, whole."""
        self._add(backward, stage, self._next("B", stage))

    def pair(self, first: int, second: int, *, split: bool = False, apart: bool = False) -> None:
        """The next forward of ``first`` beside the next backward of ``second``, or before it where ``apart``."""
        before = len(self.order)
        self.f(first)
        (self.i if split else self.b)(second)
        both = [action for step in self.order[before:] for action in actions_of(step)]
        self.order[before:] = [tuple(both)] if len(both) == 2 and not apart else both

    def i(self, stage: int) -> None:
        """The next backward of ``stage``, its input half; the other half is owed."""
        microbatch = self._next("B", stage)
        self._add(input_backward, stage, microbatch)
        self._owed.append((stage, microbatch))

    def w(self, stage: int | None = None) -> None:
        """The weight half that has been owed longest, of ``stage`` where given."""
        index = next(n for n, (owing, _) in enumerate(self._owed) if stage in (None, owing))
        self._add(weight_backward, *self._owed.pop(index))

    def finish(self, first: int | None = None) -> Steps:
        """The order, with the weight halves that are owed at its end, those of stage ``first`` before the others."""
        self._owed.sort(key=lambda owed: owed[0] != first)
        while self._owed:
            self.w()
        return self.order


def split_order(stage: int, num_microbatches: int, *, warmup: int, delay: int) -> Steps:
    """``warmup`` forwards, then F, I and W in turn, the W always ``delay`` microbatches behind the I."""
    builder = OrderBuilder(num_microbatches)
    builder.f(stage, warmup)
    for microbatch in range(num_microbatches):
        builder.f(stage)
        builder.i(stage)
        if microbatch >= delay:
            builder.w()
    return builder.finish()


def chain_plan(
    order: Callable[[int], Sequence[Step]],
    num_positions: int,
    num_microbatches: int,
    placement: tuple[int, ...] | None = None,
    *,
    forward_only: bool = False,
) -> Plan:
    """The plan of ``order(position)`` on each position, over a chain whose stages lie as in ``placement``."""
    places = looped_placement(num_positions, num_positions) if placement is None else placement
    return compute_plan(
        [order(position) for position in range(num_positions)],
        graph=len(places),
        placement=places,
        num_microbatches=num_microbatches,
        forward_only=range(len(places)) if forward_only else (),
    )
