"""One gradient norm for the whole job, and clipping to it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import torch.distributed as dist

from pipegrid.core.fields import Rule, checked
from pipegrid.gradients import foreach
from pipegrid.gradients.all_reduce import all_reduce, reduce_few
from pipegrid.gradients.dtensors import local_of, mesh_ranks
from pipegrid.gradients.errors import GradientError
from pipegrid.gradients.groups import device_of, ranks_of
from pipegrid.gradients.layout import GradientLayout, ParameterGradient
from pipegrid.gradients.main_grad import Modules, accumulated
from pipegrid.monitor.collectives import Waiting

if TYPE_CHECKING:
    from pipegrid.monitor.monitor import Monitor


def _above_zero(value: Any) -> float:
    number = float(value)
    if not number > 0:
        raise ValueError
    return number


_Add = Literal["as_computed", "by_unit"]
Bound = Annotated[float, Rule(_above_zero, "a number above 0, or infinity")]


@torch.no_grad()
def clip_grad_norm_(
    modules: Modules,
    collections: Any,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    job_group: dist.ProcessGroup | None = None,
    deadline: float | None = None,
    monitor: Monitor | None = None,
    add: Literal["as_computed", "by_unit"] = "as_computed",
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """Clip the gradients of the whole job to one norm. Every rank of the job calls it and gets the same value.

    Replicas count once: a parameter by its first replica, and by the first tp rank unless it is sharded over tp
    (attribute ``tensor_model_parallel``); a tied one by the copy of its lowest stage (the others have the attribute
    ``tied_replica``); a DTensor by its shards. ``main_grad`` is clipped where a parameter keeps one. A norm that is not
    finite is so on every rank, and so are then the gradients: see `LossScaler` for a step to skip.

    Args:
        modules: as in `reduce_gradients`; call that first.
        collections: as in `reduce_gradients`; ``tp`` is read as well.
        max_norm: gradients are scaled by ``max_norm / (norm + 1e-6)`` where that is below 1. Infinity measures, and
            leaves them as they are.
        norm_type: 2, any positive p, or infinity.
        job_group: all ranks of the job; default: the default process group.
        deadline: seconds that the host waits for the all-reduce; None leaves it to the group's timeout.
        monitor: of the job, whose deadline and failures then end the wait.
        add: ``"by_unit"`` rounds the sum over ranks once, so that it does not depend on which ranks there are; the host
            waits for it. For tests, with `PipelineConfig` of the same ``grad_add``.
        beside: float64 numbers that the all-reduce of the norm adds up as well, in place.

    Returns:
        The norm before clipping, a float64 scalar on the gradients' device.

    Raises:
        GradientError: a norm that is not positive; a missing group; a DTensor with partial gradients, or over some of
            the replicas.
        CollectiveFailedError: past the deadline.
        JobFailedError: with a monitor: another rank failed, or its deadline passed.

    Examples:
        >>> import torch
        >>> from pipegrid.topology import ProcessGroupCollection
        >>> stage = torch.nn.Linear(4, 1, bias=False)
        >>> stage(torch.ones(1, 4)).sum().backward()
        >>> clip_grad_norm_(stage, ProcessGroupCollection(), 1.0)
        tensor(2., dtype=torch.float64)
    """
    max_norm = checked(max_norm, Bound, "max_norm", GradientError)
    norm_type = checked(norm_type, Bound, "norm_type", GradientError)
    add = checked(add, _Add, "add", GradientError)
    gradients: list[torch.Tensor] = []
    counted: list[torch.Tensor] = []
    layout = GradientLayout.of(modules, collections)
    layout.require_groups(("tp",))  # also on ranks without gradients
    for each in layout.trained:
        if (gradient := accumulated(each.parameter)) is not None:
            gradients.append(local_of(gradient))
            if _counts(each, gradient) and gradients[-1].numel():
                part = gradients[-1]
                counted.append(part.abs() if part.is_complex() else part)
    infinite = math.isinf(norm_type)
    # float64 in between: the sum of powers is then the same to the last float32 bit however it is cut over ranks.
    # Beside it whether any part is NaN: not every backend's MAX hands a NaN on, and ranks would disagree.
    total = torch.zeros(2, dtype=torch.float64, device=device_of(modules, job_group))
    if counted:
        parts = foreach.norms(counted, norm_type)
        whole = parts.nan_to_num(nan=0.0, posinf=math.inf)
        total[0] = whole.max() if infinite else whole.pow(norm_type).sum()
        total[1] = parts.isnan().any()
    total = total if beside is None else torch.cat([total, beside])
    waiting = Waiting(deadline, monitor, "the norm of the gradients in clip()")
    if add == "by_unit" and not infinite:
        total = _rounded_once(total, job_group, waiting)
    else:
        reduce_few(total, job_group, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)(waiting)
    if beside is not None:
        beside.copy_(total[2:])
    norm = total[0] if infinite else total[0] ** (1.0 / norm_type)
    norm = torch.where(total[1] > 0, torch.full_like(norm, math.nan), norm)
    if max_norm < math.inf:
        foreach.scale_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        for gradient in gradients:  # so that who sees it multiplied knows by what
            gradient.is_clipped = True  # type: ignore[attr-defined]
    return norm


def _rounded_once(parts: torch.Tensor, group: dist.ProcessGroup | None, waiting: Waiting) -> torch.Tensor:
    """The sums of ``parts`` over ranks, as if added exactly."""
    ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if dist.is_initialized() else (1, 0)
    every = parts.new_zeros(ranks, len(parts))
    every[rank] = parts
    all_reduce(every, group)(waiting)
    return parts.new_tensor([math.fsum(column) for column in every.T.tolist()])


def _counts(layout: ParameterGradient, gradient: torch.Tensor) -> bool:
    """Whether this rank's part of a gradient counts: it is the first of the ranks that hold the same numbers."""
    if layout.marks.replica:
        return False
    mesh = mesh_ranks(gradient)
    first_of_mesh = True
    if mesh:
        placements, device_mesh = gradient.placements, gradient.device_mesh  # type: ignore[attr-defined]
        if any(placement.is_partial() for placement in placements):
            raise GradientError(
                f"a DTensor gradient has the placements {placements}, of which a norm needs the sum: call "
                "reduce_gradients first"
            )
        places = zip(placements, device_mesh.get_coordinate() or (), strict=True)
        first_of_mesh = all(not placement.is_replicate() or not coordinate for placement, coordinate in places)
    return (
        first_of_mesh
        and _first_outside(mesh, layout.replicas, layout)
        and (layout.marks.sharded or _first_outside(mesh, layout.tensor, layout))
    )


def _first_outside(mesh: frozenset[int], group: dist.ProcessGroup | None, layout: ParameterGradient) -> bool:
    """Whether this rank is the first of ``group``, or a mesh over all its ranks says which counts."""
    if group is None:
        return True
    shared = mesh & ranks_of(group)
    if len(shared) <= 1:
        return group.rank() == 0
    if len(shared) < group.size():
        raise GradientError(
            f"{layout} is a DTensor over {len(shared)} of the {group.size()} ranks of a group of its module; its mesh "
            "must have all or one"
        )
    return True
