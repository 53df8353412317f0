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
    return (kind := _kind()) is not None and isinstance(module, kind)


def fsdp_modules(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules inside that ``fully_shard`` has sharded, outer ones first, with their names."""
    if (kind := _kind()) is not None:
        yield from ((name, inner) for name, inner in module.named_modules() if isinstance(inner, kind))


def _kind() -> type | None:
    """The class of sharded modules; None where nothing has imported FSDP2, which takes a second."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return None if fsdp is None else fsdp.FSDPModule


def divide_factor(module: Any) -> float | None:
    """What an FSDP module divides gradients by (``set_gradient_divide_factor``); None: by the ranks of its mesh."""
    state = module._get_fsdp_state()  # noqa: SLF001
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one group or none, in older versions
        groups = [group for group in (getattr(state, "_fsdp_param_group", None),) if group is not None]
    factors = [group.gradient_divide_factor for group in groups]
    return next((float(factor) for factor in factors if factor is not None), None)
