"""Sums of shares, which the ranks that live divide among themselves; also on a device that is behind its host."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from pipegrid.survive import Survivors
from pipegrid.survive.connections import end_connections
from pipegrid.topology import GroupSpec, create_groups, destroy_groups, discard_groups
from pipegrid.transport import streams

from .survive_cases import Case, Places

SIZE, SHARES = 5, 12


class LateDevice:
    """In the place of `torch.cuda`: the host waits for no collective, and one with a dead rank ends by an abort."""

    def __init__(self):
        self.works = []

    def is_initialized(self):
        return True

    is_available = is_initialized

    def current_device(self):
        return 0

    def synchronize(self, device):
        while self.works:
            work, world = self.works.pop()
            try:
                work.wait()
            except RuntimeError:  # a kernel has no errors: it waits for its data, until the abort of its group
                while not world.aborted:
                    time.sleep(0.001)


class Members:
    """The world of plain functions: a group of the ranks that live."""

    def __init__(self, epoch, device=None):
        self.device = device
        self.members, spec = epoch.members, GroupSpec(epoch.members, f"members of epoch {epoch.number}")
        self.groups = create_groups([spec], backend="gloo", timeout=timedelta(seconds=300))
        self.group, self.aborted = self.groups[spec], False

    def abort(self, cause):
        self.aborted = True
        end_connections(self.groups.values(), cause)

    def close(self):
        (discard_groups if self.aborted else destroy_groups)(self.groups)

    def reduce(self, tensor, operation=dist.ReduceOp.SUM):
        work = dist.all_reduce(tensor, operation, group=self.group, async_op=True)
        if self.device is None:
            work.wait()
        else:
            self.device.works.append((work, self))
        return tensor


def share(step: int, number: int) -> torch.Tensor:
    return torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + number))


def sums(case: Case, places: Places, store) -> dict[str, object]:
    """Each step adds a sum of shares to a weight, divided by its largest element: two functions of all ranks."""
    rank, weight = dist.get_rank(), torch.zeros(SIZE, dtype=torch.float64)
    device = LateDevice() if case.job == "late sums" else None
    if device is not None:
        streams.cuda = device
    survivors = Survivors(
        store,
        partial(Members, device=device),
        modules={},
        heartbeat=case.heartbeat,
        deadline=case.deadline,
        retire=lambda dead: [one ^ 1 for one in dead if case.pairs],
    )

    def total(step, world):
        own = [share(step, n) for n in range(SHARES) if world.members[n % len(world.members)] == rank]
        places.reach("compute")
        result = world.reduce(torch.stack(own).sum(0))
        places.reach("after sum")
        return result

    def largest(value, world):
        places.reach("largest")
        result = world.reduce(value.abs().max(), dist.ReduceOp.MAX)
        places.reach("after largest")
        return result

    with places.around(survivors):
        for step in range(case.steps):
            places.begin(step)
            places.reach("between")
            value = survivors.run(f"sum {step}", partial(total, step))
            places.reach("in between")
            weight += value / survivors.run(f"largest {step}", partial(largest, value))
            places.reach("update")
    return {"weights": {"weight": weight}, "events": [str(event) for event in survivors.events]}


def sums_alone(case: Case) -> dict[str, torch.Tensor]:
    weight = torch.zeros(SIZE, dtype=torch.float64)
    for step in range(case.steps):
        value = torch.stack([share(step, number) for number in range(SHARES)]).sum(0)
        weight += value / value.abs().max()
    return {"weight": weight}
