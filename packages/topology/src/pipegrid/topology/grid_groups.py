"""The groups that grids hold: created together in one order, shared where ranks and options are equal. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from attrs import define, field

from pipegrid.topology.ending import destroy_groups
from pipegrid.topology.errors import GridKeyError
from pipegrid.topology.grid import GroupRequest
from pipegrid.topology.groups import GroupOptions, GroupSpec, create_each

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@define(eq=False)
class SharedGroup:
    """A real group and the number of its holders, grids or another owner; it is destroyed with the last one."""

    group: ProcessGroup
    ranks: tuple[int, ...]
    options: str
    holders: int = 0

    def release(self) -> bool:
        """One holder less; whether that was the last one."""
        self.holders -= 1
        return self.holders == 0


@define(eq=False)
class GridGroups:
    """Process groups of this rank in one grid, by canonical request; None for a rank outside the grid."""

    _groups: dict[GroupRequest, SharedGroup | None] = field(factory=dict)
    _users: dict[GroupRequest, int] = field(factory=dict, init=False)  # of groups that go with the last of them

    def __contains__(self, request: GroupRequest) -> bool:
        return request in self._groups

    def __getitem__(self, request: GroupRequest) -> ProcessGroup | None:
        if request not in self._groups:
            view = "" if request.view is None else f" of view {request.view!r}"
            raise GridKeyError(f"no group for dims {list(request.dims)}{view} has been made; call create_pg first")
        shared = self._groups[request]
        return None if shared is None else shared.group

    @property
    def real(self) -> list[SharedGroup]:
        """Each real group once."""
        return list({id(shared): shared for shared in self._groups.values() if shared is not None}.values())

    def find(self, spec: GroupSpec, options: GroupOptions) -> SharedGroup | None:
        """The group held for these ranks and options. Either all members find it, or none does."""
        from pipegrid.topology.torch_compat import is_alive

        for shared in self.real:
            if (shared.ranks, shared.options) == (spec.ranks, options.text):
                return shared if is_alive(shared.group) else None
        return None

    def hold(self, request: GroupRequest, shared: SharedGroup | None) -> None:
        """Hold a group, or None, for the request."""
        if shared is not None and all(shared is not other for other in self.real):
            shared.holders += 1
        self._groups[request] = shared

    def use(self, request: GroupRequest, *, new: bool) -> None:
        """One user more, for whom the group is ``new`` or was there; one that was there before any user stays."""
        if new or request in self._users:
            self._users[request] = self._users.get(request, 0) + 1

    def leave(self, requests: Iterable[GroupRequest]) -> None:
        """One user less of each; groups without users go, unless they were there before any."""
        held = self.real
        for request in requests:
            if request in self._users:
                self._users[request] -= 1
                if not self._users[request]:
                    del self._users[request], self._groups[request]
        left = {id(shared) for shared in self.real}
        destroy_groups([shared.group for shared in held if id(shared) not in left and shared.release()])

    def destroy(self) -> None:
        """Release every group, and destroy those that no other grid holds, latest first."""
        held = self.real
        self._groups.clear()
        self._users.clear()
        destroy_groups([shared.group for shared in held if shared.release()])


def create_held(wanted: Mapping[tuple[GridGroups, GroupRequest], tuple[GroupSpec | None, GroupOptions]]) -> None:
    """Create and hold the wanted groups of several grids, in one order; None is a rank outside the grid."""
    specs = {key: (spec, options) for key, (spec, options) in wanted.items() if spec is not None}
    found = {(groups, request): groups.find(*specs[groups, request]) for groups, request in specs}
    made = create_each(item for key, item in specs.items() if found[key] is None)
    new: dict[int, SharedGroup] = {}
    for (groups, request), (spec, options) in specs.items():
        shared = found[groups, request]
        if shared is None:
            group = made[spec, options.text]
            shared = new.setdefault(id(group), SharedGroup(group, spec.ranks, options.text))
        groups.hold(request, shared)
    for groups, request in wanted.keys() - specs.keys():
        groups.hold(request, None)
