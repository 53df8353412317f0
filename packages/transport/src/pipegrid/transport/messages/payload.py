"""Payloads to tensors and back: flatten, check what can be sent, allocate what is received."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.parameter import is_lazy

from pipegrid.core.fields import index_of
from pipegrid.core.lanes import Tally
from pipegrid.transport.errors import P2PUsageError
from pipegrid.transport.messages import trees
from pipegrid.transport.messages.message import Signature, TensorSpec
from pipegrid.transport.messages.trees import Tree, places, unflatten
from pipegrid.transport.streams import follow

# Backends send these under their own dtype; the others travel as bytes.
_WIRE_DTYPES = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip
_DTYPE_NAMES = {one: str(one).removeprefix("torch.") for one in vars(torch).values() if isinstance(one, torch.dtype)}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}

SMALL_BYTES = 64 * 1024  # up to here, allocating a buffer costs more than moving the message


def flatten(payload: Any) -> tuple[list[Tensor], Tree]:
    """The tensors of ``payload`` in order, and the tree of their places.

    Raises P2PUsageError for anything but tensors, None, lists, tuples and dicts with string or integer keys; for
    subclasses of these, such as a named tuple, which the receiver could not rebuild; and for more than 100 levels.
    """
    if isinstance(payload, Tensor):
        return [payload], 0
    tensors, tree = trees.flatten(payload)
    for one in tensors:
        if not isinstance(one, Tensor):
            keys = f" with keys {list(one)!r:.80}" if type(one) is dict else ""
            raise P2PUsageError(
                f"a payload contains a {type(one).__name__}{keys}; it must consist of tensors, None, and lists, tuples "
                "and dicts (not subclasses, keys strings or integers) of them"
            )
    return tensors, tree


def signature_of(tensors: Sequence[Tensor], tree: Tree, note: str = "") -> Signature:
    """The signature of a flattened payload."""
    specs = (TensorSpec(_DTYPE_NAMES[one.dtype], one.shape, one.requires_grad) for one in tensors)
    return Signature(tree, specs, note)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The dtype of a tensor spec."""
    return _DTYPES[spec.dtype]


def check_sendable(tensor: Tensor, *, device: torch.device, dtype: torch.dtype | None, lane: object) -> None:
    """Raise P2PUsageError unless memory is values, in order, on ``device``; floats of ``dtype``, None allows any."""
    if tensor.device != device:
        raise P2PUsageError(f"lane {lane} moves tensors of device {device}, got one of {tensor.device}")
    if is_lazy(tensor):
        raise P2PUsageError(f"lane {lane} got a parameter without a shape; run its module once before sending it")
    if hasattr(tensor, "to_local"):
        raise P2PUsageError(f"lane {lane} got a DTensor, of which each rank has a part; send its to_local()")
    if tensor.is_quantized:
        raise P2PUsageError(f"lane {lane} got a quantized tensor, whose scale does not travel; send its int_repr()")
    if tensor.is_conj() or tensor.is_neg():
        kind = "conj" if tensor.is_conj() else "neg"
        raise P2PUsageError(
            f"lane {lane} got a view whose memory differs from its values; send tensor.resolve_{kind}(), a copy"
        )
    dense = tensor.layout is torch.strided and not tensor.is_nested
    if not dense or not tensor.is_contiguous():
        remedy = "send tensor.contiguous(), a copy" if dense else f"it is nested or {tensor.layout}; send a dense copy"
        raise P2PUsageError(f"lane {lane} got a tensor that is not contiguous; {remedy}")
    if not _has_memory(tensor):
        raise P2PUsageError(
            f"lane {lane} got a tensor of shape {list(tensor.shape)} without memory: it was freed, or is a fake tensor"
        )
    if dtype is not None and tensor.dtype is not dtype and tensor.dtype.is_floating_point:
        raise P2PUsageError(f"lane {lane} got a tensor of {tensor.dtype}, but pipeline_dtype is {dtype}")


