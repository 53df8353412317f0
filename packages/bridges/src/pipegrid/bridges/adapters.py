"""For peers that speak 3-d tensors only. Nothing of this package needs it: lanes carry any number of axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

Tensor2dOr3d: TypeAlias = torch.Tensor | list[torch.Tensor] | None


def _prepare_tensor_for_comm(tensor: Tensor2dOr3d) -> Tensor2dOr3d:
    """Expand a 2-d tensor to 3-d with a last axis of size 1.

    Lists element by element, anything else as it is.
    """
    return _each(tensor, lambda t: t.unsqueeze(-1) if t.ndim == 2 else t)


def _restore_tensor_from_comm(tensor: Tensor2dOr3d) -> Tensor2dOr3d:
    """Undo `_prepare_tensor_for_comm`: drop a last axis of size 1 of a 3-d tensor.

    A tensor that had the shape ``[a, b, 1]`` before cannot be told from an expanded one, and loses its axis.
    """
    return _each(tensor, lambda t: t.squeeze(-1) if t.ndim == 3 and t.shape[-1] == 1 else t)


def _each(tensor: Tensor2dOr3d, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensor2dOr3d:
    if tensor is None:
        return None
    return [change(part) for part in tensor] if isinstance(tensor, list) else change(tensor)
