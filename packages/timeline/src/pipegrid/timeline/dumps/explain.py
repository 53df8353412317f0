"""The ranks that hold a hung job up, from dumps: roots of the wait-for graph, and where each rank is in the plan."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from attrs import Factory, asdict, frozen

from pipegrid.plans.orders.play import rings
from pipegrid.plans.plan import Plan
from pipegrid.timeline.dumps.places import RankPlace, first_to_come, places_in
from pipegrid.timeline.dumps.read import Dump, DumpError, Entry
from pipegrid.timeline.dumps.waits import DumpedJob, Wait, group_of, job_of, stuck_of, waits_of

Confidence: TypeAlias = Literal["certain", "likely", "possible"]
_ALIKE = ("all_reduce", "broadcast", "reduce", "barrier", "_all_gather_base", "_reduce_scatter_base", "send", "recv")
"""Kinds whose ranks pass tensors of one size and type."""


@frozen
class Root:
    """A rank that others wait for and that waits for none.

    ``confidence``: *certain*, where it has not ended what others have; *likely*, where it has launched nothing that it
    waits in; *possible*, where its dump is missing or all ranks are in what it is in.
    """

    rank: int
    confidence: Confidence
    reason: str
    waiting: int
    """Ranks that wait for it, some for others that do."""


@frozen
class Explanation:
    """The reasons why ranks hang. ``str`` is a report; `as_json` has the same as plain data.

    Attributes:
        roots: ranks that hold the others up, the surest first.
        cycles: ranks that wait for each other, where no root holds them: a deadlock.
        waits: the waits of every rank.
        missing: ranks of a group whose dumps are not there.
        empty: ranks whose dumps have nothing that has not ended.
        files: files that are no dump.
        disagreements: operations about which ranks differ.
        places: with a plan, the place of each rank there.
        first: with a plan, the message of a root that should have come first; None where the dumps do not tell.
        records: the failures that pipegrid recorded, as text by rank.
    """

    roots: tuple[Root, ...]
    cycles: tuple[tuple[Wait, ...], ...]
    waits: tuple[Wait, ...]
    missing: tuple[int, ...]
    empty: tuple[int, ...]
    files: tuple[str, ...]
    disagreements: tuple[str, ...]
    places: tuple[RankPlace, ...] = ()
    records: Mapping[int, str] = Factory(dict)
    first: RankPlace | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data, for `json.dumps`."""
        waits = {"waits", "cycles"}
        plain = asdict(self, filter=lambda attribute, _: attribute.name not in waits)
        plain["waits"] = [_plain(wait) for wait in self.waits]
        plain["cycles"] = [[_plain(wait) for wait in cycle] for cycle in self.cycles]
        plain["places"] = [{**asdict(place), "text": str(place)} for place in self.places]
        return plain

    def __str__(self) -> str:
        lines = []
        for one in self.roots:
            held = f"{one.waiting} rank{' waits' if one.waiting == 1 else 's wait'} for it"
            lines.append(f"root: rank {one.rank} ({one.confidence}): {one.reason}; {held}")
        for cycle in self.cycles:
            ranks = sorted({wait.rank for wait in cycle})
            lines.append(f"deadlock: ranks {', '.join(map(str, ranks))} wait for each other in a cycle")
            lines += [f"  {_text(wait)}" for wait in cycle]
        if not self.roots and not self.cycles and not self.records:
            lines.append("no rank waits for another: nothing that is launched lacks a rank")
        for title, found in (("no dump", self.missing), ("nothing under way", self.empty)):
            lines += [f"{title}: rank {', '.join(map(str, found))}"] if found else []
        lines += [f"not read: {one}" for one in self.files]
        lines += [f"disagreement: {one}" for one in self.disagreements]
        lines += [f"recorded by rank {rank}: {text}" for rank, text in self.records.items()]
        lines += ["waits:"] if self.waits else []
        lines += [f"  {_text(wait)}" for wait in self.waits]
        lines += ["in the plan:"] if self.places else []
        lines += [f"  {place}" for place in self.places]
        lines += [f"first to come: {self.first}"] if self.first else []
        return "\n".join(lines) + "\n"


def _plain(wait: Wait) -> dict[str, Any]:
    at, behind = wait.entry, None if wait.behind is None else str(wait.behind)
    return {"rank": wait.rank, "at": str(at), "since_ns": at.created, "for": wait.other, "behind": behind}


