"""Collectives in place that are waited for later: of gradients, of their norms and counts, of losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import add

import torch
import torch.distributed as dist

from pipegrid.monitor.collectives import REDUCTION, Waiting
from pipegrid.topology.torch_compat import backend_of
from pipegrid.transport.collectives.small_all_gather import MOST, SmallAllGather
from pipegrid.transport.collectives.starting import start
from pipegrid.transport.collectives.waiting import device_collectives
from pipegrid.transport.errors import CollectiveFailedError
from pipegrid.transport.streams import has_streams


def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    *,
    host: bool = False,
) -> Callable[[Waiting], None]:
    """Start an all-reduce in place; the result, called, waits for it, the ``host`` as well on a device with streams.

    ``group`` None is the default process group, or nothing to do in one process without one.
    """
    group = group or dist.group.WORLD
    work = start(dist.all_reduce, tensor, op=op, group=group) if dist.is_initialized() else None
    if work is not None and has_streams(tensor.device):
        device_collectives.add(REDUCTION, work, group)

    return lambda waiting: waiting.wait(work, tensor, group, host=host)


def post_gather(
    group: dist.ProcessGroup | None, device: torch.device, again: SmallAllGather | None = None
) -> SmallAllGather | None:
    """Post an all-gather of numbers on ``device``, which `reduce_gathered` then reduces; None if not over gloo.

    ``again``: of an earlier call for this group, whose memory is used again.
    """
    group = group or dist.group.WORLD
    if group is None or has_streams(device) or backend_of(group, device).name() != "gloo":
        return None
    gather = SmallAllGather(group) if again is None or again.ended is not True else again
    gather.post()
    return gather


def reduce_few(
    numbers: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    *,
    host: bool = False,
) -> Callable[[Waiting], None]:
    """`all_reduce` of a few numbers, of which only the latency matters: over gloo up to 15 go to every rank at once.

    A ring, gloo's all-reduce, takes a message after the other from rank to rank, twice round. Between ranks numbers are
    float64.

    Args:
        numbers: reduced in place.
        group: of the ranks; None: the default one.
        op: a sum, in the order of the ranks on all of them, or the maximum.
        host: as of `all_reduce`; over gloo the host waits anyway.

    Returns:
        What waits for the result.

    Raises:
        CollectiveFailedError: from the wait, where ranks have reduced unequally many numbers.
    """
    group = group or dist.group.WORLD
    gather = post_gather(group, numbers.device) if 0 < numbers.numel() <= MOST else None
    if gather is None:
        return all_reduce(numbers, group, op, host=host)
    gather.send(numbers.reshape(-1).tolist())

    def wait(waiting: Waiting) -> None:
        numbers.copy_(torch.tensor(reduce_gathered(gather, waiting, op), dtype=torch.float64).view_as(numbers))

    return wait


def reduce_gathered(
    gather: SmallAllGather, waiting: Waiting, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> list[float]:
    """Wait for a `post_gather` in which this rank has sent its numbers; their sum or maximum, as of `reduce_few`."""
    if not gather.end():
        waiting.wait(gather, _HOST, gather.group)
    every = gather.here()
    if len(lengths := set(map(len, every))) > 1:
        raise CollectiveFailedError(
            f"{waiting.what} failed: ranks have met in different calls, which add up {sorted(lengths)} numbers; "
            "every rank calls the same functions in one order"
        )
    if op == dist.ReduceOp.MAX:
        found: list[float] = torch.tensor(every, dtype=torch.float64).amax(dim=0).tolist()
        return found
    return list(map(partial(reduce, add), zip(*every, strict=True)))


_HOST = torch.empty(0)
