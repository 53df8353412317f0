"""The watchdog of a fake GPU, and the heartbeat monitor of its process; their time is that of the moved clock.

- An entry that is older than its group's timeout is ended: a violation.
- By the rules of ``nccl-legacy`` the error of an entry ends the process after a grace, unless its group was aborted by
  then: a violation.
- For both, ``nccl-legacy`` tells all ranks to dump by a key in the store, below all prefixes. The monitor of a process
  that finds the key ends it minutes later, whoever left the key there: a violation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from pipegrid.fake_nccl.entries import QueueEntry
from pipegrid.fake_nccl.rules import LegacyRules

DUMP_KEY = "exception_dump"
_LOOK_SECONDS = 1.0  # between two looks into the store


@define(eq=False)
class Watchdog:
    """Looks at the entries of one device.

    Attributes:
        unfinished: launched entries that have not ended.
        is_aborted: whether the abort of a group has begun.
        end: ends an entry with an error.
        violations: the list to which broken rules are added.
        rules: of ``nccl-legacy``; None where each group has a watchdog of its own, as in nccl2.
        dump: writes the flight recorder's file; called before an entry is ended.
        store: of the job, below all prefixes; None where the monitor has none to look into.
    """

    unfinished: Callable[[], Sequence[QueueEntry]]
    is_aborted: Callable[[str], bool]
    end: Callable[[QueueEntry, Exception], None]
    violations: list[str]
    rules: LegacyRules | None
    store: Any = None
    dump: Callable[[], object] = lambda: None
    _failed: dict[str, tuple[float, str]] = field(factory=dict, init=False)  # by group: when, and what
    _looked: float = field(default=0.0, init=False)
    _found: float | None = field(default=None, init=False)

    def look(self) -> None:
        """Run one round of checks."""
        now = time.monotonic()
        for entry in self.unfinished():
            if now - entry.launched_at > entry.timeout and not entry.cancelled.is_set():
                text = f"{entry} was ended by the watchdog: not done after the group's timeout of {entry.timeout:g} s"
                self.violations.append(text)
                self.dump()
                self._tell()
                self.end(entry, RuntimeError(text))
        if self.rules is not None:
            self._end_process(now, self.rules)
            self._monitor(now, self.rules)

    def note(self, entry: QueueEntry) -> None:
        """Note an entry that has failed by itself."""
        if self.rules is not None and self.rules.handling:
            self._failed.setdefault(entry.launch.group, (time.monotonic(), str(entry)))
            self._tell()

    def _end_process(self, now: float, rules: LegacyRules) -> None:
        for group, (since, what) in list(self._failed.items()):
            if self.is_aborted(group):
                del self._failed[group]
            elif now - since > rules.grace:
                del self._failed[group]
                self.violations.append(
                    f"the process was ended by torch's watchdog: {what} failed, and its group was not aborted within "
                    f"{rules.grace:g} s"
                )

    def _tell(self) -> None:
        if self.store is not None and self.rules is not None:
            with contextlib.suppress(RuntimeError):  # its host has gone
                self.store.set(DUMP_KEY, "1")

    def _monitor(self, now: float, rules: LegacyRules) -> None:
        if self.store is None:
            return
        if self._found is None and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            with contextlib.suppress(RuntimeError):
                self._found = now if self.store.check([DUMP_KEY]) else None
        elif self._found is not None and now - self._found > rules.dump_grace:
            self.store = None  # ends once
            self.violations.append(
                f"the process was ended by torch's heartbeat monitor: {DUMP_KEY!r} was in the store for more than "
                f"{rules.dump_grace:g} s since it was found"
            )
