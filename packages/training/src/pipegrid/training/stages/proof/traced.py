"""Tensors of a traced forward: a value that the batch alone determines is computed, every other one has a shape only.

A `Traced` tensor claims the device of the batch. Behind it is a tensor with values, or one on the meta device: what
depends on a parameter has no values, so that a model of any size is traced in the memory of its batch. What is known of
a value belongs to its storage, so that a write through one view is seen through every other one.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from pipegrid.training.errors import CutError
from pipegrid.training.stages.torch_compat import tensors_in


@define(eq=False)
class Operation:
    """One operation of a traced forward.

    Attributes:
        name: such as ``aten.add.Tensor``; "" for what the forward was given.
        part: the layer or part that was running, by its dotted name; "" for the model's own code.
        line: the line of the model's code, ``file.py:12``.
        passed: number of boundaries passed.
        after: the operations that made its inputs.
    """

    name: str
    part: str
    line: str
    passed: int
    after: list[Operation] = field(factory=list, repr=False)


@define(eq=False)
class Cell:
    """What a storage holds.

    Attributes:
        known: the batch alone determines it, and it has values.
        placed: a stage needs a parameter, a random number or a part of another stage to make it.
        written: the last operation that wrote to it.
        storages: of the tensors behind the traced ones.
    """

    known: bool
    placed: bool
    written: Operation
    storages: list[Any] = field(factory=list)


class Traced(Tensor):
    """A tensor of a traced forward.

    Attributes:
        owner: the trace.
        behind: its values, or its shape on the meta device.
        cell: what its storage holds.
        origin: the operation that made this view of the storage.
        uses: pairs of operations, the one that made its value and one that used it behind a boundary.
        parameter: its name, if it is one.
    """

    owner: Any
    behind: Tensor
    cell: Cell
    origin: Operation
    uses: list[tuple[Operation, Operation]]
    parameter: str

    @staticmethod
    def of(owner: Any, behind: Tensor, cell: Cell, origin: Operation, *, parameter: str = "") -> Traced:
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
        self.uses, self.parameter = [], parameter
        return self

    @property
    def made(self) -> Operation:
        """The operation that wrote its value, or one that made this view of it behind a later boundary."""
        written = self.cell.written
        return self.origin if self.origin.passed > written.passed else written

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

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """The shape, and whether there are values."""
        return f"Traced({tuple(self.shape)}, {self.dtype}, {'known' if self.cell.known else 'unknown'})"


def traced_in(value: Any) -> list[Traced]:
    """The traced tensors of a nested value."""
    return [one for one in tensors_in(value) if isinstance(one, Traced)]
