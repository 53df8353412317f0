"""The groups of one module, and of several, as the schedules take them. No torch until a group is looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import attrs
from attrs import field, frozen

from pipegrid.topology._checks import as_kind, as_mapping, as_text, shown
from pipegrid.topology.errors import RoleError
from pipegrid.topology.hyper_comm_grid import HyperCommGrid
from pipegrid.topology.roles import MIMO_LANGUAGE_MODULE_KEY

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DIMS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "dp_cp": ("dp", "cp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
}
# In the view of the experts.
_EXPERT_DIMS: dict[str, tuple[str, ...]] = {
    "ep": ("ep",),
    "expt_tp": ("expt_tp",),
    "expt_dp": ("expt_dp",),
    "tp_ep": ("expt_tp", "ep"),
    "tp_ep_pp": ("expt_tp", "ep", "pp"),
}


@frozen
class ProcessGroupCollection:
    """This rank's groups of one module, by what they are for; None where there is none.

    Functions that take a collection accept any object with the same attributes.

    Raises:
        RoleError: something that is no process group.
    """

    tp: ProcessGroup | None = None
    """Tensor parallel."""
    cp: ProcessGroup | None = None
    """Context (sequence) parallel."""
    pp: ProcessGroup | None = None
    """Pipeline stages."""
    dp: ProcessGroup | None = None
    """Data parallel replicas."""
    mp: ProcessGroup | None = None
    """tp and pp: all ranks that hold one replica's parameters."""
    tp_cp: ProcessGroup | None = None
    """tp and cp."""
    dp_cp: ProcessGroup | None = None
    """dp and cp: all ranks that reduce the same dense gradients."""
    tp_dp_cp: ProcessGroup | None = None
    """tp, dp and cp: all ranks of one stage."""
    ep: ProcessGroup | None = None
    """Experts."""
    expt_tp: ProcessGroup | None = None
    """Tensor parallel inside an expert."""
    expt_dp: ProcessGroup | None = None
    """Replicas of an expert."""
    tp_ep: ProcessGroup | None = None
    """expt_tp and ep."""
    tp_ep_pp: ProcessGroup | None = None
    """expt_tp, ep and pp: all ranks that hold one replica's experts."""
    embd: ProcessGroup | None = None
    """The stages that hold the tied word embedding."""
    pos_embd: ProcessGroup | None = None
    """The stages that hold the position embedding."""

    def __attrs_post_init__(self) -> None:
        for attribute in attrs.fields(type(self)):
            group = getattr(self, attribute.name)
            # By its methods: this half works without torch.
            if group is not None and not (
                callable(getattr(group, "rank", None)) and callable(getattr(group, "size", None))
            ):
                raise RoleError(f"{attribute.name} is {shown(group)}; it must be a process group, or None")

    @classmethod
    def from_grid(
        cls,
        grid: HyperCommGrid,
        *names: str,
        expert_view: str | None = None,
        **others: ProcessGroup | None,
    ) -> Self:
        """The collection of the groups that were made for ``grid``.

        A dimension that the grid does not have counts as size one: ``dp_cp`` of a grid without "cp" is its dp
        group, and ``cp`` is None.

        Args:
            grid: where the groups were made with `create_pg`.
            names: the groups that must be there; none named takes whichever were made.
            expert_view: the view that has ep, expt_tp and expt_dp; None looks in the grid itself.
            others: groups made elsewhere, for example ``embd``.

        Raises:
            GroupMissingError: a named group was not made.
            RoleError: a name that no collection has.
        """
        as_kind(grid, "grid", HyperCommGrid, "place() makes them", error=RoleError)
        for name in names:
            as_text(name, "the name of a group", error=RoleError)
        known = {**dict.fromkeys(_DIMS), **dict.fromkeys(_EXPERT_DIMS, expert_view)}
        fields = [attribute.name for attribute in attrs.fields(cls)]
        unknown = [*(name for name in names if name not in known), *(name for name in others if name not in fields)]
        if unknown:
            raise RoleError(
                f"unknown groups {unknown}; those of a grid are {list(known)}, and besides there are "
                f"{[name for name in fields if name not in known]}"
            )
        found: dict[str, Any] = dict(others)
        for name in names or known:
            view = known[name]
            present = grid.select_dims(view=view)
            dims = [dim for dim in (_DIMS | _EXPERT_DIMS)[name] if dim in present]
            if dims and (names or grid.has_pg(dims, view=view)):
                found.setdefault(name, grid.get_pg(dims, view=view))
        return cls(**found)


_NO_COLLECTION = (type(None), bool, int, float, str, bytes, list, tuple, set, dict)


def _as_collections(value: Mapping[str, ProcessGroupCollection]) -> dict[str, ProcessGroupCollection]:
    collections = as_mapping(value, "modules", "names to ProcessGroupCollections", error=RoleError)
    for name, collection in collections.items():
        if isinstance(collection, _NO_COLLECTION):
            raise RoleError(f"the collection of {name!r} is {shown(collection)}; give a ProcessGroupCollection")
    return collections


@frozen
class MultiModuleProcessGroupCollection:
    """The collection of each module that this rank is in, and which of them is the language module.

    Raises:
        RoleError: ``language_module_name`` is not None and none of the modules; or no collections by name.
    """

    modules: Mapping[str, ProcessGroupCollection] = field(converter=_as_collections)
    language_module_name: str | None = field()

    @language_module_name.default
    def _language_where_present(self) -> str | None:
        return MIMO_LANGUAGE_MODULE_KEY if MIMO_LANGUAGE_MODULE_KEY in self.modules else None

    def __attrs_post_init__(self) -> None:
        named = self.language_module_name
        if named is not None and as_text(named, "language_module_name", error=RoleError) not in self.modules:
            raise RoleError(
                f"the language module {self.language_module_name!r} is none of {list(self.modules)}; "
                f"give one of them, or None for a rank without it"
            )

    @classmethod
    def from_grids(
        cls,
        grids: Mapping[str, HyperCommGrid],
        *names: str,
        expert_views: Mapping[str, str] | None = None,
    ) -> Self:
        """The collections of those grids that this rank is in.

        Args:
            grids: module name to grid.
            names: the groups that must be there, as for one grid.
            expert_views: module name to the view that has its expert dimensions.

        Raises:
            RoleError: something that is no grid, or a view for a module without one.
            GroupMissingError: a named group was not made.
        """
        grids = as_mapping(grids, "grids", "module names to grids", error=RoleError)
        for name, grid in grids.items():
            as_kind(grid, f"the grid of {name!r}", HyperCommGrid, "place() makes them", error=RoleError)
        views = (
            {} if expert_views is None else as_mapping(expert_views, "expert_views", "names to views", error=RoleError)
        )
        if not views.keys() <= grids.keys():
            raise RoleError(f"expert_views names modules {list(views)}; those with grids are {list(grids)}")
        return cls(
            {
                module: ProcessGroupCollection.from_grid(grid, *names, expert_view=views.get(module))
                for module, grid in grids.items()
                if grid.is_current_rank_in_grid()
            }
        )

    @property
    def language(self) -> ProcessGroupCollection | None:
        """The language module's collection, or None for a rank without it."""
        return None if self.language_module_name is None else self.modules[self.language_module_name]

    def __getitem__(self, module: str) -> ProcessGroupCollection:
        if as_text(module, "the name of a module", error=RoleError) not in self.modules:
            raise RoleError(f"this rank is not in module {module!r}; it is in {list(self.modules)}")
        return self.modules[module]

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)
