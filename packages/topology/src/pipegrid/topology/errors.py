"""The errors of this package; each text has the value, the rule and, where it is not obvious, the remedy."""


class GridError(ValueError):
    """A shape, dimension, view, coordinate or group that no grid has, that does not fit, or that occurs twice."""


class WorldError(RuntimeError):
    """The world is unknown or too small for a grid, or this rank is in none of the grids."""


class GridKeyError(KeyError):
    """The grid has no such view or group yet, or has it already."""

    def __str__(self) -> str:
        """The message, without the quotes of KeyError."""
        return str(self.args[0]) if self.args else ""


class GroupCreationTimeoutError(RuntimeError):
    """Members of a group did not arrive to create or to connect it before the deadline, or their store is silent."""


class GroupStoreError(GroupCreationTimeoutError):
    """The store of a group's creation barrier did not answer; no member is known to be missing."""


class GroupConnectionError(RuntimeError):
    """The backend did not connect the members of a group, or the store of their barrier failed."""


class PlacementError(ValueError):
    """Modules do not fit the world or the roles: a gap, a partial overlap, a leftover, too few ranks, other modules."""
