"""The modules of a model in one walk, for what looks at them in every step."""

from __future__ import annotations

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
