"""The errors of planning and running. Those of planning are `ValueError`s: a plan is data."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from pipegrid.transport.errors import CollectiveFailedError


@frozen
class Fault:
    """One fault of a plan.

    ``rule``: the short stable name of the broken rule (``"duplicate"``, ``"cycle"``, ...); ``position`` and ``step``:
    its place (None: the plan as a whole); ``message``: what was found, the rule and the remedy.
    """

    rule: str
    message: str
    position: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        where = "" if self.position is None else f"position {self.position}"
        where += "" if self.step is None else f", step {self.step}"
        return f"[{self.rule}] {where}{': ' if where else ''}{self.message}"


class PlanError(ValueError):
    """A plan breaks the rules, or its parts contradict each other.

    Attributes:
        faults: every fault of the plan that was found; empty where there is no plan yet.
        path: to the part that contradicts another, such as ``groups[0].positions``; None where there is no such part.
    """

    def __init__(self, message: str, *, faults: Sequence[Fault] = (), path: str | None = None) -> None:
        self.faults = tuple(faults)
        self.path = path
        listed = "".join(f"\n  {fault}" for fault in self.faults)
        super().__init__(message + listed)


class PlanSyntaxError(PlanError):
    """Text that is not a plan: its place (``line`` and ``column``, from 1), what was found, what was expected."""

    def __init__(self, *, line: int, column: int, found: str, expected: str) -> None:
        self.line = line
        self.column = column
        self.found = found
        self.expected = expected
        super().__init__(f"line {line}, column {column}: found {found}; expected {expected}")


class StepArgumentError(ValueError):
    """An argument of a step function, a runtime or a monitor that is wrong, contradicts another or the plan."""


class StageOutputError(ValueError):
    """A forward returned outputs that the outgoing edges cannot carry, or of other shapes than announced.

    Also: a loss function returned a value that cannot be a loss; a stage wrote into what it returned for a microbatch
    before that was read, or into a received tensor.
    """


class DataEndedError(ValueError):
    """A stage's data ended before the step did."""


class GradientError(ValueError):
    """Gradients that cannot be reduced, tied, deferred, clipped or scaled correctly as asked.

    Also a loss scale outside of its range.
    """


# Names of one thing each that no caller handled differently; for this version.
PlanFieldError = PlanError
PlanMismatchError = AnnouncedShapesError = RuntimeArgumentError = MonitorError = StepArgumentError
StageInputError = LossError = StageOutputError
LossScaleError = ReductionError = MainGradError = DeferralError = TyingError = GradientError
ReductionFailedError = ReductionTimeoutError = ReductionPeerError = CollectiveFailedError
