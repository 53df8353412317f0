"""Tokens from a pipeline: one forward pass per token, each stage with the keys and values of its own layers."""

from pipegrid.training.generation.generate import generate
from pipegrid.training.generation.sampling import Sampling

__all__ = ["Sampling", "generate"]
