"""A network in two stages, each with two replicas: `torchrun --nproc-per-node 4 docs/examples/quickstart.py`."""

import torch
import torch.distributed as dist
from torch import nn

from pipegrid.topology import HyperCommGrid
from pipegrid.training import Pipeline


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 1)

    def forward(self, x, y):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h).relu()
        return (self.head(h) - y).square()


dist.init_process_group("gloo")
torch.manual_seed(0)  # replicas start alike
grid = HyperCommGrid([2, 2], ["dp", "pp"])
with Pipeline(Model, "Ett|ttL", grid, num_microbatches=4, loss=lambda squares, batch: squares.mean()) as pipeline:
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
    for step in range(100):
        x = torch.randn(64, 8).chunk(2)[pipeline.replica]  # this replica's half
        loss = pipeline.step({"x": x, "y": x[:, :1] * x[:, 1:2]})
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 25 == 24:
            print(f"step {step}: loss {loss:.3f}")
dist.destroy_process_group()
