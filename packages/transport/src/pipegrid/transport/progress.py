"""The thread beside the caller's: sees ends and deadlines of transfers without a waiting thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from pipegrid.transport.completion import Completion, Submit
from pipegrid.transport.wait_lock import BackgroundThread

_TICK_SECONDS = 0.05
_STREAMED_TICK_SECONDS = 0.002


class Progress:
    """Sweeps lanes while any of them has transfers under way; sleeps otherwise."""

    def __init__(self, lanes: Sequence[Completion], submit: Submit) -> None:
        self._lanes = lanes
        self._submit = submit
        self._stopped = False
        self._tick = _STREAMED_TICK_SECONDS if any(lane.mover.streams for lane in lanes) else _TICK_SECONDS
        self._thread = BackgroundThread(target=self._run, name="pipegrid-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        submit = self._submit
        while not self._stopped:
            submit.asleep = True
            if not any(lane.queue for lane in self._lanes):
                submit.wake.wait()
            submit.asleep = False
            submit.wake.clear()
            time.sleep(self._tick)
            now = time.monotonic()
            for lane in self._lanes:
                if lane.queue:
                    lane.sweep(now)

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._submit.wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
