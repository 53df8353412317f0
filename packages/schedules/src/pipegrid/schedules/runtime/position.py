"""One position of a plan: its stages, and a queue for each payload that they take or give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pipegrid.schedules.plan import OFFLOADING, Action, ActionKind
from pipegrid.schedules.runtime.stages.deallocation import Deallocation
from pipegrid.schedules.runtime.stages.edge_queues import RecvQueue, SendQueue
from pipegrid.schedules.runtime.stages.hooks import Hook, MessageHook
from pipegrid.schedules.runtime.stages.in_flight import ActivationsInFlight
from pipegrid.schedules.runtime.stages.sharded import ShardedStage, stages_sharded
from pipegrid.schedules.runtime.stages.stage import Stage
from pipegrid.schedules.runtime.stages.stage_runner import StageRunner
from pipegrid.schedules.verify import Dataflow, dataflow_of
from pipegrid.transport import streams
from pipegrid.transport.edge import Direction, Edge

if TYPE_CHECKING:
    from pipegrid.schedules.plan import Plan
    from pipegrid.transport.base import Communicator


class BoundPosition:
    """The queues and the stages of one position, on which its actions work.

    Attributes:
        receives: a queue per flow that a stage here consumes, by edge and direction.
        sends: a queue per flow that a stage here produces.
        runners: the computes of each stage here, by its number.
        sharded: the stages here that the plan gathers, by their number.
        actions: of the position, in order.
        in_streams: whether the device has streams, in which messages are ordered.
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
        self.plan, self.number, self.communicator, self.reducers = plan, position, communicator, reducers
        self._job = communicator.job
        self._deallocate, self._reuse, self._loss_scale = deallocate_outputs, reuse_buffers, loss_scale
        self.device = communicator.device
        self.in_streams = self.device is not None and streams.has_streams(self.device)
        flows = dataflow_of(plan)
        self.actions = tuple(plan.actions(position))
        self.sharded = {
            number: ShardedStage(number, stages[number], self.actions.count(Action(ActionKind.REDUCE_GRAD, number)))
            for number in stages_sharded(self.actions)
        }
        self._copiers: tuple[Any, Any] = (None, None)
        if self.device is not None and any(action.kind in OFFLOADING for action in self.actions):
            self._copiers = streams.new_stream(self.device), streams.new_stream(self.device)
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
            common = (*way, self.communicator, deadline, hooks)
            if flow.consumer in stages:
                self.receives[way] = RecvQueue(*common, local=local)
            if flow.producer in stages:
                self.sends[way] = SendQueue(
                    *common,
                    local=self.receives[way] if local else None,
                    in_streams=self.in_streams,
                    num_slices=self.plan.num_slices,
                )

    def _runner(self, number: int, stage: Stage, flows: Dataflow) -> StageRunner:
        forward, backward = Direction.FORWARD, Direction.BACKWARD
        arriving = [self.receives[flow.edge, forward] for flow in flows.inputs(number, forward)]
        leaving = [self.sends[flow.edge, forward] for flow in flows.outputs(number, forward)]
        edges_in, edges_out = [queue.edge for queue in arriving], [queue.edge for queue in leaving]
        gradients_in = [self.receives[flow.edge, backward] for flow in flows.inputs(number, backward)]
        gradients_in.sort(key=lambda queue: edges_out.index(queue.edge))
        gradients_out = [self.sends[flow.edge, backward] for flow in flows.outputs(number, backward)]
        gradients_out.sort(key=lambda queue: edges_in.index(queue.edge))
        trains = number not in self.plan.forward_only
        # An output may be a view of an input. One that left by message, and whose gradient has come back, was read;
        # one that was handed over on this position may be needed longer, by the W of the stage that has it.
        answered = [queue.edge for queue in gradients_in]
        returned = all(queue.edge in answered and queue.local is None for queue in leaving)
        for queue in arriving:
            queue.lends = self._reuse and trains and returned and not queue.local
        flight = ActivationsInFlight(
            number,
            stage,
            self.plan.num_pieces,
            self.plan.num_slices,
            answered=[edges_out.index(edge) for edge in answered],
            gradient_edges=answered,
            splits=any(a.kind is ActionKind.I and a.stage == number for a in self.actions),
            copiers=self._copiers,
        )
        return StageRunner(
            number,
            stage,
            flight,
            arriving=arriving,
            leaving=leaving,
            gradients_in=gradients_in,
            gradients_out=gradients_out,
            trains=trains,
            loss_scale=self._loss_scale,
            deallocation=Deallocation(number, leaving) if self._deallocate else None,
            reduced_by_plan=number in self.sharded,
            declared=self._job.payload_edges,
        )

    @property
    def outside(self) -> tuple[Edge, ...]:
        """The edges whose payloads come from or go to other positions."""
        local = {queue.edge for queue in self.receives.values() if queue.local}
        return tuple(sorted({edge for edge, _ in (*self.receives, *self.sends)} - local))

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
