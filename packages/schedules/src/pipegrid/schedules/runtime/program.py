"""The program of one position: its actions as calls in a row, bound to the queues and stages that they work on.

All that a step would look up is looked up here, once: a step only calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from attrs import frozen

from pipegrid.schedules.plan import OFFLOADING, SHARDING, Action, ActionKind, actions_of
from pipegrid.schedules.runtime.edge_queues import RecvQueue, SendQueue, exchange
from pipegrid.schedules.runtime.hooks import Hook, HostLead, MessageHook
from pipegrid.schedules.runtime.preflight import reducer_name
from pipegrid.schedules.runtime.sharded import ShardedStage, in_evaluation, stages_sharded
from pipegrid.schedules.runtime.stage import Stage
from pipegrid.schedules.runtime.stage_runner import StageRunner
from pipegrid.schedules.verify import Dataflow, dataflow_of
from pipegrid.transport import streams
from pipegrid.transport.edge import Direction, Edge

if TYPE_CHECKING:
    from pipegrid.schedules.plan import Plan
    from pipegrid.transport.base import Communicator

Call: TypeAlias = Callable[[], None]


@frozen
class Bound:
    """An action with its effect here; ``waits`` wait for its inputs or for room to send, which ``run`` does as well."""

    action: Action
    run: Call
    waits: tuple[Call, ...] = ()


@frozen(eq=False)
class Program:
    """Calls in a row.

    Attributes:
        calls: all of them.
        steps: the actions of each step of the plan.
        step_of: per call, the number of its step.
    """

    calls: tuple[Call, ...]
    steps: tuple[tuple[Action, ...], ...]
    step_of: tuple[int, ...]

    @classmethod
    def of(
        cls, steps: Sequence[Sequence[Bound]], hooks: Sequence[Hook], batched: Callable[[Sequence[Call]], Call] | None
    ) -> Program:
        """The program of some steps, each one action or a batch of them, with each hook around every action.

        With hooks, inputs are waited for before an action counts as started, so that a recorded timeline shows waiting
        as waiting. ``batched`` makes one call of a batch's; None where a batch is its messages one by one.
        """
        steps = [bounds for bounds in steps if bounds]
        calls: list[Call] = []
        step_of: list[int] = []
        for number, bounds in enumerate(steps):
            runs: list[Call] = []
            for bound in bounds:
                runs += [partial(hook.before, bound.action) for hook in hooks]
                runs.append(bound.run)
                runs += [partial(hook.after, bound.action) for hook in hooks]
            together = len(bounds) > 1 and batched is not None
            waits = [wait for bound in bounds for wait in bound.waits] if hooks or together else []
            if len(bounds) > 1 and batched is not None:
                runs = [batched(runs)]
            calls += [*waits, *runs]
            step_of += [number] * (len(waits) + len(runs))
        return cls(tuple(calls), tuple(tuple(bound.action for bound in bounds) for bounds in steps), tuple(step_of))


class BoundPosition:
    """The queues and the stages of one position, and what each of its actions calls.

    Attributes:
        receives: a queue per flow that a stage here consumes, by edge and direction.
        sends: a queue per flow that a stage here produces.
        runners: the computes of each stage here, by its number.
        sharded: the stages here that the plan gathers, by their number.
    """

    def __init__(
        self,
        plan: Plan,
        position: int,
        stages: Mapping[int, Stage],
        communicator: Communicator,
        *,
        hooks: Sequence[Hook],
        reducers: Mapping[int | str, Callable[[], None]],
        deallocate_outputs: bool,
        reuse_buffers: bool,
        deadline: float | None,
        loss_scale: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self._plan, self._position, self._communicator, self._reducers = plan, position, communicator, reducers
        self._job = communicator.job
        self._deallocate, self._reuse, self._loss_scale = deallocate_outputs, reuse_buffers, loss_scale
        self._device = communicator.device
        self._in_streams = self._device is not None and streams.has_streams(self._device)
        flows = dataflow_of(plan)
        self._actions = tuple(plan.actions(position))
        self.sharded = {
            number: ShardedStage(number, stages[number], self._actions.count(Action(ActionKind.REDUCE_GRAD, number)))
            for number in stages_sharded(self._actions)
        }
        self._copiers: tuple[Any, Any] = (None, None)
        if self._device is not None and any(action.kind in OFFLOADING for action in self._actions):
            self._copiers = streams.new_stream(self._device), streams.new_stream(self._device)
        self._open_queues(flows, stages, deadline, [hook for hook in hooks if isinstance(hook, MessageHook)])
        self.runners = {number: self._runner(number, stage, flows) for number, stage in stages.items()}

    def _open_queues(
        self, flows: Dataflow, stages: Mapping[int, Stage], deadline: float | None, hooks: Sequence[MessageHook]
    ) -> None:
        self.receives: dict[tuple[Edge, Direction], RecvQueue] = {}
        self.sends: dict[tuple[Edge, Direction], SendQueue] = {}
        for flow in flows.flows:
            way = flow.edge, flow.direction
            local = flow.producer in stages and flow.consumer in stages and flow.group is None
            common = (*way, self._communicator, deadline, hooks)
            if flow.consumer in stages:
                self.receives[way] = RecvQueue(*common, local=local)
            if flow.producer in stages:
                self.sends[way] = SendQueue(
                    *common,
                    local=self.receives[way] if local else None,
                    in_streams=self._in_streams,
                    num_slices=self._plan.num_slices,
                )

    def _runner(self, number: int, stage: Stage, flows: Dataflow) -> StageRunner:
        forward, backward = Direction.FORWARD, Direction.BACKWARD
        arriving = [self.receives[flow.edge, forward] for flow in flows.inputs(number, forward)]
        leaving = [self.sends[flow.edge, forward] for flow in flows.outputs(number, forward)]
        gradients_in = [self.receives[flow.edge, backward] for flow in flows.inputs(number, backward)]
        gradients_out = [self.sends[flow.edge, backward] for flow in flows.outputs(number, backward)]
        trains = number not in self._plan.forward_only
        # An output may be a view of an input. One that left by message, and whose gradient has come back, was read;
        # one that was handed over on this position may be needed longer, by the W of the stage that has it.
        answered = {queue.edge for queue in gradients_in}
        returned = all(queue.edge in answered and queue.local is None for queue in leaving)
        for queue in arriving:
            queue.lends = self._reuse and trains and returned and not queue.local
        return StageRunner(
            number,
            stage,
            self._plan.num_pieces,
            num_slices=self._plan.num_slices,
            arriving=arriving,
            leaving=leaving,
            gradients_in=gradients_in,
            gradients_out=gradients_out,
            trains=trains,
            splits=any(a.kind is ActionKind.I and a.stage == number for a in self._actions),
            reduced_by_plan=number in self.sharded,
            deallocate=self._deallocate,
            loss_scale=self._loss_scale,
            copiers=self._copiers,
            declared=self._job.payload_edges,
        )

    @property
    def outside(self) -> tuple[Edge, ...]:
        """The edges whose payloads come from or go to other positions."""
        local = {queue.edge for queue in self.receives.values() if queue.local}
        return tuple(sorted({edge for edge, _ in (*self.receives, *self.sends)} - local))

    def programs(self, hooks: Sequence[Hook]) -> tuple[Program, Program]:
        """The program of a step, and of an evaluation: its forwards, and what carries activations."""
        steps = [[self._bind(action) for action in actions_of(step)] for step in self._plan.positions[self._position]]
        gathers = in_evaluation([bounds[0].action for bounds in steps])
        forwards = [
            [bound for bound in bounds if place in gathers or _goes_forward(bound.action)]
            for place, bounds in enumerate(steps)
        ]
        batched = self._batched if self._communicator.batches else None
        return self._program(steps, hooks, batched), self._program(forwards, hooks, batched)

    def _program(
        self,
        steps: Sequence[Sequence[Bound]],
        hooks: Sequence[Hook],
        batched: Callable[[Sequence[Call]], Call] | None,
    ) -> Program:
        """On a device with streams, with a `HostLead`: first, as it waits."""
        if self._in_streams and self._device is not None:
            actions = [bound.action for bounds in steps for bound in bounds]
            hooks = (HostLead(actions, self._device), *hooks)
        return Program.of(steps, hooks, batched)

    def _batched(self, calls: Sequence[Call]) -> Call:
        batch, inside = self._communicator.batch, _in_turn(calls)

        def run() -> None:
            with batch():
                inside()

        return run

    def _bind(self, action: Action) -> Bound:
        kind = action.kind
        if kind is ActionKind.REDUCE:
            return Bound(action, self._reducers[reducer_name(action)])
        if kind in SHARDING:
            return Bound(action, self._bind_sharding(action))
        piece = self._plan.piece_of(action)  # of all other kinds, by Action's own validation
        if action.edge is not None and action.direction is not None:
            way = action.edge, action.direction
            if kind is ActionKind.COLLECTIVE:
                sends, receives = self.sends.get(way), self.receives.get(way)
                room = () if sends is None else (partial(SendQueue.make_room, sends),)
                return Bound(action, partial(exchange, piece, action, self._communicator, sends, receives), room)
            if kind.is_send:
                queue = self.sends[way]
                return Bound(
                    action, partial(SendQueue.send, queue, piece, action), (partial(SendQueue.make_room, queue),)
                )
            return Bound(action, partial(RecvQueue.receive, self.receives[way], piece, action))
        runner = self.runners[action.stage]
        verbs = {
            ActionKind.F: (StageRunner.forward, runner.arriving),
            ActionKind.B: (StageRunner.backward, runner.gradients_in),
            ActionKind.I: (StageRunner.backward_inputs, runner.gradients_in),
            ActionKind.W: (StageRunner.backward_weights, ()),
            ActionKind.OFFLOAD: (StageRunner.offload, ()),
            ActionKind.RELEASE: (StageRunner.release, ()),
            ActionKind.RELOAD: (StageRunner.reload, ()),
        }
        verb, needed = verbs[kind]
        run = partial(verb, runner, piece)
        if kind is ActionKind.W and action.stage in self.sharded:  # no hook of FSDP2 waits for it
            gathered = self.sharded[action.stage].wait
            return Bound(action, _in_turn([gathered, run]), (gathered,))
        waits = tuple([partial(RecvQueue.wait, queue, piece) for queue in needed if not queue.local])
        return Bound(action, run, waits)

    def _bind_sharding(self, action: Action) -> Call:
        sharded = self.sharded[action.stage]
        if action.kind is ActionKind.UNSHARD:
            return sharded.unshard
        if action.kind is ActionKind.RESHARD:
            return sharded.reshard
        return sharded.reduce

    # Of a step

    def begin(self, *, training: bool) -> None:
        """Drop the state of an earlier step."""
        for receives in self.receives.values():
            receives.begin()
        for sends in self.sends.values():
            sends.begin()
        for runner in self.runners.values():
            runner.begin(training=training)

    def set_deadline(self, seconds: float | None) -> None:
        """Give every message this deadline; None is the communicator's own."""
        queues: list[RecvQueue | SendQueue] = [*self.receives.values(), *self.sends.values()]
        for queue in queues:
            queue.deadline = seconds

    def settle(self) -> None:
        """Wait until every message has left."""
        for queue in self.sends.values():
            queue.settle()


def _goes_forward(action: Action) -> bool:
    """Whether an evaluation has the action: a forward, and what carries an activation."""
    if action.kind is ActionKind.COLLECTIVE:
        return action.direction is Direction.FORWARD
    return action.kind in (ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F)


def _in_turn(calls: Sequence[Call]) -> Call:
    """One call of several."""

    def run() -> None:
        for call in calls:
            call()

    return run
