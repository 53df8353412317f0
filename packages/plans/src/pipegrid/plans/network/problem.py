"""The input of the schedulers, a `Problem`, and the orders that they return."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TypeAlias

from attrs import frozen

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.plan import ActionKind, stages_on
from pipegrid.plans.simulate import Costs, with_slack

Entries: TypeAlias = list[tuple[ActionKind, int, int]]
"""The order of a position as kind, stage, microbatch."""


@frozen
class Problem:
    """A graph on positions, its costs, and the memory of each position.

    ``activation``: per stage, the memory of one microbatch, in the unit of ``memory_limit`` (infinite: none).
    ``forward_only``: stages without a backward; their results wait for each consumer in a queue of ``ahead``
    microbatches (None: of any length).
    """

    graph: ModuleGraph
    placement: tuple[tuple[int, ...], ...]
    num_microbatches: int
    costs: Costs
    activation: tuple[float, ...]
    memory_limit: float
    forward_only: frozenset[int] = frozenset()
    ahead: int | None = None

    @property
    def num_positions(self) -> int:
        """Positions of the placement."""
        return 1 + max(position for places in self.placement for position in places)

    @property
    def room(self) -> float:
        """The memory limit, as sums of activations are compared to it."""
        return with_slack(self.memory_limit)

    @property
    def is_chain(self) -> bool:
        """Whether the stages are a chain, each trained and on one position."""
        ends = [(edge.source, edge.destination) for edge in self.graph.stage_edges]
        is_line = ends == list(itertools.pairwise(range(self.graph.num_stages)))
        return is_line and not self.forward_only and all(len(places) == 1 for places in self.placement)

    @property
    def input_release(self) -> list[float]:
        """Per stage, the share of its activation that ``I`` releases."""
        return self.costs.per_stage("input_release", self.graph.num_stages)

    @property
    def queues(self) -> tuple[Edge, ...]:
        """The edges whose messages wait in a bounded queue."""
        edges = () if self.ahead is None else self.graph.stage_edges
        return tuple(edge for edge in edges if edge.source in self.forward_only)

    def least_memory(self) -> float:
        """The memory of one microbatch on the position where it needs most: the least limit that works."""
        held = stages_on(self.placement).values()
        return max(memory_of_one(stages, self.activation, self.forward_only) for stages in held)


def memory_of_one(stages: Collection[int], activation: Sequence[float], forward_only: Collection[int]) -> float:
    """The memory of one microbatch in ``stages`` of a position: a frozen one holds its own while it runs."""
    kept = sum(activation[stage] for stage in stages if stage not in forward_only)
    return kept + max((activation[stage] for stage in stages if stage in forward_only), default=0.0)
