"""Live activations: the bytes that autograd keeps for the backward, their peak against the plan's prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipegrid.plans.simulate.costs import Costs
from pipegrid.plans.simulate.simulation import simulate
from runtime_parts.compared import Compared, compare
from runtime_parts.job import Job
from runtime_parts.rows import RANKS, Row
from runtime_parts.runners import Runner
from runtime_parts.table import shown
from runtime_parts.timing import Outcome, notes, timed

WIDTH, SIZE = 64, 32


class _Kept:
    """A tensor that autograd keeps; it is let go when this is."""

    def __init__(self, tensor: Tensor, meter: Meter) -> None:
        # Detached: an output that its own node keeps would otherwise keep the node.
        self.tensor, self._meter = tensor.detach(), meter
        meter.keep(tensor, 1)

    def __del__(self) -> None:
        self._meter.keep(self.tensor, -1)


class Meter:
    """Counts the bytes that graphs keep alive, parameters aside; what several nodes keep counts once."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = {parameter.data_ptr() for parameter in parameters}
        self._users: dict[tuple[int, int], int] = {}
        self.live = 0
        self.peak = 0

    def keep(self, tensor: Tensor, change: int) -> None:
        """One more or one less keeps ``tensor``."""
        key = (tensor.data_ptr(), tensor.nbytes)
        before = self._users.get(key, 0)
        self._users[key] = before + change
        if before == 0 or before + change == 0:
            self.live += change * tensor.nbytes
            self.peak = max(self.peak, self.live)

    def _pack(self, tensor: Tensor) -> object:
        return tensor if tensor.data_ptr() in self._parameters else _Kept(tensor, self)

    @staticmethod
    def _unpack(kept: object) -> Tensor:
        tensor = kept.tensor if isinstance(kept, _Kept) else kept
        assert isinstance(tensor, Tensor)
        return tensor

    def watching(self) -> saved_tensors_hooks:
        """A context in which what is kept is counted."""
        return saved_tensors_hooks(self._pack, self._unpack)


class Layers(nn.Module):
    """Two linear layers: what they keep is needed until W, so that a plan's figure is exact."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        hidden = WIDTH * (1 + stage % 3)  # stages of unequal size
        self.into, self.out = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to the same."""
        result: Tensor = self.out(torch.tanh(self.into(x)))
        return result


def _loss(output: Tensor, target: Tensor) -> Tensor:
    del target
    return output.sum()


@frozen
class Kept:
    """What one rank reports: per runner the peak and what was left at the end, in bytes; per stage, of one microbatch.

    ``outcome`` holds notes alone. ``received``: `Ours.received`.
    """

    outcome: Outcome
    peaks: dict[str, tuple[int, int]]
    stages: dict[int, int]
    received: tuple[int, int] = (0, 0)


def measure(row: Row, rank: int, device: torch.device, *, microbatches: int) -> Kept:
    """On each rank."""
    plan = row.plan(microbatches)
    inputs, targets = torch.randn(2, microbatches * SIZE, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    modules = {stage: Layers(stage).to(device) for stage in plan.stages_at[rank]}
    job = Job(row, plan, rank, modules, inputs.split(SIZE), targets.split(SIZE), _loss, (SIZE, WIDTH), device)
    stages = {stage: _of_one(job, stage) for stage in modules}
    compared = compare(job, floor=False)
    if not isinstance(compared, Compared):
        return Kept(compared, {}, stages)
    peaks = {name: _peak(job, runner) for name, runner in compared.runners.items()}
    received = compared.ours.received(steps=3)
    compared.ours.close()
    return Kept(Outcome({}, compared.notes), peaks, stages, received)


def _of_one(job: Job, stage: int) -> int:
    meter = Meter(job.parameters)
    with meter.watching():
        y = job.modules[stage](torch.zeros(job.shape, device=job.device, requires_grad=stage > 0))
    del y
    assert meter.live == 0, f"{meter.live} bytes of a forward have no owner"
    return meter.peak


def _peak(job: Job, runner: Runner) -> tuple[int, int]:
    meter = Meter(job.parameters)
    job.forget_gradients()
    with meter.watching():
        timed(runner)
    return meter.peak, meter.live


def header(*, microbatches: int) -> Iterator[str]:
    """What the table says."""
    yield (
        f"live activations: bytes that autograd keeps for the backward, {RANKS} ranks, {microbatches} microbatches; "
        "peak per rank"
    )


def report(row: Row, ranks: Sequence[Kept], *, microbatches: int) -> tuple[bool, list[str]]:
    """Whether what was measured is what the plan says, and the lines of the row."""
    remarks = notes([rank.outcome for rank in ranks])
    if not all(rank.peaks for rank in ranks):
        return False, [f"  {row.name}", *shown(remarks)]
    plan = row.plan(microbatches)
    sizes = {stage: size for rank in ranks for stage, size in rank.stages.items()}
    costs = Costs(activation=tuple(float(sizes[stage]) for stage in range(plan.num_stages)))
    predicted = [round(peak) for peak in simulate(plan, costs).peaks()]
    measured = [rank.peaks["ours"][0] for rank in ranks]
    left = [rank.peaks["ours"][1] for rank in ranks]
    received, slots = ([rank.received[at] for rank in ranks] for at in (0, 1))
    good = measured == predicted and received == slots and not any(left)
    lines = [
        f"  {row.name:<18}{'plan':<8}{_cells(predicted)}",
        f"  {'':<18}{'ours':<8}{_cells(measured)}  {'equal' if measured == predicted else 'DIFFERENT'}",
    ]
    if any(left):
        lines.append(f"  {'':<18}{'left':<8}{_cells(left)}  after the step")
    lines += [
        f"  {'':<18}{'slots':<8}{_cells(slots)}  of received messages, reuse_buffers=True",
        f"  {'':<18}{'lanes':<8}{_cells(received)}  {'equal' if received == slots else 'DIFFERENT'}",
    ]
    if all("torch" in rank.peaks for rank in ranks):
        lines.append(f"  {'':<18}{'torch':<8}{_cells([rank.peaks['torch'][0] for rank in ranks])}")
    return good, [*lines, *shown(remarks)]


def _cells(values: Sequence[int]) -> str:
    return "".join(f"{value:>10,}" for value in values)
