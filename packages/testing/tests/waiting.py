"""Waiting in tests for a condition."""

import time


def until(condition, seconds=20.0):
    """Wait for ``condition``; whether it came about in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()
