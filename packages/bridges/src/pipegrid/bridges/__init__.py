"""Tensors across rank grids: the reshard plan, and the bridges that execute it.

The names that need torch are loaded on first use, so planning works where torch is absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from pipegrid.bridges.multimodule import EdgeOptions, Positions, positions_of
from pipegrid.bridges.reshard import (
    Box,
    Completion,
    Links,
    Message,
    Partial,
    Replicated,
    ReshardPlan,
    Sharded,
    Side,
    Sizes,
    axis_names,
    boundary_side,
    check_plan,
    plan_reshard,
    routes,
)
from pipegrid.bridges.vtp import VTPTopology
from pipegrid.topology.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.bridges.bridge import BridgeCommunicator
    from pipegrid.bridges.colocated import BridgeDirection, ColocatedBridgeCommunicator, SliceInfo
    from pipegrid.bridges.multimodule import MultiModulePipelineCommunicator, RankModuleInfo
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

__getattr__, __dir__ = lazy_names(
    __name__,
    __all__,
    {
        "BridgeCommunicator": "bridge",
        "BridgeDirection": "colocated",
        "ColocatedBridgeCommunicator": "colocated",
        "MultiModulePipelineCommunicator": "multimodule",
        "RankModuleInfo": "multimodule",
        "SliceInfo": "colocated",
        "VTPCommunicator": "vtp",
    },
)
