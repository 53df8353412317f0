"""How an attempt of a run ends other than by finishing or failing: exit codes, and the error of an unwanted restart."""

from __future__ import annotations

from typing import Final

PREEMPTED: Final = 75
"""Exit code of every rank after a signal: saved, start the run again (``EX_TEMPFAIL`` of sysexits.h)."""
NO_PROGRESS: Final = 70
"""Exit code of every rank of a run that fails at one step again and again (``EX_SOFTWARE`` of sysexits.h)."""


class RestartError(RuntimeError):
    """The launcher has restarted a run that must not be: it makes no progress, or a signal has ended it.

    Attributes:
        exit_code: `NO_PROGRESS` or `PREEMPTED`, for `sys.exit`.
    """

    def __init__(self, text: str, *, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code
