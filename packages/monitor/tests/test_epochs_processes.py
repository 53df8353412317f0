"""Epochs of real processes, which are killed with SIGKILL, over the stores of torch."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from pipegrid.monitor import Epochs, FencedError, JobFailedError, RankLostError
from pipegrid.monitor.epochs import Epoch
from pipegrid.monitor.epochs import epochs as epochs_module
from pipegrid.monitor.epochs.records import admissible

# Forks the ranks of each job that it reads, so that torch is imported once: into a group of processes with the number
# of the first, which it writes.
RANKS = """
import json, os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
from pipegrid.monitor import Epochs

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps killed ranks
for line in sys.stdin:
    first = os.fork()
    if first == 0:
        os.setsid()
        break
    print(first, flush=True)
else:
    sys.exit()

ranks, kind, place, said, deaths = json.loads(line)
said = Path(said)

def connect():
    if kind == "file":
        return dist.FileStore(place, -1)
    return dist.TCPStore("127.0.0.1", int(place), is_master=False)

def say(*words):
    with (said / str(rank)).open("a") as file:
        print(json.dumps(words), file=file, flush=True)

def die(point):
    if [rank, point] in deaths:
        say("dies")
        os.kill(os.getpid(), signal.SIGKILL)

rank = next((rank for rank in range(1, ranks) if os.fork() == 0), 0)  # before there are threads

class Store:  # dies inside of a vote
    def __init__(self):
        self.store = connect()
    def __getattr__(self, name):
        return getattr(self.store, name)
    def set(self, key, value):
        self.store.set(key, value)
        if key.startswith("ballot"):
            die("in the vote")

epochs = Epochs(Store(), rank=rank, ranks=range(ranks), heartbeat=1.0, deadline=30.0)
number = 0
while number < 6:
    die(f"before {number}")
    if epochs.done(f"step {number}"):
        number += 1
        continue
    result = epochs.vote(f"step {number}")
    say("result", result.epoch.members, sorted(result.dead), result.keys)
    number += result.committed
