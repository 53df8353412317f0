"""The first entry of a queue that other threads change at the same time."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

Entry = TypeVar("Entry")


def first_of(queue: deque[Entry]) -> Entry | None:
    """The first entry; None of an empty queue.

    An iterator of a live queue raises where another thread changes it between two steps, and an entry may go between
    the question for it and the answer. To walk a queue, walk its ``copy()``, which is one step.
    """
    try:
        return queue[0]
    except IndexError:
        return None
