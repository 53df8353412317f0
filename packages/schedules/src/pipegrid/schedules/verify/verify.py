"""The proof that a plan can be run: nothing missing, nothing twice, in time, and no cycle of waiting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from attrs import frozen

from pipegrid.schedules.arguments import require_choice, shown
from pipegrid.schedules.errors import Fault, PlanError
from pipegrid.schedules.plan import step_text
from pipegrid.schedules.plan.plan import Plan, require_plan
from pipegrid.schedules.verify.creation import check_creation
from pipegrid.schedules.verify.deadlock import Program, cycles, play
from pipegrid.schedules.verify.event_ids import EventIds
from pipegrid.schedules.verify.explain import who_sets
from pipegrid.schedules.verify.lanes import SharedLane, check_groups, check_lanes, share_lanes
from pipegrid.schedules.verify.position import PositionVerifier
from pipegrid.schedules.verify.table import PositionTable

Lanes: TypeAlias = Literal["separate", "shared"]


@frozen
class Proof:
    """What `verify` has proved of a plan.

    ``communicates`` is False for a plan of computes alone, where what one position makes is taken to reach
    the others at once. ``peak_live``: per position, the most activations live at once, in microbatches: a
    stage of n on its position counts 1/n of one and is live from its ``F`` to the end of its ``B`` or ``W``;
    ``peak_live_inputs``: the same, to the end of its ``B`` or ``I``.
    """

    num_positions: int
    num_microbatches: int
    num_actions: int
    num_messages: int
    communicates: bool
    rendezvous: bool
    lanes: Lanes
    peak_live: tuple[float, ...]
    peak_live_inputs: tuple[float, ...]

    def __str__(self) -> str:
        if not self.communicates:
            blocking = "computes alone"
        elif self.rendezvous:
            blocking = f"no deadlock even if sends block, {self.lanes} lanes"
        else:
            blocking = f"no deadlock if sends are buffered, {self.lanes} lanes"
        return (
            f"{self.num_positions} positions, {self.num_microbatches} microbatches, "
            f"{self.num_actions} actions, {self.num_messages} messages: each once and in time; "
            f"{blocking}; at most {max(self.peak_live):g} microbatches live on a position"
        )


def verify(
    plan: Plan,
    *,
    rendezvous: bool = True,
    memory_limit: float | Sequence[float] | None = None,
    lanes: Lanes = "separate",
) -> Proof:
    """Prove that ``plan`` can be run, or list all that is wrong with it.

    Proved: every stage runs each microbatch forward once and backward once (``B``, or ``I`` and later ``W``)
    on each position that holds it; each compute finds what it needs, made before it on its position or
    received before it; each message is sent once and received once, in the same order on its lane; groups and
    lanes are created by all their members, and in orders that do not wait for each other; members name a
    group's collectives in one order; and no positions wait for each other in a cycle.

    ``rendezvous``: a batch of communications holds its position up until all partners have posted the batches
    with the other ends; inside, a batch is simultaneous. This is the worst that NCCL may do. Without it a
    send is buffered, a receive is posted, and only the compute that needs the data waits. ``lanes``: with
    ``"separate"``, each ordered pair of positions has a communicator for activations and one for gradients,
    and order matters within each; with ``"shared"``, a pair of positions has one, and their batches must
    match one to one. ``memory_limit``: the most microbatches (as `Proof` counts) that may be live on each
    position, one number for all or one per position.

    A plan of computes alone is checked as if data reached other positions at once.

    Time and memory are linear in the number of actions.

    Raises:
        PlanError: ``faults`` has every fault, with position and step; a cycle is printed action by action. It is
            looked for only where nothing else is wrong, since otherwise no one can say who waits for whom.
    """
    require_plan(plan)
    require_choice("lanes", lanes, ("separate", "shared"), error=PlanError)
    limits = _limits(memory_limit, plan)
    num_steps = sum(map(len, plan.positions))
    if plan.num_microbatches > num_steps:  # a compute is a step; refused before memory for each microbatch is taken
        message = f"{num_steps} steps cannot be the work of {plan.num_microbatches} microbatches"
        raise PlanError("the plan has 1 fault:", faults=(Fault("missing", message),))
    marks = EventIds(plan)
    checks = [
        PositionVerifier(PositionTable(marks, position, rendezvous=rendezvous), steps)
        for position, steps in enumerate(plan.positions)
    ]
    faults = _twins(plan) + list_faults(marks, checks, check_creation(plan, lanes=lanes), lanes=lanes)
    peaks = tuple(check.peak for check in checks)
    faults += [
        Fault("memory", f"{peak:g} microbatches are live at once; the limit is {limit:g}", position)
        for position, (peak, limit) in enumerate(zip(peaks, limits, strict=True))
        if peak > limit + 1e-9
    ]
    if faults:
        raise PlanError(f"the plan has {len(faults)} fault{'s' if len(faults) > 1 else ''}:", faults=faults)
    return Proof(
        num_positions=plan.num_positions,
        num_microbatches=plan.num_microbatches,
        num_actions=sum(check.num_actions for check in checks),
        num_messages=sum(len(sent) for check in checks for sent in check.sent.values()),
        communicates=plan.communicates,
        rendezvous=rendezvous,
        lanes=lanes,
        peak_live=peaks,
        peak_live_inputs=tuple(check.input_peak for check in checks),
    )


def _twins(plan: Plan) -> list[Fault]:
    """The faults of positions that are one: each is *the* class of ranks with its stages. Any may be empty."""
    first: dict[tuple[int, ...], int] = {}
    return [
        Fault(
            "position",
            f"holds stages {', '.join(map(str, stages))}, exactly as position {first[stages]} does; a position is all "
            "the ranks that hold the same stages (data lanes act alike), so make the two one",
            position,
        )
        for position, stages in enumerate(plan.stages_at)
        if stages and first.setdefault(stages, position) != position
    ]


def _limits(memory_limit: float | Sequence[float] | None, plan: Plan) -> Sequence[float]:
    if isinstance(memory_limit, str) or not isinstance(memory_limit, Sequence):
        return (as_limit(memory_limit),) * plan.num_positions
    if len(memory_limit) != plan.num_positions:
        raise PlanError(
            f"memory_limit has {len(memory_limit)} numbers and the plan {plan.num_positions} positions; give "
            "one number, or one per position"
        )
    return [as_limit(limit) for limit in memory_limit]


def as_limit(memory_limit: float | None) -> float:
    """``memory_limit`` as a number: infinite for None.

    Raises:
        PlanError: negative, or no number.
    """
    if memory_limit is None:
        return math.inf
    is_number = isinstance(memory_limit, int | float) and not isinstance(memory_limit, bool)
    if not is_number or not memory_limit >= 0:  # the comparison is False for nan, too
        raise PlanError(f"memory_limit is {shown(memory_limit)}; give a number from 0, or None for no limit")
    try:
        return float(memory_limit)
    except OverflowError:  # an integer above all floats
        return math.inf


def list_faults(
    marks: EventIds, checks: Sequence[PositionVerifier], creation: Sequence[Fault], *, lanes: Lanes
) -> list[Fault]:
    """Every fault of the steps: those found at each position, and those between positions.

    The cycles of waiting come last, as they say nothing where anything else, the ``creation`` included, is wrong.
    """
    faults = [fault for check in checks for fault in check.faults]
    faults += [*check_lanes(marks, checks), *check_groups(marks, checks), *creation]
    if faults:
        return faults
    programs, exchanges = [check.program for check in checks], list[SharedLane]()
    if lanes == "shared":
        shared = share_lanes(marks, [_blocking(check) for check in checks])
        if shared.faults:
            return shared.faults
        if checks[0].rules.rendezvous:
            programs, exchanges = shared.programs, shared.exchanges
    return _circle_faults(marks, checks, programs, exchanges)


def _blocking(check: PositionVerifier) -> PositionVerifier:
    """The same steps under a rendezvous: what a buffered send does not wait for must match all the same."""
    if check.rules.rendezvous:
        return check
    return PositionVerifier(PositionTable(check.rules.marks, check.position, rendezvous=True), check.steps)


def _circle_faults(
    marks: EventIds,
    checks: Sequence[PositionVerifier],
    programs: Sequence[Program],
    exchanges: Sequence[SharedLane],
) -> list[Fault]:
    at = play(programs, len(marks) + sum(own.most for own in exchanges))
    if all(index == len(program.operations) for index, program in zip(at, programs, strict=True)):
        return []
    faults = []
    for cycle in cycles(programs, at):
        lines = [
            f"\n      position {position}, step {step}: {step_text(checks[position].steps[step])} "
            f"waits for {who_sets(mark, marks, checks, exchanges)}"
            for position, step, mark in cycle
        ]
        position, step, _ = cycle[0]
        faults.append(
            Fault(
                "cycle",
                f"{len(cycle)} positions wait for each other in a cycle; move one of these actions, or "
                f"issue what waits as one batch{''.join(lines)}",
                position,
                step,
            )
        )
    return faults
