"""Execute a verified plan: exactly its actions, in its order, through anything that speaks the protocol.

The runtime decides nothing. A plan says what this rank's position does; a `Stage` says what a forward is; a
`PipelineCommunicator` moves payloads along edges. At construction every action is bound to what it does, so that a
step only calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from attrs import evolve, frozen

from pipegrid.schedules.autograd import compiled_modules
from pipegrid.schedules.monitor import DisagreementError
from pipegrid.schedules.plan import SHARDING, Action, ActionKind, actions_of
from pipegrid.schedules.runtime.agreement import StepAgreement
from pipegrid.schedules.runtime.edge_queues import RecvQueue, SendQueue, exchange
from pipegrid.schedules.runtime.failures import line_of, marked, relayed, without
from pipegrid.schedules.runtime.hooks import Hook, HostLead, MessageHook
from pipegrid.schedules.runtime.preflight import (
    check_arguments,
    position_of,
    prove,
    reducer_name,
    require_messenger,
    require_right_wrappers,
    require_runnable,
)
from pipegrid.schedules.runtime.sharded import ShardedStage, in_evaluation, is_last_reduction, stages_sharded
from pipegrid.schedules.runtime.stage import Forwarded, Stage
from pipegrid.schedules.runtime.stage_runner import StageRunner
from pipegrid.schedules.simulate import simulate, unit_costs
from pipegrid.schedules.verify import Dataflow, Proof, dataflow_of
from pipegrid.transport import streams
from pipegrid.transport.edge import Direction, Edge

if TYPE_CHECKING:
    from pipegrid.schedules.monitor import Monitor, Report
    from pipegrid.schedules.plan import Plan
    from pipegrid.transport.protocol import PipelineCommunicator

__all__ = [
    "Forwarded",
    "Hook",
    "MessageHook",
    "PipelineError",
    "PipelineRuntime",
    "Stage",
    "position_of",
]


_ABORT_SECONDS = 0.3
_DEADLINE = 300.0
_COMPILATION = 600.0
_COMPILING = 600.0


class PipelineError(RuntimeError):
    """A step failed. The first line is the first failure: "rank 3, stage 2, microbatch 3: ValueError: ...".

    This rank's place in the plan and how the failure reached it follow; this rank's own error is chained.
    """


_Call: TypeAlias = Callable[[], None]


@frozen
class _Bound:
    """An action with its effect here. ``waits`` wait for its inputs and for room to send."""

    action: Action
    run: _Call
    waits: tuple[_Call, ...] = ()


@frozen
class _Step:
    """A step of the program: one action, or a batch whose messages are issued together.

    Attributes:
        calls: of an action all, of a batch those before it.
        batch: of a batch, those inside it.
    """

    actions: tuple[Action, ...]
    calls: tuple[_Call, ...]
    batch: tuple[_Call, ...]

    @classmethod
    def of(cls, bounds: Sequence[_Bound], hooks: Sequence[Hook]) -> _Step:
        """The step of some bound actions, with each hook around every one of them."""
        runs: list[_Call] = []
        for bound in bounds:
            runs += [partial(hook.before, bound.action) for hook in hooks]
            runs.append(bound.run)
            runs += [partial(hook.after, bound.action) for hook in hooks]
        waits = tuple(wait for bound in bounds for wait in bound.waits)
        actions = tuple(bound.action for bound in bounds)
        return cls(actions, waits, tuple(runs)) if len(bounds) > 1 else cls(actions, (*waits, *runs), ())


def _program(
    steps: Sequence[Sequence[_Bound]], hooks: Sequence[Hook], device: torch.device | None
) -> tuple[_Step, ...]:
    """The steps with anything in them; on a device with streams, with a `HostLead`: first, as it waits."""
    if device is not None and streams.has_streams(device):
        hooks = (HostLead([bound.action for bounds in steps for bound in bounds], device), *hooks)
    return tuple(_Step.of(bounds, hooks) for bounds in steps if bounds)


def _goes_forward(action: Action) -> bool:
    """Whether an evaluation has the action: a forward, and what carries an activation."""
    if action.kind is ActionKind.COLLECTIVE:
        return action.direction is Direction.FORWARD
    return action.kind in (ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F)


def _rank_of(communicator: Any, monitor: Monitor | None) -> int | None:
    """This rank, as the communicator, the monitor or the default process group knows it; None in one process."""
    rank: int | None = getattr(communicator, "rank", None)
    if rank is None and monitor is not None:
        return monitor.rank
    if rank is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return rank


def deadline_of(communicator: Any) -> float:
    """The deadline of a communicator's transfers, in seconds."""
    return float(getattr(getattr(communicator, "config", None), "deadline", None) or _DEADLINE)


