"""A worker: a pytest session of its own that runs, one after another, the tests it is sent, each as one rank.

The session holds the configuration of the pytest process (options, ini file, plugins, conftests), so imports, assertion
rewriting, parametrization, fixtures and warning filters are pytest's own here as there. Nothing is collected up front:
the file of a test is collected when the first of its tests arrives, and kept.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import itertools
import os
import queue
import random
import signal
import sys
import threading
import traceback
import warnings
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import _pytest
import pluggy
import pytest
import torch
from _pytest.config import create_terminal_writer

from pipegrid.testing.faults import InjectedFault
from pipegrid.testing.messages import Channel, Cleaned, Finished, Hello, RunTest, Sign, Stacks, Warned, is_plain
from pipegrid.testing.ranks import Ranks
from pipegrid.testing.settings import faults_of, name_in_file
from pipegrid.testing.world import end_world, loopback_only, make_world, watch_leaks

# Dumps every stack from a signal handler, to a file of its own, for a thread that sits in C++ and keeps the GIL.
STACKS_SIGNAL = signal.SIGUSR1
# Plugins that write to the terminal, select tests or write files of the session: they act in the pytest process
# only. Those that bring fixtures stay (junitxml, cacheprovider), less the parts and options that do such things.
_BLOCKED = ("terminal", "lfplugin", "nfplugin", "pastebin", "stepwise", "debugging")
# Options of those plugins and of the session as a whole that must not act in a worker.
_RESET: dict[str, object] = {
    "maxfail": 0,
    "collectonly": False,
    "capture": "no",
    "usepdb": False,
    "trace": False,
    "setuponly": False,
    "setupshow": False,
    "setupplan": False,
    "numprocesses": None,
    "pyargs": False,  # a worker is given paths
    "xmlpath": None,
    "cacheclear": False,
    "cacheshow": None,
    "log_file": os.devnull,  # not None: the ini file would be asked next
}
# Positional arguments are given as such; as an option too, argparse warns of them.
_POSITIONAL = "file_or_dir"
# Modules that the template imported are past rewriting here; the pytest process rewrote and warned of them itself.
_PRELOADED = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"


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
        formatted.stack = _of_the_test(formatted.stack)
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


def _stacks() -> str:
    """Every Python thread's stack, this one's excepted, the main thread's first."""
    frames = sys._current_frames()  # noqa: SLF001 (documented in the sys module)
    return "\n".join(
        f"thread {thread.name}:\n{''.join(_of_the_test(traceback.extract_stack(frames[thread.ident])).format())}"
        for thread in sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
        if thread.ident in frames and thread is not threading.current_thread()
    )


def _of_the_test(stack: traceback.StackSummary) -> traceback.StackSummary:
    """``stack`` from the first frame that is not pytest's or this package's; all of it where there is none."""
    ours = tuple(str(Path(str(file)).parent) for file in (_pytest.__file__, pluggy.__file__, __file__))
    outside = [i for i, entry in enumerate(stack) if not entry.filename.startswith((*ours, "<string>"))]
    return traceback.StackSummary.from_list(stack[outside[0] :]) if outside else stack


def main(channel: Channel, stacks_file: int) -> None:
    """Serve tests from ``channel`` until its other end closes; STACKS_SIGNAL writes the stacks to ``stacks_file``."""
    faulthandler.register(STACKS_SIGNAL, file=stacks_file, all_threads=True)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, inbox), name="pipegrid-testing", daemon=True).start()
    hello: Hello = inbox.get()
    os.chdir(hello.directory)
    sys.path[:] = hello.path
    loopback_only()
    options = hello.options | _RESET
    options.pop(_POSITIONAL, None)
    given = options.get("pythonwarnings")
    options["pythonwarnings"] = [*(map(str, given) if isinstance(given, list | tuple) else ()), _PRELOADED]
    blocked = [part for name in _BLOCKED for part in ("-p", f"no:{name}")]
    config = pytest.Config.fromdictargs(options, [*blocked, *hello.args])
    # Before 9.1, pytest asks the blocked plugin for it where it explains a failed comparison.
    writer = create_terminal_writer(config, io.StringIO())
    config.get_terminal_writer = lambda: writer  # type: ignore[method-assign]
    config.pluginmanager.register(RankSession(channel, inbox), "pipegrid-testing-worker")
    status = config.hook.pytest_cmdline_main(config=config)
    raise RuntimeError(f"this rank's pytest session ended by itself, with status {status!r}")


def _listen(channel: Channel, inbox: queue.SimpleQueue[Any]) -> None:
    """Answer ``ASK_STACKS`` at once, queue other messages for the main thread, end the process when pytest is gone."""
    while True:
        try:
            message = channel.receive()
        except (EOFError, ConnectionError):
            os.killpg(0, signal.SIGKILL)
            return
        if message is Sign.ASK_STACKS:
            channel.send(Stacks(text=_stacks()))
        else:
            inbox.put(message)


