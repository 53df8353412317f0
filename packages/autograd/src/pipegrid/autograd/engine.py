"""The two parts of torch's autograd engine without a public form. Tests pin both functions.

`torch.autograd.backward` and `torch.autograd.grad` are `run_backward` with checks before it. These take about as long
as the engine itself does for a small graph, and one of them rules out freed outputs: such an output has one element,
so its shape is not its gradient's.

Torch also wraps the engine in a copy of the context for the threads of devices, and in hooks that log nodes. Without a
device in use and without that log the engine is called as it is: the wrapper takes half as long as a small graph.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, _engine_run_backward

_LOG = logging.getLogger(torch.autograd.graph.__name__)
_ACCELERATOR = torch.accelerator.current_accelerator()


def shape_of_gradient(output: torch.Tensor) -> tuple[int, ...]:
    """The shape of ``output`` at its creation, which is its gradient's: also after its storage was freed.

    Examples:
        >>> import torch
        >>> output = torch.randn(2, 4, requires_grad=True) * 2
        >>> free_storage(output)
        >>> shape_of_gradient(output)
        (2, 4)
    """
    node = output.grad_fn
    if node is None:
        return tuple(output.shape)
    return tuple(node._input_metadata[output.output_nr].shape)  # noqa: SLF001


def run_backward(
    roots: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    *,
    inputs: Sequence[torch.Tensor | GradientEdge] = (),
    keep_graph: bool = False,
    accumulate: bool = True,
) -> tuple[torch.Tensor | None, ...]:
    """Run the graph from ``roots``, without comparing shapes: the engine may sum up a gradient that is too large.

    It ends at ``inputs``, or at every leaf. With ``accumulate``, adds to their ``grad``; otherwise returns their
    gradients, None where none arrived.

    Examples:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> run_backward([3 * x], [torch.ones(2)], inputs=[x], accumulate=False)
        (tensor([3., 3.]),)
    """
    used = _ACCELERATOR is not None and (_ACCELERATOR.type != "cuda" or torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    wrapped = used or _LOG.isEnabledFor(logging.DEBUG)  # where torch's wrapper of the engine has an effect
    engine: Any = _engine_run_backward if wrapped else Variable._execution_engine.run_backward  # noqa: SLF001
    found: tuple[torch.Tensor | None, ...] = engine(
        tuple(roots),
        tuple(gradients),
        keep_graph,
        False,  # no graph of the backward itself
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    return found
