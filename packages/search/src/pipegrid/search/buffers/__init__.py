"""The memory of messages, kept copies and offloaded activations: fewest slots, none written while it is read."""

from pipegrid.search.buffers.buffers import PlanBuffers, PositionBuffers
from pipegrid.search.buffers.coloring import plan_buffers, position_buffers
from pipegrid.search.buffers.messages import Buffered, BufferKind, SlotArrival

__all__ = [
    "BufferKind",
    "Buffered",
    "PlanBuffers",
    "PositionBuffers",
    "SlotArrival",
    "plan_buffers",
    "position_buffers",
]
