"""Execute a verified plan: exactly its actions, in its order, through anything that speaks the protocol.

The runtime decides nothing. A plan says what this rank's position does; a `Stage` says what a forward is; a
`PipelineCommunicator` moves payloads along edges. What is kept here is only what lies between them: which
received payload belongs to which forward, which outputs wait for which gradients, and where the rank stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from attrs import define, field, frozen

from pipegrid.schedules.actions import Action, ActionKind
from pipegrid.schedules.collectives import check_collectives, exchange
from pipegrid.schedules.errors import PlanMismatchError
from pipegrid.schedules.steps import (
    backward_roots,
    deallocate_output_tensor,
    flatten,
    gradient_of,
    map_tensors,
    require_deallocatable,
)
from pipegrid.transport.edge import Direction, Edge

if TYPE_CHECKING:
    from pipegrid.schedules.monitor import Monitor
    from pipegrid.schedules.plan import Plan
    from pipegrid.transport.protocol import Handle, Payload, PipelineCommunicator, ReceiveHandle


class PipelineError(RuntimeError):
    """A step failed. Says where in the plan this rank stood; the cause is chained."""


@frozen
class Forwarded:
    """What a forward produced.

    Attributes:
        outputs: what each outgoing edge carries; the same payload may go to several.
        loss: on a stage without outgoing edges, the scalar to differentiate; None in a forward-only run.
    """

    outputs: Mapping[Edge, Payload]
    loss: torch.Tensor | None = None


class Stage(Protocol):
    """The computation of one stage."""

    def forward(self, microbatch: int, inputs: Mapping[Edge, Payload]) -> Forwarded:
        """Run microbatch ``microbatch``, given what each incoming edge delivered."""
        ...


@runtime_checkable
class Hook(Protocol):
    """Called around every action: for tracing, fault injection, user code."""

    def before(self, action: Action) -> None:
        """The action's inputs are there; it starts now."""
        ...

    def after(self, action: Action) -> None:
        """The action is done (a message: posted)."""
        ...


@runtime_checkable
class MessageHook(Hook, Protocol):
    """A hook that is also told when a message is through."""

    def completed(self, action: Action) -> None:
        """The message that ``action`` posted has arrived, or has left."""
        ...


@define
class _Live:
    """A microbatch between its forward and its backward on one stage. ``unsent`` counts messages not yet through."""

    inputs: dict[Edge, Payload]
    outputs: dict[Edge, Payload]
    loss: torch.Tensor | None
    unsent: int = 0


@define
class _Step:
    """State of one step; made anew for each, so nothing survives a failed one."""

    live: dict[tuple[int, int], _Live] = field(factory=dict)
    receiving: dict[tuple[Edge, Direction, int], tuple[Action, ReceiveHandle]] = field(factory=dict)
    local: dict[tuple[Edge, Direction, int], Payload] = field(factory=dict)
    gradients: dict[tuple[Edge, int], Payload] = field(factory=dict)
    sending: deque[tuple[Action, Handle, _Live | None]] = field(factory=deque)


Work = tuple[Action, ...]


