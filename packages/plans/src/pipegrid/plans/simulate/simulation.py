"""The times and memory of a plan: start and end of each action, idle time of positions, live memory.

The model: a position does one compute, or one pair, at a time, in its plan's order. A send or a receive only posts; a
message starts once both its ends are posted and its lane's earlier messages have left, and the compute that
needs it waits for it. `REDUCE` and `COLLECTIVE` in a group start when its last position arrives, and occupy
them all; so does a compute of a stage that lies on several positions, as its ranks may communicate inside it.
`UNSHARD` and `REDUCE_GRAD` run beside the computes of their position, one after the other; the next compute of a stage
waits until it is gathered. Copies to the host and back run beside the computes as well, one after the other each way;
`RELEASE` waits until a copy is there, and a backward until one is back.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property
from itertools import accumulate, repeat
from typing import Literal

from attrs import field, frozen

from pipegrid.core.fields import checked
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import COMPUTES, OFFLOADING, SHARDING, Action, ActionKind, Plan, require_plan, require_position
from pipegrid.plans.simulate.costs import Costs, CostsError, GivenCosts, activation_sizes
from pipegrid.plans.simulate.engine import Times, play
from pipegrid.plans.verify.memory import kept_by_action

_F, _B, _I = ActionKind.F, ActionKind.B, ActionKind.I


@frozen(slots=False)
class Simulation:
    """A plan played through.

    Attributes:
        plan: the plan.
        costs: of its actions.
        start: per position, when each action starts, in the order of `Plan.actions` and the unit of the costs; of a
            message, when its transfer starts, at both ends, not when it is posted.
        end: likewise, when each ends.

    Examples:
        >>> plan = gpipe(2, 1)
        >>> simulate(plan, unit_costs(plan)).end
        ((1.0, 6.0), (2.0, 4.0))
    """

    plan: Plan
    costs: Costs
    start: Times = field(repr=False)
    end: Times = field(repr=False)

    @cached_property
    def makespan(self) -> float:
        """The end of the last action; the first starts at 0."""
        return max((time for times in self.end for time in times), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per position, the time it computes (``F``, ``B``, ``I``, ``W``)."""
        spans = [{(start, end) for start, end, _ in computes} for computes in self._computes]  # that of a pair once
        return tuple(math.fsum(end - start for start, end in own) for own in spans)

    @cached_property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """Per position, when its first compute starts and its last one ends; (0, 0) without any."""
        return tuple((computes[0][0], computes[-1][1]) if computes else (0.0, 0.0) for computes in self._computes)

    @cached_property
    def span(self) -> float:
        """The longest of `spans`: the time of a step where positions step apart (the optimizer has no barrier)."""
        return max((last - first for first, last in self.spans), default=0.0)

    @cached_property
    def _computes(self) -> tuple[tuple[tuple[float, float, Action], ...], ...]:
        played = enumerate(zip(self.start, self.end, strict=True))
        rows = (zip(starts, ends, self.plan.actions(position), strict=True) for position, (starts, ends) in played)
        return tuple(tuple(one for one in row if one[2].kind.is_compute) for row in rows)

    def bubbles(self, *, of: Literal["makespan", "span"] = "makespan") -> tuple[float, ...]:
        """Per position, the share of time in which it does not compute: of the ``makespan``, or of its own ``span``.

        The span goes from its first start to its last end: waiting for the pipeline to fill and drain does not count.
        """
        lengths = zip(self.busy, self._lengths(of), strict=True)
        return tuple(1.0 - busy / length if length > 0 else 0.0 for busy, length in lengths)

    def bubble(self, *, of: Literal["makespan", "span"] = "makespan") -> float:
        """The share of all positions' time (makespan, or own spans) in which they do not compute."""
        whole = math.fsum(self._lengths(of))
        return 1.0 - math.fsum(self.busy) / whole if whole > 0 else 0.0

    def _lengths(self, of: str) -> list[float]:
        checked(of, Literal["makespan", "span"], "of", PlanError)
        if of == "makespan":
            return [self.makespan] * self.plan.num_positions
        return [last - first for first, last in self.spans]

    @cached_property
    def activation(self) -> tuple[float, ...]:
        """Per stage, the memory of one microbatch: ``costs.activation``, by default its share of a position."""
        return activation_sizes(self.plan, self.costs)

    @cached_property
    def input_release(self) -> tuple[float, ...]:
        """Per stage, the share of its memory that ``I`` releases."""
        return tuple(self.costs.per_stage("input_release", self.plan.num_stages))

    def live(self, position: int, *, until: Literal["W", "I"] = "W") -> tuple[tuple[float, float], ...]:
        """Live activations of ``position`` over time: ``(time, microbatches from then on)``.

        A stage's microbatch is live from the start of its ``F`` until the end of its ``W`` (or ``B``), less what
        the costs say that its ``I`` releases; with ``until="I"``, until the end of its ``I`` (or ``B``). A
        forward-only stage holds it during ``F``. A slice holds its share of that, by its length. What is offloaded
        is not live from the end of its ``RELEASE`` to its ``RELOAD``. A payload of an edge that skips stages counts
        ``costs.kept`` while the position keeps it: from the posting of its receive to the end of the ``B`` or ``I`` of
        the stage that it came to.
        """
        checked(until, Literal["W", "I"], "until", PlanError)
        require_position(position, self.plan)
        points: list[tuple[float, float]] = []
        lengths = self.costs.per_slice("slice_lengths", self.plan.num_slices)
        held = now = 0.0
        kept = self.costs.per_edge("kept", self.plan.graph.skips)
        times = zip(self.start[position], self.end[position], self.plan.actions(position), strict=True)
        keeps = kept_by_action(self.plan, position) if any(kept.values()) else repeat(((), ()))
        for (start, end, action), (came, gone) in zip(times, keeps, strict=False):
            kind = action.kind
            part, left = lengths[action.slice or 0], sum(kept[edge] for edge in gone)
            if came:
                held += sum(kept[edge] for edge in came) * part
                points.append((now if kind is ActionKind.RECV_F else start, held))
            if kind not in COMPUTES and kind is not ActionKind.RELEASE and kind is not ActionKind.RELOAD:
                continue
            now = now if kind is ActionKind.RELOAD else max(now, end)  # its memory is taken before the copy starts
            size = self.activation[action.stage] * part
            if kind in OFFLOADING:
                held += size if kind is ActionKind.RELOAD else -size
                points.append((now, held))
                continue
            if action.kind is _F:
                held += size
                points.append((start, held))
                if action.stage in self.plan.forward_only:
                    held -= size + left * part
                    points.append((end, held))
                continue
            share = 1.0 if until == "I" else self.input_release[action.stage]
            released = 1.0 if action.kind is _B else share if action.kind is _I else 1.0 - share
            if released or left:
                held -= size * released + left * part
                points.append((end, held))
        return tuple((time, round(value, 9)) for time, value in points)

    def peaks(self, *, until: Literal["W", "I"] = "W") -> tuple[float, ...]:
        """Per position, the most live activations at any time, in microbatches (see `live`)."""
        every = (self.live(position, until=until) for position in range(self.plan.num_positions))
        return tuple(max((value for _, value in points), default=0.0) for points in every)

    def peak(self, *, until: Literal["W", "I"] = "W") -> float:
        """The most live activations of any position at any time, in microbatches (see `live`)."""
        return max(self.peaks(until=until))

    def gathered(self, position: int) -> tuple[tuple[float, float], ...]:
        """Memory of the sharded stages of ``position`` over time, in the unit of ``costs.parameters``.

        Gathered parameters count from the start of their ``UNSHARD`` to their ``RESHARD``, gradients that are not
        reduced from the first ``B`` or ``W`` after a ``REDUCE_GRAD`` to the end of the next.
        """
        require_position(position, self.plan)
        sizes = self.costs.per_stage("parameters", self.plan.num_stages)
        actions = list(self.plan.actions(position))
        sharded = {action.stage for action in actions if action.kind in SHARDING}
        changes: dict[float, float] = defaultdict(float)
        unreduced: set[int] = set()
        for start, end, action in zip(self.start[position], self.end[position], actions, strict=True):
            stage, size = action.stage, sizes[action.stage]
            if stage not in sharded:
                continue
            if action.kind is ActionKind.UNSHARD:
                changes[start] += size
            elif action.kind is ActionKind.RESHARD:
                changes[end] -= size
            elif action.kind is ActionKind.REDUCE_GRAD and stage in unreduced:
                unreduced.discard(stage)
                changes[end] -= size
            elif action.kind in (_B, ActionKind.W) and stage not in unreduced:
                unreduced.add(stage)
                changes[start] += size
        times = sorted(changes)
        held = accumulate(changes[time] for time in times)
        return tuple((time, round(value, 9)) for time, value in zip(times, held, strict=True))

    def gathered_peaks(self) -> tuple[float, ...]:
        """Per position, the most memory of sharded stages at any time (see `gathered`)."""
        every = map(self.gathered, range(self.plan.num_positions))
        return tuple(max((value for _, value in points), default=0.0) for points in every)


