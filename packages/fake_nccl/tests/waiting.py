"""Waiting in tests: for a condition, and for threads."""

import threading
import time


def until(condition, seconds=20.0):
    """Wait for ``condition``; whether it came about in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def running(function):
    """A thread that runs ``function``."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def ended(thread, seconds=20.0):
    """Wait for a thread; whether it ended in time."""
    thread.join(seconds)
    return not thread.is_alive()
