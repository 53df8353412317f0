"""What a step function runs: this rank's stages in the graph of its communicator, and the proved plan. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any, TypeAlias

from attrs import evolve, frozen

from pipegrid.core.edge import Edge
from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Count, Name, checked, shown
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators import find_schedule, interleaved_1f1b, looped_placement, routed, schedule_for
from pipegrid.plans.passes.lowering import Receives, lower
from pipegrid.plans.passes.sharding import Shard
from pipegrid.plans.plan import ActionKind, Plan, Routes, as_placement, require_graph
from pipegrid.plans.verify import Proof, verify
from pipegrid.schedules.megatron.config import checked_option, option
from pipegrid.transport.base import Communicator
from pipegrid.transport.job import JobTopology

Ties: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The name and the stages of each tied parameter."""
Sharding: TypeAlias = tuple[str | tuple[tuple[str, str], ...], int] | None
"""``shard`` and ``prefetch`` of `lower` as a key of a cache."""


def sharding_key(shard: Shard | None, prefetch: int) -> Sharding:
    """``shard`` and ``prefetch`` as a `Sharding`."""
    name = tuple(sorted(shard.items())) if isinstance(shard, Mapping) else shard
    return None if name is None else (name, prefetch)


@frozen
class PlanNeeds:
    """What the plan of a step has besides its schedule; compared and hashed by value, for the caches of proofs."""

    num_microbatches: int  # the most that a replica has, where they differ by ``routes``
    ties: Ties = ()
    sharding: Sharding = None
    routes: Routes | None = None

    def proof(self, computes: Plan, **options: Any) -> Proof:
        """The proof of ``computes``, led along the routes and lowered with ``options``."""
        if self.routes is not None:
            computes = routed(computes, self.routes)
        window = None
        if self.sharding is not None:
            shard, prefetch = self.sharding
            options |= {"shard": shard if isinstance(shard, str) else dict(shard), "prefetch": prefetch}
            window = prefetch + 1
        return verify(lower(computes, tied=dict(self.ties), proved=True, **options), window=window)


@frozen(slots=False)
class Place:
    """The module graph of a job, and this rank's stages in it.

    Attributes:
        graph: the modules.
        stages: the stages on this rank, ascending.
        placement: the positions of each stage; None is one position per stage.
        collectives: the edges between modules on the same ranks that need a ``COLLECTIVE``.
        frozen: modules without gradients.
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

    @cached_property
    def held(self) -> dict[str, list[int]]:
        """The stages on this rank by module."""
        return {name: [one for one in self.stages if self.module_of(one) == name] for name in self.modules}


@lru_cache(maxsize=64)
def one_module(depth: int) -> ModuleGraph:
    """The graph of a pipeline of one module."""
    return ModuleGraph({"model": depth})


def require_job(communicator: Any) -> JobTopology:
    """The job of ``communicator``: this rank's stage in a chain, or its stages in a graph; else StepArgumentError."""
    job = communicator.job if isinstance(communicator, Communicator) else JobTopology()
    if job.graph is None and not job.total_stages:
        raise StepArgumentError(
            f"p2p_communicator is {shown(communicator)}; it must be a Communicator whose job has stages (there is no "
            "global state): pass P2PCommunicator(pp_group, config) or MultiModulePipelineCommunicator(grids, "
            "topology, config)"
        )
    return job


