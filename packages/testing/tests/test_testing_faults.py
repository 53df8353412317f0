"""Planned faults: they happen where and when the plan says, and to the planned rank only."""

import time

import pytest
import torch
import torch.distributed as dist

from pipegrid.testing import Fault, FaultError, InjectedFault

NEVER = 100.0


def step(ranks, actions):
    for action in actions:
        ranks.reach(action)


def dead_peer(peer):
    with pytest.raises(RuntimeError, match=r"[Cc]onnection|peer"):
        dist.recv(torch.ones(1), peer)


@pytest.mark.ranks(2)
@pytest.mark.fault("kill", rank=1, at="F 1")
def test_kill_at_a_point(ranks):
    step(ranks, ["F 0", "F 1"])
    assert ranks.rank == 0
    dead_peer(1)


@pytest.mark.ranks(2)
@pytest.mark.fault("kill", rank=1, after=0.1)
def test_kill_after_a_time(ranks):
    if ranks.rank == 1:
        time.sleep(NEVER)
    dead_peer(1)


@pytest.mark.ranks(2)
@pytest.mark.fault("stop", rank=1, at="F 0")
def test_stop_at_a_point(ranks):
    step(ranks, ["F 0"])
    assert ranks.rank == 0


@pytest.mark.ranks(2)
@pytest.mark.fault("stop", rank=1, after=0.05)
def test_stop_after_a_time(ranks):
    if ranks.rank == 1:
        while True:
            time.sleep(0.01)
    time.sleep(0.3)


@pytest.mark.ranks(2)
@pytest.mark.fault("raise", rank=1, at="F 0", nth=2)
def test_raise_at_an_occurrence_of_a_point(ranks):
    step(ranks, ["F 0", "F 0", "B 0"])
    if ranks.rank == 1:
        with pytest.raises(InjectedFault, match=r"raise on rank 1 at 'F 0' #2, raised at 'F 0'"):
            ranks.reach("F 0")


@pytest.mark.ranks(2)
@pytest.mark.fault("raise", rank=0, at="F 0")
def test_an_injected_fault_may_end_its_rank_also_under_another_error(ranks):
    try:
        ranks.reach("F 0")
    except InjectedFault as fault:
        raise LookupError("the step failed") from fault


@pytest.mark.ranks(1)
@pytest.mark.fault("raise", rank=0, after=0.2)
def test_raise_after_a_time_happens_at_the_next_point(ranks):
    ranks.reach("F 0")
    time.sleep(0.2)
    with pytest.raises(InjectedFault):
        ranks.reach("F 1")
    assert ranks.pending_faults() == ()


@pytest.mark.ranks(2)
@pytest.mark.fault("delay", rank=1, at="F 0", seconds=0.3)
def test_delay_at_a_point(ranks):
    began = time.monotonic()
    step(ranks, ["F 0"])
    if ranks.rank == 1:
        assert time.monotonic() - began >= 0.3


@pytest.mark.ranks(2)
@pytest.mark.fault("delay", rank=1, after=0.1, seconds=0.5)
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
    ranks.plan_fault(Fault(kind, rank=2, at=("SEND", 0)))
    ranks.reach(("SEND", 0))
    assert ranks.rank < 2
    x = torch.ones(1)
    group = dist.new_group([0, 1], use_local_synchronization=True)
    dist.all_reduce(x, group=group)
    assert x.item() == 2


@pytest.mark.ranks(2)
@pytest.mark.fault("delay", rank=0, at="F 0", seconds=0.1)
@pytest.mark.fault("kill", rank=1, at="F 0")
@pytest.mark.fault("kill", rank=0, at="B 0")
def test_several_faults(ranks):
    step(ranks, ["F 0", "B 0"])
    raise AssertionError("both ranks are dead")


@pytest.mark.ranks(1)
def test_a_fault_on_a_rank_that_does_not_exist(ranks):
    with pytest.raises(FaultError, match="names rank 1, but the world has 1 ranks"):
        ranks.plan_fault(Fault("kill", rank=1, at="F 0"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kind": "burn", "rank": 0, "at": "x"}, "kind 'burn' is unknown; the kinds are kill, stop, delay, raise"),
        ({"kind": "kill", "rank": -1, "at": "x"}, "counted from 0, got rank=-1"),
        ({"kind": "kill", "rank": 0}, "needs either at= .* or after="),
        ({"kind": "kill", "rank": 0, "at": "x", "after": 1}, "needs either at= .* or after="),
        ({"kind": "kill", "rank": 0, "after": -1}, "cannot be negative, got -1"),
        ({"kind": "kill", "rank": 0, "after": 1, "nth": 1}, "got nth=1, at=None"),
        ({"kind": "kill", "rank": 0, "at": "x", "nth": -1}, "got nth=-1"),
        ({"kind": "delay", "rank": 0, "at": "x"}, "got kind 'delay' and seconds=None"),
        ({"kind": "kill", "rank": 0, "at": "x", "seconds": 1}, "got kind 'kill' and seconds=1"),
        ({"kind": "delay", "rank": 0, "at": "x", "seconds": -1}, "got seconds=-1"),
    ],
)
def test_a_fault_is_checked_when_it_is_written(arguments, text):
    with pytest.raises(FaultError, match=text):
        Fault(**arguments)
