"""The fake NCCL as a backend of `torch.distributed`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pipegrid.testing.fake_nccl.device import FakeDevice
from pipegrid.testing.fake_nccl.groups.group import FakeGroup
from pipegrid.testing.fake_nccl.groups.lazy import LazyGroup
from pipegrid.testing.fake_nccl.groups.nccl2 import Nccl2Group
from pipegrid.testing.fake_nccl.groups.transfers import BACKEND


def register(device: FakeDevice) -> str:
    """Make ``fake_nccl`` a backend of this process, whose groups launch on ``device``; the backend's name."""

    def make(options: Any, chosen: Any) -> FakeGroup:
        rules = device.nccl2
        if rules is None:
            return FakeGroup(device, options, chosen)
        return (LazyGroup if device.lazy else Nccl2Group)(device, options, chosen, rules)

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
    return BACKEND
