"""The reshard plan: who sends which box to whom, and how copies are completed. Pure; no torch.

One direction of a boundary is three steps, of which the outer two are often empty:

1. *reduce*: ranks of the sending side that hold partial sums add them up (all-reduce);
2. *messages*: boxes cross the boundary, each element once; among ``a`` copies on the sending side and ``b``
   on the receiving side, copy ``i`` sends to copy ``j`` the overlap of [i/a, (i+1)/a) with [j/b, (j+1)/b);
3. *complete*: copies on the receiving side give each other what they got (all-gather, or broadcast).

Backward is the same function with the sides exchanged. A receiving side that holds copies of an activation
sends copies of a gradient, and one of each element crosses: for replicas that is the adjoint, because an inner
product counts replicas once. Where the gradients are partial sums instead, step 1 adds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

from attrs import field, frozen

from pipegrid.core.fields import Count, Index, checked, checked_arguments, checked_fields
from pipegrid.reshard.box import Box, Span, shares
from pipegrid.reshard.cuts import Cut, local_shape, local_spans, meeting_classes, part_cuts, pieces, row_cuts
from pipegrid.reshard.errors import BridgeError
from pipegrid.reshard.links import AUTO_LEADER_BYTES, Links, Route, Strategy, StrategyChoice, leaders
from pipegrid.reshard.side import Side
from pipegrid.reshard.sizes import AxisNames, Sizes


@frozen(order=True, field_transformer=checked_fields(BridgeError))
class Message:
    """A box of the tensor on one rank that goes to a box of the one on another; a local copy where the ranks are one.

    The boxes are in the coordinates of the two local tensors and have one shape.

    Attributes:
        source: the rank that sends.
        destination: the rank that receives.
        source_box: the part of the source's tensor that is sent.
        destination_box: its place in the destination's tensor.

    Examples:
        >>> str(Message(0, 3, Box((0, 0), (2, 8)), Box((0, 0), (2, 8))))
        '0[0:2, 0:8] -> 3[0:2, 0:8]'
    """

    source: Index
    destination: Index
    source_box: Box
    destination_box: Box

    def __str__(self) -> str:
        return f"{self.source}{self.source_box} -> {self.destination}{self.destination_box}"


ByPeer: TypeAlias = dict[int, tuple[Message, ...]]


@frozen
class Completion:
    """Copies of a tensor that give each other what they received.

    Attributes:
        ranks: copies of each other, so a box means the same elements on each of them.
        boxes: after the messages, ``boxes[k]`` of the local tensor on ``ranks[k]`` goes to all other ``ranks``.

    Examples:
        >>> Completion(ranks=(0, 1), boxes=((Box((0,), (4,)),), ())).root
        0
    """

    ranks: tuple[int, ...]
    boxes: tuple[tuple[Box, ...], ...]

    @property
    def root(self) -> int | None:
        """The rank that alone has something to give (a broadcast), or None (an all-gather)."""
        givers = [rank for rank, boxes in zip(self.ranks, self.boxes, strict=True) if boxes]
        return givers[0] if len(givers) == 1 else None


@frozen(slots=False)
class ReshardPlan:
    """All steps that move a tensor from side ``src`` to side ``dst``; see the module's text for the steps.

    A plan made for one rank lists only the messages and completions which that rank takes part in.

    Attributes:
        src: the side that sends; in a backward plan, the side that consumed the activation.
        dst: the side that receives.
        sizes: of the axes of the tensor.
        backward: whether it moves a gradient.
        strategy: of sending copies (`plan_reshard`).
        itemsize: bytes of an element.
        leader_below: bytes below which ``"auto"`` takes a leader, where the links are not known.
        links: speeds, where they are known.
        cuts: of each axis, the parts that both sides are divided into.
        reductions: ranks that add up their partial sums (step 1).
        messages: boxes that cross the boundary (step 2).
        completions: copies that give each other what they got (step 3).

    Examples:
        >>> from pipegrid.topology import place
        >>> grids = place({"images": {"dp": 3}, "language": {"dp": 2}}, world_size=5)
        >>> sides = boundary_side(grids["images"], "source"), boundary_side(grids["language"], "destination")
        >>> plan = plan_reshard(*sides, Sizes((6, 8), axes=axis_names(2)))
        >>> len(plan.messages), plan.completions
        (4, ())
    """

    src: Side
    dst: Side
    sizes: Sizes
    backward: bool
    strategy: Strategy
    itemsize: int
    leader_below: int
    links: Links | None
    cuts: tuple[Cut[int], ...] = field(repr=False)
    reductions: tuple[tuple[int, ...], ...]
    messages: tuple[Message, ...]
    completions: tuple[Completion, ...]

    def source_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the tensor that ``rank`` gives."""
        return local_shape(self.source_spans(rank))

    def destination_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the tensor that ``rank`` gets."""
        return local_shape(self.destination_spans(rank))

    def source_spans(self, rank: int) -> tuple[tuple[Span, ...], ...]:
        """The ranges of the whole tensor that ``rank`` gives, per axis, in the order it stores them."""
        return local_spans(self.src, rank, self.cuts, "source")

    def destination_spans(self, rank: int) -> tuple[tuple[Span, ...], ...]:
        """The ranges of the whole tensor that ``rank`` gets, per axis, in the order it stores them."""
        return local_spans(self.dst, rank, self.cuts, "destination")

    def sends(self, rank: int) -> ByPeer:
        """The messages that ``rank`` sends, by destination, ascending. Those to one rank travel as one transfer."""
        return self._sends.get(rank, {})

    def receives(self, rank: int) -> ByPeer:
        """The messages that ``rank`` receives, by source, ascending; its own copies included."""
        return self._receives.get(rank, {})

    @property
    def transfers(self) -> tuple[Route, ...]:
        """Pairs of different ranks (sending, receiving) that exchange a message, ascending."""
        return tuple(sorted({(m.source, m.destination) for m in self.messages if m.source != m.destination}))

    def bytes_sent(self, rank: int) -> int:
        """Bytes that ``rank`` sends across the boundary; what it copies to itself is not sent."""
        return self._bytes(self.sends(rank), rank)

    def bytes_received(self, rank: int) -> int:
        """Bytes that ``rank`` receives across the boundary, before completion."""
        return self._bytes(self.receives(rank), rank)

    def adjoint(self) -> ReshardPlan:
        """The plan of the other direction, for all ranks."""
        src, dst = (self.dst, self.src) if self.backward else (self.src, self.dst)
        return plan_reshard(
            src,
            dst,
            self.sizes,
            backward=not self.backward,
            strategy=self.strategy,
            itemsize=self.itemsize,
            leader_below=self.leader_below,
            links=self.links,
        )

    @cached_property
    def _sends(self) -> dict[int, ByPeer]:
        return _by_ends(self.messages, lambda m: (m.source, m.destination))

    @cached_property
    def _receives(self) -> dict[int, ByPeer]:
        return _by_ends(self.messages, lambda m: (m.destination, m.source))

    def _bytes(self, by_peer: ByPeer, rank: int) -> int:
        return self.itemsize * sum(m.source_box.numel for peer, ms in by_peer.items() if peer != rank for m in ms)


@checked_arguments(BridgeError, kinds=True)
def plan_reshard(
    src: Side,
    dst: Side,
    sizes: Sizes,
    *,
    backward: bool = False,
    strategy: Strategy = "direct",
    itemsize: int = 4,
    leader_below: int = AUTO_LEADER_BYTES,
    links: Links | None = None,
    rank: Index | None = None,
) -> ReshardPlan:
    """Plan how a tensor of ``sizes`` gets from ``src`` to ``dst``; with ``backward``, how its gradient returns.

    Args:
        src: the side that makes the activation.
        dst: the side that consumes it.
        sizes: of the activation.
        backward: plan the transfer of the gradient, from ``dst`` to ``src``.
        strategy: ``"direct"``: copies share the sending. ``"leader"``: one copy sends all to one copy, which
            broadcasts; the last of the source's copies and the first of the destination's. ``"auto"``: for each
            pair of sets of copies, whichever keeps the ``links`` busy for less time; without links, leader for fewer
            than ``leader_below`` bytes.
        itemsize: bytes of an element on the wire.
        leader_below: the threshold of ``"auto"``, in bytes, where no links are given.
        links: bandwidth, latency and shared links, by which ``"auto"`` decides.
        rank: list only what this rank takes part in; linear in what that is.

    Raises:
        BridgeError: a side shards an axis that ``sizes.axes`` does not name; sizes of replicas that fit neither the
            sides nor each other.

    Examples:
        >>> from pipegrid.topology import place
        >>> grids = place({"images": {"dp": 3}, "language": {"dp": 2}}, world_size=5)
        >>> sides = boundary_side(grids["images"], "source"), boundary_side(grids["language"], "destination")
        >>> plan = plan_reshard(*sides, Sizes((6, 8), axes=axis_names(2)))
        >>> str(plan.messages[0])
        '0[0:2, 0:8] -> 3[0:2, 0:8]'
    """
    itemsize = checked(itemsize, Count, "itemsize (bytes)", BridgeError)
    choice = StrategyChoice(strategy, leader_below, links)
    cuts = row_cuts(src, dst, sizes)
    sender, receiver = src, dst
    if backward:
        sender, receiver, cuts = dst, src, tuple(cut.flipped() for cut in cuts)
    messages: list[Message] = []
    gathered: dict[tuple[int, ...], list[Message]] = {}
    broadcast: dict[tuple[int, ...], list[Message]] = {}
    for give, take, pairs in meeting_classes(sender, receiver, cuts, rank):
        givers, takers, boxes = sender.classes[give], receiver.classes[take], pieces(pairs, cuts)
        if set(takers) <= set(givers):
            messages.extend(Message(taker, taker, *pair) for taker in takers for pair in boxes)
            continue
        nbytes = itemsize * sum(box.numel for box, _ in boxes)
        if choice.leads(givers, takers, nbytes, backward=backward):
            source, destination = leaders(givers, takers, backward=backward)
            new, completing = [Message(source, destination, *pair) for pair in boxes], broadcast
        else:
            new, completing = _shared(givers, takers, boxes), gathered
        messages.extend(new)
        if len(takers) > 1:
            completing.setdefault(takers, []).extend(new)
    completions = [_completion(ranks, new) for done in (gathered, broadcast) for ranks, new in done.items()]
    return ReshardPlan(
        src=sender,
        dst=receiver,
        sizes=sizes,
        backward=backward,
        strategy=strategy,
        itemsize=itemsize,
        leader_below=leader_below,
        links=links,
        cuts=cuts,
        reductions=sender.partial_groups,
        messages=tuple(sorted((m for m in messages if rank is None or rank in {m.source, m.destination}), key=_order)),
        completions=tuple(c for c in completions if rank is None or rank in c.ranks),
    )


@checked_arguments(BridgeError, kinds=True)
def routes(
    src: Side,
    dst: Side,
    axes: AxisNames,
    *,
    backward: bool = False,
    strategy: Strategy = "direct",
    rank: Index | None = None,
) -> tuple[Route, ...]:
    """Pairs (sending rank, receiving rank) that may ever exchange something, ascending.

    A pair of one rank with itself is a local copy. This is what lanes are opened for: it depends on the two sides only,
    and holds for all sizes of which each source replica is cut by itself (`Sizes.cut` ``"lane"``, as bridges do), and
    for batches that divide evenly. Replicas of an uneven batch that is cut as one may exchange with others.

    Examples:
        >>> from pipegrid.topology import place
        >>> grids = place({"images": {"dp": 3}, "language": {"dp": 2}}, world_size=5)
        >>> sides = boundary_side(grids["images"], "source"), boundary_side(grids["language"], "destination")
        >>> routes(*sides, axis_names(2))
        ((0, 3), (1, 3), (1, 4), (2, 4))
    """
    cuts = part_cuts(src, dst, axes)
    sender, receiver = src, dst
    if backward:
        sender, receiver, cuts = dst, src, tuple(cut.flipped() for cut in cuts)
    found: set[Route] = set()
    for give, take, _ in meeting_classes(sender, receiver, cuts, rank):
        givers, takers = sender.classes[give], receiver.classes[take]
        if set(takers) <= set(givers):
            found.update((taker, taker) for taker in takers)
            continue
        if strategy in {"leader", "auto"}:
            found.add(leaders(givers, takers, backward=backward))
        if strategy in {"direct", "auto"}:
            found.update((givers[i], takers[j]) for i, j, _, _ in shares(len(givers), len(takers)))
    return tuple(sorted(pair for pair in found if rank is None or rank in pair))


def _shared(givers: Sequence[int], takers: Sequence[int], boxes: Sequence[tuple[Box, Box]]) -> list[Message]:
    """Cut the boxes among the copies of both sides, along the axis that divides best."""
    axis = _cut_axis([source_box for source_box, _ in boxes], math.lcm(len(givers), len(takers)))
    new: list[Message] = []
    for i, j, low, high in shares(len(givers), len(takers)):
        for source_box, destination_box in boxes:
            start, stop = int(source_box.shape[axis] * low), int(source_box.shape[axis] * high)
            if start < stop:
                given, taken = source_box.narrow(axis, start, stop), destination_box.narrow(axis, start, stop)
                new.append(Message(givers[i], takers[j], given, taken))
    return new


def _cut_axis(boxes: Sequence[Box], parts: int) -> int:
    """The outermost axis whose extents ``parts`` divides, else the one with the largest smallest extent."""
    for axis in range(len(boxes[0].shape)):
        if all(box.shape[axis] % parts == 0 for box in boxes):
            return axis
    return max(range(len(boxes[0].shape)), key=lambda axis: min(box.shape[axis] for box in boxes))


def _completion(ranks: tuple[int, ...], messages: Iterable[Message]) -> Completion:
    boxes: dict[int, list[Box]] = {rank: [] for rank in ranks}
    for message in messages:
        boxes[message.destination].append(message.destination_box)
    return Completion(ranks, tuple(tuple(sorted(boxes[rank])) for rank in ranks))


def _order(message: Message) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Sort key of messages: by source and destination, then by place in the source's tensor."""
    return message.source, message.destination, message.source_box.start, message.destination_box.start


def _by_ends(messages: Iterable[Message], ends: Callable[[Message], Route]) -> dict[int, ByPeer]:
    found: dict[int, dict[int, list[Message]]] = {}
    for message in messages:
        here, there = ends(message)
        found.setdefault(here, {}).setdefault(there, []).append(message)
    return {here: {there: tuple(found[here][there]) for there in sorted(found[here])} for here in sorted(found)}
