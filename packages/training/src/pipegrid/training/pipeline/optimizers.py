"""Optimizers that decide by all gradients of a model: on a rank that has those of its own stages alone, an error.

Each rank would decide by its own part, and stages come apart without a word.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipegrid.core.errors import StepArgumentError

_STEPS_OPTIMIZERS = GradScaler._maybe_opt_step.__code__  # noqa: SLF001 (the frame that says who steps an optimizer)


def refuse_what_decides_alone(named: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> Any:
    """Look at each optimizer of parameters in ``named`` as it steps first; returns the handle of the hook.

    The hook raises `StepArgumentError`, before a parameter changes, for `torch.optim.LBFGS`, and for what a
    `torch.amp.GradScaler` steps that looks for overflows on its own rank (`ShardedGradScaler` looks on all of a group).
    """
    seen = weakref.WeakSet[Optimizer]()

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if optimizer in seen:
            return
        own = {id(one) for _, one in named()}
        if not any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
            return
        if isinstance(optimizer, LBFGS):
            raise StepArgumentError(
                "LBFGS makes its step of products over all parameters, and this rank has those of its stages alone. "
                "Take an optimizer that updates each parameter by itself, such as AdamW"
            )
        if _scales_alone():
            raise StepArgumentError(
                "GradScaler leaves an update out where gradients of this rank overflow, and other stages make theirs. "
                "Give LossScaler() as PipelineConfig(grad_scale_func=), and step where its unscale(pipeline.stages) is "
                "true; it looks at all ranks"
            )
        seen.add(optimizer)

    return register_optimizer_step_pre_hook(look)


def _scales_alone() -> bool:
    """Whether a `GradScaler` that tells no other rank of overflows steps the optimizer."""
    frame = sys._getframe(1)  # noqa: SLF001 (as the module traceback)
    while frame is not None and frame.f_code is not _STEPS_OPTIMIZERS:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and type(frame.f_locals["self"]).unscale_ is GradScaler.unscale_
