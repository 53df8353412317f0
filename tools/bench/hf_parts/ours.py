"""A Hugging Face language model on two ranks by pipegrid: all the glue."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_parts.job import Batch, Make, loss_of
from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.schedules import PipelineConfig, get_forward_backward_func, stage_places
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.training import compile_layers, pipeline_stage, tie_stage_parameters


class Ours:
    """A step: gradients of the mean over all words of the batch, in the parameters of this rank's stages."""

    def __init__(self, make: Make, layout: str, schedule: str, *, compiled: bool, ragged: bool) -> None:
        places = stage_places(schedule, 2)
        grid = HyperCommGrid([1, 2], ["dp", "pp"])
        grid.create_pgs(["dp", "pp"])
        numbers = [stage for stage, place in enumerate(places) if place == dist.get_rank()]
        self.stages = pipeline_stage(make, layout, numbers)
        ties = tie_stage_parameters(self.stages[0].ties, self.stages, grid, placement=places)
        config = PipelineConfig(
            variable_seq_lengths=ragged, calculate_per_token_loss=True, tied_parameters=ties, deadline=60.0
        )
        self.pipe = MultiModulePipelineCommunicator(
            {"language": grid}, {"language": []}, config, stage_placement={"language": places}
        )
        self.groups, self.run = ProcessGroupCollection.from_grid(grid), get_forward_backward_func(schedule=schedule)
        for stage in self.stages:
            stage.config = config
            if compiled:
                compile_layers(stage, backend="aot_eager")

    def step(self, batches: list[Batch]) -> None:
        """Train on one batch, given as microbatches."""

        def forward_step(microbatches: Iterator[Batch], stage: nn.Module) -> tuple[Any, Any]:
            batch = next(microbatches)
            return stage(**batch), partial(self.loss, batch)

        self.run(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.stages],
            model=self.stages,
            num_microbatches=len(batches),
            p2p_communicator=self.pipe,
            pg_collection=self.groups,
        )

    @staticmethod
    def loss(batch: Batch, output: Any) -> Any:
        """The sum over words, their number, and nothing to report."""
        return *loss_of(output.logits, batch), None
