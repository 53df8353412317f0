"""Rank grids, views, roles and process groups for many-module training.

The names that need torch are loaded on first use, so planning works where torch is absent.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipegrid.topology.collection import MultiModuleProcessGroupCollection, ProcessGroupCollection
from pipegrid.topology.data_lanes import data_lane, lane_bounds, lane_samples, lane_sizes
from pipegrid.topology.describe import describe
from pipegrid.topology.errors import (
    CoordinateError,
    GridShapeError,
    GridSpanError,
    GroupCreationTimeoutError,
    GroupExistsError,
    GroupMissingError,
    GroupSpecError,
    PlacementError,
    RankNotInGridError,
    RoleError,
    UnknownDimensionError,
    UnknownViewError,
    ViewError,
    WorldSizeUnknownError,
)
from pipegrid.topology.group_spec import GroupSpec, creation_order
from pipegrid.topology.hyper_comm_grid import GroupRequest, HyperCommGrid
from pipegrid.topology.placement import place
from pipegrid.topology.relations import Relation, relation
from pipegrid.topology.roles import MIMO_LANGUAGE_MODULE_KEY, ModuleLayout, ModuleStageInfo, RankRole

if TYPE_CHECKING:
    from pipegrid.topology.device_mesh import from_device_mesh, to_device_mesh
    from pipegrid.topology.grid_groups import create_grid_groups
    from pipegrid.topology.process_groups import control_store, create_groups, destroy_groups

__all__ = [
    "MIMO_LANGUAGE_MODULE_KEY",
    "CoordinateError",
    "GridShapeError",
    "GridSpanError",
    "GroupCreationTimeoutError",
    "GroupExistsError",
    "GroupMissingError",
    "GroupRequest",
    "GroupSpec",
    "GroupSpecError",
    "HyperCommGrid",
    "ModuleLayout",
    "ModuleStageInfo",
    "MultiModuleProcessGroupCollection",
    "PlacementError",
    "ProcessGroupCollection",
    "RankNotInGridError",
    "RankRole",
    "Relation",
    "RoleError",
    "UnknownDimensionError",
    "UnknownViewError",
    "ViewError",
    "WorldSizeUnknownError",
    "control_store",
    "create_grid_groups",
    "create_groups",
    "creation_order",
    "data_lane",
    "describe",
    "destroy_groups",
    "from_device_mesh",
    "lane_bounds",
    "lane_samples",
    "lane_sizes",
    "place",
    "relation",
    "to_device_mesh",
]

_TORCH_HALF = {
    "control_store": "process_groups",
    "create_grid_groups": "grid_groups",
    "create_groups": "process_groups",
    "destroy_groups": "process_groups",
    "from_device_mesh": "device_mesh",
    "to_device_mesh": "device_mesh",
}


def __getattr__(name: str) -> Any:
    if name not in _TORCH_HALF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_TORCH_HALF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
