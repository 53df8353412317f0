"""The tensors that an autograd node has saved, and their lifetime: the parts that torch does not document.

A node shows what it saved as attributes ``_raw_saved_<name>``, each a ``SavedTensor`` (or a tuple of them), whose
``register_hooks`` replaces the tensor by what the pack hook returns: that frees it (torch's notes, "Hooks for saved
tensors"). Not documented are its ``data`` and ``unpack_hook``, and the bookkeeping of non-reentrant checkpointing,
which hands each recomputed tensor out once. Tests pin both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils import checkpoint


def release_saved(node: Node) -> None:
    """Free what ``node`` has saved. It must not run again.

    Tensors of a saved-tensor hook (checkpointed, or offloaded) are left to that hook.
    """
    for saved in _saved(node):
        tensor = saved.data
        # A number (``x * 2`` saves its 2) is nothing to free, and cannot be packed under a dispatch mode.
        if saved.unpack_hook is None and tensor is not None and tensor.dim() > 0:
            saved.register_hooks(_nothing, _freed)


def keep_recomputed(node: Node) -> None:
    """Let ``node`` run twice in one `torch.utils.checkpoint.GraphExecGroup`, though its region is checkpointed.

    A checkpointed region is recomputed once for a group, and each of its tensors forgotten as soon as one node has
    read it. For this node they are remembered until the graph goes.
    """
    for saved in _saved(node):
        if isinstance(saved.data, checkpoint._Holder):  # noqa: SLF001
            saved.data.handles = _Handles(saved.data.handles)


def saved_tensors(node: Node) -> Iterator[tuple[Any, torch.Tensor]]:
    """The pairs (``SavedTensor``, tensor) that ``node`` has saved without a saved-tensor hook.

    Raises:
        RuntimeError: a tensor was modified in place since.
    """
    for name in _names(type(node)):
        raw = getattr(node, name)
        each = raw if isinstance(raw, tuple) else (raw,)
        if any(saved.unpack_hook is None and saved.data is not None for saved in each):
            getattr(node, _CHECKED.get(name, name.replace("_raw_", "_", 1)))
        for saved in each:
            if saved.unpack_hook is None and saved.data is not None:
                yield saved, saved.data


# The name by which a Python function's tensors are read and checked; others lose their ``_raw``.
_CHECKED = {"_raw_saved_tensors": "saved_tensors"}


class _Handles(dict[Any, Any]):
    """The handles by which a recomputed tensor is found: never given up."""

    def __setitem__(self, group: Any, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(group, handle)


def _saved(node: Node) -> Iterator[Any]:
    for name in _names(type(node)):
        saved = getattr(node, name)
        yield from saved if isinstance(saved, tuple) else (saved,)


@lru_cache(maxsize=1024)
def _names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _nothing(_: Any) -> None:
    return None


def _freed(_: None) -> None:
    raise RuntimeError("this tensor was freed after the input-gradient half of its backward; the node ran again")
