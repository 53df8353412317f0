"""Predicted steps of the digit reader against measured ones: its layers' costs out of one recorded step.

The first case is recorded: its median step gives seconds per layer and sample (`layer_costs`), the host's time for an
action and a hop (`recorded_costs`). The planner's model turns these into the steps of all other cases, which see
nothing of their own runs. Ranks beyond the machine's cores share them, and a prediction knows of no sharing: a column
has the computes of all ranks over the cores, below which no step can be.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pipegrid.core.tables import text_table
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.planner import Choice, Device, Job, Layers, ModuleCosts, Network, Training, layer_costs
from pipegrid.planner.choice import Candidate
from pipegrid.planner.grids import Arrangement, GridPart
from pipegrid.planner.model import CostModel
from pipegrid.planner.stages import Shape
from pipegrid.schedules import Recording, position_of, recorded_costs, stage_places
from runtime_parts.processes import on_ranks

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "examples"))

from digit_reader.command_line import parse_options
from digit_reader.encoder import IMAGE_TOKENS
from digit_reader.job import Job as DigitReader
from digit_reader.job import build_job
from digit_reader.language import LanguageStage
from digit_reader.options import Options
from digit_reader.parts import whole_of
from digit_reader.samples import Samples
from digit_reader.sizes import Sizes
from digit_reader.stepping import run_step
from digit_reader.strips import Split, load_scans
from digit_reader.vocabulary import TEXT_LENGTH

MICROBATCHES = 8
BANDWIDTH = 1e9  # bytes per second between two processes of a machine, by gloo
SKIPPED = 3  # steps of a case that are not counted


@frozen
class Case:
    """A shape of the digit reader: replicas of the encoder; dp, pp, chunks and layout of the language model."""

    lanes: int
    dp: int
    pp: int
    layout: str
    schedule: str = "1f1b"
    chunks: int = 1
    together: bool = True

    @property
    def ranks(self) -> int:
        """Of all modules."""
        return self.dp * self.pp + (0 if self.together else self.lanes)

    def options(self, batch: int) -> Options:
        """The same as the example's own command line gives them."""
        language = f'pp={self.pp},vpp={self.chunks},dp={self.dp},layout="{self.layout}"'
        sizes = ["--batch", str(batch), "--microbatches", str(MICROBATCHES), "--processes", str(self.ranks)]
        shape = ["--images", f"dp={self.lanes}", "--language", language, "--schedule", self.schedule]
        return parse_options([*sizes, *shape, "--placement", "colocated" if self.together else "separate"])

    def choice(self, of: Job) -> Choice:
        """The planner's prediction."""
        parts = GridPart("images", 1, 1, self.lanes, 1), GridPart("language", 1, 1, self.dp, self.pp)
        layouts = PipelineParallelLayerLayout("e", 1), PipelineParallelLayerLayout(self.layout, self.pp)
        places = stage_places(self.schedule, self.pp, self.chunks)
        shape = Shape(CostModel(of), Arrangement(parts, self.together), places, layouts)
        return Candidate(shape, self.schedule, of.global_batch // MICROBATCHES).cost()


CASES = (
    Case(2, 1, 2, "Ett|ttL"),  # recorded
    Case(2, 1, 2, "Et|tttL"),
    Case(2, 1, 2, "Ett|ttL", "gpipe"),
    Case(2, 1, 2, "Ett|ttL", "zero_bubble_h1"),
    Case(2, 1, 2, "Et|t|t|tL", "interleaved_1f1b", 2),
    Case(2, 1, 2, "Et|t|t|tL", "zero_bubble_v", 2),
    Case(2, 2, 1, "EttttL"),
    Case(1, 1, 1, "EttttL", together=False),
    Case(1, 1, 2, "Ett|ttL", together=False),
    Case(2, 1, 2, "Ett|ttL", together=False),
    Case(2, 1, 2, "Ett|ttL", "zero_bubble_h1", together=False),
    Case(4, 2, 2, "Ett|ttL"),
)


def _job(case: Case, batch: int) -> tuple[TCPStore | None, DigitReader]:
    """The store of a case's monitors, which rank 0 keeps, and this rank's part of the case."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port = [server.port if server is not None else None]
    dist.broadcast_object_list(port)
    options = evolve(case.options(batch), control=f"localhost:{port[0]}")
    job = build_job(options, Samples(Split.TRAIN, options.seed, load_scans(Split.TRAIN)), torch.device("cpu"))
    return server, job


def step_of(job: DigitReader, first: int) -> tuple[float, Recording]:
    """Seconds of a step from sample ``first`` on the slowest rank, and its recording; every rank calls it."""
    zero = torch.tensor(time.perf_counter(), dtype=torch.float64)
    dist.all_reduce(zero, op=dist.ReduceOp.MAX)
    job.recorder.start(zero.item())
    start = time.perf_counter()
    run_step(job, job.samples, first)
    taken = time.perf_counter() - start
    for parameter in job.parameters():
        parameter.grad = None
    track = job.recorder.track(job.plan, rank=dist.get_rank(), position=position_of(job.plan, job.stages))
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, (taken, track))
    return max(seconds for seconds, _ in each), Recording(job.plan, [one for _, one in each])


def _run(report: Callable[[Any], None], cases: Sequence[Case], batch: int, steps: int) -> None:
    """One rank: a step of each case after the other, round after round, so that all see the same machine."""
    jobs = [_job(case, batch) for case in cases]
    found: list[list[tuple[float, Recording]]] = [[] for _ in cases]
    for step in range(SKIPPED + steps):
        for (_, job), own in zip(jobs, found, strict=True):
            own.append(step_of(job, step * batch))
    for (_, job), case, own in zip(jobs, cases, found, strict=True):
        middle = statistics.median_low(seconds for seconds, _ in own[SKIPPED:])
        if dist.get_rank() == 0:
            report((case, middle, next(recording for seconds, recording in own if seconds == middle)))
        job.monitor.close()
        job.communicator.destroy()
    dist.barrier()


def run(cases: Sequence[Case], batch: int, steps: int) -> Iterator[tuple[Case, float, Recording]]:
    """Each case, its median step in seconds, and the recording of that step; processes for each number of ranks."""
    for ranks in dict.fromkeys(case.ranks for case in cases):
        own = [case for case in cases if case.ranks == ranks]
        with on_ranks(ranks, _run, own, batch, steps) as reports:
            for _ in own:
                yield reports.first()


def _computing(recording: Recording) -> float:
    """Seconds that the busiest rank computed."""
    each = []
    for track in recording.tracks:
        actions = list(recording.plan.actions(track.position))
        each.append(sum(one.end - one.start for one in track.actions if actions[one.index].kind.is_compute))
    return max(each)


def job_of(case: Case, recording: Recording, batch: int) -> Job:
    """The digit reader as a job, with the costs that ``recording`` of ``case`` measured."""
    costs, plan = recorded_costs(recording), recording.plan
    samples = batch // MICROBATCHES
    actions = [action for position in range(plan.num_positions) for action in plan.actions(position)]
    computes = sum(action.kind.is_compute for action in actions)
    hops = [seconds for _, seconds in costs.latency] if isinstance(costs.latency, tuple) else [0.0]
    options, hidden = case.options(batch), Sizes().hidden
    images = layer_costs(recording, "e", module="images", samples=samples // case.lanes)
    language = layer_costs(recording, case.layout, module="language", samples=samples // case.dp, free=["embedding"])
    tokens = {"images": IMAGE_TOKENS, "language": IMAGE_TOKENS + TEXT_LENGTH}
    return Job(
        modules=tuple(
            ModuleCosts(name, _with_parameters(layers, options, name), tokens[name] * hidden * 4)
            for name, layers in (("images", images), ("language", language))
        ),
        global_batch=batch,
        # The planner counts the host's time per compute, a recording per action.
        device=Device(1.0, overhead=costs.overhead * len(actions) / computes),
        links=Network(BANDWIDTH, BANDWIDTH, latency=statistics.mean(hops)),
        edges=(("images", "language"),),
        training=Training(parameter_bytes=4, gradient_bytes=4, sharding="none"),
    )


def _with_parameters(layers: Sequence[Layers], options: Options, module: str) -> tuple[Layers, ...]:
    """The layers with the number of parameters of each; a module that is one layer has them all."""
    whole = whole_of(options, module)
    parts = dict(whole.layers.named_children()) if isinstance(whole, LanguageStage) else {"encoder_0": whole}
    sizes = {name.partition("_")[0]: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
    return tuple(evolve(layer, parameters=sizes[layer.kind]) for layer in layers)


def compare(*, batch: int, steps: int) -> str:
    """Record, predict and measure; the table."""
    measured = list(run(CASES, batch, steps))
    base, _, recording = next(entry for entry in measured if entry[0] == CASES[0])
    of, cores = job_of(base, recording, batch), os.cpu_count() or 1
    rows = []
    for case, seconds, own in measured:
        choice = case.choice(of)
        replicas = [choice.shape.stages[stages[-1]].part.dp for stages in choice.shape.placed.held]
        work = sum(busy * ranks for busy, ranks in zip(choice.simulation.busy, replicas, strict=True))
        shared = f"{1e3 * work / cores:.1f}" if case.ranks > cores else ""
        name = f"{choice.arrangement}, {', '.join(choice.layouts.values())}"
        figures = f"{1e3 * choice.step:.1f}", f"{1e3 * seconds:.1f}", f"{100 * (choice.step / seconds - 1):+.1f}%"
        slower = f"{100 * (choice.busy / _computing(own) - 1):+.1f}%"
        rows.append((str(case.ranks), name, choice.schedule, *figures, slower, shared))
    names = "predicted ms", "measured ms", "off", "computes off", f"work of {cores} cores"
    headings = ("ranks", "images, language", "schedule", *names)
    return text_table(headings, rows, right=(0, 3, 4, 5, 6, 7))
