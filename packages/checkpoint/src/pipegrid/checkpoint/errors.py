"""The error of a checkpoint that does not fit; those of its files are in `pipegrid.stages.errors`."""

from __future__ import annotations

from pipegrid.stages.errors import CheckpointError


class CheckpointMismatchError(CheckpointError):
    """Names, shapes, steps or settings differ: between ranks, or between a checkpoint and the state to fill."""
