"""The errors of planning. All are `ValueError`s: a plan is data, and these say what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


@frozen
class Fault:
    """One thing that is wrong with a plan.

    ``rule`` is a short stable name of the rule that is broken (``"duplicate"``, ``"cycle"``, ...);
    ``position`` and ``step`` say where (None: the plan as a whole); ``message`` says what was found, what
    the rule wants and what to do.
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
    """A plan breaks the rules; ``faults`` lists every fault that was found."""

    def __init__(self, message: str, *, faults: Sequence[Fault] = ()) -> None:
        self.faults = tuple(faults)
        listed = "".join(f"\n  {fault}" for fault in self.faults)
        super().__init__(message + listed)


class PlanFieldError(PlanError):
    """Parts of a plan that contradict each other; ``path`` leads to one of them, such as ``groups[0].positions``."""

    def __init__(self, message: str, *, path: str) -> None:
        self.path = path
        super().__init__(message)


class PlanSyntaxError(PlanError):
    """Text that is not a plan: its place (``line`` and ``column``, from 1), what was found, what was expected."""

    def __init__(self, *, line: int, column: int, found: str, expected: str) -> None:
        self.line = line
        self.column = column
        self.found = found
        self.expected = expected
        super().__init__(f"line {line}, column {column}: found {found}; expected {expected}")


class PlanMismatchError(ValueError):
    """What was given to run does not match the plan."""


class StepArgumentError(ValueError):
    """An argument of a step function, or of a function beside it, cannot be used, or contradicts another."""


class RuntimeArgumentError(TypeError):
    """Something given to a `PipelineRuntime` is not of the kind that it takes."""


class StageOutputError(ValueError):
    """A forward returned something that the outgoing edges cannot carry, or not what was announced."""


class StageInputError(ValueError):
    """A forward did something to what it received that cannot be done to it."""


class DataEndedError(ValueError):
    """A stage's data ended before the step did."""


class LossError(ValueError):
    """A loss function returned something that cannot be a loss."""


class ReductionError(ValueError):
    """Gradients cannot be reduced correctly with the arguments at hand. Nothing was sent."""
