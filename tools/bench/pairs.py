"""Pairs of a forward and a backward: how much of the exchanges of experts the other half hides.

    python tools/bench/pairs.py [--rounds 7] [--layers 2] [--compute 10] [--link 8] [--picture FILE]

Four ranks over gloo: two pipeline ranks under DualPipe-V, each with two ranks of experts. Layers compute by sleeping,
``--compute`` ms before the dispatch and as much before the combine, twice that in a backward. Their tokens go over gloo
and take ``--link`` ms: an emulated link, so that two cores can play four ranks. One plan runs with its pairs one after
the other and with `TakeTurns`, step by step. Hidden is the share of the link's time in which nobody waited for it, in
pairs and in the whole step; the ratio of steps is beside what `simulate` says of pairs that hide all.
``--picture`` writes a recorded step of each of the two ways as SVG, of a rank of each position.
Exits with 1 where less than 70% in pairs is hidden, or where a gradient differs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
from attrs import astuple, define, evolve
from torch import Tensor, nn

from pipegrid.core.edge import Edge
from pipegrid.plans import Action, ActionKind, Plan, dualpipe_v
from pipegrid.schedules import (
    Costs,
    Forwarded,
    PipelineRuntime,
    Recorder,
    Recording,
    TakeTurns,
    hand_over,
    lower,
    simulate,
)
from pipegrid.timeline import Track, timeline, write_svg
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import P2PCommunicator, P2PConfig
from runtime_parts.processes import on_ranks
from runtime_parts.timing import by_turns

RANKS, POSITIONS, EXPERTS, WIDTH, ROWS, MICROBATCHES = 4, 2, 2, 8, 4, 8
BOUND = 0.7
APART, TURNS = "one after the other", "by turns"


@define
class Meter:
    """Seconds of the link of a rank's exchanges, and those in which the rank waited for it; in pairs, and in all."""

    link: float = 0.0
    waited: float = 0.0
    link_in_pairs: float = 0.0
    waited_in_pairs: float = 0.0
    in_pair: bool = False


@define
class Linked:
    """An exchange whose tokens arrive a link's time after it began, or when they are there."""

    work: Any
    seconds: float
    due: float
    meter: Meter

    def wait(self) -> None:
        """See `pipegrid.schedules.runtime.turns.Work`."""
        begun = time.perf_counter()
        self.work.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))
        waited = min(self.seconds, time.perf_counter() - begun)
        self.meter.link += self.seconds
        self.meter.waited += waited
        if self.meter.in_pair:
            self.meter.link_in_pairs += self.seconds
            self.meter.waited_in_pairs += waited


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        return layer.exchanged(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.layer.exchanged(gradients[0]), None


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0].clone(), None


