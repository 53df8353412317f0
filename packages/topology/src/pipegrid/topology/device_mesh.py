"""Groups of a grid as a `DeviceMesh`, and a `DeviceMesh` as a grid; neither makes groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from pipegrid.topology.errors import GridError
from pipegrid.topology.grid import Grid
from pipegrid.topology.torch_compat import accelerator_of, backends_by_device


def mesh_over(
    names: Sequence[str], sizes: Sequence[int], ranks: Sequence[int], groups: Sequence[ProcessGroup], kind: str | None
) -> DeviceMesh:
    """The mesh of ``ranks`` over dims ``names`` of these sizes, the last dim fastest, one existing group per dim.

    Args:
        names: of the mesh's dims.
        sizes: of the mesh's dims.
        ranks: global ranks in the mesh's order.
        groups: this rank's group of each dim.
        kind: type of the devices, such as ``cpu``; None is the device that the groups' backend serves.
    """
    if kind is None:
        kind = accelerator_of(backends_by_device(dist.get_backend_config(groups[0]))) or "cpu"
    mesh = torch.tensor(list(ranks), dtype=torch.int).reshape(list(sizes))
    return DeviceMesh.from_group(list(groups), torch.device(kind).type, mesh, mesh_dim_names=tuple(names))


def grid_of(mesh: DeviceMesh) -> Grid:
    """The mesh's ranks as a grid, the dims in reverse."""
    names = mesh.mesh_dim_names
    if names is None:
        raise GridError("the DeviceMesh has no mesh_dim_names; the dims of a grid have names")
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise GridError(
            f"the DeviceMesh {tuple(names)} of ranks {mesh.mesh.tolist()} is not a grid: "
            f"the ranks of a grid ascend, the last dim of the mesh fastest"
        )
    return Grid(tuple(mesh.mesh.shape)[::-1], names[::-1], members=ranks)
