"""The job of the benches of survival: two positions in some replicas, on ranks of one thread each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipegrid.schedules import PipelineConfig, UnitBatches, forward_backward_with_schedule
from pipegrid.survive import PipelineWorld

POSITIONS, MICROBATCHES, ROWS = 2, 8, 64
# Ranks are forked by a server that has imported torch, and has no threads.
RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(["torch._dynamo", "pipegrid.survive"])


class Stage(nn.Module):
    """Half of the model."""

    def __init__(self, position: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(position)
        self.layers = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())])
        self.config = PipelineConfig(pipeline_dtype=torch.float32)
        self.position, self.received, self.rows = position, list[Tensor](), torch.ones(ROWS, width)

    def set_input_tensor(self, received: list[Tensor]) -> None:
        """Called by the step functions."""
        self.received = received

    def forward(self, x: Tensor) -> Tensor:
        """The layers."""
        y: Tensor = self.layers(self.received[0] if self.position else x)
        return y

    def step(self, world: PipelineWorld) -> None:
        """A step of 1F1B with its reduction."""
        forward_backward_with_schedule(
            schedule="1f1b",
            forward_step_func=_forward_step,
            data_iterator=UnitBatches(lambda *_: self.rows),
            model=self,
            num_microbatches=MICROBATCHES,
            p2p_communicator=world.communicator,
            pg_collection=world.groups,
            routes=world.routes,
        )


def _forward_step(batches: Iterator[Tensor], model: Stage) -> tuple[Tensor, object]:
    return model(next(batches)), lambda output: (output.square().mean(), None)
