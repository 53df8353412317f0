"""What a lane has done, counted. No torch."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class LaneStats:
    """Counts of one end of a lane since it was opened.

    Attributes:
        messages: payloads sent, or received.
        transfers: tensors that went over the wire for them.
        bytes: their size.
        headers: announcements sent or received beside them, on a CPU group.
        host_syncs: times the host had to wait for something other than the payload it asked for: a header, or
            a device.
        allocations: receives that got new buffers. Where buffers are given back, this is how many were ever in
            use at once.
        live: receives whose buffers were not given back.
    """

    messages: int = 0
    transfers: int = 0
    bytes: int = 0
    headers: int = 0
    host_syncs: int = 0
    allocations: int = 0
    live: int = 0


class Tally:
    """The counts while they grow. What the steady state sends is counted by its numbers alone (see `Lane.stats`)."""

    def __init__(self) -> None:
        self.messages = 0
        self.transfers = 0
        self.bytes = 0
        self.headers = 0
        self.host_syncs = 0
        self.allocations = 0
        self.released = 0