def _text(wait: Wait) -> str:
    why = "which has not launched it" if wait.behind is None else f"which launched it behind {wait.behind}"
    begun = dt.datetime.fromtimestamp(wait.entry.created / 1e9, dt.UTC)
    since = f" since {begun:%F %H:%M:%S}.{begun.microsecond // 1000:03} UTC" if wait.entry.created else ""
    return f"rank {wait.rank} at {wait.entry}{since} waits for rank {wait.other}, {why}"


def explain(
    dumps: Sequence[Dump],
    errors: Iterable[DumpError] = (),
    *,
    plan: Plan | None = None,
    records: Mapping[int, str] | None = None,
) -> Explanation:
    """Explain why the ranks of ``dumps`` hang.

    Args:
        dumps: of as many ranks as there are, as `read_dumps` has them.
        errors: files that could not be read; their ranks count as missing.
        plan: that the job runs, lowered: its actions are found by the messages.
        records: the failures that pipegrid recorded, from `read_records`.

    Raises:
        PlanError: a plan of computes alone, or one that has not these messages.
    """
    job = job_of(dumps)
    stuck = stuck_of(job)
    waits = [wait for wait in waits_of(job) if wait.rank not in stuck]
    targets: dict[int, set[int]] = defaultdict(set)
    for wait in waits:
        targets[wait.rank].add(wait.other)
    everyone = {rank for dump in dumps for members in dump.groups.values() for rank in members} | set(job.pending)
    everyone |= {wait.other for wait in waits}
    found: dict[int, tuple[Confidence, str]] = {
        rank: ("certain", f"it has not ended {entry}, which {_ranks(finished)} ended")
        for rank, (entry, finished) in stuck.items()
    }
    for rank in sorted({wait.other for wait in waits} - set(targets) - set(stuck)):
        found[rank] = _reason(rank, job, waits)
    roots = [Root(rank, *why, len(_behind(rank, targets))) for rank, why in found.items()]
    held = {rank for root in roots for rank in _behind(root.rank, targets)}
    nexts: dict[int, Wait] = {}
    for wait in waits:
        if wait.rank not in held:
            nexts.setdefault(wait.rank, wait)
    followed = {rank: wait.other for rank, wait in nexts.items()}
    places = () if plan is None else places_in(plan, dumps)
    order = ("certain", "likely", "possible")
    return Explanation(
        tuple(sorted(roots, key=lambda root: (order.index(root.confidence), -root.waiting, root.rank))),
        tuple(tuple(nexts[rank] for rank in ring) for ring in rings(followed)),
        tuple(waits),
        tuple(sorted(everyone - set(job.pending))),
        tuple(sorted(rank for rank, entries in job.pending.items() if not entries)),
        tuple(map(str, errors)),
        tuple(_disagreements(dumps)),
        places,
        records or {},
        None if plan is None else first_to_come(plan, places, [root.rank for root in roots]),
    )


def _reason(rank: int, job: DumpedJob, waits: Iterable[Wait]) -> tuple[Confidence, str]:
    if rank not in job.pending:
        return "possible", "it has no dump"
    if not job.pending[rank]:
        return "likely", "it has launched nothing that has not ended"
    wanted = next(str(wait.entry) for wait in waits if wait.other == rank)
    return "possible", f"it is in {job.first[rank][0]} with all of its ranks, before {wanted}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _behind(root: int, targets: Mapping[int, set[int]]) -> set[int]:
    """The ranks that wait for ``root``, some for others that do."""
    found, new = set[int](), {root}
    while new:
        new = {rank for rank, others in targets.items() if others & new} - found - {root}
        found |= new
    return found


def _disagreements(dumps: Iterable[Dump]) -> Iterable[str]:
    """Collectives of one number whose ranks launched other kinds, sizes or types."""
    found: dict[tuple[Any, int], dict[int, Entry]] = defaultdict(dict)
    for rank, entry in ((dump.rank, entry) for dump in dumps for entry in dump.entries):
        if entry.peer is None and entry.kind != "coalesced":
            found[group_of(entry), entry.sequence][rank] = entry
    for (group, sequence), entries in found.items():
        for what in ("kind", "sizes"):
            said: dict[str, list[int]] = defaultdict(list)
            for rank, entry in entries.items():
                if what == "kind" or entry.kind in _ALIKE:
                    said[getattr(entry, what)].append(rank)
            if len(said) > 1:
                does = "launched" if what == "kind" else "passed"
                texts = [f"{_ranks(ranks)} {does} {text}" for text, ranks in said.items()]
                yield f"collective {sequence} of group {group[0]}: {', '.join(texts)}"
                break
