"""Encoders in the bubbles of a language model: the plans of `search` beside 1F1B over the graph of modules.

    python tools/bench/encoders.py [--quick] [--effort 1] [--ranks] [--shapes 0.3B:7B,6B:70B:apart,...]

Vision encoders of 0.3B, 2B and 6B parameters before language models of 7B and 70B, at costs from published sizes
(packages/search/README.md derives them), with the peak of activations that 1F1B has as the limit. *Over busy*: how
much longer the step is than the work of the busiest position; *over bound*: than the time that no plan is shorter than.
*By order*: the gain of the search where backwards stay whole, as those of 1F1B are. With ``--ranks``, the plans are run
on gloo with stages that sleep, at a scale where 1F1B takes ``--seconds``; measured are medians of the steps after the
first.

Fails where a plan found is longer than 1F1B's, in simulation or measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor, nn

from pipegrid.bridges import EdgeOptions, MultiModulePipelineCommunicator
from pipegrid.core.tables import text_table
from pipegrid.planner import Device, Job, Layers, ModuleCosts, Network
from pipegrid.planner.choice import Candidate
from pipegrid.planner.grids import Arrangement, GridPart
from pipegrid.planner.model import CostModel
from pipegrid.planner.stages import Shape
from pipegrid.plans.plan import COMPUTES
from pipegrid.schedules import Costs, Forwarded, PipelineRuntime, Plan, lower, search, simulate, verify
from pipegrid.search import Found
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import Edge, P2PConfig
from runtime_parts.emulated import sleeping
from runtime_parts.processes import on_ranks

Where: TypeAlias = Literal["apart", "same", "all"]
"""Where the encoder is: on ranks of its own; a stage on each position of the language model; whole on all of them."""

TOKENS, TILE, TILES = 4096, 1025, 4
VISION = {"0.3B": (24, 1024, 4096), "2B": (48, 1664, 8192), "6B": (45, 3200, 12800)}
"""Layers, hidden size, MLP: ViT-L/14, ViT-bigG/14, InternViT-6B."""
LANGUAGE = {"7B": (32, 4096, 11008, 4096, 32000), "70B": (80, 8192, 28672, 1024, 128256)}
"""Layers, hidden size, MLP, width of the keys, vocabulary: Llama 2 7B, Llama 3 70B."""
GRIDS = {"7B": (2, 4, 16), "70B": (8, 8, 32)}
"""tp, pp and microbatches of a step."""
SAMPLES = 4  # of a microbatch
AHEAD = 4  # microbatches that a frozen encoder is ahead of the language model
WIDTH = 8


@frozen
class Case:
    """A vision encoder before a language model."""

    vision: str
    language: str
    where: Where
    frozen: bool

    def shape(self) -> Shape:
        """Its grids, stages and costs."""
        tp, pp, count = GRIDS[self.language]
        grids: dict[Where, tuple[int, int]] = {"same": (1, pp), "all": (pp, 1), "apart": (self._lanes, 1)}
        lanes, depth = grids[self.where]
        parts = GridPart("vision", tp, 1, lanes, depth), GridPart("language", tp, 1, 1, pp)
        job = Job(
            modules=(
                ModuleCosts("vision", (vision_layers(self.vision),), message(VISION, self.vision), frozen=self.frozen),
                ModuleCosts("language", language_layers(self.language), message(LANGUAGE, self.language)),
            ),
            global_batch=count * self.samples,
            device=Device(400e12),
            links=Network(inside=350e9, between=45e9, latency=20e-6),
            edges=(("vision", "language"),),
        )
        return Shape(CostModel(job), Arrangement(parts, self.where != "apart"), tuple(range(pp)))

    @property
    def _lanes(self) -> int:
        """Replicas of an encoder apart: as many as make it no slower than a stage of the language model."""
        return {"0.3B": 1, "2B": 2, "6B": 4}[self.vision] if self.language == "7B" else 1

    @property
    def samples(self) -> int:
        """Of a microbatch; each replica of an encoder has one at least."""
        return max(SAMPLES, GRIDS[self.language][1]) if self.where == "all" else SAMPLES

    def __str__(self) -> str:
        return f"{self.vision}{' frozen' if self.frozen else ''} > {self.language}, {self.where}"


def vision_layers(size: str) -> Layers:
    """The layers of an encoder: FLOPs, activations and parameters of one, for one sample."""
    layers, h, f = VISION[size]
    weights, tokens = 4 * h * h + 2 * h * f, TILES * TILE
    attention = 4 * TILE**2 * h * TILES
    return Layers(
        "encoder",
        layers,
        flops=2 * weights * tokens + attention,
        attention_flops=attention,
        activations=(8 * h + 2 * f) * tokens * 2,
        parameters=weights,
    )


def language_layers(size: str) -> tuple[Layers, ...]:
    """The layers of a language model."""
    layers, h, f, k, vocabulary = LANGUAGE[size]
    weights = 2 * h * h + 2 * h * k + 3 * h * f
    attention = 2 * TOKENS**2 * h
    return (
        Layers("embedding", flops=0),
        Layers(
            "decoder",
            layers,
            flops=2 * weights * TOKENS + attention,
            attention_flops=attention,
            activations=(6 * h + 2 * k + 3 * f) * TOKENS * 2,
            parameters=weights,
        ),
        Layers("loss", flops=2 * vocabulary * h * TOKENS, activations=6 * TOKENS * vocabulary),
    )


def message(sizes: Mapping[str, tuple[int, ...]], size: str) -> float:
    """Bytes between two layers, for one sample."""
    tokens = TILES * TILE if sizes is VISION else TOKENS
    return tokens * sizes[size][1] * 2


def cases(*, quick: bool) -> Iterator[Case]:
    """Every encoder before every language model: on its ranks, trained and frozen; apart; whole on all ranks."""
    if quick:
        yield Case("0.3B", "7B", "same", frozen=True)
        return
    for language in LANGUAGE:
        for vision in VISION:
            yield Case(vision, language, "same", frozen=False)
            yield Case(vision, language, "same", frozen=True)
            yield Case(vision, language, "apart", frozen=False)
            if language == "7B":
                yield Case(vision, language, "all", frozen=False)


@frozen
class Solved:
    """1F1B and the plan found, at the same costs and the same peak; ``step`` and ``gained`` are theirs when lowered.

    ``whole``: that of the plan found where backwards stay whole.
    """

    case: Case
    base: Plan
    costs: Costs
    step: float
    gained: float
    whole: float
    busy: float
    found: Found
    seconds: float


def solve(case: Case, effort: float) -> Solved:
    """Search, and prove the lowered plan."""
    shape = case.shape()
    candidate = Candidate(shape, "1f1b", case.samples)
    costs, base = candidate.microbatch_costs(), candidate.named_plan()
    simulation = simulate(base, costs)
    begin = time.process_time()
    found, whole = (
        search(
            given,
            simulation.peak(),
            num_positions=base.num_positions,
            num_microbatches=base.num_microbatches,
            graph=base.graph,
            placement=base.placement,
            forward_only=("vision",) if case.frozen else (),
            ahead=AHEAD if case.frozen else None,
            effort=effort,
        )
        for given in (costs, unsplit(costs, base.num_stages))
    )
    seconds = time.process_time() - begin
    step, gained, ordered = (
        simulate(verify(lowered(shape, plan, case, given)).plan, given).makespan
        for plan, given in (
            (base, costs),
            (found.plan, costs),
            (whole.plan, unsplit(costs, base.num_stages)),
        )
    )
    return Solved(case, base, costs, step, gained, ordered, max(simulation.busy), found, seconds)


def unsplit(costs: Costs, num_stages: int) -> Costs:
    """The costs of backwards that give their input's gradient at their end: splitting them gains nothing."""
    return evolve(costs, I=costs.per_stage("B", num_stages), W=0.0)