def unit_costs(plan: Plan) -> Costs:
    """F = I = W = 1 and B = 2 for a whole position, whose stages share that evenly. Communication is free.

    So every position has the same work, also in a U, whose head and tail are half a stage each.
    """
    require_plan(plan)
    shares = tuple(1.0 / beside for beside in plan.stages_beside)
    chunk = shares[0] if len(set(shares)) == 1 else shares
    return Costs(F=chunk, I=chunk, W=chunk)


def simulate(plan: Plan, costs: Costs | None = None) -> Simulation:
    """Play ``plan`` through; ``costs`` default to `unit_costs`.

    A plan of computes alone is taken to send each result at once and to receive ahead.

    Raises:
        PlanError: the plan gets stuck (`verify` says why), or an action is outside of it.
        CostsError: the costs are for another number of stages, or lack an edge of the plan.

    Examples:
        >>> simulation = simulate(zero_bubble_h1(4, 8), Costs(F=1, I=1, W=1))
        >>> simulation.makespan, simulation.peaks()
        (27.0, (4.0, 4.0, 4.0, 4.0))
    """
    require_plan(plan)
    costs = checked(costs, GivenCosts | None, "costs", CostsError) or unit_costs(plan)
    start, end, _ = play(plan, costs)
    return Simulation(plan, costs, start, end)
