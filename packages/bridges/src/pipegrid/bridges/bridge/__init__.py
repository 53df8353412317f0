"""The bridge between two modules on grids of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.bridges.bridge.options import EdgeOptions
from pipegrid.bridges.bridge.structure import Axes, Declared, Packed, Whole
from pipegrid.bridges.bridge.wiring import BridgeWiring, Traffic, boundary_sides, checked_traffic, directions_of
from pipegrid.topology.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.bridges.bridge.communicator import BridgeCommunicator, lane_config, renew_lanes
    from pipegrid.bridges.bridge.receive import BridgeReceive, BridgeSend, Filled, PostedReceives
    from pipegrid.bridges.bridge.traffic import EdgeTraffic

__all__ = [
    "Axes",
    "BridgeCommunicator",
    "BridgeReceive",
    "BridgeSend",
    "BridgeWiring",
    "Declared",
    "EdgeOptions",
    "EdgeTraffic",
    "Filled",
    "Packed",
    "PostedReceives",
    "Traffic",
    "Whole",
    "boundary_sides",
    "checked_traffic",
    "directions_of",
    "lane_config",
    "renew_lanes",
]

__getattr__, __dir__ = lazy_names(__name__, __all__)
