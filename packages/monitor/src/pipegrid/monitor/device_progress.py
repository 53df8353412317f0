"""Progress of a device, polled from another thread: on CUDA a wait returns to the host before the work is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipegrid.transport.waits.aborts import device_aborts

if TYPE_CHECKING:
    import torch


def progress_of(device: torch.device) -> DeviceProgress | None:
    """The progress of a device; None where its work is done when a call returns."""
    from pipegrid.transport import streams  # torch: the rest of the monitor works without

    return DeviceProgress(lambda: streams.mark(device)[0]) if streams.has_streams(device) else None


class DeviceProgress:
    """A hook that marks the device's work after each action: ``mark`` makes an event after all that was issued so far.

    One thread runs actions, another asks: a deque's ends need no lock.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self._open: deque[tuple[object, Any]] = deque()

    def before(self, action: object) -> None:
        """Do nothing: marks are made after actions."""

    def after(self, action: object) -> None:
        """Mark the device's work so far as ``action``."""
        self.mark(action)

    def mark(self, what: object) -> None:
        """Mark the device's work so far as ``what``."""
        self._open.append((what, self._mark()))

    def oldest(self) -> object | None:
        """The first marked work that the device has not finished; None if it has finished all that was issued."""
        while self._open and device_aborts.poll(self._open[0][1].query):
            self._open.popleft()
        return self._open[0][0] if self._open else None
