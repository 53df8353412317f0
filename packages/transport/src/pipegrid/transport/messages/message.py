"""Messages without their data: signatures, headers, and the shapes agreed for a lane. No torch."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from typing import Any

from attrs import define, field, frozen

from pipegrid.core.lanes import LaneSpec
from pipegrid.transport.config import ShapeMode
from pipegrid.transport.errors import P2PMismatchError, P2PUsageError
from pipegrid.transport.messages.trees import Tree, describe


def _as_shape(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(value)


def _as_specs(value: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(value)


@frozen(cache_hash=True)
class TensorSpec:
    """One tensor of a message: its dtype by name (``"float32"``), its shape, and whether it requires grad."""

    dtype: str
    shape: tuple[int, ...] = field(converter=_as_shape)
    # Not compared: what requires grad may change between training and evaluation without new shapes.
    requires_grad: bool = field(default=False, eq=False)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@frozen(cache_hash=True)
class Signature:
    """A message: the tree of its payload and the tensors at its leaves, in order.

    A receiver that expects a message can receive any other of an equal signature.
    """

    tree: Tree
    tensors: tuple[TensorSpec, ...] = field(converter=_as_specs)
    note: str = ""  # of the sender, for the receiver: travels in the header only

    def __str__(self) -> str:
        return describe(self.tree, self.tensors)

    @property
    def gradients(self) -> tuple[bool, ...]:
        """A mark for each received tensor that requires grad, as far as their dtypes can.

        The marks of the sender; all of them where the sender marks none (evaluation, or tensors made by hand).
        """
        marks = tuple(spec.requires_grad for spec in self.tensors)
        return marks if any(marks) else (True,) * len(marks)


def encode(*, sequence: int, agreed: bool, signature: Signature) -> bytes:
    """The header of message ``sequence`` of a lane, as bytes; ``agreed``: it holds for all later messages."""
    tensors = [(spec.dtype, spec.shape, spec.requires_grad) for spec in signature.tensors]
    return json.dumps((sequence, agreed, signature.tree, tensors, signature.note), separators=(",", ":")).encode()


def decode(data: bytes) -> tuple[int, bool, Signature]:
    """``(sequence, agreed, signature)`` of a header."""
    sequence, agreed, tree, tensors, note = json.loads(data)
    return sequence, agreed, Signature(_as_tuples(tree), (TensorSpec(*spec) for spec in tensors), note)


def _as_tuples(value: Any) -> Any:
    """A value as it was written in JSON, which has tuples as lists."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


@define(eq=False)
class StepShapes:
    """The messages of a lane in the first step of a batch signature."""

    messages: tuple[Signature, ...]  # in order
    number: int  # of the signature on this lane, from 1: keeps its messages apart from those of other steps
    agreed: Signature | None = field(init=False)  # the message that all of them are; None where they differ
    plain: Any = None  # what the end of the lane makes of it, where it is plain

    def __attrs_post_init__(self) -> None:
        first = self.messages[0]
        alike = all(one == first and one.gradients == first.gradients for one in self.messages)
        self.agreed = first if alike else None


class ShapeContract:
    """Signatures that were announced and not used yet: one that stands for all messages, or one per message.

    Each end keeps one, and both go through the same states: the sender when it sends, the receiver when a header
    arrives and when it posts a receive.
    """

    def __init__(self, lane: LaneSpec, mode: ShapeMode, agreed: Signature | None = None) -> None:
        self._lane, self.mode = lane, mode
        self._table: deque[Signature] = deque()
        self._known = False
        self.agreed = agreed  # of all messages from now on; None where each has its own, or none is announced yet
        self.passed: list[Signature] | None = None  # those of a step that is being learned; None in others

    @property
    def stays(self) -> bool:
        """Whether the first header holds for all later messages."""
        return self.mode in ("agreed", "given")

    @property
    def outstanding(self) -> int:
        """Messages that were announced one by one and not used yet."""
        return len(self._table)

    def send(self, signature: Signature, sequence: int) -> bool:
        """Use up the announcement of message ``sequence``; return whether the message needs a header of its own."""
        if signature is self.agreed:
            return False
        self.check(signature, sequence)
        if self.agreed is None and not self._table:
            if self.stays:
                self.agreed = signature
            elif self.passed is not None:
                self.passed.append(signature)
            return True
        announced = self.agreed or self._table.popleft()
        if signature != announced:
            raise P2PMismatchError(
                f"message {sequence} of lane {self._lane} is {signature}, but {announced} was announced to rank "
                f"{self._lane.destination}; {self._remedy}"
            )
        return False

    def check(self, signature: Signature, sequence: int, *, ahead: int = 0) -> None:
        """Raise for a message that can be sent neither as announced nor with a header of its own.

        ``ahead``: messages that will be sent before it, and have used up nothing yet.
        """
        announced = self.agreed
        if announced is signature:
            return
        if announced is None and len(self._table) > ahead:
            announced = self._table[ahead]
        told = () if announced is None else announced.gradients
        lost = [spec.requires_grad and not wanted for spec, wanted in zip(signature.tensors, told, strict=False)]
        if any(lost):
            raise P2PUsageError(
                f"in message {sequence} of lane {self._lane}, {signature}, tensor {lost.index(True)} requires grad, "
                f"but was announced to rank {self._lane.destination} without; {self._remedy}"
            )

    def announce(self, signature: Signature, *, agreed: bool) -> None:
        """Add an announced signature, of one message or of all."""
        if agreed:
            self.agreed = signature
        else:
            self._table.append(signature)

    def receive(self) -> Signature | None:
        """Use up the announcement of the next message; None where its header has not come yet."""
        if self.agreed is not None:
            return self.agreed
        if not self._table:
            return None
        found = self._table.popleft()
        if self.passed is not None:
            self.passed.append(found)
        return found

    def begin_step(self, step: StepShapes | None, *, learn: bool) -> None:
        """Begin a step with the messages of an earlier one; None: each is announced, and noted if ``learn``."""
        self._table.clear()
        self.passed = [] if learn else None
        self._known = step is not None
        self.agreed = None if step is None else step.agreed
        if step is not None and step.agreed is None:
            self._table.extend(step.messages)

    def renew(self) -> None:
        """Forget the agreed signature: the next message has a header again."""
        self.agreed = None

    @property
    def _remedy(self) -> str:
        """The ways in which messages may change, for an error."""
        if self._known:
            return (
                "a batch of the same shapes had that before. Where shapes depend on more than those of the batch, set "
                'variable_seq_lengths=True and shapes="header"'
            )
        return "shapes that change need variable_seq_lengths=True, or renew() on both sides"
