"""One test on its ranks, followed by the pytest process: messages in, a `RankedRun` out."""

from __future__ import annotations

import selectors
import shutil
import signal
import time
from collections.abc import Callable
from enum import Enum

from attrs import define, evolve, field

from pipegrid.testing.faults import Fault
from pipegrid.testing.messages import (
    Cleaned,
    Exited,
    FaultFired,
    FaultPlanned,
    Finished,
    PositionReport,
    RunTest,
    Sign,
    Stacks,
    Stopped,
)
from pipegrid.testing.pool import START_LIMIT, Pool, Worker

# After a first failure the other ranks get this long to end by themselves before their stacks are taken.
GRACE = 2.0
# Limits for a rank's stacks (from its own thread, then from a signal handler), and for destroying its groups.
_STACKS_LIMIT = 4.0
_SIGNAL_LIMIT = 5.0
_CLEAN_LIMIT = 10.0
# A signal handler that wrote nothing for this long is done.
_DUMP_PAUSE = 0.1


class ProcessState(Enum):
    """The state of a rank's process."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    FINISHED = "finished"
    DEAD = "dead"


@define(eq=False)
class RankRecord:
    """State of one rank of the test, as the pytest process knows it."""

    rank: int
    worker: Worker = field(repr=False)
    state: ProcessState = ProcessState.STARTING
    position: str | None = None
    position_at: float = 0.0
    finished: Finished | None = None
    exit_code: int | None = None
    stacks: str | None = None
    output: str = ""
    fault: Fault | None = None
    ended_at: float | None = None
    suspended: bool = False
    cleaned: str | None = None
    gone: bool = False

    @property
    def open(self) -> bool:
        """The rank's test has neither ended nor been stopped."""
        return self.state in (ProcessState.STARTING, ProcessState.RUNNING)

    @property
    def expected_end(self) -> bool:
        """The rank ended, or hangs, as its planned fault requires."""
        match self.fault:
            case Fault(kind="kill"):
                return self.exit_code == -signal.SIGKILL
            case Fault(kind="stop"):
                return self.state is ProcessState.STOPPED
            case Fault(kind="raise"):
                return self.finished is not None and self.finished.injected
        return False

    @property
    def failed(self) -> bool:
        """The rank ended, neither passed nor as its planned fault requires."""
        broken = self.finished is not None and self.finished.outcome != "passed"
        return not self.expected_end and (broken or self.state is ProcessState.DEAD)


@define(eq=False)
class RankedRun:
    """Record of one test on its ranks: the result of `run_test`."""

    test: RunTest
    records: list[RankRecord]
    began: float | None = None
    seconds: float = 0.0
    ended_at: float = 0.0
    timed_out: str | None = None
    unfired: list[Fault] = field(factory=list)


def run_test(pool: Pool, test: RunTest) -> RankedRun:
    """Run ``test`` on a worker for each rank and follow them to the end, a failure or the deadline.

    Workers that end the test cleanly go back into the pool; all those of a test with a failure, a fault or two hosts
    are killed.

    Raises:
        HostsError: the test needs two hosts, which this machine does not allow.
    """
    holders: list[Worker] = []
    hosts = None
    if test.settings.hosts > 1:
        holder, hosts = pool.open_hosts(test.directory, test.settings.wire)
        holders.append(holder)
        test = evolve(test, server=(hosts.address, hosts.port))
    workers = pool.take(test.settings.world_size, hosts)
    run = RankedRun(test=test, records=[RankRecord(rank=rank, worker=worker) for rank, worker in enumerate(workers)])
    reusable: list[Worker] = []
    try:
        with selectors.DefaultSelector() as selector:
            pool.watch(selector)
            follower = _Follower(pool, run, selector)
            for record in run.records:
                record.worker.new_output()  # what the end of an earlier test left
                selector.register(record.worker.channel.socket, selectors.EVENT_READ, record)
                follower.tell(record, evolve(test, rank=record.rank))
            follower.to_the_end()
            reusable = follower.clean_up() if not holders else []
            for record in run.records:
                record.output += record.worker.new_output()
    finally:
        pool.discard([worker for worker in [*workers, *holders] if worker not in reusable])
        pool.give_back(reusable)
        shutil.rmtree(test.directory, ignore_errors=True)  # the rest, if any, goes with the session's directory
    return run


