"""One rank's part in a reshard plan, worked out once. Pure; no torch."""

from __future__ import annotations

import itertools
from functools import cached_property

from attrs import frozen

from pipegrid.reshard.box import Box
from pipegrid.reshard.plan import Completion, ReshardPlan


@frozen(slots=False, eq=False)
class RankPart:
    """The sends, receives, sums and completions of one rank.

    Attributes:
        plan: the plan that the rank runs a part of.
        rank: the global rank.

    Examples:
        >>> from pipegrid.topology import place
        >>> grids = place({"images": {"dp": 3}, "language": {"dp": 2}}, world_size=5)
        >>> sides = boundary_side(grids["images"], "source"), boundary_side(grids["language"], "destination")
        >>> part = RankPart(plan_reshard(*sides, Sizes((6, 8), axes=axis_names(2))), rank=1)
        >>> part.source_shape, sorted(part.sends)
        ((2, 8), [3, 4])
    """

    plan: ReshardPlan
    rank: int

    @cached_property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the rank gives."""
        return self.plan.source_shape(self.rank)

    @cached_property
    def destination_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the rank gets."""
        return self.plan.destination_shape(self.rank)

    @cached_property
    def sends(self) -> dict[int, tuple[Box, ...]]:
        """The boxes of the rank's tensor that go to each receiving rank, ascending."""
        return {peer: tuple(m.source_box for m in ms) for peer, ms in self.plan.sends(self.rank).items()}

    @cached_property
    def receives(self) -> dict[int, tuple[Box, ...]]:
        """The boxes of the rank's tensor that arrive from each sending rank, ascending."""
        return {peer: tuple(m.destination_box for m in ms) for peer, ms in self.plan.receives(self.rank).items()}

    @cached_property
    def whole_from(self) -> int | None:
        """The rank whose only message is all that this rank gets; None where several messages or copies make it."""
        if len(self.receives) != 1 or self.completions:
            return None
        ((peer, boxes),) = self.receives.items()
        return peer if len(boxes) == 1 and boxes[0].shape == self.destination_shape else None

    @cached_property
    def joined_along(self) -> int | None:
        """The axis along which the pieces, in the order of `receives_in_order`, make up what this rank gets; or None.

        None where copies complete it, or where the pieces do not join along one axis. Pieces that fill the tensor once
        and of which each starts along an axis where the ones before it end are slices of it.
        """
        boxes = [self.receives[peer] for peer in self.receives_in_order]
        if self.completions or len(boxes) < 2 or any(len(own) != 1 for own in boxes):
            return None
        pieces = [own[0] for own in boxes]
        for axis in range(len(self.destination_shape)):
            ends = itertools.accumulate((piece.shape[axis] for piece in pieces[:-1]), initial=0)
            if [piece.start[axis] for piece in pieces] == [*ends]:
                return axis
        return None

    @cached_property
    def receives_in_order(self) -> tuple[int, ...]:
        """The sending ranks in the order in which their first boxes lie in the rank's tensor."""
        return tuple(sorted(self.receives, key=lambda peer: self.receives[peer][0].start))

    @cached_property
    def reductions(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks with which the rank first adds up partial sums."""
        return tuple(ranks for ranks in self.plan.reductions if self.rank in ranks)

    @cached_property
    def completions(self) -> tuple[Completion, ...]:
        """The completions that the rank takes part in."""
        return tuple(step for step in self.plan.completions if self.rank in step.ranks)
