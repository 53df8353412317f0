"""Backwards in two halves, freed outputs, and the parts of torch's autograd engine that both need."""

from pipegrid.schedules.autograd.compiled import compile_split
from pipegrid.schedules.autograd.deallocate import free_storage, require_deallocatable
from pipegrid.schedules.autograd.engine import run_backward, shape_of_gradient
from pipegrid.schedules.autograd.offload import Offload
from pipegrid.schedules.autograd.partition import input_path_of
from pipegrid.schedules.autograd.split_backward import WeightHalf, backward_inputs, backward_weights
from pipegrid.schedules.autograd.unsplittable import (
    SplitBackwardError,
    compiled_modules,
    is_compiled_in_place,
    require_splittable,
)

__all__ = [
    "Offload",
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
