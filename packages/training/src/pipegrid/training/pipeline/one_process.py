"""The step of a job in one process: the whole model, with values, batches, modes and random numbers of the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor, nn

from pipegrid.schedules import PipelineConfig, WithLoss
from pipegrid.schedules.megatron.aux_losses import aux_loss_scalers, grad_scale
from pipegrid.stages.assignment import Assignment
from pipegrid.stages.comparison.chain import at_layers
from pipegrid.stages.generators import States, capture_torch, generators_as_before, restore
from pipegrid.stages.host_state import HostState
from pipegrid.stages.torch_compat import tree_map_only
from pipegrid.training.pipeline.counts import StepCounts
from pipegrid.training.pipeline.losses import GivenLoss, MicrobatchLoss, OwnLoss
from pipegrid.training.pipeline.microbatches import Microbatch
from pipegrid.training.pipeline.modules import PipelineModule
from pipegrid.training.pipeline.parts import joined_outputs, largest_difference
from pipegrid.training.pipeline.rows import Rows

_TF32 = 2.0**-5  # the root of its epsilon


@frozen(eq=False)
class Draws:
    """The seed of a forward of a stage, and the generators at its place in the whole model, if it had drawn before."""

    seed: int
    states: dict[str, States]


@frozen(eq=False)
class Given:
    """What the ranks had in their step.

    Attributes:
        values: of parameters and buffers, by their names in the model.
        trained: the parameters among them that are trained.
        modes: those that the script has set after the stages were made; the others are those of the function.
        batches: by replica, its microbatches, and at the end the batch that is not cut, or one without inputs.
        draws: by replica, stage and microbatch.
        attaches: layers attach losses.
    """

    values: Mapping[str, Tensor]
    trained: set[str]
    modes: Mapping[str, bool]
    batches: Sequence[Sequence[Microbatch]]
    draws: Mapping[tuple[int, int, int], Draws]
    attaches: bool

    @property
    def parts(self) -> list[Microbatch]:
        """All microbatches of the step."""
        return [part for *parts, _ in self.batches for part in parts]


@frozen(eq=False)
class Right:
    """What one process has after the step.

    Attributes:
        loss: the mean of the step.
        gradients: of all parameters that are trained, by the first name of each.
        buffers: those that are saved, after the first replica.
        limit: the largest error, of a norm, that rounding explains.
        cut: in words, where rows have other outputs in microbatches than in their batch, in evaluation mode.
    """

    loss: float
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    limit: float
    cut: str | None


def places_of(assignment: Assignment) -> dict[str, int]:
    """Where in a forward of the whole model each stage begins: behind the layers before, and at its first one."""
    places = {"start": 0}
    for stage in range(1, assignment.num_stages):
        before, own = [*assignment.layers[: assignment.before(stage)]], assignment.held(stage)
        places |= {f"after {layer}": stage for layer in before[-1:]} | {f"before {one}": stage for one in own[:1]}
    return places


def are_equal(one: States, other: States) -> bool:
    """Whether generators of torch are where they were."""
    return all(torch.equal(state, other[kind]) for kind, state in one.items())


@frozen(eq=False)
class OneProcess:
    """The whole model of a job.

    Attributes:
        module: the model.
        assignment: of its layers to stages.
        config: of the job.
        loss: of the script; None: the model's own.
        rows: by which batches are cut.
        device: of the stages.
    """

    module: PipelineModule
    assignment: Assignment
    config: PipelineConfig
    loss: Callable[[Any, Any], Any] | None
    rows: Rows
    device: torch.device

    def step(self, given: Given) -> Right:
        """Run the step; nothing on the host, no generator and no ``.grad`` is changed by it.

        Raises:
            LookupError: the ranks have parameters that the model has not.
        """
        state = HostState(self.module.model)
        try:
            with generators_as_before():
                return self._step(self._whole(given), given)
        finally:
            state.restore()

    def _step(self, whole: nn.Module, given: Given) -> Right:
        loss, buffers = self._loss(whole, given)
        weights = {name: one for name, one in whole.named_parameters() if one.requires_grad}
        # As in a step that is divided last: a loss that a layer attaches with a scale of its own is a mean, too.
        number, scale = len(given.parts), grad_scale(self.config, torch.ones_like(loss))
        made: Sequence[Tensor | None] = ()
        if weights:
            made = torch.autograd.grad(loss * number * scale, [*weights.values()], allow_unused=True)
        gradients = {name: None if one is None else one / number for name, one in zip(weights, made, strict=True)}
        limit = self._limit({one.dtype for one in weights.values()})
        return Right(loss.item(), gradients, buffers, limit, self._cut_apart(whole, given, limit))

    def _limit(self, dtypes: set[torch.dtype]) -> float:
        """The largest error, of a norm, that rounding explains; models compute some losses in float32."""
        if torch.is_autocast_enabled(self.device.type):
            dtypes = {*dtypes, torch.get_autocast_dtype(self.device.type)}
        limit: float = max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes)) ** 0.5
        tf32 = self.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
        return max(limit, _TF32) if tf32 else limit

    def _whole(self, given: Given) -> nn.Module:
        model = self.module.model
        whole = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        whole = whole.to(self.device)
        named = dict(whole.named_parameters(remove_duplicate=False))
        known = named.keys() | dict(whole.named_buffers(remove_duplicate=False)).keys()
        if others := sorted(given.values.keys() - known):
            raise LookupError(f"the stages have {', '.join(others[:3])}, which the model of one process has not")
        for name, one in named.items():
            if name in given.values:
                one.data = given.values[name].clone()
                one.requires_grad_(name in given.trained)
        _set_buffers(whole, given.values)
        for name, mode in given.modes.items():
            whole.get_submodule(name).training = mode
        whole.is_first = whole.is_last = True  # type: ignore[assignment]  # what `forward` reads of a stage
        return whole

    def _loss(self, whole: nn.Module, given: Given) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of the step, and the buffers after the first replica."""
        start = {name: one.clone() for name, one in whole.named_buffers()}
        outputs: list[Any] = []
        drew, buffers, every = False, {}, given.parts
        for replica, (*parts, _) in enumerate(given.batches):
            _set_buffers(whole, start)
            for index, part in enumerate(parts):
                with self._seeded(whole, lambda stage: given.draws[replica, stage, index]) as drawn:  # noqa: B023
                    outputs.append(self._called(whole, part))
                drew = drew or drawn()
            if not replica:
                saved = whole.state_dict()
                buffers = {name: one.clone() for name, one in whole.named_buffers() if name in saved}
        beside = [output.loss for output in outputs if isinstance(output, WithLoss)]
        outputs = [output.output if isinstance(output, WithLoss) else output for output in outputs]
        for scaler in aux_loss_scalers(self.config) if given.attaches else ():
            scaler.set_scale(grad_scale(self.config, torch.ones((), device=self.device), scaler.grad_scale))
        plain = not (drew or given.attaches or beside) and self.loss is None
        uncut = self._uncut(whole, every, outputs) if plain else None
        loss = self._mean(outputs, every, beside) if uncut is None else uncut
        return torch.stack([loss, *(each / len(every) for each in beside)]).sum(), buffers

    @contextmanager
    def _seeded(self, whole: nn.Module, draws: Callable[[int], Draws]) -> Iterator[Callable[[], bool]]:
        """Seed a forward as those of the stages were; whether it has drawn random numbers, when it has ended."""
        places, drew, states = places_of(self.assignment), False, capture_torch(self.device)

        def drawn() -> bool:
            return drew or not are_equal(capture_torch(self.device), states)

        def act(at: str) -> None:
            nonlocal drew, states
            if at in places:
                drew, own = at != "start" and drawn(), draws(places[at])
                torch.manual_seed(own.seed)
                if at in own.states:
                    restore(own.states[at], self.device)
                states = capture_torch(self.device)

        with at_layers(whole, self.assignment.layers, act):
            yield drawn

    def _called(self, whole: nn.Module, part: Microbatch) -> Any:
        inputs = tree_map_only(Tensor, Tensor.clone, dict(part.inputs))  # a model may write to its batch
        return whole(**inputs) if self.module.forward is None else self.module.forward(whole, inputs)

    def _mean(self, outputs: Sequence[Any], parts: Sequence[Microbatch], beside: list[Tensor]) -> Tensor:
        """The script's loss: of all outputs as one where it is a mean, of each where it is a sum with its count."""
        if self.loss is not None:
            found = [self.loss(output, part.inputs) for output, part in zip(outputs, parts, strict=True)]
            beside += [each.loss for each in found if isinstance(each, WithLoss)]
            found = [each.output if isinstance(each, WithLoss) else each for each in found]
            if all(isinstance(each, tuple) for each in found):
                count = sum(float(count) for _, count in found)
                return torch.stack([total for total, _ in found]).sum() / (count or 1.0)
            batch, output = self.rows.joined([part.inputs for part in parts]), joined_outputs(outputs, parts)
            if batch is not None and output is not None:
                mean = self.loss(output, batch)
                mean = mean.output if isinstance(mean, WithLoss) else mean
                if bool(mean.isfinite()):
                    return mean  # type: ignore[no-any-return]
        # What is not known as one batch, by the weights of its microbatches:
        loss: MicrobatchLoss = OwnLoss() if self.loss is None else GivenLoss(self.loss)
        counts = StepCounts.known(parts, len(parts), self.device)
        weighed = [loss(output, part, counts) for output, part in zip(outputs, parts, strict=True)]
        return torch.stack([each for each, _, _ in weighed]).sum() / sum(weight for _, weight, _ in weighed)

    def _uncut(self, whole: nn.Module, parts: Sequence[Microbatch], outputs: Sequence[Any]) -> Tensor | None:
        """The model's own loss of the batch that is not cut; None where its rows depend on each other."""
        batch, expected = self.rows.joined([part.inputs for part in parts]), joined_outputs(outputs, parts)
        if batch is None or expected is None:
            return None
        output = self._called(whole, attrs.evolve(parts[0], inputs=batch))
        loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
        if not isinstance(loss, Tensor) or not isinstance(logits, Tensor) or not bool(loss.isfinite()):
            return None
        close = torch.finfo(logits.dtype).eps ** 0.5
        same = logits.shape == expected.logits.shape and torch.allclose(logits, expected.logits, close, close)
        return loss if same else None

    @torch.no_grad()
    def _cut_apart(self, whole: nn.Module, given: Given, limit: float) -> str | None:
        """`Right.cut`; each forward finds on the host what the first one found, such as a counter at its start."""
        whole.eval()
        state = HostState(self.module.model, whole)

        def called(part: Microbatch) -> Any:
            state.restore()
            return self._called(whole, part)

        for *parts, batch in given.batches:
            joined = joined_outputs([called(part) for part in parts], parts) if batch.inputs else None
            apart = None if joined is None else largest_difference(joined, called(batch), batch.rows)
            if apart is not None and not apart <= limit:
                return (
                    f"rows have other outputs in {len(parts)} microbatches than in their batch ({apart:.2g} of the "
                    "norm): an entry of the batch is cut wrongly (see rows= and whole= of Pipeline), or rows depend on "
                    "each other in the model"
                )
        return None


def _set_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, _ in list(model.named_buffers()):
        if name in values:
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, values[name].clone())