def argument_for(path: str, directory: Path) -> str:
    """The pytest argument that collects the file ``path`` in a session started in ``directory``.

    An argument of pytest's is not a plain path: ``[`` and ``::`` end it. A file with these in its path is collected
    through the nearest directory above it that can be named, from ``directory`` on if that is needed.
    """

    def nameable(part: str) -> bool:
        return "[" not in part and "::" not in part

    if nameable(path):
        return path
    return str(Path(*itertools.takewhile(nameable, Path(os.path.relpath(path, directory)).parts)))


def _conftest_directories(session: pytest.Session) -> list[Path]:
    """The directories below the root directory whose conftests are loaded.

    pytest gives a conftest's fixtures to its directory when that directory is collected, and at the end of a collection
    drops those of directories that were not (9.1). A worker collects file by file, so its first collection takes in the
    directories of all conftests that were loaded at its start.
    """
    paths = [Path(name) for name, _ in session.config.pluginmanager.list_name_plugin()]
    directories = [path.parent for path in paths if path.name == "conftest.py"]
    return [path for path in directories if path.is_relative_to(session.config.rootpath)]


class RankSession:
    """The worker's side as a pytest plugin: it replaces collection and the loop over the items."""

    def __init__(self, channel: Channel, inbox: queue.SimpleQueue[Any]) -> None:
        self._channel, self._inbox = channel, inbox
        self._directory = Path.cwd()
        self._items: dict[str, dict[str, pytest.Item]] = {}
        self._wanted: list[Path] = []
        self._directories: dict[Path, pytest.Collector] = {}
        self._collect_errors: list[str] = []
        self._test = RankTest()
        self.ranks: Ranks | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """Collect nothing yet."""
        session.items, session.testscollected = [], 0
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run tests until the process is killed."""
        modules = 0
        while True:
            test: RunTest = self._inbox.get()
            left: list[str] = []
            with watch_leaks(left):
                self._channel.send(self._run(session, test))
                self._inbox.get()  # `Sign.CLEAN_UP`: every rank has ended the test
                ranks, self.ranks = self.ranks, None
                end_world(ranks)
                os.chdir(self._directory)  # the next test's path may be relative
            if len(sys.modules) != modules:  # as in the template: no later collection walks what is imported
                modules = len(sys.modules)
                gc.freeze()
            self._channel.send(Cleaned(left="; ".join(left)))

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_directory(self, path: Path) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
        """Keep one collector for each directory: its conftest's fixtures belong to the first one."""
        made = yield
        return None if made is None else self._directories.setdefault(path, made)

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool:
        """Ignore everything but the wanted paths and those above them, whatever their names (norecursedirs)."""
        return not any(path.is_relative_to(collection_path) for path in self._wanted)

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
            one = warning_message
            category = one.category.__module__, one.category.__qualname__
            self._test.warnings.append(Warned(str(one.message), category, one.filename, one.lineno))

    def _run(self, session: pytest.Session, test: RunTest) -> Finished:
        self._test = RankTest()
        try:
            item = self._find(session, test)
            self._channel.send(Sign.STARTED)
            self.ranks = make_world(test, self._channel)
            for fault in faults_of(item):
                self.ranks.plan_fault(fault)
            # By the name of the test: the same numbers on all ranks, whatever ran in a worker before.
            seed = zlib.crc32(f"{Path(test.path).name}::{test.name}".encode())
            random.seed(seed)
            torch.manual_seed(seed)
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        except pytest.skip.Exception as skipped:
            return Finished(outcome="skipped", text=str(skipped))
        except BaseException as error:  # noqa: BLE001 (pytest.exit, KeyboardInterrupt, a failing world: this rank's failure)
            self._test.add_error(error)
        if self.ranks is not None:
            self._test.check(self.ranks)
        return self._test.finished()

    def _find(self, session: pytest.Session, test: RunTest) -> pytest.Item:
        if test.path not in self._items:
            self._collect_errors.clear()
            self._wanted = [Path(test.path)]
            if not self._items:
                self._wanted += _conftest_directories(session)
            items = session.perform_collect([argument_for(str(path), self._directory) for path in self._wanted])
            if self._collect_errors:
                raise pytest.UsageError("this rank could not collect the test:\n" + "\n".join(self._collect_errors))
            self._items[test.path] = {name_in_file(item): item for item in items}
        if test.name not in self._items[test.path]:
            text = f"this rank does not find {test.name} in {test.path}, whose ids must be the same in every process:"
            raise pytest.UsageError("\n".join([text, *self._items[test.path]]))
        return self._items[test.path][test.name]
