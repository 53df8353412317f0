"""The leaves of an edge's payload: the announcement of each by its source, its transfer, and its arrival.

Pure but for new tensors: nothing is sent or received here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from attrs import evolve, frozen

from pipegrid.bridges.bridge.options import EdgeOptions
from pipegrid.bridges.bridge.plans import Announcement, LeafNote, Number, PlanPair, ShapePlans, encode
from pipegrid.bridges.bridge.receive import with_gradient
from pipegrid.bridges.bridge.structure import Axes, Folded, Leaf, Packed, Structure, Whole, in_words
from pipegrid.bridges.bridge.wiring import BridgeWiring
from pipegrid.core import Direction, Index, checked
from pipegrid.reshard import BridgeError, RankPart, ShapeError, marked_samples

_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD


@frozen
class LeafTransfer:
    """One leaf of one microbatch: how its tensor travels, or the value that needs no message.

    Attributes:
        plans: of the tensor; None for a number, and where this rank has no part in it.
        shape: of this rank's tensor, as the stage has it; None for a number, which is ``value``.
        gradient: whether a gradient returns.
    """

    plans: PlanPair | None
    shape: tuple[int, ...] | None
    value: Any
    dtype: torch.dtype | None
    gradient: bool

    def part(self, direction: Direction) -> RankPart | None:
        """The part of this rank in the plan of a direction; None where nothing of the leaf travels from or to it."""
        if self.plans is None or (direction is _BACKWARD and not self.gradient):
            return None
        return self.plans.forward_part if direction is _FORWARD else self.plans.backward_part


Microbatch: TypeAlias = tuple[LeafTransfer, ...]
"""The leaves of one microbatch, in the order in which they travel."""


def peers_of(leaves: Microbatch, direction: Direction, *, sends: bool) -> Iterable[int]:
    """The ranks that get something of this rank's leaves (``sends``), or give it something of theirs, ascending."""
    parts = [part for one in leaves if (part := one.part(direction)) is not None]
    if len(parts) == 1:
        return parts[0].sends if sends else parts[0].receives
    return sorted({peer for part in parts for peer in (part.sends if sends else part.receives)})


