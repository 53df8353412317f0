"""Ranks as threads of one process."""

from __future__ import annotations

import threading

DEADLINE = 20.0


def in_threads(functions):
    """Run the functions side by side; their results in order, or the first failure."""
    results = [None] * len(functions)
    failures = []

    def call(index, function):
        try:
            results[index] = function()
        except Exception as error:  # noqa: BLE001 -- raised again below, in the test's thread
            failures.append(error)

    threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a position did not end"
    return results
