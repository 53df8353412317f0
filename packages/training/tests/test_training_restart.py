"""Restarts: the record of attempts and its rule, signals, and the name that ranks of one attempt agree on."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from pipegrid.training.restart import NO_PROGRESS, PREEMPTED, Attempt, AttemptRecord, read_attempts, torchelastic
from pipegrid.training.restart.record import FILE, AttemptLine, reason_to_stop
from pipegrid.training.restart.signals import StopSignals


def attempts(*ends, launch="a"):
    """Attempts of one launch that ended so: at a step by a failure, or after one as ``(step, end)``."""
    pairs = [end if isinstance(end, tuple) else (end, "") for end in ends]
    return [AttemptRecord(launch=launch, restart=n, step=step, end=end) for n, (step, end) in enumerate(pairs)]


def restarted(before, launch="a"):
    return AttemptRecord(launch=launch, restart=len(before))


@pytest.mark.parametrize(
    ("before", "stops"),
    [
        ([], False),
        ([7], False),
        ([7, 7], True),
        ([7, 9], False),
        ([7, 5], False),
        ([7, 5, 7], True),  # the one between failed earlier, and got nowhere
        ([7, 9, 7], False),  # the one between got past the step
        ([7, 9, 7, 7], True),
        ([-1, -1], True),  # before the first step
        ([7, (7, "preempted"), 7], False),
        ([7, 7, (12, "finished")], False),
    ],
)
def test_a_run_ends_at_the_second_failure_at_one_step_without_progress(before, stops):
    before = attempts(*before)
    reason = reason_to_stop(before, restarted(before), limit=2)
    assert (reason is not None) == stops
    if reason is not None:
        assert reason.exit_code == NO_PROGRESS
        where = "before its first step" if before[-1].step < 0 else f"at step {before[-1].step + 1}"
        assert f"the run has failed {where} in 2 attempts without getting further (limit 2)" in str(reason)


def test_the_first_attempt_of_a_launch_always_runs():
    before = attempts(7, 7, 7)
    assert reason_to_stop(before, AttemptRecord(launch="b", restart=0), limit=2) is None
    after = [*before, AttemptRecord(launch="b", restart=0, step=7)]
    assert reason_to_stop(after, AttemptRecord(launch="b", restart=1), limit=2) is not None


def test_a_second_run_in_the_directory_costs_the_first_one_no_attempt(tmp_path):
    """Its launcher starts it again and again, and it fails as often, because the directory is in use."""
    first, second = attempts(7), attempts(-1, -1, -1, launch="b")
    before = [*first, *second]
    assert reason_to_stop(before, restarted(first), limit=2) is None
    assert reason_to_stop([*before, *attempts(7)], restarted(first), limit=2) is not None
    assert reason_to_stop([*attempts((7, "preempted")), *second], restarted(first), limit=2).exit_code == PREEMPTED
    line = AttemptLine.append(tmp_path, first[0])
    AttemptLine.append(tmp_path, second[0]).close()
    line.close()
    line = AttemptLine.at(tmp_path, line.offset)  # by a rank that goes on, where the one that wrote it is dead
    line.update(step=9)
    line.close()
    assert [one.step for one in read_attempts(tmp_path)] == [9, -1]


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
def test_a_run_with_one_cause_ends_after_exactly_limit_failures_at_its_step(before, limit):
    """Whatever happened before, a failure that repeats at a step past all others is tried ``limit`` times."""
    history = attempts(*before)
    for tried in range(limit):
        assert tried == 0 or reason_to_stop(history, restarted(history), limit=limit) is None
        history = [*history, AttemptRecord(launch="a", restart=len(history), step=4)]
    assert reason_to_stop(history, restarted(history), limit=limit) is not None


def test_a_restart_after_a_signal_ends_at_once_but_a_new_launch_goes_on():
    before = attempts((7, "preempted"))
    reason = reason_to_stop(before, restarted(before), limit=2)
    assert reason.exit_code == PREEMPTED
    assert "saved after step 7" in str(reason)
    assert reason_to_stop(before, restarted(before, launch="b"), limit=2) is None


def test_the_record_says_how_far_each_attempt_came(tmp_path):
    assert read_attempts(tmp_path / "none") == []
    for number in range(3):
        line = AttemptLine.append(tmp_path / "run", AttemptRecord(launch="a" * 12, restart=number))
        for step in (0, 9, 10**12):
            line.update(step=step + number)
            assert read_attempts(tmp_path / "run")[-1].step == step + number
    line.update(end="preempted")
    line.close()
    found = read_attempts(tmp_path / "run")
    assert [(one.restart, one.step, one.end) for one in found] == [
        (0, 10**12, ""),
        (1, 10**12 + 1, ""),
        (2, 10**12 + 2, "preempted"),
    ]
    lines = (tmp_path / "run" / FILE).read_text().splitlines()
    assert [json.loads(one)["restart"] for one in lines] == [0, 1, 2]


@pytest.mark.parametrize("cut", [0, 1, 40, 159])
def test_a_line_that_a_power_failure_has_cut_costs_that_line_alone(tmp_path, cut):
    AttemptLine.append(tmp_path, AttemptRecord(launch="a", restart=0, step=4)).close()
    AttemptLine.append(tmp_path, AttemptRecord(launch="a", restart=1, step=4)).close()
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[: 160 + cut])
    assert [one.restart for one in read_attempts(tmp_path)] == ([0, 1] if cut == 159 else [0])
    AttemptLine.append(tmp_path, AttemptRecord(launch="b", restart=0, step=5)).close()
    assert read_attempts(tmp_path)[-1] == AttemptRecord(launch="b", restart=0, step=5)


def wait_for_signals(how, errors, said):
    """Say which signal came first, and end by what comes then; what the process writes to its stderr is in a file."""
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    failed = []
    signals = StopSignals(lambda: failed[0] if failed else None)
    said.send("ready")
    if how == "stuck":
        # As an extension that holds the interpreter back: no Python handler runs in the main thread meanwhile.
        threading.Timer(0.5, lambda: failed.append("rank 3 failed first")).start()
        threading.Event().wait(60)
    while not signals.received:
        time.sleep(0.01)
    said.send(signals.received)
    if how == "again":
        time.sleep(60)
    signals.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.fixture
def signalled(context, tmp_path):
    """A function: the exit code of a process that gets signals, the first that it has noted, its stderr, seconds."""

    def ended(how, *numbers):
        heard, said = context.Pipe(duplex=False)
        process = context.Process(target=wait_for_signals, args=(how, tmp_path / "errors", said), daemon=True)
        process.start()
        assert heard.recv() == "ready"
        noted = None
        for number in numbers:
            os.kill(process.pid, number)
            if how != "stuck" and noted is None:
                noted = heard.recv()
        began = time.monotonic()
        process.join(40)
        process.kill()
        return process.exitcode, noted, (tmp_path / "errors").read_text(), time.monotonic() - began

    return ended


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_the_process_goes_on(signalled, number):
    assert signalled("once", number)[:3] == (0, number, "")


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_after_sigint_ends_the_process_at_once(signalled, second):
    code, noted, errors, seconds = signalled("again", signal.SIGINT, second)
    assert (code, noted, errors) == (130, signal.SIGINT, "")
    assert seconds < 20


def test_a_process_that_is_stuck_ends_once_the_job_has_failed(signalled):
    code, _, errors, seconds = signalled("stuck", signal.SIGTERM)
    assert code == 1
    assert "stuck after SIGTERM in a job that has failed: rank 3 failed first" in errors
    assert seconds < 25


def agreed(store, ranks, timeout=20.0):
    """What each rank of ``ranks`` gets: a name, or the text of the error where the others did not come."""

    def ask(rank):
        try:
            return torchelastic.agree_on_name(store, rank, 4, timeout=timeout)
        except TimeoutError as error:
            return f"TimeoutError: {error}"

    with ThreadPoolExecutor(len(ranks)) as threads:
        return dict(zip(ranks, threads.map(ask, ranks), strict=True))


def test_a_lost_rank_is_the_first_failure_where_its_watcher_hears_of_it_late(tmp_path):
    """The connections of a dead rank end in one moment; the thread that watches it may get a core a second later."""
    attempt = Attempt(tmp_path)

    class LateNeighbours:
        def is_lost(self, *, seconds):
            time.sleep(min(seconds, 1.0))
            if seconds >= 1.0:
                attempt._lose(1, "rank 0 lost rank 1")

    attempt._neighbours = LateNeighbours()
    own = "rank 0: RuntimeError: connection closed by peer"
    assert attempt._first_failure(RuntimeError("connection closed by peer"), own) == "rank 0 lost rank 1"


def test_ranks_of_one_attempt_agree_on_a_name_whatever_dead_attempts_have_left():
    store, names = HashStore(), set()
    for dead in ([], [1, 3], [0], [0, 1, 2], [2]):
        if dead:  # an attempt of which only these ranks came
            given = agreed(store, dead, timeout=0.05).values()
            assert all(text.startswith("TimeoutError") for text in given) or dead == [0, 1, 2]
        found = agreed(store, range(4))
        assert len(set(found.values())) == 1
        assert not found[0].startswith("TimeoutError")
        assert found[0] not in names
        names.add(found[0])


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_to_an_attempt_is_named_on_all_others(absent):
    others = [rank for rank in range(4) if rank != absent]
    named = " for rank 0, which has not come" if absent == 0 else "; ranks [2] have not come"
    expected = {rank: f"TimeoutError: rank {rank} has waited 0.3 s{named}" for rank in others}
    assert agreed(HashStore(), others, timeout=0.3) == expected


@pytest.mark.parametrize(
    "launcher",
    [
        lambda directory: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        lambda directory: FileStore(str(directory / "store"), 1),
        lambda directory: HashStore(),
    ],
    ids=["tcp", "file", "hash"],
)
def test_the_signal_to_dump_of_an_attempt_before_is_gone_when_the_first_rank_has_its_name(tmp_path, launcher):
    """Rank 1 sets it again at once, while the others still come: that one stays."""
    below = launcher(tmp_path)
    store = PrefixStore("attempts", PrefixStore("job", below))
    for late in (0, 2, 3):
        below.set("exception_dump", "before")
        seen = {}

        def start(rank, *, late=late, seen=seen):
            time.sleep(0.1 if rank == late else 0)
            torchelastic.agree_on_name(store, rank, 4, timeout=20.0)
            seen[rank] = below.check(["exception_dump"])
            if rank == 1:
                below.set("exception_dump", "now")

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(start, range(4)))
        assert seen[1] is False
        assert below.get("exception_dump") == b"now"


def test_a_launcher_that_does_not_answer_is_an_error_of_the_attempt(monkeypatch):
    """Its process may be stopped: torch waits for the answer to a connection without a limit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "1", "WORLD_SIZE": "2"}
        for name, value in {**given, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(TimeoutError, match=f"rank 1 has waited 0.3 s for the launcher's store at 127.0.0.1:{port}"):
            torchelastic.attempt_store(timeout=0.3)


def test_under_another_launcher_there_is_no_store_and_nothing_to_stop(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(os, "kill", lambda *arguments: pytest.fail(f"killed {arguments}"))
    assert torchelastic.attempt_store() is None
    assert torchelastic.restart_count() == 0
    torchelastic.stop_restarts()


@pytest.mark.parametrize(
    ("count", "local_rank", "parent", "told"),
    [("0", "0", 4711, True), ("2", "0", 4711, False), ("0", "1", 4711, False), ("0", "0", 1, False)],
)
def test_the_first_rank_of_a_node_ends_torchrun_where_a_restart_is_left(monkeypatch, count, local_rank, parent, told):
    killed = []
    monkeypatch.setattr(os, "getppid", lambda: parent)  # 1 where torchrun has ended
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    for name, value in (("RESTART_COUNT", count), ("MAX_RESTARTS", "2")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    torchelastic.stop_restarts()
    assert killed == ([(parent, signal.SIGTERM)] if told else [])
