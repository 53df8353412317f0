"""A copy of a model's tree without the memory of its parameters, for traces."""

from __future__ import annotations

from torch import nn

from pipegrid.training.stages.proof.traced import shape_only
from pipegrid.training.stages.tree import copied


def outline(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters are on the meta device; buffers are shared, and ties are kept.

    A forward of it changes neither hooks nor attributes of ``model``.
    """
    modules: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter] = {}

    def shape_of(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in parameters:
            shape = shape_only(parameter.detach())
            parameters[id(parameter)] = nn.Parameter(shape, parameter.requires_grad)
        return parameters[id(parameter)]

    def part_of(part: nn.Module) -> nn.Module:
        if id(part) not in modules:
            made = modules[id(part)] = copied(part)
            for key, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
                made.register_parameter(key, shape_of(parameter))
            for key, child in part.named_children():
                made.add_module(key, part_of(child))
        return modules[id(part)]

    return part_of(model)
