"""Tensors across rank grids: the reshard plan, and the bridges that execute it.

The names that need torch are loaded on first use, so planning works where torch is absent.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipegrid.bridges.box import Box
from pipegrid.bridges.errors import (
    BridgeError,
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

if TYPE_CHECKING:
    from pipegrid.bridges.bridge import BridgeCommunicator
    from pipegrid.bridges.colocated import BridgeDirection, ColocatedBridgeCommunicator, SliceInfo
    from pipegrid.bridges.multimodule import MultiModulePipelineCommunicator, RankModuleInfo

__all__ = [
    "Box",
    "BridgeCommunicator",
    "BridgeDirection",
    "BridgeError",
    "ColocatedBridgeCommunicator",
    "Completion",
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
    "RankModuleInfo": "multimodule",
    "SliceInfo": "colocated",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
