"""Errors of the planner."""

from __future__ import annotations


class JobError(ValueError):
    """A job that is malformed or contradicts itself; the text begins with the path in its file."""


class NoFitError(JobError):
    """No choice keeps a bound of the job; the text names the bound and the nearest value that fits.

    Attributes:
        memory: bytes per GPU of the choice that needs the least, where memory is the bound.
    """

    def __init__(self, message: str, *, memory: float | None = None) -> None:
        super().__init__(message)
        self.memory = memory
