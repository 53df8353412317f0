"""How a receiver makes a payload of an announced message: its buffers, and what its caller sees of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from pipegrid.transport.errors import P2PUsageError
from pipegrid.transport.message import Signature, Tree, leaves
from pipegrid.transport.payload import dtype_of, is_single_shape, unflatten
from pipegrid.transport.stats import Tally


@frozen
class Wish:
    """What the caller of a receive expects: one tensor, or a list with a shape or None for each place."""

    single: bool
    shapes: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, shapes: Any) -> Wish:
        """A wish from the ``shapes`` of a receive.

        Raises:
            P2PUsageError: neither a shape nor a list or tuple of shapes and None.
        """
        if is_single_shape(shapes):
            return cls(True, (tuple(map(operator.index, shapes)),))
        if isinstance(shapes, (list, tuple)) and all(shape is None or is_single_shape(shape) for shape in shapes):
            return cls(False, tuple(None if shape is None else tuple(map(operator.index, shape)) for shape in shapes))
        raise P2PUsageError(
            f"the shapes of a receive are {shapes!r}; give one shape (a sequence of sizes of at least 0) or a list "
            f"of shapes, with None where no tensor comes"
        )

    def __str__(self) -> str:
        parts = ["None" if shape is None else str(list(shape)) for shape in self.shapes]
        return parts[0] if self.single else "[" + ", ".join(parts) + "]"


class Recipe:
    """Buffers for messages of one signature, and payloads from them.

    Attributes:
        free: buffers that were given back, for the next messages.
    """

    def __init__(self, signature: Signature, tree: Tree, device: torch.device) -> None:
        self.signature = signature
        self.free: list[Sequence[Tensor]] = []
        self._tree = tree
        self._device = device
        self._leaves = [
            (spec.shape, dtype_of(spec), wanted and (dtype_of(spec).is_floating_point or dtype_of(spec).is_complex))
            for spec, wanted in zip(signature.tensors, signature.gradients, strict=True)
        ]
        # Allocating like another tensor is several times faster than from a shape; it needs no memory for that.
        self._templates: list[Tensor] = []

    def buffers(self, tally: Tally) -> list[Tensor]:
        """Buffers for one message; ``tally`` counts the new ones."""
        if self.free:
            return [over_old_memory(tensor) for tensor in self.free.pop()]
        tally.allocations += 1
        return self.new()

    def new(self) -> list[Tensor]:
        """New buffers for one message: ordinary ones, since a later message that wants gradients may get them."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.new()
        if self._templates:
            return [torch.empty_like(template) for template in self._templates]
        return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype, _ in self._leaves]

    def keep(self) -> None:
        """Prepare for many messages of the signature."""
        self._templates = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype, _ in self._leaves]
        for template in self._templates:
            template.untyped_storage().resize_(0)

    def payload(self, tensors: Sequence[Tensor]) -> Any:
        """The payload with those tensors: the ones that can have gradients require them, as the sender marked."""
        if self._tree == 0:  # most are one plain tensor
            return tensors[0].requires_grad_() if self._leaves[0][2] else tensors[0]
        for tensor, (_, _, requires_grad) in zip(tensors, self._leaves, strict=True):
            if requires_grad:
                tensor.requires_grad_()
        return unflatten(self._tree, tensors)


def over_old_memory(tensor: Tensor) -> Tensor:
    """A new tensor over one that was given back: without the gradients and the graph of the last message."""
    return tensor.detach()


def cook(
    signature: Signature,
    wish: Wish | None,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    exact: bool = True,
) -> Recipe | None:
    """The recipe for an announced message as its receiver wishes to see it; None where it is not what it expects.

    One expected shape gives one tensor, a list of them a list, whether the sender sent a tensor, a list or a tuple.

    Args:
        signature: what was announced.
        wish: what the caller expects; None takes it as it is.
        device: where buffers live.
        dtype: what its floating-point tensors must be; None allows any.
        exact: whether the wished shapes must be the announced ones, or only as many of them.
    """
    for spec in signature.tensors:
        here = dtype_of(spec)
        if dtype is not None and here.is_floating_point and here is not dtype:
            return None
    if wish is None:
        return Recipe(signature, signature.tree, device)
    if isinstance(signature.tree, tuple) and signature.tree[0] == "dict":
        return None
    places = list(leaves(signature.tree))
    announced = tuple(None if place is None else signature.tensors[place].shape for place in places)
    if announced != wish.shapes if exact else len(announced) != len(wish.shapes):
        return None
    return Recipe(signature, places[0] if wish.single else ("list", tuple(places)), device)
