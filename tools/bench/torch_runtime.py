"""torch's pipeline runtime under its own ZBV and under pipegrid's V-Half and V-Min: live activations and step time.

    python tools/bench/torch_runtime.py [--ranks 2] [--microbatches 8] [--steps 8] [--quick]

One process per rank, gloo on loopback, two stages of a few linear layers each, the same modules for all three. The peak
is of the bytes that a rank's autograd graphs hold at once in one step, counted by hooks on saved tensors, without
parameters; rank 0 also has the last stage of the V and its losses, which torch keeps to the end of a step. Times are
medians, the schedules take turns. Each rank needs a core of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

SCHEDULES = ("torch's ZBV", "v_half", "v_min")


class Held:
    """Bytes that saved tensors of activations hold now, and at most so far."""

    def __init__(self, parameters: set[int]) -> None:
        self.parameters, self.now, self.peak = parameters, 0, 0
        self.counts: dict[int, int] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what autograd saves inside."""
        import torch

        def pack(tensor: torch.Tensor) -> object:
            storage = tensor.untyped_storage()
            if (pointer := storage.data_ptr()) in self.parameters:
                return tensor
            boxed = _Box(tensor.detach())  # a node that holds its own output would never be freed
            if self.counts.get(pointer, 0) == 0:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
            self.counts[pointer] = self.counts.get(pointer, 0) + 1
            weakref.finalize(boxed, self.free, pointer, storage.nbytes())
            return boxed

        def unpack(packed: object) -> torch.Tensor:
            return packed.held if isinstance(packed, _Box) else packed  # type: ignore[return-value]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def free(self, pointer: int, size: int) -> None:
        """Count that a saved tensor is gone."""
        self.counts[pointer] -= 1
        if not self.counts[pointer]:
            self.now -= size


class _Box:
    """Lives as long as the graph holds it."""

    def __init__(self, held: object) -> None:
        self.held = held


def rank(microbatches: int, steps: int, width: int) -> None:
    """Run one rank; rank 0 prints the rows."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

    from pipegrid.plans import lower, v_half, v_min
    from pipegrid.schedules import torch_schedule

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own, size = dist.get_rank(), dist.get_world_size()
    numbers = (own, 2 * size - 1 - own)
    torch.manual_seed(0)
    modules = {
        n: nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))) for n in numbers
    }
    x, y = torch.randn(8 * microbatches, width), torch.zeros(8 * microbatches, width)
    loss = nn.functional.mse_loss

    def made(name: str) -> object:
        stages = [PipelineStage(modules[n], n, 2 * size, torch.device("cpu")) for n in numbers]
        if name == SCHEDULES[0]:
            return ScheduleZBVZeroBubble([*stages], microbatches, loss_fn=loss)
        plan = {"v_half": v_half, "v_min": v_min}[name](size, microbatches)
        return torch_schedule(lower(plan), stages, loss_fn=loss)

    schedules = {name: made(name) for name in SCHEDULES}

    def step(name: str) -> float:
        for module in modules.values():
            module.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        schedules[name].step(*([x] if own == 0 else []), **({"target": y} if own == 0 else {}), return_outputs=False)  # type: ignore[attr-defined]
        return time.perf_counter() - start

    parameters = {p.untyped_storage().data_ptr() for module in modules.values() for p in module.parameters()}
    peaks, times = {}, {name: [] for name in SCHEDULES}  # type: ignore[var-annotated]
    for name in SCHEDULES:
        step(name)
        held = Held(parameters)
        with held.counting():
            step(name)
        peaks[name] = held.peak
    for _ in range(steps):
        for name in SCHEDULES:
            times[name].append(step(name))
    rows: list[object] = [None] * size
    dist.all_gather_object(rows, (peaks, times))
    if own == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="two steps of narrow layers")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.width, options.microbatches = 2, 16, 2 * options.ranks
    if "RANK" in os.environ:
        rank(options.microbatches, options.steps, options.width)
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]],
            env={**os.environ, **shared, "RANK": str(number), "LOCAL_RANK": str(number)},
            stdout=subprocess.PIPE if number == 0 else None,
            text=True,
        )
        for number in range(options.ranks)
    ]
    printed = processes[0].communicate()[0]
    if any(process.wait() for process in processes):
        sys.exit("a rank failed")
    rows = json.loads(printed)
    print(f"{options.ranks} ranks, {options.microbatches} microbatches, torch's runtime on gloo")
    print(f"{'schedule':12} {'step ms':>8} {'time':>5}  peak live KiB of rank 0, 1, ...; over ZBV's")
    seconds = {
        name: statistics.median(max(each) for each in zip(*(times[name] for _, times in rows), strict=True))
        for name in SCHEDULES
    }
    for name in SCHEDULES:
        shares = [f"{peaks[name] / 1024:.0f} ({peaks[name] / peaks[SCHEDULES[0]]:.2f})" for peaks, _ in rows]
        print(
            f"{name:12} {1000 * seconds[name]:8.2f} {seconds[name] / seconds[SCHEDULES[0]]:5.2f}  {', '.join(shares)}"
        )


if __name__ == "__main__":
    main()