def _has_memory(tensor: Tensor) -> bool:
    """Whether the storage is real (not a fake tensor's) and holds all elements."""
    storage = tensor.untyped_storage()
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize if tensor.numel() else 0
    return storage.device == tensor.device and storage.nbytes() >= needed


def carried(tensors: Sequence[Tensor], nothing: Tensor) -> Sequence[Tensor]:
    """The tensors that travel for a message: those with elements, uncommon dtypes as bytes.

    Where there are none, ``nothing``, one byte: it keeps the place in the order, and proves that the peer is alive.
    """
    if len(tensors) == 1 and tensors[0].numel() and tensors[0].dtype in _WIRE_DTYPES:
        return tensors if not tensors[0].requires_grad else [tensors[0].detach()]
    wire = [_as_wire(tensor) for tensor in tensors if tensor.numel()]
    return wire or [nothing]


def _as_wire(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()  # a transfer is no part of the graph
    if tensor.dtype in _WIRE_DTYPES:
        return tensor
    # One element may have any stride, which a reshape keeps and a view as bytes refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def is_single_shape(x: Any) -> bool:
    """Whether ``x`` is one shape: a `torch.Size`, a tuple of integers (``()`` is a scalar's), or a list of them.

    An empty list is an empty list of shapes.
    """
    if isinstance(x, torch.Size):
        return True
    if not isinstance(x, (tuple, list)) or (isinstance(x, list) and not x):
        return False
    return all((index := index_of(size)) is not None and index >= 0 for size in x)


@frozen
class ExpectedShape:
    """The shapes that the caller of a receive expects: of one tensor, or a list with None where no tensor comes."""

    single: bool
    shapes: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, shapes: Any) -> ExpectedShape:
        """The expectation of the ``shapes`` of a receive."""
        if is_single_shape(shapes):
            return cls(True, (tuple(map(operator.index, shapes)),))
        if isinstance(shapes, (list, tuple)) and all(shape is None or is_single_shape(shape) for shape in shapes):
            return cls(False, tuple(None if shape is None else tuple(map(operator.index, shape)) for shape in shapes))
        raise P2PUsageError(
            f"the shapes of a receive are {shapes!r}; they must be one shape, or a list of shapes (None for no tensor)"
        )

    def __str__(self) -> str:
        parts = ["None" if shape is None else str(list(shape)) for shape in self.shapes]
        return parts[0] if self.single else "[" + ", ".join(parts) + "]"


@frozen(eq=False)
class PlainMessage:
    """A message of one tensor that travels as it is."""

    signature: Signature
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    nbytes: int  # its size

    def fits(self, payload: Any) -> bool:
        """Whether a payload is this message, and needs no other check."""
        try:
            return (
                type(payload) is Tensor
                and payload.shape == self.shape
                and payload.dtype is self.dtype
                and payload.device == self.device
                and payload.is_contiguous()
                and not payload.is_neg()
                and payload.untyped_storage().nbytes() >= self.nbytes
            )
        except RuntimeError:  # a nested or a sparse tensor has no such properties
            return False


def plain_message(signature: Signature | None, dtype: torch.dtype | None, device: torch.device) -> PlainMessage | None:
    """The message of a signature, if it is plain, and of the ``dtype`` that floating-point tensors must have."""
    if signature is None or signature.tree != 0:
        return None
    (one,) = signature.tensors
    own, shape = dtype_of(one), torch.Size(one.shape)
    fits = dtype is None or own is dtype or not own.is_floating_point
    if not fits or own not in _WIRE_DTYPES or not shape.numel():
        return None
    return PlainMessage(signature, shape, own, device, shape.numel() * own.itemsize)


