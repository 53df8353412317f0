"""Collectives in place that are waited for later: of gradients, of their norms and counts, of losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
import torch.distributed as dist

from pipegrid.monitor.collectives import REDUCTION, Waiting
from pipegrid.topology.torch_compat import backend_of
from pipegrid.transport.collectives.starting import start, start_few
from pipegrid.transport.collectives.waiting import device_collectives
from pipegrid.transport.streams import has_streams


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Callable[[Waiting], None]:
    """Start an all-reduce in place; the result, called, waits for it.

    ``group`` None is the default process group, or nothing to do in one process without one.
    """
    group = group or dist.group.WORLD
    work = start(dist.all_reduce, tensor, op=op, group=group) if dist.is_initialized() else None
    if work is not None and has_streams(tensor.device):
        device_collectives.add(REDUCTION, work, group)

    return lambda waiting: waiting.wait(work, tensor, group)


def reduce_few(
    numbers: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Callable[[Waiting], None]:
    """`all_reduce` of a few numbers, of which only the delay matters: over gloo each goes to every rank at once.

    A ring, gloo's all-reduce, takes a message after the other from rank to rank, twice round. ``op``: a sum, in the
    order of the ranks on all of them, or the maximum.
    """
    group = group or dist.group.WORLD
    if group is None or has_streams(numbers.device) or backend_of(group, numbers.device).name() != "gloo":
        return all_reduce(numbers, group, op)
    own = numbers.reshape(1, -1).expand(group.size(), -1).contiguous()
    every = torch.empty_like(own)
    work = start_few("alltoall_base", group, every, own, [], [])
    combine = torch.maximum if op == dist.ReduceOp.MAX else torch.add

    def wait(waiting: Waiting) -> None:
        waiting.wait(work, every, group)
        numbers.copy_(reduce(combine, every.unbind()).view_as(numbers))

    return wait
