"""The module of one stage: the model's own forward, over the parts of the stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.topology import HyperCommGrid
from pipegrid.topology.fields import Index, checked, shown
from pipegrid.topology.world import resolve_rank
from pipegrid.training.errors import CutError
from pipegrid.training.stages.assignment import Assignment, Tie, as_layout, assign, require_no_shared_memory
from pipegrid.training.stages.building.build import build, require_not_compiled, require_sizes
from pipegrid.training.stages.comparison import compare
from pipegrid.training.stages.flow import Flow
from pipegrid.training.stages.names import Names, find_names, given_names
from pipegrid.training.stages.places import places_on
from pipegrid.training.stages.proof import Proofs, called_with, without
from pipegrid.training.stages.shell import shell_of
from pipegrid.training.stages.slicing.slices import forward_of_slice, require_slices
from pipegrid.training.stages.stubs import Run, first_tensor
from pipegrid.training.stages.torch_compat import tree_map
from pipegrid.training.stages.tree import adopt

if TYPE_CHECKING:
    from pipegrid.schedules import Slice


@overload
def pipeline_stage(
    model: nn.Module | Callable[[], nn.Module],
    layout: str | PipelineParallelLayerLayout,
    stage: int | HyperCommGrid,
    *,
    schedule: None = ...,
    names: Names | None = ...,
    module: str | None = ...,
    output: Callable[[Any], Any] | None = ...,
    config: Any = ...,
    carry: Sequence[str] = ...,
    batch: Any = ...,
    allow_empty: bool = ...,
) -> Stage: ...


@overload
def pipeline_stage(
    model: nn.Module | Callable[[], nn.Module],
    layout: str | PipelineParallelLayerLayout,
    stage: Sequence[int],
    *,
    schedule: None = ...,
    names: Names | None = ...,
    module: str | None = ...,
    output: Callable[[Any], Any] | None = ...,
    config: Any = ...,
    carry: Sequence[str] = ...,
    allow_empty: bool = ...,
) -> list[Stage]: ...


@overload
def pipeline_stage(
    model: nn.Module | Callable[[], nn.Module],
    layout: str | PipelineParallelLayerLayout,
    stage: HyperCommGrid,
    *,
    schedule: str,
    names: Names | None = ...,
    module: str | None = ...,
    output: Callable[[Any], Any] | None = ...,
    config: Any = ...,
    carry: Sequence[str] = ...,
    batch: Any = ...,
    allow_empty: bool = ...,
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
        allow_empty: stages without parameters are allowed; they pass on what they receive.

    Raises:
        CutError: layers not found, a layout that does not fit the model, or with a grid other than pp x chunks stages,
            a stage that does not exist or has no parameters, a model on the meta device, or a ``batch`` for which the
            cut is not proved.
        PlanError: no schedule has that name.
    """
    layout, placement = as_layout(layout), None
    several = schedule is not None or (isinstance(stage, Sequence) and not isinstance(stage, str))
    if isinstance(stage, HyperCommGrid):
        placement, place = places_on(layout, stage, schedule), stage.coords(resolve_rank()).get("pp", 0)
        stage = [number for number, other in enumerate(placement) if other == place]
        stage = stage if several else stage[0]
    elif schedule is not None:
        raise CutError(f"schedule is {schedule!r}, and stage is {shown(stage)}; give the grid in its place")
    stages = checked(stage, tuple[Index, ...] if several else Index, "stage", CutError)
    stages = stages if several else (stages,)
    if len(set(stages)) < len(stages):
        raise CutError(f"stage is {stage!r}; a rank has each of its stages once")
    if output is not None and not callable(output):
        raise CutError(f"output is {shown(output)}; give a function from what the model returns to what is sent")
    if max(stages, default=0) >= len(layout.stages):
        raise CutError(f"stage is {stage}; layout {layout.short_text()} has the stages 0..{len(layout.stages) - 1}")

    def assigned(whole: nn.Module) -> Assignment:
        require_not_compiled(whole)
        assignment = assign(whole, layout, find_names(whole) if names is None else given_names(whole, names))
        require_no_shared_memory(whole, assignment, stages)
        for number in stages:
            if not allow_empty and not assignment.parameters(number):
                raise CutError(
                    f"stage {number} of layout {layout.short_text()} has no parameters; move a layer to it, or pass "
                    "allow_empty=True"
                )
        return assignment

    def proved(whole: nn.Module, assignment: Assignment) -> Proofs:
        proofs = Proofs(whole, assignment, layout.short_text())
        if batch is not None:
            proofs.require(whole, *called_with(batch), None)
        return proofs

    proofs, make = None, None if isinstance(model, nn.Module) else model
    if not isinstance(model, nn.Module):

        def wanted(whole: nn.Module) -> set[str]:
            nonlocal proofs
            assignment = assigned(whole)
            proofs = proved(whole, assignment) if batch is not None else None
            return {name for number in stages for name in assignment.parameters(number)}

        model = build(model, wanted)
    require_sizes(model)
    assignment = assigned(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta and assignment.stage_of_parameter[name] in stages:
            raise CutError(f"{name} is on the meta device; pass a function that makes the model on a CPU")
    proofs = proved(model, assignment) if proofs is None else proofs

    def compared(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if make is None:
            raise CutError(
                "config.check compares the stages with the whole model, which is not kept; give pipeline_stage a "
                "function that makes it, or call check_stages(model, layout, batch) before"
            )

        def stage_of(number: int) -> Stage:
            return pipeline_stage(make, layout, number, names=names, carry=carry, allow_empty=True)

        compare(make, stage_of, args, kwargs, carry=carry).require()

    made = [
        Stage(
            model,
            assignment,
            number,
            module=module,
            output=output,
            config=config,
            carry=carry,
            proofs=proofs,
            compared=compared,
        )
        for number in stages
    ]
    for each in made:
        each.placement = placement
    return made if several else made[0]


cut = pipeline_stage  # the former name


class Stage(nn.Module):
    """A stage of a model, made by `pipeline_stage`. Parameters and ``state_dict`` have the names of the whole model.

    Attributes:
        number: of the stage in the layout.
        placement: the pp rank of each stage of the layout, where `pipeline_stage` was given the grid.
        whole: the model's tree with foreign parts replaced.
        ties: the parameters of the model that are on several stages, of this one or not.
        config: read by the step functions; with ``check`` set, the first forward of stage 0 compares the stages.
        proofs: of the calls of this cut; None: calls are not proved.
        received: what arrived for the running microbatch: a payload, or payloads by source module.
        kv_caches: while tokens are generated, the KV cache of each microbatch.
        current_microbatch: its number, set by the step functions.
        current_slice: the slice of it, set by the step functions of a schedule with slices.
    """

    whole: nn.Module

    def __init__(
        self,
        model: nn.Module,
        assignment: Assignment,
        number: int,
        *,
        module: str | None = None,
        output: Callable[[Any], Any] | None = None,
        config: Any = None,
        carry: Sequence[str] = (),
        proofs: Proofs | None = None,
        compared: Callable[[Sequence[Any], Mapping[str, Any]], None] | None = None,
    ) -> None:
        super().__init__()
        self._run = Run()
        whole = shell_of(model, assignment, number, self._run)
        self.__dict__["whole"] = whole  # no submodule: parameters keep their names
        adopt(self, whole)
        self.number, self.module, self.config = number, module, config
        self.placement: tuple[int, ...] | None = None
        self.received: Any = None
        self.kv_caches: Sequence[Any] | None = None
        self.current_microbatch = 0
        self.current_slice: Slice | None = None
        self._output, self.assignment, self.proofs, self._compared = output, assignment, proofs, compared
        self._flow = Flow(whole, assignment, number)
        self._carry = (carry,) if isinstance(carry, str) else tuple(carry)
        for name in self._carry:
            if name not in self._flow.accepted:
                takes = ", ".join(self._flow.accepted)
                raise CutError(f"carry has {name!r}, and the forward of {type(whole).__name__} takes {takes}")
        self.train(model.training)

    @property
    def is_first(self) -> bool:
        """Whether the stage has no stage before it."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has no stage after it."""
        return self.number == self.assignment.num_stages - 1

    @property
    def stage_of_layout(self) -> tuple[int, int]:
        """The stage's number, and how many there are: what a step function compares with its communicator."""
        return self.number, self.assignment.num_stages

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the stage's layers."""
        return self.assignment.held(self.number)

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters of the model on several stages."""
        return self.assignment.ties

    def get_submodule(self, target: str) -> nn.Module:
        """A module by its name in the whole model, of which one may be called ``layers``."""
        return self.whole.get_submodule(target) if target else self

    def train(self, mode: bool = True) -> Stage:
        """Switch to training or to evaluation."""
        super().train(mode)
        self.whole.training = mode
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Stage:
        """``to(dtype)`` and its like, which the proofs of calls follow."""
        if self.proofs is not None:
            self.proofs.cast(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def set_input_tensor(self, received: Any) -> None:
        """Take what arrived: a list of one payload, or a dict of payloads by source module."""
        self.received = received[0] if isinstance(received, list) else received

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole model returns, on the last stage; the hidden states before.

        Arguments are those of the whole model.
        """
        received: Any = None if self.is_first else self._arrived()
        part = None if self.current_slice is None or self._slices_itself else self.current_slice
        if received is not None or self._carry or self.kv_caches is not None or part is not None:
            kwargs, args = {**dict(zip(self._flow.accepted, args, strict=False)), **kwargs}, ()
        carried: list[Any] = []
        if self._carry and received is None:
            carried = [self._to_carry(name, kwargs) for name in self._carry]
        elif self._carry:
            received, *carried = received
            given = zip(self._carry, carried, strict=True)
            kwargs |= {name: value for name, value in given if value is not None}
        if received is None and self._compared is not None and getattr(self.config, "check", False):
            self._compared(args, kwargs)
            self._compared = None
        absent: Sequence[str] = ()
        # Of generated tokens the first pass, over the prompts: further ones do the same with the cache.
        further = self.kv_caches is not None and self.kv_caches[self.current_microbatch].mask is not None
        if self.proofs is not None and self.assignment.num_stages > 1 and not further:
            absent = self.proofs.require(self, args, kwargs, self._stand_in(received, kwargs))
        if self.kv_caches is not None:
            kwargs = self._with_cache(received, kwargs)
        if part is None:
            result = self._flow.run(self._run, received, args, kwargs)
        else:
            result = forward_of_slice(
                self.whole,
                self.assignment,
                self.number,
                part,
                self._tokens(received, kwargs),
                kwargs,
                lambda given: self._flow.run(self._run, received, (), given),
            )
        if self.is_last and absent:
            result = without(result, absent)
        return self._sent(result, carried)

    def _to_carry(self, name: str, kwargs: Mapping[str, Any]) -> Any:
        if name not in kwargs and self.kv_caches is None:
            raise CutError(
                f"carry has {name!r}, and stage 0 is called with {', '.join(kwargs) or 'nothing'}; call it with "
                f"{name}=... (None is a value), or leave it out of carry"
            )
        return kwargs.get(name)

    def _stand_in(self, received: Any, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """What stands for the result of the embedding, of a stage whose rank has no ids."""
        if received is None or "inputs_embeds" not in self._flow.accepted or kwargs.get("input_ids") is not None:
            return None
        return None if kwargs.get("inputs_embeds") is not None else self._flow.embedded(received)

    def _arrived(self) -> Any:
        """The payload of the stage before: hidden states, and what is carried with them."""
        received = self.received
        if isinstance(received, Mapping):
            if self.module not in received:
                raise CutError(
                    f"stage {self.number} has received from {', '.join(map(repr, received))}, and its own module is "
                    f"{self.module!r}; give pipeline_stage(..., module=...)"
                )
            received = received[self.module]
        if received is None:
            raise CutError(f"stage {self.number} has received nothing; call set_input_tensor, as the step functions do")
        return received

    def _sent(self, result: Any, carried: Sequence[Any]) -> Any:
        """The payload for the stage after; on the last stage what the model returns, or ``output`` of it.

        Lanes send what they are given, and only memory in order: views (a transpose, a bias of heads) are copied here.
        """
        if self.is_last:
            if self._output is None:
                return result
            result = self._output(result)
        elif self._carry:
            result = (result, *carried)
        result = tree_map(lambda leaf: leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf, result)
        return result if self.module is None else {self.module: result}

    def _with_cache(self, received: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a forward, with the KV cache of the microbatch."""
        assert self.kv_caches is not None
        tokens = self._tokens(received, kwargs)
        batch, length = tokens.shape[:2]
        inputs = self.kv_caches[self.current_microbatch].inputs(kwargs, batch, length, tokens.device)
        return {name: value for name, value in inputs.items() if name in self._flow.accepted}

    def _tokens(self, received: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """What has the batch and the tokens of a forward as its first two axes: hidden states or ids."""
        hidden = kwargs.get("inputs_embeds") if received is None else first_tensor(received)
        return kwargs["input_ids"] if hidden is None else hidden

    @cached_property
    def _slices_itself(self) -> bool:
        """Whether attention modules of the model read the slice, rather than the cache of a Hugging Face model."""
        if any(hasattr(module, "current_slice") for module in self.modules() if module is not self):
            return True
        require_slices(self, self.assignment, self._flow.accepted, getattr(self.whole, "config", None))
        return False
