"""Checkpoints under the names of the whole model, for any grids, layout, schedule and number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.core.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.checkpoint.checkpoints import Checkpoints
    from pipegrid.checkpoint.loading import LoadedCheckpoint
    from pipegrid.checkpoint.state.names import TrainingState, whole_names
    from pipegrid.checkpoint.weights import export_safetensors, load_safetensors

__all__ = [
    "Checkpoints",
    "LoadedCheckpoint",
    "TrainingState",
    "export_safetensors",
    "load_safetensors",
    "whole_names",
]

__getattr__, __dir__ = lazy_names(__name__, __all__)
