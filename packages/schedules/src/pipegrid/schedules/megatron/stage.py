"""The runtime's `Stage` over the user's ``forward_step_func`` and model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from pipegrid.autograd.tree import modules_in
from pipegrid.core.edge import Edge
from pipegrid.core.errors import StepArgumentError
from pipegrid.core.graph import ModuleGraph
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.megatron.aux_losses import AttachedLosses, grad_scale, one_like
from pipegrid.schedules.megatron.call import StepCall
from pipegrid.schedules.megatron.config import AuxLossScaler, unwrapped_attribute
from pipegrid.schedules.megatron.forward import (
    WithLoss,
    modules_with,
    run_model,
    scaled_loss,
)
from pipegrid.schedules.megatron.shapes import AnnouncedShapes, SentShape
from pipegrid.schedules.megatron.units.batches import UnitBatches
from pipegrid.schedules.megatron.units.numbers import StageUnits
from pipegrid.schedules.runtime import Forwarded, Slice, flatten

_NUMBERS = ("current_microbatch", "current_replica", "current_slice")
"""Attributes that are set on the modules that have them."""


@frozen(eq=False)
class StageCall:
    """What one stage needs in one call of a step function.

    Attributes:
        numbered: modules with a ``current_microbatch``.
        homed: modules with a ``current_replica``, the home of a microbatch of another replica; None at home.
        batches: the data iterator, where it is one by unit.
        sliced: modules with a ``current_slice``, in a plan with slices.
        set_input_tensor: the model's, looked up through wrappers.
        set_is_first_microbatch: likewise; None where it is not to be called.
        shapes: of messages, announced by ``adjust_tensor_shapes_fn`` or expected.
        context: makes the autocast context of each forward, where there is one.
        scalers: of attached losses; None where nothing is said of them, or nothing is trained.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: torch.nn.Module
    config: Any
    numbered: Sequence[torch.nn.Module]
    homed: Sequence[torch.nn.Module]
    batches: UnitBatches | None
    sliced: Sequence[torch.nn.Module]
    set_input_tensor: Any
    set_is_first_microbatch: Any
    shapes: AnnouncedShapes | SentShape | None
    context: Callable[[], AbstractContextManager[Any]] | None
    scalers: tuple[AuxLossScaler, ...] | None


