"""The names of torch that are not public and that the fake GPU needs, in one place; a test pins what they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# As Any: torch's stubs know neither what its trampolines call nor that a weak reference is made from a storage.
GroupBase: Any = torch.distributed.ProcessGroup
BackendBase: Any = torch._C._distributed_c10d.Backend  # noqa: SLF001 (has no public name)
# Whether torch takes backends alone as what a new group is split from: 2.15 does, and lets others extend them.
SPLITS_BACKENDS: bool = hasattr(torch.distributed.distributed_c10d, "_get_backend_name_for_device")
# The kind of device that a default group of the fake is bound to, for its splits: 2.15 asks for one that the backend
# serves, earlier ones for an accelerator.
BOUND_KIND = "cpu" if SPLITS_BACKENDS else "cuda"
WorkBase: Any = torch._C._distributed_c10d.Work  # noqa: SLF001 (has no public name)
WeakStorage: Any = reductions.StorageWeakRef


def living(reference: Any) -> torch.UntypedStorage | None:
    """The storage of a weak reference; None where it is gone."""
    return cast("torch.UntypedStorage | None", torch.UntypedStorage._new_with_weak_ptr(reference.cdata))  # noqa: SLF001


def name_of(operation: Any) -> str:
    """An operation's name without its namespace and overload."""
    return str(operation.overloadpacket.__name__)


def is_view(operation: Any) -> bool:
    """Whether an operation only gives a tensor its memory or layout, and computes nothing."""
    if name_of(operation) in ("_unsafe_view", "lift_fresh", "resize_", "set_"):  # their schemas say otherwise
        return True
    returns = operation._schema.returns  # noqa: SLF001 (has no public name)
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def is_empty(operation: Any) -> bool:
    """Whether an operation makes memory without values."""
    return name_of(operation).startswith(("empty", "new_empty"))


def arguments_of(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the operation's schema."""
    schema = operation._schema  # noqa: SLF001 (has no public name)
    return dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs


def written_by(operation: Any, arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that a call writes to."""
    return [
        tensor
        for argument in operation._schema.arguments  # noqa: SLF001 (has no public name)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(arguments.get(argument.name))
    ]


def reads_values(operation: Any, arguments: dict[str, Any]) -> bool:
    """Whether a call has to look at the values of tensors: for a Python number, or for the shape of its result."""
    if name_of(operation) in ("index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"):
        return any(each.dtype in (torch.bool, torch.uint8) for each in tensors_in(arguments.get("indices")))
    return torch.Tag.data_dependent_output in operation.tags or torch.Tag.dynamic_output_shape in operation.tags


def tensors_in(value: Any) -> list[Tensor]:
    """The strided tensors of a nested value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


__all__ = [
    "BOUND_KIND",
    "SPLITS_BACKENDS",
    "BackendBase",
    "GroupBase",
    "TorchDispatchMode",
    "WeakStorage",
    "WorkBase",
    "arguments_of",
    "is_empty",
    "is_view",
    "living",
    "name_of",
    "reads_values",
    "tensors_in",
    "tree_leaves",
    "tree_map",
    "written_by",
]
