"""What has no public form in torch's autograd engine: a backward from an output whose storage was freed.

`torch.autograd.backward` refuses an output whose shape differs from its gradient's. A sent activation whose
storage was freed has one element, so its backward must go to the engine directly. Tests pin both functions.
"""

from __future__ import annotations

import torch
from torch.autograd.variable import Variable


def shape_of_gradient(output: torch.Tensor) -> tuple[int, ...]:
    """The shape that ``output`` had when it was made, which its gradient has, too: also after it was freed."""
    node = output.grad_fn
    if node is None:
        return tuple(output.shape)
    return tuple(node._input_metadata[output.output_nr].shape)  # noqa: SLF001


def run_backward(outputs: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]) -> None:
    """Accumulate into leaves the gradients of ``outputs``, without comparing shapes."""
    Variable._execution_engine.run_backward(  # noqa: SLF001
        tensors=outputs,
        grad_tensors=gradients,
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
