"""The memory in which a step's messages arrive: the fewest slots, proved: none is written while it is read."""

from pipegrid.buffers.buffers import Buffers, PositionBuffers
from pipegrid.buffers.coloring import plan_buffers, position_buffers
from pipegrid.buffers.messages import Arrival, Message

__all__ = ["Arrival", "Buffers", "Message", "PositionBuffers", "plan_buffers", "position_buffers"]
