"""Gradient reduction that starts in the last backward, beside the same one after it: dp 2 x pp 2, emulated compute."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipegrid.schedules import PipelineConfig, forward_backward_pipelining_without_interleaving
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.transport import P2PCommunicator
from runtime_parts.rows import Row
from runtime_parts.table import SPREAD_WIDTH
from runtime_parts.timing import Outcome, by_turns, pair_report

BOUND = 1.0
WIDTH = 8
STEPS = ("overlapped", "after")


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
    """Layers of ``elements`` weights each."""

    def __init__(self, config: PipelineConfig, *, layers: int, elements: int, seconds: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(elements)) for _ in range(layers))
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
    """A step function on dp 2 x pp 2."""

    def __init__(self, grid: HyperCommGrid, *, overlap: bool, microbatches: int, **sizes: Any) -> None:
        config = PipelineConfig(pipeline_dtype=torch.float32, deadline=60.0, overlap_grad_reduce=overlap)
        self.communicator = P2PCommunicator(grid.get_pg("pp"), config, tensor_shape=(1, WIDTH))
        self.groups = ProcessGroupCollection.from_grid(grid)
        self.model = Model(config, **sizes)
        self.microbatches = microbatches

    @staticmethod
    def _forward(iterator: Any, model: Model) -> tuple[Tensor, Any]:
        del iterator
        x = torch.ones(1, WIDTH) if model.received is None else model.received
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


def measure(row: Row, rank: int, *, rounds: int, **sizes: Any) -> Outcome | None:
    """On each rank; the step function runs 1F1B."""
    del rank
    if row.name != "1f1b":
        return None
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    grid.create_pgs(["dp", "pp"])
    runners = {name: _Runner(grid, overlap=name == "overlapped", **sizes) for name in STEPS}
    by_turns(runners, 1)
    seconds = by_turns(runners, rounds)
    for runner in runners.values():
        runner.communicator.close()
    grid.destroy()
    return Outcome(seconds, {})


def header(*, rounds: int, microbatches: int, layers: int, elements: int, seconds: float) -> Iterator[str]:
    """What the table says."""
    yield (
        f"reduction: dp 2 x pp 2, {microbatches} microbatches, per stage {layers} layers of {4e-6 * elements:.1f} MB "
        f"whose forward sleeps {1e3 * seconds:g} ms, the backward twice that; milliseconds, medians over {rounds} pairs"
    )
    yield f"  {'schedule':<18}{'overlap':>9}{'after':>9}{'overlap/after':>{SPREAD_WIDTH}}"


def report(row: Row, outcomes: Sequence[Outcome | None]) -> tuple[bool, list[str]]:
    """Whether the bound holds, and the line of the row."""
    return pair_report(row.name, outcomes, STEPS, BOUND, unit=1e3)
