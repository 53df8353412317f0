"""The errors of the package."""

from __future__ import annotations


class GenerationError(ValueError):
    """Tokens that cannot be generated: fixed shapes, a model without a cache, or an argument of another kind."""


class RestartError(RuntimeError):
    """The launcher has restarted a run that must not be: it makes no progress, or a signal has ended it.

    Attributes:
        exit_code: `NO_PROGRESS` or `PREEMPTED`, for `sys.exit`.
    """

    def __init__(self, text: str, *, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code
