"""The random generators of the process: torch's, that of its current CUDA device, Python's and numpy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Generators:
    """Their states; None for a generator that the process does not have."""

    torch: Tensor
    cuda: Tensor | None
    python: Any
    numpy: Any

    @staticmethod
    def now() -> Generators:
        """The states now."""
        cuda = torch.cuda.get_rng_state() if _has_cuda() else None
        numpy = sys.modules.get("numpy")
        return Generators(
            torch.get_rng_state(), cuda, random.getstate(), None if numpy is None else numpy.random.get_state()
        )

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def _has_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


@contextmanager
def generators_as_before() -> Iterator[None]:
    """The generators are at the end as they were."""
    states = Generators.now()
    try:
        yield
    finally:
        states.restore()
