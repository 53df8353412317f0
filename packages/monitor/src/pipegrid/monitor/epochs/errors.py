"""The errors of epochs."""

from __future__ import annotations

from collections.abc import Mapping

from pipegrid.monitor.epochs.records import Alarm
from pipegrid.monitor.monitor import JobFailedError


class RankLostError(RuntimeError):
    """The current epoch ends: ranks are lost, or a rank calls for a vote.

    Attributes:
        dead: the lost ranks, with reasons; empty where a rank calls for a vote for another reason.
        where: the work of this rank at that time.

    Examples:
        >>> RankLostError({1: "no heartbeat"}, where="step 7").dead
        {1: 'no heartbeat'}
    """

    def __init__(self, dead: Mapping[int, str], where: str, why: str = "") -> None:
        self.dead, self.where, self.why = dict(dead), where, why
        super().__init__(f"{where}: {Alarm(self.dead, why)}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the arguments."""
        return type(self), (self.dead, self.where, self.why)


class FencedError(JobFailedError):
    """The other ranks go on without this one, which they took for dead, or which has retired.

    Examples:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> first, second = Epochs(store, rank=0, ranks=[0]), Epochs(store, rank=0, ranks=[0])
        >>> second.done("step 0")
        Traceback (most recent call last):
            ...
        pipegrid.monitor.epochs.errors.FencedError: rank 0 is outside of the job, and the others go on without it:
            join() has not returned
    """
