"""Train existing models as one pipeline: what a training script needs above plans, lanes and step functions.

Names outside ``__all__`` (rarer errors, the results of some functions) are imported from here as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.topology.lazy import lazy_names
from pipegrid.training.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError as CorruptCheckpointError,
    CutError as CutError,
    GenerationError as GenerationError,
    SpreadError as SpreadError,
)

if TYPE_CHECKING:
    from pipegrid.training.checkpoint import (
        Checkpoints,
        LoadedCheckpoint as LoadedCheckpoint,
        TrainingState,
        export_safetensors,
        load_safetensors,
        whole_names,
    )
    from pipegrid.training.generation import Sampling, generate
    from pipegrid.training.ragged import Spread as Spread, spread
    from pipegrid.training.restart import (
        NO_PROGRESS,
        PREEMPTED,
        Attempt,
        RestartError,
        attempt_store,
        stop_restarts as stop_restarts,
    )
    from pipegrid.training.stages import (
        DropoutMasks,
        Names,
        Stage,
        Tie as Tie,
        Boundary as Boundary,
        CutProof as CutProof,
        compile_layers,
        cut,
        prove_cut,
        sequence_slices,
        tie,
        ties_of as ties_of,
    )

__all__ = [
    "NO_PROGRESS",
    "PREEMPTED",
    "Attempt",
    "CheckpointError",
    "CheckpointMismatchError",
    "Checkpoints",
    "DropoutMasks",
    "Names",
    "RestartError",
    "Sampling",
    "Stage",
    "TrainingState",
    "attempt_store",
    "compile_layers",
    "cut",
    "export_safetensors",
    "generate",
    "load_safetensors",
    "prove_cut",
    "sequence_slices",
    "spread",
    "tie",
    "whole_names",
]

_LAZY = {
    "checkpoint": "Checkpoints LoadedCheckpoint TrainingState export_safetensors load_safetensors whole_names",
    "generation": "Sampling generate",
    "ragged": "Spread spread",
    "restart": "NO_PROGRESS PREEMPTED Attempt RestartError attempt_store stop_restarts",
    "stages": "Boundary CutProof DropoutMasks Names Stage Tie compile_layers cut prove_cut sequence_slices tie ties_of",
}

__getattr__, __dir__ = lazy_names(
    __name__, __all__, {name: folder for folder, names in _LAZY.items() for name in names.split()}
)
