"""The first step of a job against one process: its loss, gradients and buffers, with the script's own loss and batch.

The proof of a cut and `check_stages` compare stages with the model. What a job adds to them (how it cuts the batch,
weighs losses, seeds forwards, keeps modes, names and ties) is in no stage; so the first rank of the job does the step
again, as one process would, with the values that the ranks had, and each rank compares its gradients.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor, nn

from pipegrid.checkpoint.gathering import gather_plain
from pipegrid.gradients.all_reduce import all_reduce
from pipegrid.monitor.collectives import Waiting
from pipegrid.schedules import PipelineConfig, WithLoss
from pipegrid.schedules.megatron.aux_losses import aux_loss_scalers, grad_scale
from pipegrid.stages import Stage
from pipegrid.stages.comparison.chain import at_layers
from pipegrid.stages.comparison.compare import Compared, compared, compared_gradients
from pipegrid.stages.errors import CutError, few
from pipegrid.stages.generators import States, capture_torch, generators_as_before, restore
from pipegrid.stages.host_state import HostState
from pipegrid.stages.torch_compat import tree_map_only
from pipegrid.training.pipeline.counts import StepCounts
from pipegrid.training.pipeline.losses import GivenLoss, MicrobatchLoss, OwnLoss
from pipegrid.training.pipeline.microbatches import Microbatch, Share, microbatch
from pipegrid.training.pipeline.modules import PipelineModule
from pipegrid.training.pipeline.parts import as_plain, joined_outputs, largest_difference, of_plain
from pipegrid.training.pipeline.rows import Rows

LARGEST = 20_000_000
"""Parameters of a model whose first step is compared without being asked."""

_SHOWN = 6
Batches = list[list[Microbatch]]
"""By replica, its microbatches, and at the end the batch that is not cut, or nothing."""


@frozen(eq=False)
class Draws:
    """The seed of a forward of a stage, and the generators at its place in the whole model, if it had drawn before."""

    seed: int
    states: dict[str, States]


DrawsOf = dict[tuple[int, int, int], Draws]
"""By replica, stage and microbatch."""


@define(eq=False)
class FirstStep:
    """What the first step of a job of one model is compared by; every rank makes one, and calls it as the others do.

    Attributes:
        module: the model.
        stages: of this rank.
        config: of the job.
        loss: of the script; None: the model's own.
        rows: by which batches are cut.
        device: of the stages.
        replica: whose batch this rank reads.
    """

    module: PipelineModule
    stages: Sequence[Stage]
    config: PipelineConfig
    loss: Callable[[Any, Any], Any] | None
    rows: Rows
    device: torch.device
    replica: int
    _modes: list[dict[str, bool]] = field(init=False)
    _draws: dict[int, list[Draws]] = field(factory=dict, init=False)  # by stage, of each microbatch
    _compares: bool = field(default=False, init=False)
    _given: tuple[Any, list[Tensor]] = field(default=(None, []), init=False)
    _before: dict[str, Tensor] = field(factory=dict, init=False)
    _gradients: dict[str, Tensor | None] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._modes = [_modes(stage) for stage in self.stages]

    @classmethod
    def of(
        cls,
        modules: Mapping[str, PipelineModule],
        stages: Mapping[str, Sequence[Any]],
        config: PipelineConfig,
        *given: Any,
    ) -> FirstStep | None:
        """None, alike on all ranks, where the config says no, or the job is more than one model over dp and pp.

        ``given``: the other attributes.
        """
        module, own = next(iter(modules.values())), next(iter(stages.values()))
        sizes = {dim: module.grid.dim_size(dim) for dim in module.grid.dim_names}
        others = any(size > 1 for dim, size in sizes.items() if dim not in ("dp", "pp"))
        if config.check is False or len(modules) > 1 or module.layout is None or others or config.shard:
            return None
        size = sum(one.numel() for one in own[0].proofs.outline.model.parameters()) if own[0].proofs else math.inf
        return None if size > LARGEST and not config.check else cls(module, own, config, *given)

    @property
    def _why_not(self) -> str | None:
        """Why this rank cannot compare its part."""
        for stage in self.stages:
            if any(type(one) not in (nn.Parameter, Tensor) for one in (*stage.parameters(), *stage.buffers())):
                return "parameters are sharded, or of a class of their own"
            if any(hasattr(one, "main_grad") for one in stage.parameters()):
                return "gradients are in main_grad"
            if "current_replica" in vars(stage):
                return "the script seeds dropout itself"
        return None

    @property
    def _waiting(self) -> Waiting:
        return Waiting(self.config.deadline, self.config.monitor, "the comparison of the first step")

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self.config.job_group or dist.group.WORLD
        assert group is not None  # a job runs
        return group

    def begin(self, parts: Sequence[Mapping[str, Any]], batch: Any) -> bool:
        """Agree on whether the step of ``parts`` of ``batch`` is compared, and keep what it may change."""
        told = gather_plain(self._why_not, self._group, self.device, waiting=self._waiting)
        self._compares = not any(told)
        if not self._compares:
            return False
        given = {"batch": batch, "count": len(parts)} if isinstance(batch, Mapping) else {"parts": list(parts)}
        plain, tensors = as_plain(given if any(stage.is_first for stage in self.stages) else {})
        self._draws = {}
        self._given = plain, [tensor.clone() for tensor in tensors]
        self._before = {f"{s.number} {name}": one.detach().clone() for s in self.stages for name, one in _buffers(s)}
        self._gradients = {
            f"{stage.number} {name}": None if one.grad is None else one.grad.clone()
            for stage in self.stages
            for name, one in stage.named_parameters()
        }
        return True

    def forward(self, stage: Stage, forward: Callable[[Any, Any], Any] | None, part: Microbatch) -> Any:
        """Run the next microbatch of ``stage``, and keep what it is seeded by."""
        seeded = capture_torch(self.device)
        draws = Draws(torch.initial_seed(), {})
        self._draws.setdefault(stage.number, []).append(draws)

        def act(at: str) -> None:
            now = capture_torch(self.device)
            if self._places.get(at) == stage.number and not _equal(now, seeded):
                draws.states[at] = now

        with at_layers(stage.whole, stage.assignment.layers, act):
            return stage(**part.inputs) if forward is None else forward(stage, part.inputs)

    def end(self, count: int, loss: Tensor, *, attaches: bool) -> None:
        """Compare the step, of ``count`` microbatches of this rank, whose mean loss over the job was ``loss``.

        ``attaches``: layers of this rank attach losses.

        Raises:
            CutError: on every rank, where one process has other gradients, buffers or another loss.
        """
        if not self._compares:
            return
        group, waiting, is_first = self._group, self._waiting, dist.get_rank(self._group) == 0
        plain, tensors = self._given
        draws = [(stage, number, one) for stage, every in self._draws.items() for number, one in enumerate(every)]
        states = [(where, at, kind) for *where, one in draws for at, kinds in one.states.items() for kind in kinds]
        tensors += [self._draws[stage][number].states[at][kind] for (stage, number), at, kind in states]
        own = {
            # With slices there are more forwards.
            "why": plain is None or any(len(every) != count for every in self._draws.values()),
            "replica": self.replica,
            "batch": plain,
            "seeds": [(stage, number, one.seed) for stage, number, one in draws],
            "states": states,
            "tensors": [_described(tensor) for tensor in tensors],
            "attaches": attaches,
            "values": [(name, *_described(one)) for name, one in self._values()],
            "trained": [name for name, one in self._parameters() if one.requires_grad],
            "modes": self._changed_modes(),
        }
        told = gather_plain(own, group, self.device, waiting=waiting)
        if any(each["why"] for each in told):
            return
        values, batches, draws_of = self._shared(told, tensors, waiting)
        found: dict[str, Any] = {}
        if is_first:
            try:
                with generators_as_before():
                    found = self._one_process(told, values, batches, draws_of)
            except Exception as error:  # noqa: BLE001 (told to all ranks: they wait for what is found)
                found = {"failed": f"{type(error).__name__}: {error}"}
        gradients = found.pop("gradients", {})
        buffers = found.pop("buffers", {})
        plain_found = {**found, "gradients": _table(gradients), "buffers": _table(buffers)} if is_first else None
        slow = attrs.evolve(waiting, deadline=None if waiting.deadline is None else waiting.deadline * (len(told) + 1))
        right = gather_plain(plain_found, group, self.device, waiting=slow)[0]
        if "failed" in right:
            if is_first:
                warnings.warn(f"the first step is not compared with one process, {right['failed']}", stacklevel=2)
            return
        if is_first and right["cut"]:
            warnings.warn(right["cut"], stacklevel=2)
        flat = _flat([*gradients.values(), *buffers.values()], right["gradients"] + right["buffers"], self.device)
        all_reduce(flat, group)(waiting)
        arrived = iter(_unflat(flat, right["gradients"] + right["buffers"]))
        lines = self._differences(
            {name: next(arrived) if kind else None for name, kind, _ in right["gradients"]},
            {name: next(arrived) for name, _, _ in right["buffers"]},
            right,
        )
        everywhere = [line for each in gather_plain(lines, group, self.device, waiting=waiting) for line in each]
        apart = abs(right["loss"] - loss.item()) > right["limit"] * max(abs(right["loss"]), right["limit"])
        if everywhere or apart:
            raise CutError(
                f"the first step is not that of one process: loss {loss.item():.8g}, and {right['loss']:.8g}; "
                f"{len(everywhere)} gradients and buffers differ by more than {right['limit']:.1g} of their norm"
                + "".join(f"\n  {line}" for line in few(everywhere, _SHOWN))
                + "\nPipelineConfig(check=False) leaves the comparison out"
            )

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [each for stage in self.stages for each in stage.named_parameters(remove_duplicate=False)]

    def _values(self) -> list[tuple[str, Tensor]]:
        """What the stages had before the step, by the names of the whole model."""
        found = [(name, one.detach()) for name, one in self._parameters()]
        for stage in self.stages:
            found += [(name, self._before[f"{stage.number} {name}"]) for name, _ in _buffers(stage)]
        return found

    def _changed_modes(self) -> dict[str, bool]:
        """The modes that the script has set after the stages were made; the others are those of the function."""
        changed: dict[str, bool] = {}
        for stage, before in zip(self.stages, self._modes, strict=True):
            changed |= {name: mode for name, mode in _modes(stage).items() if before.get(name) != mode}
        return changed

    def _shared(
        self, told: Sequence[Mapping[str, Any]], tensors: Sequence[Tensor], waiting: Waiting
    ) -> tuple[dict[str, Tensor], Batches, DrawsOf]:
        """The values of the model, from the first rank that has each; all microbatches, and what seeded them."""
        rank, own = dist.get_rank(self._group), dict(self._values())
        holders: dict[str, tuple[int, list[Any]]] = {}
        for number, each in enumerate(told):
            for name, *described in each["values"]:
                holders.setdefault(name, (number, described))
        table = [(name, *described) for name, (_, described) in holders.items()]
        given = [own[name] if holder == rank else None for name, (holder, _) in holders.items()]
        for number, each in enumerate(told):
            table += [("", *described) for described in each["tensors"]]
            given += tensors if number == rank else [None] * len(each["tensors"])
        flat = _flat(given, table, self.device)
        all_reduce(flat, self._group)(waiting)
        arrived = iter(_unflat(flat, table))
        values = {name: next(arrived) for name in holders}
        batches: dict[int, list[Microbatch]] = {}
        draws: DrawsOf = {}
        for each in told:
            of_batch = [next(arrived) for _ in each["tensors"][: len(each["tensors"]) - len(each["states"])]]
            if given := of_plain(each["batch"], of_batch):
                parts = given["parts"] if "parts" in given else self.rows.split(given["batch"], given["count"])
                every = [microbatch(part, Share(), self.device, self.rows) for part in (*parts, given.get("batch", {}))]
                batches[each["replica"]] = every
            for stage, number, seed in each["seeds"]:
                draws[each["replica"], stage, number] = Draws(seed, {})
            for (stage, number), at, kind in each["states"]:
                draws[each["replica"], stage, number].states.setdefault(at, {})[kind] = next(arrived).cpu()
        return values, [batches[replica] for replica in sorted(batches)], draws

    def _one_process(
        self, told: Sequence[Mapping[str, Any]], values: Mapping[str, Tensor], batches: Batches, draws: DrawsOf
    ) -> dict[str, Any]:
        """The step of the whole model in this process."""
        state = HostState(self.module.model)
        try:
            whole = self._whole(told, values)
            loss, buffers = self._loss(whole, batches, draws, attaches=any(each["attaches"] for each in told))
            names = [name for name, one in whole.named_parameters() if one.requires_grad]
            weights = [whole.get_parameter(name) for name in names]
            # As in a step that is divided last: a loss that a layer attaches with a scale of its own is a mean, too.
            number, scale = sum(len(each) - 1 for each in batches), grad_scale(self.config, torch.ones_like(loss))
            made = torch.autograd.grad(loss * number * scale, weights, allow_unused=True) if weights else ()
            limit = self._limit({one.dtype for one in weights})
            cut = self._cut_apart(whole, batches, limit)
        finally:
            state.restore()
        aliases = {id(one): name for name, one in reversed([*whole.named_parameters(remove_duplicate=False)])}
        first = {name: aliases[id(one)] for name, one in whole.named_parameters(remove_duplicate=False)}
        return {
            "loss": loss.item(),
            "limit": limit,
            "gradients": {name: one if one is None else one / number for name, one in zip(names, made, strict=True)},
            "buffers": buffers,
            "cut": cut,
            "first": {name: one for name, one in first.items() if name != one},
        }

    def _limit(self, dtypes: set[torch.dtype]) -> float:
        """The largest error, of a norm, that rounding explains; models compute some losses in float32."""
        if torch.is_autocast_enabled(self.device.type):
            dtypes = {*dtypes, torch.get_autocast_dtype(self.device.type)}
        limit: float = max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes)) ** 0.5
        tf32 = self.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
        return max(limit, _TF32) if tf32 else limit

    def _whole(self, told: Sequence[Mapping[str, Any]], values: Mapping[str, Tensor]) -> nn.Module:
        model = self.module.model
        whole = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        whole = whole.to(self.device)
        trained = {name for each in told for name in each["trained"]}
        held = {name for each in told for name, *_ in each["values"]}
        for name, one in whole.named_parameters(remove_duplicate=False):
            if name in held:
                one.data = values[name].clone()
                one.requires_grad_(name in trained)
        _set_buffers(whole, values)
        for each in told:
            for name, mode in each["modes"].items():
                whole.get_submodule(name).training = mode
        whole.is_first = whole.is_last = True  # type: ignore[assignment]  # what `forward` reads of a stage
        return whole

    def _loss(
        self, whole: nn.Module, batches: Batches, draws: DrawsOf, *, attaches: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of the step, and the buffers after the first replica."""
        number = sum(len(each) - 1 for each in batches)
        start = {name: one.clone() for name, one in _buffers(whole)}
        outputs: list[Any] = []
        drew, buffers = False, {}
        for replica, (*parts, _) in enumerate(batches):
            _set_buffers(whole, start)
            for index, part in enumerate(parts):
                with self._seeded(whole, draws, replica, index) as drawn:
                    outputs.append(self._called(whole, part))
                drew = drew or drawn()
            if not replica:
                saved = whole.state_dict()
                buffers = {name: one.clone() for name, one in _buffers(whole) if name in saved}
        every = [part for *parts, _ in batches for part in parts]
        beside = [output.loss for output in outputs if isinstance(output, WithLoss)]
        outputs = [output.output if isinstance(output, WithLoss) else output for output in outputs]
        for scaler in aux_loss_scalers(self.config) if attaches else ():
            scaler.set_scale(grad_scale(self.config, torch.ones((), device=self.device), scaler.grad_scale))
        uncut = None if drew or attaches or beside or self.loss is not None else self._uncut(whole, every, outputs)
        loss = self._mean(outputs, every, beside) if uncut is None else uncut
        return torch.stack([loss, *(each / number for each in beside)]).sum(), buffers

    @property
    def _places(self) -> dict[str, int]:
        """Where in a forward of the whole model each stage begins: behind the layers before, and at its first one."""
        assignment, places = self.stages[0].assignment, {"start": 0}
        for stage in range(1, assignment.num_stages):
            before, own = [*assignment.layers[: assignment.before(stage)]], assignment.held(stage)
            places |= {f"after {layer}": stage for layer in before[-1:]} | {f"before {one}": stage for one in own[:1]}
        return places

    @contextmanager
    def _seeded(self, whole: nn.Module, draws: DrawsOf, replica: int, number: int) -> Iterator[Callable[[], bool]]:
        """Seed a forward as those of the stages were; whether it has drawn random numbers, when it has ended."""
        places, drew, states = self._places, False, capture_torch(self.device)

        def drawn() -> bool:
            return drew or not _equal(capture_torch(self.device), states)

        def act(at: str) -> None:
            nonlocal drew, states
            if at in places:
                drew, own = at != "start" and drawn(), draws[replica, places[at], number]
                torch.manual_seed(own.seed)
                if at in own.states:
                    restore(own.states[at], self.device)
                states = capture_torch(self.device)

        with at_layers(whole, self.stages[0].assignment.layers, act):
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

    def _cut_apart(self, whole: nn.Module, batches: Batches, limit: float) -> str | None:
        """In words, where rows have other outputs in microbatches than in their batch, in evaluation mode."""
        whole.eval()
        for *parts, batch in batches:
            if not batch.inputs:
                continue
            with torch.no_grad():
                joined = joined_outputs([self._called(whole, part) for part in parts], parts)
                uncut = self._called(whole, batch)
            apart = None if joined is None else largest_difference(joined, uncut, batch.rows)
            if apart is not None and not apart <= limit:
                return (
                    f"rows have other outputs in {len(parts)} microbatches than in their batch ({apart:.2g} of the "
                    "norm): an entry of the batch is cut wrongly (see rows= and whole= of Pipeline), or rows depend on "
                    "each other in the model"
                )
        return None

    def _differences(
        self, gradients: Mapping[str, Tensor | None], buffers: Mapping[str, Tensor], right: Mapping[str, Any]
    ) -> list[str]:
        """What differs on this rank, in words."""
        found: list[Compared] = []
        for stage in self.stages:
            own = {}
            for name, one in stage.named_parameters():
                before, grad = self._gradients[f"{stage.number} {name}"], one.grad
                own[right["first"].get(name, name)] = grad if before is None or grad is None else grad - before
            found += compared_gradients(gradients, own, dict.fromkeys(own, (stage.number,)))
            held = dict(_buffers(stage)) if self.replica == 0 else {}
            found += [
                compared(f"buffer {name}", [stage.number], held[name], value, 0.0)
                for name, value in buffers.items()
                if name in held
            ]
        return [str(each) for each in found if not each.error <= right["limit"]]