@define(eq=False, kw_only=True)
class MegatronStage:
    """Runs one microbatch of one stage through `run_model`.

    In a graph of several modules, inputs are a dict by source module, and the output is one by the stage's own module.

    Attributes:
        stage: global number.
        units: the microbatches of its forwards here.
        vp_stage: chunk of the module, on a rank with several.
        cp_group: context-parallel ranks of the module.
        expected: the shape of sent messages, where the arguments fix it.
        per_token: losses are sums over tokens.
        weighted: what they count adds up to the microbatches of the job.
        loss_factor: factor of the stage's own loss, for a mean over its own replicas.
        checkpointed: the microbatches that checkpoint all activations, where the others follow the model's own setting.
        call: the arguments of the running step, and ``model``.
        infos: the ``info`` of the loss function for each microbatch, behind its number.
        num_tokens: tokens that the losses have counted, where losses are sums over tokens; None before the first.
    """

    graph: ModuleGraph
    stage: int
    units: StageUnits
    num_slices: int
    vp_stage: int | None
    cp_group: Any
    forward_only: bool
    collect_non_loss_data: bool
    expected: SentShape | None
    per_token: bool
    weighted: bool
    loss_factor: float
    checkpointed: Collection[int] | None
    call: StageCall | None = field(default=None, init=False)
    model: torch.nn.Module | None = field(default=None, init=False)
    infos: list[tuple[int, Any]] = field(factory=list, init=False)
    num_tokens: torch.Tensor | None = field(default=None, init=False)
    outgoing: tuple[Edge, ...] = field(init=False)
    attached: AttachedLosses = field(init=False)
    _one_module: bool = field(init=False)
    _first: int | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._one_module = len(self.graph.modules) == 1
        self._first = next(iter(self.units.order), None)
        self.attached = AttachedLosses(self.stage)
        self.outgoing = tuple(edge for edge in self.graph.stage_edges if edge.source == self.stage)

    def begin(
        self,
        call: StepCall,
        data_iterator: Any,
        model: torch.nn.Module,
        config: Any,
        announced: AnnouncedShapes | None,
        context: Callable[[], AbstractContextManager[Any]] | None,
        scalers: tuple[AuxLossScaler, ...] | None,
    ) -> None:
        """Look up, before a step runs, what its forwards need of the model and the config."""
        batches = data_iterator if isinstance(data_iterator, UnitBatches) else None
        if batches is not None or self.units.routes is not None:
            self._require_data(data_iterator, batches)
        starts = not self.forward_only or call.first_val_step is None or call.first_val_step
        found = modules_with(modules_in(model), *_NUMBERS)
        self.infos, self.num_tokens = [], None
        self.model = model
        self.call = StageCall(
            call.forward_step_func,
            data_iterator,
            model,
            config,
            found["current_microbatch"],
            found["current_replica"],
            batches,
            found["current_slice"] if self.num_slices > 1 else (),
            unwrapped_attribute(model, "set_input_tensor"),
            unwrapped_attribute(model, "set_is_first_microbatch") if starts else None,
            announced or self.expected,
            context,
            scalers,
        )

    def _require_data(self, data_iterator: Any, batches: UnitBatches | None) -> None:
        """Raise StepArgumentError for an iterator that does not have the batches of this stage's forwards."""
        if batches is not None and self.units.home(0) is None:
            raise StepArgumentError(
                "data_iterator is UnitBatches, and the replica of this rank is not known: pass a pg_collection with "
                "its dp group"
            )
        if batches is not None and self.num_slices > 1:
            raise StepArgumentError(
                f"data_iterator is UnitBatches, of whole microbatches: num_slices is {self.num_slices}"
            )
        if batches is None and data_iterator is not None and not self.units.in_order_at_home:
            raise StepArgumentError(
                f"by its routes stage {self.stage} does not compute all microbatches of replica {self.units.replica} "
                "in order on this rank, and a plain iterator has these; give data_iterator=UnitBatches(load)"
            )

    def end(self) -> None:
        """Drop all references of the call, so that a deleted model is freed at once."""
        if self.num_slices > 1:
            self.resume(None)
        self.call, self.model, self.infos, self.num_tokens = None, None, [], None

    def resume(self, part: Slice | None) -> None:
        """Set ``current_slice`` where modules have one: before a forward, and a backward, which may recompute."""
        for module in () if self.call is None else self.call.sliced:
            module.current_slice = part  # type: ignore[assignment]

    def forward(self, microbatch: int, inputs: Mapping[Edge, Any], part: Slice | None = None) -> Forwarded:
        """See `pipegrid.schedules.Stage.forward`; with slices, an item of the iterator is a slice."""
        call = self.call
        assert call is not None  # set by `begin`, before the runtime runs
        if call.shapes is not None:
            for payload in inputs.values():
                call.shapes.check(payload, sent=False, stage=self.stage, microbatch=microbatch)
        if call.numbered:
            number = microbatch if self.units.routes is None else self.units.microbatch(microbatch)
            for module in call.numbered:  # a number is none of what Module.__setattr__ looks for
                object.__setattr__(module, "current_microbatch", number)
        for module in call.homed:
            home = self.units.home(microbatch)
            module.current_replica = None if home == self.units.replica else home  # type: ignore[assignment]
        if call.batches is not None:
            call.batches.begin(self.units.units(microbatch))
        if part is not None:
            self.resume(part)
        if microbatch == self._first and call.set_is_first_microbatch is not None and (part is None or part.is_first):
            call.set_is_first_microbatch()
        received = (
            next(iter(inputs.values()), None)
            if self._one_module
            else {self.graph.module_of(edge.source)[0]: payload for edge, payload in inputs.items()}
        )
        output, loss_func = run_model(
            call.forward_step_func,
            call.data_iterator,
            call.model,
            received,
            () if self.checkpointed is None else (microbatch in self.checkpointed,),
            call.set_input_tensor,
            call.context,
            not self.outgoing,
        )
        if self.outgoing:
            found = self._passed_on(call.shapes, received, output, microbatch)
        else:
            found = self._with_loss(call, output, loss_func, microbatch, part)
        if call.scalers is not None and self.attached.left:
            self.attached.watch(
                [found.loss, *flatten(list(found.outputs.values()))],
                microbatch,
                [each.owner for each in call.scalers],
                partial(self._scales, microbatch),
            )
        return found

    def _passed_on(
        self, shapes: AnnouncedShapes | SentShape | None, received: Any, output: Any, microbatch: int
    ) -> Forwarded:
        """The result of a forward whose output goes to other stages."""
        if output is None and self._one_module:  # the next stage would read data of its own, as a first stage does
            raise StageOutputError(
                f"stage {self.stage} returned None for microbatch {microbatch}; it must return what stage "
                f"{self.outgoing[0].destination} takes"
            )
        own_loss = None
        if isinstance(output, WithLoss):
            output, own_loss = output.output, self._own_loss(output.loss, microbatch)
        if isinstance(received, list) and not isinstance(output, list):
            output = [output]
        if shapes is not None:
            shapes.check(output, sent=True, stage=self.stage, microbatch=microbatch)
        outputs = dict.fromkeys(self.outgoing, output) if self._one_module else self._by_edge(output, microbatch)
        return Forwarded(outputs, own_loss)

    def _with_loss(
        self, call: StageCall, output: Any, loss_func: Callable[..., Any] | None, microbatch: int, part: Slice | None
    ) -> Forwarded:
        """The result of a last stage: the scaled loss; the loss function's info goes to `infos`."""
        if loss_func is None:
            if not self.forward_only:
                raise StepArgumentError(
                    f"forward_step_func returned no loss_func on stage {self.stage}, the last one, for microbatch "
                    f"{microbatch}: there is no loss to differentiate. With forward_only=True outputs are the result"
                )
            self.infos.append((microbatch, output))
            return Forwarded({})
        if self.collect_non_loss_data:
            self.infos.append((microbatch, loss_func(output, non_loss_data=True)))
            return Forwarded({})
        result = loss_func(output)
        if part is not None and not self.per_token and isinstance(result, tuple) and len(result) == 3:
            raise StageOutputError(
                "the loss function returned (loss, num_tokens, info) for a slice: the mean over a microbatch needs the "
                "tokens of all its slices. Set calculate_per_token_loss, or return (loss, info) with the slice's share"
            )
        loss, num_tokens, info = scaled_loss(
            result,
            call.config,
            self.units.divisor,
            cp_group=self.cp_group,
            vp_stage=self.vp_stage,
            per_token=self.per_token,
        )
        self.infos.append((microbatch, info))
        if self.per_token and num_tokens is not None:
            self.num_tokens = num_tokens if self.num_tokens is None else self.num_tokens + num_tokens
        if self.forward_only:
            return Forwarded({})
        return Forwarded({}, loss if self.per_token or self.loss_factor == 1.0 else loss * self.loss_factor)

    def _own_loss(self, loss: torch.Tensor, microbatch: int) -> torch.Tensor | None:
        """A stage's own mean loss, scaled like the loss of the last stage."""
        if self.forward_only:
            return None
        if self.per_token and not self.weighted:
            raise StageOutputError(
                f"stage {self.stage} returned WithLoss for microbatch {microbatch}: with calculate_per_token_loss "
                "gradients are divided by the tokens of the job, and so would be this mean"
            )
        self.attached.names["WithLoss"] = None
        return loss * self.scale_of_mean(microbatch)

    def scale_of_mean(self, microbatch: int, of_cp_share: bool = True) -> float:
        """What the step multiplies a mean loss of a microbatch by; a loss scale comes on top.

        With ``calculate_per_token_loss`` 1, as in Megatron: layers count tokens by themselves. ``of_cp_share``: the
        loss is a cp rank's share of the mean.
        """
        if self.per_token and not self.weighted:
            return 1.0
        cp = self.cp_group.size() if of_cp_share and self.cp_group is not None else 1
        divisor = 1 if self.weighted else self.units.divisor
        return self.loss_factor * cp * self.units.served(microbatch) / divisor

    def _scales(self, microbatch: int) -> tuple[float, ...]:
        """What an attached loss may be scaled by: it is a cp rank's share of a mean, or a mean over its tokens."""
        assert self.call is not None  # in a backward
        scale = grad_scale(self.call.config, one_like(self.call.model)).item()
        return tuple(scale * self.scale_of_mean(microbatch, shared) for shared in (True, False))

    def _by_edge(self, output: Any, microbatch: int) -> dict[Edge, Any]:
        module = self.graph.module_of(self.stage)[0]
        if not isinstance(output, dict) or set(output) != {module}:
            found = f"keys {sorted(output)}" if isinstance(output, dict) else type(output).__name__
            raise StageOutputError(
                f"stage {self.stage} (module {module!r}) returned {found} for microbatch {microbatch}; a stage of "
                f"several modules returns {{{module!r}: tensor}}"
            )
        return dict.fromkeys(self.outgoing, output[module])


