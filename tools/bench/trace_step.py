"""What a step enters of pipegrid: files, functions and Python calls, on the first of two ranks (gloo).

    python tools/bench/trace_step.py [--microbatches 4 8] [--list] [--json]

A layer of 4 x 4 a rank, 1F1B, by a step function and by a `Pipeline`. For each, the first step and a later one, by
sys.setprofile: a *switch* is a call into another file than the call before it, a *return* one into a file that was
entered before. Then what is fixed of a later step, and what each microbatch adds. ``--list`` prints the functions of a
later step by file, ``--json`` all of it as data. `tools/tests/test_trace_step.py` holds the counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

WIDTH, ROWS, LATER = 4, 2, 5  # the fifth step: nothing is compared with one process any more

Step = Callable[[], object]


def step_function(microbatches: int) -> Step:
    """A step of Megatron's step function."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from pipegrid.schedules import PipelineConfig, get_forward_backward_func
    from pipegrid.transport import P2PCommunicator

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.layer = PipelineConfig(), nn.Linear(WIDTH, WIDTH)
            self.received: torch.Tensor | None = None

        def set_input_tensor(self, received: list[torch.Tensor]) -> None:
            self.received = received[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(x if self.received is None else self.received)
            return found

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = output.square().mean()
        return value, value.detach()

    def forward_step(iterator: Any, model: nn.Module) -> tuple[torch.Tensor, Any]:
        return model(next(iterator)), loss

    part = Part()
    communicator = P2PCommunicator(dist.group.WORLD, part.config)
    step = get_forward_backward_func(pp_size=2)
    return lambda: step(
        forward_step_func=forward_step,
        data_iterator=iter([torch.ones(1, ROWS, WIDTH)] * microbatches),
        model=part,
        num_microbatches=microbatches,
        seq_length=1,
        micro_batch_size=ROWS,
        p2p_communicator=communicator,
    )


def pipeline(microbatches: int) -> Step:
    """A step of a `Pipeline` as the README types it, without its optimizer, which steps before."""
    import torch
    from torch import nn

    from pipegrid.topology import HyperCommGrid
    from pipegrid.training import Pipeline

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return (x - y).square()

    job = Pipeline(
        Model,
        "t|t",
        HyperCommGrid([2], ["pp"]),
        num_microbatches=microbatches,
        loss=lambda squares, _: squares.mean(),
        monitor=False,
    )
    optimizer = torch.optim.SGD(job.parameters(), lr=0.01)
    x = torch.randn(microbatches * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))

    def step() -> object:
        optimizer.step()
        optimizer.zero_grad()
        return job.step({"x": x, "y": x})

    return step


SIDES: Mapping[str, Callable[[int], Step]] = {"step function": step_function, "Pipeline": pipeline}


def entered(step: Step) -> dict[str, Any]:
    """Counts of a step, and how often each function is called, by the end of its file's path."""
    order: list[tuple[str, str]] = []

    def enter(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and "/pipegrid/" in path:
            order.append((path.rpartition("/pipegrid/")[2], frame.f_code.co_qualname))

    sys.setprofile(enter)
    try:
        step()
    finally:
        sys.setprofile(None)
    files = [file for file, _ in order]
    switches = [after for before, after in pairwise(files) if before != after]
    return {
        "files": len(set(files)),
        "functions": len(set(order)),
        "calls": len(order),
        "switches": len(switches),
        "returns": len(switches) + 1 - len(set(files)),
        "list": {f"{file}: {name}": count for (file, name), count in Counter(order).items()},
    }


def run_rank(rank: int, folder: str, counts: list[int]) -> None:
    """Count on this rank; the first one writes what it finds."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, side in SIDES.items():
        for count in counts:
            step = side(count)
            dist.barrier()  # a rank that is late would have the other enter what writes of a long wait
            steps = [entered(step) for _ in range(LATER)]
            found.setdefault(name, {})[count] = {"first": steps[0], "later": steps[-1]}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # the sides are not closed one by one


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs=2, default=[4, 8])
    parser.add_argument("--list", action="store_true", help="the functions of a later step, by file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        ranks = [spawn.Process(target=run_rank, args=(rank, folder, options.microbatches)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        text = Path(folder, "found.json").read_text(encoding="utf-8")
    if options.json:
        print(text)
        return
    few, many = sorted(options.microbatches)
    for name, found in json.loads(text).items():
        for count in (few, many):
            for which, each in found[str(count)].items():
                counts = ", ".join(f"{number} {what}" for what, number in each.items() if what != "list")
                print(f"{name}, M = {count}, {which} step: {counts}")
        least, most = (found[str(count)]["later"]["calls"] for count in (few, many))
        added = (most - least) / (many - few)
        print(f"{name}: {least - few * added:.0f} calls are fixed, and {added:.1f} a microbatch")
        for function, number in found[str(few)]["later"]["list"].items() if options.list else ():
            print(f"    {number:4} {function}")


if __name__ == "__main__":
    main()
