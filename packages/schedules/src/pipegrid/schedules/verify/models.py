"""Order models in the proof of a plan: those that the rule of blocking covers, and a proof under one of them."""

from __future__ import annotations

from pipegrid.schedules.orders.communicators import orders_on
from pipegrid.schedules.orders.of_plan import orders_of_plan
from pipegrid.schedules.orders.prove import prove_order
from pipegrid.schedules.plan import Plan
from pipegrid.schedules.verify.table import Blocking
from pipegrid.transport.order import ORDER_MODELS, OrderModel
from pipegrid.transport.sharing import LaneSharing


def models_covered(blocking: Blocking) -> tuple[str, ...]:
    """The names of the order models under which a plan ends that is proved by a rule of blocking.

    With rendezvous a position holds, compute and all, until the other end of what it exchanges has come. Streams hold
    less: what they wait for has come earlier in that play. So it covers each model whose batches start their messages
    in an order no stricter than the rule's, and calls that wait for the whole device. Without rendezvous only a
    compute waits, for its inputs, as on gloo.
    """
    if not blocking.rendezvous:
        return ("gloo",)
    return tuple(name for name, model in ORDER_MODELS.items() if blocking.in_order or model.batched != "rank")


def require_end(plan: Plan, model: OrderModel, blocking: Blocking, *, drains: bool) -> None:
    """Raise for a plan, right in all else, that hangs under an order model: a cycle is named launch by launch."""
    if isinstance(blocking.lanes, LaneSharing):
        orders = orders_on(plan, blocking.lanes.numbers, model)
    else:
        orders = orders_of_plan(plan, lanes=blocking.lanes)
    prove_order(orders, model, buffered=not blocking.rendezvous, drains=drains)
