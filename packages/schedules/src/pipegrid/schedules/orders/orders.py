"""Orders: what each rank of a program launches, in order. Whole steps, or fragments of them."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen
class Message:
    """One end of a message.

    Attributes:
        way: which end.
        peer: the rank at the other end.
        label: what is sent; the two ends of a message have one label.
        group: the process group that it goes through.
    """

    way: Literal["send", "receive"]
    peer: int
    label: str
    group: str = "default"


@frozen
class Launch:
    """One compute, one message, or a batch of messages.

    Attributes:
        text: as written.
        messages: none for a compute.
        batched: the messages are one batch, also where there is only one.
        needs: labels of the messages that a compute reads.
        holds: the host waits here until the messages have ended.
    """

    text: str
    messages: tuple[Message, ...] = ()
    batched: bool = False
    needs: frozenset[str] = frozenset()
    holds: bool = False

    @property
    def is_compute(self) -> bool:
        """Whether it computes."""
        return not self.messages


@frozen
class Orders:
    """What each rank launches, in order.

    Attributes:
        ranks: per rank its launches.
        begins: per rank, whether its list begins with the step; otherwise it is a fragment, and what came before has
            ended.
        ends: per rank, whether its list ends with the step; otherwise more is launched after it.
    """

    ranks: tuple[tuple[Launch, ...], ...]
    begins: tuple[bool, ...]
    ends: tuple[bool, ...]
