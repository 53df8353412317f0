"""Pytest plugin: run a test on N ranks, with faults, on one machine. No torch.

Errors outside ``__all__`` are imported from here as well.
"""

from pipegrid.testing.faults import Fault, FaultError as FaultError, InjectedFault
from pipegrid.testing.pool import PoolError as PoolError
from pipegrid.testing.ranks import Ranks

__all__ = ["Fault", "InjectedFault", "Ranks"]
