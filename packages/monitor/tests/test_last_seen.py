"""Which hosts and ranks have gone silent, by the clock of the rank that waits for them."""

import json
import time
from contextlib import closing

import pytest
import torch.distributed as dist

from pipegrid.monitor import Control, JobFailedError, Monitor
from pipegrid.monitor import last_seen as module
from pipegrid.monitor.last_seen import LastSeen

DEADLINE = 20.0
RANKS = range(4)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def told(monkeypatch, store):
    """Four ranks on two hosts, the store on the first; what rank ``number`` has heard."""
    clock = Clock()
    monkeypatch.setattr(module.socket, "gethostname", lambda: "any")
    all_of_them = []
    for rank in RANKS:
        monkeypatch.setattr(module.socket, "gethostname", lambda rank=rank: f"host-{'ab'[rank // 2]}")
        monkeypatch.setattr(module, "address_towards", lambda _, rank=rank: f"10.9.0.{1 + rank // 2}")
        monkeypatch.setattr(module, "is_here", lambda _, rank=rank: rank < 2)
        all_of_them.append(LastSeen(Control(store, rank, RANKS), "10.9.0.1", clock))
        all_of_them[-1].introduce(store)
    for each in all_of_them:
        each.answered()
    return clock, all_of_them


def waits(clock, heard, *, alive, seconds, skew=0.0):
    """``heard`` waits while the ranks that are ``alive`` write their places."""
    began = clock.now
    written = {rank: time.time() + skew for rank in RANKS}
    for rank in RANKS:
        heard.control.store.set(f"position/{rank}", json.dumps(["somewhere", written[rank]]))
    while clock.now - began < seconds:
        clock.now += 1.0
        for rank in alive:
            written[rank] += 1.0
            heard.control.store.set(f"position/{rank}", json.dumps(["somewhere", written[rank]]))
        heard.answered()
        heard.listen(clock.now - began, DEADLINE)


@pytest.mark.parametrize("skew", [0.0, 3600.0, -3600.0])
def test_a_host_of_which_no_rank_is_heard_is_named(told, skew):
    clock, heard = told
    waits(clock, heard[0], alive=[0, 1], seconds=DEADLINE, skew=skew)
    assert heard[0].silence() == "nothing heard of host-b, ranks 2-3, for 15 s; its network or the host"


def test_one_rank_of_a_host_is_no_host(told):
    clock, heard = told
    waits(clock, heard[0], alive=[0, 1, 2], seconds=DEADLINE)
    assert heard[0].silence() == "nothing heard of rank 3 on host-b for 15 s; its process was stopped, or has ended"


def test_ranks_that_write_are_not_silent_however_long_one_waits(told):
    clock, heard = told
    waits(clock, heard[0], alive=RANKS, seconds=2 * DEADLINE)
    assert heard[0].silence() == ""


def test_what_was_not_read_for_long_is_no_silence(told):
    clock, heard = told
    waits(clock, heard[0], alive=RANKS, seconds=DEADLINE)
    clock.now += 1000
    heard[0].listen(0.0, DEADLINE)  # it computed
    waits(clock, heard[0], alive=RANKS, seconds=DEADLINE / 2)
    assert heard[0].silence() == ""


def test_where_the_store_is_silent_its_host_is_named_elsewhere(told):
    clock, heard = told
    clock.now += 11
    for each in heard:
        each.unanswered()
    text = "nothing heard of host-a, ranks 0-1, which has the control store, for 11 s; its network or the host, or the "
    assert heard[2].silence() == f"{text}process of the store"
    assert "the control store has not answered for 11 s" in heard[0].silence()


def test_nothing_is_said_of_a_store_that_never_answered():
    heard = LastSeen(Control(dist.HashStore(), 0, (0,)), "")
    heard.unanswered()
    assert heard.silence() == ""


def test_a_step_that_the_store_does_not_take_names_the_host_of_the_store(told, store):
    """The announcement of a step is late at the same moment as the step itself, and may be the first to say so."""
    clock, heard = told
    with closing(Monitor(store, rank=2, ranks=RANKS, deadline=DEADLINE)) as monitor:
        monitor._last_seen = heard[2]
        clock.now += 10
        monitor._steps = 5
        monitor._not_announced(RuntimeError("the store did not answer within 10 s"))
        assert monitor.failure is not None
        assert monitor.failure.startswith("nothing heard of host-a, ranks 0-1, which has the control store, for 10 s;")
        with pytest.raises(JobFailedError, match="before step 5, nothing heard of host-a, ranks 0-1"):
            monitor.end()
