"""Tensors across rank grids: the reshard plan, and the bridges that execute it.

The names that need torch are loaded on first use, so planning works where torch is absent.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
from pipegrid.bridges.multimodule.modules import EdgeOptions
from pipegrid.bridges.multimodule.positions import Positions, positions_of
from pipegrid.bridges.reshard.box import Box
from pipegrid.bridges.reshard.links import Links
from pipegrid.bridges.reshard.plan import Completion, Message, ReshardPlan, plan_reshard, routes
from pipegrid.bridges.reshard.prove import check_plan
from pipegrid.bridges.reshard.side import Partial, Replicated, Sharded, Side, boundary_side
from pipegrid.bridges.reshard.sizes import Sizes, axis_names
from pipegrid.bridges.vtp.topology import VTPTopology

if TYPE_CHECKING:
    from pipegrid.bridges.bridge.communicator import BridgeCommunicator
    from pipegrid.bridges.colocated import BridgeDirection, ColocatedBridgeCommunicator, SliceInfo
    from pipegrid.bridges.multimodule.communicator import MultiModulePipelineCommunicator
    from pipegrid.bridges.multimodule.rank_modules import RankModuleInfo
    from pipegrid.bridges.vtp.communicator import VTPCommunicator

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
    "BridgeCommunicator": "bridge.communicator",
    "BridgeDirection": "colocated",
    "ColocatedBridgeCommunicator": "colocated",
    "MultiModulePipelineCommunicator": "multimodule.communicator",
    "RankModuleInfo": "multimodule.rank_modules",
    "SliceInfo": "colocated",
    "VTPCommunicator": "vtp.communicator",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
