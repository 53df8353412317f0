"""A candidate of the search, and what it costs: before its plan is made by true bounds, after it by simulation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Annotated, TypeAlias

from attrs import field, frozen

from pipegrid.core.fields import instance
from pipegrid.planner.grids import Arrangement
from pipegrid.planner.stages import Shape
from pipegrid.plans import SCHEDULES, ActionKind, Costs, Plan, PlanError, Simulation, schedule_for, simulate
from pipegrid.plans.verify import dataflow_of

FEW = 16  # microbatches of the chains that tell memory before a plan is made, at most


@frozen
class Memory:
    """The memory of a rank of one position, in bytes.

    Attributes:
        parameters: weights.
        gradients: of the weights.
        optimizer: its states.
        activations: at the peak of the step.
        communicators: their buffers.
        reserved: not the job's own.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    communicators: float
    reserved: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.communicators + self.reserved


def in_flight(plan: Plan) -> tuple[int, ...]:
    """The most microbatches whose activations each stage holds at once."""
    peaks = [0] * plan.num_stages
    for position in range(plan.num_positions):
        live: Counter[int] = Counter()
        for action in plan.actions(position):
            if action.kind is ActionKind.F:
                live[action.stage] += 1
                peaks[action.stage] = max(peaks[action.stage], live[action.stage])
                live[action.stage] -= action.stage in plan.forward_only
            elif action.kind in {ActionKind.B, ActionKind.W}:
                live[action.stage] -= 1
    return tuple(peaks)


@cache
def _splits(schedule: str) -> bool:
    return any(action.kind is ActionKind.W for action in SCHEDULES[schedule].plan(2, 4).actions(0))


