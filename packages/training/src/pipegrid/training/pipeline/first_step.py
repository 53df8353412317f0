"""The first step of a job against one process: its loss, gradients and buffers, with the script's own loss and batch.

What a job adds to its stages (how it cuts the batch, weighs losses, seeds forwards, keeps modes, names and ties) is in
none of them; so the first rank does the step again, as one process would, with the values that the ranks had, and each
rank compares its gradients. Of several modules it runs the whole of each; tensor-parallel parts are put together.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import attrs
import torch
from attrs import define, field
from torch import Tensor, nn

from pipegrid.gradients.dtensors import is_dtensor, mesh_ranks
from pipegrid.stages import Stage
from pipegrid.stages.comparison.chain import at_layers
from pipegrid.stages.comparison.compare import Compared, compared, compared_gradients
from pipegrid.stages.generators import States, capture_torch
from pipegrid.topology import replica_of
from pipegrid.training.pipeline.exchange import RankExchange, as_plain, first_with, not_of_one_process, of_plain
from pipegrid.training.pipeline.microbatches import Microbatch, Share, microbatch
from pipegrid.training.pipeline.modules import JobSetup
from pipegrid.training.pipeline.one_process import Draws, Given, OneProcess, Right, are_equal, cut_of

LARGEST = 20_000_000  # parameters of a model whose first step is compared without being asked


@define(eq=False)
class FirstStep:
    """A comparison of the first step of a job; every rank makes one, and calls it as the others do."""

    job: JobSetup
    ranks: RankExchange
    process: OneProcess
    _modes: dict[str, bool] = field(init=False)
    _draws: dict[tuple[str, int], list[Draws]] = field(factory=dict, init=False)  # by module and stage, of microbatches
    _given: Any = field(default=None, init=False)  # the batch, where this rank reads it for the others
    _buffers: dict[str, Tensor] = field(factory=dict, init=False)  # before the step
    _gradients: dict[str, Tensor | None] = field(factory=dict, init=False)  # likewise

    def __attrs_post_init__(self) -> None:
        self._modes = self._modes_now()

    @classmethod
    def of(cls, job: JobSetup) -> FirstStep | None:
        """None, alike on all ranks, where the config says no, or a line says why."""
        if job.config.check is False:
            return None
        ranks, why = RankExchange("the first step", job.config, job.device), None
        grids = {name: module.grid for name, module in job.modules.items()}
        sizes = [(dim, grid.dim_size(dim)) for grid in grids.values() for dim in grid.dim_names]
        others = dict.fromkeys(dim for dim, size in sizes if size > 1 and dim not in ("dp", "pp", "tp"))
        axes = attrgetter("src_lanes", "dest_lanes", "src_placements", "dest_placements")
        own_axes = [edge for edge, one in job.edges.items() if any(axes(one))]
        size = _parameters(job.stages, len(job.modules), ranks)
        if others or job.config.shard:
            why = f"the model is divided by {' and '.join([*others] or ['shard'])}"
        elif len(job.graph.sinks) > 1:
            why = f"{' and '.join(job.graph.sinks)} both have a loss"
        elif own_axes:
            why = f"between {' and '.join(own_axes[0])} more is divided than rows"
        elif not job.config.check and size > LARGEST:
            why = f"{size:,} parameters are above {LARGEST:,}, and PipelineConfig(check=True) compares any number"
        if why is not None:
            ranks.say_not_compared(why)
            return None
        shares = {name: replica_of(grid, grid.ranks[0])[1] // job.replicas for name, grid in grids.items()}
        return cls(job, ranks, OneProcess(job, shares))

    def _values(self, by: Callable[..., Any], **options: Any) -> dict[str, Any]:
        return dict(self.job.read(self.job.stages.items(), by, **options))

    @property
    def _why_not(self) -> str | None:
        """Why this rank cannot compare its part."""
        for name, stage in ((name, stage) for name, held in self.job.stages.items() for stage in held):
            values, grid = [*stage.parameters(), *stage.buffers()], self.job.modules[name].grid
            if any(type(one) not in (nn.Parameter, Tensor) and not is_dtensor(one) for one in values):
                return "parameters are of a class of their own"
            if any(len({replica_of(grid, rank) for rank in mesh_ranks(one)}) > 1 for one in values):
                return "parameters are sharded over replicas"
            if any(hasattr(one, "main_grad") for one in values):
                return "gradients are in main_grad"
            if "current_replica" in vars(stage):
                return "the script seeds dropout itself"
            if any(getattr(module, "_compiled_call_impl", None) for module in stage.modules()):
                return "layers are compiled"
        return None

    def begin(self, parts: Sequence[Mapping[str, Any]], batch: Any) -> bool:
        """Agree on whether the step of ``parts`` of ``batch`` is compared, and keep what it may change."""
        given = {"batch": batch, "count": len(parts)} if isinstance(batch, Mapping) else {"parts": list(parts)}
        reads = next(iter(self.job.modules))  # as all others do
        tensors: list[Tensor] = []
        foreign = None
        try:
            plain = as_plain(given if 0 in map(_number, self.job.stages.get(reads, ())) else {}, tensors)
        except TypeError:
            foreign = "the batch holds objects other than tensors, arrays, numbers, texts, lists, tuples and dicts"
        compares = self.ranks.may_compare(self._why_not or foreign) and self._is_whole()
        if compares:
            self._draws = {}
            self._given = of_plain(plain, (tensor.clone() for tensor in tensors))
            self._buffers = {name: one.clone() for name, one in self._values(nn.Module.named_buffers).items()}
            self._gradients = {name: None if one.grad is None else one.grad.clone() for name, one in self.job.named()}
        return compares

    def _is_whole(self) -> bool:
        """Whether tensor-parallel ranks have DTensors, which can be put together; a line says where not."""
        sharded = any(map(is_dtensor, self._values(nn.Module.named_parameters).values()))
        if not self.job.is_tensor_parallel or any(self.ranks.plain(sharded)):
            return True
        self.ranks.say_not_compared(
            "tensor-parallel ranks have parts that are no DTensors: only their code knows of what"
        )
        return False

    def forward(self, name: str, stage: Any, forward: Callable[[Any, Any], Any] | None, part: Microbatch) -> Any:
        """Run the next microbatch of ``stage`` of a module, and keep what it is seeded by."""
        device, (layers, places), number = self.job.device, cut_of(stage), _number(stage)
        seeded = capture_torch(device)
        states: dict[str, States] = {}
        self._draws.setdefault((name, number), []).append((torch.initial_seed(), states))

        def act(at: str) -> None:
            now = capture_torch(device)
            if places.get(at) == number and not are_equal(now, seeded):
                states[at] = now

        with at_layers(getattr(stage, "whole", stage) if layers else stage, layers, act):
            return stage(**part.inputs) if forward is None else forward(stage, part.inputs)

    def end(self, count: int, loss: Tensor, *, attaches: bool) -> float | None:
        """Compare the step, of ``count`` microbatches of this rank, whose mean loss over the job was ``loss``.

        ``attaches``: layers of this rank attach losses. Returns the largest error that rounding explains, where it was
        compared; raises `CutError` on every rank where one process has other gradients, buffers or another loss.
        """
        sliced = any(len(each) != count for each in self._draws.values())
        if not self.ranks.may_compare("microbatches are cut into slices" if sliced else None):
            return None
        right = self._right(self._everything(attaches=attaches))
        if right is None:
            return None
        if not math.isfinite(right.loss) and not math.isfinite(loss.item()):
            self.ranks.say_not_compared(f"its loss is {loss.item():g}, and that of one process {right.loss:g}")
            return None
        lines = [line for each in self.ranks.plain(self._differences(right)) for line in each]
        apart = abs(right.loss - loss.item()) > right.limit * max(abs(right.loss), right.limit)
        if lines or apart:
            what = f"the first step is not that of one process: loss {loss.item():.8g}, and {right.loss:.8g}"
            more = f"gradients and buffers differ by more than {right.limit:.1g} of their norm"
            raise not_of_one_process(f"{what}; {len(lines)} {more}", lines)
        return right.limit

    def _everything(self, *, attaches: bool) -> Given:
        """All that the ranks had: the model's values from the first that has each, all microbatches and their draws."""
        values = self._buffers | self._values(nn.Module.named_parameters, remove_duplicate=False)
        trained = [name for name, one in values.items() if one.requires_grad]
        values = {name: _whole(one) for name, one in values.items()}
        holders = first_with(self.ranks.plain([*values]))
        told = self.ranks.nested(
            {
                "replica": self.job.replica,
                "shares": {name: share.index for name, share in self.job.shares.items()},
                "batch": self._given,
                "draws": [
                    [*where, number, *one] for where, every in self._draws.items() for number, one in enumerate(every)
                ],
                "attaches": attaches,
                "values": {name: one for name, one in values.items() if holders[name] == self.ranks.rank},
                "trained": trained,
                "cuts": {name: cut_of(held[0]) for name, held in self.job.stages.items()},
                "modes": {name: mode for name, mode in self._modes_now().items() if self._modes.get(name) != mode},
            }
        )
        rows, batches = self.job.rows, {}
        for replica, given in ((each["replica"], each["batch"]) for each in told if each["batch"]):
            parts = given["parts"] if "parts" in given else rows.split(given["batch"], given["count"])
            whole = given.get("batch", {})
            batches[replica] = [microbatch(part, Share(), self.job.device, rows) for part in (*parts, whole)]
        return Given(
            {name: one for each in told for name, one in each["values"].items()},
            {name for each in told for name in each["trained"]},
            {name: mode for each in told for name, mode in each["modes"].items()},
            [batch for _, batch in sorted(batches.items(), key=itemgetter(0))],
            {name: cut for each in told for name, cut in each["cuts"].items()},
            {
                (name, each["replica"], each["shares"][name], stage, number): (seed, states)
                for each in told
                for name, stage, number, seed, states in each["draws"]
            },
            any(each["attaches"] for each in told),
        )

    def _modes_now(self) -> dict[str, bool]:
        return {name: module.training for name, module in self._values(nn.Module.named_modules).items()}

    def _right(self, given: Given) -> Right | None:
        """The step of one process, from the first rank on all; None where that cannot run it, which it says."""
        found: dict[str, Any] = {}
        if self.ranks.rank == 0:
            try:
                found = attrs.asdict(self.process.step(given), recurse=False)
            except Exception as error:  # noqa: BLE001 (told to all ranks: they wait for what is found)
                found = {"failed": f"{type(error).__name__}: {error}"}
        told = self.ranks.nested(found, after_first=True)[0]
        if "failed" in told:
            self.ranks.say_not_compared(told["failed"])
            return None
        right = Right(**told)
        if right.cut and self.ranks.rank == 0:
            warnings.warn(right.cut, stacklevel=2)
        return right

    def _differences(self, right: Right) -> list[str]:
        """The differences on this rank, in words."""
        own: dict[str, Tensor | None] = {}
        for name, one in self.job.named():
            before = self._gradients[name]
            gradient = one.grad if before is None or one.grad is None else one.grad - before
            own[name] = None if gradient is None else _whole(gradient)
        every = [(self.job.prefix(name), stage) for name, held in self.job.stages.items() for stage in held]
        numbers = {one: _number(stage) for _, stage in every for one in stage.parameters()}
        stages = {name: (numbers[one],) for name, one in self.job.named()}
        found: list[Compared] = [*compared_gradients(right.gradients, own, stages)]
        first = [name for name, share in self.job.shares.items() if (self.job.replica, share.index) == (0, 0)]
        for module, stage in ((name, stage) for name in first for stage in self.job.stages[name]):
            found += [
                compared(f"buffer {name}", [_number(stage)], one, right.buffers[name], 0.0)
                for name, one in self.job.read([(module, [stage])], nn.Module.named_buffers)
                if name in right.buffers
            ]
        lines = [str(each) for each in found if not each.error <= right.limit]
        lines += [f"{name} in named_parameters() has no name of one process" for name in own.keys() - right.gradients]
        used = {  # the zeros of another module, of which the step uses nothing, a bridge has sent
            prefix
            for prefix, _ in every
            if any(one is not None and name.startswith(prefix) for name, one in right.gradients.items())
        }
        return lines + [
            f"gradient of {name}: {'none' if one is None else 'zeros'} on stage {stages[name][0]}, and "
            f"{'zeros' if one is None else 'none'} in one process, where an optimizer does another update"
            for name, one in own.items()
            if self._gradients[name] is None
            and name in right.gradients
            and (one is None) != (right.gradients[name] is None)
            and any(name.startswith(prefix) for prefix in used)
        ]


def _parameters(stages: Mapping[str, Sequence[Any]], modules: int, ranks: RankExchange) -> int:
    """The parameters of all ``modules``; those of a cut one are known on each of its ranks."""
    own = {}
    for name, (stage, *_) in stages.items():
        model = stage.proofs.outline.model if getattr(stage, "proofs", None) else stage
        own[name] = sum(one.numel() for one in model.parameters())
    known = ranks.plain(own) if modules > 1 else [own]
    return sum({name: size for each in known for name, size in each.items()}.values())


def _number(stage: Any) -> int:
    """The number of a stage in its module; a module that is not cut is one."""
    return stage.number if isinstance(stage, Stage) else 0


def _whole(tensor: Any) -> Tensor:
    """The tensor of which a DTensor is a part; all ranks of its mesh ask for it."""
    return tensor.detach().full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[no-any-return]
