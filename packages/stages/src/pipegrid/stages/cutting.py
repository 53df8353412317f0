"""Stages out of a model: which ones, their parameters, the proof of the cut; and all of them against the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack, overload

import torch
from attrs import frozen
from torch import Tensor, nn

from pipegrid.core.fields import Index, checked, shown
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.stages.assignment import Assignment, as_layout, assign, places_on, require_no_shared_memory
from pipegrid.stages.building.build import planned, require_not_compiled, require_sizes, require_values
from pipegrid.stages.calls import called_with
from pipegrid.stages.comparison.compare import StageComparison, compare
from pipegrid.stages.errors import CutError
from pipegrid.stages.names import Names
from pipegrid.stages.proof.proof import Proofs
from pipegrid.stages.skeleton import with_buffers_apart
from pipegrid.stages.stage import Stage
from pipegrid.topology import HyperCommGrid
from pipegrid.topology.world import resolve_rank

Model = nn.Module | Callable[[], nn.Module]
Layout = str | PipelineParallelLayerLayout


class StageOptions(TypedDict, total=False):
    """Arguments of `pipeline_stage` that have no part in the type of its result."""

    names: Names | None
    module: str | None
    output: Callable[[Any], Any] | None
    config: Any
    carry: Sequence[str]
    batch: Any
    allow_empty: bool


@overload
def pipeline_stage(
    model: Model, layout: Layout, stage: int | HyperCommGrid, *, schedule: None = ..., **options: Unpack[StageOptions]
) -> Stage: ...


@overload
def pipeline_stage(
    model: Model, layout: Layout, stage: Sequence[int], *, schedule: None = ..., **options: Unpack[StageOptions]
) -> list[Stage]: ...


@overload
def pipeline_stage(
    model: Model, layout: Layout, stage: HyperCommGrid, *, schedule: str, **options: Unpack[StageOptions]
) -> list[Stage]: ...


def pipeline_stage(
    model: nn.Module | Callable[[], nn.Module],
    layout: str | PipelineParallelLayerLayout,
    stage: int | Sequence[int] | HyperCommGrid,
    *,
    schedule: str | None = None,
    names: Names | None = None,
    module: str | None = None,
    output: Callable[[Any], Any] | None = None,
    config: Any = None,
    carry: Sequence[str] = (),
    batch: Any = None,
    allow_empty: bool = False,
) -> Stage | list[Stage]:
    """The module of a stage of ``model``: its own layers and parameters, under their names in the whole model.

    Every stage is called like the whole model, ``stage(**batch)``; all but the first replace the hidden states by
    those received. Masks, position ids and rotary tables are made on every stage by the model's own code, from the
    batch: later stages read the shapes of its ids or pixels, and the values of its masks.

    Args:
        model: the whole model; its parameters are shared with the stage. Or a function that makes it: then the
            parameters of other stages are never in memory together, and initial values are bit for bit those of the
            whole model in one process with the same seed.
        layout: of the model's layers, such as ``"Et*2|t*2L"``; without ``E`` the embedding is on the first stage,
            without ``L`` the head on the last.
        stage: its number; or the numbers of all stages on this rank, which share tied parameters. Or the module's grid:
            then the stages of this rank, of a layout with one stage for each pp rank or with those of ``schedule``.
        schedule: with a grid, the name of a schedule such as ``"zero_bubble_v"``: the result is the list of this
            rank's stages, whose ``placement`` a communicator takes.
        names: where the parts are; None: by the names that Hugging Face models have.
        module: the name of the model in a graph of several; hidden states are then sent as ``{module: hidden}``.
        output: of the last stage: from what the model returns to what is sent to other modules.
        config: a `PipelineConfig`.
        carry: arguments of the model that travel from stage to stage with the hidden states, such as
            ``("attention_mask",)`` or ``("position_ids",)``: the first stage is called with them, the others are not,
            and their ranks need no data for them.
        batch: what the model is called with, a dict of arguments by name or a tuple of positional ones: the cut is
            proved here (`prove_cut`), before parameters have values. None: in the first forward of each stage.
        allow_empty: stages without parameters are allowed; they pass on what they receive. The same on all ranks.

    Raises:
        CutError: layers not found, a layout that does not fit the model, or with a grid other than pp x chunks stages,
            a stage that does not exist or has no parameters, a model on the meta device, or a ``batch`` for which the
            cut is not proved.
        PlanError: no schedule has that name.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        >>> stage = pipeline_stage(model, "t|t", 1, names=Names("0"))
        >>> [name for name, _ in stage.named_parameters()]
        ['0.1.weight', '0.1.bias']
    """
    layout = as_layout(layout)
    several = schedule is not None or (isinstance(stage, Sequence) and not isinstance(stage, str))
    numbers, placement = _numbers(layout, stage, schedule)
    if output is not None and not callable(output):
        raise CutError(f"output is {shown(output)}; give a function from what the model returns to what is sent")
    chosen = _Cut(None if isinstance(model, nn.Module) else model, layout, names, numbers, carry, allow_empty)
    model, assignment, proofs = chosen.built(model, batch)
    made = [
        Stage(
            model if number == numbers[0] else with_buffers_apart(model, assignment),
            assignment,
            number,
            placement=placement,
            module=module,
            output=output,
            config=config,
            carry=carry,
            proofs=proofs,
            check=chosen,
        )
        for number in numbers
    ]
    return made if several else made[0]


def _numbers(
    layout: PipelineParallelLayerLayout, stage: int | Sequence[int] | HyperCommGrid, schedule: str | None
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The numbers of this rank's stages; with a grid, the pp rank of every stage as well."""
    if isinstance(stage, HyperCommGrid):
        placement, here = places_on(layout, stage, schedule), stage.coords(resolve_rank()).get("pp", 0)
        return tuple(number for number, place in enumerate(placement) if place == here), placement
    if schedule is not None:
        raise CutError(f"schedule is {schedule!r}, and stage is {shown(stage)}; give the grid in its place")
    several = isinstance(stage, Sequence) and not isinstance(stage, str)
    found = checked(stage, tuple[Index, ...] if several else Index, "stage", CutError)
    numbers: tuple[int, ...] = found if several else (found,)
    if len(set(numbers)) < len(numbers):
        raise CutError(f"stage is {stage!r}; a rank has each of its stages once")
    if max(numbers, default=0) >= len(layout.stages):
        raise CutError(f"stage is {stage}; layout {layout.short_text()} has the stages 0..{len(layout.stages) - 1}")
    return numbers, None


