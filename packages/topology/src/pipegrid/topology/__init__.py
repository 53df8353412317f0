"""Rank grids, views, roles and process groups for training one model made of several modules.

Works without torch until a process group is created.

Names outside ``__all__`` (rarer errors, groups, parts of roles and replicas) are imported from here as well.
"""

from __future__ import annotations

from pipegrid.topology.collection import MultiModuleProcessGroupCollection, ProcessGroupCollection
from pipegrid.topology.ending import abort_group as abort_group, destroy_groups as destroy_groups
from pipegrid.topology.ending import discard_groups as discard_groups
from pipegrid.topology.errors import GridError as GridError, GridKeyError as GridKeyError, WorldError as WorldError
from pipegrid.topology.errors import GroupConnectionError as GroupConnectionError, GroupStoreError as GroupStoreError
from pipegrid.topology.errors import GroupCreationTimeoutError as GroupCreationTimeoutError
from pipegrid.topology.errors import PlacementError as PlacementError
from pipegrid.topology.grid import GroupRequest as GroupRequest, Relation as Relation, relation as relation
from pipegrid.topology.groups import GroupSpec as GroupSpec, control_store, create_groups as create_groups
from pipegrid.topology.groups import creation_order as creation_order
from pipegrid.topology.hyper_comm_grid import HyperCommGrid, create_grid_groups
from pipegrid.topology.job.job_store import job_store as job_store, serve_store as serve_store
from pipegrid.topology.job.placement import describe, place
from pipegrid.topology.job.replicas import data_lane as data_lane, replica_bounds as replica_bounds
from pipegrid.topology.job.replicas import replica_of, replica_samples, replica_sizes as replica_sizes
from pipegrid.topology.job.roles import MIMO_LANGUAGE_MODULE_KEY as MIMO_LANGUAGE_MODULE_KEY, RankRole
from pipegrid.topology.job.roles import ModuleLayout as ModuleLayout, ModuleStageInfo as ModuleStageInfo

from_device_mesh = HyperCommGrid.from_device_mesh
to_device_mesh = HyperCommGrid.to_device_mesh

__all__ = [
    "HyperCommGrid",
    "MultiModuleProcessGroupCollection",
    "ProcessGroupCollection",
    "RankRole",
    "control_store",
    "create_grid_groups",
    "describe",
    "place",
    "replica_of",
    "replica_samples",
]


def __dir__() -> list[str]:
    return __all__
