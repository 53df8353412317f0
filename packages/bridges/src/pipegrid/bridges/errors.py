"""The errors of bridges."""

from __future__ import annotations

from pipegrid.transport.errors import CollectiveFailedError, P2PLaneDeadError


class BridgeError(ValueError):
    """Sides, samples, stages or copies that do not fit each other; the base of the errors of bridges.

    Also a call that this rank, an edge or the state of a step does not have: an edge, a stage, a side or a verb of
    other ranks; a gradient, or an activation that requires one, on an edge without backward; a gradient for which no
    activation is in flight.
    """


class ShapeError(BridgeError):
    """A tensor whose dtype, number of axes or shape is not what the edge carries."""


class MissingTensorError(BridgeError, KeyError):
    """A dict of tensors lacks a module that this rank sends for, or names one that it does not."""

    def __str__(self) -> str:
        """The message, not its representation as KeyError has it."""
        return str(self.args[0]) if self.args else ""


# Names of one thing each that no caller handled differently; for this version.
UndeclaredDimError = LaneTotalsError = TilingError = VTPTopologyError = NotReplicatedError = BridgeError
StageError = WrongSideError = NoBackwardError = PendingGradientError = BridgeError
CompletionError = CollectiveFailedError
DestroyedError = P2PLaneDeadError
