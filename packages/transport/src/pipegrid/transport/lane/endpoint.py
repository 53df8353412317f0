"""One end of a lane, as data: which lane, on which rank, over which connection."""

from __future__ import annotations

import torch
from attrs import field, frozen

from pipegrid.core.lanes import LaneSpec, Tally
from pipegrid.transport.backends import GlooMover
from pipegrid.transport.backends.wire import Wire
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.lane.connection import Connection
from pipegrid.transport.messages.message import Signature


@frozen(eq=False, kw_only=True)
class Endpoint:
    """One end (or, on one rank, both) of a lane: what all parts of it there know.

    Attributes:
        spec: which lane.
        rank: this global rank.
        device: where payloads live.
        config: the settings that the lane was opened with.
        connection: what it shares with others.
        index: its number among all lanes of its communicator.
        standing: the one message of the lane, where it was fixed when the lane was opened.
        tally: what is counted.
    """

    spec: LaneSpec
    rank: int
    device: torch.device
    config: P2PConfig
    connection: Connection
    index: int
    standing: Signature | None = None
    tally: Tally = field(factory=Tally, init=False)

    @property
    def peer(self) -> int:
        """The global rank at the other end."""
        return self.spec.destination if self.rank == self.spec.source else self.spec.source

    @property
    def wire(self) -> Wire | None:
        """Moves headers and end notices; None where both ends are one rank, and in a dry run."""
        return self.connection.wires.get(self.peer)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that floating-point tensors must have; None allows any, as where dtypes are agreed with shapes."""
        found: torch.dtype | None = self.config.pipeline_dtype
        return found if self.config.shape_mode in ("agreed", "given") else None

    @property
    def one_by_one(self) -> bool:
        """Whether each message is started alone: a plain one then needs nothing but its mover."""
        return not self.connection.is_shared and not self.config.strict and self.wire is not None

    @property
    def beside_headers(self) -> bool:
        """Whether a receive is posted beside each header: see `pipegrid.transport.lane.landing`."""
        varies = self.config.shape_mode in ("header", "learned")
        return varies and self.one_by_one and isinstance(self.connection.mover, GlooMover)
