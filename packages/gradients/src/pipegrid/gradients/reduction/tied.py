"""Tied parameters: copies of one parameter on several stages, equal when tied, with one summed gradient.

The copies (an embedding and the head that shares its weight) are on every replica of their stages. Their gradient
must be bitwise equal, or they drift apart: so one all-reduce sums over stages and replicas together, and the
data-parallel reduction only divides, whatever the numbers of replicas. A step needs the ties of its config, which are
checked against what its models declare, hold and wrap.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen

from pipegrid.core.fields import Index, Name, checked, checked_fields
from pipegrid.core.graph import ModuleGraph, chain
from pipegrid.gradients.all_reduce import all_reduce
from pipegrid.gradients.dtensors import is_dtensor
from pipegrid.gradients.errors import GradientError
from pipegrid.gradients.layout import TieMark, marks_of
from pipegrid.gradients.main_grad import accumulated, accumulation_dtype, set_accumulated
from pipegrid.gradients.reduction.replicas import ReplicaError
from pipegrid.gradients.reduction.tie_groups import shards_alike, stages_here, tie_groups
from pipegrid.monitor.collectives import Waiting, texts_of_ranks
from pipegrid.topology import GroupSpec, HyperCommGrid, create_groups
from pipegrid.transport.collectives.checksum import checksums
from pipegrid.transport.collectives.differences import by_text, difference
from pipegrid.transport.collectives.starting import start

COMPARED_EVERY: Final = 100
"""Sums of a tied gradient from one comparison of its copies to the next; the first is with the second sum."""

_CHUNK = 2**22  # elements compared at a time: bounds the memory of the check beside a large embedding


@frozen(eq=False, field_transformer=checked_fields(GradientError))
class TiedParameters:
    """This rank's part in a tied parameter; made by `tie_parameters` on every rank of the pipeline.

    Attributes:
        name: also that of its group in the plan.
        stages: the stages with a copy, the same on every rank.
        copies: this rank's; empty on ranks without one of the stages.
        group: the ranks of the sum; None without a copy, or with all copies on this rank.
        contributes: whether this rank's gradient is a term of the sum; False for a tensor-parallel replica of one.

    Examples:
        >>> TiedParameters("embedding", stages=(0, 3)).copies
        ()
    """

    name: Name
    stages: tuple[Index, ...]
    copies: tuple[torch.nn.Parameter, ...] = ()
    group: dist.ProcessGroup | None = None
    contributes: bool = True
    _sums: Iterator[int] = field(factory=itertools.count, init=False, repr=False)  # equal on the ranks of the group

    @torch.no_grad()
    def reduce(self, waiting: Waiting | None = None) -> None:
        """Sum the gradient over all copies: the ``REDUCE`` of this name (``reducers={name: tied.reduce}``).

        Afterwards the gradients of all copies are bitwise equal. A copy without one counts as zero and gets the sum;
        where no copy has one (all are frozen by now, or the step used none), all stay without, as in one process.
        With the second sum, and each `COMPARED_EVERY` after it, the copies are compared before (`require_equal`). The
        host reads the device where a copy of this rank has no gradient.

        Raises:
            ReplicaError: as `require_equal`.
            GradientError: a gradient is sparse.
        """
        if not self.copies:
            return
        if next(self._sums) % COMPARED_EVERY == 1:
            self.require_equal(waiting)
        first = self.copies[0]
        total = torch.zeros(first.numel() + 1, dtype=accumulation_dtype(first), device=first.device)
        summed, flag = total[:-1].view(first.shape), total[-1:]  # the flag: a copy has had a gradient
        found = [gradient for copy in self.copies if (gradient := accumulated(copy)) is not None]
        for gradient in found if self.contributes else ():
            if gradient.is_sparse:
                raise GradientError(f"tied parameter {self.name!r} has a sparse gradient; use Embedding(sparse=False)")
            summed.add_(gradient)
            flag.fill_(1)
        if self.group is not None:
            all_reduce(total, self.group)(waiting or Waiting())
        used = len(found) == len(self.copies) or bool(flag)
        for copy in self.copies:
            if used:
                set_accumulated(copy, summed)
            copy.tied.summed = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def require_equal(self, waiting: Waiting | None = None) -> None:
        """Raise where copies differ in a bit; all ranks with a copy call it. One read of each, and a small all-gather.

        Raises:
            ReplicaError: on every rank with a copy, with the checksums and their ranks.
        """
        if not self.copies:
            return
        found = dict.fromkeys(f"{each % 2**64:016x}" for each in checksums(self.copies, self.copies[0].device).tolist())
        apart = difference(_of_ranks(self, " beside ".join(found), waiting))
        if apart is not None or len(found) > 1:
            raise ReplicaError(
                f"the copies of tied parameter {self.name!r} have drifted apart since they were tied; their checksums "
                f"are {apart or ' beside '.join(found)}. Update them alike: options that are chosen by name or place "
                "must be the same for each copy (named_parameters() of a Pipeline has one name for all of them)"
            )


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

    Collective: every rank of the pipeline calls it, several ties in the same order. The result goes to `PipelineConfig`
    (``tied_parameters``), or to a plan and a runtime: ``with_reduce(plan, {tied.name: tied.stages})`` and
    ``reducers={tied.name: tied.reduce}``.

    With ``grids``, one all-reduce in a new group sums over stages and replicas (dp x cp) together, and
    `reduce_gradients` only divides. With ``group``, it sums over the stages of one replica, and `reduce_gradients`
    then over replicas: for wrappers that reduce over replicas, and for existing groups.

    Args:
        name: a group name, unique in the plan.
        copies: this rank's, by stage; empty on a rank without any of the stages.
        stages: global numbers of all stages with a copy.
        grids: the grid of each module, or the one grid of a pipeline of one module.
        graph: the modules; or the number of stages of a pipeline of one module. Default: the pp size of the one grid.
        group: instead of ``grids``: the ranks with a copy on this replica and tp rank (``embd`` or ``pos_embd`` of a
            collection), in the order of stages; None on a rank without a copy.
        timeout: of the group's creation and its operations; None is the backend's default.

    Raises:
        GradientError: stages, grids and copies do not match; copies differ in shape, dtype or value (raised on every
            rank with a copy); a copy is already tied under another name.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> copies = {0: torch.nn.Parameter(torch.ones(4)), 1: torch.nn.Parameter(torch.ones(4))}
        >>> tie_parameters("embedding", copies, stages=[0, 1], group=dist.group.WORLD).stages
        (0, 1)
    """
    stages = tuple(sorted(checked(stages, tuple[Index, ...], "stages", GradientError)))
    if len(set(stages)) != len(stages) or len(stages) < 2:
        what = f"tied parameter {name!r} has the stages {list(stages)}"
        raise GradientError(f"{what}; name two or more stages, each once")
    if grids is None and group is None and copies:
        raise GradientError(f"tied parameter {name!r} has copies here, and neither grids nor a group to sum them over")
    if grids is not None and group is not None:
        raise GradientError(f"tied parameter {name!r} has grids and a group; give one of the two")
    if grids is not None:
        tied = _over_grids(name, copies, stages, graph, grids, timeout)
    else:
        _require_copies(name, copies, [stage for stage in stages if stage in copies])
        tied = TiedParameters(name, stages, _distinct(copies), group)
    if tied.copies:
        for index, copy in enumerate(tied.copies):
            copy.tied = TieMark(name, over_replicas=grids is not None)  # type: ignore[attr-defined]
            copy.tied_replica = stages[0] not in copies or index > 0  # type: ignore[attr-defined]
        _require_equal(tied)
    return tied