class Layer(nn.Module):
    """Attention, dispatch, an expert, combine."""

    def __init__(self, seed: int, group: Any, options: argparse.Namespace, meter: Meter) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList([torch.rand(WIDTH, generator=generator) for _ in range(2)])
        self.group, self.meter = group, meter
        self.compute, self.link = 1e-3 * options.compute, 1e-3 * options.link

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape."""
        for weight in self.weights:
            x = _Sleep.apply(x * weight, self.compute)  # type: ignore[no-untyped-call]
            x = _Exchange.apply(x, self)  # type: ignore[no-untyped-call]
        return x

    def exchanged(self, x: Tensor) -> Tensor:
        """Half of the rows of each rank to each."""
        received, x = torch.empty_like(x), x.contiguous()
        work = dist.all_to_all_single(received, x, group=self.group, async_op=True)
        hand_over("exchange", Linked(work, self.link, time.perf_counter() + self.link, self.meter))
        return received


class Part:
    """A stage of the chain."""

    def __init__(self, number: int, count: int, model: nn.Module) -> None:
        self.number, self.count, self.model = number, count, model

    def forward(self, microbatch: int, inputs: Mapping[Edge, Any]) -> Forwarded:
        """See `Stage`."""
        x = next(iter(inputs.values())) if inputs else torch.full((ROWS, WIDTH), 1.0 + microbatch)
        y = self.model(x.requires_grad_())
        if self.number == self.count - 1:
            return Forwarded({}, y.mean())
        return Forwarded({Edge(self.number, self.number + 1): y})


@define
class Runner:
    """A step of one of the two ways; ``meter`` of all its steps."""

    runtime: PipelineRuntime
    meter: Meter

    def step(self) -> None:
        """See `runtime_parts.runners.Runner`."""
        self.runtime.step()


def _runner(
    way: str, plan: Plan, grid: HyperCommGrid, options: argparse.Namespace, recorder: Recorder | None = None
) -> tuple[Runner, nn.Module]:
    here, meter = grid.coords(dist.get_rank()), Meter()
    models = {
        stage: nn.Sequential(
            *(Layer(10 * stage + number, grid.get_pg("ep"), options, meter) for number in range(options.layers))
        )
        for stage in plan.stages_at[here["pp"]]
    }
    parts = {stage: Part(stage, plan.num_stages, model) for stage, model in models.items()}
    placement = [place for (place,) in plan.placement]
    communicator = P2PCommunicator(grid.get_pg("pp"), P2PConfig(deadline=60.0), placement=placement)
    runtime = PipelineRuntime(plan, parts, communicator, hooks=[] if recorder is None else [recorder])
    turns = TakeTurns(aside=None if recorder is None else recorder.aside)

    def run(pair: Sequence[Action], forward: Callable[[], None], backward: Callable[[], None]) -> None:
        meter.in_pair = True
        if way == TURNS:
            turns(pair, forward, backward)
        else:
            forward()
            backward()
        meter.in_pair = False

    runtime.register(ActionKind.F_B, run)
    return Runner(runtime, meter), nn.ModuleList(models.values())


def _rank(report: Callable[[Any], None], options: argparse.Namespace) -> None:
    grid = HyperCommGrid([EXPERTS, POSITIONS], ["ep", "pp"])
    grid.create_pgs(["pp", "ep"])
    plan = lower(dualpipe_v(POSITIONS, MICROBATCHES, overlap=True))
    made = {way: _runner(way, plan, grid, options) for way in (APART, TURNS)}
    gradients = {}
    for way, (runner, model) in made.items():
        runner.step()
        gradients[way] = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    error = max(float((a - b).abs().max()) for a, b in zip(gradients[APART], gradients[TURNS], strict=True))
    times = by_turns({way: runner for way, (runner, _) in made.items()}, options.rounds)
    tracks = {way: _recorded(way, plan, grid, options) for way in made if options.picture is not None}
    report((times, {way: astuple(runner.meter) for way, (runner, _) in made.items()}, error, tracks))


def _recorded(way: str, plan: Plan, grid: HyperCommGrid, options: argparse.Namespace) -> Track:
    """One step of this rank, after one that connects."""
    recorder = Recorder()
    runner, _ = _runner(way, plan, grid, options, recorder)
    runner.step()
    dist.barrier()
    recorder.start()
    runner.step()
    return recorder.track(plan, rank=dist.get_rank(), position=grid.coords(dist.get_rank())["pp"])


def draw(path: Path, tracks: Sequence[Mapping[str, Track]]) -> None:
    """Write the recorded steps of both ways, of the first rank of each position."""
    plan = lower(dualpipe_v(POSITIONS, MICROBATCHES, overlap=True))
    drawn = []
    for way in (APART, TURNS):
        first = {own[way].position: own[way] for own in reversed(tracks)}
        drawn.append(timeline(Recording(plan, list(first.values())), title=f"dualpipe_v, recorded, pairs {way}"))
    write_svg(drawn, path)


def predicted(options: argparse.Namespace) -> float:
    """A step whose pairs hide all of the link over one whose pairs hide nothing."""
    plan = dualpipe_v(POSITIONS, MICROBATCHES, overlap=True)
    forward, backward = (2 * options.layers * (times * options.compute + options.link) for times in (1, 2))
    # A sleep is in no half of its own: it runs at I, and on a first stage, whose I is empty, at W.
    apart = Costs(F=forward, I=[0.0, *[backward] * 3], W=[backward, 0.0, 0.0, 0.0])
    together = evolve(apart, hidden=4 * options.layers * options.link)
    return simulate(plan, together).makespan / simulate(plan, apart).makespan


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of timed steps")
    parser.add_argument("--layers", type=int, default=2, help="of a stage")
    parser.add_argument("--compute", type=float, default=10.0, help="ms before each exchange of a forward")
    parser.add_argument("--link", type=float, default=8.0, help="ms of an exchange")
    parser.add_argument("--picture", type=Path, help="write a recorded step of each way as SVG")
    options = parser.parse_args()
    with on_ranks(RANKS, _rank, options) as reports:
        found = reports.next()
    times = f"{options.compute:g} ms and {options.link:g} ms"
    print(
        f"torch {torch.__version__}, gloo, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; "
        f"{POSITIONS} x {EXPERTS} ranks, {MICROBATCHES} microbatches, {options.layers} layers a stage, {times}"
    )
    print(f"  {'medians':<24}{'step, ms':>10}{'hidden in pairs':>18}{'of all':>9}")
    steps: dict[str, list[float]] = {}
    hidden: dict[str, float] = {}
    for way in (APART, TURNS):
        steps[way] = [max(column) for column in zip(*(times[way] for times, *_ in found), strict=True)]
        sums = [sum(part) for part in zip(*(own[way] for _, own, *_ in found), strict=True)]
        link, waited, in_pairs, waited_in_pairs, _ = sums
        hidden[way] = 1 - waited_in_pairs / in_pairs
        print(f"  {way:<24}{1e3 * statistics.median(steps[way]):>10.1f}{hidden[way]:>18.0%}{1 - waited / link:>9.0%}")
    ratio = statistics.median(b / a for a, b in zip(steps[APART], steps[TURNS], strict=True))
    worst = max(error for _, _, error, _ in found)
    print(f"  a step by turns over one after the other: {ratio:.2f} (simulated, all hidden: {predicted(options):.2f})")
    print(f"  largest difference of a gradient: {worst:.1e}")
    if options.picture is not None:
        draw(options.picture, [tracks for *_, tracks in found])
    return 0 if hidden[TURNS] >= BOUND and worst == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
