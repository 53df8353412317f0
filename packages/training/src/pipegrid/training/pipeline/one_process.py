"""The step of a job in one process: whole models, with values, batches, modes and random numbers of the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor, nn

from pipegrid.bridges import EdgeOptions
from pipegrid.schedules import WithLoss
from pipegrid.schedules.megatron.aux_losses import grad_scale
from pipegrid.schedules.megatron.config import aux_loss_scalers
from pipegrid.stages import Stage
from pipegrid.stages.comparison.chain import at_layers
from pipegrid.stages.generators import States, capture_torch, generators_as_before, restore
from pipegrid.stages.host_state import HostState
from pipegrid.stages.torch_compat import TorchDispatchMode, tree_map_only
from pipegrid.training.pipeline.counts import StepCounts, sums_of
from pipegrid.training.pipeline.losses import GivenLoss, MicrobatchLoss, OwnLoss
from pipegrid.training.pipeline.microbatches import Microbatch, Share, microbatch
from pipegrid.training.pipeline.modules import JobSetup
from pipegrid.training.pipeline.parts import joined_outputs, largest_difference

_TF32 = 2.0**-5  # the root of its epsilon


Draws = tuple[int, dict[str, States]]
"""The seed of a forward of a stage, and the generators at its place in the whole model, if it had drawn before."""


@frozen(eq=False)
class Given:
    """The state and the data of all ranks in their step; names of several modules are behind that of the module."""

    values: Mapping[str, Tensor]  # of parameters and buffers
    trained: set[str]  # the parameters among them that are trained
    modes: Mapping[str, bool]  # that the script has set after the stages were made
    # Of each replica, and at the end the batch that is not cut, or an empty one:
    batches: Sequence[Sequence[Microbatch]]
    cuts: Mapping[str, tuple[Sequence[str], Mapping[str, int]]]  # by module (`cut_of`)
    draws: Mapping[tuple[str, int, int, int, int], Draws]  # by module, replica, share, stage and microbatch
    attaches: bool  # layers attach losses


@frozen(eq=False)
class Right:
    """The results of one process after the step."""

    loss: float  # the mean
    gradients: Mapping[str, Tensor | None]  # of all parameters that are trained, by the first name of each
    buffers: Mapping[str, Tensor]  # those that are saved, after the first replica, unless its backward writes to them
    limit: float  # the largest error, of a norm, that rounding explains
    cut: str | None  # in words, where rows have other outputs in microbatches than in their batch, in evaluation mode


def cut_of(stage: Any) -> tuple[Sequence[str], dict[str, int]]:
    """The layers of the model of ``stage``, and where each stage begins: behind the layers before, and at its first."""
    places = {"start": 0}
    if not isinstance(stage, Stage):
        return (), places
    assignment = stage.assignment
    for number in range(1, assignment.num_stages):
        before, own = [*assignment.layers[: assignment.before(number)]], assignment.held(number)
        places |= {f"after {layer}": number for layer in before[-1:]} | {f"before {one}": number for one in own[:1]}
    return assignment.layers, places


def are_equal(one: States, other: States) -> bool:
    """Whether generators of torch are where they were."""
    return all(torch.equal(state, other[kind]) for kind, state in one.items())


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what communicates is an error: the other ranks are not there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise LookupError(f"a model communicates with other ranks ({func})")
        return func(*args, **(kwargs or {}))


@frozen(eq=False)
class OneProcess:
    """The whole models of a job; ``shares``: by module, the equal parts of a microbatch that its replicas share."""

    job: JobSetup
    shares: Mapping[str, int]

    def step(self, given: Given) -> Right:
        """Run the step, and change nothing outside; `LookupError`: the ranks have, or do, what one process has not."""
        state = HostState(*(module.model for module in self.job.modules.values()))
        try:
            with generators_as_before(), _Alone():  # type: ignore[no-untyped-call]
                return self._step(self._wholes(given), given)
        finally:
            state.restore()

    def _step(self, wholes: Mapping[str, nn.Module], given: Given) -> Right:
        mean, beside, buffers = self._loss(wholes, given)
        loss = mean + beside
        held = [(name, [whole]) for name, whole in wholes.items()]
        weights = {name: one for name, one in self.job.read(held, nn.Module.named_parameters) if one.requires_grad}
        # As in a step that is divided last: a loss that a layer attaches with a scale of its own is a mean, too.
        number = sum(len(parts) for *parts, _ in given.batches)
        scale = grad_scale(self.job.config, torch.ones_like(loss))
        made: Sequence[Tensor | None] = ()
        before = {name: one.clone() for name, one in self.job.read(held, nn.Module.named_buffers)}
        if weights:
            made = torch.autograd.grad(loss * number * scale, [*weights.values()], allow_unused=True)
        for name, one in self.job.read(held, nn.Module.named_buffers):
            if not torch.equal(one, before[name]):  # by a layer that is recomputed, in the order of a schedule
                buffers.pop(name, None)
        gradients = {name: None if one is None else one / number for name, one in zip(weights, made, strict=True)}
        limit = self._limit({one.dtype for one in weights.values()})
        return Right(mean.item(), gradients, buffers, limit, self._cut_apart(wholes, given, limit))

    def _limit(self, dtypes: set[torch.dtype]) -> float:
        """The largest error, of a norm, that rounding explains; models compute some losses in float32."""
        dtypes |= {option.comm_dtype for option in self.job.edges.values() if option.comm_dtype is not None}
        if torch.is_autocast_enabled(self.job.device.type):
            dtypes = {*dtypes, torch.get_autocast_dtype(self.job.device.type)}
        limit: float = max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes)) ** 0.5
        tf32 = self.job.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
        return max(limit, _TF32) if tf32 else limit

    def _wholes(self, given: Given) -> dict[str, nn.Module]:
        made = {
            name: copy.deepcopy(each.model) if isinstance(each.model, nn.Module) else each.model()
            for name, each in self.job.modules.items()
        }
        wholes = {name: whole.to(self.job.device) for name, whole in made.items()}
        held = [(name, [whole]) for name, whole in wholes.items()]
        named = dict(self.job.read(held, nn.Module.named_parameters, remove_duplicate=False))
        known = named.keys() | dict(self.job.read(held, nn.Module.named_buffers, remove_duplicate=False)).keys()
        if others := sorted(given.values.keys() - known):
            raise LookupError(f"the stages have {', '.join(others[:3])}, which the model of one process has not")
        for name, one in named.items():
            if name in given.values:
                one.data = given.values[name].clone()
                one.requires_grad_(name in given.trained)
        for module, whole in wholes.items():
            prefix = self.job.prefix(module)
            _set_buffers(whole, given.values, prefix)
            for name, part in whole.named_modules():
                part.training = given.modes.get(f"{prefix}{name}", part.training)
            whole.is_first = whole.is_last = True  # type: ignore[assignment]  # what `forward` reads of a stage
            if len(wholes) > 1 and not hasattr(whole, "module"):
                vars(whole)["module"] = module
            if (output := self.job.modules[module].output) is not None:
                whole.register_forward_hook(lambda _, __, result, to_send=output: to_send(result))
        return wholes

    def _loss(self, wholes: Mapping[str, nn.Module], given: Given) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The mean loss of the step, what is added to it, and the buffers after the first replica."""
        ran = _Replicas(wholes, self.job, given)
        outputs: list[Any] = []
        beside: list[Tensor] = []
        every: list[Microbatch] = []
        for replica, (*parts, _) in enumerate(given.batches):
            for index, part in enumerate(parts):
                made, losses = self._outputs(wholes, part, self.shares, partial(ran.running, (replica, index)))
                outputs += [output for output, _ in made]
                every += [own for _, own in made]
                beside += losses
        if max(self.shares.values()) > 1 and (given.attaches or beside):
            raise LookupError("a loss is attached in a job whose replicas share microbatches")
        if ran.drew and self.job.is_tensor_parallel:
            raise LookupError("tensor-parallel layers may draw the random numbers of their parts")
        for scaler in aux_loss_scalers(self.job.config) if given.attaches else ():
            scaler.set_scale(grad_scale(self.job.config, torch.ones((), device=self.job.device), scaler.grad_scale))
        buffers = ran.buffers()  # before further forwards
        plain = not (ran.drew or given.attaches or beside) and self.job.loss is None
        uncut = self._uncut(wholes, every, outputs) if plain else None
        loss = self._mean(outputs, every, beside) if uncut is None else uncut
        added = torch.stack([loss.new_zeros(()), *(each / len(every) for each in beside)]).sum()
        return loss, added, buffers

    def _outputs(
        self,
        wholes: Mapping[str, nn.Module],
        part: Microbatch,
        shares: Mapping[str, int],
        running: Callable[[str, int], AbstractContextManager[None]] = lambda *_: nullcontext(),
    ) -> tuple[list[tuple[Any, Microbatch]], list[Tensor]]:
        """Outputs of the last module for the shares of a microbatch, with these; and losses that modules return."""
        sent: dict[str, list[tuple[Any, Microbatch]]] = {}
        losses: list[Tensor] = []
        for name in self.job.graph.order:
            for share in range(shares[name]):
                parts = Share(share, shares[name])
                own = part if parts.parts == 1 else microbatch(part.inputs, parts, self.job.device, self.job.rows)
                received = {
                    source: self._arrived((source, name), [each for each, _ in sent[source]], share, shares[name])
                    for source, fed in self.job.graph.edges
                    if fed == name
                }
                with running(name, share):
                    output = self._called(name, wholes[name], own, received)
                if isinstance(output, WithLoss):
                    losses.append(output.loss)
                    output = output.output
                sent.setdefault(name, []).append((output, own))
        return sent[self.job.graph.order[-1]], losses

    def _arrived(self, edge: tuple[str, str], sent: list[Any], share: int, shares: int) -> Any:
        """The payload of a module's share, of those that the shares of another one have sent."""
        option = self.job.edges.get(edge, EdgeOptions())
        if len(sent) == shares:
            arrived = sent[share]
        elif not all(isinstance(each, Tensor) and each.dim() for each in sent) or option.payload or option.dim_mapping:
            raise LookupError(f"replicas of {edge[0]} and {edge[1]} share microbatches, by other axes than the first")
        else:
            joined = torch.cat(sent)
            if len(joined) % shares:
                raise LookupError(f"{edge[0]} sends {len(joined)} rows to {shares} replicas of {edge[1]}")
            arrived = joined.chunk(shares)[share]
        return arrived if option.backward else tree_map_only(Tensor, Tensor.detach, arrived)

    def _called(self, name: str, whole: nn.Module, part: Microbatch, received: Mapping[str, Any]) -> Any:
        inputs = tree_map_only(Tensor, Tensor.clone, dict(part.inputs))  # a model may write to its batch
        module = self.job.modules[name]
        if received and module.layout is None:
            whole.set_input_tensor(received)  # type: ignore[operator]
        elif received:
            vars(whole)["received"] = received
        return whole(**inputs) if module.forward is None else module.forward(whole, inputs)

    def _mean(self, outputs: Sequence[Any], parts: Sequence[Microbatch], beside: list[Tensor]) -> Tensor:
        """The script's loss: of all outputs as one where it is a mean, of each where it is a sum with its count."""
        if self.job.loss is not None:
            found = [self.job.loss(output, part.inputs) for output, part in zip(outputs, parts, strict=True)]
            beside += [each.loss for each in found if isinstance(each, WithLoss)]
            found = [each.output if isinstance(each, WithLoss) else each for each in found]
            if all(isinstance(each, tuple) for each in found):
                count = sum(float(count) for _, count in found)
                return torch.stack([total for total, _ in found]).sum() / (count or 1.0)
            batch, output = self.job.rows.joined([part.inputs for part in parts]), joined_outputs(outputs, parts)
            if batch is not None and output is not None:
                mean = self.job.loss(output, batch)
                mean = mean.output if isinstance(mean, WithLoss) else mean
                if bool(mean.isfinite()):
                    return mean  # type: ignore[no-any-return]
        # What is not known as one batch, by the weights of its microbatches:
        loss: MicrobatchLoss = OwnLoss() if self.job.loss is None else GivenLoss(self.job.loss)
        counts = StepCounts.known(sums_of(parts), len(parts), self.job.device)
        weighed = [loss(output, part, counts) for output, part in zip(outputs, parts, strict=True)]
        return torch.stack([each for each, _, _ in weighed]).sum() / sum(weight for _, weight, _ in weighed)

    def _uncut(
        self, wholes: Mapping[str, nn.Module], parts: Sequence[Microbatch], outputs: Sequence[Any]
    ) -> Tensor | None:
        """The model's own loss of the batch that is not cut; None where its rows depend on each other."""
        batch, expected = self.job.rows.joined([part.inputs for part in parts]), joined_outputs(outputs, parts)
        if batch is None or expected is None:
            return None
        ((output, _),), _ = self._outputs(wholes, attrs.evolve(parts[0], inputs=batch), dict.fromkeys(self.shares, 1))
        loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
        if not isinstance(loss, Tensor) or not isinstance(logits, Tensor) or not bool(loss.isfinite()):
            return None
        close = torch.finfo(logits.dtype).eps ** 0.5
        same = logits.shape == expected.logits.shape and torch.allclose(logits, expected.logits, close, close)
        return loss if same else None

    @torch.no_grad()
    def _cut_apart(self, wholes: Mapping[str, nn.Module], given: Given, limit: float) -> str | None:
        """`Right.cut`; each forward finds on the host and in buffers what the first one found, such as a counter."""
        for whole in wholes.values():
            whole.eval()
        state = HostState(*(module.model for module in self.job.modules.values()), *wholes.values())
        buffers = {name: _buffers(whole) for name, whole in wholes.items()}

        def called(part: Microbatch) -> Any:
            state.restore()
            for name, whole in wholes.items():
                _set_buffers(whole, buffers[name])
            ((output, _),), _ = self._outputs(wholes, part, dict.fromkeys(self.shares, 1))
            return output

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


