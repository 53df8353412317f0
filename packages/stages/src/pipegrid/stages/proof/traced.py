"""Tensors of a traced forward: a value that the batch alone determines is computed, every other one has a shape only.

A `Traced` tensor claims the device of the batch. Behind it is a tensor with values, or one on the meta device: what
depends on a parameter has no values, so that a model of any size is traced in the memory of its batch. What is known of
a value belongs to its storage, so that a write through one view is seen through every other one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipegrid.stages.errors import CutError
from pipegrid.stages.torch_compat import is_mask, tensors_in

_aten = torch.ops.aten

OVERWRITING = frozenset({_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor})
"""Operators of which the result does not depend on what the written tensor held."""


@define(eq=False)
class Operation:
    """One operation of a traced forward."""

    name: str  # such as ``aten.add.Tensor``; "" for what the forward was given
    part: str  # the layer or part that was running, by its dotted name; "" for the model's own code
    line: str  # the line of the model's code, ``file.py:12``
    passed: int  # number of boundaries passed
    after: list[Operation] = field(factory=list, repr=False)  # the operations that made its inputs
    inputs: list[tuple[Traced, Operation]] = field(factory=list, repr=False)  # those without values, and their writers
    text: str = ""  # the operation with its arguments; tensors by their shapes, parameters by their names
    signature: str = field(default="", repr=False)  # of all that it was made of; "" where the batch determines it
    number: int = 0  # of operations before it
    draws: bool = False  # it draws random numbers


@define(eq=False)
class Cell:
    """The content of a storage."""

    known: bool  # the batch alone determines it, and it has values
    placed: bool  # a stage needs a parameter, a random number or a part of another stage to make it
    written: Operation  # the last operation that wrote to it
    through: Any = None  # the tensor through which that operation wrote, where it wrote in place
    drawn: bool = False  # random numbers alone, and the batch, determine it
    twice: bool = False  # a stage sends it twice at one boundary, and the next stage has it in two places
    storages: list[Any] = field(factory=list)  # of the tensors behind the traced ones


_made: ContextVar[list[weakref.ref[Traced]] | None] = ContextVar("_made", default=None)


@contextmanager
def ended_traces() -> Iterator[None]:
    """Traced tensors that are made inside know nothing behind it: some hold their trace in a way that gc cannot see."""
    made: list[weakref.ref[Traced]] = []
    token = _made.set(made)
    try:
        yield
    finally:
        _made.reset(token)
        for each in made:
            if (one := each()) is not None:
                vars(one).clear()


class Traced(Tensor):
    """A tensor of a traced forward."""

    owner: Any  # the trace
    behind: Tensor  # its values, or its shape on the meta device
    cell: Cell
    origin: Operation  # the operation that made this view of the storage
    placed: bool  # a stage needed a parameter, a random number or a part of another stage to make this view
    uses: list[tuple[Operation, Operation]]  # pairs: what made its value, and what used it behind a boundary
    parameter: str  # its name, if it is one
    nth: int  # among the results of its origin
    arrived: tuple[str, Operation] | None  # its place in what is sent at a boundary, and the last to write it

    @staticmethod
    def of(
        owner: Any, behind: Tensor, cell: Cell, origin: Operation, *, placed: bool = False, parameter: str = ""
    ) -> Traced:
        """A tensor like ``behind`` that claims the device of the trace."""
        # The one way to a tensor that claims a device without memory there.
        self: Traced = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            Traced,
            behind.size(),
            strides=behind.stride(),
            storage_offset=behind.storage_offset(),
            dtype=behind.dtype,
            layout=behind.layout,
            device=owner.device,
            requires_grad=False,
        )
        self.owner, self.behind, self.cell, self.origin = owner, behind, cell, origin
        self.placed, self.uses, self.parameter, self.nth, self.arrived = placed, [], parameter, 0, None
        if (made := _made.get()) is not None:
            made.append(weakref.ref(self))
        return self

    @property
    def made(self) -> Operation:
        """The operation that wrote its value, or one that made this view of it behind a later boundary.

        A view that one stage has made shares no memory with what another tensor is written through on a later stage.
        """
        written = self.cell.written
        elsewhere = self.placed and self.cell.through is not self
        return self.origin if elsewhere or self.origin.passed > written.passed else written

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` in the trace, also where torch has left the trace's own mode (inside ``vmap``)."""
        traced = traced_in((args, kwargs))[0]
        if not traced.owner.running:
            raise CutError(f"{func} of a traced tensor after its trace: the model keeps tensors between forwards")
        return traced.owner.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reads of values that go around operators take the values of a known tensor."""
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and args[0].cell.known:
            args[0].owner.read_by_host(args[0], func.__name__)
            return func(args[0].behind, *args[1:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def __format__(self, spec: str) -> str:
        """The number of a scalar, a read by the host; of every other tensor, as `repr`."""
        return format(repr(self) if self.dim() else self.item(), spec)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Traced({tuple(self.shape)}, {self.dtype}, {'known' if self.cell.known else 'unknown'})"


def traced_in(value: Any) -> list[Traced]:
    """The traced tensors of a nested value."""
    return [one for one in tensors_in(value) if isinstance(one, Traced)]


def read(func: Any, args: tuple[Any, ...], number: Callable[[torch.dtype], Any]) -> Any:
    """A stand-in for what ``func`` tells the host of values that are not there; NotImplemented for other operators.

    ``number`` gives a stand-in of a dtype; of a mask, every place is set.
    """
    if func is _aten._local_scalar_dense.default:  # noqa: SLF001
        return number(args[0].dtype)
    if func in (_aten.equal.default, _aten.is_nonzero.default):
        return not number(torch.bool)
    if func is _aten.nonzero.default:
        return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.long, device="meta")
    if func is _aten.masked_select.default:
        return args[0].expand_as(args[0] * args[1]).reshape(-1)
    if func is _aten._grouped_mm.default:  # noqa: SLF001 -- torch knows its shapes in bfloat16 alone
        return args[0].new_empty(_grouped_shape(args[0].shape, args[1].shape, args[2].shape))
    if func is _aten.index.Tensor and any(is_mask(index) for index in args[1]):
        return func(args[0], _every_place(args[1]))
    if func in (_aten.index_put_.default, _aten.index_put.default) and any(is_mask(index) for index in args[1]):
        return args[0] if func is _aten.index_put_.default else torch.empty_like(args[0])
    return NotImplemented


def _grouped_shape(a: torch.Size, b: torch.Size, offsets: torch.Size) -> tuple[int, ...]:
    """The shape of a grouped matrix product: groups are rows of ``a``, columns of ``b``, or parts of the inner axis."""
    if len(a) == len(b) == 2:
        return (*offsets, a[0], b[1])
    return (a[-2], b[-1]) if len(a) != len(b) else (a[0], a[1], b[2])


def _every_place(indices: list[Any]) -> list[Any]:
    """Indices with as many places as a mask has elements, for each axis of a mask."""
    found: list[Any] = []
    for index in indices:
        if is_mask(index):
            found.extend(torch.empty(index.numel(), dtype=torch.long, device="meta") for _ in range(index.dim()))
        else:
            found.append(index)
    return found


class Lists(TorchFunctionMode):
    """``torch.tensor`` of a list that holds traced tensors, which reads memory, becomes a stack of them."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and traced_in(args):
            return _stacked(args[0]).to(dtype=options.get("dtype"), device=options.get("device"))
        return func(*args, **options)


def _stacked(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple)) and traced_in(value):
        return torch.stack([_stacked(one) for one in value])
    return torch.tensor(value)
