"""The runtime's `Stage` over the user's ``forward_step_func`` and model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from attrs import define, evolve, field

from pipegrid.autograd.tree import modules_in
from pipegrid.core.edge import Edge
from pipegrid.core.errors import StepArgumentError
from pipegrid.core.graph import ModuleGraph
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.megatron.aux_losses import AttachedLosses, grad_scale, one_like
from pipegrid.schedules.megatron.call import StepCall
from pipegrid.schedules.megatron.config import AuxLossScaler, unwrapped_attribute
from pipegrid.schedules.megatron.forward import WithLoss, modules_with, run_model, scaled_loss
from pipegrid.schedules.megatron.shapes import AnnouncedShapes, SentShape
from pipegrid.schedules.megatron.units.batches import UnitBatches
from pipegrid.schedules.megatron.units.routes import StageUnits
from pipegrid.schedules.runtime import Forwarded, Slice


@define(eq=False, kw_only=True)
class MegatronStage:
    """The forward of each microbatch on one stage, as Megatron's ``forward_step``, where replicas act alike.

    ``forward_step_func`` runs the model (`run_model`); its output goes to the next stages or, on a last one, through
    the loss function. What it needs of a call is set by `begin` and dropped by `end`. In a graph of several modules,
    inputs are a dict by source module, and the output is one by the stage's own module.
    """

    graph: ModuleGraph
    stage: int
    first: int | None  # microbatch of a step here
    divisor: float  # of mean losses: the microbatches of a step
    num_slices: int
    cp_group: Any
    forward_only: bool
    collect_non_loss_data: bool
    per_token: bool  # losses are sums over tokens
    weighted: bool  # what they count adds up to the microbatches of the job
    loss_factor: float  # of the stage's own loss, for a mean over its own replicas
    checkpointed: Collection[int] | None  # microbatches that checkpoint all; the others follow the model's own setting
    outgoing: tuple[Edge, ...] = field(init=False)
    attached: AttachedLosses = field(init=False)
    model: Any = field(default=None, init=False)
    config: Any = field(default=None, init=False)
    run: Any = field(default=None, init=False)  # `run_model` on all but what it receives
    starts: Callable[[], object] | None = field(default=None, init=False)  # the model's ``set_is_first_microbatch``
    numbered: Sequence[torch.nn.Module] = field(default=(), init=False)  # modules with a ``current_microbatch``
    sliced: Sequence[torch.nn.Module] = field(default=(), init=False)  # with a ``current_slice``
    shapes: AnnouncedShapes | SentShape | None = field(default=None, init=False)
    scalers: tuple[AuxLossScaler, ...] | None = field(default=None, init=False)  # None: attached losses are not watched
    infos: list[tuple[int, Any]] = field(factory=list, init=False)  # by microbatch
    num_tokens: torch.Tensor | None = field(default=None, init=False)
    _one_module: bool = field(init=False)
    _sends_lists: bool | None = field(default=None, init=False)  # a list of the model's is one payload; None: not asked

    def __attrs_post_init__(self) -> None:
        self._one_module = len(self.graph.modules) == 1
        self.attached = AttachedLosses(self.stage)
        self.outgoing = tuple(edge for edge in self.graph.stage_edges if edge.source == self.stage)

    def begin(
        self,
        call: StepCall,
        data_iterator: Any,
        model: torch.nn.Module,
        config: Any,
        shapes: AnnouncedShapes | SentShape | None,
        context: Callable[[], AbstractContextManager[Any]] | None,
        scalers: tuple[AuxLossScaler, ...] | None,
    ) -> None:
        """Look up what the forwards of a step need; ``context``: makes the autocast context of each."""
        self.model, self.config, self.shapes, self.scalers = model, config, shapes, scalers
        found = modules_with(modules_in(model), "current_microbatch", "current_slice")
        self.numbered = found["current_microbatch"]
        self.sliced = found["current_slice"] if self.num_slices > 1 else ()
        if self._sends_lists is None:
            self._sends_lists = bool(unwrapped_attribute(model, "sends_lists"))
        if not self.forward_only or call.first_val_step is None or call.first_val_step:
            self.starts = unwrapped_attribute(model, "set_is_first_microbatch")
        self.run = partial(
            run_model,
            call.forward_step_func,
            data_iterator,
            model,
            set_input_tensor=unwrapped_attribute(model, "set_input_tensor"),
            context=context,
            is_last_stage=not self.outgoing,
        )

    def end(self) -> None:
        """Drop all references of the call, so that a deleted model is freed at once."""
        if self.sliced:
            self.resume(None)
        self.model = self.config = self.run = self.starts = self.scalers = self.num_tokens = None
        self.numbered, self.sliced, self.infos = (), (), []

    def resume(self, part: Slice | None) -> None:
        """Set ``current_slice`` where modules have one: before a forward, and a backward, which may recompute."""
        for module in self.sliced:
            module.current_slice = part  # type: ignore[assignment]

    def forward(self, microbatch: int, inputs: Mapping[Edge, Any], part: Slice | None = None) -> Forwarded:
        """See `pipegrid.schedules.RuntimeStage.forward`; with slices, an item of the iterator is a slice."""
        if self.shapes is not None:
            for payload in inputs.values():
                self.shapes.check(payload, sent=False, stage=self.stage, microbatch=microbatch)
        for module in self.numbered:  # a number is none of what Module.__setattr__ looks for
            object.__setattr__(module, "current_microbatch", microbatch)
        if part is not None:
            self.resume(part)
        if self.starts is not None and microbatch == self.first and (part is None or part.is_first):
            self.starts()
        received = next(iter(inputs.values()), None)
        if self._sends_lists and isinstance(received, list):
            received = [received]
        if not self._one_module:
            received = {self.graph.module_of(edge.source)[0]: payload for edge, payload in inputs.items()}
        extra = () if self.checkpointed is None else (microbatch in self.checkpointed,)
        output, loss_func = self.run(received, extra)
        if self.outgoing:
            found = self._passed_on(received, output, microbatch)
        else:
            found = self._with_loss(output, loss_func, microbatch, part)
        if self.scalers is not None and self.attached.left:
            payloads, handled = [found.loss, *found.outputs.values()], [each.owner for each in self.scalers]
            self.attached.watch(payloads, microbatch, handled, partial(self._scales, microbatch))
        return found

    def _passed_on(self, received: Any, output: Any, microbatch: int) -> Forwarded:
        """The result of a forward whose output goes to other stages."""
        if output is None and self._one_module:  # the next stage would read data of its own, as a first stage does
            raise StageOutputError(
                f"stage {self.stage} returned None for microbatch {microbatch}; it must return what stage "
                f"{self.outgoing[0].destination} takes"
            )
        own_loss = None
        if isinstance(output, WithLoss):
            output, own_loss = output.output, self._own_loss(output.loss, microbatch)
        if isinstance(received, list) and not (self._sends_lists or isinstance(output, list)):
            output = [output]
        if self.shapes is not None:
            self.shapes.check(output, sent=True, stage=self.stage, microbatch=microbatch)
        outputs = dict.fromkeys(self.outgoing, output) if self._one_module else self._by_edge(output, microbatch)
        return Forwarded(outputs, own_loss)

    def _with_loss(
        self, output: Any, loss_func: Callable[..., Any] | None, microbatch: int, part: Slice | None
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
        per_token, group = self.per_token, self.cp_group
        loss, num_tokens, info = scaled_loss(result, self.config, self.divisor, cp_group=group, per_token=per_token)
        self.infos.append((microbatch, info))
        if per_token and num_tokens is not None:
            self.num_tokens = num_tokens if self.num_tokens is None else self.num_tokens + num_tokens
        if self.forward_only:
            return Forwarded({})
        return Forwarded({}, loss if per_token or self.loss_factor == 1.0 else loss * self.loss_factor)

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

    def scale_of_mean(self, microbatch: int, of_cp_share: bool = True, count: int = 1) -> float:
        """What the step multiplies a mean loss of a microbatch by; a loss scale comes on top.

        With ``calculate_per_token_loss`` 1, as in Megatron: layers count tokens by themselves. ``of_cp_share``: the
        loss is a cp rank's share of the mean; ``count``: it is a mean over so many microbatches.
        """
        del microbatch
        if self.per_token and not self.weighted:
            return 1.0
        cp = self.cp_group.size() if of_cp_share and self.cp_group is not None else 1
        return self.loss_factor * cp * count / (1 if self.weighted else self.divisor)

    def _scales(self, microbatch: int) -> tuple[float, ...]:
        """What an attached loss may be scaled by: it is a cp rank's share of a mean, or a mean over its tokens."""
        scale = grad_scale(self.config, one_like(self.model)).item()
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
    """A `MegatronStage` that hands on values: past others (`ModuleGraph.skips`), or to the next one alone.

    The model has two methods more: ``set_skips(arrived)``, called before its forward, and ``take_skips()``, called
    after it. Both have tensors by edge, of stages counted inside of the module. On an edge of the chain these go beside
    what the stage returns.
    """

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.outgoing = tuple(edge for edge in self.outgoing if edge not in self.graph.skips)

    def forward(self, microbatch: int, inputs: Mapping[Edge, Any], part: Slice | None = None) -> Forwarded:
        """See `MegatronStage.forward`."""
        give, take = (unwrapped_attribute(self.model, name) for name in ("set_skips", "take_skips"))
        if give is None or take is None:
            raise StepArgumentError(
                f"the graph has edges past stages, {', '.join(map(str, self.graph.skips))}, and the model of stage "
                f"{self.stage}, a {type(self.model).__name__}, has no set_skips(arrived) and take_skips()"
            )
        module = self.graph.module_of(self.stage)[0]
        inside, first = self.graph.edges_inside(module), self.graph.stage(module, 0)
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


