"""The errors of this package; each text has the value, the rule and, where it is not obvious, the remedy."""

from __future__ import annotations


class _ReadableKeyError(KeyError):
    """A KeyError whose `str` is its message, without quotes."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class GridShapeError(ValueError):
    """A shape, dimension names or a number that no grid has."""


class GridSpanError(RuntimeError):
    """A grid's span reaches past the world."""


class WorldSizeUnknownError(RuntimeError):
    """The world size, or the rank of this process, is unknown."""


class CoordinateError(ValueError):
    """A rank outside a grid, or coordinates that no rank of the grid has."""


class UnknownDimensionError(ValueError):
    """The grid or the view has no such dimension; or one occurs twice among the arguments."""


class UnknownViewError(_ReadableKeyError):
    """The grid has no such view."""


class ViewError(ValueError):
    """A view does not fit its grid."""


class GroupSpecError(ValueError):
    """The description of a process group is not well formed, or contradicts the world."""


class GroupExistsError(_ReadableKeyError):
    """The grid has the group already."""


class GroupMissingError(_ReadableKeyError):
    """The grid does not have the group yet."""


class GroupCreationTimeoutError(RuntimeError):
    """Some members of a group did not come to create it, or did not connect, before the deadline."""


class GroupConnectionError(RuntimeError):
    """The backend did not connect the members of a group, or the store at which they meet has failed."""


class GroupStoreError(GroupCreationTimeoutError):
    """The store at which the members of a group meet did not answer; no member is known to be missing."""


class PlacementError(ValueError):
    """Modules do not fit the world: a gap, a partial overlap, a leftover, or too few ranks."""


class RoleError(ValueError):
    """The modules of a role are not the modules of the job."""


class RankNotInGridError(RuntimeError):
    """The rank is in none of the grids."""
