"""The errors of the package."""

from __future__ import annotations

from collections.abc import Sequence


class CutError(ValueError):
    """A model that cannot be cut so: layers not found, a layout that does not fit, a part in the wrong place."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, found or loaded; the last good one is still there."""


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint are not those that were saved; the text names the tensor or the file."""


class CheckpointMismatchError(CheckpointError):
    """Names, shapes, steps or settings differ: between ranks, or between a checkpoint and the state to fill."""


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


SpreadError = ValueError  # the former name of that of `balance_samples`, for this version


def few(texts: Sequence[str], most: int = 3) -> list[str]:
    """For the text of an error: the first ``most``, and how many more there are."""
    return [*texts[:most], *([f"and {len(texts) - most} more"] if len(texts) > most else [])]
