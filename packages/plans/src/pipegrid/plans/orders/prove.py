"""The proof that orders end, under an order model: hosts, compute streams and lines played against each other.

An event stays set, so the outcome is the same whichever program runs first: orders that end in one interleaving end in
all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from pipegrid.core.fields import nearest, shown
from pipegrid.core.order import ORDER_MODELS, OrderModel
from pipegrid.plans.errors import PlanError, PlanFault
from pipegrid.plans.orders.ends import End, ends_of, paired, place_of
from pipegrid.plans.orders.orders import Orders
from pipegrid.plans.orders.play import Stall, cycles, play
from pipegrid.plans.orders.programs import ProgramTrack, tracks_of


@frozen
class OrderProof:
    """Orders that end, whatever the interleaving.

    Attributes:
        orders: what was proved.
        model: the order model of the proof.
        buffered: the argument of the proof.
        drains: the argument of the proof.
        num_messages: with at least one end in the lists.
        num_outside: of these, those whose other end is taken to be launched before the fragment of its rank.
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
        what = f"{len(self.orders.ranks)} ranks, {self.num_messages} messages{outside}"
        return f"{what}: no deadlock under {self.model.name} {sends}{drains}"


def model_named(order: OrderModel | str) -> OrderModel:
    """An order model, by its name in `pipegrid.core.order.ORDER_MODELS` or as it is; a `PlanError` for no such name."""
    if isinstance(order, OrderModel):
        return order
    if order not in ORDER_MODELS:
        near = nearest(order, ORDER_MODELS)
        raise PlanError(f"order is {shown(order)}{near}; it must be an OrderModel, or one of {', '.join(ORDER_MODELS)}")
    return ORDER_MODELS[order]


def prove_order(orders: Orders, order: OrderModel | str, *, buffered: bool = False, drains: bool = False) -> OrderProof:
    """Prove that every rank comes to the end of its list under an order model, or name the cycle.

    ``buffered``: a send ends without its receive, as NCCL's may where the message fits into its buffers: what ends only
    so hangs with larger messages. ``drains``: every compute waits for all that its rank has launched, as a CUDA call
    that waits for the device does (loading a module, cudaFree, cudaHostAlloc). Linear in the number of messages.

    Raises:
        PlanError: a message has one end only, the receives of a pair are in another order than the sends, a compute
            reads a message that its rank has not received before, a wait comes before its send, or ranks wait for each
            other; ``faults`` has them, a cycle launch by launch.

    Examples:
        >>> print(prove_order(orders_of_plan(lower(gpipe(2, 4))), "nccl2"))
        2 ranks, 8 messages: no deadlock under nccl2 even if sends block
    """
    model = model_named(order)
    played = play_orders(orders, model, buffered=buffered, drains=drains)
    if played.cycles:
        found = [_cycle(played, cycle) for cycle in played.cycles]
        raise PlanError(f"deadlock under {model.name}:{_standing(played)}", faults=found)
    ends = sum(1 for _ in ends_of(played.orders))
    num_alone = len(played.alone)
    return OrderProof(orders, model, buffered, drains, (ends - num_alone) // 2 + num_alone, num_alone)


@frozen
class PlayedOrders:
    """Orders that were played to their end, or until nothing went on."""

    orders: Orders  # with the ends that come after a fragment
    tracks: Sequence[ProgramTrack]
    at: Sequence[int]  # per track, the operations that it has completed
    alone: Sequence[End]  # whose other end was launched before a fragment
    cycles: Sequence[Sequence[tuple[Stall, Stall]]]  # tracks that wait for each other; none where all have ended


def play_orders(orders: Orders, model: OrderModel, *, buffered: bool = False, drains: bool = False) -> PlayedOrders:
    """Play orders, of which a cycle is no error here; arguments and other errors as in `prove_order`."""
    orders, partners, alone = paired(orders, model)
    tracks, num_events = tracks_of(orders, model, partners, buffered=buffered, drains=drains)
    programs = [track.program for track in tracks]
    at = play(programs, num_events)
    ended = all(index == len(program.operations) for index, program in zip(at, programs, strict=True))
    return PlayedOrders(orders, tracks, at, alone, [] if ended else cycles(programs, at))


# ---- Texts

_SHOWN = 4  # launches in a row of an error


def _standing(played: PlayedOrders) -> str:
    """The progress of each rank: what has ended, what is under way, and what is behind it."""
    launched, unended = set[tuple[int, int]](), set[tuple[int, int]]()
    for track, index in zip(played.tracks, played.at, strict=True):
        for number, end in zip(track.launches, track.program.ends, strict=True):
            if track.name == "host" and index >= end:
                launched.add((track.rank, number))
            elif track.name != "host" and index < end:
                unended.add((track.rank, number))
    rows = []
    for rank, launches in enumerate(played.orders.ranks):
        texts: dict[str, list[str]] = {"ended": [], "under way": [], "not launched": []}
        for number, launch in enumerate(launches):
            here = (rank, number)
            state = "not launched" if here not in launched else "under way" if here in unended else "ended"
            texts[state].append(launch.text)
        ended = texts["ended"]
        texts["ended"] = ["..."] * (len(ended) > _SHOWN) + ended[-_SHOWN:]
        parts = []
        for state, own in texts.items():
            cut = own if len(own) <= _SHOWN + 1 else [*own[:_SHOWN], "..."]
            parts.append(f"{state} {' '.join(cut) or '-'}")
        rows.append(f"\n    rank {rank}: {' | '.join(parts)}")
    return "".join(rows)


def _cycle(played: PlayedOrders, cycle: Sequence[tuple[Stall, Stall]]) -> PlanFault:
    """The fault of programs that wait for each other, launch by launch."""
    orders, tracks = played.orders, played.tracks

    def place(wait: Stall) -> str:
        track = tracks[wait.position]
        return place_of(orders, track.rank, track.launches[wait.step])

    lines = []
    for wait, setter in cycle:
        stuck = next(one for one, _ in cycle if one.position == setter.position)
        behind = "" if stuck.step == setter.step else f", which is behind {place(stuck)}"
        lines.append(f"\n      {place(wait)} waits for {place(setter)}{behind}")
    *others, last = sorted({tracks[wait.position].rank for wait, _ in cycle})
    who = f"ranks {', '.join(map(str, others))} and {last}" if others else f"launches of rank {last}"
    return PlanFault("cycle", f"{who} wait for each other in a cycle{''.join(lines)}")
