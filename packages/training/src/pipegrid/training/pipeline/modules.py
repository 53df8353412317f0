"""The modules of a job: grids with their groups, stages on this rank, and the communicator between them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn

from pipegrid.bridges import EdgeOptions, ModuleGraph
from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Index, checked, shown
from pipegrid.gradients import TiedParameters
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.monitor import JobFailedError
from pipegrid.schedules import Monitor, PipelineConfig, stage_places
from pipegrid.stages import Names, pipeline_stage, tie_stage_parameters, ties_of
from pipegrid.stages.assignment import as_layout, pp_size
from pipegrid.stages.generators import seed_of
from pipegrid.topology import GroupSpec, HyperCommGrid, control_store, create_grid_groups
from pipegrid.topology import create_groups as create_rank_groups
from pipegrid.topology.bounded_calls import bounded
from pipegrid.topology.ending import destroy_groups
from pipegrid.training.pipeline.microbatches import Share
from pipegrid.training.pipeline.rows import Rows
from pipegrid.transport.collectives.differences import listed

ModelFactory = Callable[[], nn.Module]
_STORE_SECONDS = 60.0
_LOOK_SECONDS = 0.2


@frozen(eq=False)
class PipelineModule:
    """A module of a job.

    Attributes:
        model: a function that makes the model; each rank keeps its own stages of it.
        layout: of the model's layers. None: one stage, the model as it is, such as an encoder and its projector.
        grid: of its ranks.
        names: as in `pipeline_stage`.
        forward: ``f(stage, microbatch)``, the output of a stage; None calls it with all of the microbatch. What other
            modules sent is in ``stage.received``, by module.
        output: as in `pipeline_stage`: from what the model returns to what is sent to other modules.
        frozen: no gradients, and no backward.

    Examples:
        >>> import torch
        >>> from pipegrid.topology import HyperCommGrid
        >>> grid = HyperCommGrid([2], ["dp"], world_size=2)
        >>> PipelineModule(lambda: torch.nn.Linear(4, 4), None, grid, frozen=True).frozen
        True
    """

    model: nn.Module | ModelFactory
    layout: str | PipelineParallelLayerLayout | None
    grid: HyperCommGrid
    names: Names | None = None
    forward: Callable[[Any, Any], Any] | None = None
    output: Callable[[Any], Any] | None = None
    frozen: bool = False

    @property
    def num_stages(self) -> int:
        """Stages of the layout."""
        return 1 if self.layout is None else len(as_layout(self.layout).stages)

    def places(self, schedule: str) -> tuple[int, ...]:
        """The pp rank of each stage: one each, or as ``schedule`` has several of a rank."""
        pp = pp_size(self.grid)
        chunks, rest = divmod(self.num_stages, pp)
        if rest or not chunks:
            raise StepArgumentError(
                f"layout {self.layout!r} has {self.num_stages} stages, and the grid {pp} pp ranks; give a multiple"
            )
        return tuple(range(pp)) if chunks == 1 else stage_places(schedule, pp, chunks)

    def stages(self, name: str | None, places: Sequence[int], device: torch.device) -> list[Any]:
        """This rank's stages, on ``device``; none on ranks outside of the grid."""
        if not self.grid.is_current_rank_in_grid():
            return []
        if self.layout is None:
            model = self.model if isinstance(self.model, nn.Module) else self.model()
            if getattr(model, "config", None) is not None:
                raise StepArgumentError(
                    f"{type(model).__name__} has a config of its own, where the step's is read; give a layout, or wrap "
                    "the model in a torch.nn.Module"
                )
            made: list[Any] = [model]
        else:
            here = self.grid.coords(dist.get_rank()).get("pp", 0)
            numbers = [stage for stage, place in enumerate(places) if place == here]
            how: dict[str, Any] = {"names": self.names, "module": name, "output": self.output, "allow_empty": True}
            made = list(pipeline_stage(self.model, self.layout, numbers, **how))
            for stage in made:
                stage.place(places)
        made = [stage.to(device) for stage in made]
        return [stage.requires_grad_(False) for stage in made] if self.frozen else made


