"""Point-to-point lanes between pipeline stages.

The names that need torch are loaded on first use, so planning works where torch is absent.

Names outside ``__all__`` (rarer errors, parts of lanes and of communicators) are imported from here as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.core.lazy import lazy_names
from pipegrid.transport.base import Communicator, Port as Port, Verbs as Verbs, as_communicator as as_communicator
from pipegrid.transport.config import P2PConfig
from pipegrid.core.edge import Direction as Direction, Edge
from pipegrid.transport.errors import (
    CollectiveFailedError as CollectiveFailedError,
    P2PError,
    P2PLaneDeadError as P2PLaneDeadError,
    P2PMismatchError as P2PMismatchError,
    P2PPeerError as P2PPeerError,
    P2PTimeoutError,
    P2PUsageError as P2PUsageError,
)
from pipegrid.transport.job import JobTopology as JobTopology
from pipegrid.core.lanes import LaneSpec as LaneSpec, LaneStats as LaneStats, pipeline_lanes as pipeline_lanes
from pipegrid.transport.protocol import (
    Handle as Handle,
    Payload as Payload,
    PipelineCommunicator,
    ReceiveHandle as ReceiveHandle,
    ReusableReceive as ReusableReceive,
)

if TYPE_CHECKING:
    from pipegrid.transport.communicator import P2PCommunicator
    from pipegrid.transport.lane.lane import Lane as Lane
    from pipegrid.transport.control.lanes import Lanes as Lanes
    from pipegrid.transport.control.opening import open_lanes as open_lanes
    from pipegrid.transport.messages.payload import is_single_shape as is_single_shape

__all__ = [
    "Communicator",
    "Edge",
    "P2PCommunicator",
    "P2PConfig",
    "P2PError",
    "P2PTimeoutError",
    "PipelineCommunicator",
]

__getattr__, __dir__ = lazy_names(__name__, __all__)
