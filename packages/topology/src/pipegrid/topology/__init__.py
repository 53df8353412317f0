"""Rank grids, views, roles and process groups for training one model made of several modules.

Works without torch until a process group is created.
"""

from __future__ import annotations

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
from pipegrid.topology.grid import GroupRequest, Relation, relation
from pipegrid.topology.groups import GroupSpec, control_store, create_groups, creation_order, destroy_groups
from pipegrid.topology.hyper_comm_grid import HyperCommGrid, create_grid_groups
from pipegrid.topology.placement import place
from pipegrid.topology.roles import MIMO_LANGUAGE_MODULE_KEY, ModuleLayout, ModuleStageInfo, RankRole

from_device_mesh = HyperCommGrid.from_device_mesh
to_device_mesh = HyperCommGrid.to_device_mesh

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


def __dir__() -> list[str]:
    return __all__
