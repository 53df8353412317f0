"""Gradients that are DTensors: the shard of this rank, what fully_shard has summed already, and partial sums.

No DTensor operation that communicates is used: in one, a rank without the parameter, or without its gradient, is
missing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pipegrid.autograd.fsdp import divide_factor
from pipegrid.autograd.tree import fsdp_among


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor; without importing them."""
    return hasattr(tensor, "device_mesh")


def mesh_ranks(tensor: Any) -> frozenset[int]:
    """The ranks that hold the shards of a DTensor; none of another tensor."""
    mesh = getattr(tensor, "device_mesh", None)
    return frozenset() if mesh is None else frozenset(mesh.mesh.flatten().tolist())


def local_of(tensor: Any) -> torch.Tensor:
    """The shard of a DTensor on this rank, sharing its memory; any other tensor itself. Call it without grad mode."""
    shard: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return shard


def sharded_like(parameter: Any, shard: torch.Tensor) -> torch.Tensor:
    """``shard`` as the DTensor that it is a part of, where the parameter is one."""
    if not is_dtensor(parameter) or is_dtensor(shard):
        return shard
    from torch.distributed.tensor import DTensor

    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())


def replicating_groups(parameter: Any) -> list[dist.ProcessGroup]:
    """The groups, by mesh dim, that hold a DTensor's shard alike: over these, gradients may be parts of a sum."""
    if not is_dtensor(parameter):
        return []
    mesh = parameter.device_mesh
    return [
        mesh.get_group(dim)
        for dim, placement in enumerate(parameter.placements)
        if placement.is_replicate() and mesh.shape[dim] > 1
    ]


def partial_groups(gradient: Any) -> list[dist.ProcessGroup]:
    """The groups to sum a DTensor's local parts over, by mesh dim; empty where it is not a partial sum."""
    if not is_dtensor(gradient):
        return []
    mesh = gradient.device_mesh
    return [mesh.get_group(dim) for dim, placement in enumerate(gradient.placements) if placement.is_partial()]


def unlike_its_parameter(parameter: Any, gradient: Any) -> str | None:
    """The reason why the local parts of a gradient neither are nor add up to the parameter's shards; None: they do."""
    if not is_dtensor(gradient) or not is_dtensor(parameter):
        return None if is_dtensor(gradient) == is_dtensor(parameter) else "only one of the two is a DTensor"
    for found, wanted in zip(gradient.placements, parameter.placements, strict=True):
        adds_up = wanted.is_replicate() and (found.is_partial("sum") or found.is_partial("avg"))
        if found != wanted and not adds_up:
            return f"placements {tuple(gradient.placements)} of a parameter with {tuple(parameter.placements)}"
    return None


def summed_like(parameter: Any, gradient: Any, total: torch.Tensor) -> torch.Tensor:
    """``total``, the sum of the parts of the partial ``gradient``, as a DTensor with the parameter's placements."""
    for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
        if placement.is_partial("avg"):
            total = total / size
    return sharded_like(parameter, total)


def fsdp_divisors(module: torch.nn.Module) -> dict[int, float | None]:
    """The divisor of each ``fully_shard`` parameter's gradient, by the parameter's id; None: the ranks of its mesh."""
    found: dict[int, float | None] = {}
    for inner in fsdp_among(module.modules()):  # the innermost owns a parameter
        factor = divide_factor(inner)
        found |= {id(parameter): factor for parameter in inner.parameters() if is_dtensor(parameter)}
    return found
