"""A step of a known plan is announced beside it: behind the first message, by the next look, or as the step ends."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from pipegrid.monitor import JobFailedError, Monitor
from pipegrid.monitor.control import STORE_VERBS

PLAN = SimpleNamespace(num_microbatches=4, digest="abc")


class Store:
    """A store whose ``compare_set``, the first call of an announcement, may fail, or wait until it is let go."""

    def __init__(self):
        self.store, self.asked, self.error = dist.HashStore(), [], None
        self.goes_on = threading.Event()
        self.goes_on.set()
        for verb in STORE_VERBS:
            setattr(self, verb, getattr(self, verb, getattr(self.store, verb)))

    def compare_set(self, *given):
        self.asked.append((given[0], threading.get_ident()))
        assert self.goes_on.wait(20)
        if self.error is not None:
            raise self.error
        return self.store.compare_set(*given)


@pytest.fixture
def watched():
    """A monitor behind its first step, its store, and the reasons for which it has ended transfers."""
    store, reasons = Store(), []
    with closing(Monitor(store, rank=0, ranks=[0], deadline=0.6, first_deadline=20.0, interval=30.0)) as monitor:
        monitor.begin(PLAN, where=lambda: "here", abort=reasons.append)
        monitor.end()
        store.asked.clear()
        yield monitor, store, reasons
        store.goes_on.set()


def begun(monitor, reasons):
    monitor.begin(PLAN, where=lambda: "here", abort=reasons.append)


def test_a_step_begins_without_the_store_and_is_announced_once_by_another_thread(watched):
    monitor, store, reasons = watched
    before = threading.active_count()
    begun(monitor, reasons)
    assert not store.asked
    monitor.announce()
    monitor.announce()
    monitor.end()
    assert [key for key, _ in store.asked] == ["step/2/first"]
    assert store.asked[0][1] != threading.get_ident()
    assert threading.active_count() == before
    assert not reasons


def test_a_short_step_is_announced_as_it_ends_which_waits_for_the_store(watched):
    monitor, store, reasons = watched
    begun(monitor, reasons)
    store.goes_on.clear()
    threading.Timer(0.2, store.goes_on.set).start()
    began = time.monotonic()
    monitor.end()
    assert time.monotonic() - began > 0.1
    assert store.asked
    assert store.store.check(["step/2/first"])


def test_a_long_step_is_announced_by_the_thread_that_looks(watched):
    monitor, store, reasons = watched
    begun(monitor, reasons)
    limit = time.monotonic() + 20
    while not store.asked and time.monotonic() < limit:
        time.sleep(0.01)
    monitor.end()
    assert [key for key, _ in store.asked] == ["step/2/first"]
    assert not reasons


def test_a_store_that_refuses_an_announcement_ends_the_step(watched):
    monitor, store, reasons = watched
    monitor.look(time.monotonic())  # which it answers
    store.error = RuntimeError("connection reset")
    begun(monitor, reasons)
    monitor.announce()
    with pytest.raises(JobFailedError, match=r"before step 2, the control store has not answered .*connection reset"):
        monitor.end()
    assert reasons


def test_transfers_of_a_step_that_goes_on_end_where_the_store_is_silent(watched):
    monitor, store, reasons = watched
    store.goes_on.clear()
    begun(monitor, reasons)
    monitor._watched.deadline = None  # of the step itself
    monitor.announce()
    limit = time.monotonic() + 20
    while not reasons and time.monotonic() < limit:
        time.sleep(0.01)
    assert reasons
    assert "the store did not answer within 0.6 s" in reasons[0]
    with pytest.raises(JobFailedError, match="before step 2"):
        monitor.end()


def first_steps(stores):
    """What two ranks raise before their first step, by rank."""
    raised = {}

    def run(rank):
        with closing(Monitor(stores[rank], rank=rank, ranks=[0, 1], deadline=5.0, first_deadline=20.0)) as monitor:
            try:
                monitor.begin(PLAN, where=lambda: "here", abort=lambda cause: None)
            except Exception as error:  # noqa: BLE001 -- compared by the test
                raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return raised


def views_of_one_store():
    """Two stores, each with calls of its own, over the same values."""
    first, second = Store(), Store()
    second.store = first.store
    for verb in STORE_VERBS:
        if verb != "compare_set":
            setattr(second, verb, getattr(first.store, verb))
    return first, second


def test_a_rank_whose_store_fails_before_its_first_step_tells_those_that_wait_for_it():
    """One call fails, and the store answers again."""
    stores, began = views_of_one_store(), time.monotonic()
    stores[1].error = RuntimeError("connection reset")
    answers = stores[1].compare_set

    def fails_once(*given):
        try:
            return answers(*given)
        finally:
            stores[1].error = None

    stores[1].compare_set = fails_once
    raised = first_steps(stores)
    assert time.monotonic() - began < 10
    assert {type(error) for error in raised.values()} == {JobFailedError}
    assert all("connection reset" in str(error) for error in raised.values()), raised


def test_a_store_that_is_slow_at_the_start_is_waited_for():
    """Longer than a look waits: ranks that all connect at once hold it up."""
    stores = views_of_one_store()
    for store in stores:
        store.set = lambda *given, made=store.store.set: (time.sleep(0.7), made(*given))
    assert first_steps(stores) == {}