def ties_among(
    ties: Iterable[TiedParameters], ranks: Collection[int], *, label: str, timeout: timedelta | None = None
) -> tuple[TiedParameters, ...]:
    """``ties`` among the living ``ranks``, for the steps after a death: each with a new group of those that live.

    All of ``ranks`` call it, with their ties in the order of `PipelineConfig`. ``label`` is another one for each call,
    such as the number of an epoch.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> copies = {0: torch.nn.Parameter(torch.ones(4)), 1: torch.nn.Parameter(torch.ones(4))}
        >>> tied = tie_parameters("embedding", copies, stages=[0, 1], group=dist.group.WORLD)
        >>> ties_among([tied], [0], label="epoch 1")[0].name
        'embedding'
    """
    specs: dict[str, GroupSpec] = {}
    ties = tuple(ties)
    for tie in ties:
        members = () if tie.group is None else dist.get_process_group_ranks(tie.group)
        living = [rank for rank in members if rank in ranks]
        if len(living) > 1:
            specs[tie.name] = GroupSpec(living, f"tied/{tie.name}/{label}", shared=False)
    made = create_groups(specs.values(), timeout=timeout)
    return tuple(evolve(tie, group=made[specs[tie.name]] if tie.name in specs else None) for tie in ties)


def _over_grids(
    name: str,
    copies: Mapping[int, torch.nn.Parameter],
    stages: tuple[int, ...],
    graph: ModuleGraph | int | None,
    grids: Mapping[str, HyperCommGrid] | HyperCommGrid,
    timeout: timedelta | None,
) -> TiedParameters:
    """This rank's part of a sum over stages and replicas together."""
    if graph is None and isinstance(grids, HyperCommGrid):
        graph = grids.dim_size("pp") if "pp" in grids.dim_names else 1
    if graph is None:
        raise GradientError("grids of several modules are tied along their graph; pass graph=...")
    graph = chain(graph) if isinstance(graph, int) else graph
    grids = dict.fromkeys(graph.order, grids) if isinstance(grids, HyperCommGrid) else grids
    rank = dist.get_rank()
    found = tie_groups(name, stages, graph, grids)
    sharded = any(marks_of(copy).sharded for copy in copies.values())
    if sharded and not shards_alike(stages, graph, grids):
        raise GradientError(
            f"tied parameter {name!r} is sharded over tp, and the modules that hold it have different tp sizes; use "
            "equal tp sizes, or hold it whole on every tp rank"
        )
    _require_copies(name, copies, stages_here(stages, graph, grids, rank))
    made = create_groups((tie.spec for tie in found if len(tie.spec.ranks) > 1), timeout=timeout)
    if (own := next((tie for tie in found if rank in tie.spec.ranks), None)) is None:
        return TiedParameters(name, stages)
    return TiedParameters(name, stages, _distinct(copies), made.get(own.spec), rank in own.contributing)


