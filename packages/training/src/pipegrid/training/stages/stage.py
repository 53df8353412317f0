"""The module of one stage: the model's own forward, over the parts of the stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.topology.fields import Index, checked, shown
from pipegrid.training.errors import CutError
from pipegrid.training.stages.assignment import Assignment, Tie, as_layout, assign, require_no_shared_memory
from pipegrid.training.stages.build import build, require_sizes
from pipegrid.training.stages.flow import Flow
from pipegrid.training.stages.names import Names, find_names, given_names
from pipegrid.training.stages.proof import Proofs, without
from pipegrid.training.stages.shell import shell_of
from pipegrid.training.stages.slices import forward_of_slice, require_slices
from pipegrid.training.stages.stubs import Run, first_tensor
from pipegrid.training.stages.tree import adopt

if TYPE_CHECKING:
    from pipegrid.schedules import Slice


@overload
def cut(
    model: nn.Module | Callable[[], nn.Module],
    layout: str | PipelineParallelLayerLayout,
    stage: int,
    *,
    names: Names | None = ...,
    module: str | None = ...,
    output: Callable[[Any], Any] | None = ...,
    config: Any = ...,
    carry: Sequence[str] = ...,
    allow_empty: bool = ...,
) -> Stage: ...


@overload
def cut(
    model: nn.Module | Callable[[], nn.Module],
    layout: str | PipelineParallelLayerLayout,
    stage: Sequence[int],
    *,
    names: Names | None = ...,
    module: str | None = ...,
    output: Callable[[Any], Any] | None = ...,
    config: Any = ...,
    carry: Sequence[str] = ...,
    allow_empty: bool = ...,
) -> list[Stage]: ...


def cut(
    model: nn.Module | Callable[[], nn.Module],
    layout: str | PipelineParallelLayerLayout,
    stage: int | Sequence[int],
    *,
    names: Names | None = None,
    module: str | None = None,
    output: Callable[[Any], Any] | None = None,
    config: Any = None,
    carry: Sequence[str] = (),
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
        stage: its number; or the numbers of all stages on this rank, which share tied parameters.
        names: where the parts are; None: by the names that Hugging Face models have.
        module: the name of the model in a graph of several; hidden states are then sent as ``{module: hidden}``.
        output: of the last stage: from what the model returns to what is sent to other modules.
        config: a `PipelineConfig`.
        carry: arguments of the model that travel from stage to stage with the hidden states, such as
            ``("attention_mask",)`` or ``("position_ids",)``: the first stage is called with them, the others are not,
            and their ranks need no data for them.
        allow_empty: stages without parameters are allowed; they pass on what they receive.

    Raises:
        CutError: layers not found, a layout that does not fit the model, a stage that does not exist or has no
            parameters, or a model on the meta device.
    """
    layout = as_layout(layout)
    several = isinstance(stage, Sequence) and not isinstance(stage, str)
    stages = checked(stage, tuple[Index, ...] if several else Index, "stage", CutError)
    stages = stages if several else (stages,)
    if len(set(stages)) < len(stages):
        raise CutError(f"stage is {stage!r}; a rank has each of its stages once")
    if output is not None and not callable(output):
        raise CutError(f"output is {shown(output)}; give a function from what the model returns to what is sent")
    if max(stages, default=0) >= len(layout.stages):
        raise CutError(f"stage is {stage}; layout {layout.short_text()} has the stages 0..{len(layout.stages) - 1}")

    def assigned(whole: nn.Module) -> Assignment:
        assignment = assign(whole, layout, find_names(whole) if names is None else given_names(whole, names))
        require_no_shared_memory(whole, assignment, stages)
        for number in stages:
            if not allow_empty and not assignment.parameters(number):
                raise CutError(
                    f"stage {number} of layout {layout.short_text()} has no parameters; move a layer to it, or pass "
                    "allow_empty=True"
                )
        return assignment

    if not isinstance(model, nn.Module):
        model = build(model, lambda whole: {name for n in stages for name in assigned(whole).parameters(n)})
    require_sizes(model)
    assignment = assigned(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta and assignment.stage_of_parameter[name] in stages:
            raise CutError(f"{name} is on the meta device; pass a function that makes the model on a CPU")
    proofs = Proofs(model, assignment, layout.short_text())
    made = [
        Stage(model, assignment, number, module=module, output=output, config=config, carry=carry, proofs=proofs)
        for number in stages
    ]
    return made if several else made[0]


class Stage(nn.Module):
    """A stage of a model, made by `cut`. Parameters and ``state_dict`` have the names of the whole model.

    Attributes:
        number: of the stage in the layout.
        whole: the model's tree with foreign parts replaced.
        ties: the parameters of the model that are on several stages, of this one or not.
        config: read by the step functions.
        received: what arrived for the running microbatch: a payload, or payloads by source module.
        memories: while tokens are generated, what the stage remembers of each microbatch.
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
    ) -> None:
        super().__init__()
        self._run = Run()
        whole = shell_of(model, assignment, number, self._run)
        self.__dict__["whole"] = whole  # no submodule: parameters keep their names
        adopt(self, whole)
        self.number, self.module, self.config = number, module, config
        self.received: Any = None
        self.memories: Sequence[Any] | None = None
        self.current_microbatch = 0
        self.current_slice: Slice | None = None
        self._output, self.assignment, self._proofs = output, assignment, proofs
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
    def layers(self) -> tuple[str, ...]:
        """The names of the stage's layers."""
        return self.assignment.held(self.number)

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters of the model on several stages."""
        return self.assignment.ties

    def train(self, mode: bool = True) -> Stage:
        """Switch to training or to evaluation."""
        super().train(mode)
        self.whole.training = mode
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Stage:
        """``to(dtype)`` and its like, which the proofs of calls follow."""
        if self._proofs is not None:
            self._proofs.cast(fn)
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
        if received is not None or self._carry or self.memories is not None or part is not None:
            kwargs, args = {**dict(zip(self._flow.accepted, args, strict=False)), **kwargs}, ()
        carried: list[Any] = []
        if self._carry and received is None:
            carried = [kwargs.get(name) for name in self._carry]
        elif self._carry:
            received, *carried = received
            given = zip(self._carry, carried, strict=True)
            kwargs |= {name: value for name, value in given if value is not None}
        absent: Sequence[str] = ()
        if self.memories is not None:
            kwargs = self._remembered(received, kwargs)
        elif self._proofs is not None and self.assignment.num_stages > 1:
            absent = self._proofs.require(self, args, kwargs, self._stand_in(received, kwargs))
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
                    f"{self.module!r}; give cut(..., module=...)"
                )
            received = received[self.module]
        if received is None:
            raise CutError(f"stage {self.number} has received nothing; call set_input_tensor, as the step functions do")
        return received

    def _sent(self, result: Any, carried: Sequence[Any]) -> Any:
        """The payload for the stage after; on the last stage what the model returns, or ``output`` of it."""
        if self.is_last:
            if self._output is None:
                return result
            result = self._output(result)
        elif self._carry:
            result = (result, *carried)
        return result if self.module is None else {self.module: result}

    def _remembered(self, received: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a forward, with what the stage remembers of the microbatch."""
        assert self.memories is not None
        tokens = self._tokens(received, kwargs)
        batch, length = tokens.shape[:2]
        inputs = self.memories[self.current_microbatch].inputs(kwargs, batch, length, tokens.device)
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
