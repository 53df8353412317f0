"""Orders of other programs: what each rank launches, in which order, and the proof that no rank gets stuck."""

from pipegrid.schedules.orders.communicators import SharedCommunicators, fewest_communicators
from pipegrid.schedules.orders.of_plan import orders_of_plan
from pipegrid.schedules.orders.orders import Launch, Message, Orders
from pipegrid.schedules.orders.prove import OrderProof, prove_order
from pipegrid.schedules.orders.read import is_orders, orders_from_csv, orders_from_json
from pipegrid.schedules.orders.others import orders_of_torch, plan_of_megatron, plan_of_table, plan_of_torch

__all__ = [
    "Launch",
    "Message",
    "OrderProof",
    "Orders",
    "SharedCommunicators",
    "fewest_communicators",
    "is_orders",
    "orders_from_csv",
    "orders_from_json",
    "orders_of_plan",
    "orders_of_torch",
    "plan_of_megatron",
    "plan_of_table",
    "plan_of_torch",
    "prove_order",
]
