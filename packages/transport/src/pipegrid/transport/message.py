"""What a message consists of, without its data: structure, shapes, dtypes. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from attrs import field, frozen

Tree: TypeAlias = Any
"""The structure of a payload: None, the index of a tensor, or ``(kind, children)`` with kind ``"list"``,
``"tuple"`` or ``"dict"``; the children of a dict are ``(key, tree)``."""


def _as_shape(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(value)


@frozen(cache_hash=True)
class TensorSpec:
    """One tensor of a message: its dtype by name (``"float32"``), its shape, and whether it requires grad."""

    dtype: str
    shape: tuple[int, ...] = field(converter=_as_shape)
    # Who requires grad may change between training and evaluation without a new agreement.
    requires_grad: bool = field(default=False, eq=False)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _as_specs(value: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(value)


@frozen(cache_hash=True)
class Signature:
    """A message: the tree of its payload and the tensors at its leaves, in order.

    Two messages with equal signatures can use the same agreement: a receiver that expects one can receive
    the other.
    """

    tree: Tree
    tensors: tuple[TensorSpec, ...] = field(converter=_as_specs)

    def __str__(self) -> str:
        return _describe(self.tree, self.tensors)

    @property
    def gradients(self) -> tuple[bool, ...]:
        """Which received tensors require grad, as far as their dtypes can.

        Where the sender marks some of its tensors and not others, the marks. Where it marks none (evaluation,
        or tensors that were made by hand), all.
        """
        marks = tuple(spec.requires_grad for spec in self.tensors)
        return marks if any(marks) else (True,) * len(marks)


def _describe(tree: Tree, tensors: Sequence[TensorSpec]) -> str:
    if tree is None:
        return "None"
    if isinstance(tree, int):
        return str(tensors[tree])
    kind, children = tree
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_describe(child, tensors)}" for key, child in children) + "}"
    inside = ", ".join(_describe(child, tensors) for child in children)
    return f"[{inside}]" if kind == "list" else f"({inside})"


def leaves(tree: Tree) -> Iterator[int | None]:
    """The leaves of a tree, in order: indices of tensors, and None."""
    if tree is None or isinstance(tree, int):
        yield tree
    else:
        kind, children = tree
        for child in children:
            yield from leaves(child[1] if kind == "dict" else child)


def encode(*, sequence: int, standing: bool, signatures: Iterable[Signature]) -> bytes:
    """The header that announces messages ``sequence``, ``sequence + 1``, ... of a lane, as bytes.

    ``standing``: the one signature holds for all later messages, too.
    """
    messages = [
        (message.tree, [(spec.dtype, spec.shape, spec.requires_grad) for spec in message.tensors])
        for message in signatures
    ]
    return json.dumps((sequence, standing, messages), separators=(",", ":")).encode()


def decode(data: bytes) -> tuple[int, bool, tuple[Signature, ...]]:
    """``(sequence, standing, signatures)`` of a header."""
    sequence, standing, messages = json.loads(data)
    return sequence, standing, tuple(_signature(*message) for message in messages)


def _signature(tree: Any, tensors: Iterable[Any]) -> Signature:
    return Signature(_tree(tree), (TensorSpec(*spec) for spec in tensors))


def _tree(value: Any) -> Tree:
    if value is None or isinstance(value, int):
        return value
    kind, children = value
    if kind == "dict":
        return kind, tuple((key, _tree(child)) for key, child in children)
    return kind, tuple(_tree(child) for child in children)
