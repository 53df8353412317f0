"""Memory under vector clocks: the accesses of a storage, and which of them race.

Source: the vector clocks of data race detectors, Mattern 1989, "Virtual Time and Global States of Distributed Systems".
"""

from __future__ import annotations

from typing import Any

from attrs import define, field, frozen
from torch import Tensor

Clock = dict[int, int]
"""A tick per stream: the work that is ordered before."""


def merge(clock: Clock, other: Clock) -> None:
    """Raise each tick of ``clock`` to that of ``other``."""
    for stream, tick in other.items():
        if tick > clock.get(stream, 0):
            clock[stream] = tick


def extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor spans, those between its rows included."""
    if tensor.numel() == 0:
        return 0, 0
    size = tensor.element_size()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * size, (first + last + 1) * size


@frozen
class Access:
    """A piece of work that reads or writes the bytes ``begin`` to ``end`` of a storage."""

    stream: int
    tick: int
    begin: int
    end: int
    writes: bool
    what: str


@define(eq=False)
class StorageUse:
    """One storage: the stream it was allocated on, and the accesses that later ones must be ordered after.

    ``block`` is its memory on a late device, ``nbytes`` what counts of it as live.
    """

    reference: Any
    home: int
    accesses: list[Access] = field(factory=list)
    recorded: set[int] = field(factory=set)
    block: Tensor | None = None
    nbytes: int = 0

    def add(self, new: Access, clock: Clock) -> Access | None:
        """Note an access whose work is ordered after ``clock``; the first older access with which it races."""
        kept, raced = [], None
        for old in self.accesses:
            ordered = old.tick <= clock.get(old.stream, 0)
            apart = old.end <= new.begin or new.end <= old.begin
            if raced is None and not (ordered or apart) and (new.writes or old.writes):
                raced = old
            covered = new.begin <= old.begin and old.end <= new.end
            if not (ordered and covered and (new.writes or (old.stream == new.stream and not old.writes))):
                kept.append(old)
        self.accesses = [*kept, new]
        return raced