@cache
def _chain_in_flight(schedule: str, pp: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """`in_flight` of the schedule on a chain; 1 where it is not for so many microbatches."""
    known = SCHEDULES[schedule]
    try:
        return in_flight(known.plan(pp, microbatches, chunks if known.chunks is None else None))
    except PlanError:
        return (1,) * (pp * chunks)


@frozen(slots=False, eq=False)
class Candidate:
    """Grids and layouts under a schedule.

    Attributes:
        shape: the grids and layouts.
        schedule: its name.
        microbatch: samples, over all replicas of a module.
    """

    shape: Shape = field(repr=False)
    schedule: str
    microbatch: int

    @property
    def arrangement(self) -> Arrangement:
        """The grids."""
        return self.shape.arrangement

    @property
    def layouts(self) -> dict[str, str]:
        """The layout of each module, as its canonical text."""
        parts = zip(self.shape.parts, self.shape.layouts, strict=True)
        return {part.module: str(layout) for part, layout in parts}

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        return self.shape.job.global_batch // self.microbatch

    def named_plan(self) -> Plan:
        """The schedule's plan of computes; `PlanError` where the schedule is not for this candidate."""
        placed, frozen = self.shape.placed, [module.name for module in self.shape.job.modules if module.frozen]
        count = self.num_microbatches
        return schedule_for(placed.graph, self.schedule, count, placement=placed.placement, forward_only=frozen)

    def least_seconds(self) -> float:
        """Lower bound of the seconds of a step, with backwards whole or split as in the schedule.

        A position begins when the forwards before it are done, and does all its work; after its last backward run
        those of the stages before it. With split backwards, its weight halves may run later.
        """
        bound, split = 0.0, _splits(self.schedule)
        for first, last, last_inputs, work, inputs in self.shape.position_bounds:
            whole = self.microbatch * first + work
            if split:
                bound = max(bound, whole, self.microbatch * (first + last_inputs) + inputs)
            else:
                bound = max(bound, whole + self.microbatch * last)
        return bound + self.shape.reduction

    def least_in_flight(self) -> tuple[int, ...]:
        """Lower bound, per stage, of microbatches held at once, from the schedule on a short chain; 1 if frozen."""
        shape, main, microbatches = self.shape, self.shape.parts[-1], self.num_microbatches
        if self.schedule == "1f1b":
            held = tuple(min(microbatches, distance + 1) for distance in shape.placed.graph.distance_to_sink)
        else:
            own = _chain_in_flight(self.schedule, main.pp, shape.chunks, min(microbatches, main.pp, FEW))
            before = microbatches if self.arrangement.colocated else 1  # an encoder on these ranks runs before
            held = (*[before] * (len(shape.stages) - len(own)), *own)
        return tuple(live if trained else 1 for live, trained in zip(held, shape.trained, strict=True))

    def least_memory(self, live: Sequence[int]) -> float:
        """Lower bound of the bytes of the fullest rank, with ``live`` microbatches in one of its stages."""
        shape = self.shape
        each = (
            sum(static) + max(live[s] * shape.stages[s].activations for s in stages) * self.microbatch
            for static, stages in zip(shape.static, shape.placed.held, strict=True)
        )
        return max(each) + shape.job.device.reserved

    def microbatch_costs(self) -> Costs:
        """Costs of its plans: seconds, and bytes of activations, of a microbatch on a rank."""
        shape, microbatch, links = self.shape, self.microbatch, self.shape.job.links
        once = [0.0] * len(shape.stages)  # latency of the collectives that belong to a stage
        for edge in shape.collectives:
            once[edge.source] += links.latency
        each = list(zip(shape.times, once, shape.trained, strict=True))
        edges = shape.placed.graph.stage_edges
        return Costs(
            F=tuple(f * microbatch + latency for (f, _, _), latency, _ in each),
            I=tuple(i * microbatch + latency * trained for (_, i, _), latency, trained in each),
            W=tuple(w * microbatch for (_, _, w), _, _ in each),
            latency=links.latency,
            overhead=shape.job.device.overhead,
            bandwidth=tuple((edge, shape.bandwidth(edge)) for edge in edges) or math.inf,
            message=tuple((edge, shape.message(edge) * microbatch) for edge in edges) or 0.0,
            activation=tuple(stage.activations * microbatch for stage in shape.stages),
        )

    def communicators(self, plan: Plan) -> list[float]:
        """Bytes of a rank's communicators, and of two messages on each of its lanes, by position."""
        shape, buffer = self.shape, self.shape.job.device.communicator
        held = ({shape.stages[s].part for s in stages} for stages in shape.placed.held)
        found = [buffer * sum((part.tp > 1) + (part.cp > 1) + (part.dp > 1) for part in parts) for parts in held]
        for flow in dataflow_of(plan).between_positions:
            if flow.edge in shape.collectives:
                continue
            for route in flow.routes:
                for position in route:
                    found[position] += buffer + 2 * shape.message(flow.edge) * self.microbatch
        return found

    def cost(self, plan: Plan | None = None) -> Choice:
        """Simulate the candidate under ``plan``, by default its schedule's, and add up the memory that it takes."""
        plan, costs = self.named_plan() if plan is None else plan, self.microbatch_costs()
        simulation, reserved = simulate(plan, costs), self.shape.job.device.reserved
        rows = zip(self.shape.static, simulation.peaks(), self.communicators(plan), strict=True)
        return Choice(
            self.shape,
            self.schedule,
            self.microbatch,
            plan,
            costs,
            simulation.makespan,
            max(simulation.busy),
            simulation.bubble(),
            tuple(Memory(*static, live, buffers, reserved) for static, live, buffers in rows),
        )


@frozen(slots=False, eq=False)
class Choice(Candidate):
    """A candidate with its plan and its figures in simulation; times in seconds, memory in bytes.

    Attributes:
        plan: of the schedule on the grids.
        costs: of its actions.
        makespan: of the step.
        busy: computes of the busiest position.
        bubble: idle share of all positions.
        memory: per position, of each rank.
    """

    plan: Plan = field(repr=False)
    costs: Costs = field(repr=False)
    makespan: float
    busy: float
    bubble: float
    memory: tuple[Memory, ...] = field(repr=False)

    @property
    def reduction(self) -> float:
        """Seconds of the sums of gradients over dp and cp, on the slowest position."""
        return self.shape.reduction

    @property
    def step(self) -> float:
        """Predicted seconds of a training step, without the optimizer's own: ``makespan + reduction``."""
        return self.makespan + self.reduction

    @property
    def peak(self) -> float:
        """Bytes of a rank of the fullest position."""
        return max(memory.total for memory in self.memory)

    @property
    def simulation(self) -> Simulation:
        """The plan at these costs."""
        return simulate(self.plan, self.costs)


GivenChoice: TypeAlias = Annotated[Choice, instance(Choice, "a Choice, such as plan(job, gpus=8).winner")]
