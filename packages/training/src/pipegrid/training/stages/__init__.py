"""Stages out of a model."""

from pipegrid.training.stages.assignment import Assignment, Tie, assign
from pipegrid.training.stages.comparison import Compared, StageComparison
from pipegrid.training.stages.cutting import check_stages, cut, pipeline_stage
from pipegrid.training.stages.dropout import DropoutMasks
from pipegrid.training.stages.names import Names, find_names
from pipegrid.training.stages.proof import Boundary, CutProof, prove_cut
from pipegrid.training.stages.slicing.slice_batches import sequence_slices
from pipegrid.training.stages.stage import Stage, compile_layers
from pipegrid.training.stages.ties import tie, tie_stage_parameters, ties_of

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
    "cut",
    "find_names",
    "pipeline_stage",
    "prove_cut",
    "sequence_slices",
    "tie",
    "tie_stage_parameters",
    "ties_of",
]
