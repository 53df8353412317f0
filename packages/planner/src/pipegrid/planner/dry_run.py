"""Everything that the ranks of a choice would open, made as data and checked: groups, lanes, boundaries, plans.

Pure: the same functions that communicators call on ranks, for all ranks at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from attrs import field, frozen

from pipegrid.bridges import Side, Sizes, axis_names, check_plan, plan_reshard, positions_of, routes
from pipegrid.planner.choice import Choice
from pipegrid.planner.errors import JobError
from pipegrid.schedules import lower, verify
from pipegrid.schedules.verify import Proof
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.pipeline_lanes import pipeline_lanes

_AXES = axis_names(3)


@frozen(slots=False)
class DryRun:
    """What the ranks of a job open together. A communicator has a stream of its own on NCCL.

    ``groups``: of tp, cp, dp and pp, with more than one rank. ``lanes``: between ranks, one per direction.
    ``boundaries``: groups of the boundaries between modules that share ranks. ``messages``: of all boundaries, for one
    microbatch forward and back, each box proved to arrive once. ``communicators``: per rank, groups and lanes.
    ``memory``: per rank, bytes.
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


def dry_run(choice: Choice) -> DryRun:
    """Make and check what all ranks of ``choice`` open, without a process.

    Checked: ranks that the plan puts on a position hold its stages; every lane has two ends; the boxes of each boundary
    tile what each rank needs, forward and back; the plan is proved with its communication.

    Raises:
        JobError: positions of the plan that are not those of the grids.
    """
    shape, grids = choice.shape, choice.arrangement.grids
    graph = shape.wiring.graph
    places = shape.stage_places
    positions = positions_of(graph, grids, places)
    if positions.placement != shape.wiring.placement:
        raise JobError(f"the grids have positions {positions.placement}, the plan {shape.wiring.placement}")
    opened: Counter[int] = Counter()
    groups = lanes = boundaries = messages = 0
    for grid in grids.values():
        for dim in grid.dim_names:
            for ranks in grid.groups(dim) if grid.size_of(dim) > 1 else ():
                groups += 1
                opened.update(ranks)
    lowered = lower(choice.plan, collectives=shape.collectives)
    used = lowered.traffic
    for part in shape.parts:
        first = graph.stage(part.module, 0)
        own = range(first, graph.stage(part.module, -1) + 1)
        traffic = [
            (Edge(edge.source - first, edge.destination - first), direction)
            for edge, direction in used
            if edge.source in own and edge.destination in own
        ]
        if traffic:
            for ranks in grids[part.module].groups("pp"):
                for lane in pipeline_lanes(ranks, placement=places[part.module], traffic=traffic):
                    lanes += 1
                    opened.update(lane.pair)
    for first_module, next_module, source, destination in shape.sides:
        edge = Edge(graph.stage(first_module, -1), graph.stage(next_module, 0))
        for direction in Direction:
            backward = direction is Direction.BACKWARD
            if (edge, direction) in used:
                plan = plan_reshard(source, destination, _sizes(choice), backward=backward)
                check_plan(plan)
                messages += sum(message.source != message.destination for message in plan.messages)
        if edge in shape.collectives:
            all_of_it = tuple(sorted({*source.ranks, *destination.ranks}))
            for members in (all_of_it, *_copies(source), *_copies(destination)):
                boundaries += 1
                opened.update(members)
            continue
        for direction in Direction:
            if (edge, direction) in used:
                pairs = routes(source, destination, _AXES, backward=direction is Direction.BACKWARD)
                lanes += len(pairs)
                opened.update(rank for pair in pairs for rank in pair)
                for members in _copies(source if direction is Direction.BACKWARD else destination):
                    boundaries += 1
                    opened.update(members)
    position_of = {rank: position for position, ranks in enumerate(positions.ranks) for rank in ranks}
    ranks_of_job = sorted(position_of)
    return DryRun(
        groups,
        lanes,
        boundaries,
        messages,
        tuple(opened[rank] for rank in ranks_of_job),
        tuple(choice.memory[position_of[rank]].total for rank in ranks_of_job),
        verify(lowered),
    )


def _copies(side: Side) -> Iterator[tuple[int, ...]]:
    """The ranks that hold the same part."""
    return (ranks for ranks in side.classes.values() if len(ranks) > 1)


def _sizes(choice: Choice) -> Sizes:
    """A small tensor that all context-parallel ranks can cut: ``[microbatch, sequence, 1]``."""
    sequence = math.lcm(*(2 * part.cp for part in choice.shape.parts))
    return Sizes((choice.microbatch, sequence, 1), axes=_AXES)
