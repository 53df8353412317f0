"""Outcome of a test on one rank, from the reports of its phases; and the stacks of this process's threads."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path

import _pytest
import pluggy
import pytest
from attrs import frozen

from pipegrid.testing import messages
from pipegrid.testing.faults import Fault, InjectedFault
from pipegrid.testing.messages import Finished, Warned, is_plain


@frozen
class _PhaseFailure:
    """One failure of the test on this rank. ``when`` is the phase: setup, call, teardown, or the world around them."""

    when: str
    text: str
    summary: str
    injected: bool = False


class RankTest:
    """The test on this rank so far: failures, warnings, captured output."""

    def __init__(self) -> None:
        self.failures: list[_PhaseFailure] = []
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
            self.failures.append(
                _PhaseFailure(report.when or "", report.longreprtext, _summary(error), injected=_is_injected(error))
            )
        elif hasattr(report, "wasxfail"):
            self._xfailed = report.wasxfail.removeprefix("reason: ")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._skipped = reason.removeprefix("Skipped: ")

    def add_error(self, error: BaseException) -> None:
        """Note an exception from outside the test's phases."""
        formatted = traceback.TracebackException.from_exception(error)
        formatted.stack = of_the_test(formatted.stack)
        self.failures.append(_PhaseFailure("world", "".join(formatted.format()), _summary(error)))

    def check_faults(self, pending: tuple[Fault, ...]) -> None:
        """Fail a test that passed although faults planned for it never happened."""
        if pending and not self.failures and self._skipped is None and self._xfailed is None:
            names = "; ".join(map(str, pending))
            text = f"FaultError: planned, but the test ended without reaching it: {names}"
            self.failures.append(_PhaseFailure("faults", text, text))

    def check_rules(self, violations: list[str]) -> None:
        """Fail a test that broke rules of the fake NCCL."""
        if violations:
            text = "the fake NCCL saw:\n" + "\n".join(f"- {violation}" for violation in violations)
            self.failures.append(_PhaseFailure("fake_nccl", text, f"fake NCCL: {violations[0]}"))

    def finished(self) -> Finished:
        """The test's end on this rank."""
        text = summary = ""
        if self.failures:
            outcome = "failed"
            summary = self.failures[0].summary
            text = "\n".join(
                failure.text if failure.when == "call" else f"in {failure.when}:\n{failure.text}"
                for failure in self.failures
            )
        elif self._xfailed is not None:
            outcome, text = "xfailed", self._xfailed
        elif self._skipped is not None:
            outcome, text = "skipped", self._skipped
        else:
            outcome = "passed"
        return Finished(
            outcome=outcome,
            text=text,
            summary=summary,
            injected=bool(self.failures) and all(failure.injected for failure in self.failures),
            sections=tuple(self._sections.items()),
            warnings=tuple(self.warnings),
            properties=self._properties,
        )


def _summary(error: BaseException) -> str:
    """``error`` in one line."""
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 (the error's own method; its traceback is to be shown all the same)
        text = f"<its __str__ raised {type(broken).__name__}>"
    lines = text.splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _is_injected(error: BaseException) -> bool:
    """True if ``error`` is an injected fault or was raised from one."""
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
    main_thread = threading.main_thread()
    threads = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    threads.sort(key=lambda thread: thread is not main_thread)
    parts = [
        f"thread {thread.name}:\n{''.join(of_the_test(traceback.extract_stack(frames[thread.ident])).format())}"
        for thread in threads
        if thread.ident in frames
    ]
    return "\n".join(parts)


def of_the_test(stack: traceback.StackSummary) -> traceback.StackSummary:
    """``stack`` from the first frame that is not pytest's or this package's; all of it where there is none."""
    ours = tuple(str(Path(str(module.__file__)).parent) for module in (_pytest, pluggy, messages))
    outside = [i for i, entry in enumerate(stack) if not entry.filename.startswith((*ours, "<string>"))]
    return traceback.StackSummary.from_list(stack[outside[0] :]) if outside else stack
