"""The errors of planning: a plan is data, so they are `ValueError`s."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


@frozen
class PlanFault:
    """One fault of a plan.

    Attributes:
        rule: the short stable name of the broken rule (``"duplicate"``, ``"cycle"``, ...).
        message: what was found, the rule and the remedy.
        position: where; None: the plan as a whole.
        step: its step there.

    Examples:
        >>> str(PlanFault("duplicate", "0F1 comes twice", position=0, step=2))
        '[duplicate] position 0, step 2: 0F1 comes twice'
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
    r"""A plan breaks the rules, or its parts contradict each other.

    Attributes:
        faults: every fault of the plan that was found; empty where there is no plan yet.
        path: to the part that contradicts another, such as ``groups[0].positions``; None where there is no such part.

    Examples:
        >>> verify(from_text("microbatches 1\n0: 0F0 0B0 0F0"))
        Traceback (most recent call last):
            ...
        pipegrid.plans.errors.PlanError: the plan has 1 fault:
          [duplicate] position 0, step 2: 0F0 has been done before, and may be done once
    """

    def __init__(self, message: str, *, faults: Sequence[PlanFault] = (), path: str | None = None) -> None:
        self.faults = tuple(faults)
        self.path = path
        listed = "".join(f"\n  {fault}" for fault in self.faults)
        super().__init__(message + listed)


class PlanSyntaxError(PlanError):
    """Text that is not a plan: its place (``line`` and ``column``, from 1), what was found, what was expected.

    Examples:
        >>> from_text("microbatches one")
        Traceback (most recent call last):
            ...
        pipegrid.plans.errors.PlanSyntaxError: line 1, column 14: found 'one'; expected one number of at least 1 and
            at most 9 digits, after 'microbatches'
    """

    def __init__(self, *, line: int, column: int, found: str, expected: str) -> None:
        self.line = line
        self.column = column
        self.found = found
        self.expected = expected
        super().__init__(f"line {line}, column {column}: found {found}; expected {expected}")
