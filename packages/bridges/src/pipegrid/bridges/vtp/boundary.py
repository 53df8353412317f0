"""The boundary between two stages of different tensor-parallel sizes: who sends what to whom. Pure; no torch.

Each data replica of the pipeline has boundaries of its own. A side either holds copies of the tensor (tensor
parallelism) or consecutive parts of its sequence (sequence parallelism). Both are cases of the reshard plan, which is
made for the tensor seen as ``[before, sequence, after]``: see `Folded`.

Activations and gradients are two edges, each with a source and a destination: nothing ties the one to the other.
"""

from __future__ import annotations

from attrs import frozen

from pipegrid.bridges.bridge import BridgeWiring, Folded
from pipegrid.core.edge import Direction, Edge
from pipegrid.reshard import Placement, Replicate, Shard, Side
from pipegrid.reshard.side import SideDim


@frozen
class VTPStage:
    """One replica of one stage: its ranks, and whether they hold parts of the sequence in place of copies."""

    name: str
    ranks: tuple[int, ...]
    cuts_sequence: bool = False

    @property
    def parts(self) -> int:
        """Number of parts in which the ranks hold the sequence."""
        return len(self.ranks) if self.cuts_sequence else 1

    @property
    def side(self) -> Side:
        """The stage as a side of a boundary."""
        placement: Placement = Shard("s") if self.cuts_sequence else Replicate()
        size = len(self.ranks)
        return Side(self.name, 0, (SideDim("tp", size, 1, placement),) if size > 1 else (), members=self.ranks)


@frozen
class VTPBoundary:
    """The boundary from ``source``, which makes the activation, to ``destination``; ``axis`` is the sequence's.

    ``edge`` is in numbers of plan stages: the edge that closes a ring of P stages is ``Edge(P - 1, P)``.
    """

    edge: Edge
    source: VTPStage
    destination: VTPStage
    axis: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both sides."""
        return (*self.source.ranks, *self.destination.ranks)

    def ends(self, direction: Direction) -> tuple[VTPStage, VTPStage]:
        """The side that sends in that direction, and the one that receives."""
        both = self.source, self.destination
        return both if direction is Direction.FORWARD else both[::-1]

    def tensor(self, direction: Direction) -> Folded:
        """The declaration of the tensor that is sent in that direction."""
        giver, taker = self.ends(direction)
        return Folded(f"boundary {self.edge}", self.axis, ((giver.name, giver.parts), (taker.name, taker.parts)))

    def wiring(self, label: str, rank: int, direction: Direction) -> BridgeWiring:
        """The lanes and groups of ``rank`` for that direction, named after ``label``."""
        ways = {Direction.FORWARD: f"{self.edge}", Direction.BACKWARD: f"{self.edge} gradients"}
        giver, taker = self.ends(direction)
        sides, axes = (giver.side, taker.side), self.tensor(direction).names
        return BridgeWiring(f"{label}/{ways[direction]}", *sides, axes, "direct", (Direction.FORWARD,), rank)
