"""Point-to-point lanes between pipeline stages.

The names that need torch are loaded on first use, so planning works where torch is absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.topology.lazy import lazy_names
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.errors import (
    LaneSpecError,
    P2PConfigError,
    P2PError,
    P2PLaneDeadError,
    P2PMismatchError,
    P2PPayloadError,
    P2PPeerError,
    P2PTimeoutError,
    P2PUsageError,
)
from pipegrid.transport.pipeline_lanes import pipeline_lanes
from pipegrid.transport.protocol import Handle, Payload, PipelineCommunicator, ReceiveHandle, ReusableReceive
from pipegrid.transport.spec import LaneSpec, LaneStats

if TYPE_CHECKING:
    from pipegrid.transport.communicator import P2PCommunicator
    from pipegrid.transport.lane import Lane
    from pipegrid.transport.opening import Lanes, open_lanes
    from pipegrid.transport.payload import is_single_shape

__all__ = [
    "Direction",
    "Edge",
    "Handle",
    "Lane",
    "LaneSpec",
    "LaneSpecError",
    "LaneStats",
    "Lanes",
    "P2PCommunicator",
    "P2PConfig",
    "P2PConfigError",
    "P2PError",
    "P2PLaneDeadError",
    "P2PMismatchError",
    "P2PPayloadError",
    "P2PPeerError",
    "P2PTimeoutError",
    "P2PUsageError",
    "Payload",
    "PipelineCommunicator",
    "ReceiveHandle",
    "ReusableReceive",
    "is_single_shape",
    "open_lanes",
    "pipeline_lanes",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    __all__,
    {
        "Lane": "lane",
        "Lanes": "opening",
        "P2PCommunicator": "communicator",
        "is_single_shape": "payload",
        "open_lanes": "opening",
    },
)
