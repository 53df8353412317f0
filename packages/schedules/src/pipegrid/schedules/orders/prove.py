"""The proof that orders end, under an order model: hosts, compute streams and lines played against each other.

Each rank is several programs for `play`. Its *host* launches one thing after the other. Its *compute*
stream runs computes, each after the messages that it needs. Each *line* of the order model runs communications: one
starts when those before it on the line have ended and the computes launched before it have, and it ends when the other
end of each of its messages has started (rendezvous: NCCL need not buffer anything).

An event stays set, so the outcome is the same whichever program runs first: orders that end in one interleaving end in
all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal, TypeAlias

from attrs import Factory, define, evolve, frozen

from pipegrid.schedules.errors import Fault, PlanError
from pipegrid.schedules.orders.orders import Launch, Message, Orders
from pipegrid.schedules.orders.play import Program, Wait, cycles, play
from pipegrid.transport.order import OrderModel


@frozen
class OrderProof:
    """Orders that end, whatever the interleaving; ``model``, ``buffered`` and ``drains`` are those of the proof.

    ``num_messages``: with at least one end in the lists. ``num_outside``: of these, the messages whose other end is
    taken to be launched before the fragment of its rank.
    """

    orders: Orders
    model: OrderModel
    buffered: bool
    drains: bool
    num_messages: int
    num_outside: int

    def __str__(self) -> str:
        sends = "if sends are buffered" if self.buffered else "even if sends block"
        drains = ", and if any compute waits for the whole device" if self.drains else ""
        outside = f" ({self.num_outside} with an end before the fragments)" if self.num_outside else ""
        return (
            f"{len(self.orders.ranks)} ranks, {self.num_messages} messages{outside}: no deadlock under "
            f"{self.model.name} {sends}{drains}"
        )


@define(eq=False)
class _Track:
    """A program of a rank, and for each of its steps the number of the launch it belongs to."""

    name: str
    rank: int
    program: Program = Factory(Program)
    launches: list[int] = Factory(list)

    def step(self, launch: int, operations: Sequence[int]) -> None:
        """Add the operations of a launch; without any there is no step."""
        if operations:
            self.program.operations += operations
            self.program.ends.append(len(self.program.operations))
            self.launches.append(launch)


def prove_order(orders: Orders, model: OrderModel, *, buffered: bool = False, drains: bool = False) -> OrderProof:
    """Prove that every rank comes to the end of its list, or name the cycle.

    ``buffered``: a send ends without its receive, as NCCL's may where the message fits into its buffers: what ends only
    so hangs with larger messages. ``drains``: every compute waits for all that its rank has launched, as a CUDA call
    that waits for the device does (loading a module, cudaFree, cudaHostAlloc). Linear in the number of messages.

    Raises:
        PlanError: a message has one end only, the receives of a pair are in another order than the sends, a compute
            reads a message that its rank has not received before, or ranks wait for each other; ``faults`` has them, a
            cycle launch by launch.
    """
    faults = _unknown_peers(orders) + _late_receives(orders)
    if not faults:
        orders = _with_later_ends(orders)
        partners, alone = _partners(orders)
        faults = (
            _ends_alone(orders, alone) or _crossed(orders, partners) or _on_two_communicators(orders, model, partners)
        )
    if faults:
        raise PlanError(f"the orders have {len(faults)} fault{'s' if len(faults) > 1 else ''}:", faults=faults)
    tracks, num_events = _tracks(orders, model, partners, buffered=buffered, drains=drains)
    programs = [track.program for track in tracks]
    at = play(programs, num_events)
    if any(index < len(program.operations) for index, program in zip(at, programs, strict=True)):
        found = [_cycle(orders, tracks, cycle) for cycle in cycles(programs, at)]
        raise PlanError(f"deadlock under {model.name}:{_standing(orders, tracks, at)}", faults=found)
    ends = sum(1 for _ in _ends(orders))
    return OrderProof(orders, model, buffered, drains, (ends - len(alone)) // 2 + len(alone), len(alone))


# ---- Both ends of each message

_End = tuple[int, int, int]  # rank, launch, number of the message in it


def _ends(orders: Orders) -> Iterator[tuple[_End, Message]]:
    for rank, launches in enumerate(orders.ranks):
        for number, launch in enumerate(launches):
            for part, message in enumerate(launch.messages):
                yield (rank, number, part), message


def _with_later_ends(orders: Orders) -> Orders:
    """Orders with the ends that a list lacks because it does not end with the step: launched after all that it has.

    A list that does not begin with the step either may lack what was launched, and has ended, before it.
    """
    _, alone = _partners(orders)
    rows = [list(launches) for launches in orders.ranks]
    for end in alone:
        message = _message(orders, end)
        if orders.begins[message.peer] and not orders.ends[message.peer]:
            way: Literal["send", "receive"] = "receive" if message.way == "send" else "send"
            batched = orders.ranks[end[0]][end[1]].batched
            other = Message(way, end[0], message.label, message.group)
            rows[message.peer].append(Launch(f"later: {way} {message.label}", (other,), batched=batched))
    return evolve(orders, ranks=tuple(map(tuple, rows)))


def _message(orders: Orders, end: _End) -> Message:
    rank, number, part = end
    return orders.ranks[rank][number].messages[part]


def _partners(orders: Orders) -> tuple[dict[_End, _End], list[_End]]:
    """The other end of each end, and the ends without one; of one label, the first send is the first receive's."""
    waiting: dict[tuple[int, int, str, str], tuple[deque[_End], deque[_End]]] = {}
    partners: dict[_End, _End] = {}
    for end, message in _ends(orders):
        sends = message.way == "send"
        pair = (end[0], message.peer) if sends else (message.peer, end[0])
        sent, received = waiting.setdefault((*pair, message.group, message.label), (deque(), deque()))
        own, others = (sent, received) if sends else (received, sent)
        if others:
            other = others.popleft()
            partners[end], partners[other] = other, end
        else:
            own.append(end)
    return partners, sorted(end for ends in waiting.values() for side in ends for end in side)


