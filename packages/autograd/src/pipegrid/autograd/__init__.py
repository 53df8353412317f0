"""Backwards in two halves, freed outputs, and the parts of torch's autograd engine that both need."""

from pipegrid.autograd.compiled import compile_split
from pipegrid.autograd.deallocate import free_storage, require_deallocatable
from pipegrid.autograd.engine import run_backward, shape_of_gradient
from pipegrid.autograd.partition import input_path_of
from pipegrid.autograd.split_backward import WeightHalf, backward_inputs, backward_weights
from pipegrid.autograd.tree import compiled_modules, is_compiled_in_place
from pipegrid.autograd.unsplittable import SplitBackwardError, require_splittable

__all__ = [
    "SplitBackwardError",
    "WeightHalf",
    "backward_inputs",
    "backward_weights",
    "compile_split",
    "compiled_modules",
    "free_storage",
    "input_path_of",
    "is_compiled_in_place",
    "require_deallocatable",
    "require_splittable",
    "run_backward",
    "shape_of_gradient",
]
