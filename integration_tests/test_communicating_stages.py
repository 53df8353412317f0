"""Stages that lie on several positions and communicate inside: encoders whose ranks are spread over a pipeline.

The ranks of an encoder with tp 2 on a language model with pp 2 are two positions of the plan, and each of its forwards
and backwards contains all-reduces between them. So both must come to the encoder's computes in one order, against all
else that waits: messages, the bridge's collectives, the computes of the other encoder.
"""

from __future__ import annotations

import pytest
import torch

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.schedules import PipelineConfig
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection

from .kit.data import normal
from .kit.models import Part, call, chain_in_one_process, mean_loss, require_same_gradients
from .kit.tensor_parallel import Block

LENGTH, BATCH, WIDTH = 3, 2, 6
LANGUAGE = "language"


def data(encoder, microbatch, device):
    return normal(1000 * encoder + microbatch, LENGTH, BATCH, WIDTH, device=device)


def in_one_process(encoders, microbatches, pp, device):
    """The unsharded encoders and the language model's stages, with their gradients."""
    blocks = [Block(number, WIDTH, device=device) for number in range(encoders)]
    stages = [Part(100 + number, WIDTH).to(device) for number in range(pp)]
    batches = (
        sum(block(data(number, microbatch, device)) for number, block in enumerate(blocks))
        for microbatch in range(microbatches)
    )
    chain_in_one_process(stages, batches, microbatches)
    return blocks, stages


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "overlapped"])
@pytest.mark.parametrize(("encoders", "microbatches"), [(1, 4), (1, 7), (2, 5)])
def test_ranks_of_several_positions_communicate_inside_a_stage(ranks, encoders, microbatches, strict):
    device = ranks.device
    names = [f"encoder{number}" for number in range(encoders)]
    grids = {name: HyperCommGrid([2], ["tp"]) for name in names}
    grids[LANGUAGE] = HyperCommGrid([2], ["pp"])
    for grid in grids.values():
        grid.create_pgs([*grid.dim_names])
    config = PipelineConfig(pipeline_dtype=torch.float64, strict=strict, deadline=20.0, open_deadline=30.0)
    comm = MultiModulePipelineCommunicator(grids, {name: [LANGUAGE] for name in names}, config)
    models = {
        name: Block(number, WIDTH, grids[name].get_pg("tp"), device=device, config=config)
        for number, name in enumerate(names)
    }
    models[LANGUAGE] = Part(100 + ranks.rank, WIDTH, config).to(device)

    def forward_step(microbatch_of, model):
        microbatch = next(microbatch_of)
        for number, name in enumerate(names):
            if model is models[name]:
                return {name: model(data(number, microbatch, device))}, None
        y = model(sum(model.received.values()))
        return (y if ranks.rank == 1 else {LANGUAGE: y}), mean_loss

    call(
        model=models,
        count=microbatches,
        data_iterator={name: iter(range(microbatches)) for name in models},
        forward_step_func=forward_step,
        p2p_communicator=comm,
        pg_collection={name: ProcessGroupCollection.from_grid(grid) for name, grid in grids.items()},
    )
    blocks, stages = in_one_process(encoders, microbatches, 2, device)
    for name, block in zip(names, blocks, strict=True):
        for parameter, whole in block.named_parameters():
            expected = models[name].share(parameter, whole.grad)
            torch.testing.assert_close(models[name].gradient(parameter), expected, rtol=1e-10, atol=1e-13)
    require_same_gradients(models[LANGUAGE], stages[ranks.rank], rtol=1e-10, atol=1e-13)
    comm.destroy()
