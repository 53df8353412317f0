"""Plans from what torch's schedule objects plan. No torch."""

from __future__ import annotations

from typing import Any

from pipegrid.plans.errors import PlanError
from pipegrid.plans.orders.orders import Orders
from pipegrid.plans.orders.read import orders_from_csv
from pipegrid.plans.plan import Plan, from_csv


def plan_of_torch(schedule: Any) -> Plan:
    """The plan that a schedule object of torch 2.11 to 2.15 runs, with the messages that it has.

    Those of torch 2.15 also wait for their sends (``4WAIT_SEND_F7``): `orders_of_torch` has these waits, a plan none.

    Raises:
        PlanError: it has no order that it runs. A schedule of one stage (`ScheduleGPipe`, `Schedule1F1B`) runs a loop
            of its own, and keeps an order for pictures: take `gpipe` or `one_f_one_b`.
        PlanSyntaxError: it has an action that plans do not have.
    """
    return from_csv(_csv_of_torch(schedule))


def orders_of_torch(schedule: Any, *, batched: bool = True) -> Orders:
    """The launches of each rank of a schedule object of torch on its one group, and where it waits for its sends.

    torch launches each message alone; what is proved of batches of one (``batched``), whose lines are longer, holds of
    these as well.

    Raises:
        PlanError: as `plan_of_torch`.
    """
    return orders_from_csv(_csv_of_torch(schedule), batched=batched)


def _csv_of_torch(schedule: Any) -> str:
    """The table that a schedule object runs."""
    name = type(schedule).__name__
    if any(base.__name__ == "PipelineScheduleSingle" for base in type(schedule).__mro__):
        raise PlanError(
            f"{name} runs a loop of its own, and its pipeline_order is for pictures; take the plan of the same name"
        )
    table = getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None)
    if not table:
        raise PlanError(f"{name} tells no order; it has neither pipeline_order_with_comms nor pipeline_order")
    rows = [",".join("" if action is None else str(action) for action in table[rank]) for rank in sorted(table)]
    return "\n".join(rows) + "\n"
