"""The slice of a sequence, as a stage uses it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from torch import Tensor


class SequenceSlice(Protocol):
    """A slice of a microbatch, as a runtime hands it to a stage; `pipegrid.schedules.Slice` is one."""

    def update(self, keys: Tensor, values: Tensor, layer: Hashable, *, dim: int = -2) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer up to the end of this slice, joined along the tokens' axis ``dim``."""
        ...

    def extend(self, key: Hashable, tensor: Tensor, *, dim: int = -2) -> Tensor:
        """``tensor`` behind all that earlier slices have kept under ``key``; and keep it for the later ones."""
        ...

    def past(self, key: Hashable) -> tuple[Tensor, ...]:
        """The tensors that earlier slices have kept under ``key``, in the order of the sequence."""
        ...

    def keep(self, key: Hashable, tensor: Tensor) -> None:
        """Keep ``tensor`` for the later slices under ``key``."""
        ...
