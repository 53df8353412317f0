"""Grids as `DeviceMesh` and back, on the groups that exist; no second set is made."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from pipegrid.topology._checks import as_kind, as_text
from pipegrid.topology.errors import GridShapeError
from pipegrid.topology.grid_groups import adopt
from pipegrid.topology.hyper_comm_grid import Dims, GroupRequest, HyperCommGrid


def to_device_mesh(
    grid: HyperCommGrid,
    dims: Dims | None = None,
    *,
    view: str | None = None,
    device_type: str | None = None,
) -> DeviceMesh | None:
    """The mesh of this rank's slice of ``grid`` over ``dims``; None for a rank outside the grid.

    A mesh's last dimension varies fastest, a grid's first one: the mesh's dimensions are the grid's in
    reverse, for example ``("dp", "tp")``. The groups are those of `HyperCommGrid.get_pg`, each dimension's own.

    Args:
        grid: the grid, with a group made for each of the dims.
        dims: which dimensions, in any order; None is all.
        view: the view they belong to.
        device_type: as for DeviceMesh; None is the device that the group's backend serves.

    Raises:
        GroupMissingError: a dimension has no group yet.
        GridShapeError: no grid, or no kind of device.
    """
    as_kind(grid, "grid", HyperCommGrid, "place() makes them", error=GridShapeError)
    if device_type is not None:
        _require_device_type(device_type)
    names = grid.select_dims(dims, view=view)[::-1]
    groups = [grid.get_pg(name, view=view) for name in names]
    here = dist.get_rank()
    if here not in grid.ranks:
        return None
    present = [group for group in groups if group is not None]
    ranks = torch.tensor(list(grid.group_ranks(names, here, view=view)), dtype=torch.int)
    mesh = ranks.reshape([grid.dim_size(name, view=view) for name in names])
    kind = device_type or _device_type(present[0])
    return DeviceMesh.from_group(present, kind, mesh, mesh_dim_names=names)


def _require_device_type(device_type: str) -> None:
    try:
        torch.device(as_text(device_type, "device_type", error=GridShapeError))
    except RuntimeError as error:
        raise GridShapeError(f"device_type is {device_type!r}; give one that torch knows, such as 'cpu'") from error


def _device_type(group: ProcessGroup) -> str:
    """The accelerator that the group serves by a backend of its own, else the CPU."""
    served = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    own = [device for device, backend in served.items() if device != "cpu" and backend != served.get("cpu")]
    return own[0] if own else "cpu"


def from_device_mesh(mesh: DeviceMesh) -> HyperCommGrid:
    """The grid of a mesh, whose groups it uses and never destroys.

    Raises:
        GridShapeError: no DeviceMesh; or it has no dimension names, or its ranks are not consecutive with the last
            dimension fastest, so that they are no grid.
    """
    as_kind(mesh, "mesh", DeviceMesh, "init_device_mesh makes one", error=GridShapeError)
    names = mesh.mesh_dim_names
    if names is None:
        raise GridShapeError(
            "the DeviceMesh has no mesh_dim_names, but a grid's dimensions are named; "
            "pass mesh_dim_names when the mesh is made"
        )
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        raise GridShapeError(
            f"the DeviceMesh {tuple(names)} of ranks {mesh.mesh.tolist()} is no grid: a grid's ranks are "
            f"consecutive with the last mesh dimension fastest; use the whole mesh instead of a slice of it, "
            f"or a view for a second order of the same ranks"
        )
    grid = HyperCommGrid(tuple(mesh.mesh.shape)[::-1], names[::-1], ranks[0])
    for name in names:
        if grid.is_current_rank_in_grid():
            adopt(grid, GroupRequest(name), mesh.get_group(name), grid.group_ranks(name))
    return grid