def _late_receives(orders: Orders) -> list[Fault]:
    """The faults of computes that read what comes later on their rank, or never.

    What a fragment does not receive at all came before it.
    """
    faults = []
    for rank, launches in enumerate(orders.ranks):
        left = [message.label for one in launches for message in one.messages if message.way == "receive"]
        seen: set[str] = set()
        for number, launch in enumerate(launches):
            seen |= {message.label for message in launch.messages if message.way == "receive"}
            late = launch.needs - seen if orders.begins[rank] else (launch.needs & set(left)) - seen
            if late:
                text = f"{_place(orders, rank, number)} reads {min(late)!r}, which its rank has not received before"
                faults.append(Fault("late-receive", text))
    return faults


def _unknown_peers(orders: Orders) -> list[Fault]:
    count = len(orders.ranks)
    return [
        Fault("unknown-rank", f"{_place(orders, rank, number)}: the peer is not another of the ranks 0 to {count - 1}")
        for (rank, number, _), message in _ends(orders)
        if not 0 <= message.peer < count or message.peer == rank
    ]


def _ends_alone(orders: Orders, alone: Sequence[_End]) -> list[Fault]:
    """The faults of ends whose other end should be in a list and is not."""
    faults = []
    for end in alone:
        message = _message(orders, end)
        if orders.begins[message.peer]:
            done = "receives" if message.way == "send" else "sends"
            text = f"{_place(orders, end[0], end[1])}: rank {message.peer} never {done} {message.label!r}"
            faults.append(Fault("unpaired", text))
    return faults


def _crossed(orders: Orders, partners: dict[_End, _End]) -> list[Fault]:
    """Pairs of ranks whose receives are in another order than the sends: the backend would match the wrong ones."""
    faults, last = [], dict[tuple[int, int, str], tuple[_End, _End]]()
    for end, message in _ends(orders):
        if message.way == "send" and end in partners:
            key, other = (end[0], message.peer, message.group), partners[end]
            if key in last and other[1:] < last[key][1][1:]:
                before = _message(orders, last[key][0]).label
                text = (
                    f"rank {end[0]} sends {before!r} before {message.label!r}, rank {message.peer} receives them the "
                    "other way round: messages have no names, so each is received as the other"
                )
                faults.append(Fault("order", text))
            last[key] = end, other
    return faults


