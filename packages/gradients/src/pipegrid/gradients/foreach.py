"""Multi-tensor operations, ``torch._foreach_*``: one call for a list of tensors; a test pins what they do.

Tensors of one list may differ in dtype and device. A DTensor would make each a collective: pass `dtensors.local_of`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def scale_(tensors: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply each in place."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def divide_(tensors: Sequence[torch.Tensor], divisor: torch.Tensor | float) -> None:
    """Divide each in place; narrow floats in float32: a GPU would make the tokens float16, which ends at 65504."""
    if not isinstance(divisor, torch.Tensor) and divisor == 1:
        return
    wide: list[torch.Tensor] = []
    for tensor in tensors:
        if isinstance(divisor, torch.Tensor) and tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.copy_(tensor.float().div_(divisor))
        else:
            wide.append(tensor)
    if wide:
        torch._foreach_div_(wide, divisor)


def add_(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Add ``others`` to ``tensors`` in place, pair by pair."""
    if tensors:
        torch._foreach_add_(list(tensors), list(others))


def copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy ``sources`` into ``targets``, pair by pair."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def norms(tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """The vector norm of each, as float64 scalars in one tensor; all lie on one device and have elements."""
    return torch.stack(torch._foreach_norm(list(tensors), order, dtype=torch.float64))  # noqa: SLF001
