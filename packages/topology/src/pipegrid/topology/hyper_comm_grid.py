"""`HyperCommGrid`: a module's ranks, their dimensions, views and process groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import field, frozen

from pipegrid.topology._checks import as_dims, as_text, as_tuple, shown
from pipegrid.topology.errors import (
    GridShapeError,
    GridSpanError,
    GroupMissingError,
    UnknownDimensionError,
    UnknownViewError,
    ViewError,
)
from pipegrid.topology.factorization import Factorization
from pipegrid.topology.view import View, make_view
from pipegrid.topology.world import resolve_rank, resolve_world_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from pipegrid.topology.grid_groups import GroupHandle

Dims: TypeAlias = str | Sequence[str]
"""A dimension's name, or several names in any order."""


def _as_dims(value: Dims) -> tuple[str, ...]:
    dims = as_dims(value)
    if not dims:
        raise UnknownDimensionError(f"a group varies in dims {list(dims)}; name at least one dimension")
    return dims


def _as_view(value: str | None) -> str | None:
    return None if value is None else as_text(value, "the view of a group", error=UnknownViewError)


@frozen
class GroupRequest:
    """The groups that vary in ``dims`` of a grid or, where given, of one of its views.

    Raises:
        UnknownDimensionError: no dims, or something that is no name.
        UnknownViewError: ``view`` is neither a name nor None.
    """

    dims: tuple[str, ...] = field(converter=_as_dims)
    view: str | None = field(default=None, converter=_as_view)


def as_requests(given: Iterable[Dims | GroupRequest] | GroupRequest, *, view: str | None = None) -> list[GroupRequest]:
    """What a caller lists as requests; ``view`` applies to those given by dims alone. One name is a list of one."""
    if isinstance(given, str | GroupRequest):
        given = (given,)
    listed = as_tuple(given, "what to make", "dims, or GroupRequests", error=UnknownDimensionError, ordered=False)
    return [item if isinstance(item, GroupRequest) else GroupRequest(item, view) for item in listed]


