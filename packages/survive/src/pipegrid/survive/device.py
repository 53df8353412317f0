"""A wait until the device has done what a function has issued to it, which on CUDA is later than the host."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from pipegrid.monitor.monitor import FIRST_STEP_SECONDS
from pipegrid.topology.bounded_calls import BoundedCalls, SilentStoreError
from pipegrid.transport.streams import synchronize, used_device


@define(eq=False)
class DeviceEnd:
    """Waits for the current device in a thread of its own, as a kernel whose data never arrives never ends."""

    deadline: float  # seconds; at least half an hour where ``first``, in which others may still load and compile
    _calls: BoundedCalls = field(factory=lambda: BoundedCalls("pipegrid-device"), init=False)

    def wait(self, what: str, why: Callable[[], str], *, first: bool) -> None:
        """Wait until all is done that was issued to a device with streams.

        RuntimeError where that is not within the deadline, or ``why`` has a text, which is asked every 0.1 s.
        """
        device = used_device()
        if device is None:
            return
        seconds = max(FIRST_STEP_SECONDS, self.deadline) if first else self.deadline
        try:
            self._calls.run(synchronize, device, seconds=seconds, given_up=why)
        except SilentStoreError as error:
            raise RuntimeError(why() or f"{device} has not done {what} after {seconds:g} s") from error

    def close(self) -> None:
        """End the thread."""
        self._calls.close()
