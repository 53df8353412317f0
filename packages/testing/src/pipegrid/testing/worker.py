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
import warnings
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.config import create_terminal_writer

from pipegrid.testing.messages import Channel, Cleaned, Finished, Hello, RunTest, Sign, Stacks, Warned
from pipegrid.testing.ranks import Ranks
from pipegrid.testing.settings import faults_of, name_in_file
from pipegrid.testing.verdict import RankTest, stacks
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
            channel.send(Stacks(text=stacks()))
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
