"""Train existing models as one pipeline: what a training script needs above plans, lanes and step functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.topology.lazy import lazy_names
from pipegrid.training.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    CutError,
    GenerationError,
    SpreadError,
)

if TYPE_CHECKING:
    from pipegrid.training.checkpoint import (
        Checkpoints,
        LoadedCheckpoint,
        TrainingState,
        export_safetensors,
        load_safetensors,
        whole_names,
    )
    from pipegrid.training.generation import Sampling, generate
    from pipegrid.training.ragged import Spread, spread
    from pipegrid.training.restart import NO_PROGRESS, PREEMPTED, Attempt, RestartError, attempt_store, stop_restarts
    from pipegrid.training.stages import DropoutMasks, Names, Stage, Tie, compile_layers, cut, tie, ties_of

__all__ = [
    "NO_PROGRESS",
    "PREEMPTED",
    "Attempt",
    "CheckpointError",
    "CheckpointMismatchError",
    "Checkpoints",
    "CorruptCheckpointError",
    "CutError",
    "DropoutMasks",
    "GenerationError",
    "LoadedCheckpoint",
    "Names",
    "RestartError",
    "Sampling",
    "Spread",
    "SpreadError",
    "Stage",
    "Tie",
    "TrainingState",
    "attempt_store",
    "compile_layers",
    "cut",
    "export_safetensors",
    "generate",
    "load_safetensors",
    "spread",
    "stop_restarts",
    "tie",
    "ties_of",
    "whole_names",
]

_LAZY = {
    "checkpoint": "Checkpoints LoadedCheckpoint TrainingState export_safetensors load_safetensors whole_names",
    "generation": "Sampling generate",
    "ragged": "Spread spread",
    "restart": "NO_PROGRESS PREEMPTED Attempt RestartError attempt_store stop_restarts",
    "stages": "DropoutMasks Names Stage Tie compile_layers cut tie ties_of",
}

__getattr__, __dir__ = lazy_names(
    __name__, __all__, {name: folder for folder, names in _LAZY.items() for name in names.split()}
)
