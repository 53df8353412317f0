"""Collectives beside the plan that a device has under way: reductions of gradients, norms, loss scales.

Where a step fails, all device groups of the process are aborted together: a free waits for every kernel of the device,
so an abort of the lanes alone would wait for a reduction that no rank will end. None of them is of use after that.
"""

from __future__ import annotations

import sys
from typing import Any

from attrs import define, field

from pipegrid.transport.collectives import PendingCollectives
from pipegrid.transport.waits.aborts import abort_device_groups, device_aborts


@define(eq=False)
class DeviceCollectives:
    """The collectives of this process on devices with streams; from any thread."""

    _pending: PendingCollectives[str] = field(factory=PendingCollectives, init=False)

    def add(self, what: str, work: Any, group: Any) -> None:
        """Keep ``work`` of a process group (None: the default one) until it has ended; ``what`` it is, for errors."""
        self._pending.add(what, work, group)

    def check(self) -> None:
        """Raise the error of a collective that has failed, once. Never blocks.

        Raises:
            RuntimeError: one has failed.
        """
        failed = self._pending.failed()
        if failed is not None:
            what, error = failed
            raise RuntimeError(f"{what} failed: {' '.join(str(error).split())[:200]}") from error

    def abort(self, cause: str) -> None:
        """Begin to abort every device group of this process, and forget the collectives that were under way."""
        if "torch.distributed" in sys.modules:
            abort_device_groups(cause)
        for work, group in self._pending.take():
            abort = device_aborts.of(group)
            if abort is not None:
                abort.keep(work, group)


device_collectives = DeviceCollectives()
