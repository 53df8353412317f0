"""Checkpoints under the names of the whole model, for any grids, layout, schedule and number of ranks."""

from pipegrid.training.checkpoint.checkpoints import Checkpoints
from pipegrid.training.checkpoint.loading import LoadedCheckpoint
from pipegrid.training.checkpoint.state.names import TrainingState, whole_names

__all__ = ["Checkpoints", "LoadedCheckpoint", "TrainingState", "whole_names"]
