"""Deaths that a job survives without a restart, and where the state of the dead is taken from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations, groupby
from typing import Any, Literal, TypeAlias, get_args

from attrs import frozen

from pipegrid.core.fields import Index, checked_arguments, shown
from pipegrid.core.tables import text_table
from pipegrid.planner.errors import JobError
from pipegrid.topology.grid import Grid

Sharding: TypeAlias = Literal["none", "optimizer", "parameters"]
"""The state that a dp x cp group shards: none, the optimizer's states, or these and the parameters."""

What: TypeAlias = Literal["parameters", "optimizer"]
PIECES: tuple[What, ...] = get_args(What)

MOST_PAIRS = 500_000  # pairs that are examined one by one, at most


@frozen
class Piece:
    """State of a dead rank for its part of a module, and where it is found.

    Attributes:
        rank: the dead rank.
        module: the name of the module.
        what: the parameters, or the optimizer's states.
        source: a replica (``peer``), the rank that keeps a copy (``buddy``), or the checkpoint.
        holder: the living rank that has it; None: the checkpoint.
    """

    rank: int
    module: str
    what: What
    source: Literal["peer", "buddy", "checkpoint"]
    holder: int | None


@frozen
class Survival:
    """The outcome where several ranks die at once.

    Attributes:
        dead: the ranks that die.
        lost: modules and positions without a replica whose ranks all live.
        pieces: the state of the dead.
    """

    dead: tuple[int, ...]
    lost: tuple[tuple[str, int], ...]
    pieces: tuple[Piece, ...]

    @property
    def survives(self) -> bool:
        """Whether the others go on: no position is lost, and living ranks, or their hosts, have the state."""
        return not self.lost and all(piece.source != "checkpoint" for piece in self.pieces)

    def __str__(self) -> str:
        """One line: goes on, or why not."""
        without = f"without rank{'s' * (len(self.dead) != 1)} {', '.join(map(str, self.dead))}"
        if self.lost:
            where = ", ".join(f"position {position} of {module}" for module, position in self.lost)
            return f"{without}: restart, no whole replica is left of {where}"
        by_source: dict[str, set[str]] = defaultdict(set)
        for piece in self.pieces:
            by_source[piece.source].add(piece.what)
        texts = [f"{' and '.join(sorted(what, reverse=True))} from a {source}" for source, what in by_source.items()]
        return f"{without}: {'goes on' if self.survives else 'restart'}, {'; '.join(texts) or 'idle ranks'}"


@checked_arguments(JobError)
def survivable(
    grids: Mapping[str, Grid], dead: tuple[Index, ...], *, sharding: Sharding = "none", buddy: bool = False
) -> Survival:
    """Whether modules on ``grids`` go on when the ranks ``dead`` die at once, and where the state of the dead is.

    The ranks of a replica at a position (all with one dp and one pp coordinate) compute together: where one is dead,
    the others do nothing, but have their state. What is divided by ``sharding`` is on one rank alone, or with ``buddy``
    also on the host of the rank with the next dp coordinate, as of the last step.

    Raises:
        JobError: a rank that no grid has.
    """
    gone, everyone = set(dead), set().union(*(grid.ranks for grid in grids.values()))
    if strangers := sorted(gone - everyone):
        raise JobError(f"dead is {shown(tuple(dead))}; no grid has rank {strangers[0]}")
    lost: list[tuple[str, int]] = []
    pieces: list[Piece] = []
    for name, grid in grids.items():
        own = sorted(gone.intersection(grid.ranks))
        down: dict[int, set[int]] = defaultdict(set)
        for rank in own:
            down[grid.place(rank, "pp")].add(grid.place(rank, "dp"))
        lost += [(name, position) for position, replicas in sorted(down.items()) if len(replicas) == grid.length("dp")]
        for rank in own:
            peers = grid.group_of(rank, "dp") if "dp" in grid.axes else ()
            peer = next((one for one in peers if one not in gone), None)
            copy = buddy_of(grid, rank) if buddy else None
            for what in PIECES:
                divided = sharding in {what, "parameters"}
                holder = copy if divided else peer
                if holder is None or holder in gone:
                    pieces.append(Piece(rank, name, what, "checkpoint", None))
                else:
                    pieces.append(Piece(rank, name, what, "buddy" if divided else "peer", holder))
    return Survival(tuple(sorted(gone)), tuple(lost), () if lost else tuple(pieces))


