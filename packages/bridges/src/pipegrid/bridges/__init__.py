"""Tensors across rank grids: the reshard plan, and the bridges that execute it.

The names that need torch are loaded on first use, so planning works where torch is absent.

Names outside ``__all__`` (parts of a reshard plan, rarer errors) are imported from here as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.bridges.bridge import Axes, Packed, Whole
from pipegrid.reshard.errors import BridgeError, ShapeError as ShapeError
from pipegrid.bridges.errors import MissingTensorError as MissingTensorError
from pipegrid.core.graph import ModuleGraph, ModuleGraphError as ModuleGraphError
from pipegrid.bridges.multimodule import (
    EdgeOptions,
    Positions as Positions,
    collective_edges as collective_edges,
    positions_of as positions_of,
)
from pipegrid.reshard import (
    Box as Box,
    Completion as Completion,
    Links,
    Message as Message,
    Partial,
    Replicate,
    Replicated as Replicated,
    ReshardPlan as ReshardPlan,
    Shard,
    Sharded as Sharded,
    Side as Side,
    Sizes as Sizes,
    axis_names as axis_names,
    boundary_side as boundary_side,
    check_plan as check_plan,
    plan_reshard as plan_reshard,
    routes as routes,
)
from pipegrid.bridges.vtp import VTPTopology
from pipegrid.core.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.bridges.bridge import BridgeCommunicator
    from pipegrid.bridges.colocated import (
        BridgeDirection as BridgeDirection,
        ColocatedBridgeCommunicator,
        SliceInfo as SliceInfo,
    )
    from pipegrid.bridges.multimodule import (
        MultiModulePipelineCommunicator,
        RankModuleInfo as RankModuleInfo,
        Shape as Shape,
    )
    from pipegrid.bridges.vtp import VTPCommunicator

__all__ = [
    "Axes",
    "BridgeCommunicator",
    "BridgeError",
    "ColocatedBridgeCommunicator",
    "EdgeOptions",
    "Links",
    "ModuleGraph",
    "MultiModulePipelineCommunicator",
    "Packed",
    "Partial",
    "Replicate",
    "Shard",
    "VTPCommunicator",
    "VTPTopology",
    "Whole",
]

__getattr__, __dir__ = lazy_names(__name__, __all__)
