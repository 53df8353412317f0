"""What every runner of a row runs: the same modules, microbatches and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from attrs import frozen
from torch import Tensor, nn

from pipegrid.plans.plan.plan import Plan
from runtime_parts.rows import Row

Loss = Callable[[Tensor, Tensor], Tensor]
# Sums over microbatches come in another order from another runtime; in float32 that is worth a few last digits.
SAME = 1e-4


@frozen(slots=False)
class Job:
    """One row on one rank.

    Attributes:
        row: the schedule.
        plan: lowered.
        rank: this rank, which has the position of that number.
        modules: this rank's stages by number.
        inputs: per microbatch, what stage 0 reads (used where it is).
        targets: per microbatch, what the loss of the last stage reads.
        loss: of an output and a target.
        shape: of every activation.
        device: of all tensors.
    """

    row: Row
    plan: Plan
    rank: int
    modules: Mapping[int, nn.Module]
    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    loss: Loss
    shape: tuple[int, ...]
    device: torch.device

    @property
    def last(self) -> int:
        """The stage with the loss."""
        return self.plan.num_stages - 1

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(positions[0] for positions in self.plan.placement)

    @cached_property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All parameters of this rank, in order of stages."""
        return tuple(parameter for stage in sorted(self.modules) for parameter in self.modules[stage].parameters())

    def forget_gradients(self) -> None:
        """What the optimizer's ``zero_grad`` does."""
        for parameter in self.parameters:
            parameter.grad = None

    def gradients(self) -> list[Tensor | None]:
        """A copy of what the last step made."""
        return [None if p.grad is None else p.grad.clone() for p in self.parameters]


def difference(ours: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> float:
    """The largest relative difference of two lists of gradients, by norm; infinite where one lacks a gradient."""
    worst = 0.0
    for mine, other in zip(ours, others, strict=True):
        if mine is None or other is None:
            worst = max(worst, 0.0 if mine is other else float("inf"))
            continue
        scale = max(float(torch.linalg.vector_norm(mine)), 1e-12)
        worst = max(worst, float(torch.linalg.vector_norm(mine - other)) / scale)
    return worst
