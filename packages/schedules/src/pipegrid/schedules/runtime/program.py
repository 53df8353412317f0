"""The program of one position: its actions as calls in a row, bound once to the queues and stages that they work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from attrs import define, evolve, frozen

from pipegrid.core.edge import Direction
from pipegrid.core.errors import StepArgumentError
from pipegrid.plans.plan import Action, ActionKind, Actor, Plan, actions_of, step_text
from pipegrid.plans.plan.parts import is_pair
from pipegrid.schedules.runtime.actions import Bound, Call, Effect, PairEffect, batched, bind, in_turn, together
from pipegrid.schedules.runtime.position import BoundPosition
from pipegrid.schedules.runtime.stages.hooks import Hook, HostLead
from pipegrid.schedules.runtime.stages.sharded import in_evaluation


@frozen(eq=False)
class Program:
    """Calls in a row, the actions of each step of the plan, and per call the number of its step."""

    calls: tuple[Call, ...]
    steps: tuple[tuple[Action, ...], ...]
    step_of: tuple[int, ...]


@define(eq=False)
class Cursor:
    """Where a rank is in its program, for errors, the monitor and the flight recorder: the call that runs.

    ``position``: or the actor, where the plan has routes. ``at``: the number of the call; -1 before the first, and that
    of all calls past the last. The runtime sets it, and the ``program`` of the running step.
    """

    plan: Plan
    rank: int | None
    position: int
    program: Program
    at: int = -1

    @property
    def where(self) -> str:
        """The place in the plan: "position 1, step 12 of 40: 1F3"."""
        place = f"position {self.position}"
        if self.plan.routes is not None:
            place = f"actor {Actor(*divmod(self.position, self.plan.positions_each)[::-1])}"
        if self.at < 0:
            return f"{place}, before its first action"
        if self.at >= len(self.program.calls):
            return f"{place}, past its last action"
        step = self.program.step_of[self.at]
        work = " ".join(map(str, self.program.steps[step]))
        return f"{place}, step {step + 1} of {len(self.program.steps)}: {work}"

    @property
    def who(self) -> str:
        """This rank, and the stage and microbatch that it is at: "rank 3, stage 1, microbatch 3"."""
        parts = [] if self.rank is None else [f"rank {self.rank}"]
        if 0 <= self.at < len(self.program.calls):
            action = self.program.steps[self.program.step_of[self.at]][0]
            parts.append(f"stage {action.stage}")
            if action.microbatch is not None:
                number, routes = action.microbatch, self.plan.routes
                parts.append(f"microbatch {number}" if routes is None else f"unit {routes.name(number)}")
                parts += [] if action.slice is None else [f"slice {action.slice}"]
        return ", ".join(parts) or "this process"


def programs(
    at: BoundPosition,
    hooks: Sequence[Hook],
    registered: Mapping[ActionKind, Effect],
    paired: PairEffect | None,
    announce: tuple[Call, ...] = (),
) -> tuple[Program, Program]:
    """The program of a step, and of an evaluation: its forwards, and what carries activations.

    ``paired`` runs pairs; None: one compute after the other, forward first. ``announce``: called behind this rank's
    first message, a receive that is posted or a send, so that it delays no other rank.
    """
    if paired is not None:
        _require_interleavable(at)
    steps = [[bind(at, action, registered) for action in actions_of(step)] for step in at.plan.positions[at.number]]
    gathers = in_evaluation([bounds[0].action for bounds in steps]) if at.sharded else ()
    forwards = [
        [bound for bound in bounds if place in gathers or _goes_forward(bound.action)]
        for place, bounds in enumerate(steps)
    ]
    for number, bounds in enumerate(steps):
        _follow(bounds, *at.ends.get(number, ()))
    for own in (steps, forwards):
        _call_beside(at, own)
        messages = (bounds for bounds in own if any(not bound.action.kind.is_compute for bound in bounds))
        _follow(next(messages, []), *announce)
    return _program(at, steps, hooks, paired), _program(at, forwards, hooks, paired)


def _follow(bounds: list[Bound], *calls: Call) -> None:
    """Have ``calls`` follow the last of ``bounds``."""
    if bounds and calls:
        bounds[-1] = evolve(bounds[-1], after=(*bounds[-1].after, *calls))


def _call_beside(at: BoundPosition, steps: list[list[Bound]]) -> None:
    """Have `BoundPosition.call_beside` follow the last forward and, so that it delays none, the send of its output.

    On a last stage it comes before the last backward: what it starts takes less time than a wait for it afterwards.
    """
    kinds = [{bound.action.kind for bound in bounds} for bounds in steps]
    last = max((number for number, held in enumerate(kinds) if ActionKind.F in held), default=None)
    if last is not None:
        sends = {ActionKind.SEND_F, ActionKind.COLLECTIVE}
        place = next((number for number in range(last, len(steps)) if kinds[number] & sends), last)
        _follow(steps[place], at.call_beside)


def _require_interleavable(at: BoundPosition) -> None:
    """Raise for a pair with a stage whose module gathers and frees its own parameters, which the other may be using."""
    for step in at.plan.positions[at.number]:
        for action in actions_of(step) if is_pair(step) else ():
            if at.runner(action).gathers_by_itself:
                raise StepArgumentError(
                    f"{step_text(step)}: stage {action.stage} is sharded by fully_shard, which frees its parameters at "
                    "the end of a forward; run its pairs one after the other, or lower the plan with shard="
                )


def _program(
    at: BoundPosition, steps: Sequence[Sequence[Bound]], hooks: Sequence[Hook], paired: PairEffect | None
) -> Program:
    """The program of some steps, each one action, a batch of them or a pair, with each hook around every action.

    With hooks, inputs are waited for before an action counts as started, so that a recorded timeline shows waiting as
    waiting. On a device with streams a `HostLead` is the first hook, as it waits. A batch is one call, unless the
    communicator has no batches and takes its messages one by one.
    """
    steps = [bounds for bounds in steps if bounds]
    if at.in_streams and at.device is not None:
        hooks = (HostLead([bound.action for bounds in steps for bound in bounds], at.device), *hooks)
    calls: list[Call] = []
    step_of: list[int] = []
    for number, bounds in enumerate(steps):
        both = len(bounds) > 1 and bounds[0].action.kind.is_compute
        for part in [[bound] for bound in bounds] if both and paired is None else [bounds]:
            runs = [_with_hooks(bound, hooks) for bound in part]
            at_once = len(part) > 1 and (both or at.communicator.batches)
            waits = [wait for bound in part for wait in bound.waits if hooks or at_once or bound.apart]
            made = [run for own in runs for run in own]
            if paired is not None and both:
                pair = tuple(bound.action for bound in part)
                made = [partial(together, paired, pair, [in_turn(own) for own in runs])]
            elif at_once:
                made = [batched(at, made)]
            made = [*waits, *made, *(call for bound in part for call in bound.after)]
            calls += made
            step_of += [number] * len(made)
    return Program(tuple(calls), tuple(tuple(bound.action for bound in bounds) for bounds in steps), tuple(step_of))


def _with_hooks(bound: Bound, hooks: Sequence[Hook]) -> list[Call]:
    before = [partial(hook.before, bound.action) for hook in hooks]
    return [*before, bound.run, *(partial(hook.after, bound.action) for hook in hooks)]


def _goes_forward(action: Action) -> bool:
    """Whether an evaluation has the action: a forward, and what carries an activation."""
    if action.kind is ActionKind.COLLECTIVE:
        return action.direction is Direction.FORWARD
    return action.kind in (ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F)
