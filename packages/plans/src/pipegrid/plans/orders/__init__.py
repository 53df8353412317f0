"""Orders of other programs: what each rank launches, in which order, and the proof that no rank gets stuck."""

from pipegrid.plans.orders.communicators import SharedCommunicators, fewest_communicators
from pipegrid.plans.orders.of_plan import orders_of_plan
from pipegrid.plans.orders.orders import Launch, MessageEnd, Orders
from pipegrid.plans.orders.prove import OrderProof, prove_order
from pipegrid.plans.orders.read import orders_from_csv, orders_from_json, orders_of_torch, plan_of_torch

__all__ = [
    "Launch",
    "MessageEnd",
    "OrderProof",
    "Orders",
    "SharedCommunicators",
    "fewest_communicators",
    "orders_from_csv",
    "orders_from_json",
    "orders_of_plan",
    "orders_of_torch",
    "plan_of_torch",
    "prove_order",
]
