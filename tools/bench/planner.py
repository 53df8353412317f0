"""Predicted step times against measured ones: the planner's choices of one job, with emulated compute on 2 to 4 ranks.

    python tools/bench/planner.py [--quick] [--scale] [--real]

Each choice (grids x layout x schedule) is run by the script that the planner writes for it, on gloo; a layer sleeps for
what the job says of it. Bounds: Kendall's tau between the predicted and the measured order at least 0.9, each
prediction within 5% of the median step. One number is measured here: what a compute costs the host beside
(``device.overhead``), such that the prediction of the first choice is its step. The others see nothing of their runs.

With ``--scale``: the job of docs/examples/jobs/vlm.toml on 1,024 and 16,384 GPUs in place of that, with 4 samples for
each GPU, and a dry run of the winner: everything that all ranks open. Bound: 10 minutes of one core.

With ``--real``: the real compute of the digit reader (planner_parts/real.py), predicted from one recorded step. The
errors are printed; they have no bound.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn

from pipegrid.core.tables import text_table
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.planner import (
    Choice,
    Device,
    Job,
    Layers,
    Measured,
    ModuleCosts,
    Network,
    Training,
    dry_run,
    plan,
    read_job,
)
from pipegrid.planner.choice import Candidate
from pipegrid.planner.grids import Arrangement, GridPart
from pipegrid.planner.model import CostModel
from pipegrid.planner.script import training_script
from pipegrid.planner.stages import Shape
from pipegrid.schedules import simulate, stage_places
from pipegrid.training import Names, Pipeline
from planner_parts.real import compare
from runtime_parts.emulated import sleeping
from runtime_parts.processes import on_ranks

WIDTH = 8
TAU, OFF = 0.9, 0.05
SEARCH_SECONDS = 600
JOB = Path(__file__).parents[2] / "docs" / "examples" / "jobs" / "vlm.toml"
LATENCY = 0.0003  # of a hop between two of these ranks, which share the cores of one machine


def job(seconds: float) -> Job:
    """An encoder before a language model twice as deep; a decoder layer takes ``seconds`` for F, I and W each."""
    layer = Measured(seconds, seconds, seconds)
    return Job(
        modules=(
            ModuleCosts("vision", (Layers("encoder", 4, seconds=Measured(seconds, seconds, seconds / 2)),), WIDTH * 4),
            ModuleCosts(
                "language",
                (Layers("embedding", flops=0), Layers("decoder", 8, seconds=layer), Layers("loss", flops=0)),
                WIDTH * 4,
            ),
        ),
        global_batch=16,
        device=Device(1.0, 1e12),
        links=Network(1e12, 1e12, latency=LATENCY),
        edges=(("vision", "language"),),
        training=Training(schedules=("1f1b",)),
    )


UNEVEN = "Etttttt|ttL"
"""A layout that no balance chooses: the planner must see what it costs."""


def choices(of: Job, *, quick: bool) -> Iterator[Choice]:
    """At least 12 choices: three shapes of the encoder, one to three stages of the language model, six schedules."""
    model = CostModel(of)
    table: list[tuple[tuple[int, int], tuple[int, int], tuple[str, ...], str | None]] = [
        ((1, 1), (1, 1), ("1f1b",), None),
        ((1, 1), (1, 2), ("1f1b", "zero_bubble_v"), None),
        ((1, 1), (1, 3), ("gpipe", "1f1b", "zero_bubble_h1"), None),
        ((2, 1), (1, 2), ("1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v", "v_half"), None),
        ((2, 1), (1, 2), ("1f1b",), UNEVEN),
        ((1, 2), (1, 2), ("1f1b", "zero_bubble_v"), None),
        ((2, 1), (2, 1), ("1f1b",), None),
        ((1, 2), (2, 1), ("1f1b",), None),
    ]
    for vision, language, schedules, text in table[4:5] if quick else table:
        parts = GridPart("vision", 1, 1, *vision), GridPart("language", 1, 1, *language)
        arrangement = Arrangement(parts)
        for schedule in schedules:
            places = stage_places(schedule, language[1])
            shape = Shape(model, arrangement, places)
            if text is not None:
                encoder = model.layout("vision", 1, 1, vision[1])
                shape = evolve(shape, layouts=(encoder, PipelineParallelLayerLayout(text, language[1])))
            yield Candidate(shape, schedule, 2).cost()


class Sleeper(nn.Module):
    """A layer that sleeps for every sample; I and W sleep in nodes of their own."""

    def __init__(self, seconds: Measured) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.full((1, 1, WIDTH), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Of a microbatch's shape."""
        time.sleep(self.seconds.F * len(x))
        return sleeping(x, self.seconds.I * len(x)) + sleeping(self.weight, self.seconds.W * len(x))


class Sleepers(nn.Module):
    """A model of such layers, and what stands for its embedding: else nothing asks for I of a first stage."""

    def __init__(self, layers: Sequence[Measured]) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.layers = nn.ModuleList([Sleeper(seconds) for seconds in layers])

    def forward(self, x: Tensor) -> Tensor:
        """Of a microbatch's shape."""
        x = x + self.first
        for layer in self.layers:
            x = layer(x)
        return x


