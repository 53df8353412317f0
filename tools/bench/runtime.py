"""The runtime beside torch.distributed.pipelining: the same stages, plans and machine, in one run, over gloo.

    python tools/bench/runtime.py [--quick] [--only overhead emulated real memory stepping reduction modules]
                                  [--schedules 1f1b ...] [--backend gloo|nccl|staged|fake_nccl] [--device cpu|cuda]

Four ranks on this machine. For each schedule our `PipelineRuntime` on our plan, and torch's own class of that name
on the same modules, microbatches and loss; both start from the same point, and the gradients of both are compared
first. Where torch does not run a schedule, or its gradients are wrong, the table says so. Ratios are medians over
rounds, in each of which all take a step by turns, since identical runs on a shared machine vary by half; beside them
stand the quartiles, between which half of the rounds lie: far apart, they say that the machine was busy.

- overhead: empty stages, also against the floor: a hand-written loop of the same messages and the same calls of
  autograd, and nothing else. Bounds: 1.3 of the floor; 0.9 of torch for 1F1B, 0.6 for the others.
- emulated: stages that sleep for F, I and W. The best step is to be within 3% of what `simulate` says, given what
  an action and a hop took in that step, and at most torch's best.
- real: a transformer of some 10 million parameters. Bound: 1.0 of torch.
- memory: the peak of the bytes that autograd keeps, and the bytes in which messages arrive with reuse_buffers; both are
  to be the plan's own figures.
- stepping: an empty step by the step function, over the same by `PipelineRuntime.step`. Bound: 1.05.
- reduction: a step of dp 2 x pp 2 whose gradients are reduced during the last backward, over one that reduces after
  it. Bound: 1.0. Beside it the floor: the longer of the step without reductions, and the reductions alone.
- modules: empty stages of two modules, an encoder on dp 2 that feeds a language model on pp 2 through a bridge, against
  a hand-written loop of the same messages. Bound: 1.3.

On GPUs (nccl, staged) the ratios are what counts: ranks that share a GPU are time-sliced. Emulated compute sleeps on
the host there, which holds up launches, not the device.

Exits with 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from runtime_parts import emulated, memory, overhead, real, reduction, stepping, two_modules
from runtime_parts.processes import on_ranks
from runtime_parts.rows import RANKS, ROWS, Row

BACKENDS = {
    "gloo": "gloo",
    "nccl": "cpu:gloo,cuda:nccl",
    "staged": "cpu:gloo,cuda:gloo",
    "fake_nccl": "cpu:fake_nccl",
}


@frozen
class Part:
    """One of the tables.

    ``measure(row, rank, device)`` runs on every rank, ``report(row, what the ranks measured)`` in the parent.
    """

    measure: Callable[[Row, int, torch.device], Any]
    header: Callable[[], Iterator[str]]
    report: Callable[[Row, Sequence[Any]], tuple[bool, list[str]]]


def parts(quick: bool) -> dict[str, Part]:
    """The tables by name; ``quick``: as small as shows that they work."""
    empty = {"microbatches": 8 if quick else 64, "rounds": 2 if quick else 75}
    sleeping = {"microbatches": 8 if quick else 16, "rounds": 1 if quick else 6, "seconds": 0.002 if quick else 0.006}
    training = {"microbatches": 8, "rounds": 1 if quick else 15}
    calls = {"microbatches": 8, "rounds": 2 if quick else 900}
    reducing: dict[str, Any] = {
        "microbatches": 1,
        "rounds": 1 if quick else 11,
        "layers": 3 if quick else 8,
        "elements": 10_000 if quick else 2_000_000,
        "seconds": 0.001 if quick else 0.02,
    }
    return {
        "overhead": Part(
            lambda row, rank, device: overhead.measure(row, rank, device, **empty),
            lambda: overhead.header(**empty),
            lambda row, ranks: overhead.report(row, ranks, microbatches=empty["microbatches"]),
        ),
        "emulated": Part(
            lambda row, rank, device: emulated.measure(row, rank, device, **sleeping),  # type: ignore[arg-type]
            lambda: emulated.header(**sleeping),  # type: ignore[arg-type]
            lambda row, ranks: emulated.report(row, ranks, microbatches=int(sleeping["microbatches"])),
        ),
        "real": Part(
            lambda row, rank, device: real.measure(row, rank, device, **training),
            lambda: real.header(**training),
            real.report,
        ),
        "memory": Part(
            lambda row, rank, device: memory.measure(row, rank, device, microbatches=12),
            lambda: memory.header(microbatches=12),
            lambda row, ranks: memory.report(row, ranks, microbatches=12),
        ),
        "stepping": Part(
            lambda row, rank, device: stepping.measure(row, rank, device, **calls),
            lambda: stepping.header(**calls),
            stepping.report,
        ),
        "reduction": Part(
            lambda row, rank, device: reduction.measure(row, rank, device, **reducing),
            lambda: reduction.header(**reducing),
            reduction.report,
        ),
        "modules": Part(
            lambda row, rank, device: two_modules.measure(row, rank, device, **empty),
            lambda: two_modules.header(**empty),
            lambda row, ranks: two_modules.report(row, ranks, microbatches=empty["microbatches"]),
        ),
    }


@contextmanager
def _over(backend: str, rank: int, ranks: int, store: Any) -> Iterator[None]:
    """The default process group is of ``backend`` inside the block."""
    fake = None
    if backend == "fake_nccl":
        from pipegrid.fake_nccl import FakeDevice, register  # pipegrid-fake_nccl is needed for this alone

        fake = FakeDevice()
        register(fake)
    dist.init_process_group(BACKENDS[backend], store=store, rank=rank, world_size=ranks)
    yield
    if fake is not None:
        fake.close()
    dist.destroy_process_group()


def _run(report: Callable[[Any], None], options: argparse.Namespace) -> None:
    """One rank: everything that was asked for, in order."""
    rank, device = dist.get_rank(), torch.device(options.device)
    if device.type == "cuda":  # ranks share GPUs where there are fewer
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    table = parts(options.quick)
    for name in options.only:
        for row in _rows(options):
            report(table[name].measure(row, rank, device))


def _rows(options: argparse.Namespace) -> list[Row]:
    return [row for row in ROWS if row.name in options.schedules]


def main() -> int:
    """Measure and print; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    table = parts(quick=False)
    names = [row.name for row in ROWS]
    parser.add_argument("--quick", action="store_true", help="a few small steps of everything; its figures say little")
    parser.add_argument("--only", nargs="+", choices=list(table), default=list(table), help="which tables")
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="gloo", help="fake_nccl is a dry run of nccl")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda for nccl and staged, else cpu")
    parser.add_argument("--schedules", nargs="+", choices=names, default=names, help="which rows")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if options.backend in ("nccl", "staged") else "cpu")
    if options.backend in ("nccl", "staged") and options.device == "cpu":
        parser.error(f"--backend {options.backend} moves tensors of GPUs; --device is cpu")
    table = parts(options.quick)
    os.environ["OMP_NUM_THREADS"] = "1"
    print(
        f"torch {torch.__version__}, {options.backend}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    good = True
    with on_ranks(RANKS, _run, options, join=partial(_over, options.backend)) as reports:
        for name in options.only:
            print()
            print("\n".join(table[name].header()), flush=True)
            for row in _rows(options):
                met, lines = table[name].report(row, reports.next())
                good &= met
                print("\n".join(lines), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
