"""Compares checksums of tensors that should be equal on several ranks; all of them get the same result."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from attrs import define, field

from pipegrid.bridges.collectives import CollectiveWaits
from pipegrid.reshard import BridgeError, Side
from pipegrid.transport.collectives.checksum import checksums
from pipegrid.transport.collectives.extremes import extremes
from pipegrid.transport.collectives.starting import start


@define(eq=False)
class ReplicationCheck:
    """Compares the copies of each replica of ``side``, and the replicas' rows, in the first call and now and then.

    Attributes:
        every: compare again every so many calls; 0 is never again.
        copies: the group of this rank's copies; None where it is the only one.
        everyone: the group of the whole side; all of it learns of a difference: the others would wait for ever.
    """

    side: Side
    rank: int
    every: int
    copies: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None
    waits: CollectiveWaits
    _calls: int = field(default=0, init=False)

    def look(self, tensor: torch.Tensor, rows: int) -> None:
        """Compare, if it is time to; ``rows`` is the extent of the tensor's batch axis. All ranks call this.

        `BridgeError`: the copies of some replica differ, or replicas have different numbers of rows.
        `CollectiveFailedError`: a rank of the side died, or did not join before the deadline.
        """
        due = self._calls == 0 or (self.every > 0 and self._calls % self.every == 0)
        self._calls += 1
        if due:
            self._compare(tensor, rows)

    def _compare(self, tensor: torch.Tensor, rows: int) -> None:
        own = torch.tensor([0, rows], dtype=torch.int64, device=tensor.device)
        if self.copies is not None:
            sums = checksums([tensor, torch.tensor(tensor.shape)], tensor.device)  # of content and shape
            if not torch.equal(*extremes(sums, partial(self._reduce, group=self.copies))):
                own[0] = self.side.lane_of(self.rank) + 1
        largest, smallest = extremes(own, partial(self._reduce, group=self.everyone))
        (wrong, most), (_, least) = largest.tolist(), smallest.tolist()
        if most != least:
            raise BridgeError(f"the replicas of {self.side.name!r} hold between {least} and {most} rows (here {rows})")
        if wrong:
            ranks = [rank for rank in self.side.ranks if self.side.lane_of(rank) == wrong - 1]
            raise BridgeError(
                f"the copies of source replica {wrong - 1} of {self.side.name!r} (ranks {ranks}) hold different "
                "tensors; gather or reduce over tp before communicate()"
            )

    def _reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """The largest of each element over the group, in place; the host waits for it."""
        work = start(dist.all_reduce, tensor, op=dist.ReduceOp.MAX, group=group)
        self.waits.wait(work, dist.get_process_group_ranks(group), group, host=True)