@frozen(eq=False)
class JobSetup:
    """What the steps of a job share; ``stages``, ``groups``, ``shares`` and ``generators``: of this rank, by module."""

    modules: Mapping[str, PipelineModule]
    graph: ModuleGraph
    edges: Mapping[tuple[str, str], EdgeOptions]
    stages: Mapping[str, Sequence[Any]]
    groups: Mapping[str, Any]
    config: PipelineConfig
    schedule: str
    loss: Callable[[Any, Any], Any] | None  # of the script; None: the model's own
    rows: Rows  # how microbatches are cut, and shared among replicas
    device: torch.device
    replica: int  # whose batch this rank reads, of `replicas`
    replicas: int
    shares: Mapping[str, Share]  # the part of each microbatch that this rank's replica has
    generators: Mapping[str, torch.Generator]  # a draw seeds each forward
    named: Callable[[], Iterable[tuple[str, nn.Parameter]]]  # the parameters to train, by the script's names

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether ranks have parts of a module's layers."""
        grids = [module.grid for module in self.modules.values()]
        return any("tp" in grid.dim_names and grid.dim_size("tp") > 1 for grid in grids)

    def prefix(self, module: str) -> str:
        """The prefix of the names of a module's parameters, where there are several modules."""
        return f"{module}." if len(self.modules) > 1 else ""

    def read(
        self, held: Iterable[tuple[str, Sequence[nn.Module]]], by: Callable[..., Any], **options: Any
    ) -> list[tuple[str, Any]]:
        """What ``by``, such as `nn.Module.named_buffers`, finds in the stages ``held`` of each module, by name."""
        found = ((self.prefix(module), by(stage, **options)) for module, stages in held for stage in stages)
        return [(f"{prefix}{name}", one) for prefix, each in found for name, one in each]


def hosts_of(grid: HyperCommGrid, places: Sequence[int], hosts: Mapping[int, str]) -> list[tuple[str, ...]]:
    """Per stage the hosts of all ranks of its position: two are alike where no replica has them on several hosts.

    ``places``: the pp rank of each stage of the module on ``grid``; ``hosts``: of each rank of the world.
    """
    found: dict[int, list[str]] = {}
    for rank in sorted(grid.ranks):
        found.setdefault(grid.coords(rank).get("pp", 0), []).append(hosts[rank])
    return [tuple(found[place]) for place in places]


def modules_of(
    model: Any,
    layout: str | PipelineParallelLayerLayout | None,
    grid: HyperCommGrid | None,
    names: Names | None,
    forward: Callable[..., Any] | None,
) -> dict[str, PipelineModule]:
    """The modules of a job by name, from the arguments of `Pipeline`; a single model is called ``model``."""
    if not isinstance(model, Mapping):
        if layout is None or grid is None:
            raise StepArgumentError(f"layout is {shown(layout)} and grid {shown(grid)}; a model has both")
        return {"model": PipelineModule(model, layout, grid, names, forward)}
    if any(each is not None for each in (layout, grid, names, forward)):
        raise StepArgumentError("model is a dict of modules, which have layout, grid, names and forward of their own")
    for name, module in model.items():
        if not isinstance(module, PipelineModule):
            raise StepArgumentError(f"module {name!r} is {shown(module)}; give a PipelineModule")
    return dict(model)


def ranks_of(modules: Mapping[str, PipelineModule], spare: Iterable[int]) -> tuple[int, ...]:
    """The ranks of the job, ascending: all of the world but the ``spare`` ones, which must be those of no grid."""
    named = sorted({*checked(spare, tuple[Index, ...], "spare", StepArgumentError)})
    ranks = {rank for module in modules.values() for rank in module.grid.ranks}
    if (missing := sorted(set(range(dist.get_world_size())) - ranks)) != named:
        raise StepArgumentError(
            f"a world of {dist.get_world_size()} ranks: no grid has the ranks {missing}, and spare is {named}; "
            f"start fewer, give a larger grid, or name ranks that take no part: spare={missing}"
        )
    return tuple(sorted(ranks))


