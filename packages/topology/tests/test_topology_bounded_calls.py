"""Calls of a store that may never answer."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from pipegrid.topology.bounded_calls import BoundedCalls, SilentStoreError


def test_a_call_returns_what_its_function_returns_or_raises():
    calls = BoundedCalls()
    assert calls.run(divmod, 7, 2, seconds=20) == (3, 1)
    with pytest.raises(KeyError, match="lacking"):
        calls.run({}.__getitem__, "lacking", seconds=20)
    assert calls.run(threading.get_ident, seconds=20) != threading.get_ident()
    calls.close()


def test_a_call_that_was_given_up_does_not_run_later():
    calls, ran, go_on = BoundedCalls(), [], threading.Event()
    with pytest.raises(SilentStoreError, match=r"within 0\.05 s"):
        calls.run(go_on.wait, 20, seconds=0.05)
    with pytest.raises(SilentStoreError):
        calls.run(ran.append, "late", seconds=0.05)
    assert calls.stuck
    go_on.set()
    calls.run(ran.append, "in time", seconds=20)
    assert not calls.stuck
    calls.close()
    assert ran == ["in time"]


@pytest.mark.parametrize("ended", ["closed", "dropped"])
def test_the_thread_ends_with_its_object(ended):
    calls = BoundedCalls("pipegrid-of-this-test")
    calls.run(int, seconds=20)
    (thread,) = (each for each in threading.enumerate() if each.name == "pipegrid-of-this-test")
    if ended == "closed":
        calls.close()
        assert calls.closed
        with pytest.raises(SilentStoreError, match="was closed"):
            calls.run(int, seconds=20)
    else:
        del calls
        gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_what_a_call_holds_is_not_held_after_it():
    class Held:
        def call(self):
            return 1

    calls, held = BoundedCalls(), Held()
    assert calls.run(held.call, seconds=20) == 1
    known = weakref.ref(held)
    del held
    gc.collect()
    limit = time.monotonic() + 20
    while known() is not None and time.monotonic() < limit:
        time.sleep(0.01)
    assert known() is None
    calls.close()


def test_the_end_does_not_wait_again_for_a_call_that_was_waited_for():
    calls, answer = BoundedCalls(patience=60.0), threading.Event()
    with pytest.raises(SilentStoreError):
        calls.run(answer.wait, seconds=0.1)
    calls._silent[0].begun -= 120.0
    began = time.monotonic()
    calls.close()
    assert time.monotonic() - began < 30.0
    answer.set()
