"""Plans for measured costs under a memory cap, steps around dead ranks, and named schedules side by side."""

from pipegrid.search.buffers import Buffered, PlanBuffers, PositionBuffers, SlotArrival, plan_buffers, position_buffers
from pipegrid.search.compare import COMPARED, Row, compare, comparison_table
from pipegrid.search.found import Found
from pipegrid.search.candidates import candidates
from pipegrid.search.foreign import (
    dualpipe_calls as dualpipe_calls,
    orders_of_deepspeed as orders_of_deepspeed,
    orders_of_dualpipe as orders_of_dualpipe,
    orders_of_hyperparallel as orders_of_hyperparallel,
    plan_of_jaxpp as plan_of_jaxpp,
    plan_of_megatron as plan_of_megatron,
)
from pipegrid.plans.network.network import Objective
from pipegrid.search.routed import (
    LostRank,
    RoutedStep,
    least_room,
    lost_rank_costs,
    lost_rank_table,
    reroute,
    schedule_routes,
)
from pipegrid.search.search import Progress, greedy, search
from pipegrid.search.slice_lengths import balanced_slices, slice_times

__all__ = [
    "COMPARED",
    "Buffered",
    "Found",
    "LostRank",
    "Objective",
    "PlanBuffers",
    "PositionBuffers",
    "Progress",
    "RoutedStep",
    "Row",
    "SlotArrival",
    "balanced_slices",
    "candidates",
    "compare",
    "comparison_table",
    "greedy",
    "least_room",
    "lost_rank_costs",
    "lost_rank_table",
    "plan_buffers",
    "position_buffers",
    "reroute",
    "schedule_routes",
    "search",
    "slice_times",
]
