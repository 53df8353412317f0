"""Execute a verified plan: exactly its actions, in its order. Each is bound once to what it does; a step only calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from attrs import evolve

from pipegrid.autograd import compiled_modules
from pipegrid.core.edge import Edge
from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Seconds, checked, instance
from pipegrid.monitor import FIRST_STEP_SECONDS, JobFailedError, Monitor
from pipegrid.plans.plan import Action, ActionKind, Plan
from pipegrid.plans.simulate import simulate, unit_costs
from pipegrid.plans.verify import Proof
from pipegrid.schedules.runtime.actions import Call, Effect, PairEffect
from pipegrid.schedules.runtime.agreement import StepAgreement
from pipegrid.schedules.runtime.failures import line_of
from pipegrid.schedules.runtime.flight_recorder import FlightRecorder
from pipegrid.schedules.runtime.position import BoundPosition
from pipegrid.schedules.runtime.preflight import (
    bare_stages,
    position_of,
    prove,
    replica_of,
    require_runnable,
    require_stages,
)
from pipegrid.schedules.runtime.program import Cursor, programs
from pipegrid.schedules.runtime.stages.hooks import Hook
from pipegrid.schedules.runtime.stages.stage import RuntimeStage, require_bare
from pipegrid.schedules.runtime.step_failures import PipelineError, StepFailures
from pipegrid.schedules.runtime.warm_up import warm_up_stages
from pipegrid.search.buffers import PositionBuffers
from pipegrid.transport.base import Communicator, as_communicator
from pipegrid.transport.protocol import Payload, PipelineCommunicator
from pipegrid.transport.streams import has_streams

_Stages = Annotated[Any, instance(Mapping, "a dict of this rank's stages by global number")]
_Hook = Annotated[Any, instance(Hook, "a hook with before(action) and after(action)")]
_Effect = Annotated[Any, instance(Callable, "a function of an action and of what runs it")]
_Scale = Annotated[Any, instance(Callable, "a function from a loss to the scaled loss")]


def _rank_of(communicator: Communicator, monitor: Monitor | None) -> int | None:
    """This rank, as the communicator, the monitor or the default process group knows it; None in one process."""
    rank = monitor.rank if communicator.rank is None and monitor is not None else communicator.rank
    if rank is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return rank


class PipelineRuntime:
    r"""Runs one position of a plan, step after step.

    Where units move between replicas, the ranks at both ends of a way construct it together, for one plan after the
    other.

    Args:
        plan: a lowered plan, which is verified here, or the `Proof` that `verify` returned for it; the same on every
            rank.
        stages: this rank's stages by global number: exactly those that one position of the plan holds.
        communicator: moves payloads along the plan's edges; None where all stages are here.
        replica: of this rank, where the plan has routes; it runs position p of replica r as actor ``p + r *
            plan.positions_each``, and microbatches are units. None is the communicator's.
        hooks: called around every action, in order.
        reducers: the effect of a ``REDUCE``, by its group (tied parameters), or by stage where it has none (with
            routes, the gradients of the stage over its replicas).
        deallocate_outputs: free the storage of an activation after its send, even if other objects still hold it.
        reuse_buffers: messages arrive in the fewest slots that the plan needs (`buffers`), over all lanes and both
            directions: from the first step on each has one memory in all steps. A stage must not keep an activation or
            a gradient that it received beyond its backward; a view of one that is kept costs the slot new memory.
            Messages whose shapes vary arrive in memory of their lane, which is used again likewise. Bridges between
            modules, ways to other replicas, collectives and evaluations allocate all the same.
        clone_outputs: each output, and each gradient of an input, is copied as a stage returns it: for a stage that
            returns the same memory again and again, such as a captured graph.
        deadline: seconds that any one transfer may take; None leaves it to the communicator.
        loss_scale: applied to a loss before its backward (mixed precision).
        monitor: publishes this rank's place in the plan, enforces deadlines and relays failures.
        failure_dir: where each rank that fails writes ``rank<number>.json`` (its place in the plan, the first failure,
            its lanes, versions), and torch's NCCL flight recorder beside it; None writes nothing.

    Raises:
        StepArgumentError: an argument cannot be used; stages, communicator or reducers that are not those of the plan;
            a plan without messages.
        P2PError: ways to other replicas that the communicator does not have, or that could not be opened.
        PlanError: the plan has faults, all of which are listed.

    Examples:
        >>> import torch, types
        >>> model = torch.nn.Linear(4, 1)
        >>> stage = types.SimpleNamespace(forward=lambda number, inputs: Forwarded({}, model(torch.ones(2, 4)).mean()))
        >>> PipelineRuntime(from_text("microbatches 2\n0: 0F0 0B0 0F1 0B1"), {0: stage}, None).step()
        >>> model.bias.grad
        tensor([2.])
    """

    def __init__(
        self,
        plan: Plan | Proof,
        stages: Mapping[int, RuntimeStage],
        communicator: Communicator | PipelineCommunicator | None,
        *,
        replica: int | None = None,
        hooks: Sequence[Hook] = (),
        reducers: Mapping[int | str, Callable[[], None]] | None = None,
        deallocate_outputs: bool = False,
        reuse_buffers: bool = False,
        clone_outputs: bool = False,
        deadline: float | None = None,
        loss_scale: Callable[[torch.Tensor], torch.Tensor] | None = None,
        monitor: Monitor | None = None,
        failure_dir: str | PathLike[str] | None = None,
    ) -> None:
        stages = checked(stages, _Stages, "stages", StepArgumentError)
        hooks = checked(hooks, tuple[_Hook, ...], "hooks", StepArgumentError)
        loss_scale = checked(loss_scale, _Scale | None, "loss_scale", StepArgumentError)
        deadline = checked(deadline, Seconds | None, "deadline", StepArgumentError)
        checked(monitor, Monitor | None, "monitor", StepArgumentError)
        checked(failure_dir, str | PathLike[str] | None, "failure_dir", StepArgumentError)
        checked(reducers, Mapping[Any, Any] | None, "reducers", StepArgumentError)
        reducers = dict(reducers or {})
        self.plan = plan.plan if isinstance(plan, Proof) else plan
        alone, communicator = communicator is None, as_communicator(communicator)
        deadline = None if deadline == communicator.deadline else deadline  # its own, which it keeps by itself
        self.position = position_of(self.plan, stages, replica_of(communicator.job, replica))
        require_stages(stages, self.plan.num_slices)
        require_runnable(self.plan, self.position, communicator, reducers)
        self.proof = prove(plan, communicator.job)
        self._communicator, self._monitor, self._stages = communicator, monitor, stages
        self._bound = BoundPosition(
            self.plan,
            self.position,
            stages,
            communicator,
            hooks=hooks,
            reducers=reducers,
            deallocate_outputs=deallocate_outputs,
            reuse_buffers=reuse_buffers,
            clone_outputs=clone_outputs,
            deadline=deadline,
            loss_scale=loss_scale,
        )
        self._bound.open_across()
        watching = () if monitor is None or monitor.progress is None else (monitor.progress,)
        self._hooks, self._effects = (*hooks, *watching), dict[ActionKind, Effect]()
        self._paired: PairEffect | None = None
        self._announce = () if monitor is None else (monitor.announce,)
        self._program, self._forwards = programs(self._bound, self._hooks, self._effects, self._paired, self._announce)
        rank = _rank_of(communicator, monitor)
        self._agreement = StepAgreement(
            self.plan, communicator, self._bound.queues, rank, deadline or communicator.deadline
        )
        self._recorder = FlightRecorder(None if failure_dir is None else Path(failure_dir), rank, communicator)
        self._cursor = Cursor(self.plan, rank, self.position, self._program)
        self._failures = StepFailures(self._bound, self._cursor, monitor, self._agreement, self._recorder, alone=alone)
        self._ordered = communicator.batches  # else nothing depends on the order of calls
        self._deadline = deadline
        self._patient = False  # whether messages have the longer deadline of a first step
        self._cold = {True, False}  # which of step() and eval(), by grad mode, have not run yet
        self._one_step = threading.Lock()
        self._bare = {stage: stages[stage] for stage in bare_stages(self.plan, self.position, stages)}

    # Steps

    @property
    def where(self) -> str:
        """This rank's place in the plan, for errors and the monitor."""
        return self._cursor.where

    @property
    def buffers(self) -> PositionBuffers:
        """The slots in which messages arrive here with ``reuse_buffers``, proved; messages without one have their own.

        The same with each communicator whose lanes post equally many receives before their turn.
        """
        return self._bound.buffers

    def register(self, kind: ActionKind | str, function: Effect | PairEffect) -> None:
        """Have ``function(action, run)`` called in place of each action of ``kind``, from the next step on.

        ``run()`` does what the action does by itself, or the function that was registered before. It is called once,
        except for a ``REDUCE``, which a function may replace. What an action waits for (a payload, room to send) is
        there before the call.

        A function for ``ActionKind.F_B``, pairs of a forward and a backward, is called as ``function(pair, forward,
        backward)``. It calls each of the two once and may interleave them, as `TakeTurns` does; by default one runs
        after the other, forward first. It takes the place of an earlier one. Functions for ``F``, ``B`` and ``I`` are
        called inside of it.

        Args:
            kind: of the actions, or ``ActionKind.F_B``.
            function: called with the `Action` and ``run``.

        Raises:
            PlanError: not a kind of action.
            StepArgumentError: not a function; or one for pairs, and a stage gathers its parameters by itself.
            PipelineError: called inside a step.
        """
        if kind != ActionKind.F_B:
            kind = ActionKind(kind)
        function = checked(function, _Effect, "function", StepArgumentError)
        if not self._one_step.acquire(blocking=False):
            raise self._inside("register()")
        try:
            effects, paired = dict(self._effects), self._paired
            if kind == ActionKind.F_B:
                paired = cast("PairEffect", function)
            else:
                kind, effect = ActionKind(kind), cast("Effect", function)
                before = effects.get(kind)
                effects[kind] = effect if before is None else partial(_around, effect, before)
            self._program, self._forwards = programs(self._bound, self._hooks, effects, paired, self._announce)
            self._effects, self._paired = effects, paired
        finally:
            self._one_step.release()

    def describe(self) -> str:
        """What is proved of the plan and, after a step, the memory of received messages where that is used again.

        And which stages do not run their backwards in halves as planned; what that costs is in forwards of a position,
        where ``F``, ``I`` and ``W`` take one each.
        """
        lines = [str(self.proof), *self._bound.describe_slots()]
        whole = [number for number, own in self._bound.runners.items() if any(runner.compiled for runner in own)]
        if whole:
            costs, count = unit_costs(self.plan), self.plan.num_stages
            shares = costs.per_stage("I", count)
            at_i = [2 * share if stage in whole else share for stage, share in enumerate(shares)]
            changed = evolve(costs, I=at_i, W=[0.0 if stage in whole else share for stage, share in enumerate(shares)])
            before, after = (simulate(self.plan, each).makespan for each in (costs, changed))
            for number in whole:
                regions = ", ".join(compiled_modules(getattr(self._stages[number], "model", None))) or "in the stage"
                lines.append(f"stage {number}: a compiled region runs whole at I ({regions}), and W computes nothing")
            lines.append(f"with whole backwards there, a step takes {after:g} forwards in place of {before:g}")
        return "\n".join(lines)

    def step(
        self,
        *,
        start: Call | None = None,
        finish: Call | None = None,
        beside: Call | None = None,
        agree: str = "",
        batch: str | None = None,
    ) -> None:
        """Run the plan once: every forward and every backward of this position.

        Args:
            start: called as the step begins, before neighbours compare it; may communicate among ranks of one stage.
                Its failure is the step's, also on neighbours.
            finish: called after the last action, likewise, such as a reduction of gradients. A monitor watches both.
            beside: called behind the last forward of this rank and the send of its output, where one leaves: to
                start what may go on beside the rest of the step.
            agree: what else neighbours must run alike; compared beside the plan, before a message is used.
            batch: signature of what the step computes on, for a communicator with ``shapes="learned"``: the shapes and
                dtypes of the microbatches, on which those of messages depend.

        Raises:
            DisagreementError: a neighbour (with a monitor, any rank) runs another plan, or evaluates.
            PipelineError: the step failed, or an earlier one did.
            JobFailedError: with a monitor, another rank failed before this step; nothing was sent.
            GradientError: a stage has a wrapper that would reduce the wrong gradients; nothing was sent.
        """
        require_bare(self._bare)
        self._run(grad=True, start=start, finish=finish, beside=beside, agree=agree, batch=batch)

    def warm_up(self, payloads: Mapping[Edge, Payload] | None = None) -> None:
        """Run a forward and a backward of each stage of this rank, without a message; before the first step.

        All ranks call it at about the same time: kernels are loaded, and stages compiled, side by side, and not one
        stage after the other in the first step. Gradients, buffers of modules and random number generators are as
        before; see `pipegrid.schedules.warm_up`. A stage's forward is called for microbatch 0, so one that reads an
        iterator takes an item.

        Args:
            payloads: what the stages receive, by edge: tensors of the shapes of a step, of any values.

        Raises:
            StepArgumentError: no payload for an edge to a stage of this rank; or a plan with slices or sharded
                stages, for which `pipegrid.schedules.warm_up` takes a forward of the caller's own.
        """
        warm_up_stages(self._bound, payloads or {})

    def eval(self, *, beside: Call | None = None, batch: str | None = None) -> None:
        """Run only the plan's forwards and their communication, without gradients; ``beside``, ``batch``: as of `step`.

        A verified plan stays free of deadlock without its backwards: what remains keeps its order.

        Raises:
            DisagreementError, PipelineError, JobFailedError: as `step`.
        """
        self._run(grad=False, beside=beside, batch=batch)

    def check(self) -> None:
        """Raise if this runtime or, with a monitor, the job has failed: for calls before an update of parameters.

        On CUDA `step` returns before its transfers and collectives are done.

        Raises:
            PipelineError, JobFailedError: it has failed.
        """
        self._failures.look()
        self._failures.require_none()
        if self._monitor is not None:
            self._monitor.check()

    def _inside(self, what: str) -> PipelineError:
        return PipelineError(f"{what} inside a step, at {self.where}: a runtime runs one step at a time")

    def _run(
        self,
        *,
        grad: bool,
        start: Call | None = None,
        finish: Call | None = None,
        beside: Call | None = None,
        agree: str = "",
        batch: str | None = None,
    ) -> None:
        if not self._one_step.acquire(blocking=False):
            raise self._inside("step() or eval()")
        try:
            cursor, program = self._cursor, self._program if grad else self._forwards
            for sharded in self._bound.sharded.values():
                sharded.begin()
            if self._failures.first is not None:
                self._failures.require_none()
            self._bound.begin(training=grad)
            if grad in self._cold or self._patient:
                self._allow_compilation(first=grad in self._cold)
                self._cold.discard(grad)
            cursor.program, cursor.at = program, -1
            if self._monitor is not None:
                try:
                    self._monitor.begin(self.plan, where=lambda: self.where, abort=self._failures.abort)
                except JobFailedError as error:
                    self._recorder.record(self.plan, str(error), line_of(error), self.where)
                    raise
            try:
                if start is not None:  # first: a neighbour's difference could end one replica, and leave another in it
                    start()
                self._agreement.begin("a step" if grad else "an evaluation", agree, batch)
                with torch.set_grad_enabled(grad), ExitStack() as order:
                    deadline, own = self._bound.deadline or 0.0, self._communicator.deadline
                    if self._ordered or deadline > own:
                        order.enter_context(self._communicator.in_order())
                        order.enter_context(self._communicator.patient(deadline or own))
                    self._bound.start(training=grad)
                    self._bound.beside = beside
                    for cursor.at, call in enumerate(program.calls):
                        call()
                    cursor.at = len(program.calls)
                    self._bound.settle()
                    self._agreement.end()
                    for sharded in self._bound.sharded.values():
                        sharded.end()
                    if finish is not None:
                        finish()
            except BaseException as error:  # also an interrupt leaves lanes with messages of a broken step
                failed = self._failures.end(error)
                if failed is error:
                    raise
                raise failed from error
            if self._monitor is not None:
                self._monitor.end()
        finally:
            self._one_step.release()

    def _allow_compilation(self, *, first: bool) -> None:
        """Messages of the first step have at least 600 s where stages are compiled, on CUDA 30 minutes to load."""
        models = [getattr(stage, "model", None) for stage in self._stages.values()]
        least = 600.0 if any(map(compiled_modules, models)) else 0.0
        if has_streams(self._communicator.device or torch.device("cpu")):
            least = FIRST_STEP_SECONDS
        patient = first and least > 0
        if patient or self._patient:
            patience = max(self._deadline or self._communicator.deadline, least)
            self._bound.set_deadline(patience if patient else self._deadline)
            self._patient = patient


def _around(function: Effect, before: Effect, action: Action, run: Call) -> None:
    function(action, partial(before, action, run))
