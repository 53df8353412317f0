"""Tensors across rank grids: the reshard plan, and the bridges that execute it.

The names that need torch are loaded on first use, so planning works where torch is absent.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipegrid.bridges.box import Box
from pipegrid.bridges.errors import (
    BridgeError,
    CompletionError,
    DestroyedError,
    LaneTotalsError,
    MissingTensorError,
    NoBackwardError,
    NotReplicatedError,
    PendingGradientError,
    ShapeError,
    StageError,
    TilingError,
    UndeclaredDimError,
    VTPTopologyError,
    WrongSideError,
)
from pipegrid.bridges.graph import ModuleGraph, ModuleGraphError
from pipegrid.bridges.links import Links
from pipegrid.bridges.modules import EdgeOptions
from pipegrid.bridges.positions import Positions, positions_of
from pipegrid.bridges.reshard import Completion, Message, ReshardPlan, plan_reshard, routes
from pipegrid.bridges.side import Partial, Replicated, Sharded, Side, boundary_side
from pipegrid.bridges.sizes import Sizes, axis_names
from pipegrid.bridges.tiling import check_plan
from pipegrid.bridges.vtp_topology import VTPTopology

if TYPE_CHECKING:
    from pipegrid.bridges.bridge import BridgeCommunicator
    from pipegrid.bridges.colocated import BridgeDirection, ColocatedBridgeCommunicator, SliceInfo
    from pipegrid.bridges.module_part import RankModuleInfo
    from pipegrid.bridges.multimodule import MultiModulePipelineCommunicator
    from pipegrid.bridges.vtp import VTPCommunicator

__all__ = [
    "Box",
    "BridgeCommunicator",
    "BridgeDirection",
    "BridgeError",
    "ColocatedBridgeCommunicator",
    "Completion",
    "CompletionError",
    "DestroyedError",
    "EdgeOptions",
    "LaneTotalsError",
    "Links",
    "Message",
    "MissingTensorError",
    "ModuleGraph",
    "ModuleGraphError",
    "MultiModulePipelineCommunicator",
    "NoBackwardError",
    "NotReplicatedError",
    "Partial",
    "PendingGradientError",
    "Positions",
    "RankModuleInfo",
    "Replicated",
    "ReshardPlan",
    "ShapeError",
    "Sharded",
    "Side",
    "Sizes",
    "SliceInfo",
    "StageError",
    "TilingError",
    "UndeclaredDimError",
    "VTPCommunicator",
    "VTPTopology",
    "VTPTopologyError",
    "WrongSideError",
    "axis_names",
    "boundary_side",
    "check_plan",
    "plan_reshard",
    "positions_of",
    "routes",
]

_NEED_TORCH = {
    "BridgeCommunicator": "bridge",
    "BridgeDirection": "colocated",
    "ColocatedBridgeCommunicator": "colocated",
    "MultiModulePipelineCommunicator": "multimodule",
    "RankModuleInfo": "module_part",
    "SliceInfo": "colocated",
    "VTPCommunicator": "vtp",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
