"""`HyperCommGrid`: a module's grid of ranks, its views and its process groups. No torch until a group is created."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pipegrid.core.fields import Name, checked
from pipegrid.topology.errors import GridError, GridKeyError, WorldError
from pipegrid.topology.grid import Dims, Grid, GroupRequest, View, make_view, span_of
from pipegrid.topology.grid_groups import GridGroups, SharedGroup, create_held
from pipegrid.topology.groups import GroupSpec, group_options, unconnected_group
from pipegrid.topology.world import require_default_group, resolve_rank, resolve_world_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class HyperCommGrid:
    """Ranks with named dims, the first varying fastest, with their views and process groups.

    ``rank = rank_offset + sum_i coord_i * prod_{j<i} shape_j``; or, with ``ranks``, the one at that place of them, such
    as ``HyperCommGrid([2], ["dp"], ranks=[0, 2])``. Arithmetic needs no torch and no other rank; only groups do. A job
    with several grids creates all its groups in one call of `create_grid_groups`.

    Args:
        shape: size of each dim.
        dim_names: their names.
        rank_offset: the grid's first rank, where its ranks are consecutive.
        backend: of the groups; None is the default process group's.
        ranks: the grid's ranks, ascending; None: consecutive ones.
        world_size: number of ranks; None is the default process group's, or else WORLD_SIZE of the launcher.

    Raises:
        GridError: sizes and names that are no grid, or ranks that do not ascend or are not as many as its sizes say.
        WorldError: its ranks reach past the world.

    Examples:
        >>> grid = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"], world_size=8)
        >>> grid.get_rank_enum("dp")
        [[0, 2], [1, 3], [4, 6], [5, 7]]
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
        *,
        ranks: Iterable[int] | None = None,
        world_size: int | None = None,
    ) -> None:
        self._base = Grid(shape, dim_names, rank_offset, members=ranks)
        self._views: dict[str, View] = {}
        self._groups = GridGroups()
        self._world_size = resolve_world_size(world_size)
        self._backend: str | None = checked(backend, Name | None, "backend", GridError)
        needed = self.ranks[-1] + 1
        if needed > self._world_size:
            raise WorldError(
                f"a grid of shape {list(self.shape)} at rank_offset {self.rank_offset} needs {needed} ranks, "
                f"but world_size is {self._world_size}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dim."""
        return self._base.shape

    @property
    def dim_names(self) -> tuple[str, ...]:
        """Names of the dims, the fastest first."""
        return self._base.dim_names

    @property
    def rank_offset(self) -> int:
        """The grid's first rank; the others follow it unless the grid was given ``ranks``."""
        return self._base.rank_offset

    @property
    def backend(self) -> str | None:
        """Backend of the groups; None is the default process group's."""
        return self._backend

    @property
    def world_size(self) -> int:
        """Number of ranks in the world."""
        return self._world_size

    @property
    def size(self) -> int:
        """Number of ranks in the grid."""
        return self._base.size

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks, ascending; a range where they are consecutive."""
        return self._base.ranks

    @property
    def views(self) -> tuple[str, ...]:
        """Names of the registered views."""
        return tuple(self._views)

    def __repr__(self) -> str:
        return f"HyperCommGrid{self._base}"

    def dim_size(self, name: str, *, view: str | None = None) -> int:
        """Size of one dim."""
        return self._factorization(view).size_of(name)

    def coords(self, rank: int, *, view: str | None = None) -> dict[str, int]:
        """The rank's coordinate in each dim; `GridError` for a rank outside the grid."""
        return self._factorization(view).coords(rank)

    def rank_at(self, **coords: int) -> int:
        """The rank at these coordinates, one per dim."""
        return self._base.rank_at(coords)

    def is_current_rank_in_grid(self) -> bool:
        """Whether this process's rank is in the grid."""
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
        self, name: str, shape: Sequence[int], dim_names: Sequence[str], shared_dims: Sequence[str] | None = None
    ) -> None:
        """Add a second factorization of the same ranks, for example expert dims.

        Groups over dims that are all in ``shared_dims`` are the grid's own groups; None shares none.
        """
        if checked(name, Name, "the name of a view", GridError) in self._views:
            raise GridError(f"the view name {name!r} is taken")
        self._views[name] = make_view(self._base, name, shape, dim_names, shared_dims)

    def _view(self, name: str) -> View:
        if name not in self._views:
            raise GridKeyError(f"unknown view {name!r}; the registered ones are {list(self._views)}")
        return self._views[name]

    def _factorization(self, view: str | None) -> Grid:
        return self._base if view is None else self._view(view).grid

    def select_dims(self, dims: Dims | None = None, *, view: str | None = None) -> tuple[str, ...]:
        """``dims`` (None: all) in the grid's or the view's order, the fastest first."""
        grid = self._factorization(view)
        return grid.dim_names if dims is None else grid.select(dims)

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
        """Create the groups that vary in ``dims``; returns this rank's, or None for a rank outside the grid.

        All ranks of the grid call this, for the same dims in the same order. Only members take part in a
        group, and groups with the same ranks and options are one.

        Args:
            dims: a name or several, in any order.
            view: the view they belong to; None is the grid itself.
            timeout: of the creation and of the group's operations; None is the backend's default.
            pg_options: the backend's options.
            group_desc: description in torch's logs; None describes a group by its dims and grid.

        Raises:
            GridKeyError: the grid has these groups already.
            GroupCreationTimeoutError: some members did not arrive before the deadline.
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
        """Create several groups in the one order of creation; returns them in the order of ``requests``.

        ``view`` applies to the requests that are dims alone.
        """
        wanted = as_requests(requests, view=view)
        create_grid_groups({self: wanted}, timeout=timeout, pg_options=pg_options, group_desc=group_desc)
        return [self.get_pg(request.dims, view=request.view) for request in wanted]

    def create_places(self, dims: Dims) -> None:
        """Create this rank's group that varies in ``dims`` alone, without the other members, unless it is there.

        `get_pg` finds it. It maps places to ranks, some of which may be dead, and carries no messages.
        """
        request = self.canonical(dims)
        if request not in self._groups:
            ranks = tuple(self.group_ranks(dims))
            group = unconnected_group(ranks, f"{'+'.join(request.dims)} of {self!r}")
            self._groups.hold(request, SharedGroup(group, ranks, "places"))

    def get_pg(self, dims: Dims, *, view: str | None = None) -> ProcessGroup | None:
        """The group of this rank that varies in ``dims``; None for a rank outside the grid.

        Raises:
            GridKeyError: it has not been created.
        """
        return self._groups[self.canonical(dims, view=view)]

    def has_pg(self, dims: Dims, *, view: str | None = None) -> bool:
        """Whether `get_pg` would find the group."""
        return self.canonical(dims, view=view) in self._groups

    def use_pgs(self, requests: Iterable[Dims], *, new: Iterable[Dims]) -> None:
        """Count a user of the groups for ``requests``, of which ``new`` were created for it; see `leave_pgs`."""
        created = {self.canonical(dims) for dims in new}
        for dims in requests:
            self._groups.use(request := self.canonical(dims), new=request in created)

    def leave_pgs(self, requests: Iterable[Dims]) -> None:
        """End one user's use of groups: those that were created for users go with the last; all members call this."""
        self._groups.leave(self.canonical(dims) for dims in requests)

    @property
    def group_count(self) -> int:
        """Number of real groups that this rank holds for the grid, after sharing."""
        return len(self._groups.real)

    def destroy(self) -> None:
        """Destroy each group of the grid that this rank is in, once. The grid can then create again.

        A group that several grids share goes with the last of them. A second call does nothing.
        """
        self._groups.destroy()

    def to_device_mesh(
        self, dims: Dims | None = None, *, view: str | None = None, device_type: str | None = None
    ) -> DeviceMesh | None:
        """The DeviceMesh of this rank's slice of the grid over ``dims``; None for a rank outside the grid.

        A mesh's last dim varies fastest, a grid's first one: the mesh's dims are the grid's in reverse, for example
        ``("dp", "tp")``. It uses the groups that `create_pg` made, one per dim.

        Args:
            dims: in any order; None is all.
            view: the view they belong to.
            device_type: as for DeviceMesh; None is the device that the groups' backend serves.
        """
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        from pipegrid.topology import torch_compat as compat

        names = self.select_dims(dims, view=view)[::-1]
        groups = [group for name in names if (group := self.get_pg(name, view=view)) is not None]
        if not self.is_current_rank_in_grid():
            return None
        if device_type is None:
            device_type = compat.accelerator_of(compat.backends_by_device(dist.get_backend_config(groups[0]))) or "cpu"
        ranks = torch.tensor(list(self.group_ranks(names, view=view)), dtype=torch.int)
        mesh = ranks.reshape([self.dim_size(name, view=view) for name in names])
        return DeviceMesh.from_group(groups, torch.device(device_type).type, mesh, mesh_dim_names=names)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> HyperCommGrid:
        """The grid of a DeviceMesh, with the mesh's own groups, which it never destroys.

        Raises:
            GridError: the mesh has no dim names, or its ranks do not ascend with the last dim fastest.
        """
        names = mesh.mesh_dim_names
        if names is None:
            raise GridError("the DeviceMesh has no mesh_dim_names; the dims of a grid have names")
        ranks: list[int] = mesh.mesh.flatten().tolist()
        if ranks != sorted(ranks):
            raise GridError(
                f"the DeviceMesh {tuple(names)} of ranks {mesh.mesh.tolist()} is not a grid: "
                f"the ranks of a grid ascend, the last dim of the mesh fastest"
            )
        grid = cls(tuple(mesh.mesh.shape)[::-1], names[::-1], ranks=ranks)
        if grid.is_current_rank_in_grid():
            for name in grid.dim_names:
                adopted = SharedGroup(mesh.get_group(name), tuple(grid.group_ranks(name)), "adopted", holders=1)
                grid._groups.hold(GroupRequest(name), adopted)
        return grid


