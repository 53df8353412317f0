"""Steps in which replicas differ: routes around dead actors, their schedules, the bound, and what a death costs."""

from pipegrid.search.routed.bound import routed_bound
from pipegrid.search.routed.cost import LostRank, least_room, lost_rank_costs, lost_rank_table
from pipegrid.search.routed.reroute import reroute
from pipegrid.search.routed.schedule import RoutedStep, routed_problem, schedule_routes

__all__ = [
    "LostRank",
    "RoutedStep",
    "least_room",
    "lost_rank_costs",
    "lost_rank_table",
    "reroute",
    "routed_bound",
    "routed_problem",
    "schedule_routes",
]
