"""What a graph has saved, copied to the host and back, so that the device has its memory in between.

`Offload.out` replaces every saved tensor by a handle (``register_hooks`` of ``_raw_saved_<name>``; torch's notes,
"Hooks for saved tensors") and copies the storage that it lies in, once for all its views. The copies run on a stream of
their own, after what the device has computed so far; `Offload.free` makes later work wait for them and drops the
storages, `Offload.back` starts copies into new ones, and `Offload.wait` makes later work wait for those. On a device
without streams all of it is done at once. Gradients are bit for bit those of a graph that stayed.

Left where they are: parameters, buffers and the inputs of the graph, which others hold; scalars; tensors of another
saved-tensor hook (checkpointed ones, say); and tensors of a subclass of `torch.Tensor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from attrs import define
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipegrid.autograd.saved_tensors import saved_tensors
from pipegrid.schedules.runtime.stages.stage import graph_nodes
from pipegrid.transport import streams


@define(eq=False)
class _Block:
    """The bytes of one storage, on the device or on the host."""

    device: Tensor | None
    host: Tensor


class _View(NamedTuple):
    """A saved tensor: how it lies in its block."""

    block: _Block
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Offload:
    """The saved tensors of one graph, from where its backward ``starts``; ``resident`` ones, and leaves, stay there.

    ``copiers`` are the streams of the copies out and back; None on a device without streams.
    """

    def __init__(
        self,
        starts: Iterable[GradientEdge],
        resident: Iterable[Tensor],
        copiers: tuple[torch.Stream | None, torch.Stream | None] = (None, None),
    ) -> None:
        self._starts, self._copiers = [edge.node for edge in starts], copiers
        self._device: torch.device | None = None
        self._resident = {_key(tensor) for tensor in resident if _is_plain(tensor)}
        self._blocks: dict[int, _Block] = {}
        self._events: Sequence[Any] = ()

    def out(self) -> None:
        """Start to copy to the host; raises, as torch's backward would, where a saved tensor was modified in place."""
        nodes = graph_nodes(self._starts)
        leaves = [getattr(node, "variable", None) for node in nodes]
        self._resident.update(_key(leaf) for leaf in leaves if leaf is not None and _is_plain(leaf))
        for node in nodes:
            for saved, tensor in saved_tensors(node):
                if _is_plain(tensor) and tensor.dim() > 0 and tensor.numel() and _key(tensor) not in self._resident:
                    saved.register_hooks(self._packed, _unpacked)
        self._copy(out=True)

    def _packed(self, tensor: Tensor) -> _View:
        self._device = tensor.device
        block = self._blocks.get(_key(tensor))
        if block is None:
            held = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            block = self._blocks[_key(tensor)] = _Block(held, streams.pinned_like(held))
        return _View(block, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def free(self) -> None:
        """Let the device's memory go, once the copies are on the host."""
        self.wait()
        for block in self._blocks.values():
            block.device = None

    def back(self) -> None:
        """Start to copy back."""
        for block in self._blocks.values():
            block.device = torch.empty(block.host.shape, dtype=block.host.dtype, device=self._device)
        self._copy(out=False)

    def wait(self) -> None:
        """Order the current stream after the copies."""
        if self._device is not None:
            streams.follow(self._events, self._device)
        self._events = ()

    def _copy(self, *, out: bool) -> None:
        device = self._device
        if device is None:
            return
        copier = self._copiers[0 if out else 1]
        computed, made_on = streams.mark(device), streams.current_stream(device)
        with streams.working_on(copier):
            streams.follow(computed, device)
            for block in self._blocks.values():
                assert block.device is not None
                source, target = (block.device, block.host) if out else (block.host, block.device)
                target.copy_(source, non_blocking=copier is not None)
                streams.used_here([block.device], made_on)
            self._events = streams.mark(device)


def _unpacked(view: _View) -> Tensor:
    held = view.block.device
    if held is None:
        raise RuntimeError("this tensor is on the host; its backward ran before its RELOAD")
    tensor = torch.empty(0, dtype=view.dtype, device=held.device)
    return tensor.set_(held.untyped_storage(), view.offset, view.size, view.stride)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than a view of a storage."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_conj()


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
