"""Errors of models that are cut, and of the files that they are read from."""

from __future__ import annotations

from collections.abc import Sequence


class CutError(ValueError):
    """A model that cannot be cut so: layers not found, a layout that does not fit, a part in the wrong place."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, found or loaded; the last good one is still there.

    Examples:
        >>> Checkpoints("runs/b").load(TrainingState(stages={}), step=3)
        Traceback (most recent call last):
            ...
        pipegrid.stages.errors.CheckpointError: runs/b has no checkpoint of step 3; it has the steps []
    """


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint are not those that were saved; the text names the tensor or the file."""


def few(texts: Sequence[str], most: int = 3) -> list[str]:
    """The first ``most`` texts, and how many more there are, for an error."""
    return [*texts[:most], *([f"and {len(texts) - most} more"] if len(texts) > most else [])]