def as_requests(given: Iterable[Dims | GroupRequest] | GroupRequest, *, view: str | None = None) -> list[GroupRequest]:
    """Dims and requests as requests; ``view`` applies to dims alone, and a single name is a list of one."""
    listed = (given,) if isinstance(given, str | GroupRequest) else given
    return [item if isinstance(item, GroupRequest) else GroupRequest(item, view) for item in listed]


def create_grid_groups(
    requests: Mapping[HyperCommGrid, Iterable[Dims | GroupRequest] | GroupRequest],
    *,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> None:
    """Create groups for all grids of the job in one call; each grid's `get_pg` then finds its own.

    Every rank calls this with the same requests. The order of creation is computed from all of them, so grids
    that overlap cannot block each other, and groups of different grids with the same ranks and options are
    one real group, destroyed with the last grid that holds it.

    Args:
        requests: per grid the groups to create: dims (a name, or several) or, for a view, a `GroupRequest`.
        timeout: as in `HyperCommGrid.create_pg`.
        pg_options: as in `HyperCommGrid.create_pg`; one object serves all groups.
        group_desc: as in `HyperCommGrid.create_pg`.

    Raises:
        GridKeyError: a grid has one of the groups already, or a request occurs twice.
        GridError, GridKeyError: a grid has no such dim or view.
        GroupCreationTimeoutError: some members did not arrive before the deadline; no grid has changed then.
    """
    wanted = {}
    here, _ = require_default_group()
    for grid, listed in requests.items():
        held = grid._groups  # noqa: SLF001 -- of this module
        options = group_options(backend=grid.backend, timeout=timeout, pg_options=pg_options, group_desc=group_desc)
        for given in as_requests(listed):
            request = grid.canonical(given.dims, view=given.view)
            if request in held or (held, request) in wanted:
                raise GridKeyError(
                    f"the group {_label(grid, request)} is already made, and its options could differ; use get_pg"
                )
            spec = None
            if here in grid.ranks:
                spec = GroupSpec(grid.group_ranks(request.dims, here, view=request.view), _label(grid, request))
            wanted[held, request] = spec, options
    create_held(wanted)


def _label(grid: HyperCommGrid, request: GroupRequest) -> str:
    view = "" if request.view is None else f"{request.view}:"
    return f"{view}{'+'.join(request.dims)} of {span_of(grid.ranks)}"
