"""The fake NCCL as a backend of `torch.distributed`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pipegrid.testing.fake_nccl.device import FakeDevice
from pipegrid.testing.fake_nccl.groups.group import BACKEND, FakeGroup
from pipegrid.testing.fake_nccl.groups.nccl2 import Nccl2Group


def register(device: FakeDevice) -> str:
    """Make ``fake_nccl`` a backend of this process, whose groups launch on ``device``; the backend's name."""

    def make(options: Any, chosen: Any) -> FakeGroup:
        rules = device.nccl2
        return FakeGroup(device, options, chosen) if rules is None else Nccl2Group(device, options, chosen, rules)

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
    return BACKEND
