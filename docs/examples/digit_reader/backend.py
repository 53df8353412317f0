"""The default process group of a rank, over the backend that is asked for, and the rank's device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pipegrid.training import attempt_store

if TYPE_CHECKING:
    from pipegrid.fake_nccl import FakeDevice


@contextlib.contextmanager
def process_group(asked: str | None, *, deadline: float) -> Iterator[torch.device]:
    """Make the default group of this attempt, and destroy it after the block; the device of this rank.

    Args:
        asked: one of `digit_reader.options.BACKENDS`; None is NCCL where there is a GPU for every rank of the machine,
            else gloo.
        deadline: seconds for ranks to come, a minute at least, and for each collective.

    Raises:
        RuntimeError: the block has broken a rule of the fake NCCL.
    """
    seconds = max(deadline, 60.0)
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = asked or ("nccl" if 0 < local_ranks <= gpus else "gloo")
    device = torch.device("cpu")
    if gpus and backend in ("nccl", "staged"):
        device = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(device)
    fake = _fake_device(serial=backend.endswith("serial")) if backend.startswith("fake_nccl") else None
    names = {"staged": "cpu:gloo,cuda:gloo", "fake_nccl_serial": "cpu:fake_nccl", "fake_nccl": "cpu:fake_nccl"}
    dist.init_process_group(
        names.get(backend, backend),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        store=attempt_store(timeout=seconds),
        timeout=timedelta(seconds=seconds),
        device_id=device if backend == "nccl" else None,
    )
    try:
        yield device
    finally:
        if fake is not None:
            fake.close()
        dist.destroy_process_group()
    if fake is not None and fake.violations:
        raise RuntimeError("\n".join(["rules of NCCL were broken:", *fake.violations]))


def _fake_device(*, serial: bool) -> FakeDevice:
    from pipegrid.fake_nccl import FakeDevice, register  # pipegrid-fake_nccl is needed for this alone

    device = FakeDevice(serial=serial)
    register(device)
    return device
