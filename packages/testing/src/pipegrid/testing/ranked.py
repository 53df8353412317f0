"""The pytest item of a test on ranks, in the pytest process; and the report of its failure."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest

from pipegrid.testing.follow import GRACE, ProcessState, RankedRun, RankRecord, run_test
from pipegrid.testing.hosts import HostsError
from pipegrid.testing.messages import Hello, RunTest, Warned, is_plain
from pipegrid.testing.pool import Pool
from pipegrid.testing.settings import name_in_file, settings_of

_POOL = pytest.StashKey[Pool]()
# Columns of a rank's headline in the report of a failure.
_WIDTH = 100


class RankedFunction(pytest.Function):
    """A test that runs, with its fixtures, in worker processes; here only its marks are evaluated."""

    @classmethod
    def of(cls, item: pytest.Item) -> RankedFunction:
        """``item`` as a test on ranks."""
        if type(item) is not pytest.Function:
            text = f"works on plain test functions and methods, not on {type(item).__name__}"
            raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.ranks {text}")
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
        ranked.own_markers, ranked.stash, ranked.user_properties = item.own_markers, item.stash, item.user_properties
        return ranked

    def setup(self) -> None:
        """Leave the fixtures to the ranks."""

    def runtest(self) -> None:
        """Run the test on its ranks and make their outcomes one."""
        pool = pool_of(self.config)
        test = RunTest(
            path=str(self.path),
            name=name_in_file(self),
            rank=0,
            settings=settings_of(self),
            directory=str(pool.directory()),
            largest_world=max(
                settings_of(item).world_size for item in self.session.items if isinstance(item, RankedFunction)
            ),
        )
        try:
            run = run_test(pool, test)
        except HostsError as error:
            pytest.skip(str(error))
        self._take_over(run)
        if (text := failure_text(run)) is not None:
            pytest.fail(text, pytrace=False)
        _verdict(run)

    def _take_over(self, run: RankedRun) -> None:
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
                if warned not in seen:  # the filters were applied on the rank
                    seen.add(warned)
                    category = getattr(sys.modules.get(warned.category[0]), warned.category[1], UserWarning)
                    message = warnings.WarningMessage(warned.message, category, warned.filename, warned.lineno)
                    told = {"warning_message": message, "nodeid": self.nodeid, "when": "runtest", "location": None}
                    self.config.hook.pytest_warning_recorded.call_historic(kwargs=told)


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
        # Options that are plain data; a plugin's richer ones are its own process's business.
        plain = {name: value for name, value in vars(config.option).items() if is_plain(value)}
        hello = Hello(plain, tuple(config.args), str(config.invocation_params.dir), tuple(sys.path))
        passthrough = config.getoption("capture") == "no"  # with pytest -s the ranks write where pytest writes
        config.stash[_POOL] = pool = Pool(hello, passthrough=passthrough, preload=config.getini("ranks_preload"))
    return pool


def close_pool(config: pytest.Config) -> None:
    """End every process of the session's pool, if it has one."""
    pool = config.stash.get(_POOL, None)
    if pool is not None:
        del config.stash[_POOL]
        pool.close()


def _verdict(run: RankedRun) -> None:
    """Skip or xfail if the ranks did."""
    ended = [
        (record.finished.outcome, record.rank, record.finished.text)
        for record in run.records
        if record.finished is not None and not record.expected_end
    ]
    for outcome, _, reason in ended:
        if outcome == "xfailed":
            pytest.xfail(reason)
    skipped = [(rank, reason) for outcome, rank, reason in ended if outcome == "skipped"]
    if not skipped:
        return
    rank, reason = skipped[0]
    if len(skipped) < len(run.records):
        text = f"rank {rank} skipped the test ('{reason}') and others did not: skip on every rank or on none"
        pytest.fail(text, pytrace=False)
    pytest.skip(reason)


def failure_text(run: RankedRun) -> str | None:
    """Report of a failed test, rank by rank, the first failure first; ``None`` if the test did not fail."""
    gave_up = [one for one in run.records if one.finished and one.finished.outcome in ("skipped", "xfailed")]
    broken = [record for record in run.records if record.failed and record not in gave_up]
    never = [
        f"planned fault '{fault.kind}' after {fault.after} s never happened: the test took {run.seconds:.2f} s"
        for fault in (run.unfired if not gave_up else ())  # only a test that passed can have missed a fault
    ]
    if not broken and not never and run.timed_out is None:
        return None
    lines = [_headline(run, broken, never)]
    order = sorted(run.records, key=lambda record: (record not in broken, record.ended_at or float("inf"), record.rank))
    for record in order:
        lines.extend(_rank_lines(run, record))
    return "\n".join(lines)


def _headline(run: RankedRun, broken: list[RankRecord], never: list[str]) -> str:
    world = f"{run.test.settings.world_size} ranks"
    if run.timed_out is not None:
        waiting = ", ".join(str(record.rank) for record in run.records if record.open)
        return f"{world}: {run.timed_out}; unfinished: rank {waiting}"
    if broken:
        first = min(broken, key=lambda record: record.ended_at or 0.0)
        how = "died" if first.state is ProcessState.DEAD else "failed"
        what = exit_text(first.exit_code) if first.finished is None else first.finished.summary
        return f"{world}: rank {first.rank} {how}{' first' if len(broken) > 1 else ''}: {what}"
    return f"{world}: " + "; ".join(never)


def _rank_lines(run: RankedRun, record: RankRecord) -> Iterator[str]:
    position = "" if record.position is None else f", at position '{record.position}'"
    if record.position is not None and record.open:
        position += f" for {max(0.0, run.ended_at - record.position_at):.1f} s"
    yield f" rank {record.rank}: {_state(run, record)}{position} ".center(_WIDTH, "-")
    if record.finished is not None and record.finished.text:
        yield record.finished.text
    if record.stacks:
        yield record.stacks.rstrip()


def _state(run: RankedRun, record: RankRecord) -> str:
    planned = "" if record.fault is None else f" (planned fault: {record.fault})"
    if record.state is ProcessState.DEAD:
        return f"died, {exit_text(record.exit_code)}{planned}"
    if record.finished is not None:
        return f"{record.finished.outcome}{planned}"
    if record.state is ProcessState.STOPPED:
        return f"stopped{planned}"
    if record.state is ProcessState.STARTING:
        return "still starting"
    if record.suspended:
        return "suspended by a signal"
    waited = "at the deadline" if run.timed_out else f"{GRACE:g} s after the first failure"
    return f"still running {waited}{planned}"


def exit_text(code: int | None) -> str:
    """An exit code as text: a status, or the name of a signal."""
    return f"exit status {code}" if code is None or code >= 0 else f"by signal {signal.Signals(-code).name}"
