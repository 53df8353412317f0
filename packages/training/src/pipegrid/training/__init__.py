"""Train existing models as one pipeline: what a training script needs above plans, lanes and step functions.

Names outside ``__all__`` (rarer functions and errors, exit codes, the results of some functions) are imported from here
as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.core.lazy import lazy_names
from pipegrid.stages.errors import (
    CheckpointError,
    CorruptCheckpointError as CorruptCheckpointError,
    CutError as CutError,
)
from pipegrid.checkpoint.errors import CheckpointMismatchError as CheckpointMismatchError
from pipegrid.training.errors import GenerationError as GenerationError, RestartError as RestartError

if TYPE_CHECKING:
    from pipegrid.checkpoint import (
        Checkpoints,
        LoadedCheckpoint as LoadedCheckpoint,
        TrainingState,
        export_safetensors as export_safetensors,
        load_safetensors as load_safetensors,
        whole_names as whole_names,
    )
    from pipegrid.training.generation import Sampling, generate
    from pipegrid.training.pipeline import Pipeline, PipelineModule
    from pipegrid.training.ragged import Spread as Spread, balance_samples
    from pipegrid.training.restart import (
        NO_PROGRESS as NO_PROGRESS,
        PREEMPTED as PREEMPTED,
        Attempt,
        attempt_store as attempt_store,
        stop_restarts as stop_restarts,
    )
    from pipegrid.stages import (
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
        pipeline_stage,
        prove_cut as prove_cut,
        sequence_slices as sequence_slices,
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
    "pipeline_stage",
    "tie_stage_parameters",
]

__getattr__, __dir__ = lazy_names(__name__, __all__)
