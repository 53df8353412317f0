"""The first step of a job against one process: its loss, gradients and buffers, with the script's own loss and batch.

The proof of a cut and `check_stages` compare stages with the model. What a job adds to them (how it cuts the batch,
weighs losses, seeds forwards, keeps modes, names and ties) is in no stage; so the first rank of the job does the step
again, as one process would, with the values that the ranks had, and each rank compares its gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from pipegrid.schedules import PipelineConfig
from pipegrid.stages import Stage
from pipegrid.stages.comparison.chain import at_layers
from pipegrid.stages.comparison.compare import Compared, compared, compared_gradients
from pipegrid.stages.errors import CutError, few
from pipegrid.stages.generators import capture_torch
from pipegrid.training.pipeline.exchange import Exchange, described
from pipegrid.training.pipeline.microbatches import Microbatch, Share, microbatch
from pipegrid.training.pipeline.modules import PipelineModule
from pipegrid.training.pipeline.one_process import Draws, Given, OneProcess, Right, are_equal, places_of
from pipegrid.training.pipeline.parts import as_plain, of_plain
from pipegrid.training.pipeline.rows import Rows

LARGEST = 20_000_000
"""Parameters of a model whose first step is compared without being asked."""

_SHOWN = 6


@define(eq=False)
class FirstStep:
    """What the first step of a job of one model is compared by; every rank makes one, and calls it as the others do.

    Attributes:
        stages: of this rank.
        process: the whole model.
        ranks: of the job.
        named: the parameters to train by the names that the script has for them.
        replica: whose batch this rank reads.
    """

    stages: Sequence[Stage]
    process: OneProcess
    ranks: Exchange
    named: Callable[[], Iterable[tuple[str, nn.Parameter]]]
    replica: int
    _modes: list[dict[str, bool]] = field(init=False)
    _draws: dict[int, list[Draws]] = field(factory=dict, init=False)  # by stage, of each microbatch
    _compares: bool = field(default=False, init=False)
    _given: tuple[Any, list[Tensor]] = field(default=(None, []), init=False)
    _buffers: dict[str, Tensor] = field(factory=dict, init=False)  # before the step
    _gradients: dict[str, Tensor | None] = field(factory=dict, init=False)  # likewise

    def __attrs_post_init__(self) -> None:
        self._modes = [_modes(stage) for stage in self.stages]

    @classmethod
    def of(
        cls,
        modules: Mapping[str, PipelineModule],
        stages: Mapping[str, Sequence[Any]],
        config: PipelineConfig,
        loss: Callable[[Any, Any], Any] | None,
        rows: Rows,
        device: torch.device,
        *given: Any,
    ) -> FirstStep | None:
        """None, alike on all ranks, where the config says no, or a line says why; ``given``: other attributes."""
        if config.check is False:
            return None
        module, own = next(iter(modules.values())), next(iter(stages.values()))
        others = [dim for dim in module.grid.dim_names if dim not in ("dp", "pp") and module.grid.dim_size(dim) > 1]
        others += ["shard"] if config.shard else []
        outline = own[0].proofs.outline.model if len(modules) == 1 and getattr(own[0], "proofs", None) else nn.Module()
        size = sum(one.numel() for one in outline.parameters())
        why = None
        if len(modules) > 1 or module.layout is None:
            why = f"the job has the modules {', '.join(modules)}"
        elif others:
            why = f"the model is divided by {' and '.join(others)}"
        elif not config.check and size > LARGEST:
            why = f"{size:,} parameters are above {LARGEST:,}, and PipelineConfig(check=True) compares any number"
        ranks = Exchange("the first step", config, device)
        if why is not None:
            ranks.say_not_compared(why)
            return None
        return cls(own, OneProcess(module, own[0].assignment, config, loss, rows, device), ranks, *given)

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
            if any(getattr(module, "_compiled_call_impl", None) for module in stage.modules()):
                return "layers are compiled"
        return None

    def _may_compare(self, why_not: str | None) -> bool:
        """Whether no rank has a reason against it; the first that is given is said."""
        why = next((each for each in self.ranks.plain(why_not) if each), None)
        if why:
            self.ranks.say_not_compared(why)
        return why is None

    def begin(self, parts: Sequence[Mapping[str, Any]], batch: Any) -> bool:
        """Agree on whether the step of ``parts`` of ``batch`` is compared, and keep what it may change."""
        given = {"batch": batch, "count": len(parts)} if isinstance(batch, Mapping) else {"parts": list(parts)}
        plain, tensors = as_plain(given if any(stage.is_first for stage in self.stages) else {})
        foreign = "the batch holds objects other than tensors, arrays, numbers, texts, lists, tuples and dicts"
        self._compares = self._may_compare(self._why_not or (foreign if plain is None else None))
        if self._compares:
            self._draws = {}
            self._given = plain, [tensor.clone() for tensor in tensors]
            self._buffers = {name: one.clone() for stage in self.stages for name, one in stage.named_buffers()}
            self._gradients = {name: None if one.grad is None else one.grad.clone() for name, one in self.named()}
        return self._compares

    def forward(self, stage: Stage, forward: Callable[[Any, Any], Any] | None, part: Microbatch) -> Any:
        """Run the next microbatch of ``stage``, and keep what it is seeded by."""
        device, places = self.process.device, places_of(stage.assignment)
        seeded, draws = capture_torch(device), Draws(torch.initial_seed(), {})
        self._draws.setdefault(stage.number, []).append(draws)

        def act(at: str) -> None:
            now = capture_torch(device)
            if places.get(at) == stage.number and not are_equal(now, seeded):
                draws.states[at] = now

        with at_layers(stage.whole, stage.assignment.layers, act):
            return stage(**part.inputs) if forward is None else forward(stage, part.inputs)

    def end(self, count: int, loss: Tensor, *, attaches: bool) -> float | None:
        """Compare the step, of ``count`` microbatches of this rank, whose mean loss over the job was ``loss``.

        ``attaches``: layers of this rank attach losses. Returns the largest error that rounding explains, where it was
        compared.

        Raises:
            CutError: on every rank, where one process has other gradients, buffers or another loss.
        """
        if not self._compares:
            return None
        sliced = any(len(each) != count for each in self._draws.values())
        if not self._may_compare("microbatches are cut into slices" if sliced else None):
            return None
        right = self._right(self._everything(attaches=attaches))
        if right is None:
            return None
        lines = [line for each in self.ranks.plain(self._differences(right)) for line in each]
        apart = abs(right.loss - loss.item()) > right.limit * max(abs(right.loss), right.limit)
        if lines or apart:
            raise CutError(
                f"the first step is not that of one process: loss {loss.item():.8g}, and {right.loss:.8g}; "
                f"{len(lines)} gradients and buffers differ by more than {right.limit:.1g} of their norm"
                + "".join(f"\n  {line}" for line in few(lines, _SHOWN))
                + "\nPipelineConfig(check=False) leaves the comparison out"
            )
        return right.limit

    def _everything(self, *, attaches: bool) -> Given:
        """What all ranks had: the model's values from the first that has each, all microbatches and their draws."""
        plain, tensors = self._given
        draws = [(stage, number, one) for stage, every in self._draws.items() for number, one in enumerate(every)]
        states = [(where, at, kind) for *where, one in draws for at, kinds in one.states.items() for kind in kinds]
        tensors += [self._draws[stage][number].states[at][kind] for (stage, number), at, kind in states]
        values: dict[str, Tensor] = dict(self._buffers)
        for stage in self.stages:
            values |= dict(stage.named_parameters(remove_duplicate=False))
        told = self.ranks.plain(
            {
                "replica": self.replica,
                "batch": plain,
                "seeds": [(stage, number, one.seed) for stage, number, one in draws],
                "states": states,
                "tensors": [described(tensor) for tensor in tensors],
                "attaches": attaches,
                "values": [(name, described(one)) for name, one in values.items()],
                "trained": [name for name, one in values.items() if one.requires_grad],
                "modes": self._changed_modes(),
            }
        )
        holders = {name: number for number, each in reversed([*enumerate(told)]) for name, _ in each["values"]}
        table = [dict(told[number]["values"])[name] for name, number in holders.items()]
        here = [values[name] if number == self.ranks.rank else None for name, number in holders.items()]
        for number, each in enumerate(told):
            table += each["tensors"]
            here += tensors if number == self.ranks.rank else [None] * len(each["tensors"])
        arrived = iter(self.ranks.tensors(table, here))
        shared = {name: next(arrived) for name in holders}
        batches: dict[int, list[Microbatch]] = {}
        drawn: dict[tuple[int, int, int], Draws] = {}
        for each in told:
            of_batch = [next(arrived) for _ in each["tensors"][: len(each["tensors"]) - len(each["states"])]]
            if given := of_plain(each["batch"], of_batch):
                batches[each["replica"]] = self._microbatches(given)
            for stage_number, number, seed in each["seeds"]:
                drawn[each["replica"], stage_number, number] = Draws(seed, {})
            for (stage_number, number), at, kind in each["states"]:
                drawn[each["replica"], stage_number, number].states.setdefault(at, {})[kind] = next(arrived).cpu()
        return Given(
            shared,
            {name for each in told for name in each["trained"]},
            {name: mode for each in told for name, mode in each["modes"].items()},
            [batches[replica] for replica in sorted(batches)],
            drawn,
            any(each["attaches"] for each in told),
        )

    def _microbatches(self, given: Mapping[str, Any]) -> list[Microbatch]:
        rows, device = self.process.rows, self.process.device
        parts = given["parts"] if "parts" in given else rows.split(given["batch"], given["count"])
        return [microbatch(part, Share(), device, rows) for part in (*parts, given.get("batch", {}))]

    def _changed_modes(self) -> dict[str, bool]:
        """The modes that the script has set after the stages were made; the others are those of the function."""
        changed: dict[str, bool] = {}
        for stage, before in zip(self.stages, self._modes, strict=True):
            changed |= {name: mode for name, mode in _modes(stage).items() if before.get(name) != mode}
        return changed

    def _right(self, given: Given) -> Right | None:
        """What the first rank computes, on all ranks; None where it cannot, which it says."""
        found: Right | None = None
        plain: dict[str, Any] = {}
        if self.ranks.rank == 0:
            try:
                found = self.process.step(given)
            except Exception as error:  # noqa: BLE001 (told to all ranks: they wait for what is found)
                plain = {"failed": f"{type(error).__name__}: {error}"}
            else:
                tables = {
                    kind: [(name, described(one)) for name, one in getattr(found, kind).items()]
                    for kind in ("gradients", "buffers")
                }
                plain = {"loss": found.loss, "limit": found.limit, **tables}
        told = self.ranks.plain(plain, after_first=True)[0]
        if "failed" in told:
            self.ranks.say_not_compared(told["failed"])
            return None
        if found is not None and found.cut:
            warnings.warn(found.cut, stacklevel=2)
        both = [*told["gradients"], *told["buffers"]]
        here = [None] * len(both) if found is None else [*found.gradients.values(), *found.buffers.values()]
        table = [each for _, each in both]
        arrived = iter(self.ranks.tensors(table, here))
        gradients = {name: next(arrived) for name, _ in told["gradients"]}
        return Right(told["loss"], gradients, {name: next(arrived) for name, _ in told["buffers"]}, told["limit"], None)

    def _differences(self, right: Right) -> list[str]:
        """What differs on this rank, in words."""
        own: dict[str, Tensor | None] = {}
        for name, one in self.named():
            before = self._gradients[name]
            own[name] = one.grad if before is None or one.grad is None else one.grad - before
        numbers = {id(one): stage.number for stage in self.stages for one in stage.parameters()}
        stages = {name: (numbers[id(one)],) for name, one in self.named()}
        found: list[Compared] = [*compared_gradients(right.gradients, own, stages)]
        held = {name: (stage.number, one) for stage in self.stages for name, one in stage.named_buffers()}
        for name, value in right.buffers.items() if self.replica == 0 else ():
            if name in held:
                found.append(compared(f"buffer {name}", [held[name][0]], held[name][1], value, 0.0))
        lines = [str(each) for each in found if not each.error <= right.limit]
        lines += [f"{name} in named_parameters() has no name of one process" for name in own.keys() - right.gradients]
        return lines + [
            f"gradient of {name}: {'none' if one is None else 'zeros'} on stage {stages[name][0]}, and "
            f"{'zeros' if one is None else 'none'} in one process, where an optimizer does another update"
            for name, one in own.items()
            if self._gradients[name] is None
            and name in right.gradients
            and (one is None) != (right.gradients[name] is None)
        ]


def _modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}
