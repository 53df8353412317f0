"""Process groups of this rank for one module, and for several, as schedules take them. No torch."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, Self

from attrs import define, field, frozen

from pipegrid.core.fields import checked
from pipegrid.topology.errors import PlacementError
from pipegrid.topology.hyper_comm_grid import HyperCommGrid
from pipegrid.topology.job.roles import MIMO_LANGUAGE_MODULE_KEY

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


@define(slots=False)
class ProcessGroupCollection:
    """Process groups of this rank for one module, by purpose; None where there is none.

    Functions that take a collection accept any object with the same attributes, which may be assigned after it was
    made: ``groups = ProcessGroupCollection()``, ``groups.dp = ...``.

    Attributes:
        tp: tensor parallel.
        cp: context (sequence) parallel.
        pp: pipeline stages.
        dp: data parallel replicas.
        mp: tp and pp: all ranks that hold one replica's parameters.
        tp_cp: tp and cp.
        dp_cp: dp and cp: all ranks that reduce the same dense gradients.
        tp_dp_cp: tp, dp and cp: all ranks of one stage.
        ep: experts.
        expt_tp: tensor parallel inside an expert.
        expt_dp: replicas of an expert.
        tp_ep: expt_tp and ep.
        tp_ep_pp: expt_tp, ep and pp: all ranks that hold one replica's experts.
        embd: the stages that hold the tied word embedding.
        pos_embd: the stages that hold the position embedding.
        grid: of the groups, whose sizes say which groups a job needs; None: made by hand, and not known.

    Examples:
        >>> groups = ProcessGroupCollection()
        >>> groups.dp is None
        True
    """

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    mp: ProcessGroup | None = None
    tp_cp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    tp_dp_cp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    expt_tp: ProcessGroup | None = None
    expt_dp: ProcessGroup | None = None
    tp_ep: ProcessGroup | None = None
    tp_ep_pp: ProcessGroup | None = None
    embd: ProcessGroup | None = None
    pos_embd: ProcessGroup | None = None
    grid: HyperCommGrid | None = field(default=None, eq=False, repr=False)

    @classmethod
    def from_grid(
        cls, grid: HyperCommGrid, *names: str, expert_view: str | None = None, **others: ProcessGroup | None
    ) -> Self:
        """The collection of ``grid``'s groups.

        A dim that the grid does not have counts as size one: ``dp_cp`` of a grid without "cp" is its dp group, and
        ``cp`` is None.

        Args:
            grid: with groups from `create_pg`.
            names: of required groups; none takes all groups that exist.
            expert_view: the view with ep, expt_tp and expt_dp; None is the grid itself.
            others: further groups, for example ``embd``.

        Raises:
            GridKeyError: a named group has not been created.
            PlacementError: a name that no grid has.
        """
        known = {**dict.fromkeys(_DIMS), **dict.fromkeys(_EXPERT_DIMS, expert_view)}
        if not known.keys() >= set(names):
            raise PlacementError(f"groups {list(names)} must be some of {list(known)}")
        found: dict[str, Any] = dict(others)
        for name in names or known:
            view = known[name]
            present = grid.select_dims(view=view)
            dims = [dim for dim in (_DIMS | _EXPERT_DIMS)[name] if dim in present]
            if dims and (names or grid.has_pg(dims, view=view)):
                found.setdefault(name, grid.get_pg(dims, view=view))
        return cls(**found, grid=grid)


_BY_NAME: Any = object()
"""The language module is the one called "language", if there is one."""


def _copied(modules: Mapping[str, ProcessGroupCollection]) -> dict[str, ProcessGroupCollection]:
    return dict(modules)


@frozen(init=False)
class MultiModuleProcessGroupCollection:
    """The collection of each module that this rank is in, and which of them is the language module.

    Args:
        modules: the collections by module; ``module_pgs`` is the same.
        language_module_name: None: this rank is not in it. The default is "language", where a module is called so;
            ``language_model_module_name`` is the same.

    Raises:
        PlacementError: a language module without a collection, or an argument under both of its names.

    Examples:
        >>> groups = MultiModuleProcessGroupCollection({"images": ProcessGroupCollection()}, None)
        >>> groups.has_language_model(), list(groups.keys())
        (False, ['images'])
    """

    modules: Mapping[str, ProcessGroupCollection] = field(converter=_copied)
    language_module_name: str | None = field()

    def __init__(
        self,
        modules: Mapping[str, ProcessGroupCollection] | None = None,
        language_module_name: str | None = _BY_NAME,
        *,
        module_pgs: Mapping[str, ProcessGroupCollection] | None = None,
        language_model_module_name: str | None = _BY_NAME,
    ) -> None:
        given = module_pgs if modules is None else modules
        if given is None or None not in (modules, module_pgs):
            raise PlacementError("modules and module_pgs are names of one argument, collections by module; give one")
        given = checked(given, Mapping[str, Any], "modules", PlacementError)
        if _BY_NAME not in (language_module_name, language_model_module_name):
            raise PlacementError("language_module_name and language_model_module_name are names of one argument")
        language = language_model_module_name if language_module_name is _BY_NAME else language_module_name
        if language is _BY_NAME:
            language = MIMO_LANGUAGE_MODULE_KEY if MIMO_LANGUAGE_MODULE_KEY in given else None
        self.__attrs_init__(given, language)
        if self.language_module_name not in (None, *self.modules):
            raise PlacementError(f"the language module {self.language_module_name!r} is none of {list(self.modules)}")

    @classmethod
    def from_grids(
        cls, grids: Mapping[str, HyperCommGrid], *names: str, expert_views: Mapping[str, str] | None = None
    ) -> Self:
        """The collections of those grids that this rank is in.

        Args:
            grids: module name to grid.
            names: of required groups, as for one grid.
            expert_views: module name to the view with its expert dims.
        """
        views = {} if expert_views is None else expert_views
        if not views.keys() <= grids.keys():
            raise PlacementError(f"expert_views has modules {list(views)}; those with grids are {list(grids)}")
        here = {module: grid for module, grid in grids.items() if grid.is_current_rank_in_grid()}
        return cls(
            {
                module: ProcessGroupCollection.from_grid(grid, *names, expert_view=views.get(module))
                for module, grid in here.items()
            }
        )

    @property
    def language(self) -> ProcessGroupCollection | None:
        """The language module's collection, or None for a rank without it."""
        return None if self.language_module_name is None else self.modules[self.language_module_name]

    @property
    def module_pgs(self) -> Mapping[str, ProcessGroupCollection]:
        """The same as `modules`, under Megatron's name."""
        return self.modules

    @property
    def language_model_module_name(self) -> str | None:
        """The same as `language_module_name`, under Megatron's name."""
        return self.language_module_name

    def has_language_model(self) -> bool:
        """Whether this rank is in the language module."""
        return self.language_module_name is not None

    def get_language_model_collection(self) -> ProcessGroupCollection:
        """The language module's collection; `PlacementError` on a rank without it."""
        return self[self.language_module_name or MIMO_LANGUAGE_MODULE_KEY]

    def get_language_model_cp_size(self) -> int:
        """Ranks of the language module's cp group; `PlacementError` on a rank without the module."""
        group = self.get_language_model_collection().cp
        return 1 if group is None else group.size()

    def get_module_collection(self, module_name: str) -> ProcessGroupCollection:
        """The collection of a module; `PlacementError` on a rank without it."""
        return self[module_name]

    def keys(self) -> KeysView[str]:
        """The modules that this rank is in."""
        return self.modules.keys()

    def values(self) -> ValuesView[ProcessGroupCollection]:
        """The collections of the modules that this rank is in."""
        return self.modules.values()

    def items(self) -> ItemsView[str, ProcessGroupCollection]:
        """The modules with their collections."""
        return self.modules.items()

    def __getitem__(self, module: str) -> ProcessGroupCollection:
        if module not in self.modules:
            raise PlacementError(f"this rank is not in module {module!r}; it is in {list(self.modules)}")
        return self.modules[module]

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)
