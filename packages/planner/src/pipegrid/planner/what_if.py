"""Another schedule, cut or number of microbatches for a run that was recorded: its step time, predicted."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from attrs import evolve, field, frozen

from pipegrid.core.fields import Count, checked_arguments
from pipegrid.core.graph import ModuleGraph
from pipegrid.planner.errors import JobError
from pipegrid.plans import ActionKind, Costs, Plan, Simulation, lower, schedule_for, simulate, stage_places
from pipegrid.timeline import Recording, recorded_costs


@frozen(slots=False)
class WhatIf:
    """A recorded step beside another plan at the same costs; times in seconds.

    Attributes:
        recording: the recorded step.
        measured: its time, from its first start to its last end.
        reproduced: its plan at the costs that were measured; what it differs from ``measured`` is the error of the
            model.
        other: the plan asked for, at these costs.
    """

    recording: Recording = field(repr=False)
    measured: float
    reproduced: Simulation = field(repr=False)
    other: Simulation = field(repr=False)

    @property
    def gathers(self) -> int:
        """``UNSHARD`` actions of the recorded plan: gathers of parameters, which neither simulation has the time of."""
        plan = self.recording.plan
        kinds = (action.kind for position in range(plan.num_positions) for action in plan.actions(position))
        return sum(kind is ActionKind.UNSHARD for kind in kinds)

    @property
    def predicted(self) -> float:
        """Seconds of a step of the other plan."""
        return self.other.makespan


@checked_arguments(JobError)
def what_if(
    recording: Recording,
    *,
    schedule: str,
    pp: Count | None = None,
    chunks: Count | None = None,
    microbatches: Count | None = None,
    input_share: float = 0.5,
) -> WhatIf:
    """Predict a step of the recorded model under ``schedule``, cut into ``pp`` x ``chunks`` stages.

    The batch of a step stays: with other ``microbatches`` each is larger or smaller, and computes and activations in
    proportion. Cut anew, a chain's stages take equal shares of the recorded ones, neighbours together. Several modules
    keep their depths and positions; ``pp`` and ``chunks`` are then those of the module with the loss.

    Args:
        recording: of one step, with a track of every position at least.
        schedule: its name, such as ``"zero_bubble_v"``.
        pp: positions of the module; None: as recorded.
        chunks: stages on each of them; None: the schedule's own number.
        microbatches: of a step; None: as recorded.
        input_share: see `recorded_costs`.

    Raises:
        JobError: a number below 1, a cut of several modules that they do not have, or a schedule with backwards that
            the recorded step did not run.
        PlanError: no such schedule, or one that does not fit.
        CostsError: a position without a track.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> from pipegrid.timeline import Recorded, Recording, Track
        >>> times = [Recorded(0, 0.0, 1.0), Recorded(1, 1.0, 3.0)]  # the forward and the backward
        >>> found = what_if(Recording(gpipe(1, 1), [Track(0, 0, times)]), schedule="gpipe", microbatches=2)
        >>> found.measured, found.predicted
        (3.0, 3.0)
    """
    plan, costs = recording.plan, recorded_costs(recording, input_share=input_share)
    starts = [action.start for track in recording.tracks for action in track.actions]
    ends = [action.end for track in recording.tracks for action in track.actions]
    count = plan.num_microbatches if microbatches is None else microbatches
    reproduced = simulate(plan, costs)
    computes = _other(plan, schedule, pp, chunks, count)
    untrained = [*computes.forward_only] if computes.graph == plan.graph else []  # cut anew, all stages have backwards
    if unmeasured := [stage for stage in plan.forward_only if stage not in untrained]:
        raise JobError(
            f"schedule {schedule!r} runs backwards of stages {unmeasured}, which the recorded step did not; record a "
            "training step"
        )
    if computes.graph.stage_edges != plan.graph.stage_edges:
        hops = [seconds for _, seconds in costs.latency] if isinstance(costs.latency, tuple) else [0.0]
        costs = evolve(costs, latency=mean(hops), REDUCE=_most(costs.REDUCE), COLLECTIVE=_most(costs.COLLECTIVE))
        costs = costs.cut_into(computes.num_stages, slices=plan.num_positions)
    made = lower(computes, collectives={edge: group.name for group in plan.groups for edge in group.edges})
    scaled = _scaled(costs, plan.num_microbatches / count)
    return WhatIf(recording, max(ends) - min(starts), reproduced, simulate(made, scaled))


def _most(cost: float | Sequence[float]) -> float:
    return max(cost) if isinstance(cost, Sequence) else cost


def _scaled(costs: Costs, factor: float) -> Costs:
    """The costs of microbatches that are ``factor`` times as large."""
    scaled: dict[str, Any] = {}
    for name in ("F", "I", "W", "B", "activation"):
        value = getattr(costs, name)
        if value is not None:
            scaled[name] = tuple(one * factor for one in value) if isinstance(value, tuple) else value * factor
    return evolve(costs, **scaled)


def _other(plan: Plan, schedule: str, pp: int | None, chunks: int | None, count: int) -> Plan:
    """The plan of computes of ``schedule`` for the modules of ``plan``."""
    graph = plan.graph
    (main,) = graph.sinks if len(graph.sinks) == 1 else graph.order[-1:]
    own = range(graph.stage(main, 0), graph.stage(main, -1) + 1)
    held = sorted({position for stage in own for position in plan.placement[stage]})
    frozen = [name for name, _ in graph.modules if graph.stage(name, 0) in plan.forward_only]
    if len(graph.modules) == 1:
        places = stage_places(schedule, len(held) if pp is None else pp, chunks)
        return schedule_for(ModuleGraph([(main, len(places))]), schedule, count, placement=places)
    if pp is not None and pp != len(held):
        raise JobError(
            f"pp is {pp}; {main!r} was recorded on {len(held)} positions beside other modules, and a recording says "
            "nothing of another cut among them: plan a job file"
        )
    depth = graph.depth(main)
    places = stage_places(schedule, len(held), depth // len(held) if chunks is None else chunks)
    if len(places) != depth:
        raise JobError(f"chunks is {chunks}; {main!r} was recorded with {depth} stages on {len(held)} positions")
    placement = [*plan.placement[: own.start], *((held[place],) for place in places)]
    return schedule_for(graph, schedule, count, placement=placement, forward_only=frozen)
