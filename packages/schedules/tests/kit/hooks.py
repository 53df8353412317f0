"""What a step calls by the way."""

from __future__ import annotations

import contextlib

from attrs import define


def nothing(action):
    del action


@define
class Hook:
    """A hook of a runtime that calls functions before and after each action."""

    before: object = nothing
    after: object = nothing


@contextlib.contextmanager
def noting(calls, entered, left):
    """A context that notes in ``calls`` when it is entered and left."""
    calls.append(entered)
    yield
    calls.append(left)
