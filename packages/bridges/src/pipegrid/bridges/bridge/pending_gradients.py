"""Which activation a gradient belongs to: the oldest that has none yet. No torch."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from attrs import define, field

Activation = TypeVar("Activation")


@define(eq=False)
class GradientsDue(Generic[Activation]):
    """What was sent, or received, and has no gradient yet.

    Attributes:
        variable: whether activations differ. Where they do not, a gradient belongs to any of them, and there is
            nothing to count.
        first: where they do not, the one that stands for all; None before the first.
    """

    variable: bool
    first: Activation | None = field(default=None, init=False)
    _waiting: deque[Activation] = field(factory=deque, init=False)

    def add(self, activation: Activation, *, has_gradient: bool) -> None:
        """There is one more activation; ``has_gradient`` says whether a gradient of it will come."""
        if self.first is None and not self.variable:
            self.first = activation
        if self.variable and has_gradient:
            self._waiting.append(activation)

    @property
    def oldest(self) -> Activation | None:
        """The activation that the next gradient belongs to; None where none is due."""
        if not self.variable:
            return self.first
        return self._waiting[0] if self._waiting else None

    def answer(self) -> None:
        """The gradient of the oldest one is on its way."""
        if self.variable:
            self._waiting.popleft()
