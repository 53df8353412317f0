"""Loss scaling over a whole job: every rank scales alike, and all ranks step or none does."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field

from pipegrid.core.fields import Index, checked, checked_fields
from pipegrid.gradients import foreach
from pipegrid.gradients.all_reduce import reduce_few
from pipegrid.gradients.dtensors import local_of
from pipegrid.gradients.errors import GradientError
from pipegrid.gradients.groups import device_of
from pipegrid.gradients.loss_scale import LossScale, Positive, from_state, to_state, updated
from pipegrid.gradients.main_grad import Modules, accumulated, parameters_of
from pipegrid.monitor.collectives import Waiting


def scale_loss(state: LossScale, loss: torch.Tensor) -> torch.Tensor:
    """``loss`` times the scale, in float32 where it is narrower: the first gradient is the scale in that type.

    Examples:
        >>> import torch
        >>> scale_loss(LossScale(scale=1024.0), torch.tensor(0.5))
        tensor(512.)
    """
    wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
    return wide * state.scale


@torch.no_grad()
def unscale_gradients_(
    modules: Modules, scale: float, *, job_group: dist.ProcessGroup | None = None, deadline: float | None = None
) -> bool:
    """Divide this rank's gradients by ``scale``; whether any gradient of the job is infinite or NaN.

    Every rank of the job calls it, once per step: after the reduction, so that sums that overflowed are seen, and
    before clipping. One all-reduce of one number over ``job_group`` (default: the default process group), which the
    host reads; ``deadline``: seconds that it waits.

    Raises:
        GradientError: a scale that is not positive and finite.
        CollectiveFailedError: past the deadline.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> stage = torch.nn.Linear(4, 1, bias=False)
        >>> (1024.0 * stage(torch.ones(1, 4))).sum().backward()
        >>> unscale_gradients_(stage, 1024.0), stage.weight.grad
        (False, tensor([[1., 1., 1., 1.]]))
    """
    scale = checked(scale, Positive, "scale", GradientError)
    gradients = [local_of(g) for _, parameter in parameters_of(modules) if (g := accumulated(parameter)) is not None]
    found = torch.zeros((), dtype=torch.float32, device=device_of(modules, job_group))
    foreach.scale_(gradients, 1.0 / scale)
    # Checked after dividing: with a scale below 1, a finite gradient may overflow there.
    if filled := [gradient for gradient in gradients if gradient.numel()]:
        found += (~foreach.norms(filled, math.inf).isfinite()).any()
    waiting = Waiting(deadline, what="the look for overflows in unscale_gradients_()")
    reduce_few(found, job_group, dist.ReduceOp.MAX)(waiting)
    return bool(found.item())


@define(field_transformer=checked_fields(GradientError))
class LossScaler:
    """Holds the loss scale from step to step. The same on every rank, because every rank learns of every overflow.

    Give it to `PipelineConfig` as ``grad_scale_func``; after the step::

        if scaler.unscale(modules):      # on every rank the same answer; the gradients are unscaled now
            clip_grad_norm_(modules, collections, 1.0)
            optimizer.step()
        optimizer.zero_grad()

    Attributes:
        state: the scale, how it moves, and its history.
        job_group: all ranks of the job; default: the default process group.
        skipped: steps that all ranks skipped, since a gradient overflowed.

    Examples:
        >>> import torch
        >>> scaler = LossScaler(LossScale(scale=1024.0))
        >>> scaler(torch.tensor(0.5))
        tensor(512.)
    """

    state: LossScale = field(factory=LossScale)
    job_group: dist.ProcessGroup | None = None
    skipped: Index = 0

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """The scaled loss: ``grad_scale_func``."""
        return scale_loss(self.state, loss)

    def unscale(self, modules: Modules) -> bool:
        """Unscale the gradients, and move the scale: True where all of the job are finite, else no rank may step."""
        overflow = unscale_gradients_(modules, self.state.scale, job_group=self.job_group)
        self.state = updated(self.state, overflow=overflow)
        self.skipped += overflow
        return not overflow

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; the same on every rank."""
        return {**to_state(self.state), "skipped": self.skipped}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint, with the settings of this scaler.

        Raises:
            GradientError: values that no checkpoint of a scaler has.
        """
        state = from_state(self.state, saved)
        self.skipped = checked(saved.get("skipped", 0), Index, "skipped", GradientError)
        self.state = state
