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

from attrs import define, field, frozen

from pipegrid.fake_nccl.entries import QueueEntry

DUMP_KEY = "exception_dump"
_LOOK_SECONDS = 1.0  # between two looks into the store


@frozen
class LegacyRules:
    """Settings of the watchdog and the heartbeat monitor of ``nccl-legacy``.

    The error of an entry ends the process ``grace`` seconds later, unless its group was aborted by then. The watchdog
    then sets the key ``exception_dump`` in the store; a process that finds the key, of an earlier attempt of the job as
    well, ends ``dump_grace`` seconds later. Each of these fails the test.

    Attributes:
        grace: seconds from an error to the end of the process.
        handling: ``TORCH_NCCL_ASYNC_ERROR_HANDLING``; with 0 an error ends nothing.
        dump_grace: seconds from a look that finds the dump key in the store to the end of the process.

    Examples:
        >>> LegacyRules(handling=0).grace
        60.0
    """

    grace: float = 60.0
    handling: int = 3
    dump_grace: float = 480.0


@frozen
class Nccl2Rules:
    """Settings of the watchdog of nccl2 and nccl-lazy, whose rules `Nccl2Group` has.

    Attributes:
        tick: seconds between its looks.
        grace: seconds from a look that sees an error to the end of the process.
        handling: ``TORCH_NCCL_ASYNC_ERROR_HANDLING``; with 0 it ends nothing.

    Examples:
        >>> FakeDevice(nccl2=Nccl2Rules(tick=0.1)).nccl2.tick
        0.1
    """

    tick: float = 1.0
    grace: float = 15.0
    handling: int = 3


@define(eq=False)
class Watchdog:
    """Looks at the entries of one device.

    Attributes:
        unfinished: launched entries that have not ended.
        is_aborted: whether the abort of a group has begun.
        end: ends an entry with an error.
        dump: writes the flight recorder's file; called before an entry is ended.
        violations: the list to which broken rules are added.
        rules: of ``nccl-legacy``; None where each group has a watchdog of its own, as in nccl2.
        store: of the job, below all prefixes; None where the monitor has none to look into.
    """

    unfinished: Callable[[], Sequence[QueueEntry]]
    is_aborted: Callable[[str], bool]
    end: Callable[[QueueEntry, Exception], None]
    dump: Callable[[], object]
    violations: list[str]
    rules: LegacyRules | None
    store: Any = None
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
