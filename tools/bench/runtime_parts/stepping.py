"""The step function beside `PipelineRuntime.step`: the cost of taking up a call's arguments, per step.

Both run the same plan and the same functions of the user's: the model, its ``set_input_tensor`` and a
``forward_step_func``, which a stage written for the runtime calls by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrid.core.graph import ModuleGraph
from pipegrid.schedules import (
    Forwarded,
    PipelineConfig,
    PipelineRuntime,
    forward_backward_pipelining_without_interleaving,
    step_plan,
)
from pipegrid.transport import Edge, P2PCommunicator
from runtime_parts.rows import RANKS, Row
from runtime_parts.table import SPREAD_WIDTH
from runtime_parts.timing import Outcome, by_turns, pair_report

BOUND = 1.05
WIDTH = 8
STEPS = ("step function", "runtime")
_OPENINGS = 9

LossFunc = Callable[[Tensor], tuple[Tensor, None]]


class Model(nn.Module):
    """An empty stage, as a step function takes it: each element times a weight."""

    def __init__(self, config: PipelineConfig, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, WIDTH, device=device))
        self.config = config
        self.received: Tensor | None = None

    def set_input_tensor(self, received: Sequence[Tensor | None]) -> None:
        """What has arrived."""
        (self.received,) = received

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape."""
        return x * self.weight


def forward_step(iterator: Any, model: Model) -> tuple[Tensor, LossFunc]:
    """The user's ``forward_step_func``, without data."""
    del iterator
    received = model.received
    return model(model.weight.new_ones(1, WIDTH) if received is None else received), loss


def loss(output: Tensor) -> tuple[Tensor, None]:
    """The user's loss function."""
    return output.sum(), None


class _Runner:
    """Both ways have the same config, model, shapes and messages, each on lanes of its own."""

    def __init__(self, microbatches: int, device: torch.device) -> None:
        self.config = PipelineConfig(pipeline_dtype=torch.float32, deadline=60.0)
        self.communicator = P2PCommunicator(dist.group.WORLD, self.config, tensor_shape=(1, WIDTH), device=device)
        self.model = Model(self.config, device)
        self.microbatches = microbatches


class StepFunction(_Runner):
    """The seeds' call."""

    def step(self) -> None:
        """See `Runner`."""
        self.model.weight.grad = None
        forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step,
            data_iterator=None,
            model=self.model,
            num_microbatches=self.microbatches,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=self.communicator,
        )


class Runtime(_Runner):
    """The same plan and stage, written for the runtime."""

    def __init__(self, microbatches: int, device: torch.device) -> None:
        super().__init__(microbatches, device)
        rank = dist.get_rank()
        self._into = None if rank == 0 else Edge(rank - 1, rank)
        self._out = None if rank == RANKS - 1 else Edge(rank, rank + 1)
        plan = step_plan(ModuleGraph({"model": RANKS}), microbatches)
        self._runtime = PipelineRuntime(plan, {rank: self}, self.communicator, deadline=60.0)

    def forward(self, microbatch: int, inputs: Any) -> Forwarded:
        """See `pipegrid.schedules.RuntimeStage`."""
        del microbatch
        self.model.set_input_tensor([None if self._into is None else inputs[self._into]])
        output, loss_func = forward_step(None, self.model)
        if self._out is not None:
            return Forwarded({self._out: output})
        value, _ = loss_func(output)
        return Forwarded({}, value / self.microbatches)

    def step(self) -> None:
        """See `Runner`."""
        self.model.weight.grad = None
        self._runtime.step()


def measure(row: Row, rank: int, device: torch.device, *, microbatches: int, rounds: int) -> Outcome | None:
    """On each rank; the step function runs 1F1B."""
    del rank
    if row.name != "1f1b":
        return None
    makers = {"step function": StepFunction, "runtime": Runtime}
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    # Two equal runtimes differ by up to 3% for as long as their lanes last: each pair has a part of the rounds.
    openings = min(_OPENINGS, rounds)
    for opening in range(openings):
        names = list(makers)[:: -1 if opening % 2 else 1]
        runners = {name: makers[name](microbatches, device) for name in names}
        by_turns(runners, 3)  # type: ignore[arg-type]  # a runtime's first step connects
        for name, found in by_turns(runners, math.ceil(rounds / openings)).items():  # type: ignore[arg-type]
            seconds[name] += found
        for runner in runners.values():
            runner.communicator.close()
    return Outcome(seconds, {})


def header(*, microbatches: int, rounds: int) -> Iterator[str]:
    """What the table says."""
    yield (
        f"step function: an empty 1F1B step by forward_backward_pipelining_without_interleaving and by "
        f"PipelineRuntime.step, {RANKS} ranks, {microbatches} microbatches; milliseconds, medians over {rounds} pairs"
    )
    yield f"  {'schedule':<18}{'function':>9}{'runtime':>9}{'function/runtime':>{SPREAD_WIDTH}}"


def report(row: Row, outcomes: Sequence[Outcome | None]) -> tuple[bool, list[str]]:
    """Whether the bound holds, and the line of the row."""
    return pair_report(row.name, outcomes, STEPS, BOUND, unit=1e3, digits=2)
