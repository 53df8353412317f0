"""Collectives beside the lanes on a device: asked for their errors, aborted together with other groups.

On a device with streams a wait orders the current stream and returns, at once and for a collective that failed, too.
So each is kept until it has ended and was asked for its error. A collective that never ends must be aborted before its
group can be destroyed, and together with all others: an abort may wait for kernels of groups that are not aborted yet.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attrs import define, field

from pipegrid.topology import abort_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Label = TypeVar("Label")


@define(eq=False)
class PendingCollectives(Generic[Label]):
    """Collectives that a stream was ordered after, each with a label of its user's, in order; for any thread."""

    _works: deque[tuple[Label, Any]] = field(factory=deque, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def add(self, label: Label, work: Any) -> None:
        """Keep ``work`` until it has ended and was asked for its error."""
        with self._lock:
            self._works.append((label, work))

    def failed(self) -> tuple[Label, RuntimeError] | None:
        """Forget those that have ended, up to the first that has not; the first that failed, once. Never blocks."""
        if not self._works:
            return None
        from pipegrid.transport.backends import NcclTicket  # torch, which a process without collectives need not have

        with self._lock:
            while self._works:
                label, work = self._works[0]
                if not work.is_completed():
                    break
                self._works.popleft()
                try:
                    NcclTicket((work,)).done()
                except RuntimeError as error:
                    return label, error
        return None

    def take_unfinished(self) -> list[Label]:
        """Forget all; the labels of those that have not ended."""
        with self._lock:
            works, self._works = self._works, deque()
        return [label for label, work in works if not work.is_completed()]


def abort_together(
    groups: Iterable[ProcessGroup], *, beside: Callable[[], None] = lambda: None, seconds: float = 2.0
) -> None:
    """Abort all ``groups``, each in a thread, while ``beside`` runs; wait for at most ``seconds``."""
    threads = [
        threading.Thread(target=abort_group, args=(group,), name="pipegrid-abort", daemon=True) for group in groups
    ]
    for thread in threads:
        thread.start()
    beside()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