@define(eq=False)
class _Follower:
    pool: Pool
    run: RankedRun
    selector: selectors.BaseSelector
    # Pending faults by time: when, and whether that is the end of a delay.
    timed: list[tuple[float, RankRecord, Fault, bool]] = field(factory=list)

    def to_the_end(self) -> None:
        """Follow the ranks until all have ended, or the deadline or the grace after a failure has passed."""
        run = self.run
        limit = time.monotonic() + START_LIMIT
        why = f"not every rank had started after {START_LIMIT:.0f} s"
        while any(record.open for record in run.records):
            if run.began is None and not any(record.state is ProcessState.STARTING for record in run.records):
                run.began = time.monotonic()
                limit = run.began + run.test.settings.deadline
                why = f"the deadline of {run.test.settings.deadline:g} s passed"
            failed = [record.ended_at for record in run.records if record.failed and record.ended_at is not None]
            if failed and min(failed) + GRACE < limit:
                limit, why = min(failed) + GRACE, ""
            now = time.monotonic()
            if now >= limit:
                run.ended_at, run.timed_out = now, why or None
                self._take_stacks()
                break
            self._fire_timed(now)
            self._step(min([limit, *(at for at, *_ in self.timed)]) - now)
        run.seconds = time.monotonic() - (run.began or time.monotonic())
        run.unfired += [fault for _, _, fault, resumes in self.timed if not resumes]

    def clean_up(self) -> list[Worker]:
        """Have every rank destroy its groups after a test that passed; the workers that left nothing behind."""
        records = self.run.records
        if any(one.fault is not None or one.finished is None or one.finished.outcome != "passed" for one in records):
            return []
        for record in records:
            self.tell(record, Sign.CLEAN_UP)
        alive = ProcessState.FINISHED
        self._wait(_CLEAN_LIMIT, lambda: any(one.cleaned is None and one.state is alive for one in records))
        return [record.worker for record in records if record.cleaned == ""]

    def _take_stacks(self) -> None:
        """Ask every open rank for its stacks; ask by a signal where the interpreter does not answer."""
        asked = [record for record in self.run.records if record.open and not record.suspended]
        for record in asked:
            self.tell(record, Sign.ASK_STACKS)
        self._wait(_STACKS_LIMIT, lambda: any(record.stacks is None and record.open for record in asked))
        mute = [record for record in asked if record.stacks is None and record.open]
        for record in mute:
            self.pool.signal(record.worker, signal.SIGUSR1)
        # No message marks the end of what a signal handler writes, only a pause.
        limit = time.monotonic() + _SIGNAL_LIMIT
        before: list[str] | None = None
        while mute and time.monotonic() < limit:
            dumps = [record.worker.dumped() for record in mute if record.open and record.stacks is None]
            if dumps == before and all(dumps):
                break
            before = dumps
            self._wait(_DUMP_PAUSE, lambda: True)
        for record in mute:
            said = record.stacks or record.worker.dumped()
            record.stacks = said or "no answer, neither from the interpreter nor from a signal handler"

    def _wait(self, seconds: float, missing: Callable[[], bool]) -> None:
        """Take in news for at most ``seconds``, while something is ``missing``."""
        limit = time.monotonic() + seconds
        while missing() and (left := limit - time.monotonic()) > 0:
            self._step(left)

    def _step(self, seconds: float) -> None:
        """Wait for news for at most ``seconds`` and take it in."""
        for key, _ in self.selector.select(max(0.0, seconds)):
            if key.data is not None:
                self._hear(key.data)
        for news in self.pool.news():
            for record in self.run.records:
                if record.worker.pid == news.pid:
                    self._hear(record)  # messages sent before its end first
                    self._end(record, news)

    def _end(self, record: RankRecord, news: Exited | Stopped) -> None:
        if isinstance(news, Exited):
            record.state = ProcessState.DEAD
            record.exit_code = news.code
            record.ended_at = record.ended_at or time.monotonic()
        elif record.fault is None:
            record.suspended = True  # not our doing: a failure, once the deadline passes
        elif record.fault.kind == "stop" and record.state is ProcessState.RUNNING:
            record.state = ProcessState.STOPPED

    def _hear(self, record: RankRecord) -> None:
        messages, gone = record.worker.channel.ready()
        if gone and not record.gone:
            record.gone = True
            self.selector.unregister(record.worker.channel.socket)  # the template reports how it ended
        for message in messages:
            match message:
                case PositionReport():
                    record.position, record.position_at = message.text, time.monotonic()
                case Sign.STARTED:
                    record.state = ProcessState.RUNNING
                case FaultPlanned():
                    at = time.monotonic() + (message.fault.after or 0.0)
                    self.timed.append((at, record, message.fault, False))
                case FaultFired():
                    record.fault = message.fault
                case Finished():
                    record.state, record.finished, record.ended_at = ProcessState.FINISHED, message, time.monotonic()
                case Stacks():
                    record.stacks = message.text
                case Cleaned():
                    record.cleaned = message.left

    def tell(self, record: RankRecord, message: object) -> None:
        try:
            record.worker.channel.send(message)
        except (BrokenPipeError, ConnectionError):
            self._hear(record)

    def _fire_timed(self, now: float) -> None:
        due = [timed for timed in self.timed if timed[0] <= now]
        self.timed = [timed for timed in self.timed if timed[0] > now]
        for _, record, fault, resumes in due:
            if resumes:
                self.pool.signal(record.worker, signal.SIGCONT)
            elif not record.open:
                self.run.unfired.append(fault)
            else:
                record.fault = fault
                self.pool.signal(record.worker, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
                if fault.seconds is not None:
                    self.timed.append((now + fault.seconds, record, fault, True))
