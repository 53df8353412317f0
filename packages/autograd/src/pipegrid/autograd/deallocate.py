"""The storage of an output that was sent: freed, while its node stays for the backward."""

from __future__ import annotations

import torch

from pipegrid.core.errors import StepArgumentError


def free_storage(out: torch.Tensor) -> None:
    """Free the storage of a sent activation; its ``grad_fn`` stays for the backward.

    Examples:
        >>> import torch
        >>> output = torch.randn(2, 4, requires_grad=True) * 2
        >>> free_storage(output)
        >>> output.untyped_storage().nbytes(), output.grad_fn is not None
        (4, True)
    """
    require_deallocatable(out)
    out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


def require_deallocatable(out: torch.Tensor) -> None:
    """Raise StepArgumentError for a view: its base shares the storage.

    Examples:
        >>> import torch
        >>> require_deallocatable(torch.ones(2, requires_grad=True) * 2)
    """
    if out._base is not None:  # noqa: SLF001 -- the documented way to ask whether a tensor is a view
        raise StepArgumentError(
            f"an output of shape {tuple(out.shape)} is a view of another tensor and cannot be freed; return its clone()"
        )
