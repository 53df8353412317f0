"""Members of a group meet at a store, or all of them learn that some did not come. Threads play ranks."""

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
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from pipegrid.topology import GroupConnectionError, GroupCreationTimeoutError, GroupStoreError, control_store
from pipegrid.topology.bounded_calls import giving_up, reason_to_give_up
from pipegrid.topology.rendezvous import Rendezvous

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=0.3)


def member(store, rank, ranks, *, timeout=LONG, label="lane"):
    return Rendezvous(PrefixStore("world", store), ranks, rank, label, timeout).meet("pair")


def all_meet(store, ranks):
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda rank: member(store, rank, ranks), ranks))


@pytest.fixture(params=["hash", "file"])
def store(request, tmp_path):
    return HashStore() if request.param == "hash" else FileStore(str(tmp_path / "store"), -1)


def test_meetings_are_counted_alike_on_all_members(store):
    assert [all_meet(store, [4, 7, 9]) for _ in range(3)] == [[0] * 3, [1] * 3, [2] * 3]


def test_a_missing_member_is_named_and_the_others_may_try_again(store):
    ranks = [4, 7, 9]
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(member, store, rank, ranks, timeout=SHORT) for rank in (4, 9)]
        texts = sorted(str(future.exception()) for future in waiting)
    assert [text.split(" waited")[0] for text in texts] == ["rank 4", "rank 9"]
    for text in texts:
        assert "waited 0.3 s to create group 'lane' of ranks [4, 7, 9], but ranks [7] did not come" in text
        assert "in creation_order" in text
        assert "in creation_order" in text
    assert all_meet(store, ranks) == [0, 0, 0]
    assert all_meet(store, ranks) == [1, 1, 1]


def test_a_member_with_a_reason_gives_up_at_once_and_all_may_try_again(store):
    ranks, began, known = [4, 7, 9], time.monotonic(), threading.Event()

    def gives_up():
        with giving_up(lambda: "rank 7 is dead" if known.is_set() else ""):
            return member(store, 4, ranks)

    threading.Timer(0.2, known.set).start()
    with pytest.raises(GroupCreationTimeoutError, match=r"rank 4 gave up group 'lane' of ranks .*: rank 7 is dead"):
        gives_up()
    assert time.monotonic() - began < LONG.total_seconds() / 2
    assert all_meet(store, ranks) == [0, 0, 0]
    with giving_up(lambda: "rank 7 is dead"):
        pass
    assert reason_to_give_up() is str


def test_a_member_that_came_and_gave_up_is_named_apart(store):
    ranks = [0, 1, 2]
    with pytest.raises(GroupCreationTimeoutError, match=r"but ranks \[1, 2\] did not come\. "):
        member(store, 0, ranks, timeout=SHORT)
    with pytest.raises(GroupCreationTimeoutError, match=r"ranks \[2\] did not come \(ranks \[0\] came and gave up bef"):
        member(store, 1, ranks, timeout=SHORT)
    with pytest.raises(GroupCreationTimeoutError, match=r"but ranks \[0, 1\] came and gave up before\. Every"):
        member(store, 2, ranks, timeout=SHORT)
    assert issubclass(GroupCreationTimeoutError, RuntimeError)


def test_a_large_group_is_abbreviated(store):
    with pytest.raises(
        GroupCreationTimeoutError, match=r"of ranks \[0, 1, .* 15, \.\.\. 99 in all\], but ranks \[1, 2, "
    ):
        member(store, 0, range(99), timeout=SHORT)


class LateStore(HashStore):
    """A store whose first wait fails at the deadline just as the last member arrives."""

    last_member = None

    def wait(self, keys, timeout):
        if self.last_member is None:
            return super().wait(keys, timeout)
        arrive, self.last_member = self.last_member, None
        with pytest.raises(RuntimeError):
            super().wait(keys, timeout)
        arrive()
        raise RuntimeError("Wait timeout")


def test_a_deadline_that_meets_the_last_arrival_lets_all_members_go_on():
    store, results = LateStore(), []
    store.last_member = lambda: results.append(Rendezvous(store, [0, 1], 1, "a", LONG).meet("k"))
    results.append(Rendezvous(store, [0, 1], 0, "a", SHORT).meet("k"))
    assert results == [0, 0]
    assert store.add("k/0/count", 0) == 2


class LostStore(HashStore):
    """A store whose connection breaks while a member waits."""

    def wait(self, keys, timeout):
        raise RuntimeError("connection reset by peer")


def test_a_lost_store_is_not_a_missing_member():
    with pytest.raises(RuntimeError, match="connection reset by peer") as lost:
        Rendezvous(LostStore(), [0, 1], 0, "a", LONG).meet("k")
    assert lost.value.__notes__ == ["rank 0 was creating group 'a' of ranks [0, 1]"]


HOST = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="the system cannot stop a process")
def test_a_store_whose_host_has_stopped_is_an_error_at_the_deadline():
    """Torch's own calls stay in the store for ever then, `wait` with its timeout as well."""
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    try:
        store = TCPStore("127.0.0.1", int(host.stdout.readline()), None, False)
        host.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(GroupStoreError, match=r"group 'a' of ranks \[0, 1\], and the store .* did not answer"):
            Rendezvous(store, [0, 1], 0, "a", timedelta(seconds=0.5)).meet("k")
        assert time.monotonic() - start < 0.5 + 2
    finally:
        host.kill()
        host.communicate()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="the system cannot stop a process")
@pytest.mark.parametrize(
    ("signal_", "error"),
    [("SIGSTOP", GroupStoreError), ("SIGKILL", (GroupConnectionError, GroupStoreError))],
)
def test_a_connection_to_a_store_whose_host_is_gone_is_an_error_at_the_deadline(signal_, error):
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    try:
        store = TCPStore("127.0.0.1", int(host.stdout.readline()), None, False)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        host.send_signal(getattr(signal, signal_))
        os.waitid(os.P_PID, host.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # else it may still answer
        start = time.monotonic()
        with pytest.raises(error, match=r"^rank 0: cannot connect to the default group's store for 'watch'"):
            control_store("watch", timeout=timedelta(seconds=0.5))
        assert time.monotonic() - start < 0.5 + 3
    finally:
        host.kill()
        host.communicate()
        if dist.is_initialized():
            dist.destroy_process_group()


def test_the_cost_does_not_grow_with_the_group():
    calls = []

    class CountingStore:
        def __init__(self, store):
            self._store = store

        def __getattr__(self, name):
            if callable(found := getattr(self._store, name)):  # else no operation: a look where the store is
                calls.append(name)
            return found

    def operations(size):
        store, calls[:] = HashStore(), []
        others = [
            threading.Thread(target=Rendezvous(store, range(size), rank, "a", LONG).meet, args=("k",))
            for rank in range(1, size)
        ]
        for other in others:
            other.start()
        Rendezvous(CountingStore(store), range(size), 0, "a", LONG).meet("k")
        for other in others:
            other.join()
        return len(calls)

    assert operations(3) <= 5
    assert operations(40) <= 5