class PipelineRuntime:
    """Runs one position of a plan, step after step.

    Args:
        plan: lowered and verified; the same on every rank.
        stages: this rank's stages by global number: exactly those that one position of the plan holds.
        communicator: moves payloads along the plan's edges.
        hooks: called around every action, in order.
        reducers: what a ``REDUCE`` does (tied parameters), by its group, or by stage where it has none.
        deallocate_outputs: free the storage of an activation once it is sent.
        deadline: seconds that any one transfer may take; None leaves it to the communicator.
        loss_scale: applied to a loss before its backward (mixed precision).
        monitor: publishes where this rank stands, and says of a failure whose was the first.

    Raises:
        PlanMismatchError: no position holds exactly these stages, or the plan asks for a reducer that is missing.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage],
        communicator: PipelineCommunicator,
        *,
        hooks: Sequence[Hook] = (),
        reducers: Mapping[int | str, Callable[[], None]] | None = None,
        deallocate_outputs: bool = False,
        deadline: float | None = None,
        loss_scale: Callable[[torch.Tensor], torch.Tensor] | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.plan = plan
        self.position = position_of(plan, stages)
        self._stages = dict(stages)
        self._communicator = communicator
        self._monitor = monitor
        self._hooks = (*hooks, *(() if monitor is None or monitor.marks is None else (monitor.marks,)))
        self._message_hooks = tuple(hook for hook in hooks if isinstance(hook, MessageHook))
        self._reducers = dict(reducers or {})
        self._deallocate = deallocate_outputs
        self._deadline = deadline
        self._loss_scale = loss_scale
        edges = plan.graph.stage_edges
        self._incoming = {stage: tuple(e for e in edges if e.destination == stage) for stage in stages}
        self._outgoing = {stage: tuple(e for e in edges if e.source == stage) for stage in stages}
        self._inside = {
            edge
            for edge in edges
            if edge.source in stages and edge.destination in stages and edge not in plan.collective_edges
        }
        self._gradient_edges = plan.gradient_edges
        self._program: tuple[Work, ...] = tuple(
            step if isinstance(step, tuple) else (step,) for step in plan.positions[self.position]
        )
        self._running = self._program
        self._verbs: dict[ActionKind, Callable[[Action, _Step], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.SEND_F: self._send_forward,
            ActionKind.RECV_F: self._receive_forward,
            ActionKind.SEND_B: self._send_backward,
            ActionKind.RECV_B: self._receive_backward,
            ActionKind.COLLECTIVE: self._collective,
            ActionKind.REDUCE: self._reduce,
        }
        self._check_program()
        self._cursor = 0

    def _check_program(self) -> None:
        check_collectives(self.plan, self.position, self._communicator)
        for work in self._program:
            for action in work:
                if action.kind not in self._verbs:
                    raise PlanMismatchError(
                        f"position {self.position} has {action}: the runtime runs forwards, whole backwards (B), "
                        "messages, COLLECTIVE and REDUCE; plans with split backwards (I and W) cannot be run yet"
                    )
                if action.kind is ActionKind.REDUCE:
                    name = _reducer_name(action)
                    if name not in self._reducers:
                        raise PlanMismatchError(
                            f"position {self.position} has {action}, but there is no reducer for {name!r}; pass "
                            f"reducers={{{name!r}: function}}"
                        )

    @property
    def where(self) -> str:
        """This rank's place in the plan, in words."""
        if self._cursor >= len(self._running):
            return f"position {self.position}, past its last action"
        work = " ".join(str(action) for action in self._running[self._cursor])
        return f"position {self.position}, step {self._cursor + 1} of {len(self._running)}: {work}"

    def step(self) -> None:
        """Run the plan once: every forward and every backward of this position.

        Raises:
            DisagreementError: with a monitor, ranks were about to run different plans; nothing was sent.
            PipelineError: something failed; the message says at which action, and what must be rebuilt.
        """
        self._run(self._program, grad=True)

    def eval(self) -> None:
        """Run only the plan's forwards and their communication, without gradients.

        A verified plan stays free of deadlock when its backwards are left out: what remains keeps its order.
        """
        kept = (tuple(action for action in work if _goes_forward(action)) for work in self._program)
        self._run(tuple(work for work in kept if work), grad=False)

    def _run(self, program: tuple[Work, ...], *, grad: bool) -> None:
        state = _Step()
        self._running, self._cursor = program, 0
        # The others wait for messages that will not come after a failure: they are told why, instead of timing out.
        abort: Callable[[str], object] = getattr(self._communicator, "abort", _nothing_to_end)
        if self._monitor is not None:
            self._monitor.begin(self.plan, where=lambda: self.where, abort=abort)
        try:
            with torch.set_grad_enabled(grad):
                for self._cursor, work in enumerate(program):
                    if len(work) > 1:
                        with self._communicator.batch():
                            for action in work:
                                self._execute(action, state)
                    else:
                        self._execute(work[0], state)
                self._cursor = len(program)
                while state.sending:
                    self._finish_send(state)
        except Exception as error:
            failure = f"the step failed at {self.where}: {type(error).__name__}: {error}"
            if self._monitor is not None:
                failure = self._monitor.failed(failure)
            else:
                abort(failure)
            raise PipelineError(
                f"{failure}. Lanes may hold messages of the broken step: rebuild the communicator and the runtime "
                "before the next one"
            ) from error
        if self._monitor is not None:
            self._monitor.end()

    def _execute(self, action: Action, state: _Step) -> None:
        self._await_inputs(action, state)
        for hook in self._hooks:
            hook.before(action)
        self._verbs[action.kind](action, state)
        for hook in self._hooks:
            hook.after(action)

    # What an action needs from elsewhere is waited for before it counts as started, so that a recorded
    # timeline shows computing as computing and waiting as waiting.
    def _await_inputs(self, action: Action, state: _Step) -> None:
        if action.kind is ActionKind.F:
            edges, direction = self._incoming[action.stage], Direction.FORWARD
        elif action.kind is ActionKind.B:
            edges, direction = self._outgoing[action.stage], Direction.BACKWARD
        else:
            return
        for edge in edges:
            if edge in self._inside or (direction is Direction.BACKWARD and edge not in self._gradient_edges):
                continue
            posted, handle = state.receiving[edge, direction, _microbatch(action)]
            handle.wait(self._deadline)
            for hook in self._message_hooks:
                hook.completed(posted)

    def _arrived(self, edge: Edge, direction: Direction, microbatch: int, state: _Step) -> Payload:
        if edge in self._inside:
            return state.local.pop((edge, direction, microbatch))
        _, handle = state.receiving.pop((edge, direction, microbatch))
        return handle.result()

    def _forward(self, action: Action, state: _Step) -> None:
        microbatch = _microbatch(action)
        inputs = {
            edge: self._arrived(edge, Direction.FORWARD, microbatch, state) for edge in self._incoming[action.stage]
        }
        # A stage that runs no backward keeps no graph.
        with torch.set_grad_enabled(torch.is_grad_enabled() and action.stage not in self.plan.forward_only):
            produced = self._stages[action.stage].forward(microbatch, inputs)
        outgoing = self._outgoing[action.stage]
        if set(produced.outputs) != set(outgoing):
            raise PlanMismatchError(
                f"the forward of stage {action.stage} returned outputs for {sorted(map(str, produced.outputs))}; the "
                f"plan has edges {sorted(map(str, outgoing))}"
            )
        remote = {edge: produced.outputs[edge] for edge in outgoing if edge not in self._inside}
        for edge in outgoing:
            if edge in self._inside:
                state.local[edge, Direction.FORWARD, microbatch] = map_tensors(produced.outputs[edge], _as_leaf)
        if self._keeps(action.stage):
            if not outgoing and produced.loss is None:
                raise PlanMismatchError(
                    f"the forward of stage {action.stage} returned no loss, and nothing consumes its output; a last "
                    "stage returns Forwarded({}, loss), or runs in eval()"
                )
            live = _Live(inputs, dict(produced.outputs), produced.loss, unsent=len(remote))
            state.live[action.stage, microbatch] = live
            if self._deallocate:
                for tensor in flatten(remote):
                    require_deallocatable(tensor)
        elif remote:
            # Nothing will come back for it: keep only what is still to be sent.
            state.live[action.stage, microbatch] = _Live({}, remote, None, unsent=len(remote))

    def _keeps(self, stage: int) -> bool:
        """Whether a stage's forwards are kept for a backward."""
        return torch.is_grad_enabled() and stage not in self.plan.forward_only

    def _backward(self, action: Action, state: _Step) -> None:
        microbatch = _microbatch(action)
        live = state.live.pop((action.stage, microbatch))
        roots: list[torch.Tensor | None] = []
        gradients: list[torch.Tensor | None] = []
        if live.loss is not None:
            loss = live.loss if self._loss_scale is None else self._loss_scale(live.loss)
            roots.append(loss)
            gradients.append(torch.ones_like(loss))
        else:
            for edge in self._outgoing[action.stage]:
                if edge not in self._gradient_edges:
                    continue
                outputs = flatten(live.outputs[edge])
                arrived = flatten(self._arrived(edge, Direction.BACKWARD, microbatch, state))
                if len(arrived) != len(outputs):
                    raise PlanMismatchError(
                        f"edge {edge} carried {len(outputs)} tensors forward, but {len(arrived)} gradients came back"
                    )
                roots += outputs
                gradients += arrived
        backward_roots(roots, gradients, deallocated=self._deallocate)
        for edge in self._incoming[action.stage]:
            if edge not in self._gradient_edges:
                continue
            back = map_tensors(live.inputs[edge], gradient_of)
            if edge in self._inside:
                state.local[edge, Direction.BACKWARD, microbatch] = back
            else:
                state.gradients[edge, microbatch] = back

    def _send_forward(self, action: Action, state: _Step) -> None:
        payload, live = self._made_forward(action, state)
        self._send(action, payload, Direction.FORWARD, live, state)

    def _made_forward(self, action: Action, state: _Step) -> tuple[Payload, _Live | None]:
        """What travels along the action's edge, and the microbatch it stays part of, if a backward will need it."""
        edge, microbatch = _edge(action), _microbatch(action)
        live = state.live[edge.source, microbatch]
        if self._keeps(edge.source):
            return live.outputs[edge], live
        # Without a backward to come, an output has no use after its send.
        payload = live.outputs.pop(edge)
        if not live.outputs:
            del state.live[edge.source, microbatch]
        return payload, None

    def _send_backward(self, action: Action, state: _Step) -> None:
        edge = _edge(action)
        self._send(action, state.gradients.pop((edge, _microbatch(action))), Direction.BACKWARD, None, state)

    def _collective(self, action: Action, state: _Step) -> None:
        edge, microbatch = _edge(action), _microbatch(action)
        direction = Direction.FORWARD if action.stage == edge.source else Direction.BACKWARD
        payload: Payload = None
        live: _Live | None = None
        if action.stage in self._stages and direction is Direction.FORWARD:
            payload, live = self._made_forward(action, state)
        elif action.stage in self._stages:
            payload = state.gradients.pop((edge, microbatch))
        payload = map_tensors(payload, torch.Tensor.detach)
        sending, receiving = exchange(self._communicator, payload, edge, direction, deadline=self._deadline)
        if sending is not None:
            state.sending.append((action, sending, live))
        if receiving is not None:
            state.receiving[edge, direction, microbatch] = action, receiving

    def _send(self, action: Action, payload: Payload, direction: Direction, live: _Live | None, state: _Step) -> None:
        detached = map_tensors(payload, torch.Tensor.detach)
        handle = self._communicator.isend(detached, edge=_edge(action), direction=direction)
        state.sending.append((action, handle, live))
        while len(state.sending) > 1 and state.sending[0][1].is_completed():
            self._finish_send(state)

    def _finish_send(self, state: _Step) -> None:
        action, handle, live = state.sending.popleft()
        handle.wait(self._deadline)
        for hook in self._message_hooks:
            hook.completed(action)
        if live is None or not self._deallocate:
            return
        live.unsent -= 1
        if live.unsent == 0:
            for tensor in flatten([live.outputs[edge] for edge in live.outputs if edge not in self._inside]):
                # An input passed straight on is a leaf: its storage is not ours to free.
                if tensor is not None and tensor.grad_fn is not None:
                    deallocate_output_tensor(tensor, deallocate_pipeline_outputs=True)

    def _receive_forward(self, action: Action, state: _Step) -> None:
        self._receive(action, Direction.FORWARD, state)

    def _receive_backward(self, action: Action, state: _Step) -> None:
        self._receive(action, Direction.BACKWARD, state)

    def _receive(self, action: Action, direction: Direction, state: _Step) -> None:
        edge = _edge(action)
        handle = self._communicator.irecv(edge=edge, direction=direction)
        state.receiving[edge, direction, _microbatch(action)] = action, handle

    def _reduce(self, action: Action, state: _Step) -> None:
        del state
        self._reducers[_reducer_name(action)]()


