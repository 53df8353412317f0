"""What all generators share: checked sizes, and where the stages of a chain lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pipegrid.schedules.arguments import is_integer, require_integer, shown
from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.plan.actions import Action, backward, forward, input_backward, weight_backward
from pipegrid.schedules.plan.plan import Plan, compute_plan

Order = list[Action]


def check_sizes(**sizes: int) -> None:
    """Refuse sizes that are not integers of at least 1.

    Raises:
        PlanError: names the size.
    """
    for name, size in sizes.items():
        require_integer(name, size, error=PlanError)


def check_position(position: int, num_positions: int, num_microbatches: int) -> None:
    """Refuse sizes as `check_sizes`, and a position that does not exist.

    Raises:
        PlanError: names the size, or the position and the range.
    """
    check_sizes(num_positions=num_positions, num_microbatches=num_microbatches)
    if not is_integer(position) or position >= num_positions:
        raise PlanError(f"there is no position {shown(position)}; the plan has positions 0..{num_positions - 1}")


def looped_placement(num_positions: int, num_stages: int) -> tuple[int, ...]:
    """Stages round and round: stage ``s`` on position ``s % num_positions``."""
    return tuple(stage % num_positions for stage in range(num_stages))


def v_placement(num_positions: int) -> tuple[int, ...]:
    """Two chunks each, forth and back: stages 0..P-1 on positions 0..P-1, stages P..2P-1 on P-1..0."""
    return (*range(num_positions), *reversed(range(num_positions)))


class Counter:
    """Writes an order without arithmetic on indices: each verb takes the next microbatch of a stage.

    A schedule is drawn for as many microbatches as its phases need; those past ``num_microbatches`` are left
    out. What is left keeps its order, so it still runs.
    """

    def __init__(self, num_microbatches: int) -> None:
        self.order: Order = []
        self._count = num_microbatches
        self._done: dict[tuple[str, int], int] = {}
        self._owed: deque[tuple[int, int]] = deque()

    def _next(self, verb: str, stage: int) -> int:
        microbatch = self._done.get((verb, stage), 0)
        self._done[verb, stage] = microbatch + 1
        return microbatch

    def _add(self, make: Callable[[int, int], Action], stage: int, microbatch: int) -> None:
        if microbatch < self._count:
            self.order.append(make(stage, microbatch))

    def f(self, stage: int) -> None:
        """The next forward of ``stage``."""
        self._add(forward, stage, self._next("F", stage))

    def b(self, stage: int) -> None:
        """The next backward of ``stage``, whole."""
        self._add(backward, stage, self._next("B", stage))

    def i(self, stage: int) -> None:
        """The next backward of ``stage``, its input half; the other half is owed."""
        microbatch = self._next("B", stage)
        self._add(input_backward, stage, microbatch)
        self._owed.append((stage, microbatch))

    def w(self) -> None:
        """The weight half that has been owed longest."""
        self._add(weight_backward, *self._owed.popleft())

    @property
    def owes(self) -> bool:
        """Whether a weight half is owed."""
        return bool(self._owed)


def chain_plan(
    order: Callable[[int], Order],
    *,
    num_positions: int,
    num_microbatches: int,
    placement: tuple[int, ...],
    forward_only: bool = False,
) -> Plan:
    """The plan whose position ``p`` does ``order(p)``, over a chain of ``len(placement)`` stages."""
    return compute_plan(
        [order(position) for position in range(num_positions)],
        graph=len(placement),
        placement=placement,
        num_microbatches=num_microbatches,
        forward_only=range(len(placement)) if forward_only else (),
    )