_TF32 = 2.0**-5  # the root of its epsilon


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_buffers())


def _set_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, _ in _buffers(model):
        if name in values:
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, values[name].clone())


def _modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def _equal(one: States, other: States) -> bool:
    return all(torch.equal(state, other[kind]) for kind, state in one.items())


def _described(tensor: Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _table(tensors: Mapping[str, Tensor | None]) -> list[tuple[str, str, list[int]]]:
    return [(name, *(("", [0]) if one is None else _described(one))) for name, one in tensors.items()]


def _flat(tensors: Sequence[Tensor | None], table: Sequence[Any], device: torch.device) -> Tensor:
    """The bytes of tensors of these dtypes and shapes, one after the other; zeros for those that are not here."""
    sizes = [_bytes(kind, shape) for _, kind, shape in table]
    flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    here = tensors or [None] * len(sizes)
    for tensor, part in zip(here, torch.split(flat, sizes), strict=True):
        if tensor is not None and tensor.numel():
            part.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return flat


def _unflat(flat: Tensor, table: Sequence[Any]) -> list[Tensor]:
    parts = torch.split(flat, [_bytes(kind, shape) for _, kind, shape in table])
    return [
        part.clone().view(getattr(torch, kind)).reshape(shape)
        for part, (_, kind, shape) in zip(parts, table, strict=True)
        if kind
    ]


def _bytes(kind: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * getattr(torch, kind).itemsize if kind else 0
