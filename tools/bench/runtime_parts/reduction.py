"""Gradient reduction that starts in the last backward, beside the same one after it: dp 2 x pp 2, emulated compute.

Two more runners give what no overlap can beat: the step without a reduction, and the reductions of all ranks alone. The
floor is the longer of the two. It cannot be met: the first stage's last bucket has no backward left to hide in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipegrid.schedules import (
    PipelineConfig,
    forward_backward_pipelining_without_interleaving,
    reduce_gradients,
)
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.transport import P2PCommunicator
from runtime_parts.rows import Row
from runtime_parts.table import SPREAD_WIDTH, meets, number, pair_ratios, shown, spread_against
from runtime_parts.timing import Outcome, by_turns, notes, steps

BOUND = 1.0
WIDTH = 8
STEPS = ("overlapped", "after", "compute", "reduction")


class _Layer(torch.autograd.Function):
    """A layer with a large weight and little arithmetic: both passes sleep, as on a device that computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * weight[:WIDTH]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        (weight,) = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return gradient * weight[:WIDTH], torch.full_like(weight, 1e-3), None


class Model(nn.Module):
    """Layers of ``elements`` weights each, on ``device``."""

    def __init__(
        self, config: PipelineConfig, device: torch.device, *, layers: int, elements: int, seconds: float
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(elements, device=device)) for _ in range(layers))
        self.config, self.seconds = config, seconds
        self.received: Tensor | None = None

    def set_input_tensor(self, received: Sequence[Tensor | None]) -> None:
        """What has arrived."""
        (self.received,) = received

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape."""
        for weight in self.weights:
            x = _Layer.apply(x, weight, self.seconds)  # type: ignore[no-untyped-call]
        return x


class _Runner:
    """A step function on dp 2 x pp 2; each layer's gradient is a bucket."""

    def __init__(
        self, grid: HyperCommGrid, device: torch.device, *, kind: str, microbatches: int, elements: int, **sizes: Any
    ) -> None:
        config = PipelineConfig(
            pipeline_dtype=torch.float32,
            deadline=60.0,
            overlap_grad_reduce=kind == "overlapped",
            grad_bucket_bytes=4 * elements,
            finalize_model_grads_func=_reduce_nothing if kind == "compute" else None,
        )
        self.communicator = P2PCommunicator(grid.get_pg("pp"), config, tensor_shape=(1, WIDTH), device=device)
        self.groups = ProcessGroupCollection.from_grid(grid)
        self.model = Model(config, device, elements=elements, **sizes)
        self.microbatches, self.device = microbatches, device

    def _forward(self, iterator: Any, model: Model) -> tuple[Tensor, Any]:
        del iterator
        x = torch.ones(1, WIDTH, device=self.device) if model.received is None else model.received
        return model(x), lambda y: (y.sum(), None)

    def step(self) -> None:
        """See `Runner`."""
        for weight in self.model.weights:
            weight.grad = None
        forward_backward_pipelining_without_interleaving(
            forward_step_func=self._forward,
            data_iterator=None,
            model=self.model,
            num_microbatches=self.microbatches,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=self.communicator,
            pg_collection=self.groups,
        )


class _Reduction:
    """The reductions of a step alone, of a model that has gradients."""

    def __init__(self, runner: _Runner) -> None:
        self._runner = runner

    def step(self) -> None:
        """See `Runner`."""
        model = self._runner.model
        reduce_gradients(model, self._runner.groups, loss_lanes=2, bucket_bytes=model.config.grad_bucket_bytes)


def _reduce_nothing(*_: Any, **__: Any) -> None:
    """In place of a reduction."""


def measure(row: Row, rank: int, device: torch.device, *, rounds: int, **sizes: Any) -> Outcome | None:
    """On each rank; the step function runs 1F1B."""
    del rank
    if row.name != "1f1b":
        return None
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    grid.create_pgs(["dp", "pp"])
    made = {kind: _Runner(grid, device, kind=kind, **sizes) for kind in STEPS[:3]}
    runners: dict[str, Any] = {**made, "reduction": _Reduction(made["after"])}
    by_turns(runners, 1)
    seconds = by_turns(runners, rounds)
    for runner in made.values():
        runner.communicator.close()
    grid.destroy()
    return Outcome(seconds, {})


def header(*, rounds: int, microbatches: int, layers: int, elements: int, seconds: float) -> Iterator[str]:
    """What the table says."""
    yield (
        f"reduction: dp 2 x pp 2, {microbatches} microbatch(es), per stage {layers} layers of {4e-6 * elements:.1f} MB "
        f"(a bucket each) whose forward sleeps {1e3 * seconds:g} ms, the backward twice that; milliseconds, medians "
        f"over {rounds} rounds"
    )
    yield (
        f"  {'schedule':<18}{'overlap':>9}{'after':>9}{'compute':>9}{'alone':>9}{'floor':>9}"
        f"{'overlap/after':>{SPREAD_WIDTH}}{'hidden':>8}"
    )


def report(row: Row, outcomes: Sequence[Outcome | None]) -> tuple[bool, list[str]]:
    """Whether the bound holds, and the line of the row; ``hidden``: of what the floor would save, how much is saved."""
    found = [outcome for outcome in outcomes if outcome is not None]
    if not found:
        return True, []
    remarks = notes(found)
    times = {name: steps(found, name) for name in STEPS}
    overlapped, after, compute, alone = (statistics.median(times[name]) for name in STEPS)
    floor = max(compute, alone)
    ratios = pair_ratios(times["overlapped"], times["after"])
    cells = "".join(number(1e3 * value) for value in (overlapped, after, compute, alone, floor))
    saved = f"{(after - overlapped) / (after - floor):.0%}" if after > floor else "-"
    return meets(ratios, BOUND) and not remarks, [
        f"  {row.name:<18}{cells}{spread_against(ratios, BOUND)}{saved:>8}",
        *shown(remarks),
    ]
