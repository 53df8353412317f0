"""Reshard plans: who sends which part of a tensor to whom, between two grids, with its proof. Pure; no torch.

Sides and sizes in, messages and completions out; positions of modules on their grids.
"""

from pipegrid.reshard.box import Box
from pipegrid.reshard.links import AUTO_LEADER_BYTES, StrategyChoice, Links, Route, Strategy
from pipegrid.reshard.part import RankPart
from pipegrid.reshard.plan import Completion, Message, ReshardPlan, plan_reshard, routes
from pipegrid.reshard.errors import BridgeError, ShapeError
from pipegrid.reshard.positions import Positions, alike, check_places, collective_edges, edge_between, positions_of
from pipegrid.reshard.prove import check_plan
from pipegrid.reshard.side import BATCH, REPLICAS, End, GridLike, Side, as_grid, boundary_side, replica_side
from pipegrid.reshard.side import Partial, Placement, Replicate, Replicated as Replicated, Shard, Sharded as Sharded
from pipegrid.reshard.sizes import SPLIT_SIZES, AxisNames, Sizes, as_axes, as_axis_of, axis_names, marked_samples

__all__ = [
    "AUTO_LEADER_BYTES",
    "BATCH",
    "REPLICAS",
    "SPLIT_SIZES",
    "AxisNames",
    "Box",
    "BridgeError",
    "Completion",
    "End",
    "GridLike",
    "Links",
    "Message",
    "Partial",
    "Placement",
    "Positions",
    "RankPart",
    "Replicate",
    "ReshardPlan",
    "Route",
    "ShapeError",
    "Shard",
    "Side",
    "Sizes",
    "Strategy",
    "StrategyChoice",
    "alike",
    "as_axes",
    "as_axis_of",
    "as_grid",
    "axis_names",
    "boundary_side",
    "check_places",
    "check_plan",
    "collective_edges",
    "edge_between",
    "marked_samples",
    "plan_reshard",
    "positions_of",
    "replica_side",
    "routes",
]
