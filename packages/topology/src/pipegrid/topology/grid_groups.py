"""The process groups of one or several grids, created in one order and shared where their ranks are equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from attrs import define
from torch.distributed import ProcessGroup

from pipegrid.topology import torch_compat as compat
from pipegrid.topology._checks import as_kind, shown
from pipegrid.topology.errors import GridShapeError, GroupExistsError
from pipegrid.topology.group_spec import GroupSpec
from pipegrid.topology.hyper_comm_grid import Dims, GroupRequest, HyperCommGrid, as_requests
from pipegrid.topology.process_groups import GroupOptions, create_each, destroy_groups, group_options


@define(eq=False)
class GroupHandle:
    """A real group and how many grids hold it. A group adopted from elsewhere has an owner that never ends."""

    group: ProcessGroup
    ranks: tuple[int, ...]
    options: str
    owners: int = 0

    def release(self) -> None:
        """One grid less; the last one takes the group with it."""
        self.owners -= 1
        if self.owners == 0:
            destroy_groups([self.group])


def create_grid_groups(
    requests: Mapping[HyperCommGrid, Iterable[Dims | GroupRequest] | GroupRequest],
    *,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> None:
    """Make groups for all grids of the job in one call; each grid's `get_pg` then finds its own.

    Every rank calls this with the same requests. The order of creation is computed from all of them, so grids
    that overlap cannot block each other, and groups of different grids with the same ranks and options are
    one real group, torn down with the last grid that holds it.

    Args:
        requests: per grid the groups to make: dims (a name, or several) or, for a view, a `GroupRequest`.
        timeout: deadline of the creation and of the groups' operations; None is the backend's default.
        pg_options: the backend's options; one object serves all groups.
        group_desc: what torch's logs call the groups; None describes each by its dims and grid.

    Raises:
        GroupExistsError: a grid has one of the groups already, or it is asked for twice.
        UnknownDimensionError, UnknownViewError: a name that is not known.
        GridShapeError: a key that is no grid.
        GroupCreationTimeoutError: some members did not come before the deadline; no grid has changed then.
    """
    requests = as_grid_keys(requests)
    wanted = [(grid, request) for grid, listed in requests.items() for request in _canonical(grid, listed)]
    options = {
        grid: group_options(backend=grid.backend, timeout=timeout, pg_options=pg_options, group_desc=group_desc)
        for grid in requests
    }
    here = dist.get_rank()
    specs = {
        (grid, request): GroupSpec(grid.group_ranks(request.dims, here, view=request.view), _label(grid, request))
        for grid, request in wanted
        if here in grid.ranks
    }
    held = {key: _held(key[0], spec, options[key[0]]) for key, spec in specs.items()}
    made = create_each((spec, options[key[0]]) for key, spec in specs.items() if held[key] is None)

    handles: dict[int, GroupHandle] = {}
    for key, spec in specs.items():
        handle = held[key]
        if handle is None:
            text = options[key[0]].text
            group = made[spec, text]
            handle = handles.setdefault(id(group), GroupHandle(group, spec.ranks, text))
        _hold(key[0], key[1], handle)
    for grid, request in wanted:
        if here not in grid.ranks:
            _hold(grid, request, None)


def as_grid_keys(requests: Any) -> dict[HyperCommGrid, Any]:
    """What is asked for, by grid."""
    if not isinstance(requests, Mapping):
        raise GridShapeError(
            f"requests is {shown(requests)}; it must be a dict of grids to the groups to make for each"
        )
    for grid in requests:
        as_kind(grid, "a key of requests", HyperCommGrid, "place() makes them", error=GridShapeError)
    return dict(requests)


def _canonical(grid: HyperCommGrid, listed: Iterable[Dims | GroupRequest] | GroupRequest) -> list[GroupRequest]:
    found: list[GroupRequest] = []
    for given in as_requests(listed):
        request = grid.canonical(given.dims, view=given.view)
        if request in found or grid.has_pg(request.dims, view=request.view):
            raise GroupExistsError(
                f"the group for dimensions {list(request.dims)} of {grid} "
                f"({'its own' if request.view is None else f'view {request.view!r}'}) is already made; "
                f"making it again could differ in its options, so take it with get_pg, or destroy() first"
            )
        found.append(request)
    return found


def _label(grid: HyperCommGrid, request: GroupRequest) -> str:
    view = "" if request.view is None else f"{request.view}:"
    return f"{view}{'+'.join(request.dims)} of {grid.ranks.start}..{grid.ranks.stop - 1}"


def _held(grid: HyperCommGrid, spec: GroupSpec, options: GroupOptions) -> GroupHandle | None:
    """The group that the grid already has for these ranks and options. All members hold it, or none does."""
    for handle in grid._groups.values():  # noqa: SLF001 -- the grid's own torch half
        if handle is not None and (handle.ranks, handle.options) == (spec.ranks, options.text):
            return handle if compat.is_alive(handle.group) else None
    return None


def _hold(grid: HyperCommGrid, request: GroupRequest, handle: GroupHandle | None) -> None:
    if handle is not None and all(handle is not other for other in grid._groups.values()):  # noqa: SLF001
        handle.owners += 1
    grid._groups[request] = handle  # noqa: SLF001


def adopt(grid: HyperCommGrid, request: GroupRequest, group: ProcessGroup, ranks: Sequence[int]) -> None:
    """Let the grid use a group that somebody else made and will destroy."""
    _hold(grid, request, GroupHandle(group, tuple(ranks), "adopted", owners=1))
