"""What the microbatches of a step count, and what that makes of a loss: known before the first backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from pipegrid.gradients.all_reduce import all_reduce
from pipegrid.monitor.collectives import Waiting
from pipegrid.training.pipeline.microbatches import Microbatch

ROWS, LABELS, FOLLOWING, ELEMENTS, FOLLOWING_ELEMENTS, MICROBATCHES = range(6)
NAMES = ("rows", "labels", "following labels", "labels with padding", "following labels with padding", "microbatches")
"""What a loss may be a mean over: the numbers of `Microbatch.counts`."""


def _sums(microbatches: Sequence[Microbatch]) -> list[float]:
    own = [each.counts for each in microbatches]
    return [float(sum(each)) for each in zip(*own, strict=True)] if own else [0.0] * len(NAMES)


@define(eq=False)
class StepCounts:
    """What all microbatches of a step count, on all replicas: one all-reduce, which begins with the step.

    None where the job reads one batch at a time: then each rank has what all count.

    Attributes:
        totals: by rule, float64; sums over the job once it has been waited for.
    """

    totals: Tensor
    _wait: Callable[[], None] | None
    _numbers: list[float] | None = field(default=None, init=False)
    _weights: dict[tuple[int, float], Tensor] = field(factory=dict, init=False)

    @classmethod
    def start(
        cls, microbatches: Sequence[Microbatch], device: torch.device, group: dist.ProcessGroup | None, waiting: Waiting
    ) -> StepCounts:
        """Start to add the counts of ``microbatches``, those whose loss this rank has, to those of the others."""
        totals = torch.tensor(_sums(microbatches), dtype=torch.float64, device=device)
        wait = all_reduce(totals, group)
        return cls(totals, lambda: wait(waiting))

    @classmethod
    def known(cls, microbatches: Sequence[Microbatch], number: int, device: torch.device) -> StepCounts:
        """The counts of a job whose ``number`` microbatches are all ``microbatches`` of the ranks with the loss."""
        *sums, _ = _sums(microbatches)
        return cls(torch.tensor([*sums, float(number)], dtype=torch.float64, device=device), None)

    def wait(self) -> None:
        """Wait for the sums."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()

    def weight(self, rule: int, count: Tensor | float) -> Tensor:
        """What a microbatch of ``count`` weighs; the weights of a step add up to its microbatches."""
        known = None if isinstance(count, Tensor) else self._weights.get((rule, count))
        if known is not None:
            return known
        self.wait()
        total = self.totals[rule]
        weight = torch.where(total > 0, self.totals[MICROBATCHES] / total.clamp(min=1) * count, 1.0)
        if not isinstance(count, Tensor):  # most microbatches of a step count the same
            self._weights[rule, count] = weight
        return weight

    def numbers(self) -> list[float]:
        """`totals` on the host, which waits for them."""
        if self._numbers is None:
            self.wait()
            self._numbers = self.totals.tolist()
        return self._numbers

    def alike(self, counts: Sequence[int], rules: Sequence[int]) -> bool:
        """Whether a microbatch with these ``counts`` weighs the same by all ``rules``; the host waits for totals."""
        if len(set(rules)) < 2:
            return True
        totals = self.numbers()
        first = rules[0]
        return all(counts[rule] * totals[first] == counts[first] * totals[rule] for rule in rules)