class HyperCommGrid:
    """A box of consecutive ranks with named dimensions, of which the first varies fastest.

    ``rank = rank_offset + sum_i coord_i * prod_{j<i} shape_j``. Arithmetic needs no torch and no other rank;
    only the groups do. A job with several grids creates all its groups in one call of `create_grid_groups`.

    Args:
        shape: the size of each dimension.
        dim_names: their names.
        rank_offset: the grid's first rank.
        backend: the groups' backend; None is the default process group's.
        world_size: how many ranks there are; None asks the default process group, then WORLD_SIZE.

    Raises:
        GridShapeError: a shape, a name or an offset that is not well formed.
        GridSpanError: the span reaches past the world.
        WorldSizeUnknownError: nothing tells the world size.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
        *,
        world_size: int | None = None,
    ) -> None:
        self._base = Factorization(shape, dim_names, rank_offset)
        self._views: dict[str, View] = {}
        self._groups: dict[GroupRequest, GroupHandle | None] = {}
        self._world_size = resolve_world_size(world_size)
        self._backend = None if backend is None else as_text(backend, "backend", error=GridShapeError)
        if self.ranks.stop > self._world_size:
            raise GridSpanError(
                f"a grid of shape {list(self.shape)} at rank_offset {self.rank_offset} spans the ranks "
                f"{self.ranks.start}..{self.ranks.stop - 1}, but world_size is {self._world_size}; "
                f"start {self.ranks.stop} ranks, or make the grid smaller or place it lower"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension."""
        return self._base.shape

    @property
    def dim_names(self) -> tuple[str, ...]:
        """The dimensions' names, the fastest first."""
        return self._base.dim_names

    @property
    def rank_offset(self) -> int:
        """The grid's first rank."""
        return self._base.offset

    @property
    def backend(self) -> str | None:
        """The groups' backend; None is the default process group's."""
        return self._backend

    @property
    def world_size(self) -> int:
        """How many ranks the world has."""
        return self._world_size

    @property
    def size(self) -> int:
        """How many ranks the grid has."""
        return self._base.size

    @property
    def ranks(self) -> range:
        """The grid's ranks."""
        return self._base.ranks

    @property
    def views(self) -> tuple[str, ...]:
        """The names of the registered views."""
        return tuple(self._views)

    def __repr__(self) -> str:
        return f"HyperCommGrid{self._base}"

    def dim_size(self, name: str, *, view: str | None = None) -> int:
        """The size of one dimension."""
        return self._factorization(view).size_of(name)

    def coords(self, rank: int, *, view: str | None = None) -> dict[str, int]:
        """The rank's coordinate in each dimension; `CoordinateError` for a rank outside the grid."""
        return self._factorization(view).coords(rank)

    def rank_at(self, **coords: int) -> int:
        """The rank at these coordinates, one for each dimension."""
        return self._base.rank_at(coords)

    def is_current_rank_in_grid(self) -> bool:
        """Whether this process's rank is in the grid's span."""
        return resolve_rank() in self.ranks

    def get_rank_enum(self, dims: Dims, *, view: str | None = None) -> list[list[int]]:
        """The groups that vary in ``dims``, each a list of global ranks; groups and ranks ascend.

        Costs time and memory in the order of the grid's size; `group_ranks` is one rank's group alone.
        """
        return self._factorization(view).groups(dims)

    def group_ranks(self, dims: Dims, rank: int | None = None, *, view: str | None = None) -> Sequence[int]:
        """The ranks of the group that varies in ``dims`` and holds ``rank``, ascending.

        A range where the ranks form one; costs time in the order of the group's size, not the world's.
        """
        return self._factorization(view).group_of(resolve_rank(rank), dims)

    def register_view(
        self,
        name: str,
        shape: Sequence[int],
        dim_names: Sequence[str],
        shared_dims: Sequence[str] | None = None,
    ) -> None:
        """Add a second factorization of the same ranks, for example expert dimensions.

        Groups over dimensions that are all in ``shared_dims`` are the grid's own groups; None shares none.

        Raises:
            ViewError: the name is taken, or the view does not fit the grid (the error shows both sides).
        """
        if as_text(name, "the name of a view", error=ViewError) in self._views:
            raise ViewError(f"the view name {name!r} is taken; choose one that is not: {list(self._views)} are")
        self._views[name] = make_view(self._base, name, shape, dim_names, shared_dims)

    def _view(self, name: str) -> View:
        if not isinstance(name, str) or name not in self._views:
            raise UnknownViewError(
                f"unknown view {shown(name)}; the registered ones are {list(self._views)}; call register_view first"
            )
        return self._views[name]

    def _factorization(self, view: str | None) -> Factorization:
        return self._base if view is None else self._view(view).factorization

    def select_dims(self, dims: Dims | None = None, *, view: str | None = None) -> tuple[str, ...]:
        """``dims`` (None: all) checked and in order, the fastest first."""
        factorization = self._factorization(view)
        return factorization.dim_names if dims is None else factorization.select(dims)

    def canonical(self, dims: Dims, *, view: str | None = None) -> GroupRequest:
        """The request in its one spelling: dims in the grid's order, shared ones in the grid's own view."""
        selected = self._factorization(view).select(dims)
        if view is not None and self._view(view).shared_dims.issuperset(selected):
            return GroupRequest(self._base.select(selected))
        return GroupRequest(selected, view)

    def create_pg(
        self,
        dims: Dims,
        *,
        view: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> ProcessGroup | None:
        """Make the groups that vary in ``dims``; this rank's one, or None for a rank outside the grid.

        All ranks of the grid call this, for the same dims in the same order. Only members take part in a
        group, and groups with the same ranks and options are one.

        Args:
            dims: a name or several, in any order.
            view: the view they belong to; None is the grid itself.
            timeout: deadline of the creation and of the group's operations; None is the backend's default.
            pg_options: the backend's options.
            group_desc: what torch's logs call the group.

        Raises:
            GroupExistsError: the grid has these groups already.
            UnknownDimensionError, UnknownViewError: a name that is not known.
            GroupCreationTimeoutError: some members did not come before the deadline.
        """
        made = self.create_pgs([dims], view=view, timeout=timeout, pg_options=pg_options, group_desc=group_desc)
        return made[0]

    def create_pgs(
        self,
        requests: Iterable[Dims | GroupRequest],
        *,
        view: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> list[ProcessGroup | None]:
        """Make several groups at once, in the one order of creation; returned in the order of ``requests``.

        ``view`` applies to the requests that are given by dims alone.
        """
        from pipegrid.topology.grid_groups import create_grid_groups

        wanted = as_requests(requests, view=view)
        create_grid_groups({self: wanted}, timeout=timeout, pg_options=pg_options, group_desc=group_desc)
        return [self.get_pg(request.dims, view=request.view) for request in wanted]

    def get_pg(self, dims: Dims, *, view: str | None = None) -> ProcessGroup | None:
        """This rank's group that varies in ``dims``; None for a rank outside the grid.

        Raises:
            GroupMissingError: nobody has made it.
        """
        request = self.canonical(dims, view=view)
        if request not in self._groups:
            raise GroupMissingError(
                f"no group for dimensions {list(request.dims)}{_of_view(request)} has been made; call create_pg first"
            )
        handle = self._groups[request]
        return None if handle is None else handle.group

    def has_pg(self, dims: Dims, *, view: str | None = None) -> bool:
        """Whether `get_pg` would find the group."""
        return self.canonical(dims, view=view) in self._groups

    @property
    def group_count(self) -> int:
        """How many real groups this rank holds for the grid, after sharing."""
        return len({id(handle) for handle in self._groups.values() if handle is not None})

    def destroy(self) -> None:
        """Tear down each group of the grid that this rank is in, once. The grid can then create again.

        A group that several grids share goes with the last of them. Calling this again does nothing.
        """
        handles = {id(handle): handle for handle in self._groups.values() if handle is not None}
        self._groups.clear()
        for handle in reversed(handles.values()):
            handle.release()

    def to_device_mesh(
        self, dims: Dims | None = None, *, view: str | None = None, device_type: str | None = None
    ) -> DeviceMesh | None:
        """A DeviceMesh over ``dims`` (None: all) on the groups that `create_pg` made; see `to_device_mesh`."""
        from pipegrid.topology.device_mesh import to_device_mesh

        return to_device_mesh(self, dims, view=view, device_type=device_type)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> HyperCommGrid:
        """The grid of a DeviceMesh, with the mesh's own groups; see `from_device_mesh`."""
        from pipegrid.topology.device_mesh import from_device_mesh

        return from_device_mesh(mesh)


def _of_view(request: GroupRequest) -> str:
    return "" if request.view is None else f" of view {request.view!r}"