@frozen
class Leaves:
    """The leaves of the edge ``name`` as one rank knows them before any message: their structure, the plans of each.

    ``comm_dtype`` is that of floating-point tensors on the wire; None is their own.
    """

    name: str
    rank: int
    device: torch.device
    structure: Structure
    plans: Sequence[ShapePlans]
    backward: bool
    comm_dtype: torch.dtype | None

    def values(self, payload: Any, samples: Sequence[int] | None) -> list[Any]:
        """The value of each leaf."""
        if self.structure.is_tensor:
            return [payload if samples is None or isinstance(payload, Packed) else Packed(payload, tuple(samples))]
        if samples is not None:
            raise ShapeError(f"{self.name} carries a payload; samples belong to a leaf: Packed(leaf, samples)")
        return self.structure.values(payload, name=self.name)

    def notes(self, values: Sequence[Any]) -> list[LeafNote]:
        """The announcement of each leaf, given the leaves' values on this rank."""
        return [self._note(leaf, value) for leaf, value in zip(self.structure.leaves, values, strict=True)]

    def _note(self, leaf: Leaf, value: Any) -> LeafNote:
        is_tensor, tensor = self.structure.is_tensor, tensor_of(value)
        where = self.name if is_tensor else f"{self.name}: payload{leaf.path}"
        if is_tensor and tensor is None:
            given = value.tensor if isinstance(value, Packed) else value
            if isinstance(leaf.declared, Folded):
                raise ShapeError(f"{where} carries one tensor, got {in_words(given)}; zeros stand for no gradient")
            raise ShapeError(
                f"{where} carries one tensor, got {type(given).__name__}; declare several by "
                "edges={(source, destination): EdgeOptions(payload={...})}, and send a tensor without rows where there "
                "is nothing to send"
            )
        if isinstance(leaf.declared, Whole) and isinstance(value, (int, float)):
            return Number(value)
        names = leaf.declared.names if isinstance(leaf.declared, Axes) and not is_tensor else None
        if tensor is None or (names is not None and tensor.ndim != len(names)):
            found = in_words(value if tensor is None else tensor)
            raise ShapeError(f"{where} is {found}; the edge declares {leaf.declared}")
        if isinstance(leaf.declared, Folded):
            leaf.declared.check(tensor.shape, side=0)
        if is_tensor and self.comm_dtype is not None and not tensor.is_floating_point():
            raise ShapeError(f"{where} travels as {self.comm_dtype}, which rounds {tensor.dtype} values")
        if tensor.requires_grad and not (self.backward and leaf.declared.gradient):
            what = "the tensor" if is_tensor else "it"
            raise BridgeError(f"{where} was declared without gradient, but {what} requires grad; detach it")
        samples = value.samples if isinstance(value, Packed) else marked_samples(value)
        if samples is not None and leaf.adds_batch_axis:
            raise ShapeError(f"{where} is Packed, but {leaf.declared} has no batch axis")
        return Announcement.of(tensor, samples)

    def require_agreed(self, notes: Sequence[LeafNote], agreed: Sequence[LeafNote]) -> None:
        """Raise `ShapeError` unless this rank announces what it announced with the first message."""
        for leaf, now, before in zip(self.structure.leaves, notes, agreed, strict=True):
            if encode([now]) != encode([before]):  # as text 1, 1.0 and True differ
                where = "" if self.structure.is_tensor else f" as payload{leaf.path}"
                raise ShapeError(
                    f"{self.name}: rank {self.rank} sends {now}{where}, but {before} was agreed with the first "
                    "message; sizes that change need shapes='variable', or renew_shapes()"
                )

    def outgoing(self, notes: Sequence[LeafNote]) -> Microbatch:
        """The transfers of the leaves, from the announcements of this rank."""
        return tuple(map(self._outgoing, self.structure.leaves, self.plans, notes))

    def _outgoing(self, leaf: Leaf, plans: ShapePlans, note: LeafNote) -> LeafTransfer:
        if isinstance(note, Number):
            return LeafTransfer(None, None, note.value, None, gradient=False)
        dtype = getattr(torch, note.dtype)
        here = self.rank in plans.wiring.src.coords_of  # where it is not, another replica gives the leaf
        own = plans.own_plans(_folded(leaf, note)) if here else None
        return LeafTransfer(own, note.shape, None, dtype, gradient=self._has_gradient(leaf, dtype))

    def _has_gradient(self, leaf: Leaf, dtype: torch.dtype) -> bool:
        can = self.structure.is_tensor or dtype.is_floating_point or dtype.is_complex
        return self.backward and leaf.declared.gradient and can

    def incoming(self, notes: Mapping[int, Sequence[LeafNote]]) -> Microbatch:
        """The transfers of the leaves, from the announcements of the source ranks, by rank."""
        count = len(self.structure.leaves)
        return tuple(self._incoming(index, {peer: one[index] for peer, one in notes.items()}) for index in range(count))

    def _incoming(self, index: int, notes: Mapping[int, LeafNote]) -> LeafTransfer:
        leaf, shapes = self.structure.leaves[index], self.plans[index]
        first, some = next(iter(notes.items()))
        for peer, one in notes.items():
            if type(one) is not type(some) or (isinstance(one, Number) and one != some):
                raise ShapeError(f"{shapes.name}: ranks {first} and {peer} send {some} and {one}; they send the same")
        if isinstance(some, Number):
            return LeafTransfer(None, None, some.value, None, gradient=False)
        announced = {peer: note for peer, note in notes.items() if isinstance(note, Announcement)}
        if not self.structure.is_tensor:  # of a tensor every note counts: with a leader they are those of all copies
            announced = {peer: announced[peer] for peer in shapes.wiring.senders(_FORWARD) if peer in announced}
        plans = shapes.plans({peer: _folded(leaf, one) for peer, one in announced.items()})
        given = next(iter(announced.values())).shape
        shape = leaf.unfolded(plans.forward_part.destination_shape, given)
        return LeafTransfer(plans, shape, None, plans.dtype, gradient=self._has_gradient(leaf, plans.dtype))

    def due(self, leaves: Microbatch, gradients: Any) -> list[torch.Tensor | None]:
        """The gradients of the leaves of a microbatch that was received: zeros where one is due and None is given."""
        if self.structure.is_tensor:
            given = [gradients]
        elif gradients is None:
            given = [None] * len(leaves)
        else:
            given = self.structure.values(gradients, name=f"{self.name}, gradients")
        return list(map(self._due, self.structure.leaves, leaves, given))

    def _due(self, leaf: Leaf, one: LeafTransfer, gradient: Any) -> torch.Tensor | None:
        if gradient is None:
            return self._zeros(one) if one.gradient and one.plans is not None else None
        is_tensor = isinstance(gradient, torch.Tensor)
        if not one.gradient and not is_tensor:
            return None  # a number in the place of a number: a stage may give back what it was given
        if one.gradient and is_tensor and gradient.shape == one.shape and gradient.dtype is one.dtype:
            found: torch.Tensor = gradient
            return found
        whose, of = "its leaf has", f"the gradient of payload{leaf.path}"
        if self.structure.is_tensor:
            whose, of = "its activation was of", "the gradient"
        due = f"shape {one.shape} of {one.dtype}" if one.gradient else "no gradient"
        raise ShapeError(f"{self.name}: {of} is {in_words(gradient)}, {whose} {due}")

    def activations(self, leaves: Microbatch, tensors: Sequence[torch.Tensor]) -> Any:
        """The payload of the stage from the tensors that arrived."""
        arrived, values = iter(tensors), []
        for one in leaves:
            value = one.value if one.shape is None else _shaped(next(arrived), one.shape)
            values.append(with_gradient(value) if one.gradient else value)
        return self.structure.payload(values)

    def gradients(self, leaves: Microbatch, tensors: Sequence[torch.Tensor]) -> Any:
        """The gradients that arrived in the structure of the payload: None for leaves without."""
        arrived = iter(tensors)
        values: list[torch.Tensor | None] = []
        for one in leaves:
            if not one.gradient or one.shape is None:
                values.append(None)
            elif one.plans is None:  # the first replica has the gradient
                values.append(self._zeros(one))
            else:
                values.append(_shaped(next(arrived), one.shape))
        return self.structure.payload(values)

    def _zeros(self, leaf: LeafTransfer) -> torch.Tensor:
        assert leaf.shape is not None
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=self.device)

    def expected(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that the caller of a receive expects: `ShapeError` on an edge with a payload."""
        if not self.structure.is_tensor:
            raise ShapeError(f"{self.name} carries a payload, whose tensors have a shape each; leave the shape out")
        expected: tuple[int, ...] = checked(shape, tuple[Index, ...], "the expected shape", ShapeError)
        declared = self.structure.leaves[0].declared
        if isinstance(declared, Folded):
            declared.check(expected, side=1)
        return expected


def leaves_of(
    name: str,
    options: EdgeOptions,
    wiring: BridgeWiring,
    *,
    device: torch.device,
    variable: bool,
    tensor: Folded | None = None,
) -> Leaves:
    """The leaves of an edge with these options, as the rank of ``wiring`` knows them.

    Without a payload there is one, the ``tensor``; None is a tensor with the axes of the wiring.
    """
    structure = options.structure or Structure(tensor or Axes(*wiring.axes), is_tensor=True)
    plans = [
        ShapePlans(
            name if structure.is_tensor else f"{name}, payload{leaf.path}",
            wired,
            options.choice,
            options.comm_dtype,
            variable,
            options.shape,
        )
        for leaf, wired in zip(structure.leaves, wiring.leaves, strict=True)
    ]
    return Leaves(name, wiring.rank, device, structure, plans, options.backward, options.comm_dtype)


def tensor_of(value: Any) -> torch.Tensor | None:
    """The tensor of a leaf's value; None for a number, or a value that no leaf can have."""
    tensor = value.tensor if isinstance(value, Packed) else value
    return tensor if isinstance(tensor, torch.Tensor) else None


def _shaped(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return tensor if tensor.shape == shape else tensor.view(shape)


def _folded(leaf: Leaf, note: Announcement) -> Announcement:
    """The announcement of a leaf in the shape with which it travels."""
    shape = leaf.folded(note.shape)
    return note if shape == note.shape else evolve(note, shape=shape)
