"""All-reduces in place: of gradients, of their norms and counts, of losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from pipegrid.monitor.collectives import REDUCTION, Waiting
from pipegrid.transport.collectives.starting import start
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