def lowered(shape: Shape, plan: Plan, case: Case, costs: Costs) -> Plan:
    """The plan with its communication, placed by the costs."""
    times = {kind: costs.per_stage(kind.value, plan.num_stages) for kind in COMPUTES}
    return lower(
        plan,
        collectives=shape.collectives,
        ahead=AHEAD if case.frozen else None,
        duration=lambda action: times[action.kind][action.stage],
    )


class Sleeper(nn.Module):
    """A stage of the graph: F sleeps, and so does each half of the backward, in a node of its own."""

    def __init__(self, plan: Plan, stage: int, seconds: Sequence[float], samples: int) -> None:
        super().__init__()
        self.out = [edge for edge in plan.graph.stage_edges if edge.source == stage]
        self.seconds, self.samples = seconds, samples
        self.weight = nn.Parameter(torch.full((1, 1, WIDTH), 0.1))
        fed = [edge for edge in plan.gradient_edges if edge.destination == stage]
        # A model's embedding: without it, nothing asks for the input half of a first stage.
        self.entry = None if fed else nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, microbatch: int, inputs: Mapping[Edge, Any]) -> Forwarded:
        """See `Stage`."""
        del microbatch
        x: Tensor = next(iter(inputs.values()), None)  # type: ignore[assignment]
        x = torch.zeros(self.samples, 1, WIDTH) if x is None else x
        if self.entry is not None:
            x = x + self.entry
        forward, inputs_half, weights_half = self.seconds
        time.sleep(forward)
        y = sleeping(x, inputs_half) + sleeping(self.weight, weights_half)
        return Forwarded({}, y.sum()) if not self.out else Forwarded(dict.fromkeys(self.out, y))


