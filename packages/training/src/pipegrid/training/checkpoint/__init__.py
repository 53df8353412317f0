"""Checkpoints under the names of the whole model, for any grids, layout, schedule and number of ranks."""

from pipegrid.training.checkpoint.checkpoints import Checkpoints
from pipegrid.training.checkpoint.loading import LoadedCheckpoint
from pipegrid.training.checkpoint.state.names import TrainingState, whole_names
from pipegrid.training.checkpoint.weights import export_safetensors, load_safetensors

__all__ = [
    "Checkpoints",
    "LoadedCheckpoint",
    "TrainingState",
    "export_safetensors",
    "load_safetensors",
    "whole_names",
]
