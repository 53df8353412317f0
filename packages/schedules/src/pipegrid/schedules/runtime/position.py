"""One position of a plan: its stages, and a queue for each payload that they take or give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from pipegrid.core.edge import Direction
from pipegrid.plans.plan import OFFLOADING, SHARDING, Action, ActionKind, Plan
from pipegrid.schedules.runtime.edge_links import ActorFlows, EdgeLink, StageLinks
from pipegrid.schedules.runtime.stages.deallocation import Deallocation
from pipegrid.schedules.runtime.stages.edge_queues import Output, ReceivesAhead, RecvQueue, SendQueue
from pipegrid.schedules.runtime.stages.hooks import Hook, MessageHook
from pipegrid.schedules.runtime.stages.in_flight import ActivationsInFlight
from pipegrid.schedules.runtime.stages.sharded import ShardedStage
from pipegrid.schedules.runtime.stages.shared_calls import SharedCalls, SharedQueue, SummedQueue
from pipegrid.schedules.runtime.stages.stage import RuntimeStage
from pipegrid.schedules.runtime.stages.stage_runner import StageRunner
from pipegrid.search.buffers import Buffered, PositionBuffers, position_buffers
from pipegrid.search.buffers.lifetimes import lifetimes
from pipegrid.transport import streams
from pipegrid.transport.base import Communicator
from pipegrid.transport.messages.slot import Slot

_RECEIVES = (ActionKind.RECV_F, ActionKind.RECV_B)


class BoundPosition:
    """The queues and the stages of one position, or actor, on which its actions work.

    Attributes:
        number: of the position, or of the actor where the plan has routes.
        receives: a queue per link by which data comes to a stage here; ``sends``: by which it leaves.
        runners: the computes of each stage here, by its number: one for each set of links of its pieces.
        sharded: the stages here that the plan gathers, by their number.
        ends: what gives back received memory, by the step in which it is read for the last time.
        in_streams: whether the device has streams, in which messages are ordered.
        deadline: of every message; None is the communicator's own.
        beside: called once in a step, behind this rank's last forward; see `PipelineRuntime.step`.
    """

    beside: Callable[[], None] | None = None

    def __init__(
        self,
        plan: Plan,
        position: int,
        stages: Mapping[int, RuntimeStage],
        communicator: Communicator,
        *,
        hooks: Sequence[Hook],
        reducers: Mapping[int | str, Callable[[], None]],
        deallocate_outputs: bool,
        reuse_buffers: bool,
        clone_outputs: bool,
        deadline: float | None,
        loss_scale: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.plan, self.number, self.communicator, self.reducers = plan, position, communicator, reducers
        self._job = communicator.job
        self.deadline = deadline
        self._deallocate, self._reuse, self._loss_scale = deallocate_outputs, reuse_buffers, loss_scale
        self.device = communicator.device
        self.in_streams = self.device is not None and streams.has_streams(self.device)
        self.actions = tuple(plan.actions(position))
        self.sharded = {
            number: ShardedStage(number, stages[number], self.actions.count(Action(ActionKind.REDUCE_GRAD, number)))
            for number in {action.stage for action in self.actions if action.kind in SHARDING}
        }
        self._copiers: tuple[Any, Any] = (None, None)
        if self.device is not None and any(action.kind in OFFLOADING for action in self.actions):
            self._copiers = streams.new_stream(self.device), streams.new_stream(self.device)
        self._flows = ActorFlows(plan, position)
        of_all = communicator, deadline, [hook for hook in hooks if isinstance(hook, MessageHook)]
        self.receives = {
            link: RecvQueue(link.edge, link.direction, *of_all, local=link.local, replica=link.replica)
            for link in self._flows.receives
        }
        slices, places = plan.num_slices, dict[int, list[Output]]()
        sending = partial(SendQueue, in_streams=self.in_streams, num_slices=slices, clones=clone_outputs, places=places)
        self.sends = {
            link: sending(
                link.edge, link.direction, *of_all, self.receives[link] if link.local else None, replica=link.replica
            )
            for link in self._flows.sends
        }
        self.queues: tuple[RecvQueue | SendQueue, ...] = (*self.receives.values(), *self.sends.values())
        for action in self.actions:
            for queue in self.receives_of(action) if action.kind in _RECEIVES else ():
                queue.expected += 1
        self.ends = self._find_ends() if reuse_buffers else {}
        self.slots: dict[int, Slot] = {}  # of `buffers`, once a step has begun
        self._in_order: dict[ReceivesAhead, list[Slot | None]] = defaultdict(list)
        self._receiving = tuple([queue for queue in self.receives.values() if queue.expected])
        self._shared_calls: dict[EdgeLink, SharedQueue] = {}
        self._summed: dict[EdgeLink, SummedQueue] = {}
        self._runner_of: dict[tuple[int, int], StageRunner] = {}
        self.runners = {number: self._runners(number, stage) for number, stage in stages.items()}
        self._kept = (*self.queues, *self._shared_calls.values(), *self._summed.values())

    def _runners(self, number: int, stage: RuntimeStage) -> tuple[StageRunner, ...]:
        """The computes of a stage, by the links of its pieces; of the whole plan's where replicas act alike."""
        plan, flows = self.plan, self._flows.flows
        pieces = plan.pieces_at(number, self.number)
        for link, call_of in self._flows.calls(number).items():
            calls = SharedCalls(call_of)
            self._shared_calls[link] = SharedQueue(self.receives[link], calls)
            if link.back in self.sends:
                self._summed[link.back] = SummedQueue(self.sends[link.back], calls)
        passing: dict[StageLinks, list[int]] = {}
        for piece in pieces if flows.routed else (0,):
            passing.setdefault(self._flows.links_of(number, piece), []).append(piece)
        edges = [edge for edge in plan.graph.stage_edges if edge.source == number]
        answered = [edge for edge in edges if edge in plan.gradient_edges]
        splits = any(a.kind is ActionKind.I and a.stage == number for a in self.actions)
        flight = ActivationsInFlight(number, stage, len(pieces), plan.num_slices, answered, splits, self._copiers)
        deallocation = Deallocation(number) if self._deallocate else None
        runners: list[StageRunner] = []
        for links, own in passing.items():
            back_from = [link for link in links.leaving if link.edge in plan.gradient_edges]
            back_to = [link for link in links.arriving if link.edge in plan.gradient_edges]
            runner = StageRunner(
                number,
                stage,
                flight,
                arriving=[self._shared_calls.get(link, self.receives[link]) for link in links.arriving],
                leaving=[self.sends[link] for link in links.leaving],
                gradients_in=[self.receives[link.back] for link in back_from],
                gradients_out=[self._summed.get(link.back, self.sends[link.back]) for link in back_to],
                trains=number not in plan.forward_only,
                loss_scale=self._loss_scale,
                deallocation=deallocation,
                reduced_by_plan=number in self.sharded,
                declared=self._job.payload_edges,
                reuses=self._reuse,
                first=own[0],
                skipped=frozenset(edges).difference(link.edge for link in links.leaving),
            )
            self._runner_of.update({(number, piece): runner for piece in own})
            runners.append(runner)
        return tuple(runners)

    # For actions

    def runner(self, action: Action) -> StageRunner:
        """The computes of an action's stage, for its piece."""
        return self._runner_of[action.stage, self.plan.piece_of(action) if self._flows.flows.routed else 0]

    def sends_of(self, action: Action) -> list[SendQueue]:
        """The queues of what an action sends, one per partner."""
        return [self.sends[link] for link in self._flows.links_of_action(action, sends=True)]

    def receives_of(self, action: Action) -> list[RecvQueue]:
        """The queues of what an action receives."""
        return [self.receives[link] for link in self._flows.links_of_action(action, sends=False)]

    def open_across(self) -> None:
        """Open what leads to other replicas, before the first message; P2PUsageError where the communicator cannot."""
        sends, receives = (
            [(link.edge, link.direction, link.replica) for link in some if link.replica is not None]
            for some in (self.sends, self.receives)
        )
        if sends or receives:
            self.communicator.open_across(sends=sends, receives=receives)
        for queue in self.queues:
            if queue.replica is not None:
                queue.bind()

    # Of a step

    def begin(self, *, training: bool) -> None:
        """Prepare the stages for a step, whose queues are empty."""
        for runners in self.runners.values():
            for runner in runners:
                runner.begin(training=training)

    def drop(self) -> None:
        """Drop what a step that failed holds."""
        for queue in self._kept:
            queue.drop()
        self.begin(training=False)

    def start(self, *, training: bool) -> None:
        """Post the first receives of a step, those that may come before their turn."""
        expected: dict[ReceivesAhead, int] = defaultdict(int)
        for queue in self._receiving:
            count = queue.expected if training or queue.direction is Direction.FORWARD else 0
            expected[queue.ahead or self._bind(queue)] += count
        if training and self._reuse:
            self._make_slots()
        for ahead, count in expected.items():
            ahead.start(count, self._in_order.get(ahead, ()) if training else ())

    # Received memory that takes message after message

    def _find_ends(self) -> dict[int, list[Callable[[], None]]]:
        found: dict[int, list[Callable[[], None]]] = defaultdict(list)
        for message, life in lifetimes(self.plan, self._flows.flows, self.number).items():
            queue, piece = self._queue_of(message), self.plan.piece_of(message.action)
            if life.last is not None and piece not in queue.reusable:
                queue.reusable.add(piece)
                found[life.last].append(partial(RecvQueue.give_back, queue, piece))
        return found

    def _queue_of(self, message: Buffered) -> RecvQueue:
        replica = self._flows.replica_of(message.peer)
        queues = self.receives_of(message.action)
        return next(queue for queue in queues if queue.replica == replica)

    @cached_property
    def buffers(self) -> PositionBuffers:
        """The slots of the messages that come here, where the communicator's ports take them."""

        def lane_of(message: Buffered) -> tuple[object, int] | None:
            queue = self._queue_of(message)
            ahead = queue.ahead or self._bind(queue)
            port = ahead.port
            return (ahead, getattr(port, "ahead", 0)) if getattr(port, "takes_slots", False) else None

        return position_buffers(self.plan, self.number, lane_of=lane_of, flows=self._flows.flows)

    def describe_slots(self) -> list[str]:
        """The slots in words, once a step has begun; which messages have none."""
        if not self.slots:
            return []
        count, slotted = sum(queue.expected for queue in self._receiving), len(self.buffers.arrivals)
        nbytes = sum(slot.nbytes for slot in self.slots.values())
        line = f"received: {slotted} of {count} messages of a step in {len(self.slots)} slots, {nbytes:,} bytes"
        others = sorted({str(queue.edge) for queue in self._receiving if len(queue.slots) < queue.expected})
        return [line + (f"; edges {', '.join(others)} have memory of their own" if others else "")]

    def _make_slots(self) -> None:
        """Once: the memory of each message's slot, by lane in the order in which its receives are posted."""
        if self._in_order or not self.buffers.arrivals:
            return
        self.slots = {number: Slot() for number in sorted(self.buffers.sizes)}
        for message, slot in self.buffers.slot_of.items():
            self._queue_of(message).slots[self.plan.piece_of(message.action)] = self.slots[slot]
        for action in self.actions:
            for queue in self.receives_of(action) if action.kind in _RECEIVES else ():
                assert queue.ahead is not None  # by `start`
                self._in_order[queue.ahead].append(queue.slots.get(self.plan.piece_of(action)))

    def _bind(self, queue: RecvQueue) -> ReceivesAhead:
        """Have the queues of one port, which are of several edges between two ranks, post in one order."""
        own = queue.bind()
        for other in self._receiving:
            if other.ahead is not None and other.ahead.port is own.port:
                queue.ahead = other.ahead
                return other.ahead
        return own

    def call_beside(self) -> None:
        """Call ``beside``, in a step that has it, and forget it."""
        beside, self.beside = self.beside, None
        if beside is not None:
            beside()

    def set_deadline(self, seconds: float | None) -> None:
        """Give every message this deadline."""
        self.deadline = seconds
        for queue in self.queues:
            queue.deadline = seconds

    def settle(self) -> None:
        """Wait until every message has left."""
        for queue in self.sends.values():
            queue.settle()
