"""The one call into torch's autograd engine that has no public form.

`torch.autograd.backward` and `torch.autograd.grad` are this call with checks before it, which take about as long as
the engine itself does for a small graph, and one of which refuses what the runtime needs: an output whose storage was
freed once it was sent has one element, so its shape is not its gradient's. Tests pin the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward


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
