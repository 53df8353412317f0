"""Tie the parameters of a model that are on several stages, such as an embedding and the head with its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import nn

from pipegrid.core.graph import ModuleGraph
from pipegrid.gradients import TiedParameters, tie_parameters
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.stages.assignment import Tie, assign, pp_size
from pipegrid.stages.building.build import whole_of
from pipegrid.stages.errors import CutError
from pipegrid.stages.names import Names
from pipegrid.stages.stage import Stage
from pipegrid.topology import GroupSpec, HyperCommGrid, create_groups


def ties_of(
    model: nn.Module | Callable[[], nn.Module], layout: str | PipelineParallelLayerLayout, *, names: Names | None = None
) -> tuple[Tie, ...]:
    """The parameters of ``model`` on several stages of ``layout``: for ranks without a stage of the model.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
        >>> model[2].weight = model[0].weight
        >>> ties_of(model, "Et|tL", names=Names("1"))
        (Tie(name='0.weight', stages=(0, 1), names=('0.weight', '2.weight')),)
    """
    return assign(whole_of(model), layout, names).ties


def tie_stage_parameters(
    ties: Iterable[Tie],
    stages: Stage | Sequence[Stage],
    grid: HyperCommGrid | Mapping[str, HyperCommGrid],
    *,
    graph: ModuleGraph | None = None,
    module: str | None = None,
    placement: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> tuple[TiedParameters, ...]:
    """`tie_parameters` for each of ``ties``, for ``PipelineConfig(tied_parameters=...)``. All ranks of the job call it.

    Copies on one place of the pipeline are one parameter and need no sum (an embedding and a head in a V of stages).

    Args:
        ties: ``stage.ties``, or `ties_of`.
        stages: this rank's stages of the model; an empty list on ranks of other modules.
        grid: of the model; in a graph of several modules, the grid of each.
        graph: the modules, where there are several.
        module: the model's name in ``graph``.
        placement: the pp rank of each stage, with several stages on a rank; None: that of the stages, where
            `pipeline_stage` was given the grid, else one stage on each. Needed on ranks of other modules.
        timeout: of the creation of groups.

    Raises:
        CutError: copies on one rank are two parameters, their stages cut by separate calls; a layout with other than pp
            x chunks stages; another placement than that of the stages.
        GradientError: as `tie_parameters`.

    Examples:
        >>> from pipegrid.topology import HyperCommGrid
        >>> tie_stage_parameters([], [], HyperCommGrid([1], ["pp"], world_size=1))
        ()
    """
    if isinstance(ties, nn.Module):
        raise CutError(f"ties is a {type(ties).__name__}; give stage.ties, or ties_of(...)")
    own = {stage.number: stage for stage in ([stages] if isinstance(stages, Stage) else stages)}
    if own:
        of_model = grid if isinstance(grid, HyperCommGrid) else grid[str(module)] if module is not None else None
        placement = _placement(list(own.values()), placement, of_model)
    first = 0 if graph is None or module is None else graph.stage(module, 0)
    made = []
    for each in ties:
        copies = {
            first + stage: own[stage].get_parameter(name)
            for stage, name in zip(each.stages, each.names, strict=True)
            if stage in own
        }
        numbers = [first + stage for stage in each.stages]
        if placement is None:
            made.append(tie_parameters(each.name, copies, stages=numbers, grids=grid, graph=graph, timeout=timeout))
            continue
        if len({id(copy) for copy in copies.values()}) > 1:
            raise CutError(
                f"{each.name} is {len(copies)} parameters on the stages {sorted(copies)} of this rank; cut them in one "
                "call, pipeline_stage(model, layout, [0, 3])"
            )
        places = tuple(dict.fromkeys(placement[stage] for stage in each.stages))
        if len(places) > 1:
            group = _across(grid if isinstance(grid, HyperCommGrid) else grid[str(module)], places, each.name, timeout)
            made.append(tie_parameters(each.name, copies, stages=numbers, group=group))
    return tuple(made)


def _placement(
    stages: Sequence[Stage], given: Sequence[int] | None, grid: HyperCommGrid | None
) -> Sequence[int] | None:
    """The pp rank of each stage; None: one stage on each, or not known."""
    count, known = stages[0].assignment.num_stages, stages[0].placement
    if given is not None and (len(given) != count or known not in (None, tuple(given))):
        raise CutError(
            f"placement is {tuple(given)}, of {len(given)} stages; those here are of {count}"
            f"{'' if known is None else f', placed {known}'}: leave placement out, or give theirs"
        )
    if given is not None or (known is not None and known != tuple(range(count))):
        return known if given is None else given
    if grid is not None and count != pp_size(grid) * len(stages):
        raise CutError(
            f"the layout has {count} stages, {len(stages)} of them here, and {grid} has {pp_size(grid)} pp ranks; a "
            "layout has pp x chunks stages"
        )
    return None


def _across(
    grid: HyperCommGrid, places: Sequence[int], name: str, timeout: timedelta | None
) -> dist.ProcessGroup | None:
    """This rank's group of the pp ranks ``places``, one for each replica and tensor-parallel rank."""
    members: dict[tuple[tuple[str, int], ...], dict[int, int]] = {}
    for rank in grid.ranks:
        coords = dict(grid.coords(rank))
        place = coords.pop("pp", 0)
        if place in places:
            members.setdefault(tuple(sorted(coords.items())), {})[place] = rank
    specs = [
        GroupSpec([ranks[place] for place in places], f"tied/{name}/{index}", shared=False)
        for index, (_, ranks) in enumerate(sorted(members.items()))
    ]
    made = create_groups(specs, timeout=timeout)
    return next((made[spec] for spec in specs if dist.get_rank() in spec.ranks), None)
