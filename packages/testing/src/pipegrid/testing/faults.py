"""Planned faults: kind, rank, and the action or time at which it happens."""

from __future__ import annotations

import math

from attrs import field, frozen

KINDS = ("kill", "stop", "delay", "raise")


class FaultError(ValueError):
    """A fault that cannot be planned, or that was planned and never happened."""


class InjectedFault(RuntimeError):  # noqa: N818 (a fault of the test's own making)
    """Raised on its rank by a planned ``raise`` fault."""


def _text(point: object) -> str | None:
    return None if point is None else str(point)


@frozen
class Fault:
    """One fault on one rank, at a named point or after a time.

    Kinds: ``kill`` ends the process (SIGKILL); ``stop`` suspends it until the test is over (SIGSTOP); ``delay``
    holds it back for ``seconds``; ``raise`` raises `InjectedFault`.

    ``at`` names the point as the test reports it to `Ranks.reach` (compared as text), ``nth`` which of its occurrences
    on that rank, from 0. ``after`` counts seconds from the test's start on that rank, or from the call of
    `Ranks.plan_fault`. By time, a ``raise`` happens at the first point reached after it, and a ``delay`` suspends
    the whole process.

    Raises:
        FaultError: an unknown kind, both or neither of ``at`` and ``after``, ``seconds`` missing or out of place, a
            rank or an occurrence that is no integer, a time that is not a number.
    """

    kind: str
    rank: int = field(kw_only=True)
    at: str | None = field(kw_only=True, default=None, converter=_text)
    after: float | None = field(kw_only=True, default=None)
    seconds: float | None = field(kw_only=True, default=None)
    nth: int = field(kw_only=True, default=0)

    def __attrs_post_init__(self) -> None:
        if self.kind not in KINDS:
            raise FaultError(f"fault kind {self.kind!r} is unknown; the kinds are {', '.join(KINDS)}")
        if not _is_integer(self.rank) or self.rank < 0:
            raise FaultError(f"a fault's rank is an integer counted from 0, got rank={self.rank!r}")
        if (self.at is None) == (self.after is None):
            raise FaultError(
                f"fault {self.kind!r} on rank {self.rank} needs either at= (a point) or after= (seconds), "
                f"got at={self.at!r} and after={self.after!r}"
            )
        if self.after is not None and not _is_time(self.after):
            raise FaultError(f"after= counts seconds, a finite number of at least 0, got after={self.after!r}")
        if not _is_integer(self.nth) or self.nth < 0 or (self.nth and self.at is None):
            raise FaultError(
                f"nth= counts the occurrences of the point at= from 0, an integer, got nth={self.nth!r}, at={self.at!r}"
            )
        if (self.kind == "delay") != (self.seconds is not None):
            raise FaultError(
                f"seconds= is the length of a delay and of no other fault, got kind {self.kind!r} and "
                f"seconds={self.seconds!r}"
            )
        if self.seconds is not None and not _is_time(self.seconds):
            raise FaultError(f"a delay is a finite number of seconds of at least 0, got seconds={self.seconds!r}")

    def __str__(self) -> str:
        when = f"after {self.after} s" if self.at is None else f"at {self.at!r}" + (f" #{self.nth}" if self.nth else "")
        return f"{self.kind} on rank {self.rank} {when}"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def check_rank(fault: Fault, world_size: int) -> None:
    """Raise if the fault's rank is outside of the world.

    Raises:
        FaultError: the fault's rank is not below ``world_size``.
    """
    if fault.rank >= world_size:
        raise FaultError(f"fault '{fault}' names rank {fault.rank}, but the world has {world_size} ranks")
