"""The one call into torch's autograd engine that has no public form.

`torch.autograd.backward` refuses an output whose shape differs from its gradient's. A sent activation whose
storage was freed has one element, so its backward must go to the engine directly. A test pins the call.
"""

from __future__ import annotations

import torch
from torch.autograd.variable import Variable


def run_backward(outputs: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor | None, ...]) -> None:
    """Accumulate into leaves the gradients of ``outputs``, without comparing shapes."""
    filled = tuple(
        torch.ones_like(output) if gradient is None else gradient
        for output, gradient in zip(outputs, gradients, strict=True)
    )
    Variable._execution_engine.run_backward(  # noqa: SLF001
        tensors=outputs,
        grad_tensors=filled,
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
