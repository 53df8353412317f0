"""The bridge between two modules on grids of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.bridges.bridge.wiring import BridgeWiring, group_spec, with_lanes
from pipegrid.topology.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.bridges.bridge.communicator import BridgeCommunicator, lane_config, renew_lanes
    from pipegrid.bridges.bridge.receive import (
        BridgeReceive,
        BridgeSend,
        LandingQueue,
        first_failure,
        holds_host,
        new_stream,
        whole_message,
    )

__all__ = [
    "BridgeCommunicator",
    "BridgeReceive",
    "BridgeSend",
    "BridgeWiring",
    "LandingQueue",
    "first_failure",
    "group_spec",
    "holds_host",
    "lane_config",
    "new_stream",
    "renew_lanes",
    "whole_message",
    "with_lanes",
]

_IN_RECEIVE = (
    "BridgeReceive",
    "BridgeSend",
    "LandingQueue",
    "first_failure",
    "holds_host",
    "new_stream",
    "whole_message",
)

__getattr__, __dir__ = lazy_names(
    __name__,
    __all__,
    {
        **dict.fromkeys(("BridgeCommunicator", "lane_config", "renew_lanes"), "communicator"),
        **dict.fromkeys(_IN_RECEIVE, "receive"),
    },
)
