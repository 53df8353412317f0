"""A training script with the grids, layout and schedule of a choice, which runs as it is."""

from __future__ import annotations

from pipegrid.layout import LayerType
from pipegrid.planner.choice import Choice

_HEAD = '''"""Training script of a planned job, which runs: put your model, data and loss in place of the stand-ins.

torchrun --nproc-per-node <GPUs of a node> <this file>, {gpus} GPUs in all. Predicted step: {step:.4g} s.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from pipegrid.schedules import PipelineConfig
from pipegrid.topology import place
from pipegrid.training import Names, Pipeline, PipelineModule

ROWS = {rows}  # samples of a step, over all replicas
NUM_MICROBATCHES = {count}
STEPS = 10
ON_GPU = torch.cuda.is_available()
'''

_BODY = '''

class StandIn(nn.Module):
    """Linear layers, as many as the module has."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


NAMES = {name: Names("layers", embedding=("first",), head=("last",)) for name in GRIDS}  # None: a Hugging Face model's


def make_model(module: str) -> nn.Module:
    """The whole model of a module, with the same values on every rank; each rank keeps its own stages."""
    torch.manual_seed(0)
    return StandIn(LAYERS[module])


def forward(module: str, stage: nn.Module, microbatch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The call of a stage; what other modules sent is on the first one, in `stage.received`."""
    x = microbatch[module]
    if stage.is_first and any(module in fed for fed in TOPOLOGY.values()):
        x = sum(stage.received.values(), start=x)
    return stage(x)


def load_batch(step: int, replica: int, replicas: int) -> dict[str, torch.Tensor]:
    """The rows of one of `replicas`, for all modules."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(ROWS, 4, 8, generator=generator).chunk(replicas)[replica] for name in GRIDS}


def loss_of(output: torch.Tensor, microbatch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over the rows of a microbatch; or a sum, and what it counts."""
    return output.square().mean()


def main() -> None:
    grids = place(GRIDS, offsets=FIRST_RANKS)
    modules = {
        name: PipelineModule(
            partial(make_model, name),
            LAYOUTS[name],
            grid,
            NAMES[name],
            partial(forward, name),
            output=nn.Identity() if TOPOLOGY[name] else None,  # what is sent to other modules
            frozen=name in FROZEN,
        )
        for name, grid in grids.items()
    }
    config = PipelineConfig(variable_seq_lengths=True)
    cut = {"num_microbatches": NUM_MICROBATCHES, "loss": loss_of}
    with Pipeline(modules, topology=TOPOLOGY, schedule=SCHEDULE, config=config, **cut) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-4)
        for step in range(STEPS):
            loss = pipeline.step(load_batch(step, pipeline.replica, pipeline.replicas))
            pipeline.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    main()
    dist.destroy_process_group()
'''


def training_script(choice: Choice) -> str:
    """A script with the choice's sizes as constants, and placeholders for the model, the data and the loss."""
    shape = choice.shape
    topology: dict[str, list[str]] = {part.module: [] for part in shape.parts}
    for source, destination in shape.job.edges:
        topology[source].append(destination)
    ends = (LayerType.embedding, LayerType.loss)
    layers = {module.name: sum(kind not in ends for kind in module.kinds) for module in shape.job.modules}
    sizes = {part.module: part.sizes for part in shape.parts}
    first_ranks = {name: grid.rank_offset for name, grid in choice.arrangement.grids.items()}
    frozen = [module.name for module in shape.job.modules if module.frozen]
    constants = [
        f"SCHEDULE = {choice.schedule!r}",
        f"GRIDS = {sizes}  # sizes, the fastest dim first",
        f"FIRST_RANKS = {first_ranks}",
        f"TOPOLOGY = {topology}  # the modules that each module feeds",
        f"FROZEN = {frozen}  # modules that run no backward",
        f"LAYOUTS = {choice.layouts}  # the layers of each stage",
        f"LAYERS = {layers}  # of each module, without embedding and head",
    ]
    head = _HEAD.format(
        gpus=choice.arrangement.gpus, step=choice.step, rows=shape.job.global_batch, count=choice.num_microbatches
    )
    return head + "\n".join(constants) + "\n" + _BODY