def _distinct(copies: Mapping[int, torch.nn.Parameter]) -> tuple[torch.nn.Parameter, ...]:
    """Distinct parameters: stages of one rank may share one, whose gradient autograd sums."""
    return tuple({id(copies[stage]): copies[stage] for stage in sorted(copies)}.values())


def _require_copies(name: str, copies: Mapping[int, torch.nn.Parameter], held: Sequence[int]) -> None:
    """One plain parameter for each stage here: a detached tensor would add zero to every sum."""
    if set(copies) != set(held):
        raise GradientError(
            f"tied parameter {name!r}: this rank holds its stages {sorted(held)}, but copies are for {sorted(copies)}"
        )
    for stage, copy in copies.items():
        if not isinstance(copy, torch.nn.Parameter) or is_dtensor(copy):
            raise GradientError(f"tied parameter {name!r}: the copy of stage {stage} is no plain Parameter")
        mark = marks_of(copy).tie
        if mark is not None and mark.name != name:
            raise GradientError(f"tied parameter {name!r}: the copy of stage {stage} is already tied as {mark.name!r}")


def _require_equal(tied: TiedParameters) -> None:
    """Raise on all members or none: every member gathers the forms and differences of all, and the text is the same."""
    form = " beside ".join(dict.fromkeys(f"{copy.dtype} of shape {tuple(copy.shape)}" for copy in tied.copies))
    forms = _of_ranks(tied, form)
    if len(set(forms.values())) > 1 or any(" beside " in each for each in forms.values()):
        raise GradientError(f"the copies of tied parameter {tied.name!r} differ: {'; '.join(by_text(forms))}")
    values = _of_ranks(tied, f"{_difference_to_first(tied):.6g}")
    if apart := [f"rank {rank} by {value}" for rank, value in values.items() if float(value)]:
        raise GradientError(
            f"the copies of tied parameter {tied.name!r} differ from that of rank {next(iter(values))}: "
            f"{', '.join(apart)}; initialize them with the same seed, or broadcast one of them first"
        )


def _of_ranks(tied: TiedParameters, text: str, waiting: Waiting | None = None) -> dict[int, str]:
    """The texts of the group's ranks."""
    if tied.group is None:
        return {dist.get_rank(): text}
    return texts_of_ranks(text, tied.group, tied.copies[0].device, _comparison(tied, waiting))


def _comparison(tied: TiedParameters, waiting: Waiting | None = None) -> Waiting:
    """A wait as ``waiting``, or without a deadline beside that of the group, which `tie_parameters` is given."""
    return evolve(waiting or Waiting(), what=f"the comparison of the copies of tied parameter {tied.name!r}")


