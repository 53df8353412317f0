"""One gradient norm for the whole job, and its clipping."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pipegrid.schedules.arguments import as_number, require
from pipegrid.schedules.gradients.main_grad import Modules, accumulated, named_modules, parameters_of
from pipegrid.schedules.gradients.reduce import (
    GROUP,
    GROUP_REMEDY,
    GradientError,
    collection_of,
    device_of,
    lanes_group,
)


@torch.no_grad()
def clip_grad_norm_(
    modules: Modules,
    collections: Any,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    job_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Clip the gradients of the whole job to one norm. Every rank of the job calls it and gets the same value.

    Replicas count once: a parameter is counted by the first data lane, and by the first tp rank unless it is
    sharded over tp (attribute ``tensor_model_parallel``); of a tied parameter, the copy of the lowest stage counts,
    the others (attribute ``tied_replica``) do not. ``main_grad`` is clipped where a parameter keeps one. A norm that
    is not finite is not finite on every rank, and so are then the gradients: see `LossScaler` for a step to skip.

    Args:
        modules: as in `reduce_gradients`; call that first.
        collections: as in `reduce_gradients`; ``tp`` is read as well.
        max_norm: gradients are scaled by ``max_norm / (norm + 1e-6)`` where that is below 1.
        norm_type: 2, any positive p, or infinity.
        job_group: all ranks of the job; default: the default process group.

    Returns:
        The norm before clipping, a float64 scalar on the gradients' device.

    Raises:
        GradientError: a norm that is not positive, or an argument of another kind.
        StepArgumentError: ``modules`` holds what is no module.
    """
    remedy = "give a positive number"
    max_norm = as_number("max_norm", max_norm, remedy, above=0.0, finite=False, error=GradientError)
    norm_type = as_number("norm_type", norm_type, remedy, above=0.0, finite=False, error=GradientError)
    require("job_group", job_group, GROUP, GROUP_REMEDY, error=GradientError)
    gradients: list[torch.Tensor] = []
    infinite = norm_type == float("inf")
    # float64 in between: the sum of squares is then the same to the last float32 bit however it is cut over ranks.
    # Beside it whether any part is NaN: not every backend's MAX hands a NaN on, and ranks would disagree.
    total = torch.zeros(2, dtype=torch.float64, device=device_of(modules, job_group))
    counts = {name: _counting(collections, name) for name, _ in named_modules(modules)}
    for name, parameter in parameters_of(modules):
        gradient = accumulated(parameter)
        if gradient is None:
            continue
        gradients.append(gradient)
        whole, sharded = counts[name]
        counted = sharded if getattr(parameter, "tensor_model_parallel", False) else whole
        if counted and not getattr(parameter, "tied_replica", False):
            norm = torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64)
            part = norm.nan_to_num(nan=0.0, posinf=float("inf"))
            total[0] = torch.maximum(total[0], part) if infinite else total[0] + part**norm_type
            total[1] = torch.maximum(total[1], norm.isnan().double())
    dist.all_reduce(total, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=job_group)
    norm = total[0] if infinite else total[0] ** (1.0 / norm_type)
    norm = torch.where(total[1] > 0, torch.full_like(norm, float("nan")), norm)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm


def _counting(collections: Any, name: str) -> tuple[bool, bool]:
    """Whether this rank's part of a norm counts: of parameters that are whole on every tp rank, and of sharded ones."""
    first_lane = _is_first(lanes_group(collections, name))
    return first_lane and _is_first(getattr(collection_of(collections, name), "tp", None)), first_lane


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return group is None or group.rank() == 0
