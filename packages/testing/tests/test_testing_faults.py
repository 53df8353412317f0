"""Planned faults: they happen where and when the plan says, and to the planned rank only."""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipegrid.testing import Fault, FaultError, InjectedFault

from . import waiting

pytestmark = pytest.mark.thorough

NEVER = 100.0
# No machine is so busy that a rank needs longer to write a line; the assertions after it say what came instead.
until = partial(waiting.until, seconds=30.0)


def walk(ranks, points):
    """Reach ``points`` one after another; each that was passed is noted where every rank can read it."""
    for point in points:
        ranks.reach(point)
        note(ranks, point)


def note(ranks, text):
    with (ranks.shared_path / f"passed-{ranks.rank}").open("a") as file:
        file.write(f"{text}\n")


def passed(ranks, rank):
    file = ranks.shared_path / f"passed-{rank}"
    return file.read_text().splitlines() if file.exists() else []


def dead_peer(peer):
    with pytest.raises(RuntimeError, match=r"[Cc]onnection|peer"):
        dist.recv(torch.ones(1), peer)


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.ranks(2)
@pytest.mark.fault("kill", rank=1, at="F 1")
def test_kill_at_a_point(ranks):
    walk(ranks, ["F 0", "F 1", "F 2"])
    assert ranks.rank == 0
    dead_peer(1)
    assert passed(ranks, 0) == ["F 0", "F 1", "F 2"]
    assert passed(ranks, 1) == ["F 0"]


@pytest.mark.ranks(2)
def test_kill_after_a_time(ranks):
    if ranks.rank == 1:
        note(ranks, time.monotonic())  # one clock for all processes of a machine
        ranks.plan_fault(Fault("kill", rank=1, after=0.3))
        time.sleep(NEVER)
    dead_peer(1)
    (planned,) = passed(ranks, 1)
    assert time.monotonic() - float(planned) >= 0.3


@pytest.mark.ranks(2)
@pytest.mark.fault("kill", rank=1, after=0.1)
def test_kill_after_a_time_by_a_mark(ranks):
    if ranks.rank == 1:
        time.sleep(NEVER)
    dead_peer(1)


@pytest.mark.ranks(2)
@pytest.mark.fault("stop", rank=1, at="F 1")
def test_stop_at_a_point(ranks):
    walk(ranks, ["F 0", "F 1", "F 2"])
    assert ranks.rank == 0
    until(lambda: passed(ranks, 1))
    assert passed(ranks, 1) == ["F 0"]


@pytest.mark.ranks(2)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process states from /proc")
def test_stop_after_a_time(ranks):
    if ranks.rank == 1:
        note(ranks, f"{os.getpid()} {time.monotonic()}")
        ranks.plan_fault(Fault("stop", rank=1, after=0.3))
        while True:
            time.sleep(0.01)
    until(lambda: passed(ranks, 1))
    pid, planned = passed(ranks, 1)[0].split()
    until(lambda: is_stopped(pid))
    assert is_stopped(pid)
    assert time.monotonic() - float(planned) >= 0.3


@pytest.mark.ranks(2)
@pytest.mark.fault("raise", rank=1, at="F 0", nth=2)
def test_raise_at_an_occurrence_of_a_point(ranks):
    before = ["F 0", "B 0", "F 0", "B 0", "B 0"]
    walk(ranks, before)
    if ranks.rank == 0:
        ranks.reach("F 0")  # the third here too, and no fault of this rank
        until(lambda: len(passed(ranks, 1)) > len(before))
        assert passed(ranks, 1) == [*before, "raised"]
    else:
        with pytest.raises(InjectedFault, match=r"raise on rank 1 at 'F 0' #2, raised at 'F 0'"):
            ranks.reach("F 0")
        walk(ranks, ["raised"])  # one fault, raised once


@pytest.mark.ranks(2)
@pytest.mark.fault("raise", rank=0, at="F 0")
def test_an_injected_fault_may_end_its_rank_also_under_another_error(ranks):
    try:
        ranks.reach("F 0")
    except InjectedFault as fault:
        raise LookupError("the step failed") from fault


@pytest.mark.ranks(2)
@pytest.mark.fault("raise", rank=1, after=0.2)
def test_raise_after_a_time_happens_at_the_next_point(ranks):
    if ranks.rank == 1:
        time.sleep(0.2)
        with pytest.raises(InjectedFault):
            ranks.reach("F 1")
        assert ranks.pending_faults() == ()
        note(ranks, "raised")
    else:
        until(lambda: passed(ranks, 1))
        assert passed(ranks, 1) == ["raised"]