@torch.no_grad()
def _difference_to_first(tied: TiedParameters) -> float:
    """The distance of this rank's copies from that of the group's first rank."""
    flats = [copy.detach().reshape(-1) for copy in tied.copies]
    difference = torch.zeros((), dtype=torch.float64, device=flats[0].device)
    for first in range(0, flats[0].numel(), _CHUNK):
        reference = flats[0][first : first + _CHUNK].clone()
        if tied.group is not None:
            work = start(dist.broadcast, reference, group_src=0, group=tied.group)
            _comparison(tied).wait(work, reference, tied.group, host=True)
        for flat in flats:
            difference = torch.maximum(difference, _difference(flat[first : first + _CHUNK], reference))
    return float(difference.item())


def _difference(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The largest absolute difference; infinite if exactly one value is NaN, or infinities differ."""
    same = (values == reference) | (values.isnan() & reference.isnan())
    apart = (values.double() - reference.double()).abs().nan_to_num(nan=float("inf"))
    return torch.where(same, 0.0, apart).max()


def required_ties(
    *, models: Sequence[torch.nn.Module], config: Any, stages: Sequence[int]
) -> tuple[TiedParameters, ...]:
    """The ties whose ``REDUCE`` the plan of a step needs, checked against this rank's ``models``, which are ``stages``.

    Raises:
        GradientError: a tie of one of ``stages`` without a copy in ``models``, a tied parameter whose tie the config
            does not have, or one whose wrapper would sum over replicas what its ``REDUCE`` sums as well.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> head = torch.nn.Linear(4, 8, bias=False)
        >>> config = SimpleNamespace(tied_parameters=[TiedParameters("embedding", (0, 3), (head.weight,))])
        >>> [tie.name for tie in required_ties(models=[head], config=config, stages=[3])]
        ['embedding']
    """
    ties: tuple[TiedParameters, ...] = tuple(getattr(config, "tied_parameters", ()))
    parameters = {id(parameter): parameter for model in models for parameter in model.parameters()}
    for tie in ties:
        held = sorted(set(tie.stages) & set(stages))
        if held and not any(id(copy) in parameters for copy in tie.copies):
            where = f"tied parameter {tie.name!r} is on stage {held[0]}"
            raise GradientError(f"{where}, whose model trains none of its copies")
    names = {tie.name for tie in ties}
    if getattr(config, "finalize_model_grads_func", None) is None:
        _require_declared_ties(models, names)
    for mark in filter(None, (marks_of(parameter).tie for parameter in parameters.values())):
        if mark.name not in names:
            raise GradientError(
                f"a parameter is tied as {mark.name!r}, which config.tied_parameters does not have ({sorted(names)}): "
                "nothing sums its copies"
            )
        if mark.over_replicas and any(hasattr(model, "no_sync") for model in models):
            raise GradientError(
                f"tied parameter {mark.name!r} is summed over replicas by its REDUCE, and by the model's wrapper as "
                "well; tie it with group=collection.embd in place of grids=..., or pass the bare module"
            )
    return ties


def _require_declared_ties(models: Sequence[torch.nn.Module], names: Collection[str]) -> None:
    """Raise for a parameter to train with copies on other ranks that is none of ``names``."""
    for model in models:
        ties = _declared_ties(model)
        here = {other.number for other in models if ties and _declared_ties(other) == ties}
        for tie in ties:
            copies = dict(zip(tie.stages, tie.names, strict=True))
            if tie.name in names or model.number not in copies or here.issuperset(copies):
                continue
            if model.get_parameter(copies[model.number]).requires_grad:
                raise GradientError(
                    f"{tie.name!r} is one parameter on the stages {sorted(copies)}, and config.tied_parameters does "
                    f"not have it ({sorted(names)}): nothing sums its copies; set it to "
                    "tie_stage_parameters(stage.ties, stage, grid)"
                )


def _declared_ties(model: Any) -> tuple[Any, ...]:
    """The ``ties`` of a stage of `pipegrid.training.pipeline_stage`; another model's attribute of that name is none."""
    ties = getattr(model, "ties", ())
    ours = isinstance(ties, tuple) and hasattr(model, "number") and all(hasattr(tie, "stages") for tie in ties)
    return ties if ours else ()


def tied_stages(tied: Iterable[TiedParameters]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The name and the stages of each tied parameter, hashable: pairs of the mapping for `lower` and `with_reduce`.

    Examples:
        >>> tied_stages([TiedParameters("embedding", stages=(0, 3))])
        (('embedding', (0, 3)),)
    """
    pairs = tuple((each.name, each.stages) for each in tied)
    if len(dict(pairs)) != len(pairs):
        raise GradientError(f"tied parameters have the names {[name for name, _ in pairs]}; names are unique")
    return pairs
