"""The stages of this rank in the graph that its communicator serves, and the plan of a step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from attrs import frozen

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.arguments import require_items, shown
from pipegrid.schedules.errors import PlanError, StepArgumentError
from pipegrid.schedules.generators import interleaved_1f1b, multi_module_1f1b
from pipegrid.schedules.lowering import Receives, lower
from pipegrid.schedules.megatron.counts import require_communicator
from pipegrid.schedules.plan import as_placement
from pipegrid.schedules.plan.plan import Plan, require_graph
from pipegrid.schedules.verify.verify import verify
from pipegrid.topology.fields import Count, checked
from pipegrid.transport.edge import Edge

Ties: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The name and the stages of each tied parameter."""


@frozen
class Place:
    """The job as its communicator has it, and this rank's part.

    Attributes:
        graph: the modules.
        stages: the stages on this rank, ascending.
        placement: per stage its positions; None gives each stage one of its own.
        collectives: the edges between modules on the same ranks that need a ``COLLECTIVE``.
        frozen: modules that get no gradient.
    """

    graph: ModuleGraph
    stages: tuple[int, ...]
    placement: tuple[tuple[int, ...], ...] | None = None
    collectives: tuple[Edge, ...] = ()
    frozen: tuple[str, ...] = ()

    def module_of(self, stage: int) -> str:
        """The module that a stage belongs to."""
        return self.graph.module_of(stage)[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules on this rank, in the order of their stages."""
        return tuple(dict.fromkeys(map(self.module_of, self.stages)))

    def by_stage(self, value: Any, name: str) -> dict[int, Any]:
        """What belongs to each of this rank's stages, of a mapping by module or of one thing for all of them.

        Raises:
            StepArgumentError: the mapping does not name exactly the modules on this rank.
        """
        if not isinstance(value, Mapping):
            return dict.fromkeys(self.stages, value)
        if set(value) != set(self.modules):
            raise StepArgumentError(
                f"{name} has entries for {sorted(value)}, but this rank runs the modules {sorted(self.modules)}; give "
                "one entry for each of them"
            )
        return {stage: value[self.module_of(stage)] for stage in self.stages}


@lru_cache(maxsize=64)
def one_module(depth: int) -> ModuleGraph:
    """The graph of a pipeline of one module."""
    return ModuleGraph({"model": depth})


def place_of(communicator: Any) -> Place:
    """What a communicator says of its job.

    Raises:
        StepArgumentError: it does not say; or this rank holds several stages of one module, none, or one that the graph
            does not have.
    """
    require_communicator(communicator)
    graph = getattr(communicator, "graph", None)
    if graph is None:
        return Place(one_module(communicator.total_stages), (communicator.current_stage,))
    positions = getattr(communicator, "positions", None)
    place = Place(
        graph,
        tuple(communicator.stages),
        placement=None if positions is None else positions.placement,
        collectives=tuple(getattr(communicator, "collective_edges", ())),
        frozen=tuple(getattr(communicator, "frozen_modules", ())),
    )
    if not place.stages:
        raise StepArgumentError("this rank holds no stage of any module; do not call a step function on it")
    if any(not 0 <= stage < graph.num_stages for stage in place.stages):
        raise StepArgumentError(
            f"this rank has stages {list(place.stages)}, but the communicator's graph has 0..{graph.num_stages - 1}"
        )
    if len(place.modules) != len(place.stages):
        names = [graph.module_of(stage) for stage in place.stages]
        raise StepArgumentError(
            f"this rank holds the stages {names}, several of one module; this step function runs one stage of each. "
            "Run virtual stages with PipelineRuntime and a plan that has them"
        )
    return place


def step_plan(
    graph: ModuleGraph,
    num_microbatches: int,
    tied: Ties = (),
    *,
    placement: tuple[tuple[int, ...], ...] | None = None,
    collectives: tuple[Edge, ...] = (),
    frozen: tuple[str, ...] = (),
) -> Plan:
    """The verified 1F1B plan that the step function runs: for drawing, simulating, or a recording.

    ``tied`` has the name and the stages of each tied parameter (`tied_stages`); the others are ``positions.placement``,
    ``collective_edges`` and ``frozen_modules`` of a `MultiModulePipelineCommunicator`. Pure, so remembering it
    changes nothing but the time of the second step.

    Raises:
        PlanError: an argument of another kind, or as `multi_module_1f1b` and `lower`.
    """
    require_graph(graph)
    num_microbatches = checked(num_microbatches, Count, "num_microbatches", PlanError)
    return _step_plan(
        graph,
        num_microbatches,
        _as_ties(tied),
        None if placement is None else as_placement(placement),
        require_items("collectives", collectives, Edge, "give a list of Edge(source, destination)", error=PlanError),
        require_items("frozen", frozen, str, "give a list of the names of modules", error=PlanError),
    )


def _as_ties(tied: Any) -> Ties:
    remedy = "give tied_stages(...), pairs of a name and its stages"
    ties = []
    for pair in require_items("tied", tied, tuple, remedy, error=PlanError):
        if len(pair) != 2 or not isinstance(pair[0], str):
            raise PlanError(f"tied holds {shown(pair)}; {remedy}")
        ties.append((pair[0], require_items(f"tied[{pair[0]!r}]", pair[1], int, remedy, error=PlanError)))
    return tuple(ties)


@lru_cache(maxsize=64)
def _step_plan(
    graph: ModuleGraph,
    num_microbatches: int,
    tied: Ties,
    placement: tuple[tuple[int, ...], ...] | None,
    collectives: tuple[Edge, ...],
    frozen: tuple[str, ...],
) -> Plan:
    plan = lower(
        multi_module_1f1b(graph, num_microbatches, placement=placement, forward_only=frozen),
        collectives={edge: f"bridge-{edge.source}-{edge.destination}" for edge in collectives},
        tied=dict(tied),
    )
    verify(plan)
    return plan


@lru_cache(maxsize=64)
def interleaved_plan(
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group_size: int,
    receives: Receives = "late",
    tied: Ties = (),
    extra_warmup: int = 0,
) -> Plan:
    """The verified plan that the interleaved step function runs. Pure."""
    plan = lower(
        interleaved_1f1b(
            num_ranks, num_microbatches, num_chunks=num_chunks, group_size=group_size, extra_warmup=extra_warmup
        ),
        receives=receives,
        tied=dict(tied),
    )
    verify(plan)
    return plan
