"""Communicators of a plan: one for each lane, one for each pair of ranks, and the fewest by proof.

    python tools/bench/communicators.py [--rounds 15]

Counts are per rank, of a plan on 4 positions with 8 microbatches; the time that opening takes on 4 ranks over gloo, and
a step over one with a communicator for each lane, of modules that do next to nothing. All three live in the same
processes and take turns; a ratio is the median of those of single rounds, with quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrid.core.lanes import Communicators, LaneSharing
from pipegrid.plans.generators import find_schedule
from pipegrid.plans.orders import fewest_communicators
from pipegrid.plans.plan import Plan
from pipegrid.schedules import Forwarded, PipelineRuntime, lower, verify
from pipegrid.transport import Edge, P2PCommunicator, P2PConfig
from runtime_parts.processes import on_ranks

SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble_v", "dualpipe_v")
POSITIONS, MICROBATCHES, STEPS, WIDTH = 4, 8, 5, 16
KINDS = ("separate", "shared", "fewest")


class Stage:
    """A stage that costs next to nothing."""

    def __init__(self, number: int, plan: Plan) -> None:
        self.number, self.plan, self.model = number, plan, nn.Linear(WIDTH, WIDTH)

    def forward(self, microbatch: int, inputs: Mapping[Edge, Any]) -> Forwarded:
        """One microbatch."""
        del microbatch
        given: Tensor = inputs[Edge(self.number - 1, self.number)] if inputs else torch.ones(4, WIDTH)
        y = torch.tanh(self.model(given))
        if self.number == self.plan.num_stages - 1:
            return Forwarded({}, y.square().mean() / self.plan.num_microbatches)
        return Forwarded({Edge(self.number, self.number + 1): y})


def plan_of(name: str) -> Plan:
    """A schedule, lowered."""
    return lower(find_schedule(name, None).plan(POSITIONS, MICROBATCHES, None))


def kinds_of(plan: Plan) -> tuple[Communicators, ...]:
    """The communicators that are compared, in the order of `KINDS`."""
    return "separate", "shared", fewest_communicators(plan)


def _rank(report: Callable[[Any], None], name: str, rounds: int) -> None:
    plan = plan_of(name)
    placement = [position for (position,) in plan.placement]
    opening, runtimes = [], []
    communicators = []
    for kind in kinds_of(plan):
        config = P2PConfig(pipeline_dtype=torch.float32, communicators=kind, deadline=120.0)
        dist.barrier()
        start = time.perf_counter()
        traffic = None if isinstance(kind, LaneSharing) else plan.traffic
        communicators.append(P2PCommunicator(dist.group.WORLD, config, placement=placement, traffic=traffic))
        opening.append(time.perf_counter() - start)
        stages = {number: Stage(number, plan) for number in plan.stages_at[dist.get_rank()]}
        runtimes.append(PipelineRuntime(plan, stages, communicators[-1]))
        for _ in range(2):
            runtimes[-1].step()
    seconds: list[list[float]] = []
    for turn in range(rounds):
        taken = [0.0] * len(KINDS)
        for index in range(len(KINDS))[:: 1 if turn % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                runtimes[index].step()
            dist.barrier()
            taken[index] = (time.perf_counter() - start) / STEPS
        seconds.append(taken)
    if dist.get_rank() == 0:
        report((opening, seconds))
    dist.barrier()
    for communicator in communicators:
        communicator.close()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"torch {torch.__version__}, gloo, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{'':<18}{'':<10}{'per rank':>9}{'opening ms':>12}{'step / per lane':>18}")
    for name in SCHEDULES:
        plan = plan_of(name)
        counts = [max(verify(plan, lanes=kind).communicators) for kind in kinds_of(plan)]
        with on_ranks(POSITIONS, _rank, name, options.rounds) as reports:
            opening, seconds = reports.first()
        for index, kind in enumerate(KINDS):
            low, ratio, high = statistics.quantiles([taken[index] / taken[0] for taken in seconds], n=4)
            step = f"{ratio:>11.2f} [{low:.2f}, {high:.2f}]" if index else ""
            title = name if index == 0 else ""
            print(f"{title:<18}{kind:<10}{counts[index]:>9}{1000 * opening[index]:>12.0f}{step}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
