"""Overhead: empty stages, so that all that is left is what a runtime does per action."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from runtime_parts.compared import Compared, compare
from runtime_parts.job import Job
from runtime_parts.rows import RANKS, Row
from runtime_parts.table import SPREAD_WIDTH, meets, number, pair_ratios, shown, spread_against
from runtime_parts.timing import Outcome, notes, steps

FLOOR_BOUND = 1.3
WIDTH = 8


class Scale(nn.Module):
    """As little as has a backward with two halves: each element times a weight."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(1, WIDTH, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape."""
        return x * self.weight


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def job(row: Row, rank: int, device: torch.device, microbatches: int) -> Job:
    """Empty stages; every microbatch with values of its own, so that one that was mistaken for another shows."""
    plan = row.plan(microbatches)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, microbatches, WIDTH, generator=generator).to(device)
    modules = {stage: Scale(stage).to(device) for stage in plan.stages_at[rank]}
    return Job(row, plan, rank, modules, inputs.split(1), targets.split(1), _loss, (1, WIDTH), device)


def measure(row: Row, rank: int, device: torch.device, *, microbatches: int, rounds: int) -> Outcome:
    """On each rank."""
    compared = compare(job(row, rank, device, microbatches), floor=True)
    if not isinstance(compared, Compared):
        return compared
    outcome = compared.time(rounds)
    compared.ours.close()
    return outcome


def header(*, microbatches: int, rounds: int) -> Iterator[str]:
    """What the table says."""
    yield (
        f"overhead: empty stages, {RANKS} ranks, {microbatches} microbatches; microseconds per action (of the position "
        f"with most), medians over {rounds} rounds by turns; ratios: median of the rounds' and quartiles"
    )
    yield (
        f"  {'schedule':<18}{'actions':>8}{'ours':>9}{'torch':>9}{'floor':>9}{'ms/microbatch':>15}"
        f"{'ours/floor':>{SPREAD_WIDTH}}{'ours/torch':>{SPREAD_WIDTH}}"
    )


def report(row: Row, outcomes: Sequence[Outcome], *, microbatches: int) -> tuple[bool, list[str]]:
    """Whether the bounds hold, and the lines of the row."""
    remarks = notes(outcomes)
    if not steps(outcomes, "ours"):
        return False, [f"  {row.name}", *shown(remarks)]
    plan = row.plan(microbatches)
    actions = max(sum(1 for _ in plan.actions(position)) for position in range(plan.num_positions))
    ours, theirs, floor = (steps(outcomes, name) for name in ("ours", "torch", "floor"))
    to_floor, to_torch = pair_ratios(ours, floor), pair_ratios(ours, theirs)
    cells = "".join(
        number(1e6 * statistics.median(times) / actions if times else None) for times in (ours, theirs, floor)
    )
    cells += number(1e3 * statistics.median(ours) / microbatches, 15, 2)
    cells += spread_against(to_floor, FLOOR_BOUND) + spread_against(to_torch, row.torch_bound)
    good = meets(to_floor, FLOOR_BOUND) and meets(to_torch, row.torch_bound)
    return good, [f"  {row.name:<18}{actions:>8}{cells}", *shown(remarks)]