class _Replicas:
    """Whole models that run for one replica of each after the other: with its buffers, and its random numbers."""

    def __init__(self, wholes: Mapping[str, nn.Module], job: JobSetup, given: Given) -> None:
        self.drew = False
        self._wholes, self._job, self._given = wholes, job, given
        self._held = {name: {(-1, 0): _buffers(whole)} for name, whole in wholes.items()}  # by replica and share
        self._now = dict.fromkeys(wholes, (-1, 0))

    def _turn(self, name: str, place: tuple[int, int]) -> None:
        """The buffers of a module are those of a replica from here on; all begin alike."""
        if self._now[name] != place:
            held, before = self._held[name], self._now[name]
            if before != (-1, 0):
                held[before] = _buffers(self._wholes[name])
            _set_buffers(self._wholes[name], held.get(place, held[-1, 0]))
            self._now[name] = place

    @contextmanager
    def running(self, place: tuple[int, int], name: str, share: int) -> Iterator[None]:
        """Around a forward, which is seeded as those of the stages were; ``place``: its replica and microbatch."""
        replica, index = place
        self._turn(name, (replica, share))
        (layers, places), device = self._given.cuts[name], self._job.device
        states = capture_torch(device)

        def act(at: str) -> None:
            nonlocal states
            if at in places:
                self.drew = self.drew or (at != "start" and not are_equal(capture_torch(device), states))
                seed, drawn = self._given.draws[name, replica, share, places[at], index]
                torch.manual_seed(seed)
                if at in drawn:
                    restore(drawn[at], device)
                states = capture_torch(device)

        with at_layers(self._wholes[name], layers, act):
            yield
        self.drew = self.drew or not are_equal(capture_torch(device), states)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that are saved, of the first replica of each module."""
        found: dict[str, Tensor] = {}
        for name, whole in self._wholes.items():
            self._turn(name, (0, 0))
            saved, prefix = whole.state_dict(), self._job.prefix(name)
            found |= {f"{prefix}{key}": one for key, one in _buffers(whole).items() if key in saved}
        return found


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in model.named_buffers()}


def _set_buffers(model: nn.Module, values: Mapping[str, Tensor], prefix: str = "") -> None:
    for name, _ in list(model.named_buffers()):
        if f"{prefix}{name}" in values:
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, values[f"{prefix}{name}"].clone())
