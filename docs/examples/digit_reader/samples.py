"""Which samples a step works on, and a rank's share of them, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from attrs import define, frozen
from torch import Tensor

from digit_reader import vocabulary
from digit_reader.strips import Pixels, Scans, Split, draw_number, draw_signal, draw_strip


@frozen
class Samples:
    """The strips of one split, numbered without end; every rank that asks for one gets the same."""

    split: Split
    seed: int
    scans: Scans | None = None
    texts: Tensor | None = None
    """What the language model is given for sample 0, 1, ..., where that is not the right words."""

    def microbatches(self, first: int, *, batch: int, microbatches: int) -> Iterator[range]:
        """The samples of each microbatch of the batch from sample ``first``, in order."""
        size = batch // microbatches
        return iter(range(first + index * size, first + (index + 1) * size) for index in range(microbatches))

    def numbers(self, indices: range) -> list[int]:
        """What the strips show."""
        return [draw_number(self.split, seed=self.seed, index=index) for index in indices]

    def strips(self, indices: range) -> Tensor:
        """Pixels ``[samples, HEIGHT, WIDTH]``; needs the scans."""
        return self._drawn(draw_strip, indices)

    def signals(self, indices: range) -> Tensor:
        """Signals ``[samples, SIGNAL]``; needs the scans."""
        return self._drawn(draw_signal, indices)

    def _drawn(self, draw: Callable[..., Pixels], indices: range) -> Tensor:
        if self.scans is None:
            raise ValueError("this rank has no scans: only ranks of an encoder draw what it reads")
        return torch.stack([torch.from_numpy(draw(self.scans, seed=self.seed, index=index)) for index in indices])

    def inputs(self, indices: range) -> Tensor:
        """Token ids ``[samples, TEXT_LENGTH]`` that the language model is given."""
        if self.texts is not None:
            return self.texts[indices.start : indices.stop]
        return torch.tensor([vocabulary.inputs_of(number) for number in self.numbers(indices)])

    def targets(self, indices: range) -> Tensor:
        """Token ids ``[samples, TEXT_LENGTH]`` that it should write."""
        return torch.tensor([vocabulary.targets_of(number) for number in self.numbers(indices)])


@define
class Position:
    """The data position: the first sample that no step has seen yet. The same on every rank, whatever its grids.

    Which samples of a batch a rank reads follows from their numbers and its replica, so a run that goes on in other
    grids reads the same samples in the same order.
    """

    seed: int
    next: int = 0

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint stores."""
        return {"seed": self.seed, "next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a checkpoint was saved.

        Raises:
            ValueError: its samples were those of another seed.
        """
        if state["seed"] != self.seed:
            raise ValueError(f"--seed {self.seed}: the checkpoint's samples are of seed {state['seed']}; use that")
        self.next = state["next"]
