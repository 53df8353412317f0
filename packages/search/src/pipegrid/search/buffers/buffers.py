"""The slots of a step as data, which is proved where it is made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from attrs import field, frozen

from pipegrid.core.tables import text_table
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import ActionKind, Plan
from pipegrid.search.buffers.check import faults_of
from pipegrid.search.buffers.messages import Buffered, SlotArrival


@frozen(slots=False)
class PositionBuffers:
    """The slots of one position: of messages that arrive, and of what else it has. None is written while it is read.

    Attributes:
        plan: whose messages they are.
        position: of the plan; with routes, the actor.
        arrivals: each kind in the order of the plan. What has none gets memory of its own.

    Raises:
        PlanError: a message comes to a slot that is read later (``overwritten``), has two slots (``duplicate``), one of
            another size (``size``) or in other memory, of the host or the device (``memory``); is no message of the
            position (``unknown-message``), or comes to its slot after its receive or send (``late-post``).

    Examples:
        >>> from pipegrid.plans import Action, ActionKind, Edge, lower, one_f_one_b
        >>> message = Buffered(Action(ActionKind.RECV_F, 1, 0, Edge(0, 1)), peer=0)
        >>> PositionBuffers(lower(one_f_one_b(2, 1)), 1, [SlotArrival(message, 0, 0, nbytes=8)]).nbytes
        8
    """

    plan: Plan = field(repr=False)
    position: int
    arrivals: tuple[SlotArrival, ...] = field(converter=tuple[SlotArrival, ...], repr=False)

    def __attrs_post_init__(self) -> None:
        if faults := faults_of(self.plan, self.position, self.arrivals):
            count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
            raise PlanError(f"the buffers have {count}:", faults=faults)

    @cached_property
    def slot_of(self) -> dict[Buffered, int]:
        """The slot of each message that has one."""
        return {arrival.message: arrival.slot for arrival in self.arrivals}

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes of each slot."""
        return {arrival.slot: arrival.nbytes for arrival in self.arrivals}

    @cached_property
    def host_slots(self) -> frozenset[int]:
        """The slots in the memory of the host, for activations that are offloaded."""
        return frozenset(arrival.slot for arrival in self.arrivals if arrival.message.on_host)

    @property
    def num_slots(self) -> int:
        """Slots on the device: the memory of all messages, in messages where all are alike."""
        return len(self.sizes) - len(self.host_slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots on the device."""
        return sum(size for slot, size in self.sizes.items() if slot not in self.host_slots)

    @property
    def host_nbytes(self) -> int:
        """Bytes of all slots on the host."""
        return sum(self.sizes[slot] for slot in self.host_slots)

    def count(self, what: Literal["received", "kept", "sent", "offloaded"]) -> int:
        """How many have slots: messages received, kept copies of values that skip stages or stay here, and so on."""
        return sum(self._what(arrival.message) == what for arrival in self.arrivals)

    def _what(self, message: Buffered) -> str:
        kind = message.action.kind
        if kind.is_send or message.on_host:
            return "sent" if kind.is_send else "offloaded"
        is_skip = kind is ActionKind.RECV_F and message.action.edge in self.plan.graph.skips
        return "kept" if is_skip or message.peer == self.position else "received"


@frozen(slots=False)
class PlanBuffers:
    """The slots of all positions of a plan; as text, a table of them.

    Attributes:
        positions: those of each position; with routes, of each actor.
        by_edge: per position, the slots on the device that a pool for each edge and direction would need.

    Examples:
        >>> from pipegrid.plans import interleaved_1f1b, lower
        >>> buffers = plan_buffers(lower(interleaved_1f1b(4, 8, num_chunks=4)))
        >>> buffers.num_slots, sum(buffers.by_edge)
        (65, 102)
        >>> [(str(one.message.action), one.slot) for one in buffers.positions[0].arrivals[:2]]
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
        columns: dict[str, Sequence[int]] = {
            name: [one.count(name) for one in self.positions] for name in ("received", "kept", "sent", "offloaded")
        }
        columns |= {
            "a pool per edge": self.by_edge,
            "slots": [one.num_slots for one in self.positions],
            "bytes": [one.nbytes for one in self.positions],
            "host slots": [len(one.host_slots) for one in self.positions],
            "host bytes": [one.host_nbytes for one in self.positions],
        }
        always = ("received", "a pool per edge", "slots")
        columns = {name: (*counts, sum(counts)) for name, counts in columns.items() if any(counts) or name in always}
        heads = [*(f"{one.position:,}" for one in self.positions), "all"]
        rows = zip(heads, *([f"{one:,}" for one in counts] for counts in columns.values()), strict=True)
        return text_table(("position", *columns), list(rows), right=range(1, len(columns) + 1))
