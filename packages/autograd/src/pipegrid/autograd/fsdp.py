"""FSDP2 (``fully_shard``) as the runtime and the reduction use it; its private parts are read here only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pipegrid.autograd.tree import fsdp_among, modules_in

POST_BACKWARD = "RegisterPostBackwardFunctionBackward"  # where ``fully_shard`` reduces, above a module's inputs
_PROBE = "_pipegrid_probe"


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` has sharded ``module`` itself."""
    return bool(fsdp_among([module]))


def fsdp_modules(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules inside that ``fully_shard`` has sharded, outer ones first, with their names."""
    return ((name, inner) for name, inner in module.named_modules() if is_fsdp(inner))


def has_fsdp(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` has sharded a module inside."""
    return bool(fsdp_among(modules_in(module)))


def divide_factor(module: Any) -> float | None:
    """The divisor of an FSDP module's gradients (``set_gradient_divide_factor``); None: the ranks of its mesh."""
    state = module._get_fsdp_state()  # noqa: SLF001
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one group or none, in older versions
        groups = [group for group in (getattr(state, "_fsdp_param_group", None),) if group is not None]
    factors = [group.gradient_divide_factor for group in groups]
    return next((float(factor) for factor in factors if factor is not None), None)


def outermost(modules: Iterable[Any]) -> tuple[Any, ...]:
    """The sharded ``modules`` that are inside no other one."""
    held = list(modules)
    inside = {id(inner) for module in held for inner in module.modules() if inner is not module}
    return tuple(module for module in held if id(module) not in inside)


def let_plan_decide(root: Any, *, plan: bool) -> None:
    """Leave gathering, freeing and reduction of a sharded module and those inside to a plan, or to FSDP2 again."""
    root.set_reshard_after_forward(not plan)
    root.set_reshard_after_backward(not plan)
    root.set_requires_gradient_sync(not plan)
    root.set_is_last_backward(not plan)
    if plan and hasattr(root, "set_reduce_scatter_unused_params"):
        # A parameter may have a gradient on one replica and none on another: all take part in its reduction.
        root.set_reduce_scatter_unused_params(True)


def reduce_scatter(root: Any, *, last: bool) -> None:
    """Reduce the gradients that a sharded module and those inside have accumulated, by FSDP2's own hooks.

    FSDP2 reduces after a backward through a module. Here that is a backward through nothing: a forward method of the
    module that returns its argument. ``last``: the current stream waits for the reduction.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    if not hasattr(root, _PROBE):
        object.__setattr__(root, _PROBE, lambda tensor: tensor * 1.0)
        register_fsdp_forward_method(root, _PROBE)
    root.set_requires_gradient_sync(True)
    root.set_is_last_backward(last)
    with torch.enable_grad():
        probe = torch.zeros((), device=next(root.parameters()).device, requires_grad=True)
        getattr(root, _PROBE)(probe).backward()
    root.set_requires_gradient_sync(False)
    root.set_is_last_backward(False)
