"""The last background save of a script that ends without waiting for it: finished at exit, or reported as lost.

The exit code of a process is fixed before `atexit` runs, but for "an error in the cleanup after the Python interpreter
has caught SystemExit (such as an error flushing buffered data in the standard streams)", which makes it 120
(`sys.exit`). A lost save is such an error, so everything else that runs at exit still runs, unlike after `os._exit`.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from pipegrid.stages.errors import CheckpointError

EXIT_CODE: Final = 120  # of a process whose last save is lost: Python's own for an error in the cleanup at exit
_SILENT: Final = 5.0  # seconds that a process which ends waits without a word, or after an uncaught exception


class Pending:
    """The save in the background, until its outcome is returned or raised."""

    def __init__(self) -> None:
        self.future: Future[None] | None = None

    def result(self) -> None:
        """Wait for the save, and raise what it failed with, once."""
        if self.future is None:
            return
        try:
            self.future.result()
        finally:  # an interrupted wait has not seen the outcome
            if self.future.done():
                self.future = None


def finish(pending: Pending, directory: Path, timeout: float) -> None:
    """At process exit, wait for ``pending`` up to ``timeout`` seconds; a few after an uncaught exception."""
    future = pending.future
    if future is None:
        return
    try:
        fault = _outcome(future, directory, timeout)
    except TimeoutError:
        fault = CheckpointError("it has not ended; call Checkpoints.close() before the script ends")
    if fault is not None:
        text = f"the last save in {directory} is lost: {type(fault).__name__}: {fault}; exit code {EXIT_CODE}"
        print(text, file=sys.stderr, flush=True)  # noqa: T201 -- no caller is left to raise it to
        sys.stdout = _Failing(sys.stdout)  # what is flushed as the last thing


def _outcome(future: Future[None], directory: Path, timeout: float) -> BaseException | None:
    if sys.exc_info()[1] is not None or getattr(sys, "last_exc", getattr(sys, "last_value", None)) is not None:
        timeout = min(timeout, _SILENT)  # ranks may be gone
    try:
        return future.exception(min(timeout, _SILENT))
    except TimeoutError:
        if timeout <= _SILENT:
            raise
    text = f"waiting up to {timeout:g} s for the last save in {directory}"
    print(text, file=sys.stderr, flush=True)  # noqa: T201 -- a process that seems to hang
    return future.exception(timeout - _SILENT)


class _Failing:
    """A standard stream whose last flush is an error."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush the stream, and fail."""
        if self._stream is not None and not self._stream.closed:
            self._stream.flush()
        raise CheckpointError("the last save is lost")
