"""The structure of an edge's payload: a tree of tensors, each with its axes; declared alike on every rank. No torch.

    EdgeOptions(payload={
        "features": Axes("b", "s", "h"),
        "deepstack": [Axes("b", "s", "h")] * 3,
        "grid": Axes("b", "thw"),
        "scale": Whole(),
    })

The declaration is what both sides of an edge agree on before the first byte: which leaves there are, in which order
they travel, and which axis of each is cut over replicas. Values are matched against it on the sender.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from attrs import evolve, field, frozen

from pipegrid.core.fields import Index, checked_fields, shown
from pipegrid.reshard import BATCH, AxisNames, BridgeError, Partial, ShapeError, Shard, Side, as_axes
from pipegrid.transport.messages.trees import Tree, describe, flatten, places, select, unflatten

Declared: TypeAlias = Any
"""`Axes`, `Whole`, None, or a dict, a list or a tuple of these."""


def _as_names(value: Sequence[str | tuple[str, ...]]) -> AxisNames:
    return as_axes(tuple((one,) if isinstance(one, str) else one for one in value))


@frozen(init=False)
class Axes:
    """A tensor by the names of its axes, in order: ``Axes("b", "s", "h")``.

    ``"b"`` is cut over replicas and ``"s"`` over context-parallel ranks, as the dims of the grids say; other names
    are free. ``Axes(("b", "s"), "h")`` has the sequence folded into the batch, for `Packed` values. Where a dim of the
    source cuts an axis that the tensor does not have, its first rank gives the tensor; every rank along such a dim of
    the destination gets it, and their gradients are added up.

    Attributes:
        names: of each axis.
        gradient: whether a gradient returns, for floating-point values; others never have one.

    Examples:
        >>> Axes("b", "s", "h").names, Axes(("b", "s"), "h").names
        ((('b',), ('s',), ('h',)), (('b', 's'), ('h',)))
    """

    names: AxisNames = field(converter=_as_names)
    gradient: bool = True

    def __init__(self, *names: str | tuple[str, ...], gradient: bool = True) -> None:
        self.__attrs_init__(names, gradient)

    def __str__(self) -> str:
        names = ", ".join("*".join(axis) for axis in self.names)
        return (f"[{names}]" if names else "scalar") + ("" if self.gradient else " constant")


@frozen
class Whole:
    """A value that is cut on neither side: a tensor of any number of axes, or an int, a float or a bool.

    The first replica of the source gives the tensor, and every rank of the destination gets it. Its gradient is the
    sum over the destination's replicas; it goes to the first replica of the source, and the others get zeros. Numbers
    are equal on all ranks of the source and travel with the shapes.

    Attributes:
        gradient: as of `Axes`.

    Examples:
        >>> Whole(gradient=False).gradient
        False
    """

    gradient: bool = True

    def __str__(self) -> str:
        return "whole" if self.gradient else "whole constant"


@frozen
class Folded:
    """A tensor of any number of axes, of which the sides cut one at most; it travels as ``[before, axis, after]``.

    That moves nothing. Where neither side cuts the axis, the elements travel in one row, whose slices are contiguous.
    It is what the boundaries of the variable-TP pipeline carry, and no part of a payload.

    Attributes:
        axis: the one that may be cut.
        parts: the name of each side, source first, and in how many parts its ranks hold the axis.
    """

    edge: str
    axis: int
    parts: tuple[tuple[str, int], tuple[str, int]]
    gradient: bool = True
    names: AxisNames = field(default=(("b",), ("s",), ("h",)), init=False)

    def __str__(self) -> str:
        return f"tensor cut on axis {self.axis}" if self._is_cut else "tensor"

    @property
    def _is_cut(self) -> bool:
        return any(parts > 1 for _, parts in self.parts)

    def folded(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape with which a tensor of ``shape`` travels that a source rank gives."""
        if not self._is_cut:
            return (1, 1, math.prod(shape))
        return (math.prod(shape[: self.axis]), shape[self.axis], math.prod(shape[self.axis + 1 :]))

    def unfolded(self, taken: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor that arrives as ``taken``, where a source rank gives one of the shape ``given``."""
        return (*given[: self.axis], taken[1], *given[self.axis + 1 :]) if self._is_cut else given

    def check(self, shape: Sequence[int], *, side: int) -> None:
        """Raise `ShapeError` unless both sides can cut a tensor of which ranks of ``side`` have parts of ``shape``."""
        if self._is_cut:
            if len(shape) <= self.axis:
                raise ShapeError(f"{self.edge} cuts axis {self.axis}; shape {tuple(shape)} has no such axis")
            for name, parts in self.parts:
                require_parts(shape[self.axis] * self.parts[side][1], parts, name)


def require_parts(length: int, parts: int, name: str) -> None:
    """Raise `ShapeError` unless the ranks of ``name`` can hold a sequence of that length in equal parts."""
    if rest := length % parts:
        raise ShapeError(
            f"a sequence of {length} cannot be cut in {parts} equal parts for {name}; pad it to {length + parts - rest}"
        )


@frozen(eq=False, field_transformer=checked_fields(ShapeError))
class Packed:
    """A tensor whose batch axis holds samples of several rows each, such as ``[tokens, h]``; a replica gets whole ones.

    It arrives as a plain tensor.

    Attributes:
        tensor: the rows of this replica's samples, one sample after the other.
        samples: the rows of each.

    Examples:
        >>> import torch
        >>> Packed(torch.ones(5, 4), samples=[2, 3]).samples
        (2, 3)
    """

    tensor: Any
    samples: tuple[Index, ...]


@frozen
class Leaf:
    """A leaf of a declaration; ``path`` leads to it, as Python writes it: ``['deepstack'][0]``."""

    path: str
    declared: Axes | Whole | Folded

    def __str__(self) -> str:
        return str(self.declared)

    @property
    def adds_batch_axis(self) -> bool:
        """Whether the tensor travels with a further axis of extent 1 as its batch, having none of its own."""
        return isinstance(self.declared, Whole) or not any(BATCH in names for names in self.declared.names)

    @property
    def axes(self) -> AxisNames:
        """The names of the axes with which the tensor travels; a whole one is a row of elements."""
        if isinstance(self.declared, Whole):
            return ((BATCH,), ())
        own = self.declared.names
        return ((BATCH,), *own) if self.adds_batch_axis else own

    def folded(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape with which a tensor of ``shape`` travels that a source rank gives: with a batch axis."""
        if isinstance(self.declared, Folded):
            return self.declared.folded(shape)
        if isinstance(self.declared, Whole):
            return (1, math.prod(shape))
        return (1, *shape) if self.adds_batch_axis else shape

    def unfolded(self, taken: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor that arrives as ``taken``, where a source rank gives one of the shape ``given``."""
        if isinstance(self.declared, Folded):
            return self.declared.unfolded(taken, given)
        if isinstance(self.declared, Whole):
            return given
        return taken[1:] if self.adds_batch_axis else taken

    def sides(self, src: Side, dst: Side) -> tuple[Side, Side]:
        """The sides of an edge as this leaf has them: dims that cut other axes have a giver, and copies."""
        own = () if isinstance(self.declared, Whole) else self.declared.names
        named = {name for names in own for name in names}

        def cuts_another(placement: object) -> bool:
            return isinstance(placement, Shard) and placement.axis not in named

        given = tuple(dim for dim in src.dims if not cuts_another(dim.placement))
        taken = tuple(evolve(dim, placement=Partial()) if cuts_another(dim.placement) else dim for dim in dst.dims)
        if BATCH not in named:
            src, dst = evolve(src, lane_weights=None), evolve(dst, lane_weights=None)
        return evolve(src, dims=given), evolve(dst, dims=taken)


class Structure:
    """The structure of an edge's messages as a tree of leaves: a declared payload, or one tensor.

    Attributes:
        leaves: in the order in which they travel.
        is_tensor: whether it is one tensor, which is sent as it is.

    Raises:
        BridgeError: a part of the declaration is of another kind, or it has no leaves.
    """

    def __init__(self, declared: Declared, *, is_tensor: bool = False) -> None:
        self.is_tensor = is_tensor
        found, self._tree = flatten(declared, exact=False)
        paths = [path for path, leaf in places(self._tree) if leaf is not None]
        for path, leaf in zip(paths, found, strict=True):
            if not isinstance(leaf, (Axes, Whole, Folded)):
                raise BridgeError(f"payload{path} is {shown(leaf)}; declare Axes, Whole, None, a dict or list of these")
        self.leaves = tuple(map(Leaf, paths, found))
        if not self.leaves:
            raise BridgeError(f"payload is {shown(declared)}, without a tensor; declare at least one Axes() or Whole()")

    def __str__(self) -> str:
        return describe(self._tree, self.leaves)

    def values(self, payload: Any, *, name: str) -> list[Any]:
        """The value at each leaf of ``payload``, in the order of `leaves`.

        `ShapeError`: a leaf that is missing or was not declared, or another kind of container.
        """

        def mismatch(path: str, tree: Tree, value: Any) -> ShapeError:
            declared = describe(tree, self.leaves)
            return ShapeError(f"{name}: payload{path} is {in_words(value)}; the edge declares {declared}")

        return select(self._tree, payload, mismatch)

    def payload(self, values: Sequence[Any]) -> Any:
        """The payload with these values at its leaves."""
        return unflatten(self._tree, values)


def in_words(value: Any) -> str:
    """A value in a few words, for an error."""
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(value)}"
    return f"a tensor of shape {tuple(value.shape)} of {value.dtype}" if hasattr(value, "dtype") else shown(value)
