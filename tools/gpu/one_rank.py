"""One rank at full speed: whole against split backwards, peak memory, host time of a step, hidden synchronisation."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

from pipegrid.plans.plan import Plan
from pipegrid.schedules import Forwarded, PipelineRuntime, clip_grad_norm_, lower, one_f_one_b, zero_bubble_h1
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.transport import Edge, P2PCommunicator, P2PConfig

SECOND, MEGABYTE = 1e3, 1 << 20


class Block(nn.Module):
    """A transformer block's two halves, without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        parts = self.attention_in(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        made: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return made


class BlockStage:
    """The one stage of the plan: a block, and the mean square of its output as the loss."""

    def __init__(self, block: Block, inputs: Tensor) -> None:
        self.model, self.inputs = block, inputs

    def forward(self, microbatch: int, inputs: Mapping[Edge, Tensor]) -> Forwarded:
        """The loss of one microbatch."""
        del microbatch, inputs
        return Forwarded({}, self.model(self.inputs).float().square().mean())


def measure(name: str, plan: Plan, stage: BlockStage, device: torch.device, steps: int) -> None:
    """Print the times of a step by one plan."""
    gpu = device.type == "cuda"
    communicator = P2PCommunicator(dist.group.WORLD, P2PConfig(pipeline_dtype=torch.bfloat16, deadline=120.0))
    runtime = PipelineRuntime(plan, {0: stage}, communicator)
    runtime.step()
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device) if gpu else 0
    host, whole = [], []
    for _ in range(steps):
        began = time.perf_counter()
        runtime.step()
        host.append(time.perf_counter() - began)
        if gpu:
            torch.cuda.synchronize(device)
        whole.append(time.perf_counter() - began)
    actions = len(list(plan.actions(0)))
    peak = (torch.cuda.max_memory_allocated(device) - before) // MEGABYTE if gpu else 0
    print(
        f"{name}: {SECOND * statistics.median(whole):.2f} ms per step, host {SECOND * statistics.median(host):.2f} ms "
        f"({1e6 * statistics.median(host) / actions:.0f} us per action), peak {peak} MB above the parameters"
    )
    if gpu:
        torch.cuda.set_sync_debug_mode("error")
        try:
            runtime.step()
            print(f"{name}: no host synchronisation in a step")
        except RuntimeError as error:
            print(f"{name}: the host synchronises in a step: {error}")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    communicator.close()


def main() -> None:
    """Measure both plans, and clipping."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU")
    options = parser.parse_args()
    device = torch.device("cpu" if options.dry_run else "cuda")
    width, length, heads, microbatches, steps = (64, 16, 4, 3, 2) if options.dry_run else (4096, 4096, 32, 8, 10)
    with tempfile.TemporaryDirectory() as directory:
        store = FileStore(str(Path(directory) / "store"), 1)
        dist.init_process_group("gloo" if options.dry_run else "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
        block = Block(width, heads).to(device, torch.bfloat16)
        stage = BlockStage(block, torch.randn(1, length, width, device=device, dtype=torch.bfloat16))
        measure("whole backwards (1F1B)", lower(one_f_one_b(1, microbatches)), stage, device, steps)
        measure("split backwards (ZB-H1)", lower(zero_bubble_h1(1, microbatches)), stage, device, steps)
        grid = HyperCommGrid([1, 1], ["dp", "pp"])
        grid.create_pg("dp")
        began = time.perf_counter()
        norm = clip_grad_norm_(block, ProcessGroupCollection.from_grid(grid), 1.0)
        print(f"clip_grad_norm_: {SECOND * (time.perf_counter() - began):.2f} ms on the host, norm {float(norm):.3g}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
