"""What the microbatches of a step count, and what that makes of a loss: known before the first backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from pipegrid.gradients.all_reduce import all_reduce
from pipegrid.monitor import DisagreementError
from pipegrid.monitor.collectives import Waiting
from pipegrid.training.pipeline.microbatches import Microbatch
from pipegrid.transport.streams import has_streams

ROWS, LABELS, FOLLOWING, ELEMENTS, FOLLOWING_ELEMENTS, MICROBATCHES = range(6)
NAMES = ("rows", "labels", "following labels", "labels with padding", "following labels with padding", "microbatches")
"""What a loss may be a mean over: the numbers of `Microbatch.counts`."""
CALLS = ("step", "evaluate", "clip")
"""Methods of a `Pipeline` that begin with an all-reduce over the job, of equally many numbers, with a mark each."""


def marks_of(call: str) -> list[float]:
    """The marks of a call, to be added up over the job."""
    return [float(call == each) for each in CALLS]


def require_one_call(call: str, marks: Sequence[float]) -> None:
    """Raise where ranks have met that are in different calls, such as one more `evaluate` than others.

    Args:
        call: of this rank.
        marks: of all ranks.

    Raises:
        DisagreementError: on every rank that has come.
    """
    others = [f"{each}()" for each, mark in zip(CALLS, marks, strict=True) if mark and each != call]
    if others:
        raise DisagreementError(
            f"this rank is in {call}(), and others of the job are in {' and '.join(others)}: they have called other "
            "methods, or one of them more often. Every rank calls them in one order, and as often as the others"
        )


def _sums(microbatches: Sequence[Microbatch]) -> list[float]:
    own = [each.counts for each in microbatches]
    return [float(sum(each)) for each in zip(*own, strict=True)] if own else [0.0] * len(NAMES)


@define(eq=False)
class StepCounts:
    """What all microbatches of a step count, on all replicas: one all-reduce, which begins with the step.

    None where the job reads one batch at a time: then each rank has what all count.

    Attributes:
        totals: by rule, float64, then `CALLS`; sums over the job once it has been waited for.
    """

    totals: Tensor
    _wait: Callable[[], None] | None
    _call: str = "step"
    _numbers: list[float] | None = field(default=None, init=False)
    _weights: dict[tuple[int, float], Tensor] = field(factory=dict, init=False)

    @classmethod
    def start(
        cls,
        microbatches: Sequence[Microbatch],
        device: torch.device,
        group: dist.ProcessGroup | None,
        waiting: Waiting,
        *,
        call: str = "step",
    ) -> StepCounts:
        """Start to add the counts of ``microbatches``, those whose loss this rank has, to those of the others."""
        totals = torch.tensor([*_sums(microbatches), *marks_of(call)], dtype=torch.float64, device=device)
        wait = all_reduce(totals, group)
        return cls(totals, lambda: wait(waiting), call)

    @classmethod
    def known(cls, microbatches: Sequence[Microbatch], number: int, device: torch.device) -> StepCounts:
        """The counts of a job whose ``number`` microbatches are all ``microbatches`` of the ranks with the loss."""
        *sums, _ = _sums(microbatches)
        return cls(torch.tensor([*sums, float(number), *marks_of("step")], dtype=torch.float64, device=device), None)

    def wait(self) -> None:
        """Wait for the sums; the host reads them where they are on it.

        Raises:
            DisagreementError: as `require_one_call`.
        """
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()
            if not has_streams(self.totals.device):
                self.numbers()

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
        """`totals` on the host, which waits for them; raises as `wait`."""
        if self._numbers is None:
            self.wait()
        if self._numbers is None:
            numbers = self.totals.tolist()
            require_one_call(self._call, numbers[len(NAMES) :])
            self._numbers = numbers
        return self._numbers

    def alike(self, counts: Sequence[int], rules: Sequence[int]) -> bool:
        """Whether a microbatch with these ``counts`` weighs the same by all ``rules``; the host waits for totals."""
        if len(set(rules)) < 2:
            return True
        totals = self.numbers()
        first = rules[0]
        return all(counts[rule] * totals[first] == counts[first] * totals[rule] for rule in rules)
