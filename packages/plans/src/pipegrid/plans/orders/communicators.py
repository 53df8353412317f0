"""The fewest communicators per rank that a plan ends with: which lanes may share one, by proof.

Lanes on one communicator share its line, so a message waits for those before it on other lanes too. Where that closes a
cycle, the messages that start together or one behind the other in it give pairs of lanes, one of which must be apart.
The search is guided by such cycles: place the lanes, prove, take the pairs of each cycle, place anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

from attrs import field, frozen

from pipegrid.core.lanes import LaneSharing
from pipegrid.core.order import ORDER_MODELS, OrderModel
from pipegrid.plans.orders.ends import End, crossing, message_of, partners_of
from pipegrid.plans.orders.of_plan import orders_of_plan
from pipegrid.plans.orders.orders import Orders
from pipegrid.plans.orders.play import Stall
from pipegrid.plans.orders.prove import PlayedOrders, model_named, play_orders, prove_order
from pipegrid.plans.plan import Lane, Plan
from pipegrid.plans.plan.dataflow import dataflow_of

_STEPS = 200_000  # of one search for a placing; past them one more communicator is tried

_Pair: TypeAlias = tuple[Lane, Lane]


@frozen
class SharedCommunicators(LaneSharing):
    """Communicators of lanes with which a plan was proved to end: the ``communicators`` of a `P2PConfig`.

    Attributes:
        plan: the plan, lowered.
        models: the order models of the proof.
        drains: whether computes may wait for the whole device.
        is_fewest: whether no placing has fewer on its fullest position; otherwise the search for one was cut short.
    """

    plan: Plan = field(repr=False)
    models: tuple[OrderModel, ...]
    drains: bool
    is_fewest: bool

    @property
    def per_position(self) -> tuple[int, ...]:
        """The number of communicators that each rank of a position opens for its lanes."""
        members = self.members
        return tuple(sum(position in one for one in members) for position in range(self.plan.num_positions))

    def __str__(self) -> str:
        most, alone = max(self.per_position), max(_lanes_at(self.plan, list(self.numbers)))
        waits = ", also with waits for the whole device" if self.drains else ""
        names = [model.name for model in self.models]
        under = "every order model" if set(ORDER_MODELS) <= set(names) else ", ".join(names)
        fewest = f"the fewest{'' if self.is_fewest else ' found'} under {under}{waits}"
        lines = [f"{most} per rank, {fewest}; with one for each lane {alone}"]
        for number, (positions, lanes) in enumerate(zip(self.members, self.communicators, strict=True)):
            lines.append(f"  {number}: positions {', '.join(map(str, positions))}: {' '.join(map(str, lanes))}")
        return "\n".join(lines)


def fewest_communicators(plan: Plan, *orders: OrderModel | str, drains: bool = True) -> SharedCommunicators:
    """Place the lanes of a lowered plan on the fewest communicators per rank with which it is proved to end.

    ``orders``: the order models of the proof; by default all. A batch is one call for each communicator in it, as
    `orders_of_plan` has it; groups of collectives stay as they are. ``drains``: see `prove_order`; not of a model whose
    host waits. What is fewest need not be fastest: messages on one communicator wait for each other.

    Raises:
        PlanError: as `orders_of_plan`; or a plan that gets stuck even with a communicator for each lane.

    Examples:
        >>> print(fewest_communicators(lower(gpipe(2, 4)), "nccl2"))
        1 per rank, the fewest under nccl2, also with waits for the whole device; with one for each lane 2
          0: positions 0, 1: F0>1 B1>0
    """
    models = tuple(model_named(order) for order in orders or ORDER_MODELS)
    lanes = sorted(dataflow_of(plan).lanes)
    clauses: set[frozenset[_Pair]] = set()
    is_fewest, most = True, 1
    final: dict[Lane, int] | None = None
    while most <= max(1, *_lanes_at(plan, lanes)):
        placed, is_whole = _place(lanes, clauses, most)
        if placed is None:
            is_fewest = is_fewest and is_whole
            most += 1
            continue
        found = _crossing(orders_of_plan(plan, lanes=placed))
        for model in () if found else strictest(models, drains=drains):
            played = play_orders(orders_on(plan, placed, model), model, drains=drains and not model.host_waits)
            found |= {frozenset(_separable(played, cycle, model, placed)) for cycle in played.cycles}
        if not found:
            final = placed
            break
        if frozenset() in found:  # no lanes of this cycle share a communicator
            break
        clauses |= found
    if final is None:
        final, is_fewest = {lane: number for number, lane in enumerate(lanes)}, False
        for model in strictest(models, drains=drains):  # with the cycle in its error
            prove_order(orders_on(plan, final, model), model, drains=drains and not model.host_waits)
    communicators = [[lane for lane in final if final[lane] == number] for number in sorted(set(final.values()))]
    return SharedCommunicators(communicators, plan, models, drains, is_fewest)


def orders_on(plan: Plan, numbers: Mapping[Lane, int], model: OrderModel) -> Orders:
    """The orders of a plan whose lanes are on these communicators, for the proof under a model.

    On a device with one kernel at a time, whose host waits for each: the waits of all models but where peers connect.
    """
    return orders_of_plan(plan, lanes=numbers, holds=model.batched == "rank")


def strictest(models: Sequence[OrderModel], *, drains: bool) -> list[OrderModel]:
    """The order models whose proofs, of what `orders_on` returns, cover all of ``models``.

    With drains a device that runs one kernel at a time makes a rank one queue of computes and launches: what waits in
    another model waits there too, but for peers that connect.
    """
    serial = drains and any(model == ORDER_MODELS["nccl-serial"] for model in models)
    covered = [model for name, model in ORDER_MODELS.items() if serial and name != "nccl-serial" and not model.connects]
    return [model for model in models if model not in covered]


def _lanes_at(plan: Plan, lanes: Sequence[Lane]) -> list[int]:
    """Per position, the lanes that start or end there."""
    ends = Counter(end for lane in lanes for end in (lane.source, lane.destination))
    return [ends[position] for position in range(plan.num_positions)]


def _crossing(orders: Orders) -> set[frozenset[_Pair]]:
    """Per two lanes of a pair of positions, whose messages cross on their one communicator: these must be apart."""
    partners, _ = partners_of(orders)
    pairs = {_lanes_of(orders, ends) for ends in crossing(orders, partners)}
    return {frozenset(combinations(sorted(pair), 2)) for pair in pairs if len(pair) > 1}


def _lanes_of(orders: Orders, ends: Iterable[End]) -> frozenset[Lane]:
    return frozenset(lane for end in ends if (lane := message_of(orders, end).lane) is not None)


def _separable(
    played: PlayedOrders,
    cycle: Sequence[tuple[Stall, Stall]],
    model: OrderModel,
    placed: Mapping[Lane, int],
) -> Iterator[_Pair]:
    """The pairs of lanes of which one must be on two communicators, or a cycle is there again.

    Of each line in the cycle: lanes whose messages start together, or come one behind the other. Of each host that
    waits for shapes: the lane of a receive, and all that it shares its communicator with. Where peers connect, calls
    are joined by any lanes that are in one batch.
    """
    stuck = {wait.position: wait.step for wait, _ in cycle}
    for position, step in stuck.items():
        track = played.tracks[position]
        launch = played.orders.ranks[track.rank][track.launches[step]]
        received = [one for one in launch.messages if one.way == "receive" and one.label in launch.headers]
        for lane in {one.lane for one in received if track.name == "host" and one.lane is not None}:
            mates = [other for other in placed if placed[other] == placed[lane] and other != lane]
            yield from ((min(lane, other), max(lane, other)) for other in mates)
    for _, setter in cycle:
        ends = played.tracks[setter.position].ends
        here, behind = (_lanes_of(played.orders, ends[step]) for step in (stuck[setter.position], setter.step))
        for lanes in [here, behind] if model.batched == "rank" else [here | behind]:
            yield from combinations(sorted(lanes), 2)
    if model.connects:
        for rank, launches in enumerate(played.orders.ranks):
            for number, launch in enumerate(launches):
                batch = [(rank, number, part) for part in range(len(launch.messages))]
                yield from combinations(sorted(_lanes_of(played.orders, batch)), 2)


def _place(lanes: Sequence[Lane], clauses: set[frozenset[_Pair]], most: int) -> tuple[dict[Lane, int] | None, bool]:
    """A number for each lane, at most ``most`` at a position, with a pair apart in each clause.

    Also whether the search was whole: with None and True there is no such placing.
    """
    own: dict[Lane, list[frozenset[_Pair]]] = {lane: [] for lane in lanes}
    for clause in clauses:
        for lane in {lane for pair in clause for lane in pair}:
            own[lane].append(clause)
    order = sorted(lanes, key=lambda lane: (-len(own[lane]), lane))
    numbers: dict[Lane, int] = {}
    at: dict[int, Counter[int]] = {end: Counter() for lane in lanes for end in (lane.source, lane.destination)}

    def fits(lane: Lane, number: int) -> bool:
        ends = at[lane.source], at[lane.destination]
        if any(number not in end and len(end) >= most for end in ends):
            return False
        numbers[lane] = number
        apart = all(any(_is_apart(pair, numbers) for pair in clause) for clause in own[lane])
        del numbers[lane]
        return apart

    def put(lane: Lane, number: int, change: int) -> None:
        for end in (at[lane.source], at[lane.destination]):
            end[number] += change
            if not end[number]:
                del end[number]

    tried = [-1] * len(order)
    depth = 0
    for _ in range(_STEPS):
        if depth == len(order):
            return numbers, True
        lane = order[depth]
        used = max(numbers.values(), default=-1)
        number = next((n for n in range(tried[depth] + 1, used + 2) if fits(lane, n)), None)
        if number is not None:
            tried[depth], numbers[lane] = number, number
            put(lane, number, 1)
            depth += 1
            continue
        tried[depth] = -1
        depth -= 1
        if depth < 0:
            return None, True
        put(order[depth], numbers.pop(order[depth]), -1)
    return None, False


def _is_apart(pair: _Pair, numbers: Mapping[Lane, int]) -> bool:
    """Whether two lanes are on two communicators, or may still be."""
    one, other = (numbers.get(lane) for lane in pair)
    return one is None or other is None or one != other
