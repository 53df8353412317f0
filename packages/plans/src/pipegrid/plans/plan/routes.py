"""Routes: for each unit and each stage, the replica that computes it.

A *unit* is one microbatch of one home replica, ``3@1`` for microbatch 3 of replica 1; units are numbered through the
replicas, so with 12 each it is unit 15. An *actor* is a position of one replica, ``0@1`` for position 0 of replica 1:
the ranks of one tp x cp group. Without moves every unit stays at home, and all replicas act alike.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

from attrs import field, frozen

from pipegrid.core.fields import Count, Index, Name, checked, checked_fields, shown
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan.parts import name_text

Units: TypeAlias = tuple[Index, ...]


@frozen(order=True, field_transformer=checked_fields(PlanError))
class Actor:
    """The ranks of one position in one replica; written ``position@replica``.

    Attributes:
        position: its number.
        replica: its number.

    Examples:
        >>> str(Actor(position=2, replica=1))
        '2@1'
    """

    position: Index
    replica: Index

    def __str__(self) -> str:
        return f"{self.position}@{self.replica}"


@frozen(order=True, field_transformer=checked_fields(PlanError))
class Move:
    """A stage of one unit that another replica than the unit's home computes.

    Attributes:
        stage: which.
        unit: of which unit.
        replica: where it is computed.
    """

    stage: Index
    unit: Index
    replica: Index


def _moves(value: Any) -> tuple[Move, ...]:
    """Moves, ascending, from moves or from a mapping of (unit, stage) to the replica."""
    if isinstance(value, Mapping):
        value = [Move(stage, unit, replica) for (unit, stage), replica in value.items()]
    return tuple(sorted(value))


def _by_module(pairs: Mapping[str, Any], rule: Any, what: str) -> list[tuple[str, Any]]:
    return [
        (checked(name, Name, f"a module of {what}", PlanError), checked(given, rule, f"{what}[{name!r}]", PlanError))
        for name, given in sorted(pairs.items())
    ]


def _skips(value: Any) -> tuple[tuple[str, Units], ...]:
    """Per module, ascending by name, the units that skip it; without modules that no unit skips."""
    given = {name: tuple(units) for name, units in dict(value).items() if tuple(units)}
    return tuple((name, tuple(sorted(set(units)))) for name, units in _by_module(given, Units, "Routes.skips"))


def _every(value: Any) -> tuple[tuple[str, int], ...]:
    """Per module, ascending by name, the units of a call; without modules that are called for each unit."""
    return tuple((name, count) for name, count in _by_module(dict(value), Count, "every") if count > 1)


def _actors(value: Iterable[Actor]) -> tuple[Actor, ...]:
    return tuple(sorted(set(value)))


@frozen(slots=False, field_transformer=checked_fields(PlanError))
class Routes:
    """The replica that computes each stage of each unit; equal routes are equal values, and have one digest.

    Attributes:
        units: per replica, the number of its microbatches, which may differ.
        moves: what is not computed at home; also given as a mapping ``{(unit, stage): replica}``.
        skips: per module, the units that do not pass through it (a microbatch without an image): no forward, no
            message, no gradient.
        every: per module (an edge's number is the ratio of those of its ends), for how many consecutive units of a
            replica it is called once. The call has the number of its first unit; its result serves all of them, and
            their gradients are summed before its one backward.
        dead: actors that do not take part.

    Raises:
        PlanError: a number is out of range.

    Examples:
        >>> routes = Routes([4, 2], {(3, 0): 1})  # replica 1 computes stage 0 of unit 3, whose home is replica 0
        >>> routes.num_replicas, routes.num_units, routes.home(3)
        (2, 6, 0)
    """

    units: tuple[Index, ...] = field(converter=tuple[int, ...])
    moves: tuple[Move, ...] = field(converter=_moves, default=())
    skips: tuple[tuple[str, Units], ...] = field(converter=_skips, default=())
    every: tuple[tuple[str, int], ...] = field(converter=_every, default=())
    dead: tuple[Actor, ...] = field(converter=_actors, default=())

    def __attrs_post_init__(self) -> None:
        if not self.num_units:
            raise PlanError(f"the replicas have {list(self.units)} units; give at least one", path="routes.units")
        for name, units in self.skips:
            for unit in units:
                self._require(unit, "unit", f"module {name!r} is skipped by unit", "routes.skips")
        routed: dict[tuple[int, int], int] = {}
        for move in self.moves:
            self._require(move.unit, "unit", "a move names unit", "routes.moves")
            what = f"stage {move.stage} of unit {self.name(move.unit)} moves to replica"
            self._require(move.replica, "replica", what, "routes.moves")
            other = routed.setdefault((move.unit, move.stage), move.replica)
            if other != move.replica:
                raise PlanError(f"{what} {other} and {move.replica}; give one", path="routes.moves")
        for actor in self.dead:
            self._require(actor.replica, "replica", f"actor {actor} is of replica", "routes.dead")
        away = {Move(stage, unit, to) for (unit, stage), to in routed.items() if to != self.home(unit)}
        object.__setattr__(self, "moves", tuple(sorted(away)))

    def _require(self, number: int, kind: str, what: str, path: str) -> None:
        count = self.num_units if kind == "unit" else self.num_replicas
        if number >= count:
            raise PlanError(f"{what} {number}; {kind}s are 0..{count - 1}", path=path)

    @classmethod
    def identity(cls, num_replicas: int, num_microbatches: int) -> Routes:
        """Routes by which every unit stays at home; all replicas have ``num_microbatches``."""
        return cls((num_microbatches,) * checked(num_replicas, Count, "num_replicas", PlanError))

    @property
    def num_replicas(self) -> int:
        """Replicas, dead actors included."""
        return len(self.units)

    @cached_property
    def num_units(self) -> int:
        """Units of all replicas."""
        return sum(self.units)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.units))

    @cached_property
    def _away(self) -> dict[tuple[int, int], int]:
        return {(move.unit, move.stage): move.replica for move in self.moves}

    @cached_property
    def _skipped(self) -> dict[str, frozenset[int]]:
        return {name: frozenset(units) for name, units in self.skips}

    @cached_property
    def _per_call(self) -> dict[str, int]:
        return dict(self.every)

    # Units

    def unit(self, replica: int, microbatch: int) -> int:
        """The number of ``microbatch`` of home replica ``replica``; a `PlanError` where there is none."""
        if replica not in range(self.num_replicas) or microbatch not in range(self.units[replica]):
            raise PlanError(f"there is no unit {microbatch}@{replica}; the replicas have {list(self.units)} units")
        return self._ends[replica] - self.units[replica] + microbatch

    def units_of(self, replica: int) -> range:
        """The units whose home is ``replica``."""
        return range(self._ends[replica] - self.units[replica], self._ends[replica])

    def home(self, unit: int) -> int:
        """The replica whose microbatch ``unit`` is; a `PlanError` where there is no such unit."""
        if unit not in range(self.num_units):
            raise PlanError(f"there is no unit {shown(unit)}; units are 0..{self.num_units - 1}")
        return bisect_right(self._ends, unit)

    def microbatch(self, unit: int) -> int:
        """The number of ``unit`` among those of its home."""
        return unit - self.units_of(self.home(unit)).start

    def name(self, unit: int) -> str:
        """``unit`` as written: its microbatch, then its home."""
        return f"{self.microbatch(unit)}@{self.home(unit)}"

    def of(self, unit: int, stage: int) -> int:
        """The replica that computes ``stage`` of ``unit``."""
        return self._away[unit, stage] if (unit, stage) in self._away else self.home(unit)

    # Modules

    def skips_module(self, unit: int, module: str) -> bool:
        """Whether ``unit`` does not pass through ``module``."""
        return unit in self._skipped.get(module, ())

    def call(self, unit: int, module: str) -> int:
        """The call of ``module`` that serves ``unit``, by the number of its first unit."""
        first = self.units_of(self.home(unit)).start
        return unit - (unit - first) % self._per_call.get(module, 1)

    def units_for(self, call: int, module: str) -> range:
        """The consecutive units of a replica for which a call of ``module`` is, those that skip it included."""
        return range(call, min(call + self._per_call.get(module, 1), self.units_of(self.home(call)).stop))

    def served(self, call: int, module: str) -> tuple[int, ...]:
        """The units that a call of ``module`` serves."""
        skipped = self._skipped.get(module, frozenset())
        return tuple([unit for unit in self.units_for(call, module) if unit not in skipped])

    def calls(self, module: str) -> tuple[int, ...]:
        """The calls of ``module``, ascending: those that serve any unit."""
        step = self._per_call.get(module, 1)
        starts = [unit for replica in range(self.num_replicas) for unit in self.units_of(replica)[::step]]
        return tuple([start for start in starts if self.served(start, module)])

    # The whole

    @property
    def is_identity(self) -> bool:
        """Whether all replicas act alike, as in a plan without routes."""
        return not (self.moves or self.skips or self.every or self.dead) and len(set(self.units)) == 1

    def living(self, position: int) -> tuple[int, ...]:
        """The replicas in which ``position`` takes part, ascending."""
        dead = {actor.replica for actor in self.dead if actor.position == position}
        return tuple([replica for replica in range(self.num_replicas) if replica not in dead])

    def lines(self) -> Iterator[str]:
        """The routes as lines of text, which `from_text` of a plan and `routes_from_text` read."""
        yield " ".join(["units", *map(str, self.units)])
        if self.dead:
            yield " ".join(["dead", *map(str, self.dead)])
        by_stage: dict[int, list[str]] = {}
        for move in self.moves:
            by_stage.setdefault(move.stage, []).append(f"{self.name(move.unit)}>{move.replica}")
        for stage, words in by_stage.items():
            yield " ".join(["move", str(stage), *words])
        for name, units in self.skips:
            yield " ".join(["skip", name_text(name), *map(self.name, units)])
        for name, count in self.every:
            yield f"every {name_text(name)} {count}"

    def __str__(self) -> str:
        return "\n".join(self.lines()) + "\n"

    @cached_property
    def digest(self) -> str:
        """Twelve hex digits of the text, the same in every process."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:12]
