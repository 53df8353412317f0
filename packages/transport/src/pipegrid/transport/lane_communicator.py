"""The base class of communicators whose messages travel on lanes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from pipegrid.transport.base import Communicator
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.control.lanes import Lanes


class LaneCommunicator(Communicator):
    """A communicator whose messages travel on lanes that were opened together.

    Attributes:
        config: settings of the lanes.
        rank: this rank.
        device: where sent payloads must live, and received ones do.
        lanes: this rank's ends.
    """

    config: P2PConfig
    rank: int
    device: torch.device
    lanes: Lanes

    def batch(self) -> AbstractContextManager[None]:
        """Start the sends and receives of the block, by this thread, as one simultaneous batch. See `Lanes.batch`."""
        return self.lanes.batch()

    @property
    def batches(self) -> bool:
        """Whether a batch is more than its messages one by one. See `Lanes.batches`."""
        return self.lanes.batches

    def in_order(self) -> AbstractContextManager[None]:
        """Start transfers of device groups in the order of calls inside the block. See `Lanes.in_order`."""
        return self.lanes.in_order()

    def describe(self) -> Mapping[str, Any]:
        """`Lane.describe` of each lane."""
        return {str(spec): lane.describe() for spec, lane in self.lanes.items()}

    def abort(self, reason: str) -> None:
        """End all lanes at once and tell the neighbours why."""
        self.lanes.abort(reason)

    def close(self) -> None:
        """End the lanes and free their groups; see `Lanes.close`. A second call does nothing."""
        self.lanes.close()
