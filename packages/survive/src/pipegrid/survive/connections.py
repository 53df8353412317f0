"""A default process group without connections, and the end of connections to ranks that may be dead.

What gloo does when a process is killed (torch 2.13, four ranks in an all-reduce): the ranks that exchange with the dead
one have an error at once, since the kernel closes its sockets. The others wait for those ranks, which have left, and
would do so until the group's timeout, half an hour by default: an ``abort()`` of the group changes nothing, nor does
``destroy_process_group`` as long as an object refers to the group. What ends a connection of gloo is a wait that times
out; both sides of it have an error then. So each rank that fails ends all of its connections, and all the others fail
one after the other: 0.03 s per rank and group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from pipegrid.survive.errors import SurviveError
from pipegrid.topology.torch_compat import is_alive, unconnected
from pipegrid.transport.backends.nccl import watchdog_acts
from pipegrid.transport.backends.wire import cut_all_connections
from pipegrid.transport.waits.aborts import abort_groups


def end_connections(groups: Iterable[dist.ProcessGroup], cause: str) -> None:
    """End all connections of ``groups``, so that none of their ranks waits for this one. From any thread.

    `pipegrid.topology.discard_groups` frees the groups then.
    """
    listed: list[Any] = list(dict.fromkeys(groups))
    abort_groups(listed, cause)
    for group in listed:
        if is_alive(group) and "cpu:gloo" in dist.get_backend_config(group):
            cut_all_connections(group)


def require_no_watchdog() -> None:
    """Raise SurviveError where torch ends this process, or its kernels without their data, before others are asked."""
    for part in dist.get_backend_config().split(","):
        if watchdog_acts(backend := part.split(":")[1]):
            raise SurviveError(
                f"with {backend!r} torch's watchdog ends a process that has lost another one, or aborts its groups; "
                "set TORCH_NCCL_ASYNC_ERROR_HANDLING=0 in the environment before init_process_group"
            )


def init_process_group(backend: str = "gloo", **options: Any) -> None:
    """Initialise the default process group as `torch.distributed.init_process_group` does, without the other ranks.

    A process that takes the place of a dead rank cannot connect to a group that was made before it, and needs not: what
    ranks exchange goes through the world of an epoch. With gloo, torch's own function waits there for ranks that never
    join. Ranks connect here when a script uses the default group, which it should not do once a rank has died.

    Args:
        backend: of the groups of each epoch as well.
        options: those of torch: ``store``, ``rank``, ``world_size``, ``timeout``; an ``init_method``.

    Examples:
        >>> import torch.distributed as dist
        >>> init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> dist.get_world_size()
        1
    """
    with unconnected():
        dist.init_process_group(backend, **options)
