"""A lane: one channel from one rank to another, first in, first out."""

from pipegrid.transport.lane.lane import Lane

__all__ = ["Lane"]
