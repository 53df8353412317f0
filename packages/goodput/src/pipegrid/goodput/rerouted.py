"""Throughput of a job on the grids that it has, where the peers of dead nodes take over their work."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import combinations
from typing import TypeAlias

from pipegrid.core.fields import Count, checked_arguments
from pipegrid.goodput.outages import Nodes
from pipegrid.goodput.throughput import Throughput
from pipegrid.planner.choice import Choice, GivenChoice
from pipegrid.planner.errors import JobError
from pipegrid.planner.job import GivenBytes
from pipegrid.plans.plan.routes import Routes
from pipegrid.search.routed import reroute, schedule_routes

Dead: TypeAlias = tuple[tuple[int, ...], ...]
"""The positions of dead actors, by replica that has some; sorted, since replicas are alike."""


@checked_arguments(JobError)
def rerouted_throughput(
    choice: GivenChoice, *, nodes: Nodes, deaths: Count = 1, memory: GivenBytes | None = None
) -> Throughput:
    """Samples per second of ``choice`` on ``nodes`` nodes, and with 1 to ``deaths`` dead, by `schedule_routes`.

    The mean over all that may be dead. The numbers end where one of these would stop all replicas of a position: from
    there on a death is a restart. Peers hold more microbatches as far as the memory allows.

    Args:
        choice: all of its modules have one dp, and each stage one position.
        nodes: that the job has, each of the ``links.gpus_per_node`` of its job; the choice may leave some idle.
        deaths: nodes that are dead at once, at most.
        memory: bytes of a GPU; by default the job's own.

    Raises:
        JobError: modules with different dp, or fewer nodes than the choice is on.
        PlanError: a stage on several positions.

    Examples:
        >>> from pipegrid.planner import Device, Job, Layers, ModuleCosts, Network, plan
        >>> module = ModuleCosts("language", [Layers("decoder", count=8, flops=1e12)], message="8MB", pp=[2])
        >>> links = Network("450GB", "50GB", gpus_per_node=1)
        >>> job = Job([module], global_batch=16, device=Device(4e14, memory="80GB"), links=links)
        >>> round(rerouted_throughput(plan(job, gpus=4, limit=20).winner, nodes=4).rate(3), 1)
        33.2
    """
    shape, job = choice.shape, choice.shape.job
    if len({part.dp for part in shape.parts}) > 1:
        sizes = ", ".join(f"{part.module} dp={part.dp}" for part in shape.parts)
        raise JobError(f"the modules have {sizes}; peers take over where all modules have the same dp")
    capacity = job.device.memory if memory is None else memory
    free = math.inf if capacity is None else float(capacity)
    limits = [free - taken.total + taken.activations for taken in choice.memory]
    units = _actors(choice, nodes)
    rates = {nodes: job.global_batch / choice.step}
    for count in range(1, min(deaths, nodes - 1) + 1):
        ways = Counter(_dead(dead) for dead in combinations(units, count))
        total = 0.0
        for dead, times in ways.items():
            step = _step(choice, dead, limits)
            if step is None:
                return Throughput(tuple(rates.items()), job.global_batch)
            total += times * job.global_batch / step
        rates[nodes - count] = total / ways.total()
    return Throughput(tuple(rates.items()), job.global_batch)


def _actors(choice: Choice, nodes: int) -> list[frozenset[tuple[int, int]]]:
    """The actors of each node: replica and position."""
    shape, size = choice.shape, choice.shape.job.links.gpus_per_node
    needed = -(-(1 + max(max(grid.ranks) for grid in choice.arrangement.grids.values())) // size)
    if nodes < needed:
        raise JobError(f"nodes is {nodes}; the choice is on {needed} nodes of {size} GPUs")
    found: list[set[tuple[int, int]]] = [set() for _ in range(nodes)]
    graph, placement = shape.placed.graph, shape.placed.placement
    for name, grid in choice.arrangement.grids.items():
        places = shape.stage_places[name]
        for rank in grid.ranks:
            first = graph.stage(name, places.index(grid.place(rank, "pp")))
            found[rank // size].add((grid.place(rank, "dp"), placement[first][0]))
    return [frozenset(actors) for actors in found]


def _dead(units: Iterable[frozenset[tuple[int, int]]]) -> Dead:
    by_replica: dict[int, set[int]] = defaultdict(set)
    for replica, position in frozenset().union(*units):
        by_replica[replica].add(position)
    return tuple(sorted(tuple(sorted(positions)) for positions in by_replica.values()))


def _step(choice: Choice, dead: Dead, limits: list[float]) -> float | None:
    """Seconds of a step around dead actors; None where a position has no other."""
    replicas = choice.shape.parts[-1].dp
    at: dict[int, list[int]] = defaultdict(list)
    for replica, positions in enumerate(dead):
        for position in positions:
            at[position].append(replica)
    if any(len(lost) == replicas for lost in at.values()):
        return None
    if not at:
        return choice.step
    routes = reroute(Routes.identity(replicas, choice.num_microbatches), at, plan=choice.plan)
    return schedule_routes(choice.plan, routes, choice.costs, limits).makespan + choice.reduction
