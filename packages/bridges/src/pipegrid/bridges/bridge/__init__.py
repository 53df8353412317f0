"""The bridge between two modules on grids of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.bridges.bridge.options import EdgeOptions
from pipegrid.bridges.bridge.structure import Axes, Declared, Folded, Packed, Whole, require_parts
from pipegrid.bridges.bridge.wiring import BridgeWiring, Traffic, boundary_sides, checked_traffic, directions_of
from pipegrid.core.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.bridges.bridge.communicator import BridgeCommunicator, lane_config, renew_lanes
    from pipegrid.bridges.bridge.edge_communicator import EdgeCommunicator
    from pipegrid.bridges.bridge.exchange import Exchange
    from pipegrid.bridges.bridge.leaves import leaves_of
    from pipegrid.bridges.bridge.receive import BridgeReceive, BridgeSend, Filled, PostedReceives
    from pipegrid.bridges.bridge.traffic import EdgeTraffic

__all__ = [
    "Axes",
    "BridgeCommunicator",
    "BridgeReceive",
    "BridgeSend",
    "BridgeWiring",
    "Declared",
    "EdgeCommunicator",
    "EdgeOptions",
    "EdgeTraffic",
    "Exchange",
    "Filled",
    "Folded",
    "Packed",
    "PostedReceives",
    "Traffic",
    "Whole",
    "boundary_sides",
    "checked_traffic",
    "directions_of",
    "lane_config",
    "leaves_of",
    "renew_lanes",
    "require_parts",
]

__getattr__, __dir__ = lazy_names(__name__, __all__)
