"""The end of a group of the fake NCCL: a destroy is a barrier, and leaves nothing that can be aborted."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from pipegrid.fake_nccl.device import FakeDevice
from pipegrid.fake_nccl.groups.meeting import Meeting


class Ending:
    """The end of one rank's communicator of a group.

    ``ncclCommDestroy`` may wait for the members on its node, without a deadline; here it always does, until each has
    begun a destroy or an abort. ``ncclCommAbort`` from another thread ends that wait; after it, the communicator's
    memory is free, and an abort a violation.
    """

    def __init__(self, name: str, options: Any, device: FakeDevice) -> None:
        self._name, self._device = name, device
        self._meeting = Meeting("end", options)
        self._aborted = threading.Event()
        self._destroyed = False

    def meet(self) -> None:
        """Wait until all members destroy the group, or an abort, or the end of the test."""
        with contextlib.suppress(RuntimeError):  # the process that hosts the store has left, with all others here
            if not self._meeting.wait(lambda: self._aborted.is_set() or self._device.closed):
                return
        self._destroyed = True

    def abort(self) -> None:
        """Note an abort."""
        if self._destroyed:
            self._device.violations.append(
                f"abort() of group {self._name} after its destroy; ncclCommAbort would free its communicator twice"
            )
        self._aborted.set()
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._meeting.come()
