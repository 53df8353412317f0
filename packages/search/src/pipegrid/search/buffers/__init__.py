"""The memory in which a step's messages arrive: the fewest slots, proved: none is written while it is read."""

from pipegrid.search.buffers.buffers import PlanBuffers, PositionBuffers
from pipegrid.search.buffers.coloring import plan_buffers, position_buffers
from pipegrid.search.buffers.messages import SlotArrival, ReceivedMessage

__all__ = ["PlanBuffers", "PositionBuffers", "ReceivedMessage", "SlotArrival", "plan_buffers", "position_buffers"]
