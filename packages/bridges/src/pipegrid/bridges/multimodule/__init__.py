"""One pipeline of many modules: where stages lie, and the traffic between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.bridges.bridge import EdgeOptions
from pipegrid.reshard import Positions, collective_edges, positions_of
from pipegrid.core.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.bridges.multimodule.communicator import MultiModulePipelineCommunicator
    from pipegrid.bridges.multimodule.dict_api import Shape
    from pipegrid.bridges.multimodule.rank_modules import RankModuleInfo

__all__ = [
    "EdgeOptions",
    "MultiModulePipelineCommunicator",
    "Positions",
    "RankModuleInfo",
    "Shape",
    "collective_edges",
    "positions_of",
]

__getattr__, __dir__ = lazy_names(__name__, __all__)
