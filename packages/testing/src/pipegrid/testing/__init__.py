"""Pytest plugin: run a test on N ranks, with faults, on one machine.

Errors outside ``__all__`` are imported from here as well.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipegrid.testing.faults import Fault, FaultError as FaultError, InjectedFault
    from pipegrid.testing.pool import PoolError as PoolError
    from pipegrid.testing.ranks import Ranks

__all__ = ["Fault", "InjectedFault", "Ranks"]

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
