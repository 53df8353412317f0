"""The wait-for graph of a hung job, from what each rank launched and what of it has ended.

A rank is held by the first thing it launched that has not ended: what it launched later is behind that. The first thing
of a rank is a collective, a message, or the messages of a batch. It waits for each of its other ranks that has not
launched it, or has launched it behind the first thing of its own.

Dumps complete each other: a collective that one rank has finished was finished by all, so on a rank where it has not
ended, the device or the watchdog stands still.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from attrs import frozen

from pipegrid.timeline.dumps.read import Dump, Entry


@frozen
class Wait:
    """Rank ``rank`` waits at ``entry`` for ``other``, which is ``behind`` an entry of its own; None: not launched."""

    rank: int
    entry: Entry
    other: int
    behind: Entry | None = None


_Group: TypeAlias = tuple[str, tuple[int, ...]]
"""A group's name and ranks: groups of other ranks may have the same name."""
_Unit: TypeAlias = tuple[_Group, bool, int]
"""Entries that end together, a collective or the messages of one call: group, whether messages, sequence."""
_Way: TypeAlias = tuple[_Group, str, int, int]
"""Group, kind, sender, receiver."""


def unit_of(entry: Entry) -> _Unit:
    """The key that an entry shares with those that end together with it."""
    return group_of(entry), entry.peer is not None, entry.sequence


def group_of(entry: Entry) -> _Group:
    """The group of an entry."""
    return entry.group, entry.members


@frozen
class DumpedJob:
    """The entries of each rank with a dump: launched and not ended, in order; the first unit of those; ended ones.

    ``ended``: of a group, on each rank with entries of it, the last collective that has ended, as far as these tell.
    """

    pending: Mapping[int, Sequence[Entry]]
    first: Mapping[int, Sequence[Entry]]
    ended: Mapping[_Group, Mapping[int, int]]


def job_of(dumps: Iterable[Dump]) -> DumpedJob:
    """Collect each rank's pending entries, its first pending unit, and the last collectives that have ended."""
    pending: dict[int, list[Entry]] = {}
    first: dict[int, list[Entry]] = {}
    ended: dict[_Group, dict[int, int]] = defaultdict(dict)
    for dump in dumps:
        own = pending[dump.rank] = [entry for entry in dump.entries if not entry.ended and entry.kind != "coalesced"]
        first[dump.rank] = [entry for entry in own if unit_of(entry) == unit_of(own[0])]
        for entry in (one for one in dump.entries if one.peer is None):
            own_ended = ended[group_of(entry)]
            done = entry.sequence if entry.ended else entry.sequence - 1  # a group's collectives end in order
            if entry.ended or dump.rank not in own_ended:
                own_ended[dump.rank] = max(done, own_ended.get(dump.rank, done))
    return DumpedJob(pending, first, ended)


def stuck_of(job: DumpedJob) -> dict[int, tuple[Entry, tuple[int, ...]]]:
    """By rank, the first collective that it has not ended and others have, if there is one; and these others."""
    found = {}
    for rank, entries in job.pending.items():
        for entry in (one for one in entries if one.peer is None):
            ended = job.ended.get(group_of(entry), {})
            further = {other for other, last in ended.items() if other != rank and last >= entry.sequence}
            if others := tuple(sorted(further.intersection(entry.members))):
                found[rank] = entry, others
                break
    return found


def waits_of(job: DumpedJob) -> list[Wait]:
    """The waits of each rank in its first unit; a rank without a dump counts as one that has launched nothing."""
    place: dict[_Unit, dict[int, Entry]] = defaultdict(dict)
    ends: dict[_Way, list[Entry]] = defaultdict(list)
    for rank, entry in ((rank, entry) for rank, entries in job.pending.items() for entry in entries):
        if entry.peer is None:
            place[unit_of(entry)][rank] = entry
        else:
            ends[_way(rank, entry)].append(entry)
    found = []
    for rank, entries in job.first.items():
        for entry in entries:
            if entry.peer is None:
                there, ended = place[unit_of(entry)], job.ended.get(group_of(entry), {})
                others = [
                    (one, there.get(one))
                    for one in entry.members
                    if one != rank and (one in there or ended.get(one, -1) < entry.sequence)  # or it has finished it
                ]
            else:
                way = _way(rank, entry)
                number = ends[way].index(entry)
                matching = ends.get((way[0], "recv" if way[1] == "send" else "send", way[2], way[3]), [])
                others = [(entry.peer, matching[number] if number < len(matching) else None)]
            for other, launched in others:
                before = job.first.get(other, ())
                if launched is None or (before and unit_of(launched) != unit_of(before[0])):
                    found.append(Wait(rank, entry, other, None if launched is None else before[0]))
    return found


def _way(rank: int, entry: Entry) -> _Way:
    assert entry.peer is not None
    ends = (rank, entry.peer) if entry.kind == "send" else (entry.peer, rank)
    return group_of(entry), entry.kind, *ends