say("finished", number)
epochs.close()
"""

SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=[pytest.param("file", marks=pytest.mark.nightly), "tcp"])
def place(request, tmp_path):
    if request.param == "file":
        yield "file", str(tmp_path / "store")
    else:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield "tcp", str(server.port)
        del server


@pytest.fixture(scope="module")
def forking():
    """The process that forks ranks."""
    command, environment = [sys.executable, "-c", RANKS], os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment) as process:
        yield process


def run(forking, place, ranks, deaths, folder):
    """What each rank said, by rank."""
    print(json.dumps([ranks, *place, str(folder), deaths]), file=forking.stdin, flush=True)
    group = int(forking.stdout.readline())
    ended = ("finished", "dies")
    end, said = time.monotonic() + 90, [[]] * ranks
    try:
        while time.monotonic() < end and not all(lines and lines[-1][0] in ended for lines in said):
            time.sleep(0.05)
            files = [folder / str(rank) for rank in range(ranks)]
            said = [[json.loads(line) for line in f.read_text().splitlines()] if f.exists() else [] for f in files]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return said


@pytest.mark.parametrize(
    "deaths",
    [
        [[0, "before 2"]],
        [[1, "before 2"], [2, "before 2"]],
        [[2, "before 1"], [0, "in the vote"]],
        [[1, "before 1"], [0, "before 3"], [3, "before 5"]],
    ],
    ids=["the lowest", "two neighbours", "during the vote", "three one after the other"],
)
def test_survivors_of_sigkill_agree_and_finish(forking, place, deaths, tmp_path):
    ranks, folder = 4, tmp_path / "said"
    folder.mkdir()
    said = run(forking, place, ranks, deaths, folder)
    dead = {rank for rank, _ in deaths}
    living = sorted(set(range(ranks)) - dead)
    for rank in living:
        assert said[rank][-1] == ["finished", 6], said
    results = [[(members, lost, keys) for _, members, lost, keys in said[rank][:-1]] for rank in living]
    assert all(one == results[0] for one in results), results
    assert results[0][-1][0] == living
    assert set(itertools.chain(*(lost for _, lost, _ in results[0]))) == dead
    assert [rank for rank in range(ranks) if said[rank][-1] == ["dies"]] == sorted(dead)


def pair(store, **settings):
    return [Epochs(store, rank=rank, ranks=range(2), heartbeat=60.0, **settings) for rank in range(2)]


def test_a_loss_that_is_recorded_is_noticed_by_all_and_fences_the_rank(store):
    alarms = []
    zero, one = pair(store, on_alarm=alarms.append)
    zero.check("F0")
    zero.lost(1, "its connection has closed")
    assert not zero.done("step 0")
    end = time.monotonic() + 10
    while len(alarms) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert alarms == ["rank 1 is lost: its connection has closed"] * 2  # of both ranks
    with pytest.raises(RankLostError, match="F3: rank 1 is lost: its connection has closed") as caught:
        zero.check("F3")
    assert caught.value.dead == {1: "its connection has closed"}
    result = zero.vote("step 0")
    assert (result.epoch.members, result.dead, result.committed) == ((0,), caught.value.dead, True)
    assert zero.done("step 1")
    assert one.done("step 0")  # as the result says: both have done it
    with pytest.raises(FencedError, match="rank 1 is outside of the job"):
        one.done("step 1")
    with pytest.raises(JobFailedError, match="rank 1 is outside of the job"):
        one.vote("step 1")
    for epochs in (zero, one):
        epochs.close()
        epochs.close()


class LateNews:
    """A store in which ``news`` is recorded at the last moment before a result, which is without it."""

    def __init__(self, store, news):
        self.store, self.news = store, news

    def __getattr__(self, name):
        return getattr(self.store, name)

    def clone(self):
        return self.store

    def compare_set(self, key, expected, desired):
        if key.startswith("result") and self.news:
            self.news.pop()()
        return self.store.compare_set(key, expected, desired)


def test_a_loss_that_a_verdict_misses_is_one_of_the_next_epoch(store):
    news = []
    late = LateNews(store, news)
    zero, one, two = (Epochs(late, rank=rank, ranks=range(3), heartbeat=60.0) for rank in range(3))
    news.append(lambda: two.lost(1, "its connection has closed"))  # which finds no result yet
    with ThreadPoolExecutor(3) as pool:
        votes = [pool.submit(epochs.vote, "step 0") for epochs in (zero, one, two)]
        found = [votes[rank].result(20) for rank in (0, 2)]
        with contextlib.suppress(FencedError):  # if it reads of its loss before it reads the result
            found.append(votes[1].result(20))
    assert {result.epoch.members for result in found} == {(0, 1, 2)}
    alarm = zero._heartbeat.stored.alarm(1)
    assert alarm is not None
    assert alarm.lost == {1: "its connection has closed"}
    assert not zero.done("step 0")
    for epochs in (zero, one, two):
        epochs.close()


def test_a_wait_that_the_store_ends_goes_on(store, monkeypatch):
    monkeypatch.setattr(epochs_module, "_AGAIN", timedelta(milliseconds=50))
    zero, one = pair(store)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(zero.done, "step 0")
        time.sleep(0.3)
        assert not waiting.done()
        assert one.done("step 0")
        assert waiting.result(20)
    for epochs in (zero, one):
        epochs.close()


def test_giving_up_ends_the_others(store):
    zero, one = pair(store)
    one.give_up("ValueError: no more samples")
    for act in (zero.done, zero.done, zero.vote, one.done):
        with pytest.raises(JobFailedError, match="ValueError: no more samples"):
            act("step 0")
    for epochs in (zero, one):
        epochs.close()


def test_a_new_process_comes_in_and_the_old_one_that_wakes_up_does_nothing(store):
    settings = {"ranks": range(2), "heartbeat": 2.0}
    zero, old = (Epochs(store, rank=rank, **settings) for rank in range(2))
    zero.lost(1, "its connection has closed")  # a mistake
    assert zero.vote("step 0", edge=True).epoch.members == (0,)
    assert zero.done("step 0")
    new = Epochs(store, rank=1, **settings)
    assert (old.incarnation, new.incarnation, new.ready) == (1, 2, False)
    with pytest.raises(JobFailedError, match=r"rank 1 is outside of the job.*join\(\) has not returned"):
        Epochs(store, rank=1, **settings).done("step 1")
    with ThreadPoolExecutor(2) as pool:
        newest = Epochs(store, rank=1, **settings)
        joined = pool.submit(newest.join)
        while not newest._heartbeat.stored.asking():
            time.sleep(0.02)
        with pytest.raises(FencedError, match="another process of rank 1 has come after this one"):
            new.join()
        end = time.monotonic() + 20
        while not zero.asking and time.monotonic() < end:
            time.sleep(0.02)
        assert zero.asking == {1: newest.incarnation}
        mine, theirs = zero.vote("step 1", edge=True), joined.result(20)
        assert mine == theirs
        assert (mine.epoch.members, mine.joined, mine.epoch.joining, mine.keys) == ((0, 1), (1,), (1,), 1)
        old.lost(1, "late news of the old one", Epoch(0, (0, 1)))
        old.give_up("ValueError: late, of a process that does not know that it is outside")
        newest.ready = True
        done = [pool.submit(epochs.done, "step 1") for epochs in (zero, newest)]
        assert [one.result(20) for one in done] == [True, True]
    with pytest.raises(JobFailedError, match="late, of a process"):
        old.vote("step 0")
    assert zero.asking == {}
    for epochs in (zero, old, new, newest):
        epochs.close()


def test_who_can_come_in():
    epoch = Epoch(4, (0, 3), {0: 1, 1: 2, 2: 1, 3: 1})
    assert admissible(epoch, {1: 3, 2: 2}, (0, 3), lambda _: ()) == {1: 3, 2: 2}
    assert admissible(epoch, {1: 2}, (0, 3), lambda _: ()) == {}  # has been in, and may still live
    assert admissible(epoch, {3: 2}, (0, 3), lambda _: ()) == {}
    assert admissible(epoch, {3: 2}, (0,), lambda _: ()) == {3: 2}

    def pairs(dead):
        return [rank ^ 1 for rank in dead]

    assert admissible(Epoch(4, (0, 1), dict.fromkeys(range(4), 1)), {2: 2}, (0, 1), pairs) == {}
    assert admissible(Epoch(4, (0, 1), dict.fromkeys(range(4), 1)), {2: 2, 3: 2}, (0, 1), pairs) == {2: 2, 3: 2}


class SlowAfterBallots:
    """A store whose rank is held up when its ballot is written."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def set(self, key, value):
        self.store.set(key, value)
        if "ballot" in key:
            time.sleep(0.5)


