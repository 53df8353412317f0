"""The errors of bridges."""

from __future__ import annotations


class BridgeError(ValueError):
    """Base of the errors of bridges."""


class UndeclaredDimError(BridgeError):
    """A dim of a grid, or an axis of a placement, without a declaration of what it does at the boundary."""


class LaneTotalsError(BridgeError):
    """The lanes of the two sides do not hold the same number of samples, or not as many as there are."""


class TilingError(BridgeError):
    """Boxes that leave a hole in the destination, write it twice, or read what a source does not hold."""


class WrongSideError(BridgeError):
    """A method of the source side called on a rank of the destination side only, or the reverse."""


class ShapeError(BridgeError):
    """A tensor whose dtype, number of axes or shape is not what the edge carries."""


class NoBackwardError(BridgeError):
    """A gradient, or an activation that requires one, on an edge declared without backward."""


class PendingGradientError(BridgeError):
    """A gradient for which no activation is in flight."""


class NotReplicatedError(BridgeError):
    """Ranks that should hold the same values hold different ones."""


class CompletionError(RuntimeError):
    """Copies of a stage could not complete each other: one of them died, was ended, or did not come in time."""


class DestroyedError(RuntimeError):
    """A communicator used after `destroy`."""


class VTPTopologyError(BridgeError):
    """Stages of different tensor-parallel sizes that do not fit the world, each other or the layout."""


class StageError(BridgeError):
    """An edge, a stage or a verb that this rank does not have."""


class MissingTensorError(BridgeError, KeyError):
    """A dict of tensors lacks a module that this rank sends for, or names one that it does not."""

    def __str__(self) -> str:
        """The message, not its representation as KeyError has it."""
        return str(self.args[0]) if self.args else ""
