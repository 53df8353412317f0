"""Protocols of a world, the groups and the communicator of one epoch, as `Survivors` uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pipegrid.gradients.main_grad import Modules


class World(Protocol):
    """The means of communication in one epoch: groups, a communicator, a plan.

    Examples:
        >>> from types import SimpleNamespace
        >>> world: World = SimpleNamespace(abort=print, close=lambda: None)
        >>> world.abort("rank 1 died")
        rank 1 died
    """

    def abort(self, cause: str) -> None:
        """End all connections, so that no rank waits for this one, nor this one for others. From any thread, or twice.

        ``cause`` is for the errors of those that wait.
        """
        ...

    def close(self) -> None:
        """Free everything: together with the other ranks, or alone after `abort`."""
        ...


@runtime_checkable
class ConfiguringWorld(World, Protocol):
    """A world with groups that modules find in their ``config``, such as those of tied parameters."""

    def configure(self, modules: Modules) -> None:
        """Set the configs of ``modules``, until `close`. Called once, before the first function of the epoch."""
        ...


@runtime_checkable
class OpenWorld(World, Protocol):
    """A world that new processes may join."""

    @property
    def peers(self) -> ProcessGroup:
        """The ranks with the same state as this one, itself among them: from one of them a new process gets it."""
        ...
