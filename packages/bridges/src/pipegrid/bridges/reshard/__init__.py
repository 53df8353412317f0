"""The reshard plan: sides and sizes in, messages and completions out. Pure; no torch."""

from __future__ import annotations

from pipegrid.bridges.reshard.box import Box
from pipegrid.bridges.reshard.links import AUTO_LEADER_BYTES, Choice, Links, Route, Strategy
from pipegrid.bridges.reshard.part import RankPart
from pipegrid.bridges.reshard.plan import Completion, Message, ReshardPlan, plan_reshard, routes
from pipegrid.bridges.reshard.prove import check_plan
from pipegrid.bridges.reshard.side import (
    BATCH,
    REPLICAS,
    End,
    GridLike,
    Partial,
    Placement,
    Replicate,
    Replicated as Replicated,
    Shard,
    Sharded as Sharded,
    Side,
    as_grid,
    boundary_side,
    replica_side,
)
from pipegrid.bridges.reshard.sizes import (
    SPLIT_SIZES,
    AxisNames,
    Sizes,
    as_axes,
    as_axis_of,
    axis_names,
    marked_samples,
)

__all__ = [
    "AUTO_LEADER_BYTES",
    "BATCH",
    "REPLICAS",
    "SPLIT_SIZES",
    "AxisNames",
    "Box",
    "Choice",
    "Completion",
    "End",
    "GridLike",
    "Links",
    "Message",
    "Partial",
    "Placement",
    "RankPart",
    "Replicate",
    "ReshardPlan",
    "Route",
    "Shard",
    "Side",
    "Sizes",
    "Strategy",
    "as_axes",
    "as_axis_of",
    "as_grid",
    "axis_names",
    "boundary_side",
    "check_plan",
    "marked_samples",
    "plan_reshard",
    "replica_side",
    "routes",
]
