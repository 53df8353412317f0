"""Collectives beside the plan that a device has under way: reductions of gradients, norms, loss scales.

On a device with streams a wait orders the current stream and returns: at once, and for a collective that failed, too.
So each is kept until it has ended and was asked for its error. Where a step fails, the groups of those that have not
ended are aborted together with the lanes: a free waits for every kernel of the device, so an abort of the lanes alone
would wait for a reduction that no rank will end. Neither groups nor lanes are of use after that.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from attrs import define, field


@define(eq=False)
class UnderWay:
    """The collectives of this process; from any thread."""

    _works: deque[tuple[str, Any, Any]] = field(factory=deque, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def add(self, what: str, work: Any, group: Any) -> None:
        """Keep ``work`` of a process group (None: the default one) until it has ended; ``what`` it is, for errors."""
        with self._lock:
            self._works.append((what, work, group))

    def check(self) -> None:
        """Raise the error of a collective that has failed, once. Never blocks.

        Raises:
            RuntimeError: one has failed.
        """
        if not self._works:
            return
        from pipegrid.transport.backends import NcclTicket  # torch: the rest of the monitor works without

        with self._lock:
            while self._works:
                what, work, _ = self._works[0]
                try:
                    if not NcclTicket((work,)).done():
                        return
                except RuntimeError as error:
                    self._works.popleft()
                    raise RuntimeError(f"{what} failed: {' '.join(str(error).split())[:200]}") from error
                self._works.popleft()

    def abort(self) -> None:
        """Begin to abort the groups of all that have not ended, each in a thread."""
        with self._lock:
            works, self._works = self._works, deque()
        for group in {id(group): group for _, work, group in works if not work.is_completed()}.values():
            threading.Thread(target=_abort, args=(group,), name="pipegrid-abort", daemon=True).start()


def _abort(group: Any) -> None:
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    if group is not None:  # destroyed meanwhile
        group.abort()


under_way = UnderWay()
