"""A worker: a pytest session of its own that runs, one after another, the tests it is sent, each as one rank.

The session holds the configuration of the pytest process (options, ini file, plugins, conftests), so imports, assertion
rewriting, parametrization, fixtures and warning filters are pytest's own here as there. Nothing is collected up front:
the file of a test is collected when the first of its tests arrives, and kept.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import _pytest
import pluggy
import pytest
from attrs import frozen

from pipegrid.testing import errors
from pipegrid.testing.faults import Fault, InjectedFault
from pipegrid.testing.items import faults_of, name_in_file
from pipegrid.testing.ranks import Ranks
from pipegrid.testing.wire import (
    AskStacks,
    Channel,
    Cleaned,
    CleanUp,
    Finished,
    Hello,
    Job,
    Stacks,
    Started,
    Warned,
    is_plain,
)
from pipegrid.testing.world import end_world, loopback_only, make_world, watch_leaks

# Dumps every stack to standard error from a signal handler, for a thread that sits in C++ and keeps the GIL.
STACKS_SIGNAL = signal.SIGUSR1
# Plugins that talk to the person at the terminal or write files of the session: the pytest process's business.
_BLOCKED = ("terminal", "cacheprovider", "junitxml", "pastebin", "stepwise", "debugging")
# Options of those plugins and of the session as a whole that must not act in a worker.
_RESET: dict[str, object] = {
    "maxfail": 0,
    "collectonly": False,
    "capture": "no",
    "usepdb": False,
    "trace": False,
    "setupplan": False,
    "numprocesses": None,
}
# Positional arguments are given as such; as an option too, argparse warns of them.
_POSITIONAL = "file_or_dir"
# What the template imported cannot be rewritten any more; the pytest process, which rewrote it, has the say on that.
_PRELOADED = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"


def main(channel: Channel) -> None:
    """Serve jobs from ``channel``; the process is killed when its other end closes."""
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, inbox), name="pipegrid-testing", daemon=True).start()
    hello = inbox.get()
    if not isinstance(hello, Hello):
        raise TypeError(f"a worker expects Hello first, got {hello!r}")
    os.chdir(hello.directory)
    sys.path[:] = hello.path
    loopback_only()
    options = {
        **{name: value for name, value in hello.options.items() if name != _POSITIONAL},
        **_RESET,
        "pythonwarnings": [*_strings(hello.options.get("pythonwarnings")), _PRELOADED],
    }
    blocked = [part for name in _BLOCKED for part in ("-p", f"no:{name}")]
    config = pytest.Config.fromdictargs(options, [*blocked, *hello.args])
    config.pluginmanager.register(RankSession(channel, inbox), "pipegrid-testing-worker")
    status = config.hook.pytest_cmdline_main(config=config)
    raise RuntimeError(f"this rank's pytest session ended by itself, with status {status!r}")


def _strings(option: object) -> list[str]:
    return [str(each) for each in option] if isinstance(option, list | tuple) else []


def _listen(channel: Channel, inbox: queue.SimpleQueue[object]) -> None:
    """Answer what cannot wait for the main thread, hand it the rest, and end the process when pytest is gone."""
    while True:
        try:
            message = channel.receive()
        except (EOFError, ConnectionError):
            os.killpg(0, signal.SIGKILL)
            return
        if isinstance(message, AskStacks):
            channel.send(Stacks(text=stacks()))
        else:
            inbox.put(message)


def stacks() -> str:
    """Every Python thread's stack, this one's excepted, the main thread's first."""
    frames = sys._current_frames()  # noqa: SLF001 (documented in the sys module)
    main_thread = threading.main_thread()
    threads = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    threads.sort(key=lambda thread: thread is not main_thread)
    parts = [
        f"thread {thread.name}:\n{''.join(_of_the_test(frames[thread.ident]).format())}"
        for thread in threads
        if thread.ident in frames
    ]
    return "\n".join(parts)


def _of_the_test(frame: FrameType) -> traceback.StackSummary:
    """The stack from the first frame that is not pytest's or this package's; all of it where there is none."""
    stack = traceback.extract_stack(frame)
    ours = tuple(str(Path(str(module.__file__)).parent) for module in (_pytest, pluggy, errors))
    outside = [i for i, entry in enumerate(stack) if not entry.filename.startswith((*ours, "<string>"))]
    return traceback.StackSummary.from_list(stack[outside[0] :]) if outside else stack


