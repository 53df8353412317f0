"""The two rules around a free of device memory, which waits for every entry of the device.

- While an abort drains, no thread polls the device unless the abort of every group with an entry under way has begun.
  A poll (`Work.is_completed`, `Event.query`) keeps the interpreter's lock, and on a GPU may wait in the driver behind
  the free: then no thread could begin the abort that the free waits for.
- A group is destroyed when its entries have ended, or after its abort has begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from attrs import define, field

from pipegrid.fake_nccl.entries import QueueEntry

_MOST_VIOLATIONS = 20


@define(eq=False)
class Frees:
    """The aborts of one device.

    Attributes:
        unfinished: launched entries that have not ended, of one group or (None) all.
        violations: the list to which broken rules are added.
    """

    unfinished: Callable[[str | None], Sequence[QueueEntry]]
    violations: list[str]
    _aborted: set[str] = field(factory=set, init=False)  # groups whose abort has begun
    _draining: list[str] = field(factory=list, init=False)  # those whose abort has not returned

    @contextmanager
    def abort(self, group: str) -> Iterator[None]:
        """Count the abort of ``group`` as under way inside the block."""
        self._aborted.add(group)
        self._draining.append(group)
        try:
            yield
        finally:
            self._draining.remove(group)

    def has_begun(self, group: str) -> bool:
        """Whether the abort of ``group`` has begun."""
        return group in self._aborted

    def require_idle(self, group: str) -> None:
        """Note the end of a group that has an entry under way, and was not aborted."""
        left = () if group in self._aborted else self.unfinished(group)
        if left:
            self._note(f"group {group} was destroyed with {left[0]} under way; drain or abort it first")

    def require_pollable(self) -> None:
        """Note a poll during an abort that waits for an entry of a group whose own abort has not started."""
        draining = list(self._draining)
        running = [one for one in self.unfinished(None) if one.started] if draining else ()
        left = [one for one in running if not one.cancelled.is_set() and one.launch.group not in self._aborted]
        if left:
            self._note(
                f"thread {threading.current_thread().name} polled the device while the abort of group {draining[0]} "
                f"waited for {left[0]}, whose abort had not started"
            )

    def _note(self, text: str) -> None:
        if len(self.violations) < _MOST_VIOLATIONS:
            self.violations.append(text)