@pytest.mark.ranks(2)
def test_a_raise_by_time_counts_from_when_it_was_planned(ranks):
    if ranks.rank == 1:
        pass_time(ranks, 1000.0)
        ranks.plan_fault(Fault("raise", rank=1, after=500.0))
        walk(ranks, ["planned"])
        pass_time(ranks, 500.0)
        with pytest.raises(InjectedFault):
            ranks.reach("F 0")
        note(ranks, "raised")
    else:
        until(lambda: len(passed(ranks, 1)) == 2)
        assert passed(ranks, 1) == ["planned", "raised"]


def pass_time(ranks, seconds):
    """As if the test had begun ``seconds`` earlier: no wait, and no machine slow enough to spoil it."""
    ranks._began -= seconds


@pytest.mark.ranks(2)
@pytest.mark.fault("delay", rank=1, at="F 1", seconds=0.3)
def test_delay_at_a_point(ranks):
    walk(ranks, ["F 0"])
    if ranks.rank == 1:
        assert [str(fault) for fault in ranks.pending_faults()] == ["delay on rank 1 at 'F 1'"]
    began = time.monotonic()
    walk(ranks, ["F 1"])
    assert ranks.pending_faults() == ()
    if ranks.rank == 1:
        assert time.monotonic() - began >= 0.3


@pytest.mark.ranks(2)
@pytest.mark.fault("delay", rank=1, after=0.5, seconds=0.5)
def test_delay_after_a_time_suspends_the_process(ranks):
    if ranks.rank == 0:
        dist.recv(torch.ones(1), 1)
        return
    pauses, last = [], time.monotonic()
    until = last + NEVER
    while last < until and max(pauses, default=0.0) < 0.4:
        time.sleep(0.01)
        now = time.monotonic()
        pauses.append(now - last)
        last = now
    assert max(pauses) >= 0.4
    dist.send(torch.ones(1), 0)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["kill", "stop", "raise"])
def test_a_fault_planned_in_the_body(ranks, kind):
    ranks.plan_fault(Fault(kind, rank=2, at=("SEND", 1)))
    walk(ranks, [("SEND", 0), ("SEND", 1), ("SEND", 2)])
    assert ranks.rank < 2
    x = torch.ones(1)
    group = dist.new_group([0, 1], use_local_synchronization=True)
    dist.all_reduce(x, group=group)
    assert x.item() == 2
    until(lambda: passed(ranks, 2))
    assert passed(ranks, 2) == ["('SEND', 0)"]


@pytest.mark.ranks(3)
@pytest.mark.fault("delay", rank=0, at="F 0", seconds=0.1)
@pytest.mark.fault("kill", rank=1, at="F 0")
@pytest.mark.fault("kill", rank=0, at="B 0")
def test_several_faults(ranks):
    walk(ranks, ["F 0", "B 0"])
    assert ranks.rank == 2
    dead_peer(0)
    dead_peer(1)
    assert passed(ranks, 0) == ["F 0"]
    assert passed(ranks, 1) == []


@pytest.mark.ranks(1)
def test_a_fault_on_a_rank_that_does_not_exist(ranks):
    with pytest.raises(FaultError, match="names rank 1, but the world has 1 ranks"):
        ranks.plan_fault(Fault("kill", rank=1, at="F 0"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kind": "burn", "rank": 0, "at": "x"}, "kind='burn'.*: the kinds are kill, stop, delay, raise"),
        ({"kind": "kill", "rank": -1, "at": "x"}, "rank=-1.*: rank and nth count from 0"),
        ({"kind": "kill", "rank": 0}, "at=None, after=None.*: a fault has either at= or after="),
        ({"kind": "kill", "rank": 0, "at": "x", "after": 1}, "at='x', after=1.*: a fault has either at= or after="),
        ({"kind": "kill", "rank": 0, "after": -1}, "after=-1.*: times are finite and at least 0"),
        ({"kind": "kill", "rank": 0, "after": float("nan")}, "after=nan.*: times are finite and at least 0"),
        ({"kind": "kill", "rank": 0, "after": float("inf")}, "after=inf.*: times are finite and at least 0"),
        ({"kind": "kill", "rank": 0, "after": 1, "nth": 1}, "nth=1.*: nth= counts occurrences of at="),
        ({"kind": "kill", "rank": 0, "at": "x", "nth": -1}, "nth=-1.*: rank and nth count from 0"),
        ({"kind": "delay", "rank": 0, "at": "x"}, "seconds=None.*: seconds= is for delays, which need it"),
        ({"kind": "kill", "rank": 0, "at": "x", "seconds": 1}, "seconds=1.*: seconds= is for delays, which need it"),
        ({"kind": "delay", "rank": 0, "at": "x", "seconds": -1}, "seconds=-1.*: times are finite and at least 0"),
        ({"kind": "delay", "rank": 0, "at": "x", "seconds": float("nan")}, "seconds=nan.*: times are finite"),
    ],
)
def test_a_fault_is_checked_when_it_is_written(arguments, text):
    with pytest.raises(FaultError, match=text):
        Fault(**arguments)
