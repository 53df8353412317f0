"""Tensors across rank grids: the reshard plan, and the bridges that execute it.

The names that need torch are loaded on first use, so planning works where torch is absent.

Names outside ``__all__`` (parts of a reshard plan, rarer errors) are imported from here as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.bridges.bridge.options import EdgeOptions
from pipegrid.bridges.bridge.structure import Axes, Packed, Whole
from pipegrid.bridges.errors import MissingTensorError as MissingTensorError
from pipegrid.bridges.vtp.topology import VTPTopology
from pipegrid.core.graph import ModuleGraph, ModuleGraphError as ModuleGraphError
from pipegrid.core.lazy import lazy_names
from pipegrid.reshard import Box as Box, Sizes as Sizes, axis_names as axis_names
from pipegrid.reshard import BridgeError, ShapeError as ShapeError
from pipegrid.reshard import Completion as Completion, Links, Message as Message, ReshardPlan as ReshardPlan
from pipegrid.reshard import Partial, Replicate, Replicated as Replicated, Shard, Sharded as Sharded
from pipegrid.reshard import Positions as Positions, collective_edges as collective_edges, positions_of as positions_of
from pipegrid.reshard import Side as Side, boundary_side as boundary_side
from pipegrid.reshard import check_plan as check_plan, plan_reshard as plan_reshard, routes as routes

if TYPE_CHECKING:
    from pipegrid.bridges.bridge.communicator import BridgeCommunicator
    from pipegrid.bridges.colocated import BridgeDirection as BridgeDirection, ColocatedBridgeCommunicator
    from pipegrid.bridges.colocated import SliceInfo as SliceInfo
    from pipegrid.bridges.multimodule.communicator import MultiModulePipelineCommunicator
    from pipegrid.bridges.multimodule.dict_api import Shape as Shape
    from pipegrid.bridges.multimodule.rank_modules import RankModuleInfo as RankModuleInfo
    from pipegrid.bridges.vtp.communicator import VTPCommunicator

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
