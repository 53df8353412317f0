"""The two parts of torch's autograd engine without a public form. Tests pin both functions.

`torch.autograd.backward` and `torch.autograd.grad` are `run_backward` with checks before it. These take about as long
as the engine itself does for a small graph, and one of them rules out freed outputs: such an output has one element,
so its shape is not its gradient's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward


def shape_of_gradient(output: torch.Tensor) -> tuple[int, ...]:
    """The shape of ``output`` at its creation, which is its gradient's: also after its storage was freed."""
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

    Args:
        roots: outputs to start from.
        gradients: one per root.
        inputs: tensors to end at; empty means every leaf.
        keep_graph: the graph is to run again.
        accumulate: add to the ``grad`` of the inputs; otherwise return their gradients, None where none arrived.
    """
    found: tuple[torch.Tensor | None, ...] = _engine_run_backward(
        tuple(roots),
        tuple(gradients),
        keep_graph,
        False,  # no graph of the backward itself
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    return found
