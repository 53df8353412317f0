"""What a ``ranks`` mark asks for, and where its silence is filled from: the command line, then the ini file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from attrs import frozen

from pipegrid.testing.faults import FaultError, check_rank
from pipegrid.testing.items import faults_of

BACKENDS = ("gloo", "nccl")
# The argument that `@pytest.mark.ranks(2, 4)` adds to the test's parameters.
WORLD_SIZE = "_pipegrid_testing_world_size"

_T = TypeVar("_T")


@frozen
class Settings:
    """What one test's ranks are told."""

    world_size: int
    backend: str
    deadline: float
    strict_sends: bool


def settings_of(item: pytest.Item) -> Settings:
    """The settings of a marked test.

    Raises:
        pytest.UsageError: one of its marks asks for the impossible.
    """
    mark = item.get_closest_marker("ranks")
    if mark is None:
        raise pytest.UsageError(f"{item.nodeid} has no `ranks` mark")
    try:
        settings = _settings(item, *mark.args, **mark.kwargs)
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.ranks: {error}") from error
    try:
        for fault in faults_of(item):
            check_rank(fault, settings.world_size)
    except (FaultError, TypeError) as error:
        raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.fault: {error}") from error
    return settings


def _settings(
    item: pytest.Item,
    *sizes: object,
    backend: str | None = None,
    deadline: float | None = None,
    strict_sends: bool | None = None,
) -> Settings:
    callspec = getattr(item, "callspec", None)
    n = callspec.params[WORLD_SIZE] if len(sizes) > 1 and callspec is not None else next(iter(sizes), None)
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"a number of ranks is an integer of at least 1, got {n!r}")
    settings = Settings(
        world_size=n,
        backend=_choose(item, backend, "backend", str),
        deadline=_choose(item, deadline, "deadline", float),
        strict_sends=_choose(item, strict_sends, "strict_sends", bool),
    )
    if settings.backend not in BACKENDS:
        raise ValueError(f"backend {settings.backend!r} is unknown; use {' or '.join(BACKENDS)}")
    if not settings.deadline > 0:
        raise ValueError(f"a deadline is a number of seconds above 0, got {settings.deadline:g}")
    return settings


def _choose(item: pytest.Item, marked: Any, option: str, convert: Callable[[Any], _T]) -> _T:
    given = item.config.getoption(option)
    return convert(
        marked if marked is not None else given if given is not None else item.config.getini(f"ranks_{option}")
    )
