"""Orders as programs, under an order model: hosts, compute streams and lines.

Each rank is several programs for `play`. Its *host* launches one thing after the other. Its *compute* stream runs
computes, each after the messages that it needs. Each *line* of the order model runs communications: one starts when
those before it on the line have ended and the computes launched before it have, and it ends when the other end of each
of its messages has started (rendezvous: NCCL need not buffer anything).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

from attrs import Factory, define

from pipegrid.core.order import OrderModel
from pipegrid.plans.orders.ends import End, ends_of
from pipegrid.plans.orders.orders import Launch, MessageEnd, Orders
from pipegrid.plans.orders.play import EventProgram


@define(eq=False)
class ProgramTrack:
    """A program of a rank; ``name``: "host", "compute", or "communication" for a ``line``."""

    name: str
    rank: int
    program: EventProgram = Factory(EventProgram)
    launches: list[int] = Factory(list)  # per step of the program, the number of its launch
    ends: list[Sequence[End]] = Factory(list)  # per step, the ends of messages that start with it
    line: str = ""  # in words

    def step(self, launch: int, operations: Sequence[int], ends: Sequence[End] = ()) -> None:
        """Add the operations of a launch; without any there is no step."""
        if operations:
            self.program.operations += operations
            self.program.ends.append(len(self.program.operations))
            self.launches.append(launch)
            self.ends.append(ends)


def _line_of(
    model: OrderModel, rank: int, launch: Launch, message: MessageEnd, number: int
) -> tuple[str, MessageEnd | None]:
    """The line that a message of a launch is on, in words; also the message that has one of its own."""
    kind = model.batched if launch.batched else model.lone
    if kind == "rank":
        return "rank", None
    if kind == "group":
        return f"group {message.group}", None
    if kind == "pair":
        return f"pair {message.group} {min(rank, message.peer)} {max(rank, message.peer)}", None
    return f"message {number}", message


def tracks_of(
    orders: Orders, model: OrderModel, partners: dict[End, End], *, buffered: bool, drains: bool
) -> tuple[list[ProgramTrack], int]:
    """The programs of all ranks, and the number of their events."""
    started = {end: number for number, (end, _) in enumerate(ends_of(orders))}
    size = len(started)
    tracks: list[ProgramTrack] = []
    joined = _joined(orders, partners) if model.connects else {}
    sending = ((rank, number) for (rank, number, _), message in ends_of(orders) if message.way == "send")
    agree = any(launch.headers for launches in orders.ranks for launch in launches)
    # Of launches for which others wait: the shapes of their sends are known.
    announced = {each: size + at for at, each in enumerate(dict.fromkeys(sending if agree else ()))}
    size += len(announced)
    for rank, launches in enumerate(orders.ranks):
        host, compute = ProgramTrack("host", rank, line="host"), ProgramTrack("compute", rank, line="compute")
        lines: dict[Hashable, ProgramTrack] = {}
        received: dict[str, int] = {}  # label of a message: the event of its end
        sent: dict[str, list[int]] = {}
        under_way: dict[ProgramTrack, int] = {}  # of each line, the end of its last launch
        computed: int | None = None  # the end of the last compute
        for number, launch in enumerate(launches):
            launched, ended = size, size + 1
            size += 2
            if launch.waits:
                awaited = [~event for label in sorted(launch.waits) for event in sent.get(label, ())]
                host.step(number, [*awaited, launched])
                continue
            if launch.is_compute:
                inputs = [~received[label] for label in sorted(launch.needs) if label in received]
                waits: list[int] = []  # of the host
                if model.host_waits or drains:
                    waits, inputs = [*inputs, *(~event for event in under_way.values() if drains)], []
                    under_way.clear()  # with drains, all of it has ended
                host.step(number, [*waits, launched])
                compute.step(number, [~launched, *inputs, ended])
                computed = ended
                continue
            shaped = [one.way == "receive" and one.label in launch.headers for one in launch.messages]
            ends_here = ((rank, number, part) for part, awaits in enumerate(shaped) if awaits)
            sends = [partners[end][:2] for end in ends_here if end in partners]
            says = [announced[rank, number]] if (rank, number) in announced else []
            host.step(number, [*says, *(~announced[send] for send in sends), launched])
            for part, ends in enumerate(_parts(launch, model)):
                message = launch.messages[ends[0]]
                key = _line_of(model, rank, launch, message, number)
                line = lines.setdefault(key, ProgramTrack("communication", rank, line=key[0]))
                done = ended if part == 0 else size
                size += part > 0
                before = [] if computed is None else [~computed]
                own = [(rank, number, end) for end in ends]
                kept = {end for end in own if buffered and launch.messages[end[2]].way == "send"}
                others = [~started[partners[end]] for end in own if end in partners and end not in kept]
                others += [~started[end] for end in joined.get((rank, number, message.group), ()) if end not in own]
                line.step(number, [~launched, *before, *(started[end] for end in own), *others, done], own)
                under_way[line] = done
                for one in (launch.messages[end] for end in ends):
                    if one.way == "send":
                        sent.setdefault(one.label, []).append(done)
                    else:
                        received[one.label] = done
                if launch.holds:
                    host.step(number, [~done])
        tracks += [host, compute, *lines.values()]
    return tracks, size


_Part: TypeAlias = tuple[int, int, str]
"""The messages of a batch that go through one group: rank, launch, group."""


def _joined(orders: Orders, partners: dict[End, End]) -> dict[_Part, list[End]]:
    """Of each part of a batch in which peers meet first, the ends of all parts that such messages join to it.

    Two ranks meet at the first message of a direction between them; those of a fragment have met before it.
    """
    met = set[tuple[int, int, str, str]]()
    first = set[End]()
    ends_in: dict[_Part, list[End]] = {}
    part_of: dict[End, _Part] = {}
    for end, message in ends_of(orders):
        if orders.ranks[end[0]][end[1]].batched:
            part_of[end] = (end[0], end[1], message.group)
            ends_in.setdefault(part_of[end], []).append(end)
        key = (end[0], message.peer, message.way, message.group)
        if orders.begins[end[0]] and key not in met:
            first.add(end)
        met.add(key)
    found: dict[_Part, list[End]] = {}
    for end, meeting in part_of.items():
        if end not in first or meeting in found:
            continue
        ends: list[End] = []
        ready = [meeting]
        while ready:
            part = ready.pop()
            if part not in found:
                found[part] = ends
                ends += ends_in[part]
                pairs = [(one, partners[one]) for one in ends_in[part] if partners.get(one) in part_of]
                ready += [part_of[other] for one, other in pairs if one in first or other in first]
    return found


def _parts(launch: Launch, model: OrderModel) -> list[list[int]]:
    """The messages of a launch that start together, by number: those of a batch that go through one group."""
    parts: dict[Hashable, list[int]] = {}
    for number, message in enumerate(launch.messages):
        together = launch.batched and model.batched != "none"
        parts.setdefault(message.group if together else number, []).append(number)
    return list(parts.values())
