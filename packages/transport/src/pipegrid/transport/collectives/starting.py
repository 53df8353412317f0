"""The start of all collectives of this project."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pipegrid.topology.torch_compat import backend_of
from pipegrid.transport.collectives.waiting import host_collectives


def start(
    collective: Callable[..., dist.Work | None],
    tensor: torch.Tensor,
    *arguments: Any,
    group: dist.ProcessGroup | None,
    **options: Any,
) -> dist.Work | None:
    """Start a ``collective`` of `torch.distributed`, of which ``tensor`` is the first argument.

    One over gloo is among `host_collectives` until its wait has ended. ``group`` None is the default one; ``options``
    are by name, such as ``op``. Returns what to wait for, with a deadline (`pipegrid.transport.collectives.waiting`),
    or None.
    """
    work = collective(tensor, *arguments, group=group, async_op=True, **options)
    group = dist.group.WORLD if group is None else group
    if work is not None and group is not None and backend_of(group, tensor.device).name() == "gloo":
        host_collectives.add(work, group)
    return work


def wait_inside(work: dist.Work | None) -> None:
    """Wait for a collective inside a compute: up to the group's timeout, or until a failed job cuts its group."""
    if work is not None:
        work.wait()
        host_collectives.forget(work)
