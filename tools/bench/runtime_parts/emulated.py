"""Emulated compute: stages that sleep, so that two cores can play four ranks; the clock against the simulation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from pipegrid.plans.plan.actions import Action, ActionKind
from pipegrid.plans.plan.plan import Plan
from pipegrid.plans.simulate.costs import Costs
from pipegrid.plans.simulate.simulation import simulate
from runtime_parts.compared import Compared, compare
from runtime_parts.job import Job
from runtime_parts.rows import RANKS, Row
from runtime_parts.runners import Ours
from runtime_parts.table import against, number, relation, shown
from runtime_parts.timing import Outcome, notes, steps

BOUND = 0.03
WIDTH = 8
NEVER = float("inf")


class _Sleep(torch.autograd.Function):
    """The identity, whose backward takes ``seconds``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient.clone(), None  # torch's split backward adds to what it is given, in place


class Sleeper(nn.Module):
    """F sleeps, and so does each half of the backward, in a node of its own."""

    def __init__(self, stage: int, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.full((1, WIDTH), 0.1 * (stage + 1)))
        # What an embedding is to a first stage: without it, its input half would feed no other stage.
        self.entry = nn.Parameter(torch.zeros(1, WIDTH)) if stage == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape."""
        time.sleep(self.seconds)
        if self.entry is not None:
            x = x + self.entry
        return sleeping(x, self.seconds) + sleeping(self.weight, self.seconds)


def sleeping(x: Tensor, seconds: float) -> Tensor:
    """The identity, whose backward takes ``seconds``."""
    result: Tensor = _Sleep.apply(x, seconds)  # type: ignore[no-untyped-call]
    return result


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


class Stopwatch:
    """A hook that notes when each action started and ended, on the clock that all processes share; step by step."""

    def __init__(self, runner: Ours) -> None:
        self.steps: list[list[tuple[Action, float, float]]] = []
        self._runner = runner.watched(self)
        self._since = 0.0

    def step(self) -> None:
        """Run and note a step."""
        self.steps.append([])
        self._runner.step()

    def before(self, action: Action) -> None:
        """See `Hook`."""
        del action
        self._since = time.perf_counter()

    def after(self, action: Action) -> None:
        """See `Hook`."""
        self.steps[-1].append((action, self._since, time.perf_counter()))


@frozen
class Emulated:
    """What one rank reports: how long the steps took, and of each of ours when it did what."""

    outcome: Outcome
    watched: Sequence[Sequence[tuple[Action, float, float]]] = ()


def measure(row: Row, rank: int, device: torch.device, *, microbatches: int, rounds: int, seconds: float) -> Emulated:
    """On each rank. ``seconds``: of F, of I and of W, of all that one rank holds."""
    plan = row.plan(microbatches)
    inputs, targets = torch.randn(2, microbatches, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    modules = {stage: Sleeper(stage, seconds / plan.num_chunks).to(device) for stage in plan.stages_at[rank]}
    job = Job(row, plan, rank, modules, inputs.split(1), targets.split(1), _loss, (1, WIDTH), device)
    compared = compare(job, floor=False)
    if not isinstance(compared, Compared):
        return Emulated(compared)
    compared.runners["ours"] = stopwatch = Stopwatch(compared.ours)
    outcome = compared.time(rounds)
    compared.ours.close()
    return Emulated(outcome, stopwatch.steps)


def costs_of(plan: Plan, ranks: Sequence[Sequence[tuple[Action, float, float]]]) -> Costs:
    """What an action took in one step, per stage and kind, what it cost beside that, and what a hop took: means.

    A hop counts where its receiver waited for it: from the end of the send's posting to the start of the compute
    that needed it, without what an action costs anyway.
    """
    durations: dict[tuple[ActionKind, int], list[float]] = {}
    overheads: list[float] = []
    for times in ranks:
        ended = None
        for action, start, end in times:
            if action.kind.is_compute:
                durations.setdefault((action.kind, action.stage), []).append(end - start)
            elif ended is not None:
                overheads.append(end - ended)
            ended = end
    overhead = statistics.mean(overheads)

    def per_stage(kind: ActionKind) -> tuple[float, ...]:
        return tuple(statistics.mean(durations.get((kind, stage), [0.0])) for stage in range(plan.num_stages))

    hops = list(_hops(plan, ranks, overhead))
    return Costs(
        F=per_stage(ActionKind.F),
        I=per_stage(ActionKind.I),
        W=per_stage(ActionKind.W),
        B=per_stage(ActionKind.B),
        overhead=overhead,
        latency=max(0.0, statistics.mean(hops)) if hops else 0.0,
    )


def _hops(plan: Plan, ranks: Sequence[Sequence[tuple[Action, float, float]]], overhead: float) -> Iterator[float]:
    posted: dict[tuple[Any, bool, int | None], float] = {}
    for times in ranks:
        for action, _, end in times:
            if action.kind.is_send:
                posted[action.edge, action.kind is ActionKind.SEND_F, action.microbatch] = end
    incoming: dict[tuple[int, bool], Any] = {}
    for edge in plan.graph.stage_edges:
        incoming[edge.destination, True] = incoming[edge.source, False] = edge
    for times in ranks:
        idle_since = NEVER
        for action, start, end in times:
            forward = action.kind is ActionKind.F
            if forward or action.kind in (ActionKind.B, ActionKind.I):
                sent = posted.get((incoming.get((action.stage, forward)), forward, action.microbatch))
                if sent is not None and idle_since < sent:
                    yield start - sent - overhead
            idle_since = end


def header(*, microbatches: int, rounds: int, seconds: float) -> Iterator[str]:
    """What the table says."""
    yield (
        f"emulated compute: stages that sleep {1e3 * seconds:g} ms per rank for each of F, I and W, {RANKS} ranks, "
        f"{microbatches} microbatches; milliseconds, best of {rounds} steps; simulated with the costs of that one"
    )
    yield (
        f"  {'schedule':<18}{'ours':>9}{'simulated':>11}{'off by':>15}{'torch':>9}{'ours/torch':>16}"
        "   measured: hop, action (us)"
    )


def report(row: Row, ranks: Sequence[Emulated], *, microbatches: int) -> tuple[bool, list[str]]:
    """Whether the bounds hold, and the lines of the row."""
    outcomes = [rank.outcome for rank in ranks]
    remarks = notes(outcomes)
    ours, theirs = steps(outcomes, "ours"), steps(outcomes, "torch")
    if not ours:
        return False, [f"  {row.name}", *shown(remarks)]
    plan = row.plan(microbatches)
    best = min(ours)
    costs = costs_of(plan, [rank.watched[ours.index(best)] for rank in ranks])
    simulated = simulate(plan, costs).makespan
    off = best / simulated - 1.0
    to_torch = best / min(theirs) if theirs else None
    assert isinstance(costs.latency, float)
    verdict = f"{100 * off:+.1f}% {relation(abs(off) <= BOUND)} {100 * BOUND:g}%"
    cells = f"{number(1e3 * best)}{number(1e3 * simulated, 11)}{verdict:>15}"
    cells += number(1e3 * min(theirs) if theirs else None) + against(to_torch, 1.0, digits=3)
    cells += f"   {1e6 * costs.latency:.0f}, {1e6 * costs.overhead:.0f}"
    good = abs(off) <= BOUND and (to_torch is None or to_torch <= 1.0)
    return good, [f"  {row.name:<18}{cells}", *shown(remarks)]
