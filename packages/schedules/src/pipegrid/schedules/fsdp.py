"""FSDP2 (``fully_shard``) as the runtime and the reduction meet it; its private parts are read here only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

POST_BACKWARD = "RegisterPostBackwardFunctionBackward"
"""The node at which ``fully_shard`` reduces the gradients of a module: above those of the module's inputs."""


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` has sharded ``module`` itself."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # a second of imports, which a sharded module has made
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def fsdp_modules(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules inside that ``fully_shard`` has sharded, outer ones first, with their names."""
    return ((name, inner) for name, inner in module.named_modules() if is_fsdp(inner))


def divide_factor(module: Any) -> float | None:
    """What an FSDP module divides gradients by (``set_gradient_divide_factor``); None: by the ranks of its mesh."""
    state = module._get_fsdp_state()  # noqa: SLF001
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one group or none, in older versions
        groups = [group for group in (getattr(state, "_fsdp_param_group", None),) if group is not None]
    factors = [getattr(group, "gradient_divide_factor", None) for group in groups]
    return next((float(factor) for factor in factors if factor is not None), None)
