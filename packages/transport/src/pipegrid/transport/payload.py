"""Payloads to tensors and back: flatten, check, allocate, and what of it goes over the wire."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from pipegrid.transport.errors import P2PPayloadError, P2PUsageError
from pipegrid.transport.message import Signature, TensorSpec, Tree, leaves
from pipegrid.transport.spec import Tally

# Backends send these under their own dtype; the others travel as bytes.
_WIRE_DTYPES = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip
_DTYPE_NAMES: dict[torch.dtype, str] = {}
_DTYPES: dict[str, torch.dtype] = {}
for _name in dir(torch):
    _value = getattr(torch, _name)
    if isinstance(_value, torch.dtype):
        _DTYPES[_name] = _value
        _DTYPE_NAMES[_value] = str(_value).removeprefix("torch.")


def flatten(payload: Any) -> tuple[list[Tensor], Tree]:
    """The tensors of ``payload`` in order, and the tree that says where they stood.

    Raises:
        P2PPayloadError: something that is not a tensor, None, list, tuple or dict with text or integer keys; or of
            a class made from one of these, such as a named tuple.
    """
    if isinstance(payload, Tensor):
        return [payload], 0
    tensors: list[Tensor] = []
    return tensors, _flatten(payload, tensors)


def _flatten(payload: Any, tensors: list[Tensor]) -> Tree:
    if isinstance(payload, Tensor):
        tensors.append(payload)
        return len(tensors) - 1
    if payload is None:
        return None
    if type(payload) in (list, tuple):
        return "list" if type(payload) is list else "tuple", tuple(_flatten(part, tensors) for part in payload)
    if type(payload) is dict:
        for key in payload:
            if type(key) not in (str, int):
                raise P2PPayloadError(
                    f"a dict in a payload has the key {key!r}; keys are texts or integers, so that the other side "
                    f"can rebuild them"
                )
        return "dict", tuple((key, _flatten(part, tensors)) for key, part in payload.items())
    for plain in (list, tuple, dict):
        if isinstance(payload, plain):
            name = plain.__name__
            remedy = f"{name}(value)" + (" or value._asdict()" if hasattr(payload, "_asdict") else "")
            raise P2PPayloadError(
                f"a payload holds an instance of {type(payload).__name__}, a kind of {name} that the other side "
                f"cannot rebuild; send {remedy}, and make the {type(payload).__name__} there"
            )
    raise P2PPayloadError(
        f"a payload holds a {type(payload).__name__}; it is made of tensors, None, and lists, tuples and dicts of them"
    )


def unflatten(tree: Tree, tensors: Sequence[Tensor]) -> Any:
    """The payload with that tree and those tensors."""
    if isinstance(tree, int):
        return tensors[tree]
    if tree is None:
        return None
    kind, children = tree
    if kind == "dict":
        return {key: unflatten(child, tensors) for key, child in children}
    parts = [unflatten(child, tensors) for child in children]
    return parts if kind == "list" else tuple(parts)


def spec_of(tensor: Tensor) -> TensorSpec:
    """What a tensor is, without its data."""
    return TensorSpec(_DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.requires_grad)


def signature_of(tensors: Sequence[Tensor], tree: Tree, note: str = "") -> Signature:
    """What a flattened payload is, without its data."""
    return Signature(tree, map(spec_of, tensors), note)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The dtype of a tensor to be."""
    return _DTYPES[spec.dtype]


