"""What the runtime needs of torch's autograd engine that has no public form. Tests pin both functions.

`torch.autograd.backward` and `torch.autograd.grad` are `run_backward` with checks before it, which take about as long
as the engine itself does for a small graph, and one of which refuses what the runtime needs: an output whose storage
was freed once it was sent has one element, so its shape is not its gradient's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward


def shape_of_gradient(output: torch.Tensor) -> tuple[int, ...]:
    """The shape that ``output`` had when it was made, which its gradient has, too: also after it was freed."""
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
    """Run the graph from ``roots``, without comparing shapes: a gradient that is too large may be summed up.

    Args:
        roots: where to start.
        gradients: one for each.
        inputs: where to end; empty is at every leaf.
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