class RankSession:
    """The worker's side as a pytest plugin: it replaces collection and the loop over the items."""

    def __init__(self, channel: Channel, inbox: queue.SimpleQueue[object]) -> None:
        self._channel = channel
        self._inbox = inbox
        self._items: dict[str, dict[str, pytest.Item]] = {}
        self._collect_errors: list[str] = []
        self._test = _Test()
        self.ranks: Ranks | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """Collect nothing yet."""
        session.items = []
        session.testscollected = 0
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run jobs until the process is killed."""
        while True:
            job = self._inbox.get()
            if not isinstance(job, Job):
                raise TypeError(f"a worker expects a Job, got {job!r}")
            left: list[str] = []
            with watch_leaks(left):
                self._channel.send(self._run(session, job))
                message = self._inbox.get()
                if not isinstance(message, CleanUp):
                    raise TypeError(f"a worker expects CleanUp after a test, got {message!r}")
                self.ranks = None
                end_world()
            self._channel.send(Cleaned(left="; ".join(left)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why a file could not be collected."""
        if report.failed:
            self._collect_errors.append(report.longreprtext)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note the report of a phase together with the exception that it was made from."""
        report = yield
        self._test.add(report, None if call.excinfo is None else call.excinfo.value)
        return report

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Note a warning, for the pytest process to show."""
        if when == "runtest":
            category = warning_message.category
            self._test.warnings.append(
                Warned(
                    message=str(warning_message.message),
                    category=(category.__module__, category.__qualname__),
                    filename=warning_message.filename,
                    lineno=warning_message.lineno,
                )
            )

    def _run(self, session: pytest.Session, job: Job) -> Finished:
        self._test = _Test()
        try:
            item = self._find(session, job)
            self._channel.send(Started())
            self.ranks = make_world(job, self._channel)
            for fault in faults_of(item):
                self.ranks.plan_fault(fault)
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        except pytest.skip.Exception as skipped:
            return Finished(outcome="skipped", text=str(skipped))
        except BaseException as error:  # noqa: BLE001 (pytest.exit, KeyboardInterrupt, a failing world: this rank's failure)
            self._test.add_error(error)
        if self.ranks is not None:
            self._test.check_faults(self.ranks.pending_faults())
        return self._test.finished()

    def _find(self, session: pytest.Session, job: Job) -> pytest.Item:
        if job.path not in self._items:
            self._collect_errors.clear()
            items = session.perform_collect([job.path])
            if self._collect_errors:
                raise pytest.UsageError("this rank could not collect the test:\n" + "\n".join(self._collect_errors))
            self._items[job.path] = {name_in_file(item): item for item in items}
        try:
            return self._items[job.path][job.name]
        except KeyError:
            known = "\n".join(self._items[job.path])
            raise pytest.UsageError(
                f"this rank does not find {job.name} in {job.path}; a test's parameters and their ids "
                f"must be the same in every process. It collected:\n{known}"
            ) from None


@frozen
class _Failure:
    """One failure of the test on this rank. ``when`` is the phase: setup, call, teardown, or the world around them."""

    when: str
    text: str
    summary: str
    injected: bool = False


class _Test:
    """What happened to the test on this rank so far."""

    def __init__(self) -> None:
        self.failures: list[_Failure] = []
        self.warnings: list[Warned] = []
        self._sections: dict[str, str] = {}
        self._properties: tuple[tuple[str, object], ...] = ()
        self._skipped: str | None = None
        self._xfailed: str | None = None

    def add(self, report: pytest.TestReport, error: BaseException | None) -> None:
        """Note one phase's report, made from ``error``."""
        self._sections.update(report.sections)
        self._properties = tuple((name, value) for name, value in report.user_properties if is_plain(value))
        if error is None:
            return  # an xpass is the pytest process's to judge, once all ranks are known
        if report.failed:
            self.failures.append(
                _Failure(report.when or "", report.longreprtext, _summary(error), injected=_is_injected(error))
            )
        elif hasattr(report, "wasxfail"):
            self._xfailed = report.wasxfail.removeprefix("reason: ")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._skipped = reason.removeprefix("Skipped: ")

    def add_error(self, error: BaseException) -> None:
        """Note an exception from outside the test's phases."""
        self.failures.append(_Failure("world", "".join(traceback.format_exception(error)), _summary(error)))

    def check_faults(self, pending: tuple[Fault, ...]) -> None:
        """Fail a test that passed without meeting the faults planned for it."""
        if pending and not self.failures:
            names = "; ".join(map(str, pending))
            text = f"FaultError: planned, but the test ended without reaching it: {names}"
            self.failures.append(_Failure("faults", text, text))

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
    lines = str(error).splitlines()
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
