"""Collectives beside the plan that a device has under way: reductions of gradients, norms, loss scales.

Where a step fails, the groups of those that have not ended are aborted together with the lanes: a free waits for every
kernel of the device, so an abort of the lanes alone would wait for a reduction that no rank will end. Neither groups
nor lanes are of use after that.
"""

from __future__ import annotations

from typing import Any

from attrs import define, field

from pipegrid.transport.collectives import PendingCollectives, abort_together


@define(eq=False)
class DeviceCollectives:
    """The collectives of this process on devices with streams; from any thread."""

    _pending: PendingCollectives[tuple[str, Any]] = field(factory=PendingCollectives, init=False)

    def add(self, what: str, work: Any, group: Any) -> None:
        """Keep ``work`` of a process group (None: the default one) until it has ended; ``what`` it is, for errors."""
        self._pending.add((what, group), work)

    def check(self) -> None:
        """Raise the error of a collective that has failed, once. Never blocks.

        Raises:
            RuntimeError: one has failed.
        """
        failed = self._pending.failed()
        if failed is not None:
            (what, _), error = failed
            raise RuntimeError(f"{what} failed: {' '.join(str(error).split())[:200]}") from error

    def abort(self) -> None:
        """Begin to abort the groups of all that have not ended."""
        groups = [group for _, group in self._pending.take_unfinished()]
        if groups:
            import torch.distributed as dist

            found = [dist.group.WORLD if group is None else group for group in groups]
            # None: the default group, destroyed meanwhile.
            abort_together({id(group): group for group in found if group is not None}.values(), seconds=0)


device_collectives = DeviceCollectives()
