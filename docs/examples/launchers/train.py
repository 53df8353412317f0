"""A job that any launcher may start, stop and start again: `torchrun --nproc-per-node 2 train.py FOLDER`."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from pipegrid.topology import HyperCommGrid
from pipegrid.training import Attempt, Names, Pipeline
from pipegrid.training.restart import attempt_store

FOLDER, STEPS = sys.argv[1], 8  # a folder that all nodes see

for name, slurm in (("RANK", "SLURM_PROCID"), ("LOCAL_RANK", "SLURM_LOCALID"), ("WORLD_SIZE", "SLURM_NTASKS")):
    if slurm in os.environ:
        os.environ.setdefault(name, os.environ[slurm])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def loss_of(output, batch):
    return (output - batch["x"] / 2).square().mean()


if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
backend = "nccl" if torch.cuda.is_available() else "gloo"
ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
dist.init_process_group(backend, store=attempt_store(), **ranks)
grid, names = HyperCommGrid([ranks["world_size"] // 2, 2], ["dp", "pp"]), Names("blocks")
with (
    Pipeline(Model, "tt|tt", grid, names=names, num_microbatches=2, loss=loss_of) as pipeline,
    Attempt(FOLDER, monitor=pipeline.config.monitor) as attempt,
):
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    found = pipeline.load(FOLDER, optimizer)
    for step in range(attempt.begin(found.step if found else 0) + 1, STEPS + 1):
        loss = pipeline.step({"x": torch.ones(4, 1, 8)})
        optimizer.step()
        optimizer.zero_grad()
        stopping = attempt.completed(step)
        if stopping or step % 2 == 0:
            pipeline.save(FOLDER, optimizer, step=step)
        if dist.get_rank() == 0:
            print(f"step {step} of {STEPS}: loss {loss:.4f}", flush=True)
        if stopping:
            break
dist.destroy_process_group()
if attempt.exit_code:
    sys.exit(attempt.exit_code)
