"""The thread beside: sees ends and deadlines of transfers that nobody waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from pipegrid.transport.batch import Submitter
from pipegrid.transport.lane import Lane

_TICK_SECONDS = 0.05
_STREAMED_TICK_SECONDS = 0.002


class Progress:
    """Sweeps lanes while any of them has transfers under way; sleeps otherwise."""

    def __init__(self, lanes: Sequence[Lane], submitter: Submitter) -> None:
        self._lanes = lanes
        self._submitter = submitter
        self._stopped = False
        polled = any(lane.device.type != "cpu" for lane in lanes)
        self._tick = _STREAMED_TICK_SECONDS if polled else _TICK_SECONDS
        self._thread = threading.Thread(target=self._run, name="pipegrid-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        submitter = self._submitter
        while not self._stopped:
            submitter.asleep = True
            if not any(lane.queue for lane in self._lanes):
                submitter.wake.wait()
            submitter.asleep = False
            submitter.wake.clear()
            time.sleep(self._tick)
            now = time.monotonic()
            for lane in self._lanes:
                if lane.queue:
                    lane.sweep(now)

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._submitter.wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