class PipelineRuntime:
    """Runs one position of a plan, step after step.

    Args:
        plan: a lowered plan, which is verified here, or the `Proof` that `verify` returned for it; the same on every
            rank. The proof must be of the communicator's kind of lanes (separate or shared).
        stages: this rank's stages by global number: exactly those that one position of the plan holds.
        communicator: moves payloads along the plan's edges.
        hooks: called around every action, in order.
        reducers: the effect of a ``REDUCE`` (tied parameters), by its group, or by stage where it has none.
        deallocate_outputs: free the storage of an activation after its send, even if other objects still hold it.
        reuse_buffers: the buffer of a received activation takes another one after the backward of its microbatch, so
            the plan's peak is all that is ever allocated. A stage must not keep what it received beyond that, nor a
            view of it (in a log, for example). Bridges between modules allocate all the same.
        deadline: seconds that any one transfer may take; None leaves it to the communicator.
        loss_scale: applied to a loss before its backward (mixed precision).
        monitor: publishes this rank's place in the plan, enforces deadlines and relays failures.

    Raises:
        RuntimeArgumentError: an argument cannot be used.
        PlanMismatchError: no position holds exactly these stages; the plan has not been lowered, has actions that
            cannot be run, or messages without a communicator; the reducers are not those that it asks for.
        PlanError: the plan has faults, all of which are listed.
    """

    def __init__(
        self,
        plan: Plan | Proof,
        stages: Mapping[int, Stage],
        communicator: PipelineCommunicator,
        *,
        hooks: Sequence[Hook] = (),
        reducers: Mapping[int | str, Callable[[], None]] | None = None,
        deallocate_outputs: bool = False,
        reuse_buffers: bool = False,
        deadline: float | None = None,
        loss_scale: Callable[[torch.Tensor], torch.Tensor] | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        check_arguments(plan, stages, hooks, loss_scale, deadline)
        proved = plan if isinstance(plan, Proof) else None
        self.plan = plan = plan.plan if isinstance(plan, Proof) else plan
        self.position = position_of(plan, stages)
        self._communicator = communicator
        self._in_order = getattr(communicator, "in_order", nullcontext)  # no part of the protocol
        self._monitor = monitor
        every = (*hooks, *(() if monitor is None or monitor.progress is None else (monitor.progress,)))
        self._reducers = dict(reducers or {})
        require_runnable(plan, self.position, communicator, self._reducers)
        require_messenger(plan, self.position, communicator)
        self.proof = prove(proved or plan, communicator)
        flows = dataflow_of(plan)
        self._actions = tuple(plan.actions(self.position))
        self._sharded = {number: ShardedStage(number, stages[number]) for number in stages_sharded(self._actions)}
        self._open_queues(flows, stages, deadline, [hook for hook in hooks if isinstance(hook, MessageHook)])
        self._runners = {
            number: self._runner(
                number, stage, flows, deallocate=deallocate_outputs, reuse=reuse_buffers, loss_scale=loss_scale
            )
            for number, stage in stages.items()
        }
        steps = [[self._bind(action) for action in actions_of(step)] for step in plan.positions[self.position]]
        gathers = in_evaluation([bounds[0].action for bounds in steps])
        forwards = [
            [bound for bound in bounds if place in gathers or _goes_forward(bound.action)]
            for place, bounds in enumerate(steps)
        ]
        device = getattr(communicator, "device", None)
        self._program, self._forwards = (_program(bounds, every, device) for bounds in (steps, forwards))
        local = {queue.edge for queue in self._receives.values() if queue.local}
        outside = {edge for edge, _ in (*self._receives, *self._sends)} - local
        self._rank = _rank_of(communicator, monitor)
        self._agreement = StepAgreement(
            plan, communicator, tuple(sorted(outside)), self._rank, deadline or deadline_of(communicator)
        )
        self._deadline, self._patient = deadline, False
        self._cold = [self._program, self._forwards]  # what has not run yet
        self._one_step = threading.Lock()
        self._stages, self._wrappers_checked = stages, False
        self._running = self._program
        self._cursor = -1
        self._failure: str | None = None

    # What is bound at construction

    def _open_queues(
        self, flows: Dataflow, stages: Mapping[int, Stage], deadline: float | None, hooks: Sequence[MessageHook]
    ) -> None:
        """A `RecvQueue` per flow that a stage here consumes, a `SendQueue` per flow that one produces."""
        self._receives: dict[tuple[Edge, Direction], RecvQueue] = {}
        self._sends: dict[tuple[Edge, Direction], SendQueue] = {}
        device = getattr(self._communicator, "device", None)
        in_streams = device is not None and streams.has_streams(device)
        for flow in flows.flows:
            way = flow.edge, flow.direction
            local = flow.producer in stages and flow.consumer in stages and flow.group is None
            common = (*way, self._communicator, deadline, hooks)
            if flow.consumer in stages:
                self._receives[way] = RecvQueue(*common, local=local)
            if flow.producer in stages:
                self._sends[way] = SendQueue(
                    *common, local=self._receives[way] if local else None, in_streams=in_streams
                )

    def _runner(
        self,
        number: int,
        stage: Stage,
        flows: Dataflow,
        *,
        deallocate: bool,
        reuse: bool,
        loss_scale: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> StageRunner:
        forward, backward = Direction.FORWARD, Direction.BACKWARD
        arriving = [self._receives[flow.edge, forward] for flow in flows.inputs(number, forward)]
        leaving = [self._sends[flow.edge, forward] for flow in flows.outputs(number, forward)]
        gradients_in = [self._receives[flow.edge, backward] for flow in flows.inputs(number, backward)]
        gradients_out = [self._sends[flow.edge, backward] for flow in flows.outputs(number, backward)]
        trains = number not in self.plan.forward_only
        # An output may be a view of an input. One that left by message, and whose gradient has come back, was read;
        # one that was handed over on this position may be needed longer, by the W of the stage that has it.
        answered = {queue.edge for queue in gradients_in}
        returned = all(queue.edge in answered and queue.local is None for queue in leaving)
        for queue in arriving:
            queue.lends = reuse and trains and returned and not queue.local
        return StageRunner(
            number,
            stage,
            self.plan.num_microbatches,
            arriving=arriving,
            leaving=leaving,
            gradients_in=gradients_in,
            gradients_out=gradients_out,
            trains=trains,
            splits=any(a.kind is ActionKind.I and a.stage == number for a in self._actions),
            reduced_by_plan=number in self._sharded,
            deallocate=deallocate,
            loss_scale=loss_scale,
            declared=getattr(self._communicator, "payload_edges", frozenset()),
        )

    def _bind(self, action: Action) -> _Bound:
        kind, microbatch = action.kind, action.microbatch
        if kind is ActionKind.REDUCE:
            return _Bound(action, self._reducers[reducer_name(action)])
        if kind in SHARDING:
            return _Bound(action, self._bind_sharding(action))
        assert microbatch is not None  # Action's own validation: only REDUCE and COLLECTIVE may omit it
        if action.edge is not None and action.direction is not None:
            way = action.edge, action.direction
            if kind is ActionKind.COLLECTIVE:
                sends, receives = self._sends.get(way), self._receives.get(way)
                room = () if sends is None else (sends.make_room,)
                run = partial(exchange, microbatch, action, self._communicator, sends, receives)
                return _Bound(action, run, room)
            if kind.is_send:
                queue = self._sends[way]
                return _Bound(action, partial(queue.send, microbatch, action), (queue.make_room,))
            return _Bound(action, partial(self._receives[way].receive, microbatch, action))
        runner = self._runners[action.stage]
        verbs = {
            ActionKind.F: (runner.forward, runner.arriving),
            ActionKind.B: (runner.backward, runner.gradients_in),
            ActionKind.I: (runner.backward_inputs, runner.gradients_in),
            ActionKind.W: (runner.backward_weights, ()),
        }
        verb, needed = verbs[kind]
        # What an action needs from elsewhere is waited for before it counts as started, so that a recorded
        # timeline shows computing as computing and waiting as waiting.
        waits: tuple[_Call, ...] = tuple([partial(queue.wait, microbatch) for queue in needed if not queue.local])
        if kind is ActionKind.W and action.stage in self._sharded:  # no hook of FSDP2 waits for it
            waits = (self._sharded[action.stage].wait,)
        return _Bound(action, partial(verb, microbatch), waits)

    def _bind_sharding(self, action: Action) -> _Call:
        sharded = self._sharded[action.stage]
        if action.kind is ActionKind.UNSHARD:
            return sharded.unshard
        if action.kind is ActionKind.RESHARD:
            return sharded.reshard
        return partial(sharded.reduce, last=is_last_reduction(action, self._actions))

    # Steps

    @property
    def where(self) -> str:
        """This rank's place in the plan, for errors and the monitor."""
        if self._cursor < 0:
            return f"position {self.position}, before its first action"
        if self._cursor >= len(self._running):
            return f"position {self.position}, past its last action"
        work = " ".join(map(str, self._running[self._cursor].actions))
        return f"position {self.position}, step {self._cursor + 1} of {len(self._running)}: {work}"

    def describe(self) -> str:
        """What is proved of the plan and, after a step, which stages do not run their backwards in halves as planned.

        The cost of that is in forwards of a position, where ``F``, ``I`` and ``W`` take one each.
        """
        lines = [str(self.proof)]
        whole = [number for number, runner in self._runners.items() if runner.compiled]
        if whole:
            costs, count = unit_costs(self.plan), self.plan.num_stages
            shares = costs.per_stage("I", count)
            changed = evolve(
                costs,
                I=[2 * share if stage in whole else share for stage, share in enumerate(shares)],
                W=[0.0 if stage in whole else share for stage, share in enumerate(shares)],
            )
            before, after = (simulate(self.plan, each).makespan for each in (costs, changed))
            lines += [
                f"stage {number}: a compiled region runs whole at I ("
                f"{', '.join(compiled_modules(getattr(self._stages[number], 'model', None))) or 'in the stage'}), and "
                "W computes nothing"
                for number in whole
            ]
            lines.append(f"with whole backwards there, a step takes {after:g} forwards in place of {before:g}")
        return "\n".join(lines)

    def step(self, *, finish: Callable[[], None] | None = None, agree: str = "") -> None:
        """Run the plan once: every forward and every backward of this position.

        Args:
            finish: called after the last action, as part of the step (gradient reduction): watched by the monitor, and
                its failure is the step's.
            agree: what else neighbours must run alike; compared beside the plan, before the first message.

        Raises:
            DisagreementError: a neighbour runs another plan or evaluates; with a monitor, any rank does. The rank that
                comes second to the step sends nothing.
            PipelineError: the step failed, or an earlier one did. Its first line is the first failure of the job as
                far as it is known here: rank, stage, microbatch and error.
            JobFailedError: with a monitor, another rank failed before this step; nothing was sent.
            ReductionError: a stage has a wrapper that would reduce the wrong gradients; nothing was sent.
        """
        if not self._wrappers_checked:
            require_right_wrappers(self.plan, self.position, self._stages)
            self._wrappers_checked = True
        self._run(self._program, grad=True, finish=finish, agree=agree)

    def eval(self) -> None:
        """Run only the plan's forwards and their communication, without gradients.

        A verified plan stays free of deadlock without its backwards: what remains keeps its order.

        Raises:
            DisagreementError, PipelineError, JobFailedError: as `step`.
        """
        self._run(self._forwards, grad=False)

    def check(self) -> None:
        """Raise if this runtime or, with a monitor, the job has failed: for calls before an update of parameters.

        On CUDA `step` returns before its transfers are done, so a failure may come after it.

        Raises:
            PipelineError, JobFailedError: it has failed.
        """
        if self._failure is not None:
            raise PipelineError(f"this runtime failed before: {self._failure.splitlines()[0]}. {self._remedy}")
        if self._monitor is not None:
            self._monitor.check()

    def _run(self, program: tuple[_Step, ...], *, grad: bool, finish: _Call | None = None, agree: str = "") -> None:
        if not self._one_step.acquire(blocking=False):
            raise PipelineError(
                f"step() or eval() was called while this runtime is in a step, at {self.where}: a runtime runs one "
                "step at a time, so no stage, hook or other thread may start one inside it"
            )
        try:
            for sharded in self._sharded.values():
                sharded.begin()
            self._start(program, grad=grad)
            try:
                self._agreement.begin("a step" if grad else "an evaluation", agree)
                with torch.set_grad_enabled(grad), self._in_order():
                    for self._cursor, step in enumerate(program):
                        for call in step.calls:
                            call()
                        if step.batch:
                            with self._communicator.batch():
                                for call in step.batch:
                                    call()
                    self._cursor = len(program)
                    for queue in self._sends.values():
                        queue.settle()
                    for sharded in self._sharded.values():
                        sharded.end()
                    if finish is not None:
                        finish()
            except BaseException as error:  # also an interrupt leaves lanes with messages of a broken step
                failed = self._failed(error)
                if failed is error:
                    raise
                raise failed from error
            if self._monitor is not None:
                self._monitor.end()
        finally:
            self._one_step.release()

    def _start(self, program: tuple[_Step, ...], *, grad: bool) -> None:
        if self._failure is not None:
            raise PipelineError(f"this runtime failed before: {self._failure.splitlines()[0]}. {self._remedy}")
        self._begin(grad=grad)
        if self._cold or self._patient:
            self._allow_compilation(program)
        self._running, self._cursor = program, -1
        if self._monitor is not None:
            self._monitor.begin(self.plan, where=lambda: self.where, abort=self._abort)

    def _allow_compilation(self, program: tuple[_Step, ...]) -> None:
        """Where stages are compiled, messages of the first step have at least 600 s: neighbours compile meanwhile."""
        left = [each for each in self._cold if each is not program]
        first, self._cold = len(left) < len(self._cold), left
        patient = first and any(compiled_modules(getattr(stage, "model", None)) for stage in self._stages.values())
        if patient or self._patient:
            patience = max(self._deadline or deadline_of(self._communicator), _COMPILATION)
            queues: list[RecvQueue | SendQueue] = [*self._receives.values(), *self._sends.values()]
            for queue in queues:
                queue.deadline = patience if patient else self._deadline
            self._patient = patient

    def _begin(self, *, grad: bool) -> None:
        """Drop the state of an earlier step."""
        for receives in self._receives.values():
            receives.begin()
        for sends in self._sends.values():
            sends.begin()
        for runner in self._runners.values():
            runner.begin(training=grad)

    # Failures

    @property
    def _remedy(self) -> str:
        if self._communicator is None:
            return "No message is under way: rebuild the runtime before the next one"
        return (
            "Lanes may hold messages of the broken step: rebuild the communicator and the runtime before the next one"
        )

    def _abort(self, reason: str) -> None:
        """End the lanes and pass the reason on, so that neighbours need not wait for their deadlines.

        For no longer than 0.3 s: a peer that is stopped does not take its note, and must not delay the error here.
        """
        abort: Callable[[str], object] | None = getattr(self._communicator, "abort", None)
        if abort is not None:
            reason = relayed(reason) or reason
            thread = threading.Thread(target=abort, args=(marked(reason),), name="pipegrid-abort", daemon=True)
            thread.start()
            thread.join(_ABORT_SECONDS)

    def _failed(self, error: BaseException) -> BaseException:
        """End what a failed step has begun; the error to raise."""
        place, stopped = self.where, line_of(error)
        cause = relayed(stopped)
        if isinstance(error, DisagreementError):
            failure = str(error)
        elif cause is None:
            failure = f"{self._here()}: {stopped}\n  at {place}"
        else:
            failure = f"{cause}\n  {self._here()} stopped at {place}: {without(stopped)}"
        self._begin(grad=False)  # so that what the step held is not held until the runtime goes
        report: Report | None = None
        if self._monitor is not None:
            report = self._monitor.failed(failure)
            if report.first.text != failure and not isinstance(error, DisagreementError):
                first = report.first.text.splitlines()[0]
                failure = f"{first}\n  {self._here()} stopped at {place}: {without(stopped)}"
        else:
            self._abort(failure.splitlines()[0])
        self._failure = failure
        places = "" if report is None else f"\nThe ranks were at:\n{report.places}"
        if isinstance(error, DisagreementError) or not isinstance(error, Exception):
            return error
        different = self._agreement.look_again()
        if different is not None:
            self._failure = f"{different}. This rank had begun, and stopped at {place}"
            return DisagreementError(f"{self._failure}{places}")
        return PipelineError(f"{failure}\n{self._remedy}{places}")

    def _here(self) -> str:
        """This rank, and the stage and microbatch that it is at."""
        parts = [] if self._rank is None else [f"rank {self._rank}"]
        if 0 <= self._cursor < len(self._running):
            action = self._running[self._cursor].actions[0]
            parts.append(f"stage {action.stage}")
            if action.microbatch is not None:
                parts.append(f"microbatch {action.microbatch}")
        return ", ".join(parts) or "this process"
