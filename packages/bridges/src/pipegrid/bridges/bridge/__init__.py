"""The bridge between two modules on grids of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.bridges.bridge.wiring import BridgeWiring, with_lanes
from pipegrid.topology.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.bridges.bridge.communicator import BridgeCommunicator, lane_config, renew_lanes
    from pipegrid.bridges.bridge.receive import BridgeReceive, BridgeSend, Landed, PostedReceives
    from pipegrid.bridges.bridge.traffic import EdgeTraffic, new_stream

_OF_COMMUNICATOR = ("BridgeCommunicator", "lane_config", "renew_lanes")
_OF_RECEIVE = ("BridgeReceive", "BridgeSend", "Landed", "PostedReceives")
_OF_TRAFFIC = ("EdgeTraffic", "new_stream")

__all__ = [
    "BridgeCommunicator",
    "BridgeReceive",
    "BridgeSend",
    "BridgeWiring",
    "EdgeTraffic",
    "Landed",
    "PostedReceives",
    "lane_config",
    "new_stream",
    "renew_lanes",
    "with_lanes",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    __all__,
    {
        **dict.fromkeys(_OF_COMMUNICATOR, "communicator"),
        **dict.fromkeys(_OF_RECEIVE, "receive"),
        **dict.fromkeys(_OF_TRAFFIC, "traffic"),
    },
)
