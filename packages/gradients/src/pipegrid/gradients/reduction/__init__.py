"""Sums of gradients over replicas, tensor-parallel ranks and tied copies, and what they are divided by."""

from __future__ import annotations

from pipegrid.gradients.reduction.overlap import EarlyReduction
from pipegrid.gradients.reduction.policy import GradientPolicy, StepGradients, gradient_policy, observed
from pipegrid.gradients.reduction.reduce import GradientReduction, reduce_gradients
from pipegrid.gradients.reduction.replicas import ReplicaError, require_equal_replicas
from pipegrid.gradients.reduction.tied import TiedParameters, required_ties, tie_parameters, tied_stages, ties_among

__all__ = [
    "EarlyReduction",
    "GradientPolicy",
    "GradientReduction",
    "ReplicaError",
    "StepGradients",
    "TiedParameters",
    "gradient_policy",
    "observed",
    "reduce_gradients",
    "require_equal_replicas",
    "required_ties",
    "tie_parameters",
    "tied_stages",
    "ties_among",
]
