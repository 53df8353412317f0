"""The groups, lanes, boundaries and plans that the ranks of a choice would open, made as data and checked.

Pure: the same functions that communicators call on ranks, for all ranks at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from attrs import field, frozen

from pipegrid.core.edge import Direction, Edge
from pipegrid.core.fields import checked_arguments
from pipegrid.core.lanes import pipeline_lanes
from pipegrid.planner.choice import Choice, GivenChoice
from pipegrid.planner.errors import JobError
from pipegrid.plans import lower, verify
from pipegrid.plans.verify import Proof
from pipegrid.reshard import Side, Sizes, axis_names, check_plan, plan_reshard, positions_of, routes

_AXES = axis_names(3)


@frozen(slots=False)
class DryRun:
    """The resources that the ranks of a job open together. A communicator has a stream of its own on NCCL.

    Attributes:
        groups: of tp, cp, dp and pp, with more than one rank.
        lanes: between ranks, one per direction.
        boundaries: groups of the boundaries between modules that share ranks.
        messages: of all boundaries, for one microbatch forward and back, each box proved to arrive once.
        communicators: per rank, groups and lanes.
        memory: per rank, bytes.
        proof: of the plan.
    """

    groups: int
    lanes: int
    boundaries: int
    messages: int
    communicators: tuple[int, ...] = field(repr=False)
    memory: tuple[float, ...] = field(repr=False)
    proof: Proof = field(repr=False)

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return len(self.communicators)

    def __str__(self) -> str:
        mean = sum(self.communicators) / self.ranks
        return (
            f"{self.ranks} ranks: {self.groups} groups of grids, {self.lanes} lanes, {self.boundaries} groups of "
            f"boundaries; {self.messages} messages between modules, each box once; communicators of a rank: at most "
            f"{max(self.communicators)}, {mean:.1f} on average; memory of a rank: at most {max(self.memory) / 1e9:.1f} "
            f"GB\n{self.proof}"
        )


@checked_arguments(JobError)
def dry_run(choice: GivenChoice) -> DryRun:
    """Make and check what all ranks of ``choice`` open, without a process.

    Checked: ranks that the plan puts on a position hold its stages; every lane has two ends; the boxes of each boundary
    tile what each rank needs, forward and back; the plan is proved with its communication.

    Examples:
        >>> module = ModuleCosts("language", [Layers("decoder", count=8, flops=1e12)], message="8MB", pp=[2])
        >>> job = Job([module], global_batch=16, device=Device(4e14, memory="80GB"), links=Network("450GB", "50GB"))
        >>> dry_run(plan(job, gpus=2, limit=20).winner).lanes
        4
    """
    shape, grids = choice.shape, choice.arrangement.grids
    positions = positions_of(shape.placed.graph, grids, shape.stage_places)
    if positions.placement != shape.placed.placement:
        raise JobError(f"the grids have positions {positions.placement}, the plan {shape.placed.placement}")
    lowered = lower(choice.plan, collectives=shape.collectives)
    every = (ranks for grid in grids.values() for dim in grid.dim_names for ranks in grid.groups(dim))
    groups = [ranks for ranks in every if len(ranks) > 1]
    boundaries = list(_boundaries(choice, lowered.traffic))
    between = [pair for pairs, _, _ in boundaries for pair in pairs]
    lanes = [*_lanes_of_modules(choice, lowered.traffic), *between]
    shared = [members for _, held, _ in boundaries for members in held]
    opened = Counter(rank for members in (*groups, *lanes, *shared) for rank in members)
    position_of = dict(sorted((rank, position) for position, ranks in enumerate(positions.ranks) for rank in ranks))
    messages = sum(messages for _, _, messages in boundaries)
    communicators = tuple(opened[rank] for rank in position_of)
    memory = tuple(choice.memory[position].total for position in position_of.values())
    return DryRun(len(groups), len(lanes), len(shared), messages, communicators, memory, verify(lowered))


_Traffic: TypeAlias = Sequence[tuple[Edge, Direction]]


def _lanes_of_modules(choice: Choice, used: _Traffic) -> Iterator[tuple[int, ...]]:
    """The ranks of each lane inside a module."""
    shape, graph = choice.shape, choice.shape.placed.graph
    for part in shape.parts:
        first = graph.stage(part.module, 0)
        own = range(first, graph.stage(part.module, -1) + 1)
        traffic = [
            (Edge(edge.source - first, edge.destination - first), direction)
            for edge, direction in used
            if edge.source in own and edge.destination in own
        ]
        for ranks in choice.arrangement.grids[part.module].groups("pp") if traffic else ():
            for lane in pipeline_lanes(ranks, placement=shape.stage_places[part.module], traffic=traffic):
                yield lane.pair


def _boundaries(
    choice: Choice, used: _Traffic
) -> Iterator[tuple[Collection[tuple[int, int]], Collection[tuple[int, ...]], int]]:
    """Lanes, groups, and messages of a microbatch, of each direction of the boundaries on edges ``used``.

    Modules that share ranks have groups for both directions. The tensor is a small one that all context-parallel ranks
    can cut: ``[microbatch, sequence, 1]``.
    """
    sequence = math.lcm(*(2 * part.cp for part in choice.shape.parts))
    sizes = Sizes((choice.microbatch, sequence, 1), axes=_AXES)
    for edge, source, destination in choice.shape.sides():
        collective = edge in choice.shape.collectives
        if collective:
            all_of_it = tuple(sorted({*source.ranks, *destination.ranks}))
            yield (), (all_of_it, *_copies(source), *_copies(destination)), 0
        for direction in (direction for other, direction in used if other == edge):
            backward = direction is Direction.BACKWARD
            plan = plan_reshard(source, destination, sizes, backward=backward)
            check_plan(plan)
            messages = sum(message.source != message.destination for message in plan.messages)
            lanes = () if collective else routes(source, destination, _AXES, backward=backward)
            groups = () if collective else _copies(source if backward else destination)
            yield lanes, tuple(groups), messages


def _copies(side: Side) -> Iterator[tuple[int, ...]]:
    """The ranks that hold the same part."""
    return (ranks for ranks in side.classes.values() if len(ranks) > 1)
