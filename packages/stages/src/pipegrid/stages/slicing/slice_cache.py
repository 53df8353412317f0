"""The cache that a Hugging Face model gets on a slice of a sequence."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class SequenceSlice(Protocol):
    """A slice of a microbatch, as a runtime hands it to a stage; `pipegrid.schedules.Slice` is one."""

    def update(self, keys: Tensor, values: Tensor, layer: Hashable, *, dim: int = -2) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer up to the end of this slice, joined along the tokens' axis ``dim``."""

    def extend(self, key: Hashable, tensor: Tensor, *, dim: int = -2) -> Tensor:
        """``tensor`` behind all that earlier slices have kept under ``key``; and keep it for the later ones."""

    def past(self, key: Hashable) -> tuple[Tensor, ...]:
        """The tensors that earlier slices have kept under ``key``, in the order of the sequence."""

    def keep(self, key: Hashable, tensor: Tensor) -> None:
        """Keep ``tensor`` for the later slices under ``key``."""


class SliceCache(Cache):
    """Keys and values of a microbatch's slices, with an entry for each layer of the model."""

    def __init__(self, part: SequenceSlice, num_layers: int, past: int) -> None:
        self.read: set[int] = set()  # the numbers of the layers that have read their entry
        super().__init__(layers=[_Layer(part, number, past, self.read) for number in range(num_layers)])


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]  # of transformers
    """The keys and values of one layer, ``past`` tokens before the slice.

    Also that of a sliding window: it has all tokens, and the model's mask hides those outside of the window.
    """

    def __init__(self, part: SequenceSlice, number: int, past: int, read: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._part, self._number, self._past, self._read = part, number, past, read

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values up to the end of the slice, ``[batch, heads, tokens, head size]``."""
        self._read.add(self._number)
        return self._part.update(key_states, value_states, self._number)

    def get_seq_length(self, *_: Any) -> int:
        """Tokens of the earlier slices: also after `update`, since a forward asks for it at its start."""
        return self._past