def survivable_table(grids: Mapping[str, Grid], *, sharding: Sharding = "none", buddy: bool = False) -> str:
    """A table of what each single death leads to, by `survivable`: a row for each module and positions that are alike.

    The columns: replicas of the position; ranks that compute only together, and stop with a dead one; where the dead
    one's parameters and optimizer states are; whether the others go on.
    """
    cells: dict[tuple[str, int], tuple[str, ...]] = {}
    for name, grid in grids.items():
        positions = {grid.place(rank, "pp"): rank for rank in reversed(grid.ranks)}  # with the first rank of each
        together = grid.size // (grid.length("pp") * grid.length("dp"))
        for position, rank in sorted(positions.items()):
            found = survivable({name: grid}, (rank,), sharding=sharding, buddy=buddy)
            sources = {piece.what: f"a {piece.source}" for piece in found.pieces}
            from_where = [sources.get(what, "a checkpoint") for what in PIECES]
            others = "go on" if found.survives else "restart"
            cells[name, position] = (str(grid.length("dp")), str(together), *from_where, others)
    named = []
    for (name, row), run in groupby(cells, key=lambda place: (place[0], cells[place])):
        places = [position for _, position in run]
        named.append((name, str(places[0]) if len(places) == 1 else f"{places[0]} to {places[-1]}", *row))
    headings = ("module", "position", "replicas", "stop together", "parameters from", "optimizer from", "the others")
    return text_table(headings, named, right=(2, 3))


def buddy_of(grid: Grid, rank: int) -> int | None:
    """The rank whose host has a copy of the shard of ``rank``; None in a single replica."""
    replicas = grid.length("dp")
    if replicas == 1:
        return None
    coords = grid.coords(rank)
    return grid.rank_at(coords | {"dp": (coords["dp"] + 1) % replicas})


@frozen
class Counts:
    """Numbers of single and double deaths of ranks, or nodes, that a job survives.

    Attributes:
        survived: single deaths that the job survives.
        units: ranks, or nodes.
        pairs: pairs of deaths that the job survives; None: not counted.
        of_pairs: all pairs.
    """

    survived: int
    units: int
    pairs: int | None
    of_pairs: int

    def __str__(self) -> str:
        """Such as ``31 of 32 single deaths, 420 of 496 pairs``."""
        pairs = "" if self.pairs is None else f", {self.pairs} of {self.of_pairs} pairs"
        return f"{self.survived} of {self.units} single deaths{pairs}"


def count_survivable(
    grids: Mapping[str, Grid], *, unit: int = 1, sharding: Sharding = "none", buddy: bool = False
) -> Counts:
    """Count the single deaths, and pairs of deaths, that modules on ``grids`` survive, by `survivable`.

    ``unit``: ranks that die together, such as those of a node. Two units that have no position in common survive
    together if each does; of the others, at most half a million pairs are examined.
    """
    ranks = sorted(set().union(*(grid.ranks for grid in grids.values())))
    groups = [tuple(group) for _, group in groupby(ranks, key=lambda rank: rank // unit)]
    options: dict[str, Any] = {"sharding": sharding, "buddy": buddy}
    units = [_failure_unit(grids, group) for group in groups if survivable(grids, group, **options).survives]
    near: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, (_, stopped, _) in enumerate(units):
        for where in stopped:
            near[where].append(index)
    close = sum(len(indices) * (len(indices) - 1) // 2 for indices in near.values())
    pairs = None
    if close <= MOST_PAIRS:
        examined = {pair for indices in near.values() for pair in combinations(indices, 2)}
        lost = sum(_conflict(grids, units[a], units[b], divided=sharding != "none") for a, b in examined)
        pairs = len(units) * (len(units) - 1) // 2 - lost
    return Counts(len(units), len(groups), pairs, len(groups) * (len(groups) - 1) // 2)


_FailureUnit: TypeAlias = tuple[frozenset[int], Mapping[tuple[str, int], set[int]], set[int | None]]
"""Ranks that die together; the replicas that they stop, by module and position; the buddies of their shards."""


def _failure_unit(grids: Mapping[str, Grid], ranks: tuple[int, ...]) -> _FailureUnit:
    stopped: dict[tuple[str, int], set[int]] = defaultdict(set)
    buddies = set()
    for name, grid in grids.items():
        for rank in set(ranks).intersection(grid.ranks):
            stopped[name, grid.place(rank, "pp")].add(grid.place(rank, "dp"))
            buddies.add(buddy_of(grid, rank))
    return frozenset(ranks), stopped, buddies


def _conflict(grids: Mapping[str, Grid], a: _FailureUnit, b: _FailureUnit, *, divided: bool) -> bool:
    """Whether two units, each survived alone, have all replicas of a position, or a shard and its copy."""
    (ranks_a, stopped_a, buddies_a), (ranks_b, stopped_b, buddies_b) = a, b
    for where in stopped_a.keys() & stopped_b.keys():
        if len(stopped_a[where] | stopped_b[where]) == grids[where[0]].length("dp"):
            return True
    return divided and not (buddies_a.isdisjoint(ranks_b) and buddies_b.isdisjoint(ranks_a))