def measure(solved: Solved, plan: Plan, options: argparse.Namespace) -> list[float]:
    """Seconds of each step on this rank."""
    shape, scale = solved.case.shape(), options.seconds / solved.step
    grids = {}
    for part in shape.parts:  # tp is in the costs alone
        offset = 0 if shape.arrangement.colocated or part.module == "vision" else 1
        grids[part.module] = HyperCommGrid(
            [part.dp if shape.arrangement.colocated else 1, part.pp], ["dp", "pp"], rank_offset=offset
        )
    config = P2PConfig(pipeline_dtype=torch.float32, deadline=60.0)
    frozen_edges = {("vision", "language"): EdgeOptions(backward=False)} if solved.case.frozen else {}
    pipe = MultiModulePipelineCommunicator(grids, {"vision": ["language"]}, config, edges=frozen_edges)
    times = list(zip(*(solved.costs.per_stage(kind, plan.num_stages) for kind in "FIW"), strict=True))
    stages = {
        stage: Sleeper(plan, stage, [scale * each for each in times[stage]], solved.case.samples // len(places))
        for stage, places in enumerate(plan.placement)
        if stage in pipe.stages
    }
    runtime = PipelineRuntime(lowered(shape, plan, solved.case, solved.costs), stages, pipe)
    found = []
    for _ in range(options.steps):
        dist.barrier()
        start = time.perf_counter()
        runtime.step()
        found.append(time.perf_counter() - start)
    pipe.destroy()
    return found


def _run(report: Callable[[Any], None], solved: Sequence[Solved], options: argparse.Namespace) -> None:
    """One rank: both plans of each case."""
    for one in solved:
        for plan in (one.base, one.found.plan):
            report(measure(one, plan, options))


def run(solved: Sequence[Solved], options: argparse.Namespace) -> Iterator[tuple[Solved, float, float]]:
    """The median step of 1F1B and of the plan found, in seconds; a job of processes for each number of ranks."""
    for ranks in sorted({one.base.num_positions for one in solved}):
        own = [one for one in solved if one.base.num_positions == ranks]
        with on_ranks(ranks, _run, own, options) as reports:
            for one in own:
                base, found = (statistics.median(reports.slowest()[1:]) for _ in range(2))
                yield one, base, found


def percent(share: float) -> str:
    """A share as text."""
    return f"{100 * share:.1f}%".replace("-0.0%", "0.0%")


def row(one: Solved) -> tuple[str, ...]:
    """The row of the table."""
    found = one.found
    return (
        str(one.case),
        f"{one.base.num_positions} x {one.base.num_microbatches}",
        f"{one.step:.3f}",
        f"{one.gained:.3f}",
        percent(1 - one.gained / one.step),
        percent(1 - one.whole / one.step),
        percent(one.gained / one.busy - 1),
        percent(one.gained / found.bound - 1),
        found.origin,
        f"{one.seconds:.0f}",
    )


def main() -> int:
    """Search, measure and print; 1 where a plan found is longer than 1F1B's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, short: shows that it works")
    parser.add_argument("--effort", type=float, default=1.0, help="of each search")
    parser.add_argument("--ranks", action="store_true", help="run the plans on ranks, with stages that sleep")
    parser.add_argument("--steps", type=int, default=4, help="of each plan; the first is not counted")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a step of 1F1B on ranks")
    parser.add_argument("--shapes", default="", help="only these, such as 0.3B:7B,6B:70B:apart")
    options = parser.parse_args()
    if options.quick:
        options.effort, options.steps, options.seconds, options.ranks = 0.01, 2, 0.5, True
    os.environ["OMP_NUM_THREADS"] = "1"
    wanted = [name for name in options.shapes.split(",") if name]
    solved = []
    for case in cases(quick=options.quick):
        name = f"{case.vision}:{case.language}"
        if not wanted or name in wanted or f"{name}:{case.where}" in wanted:
            solved.append(solve(case, options.effort))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    figures = "gain", "by order", "over busy", "over bound"
    headings = ("vision > language", "P x m", "1F1B s", "found s", *figures, "from", "CPU s")
    print(text_table(headings, [row(one) for one in solved], right=(2, 3, 4, 5, 6, 7, 9)))
    good = all(one.gained <= one.step for one in solved)
    if options.ranks:
        rows = []
        for one, base, found in run(solved, options):
            good &= found <= base
            scale = options.seconds / one.step
            rows.append(
                (
                    str(one.case),
                    f"{1e3 * scale * one.step:.0f}",
                    f"{1e3 * base:.0f}",
                    f"{1e3 * scale * one.gained:.0f}",
                    f"{1e3 * found:.0f}",
                    percent(1 - found / base),
                )
            )
        print(f"\non ranks, milliseconds: torch {torch.__version__}, gloo, {os.cpu_count()} CPUs")
        names = ("vision > language", "1F1B predicted", "measured", "found predicted", "measured", "gain")
        print(text_table(names, rows, right=(1, 2, 3, 4, 5)))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
