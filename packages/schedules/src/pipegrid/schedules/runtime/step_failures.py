"""The end of a step that failed: lanes are ended, other ranks told, and the first failure of the job is found."""

from __future__ import annotations

import threading

from attrs import define, field

from pipegrid.monitor import DisagreementError, Monitor, first_failure
from pipegrid.schedules.runtime.agreement import StepAgreement
from pipegrid.schedules.runtime.failures import line_of, marked, relayed, without
from pipegrid.schedules.runtime.flight_recorder import FlightRecorder
from pipegrid.schedules.runtime.position import BoundPosition
from pipegrid.schedules.runtime.program import Cursor
from pipegrid.transport.collectives.waiting import device_collectives

_ABORT_SECONDS = 0.3


class PipelineError(RuntimeError):
    r"""A step failed. The first line is the first failure: "rank 3, stage 2, microbatch 3: ValueError: ...".

    This rank's place in the plan and how the failure reached it follow; this rank's own error is chained.

    Examples:
        >>> from types import SimpleNamespace
        >>> stage = SimpleNamespace(forward=lambda microbatch, inputs: 1 / 0)
        >>> PipelineRuntime(from_text("microbatches 1\n0: 0F0 0B0"), {0: stage}, None).step()
        Traceback (most recent call last):
            ...
        pipegrid.schedules.runtime.step_failures.PipelineError: stage 0, microbatch 0: ZeroDivisionError: division
            by zero
          at position 0, step 1 of 2: 0F0
        No message is under way: rebuild the runtime before the next one
    """


@define(eq=False)
class StepFailures:
    """What a runtime does when a step fails.

    Attributes:
        alone: all stages are on this rank, so that there are no lanes to rebuild.
        first: the failure of this runtime, after which it runs no step; None while it works.
    """

    position: BoundPosition
    cursor: Cursor
    monitor: Monitor | None
    agreement: StepAgreement
    recorder: FlightRecorder
    alone: bool
    first: str | None = field(default=None, init=False)

    def require_none(self) -> None:
        """Raise PipelineError if an earlier step has failed."""
        if self.first is not None:
            raise PipelineError(f"this runtime failed before: {self.first.splitlines()[0]}. {self._remedy}")

    def look(self) -> None:
        """Note what has failed since the last step returned: a transfer, or a collective of a device."""
        if self.first is None:
            try:
                device_collectives.check()
                self.position.communicator.check()
            except RuntimeError as error:
                self.first = f"{self.cursor.who}: {line_of(error)}"

    def abort(self, reason: str) -> None:
        """End the lanes and all device groups, and pass the reason on to neighbours, for no longer than 0.3 s."""
        self.recorder.take()
        reason = marked(relayed(reason) or reason)
        tell = self.position.communicator.abort
        thread = threading.Thread(target=tell, args=(reason,), name="pipegrid-abort", daemon=True)
        thread.start()  # tells the neighbours while the groups are aborted
        device_collectives.abort(reason)
        thread.join(_ABORT_SECONDS)

    def end(self, error: BaseException) -> BaseException:
        """End what a failed step has begun; the error to raise."""
        self.recorder.take()
        here, place, stopped = self.cursor.who, self.cursor.where, line_of(error)
        cause = relayed(stopped)
        # Before the lanes end, which carry what neighbours say of their step.
        different = None if isinstance(error, DisagreementError) else self.agreement.look_again(cause)
        failure = f"{here}: {stopped}\n  at {place}"
        if isinstance(error, DisagreementError):
            failure = str(error)
        elif cause is not None:
            failure = f"{cause}\n  {here} stopped at {place}: {without(stopped)}"
        self.position.drop()  # so that what the step held is not held until the runtime goes
        report = None if self.monitor is None else self.monitor.failed(failure)
        if report is not None:
            first = report.first.text
        else:  # before the abort, so that ranks which it reaches find it
            first = first_failure(failure, self.position.communicator.attempt)
            self.abort(first.splitlines()[0])
        if first != failure and not isinstance(error, DisagreementError):
            failure = f"{first.splitlines()[0]}\n  {here} stopped at {place}: {without(stopped)}"
        self.first = failure
        recorded = self.recorder.record(self.cursor.plan, failure, stopped, place, report)
        places = "" if report is None else f"\nThe ranks were at:\n{report.places}"
        if isinstance(error, DisagreementError) or not isinstance(error, Exception):
            return error
        if different is not None:
            self.first = f"{different}. This rank had begun, and stopped at {place}"
            return DisagreementError(f"{self.first}{places}")
        return PipelineError(f"{failure}\n{self._remedy}{recorded}{places}")

    @property
    def _remedy(self) -> str:
        if self.alone:
            return "No message is under way: rebuild the runtime before the next one"
        return (
            "Lanes may hold messages of the broken step: rebuild the communicator and the runtime before the next one"
        )
