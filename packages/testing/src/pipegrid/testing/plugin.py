"""The pytest plugin: options, marks, the ``ranks`` fixture, and the hooks that send marked tests to the pool."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, cast

import pytest

from pipegrid.testing.ranked import RankedFunction, close_pool, pool_of
from pipegrid.testing.settings import BACKENDS, FAKE_NCCL, WORLD_SIZE

if TYPE_CHECKING:
    from pipegrid.testing.ranks import Ranks

_WORKER = "pipegrid-testing-worker"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options and their ini defaults."""
    group = parser.getgroup("ranks", "tests on several ranks (pipegrid-testing)")
    group.addoption("--backend", choices=BACKENDS, help="process group backend of tests on ranks (default gloo)")
    group.addoption("--deadline", type=float, metavar="SECONDS", help="seconds that a test on ranks has (default 60)")
    strict = "tests that read `ranks.strict_sends` wait for each batch of sends before the next action"
    group.addoption("--strict-sends", action="store_true", default=None, help=strict)
    group.addoption(
        "--fake-nccl",
        choices=FAKE_NCCL,
        help="with --backend fake_nccl: a stream for each group (default), one serial stream for the rank, or a stream "
        "for each communicator by the rules of torch's nccl-legacy (without a bound device), nccl2 or nccl-lazy",
    )
    parser.addini("ranks_backend", "default of --backend", default="gloo")
    parser.addini("ranks_deadline", "default of --deadline, in seconds", default="60")
    parser.addini("ranks_fake_nccl", "default of --fake-nccl", default="streams")
    parser.addini(
        "ranks_preload",
        "modules that are slow to import: imported once, before ranks are forked, where the pytest process has them",
        type="args",
        default=["hypothesis.strategies", "numpy"],
    )
    parser.addini("ranks_strict_sends", "default of --strict-sends", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks."""
    config.addinivalue_line(
        "markers",
        "ranks(*n, backend=None, deadline=None, strict_sends=None, fake_nccl=None, hosts=1, wire=None): run the test, "
        "its fixtures included, on n processes, half of them on each of two hosts with hosts=2; once for each n where "
        "there are several",
    )
    config.addinivalue_line(
        "markers",
        "fault(kind, *, rank, at=None, after=None, seconds=None, nth=0): plan a fault on one rank of the test",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test marked ``ranks(2, 4)`` one variant for each world size."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None and len(mark.args) > 1:
        metafunc.fixturenames.append(WORLD_SIZE)
        metafunc.parametrize(WORLD_SIZE, mark.args, ids=[f"{n} ranks" for n in mark.args])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Replace each test marked ``ranks`` by one that runs on the pool."""
    if config.pluginmanager.has_plugin(_WORKER):
        return
    for index, item in enumerate(items):
        if item.get_closest_marker("ranks") is not None:
            items[index] = RankedFunction.of(item)
        elif item.get_closest_marker("fault") is not None:
            raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.fault needs @pytest.mark.ranks(n) on the same test")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the template early if any test runs on ranks."""
    if not session.config.option.collectonly and any(isinstance(item, RankedFunction) for item in session.items):
        pool_of(session.config).start()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End every process of the pool."""
    close_pool(config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report the source line of a skipped test, not the line of this plugin that skipped it."""
    report = yield
    if isinstance(item, RankedFunction) and report.skipped and isinstance(report.longrepr, tuple):
        path, line, _ = item.reportinfo()
        report.longrepr = (str(path), (line or 0) + 1, report.longrepr[2])
    return report


# As wide as a scope gets, so that fixtures of every scope can use it; on a rank each ends with the test.
@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """The place of this rank among the ranks that run the test: see `pipegrid.testing.Ranks`."""
    session = request.config.pluginmanager.get_plugin(_WORKER)
    if session is None:
        raise pytest.UsageError("the `ranks` fixture exists on ranks only: mark the test with @pytest.mark.ranks(n)")
    return cast("Ranks", session.ranks)
