"""The trap of reentrant checkpointing: a region without an input that requires grad trains nothing, in silence.

``checkpoint(..., use_reentrant=True)`` runs its region without grad and makes one node of it, whose inputs are the
tensors that are passed in. Where none of them requires grad there is no node: parameters inside get no gradient. In a
pipeline that is a first stage whose embedding is frozen, or data that comes as embeddings.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointFunction

from pipegrid.autograd import compiled_modules
from pipegrid.schedules.errors import StageOutputError

_FORWARD = CheckpointFunction.forward.__code__


@contextmanager
def reentrant_trap(number: int, stage: Any) -> Iterator[list[str]]:
    """Raise for a module with parameters to train inside such a region, in the forwards of this thread.

    Not where modules are compiled: they would be compiled anew without the hook that looks.

    Returns:
        a list that gets the name of a trainable parameter when the first module with one runs.

    Raises:
        StageOutputError: names the module's class and a parameter.
    """
    if compiled_modules(getattr(stage, "model", None)):
        yield []
        return
    thread = threading.get_ident()
    ran: list[str] = []

    def look(module: torch.nn.Module, args: Any) -> None:
        del args
        if (ran and torch.is_grad_enabled()) or threading.get_ident() != thread:
            return
        name = next((name for name, own in module.named_parameters(recurse=False) if own.requires_grad), None)
        if name is None:
            return
        ran.append(f"{type(module).__name__}.{name}")
        region = None if torch.is_grad_enabled() else _region(sys._getframe())  # noqa: SLF001 -- documented, for this
        if region is not None and not any(isinstance(one, torch.Tensor) and one.requires_grad for one in region):
            raise StageOutputError(
                f"stage {number}: {type(module).__name__} (its parameter {name!r} requires grad) is checkpointed with "
                "use_reentrant=True, and no input of the region requires grad: its parameters would get no gradient. "
                "Use use_reentrant=False"
            )

    handle = register_module_forward_pre_hook(look)
    try:
        yield ran
    finally:
        handle.remove()


def _region(frame: FrameType | None) -> tuple[Any, ...] | None:
    """The arguments of the innermost reentrant checkpoint that runs; None outside of one."""
    while frame is not None:
        if frame.f_code is _FORWARD:
            arguments: tuple[Any, ...] = frame.f_locals["args"]
            return arguments
        frame = frame.f_back
    return None
