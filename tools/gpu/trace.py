"""Profiler traces of one 1F1B step on two ranks, as Chrome JSON: by where receives start, one file for each rank."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from pipegrid.plans.plan import Plan
from pipegrid.schedules import Forwarded, PipelineRuntime, lower, one_f_one_b
from pipegrid.transport import Edge, P2PCommunicator, P2PConfig

RANKS, MICROBATCHES = 2, 8
# Receives late or early in the plan, both under the receive stream; with shared communicators under the computing one.
VARIANTS: dict[str, tuple[Literal["late", "early"], Literal["separate", "shared"]]] = {
    "late": ("late", "separate"),
    "early": ("early", "separate"),
    "computing-stream": ("early", "shared"),
}


class LayersStage:
    """The stage that the runtime calls."""

    def __init__(self, stage: int, plan: Plan, width: int, rows: int, device: torch.device) -> None:
        self.model = nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(4)))
        self.outgoing = [edge for edge in plan.graph.stage_edges if edge.source == stage]
        self.inputs = torch.randn(rows, width, device=device)

    def forward(self, microbatch: int, inputs: Mapping[Edge, Tensor]) -> Forwarded:
        """Activations for the next stage, or the loss."""
        del microbatch
        output = self.model(next(iter(inputs.values()), self.inputs))
        return Forwarded(dict.fromkeys(self.outgoing, output), None if self.outgoing else output.square().mean())


def _rank(rank: int, options: argparse.Namespace, store: str) -> None:
    device, width, rows = torch.device("cpu"), 32, 8
    if options.backend == "nccl":
        device, width, rows = torch.device("cuda", rank % torch.cuda.device_count()), 4096, 2048
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if options.backend == "nccl" else "gloo"
    dist.init_process_group(
        backend, store=FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timedelta(seconds=200)
    )
    for name, (receives, communicators) in VARIANTS.items():
        plan = lower(one_f_one_b(RANKS, MICROBATCHES), receives=receives)
        config = P2PConfig(pipeline_dtype=torch.float32, deadline=120.0, communicators=communicators)
        communicator = P2PCommunicator(dist.group.WORLD, config)
        runtime = PipelineRuntime(plan, {rank: LayersStage(rank, plan, width, rows, device)}, communicator)
        runtime.step()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        with profile(activities=activities) as trace:
            runtime.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        path = Path(options.out) / f"1f1b-{name}-rank-{rank}.json"
        trace.export_chrome_trace(str(path))
        print(f"rank {rank}: {path}, {path.stat().st_size} bytes")
        communicator.close()
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Trace a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="nccl")
    parser.add_argument("--out", default=".", help="the folder for the traces")
    options = parser.parse_args()
    mp.set_forkserver_preload(["torch._inductor.config", "pipegrid.schedules.runtime"])
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(_rank, (options, str(Path(directory) / "store")), RANKS, start_method="forkserver")  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
