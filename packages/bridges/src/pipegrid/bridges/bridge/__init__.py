"""The bridge between two modules on grids of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.bridges.bridge.wiring import BridgeWiring, with_lanes
from pipegrid.bridges.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.bridges.bridge.communicator import BridgeCommunicator, lane_config, renew_lanes
    from pipegrid.bridges.bridge.receive import BridgeReceive, BridgeSend

__all__ = [
    "BridgeCommunicator",
    "BridgeReceive",
    "BridgeSend",
    "BridgeWiring",
    "lane_config",
    "renew_lanes",
    "with_lanes",
]

__getattr__ = lazy_names(
    __name__,
    {
        "BridgeCommunicator": "communicator",
        "BridgeReceive": "receive",
        "BridgeSend": "receive",
        "lane_config": "communicator",
        "renew_lanes": "communicator",
    },
)
