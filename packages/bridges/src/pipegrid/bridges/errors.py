"""The errors of bridges."""

from pipegrid.reshard.errors import BridgeError
from pipegrid.reshard.errors import ShapeError as ShapeError


class MissingTensorError(BridgeError, KeyError):
    """A dict of tensors lacks a module that this rank sends for, or names one that it does not."""

    def __str__(self) -> str:
        """The message, not its representation as KeyError has it."""
        return str(self.args[0]) if self.args else ""
