"""The fake NCCL as a backend of `torch.distributed`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pipegrid.fake_nccl.device import FakeDevice
from pipegrid.fake_nccl.groups.group import FakeGroup
from pipegrid.fake_nccl.groups.nccl2 import Nccl2Group, is_lazy
from pipegrid.fake_nccl.groups.pairs import LazyGroup, LegacyGroup
from pipegrid.fake_nccl.groups.transfers import BACKEND


def register(device: FakeDevice) -> str:
    """Make ``fake_nccl`` a backend of this process, whose groups launch on ``device``; the backend's name.

    A new group beside a bound default group is a split of that, as torch makes it of NCCL's: every rank of the world
    takes part, and waits for the others.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> device = FakeDevice()
        >>> dist.init_process_group(register(device), store=dist.HashStore(), rank=0, world_size=1)
        >>> work = dist.all_reduce(torch.ones(4), async_op=True)
        >>> device.close()
    """

    def make(options: Any, chosen: Any) -> FakeGroup:
        if device.nccl2 is None:
            kind = LegacyGroup if device.lazy else FakeGroup
        else:
            kind = LazyGroup if device.lazy else Nccl2Group
        world: Any = dist.group.WORLD
        if isinstance(world, FakeGroup) and world.supports_splitting and world.bound_device_id and not is_lazy(chosen):
            world.split(options.timeout.total_seconds())
        return kind(device, options, chosen)

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
    return BACKEND
