"""Tied parameters: copies of one parameter on several stages, equal when tied, with one summed gradient.

The copies (an embedding and the head that shares its weight) are on several stages, and on every data lane of each.
The gradient is the sum over all of them, and must be bitwise equal on all copies, or they drift apart. One all-reduce
therefore sums over stages and data lanes together, and the data-parallel reduction only divides. That is correct for
any numbers of data lanes on the two sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, frozen

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.gradients.lanes import Waiting, all_reduce
from pipegrid.schedules.gradients.main_grad import accumulated, accumulation_dtype, set_accumulated
from pipegrid.schedules.plan import chain
from pipegrid.topology import GroupSpec, HyperCommGrid, create_groups
from pipegrid.topology.fields import Index, Name, checked, checked_fields

_LANE_DIMS = ("dp", "cp")
_STAGE_DIM = "pp"
_CHUNK = 2**22
"""Elements compared at a time: bounds the memory of the check beside a large embedding."""
_MAX_DIMS = 8


class TyingError(ValueError):
    """The stages, grids or values of tied parameters do not match."""


@define
class TieMark:
    """The mark of a tied parameter (``parameter.tied``), read by the reductions of its gradient.

    Attributes:
        name: of the tie.
        over_lanes: its ``REDUCE`` also sums over data lanes; the data-parallel reduction must not repeat that.
        summed: the ``REDUCE`` of this step is done, and its result not yet used.
    """

    name: str
    over_lanes: bool
    summed: bool = False


@frozen(eq=False, field_transformer=checked_fields(TyingError))
class TiedParameters:
    """This rank's part in a tied parameter; made by `tie_parameters` on every rank of the pipeline.

    Attributes:
        name: also that of its group in the plan.
        stages: the stages with a copy, the same on every rank.
        copies: this rank's; empty on ranks without one of the stages.
        group: the ranks of the sum; None without a copy, or with all copies on this rank.
        contributes: whether this rank's gradient is a term of the sum; False for a tensor-parallel replica of one.
    """

    name: Name
    stages: tuple[Index, ...]
    copies: tuple[torch.nn.Parameter, ...] = ()
    group: dist.ProcessGroup | None = None
    contributes: bool = True

    @torch.no_grad()
    def reduce(self, waiting: Waiting | None = None) -> None:
        """Sum the gradient over all copies: the ``REDUCE`` of this name (``reducers={name: tied.reduce}``).

        Afterwards the gradients of all copies are bitwise equal. A copy without one counts as zero and gets the sum.
        """
        if not self.copies:
            return
        first = self.copies[0]
        total = torch.zeros_like(first, dtype=accumulation_dtype(first))
        for copy in self.copies if self.contributes else ():
            gradient = accumulated(copy)
            if gradient is not None:
                total.add_(gradient)
        if self.group is not None:
            all_reduce(total, self.group)(waiting or Waiting())
        for copy in self.copies:
            set_accumulated(copy, total)
            mark_of(copy).summed = True


def mark_of(parameter: torch.nn.Parameter) -> Any:
    """The parameter's `TieMark`; None for a parameter that is not tied."""
    return getattr(parameter, "tied", None)


