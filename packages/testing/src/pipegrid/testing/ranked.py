"""The pytest item that stands, in the pytest process, for a test on ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import pytest

from pipegrid.testing.follow import Run, run_test
from pipegrid.testing.items import name_in_file
from pipegrid.testing.messages import Hello, Job, Warned, is_plain
from pipegrid.testing.pool import Pool
from pipegrid.testing.report import failure_text
from pipegrid.testing.settings import settings_of

_POOL = pytest.StashKey[Pool]()


class RankedFunction(pytest.Function):
    """A test that runs, with its fixtures, in worker processes; here only its marks are evaluated."""

    @classmethod
    def of(cls, item: pytest.Item) -> RankedFunction:
        """``item`` as a test on ranks.

        Raises:
            pytest.UsageError: it is no plain test function, or its marks ask for the impossible.
        """
        if type(item) is not pytest.Function:
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.ranks works on plain test functions and methods, "
                f"not on {type(item).__name__}"
            )
        settings_of(item)
        ranked: RankedFunction = cls.from_parent(
            item.parent,
            name=item.name,
            callspec=getattr(item, "callspec", None),
            callobj=_stand_in(item.obj),
            fixtureinfo=item._fixtureinfo,  # noqa: SLF001 (as every plugin that replaces items must)
            keywords=item.keywords,
            originalname=item.originalname,
        )
        ranked.own_markers = item.own_markers
        ranked.stash = item.stash
        ranked.user_properties = item.user_properties
        return ranked

    def setup(self) -> None:
        """Leave the fixtures to the ranks."""

    def runtest(self) -> None:
        """Run the test on its ranks and make their outcomes one."""
        settings = settings_of(self)
        pool = pool_of(self.config)
        run = run_test(
            pool,
            Job(
                path=str(self.path),
                name=name_in_file(self),
                rank=0,
                world_size=settings.world_size,
                backend=settings.backend,
                deadline=settings.deadline,
                strict_sends=settings.strict_sends,
                directory=str(pool.directory()),
            ),
        )
        self._take_over(run)
        text = failure_text(run)
        if text is not None:
            pytest.fail(text, pytrace=False)
        _verdict(run)

    def _take_over(self, run: Run) -> None:
        """Show what the ranks printed and warned of as this test's own."""
        seen: set[Warned] = set()
        for record in run.records:
            if record.output:
                self.add_report_section("call", f"output of rank {record.rank}", record.output)
            if record.finished is None:
                continue
            for title, text in record.finished.sections:
                self.add_report_section("call", f"{title.removeprefix('Captured ')} of rank {record.rank}", text)
            if record.rank == 0:
                self.user_properties.extend(record.finished.properties)
            for warned in record.finished.warnings:
                if warned not in seen:
                    seen.add(warned)
                    _show(self, warned)


def _stand_in(test: Callable[..., object]) -> Callable[[], None]:
    """A function in the place of ``test``, for plugins that would act on a test of its kind: hypothesis, asyncio."""

    def runs_on_ranks() -> None:
        pass

    runs_on_ranks.__wrapped__ = test  # type: ignore[attr-defined]  # pytest finds the source through this
    return runs_on_ranks


def pool_of(config: pytest.Config) -> Pool:
    """The session's pool, made when first asked for."""
    pool = config.stash.get(_POOL, None)
    if pool is None:
        # With pytest -s the ranks write where pytest writes.
        config.stash[_POOL] = pool = Pool(_hello(config), passthrough=config.getoption("capture") == "no")
    return pool


def close_pool(config: pytest.Config) -> None:
    """End every process of the session's pool, if it has one."""
    pool = config.stash.get(_POOL, None)
    if pool is not None:
        del config.stash[_POOL]
        pool.close()


def _hello(config: pytest.Config) -> Hello:
    """The options that are plain data; a plugin's richer ones are its own process's business."""
    plain = {name: value for name, value in vars(config.option).items() if is_plain(value)}
    return Hello(
        options=plain,
        args=tuple(config.args),
        directory=str(config.invocation_params.dir),
        path=tuple(sys.path),
    )


def _verdict(run: Run) -> None:
    """Skip or xfail where the ranks did so."""
    ended = [
        (record.rank, record.finished.outcome, record.finished.text)
        for record in run.records
        if record.finished is not None and not record.expected_end
    ]
    xfailed = [text for _, outcome, text in ended if outcome == "xfailed"]
    if xfailed:
        pytest.xfail(xfailed[0])
    skipped = [(rank, text) for rank, outcome, text in ended if outcome == "skipped"]
    if not skipped:
        return
    rank, reason = skipped[0]
    if len(skipped) < len(run.records):
        pytest.fail(
            f"rank {rank} skipped the test ('{reason}') and others did not: skip on every rank or on none",
            pytrace=False,
        )
    pytest.skip(reason)


def _show(item: pytest.Item, warned: Warned) -> None:
    """Report a rank's warning in this session's summary. The filters were applied on the rank."""
    module, name = warned.category
    category = getattr(sys.modules.get(module), name, UserWarning)
    message = warnings.WarningMessage(warned.message, category, warned.filename, warned.lineno)
    item.config.hook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": message, "nodeid": item.nodeid, "when": "runtest", "location": None}
    )
