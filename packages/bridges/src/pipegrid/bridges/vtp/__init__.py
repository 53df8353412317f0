"""Variable tensor parallelism: stages of one pipeline with different tensor-parallel sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.bridges.vtp.topology import VTPTopology
from pipegrid.core.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.bridges.vtp.communicator import VTPCommunicator

__all__ = ["VTPCommunicator", "VTPTopology"]

__getattr__, __dir__ = lazy_names(__name__, __all__)
