"""The modules of a model in one walk, as each step looks at them: which are sharded by FSDP2, which are compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch


def modules_in(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Every module of ``model`` once, level by level, itself first.

    `torch.nn.Module.modules` has them in the order of their names, and enters a generator for each level above one.
    """
    found, seen = [model], {model}
    for module in found:  # grows
        for inner in module._modules.values():  # noqa: SLF001 (what `modules` goes through)
            if inner is not None and inner not in seen:
                seen.add(inner)
                found.append(inner)
    return found


def fsdp_among(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """The modules among ``modules`` that ``fully_shard`` has sharded."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # whose import takes a second
    if fsdp is None:
        return []
    return [module for module in modules if isinstance(module, fsdp.FSDPModule)]


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `torch.nn.Module.compile` was called: the module calls compiled code, which a copy of it has not.

    There is no public way to ask; pinned by `tests/autograd/test_torch_facts.py`.

    Examples:
        >>> import torch
        >>> is_compiled_in_place(torch.nn.Linear(4, 4))
        False
    """
    return module._compiled_call_impl is not None  # noqa: SLF001


def compiled_among(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules among ``modules`` that are compiled in place."""
    return list(filter(attrgetter("_compiled_call_impl"), modules))


def compiled_modules(model: Any) -> list[str]:
    """The names of the compiled modules of a stage; `torch.compile` wraps a module, and `Module.compile` marks it.

    Examples:
        >>> import torch
        >>> compiled_modules(torch.nn.Linear(4, 4))
        []
    """
    return [
        f"{name.removesuffix('_orig_mod').rstrip('.') or 'the whole stage'!r} ({type(module).__name__})"
        for name, module in named_modules_of(model)
        if name.endswith("_orig_mod") or is_compiled_in_place(module)
    ]


def named_modules_of(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """The modules of a model by name; anything else has none."""
    return list(model.named_modules()) if isinstance(model, torch.nn.Module) else []
