"""Settings of a test on ranks: from its ``ranks`` mark, else the command line, else the ini file."""

from __future__ import annotations

from typing import Any

import pytest

from pipegrid.testing.faults import Fault, FaultError, check_rank
from pipegrid.testing.messages import Settings
from pipegrid.testing.wire import Wire

BACKENDS = ("gloo", "nccl", "fake_nccl", "staged")
# How the fake NCCL plays its entries: a stream for each group, or one for the rank; or by the rules of nccl-legacy, of
# nccl2 or of nccl-lazy.
FAKE_NCCL = ("streams", "serial", "legacy", "nccl2", "lazy")
# The argument that `@pytest.mark.ranks(2, 4)` adds to the test's parameters.
WORLD_SIZE = "_pipegrid_testing_world_size"

# Longer than any test, and short enough for every clock and poll that is given it.
_LONGEST = 7 * 24 * 3600.0


def settings_of(item: pytest.Item) -> Settings:
    """The settings of a test marked ``ranks``; `pytest.UsageError` for an invalid argument of a mark."""
    mark = next(item.iter_markers("ranks"))
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


def name_in_file(item: pytest.Item) -> str:
    """The item's name below its file, classes and parameters included.

    A whole node id would not do: for files outside the root directory it depends on what else was collected.
    """
    chain = item.listchain()
    inside = [node for node in chain if not isinstance(node, pytest.Session | pytest.Directory | pytest.File)]
    return "::".join(node.name for node in inside)


def faults_of(item: pytest.Item) -> list[Fault]:
    """The faults that the test's ``fault`` marks plan, the innermost mark's first."""
    return [Fault(*mark.args, **mark.kwargs) for mark in item.iter_markers("fault")]


def _settings(
    item: pytest.Item,
    *sizes: object,
    backend: str | None = None,
    deadline: float | None = None,
    strict_sends: bool | None = None,
    fake_nccl: str | None = None,
    hosts: int = 1,
    wire: Wire | None = None,
) -> Settings:
    world_size = _world_size(item, sizes)
    if hosts not in (1, 2) or world_size % hosts:
        raise ValueError(f"hosts is {hosts!r}; it is 1 or 2, and divides the number of ranks, {world_size}")
    if wire is not None and (hosts == 1 or not isinstance(wire, Wire)):
        raise ValueError(f"wire is {wire!r}; it is a pipegrid.testing.Wire, between hosts=2")
    if hosts > 1 and backend is None:
        backend = "gloo"
    if hosts > 1 and backend != "gloo":
        raise ValueError(f"backend is {backend!r}; two hosts are connected by gloo")
    return Settings(
        world_size=world_size,
        hosts=hosts,
        wire=wire or Wire(),
        backend=_one_of(BACKENDS, _chosen(item, backend, "backend"), "backend"),
        deadline=_deadline(_chosen(item, deadline, "deadline")),
        strict_sends=bool(_chosen(item, strict_sends, "strict_sends")),
        fake_nccl=_one_of(FAKE_NCCL, _chosen(item, fake_nccl, "fake_nccl"), "fake_nccl"),
    )


def _chosen(item: pytest.Item, marked: object, option: str) -> Any:
    """The value of the mark, else of the command line, else of the ini file."""
    if marked is not None:
        return marked
    given: object = item.config.getoption(option)
    return item.config.getini(f"ranks_{option}") if given is None else given


def _world_size(item: pytest.Item, sizes: tuple[object, ...]) -> int:
    n = next(iter(sizes), None)
    if len(sizes) > 1:
        # Tests are multiplied by sizes when they are collected, by the marks of their function, class and module.
        callspec = getattr(item, "callspec", None)
        if callspec is None or WORLD_SIZE not in callspec.params:
            raise ValueError(f"several numbers of ranks, got {sizes}, belong on a function, a class or a module")
        n = callspec.params[WORLD_SIZE]
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"a number of ranks is an integer of at least 1, got {n!r}")
    return n


def _one_of(choices: tuple[str, ...], value: str, what: str) -> str:
    if value not in choices:
        raise ValueError(f"{what} {value!r} is unknown; use one of {', '.join(choices)}")
    return value


def _deadline(value: float | str) -> float:
    seconds = float(value)  # an ini file holds text
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"a deadline is a number of seconds above 0 and up to {_LONGEST:.0f} (a week), got {value!r}")
    return seconds
