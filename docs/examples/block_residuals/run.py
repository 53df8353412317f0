"""Layers that read the ends of all earlier blocks, on four processes with two stages each: `python run.py`.

Neither the model nor this script says that these values cross stages. The first step finds them, gives each process one
copy of each, and compares itself with one process.
"""

import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

# The examples are folders of modules, not installed packages; their parent makes them importable by name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from block_residuals.model import BlockResiduals
from pipegrid.stages import Names
from pipegrid.topology import HyperCommGrid
from pipegrid.training import Pipeline

RANKS, ROWS, TOKENS, STEPS = 4, 16, 24, 20


def loss_of(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the next tokens of all rows."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def made() -> BlockResiduals:
    """The values of one process, on every rank."""
    torch.manual_seed(0)
    return BlockResiduals()


def train() -> None:
    """One rank of the job."""
    grid = HyperCommGrid([RANKS], ["pp"])
    layout = "Ett|tt|tt|tt|tt|tt|tt|ttL"
    names = Names("layers")
    with Pipeline(
        made, layout, grid, schedule="interleaved_1f1b", names=names, loss=loss_of, num_microbatches=8
    ) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
        ids = (torch.arange(ROWS)[:, None] * 7 + torch.arange(TOKENS)) % 64
        for step in range(STEPS):
            loss = pipeline.step({"ids": ids})  # the first one is compared with one process, or is an error
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and step in (0, STEPS - 1):
                print(f"step {step}: loss {loss:.3f}", flush=True)
        if dist.get_rank() == 0:
            print(pipeline.describe(), flush=True)


if not dist.is_torchelastic_launched():  # torchrun --nproc-per-node 4 run.py
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    sys.exit(subprocess.call([sys.executable, *torchrun, sys.argv[0]]))
dist.init_process_group("gloo")
train()
dist.destroy_process_group()