def check_sendable(tensor: Tensor, *, device: torch.device, dtype: torch.dtype | None, lane: object) -> None:
    """Refuse what a lane cannot send as it is.

    Raises:
        P2PPayloadError: another device, a quantized dtype, a conjugate or negative view, a sparse or non-contiguous
            layout, or a floating-point dtype that is not ``dtype`` (where given).
    """
    if tensor.device != device:
        raise P2PPayloadError(
            f"lane {lane} moves tensors of device {device}, got one of {tensor.device}; move it with "
            f".to({str(device)!r}) before sending"
        )
    if tensor.is_quantized:
        raise P2PPayloadError(
            f"lane {lane} got a quantized tensor ({tensor.dtype}), whose scale would not arrive with it; send "
            f"tensor.int_repr() and the scale, or tensor.dequantize()"
        )
    if tensor.is_conj() or tensor.is_neg():
        view, remedy = ("conjugate", "conj") if tensor.is_conj() else ("negative", "neg")
        raise P2PPayloadError(
            f"lane {lane} got a {view} view, whose memory holds something else than its values; send "
            f"tensor.resolve_{remedy}(), so that the copy is yours to see"
        )
    plain = tensor.layout is torch.strided and not tensor.is_nested
    if not (plain and tensor.is_contiguous()):
        shape = "that varies" if tensor.is_nested else list(tensor.shape)
        raise P2PPayloadError(
            f"lane {lane} got a tensor of shape {shape} that is not contiguous (layout {tensor.layout}, "
            f"strides {list(tensor.stride()) if plain else 'none'}); "
            f"send tensor.contiguous(), so that the copy is yours to see"
        )
    if dtype is not None and tensor.dtype is not dtype and tensor.dtype.is_floating_point:
        raise P2PPayloadError(
            f"lane {lane} got a tensor of {tensor.dtype}, but pipeline_dtype is {dtype}; convert it before sending, "
            f"or use variable_seq_lengths, which agrees on dtypes as well"
        )


def carried(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """What really travels: the tensors that have elements, exotic dtypes as bytes.

    A message of no bytes travels as one byte, so that it keeps its place in the order and its meaning as a
    sign of life.
    """
    if len(tensors) == 1 and tensors[0].numel() and tensors[0].dtype in _WIRE_DTYPES:
        return tensors if not tensors[0].requires_grad else [tensors[0].detach()]
    wire = [_as_wire(tensor) for tensor in tensors if tensor.numel()]
    return wire or [torch.zeros(1, dtype=torch.uint8, device=device)]


def travels_as_it_is(spec: TensorSpec) -> bool:
    """Whether what goes over the wire for such a tensor is just the tensor."""
    return math.prod(spec.shape) > 0 and dtype_of(spec) in _WIRE_DTYPES


def _as_wire(tensor: Tensor) -> Tensor:
    # Detached: transfers are no part of the graph.
    tensor = tensor.detach()
    return tensor if tensor.dtype in _WIRE_DTYPES else tensor.reshape(-1).view(torch.uint8)


def is_single_shape(x: Any) -> bool:
    """Whether ``x`` is one shape: a `torch.Size`, a tuple of integers (``()`` is a scalar's), or a list of them.

    An empty list is no shape but an empty list of shapes.
    """
    if isinstance(x, torch.Size):
        return True
    if not isinstance(x, (tuple, list)) or (isinstance(x, list) and not x):
        return False
    return all(_is_size(size) for size in x)


def _is_size(value: Any) -> bool:
    if isinstance(value, (bool, tuple, list)):
        return False
    try:
        return operator.index(value) >= 0
    except TypeError:
        return False


@frozen
class ExpectedShape:
    """What the caller of a receive expects: one tensor, or a list with a shape or None for each place."""

    single: bool
    shapes: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, shapes: Any) -> ExpectedShape:
        """A expected from the ``shapes`` of a receive.

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


class ReceiveBuffers:
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

    def take(self, tally: Tally) -> list[Tensor]:
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


def receive_buffers(
    signature: Signature,
    expected: ExpectedShape | None,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    exact: bool = True,
) -> ReceiveBuffers | None:
    """The buffers for an announced message in the form that its receiver expects; None where the two differ.

    One expected shape gives one tensor, a list of them a list, whether the sender sent a tensor, a list or a tuple.

    Args:
        signature: what was announced.
        expected: what the caller expects; None takes it as it is.
        device: where buffers live.
        dtype: what its floating-point tensors must be; None allows any.
        exact: whether the wished shapes must be the announced ones, or only as many of them.
    """
    for spec in signature.tensors:
        here = dtype_of(spec)
        if dtype is not None and here.is_floating_point and here is not dtype:
            return None
    if expected is None:
        return ReceiveBuffers(signature, signature.tree, device)
    if isinstance(signature.tree, tuple) and signature.tree[0] == "dict":
        return None
    places = list(leaves(signature.tree))
    announced = tuple(None if place is None else signature.tensors[place].shape for place in places)
    if announced != expected.shapes if exact else len(announced) != len(expected.shapes):
        return None
    return ReceiveBuffers(signature, places[0] if expected.single else ("list", tuple(places)), device)