def position_of(plan: Plan, stages: Iterable[int]) -> int:
    """The position of ``plan`` that holds exactly ``stages``.

    Raises:
        PlanMismatchError: there is none; the message lists what each position holds.
    """
    wanted = frozenset(stages)
    held = [frozenset(present) for present in plan.stages_at]
    for position, present in enumerate(held):
        if present == wanted:
            return position
    table = ", ".join(f"position {position}: {sorted(present)}" for position, present in enumerate(held))
    raise PlanMismatchError(f"this rank has stages {sorted(wanted)}, but no position of the plan holds these; {table}")


def _goes_forward(action: Action) -> bool:
    """Whether an evaluation has the action: a forward, and what carries an activation."""
    if action.kind is ActionKind.COLLECTIVE:
        return action.direction is Direction.FORWARD
    return action.kind in (ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F)


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """What a stage on the same rank receives: the values, with a gradient of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _nothing_to_end(reason: str) -> None:
    """What stands for `abort` on a communicator without one."""


def _microbatch(action: Action) -> int:
    if action.microbatch is None:
        raise PlanMismatchError(f"{action} has no microbatch")
    return action.microbatch


def _edge(action: Action) -> Edge:
    if action.edge is None:
        raise PlanMismatchError(f"{action} has no edge")
    return action.edge


def _reducer_name(action: Action) -> int | str:
    return action.group if action.group is not None else action.stage