def _on_two_communicators(orders: Orders, model: OrderModel, partners: dict[_End, _End]) -> list[Fault]:
    """Messages with one end in a batch and the other alone, where these two are on different communicators."""
    if "pair" not in (model.batched, model.lone) or model.batched == model.lone:
        return []
    batched = {end: orders.ranks[end[0]][end[1]].batched for end in partners}
    return [
        Fault(
            "communicator",
            f"{_place(orders, end[0], end[1])}: in a batch on the group's communicator, and alone on the pair's at "
            f"{_place(orders, other[0], other[1])}; neither end finds the other",
        )
        for end, other in partners.items()
        if batched[end] and not batched[other]
    ]


# ---- Programs


def _line_of(model: OrderModel, rank: int, launch: Launch, message: Message, number: int) -> Hashable:
    """The line that a message of a launch is on."""
    kind = model.batched if launch.batched else model.lone
    if kind == "rank":
        return ("rank",)
    if kind == "group":
        return ("group", message.group)
    if kind == "pair":
        return ("pair", message.group, *sorted((rank, message.peer)))
    return ("message", number, message)


def _tracks(
    orders: Orders, model: OrderModel, partners: dict[_End, _End], *, buffered: bool, drains: bool
) -> tuple[list[_Track], int]:
    """The programs of all ranks, and the number of their events."""
    started = {end: number for number, (end, _) in enumerate(_ends(orders))}
    size = len(started)
    tracks: list[_Track] = []
    joined = _joined(orders, partners) if model.connects else {}
    for rank, launches in enumerate(orders.ranks):
        host, compute = _Track("host", rank), _Track("compute", rank)
        lines: dict[Hashable, _Track] = {}
        received: dict[str, int] = {}  # label of a message: the event of its end
        under_way: dict[_Track, int] = {}  # of each line, the end of its last launch
        computed: int | None = None  # the end of the last compute
        for number, launch in enumerate(launches):
            launched, ended = size, size + 1
            size += 2
            if launch.is_compute:
                inputs = [~received[label] for label in sorted(launch.needs) if label in received]
                waits = [*inputs, *(~event for event in under_way.values())] if drains else inputs
                if model.host_waits or drains:
                    host.step(number, [*waits, launched])
                    inputs = []
                    under_way.clear()  # with drains, all of it has ended
                else:
                    host.step(number, [launched])
                compute.step(number, [~launched, *inputs, ended])
                computed = ended
                continue
            host.step(number, [launched])
            for part, ends in enumerate(_parts(launch, model)):
                message = launch.messages[ends[0]]
                line = lines.setdefault(_line_of(model, rank, launch, message, number), _Track("communication", rank))
                done = ended if part == 0 else size
                size += part > 0
                before = [] if computed is None else [~computed]
                own = [(rank, number, end) for end in ends]
                others = [
                    ~started[partners[end]]
                    for end in own
                    if end in partners and not (buffered and launch.messages[end[2]].way == "send")
                ]
                others += [~started[end] for end in joined.get((rank, number, message.group), ()) if end not in own]
                line.step(number, [~launched, *before, *(started[end] for end in own), *others, done])
                under_way[line] = done
                received |= {launch.messages[end].label: done for end in ends if launch.messages[end].way != "send"}
                if launch.holds:
                    host.step(number, [~done])
        tracks += [host, compute, *lines.values()]
    return tracks, size


_Part: TypeAlias = tuple[int, int, str]
"""The messages of a batch that go through one group: rank, launch, group."""