@define(eq=False, kw_only=True)
class RoutedStage(MegatronStage):
    """A `MegatronStage` that tells its model, and its data, whose microbatch each forward is of.

    Modules get it as a ``current_replica``, None at home, and a ``current_microbatch``, the number at home.
    """

    units: StageUnits
    homed: Sequence[torch.nn.Module] = field(default=(), init=False)
    by_number: Sequence[torch.nn.Module] = field(default=(), init=False)
    batches: UnitBatches | None = field(default=None, init=False)

    def begin(self, call: StepCall, data_iterator: Any, model: torch.nn.Module, *others: Any) -> None:
        """See `MegatronStage.begin`."""
        self.batches = data_iterator if isinstance(data_iterator, UnitBatches) else None
        if self.batches is not None and self.units.home(0) is None:
            raise StepArgumentError(
                "data_iterator is UnitBatches, and the replica of this rank is not known: pass a pg_collection with "
                "its dp group"
            )
        if self.batches is not None and self.num_slices > 1:
            slices = self.num_slices
            raise StepArgumentError(f"data_iterator is UnitBatches, of whole microbatches: num_slices is {slices}")
        if self.batches is None and data_iterator is not None and not self.units.in_order_at_home:
            raise StepArgumentError(
                f"by its routes stage {self.stage} does not compute all microbatches of replica {self.units.replica} "
                "in order on this rank, and a plain iterator has these; give data_iterator=UnitBatches(load)"
            )
        super().begin(call, data_iterator, model, *others)
        self.by_number, self.numbered = self.numbered, ()
        self.homed = modules_with(model.modules(), "current_replica")["current_replica"]

    def end(self) -> None:
        """See `MegatronStage.end`; what runs outside of a step is at home."""
        for module in self.homed:
            module.current_replica = None  # type: ignore[assignment]
        self.homed, self.by_number, self.batches = (), (), None
        super().end()

    def forward(self, microbatch: int, inputs: Mapping[Edge, Any], part: Slice | None = None) -> Forwarded:
        """See `MegatronStage.forward`."""
        home, number = self.units.home(microbatch), self.units.microbatch(microbatch)
        for module in self.by_number:
            object.__setattr__(module, "current_microbatch", number)
        for module in self.homed:
            module.current_replica = None if home == self.units.replica else home  # type: ignore[assignment]
        if self.batches is not None:
            self.batches.begin(self.units.units(microbatch))
        return super().forward(microbatch, inputs, part)

    def scale_of_mean(self, microbatch: int, of_cp_share: bool = True, count: int = 1) -> float:
        """See `MegatronStage.scale_of_mean`: a call for several units has a mean over theirs."""
        return super().scale_of_mean(microbatch, of_cp_share, count * self.units.served(microbatch))


class RoutedSkippingStage(RoutedStage, SkippingStage):
    """A `SkippingStage` with units."""


def takes_part(graph: ModuleGraph, stage: int, model: Any) -> bool:
    """Whether stages of the module of ``stage`` hand on values: past others, or ``model.hands_on`` to the next."""
    past = bool(graph.skips) and not set(graph.skips).isdisjoint(graph.edges_inside(graph.module_of(stage)[0]))
    return past or bool(unwrapped_attribute(model, "hands_on"))
