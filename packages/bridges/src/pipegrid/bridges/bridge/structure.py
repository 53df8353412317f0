"""The structure of what crosses an edge: a tree of tensors, each with its axes; declared alike on every rank. No torch.

    EdgeOptions(payload={
        "features": Axes("b", "s", "h"),
        "deepstack": [Axes("b", "s", "h")] * 3,
        "grid": Axes("b", "thw"),
        "scale": Whole(),
    })

The declaration is what both sides of an edge agree on before the first byte: which leaves there are, in which order
they travel, and which axis of each is cut over data lanes. Values are matched against it on the sender.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from attrs import evolve, field, frozen

from pipegrid.bridges.checks import as_integers, as_text
from pipegrid.bridges.errors import BridgeError, ShapeError
from pipegrid.bridges.reshard import BATCH, AxisNames, Partial, Sharded, Side, Strategy
from pipegrid.topology.fields import shown

Declared: TypeAlias = Any
"""`Axes`, `Whole`, None, or a dict, a list or a tuple of these."""


def _as_names(value: Sequence[str | tuple[str, ...]]) -> AxisNames:
    names = tuple((one,) if isinstance(one, str) else tuple(one) for one in value)
    for axis in names:
        for name in axis:
            as_text(name, "the name of an axis")
        if len(axis) > 2 or (len(axis) == 2 and axis[0] != BATCH):
            raise BridgeError(f"axes {value} fold {axis} into one; only one more axis can be folded into the batch")
    flat = [name for axis in names for name in axis]
    if len(set(flat)) != len(flat):
        raise BridgeError(f"axes {value} have a name twice; each name is one axis")
    return names


@frozen(init=False)
class Axes:
    """A tensor by the names of its axes, in order: ``Axes("b", "s", "h")``.

    ``"b"`` is cut over data lanes and ``"s"`` over context-parallel ranks, as the dims of the grids say; other names
    are free. ``Axes(("b", "s"), "h")`` has the sequence folded into the batch, for `Packed` values. Where a dim of the
    source cuts an axis that the tensor does not have, its first rank gives the tensor; every rank along such a dim of
    the destination gets it, and their gradients are added up.

    Attributes:
        names: of each axis.
        gradient: whether a gradient comes back, for floating-point values; others never have one.
    """

    names: AxisNames = field(converter=_as_names)
    gradient: bool = True

    def __init__(self, *names: str | tuple[str, ...], gradient: bool = True) -> None:
        self.__attrs_init__(names, gradient)

    def __str__(self) -> str:
        return "[" + ", ".join("*".join(axis) for axis in self.names) + "]" + ("" if self.gradient else " constant")


@frozen
class Whole:
    """A value that is cut on neither side: a tensor of any number of axes, or an int, a float or a bool.

    The first data lane of the source gives the tensor, and every rank of the destination gets it. Its gradient is the
    sum over the destination's lanes; it goes to the first lane of the source, and the other lanes get zeros. Numbers
    are equal on all ranks of the source and travel with the shapes.

    Attributes:
        gradient: as of `Axes`.
    """

    gradient: bool = True

    def __str__(self) -> str:
        return "whole" if self.gradient else "whole constant"


def _as_samples(value: Sequence[int]) -> tuple[int, ...]:
    return as_integers(value, "the rows of the samples", error=ShapeError)


@frozen(eq=False)
class Packed:
    """A tensor whose batch axis holds samples of several rows each, such as ``[tokens, h]``; lanes get whole samples.

    It arrives as a plain tensor.

    Attributes:
        tensor: the rows of this lane's samples, one sample after the other.
        samples: the rows of each.
    """

    tensor: Any
    samples: tuple[int, ...] = field(converter=_as_samples)


@frozen
class Leaf:
    """A leaf of a declaration.

    Attributes:
        path: to the leaf, as Python writes it: ``['deepstack'][0]``.
        declared: what it is.
    """

    path: str
    declared: Axes | Whole

    @property
    def lifted(self) -> bool:
        """Whether the tensor travels with a further axis of extent 1 as its batch, having none of its own."""
        return isinstance(self.declared, Whole) or not any(BATCH in names for names in self.declared.names)

    @property
    def axes(self) -> AxisNames:
        """The names of the axes with which the tensor travels; a whole one is a row of elements."""
        if isinstance(self.declared, Whole):
            return ((BATCH,), ())
        own = self.declared.names
        return ((BATCH,), *own) if self.lifted else own

    def sides(self, src: Side, dst: Side) -> tuple[Side, Side]:
        """The sides of an edge as this leaf has them: dims that cut other axes have a giver, and copies."""
        own = () if isinstance(self.declared, Whole) else self.declared.names
        named = {name for names in own for name in names}

        def cuts_another(placement: object) -> bool:
            return isinstance(placement, Sharded) and placement.axis not in named

        source, destination = (
            tuple(dim for dim in src.dims if not cuts_another(dim.placement)),
            tuple(evolve(dim, placement=Partial()) if cuts_another(dim.placement) else dim for dim in dst.dims),
        )
        weights = (src.lane_weights, dst.lane_weights) if BATCH in named else (None, None)
        return (
            evolve(src, dims=source, lane_weights=weights[0]),
            evolve(dst, dims=destination, lane_weights=weights[1]),
        )


class Structure:
    """A declared payload as a tree of leaves.

    Attributes:
        leaves: in the order in which they travel.

    Raises:
        BridgeError: a part of the declaration is of another kind, or it has no leaves.
    """

    def __init__(self, declared: Declared) -> None:
        self._declared = declared
        self.leaves = tuple(_leaves(declared, ""))
        if not self.leaves:
            raise BridgeError(f"payload is {shown(declared)}, without a tensor; declare at least one Axes() or Whole()")

    def __str__(self) -> str:
        return _text(self._declared)

    def values(self, payload: Any, *, name: str) -> list[Any]:
        """The value at each leaf of ``payload``, in the order of `leaves`.

        Raises:
            ShapeError: a leaf that is missing or was not declared, or another kind of container.
        """
        found: list[Any] = []
        _match(self._declared, payload, "", found, name)
        return found

    def payload(self, values: Iterator[Any]) -> Any:
        """The payload with these values at its leaves."""
        return _filled(self._declared, values)


def checked_structure(declared: Declared, strategy: Strategy, shape: object) -> Structure:
    """The structure of an edge with this strategy and shape.

    Raises:
        BridgeError: either describes an edge of one tensor; or as `Structure`.
    """
    if strategy != "direct":
        raise BridgeError(
            f"strategy is {strategy!r} on an edge with payload=, whose leaves are cut one by one; use 'direct'"
        )
    if shape is not None:
        raise BridgeError(f"shape {shape} is of one tensor, and the edge declares a payload; leave shape out")
    return Structure(declared)


def _leaves(declared: Declared, path: str) -> Iterator[Leaf]:
    if isinstance(declared, (Axes, Whole)):
        yield Leaf(path, declared)
    elif isinstance(declared, Mapping):
        for key, part in declared.items():
            if not isinstance(key, (str, int)):
                raise BridgeError(f"payload{path} has the key {shown(key)}; keys are strings or integers")
            yield from _leaves(part, f"{path}[{key!r}]")
    elif isinstance(declared, (list, tuple)):
        for index, part in enumerate(declared):
            yield from _leaves(part, f"{path}[{index}]")
    elif declared is not None:
        raise BridgeError(
            f"payload{path} is {shown(declared)}; declare Axes('b', 's', 'h') for a tensor, Whole() for one that is "
            f"not cut, None, or a dict, a list or a tuple of these"
        )


def _text(declared: Declared) -> str:
    if isinstance(declared, Mapping):
        return "{" + ", ".join(f"{key!r}: {_text(part)}" for key, part in declared.items()) + "}"
    if isinstance(declared, (list, tuple)):
        inside = ", ".join(map(_text, declared))
        return f"[{inside}]" if isinstance(declared, list) else f"({inside})"
    return str(declared)


def _match(declared: Declared, value: Any, path: str, found: list[Any], name: str) -> None:
    if isinstance(declared, (Axes, Whole)):
        found.append(value)
    elif isinstance(declared, Mapping):
        keys = value.keys() if isinstance(value, Mapping) else None
        if keys != declared.keys():
            given = shown(value) if keys is None else f"a dict with the keys {list(keys)}"
            raise ShapeError(f"{name}: payload{path} is {given}; the edge declares {_text(declared)}")
        for key, part in declared.items():
            _match(part, value[key], f"{path}[{key!r}]", found, name)
    elif declared is None:
        if value is not None:
            raise ShapeError(f"{name}: payload{path} is {kind_of(value)}; the edge declares None there")
    else:
        if not isinstance(value, (list, tuple)) or len(value) != len(declared):
            given = f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else kind_of(value)
            raise ShapeError(f"{name}: payload{path} is {given}; the edge declares {_text(declared)}")
        for index, part in enumerate(declared):
            _match(part, value[index], f"{path}[{index}]", found, name)


def kind_of(value: Any) -> str:
    """A value in a few words, for an error."""
    shape = getattr(value, "shape", None)
    return shown(value) if shape is None else f"a tensor of shape {tuple(shape)}"


def _filled(declared: Declared, values: Iterator[Any]) -> Any:
    if isinstance(declared, (Axes, Whole)):
        return next(values)
    if isinstance(declared, Mapping):
        return {key: _filled(part, values) for key, part in declared.items()}
    if declared is None:
        return None
    parts = [_filled(part, values) for part in declared]
    return parts if isinstance(declared, list) else tuple(parts)
