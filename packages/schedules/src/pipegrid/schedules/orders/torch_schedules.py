"""Plans of torch.distributed.pipelining's schedule objects. No torch: an object is read by its public attributes."""

from __future__ import annotations

from typing import Any

from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.plan import Plan, from_csv


def plan_of_torch(schedule: Any) -> Plan:
    """The plan that a schedule object of torch 2.11 to 2.15 runs, with the messages that it has.

    Raises:
        PlanError: it has no order that it runs. A schedule of one stage (`ScheduleGPipe`, `Schedule1F1B`) runs a loop
            of its own, and keeps an order for pictures: take `gpipe` or `one_f_one_b`.
    """
    name = type(schedule).__name__
    if any(base.__name__ == "PipelineScheduleSingle" for base in type(schedule).__mro__):
        raise PlanError(
            f"{name} runs a loop of its own, and its pipeline_order is for pictures; take the plan of the same name"
        )
    table = getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None)
    if not table:
        raise PlanError(f"{name} tells no order; it has neither pipeline_order_with_comms nor pipeline_order")
    rows = [",".join("" if action is None else str(action) for action in table[rank]) for rank in sorted(table)]
    return from_csv("\n".join(rows) + "\n")
