"""A second factorization of the same ranks, and which of its dimensions are the grid's own. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from pipegrid.topology._checks import as_names
from pipegrid.topology.errors import GridShapeError, ViewError
from pipegrid.topology.factorization import Factorization


@frozen
class View:
    """``factorization`` of a grid's ranks; groups over ``shared_dims`` alone are the grid's groups."""

    name: str
    factorization: Factorization
    shared_dims: frozenset[str]


def _shown(side: Factorization, dim: str) -> str:
    groups = side.groups(dim)
    return f"{groups[:4]}{'...' if len(groups) > 4 else ''} of {side}"


def make_view(
    base: Factorization,
    name: str,
    shape: Iterable[int],
    dim_names: Iterable[str],
    shared_dims: Iterable[str] | None,
) -> View:
    """A view of ``base``, checked.

    Two dimensions enumerate to the same groups exactly when their sizes and strides agree (or both have size
    one): the group of a rank is then the same progression on either side. Groups over several shared
    dimensions join the groups over each, so they agree as well.

    Raises:
        ViewError: it covers another number of ranks, is no factorization, or a shared dimension is missing on
            one side or means something else there.
    """
    try:
        factorization = Factorization(shape, dim_names, base.offset)
    except GridShapeError as error:
        raise ViewError(f"view {name!r} of {base} is not well formed: {error}") from error
    if factorization.size != base.size:
        raise ViewError(
            f"view {name!r} {factorization} has {factorization.size} ranks, "
            f"but the grid {base} has {base.size}; both must multiply to the same number"
        )
    shared = list(() if shared_dims is None else as_names(shared_dims, "shared_dims", error=ViewError))
    if len(set(shared)) != len(shared):
        raise ViewError(f"shared_dims {shared} of view {name!r} names a dimension twice; name each once")
    for dim in shared:
        if dim not in base.dim_names or dim not in factorization.dim_names:
            raise ViewError(
                f"shared dimension {dim!r} of view {name!r} must exist in both, but the grid has "
                f"{list(base.dim_names)} and the view {list(factorization.dim_names)}"
            )
        sides = [(side.size_of(dim), side.stride_of(dim)) for side in (base, factorization)]
        if sides[0] != sides[1] and not sides[0][0] == sides[1][0] == 1:
            raise ViewError(
                f"shared dimension {dim!r} of view {name!r} means different groups: "
                f"{_shown(base, dim)} in the grid, but {_shown(factorization, dim)} in the view; "
                f"give it the same size and place on both sides, or do not share it"
            )
    return View(name, factorization, frozenset(shared))
