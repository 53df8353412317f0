"""Staged sends: a stream copies them to host memory, and a thread hands each to gloo once its copy is there."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from pipegrid.transport.backends import Mover, StagedMover, staged

SOON, LATER = timedelta(milliseconds=20), timedelta(seconds=20)


class Copied(threading.Event):
    """The event behind a copy; it comes when the test says so."""

    synchronize = threading.Event.wait


class Gloo(Mover):
    """The mover behind a staged one; a message is done when it is posted."""

    def __init__(self):
        self.posted = []

    def start(self, operations):
        if self.posted == ["lost"]:
            raise RuntimeError("connection closed")
        self.posted += [tensors[0].tolist() for _, tensors, _, _ in operations]
        return [self] * len(operations)

    def hold(self, timeout):
        assert timeout > timedelta(0)

    def done(self):
        return True


@pytest.fixture
def copies(monkeypatch):
    """The events of all copies so far, as on a device with streams."""
    events = []

    def mark(device, *, blocking=False):
        del device
        events.extend([Copied()] if blocking else [])
        return events[-1:] if blocking else ()

    monkeypatch.setattr(staged, "mark", mark)
    return events


def send(mover, value):
    (ticket,) = mover.start([(True, [torch.full((2,), float(value))], 0, 0)])
    return ticket


def test_sends_are_posted_in_order_each_when_its_copy_is_there(copies):
    gloo = Gloo()
    mover = StagedMover(gloo, torch.device("cpu"))
    first, second = send(mover, 1), send(mover, 2)
    copies[1].set()
    with pytest.raises(RuntimeError, match=r"not copied to host memory after 0\.02 s"):
        second.hold(SOON)
    assert (gloo.posted, first.done(), second.done()) == ([], False, False)
    copies[0].set()
    second.hold(LATER)
    first.hold(LATER)
    assert gloo.posted == [[1, 1], [2, 2]]
    assert first.done()
    mover.abort()


def test_an_abort_ends_sends_that_are_not_posted_and_the_thread(copies):
    gloo, before = Gloo(), set(threading.enumerate())  # a thread of another test may be ending
    mover = StagedMover(gloo, torch.device("cpu"))
    tickets = [send(mover, value) for value in range(2)]
    (thread,) = (each for each in set(threading.enumerate()) - before if each.name == "pipegrid-staged")
    mover.abort()
    for ticket in tickets:
        with pytest.raises(RuntimeError, match="the lane has ended"):
            ticket.hold(LATER)
    with pytest.raises(RuntimeError, match="the lane has ended"):
        send(mover, 3)
    copies[0].set()
    thread.join(20)
    assert not thread.is_alive()
    assert gloo.posted == []


def test_a_connection_that_is_gone_when_the_copy_is_there_fails_the_send(copies):
    gloo = Gloo()
    mover = StagedMover(gloo, torch.device("cpu"))
    ticket = send(mover, 1)
    gloo.posted = ["lost"]
    copies[0].set()
    with pytest.raises(RuntimeError, match="connection closed"):
        ticket.hold(LATER)
    mover.abort()
