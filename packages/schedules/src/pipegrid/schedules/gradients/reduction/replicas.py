"""Replicas compared after a step, in debug runs: parameters and gradients by their norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pipegrid.schedules.gradients import foreach
from pipegrid.schedules.gradients.all_reduce import Waiting, all_reduce
from pipegrid.schedules.gradients.dtensors import is_dtensor, local_of
from pipegrid.schedules.gradients.lanes import groups_of, size_of
from pipegrid.schedules.gradients.main_grad import Modules, accumulated, named_modules, parameters_of


class ReplicaError(RuntimeError):
    """Replicas of a parameter, or of its gradient, differ: a gradient is reduced on some ranks and not on others."""


@torch.no_grad()
def require_equal_replicas(
    modules: Modules, collections: Any, *, tolerance: float = 1e-6, waiting: Waiting | None = None
) -> None:
    """Raise where parameters or gradients differ between data lanes, or between tp ranks that hold them whole.

    Compares the norm of each, up to ``tolerance`` times the larger one: one read of parameters and gradients, a small
    all-reduce per group and one read by the host. Every rank of the groups calls it, after the reduction or after the
    optimizer's step. A gradient that is partial over tp, and neither summed nor marked, is found in the first step.

    Raises:
        ReplicaError: on every rank of the group, with the parameters and by how much they differ.
    """
    named = {
        id(parameter): f"{name}.{inner}" if name else inner
        for name, module in named_modules(modules)
        for inner, parameter in module.named_parameters()
    }
    for group, parameters in _replicated(modules, collections).items():
        kinds = ("parameter", "gradient")
        tensors = [tensor for parameter in parameters for tensor in (parameter.detach(), accumulated(parameter))]
        norms = torch.zeros(len(tensors), dtype=torch.float64, device=parameters[0].device)
        filled = [place for place, tensor in enumerate(tensors) if tensor is not None and tensor.numel()]
        if filled:
            held = [local_of(tensors[place]) for place in filled]
            norms[filled] = foreach.norms(held, 2.0).nan_to_num(nan=-1.0)
        extremes = torch.cat([norms, -norms])
        all_reduce(extremes, group, dist.ReduceOp.MAX)(waiting or Waiting())
        most, least = extremes.chunk(2)
        apart = most + least  # the largest less the smallest
        found = [
            f"the {kinds[place % 2]} of {named[id(parameters[place // 2])]} by {float(apart[place]):.3g}"
            for place, differs in enumerate((apart > tolerance * most.abs()).tolist())
            if differs
        ]
        if found:
            raise ReplicaError(
                f"the ranks {sorted(dist.get_process_group_ranks(group))} hold replicas whose norms differ: "
                f"{', '.join(found[:5])}{f' and {len(found) - 5} more' if len(found) > 5 else ''}. Mark a gradient "
                "that is a part on each tp rank (partial_over_tp), or a sharded parameter (tensor_model_parallel)"
            )


def _replicated(modules: Modules, collections: Any) -> dict[dist.ProcessGroup, list[torch.nn.Parameter]]:
    """The plain parameters that all ranks of a group hold alike, by group."""
    found: dict[dist.ProcessGroup, list[torch.nn.Parameter]] = {}
    for name, parameter in parameters_of(modules):
        lanes, tensor = groups_of(parameter, collections, name)
        sharded = getattr(parameter, "tensor_model_parallel", False)
        for group in (lanes, None if sharded else tensor):
            if group is not None and size_of(group) > 1 and not is_dtensor(parameter):
                found.setdefault(group, []).append(parameter)
    return found
