"""SIGTERM and SIGINT as a request to stop at the next step boundary. No torch.

A thread reads the signals, through Python's wakeup descriptor: it hears of them while the main thread is inside of a
call that holds it for long, where a handler in Python would not run.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_LOOK_SECONDS: Final = 0.2
# A rank that is not stuck raises the job's failure by itself within this time.
_LEAVE_SECONDS: Final = 3.0
_INTERRUPTED: Final = 128 + signal.SIGINT


class StopSignals:
    """Notes the first signal; ends the process at once at a second one after SIGINT.

    A launcher also sends SIGTERM to the ranks that are left when one has failed. A rank that is stuck there would never
    come to a step boundary: where ``failure()``, the job's first one as far as it is known here, is a text after a
    signal, the process prints it and ends within seconds.
    """

    def __init__(self, failure: Callable[[], str | None]) -> None:
        self.received: signal.Signals | None = None
        self._failure = failure
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # Without a handler in Python, nothing would be written to the descriptor.
        self._before: dict[signal.Signals, Any] = {s: signal.signal(s, lambda *_: None) for s in _SIGNALS}
        self._descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._read, name="pipegrid-signals", daemon=True)
        self._thread.start()

    def close(self, *, ignore: bool = False) -> None:
        """Restore the handlers of before; with ``ignore`` the process, about to exit by itself, ignores SIGTERM."""
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ignore and number is signal.SIGTERM else handler)
        self._writer.close()  # the thread reads the end
        self._thread.join()
        self._reader.close()

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], [], [], _LOOK_SECONDS if self.received else None)
            if ready:
                data = self._reader.recv(64)
                if not data:
                    return
                for number in data:
                    if number in _SIGNALS:  # the descriptor hears of every signal that has a handler in Python
                        if self.received is signal.SIGINT:
                            os._exit(_INTERRUPTED)
                        self.received = signal.Signals(number)
            failure = self._failure() if self.received else None
            if failure is not None:
                self._leave(failure)
                return

    def _leave(self, failure: str) -> None:
        """End a process that is stuck: one that is not closes the socket on its way out."""
        end = time.monotonic() + _LEAVE_SECONDS
        while (left := end - time.monotonic()) > 0:
            if select.select([self._reader], [], [], left)[0] and not self._reader.recv(64):
                return
        assert self.received is not None
        text = f"stuck after {self.received.name} in a job that has failed: {failure}"
        print(text, file=sys.stderr, flush=True)  # noqa: T201 -- no caller is left to raise it to
        os._exit(1)
