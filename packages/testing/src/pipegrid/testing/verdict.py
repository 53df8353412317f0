"""Outcome of a test on one rank, from the reports of its phases; and the stacks of this process's threads."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path

import _pytest
import pluggy
import pytest

from pipegrid.testing.faults import InjectedFault
from pipegrid.testing.messages import Finished, Warned, is_plain
from pipegrid.testing.ranks import Ranks


class RankTest:
    """The test on this rank so far: failures, warnings, captured output."""

    def __init__(self) -> None:
        self.failures: list[tuple[str, str, bool]] = []  # text, summary, whether it was injected
        self.warnings: list[Warned] = []
        self._sections: dict[str, str] = {}
        self._properties: tuple[tuple[str, object], ...] = ()
        self._skipped: str | None = None
        self._xfailed: str | None = None

    def add(self, report: pytest.TestReport, error: BaseException | None) -> None:
        """Note one phase's report, made from ``error``."""
        self._sections.update(report.sections)
        # Only plain data is readable in every process; reports write a property as text in any case.
        self._properties = tuple(
            (name, value if is_plain(value) else str(value)) for name, value in report.user_properties
        )
        if error is None:
            return  # the pytest process decides on an xpass, once all ranks have ended
        if report.failed:
            self._fail(report.when or "", report.longreprtext, _summary(error), injected=_is_injected(error))
        elif hasattr(report, "wasxfail"):
            self._xfailed = report.wasxfail.removeprefix("reason: ")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._skipped = reason.removeprefix("Skipped: ")

    def add_error(self, error: BaseException) -> None:
        """Note an exception from outside the test's phases."""
        formatted = traceback.TracebackException.from_exception(error)
        formatted.stack = of_the_test(formatted.stack)
        self._fail("world", "".join(formatted.format()), _summary(error))

    def check(self, ranks: Ranks) -> None:
        """Fail a test that passed without a fault planned for it, and one that broke rules of the fake NCCL."""
        pending = ranks.pending_faults()
        if pending and not self.failures and self._skipped is None and self._xfailed is None:
            text = f"FaultError: planned, but the test ended without reaching it: {'; '.join(map(str, pending))}"
            self._fail("faults", text, text)
        if ranks.fake_device is not None and (violations := ranks.fake_device.violations):
            text = "the fake NCCL saw:\n" + "\n".join(f"- {violation}" for violation in violations)
            self._fail("fake_nccl", text, f"fake NCCL: {violations[0]}")

    def _fail(self, when: str, text: str, summary: str, *, injected: bool = False) -> None:
        """Note a failure; ``when`` is the phase (setup, call, teardown), or what is around them."""
        self.failures.append((text if when == "call" else f"in {when}:\n{text}", summary, injected))

    def finished(self) -> Finished:
        """The test's end on this rank."""
        if self.failures:
            outcome, text = "failed", "\n".join(text for text, _, _ in self.failures)
        elif self._xfailed is not None:
            outcome, text = "xfailed", self._xfailed
        else:
            outcome, text = ("passed", "") if self._skipped is None else ("skipped", self._skipped)
        return Finished(
            outcome=outcome,
            text=text,
            summary=self.failures[0][1] if self.failures else "",
            injected=bool(self.failures) and all(injected for _, _, injected in self.failures),
            sections=tuple(self._sections.items()),
            warnings=tuple(self.warnings),
            properties=self._properties,
        )


def _summary(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 (the error's own method; its traceback is to be shown all the same)
        text = f"<its __str__ raised {type(broken).__name__}>"
    lines = text.splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _is_injected(error: BaseException) -> bool:
    """Whether ``error`` is an injected fault or was raised from one."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, InjectedFault):
            return True
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return False


def stacks() -> str:
    """Every Python thread's stack, this one's excepted, the main thread's first."""
    frames = sys._current_frames()  # noqa: SLF001 (documented in the sys module)
    return "\n".join(
        f"thread {thread.name}:\n{''.join(of_the_test(traceback.extract_stack(frames[thread.ident])).format())}"
        for thread in sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
        if thread.ident in frames and thread is not threading.current_thread()
    )


def of_the_test(stack: traceback.StackSummary) -> traceback.StackSummary:
    """``stack`` from the first frame that is not pytest's or this package's; all of it where there is none."""
    ours = tuple(str(Path(str(file)).parent) for file in (_pytest.__file__, pluggy.__file__, __file__))
    outside = [i for i, entry in enumerate(stack) if not entry.filename.startswith((*ours, "<string>"))]
    return traceback.StackSummary.from_list(stack[outside[0] :]) if outside else stack