def place_of(communicator: Any, *, several: bool = False, num_chunks: int = 1) -> Place:
    """The place of this rank by its communicator; with ``several``, a rank may have several stages of a module.

    The stages of a pipeline of one module are those of its communicator's placement, or ``num_chunks`` on each rank.
    """
    job = require_job(communicator)
    graph = job.graph
    if graph is None:
        ranks, here = job.total_stages, job.current_stage
        if not several:
            return Place(one_module(ranks), (here,))
        placement = job.placement or as_placement(looped_placement(ranks, ranks * num_chunks))
        stages = tuple(stage for stage, places in enumerate(placement) if here in places)
        return Place(one_module(len(placement)), stages, placement=placement)
    place = Place(graph, job.stages, job.placement, job.collective_edges, job.frozen_modules)
    if not place.stages:
        raise StepArgumentError("this rank holds no stage of any module; the other ranks alone call the step function")
    if not several and len(place.modules) != len(place.stages):
        raise StepArgumentError(
            f"this rank holds the stages {[graph.module_of(stage) for stage in place.stages]}; this step function runs "
            "one of each module, get_forward_backward_func(schedule=...) several"
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
    schedule: str = "1f1b",
    shard: Shard | None = None,
    prefetch: int = 1,
    num_slices: int = 1,
    routes: Routes | None = None,
    overlap: bool = False,
) -> Plan:
    """The verified plan of a step function, cached: for drawing, simulation, or a recording.

    ``schedule`` is the name of one that trains, and ``num_slices`` as there (`schedule_for`).
    ``tied`` is the name and the stages of each tied parameter (`tied_stages`); the others are ``positions.placement``,
    ``collective_edges`` and ``frozen_modules`` of a `MultiModulePipelineCommunicator`, and of `lower`. With ``routes``
    the plan is of all replicas (`routed`), and ``num_microbatches`` the most that one of them has. ``overlap``:
    forwards and backwards run together (``overlap_moe_expert_parallel_comm`` of the config).

    Raises:
        PlanError: as `schedule_for` and `lower`.

    Examples:
        >>> step_plan(chain(2), 4, schedule="zero_bubble_h1").num_microbatches
        4
    """
    require_graph(graph)
    placed = None if placement is None else as_placement(placement)
    place = Place(graph, (), placed, tuple(collectives), checked(frozen, tuple[Name, ...], "frozen", PlanError))
    count = checked(num_microbatches, Count, "num_microbatches", PlanError)
    ties = tuple((name, tuple(stages)) for name, stages in tied)
    needs = PlanNeeds(count, ties, sharding_key(shard, prefetch), routes)
    slices = checked(num_slices, Count, "num_slices", PlanError)
    return step_proof(place, needs, find_schedule(schedule).name, slices, overlap=overlap).plan


def step_proof(place: Place, needs: PlanNeeds, schedule: str, num_slices: int, *, overlap: bool = False) -> Proof:
    """The proof of `step_plan`, cached: the runtime takes it as it is. ``place``: without stages, of all positions."""
    prove = _step_proof if needs.routes is None else _routed_proof
    return prove(place, needs, schedule, num_slices, overlap)


def _prove(place: Place, needs: PlanNeeds, schedule: str, num_slices: int, overlap: bool) -> Proof:
    graph, count, at = place.graph, needs.num_microbatches, place.placement
    computes = schedule_for(graph, schedule, count, placement=at, forward_only=place.frozen, num_slices=num_slices)
    if overlap:
        if len(graph.modules) > 1 or place.frozen or needs.routes is not None:
            raise PlanError(f"{schedule} has pairs of one module that is trained, on replicas that act alike")
        chunks = graph.num_stages // computes.num_positions
        computes = find_schedule(schedule).plan(computes.num_positions, count, chunks, overlap=True)
    collectives = {edge: f"bridge-{edge.source}-{edge.destination}" for edge in place.collectives}
    return needs.proof(computes, collectives=collectives)


_step_proof = lru_cache(maxsize=64)(_prove)
_routed_proof = lru_cache(maxsize=8)(_prove)  # with routes: a plan of all replicas is large, and data brings others


@lru_cache(maxsize=64)
def interleaved_proof(
    num_ranks: int, num_chunks: int, needs: PlanNeeds, group_size: int, receives: Receives, overlap: bool
) -> Proof:
    """The proof of the plan of the interleaved step function, cached. Pure."""
    count = needs.num_microbatches
    computes = interleaved_1f1b(num_ranks, count, num_chunks=num_chunks, group_size=group_size, overlap=overlap)
    return needs.proof(computes, receives=receives)


def forwards_on(plan: Plan, position: int, stage: int) -> dict[int, int]:
    """By microbatch of ``stage``, in order, the number of earlier forwards (of any stage) on ``position``."""
    forwards = [action for action in plan.actions(position) if action.kind is ActionKind.F]
    return {action.microbatch or 0: place for place, action in enumerate(forwards) if action.stage == stage}


