"""Real compute: a transformer of some 10 million parameters."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime_parts.compared import Compared, compare
from runtime_parts.job import Job
from runtime_parts.rows import RANKS, Row
from runtime_parts.table import SPREAD_WIDTH, meets, number, pair_ratios, shown, spread_against
from runtime_parts.timing import Outcome, notes, steps

BOUND = 1.0
LAYERS, WIDTH, HEADS, WORDS, LENGTH = 16, 224, 7, 1024, 32


class Blocks(nn.Module):
    """Layers ``first`` up to ``last`` of the transformer; with its embedding and its head where they belong."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        torch.manual_seed(first)
        self.embedding = nn.Embedding(WORDS, WIDTH) if first == 0 else None
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(first, last)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)) if last == LAYERS else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, or activations of (microbatch size, length, width), to the same or to logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def measure(row: Row, rank: int, device: torch.device, *, microbatches: int, rounds: int) -> Outcome:
    """On each rank."""
    plan = row.plan(microbatches)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(0, WORDS, (2, microbatches, LENGTH), generator=generator).to(device)
    depth = LAYERS // plan.num_stages
    modules = {stage: Blocks(stage * depth, (stage + 1) * depth).to(device) for stage in plan.stages_at[rank]}
    job = Job(row, plan, rank, modules, inputs.split(1), targets.split(1), _loss, (1, LENGTH, WIDTH), device)
    compared = compare(job, floor=False)
    if not isinstance(compared, Compared):
        return compared
    outcome = compared.time(rounds)
    compared.ours.close()
    return outcome


def header(*, microbatches: int, rounds: int) -> Iterator[str]:
    """What the table says."""
    count = sum(p.numel() for p in Blocks(0, LAYERS).parameters())
    yield (
        f"real compute: a transformer of {count / 1e6:.1f} million parameters, {RANKS} ranks, {microbatches} "
        f"microbatches of {LENGTH} tokens; milliseconds per step, medians over {rounds} rounds by turns; "
        "ratio: median of the rounds' and quartiles"
    )
    yield f"  {'schedule':<18}{'ours':>9}{'torch':>9}{'ours/torch':>{SPREAD_WIDTH}}"


def report(row: Row, outcomes: Sequence[Outcome]) -> tuple[bool, list[str]]:
    """Whether the bound holds, and the lines of the row."""
    remarks = notes(outcomes)
    ours, theirs = steps(outcomes, "ours"), steps(outcomes, "torch")
    if not ours:
        return False, [f"  {row.name}", *shown(remarks)]
    to_torch = pair_ratios(ours, theirs)
    cells = number(1e3 * statistics.median(ours)) + number(1e3 * statistics.median(theirs) if theirs else None)
    cells += spread_against(to_torch, BOUND, digits=3)
    return meets(to_torch, BOUND), [f"  {row.name:<18}{cells}", *shown(remarks)]
