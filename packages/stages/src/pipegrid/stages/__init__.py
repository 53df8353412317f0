"""Stages out of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.core.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.stages.assignment import Assignment, Tie, assign
    from pipegrid.stages.comparison.compare import Compared, StageComparison
    from pipegrid.stages.cutting import check_stages, pipeline_stage
    from pipegrid.stages.dropout import DropoutMasks
    from pipegrid.stages.names import Names, find_names
    from pipegrid.stages.proof.boundaries import Boundary, CutProof
    from pipegrid.stages.proof.proof import prove_cut
    from pipegrid.stages.slicing.slice_batches import sequence_slices
    from pipegrid.stages.stage import Stage, compile_layers
    from pipegrid.stages.ties import tie_stage_parameters, ties_of

__all__ = [
    "Assignment",
    "Boundary",
    "Compared",
    "CutProof",
    "DropoutMasks",
    "Names",
    "Stage",
    "StageComparison",
    "Tie",
    "assign",
    "check_stages",
    "compile_layers",
    "find_names",
    "pipeline_stage",
    "prove_cut",
    "sequence_slices",
    "tie_stage_parameters",
    "ties_of",
]

__getattr__, __dir__ = lazy_names(__name__, __all__)