def checkpointed_on(plan: Plan, position: int, stage: int, partial: int) -> frozenset[int]:
    """The microbatches of ``stage`` that checkpoint all activations: all but the first few of each window in flight.

    ``partial`` is how many follow the model's own setting, of each window of forwards (of any stage) on ``position``:
    those before its first backward.
    """
    computes = [action.kind for action in plan.actions(position) if action.kind.is_compute]
    window = len(list(takewhile(lambda kind: kind is ActionKind.F, computes)))
    forwards = forwards_on(plan, position, stage)
    return frozenset(microbatch for microbatch, place in forwards.items() if place % window >= partial)


def place_in_job(kind: StepKind, communicator: Any, model: Any) -> Place:
    """This rank's stages by the communicator; without a placement, every rank has as many as there are models."""
    chunks = len(model) if isinstance(model, (list, tuple)) else 1
    return place_of(communicator, several=kind.several, num_chunks=chunks)


def place_alone(_: StepKind, communicator: Any, _model: Any) -> Place:
    """The only stage."""
    stages = 1 if communicator is None else require_job(communicator).total_stages
    if stages != 1:
        raise StepArgumentError(f"p2p_communicator has {stages} stages; pp_size={stages} gives the function for them")
    return Place(one_module(1), (0,))


def place_round_robin(_: StepKind, communicator: Any, model: Any) -> Place:
    """Every ``ranks``-th stage of one module, from this rank's on."""
    job = require_job(communicator)
    if job.graph is not None:
        raise StepArgumentError(
            "p2p_communicator serves a graph of modules; get_forward_backward_func(schedule='interleaved_1f1b') "
            "interleaves them"
        )
    chunks = job.num_chunks or (len(model) if isinstance(model, Sequence) else 1)
    if chunks < 2:
        given = f"a {type(model).__name__} of {len(model)}" if isinstance(model, Sequence) else shown(model)
        raise StepArgumentError(
            f"model is {given}; interleaving takes a list of at least two chunks. With one, use "
            "forward_backward_pipelining_without_interleaving"
        )
    ranks = job.total_stages
    return Place(one_module(ranks * chunks), tuple(range(job.current_stage, ranks * chunks, ranks)))


def proof_of_schedule(kind: StepKind, place: Place, needs: PlanNeeds, config: Any) -> Proof:
    """The plan of the schedule over the graph of modules."""
    overlap = bool(option(config, "overlap_moe_expert_parallel_comm"))
    return step_proof(evolve(place, stages=()), needs, kind.schedule, kind.num_slices, overlap=overlap)


def proof_of_interleaving(_: StepKind, place: Place, needs: PlanNeeds, config: Any) -> Proof:
    """Interleaved 1F1B with the groups of microbatches, the receives and the pairs of ``config``."""
    chunks, count = len(place.stages), needs.num_microbatches
    ranks = place.graph.num_stages // chunks
    group_size = checked_option(config, "microbatch_group_size_per_vp_stage") or ranks
    if not ranks <= group_size <= count or 0 < count % group_size < ranks:
        raise StepArgumentError(
            f"{count} microbatches in groups of {group_size} over {ranks} ranks: the interleaved step "
            "needs ranks <= group size <= microbatches, and a last group that is full or has at least as many "
            "microbatches as ranks. A PipelineRuntime runs interleaved_1f1b without this limit"
        )
    receives: Receives = "early" if option(config, "overlap_p2p_comm") else "late"
    overlap = bool(option(config, "overlap_moe_expert_parallel_comm"))
    return interleaved_proof(ranks, chunks, needs, group_size, receives, overlap)


@frozen
class StepKind:
    """What a step function runs; calls of equal kinds may share a plan."""

    schedule: str  # as in `schedule_for`, and its slices
    num_slices: int = 1
    several: bool = True  # a rank may have several stages of a module
    place: Callable[[StepKind, Any, Any], Place] = place_in_job
    proof: Callable[[StepKind, Place, PlanNeeds, Any], Proof] = proof_of_schedule


NO_PIPELINE = StepKind("1f1b", several=False, place=place_alone)
ONE_STAGE_EACH = StepKind("1f1b", several=False)
INTERLEAVED = StepKind("interleaved_1f1b", place=place_round_robin, proof=proof_of_interleaving)
