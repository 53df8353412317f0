"""The module of one stage: the model's own forward, over the parts of the stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from pipegrid.autograd import compile_split
from pipegrid.core.edge import Edge
from pipegrid.core.fields import checked
from pipegrid.core.graph import ModuleGraph, chain
from pipegrid.core.skips import hops_of_value, skips_among, values_by_edge
from pipegrid.stages.assignment import Assignment, Tie
from pipegrid.stages.calls import by_name
from pipegrid.stages.errors import CutError
from pipegrid.stages.flow import StageFlow
from pipegrid.stages.proof.boundaries import size
from pipegrid.stages.proof.proof import Proofs, without
from pipegrid.stages.skeleton import Needs, StageRun, first_tensor, skeleton_of
from pipegrid.stages.skips import SkipCarrier
from pipegrid.stages.slicing.slices import forward_of_slice, require_slices
from pipegrid.stages.tested_versions import say_untested_versions
from pipegrid.stages.torch_compat import adopt, tree_map_only

if TYPE_CHECKING:
    from pipegrid.stages.slicing.slice_cache import SequenceSlice

Compile = Literal["whole", "split"]
_HIDDEN_AXES = 3  # rows, tokens, width


class _Looked(Exception):  # noqa: N818 -- no error
    """Ends a call that was looked at."""


class Stage(nn.Module):
    """A stage of a model, made by `pipeline_stage`. Parameters and ``state_dict`` have the names of the whole model.

    Attributes:
        number: of the stage in the layout.
        placement: the pp rank of each stage of the layout, where `pipeline_stage` was given the grid.
        whole: the model's tree with parts of other stages replaced.
        ties: the parameters of the model that are on several stages, of this one or not.
        config: read by the step functions; with ``check`` True, the first forward of stage 0 compares the stages, with
            None one whose cut is not proved.
        proofs: of the calls of this cut; None: calls are not proved.
        received: what arrived for the running microbatch: a payload, or payloads by source module.
        kv_caches: while tokens are generated, the KV cache of each microbatch.
        current_microbatch: its number, set by the step functions.
        current_slice: the slice of it, set by the step functions of a schedule with slices.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        >>> pipeline_stage(model, "t|t", 1, names=Names("0")).number
        1
    """

    whole: nn.Module
    sends_lists = True  # read by the step functions: a list that a layer returned is one payload

    def __init__(
        self,
        model: nn.Module,
        assignment: Assignment,
        number: int,
        *,
        placement: tuple[int, ...] | None = None,
        module: str | None = None,
        output: Callable[[Any], Any] | None = None,
        config: Any = None,
        carry: Sequence[str] = (),
        proofs: Proofs | None = None,
        check: Any = None,
    ) -> None:
        super().__init__()
        say_untested_versions()  # once in a process: generate() runs stages that were made here
        self._run = StageRun(needs=Needs(writes=assignment.num_stages > 1))
        whole = skeleton_of(model, assignment, number, self._run)
        self.__dict__["whole"] = whole  # no submodule: parameters keep their names
        adopt(self, whole)
        self.number, self.module, self.config = number, module, config
        self.placement = placement
        self.received: Any = None
        self.kv_caches: Sequence[Any] | None = None
        self.current_microbatch = 0
        self.current_slice: SequenceSlice | None = None
        self._output, self.assignment, self.proofs, self._check = output, assignment, proofs, check
        self._flow = StageFlow(whole, assignment, number)
        self._carrier = SkipCarrier(whole, number, range(assignment.num_stages) if placement is None else placement)
        self._run.real, self._run.given = self._carrier.real, self._carrier.given
        self._sends = output is not None or not self.is_last
        self._carry = (carry,) if isinstance(carry, str) else tuple(carry)
        for name in self._carry:
            if name not in self._flow.accepted:
                takes = ", ".join(self._flow.accepted)
                raise CutError(f"carry has {name!r}, and the forward of {type(whole).__name__} takes {takes}")
        self.training = model.training  # of its parts each is as it was made

    def __deepcopy__(self, memo: dict[int, Any]) -> Stage:
        """A stage with modules and values of its own, as for averaged weights; it shares what the job has once."""
        memo.update({id(one): one for one in (self.config, self.proofs, self._check)})
        made: Stage = memo.setdefault(id(self), object.__new__(type(self)))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

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
    def skips(self) -> tuple[Edge, ...]:
        """The edges past stages by which they hand on values, of the calls that are proved by now."""
        return skips_among(self._edges())

    @property
    def hands_on(self) -> bool:
        """Whether stages hand on values, past others or to the next alone, in a call that is proved by now."""
        return bool(self._edges())

    def _edges(self) -> tuple[Edge, ...]:
        carrier = self._carrier
        calls = () if self.proofs is None else self.proofs.skips
        edges = (values_by_edge(one.uses, carrier.placement, carrier.hosts) for one in calls)
        return tuple(sorted({edge for each in edges for edge in each}))

    @property
    def graph(self) -> ModuleGraph:
        """The graph of the stages, for a communicator: a chain, and `skips`."""
        return chain(self.assignment.num_stages, self.skips)

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
            self.proofs.outline.cast(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def set_input_tensor(self, received: Any) -> None:
        """Take what arrived: a list of one payload, or a dict of payloads by source module."""
        # Module.__setattr__ looks at it as at a parameter or a module, in each microbatch.
        self.__dict__["received"] = received[0] if isinstance(received, list) else received

    def describe_skips(self) -> str:
        """The values that stages hand on past others, in each kind of call, with their bytes; "" if there are none."""
        lines: list[str] = []
        for proof in () if self.proofs is None else self.proofs.handing_on:
            sent, passed_on = map(size, proof.traffic(self._carrier.placement))
            values = f"{len(proof.skips)} value{'s' if len(proof.skips) > 1 else ''}"
            lines.append(
                f"{self.assignment.num_stages} stages hand on {values} past others: {sent} of a microbatch go forward "
                f"between positions, {passed_on} if each stage passed them on to the next"
            )
            hosts, placement = self._carrier.hosts, self._carrier.placement
            if hosts is None:
                lines += [f"  {skip}" for skip in proof.skips]
                continue
            crossing, straight = map(size, proof.between_hosts(placement, hosts))
            lines.append(f"  {crossing} of that between hosts, {straight} if each went straight from its source")
            for skip in proof.skips:
                hops = hops_of_value(skip, placement, hosts)
                lines.append(f"  {skip}, by {', '.join(map(str, hops)) or 'hidden states'}")
        return "\n".join(lines)

    def place(self, placement: Sequence[int], hosts: Sequence[Hashable] | None = None) -> None:
        """Hand on values between stages on these positions, all of which know it; by default each has its own.

        Args:
            placement: the position of each stage.
            hosts: of each stage, the host of its position, or what else those near it share: values go to each host
                once, and are forwarded there. None, or all alike: straight to each position.
        """
        self._carrier.placement = tuple(placement)
        self._carrier.hosts = None if hosts is None or len(set(hosts)) == 1 else tuple(hosts)
        self._carrier.skips = None  # with edges anew

    def look(self, call: Callable[[], Any]) -> None:
        """Prove the call of this stage that ``call`` makes, which ends there; no forward runs."""

        def proved(*args: Any, **kwargs: Any) -> Any:
            kwargs, args = by_name(self._flow.accepted, args, kwargs) if args else kwargs, ()
            if self.proofs is not None:
                self.proofs.found(self, args, kwargs)
            raise _Looked

        self.__dict__["forward"] = proved  # in place of the method
        try:
            call()
        except _Looked:
            pass
        finally:
            del self.__dict__["forward"]

    def set_skips(self, arrived: Mapping[Edge, Sequence[torch.Tensor | None]]) -> None:
        """Take the values that came along edges between stages of the model, before a forward."""
        self._carrier.arrived = arrived

    def take_skips(self) -> dict[Edge, list[torch.Tensor]]:
        """The tensors that leave along edges after a forward: for the next stage beside the hidden states, or past it.

        Raises:
            CutError: values came that the call of this stage has no use for.
        """
        try:
            if self._run.needs.skips is not None:
                return self._carrier.leaving()
            arrived = self._carrier.arrived or {}
            came = [str(edge) for edge, values in arrived.items() if any(one is not None for one in values)]
            if came:
                raise CutError(
                    f"values came to stage {self.number} along edges {', '.join(came)}, and by its call it uses none; "
                    "give every stage the same batch"
                )
            return {}
        finally:
            self._carrier.end()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the whole model, on the last stage; the hidden states before.

        Arguments are those of the whole model.
        """
        received = self.received
        if self.number == 0:
            received = None
        elif not isinstance(received, torch.Tensor):
            received = self._arrived(received)
        part = None if self.current_slice is None or self._slice_argument is None else self.current_slice
        if received is not None or self._carry or self.kv_caches is not None or part is not None:
            kwargs, args = by_name(self._flow.accepted, args, kwargs) if args else kwargs, ()
        carried: list[Any] = []
        if self._carry and received is None:
            carried = [self._to_carry(name, kwargs) for name in self._carry]
        elif self._carry:
            received, *carried = received
            named = zip(self._carry, carried, strict=True)
            kwargs |= {name: value for name, value in named if value is not None}
        comparison = partial(self._comparison, args, kwargs) if received is None else None
        if comparison is not None and self._check is not None and getattr(self.config, "check", None):
            if (compare := comparison()) is not None:
                compare()
            self._check = None
        # Of generated tokens the first pass, over the prompts: further ones do the same with the cache.
        further = self.kv_caches is not None and self.kv_caches[self.current_microbatch].mask is not None
        if self.proofs is not None and self.assignment.num_stages > 1 and not further:
            # Of a stage whose rank has no ids, a stand-in for the result of the embedding:
            given = kwargs.get("input_ids") is not None or kwargs.get("inputs_embeds") is not None
            hidden = None if given or received is None or not self._flow.embeds else self._flow.embedded(received)
            self._run.needs = self.proofs.require(self, args, kwargs, hidden, comparison)
        needs = self._run.needs
        of_modules = not isinstance(received, torch.Tensor) and isinstance(received, Mapping)
        if of_modules and needs.dicts is not None and self.number not in needs.dicts:
            raise self._no_module(received)
        if needs.skips is not None:
            if part is not None:
                raise CutError(f"stages hand on {', '.join(map(str, needs.skips.uses))}; slices of it are not")
            self._carrier.begin(needs.skips, received, copies=needs.writes)
        if self.kv_caches is not None:
            kwargs = self._with_cache(received, kwargs)
        if part is None or self._slice_argument is None:
            result = self._flow.run(self._run, received, args, kwargs)
        else:
            run = partial(self._flow.run, self._run, received, ())
            tokens = self._tokens(received, kwargs)
            result = forward_of_slice(
                self.whole, self.assignment, self.number, part, self._slice_argument, tokens, kwargs, run
            )
        if needs.absent and not further and self.is_last:
            result = without(result, needs.absent)
        return self._sent(result, carried) if self._sends else result

    def _comparison(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], None] | None:
        """A comparison of the call in numbers, of a stage whose config asks for it or leaves it open."""
        check, asked = self._check, getattr(self.config, "check", None)
        if check is None or asked is False or (asked is None and not (self.training and check.make is not None)):
            return None
        return lambda: check(by_name(self._flow.accepted, args, kwargs) if kwargs else args)

    def _to_carry(self, name: str, kwargs: Mapping[str, Any]) -> Any:
        if name not in kwargs and self.kv_caches is None:
            raise CutError(
                f"carry has {name!r}, and stage 0 is called with {', '.join(kwargs) or 'nothing'}; call it with "
                f"{name}=... (None is a value), or leave it out of carry"
            )
        return kwargs.get(name)

    def _arrived(self, received: Any) -> Any:
        """The payload of the stage before: hidden states, and what is carried with them."""
        if (self.module is not None or self._carry) and isinstance(received, Mapping):
            if self.module not in received:
                raise self._no_module(received)
            received = received[self.module]
        if received is None:
            raise CutError(f"stage {self.number} has received nothing; call set_input_tensor, as the step functions do")
        return received

    def _no_module(self, received: Mapping[Any, Any]) -> CutError:
        return CutError(
            f"stage {self.number} has received from {', '.join(map(repr, received))}, and its own module is "
            f"{self.module!r}; give pipeline_stage(..., module=...)"
        )

    def _sent(self, result: Any, carried: Sequence[Any]) -> Any:
        """The payload for the stage after; on the last stage ``output`` of what the model returns.

        Lanes send what they are given, and only memory in order: views (a transpose, a bias of heads) are copied here.
        """
        if self._output is not None and self.is_last:
            result = self._output(result)
        elif self._carry:
            result = (result, *carried)
        if isinstance(result, torch.Tensor):  # most are, and have nothing to walk
            result = result.contiguous()
        else:
            result = tree_map_only(torch.Tensor, torch.Tensor.contiguous, result)
        return result if self.module is None else {self.module: result}

    def _with_cache(self, received: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        assert self.kv_caches is not None
        tokens = self._tokens(received, kwargs)
        if tokens is not kwargs.get("input_ids") and tokens.dim() != _HIDDEN_AXES:
            raise CutError(
                f"stage {self.number} generates tokens of hidden states with the shape {list(tokens.shape)}, and which "
                "of their axes are rows and tokens is known of [rows, tokens, width] alone"
            )
        batch, length = tokens.shape[:2]
        inputs = self.kv_caches[self.current_microbatch].inputs(kwargs, batch, length, tokens.device)
        return {name: value for name, value in inputs.items() if name in self._flow.accepted}

    def _tokens(self, received: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The tensor with the batch and the tokens of a forward as its first two axes: hidden states or ids."""
        hidden = kwargs.get("inputs_embeds") if received is None else first_tensor(received)
        return kwargs["input_ids"] if hidden is None else hidden

    @cached_property
    def _slice_argument(self) -> str | None:
        """The argument for the cache of Hugging Face's; None where attention modules read the slice themselves."""
        if any(hasattr(module, "current_slice") for module in self.modules() if module is not self):
            return None
        return require_slices(self, self.whole, self.assignment)


def compile_layers(
    stage: Stage,
    *,
    compile: Compile = "split",  # noqa: A002 -- what is asked of torch.compile
    backend: str = "inductor",
    dynamic: bool | None = False,
) -> None:
    """Compile each layer of a stage in place, before its first forward and after `parallelize_module`.

    Args:
        stage: made by `pipeline_stage`.
        compile: ``"split"``: the backward of a layer runs in halves where the schedule has halves. ``"whole"``:
            torch's own regions, which run whole at I. Tensor-parallel layers cannot be split.
        backend: of `torch.compile`.
        dynamic: as of `torch.compile`; False compiles once for each shape.

    Raises:
        SplitBackwardError: this torch has no joint graphs (see `compile_split`). A region that cannot be split raises
            one in its first forward.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        >>> compile_layers(pipeline_stage(model, "t|t", 0, names=Names("0")), backend="eager")
    """
    if checked(compile, Compile, "compile", CutError) == "whole":
        for name in stage.layers:
            stage.get_submodule(name).compile(backend=backend, dynamic=dynamic)
        return
    for name in stage.layers:
        compile_split(stage.get_submodule(name), backend=backend, dynamic=dynamic)