def _joined(orders: Orders, partners: dict[_End, _End]) -> dict[_Part, list[_End]]:
    """Of each part of a batch in which peers meet first, the ends of all parts that such messages join to it.

    Two ranks meet at the first message of a direction between them; those of a fragment have met before it.
    """
    met = set[tuple[int, int, str, str]]()
    first = set[_End]()
    ends_of: dict[_Part, list[_End]] = {}
    part_of: dict[_End, _Part] = {}
    for end, message in _ends(orders):
        if orders.ranks[end[0]][end[1]].batched:
            part_of[end] = (end[0], end[1], message.group)
            ends_of.setdefault(part_of[end], []).append(end)
        key = (end[0], message.peer, message.way, message.group)
        if orders.begins[end[0]] and key not in met:
            first.add(end)
        met.add(key)
    found: dict[_Part, list[_End]] = {}
    for end, meeting in part_of.items():
        if end not in first or meeting in found:
            continue
        ends: list[_End] = []
        ready = [meeting]
        while ready:
            part = ready.pop()
            if part not in found:
                found[part] = ends
                ends += ends_of[part]
                pairs = [(one, partners[one]) for one in ends_of[part] if partners.get(one) in part_of]
                ready += [part_of[other] for one, other in pairs if one in first or other in first]
    return found


def _parts(launch: Launch, model: OrderModel) -> list[list[int]]:
    """The messages of a launch that start together, by number: those of a batch that go through one group."""
    parts: dict[Hashable, list[int]] = {}
    for number, message in enumerate(launch.messages):
        together = launch.batched and model.batched != "none"
        parts.setdefault(message.group if together else number, []).append(number)
    return list(parts.values())


# ---- Texts

_SHOWN = 4  # launches in a row of an error


def _standing(orders: Orders, tracks: Sequence[_Track], at: Sequence[int]) -> str:
    """How far each rank has come: what has ended, what is under way, and what is behind it."""
    launched, unended = set[tuple[int, int]](), set[tuple[int, int]]()
    for track, index in zip(tracks, at, strict=True):
        for number, end in zip(track.launches, track.program.ends, strict=True):
            if track.name == "host" and index >= end:
                launched.add((track.rank, number))
            elif track.name != "host" and index < end:
                unended.add((track.rank, number))
    rows = []
    for rank, launches in enumerate(orders.ranks):
        texts: dict[str, list[str]] = {"ended": [], "under way": [], "not launched": []}
        for number, launch in enumerate(launches):
            here = (rank, number)
            state = "not launched" if here not in launched else "under way" if here in unended else "ended"
            texts[state].append(launch.text)
        ended = texts["ended"]
        texts["ended"] = ["..."] * (len(ended) > _SHOWN) + ended[-_SHOWN:]
        parts = [f"{state} {' '.join(_first(own)) or '-'}" for state, own in texts.items()]
        rows.append(f"\n    rank {rank}: {' | '.join(parts)}")
    return "".join(rows)


def _first(texts: Sequence[str]) -> Sequence[str]:
    return texts if len(texts) <= _SHOWN + 1 else [*texts[:_SHOWN], "..."]


def _place(orders: Orders, rank: int, number: int) -> str:
    """A launch and where it stands."""
    return f"rank {rank}, launch {number}: {orders.ranks[rank][number].text}"


def _cycle(orders: Orders, tracks: Sequence[_Track], cycle: Sequence[tuple[Wait, Wait]]) -> Fault:
    """The fault of programs that wait for each other, launch by launch."""

    def place(wait: Wait) -> str:
        track = tracks[wait.position]
        return _place(orders, track.rank, track.launches[wait.step])

    lines = []
    for wait, setter in cycle:
        stuck = next(one for one, _ in cycle if one.position == setter.position)
        behind = "" if stuck.step == setter.step else f", which is behind {place(stuck)}"
        lines.append(f"\n      {place(wait)} waits for {place(setter)}{behind}")
    ranks = {tracks[wait.position].rank for wait, _ in cycle}
    return Fault("cycle", f"{_waiting(sorted(ranks))} in a cycle{''.join(lines)}")


def _waiting(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"launches of rank {ranks[0]} wait for each other"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} wait for each other"
