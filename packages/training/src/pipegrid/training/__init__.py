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
    from pipegrid.training.check import check_stages
    from pipegrid.training.checkpoint import (
        Checkpoints,
        LoadedCheckpoint as LoadedCheckpoint,
        TrainingState,
        export_safetensors,
        load_safetensors,
        whole_names,
    )
    from pipegrid.training.generation import Sampling, generate
    from pipegrid.training.pipeline import Pipeline, PipelineModule
    from pipegrid.training.ragged import Spread as Spread, balance_samples, spread as spread
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
        Compared as Compared,
        CutProof as CutProof,
        StageComparison as StageComparison,
        compile_layers,
        cut as cut,
        pipeline_stage,
        prove_cut,
        sequence_slices,
        tie as tie,
        tie_stage_parameters,
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
    "Pipeline",
    "PipelineModule",
    "RestartError",
    "Sampling",
    "Stage",
    "TrainingState",
    "attempt_store",
    "balance_samples",
    "check_stages",
    "compile_layers",
    "export_safetensors",
    "generate",
    "load_safetensors",
    "pipeline_stage",
    "prove_cut",
    "sequence_slices",
    "tie_stage_parameters",
    "whole_names",
]

_LAZY = {
    "check": "check_stages",
    "checkpoint": "Checkpoints LoadedCheckpoint TrainingState export_safetensors load_safetensors whole_names",
    "generation": "Sampling generate",
    "pipeline": "Pipeline PipelineModule",
    "ragged": "Spread balance_samples spread",
    "restart": "NO_PROGRESS PREEMPTED Attempt RestartError attempt_store stop_restarts",
    "stages": "Boundary Compared CutProof DropoutMasks Names Stage StageComparison Tie compile_layers cut "
    "pipeline_stage prove_cut sequence_slices tie tie_stage_parameters ties_of",
}

__getattr__, __dir__ = lazy_names(
    __name__, __all__, {name: folder for folder, names in _LAZY.items() for name in names.split()}
)
