"""Collectives beside the lanes on a device: kept until they have ended, and asked for their errors.

On a device with streams a wait orders the current stream and returns, at once and for a collective that failed, too.
So each is kept until it has ended and was asked for its error, and its group with it: a work has a bare pointer to the
backend of its group.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attrs import define, field

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Label = TypeVar("Label")


@define(eq=False)
class PendingCollectives(Generic[Label]):
    """Collectives that a stream was ordered after, each with a label of its user's, in order; for any thread."""

    _works: deque[tuple[Label, Any, ProcessGroup | None]] = field(factory=deque, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def add(self, label: Label, work: Any, group: ProcessGroup | None) -> None:
        """Keep ``work`` of ``group`` until it has ended and was asked for its error."""
        with self._lock:
            self._works.append((label, work, group))

    def failed(self) -> tuple[Label, RuntimeError] | None:
        """Forget those that have ended, up to the first that has not; the first that failed, once. Never blocks."""
        if not self._works:
            return None
        from pipegrid.transport.backends import NcclTicket  # torch, which a process without collectives need not have

        with self._lock:
            while self._works:
                label, work, group = self._works[0]
                try:
                    if not NcclTicket((work,), group).done():
                        break
                except RuntimeError as error:
                    self._works.popleft()
                    return label, error
                self._works.popleft()
        return None

    def take(self) -> list[tuple[Any, ProcessGroup | None]]:
        """Forget all; each with its group."""
        with self._lock:
            works, self._works = self._works, deque()
        return [(work, group) for _, work, group in works]
