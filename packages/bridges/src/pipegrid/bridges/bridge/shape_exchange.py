"""From what source ranks announce of their tensors to the plans of both directions, as one rank needs them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import define, field

from pipegrid.bridges.bridge.announcement import Announcement, LaneSize, lane_size, sizes_of
from pipegrid.bridges.bridge.receive import Passage
from pipegrid.bridges.errors import ShapeError
from pipegrid.bridges.reshard.plan import plan_reshard
from pipegrid.bridges.reshard.side import Side
from pipegrid.bridges.reshard.sizes import AxisNames
from pipegrid.bridges.reshard.strategy import Choice

_MOST_KNOWN = 256  # plans kept for sizes that come back

_Key = tuple[tuple[int, Announcement], ...]


@define(eq=False)
class Agreement:
    """What ``rank`` has worked out for an edge between ``src`` and ``dst``, by what was announced.

    Attributes:
        name: of the edge, for messages.
        src: the side that announces.
        dst: the other side.
        axes: names of the tensor's axes.
        choice: the strategy.
        rank: whose part is planned.
        comm_dtype: dtype on the wire; None is the tensor's own.
    """

    name: str
    src: Side
    dst: Side
    axes: AxisNames
    choice: Choice
    rank: int
    comm_dtype: torch.dtype | None
    _known: dict[_Key, Passage] = field(factory=dict, init=False)

    def passage(self, announced: Mapping[int, Announcement]) -> Passage:
        """Plans for what some source ranks have announced: all that this rank needs to know.

        Raises:
            ShapeError: ranks of one lane differ, lanes differ in more than the batch, or dtypes differ.
        """
        key = tuple(sorted(announced.items(), key=lambda item: item[0]))
        if key in self._known:
            return self._known[key]
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        known = self._known[key] = self._planned(announced)
        return known

    def _planned(self, announced: Mapping[int, Announcement]) -> Passage:
        lanes: dict[int, LaneSize] = {}
        for rank, one in announced.items():
            lane, size = self.src.lane_of(rank), lane_size(self.src, self.axes, one)
            if lanes.setdefault(lane, size) != size:
                raise ShapeError(
                    f"{self.name}: ranks of lane {lane} of {self.src.name!r} send different parts: rank {rank} "
                    f"announced {one}, others {lanes[lane]}; copies are alike and cp cuts evenly"
                )
        dtypes = {one.dtype for one in announced.values()}
        if len(dtypes) != 1:
            raise ShapeError(f"{self.name}: source ranks send different dtypes: {sorted(dtypes)}; use one")
        dtype: torch.dtype = getattr(torch, dtypes.pop())
        wire = self.comm_dtype or dtype
        sizes = sizes_of(self.src, self.axes, lanes)
        forward, backward = (
            plan_reshard(
                self.src,
                self.dst,
                sizes,
                backward=back,
                strategy=self.choice.strategy,
                itemsize=wire.itemsize,
                leader_below=self.choice.leader_below,
                links=self.choice.links,
                rank=self.rank,
            )
            for back in (False, True)
        )
        return Passage(forward, backward, dtype, wire)
