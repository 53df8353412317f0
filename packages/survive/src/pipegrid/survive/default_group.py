"""The default process group of a job that new processes may join later."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pipegrid.topology.torch_compat import unconnected


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