def measure(choice: Choice, steps: int) -> list[float]:
    """Seconds of each step on this rank; the script's model is made of sleepers."""
    names: dict[str, Any] = {"__name__": "planned"}
    exec(compile(training_script(choice), "train.py", "exec"), names)
    of = choice.shape.job
    found: list[float] = []

    class Timed(Pipeline):
        def step(self, batch: Any, **settings: Any) -> Tensor:
            dist.barrier()
            start = time.perf_counter()
            loss = super().step(batch, **settings)
            found.append(time.perf_counter() - start)
            return loss

    def load_batch(step: int, replica: int, replicas: int) -> dict[str, Tensor]:
        del step, replica
        return {name: torch.zeros(names["ROWS"] // replicas, 1, WIDTH) for name in names["GRIDS"]}

    names.update(
        Pipeline=Timed,
        make_model=lambda module: Sleepers([layer.seconds for layer in of.module(module).each if layer.seconds]),
        NAMES=dict.fromkeys(names["GRIDS"], Names("layers", embedding=("first",))),
        load_batch=load_batch,
        STEPS=steps,
    )
    names["main"]()
    return found


def _run(report: Callable[[Any], None], options: argparse.Namespace) -> None:
    """One rank: every choice of so many ranks, in order."""
    for choice in choices(job(options.seconds), quick=options.quick):
        if choice.arrangement.gpus == dist.get_world_size():
            report(measure(choice, options.steps))


def run(planned: Sequence[Choice], options: argparse.Namespace) -> Iterator[float]:
    """The median step of each choice, in seconds; a job of processes for each number of ranks."""
    for ranks in dict.fromkeys(choice.arrangement.gpus for choice in planned):
        with on_ranks(ranks, _run, options) as reports:
            for choice in planned:
                if choice.arrangement.gpus == ranks:
                    yield statistics.median(reports.slowest()[1:])


def overhead_of(choice: Choice, measured: float) -> float:
    """What each compute costs beside, such that the step of ``choice`` takes as long as ``measured``: by bisection."""
    low, high = 0.0, max(0.0, measured - choice.step)
    for _ in range(40):
        middle = (low + high) / 2
        longer = simulate(choice.plan, evolve(choice.costs, overhead=middle)).makespan + choice.reduction
        low, high = (low, middle) if longer > measured else (middle, high)
    return low


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau: pairs in the same order less pairs in the other, over all pairs (Kendall 1938)."""
    pairs = list(itertools.combinations(zip(first, second, strict=True), 2))
    agreed = sum(1 if (a[0] - b[0]) * (a[1] - b[1]) > 0 else -1 for a, b in pairs)
    return agreed / len(pairs) if pairs else 1.0


def scale() -> int:
    """Plan for many GPUs, run the winner dry, and print; 1 where a search takes more than 10 minutes."""
    worst = 0.0
    for gpus in (1024, 16384):
        start = time.process_time()
        of = evolve(read_job(JOB), global_batch=4 * gpus)
        planned = plan(of, gpus=gpus, memory="80GB")
        searched = time.process_time()
        found = dry_run(planned.winner)
        worst = max(worst, time.process_time() - start)
        print(
            f"{gpus} GPUs: {planned.winner.arrangement}, {planned.winner.schedule}, step {planned.winner.step:.3f} s, "
            f"bubble {100 * planned.winner.bubble:.1f}%; searched in {searched - start:.1f} s of one core, dry run in "
            f"{time.process_time() - searched:.1f} s\n{found}"
        )
    return 0 if worst <= SEARCH_SECONDS else 1


def main() -> int:
    """Measure and print; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one choice, short: shows that it works")
    parser.add_argument("--seconds", type=float, default=0.004, help="of a decoder layer's F, for one sample")
    parser.add_argument("--steps", type=int, default=4, help="of each choice; the first is not counted")
    parser.add_argument("--scale", action="store_true", help="plan for 1,024 and 16,384 GPUs instead")
    parser.add_argument("--real", action="store_true", help="the digit reader's compute instead; no bound")
    options = parser.parse_args()
    if options.scale:
        return scale()
    if options.real:
        os.environ["OMP_NUM_THREADS"] = "1"
        print(f"torch {torch.__version__}, gloo, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
        print(compare(batch=256, steps=3 * options.steps))
        return 0
    if options.quick:
        options.seconds, options.steps = 0.001, 2
    os.environ["OMP_NUM_THREADS"] = "1"
    planned = sorted(choices(job(options.seconds), quick=options.quick), key=lambda choice: choice.arrangement.gpus)
    rows = []
    measured = list(run(planned, options))
    overhead = overhead_of(planned[0], measured[0])
    of = job(options.seconds)
    of = evolve(of, device=evolve(of.device, overhead=overhead))
    planned = sorted(choices(of, quick=options.quick), key=lambda choice: choice.arrangement.gpus)
    for choice, seconds in zip(planned, measured, strict=True):
        figures = f"{1e3 * choice.step:.1f}", f"{1e3 * seconds:.1f}", f"{100 * (choice.step / seconds - 1):+.1f}%"
        rows.append((str(choice.arrangement), choice.schedule, ", ".join(choice.layouts.values()), *figures))
    print(
        f"torch {torch.__version__}, gloo, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; "
        f"overhead of a compute {1e3 * overhead:.2f} ms, by the first choice"
    )
    print(
        text_table(
            ("vision | language", "schedule", "layouts", "predicted ms", "measured ms", "off"), rows, right=(3, 4, 5)
        )
    )
    tau = kendall([choice.step for choice in planned], measured)
    rest = list(zip(planned, measured, strict=True))[1:] or [(planned[0], measured[0])]
    worst = max(abs(choice.step / seconds - 1) for choice, seconds in rest)
    print(f"Kendall's tau {tau:.3f} (bound {TAU}), largest error {100 * worst:.1f}% (bound {100 * OFF:g}%)")
    return 0 if tau >= TAU and worst <= OFF else 1


if __name__ == "__main__":
    raise SystemExit(main())
