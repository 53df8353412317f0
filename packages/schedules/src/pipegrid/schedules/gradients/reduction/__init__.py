"""Sums of gradients over replicas, tensor-parallel ranks and tied copies, and what they are divided by."""

from __future__ import annotations

from pipegrid.schedules.errors import TyingError as TyingError
from pipegrid.schedules.gradients.reduction.by_unit import UnitGradients, require_addable_by_unit
from pipegrid.schedules.gradients.reduction.declared_ties import required_ties
from pipegrid.schedules.gradients.reduction.overlap import EarlyReduction, last_backwards
from pipegrid.schedules.gradients.reduction.policy import GradientPolicy, StepGradients, gradient_policy, observed
from pipegrid.schedules.gradients.reduction.reduce import GradientReduction, reduce_gradients
from pipegrid.schedules.gradients.reduction.replicas import ReplicaError, require_equal_replicas
from pipegrid.schedules.gradients.reduction.tied import TiedParameters, tie_parameters, tied_stages, ties_among

__all__ = [
    "EarlyReduction",
    "GradientPolicy",
    "GradientReduction",
    "ReplicaError",
    "StepGradients",
    "TiedParameters",
    "UnitGradients",
    "gradient_policy",
    "last_backwards",
    "observed",
    "reduce_gradients",
    "require_addable_by_unit",
    "require_equal_replicas",
    "required_ties",
    "tie_parameters",
    "tied_stages",
    "ties_among",
]
