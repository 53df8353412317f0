"""Copies of a tree of modules that share its tensors: all use of torch's private attributes is here."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from pipegrid.training.stages.torch_compat import on_meta

TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copied(part: nn.Module) -> nn.Module:
    """A module with the same parameters, buffers, children and hooks; changes of these do not reach ``part``."""
    made = object.__new__(type(part))  # copy.copy() fails for parametrized modules
    made.__dict__.update(vars(part))
    for name, value in vars(part).items():
        if name in TABLES:
            made.__dict__[name] = dict(value)
        elif name.startswith(_HOOKS):
            made.__dict__[name] = OrderedDict(value)
        elif name == "_non_persistent_buffers_set":
            made.__dict__[name] = set(value)
    return made


def meta_copy(model: nn.Module, *, buffers: bool) -> nn.Module:
    """A copy of a tree with its parameters on the meta device; what is in two places stays one.

    ``buffers``: those as well; else the copy shares them. A forward of the copy changes neither hooks nor attributes of
    ``model``.
    """
    made: dict[int, nn.Module | Tensor] = {}

    def parameter_of(parameter: nn.Parameter) -> nn.Parameter:
        shape = made.setdefault(id(parameter), nn.Parameter(on_meta(parameter.detach()), parameter.requires_grad))
        assert isinstance(shape, nn.Parameter)
        return shape

    def part_of(part: nn.Module) -> nn.Module:
        copy = made.get(id(part))
        if isinstance(copy, nn.Module):
            return copy
        made[id(part)] = copy = copied(part)
        for key, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            copy.register_parameter(key, parameter_of(parameter))
        for key, buffer in part.named_buffers(recurse=False, remove_duplicate=False) if buffers else ():
            copy.register_buffer(key, on_meta(buffer))
        for key, child in part.named_children():
            copy.add_module(key, part_of(child))
        return copy

    return part_of(model)


def adopt(wrapper: nn.Module, inner: nn.Module) -> None:
    """Parameters, buffers and children of ``inner`` become those of ``wrapper``, under the same names."""
    for name in (*TABLES, "_non_persistent_buffers_set"):
        wrapper.__dict__[name] = vars(inner)[name]