def test_a_process_for_which_one_rank_has_made_room_comes_in(store):
    """Also if no thread has heard of it since, and the others vote first: without it nothing would have changed."""
    settings = {"ranks": range(3), "heartbeat": 60.0}
    zero, one, old = (
        Epochs(own, rank=rank, **settings) for rank, own in enumerate([store, SlowAfterBallots(store), store])
    )
    zero.lost(2, "its connection has closed")
    with ThreadPoolExecutor(3) as pool:
        for vote in [pool.submit(epochs.vote, "step 0", edge=True) for epochs in (zero, one)]:
            assert vote.result(20).epoch.members == (0, 1)
        new = Epochs(store, rank=2, **settings)
        joined, first = pool.submit(new.join), pool.submit(zero.vote, "step 0", edge=True)
        result = one.vote("step 0", edge=True, asking={2: new.incarnation})
        if result.joined != (2,):
            zero.give_up("the new process was not admitted, and would wait on")
        assert (result.joined, dict(result.dead)) == ((2,), {})
        assert joined.result(20) == first.result(20) == result
    for epochs in (zero, one, old, new):
        epochs.close()


def test_a_store_that_ends_fails_the_job():
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        zero, one = pair(store, deadline=2.0)
        server.kill()
        with pytest.raises(JobFailedError, match="the control store does not answer|heartbeat has failed"):
            zero.done("step 0")
        began = time.monotonic()
        zero.close()
        one.close()
        assert time.monotonic() - began < 8


def test_a_store_out_of_reach_is_waited_for_once(store):
    """As behind a cut wire: its calls do not return, and nothing closes its connection."""
    reached, released = threading.Event(), threading.Event()
    reached.set()

    class Behind:
        def __getattr__(self, name):
            def call(*arguments):
                if not reached.is_set():
                    released.wait()
                return getattr(store, name)(*arguments)

            return call

        def clone(self):
            return self

    deadline, alarmed = 3.0, threading.Event()
    epochs = Epochs(Behind(), rank=0, ranks=range(2), deadline=deadline, on_alarm=lambda _: alarmed.set())
    reached.clear()
    assert alarmed.wait(60.0)
    began = time.monotonic()
    with pytest.raises(JobFailedError, match="the control store does not answer: it is out of reach, or its process"):
        epochs.vote("step 1")
    epochs.give_up("the function has failed")
    epochs.close()
    assert time.monotonic() - began < deadline  # each waited for it on its own
    released.set()


def test_ranks_that_do_different_keys_are_named(store):
    from threading import Thread

    from pipegrid.monitor import DisagreementError

    zero, one = pair(store)
    caught = []

    def other():
        try:
            one.done("step 0")
        except (DisagreementError, JobFailedError) as error:
            caught.append(error)

    thread = Thread(target=other)
    thread.start()
    with pytest.raises((DisagreementError, JobFailedError), match="has done '(clip|step) 0' as its key number 0"):
        zero.done("clip 0")
    thread.join(20)
    assert len(caught) == 1
    zero.close()
    one.close()


def test_a_rank_outside_is_an_error(store):
    with pytest.raises(match=r"rank is 2 and ranks are \[0, 1\]"):
        Epochs(store, rank=2, ranks=[0, 1])
