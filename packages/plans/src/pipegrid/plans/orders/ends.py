"""The two ends of each message in orders, and the faults that can be told from them alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from attrs import evolve

from pipegrid.core.order import OrderModel
from pipegrid.plans.errors import PlanError, PlanFault
from pipegrid.plans.orders.orders import Launch, MessageEnd, Orders

End: TypeAlias = tuple[int, int, int]
"""One end of a message: rank, launch, number of the message in it."""


def ends_of(orders: Orders) -> Iterator[tuple[End, MessageEnd]]:
    """Every end of a message, in order."""
    for rank, launches in enumerate(orders.ranks):
        for number, launch in enumerate(launches):
            for part, message in enumerate(launch.messages):
                yield (rank, number, part), message


def paired(orders: Orders, model: OrderModel) -> tuple[Orders, dict[End, End], list[End]]:
    """The orders with the ends that come after a fragment; the other end of each end; and the ends without one.

    Raises:
        PlanError: the orders have faults that are none of waiting; ``faults`` has them.
    """
    faults = _unknown_peers(orders) + _late_messages(orders)
    partners, alone = dict[End, End](), list[End]()
    if not faults:
        orders = _with_later_ends(orders)
        partners, alone = partners_of(orders)
        faults = _ends_alone(orders, alone) or _crossed(orders, partners) or _apart(orders, model, partners)
    if faults:
        raise PlanError(f"the orders have {len(faults)} fault{'s' if len(faults) > 1 else ''}:", faults=faults)
    return orders, partners, alone


def _with_later_ends(orders: Orders) -> Orders:
    """Orders with the ends that a list lacks because it does not end with the step: launched after all that it has.

    A list that does not begin with the step either may lack what was launched, and has ended, before it.
    """
    _, alone = partners_of(orders)
    rows = [list(launches) for launches in orders.ranks]
    for rank, number, part in alone:
        launch = orders.ranks[rank][number]
        message = launch.messages[part]
        if orders.begins[message.peer] and not orders.ends[message.peer]:
            way: Literal["send", "receive"] = "receive" if message.way == "send" else "send"
            other = MessageEnd(way, rank, message.label, message.group)
            rows[message.peer].append(Launch(f"later: {way} {message.label}", (other,), batched=launch.batched))
    return evolve(orders, ranks=tuple(map(tuple, rows)))


def message_of(orders: Orders, end: End) -> MessageEnd:
    """The message of an end."""
    rank, number, part = end
    return orders.ranks[rank][number].messages[part]


def partners_of(orders: Orders) -> tuple[dict[End, End], list[End]]:
    """The other end of each end, and the ends without one; of one label, the first send is the first receive's."""
    waiting: dict[tuple[int, int, str, str], tuple[deque[End], deque[End]]] = {}
    partners: dict[End, End] = {}
    for end, message in ends_of(orders):
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


def _late_messages(orders: Orders) -> list[PlanFault]:
    """The faults of computes that read what comes later on their rank, or never, and of waits for such sends.

    What a fragment does not receive or send at all came before it.
    """
    faults = []
    for rank, launches in enumerate(orders.ranks):
        ends = [(one.way, one.label) for launch in launches for one in launch.messages]
        seen: set[tuple[str, str]] = set()
        for number, launch in enumerate(launches):
            seen |= {(one.way, one.label) for one in launch.messages}
            used = {("receive", label) for label in launch.needs} | {("send", label) for label in launch.waits}
            for way, label in sorted((used if orders.begins[rank] else used & set(ends)) - seen)[:1]:
                sent = way == "send"
                does, done = ("waits for", "sent") if sent else ("reads", "received")
                text = f"{place_of(orders, rank, number)} {does} {label!r}, which its rank has not {done} before"
                faults.append(PlanFault("early-wait" if sent else "late-receive", text))
    return faults


def _unknown_peers(orders: Orders) -> list[PlanFault]:
    """The faults of messages to or from no other rank."""
    count = len(orders.ranks)
    rule = f"the peer is not another of the ranks 0 to {count - 1}"
    return [
        PlanFault("unknown-rank", f"{place_of(orders, rank, number)}: {rule}")
        for (rank, number, _), message in ends_of(orders)
        if not 0 <= message.peer < count or message.peer == rank
    ]


def _ends_alone(orders: Orders, alone: Sequence[End]) -> list[PlanFault]:
    """The faults of ends whose other end should be in a list and is not."""
    faults = []
    for (rank, number, _), message in ((end, message_of(orders, end)) for end in alone):
        if orders.begins[message.peer]:
            what = f"rank {message.peer} never {'receives' if message.way == 'send' else 'sends'} {message.label!r}"
            faults.append(PlanFault("unpaired", f"{place_of(orders, rank, number)}: {what}"))
    return faults


def crossing(orders: Orders, partners: dict[End, End]) -> Iterator[tuple[End, End]]:
    """Sends of one rank to another through one group, one behind the other, whose receives are the other way round."""
    last: dict[tuple[int, int, str], tuple[End, End]] = {}
    for end, message in ends_of(orders):
        if message.way == "send" and end in partners:
            key, other = (end[0], message.peer, message.group), partners[end]
            if key in last and other[1:] < last[key][1][1:]:
                yield last[key][0], end
            last[key] = end, other


def _crossed(orders: Orders, partners: dict[End, End]) -> list[PlanFault]:
    """Pairs of ranks whose receives are in another order than the sends: the backend would match the wrong ones."""
    faults = []
    for before, end in crossing(orders, partners):
        first, second = message_of(orders, before), message_of(orders, end)
        text = f"rank {before[0]} sends {first.label!r} before {second.label!r}, rank {second.peer} receives them"
        why = "messages have no names, so each is received as the other"
        faults.append(PlanFault("order", f"{text} the other way round: {why}"))
    return faults


def _apart(orders: Orders, model: OrderModel, partners: dict[End, End]) -> list[PlanFault]:
    """Messages with one end in a batch and the other alone, where these two are on different communicators."""
    if "pair" not in (model.batched, model.lone) or model.batched == model.lone:
        return []
    faults = []
    for (rank, number, _), (other, at, _) in partners.items():
        if orders.ranks[rank][number].batched and not orders.ranks[other][at].batched:
            here, there = place_of(orders, rank, number), place_of(orders, other, at)
            text = f"{here}: in a batch on the group's communicator, and alone on the pair's at {there}"
            faults.append(PlanFault("communicator", f"{text}; neither end finds the other"))
    return faults


def place_of(orders: Orders, rank: int, number: int) -> str:
    """A launch and where it stands."""
    return f"rank {rank}, launch {number}: {orders.ranks[rank][number].text}"