class EndOfJob:
    """The end of a job, which its ``ranks`` tell when they have closed it, and for which the spare ones wait.

    Every rank of the world makes one, for each of its pipelines with spare ranks. ``deadline``: seconds from the first
    rank that has closed to the last one. ``group``: of the ``ranks``, until the job ends; None on a spare one.
    """

    def __init__(self, ranks: Sequence[int], deadline: float) -> None:
        self._ranks, self._deadline = ranks, deadline
        self._store = control_store(f"end of pipeline {_number_of('pipelines with spare ranks')}")
        self._groups = create_rank_groups([GroupSpec(tuple(ranks), "pipeline", shared=False)])
        self.group = next(iter(self._groups.values()), None)

    def say(self) -> None:
        """This rank of the job has closed it."""
        destroy_groups(self._groups)
        bounded(self._store.set, f"closed by {dist.get_rank()}", "", seconds=_STORE_SECONDS)
        bounded(self._store.add, "closed", 1, seconds=_STORE_SECONDS)

    def wait(self) -> None:
        """Return when every rank of the job has said so, however long it runs; a look at the store has a deadline.

        A rank that has ended without a word never says so: the others, which fail then, are the first to close. A
        deadline after the first one, ranks that have not closed it are a `JobFailedError`.
        """
        end = math.inf
        while (closed := bounded(self._store.add, "closed", 0, seconds=_STORE_SECONDS)) < len(self._ranks):
            now = time.monotonic()
            end = min(end, now + self._deadline) if closed else end
            if now > end:
                check = partial(bounded, self._store.check, seconds=_STORE_SECONDS)
                missing = [rank for rank in self._ranks if not check([f"closed by {rank}"])]
                raise JobFailedError(
                    f"{listed(missing)} had not closed the pipeline {self._deadline:g} s after the first rank had, as "
                    f"spare rank {dist.get_rank()} saw; look there, or give PipelineConfig a longer deadline"
                )
            time.sleep(_LOOK_SECONDS)


def create_groups(modules: Mapping[str, PipelineModule]) -> None:
    """Create the groups that the sizes of all grids ask for; those that exist stay."""
    grids = dict.fromkeys(module.grid for module in modules.values())
    new = {grid: [dims for dims in _group_dims(grid) if not grid.has_pg(dims)] for grid in grids}
    create_grid_groups(new)
    for grid, created in new.items():
        grid.use_pgs(_group_dims(grid), new=created)


def leave_groups(grids: Iterable[HyperCommGrid], tied: Iterable[TiedParameters]) -> None:
    """End what `create_groups` and `tied_parameters` have created, unless another pipeline uses it."""
    destroy_groups([tie.group for tie in tied if tie.group is not None])
    for grid in dict.fromkeys(grids):
        grid.leave_pgs(_group_dims(grid))


def _group_dims(grid: HyperCommGrid) -> list[tuple[str, ...]]:
    alone: list[tuple[str, ...]] = [(dim,) for dim in grid.dim_names]
    return [*alone, ("dp", "cp")] if {"dp", "cp"} <= set(grid.dim_names) else alone


def tied_parameters(
    modules: Mapping[str, PipelineModule],
    stages: Mapping[str, Sequence[Any]],
    places: Mapping[str, Sequence[int]],
    graph: ModuleGraph | None,
) -> tuple[TiedParameters, ...]:
    """The parameters on several stages, of all modules of ``graph``; every rank calls it, with its own ``stages``."""
    tied: list[TiedParameters] = []
    grids = {name: module.grid for name, module in modules.items()}
    for name, module in modules.items():
        if module.layout is None or module.frozen:
            continue
        own = stages.get(name, [])
        ties = own[0].ties if own else ties_of(module.model, module.layout, names=module.names)
        placement = None if len(set(places[name])) == len(places[name]) else places[name]  # None: one each
        tied += tie_stage_parameters(ties, own, grids, graph=graph, module=name, placement=placement)
    return tuple(tied)


def generators_of(grids: Mapping[str, HyperCommGrid]) -> dict[str, torch.Generator]:
    """The generators of this rank's modules: equal on the ranks that differ in their tensor-parallel rank alone."""
    rank, made = dist.get_rank(), {}
    for name, grid in grids.items():
        if grid.is_current_rank_in_grid():
            coords = sorted((dim, at) for dim, at in grid.coords(rank).items() if dim != "tp")
            made[name] = torch.Generator().manual_seed(seed_of(torch.initial_seed(), name, *coords))
    return made


def monitor_of(monitor: Monitor | bool | None, device: torch.device, ranks: Sequence[int]) -> Monitor | None:
    """A monitor of the ``ranks`` of a job; with None, under torchrun only."""
    if isinstance(monitor, Monitor):
        return monitor
    if monitor not in (None, True, False):
        raise StepArgumentError(f"monitor is {shown(monitor)}; give True, False or a Monitor, or leave it out")
    if monitor is False or (monitor is None and "TORCHELASTIC_RUN_ID" not in os.environ):
        return None
    store = control_store(f"pipeline {_number_of('pipelines')}")
    return Monitor(store, rank=dist.get_rank(), ranks=ranks, device=device if device.type == "cuda" else None)


def _number_of(kind: str) -> int:
    """How many of a ``kind`` this rank has made: so each has keys of its own in a store, the same on all ranks."""
    return bounded(control_store(kind).add, f"made by {dist.get_rank()}", 1, seconds=_STORE_SECONDS)
