"""Pytest plugin: run a test on N ranks, with faults, on one machine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipegrid.testing.faults import Fault, FaultError, InjectedFault
    from pipegrid.testing.pool import PoolError
    from pipegrid.testing.ranks import Ranks

__all__ = ["Fault", "FaultError", "InjectedFault", "PoolError", "Ranks"]

_HOMES = {
    "Fault": "faults",
    "FaultError": "faults",
    "InjectedFault": "faults",
    "PoolError": "pool",
    "Ranks": "ranks",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
