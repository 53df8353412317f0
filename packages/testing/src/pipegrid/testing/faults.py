"""Planned faults: kind, rank, and the action or time at which it happens."""

from __future__ import annotations

import math

from attrs import converters, field, frozen

KINDS = ("kill", "stop", "delay", "raise")


class FaultError(ValueError):
    """A fault that cannot be planned, or that was planned and never happened."""


class InjectedFault(RuntimeError):  # noqa: N818 (a fault of the test's own making)
    """Raised on its rank by a planned ``raise`` fault.

    Examples:
        >>> raise InjectedFault("rank 1 at 'backward'")
        Traceback (most recent call last):
            ...
        pipegrid.testing.faults.InjectedFault: rank 1 at 'backward'
    """


@frozen
class Fault:
    """One fault on one rank, at a named point or after a time.

    By time, a ``raise`` happens at the first point reached after it, and a ``delay`` suspends the whole process.

    Attributes:
        kind: ``kill`` ends the process (SIGKILL); ``stop`` suspends it until the test is over (SIGSTOP); ``delay``
            holds it back for ``seconds``; ``raise`` raises `InjectedFault`.
        rank: where.
        at: the point as the test reports it to `Ranks.reach` (compared as text).
        after: seconds from the test's start on that rank, or from the call of `Ranks.plan_fault`.
        seconds: of a ``delay``.
        nth: number of the occurrence of the point on that rank, from 0.

    Raises:
        FaultError: an unknown kind, both or neither of ``at`` and ``after``, ``seconds`` missing or out of place.

    Examples:
        >>> Fault("kill", rank=1, at="backward", nth=2)
        Fault(kind='kill', rank=1, at='backward', after=None, seconds=None, nth=2)
    """

    kind: str
    rank: int = field(kw_only=True)
    at: str | None = field(kw_only=True, default=None, converter=converters.optional(str))
    after: float | None = field(kw_only=True, default=None)
    seconds: float | None = field(kw_only=True, default=None)
    nth: int = field(kw_only=True, default=0)

    def __attrs_post_init__(self) -> None:
        times = [one for one in (self.after, self.seconds) if one is not None]
        rules = {
            f"the kinds are {', '.join(KINDS)}": self.kind in KINDS,
            "rank and nth count from 0": self.rank >= 0 and self.nth >= 0,
            "a fault has either at= or after=": (self.at is None) != (self.after is None),
            "nth= counts occurrences of at=": not self.nth or self.at is not None,
            "seconds= is for delays, which need it": (self.kind == "delay") == (self.seconds is not None),
            "times are finite and at least 0": all(0 <= one < math.inf for one in times),
        }
        for rule, kept in rules.items():
            if not kept:
                raise FaultError(f"{self!r}: {rule}")

    def __str__(self) -> str:
        when = f"after {self.after} s" if self.at is None else f"at {self.at!r}" + (f" #{self.nth}" if self.nth else "")
        return f"{self.kind} on rank {self.rank} {when}"


def check_rank(fault: Fault, world_size: int) -> None:
    """Raise `FaultError` if the fault's rank is outside of the world."""
    if fault.rank >= world_size:
        raise FaultError(f"fault '{fault}' names rank {fault.rank}, but the world has {world_size} ranks")
