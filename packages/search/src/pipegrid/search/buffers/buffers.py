"""The slots of a step as data, which is proved where it is made."""

from __future__ import annotations

from functools import cached_property

from attrs import field, frozen

from pipegrid.core.tables import text_table
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Plan
from pipegrid.search.buffers.check import faults_of
from pipegrid.search.buffers.messages import ReceivedMessage, SlotArrival


@frozen(slots=False)
class PositionBuffers:
    """The slots in which the messages of one position arrive. Proved: none is written while it is read.

    Attributes:
        plan: whose messages they are.
        position: of the plan; with routes, the actor.
        arrivals: in the order of the plan. What has none gets memory of its own.

    Raises:
        PlanError: a message is posted to a slot that is read later (``overwritten``), or has two slots
            (``duplicate``), or one of another size (``size``); is no message of the position (``unknown-message``), or
            is posted after its receive (``late-post``).

    Examples:
        >>> from pipegrid.plans import Action, ActionKind, Edge, lower, one_f_one_b
        >>> message = ReceivedMessage(Action(ActionKind.RECV_F, 1, 0, Edge(0, 1)), sender=0)
        >>> PositionBuffers(lower(one_f_one_b(2, 1)), 1, [SlotArrival(message, 0, 0, nbytes=8)]).nbytes
        8
    """

    plan: Plan = field(repr=False)
    position: int
    arrivals: tuple[SlotArrival, ...] = field(converter=tuple[SlotArrival, ...], repr=False)

    def __attrs_post_init__(self) -> None:
        faults = faults_of(self.plan, self.position, self.arrivals)
        if faults:
            count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
            raise PlanError(f"the buffers have {count}:", faults=faults)

    @cached_property
    def slot_of(self) -> dict[ReceivedMessage, int]:
        """The slot of each message that has one."""
        return {arrival.message: arrival.slot for arrival in self.arrivals}

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes of each slot."""
        return {arrival.slot: arrival.nbytes for arrival in self.arrivals}

    @property
    def num_slots(self) -> int:
        """Slots: the memory of all messages, in messages where all are alike."""
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(self.sizes.values())


@frozen(slots=False)
class PlanBuffers:
    """The slots of all positions of a plan; as text, a table of them.

    Attributes:
        positions: those of each position; with routes, of each actor.
        by_edge: per position, the slots that a pool for each edge and direction would need.

    Examples:
        >>> from pipegrid.plans import interleaved_1f1b, lower
        >>> buffers = plan_buffers(lower(interleaved_1f1b(4, 8, num_chunks=4)))
        >>> buffers.num_slots, sum(buffers.by_edge)
        (65, 102)
        >>> [(str(one.message.receive), one.slot) for one in buffers.positions[0].arrivals[:2]]
        [('4RECV_F0<3', 0), ('4RECV_F1<3', 1)]
    """

    positions: tuple[PositionBuffers, ...]
    by_edge: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        """Slots of all positions."""
        return sum(one.num_slots for one in self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots of all positions."""
        return sum(one.nbytes for one in self.positions)

    def __str__(self) -> str:
        columns = [
            [one.position for one in self.positions],
            [len(one.arrivals) for one in self.positions],
            [*self.by_edge],
            [one.num_slots for one in self.positions],
            [one.nbytes for one in self.positions],
        ]
        shown = 5 if self.nbytes else 4
        header = ("position", "messages", "a pool per edge", "slots", "bytes")[:shown]
        rows = [[f"{one:,}" for one in row] for row in zip(*columns[:shown], strict=True)]
        total = ["all", *(f"{sum(column):,}" for column in columns[1:shown])]
        return text_table(header, [*rows, total], right=range(1, shown))
