"""What a comparison of stages with the whole model has found."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

from pipegrid.training.errors import CutError, few
from pipegrid.training.stages.proof import CutProof

_SHOWN = 4  # values per error


@frozen
class Compared:
    """One value of the stages, compared with that of the whole model.

    Attributes:
        name: in words, such as ``gradient of lm_head.weight``.
        stages: that hold it.
        error: the norm of the difference, over the norm of the whole model's value.
        norm: of the whole model's value.
    """

    name: str
    stages: tuple[int, ...]
    error: float
    norm: float

    def __str__(self) -> str:
        """One line."""
        where = " and ".join(map(str, self.stages))
        return f"{self.name} on stage {where}: error {self.error:.2g} of the norm {self.norm:.3g}"


@frozen
class StageComparison:
    """The stages of a cut and the whole model, one microbatch in one process.

    Attributes:
        proof: of the cut, for the same call.
        loss: of the whole model.
        loss_of_stages: what the last stage returned.
        gradients: of each parameter of the whole model that is trained.
        buffers: of each stage, those that its ``state_dict`` has.
        limit: the largest error that rounding explains: the square root of the epsilon of the parameters' dtype.
    """

    proof: CutProof
    loss: float
    loss_of_stages: float
    gradients: tuple[Compared, ...]
    buffers: tuple[Compared, ...]
    limit: float

    @property
    def different(self) -> tuple[Compared, ...]:
        """The values that differ, the largest errors first."""
        found = [one for one in (*self.gradients, *self.buffers) if not one.error <= self.limit]
        return tuple(sorted(found, key=lambda one: -math.inf if math.isnan(one.error) else -one.error))

    @property
    def holds(self) -> bool:
        """Whether the stages compute what the whole model computes."""
        return not self.different and self._loss_error <= self.limit

    @property
    def _loss_error(self) -> float:
        return abs(self.loss_of_stages - self.loss) / max(abs(self.loss), self.limit)

    def require(self) -> None:
        """Raise where stages and model differ.

        Raises:
            CutError: names values of the model, their stages and errors.
        """
        if self.holds:
            return
        found = self.different
        lines = few([str(one) for one in found], _SHOWN)
        count = len(self.gradients) + len(self.buffers)
        raise CutError(
            f"the stages of layout {self.proof.layout} do not compute what the model computes: {self._losses()}; "
            f"{len(found)} of {count} gradients and buffers differ by more than {self.limit:.1g} of their norm"
            + "".join(f"\n  {line}" for line in lines)
        )

    def __str__(self) -> str:
        """The proof, then the loss, and a line for the gradients of each stage."""
        stages = sorted({stage for one in self.gradients for stage in one.stages})
        lines = [str(self.proof), self._losses()]
        lines += [self._stage(stage, [one for one in self.gradients if stage in one.stages]) for stage in stages]
        lines.append(f"{'equal' if self.holds else 'different'} (limit {self.limit:.1g})")
        return "\n".join(lines + [f"  {one}" for one in self.different])

    def _losses(self) -> str:
        return f"loss {self.loss:.8g}, of the stages {self.loss_of_stages:.8g}"

    def _stage(self, number: int, gradients: Sequence[Compared]) -> str:
        worst = max(gradients, key=lambda one: one.error)
        which = f" ({worst.name})" if worst.error else ""
        return f"stage {number}: {len(gradients)} gradients, the largest error {worst.error:.2g}{which}"