@frozen(eq=False)
class _Cut:
    """The stages ``numbers`` of a layout, out of a model; ``make``: the function that makes it, where there is one."""

    make: Callable[[], nn.Module] | None
    layout: PipelineParallelLayerLayout
    names: Names | None
    numbers: Sequence[int]
    carry: Sequence[str]
    allow_empty: bool

    def built(self, model: Model, batch: Any) -> tuple[nn.Module, Assignment, Proofs]:
        """The model with the parameters of the stages, its assignment, and the proofs of the cut."""
        proofs: Proofs | None = None
        if not isinstance(model, nn.Module):
            first, build = planned(model)
            assignment = self._assigned(first)
            proofs = None if batch is None else self._proved(first, assignment, batch)
            model = build(self._own(assignment))
        assignment = self._assigned(model)
        require_values(model, self._own(assignment))
        return model, assignment, proofs or self._proved(model, assignment, batch)

    def _assigned(self, whole: nn.Module) -> Assignment:
        require_sizes(whole)
        require_not_compiled(whole)
        assignment = assign(whole, self.layout, self.names)
        require_no_shared_memory(whole, assignment, self.numbers)
        for number in range(assignment.num_stages):  # of all ranks: each raises, and none waits for the others
            if not self.allow_empty and not assignment.parameters(number):
                raise CutError(
                    f"stage {number} of layout {self.layout.short_text()} has no parameters; move a layer to it, or "
                    "give pipeline_stage allow_empty=True"
                )
        return assignment

    def _own(self, assignment: Assignment) -> set[str]:
        return {name for number in self.numbers for name in assignment.parameters(number)}

    def _proved(self, whole: nn.Module, assignment: Assignment, batch: Any) -> Proofs:
        """The proofs of the cut; with a ``batch``, that of its call."""
        proofs = Proofs(whole, assignment, self.layout.short_text())
        if batch is not None:
            proofs.require(whole, *called_with(batch), None)
        return proofs

    def __call__(self, batch: Any) -> None:
        """`check_stages` of a call of stage 0."""
        if self.make is None:
            raise CutError(
                "config.check compares the stages with the whole model, which is not kept; give pipeline_stage a "
                "function that makes it, or call check_stages(model, layout, batch) before"
            )
        check_stages(self.make, self.layout, batch, names=self.names, carry=self.carry)


def check_stages(
    make: Callable[[], nn.Module] | nn.Module,
    layout: str | PipelineParallelLayerLayout,
    batch: Any,
    *,
    names: Names | None = None,
    carry: Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None = None,
) -> StageComparison:
    """Compare the stages of a cut with the whole model: one microbatch, its loss and every gradient, in this process.

        print(check_stages(lambda: LlamaForCausalLM(tiny_config), "Et*2|t*2L", batch))

    First the cut is proved (`prove_cut`). Then both run: the whole model by autograd alone; each stage as on a rank of
    its own, with what the stage before has sent. Random numbers are the same in both. Several
    copies of the model are in memory, so give a small config of the same family.

    Args:
        make: a function that makes the whole model: stages are made as on ranks, and their initial values are
            compared as well. Or the model, which is copied, and stays as it is.
        layout: as in `pipeline_stage`.
        batch: what the model is called with: a dict of arguments by name, or a tuple of positional ones. Tensors are
            moved to the device of the model.
        names: as in `pipeline_stage`.
        carry: as in `pipeline_stage`; stages behind the first are called without these arguments.
        loss: of what the model returns. None: the model's own loss, or a weighted sum of all that it returns.
        dtype: compute in this dtype, such as ``torch.float64``; None: as made.
        optimizer: from named parameters to an optimizer, as the script makes it of ``Pipeline.named_parameters()``. One
            of each stage then makes an update, and so does one of the whole model.

    Raises:
        CutError: the cut is not proved, or values differ by more than rounding: the text names the parameters, the
            stages that hold them, and by how much.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        >>> found = check_stages(model, "t|t", (torch.ones(2, 4),), names=Names("0"), loss=torch.sum)
        >>> found.loss == found.loss_of_stages
        True
    """
    args, kwargs = called_with(batch)

    def made() -> nn.Module:
        return copy.deepcopy(make) if isinstance(make, nn.Module) else make()

    def stage_of(number: int) -> Stage:
        model = made() if isinstance(make, nn.Module) else make
        return pipeline_stage(model, layout, number, names=names, carry=carry, allow_empty=True)

    found = compare(made, stage_of, args, kwargs, carry=carry, loss=loss, dtype=dtype, optimizer=optimizer)
    found.require()
    return found