@define(eq=False, kw_only=True)
class SkippingStage(MegatronStage):
    """Runs one microbatch of a stage that takes or gives values past others.

    The module's stages hand on values: past others (`ModuleGraph.skips`), or to the next one alone. The model has two
    methods more: ``set_skips(arrived)``, called before its forward, and ``take_skips()``, called after it. Both have
    tensors by edge, of stages counted inside of the module. On an edge of the chain these go beside what the stage
    returns.
    """

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.outgoing = tuple(edge for edge in self.outgoing if edge not in self.graph.skips)

    def forward(self, microbatch: int, inputs: Mapping[Edge, Any], part: Slice | None = None) -> Forwarded:
        """See `MegatronStage.forward`."""
        assert self.call is not None  # set by `begin`
        give, take = (unwrapped_attribute(self.call.model, name) for name in ("set_skips", "take_skips"))
        if give is None or take is None:
            raise StepArgumentError(
                f"the graph has edges past stages, {', '.join(map(str, self.graph.skips))}, and the model of stage "
                f"{self.stage}, a {type(self.call.model).__name__}, has no set_skips(arrived) and take_skips()"
            )
        inside = self.graph.edges_inside(self.graph.module_of(self.stage)[0])
        first = self.graph.stage(self.graph.module_of(self.stage)[0], 0)
        arrived, plain = {}, {}
        for edge, payload in inputs.items():
            values = payload
            if edge not in self.graph.skips:
                plain[edge], values = payload if edge in inside else (payload, None)
            if edge in inside:
                arrived[Edge(edge.source - first, edge.destination - first)] = values
        give(arrived)
        found = super().forward(microbatch, plain, part)
        left = {Edge(edge.source + first, edge.destination + first): values for edge, values in take().items()}
        leaving = [edge for edge in inside if edge.source == self.stage]
        if unknown := sorted(set(left) - set(leaving)):
            raise StageOutputError(
                f"stage {self.stage} hands on values along edges {', '.join(map(str, unknown))} for microbatch "
                f"{microbatch}, and the plan has {', '.join(map(str, leaving)) or 'none'} from it: the first batch of "
                "a job has all that later ones have, and a communicator has graph=stage.graph"
            )
        outputs: dict[Edge, Any] = dict(found.outputs)
        for edge in leaving:
            values = left.get(edge) or [None]  # a message needs a part
            outputs[edge] = values if edge in self.graph.skips else [outputs[edge], values]
        return evolve(found, outputs=outputs)


def takes_part(graph: ModuleGraph, stage: int, model: Any) -> bool:
    """Whether stages of the module of ``stage`` hand on values: past others, or ``model.hands_on`` to the next."""
    past = bool(graph.skips) and not set(graph.skips).isdisjoint(graph.edges_inside(graph.module_of(stage)[0]))
    return past or bool(unwrapped_attribute(model, "hands_on"))
