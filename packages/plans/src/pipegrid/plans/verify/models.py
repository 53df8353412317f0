"""Order models in the proof of a plan: those that the rule of blocking covers, and a proof under one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipegrid.core.order import ORDER_MODELS, OrderModel
from pipegrid.core.sharing import LaneSharing
from pipegrid.plans.errors import PlanError
from pipegrid.plans.orders.communicators import orders_on
from pipegrid.plans.orders.of_plan import orders_of_plan
from pipegrid.plans.orders.prove import prove_order
from pipegrid.plans.plan import Plan
from pipegrid.plans.plan.dataflow import dataflow_of
from pipegrid.plans.verify.table import Blocking


def models_covered(plan: Plan, blocking: Blocking) -> tuple[str, ...]:
    """The names of the order models under which a plan ends that is proved by a rule of blocking.

    With rendezvous a position holds, compute and all, until the other end of what it exchanges has come. Streams hold
    less: what they wait for has come earlier in that play. So it covers each model whose batches start their messages
    in an order no stricter than the rule's, and calls that wait for the whole device. Without rendezvous only a
    compute waits, for its inputs, as on gloo.

    A message between stages that lie on several positions may have several routes at one of them. The rule starts all
    of these at once, and a device that runs one kernel at a time does not: for that model the plan is played.
    """
    if not blocking.rendezvous:
        return ("gloo",)
    names = [name for name, model in ORDER_MODELS.items() if blocking.in_order or model.batched != "rank"]
    if blocking.in_order and any(_fans(flow.routes) for flow in dataflow_of(plan).crossing):
        for name in [name for name in names if ORDER_MODELS[name].batched == "rank"]:
            try:
                require_end(plan, ORDER_MODELS[name], blocking, drains=True)
            except PlanError:
                names.remove(name)
    return tuple(names)


def _fans(routes: Sequence[tuple[int, int]]) -> bool:
    """Whether several of these routes of one message start or end at a position."""
    return any(count > 1 for count in Counter(end for route in routes for end in route).values())


def require_end(plan: Plan, model: OrderModel, blocking: Blocking, *, drains: bool) -> None:
    """Raise for a plan, right in all else, that hangs under an order model: a cycle is named launch by launch."""
    if isinstance(blocking.lanes, LaneSharing):
        orders = orders_on(plan, blocking.lanes.numbers, model)
    else:
        orders = orders_of_plan(plan, lanes=blocking.lanes)
    prove_order(orders, model, buffered=not blocking.rendezvous, drains=drains)