class ReceiveBuffers:
    """Buffers on ``device`` for messages of one signature, of ``nbytes`` each, and payloads over them."""

    def __init__(self, signature: Signature, tree: Tree, device: torch.device, tally: Tally) -> None:
        self.signature, self._tree, self.device, self._tally = signature, tree, device, tally
        self._leaves = [
            (spec.shape, dtype_of(spec), wanted and (dtype_of(spec).is_floating_point or dtype_of(spec).is_complex))
            for spec, wanted in zip(signature.tensors, signature.gradients, strict=True)
        ]
        self.nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in self._leaves)
        # Buffers that were released, each with the events that its next use must come after.
        self._free: list[tuple[Sequence[Tensor], Sequence[Any]]] = []
        self._spare: list[Tensor] | None = None
        # Allocating like another tensor is several times as fast as from a shape; that one needs no memory.
        self._templates: list[Tensor] = []
        self._prepares = False

    def take(self) -> Sequence[Tensor]:
        """Buffers for one message, for use on the current stream."""
        if self._free:
            tensors, events = self._free.pop()
            if events:
                follow(events, self.device)
            return tensors
        self._tally.allocations += 1
        spare, self._spare = self._spare, None
        return spare or self._new()

    def release(self, tensors: Sequence[Tensor], events: Sequence[Any]) -> None:
        """Take back the buffers of a message; their next use comes after ``events``."""
        self._free.append((without_history(tensors), events))

    def keep(self) -> None:
        """Prepare for many messages of the signature."""
        self._templates = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype, _ in self._leaves]
        for template in self._templates:
            template.untyped_storage().resize_(0)
        self._prepares = 0 < self.nbytes <= SMALL_BYTES

    def _new(self) -> list[Tensor]:
        # Never inference tensors: a later message in the same memory may want gradients.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._new()
        if self._templates:
            return list(map(torch.empty_like, self._templates))
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype, _ in self._leaves]

    def payload(self, tensors: Sequence[Tensor], *, prepare: bool = False) -> Any:
        """The payload over these tensors; ``prepare``: allocate the next small one's buffers, outside its latency."""
        if prepare and self._prepares and self._spare is None and not self._free:
            self._spare = self._new()
        if self._tree == 0:  # most are one plain tensor
            return tensors[0].requires_grad_() if self._leaves[0][2] else tensors[0]
        for tensor, (_, _, requires_grad) in zip(tensors, self._leaves, strict=True):
            if requires_grad:
                tensor.requires_grad_()
        return unflatten(self._tree, tensors)


def without_history(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same memory without the gradients and the graph of the last message."""
    for tensor in tensors:
        if tensor.requires_grad or tensor.grad is not None:
            return [tensor.detach() for tensor in tensors]
    return tensors


def receive_buffers(
    signature: Signature,
    expected: ExpectedShape | None,
    *,
    device: torch.device,
    tally: Tally,
    dtype: torch.dtype | None = None,
    exact: bool = True,
) -> ReceiveBuffers | None:
    """Buffers for an announced message in the form that its receiver expects; None where the two differ.

    One expected shape gives one tensor, a list of them a list, whether a tensor, a list or a tuple was sent; None takes
    the message as it was sent. ``dtype``: that floating-point tensors must have, None allows any. ``exact``: whether
    shapes must agree, or only their number. ``tally`` counts allocations.
    """
    dtypes = [dtype_of(spec) for spec in signature.tensors]
    if dtype is not None and any(one.is_floating_point and one is not dtype for one in dtypes):
        return None
    if expected is None:
        return ReceiveBuffers(signature, signature.tree, device, tally)
    if isinstance(signature.tree, tuple) and signature.tree[0] == "dict":
        return None
    leaves = [leaf for _, leaf in places(signature.tree)]
    announced = tuple(None if leaf is None else signature.tensors[leaf].shape for leaf in leaves)
    if announced != expected.shapes if exact else len(announced) != len(expected.shapes):
        return None
    return ReceiveBuffers(signature, leaves[0] if expected.single else ("list", tuple(leaves)), device, tally)
