"""Graphs whose backward cannot be split: reentrant checkpoints, an error; compiled regions, which run whole at I."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import Node

from pipegrid.autograd.tree import named_modules_of

# A reentrant checkpoint: it cannot run while others of its graph are kept for later.
UNSPLITTABLE = "CheckpointFunctionBackward"
# A compiled region: both halves in one node, which may reuse the memory that it saved: nothing is kept for later.
COMPILED = "CompiledFunctionBackward"
# A region of `compile_split`: its own backward is the input half, and the weight half that of a node behind it.
SPLIT_REGION = "SplitRegionBackward"


class SplitBackwardError(ValueError):
    """A stage's backward cannot be run in two halves.

    Examples:
        >>> import torch
        >>> from torch.autograd.graph import get_gradient_edge
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=True)
        >>> require_splittable(input_path_of([get_gradient_edge(y)], [x]), 0, torch.exp)
        Traceback (most recent call last):
            ...
        pipegrid.autograd.unsplittable.SplitBackwardError: stage 0: function 'exp' is checkpointed with
            use_reentrant=True, which cannot be split into I and W; checkpoint it with use_reentrant=False, or
            choose a schedule with whole backwards
    """


def require_splittable(path: Iterable[Node], stage: int, model: Any) -> None:
    """Raise SplitBackwardError for a reentrant checkpoint on the ``path`` to the inputs of ``stage``.

    ``model``: the stage's module, for the names in the message; anything else has none.

    Examples:
        >>> import torch
        >>> from torch.autograd.graph import get_gradient_edge
        >>> stage, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
        >>> require_splittable(input_path_of([get_gradient_edge(stage(x))], [x]), 0, stage)
    """
    for node in path:
        if node.name() == UNSPLITTABLE:
            raise SplitBackwardError(
                f"stage {stage}: {_checkpointed(node, model)} is checkpointed with use_reentrant=True, which cannot be "
                "split into I and W; checkpoint it with use_reentrant=False, or choose a schedule with whole backwards"
            )


def _checkpointed(node: Node, model: Any) -> str:
    """The function of a reentrant checkpoint: a module (or a method of one) by its name in the stage, or its own."""
    function = getattr(node, "run_function", None)
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    if not isinstance(owner, torch.nn.Module):
        return f"function {getattr(function, '__name__', type(function).__name__)!r}"
    name = next((name for name, found in named_modules_of(model) if found is owner), "")
    return f"module {name!r} ({type(owner).__name__})" if name else f"module {type(owner).__name__}"
