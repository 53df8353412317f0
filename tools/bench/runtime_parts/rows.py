"""The schedules that are measured: a row each. No torch."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from pipegrid.plans.generators import dualpipe_v, interleaved_1f1b, one_f_one_b, zero_bubble_v
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan.plan import Plan

RANKS = 4


@frozen
class Row:
    """A schedule of ours beside the class of `torch.distributed.pipelining.schedules` that is meant to do the same.

    ``torch_bound``: what our time per step may be of torch's, with empty stages.
    """

    name: str
    make: Callable[[int, int], Plan]
    peer: str
    torch_bound: float

    def plan(self, microbatches: int) -> Plan:
        """The plan that runs, messages and all: receives are posted early, as torch's lowering has them."""
        return lower(self.make(RANKS, microbatches), receives="early")


ROWS = (
    Row("1f1b", one_f_one_b, "Schedule1F1B", 0.9),
    Row("interleaved_1f1b", interleaved_1f1b, "ScheduleInterleaved1F1B", 0.6),
    Row("zero_bubble_v", zero_bubble_v, "ScheduleZBVZeroBubble", 0.6),
    Row("dualpipe_v", dualpipe_v, "ScheduleDualPipeV", 0.6),
)
