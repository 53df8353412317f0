"""Train existing models as one pipeline: what a training script needs above plans, lanes and step functions.

Names outside ``__all__`` (rarer functions and errors, exit codes, the results of some functions) are imported from here
as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.topology.lazy import lazy_names
from pipegrid.training.errors import (
    CheckpointError,
    CheckpointMismatchError as CheckpointMismatchError,
    CorruptCheckpointError as CorruptCheckpointError,
    CutError as CutError,
    GenerationError as GenerationError,
    RestartError as RestartError,
    SpreadError as SpreadError,
)

if TYPE_CHECKING:
    from pipegrid.training.checkpoint import (
        Checkpoints,
        LoadedCheckpoint as LoadedCheckpoint,
        TrainingState,
        export_safetensors as export_safetensors,
        load_safetensors,
        whole_names as whole_names,
    )
    from pipegrid.training.generation import Sampling, generate
    from pipegrid.training.pipeline import Pipeline, PipelineModule
    from pipegrid.training.ragged import Spread as Spread, balance_samples, spread as spread
    from pipegrid.training.restart import (
        NO_PROGRESS as NO_PROGRESS,
        PREEMPTED as PREEMPTED,
        Attempt,
        attempt_store as attempt_store,
        stop_restarts as stop_restarts,
    )
    from pipegrid.training.stages import (
        Boundary as Boundary,
        Compared as Compared,
        CutProof as CutProof,
        DropoutMasks,
        Names,
        Stage,
        StageComparison as StageComparison,
        Tie as Tie,
        check_stages,
        compile_layers as compile_layers,
        cut as cut,
        pipeline_stage,
        prove_cut,
        sequence_slices,
        tie as tie,
        tie_stage_parameters,
        ties_of as ties_of,
    )

__all__ = [
    "Attempt",
    "CheckpointError",
    "Checkpoints",
    "DropoutMasks",
    "Names",
    "Pipeline",
    "PipelineModule",
    "Sampling",
    "Stage",
    "TrainingState",
    "balance_samples",
    "check_stages",
    "generate",
    "load_safetensors",
    "pipeline_stage",
    "prove_cut",
    "sequence_slices",
    "tie_stage_parameters",
]

_LAZY = {
    "checkpoint": "Checkpoints LoadedCheckpoint TrainingState export_safetensors load_safetensors whole_names",
    "generation": "Sampling generate",
    "pipeline": "Pipeline PipelineModule",
    "ragged": "Spread balance_samples spread",
    "restart": "NO_PROGRESS PREEMPTED Attempt attempt_store stop_restarts",
    "stages": "Boundary Compared CutProof DropoutMasks Names Stage StageComparison Tie check_stages compile_layers "
    "cut pipeline_stage prove_cut sequence_slices tie tie_stage_parameters ties_of",
}

__getattr__, __dir__ = lazy_names(
    __name__, __all__, {name: folder for folder, names in _LAZY.items() for name in names.split()}
)
