"""Pytest plugin: run a test on N ranks, with faults, on one machine. No torch.

Errors outside ``__all__`` are imported from here as well.
"""

from pipegrid.testing.faults import Fault, FaultError as FaultError, InjectedFault
from pipegrid.testing.hosts import HostsError as HostsError
from pipegrid.testing.pool import PoolError as PoolError
from pipegrid.testing.ranks import Ranks
from pipegrid.testing.wire import CUT, Wire

__all__ = ["CUT", "Fault", "InjectedFault", "Ranks", "Wire"]
