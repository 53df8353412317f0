"""The modules that a rank takes part in, and its stage in each. No torch and no process groups."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Self

from attrs import field, frozen
from attrs.converters import optional

from pipegrid.core.fields import Name, checked
from pipegrid.topology.errors import PlacementError, WorldError
from pipegrid.topology.grid import Relation, relation, span_of
from pipegrid.topology.hyper_comm_grid import HyperCommGrid
from pipegrid.topology.world import resolve_rank

MIMO_LANGUAGE_MODULE_KEY = "language"
"""The name of the language module in every map of modules."""


class ModuleLayout(enum.Enum):
    """The arrangement of the modules on the ranks."""

    UNIFIED = "unified"
    """No grids: all modules share all ranks and their parallelism."""
    NON_COLOCATED = "non_colocated"
    """Each rank runs modules of one grid."""
    COLOCATED = "colocated"
    """Modules with grids of their own share ranks."""


@frozen
class ModuleStageInfo:
    """A rank's place in the pipeline of one module.

    Attributes:
        is_first_stage: whether it holds the first stage.
        is_last_stage: whether it holds the last stage.
    """

    is_first_stage: bool
    is_last_stage: bool


def _copied(modules: Mapping[str, ModuleStageInfo]) -> dict[str, ModuleStageInfo]:
    return dict(modules)


def _names(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):  # a string lists its letters
        raise PlacementError(f"module names are {names!r}; give a list: [{names!r}]")
    return tuple(checked(names, Iterable[Name], "module names", PlacementError))


def _name_set(names: Iterable[str]) -> frozenset[str]:
    return frozenset(_names(names))


@frozen
class RankRole:
    """The modules that a rank takes part in, its stage in each, and how the job's modules lie on the ranks.

    Args:
        modules: stage of each module that this rank is in.
        mode: the placement of the modules.
        sources: modules that read the batch's inputs; None is every modality module of this rank or, where it has none,
            the language module. A language model that reads text beside image features is a source as well.
        sinks: modules that read the batch's labels.

    Examples:
        >>> grids = place({"images": {"dp": 2}, "language": {"pp": 2}}, world_size=4)
        >>> role = RankRole.from_grid_map(grids, ["images"], rank=3)
        >>> role.has_language_module, role.is_last_stage("language")
        (True, True)
    """

    modules: dict[str, ModuleStageInfo] = field(factory=dict, converter=_copied)
    mode: ModuleLayout = ModuleLayout.UNIFIED
    sources: frozenset[str] | None = field(default=None, converter=optional(_name_set), kw_only=True)
    sinks: frozenset[str] = field(default=(MIMO_LANGUAGE_MODULE_KEY,), converter=_name_set, kw_only=True)

    @classmethod
    def unified(cls, module_names: Iterable[str]) -> Self:
        """The role of every rank where there are no grids: each module, first and last stage."""
        whole = ModuleStageInfo(is_first_stage=True, is_last_stage=True)
        return cls(dict.fromkeys(_names(module_names), whole))

    @classmethod
    def from_grid_map(
        cls,
        module_to_grid_map: Mapping[str, HyperCommGrid],
        modality_module_names: Sequence[str],
        *,
        rank: int | None = None,
        sources: Iterable[str] | None = None,
        sinks: Iterable[str] = (MIMO_LANGUAGE_MODULE_KEY,),
    ) -> Self:
        """The role of ``rank`` in a job whose modules have grids. Stages follow from arithmetic.

        A grid without a "pp" dimension is one stage. The mode is NON_COLOCATED where all grids are disjoint
        and COLOCATED where all are equal; in between it is COLOCATED for a rank that is in several grids.

        Args:
            module_to_grid_map: the grid of each modality module and of "language".
            modality_module_names: the modality modules.
            rank: None is this process's rank.
            sources: modules that read inputs; None is the modality modules, or "language" where there are none.
            sinks: modules that read labels.

        Raises:
            PlacementError: the map's modules are not the modality modules and "language", or a source or sink is
                none of them.
            WorldError: the rank is in no grid.
        """
        checked(module_to_grid_map, Mapping[str, HyperCommGrid], "module_to_grid_map", PlacementError)
        expected = _name_set(modality_module_names) | {MIMO_LANGUAGE_MODULE_KEY}
        missing, extra = sorted(expected - set(module_to_grid_map)), sorted(set(module_to_grid_map) - expected)
        if missing or extra:
            raise PlacementError(
                f"module_to_grid_map must have exactly the modules {sorted(expected)}: missing {missing}, extra {extra}"
            )
        if sources is None:
            sources = modality_module_names or (MIMO_LANGUAGE_MODULE_KEY,)
        sources, sinks = _name_set(sources), _name_set(sinks)
        if not sources | sinks <= expected:
            raise PlacementError(
                f"sources {sorted(sources)} and sinks {sorted(sinks)} must be some of {sorted(expected)}"
            )
        rank = resolve_rank(rank)
        modules = {name: _stage(grid, rank) for name, grid in module_to_grid_map.items() if rank in grid.ranks}
        if not modules:
            spans = {name: span_of(grid.ranks) for name, grid in module_to_grid_map.items()}
            raise WorldError(f"rank {rank} is in no module's grid; the grids span {spans}")
        mode = _mode(list(module_to_grid_map.values()), grids_of_rank=len(modules))
        return cls(modules, mode, sources=sources, sinks=sinks)

    @classmethod
    def build(
        cls, modality_module_names: Sequence[str], module_to_grid_map: Mapping[str, HyperCommGrid] | None = None
    ) -> Self:
        """The role of this rank, under the name that Megatron has for it now: `from_grid_map`.

        Without grids every module, "language" among them, is on all ranks, first and last stage, and the mode is
        COLOCATED.

        Raises:
            PlacementError, WorldError: as `from_grid_map`.
        """
        if module_to_grid_map is not None:
            return cls.from_grid_map(module_to_grid_map, modality_module_names)
        everywhere = cls.unified([*_names(modality_module_names), MIMO_LANGUAGE_MODULE_KEY])
        return cls(everywhere.modules, ModuleLayout.COLOCATED)

    @property
    def has_modality_modules(self) -> bool:
        """Whether this rank takes part in any module other than the language module."""
        return bool(self.modality_module_names)

    @property
    def has_language_module(self) -> bool:
        """Whether this rank takes part in the language module."""
        return MIMO_LANGUAGE_MODULE_KEY in self.modules

    @property
    def modality_module_names(self) -> list[str]:
        """The modules other than the language module that this rank takes part in."""
        return [name for name in self.modules if name != MIMO_LANGUAGE_MODULE_KEY]

    def is_first_stage(self, module_name: str) -> bool:
        """Whether this rank is in the module's first stage; False for a module that it is not in."""
        info = self.modules.get(module_name)
        return info is not None and info.is_first_stage

    def is_last_stage(self, module_name: str) -> bool:
        """Whether this rank is in the module's last stage; False for a module that it is not in."""
        info = self.modules.get(module_name)
        return info is not None and info.is_last_stage

    @property
    def reads_inputs(self) -> bool:
        """Whether this rank reads the batch's inputs: it is in the first stage of a source."""
        sources = self.sources
        if sources is None:
            sources = frozenset(self.modality_module_names or (MIMO_LANGUAGE_MODULE_KEY,))
        return any(self.is_first_stage(name) for name in sources)

    @property
    def reads_labels(self) -> bool:
        """Whether this rank reads the batch's labels: it is in the last stage of a sink."""
        return any(self.is_last_stage(name) for name in self.sinks)


def _stage(grid: HyperCommGrid, rank: int) -> ModuleStageInfo:
    if "pp" not in grid.dim_names:
        return ModuleStageInfo(is_first_stage=True, is_last_stage=True)
    stage = grid.coords(rank)["pp"]
    return ModuleStageInfo(is_first_stage=stage == 0, is_last_stage=stage == grid.dim_size("pp") - 1)


def _mode(grids: list[HyperCommGrid], *, grids_of_rank: int) -> ModuleLayout:
    relations = {relation(a, b) for a, b in combinations(grids, 2)}
    if relations <= {Relation.DISJOINT}:
        return ModuleLayout.NON_COLOCATED
    if relations == {Relation.EQUAL} or grids_of_rank > 1:
        return ModuleLayout.COLOCATED
    return ModuleLayout.NON_COLOCATED
