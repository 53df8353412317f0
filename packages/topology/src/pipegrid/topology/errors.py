"""Every error this package raises on purpose; each says the value, the rule and the remedy."""

from __future__ import annotations


class _ReadableKeyError(KeyError):
    """A KeyError whose text is its message, not the quoted representation of it."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class GridShapeError(ValueError):
    """Something that is no grid, or whose shape, dimension names or numbers are not those of one."""


class GridSpanError(RuntimeError):
    """A grid's span reaches past the world."""


class WorldSizeUnknownError(RuntimeError):
    """Nothing says how many ranks the world has, or which of them this process is."""


class CoordinateError(ValueError):
    """A rank outside a grid, or coordinates that no rank of the grid has."""


class UnknownDimensionError(ValueError):
    """A dimension was named that the grid or the view does not have, or the same one twice."""


class UnknownViewError(_ReadableKeyError):
    """A view was named that the grid does not have."""


class ViewError(ValueError):
    """A view does not fit its grid."""


class GroupSpecError(ValueError):
    """The description of a process group is not well formed, or contradicts the world."""


class GroupExistsError(_ReadableKeyError):
    """A grid was asked to make a group that it has already made."""


class GroupMissingError(_ReadableKeyError):
    """A grid was asked for a group that nobody made."""


class GroupCreationTimeoutError(RuntimeError):
    """Some members of a group did not come to create it before the deadline."""


class PlacementError(ValueError):
    """Modules do not fit the world: a gap, a partial overlap, a leftover, or too few ranks."""


class RoleError(ValueError):
    """The modules of a role are not the modules of the job."""


class RankNotInGridError(RuntimeError):
    """The rank takes part in none of the grids it was asked about."""
