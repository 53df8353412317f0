"""The events of a job that survives: deaths of ranks, and new processes in their places."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from attrs import frozen

from pipegrid.topology.world import require_default_group

if TYPE_CHECKING:
    from pipegrid.monitor.epochs import Verdict


@frozen
class Survived:
    """A death that the job has survived, or new processes that have joined.

    Attributes:
        key: of the function that was running here.
        verdict: the vote result: who is dead and why, who has joined, the epoch since then, and whether the function
            was done by all that live.
        seconds: from the first sign of it on this rank until the ranks have agreed.

    Examples:
        >>> from pipegrid.monitor import Epoch, Verdict
        >>> Survived("step 7", Verdict(Epoch(1, (0, 2)), {1: "no heartbeat"}, (), 7), seconds=0.4).verdict.dead
        {1: 'no heartbeat'}
    """

    key: str
    verdict: Verdict
    seconds: float

    def __str__(self) -> str:
        """One line, for a log."""
        epoch, dead = self.verdict.epoch, self.verdict.dead
        lost = [f"rank {rank} is dead ({why})" for rank, why in sorted(dead.items())]
        came = [f"a new process of rank {rank} has come" for rank in self.verdict.joined]
        done = "was done by all others" if self.verdict.committed else "is done again"
        return (
            f"epoch {epoch.number}: {'; '.join(lost + came)}; {self.key} {done}, {len(epoch.members)} ranks go on, "
            f"{self.seconds:.2f} s after this rank noticed"
        )


def print_once(event: Survived) -> None:
    """Print a line to stderr, on the lowest living rank."""
    if require_default_group()[0] == event.verdict.epoch.members[0]:
        print(event, file=sys.stderr, flush=True)  # noqa: T201 -- the line that a person looks for
