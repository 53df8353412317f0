"""Memory that all tensors without values share while a function makes a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipegrid.training.stages.torch_compat import extent_of, memory_of


class Scratch:
    """Memory of ``nbytes`` on each device, which all foreign tensors share."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffers: dict[torch.device, Tensor] = {}
        self._memory: set[Any] = set()
        self._touched = 0

    def has(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of the memory."""
        return memory_of(tensor) in self._memory

    def view(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A view with the shape, strides and dtype of ``tensor``."""
        if device not in self._buffers:
            self._buffers[device] = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
            self._memory.add(memory_of(self._buffers[device]))
        whole = self._buffers[device][: extent_of(tensor)].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride())

    def touch(self, written: Iterable[Tensor]) -> None:
        """Note what is written to; until then the memory has no pages."""
        self._touched = max([self._touched, *(extent_of(tensor) for tensor in written if self.has(tensor))])

    def fill(self) -> None:
        """Fill what was written to with NaN, whatever the dtype."""
        for buffer in self._buffers.values():
            buffer[: self._touched].fill_(255)
