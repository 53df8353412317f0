"""The connection that the lanes of one communicator share."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import define, field
from torch.distributed import ProcessGroup

from pipegrid.topology.torch_compat import is_destroying
from pipegrid.transport.backends import Mover
from pipegrid.transport.backends.wire import ControlWire
from pipegrid.transport.waits.aborts import Abort, device_aborts

if TYPE_CHECKING:
    import torch


@define(eq=False)
class Connection:
    """The mover, the wires and the group that the lanes of one communicator share."""

    mover: Mover  # moves their payloads
    # Move headers and end notices, by the rank at the other end; none where that is this rank, and in a dry run.
    wires: Mapping[int, ControlWire] = field(factory=dict)
    group: ProcessGroup | None = None  # the process group of the payloads; None where both ends are one rank
    is_shared: bool = False  # the communicator has several lanes, not all of them of this rank
    # Receives are posted under it, so that a transfer waits for its buffer and for no computing; None is the caller's
    # stream.
    receive_stream: torch.Stream | None = None
    lanes: list[Any] = field(factory=list)  # this rank's ends, each a `LaneEnding`
    aborting: Abort | None = None  # the abort of a device group, once it has begun
    told: bool = False  # the other sides know of the end
    _held: deque[torch.Tensor] = field(factory=deque, init=False)

    def tell_closed(self) -> None:
        """Tell the other sides, which have not ended the lanes, that this one closes them."""
        text = ", ".join(f"lane {lane.spec} was closed on rank {lane.rank}" for lane in self.lanes)
        for wire in self.wires.values():
            self.told = True
            wire.post_end_notice("closed", text)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Hold tensors of transfers that failed: the device may write to them until the abort has returned."""
        if self.mover.streams:
            self._held.extend(tensors)
            self._hand_over()

    def abort(self, cause: str) -> None:
        """Begin to abort the messages under way."""
        if not self.mover.streams:
            self.mover.abort()
            return
        if is_destroying() and not any(lane.queue for lane in self.lanes):
            return  # the other side has ended its groups and left, and torch ends those of this side
        key = self.mover if self.group is None else self.group
        (self.aborting,) = device_aborts.start({key: self.mover.abort}, cause)
        self._hand_over()

    def _hand_over(self) -> None:
        while self.aborting is not None and self._held:
            with contextlib.suppress(IndexError):  # another thread took it
                self.aborting.keep(self._held.popleft())
