"""Orders: what each rank of a program launches, in order. Whole steps, or fragments of them."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from pipegrid.plans.plan import Lane


@frozen
class MessageEnd:
    """One end of a message.

    Attributes:
        way: which end.
        peer: the rank at the other end.
        label: what is sent; the two ends of a message have one label.
        group: the process group that it goes through.
        lane: of the plan, which it travels on; None of other programs, and in a collective.
    """

    way: Literal["send", "receive"]
    peer: int
    label: str
    group: str = "default"
    lane: Lane | None = None


@frozen
class Launch:
    """One compute, one message, a batch of messages, or a wait for sends.

    Attributes:
        text: as written.
        messages: none for a compute or a wait.
        batched: the messages are one batch, also where there is only one.
        needs: labels of the messages that a compute reads.
        holds: the host waits here until the messages have ended.
        waits: labels of sends launched before: the host waits here until they have ended. A wait has no messages.
            (NCCL's holds the current stream, not the host: what the rank launches later starts after it all the same.)
        headers: labels of the receives whose sends must have been launched before any message of this starts: their
            shapes come with it, and a later start would be in another order.
    """

    text: str
    messages: tuple[MessageEnd, ...] = ()
    batched: bool = False
    needs: frozenset[str] = frozenset()
    holds: bool = False
    headers: frozenset[str] = frozenset()
    waits: frozenset[str] = frozenset()

    @property
    def is_compute(self) -> bool:
        """Whether it computes."""
        return not self.messages and not self.waits


@frozen
class Orders:
    """The launches of each rank, in order.

    Attributes:
        ranks: per rank its launches.
        begins: per rank, whether its list begins with the step; otherwise it is a fragment, and what came before has
            ended.
        ends: per rank, whether its list ends with the step; otherwise more is launched after it.

    Examples:
        >>> orders_of_plan(lower(gpipe(2, 4))).begins
        (True, True)
    """

    ranks: tuple[tuple[Launch, ...], ...]
    begins: tuple[bool, ...]
    ends: tuple[bool, ...]
