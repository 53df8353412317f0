"""What waits on an edge: receives that have not landed, and activations whose gradients are still to come."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from attrs import define, field

from pipegrid.bridges.bridge.receive import BridgeReceive
from pipegrid.bridges.errors import BridgeError

Activation = TypeVar("Activation")
Plans = TypeVar("Plans")


@define(eq=False)
class PendingReceive(Generic[Plans]):
    """A receive, and the plans for what its messages announce: None until they have landed."""

    plans: Plans | None = None
    receive: BridgeReceive | None = None

    def wait(self) -> Plans:
        """The plans; waits for the messages where they have not landed."""
        if self.plans is None:
            assert self.receive is not None
            self.receive.let_land()
        assert self.plans is not None
        return self.plans


@define(eq=False)
class PendingGradients(Generic[Activation]):
    """Activations that were sent, or received, and whose gradients are still to come.

    Attributes:
        call: the call that answers them, for errors: edge, verb and rank.
        what: what is pending, for errors, such as ``"activation that was sent"``.
        variable: whether activations differ. Where they do not, a gradient belongs to any of them, and there is
            nothing to count.
        first: where they do not, the one that stands for all; None before the first.
    """

    call: str
    what: str
    variable: bool
    first: Activation | None = field(default=None, init=False)
    _waiting: deque[Activation] = field(factory=deque, init=False)

    def add(self, activation: Activation, *, has_gradient: bool) -> None:
        """Add an activation; ``has_gradient``: its gradient will come."""
        if self.first is None and not self.variable:
            self.first = activation
        if self.variable and has_gradient:
            self._waiting.append(activation)

    @property
    def oldest(self) -> Activation:
        """The activation that the next gradient belongs to.

        Raises:
            BridgeError: no gradient is due.
        """
        found = self._waiting[0] if self._waiting else self.first
        if found is None:
            raise BridgeError(f"{self.call}: no {self.what} waits for its gradient")
        return found

    def answer(self) -> None:
        """Remove the oldest activation: its gradient is on its way."""
        if self.variable:
            self._waiting.popleft()