def tie_parameters(
    name: str,
    copies: Mapping[int, torch.nn.Parameter],
    *,
    stages: Sequence[int],
    grids: Mapping[str, HyperCommGrid] | HyperCommGrid | None = None,
    graph: ModuleGraph | int | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> TiedParameters:
    """Tie the copies of a parameter on ``stages``: check that they are equal; their gradients are summed in each step.

    Collective: every rank of the pipeline calls it, several ties in the same order; on a rank without a copy it
    costs nothing. The result goes to `PipelineConfig` (``tied_parameters``), or to a plan and a runtime directly:
    ``with_reduce(plan, {tied.name: tied.stages})`` and ``reducers={tied.name: tied.reduce}``.

    With ``grids``, one all-reduce in a new group sums over stages and data lanes (dp x cp) together, and
    `reduce_gradients` only divides: all copies stay bitwise equal, for any numbers of lanes of their modules.
    With ``group``, the all-reduce sums over the stages of one data lane, and `reduce_gradients` then over lanes: for
    wrappers that reduce over lanes, and for existing groups.

    Args:
        name: a group name, unique in the plan.
        copies: this rank's, by stage; empty on a rank without any of the stages.
        stages: global numbers of all stages with a copy.
        grids: the grid of each module, or the one grid of a pipeline of one module.
        graph: the modules; or the number of stages of a pipeline of one module. Default: the pp size of the one grid.
        group: instead of ``grids``: the ranks with a copy on this data lane and tp rank (``embd`` or ``pos_embd`` of a
            collection), in the order of stages; None on a rank without a copy.
        timeout: of the group's creation and its operations; None is the backend's default.

    Raises:
        TyingError: stages, grids and copies do not match; copies differ in shape, dtype or value (raised on every rank
            with a copy, with the ranks and the difference); a copy is already tied under another name.
    """
    name = checked(name, Name, "name", TyingError)
    stages = checked(stages, tuple[Index, ...], "stages", TyingError)
    rank = dist.get_rank()
    if len(set(stages)) != len(stages) or len(stages) < 2:
        raise TyingError(f"tied parameter {name!r} has the stages {list(stages)}; name two or more stages, each once")
    if grids is not None:
        if group is not None:
            raise TyingError(f"tied parameter {name!r} has both grids and a group; pass one of the two")
        if isinstance(grids, HyperCommGrid):
            depth = grids.dim_size("pp") if "pp" in grids.dim_names else 1
            graph = chain(depth) if graph is None else graph
            names = (chain(graph) if isinstance(graph, int) else graph).order
            grids = dict.fromkeys(names, grids)
        if graph is None:
            raise TyingError(f"tied parameter {name!r} has grids of several modules and no graph; pass graph=...")
        graph = chain(graph) if isinstance(graph, int) else graph
        found = tie_groups(name, stages, graph, grids)
        _require_copies(name, copies, stages_here(stages, graph, grids, rank), rank)
        _require_whole(name, copies, alike=shards_alike(stages, graph, grids))
        made = create_groups((tie.spec for tie in found if len(tie.spec.ranks) > 1), timeout=timeout)
        own = next((tie for tie in found if rank in tie.spec.ranks), None)
        if own is None:
            return TiedParameters(name, tuple(sorted(stages)))
        tied = TiedParameters(
            name, tuple(sorted(stages)), _distinct(copies), made.get(own.spec), contributes=rank in own.contributing
        )
        replica, over_lanes = rank not in own.first, True
    else:
        if group is None and copies:
            raise TyingError(
                f"tied parameter {name!r} has a copy on rank {rank}, but neither grids nor a group to sum it in; pass "
                "grids=... (or group=collection.embd)"
            )
        _require_copies(name, copies, [stage for stage in stages if stage in copies], rank)
        if not copies:
            return TiedParameters(name, tuple(sorted(stages)))
        tied = TiedParameters(name, tuple(sorted(stages)), _distinct(copies), group)
        replica, over_lanes = min(stages) not in copies, False
    _mark(tied, replica=replica, over_lanes=over_lanes)
    _require_equal(tied)
    return tied


def _distinct(copies: Mapping[int, torch.nn.Parameter]) -> tuple[torch.nn.Parameter, ...]:
    """Distinct parameters: stages of one rank may share one, whose gradient autograd sums."""
    return tuple({id(copies[stage]): copies[stage] for stage in sorted(copies)}.values())


def _require_copies(name: str, copies: Mapping[int, torch.nn.Parameter], held: Sequence[int], rank: int) -> None:
    if set(copies) != set(held):
        raise TyingError(
            f"tied parameter {name!r}: rank {rank} holds the stages {sorted(held)} of it, but copies are for "
            f"{sorted(copies)}; pass one copy for each of these stages"
        )
    for stage, copy in copies.items():
        if not isinstance(copy, torch.nn.Parameter):  # a detached tensor would add zero to every sum
            raise TyingError(
                f"tied parameter {name!r}: the copy of stage {stage} is a {type(copy).__name__}; pass the Parameter"
            )
        mark = mark_of(copy)
        if mark is not None and mark.name != name:
            raise TyingError(
                f"tied parameter {name!r}: the copy of stage {stage} is already tied as {mark.name!r}; tie all copies "
                "of one parameter under one name"
            )
        if hasattr(copy, "device_mesh"):
            raise TyingError(
                f"tied parameter {name!r}: the copy of stage {stage} is a DTensor; tied parameters are plain tensors"
            )
        if copy.dim() > _MAX_DIMS:
            raise TyingError(f"tied parameter {name!r}: the copy of stage {stage} has {copy.dim()} axes; at most 8")


def _require_whole(name: str, copies: Mapping[int, torch.nn.Parameter], *, alike: bool) -> None:
    for stage, copy in copies.items():
        if not alike and getattr(copy, "tensor_model_parallel", False):
            raise TyingError(
                f"tied parameter {name!r}: the copy of stage {stage} is sharded over tp, and the modules that hold it "
                "have different tp sizes, so their shards differ; use equal tp sizes, or hold it whole on every tp rank"
            )


def _mark(tied: TiedParameters, *, replica: bool, over_lanes: bool) -> None:
    for index, copy in enumerate(tied.copies):
        copy.tied = TieMark(tied.name, over_lanes)  # type: ignore[attr-defined]
        copy.tied_replica = replica or index > 0  # type: ignore[attr-defined]


@torch.no_grad()
def _require_equal(tied: TiedParameters) -> None:
    """Raise on all members or none: every member gathers the differences of all, and the text is the same."""
    first = tied.copies[0]
    ranks = [dist.get_rank()] if tied.group is None else dist.get_process_group_ranks(tied.group)
    forms = _gathered(_form_of(tied.copies), tied.group)
    for rank, form in zip(ranks, forms, strict=True):
        if int(form[0]) or not torch.equal(form, forms[0]):
            raise TyingError(
                f"the copies of tied parameter {tied.name!r} differ: {_form(forms[0])} on rank {ranks[0]}, "
                f"{_form(form)} on rank {rank}"
            )
    flats = [copy.detach().reshape(-1) for copy in tied.copies]
    difference = torch.zeros((), dtype=torch.float64, device=first.device)
    for start in range(0, first.numel(), _CHUNK):
        reference = flats[0][start : start + _CHUNK].clone()
        if tied.group is not None:
            dist.broadcast(reference, ranks[0], group=tied.group)
        for flat in flats:
            difference = torch.maximum(difference, _difference(flat[start : start + _CHUNK], reference))
    differences = torch.stack(_gathered(difference, tied.group)).tolist()
    if any(differences):
        apart = [f"rank {rank} by {value:.6g}" for rank, value in zip(ranks, differences, strict=True) if value]
        raise TyingError(
            f"the copies of tied parameter {tied.name!r} differ from that of rank {ranks[0]}: {', '.join(apart)}; "
            "initialize them with the same seed, or broadcast one of them first"
        )


def _difference(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The largest absolute difference; infinite if exactly one value is NaN, or infinities differ."""
    same = (values == reference) | (values.isnan() & reference.isnan())
    apart = (values.double() - reference.double()).abs().nan_to_num(nan=float("inf"))
    return torch.where(same, 0.0, apart).max()


_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.complex128, torch.complex64),
)


def _form_of(copies: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Dtype, number of axes and sizes, as a tensor of integers; of several copies here, the first that differs."""
    first = copies[0]
    unlike = next((copy for copy in copies if (copy.shape, copy.dtype) != (first.shape, first.dtype)), None)
    if unlike is not None:
        first = unlike
    dtype = _DTYPES.index(first.dtype) if first.dtype in _DTYPES else -1
    sizes = [*first.shape, *[0] * (_MAX_DIMS - first.dim())]
    return torch.tensor([int(unlike is not None), dtype, first.dim(), *sizes], device=copies[0].device)


def _form(form: torch.Tensor) -> str:
    unlike, dtype, dims, *sizes = form.tolist()
    name = _DTYPES[dtype] if dtype >= 0 else "another dtype"
    return f"{name} of shape {tuple(sizes[:dims])}" + (" (beside a different copy on that rank)" if unlike else "")


def _gathered(own: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    if group is None:
        return [own]
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    return gathered


def tied_stages(tied: Iterable[TiedParameters]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The name and the stages of each tied parameter, hashable: pairs of the mapping for `lower` and `with_reduce`.

    Raises:
        TyingError: a duplicate name.
    """
    pairs = tuple((each.name, each.stages) for each in tied)
    if len(dict(pairs)) != len(pairs):
        raise TyingError(f"tied parameters have the names {[name for name, _ in pairs]}; names are unique")
    return pairs


# The ranks of a tied parameter: arithmetic on grids, without communication


@frozen
class TieGroup:
    """The ranks with a copy of one shard of a tied parameter.

    Attributes:
        spec: the group to create: all copies, ascending by stage, then by rank.
        contributing: the ranks whose gradient is a term of the sum. The others are tensor-parallel replicas.
        first: the ranks of the lowest stage, whose copy counts as the parameter; all others are replicas.
    """

    spec: GroupSpec
    contributing: frozenset[int]
    first: frozenset[int]


def tie_groups(name: str, stages: Sequence[int], graph: ModuleGraph, grids: Mapping[str, Any]) -> tuple[TieGroup, ...]:
    """Groups of a tied parameter: one per tp rank, across stages and data lanes.

    Modules whose grids agree in all dims but ``pp``, ``dp`` and ``cp`` have one group per shard. With different grids
    (tp 2 beside tp 1), every tp rank must hold the whole parameter: all copies are one group, in which the first tp
    rank of each module contributes.

    Args:
        name: the parameter's.
        stages: global numbers of the stages with a copy.
        graph: the modules and their stages.
        grids: the grid of each of these modules.

    Raises:
        TyingError: a stage that does not exist; a module without a grid; a grid whose ``pp`` is not the module's
            depth; a rank that holds different shards of two stages.
    """
    held = sorted(stages)
    for stage in held:
        if not 0 <= stage < graph.num_stages:
            raise TyingError(f"tied parameter {name!r} names stage {stage}; the graph has 0..{graph.num_stages - 1}")
    places = [(grid, index) for stage in held for grid, index in [_grid_of(name, stage, graph, grids)]]
    kinds = [_shard_sizes(grid) for grid, _ in places]
    alike = all(kind == kinds[0] for kind in kinds)
    members: dict[tuple[tuple[str, int], ...], list[int]] = {}
    contributing: set[int] = set()
    for grid, index in places:
        for rank in grid.ranks:
            coords = grid.coords(rank)
            if coords.get(_STAGE_DIM, 0) != index:
                continue
            shard = tuple((dim, coords[dim]) for dim in sorted(_shard_sizes(grid)))
            ranks = members.setdefault(shard if alike else (), [])
            if rank not in ranks:
                ranks.append(rank)
            if alike or not any(coordinate for _, coordinate in shard):
                contributing.add(rank)
    shard_of: dict[int, tuple[tuple[str, int], ...]] = {}
    for shard, ranks in members.items():
        for rank in ranks:
            if shard_of.setdefault(rank, shard) != shard:
                raise TyingError(
                    f"tied parameter {name!r}: rank {rank} holds two of the stages {held}, but of one the shard "
                    f"{dict(shard_of[rank])} and of another {dict(shard)}; use the same order of dims in their grids"
                )
    lowest, index = places[0]
    first = frozenset(rank for rank in lowest.ranks if lowest.coords(rank).get(_STAGE_DIM, 0) == index)
    return tuple(
        TieGroup(
            GroupSpec(ranks, _label(name, shard), shared=False),
            frozenset(contributing.intersection(ranks)),
            first.intersection(ranks),
        )
        for shard, ranks in sorted(members.items())
    )


def shards_alike(stages: Sequence[int], graph: ModuleGraph, grids: Mapping[str, Any]) -> bool:
    """Whether the modules of ``stages`` shard a parameter alike: equal sizes of all dims but stages and data lanes."""
    kinds = [_shard_sizes(grids[graph.module_of(stage)[0]]) for stage in stages]
    return all(kind == kinds[0] for kind in kinds)


def stages_here(stages: Sequence[int], graph: ModuleGraph, grids: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    """The subset of ``stages`` on ``rank``."""
    here = []
    for stage in stages:
        module, index = graph.module_of(stage)
        grid = grids[module]
        if rank in grid.ranks and grid.coords(rank).get(_STAGE_DIM, 0) == index:
            here.append(stage)
    return tuple(here)


def _grid_of(name: str, stage: int, graph: ModuleGraph, grids: Mapping[str, Any]) -> tuple[Any, int]:
    module, index = graph.module_of(stage)
    if module not in grids:
        raise TyingError(
            f"tied parameter {name!r} is on stage {stage} of module {module!r}, which has no grid; there are grids "
            f"for {sorted(grids)}"
        )
    grid = grids[module]
    depth = grid.dim_size(_STAGE_DIM) if _STAGE_DIM in grid.dim_names else 1
    if depth != graph.depth(module):
        raise TyingError(
            f"module {module!r} has {graph.depth(module)} stages in the graph and pp {depth} in its grid; a tied "
            "parameter needs one stage per pp rank"
        )
    return grid, index


def _shard_sizes(grid: Any) -> dict[str, int]:
    """Dims that shard or replicate a parameter on one stage of one data lane, with their sizes."""
    sizes = zip(grid.dim_names, grid.shape, strict=True)
    return {dim: size for dim, size in sizes if size > 1 and dim not in (*_LANE_DIMS, _STAGE_DIM)}


def _label(name: str, shard: tuple[tuple[str, int], ...]) -> str:
    return "/".join(["tied", name, *(f"{dim}{index}" for dim, index in shard)])
