"""Copies of a tree of modules that share its tensors: all use of torch's private attributes is here."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

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


def adopt(wrapper: nn.Module, inner: nn.Module) -> None:
    """Parameters, buffers and children of ``inner`` become those of ``wrapper``, under the same names."""
    for name in (*TABLES, "_non_persistent_buffers_set"):
        wrapper.__dict__[name] = vars(inner)[name]
