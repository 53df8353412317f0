"""Memory to which messages come again, of which nothing else may be left.

Autograd may pass a received gradient on as it is, or a view of it: as the gradient of an input, which is sent later, or
as that of a parameter, which keeps the first one that it gets. Nothing of that may be left where messages come again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# There is no public way to ask; without this one, all memory counts as held. `test_static_outputs.py` pins it.
_holders = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001
_ALONE = 2  # the one tensor, and torch's Python object of the storage


def is_shared(tensor: torch.Tensor, *, alone: int = _ALONE) -> bool:
    """Whether another tensor, a view or a graph holds the memory, too; ``alone``: `num_holders` when nothing did."""
    return _holders is None or _holders(tensor.untyped_storage()._cdata) > alone  # noqa: SLF001


def num_holders(tensor: torch.Tensor) -> int:
    """How many hold its memory, itself included."""
    return _ALONE if _holders is None else int(_holders(tensor.untyped_storage()._cdata))  # noqa: SLF001


def memory_of(tensors: Iterable[torch.Tensor | None]) -> set[int]:
    """The addresses of the storages of some tensors."""
    own = [_own(tensor) for tensor in tensors if tensor is not None]
    return {tensor.untyped_storage().data_ptr() for tensor in own if _has_memory(tensor) and tensor.numel()}


def copied_from(memory: set[int], tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy of it where it is in ``memory``, or where that cannot be known."""
    own = _own(tensor)
    if _has_memory(own) and (not own.numel() or own.untyped_storage().data_ptr() not in memory):
        return tensor
    return tensor.clone()


def keep_own_gradients(modules: Iterable[tuple[str, torch.nn.Module]], came: Sequence[torch.Tensor]) -> None:
    """Copy the gradients of parameters that are in the memory of gradients which ``came``, whose backward is over."""
    shared = [tensor for tensor in came if is_shared(tensor)]
    if not shared:
        return
    memory = memory_of(shared)
    for _, module in modules:
        for parameter in module.parameters(recurse=False):
            if parameter.grad is not None:
                parameter.grad = copied_from(memory, parameter.grad)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor on this rank; any other tensor itself."""
    own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return own


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of torch's own over one storage."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided
